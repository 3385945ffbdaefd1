"""Allowed and refused tokenizer metadata of GGUF files."""

import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from paceline.errors import CheckpointError
from paceline.tokenizer.byte_level import SPLIT_RULES
from paceline.tokenizer.gguf import read_gguf_tokenizer
from paceline.tokenizer.tokenizer import Tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTE_LEVEL: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*BYTES, "th", "the", "Ġthe", "<|im_start|>", "<|im_end|>", "<tool>", "[PAD262]", "[PAD263]"],
    "tokenizer.ggml.token_type": [1] * (len(BYTES) + 3) + [3, 3, 4, 5, 5],
    "tokenizer.ggml.merges": ["t h", "th e", "Ġ the"],
    "tokenizer.ggml.eos_token_id": len(BYTES) + 4,
    "tokenizer.ggml.bos_token_id": len(BYTES) + 3,
    "tokenizer.chat_template": "{{ bos_token }}{% for one in messages %}{{ one.content }}{{ eos_token }}{% endfor %}",
}
THE, START, END, TOOL = (len(BYTES) + offset for offset in (1, 3, 4, 5))
PIECES = ["▁", "a", "b", "ab", "▁a", "▁ab", "aa", "aaa", "ba"]
SENTENCEPIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *PIECES],
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(PIECES))],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
}


def opened(base: dict[str, Any], **changes: Any) -> Tokenizer:
    return Tokenizer.from_gguf({**base, **{f"tokenizer.ggml.{name}": value for name, value in changes.items()}}, "x.gguf")


def pieces(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[str]:
    return [tokenizer.piece(token_id) for token_id in tokenizer.encode(text, add_special_tokens=add_special_tokens)]


def merged_like_sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """The best score first, the left one of equals, until nothing can be merged."""
    symbols = list(text)
    while True:
        pairs = [(-scores[one + two], index) for index, (one, two) in enumerate(itertools.pairwise(symbols)) if one + two in scores]
        if not pairs:
            return symbols
        _, index = min(pairs)
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]


def test_gguf_control_tokens_are_special_and_user_defined_ones_text() -> None:
    tokenizer = opened(BYTE_LEVEL)
    ids = tokenizer.encode("<|im_start|>the<tool><|im_end|>")
    assert ids == [START, THE, TOOL, END]
    assert tokenizer.decode(ids) == "the<tool>"
    assert tokenizer.special_token_ids == {START, END}


def test_unused_gguf_ids_at_the_end_are_not_in_the_vocabulary() -> None:
    assert opened(BYTE_LEVEL).vocab_size == TOOL + 1
    assert opened(BYTE_LEVEL, padding_token_id=TOOL + 1).vocab_size == TOOL + 2


@pytest.mark.parametrize(("add_bos", "add_eos"), [(False, False), (True, False), (False, True), (True, True)])
def test_gguf_tokenizer_adds_bos_and_eos_as_the_file_requires(*, add_bos: bool, add_eos: bool) -> None:
    tokenizer = opened(BYTE_LEVEL, add_bos_token=add_bos, add_eos_token=add_eos)
    assert tokenizer.encode("the") == [START] * add_bos + [THE] + [END] * add_eos
    assert tokenizer.encode("the", add_special_tokens=False) == [THE]


def test_gguf_tokenizer_adds_bos_by_default_depending_on_its_kind() -> None:
    assert pieces(opened(SENTENCEPIECE), "a", add_special_tokens=True) == ["<s>", "▁a"]
    assert pieces(opened(BYTE_LEVEL), "the", add_special_tokens=True) == ["the"]
    assert pieces(opened(BYTE_LEVEL, pre="llama-bpe"), "the", add_special_tokens=True) == ["<|im_start|>", "the"]


def test_gguf_word_that_is_a_token_may_ignore_its_merges() -> None:
    assert pieces(opened(BYTE_LEVEL, pre="llama-bpe", merges=["t h"]), "the") == ["the"]
    assert pieces(opened(BYTE_LEVEL, merges=["t h"]), "the") == ["th", "e"]


@pytest.mark.parametrize("name", sorted(SPLIT_RULES))
def test_every_gguf_pre_tokenizer_keeps_the_whole_text(name: str) -> None:
    tokenizer = opened(BYTE_LEVEL, pre=name)
    text = "I'm 12345 HTTPServers,\r\n\n  it's\tCAFÉ 你好ひらカナ 한국 ½²٣ $+<=>^~|`_/\\ 😀\u200d \u00a0\u3000x  "
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_gguf_without_a_pre_tokenizer_name_gets_a_notice() -> None:
    metadata = {key: value for key, value in BYTE_LEVEL.items() if key != "tokenizer.ggml.pre"}
    tokenizer = Tokenizer.from_gguf(metadata, "x.gguf")
    assert len(tokenizer.notices) == 1
    assert "x.gguf does not specify how" in tokenizer.notices[0]
    assert opened(BYTE_LEVEL).notices == ()
    assert tokenizer.encode("the 12 +=") == opened(BYTE_LEVEL, pre="default").encode("the 12 +=")


