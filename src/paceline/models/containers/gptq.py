"""GPTQ: codes packed along the input dimension, zero points along the output dimension (AutoGPTQ, GPTQModel, AutoRound)."""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.containers.affine import Affine, AffineRows, column_group_numbers, has_short_mantissas, words_as_bytes
from paceline.models.containers.module import Container, PackedModule
from paceline.models.containers.settings import one_of, read_group_size
from paceline.models.json_fields import JsonFields
from paceline.models.storage.packed_matrix import PackedMatrix, Rows

_BITS = (2, 4, 8)  # code widths in bits; codes of other widths cross word boundaries


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings in config.json. Modules may have other bits and group sizes if `has_module_overrides` is set."""

    bits: int
    group_size: int
    is_gptq_v2: bool  # format gptq_v2, which stores zero points as they are; the first format stores them minus 1
    is_symmetric: bool
    has_module_overrides: bool


def gptq(fields: JsonFields) -> Container:
    """Return the container of a GPTQ `quantization_config`.

    Raises:
        CheckpointError: The bits, the group size or the packing is not supported.
    """
    key = "checkpoint_format" if "checkpoint_format" in fields.values else "format"
    is_gptq_v2 = one_of(fields, key, ("gptq", "gptq_v2"), default="gptq") == "gptq_v2"
    return container(fields, "GPTQ", is_gptq_v2=is_gptq_v2)


def container(fields: JsonFields, name: str, *, is_gptq_v2: bool) -> Container:
    """Return the container of this packing.

    Args:
        name: name of the tool that wrote it.
        is_gptq_v2: zero points are in the format gptq_v2.
    """
    settings = _Settings(
        one_of(fields, "bits", _BITS, default=4),
        read_group_size(fields),
        is_gptq_v2,
        fields.flag("sym", default=True),
        bool(fields.values.get("dynamic") or fields.values.get("extra_config")),
    )
    return Container(f"{name}, {settings.bits} bits", (".qweight",), partial(_read, settings=settings))


def _read(module: PackedModule, *, settings: _Settings) -> PackedMatrix:
    where = module.where("qweight")
    codes, zeros = module.take("qweight", "I32", "U32"), module.take("qzeros", "I32", "U32")
    scales = module.floats("scales")
    groups = module.take("g_idx", "I32", ndim=1).view(np.int32) if module.has("g_idx") else None
    outputs = codes.shape[1]
    bits = 32 * zeros.shape[1] // outputs if outputs and zeros.shape[1] else settings.bits
    bits = bits if settings.has_module_overrides else settings.bits
    if bits not in _BITS or codes.shape[0] * 32 % bits:
        raise CheckpointError(f"{where} holds codes of {bits} bits, supported are 2, 4 and 8: use a GGUF file of the model")
    columns = codes.shape[0] * 32 // bits
    group_size = columns if settings.group_size == -1 else settings.group_size
    if settings.has_module_overrides and columns % len(scales) == 0:
        group_size = columns // len(scales)
    count = -(-columns // group_size)
    for part, shape, wanted in (("qzeros", zeros.shape, (count, -(-outputs * bits // 32))), ("scales", scales.shape, (count, outputs))):
        if shape != wanted:
            raise CheckpointError(
                f"{where} has shape {list(codes.shape)}, which makes {part} {list(wanted)} with {bits} bits "
                f"in groups of {settings.group_size}, but it is {list(shape)}; config.json may belong to another model; "
                "otherwise download the model again"
            )
    offset = 0 if _stores_exact_zero_points(zeros, bits, settings) else 1
    words = {int(word) for word in np.unique(zeros)} if zeros.size else set()
    zero_point = _zero_point_of_word(words.pop(), bits, offset) if len(words) == 1 else None

    def rows(rows: Rows) -> AffineRows:
        numbers = np.arange(outputs)[rows]
        shifts = (numbers % (32 // bits) * bits).astype(np.uint32)
        found = (zeros[:, numbers * bits // 32] >> shifts & np.uint32(2**bits - 1)).astype(np.int32) + offset & 2**bits - 1
        own_scales = np.ascontiguousarray(scales[:, rows].T, np.float32)
        return AffineRows(words_as_bytes(codes[:, rows].T), own_scales, np.ascontiguousarray(found.T))

    arrays = (codes, zeros, scales, np.array([[offset]]), *(() if groups is None else (groups[None],)))
    order = None if groups is None else column_group_numbers(groups, columns, group_size, len(scales), f"{where}: its g_idx")
    return Affine(
        where=where, shape=(outputs, columns), arrays=arrays, bits=bits, group_size=group_size, zero=zero_point,
        has_short_scales=has_short_mantissas(scales), column_groups=order, read=rows,
    ).matrix()  # fmt: skip


def _stores_exact_zero_points(zeros: NDArray[np.uint32], bits: int, settings: _Settings) -> bool:
    """Return whether zero points are stored unchanged, not minus 1. Some symmetric files name the wrong format, which their value shows."""
    middle = sum(1 << (bits - 1 + shift) for shift in range(0, 32, bits))  # the zero point 2^(bits - 1) in every field of a 32-bit word
    ones = sum(1 << shift for shift in range(0, 32, bits))
    if settings.is_symmetric and zeros.size:
        if settings.is_gptq_v2 and (zeros == middle - ones).all():
            return False
        if not settings.is_gptq_v2 and (zeros == middle).all():
            return True
    return settings.is_gptq_v2


def _zero_point_of_word(word: int, bits: int, offset: int) -> int | None:
    """Return the zero point that fills all fields of a word; None if the fields differ."""
    zero_point = {(word >> shift) + offset & 2**bits - 1 for shift in range(0, 32, bits)}
    return zero_point.pop() if len(zero_point) == 1 else None
