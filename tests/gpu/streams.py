"""Token streams through the runner: overlap, graphs and chunks must not change them."""

from __future__ import annotations

import random
import time
from collections import deque

import numpy as np
import torch
from torch import Tensor

from engine_core.wire.executor import KvGroup, StepPlan, StepResult
from engine_core.wire.sampling import SamplingParams
from model_executor.batch import on_device
from model_executor.graph import DEFAULT_BUCKETS
from model_executor.runner import Launched, Runner
from model_executor.slots import SlotLimits, Slots
from tests.gpu.cases import relative_error
from tests.gpu.models import SMALL, Model, Sizes, batch_of, make, weights
from tests.gpu.report import Report
from tests.model_executor.driver import Driver, Job

BLOCKS = 900
# About a tenth of a second.
BUSY_CYCLES = 200_000_000
# Twelve layers: errors of one step grow through the cache of the next.
DEEP = Sizes(hidden=256, layers=12, heads=8, kv_heads=2, head_dim=64, intermediate=512, vocab=2048, max_len=1024)


def streams(report: Report, shard: int, shards: int) -> None:
    """All combinations give the streams of the plainest one, in float32, where near ties are rare."""
    sizes = SMALL if report.dry else DEEP
    model = make(sizes, BLOCKS, dtype=torch.float32, device=report.device)
    plain = _streams(model, sizes, graphs=False, depth=1, chunk=10**6, report=report)
    for graphs in (False, True):
        for depth in (1, 2):
            for chunk in (10**6, 64, 7):
                if (graphs, depth, chunk) == (False, 1, 10**6):
                    continue
                found = _streams(model, sizes, graphs=graphs, depth=depth, chunk=chunk, report=report)
                equal = sum(one == other for one, other in zip(found, plain, strict=True))
                name = f"graphs {graphs}, overlap {depth == 2}, chunks of {chunk}"
                report.check(name, equal == len(plain), f"{equal} of {len(plain)} streams equal")
    _check_chunks(report, sizes)
    _check_uploads(report)


def _streams(model: Model, sizes: Sizes, *, graphs: bool, depth: int, chunk: int, report: Report) -> list[list[int]]:
    device, size = report.device, model.cache.block_size
    draw = random.Random(1)
    jobs = [_job(index, sizes, draw, dry=report.dry) for index in range(4 if report.dry else 24)]
    limits = SlotLimits(len(jobs), sizes.max_len, size, model.cache.pools, sizes.vocab, sizes.vocab, ())
    runner = Runner(
        model.decoder,
        model.cache,
        Slots(limits, device),
        sample_vocab_size=sizes.vocab,
        max_num_batched_tokens=10**6,
        buckets=DEFAULT_BUCKETS if graphs else (),
    )
    out: deque[Launched] = deque()

    def send(plan: StepPlan) -> None:
        out.append(runner.launch(plan))

    def receive() -> StepResult:
        return runner.collect(out.popleft())

    driver = Driver(
        send, receive, groups=[KvGroup(None, model.cache.num_blocks)], block_size=size, chunk=chunk, depth=depth
    )
    driver.run(jobs)
    return [job.output for job in jobs]


def _job(index: int, sizes: Sizes, draw: random.Random, *, dry: bool) -> Job:
    prompt = [draw.randrange(sizes.vocab) for _ in range(draw.randrange(1, 40 if dry else 300))]
    # Of few candidates: over a whole vocabulary the rounding of a padded product moves a border under some draw.
    kinds = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=50),
        SamplingParams(temperature=1.0, top_k=20),
    )
    return Job(prompt, 6 if dry else 40, kinds[index % len(kinds)], seed=index, arrives=1 + index // 3)


@torch.inference_mode()
def _check_chunks(report: Report, sizes: Sizes) -> None:
    """Logits of one prompt in bfloat16 and float32 against float32 on the CPU, all with the same weights."""
    length = 40 if report.dry else 600
    exact = make(sizes, BLOCKS, dtype=torch.float32, device=torch.device("cpu"))
    expected = _last_logits(exact, sizes, length)
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        model = make(sizes, BLOCKS, dtype=dtype, device=report.device)
        mine = weights(model.decoder)
        for name, weight in weights(exact.decoder).items():
            mine[name].data.copy_(weight.data)
        error = relative_error(_last_logits(model, sizes, length).cpu(), expected)
        name = f"logits after {length} tokens in {str(dtype).removeprefix('torch.')}"
        report.check(name, error < bound, f"error {error:.1e} against float32 on CPU")


def _last_logits(model: Model, sizes: Sizes, length: int) -> Tensor:
    batch = batch_of(np.array([0, 0]), np.array([length, length // 2]), model.cache, sizes.vocab, seed=3)
    return model.step(batch)


def _check_uploads(report: Report) -> None:
    """What is uploaded behind a busy queue arrives whole, although the host writes its memory again at once."""
    sent = []
    if report.device.type == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    for number in range(50):
        array = np.full(5000, number, dtype=np.int64)
        sent.append(on_device(array, report.device).clone())
        array.fill(-1)
    taken = time.perf_counter() - began
    right = sum(bool((x == number).all()) for number, x in enumerate(sent))
    report.check("uploads behind a busy queue", right == len(sent), f"{right} of {len(sent)} right")
    report.note("uploads behind a busy queue", f"the host waited {taken * 1e3:.1f} ms for them")
