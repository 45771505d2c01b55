"""cluster.yaml against Ray's own schema, and jobs/kuberay.yaml against what KubeRay accepts."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster.yaml"
RAYJOB = Path(__file__).with_name("rayjob-v1.schema.json.gz")
"""KubeRay's helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml (commit feeaf72, Apache-2.0): v1, less descriptions and
status."""


def variants() -> dict[str, dict[str, Any]]:
    """The file as it is, and with each commented variant in the place of its keys; null removes one."""
    text = CLUSTER.read_text()
    base = yaml.safe_load(text)
    found = {"aws": base}
    for name, block in re.findall(r"^# -- ([\w-]+):.*?\n(.*?)^# -- end$", text, re.MULTILINE | re.DOTALL):
        other = yaml.safe_load(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
        found[name] = {key: value for key, value in {**base, **other}.items() if value is not None}
    return found


def test_all_three_are_there() -> None:
    assert {name: config["provider"]["type"] for name, config in variants().items()} == {
        "aws": "aws",
        "gcp": "gcp",
        "on-premise": "local",
    }


@pytest.mark.parametrize("name", ["aws", "gcp", "on-premise"])
def test_ray_takes_the_cluster_file(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = variants()[name]
    filled = prepare_config(config)  # what `ray up` does with it first
    validate_config(filled)
    with pytest.raises(jsonschema.ValidationError):
        validate_config({**filled, "idle_timeout_minute": 5})
    if name != "on-premise":
        workers = config["available_node_types"]["gpu"]
        assert workers["resources"]["GPU"] > 0 and 0 <= workers["min_workers"] < workers["max_workers"] <= config["max_workers"]
        assert config["idle_timeout_minutes"] > 0


@pytest.mark.parametrize("name", ["aws", "gcp", "on-premise"])
def test_the_cluster_is_closed_to_the_world(name: str) -> None:
    config = variants()[name]
    starts = [
        command for kind in ("head", "worker") for command in config[f"{kind}_start_ray_commands"] if "ray start" in command
    ]
    assert len(starts) == 2 and all("RAY_AUTH_MODE=token ray start" in command for command in starts)
    assert re.search(r"--dashboard-host=(\S+)", starts[0])[1] == "127.0.0.1"  # type: ignore[index]
    assert "--env RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    if name == "aws":
        rules = config["provider"]["security_group"]["IpPermissions"]
        assert [(rule["FromPort"], rule["ToPort"]) for rule in rules] == [(22, 22)]
        assert "0.0.0.0/0" not in str(rules)


def test_the_versions_are_those_that_are_tested() -> None:
    ray = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]  # type: ignore[index]
    assert f":{ray}-" in yaml.safe_load(CLUSTER.read_text())["docker"]["image"]
    kuberay = ROOT / "jobs/kuberay.yaml"
    assert yaml.safe_load(kuberay.read_text())["spec"]["rayClusterSpec"]["rayVersion"] == ray
    assert f"rayproject/ray:{ray}-" in kuberay.read_text()


def test_the_rayjob_runs_a_job_with_a_token_and_shared_storage() -> None:
    job = yaml.safe_load((ROOT / "jobs/kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in pods):
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {"shared": "/mnt/shared", "shm": "/dev/shm"}
        assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    assert (ROOT / re.search(r"train (\S+)", job["spec"]["entrypoint"])[1]).exists()  # type: ignore[index]
    assert "storage=/mnt/shared/" in job["spec"]["entrypoint"]
    assert isinstance(yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"], str)


def test_kuberay_takes_the_rayjob() -> None:
    schema = closed(json.loads(gzip.decompress(RAYJOB.read_bytes())))
    job = yaml.safe_load((ROOT / "jobs/kuberay.yaml").read_text())
    jsonschema.validate(job, schema)
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplica"] = 4
    with pytest.raises(jsonschema.ValidationError, match="maxReplica"):
        jsonschema.validate(job, schema)


def closed(schema: Any) -> Any:
    """The schema with unknown keys refused, which the API server would silently drop."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    fields = schema.get("properties")
    if isinstance(fields, dict) and schema.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made
