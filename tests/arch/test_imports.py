"""Which package may import what."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.arch.source import ROOT, Module, imports, modules

# Beside the standard library, the package itself and what `engine_core.wire` says.
ALLOWED = {
    "engine_core": {"msgspec", "zmq", "uvloop"},
    "frontend": {
        *("msgspec", "zmq", "uvloop", "starlette", "uvicorn", "tokenizers", "sentencepiece", "jinja2"),
        *("prometheus_client", "prompt_toolkit", "setproctitle", "tqdm"),
    },
    "model_executor": {"msgspec", "zmq", "torch", "numpy", "safetensors", "triton", "tqdm"},
}
# The reference engine of the parity, imported when it is asked for.
ALLOWED_IN = {"model_executor.tools.transformers_reference": {"transformers"}}
WIRE = "engine_core.wire"
# Modules of the executor whose work needs no tensor: they are read where torch is not installed.
TORCH_FREE = (
    *("model_executor.models.spec", "model_executor.weights.layer_plan", "model_executor.weights.inventory"),
    *("model_executor.tools.plan", "model_executor.tools.cut"),
)


def is_wire(name: str) -> bool:
    return name == WIRE or name.startswith(f"{WIRE}.")


def permitted(module: Module, name: str) -> bool:
    top = name.partition(".")[0]
    if is_wire(module.name):
        return top in sys.stdlib_module_names or top in {"msgspec", "zmq"} or is_wire(name)
    allowed = ALLOWED[module.package] | ALLOWED_IN.get(module.name, set())
    return top in sys.stdlib_module_names or top == module.package or top in allowed or is_wire(name)


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_a_module_imports_only_what_its_package_may(module: Module) -> None:
    assert [name for name in sorted(imports(module)) if not permitted(module, name)] == []


def test_the_rule_finds_what_is_forbidden() -> None:
    module = Module(
        "frontend.x", ROOT / "frontend" / "x.py", ast.parse("import torch.nn\nfrom engine_core import engine")
    )
    assert [name for name in sorted(imports(module)) if not permitted(module, name)] == [
        "engine_core.engine",
        "torch.nn",
    ]


def in_a_fresh_process(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def names_of(*packages: str) -> list[str]:
    return [module.name for module in modules() if module.package in packages and not module.name.endswith("__main__")]


BLOCK = "import sys; sys.modules.update(torch=None, transformers=None)\n"


@pytest.mark.parametrize("package", ["engine_core", "frontend"])
def test_all_of_a_package_imports_without_torch(package: str) -> None:
    in_a_fresh_process(BLOCK + "".join(f"import {name}\n" for name in names_of(package)))


def test_frontend_and_core_pull_in_no_tensor_library() -> None:
    program = "import sys\n" + "".join(f"import {name}\n" for name in names_of("engine_core", "frontend"))
    program += "print(*sorted({'torch', 'transformers', 'safetensors', 'model_executor'} & set(sys.modules)))"
    assert in_a_fresh_process(program).split() == []


@pytest.mark.parametrize("name", TORCH_FREE)
def test_plans_of_the_executor_import_without_torch(name: str) -> None:
    in_a_fresh_process(f"{BLOCK}import {name}")


def test_the_command_line_imports_no_server() -> None:
    program = "import sys, frontend.cli.main\nprint(*sorted({'starlette', 'uvicorn', 'tokenizers'} & set(sys.modules)))"
    assert in_a_fresh_process(program).split() == []
