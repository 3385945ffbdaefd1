"""Checkpoints whose only tokenizer file has ranks: Mistral's tekken.json, or a tiktoken file."""

import base64
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from paceline.errors import CheckpointError
from paceline.tokenizer.byte_level import BYTE_CHARACTERS
from paceline.tokenizer.tokenizer import Tokenizer

PARTS = (
    "the", "Hello", "HTTPServer", " ", "  ", "\n", "\t", "\r\n", "'s", "'LL", "1", "2345", "é", "ß", "你好", "한국", "カナ", "😀",
    "---", "!?", "_", "aaa", "ab", "</s>", "don't", "/\n", "你a", "a你",
)  # fmt: skip
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDS = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KIMI_PATTERN = "|".join(  # as in tokenization_moonshot.py
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]+{SUFFIXES}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]*{SUFFIXES}?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+" + ENDS,
    )
)
LLAMA3_PATTERN = SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+" + ENDS
QWEN_PATTERN = SUFFIXES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+" + ENDS
FAMILIES = {
    "llama": ("tokenizer.model", LLAMA3_PATTERN),
    "qwen2": ("qwen.tiktoken", QWEN_PATTERN),
    "deepseek_v3": ("tiktoken.model", KIMI_PATTERN),
    "kimi_k2": ("tiktoken.model", KIMI_PATTERN),
}


def texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choice(PARTS) * rng.choice((1, 1, 1, 2, 5)) for _ in range(rng.randrange(1, 16))) for _ in range(count)]


