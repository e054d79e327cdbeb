"""What users, operators and Python clients see of lost processes, over HTTP."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from engine_core.wire.sampling import SamplingParams
from frontend.client import Client
from frontend.errors import EngineDead
from tests.fakes.executor import continuation
from tests.fakes.waiting import gone, until
from tests.fault.rig import Rig
from tests.fault.traffic import Request, Traffic, start_mixed

SCRIPT = "delay_s=0.01"
POISON = 499
SMALL = ("--max-num-seqs", "4", "--num-kv-blocks", "1024", "--block-size", "4")


def busy(rig: Rig, client: Client, count: int = 30) -> Traffic:
    """Requests of every kind, some tokens made."""
    client.wait_ready(20.0)
    traffic = Traffic(rig, client)
    start_mixed(traffic, count)
    until("tokens are made", lambda: client.status is not None and client.status.generation_tokens > 8)
    return traffic


def test_metrics_and_log_of_both_recoveries(chain_folder: Path) -> None:
    with Rig(chain_folder, (SCRIPT,), SMALL) as rig:
        client = rig.wait_ready().client()
        traffic = busy(rig, client, 60)
        old_executor, old_core = rig.pid(2), rig.pid(1)
        os.kill(old_executor, signal.SIGKILL)
        until("the executor is replaced", lambda: rig.metric("tercet_executor_restarts_total") == 1, 20.0)
        until("it is ready", lambda: rig.health() == (200, "ready"), 20.0)
        os.kill(old_core, signal.SIGKILL)
        until("the core is replaced", lambda: rig.metric("tercet_engine_restarts_total") == 1, 20.0)
        assert traffic.wait() == []
        # 9 answers of 7 requests, less those that had ended, were open each time; Python clients count their own.
        assert 2 <= rig.metric("tercet_requests_recovered_total") <= 18
        assert rig.metric("tercet_executor_restarts_total") == 1
        assert 0 < rig.metric("tercet_recovery_seconds") < 20
        log = rig.log()
        (line,) = [line for line in log.splitlines() if "executor lost" in line and "replaced by" in line]
        assert f"executor (pid {old_executor}) ended: signal 9; replaced by pid " in line
        (line,) = [line for line in log.splitlines() if "engine core lost" in line and "replaced by" in line]
        assert "signal 9" in line
        assert "1 of 3 restarts used in 10 minutes" in line


def test_health_shows_a_stopped_process_soon_and_its_return(chain_folder: Path) -> None:
    with Rig(chain_folder, (SCRIPT,), SMALL) as rig:
        client = rig.wait_ready().client()
        before = rig.pids()
        for place in (1, 2):
            traffic = busy(rig, client)
            os.kill(before[place], signal.SIGSTOP)
            until("it is stalled", lambda: rig.health() == (503, "stalled"), 3.0)
            assert rig.get("/live").status_code == 200
            assert rig.get("/ready").status_code == 503
            # Taken, and answered when all goes on.
            traffic.start(Request("stream", [70, 71], 20))
            os.kill(before[place], signal.SIGCONT)
            until("it is ready", lambda: rig.health() == (200, "ready"), 5.0)
            assert traffic.wait() == []
        assert rig.pids() == before


@pytest.mark.slow
def test_a_long_step_keeps_health_at_200(chain_folder: Path) -> None:
    with Rig(chain_folder, ("delay_s=4",), SMALL) as rig:
        client = rig.wait_ready().client()
        client.wait_ready(20.0)
        traffic = Traffic(rig, client)
        traffic.start(Request("stream", [1, 2, 3], 1))
        began = time.monotonic()
        while traffic.under_way():
            assert rig.health() == (200, "ready")
        assert time.monotonic() - began > 3.5
        assert traffic.wait() == []


def test_a_used_up_budget_ends_all_with_one_line(chain_folder: Path) -> None:
    for victim, flags in ((1, ("--max-restarts", "0")), (2, ("--max-restarts", "0"))):
        with Rig(chain_folder, (SCRIPT,), (*SMALL, *flags)) as rig:
            client = rig.wait_ready().client()
            traffic = busy(rig, client, 400)
            pids = rig.pids()
            began = time.monotonic()
            os.kill(pids[victim], signal.SIGKILL)
            for request in traffic.requests:
                assert request.ended.wait(5.0)
                assert request.error, request
            assert time.monotonic() - began < 5.0
            assert rig.wait_end(10.0) == 4
            errors = [line for line in rig.log().splitlines() if line.startswith("error: ")]
            assert len(errors) == 1
            assert "signal 9" in errors[0]
            assert all(gone(pid) for pid in pids)
            assert rig.leftovers() == []


@pytest.mark.slow
def test_a_budget_of_two(chain_folder: Path) -> None:
    with Rig(chain_folder, (SCRIPT,), (*SMALL, "--max-restarts", "2")) as rig:
        client = rig.wait_ready().client()
        traffic = busy(rig, client, 900)
        for round_ in range(2):
            core = rig.pid(1)
            os.kill(core, signal.SIGKILL)
            until("the core is replaced", lambda: rig.pids()[1] not in (0, core), 20.0)  # noqa: B023
            until("it is ready", lambda: rig.health() == (200, "ready"), 20.0)
            assert traffic.under_way() == 7, round_
        began = time.monotonic()
        os.kill(rig.pid(1), signal.SIGKILL)
        for request in traffic.requests:
            assert request.ended.wait(5.0)
            assert "2 restarts in 10 minutes are used up (--max-restarts)" in request.error or (
                request.kind == "python" and "EngineDead" in request.error
            ), request.error
        assert time.monotonic() - began < 5.0
        assert rig.wait_end(10.0) == 4


def test_poison_is_answered_with_an_error_and_the_others_survive(chain_folder: Path) -> None:
    with Rig(chain_folder, (f"{SCRIPT},poison={POISON}",), SMALL) as rig:
        client = rig.wait_ready().client()
        traffic = busy(rig, client)
        with httpx.Client(base_url=rig.url, trust_env=False, timeout=30) as http:
            answer = http.post("/v1/completions", json={"prompt": [1, POISON], "max_tokens": 5})
        assert answer.status_code == 500
        assert "died 2 times of this request" in answer.json()["error"]["message"]
        assert traffic.wait() == []
        until("it is ready", lambda: rig.health() == (200, "ready"), 20.0)
        ledger = rig.invariants()
        assert (ledger["owned"], ledger["violations"]) == (0, [])


def test_the_times_of_a_request_count_over_a_lost_core(chain_folder: Path) -> None:
    count, step_s = 200, 0.01
    with Rig(chain_folder, (SCRIPT,), SMALL) as rig:
        client = rig.wait_ready().client()
        client.wait_ready(20.0)
        began, tokens = time.monotonic(), list[int]()
        for output in client.submit([1, 2], SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)):
            if len(tokens) < count // 2 <= len(tokens) + len(output.token_ids):
                os.kill(rig.pid(1), signal.SIGKILL)
            tokens += output.token_ids
        took = time.monotonic() - began
    assert tokens == continuation([1, 2], count)
    assert output.times is not None
    assert (count - 1) * step_s <= output.times.decode
    assert output.times.queued + output.times.prefill + output.times.decode <= took


def test_a_python_client_hears_of_the_death_of_the_server(chain_folder: Path) -> None:
    with Rig(chain_folder, (SCRIPT,), SMALL) as rig:
        client = rig.wait_ready().client()
        client.wait_ready(20.0)
        answer = client.submit([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True))
        next(answer)
        os.kill(rig.process.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(EngineDead, match="the server has ended"):
            list(answer)
        assert time.monotonic() - began < 5.0


@pytest.mark.slow
def test_rounds_of_death_and_start_leave_nothing(chain_folder: Path) -> None:
    with Rig(chain_folder, (SCRIPT,), SMALL) as rig:
        rig.wait_ready()
        for _ in range(20):
            pids = rig.pids()
            os.kill(rig.process.pid, signal.SIGKILL)
            rig.process.wait(10)
            # At once, while the others may still be dying.
            rig.restart()
            rig.wait_ready()
            for pid in pids:
                until("all old ones are gone", lambda pid=pid: gone(pid), 5.0)  # type: ignore[misc]
            assert len(list(rig.runtime.iterdir())) == 1
        client = rig.client()
        client.wait_ready(20.0)
        answer = client.submit([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
        assert [token for output in answer for token in output.token_ids] == continuation([1, 2, 3], 5)
