"""The modules of Qwen's hybrid families against transformers' layer and norms, which it has although it leaves modules out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from harness.hybrid_gguf import write_hybrid_gguf
from harness.hybrid_mtp import ATTENTION_LAYER, HOSTS, add_module, module_tensors, write_donor, write_host
from harness.pair_passes import distance, run_draft, run_pairs
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.mtp import load_mtp, open_gguf_module, open_mtp_head
from paceline.drafters.recurrent_heads.head import RecurrentHead
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.weights import as_float32

Floats = NDArray[np.float32]
TOLERANCE = 1e-4


class Reference:
    """The module's formula with transformers' parts; every pair is computed anew in each step."""

    def __init__(self, donor: Path, tensors: dict[str, Floats], embedding: Floats, lm_head: Floats) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(donor, dtype=torch.float32, attn_implementation="eager").eval()
        self._layer, self._rotary = model.model.layers[ATTENTION_LAYER], model.model.rotary_emb
        self._tensors = {name.split("mtp.")[1]: torch.from_numpy(array) for name, array in tensors.items()}
        self._norm_type, self._eps = type(model.model.norm), model.config.rms_norm_eps
        self._embedding, self._lm_head = torch.from_numpy(embedding.copy()), torch.from_numpy(lm_head.copy())

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        norm = self._norm_type(x.shape[-1], eps=self._eps)
        norm.weight.data.copy_(self._tensors[f"{name}.weight"])
        return norm(x)

    def run(self, token_ids: list[int], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and the feature of the next pair, after the last of pairs 0 … T - 1."""
        with torch.inference_mode():
            halves = self._normed(self._embedding[token_ids], "pre_fc_norm_embedding"), self._normed(features, "pre_fc_norm_hidden")
            u = (torch.cat(halves, -1) @ self._tensors["fc.weight"].T)[None]
            count = len(token_ids)
            positions = torch.arange(1, count + 1)[None]
            mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
            o = self._layer(u, position_embeddings=self._rotary(u, positions), attention_mask=mask, position_ids=positions)
            o = self._normed(o[0, -1], "norm")
            return o @ self._lm_head.T, o


def opened(files: HeadFiles, directory: Path, backend: str) -> RecurrentHead:
    config = read_model_config(directory)
    module = load_mtp(files, config, open_weights(directory, config))
    assert module.notices == ()
    head = open_mtp_head(module, num_threads=2, max_model_len=128, backend=backend)
    head.runtime.allocate_kv(8)
    return head


def check(head: RecurrentHead, reference: Reference) -> None:
    """43 true pairs in two passes, and three steps after them."""
    random = np.random.default_rng(4)
    token_ids = random.integers(1, 97, 43)
    features = random.normal(0, 1, (43, 64)).astype(np.float32)
    run_pairs(head, token_ids[:30], features[:30], 0)
    logits, output = run_pairs(head, token_ids[30:], features[30:], 30)
    tokens, fed = token_ids.tolist(), torch.from_numpy(features)
    for step in range(3):
        expected, feature = reference.run(tokens, fed)
        assert distance(logits, expected) <= TOLERANCE, step
        assert distance(output, feature) <= TOLERANCE, step
        tokens.append(int(expected.argmax()))
        fed = torch.cat((fed, feature[None]))
        logits, output = run_draft(head, tokens[-1], output, 43 + step)


def target_matrices(directory: Path) -> tuple[Floats, Floats]:
    config = read_model_config(directory)
    weights = open_weights(directory, config)
    embedding = as_float32(weights["embedding.weight"])
    return embedding, embedding if config.tied_embeddings else as_float32(weights["lm_head.weight"])


@pytest.mark.spread(0.5)
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("qwen3_5", {}),
        ("qwen3_5-tied", {"prefix": "model.mtp."}),
        ("qwen3_5_moe", {}),
        ("qwen3_5_moe", {"stacks_experts": True}),
        ("qwen3_next", {}),
    ],
)
def test_hybrid_mtp_outputs_equal_a_transformers_decoder_layer(tmp_path: Path, case: str, layout: dict[str, Any], backend: str) -> None:
    directory, donor = write_host(tmp_path / "model", case), write_donor(tmp_path / "donor", case)
    tensors = module_tensors(donor, **layout)
    add_module(directory, tensors)
    files = HeadFiles.open(directory)
    assert files.kind is HeadKind.MTP
    check(opened(files, directory, backend), Reference(donor, tensors, *target_matrices(directory)))


@pytest.mark.parametrize("case", HOSTS)
def test_gguf_mtp_module_equals_that_of_its_directory(tmp_path: Path, case: str) -> None:
    directory, donor = write_host(tmp_path / "model", case), write_donor(tmp_path / "donor", case)
    tensors = module_tensors(donor)
    add_module(directory, tensors)
    path = write_hybrid_gguf(directory, tmp_path / "model.gguf")
    files = open_gguf_module(path)
    assert files is not None
    config = read_model_config(path)
    assert config == read_model_config(directory)
    ours = load_mtp(files, config, open_weights(path, config))
    theirs = load_mtp(HeadFiles.open(directory), config, open_weights(directory, config))
    assert ours.config == theirs.config
    assert list(ours.weights) == list(theirs.weights)
    for name in ours.weights:
        assert np.array_equal(as_float32(ours.weights[name]), as_float32(theirs.weights[name])), name
    check(opened(files, path, "torch"), Reference(donor, tensors, *target_matrices(directory)))
