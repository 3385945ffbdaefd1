"""GGUF's block types of 1 to 3 bits a weight as groups of 4-bit codes with a table of values: the same values, bit for bit.

In the types named IQ1, IQ2 and IQ3 a block stores indices into a codebook, whose entries are 4 or 8 magnitudes, next to signs and scales.
Whatever the entry, a weight has at most 16 different values, so it becomes a 4-bit code. The codebooks are in the `gguf` package, which
only these types need. Layouts: ggml-common.h and ggml-quants.c of ggml.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import BackendUnavailableError
from paceline.installation import install_command
from paceline.models.grouped import pack_nibbles

Bytes = NDArray[np.uint8]
Parts = tuple[Bytes, NDArray[np.float32], None]
"""As in blocks.py: packed codes, scales [n, groups of a block], and no minimums."""

_SIGN = np.uint8(8)  # this bit of a code says that the value is negative


def _signed_table(magnitudes: Sequence[int]) -> NDArray[np.int8]:
    """Return the values of 16 codes: the magnitude of the low three bits, negative if the fourth is set."""
    half = np.zeros(8, np.int8)
    half[: len(magnitudes)] = magnitudes
    return np.concatenate([half, -half])


IQ2_VALUES = _signed_table((8, 25, 43))
IQ3_XXS_VALUES = _signed_table((4, 12, 20, 28, 36, 44, 52, 62))
IQ3_S_VALUES = _signed_table((1, 3, 5, 7, 9, 11, 13, 15))
IQ1_VALUES = np.array([-7, 1, 9, *[0] * 5, -9, -1, 7, *[0] * 5], np.int8)
"""Eight times -1, 0 and 1, plus 1 (the codes below 8) or minus 1."""
NVFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the values of a 4-bit float."""
Q1_VALUES = np.array([-1, 1, *[0] * 14], np.int8)


@cache
def _codebook(name: str, magnitudes: tuple[int, ...]) -> Bytes:
    """Return the codes of every entry of a type's codebook, [entries, 4 or 8]."""
    quants = _quants(name)
    quants.init_grid()
    entries = np.asarray(quants.grid).reshape(quants.grid_shape)
    codes = np.searchsorted(np.array(magnitudes), entries)
    return codes.astype(np.uint8)


def _quants(name: str) -> Any:
    try:
        from gguf import quants
    except ImportError as error:
        raise BackendUnavailableError(f"GGUF blocks of type {name} take the package gguf to read: {install_command('gguf')}") from error
    return getattr(quants, name)


@cache
def _sign_bytes() -> Bytes:
    """Return the eight signs, as bits, of each 7-bit index: the eighth makes their number even."""
    index = np.arange(128, dtype=np.uint8)
    is_odd = np.unpackbits(index[:, None], axis=1).sum(axis=1, dtype=np.uint8) & np.uint8(1)
    signs: Bytes = index | is_odd << np.uint8(7)
    return signs


def _packed(codes: Bytes, sign_bytes: Bytes) -> Bytes:
    """Return [n, …] codes of magnitudes with the signs of [n, 32] bytes, packed: [n, 128]."""
    signs = np.unpackbits(sign_bytes.reshape(len(codes), -1), axis=1, bitorder="little")
    return pack_nibbles(codes.reshape(len(codes), -1) | signs * _SIGN)


