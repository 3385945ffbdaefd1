"""Heads that are right with one value of an option that their files leave open or have wrong; `eagle_checkpoints` makes their target."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness.eagle_checkpoints import (
    CODE,
    DRAFT_IDS,
    HEAD,
    HIDDEN,
    VOCAB_SIZE,
    aimed,
    legible_config,
    silent_layer,
    speaking,
    vocabulary_tables,
    write_head,
)
from harness.medusa_checkpoints import SUCCESSOR_HIDDEN, steps_behind
from harness.mtp_checkpoints import Arrays, random_module

Edit = Callable[[dict[str, NDArray[np.float32]]], None]
NEW, CURRENT, EARLIER = slice(0, CODE), slice(HIDDEN, HIDDEN + CODE), slice(HIDDEN + CODE, HIDDEN + 2 * CODE)  # columns of q, k and v
LOOKS_BACK = 6
SIGNS = np.where(np.arange(HIDDEN) % 2, -1.0, 1.0).astype(np.float32)


def write_reading_eagle3(directory: Path, edit: Edit = lambda tensors: None, **config: Any) -> Path:
    """Turns the feature of a position into that of the next one, for a target that does not read the mean.

    Args:
        edit: changes the tensors.
        config: added to config.json; None takes a value away.
    """
    tensors = silent_layer("layers.0.", 2 * HIDDEN, ["post_attention_layernorm"])
    query, key, value, out = (tensors[f"layers.0.self_attn.{part}_proj.weight"] for part in "qkvo")
    for head in (0, 1):
        rows = slice(head * HEAD, (head + 1) * HEAD)
        query[rows, CODE - 1], key[rows, CODE - 1] = aimed(0)
        out[rows, rows] = np.eye(CODE)
    value[:HEAD, NEW], value[:HEAD, CURRENT] = np.eye(CODE), -np.eye(CODE)
    value[HEAD : 2 * HEAD, CURRENT], value[HEAD : 2 * HEAD, EARLIER] = np.eye(CODE), -np.eye(CODE)
    fc = np.zeros((HIDDEN, 3 * HIDDEN), np.float32)
    fc[:, 2 * HIDDEN :] = np.eye(HIDDEN)
    size = np.full(HIDDEN, np.sqrt(2 * CODE / HIDDEN), np.float32)
    tensors |= {
        "fc.weight": fc,
        "layers.0.input_layernorm.weight": np.full(HIDDEN, np.sqrt(CODE / HIDDEN), np.float32),
        "layers.0.hidden_norm.weight": size,
        "norm.weight": size,
        "lm_head.weight": speaking()[DRAFT_IDS],
    }
    edit(tensors)
    values = legible_config(
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=len(DRAFT_IDS),
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[0, 2, 4],
    )
    values = {name: value for name, value in {**values, **config}.items() if value is not None}
    stored = {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
    return write_head(directory, values, stored | vocabulary_tables(DRAFT_IDS, VOCAB_SIZE))


def from_first_boundary(tensors: dict[str, NDArray[np.float32]]) -> None:
    """Reads all from the first of its boundaries, in which boundary 0 has not looked back yet."""
    tensors["fc.weight"] = np.roll(tensors["fc.weight"], -2 * HIDDEN, axis=1)


def less_first_boundary(tensors: dict[str, NDArray[np.float32]]) -> None:
    """Subtracts what its first boundary contains of earlier tokens: at boundary 0 nothing."""
    earlier = slice(CODE, 2 * CODE)
    tensors["fc.weight"][earlier, earlier] = -np.eye(CODE)


def with_small_features(tensors: dict[str, NDArray[np.float32]]) -> None:
    """Right where the residual stream begins with the normed feature."""
    tensors["fc.weight"] *= 0.05


def with_small_outputs(tensors: dict[str, NDArray[np.float32]]) -> None:
    """Where the stream begins with the plain feature: right again and again if the next feature is the normed output."""
    value = tensors["layers.0.self_attn.v_proj.weight"]
    value[:HEAD, NEW] *= 0.1
    value[HEAD : 2 * HEAD, CURRENT] *= 0.1


def with_signed_norm(tensors: dict[str, NDArray[np.float32]]) -> None:
    """Right with its final norm alone, which turns every second value around."""
    tensors["norm.weight"] = tensors["norm.weight"] * SIGNS
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * SIGNS


def with_strange_norm(tensors: dict[str, NDArray[np.float32]]) -> None:
    """Right without its final norm alone."""
    tensors["norm.weight"] = tensors["norm.weight"] * SIGNS


def write_looking_back_eagle1(directory: Path, *, theta: float, **config: Any) -> Path:
    """Finds the token `LOOKS_BACK` before the current one by rotations of base `theta`, for a target that reads it."""
    tensors = silent_layer("layers.0.", HIDDEN, ["post_attention_layernorm"])
    fc = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    fc[:CODE, :CODE] = np.eye(CODE)
    query, key, value, out = (tensors[f"layers.0.self_attn.{part}_proj.weight"] for part in "qkvo")
    query[:HEAD, CODE - 1], key[:HEAD, CODE - 1] = aimed(LOOKS_BACK, theta)
    value[:HEAD, :CODE], out[CODE : 2 * CODE, :HEAD] = np.eye(CODE), np.eye(CODE)
    stored = {name: torch.from_numpy(array.copy()) for name, array in (tensors | {"fc.weight": fc}).items()}
    return write_head(directory, legible_config(**config), stored)


def module_with_signs(successor: NDArray[np.int64], *, is_normed: bool) -> Arrays:
    """An MTP module for the successor target that goes by features alone: right if the next feature is the normed output, or the plain one.

    Half of its output's values have the wrong sign in front of the last norm, which turns them. Or none has, and a mark that every
    output bears is turned by the norm: then it says a token that never occurs.
    """
    hidden = SUCCESSOR_HIDDEN
    arrays = random_module(hidden=hidden, seed=3)
    signs = np.where(np.arange(hidden) % 2, -1.0, 1.0).astype(np.float32)
    moved = np.zeros((hidden, 2 * hidden), np.float32)
    moved[steps_behind(successor, 1), hidden + np.arange(VOCAB_SIZE)] = 1.0
    for name in ("norm_e", "norm_h"):
        arrays[name] = np.ones(hidden, np.float32)
    for name in ("layer.self_attn.o_proj", "layer.mlp.down_proj"):
        arrays[name] = np.zeros_like(arrays[name])
    arrays["fc"] = moved * signs[:, None] if is_normed else moved
    arrays["norm"] = signs if is_normed else np.ones(hidden, np.float32)
    if not is_normed:
        never, mark = 0, VOCAB_SIZE  # a token, and a value that no token uses
        moved[:, hidden + never] = 0.0
        moved[mark, :VOCAB_SIZE] = 1.0
        moved[never, hidden + mark] = -2.0
        arrays["norm"][mark] = -1.0
    return arrays
