"""Reading JSON bodies without blocking the event loop.

A C call holds Python's interpreter lock until it returns: `json.loads` of 8 MB blocks every thread for up to 2 s. Bodies that may take
long are parsed in a worker thread by the pure-Python scanner of `json`, which other threads interrupt, and strings are decoded in pieces.
"""

import json
from collections.abc import Callable
from json.decoder import JSONArray, JSONDecodeError, JSONObject, scanstring  # type: ignore[attr-defined]  # not in typeshed
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
_PIECE_CHARS = 65_536
_MAX_ESCAPE_CHARS = 12  # of a surrogate pair


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
        self.parse_object, self.parse_array, self.parse_string = self._object, self._array, _string
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


def _string(text: str, begin: int, strict: bool = True) -> tuple[str, int]:  # noqa: FBT001, FBT002  # the signature is json's
    """Decode a string in pieces; return it and the index after its closing quote."""
    pieces = list[str]()
    while len(text) - begin > _PIECE_CHARS:
        piece, end = _piece(text, begin, strict=strict)
        pieces.append(piece)
        if end > 0:
            return "".join(pieces), end
        begin = -end
    piece, end = scanstring(text, begin, strict)
    return "".join([*pieces, piece]), end


def _piece(text: str, begin: int, *, strict: bool) -> tuple[str, int]:
    """Decode up to a piece of a string; return it with the index after the closing quote, or minus the index where it goes on."""
    for num_chars in range(_PIECE_CHARS, _PIECE_CHARS + _MAX_ESCAPE_CHARS):
        part = text[begin : begin + num_chars]
        try:
            piece, end = scanstring(part + '"', 0, strict)
        except JSONDecodeError:  # the cut is inside an escape, or the string is wrong
            continue
        if end <= len(part):
            return piece, begin + end
        if not piece or not "\ud800" <= piece[-1] <= "\udbff":  # else the other half of a pair may follow
            return piece, -(begin + num_chars)
    piece, end = scanstring(text, begin, strict)
    return piece, end