def _half(blocks: Bytes, start: int = 0) -> NDArray[np.float32]:
    """Return the float16 at byte `start` of every block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(values: Bytes) -> NDArray[np.float32]:
    """Return the low, then the high half of each byte of [n, w]: [n, 2 w]."""
    return np.stack([values & np.uint8(15), values >> np.uint8(4)], axis=2).reshape(len(values), -1).astype(np.float32)


def _shifted(values: NDArray[Any], *shifts: int) -> NDArray[Any]:
    """Return [n, w] values shifted right by each of `shifts`, [n, w * len(shifts)]."""
    shifted: NDArray[Any] = values[:, :, None] >> np.array(shifts, values.dtype)
    return shifted.reshape(len(values), -1)


def _view(blocks: Bytes, start: int, end: int, item_type: str) -> NDArray[Any]:
    return np.ascontiguousarray(blocks[:, start:end]).view(item_type)


def _quarter_scales(half: NDArray[np.float32], factors: NDArray[Any], share: float) -> NDArray[np.float32]:
    """Return half * (0.5 + factor) * share: few bits of each, so that no operation rounds."""
    scales: NDArray[np.float32] = half * (np.float32(0.5) + factors.astype(np.float32)) * np.float32(share)
    return scales


def iq2_xxs(blocks: Bytes) -> Parts:
    """Read blocks of 66 bytes: for each 32 weights four indices of a byte, four of signs of 7 bits, and a scale of 4."""
    words = _view(blocks, 2, 66, "<u4")
    entries = _view(words[:, ::2].copy().view(np.uint8), 0, 32, "u1")
    signs = _sign_bytes()[_shifted(words[:, 1::2], 0, 7, 14, 21) & np.uint32(127)]
    return _packed(_codebook("IQ2_XXS", (8, 25, 43))[entries], signs), _quarter_scales(_half(blocks), words[:, 1::2] >> 28, 0.25), None


def iq2_xs(blocks: Bytes) -> Parts:
    """Read blocks of 74 bytes: for each 8 weights an index of 9 bits and one of signs of 7; for each 16 a scale of 4."""
    words = _view(blocks, 2, 66, "<u2")
    codes = _codebook("IQ2_XS", (8, 25, 43))[words & np.uint16(511)]
    return _packed(codes, _sign_bytes()[words >> 9]), _quarter_scales(_half(blocks), _nibbles(blocks[:, 66:]), 0.25), None


def iq2_s(blocks: Bytes) -> Parts:
    """Read blocks of 82 bytes: for each 8 weights an index of 10 bits and a byte of signs; for each 16 a scale of 4 bits."""
    high = (_shifted(blocks[:, 66:74], 0, 2, 4, 6) & np.uint8(3)).astype(np.uint16) << 8
    codes = _codebook("IQ2_S", (8, 25, 43))[blocks[:, 2:34] | high]
    return _packed(codes, blocks[:, 34:66]), _quarter_scales(_half(blocks), _nibbles(blocks[:, 74:]), 0.25), None


def iq3_xxs(blocks: Bytes) -> Parts:
    """Read blocks of 98 bytes: for each 4 weights an index of a byte; for each 32 four indices of signs of 7 bits, and a scale of 4."""
    words = _view(blocks, 66, 98, "<u4")
    signs = _sign_bytes()[_shifted(words, 0, 7, 14, 21) & np.uint32(127)]
    codes = _codebook("IQ3_XXS", (4, 12, 20, 28, 36, 44, 52, 62))[blocks[:, 2:66]]
    return _packed(codes, signs), _quarter_scales(_half(blocks), words >> 28, 0.5), None


def iq3_s(blocks: Bytes) -> Parts:
    """Read blocks of 110 bytes: for each 4 weights an index of 9 bits; for each 8 a byte of signs; for each 32 a scale of 4 bits."""
    high = (_shifted(blocks[:, 66:74], *range(8)) & np.uint8(1)).astype(np.uint16) << 8
    codes = _codebook("IQ3_S", (1, 3, 5, 7, 9, 11, 13, 15))[blocks[:, 2:66] | high]
    return _packed(codes, blocks[:, 74:106]), _half(blocks) * (1 + 2 * _nibbles(blocks[:, 106:])), None


def iq1_s(blocks: Bytes) -> Parts:
    """Read blocks of 50 bytes: for each 8 weights an index of 11 bits; for each 32 a scale of 3 bits and the sign of the offset."""
    high = _view(blocks, 34, 50, "<u2")
    entries = blocks[:, 2:34] | (_shifted(high, 0, 3, 6, 9) & np.uint16(7)) << 8
    codes = _codebook("IQ1_S", (-1, 0, 1))[entries].reshape(len(blocks), 8, 32) | (high >> 15).astype(np.uint8)[:, :, None] * _SIGN
    scales = _half(blocks) * (2 * (high >> 12 & 7) + 1).astype(np.float32) * np.float32(0.125)
    return pack_nibbles(codes.reshape(len(blocks), -1)), scales, None


def iq1_m(blocks: Bytes) -> Parts:
    """Read blocks of 56 bytes: for each 8 weights an index of 11 bits and the sign of the offset; for each 16 a scale of 3 bits.

    The float16 of a block is stored in the top four bits of the four words of scales.
    """
    high, words = _shifted(blocks[:, 32:48], 0, 4), _view(blocks, 48, 56, "<u2")
    half = ((words >> 12) << np.array([0, 4, 8, 12], np.uint16)).sum(axis=1, dtype=np.uint16, keepdims=True)
    entries = blocks[:, :32] | (high & np.uint8(7)).astype(np.uint16) << 8
    codes = _codebook("IQ1_S", (-1, 0, 1))[entries] | (high & _SIGN)[:, :, None]
    factors = (2 * (_shifted(words, 0, 3, 6, 9) & np.uint16(7)) + 1).astype(np.float32)
    return pack_nibbles(codes.reshape(len(blocks), -1)), half.view("<f2").astype(np.float32) * factors * np.float32(0.125), None


def tq1_0(blocks: Bytes) -> Parts:
    """Read blocks of 54 bytes: five weights of -1, 0 and 1 in a byte, as a fraction of 256 in base 3; in the last four bytes four."""
    parts = []
    for start, end, width, count in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        digits = blocks[:, start:end].reshape(len(blocks), -1, 1, width) * np.array([3**power for power in range(count)], np.uint8)[:, None]
        parts.append((digits.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(blocks), -1))
    return pack_nibbles(np.concatenate(parts, axis=1)), np.repeat(_half(blocks, 52), 8, 1), None


def tq2_0(blocks: Bytes) -> Parts:
    """Read blocks of 66 bytes: four weights of -1, 0 and 1 in a byte, 32 bytes apart."""
    codes = (blocks[:, :64].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & np.uint8(3)
    return pack_nibbles(codes.reshape(len(blocks), -1)), np.repeat(_half(blocks, 64), 8, 1), None


def nvfp4(blocks: Bytes) -> Parts:
    """Read blocks of 36 bytes: four 8-bit floats without a sign (4 bits of exponent, 3 of mantissa), and 16 weights of 4 bits for each."""
    exponents, mantissas = (blocks[:, :4] >> np.uint8(3) & np.uint8(15)).astype(np.int32), (blocks[:, :4] & np.uint8(7)).astype(np.float32)
    normal = np.ldexp(1 + mantissas / 8, exponents - 7)
    scales = np.where(exponents == 0, np.ldexp(mantissas, -9), normal).astype(np.float32) * np.float32(0.5)
    scales[blocks[:, :4] == 127] = 0.0
    packed = blocks[:, 4:].reshape(len(blocks), 4, 8)
    return pack_nibbles(np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=2).reshape(len(blocks), -1)), scales, None


def q1_0(blocks: Bytes) -> Parts:
    """Read blocks of 18 bytes: 128 signs; a set bit is positive."""
    return pack_nibbles(np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")), np.repeat(_half(blocks), 4, 1), None
