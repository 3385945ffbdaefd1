"""The tensors of a checkpoint directory: those of the language model, without encoders and drafting heads."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.config import ModelConfig
from paceline.models.containers.module import Container, StoredWeight
from paceline.models.containers.table import find_container, unpack
from paceline.models.families.table import FAMILIES
from paceline.models.multimodal import text_model_fields
from paceline.models.storage.safetensors_file import StoredTensor, checkpoint_files, map_file, read_header
from paceline.small_files import read_json

TEXT_MODEL_PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
    "backbone.",
)  # prefixes of multimodal models, new and old, of Idefics, and of Nemotron-H
ENCODER_PREFIXES = (
    "vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "connector.", "image_newline", "audio_tower.", "embed_vision.",
    "embed_audio.", "vision_embedder.",
)  # fmt: skip
_DRAFTING_PARTS = ("mtp.", "model.mtp.", "model.mtp_layers.", "medusa_head.")  # prefixes of drafting heads that some checkpoints include


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The contents of a checkpoint directory.

    Attributes:
        tensors: tensors of the language model, by plain names.
        files: mapped.
        bundled_head, has_encoders: as in `Weights`.
        container: container of packed matrices; None = there are none.
    """

    tensors: dict[str, StoredWeight]
    files: dict[Path, NDArray[np.uint8]]
    bundled_head: str | None
    has_encoders: bool
    container: Container | None = None


def open_stored(directory: Path, config: ModelConfig) -> StoredModel:
    """Find the tensors of the language model.

    Raises:
        CheckpointError: A file is missing or damaged, or there are fewer tensors than layers.
    """
    stored: dict[str, StoredTensor] = {}
    for path in checkpoint_files(directory):
        stored.update(read_header(path))
    if config.num_layers > len(stored):  # refuse an impossible number of layers before building a table of that size
        raise CheckpointError(
            f"{directory} holds {len(stored)} tensors, too few for the {config.num_layers} layers of its config.json; "
            "is it another model's?"
        )
    texts = _language_model_tensors(stored)
    own, heads = _without_drafting_heads(texts, config)
    bundled_head = None if not heads else "medusa" if heads[0].startswith("medusa_head.") else "mtp"
    files = {path: map_file(path) for path in {tensor.path for tensor in own.values()}}
    path = directory / "config.json"
    container = find_container(text_model_fields(read_json(path) or {}), path, FAMILIES[config.family])
    tensors: dict[str, StoredWeight] = dict(own) if container is None else unpack(own, files, container)
    return StoredModel(tensors, files, bundled_head, len(texts) < len(stored), container)


def _language_model_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of the language model, without the prefix of a multimodal model and without encoders."""
    nesting = next((nesting for nesting in TEXT_MODEL_PREFIXES if any(name.startswith(nesting) for name in stored)), None)
    plain = {name: tensor for name, tensor in stored.items() if not name.removeprefix("model.").startswith(ENCODER_PREFIXES)}
    return plain if nesting is None else {plain_name(name, nesting): tensor for name, tensor in plain.items()}


def _without_drafting_heads(stored: Mapping[str, StoredTensor], config: ModelConfig) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors of the model, and the names of those of a drafting head.

    A layer after the last one belongs to a head only if it has an `eh_proj`. Otherwise config.json has too few layers.
    """
    layer_name = re.compile(r"model\.layers\.(\d{1,9})\.")  # matches layer indices of up to 9 digits; no model has more layers
    layers = {name: int(match[1]) for name in stored if (match := layer_name.match(name)) and int(match[1]) >= config.num_layers}
    heads = [
        name for name in stored
        if name.startswith(_DRAFTING_PARTS) or (name in layers and f"model.layers.{layers[name]}.eh_proj.weight" in stored)
    ]  # fmt: skip
    left_out = set(heads)
    return {name: tensor for name, tensor in stored.items() if name not in left_out}, heads


def plain_name(name: str, nesting: str) -> str:
    """Return a tensor's name without the prefix of a multimodal model."""
    if name.startswith(nesting):
        return "model." + name.removeprefix(nesting)
    return name.removeprefix("language_model.")  # lm_head
