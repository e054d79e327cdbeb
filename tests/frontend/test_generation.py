"""One answer: its outputs merged and bounded, its text in deltas."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.wire.client import Output, RequestTimes, Submit, TokenLogprobs
from engine_core.wire.codec import pack_ids
from engine_core.wire.sampling import SamplingParams
from frontend.errors import BacklogExceeded, EngineDead, GenerationFailed
from frontend.generation import Delta, Generation, Stream, TextGeneration
from tests.fixtures.bbpe import END, SPECIALS, TOOL
from tests.frontend.tokenizer.folders import bbpe

TIMES = RequestTimes(0.1, 0.2, 0.3, 0)


class Opened:
    """A stream without a client; `aborted` holds the ids that were aborted."""

    def __init__(self, *, max_backlog_bytes: int = 1_000_000, output: bytes = b"") -> None:
        self.aborted: list[str] = []
        submit = Submit("r", pack_ids([1, 2]), SamplingParams(), output=output)
        self.stream = Stream(submit, asyncio.get_running_loop(), max_backlog_bytes, self.aborted.append)
        self.generation = Generation(self.stream)

    def feed(self, *token_ids: int, **fields: Any) -> None:
        """An Output with these tokens."""
        self.stream.feed(Output("r", list(token_ids), **fields))


def scenario(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test whose body is a coroutine."""

    def test() -> None:
        asyncio.run(asyncio.wait_for(work(), 20))

    test.__name__ = work.__name__
    return test


@scenario
async def test_outputs_that_wait_come_as_one() -> None:
    opened = Opened()
    opened.feed(1, cached_tokens=5, logprobs=[TokenLogprobs(-1.0, [], [])])
    opened.feed(2, 3, logprobs=[TokenLogprobs(-2.0, [], []), TokenLogprobs(-3.0, [], [])])
    first = await anext(opened.generation)
    assert (first.token_ids, first.cached_tokens, first.finish) == ([1, 2, 3], 5, None)
    assert [entry.logprob for entry in first.logprobs or ()] == [-1.0, -2.0, -3.0]
    opened.feed(4, finish="length", times=TIMES)
    assert await anext(opened.generation) == Output("r", [4], finish="length", times=TIMES)
    with pytest.raises(StopAsyncIteration):
        await anext(opened.generation)
    assert opened.aborted == []


