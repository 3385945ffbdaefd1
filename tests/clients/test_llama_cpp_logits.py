"""Tiny GGUF files of every architecture give llama.cpp's logits, which lives in an environment of its own (make test-clients)."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.run_foreign import run_foreign
from harness.checkpoints import MINISTRAL3, MUSE_GLIMMER, OLMO3_ROPE, VOCAB_SIZE, write_checkpoint
from harness.expert_checkpoints import CASES as EXPERTS
from harness.expert_checkpoints import GPT_OSS_ROPE
from harness.expert_checkpoints import LATENT as LATENT_SIZES
from harness.gemma3n_checkpoints import GEMMA3N
from harness.gemma4_checkpoints import GEMMA4, UNIFIED
from harness.gguf_checkpoints import ARCHITECTURES, with_random_blocks, write_gguf
from harness.hybrid_checkpoints import CASES as HYBRID
from harness.hybrid_gguf import write_hybrid_gguf
from harness.parity import open_backend, prompt_logits
from paceline.models.config import WeightType

PROMPT_LEN = 100
GEMMA = {"query_pre_attn_scalar": 16, "tie_word_embeddings": True, "sliding_window": 16}
GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22, "logits_scaling": 1.5}
LATENT = {**LATENT_SIZES, "rms_norm_eps": 1e-6, "n_group": 1, "topk_group": 1}
PLAIN_YARN = {**GPT_OSS_ROPE, "factor": 1.0}  # llama.cpp rounds the borders of YaRN's ramp, as transformers does for no gpt-oss
# there these sizes are fixed: 20 layers with keys of their own, the first 10 of them sparse, and 256 values of an input of a layer; its
# MLPs are so wide that the deviation of a sample, which llama.cpp takes, is nearly that of all values
MOBILE = {"num_hidden_layers": 22, "layer_types": None, "activation_sparsity_pattern": None, "intermediate_size": 4096, "laurel_rank": 64}
MOBILE |= {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": VOCAB_SIZE, "initializer_range": 0.05, "query_key_scale": 0.1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", GEMMA),
    "olmo2": ("olmo2", {"num_key_value_heads": 2}),
    "olmo3": ("olmo3", {"num_hidden_layers": 5, "sliding_window": 16, "rope_parameters": OLMO3_ROPE}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),  # there a window is the 32B's alone
    "granite": ("granite", GRANITE),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "glm4": ("glm4", {}),
    "apertus": ("apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "ernie4_5": ("ernie4_5", {}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "ministral3": ("ministral3", MINISTRAL3),
    "arcee": ("arcee", {}),
    "phi2": ("phi", {}),
    "phi3": ("phi3", {}),
    "starcoder2": ("starcoder2", {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "command-r": ("cohere", {"tie_word_embeddings": True}),
    "cohere2": ("cohere2", {"num_hidden_layers": 5, "sliding_window": 16, "tie_word_embeddings": True}),
    # there norms of latents have the other norms' epsilon, and the score of a group is the sum of two experts' scores
    "deepseek_v2": ("deepseek_v2", {**LATENT, "q_lora_rank": 48, "topk_method": "greedy"}),
    "deepseek_v2-lite": ("deepseek_v2", {**LATENT, "num_hidden_layers": 27, "topk_method": "greedy"}),  # found by the number of layers
    "deepseek_v3": ("deepseek_v3", {**EXPERTS["deepseek_v3"][1], "rms_norm_eps": 1e-6}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {**EXPERTS["glm4_moe_lite"][1], "mlp_layer_types": ["dense", "sparse", "sparse"], "rms_norm_eps": 1e-6},
    ),
    "muse_glimmer": ("muse_glimmer_text", {**MUSE_GLIMMER, "post_norm_eps": 1e-8}),  # there the latter is a constant
    "youtu": ("youtu", {**EXPERTS["youtu"][1], "rms_norm_eps": 1e-6}),
    **{name: EXPERTS[name] for name in ("mixtral", "qwen2_moe-plain", "qwen3_moe", "glm4_moe", "gemma4-window")},
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {**EXPERTS["ernie4_5_moe"][1], "num_hidden_layers": 3},
    ),  # there all but the first layer have experts
    "olmoe": ("olmoe", {**EXPERTS["olmoe"][1], "num_key_value_heads": 4}),  # there all heads have keys of their own
    "gpt_oss": ("gpt_oss", {**EXPERTS["gpt_oss"][1], "rope_parameters": PLAIN_YARN}),
    "gemma3n": ("gemma3n_text", {**GEMMA3N, **MOBILE, "final_logit_softcapping": 30.0}),
    # there the last two layers in front of those that share are a local and a global one
    "gemma4": ("gemma4_text", {**GEMMA4, "num_kv_shared_layers": 4, "final_logit_softcapping": 30.0}),
    "gemma4_unified": ("gemma4_unified_text", {**UNIFIED, "final_logit_softcapping": 30.0}),
}
DELTA = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32}
DELTA |= {"linear_value_head_dim": 32}  # there as large as keys
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen35": ("qwen3_5_text", DELTA),
    "qwen35moe": ("qwen3_5_moe_text", {**HYBRID["qwen3_5-moe"][1], **DELTA}),
    "qwen3next": ("qwen3_next", {**HYBRID["qwen3_5-moe"][1], **DELTA}),
    "lfm2": HYBRID["lfm2"],
    "lfm2moe": ("lfm2_moe", {**HYBRID["lfm2-moe"][1], "routed_scaling_factor": 1.0}),  # there it is not read
    "granitehybrid": HYBRID["granite"],
    "falcon-h1": HYBRID["falcon_h1"],
    "nemotron_h": HYBRID["nemotron_h"],
    "nemotron_h_moe": ("nemotron_h", {**HYBRID["nemotron_h-moe"][1], "use_bias": False}),  # there biases are not read
}
BOUNDS = {"gemma2": 5e-3, "gemma3_text": 5e-3, "gemma3n_text": 2e-2, "gemma4_text": 2e-2, "gemma4_unified_text": 5e-3}
BOUNDS |= {"phi": 5e-3, "starcoder2": 5e-3}
"""Of families whose activation llama.cpp looks up in a table of float16; every layer of the first of Gemma 4 does so twice."""


@pytest.mark.parametrize("name", CASES)
def test_float32_logits_equal_those_of_llama_cpp(clients: Path, tmp_path: Path, tally: "Counter[str]", name: str) -> None:
    family, values = CASES[name]
    directory = write_checkpoint(tmp_path / "model", family, **values)
    path = tmp_path / "model.gguf"
    write_gguf(directory, path, metadata={"tokenizer.ggml.model": "no_vocab", f"{ARCHITECTURES[family]}.vocab_size": VOCAB_SIZE})
    assert distance_to_llama_cpp(clients, path, tmp_path) < BOUNDS.get(family, 2e-4)
    tally["files whose logits are llama.cpp's"] += 1


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_logits_of_recurrent_models_equal_those_of_llama_cpp(
    clients: Path, tmp_path: Path, tally: "Counter[str]", architecture: str
) -> None:
    family, values = HYBRIDS[architecture]
    metadata = {"tokenizer.ggml.model": "no_vocab", f"{architecture}.vocab_size": VOCAB_SIZE}
    if family == "nemotron_h":
        metadata[f"{architecture}.attention.layer_norm_epsilon"] = 1e-5
    path = write_hybrid_gguf(write_checkpoint(tmp_path / "model", family, **values), tmp_path / "model.gguf", metadata=metadata)
    assert distance_to_llama_cpp(clients, path, tmp_path) < 2e-4
    tally["files whose logits are llama.cpp's"] += 1


@pytest.mark.parametrize(("block_type", "bound"), [("Q4_K", 0.1), ("Q5_K", 2e-4), ("Q6_K", 2e-4)])
def test_logits_of_k_quants_equal_those_of_llama_cpp(
    clients: Path, tmp_path: Path, tally: "Counter[str]", block_type: str, bound: float, seed: int
) -> None:
    """Its BLAS takes rows of a prompt as they are, unless weights are Q4_K, which it lays out anew; ours are rounded the second time."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    metadata = {"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": VOCAB_SIZE}
    plain = write_gguf(write_checkpoint(tmp_path / "model", "llama", **sizes), tmp_path / "plain.gguf", metadata=metadata)
    path = tmp_path / "model.gguf"
    with_random_blocks(plain, path, lambda _: block_type, np.random.default_rng(seed), scale=1e-5)
    assert distance_to_llama_cpp(clients, path, tmp_path) < bound
    assert distance_to_llama_cpp(clients, path, tmp_path, weight_type=None) < 0.5  # a random network amplifies
    tally["files whose logits are llama.cpp's"] += 1


def distance_to_llama_cpp(clients: Path, path: Path, folder: Path, weight_type: WeightType | None = WeightType.F32) -> float:
    """How far our logits of a prompt are from its, at most, in standard deviations."""
    ids_path, out = folder / "ids.json", folder / "logits.npy"
    token_ids = np.random.default_rng(1).integers(0, VOCAB_SIZE, PROMPT_LEN).tolist()
    ids_path.write_text(json.dumps(token_ids), encoding="utf-8")
    run_foreign(clients / "llama-cpp", "llama_logits.py", path, ids_path, out)
    expected, found = np.load(out), prompt_logits(open_backend(path, "native", weight_type=weight_type), token_ids)
    return float(np.abs(found - expected).max() / expected.std())
