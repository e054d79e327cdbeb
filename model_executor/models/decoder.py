"""The decoder: one module for every family, built by walking the layers of a plan.

What tells families apart stands in their specs; a kind of attention or feed-forward part that is new gets an entry in
a table below. The decoder knows runtime layers only: it cannot tell whether the plan holds all blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from model_executor.layers.attention import GroupedAttention, KernelChooser
from model_executor.layers.embedding import Embedding, TiedHead
from model_executor.layers.linear import Linear
from model_executor.layers.mla import LatentAttention
from model_executor.layers.mlp import GatedMlp
from model_executor.layers.moe import Experts, MoeMlp
from model_executor.layers.rotary import Rotary, Rotation
from model_executor.models.spec import LayerSpec, ModelSpec, RopeSpec

if TYPE_CHECKING:
    from model_executor.batch import BatchInputs
    from model_executor.kv_cache import KVCache, LayerCache
    from model_executor.weights.layer_plan import LayerPlan


ATTENTION = {"grouped": GroupedAttention, "mla": LatentAttention}
MLP = {"gated": GatedMlp, "moe": MoeMlp}


class Block(nn.Module):
    """Norm, attention, sum; norm, feed-forward, sum.

    Args:
        spec: of the layer.
        hidden_size: width of the residual stream.
        choose: gives the kernels.
    """

    def __init__(self, spec: LayerSpec, hidden_size: int, choose: KernelChooser) -> None:
        super().__init__()
        self.attention_norm = choose.norm(spec.norm, hidden_size)
        self.attention = ATTENTION[spec.attention.kind](spec.attention, hidden_size, choose)
        self.mlp_norm = choose.norm(spec.norm, hidden_size)
        self.mlp = MLP[spec.mlp.kind](spec.mlp, hidden_size, choose)

    def forward(
        self, hidden: Tensor, added: Tensor | None, rotation: Rotation | None, cache: LayerCache, batch: BatchInputs
    ) -> Tensor:
        """What the block adds to the residual stream last. The norm after it makes the sum, in the same kernel.

        Args:
            hidden: the stream [T, hidden_size], to which `added` is still to be added; it becomes the stream between
                the block's two parts.
            added: [T, hidden_size]; None: nothing.
            rotation, cache, batch: of the attention.
        """
        attended = self.attention(self.attention_norm(hidden, added), rotation, cache, batch)
        out: Tensor = self.mlp(self.mlp_norm(hidden, attended))
        return out


class SandwichBlock(Block):
    """Norm, attention, norm, sum; norm, feed-forward, norm, sum.

    Args:
        spec, hidden_size, choose: as of Block.
    """

    def __init__(self, spec: LayerSpec, hidden_size: int, choose: KernelChooser) -> None:
        super().__init__(spec, hidden_size, choose)
        self.attention_out_norm = choose.norm(spec.norm, hidden_size)
        self.mlp_out_norm = choose.norm(spec.norm, hidden_size)

    def forward(
        self, hidden: Tensor, added: Tensor | None, rotation: Rotation | None, cache: LayerCache, batch: BatchInputs
    ) -> Tensor:
        """See Block."""
        attended = self.attention(self.attention_norm(hidden, added), rotation, cache, batch)
        made = self.mlp(self.mlp_norm(hidden, self.attention_out_norm(attended)))
        out: Tensor = self.mlp_out_norm(made)
        return out


class Decoder(nn.Module):
    """Embedding, blocks, final norm, head.

    Args:
        spec: of the model.
        layers: what runs, in runtime order.
        choose: gives the kernels, and says in which dtype and where the weights are.
    """

    def __init__(self, spec: ModelSpec, layers: tuple[LayerSpec, ...], choose: KernelChooser) -> None:
        super().__init__()
        dtype, device = choose.dtype, choose.device
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size, dtype, device, spec.embedding_scale)
        self.blocks = nn.ModuleList(_block(layer, spec.hidden_size, choose) for layer in layers)
        self.norm = choose.norm(spec.norm, spec.hidden_size)
        self.final_soft_cap = spec.final_soft_cap
        self.head: Linear | TiedHead = choose.linear(spec.hidden_size, spec.vocab_size, bias=False, exact=True)
        if spec.tie:
            self.head = TiedHead(self.embedding, self.head.kernel)
        ropes = tuple(dict.fromkeys(layer.attention.rope for layer in layers))
        self.rotaries = nn.ModuleList(_rotary(rope, spec.max_model_len, dtype, device) for rope in ropes)
        self.rotary_of_block = tuple(ropes.index(layer.attention.rope) for layer in layers)

    def forward(self, batch: BatchInputs, cache: KVCache) -> Tensor:
        """Run the batch's tokens through all blocks; their keys and values go into the cache.

        Returns:
            The normed hidden states [T, hidden_size], for `logits`.
        """
        hidden: Tensor = self.embedding(batch.token_ids)
        added: Tensor | None = None
        rotations = [None if isinstance(rotary, nn.Identity) else rotary(batch.positions) for rotary in self.rotaries]
        for index, block in enumerate(self.blocks):
            group = batch.of_group(cache.group_of[index])
            added = block(hidden, added, rotations[self.rotary_of_block[index]], cache.layers[index], group)
        normed: Tensor = self.norm(hidden, added)
        return normed

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return isinstance(self.head, TiedHead)

    @property
    def waits_for_device(self) -> bool:
        """Whether a step reads results on the host before it ends, so that no graph can hold it."""
        return any(isinstance(module, Experts) and module.kernel.reads_host for module in self.modules())

    def untie(self) -> None:
        """Give the head a weight of its own, still to be loaded."""
        table = self.embedding.weight
        self.head = Linear(
            table.shape[1],
            table.shape[0],
            bias=False,
            dtype=table.dtype,
            device=table.device,
            kernel=self.head.kernel,
        )

    def pack(self) -> None:
        """Give the loaded weights to the kernels that keep them in a form of their own."""
        for module in self.modules():
            if isinstance(module, Linear | TiedHead):
                module.pack()

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: [S, hidden_size] to float32 [S, vocab_size]."""
        scores: Tensor = self.head(hidden).float()
        if self.final_soft_cap is None:
            return scores
        return torch.tanh(scores / self.final_soft_cap) * self.final_soft_cap


def build_model(spec: ModelSpec, plan: LayerPlan, choose: KernelChooser) -> Decoder:
    """Build the decoder with room for its weights, which weights/load.py or weights/dummy.py fill.

    Args:
        spec: of the model.
        plan: the blocks to build.
        choose: gives the kernels, and says in which dtype and where the weights are.
    """
    return Decoder(spec, plan.layers(spec), choose).eval()


def _block(spec: LayerSpec, hidden_size: int, choose: KernelChooser) -> Block:
    return (SandwichBlock if spec.sandwich else Block)(spec, hidden_size, choose)


def _rotary(rope: RopeSpec | None, length: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    return nn.Identity() if rope is None else Rotary(rope, length, dtype, device)
