from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from model_executor.attention.spec import KernelSpec, Limits
from tests.model_executor.paged import make_problem

NARROW = Limits(
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.float16}),
    head_dims=(64, 256),
    head_dim_multiple=16,
    block_sizes=(16, 128),
    window=False,
    soft_cap=False,
)
FITTING = replace(make_problem(head_dim=64, block_size=16, dtype=torch.float16), device="cuda")


def test_what_fits_has_no_reasons() -> None:
    assert NARROW.reject(FITTING) == ()
    assert Limits().reject(make_problem(window=3, soft_cap=2.0)) == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "cpu"),
        ("dtype", torch.float32),
        ("head_dim", 32),
        ("head_dim", 272),
        ("head_dim", 72),
        ("block_size", 8),
        ("window", 7),
        ("soft_cap", 3.0),
    ],
)
def test_each_limit_gives_its_reason(field: str, value: Any) -> None:
    reasons = NARROW.reject(replace(FITTING, **{field: value}))
    assert len(reasons) == 1
    assert field in reasons[0]
    assert str(value).removesuffix(".0") in reasons[0]


def test_all_reasons_are_given() -> None:
    assert len(NARROW.reject(make_problem(head_dim=12, window=2, soft_cap=1.0))) == 7


def test_a_kernel_that_is_not_there_says_so() -> None:
    spec = KernelSpec("absent", Limits(), lambda _: None, available=lambda: "package is not installed")
    assert spec.reject(FITTING) == ("package is not installed",)


def test_a_problem_as_text() -> None:
    text = str(make_problem(window=9, soft_cap=50.0))
    assert text == "cpu float32 4/2 heads of 8, blocks of 4, window 9, soft cap 50"
