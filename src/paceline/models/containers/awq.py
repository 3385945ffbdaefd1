"""AWQ in the layout of its GEMM kernels: eight outputs in a word, in the order in which these take them apart (AutoAWQ)."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.containers.affine import Affine, AffineRows, is_short
from paceline.models.containers.module import Container, Module
from paceline.models.containers.settings import group_size, one_of
from paceline.models.json_fields import JsonFields
from paceline.models.packed import PackedMatrix, Rows

_IN_WORD = 8
_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Which four bits of a word hold each of eight outputs."""


def awq(fields: JsonFields) -> Container:
    """AWQ as `quantization_config` describes it; old files say `w_bit` and `q_group_size`.

    Raises:
        CheckpointError: bits, groups or a layout that cannot be read.
    """
    old = {"bits": fields.values.get("w_bit"), "group_size": fields.values.get("q_group_size")}
    fields = JsonFields({**{name: value for name, value in old.items() if value is not None}, **fields.values}, fields.path)
    key = "version" if "version" in fields.values else "format"
    if isinstance(fields.values.get(key), str):  # some write it in capitals
        fields = JsonFields({**fields.values, key: fields.values[key].lower()}, fields.path)
    one_of(fields, key, ("gemm",), default="gemm")
    return container(fields, "AWQ")


def container(fields: JsonFields, name: str) -> Container:
    """A container of this packing, by the name of whoever wrote it."""
    bits, group = one_of(fields, "bits", (4,), default=4), group_size(fields)
    return Container(f"{name}, {bits} bits", (".qweight",), partial(_read, group=group))


def _read(module: Module, *, group: int) -> PackedMatrix:
    where = module.where("qweight")
    codes, zeros = module.take("qweight", "I32", "U32"), module.take("qzeros", "I32", "U32")
    scales = module.floats("scales")
    columns, outputs = codes.shape[0], codes.shape[1] * _IN_WORD
    group = columns if group == -1 else group
    count = -(-columns // group)
    for part, array, wanted in (("qzeros", zeros, (count, codes.shape[1])), ("scales", scales, (count, outputs))):
        if array.shape != wanted:
            raise CheckpointError(
                f"{where} has shape {list(codes.shape)}, which makes {part} {list(wanted)} in groups of {group}, "
                f"but it is {list(array.shape)}; config.json is another model's, or download the model again"
            )
    words = np.unique(zeros)
    zero = int(words[0] & 15) if len(words) == 1 and int(words[0]) == int(words[0] & 15) * 0x11111111 else None

    def rows(rows: Rows) -> AffineRows:
        numbers = np.arange(outputs)[rows]
        own = _codes(codes, numbers).T  # [n, columns]
        own = np.pad(own, ((0, 0), (0, columns % 2)))
        pairs = own[:, ::2] | own[:, 1::2] << np.uint8(4)
        own_scales = np.ascontiguousarray(scales[:, rows].T, np.float32)
        return AffineRows(pairs, own_scales, np.ascontiguousarray(_codes(zeros, numbers).T.astype(np.int32)))

    return Affine(
        where=where, shape=(outputs, columns), arrays=(codes, zeros, scales), bits=4, group=group, zero=zero,
        has_short_scales=is_short(scales), read=rows,
    ).matrix()  # fmt: skip


def _codes(words: NDArray[np.uint32], numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
    """[columns, words] as the codes of some outputs, [columns, len(numbers)]."""
    first, last = int(numbers.min()) // _IN_WORD, int(numbers.max()) // _IN_WORD + 1
    if len(numbers) == numbers[-1] - numbers[0] + 1:  # neighbours
        taken = np.ascontiguousarray(words[:, first:last]).view(np.uint8)
        halves = np.stack([taken & np.uint8(15), taken >> np.uint8(4)], axis=2).reshape(len(words), -1, _IN_WORD)
        return halves[:, :, _PLACES].reshape(len(words), -1)[:, numbers - first * _IN_WORD]
    shifts = (4 * _PLACES[numbers % _IN_WORD]).astype(np.uint32)
    return (words[:, numbers // _IN_WORD] >> shifts & np.uint32(15)).astype(np.uint8)
