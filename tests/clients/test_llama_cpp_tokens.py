"""Tiny vocabularies with every rule for splitting text give llama.cpp's ids, which lives in an environment of its own."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from clients.run_foreign import run_foreign
from paceline.tokenizer.byte_level import SPLIT_RULES
from paceline.tokenizer.tokenizer import Tokenizer

PARTS = (
    "the", "Hello", "HTTPServer", " ", "  ", "\n", "\t", "\r\n", "'s", "'LL", "1", "2345", "é", "ß", "Ⅷ", "你好", "\uff0c", "한국", "カナ",
    "😀", "---", "==", "!?", "_", "x", "ἀρχή",
    "Ꞑ", "\U0001d400", "\u0294", "。", "abc123", " 3.14", "$", "`", "/\n", "don't", "\u0301", "你a",
)  # fmt: skip

APPROXIMATED = {"tekken", "gpt-4o", "llama4", "minimax-m2", "kanana2"}
"""Names of which llama.cpp knows the case of ASCII letters only. We compute the original expressions, of all letters."""
INEXACT = {"kimi-k2", "tiny_aya", "cohere2moe"}
"""Names of which llama.cpp ignores where upper case begins. Kimi's are compared with tiktoken in tests/unit/tokenizer/test_ranks.py."""
COMPOSED = {"qwen2", "qwen35"}
"""Names whose original tokenizers compose characters (NFC) and llama.cpp does not."""


def texts(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choice(PARTS) * rng.choice((1, 1, 1, 2, 5)) for _ in range(rng.randrange(1, 12))) for _ in range(count)]


def vocabulary(rng: random.Random) -> dict[str, Any]:
    """A byte-level vocabulary whose tokens cross all borders of words, so that ids depend on every split."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(texts(rng, 2000), trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False))
    model = json.loads(backend.to_str())["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    ids = dict.fromkeys(("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"), len(pieces))
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [*pieces, "<|end|>"], "tokenizer.ggml.merges": merges, **ids}


def write_vocabulary(path: Path, values: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in values.items():
        (writer.add_array if isinstance(value, list) else writer.add_uint32 if isinstance(value, int) else writer.add_string)(key, value)
    writer.add_array("tokenizer.ggml.token_type", [1] * (len(values["tokenizer.ggml.tokens"]) - 1) + [3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_ids_of_every_way_to_split_text_equal_those_of_llama_cpp(clients: Path, tmp_path: Path, tally: "Counter[str]", seed: int) -> None:
    rng = random.Random(seed)
    values, samples = vocabulary(rng), texts(rng, 400)
    samples += [text for text in texts(rng, 4000) if text.isascii()]
    paths = [tmp_path / f"{name}.gguf" for name in SPLIT_RULES if name not in INEXACT]
    for path in paths:
        write_vocabulary(path, {**values, "tokenizer.ggml.pre": path.stem})
    (tmp_path / "texts.json").write_text(json.dumps(samples), encoding="utf-8")
    run_foreign(clients / "llama-cpp", "llama_tokens.py", tmp_path / "texts.json", tmp_path / "ids.json", *paths)
    wrong: dict[str, list[Any]] = {}
    for path, expected in zip(paths, json.loads((tmp_path / "ids.json").read_text(encoding="utf-8")), strict=True):
        assert expected is not None, f"llama.cpp does not load {path.stem}"
        tokenizer = Tokenizer.open(path)
        for text, ids in zip(samples, expected, strict=True):
            if (path.stem in APPROXIMATED and not text.isascii()) or (path.stem in COMPOSED and "\u0301" in text):
                continue
            found = tokenizer.encode(text, add_special_tokens=False)
            if found != ids:
                wrong.setdefault(path.stem, []).append((text, found, ids))
        tally["names of splits whose ids are llama.cpp's"] += 1
    assert not wrong, "; ".join(f"{name}: {len(cases)}, for example {cases[0]}" for name, cases in wrong.items())
