"""The error tree of model_executor.

ExecutorError
├── ModelRefused                the model, or an option for it, cannot be honoured; starting again will not help
│   ├── ConfigRefused           a field of config.json, or an option, with the value given and what is possible
│   ├── UnknownArchitecture     no reader for this model family
│   ├── CheckpointBroken        a file that is missing, cut or no checkpoint
│   ├── WeightsRefused          tensors missing, unexpected, of another shape, or not finite
│   ├── LayersRefused           a choice of layers that the model does not have
│   ├── DeviceUnavailable       the device that was asked for is not there, or cannot compute in the dtype
│   ├── MemoryTooSmall          the KV pool that fits is smaller than what the options ask for
│   ├── NativeUnavailable       the compiled library is missing or cannot run here
│   └── NoKernel                no registered kernel serves an operator of the model
├── PlanInvalid                 a step plan that contradicts the executor's state
└── ToolMisused                 a flag or a value of a tool's command line
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

NAMES_SHOWN = 8


class ExecutorError(Exception):
    """Root of every error that model_executor raises on purpose."""


class ModelRefused(ExecutorError):
    """The model cannot be served as it is; the message names the culprit.

    Args:
        message: what is wrong; names in it may come from files.
    """

    def __init__(self, message: str) -> None:
        # One line that every log and wire takes, whatever a file calls its tensors.
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


class ConfigRefused(ModelRefused):
    """A field of the model's configuration, or an option, that cannot be honoured exactly.

    Args:
        field: dotted path of the field.
        value: what was given.
        reason: what is possible, as a clause that follows the value.
        path: the file that holds the field; None for an option.
    """

    def __init__(self, field: str, value: object, reason: str, path: Path | None = None) -> None:
        where = "" if path is None else f"{path}: "
        super().__init__(f"{where}{field}: {_shown(value)}: {reason}")
        self.field = field
        self.value = value
        self.path = path


class UnknownArchitecture(ModelRefused):
    """No reader for this model family.

    Args:
        given: what config.json says.
        known: the architectures that can be served.
        path: of the config.json.
    """

    def __init__(self, given: str, known: Iterable[str], path: Path) -> None:
        names = ", ".join(sorted(known))
        super().__init__(f"{path}: architectures: {given} is unknown; known: {names}")
        self.given = given
        self.path = path


class CheckpointBroken(ModelRefused):
    """A file of the model folder that is missing, cut or damaged.

    Args:
        path: the file or folder.
        fault: what is wrong with it.
    """

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(f"{path}: {fault}")
        self.path = path
        self.fault = fault


class WeightsRefused(ModelRefused):
    """The checkpoint's tensors are not those of the model.

    Args:
        path: the model folder.
        missing: tensors that the model needs and the checkpoint lacks.
        unexpected: tensors that no parameter, plan or rule accounts for.
        mismatched: tensors with the fault they have (shape, dtype, values).
    """

    def __init__(
        self,
        path: Path,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[str] = (),
    ) -> None:
        kinds = {"missing": missing, "unexpected": unexpected, "mismatched": mismatched}
        text = "; ".join(f"{len(names)} {kind}: {_listed(names)}" for kind, names in kinds.items() if names)
        super().__init__(f"{path}: {text}")
        self.path = path
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = tuple(mismatched)


class LayersRefused(ModelRefused):
    """A choice of layers that cannot be made.

    Args:
        given: the choice, as indices or as the option was written.
        reason: why not, naming the limit.
    """

    def __init__(self, given: Sequence[int] | str, reason: str) -> None:
        super().__init__(f"layers: {given if isinstance(given, str) else list(given)}: {reason}")
        self.given = given if isinstance(given, str) else tuple(given)


class NativeUnavailable(ModelRefused):
    """The compiled library is missing or cannot run here; torch can compute instead.

    Args:
        field: what is wanted of it.
        given: what there is.
        why: one clause.
    """

    def __init__(self, field: str, given: object, why: str) -> None:
        super().__init__(f"{field}: {given}: {why}")
        self.field = field
        self.given = given


class DeviceUnavailable(ModelRefused):
    """The device is not there, or cannot compute in the dtype.

    Args:
        field: the option at fault.
        given: its value.
        why: one clause.
    """

    def __init__(self, field: str, given: object, why: str) -> None:
        super().__init__(f"{field}: {given}: {why}")
        self.field = field
        self.given = given


class MemoryTooSmall(ModelRefused):
    """What the options ask for does not fit.

    Args:
        field: the option to change.
        given: its value.
        limit: the value that would fit.
        message: one line naming all three.
    """

    def __init__(self, field: str, given: int, limit: int, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.given = given
        self.limit = limit


class NoKernel(ModelRefused):
    """No registered kernel serves an operator.

    Args:
        operator: such as "attention".
        problem: what it must do, as text.
        reasons: of each kernel, why it does not fit.
    """

    def __init__(self, operator: str, problem: str, reasons: Mapping[str, Sequence[str]]) -> None:
        refused = "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())
        super().__init__(f"{operator} of {problem}: no kernel fits ({refused})")
        self.operator = operator
        self.reasons = reasons


class PlanInvalid(ExecutorError):
    """A step plan that contradicts the executor's state.

    Args:
        field: of the plan.
        limit: what is allowed.
        given: what came.
    """

    def __init__(self, field: str, limit: object, given: object) -> None:
        super().__init__(f"plan: {field}: {given}: allowed is {limit}")
        self.field = field
        self.limit = limit
        self.given = given


class ToolMisused(ExecutorError):
    """A flag or a value of a tool's command line is wrong; the message names it."""


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