@scenario
async def test_a_cancelled_read_loses_nothing() -> None:
    opened = Opened()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(opened.generation), 0.001)
    reading = asyncio.create_task(opened.stream.next())
    await asyncio.sleep(0)
    opened.feed(1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert (await anext(opened.generation)).token_ids == [1]
    assert opened.aborted == []
    opened.generation.abort()


@scenario
async def test_abort_is_idempotent_and_gives_what_came() -> None:
    opened = Opened()
    opened.feed(1)
    opened.generation.abort()
    opened.generation.abort()
    opened.feed(2)
    last = await anext(opened.generation)
    assert (last.token_ids, last.finish) == ([1], "abort")
    assert opened.aborted == ["r"]
    assert opened.stream.ended


@scenario
async def test_abort_after_the_end_does_nothing() -> None:
    opened = Opened()
    opened.feed(1, finish="stop")
    opened.generation.abort()
    assert opened.aborted == []
    assert (await anext(opened.generation)).finish == "stop"


@scenario
async def test_leaving_aborts() -> None:
    one, two = Opened(), Opened()
    async with one.generation:
        pass
    await two.generation.aclose()
    assert one.aborted == two.aborted == ["r"]


@scenario
async def test_dropping_the_last_reference_aborts() -> None:
    opened = Opened()
    del opened.generation
    gc.collect()
    await asyncio.sleep(0)
    assert opened.aborted == ["r"]


@scenario
async def test_what_nobody_reads_is_bounded() -> None:
    opened = Opened(max_backlog_bytes=10_000)
    for _ in range(100):
        opened.feed(*range(10))
    assert opened.aborted == ["r"]
    with pytest.raises(BacklogExceeded, match="at most 10000") as caught:
        await anext(opened.generation)
    assert caught.value.limit == 10_000
    assert caught.value.given > 10_000


@scenario
async def test_what_is_read_is_not_counted() -> None:
    opened = Opened(max_backlog_bytes=10_000)
    for _ in range(100):
        opened.feed(*range(10))
        await anext(opened.generation)
    assert opened.aborted == []
    opened.generation.abort()


@scenario
async def test_failures_are_raised() -> None:
    opened = Opened()
    reading = asyncio.create_task(opened.stream.next())
    await asyncio.sleep(0)
    opened.stream.fail(EngineDead("gone", "stalled"))
    with pytest.raises(EngineDead, match="gone"):
        await reading
    with pytest.raises(EngineDead):
        await anext(opened.generation)
    given_up = Opened()
    given_up.feed(finish="error", error="poison")
    with pytest.raises(GenerationFailed, match="poison"):
        await anext(given_up.generation)


@scenario
async def test_a_request_can_be_resumed_with_the_tokens_that_came() -> None:
    opened = Opened()
    opened.feed(7, 8)
    await anext(opened.generation)
    opened.feed(9)
    resumed = opened.generation.resumed()
    assert resumed.request_id == "r"
    assert resumed.prompt == pack_ids([1, 2])
    assert resumed.output == pack_ids([7, 8, 9])
    opened.generation.abort()


@scenario
async def test_a_resumed_request_says_where_its_seconds_went() -> None:
    opened = Opened()
    await asyncio.sleep(0.02)
    waited = opened.generation.resumed().earlier
    assert waited is not None
    assert 0.02 <= waited.queued < 5
    assert (waited.prefill, waited.decode, waited.preemptions) == (0.0, 0.0, 0)
    opened.feed(7, times=TIMES)
    # Of a later core: it counts on from what it was told, and its first token is not the first.
    opened.feed(8, times=RequestTimes(9.0, 9.0, 9.0, 9))
    await asyncio.sleep(0.02)
    earlier = opened.generation.resumed().earlier
    assert earlier is not None
    assert (earlier.queued, earlier.prefill, earlier.preemptions) == (TIMES.queued, TIMES.prefill, TIMES.preemptions)
    assert 0.02 <= earlier.decode < 5
    opened.generation.abort()


def text_generation(opened: Opened, params: SamplingParams | None = None, **options: Any) -> TextGeneration:
    """The text of the stream, decoded as BBPE."""
    return TextGeneration(opened.generation, bbpe(), [1], params or SamplingParams(), **options)


async def deltas(answer: TextGeneration) -> list[Delta]:
    """All deltas."""
    return [delta async for delta in answer]


@scenario
async def test_deltas_of_a_plain_answer() -> None:
    opened = Opened()
    answer = text_generation(opened)
    opened.feed(*b"Hi")
    first = await anext(answer)
    assert (first.text, first.token_ids, first.offsets) == ("Hi", [*b"Hi"], [0, 1])
    assert (first.finish, first.completion_tokens, first.logprobs) == (None, 2, None)
    opened.feed(ord("!"))
    opened.feed(SPECIALS[END], finish="stop", stop_token_id=SPECIALS[END], times=TIMES, cached_tokens=3)
    (last,) = await deltas(answer)
    assert (last.text, last.token_ids, last.finish, last.stop_reason) == ("!", [ord("!"), SPECIALS[END]], "stop", None)
    assert (last.completion_tokens, last.cached_tokens, last.times) == (4, 3, TIMES)


@scenario
async def test_the_text_of_the_stop_token_is_no_part_of_the_answer() -> None:
    ends = SamplingParams(stop_token_ids=(ord("y"),))
    for include, text in ((False, "x"), (True, "xy")):
        opened = Opened()
        answer = text_generation(opened, ends, include_stop=include, skip_special=False)
        opened.feed(ord("x"), ord("y"), finish="stop", stop_token_id=ord("y"))
        (last,) = await deltas(answer)
        assert (last.text, last.stop_reason, last.completion_tokens) == (text, ord("y"), 2)


@scenario
async def test_special_tokens_are_left_out_or_spelled() -> None:
    for skip, text in ((True, "xy"), (False, f"x{TOOL}y")):
        opened = Opened()
        answer = text_generation(opened, skip_special=skip)
        opened.feed(ord("x"), SPECIALS[TOOL], ord("y"))
        opened.feed(SPECIALS[END], finish="stop", stop_token_id=SPECIALS[END])
        (last,) = await deltas(answer)
        assert (last.text, last.completion_tokens) == (text, 4)


@scenario
async def test_a_stop_string_ends_the_answer_and_aborts_the_request() -> None:
    opened = Opened()
    answer = text_generation(opened, SamplingParams(logprobs=0), stop=["lo w"])
    entries = [TokenLogprobs(-float(index), [], []) for index in range(11)]
    opened.feed(*b"hello world", logprobs=entries, cached_tokens=2)
    (last,) = await deltas(answer)
    assert (last.text, last.finish, last.stop_reason) == ("hel", "stop", "lo w")
    assert (last.token_ids, last.completion_tokens) == ([*b"hel"], 7)
    assert [entry.logprob for entry in last.logprobs or ()] == [0.0, -1.0, -2.0]
    assert opened.aborted == ["r"]


@scenario
async def test_a_stop_string_wins_over_a_length_that_comes_with_it() -> None:
    opened = Opened()
    answer = text_generation(opened, stop=["b"])
    opened.feed(*b"abc", finish="length")
    (last,) = await deltas(answer)
    assert (last.text, last.finish) == ("a", "stop")
    assert opened.aborted == []


@scenario
async def test_no_delta_is_empty_but_the_last() -> None:
    opened = Opened()
    answer = text_generation(opened, stop=["xyz"])
    for byte in b"\xe4\xbd\xa0xy":
        opened.feed(byte)
    opened.feed(finish="length")
    assert [(delta.text, delta.finish) for delta in await deltas(answer)] == [("\u4f60xy", "length")]
    other = Opened()
    other.feed(finish="length")
    assert [(delta.text, delta.finish) for delta in await deltas(text_generation(other))] == [("", "length")]


@scenario
async def test_an_aborted_answer_ends_with_what_came() -> None:
    opened = Opened()
    answer = text_generation(opened)
    opened.feed(*b"ab")
    answer.abort()
    assert [(delta.text, delta.finish) for delta in await deltas(answer)] == [("ab", "abort")]


@scenario
async def test_leaving_an_answer_aborts() -> None:
    opened = Opened()
    async with text_generation(opened) as answer:
        assert answer.request_id == "r"
    assert opened.aborted == ["r"]


async def answer_of(ids: list[int], cuts: list[int], stops: list[str], read_each: bool) -> tuple[Any, ...]:
    """What an answer comes to when its tokens come in these pieces."""
    opened = Opened()
    answer = text_generation(opened, SamplingParams(logprobs=0), stop=stops)
    found: list[Delta] = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        last = end == len(ids)
        entries = [TokenLogprobs(-float(token_id), [], []) for token_id in ids[start:end]]
        opened.feed(*ids[start:end], finish="length" if last else None, logprobs=entries)
        if last:
            break
        if read_each and not opened.stream.ended:
            try:
                found.append(await asyncio.wait_for(anext(answer), 0.0005))
            except (TimeoutError, StopAsyncIteration):
                continue
    found += await deltas(answer)
    assert all(delta.text for delta in found[:-1])
    assert sum(delta.finish is not None for delta in found) == 1
    for delta in found:
        assert [entry.logprob for entry in delta.logprobs or ()] == [-float(token_id) for token_id in delta.token_ids]
    last_delta = found[-1]
    token_ids = [token_id for delta in found for token_id in delta.token_ids]
    return (
        "".join(delta.text for delta in found),
        token_ids,
        last_delta.finish,
        last_delta.stop_reason,
        last_delta.completion_tokens,
    )


@given(
    ids=st.lists(st.integers(0, 310), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    stops=st.lists(st.text(alphabet="the \ufffd", min_size=1, max_size=2), max_size=2),
    read_each=st.booleans(),
)
def test_an_answer_does_not_depend_on_how_its_tokens_come(
    ids: list[int], cuts: list[int], stops: list[str], read_each: bool
) -> None:
    inside = sorted(cut for cut in cuts if cut < len(ids))
    whole = asyncio.run(answer_of(ids, [], stops, read_each=False))
    assert asyncio.run(answer_of(ids, inside, stops, read_each)) == whole
