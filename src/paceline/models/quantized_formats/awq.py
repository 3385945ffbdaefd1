"""AWQ in the layout of AutoAWQ's GEMM kernels: a 32-bit word holds the 4-bit codes of eight outputs, in interleaved order."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.json_fields import JsonFields
from paceline.models.quantized_formats.affine import AffineMatrix, AffineRows, has_short_mantissas
from paceline.models.quantized_formats.module import PackedModule, QuantizedFormat
from paceline.models.quantized_formats.settings import read_choice, read_group_size
from paceline.models.storage.packed_matrix import PackedMatrix, RowSelection

_OUTPUTS_PER_WORD = 8
_NIBBLE_INDEX_OF_OUTPUT = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""For each of the eight outputs in a 32-bit word, the index of the 4-bit field with its code. Field 0 is the lowest."""


def awq_format(fields: JsonFields) -> QuantizedFormat:
    """Return the format that an AWQ `quantization_config` describes. Old files name the settings `w_bit` and `q_group_size`.

    Raises:
        CheckpointError: The bits, the group size or the layout is not supported.
    """
    old = {"bits": fields.values.get("w_bit"), "group_size": fields.values.get("q_group_size")}
    fields = JsonFields({**{name: value for name, value in old.items() if value is not None}, **fields.values}, fields.path)
    key = "version" if "version" in fields.values else "format"
    if isinstance(fields.values.get(key), str):  # some files have the version in capitals
        fields = JsonFields({**fields.values, key: fields.values[key].lower()}, fields.path)
    read_choice(fields, key, ("gemm",), default="gemm")
    return awq_layout_format(fields, "AWQ")


def awq_layout_format(fields: JsonFields, tool: str) -> QuantizedFormat:
    """Return the format of codes packed as in AWQ. `tool` is the name of the tool that wrote the file."""
    bits, group_size = read_choice(fields, "bits", (4,), default=4), read_group_size(fields)
    return QuantizedFormat(f"{tool}, {bits} bits", (".qweight",), partial(_read_matrix, group_size=group_size))


def _read_matrix(module: PackedModule, *, group_size: int) -> PackedMatrix:
    where = module.describe_tensor("qweight")
    codes, zeros = module.read_tensor("qweight", "I32", "U32"), module.read_tensor("qzeros", "I32", "U32")
    scales = module.read_floats("scales")
    columns, outputs = codes.shape[0], codes.shape[1] * _OUTPUTS_PER_WORD
    group_size = columns if group_size == -1 else group_size
    num_groups = -(-columns // group_size)
    for part, array, expected in (("qzeros", zeros, (num_groups, codes.shape[1])), ("scales", scales, (num_groups, outputs))):
        if array.shape != expected:
            raise CheckpointError(
                f"{where} has shape {list(codes.shape)}, so {part} must have shape {list(expected)} in groups of {group_size}, "
                f"but has {list(array.shape)}; config.json may belong to another model; otherwise download the model again"
            )
    words = np.unique(zeros)
    zero_point = int(words[0] & 15) if len(words) == 1 and int(words[0]) == int(words[0] & 15) * 0x11111111 else None

    def read_rows(rows: RowSelection) -> AffineRows:
        numbers = np.arange(outputs)[rows]
        word_indices, positions = numbers // _OUTPUTS_PER_WORD, numbers % _OUTPUTS_PER_WORD
        shifts = (4 * _NIBBLE_INDEX_OF_OUTPUT[positions]).astype(np.uint32)
        row_zeros = (zeros[:, word_indices] >> shifts & np.uint32(15)).astype(np.int32)
        row_scales = np.ascontiguousarray(scales[:, rows].T, np.float32)
        return AffineRows(_repack_column_pairs(codes, word_indices, positions), row_scales, np.ascontiguousarray(row_zeros.T))

    return AffineMatrix(
        error_location=where, shape=(outputs, columns), arrays=(codes, zeros, scales), bits=4, group_size=group_size, zero_point=zero_point,
        has_15_bit_scales=has_short_mantissas(scales), read_rows=read_rows,
    ).to_packed_matrix()  # fmt: skip


def _repack_column_pairs(codes: NDArray[np.uint32], word_indices: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the codes of outputs, two columns to a byte. Output i is number positions[i] (0 to 7) of words codes[:, word_indices[i]]."""
    used_words, inverse = np.unique(word_indices, return_inverse=True)
    is_range = len(used_words) == used_words[-1] - used_words[0] + 1
    used = codes[:, used_words[0] : used_words[-1] + 1] if is_range else codes[:, used_words]
    used = np.ascontiguousarray(np.pad(used, ((0, len(used) % 2), (0, 0))).T if len(used) % 2 else used.T)
    even, odd = used.view(np.uint8).reshape(len(used_words), -1, 2, 4).transpose(2, 3, 0, 1)  # columns, each [byte, word, pair of columns]
    pairs = np.empty((len(used_words), _OUTPUTS_PER_WORD, even.shape[2]), np.uint8)
    for output, nibble in enumerate(_NIBBLE_INDEX_OF_OUTPUT.tolist()):
        low, high = even[nibble // 2], odd[nibble // 2]
        pairs[:, output] = low >> np.uint8(4) | high & np.uint8(240) if nibble % 2 else low & np.uint8(15) | high << np.uint8(4)
    is_whole = len(positions) == len(used_words) * _OUTPUTS_PER_WORD and (np.diff(positions) != 0).all() and positions[0] == 0 and is_range
    found = pairs.reshape(-1, pairs.shape[2])
    return found if is_whole and (np.diff(word_indices) >= 0).all() else found[inverse * _OUTPUTS_PER_WORD + positions]
