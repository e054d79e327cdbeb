"""Marks name every operator of a plan and change nothing of what a model computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from engine_core.wire.config import ModelOptions
from model_executor.attention.dispatch import KernelTable, chooser
from model_executor.marks import CLASS, KERNEL, OPERATOR, MarkedTable, mark_model
from model_executor.models.decoder import build_model
from model_executor.models.reader import read_spec
from model_executor.tools.operators import block_operators, outer_operators
from model_executor.weights.layer_plan import plan_layers
from model_executor.weights.load import load_weights
from tests.model_executor.engine import BLOCK_SIZE, CPU, Loaded, load, silent
from tests.model_executor.tools.folders import write_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
MODELS = ("llama", "gemma2", "qwen3", "qwen3-moe", "deepseek-v3")


def marked(folder: Path) -> Loaded:
    spec = read_spec(folder, ModelOptions())
    plan = plan_layers(spec)
    model = build_model(spec, plan, chooser(MarkedTable(), torch.float32, CPU, BLOCK_SIZE), torch.float32, CPU)
    report = load_weights(model, spec, plan, folder, silent)
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
        build_model(spec, plan_layers(spec), chooser(each, torch.float32, CPU, BLOCK_SIZE), torch.float32, CPU)
    assert table.explain() == plain.explain()
    loaded = marked(folder)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        loaded.logits(PROMPT)
    ran = {event.name.removeprefix(KERNEL) for event in seen.events() or () if event.name.startswith(KERNEL)}
    assert ran == {choice.chosen for choice in plain.explain()}


def test_a_model_without_marks_has_no_hooks(folder: Path) -> None:
    for module in load(folder).model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert "logits" not in module.__dict__
