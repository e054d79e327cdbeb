"""`python -m model_executor.tools.parity MODEL [--layers ...]`: the production path against transformers.

Both run the same checkpoint, the same blocks and the same fixed token sequences: once free-running and greedy, once
teacher-forced along the reference's own answers, with the residual stream compared at every border of a block. For some
blocks the reference loads a cut of the checkpoint, made for the time of the comparison: no file without a chosen block
is needed, and no memory for the others. Tercet loads the checkpoint itself.

transformers knows neither our quantization nor another dtype of keys and values. Of runs with these, the answers and
the noise are those of Tercet's own reference kernels; errors are measured from transformers all the same.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from msgspec import structs
from torch import Tensor

from engine_core.wire.evidence import Boundary, Disagreement, PackEntry, ParityReport
from model_executor.device import DTYPES
from model_executor.errors import ToolMisused
from model_executor.models.spec import ModelSpec
from model_executor.tools.command import EXIT_FAILED, Parser, run_tool
from model_executor.tools.cutter import SHARD_BYTES, CutOptions, check_output, plan_cut, write_cut
from model_executor.tools.distance import AGREEMENT, FACTOR, RULE, boundaries, first_place, floor, lead
from model_executor.tools.evidence_file import add_json_flag, write_json
from model_executor.tools.model import open_model
from model_executor.tools.observe import FINAL_NORM, LOGITS, Observer, block_names
from model_executor.tools.offline import Offline, OfflineOptions
from model_executor.tools.pack import LENGTHS, PACK, make_pack
from model_executor.tools.parity_text import parity_lines
from model_executor.tools.reference import reference_table
from model_executor.tools.run_flags import add_run_flags, add_vocab_flag, run_options
from model_executor.tools.transformers_reference import TransformersReference

COUNT: Final = 24
# Prompts longer than this take several steps.
CHUNK: Final = 16

Values = Mapping[str, Tensor]


@dataclass
class Sample:
    """One sequence of the pack in both engines.

    Attributes:
        entry: of the pack.
        expected: the reference's greedy answer in the run's numbers.
        free: Tercet's own.
        run, noisy, truth: [T, width] by place: Tercet, the reference in the run's numbers, and in the wider dtype.
    """

    entry: PackEntry
    expected: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    run: Values = field(default_factory=dict)
    noisy: Values = field(default_factory=dict)
    truth: Values = field(default_factory=dict)

    @property
    def forced(self) -> list[int]:
        """Prompt and answer without its last token, which nothing follows."""
        return [*self.entry.prompt, *self.expected[:-1]]

    def choice(self, position: int) -> tuple[int, Tensor]:
        """Row of the logits that choose the answer's token `position`, and Tercet's logits there."""
        row = len(self.entry.prompt) - 1 + position
        return row, self.run[LOGITS][row]


class PlainReference:
    """Tercet's own reference kernels in plain torch, for numbers that the other engine does not compute with.

    Args:
        options: of the run.
        names: of the blocks, as places.
    """

    def __init__(self, options: OfflineOptions, names: Sequence[str]) -> None:
        # The threads of torch stay as the run has them.
        self._offline = Offline(structs.replace(options, threads=torch.get_num_threads()), reference_table())
        self._names = names

    def greedy(self, prompt: Sequence[int], count: int, _vocab: int) -> list[int]:
        """See TransformersReference."""
        (job,) = self._offline.generate([prompt], count, CHUNK)
        return job.token_ids

    def forced(self, token_ids: Sequence[int]) -> Values:
        """See TransformersReference."""
        return forced(self._offline, token_ids, len(token_ids), self._names)


def compare(offline: Offline, options: OfflineOptions, folder: Path, samples: list[Sample]) -> ParityReport:
    """Run both engines over the samples and compare.

    Args:
        offline: Tercet; options: of it.
        folder: that the reference loads.
        samples: of the pack.

    Raises:
        ModelRefused: transformers cannot load the folder.
    """
    plan = offline.executor.plan
    names = block_names(plan.sources, plan.classes)
    dtype = DTYPES[offline.executor.ready.dtype]
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    vocab = offline.sample_vocab
    narrowed = offline.identity.narrowed
    reference = PlainReference(options, names) if narrowed else TransformersReference(folder, names, dtype)
    for sample in samples:
        sample.expected = reference.greedy(sample.entry.prompt, COUNT, vocab)
        sample.noisy = reference.forced(sample.forced)
    # One model in memory beside Tercet's at a time.
    del reference
    gc.collect()
    wider = TransformersReference(folder, names, wide)
    title = wider.title
    if len(plan.sources) < len(offline.spec.layers):
        title += " on a cut of these blocks"
    for sample in samples:
        sample.truth = wider.forced(sample.forced)
    del wider
    gc.collect()
    run_samples(offline, samples, names)
    return judge(offline, samples, title, str(wide).removeprefix("torch."))


@contextmanager
def reference_folder(folder: Path, layers: str, *, allow_missing_classes: bool) -> Iterator[Path]:
    """A folder that holds the chosen blocks and no others; it may be gone after the `with`.

    Raises:
        ModelRefused: the checkpoint cannot be cut faithfully.
        ToolMisused: there is no room for it.
    """
    model = open_model(folder)
    options = CutOptions(
        layers=layers,
        mode="weights",
        prediction="drop",
        allow_missing_classes=allow_missing_classes,
        max_shard_bytes=SHARD_BYTES,
        command="",
    )
    if len(model.plan(layers, allow_missing_classes=allow_missing_classes).sources) == len(model.spec.layers):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="tercet-") as scratch:
        out, cut = Path(scratch) / folder.resolve().name, plan_cut(model, options)
        try:
            check_output(folder, out, cut)
        except ToolMisused as error:
            raise ToolMisused(f"TMPDIR: {scratch}: no room for a cut for the reference: {error}") from error
        write_cut(cut, out, lambda _: None)
        yield out


def run_samples(offline: Offline, samples: Sequence[Sample], names: Sequence[str]) -> None:
    """Tercet's own answers, all together, and its residual stream along the reference's, one by one."""
    jobs = offline.generate([sample.entry.prompt for sample in samples], COUNT, CHUNK)
    for sample, job in zip(samples, jobs, strict=True):
        sample.free = job.token_ids
    for sample in samples:
        sample.run = forced(offline, sample.forced, len(sample.entry.prompt), names)


def forced(offline: Offline, token_ids: Sequence[int], prompt_len: int, names: Sequence[str]) -> Values:
    """Tercet's residual stream and logits of a known sequence, [T, width] by place."""
    model = offline.executor.model
    with Observer(list(model.blocks), model.norm, names) as seen:
        offline.force(token_ids, prompt_len, CHUNK)
        values = seen.take()
    with torch.inference_mode():
        logits = model.logits(values[FINAL_NORM].to(model.embedding.weight.device)).cpu()
    return {**values, LOGITS: logits}


