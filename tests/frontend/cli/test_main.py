"""The command line: configuration out of flags, file and environment; errors of one line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_core.wire.config import EngineConfig
from frontend.cli import chat
from frontend.cli.main import COMMANDS, main
from frontend.cli.options import options
from frontend.cli.serve import add_parser, configuration
from frontend.config import MASK, ServeConfig, printable
from frontend.errors import EXIT_ENGINE, EngineTimeout, UsageError


def configured(*flags: str, environment: dict[str, str] | None = None) -> ServeConfig:
    """The configuration of `tercet serve FLAGS`."""
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return configuration(parser.parse_args(["serve", *flags]), environment or {})


def test_defaults_are_those_of_the_structs() -> None:
    config = configured("m")
    assert config.http.host == "127.0.0.1"
    assert config.http.port == 8000
    assert config.http.served_model_name == ("m",)
    assert config.engine.model.model == str(Path("m").absolute())
    assert msgspec.structs.replace(config.engine, model=EngineConfig().model) == EngineConfig()


def test_flags_of_every_kind() -> None:
    config = configured(
        *("m", "--port", "0", "--api-key", "a", "--api-key", "b", "--served-model-name", "x"),
        *("--dtype", "float16", "--max-model-len", "99", "--no-async-scheduling", "--debug-endpoints"),
        *("--shutdown-timeout", "0.5", "--kv-cache-memory-bytes", "1000000", "--seed=7"),
        *("--cuda-graph-sizes", "1", "4", "--enforce-eager", "--trace-file", "steps.json"),
    )
    assert config.engine.executor.cuda_graph_sizes == (1, 4)
    assert config.engine.executor.enforce_eager
    # The engine core may have another working directory.
    assert config.reports.trace_file == str(Path("steps.json").absolute())
    assert config.http.api_key == ("a", "b")
    assert config.http.shutdown_timeout == 0.5
    assert config.http.debug_endpoints
    assert config.engine.model.dtype == "float16"
    assert config.engine.model.max_model_len == 99
    assert config.engine.model.seed == 7
    assert config.engine.cache.kv_cache_memory_bytes == 1_000_000
    assert not config.engine.scheduler.async_scheduling


def test_every_option_has_one_flag_and_a_help_text() -> None:
    found = options(ServeConfig)
    flags = [option.flag for option in found]
    assert len(set(flags)) == len(flags)
    assert all(option.text for option in found)
    assert {"--host", "--port", "--max-num-seqs", "--block-size", "--client-socket"} <= set(flags)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "m", "--prot", "5"], ["--prot", "did you mean --port?"]),
        (["serve", "m", "--max-num-seq", "5"], ["--max-num-seq", "did you mean --max-num-seqs?"]),
        (["serve", "m", "--port", "99999"], ["--port", "99999", "<= 65535"]),
        (["serve", "m", "--port", "x"], ["--port", "'x'", "whole number"]),
        (["serve", "m", "--port"], ["--port"]),
        (["serve", "m", "--max-num-seqs", "0"], ["--max-num-seqs", ">= 1"]),
        (["serve", "m", "--shutdown-timeout", "nan"], ["--shutdown-timeout"]),
        (["serve", "m", "--dtype", "float31"], ["--dtype", "did you mean float32?"]),
        (["serve", "m", "--host", ""], ["--host"]),
        (["serve", "m", "n"], ["too many arguments", "'n'"]),
        (["serve"], ["MODEL_DIR"]),
        (["serve", "m", "--config", "nowhere.json"], ["nowhere.json"]),
        (["srve"], ["'srve'", "did you mean serve?"]),
    ],
)
def test_errors_are_one_line_and_exit_2(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    for word in words:
        assert word in captured.err


def test_the_printed_configuration_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--print-config", "--port", "81", "--max-num-seqs", "3"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["version"] == 1
    file = tmp_path / "config.json"
    file.write_text(text)
    config = configured("--config", str(file), "--port", "82")
    assert config.http.port == 82
    assert config.engine.scheduler.max_num_seqs == 3
    assert config.engine.model.model == str(Path("m").absolute())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"http": {"prot": 1}}, ["prot", "did you mean http.port?"]),
        ({"engine": {"kv_cache_dtype": "float16"}}, ["did you mean engine.cache.kv_cache_dtype?"]),
        ({"http": {"port": -1}}, ["http.port"]),
        ({"version": 2}, ["version"]),
        ({"engine": {"model": {"dtype": "x"}}}, ["dtype"]),
        ([], ["object"]),
    ],
)
def test_errors_in_a_file_name_the_place(tmp_path: Path, values: Any, words: list[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    with pytest.raises(UsageError) as caught:
        configured("m", "--config", str(file))
    for word in (*words, "config.json"):
        assert word in str(caught.value)


def test_keys_are_masked_and_a_mask_is_no_key(tmp_path: Path) -> None:
    config = configured("m", "--api-key", "sk-1", environment={"TERCET_API_KEY": "sk-2"})
    assert config.http.api_key == ("sk-1", "sk-2")
    text = printable(config)
    assert "sk-" not in text
    assert text.count(MASK) == 2
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="is no key"):
        configured("--config", str(file))


@pytest.mark.parametrize("argv", [["--version"], ["serve", "--help"]])
def test_help_and_version(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("tercet " if argv == ["--version"] else "usage: tercet serve MODEL_DIR [flags]")
    if argv != ["--version"]:
        for title in ("The HTTP endpoint:", "The KV cache:", "What runs in a step:"):
            assert title in out


def test_without_a_command_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


class TestKeys:
    """API keys from flags, files and the environment."""

    def test_all_sources_together(self, tmp_path: Path) -> None:
        keys = tmp_path / "keys"
        keys.write_bytes(b"\r\n k1 \r\n\r\nk2\nk1\n")
        base = tmp_path / "base.json"
        base.write_text('{"http": {"api_key": ["k0"]}}', encoding="utf-8")
        found = configured(
            "m", "--config", str(base), "--api-key-file", str(keys), environment={"TERCET_API_KEY": "k3"}
        )
        assert found.http.api_key == ("k0", "k1", "k2", "k3")
        assert configured("m", "--api-key", "a", "--api-key", "b").http.api_key == ("a", "b")

    @pytest.mark.parametrize("content", [b"", b"\n  \n", b"\xff\xfe"])
    def test_a_file_without_keys_would_leave_the_server_open(self, tmp_path: Path, content: bytes) -> None:
        keys = tmp_path / "keys"
        keys.write_bytes(content)
        with pytest.raises(UsageError, match="--api-key-file"):
            configured("m", "--api-key-file", str(keys))
        with pytest.raises(UsageError, match="--api-key-file"):
            configured("m", "--api-key-file", str(tmp_path / "none"))

    def test_empty_and_masked_keys_are_none(self, tmp_path: Path) -> None:
        base = tmp_path / "base.json"
        for key in ('""', '"***"'):
            base.write_text(f'{{"http": {{"api_key": [{key}]}}}}', encoding="utf-8")
            with pytest.raises(UsageError):
                configured("m", "--config", str(base))

    def test_keys_are_masked_where_the_configuration_is_printed(self, tmp_path: Path) -> None:
        keys = tmp_path / "keys"
        keys.write_text("secret-one\n", encoding="utf-8")
        config = configured("m", "--api-key-file", str(keys), environment={"TERCET_API_KEY": "secret-two"})
        assert "secret" not in printable(config)


def test_an_error_without_an_exit_code_is_the_engine_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: argparse.Namespace) -> int:
        raise EngineTimeout("the welcome", 2.0)

    monkeypatch.setattr(chat, "run", run)
    assert main(["chat"]) == EXIT_ENGINE
    assert capsys.readouterr().err == "error: the welcome: nothing came within 2 s\n"


LEAVING = """
import threading
from frontend.cli.serve import leave
from frontend.tokenizer.pool import TextPool

pool, working = TextPool(workers=1), threading.Event()
pool._threads.submit(lambda: (working.set(), threading.Event().wait(100)))
working.wait(10)
pool.close()
print("ended")
raise SystemExit(leave(7))
"""


def test_a_text_that_is_still_worked_on_holds_nobody_up_at_the_end() -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "ended\n", "")
