"""Messages between a client (the HTTP frontend, a Python program) and the engine core.

A client opens with Hello and gets a Welcome; when the executor is up it gets a Ready. It then sends Submit and Abort
and receives Outputs and Rejected. A request id is the client's own: ids of two clients never meet. Every request that
was submitted ends in exactly one of: an Output with `finish` set, a Rejected, or a Fatal that ends all. When a core is
lost without a final Fatal, the client submits what is open to its successor, with the tokens received so far.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from engine_core.wire.reports import KernelChoice, LoadReport, Phase
from engine_core.wire.sampling import SamplingParams

PROTOCOL = 1

MAX_REQUEST_ID = 128
RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID)]
FinishReason = Literal["stop", "length", "abort", "error"]
EngineState = Literal["loading", "ready", "recovering", "draining", "stalled", "dead"]
FatalCode = Literal["start_refused", "executor_died", "stalled", "internal", "protocol", "shutdown"]
RejectCode = Literal["invalid", "context_length", "never_fits", "duplicate_id", "queue_full", "not_ready", "draining"]


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """First message of a client.

    Attributes:
        protocol: the version the client speaks.
        name: who it is, for the log ("http", "python").
    """

    protocol: int
    name: Annotated[str, Meta(max_length=64)]


class Submit(Struct, frozen=True, array_like=True, tag="submit"):
    """A request, in full.

    Attributes:
        request_id: unique among this client's live requests.
        prompt: token ids as packed little-endian int32.
        params: sampling and stopping.
        priority: smaller is more urgent.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        output: tokens that an earlier incarnation of the core already produced, packed as the prompt is;
            they count against max_tokens and are not sent again.
        resumed: an earlier incarnation of the core had taken it: no queue is too full for it, and a drain takes it.
        earlier: where its seconds went before this submission; None: it is new.
    """

    request_id: RequestId
    prompt: bytes
    params: SamplingParams
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    output: bytes = b""
    resumed: bool = False
    earlier: RequestTimes | None = None


class Abort(Struct, frozen=True, array_like=True, tag="abort"):
    """End these requests; unknown ids are ignored, so that an abort may cross an end.

    An aborted request gets a last Output with finish "abort", unless its end is already on the way.
    """

    request_ids: list[RequestId]


class Ping(Struct, frozen=True, array_like=True, tag="ping"):
    """Asks for a Status and shows that the client lives.

    A client that sends nothing for CLIENT_SILENCE_S is taken for gone: its requests are aborted.
    """

    seq: int


class Bye(Struct, frozen=True, array_like=True, tag="bye"):
    """The client leaves: its requests are aborted."""


class Drain(Struct, frozen=True, array_like=True, tag="drain"):
    """Only from the frontend that owns the core: take nothing new; running requests go on."""


CLIENT_PING_S = 0.5
CLIENT_SILENCE_S = 10.0


class Model(Struct, frozen=True):
    """What a client must know of the model that is served.

    Attributes:
        path: the model folder.
        max_model_len: tokens of prompt and output together.
        vocab_size: ids at or above are refused.
        eos_token_ids: ids that end a sequence.
        dtype: of the weights as computed with; kv_cache_dtype: of keys and values.
        num_kv_blocks, block_size: size of the KV pool, in blocks and in tokens a block.
        quantization: of the products.
    """

    path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    kv_cache_dtype: str
    num_kv_blocks: int
    block_size: int
    quantization: str = "none"


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    """Answer to Hello.

    Attributes:
        protocol: the version the core speaks; another one than the client's ends the talk.
        config_hash: of the configuration the core runs.
        state: of the engine now.
        model_path: the model folder, so that a client can load the tokenizer.
        owner_pid: the process that would start another core; 0: none.
        step_timeout: seconds of silence that are no death yet.
    """

    protocol: int
    config_hash: str
    state: EngineState
    model_path: str
    owner_pid: int = 0
    step_timeout: float = 0.0


class Progress(Struct, frozen=True, array_like=True, tag="progress"):
    """How far a phase of the start is; done == total ends it. A total of 0 means that the size is not known."""

    phase: Phase
    done: int
    total: int
    unit: Literal["bytes", "steps"] = "steps"


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """The engine takes requests; fields as of executor.ExecutorReady."""

    model: Model
    load: LoadReport
    kernels: list[KernelChoice]
    startup_s: dict[Phase, float]
    epoch: int
    graphs: KernelChoice | None = None


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities at one generated position.

    Attributes:
        logprob: of the token that was chosen.
        top_ids: the likeliest tokens, best first.
        top_logprobs: theirs.
    """

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class RequestTimes(Struct, frozen=True, array_like=True):
    """Seconds a request spent, measured by the core; sent with its first token and with its end.

    A lost core does not end the count: seconds without a token count as queued, those after the first token as decode.

    Attributes:
        queued: from arrival to the first step that held it.
        prefill: from there to the first token.
        decode: from the first token to the last.
        preemptions: how often it lost its blocks, as far as known.
    """

    queued: float
    prefill: float
    decode: float
    preemptions: int