def judge(offline: Offline, samples: Sequence[Sample], title: str, wide: str) -> ParityReport:
    """The report."""
    dtype = DTYPES[offline.executor.ready.dtype]
    vocab = offline.sample_vocab
    run, noisy, truth = (_joined([getattr(sample, side) for sample in samples]) for side in ("run", "noisy", "truth"))
    rows = boundaries(run, noisy, truth, dtype)
    disagreements = [each for sample in samples for each in _disagreements(sample, rows, dtype, vocab)]
    noise = floor(rows[-1].noise, truth[LOGITS], dtype).largest
    firsts = [_first_difference(sample.free, sample.expected) for sample in samples]
    positions = sum(len(sample.expected) for sample in samples)
    agreed = positions - len(disagreements)
    finite = all(bool(torch.isfinite(values).all()) for values in run.values())
    identity = offline.identity
    failures = [f"{row.place}: error {row.run.relative:.2e}, outside the noise" for row in rows if not row.within]
    failures += _unexplained(samples, disagreements, firsts, noise, vocab)
    decides = len(identity.layer_map) == identity.blocks and not identity.narrowed
    if decides and agreed < AGREEMENT * positions:
        failures.append(f"{agreed} of {positions} tokens agree, less than {AGREEMENT:.0%}")
    if not finite:
        failures.append("some numbers are not finite")
    return ParityReport(
        identity=identity,
        environment=offline.environment,
        reference=title,
        wide=wide,
        pack=PACK,
        samples=[sample.entry.name for sample in samples],
        positions=positions,
        agreed=agreed,
        free_equal=sum(first is None for first in firsts),
        free_first=firsts,
        disagreements=disagreements,
        boundaries=rows,
        finite=finite,
        rule=list(RULE),
        failures=failures,
        unverified=unreached(offline.spec, offline.executor.plan.sources, max(len(s.forced) for s in samples)),
    )


