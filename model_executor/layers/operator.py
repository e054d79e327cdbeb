"""How a kernel of any operator stands in the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch


class Problem(Protocol):
    """What a kernel is to compute, as far as every operator has it."""

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs and weights."""
        ...


P = TypeVar("P", bound=Problem)
K = TypeVar("K", covariant=True)


def _nothing(_: object) -> None:
    return None


@dataclass(frozen=True)
class OperatorSpec(Generic[P, K]):
    """One kernel of the registry.

    Attributes:
        name: in reports.
        factory: makes the kernel for a problem that the spec does not reject.
        devices, dtypes: it runs on and in; None: all.
        other: what else it cannot do about a problem of its devices and dtypes; None: nothing.
    """

    name: str
    factory: Callable[[P], K]
    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    other: Callable[[P], str | None] = _nothing

    def reject(self, problem: P) -> tuple[str, ...]:
        """Why this kernel does not serve the problem; empty when it does."""
        reasons = []
        if self.devices is not None and problem.device not in self.devices:
            reasons.append(f"device {problem.device}: runs on {', '.join(sorted(self.devices))}")
        if self.dtypes is not None and problem.dtype not in self.dtypes:
            reasons.append(f"dtype {problem.dtype}: takes {', '.join(sorted(map(str, self.dtypes)))}")
        if not reasons and (reason := self.other(problem)):
            reasons.append(reason)
        return tuple(reasons)
