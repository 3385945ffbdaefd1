"""A tokenizer may fail in any way at any call, panics of its Rust code included: each is one error of ours. Nothing is sized by an id."""

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from harness.checkpoints import write_byte_fallback_tokenizer, write_byte_level_tokenizer
from paceline.errors import CheckpointError, PacelineError, RequestError, convert_library_errors
from paceline.proof.checkpoint_facts import read_tokenizer
from paceline.sampling.grammars.compiled_grammar import GrammarVocabulary
from paceline.small_files import TOKENIZER_BYTES
from paceline.tokenizer import backend
from paceline.tokenizer.backend import MAX_UNUSED_IDS, TokenizerBackend, check_token_ids
from paceline.tokenizer.files import MAX_ADDED_ID
from paceline.tokenizer.gguf import MAX_VOCAB_SIZE, read_gguf_tokenizer
from paceline.tokenizer.tokenizer import Tokenizer
from paceline.tokenizer.vocabulary import compare_vocabularies

MAX_SECONDS = 5.0
Change = Callable[[dict[str, Any]], object]


def opened(directory: Path, change: Change = lambda _: None, write: Callable[[Path], Path] = write_byte_level_tokenizer) -> Tokenizer:
    write(directory)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    return Tokenizer.open(directory)


def with_part(name: str, value: object) -> Change:
    return lambda content: content.update({name: value})


