"""Checkpoints whose only tokenizer file is a SentencePiece model."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.errors import CheckpointError
from paceline.tokenizer import files
from paceline.tokenizer.tokenizer import Tokenizer

sentencepiece = pytest.importorskip("sentencepiece")
TEXTS = ("the cat sat on the mat", "two  spaces \nand a line", "a 1234 é 你", "")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint's tokenizer files, without tokenizer.json."""
    root = tmp_path_factory.mktemp("model")
    lines = [f"the cat number {number} sat on the mat and ran under the house" for number in range(200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(root / "tokenizer"), vocab_size=340, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    (root / "tokenizer.vocab").unlink()
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    (root / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return root


@pytest.mark.skipif(not files._is_installed("google.protobuf"), reason="no protobuf, with which transformers reads tokenizer.model")
def test_tokenizer_model_encodes_and_decodes_as_sentencepiece_does(directory: Path) -> None:
    """Except for spaces before a text, of which transformers counts one as the prefix."""
    tokenizer, reference = Tokenizer.open(directory), sentencepiece.SentencePieceProcessor(str(directory / "tokenizer.model"))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids) == reference.decode(ids), text
    assert tokenizer.encode("the cat")[0] == reference.bos_id()


@pytest.mark.skipif(not files._is_installed("google.protobuf"), reason="no protobuf, with which transformers reads tokenizer.model")
@pytest.mark.parametrize(("kind", "text"), [("T5Tokenizer", "encodes texts differently"), ("LlamaTokenizer", "is damaged")])
def test_tokenizer_model_that_is_converted_to_another_tokenizer_is_refused(directory: Path, tmp_path: Path, kind: str, text: str) -> None:
    """T5Tokenizer takes every model for one of the kind unigram. A part of a file can be read, without its last pieces."""
    content = (directory / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(content if "differently" in text else content[:2000])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=text):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("missing", files._CONVERTER_PACKAGES)
def test_tokenizer_model_without_its_libraries_is_an_error_with_the_way_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: None if name == missing else find_spec("json"))
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.model needs the packages sentencepiece and protobuf: pip install .*sentencepiece"
    ):
        Tokenizer.open(directory)


def test_version_of_a_tokenizer_model_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model.v3").write_bytes(b"\n")
    with pytest.raises(CheckpointError, match=r"rename tokenizer\.model\.v3 to tokenizer\.model"):
        Tokenizer.open(tmp_path)
