"""Where the ranks of a script sit, and what they are told of it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from raydist.cli import main
from raydist.runners.gang import seats
from raydist.runners.rank import Place
from raydist.runners.script import environment_of, shown_ranks


def place(node: str, *gpus: str) -> Place:
    return Place(node, f"host-{node}", f"10.0.0.{ord(node)}", gpus, "/")


def test_ranks_go_node_by_node_and_in_order_of_gpus() -> None:
    """As torchrun on two nodes, with 2 and 3 processes: the GPU of a local rank is the one at its place in the node's list."""
    places = [place("b", "10"), place("a", "1"), place("b", "9"), place("b", "2"), place("a", "0")]
    found = seats(places, first="a")
    assert [index for index, _ in found] == [4, 1, 3, 2, 0]
    seen = [(s.rank, s.local, s.local_size, s.group, s.groups, s.devices) for _, s in found]
    a, b = ("0", "1"), ("2", "9", "10")
    assert seen == [(0, 0, 2, 0, 2, a), (1, 1, 2, 0, 2, a), (2, 0, 3, 1, 2, b), (3, 1, 3, 1, 2, b), (4, 2, 3, 1, 2, b)]
    assert all(places[index].gpus == (seat.devices[seat.local],) for index, seat in found)
    # the driver's node holds none: in order of appearance
    assert [seat.place.node for _, seat in seats(places, first="c")] == ["b", "b", "b", "a", "a"]
    assert [index for index, _ in seats([place("a", "GPU-f"), place("a", "GPU-c")], "a")] == [1, 0]


def test_the_numbers_are_torchruns() -> None:
    _, seat = seats([place("a"), place("b"), place("b")], "a")[2]
    env = environment_of(seat, 3, ("10.0.0.97", 1234), 1, 2, "id")
    assert {name: env[name] for name in env if name.endswith(("RANK", "SIZE"))} == {
        "RANK": "2",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "3",
    }
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.97", "1234")
    assert (env["TORCHELASTIC_RESTART_COUNT"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("1", "2")


def test_whose_output_is_shown() -> None:
    assert [shown_ranks(tee, 3) for tee in ("0", "0,2", "all", "none")] == [{0}, {0, 2}, {0, 1, 2}, set()]


@pytest.mark.parametrize(
    ("address", "words", "code"),
    [
        ("fd00::1:6379", "is malformed: an IPv6 address goes in brackets; write [fd00::1]:6379", 2),
        ("127.0.0.1", "is malformed: write HOST:PORT", 2),
        ("127.0.0.1:{free}", " refused: Connection refused: nothing listens there", 1),
        ("[::1]:{free}", " refused: Connection refused: nothing listens there", 1),
    ],
)
def test_a_bad_address_is_told_at_once(
    address: str, words: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = address.format(free=free.getsockname()[1])
        assert main(["run", "--address", where, str(Path(__file__))]) == code
    assert words in capsys.readouterr().err
