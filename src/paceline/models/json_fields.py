"""Typed access to the fields of a JSON file, with errors that name the file, the field and the value."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from paceline.errors import CheckpointError, shortened

MAX_FLOAT32 = 3.4028234e38


class RecordedFields(dict[str, Any]):
    """The fields of a JSON file. `names_read` has the names that were looked up, present or absent."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.names_read = set[str]()

    def get(self, name: str, default: Any = None) -> Any:
        self.names_read.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names_read.add(name)
        return super().__getitem__(name)


@dataclass(frozen=True, slots=True)
class JsonFields:
    """Typed access to the fields of one JSON file."""

    values: Mapping[str, Any]
    path: Path

    def integer(self, name: str, default: int | None = None, *, null: int | None = None, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        """Return an integer in a range: `default` if the field is absent; if it is null, `null` or, without this argument, `default`."""
        value = self.values.get(name, default)
        if value is None:
            value = default if null is None else null
        if value is None:
            raise CheckpointError(f"{self.path} has no {name!r}: it does not describe a supported decoder")
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise CheckpointError(f"{self.path}: {name} = {shortened(value)}, expected an integer from {minimum} to {maximum}")
        return value

    def optional_number(self, name: str) -> float | None:
        """Return a number in the range of float32; None if the field is absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not _is_finite(value):
            raise CheckpointError(
                f"{self.path}: {name} = {shortened(value)}, expected a number from -{MAX_FLOAT32:.3g} to {MAX_FLOAT32:.3g} (float32)"
            )
        return float(value)

    def number(self, name: str, default: float) -> float:
        value = self.optional_number(name)
        return default if value is None else value

    def positive_number(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.optional_number(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.path} has no {name!r}, which its rope type needs")
        if value <= 0:
            raise CheckpointError(f"{self.path}: {name} = {value}, expected a number above 0")
        return value

    def epsilon(self, name: str, default: float) -> float:
        """Return the epsilon of an RMS norm, a number from 0 to 1."""
        value = self.number(name, default)
        if not 0.0 <= value <= 1.0:
            raise CheckpointError(f"{self.path}: {name} = {value}, expected a number from 0 to 1")
        return value

    def positive_numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return `count` finite numbers above 0."""
        value = self.values.get(name)
        if not isinstance(value, list | tuple) or len(value) != count or not all(_is_finite(item) and item > 0 for item in value):
            shown = f"{len(value)} values" if isinstance(value, list | tuple) else shortened(value)
            raise CheckpointError(f"{self.path}: {name} holds {shown}, expected {count} numbers above 0")
        return tuple(float(item) for item in value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a boolean. An absent field or null has the value `default`."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {name} = {shortened(value)}, expected true or false")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return the token ids of a field that holds one, a list or null."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < 2**31 for token_id in ids):
            raise CheckpointError(f"{self.path}: {name} = {shortened(value)}, expected a token id or a list of them")
        return tuple(ids)


def _is_finite(value: object) -> TypeGuard[float]:
    """Return whether a value is a number in the range of float32. Integers of any size are compared without overflow."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -MAX_FLOAT32 <= value <= MAX_FLOAT32