class Output(Struct, frozen=True, array_like=True):
    """What one step gave one request.

    Attributes:
        request_id: as submitted.
        token_ids: new tokens, in order; the token that stopped the request is among them.
        finish: set on the last Output of a request.
        stop_token_id: which end-of-sequence or stop token ended it.
        logprobs: one per new token, if asked for.
        cached_tokens: prompt tokens that came out of the prefix cache; on the first Output with tokens and on the last.
        times: on the first Output with tokens and on the last.
        error: with finish "error": one line.
    """

    request_id: str
    token_ids: list[int]
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0
    times: RequestTimes | None = None
    error: str | None = None


class Outputs(Struct, frozen=True, array_like=True, tag="outputs"):
    """All that one step gave this client's requests."""

    step: int
    items: list[Output]


class Rejected(Struct, frozen=True, array_like=True, tag="rejected"):
    """A submission that was not taken.

    Attributes:
        request_id: as submitted.
        code: machine-readable reason.
        message: one line naming field, limit and value.
        field: the field at fault.
        limit, given: the numbers.
        retry_after_s: with "queue_full": when to come back.
    """

    request_id: str
    code: RejectCode
    message: str
    field: str | None = None
    limit: int | None = None
    given: int | None = None
    retry_after_s: float | None = None


class Status(Struct, frozen=True, array_like=True, tag="status"):
    """Answer to Ping: gauges now and counters since the core started.

    Attributes:
        seq: of the Ping.
        state: of the engine; reason: why, when not ready.
        epoch: incarnation of the executor; executor_pid: its process.
        running, waiting: requests; waiting_by_reason: capacity (no blocks or rows), deferred (budget spent elsewhere).
        oldest_wait_s: age of the longest waiting request.
        kv_blocks_total, kv_blocks_used: the pool; used is what live requests hold.
        steps: finished steps; step_age_s: seconds since the last progress while work exists, else 0.
        step_time_s: running sum of step times; step_tokens: running sum of scheduled tokens.
        step_time_buckets, step_token_buckets: histogram counts since start over STEP_TIME_BOUNDS and STEP_TOKEN_BOUNDS
            (one count more than bounds: the last holds what lies above).
        finished: requests ended, by reason.
        rejected: submissions refused, by code.
        malformed_frames, stale_results: frames dropped.
        prompt_tokens, cached_tokens, generation_tokens, preemptions: counters.
        prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache, and found.
        executor_restarts: executors that took the place of a lost one and became ready.
        recovered: requests computed again because of that, each counted each time.
        recovery_s: seconds from the latest loss to its replacement's readiness; recovery_total_s: the sum of all.
    """

    seq: int
    state: EngineState
    reason: str = ""
    epoch: int = 0
    executor_pid: int = 0
    running: int = 0
    waiting: int = 0
    waiting_by_reason: dict[str, int] = {}
    oldest_wait_s: float = 0.0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    steps: int = 0
    step_age_s: float = 0.0
    step_time_s: float = 0.0
    step_tokens: int = 0
    step_time_buckets: list[int] = []
    step_token_buckets: list[int] = []
    finished: dict[str, int] = {}
    rejected: dict[str, int] = {}
    malformed_frames: int = 0
    stale_results: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    executor_restarts: int = 0
    recovered: int = 0
    recovery_s: float = 0.0
    recovery_total_s: float = 0.0


STEP_TIME_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STEP_TOKEN_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Inspect(Struct, frozen=True, array_like=True, tag="inspect"):
    """Asks the core to check its invariants now; answered by Inspection."""

    seq: int


class Inspection(Struct, frozen=True, array_like=True, tag="inspection"):
    """The ledger of KV blocks and the violated invariants, none when all is well.

    free + cached + owned == total. cached: blocks nobody holds whose content can be found by prefix.
    """

    seq: int
    free: int
    cached: int
    owned: int
    total: int
    violations: list[str]


class Fatal(Struct, frozen=True, array_like=True, tag="fatal"):
    """The core ends, or has forgotten this client.

    Attributes:
        code: why; "start_refused": model or configuration cannot be honoured.
        message: one line for the operator.
        final: every request of the client is lost. Otherwise the client keeps them, says hello again (another core may
            come to the same socket), and submits them anew with the tokens it has.
    """

    code: FatalCode
    message: str
    final: bool = True


ClientToCore = Hello | Submit | Abort | Ping | Bye | Drain | Inspect
CoreToClient = Welcome | Progress | Ready | Outputs | Rejected | Status | Inspection | Fatal
