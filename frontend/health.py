"""The state of the server, decided in one place from signs that cost nobody a request.

    loading     no engine has been ready yet
    ready       requests are taken, and make progress
    recovering  a lost core or executor is being replaced; requests are taken, and wait
    stalled     a process hangs, or was stopped; requests are taken, and wait
    draining    the server ends; nothing new is taken
    dead        no engine, and none will come

When several hold, dead comes first, then draining, loading, recovering, stalled.

A core that is stopped shows after STOPPED_S, one that is silent after SILENT_S; a stopped executor shows as soon (the
core looks at it four times a second), one that does nothing although it owes a step after five seconds more. A long
step is none of these. What lasts longer than --step-timeout is a death, and the process is replaced.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from engine_core.wire.client import EngineState

# The core says something twice a second.
SILENT_S: Final = 3.0
STOPPED_S: Final = 1.0
# States in which requests are taken.
TAKING: Final[tuple[EngineState, ...]] = ("ready", "recovering", "stalled")


class Signs(Struct, frozen=True):
    """What is known of the engine.

    Attributes:
        dead: why there is no engine any more.
        draining: whether this server takes nothing new.
        was_ready: whether an engine has ever been ready.
        lost: why the core is being replaced.
        silent_s: seconds since the core said something, stopped_s: since it was stopped by a signal.
        engine: what the core last said of itself; reason: why.
    """

    dead: str | None = None
    draining: bool = False
    was_ready: bool = False
    lost: str | None = None
    silent_s: float = 0.0
    stopped_s: float = 0.0
    engine: EngineState = "loading"
    reason: str = "the engine core starts"


def judge(signs: Signs) -> tuple[EngineState, str]:
    """The state, and why, where it is not "ready"."""
    if signs.dead is not None:
        return "dead", signs.dead
    if signs.draining:
        return "draining", "the server is shutting down"
    if not signs.was_ready:
        return "loading", signs.reason if signs.lost is None else f"{signs.lost}; another core starts"
    if signs.lost is not None:
        return "recovering", f"{signs.lost}; another core starts"
    if signs.engine != "ready" and signs.engine != "stalled":
        return signs.engine, signs.reason
    return _at_work(signs)


def _at_work(signs: Signs) -> tuple[EngineState, str]:
    if signs.stopped_s > STOPPED_S:
        return "stalled", f"the engine core has been stopped by a signal for {signs.stopped_s:.1f} s"
    if signs.silent_s > SILENT_S:
        return "stalled", f"the engine core said nothing for {signs.silent_s:.1f} s"
    return (signs.engine, "" if signs.engine == "ready" else signs.reason)
