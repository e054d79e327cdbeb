"""`tercet bench serve`: a load through HTTP on any server with OpenAI's endpoints."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop
from msgspec import Struct
from tqdm import tqdm

from bench.answer import Answer
from bench.arrivals import Pace, starts
from bench.errors import LoadFailed, UsageError
from bench.http_client import HttpClient
from bench.load import Load, Send, run_load
from bench.options import add_output_flags, add_shape_flags, columns, command_line, deliver, settings, shape_of
from bench.prompts import Request, Shape, as_text, conversation_requests, digest, random_requests
from bench.record import make_record
from bench.result import (
    DEFINITIONS,
    METRICS,
    Wanted,
    figures,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    raw,
)
from bench.target import fetch, model_name, served
from frontend.proof.own_server import OwnServer
from frontend.tokenizer.base import Tokenizer
from frontend.tokenizer.load import load_tokenizer

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
NAME: Final = "--served-model-name"
# The warm-up's prompts must not be those of the run.
WARMUP_SEED: Final = 1_000_003
TITLES: Final = (
    *("max_concurrency", "completed", "failed", "duration", "output_throughput"),
    *("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "median_itl_ms", "p99_itl_ms", "client_cpu_us_per_token"),
)


class Endpoint(Struct, frozen=True):
    """Where requests go.

    Attributes:
        url, path: of the server, and below it.
        model: its name there.
        api_key: empty: none.
        deadline_s: for one answer.
        extra: further fields of every request.
    """

    url: str
    path: str
    model: str
    api_key: str = ""
    deadline_s: float = 600.0
    extra: dict[str, Any] = {}

    def body(self, request: Request) -> bytes:
        """The request as JSON; greedy, and with exactly as many tokens as it asks for."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.path.endswith("/chat/completions"):
            fields["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            fields["prompt"] = request.prompt
        return msgspec.json.encode(fields | self.extra)

    @contextlib.asynccontextmanager
    async def sender(self) -> AsyncIterator[Send]:
        """What sends one request and fills in its answer; connections are closed with the block."""
        client = HttpClient(self.url, self.path, self.api_key)

        async def send(request: Request, answer: Answer) -> None:
            await client.stream(self.body(request), answer, self.deadline_s)

        try:
            yield send
        finally:
            client.close()
            await asyncio.sleep(0)  # Closed transports leave the loop.


class Run(Struct, frozen=True):
    """One run on an endpoint.

    Attributes:
        requests: to be measured; warmup: sent before.
        pace: of arrivals; max_concurrency: most at once, None: no limit.
        seed: of the arrivals.
    """

    requests: Sequence[Request]
    warmup: Sequence[Request]
    pace: Pace
    max_concurrency: int | None
    seed: int

    def measure(self, endpoint: Endpoint) -> Load:
        """Send everything.

        Raises:
            LoadFailed: no request was answered.
        """
        load: Load = uvloop.run(self._measure(endpoint))
        if all(answer.error for answer in load.answers):
            raise LoadFailed(f"{endpoint.url}{endpoint.path}: all requests failed, the first: {load.answers[0].error}")
        return load

    async def _measure(self, endpoint: Endpoint) -> Load:
        async with endpoint.sender() as send:
            if self.warmup:
                await run_load(send, self.warmup, [0.0] * len(self.warmup), self.max_concurrency)
            due = starts(self.pace, len(self.requests), self.seed)
            with tqdm(total=len(self.requests), unit="request", file=sys.stderr, disable=None) as bar:
                return await run_load(send, self.requests, due, self.max_concurrency, lambda: _step(bar))


def _step(bar: tqdm[Any]) -> None:
    bar.update()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    target = parser.add_argument_group("target")
    target.add_argument("--base-url", metavar="URL", help="of a running server, such as http://127.0.0.1:8000")
    target.add_argument("--serve", metavar="ARGS", help="start `tercet serve ARGS` for the run instead")
    target.add_argument("--model", help="name in requests (default: the first that the server offers)")
    target.add_argument("--endpoint", choices=(COMPLETIONS, CHAT), default=COMPLETIONS)
    target.add_argument("--api-key", default="", help="sent as a bearer token")
    target.add_argument("--extra-body", metavar="JSON", default="{}", help="further fields of every request")
    target.add_argument("--deadline", metavar="S", type=float, default=600.0, help="seconds for one answer")
    data = parser.add_argument_group("requests")
    data.add_argument(
        "--num-prompts", metavar="N", type=int, help="requests of a run (default: 3 a client, 8 at least)"
    )
    data.add_argument("--dataset-path", metavar="FILE", type=Path, help="conversations in ShareGPT's JSON form")
    data.add_argument("--sharegpt-output-len", metavar="N", type=int, help="tokens of an answer (default: the file's)")
    data.add_argument(
        "--tokenizer",
        metavar="DIR",
        type=Path,
        help="model folder, to count tokens and make texts (default: of --serve)",
    )
    data.add_argument("--warmup", metavar="N", type=int, help="requests before the run (default: 2, or 1 for 1 client)")
    add_shape_flags(parser, Shape())
    _add_pace_flags(parser.add_argument_group("arrivals"))
    parser.add_argument("--percentile-metrics", default=",".join(METRICS), help="default: %(default)s")
    parser.add_argument("--metric-percentiles", default="90,99", help="default: %(default)s")
    parser.add_argument("--goodput", metavar="METRIC:MS", nargs="+", default=[], help="such as ttft:500 tpot:100")
    add_output_flags(parser)


def _add_pace_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        *("--max-concurrency",),
        metavar="N",
        type=int,
        nargs="+",
        help="requests at once; several numbers: a run for each",
    )
    group.add_argument("--request-rate", metavar="R", type=float, default=math.inf, help="a second (default: no pause)")
    group.add_argument("--burstiness", metavar="B", type=float, default=1.0, help="1: Poisson; below: bursts")
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"))
    group.add_argument("--ramp-up-start-rps", metavar="R", type=float, default=0.0)
    group.add_argument("--ramp-up-end-rps", metavar="R", type=float, default=0.0)


