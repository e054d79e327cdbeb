"""Lost executors are replaced, and no token is lost or repeated: a core process, fake executors, clients."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from engine_core.wire.client import Fatal, Inspect, Inspection, Progress, Ready, Status
from engine_core.wire.config import (
    CacheOptions,
    Deadlines,
    EngineConfig,
    ModelOptions,
    RecoveryOptions,
    SchedulerOptions,
)
from engine_core.wire.sampling import SamplingParams
from tests.fakes.core_process import RunningCore, WireClient, running_core
from tests.fakes.executor import continuation
from tests.fakes.waiting import gone, until

SLOW = "delay_s=0.005"
POISON = 499
SIXTY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=1)


def config(folder: Path, scripts: Sequence[str], *, restarts: int = 3, step_timeout: float = 60.0) -> EngineConfig:
    """A small engine whose executors take these scripts in turn."""
    path = folder / "script"
    path.write_text("\n".join(scripts), encoding="utf-8")
    return EngineConfig(
        model=ModelOptions(model=f"fake:@{path}"),
        cache=CacheOptions(block_size=4),
        scheduler=SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=64),
        deadlines=Deadlines(step_timeout=step_timeout),
        recovery=RecoveryOptions(max_restarts=restarts),
    )


def submit_six(client: WireClient) -> dict[str, list[int]]:
    """More requests than rows."""
    prompts = {f"r{i}": [i, i + 1, i + 2] * (i + 1) for i in range(6)}
    for name, prompt in prompts.items():
        client.submit(name, prompt, SIXTY)
    until_tokens(client, "r0", 5)
    return prompts


def until_tokens(client: WireClient, name: str, count: int) -> None:
    """Read until a request has so many tokens."""
    while len(client.tokens(name)) < count:
        assert not isinstance(message := client.receive(), Fatal), message


def check_all(client: WireClient, prompts: dict[str, list[int]], count: int = 60) -> None:
    """Each has exactly the tokens of an undisturbed run, a log-probability for each, and one end."""
    for name, prompt in prompts.items():
        assert client.finish(name, 20.0) == continuation(prompt, count)
        outputs = client.outputs[name]
        assert [output.finish for output in outputs if output.finish] == ["length"]
        assert sum(len(output.logprobs or ()) for output in outputs) == count


def check_books(client: WireClient, core: RunningCore) -> Status:
    """Nothing is held, all is well, and only one executor is there."""
    until("it is ready", lambda: client.status().state == "ready")
    client.send(Inspect(1))
    inspection = client.expect(Inspection)
    assert (inspection.violations, inspection.owned) == ([], 0)
    status = client.status()
    assert [child.pid for child in psutil.Process(core.child.pid).children()] == [status.executor_pid]
    return status


SIGNALS = [
    signal.SIGKILL,
    signal.SIGSTOP,
    *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGSEGV)),
]


@pytest.mark.parametrize("number", SIGNALS)
def test_signals(tmp_path: Path, number: signal.Signals) -> None:
    with running_core(tmp_path, config(tmp_path, [SLOW], step_timeout=1.0)) as core:
        client = core.client()
        client.connect()
        before = core.executor_pid
        prompts = submit_six(client)
        os.kill(before, number)
        check_all(client, prompts)
        status = check_books(client, core)
        assert (status.epoch, status.executor_restarts, status.recovered) == (2, 1, 6)
        assert 0.0 < status.recovery_s == status.recovery_total_s < 10.0
        assert gone(before)


SCRIPTS = [
    *("fatal_at=9", "lose_at=9", "hang_at=9", "deafen_at=9", "stale_at=9,exit_at=9"),
    *(pytest.param(script, marks=pytest.mark.slow) for script in ("exit_at=9", "short_at=9")),
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_executors_do_by_themselves(tmp_path: Path, script: str) -> None:
    scripts = [f"{SLOW},{script}", SLOW]
    with running_core(tmp_path, config(tmp_path, scripts, step_timeout=1.0)) as core:
        client = core.client()
        client.connect()
        check_all(client, submit_six(client))
        assert check_books(client, core).executor_restarts == 1


def test_while_idle_and_new_requests_wait_for_the_next_executor(tmp_path: Path) -> None:
    with running_core(tmp_path, config(tmp_path, [SLOW, f"{SLOW},load_s=1"])) as core:
        client = core.client()
        client.connect()
        os.kill(core.executor_pid, signal.SIGKILL)
        until("it recovers", lambda: client.status().state == "recovering")
        assert "signal 9" in client.status().reason
        client.submit("a", [1, 2, 3])
        late = core.client()
        assert late.hello().state == "recovering"
        assert client.finish("a") == continuation([1, 2, 3], 8)
        assert check_books(client, core).step_age_s == 0.0


def test_twice_while_recovering(tmp_path: Path) -> None:
    scripts = [SLOW, f"{SLOW},load_s=30", SLOW]
    with running_core(tmp_path, config(tmp_path, scripts)) as core:
        client = core.client()
        client.connect()
        prompts = submit_six(client)
        first = core.executor_pid
        os.kill(first, signal.SIGKILL)
        until("the second one loads", lambda: "load 0 of 100" in client.status().reason)
        os.kill(client.status().executor_pid, signal.SIGKILL)
        check_all(client, prompts)
        status = check_books(client, core)
        assert (status.epoch, status.executor_restarts, status.recovered) == (3, 1, 6)


def test_preempted_requests(tmp_path: Path) -> None:
    small = config(tmp_path, ["delay_s=0.002"])
    limited = EngineConfig(
        model=small.model, cache=CacheOptions(block_size=4, num_kv_blocks=24), scheduler=small.scheduler
    )
    with running_core(tmp_path, limited) as core:
        client = core.client()
        client.connect()
        prompts = submit_six(client)
        until("one is preempted", lambda: client.status().preemptions > 0)
        os.kill(core.executor_pid, signal.SIGKILL)
        check_all(client, prompts)
        check_books(client, core)


def test_a_replacement_that_fails_to_start_is_tried_again(tmp_path: Path) -> None:
    scripts = [SLOW, "fail_load_with=1", "protocol=9", SLOW]
    with running_core(tmp_path, config(tmp_path, scripts)) as core:
        client = core.client()
        client.connect()
        prompts = submit_six(client)
        os.kill(core.executor_pid, signal.SIGKILL)
        check_all(client, prompts)
        assert check_books(client, core).epoch == 4


def test_a_used_up_budget_ends_the_engine(tmp_path: Path) -> None:
    with running_core(tmp_path, config(tmp_path, [SLOW, "fail_load_with=1"], restarts=2)) as core:
        client, other = core.client(), core.client()
        client.connect()
        other.connect()
        submit_six(client)
        os.kill(core.executor_pid, signal.SIGKILL)
        told = client.last_words(5.0)
        assert told == other.last_words(5.0)
        assert (told.code, told.final) == ("executor_died", True)
        assert told.message.endswith("exit status 1; 2 restarts in 10 minutes are used up (--max-restarts)")
        assert core.child.wait(5.0) == 4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_first_start_is_tried_again_when_the_executor_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    with running_core(tmp_path, config(tmp_path, [f"{SLOW},load_s=30", SLOW])) as core:
        client = core.client()
        client.hello()
        client.expect(Progress)
        os.kill(core.executor_pid, number)
        assert client.expect(Ready).epoch == 2
        client.submit("a", [1, 2, 3])
        assert client.finish("a") == continuation([1, 2, 3], 8)


def test_fewer_blocks_than_before(tmp_path: Path) -> None:
    """What still fits goes on; what may need more than all there is ends alone."""
    with running_core(tmp_path, config(tmp_path, [f"{SLOW},blocks=256", f"{SLOW},blocks=32"])) as core:
        client = core.client()
        client.connect()
        client.submit("small", [1, 2, 3], SIXTY)
        client.submit("large", [4] * 100, SamplingParams(temperature=0.0, max_tokens=100))
        until_tokens(client, "large", 3)
        os.kill(core.executor_pid, signal.SIGKILL)
        check_all(client, {"small": [1, 2, 3]})
        assert client.outputs["large"][-1].finish == "error"
        assert "room for 128 tokens" in (client.outputs["large"][-1].error or "")
        status = check_books(client, core)
        assert (status.kv_blocks_total, status.finished["error"]) == (32, 1)


def test_a_poison_request_fails_alone_after_two_deaths(tmp_path: Path) -> None:
    scripts = [f"{SLOW},poison={POISON}"]
    with running_core(tmp_path, config(tmp_path, scripts, restarts=2)) as core:
        client = core.client()
        client.connect()
        prompts = submit_six(client)
        client.submit("poison", [1, POISON, 2], SIXTY)
        check_all(client, prompts)
        while not client.ended("poison"):
            client.receive()
        (output,) = client.outputs["poison"]
        assert (output.finish, output.token_ids) == ("error", [])
        assert output.error == "the executor died 2 times of this request, which ran alone at last"
        status = check_books(client, core)
        assert (status.executor_restarts, status.finished["error"]) == (2, 1)


def test_poison_does_not_use_up_the_budget(tmp_path: Path) -> None:
    with running_core(tmp_path, config(tmp_path, [f"{SLOW},poison={POISON}"], restarts=2)) as core:
        client = core.client()
        client.connect()
        for number in range(3):
            client.submit(f"p{number}", [number, POISON], SIXTY)
            client.submit(f"g{number}", [number], SIXTY)
            check_all(client, {f"g{number}": [number]})
            while not client.ended(f"p{number}"):
                client.receive()
        assert check_books(client, core).finished == {"length": 3, "error": 3}


def test_two_poisons_at_once(tmp_path: Path) -> None:
    with running_core(tmp_path, config(tmp_path, [f"{SLOW},poison={POISON}"], restarts=3)) as core:
        client = core.client()
        client.connect()
        prompts = submit_six(client)
        for name in ("p1", "p2"):
            client.submit(name, [3, POISON, 4], SIXTY)
        check_all(client, prompts)
        for name in ("p1", "p2"):
            while not client.ended(name):
                client.receive()
            assert client.outputs[name][-1].finish == "error"
        check_books(client, core)


def test_a_long_step_is_no_stall_and_a_stopped_executor_is(tmp_path: Path) -> None:
    with running_core(tmp_path, config(tmp_path, ["delay_s=2"])) as core:
        client = core.client()
        client.connect()
        client.submit("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1))
        until("the step is under way", lambda: client.status().step_age_s > 1.5)
        assert client.status().state == "ready"
        assert client.finish("a") == continuation([1, 2, 3], 1)
        os.kill(core.executor_pid, signal.SIGSTOP)
        until("it is stalled", lambda: client.status().state == "stalled", 3.0)
        assert "stopped by a signal" in client.status().reason
        client.submit("b", [4, 5], SamplingParams(temperature=0.0, max_tokens=1))
        os.kill(core.executor_pid, signal.SIGCONT)
        assert client.finish("b") == continuation([4, 5], 1)
        status = check_books(client, core)
        assert (status.epoch, status.executor_restarts) == (1, 0)


def test_one_line_says_what_happened_what_was_done_and_what_it_cost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with running_core(tmp_path, config(tmp_path, [SLOW])) as core:
        client = core.client()
        client.connect()
        prompts = submit_six(client)
        before = core.executor_pid
        os.kill(before, signal.SIGKILL)
        check_all(client, prompts)
        after = check_books(client, core).executor_pid
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "replaced by" in line]
    assert f"executor (pid {before}) ended: signal 9; replaced by pid {after} (epoch 2) in " in line
    assert "6 open requests go on; 1 of 3 restarts used in 10 minutes" in line
