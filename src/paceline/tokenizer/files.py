"""Opens the tokenizer of a checkpoint directory, after checking the sizes and contents of its files."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, convert_library_errors, shortened
from paceline.installation import install_command
from paceline.model_directory import list_directory
from paceline.small_files import TOKENIZER_BYTES, check_small, is_file, read_json, read_small
from paceline.tokenizer.ranks import find_rank_file, is_sentencepiece_model, read_rank_file

MAX_ADDED_ID = 1 << 21
"""Limit for token ids in tokenizer_config.json, because transformers allocates a list as long as the largest id."""

_FAST_TOKENIZER_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_CHECKED_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".bpe", ".tiktoken", ".vocab")
_TEMPLATE_FOLDER = "additional_chat_templates"
_SENTENCEPIECE_SPACE = "\u2581"
_CONVERSION_SAMPLE = "The cat (12 345),  two spaces \nand a line: a == b; \u00e9 \u4f60"
_CONVERTER_PACKAGES = ("sentencepiece", "google.protobuf")


def open_pretrained(directory: Path) -> Any:
    """Open a directory's tokenizer with transformers, or from a rank file if there is no tokenizer.json. Never runs the directory's code.

    Raises:
        CheckpointError: the directory contains no tokenizer, or it cannot be read.
    """
    settings = _check_files(directory)
    rank_file = find_rank_file(directory)
    if rank_file is not None:
        return read_rank_file(rank_file, settings, _chat_templates(directory, settings))
    model = _sentencepiece_model(directory)
    with convert_library_errors(f"{directory} contains no readable tokenizer; it needs a complete tokenizer.json", CheckpointError):
        with _suppress_torch_warning():
            from_pretrained = _tokenizer_loader(directory, settings)
        tokenizer = from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)
    _check_vocabulary(tokenizer, directory)
    if model is not None:
        _check_conversion(tokenizer, model)
    return tokenizer


def has_template_file(directory: Path) -> bool:
    """Return whether the files of a directory contain a chat template, without opening the tokenizer."""
    if any(is_file(directory / name) for name in ("chat_template.jinja", "chat_template.json")) or (directory / _TEMPLATE_FOLDER).is_dir():
        return True
    return bool((read_json(directory / "tokenizer_config.json", TOKENIZER_BYTES) or {}).get("chat_template"))


def _chat_templates(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the Jinja sources of a directory by name; a file has precedence over tokenizer_config.json."""
    configured = settings.get("chat_template")
    if isinstance(configured, list):
        templates = {item["name"]: item["template"] for item in configured}
    else:
        templates = {"default": configured or (read_json(directory / "chat_template.json", TOKENIZER_BYTES) or {}).get("chat_template")}
    paths = {"default": directory / "chat_template.jinja"}
    folder = directory / _TEMPLATE_FOLDER
    paths |= {
        name.removesuffix(".jinja"): folder / name
        for name in (list_directory(folder) if folder.is_dir() else ())
        if name.endswith(".jinja")
    }
    for name, path in paths.items():
        source = _read_template(path)
        if source is not None:
            templates[name] = source
    return {name: source for name, source in templates.items() if isinstance(source, str) and source}


def _read_template(path: Path) -> str | None:
    content = read_small(path, TOKENIZER_BYTES)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 (byte {error.start}); download it again") from error


