"""The flags of a run and the options they give."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_executor.errors import ToolMisused
from model_executor.tools.command import Parser
from model_executor.tools.offline import OfflineOptions
from model_executor.tools.run_flags import add_run_flags, add_vocab_flag, run_options


def options(*flags: str) -> OfflineOptions:
    parser = Parser(prog="tool", description="A tool.")
    add_run_flags(parser)
    return run_options(parser.parse_args(["model", *flags]))


def test_what_is_not_said_is_as_served_by_default() -> None:
    assert options() == OfflineOptions(Path("model"))


def test_every_flag_has_its_option() -> None:
    flags = ["--layers", "0,3", "--allow-missing-classes", "--dtype", "bfloat16", "--quantization", "int8"]
    assert options(*flags, "--kv-cache-dtype", "float16") == OfflineOptions(
        Path("model"),
        layers="0,3",
        allow_missing_classes=True,
        dtype="bfloat16",
        quantization="int8",
        kv_cache_dtype="float16",
    )


def test_what_is_not_known_is_named() -> None:
    with pytest.raises(ToolMisused, match="--kv-cache-dtype: invalid choice: 'int4'"):
        options("--kv-cache-dtype", "int4")


@pytest.mark.parametrize("text", ["-5", "0", "1", "x"])
def test_a_vocabulary_without_a_second_id_is_refused(text: str) -> None:
    parser = Parser(prog="tool", description="A tool.")
    add_vocab_flag(parser)
    assert parser.parse_args(["--sample-vocab", "2"]).sample_vocab == 2
    with pytest.raises(ToolMisused, match=r"--sample-vocab: .* is no number from 2 on"):
        parser.parse_args([f"--sample-vocab={text}"])
