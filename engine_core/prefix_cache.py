"""Which block holds the KV of which tokens, found by content.

The name of a full block is a digest over its parent's name and its own tokens; the first parent is a digest of the
salt. Names of equal length chain over fields of fixed length, so equal names mean equal salt and equal tokens from
position 0 on: no boundary between salt and prompt can be confused, and BLAKE2b leaves no collision to be found.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

NAME_BYTES: Final = 32


def root_name(salt: str | None) -> bytes:
    """The parent of first blocks: one for each salt, and one for none."""
    text = b"" if salt is None else b"\x01" + salt.encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=NAME_BYTES, person=b"prefix salt").digest()


def block_name(parent: bytes, tokens: array[int]) -> bytes:
    """The name of a full block of `tokens` that follows `parent`."""
    return blake2b(parent + tokens.tobytes(), digest_size=NAME_BYTES, person=b"prefix block").digest()


class PrefixCache:
    """A one-to-one map between names and blocks."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._name_of

    def find(self, names: Sequence[bytes], limit: int) -> list[int]:
        """Blocks of the longest known prefix of `names`, at most `limit`."""
        found: list[int] = []
        for name in names[:limit]:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def block_of(self, name: bytes) -> int | None:
        """The block that is found under the name."""
        return self._block_of.get(name)

    def add(self, name: bytes, block: int) -> None:
        """Make a block findable. Where the name is known already the older block stays, and this one is not shared."""
        if name not in self._block_of:
            assert block not in self._name_of, f"block {block} has a name already"
            self._block_of[name] = block
            self._name_of[block] = name

    def forget(self, block: int) -> None:
        """The block is about to hold something else."""
        del self._block_of[self._name_of.pop(block)]

    def name_of(self, block: int) -> bytes | None:
        """The name under which the block is found."""
        return self._name_of.get(block)

    def violations(self) -> list[str]:
        """Which invariants do not hold."""
        turned = {block: name for name, block in self._block_of.items()}
        return [] if turned == self._name_of else ["prefix cache: names and blocks are not one to one"]
