"""Tokenizers round-trip, and streamed text is the text of the whole."""

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.checkpoints import write_byte_fallback_tokenizer, write_byte_level_tokenizer, write_tokenizer
from paceline.errors import CheckpointError, RequestError
from paceline.tokenizer.tokenizer import Tokenizer

WRITERS = {"words": write_tokenizer, "byte_fallback": write_byte_fallback_tokenizer, "byte_level": write_byte_level_tokenizer}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {kind: Tokenizer.open(write(tmp_path_factory.mktemp(kind))) for kind, write in WRITERS.items()}


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    parts = [detokenizer.push(token_id) for token_id in ids]
    parts.append(detokenizer.flush())
    assert detokenizer.text == "".join(parts)
    return parts


@pytest.mark.parametrize("kind", WRITERS)
def test_streamed_text_of_random_ids_equals_decode(tokenizers: dict[str, Tokenizer], kind: str, seed: int, large_counts: bool) -> None:
    tokenizer, rng = tokenizers[kind], random.Random(seed)
    for _ in range(20_000 if large_counts else 1000):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 60))]
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids), ids


@pytest.mark.parametrize("kind", ["byte_fallback", "byte_level"])
def test_streamed_text_of_unicode_characters_equals_the_text(tokenizers: dict[str, Tokenizer], kind: str, seed: int) -> None:
    tokenizer, rng = tokenizers[kind], random.Random(seed)
    for _ in range(300):
        text = "".join(rng.choice(["the ", " ", "a", "é", "你", "😀", "👩‍👩‍👧", "\n", "\ufffd", "ß"]) for _ in range(rng.randrange(1, 20)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert "".join(streamed(tokenizer, ids)) == text


def test_incomplete_character_is_held_back_while_streaming(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("a😀b")
    parts = streamed(tokenizer, ids)
    assert [part for part in parts if part] == ["a", "😀", "b"]
    assert "\ufffd" not in "".join(parts)
    assert streamed(tokenizer, ids[:-2])[-1] == "\ufffd"


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    first = next(token_id for token_id in range(tokenizer.vocab_size) if tokenizer.piece(token_id) == "<0x00>")
    return [first + byte for byte in data]


def random_bytes(rng: random.Random) -> bytes:
    """Whole characters, parts of them, and bytes that are part of none."""
    whole = [character.encode() for character in "aé你😀\ufffd▁ "]
    parts = [b"\xe4", b"\xbd\xa0", b"\xf0\x9f", b"\x98\x80", b"\xc0\x80", b"\xed\xa0\x80", b"\xff", bytes([rng.randrange(256)])]
    return b"".join(rng.choice([*whole, *parts]) for _ in range(rng.randrange(1, 9)))


def test_byte_token_character_is_streamed_with_its_last_byte(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    assert streamed(tokenizer, byte_ids(tokenizer, "😀é!".encode())) == ["", "", "", "😀", "", "é", "!", ""]
    assert streamed(tokenizer, byte_ids(tokenizer, b"a\xf0\x9fb\xff\xe4")) == ["a", "", "", "\ufffd\ufffdb", "\ufffd", "", "\ufffd"]


def test_invalid_byte_token_changes_no_other_character(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    assert tokenizer.decode(byte_ids(tokenizer, "é😀".encode() + b"\xff" + "你".encode() + b"\xe4\xbd")) == "é😀\ufffd你\ufffd\ufffd"


def test_streamed_text_of_random_byte_tokens_equals_decode(tokenizers: dict[str, Tokenizer], seed: int, large_counts: bool) -> None:
    tokenizer, rng = tokenizers["byte_fallback"], random.Random(seed)
    others = [[token_id] for token_id in range(tokenizer.vocab_size) if not tokenizer.piece(token_id).startswith("<0x")]
    for _ in range(50_000 if large_counts else 500):
        parts = [byte_ids(tokenizer, random_bytes(rng)) if rng.random() < 0.7 else rng.choice(others) for _ in range(rng.randrange(1, 8))]
        ids = [token_id for part in parts for token_id in part]
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids), ids


def test_valid_byte_tokens_decode_as_in_the_tokenizers_library(tokenizers: dict[str, Tokenizer], seed: int) -> None:
    tokenizer, rng = tokenizers["byte_fallback"], random.Random(seed)
    for _ in range(300):
        text = "".join(rng.choice("aé你😀\ufffd▁ ") for _ in range(rng.randrange(1, 12)))
        ids = [*tokenizer.encode("the", add_special_tokens=False), *byte_ids(tokenizer, text.encode()), *tokenizer.encode(" a")]
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=True)
        *parts, rest = streamed(tokenizer, ids)
        assert rest == ""
        assert "".join(parts) == tokenizer.decode(ids)


def test_byte_like_pieces_of_a_tokenizer_without_byte_fallback_are_text(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path) / "tokenizer.json"
    path.write_text(path.read_text().replace(r"\u2581w94", "<0x00>").replace(r"\u2581w95", "<0x41>").replace(r"\u2581w96", "<0xFF>"))
    tokenizer = Tokenizer.open(tmp_path)
    assert not tokenizer.has_byte_pieces
    assert "".join(streamed(tokenizer, [96, 95])) == tokenizer.decode([96, 95]) == "<0xFF><0x41>"


def test_special_and_unknown_ids_have_no_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    [special] = tokenizer.special_token_ids
    ids = [*tokenizer.encode("a"), special, tokenizer.vocab_size + 7, *tokenizer.encode("b")]
    assert "".join(streamed(tokenizer, ids)) == "ab"
    assert streamed(tokenizer, [special]) == ["", ""]


def test_shown_special_tokens_keep_their_position_in_the_text(tokenizers: dict[str, Tokenizer], seed: int) -> None:
    """As the tokenizer itself writes them; the others are left out."""
    rng = random.Random(seed)
    for tokenizer in tokenizers.values():
        special = sorted(tokenizer.special_token_ids)
        for shown in (special[:1], special):
            hidden = tokenizer.special_token_ids - set(shown)
            for _ in range(20):
                ids = rng.choices(range(tokenizer.vocab_size), k=30) + rng.choices(special, k=6)
                rng.shuffle(ids)
                detokenizer = tokenizer.detokenizer(shown)
                text = "".join([*map(detokenizer.push, ids), detokenizer.flush()])
                assert text == tokenizer.decode([one for one in ids if one not in hidden], skip_special_tokens=False)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_streaming_endless_invalid_bytes_takes_bounded_time(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    detokenizer = tokenizer.detokenizer()
    broken = tokenizer.encode("😀", add_special_tokens=False)[-4:][0]
    ids = [broken] * 2000
    begin = time.perf_counter()
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids)
    assert time.perf_counter() - begin < 2.0  # two thousand growing windows would take much longer


def test_detokenizer_push_time_does_not_grow_with_the_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode(" the" * 200)
    times = []
    for _ in range(30):
        begin = time.perf_counter()
        for token_id in ids:
            detokenizer.push(token_id)
        times.append((time.perf_counter() - begin) / len(ids))
    assert min(times[20:]) < 5 * min(times[:10])
    assert min(times) < 200e-6


def test_special_tokens_written_in_a_text_become_their_ids(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["words"]
    ids = tokenizer.encode("the<|im_end|> cat")
    assert [tokenizer.piece(token_id) for token_id in ids] == ["▁the", "<|im_end|>", "▁cat"]
    assert tokenizer.decode(ids) == "the cat"
    assert "<|im_end|>" in tokenizer.decode(ids, skip_special_tokens=False)


def test_tokenizer_reports_vocab_size_special_ids_and_pieces(tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers["words"].vocab_size == 97
    assert tokenizers["words"].special_token_ids == {0, 1, 2}
    assert tokenizers["words"].piece(4) == "▁the"
    assert tokenizers["words"].piece(97) == ""
    assert tokenizers["byte_fallback"].has_byte_pieces
    assert not tokenizers["byte_level"].has_byte_pieces


def test_chat_template_of_a_tokenizer_renders_message_ids(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["words"]
    messages = [{"role": "user", "content": "the cat"}]
    ids = tokenizer.apply_chat_template(messages)
    closed = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert [tokenizer.piece(token_id) for token_id in closed][-3:] == ["▁the", "▁cat", "<|im_end|>"]
    assert ids[: len(closed)] == closed
    assert len(ids) > len(closed)
    assert tokenizer.piece(ids[0]) == "<|im_start|>"


@pytest.mark.parametrize(
    ("kind", "messages", "text"),
    [
        ("byte_level", [{"role": "user", "content": "hi"}], "no chat template"),
        ("words", [], "empty"),
        ("words", [{"role": "robot", "content": "hi"}], "unknown role robot"),
        ("words", [{"content": "hi"}], "rejects these messages"),
        ("words", [{"role": "user", "content": None}], "rejects these messages"),
    ],
)
def test_messages_that_the_template_rejects_are_request_errors(
    tokenizers: dict[str, Tokenizer], kind: str, messages: list[dict[str, object]], text: str
) -> None:
    with pytest.raises(RequestError, match=text) as raised:
        tokenizers[kind].apply_chat_template(messages)
    assert raised.value.parameter == "messages"


def test_plain_tokenizer_opens_without_transformers_autotokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    write_byte_level_tokenizer(tmp_path)
    expected = Tokenizer(transformers.AutoTokenizer.from_pretrained(str(tmp_path)))
    monkeypatch.setattr(transformers, "AutoTokenizer", None)
    opened = Tokenizer.open(tmp_path)
    assert opened.encode("the a😀<|endoftext|>") == expected.encode("the a😀<|endoftext|>")


@pytest.mark.parametrize("content", [None, "", "{}", "[1]"])
def test_directory_without_readable_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"needs a complete tokenizer\.json"):
        Tokenizer.open(tmp_path)


def test_tokenizer_opens_next_to_a_config_that_transformers_refuses(tmp_path: Path) -> None:
    """paceline reads none of these values, and a tokenizer does not depend on them."""
    write_byte_level_tokenizer(tmp_path)
    expected = Tokenizer.open(tmp_path).encode("the a")
    (tmp_path / "tokenizer_config.json").write_text("{}")  # the class depends on config.json
    (tmp_path / "config.json").write_text('{"model_type": "llama", "initializer_range": 1, "use_cache": null, "pad_token_id": "x"}')
    assert Tokenizer.open(tmp_path).encode("the a") == expected
    (tmp_path / "config.json").write_text('{"model_type": "not_in_transformers"}')
    assert Tokenizer.open(tmp_path).encode("the a") == expected


@pytest.mark.parametrize("template", [["chatml"], [{"name": "default"}], 7, {"default": "{{ x }}"}])
def test_chat_template_of_the_wrong_type_is_refused_by_name(tmp_path: Path, template: object) -> None:
    write_byte_level_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(CheckpointError, match=r"chat_template in tokenizer_config\.json is .*, expected a text, or a list"):
        Tokenizer.open(tmp_path)


def test_chat_template_file_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    write_byte_level_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ x }}\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not UTF-8 \(byte 7\)"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "T5Tokenizer", "GPT2Tokenizer"])
def test_tokenizer_settings_without_a_vocabulary_are_refused(tmp_path: Path, kind: str) -> None:
    """transformers opens such a directory; texts would have no tokens, or unknown ones."""
    (tmp_path / "tokenizer_config.json").write_text(f'{{"tokenizer_class": "{kind}"}}')
    with pytest.raises(CheckpointError, match="contains no vocabulary of a tokenizer"):
        Tokenizer.open(tmp_path)


def test_tokenizer_of_a_real_small_model_streams_text(shared_dir: Path) -> None:
    directory = shared_dir / "data" / "models" / "TinyStories-656K"
    if not directory.is_dir():
        pytest.skip("TinyStories-656K is not in ../shared")
    tokenizer = Tokenizer.open(directory)
    ids = tokenizer.encode("Once upon a time, there was a little girl.")
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == "Once upon a time, there was a little girl."
