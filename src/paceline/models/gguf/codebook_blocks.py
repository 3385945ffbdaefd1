"""Convert GGUF blocks of 1 to 3 bits a weight, and NVFP4 blocks, to 4-bit codes and a table of values, without any change of values.

A block of an IQ1, IQ2 or IQ3 type stores signs, scales and indices into a codebook, whose entries are the magnitudes of 4 or 8 weights. In
each type a weight has at most 16 different values before scaling, so a 4-bit code for each weight is enough. The codebooks
are in the package `gguf`, which only these types need. Source of the layouts: ggml-common.h and ggml-quants.c of ggml.
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
Floats = NDArray[np.float32]
CodesScalesMinimums = tuple[Bytes | NDArray[np.int8], Floats, Floats | None]
"""Arrays of n blocks: codes as in `GroupedMatrix`, scales [n, groups in a block], and minimums of the same shape (None for some types)."""

_SIGN_BIT = np.uint8(8)  # this bit of a 4-bit code is set for negative values


def _signed_table(magnitudes: Sequence[int]) -> NDArray[np.int8]:
    """Return the values of the 16 codes. The low three bits of a code are the index of the magnitude, the fourth bit is the sign."""
    half = np.zeros(8, np.int8)
    half[: len(magnitudes)] = magnitudes
    return np.concatenate([half, -half])


IQ2_CODE_VALUES = _signed_table((8, 25, 43))
IQ3_XXS_CODE_VALUES = _signed_table((4, 12, 20, 28, 36, 44, 52, 62))
IQ3_S_CODE_VALUES = _signed_table((1, 3, 5, 7, 9, 11, 13, 15))
IQ1_CODE_VALUES = np.array([-7, 1, 9, *[0] * 5, -9, -1, 7, *[0] * 5], np.int8)
"""Eight times the values -1, 0 and 1 plus an offset, which is 1/8 for codes below 8 and -1/8 for the others."""
Q1_0_CODE_VALUES = np.array([-1, 1, *[0] * 14], np.int8)


@cache
def _codebook(name: str, magnitudes: tuple[int, ...]) -> Bytes:
    """Return the codebook of a block type, [number of entries, 4 or 8]. Its values are indices into `magnitudes`."""
    try:
        from gguf import quants
    except ImportError as error:
        raise BackendUnavailableError(f"GGUF blocks of type {name} need the package gguf: {install_command('gguf')}") from error
    quant_class: Any = getattr(quants, name)
    quant_class.init_grid()
    entries = np.asarray(quant_class.grid).reshape(quant_class.grid_shape)
    return np.searchsorted(np.array(magnitudes), entries).astype(np.uint8)


@cache
def _sign_bytes() -> Bytes:
    """Return a table of sign bytes by 7-bit index: each holds the signs of eight weights, of which an even number is negative."""
    index = np.arange(128, dtype=np.uint8)
    is_odd = np.unpackbits(index[:, None], axis=1).sum(axis=1, dtype=np.uint8) & np.uint8(1)
    signs: Bytes = index | is_odd << np.uint8(7)
    return signs


def _pack_with_signs(codes: Bytes, sign_bytes: Bytes) -> Bytes:
    """Return packed codes [n, 128] of n blocks, from 256 indices of magnitudes for each block and their sign bits in bytes [n, 32]."""
    signs = np.unpackbits(sign_bytes.reshape(len(codes), -1), axis=1, bitorder="little")
    return pack_nibbles(codes.reshape(len(codes), -1) | signs * _SIGN_BIT)


def read_float16_as_float32(blocks: Bytes, start: int = 0) -> NDArray[np.float32]:
    """Return the float16 at byte `start` of every block, as float32 [n, 1]."""
    return view_bytes_as(blocks, start, start + 2, "<f2").astype(np.float32)


def _read_nibbles(values: Bytes) -> NDArray[np.float32]:
    """Return the low and the high four bits of the first byte, then those of the second, and so on: [n, 2 * w] from [n, w]."""
    return np.stack([values & np.uint8(15), values >> np.uint8(4)], axis=2).reshape(len(values), -1).astype(np.float32)


def _shift_right(values: NDArray[Any], *shifts: int) -> NDArray[Any]:
    """Return values [n, w] shifted right by each of `shifts`, as [n, w * len(shifts)]."""
    shifted: NDArray[Any] = values[:, :, None] >> np.array(shifts, values.dtype)
    return shifted.reshape(len(values), -1)


def view_bytes_as(blocks: Bytes, start: int, end: int, item_type: str) -> NDArray[Any]:
    return np.ascontiguousarray(blocks[:, start:end]).view(item_type)


def _scales_with_half_steps(blocks: Bytes, factors: NDArray[Any], unit: float) -> NDArray[np.float32]:
    """Return block scale * (0.5 + factor) * unit. The product is exact, because all operands have few significant bits."""
    scales: NDArray[np.float32] = read_float16_as_float32(blocks) * (np.float32(0.5) + factors.astype(np.float32)) * np.float32(unit)
    return scales


def read_iq2_xxs(blocks: Bytes) -> CodesScalesMinimums:
    """Read blocks of 66 bytes. Every 32 weights share four 8-bit codebook indices, four 7-bit indices of sign bytes, and a 4-bit scale."""
    words = view_bytes_as(blocks, 2, 66, "<u4")
    entries = view_bytes_as(words[:, ::2].copy().view(np.uint8), 0, 32, "u1")
    signs = _sign_bytes()[_shift_right(words[:, 1::2], 0, 7, 14, 21) & np.uint32(127)]
    return (
        _pack_with_signs(_codebook("IQ2_XXS", (8, 25, 43))[entries], signs),
        _scales_with_half_steps(blocks, words[:, 1::2] >> 28, 0.25),
        None,
    )


def read_iq2_xs(blocks: Bytes) -> CodesScalesMinimums:
    """Read blocks of 74 bytes. Every 8 weights share a 9-bit codebook index and a 7-bit index of a sign byte; every 16 a 4-bit scale."""
    words = view_bytes_as(blocks, 2, 66, "<u2")
    codes = _codebook("IQ2_XS", (8, 25, 43))[words & np.uint16(511)]
    return _pack_with_signs(codes, _sign_bytes()[words >> 9]), _scales_with_half_steps(blocks, _read_nibbles(blocks[:, 66:]), 0.25), None


def read_iq2_s(blocks: Bytes) -> CodesScalesMinimums:
    """Read blocks of 82 bytes. Every 8 weights share a 10-bit codebook index and have a sign bit each; every 16 share a 4-bit scale."""
    high = (_shift_right(blocks[:, 66:74], 0, 2, 4, 6) & np.uint8(3)).astype(np.uint16) << 8
    codes = _codebook("IQ2_S", (8, 25, 43))[blocks[:, 2:34] | high]
    return _pack_with_signs(codes, blocks[:, 34:66]), _scales_with_half_steps(blocks, _read_nibbles(blocks[:, 74:]), 0.25), None


def read_iq3_xxs(blocks: Bytes) -> CodesScalesMinimums:
    """Read blocks of 98 bytes. Every 4 weights share an 8-bit codebook index; every 32 four 7-bit sign-byte indices and a 4-bit scale."""
    words = view_bytes_as(blocks, 66, 98, "<u4")
    signs = _sign_bytes()[_shift_right(words, 0, 7, 14, 21) & np.uint32(127)]
    codes = _codebook("IQ3_XXS", (4, 12, 20, 28, 36, 44, 52, 62))[blocks[:, 2:66]]
    return _pack_with_signs(codes, signs), _scales_with_half_steps(blocks, words >> 28, 0.5), None


def read_iq3_s(blocks: Bytes) -> CodesScalesMinimums:
    """Read blocks of 110 bytes. Every 4 weights share a 9-bit codebook index and have a sign bit each; every 32 share a 4-bit scale."""
    high = (_shift_right(blocks[:, 66:74], *range(8)) & np.uint8(1)).astype(np.uint16) << 8
    codes = _codebook("IQ3_S", (1, 3, 5, 7, 9, 11, 13, 15))[blocks[:, 2:66] | high]
    return _pack_with_signs(codes, blocks[:, 74:106]), read_float16_as_float32(blocks) * (1 + 2 * _read_nibbles(blocks[:, 106:])), None


def read_iq1_s(blocks: Bytes) -> CodesScalesMinimums:
    """Read blocks of 50 bytes. Every 8 weights share an 11-bit codebook index; every 32 a 3-bit scale and the sign of an offset of 1/8."""
    high = view_bytes_as(blocks, 34, 50, "<u2")
    entries = blocks[:, 2:34] | (_shift_right(high, 0, 3, 6, 9) & np.uint16(7)) << 8
    codes = _codebook("IQ1_S", (-1, 0, 1))[entries].reshape(len(blocks), 8, 32) | (high >> 15).astype(np.uint8)[:, :, None] * _SIGN_BIT
    scales = read_float16_as_float32(blocks) * (2 * (high >> 12 & 7) + 1).astype(np.float32) * np.float32(0.125)
    return pack_nibbles(codes.reshape(len(blocks), -1)), scales, None


def read_iq1_m(blocks: Bytes) -> CodesScalesMinimums:
    """Read blocks of 56 bytes. Every 8 weights share an 11-bit codebook index and the sign of an offset of 1/8; every 16 a 3-bit scale.

    The block's float16 scale is split over the top four bits of the four 16-bit words that hold the 3-bit scales.
    """
    high, words = _shift_right(blocks[:, 32:48], 0, 4), view_bytes_as(blocks, 48, 56, "<u2")
    half = ((words >> 12) << np.array([0, 4, 8, 12], np.uint16)).sum(axis=1, dtype=np.uint16, keepdims=True)
    entries = blocks[:, :32] | (high & np.uint8(7)).astype(np.uint16) << 8
    codes = _codebook("IQ1_S", (-1, 0, 1))[entries] | (high & _SIGN_BIT)[:, :, None]
    factors = (2 * (_shift_right(words, 0, 3, 6, 9) & np.uint16(7)) + 1).astype(np.float32)
    return pack_nibbles(codes.reshape(len(blocks), -1)), half.view("<f2").astype(np.float32) * factors * np.float32(0.125), None


def read_tq1_0(blocks: Bytes) -> CodesScalesMinimums:
    """Read blocks of 54 bytes. A byte b holds five weights of -1, 0 or 1, the first base-3 digits of b / 256. Bytes 48 to 51 hold four."""
    parts = []
    for start, end, width, count in ((0, 32, 32, 5), (32, 48, 16, 5), (48, 52, 4, 4)):
        digits = blocks[:, start:end].reshape(len(blocks), -1, 1, width) * np.array([3**power for power in range(count)], np.uint8)[:, None]
        parts.append((digits.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(blocks), -1))
    return pack_nibbles(np.concatenate(parts, axis=1)), np.repeat(read_float16_as_float32(blocks, 52), 8, 1), None


def read_tq2_0(blocks: Bytes) -> CodesScalesMinimums:
    """Read blocks of 66 bytes. A byte holds four weights of -1, 0 or 1, which are 32 columns apart."""
    codes = (blocks[:, :64].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & np.uint8(3)
    return pack_nibbles(codes.reshape(len(blocks), -1)), np.repeat(read_float16_as_float32(blocks, 64), 8, 1), None


def read_nvfp4(blocks: Bytes) -> CodesScalesMinimums:
    """Read blocks of 36 bytes: four scales, which are unsigned E4M3 floats, and 16 FP4 weights for each of them."""
    exponents, mantissas = (blocks[:, :4] >> np.uint8(3) & np.uint8(15)).astype(np.int32), (blocks[:, :4] & np.uint8(7)).astype(np.float32)
    normal = np.ldexp(1 + mantissas / 8, exponents - 7)
    scales = np.where(exponents == 0, np.ldexp(mantissas, -9), normal).astype(np.float32) * np.float32(0.5)
    scales[blocks[:, :4] == 127] = 0.0
    packed = blocks[:, 4:].reshape(len(blocks), 4, 8)
    return pack_nibbles(np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=2).reshape(len(blocks), -1)), scales, None


def read_q1_0(blocks: Bytes) -> CodesScalesMinimums:
    """Read blocks of 18 bytes: a scale and 128 bits. Bit 1 is the weight 1, bit 0 the weight -1."""
    return pack_nibbles(np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")), np.repeat(read_float16_as_float32(blocks), 4, 1), None
