"""Typed access to what a GGUF file says about its tokenizer, with errors that name file, key and value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError, shortened

WAY_OUT = "use the model's safetensors directory, which holds tokenizer.json, or a newer conversion of it"


@dataclass(frozen=True, slots=True)
class TokenizerFields:
    """The metadata of one file.

    Names without a dot are those of `tokenizer.ggml.`, except that chat templates are directly in `tokenizer.`.
    """

    values: Mapping[str, Any]
    source: object

    @staticmethod
    def full_key(name: str) -> str:
        if name.startswith("chat_template"):
            return f"tokenizer.{name}"
        return name if "." in name else f"tokenizer.ggml.{name}"

    def error(self, name: str, value: object, wrong: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {self.full_key(name)} is {shortened(value)}, {wrong}; {WAY_OUT}")

    def missing(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.source} has no {self.full_key(name)}, so it holds no tokenizer we can read; {WAY_OUT}")

    def get(self, name: str) -> Any:
        return self.values.get(self.full_key(name))

    def text(self, name: str, default: str | None = None) -> str:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise self.missing(name)
        if not isinstance(value, str) or not _is_unicode(value):
            raise self.error(name, value, "not a text in UTF-8")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, value, "not true or false")
        return value

    def array(self, name: str) -> list[Any] | None:
        """The items of an array as Python values, or None where it is absent."""
        value = self.get(name)
        if value is None:
            return None
        value = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise self.error(name, value, "not an array")
        return list(value)

    def required_strings(self, name: str) -> list[str]:
        """Return an array of strings.

        Raises:
            CheckpointError: it is absent, or an item is not a string in UTF-8.
        """
        items = self.array(name)
        if items is None:
            raise self.missing(name)
        try:
            "".join(items).encode("utf-8")
        except (TypeError, UnicodeEncodeError):
            index = next(index for index, item in enumerate(items) if not isinstance(item, str) or not _is_unicode(item))
            raise self.error(f"{name}[{index}]", items[index], "not a text in UTF-8") from None
        return items

    def one_per_token(self, name: str, num_tokens: int, kinds: str) -> NDArray[Any] | None:
        """An array of numbers, one for every token, of a numpy kind among `kinds`; None where it is absent."""
        items = self.array(name)
        if items is None:
            return None
        if len(items) != num_tokens:
            raise self.error(name, f"{len(items)} values", f"but there are {num_tokens} tokens")
        try:
            numbers = np.asarray(items)
        except ValueError:  # lists of several lengths
            numbers = np.empty(0, dtype=object)
        if numbers.dtype.kind not in kinds or numbers.shape != (num_tokens,):
            raise self.error(name, items, "not an array of numbers of its kind")
        return numbers

    def token_id(self, name: str, num_tokens: int, default: int | None = None) -> int | None:
        value = self.get(name)
        if value is None:
            return default if default is not None and default < num_tokens else None
        value = value.item() if hasattr(value, "item") else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
            raise self.error(name, value, f"not a token id from 0 to {num_tokens - 1}")
        return value


def _is_unicode(text: str) -> bool:
    """Whether it can be written in UTF-8; half a surrogate pair, which stands for a byte that could not be read, cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
