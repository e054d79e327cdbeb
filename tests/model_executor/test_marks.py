"""Marks name every operator of a plan and change nothing of what a model computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from engine_core.wire.config import ModelOptions
from model_executor.attention.dispatch import Chooser, KernelTable
from model_executor.marks import CLASS, KERNEL, OPERATOR, MarkedKernel, MarkedTable, mark_model
from model_executor.models.decoder import build_model
from model_executor.models.reader import read_spec
from model_executor.native.library import Native, load_native
from model_executor.profiler import summarize
from model_executor.tools.operators import block_operators, outer_operators
from model_executor.weights.layer_plan import plan_layers
from model_executor.weights.load import load_weights
from tests.model_executor.engine import BLOCK_SIZE, CPU, Loaded, load, silent
from tests.model_executor.tools.folders import write_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
MODELS = ("llama", "gemma2", "qwen3", "qwen3-moe", "deepseek-v3")


# A choice of this name is to have no kernel.
NONE = "separate"


def marked(folder: Path, native: Native | None = None) -> Loaded:
    spec = read_spec(folder, ModelOptions())
    plan = plan_layers(spec)
    model = build_model(spec, plan, Chooser(MarkedTable(native=native), torch.float32, CPU, BLOCK_SIZE))
    report = load_weights(model, spec, plan, folder, silent)
    model.pack()
    mark_model(model, plan)
    return Loaded(spec, plan, model, report)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param) / "model", request.param)


def test_every_operator_of_the_plan_is_marked_and_nothing_else(folder: Path) -> None:
    loaded = marked(folder)
    plain = load(folder).logits(PROMPT)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        logits = loaded.logits(PROMPT)
    assert np.array_equal(logits, plain)
    names = {event.name for event in seen.events() or ()}
    operators = {name.removeprefix(OPERATOR) for name in names if name.startswith(OPERATOR)}
    wanted = {each for layer in loaded.spec.layers for each in block_operators(layer)}
    wanted |= {*outer_operators(loaded.spec)} - {"sampling"}
    assert operators == wanted
    assert {name.removeprefix(CLASS) for name in names if name.startswith(CLASS)} == set(loaded.plan.classes)


def test_kernels_are_marked_with_their_names(folder: Path) -> None:
    table = MarkedTable()
    plain = KernelTable()
    spec = read_spec(folder, ModelOptions())
    for each in (table, plain):
        build_model(spec, plan_layers(spec), Chooser(each, torch.float32, CPU, BLOCK_SIZE))
    assert table.explain() == plain.explain()
    loaded = marked(folder)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        loaded.logits(PROMPT)
    ran = {event.name.removeprefix(KERNEL) for event in seen.events() or () if event.name.startswith(KERNEL)}
    assert ran == {choice.chosen for choice in plain.explain()} - {NONE}


def test_native_kernels_stand_for_the_same_operators(folder: Path) -> None:
    native = load_native(1)
    plain, loaded = marks_of(marked(folder)), marks_of(marked(folder, native))
    operators = {name for name in plain if name.startswith(OPERATOR)}
    assert {name for name in loaded if name.startswith(OPERATOR)} == operators
    kernels = {name for name in loaded if name.startswith(KERNEL)}
    assert {f"{KERNEL}packed_{native.name}", f"{KERNEL}rms_{native.name}"} <= kernels


def marks_of(loaded: Loaded) -> set[str]:
    """Names of all ranges of one pass."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        loaded.logits(PROMPT)
    return {event.name for event in seen.events() or ()}


class Both:
    """A kernel that does two operators at once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next number."""
        return x + 1


class Layer(nn.Module):
    """A module that computes with a kernel it holds, without calling it by name."""

    def __init__(self, kernel: MarkedKernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice the number."""
        return x * 2


def test_a_kernel_stands_for_its_operators_or_for_those_around_it() -> None:
    kernel = MarkedKernel(Both(), "both")
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        with record_function(f"{OPERATOR}linear: x"):
            kernel.forward(torch.ones(2))
        kernel.standing_for(("rotary: r", "kv_append")).forward(torch.ones(2))
    runs = {run.operator: run for run in summarize(seen.events() or (), None).operators}
    assert {name: run.kernel for name, run in runs.items()} == dict.fromkeys(
        ("linear: x", "rotary: r", "kv_append"), "both"
    )
    assert runs["rotary: r"].native == []
    assert "aten::add" in runs["kv_append"].native


def test_a_kernel_that_a_module_holds_is_marked_with_the_module(folder: Path) -> None:
    loaded = marked(folder)
    block = loaded.model.blocks[0]
    block.mlp = Layer(MarkedKernel(Both(), "packed"))
    mark_model(loaded.model, loaded.plan)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        loaded.logits(PROMPT)
    assert f"{KERNEL}packed" in {event.name for event in seen.events() or ()}


def test_a_model_without_marks_has_no_hooks(folder: Path) -> None:
    for module in load(folder).model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert "logits" not in module.__dict__
