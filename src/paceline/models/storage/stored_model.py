"""Find the tensors of the language model in a checkpoint directory, without those of encoders and drafting heads."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.config import ModelConfig
from paceline.models.families.table import FAMILIES
from paceline.models.multimodal import text_model_fields
from paceline.models.quantized_formats.module import QuantizedFormat, StoredWeight
from paceline.models.quantized_formats.table import find_quantized_format, group_packed_tensors
from paceline.models.storage.mapped_files import map_file
from paceline.models.storage.safetensors_file import StoredTensor, checkpoint_files, read_header
from paceline.small_files import read_json

TEXT_MODEL_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.", "backbone.")
"""Prefixes of newer and older multimodal models, of Idefics, and of Nemotron-H."""
ENCODER_PREFIXES = (
    "vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "connector.", "image_newline", "audio_tower.", "embed_vision.",
    "embed_audio.", "vision_embedder.", "vision_adapter.", "vision_projection.",
)  # fmt: skip
_DRAFTING_HEAD_PREFIXES = ("mtp.", "model.mtp.", "model.mtp_layers.", "medusa_head.")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Locations of the tensors of a checkpoint directory.

    Attributes:
        tensors: tensors of the language model that are not read yet, by name without the prefix of a multimodal model.
        files: mapped files, by path.
        bundled_head, has_encoders: as in `Weights`.
        quantized_format: format of packed matrices; None = the checkpoint has none.
    """

    directory: Path
    tensors: dict[str, StoredWeight]
    files: dict[Path, NDArray[np.uint8]]
    bundled_head: str | None
    has_encoders: bool
    quantized_format: QuantizedFormat | None = None

    def pop_tensor(self, name: str) -> StoredTensor:
        """Remove a tensor from `tensors` and return it.

        Raises:
            CheckpointError: The tensor is missing, or is a packed matrix.
        """
        tensor = self.tensors.pop(name, None)
        if not isinstance(tensor, StoredTensor):
            raise CheckpointError(f"{self.directory} lacks {name} that its config.json requires: config.json may belong to another model")
        return tensor


def open_stored(directory: Path, config: ModelConfig) -> StoredModel:
    """Find the tensors of the language model in a checkpoint directory.

    Raises:
        CheckpointError: A file is missing or damaged, or there are fewer tensors than layers.
    """
    stored: dict[str, StoredTensor] = {}
    for path in checkpoint_files(directory):
        stored.update(read_header(path))
    if config.num_layers > len(stored):  # checked first, because memory is allocated for each layer
        raise CheckpointError(
            f"{directory} holds {len(stored)} tensors, too few for the {config.num_layers} layers of its config.json: "
            "they may belong to different models"
        )
    language_model = _language_model_tensors(stored)
    model, heads = _without_drafting_heads(language_model, config)
    aliases = FAMILIES[config.family].module_aliases
    model = {".".join(aliases.get(part, part) for part in name.split(".")): tensor for name, tensor in model.items()}
    bundled_head = None if not heads else "medusa" if heads[0].startswith("medusa_head.") else "mtp"
    files = {path: map_file(path) for path in {tensor.path for tensor in model.values()}}
    path = directory / "config.json"
    quantized_format = find_quantized_format(text_model_fields(read_json(path) or {}), path, FAMILIES[config.family])
    tensors: dict[str, StoredWeight] = dict(model) if quantized_format is None else group_packed_tensors(model, files, quantized_format)
    return StoredModel(directory, tensors, files, bundled_head, len(language_model) < len(stored), quantized_format)


def _language_model_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of the language model, without the prefix of a multimodal model and without encoders."""
    prefix = next((prefix for prefix in TEXT_MODEL_PREFIXES if any(name.startswith(prefix) for name in stored)), None)
    plain = {name: tensor for name, tensor in stored.items() if not name.removeprefix("model.").startswith(ENCODER_PREFIXES)}
    return plain if prefix is None else {replace_multimodal_prefix(name, prefix): tensor for name, tensor in plain.items()}


def _without_drafting_heads(stored: Mapping[str, StoredTensor], config: ModelConfig) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors that do not belong to a drafting head, and the names of the tensors that do.

    A layer after the last one is a drafting head only if it has an `eh_proj`. Otherwise config.json states too few layers.
    """
    layer_name_pattern = re.compile(r"model\.layers\.(\d{1,9})\.")
    layers = {name: int(match[1]) for name in stored if (match := layer_name_pattern.match(name)) and int(match[1]) >= config.num_layers}
    heads = [
        name for name in stored
        if name.startswith(_DRAFTING_HEAD_PREFIXES) or (name in layers and f"model.layers.{layers[name]}.eh_proj.weight" in stored)
    ]  # fmt: skip
    head_names = set(heads)
    return {name: tensor for name, tensor in stored.items() if name not in head_names}, heads


def replace_multimodal_prefix(name: str, prefix: str) -> str:
    """Replace a multimodal model's `prefix` in a tensor's name with `model.`, and remove the prefix of lm_head."""
    if name.startswith(prefix):
        return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")
