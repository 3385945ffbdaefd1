"""What a checkpoint directory holds: the language model's tensors, beside encoders and drafting heads that are told apart."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import CheckpointError
from paceline.models.config import ModelConfig
from paceline.models.containers.module import Container, Stored
from paceline.models.containers.table import container_of, unpack
from paceline.models.families.table import FAMILIES
from paceline.models.storage.safetensors_file import StoredTensor, checkpoint_files, map_file, read_header
from paceline.models.wrappers import text_values
from paceline.small_files import read_json

NESTINGS = (
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
    "backbone.",
)  # of a model beside an image encoder, new and old, and of Idefics; of Nemotron-H
IMAGE_PARTS = (
    "vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "connector.", "image_newline", "audio_tower.", "embed_vision.",
    "embed_audio.", "vision_embedder.",
)  # fmt: skip
_DRAFTING_PARTS = ("mtp.", "model.mtp.", "model.mtp_layers.", "medusa_head.")  # heads that some checkpoints hold beside their model


@dataclass(frozen=True, slots=True)
class StoredModel:
    """What a checkpoint directory holds.

    Attributes:
        tensors: of the model, by plain names.
        files: mapped.
        own_head, has_encoders: as in `Weights`.
        container: how matrices are packed; None = they are not.
    """

    tensors: dict[str, Stored]
    files: dict[Path, NDArray[np.uint8]]
    own_head: str | None
    has_encoders: bool
    container: Container | None = None


def open_stored(directory: Path, config: ModelConfig) -> StoredModel:
    """Find the model's tensors.

    Raises:
        CheckpointError: a file is missing or damaged, or there are fewer tensors than layers.
    """
    stored: dict[str, StoredTensor] = {}
    for path in checkpoint_files(directory):
        stored.update(read_header(path))
    if config.num_layers > len(stored):  # checked before a table of that size is made
        raise CheckpointError(
            f"{directory} holds {len(stored)} tensors, too few for the {config.num_layers} layers of its config.json; "
            "is it another model's?"
        )
    texts = _language_model(stored)
    own, heads = _without_heads(texts, config)
    own_head = None if not heads else "medusa" if heads[0].startswith("medusa_head.") else "mtp"
    files = {path: map_file(path) for path in {tensor.path for tensor in own.values()}}
    path = directory / "config.json"
    container = container_of(text_values(read_json(path) or {}), path, FAMILIES[config.family])
    tensors: dict[str, Stored] = dict(own) if container is None else unpack(own, files, container)
    return StoredModel(tensors, files, own_head, len(texts) < len(stored), container)


def _language_model(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of the language model under its plain names, where the files hold an image encoder's beside them."""
    nesting = next((nesting for nesting in NESTINGS if any(name.startswith(nesting) for name in stored)), None)
    plain = {name: tensor for name, tensor in stored.items() if not name.removeprefix("model.").startswith(IMAGE_PARTS)}
    return plain if nesting is None else {plain_name(name, nesting): tensor for name, tensor in plain.items()}


def _without_heads(stored: Mapping[str, StoredTensor], config: ModelConfig) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors of the model, and the names of those of a head that guesses for it.

    A layer behind the last one is such a head only where it has a head's own tensors: else config.json names too few layers.
    """
    behind = re.compile(r"model\.layers\.(\d{1,9})\.")  # a longer number is no layer's
    layers = {name: int(match[1]) for name in stored if (match := behind.match(name)) and int(match[1]) >= config.num_layers}
    heads = [
        name for name in stored
        if name.startswith(_DRAFTING_PARTS) or (name in layers and f"model.layers.{layers[name]}.eh_proj.weight" in stored)
    ]  # fmt: skip
    left_out = set(heads)
    return {name: tensor for name, tensor in stored.items() if name not in left_out}, heads


def plain_name(name: str, nesting: str) -> str:
    """The name that a tensor of a nested language model has where there is nothing beside it."""
    if name.startswith(nesting):
        return "model." + name.removeprefix(nesting)
    return name.removeprefix("language_model.")  # lm_head
