"""The residual stream as it passes the borders of a model's blocks, seen through hooks that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

import torch
from torch import Tensor, nn

from model_executor.models.decoder import Block

EMBEDDING: Final = "embedding"
FINAL_NORM: Final = "final norm"
LOGITS: Final = "logits"


@dataclass
class Seen:
    """What passed, in the order of the places, each [T, width] on the CPU.

    Attributes:
        values: by place, the pieces of all steps.
    """

    values: dict[str, list[Tensor]] = field(default_factory=dict)

    def take(self) -> dict[str, Tensor]:
        """All that passed since the last call, the steps put together."""
        taken = {place: torch.cat(pieces) for place, pieces in self.values.items()}
        self.values.clear()
        return taken


class Observer:
    """Watches a model within a `with`.

    What is seen of a block is the stream after it: its output, or for ours, which leave the last sum to the norm after
    them, the sum of what they were given, as they changed it, and what they give.

    Args:
        blocks: in runtime order.
        norm: the final norm.
        names: of the blocks, as places.
    """

    def __init__(self, blocks: Sequence[nn.Module], norm: nn.Module, names: Sequence[str]) -> None:
        self._blocks = blocks
        self._norm = norm
        self._names = names
        self._hooks = ExitStack()
        self.seen = Seen()

    def __enter__(self) -> Seen:
        first = self._blocks[0].register_forward_pre_hook(self._before, with_kwargs=True)
        self._hooks.callback(first.remove)
        for name, module in [*zip(self._names, self._blocks, strict=True), (FINAL_NORM, self._norm)]:
            self._hooks.callback(module.register_forward_hook(self._after(name)).remove)
        return self.seen

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()

    def _before(self, _: nn.Module, inputs: tuple[object, ...], named: dict[str, object]) -> None:
        self._keep(EMBEDDING, inputs[0] if inputs else named["hidden_states"])

    def _after(self, place: str) -> Callable[[nn.Module, tuple[object, ...], object], None]:
        def hook(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if isinstance(module, Block):
                value = inputs[0] + value  # type: ignore[operator]  # both are tensors
            self._keep(place, value)

        return hook

    def _keep(self, place: str, value: object) -> None:
        assert isinstance(value, Tensor)
        rows = value.detach().flatten(0, -2)
        # A copy: the next step may write the same memory.
        self.seen.values.setdefault(place, []).append(rows.to("cpu", copy=True))


def block_names(sources: Sequence[int], classes: Sequence[str]) -> list[str]:
    """Places of the blocks of a plan."""
    placed = zip(sources, classes, strict=True)
    return [f"block {index} <- {source} {name}" for index, (source, name) in enumerate(placed)]
