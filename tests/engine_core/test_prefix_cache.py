"""Names of blocks, and finding blocks by name."""

from __future__ import annotations

from array import array

import pytest

from engine_core.prefix_cache import NAME_BYTES, PrefixCache, block_name, root_name


def names(salt: str | None, *blocks: list[int]) -> list[bytes]:
    chain = [root_name(salt)]
    for block in blocks:
        chain.append(block_name(chain[-1], array("i", block)))
    return chain[1:]


def test_equal_content_has_equal_names() -> None:
    assert names("s", [1, 2], [3, 4]) == names("s", [1, 2], [3, 4])
    assert all(len(name) == NAME_BYTES for name in names(None, [1]))


def test_a_name_depends_on_everything_before() -> None:
    assert names(None, [1, 2], [3, 4])[1] != names(None, [1, 9], [3, 4])[1]
    assert names(None, [1, 2])[0] != names(None, [2, 1])[0]


def test_salts_never_meet() -> None:
    prompts = {names(salt, [1, 2])[0] for salt in (None, "a", "ab", "b", "\x01", "\x01a")}
    assert len(prompts) == 6


def test_salt_and_prompt_do_not_run_into_each_other() -> None:
    """Salt "ab" with prompt "c", and salt "a" with prompt "bc"."""
    assert names("ab", [ord("c")])[0] != names("a", [ord("b"), ord("c")])[0]
    assert names("ab", [ord("c")])[0] != names("a", [ord("b")], [ord("c")])[1]


def test_the_longest_known_prefix_is_found() -> None:
    cache = PrefixCache()
    chain = names(None, [1], [2], [3])
    cache.add(chain[0], 10)
    cache.add(chain[2], 12)
    assert cache.find(chain, 3) == [10]
    cache.add(chain[1], 11)
    assert cache.find(chain, 3) == [10, 11, 12]
    assert cache.find(chain, 2) == [10, 11]
    assert cache.find(names(None, [1], [5]), 2) == [10]


def test_the_first_block_of_a_name_keeps_it() -> None:
    cache = PrefixCache()
    name = names(None, [1])[0]
    cache.add(name, 1)
    cache.add(name, 2)
    assert cache.find([name], 1) == [1]
    assert 2 not in cache


def test_forgotten_blocks_are_not_found() -> None:
    cache = PrefixCache()
    name = names(None, [1])[0]
    cache.add(name, 1)
    cache.forget(1)
    assert cache.find([name], 1) == []
    assert cache.name_of(1) is None
    assert cache.violations() == []


def test_a_block_has_one_name() -> None:
    cache = PrefixCache()
    cache.add(names(None, [1])[0], 1)
    with pytest.raises(AssertionError, match="has a name"):
        cache.add(names(None, [2])[0], 1)
