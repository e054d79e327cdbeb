"""One of each message, and the codec it travels by."""

from __future__ import annotations

from typing import Any

from engine_core.wire import client, codec, executor
from engine_core.wire.codec import Codec, pack_ids
from engine_core.wire.reports import KernelCandidate, KernelChoice, LoadReport, TensorRecord
from engine_core.wire.sampling import SamplingParams

CODECS: list[Codec[Any]] = [
    codec.client_to_core(),
    codec.core_to_client(),
    codec.core_to_executor(),
    codec.executor_to_core(),
]
CLIENT_TO_CORE, CORE_TO_CLIENT, CORE_TO_EXECUTOR, EXECUTOR_TO_CORE = CODECS

PARAMS = SamplingParams(
    temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=2**63 - 1, max_tokens=9, min_tokens=1, stop_token_ids=(7, 8)
)
LOGPROBS = client.TokenLogprobs(-0.5, [1, 2], [-0.5, -1.5])
OUTPUT = client.Output(
    "r1", [5], "stop", 5, [LOGPROBS], cached_tokens=16, times=client.RequestTimes(0.5, 1.5, 2.5, 1), error="why"
)
KERNELS = [
    KernelChoice("attention", "cpu", "sdpa", [KernelCandidate("triton", ["no cuda"]), KernelCandidate("sdpa", [])])
]
LOAD = LoadReport(
    model="m",
    revision="r",
    layer_map=[0, 2],
    tensors=[TensorRecord("w", "loaded", ["w"], "model.safetensors", 4, "bfloat16", "float32")],
    shards_opened=["model.safetensors"],
    shards_skipped=[],
    bytes_read=2,
    bytes_materialized=4,
    counts={"loaded": 1},
    page_cache=None,
    seconds={"plan": 0.5},
)
MODEL = client.Model("m", 128, 512, (1, 2), "float32", "float32", 64, 16)

MESSAGES: list[tuple[Codec[Any], Any]] = [
    (CLIENT_TO_CORE, client.Hello(1, "python")),
    (
        CLIENT_TO_CORE,
        client.Submit(
            *("r1", pack_ids([1, 2]), PARAMS, -5, "salt", pack_ids([3])),
            resumed=True,
            earlier=client.RequestTimes(0.5, 1.5, 2.5, 1),
        ),
    ),
    (CLIENT_TO_CORE, client.Abort(["r1", "r2"])),
    (CLIENT_TO_CORE, client.Ping(7)),
    (CLIENT_TO_CORE, client.Bye()),
    (CLIENT_TO_CORE, client.Drain()),
    (CLIENT_TO_CORE, client.Inspect(7)),
    (CORE_TO_CLIENT, client.Welcome(1, "0123456789abcdef", "loading", "m")),
    (CORE_TO_CLIENT, client.Progress("load", 5, 10, "bytes")),
    (CORE_TO_CLIENT, client.Ready(MODEL, LOAD, KERNELS, {"load": 1.5}, 1)),
    (CORE_TO_CLIENT, client.Outputs(3, [OUTPUT])),
    (CORE_TO_CLIENT, client.Rejected("r1", "context_length", "too long", "prompt", 128, 129, 0.5)),
    (CORE_TO_CLIENT, client.Status(7, "ready", "", 1, 2, 3, 4, {"capacity": 4}, 0.5, finished={"stop": 1})),
    (CORE_TO_CLIENT, client.Inspection(7, 1, 2, 3, 6, ["off by one"])),
    (CORE_TO_CLIENT, client.Fatal("executor_died", "executor (pid 1) ended: signal 9")),
    (
        CORE_TO_EXECUTOR,
        executor.StepPlan(
            1,
            2,
            [executor.SlotFill(0, pack_ids([1, 2]), 2, PARAMS, 11, [[4, 5]])],
            [executor.Row(0, 1, 1, [[6]], sample=True)],
        ),
    ),
    (CORE_TO_EXECUTOR, executor.Shutdown()),
    (EXECUTOR_TO_CORE, executor.ExecutorHello(1, "0123456789abcdef", 1, 99)),
    (EXECUTOR_TO_CORE, client.Progress("warm_up", 1, 2)),
    (
        EXECUTOR_TO_CORE,
        executor.ExecutorReady(
            1,
            128,
            512,
            "float32",
            "float32",
            "cpu",
            [executor.KvGroup(None, 64)],
            512,
            LOAD,
            KERNELS,
            {"load": 1.5},
            {"weights": 4},
        ),
    ),
    (EXECUTOR_TO_CORE, executor.StepResult(1, 2, [5], [LOGPROBS], 10, 20)),
    (EXECUTOR_TO_CORE, executor.StepResult(1, 2, [5, 6], [None, LOGPROBS], 10, 20)),
    (EXECUTOR_TO_CORE, executor.ExecutorFatal("refused", "dtype")),
]


def name_of(value: object) -> str:
    return type(value).__name__
