"""Primitives of sampling: pure functions on rows of logits or probabilities.

Shapes: logits are float32 [N, V], one row for each request; a parameter is a host array [N], one value for each row.
A token that a step removes gets the logit -inf. Every function treats each row by itself, leaves its arguments as they
are, and breaks ties between equal logits in favour of the lower token id. Preconditions on the logits: no NaN, no +inf,
and at least one value above -inf in each row; `finite` establishes them. A wrong shape or dtype, or a parameter out of
its range, raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from model_executor.batch import Ints, on_device

Floats = npt.NDArray[np.float64]

# Candidates that top_p looks at first; eight times as many each time that their mass falls short.
FIRST_CANDIDATES = 64
CANDIDATE_GROWTH = 8
# Ids looked at together: when a cumulative distribution is searched, or the largest logit.
CHUNK = 128


def finite(logits: Tensor) -> Tensor:
    """Logits that meet the preconditions: NaN becomes -inf, +inf the largest float, a row of nothing but -inf zeros."""
    _check_logits(logits)
    if logits.device.type == "cpu" and bool(torch.isfinite(logits.amax(-1)).all()):
        return logits
    clean = _without_nan(logits)
    return clean.masked_fill(clean.amax(-1, keepdim=True) == float("-inf"), 0.0)


def likeliest(logits: Tensor) -> Tensor:
    """greedy(finite(logits)), on a device with less than half of the passes: the first of equals is the first of zeros
    as it is of numbers that are all -inf.
    """
    _check_logits(logits)
    return greedy(finite(logits)) if logits.device.type == "cpu" else greedy(_without_nan(logits))


def softmax(logits: Tensor) -> Tensor:
    """Probabilities float32 [N, V]; logits of any size do not overflow, since each row's maximum is taken off first."""
    _check_logits(logits)
    return torch.softmax(logits, dim=-1)


def greedy(logits: Tensor) -> Tensor:
    """Id of the largest logit of each row, int64 [N]; the lowest id of equals."""
    _check_logits(logits)
    rows, size = logits.shape
    if logits.device.type != "cpu" or size % CHUNK:
        return logits.max(-1).indices
    # torch finds a largest number several times faster than its place.
    chunks = logits.view(rows, size // CHUNK, CHUNK)
    chunk = chunks.amax(-1).max(-1).indices
    return chunk * CHUNK + chunks[torch.arange(rows), chunk].max(-1).indices


def temperature(logits: Tensor, value: Floats) -> Tensor:
    """Logits divided by the temperature, moved so that each row's maximum is 0: no temperature makes them overflow.

    Args:
        logits: [N, V].
        value: [N], above 0.
    """
    _check(logits, value, "temperature", value > 0)
    return (logits - logits.amax(-1, keepdim=True)) / _column(value, logits)


def top_k(logits: Tensor, k: Ints) -> Tensor:
    """Keep the k largest logits of each row.

    Args:
        logits: [N, V].
        k: [N], at least -1; 0, -1 and anything from V on keep all.
    """
    _check(logits, k, "top_k", k >= -1)
    return _on_rows(logits, (k > 0) & (k < logits.shape[-1]), lambda rows, picked: _keep_count(rows, k[picked]))


def top_p(logits: Tensor, p: Floats, most: int | None = None) -> Tensor:
    """Keep the fewest tokens, likeliest first, whose probabilities sum to at least p; never fewer than one.

    Args:
        logits: [N, V].
        p: [N], 0 .. 1; 1 keeps all.
        most: no row has more logits above -inf, 1 .. V; None: unknown. Of few the device makes its choice alone.
    """
    _check(logits, p, "top_p", (p >= 0) & (p <= 1))
    if most is None or most > FIRST_CANDIDATES * CANDIDATE_GROWTH:
        return _on_rows(logits, p < 1, lambda rows, picked: _keep_nucleus(rows, p[picked]))
    return _on_rows(logits, p < 1, lambda rows, picked: _keep_small_nucleus(rows, p[picked], most))


def min_p(logits: Tensor, ratio: Floats) -> Tensor:
    """Keep tokens that are at least `ratio` times as likely as the likeliest.

    Args:
        logits: [N, V].
        ratio: [N], 0 .. 1; 0 keeps all.
    """
    _check(logits, ratio, "min_p", (ratio >= 0) & (ratio <= 1))
    return _on_rows(logits, ratio > 0, lambda rows, picked: _keep_likely(rows, ratio[picked]))


def choose(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Draw one id a row by inverting its cumulative distribution in id order.

    Args:
        probabilities: float32 [N, V], at least 0, each row with a finite sum above 0; it need not be 1.
        uniform: float64 [N], in [0, 1 - 2^-52].

    Returns:
        int64 [N]: the lowest id at which the sum of the probabilities up to it is above uniform * total;
        an id of probability 0 is never drawn.
    """
    _check_logits(probabilities)
    if uniform.dtype != torch.float64 or uniform.shape != probabilities.shape[:1]:
        raise ValueError(f"uniform: {uniform.dtype} {list(uniform.shape)}, needs float64 [{len(probabilities)}]")
    padded = F.pad(probabilities, (0, -probabilities.shape[-1] % CHUNK))
    chunks = padded.view(len(padded), -1, CHUNK)
    edges = chunks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniform * edges[:, -1]
    chunk = (edges <= target[:, None]).sum(-1, keepdim=True)
    below = F.pad(edges, (1, 0)).gather(-1, chunk)
    sums = chunks.take_along_dim(chunk[..., None], dim=1).squeeze(1).cumsum(-1, dtype=torch.float64)
    # The two sums round differently: the last id with mass is the border.
    last = (sums < sums[:, -1:]).sum(-1)
    inside = (sums <= target[:, None] - below).sum(-1)
    return chunk[:, 0].mul(CHUNK).add(torch.minimum(inside, last))


def largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row in falling order, equals by rising id.

    Args:
        logits: [N, V].
        k: 1 .. V, the same for all rows.

    Returns:
        values float32 [N, k], ids int64 [N, k].
    """
    _check_logits(logits)
    values, ids = logits.topk(k, dim=-1)
    if logits.device.type != "cpu":
        ids = _first_ids(logits, values[:, -1:], k)
    else:
        crowded = (logits >= values[:, -1:]).sum(-1) > k
        if bool(crowded.any()):
            ordered = logits[crowded].sort(dim=-1, descending=True, stable=True)
            ids[crowded] = ordered.indices[:, :k]
        ids = ids.sort(-1).values
    values = logits.gather(-1, ids)
    by_value = values.argsort(dim=-1, descending=True, stable=True)
    return values.gather(-1, by_value), ids.gather(-1, by_value)


def _first_ids(logits: Tensor, border: Tensor, k: int) -> Tensor:
    """Rising ids of the k largest logits, of which `border` [N, 1] is the least, without a word to the host."""
    size = logits.shape[-1]
    places = torch.arange(size, device=logits.device)
    return torch.where(_with_first_equals(logits, border, k), places, size).topk(k, dim=-1, largest=False).values


def _without_nan(logits: Tensor) -> Tensor:
    return torch.nan_to_num(logits, nan=float("-inf"), posinf=torch.finfo(logits.dtype).max, neginf=float("-inf"))


def _keep_count(logits: Tensor, count: Ints) -> Tensor:
    """Keep count[n] logits of row n, 1 .. V."""
    return _keep_largest(logits, on_device(count, logits.device), int(count.max()))


def _keep_largest(logits: Tensor, count: Tensor, most: int) -> Tensor:
    """Keep count[n] logits of row n, 1 .. most: the largest, and of equals those of the lowest ids."""
    wanted = count[:, None]
    border = logits.topk(most, dim=-1).values.gather(-1, wanted - 1)
    if logits.device.type != "cpu":
        keep = _with_first_equals(logits, border, wanted)
    else:
        keep = logits >= border
        crowded = keep.sum(-1) > count
        if bool(crowded.any()):
            keep[crowded] = _with_first_equals(logits[crowded], border[crowded], wanted[crowded])
    return logits.masked_fill(~keep, float("-inf"))


def _with_first_equals(logits: Tensor, border: Tensor, wanted: Tensor | int) -> Tensor:
    """bool [N, V]: what is above the border, and of what lies on it the first, so many as make `wanted` in all."""
    above, equal = logits > border, logits == border
    room = wanted - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))


