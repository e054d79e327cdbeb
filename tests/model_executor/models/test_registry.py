from __future__ import annotations

import pytest

from model_executor.models.registry import ARCHITECTURES, MODEL_TYPES, family


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_entry_loads(architecture: str) -> None:
    found = family(architecture)
    assert callable(found.read)
    assert "{source}" in found.names.block


def test_model_types_name_known_architectures() -> None:
    assert set(MODEL_TYPES.values()) == set(ARCHITECTURES)
