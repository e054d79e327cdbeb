"""`python -m model_executor.tools.quality MODEL --passage FILE --json FILE`: a served configuration against float32.

Both are the production executor, brought up twice in this process and given the same text window by window, without
sampling: so each position of one is compared with the same position of the other.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from engine_core.wire.config import ModelOptions
from engine_core.wire.evidence import Estimate, Passage, QualityReport
from model_executor.errors import ConfigRefused, ToolMisused
from model_executor.models.reader import read_spec
from model_executor.tools.command import EXIT_FAILED, Parser, run_tool
from model_executor.tools.evidence_file import add_json_flag, write_json
from model_executor.tools.observe import FINAL_NORM, Observer
from model_executor.tools.offline import Offline, OfflineOptions
from model_executor.tools.run_flags import add_run_flags, run_options

WINDOW: Final = 512
# The end of each window is computed token by token: decode kernels are part of what is served.
DECODED: Final = 64
CHUNK: Final = 512
# Positions whose distributions are compared at once, in float64.
SLICE: Final = 64

RISE: Final = 0.004
DIVERGENCE: Final = 0.007
AGREEMENT: Final = 0.95
RULE: Final = (
    f"perplexity rises by at most {RISE:.1%}",
    f"mean KL(float32 || configuration) is at most {DIVERGENCE:g}",
    f"the likeliest token is the same at {AGREEMENT:.0%} of the positions at least",
    "every number is finite",
)


@dataclass(frozen=True)
class Scores:
    """Both at the same positions, each [positions] in float64.

    Attributes:
        reference_loss, loss: nats of the token that follows, by float32 and by the configuration.
        divergence: KL(float32 || configuration).
        agrees: 1 where both have the same likeliest token, else 0.
    """

    reference_loss: Tensor
    loss: Tensor
    divergence: Tensor
    agrees: Tensor


def measure(options: OfflineOptions, passage: Passage) -> QualityReport:
    """Run both over the passage.

    Args:
        options: of the configuration; length and sequences are settled here.
        passage: at least one window long.

    Raises:
        ModelRefused: the configuration cannot be honoured.
        ToolMisused: the passage is too short.
    """
    options = structs.replace(options, length=WINDOW, sequences=1, sample_vocab=passage.vocab, eager=True)
    length = min(WINDOW, read_spec(options.folder, ModelOptions()).max_model_len)
    windows = cut(passage, length)
    run = Offline(options)
    reference = Offline(structs.replace(options, dtype="float32", quantization="none", kv_cache_dtype="float32"))
    decoded = min(DECODED, length // 2)
    parts = [
        compare(
            forced_logits(reference, window, decoded), forced_logits(run, window, decoded), torch.tensor(window[1:])
        )
        for window in windows
    ]
    scores = Scores(*(torch.cat(columns) for columns in zip(*map(_columns, parts), strict=True)))
    return judge(run, options.quantization, passage, scores, windows=len(windows), length=length, decoded=decoded)


def cut(passage: Passage, length: int) -> list[list[int]]:
    """Windows of `length` ids, prefix included, that share none of the text's; what remains at the end is left out.

    Raises:
        ToolMisused: there is not one.
    """
    room = length - len(passage.prefix)
    starts = range(0, len(passage.token_ids) - room + 1, room) if room > 1 else range(0)
    if not starts:
        raise ToolMisused(
            f"--tokens: {len(passage.token_ids)}, at least {max(room, 2)}: one window of {length} tokens, "
            f"{len(passage.prefix)} of them put before every text"
        )
    return [[*passage.prefix, *passage.token_ids[start : start + room]] for start in starts]


def forced_logits(offline: Offline, window: Sequence[int], decoded: int) -> Tensor:
    """Logits [T - 1, vocab] of what follows each token of a window but the last, as they are served."""
    model = offline.executor.model
    with Observer([model.blocks[0]], model.norm, ["first block"]) as seen:
        offline.force(window, len(window) - decoded, CHUNK)
        hidden = seen.take()[FINAL_NORM][:-1]
    with torch.inference_mode():
        return model.logits(hidden.to(model.embedding.weight.device))[:, : offline.sample_vocab].cpu()


def compare(reference: Tensor, run: Tensor, following: Tensor) -> Scores:
    """Scores of logits [T, vocab] of both, and the ids [T] that follow."""
    parts = []
    for first in range(0, len(following), SLICE):
        rows = slice(first, first + SLICE)
        expected, given = (logits[rows].double().log_softmax(-1) for logits in (reference, run))
        targets = following[rows, None].long()
        parts.append(
            (
                -expected.gather(-1, targets)[:, 0],
                -given.gather(-1, targets)[:, 0],
                (expected.exp() * (expected - given)).sum(-1),
                (expected.argmax(-1) == given.argmax(-1)).double(),
            )
        )
    return Scores(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def judge(
    run: Offline, quantization: str, passage: Passage, scores: Scores, *, windows: int, length: int, decoded: int
) -> QualityReport:
    """The report.

    Raises:
        ConfigRefused: the configuration's numbers are not finite anywhere.
    """
    positions = len(scores.loss)
    sound = torch.stack(_columns(scores)).isfinite().all(0)
    if (finite := int(sound.sum())) < 2:
        raise ConfigRefused("dtype", run.identity.dtype, "its numbers are not finite on this text")
    scores = Scores(*(column[sound] for column in _columns(scores)))
    added = estimate(scores.loss - scores.reference_loss)
    rise = Estimate(math.expm1(added.value), math.exp(added.value) * added.error)
    divergence, agreement = estimate(scores.divergence), estimate(scores.agrees)
    passed = (
        *(rise.value <= RISE, divergence.value <= DIVERGENCE, agreement.value >= AGREEMENT),
        finite == positions,
    )
    identity = run.identity
    missing = identity.blocks - len(identity.layer_map)
    return QualityReport(
        identity=identity,
        environment=run.environment,
        quantization=quantization,
        source=passage.source,
        sha256=passage.sha256,
        windows=windows,
        length=length,
        decoded=decoded,
        positions=positions,
        finite=finite,
        perplexity=math.exp(float(scores.loss.mean())),
        reference_perplexity=math.exp(float(scores.reference_loss.mean())),
        rise=rise,
        divergence=divergence,
        agreement=agreement,
        rule=list(RULE),
        failures=[line for line, kept in zip(RULE, passed, strict=True) if not kept],
        unverified=[f"the quality of the model: {missing} of its {identity.blocks} blocks did not run"] * (missing > 0),
    )


def estimate(values: Tensor) -> Estimate:
    """Mean of values [N], N at least 2, and its standard error."""
    return Estimate(float(values.mean()), float(values.std()) / math.sqrt(len(values)))


def _columns(scores: Scores) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return scores.reference_loss, scores.loss, scores.divergence, scores.agrees


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; gives the exit status: 0 pass, 1 fail, 2 a flag is wrong, 3 the model is refused."""
    parser = Parser(prog="tercet quality", description="Compare a served configuration with float32 on a text.")
    add_run_flags(parser)
    parser.add_argument("--passage", metavar="FILE", required=True, help="the text as token ids, in JSON")
    add_json_flag(parser)

    def act(arguments: Sequence[str]) -> int:
        args = parser.parse_args(arguments)
        report = measure(run_options(args), _read(Path(args.passage)))
        write_json(args.json, report)
        return EXIT_FAILED if report.failures else 0

    return run_tool("tercet quality", act, argv)


def _read(path: Path) -> Passage:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Passage)
    except msgspec.MsgspecError as error:
        raise ToolMisused(f"--passage: {path}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