@contextmanager
def _suppress_torch_warning() -> Iterator[None]:
    """Context manager: suppress transformers' warning that its models need torch, because only its tokenizers are used."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    if name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _check_files(directory: Path) -> dict[str, Any]:
    """Check all files that transformers may read; return the content of tokenizer_config.json."""
    folders = [directory, directory / _TEMPLATE_FOLDER] if (directory / _TEMPLATE_FOLDER).is_dir() else [directory]
    for folder in folders:
        for name in list_directory(folder):
            path = folder / name
            if path.suffix in _CHECKED_SUFFIXES and not path.is_dir():
                check_small(path, TOKENIZER_BYTES)
                if path.suffix == ".jinja":
                    _read_template(path)
    settings = read_json(directory / "tokenizer_config.json", TOKENIZER_BYTES) or {}
    _check_keys(settings, directory / "tokenizer_config.json")
    _check_keys(read_json(directory / "special_tokens_map.json", TOKENIZER_BYTES) or {}, directory / "special_tokens_map.json")
    template = settings.get("chat_template")
    named = template if isinstance(template, list) else [{"name": "default", "template": template or ""}]
    if not all(isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str) for one in named):
        expected = "expected a text, or a list of objects with name and template"
        raise CheckpointError(
            f"{directory}: chat_template in tokenizer_config.json is {shortened(template)}, {expected}; download it again"
        )
    kind = settings.get("tokenizer_class")
    if kind is not None and not (isinstance(kind, str) and kind.isidentifier()):
        raise CheckpointError(f"{directory}: tokenizer_class is {shortened(kind)}, expected the name of a class; download it again")
    added = settings.get("added_tokens_decoder")
    _check_added_ids(added if isinstance(added, dict) else (), directory)
    if added is None:  # without this key, transformers reads the added tokens from tokenizer.json
        content = read_small(directory / "tokenizer.json", TOKENIZER_BYTES) or b""
        with suppress(ValueError, RecursionError):  # the tokenizers library will raise an error for damaged JSON
            tokenizer = json.loads(content)
            _check_keys(tokenizer.get("added_tokens") if isinstance(tokenizer, dict) else None, directory / "tokenizer.json")
    return settings


def _sentencepiece_model(directory: Path) -> Path | None:
    """Return the SentencePiece model that transformers will convert; None if there is a tokenizer.json, or no such model."""
    path = directory / "tokenizer.model"
    if is_file(directory / "tokenizer.json"):
        return None
    if not is_file(path):
        versions = [name for name in list_directory(directory) if name.startswith("tokenizer.model.v")]  # mistral-common's file names
        if versions:
            raise CheckpointError(f"{directory} has no tokenizer.json and no tokenizer.model; rename {versions[-1]} to tokenizer.model")
        return None
    if not is_sentencepiece_model(path):
        return None
    if not all(map(_is_installed, _CONVERTER_PACKAGES)):
        raise CheckpointError(
            f"{directory} has no tokenizer.json, and its tokenizer.model needs the packages sentencepiece and protobuf: "
            f"{install_command('sentencepiece')}"
        )
    return path


def _check_conversion(tokenizer: Any, model: Path) -> None:
    """Refuse a tokenizer that encodes differently from its SentencePiece model, whose settings some transformers classes ignore."""
    import sentencepiece

    with convert_library_errors(f"{model} is damaged: download it again", CheckpointError):
        expected = sentencepiece.SentencePieceProcessor(model_proto=read_small(model, TOKENIZER_BYTES)).encode(_CONVERSION_SAMPLE)
    if tokenizer.encode(_CONVERSION_SAMPLE, add_special_tokens=False) != expected:
        raise CheckpointError(
            f"{model}: transformers converts it to a {type(tokenizer).__name__}, which encodes texts differently from sentencepiece: "
            "correct tokenizer_class in tokenizer_config.json, or use a tokenizer.json"
        )


def _check_vocabulary(tokenizer: Any, directory: Path) -> None:
    """Refuse a vocabulary of special tokens only: transformers builds one if there is only a tokenizer_config.json."""
    names = {*tokenizer.all_special_tokens, _SENTENCEPIECE_SPACE}
    if tokenizer.vocab_size <= len(names) and set(tokenizer.get_vocab()) <= names:
        raise CheckpointError(f"{directory} contains no vocabulary of a tokenizer: download its tokenizer.json")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that contains the module is missing
        return False


def _check_keys(values: object, path: Path) -> None:
    """Check that no key has control characters, because the tokenizers library prints unknown keys to the terminal."""
    level = [values]
    while level:
        names = [name for one in level if isinstance(one, dict) for name in one]
        wrong = next((name for name in names if not name.isprintable()), None)
        if wrong is not None:
            raise CheckpointError(f"{path} has a value with the name {shortened(wrong)}; download it again")
        items = (item for one in level for item in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()))
        level = [item for item in items if isinstance(item, dict | list)]


def _check_added_ids(ids: Iterable[object], directory: Path) -> None:
    for token_id in ids:
        if not str(token_id).isdecimal() or len(str(token_id)) > 9 or int(str(token_id)) >= MAX_ADDED_ID:
            raise CheckpointError(
                f"{directory}: tokenizer_config.json adds a token of id {shortened(token_id)}, expected a number below {MAX_ADDED_ID}; "
                "download it again"
            )


def _tokenizer_loader(directory: Path, settings: dict[str, Any]) -> Callable[..., Any]:
    """Return the transformers function that opens a tokenizer: AutoTokenizer only if necessary, because importing torch takes seconds.

    AutoTokenizer gets only what determines its class: it would validate the whole config.json, including values that are not used here.
    """
    if settings.get("tokenizer_class") in _FAST_TOKENIZER_CLASSES and is_file(directory / "tokenizer.json"):
        from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained
    from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

    fields = read_json(directory / "config.json") or {}
    relevant = {name: fields[name] for name in ("model_type", "tokenizer_class") if isinstance(fields.get(name), str)}
    try:
        config = AutoConfig.for_model(**{"model_type": "", **relevant})
    except ValueError:  # transformers does not have the model
        config = PreTrainedConfig(**relevant)
    return partial(AutoTokenizer.from_pretrained, config=config)
