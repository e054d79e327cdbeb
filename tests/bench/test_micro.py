"""`tercet bench micro`."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from bench import ceilings, kernels
from bench.__main__ import main
from bench.ceilings import Ceilings
from bench.micro import told
from model_executor.errors import NativeUnavailable
from model_executor.native import library
from model_executor.native.library import Native


def results(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """Run it."""
    assert main(["micro", "--steps", "5", "--json", *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_scheduler_wire_and_pool(capsys: pytest.CaptureFixture[str]) -> None:
    found = results(capsys, "--parts", "scheduler", "wire", "pool", "--rows", "2")
    assert [one["part"] for one in found] == ["scheduler"] * 2 + ["wire"] * 4 + ["pool"] * 3
    assert all(one["us"] > 0 for one in found)
    assert all(one["bytes"] > 0 for one in found if one["part"] == "wire")


def test_only_the_parts_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert {one["part"] for one in results(capsys, "--parts", "wire", "--rows", "1")} == {"wire"}


@pytest.fixture
def small_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags for kernels of one small layer, beside made-up ceilings."""
    limits = Ceilings(2e9, {"float32": 3e9, "int8": 4e9}, 2)
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda: limits)
    monkeypatch.setattr(kernels, "LEAST_S", 0.0)
    monkeypatch.setattr(kernels, "Shape", partial(kernels.Shape, layers=1, vocab=64))
    return ["--parts", "kernels", "--rows", "1", "--tokens", "2", "--context", "16"]


def test_kernels_stand_beside_the_ceilings_of_the_run(
    small_kernels: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = results(capsys, *small_kernels)
    assert len(found) == 13 + 10
    for one in found:
        least = max(one["bytes"] / 2e9, one["operations"] / (4e9 if "int8" in one["name"] else 3e9))
        assert one["fraction"] == pytest.approx(1e6 * least / one["us"])


def test_without_the_native_library_the_kernels_are_torch_s(
    small_kernels: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(threads: int) -> Native:
        raise NativeUnavailable("native", "compiled", f"nothing for {threads} threads")

    monkeypatch.setattr(library, "load_native", missing)
    found = results(capsys, *small_kernels)
    assert {one["name"].partition("_")[0] for one in found} == {"torch"}


def test_ceilings_are_told_in_a_line() -> None:
    line = told({"bytes_per_s": 30e9, "operations_per_s": {"float32": 250e9}, "threads": 2})
    assert line == "ceilings: memory 30.0 GB/s, float32 250 Gop/s, 2 threads"


def test_sizes_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["micro", "--rows", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: --rows")
