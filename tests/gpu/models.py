"""Models made from numbers alone, with weights drawn where they live."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_core.wire.reports import KernelChoice
from model_executor.attention.dispatch import Chooser, KernelTable
from model_executor.batch import BatchInputs, StepRows, build_index, to_inputs
from model_executor.graph import GraphRunner, GraphShape
from model_executor.kv_cache import KVCache, LayerShape
from model_executor.models.decoder import Decoder
from model_executor.models.spec import (
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
    RoutingSpec,
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model of the Llama family; with experts, of which a token takes two, of Mixtral's."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_len: int
    window: int | None = None
    experts: int = 0

    def spec(self) -> ModelSpec:
        """The model."""
        rope = RopeSpec(kind="default", theta=500000.0, rotary_dim=self.head_dim, reach=self.max_len)
        attention = AttentionSpec(
            self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, rope=rope, window=self.window
        )
        mlp, norm = MlpSpec(self.intermediate, "silu"), NormSpec(1e-5)
        if self.experts:
            routing = RoutingSpec(self.experts, top_k=2, score="softmax", normalize=True)
            mlp = MlpSpec(self.intermediate, "silu", kind="moe", moe=MoeSpec(routing))
        layers = tuple(LayerSpec(source, attention, mlp, norm) for source in range(self.layers))
        return ModelSpec(
            architecture="LlamaForCausalLM",
            hidden_size=self.hidden,
            vocab_size=self.vocab,
            max_model_len=self.max_len,
            tie=False,
            norm=norm,
            dtype=None,
            layers=layers,
        )


SMALL = Sizes(hidden=128, layers=3, heads=4, kv_heads=2, head_dim=32, intermediate=256, vocab=509, max_len=512)
LLAMA_8B = Sizes(
    hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256, max_len=8192
)


@dataclass
class Model:
    """A model that can take steps.

    Attributes:
        decoder, cache: of it.
        spec: of it.
        kernels: chosen for it, with the reasons against the others.
    """

    decoder: Decoder
    cache: KVCache
    spec: ModelSpec
    kernels: list[KernelChoice]

    def step(self, batch: BatchInputs) -> torch.Tensor:
        """Logits float32 [S, V]."""
        hidden: torch.Tensor = self.decoder(batch, self.cache)
        return self.decoder.logits(hidden[batch.sample_index])

    def graphs(self, buckets: tuple[int, ...], *, enabled: bool = True) -> GraphRunner:
        """A graph runner for these steps."""
        size = self.cache.block_size
        shape = GraphShape(buckets, -(-self.spec.max_model_len // size), size, self.cache.scratch_block)
        return GraphRunner(self.step, shape, self.cache[0].key.device, enabled=enabled)


def weights(decoder: Decoder) -> dict[str, Tensor]:
    """All weights by name, wherever a kernel keeps them."""
    packed = {name: tensor for name, tensor in decoder.named_buffers() if name.endswith(".packed")}
    return dict(decoder.named_parameters()) | {
        name.removesuffix("packed") + "weight": tensor for name, tensor in packed.items()
    }


def make(
    sizes: Sizes, blocks: int, *, dtype: torch.dtype, device: torch.device, block_size: int = 16, seed: int = 0
) -> Model:
    """A model with drawn weights, and a cache full of drawn keys and values.

    Linear maps keep the variance of what they are given, as dummy weights do.
    """
    spec = sizes.spec()
    table = KernelTable()
    decoder = Decoder(spec, spec.layers, Chooser(table, dtype, device, block_size)).eval()
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in decoder.parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1)
        else:
            # Weights lie (in, out), experts one behind the other; the embedding's rows are vectors of variance 1.
            fan_in = 1 if parameter is decoder.embedding.weight else parameter.shape[-2]
            bound = (3 / fan_in) ** 0.5
            parameter.data.uniform_(-bound, bound, generator=generator)
    decoder.pack()
    shapes = [LayerShape(sizes.kv_heads, sizes.head_dim)] * sizes.layers
    cache = KVCache.allocate(shapes, blocks, block_size, dtype, device)
    for layer in cache.layers:
        layer.key.normal_(generator=generator)
        layer.value.normal_(generator=generator)
    return Model(decoder, cache, spec, table.explain())


def decode_batch(
    contexts: list[int], cache: KVCache, vocab: int, seed: int, *, width: int | None = None
) -> BatchInputs:
    """One token each of sequences whose lengths, this token included, are `contexts`.

    Args:
        contexts: lengths; their blocks must fit into the cache together.
        cache: whose blocks are used, in shuffled order.
        vocab: ids to draw from.
        seed: of blocks and ids.
        width: rows that sample; None: all.
    """
    starts = np.array(contexts, dtype=np.int64) - 1
    return batch_of(starts, np.ones_like(starts), cache, vocab, seed, samples=width)


def batch_of(
    starts: np.ndarray, counts: np.ndarray, cache: KVCache, vocab: int, seed: int, *, samples: int | None = None
) -> BatchInputs:
    """A step over sequences with `starts` tokens in the cache and `counts` new ones; see decode_batch."""
    rng = np.random.default_rng(seed)
    size = cache.block_size
    needed = -(-(starts + counts) // size)
    ids = rng.permutation(cache.num_blocks)[: int(needed.sum())]
    assert len(ids) == needed.sum()
    blocks = np.full((len(starts), int(needed.max())), cache.scratch_block, dtype=np.int32)
    for row, part in enumerate(np.split(ids, np.cumsum(needed)[:-1])):
        blocks[row, : len(part)] = part
    sampled = np.arange(len(starts)) < (len(starts) if samples is None else samples)
    index = build_index(StepRows(np.arange(len(starts)), starts, counts, sampled), blocks, size)
    tokens = torch.from_numpy(rng.integers(0, vocab, int(counts.sum())))
    return to_inputs(index, tokens.to(cache[0].key.device))
