"""Heads that are right with one value of an option that their files leave open or have wrong; `eagle_checkpoints` makes their target."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness.checkpoints import VOCAB_SIZE
from harness.eagle_checkpoints import (
    CODE,
    CURRENT,
    HEAD,
    HIDDEN,
    NEW,
    Arrays,
    code_of_the_token,
    legible_config,
    look_back,
    silent_layer,
    write_head,
)
from harness.medusa_checkpoints import steps_behind
from harness.mtp_checkpoints import perfect_module

LOOKS_BACK = 6
SIGNS = np.where(np.arange(HIDDEN) % 2, -1.0, 1.0).astype(np.float32)


def from_first_boundary(tensors: Arrays) -> None:
    """Reads all from the first of its boundaries, in which boundary 0 has not looked back yet."""
    tensors["fc.weight"] = np.roll(tensors["fc.weight"], -2 * HIDDEN, axis=1)


def less_first_boundary(tensors: Arrays) -> None:
    """Subtracts what its first boundary contains of earlier tokens: at boundary 0 nothing."""
    earlier = slice(CODE, 2 * CODE)
    tensors["fc.weight"][earlier, earlier] = -np.eye(CODE)


def with_small_features(tensors: Arrays) -> None:
    """Right where the residual stream begins with the normed feature."""
    tensors["fc.weight"] *= 0.05


def with_small_outputs(tensors: Arrays) -> None:
    """Where the stream begins with the plain feature: right again and again if the next feature is the normed output."""
    value = tensors["midlayer.self_attn.v_proj.weight"]
    value[:HEAD, NEW] *= 0.1
    value[HEAD : 2 * HEAD, CURRENT] *= 0.1


def with_signed_norm(tensors: Arrays) -> None:
    """Right with its final norm alone, which turns every second value around."""
    tensors["norm.weight"] = tensors["norm.weight"] * SIGNS
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * SIGNS


def with_strange_norm(tensors: Arrays) -> None:
    """Right without its final norm alone."""
    tensors["norm.weight"] = tensors["norm.weight"] * SIGNS


def write_looking_back_eagle1(directory: Path, *, theta: float, **config: Any) -> Path:
    """Finds the token `LOOKS_BACK` before the current one by rotations of base `theta`, for a target that reads it."""
    tensors = silent_layer("layers.0.", HIDDEN, ["post_attention_layernorm"]) | {"fc.weight": code_of_the_token()}
    look_back(tensors, "layers.0.", LOOKS_BACK, theta=theta)
    return write_head(directory, legible_config(**config), {name: torch.from_numpy(array) for name, array in tensors.items()})


def module_with_signs(successor: NDArray[np.int64], *, is_normed: bool) -> dict[str, NDArray[Any]]:
    """An MTP module for the successor target that goes by features alone: right if the next feature is the normed output, or the plain one.

    Half of its output's values have the wrong sign in front of the last norm, which turns them. Or none has, and a mark that every
    output bears is turned by the norm: then it says a token that never occurs.
    """
    arrays, hidden = perfect_module(), 128
    signs = np.where(np.arange(hidden) % 2, -1.0, 1.0).astype(np.float32)
    moved = np.zeros((hidden, 2 * hidden), np.float32)
    moved[steps_behind(successor, 1), hidden + np.arange(VOCAB_SIZE)] = 1.0
    arrays["fc"] = moved * signs[:, None] if is_normed else moved
    if is_normed:
        arrays["norm"] = signs
    else:
        never, mark = 0, VOCAB_SIZE  # a token, and a value that no token uses
        moved[:, hidden + never] = 0.0
        moved[mark, :VOCAB_SIZE] = 1.0
        moved[never, hidden + mark] = -2.0
        arrays["norm"][mark] = -1.0
    return arrays
