"""The probe passes a good executor and finds each fault that it looks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from engine_core.wire.evidence import Check, ProbeReport
from model_executor.kv_cache import LayerCache
from model_executor.layers.routing import Router, Routing
from model_executor.models.spec import RoutingSpec
from model_executor.tools import probe
from model_executor.tools.offline import Offline, OfflineOptions
from model_executor.tools.reference import reference_table
from tests.model_executor.tools.folders import write_model

CHECKS = [
    "tensor shape and layout",
    "aliasing and ownership",
    "right-sized runtime state",
    "finite outputs",
    "routing invariants",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("moe") / "model", "qwen3-moe")


def test_a_good_executor(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "probe.json"
    assert probe.main([str(folder), "--layers", "0,1,3", "--json", str(path)]) == 0
    report = msgspec.json.decode(path.read_bytes(), type=ProbeReport)
    assert [check.name for check in report.checks] == CHECKS
    assert [check.evidence for check in report.checks if not check.passed] == []
    assert "choices of experts" in report.checks[-1].evidence
    blocks = [
        f"block {i} <- {s} {name}" for i, (s, name) in enumerate(zip([0, 1, 3], report.identity.classes, strict=True))
    ]
    for kind in ("prefill", "decode"):
        places = [timing.place for timing in report.timings if timing.kind == kind]
        assert places == ["embedding", *blocks, "final norm", "head", probe.REST, "whole step"]
    assert all(
        timing.runs == probe.RUNS and 0 < timing.low <= timing.median <= timing.high for timing in report.timings
    )
    assert "pass finite outputs" in capsys.readouterr().out


def test_how_busy_the_machine_was(tmp_path: Path) -> None:
    path = tmp_path / "cpu"
    path.write_text("some avg10=0.00 avg60=0.00 avg300=0.11 total=123456\nfull avg10=0.00 avg60=0.00 total=7\n")
    assert probe.waited_us(path) == 123456
    assert probe.waited_us(tmp_path / "gone") is None
    path.write_text("nothing known")
    assert probe.waited_us(path) is None
    with probe.Waiting() as waiting:
        pass
    assert waiting.share is None or 0 <= waiting.share <= 1


def packed(offline: Offline) -> None:
    norm = offline.executor.model.norm
    norm.register_buffer("packed", norm.weight.detach().clone())
    norm.register_parameter("weight", None)


def test_weights_that_a_kernel_keeps_in_its_own_form(folder: Path) -> None:
    offline = Offline(OfflineOptions(folder, sequences=1, threads=1), reference_table())
    packed(offline)
    check = probe._tensors(offline)
    assert check.passed
    assert "1 in the form of the kernels" in check.evidence
    del offline.executor.model.norm.packed
    assert "norm.weight: planned and not built" in probe._tensors(offline).evidence


def nan(offline: Offline) -> None:
    with torch.no_grad():
        offline.executor.model.blocks[1].get_parameter("mlp_norm.weight")[0] = float("nan")


def shape(offline: Offline) -> None:
    norm = offline.executor.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach()[:-1], requires_grad=False)


def alias(offline: Offline) -> None:
    blocks = offline.executor.model.blocks
    shared = blocks[1].get_parameter("attention_norm.weight")
    blocks[0].get_submodule("attention_norm").weight = torch.nn.Parameter(shared.data, requires_grad=False)


def cache(offline: Offline) -> None:
    layers = offline.executor.cache.layers
    layers[1] = LayerCache(torch.cat([layers[1].key] * 2), layers[1].value)


@pytest.mark.parametrize(
    ("spoil", "index", "check"),
    [(shape, 0, probe._tensors), (alias, 1, probe._ownership), (cache, 2, probe._state)],
)
def test_a_spoilt_executor(
    folder: Path, spoil: Callable[[Offline], None], index: int, check: Callable[[Offline], Check]
) -> None:
    offline = Offline(OfflineOptions(folder, sequences=1, threads=1))
    assert check(offline).passed
    spoil(offline)
    found = check(offline)
    assert (found.name, found.passed) == (CHECKS[index], False)


def test_numbers_that_are_not_finite_are_found(folder: Path) -> None:
    offline = Offline(OfflineOptions(folder, sequences=1, threads=1))
    nan(offline)
    finite, _ = probe._numbers(offline)
    assert not finite.passed
    assert "block 1 <- 1" in finite.evidence
    assert "block 0 <- 0" not in finite.evidence


@pytest.mark.parametrize(
    ("experts", "weights", "fault"),
    [
        ([[0, 1]], [[0.25, 0.75]], None),
        ([[0, 4]], [[0.25, 0.75]], "outside"),
        ([[1, 1]], [[0.25, 0.75]], "twice"),
        ([[0, 1]], [[-0.25, 1.25]], "negative"),
        ([[0, 1]], [[0.5, 0.75]], "sum"),
        ([[0, 1]], [[float("nan"), 0.75]], "finite"),
    ],
)
def test_routing(experts: list[list[int]], weights: list[list[float]], fault: str | None) -> None:
    spec = RoutingSpec(num_experts=4, top_k=2, score="softmax", normalize=True)
    router = Router(spec, 8, torch.float32, torch.device("cpu"))
    found = probe.routing_faults(router, Routing(torch.tensor(experts), torch.tensor(weights)))
    if fault is None:
        assert found == []
    else:
        assert fault in found[0]