def test_sentencepiece_merges_follow_scores_with_ties_from_the_left(seed: int, large_counts: bool) -> None:
    rng = random.Random(seed)
    for _ in range(300 if large_counts else 30):
        ranks = rng.sample(range(len(PIECES)), len(PIECES))
        scores = dict(zip(PIECES, (-float(rank) for rank in ranks), strict=True))
        tokenizer = opened(SENTENCEPIECE, scores=[0.0] * 259 + list(scores.values()), add_space_prefix=False)
        for _ in range(30):
            text = "".join(rng.choice("aab ") for _ in range(rng.randrange(1, 12)))
            expected = merged_like_sentencepiece(text.replace(" ", "▁"), scores)
            assert pieces(tokenizer, text) == expected, (text, scores)


def test_characters_outside_the_vocabulary_round_trip_as_bytes() -> None:
    tokenizer = opened(SENTENCEPIECE)
    assert pieces(tokenizer, "aé") == ["▁a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("a  é😀 b")) == "a  é😀 b"
    assert tokenizer.has_byte_pieces
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.push(token_id) for token_id in tokenizer.encode("a😀b")]
    assert "".join([*parts, detokenizer.flush()]) == "a😀b"
    assert "\ufffd" not in "".join(parts)


def test_sentencepiece_tokenizer_adds_a_leading_space_by_default() -> None:
    assert pieces(opened(SENTENCEPIECE), "ab") == ["▁ab"]
    without = opened(SENTENCEPIECE, add_space_prefix=False)
    assert pieces(without, "ab") == ["ab"]
    assert without.decode(without.encode(" ab")) == " ab"


def test_gemma4_merges_lines_and_encodes_to_the_last_duplicate_id() -> None:
    pieces_of_lines = ["\n", "\n\n", "▁", "a", "b", "#", "ab", "▁ab", "aab", "#", "<turn|>"]
    tokens = [*SENTENCEPIECE["tokenizer.ggml.tokens"][:259], *pieces_of_lines]
    types = [*SENTENCEPIECE["tokenizer.ggml.token_type"][:259], *[1] * (len(pieces_of_lines) - 1), 3]
    merges = ["a b", "▁ ab", "a ab"]
    roles = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    tokenizer = opened({}, model="gemma4", tokens=tokens, token_type=types, merges=merges, **roles)
    assert pieces(tokenizer, "ab ab\n\nab\n\n\n") == ["ab", "▁ab", "\n\n", "ab", "\n", "\n", "\n"]
    assert pieces(tokenizer, "aabab", add_special_tokens=True) == ["<s>", "aab", "ab"]
    assert pieces(tokenizer, "é<turn|>") == ["<0xC3>", "<0xA9>", "<turn|>"]
    assert tokenizer.encode("#", add_special_tokens=False) == [tokens.index("<turn|>") - 1]
    assert tokenizer.decode([tokens.index("#"), tokens.index("▁ab"), *tokenizer.encode(" é", add_special_tokens=False)]) == "# ab é"
    assert set(tokenizer.end_token_ids) == {2, tokens.index("<turn|>")}


def test_phi3_drops_whitespace_after_most_special_tokens() -> None:
    phi3 = Tokenizer.from_gguf({**SENTENCEPIECE, "general.architecture": "phi3"}, "x.gguf")
    assert pieces(phi3, "</s>\n a<s>  a") == ["</s>", "▁a", "<s>", "▁", "▁", "▁a"]
    assert pieces(opened(SENTENCEPIECE), "</s> a") == ["</s>", "▁", "▁a"]


def test_gguf_end_token_ids_are_those_with_a_role_or_known_text() -> None:
    assert opened(BYTE_LEVEL).end_token_ids == (END,)
    assert opened(BYTE_LEVEL, eos_token_id=TOOL, eot_token_id=START).end_token_ids == (START, END, TOOL)
    tokens = [*BYTES, "<|end|>", "<|return|>", "<|call|>"]
    several = {"tokens": tokens, "token_type": [1] * len(BYTES) + [3] * 3, "merges": [], "bos_token_id": 0}
    assert opened(BYTE_LEVEL, **several, eos_token_id=len(BYTES) + 1).end_token_ids == (len(BYTES) + 1, len(BYTES) + 2)


def test_chat_template_gets_the_special_tokens_of_the_gguf_file() -> None:
    tokenizer = opened(BYTE_LEVEL)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "the"}]) == [START, THE, END]


