"""Reports of the start: over HTTP, and as files."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from engine_core.wire.client import Ready
from engine_core.wire.reports import KernelChoice, LoadReport, Phase
from frontend.api.reports import REPORTS, TIMES, StartupRecord, startup_record, write_reports
from tests.fakes.live import LiveServer
from tests.wire.messages import KERNELS, LOAD, MODEL

SECONDS: dict[Phase, float] = {
    "start": 1.0,
    "plan": 2.0,
    "load": 4.0,
    "build": 8.0,
    "kv_cache": 16.0,
    "warm_up": 32.0,
    "warm_run": 64.0,
    "pack": 128.0,
}
READY = Ready(MODEL, LOAD, KERNELS, SECONDS, 3)


def test_every_phase_has_one_place_and_every_time_its_name() -> None:
    phases = [phase for phases in TIMES.values() for phase in phases]
    assert sorted(phases) == sorted(Phase.__args__)  # type: ignore[attr-defined]
    record = startup_record(READY)
    assert record.seconds == {
        "start_up": 1.0,
        "distributed_init": 0.0,
        "planning": 2.0,
        "checkpoint_io": 4.0,
        "backend_preparation": 152.0,
        "graph_capture": 0.0,
        "first_execution": 32.0,
        "warm_execution": 64.0,
    }
    assert record.total == sum(SECONDS.values())
    assert (record.epoch, record.layer_map, record.dtype) == (3, [0, 2], "float32")


@pytest.mark.parametrize(("share", "state"), [(None, "unknown"), (0.0, "cold"), (0.4, "partly"), (0.99, "warm")])
def test_cold_and_warm(share: float | None, state: str) -> None:
    load = msgspec.structs.replace(LOAD, page_cache=share)
    record = startup_record(msgspec.structs.replace(READY, load=load))
    assert (record.page_cache, record.page_cache_share) == (state, share)


def test_over_http(live: LiveServer) -> None:
    ready = live.client.ready
    assert ready is not None
    load = msgspec.json.decode(live.http.get("/reports/load").content, type=LoadReport)
    assert load == ready.load
    kernels = msgspec.json.decode(live.http.get("/reports/kernels").content, type=list[KernelChoice])
    assert kernels == ready.kernels
    startup = msgspec.json.decode(live.http.get("/reports/startup").content, type=StartupRecord)
    assert startup == startup_record(ready)
    answer = live.http.get("/reports/other")
    assert answer.status_code == 404


def test_not_before_the_engine_is_ready(tmp_path: Path) -> None:
    with LiveServer(tmp_path, ready=False) as live:
        for name in REPORTS:
            answer = live.http.get(f"/reports/{name}")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "not_ready"


def test_files_are_whole_or_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_reports(tmp_path, READY)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels.json", "load.json", "startup.json"]
    assert msgspec.json.decode((tmp_path / "load.json").read_bytes(), type=LoadReport) == LOAD
    write_reports(tmp_path, msgspec.structs.replace(READY, epoch=4))
    assert msgspec.json.decode((tmp_path / "startup.json").read_bytes(), type=StartupRecord).epoch == 4
    (tmp_path / "load.json").unlink()
    (tmp_path / "load.json").mkdir()
    with caplog.at_level(logging.ERROR):
        write_reports(tmp_path, READY)
    assert "--report-dir" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels.json", "load.json", "startup.json"]
