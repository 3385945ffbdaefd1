"""MLX: codes of 2 to 8 bits with a scale and a minimum for each group. The shapes of the tensors give the bits."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from paceline.errors import CheckpointError
from paceline.models.containers.affine import Affine, AffineRows, words_as_bytes
from paceline.models.containers.module import Container, PackedModule
from paceline.models.containers.settings import one_of
from paceline.models.json_fields import JsonFields
from paceline.models.storage.packed_matrix import PackedMatrix, Rows

_BITS = (2, 3, 4, 5, 6, 8)


def mlx(fields: JsonFields) -> Container:
    """Return the container of MLX's affine mode. Single modules may have other settings.

    Raises:
        CheckpointError: The mode, the bits or the group size is not supported.
    """
    found = {"": _settings(fields)}
    for name, value in fields.values.items():
        if isinstance(value, Mapping):
            found["." + name] = _settings(JsonFields({"mode": fields.values.get("mode"), **value}, fields.path))
    return Container(f"MLX, {found[''][0]} bits", (".scales",), partial(_read, settings=found))


def _settings(fields: JsonFields) -> tuple[int, int]:
    """Return the bits and the group size."""
    one_of(fields, "mode", ("affine",), default="affine")
    return one_of(fields, "bits", _BITS), fields.size("group_size")


def _read(module: PackedModule, *, settings: Mapping[str, tuple[int, int]]) -> PackedMatrix:
    where, words = module.where("weight"), module.take("weight", "U32")
    scales, minimums = module.floats("scales"), module.floats("biases")
    own_name = "." + module.name.removeprefix("model.")  # config.json names modules with the prefix of a multimodal model
    bits, group_size = next((own for name, own in settings.items() if name.endswith(own_name)), settings[""])
    outputs, count = scales.shape
    if len(words) != outputs or minimums.shape != scales.shape or 32 * words.shape[1] != count * group_size * bits:
        raise CheckpointError(
            f"{where} has shape {list(words.shape)}, scales {list(scales.shape)} and biases {list(minimums.shape)}, which are no matrix of "
            f"{bits} bits in groups of {group_size}; config.json may belong to another model; otherwise download the model again"
        )

    def rows(rows: Rows) -> AffineRows:
        own = minimums[rows].astype(np.float32)
        return AffineRows(words_as_bytes(words[rows]), scales[rows].astype(np.float32), minimums=own)

    return Affine(
        where=where,
        shape=(outputs, count * group_size),
        arrays=(words, scales, minimums),
        bits=bits,
        group_size=group_size,
        has_minimums=True,
        read=rows,
    ).matrix()
