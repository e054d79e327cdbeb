"""What the proving tools tell each other and the report, as plain data, so that readers need no torch.

A line of the profile file is a StepProfile. The other Structs are written by the programs under model_executor.tools
and read by the commands of the frontend.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

StepKind = Literal["prefill", "decode", "mixed", "warm_up"]
"""decode: each row computes one token; prefill: none does; mixed: some do. warm_up: before the first plan."""

StepMode = Literal["eager", "graph", "buffers"]

# Pseudo-class of the operators that stand outside the blocks.
OUTSIDE = "outside"


class OperatorRun(Struct, frozen=True):
    """What one operator did in one step, all blocks of a class together.

    Attributes:
        layer_class: of the blocks, or OUTSIDE.
        operator: as `tercet plan` calls it.
        kernel: that was chosen for it; empty: it is torch's own.
        count: how often it ran.
        host_ns: time on the host, what it called included; device_ns: on the device, 0 on CPU.
        native: names that the profiler saw run in it (aten:: operators and device kernels), sorted.
    """

    layer_class: str
    operator: str
    kernel: str
    count: int
    host_ns: int
    device_ns: int
    native: list[str]


class StepProfile(Struct, frozen=True):
    """One step as torch's profiler saw it; a line of the profile file.

    Attributes:
        step: of the plan; 0: the warm-up.
        kind: of the step.
        chunked: whether a row computed a part of a prompt only.
        tokens, rows: of the step.
        graphs: replays of captured graphs in it, whose operators do not show by themselves.
        bucket: rows that it was padded to; 0: it ran as it is.
        captured: whether graphs were captured in it: its operators are those of the replays.
        operators: what ran.
    """

    step: int
    kind: StepKind
    chunked: bool
    tokens: int
    rows: int
    graphs: int
    bucket: int
    captured: bool
    operators: list[OperatorRun]


class Environment(Struct, frozen=True):
    """Where numbers were made; equal environments make equal bits.

    Attributes:
        python, torch: versions.
        machine: processor or device, as the system names it.
        device: "cpu" or "cuda".
        threads: that torch computed with.
        kernels: chosen for each operator and problem.
    """

    python: str
    torch: str
    machine: str
    device: str
    threads: int
    kernels: list[str]


class PlanIdentity(Struct, frozen=True):
    """What must be equal before two runs may be compared.

    Attributes:
        architecture: as config.json names it.
        revision: of the checkpoint: a digest of configuration and headers, not of weights.
        blocks: of the checkpoint.
        layer_map: source index of each runtime layer; classes: theirs.
        dtype: computed in; kv_cache_dtype: of keys and values.
        sample_vocab: ids that may be sampled.
        quantization: of the products, as of `tercet serve`.
    """

    architecture: str
    revision: str
    blocks: int
    layer_map: list[int]
    classes: list[str]
    dtype: str
    kv_cache_dtype: str
    sample_vocab: int
    quantization: str = "none"

    @property
    def narrowed(self) -> bool:
        """Whether products or the cache are in narrower numbers than the rest."""
        return self.quantization != "none" or self.kv_cache_dtype != self.dtype

    @property
    def numbers(self) -> str:
        """What it computes with, as text."""
        products = "" if self.quantization == "none" else f" with products in {self.quantization}"
        kept = "" if self.kv_cache_dtype == self.dtype else f", keys and values in {self.kv_cache_dtype}"
        return f"{self.dtype}{products}{kept}"


class PackEntry(Struct, frozen=True):
    """One token sequence of a pack."""

    name: str
    prompt: list[int]


class Sequence(Struct, frozen=True):
    """What followed a prompt, greedily.

    Attributes:
        name: of the pack's entry.
        token_ids: what followed.
        logprobs: of these tokens.
        leads: logprob of the likeliest token minus that of the second, at each of them.
    """

    name: str
    token_ids: list[int]
    logprobs: list[float]
    leads: list[float]


class WeightDigest(Struct, frozen=True):
    """One parameter in memory.

    Attributes:
        name: of the parameter.
        sources: checkpoint tensors it was made from.
        digest: of its bytes.
    """

    name: str
    sources: list[str]
    digest: str


class ReferenceRun(Struct, frozen=True):
    """The pack on the plain-torch execution of a plan.

    Attributes:
        identity: of the plan.
        environment: of the run.
        pack: id of the pack; entries: its sequences.
        sequences: what followed each.
        weights: a digest of every parameter.
        bound: most that a log-probability of another execution in the same dtype may differ.
    """

    identity: PlanIdentity
    environment: Environment
    pack: str
    entries: list[PackEntry]
    sequences: list[Sequence]
    weights: list[WeightDigest]
    bound: float


class Distance(Struct, frozen=True):
    """How far numbers are from the reference's.

    Attributes:
        relative: L2 norm of the difference over that of the reference.
        cosine: of the angle between the two.
        largest: absolute difference.
    """

    relative: float
    cosine: float
    largest: float


class Boundary(Struct, frozen=True):
    """The residual stream at one place, teacher-forced over all samples.

    Attributes:
        place: "embedding", "block 2 <- 7 CLASS", "final norm" or "logits".
        run: Tercet's distance from the wider reference.
        noise: distance of the reference in the run's numbers from the wider one.
        within: whether `run` keeps the rule.
    """

    place: str
    run: Distance
    noise: Distance
    within: bool


class Disagreement(Struct, frozen=True):
    """A position at which the two engines choose different tokens after the same text.

    Attributes:
        sample: name of the pack's entry; position: of the token after the prompt, from 0.
        expected, chosen: tokens of reference and run.
        expected_margin, chosen_margin: lead of each engine's choice over its second, in logits.
        first_place: first boundary whose error at this position leaves the noise; empty: none does.
    """

    sample: str
    position: int
    expected: int
    chosen: int
    expected_margin: float
    chosen_margin: float
    first_place: str


class ParityReport(Struct, frozen=True):
    """Tercet's production path against a reference engine on the same checkpoint.

    Attributes:
        identity, environment: of the run.
        reference: engine and version; wide: dtype of the reference that errors are measured from.
        pack: id; samples: names of its entries that were used.
        positions: teacher-forced choices compared; agreed: how many were equal.
        free_equal: samples whose free-running tokens are all equal to the reference's.
        free_first: for each sample the first free-running token that differs; None: none does.
        disagreements: each of them.
        boundaries: errors.
        finite: whether every number was.
        rule: by which the verdict is given.
        failures: why the verdict is "fail"; empty: it is "pass".
        unverified: what the pack could not reach.
    """

    identity: PlanIdentity
    environment: Environment
    reference: str
    wide: str
    pack: str
    samples: list[str]
    positions: int
    agreed: int
    free_equal: int
    free_first: list[int | None]
    disagreements: list[Disagreement]
    boundaries: list[Boundary]
    finite: bool
    rule: list[str]
    failures: list[str]
    unverified: list[str]


class Check(Struct, frozen=True):
    """One check with its evidence."""

    name: str
    passed: bool
    evidence: str


class Timing(Struct, frozen=True):
    """Seconds of one place in one kind of step.

    Attributes:
        place: "embedding", "block 2 <- 7 CLASS", "final norm", "head", "rest: ..." of the same steps, or "whole step".
        kind: "prefill" or "decode".
        mode: "eager"; "graph": on a captured graph; "buffers": on its static buffers without one.
        tokens: of the step; context: tokens in the cache after it.
        median, low, high: over the runs.
        runs: measured, after the warm-up.
    """

    place: str
    kind: StepKind
    mode: StepMode
    tokens: int
    context: int
    median: float
    low: float
    high: float
    runs: int


class ProbeReport(Struct, frozen=True):
    """One look into an executor that the production path brought up.

    Attributes:
        identity, environment: of the run.
        checks: of tensors, of the runtime state, of numbers and of routing.
        timings: of single places, which are seen in eager steps alone, and of whole steps; never of another depth.
        waited: share of the time they were taken in, 0 .. 1, in which somebody on this machine waited for a processor;
            None: the system does not tell.
    """

    identity: PlanIdentity
    environment: Environment
    checks: list[Check]
    timings: list[Timing]
    waited: float | None = None


class Passage(Struct, frozen=True):
    """A text as a model reads it.

    Attributes:
        source: where the text is from; sha256: of its UTF-8 bytes, all of them.
        prefix: ids that the tokenizer puts before every text.
        token_ids: of the beginning of the text.
        vocab: ids that the tokenizer knows are below it.
    """

    source: str
    sha256: str
    prefix: list[int]
    token_ids: list[int]
    vocab: int


class Estimate(Struct, frozen=True):
    """A mean over positions, and its standard error as of independent ones."""

    value: float
    error: float


class QualityReport(Struct, frozen=True):
    """A served configuration against float32, teacher-forced on a text.

    Attributes:
        identity, environment: of the configuration.
        quantization: likewise.
        source, sha256: of the text.
        windows: sequences that it was cut into; length: tokens of each; decoded: those of them that are computed one by
            one, as an answer is.
        positions: of all windows; finite: those where every number is, which the figures are from.
        perplexity, reference_perplexity: of the configuration, of float32.
        rise: of the perplexity, as a fraction.
        divergence: KL(float32 || configuration), in nats.
        agreement: how often both have the same likeliest token.
        rule: by which the verdict is given.
        failures: why the verdict is "fail"; empty: it is "pass".
        unverified: what this could not show.
    """

    identity: PlanIdentity
    environment: Environment
    quantization: str
    source: str
    sha256: str
    windows: int
    length: int
    decoded: int
    positions: int
    finite: int
    perplexity: float
    reference_perplexity: float
    rise: Estimate
    divergence: Estimate
    agreement: Estimate
    rule: list[str]
    failures: list[str]
    unverified: list[str]
