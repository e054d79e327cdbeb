"""Decode steps from static buffers, padded to a few numbers of rows: captured and replayed as CUDA graphs on CUDA, run
plainly on the same buffers elsewhere, so that buckets and padding are tested on any machine.

What may run in a graph reads nothing of a batch on the host: a capture would freeze what it read. The batch that is
captured therefore refuses to tell its lengths; a step that asks is never captured and runs as it is.

Padding rows are all alike: one token, id 0, at position 0 of a sequence that lies in the scratch block. They write the
scratch block only and read nothing else.

Whatever else is computed from the step's result alone, on the device and in shapes fixed by the bucket, may become part
of the step. Greedy choice is of that kind; the general sampler is not, since it picks rows by what they ask for: its
per-row parameters would have to be static buffers beside the ones here, and every row would take every stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

import torch
from torch import Tensor

from model_executor.batch import BatchInputs, DecodeGroup

Step = Callable[[BatchInputs], Tensor]

DEFAULT_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
PADDING_TOKEN: Final = 0
PADDING_CONTEXT: Final = 1
# What torch says of an operation that waits for the device, when it is told to report them.
WAITED: Final = "synchronizing CUDA operation"


class HostRead(Exception):
    """A step read lengths on the host while a batch for capture ran through it. It does not leave this module."""


def bucket_sizes(requested: Sequence[int], max_rows: int) -> tuple[int, ...]:
    """The row counts to pad to, rising, none above max_rows.

    Args:
        requested: positive numbers of rows; larger ones count as max_rows. Empty: DEFAULT_BUCKETS.
        max_rows: most rows of a step.
    """
    return tuple(sorted({min(size, max_rows) for size in requested or DEFAULT_BUCKETS}))


@dataclass(frozen=True)
class GraphShape:
    """Sizes of the static buffers.

    Attributes:
        buckets: row counts to pad to, rising, at least one.
        max_blocks: blocks of the longest sequence.
        block_size: tokens a block.
        scratch_block: the block that padding rows write.
        other_scratch_blocks: those of the KV groups after the first.
    """

    buckets: tuple[int, ...]
    max_blocks: int
    block_size: int
    scratch_block: int
    other_scratch_blocks: tuple[int, ...] = ()

    @property
    def scratch_blocks(self) -> tuple[int, ...]:
        """Of all KV groups."""
        return (self.scratch_block, *self.other_scratch_blocks)


@dataclass
class GraphCounts:
    """What happened so far.

    Attributes:
        captures: graphs made.
        replays: by bucket; on CPU the runs on its buffers.
        padded_rows: rows computed for nothing.
        eager: steps that ran as they are, by reason.
    """

    captures: int = 0
    replays: Counter[int] = field(default_factory=Counter)
    padded_rows: int = 0
    eager: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Captured:
    """A graph, and where its result appears."""

    graph: torch.cuda.CUDAGraph
    result: Tensor


class StaticBatch:
    """The inputs of a decode step at fixed addresses; a bucket uses the first rows.

    Invariant: rows from `_rows` on are padding, entries of sample_index from `_samples` on are 0.

    Args:
        shape: of the buffers.
        device: where they live.
    """

    def __init__(self, shape: GraphShape, device: torch.device) -> None:
        rows = shape.buckets[-1]
        self._block_size = shape.block_size
        self._scratch_blocks = shape.scratch_blocks
        self._token_ids, self._positions, self._context_lens, self._sample_index = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(4)
        )
        self._query_start = torch.arange(rows + 1, dtype=torch.int64, device=device)
        # For each KV group.
        self._slot_mappings = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in self._scratch_blocks]
        self._block_tables = [
            torch.zeros((rows, shape.max_blocks), dtype=torch.int64, device=device) for _ in self._scratch_blocks
        ]
        self._rows = rows
        self._samples = 0
        self.clear()

    def clear(self) -> None:
        """Make every row padding."""
        self._pad(0, 0)

    def fill(self, inputs: BatchInputs) -> None:
        """Take over the rows of a batch of decode rows; the rest becomes padding."""
        rows, samples = inputs.num_decodes, inputs.sample_index.shape[0]
        self._pad(rows, samples)
        groups = [inputs.of_group(group) for group in range(len(self._slot_mappings))]
        targets = [buffer[:rows] for buffer in (self._token_ids, self._positions, self._context_lens)]
        targets += [self._sample_index[:samples], *(slots[:rows] for slots in self._slot_mappings)]
        sources = [inputs.token_ids, inputs.positions, inputs.context_lens, inputs.sample_index]
        # In one launch: the device stands idle before each.
        torch._foreach_copy_(targets, [*sources, *(seen.slot_mapping for seen in groups)])
        for seen, tables in zip(groups, self._block_tables, strict=True):
            tables[:rows, : seen.block_tables.shape[1]].copy_(seen.block_tables)
        self._rows, self._samples = rows, samples

    def for_host(self, inputs: BatchInputs, bucket: int) -> BatchInputs:
        """The bucket's batch after `fill(inputs)`, with its lengths on the host."""
        padding = bucket - inputs.num_decodes
        groups = inputs.decode_groups
        if padding:
            groups = (*groups, DecodeGroup(inputs.num_decodes, bucket, PADDING_CONTEXT))
        return self._batch(bucket, [1] * bucket, inputs.context_lens_host + [PADDING_CONTEXT] * padding, groups)

    def for_capture(self, bucket: int) -> BatchInputs:
        """The bucket's batch without lengths on the host: asking for them raises HostRead."""
        return self._batch(bucket, _NoList(), _NoList(), _NoGroups())

    def _batch(
        self, bucket: int, query_lens: list[int], context_lens: list[int], decode_groups: tuple[DecodeGroup, ...]
    ) -> BatchInputs:
        groups = [
            (slots[:bucket], tables[:bucket])
            for slots, tables in zip(self._slot_mappings, self._block_tables, strict=True)
        ]
        batch = BatchInputs(
            token_ids=self._token_ids[:bucket],
            positions=self._positions[:bucket],
            slot_mapping=groups[0][0],
            query_start=self._query_start[: bucket + 1],
            context_lens=self._context_lens[:bucket],
            block_tables=groups[0][1],
            sample_index=self._sample_index[:bucket],
            query_lens=query_lens,
            context_lens_host=context_lens,
            num_decodes=bucket,
            decode_groups=decode_groups,
        )
        return batch.with_groups(groups[1:])

    def _pad(self, rows: int, samples: int) -> None:
        """Restore the invariant for fewer rows and samples than the buffers hold."""
        if rows < self._rows:
            stale = slice(rows, self._rows)
            self._token_ids[stale] = PADDING_TOKEN
            self._positions[stale] = PADDING_CONTEXT - 1
            self._context_lens[stale] = PADDING_CONTEXT
            by_group = zip(self._slot_mappings, self._block_tables, self._scratch_blocks, strict=True)
            for slots, tables, scratch in by_group:
                slots[stale] = scratch * self._block_size
                tables[stale] = scratch
            self._rows = rows
        if samples < self._samples:
            self._sample_index[samples : self._samples] = 0
            self._samples = samples


class GraphRunner:
    """Runs steps: decode steps padded to a bucket, all others as they are.

    Args:
        step: one forward pass; its result has one line for each entry of sample_index. It must read its inputs from
            the batch's tensors and nowhere else, and must not wait for the device.
        shape: of the buffers.
        device: of the batches.
        enabled: False runs every step as it is.

    Attributes:
        bucket: that the latest run was padded to; 0: it ran as it is.
    """

    def __init__(self, step: Step, shape: GraphShape, device: torch.device, *, enabled: bool = True) -> None:
        self._step = step
        self._buckets = shape.buckets
        self._batch = StaticBatch(shape, device)
        self._refused = None if enabled else "graphs are switched off"
        self._captured: dict[int, Captured] = {}
        self._stream = _stream(device)
        self._counts = GraphCounts()
        self.bucket = 0

    @property
    def refused(self) -> str | None:
        """Why no step is padded; None when steps are."""
        return self._refused

    @property
    def counts(self) -> GraphCounts:
        """Live counters."""
        return self._counts

    @torch.inference_mode()
    def run(self, inputs: BatchInputs) -> Tensor:
        """The step's result for the batch, one line for each entry of its sample_index.

        The result may lie in a graph's memory: it is valid until the next run, for work queued on this stream before.
        """
        bucket = self._bucket(inputs)
        self.bucket = bucket or 0
        if bucket is None:
            return self._step(inputs)
        result = self._run_plainly(inputs, bucket) if self._stream is None else self._replay(inputs, bucket)
        self._counts.replays[bucket] += 1
        self._counts.padded_rows += bucket - inputs.num_decodes
        return result[: inputs.sample_index.shape[0]]

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Capture every bucket now instead of at its first use; nothing to do on CPU.

        Args:
            progress: called with graphs made and graphs to make.
        """
        if self._stream is None:
            return
        # The largest first: the smaller ones then fit into its memory.
        for done, bucket in enumerate(reversed(self._buckets)):
            progress(done, len(self._buckets))
            if self._refused is None and bucket not in self._captured:
                self._capture(bucket, self._stream)
        progress(len(self._buckets), len(self._buckets))

    def explain(self) -> list[str]:
        """What runs how, a line for each kind of step."""
        counts = self._counts
        if self._refused is not None:
            lines = [f"no graphs: {self._refused}"]
        else:
            how = "replayed on static buffers" if self._stream is None else f"{counts.captures} graphs captured"
            lines = [f"decode steps of up to {self._buckets[-1]} rows: {how}, padded to {list(self._buckets)}"]
        lines += [f"{times} steps of {bucket} rows replayed" for bucket, times in sorted(counts.replays.items())]
        lines += [f"{times} steps run as they are: {reason}" for reason, times in sorted(counts.eager.items())]
        return lines

    def _bucket(self, inputs: BatchInputs) -> int | None:
        """The bucket for a batch; None, and the reason counted, when it runs as it is."""
        rows = inputs.context_lens.shape[0]
        reason = self._refused
        if reason is None and inputs.num_decodes < rows:
            reason = "rows of several tokens"
        elif reason is None and rows > self._buckets[-1]:
            reason = f"more than {self._buckets[-1]} rows"
        bucket = next((size for size in self._buckets if size >= rows), None)
        if reason is None and self._stream is not None and bucket is not None and bucket not in self._captured:
            self._capture(bucket, self._stream)
            reason = self._refused
        if reason is None:
            return bucket
        self._counts.eager[reason] += 1
        return None

    def _run_plainly(self, inputs: BatchInputs, bucket: int) -> Tensor:
        self._batch.fill(inputs)
        return self._step(self._batch.for_host(inputs, bucket))

    def _replay(self, inputs: BatchInputs, bucket: int) -> Tensor:
        self._batch.fill(inputs)
        captured = self._captured[bucket]
        captured.graph.replay()
        return captured.result

    def _capture(self, bucket: int, stream: torch.cuda.Stream) -> None:
        """Capture the bucket, or note why there will be no graphs."""
        self._batch.clear()
        self._refused = self._warm(bucket, stream)
        if self._refused is not None:
            return
        graph = torch.cuda.CUDAGraph()
        # Replays run one after the other on one stream, so all graphs may share one pool of memory.
        pool = next((other.graph.pool() for other in self._captured.values()), None)
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = self._step(self._batch.for_capture(bucket))
        self._captured[bucket] = Captured(graph, result)
        self._counts.captures += 1

    def _warm(self, bucket: int, stream: torch.cuda.Stream) -> str | None:
        """Run the bucket's step as it is: kernels get compiled and libraries make their workspaces, neither of which
        may happen in a capture. Each run has a batch of its own: what one derived from its batch must be computed anew
        by the next.

        Returns:
            Why the step cannot be captured, None when it can.
        """
        stream.wait_stream(torch.cuda.current_stream())
        mode = torch.cuda.get_sync_debug_mode()
        try:
            with torch.cuda.stream(stream):
                self._step(self._batch.for_capture(bucket))
                torch.cuda.set_sync_debug_mode("error")
                self._step(self._batch.for_capture(bucket))
        except HostRead as error:
            return str(error)
        except RuntimeError as error:
            if WAITED not in str(error):
                raise
            return "a kernel waits for the device"
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            torch.cuda.current_stream().wait_stream(stream)
        return None


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no annotation for it


def _refuse() -> NoReturn:
    raise HostRead("a kernel reads lengths on the host")


class _NoList(list[int]):
    """A list that refuses to be read."""

    def __len__(self) -> int:
        _refuse()

    def __iter__(self) -> Iterator[int]:
        _refuse()

    def __getitem__(self, index: object) -> NoReturn:
        _refuse()


class _NoGroups(tuple[DecodeGroup, ...]):
    """Groups that refuse to be read."""

    __slots__ = ()

    def __len__(self) -> int:
        _refuse()

    def __iter__(self) -> Iterator[DecodeGroup]:
        _refuse()

    def __getitem__(self, index: object) -> NoReturn:
        _refuse()
