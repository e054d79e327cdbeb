"""From a decoded body to what can be queued: sampling parameters, response options, prompts that fit.

Only what passed here is ever submitted. Policies: top_p 0 is greedy; max_completion_tokens wins over max_tokens; more
tokens than there is room for means the room; a completion makes 16 tokens by default and a chat answer all there is
room for; a negative seed is the seed with its sign bit cleared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from engine_core.wire.client import Model
from engine_core.wire.sampling import SamplingParams
from frontend.api.schema import ChatRequest, Common, CompletionRequest
from frontend.errors import ContextTooLong, InvalidRequest, ModelUnknown

T = TypeVar("T")

DEFAULT_COMPLETION_TOKENS: Final = 16
MAX_PROMPTS: Final = 1024
MAX_CHOICES: Final = 1024
MAX_STOP_BYTES: Final = 262_144
MAX_COUNT: Final = 2**31 - 1
SEED_MASK: Final = 2**63 - 1


@dataclass(frozen=True)
class Wishes:
    """What a request asks for beside its prompt.

    Attributes:
        params: sampling; max_tokens None means the room there is.
        n: answers for each prompt.
        stop: stop strings.
        include_stop: whether the stop string stays in the text.
        skip_special: whether special tokens are left out of the text.
        stream: server-sent events; include_usage: with a last chunk that counts tokens.
        token_ids: whether answers hold the ids of prompt and output.
        priority: smaller is more urgent.
        cache_salt: prefixes are shared only under the same salt.
    """

    params: SamplingParams
    n: int
    stop: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    stream: bool
    include_usage: bool
    token_ids: bool
    priority: int
    cache_salt: str | None


def completion_wishes(request: CompletionRequest) -> Wishes:
    """Wishes of a completion.

    Raises:
        InvalidRequest: two fields contradict each other, or a limit is passed.
    """
    limit = _max_tokens(request)
    return _wishes(request, DEFAULT_COMPLETION_TOKENS if limit is None else limit, request.logprobs)


def chat_wishes(request: ChatRequest) -> Wishes:
    """Wishes of a chat answer.

    Raises:
        InvalidRequest: two fields contradict each other, or a limit is passed.
    """
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs to be true", param="top_logprobs")
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message: cannot be true together with add_generation_prompt",
            param="continue_final_message",
        )
    return _wishes(request, _max_tokens(request), (request.top_logprobs or 0) if request.logprobs else None)


def _max_tokens(request: Common) -> int | None:
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens


def _wishes(request: Common, max_tokens: int | None, logprobs: int | None) -> Wishes:
    options = request.stream_options
    if options is not None and options.continuous_usage_stats:
        raise InvalidRequest("stream_options.continuous_usage_stats: is not supported", param="stream_options")
    stream = bool(request.stream)
    return Wishes(
        params=_params(request, max_tokens, logprobs),
        n=_default(request.n, 1),
        stop=_stop(request.stop),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special=_default(request.skip_special_tokens, True),
        stream=stream,
        include_usage=stream and options is not None and bool(options.include_usage),
        token_ids=bool(request.return_token_ids),
        priority=_default(request.priority, 0),
        cache_salt=request.cache_salt,
    )


def _default(value: T | None, default: T) -> T:
    return default if value is None else value


def _params(request: Common, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    if max_tokens is not None and (request.min_tokens or 0) > max_tokens:
        raise InvalidRequest(
            f"min_tokens: at most max_tokens ({max_tokens}), given {request.min_tokens}", param="min_tokens"
        )
    return SamplingParams(
        temperature=_default(request.temperature, 1.0),
        top_k=_default(request.top_k, 0),
        top_p=_default(request.top_p, 1.0),
        min_p=_default(request.min_p, 0.0),
        seed=None if request.seed is None else request.seed & SEED_MASK,
        max_tokens=None if max_tokens is None else min(max_tokens, MAX_COUNT),
        min_tokens=min(request.min_tokens or 0, MAX_COUNT),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
    )


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    size = sum(len(string.encode()) for string in strings)
    if size > MAX_STOP_BYTES:
        raise InvalidRequest(f"stop: at most {MAX_STOP_BYTES} bytes in all, given {size}", param="stop")
    return strings


def check_model(given: str | None, names: Sequence[str]) -> None:
    """Pass a model name that is served here, or none.

    Raises:
        ModelUnknown: it names another model.
    """
    if given is not None and given not in names:
        raise ModelUnknown(given, ", ".join(names))


def check_counts(prompts: int, n: int) -> None:
    """Pass a body whose number of answers is bounded.

    Raises:
        InvalidRequest: there are too many.
    """
    if prompts > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} prompts a request, given {prompts}", param="prompt")
    if prompts * n > MAX_CHOICES:
        raise InvalidRequest(
            f"n: at most {MAX_CHOICES} answers a request, given {prompts} prompts of {n} answers", param="n"
        )


def check_ids(wishes: Wishes, model: Model) -> None:
    """Pass stop token ids that the model has.

    Raises:
        InvalidRequest: one is outside the vocabulary.
    """
    worst = max(wishes.params.stop_token_ids, default=0)
    if worst >= model.vocab_size:
        raise InvalidRequest(f"stop_token_ids: ids are below {model.vocab_size}, given {worst}", param="stop_token_ids")


def check_prompt(ids: Sequence[int], model: Model, param: str) -> None:
    """Pass a prompt that holds a token, only tokens of the model, and leaves room for one more.

    Raises:
        InvalidRequest: it is empty or has an id outside the vocabulary.
        ContextTooLong: it leaves no room.
    """
    if not ids:
        raise InvalidRequest(f"{param}: at least 1 token, given 0", param=param)
    if len(ids) >= model.max_model_len:
        raise ContextTooLong(len(ids), model.max_model_len, param)
    worst = max(ids)
    if worst >= model.vocab_size or min(ids) < 0:
        bad = worst if worst >= model.vocab_size else min(ids)
        raise InvalidRequest(f"{param}: token ids are in 0 .. {model.vocab_size - 1}, given {bad}", param=param)


def fitted(params: SamplingParams, prompt_len: int, model: Model) -> SamplingParams:
    """The parameters with max_tokens, and min_tokens with it, cut to the room that the prompt leaves."""
    room = model.max_model_len - prompt_len
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    return msgspec.structs.replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit))


def nth(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of answer `index` of a prompt: the first keeps the seed, the others get seeds made from it."""
    if index == 0 or params.seed is None:
        return params
    digest = hashlib.blake2b(f"{params.seed}/{index}".encode(), digest_size=8).digest()
    return msgspec.structs.replace(params, seed=int.from_bytes(digest, "little") & SEED_MASK)
