"""scripts/gpu_check without a GPU: what it says then, and its dry run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.gpu import check
from tests.gpu.check import EXIT_FAILED, EXIT_NO_DEVICE, EXIT_PASSED, NO_DEVICE, Section
from tests.gpu.report import Line, Report, read_lines, table

PROGRAM = Path(__file__).parents[2] / "scripts" / "gpu_check"
DEADLINE_S = 240.0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [PROGRAM, *arguments], env=environment, timeout=DEADLINE_S, check=False, capture_output=True, text=True
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so() -> None:
    done = run()
    assert done.stdout.strip() == NO_DEVICE
    assert done.returncode == EXIT_NO_DEVICE


def test_dry_run_of_some_sections() -> None:
    done = run("--dry-run-cpu", "environment", "layers", "attention")
    assert done.returncode == EXIT_PASSED, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("23 passed, 0 failed")


@pytest.mark.slow
def test_dry_run_of_everything() -> None:
    done = run("--dry-run-cpu")
    assert done.returncode == EXIT_PASSED, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    for section in check.SECTIONS:
        assert f" {section.title} " in done.stdout


def test_an_unknown_section_is_refused() -> None:
    done = run("--dry-run-cpu", "nonsense")
    assert done.returncode == 2
    assert "no section nonsense" in done.stderr


def test_every_section_is_reached_whatever_the_others_take() -> None:
    """And a start is counted in: no section has less than it takes to import, make a context and compile."""
    assert check.START_SECONDS + sum(section.seconds for section in check.SECTIONS) <= check.TOTAL_SECONDS <= 480
    assert all(section.seconds >= 2 * check.START_SECONDS for section in check.SECTIONS)
    assert check._parser().parse_args([]).seconds == check.TOTAL_SECONDS


@pytest.mark.slow
def test_the_shards_of_a_section_share_its_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    shares = []
    for shard in ("0/2", "1/2"):
        lines = tmp_path / shard[0]
        done = run("--dry-run-cpu", "--inside", "layers:layers", "--shard", shard, "--lines", str(lines))
        assert done.returncode == EXIT_PASSED, done.stdout + done.stderr
        shares.append({line.name for line in read_lines(lines)})
    assert all(len(share) >= 8 for share in shares)
    assert len(shares[0] | shares[1]) == sum(map(len, shares)) == 20


def options(**more: object) -> Namespace:
    return Namespace(**{"sections": [], "dry_run_cpu": True, "seconds": 60.0, "wheels": Path("none"), **more})


def test_a_failing_section_does_not_stop_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = (Section("environment:not_there", 30), Section("environment:environment", 30))
    monkeypatch.setattr(check, "SECTIONS", sections)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seen: list[Line] = []

    def keep(lines: list[Line]) -> str:
        seen.extend(lines)
        return ""

    monkeypatch.setattr("tests.gpu.report.table", keep)
    assert check._run(options(), time.monotonic() + 60) == EXIT_FAILED
    verdicts = {(line.section, line.verdict) for line in seen}
    assert ("not_there", "FAIL") in verdicts
    assert ("environment", "ok") in verdicts


def test_a_section_that_takes_too_long_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def hang(*_: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "300"]))
        return started[-1]

    monkeypatch.setattr(check, "_start", hang)
    lines, now = tmp_path / "lines", time.monotonic()
    check._section(Section("any:thing", 1.0), options(), lines, now + 60)
    check._section(Section("any:thing", 30.0), options(), lines, now)
    told = [line.value for line in read_lines(lines) if line.verdict == "FAIL"]
    assert told == ["stopped after 1 s", "not reached: the time is used up"]
    assert [child.returncode for child in started] == [-signal.SIGKILL]


def test_table_aligns_what_was_told(tmp_path: Path) -> None:
    report = Report("part", tmp_path / "lines", torch.device("cpu"), dry=True)
    report.check("a", False, "1")
    report.note("longer", "2")
    assert table(read_lines(tmp_path / "lines")) == "FAIL  part  a       1\n-     part  longer  2"


def test_wheels_become_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "thing-1-py3-none-any.whl", "w") as archive:
        archive.writestr("thing.py", "X = 1")
    check._unpack(wheels)
    (folder,) = sys.path
    assert (Path(folder) / "thing.py").read_text() == "X = 1"
