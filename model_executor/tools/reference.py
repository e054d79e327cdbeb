"""`python -m model_executor.tools.reference MODEL --json FILE`: a pack of token sequences on the plainest execution.

The same plan, loader and weights as in production, with the reference kernels alone, one thread and no graphs: what a
sentinel of a served model is compared with.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Final

import torch
from msgspec import structs
from torch import Tensor

from engine_core.wire import evidence
from engine_core.wire.evidence import PackEntry, ReferenceRun, WeightDigest
from model_executor.attention import mla, torch_ref
from model_executor.attention.dispatch import KernelTable
from model_executor.layers.experts import LOOP_SPEC
from model_executor.layers.heads import SEPARATE_SPEC
from model_executor.layers.int8 import INT8_SPEC
from model_executor.layers.linear import UNPACKED_SPEC
from model_executor.layers.norm import TORCH_SPEC
from model_executor.tools.command import Parser, run_tool
from model_executor.tools.distance import FACTOR
from model_executor.tools.evidence_file import add_json_flag, write_json
from model_executor.tools.observe import FINAL_NORM, Observer, block_names
from model_executor.tools.offline import Offline, OfflineOptions
from model_executor.tools.pack import LENGTHS, PACK, make_pack
from model_executor.tools.run_flags import add_run_flags, add_vocab_flag, run_options

COUNT: Final = 12
CHUNK: Final = 1024
# Two executions in float32 agree better than this. In other dtypes, and with products in int8, their own error is
# measured: a number on the border of two steps falls to either side, and every block takes that further.
FLOAT32_BOUND: Final = 1e-3


def reference_table() -> KernelTable:
    """The reference kernels alone, on every device."""
    return KernelTable(
        attention=(torch_ref.SPEC,),
        mla_attention=(mla.SPEC,),
        experts=(LOOP_SPEC,),
        linear=(UNPACKED_SPEC, INT8_SPEC),
        norm=(TORCH_SPEC,),
        heads=(SEPARATE_SPEC,),
    )


def run_pack(options: OfflineOptions) -> ReferenceRun:
    """Continue every sequence of the pack greedily.

    Raises:
        ModelRefused: the model cannot be honoured.
        ToolMisused: no sequence of the pack is short enough.
    """
    offline = Offline(options, reference_table())
    entries = make_pack(offline.sample_vocab, offline.executor.ready.max_model_len, COUNT)
    sequences = [_sequence(offline, entry) for entry in entries]
    return ReferenceRun(
        identity=offline.identity,
        environment=offline.environment,
        pack=PACK,
        entries=entries,
        sequences=sequences,
        weights=weight_digests(offline),
        bound=_bound(options, offline, entries, sequences),
    )


def weight_digests(offline: Offline) -> list[WeightDigest]:
    """A digest of every parameter in memory, and of what a kernel keeps instead of one."""
    sources = {record.name: record.sources for record in offline.executor.ready.load.tensors}
    model = offline.executor.model
    kept: dict[str, Tensor] = dict(model.named_parameters())
    kept |= {_parameter(name): held for name, held in model.named_buffers() if _parameter(name) != name}
    return [WeightDigest(name, sources.get(name, []), digest(held)) for name, held in kept.items()]


def digest(tensor: Tensor) -> str:
    """Of the bytes of a tensor."""
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.data).hexdigest()[:32]


def _parameter(buffer: str) -> str:
    """The parameter that a kernel packed into this buffer; any other buffer is its own."""
    return f"{owner}weight" if (owner := buffer.removesuffix("packed")) != buffer else buffer


def _sequence(offline: Offline, entry: PackEntry) -> evidence.Sequence:
    # One by one: a row's numbers then depend on nothing but itself.
    (job,) = offline.generate([entry.prompt], COUNT, CHUNK)
    return evidence.Sequence(
        name=entry.name,
        token_ids=job.token_ids,
        logprobs=[each.logprob for each in job.logprobs],
        leads=[each.top_logprobs[0] - each.top_logprobs[1] for each in job.logprobs],
    )


def _bound(
    options: OfflineOptions, offline: Offline, entries: Sequence[PackEntry], sequences: Sequence[evidence.Sequence]
) -> float:
    ready = offline.executor.ready
    if (ready.dtype, ready.kv_cache_dtype, options.quantization) == ("float32", "float32", "none"):
        return FLOAT32_BOUND
    exact = structs.replace(options, dtype="float32", quantization="none", kv_cache_dtype="float32")
    wide = Offline(exact, reference_table())
    errors = [
        abs(wider - own)
        for entry, sequence in zip(entries, sequences, strict=True)
        for wider, own in zip(_forced_logprobs(wide, entry, sequence.token_ids), sequence.logprobs, strict=True)
    ]
    return max(FLOAT32_BOUND, FACTOR * max(errors))


def _forced_logprobs(offline: Offline, entry: PackEntry, token_ids: Sequence[int]) -> list[float]:
    """Log-probabilities of known tokens after a prompt."""
    model, plan = offline.executor.model, offline.executor.plan
    with Observer(list(model.blocks), model.norm, block_names(plan.sources, plan.classes)) as seen:
        offline.force([*entry.prompt, *token_ids[:-1]], len(entry.prompt), CHUNK)
        hidden = seen.take()[FINAL_NORM][len(entry.prompt) - 1 :]
    with torch.inference_mode():
        logits = model.logits(hidden.to(model.embedding.weight.device))[:, : offline.sample_vocab]
        logprobs = logits.log_softmax(-1).cpu()
    return [float(row[token]) for row, token in zip(logprobs, token_ids, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; gives the exit status."""
    parser = Parser(prog="tercet sentinel", description="Run a pack of token sequences on the reference kernels.")
    add_run_flags(parser)
    add_vocab_flag(parser)
    add_json_flag(parser)

    def act(arguments: Sequence[str]) -> None:
        args = parser.parse_args(arguments)
        options = structs.replace(
            run_options(args),
            length=max(LENGTHS) + COUNT,
            sequences=1,
            sample_vocab=args.sample_vocab,
            threads=1,
            eager=True,
        )
        write_json(args.json, run_pack(options))

    return run_tool("tercet sentinel", act, argv)


if __name__ == "__main__":
    sys.exit(main())
