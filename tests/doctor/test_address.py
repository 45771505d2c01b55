"""Addresses: what is read, and the three answers to one that leads nowhere."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from ray import _raylet
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from raydist.doctor.address import Address, AddressError, check_answers, check_is_ray, parse_address
from raydist.errors import ConfigError
from tests.support import free_port


@pytest.mark.parametrize(
    ("text", "host", "port", "shown"),
    [
        ("10.0.0.1:6379", "10.0.0.1", 6379, "10.0.0.1:6379"),
        ("head.example.org:1", "head.example.org", 1, "head.example.org:1"),
        ("ray-head_svc:65535", "ray-head_svc", 65535, "ray-head_svc:65535"),
        ("[::1]:6379", "::1", 6379, "[::1]:6379"),
        ("[fe80::1%eth0]:6379", "fe80::1%eth0", 6379, "[fe80::1%eth0]:6379"),
        ("ray://head:10001", "head", 10001, "head:10001"),
        ("http://[fd00::2]:8265/", "fd00::2", 8265, "[fd00::2]:8265"),
    ],
)
def test_an_address_is_read_and_shown(text: str, host: str, port: int, shown: str) -> None:
    found = parse_address(text)
    assert (found.host, found.port, str(found)) == (host, port, shown)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "write HOST:PORT"),
        ("10.0.0.1", "write HOST:PORT"),
        ("::1", r"the port is missing; write \[::1\]:6379"),
        ("fe80::1", r"the port is missing; write \[fe80::1\]:6379"),
        ("[::1]", r"the port is missing; write \[::1\]:6379"),
        ("::1:6379", r"an IPv6 address goes in brackets; write \[::1\]:6379"),
        ("fd00::a:b:6379", r"an IPv6 address goes in brackets; write \[fd00::a:b\]:6379"),
        ("[10.0.0.1]:6379", "in brackets is no IPv6 address"),
        ("10.0.0.300:6379", "'10.0.0.300' is no host name and no IPv4 address"),
        ("a b:6379", "'a b' is no host name"),
        (":6379", "'' is no host name"),
        ("head:", "the port is '', and 1 to 65535"),
        ("head:ray", "the port is 'ray'"),
        ("head:0", "the port is '0'"),
        ("head:65536", "the port is '65536'"),
        ("ftp://head:21", "ftp:// is none of ray://"),
        ("head:6379:1", "write HOST:PORT"),
    ],
)
def test_a_malformed_one_says_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"address .* is malformed: .*{words}"):
        parse_address(text)


def test_nobody_listens() -> None:
    with pytest.raises(AddressError, match=r"^127.0.0.1:\d+ refused: .*is the head node up"):
        check_answers(parse_address(f"127.0.0.1:{free_port()}"))


def test_a_name_that_nobody_knows_is_malformed() -> None:
    with pytest.raises(ConfigError, match=r"is malformed: nobody knows a host 'no-such-host.invalid'"):
        check_answers(parse_address("no-such-host.invalid:6379"))


@pytest.fixture
def full() -> Iterator[int]:
    """A port whose queue of connections is full: nobody answers there, as behind a firewall that drops."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = int(listener.getsockname()[1])
        with socket.create_connection(("127.0.0.1", port)):
            yield port


def test_no_answer_in_time(full: int) -> None:
    with pytest.raises(AddressError, match=rf"^127.0.0.1:{full} timed out: no answer in 0.3 s: a firewall may drop"):
        check_answers(parse_address(f"127.0.0.1:{full}"), timeout_s=0.3)


def test_something_else_listens_there() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        address = parse_address(f"127.0.0.1:{listener.getsockname()[1]}")
        check_answers(address)
        began = time.monotonic()
        with pytest.raises(AddressError, match=r"timed out: something listens there and did not answer as Ray's head node"):
            check_is_ray(address, timeout_s=0.5)
        assert time.monotonic() - began < 5


class Head(gcs_service_pb2_grpc.NodeInfoGcsServiceServicer):
    """Answers as Ray's head node does, to those with the right token."""

    def CheckAlive(self, request: Any, context: Any) -> Any:
        if dict(context.invocation_metadata()).get("authorization") != "Bearer right":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return gcs_service_pb2.CheckAliveReply()


@contextmanager
def serving(servicer: Any) -> Iterator[Address]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    if servicer is not None:
        gcs_service_pb2_grpc.add_NodeInfoGcsServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield parse_address(f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("token", "words"),
    [("right", None), ("wrong", "another token than this machine's"), ("", "a token, and this machine has none")],
)
def test_a_head_node_that_wants_a_token(token: str, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"authorization": f"Bearer {token}"} if token else {}
    loader = SimpleNamespace(get_token_for_http_header=lambda ignore_auth_mode: mine)
    monkeypatch.setattr(_raylet, "AuthenticationTokenLoader", SimpleNamespace(instance=lambda: loader))
    with serving(Head()) as address:
        if words is None:
            check_is_ray(address)
        else:
            with pytest.raises(AddressError, match=f"refused: the cluster wants {words}: copy the head node's"):
                check_is_ray(address)


def test_another_server_of_the_same_protocol() -> None:
    with (
        serving(None) as address,
        pytest.raises(AddressError, match=r"refused: .* is no Ray head node of this version \(UNIMPL"),
    ):
        check_is_ray(address)
