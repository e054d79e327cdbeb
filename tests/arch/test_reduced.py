"""Which blocks run is known to the planning alone: all else walks the plan and cannot tell a part from the whole."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from msgspec import structs

from engine_core.wire.config import EngineConfig, ModelOptions
from model_executor.models.reader import read_spec
from model_executor.models.spec import LayerSpec
from model_executor.startup import PhaseClock, bring_up
from tests.arch.source import ROOT, Module, modules
from tests.model_executor.engine import SIX, silent, write_small

# Where the choice is made, declared and shown, what cuts checkpoints, and what judges runs of them.
PLANNING = {
    "model_executor.weights.layer_plan",
    "model_executor.weights.inventory",
    "engine_core.wire.config",
    "frontend.cli.tool",
    "frontend.cli.main",
}
TOOLS = ("model_executor.tools.", "model_executor.weights.cut", "frontend.proof.")
WORDS = {
    *("allow_missing_classes", "missing_classes", "covering", "is_reduced", "reduced", "is_full", "full_plan"),
    *("is_cut", "partial_model", "truncated"),
}
# The names of blocks that are not in the plan are told from tensors that no one knows.
KNOWS_ALL_BLOCKS = {"model_executor/weights/layer_plan.py", "model_executor/weights/plan.py"}


def mentions(tree: ast.Module) -> list[tuple[int, str]]:
    """Names that ask whether a model is reduced, and reads of the option itself."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in WORDS:
            found.append((node.lineno, name))  # type: ignore[attr-defined]
        if isinstance(node, ast.Attribute) and node.attr == "layers":
            owner = ast.unparse(node.value)
            if owner.endswith(("options", "config.model", "engine.model")):
                found.append((node.lineno, f"{owner}.layers"))
        if isinstance(node, ast.Compare) and "sources" in ast.unparse(node) and "layers" in ast.unparse(node):
            found.append((node.lineno, ast.unparse(node)))
    return found


def outside() -> list[Module]:
    return [module for module in modules() if module.name not in PLANNING and not module.name.startswith(TOOLS)]


@pytest.mark.parametrize("module", outside(), ids=lambda module: module.name)
def test_no_module_asks(module: Module) -> None:
    allowed = {"is_cut"} if module.name == "model_executor.weights.index" else set()
    assert [each for each in mentions(module.tree) if each[1] not in allowed] == []


def test_the_rule_finds_what_it_forbids() -> None:
    for line in (
        "if config.model.layers != 'full': pass",
        "x = options.layers",
        "if len(plan.sources) < len(spec.layers): pass",
        "if plan.is_reduced: pass",
        "if missing_classes(spec, plan): pass",
    ):
        assert mentions(ast.parse(line)), line
    assert mentions(ast.parse("for layer in plan.layers(spec): cache.layers[0]")) == []


class Watched(tuple[LayerSpec, ...]):
    """All blocks of a model, and who looked at them."""

    seen: set[str]

    def _look(self) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(ROOT):
            frame = frame.f_back
        if frame is not None:
            self.seen.add(Path(frame.f_code.co_filename).relative_to(ROOT).as_posix())

    def __len__(self) -> int:
        self._look()
        return super().__len__()

    def __iter__(self) -> Iterator[LayerSpec]:
        self._look()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self._look()
        return super().__getitem__(index)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_only_the_planning_looks_at_all_blocks(tmp_path: Path, load_format: Any) -> None:
    folder = write_small(tmp_path, SIX)
    options = ModelOptions(model=str(folder), layers="1,4", load_format=load_format)
    spec = read_spec(folder, options)
    watched = Watched(spec.layers)
    watched.seen = set()
    config = structs.replace(EngineConfig(), model=options)
    config = structs.replace(config, cache=structs.replace(config.cache, num_kv_blocks=64))
    threads = torch.get_num_threads()
    try:
        executor = bring_up(config, structs.replace(spec, layers=watched), 1, PhaseClock(0.0, silent), silent)
    finally:
        torch.set_num_threads(threads)
    assert executor.ready.load.layer_map == [1, 4]
    assert watched.seen <= KNOWS_ALL_BLOCKS
    assert "model_executor/weights/layer_plan.py" in watched.seen
