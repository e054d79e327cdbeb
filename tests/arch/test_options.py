"""An option is declared once: the command line is made from the configuration's Structs."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from frontend.cli.main import main
from frontend.config import ServeConfig
from tests.arch.source import ROOT

# Flags of vLLM whose meaning here is the same.
KNOWN_NAMES = (
    *("host", "port", "served-model-name", "dtype", "max-model-len", "max-num-seqs", "max-num-batched-tokens"),
    *("block-size", "num-kv-blocks", "kv-cache-memory-bytes", "seed", "load-format", "api-key", "shutdown-timeout"),
    "client-socket",
)
# Not options of the configuration: they say what to do with it.
ACTIONS = {"--help", "--config", "--print-config"}
# Filled in by the program, or given by position.
NO_FLAG = {"version", "model", "eos_token_ids", "vocab_size"}


def leaves(kind: type[msgspec.Struct]) -> Iterator[str]:
    """Names of all fields that hold a value, through nested Structs."""
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from leaves(field.type)
        else:
            yield field.name


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Every flag in the help of `tercet serve`."""
    done = subprocess.run(
        [sys.executable, "-c", "from frontend.cli.main import main; main(['serve', '--help'])"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
    )
    words = done.stdout.replace(",", " ").split()
    return {word for word in words if word.startswith("--") and len(word) > 2}


def test_field_names_are_unique() -> None:
    names = list(leaves(ServeConfig))
    assert {name for name in names if names.count(name) > 1} <= {"version"}


def test_flags_are_the_fields(flags: set[str]) -> None:
    fields = {f"--{name.replace('_', '-')}" for name in leaves(ServeConfig) if name not in NO_FLAG}
    positive = {flag for flag in flags - ACTIONS if not flag.startswith("--no-")}
    assert positive == fields
    assert {flag.replace("--no-", "--") for flag in flags if flag.startswith("--no-")} <= fields


@pytest.mark.parametrize("name", KNOWN_NAMES)
def test_flags_have_the_names_that_users_know(flags: set[str], name: str) -> None:
    assert f"--{name}" in flags


def test_printed_configuration_is_versioned_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/models/x", "--port", "0", "--max-num-seqs", "7", "--print-config"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed["version"] == 1
    assert printed["http"]["port"] == 0
    assert printed["engine"]["scheduler"]["max_num_seqs"] == 7
    assert msgspec.convert(printed, ServeConfig).engine.model.model == "/models/x"


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    command = [sys.executable, "-c", "import sys; from frontend.cli.main import main; sys.exit(main(['--version']))"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    assert done.stdout.split() == ["tercet", project["version"]]
