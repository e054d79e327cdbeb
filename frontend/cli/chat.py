"""`tercet chat`: a conversation with a running server in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

import msgspec

from engine_core.wire.sampling import SamplingParams
from frontend.cli.http_talk import HttpTalk
from frontend.cli.socket_talk import SocketTalk
from frontend.config import API_KEY_VARIABLE
from frontend.errors import EXIT_FAILED, TalkError, UsageError

DEFAULT_URL: Final = "http://127.0.0.1:8000"
PROMPT: Final = "> "
HELP: Final = "/reset forgets the conversation, /exit (or Ctrl-D) ends; Ctrl-C cancels an answer"

Read = Callable[[], str | None]
Write = Callable[[str], None]


class Talk(Protocol):
    """A way to a server."""

    def answer(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """The answer, piece by piece; raises TalkError."""

    def close(self) -> None:
        """Let go of the server."""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare `tercet chat`."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a running server in the terminal",
        description=f"Talk to a running server. {HELP}. Lines from a pipe are asked one after the other. "
        "Exit codes: 0 done; 1 an answer failed; 2 a flag is wrong.",
        allow_abbrev=False,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", default=DEFAULT_URL, help=f"address of the server (default: {DEFAULT_URL})")
    where.add_argument("--socket", metavar="PATH", help="the server's socket for Python clients, in place of HTTP")
    parser.add_argument("--api-key", metavar="KEY", help=f"with --url (default: ${API_KEY_VARIABLE})")
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of the conversation")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="tokens of an answer at most")
    parser.add_argument("--temperature", metavar="T", type=float, help="0 always takes the likeliest token")


def run(args: argparse.Namespace) -> int:
    """Talk until the user ends it; gives the exit code."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    try:
        talk = connect(args, os.environ)
    except TalkError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    write = terminal_writer(sys.stdout) if interactive else stream_writer(sys.stdout)
    read = prompt_reader() if interactive else line_reader(sys.stdin)
    if interactive:
        write(HELP + "\n")
    chat = Chat(talk, read, write, stream_writer(sys.stderr), system=args.system)
    with contextlib.closing(talk):
        return chat.run(stop_at_error=not interactive)


def connect(args: argparse.Namespace, environment: Mapping[str, str]) -> Talk:
    """The way to the server that the flags name.

    Raises:
        UsageError: a flag's value is wrong.
        TalkError: there is no server behind --socket.
    """
    options = {
        name: value
        for name, value in (("max_tokens", args.max_tokens), ("temperature", args.temperature))
        if value is not None
    }
    try:
        params = msgspec.convert(msgspec.to_builtins(SamplingParams(**options)), SamplingParams)
    except msgspec.ValidationError as error:
        raise UsageError(f"tercet chat: {error}") from error
    if args.socket is not None:
        return SocketTalk(Path(args.socket), params)
    return HttpTalk(args.url, api_key=args.api_key or environment.get(API_KEY_VARIABLE), options=options)


class Chat:
    """One conversation.

    Args:
        talk: the server.
        read: gives the next line, None at the end of input; raises KeyboardInterrupt for Ctrl-C.
        write: shows a piece of text.
        complain: shows an error.
        system: first message; None: none.

    Attributes:
        messages: the conversation so far.
    """

    def __init__(self, talk: Talk, read: Read, write: Write, complain: Write, *, system: str | None = None) -> None:
        self._talk = talk
        self._read = read
        self._write = write
        self._complain = complain
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)

    def run(self, *, stop_at_error: bool) -> int:
        """Until the input ends; gives the exit code."""
        while (line := self._read()) is not None:
            command = line.strip()
            if command in ("/exit", "/quit"):
                break
            if command == "/reset":
                self.messages = list(self._opening)
            elif command and not self.ask(line) and stop_at_error:
                return EXIT_FAILED
        return 0

    def ask(self, line: str) -> bool:
        """Ask, and show the answer; False when it failed. Ctrl-C cancels it: what came stays in the conversation."""
        asked = [*self.messages, {"role": "user", "content": line}]
        pieces: list[str] = []
        answer = self._talk.answer(asked)
        try:
            for piece in answer:
                pieces.append(piece)
                self._write(piece)
        except TalkError as error:
            self._write("\n" if pieces else "")
            self._complain(f"error: {error}\n")
            return False
        except KeyboardInterrupt:
            if isinstance(answer, Generator):
                answer.close()
            self._write(" [cancelled]")
        self._write("\n")
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]
        return True


def line_reader(stream: TextIO) -> Read:
    """Lines of a pipe or a file."""

    def read() -> str | None:
        line = stream.readline()
        return line.rstrip("\n") if line else None

    return read


def prompt_reader() -> Read:
    """Lines from a terminal, with editing and history; Ctrl-C empties the line."""
    from prompt_toolkit import PromptSession  # not needed for pipes

    session: PromptSession[str] = PromptSession()

    def read() -> str | None:
        while True:
            try:
                return session.prompt(PROMPT)
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None

    return read


def stream_writer(stream: TextIO) -> Write:
    """Text as it is, at once."""

    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    return write


def terminal_writer(stream: TextIO) -> Write:
    """Text without the control characters that a model could steer a terminal with."""
    write = stream_writer(stream)
    return lambda text: write(harmless(text))


def harmless(text: str) -> str:
    """The text with control characters as U+FFFD, but for line feeds and tabs."""
    return "".join(c if c in "\n\t" or not (c < " " or "\x7f" <= c <= "\x9f") else "\ufffd" for c in text)
