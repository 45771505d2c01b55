"""Random numbers are named, not drawn in turn."""

from __future__ import annotations

import random

import numpy as np
import torch

from raydist.randomness import derive, seed_all, seed_host, seed_torch


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_seed_depends_on_every_name_and_their_order() -> None:
    names = [(0, 0, 1), (0, 1, 0), (1, 0, 0), (0, "epoch", 1), (0, "step", 1), (0, "step", 11), (0, 1), (0,)]
    seeds = {derive(*name) for name in names}
    assert len(seeds) == len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # stable over processes and releases: a run goes on after an upgrade
    import hashlib

    expected = int.from_bytes(hashlib.blake2b(b"3/step/7", digest_size=8).digest(), "big") >> 1
    assert derive(3, "step", 7) == expected


def test_all_three_generators_are_seeded() -> None:
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        seed_all(1, "step", 5)
        first = draws()
        seed_all(1, "step", 6)
        assert not set(first) & set(draws())
        seed_all(1, "step", 5)
        assert draws() == first
        seed_host(derive(1, "step", 5))
        assert draws() == first
        seed_all(2**62, "large")
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])


def test_torch_is_seeded_as_by_torchs_own_function() -> None:
    torch.manual_seed(7)
    expected = torch.rand(5)
    seed_torch(7)
    assert torch.equal(torch.rand(5), expected)
