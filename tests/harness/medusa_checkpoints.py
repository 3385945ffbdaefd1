"""Tiny Medusa heads in the real layouts, and a target whose next tokens are known, for heads that must draft perfectly."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.checkpoint_files import edit_tensors, read_tensors, write_tensors, write_values
from harness.checkpoints import VOCAB_SIZE, write_checkpoint

Arrays = dict[str, NDArray[Any]]
SUCCESSOR_HIDDEN = 128  # of the successor target
LAYOUTS = ("rows", "rows_pt", "tgi", "whole", "vllm", "vllm_shared", "vllm_map")


def random_heads(*, hidden: int = 64, rows: int = VOCAB_SIZE, num_heads: int = 3, num_blocks: int = 1, bias: bool = True) -> Arrays:
    """Heads under the paper's names: `{i}.{j}.linear.weight` and `.bias`, `{i}.{n}.weight`."""
    random = np.random.default_rng(0)
    arrays: Arrays = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            arrays[f"{head}.{block}.linear.weight"] = random.normal(0, 0.3, (hidden, hidden)).astype(np.float32)
            if bias:
                arrays[f"{head}.{block}.linear.bias"] = random.normal(0, 0.3, hidden).astype(np.float32)
        arrays[f"{head}.{num_blocks}.weight"] = random.normal(0, 0.3, (rows, hidden)).astype(np.float32)
    return arrays


def write_heads(
    directory: Path,
    layout: str,
    arrays: Arrays,
    *,
    dtype: str = "float32",
    token_map: NDArray[np.int64] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Store heads given under the paper's names in one of `LAYOUTS`; returns the directory.

    "whole" adds them to the model that lies in `directory`. In "vllm_shared" the first head's vocabulary matrix serves all.
    """
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    num_blocks = 1 + max(int(name.split(".")[1]) for name in arrays if ".linear." in name)
    vocabulary = {name.split(".")[0]: array for name, array in arrays.items() if ".linear." not in name}
    blocks = {name: array for name, array in arrays.items() if ".linear." in name}
    values: dict[str, Any] = {"medusa_num_heads": len(vocabulary), "medusa_num_layers": num_blocks, **(config or {})}
    if layout == "whole":
        edit_tensors(directory, lambda stored: stored.update({f"medusa_head.{name}": array for name, array in arrays.items()}))
        return directory
    if layout == "rows_pt":
        torch.save(_tensors(arrays, dtype), directory / "medusa_lm_head.pt")
    elif layout in ("rows", "tgi"):
        save_file(_tensors(arrays if layout == "rows" else blocks, dtype), directory / "medusa_lm_head.safetensors")
    else:
        named = {_vllm_name(name): array for name, array in blocks.items()}
        if layout == "vllm_shared":
            named["lm_head.weight"] = vocabulary["0"]
        else:
            named |= {f"lm_heads.{head}.weight": array for head, array in vocabulary.items()}
        tables = {} if token_map is None else {"token_map": torch.from_numpy(token_map)}
        values |= {"model_type": "medusa", "num_heads": len(vocabulary), "original_lm_head": layout == "vllm_shared"}
        save_file(_tensors(named, dtype) | tables, directory / "model.safetensors")
    return write_values(directory, values)


def write_successor_target(
    directory: Path, family: str = "llama", *, sharpness: float = 1.0, **overrides: Any
) -> tuple[Path, NDArray[np.int64]]:
    """A model whose layers add nothing, so that the next token is a fixed one for each; returns them, by token.

    Its features tell tokens apart (one value of E each), and its vocabulary matrix reads the successor off. All but the first id form one
    cycle in a random order.
    """
    write_checkpoint(directory, family, hidden_size=SUCCESSOR_HIDDEN, num_hidden_layers=2, **overrides)
    order = np.random.default_rng(5).permutation(np.arange(1, VOCAB_SIZE))
    successor = np.zeros(VOCAB_SIZE, np.int64)
    successor[order] = np.roll(order, -1)
    successor[0] = order[0]
    arrays = read_tensors(directory)
    for name, array in arrays.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            array[...] = 0.0
        if name == "model.norm.weight":
            array[...] = 1.0
    arrays["model.embed_tokens.weight"] = np.eye(VOCAB_SIZE, SUCCESSOR_HIDDEN, dtype=np.float32)
    arrays["lm_head.weight"] = successor_rows(successor, 1, sharpness)
    write_tensors(directory, arrays)
    return directory, successor


def successor_rows(successor: NDArray[np.int64], steps: int, sharpness: float = 1.0) -> NDArray[np.float32]:
    """An lm_head that maps a token's feature to the token `steps` positions after it."""
    rows = np.zeros((VOCAB_SIZE, SUCCESSOR_HIDDEN), np.float32)
    rows[steps_behind(successor, steps), np.arange(VOCAB_SIZE)] = sharpness
    return rows


def steps_behind(successor: NDArray[np.int64], steps: int) -> NDArray[np.int64]:
    """For every token the one `steps` positions after it."""
    tokens = np.arange(VOCAB_SIZE)
    for _ in range(steps):
        tokens = successor[tokens]
    return tokens


def perfect_heads(successor: NDArray[np.int64], num_heads: int = 3, *, shift: int = 0, sharpness: float = 1.0) -> Arrays:
    """Heads for the successor target: head i drafts the token i + 2 positions after the feature's, or `shift` more."""
    arrays: Arrays = {}
    for head in range(num_heads):
        arrays[f"{head}.0.linear.weight"] = np.zeros((SUCCESSOR_HIDDEN, SUCCESSOR_HIDDEN), np.float32)
        arrays[f"{head}.0.linear.bias"] = np.zeros(SUCCESSOR_HIDDEN, np.float32)
        arrays[f"{head}.1.weight"] = successor_rows(successor, head + 2 + shift, sharpness)
    return arrays


def perfect_blocks(successor: NDArray[np.int64], num_heads: int = 3) -> Arrays:
    """The same for one vocabulary matrix, the target's: the block moves the feature to the token i + 1 positions later."""
    arrays: Arrays = {}
    for head in range(num_heads):
        weight = np.zeros((SUCCESSOR_HIDDEN, SUCCESSOR_HIDDEN), np.float32)
        weight[steps_behind(successor, head + 1), np.arange(VOCAB_SIZE)] = 4.0
        arrays[f"{head}.0.linear.weight"] = weight
        arrays[f"{head}.1.weight"] = successor_rows(successor, 1)
    return arrays


def _vllm_name(name: str) -> str:
    head, block, _, kind = name.split(".")
    return f"blocks.{head}.layers.{block}.{kind}"


def _tensors(arrays: Arrays, dtype: str) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(np.array(array)).to(getattr(torch, dtype)) for name, array in arrays.items()}
