"""Data in an object store: a real server, on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raydist.data.opening import open_eval
from raydist.data.source import Position
from raydist.errors import DataError
from tests.data.files import dataset, global_batches, opened, write_parquet
from tests.support import free_port


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An S3 server of this process with a bucket `data`; gives its endpoint."""
    import boto3
    from moto.server import ThreadedMotoServer

    port = free_port()
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    running.start()
    endpoint = f"http://127.0.0.1:{port}"
    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
    )
    client.create_bucket(Bucket="data")
    yield endpoint
    running.stop()


@pytest.fixture
def uri(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder `s3://data/set` of three parquet files, as a URI that pyarrow reads."""
    import boto3

    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    client = boto3.client("s3", endpoint_url=server)
    for file in write_parquet(tmp_path / "d", 103).iterdir():
        client.upload_file(str(file), "data", f"set/{file.name}")
    client.put_object(Bucket="data", Key="text/a.csv", Body=b"id,x\n0,1\n1,2\n2,3\n")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    return "s3://data/set"


def test_a_bucket_reads_like_a_folder(uri: str, tmp_path: Path) -> None:
    local = global_batches(dataset(tmp_path / "d", shuffle={"window": 20}), 10, stop=2)
    assert global_batches(dataset(uri, shuffle={"window": 20}), 10, 2, stop=2) == local
    assert global_batches(dataset(f"{uri}/*.parquet", shuffle={"window": 20}), 10, 1, Position(0, 5), 2) == local[5:]
    shares = [open_eval(dataset(uri), batch_size=9, rank=rank, world_size=2) for rank in range(2)]
    seen = [row for source in shares for b in source.batches() for row in b.batch["id"].tolist()]
    assert seen == list(range(103))
    assert opened(dataset(uri), 10).fingerprint() == opened(dataset(tmp_path / "d"), 10).fingerprint()


def test_the_endpoint_may_be_in_the_uri(uri: str, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    place = server.removeprefix("http://")
    config = dataset(f"s3://data/text?endpoint_override={place}&scheme=http")
    assert global_batches(config, 2) == [[0, 1], [2]]


def test_what_is_not_there(uri: str) -> None:
    with pytest.raises(DataError, match=r"s3://data/nothing: no such file or folder"):
        opened(dataset("s3://data/nothing", format="parquet"), 10)
    with pytest.raises(DataError, match=r"s3://nobucket/x"):
        opened(dataset("s3://nobucket/x", format="parquet"), 10)
