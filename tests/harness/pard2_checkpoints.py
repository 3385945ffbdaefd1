"""Random PARD-2 draft models: a language model, the keys of its config, and the projection of the target's hidden states."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from harness.checkpoint_files import read_values, write_values
from harness.checkpoints import write_checkpoint
from paceline.drafters.pard2 import PROJECTION_FILE

MASK = 5
LAYERS = (-1, -2, 1)


def write_pard2(directory: Path, family: str = "llama", *, sizes: Mapping[str, Any] = MappingProxyType({}), **projection: Any) -> Path:
    """A draft model of two layers. `sizes` are fields of its config, `projection` are arguments of `add_projection`."""
    return add_projection(write_checkpoint(directory, family, **{"num_hidden_layers": 2, "seed": 9, **sizes}), **projection)


def add_projection(directory: Path, *, layers: Sequence[int] = LAYERS, has_bias: bool = False, scale: float = 0.3) -> Path:
    """Make a PARD-2 draft model of a language model of hidden size 64, for a target of the same hidden size.

    Args:
        scale: usually 0.02; above it random projections count.
    """
    random = torch.Generator().manual_seed(3)
    tensors = {"target_proj.weight": torch.randn(64, 64 * len(layers), generator=random)}
    if has_bias:
        tensors["target_proj.bias"] = torch.randn(64, generator=random)
    torch.save(tensors, directory / PROJECTION_FILE)
    values = {"pard2_scale": scale, "pard2_proj_bias": has_bias, "pard2_target_dim": 64 * len(layers), "pard2_target_layers": list(layers)}
    return set_config(directory, pard_token=MASK, pard2=True, spd_type="pard2", **values)


def set_config(directory: Path, **values: object) -> Path:
    """Set fields of a config.json; remove those that are None."""
    merged = {**read_values(directory), **values}
    return write_values(directory, {name: value for name, value in merged.items() if value is not None})
