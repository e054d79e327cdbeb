"""How an engine core process ends: asked to, refused, broken, orphaned; and what its clients are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from engine_core.__main__ import main
from engine_core.wire.client import Fatal, FatalCode, Ping, Progress, Ready, Status
from engine_core.wire.config import Deadlines, EngineConfig, RecoveryOptions, write_config
from tests.fakes.core_process import ENDLESS, ROOT, WireClient, core_arguments, fake_model, running_core
from tests.fakes.executor import continuation
from tests.fakes.waiting import gone, until

SLOW = EngineConfig(model=fake_model("delay_s=0.005"))
NO_RESTARTS = RecoveryOptions(max_restarts=0)


def left_over(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"engine.json"}


def test_sigterm_ends_clean(tmp_path: Path) -> None:
    with running_core(tmp_path, SLOW) as core:
        client, other = core.client(), core.client()
        client.connect()
        client.start("a")
        other.connect()
        executor = core.executor_pid
        core.child.signal(signal.SIGTERM)
        assert client.last_words() == other.last_words() == Fatal("shutdown", "engine: told to end", final=False)
        assert core.child.wait(5.0) == 0
        assert gone(executor)
        assert left_over(tmp_path) == set()


def test_sigterm_while_loading(tmp_path: Path) -> None:
    with running_core(tmp_path, EngineConfig(model=fake_model("never_ready=1"))) as core:
        client = core.client()
        client.hello()
        client.expect(Progress)
        executor = core.executor_pid
        core.child.signal(signal.SIGTERM)
        assert client.last_words().code == "shutdown"
        assert core.child.wait(5.0) == 0
        assert gone(executor)
        assert left_over(tmp_path) == set()


def test_a_deaf_executor_is_forced_to_end(tmp_path: Path) -> None:
    with running_core(tmp_path, EngineConfig(model=fake_model("deaf=1,hang_at=2"))) as core:
        client = core.client()
        client.connect()
        client.start("a")
        executor = core.executor_pid
        core.child.signal(signal.SIGTERM)
        assert core.child.wait(10.0) == 0
        assert gone(executor)


def test_sigint_is_for_the_process_on_top(tmp_path: Path) -> None:
    with running_core(tmp_path, SLOW) as core:
        client = core.client()
        client.connect()
        core.child.signal(signal.SIGINT)
        os.kill(core.executor_pid, signal.SIGINT)
        client.submit("a", [1, 2, 3])
        assert client.finish("a") == continuation([1, 2, 3], 8)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_death_of_the_executor(tmp_path: Path, number: signal.Signals) -> None:
    with running_core(tmp_path, msgspec.structs.replace(SLOW, recovery=NO_RESTARTS)) as core:
        client, other = core.client(), core.client()
        client.connect()
        client.start("a")
        other.connect()
        executor = core.executor_pid
        os.kill(executor, number)
        how = "exit status 0" if number == signal.SIGTERM else f"signal {int(number)}"
        told = Fatal("executor_died", f"executor (pid {executor}) ended: {how}")
        assert client.last_words(2.0) == other.last_words(2.0) == told
        assert core.child.wait(5.0) == 4
        assert left_over(tmp_path) == set()


def test_death_of_the_executor_while_idle(tmp_path: Path) -> None:
    with running_core(tmp_path, msgspec.structs.replace(SLOW, recovery=NO_RESTARTS)) as core:
        client = core.client()
        client.connect()
        os.kill(core.executor_pid, signal.SIGKILL)
        assert client.last_words(2.0).code == "executor_died"
        assert core.child.wait(5.0) == 4


@pytest.mark.parametrize(
    ("script", "code", "message", "status"),
    [
        ("refuse=dtype: int3 is not known", "start_refused", "dtype: int3 is not known", 3),
        ("fail_load_with=3", "start_refused", "executor (pid PID) ended: exit status 3", 3),
        ("fail_load_with=2", "start_refused", "executor (pid PID) ended: exit status 2", 3),
        ("fail_load_with=1", "executor_died", "executor (pid PID) ended: exit status 1", 4),
        ("protocol=9", "protocol", "executor: protocol: expected 1, the peer has 9", 3),
        ("exit_at=3", "executor_died", "executor (pid PID) ended: exit status 9", 4),
        ("fatal_at=3", "executor_died", "executor (pid PID): the device is on fire", 4),
        (
            "lose_at=3,delay_s=0.01",
            "executor_died",
            "executor (pid PID): result of step 4 came before that of step 3",
            4,
        ),
        ("short_at=3", "executor_died", "executor (pid PID): result of step 3: token_ids: 0, expected 1", 4),
    ],
)
def test_an_executor_that_fails(tmp_path: Path, script: str, code: FatalCode, message: str, status: int) -> None:
    with running_core(tmp_path, EngineConfig(model=fake_model(script), recovery=NO_RESTARTS)) as core:
        client = core.client()
        client.hello()
        while not isinstance(heard := client.receive(), Fatal):
            if isinstance(heard, Ready):
                client.submit("a", [1, 2, 3], ENDLESS)
        assert (heard.code, mask_pid(heard.message)) == (code, message)
        assert core.child.wait(5.0) == status
        assert left_over(tmp_path) == set()


def test_a_core_that_fails_before_its_first_client_speaks_tells_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(model=fake_model("refuse=dtype: int3 is not known"), recovery=NO_RESTARTS)
    with running_core(tmp_path, config) as core:
        until("the executor refuses", lambda: "executor lost" in capfd.readouterr().err)
        client = core.client()
        client.hello()
        assert client.last_words().code == "start_refused"
        assert core.child.wait(5.0) == 3


def mask_pid(message: str) -> str:
    """The message with PID for the number after "(pid "."""
    before, found, after = message.partition("(pid ")
    return message if not found else f"{before}(pid PID){after.partition(')')[2]}"


def test_a_stranger_may_say_what_it_likes_to_the_executor_socket(tmp_path: Path) -> None:
    with running_core(tmp_path, EngineConfig(model=fake_model("delay_s=0.005,garbage_at=2,stale_at=4"))) as core:
        client = core.client()
        client.connect()
        stranger = WireClient(core.executor_socket)
        for frame in (
            b"",
            b"\xc1",
            b"\x93\xaeexecutor_fatal\xa8internal\xa1x",
            b"\x95\xaeexecutor_hello\x01\xa1x\x01\x01",
        ):
            stranger.socket.send(frame)
        until("all are dropped", lambda: client.status().malformed_frames == 4)
        client.submit("a", [1, 2, 3])
        assert client.finish("a") == continuation([1, 2, 3], 8)
        status = client.status()
        assert (status.malformed_frames, status.stale_results) == (5, 1)
        stranger.close()


def test_a_start_that_takes_too_long(tmp_path: Path) -> None:
    config = EngineConfig(model=fake_model("never_ready=1"), deadlines=Deadlines(start_timeout=1.0))
    with running_core(tmp_path, config) as core:
        client = core.client()
        client.hello()
        assert client.last_words() == Fatal("stalled", "executor: not ready within start_timeout 1 s")
        assert core.child.wait(5.0) == 4


def test_a_step_that_takes_too_long(tmp_path: Path) -> None:
    deadlines = Deadlines(step_timeout=1.0)
    config = EngineConfig(model=fake_model("delay_s=0.005"), deadlines=deadlines, recovery=NO_RESTARTS)
    with running_core(tmp_path, config) as core:
        client = core.client()
        client.connect()
        client.start("a")
        executor = core.executor_pid
        os.kill(executor, signal.SIGSTOP)
        told = client.last_words(5.0)
        assert told.code == "stalled"
        assert told.message.startswith(
            (f"executor (pid {executor}): stopped by", f"executor (pid {executor}): no step")
        )
        assert told.message.endswith("step_timeout 1 s")
        assert core.child.wait(5.0) == 4
        assert gone(executor)


def test_steps_within_the_limit_are_no_stall(tmp_path: Path) -> None:
    """The limit is for a step, not for a request."""
    config = EngineConfig(model=fake_model("delay_s=0.3"), deadlines=Deadlines(step_timeout=1.0))
    with running_core(tmp_path, config) as core:
        client = core.client()
        client.connect()
        client.submit("a", [1, 2, 3])
        assert client.finish("a") == continuation([1, 2, 3], 8)


@pytest.mark.parametrize("script", ["never_ready=1", "delay_s=0.01", "hang_at=2"], ids=["loading", "running", "hung"])
def test_death_of_the_parent(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    write_config(EngineConfig(model=fake_model(script)), tmp_path / "engine.json")
    code = (
        "import time\n"
        "from engine_core.wire.child import Child\n"
        f"print(Child.spawn('engine core', {core_arguments(tmp_path)!r}).pid, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        core = int(parent.stdout.readline())
        client = WireClient(tmp_path / "core.sock")
        client.hello()
        if script == "never_ready=1":
            client.expect(Progress)
        else:
            client.expect(Ready)
            client.submit("a", [1, 2, 3], ENDLESS)
            while not client.tokens("a"):
                client.receive()
        (executor,) = (child.pid for child in psutil.Process(core).children())
        parent.kill()
    until("the core is gone", lambda: gone(core), 5.0)
    until("the executor is gone", lambda: gone(executor), 5.0)
    client.close()


def test_death_of_the_core_ends_the_executor(tmp_path: Path) -> None:
    with running_core(tmp_path, SLOW) as core:
        client = core.client()
        client.connect()
        client.start("a")
        executor = core.executor_pid
        core.child.signal(signal.SIGKILL)
        until("the executor is gone", lambda: gone(executor), 5.0)


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--socket", "x"])
    assert ended.value.code == 2
    assert "--config" in capsys.readouterr().err


def test_the_log_holds_no_prompt(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with running_core(tmp_path, SLOW) as core:
        client = core.client()
        client.connect()
        client.submit("a", [401, 402, 403] * 10)
        tokens = client.finish("a")
        client.socket.send(b"\x92\xa5abort\x91\xa5\xff\xfe402")
        client.send(Ping(1))
        client.expect(Status)
        assert core.end() == 0
    log = capfd.readouterr().err
    assert "ready: fake:" in log
    assert "ended (shutdown)" in log
    assert not [token for token in [401, 402, 403, *tokens] if f"{token}," in log or f" {token} " in log]


def test_the_command_line_shows_who_it_is(tmp_path: Path) -> None:
    with running_core(tmp_path, SLOW) as running:
        running.client().connect()
        core = psutil.Process(running.child.pid)
        assert core.cmdline()[1:3] == ["-m", "engine_core"]
        (executor,) = core.children()
        assert executor.cmdline()[1:3] == ["-m", "tests.fakes.executor"]
        assert "torch" not in Path(f"/proc/{core.pid}/maps").read_text()
