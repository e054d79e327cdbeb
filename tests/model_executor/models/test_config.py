from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_executor.errors import CheckpointBroken, ConfigRefused
from model_executor.models import config as config_module
from model_executor.models.config import ConfigFile, read_json_object


def config(**fields: Any) -> ConfigFile:
    return ConfigFile(Path("some/config.json"), fields)


def test_null_is_absent() -> None:
    nothing = config(a=None)
    assert "a" not in nothing
    assert nothing.count("a", 3) == 3
    assert nothing.optional_count("a") is None
    assert nothing.number("a", 0.5) == 0.5
    assert nothing.flag("a", default=True)
    assert nothing.string("a", "x") == "x"
    assert nothing.strings("a") == ()
    assert nothing.section("a") is None


def test_values() -> None:
    full = config(n=2, x=3, b=False, s="t", l=["u"], o={"n": 1})
    assert (full.count("n"), full.number("x"), full.flag("b", default=True)) == (2, 3.0, False)
    assert (full.string("s", ""), full.strings("l")) == ("t", ("u",))
    inner = full.section("o")
    assert inner is not None
    assert inner.count("n") == 1


@pytest.mark.parametrize("value", [0, -1, 2**31, 1.0, True, "1", [1], {}])
def test_no_count(value: object) -> None:
    with pytest.raises(ConfigRefused, match=r"some/config\.json: n: .*: must be a whole number from 1 on"):
        config(n=value).count("n")


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 10**400, True, "1", [1]])
def test_no_number(value: object) -> None:
    with pytest.raises(ConfigRefused, match="x: "):
        config(x=value).number("x")


def test_absent_and_required() -> None:
    for call in (config().count, config().number):
        with pytest.raises(ConfigRefused, match="n: None: is required"):
            call("n")


def test_inner_fields_carry_their_path() -> None:
    inner = config(o={"n": "x"}).section("o")
    assert inner is not None
    with pytest.raises(ConfigRefused, match=r"o\.n: 'x'"):
        inner.count("n")


def test_long_values_are_cut() -> None:
    with pytest.raises(ConfigRefused) as caught:
        config(n="x" * 10_000).count("n")
    assert len(str(caught.value)) < 400


def test_file_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "LARGEST_FILE", 10)
    (tmp_path / "c.json").write_text('{"a": "0123456789"}')
    with pytest.raises(CheckpointBroken, match="larger than 10 bytes"):
        read_json_object(tmp_path / "c.json")


def test_half_of_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"a": "\\ud83d\\ude00"}')
    assert read_json_object(tmp_path / "c.json") == {"a": "\U0001f600"}
    (tmp_path / "c.json").write_text('{"a": "\\ud83d"}')
    with pytest.raises(CheckpointBroken, match=r"no valid JSON: .*surrogates not allowed"):
        read_json_object(tmp_path / "c.json")
