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

NESTINGS = (
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
    "backbone.",
)  # of multimodal models, new and old, and Idefics; of Nemotron-H
IMAGE_PARTS = (
    "vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "connector.", "image_newline", "audio_tower.", "embed_vision.",
    "embed_audio.", "vision_embedder.",
)  # fmt: skip
_DRAFTING_PARTS = ("mtp.", "model.mtp.", "model.mtp_layers.", "medusa_head.")  # heads that some checkpoints include


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The contents of a checkpoint directory.

    Attributes:
        tensors: of the language model, by plain names.
        files: mapped.
        own_head, has_encoders: as in `Weights`.
        container: of packed matrices; None = there are none.
    """

    tensors: dict[str, StoredWeight]
    files: dict[Path, NDArray[np.uint8]]
    own_head: str | None
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
    if config.num_layers > len(stored):  # before a table of that size is built
        raise CheckpointError(
            f"{directory} holds {len(stored)} tensors, too few for the {config.num_layers} layers of its config.json; "
            "is it another model's?"
        )
    texts = _language_model(stored)
    own, heads = _without_heads(texts, config)
    own_head = None if not heads else "medusa" if heads[0].startswith("medusa_head.") else "mtp"
    files = {path: map_file(path) for path in {tensor.path for tensor in own.values()}}
    path = directory / "config.json"
    container = find_container(text_model_fields(read_json(path) or {}), path, FAMILIES[config.family])
    tensors: dict[str, StoredWeight] = dict(own) if container is None else unpack(own, files, container)
    return StoredModel(tensors, files, own_head, len(texts) < len(stored), container)


def _language_model(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of the language model, without the prefix of a multimodal model and without encoders."""
    nesting = next((nesting for nesting in NESTINGS if any(name.startswith(nesting) for name in stored)), None)
    plain = {name: tensor for name, tensor in stored.items() if not name.removeprefix("model.").startswith(IMAGE_PARTS)}
    return plain if nesting is None else {plain_name(name, nesting): tensor for name, tensor in plain.items()}


def _without_heads(stored: Mapping[str, StoredTensor], config: ModelConfig) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors of the model, and the names of those of a drafting head.

    A layer after the last one belongs to a head only if it has an `eh_proj`. Otherwise config.json has too few layers.
    """
    behind = re.compile(r"model\.layers\.(\d{1,9})\.")  # longer numbers are no layer indices
    layers = {name: int(match[1]) for name in stored if (match := behind.match(name)) and int(match[1]) >= config.num_layers}
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
