"""Typed access to a checkpoint's metadata, with errors that name the file and the value."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class JsonFields:
    """Typed access to the values of one JSON file, with errors that name it."""

    values: Mapping[str, Any]
    path: Path

    def size(self, name: str, default: int | None = None, *, null: int | None = None) -> int:
        """A count >= 1; `default` where it is absent, `null` (or the default) where it is null."""
        value = self.values.get(name, default)
        if value is None:
            value = default if null is None else null
        if value is None:
            raise CheckpointError(f"{self.path} has no {name!r}: it does not describe a decoder we can run")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise CheckpointError(f"{self.path}: {name} = {value!r}, expected an integer from 1 to {2**31 - 1}")
        return value

    def optional_number(self, name: str) -> float | None:
        """A finite number, or None where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not _is_finite(value):
            raise CheckpointError(f"{self.path}: {name} = {value!r}, expected a finite number")
        return float(value)

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self.optional_number(name)
        return default if value is None else value

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.optional_number(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.path} has no {name!r}, which its rope type needs")
        if value <= 0:
            raise CheckpointError(f"{self.path}: {name} = {value!r}, expected a number above 0")
        return value

    def positives(self, name: str, count: int) -> tuple[float, ...]:
        """`count` finite numbers above 0."""
        value = self.values.get(name)
        if not isinstance(value, list | tuple) or len(value) != count or not all(_is_positive(item) for item in value):
            shown = f"{len(value)} values" if isinstance(value, list | tuple) else repr(value)
            raise CheckpointError(f"{self.path}: {name} holds {shown}, expected {count} numbers above 0")
        return tuple(float(item) for item in value)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false; null counts as absent."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {name} = {value!r}, expected true or false")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, several or none."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids):
            raise CheckpointError(f"{self.path}: {name} = {value!r}, expected a token id or a list of them")
        return tuple(ids)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value) and value > 0


def _is_finite(value: float) -> bool:
    """Also of a whole number that no float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
