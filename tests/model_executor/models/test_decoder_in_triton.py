"""Whole models on the kernels that a GPU gets, in Triton's interpreter, against the same models in torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_core.wire.config import ModelOptions
from model_executor.attention import dispatch, triton_paged
from model_executor.attention.dispatch import Chooser, KernelTable
from model_executor.layers import triton_gated, triton_heads, triton_norm
from model_executor.marks import KERNEL, MarkedTable, mark_model
from model_executor.models.decoder import build_model
from model_executor.models.reader import read_spec
from model_executor.weights.layer_plan import plan_layers
from model_executor.weights.load import load_weights
from tests.model_executor import interpreted  # noqa: F401 - before the kernels are made
from tests.model_executor.engine import BLOCK_SIZE, CPU, Loaded, load, silent
from tests.model_executor.test_marks import marks_of
from tests.model_executor.tools.folders import write_model

PROMPT = [3, 1, 4, 1, 5, 9]
MODELS = ("llama-tied", "gemma2", "qwen3", "mixtral", "deepseek-v3")


def anywhere(table: KernelTable) -> KernelTable:
    """The table as it is on a GPU, with nothing against a CPU."""
    limits = replace(triton_paged.LIMITS, devices=None, head_dims=None, block_sizes=None)
    table._attention = (replace(triton_paged.SPEC, limits=limits),)
    table._norm = (replace(triton_norm.SPEC, devices=None),)
    table._heads = (replace(triton_heads.SPEC, devices=None),)
    table._linear = (replace(triton_gated.SPEC, devices=None), *dispatch.LINEAR[1:])
    return table


def in_triton(folder: Path, table: KernelTable) -> Loaded:
    spec = read_spec(folder, ModelOptions())
    plan = plan_layers(spec)
    model = build_model(spec, plan, Chooser(anywhere(table), torch.float32, CPU, BLOCK_SIZE))
    report = load_weights(model, spec, plan, folder, silent)
    model.pack()
    return Loaded(spec, plan, model, report)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param) / "model", request.param)


def test_logits_equal_those_in_torch(folder: Path) -> None:
    """A prompt in chunks: rows of several tokens, then one."""
    table = KernelTable()
    made = in_triton(folder, table).logits(PROMPT, chunk=5)
    assert np.abs(made - load(folder).logits(PROMPT, chunk=5)).max() < 2e-5
    chosen = {choice.chosen for choice in table.explain()}
    latent = any(choice.operator == "mla_attention" for choice in table.explain())
    assert {"triton_norm"} | (set() if latent else {"triton_heads", "triton_paged"}) <= chosen
    assert "separate" not in chosen


def test_kernels_are_marked_in_a_profile(folder: Path) -> None:
    loaded = in_triton(folder, MarkedTable())
    mark_model(loaded.model, loaded.plan)
    names = marks_of(loaded)
    assert f"{KERNEL}triton_norm" in names
    gates = [each for each in loaded.model.modules() if getattr(each, "gate", None) is not None]
    assert (f"{KERNEL}matmul_triton_gate" in names) == bool(gates)
