"""MTP modules, every layout against the plain computation in torch: no cache, every pair recomputed, softmax over all pairs before."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from harness.checkpoint_files import read_values
from harness.checkpoints import write_checkpoint
from harness.expert_checkpoints import in_stacks
from harness.mtp_checkpoints import LAYOUTS, Arrays, add_module, random_matrix, random_module, write_glm4_moe, write_mimo
from harness.pair_passes import distance, run_draft, run_pairs
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.drafters.mtp import load_mtp, open_mtp_head
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.weights import as_float32

Floats = NDArray[np.float32]
TOLERANCE = 1e-4
THETA, EPS = 10000.0, 1e-6
HEADS, KV_HEADS, SIZE = 4, 2, 16


def reference(
    arrays: Arrays, embeddings: torch.Tensor, features: torch.Tensor, lm_head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, normed and plain outputs of pairs 0 … T - 1, each attending to all before."""
    w = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * w[name]

    def heads(x: torch.Tensor, count: int, name: str) -> torch.Tensor:
        x = x.reshape(len(x), count, SIZE)
        x = norm(x, name) if name in w else x
        frequencies = THETA ** (-torch.arange(0, SIZE, 2).float() / SIZE)
        angles = torch.arange(len(x)).float()[:, None] * frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        left, right = x[..., : SIZE // 2], x[..., SIZE // 2 :]
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    u = torch.cat((norm(embeddings, "norm_e"), norm(features, "norm_h")), -1) @ w["fc"].T
    a = norm(u, "layer.input_layernorm")
    q, k, v = (
        a @ w[f"{name}_proj"].T + w.get(f"{name}_proj.bias", torch.zeros(())) for name in (f"layer.self_attn.{part}" for part in "qkv")
    )
    q, k = heads(q, HEADS, "layer.self_attn.q_norm"), heads(k, KV_HEADS, "layer.self_attn.k_norm")
    v = v.reshape(len(a), KV_HEADS, SIZE)
    attended = torch.zeros(len(a), HEADS, SIZE)
    for row in range(len(a)):
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = (k[: row + 1, kv_head] @ q[row, head]) / SIZE**0.5
            attended[row, head] = torch.softmax(scores, 0) @ v[: row + 1, kv_head]
    z = u + attended.reshape(len(a), -1) @ w["layer.self_attn.o_proj"].T
    m = norm(z, "layer.post_attention_layernorm")
    gate = m @ w["layer.mlp.gate_proj"].T
    o = z + (gate * torch.sigmoid(gate) * (m @ w["layer.mlp.up_proj"].T)) @ w["layer.mlp.down_proj"].T
    normed = norm(o, "norm")
    return normed @ lm_head.T, normed, o


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("family", "layout", "brings_matrices"),
    [
        ("qwen3", "mtp", False),
        ("qwen3", "extra_layer", False),
        ("qwen3", "extra_layer", True),
        ("qwen3", "mtp_layers", False),
        ("mimo", "mtp_layers", False),
    ],
)
def test_mtp_outputs_equal_the_formula(tmp_path: Path, family: str, layout: str, brings_matrices: bool, backend: str) -> None:
    assert layout in LAYOUTS
    write = write_mimo if family == "mimo" else partial(write_checkpoint, family=family)
    directory = write(tmp_path, num_hidden_layers=2)
    arrays = random_module(family=family)
    own = {"lm_head": random_matrix(8), "embed": random_matrix(9)} if brings_matrices else {}
    add_module(directory, layout, arrays, num_layers=2, **own)
    files = HeadFiles.open(directory)
    assert files.kind is HeadKind.MTP
    config = read_model_config(directory)
    weights = open_weights(directory, config)
    module = load_mtp(files, config, weights)
    assert module.notices == ()
    is_plain = layout == "extra_layer" and not brings_matrices  # both ways occur there
    if is_plain:
        module = replace(module, config=replace(module.config, normed_recurrence=False))
    head = open_mtp_head(module, num_threads=2, max_model_len=128, backend=backend)
    lm_head = torch.from_numpy(as_float32(weights["lm_head.weight"]).copy())  # copies in the file are not used
    embedding = as_float32(weights["embedding.weight"])
    random = np.random.default_rng(4)
    tokens = random.integers(1, 97, 43)
    features = random.normal(0, 1, (43, 64)).astype(np.float32)
    head.runtime.allocate_kv(8)
    logits, output = run_pairs(head, tokens[:30], features[:30], 0)
    logits, output = run_pairs(head, tokens[30:], features[30:], 30)  # a second pass over the cached pairs of the first
    rows, fed = [torch.from_numpy(embedding[tokens])], [torch.from_numpy(features)]
    for step in range(3):
        expected, normed, plain = reference(arrays, torch.cat(rows), torch.cat(fed), lm_head)
        recurrent = plain if is_plain else normed
        assert distance(logits, expected[-1]) <= TOLERANCE, step
        assert distance(output, recurrent[-1]) <= TOLERANCE, step
        token = int(random.integers(1, 97))
        rows.append(torch.from_numpy(embedding[[token]]))
        fed.append(recurrent[-1:])
        logits, output = run_draft(head, token, output, 43 + step)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("case", "is_stacked"), [("glm4_moe", False), ("glm4_moe", True), ("glm4_moe-groups", False), ("deepseek_v3", False)]
)
def test_moe_mtp_outputs_equal_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, is_stacked: bool, backend: str
) -> None:
    """Its MtpModel, which applies a module once; for the later steps its layer gets its own output."""
    directory = write_glm4_moe(tmp_path / "model", case)
    main, theirs, cache = transformers_module(directory, monkeypatch)
    token_ids = torch.from_numpy(np.random.default_rng(4).integers(1, 97, (1, 44)))
    ours = in_stacks(directory, tmp_path / "stacked") if is_stacked else directory
    config = read_model_config(ours)
    module = load_mtp(HeadFiles.open(ours), config, open_weights(ours, config))
    assert module.config.normed_recurrence
    head = open_mtp_head(module, num_threads=2, max_model_len=128, backend=backend)
    head.runtime.allocate_kv(8)
    with torch.inference_mode():
        feature = main(token_ids[:, :-1], output_hidden_states=True).hidden_states[-1]
        logits, output = run_pairs(head, token_ids[0, 1:].numpy(), feature[0].numpy(), 0)
        positions, fed = torch.arange(1, 44)[None], token_ids[:, 1:]
        ids, said, _ = theirs(fed, feature, None, positions, type(cache)(config=main.config.get_mtp_config()))
        for step in range(3):
            feature = theirs.forward_layer(0, feature, positions, cache, input_ids=fed)[:, -1:]
            expected = main.lm_head(feature)[0, 0]
            assert distance(log_softmax(logits), torch.log_softmax(expected, -1)) <= TOLERANCE, step
            assert distance(output, feature[0, 0]) <= TOLERANCE, step
            token = int(expected.argmax())
            assert int(logits.argmax()) == token
            if step == 0:
                assert (int(ids[0, 0]), distance(logits, said[0, 0]) <= TOLERANCE) == (token, True)
            logits, output = run_draft(head, token, output, 43 + step)
            fed, positions = torch.tensor([[token]]), positions[:, -1:] + 1


def transformers_module(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    """The model in `directory`, its module, and an empty cache for that."""
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    # released models' numbers of layers are written there; it is how modules are found
    (architecture,) = read_values(directory)["architectures"]
    monkeypatch.setattr(getattr(transformers, architecture), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*"])
    main = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager").eval()
    return main, MtpModel.from_pretrained(main, device_map={"": "cpu"}).eval(), MtpCache(config=main.config.get_mtp_config())


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float32)
