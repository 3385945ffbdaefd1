"""Reading JSON bodies without blocking the event loop.

A C call holds Python's interpreter lock until it returns: `json.loads` of 8 MB blocks every thread for up to 2 s. Bodies that may take
long are parsed in a worker thread by the pure-Python scanner of `json`, which other threads interrupt. A string is decoded in one C call:
8 MB take at most 13 ms.
"""

import json
from collections.abc import Callable
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]  # not in typeshed
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from paceline.server.errors import HttpError

MAX_INLINE_BYTES = 16_384
"""Of a body that is parsed in the event loop: at most 5 ms."""
MAX_CONTAINERS = 50_000
"""Objects and lists of a body. 100 tools of a coding agent have about 5,000."""
MAX_MEMBERS = 10_000
"""Members of an object."""
MAX_ITEMS = 500_000
"""Items of a list; a prompt of token ids is the longest. Validating so many takes 30 ms, which no other thread interrupts."""


def parse_json(body: bytes) -> Any:
    """Return what `json.loads` does; other threads can run meanwhile.

    Raises:
        ValueError: as `json.loads`.
        HttpError: it has more than `MAX_CONTAINERS` objects and lists, an object more than `MAX_MEMBERS` members, or a list more than
            `MAX_ITEMS` items.
    """
    return _Decoder().decode(body.decode(json.detect_encoding(body)))


class _Decoder(json.JSONDecoder):
    """`json`'s decoder with its pure-Python scanner."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=_dict)
        self._num_containers = 0
        self.parse_object, self.parse_array = self._object, self._array
        self.scan_once = py_make_scanner(self)

    def _object(self, *arguments: Any) -> Any:
        self._count_container()
        return JSONObject(*arguments)

    def _array(self, start: tuple[str, int], scan_once: Callable[[str, int], Any]) -> Any:
        self._count_container()
        num_items = 0

        def scan_counted(text: str, index: int) -> Any:
            nonlocal num_items
            num_items += 1
            if num_items > MAX_ITEMS:
                raise HttpError(400, f"a list of the body has more than {MAX_ITEMS} items: send fewer", code="invalid_value")
            return scan_once(text, index)

        return JSONArray(start, scan_counted)

    def _count_container(self) -> None:
        self._num_containers += 1
        if self._num_containers > MAX_CONTAINERS:
            raise HttpError(400, f"the body has more than {MAX_CONTAINERS} objects and lists: send fewer", code="invalid_value")


def _dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_MEMBERS:
        raise HttpError(400, f"an object of the body has {len(pairs)} members: send at most {MAX_MEMBERS}", code="invalid_value")
    return dict(pairs)
