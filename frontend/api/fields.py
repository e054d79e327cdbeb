"""What a request field is to this server: acted on, harmless, refused for asking something else, or unknown."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

import msgspec
from msgspec import Raw, Struct

from frontend.api import schema
from frontend.errors import InvalidRequest, shown

logger = logging.getLogger(__name__)

_NONE: Final = (None,)
_OFF: Final = (None, False)
_ZERO: Final = (None, 0, 0.0)
_ONE: Final = (None, 1, 1.0)
_LIST: Final[tuple[object, ...]] = (None, [])
_MAP: Final[tuple[object, ...]] = (None, {})

# Fields that would change the answer and are not supported, with the values that ask for nothing.
REFUSED: Final[Mapping[str, tuple[object, ...]]] = {
    "allowed_token_ids": _LIST,
    "audio": _NONE,
    "bad_words": _LIST,
    "best_of": _ONE,
    "chat_template": _NONE,
    "custom_logit_processor": _NONE,
    "documents": _LIST,
    "dry_multiplier": _ZERO,
    "early_stopping": _OFF,
    "ebnf": _NONE,
    "echo": _OFF,
    "frequency_penalty": _ZERO,
    "function_call": (None, "none"),
    "functions": _LIST,
    "grammar": _NONE,
    "guided_choice": _LIST,
    "guided_decoding_backend": _NONE,
    "guided_grammar": _NONE,
    "guided_json": _NONE,
    "guided_regex": _NONE,
    "guided_whitespace_pattern": _NONE,
    "json_schema": _NONE,
    "kv_transfer_params": _NONE,
    "length_penalty": (None, 0, 0.0, 1, 1.0),
    "logit_bias": _MAP,
    "logits_processors": _LIST,
    "lora_path": _NONE,
    "lora_request": _NONE,
    "mirostat_mode": _ZERO,
    "mm_processor_kwargs": _MAP,
    "modalities": (None, ["text"]),
    "no_repeat_ngram_size": _ZERO,
    "num_beams": _ONE,
    "presence_penalty": _ZERO,
    "prompt_embeds": _NONE,
    "prompt_logprobs": _OFF,
    "regex": _NONE,
    "repetition_penalty": _ONE,
    "response_format": (None, {"type": "text"}),
    "return_tokens_as_token_ids": _OFF,
    "structural_tag": _NONE,
    "structured_outputs": _MAP,
    "suffix": (None, ""),
    "tfs_z": _ONE,
    "tool_choice": (None, "none"),
    "tools": _LIST,
    "top_a": _ZERO,
    "truncate_prompt_tokens": _NONE,
    "typical_p": _ONE,
    "use_beam_search": _OFF,
    "web_search_options": _NONE,
    "xtc_probability": _ZERO,
}

# Fields that clients send and that change nothing here.
HARMLESS: Final = frozenset(
    {
        "include_reasoning",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "request_id",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
        "verbosity",
    }
)

MAX_NAMES: Final = 32
MAX_NAME_LENGTH: Final = 64
MAX_REMEMBERED: Final = 512


class FieldCheck:
    """Judges the fields of bodies of one kind.

    Args:
        kind: the Struct that holds the fields the server acts on.
        strict: whether an unknown field is an error.
    """

    def __init__(self, kind: type[Struct], *, strict: bool) -> None:
        self._known = frozenset(field.encode_name for field in msgspec.structs.fields(kind)) | HARMLESS
        self._strict = strict
        self._named: set[str] = set()

    def ignored(self, body: bytes) -> list[str]:
        """Names of the fields that are left aside because nobody here knows them.

        Raises:
            InvalidRequest: the body is no object, asks for something unsupported, or has an unknown field (strict).
        """
        given = schema.fields(body)
        for name in given.keys() & REFUSED.keys():
            refuse_unless_neutral(name, given[name])
        unknown = [name for name in given if name not in self._known and name not in REFUSED]
        if unknown and self._strict:
            raise InvalidRequest(
                f"{shown(unknown[0])}: no field of this endpoint (--strict-fields)", param=unknown[0][:80]
            )
        self._name_once(unknown)
        return unknown

    def _name_once(self, unknown: list[str]) -> None:
        for name in unknown:
            short = name[:MAX_NAME_LENGTH]
            if short not in self._named and len(self._named) < MAX_REMEMBERED:
                self._named.add(short)
                logger.warning("request field %s is not known and was ignored", ascii(short))


def refuse_unless_neutral(name: str, raw: Raw) -> None:
    """Pass a field of REFUSED whose value asks for nothing.

    Raises:
        InvalidRequest: it asks for something.
    """
    value = schema.value(raw)
    for neutral in REFUSED[name]:
        # true equals 1 in Python, but not in a request.
        if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
            return
    raise InvalidRequest(f"{name}: is not supported by this server; leave it out", param=name, code="unsupported_field")


def header_value(names: list[str]) -> str:
    """Names as the value of a response header: quoted where they hold odd characters, and bounded."""
    words = [quote(name[:MAX_NAME_LENGTH], safe="") for name in names[:MAX_NAMES]]
    return ", ".join(words + ["..."] * (len(names) > MAX_NAMES))
