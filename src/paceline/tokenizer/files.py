"""The tokenizer files of a checkpoint directory, opened with transformers after a check of their sizes."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, library_errors, shortened
from paceline.model_directory import names_in
from paceline.small_files import TOKENIZER_BYTES, check_small, is_file, read_json, read_small

MAX_ADDED_ID = 1 << 21
"""Limit for ids of tokens that tokenizer_config.json adds: lists of that length are made."""

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".bpe", ".tiktoken", ".vocab")
_TEMPLATES = "additional_chat_templates"


def open_pretrained(directory: Path) -> Any:
    """What transformers makes of the tokenizer in a directory; code that a checkpoint may bring along is never run.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    settings = _checked_settings(directory)
    with library_errors(f"{directory} holds no tokenizer we can read; it needs a whole tokenizer.json", CheckpointError):
        with _without_advice():
            kind = _tokenizer_class(directory, settings)
        return kind.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)


@contextmanager
def _without_advice() -> Iterator[None]:
    """Without torch, importing transformers prints that its models will not run, which we do not need."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    if name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _checked_settings(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, after a check of all other files that may be read."""
    folders = [directory, directory / _TEMPLATES] if (directory / _TEMPLATES).is_dir() else [directory]
    for folder in folders:
        for name in names_in(folder):
            path = folder / name
            if path.suffix in _SUFFIXES and not path.is_dir():
                check_small(path, TOKENIZER_BYTES)
    settings = read_json(directory / "tokenizer_config.json", TOKENIZER_BYTES) or {}
    _check_names(settings, directory / "tokenizer_config.json")
    _check_names(read_json(directory / "special_tokens_map.json", TOKENIZER_BYTES) or {}, directory / "special_tokens_map.json")
    kind = settings.get("tokenizer_class")
    if kind is not None and not (isinstance(kind, str) and kind.isidentifier()):
        raise CheckpointError(f"{directory}: tokenizer_class is {shortened(kind)}, not the name of one; download it again")
    added = settings.get("added_tokens_decoder")
    _check_added(added if isinstance(added, dict) else (), directory)
    if added is None:  # then they are taken from the other file
        content = read_small(directory / "tokenizer.json", TOKENIZER_BYTES) or b""
        with suppress(ValueError, RecursionError):  # other errors are reported by what reads the rest of it
            tokenizer = json.loads(content)
            _check_names(tokenizer.get("added_tokens") if isinstance(tokenizer, dict) else None, directory / "tokenizer.json")
    return settings


def _check_names(values: object, path: Path) -> None:
    """Refuse names with control characters: the tokenizers library prints names it does not know."""
    level = [values]
    while level:
        names = [name for one in level if isinstance(one, dict) for name in one]
        wrong = next((name for name in names if not name.isprintable()), None)
        if wrong is not None:
            raise CheckpointError(f"{path} holds a value named {shortened(wrong)}; download it again")
        items = (item for one in level for item in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()))
        level = [item for item in items if isinstance(item, dict | list)]


def _check_added(ids: Iterable[object], directory: Path) -> None:
    for token_id in ids:
        if not str(token_id).isdecimal() or len(str(token_id)) > 9 or int(str(token_id)) >= MAX_ADDED_ID:
            raise CheckpointError(
                f"{directory}: tokenizer_config.json adds a token of id {shortened(token_id)}, expected a number below {MAX_ADDED_ID}; "
                "download it again"
            )


def _tokenizer_class(directory: Path, settings: dict[str, Any]) -> Any:
    """What AutoTokenizer would choose; asking it imports torch where that is installed, seconds a common tokenizer need not wait."""
    if settings.get("tokenizer_class") in _PLAIN_CLASSES and is_file(directory / "tokenizer.json"):
        from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer
