"""The executor without its processes gives what a model gives by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model_executor.tools.observe import Observer, block_names
from model_executor.tools.offline import Offline, OfflineOptions
from tests.model_executor.engine import load
from tests.model_executor.tools.folders import write_model

PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], list(range(40)), [9, 8, 7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gemma") / "model", "gemma3_text")


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    loaded, tokens = load(folder), list(prompt)
    for _ in range(count):
        tokens.append(int(loaded.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("sequences", "chunk"), [(4, 5), (1, 64), (3, 16)])
def test_answers_do_not_depend_on_the_batch(folder: Path, sequences: int, chunk: int) -> None:
    offline = Offline(OfflineOptions(folder, length=50, sequences=sequences, threads=1))
    jobs = offline.generate(PROMPTS, 6, chunk)
    assert [job.token_ids for job in jobs] == [greedy(folder, prompt, 6) for prompt in PROMPTS]
    for job in jobs:
        assert [each.top_ids[0] for each in job.logprobs] == job.token_ids


def test_a_known_sequence_passes_in_order(folder: Path) -> None:
    offline = Offline(OfflineOptions(folder, layers="2,3", length=50, sequences=1, threads=1))
    model, plan = offline.executor.model, offline.executor.plan
    tokens = list(range(45))
    with Observer(list(model.blocks), model.norm, block_names(plan.sources, plan.classes)) as seen:
        offline.force(tokens, 30, 7)
        values = seen.take()
    assert all(value.shape[0] == 45 for value in values.values())
    with torch.inference_mode():
        logits = model.logits(values["final norm"])
    expected = load(folder, [2, 3]).logits(tokens)
    assert float((logits - torch.from_numpy(expected)).abs().max()) < 1e-4


def test_identity_and_environment(folder: Path) -> None:
    offline = Offline(OfflineOptions(folder, layers="2,3", sample_vocab=50, sequences=1, threads=1))
    identity = offline.identity
    assert (identity.layer_map, identity.blocks, identity.dtype, identity.sample_vocab) == ([2, 3], 6, "float32", 50)
    assert identity.classes == [offline.spec.layers[source].class_name for source in (2, 3)]
    assert identity.revision == offline.executor.ready.load.revision
    assert (offline.environment.device, offline.environment.threads) == ("cpu", 1)
