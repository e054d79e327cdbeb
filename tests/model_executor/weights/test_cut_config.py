"""Fields that are bound to blocks: each is moved faithfully, left alone, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_executor.errors import ConfigRefused
from model_executor.weights.cut_config import ConfigCut, Prediction

SLIDING, FULL = "sliding_attention", "full_attention"
PATH = Path("config.json")


def cut(fields: Mapping[str, Any], sources: Sequence[int], prediction: Prediction = "drop") -> ConfigCut:
    """Cut a configuration of six blocks, or of as many as it says."""
    made = ConfigCut({"num_hidden_layers": 6, **fields}, sources, prediction, PATH)
    made.run()
    return made


def changed(fields: Mapping[str, Any], sources: Sequence[int], prediction: Prediction = "drop") -> dict[str, Any]:
    """What the edits say, the depth aside; they say all that changed."""
    before = {"num_hidden_layers": 6, **fields}
    made = cut(fields, sources, prediction)
    edits = {edit.field: edit.after for edit in made.edits}
    replayed = {**before, **edits}
    assert {name: value for name, value in replayed.items() if value is not None} == {
        name: value for name, value in made.fields.items() if value is not None
    }
    assert edits.pop("num_hidden_layers", 6) == len(sources)
    return edits


def test_a_plain_model_changes_in_its_depth_alone() -> None:
    fields = {"hidden_size": 8, "unknown": {"deep": [1, 2]}, "rope_scaling": None, "vocab_size": 6}
    made = cut(fields, [0, 3])
    assert made.fields == {**fields, "num_hidden_layers": 2}
    assert [(edit.field, edit.before, edit.after) for edit in made.edits] == [("num_hidden_layers", 6, 2)]


def test_the_full_choice_changes_nothing() -> None:
    assert changed({"layer_types": [FULL] * 6, "strange": [0] * 6, "scale_depth": 1.4}, range(6)) == {}


def test_the_source_configuration_stays() -> None:
    fields = {"num_hidden_layers": 6, "layer_types": [FULL] * 6, "deep": {"a": [1]}}
    made = ConfigCut(fields, [0], "drop", PATH)
    made.run()
    assert fields == {"num_hidden_layers": 6, "layer_types": [FULL] * 6, "deep": {"a": [1]}}
    assert made.fields["deep"] is not fields["deep"]


def test_other_names_of_the_depth() -> None:
    assert changed({"n_layer": 6}, [0, 1]) == {"n_layer": 2}
    with pytest.raises(ConfigRefused, match="num_layers: 12: it disagrees"):
        cut({"num_layers": 12}, [0])


@pytest.mark.parametrize(
    "field",
    ["layer_types", "mlp_layer_types", "indexer_types", "no_rope_layers", "moe_layer_freq", "num_key_value_heads"],
)
def test_lists_with_an_entry_for_each_block(field: str) -> None:
    values = [f"kind{index}" for index in range(6)]
    assert changed({field: values}, [0, 3, 5]) == {field: ["kind0", "kind3", "kind5"]}
    for wrong in (values[:5], [*values, "more"]):
        with pytest.raises(ConfigRefused, match=f"{field}: .*{len(wrong)} entries for num_hidden_layers = 6"):
            cut({field: wrong}, [0])
    assert changed({field: []}, [0, 3]) == {}


def test_a_pattern_with_a_letter_for_each_block() -> None:
    assert changed({"hybrid_override_pattern": "M-M*-E"}, [0, 3, 5]) == {"hybrid_override_pattern": "M*E"}
    with pytest.raises(ConfigRefused, match="hybrid_override_pattern: 'M-M': 3 entries"):
        cut({"hybrid_override_pattern": "M-M"}, [0])


def test_lists_of_block_indices() -> None:
    assert changed({"cross_attention_layers": [1, 3, 5]}, [0, 3, 5]) == {"cross_attention_layers": [1, 2]}
    assert changed({"moe_layers_enum": "1,3,5"}, [0, 3, 5]) == {"moe_layers_enum": "1,2"}
    for value in ([6], [-1], ["1"], {"1": 2}, [True]):
        with pytest.raises(ConfigRefused, match=r"full_attn_idxs: .*block indices, 0 \.\. 5"):
            cut({"full_attn_idxs": value}, [0])


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ([0, 1], {}),
        ([0, 1, 2, 3], {}),
        ([0, 3, 5], {"first_k_dense_replace": 1}),
        ([3, 4], {"first_k_dense_replace": 0}),
        ([1, 2, 5], {"first_k_dense_replace": 2}),
    ],
)
def test_dense_prefix(sources: list[int], expected: dict[str, int]) -> None:
    """Three dense blocks lead; the border goes with them. A border beyond the end says the same as one at the end."""
    assert changed({"first_k_dense_replace": 3, "moe_layer_freq": 1}, sources) == expected


def test_dense_prefix_that_is_not_written() -> None:
    assert changed({"model_type": "deepseek_v3"}, [0, 3, 5]) == {"first_k_dense_replace": 1}
    assert changed({"model_type": "deepseek_v2"}, [0, 3, 5]) == {}


@given(st.integers(0, 7), st.integers(1, 4), st.sets(st.integers(0, 5), min_size=1))
@settings(max_examples=150, deadline=None)
def test_dense_prefix_and_frequency_say_the_same_of_each_block(first: int, beat: int, chosen: set[int]) -> None:
    sources = sorted(chosen)
    dense = [source < first or source % beat != 0 for source in sources]
    if not any(
        is_dense == [index < border or index % period != 0 for index in range(len(dense))]
        for is_dense in [dense]
        for border in range(7)
        for period in (1, beat)
    ):
        with pytest.raises(ConfigRefused, match="moe_layer_freq"):
            cut({"first_k_dense_replace": first, "moe_layer_freq": beat}, sources)
        return
    made = cut({"first_k_dense_replace": first, "moe_layer_freq": beat}, sources).fields
    border, period = made["first_k_dense_replace"], made["moe_layer_freq"]
    assert [index < border or index % period != 0 for index in range(len(dense))] == dense


@given(st.integers(1, 4), st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5), min_size=1))
@settings(max_examples=150, deadline=None)
def test_sparse_step_and_dense_list_say_the_same_of_each_block(step: int, only: set[int], chosen: set[int]) -> None:
    sources = sorted(chosen)
    dense = [source in only or (source + 1) % step != 0 for source in sources]
    made = cut({"decoder_sparse_step": step, "mlp_only_layers": sorted(only)}, sources).fields
    listed, period = made["mlp_only_layers"], made["decoder_sparse_step"]
    assert [index in listed or (index + 1) % period != 0 for index in range(len(dense))] == dense
    assert all(index < len(sources) for index in listed)


@given(st.integers(0, 7), st.sets(st.integers(0, 5), min_size=1))
@settings(max_examples=80, deadline=None)
def test_window_prefix_says_the_same_of_each_block(first: int, chosen: set[int]) -> None:
    sources = sorted(chosen)
    made = cut({"use_sliding_window": True, "max_window_layers": first}, sources).fields
    border = made["max_window_layers"]
    assert [index >= border for index in range(len(sources))] == [source >= first for source in sources]


def test_window_prefix_without_windows_stays() -> None:
    assert changed({"use_sliding_window": False, "max_window_layers": 3}, [0, 5]) == {}
    assert changed({"use_sliding_window": True, "model_type": "qwen2", "num_hidden_layers": 40}, [0, 30]) == {
        "max_window_layers": 1
    }


PERIODIC = (
    ("sliding_window_pattern", "layer_types", {2: SLIDING, 3: FULL}),
    ("full_attention_interval", "layer_types", {2: "linear_attention", 3: FULL}),
    ("no_rope_layer_interval", "no_rope_layers", {2: 1, 3: 0}),
)


@pytest.mark.parametrize(("field", "explicit", "kinds"), PERIODIC, ids=lambda value: str(value)[:24])
def test_periods_are_written_out_where_they_would_lie(field: str, explicit: str, kinds: dict[int, Any]) -> None:
    """With a period of four, block 3 is the other kind: as block 1 it would not be."""
    assert changed({field: 4}, [2, 3]) == {explicit: [kinds[2], kinds[3]], field: None}
    assert changed({field: 4}, [0, 1, 2, 3]) == {}
    assert changed({field: 4}, [0, 2]) == {}


def test_periods_that_are_not_written() -> None:
    assert changed({"model_type": "gemma2"}, [1, 3]) == {"layer_types": [FULL, FULL]}
    assert changed({"model_type": "gemma2"}, [2, 3]) == {}
    assert changed({"model_type": "gemma3_text", "num_hidden_layers": 12}, [0, 5, 6]) == {
        "layer_types": [SLIDING, FULL, SLIDING]
    }


def test_a_list_goes_before_its_period() -> None:
    """The list is moved; a period that contradicts it under the new indices would mislead who reads it alone."""
    types = [SLIDING, SLIDING, FULL] * 2
    fields = {"layer_types": types, "sliding_window_pattern": 3}
    assert changed(fields, [0, 2, 5]) == {"layer_types": [SLIDING, FULL, FULL], "sliding_window_pattern": None}
    assert changed(fields, [0, 1, 2]) == {"layer_types": types[:3]}


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_layer_period": 3, "attn_layer_offset": 1},
        {"expert_layer_period": 2, "expert_layer_offset": 1},
        {"global_attn_every_n_layers": 3},
        {"interleave_moe_layer_step": 2},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_rules_without_another_form(fields: dict[str, int]) -> None:
    name = next(iter(fields))
    assert changed(fields, [0, 1, 2]) == {}
    with pytest.raises(ConfigRefused, match=rf"{name}: .*blocks \[1, 3\] under new indices"):
        cut(fields, [1, 3])


def test_shared_keys_and_values() -> None:
    """The last three blocks read the cache of the last block of their kind before them: 2 for full, 1 for sliding."""
    fields = {"num_kv_shared_layers": 3, "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING]}
    with pytest.raises(ConfigRefused, match=r"num_kv_shared_layers: 3: blocks \[3, 4\] need .* of blocks \[2\]"):
        cut(fields, [0, 1, 3, 4])
    kept = changed(fields, [0, 1, 2, 4])
    assert kept["num_kv_shared_layers"] == 1
    assert changed(fields, [0, 2])["num_kv_shared_layers"] == 0


@pytest.mark.parametrize("name", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_prediction_blocks(name: str) -> None:
    fields = {name: 1, "mtp_layer_types": [FULL]}
    assert changed(fields, [0, 1]) == {name: 0, "mtp_layer_types": []}
    assert changed(fields, [0, 1], "keep") == {}
    assert changed(fields, range(6)) == {name: 0, "mtp_layer_types": []}
    assert changed({name: 0}, [0, 1]) == {}


def test_lists_that_nobody_knows_are_refused_by_name() -> None:
    with pytest.raises(ConfigRefused, match=r"secret_scales: .*has one entry for each of the 6 blocks"):
        cut({"secret_scales": [0.1] * 6}, [0])
    with pytest.raises(ConfigRefused, match=r"extra\.secret: .*has one entry for each"):
        cut({"extra": {"secret": [1] * 6}}, [0])
    with pytest.raises(ConfigRefused, match=r"by_block: .*has one entry for each"):
        cut({"by_block": {"0": 1, "5": 2}}, [0])
    assert changed({"secret_scales": [0.1] * 5}, [0]) == {}
    assert changed({"eos_token_id": [1] * 6, "id2label": {"0": "A", "1": "B"}}, [0]) == {}


@pytest.mark.parametrize(("field", "value"), [("scale_depth", 1.4), ("use_mup", True)])
def test_what_depends_on_the_depth_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigRefused, match=f"{field}: .*depends on the depth"):
        cut({field: value}, [0])


@pytest.mark.parametrize("field", ["first_k_dense_replace", "decoder_sparse_step", "sliding_window_pattern"])
@pytest.mark.parametrize("value", ["3", -1, 1.5, True])
def test_values_of_another_kind_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigRefused, match=f"{field}: .*must be a whole number"):
        cut({field: value}, [1, 2])
