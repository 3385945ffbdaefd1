"""GPTQ: codes packed along the input dimension, zero points along the output dimension (AutoGPTQ, GPTQModel, AutoRound)."""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.containers.affine import Affine, AffineRows, as_stream, is_short, order_of
from paceline.models.containers.module import Container, PackedModule
from paceline.models.containers.settings import group_size, one_of
from paceline.models.json_fields import JsonFields
from paceline.models.storage.packed_matrix import PackedMatrix, Rows

_BITS = (2, 4, 8)  # other widths cross word boundaries


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings in config.json. Modules may have other bits and group sizes if `differs` is set."""

    bits: int
    group: int
    is_second: bool  # format gptq_v2, which stores zero points as they are; the first format stores them minus 1
    is_symmetric: bool
    differs: bool


def gptq(fields: JsonFields) -> Container:
    """Return the container of a GPTQ `quantization_config`.

    Raises:
        CheckpointError: The bits, the group size or the packing is not supported.
    """
    key = "checkpoint_format" if "checkpoint_format" in fields.values else "format"
    second = one_of(fields, key, ("gptq", "gptq_v2"), default="gptq") == "gptq_v2"
    return container(fields, "GPTQ", is_second=second)


def container(fields: JsonFields, name: str, *, is_second: bool) -> Container:
    """Return the container of this packing.

    Args:
        name: of the tool that wrote it.
        is_second: zero points are in the format gptq_v2.
    """
    settings = _Settings(
        one_of(fields, "bits", _BITS, default=4),
        group_size(fields),
        is_second,
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
    bits = bits if settings.differs else settings.bits
    if bits not in _BITS or codes.shape[0] * 32 % bits:
        raise CheckpointError(f"{where} holds codes of {bits} bits, supported are 2, 4 and 8: use a GGUF file of the model")
    columns = codes.shape[0] * 32 // bits
    group = columns if settings.group == -1 else settings.group
    if settings.differs and columns % len(scales) == 0:
        group = columns // len(scales)
    count = -(-columns // group)
    for part, shape, wanted in (("qzeros", zeros.shape, (count, -(-outputs * bits // 32))), ("scales", scales.shape, (count, outputs))):
        if shape != wanted:
            raise CheckpointError(
                f"{where} has shape {list(codes.shape)}, which makes {part} {list(wanted)} with {bits} bits in groups of {settings.group}, "
                f"but it is {list(shape)}; config.json may belong to another model; otherwise download the model again"
            )
    offset = 0 if _is_second(zeros, bits, settings) else 1
    words = {int(word) for word in np.unique(zeros)} if zeros.size else set()
    own = _of_word(words.pop(), bits, offset) if len(words) == 1 else None

    def rows(rows: Rows) -> AffineRows:
        numbers = np.arange(outputs)[rows]
        shifts = (numbers % (32 // bits) * bits).astype(np.uint32)
        found = (zeros[:, numbers * bits // 32] >> shifts & np.uint32(2**bits - 1)).astype(np.int32) + offset & 2**bits - 1
        own_scales = np.ascontiguousarray(scales[:, rows].T, np.float32)
        return AffineRows(as_stream(codes[:, rows].T), own_scales, np.ascontiguousarray(found.T))

    arrays = (codes, zeros, scales, np.array([[offset]]), *(() if groups is None else (groups[None],)))
    order = None if groups is None else order_of(groups, columns, group, len(scales), f"{where}: its g_idx")
    return Affine(
        where=where, shape=(outputs, columns), arrays=arrays, bits=bits, group=group, zero=own, has_short_scales=is_short(scales),
        column_groups=order, read=rows,
    ).matrix()  # fmt: skip


def _is_second(zeros: NDArray[np.uint32], bits: int, settings: _Settings) -> bool:
    """Return whether zero points are stored as they are. Some symmetric files name the wrong format; their zero point is known."""
    middle = sum(1 << (bits - 1 + shift) for shift in range(0, 32, bits))  # 2^(bits - 1) in every field of a word
    ones = sum(1 << shift for shift in range(0, 32, bits))
    if settings.is_symmetric and zeros.size:
        if settings.is_second and (zeros == middle - ones).all():
            return False
        if not settings.is_second and (zeros == middle).all():
            return True
    return settings.is_second


def _of_word(word: int, bits: int, offset: int) -> int | None:
    """Return the zero point of a word with equal fields."""
    own = {(word >> shift) + offset & 2**bits - 1 for shift in range(0, 32, bits)}
    return own.pop() if len(own) == 1 else None
