"""Fills a model with weights drawn from a seed: no checkpoint is needed, only its config.json.

Each checkpoint tensor has a generator of its own, seeded by the run's seed and the tensor's name. A block therefore
holds the same values whichever other blocks run and in whichever order.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from engine_core.wire.reports import LoadReport
from model_executor.models.decoder import Decoder
from model_executor.models.registry import family
from model_executor.models.spec import ModelSpec
from model_executor.weights.layer_plan import LayerPlan
from model_executor.weights.load import Progress
from model_executor.weights.parameters import Parameter, Source, plan_parameters
from model_executor.weights.place import dtype_of, place, rows_at_once, targets
from model_executor.weights.report import count_states, generated_records

PORTION_BYTES: Final = 16 * 2**20
BIAS_BOUND: Final = 0.02


def dummy_weights(
    model: Decoder,
    spec: ModelSpec,
    plan: LayerPlan,
    model_dir: Path,
    seed: int,
    progress: Progress,
    *,
    rounded: torch.dtype | None = None,
) -> LoadReport:
    """Draw all weights.

    Linear maps keep the variance of what they are given (uniform values of variance 1 / inputs), norms scale by one, so
    activations stay finite in every dtype.

    Args:
        model: as built for this spec and plan.
        spec, plan: of the model.
        model_dir: the model folder, for the report.
        seed: of the run.
        progress: called with phase "plan" once and with phase "load" for each parameter.
        rounded: see load_weights.
    """
    began = time.monotonic()
    names = family(spec.architecture).names
    parameters = plan_parameters(spec, plan, names)
    into = targets(model, parameters)
    progress("plan", 1, 1, "steps")
    planned = time.monotonic()
    for done, parameter in enumerate(parameters):
        progress("load", done, len(parameters), "steps")
        _draw(parameter, into[parameter.name], seed, rounded if parameter.dtype is None else None)
    progress("load", len(parameters), len(parameters), "steps")
    records = generated_records(parameters, dtype_of(model))
    return LoadReport(
        model=str(model_dir),
        revision=f"dummy-{seed}",
        layer_map=list(plan.sources),
        tensors=records,
        shards_opened=[],
        shards_skipped=[],
        bytes_read=0,
        bytes_materialized=sum(record.nbytes for record in records),
        counts=count_states(records),
        page_cache=None,
        seconds={"plan": planned - began, "read": time.monotonic() - planned},
        classes=list(plan.classes),
    )


def _draw(parameter: Parameter, target: Tensor, seed: int, rounded: torch.dtype | None) -> None:
    if parameter.fill != "noise":
        target.fill_(parameter.fill == "ones")
        return
    first = 0
    for source in parameter.sources:
        for rows in _noise(source, seed):
            place(target, rows, first, transposed=parameter.transposed, rounded=rounded)
            first += rows.shape[0]


def _noise(source: Source, seed: int) -> Iterator[Tensor]:
    """The tensor's values in portions of rows, float32, on the CPU whatever the device, so that they never differ."""
    generator = torch.Generator().manual_seed(_tensor_seed(source.name, seed))
    bound = (3 / source.shape[-1]) ** 0.5 if len(source.shape) > 1 else BIAS_BOUND
    portion = rows_at_once(source.shape, 4, PORTION_BYTES)
    for first in range(0, source.shape[0], portion):
        count = min(portion, source.shape[0] - first)
        yield torch.empty(count, *source.shape[1:]).uniform_(-bound, bound, generator=generator)


def _tensor_seed(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