def _keep_small_nucleus(logits: Tensor, p: Floats, most: int) -> Tensor:
    """See top_p."""
    wanted = on_device(p, logits.device)[:, None]
    short = (_sums_of_likeliest(logits, most) < wanted).sum(-1)
    return _keep_largest(logits, (short + 1).clamp(max=most), most)


def _keep_nucleus(logits: Tensor, p: Floats) -> Tensor:
    """See top_p."""
    size = logits.shape[-1]
    counts = np.full(len(p), size, dtype=np.int64)
    open_rows = np.arange(len(p))
    candidates = FIRST_CANDIDATES
    while len(open_rows):
        candidates = min(candidates, size)
        rows = on_device(open_rows, logits.device)
        sums = _sums_of_likeliest(logits[rows], candidates).cpu().numpy()
        short = (sums < p[open_rows, None]).sum(-1)
        counts[open_rows] = np.minimum(short + 1, size)
        open_rows = open_rows[short == candidates] if candidates < size else open_rows[:0]
        candidates *= CANDIDATE_GROWTH
    return _keep_count(logits, counts)


def _sums_of_likeliest(logits: Tensor, count: int) -> Tensor:
    """Probabilities of the likeliest, of the likeliest two and so on, float64 [N, count]."""
    total = logits.logsumexp(-1, keepdim=True).double()
    return (logits.topk(count, dim=-1).values.double() - total).exp().cumsum(-1)


def _keep_likely(logits: Tensor, ratio: Floats) -> Tensor:
    border = logits.amax(-1, keepdim=True) + _column(np.log(ratio), logits)
    return logits.masked_fill(logits < border, float("-inf"))


def _on_rows(logits: Tensor, active: npt.NDArray[np.bool_], change: Callable[[Tensor, Ints], Tensor]) -> Tensor:
    """Apply `change` to the active rows; the others stay as they are."""
    if active.all():
        return change(logits, np.arange(len(active)))
    if not active.any():
        return logits
    picked = np.flatnonzero(active)
    rows = on_device(picked, logits.device)
    return logits.index_copy(0, rows, change(logits[rows], picked))


def _column(values: Floats, like: Tensor) -> Tensor:
    return on_device(values.astype(np.float32), like.device)[:, None]


def _check_logits(logits: Tensor) -> None:
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.shape[-1] == 0:
        raise ValueError(f"logits: {logits.dtype} {list(logits.shape)}, needs float32 [N, V] with V >= 1")


def _check(logits: Tensor, value: npt.NDArray[np.generic], name: str, valid: npt.NDArray[np.bool_]) -> None:
    _check_logits(logits)
    if value.shape != (logits.shape[0],):
        raise ValueError(f"{name}: shape {value.shape}, needs [{logits.shape[0]}]")
    if not valid.all():
        raise ValueError(f"{name}: {value[~valid][0]} is out of range")