def run(args: argparse.Namespace) -> int:
    """Measure and deliver."""
    if (args.base_url is None) == (args.serve is None):
        raise UsageError("--base-url, --serve: give one of them")
    pace = Pace(args.request_rate, args.burstiness, args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    pace.check()
    wanted = Wanted(
        parse_metrics(args.percentile_metrics), parse_percentiles(args.metric_percentiles), parse_goodput(args.goodput)
    )
    tokenizer = _tokenizer(args)
    runs = [_run(args, pace, index, tokenizer) for index in range(len(args.max_concurrency or [None]))]
    with target(args) as endpoint:
        loads = [each.measure(endpoint) for each in runs]
        kernels = fetch(endpoint.url, "/reports/kernels")
    results = [_result(each, load, wanted, endpoint) for each, load in zip(runs, loads, strict=True)]
    record = make_record(
        "serve",
        command_line(args),
        results,
        raw=[raw(load) for load in loads],
        kernels=kernels,
        config=settings(args),
        seeds={"prompts and arrivals": args.seed},
        data={f"run {index}": digest(each.requests) for index, each in enumerate(runs)},
        definitions=DEFINITIONS,
    )
    deliver(args, record, TITLES, columns(results, TITLES))
    return 0


def own_server(words: str) -> OwnServer:
    """The server of --serve; unless told otherwise it calls the model by its folder's name, not by its path."""
    model, flags = served(words)
    return OwnServer(model, [*([] if NAME in flags else [NAME, model.name]), *flags])


def _tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    """The one that was given, else that of our own server's model where texts are needed."""
    folder = args.tokenizer
    if folder is None and args.serve is not None and (args.endpoint == CHAT or args.dataset_path is not None):
        folder = served(args.serve)[0]
    return None if folder is None else load_tokenizer(folder)


@contextlib.contextmanager
def target(args: argparse.Namespace) -> Iterator[Endpoint]:
    """The endpoint; a server that was started for it ends with the block."""
    try:
        extra = msgspec.json.decode(args.extra_body, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise UsageError(f"--extra-body: {error}") from error
    with contextlib.ExitStack() as stack:
        url = args.base_url
        if url is None:
            server = stack.enter_context(own_server(args.serve))
            server.wait_ready()
            url = server.url
        model = args.model or model_name(url)
        yield Endpoint(url.rstrip("/"), args.endpoint, model, args.api_key, args.deadline, extra)


def _run(args: argparse.Namespace, pace: Pace, index: int, tokenizer: Tokenizer | None) -> Run:
    clients = args.max_concurrency[index] if args.max_concurrency else None
    if clients is not None and clients < 1:
        raise UsageError(f"--max-concurrency: must be at least 1, is {clients}")
    count = args.num_prompts or max(8, 3 * (clients or 8))
    warm = (1 if clients == 1 else 2) if args.warmup is None else args.warmup
    # Runs of one command must not find each other's prompts in the prefix cache.
    seed = args.seed + 1000 * index
    return Run(
        requests=_requests(args, count, seed, tokenizer),
        warmup=_requests(args, warm, seed + WARMUP_SEED, tokenizer) if warm else [],
        pace=pace,
        max_concurrency=clients,
        seed=seed,
    )


def _requests(args: argparse.Namespace, count: int, seed: int, tokenizer: Tokenizer | None) -> list[Request]:
    if args.dataset_path is not None:
        return conversation_requests(args.dataset_path, count, seed, tokenizer, args.sharegpt_output_len)
    made = random_requests(shape_of(args), count, seed)
    if args.endpoint != CHAT:
        return made
    if tokenizer is None:
        raise UsageError(f"--endpoint {CHAT}: texts of an exact length need --tokenizer")
    return [as_text(request, tokenizer) for request in made]


def _result(run: Run, load: Load, wanted: Wanted, endpoint: Endpoint) -> dict[str, object]:
    rate = run.pace.request_rate
    found = figures(load, wanted)
    if not math.isfinite(rate) and run.pace.ramp is None:
        # Nothing says when a request of a closed loop is due.
        del found["p99_send_delay_ms"]
    return {
        "backend": "openai-chat" if endpoint.path == CHAT else "openai",
        "model_id": endpoint.model,
        "num_prompts": len(run.requests),
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": run.pace.burstiness,
        "max_concurrency": run.max_concurrency,
        **found,
    }
