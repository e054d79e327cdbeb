"""What the tools' command lines share: errors of one line, exit codes, and no torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from model_executor.errors import CheckpointBroken, ToolMisused
from model_executor.tools.command import Parser, add_layer_flags, run_tool


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ToolMisused("--x: bad"), 2, "error: --x: bad"),
        (CheckpointBroken(Path("m"), "gone"), 3, "error: m: gone"),
        (OSError(28, "No space left on device"), 2, "error: tercet x: [Errno 28] No space left on device"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors(error: BaseException, status: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    def act(_: Sequence[str]) -> None:
        raise error

    assert run_tool("tercet x", act, []) == status
    assert capsys.readouterr().err.strip() == text


def test_the_words_arrive(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    assert run_tool("tercet x", seen.extend, ["a", "--b"]) == 0
    assert seen == ["a", "--b"]
    assert capsys.readouterr().err == ""


def test_flags_of_layers() -> None:
    parser = Parser(prog="tercet x", description="does it")
    add_layer_flags(parser, "full")
    assert parser.parse_args([]).layers == "full"
    assert not parser.parse_args(["--layers", "0"]).allow_missing_classes
    for words in (["--lay", "0"], ["--layers"], ["more"]):
        with pytest.raises(ToolMisused, match="tercet x: "):
            parser.parse_args(words)
    needed = Parser(prog="tercet x", description="does it")
    add_layer_flags(needed, None)
    with pytest.raises(ToolMisused, match="--layers"):
        needed.parse_args([])


@pytest.mark.parametrize("tool", ["plan", "cut"])
def test_no_tool_imports_torch(tool: str) -> None:
    code = (
        f"import sys; import model_executor.tools.{tool};"
        "assert not {'torch', 'numpy', 'transformers', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    code = (
        "import sys; from model_executor.tools.command import run_tool;"
        "sys.exit(run_tool('x', lambda _: sys.stdout.write('line\\n' * 100000), []))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
