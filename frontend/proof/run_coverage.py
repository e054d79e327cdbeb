"""A real server under the profiler, the requests that trigger every path, and the judgement of what ran."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from engine_core.wire.client import Ready
from frontend.proof.coverage import CoverageReport, Visit, join, read_profile
from frontend.proof.own_server import OwnServer
from frontend.proof.requests import step_budget, visit
from frontend.proof.tools import Plan, read_plan


class Covered(Struct, frozen=True):
    """A judged run.

    Attributes:
        report: of the coverage.
        ready: what the engine said of itself.
        plan: that it served.
        command: of the server.
    """

    report: CoverageReport
    ready: Ready
    plan: Plan
    command: list[str]


def cover(model: Path, layers: Sequence[str], flags: Sequence[str], vocab: int) -> Covered:
    """Serve the model and see what runs.

    Args:
        model: the folder.
        layers: flags that choose the blocks.
        flags: further ones, of the server.
        vocab: ids that the tokenizer knows.

    Raises:
        StartError: the model or the plan is refused, or the server failed.
        EngineDead, EngineTimeout: the server went away.
    """
    plan = read_plan(model, layers)
    classes = [each.name for each in plan.classes if each.chosen]
    with tempfile.TemporaryDirectory(prefix="tercet-") as folder:
        profile = Path(folder) / "profile"
        budget = ("--max-num-batched-tokens", str(step_budget(classes)))
        with OwnServer(model, [*layers, *flags, *budget, "--profile-file", str(profile)]) as server:
            server.wait_ready()
            session = asyncio.run(visit(server.socket, classes, vocab))
            status = server.stop()
        left = Visit(
            answers=session.answers,
            inspection=session.inspection,
            kernels=session.ready.kernels,
            graphs=session.ready.graphs,
            steps=read_profile(profile),
            exit_status=status,
            longest=session.longest,
        )
    return Covered(join(str(model), plan, left), session.ready, plan, server.command)
