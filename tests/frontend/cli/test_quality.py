"""`tercet quality` as it is typed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine_core.wire.evidence import QualityReport
from frontend.cli.main import main
from tests.model_executor.tools.folders import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama") / "model", "llama")


def test_the_report_is_printed_and_written(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "quality.json"
    flags = ["--dtype", "float32", "--tokens", "300", "--layers", "0,3", "--allow-missing-classes"]
    assert main(["quality", str(folder), *flags, "--json", str(path)]) == 0
    told = capsys.readouterr().out
    report = msgspec.json.decode(path.read_bytes(), type=QualityReport)
    assert (report.identity.layer_map, report.identity.dtype, report.quantization) == ([0, 3], "float32", "none")
    assert report.windows == 2
    assert told.splitlines()[-1] == "verdict: pass"
    assert "unverified: the quality of the model" in told


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--tokens", "1"], 2, "--tokens"),
        (["--tokens", "100"], 2, "--tokens: 100, at least"),
        (["--text", "nowhere"], 2, "nowhere"),
        (["--layers", "9"], 3, "layers"),
    ],
)
def test_errors(folder: Path, flags: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quality", str(folder), *flags]) == status
    assert message in capsys.readouterr().err
