"""The default model's folder against what transformers makes of the same GGUF file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from scripts.default_model import (
    NAME,
    RECORD,
    ConversionError,
    Source,
    find_source,
    is_current,
    parameter_name,
    rotary_rows,
    to_bfloat16,
)

ROOT = Path(__file__).resolve().parents[2]

CORPUS = (
    "Hello, world! It's a nice day, isn't it? They'll say we've won.",
    "The capital of France is Paris.\nThe capital of Italy is Rome.\n",
    "def f(x: int) -> str:\n    if x > 10:\n\t\treturn f'{x:03d}'\n    return ''\n",
    'for (int i = 0; i < n; ++i) { a[i] = "\\x41\\n"; }  // comment',
    "SELECT * FROM t WHERE a >= 1.5e-3 AND b != 'x''y';",
    "<html lang=\"en\"><body class='a b'>&nbsp;</body></html>",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f\u4e16\u754c\u3001\uc548\ub155\ud558\uc138\uc694",
    "\u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439, \u043c\u0438\u0440.",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f1eb\U0001f1f7\U0001f44d\U0001f3fd \U0001f389",
    "e\u0301 \u00e9 \u00df \u0130 \ufb01 \u2028 \u2029 \u0085 \u00a0 \ufeff \u200b",
    "  leading, trailing  ",
    "a\t\tb\n\n\n\nc\r\n\r\nd   e      f",
    "\n",
    " ",
    "",
    "12345 3.14159 1,000,000 0x1F -7 2024-01-01T00:00:00Z 50% 1st",
    "a1b22c333 v1.2.3 10^6 H2O",
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><repo_name>x<file_sep>y<|im_end|> <|im_end|>",
    "<|im_start |> <| im_end|> <|im_end",
    "\x00\x01\x7f\x80\xff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 8,
)
MESSAGES: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": " 12  34 \U0001f600"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "<|im_end|>"},
    ],
)


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    """The GGUF file; whatever transformers makes of it, its header is parsed once."""
    import gguf

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        yield find_source()


@pytest.fixture(scope="module")
def theirs(source: Source) -> Any:
    """The tokenizer that transformers builds from the GGUF file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name, local_files_only=True)


@pytest.fixture(scope="module")
def named(theirs: Any) -> Tokenizer:
    """The same with the pre-tokenizer that the file names ("smollm") and transformers does not read."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer = Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def ours(default_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(default_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def loaded(default_model: Path) -> Any:
    """The folder as transformers loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_model, local_files_only=True)


@pytest.mark.real_model
@pytest.mark.parametrize("text", CORPUS)
def test_ids_equal_transformers(ours: Tokenizer, theirs: Any, text: str) -> None:
    ids = ours.encode(text).ids
    assert ids == theirs(text).input_ids
    assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.real_model
def test_blanks_before_a_number_stay_one_piece(ours: Tokenizer, theirs: Any, named: Tokenizer) -> None:
    text = "x =    42"
    assert ours.encode(text).tokens == ["x", "\u0120=", "\u0120\u0120\u0120\u0120", "4", "2"]
    assert ours.encode(text).ids == named.encode(text).ids
    assert ours.encode(text).ids != theirs(text).input_ids


@pytest.mark.real_model
@given(text=st.text(max_size=60) | st.text(alphabet="ab1 \n\t09\u00bd\u4e8c<|im_start>'s", max_size=60))
def test_ids_equal_the_named_tokenizer_on_any_text(ours: Tokenizer, named: Tokenizer, text: str) -> None:
    ids = ours.encode(text).ids
    assert ids == named.encode(text).ids
    assert ours.decode(ids, skip_special_tokens=False) == named.decode(ids, skip_special_tokens=False)


@pytest.mark.real_model
@pytest.mark.parametrize("text", [*CORPUS, "x =    42"])
def test_transformers_loads_the_folder_with_the_same_ids(loaded: Any, ours: Tokenizer, text: str) -> None:
    assert loaded(text).input_ids == ours.encode(text).ids


@pytest.mark.real_model
@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("prompt", [False, True])
def test_chat_template_renders_alike(
    default_model: Path, loaded: Any, theirs: Any, messages: list[dict[str, str]], prompt: bool
) -> None:
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert (default_model / "chat_template.jinja").read_text(encoding="utf-8") == theirs.chat_template


@pytest.mark.real_model
def test_special_tokens(default_model: Path, loaded: Any, theirs: Any) -> None:
    assert loaded.special_tokens_map == theirs.special_tokens_map
    generation = json.loads((default_model / "generation_config.json").read_text(encoding="utf-8"))
    assert [loaded.convert_ids_to_tokens(token) for token in generation["eos_token_id"]] == [
        "<|im_end|>",
        "<|endoftext|>",
    ]


@pytest.mark.real_model
def test_weights_and_config_equal_transformers(default_model: Path, source: Source) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32, local_files_only=True
    )
    expected = model.state_dict()
    with safe_open(default_model / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert names == set(expected) - {"lm_head.weight"}
        for name in names:
            assert torch.equal(file.get_tensor(name), expected[name].to(torch.bfloat16)), name
    config = AutoConfig.from_pretrained(default_model, local_files_only=True)
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert getattr(config, field) == getattr(model.config, field)
    for field in ("rope_parameters", "tie_word_embeddings", "max_position_embeddings", "vocab_size", "hidden_act"):
        assert getattr(config, field) == getattr(model.config, field)
    assert np.float32(config.rms_norm_eps) == np.float32(model.config.rms_norm_eps)


@pytest.mark.real_model
def test_second_run_keeps_the_folder(default_model: Path, source: Source) -> None:
    assert is_current(default_model, source)
    before = (default_model / "model.safetensors").stat().st_mtime_ns
    command = [sys.executable, str(ROOT / "scripts" / "default_model.py"), "--cache", str(default_model.parent)]
    done = subprocess.run([*command, "--print-path"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == [str(default_model)]
    assert (default_model / "model.safetensors").stat().st_mtime_ns == before


def test_a_folder_of_another_source_or_with_a_lost_file_is_not_current(tmp_path: Path) -> None:
    source = Source(tmp_path / "x.gguf", "package==1 sha256:abc")
    assert not is_current(tmp_path, source)
    (tmp_path / "config.json").write_text("{}")
    record = {"format": 1, "source": source.identity, "model": NAME, "files": {"config.json": 2}}
    (tmp_path / RECORD).write_text(json.dumps(record))
    assert is_current(tmp_path, source)
    assert not is_current(tmp_path, Source(source.path, "package==2 sha256:abc"))
    (tmp_path / "config.json").write_text("{")
    assert not is_current(tmp_path, source)
    (tmp_path / "config.json").unlink()
    assert not is_current(tmp_path, source)


def test_parameter_names() -> None:
    assert parameter_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert parameter_name("output_norm.weight") == "model.norm.weight"
    for wrong in ("blk.x.attn_q.weight", "blk.1.attn_q.bias", "rope_freqs.weight", "blk.1.other.weight"):
        with pytest.raises(ConversionError, match=wrong):
            parameter_name(wrong)


def test_rotary_rows_puts_pair_members_half_a_head_apart() -> None:
    weight = np.arange(8, dtype=np.float32).reshape(8, 1)
    assert rotary_rows(weight, heads=2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_to_bfloat16_rounds_as_torch_does(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    expected = torch.from_numpy(array).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(to_bfloat16(array), expected)
