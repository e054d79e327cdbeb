"""The registry of kernels, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from engine_core.wire.reports import KernelCandidate, KernelChoice
from model_executor.attention import torch_ref, torch_sdpa
from model_executor.attention.spec import AppendKernel, AttentionKernel, AttentionProblem, KernelSpec
from model_executor.errors import NoKernel
from model_executor.layers.attention import KernelChooser, LayerKernels
from model_executor.models.spec import AttentionSpec

K = TypeVar("K")

# In order of preference; the reference takes everything and stands last.
ATTENTION: tuple[KernelSpec[AttentionKernel], ...] = (torch_sdpa.SPEC, torch_ref.SPEC)
KV_APPEND: tuple[KernelSpec[AppendKernel], ...] = (torch_ref.APPEND_SPEC,)


class KernelTable:
    """Chooses one kernel for each operator and problem, once, and remembers why.

    Args:
        attention: candidates for "attention", the preferred first.
        kv_append: candidates for "kv_append".
    """

    def __init__(
        self,
        attention: Sequence[KernelSpec[AttentionKernel]] = ATTENTION,
        kv_append: Sequence[KernelSpec[AppendKernel]] = KV_APPEND,
    ) -> None:
        self._attention = attention
        self._kv_append = kv_append
        self._attention_kernels: dict[AttentionProblem, AttentionKernel] = {}
        self._append_kernels: dict[AttentionProblem, AppendKernel] = {}
        self._choices: list[KernelChoice] = []

    def attention(self, problem: AttentionProblem) -> AttentionKernel:
        """The kernel for a problem; layers of equal problems share it.

        Raises:
            NoKernel: every candidate refuses.
        """
        return self._choose("attention", problem, self._attention, self._attention_kernels)

    def kv_append(self, problem: AttentionProblem) -> AppendKernel:
        """The kernel that writes keys and values for a problem.

        Raises:
            NoKernel: every candidate refuses.
        """
        return self._choose("kv_append", problem, self._kv_append, self._append_kernels)

    def explain(self) -> list[KernelChoice]:
        """Each choice made so far, with the reasons against the other candidates, in the order of choosing."""
        return list(self._choices)

    def _choose(
        self, operator: str, problem: AttentionProblem, specs: Sequence[KernelSpec[K]], made: dict[AttentionProblem, K]
    ) -> K:
        if problem in made:
            return made[problem]
        candidates = [KernelCandidate(spec.name, list(spec.reject(problem))) for spec in specs]
        for spec, candidate in zip(specs, candidates, strict=True):
            if not candidate.reasons:
                made[problem] = spec.factory(problem)
                self._choices.append(KernelChoice(operator, str(problem), spec.name, candidates))
                return made[problem]
        raise NoKernel(operator, str(problem), {c.name: c.reasons for c in candidates})


def chooser(table: KernelTable, dtype: torch.dtype, device: torch.device, block_size: int) -> KernelChooser:
    """What the layers of a model ask for their kernels.

    Args:
        table: where the choices are made and remembered.
        dtype: of activations and cache.
        device: that the model runs on.
        block_size: tokens a KV block.
    """

    def choose(spec: AttentionSpec) -> LayerKernels:
        problem = AttentionProblem(
            device=device.type,
            dtype=dtype,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=block_size,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
        )
        return LayerKernels(attention=table.attention(problem), kv_append=table.kv_append(problem))

    return choose
