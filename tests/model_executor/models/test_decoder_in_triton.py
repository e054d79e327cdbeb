"""Whole models on the kernels that a GPU gets, in Triton's interpreter, against the same models in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine_core.wire.config import ModelOptions
from model_executor.attention import dispatch, triton_paged
from model_executor.attention.dispatch import Chooser, KernelTable
from model_executor.kernels import decode, gated, heads, norm
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


def table(kind: type[KernelTable] = KernelTable) -> KernelTable:
    """What is first on a GPU, with nothing against a CPU."""
    limits = replace(triton_paged.LIMITS, devices=None, head_dims=None, block_sizes=None)
    return kind(
        attention=(replace(triton_paged.SPEC, limits=limits),),
        linear=(replace(triton_gated.SPEC, devices=None), *dispatch.LINEAR[1:]),
        norm=(replace(triton_norm.SPEC, devices=None),),
        heads=(replace(triton_heads.SPEC, devices=None),),
    )


def in_triton(folder: Path, kernels: KernelTable, dtype: torch.dtype = torch.float32) -> Loaded:
    spec = read_spec(folder, ModelOptions())
    plan = plan_layers(spec)
    model = build_model(spec, plan, Chooser(kernels, dtype, CPU, BLOCK_SIZE))
    report = load_weights(model, spec, plan, folder, silent)
    model.pack()
    return Loaded(spec, plan, model, report)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param) / "model", request.param)


def test_logits_equal_those_in_torch(folder: Path) -> None:
    """A prompt in chunks: rows of several tokens, then one."""
    kernels = table()
    made = in_triton(folder, kernels).logits(PROMPT, chunk=5)
    assert np.abs(made - load(folder).logits(PROMPT, chunk=5)).max() < 2e-5


@pytest.mark.slow
def test_kernels_are_marked_in_a_profile(folder: Path) -> None:
    kernels = table(MarkedTable)
    loaded = in_triton(folder, kernels)
    mark_model(loaded.model, loaded.plan)
    ran = {name.removeprefix(KERNEL) for name in marks_of(loaded) if name.startswith(KERNEL)}
    assert ran == {choice.chosen for choice in kernels.explain()}


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no annotation for it
    """Counts what a GPU would launch: what torch computes, and kernels, which are not run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        if copies(made, args[0]) if func.is_view else name not in ("empty", "detach", "_unsafe_view"):
            self.names.append(name)
        return made


def copies(made: object, source: object) -> bool:
    """Whether what is a view as a rule has become a copy, such as a cast to another dtype."""
    if not isinstance(made, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    return made.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()


@dataclass(frozen=True)
class Counted:
    """Stands in for a kernel."""

    name: str
    launches: Launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: self.launches.names.append(self.name)


@pytest.mark.parametrize(("family", "a_layer"), [("llama", 10), ("qwen3", 10), ("gemma2", 12)])
def test_launches_of_a_layer_in_a_step_of_one_token(
    family: str, a_layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four products, attention in two, heads, gate, and the norms, sums included."""
    launches = Launches()
    kernels = ((norm, "norm"), (heads, "heads"), (gated, "gated"), (decode, "decode"), (decode, "join"))
    for module, name in kernels:
        monkeypatch.setattr(module, f"{name}_kernel", Counted(name, launches))
    loaded = in_triton(write_model(tmp_path / "model", family), table(), torch.bfloat16)
    layers = len(loaded.model.blocks)
    with launches:
        loaded.logits(PROMPT[:1])
    counts = {name: launches.names.count(name) for name in set(launches.names)}
    per_layer = {name: count // layers for name, count in counts.items() if count >= layers}
    assert sum(per_layer.values()) == a_layer
    assert per_layer["matmul"] == 4
    # The final norm, and what stands around the blocks.
    assert len(launches.names) - a_layer * layers <= 8
