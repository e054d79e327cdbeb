"""The conversation in the terminal."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from frontend.cli import chat
from frontend.cli.chat import Chat, harmless, line_reader, terminal_writer
from frontend.cli.http_talk import HttpTalk
from frontend.cli.main import main
from frontend.config import API_KEY_VARIABLE
from frontend.errors import EXIT_USAGE, TalkError
from tests.frontend.core_thread import CoreThread

HELLO = {"role": "assistant", "content": "Hello!"}


class ScriptedTalk:
    """A server that answers "Hello!", after what a test says."""

    def __init__(self, *, fail: bool = False, interrupt: bool = False) -> None:
        self.asked: list[list[Mapping[str, str]]] = []
        self.fail, self.interrupt = fail, interrupt
        self.left = False
        self.closed = False

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """Two pieces."""
        self.asked.append(list(messages))
        try:
            yield "Hel"
            if self.fail:
                raise TalkError("the engine died")
            if self.interrupt:
                raise KeyboardInterrupt
            yield "lo!"
        finally:
            self.left = True

    def close(self) -> None:
        """Closed."""
        self.closed = True


def talk_through(lines: list[str], talk: ScriptedTalk, **options: Any) -> tuple[Chat, int, str, str]:
    """Ask these lines; gives the conversation, the exit code, what was shown and what was complained."""
    out, errors = io.StringIO(), io.StringIO()
    given = iter(lines)
    stop = options.pop("stop_at_error", False)
    conversation = Chat(talk, lambda: next(given, None), out.write, errors.write, **options)  # type: ignore[arg-type]
    code = conversation.run(stop_at_error=stop)
    return conversation, code, out.getvalue(), errors.getvalue()


def user(text: str) -> dict[str, str]:
    """A message of the user's."""
    return {"role": "user", "content": text}


def test_the_conversation_grows() -> None:
    talk = ScriptedTalk()
    conversation, code, out, _ = talk_through(["one", "", "  ", "two"], talk)
    assert (code, out) == (0, "Hello!\nHello!\n")
    assert talk.asked == [[user("one")], [user("one"), HELLO, user("two")]]
    assert conversation.messages == [user("one"), HELLO, user("two"), HELLO]


def test_commands() -> None:
    talk = ScriptedTalk()
    conversation, code, _, _ = talk_through(["one", "/reset", "two", " /exit ", "three"], talk, system="Be kind.")
    system = {"role": "system", "content": "Be kind."}
    assert talk.asked == [[system, user("one")], [system, user("two")]]
    assert conversation.messages == [system, user("two"), HELLO]
    assert code == 0


def test_an_interrupt_cancels_the_answer_only() -> None:
    talk = ScriptedTalk(interrupt=True)
    conversation, code, out, _ = talk_through(["one"], talk)
    assert (code, out) == (0, "Hel [cancelled]\n")
    assert talk.left
    assert conversation.messages == [user("one"), {"role": "assistant", "content": "Hel"}]


def test_an_interrupt_while_writing_leaves_the_answer() -> None:
    talk = ScriptedTalk()
    shown: list[str] = []

    def write(text: str) -> None:
        shown.append(text)
        if text == "Hel":
            raise KeyboardInterrupt

    given = iter(["one"])
    conversation = Chat(talk, lambda: next(given, None), write, write)
    assert conversation.run(stop_at_error=True) == 0
    assert talk.left
    assert shown == ["Hel", " [cancelled]", "\n"]


@pytest.mark.parametrize(("stop", "code", "count"), [(True, 1, 1), (False, 0, 2)])
def test_a_failed_answer_is_told_and_forgotten(stop: bool, code: int, count: int) -> None:
    talk = ScriptedTalk(fail=True)
    conversation, found, out, errors = talk_through(["one", "two"], talk, stop_at_error=stop)
    assert found == code
    assert len(talk.asked) == count
    assert out == "Hel\n" * count
    assert errors == "error: the engine died\n" * count
    assert conversation.messages == []


def test_lines_of_a_pipe() -> None:
    read = line_reader(io.StringIO("one\n\ntwo"))
    assert [read(), read(), read(), read()] == ["one", "", "two", None]


def test_a_model_does_not_steer_the_terminal() -> None:
    assert harmless("a\x1b[2Jb\n\tc\x07\x9b\u4f60") == "a\ufffd[2Jb\n\tc\ufffd\ufffd\u4f60"
    out = io.StringIO()
    terminal_writer(out)("\x1b]0;x")
    assert out.getvalue() == "\ufffd]0;x"


def arguments(*flags: str) -> argparse.Namespace:
    """Parsed flags."""
    parser = argparse.ArgumentParser()
    chat.add_parser(parser.add_subparsers())
    return parser.parse_args(["chat", *flags])


def test_flags_and_environment() -> None:
    talk = chat.connect(arguments("--max-tokens", "5", "--temperature", "0"), {API_KEY_VARIABLE: "k"})
    assert isinstance(talk, HttpTalk)
    assert talk._options == {"max_tokens": 5, "temperature": 0.0}
    assert talk._headers["authorization"] == "Bearer k"


@pytest.mark.parametrize("flags", [["--temperature", "9"], ["--max-tokens", "-1"], ["--url", "nonsense"]])
def test_wrong_values(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", *flags]) == EXIT_USAGE
    assert "error: " in capsys.readouterr().err


def test_from_a_pipe_over_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    core = CoreThread(tmp_path)
    core.core.successors = [*core.core.successors]
    core.core.successors[ord("\n")] = ord("a")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n/exit\n"))
    code = main(["chat", "--socket", str(core.core.path), "--max-tokens", "3"])
    core.stop()
    assert (code, capsys.readouterr().out) == (0, "abc\n")


def test_no_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == 1
    assert "error: http://127.0.0.1:1" in capsys.readouterr().err
