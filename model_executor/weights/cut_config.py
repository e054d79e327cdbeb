"""config.json of a checkpoint cut down to some of its blocks: what is bound to a block goes with it, all else stays.

A rule that still tells the truth about the new indices is left alone. One that does not is written anew where there is
a form that says the same, and refused by name where there is none.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from model_executor.errors import ConfigRefused
from model_executor.weights.cut_fields import (
    DEPTH,
    DEPTH_ALIASES,
    DEPTH_BOUND,
    FIXED,
    FIXED_UNLESS,
    IMPLIED,
    INDEX_LISTS,
    INDEX_TEXTS,
    PER_BLOCK,
    PERIODIC,
    PREDICTION_COUNTS,
    PREDICTION_LISTS,
    UNBOUND,
    Periodic,
)

Prediction = Literal["keep", "drop"]


class Edit(Struct, frozen=True):
    """A field that had to change.

    Attributes:
        field: of config.json, or dotted into an object.
        before, after: its values; None: it is not there.
        why: in one clause.
    """

    field: str
    before: Any
    after: Any
    why: str


class ConfigCut:
    """Moves the fields of one configuration.

    Args:
        fields: of config.json; stays as it is.
        sources: the blocks that remain, ascending.
        prediction: what becomes of the prediction blocks.
        path: of config.json, for errors.

    Attributes:
        fields: the new configuration.
        edits: what changed.
    """

    def __init__(self, fields: Mapping[str, Any], sources: Sequence[int], prediction: Prediction, path: Path) -> None:
        self.fields: dict[str, Any] = copy.deepcopy(dict(fields))
        self.edits: list[Edit] = []
        self._old = fields
        self._sources = tuple(sources)
        self._depth = _count(fields.get(DEPTH), DEPTH, path)
        self._prediction = prediction
        self._path = path

    def run(self) -> None:
        """Move everything.

        Raises:
            ConfigRefused: a field that cannot be moved faithfully.
        """
        self._move_prediction()
        if self._sources == tuple(range(self._depth)):
            return
        self._check_bound()
        self._move_dense_prefix()
        self._move_sparse_step()
        self._move_window_prefix()
        self._move_shared_states()
        for rule in PERIODIC:
            self._move_periodic(rule)
        for field in FIXED:
            self._check_fixed(field)
        for field in sorted(self._old.keys() & PER_BLOCK):
            self._move_per_block(field)
        for field in sorted(self._old.keys() & (INDEX_LISTS - {"mlp_only_layers"})):
            self._move_indices(field)
        for field in sorted(self._old.keys() & INDEX_TEXTS):
            self._move_index_text(field)
        self._move_depth()

    def _put(self, field: str, value: object, why: str) -> None:
        if field not in self.fields or self.fields[field] != value:
            self.edits.append(Edit(field, self.fields.get(field), value, why))
            self.fields[field] = value

    def _take(self, field: str, why: str) -> None:
        if field in self.fields:
            self.edits.append(Edit(field, self.fields.pop(field), None, why))

    def _refuse(self, field: str, reason: str) -> ConfigRefused:
        return ConfigRefused(field, self._old.get(field), reason, self._path)

    def _value(self, field: str) -> object:
        """What the field says, or what its absence means."""
        value = self._old.get(field)
        return IMPLIED.get((str(self._old.get("model_type")), field)) if value is None else value

    def _natural(self, field: str, value: object) -> int:
        return _count(value, field, self._path, least=0)

    def _move_depth(self) -> None:
        self._put(DEPTH, len(self._sources), "as many blocks as remain")
        for field in DEPTH_ALIASES:
            value = self._old.get(field)
            if value is None:
                continue
            if value != self._depth:
                raise self._refuse(field, f"it disagrees with {DEPTH}, {self._depth}; which one is meant is not known")
            self._put(field, len(self._sources), f"another name of {DEPTH}")

    def _move_prediction(self) -> None:
        if self._prediction == "keep":
            return
        why = "the prediction blocks (MTP) are dropped"
        for field in PREDICTION_COUNTS:
            if self._old.get(field):
                self._put(field, 0, why)
        for field in PREDICTION_LISTS:
            if self._old.get(field):
                self._put(field, [], why)

    def _check_bound(self) -> None:
        for field, neutral in DEPTH_BOUND.items():
            if field in self._old and not any(self._old[field] == one for one in neutral):
                raise self._refuse(field, "what it does depends on the depth of the model")
        self._check_unknown(self._old, "")

    def _check_unknown(self, fields: Mapping[str, Any], prefix: str) -> None:
        for field, value in fields.items():
            if field in UNBOUND or field in PER_BLOCK or field in INDEX_LISTS or field in PREDICTION_LISTS:
                continue
            looks = isinstance(value, list) and len(value) == self._depth and self._depth > 1
            if isinstance(value, dict):
                looks = _keyed_by_block(value, self._depth)
                self._check_unknown(value, f"{prefix}{field}.")
            if looks:
                reason = (
                    f"has one entry for each of the {self._depth} blocks, or seems to; no rule tells how to move it"
                )
                raise ConfigRefused(f"{prefix}{field}", value, reason, self._path)

    def _move_dense_prefix(self) -> None:
        """first_k_dense_replace and moe_layer_freq: block i is dense below the former, and off the latter's beat."""
        first, beat = self._value("first_k_dense_replace"), self._value("moe_layer_freq")
        if first is None or isinstance(beat, list):
            # A list of frequencies is moved with the other lists; without a prefix the beat stands alone.
            first, beat = (0, beat) if first is None and isinstance(beat, int) else (first, 1)
        if first is None:
            return
        first = self._natural("first_k_dense_replace", first)
        beat = max(1, self._natural("moe_layer_freq", 1 if beat is None else beat))
        dense = [source < first or source % beat != 0 for source in self._sources]
        border = sum(source < first for source in self._sources)
        for prefix, period in ((first, beat), (border, beat), (border, 1), (sum(dense), 1)):
            if [index < prefix or index % period != 0 for index in range(len(dense))] == dense:
                if prefix != first:
                    self._put("first_k_dense_replace", prefix, f"so many of the remaining blocks are below {first}")
                if period != beat:
                    self._put("moe_layer_freq", period, "the kinds of the remaining blocks follow no longer beat")
                return
        raise self._refuse("moe_layer_freq", "the dense and sparse blocks that remain follow no such rule")

    def _move_sparse_step(self) -> None:
        """decoder_sparse_step and mlp_only_layers: block i is sparse on the step, unless the list names it."""
        step, only = self._old.get("decoder_sparse_step"), self._old.get("mlp_only_layers")
        if step is None and not only:
            return
        period = max(1, self._natural("decoder_sparse_step", 1 if step is None else step))
        named = set(self._indices("mlp_only_layers", only or []))
        dense = [source in named or (source + 1) % period != 0 for source in self._sources]
        if [index in named or (index + 1) % period != 0 for index in range(len(dense))] != dense or self._beyond(named):
            why = "the dense blocks are named one by one"
            self._put("mlp_only_layers", [index for index, is_dense in enumerate(dense) if is_dense], why)
            if period != 1:
                self._put("decoder_sparse_step", 1, why)

    def _beyond(self, indices: set[int]) -> bool:
        return any(index >= len(self._sources) for index in indices)

    def _move_window_prefix(self) -> None:
        """max_window_layers: with use_sliding_window, block i has a window from it on."""
        first = self._value("max_window_layers")
        if first is None or not self._old.get("use_sliding_window"):
            return
        first = self._natural("max_window_layers", first)
        border = sum(source < first for source in self._sources)
        if [source < first for source in self._sources] != [index < first for index in range(len(self._sources))]:
            self._put("max_window_layers", border, f"so many of the remaining blocks are below {first}")

    def _move_shared_states(self) -> None:
        """num_kv_shared_layers: so many last blocks read the cache of the last block of their kind before them."""
        count = self._old.get("num_kv_shared_layers")
        if not count:
            return
        border = self._depth - self._natural("num_kv_shared_layers", count)
        kinds = self._old.get("layer_types") or [None] * self._depth
        readers = [source for source in self._sources if source >= border]
        lacking = sorted({donor for reader in readers if (donor := _donor(kinds, border, reader)) not in self._sources})
        if lacking:
            raise self._refuse("num_kv_shared_layers", f"blocks {readers} need the keys and values of blocks {lacking}")
        self._put("num_kv_shared_layers", len(readers), "so many of the remaining blocks share keys and values")

    def _move_periodic(self, rule: Periodic) -> None:
        period = self._old.get(rule.field)
        if isinstance(period, list) or self._old.get(rule.explicit):
            # The list goes before the rule; a rule that contradicts it would mislead whoever reads it alone.
            if isinstance(period, int) and period > 0 and not self._obeyed(rule, period):
                self._take(rule.field, f"{rule.explicit} says it, and the new indices do not follow this rule")
            return
        if period is None:
            period = rule.implied.get(str(self._old.get("model_type")))
        if not period or self._obeyed(rule, self._natural(rule.field, period)):
            return
        kinds = [rule.kind(period, source) for source in self._sources]
        self._put(rule.explicit, kinds, f"written out: the new indices do not follow {rule.field}")
        self._take(rule.field, f"{rule.explicit} says it now")

    def _obeyed(self, rule: Periodic, period: int) -> bool:
        return all(rule.kind(period, index) == rule.kind(period, source) for index, source in enumerate(self._sources))

    def _check_fixed(self, field: str) -> None:
        value = self._old.get(field)
        if not value or self._old.get(FIXED_UNLESS.get(field, "")):
            return
        rule, period = FIXED[field], self._natural(field, value)
        if any(rule(period, self._old, i) != rule(period, self._old, s) for i, s in enumerate(self._sources)):
            raise self._refuse(field, f"the blocks {list(self._sources)} under new indices do not follow this rule")

    def _move_per_block(self, field: str) -> None:
        value = self._old[field]
        if not isinstance(value, list | str) or not value:
            return
        if isinstance(value, str) and not field.endswith("_pattern"):
            return
        if len(value) != self._depth:
            raise self._refuse(field, f"{len(value)} entries for {DEPTH} = {self._depth}")
        kept = [value[source] for source in self._sources]
        self._put(field, "".join(kept) if isinstance(value, str) else kept, "the entries of the remaining blocks")

    def _move_indices(self, field: str) -> None:
        value = self._old[field]
        if value:
            self._put(field, self._moved(self._indices(field, value)), "the remaining blocks under their new indices")

    def _move_index_text(self, field: str) -> None:
        value = self._old[field]
        if not value:
            return
        words = str(value).split(",")
        if not all(word.strip().isdecimal() for word in words):
            raise self._refuse(field, "must be block indices with commas between them")
        moved = self._moved(self._indices(field, [int(word) for word in words]))
        self._put(field, ",".join(map(str, moved)), "the remaining blocks under their new indices")

    def _moved(self, indices: Sequence[int]) -> list[int]:
        return [self._sources.index(index) for index in indices if index in self._sources]

    def _indices(self, field: str, value: object) -> list[int]:
        if isinstance(value, list) and all(type(item) is int and 0 <= item < self._depth for item in value):
            return value
        raise self._refuse(field, f"must be a list of block indices, 0 .. {self._depth - 1}")


def _count(value: object, field: str, path: Path, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigRefused(field, value, f"must be a whole number from {least} on", path)
    return value


def _donor(kinds: Sequence[Any], border: int, reader: int) -> int:
    """The last block below the border of the reader's kind, or -1."""
    return max((index for index in range(border) if kinds[index] == kinds[reader]), default=-1)


def _keyed_by_block(value: Mapping[str, Any], depth: int) -> bool:
    """Whether an object's keys are block indices."""
    return depth > 1 and len(value) > 1 and all(key.isdecimal() and int(key) < depth for key in value)
