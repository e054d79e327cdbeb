"""Findings of a run that went well, to be spoilt by tests."""

from __future__ import annotations

from engine_core.wire import evidence
from engine_core.wire.client import Inspection
from engine_core.wire.evidence import (
    OUTSIDE,
    Boundary,
    Check,
    Distance,
    Environment,
    Estimate,
    OperatorRun,
    PackEntry,
    ParityReport,
    PlanIdentity,
    ProbeReport,
    QualityReport,
    ReferenceRun,
    StepKind,
    StepProfile,
    Timing,
    WeightDigest,
)
from engine_core.wire.reports import KernelCandidate, KernelChoice, LoadReport
from frontend.proof.coverage import Visit, join
from frontend.proof.report import BenchRow, Findings, SentinelPart, Speed
from frontend.proof.requests import Answered
from frontend.proof.sentinel import Sentinel
from frontend.proof.tools import Plan, PlanClass

DENSE, WINDOWED = "grouped-full-rope10000+gated", "grouped-sliding5-rope100+gated"
ENVIRONMENT = Environment("3.11", "2.13", "a processor", "cpu", 2, ["attention: p: torch_sdpa"])
EXACT = Distance(1e-7, 1.0, 1e-6)
CHOICE = KernelChoice("attention", "4 heads", "torch_sdpa", [KernelCandidate("other", ["too narrow"])])


def plan(layer_map: tuple[int, ...] = (0, 3)) -> Plan:
    classes = (
        PlanClass(DENSE, 3, "0", ("attention",), ()),
        PlanClass(WINDOWED, 3, "3", ("attention",), ()),
    )
    return Plan("LlamaForCausalLM", 6, "0,3", layer_map, classes, (), ("embedding", "sampling"))


def step(kind: StepKind, number: int = 1, *, graphs: int = 0, captured: bool = False, seen: bool = True) -> StepProfile:
    runs = [(DENSE, "attention", "torch_sdpa"), (WINDOWED, "attention", "torch_sdpa")]
    runs += [(OUTSIDE, "embedding", ""), (OUTSIDE, "sampling", "")]
    operators = [OperatorRun(*run, 1, 10, 0, ["aten::mm"]) for run in runs] if seen else []
    return StepProfile(number, kind, kind == "prefill", 4, 1, graphs, 0, captured, operators)


def visit() -> Visit:
    return Visit(
        answers=[Answered("greedy", 8, 4, "length", 0, True)],
        inspection=Inspection(1, 10, 2, 0, 12, []),
        kernels=[CHOICE],
        graphs=None,
        steps=[step("warm_up", 0), step("prefill"), step("decode"), step("mixed")],
        exit_status=0,
        longest=80,
    )


def quality() -> QualityReport:
    return QualityReport(
        identity=PlanIdentity("LlamaForCausalLM", "r", 6, list(range(6)), [DENSE] * 6, "bfloat16", "bfloat16", 320),
        environment=ENVIRONMENT,
        quantization="none",
        source="a text",
        sha256="abc",
        windows=3,
        length=512,
        decoded=64,
        positions=1533,
        finite=1533,
        perplexity=10.01,
        reference_perplexity=10.0,
        rise=Estimate(0.001, 0.0005),
        divergence=Estimate(0.0014, 0.0001),
        agreement=Estimate(0.968, 0.004),
        rule=["one rule", "another"],
        failures=[],
        unverified=[],
    )


def load() -> LoadReport:
    return LoadReport(
        model="m",
        revision="r",
        layer_map=[0, 3],
        tensors=[],
        shards_opened=["a.safetensors"],
        shards_skipped=["b.safetensors"],
        bytes_read=10,
        bytes_materialized=10,
        counts={"loaded": 5, "missing": 0, "unexpected": 0},
        page_cache=1.0,
        seconds={"plan": 0.1, "read": 0.2},
        classes=[DENSE, WINDOWED],
    )


def identity(layer_map: tuple[int, ...] = (0, 3)) -> PlanIdentity:
    return PlanIdentity("LlamaForCausalLM", "r", 6, list(layer_map), [DENSE, WINDOWED], "float32", "float32", 96)


def probe() -> ProbeReport:
    names = ("tensor shape and layout", "aliasing and ownership", "right-sized runtime state", "finite outputs")
    places = ("embedding", f"block 0 <- 0 {DENSE}", f"block 1 <- 3 {WINDOWED}", "final norm", "head", "whole step")
    return ProbeReport(
        identity=identity(),
        environment=ENVIRONMENT,
        checks=[Check(name, True, "good") for name in (*names, "routing invariants")],
        timings=[Timing(place, "decode", "eager", 1, 128, 0.002, 0.001, 0.003, 5) for place in places],
        waited=0.01,
    )


def parity() -> ParityReport:
    return ParityReport(
        identity=identity(),
        environment=ENVIRONMENT,
        reference="transformers 5",
        wide="float64",
        pack="tercet-1",
        samples=["tercet-1/0"],
        positions=24,
        agreed=24,
        free_equal=1,
        free_first=[None],
        disagreements=[],
        boundaries=[Boundary("embedding", EXACT, EXACT, True)],
        finite=True,
        rule=["a rule"],
        failures=[],
        unverified=[],
    )


def findings() -> Findings:
    speed = Speed(1.0, 1234.5, 2.0, 3.0, 4.0, 5.0)
    return Findings(
        plan=plan(),
        coverage=join("m", plan(), visit()),
        load=load(),
        startup={"start": 1.0},
        probe=probe(),
        parity=parity(),
        sentinel=SentinelPart(identity(), "a second run", 8, 20, []),
        bench=[BenchRow(1, 8, 128, speed)] * 3,
    )


def sequence(name: str = "p/0", tokens: tuple[int, ...] = (1, 2, 3), error: float = 0.0) -> evidence.Sequence:
    return evidence.Sequence(name, list(tokens), [-0.5 + error] * len(tokens), [0.3] * len(tokens))


def sentinel() -> Sentinel:
    run = ReferenceRun(
        identity=identity(),
        environment=ENVIRONMENT,
        pack="p",
        entries=[PackEntry("p/0", [7])],
        sequences=[sequence()],
        weights=[WeightDigest("norm.weight", ["model.norm.weight"], "d1"), WeightDigest("head.weight", [], "d2")],
        bound=0.01,
    )
    return Sentinel(1, run, [sequence(error=1e-4)], ["here"])