def _joined(samples: Sequence[Values]) -> dict[str, Tensor]:
    return {place: torch.cat([sample[place] for sample in samples]) for place in samples[0]}


def unreached(spec: ModelSpec, sources: Sequence[int], longest: int) -> list[str]:
    """What sequences of this length cannot show."""
    windows = {spec.layers[source].attention.window for source in sources}
    return [
        f"sliding windows of {window} tokens: the longest sequence has {longest}"
        for window in sorted(window for window in windows if window is not None and window >= longest)
    ]


def _disagreements(sample: Sample, rows: Sequence[Boundary], dtype: torch.dtype, vocab: int) -> list[Disagreement]:
    found = []
    for position, expected in enumerate(sample.expected):
        row, logits = sample.choice(position)
        chosen = int(logits[:vocab].argmax())
        if chosen != expected:
            found.append(
                Disagreement(
                    sample=sample.entry.name,
                    position=position,
                    expected=expected,
                    chosen=chosen,
                    expected_margin=lead(sample.noisy[LOGITS][row, :vocab]),
                    chosen_margin=lead(logits[:vocab]),
                    first_place=first_place(sample.run, sample.truth, rows, row, dtype),
                )
            )
    return found


def _unexplained(
    samples: Sequence[Sample],
    disagreements: Sequence[Disagreement],
    firsts: Sequence[int | None],
    noise: float,
    vocab: int,
) -> list[str]:
    """Free-running differences that teacher-forcing does not show, though no near tie explains them."""
    known = {(each.sample, each.position) for each in disagreements}
    failures = []
    for sample, first in zip(samples, firsts, strict=True):
        if first is None or (sample.entry.name, first) in known:
            continue
        margin = lead(sample.choice(first)[1][:vocab])
        if margin > 2 * FACTOR * noise:
            failures.append(f"{sample.entry.name}: free-running token {first} differs, with a lead of {margin:.2e}")
    return failures


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    return next((place for place, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; gives the exit status: 0 pass, 1 fail, 2 a flag is wrong, 3 the model is refused."""

    def act(arguments: Sequence[str]) -> int:
        args = _parser().parse_args(arguments)
        report = _report(args)
        write_json(args.json, report)
        sys.stdout.write("\n".join(parity_lines(report)) + "\n")
        return EXIT_FAILED if report.failures else 0

    return run_tool("tercet parity", act, argv)


def _report(args: argparse.Namespace) -> ParityReport:
    folder = Path(args.model)
    options = structs.replace(
        run_options(args),
        length=max(LENGTHS) + COUNT + 1,
        sequences=min(args.samples, len(LENGTHS)),
        sample_vocab=args.sample_vocab,
    )
    offline = Offline(options)
    entries = make_pack(offline.sample_vocab, offline.executor.ready.max_model_len, COUNT, args.samples)
    samples = [Sample(entry) for entry in entries]
    with reference_folder(folder, args.layers, allow_missing_classes=args.allow_missing_classes) as reference:
        return compare(offline, options, reference, samples)


def _parser() -> Parser:
    parser = Parser(
        prog="tercet parity",
        description="Compare the production path with a reference engine on the same checkpoint, blocks and token "
        "sequences. Of some blocks a cut is made for the reference meanwhile, in the folder for temporary files. "
        "Exit codes: 0 pass; 1 fail; 2 a flag is wrong; 3 the model is refused.",
    )
    add_run_flags(parser)
    parser.add_argument("--reference", choices=("transformers",), default="transformers", help="the other engine")
    parser.add_argument(
        "--samples", metavar="N", type=_count, default=8, help="token sequences, 1 to 1000 (default: 8)"
    )
    add_vocab_flag(parser)
    add_json_flag(parser)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 1000")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
