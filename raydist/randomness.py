"""Every random number is a function of names: `(seed, what, where)`, never of what was drawn before.

So a step's dropout is the same after a resume, in a replay and in a fresh process, and nothing has to be saved for it.
"""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np
import torch


def derive(seed: int, *names: int | str) -> int:
    """A 63-bit seed that depends on all of `names` and their order; (0, 1) and (1, 0) differ."""
    text = "/".join(str(n) for n in (seed, *names))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_all(seed: int, *names: int | str) -> None:
    """Seed Python's, numpy's and torch's global generators (all devices) from `derive(seed, *names)`."""
    number = derive(seed, *names)
    random.seed(number)
    np.random.seed(number % 2**32)
    seed_torch(number)


def seed_torch(number: int) -> None:
    """As `torch.manual_seed`, at a hundredth of its cost: that one keeps a printed stack for each device that is not in use."""
    if torch.cuda.is_available() and not torch.cuda.is_initialized():
        torch.manual_seed(number)
        return
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(number)


def seed_host(number: int) -> None:
    """Seed the CPU generators only, for per-row augmentation: no device is touched."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)
