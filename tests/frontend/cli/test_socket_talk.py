"""Talking to the engine core itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_core.wire.client import Rejected
from engine_core.wire.codec import unpack_ids
from engine_core.wire.sampling import SamplingParams
from frontend.cli.socket_talk import SocketTalk
from frontend.errors import TalkError
from tests.fakes.waiting import until
from tests.fixtures.bbpe import END_TURN, START
from tests.frontend.core_thread import CoreThread
from tests.frontend.tokenizer.folders import bbpe

USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def core(tmp_path: Path) -> Iterator[CoreThread]:
    """A running fake core. What follows the template's last line feed is the alphabet, from its start."""
    made = CoreThread(tmp_path)
    made.core.successors = [*made.core.successors]
    made.core.successors[ord("\n")] = ord("a")
    yield made
    made.stop()


def test_an_answer(core: CoreThread) -> None:
    talk = SocketTalk(core.core.path, SamplingParams(max_tokens=4))
    assert "".join(talk.answer([USER])) == "abcd"
    prompt = unpack_ids(core.core.submits[0].prompt).tolist()
    expected = f"{START}user\nHi{END_TURN}\n{START}assistant\n"
    assert bbpe().decode(prompt, skip_special=False) == expected
    talk.close()


def test_closing_the_iterator_cancels(core: CoreThread) -> None:
    talk = SocketTalk(core.core.path, SamplingParams(max_tokens=100_000))
    answer = talk.answer([USER])
    assert next(answer)
    assert hasattr(answer, "close")
    answer.close()
    until("the core aborted it", lambda: len(core.core.aborted) == 1)
    talk.close()


def test_refusals_are_told(core: CoreThread) -> None:
    talk = SocketTalk(core.core.path, SamplingParams())
    core.core.reject = lambda submit: Rejected(submit.request_id, "queue_full", "too many requests")
    with pytest.raises(TalkError, match="too many requests"):
        next(talk.answer([USER]))
    talk.close()


def test_a_model_without_a_template(tmp_path: Path) -> None:
    made = CoreThread(tmp_path, template=None)
    talk = SocketTalk(made.core.path, SamplingParams())
    with pytest.raises(TalkError, match="no chat template"):
        next(talk.answer([USER]))
    talk.close()
    made.stop()


def test_a_broken_folder(tmp_path: Path) -> None:
    made = CoreThread(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TalkError, match=r"tokenizer\.json"):
        SocketTalk(made.core.path, SamplingParams())
    made.stop()


def test_an_engine_that_ends(core: CoreThread) -> None:
    talk = SocketTalk(core.core.path, SamplingParams(max_tokens=100_000))
    answer = talk.answer([USER])
    next(answer)
    core.loop.call_soon_threadsafe(core.core.die, "executor_died", "killed by signal 9")
    with pytest.raises(TalkError, match="signal 9"):
        for _ in answer:
            pass
    talk.close()
