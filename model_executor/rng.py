"""Counter-based randomness: a number is a function of (seed, position, stream), and of nothing else.

The generator is Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011:
ten rounds of two 32x32 -> 64 bit products over a counter of four words under a key of two. Only integer operations are
used, so every device gives the same numbers, and a row's numbers cannot depend on other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
# Multipliers and key increments (Weyl sequence) of the paper.
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
WORD = 0xFFFFFFFF
UNIFORM_BITS = 52


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Four random words for each counter.

    Args:
        counter: int64 [4, N], words in 0 .. 2^32 - 1.
        key: int64 [2, N], words likewise.

    Returns:
        int64 [4, N], words likewise.
    """
    multipliers = _column([MULTIPLIER_0, MULTIPLIER_1], counter.device)
    steps = torch.arange(ROUNDS, device=counter.device)[:, None, None]
    # Lane 0 of a round's output comes from lane 1 of its products, so keys stand with lane 0 first.
    keys = (key + steps * _column([WEYL_0, WEYL_1], counter.device)) & WORD
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys:
        # int64 products wrap modulo 2^64, so their bits are those of the unsigned product.
        products = even * multipliers
        high = (products >> 32) & WORD
        even, odd = high.flip(0) ^ odd ^ round_key, (products & WORD).flip(0)
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) for each row.

    Args:
        seeds: int64 [N], 0 .. 2^63 - 1.
        positions: int64 [N], 0 .. 2^63 - 1: index of the token in its sequence.

    Returns:
        float64 [N]: multiples of 2^-52, so that x * total < total for every total > 0.
    """
    key = torch.stack((seeds & WORD, seeds >> 32))
    zero = torch.zeros_like(positions)
    counter = torch.stack((positions & WORD, positions >> 32, zero, zero))
    words = philox(counter, key)
    bits = (words[0] << (UNIFORM_BITS - 32)) | (words[1] >> (64 - UNIFORM_BITS))
    return bits.double() * 2.0**-UNIFORM_BITS


def _column(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)[:, None]