HOSTILE = [
    (BYTE_LEVEL, "model", None, "has no tokenizer.ggml.model"),
    (BYTE_LEVEL, "model", "bert", "'bert', a kind that is not supported"),
    (BYTE_LEVEL, "model", 7, "not a text"),
    (BYTE_LEVEL, "pre", "qwen99", "tokenizer.ggml.pre is 'qwen99', an unknown way to split text"),
    (BYTE_LEVEL, "tokens", None, "has no tokenizer.ggml.tokens"),
    (BYTE_LEVEL, "tokens", [], "no token at all"),
    (BYTE_LEVEL, "tokens", "abc", "not an array"),
    (BYTE_LEVEL, "tokens", ["a", 3], r"tokens\[1\] is 3, not a text"),
    (BYTE_LEVEL, "tokens", ["a", "\udcff"], r"tokens\[1\] is '\\udcff', not a text in UTF-8"),
    (BYTE_LEVEL, "tokens", ["a"] * len(BYTE_LEVEL["tokenizer.ggml.tokens"]), r"tokens\[0\] is 'a', which \d+ ids have"),
    (BYTE_LEVEL, "token_type", [1, 2], r"is '2 values', but there are \d+ tokens"),
    (BYTE_LEVEL, "token_type", [9] * len(BYTE_LEVEL["tokenizer.ggml.tokens"]), r"token_type\[0\] is 9, not a type"),
    (BYTE_LEVEL, "token_type", ["1"] * len(BYTE_LEVEL["tokenizer.ggml.tokens"]), "not an array of numbers"),
    (BYTE_LEVEL, "token_type", [[1]] * len(BYTE_LEVEL["tokenizer.ggml.tokens"]), "not an array of numbers"),
    (BYTE_LEVEL, "token_type", [[1], [1, 2]] * (len(BYTE_LEVEL["tokenizer.ggml.tokens"]) // 2), "not an array of numbers"),
    (SENTENCEPIECE, "model", "gemma4", "has no tokenizer.ggml.merges"),
    (BYTE_LEVEL, "merges", None, "has no tokenizer.ggml.merges"),
    (BYTE_LEVEL, "merges", ["t h", "t x"], r"merges\[1\] is 't x', not two tokens"),
    (BYTE_LEVEL, "merges", ["th"], r"merges\[0\] is 'th', not two tokens"),
    (BYTE_LEVEL, "eos_token_id", 10**9, r"eos_token_id is 1000000000, not a token id from 0 to"),
    (BYTE_LEVEL, "bos_token_id", -1, "bos_token_id is -1, not a token id"),
    (BYTE_LEVEL, "bos_token_id", True, "bos_token_id is True, not a token id"),
    (BYTE_LEVEL, "add_bos_token", "yes", "add_bos_token is 'yes', not true or false"),
    (SENTENCEPIECE, "scores", None, "has no tokenizer.ggml.scores"),
    (SENTENCEPIECE, "scores", [0.0], "but there are"),
    (SENTENCEPIECE, "scores", [float("nan")] * len(SENTENCEPIECE["tokenizer.ggml.tokens"]), r"scores\[0\] is nan, not a finite"),
    (SENTENCEPIECE, "add_space_prefix", 1, "not true or false"),
]


@pytest.mark.parametrize(("base", "name", "value", "text"), HOSTILE, ids=range(len(HOSTILE)))
def test_invalid_gguf_tokenizer_metadata_error_shows_key_and_value(base: dict[str, Any], name: str, value: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=text) as raised:
        opened(base, **{name: value})
    message = str(raised.value)
    assert "x.gguf" in message
    assert "tokenizer.json" in message
    assert len(message) < 400


def test_gguf_chat_template_that_is_not_text_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.chat_template is \[1\], not a text"):
        read_gguf_tokenizer({**BYTE_LEVEL, "tokenizer.chat_template": [1]}, "x.gguf")


def test_very_long_gguf_token_is_refused_fast() -> None:
    tokens = [*SENTENCEPIECE["tokenizer.ggml.tokens"][:-1], "a" * 3_000_000]
    begin = time.perf_counter()
    with pytest.raises(CheckpointError, match="longer than 1024 characters"):
        opened(SENTENCEPIECE, tokens=tokens)
    assert time.perf_counter() - begin < 2.0


@pytest.mark.parametrize("base", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "sentencepiece"])
def test_saved_tokenizer_is_read_again_and_by_transformers(base: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = opened(base)
    tokenizer.save(tmp_path)
    again, other = Tokenizer.open(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (again.vocab_size, again.special_token_ids) == (tokenizer.vocab_size, tokenizer.special_token_ids)
    for text in ("the the", " ab  aaab\n", "<|im_start|>the<tool><|im_end|>", "é你"):
        ids = tokenizer.encode(text)
        assert again.encode(text) == other(text)["input_ids"] == ids
        assert again.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids, skip_special_tokens=False)
    assert again.has_chat_template == tokenizer.has_chat_template
    if tokenizer.has_chat_template:
        messages = [{"role": "user", "content": "the"}]
        assert again.render_chat(messages) == tokenizer.render_chat(messages) == "<|im_start|>the<|im_end|>"
