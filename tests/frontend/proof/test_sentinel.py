"""A sentinel finds what differs, names it, and compares one plan only."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from engine_core.wire import evidence
from engine_core.wire.client import Model, Ready
from engine_core.wire.evidence import PackEntry, PlanIdentity, ReferenceRun, WeightDigest
from frontend.errors import UsageError
from frontend.proof.sentinel import (
    Sentinel,
    check_identity,
    check_runs,
    check_served,
    differences,
    lines,
    read_sentinel,
)
from tests.frontend.proof.examples import ENVIRONMENT, identity, load, sentinel, sequence

ELSEWHERE = structs.replace(ENVIRONMENT, machine="another processor")


def now(served: evidence.Sequence | None = None, *, under: str = "here", **reference: object) -> Sentinel:
    base = sentinel()
    run: ReferenceRun = structs.replace(base.reference, **reference)
    return structs.replace(
        base, reference=run, served=base.served if served is None else [served], served_under=[under]
    )


def test_nothing_differs() -> None:
    assert differences(sentinel(), now()) == []
    assert lines([], sentinel())[-1] == "verdict: pass"


def test_a_weight_that_differs_is_named() -> None:
    weights = [WeightDigest("norm.weight", ["model.norm.weight"], "d3"), *sentinel().reference.weights[1:]]
    faults = differences(sentinel(), now(weights=weights))
    assert faults == ["weight norm.weight (from model.norm.weight): other bytes"]
    assert lines(faults, sentinel())[-1] == "verdict: fail"
    assert differences(sentinel(), now(weights=weights[:1]))[-1] == "weight head.weight: is gone"


def test_the_reference_must_be_equal_to_the_bit_in_the_same_place() -> None:
    moved = [sequence(error=1e-9)]
    assert differences(sentinel(), now(sequences=moved)) == [
        "reference: p/0: token 0: log-probability off by 1e-09, allowed 0"
    ]
    assert differences(sentinel(), now(sequences=moved, environment=ELSEWHERE)) == []


def test_the_server_must_be_equal_to_the_bit_in_the_same_place() -> None:
    moved = sequence(error=1e-4 + 1e-9)
    (fault,) = differences(sentinel(), now(moved))
    assert fault.startswith("server: p/0: token 0: log-probability off by 1e-09")
    assert differences(sentinel(), now(moved, under="elsewhere")) == []


@pytest.mark.parametrize("error", [0.02, float("nan")])
def test_the_bound_counts_elsewhere(error: float) -> None:
    (fault,) = differences(sentinel(), now(sequence(error=error), under="elsewhere"))
    assert "allowed 0.01" in fault


def test_a_token_may_differ_where_the_lead_is_a_near_tie() -> None:
    other = sequence(tokens=(1, 9, 9))
    (fault,) = differences(sentinel(), now(other, under="elsewhere"))
    assert fault == "server: p/0: token 1 is 9, recorded 2 with a lead of 0.3"
    near = structs.replace(sequence(), leads=[0.3, 0.015, 0.3])
    base = structs.replace(sentinel(), reference=structs.replace(sentinel().reference, sequences=[near]))
    assert differences(base, now(other, under="elsewhere", sequences=[near])) == []


def test_lengths_and_names() -> None:
    assert differences(sentinel(), now(sequence(tokens=(1,)), under="elsewhere")) == [
        "server: p/0: 1 tokens, recorded 3"
    ]
    assert "other sequences" in differences(sentinel(), now(sequence("p/1"), under="elsewhere"))[0]


@pytest.mark.parametrize(
    "other",
    [
        identity((0, 4)),
        structs.replace(identity(), dtype="bfloat16"),
        structs.replace(identity(), revision="r2"),
        structs.replace(identity(), sample_vocab=95),
        structs.replace(identity(), quantization="int8"),
    ],
)
def test_another_plan_is_not_compared(other: PlanIdentity) -> None:
    check_identity(identity(), identity())
    with pytest.raises(UsageError, match="of another plan and is not compared"):
        check_identity(identity(), other)


def test_a_server_of_another_plan_is_not_compared() -> None:
    model = Model("m", 128, 96, (), "float32", "float32", 64, 16)
    ready = Ready(model, load(), [], {}, 1)
    check_served(identity(), ready)
    with pytest.raises(UsageError, match="not compared: quantization none, now int8"):
        check_served(identity(), structs.replace(ready, model=structs.replace(model, quantization="int8")))


def test_products_in_int8_are_named() -> None:
    reference = structs.replace(sentinel().reference, identity=structs.replace(identity(), quantization="int8"))
    assert (
        "2 of 6 blocks in float32 with products in int8;"
        in lines([], structs.replace(sentinel(), reference=reference))[0]
    )


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_bytes(msgspec.json.encode(sentinel()))
    assert read_sentinel(path) == sentinel()
    path.write_text("{}", encoding="utf-8")
    for wrong in (path, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="no sentinel"):
            read_sentinel(wrong)


def test_runs_of_another_pack_or_plan_are_not_compared() -> None:
    run = sentinel().reference
    check_runs(run, run)
    with pytest.raises(UsageError, match="holds pack p, this program has q"):
        check_runs(run, structs.replace(run, pack="q", entries=[PackEntry("q/0", [8])]))
    with pytest.raises(UsageError, match=r"another plan and is not compared: layer_map \[0, 3\], now \[0, 4\]"):
        check_runs(run, structs.replace(run, identity=identity((0, 4))))
