"""Where each tensor of a checkpoint belongs, by its name alone: outside the blocks, to a block, to a prediction block.

It needs no file but the list of names and knows nothing of parameters, so quantized tensors (scales, zero points) go
with the block that they stand in.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from msgspec import Struct

from model_executor.errors import WeightsRefused
from model_executor.models.spec import ModelSpec
from model_executor.weights.index import Checkpoint
from model_executor.weights.parameters import NameTable

_MARK: Final = "{source}"


class Inventory(Struct, frozen=True):
    """A checkpoint's tensors by place.

    Attributes:
        outer: outside the blocks: embedding, final norm, head and what belongs to them.
        blocks: of each block, by source index.
        prediction: of each block that predicts further tokens (MTP), by its position behind the last block.
        ignored: left in the files, with the reason.
        other_parts: likewise, but what they make up belongs to the checkpoint as a whole.
    """

    outer: tuple[str, ...]
    blocks: Mapping[int, tuple[str, ...]]
    prediction: Mapping[int, tuple[str, ...]]
    ignored: Mapping[str, str]
    other_parts: Mapping[str, str]

    def of(self, sources: Collection[int]) -> tuple[str, ...]:
        """What stands outside the blocks, then these blocks' tensors."""
        return self.outer + tuple(name for source in sources for name in self.blocks.get(source, ()))


class BlockPrefix:
    """The names of a block's tensors in a family's checkpoints.

    Args:
        names: of the family.
    """

    def __init__(self, names: NameTable) -> None:
        before, mark, after = names.block.partition(_MARK)
        assert mark, "a block's prefix has a place for its index"
        self._format = names.block
        self._pattern = re.compile(re.escape(before) + r"(0|[1-9][0-9]{0,8})" + re.escape(after))

    def index(self, tensor: str) -> int | None:
        """The block that a tensor stands in; None: outside the blocks."""
        found = self._pattern.match(tensor)
        return int(found[1]) if found else None

    def moved(self, tensor: str, block: int) -> str:
        """The tensor's name in another block."""
        found = self._pattern.match(tensor)
        assert found is not None
        return self._format.format(source=block) + tensor[found.end() :]


def take_stock(spec: ModelSpec, names: NameTable, checkpoint: Checkpoint) -> Inventory:
    """Place every tensor.

    Args:
        spec: of the model.
        names: as this checkpoint has them.
        checkpoint: its list of tensors.

    Raises:
        WeightsRefused: a tensor of a block that neither num_hidden_layers nor num_nextn_predict_layers accounts for, a
            block without tensors, or no embedding.
    """
    prefix, depth = BlockPrefix(names), len(spec.layers)
    outer: list[str] = []
    blocks: dict[int, list[str]] = {}
    prediction: dict[int, list[str]] = {}
    ignored: dict[str, str] = {}
    other_parts: dict[str, str] = {}
    unexpected: list[str] = []
    for name in sorted(checkpoint.files):
        block = prefix.index(name)
        if rule := names.rule_of(name):
            (other_parts if rule.other_part else ignored)[name] = rule.reason
        elif block is None:
            outer.append(name)
        elif block < depth:
            blocks.setdefault(block, []).append(name)
        elif block < depth + spec.mtp_layers:
            prediction.setdefault(block - depth, []).append(name)
        else:
            unexpected.append(name)
    missing = [f"{names.block.format(source=block)}*" for block in range(depth) if block not in blocks]
    if names.embedding not in outer and not (spec.tie and names.head in outer):
        missing.append(names.embedding)
    if missing or unexpected:
        raise WeightsRefused(checkpoint.folder, missing=missing, unexpected=unexpected)
    return Inventory(tuple(outer), _frozen(blocks), _frozen(prediction), ignored, other_parts)


def files_of(checkpoint: Checkpoint, tensors: Iterable[str]) -> tuple[str, ...]:
    """The files that hold these tensors, sorted."""
    return tuple(sorted({checkpoint.files[name] for name in tensors}))


def _frozen(groups: Mapping[int, list[str]]) -> dict[int, tuple[str, ...]]:
    return {index: tuple(group) for index, group in sorted(groups.items())}
