"""Small folders, and what Tercet's own model computes on them: one prompt at a time, through the paged cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine_core.wire.config import ModelOptions
from engine_core.wire.reports import LoadReport
from model_executor.attention.dispatch import Chooser, KernelTable
from model_executor.batch import StepRows, build_index, to_inputs
from model_executor.kv_cache import KVCache, LayerShape
from model_executor.models.decoder import Decoder, build_model
from model_executor.models.reader import read_spec
from model_executor.models.spec import ModelSpec
from model_executor.weights.dummy import dummy_weights
from model_executor.weights.layer_plan import LayerPlan, plan_layers
from model_executor.weights.load import load_weights
from tests.fixtures.llama import Shape, llama_config, random_weights, write_llama

BLOCK_SIZE = 4
CPU = torch.device("cpu")
SIX = Shape(hidden=32, layers=6, heads=4, kv_heads=2, intermediate=48, vocab=64)
SMALL = Shape(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocab=64, max_position=64)


def silent(*_: object) -> None:
    """Progress that nobody watches."""


def write_small(
    folder: Path,
    shape: Shape = SMALL,
    *,
    shards: int = 1,
    tensors: Mapping[str, NDArray[np.float32] | None] | None = None,
    **fields: Any,
) -> Path:
    """A folder of this shape with config and weights.

    Args:
        folder: where.
        shape: of the model.
        shards: files of the checkpoint.
        tensors: these replace or join the random ones; None removes one.
        fields: replace those of config.json; ... removes one.
    """
    config = {name: value for name, value in {**llama_config(shape), **fields}.items() if value is not ...}
    drawn = {**random_weights(shape, seed=3, std=0.15), **(tensors or {})}
    return write_llama(folder, config, {name: x for name, x in drawn.items() if x is not None}, shards=shards)


@dataclass
class Loaded:
    """A model with its weights.

    Attributes:
        spec: of the whole checkpoint.
        plan: the layers that run.
        model: built for the plan.
        report: of the load.
    """

    spec: ModelSpec
    plan: LayerPlan
    model: Decoder
    report: LoadReport

    def logits(self, token_ids: Sequence[int], *, chunk: int | None = None) -> NDArray[np.float32]:
        """Logits at each position, [len(token_ids), vocab] float32, computed in chunks of so many tokens."""
        blocks = -(-len(token_ids) // BLOCK_SIZE)
        shapes = [LayerShape.of(layer.attention) for layer in self.plan.layers(self.spec)]
        dtype = self.model.embedding.weight.dtype
        cache = KVCache.allocate(shapes, blocks, BLOCK_SIZE, dtype, CPU)
        # A table that is not in order, so that a mix-up of block and position shows.
        table = np.arange(blocks, dtype=np.int32)[::-1][None].copy()
        step = chunk or len(token_ids)
        out = [self._step(token_ids, start, step, table, cache) for start in range(0, len(token_ids), step)]
        return np.concatenate(out)

    def _step(
        self, token_ids: Sequence[int], start: int, count: int, table: NDArray[np.int32], cache: KVCache
    ) -> NDArray[np.float32]:
        ids = torch.tensor(token_ids[start : start + count])
        rows = StepRows(
            slots=np.array([0]), starts=np.array([start]), counts=np.array([len(ids)]), samples=np.array([True])
        )
        batch = to_inputs(build_index(rows, table, BLOCK_SIZE), ids)
        with torch.inference_mode():
            scores: NDArray[np.float32] = self.model.logits(self.model(batch, cache)).numpy()
        return scores


def build(
    folder: Path, layers: Sequence[int] | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[ModelSpec, Decoder]:
    """The model of a folder, its weights not yet loaded."""
    spec = read_spec(folder, ModelOptions(**options))
    choose = Chooser(KernelTable(), dtype, CPU, BLOCK_SIZE)
    return spec, build_model(spec, plan_layers(spec, layers), choose)


def load(
    folder: Path, layers: Sequence[int] | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> Loaded:
    """The model of a folder with the checkpoint's weights."""
    spec, model = build(folder, layers, dtype, **options)
    plan = plan_layers(spec, layers)
    return Loaded(spec, plan, model, load_weights(model, spec, plan, folder, silent))


def draw(
    folder: Path, layers: Sequence[int] | None = None, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Loaded:
    """The model of a folder with dummy weights."""
    spec, model = build(folder, layers, dtype)
    plan = plan_layers(spec, layers)
    return Loaded(spec, plan, model, dummy_weights(model, spec, plan, folder, seed, silent))
