"""The tables of fields contradict neither themselves nor transformers."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from model_executor.weights import cut_fields as fields


def test_a_field_has_one_meaning() -> None:
    lists = (fields.PER_BLOCK, fields.INDEX_LISTS, fields.INDEX_TEXTS, fields.UNBOUND, frozenset(fields.DEPTH_BOUND))
    names = [name for table in lists for name in table]
    assert len(names) == len(set(names))
    assert set(fields.FIXED_UNLESS) <= set(fields.FIXED)
    assert set(fields.FIXED_UNLESS.values()) <= fields.INDEX_LISTS
    assert {rule.explicit for rule in fields.PERIODIC} <= fields.PER_BLOCK


@pytest.mark.parametrize(("model_type", "period"), fields.PERIODIC[0].implied.items())
def test_implied_periods_are_those_of_transformers(model_type: str, period: int) -> None:
    types = AutoConfig.for_model(model_type, num_hidden_layers=12).layer_types
    assert types == [fields.PERIODIC[0].kind(period, index) for index in range(12)]


@pytest.mark.parametrize(("key", "value"), fields.IMPLIED.items())
def test_implied_values_are_those_of_transformers(key: tuple[str, str], value: int) -> None:
    assert getattr(AutoConfig.for_model(key[0]), key[1]) == value
