"""Programs of the executor's package, run to their end: the frontend imports no model code."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from frontend.errors import EXIT_FAILED, EXIT_USAGE, StartRefused, UsageError

S = TypeVar("S", bound=Struct)

DEADLINE_S: Final = 4 * 3600.0
PLAN: Final = "model_executor.tools.plan"
PARITY: Final = "model_executor.tools.parity"
REFERENCE: Final = "model_executor.tools.reference"
PROBE: Final = "model_executor.tools.probe"
QUALITY: Final = "model_executor.tools.quality"


class PlanClass(Struct, frozen=True):
    """What this side needs of a class of blocks; see model_executor.tools.plan."""

    name: str
    count: int
    chosen: str
    operators: tuple[str, ...]
    requests: tuple[str, ...]


class Plan(Struct, frozen=True):
    """What this side needs of `tercet plan --json`."""

    architecture: str
    blocks: int
    layers: str
    layer_map: tuple[int, ...]
    classes: tuple[PlanClass, ...]
    left_out: tuple[str, ...]
    outer_operators: tuple[str, ...]


def read_plan(model: Path, flags: Sequence[str]) -> Plan:
    """The plan of a choice of blocks.

    Raises:
        StartRefused, UsageError: there is none.
    """
    return msgspec.json.decode(_run(PLAN, [str(model), *flags, "--json"]), type=Plan)


def run_tool(module: str, words: Sequence[str], kind: type[S]) -> S:
    """Run a tool and read the report that it writes, also where its verdict is "fail".

    Args:
        module: of the tool.
        words: its arguments.
        kind: of the report.

    Raises:
        StartRefused, UsageError: it could not do its work.
    """
    with tempfile.TemporaryDirectory(prefix="tercet-") as folder:
        path = Path(folder) / "report.json"
        _run(module, [*words, "--json", str(path)])
        return msgspec.json.decode(path.read_bytes(), type=kind)


def _run(module: str, words: Sequence[str]) -> bytes:
    command = [sys.executable, "-m", module, *words]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise StartRefused(f"{module}: no end within {DEADLINE_S:g} s") from error
    if done.returncode in (0, EXIT_FAILED) and not (done.returncode and b"Traceback" in done.stderr):
        return done.stdout
    lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
    message = lines[-1].removeprefix("error: ")
    raise (UsageError if done.returncode == EXIT_USAGE else StartRefused)(f"{module}: {message}")
