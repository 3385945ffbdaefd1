"""Control tokens that a conversation spells out stay text, and everything else is encoded as before."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from harness.chat_tokenizers import CHATML, CONTROLS, chat_tokenizer
from harness.checkpoints import write_byte_fallback_tokenizer, write_byte_level_tokenizer, write_tokenizer
from paceline.errors import RequestError
from paceline.tokenizer.tokenizer import Tokenizer

WRITERS = {"words": write_tokenizer, "byte_fallback": write_byte_fallback_tokenizer, "byte_level": write_byte_level_tokenizer}
WORDS = ["the", " cat", "\n", "  ", "é", "日", "😀", "<", ">", "|", "im_end", "<think>", "\t", "▁a", "<tool>"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory, mini_dir: Path) -> dict[str, Tokenizer]:
    found = {kind: Tokenizer.open(write(tmp_path_factory.mktemp(kind))) for kind, write in WRITERS.items()}
    return {**found, "gguf": chat_tokenizer(CHATML), "mini": Tokenizer.open(mini_dir)}


def encoded(tokenizer: Tokenizer, template: str, *values: str) -> list[int]:
    """Ids of a template with values in place of {}."""
    escaped = tokenizer.control_token_escaper.escape(list(values), other_texts=[template])
    return tokenizer.control_token_escaper.encode(escaped, escaped.unescape_json(template.format(*escaped.value)))


@pytest.mark.parametrize("kind", [*WRITERS, "gguf", "mini"])
def test_control_tokens_of_the_template_text_are_encoded_as_tokens(tokenizers: dict[str, Tokenizer], kind: str, seed: int) -> None:
    tokenizer, rng = tokenizers[kind], random.Random(seed)
    controls = [tokenizer.piece(token_id) for token_id in tokenizer.special_token_ids]
    for _ in range(300):
        text = "".join(rng.choice(controls if rng.random() < 0.3 else WORDS) for _ in range(rng.randrange(1, 12)))
        assert encoded(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False), text


@pytest.mark.parametrize("kind", [*WRITERS, "gguf", "mini"])
def test_control_tokens_in_a_template_value_are_encoded_as_text(tokenizers: dict[str, Tokenizer], kind: str, seed: int) -> None:
    tokenizer, rng = tokenizers[kind], random.Random(seed)
    controls = [tokenizer.piece(token_id) for token_id in tokenizer.special_token_ids]
    unknown = tokenizer.encode("\U0001f9ff", add_special_tokens=False)
    for _ in range(300):
        text = "".join(rng.choice(controls if rng.random() < 0.5 else WORDS) for _ in range(rng.randrange(1, 12)))
        assert not tokenizer.special_token_ids.intersection(set(encoded(tokenizer, "{}", text)) - set(unknown)), text


@pytest.mark.parametrize("text", [*CONTROLS, "a<|im_end|>b", "<<|im_end|>>", "<|im_<|im_end|>end|>", "<|im_start|><|im_end|>"])
def test_control_token_in_a_template_value_decodes_to_its_text(text: str) -> None:
    tokenizer = chat_tokenizer(CHATML)
    ids = encoded(tokenizer, "<|im_start|>{}<|im_end|>", text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"<|im_start|>{text}<|im_end|>"
    assert [token_id for token_id in ids if token_id in tokenizer.special_token_ids] == tokenizer.encode("<|im_start|><|im_end|>")


@pytest.mark.parametrize(
    ("template", "values"),
    [
        ("{}{}", ("a<|im", "_end|>b")),
        ("{}{}", ("<", "|im_end|>")),
        ("<|im{}", ("_end|>",)),
        ("{}|im_end|>", ("x<",)),
        ("<{}", ("|im_end|>",)),
    ],
)
def test_control_token_joined_from_two_values_is_text(template: str, values: tuple[str, ...]) -> None:
    tokenizer = chat_tokenizer(CHATML)
    ids = encoded(tokenizer, template, *values)
    assert not tokenizer.special_token_ids.intersection(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == template.format(*values)


@pytest.mark.parametrize("write", [ascii, repr, lambda text: text * 2, lambda text: text[:3], lambda text: ""])
def test_control_token_in_a_value_the_template_changes_is_text(write: Any) -> None:
    tokenizer = chat_tokenizer(CHATML)
    escaped = tokenizer.control_token_escaper.escape(["x<|im_end|>"], other_texts=[])
    ids = tokenizer.control_token_escaper.encode(escaped, escaped.unescape_json(write(escaped.value[0])))
    assert not tokenizer.special_token_ids.intersection(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == write("x<|im_end|>")


def test_template_values_without_control_tokens_are_unchanged() -> None:
    value = [{"role": "user", "content": "a < b > c |im_end| <tool> <think>", "n": 3, "list": [None, True, "<|im_endx"]}]
    escaped = chat_tokenizer(CHATML).control_token_escaper.escape(value, other_texts=[])
    assert not escaped.contains_control_text
    assert escaped.value == value


def test_control_tokens_in_keys_and_nested_values_are_escaped() -> None:
    value = [{"arguments": {"a<|im_end|>": ["<|im_start|>", {"x": "</think>"}]}}]
    escaped = chat_tokenizer(CHATML).control_token_escaper.escape(value, other_texts=[])
    assert escaped.contains_control_text
    assert not any(control in str(escaped.value) for control in CONTROLS)
    assert escaped.restore(escaped.unescape_json(str(escaped.value))) == str(value)


def test_texts_excepted_from_escaping_keep_their_control_tokens() -> None:
    escaped = chat_tokenizer(CHATML).control_token_escaper.escape(
        ["a</think>b", "a</think>b"], other_texts=[], exempt_texts={1: ["</think>"]}
    )
    assert escaped.value[0] != "a</think>b"
    assert escaped.value[1] == "a</think>b"


def test_private_use_characters_of_a_conversation_are_kept() -> None:
    tokenizer = chat_tokenizer(CHATML)
    text = "".join(map(chr, range(0xE000, 0xE100))) + "<|im_end|>"
    ids = encoded(tokenizer, "{}", text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert not tokenizer.special_token_ids.intersection(ids)


def test_conversation_with_all_private_use_characters_is_refused() -> None:
    with pytest.raises(RequestError, match="private-use character"):
        encoded(chat_tokenizer(CHATML), "{}", "".join(map(chr, range(0xE000, 0xF900))) + "<|im_end|>")


@pytest.mark.parametrize("text", ["<" * 1_000_000, "<|im_" * 200_000, "<|im_end|>" * 100_000])
def test_escaping_control_tokens_of_a_megabyte_takes_under_two_seconds(text: str) -> None:
    controls = chat_tokenizer(CHATML).control_token_escaper
    begin = time.perf_counter()
    controls.escape([text], other_texts=[])
    assert time.perf_counter() - begin < 2
