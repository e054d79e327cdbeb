"""From logits to tokens: who is greedy, who is banned from what, who draws, who wants log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_core.wire.client import TokenLogprobs
from model_executor import distribution, rng
from model_executor.batch import Ints, on_device
from model_executor.device import to_host
from model_executor.distribution import Floats


@dataclass(frozen=True)
class SampleRows:
    """How S rows are sampled, as host arrays.

    Attributes:
        greedy: [S] takes the likeliest token whatever the rest says.
        temperature: [S] above 0 where not greedy.
        top_k, top_p, min_p: [S] see SamplingParams.
        seeds: [S] 0 .. 2^63 - 1.
        positions: [S] index of the sampled token in prompt and output.
        logprobs: [S] how many likeliest tokens are reported; -1: no report.
        banned_rows, banned_ids: parallel; ids below the vocabulary's size that must not be sampled, and their rows.
    """

    greedy: npt.NDArray[np.bool_]
    temperature: Floats
    top_k: Ints
    top_p: Floats
    min_p: Floats
    seeds: Ints
    positions: Ints
    logprobs: Ints
    banned_rows: Ints
    banned_ids: Ints


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the rows that asked, on the device or, after `to_host`, on the host.

    Attributes:
        rows: which of the S rows, rising.
        counts: how many of the likeliest each of them wants.
        chosen: float32 [len(rows)], of the sampled token.
        top_ids, top_values: [len(rows), max(counts)], falling, equals by rising id.
    """

    rows: list[int]
    counts: list[int]
    chosen: Tensor
    top_ids: Tensor
    top_values: Tensor

    def to_host(self) -> Logprobs:
        """A copy on the host, complete once all work queued until now is done."""
        chosen, ids, values = (to_host(tensor) for tensor in (self.chosen, self.top_ids, self.top_values))
        return replace(self, chosen=chosen, top_ids=ids, top_values=values)

    def to_wire(self, size: int) -> list[TokenLogprobs | None]:
        """One entry for each of `size` rows, None where not asked for. Waits for what is on the device."""
        entries: list[TokenLogprobs | None] = [None] * size
        columns = (self.chosen.tolist(), self.top_ids.tolist(), self.top_values.tolist())
        for row, count, chosen, ids, values in zip(self.rows, self.counts, *columns, strict=True):
            entries[row] = TokenLogprobs(chosen, ids[:count], values[:count])
        return entries


def sample(logits: Tensor, rows: SampleRows, vocab_size: int) -> tuple[Tensor, Logprobs | None]:
    """Choose the next token of each row.

    Log-probabilities are the log-softmax of the raw logits over the ids below vocab_size: before bans, temperature and
    the rest. A row's outcome depends on its own logits and parameters only.

    Args:
        logits: float32 [S, V].
        rows: how.
        vocab_size: 1 .. V; ids from it on are never sampled.

    Returns:
        int64 [S] token ids, and the log-probabilities if any row asked.
    """
    if rows.greedy.all() and not len(rows.banned_rows) and (rows.logprobs < 0).all():
        return distribution.likeliest(logits[:, :vocab_size]), None
    raw = distribution.finite(logits[:, :vocab_size])
    allowed = _ban(raw, rows)
    if rows.greedy.all():
        tokens = distribution.greedy(allowed)
    elif not rows.greedy.any():
        tokens = _draw(allowed, rows, np.arange(len(rows.greedy)))
    else:
        tokens = distribution.greedy(allowed)
        picked = np.flatnonzero(~rows.greedy)
        where = on_device(picked, logits.device)
        tokens[where] = _draw(allowed[where], rows, picked)
    return tokens, _logprobs(raw, tokens, rows)


def _ban(logits: Tensor, rows: SampleRows) -> Tensor:
    if not len(rows.banned_rows):
        return logits
    index = (on_device(rows.banned_rows, logits.device), on_device(rows.banned_ids, logits.device))
    # Filled there: a number that is sent would be waited for.
    banned = logits.index_put(index, torch.full((), float("-inf"), device=logits.device))
    return distribution.finite(banned)


def _draw(logits: Tensor, rows: SampleRows, picked: Ints) -> Tensor:
    top_k, size = rows.top_k[picked], logits.shape[-1]
    x = distribution.temperature(logits, rows.temperature[picked])
    x = distribution.top_k(x, top_k)
    x = distribution.top_p(x, rows.top_p[picked], min(int(top_k.max()), size) if (top_k > 0).all() else None)
    x = distribution.min_p(x, rows.min_p[picked])
    uniform = rng.uniform(torch.from_numpy(rows.seeds[picked]), torch.from_numpy(rows.positions[picked]))
    return distribution.choose(distribution.softmax(x), on_device(uniform.numpy(), logits.device))


def _logprobs(logits: Tensor, tokens: Tensor, rows: SampleRows) -> Logprobs | None:
    asked = np.flatnonzero(rows.logprobs >= 0)
    if not len(asked):
        return None
    where = on_device(asked, logits.device)
    mine = logits[where]
    total = mine.logsumexp(-1, keepdim=True)
    counts = np.minimum(rows.logprobs[asked], logits.shape[-1])
    width = int(counts.max())
    if width:
        values, ids = distribution.largest(mine, width)
    else:
        values, ids = mine[:, :0], tokens[where, None][:, :0]
    chosen = mine.gather(-1, tokens[where, None])
    return Logprobs(
        rows=asked.tolist(),
        counts=counts.tolist(),
        chosen=_bounded(chosen - total)[:, 0],
        top_ids=ids,
        top_values=_bounded(values - total),
    )


def _bounded(logprobs: Tensor) -> Tensor:
    """No -inf: it has no form in JSON. Only a model with logits that are not finite comes here with one."""
    return logprobs.clamp(min=torch.finfo(logprobs.dtype).min, max=0.0)
