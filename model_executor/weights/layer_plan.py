"""Which blocks of the checkpoint run, in which order.

Runtime index i (position in the plan) owns order and KV state; source index s = sources[i] owns the checkpoint's names
and everything that is bound to the block: kind, window, RoPE. A full run is the plan that holds every block. All that
the option `--layers` can ask for is decided here; what is built and loaded follows the plan and asks nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec import Struct, structs

from engine_core.wire.config import ModelOptions
from model_executor.errors import LayersRefused
from model_executor.models.spec import LayerSpec, ModelSpec

FORMS: Final = "full, cover, first:N, or block indices in ascending order such as 0,3,7-9"
_FIRST: Final = re.compile(r"first:([0-9]{1,9})")
_ITEM: Final = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


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


class BlockClass(Struct, frozen=True):
    """Blocks that differ in nothing but their weights.

    Attributes:
        name: unique within the model.
        sources: the blocks, ascending.
    """

    name: str
    sources: tuple[int, ...]


def block_classes(spec: ModelSpec) -> tuple[BlockClass, ...]:
    """The classes of a model's blocks, in the order of their first block."""
    members: dict[LayerSpec, list[int]] = {}
    for layer in spec.layers:
        # Which block is the donor of a shared state tells no class from another, that there is one does.
        kind = structs.replace(layer, source=0, needs=(0,) if layer.needs else ())
        members.setdefault(kind, []).append(layer.source)
    made: list[BlockClass] = []
    for kind, sources in members.items():
        alike = sum(each.name.partition("#")[0] == kind.class_name for each in made)
        made.append(BlockClass(kind.class_name + (f"#{alike + 1}" if alike else ""), tuple(sources)))
    return tuple(made)


def plan_layers(spec: ModelSpec, sources: Sequence[int] | None = None) -> LayerPlan:
    """Plan these blocks, or all.

    Raises:
        LayersRefused: no block, a block twice, one that the model does not have, or one without a block it needs.
    """
    chosen = tuple(range(len(spec.layers))) if sources is None else tuple(sources)
    if not chosen:
        raise LayersRefused(chosen, "at least one is needed")
    if len(set(chosen)) != len(chosen):
        raise LayersRefused(chosen, "each block at most once")
    outside = [source for source in chosen if not 0 <= source < len(spec.layers)]
    if outside:
        raise LayersRefused(chosen, f"{outside} outside 0 .. {len(spec.layers) - 1}")
    lacking = [
        f"{donor} (for {source})" for source in chosen for donor in spec.layers[source].needs if donor not in chosen
    ]
    if lacking:
        raise LayersRefused(chosen, f"blocks share state with others that are not chosen: {', '.join(lacking)}")
    names = {source: each.name for each in block_classes(spec) for source in each.sources}
    return LayerPlan(sources=chosen, classes=tuple(names[source] for source in chosen))


def choose_layers(spec: ModelSpec, options: ModelOptions) -> LayerPlan:
    """The plan that `layers` and `allow_missing_classes` of the options ask for.

    Raises:
        LayersRefused: `layers` has another form than FORMS, names a block twice, out of order or that the model does
            not have, or leaves a class of blocks out without leave to do so.
    """
    plan = plan_layers(spec, _sources(spec, options.layers))
    missing = missing_classes(spec, plan)
    if missing and not options.allow_missing_classes:
        left = "; ".join(f"{each.name} (blocks {compact(each.sources)})" for each in missing)
        hint = f"cover would be {compact(covering(spec))}; --allow-missing-classes leaves them out on purpose"
        raise LayersRefused(options.layers, f"no block of {left} is chosen; {hint}")
    return plan


def missing_classes(spec: ModelSpec, plan: LayerPlan) -> tuple[BlockClass, ...]:
    """The classes of which the plan holds no block."""
    return tuple(each for each in block_classes(spec) if not set(each.sources) & set(plan.sources))


def covering(spec: ModelSpec) -> tuple[int, ...]:
    """The smallest choice with a block of each class, the first of each, and the blocks that those need; ascending."""
    chosen: set[int] = set()
    waiting = [each.sources[0] for each in block_classes(spec)]
    while waiting:
        source = waiting.pop()
        chosen.add(source)
        waiting += [donor for donor in spec.layers[source].needs if donor not in chosen]
    return tuple(sorted(chosen))


def compact(indices: Iterable[int]) -> str:
    """Ascending indices as `--layers` takes them: "0,3,7-9"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _sources(spec: ModelSpec, text: str) -> Sequence[int] | None:
    if text == "full":
        return None
    if text == "cover":
        return covering(spec)
    if first := _FIRST.fullmatch(text):
        count = int(first[1])
        if not 1 <= count <= len(spec.layers):
            raise LayersRefused(text, f"the model has {len(spec.layers)} blocks; 1 to {len(spec.layers)} are possible")
        return range(count)
    return tuple(_listed(text, len(spec.layers)))


def _listed(text: str, depth: int) -> Iterator[int]:
    last = -1
    for item in text.split(","):
        found = _ITEM.fullmatch(item.strip())
        if not found:
            raise LayersRefused(text, f"{item.strip()!r} is no block; possible are {FORMS}")
        begin, end = int(found[1]), int(found[2] or found[1])
        if end < begin:
            raise LayersRefused(text, f"{item.strip()} runs backwards")
        if end >= depth:
            raise LayersRefused(text, f"block {end} is outside 0 .. {depth - 1}")
        if begin <= last:
            fault = f"block {begin} stands twice" if begin == last else f"block {begin} follows block {last}"
            raise LayersRefused(text, f"{fault}: the order is ascending, each block at most once")
        yield from range(begin, end + 1)
        last = end
