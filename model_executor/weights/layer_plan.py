"""Which blocks of the checkpoint run, in which order.

Runtime index i (position in the plan) owns order and KV state; source index s = sources[i] owns the checkpoint's names
and everything that is bound to the block: kind, window, RoPE. A full run is the plan that holds every block.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from model_executor.errors import LayersRefused
from model_executor.models.spec import LayerSpec, ModelSpec


class LayerPlan(Struct, frozen=True):
    """The blocks that run.

    Attributes:
        sources: source index of each runtime layer; no index twice.
        classes: class name of each runtime layer.
    """

    sources: tuple[int, ...]
    classes: tuple[str, ...]

    def layers(self, spec: ModelSpec) -> tuple[LayerSpec, ...]:
        """The layers to build, in runtime order."""
        return tuple(spec.layers[source] for source in self.sources)


def plan_layers(spec: ModelSpec, sources: Sequence[int] | None = None) -> LayerPlan:
    """Plan these blocks, or all.

    Raises:
        LayersRefused: no block, a block twice, or one that the model does not have.
    """
    chosen = tuple(range(len(spec.layers))) if sources is None else tuple(sources)
    if not chosen:
        raise LayersRefused(chosen, "at least one is needed")
    if len(set(chosen)) != len(chosen):
        raise LayersRefused(chosen, "each block at most once")
    outside = [source for source in chosen if not 0 <= source < len(spec.layers)]
    if outside:
        raise LayersRefused(chosen, f"{outside} outside 0 .. {len(spec.layers) - 1}")
    return LayerPlan(sources=chosen, classes=tuple(spec.layers[source].class_name for source in chosen))