AT_LOAD: dict[str, Change] = {
    "a panic over a map of characters": with_part("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "a panic over a prefix": lambda content: content["model"].update(continuing_subword_prefix="é", merges=[["a", "b"]]),
    "an exception": with_part("model", {"type": "Unigram", "unk_id": 99, "vocab": [["a", 0.0]]}),
    "no model": with_part("model", None),
    "no such type": with_part("decoder", {"type": "Nonsense"}),
    "depth": with_part("normalizer", json.loads("[" * 300 + "]" * 300)),
    "an id of four billion": lambda content: content["model"]["vocab"].update(zzz=4_000_000_000),
    "an id of a million": lambda content: content["model"]["vocab"].update(zzz=1_000_000),
    "an id beyond 32 bits": lambda content: content["model"]["vocab"].update(zzz=2**40),
}


@pytest.mark.parametrize("change", AT_LOAD.values(), ids=AT_LOAD)
def test_unusable_tokenizer_is_a_checkpoint_error_at_load(change: Change, tmp_path: Path) -> None:
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        opened(tmp_path, change)
    assert time.perf_counter() - start < MAX_SECONDS
    with pytest.raises(CheckpointError):
        read_tokenizer(tmp_path)


REGEX = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
AT_ENCODING: dict[str, Change] = {
    "a pattern without end": with_part("pre_tokenizer", REGEX),
    "pieces of no length": with_part("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    "a frame that names nothing": with_part("post_processor", TEMPLATE),
}


@pytest.mark.parametrize("change", AT_ENCODING.values(), ids=AT_ENCODING)
def test_text_that_makes_the_tokenizer_panic_is_a_request_error(change: Change, tmp_path: Path) -> None:
    start = time.perf_counter()
    try:
        tokenizer = opened(tmp_path, change)
    except CheckpointError:  # some panic in every call
        return
    with pytest.raises(RequestError, match="tokenizer cannot encode this text; send another"):
        tokenizer.encode("a" * 40 + "b")
    assert time.perf_counter() - start < MAX_SECONDS


class PanicException(BaseException):
    """As pyo3 raises it."""


class Failing:
    """A library whose calls fail after it is loaded."""

    padding = truncation = None

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def get_vocab(self, **_: bool) -> dict[str, int]:
        return {"a": 0}

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}

    def _fail(self, *_: object, **__: object) -> Any:
        raise self.error

    decode = id_to_token = to_str = encode = _fail


CALLS: dict[str, Callable[[TokenizerBackend], object]] = {
    "decode": lambda backend: backend.decode([0], skip_special_tokens=True),
    "id_to_token": lambda backend: backend.id_to_token(0),
    "to_json": lambda backend: backend.to_json(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_tokenizer_library_exceptions_are_request_errors(call: Callable[[TokenizerBackend], object]) -> None:
    for error in (
        PanicException("index out of bounds"),
        Exception("bare"),
        OverflowError("u32"),
        TypeError(),
        MemoryError(),
        KeyError("a"),
    ):
        with pytest.raises(RequestError, match="the model's tokenizer cannot"):
            call(TokenizerBackend(Failing(error)))
    with pytest.raises(KeyboardInterrupt):
        call(TokenizerBackend(Failing(KeyboardInterrupt())))


def test_panic_while_reading_the_vocabulary_is_a_checkpoint_error() -> None:
    library = Failing(PanicException("poisoned lock"))
    library.get_vocab = library._fail  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="vocabulary of this tokenizer cannot be read"):
        TokenizerBackend(library)


def test_invalid_token_ids_and_texts_are_request_errors(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path)
    for token_id in (-1, 2**32, 10**30):
        with pytest.raises(RequestError, match="the model's tokenizer cannot"):
            tokenizer.decode([token_id])
        with pytest.raises(RequestError, match="the model's tokenizer cannot"):
            tokenizer.piece(token_id)
    with pytest.raises(RequestError, match=r"the text contains '\\ud83d', half of a surrogate pair"):
        tokenizer.encode("half a character \ud83d")


def test_gaps_between_token_ids_are_allowed_in_proportion() -> None:
    check_token_ids(range(128_000))
    check_token_ids([*range(32_000), 100_000])
    check_token_ids([MAX_UNUSED_IDS])
    for ids in ([], [4_000_000_000], [0, MAX_UNUSED_IDS + 4], [*range(32_000), 200_000]):
        with pytest.raises(CheckpointError, match="this tokenizer has"):
            check_token_ids(ids)


def test_gaps_between_token_ids_do_not_slow_down_comparison(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, lambda content: content["model"]["vocab"].update(zzz=MAX_UNUSED_IDS))
    start = time.perf_counter()
    compare_vocabularies(tokenizer, tokenizer)
    assert json.loads(tokenizer.to_json())["model"]["vocab"]["zzz"] == MAX_UNUSED_IDS
    assert time.perf_counter() - start < MAX_SECONDS


def test_tokenizer_that_llguidance_cannot_read_is_a_request_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llguidance = pytest.importorskip("llguidance")

    def fail(*_: object, **__: object) -> None:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(llguidance, "LLTokenizer", fail)
    with pytest.raises(RequestError, match="cannot read this model's tokenizer; generate without"):
        GrammarVocabulary(opened(tmp_path), [0])


def test_doctor_does_not_apply_tokenizer_padding(tmp_path: Path) -> None:
    """The library would end the whole process."""
    fixed = {
        "strategy": {"Fixed": 10**12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    tokenizer = opened(tmp_path, with_part("padding", fixed))
    assert len(tokenizer.encode("a")) == 1
    facts = read_tokenizer(tmp_path)
    assert facts is not None
    assert len(facts.sample_ids) < 5000


def make_sparse(path: Path, num_bytes: int) -> None:
    path.touch()
    os.truncate(path, num_bytes)


def make_pipe_of_templates(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    os.mkfifo(directory / "additional_chat_templates" / "x.jinja")


def name_in_tokenizer_json(directory: Path) -> None:
    content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    content["added_tokens"][0]["\x1b[2J"] = 1
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def settings(content: object) -> Callable[[Path], object]:
    text = content if isinstance(content, str) else json.dumps(content)
    return lambda directory: (directory / "tokenizer_config.json").write_text(text)


FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": lambda directory: os.mkfifo(directory / "special_tokens_map.json"),
    "a linked device": lambda directory: (directory / "chat_template.jinja").symlink_to("/dev/zero"),
    "a pipe of templates": make_pipe_of_templates,
    "a large file": lambda directory: make_sparse(directory / "tokenizer.json", TOKENIZER_BYTES + 1),
    "a large template": lambda directory: make_sparse(directory / "chat_template.jinja", 1 << 40),
    "a value that is no name, elsewhere": name_in_tokenizer_json,
    "settings that are a list": settings("[1]"),
    "deep settings": settings('{"a":' * 5000),
    "a class of its own": settings({"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}),
    "a class that is no name": settings({"tokenizer_class": "Own\x1b[2J"}),
    "a class that is a list": settings({"tokenizer_class": ["Own"]}),
    "a value that is no name": settings({"pad_token": {"__type": "AddedToken", "content": "x", "\x1b[2J": 1}}),
    "an added token far away": settings({"added_tokens_decoder": {str(MAX_ADDED_ID): {"content": "x"}}}),
    "an added token nowhere": settings({"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}),
}


@pytest.mark.parametrize("change", FILES.values(), ids=FILES)
def test_invalid_tokenizer_files_are_refused_before_reading(change: Callable[[Path], object], tmp_path: Path) -> None:
    write_byte_level_tokenizer(tmp_path)
    change(tmp_path)
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=str(tmp_path)) as caught:
        Tokenizer.open(tmp_path)
    assert time.perf_counter() - start < 60.0  # transformers and torch are imported for some
    assert "trust_remote_code" not in str(caught.value)


def test_chat_template_that_is_not_text_fails_only_chat_requests(tmp_path: Path) -> None:
    write_byte_fallback_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for template in (7, ["{{ x }}"], {"default": 7}, {"default": {"a": 1}}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
        try:
            tokenizer = Tokenizer.open(tmp_path)
        except CheckpointError:
            continue
        assert tokenizer.encode("the")
        with pytest.raises(RequestError):
            tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_oversized_gguf_vocabulary_is_refused() -> None:
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["x"] * (MAX_VOCAB_SIZE + 1)}
    with pytest.raises(CheckpointError, match=f"at most {MAX_VOCAB_SIZE} are possible"):
        read_gguf_tokenizer(metadata, "x.gguf")
    long = [f"{index:01000d}" for index in range(300)]
    many = {**metadata, "tokenizer.ggml.tokens": long, "tokenizer.ggml.scores": [0.0] * len(long)}
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match="too many long ones"):
        read_gguf_tokenizer(many, "x.gguf")
    assert time.perf_counter() - start < MAX_SECONDS


def test_library_errors_keep_ours_and_drop_remote_code_advice() -> None:
    with pytest.raises(CheckpointError, match=r"^ours$"), convert_library_errors("theirs", RequestError):
        raise CheckpointError("ours")
    for text in ("set `weights_only=False` to load it", "please pass `trust_remote_code=True`"):
        with (
            pytest.raises(RequestError, match="code of its own, which are never") as caught,
            convert_library_errors("theirs", RequestError),
        ):
            raise ValueError(text)
        assert "False" not in str(caught.value)
        assert isinstance(caught.value, PacelineError)


def test_tokenizer_panic_is_not_an_ordinary_exception(tmp_path: Path) -> None:
    """What the tests above hold to be a panic is one."""
    write_byte_level_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    with pytest.raises(BaseException, match="precompiled_charsmap") as caught:
        Library.from_str(json.dumps({**content, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}))
    assert not isinstance(caught.value, Exception)


@pytest.mark.parametrize("write", [write_byte_level_tokenizer, write_byte_fallback_tokenizer])
def test_decoding_many_ids_without_the_gil_equals_decoding_few(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many are decoded without the interpreter lock."""
    tokenizer = opened(tmp_path, write=write)
    ids = [*tokenizer.encode("the é cat\n😀 </s>"), *range(tokenizer.vocab_size + 2)]
    texts = [tokenizer.decode(ids, skip_special_tokens=skips) for skips in (True, False)]
    monkeypatch.setattr(backend, "_MAX_IDS_DECODED_WITH_GIL", 3)
    assert [tokenizer.decode(ids, skip_special_tokens=skips) for skips in (True, False)] == texts


class MemoryInfo(ctypes.Structure):
    """The counts of glibc's mallinfo2; the eighth is the bytes in use."""

    _fields_ = [("counts", ctypes.c_size_t * 10)]


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="no mallinfo2 in this C library")
def test_a_freed_tokenizer_leaves_no_memory_behind(mini_dir: Path) -> None:
    """The tokenizers library keeps a cache of words of every BPE model that a thread used."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = MemoryInfo
    words = " ".join(f"word{number}" for number in range(500))
    in_use = []
    for _ in range(6):
        Tokenizer.open(mini_dir).encode(words)
        gc.collect()
        in_use.append(library.mallinfo2().counts[7])
    assert in_use[-1] - in_use[1] < 50_000
