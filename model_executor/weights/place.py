"""Writes rows of a checkpoint tensor to their place in a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from model_executor import device
from model_executor.models.decoder import Decoder
from model_executor.models.spec import Dtype
from model_executor.weights.parameters import Parameter
from model_executor.weights.plan import DTYPES


def targets(model: Decoder, parameters: tuple[Parameter, ...]) -> Mapping[str, Tensor]:
    """The model's parameters by name; they are exactly those of the plan."""
    found = {name: parameter.data for name, parameter in model.named_parameters()}
    wanted = {parameter.name: parameter.shape for parameter in parameters}
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == wanted
    return found


def dtype_of(model: Decoder) -> Dtype:
    """The dtype of the model's parameters."""
    return next(name for name in DTYPES.values() if device.DTYPES[name] == model.embedding.weight.dtype)


def rows_at_once(shape: tuple[int, ...], item_bytes: int, limit: int) -> int:
    """Rows of a tensor that fit into `limit` bytes, at least one."""
    return max(1, limit // max(1, prod(shape[1:]) * item_bytes))


def place(target: Tensor, rows: Tensor, first: int, *, transposed: bool, rounded: torch.dtype | None = None) -> bool:
    """Copy rows [n, ...] to first .. first + n - 1 of the parameter's output axis, in its dtype and on its device;
    before that they are `rounded` to a narrower one, if one is given.

    The output axis of a parameter of three axes, (experts, in, out), is that of all experts one after the other; rows
    are of one expert.

    Returns:
        Whether all of them are finite there.
    """
    rows = rows.to(target.device) if rounded is None else rows.to(target.device, rounded)
    if target.dim() == 3:  # (experts, in, out)
        expert, first = divmod(first, target.shape[2])
        target = target[expert]
    if transposed:
        target[:, first : first + rows.shape[0]] = rows.t()
    else:
        target[first : first + rows.shape[0]] = rows
    narrower = torch.finfo(target.dtype).max < torch.finfo(rows.dtype).max
    return _finite(rows.to(target.dtype) if narrower else rows)


def _finite(rows: Tensor) -> bool:
    # One pass without a copy: a NaN is both the least and the greatest of any rows that hold it.
    least, greatest = rows.aminmax()
    return bool(least.isfinite()) and bool(greatest.isfinite())
