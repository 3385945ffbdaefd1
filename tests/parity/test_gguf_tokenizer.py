"""Tokenizers from GGUF metadata give the ids llama.cpp recorded, and those of the tokenizers they were converted from."""

import io
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.tokenizer.gguf import read_gguf_tokenizer
from paceline.tokenizer.tokenizer import Tokenizer

RECORDED = ("deepseek-coder", "gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "starcoder")
SEPARATOR = "\n__ggml_vocab_test__\n"


def qwen2_metadata(folder: Path) -> dict[str, Any]:
    """What a conversion makes of the vocabulary, merges and added tokens of a Hugging Face directory."""
    pieces = {index: (piece, 1) for piece, index in json.loads((folder / "vocab.json").read_text(encoding="utf-8")).items()}
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    pieces |= {int(index): (token["content"], 3) for index, token in settings["added_tokens_decoder"].items()}
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [pieces[index][0] for index in range(len(pieces))],
        "tokenizer.ggml.token_type": [pieces[index][1] for index in range(len(pieces))],
        "tokenizer.ggml.merges": [line for line in lines if line and not line.startswith("#version")],
        "tokenizer.ggml.eos_token_id": 151643,
        "tokenizer.chat_template": settings["chat_template"],
    }


def byte_level_metadata(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The metadata of a byte-level tokenizer.json, added tokens as user-defined ones."""
    pieces = {index: (piece, 1) for piece, index in content["model"]["vocab"].items()}
    pieces |= {token["id"]: (token["content"], 3 if token["special"] else 4) for token in content["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [pieces[index][0] for index in range(len(pieces))],
        "tokenizer.ggml.token_type": [pieces[index][1] for index in range(len(pieces))],
        "tokenizer.ggml.merges": merges,
    }


@pytest.fixture(scope="module")
def opened(shared_dir: Path) -> dict[str, Tokenizer]:
    """Tokenizers by name, each built once."""
    folder = shared_dir / "data" / "tokenizers"
    found = {}
    for name in RECORDED:
        path = folder / "ggml-vocab" / f"ggml-vocab-{name}.gguf"
        if path.is_file():
            found[name] = Tokenizer.open(path)
    if (folder / "qwen2" / "vocab.json").is_file():
        found.setdefault("qwen2", Tokenizer.from_gguf(qwen2_metadata(folder / "qwen2"), "qwen2"))
    return found


def recorded(shared_dir: Path, name: str) -> list[tuple[str, list[int]]]:
    path = shared_dir / "data" / "tokenizers" / "ggml-vocab" / f"ggml-vocab-{name}.gguf"
    if not path.with_name(f"{path.name}.inp").is_file():
        pytest.skip(f"no recorded ids of {name}")
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode("utf-8").split(SEPARATOR)
    lines = path.with_name(f"{path.name}.out").read_text(encoding="utf-8").split("\n")
    return [(text, [int(token) for token in line.split()]) for text, line in zip(texts, lines[: len(texts)], strict=True)]


def sample_texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    parts = [
        "the",
        "Hello",
        " ",
        "  ",
        "\n",
        "\t",
        "\r\n",
        "'s",
        "'LL",
        "1",
        "2345",
        "é",
        "ß",
        "你好",
        "한국",
        "😀",
        "---",
        "==",
        "!?",
        "_",
        "x",
    ]
    return ["".join(rng.choice(parts) * rng.choice((1, 1, 1, 2, 5)) for _ in range(rng.randrange(1, 16))) for _ in range(count)]


@pytest.mark.parametrize("name", RECORDED)
def test_gguf_tokenizer_ids_equal_those_recorded_from_llama_cpp(opened: dict[str, Tokenizer], shared_dir: Path, name: str) -> None:
    if name not in opened:
        pytest.skip(f"no vocabulary of {name} in ../shared")
    cases = recorded(shared_dir, name)
    assert len(cases) == 47
    for text, ids in cases:
        assert opened[name].encode(text, add_special_tokens=False) == ids, text


@pytest.mark.parametrize("name", RECORDED)
def test_gguf_tokenizer_encodes_and_decodes_random_text_unchanged(
    opened: dict[str, Tokenizer], name: str, seed: int, large_counts: bool
) -> None:
    if name not in opened:
        pytest.skip(f"no vocabulary of {name} in ../shared")
    tokenizer = opened[name]
    for text in sample_texts(seed, 2000 if large_counts else 100):
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = tokenizer.detokenizer()
        streamed = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
        assert streamed == tokenizer.decode(ids) == text


def test_byte_level_gguf_tokenizer_equals_its_tokenizer_json(shared_dir: Path, seed: int, large_counts: bool) -> None:
    path = shared_dir / "data" / "tokenizers" / "phi-2" / "tokenizer.json"
    if not path.is_file():
        pytest.skip("no phi-2 tokenizer.json in ../shared")
    from tokenizers import Tokenizer as Backend

    original = Backend.from_file(str(path))
    ours = read_gguf_tokenizer(byte_level_metadata(json.loads(path.read_text(encoding="utf-8")), "phi-2"), path).backend_tokenizer
    for text in sample_texts(seed, 20_000 if large_counts else 500):
        assert ours.encode(text).ids == original.encode(text, add_special_tokens=False).ids, text


def test_sentencepiece_gguf_tokenizer_equals_its_original_model(shared_dir: Path, seed: int, large_counts: bool) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    path = shared_dir / "data" / "tokenizers" / "mistral" / "tokenizer.model.v1"
    if not path.is_file():
        pytest.skip("no mistral tokenizer.model in ../shared")
    original = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = range(original.vocab_size())
    types = [3 if original.is_control(one) else 2 if original.is_unknown(one) else 6 if original.is_byte(one) else 1 for one in ids]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [original.id_to_piece(one) for one in ids],
        "tokenizer.ggml.scores": [original.get_score(one) for one in ids],
        "tokenizer.ggml.token_type": types,
    }
    ours = Tokenizer.from_gguf(metadata, path)
    assert ours.end_token_ids == (original.eos_id(),)
    for text in sample_texts(seed, 20_000 if large_counts else 500):
        assert ours.encode(text) == [original.bos_id(), *original.encode(text)], text
        assert ours.decode(ours.encode(text)) == text


def test_chat_template_of_a_gguf_file_renders_the_expected_tokens(opened: dict[str, Tokenizer]) -> None:
    if "phi-3" not in opened:
        pytest.skip("no vocabulary of phi-3 in ../shared")
    tokenizer = opened["phi-3"]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert [tokenizer.piece(token_id) for token_id in ids] == ["<s>", "<|user|>", "▁hi", "<|end|>", "<|assistant|>"]
    assert tokenizer.end_token_ids == (32000, 32007)


def test_invalid_utf8_byte_tokens_are_decoded_as_by_sentencepiece(seed: int, large_counts: bool) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    model, rng = io.BytesIO(), random.Random(seed)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "hello world again"]), model_writer=model, vocab_size=290, byte_fallback=True,
        model_type="bpe", minloglevel=2,
    )  # fmt: skip
    original = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [original.id_to_piece(token_id) for token_id in range(original.vocab_size())]
    types = [2, 3, 3, *([6] * 256), *([1] * (len(pieces) - 259))]
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.token_type": types}
    ours = Tokenizer.from_gguf({**metadata, "tokenizer.ggml.scores": [original.get_score(one) for one in range(len(pieces))]}, "trained")
    likely = [3 + byte for byte in b"\xe4\xbd\xa0\xc3\xa9\xf0\x9f\x98\x80\xed"]
    for _ in range(50_000 if large_counts else 1000):
        ids = [original.piece_to_id("t"), *(rng.choice([*likely, rng.randrange(3, len(pieces))]) for _ in range(rng.randrange(1, 12)))]
        assert ours.decode(ids) == original.decode(ids), ids
