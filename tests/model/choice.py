"""Whether rounding may decide a token: sums done in another order move logits a little."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from engine_core.wire.client import TokenLogprobs
from engine_core.wire.sampling import SamplingParams
from model_executor import distribution, rng

# Two logits that are nearer than this may change places.
NEAR_TIE: Final = 1e-3
# So may a drawn number and the border between two tokens, or a sum of probabilities and top_p.
NEAR_BORDER: Final = 1e-5
SHIFTS: Final = tuple(itertools.product((-NEAR_BORDER, 0.0, NEAR_BORDER), (-NEAR_BORDER, NEAR_BORDER)))


@dataclass(frozen=True)
class Choice:
    """How one token was chosen.

    Attributes:
        entry: log-probabilities of the whole vocabulary.
        params, seed: of the request.
        position: of the token in its sequence.
        banned: ids that could not be chosen.
    """

    entry: TokenLogprobs
    params: SamplingParams
    seed: int
    position: int
    banned: set[int]

    def is_clear(self, token: int) -> bool:
        """Whether `token` would be chosen as well if numbers were rounded otherwise."""
        pairs = zip(self.entry.top_ids, self.entry.top_logprobs, strict=True)
        values = [value for token_id, value in pairs if token_id not in self.banned]
        # The last one that counts: everything below it may come in any order.
        last = 1 if self.params.greedy else self.params.top_k
        if last and values[last - 1] - values[last] < NEAR_TIE:
            return False
        return self.params.greedy or all(self._draw(*shift) == token for shift in SHIFTS)

    def _draw(self, nucleus: float, number: float) -> int:
        """The token drawn when top_p and the random number are moved by so much."""
        params = self.params
        logits = torch.empty(1, len(self.entry.top_ids))
        logits[0, self.entry.top_ids] = torch.tensor(self.entry.top_logprobs)
        logits[0, list(self.banned)] = float("-inf")
        x = distribution.temperature(logits, np.array([params.temperature]))
        x = distribution.top_k(x, np.array([params.top_k]))
        x = distribution.top_p(x, np.array([params.top_p if params.top_p == 1 else params.top_p + nucleus]))
        uniform = rng.uniform(torch.tensor([self.seed]), torch.tensor([self.position])) + number
        return int(distribution.choose(distribution.softmax(x), uniform.clamp(0, 1 - 2**-52)).item())
