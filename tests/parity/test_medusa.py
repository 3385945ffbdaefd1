"""Medusa heads, every layout against the plain computation: lm_head_i(x + SiLU(W x + b)) of the feature x, in torch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.medusa_checkpoints import LAYOUTS, Arrays, random_heads, write_heads
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.medusa.checkpoint import load_medusa
from paceline.drafters.medusa.network import MedusaNetwork
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.weights import as_float32

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=1)


def opened(files: HeadFiles, target: Path, backend: str) -> MedusaNetwork:
    config = read_model_config(target)
    return MedusaNetwork(load_medusa(files, config, open_weights(target, config)["lm_head.weight"]), config, num_threads=2, backend=backend)


def reference(arrays: Arrays, head: int, features: torch.Tensor, lm_head: NDArray[np.float32] | None, dtype: str) -> torch.Tensor:
    def stored(array: NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(array).to(getattr(torch, dtype)).float()

    x = features
    block = 0
    while (name := f"{head}.{block}.linear") + ".weight" in arrays:
        y = x @ stored(arrays[f"{name}.weight"]).T
        if f"{name}.bias" in arrays:
            y = y + stored(arrays[f"{name}.bias"])
        x = x + y * torch.sigmoid(y)
        block += 1
    matrix = stored(arrays[f"{head}.{block}.weight"]) if lm_head is None else torch.from_numpy(lm_head.copy())
    return x @ matrix.T


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_medusa_heads_of_every_layout_equal_the_formula(target: Path, tmp_path: Path, layout: str, backend: str) -> None:
    dtype = "bfloat16" if layout in ("rows_pt", "vllm") else "float32"
    num_blocks = 2 if layout in ("rows", "vllm") else 1
    token_map = np.arange(0, VOCAB_SIZE, 3) if layout == "vllm_map" else None
    rows = VOCAB_SIZE if token_map is None else len(token_map)
    arrays = random_heads(num_heads=4, num_blocks=num_blocks, rows=rows, bias=layout not in ("vllm", "vllm_map"))
    directory = tmp_path
    if layout == "whole":
        directory = write_checkpoint(tmp_path / "whole", "llama", num_hidden_layers=1)
    network = opened(HeadFiles.open(write_heads(directory, layout, arrays, dtype=dtype, token_map=token_map)), target, backend)
    assert network.heads.num_heads == 4
    assert network.heads.notices == ()
    own = None
    if layout == "tgi":
        config = read_model_config(target)
        own = as_float32(open_weights(target, config)["lm_head.weight"])
    elif layout == "vllm_shared":
        own = arrays[f"0.{num_blocks}.weight"]
    features = np.random.default_rng(1).normal(0, 1, (3, 64)).astype(np.float32)
    for num_heads in (4, 2, 4):  # a network of fewer heads in between
        outputs = network.forward(features, num_heads)
        for head in range(num_heads):
            expected = reference(arrays, head, torch.from_numpy(features), own, dtype).numpy()
            assert outputs.logits_of_head(head).shape == (3, rows)
            assert np.abs(outputs.logits_of_head(head) - expected).max() <= TOLERANCE * max(1.0, np.abs(expected).max())


def test_medusa_rows_do_not_depend_on_each_other(target: Path, tmp_path: Path) -> None:
    network = opened(HeadFiles.open(write_heads(tmp_path, "rows", random_heads())), target, "native")
    features = np.random.default_rng(2).normal(0, 1, (9, 64)).astype(np.float32)
    outputs = network.forward(features, 3)
    together = [outputs.logits_of_head(head).copy() for head in range(3)]
    for row in range(9):
        outputs = network.forward(features[row : row + 1], 3)
        for head in range(3):
            assert np.array_equal(outputs.logits_of_head(head)[0], together[head][row])
