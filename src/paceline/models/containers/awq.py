"""AWQ in the layout of AutoAWQ's GEMM kernels: eight outputs in a word, interleaved."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.containers.affine import Affine, AffineRows, has_short_mantissas
from paceline.models.containers.module import Container, PackedModule
from paceline.models.containers.settings import one_of, read_group_size
from paceline.models.json_fields import JsonFields
from paceline.models.storage.packed_matrix import PackedMatrix, Rows

_OUTPUTS_PER_WORD = 8
_NIBBLE_OF_OUTPUT = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Which four bits of a word hold each of the eight outputs."""


def awq(fields: JsonFields) -> Container:
    """Return the container of an AWQ `quantization_config`. Old files have `w_bit` and `q_group_size`.

    Raises:
        CheckpointError: The bits, the group size or the layout is not supported.
    """
    old = {"bits": fields.values.get("w_bit"), "group_size": fields.values.get("q_group_size")}
    fields = JsonFields({**{name: value for name, value in old.items() if value is not None}, **fields.values}, fields.path)
    key = "version" if "version" in fields.values else "format"
    if isinstance(fields.values.get(key), str):  # some files have capitals
        fields = JsonFields({**fields.values, key: fields.values[key].lower()}, fields.path)
    one_of(fields, key, ("gemm",), default="gemm")
    return container(fields, "AWQ")


def container(fields: JsonFields, name: str) -> Container:
    """Return the container of AWQ's packing, under the name of the tool that wrote the file."""
    bits, group_size = one_of(fields, "bits", (4,), default=4), read_group_size(fields)
    return Container(f"{name}, {bits} bits", (".qweight",), partial(_read, group_size=group_size))


def _read(module: PackedModule, *, group_size: int) -> PackedMatrix:
    where = module.where("qweight")
    codes, zeros = module.take("qweight", "I32", "U32"), module.take("qzeros", "I32", "U32")
    scales = module.floats("scales")
    columns, outputs = codes.shape[0], codes.shape[1] * _OUTPUTS_PER_WORD
    group_size = columns if group_size == -1 else group_size
    count = -(-columns // group_size)
    for part, array, wanted in (("qzeros", zeros, (count, codes.shape[1])), ("scales", scales, (count, outputs))):
        if array.shape != wanted:
            raise CheckpointError(
                f"{where} has shape {list(codes.shape)}, which makes {part} {list(wanted)} in groups of {group_size}, "
                f"but it is {list(array.shape)}; config.json may belong to another model; otherwise download the model again"
            )
    words = np.unique(zeros)
    zero = int(words[0] & 15) if len(words) == 1 and int(words[0]) == int(words[0] & 15) * 0x11111111 else None

    def rows(rows: Rows) -> AffineRows:
        numbers = np.arange(outputs)[rows]
        words_of, places = numbers // _OUTPUTS_PER_WORD, numbers % _OUTPUTS_PER_WORD
        shifts = (4 * _NIBBLE_OF_OUTPUT[places]).astype(np.uint32)
        own_zeros = (zeros[:, words_of] >> shifts & np.uint32(15)).astype(np.int32)
        own_scales = np.ascontiguousarray(scales[:, rows].T, np.float32)
        return AffineRows(_repack_column_pairs(codes, words_of, places), own_scales, np.ascontiguousarray(own_zeros.T))

    return Affine(
        where=where, shape=(outputs, columns), arrays=(codes, zeros, scales), bits=4, group_size=group_size, zero=zero,
        has_short_scales=has_short_mantissas(scales), read=rows,
    ).matrix()  # fmt: skip


def _repack_column_pairs(codes: NDArray[np.uint32], words_of: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Repack words [columns, words] into bytes of two neighbouring columns, [outputs, columns / 2]."""
    columns, inverse = np.unique(words_of, return_inverse=True)
    is_range = len(columns) == columns[-1] - columns[0] + 1
    taken = codes[:, columns[0] : columns[-1] + 1] if is_range else codes[:, columns]
    taken = np.ascontiguousarray(np.pad(taken, ((0, len(taken) % 2), (0, 0))).T if len(taken) % 2 else taken.T)
    first, second = taken.view(np.uint8).reshape(len(columns), -1, 2, 4).transpose(2, 3, 0, 1)  # each part is [4 bytes, words, columns / 2]
    pairs = np.empty((len(columns), _OUTPUTS_PER_WORD, first.shape[2]), np.uint8)
    for output, place in enumerate(_NIBBLE_OF_OUTPUT.tolist()):
        low, high = first[place // 2], second[place // 2]
        pairs[:, output] = low >> np.uint8(4) | high & np.uint8(240) if place % 2 else low & np.uint8(15) | high << np.uint8(4)
    is_whole = len(words_of) == len(columns) * _OUTPUTS_PER_WORD and (np.diff(places) != 0).all() and places[0] == 0 and is_range
    found = pairs.reshape(-1, pairs.shape[2])
    return found if is_whole and (np.diff(words_of) >= 0).all() else found[inverse * _OUTPUTS_PER_WORD + places]
