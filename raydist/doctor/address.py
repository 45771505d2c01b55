"""A cluster's address: read, and tried, before Ray is asked; Ray itself takes up to 40 s to say that nobody answers."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Any

from raydist.errors import ConfigError, RaydistError

_SCHEMES = ("ray", "http", "https")
_HOST_PORT = re.compile(
    r"(?:(?P<scheme>[a-z][a-z0-9+.-]*)://)?(?:\[(?P<six>[^\[\]]*)\]|(?P<host>[^\[\]/:]*)):(?P<port>[^:/]*)/?"
)
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")

CONNECT_S = 5.0


class AddressError(RaydistError):
    """Nobody answers at a well-formed address: `found` says refused or timed out, `todo` what to do."""

    def __init__(self, found: str, todo: str) -> None:
        super().__init__(f"{found}: {todo}")
        self.found, self.todo = found, todo


@dataclass(frozen=True)
class Address:
    """Where a cluster listens; `host` without brackets."""

    scheme: str | None
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, port: int = 6379) -> Address:
    """`HOST:PORT`, `[IPv6]:PORT`, or a URL of the two. ConfigError ("malformed") says what is wrong; `port` is its example."""
    found = _HOST_PORT.fullmatch(text.strip())
    if found is None:
        head, _, digits = text.strip().rpartition(":")
        if _is_ip(head, 6) and digits.isdigit():
            raise ConfigError(f"address {text!r} is malformed: an IPv6 address goes in brackets; write [{head}]:{digits}")
        bare = text.strip().strip("[]")
        if _is_ip(bare, 6):
            raise ConfigError(f"address {text!r} is malformed: the port is missing; write [{bare}]:{port}")
        raise ConfigError(f"address {text!r} is malformed: write HOST:PORT, such as 10.0.0.1:{port} or [fd00::1]:{port}")
    scheme, host, digits = found["scheme"], found["six"] or found["host"] or "", found["port"]
    if scheme is not None and scheme not in _SCHEMES:
        raise ConfigError(f"address {text!r} is malformed: {scheme}:// is none of {', '.join(s + '://' for s in _SCHEMES)}")
    if not re.fullmatch(r"\d{1,5}", digits) or not 1 <= int(digits) <= 65535:
        raise ConfigError(f"address {text!r} is malformed: the port is {digits!r}, and 1 to 65535 is allowed")
    if found["six"] is not None and not _is_ip(host, 6):
        raise ConfigError(f"address {text!r} is malformed: {host!r} in brackets is no IPv6 address")
    if found["six"] is None and not (_is_ip(host, 4) if re.fullmatch(r"[\d.]+", host) else _NAME.fullmatch(host)):
        raise ConfigError(f"address {text!r} is malformed: {host!r} is no host name and no IPv4 address")
    return Address(scheme, host, int(digits))


def _is_ip(text: str, version: int) -> bool:
    """Whether `text` is an IP address of this version; IPv6 may end with a zone (`%eth0`)."""
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def check_answers(address: Address, timeout_s: float = CONNECT_S, usual: str = "6379 by default") -> None:
    """Connect, and hang up. AddressError ("refused" or "timed out") or ConfigError (a name that nobody knows)."""
    try:
        socket.create_connection((address.host, address.port), timeout=timeout_s).close()
    except TimeoutError as error:
        raise AddressError(
            f"{address} timed out: no answer in {timeout_s:g} s",
            "a firewall may drop the packets, or the machine is off: open the port to this machine, or take the address that "
            "`ray start` printed",
        ) from error
    except socket.gaierror as error:
        raise ConfigError(f"address {str(address)!r} is malformed: nobody knows a host {address.host!r} ({error})") from error
    except OSError as error:
        raise AddressError(
            f"{address} refused: {error.strerror or error}",
            f"nothing listens there: is the head node up (`ray start --head`), and is that its port ({usual})?",
        ) from error


def check_is_ray(address: Address, timeout_s: float = CONNECT_S) -> None:
    """Ask Ray's head node a small question, with this machine's token. AddressError: no answer in time, or not let in."""
    import grpc
    from ray import _raylet
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    untyped: Any = _raylet
    messages: Any = gcs_service_pb2
    token: dict[str, str] = untyped.AuthenticationTokenLoader.instance().get_token_for_http_header(ignore_auth_mode=True)
    channel = grpc.insecure_channel(str(address))
    try:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        stub.CheckAlive(messages.CheckAliveRequest(), timeout=timeout_s, metadata=list(token.items()), wait_for_ready=True)
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            raise AddressError(
                f"{address} timed out: something listens there and did not answer as Ray's head node does in {timeout_s:g} s",
                "take the address that `ray start` printed (port 6379 by default; 8265 is the dashboard's)",
            ) from error
        if code == grpc.StatusCode.UNAUTHENTICATED:
            mine = "another token than this machine's" if token else "a token, and this machine has none"
            raise AddressError(
                f"{address} refused: the cluster wants {mine}",
                "copy the head node's ~/.ray/auth_token here, or set RAY_AUTH_TOKEN",
            ) from error
        raise AddressError(
            f"{address} refused: what listens there is no Ray head node of this version ({code.name}: {details})",
            "take the address that `ray start` printed, and the same version of Ray on both sides",
        ) from error
    finally:
        channel.close()
