"""Randomness and sampling on the device against the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from model_executor import distribution, rng
from model_executor.sampler import SampleRows, sample
from tests.gpu.report import Report

# Devices sum in other orders: of so many rows at most this share may fall on the other side of a border.
MOVED = 1e-3


@torch.inference_mode()
def sampling(report: Report, shard: int, shards: int) -> None:
    """Equal numbers, equal tokens."""
    _check_random(report)
    _check_ties(report)
    rows, vocab = (64, 300) if report.dry else (1024, 32000)
    logits = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(0)) * 3
    for name, made in (("greedy", _rows(rows, greedy=1.0)), ("drawn", _rows(rows, greedy=0.0))):
        here, _ = sample(logits, made, vocab)
        there, _ = sample(logits.to(report.device), made, vocab)
        moved = int((there.cpu() != here).sum())
        allowed = 0 if name == "greedy" else int(rows * MOVED)
        report.check(f"{name} tokens of {rows} rows", moved <= allowed, f"{moved} differ from the CPU's")
    _check_alone(report, logits, vocab)
    _check_broken(report, logits[:64].clone(), vocab)
    _check_waiting(report, logits[:64].to(report.device), vocab)


def _check_waiting(report: Report, logits: torch.Tensor, vocab: int) -> None:
    """Greedy rows, drawn ones of few candidates and log-probabilities are found without a word to the host."""
    drawn = replace(_rows(len(logits), greedy=0.3), top_k=np.full(len(logits), 40))
    told = replace(drawn, logprobs=np.full(len(logits), 5))
    greedy = _rows(len(logits), greedy=1.0)
    for name, made in (("greedy", greedy), ("few candidates", drawn), ("log-probabilities", told)):
        sample(logits, made, vocab)
        fault = None
        if report.device.type == "cuda":
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                sample(logits, made, vocab)
            except RuntimeError as error:
                fault = str(error).splitlines()[0]
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        report.check(f"{name}: nothing waits for the device", fault is None, fault or "as it should be")


def _check_broken(report: Report, logits: torch.Tensor, vocab: int) -> None:
    """What is not finite leads to the same tokens as on the CPU."""
    logits[::5] = float("-inf")
    logits[1::5, ::3] = float("nan")
    logits[2::5, 7] = float("inf")
    logits[3::5] = float("nan")
    made = _rows(len(logits), greedy=1.0)
    here, there = (sample(each, made, vocab)[0].cpu() for each in (logits, logits.to(report.device)))
    wrong = int((here != there).sum())
    report.check("greedy tokens of broken rows", wrong == 0, f"{wrong} of {len(logits)} differ from the CPU's")


def _check_random(report: Report) -> None:
    generator = torch.Generator().manual_seed(1)
    seeds, positions = (torch.randint(0, 2**63 - 1, (100_000,), generator=generator) for _ in range(2))
    here = rng.uniform(seeds, positions)
    there = rng.uniform(seeds.to(report.device), positions.to(report.device))
    same = torch.equal(here, there.cpu())
    report.check("100,000 random numbers", same, f"equal {same}")


def _check_ties(report: Report) -> None:
    """Of equal logits the lowest id wins on every device."""
    logits = torch.randint(0, 3, (512, 5000), generator=torch.Generator().manual_seed(2)).float()
    lowest = torch.tensor([row.index(2.0) for row in logits.tolist()])
    wrong = int((distribution.greedy(logits.to(report.device)).cpu() != lowest).sum())
    report.check("the lowest id of equals", wrong == 0, f"{wrong} of 512 rows wrong")


def _check_alone(report: Report, logits: torch.Tensor, vocab: int) -> None:
    """A row's token does not depend on the rows beside it."""
    device = report.device
    made = _rows(len(logits), greedy=0.3)
    together, _ = sample(logits.to(device), made, vocab)
    picked = list(range(0, len(logits), max(len(logits) // 16, 1)))
    alone = [sample(logits[row : row + 1].to(device), _part(made, row), vocab)[0].item() for row in picked]
    moved = sum(token != together[row].item() for row, token in zip(picked, alone, strict=True))
    report.check("rows alone and together", moved == 0, f"{moved} of {len(picked)} differ")


def _rows(count: int, greedy: float) -> SampleRows:
    generator = np.random.default_rng(3)
    return SampleRows(
        greedy=generator.random(count) < greedy,
        temperature=generator.uniform(0.3, 1.5, count),
        top_k=generator.choice([0, 1, 5, 40], count),
        top_p=generator.choice([0.3, 0.9, 1.0], count),
        min_p=generator.choice([0.0, 0.1], count),
        seeds=generator.integers(0, 2**63 - 1, count),
        positions=generator.integers(0, 1000, count),
        logprobs=np.full(count, -1),
        banned_rows=np.arange(0),
        banned_ids=np.arange(0),
    )


def _part(rows: SampleRows, row: int) -> SampleRows:
    cut = slice(row, row + 1)
    return SampleRows(
        greedy=rows.greedy[cut],
        temperature=rows.temperature[cut],
        top_k=rows.top_k[cut],
        top_p=rows.top_p[cut],
        min_p=rows.min_p[cut],
        seeds=rows.seeds[cut],
        positions=rows.positions[cut],
        logprobs=rows.logprobs[cut],
        banned_rows=rows.banned_rows,
        banned_ids=rows.banned_ids,
    )
