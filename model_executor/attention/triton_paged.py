"""Attention on the paged cache in Triton: split decode, and ragged prefill for the rows of several tokens.

The kernels stand in kernels/decode.py and kernels/prefill.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from model_executor.attention.spec import AttentionKernel, AttentionProblem, KernelSpec, Limits
from model_executor.batch import BatchInputs
from model_executor.kernels.limits import DTYPES, missing, power_above
from model_executor.kv_cache import LayerCache

SMALLEST_DOT: Final = 16
MOST_SPLITS: Final = 64
FEWEST_SPLITS: Final = 4
MOST_SPLIT_TILES: Final = 8
PROGRAMS_A_PROCESSOR: Final = 4
# A processor with less shared memory gets shorter pipelines, and tiles of fewer queries.
AMPLE_SHARED_MEMORY: Final = 166_000
MOST_QUERY_ELEMENTS: Final = 16384


@dataclass(frozen=True)
class Device:
    """What the shapes of a launch depend on.

    Attributes:
        processors: multiprocessors; decode is split so that they all have work.
        shared_memory: bytes a program may take.
    """

    processors: int
    shared_memory: int

    @classmethod
    def of(cls, kind: str) -> Device:
        """The current CUDA device; on CPU, where only the interpreter runs, a device of one processor."""
        if kind != "cuda":
            return cls(1, AMPLE_SHARED_MEMORY)
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return cls(found.multi_processor_count, int(getattr(found, "shared_memory_per_block_optin", 49152)))


@dataclass(frozen=True)
class Tiles:
    """Shapes of the tiles for one problem, powers of two, and of the programs that work on them.

    The values come from what the compiler makes of them for compute capability 9.0: matrix instructions, no register
    spilled, and two key tiles in flight within the shared memory.

    Attributes:
        heads: rows of a decode tile: the query heads of a KV head, padded.
        queries: rows of a prefill tile: query heads times queries.
        keys: keys of a tile.
        head_dim: padded.
        prefill_warps: of a prefill program.
        stages: of the software pipeline; a load that needs a loaded block id counts double.
    """

    heads: int
    queries: int
    keys: int
    head_dim: int
    prefill_warps: int
    stages: int

    @classmethod
    def of(cls, problem: AttentionProblem, shared_memory: int) -> Tiles:
        """The tiles of a problem on a device."""
        heads = max(SMALLEST_DOT, power_above(problem.num_heads // problem.num_kv_heads))
        head_dim = max(SMALLEST_DOT, power_above(problem.head_dim))
        if problem.dtype == torch.float32:
            # No matrix units in full precision: operands and result live in registers.
            keys, queries, warps, stages = min(max(2048 // head_dim, SMALLEST_DOT), 64), 16, 4, 3
        else:
            keys, queries, warps, stages = min(8192 // head_dim, 128), 128, 8, 5
        if shared_memory < AMPLE_SHARED_MEMORY:
            stages, queries = 2, min(queries, MOST_QUERY_ELEMENTS // head_dim)
        return cls(heads, max(queries, heads), keys, head_dim, warps, stages)


@dataclass(frozen=True)
class Split:
    """How decode cuts a context.

    Attributes:
        parts: programs for one row and KV head; those that find no work end at once.
        tiles: fewest tiles of keys a part takes.
    """

    parts: int
    tiles: int

    @classmethod
    def of(cls, rows: int, num_kv_heads: int, processors: int) -> Split:
        """The split for a number of rows, from nothing else, so that a captured launch stays right.

        Few rows are cut finely, so that they fill the device; many rows into at least a few parts, so that one long
        row does not keep the others waiting.
        """
        wanted = -(-PROGRAMS_A_PROCESSOR * processors // (rows * num_kv_heads))
        parts = min(max(power_above(wanted), FEWEST_SPLITS), MOST_SPLITS)
        return cls(parts, min(MOST_SPLITS // parts, MOST_SPLIT_TILES))


class TritonPaged:
    """See the module. Safe to capture in a CUDA graph when every row decodes.

    Args:
        problem: what to compute.
        device: to shape the launches for; None: the one that is there.
    """

    def __init__(self, problem: AttentionProblem, device: Device | None = None) -> None:
        from model_executor.kernels import decode, prefill  # need triton

        self._problem = problem
        self._decode_kernel = decode.decode_kernel
        self._join_kernel = decode.join_kernel
        self._prefill_kernel = prefill.prefill_kernel
        self._device = device or Device.of(problem.device)
        self._tiles = Tiles.of(problem, self._device.shared_memory)
        # Only the interpreter runs on CPU, and it multiplies no bfloat16.
        self._constants = {
            "GROUP": problem.num_heads // problem.num_kv_heads,
            "BLOCK_SIZE": problem.block_size,
            "HEAD_DIM": problem.head_dim,
            "WINDOW": problem.window or 0,
            "SOFT_CAP": problem.soft_cap or 0.0,
            "N": self._tiles.keys,
            "D": self._tiles.head_dim,
            "WIDEN": problem.device == "cpu",
        }

    def forward(self, query: Tensor, layer_cache: LayerCache, batch: BatchInputs) -> Tensor:
        """See AttentionKernel."""
        assert query.stride(2) == 1
        assert layer_cache.key.stride() == layer_cache.value.stride()
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if batch.num_decodes:
            self._decode(query, layer_cache, batch, output)
        if batch.num_decodes < batch.context_lens.shape[0]:
            self._prefill(query, layer_cache, batch, output)
        return output

    def _decode(self, query: Tensor, cache: LayerCache, batch: BatchInputs, output: Tensor) -> None:
        """Rows 0 .. num_decodes - 1, which own the tokens of the same numbers."""
        rows, heads, width = batch.num_decodes, self._problem.num_heads, self._problem.head_dim
        kv_heads = self._problem.num_kv_heads
        split = Split.of(rows, kv_heads, self._device.processors)
        partial = torch.empty((rows, heads, split.parts, width), dtype=torch.float32, device=query.device)
        weight = torch.empty((rows, heads, split.parts), dtype=torch.float32, device=query.device)
        self._decode_kernel[rows, kv_heads, split.parts](
            query,
            cache.key,
            cache.value,
            batch.block_tables,
            batch.context_lens,
            partial,
            weight,
            query.stride(0),
            query.stride(1),
            *cache.key.stride()[:3],
            batch.block_tables.stride(0),
            split.parts,
            split.tiles,
            self._problem.scale,
            M=self._tiles.heads,
            **self._constants,
            num_warps=4,
            num_stages=self._tiles.stages,
        )
        self._join_kernel[rows, heads](
            partial,
            weight,
            batch.context_lens,
            output,
            split.tiles,
            SPLITS=split.parts,
            **{name: self._constants[name] for name in ("WINDOW", "HEAD_DIM", "N", "D")},
            num_warps=4,
        )

    def _prefill(self, query: Tensor, cache: LayerCache, batch: BatchInputs, output: Tensor) -> None:
        """The rows from num_decodes on."""
        first = batch.num_decodes
        rows = batch.context_lens.shape[0] - first
        tables = batch.block_tables[first:]
        queries = self._tiles.queries // (self._problem.num_heads // self._problem.num_kv_heads)
        tiles = (query.shape[0] - first) // queries + rows
        self._prefill_kernel[tiles, self._problem.num_kv_heads](
            query,
            cache.key,
            cache.value,
            tables,
            batch.context_lens[first:],
            batch.query_start[first:],
            output,
            rows,
            query.stride(0),
            query.stride(1),
            output.stride(0),
            *cache.key.stride()[:3],
            tables.stride(0),
            self._problem.scale,
            Q=queries,
            M=self._tiles.queries,
            **self._constants,
            num_warps=self._tiles.prefill_warps,
            num_stages=self._tiles.stages,
        )


LIMITS: Final = Limits(
    devices=frozenset(("cuda",)),
    dtypes=DTYPES,
    head_dims=(16, 256),
    block_sizes=(16, 1024),
    narrow=False,
)

SPEC: KernelSpec[AttentionKernel] = KernelSpec("triton_paged", LIMITS, TritonPaged, missing)
