"""What a model is called, from what the user typed and where its files lie: tables of published drafters go by names."""

import re
from pathlib import Path

from paceline.errors import PacelineError
from paceline.models.checkpoint import is_gguf
from paceline.models.gguf.file import open_gguf
from paceline.proof.recommendation.published import plain_name
from paceline.small_files import read_json

_CACHED = re.compile(r"models--(.+)")  # the hub's cache: models--OWNER--NAME/snapshots/COMMIT
_STORED_AS = re.compile(r"(?:-ud)?[-._](?:(?:i?q\d\w*)|f16|f32|bf16|fp16|fp8|mxfp4|int4|int8|awq|gptq|gguf|qat)$", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_MOST_MARKS = 4  # -GPTQ-Int4, -qat-q4_0-gguf


def names_of(model: str, path: Path | None) -> tuple[str, ...]:
    """Names a model goes by, without owners, in small letters, without marks of how weights are stored; the likeliest first.

    Args:
        model: as the user typed it.
        path: of its files; None = they are not here.
    """
    found = [model] if path is None else [*_cached_id(path), path.stem if path.is_file() else path.name, *_told(path)]
    plain = [_without_marks(plain_name(name)) for name in found if name]
    return tuple(dict.fromkeys(name for name in plain if name))


def _cached_id(path: Path) -> list[str]:
    return [match[1].replace("--", "/") for part in path.parts if (match := _CACHED.fullmatch(part))]


def _told(path: Path) -> list[str]:
    """What the files themselves say."""
    try:
        if is_gguf(path):
            metadata = open_gguf(path).metadata
            told = [metadata.get("general.name"), metadata.get("general.basename")]
        else:
            told = [(read_json(path / "config.json") or {}).get("_name_or_path")]
    except PacelineError:  # reading the model will say so
        return []
    return [name.replace(" ", "-") for name in told if isinstance(name, str)]


def _without_marks(name: str) -> str:
    name = _PART.sub("", name)
    for _ in range(_MOST_MARKS):
        name = _STORED_AS.sub("", name)
    return name
