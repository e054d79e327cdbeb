"""How steps of single tokens run: as CUDA graphs, on the same static buffers without a graph, or as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine_core.wire.config import ExecutorOptions
from engine_core.wire.reports import KernelCandidate, KernelChoice
from model_executor.graph import bucket_sizes

GRAPH: Final = "cuda_graph"
BUFFERS: Final = "static_buffers"
PROGRAM: Final = "native_program"
NO_PROGRAM: Final = "the native library does not compute the model"
AS_IT_IS: Final = "as_it_is"


@dataclass(frozen=True)
class GraphChoice:
    """What was chosen.

    Attributes:
        buckets: row counts that steps are padded to, rising; empty: steps run as they are.
        most: what buckets would be if nothing spoke against them.
        candidates: name and the reasons against it, in order of preference; the last one has none.
    """

    buckets: tuple[int, ...]
    most: tuple[int, ...]
    candidates: tuple[tuple[str, tuple[str, ...]], ...]

    def report(self, refused: str | None = None) -> KernelChoice:
        """The choice as the start reports it.

        Args:
            refused: what the first capture found against graphs.
        """
        known = [KernelCandidate(name, list(reasons)) for name, reasons in self.candidates]
        if refused is not None:
            known[0].reasons.append(refused)
        chosen = next(candidate.name for candidate in known if not candidate.reasons)
        problem = f"steps of single tokens, padded to {', '.join(map(str, self.most))} rows"
        return KernelChoice("decode_step", problem, chosen, known)


def choose_graphs(
    options: ExecutorOptions, device: str, *, waits_for_device: bool, max_rows: int, program: str | None = NO_PROGRAM
) -> GraphChoice:
    """Choose from the options and the facts.

    Args:
        options: of the executor.
        device: "cpu" or "cuda".
        waits_for_device: whether the model reads results on the host within a step.
        max_rows: rows of the largest step.
        program: why the native library cannot run a step in one call; None: it can.
    """
    both = ["--enforce-eager"] if options.enforce_eager else []
    graph, buffers = list(both), list(both)
    if device == "cuda":
        buffers.append("device cuda: a graph holds the same step")
        if waits_for_device:
            graph.append("the model reads results on the host within a step")
    else:
        graph.append(f"device {device}: runs on cuda")
        if not options.cuda_graph_sizes:
            buffers.append("padding costs time on CPU: it is done where --cuda-graph-sizes asks for it")
    most = bucket_sizes(options.cuda_graph_sizes, max_rows)
    calls = [*both, *([] if program is None else [program])]
    candidates = ((GRAPH, tuple(graph)), (BUFFERS, tuple(buffers)), (PROGRAM, tuple(calls)), (AS_IT_IS, ()))
    return GraphChoice(() if graph and buffers else most, most, candidates)
