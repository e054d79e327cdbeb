"""The registry of kernels, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, cast

import torch

from engine_core.wire.reports import KernelCandidate, KernelChoice
from model_executor.attention import mla, mla_absorbed, torch_matmul, torch_ref, torch_sdpa, triton_paged
from model_executor.attention.mla import (
    LatentAppendKernel,
    LatentAppendSpec,
    LatentKernels,
    MlaKernel,
    MlaProblem,
    MlaSpec,
)
from model_executor.attention.spec import AppendKernel, AttentionKernel, AttentionProblem, KernelSpec
from model_executor.errors import NoKernel
from model_executor.layers import triton_gated, triton_heads, triton_norm
from model_executor.layers.attention import LayerKernels
from model_executor.layers.experts import GROUPED_SPEC, LOOP_SPEC, ExpertsKernel, ExpertsProblem, ExpertsSpec
from model_executor.layers.heads import SEPARATE_SPEC, HeadsKernel, HeadsProblem, HeadsSpec
from model_executor.layers.int8 import INT8_SPEC
from model_executor.layers.linear import UNPACKED_SPEC, Linear, LinearKernel, LinearProblem, LinearSpec
from model_executor.layers.norm import TORCH_SPEC, NormKernel, NormKernelSpec, NormProblem, RmsNorm
from model_executor.models.spec import Activation, AttentionSpec, MlpSpec, NormSpec
from model_executor.native.attention import fused_heads, paged_attention
from model_executor.native.library import Native
from model_executor.native.linear import packed_linear
from model_executor.native.norm import native_norm

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
KV_APPEND: tuple[KernelSpec[AppendKernel], ...] = (torch_ref.APPEND_SPEC,)
MLA_ATTENTION: tuple[MlaSpec, ...] = (mla_absorbed.SPEC, mla.SPEC)
LATENT_APPEND: tuple[LatentAppendSpec, ...] = (mla.APPEND_SPEC,)
EXPERTS: tuple[ExpertsSpec, ...] = (GROUPED_SPEC, LOOP_SPEC)
LINEAR: tuple[LinearSpec, ...] = (triton_gated.SPEC, UNPACKED_SPEC, INT8_SPEC)
NORM: tuple[NormKernelSpec, ...] = (triton_norm.SPEC, TORCH_SPEC)
HEADS: tuple[HeadsSpec, ...] = (triton_heads.SPEC, SEPARATE_SPEC)


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
    """Chooses one kernel for each operator and problem, once, and remembers why: layers of equal problems share it.

    A choice raises NoKernel where every candidate refuses.

    Args:
        attention: candidates for "attention", the preferred first.
        kv_append: candidates for "kv_append".
        mla_attention: candidates for "mla_attention".
        latent_append: candidates for "kv_append" of a cache of latents.
        experts: candidates for "experts".
        linear: candidates for "linear".
        norm: candidates for "norm".
        heads: candidates for "heads".
        native: the library whose kernels stand before the others; None: there is none.
    """

    def __init__(
        self,
        attention: Sequence[KernelSpec[AttentionKernel]] = ATTENTION,
        kv_append: Sequence[KernelSpec[AppendKernel]] = KV_APPEND,
        mla_attention: Sequence[MlaSpec] = MLA_ATTENTION,
        latent_append: Sequence[LatentAppendSpec] = LATENT_APPEND,
        experts: Sequence[ExpertsSpec] = EXPERTS,
        linear: Sequence[LinearSpec] = LINEAR,
        norm: Sequence[NormKernelSpec] = NORM,
        heads: Sequence[HeadsSpec] = HEADS,
        native: Native | None = None,
    ) -> None:
        self._attention = attention
        self._linear, self._norm, self._heads = linear, norm, heads
        if native is not None:
            self._attention = (paged_attention(native), *attention)
            self._linear = (packed_linear(native), *linear)
            self._norm = (native_norm(native), *norm)
            self._heads = (fused_heads(native), *heads)
        self._kv_append = kv_append
        self._mla_attention = mla_attention
        self._latent_append = latent_append
        self._experts = experts
        self._made: dict[tuple[str, object], object] = {}
        self._choices: list[KernelChoice] = []

    def attention(self, problem: AttentionProblem) -> AttentionKernel:
        """The kernel for a problem."""
        return self._choose("attention", problem, self._attention)

    def kv_append(self, problem: AttentionProblem) -> AppendKernel:
        """The kernel that writes keys and values for a problem."""
        return self._choose("kv_append", problem, self._kv_append)

    def mla_attention(self, problem: MlaProblem) -> MlaKernel:
        """The kernel for latent attention."""
        return self._choose("mla_attention", problem, self._mla_attention)

    def latent_append(self, problem: MlaProblem) -> LatentAppendKernel:
        """The kernel that writes latents."""
        return self._choose("kv_append", problem, self._latent_append)

    def experts(self, problem: ExpertsProblem) -> ExpertsKernel:
        """The kernel for a mixture of experts."""
        return self._choose("experts", problem, self._experts)

    def linear(self, problem: LinearProblem) -> LinearKernel:
        """The kernel for a linear map."""
        return self._choose("linear", problem, self._linear)

    def norm(self, problem: NormProblem) -> NormKernel:
        """The kernel for a norm."""
        return self._choose("norm", problem, self._norm)

    def heads(self, problem: HeadsProblem) -> HeadsKernel | None:
        """The kernel for all between projection and attention; None: it is done step by step."""
        return self._choose("heads", problem, self._heads)

    def all_native(self, native: Native) -> bool:
        """Whether the library computes all that is large."""
        large = ("linear", "attention", "mla_attention", "experts")
        return all(each.chosen.endswith(native.name) for each in self._choices if each.operator in large)

    def explain(self) -> list[KernelChoice]:
        """Each choice made so far, with the reasons against the other candidates, in the order of choosing."""
        return list(self._choices)

    def _choose(self, operator: str, problem: P, specs: Sequence[Candidate[P, K]]) -> K:
        key = (operator, problem)
        if key not in self._made:
            self._made[key] = self._make(operator, problem, specs)
        return cast("K", self._made[key])  # it is what this operator's specs made

    def _make(self, operator: str, problem: P, specs: Sequence[Candidate[P, K]]) -> K:
        candidates = [KernelCandidate(spec.name, list(spec.reject(problem))) for spec in specs]
        for spec, candidate in zip(specs, candidates, strict=True):
            if not candidate.reasons:
                kernel = spec.factory(problem)
                self._choices.append(KernelChoice(operator, str(problem), spec.name, candidates))
                return kernel
        raise NoKernel(operator, str(problem), {c.name: c.reasons for c in candidates})


class Chooser:
    """What the layers of a model ask for their kernels.

    Args:
        table: where the choices are made and remembered.
        dtype: of activations.
        device: that the model runs on.
        block_size: tokens a KV block.
        int8: whether the products of blocks are computed in int8.
        cache_dtype: of the KV cache; None: dtype.
    """

    def __init__(
        self,
        table: KernelTable,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
        *,
        int8: bool = False,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype = dtype
        self._cache_dtype = cache_dtype
        self.device = device
        self._table = table
        self._block_size = block_size
        self._int8 = int8

    def __call__(self, spec: AttentionSpec) -> LayerKernels:
        """The kernels of grouped attention."""
        before = HeadsProblem(
            device=self.device.type,
            dtype=self.dtype,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=self._block_size,
            rope=None if spec.rope is None else spec.rope.name,
            qk_norm=spec.qk_norm is not None,
        )
        heads = self._table.heads(before)
        problem = AttentionProblem(
            device=self.device.type,
            dtype=self.dtype,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=self._block_size,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            layout="plain" if heads is None else heads.layout,
            cache_dtype=self._cache_dtype,
        )
        kv_append = self._table.kv_append(problem) if heads is None else None
        return LayerKernels(self._table.attention(problem), kv_append, heads)

    def latent(self, spec: AttentionSpec) -> LatentKernels:
        """The kernels of latent attention."""
        latent = spec.latent
        assert latent is not None
        problem = MlaProblem(
            device=self.device.type,
            dtype=self.dtype,
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
            device=self.device.type,
            dtype=self.dtype,
            num_experts=spec.moe.routing.num_experts,
            hidden_size=hidden_size,
            intermediate_size=spec.intermediate_size,
            activation=spec.activation,
        )
        return self._table.experts(problem)

    def linear(
        self, inputs: int, outputs: int, *, bias: bool, gate: Activation | None = None, exact: bool = False
    ) -> Linear:
        """See KernelChooser."""
        int8 = self._int8 and not exact
        problem = LinearProblem(self.device.type, self.dtype, inputs, outputs, bias, gate, int8)
        kernel = self._table.linear(problem)
        return Linear(inputs, outputs, bias=bias, dtype=self.dtype, device=self.device, gate=gate, kernel=kernel)

    def norm(self, spec: NormSpec, size: int) -> RmsNorm:
        """A norm over a last axis of this size."""
        kernel = self._table.norm(NormProblem(self.device.type, self.dtype, size, spec.offset, spec.eps))
        return RmsNorm(size, spec, self.dtype, self.device, kernel)