@cache
def ranks() -> dict[bytes, int]:
    """Ids by bytes: all bytes, then tokens that cross the borders of words, in the order of their merges."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(texts(1, 500), trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False))
    byte_of = {character: byte for byte, character in BYTE_CHARACTERS.items()}
    pieces = sorted(backend.get_vocab(), key=lambda piece: (len(piece) > 1, backend.token_to_id(piece)))
    tokens = [bytes(map(byte_of.__getitem__, piece)) for piece in pieces]
    return {token: rank for rank, token in enumerate([*sorted(tokens[:256]), *tokens[256:]])}


def write_tiktoken(directory: Path, name: str, model_type: str, settings: dict[str, Any] | None = None) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks().items()]
    (directory / name).write_text("\n".join(lines) + "\n", encoding="ascii")
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    if settings is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def tekken(**changes: Any) -> dict[str, Any]:
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for token, rank in ranks().items()
    ]
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)]
    config = {
        "pattern": TEKKEN_PATTERN,
        "num_vocab_tokens": 700,
        "default_vocab_size": 700,
        "default_num_special_tokens": 10,
        "version": "v7",
    }
    return {"config": {**config, **changes.pop("config", {})}, "vocab": vocabulary, "special_tokens": special, **changes}


def write_tekken(directory: Path, values: dict[str, Any], name: str = "tekken.json") -> Path:
    (directory / name).write_text(json.dumps(values), encoding="utf-8")
    return directory


def test_tekken_json_gives_the_ids_of_mistral_common(tmp_path: Path, seed: int, large_counts: bool) -> None:
    tokenizers = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    tokenizer = Tokenizer.open(write_tekken(tmp_path, tekken()))
    reference = tokenizers.Tekkenizer.from_file(tmp_path / "tekken.json")
    assert tokenizer.vocab_size == reference.n_words
    for text in texts(seed, 5000 if large_counts else 200):
        escaped = tokenizer.encode_as_text(text)
        assert escaped == reference.encode(text, bos=False, eos=False), text
        assert tokenizer.decode(escaped) == reference.decode(escaped) == text
    assert tokenizer.encode("the") == reference.encode("the", bos=True, eos=False)
    assert [tokenizer.piece(token_id) for token_id in (0, 4, 6, 9)] == ["<unk>", "[/INST]", "<SPECIAL_6>", "<SPECIAL_9>"]


@pytest.mark.parametrize("family", FAMILIES)
def test_tiktoken_file_gives_the_ids_of_tiktoken(tmp_path: Path, seed: int, large_counts: bool, family: str) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    name, pattern = FAMILIES[family]
    tokenizer = Tokenizer.open(write_tiktoken(tmp_path, name, family))
    reference = tiktoken.Encoding(name="x", pat_str=pattern, mergeable_ranks=ranks(), special_tokens={})
    for text in texts(seed, 5000 if large_counts else 200):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode_ordinary(text), text
        assert tokenizer.decode(ids) == text


def test_ranks_are_merged_as_by_tiktoken_whatever_their_order(tmp_path: Path, seed: int, large_counts: bool) -> None:
    """Vocabularies that were not trained, with tokens that several pairs give."""
    tiktoken = pytest.importorskip("tiktoken")
    rng = random.Random(seed)
    for number in range(200 if large_counts else 8):
        tokens = sorted({"".join(rng.choice("ab") for _ in range(rng.randrange(2, 5))) for _ in range(12)}, key=lambda _: rng.random())
        tokens.sort(key=len)  # a token has a higher rank than its parts, as after training
        table = {bytes([byte]): byte for byte in range(256)} | {token.encode(): 256 + rank for rank, token in enumerate(tokens)}
        folder = tmp_path / str(number)
        folder.mkdir()
        write_tiktoken(folder, "tiktoken.model", "deepseek_v3")
        lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in table.items()]
        (folder / "tiktoken.model").write_text("\n".join(lines), encoding="ascii")
        tokenizer = Tokenizer.open(folder)
        reference = tiktoken.Encoding(name="x", pat_str=KIMI_PATTERN, mergeable_ranks=table, special_tokens={})
        for _ in range(50):
            text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 14)))
            assert tokenizer.encode(text, add_special_tokens=False) == reference.encode_ordinary(text), (tokens, text)


def test_tiktoken_control_tokens_come_from_the_family_or_the_settings(tmp_path: Path) -> None:
    first = len(ranks())
    llama = Tokenizer.open(write_tiktoken(tmp_path, "tokenizer.model", "llama"))
    assert llama.encode("<|eot_id|>the") == [first, first + 9, *llama.encode("the", add_special_tokens=False)]
    assert llama.vocab_size == first + 256
    (tmp_path / "tokenizer.model").rename(tmp_path / "tiktoken.model")
    listed = {str(first): {"content": "[BOS]", "special": True}, str(first + 2): {"content": "<tool>", "special": False}}
    settings = {"added_tokens_decoder": listed, "bos_token": "[BOS]", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    kimi = Tokenizer.open(write_tiktoken(tmp_path, "tiktoken.model", "deepseek_v3", settings))
    assert kimi.vocab_size == first + 256
    assert [kimi.piece(token_id) for token_id in (first, first + 1, first + 2)] == ["[BOS]", f"<|reserved_token_{first + 1}|>", "<tool>"]
    assert kimi.apply_chat_template([{"role": "user", "content": "<tool>"}]) == [first, first + 2]
    assert kimi.decode([first, first + 2]) == "<tool>"
    assert kimi.encode("the")[0] != first
    settings |= {"add_bos_token": True}
    assert Tokenizer.open(write_tiktoken(tmp_path, "tiktoken.model", "deepseek_v3", settings)).encode("the")[0] == first


def test_ordinary_token_spelled_like_a_control_token_is_decoded(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write_tekken(tmp_path, tekken(), "tekken_240911.json"))
    assert b"</s>" in ranks()
    assert tokenizer.decode([10 + ranks()[b"</s>"]], skip_special_tokens=True) == "</s>"
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]
    assert tokenizer.decode([2]) == ""


def test_tokenizer_json_has_precedence_over_tekken_json(tmp_path: Path, mini_dir: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((mini_dir / "tokenizer.json").read_bytes())
    write_tekken(tmp_path, {"config": {}})
    assert Tokenizer.open(tmp_path).vocab_size > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (tekken(config={"pattern": r"\p{N}{1,3}+|."}), "is not supported"),
        (tekken(config={"pattern": None}), r"no config\.pattern"),
        (tekken(config={"default_vocab_size": 2000}), "expected the 1990 of default_vocab_size"),
        (tekken(config={"default_num_special_tokens": 4}), "rank 4, expected a number below 4"),
        (tekken(vocab=tekken()["vocab"][1:]), "expected"),
        (tekken(special_tokens=[{"rank": 0}]), "token_str is None"),
        (tekken(vocab=[{**item, "token_bytes": "?"} for item in tekken()["vocab"]]), "expected bytes in base64"),
        (tekken(special_tokens=[{"rank": 0, "token_str": "a"}, {"rank": 0, "token_str": "b"}]), "two tokens of the id 0"),
        (tekken(special_tokens=[{"rank": 0, "token_str": "a"}, {"rank": 1, "token_str": "a"}]), "'a' with two ids"),
        (
            tekken(vocab=[{**item, "rank": rank} for rank, item in enumerate([tekken()["vocab"][0], *tekken()["vocab"]])]),
            "twice, with the ids",
        ),
    ],
)
def test_damaged_tekken_json_is_an_error(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.open(write_tekken(tmp_path, values))


@pytest.mark.parametrize(
    ("content", "model_type", "message"),
    [
        (b"IQ== 0\nIg== x\n", "llama", "line 2 is"),
        (b"IQ== 0\nIQ== 1\n", "llama", r"b'!' twice, with the ids 0 and 1"),
        (b"IQ== 0\n\n", "llama", "does not contain all 256 bytes"),
        (b"IQ== 0\n", "chatglm", "known for the model types .* not for 'chatglm'"),
    ],
)
def test_damaged_or_unknown_tiktoken_file_is_an_error(tmp_path: Path, content: bytes, model_type: str, message: str) -> None:
    write_tiktoken(tmp_path, "tokenizer.model", model_type)
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.open(tmp_path)
