"""Pieces like <0xE4>, by which a vocabulary spells the characters it lacks."""

import re
from codecs import utf_8_decode
from collections.abc import Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def without_bad_bytes(pieces: Sequence[str]) -> list[str]:
    """The same pieces with a replacement character for every byte that is part of no character."""
    mended: list[str] = []
    run = bytearray()
    for piece in (*pieces, ""):
        if _BYTE_PIECE.fullmatch(piece):
            run.append(_byte(piece))
            continue
        for character in run.decode("utf-8", "surrogateescape"):  # a bad byte becomes a surrogate
            is_bad = "\udc80" <= character <= "\udcff"
            mended += [REPLACEMENT] if is_bad else [f"<0x{byte:02X}>" for byte in character.encode()]
        run.clear()
        mended.append(piece)
    return mended[:-1]


def num_open_bytes(pieces: Sequence[str]) -> int:
    """Bytes at the end that may still become a character, three at most; only the last three pieces count."""
    run = bytearray()
    for piece in reversed(pieces[-3:]):
        if not _BYTE_PIECE.fullmatch(piece):
            break
        run.insert(0, _byte(piece))
    _, num_closed = utf_8_decode(run, "replace", False)  # more may follow
    return len(run) - num_closed


def _byte(piece: str) -> int:
    return int(piece[3:5], 16)
