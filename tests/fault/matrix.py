"""The fault matrix: each case on a server of its own; what must be true after, and how long it took."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

from engine_core.wire import codec
from engine_core.wire.client import PROTOCOL, Hello, Status
from tests.fakes.core_process import WireClient
from tests.fakes.waiting import gone, until
from tests.fault.case import Case
from tests.fault.record import Record
from tests.fault.rig import Rig, raw_request
from tests.fault.traffic import MIXED, PREFILLS, Traffic, start_mixed, start_prefill
from tests.fault.watch import Watch

PLACES: Final = {"frontend": 0, "core": 1, "executor": 2}

STEP_TIMEOUT_S: Final = 2.0
FRONTEND_PAUSE_S: Final = 1.5
GONE_S: Final = 5.0
# A fast executor that takes a moment to load.
SCRIPT: Final = "delay_s=0.01,load_s=0.4"
SLOW_PREFILL: Final = "delay_s=0.03,load_s=0.4"
SLOW_LOAD: Final = "delay_s=0.01,load_s=2"
FLAGS: Final = (
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--block-size", "4", "--max-restarts", "5"),
    *("--step-timeout", str(STEP_TIMEOUT_S)),
)
LARGE_POOL: Final = ("--num-kv-blocks", "1024")
SMALL_POOL: Final = ("--num-kv-blocks", "28")


class Run:
    """One case under way.

    Args:
        case: which.
        model: folder.
    """

    def __init__(self, case: Case, model: Path) -> None:
        self.case = case
        self.model = model
        self.record = Record(case.name)
        self.faults: list[str] = []

    def run(self) -> Record:
        """The case from start to end."""
        began = time.monotonic()
        script = SLOW_PREFILL if self.case.phase == "prefill" else SLOW_LOAD if self.case.phase == "loading" else SCRIPT
        pool = SMALL_POOL if self.case.phase == "preempted" else LARGE_POOL
        scripts = ("fail_load_with=1", SCRIPT) if self._first_start_fails("exit") else (script,)
        scripts = ("protocol=9", SCRIPT) if self._first_start_fails("version") else scripts
        try:
            with Rig(self.model, scripts, (*FLAGS, *pool)) as rig:
                self._with(rig)
        except AssertionError as error:
            self.faults.append(f"{type(error).__name__}: {error}")
        self.record.ok, self.record.faults = not self.faults, self.faults
        self.record.seconds = round(time.monotonic() - began, 2)
        return self.record

    def _first_start_fails(self, fault: str) -> bool:
        return (self.case.process, self.case.phase, self.case.fault) == ("executor", "loading", fault)

    def _with(self, rig: Rig) -> None:
        if self.case.phase == "loading":
            self._while_loading(rig)
            return
        rig.wait_ready()
        client = rig.client()
        client.wait_ready(20.0)
        traffic = Traffic(rig, client)
        self._enter(rig, traffic)
        self.record.requests = traffic.under_way()
        before = rig.pids()
        watch = Watch(rig)
        try:
            self._strike(rig)
            self._settle(rig, traffic, before, watch)
        finally:
            watch.stop()
            self._time(watch)

    def _time(self, watch: Watch) -> None:
        if watch.detected is not None:
            self.record.detect_s = round(watch.detected - watch.began, 3)
        if watch.recovered is not None:
            self.record.recover_s = round(watch.recovered - watch.began, 3)

    # Into the phase.

    def _enter(self, rig: Rig, traffic: Traffic) -> None:
        probe = WireClient(rig.socket)
        try:
            probe.hello("probe")
            self._reach(rig, probe, traffic)
        finally:
            probe.close()

    def _reach(self, rig: Rig, probe: WireClient, traffic: Traffic) -> None:
        phase = self.case.phase
        if phase == "idle":
            return
        if phase == "prefill":
            start_prefill(traffic)
            until("all are taken, a step has run, and no token is made", lambda: _in_prefill(probe.status()))
            return
        start_mixed(traffic, 50)
        until("all are taken, and tokens are made", lambda: _all_at_work(probe.status()))
        if phase == "preempted":
            until("a row was preempted", lambda: probe.status().preemptions > 0, 20.0)
        elif phase == "recovering":
            rig.next_scripts(SLOW_LOAD, SCRIPT)
            os.kill(rig.pid(2), signal.SIGKILL)
            until("it recovers", lambda: rig.health() == (503, "recovering"))
            rig.pid(2)
        elif phase == "draining":
            rig.process.send_signal(signal.SIGTERM)
            until("it drains", lambda: rig.health() == (503, "draining"))

    # The fault.

    def _strike(self, rig: Rig) -> None:
        case = self.case
        if case.fault in ("garbage", "version"):
            self._talk(rig)
            return
        pid = rig.pid(PLACES[case.process])
        if case.fault == "exit":
            self._exit(rig, pid)
        elif (case.process, case.fault) == ("frontend", "stop"):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(FRONTEND_PAUSE_S)
            os.kill(pid, signal.SIGCONT)
        else:
            os.kill(pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[case.fault])

    def _exit(self, rig: Rig, pid: int) -> None:
        """It ends, and so does its first replacement, while it loads."""
        if self.case.process == "frontend":
            os.kill(pid, signal.SIGABRT)
        elif self.case.process == "executor":
            rig.next_scripts("fail_load_with=1", SCRIPT)
            os.kill(pid, signal.SIGKILL)
        else:
            rig.next_scripts(SLOW_LOAD, SCRIPT)
            os.kill(pid, signal.SIGKILL)
            until("the next core starts its executor", lambda: rig.pids()[1] not in (0, pid) and rig.pids()[2] != 0)
            os.kill(rig.pid(1), signal.SIGKILL)

    def _talk(self, rig: Rig) -> None:
        """Someone says at the socket of the process what nobody should."""
        garbage = self.case.fault == "garbage"
        if self.case.process == "frontend":
            request = os.urandom(200) if garbage else b"GET /health HTTP/9.9\r\nhost: x\r\n\r\n"
            answer = raw_request(rig.url, request)
            assert b" 200 " not in answer.partition(b"\r\n")[0], answer
            return
        if self.case.process == "executor" and not garbage:
            rig.next_scripts("protocol=9", SCRIPT)
            os.kill(rig.pid(2), signal.SIGKILL)
            return
        path = rig.socket if self.case.process == "core" else next(rig.runtime.rglob("executor.sock"))
        stranger = WireClient(path)
        frames = [b"", b"\xc1" * 100, b"\x80\x04N.", os.urandom(300)]
        for frame in frames if garbage else [codec.client_to_core().encode(Hello(PROTOCOL + 1, "newer"))]:
            stranger.socket.send(frame)
        if not garbage:
            assert stranger.last_words().code == "protocol"
        time.sleep(0.2)  # they are on their way
        stranger.close()

    # After.

    def _settle(self, rig: Rig, traffic: Traffic, before: tuple[int, int, int], watch: Watch) -> None:
        case = self.case
        if case.ends is not None and case.fault != "term":
            self._after_death(rig, before)
            return
        if (case.process, case.fault, case.phase) == ("frontend", "term", "draining"):
            # A second signal ends at once what still runs.
            self._check(rig.wait_end(10.0) == 0, "exit status 0")
            return
        self.faults += traffic.wait()
        if case.phase == "draining" or case.ends == 0:
            status = rig.wait_end()
            self._check(status == 0, f"exit status {status}, expected 0")
            self._check(rig.leftovers() == [], f"leftovers: {rig.leftovers()}")
            return
        if case.pid_changes:
            place = PLACES[case.process]
            until("it is replaced", lambda: rig.pids()[place] not in (0, before[place]), 20.0)
        until("it is ready again", lambda: rig.health() == (200, "ready"), 20.0)
        until("the trouble is over", lambda: watch.detected is None or watch.recovered is not None)
        watch.stop()
        self._at_rest(rig, before)

    def _at_rest(self, rig: Rig, before: tuple[int, int, int]) -> None:
        case = self.case
        after = rig.pids()
        changed = [after[place] != before[place] for place in range(3)]
        if case.phase != "recovering":
            place = PLACES[case.process]
            expected = [case.pid_changes and place == 0, case.pid_changes and place == 1, case.pid_changes]
            self._check(changed == expected, f"processes replaced: {changed}, expected {expected}")
        self._check(all(after), f"processes: {after}")
        self._check(all(gone(old) for old, new in zip(before, after, strict=True) if old != new), "an old one lives")
        ledger = rig.invariants()
        self._check(ledger["violations"] == [] and ledger["owned"] == 0, f"ledger: {ledger}")
        rig.process.send_signal(signal.SIGTERM)
        status = rig.wait_end()
        self._check(status == 0, f"exit status {status}, expected 0")
        self._check(rig.leftovers() == [], f"leftovers: {rig.leftovers()}")

    def _after_death(self, rig: Rig, before: tuple[int, int, int]) -> None:
        """All is gone soon, and a new server starts at once on the same port and paths."""
        status = rig.wait_end(15.0)
        self._check(status == self.case.ends, f"exit status {status}, expected {self.case.ends}")
        for pid in before:
            until(f"process {pid} is gone", lambda pid=pid: pid == 0 or gone(pid), GONE_S)  # type: ignore[misc]
        rig.next_scripts(SCRIPT)
        rig.restart()
        rig.wait_ready()
        rig.process.send_signal(signal.SIGTERM)
        rig.wait_end()
        self._check(rig.leftovers() == [], f"leftovers: {rig.leftovers()}")

    def _while_loading(self, rig: Rig) -> None:
        case = self.case
        if case.ends is None or case.process == "frontend":
            until("it loads", lambda: rig.health() == (503, "loading"), 20.0)
            before = (rig.process.pid, rig.pid(1), rig.pid(2))
        else:
            before = (rig.process.pid, 0, 0)
        if case.process == "executor" and case.fault in ("exit", "version"):
            self._after_death(rig, before)
            return
        watch = Watch(rig)
        try:
            self._strike(rig)
            self._settle_loading(rig, before, watch)
        finally:
            watch.stop()
            self._time(watch)

    def _settle_loading(self, rig: Rig, before: tuple[int, int, int], watch: Watch) -> None:
        if self.case.ends is not None and self.case.fault != "term":
            self._after_death(rig, before)
            return
        if self.case.ends == 0:
            self._check(rig.wait_end(10.0) == 0, "exit status 0")
            self._check(rig.leftovers() == [], f"leftovers: {rig.leftovers()}")
            return
        rig.wait_ready()
        client = rig.client()
        traffic = Traffic(rig, client)
        start_mixed(traffic, 20)
        self.faults += traffic.wait()
        watch.stop()
        self._at_rest(rig, before)

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            self.faults.append(what)


def _all_at_work(status: Status) -> bool:
    return status.running + status.waiting == MIXED and status.generation_tokens > 8


def _in_prefill(status: Status) -> bool:
    assert status.generation_tokens == 0, "the prompts are computed already"
    return status.running + status.waiting == PREFILLS and status.steps > 0


def run_case(case: Case, model: Path) -> Record:
    """Run one case."""
    return Run(case, model).run()
