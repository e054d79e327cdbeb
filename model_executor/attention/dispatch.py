"""The registry of kernels, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from engine_core.wire.reports import KernelCandidate, KernelChoice
from model_executor.attention import mla, mla_absorbed, torch_matmul, torch_ref, torch_sdpa, triton_append, triton_paged
from model_executor.attention.mla import LatentAppendKernel, LatentKernels, MlaKernel, MlaProblem, MlaSpec
from model_executor.attention.spec import AppendKernel, AttentionKernel, AttentionProblem, KernelSpec
from model_executor.errors import NoKernel
from model_executor.layers.attention import LayerKernels
from model_executor.layers.experts import GROUPED_SPEC, LOOP_SPEC, ExpertsKernel, ExpertsProblem, ExpertsSpec
from model_executor.models.spec import AttentionSpec, MlpSpec

K = TypeVar("K")
P = TypeVar("P")
ProblemT = TypeVar("ProblemT", contravariant=True)
KernelT = TypeVar("KernelT", covariant=True)

# In order of preference; the reference takes everything and stands last.
ATTENTION: tuple[KernelSpec[AttentionKernel], ...] = (
    triton_paged.SPEC,
    torch_sdpa.SPEC,
    torch_matmul.SPEC,
    torch_ref.SPEC,
)
KV_APPEND: tuple[KernelSpec[AppendKernel], ...] = (triton_append.SPEC, torch_ref.APPEND_SPEC)
MLA_ATTENTION: tuple[MlaSpec[MlaKernel], ...] = (mla_absorbed.SPEC, mla.SPEC)
LATENT_APPEND: tuple[MlaSpec[LatentAppendKernel], ...] = (mla.APPEND_SPEC,)
EXPERTS: tuple[ExpertsSpec, ...] = (GROUPED_SPEC, LOOP_SPEC)


class Candidate(Protocol[ProblemT, KernelT]):
    """What every kind of kernel spec offers the choice."""

    @property
    def name(self) -> str:
        """In reports."""
        ...

    @property
    def factory(self) -> Callable[[ProblemT], KernelT]:
        """Makes the kernel for a problem that the spec does not reject."""
        ...

    def reject(self, problem: ProblemT) -> tuple[str, ...]:
        """Why this kernel does not serve the problem; empty when it does."""
        ...


class KernelTable:
    """Chooses one kernel for each operator and problem, once, and remembers why.

    Args:
        attention: candidates for "attention", the preferred first.
        kv_append: candidates for "kv_append".
        mla_attention: candidates for "mla_attention".
        latent_append: candidates for "kv_append" of a cache of latents.
        experts: candidates for "experts".
    """

    def __init__(
        self,
        attention: Sequence[KernelSpec[AttentionKernel]] = ATTENTION,
        kv_append: Sequence[KernelSpec[AppendKernel]] = KV_APPEND,
        mla_attention: Sequence[MlaSpec[MlaKernel]] = MLA_ATTENTION,
        latent_append: Sequence[MlaSpec[LatentAppendKernel]] = LATENT_APPEND,
        experts: Sequence[ExpertsSpec] = EXPERTS,
    ) -> None:
        self._attention = attention
        self._kv_append = kv_append
        self._mla_attention = mla_attention
        self._latent_append = latent_append
        self._experts = experts
        self._attention_kernels: dict[AttentionProblem, AttentionKernel] = {}
        self._append_kernels: dict[AttentionProblem, AppendKernel] = {}
        self._mla_kernels: dict[MlaProblem, MlaKernel] = {}
        self._latent_append_kernels: dict[MlaProblem, LatentAppendKernel] = {}
        self._experts_kernels: dict[ExpertsProblem, ExpertsKernel] = {}
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

    def mla_attention(self, problem: MlaProblem) -> MlaKernel:
        """The kernel for latent attention.

        Raises:
            NoKernel: every candidate refuses.
        """
        return self._choose("mla_attention", problem, self._mla_attention, self._mla_kernels)

    def latent_append(self, problem: MlaProblem) -> LatentAppendKernel:
        """The kernel that writes latents.

        Raises:
            NoKernel: every candidate refuses.
        """
        return self._choose("kv_append", problem, self._latent_append, self._latent_append_kernels)

    def experts(self, problem: ExpertsProblem) -> ExpertsKernel:
        """The kernel for a mixture of experts.

        Raises:
            NoKernel: every candidate refuses.
        """
        return self._choose("experts", problem, self._experts, self._experts_kernels)

    def explain(self) -> list[KernelChoice]:
        """Each choice made so far, with the reasons against the other candidates, in the order of choosing."""
        return list(self._choices)

    def _choose(self, operator: str, problem: P, specs: Sequence[Candidate[P, K]], made: dict[P, K]) -> K:
        if problem in made:
            return made[problem]
        candidates = [KernelCandidate(spec.name, list(spec.reject(problem))) for spec in specs]
        for spec, candidate in zip(specs, candidates, strict=True):
            if not candidate.reasons:
                made[problem] = spec.factory(problem)
                self._choices.append(KernelChoice(operator, str(problem), spec.name, candidates))
                return made[problem]
        raise NoKernel(operator, str(problem), {c.name: c.reasons for c in candidates})


class Chooser:
    """What the layers of a model ask for their kernels.

    Args:
        table: where the choices are made and remembered.
        dtype: of activations and cache.
        device: that the model runs on.
        block_size: tokens a KV block.
    """

    def __init__(self, table: KernelTable, dtype: torch.dtype, device: torch.device, block_size: int) -> None:
        self._table = table
        self._dtype = dtype
        self._device = device.type
        self._block_size = block_size

    def __call__(self, spec: AttentionSpec) -> LayerKernels:
        """The kernels of grouped attention."""
        problem = AttentionProblem(
            device=self._device,
            dtype=self._dtype,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=self._block_size,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
        )
        return LayerKernels(attention=self._table.attention(problem), kv_append=self._table.kv_append(problem))

    def latent(self, spec: AttentionSpec) -> LatentKernels:
        """The kernels of latent attention."""
        latent = spec.latent
        assert latent is not None
        problem = MlaProblem(
            device=self._device,
            dtype=self._dtype,
            num_heads=spec.num_heads,
            kv_rank=latent.kv_rank,
            nope_dim=latent.nope_dim,
            rope_dim=latent.rope_dim,
            value_dim=latent.value_dim,
            block_size=self._block_size,
            scale=spec.scale,
        )
        return LatentKernels(self._table.mla_attention(problem), self._table.latent_append(problem))

    def experts(self, spec: MlpSpec, hidden_size: int) -> ExpertsKernel:
        """The kernel of a mixture of experts."""
        assert spec.moe is not None
        problem = ExpertsProblem(
            device=self._device,
            dtype=self._dtype,
            num_experts=spec.moe.routing.num_experts,
            hidden_size=hidden_size,
            intermediate_size=spec.intermediate_size,
            activation=spec.activation,
        )
        return self._table.experts(problem)


def chooser(table: KernelTable, dtype: torch.dtype, device: torch.device, block_size: int) -> Chooser:
    """What the layers of a model ask for their kernels; see Chooser."""
    return Chooser(table, dtype, device, block_size)
