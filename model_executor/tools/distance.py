"""Errors against a reference, and the rule by which they pass. Its numbers are fixed: no flag widens them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from engine_core.wire.evidence import Boundary, Distance

# Another order of summation gives an error of the size of the noise; a fault of the model gives orders of magnitude.
FACTOR: Final = 4.0
AGREEMENT: Final = 0.99
_MEASURE: Final = (
    "errors are measured teacher-forced, against the reference engine in a wider dtype (float64 for runs in float32, "
    "float32 for others); the noise is the error of the reference engine itself in the run's dtype, or, with a "
    "quantization or another dtype of keys and values, that of Tercet's reference kernels with the same"
)
_BLOCKS: Final = (
    f"each boundary: relative L2 error and largest error at most {FACTOR:g} times the noise, which counts as one unit "
    "of rounding of the run's dtype where it is less"
)
_TOKENS: Final = (
    f"all blocks of the checkpoint run: at least {AGREEMENT:.0%} of the teacher-forced greedy tokens equal the "
    "reference engine's in the run's dtype; with fewer blocks the rate is shown and does not decide, because logits of "
    "a part of a model are near ties; nor does it with a quantization or another dtype of keys and values, which "
    "`tercet quality` judges"
)
_FREE: Final = (
    "free-running tokens differ from the reference only where the teacher-forced ones do, or where the lead of the "
    f"chosen token is at most {2 * FACTOR:g} times the noise of the logits"
)
RULE: Final = (_MEASURE, _BLOCKS, _TOKENS, _FREE, "every number is finite")


def distance(values: Tensor, reference: Tensor) -> Distance:
    """Of values from the reference, both of one shape; an error that is not finite is infinite."""
    ours, truth = values.double().flatten(), reference.double().flatten()
    if not bool(torch.isfinite(ours).all()):
        return Distance(float("inf"), float("-inf"), float("inf"))
    norm, own = float(truth.norm()), float(ours.norm())
    difference = ours - truth
    cosine = min(float(ours @ truth) / (norm * own), 1.0) if norm and own else float(norm == own)
    error = float(difference.norm())
    return Distance(error / norm if norm else error, cosine, float(difference.abs().max()))


def boundaries(
    run: Mapping[str, Tensor], noisy: Mapping[str, Tensor], truth: Mapping[str, Tensor], dtype: torch.dtype
) -> list[Boundary]:
    """Errors at each place, in the places' order.

    Args:
        run: [T, width] of Tercet, by place.
        noisy: of the reference in the run's dtype.
        truth: of the reference in the wider dtype.
        dtype: of the run.
    """
    rows = []
    for place, expected in truth.items():
        own, noise = distance(run[place], expected), distance(noisy[place], expected)
        rows.append(Boundary(place, own, noise, _within(own, floor(noise, expected, dtype))))
    return rows


def floor(noise: Distance, expected: Tensor, dtype: torch.dtype) -> Distance:
    """The noise, at least one unit of rounding."""
    unit = torch.finfo(dtype).eps
    return Distance(
        relative=max(noise.relative, unit),
        cosine=noise.cosine,
        largest=max(noise.largest, unit * float(expected.abs().max())),
    )


def _within(own: Distance, noise: Distance) -> bool:
    return own.relative <= FACTOR * noise.relative and own.largest <= FACTOR * noise.largest


def first_place(
    run: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    rows: Sequence[Boundary],
    position: int,
    dtype: torch.dtype,
) -> str:
    """The first place whose error at one position leaves the noise of the whole; empty: none does.

    Args:
        run, truth: [T, width] by place, of one sample.
        rows: errors over all samples.
        position: of the token.
        dtype: of the run.
    """
    for row in rows:
        own = distance(run[row.place][position], truth[row.place][position])
        if own.relative > FACTOR * max(row.noise.relative, torch.finfo(dtype).eps):
            return row.place
    return ""


def lead(logits: Tensor) -> float:
    """Lead of the largest of [V] over the second."""
    best = logits.double().topk(2).values
    return float(best[0] - best[1])
