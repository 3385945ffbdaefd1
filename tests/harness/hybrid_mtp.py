"""Tiny models of Qwen's hybrid families with their module for multi-token prediction, for tests."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.checkpoint_files import edit_tensors, read_tensors
from harness.checkpoints import write_checkpoint
from harness.expert_checkpoints import stack_experts

Floats = NDArray[np.float32]
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
HOSTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5-tied": ("qwen3_5_text", {**DELTA, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**DELTA, **EXPERTS}),
    "qwen3_next": ("qwen3_next", {**DELTA, **EXPERTS}),
}
"""By a name: the family and values of its config."""
ATTENTION_LAYER = 3
"""The layer of these models that has attention."""
_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def write_host(directory: Path, case: str, **overrides: Any) -> Path:
    """A random model without a module."""
    family, values = HOSTS[case]
    return write_checkpoint(directory, family, **{**values, **overrides})


def write_donor(directory: Path, case: str) -> Path:
    """A model of the same family whose layer with attention is that of the module."""
    family, values = HOSTS[case]
    return write_checkpoint(directory, family, seed=7, **values)


def module_tensors(donor: Path, *, prefix: str = "mtp.", stacks_experts: bool = False, hidden: int = 64) -> dict[str, Floats]:
    """A module's tensors as checkpoints hold them: norm weights less 1.

    Args:
        stacks_experts: all experts of a kind in one tensor.
    """
    random = np.random.default_rng(11)
    found = {f"{prefix}fc.weight": random.normal(0, 0.2, (hidden, 2 * hidden)).astype(np.float32)}
    found |= {f"{prefix}{name}.weight": random.uniform(-0.5, 0.5, hidden).astype(np.float32) for name in _NORMS}
    own = f"model.layers.{ATTENTION_LAYER}."
    layer = {name.removeprefix(own): array for name, array in read_tensors(donor).items() if name.startswith(own)}
    if stacks_experts:
        layer = stack_experts(layer)
    return found | {f"{prefix}layers.0.{name}": array for name, array in layer.items()}


def add_module(directory: Path, tensors: dict[str, Floats]) -> Path:
    """Store a module's tensors in a model."""
    edit_tensors(directory, lambda stored: stored.update(tensors))
    return directory
