"""The sampling primitives again, row by row on Python floats: slow, and easy to check by eye."""

from __future__ import annotations

import math
from collections.abc import Sequence

Logits = Sequence[float]
GONE = float("-inf")


def softmax(logits: Logits) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def log_softmax(logits: Logits) -> list[float]:
    top = max(logits)
    total = math.log(math.fsum(math.exp(x - top) for x in logits))
    return [x - top - total for x in logits]


def ranking(logits: Logits) -> list[int]:
    """Ids, the likeliest first, equals by rising id."""
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


def greedy(logits: Logits) -> int:
    return ranking(logits)[0]


def top_k(logits: Logits, k: int) -> set[int]:
    alive = [token for token in ranking(logits) if logits[token] > GONE]
    return set(alive if k <= 0 else alive[:k])


def top_p(logits: Logits, p: float) -> set[int]:
    kept: set[int] = set()
    mass = 0.0
    probabilities = softmax(logits)
    for token in ranking(logits):
        if logits[token] == GONE or (kept and mass >= p < 1):
            break
        kept.add(token)
        mass += probabilities[token]
    return kept


def min_p(logits: Logits, ratio: float) -> set[int]:
    probabilities = softmax(logits)
    border = ratio * max(probabilities)
    return {token for token, p in enumerate(probabilities) if p >= border and logits[token] > GONE}


def keep(logits: Logits, kept: set[int]) -> list[float]:
    return [x if token in kept else GONE for token, x in enumerate(logits)]


def choose(probabilities: Sequence[float], uniform: float) -> int:
    target = uniform * math.fsum(probabilities)
    for token in range(len(probabilities)):
        if math.fsum(probabilities[: token + 1]) > target:
            return token
    raise AssertionError("no mass above the target")


def distribution(logits: Logits, temperature: float, k: int, p: float, ratio: float) -> list[float]:
    """Probabilities that a draw must follow."""
    x = [value / temperature for value in logits]
    x = keep(x, top_k(x, k))
    x = keep(x, top_p(x, p))
    x = keep(x, min_p(x, ratio))
    return softmax(x)
