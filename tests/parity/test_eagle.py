"""Each variant of EAGLE heads equals a plain implementation of the formats, without cache, blocks or runtimes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from harness.eagle_checkpoints import (
    DRAFT_IDS,
    EAGLE1,
    EAGLE3,
    VOCAB_SIZE,
    Tensors,
    eagle1_tensors,
    eagle3_tensors,
    random_tensors,
    write_gguf_head,
    write_head,
)
from harness.exact_targets import skip_without_kernels
from harness.model_configs import make_config
from harness.native_network import plain_tensor
from paceline.drafters.eagle.checkpoint import open_eagle_checkpoint, open_gguf_eagle
from paceline.drafters.eagle.config import read_eagle_config
from paceline.drafters.eagle.network import open_eagle_head
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.recurrent_heads.cache import TargetFeaturePairs
from paceline.drafters.recurrent_heads.head import DraftFeaturePairs, RecurrentHead
from paceline.models.config import ModelConfig, WeightType
from paceline.models.rope_config import RopeConfig
from paceline.models.weights import Weights
from paceline.runtimes import load as load_module
from paceline.runtimes.base import RowRange

TARGET_HIDDEN, NUM_LAYERS, NUM_PAIRS = 32, 9, 9
BOUNDARIES = [2, 4, 6]
TABLE = np.array([3, 1, 2], np.int32)
Make = Callable[[], Tensors]


@dataclass(frozen=True)
class Variant:
    """A head, and the reference's settings for it."""

    spec: Mapping[str, Any]
    tensors: Make
    theta: float = 10000.0
    norm_before_residual: bool = False
    normed_recurrence: bool = False
    chunk_norms: bool = False
    container: str = "safetensors"
    skipped: Sequence[str] = ()  # tensors of the file that take no part
    window: int | None = None  # of the first layer
    rotated: float = 1.0  # share of a head's values
    reads_final_states: bool = False


E1 = {**EAGLE1}
E3 = {**EAGLE3, "eagle_aux_hidden_state_layer_ids": BOUNDARIES}
SPECULATORS = {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": BOUNDARIES, "draft_vocab_size": len(DRAFT_IDS)}
LAYER_CONFIG = {name: value for name, value in EAGLE3.items() if name != "architectures"}
QWEN3 = {"model_type": "qwen3", "layer_types": ["sliding_attention"]}
PART = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
OLD_SPECULATORS = {"speculators_model_type": "eagle", "transformer_layer_config": {**E1, "model_type": "llama"}, "layernorms": True}
OLD_NAMES = {
    "fc.": "module.fusion_fc.", "layers.0.": "transformer.", "norm.": "pre_lm_head_layernorm.",
}  # fmt: skip
HASS = {"embedding_layernorm.": "embed_layernorm.", "hidden_states_layernorm.": "hidden_layernorm.", "norm.": "lm_head_layernorm."}
NESTED: dict[str, Any] = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": {**E1, "model_type": "llama"}}
NORMS = {
    "embedding": "embedding_layernorm.weight",
    "hidden_states": "hidden_states_layernorm.weight",
    "first": "layers.0.input_layernorm.weight",
    "last": "norm.weight",
}


def own_matrix() -> Tensors:
    return random_tensors({"lm_head.weight": (VOCAB_SIZE, 32)}, 3)


def with_norms(*names: str, bias: bool = True) -> Tensors:
    """An EAGLE-1 head with norms that other trainers added."""
    return eagle1_tensors(bias=bias) | random_tensors({NORMS[name]: (32,) for name in names}, 4)


def speculators(layer: Mapping[str, Any], *, qk_norm: bool = False, config: Mapping[str, Any] | None = None, **reference: Any) -> Variant:
    """A head as the speculators library writes it."""
    spec = {**SPECULATORS, "transformer_layer_config": {**LAYER_CONFIG, **layer}, **(config or {})}
    return Variant(spec, lambda: eagle3_tensors(has_own_embedding=True, first_layer="layers.0.", qk_norm=qk_norm), **reference)


VLLM = {**NESTED["model"], "add_para_norm": True, "skip_prenorm": False, "skip_output_norm": False}
SLIDING_FIRST = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 4}
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
VARIANTS: dict[str, Variant] = {
    "eagle1": Variant(E1, eagle1_tensors, container="bin"),
    "eagle1, no fc bias, llama3's base": Variant(
        {**E1, "bias": False, "rope_theta": 500000.0}, lambda: eagle1_tensors(bias=False), theta=500000.0
    ),
    "eagle1, biases of q, k and v": Variant({**E1, "qkv_bias": True}, lambda: eagle1_tensors(qkv_bias=True)),
    "eagle1, two layers, sharded": Variant(
        {**E1, "num_hidden_layers": 2}, lambda: eagle1_tensors({**E1, "num_hidden_layers": 2}), container="sharded"
    ),
    "eagle1, normed halves": Variant(E1, lambda: eagle1_tensors(norms=True)),
    "eagle1, the target's embedding": Variant(E1, lambda: without(eagle1_tensors(), "embed_tokens.weight")),
    "eagle1, HASS's norms": Variant(E1, lambda: renamed(with_norms("embedding", "hidden_states", "last"), HASS)),
    "eagle1, a norm in front of the first attention": Variant(E1, lambda: with_norms("first")),
    "eagle1, an old speculators export": Variant(
        OLD_SPECULATORS, lambda: renamed(without(with_norms("embedding", "first", "last", bias=False), "embed_tokens.weight"), OLD_NAMES)
    ),
    "eagle1, an old speculators export without norms": Variant(
        {**OLD_SPECULATORS, "layernorms": False, "fusion_bias": True},
        lambda: renamed(without(eagle1_tensors(), "embed_tokens.weight"), OLD_NAMES),
    ),
    "eagle1, a vocabulary matrix of its own": Variant(E1, lambda: eagle1_tensors() | own_matrix()),
    "eagle1, vLLM's config": Variant(
        NESTED,
        lambda: renamed(with_norms("first", "last", bias=False), {"layers.": "model.layers.", "norm.": "model.norm."}) | own_matrix(),
        skipped=("layers.0.input_layernorm.weight", "norm.weight"),
    ),
    "eagle1, all of vLLM's norms": Variant(
        {**NESTED, "model": VLLM},
        lambda: renamed(
            with_norms("embedding", "hidden_states", "first", "last", bias=False),
            {"embedding_layernorm.": "enorm.", "hidden_states_layernorm.": "hnorm."},
        ),
        normed_recurrence=True,
    ),
    "eagle1, a window": Variant({**E1, "layer_types": ["sliding_attention"], "sliding_window": 4}, eagle1_tensors, window=4),
    "eagle3": Variant(E3, eagle3_tensors, container="bin"),
    "eagle3, default boundaries": Variant({**EAGLE3}, eagle3_tensors),
    "eagle3, ids of layer outputs": Variant({**EAGLE3, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [5, 1, 3]}}, eagle3_tensors),
    "eagle3, layers.0, own embedding": Variant(E3, lambda: eagle3_tensors(has_own_embedding=True, first_layer="layers.0.")),
    "eagle3, norm before the residual": Variant({**E3, "norm_before_residual": True}, eagle3_tensors, norm_before_residual=True),
    "eagle3, features normed together": Variant({**E3, "norm_before_fc": True}, lambda: eagle3_tensors(norm_before_fc=True)),
    "eagle3, features normed apart": Variant({**E3, "fc_norm": True}, lambda: eagle3_tensors(fc_norm=True), chunk_norms=True),
    "eagle3, norms of q and k": Variant(E3, lambda: eagle3_tensors(qk_norm=True)),
    "eagle3, other head size": Variant({**E3, "head_dim": 16}, lambda: eagle3_tensors({**EAGLE3, "head_dim": 16})),
    "eagle3, two layers": Variant({**E3, "num_hidden_layers": 2}, lambda: eagle3_tensors({**EAGLE3, "num_hidden_layers": 2})),
    "eagle3, narrower than the target": Variant(
        {**E3, "hidden_size": 24, "target_hidden_size": TARGET_HIDDEN},
        lambda: eagle3_tensors({**EAGLE3, "hidden_size": 24}, has_own_embedding=True),
    ),
    "eagle3, no auxiliary states": Variant(
        {**E3, "eagle_config": {"use_aux_hidden_state": False}}, lambda: eagle3_tensors(fc=False), reads_final_states=True
    ),
    "eagle3, no norm of the embedding": Variant(
        {**E3, "eagle_config": {"use_input_layernorm_in_first_layer": False}}, lambda: eagle3_tensors(embedding_norm=False)
    ),
    "eagle3, no last norm": Variant({**E3, "eagle_config": {"use_last_layernorm": False}}, lambda: eagle3_tensors(final_norm=False)),
    "eagle3, whole vocabulary": Variant(
        {**E3, "draft_vocab_size": None}, lambda: eagle3_tensors({**EAGLE3, "draft_vocab_size": None}, draft_ids=None)
    ),
    "eagle3, one boundary": Variant({**E3, "eagle_aux_hidden_state_layer_ids": [6]}, lambda: eagle3_tensors(num_boundaries=1)),
    "speculators": speculators(
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        config={"norm_before_residual": True, "architectures": ["Eagle3Speculator"]},
        theta=1e6,
        norm_before_residual=True,
    ),
    "speculators, normed recurrence": speculators({}, config={"norm_output": True}, normed_recurrence=True),
    "norm_output outside of speculators": Variant({**E3, "norm_output": True}, eagle3_tensors),
    "no norm_output outside of speculators": Variant({**E3, "norm_output": False}, eagle3_tensors, skipped=("norm.weight",)),
    "eagle3, a window in the first of two layers": Variant(
        {**E3, "num_hidden_layers": 2, **SLIDING_FIRST}, lambda: eagle3_tensors({**EAGLE3, "num_hidden_layers": 2}), window=4
    ),
    "speculators, qwen3 with a window": speculators({**QWEN3, "use_sliding_window": True, "sliding_window": 5}, qk_norm=True, window=5),
    "speculators, qwen3 whose window is off": speculators({**QWEN3, "use_sliding_window": False, "sliding_window": 5}, qk_norm=True),
    "speculators, half of each head rotates": speculators({"rope_parameters": {**PART, "rope_type": "linear", "factor": 1.0}}, rotated=0.5),
    "speculators, a part that its classes overlook": speculators({"rope_parameters": {**PART, "rope_type": "default"}}),
    "speculators, rotations by kind of layer": speculators({"rope_parameters": ROPES}, theta=500.0),
}
BOUNDARIES_OF = {"eagle3, default boundaries": [2, 4, 6], "eagle3, one boundary": [6]}


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: values for key, values in tensors.items() if key != name}


def renamed(tensors: Tensors, parts: Mapping[str, str]) -> Tensors:
    for old, new in parts.items():
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: values for name, values in tensors.items()}
    return tensors


class Reference:
    """The forward pass as it is written down, over all pairs at once."""

    def __init__(self, variant: Variant, tensors: Tensors, target: Tensors) -> None:
        names = {new: old for parts in (OLD_NAMES, HASS) for old, new in parts.items()}
        names |= {"midlayer.": "layers.0.", "model.": "", "enorm.": "embedding_layernorm.", "hnorm.": "hidden_states_layernorm."}
        self.weights = {name: values for name, values in renamed(tensors, names).items() if name not in variant.skipped}
        self.variant, self.target, self.is_eagle1 = variant, target, "layers.0.hidden_norm.weight" not in self.weights
        spec = {**variant.spec.get("transformer_layer_config", {}), **variant.spec.get("model", {}), **variant.spec}
        self.num_heads, self.eps, self.num_layers = spec["num_attention_heads"], spec["rms_norm_eps"], spec["num_hidden_layers"]

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """EAGLE-3: from the target's states to what the layer takes; only for true pairs."""
        weights = self.weights
        if "input_norm.weight" in weights:
            features = self.norm(features, "input_norm")
        if self.variant.chunk_norms:
            chunks = features.split(TARGET_HIDDEN, dim=-1)
            features = torch.cat([self.norm(chunk, f"fc_norm.{index}") for index, chunk in enumerate(chunks)], dim=-1)
        return features @ weights["fc.weight"].T if "fc.weight" in weights else features

    def run(
        self, token_ids: Sequence[int], inputs: torch.Tensor, positions: Sequence[int], visible: NDArray[np.bool_]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """inputs [T, H]: features, mixed already. Returns the inputs of the following pairs, and logits."""
        weights = self.weights
        e = weights.get("embed_tokens.weight", self.target["embedding"])[torch.tensor(token_ids)]
        mask, at = torch.from_numpy(visible), torch.tensor(positions)
        if self.is_eagle1:
            h = inputs
            if "embedding_layernorm.weight" in weights:
                e = self.norm(e, "embedding_layernorm")
            if "hidden_states_layernorm.weight" in weights:
                h = self.norm(h, "hidden_states_layernorm")
            h = torch.cat([e, h], dim=-1) @ weights["fc.weight"].T + weights.get("fc.bias", torch.zeros(()))
            attended = self.norm(h, "layers.0.input_layernorm") if "layers.0.input_layernorm.weight" in weights else h
        else:
            if "layers.0.input_layernorm.weight" in weights:
                e = self.norm(e, "layers.0.input_layernorm")
            normed = self.norm(inputs, "layers.0.hidden_norm")
            h = normed if self.variant.norm_before_residual else inputs
            attended = torch.cat([e, normed], dim=-1)
        for layer in range(self.num_layers):
            if layer > 0:
                attended = self.norm(h, f"layers.{layer}.input_layernorm")
            seen = mask & (at[:, None] - at < self.variant.window) if layer == 0 and self.variant.window else mask
            h = h + self.attention(layer, attended, at, seen)
            m = self.norm(h, f"layers.{layer}.post_attention_layernorm")
            gate, up = m @ self.matrix(layer, "mlp.gate_proj").T, m @ self.matrix(layer, "mlp.up_proj").T
            h = h + (F.silu(gate) * up) @ self.matrix(layer, "mlp.down_proj").T
        out = self.norm(h, "norm") if "norm.weight" in weights else h
        logits = out @ weights.get("lm_head.weight", self.target["lm_head"]).T
        return out if self.variant.normed_recurrence else h, logits

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weights[name + ".weight"]

    def matrix(self, layer: int, name: str) -> torch.Tensor:
        return self.weights[f"layers.{layer}.{name}.weight"]

    def attention(self, layer: int, x: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = []
        for part in ("q", "k", "v"):
            name = f"layers.{layer}.self_attn.{part}_proj"
            y = x @ self.weights[name + ".weight"].T + self.weights.get(name + ".bias", torch.zeros(()))
            size = self.matrix(layer, "self_attn.q_proj").shape[0] // self.num_heads
            y = y.reshape(len(x), -1, size)
            if f"layers.{layer}.self_attn.{part}_norm.weight" in self.weights:
                y = self.norm(y, f"layers.{layer}.self_attn.{part}_norm")
            heads.append(y if part == "v" else self.rotate(y, positions))
        q, k, v = heads
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
        probs = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("hts,shd->thd", probs, v).reshape(len(x), -1) @ self.matrix(layer, "self_attn.o_proj").T

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = int(x.shape[-1] * self.variant.rotated) // 2
        angles = positions[:, None, None] * self.variant.theta ** (-torch.arange(half) / half)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin(), rest], dim=-1)


def target_config(hidden_size: int = TARGET_HIDDEN) -> ModelConfig:
    return make_config(
        family="llama", vocab_size=VOCAB_SIZE, hidden_size=hidden_size, intermediate_size=64, num_layers=NUM_LAYERS, num_heads=4,
        num_kv_heads=2, head_size=8, norm_eps=1e-5, max_positions=512, rope=RopeConfig(theta=1e6), weight_type=WeightType.F32,
    )  # fmt: skip


def opened(files: HeadFiles, weights: Weights) -> RecurrentHead:
    checkpoint = open_eagle_checkpoint(files, read_eagle_config(files, target_config()), target_config())
    return open_eagle_head(checkpoint, target_config(), weights, num_threads=2, max_model_len=64)


def open_variant(variant: Variant, directory: Path) -> tuple[RecurrentHead, Reference]:
    random = np.random.default_rng(5)
    matrices = {name: random.normal(0, 0.3, (VOCAB_SIZE, TARGET_HIDDEN)).astype(np.float32) for name in ("embedding", "lm_head")}
    tensors = variant.tensors()
    files = HeadFiles.open(write_head(directory, variant.spec, tensors, container=variant.container))
    weights = Weights({f"{name}.weight": plain_tensor(values) for name, values in matrices.items()})
    head = opened(files, weights)
    head.runtime.allocate_kv(4)
    return head, Reference(variant, tensors, {name: torch.from_numpy(values) for name, values in matrices.items()})


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    skip_without_kernels(request.param)
    if request.param == "torch":
        monkeypatch.setattr(load_module, "kernels_path", lambda: None)
    return str(request.param)


def run_once(files: HeadFiles, count: int) -> tuple[RecurrentHead, Any]:
    """A head for a target with a plain embedding, and what it computes of a few true pairs."""
    matrix = plain_tensor(np.eye(VOCAB_SIZE, TARGET_HIDDEN, dtype=np.float32))
    head = opened(files, Weights({"embedding.weight": matrix, "lm_head.weight": matrix}))
    head.runtime.allocate_kv(4)
    features = np.random.default_rng(9).normal(0, 1, (count, head.config.feature_size)).astype(np.float32)
    return head, head.run_target_feature_pairs([true_rows(range(5, 5 + count), features, 0, count)], needs_logits=True)


def true_rows(token_ids: Sequence[int], features: NDArray[np.float32], first: int, last: int) -> TargetFeaturePairs:
    """Pairs [first, last) at slots one further on; slot 0 is never seen."""
    rows = RowRange(0, last - first, first + 1, TABLE, None, 1)
    return TargetFeaturePairs(np.array(token_ids[first:last], np.int32), features[first:last], rows)


@pytest.mark.spread(0.4)
@pytest.mark.parametrize("name", VARIANTS)
def test_eagle_head_outputs_equal_the_reference_formula(name: str, backend: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    head, reference = open_variant(variant, tmp_path)
    is_final = reference.is_eagle1 or variant.reads_final_states
    assert head.config.layer_boundaries == (() if is_final else tuple(BOUNDARIES_OF.get(name, BOUNDARIES)))
    random = np.random.default_rng(7)
    token_ids = random.integers(0, VOCAB_SIZE, NUM_PAIRS + 6).tolist()
    features = random.normal(0, 1, (NUM_PAIRS, head.config.feature_size)).astype(np.float32)

    # the true pairs, in three passes
    found = [
        head.run_target_feature_pairs([true_rows(token_ids, features, first, last)], needs_logits=True) for first, last in ((0, 4), (4, 5))
    ]
    outputs = head.run_target_feature_pairs([true_rows(token_ids, features, 5, NUM_PAIRS)], needs_logits=True)
    inputs = torch.from_numpy(features) if reference.is_eagle1 else reference.fused(torch.from_numpy(features))
    causal = np.tri(NUM_PAIRS, dtype=np.bool_)
    expected, logits = reference.run(token_ids[:NUM_PAIRS], inputs, range(NUM_PAIRS), causal)
    np.testing.assert_allclose(outputs.features, expected[5:], atol=1e-4)
    np.testing.assert_allclose(outputs.logits, logits[-1:], atol=1e-4)
    assert len(found) == 2

    # two recurrence steps: each drafted pair takes the output of the one before it
    drafted, last_feature = token_ids[NUM_PAIRS : NUM_PAIRS + 2], outputs.features[-1].copy()
    for depth in (1, 2):
        rows = RowRange(0, 1, NUM_PAIRS + depth, TABLE, None, 1)
        step = head.run_draft_feature_pairs(
            [DraftFeaturePairs([drafted[depth - 1]], last_feature[None], [NUM_PAIRS - 1 + depth], rows, [0])]
        )
        inputs = torch.cat([inputs, expected[-1:]])
        count = NUM_PAIRS + depth
        expected, logits = reference.run(token_ids[:count], inputs, range(count), np.tri(count, dtype=np.bool_))
        np.testing.assert_allclose(step.features, expected[-1:], atol=1e-4)
        np.testing.assert_allclose(step.logits, logits[-1:], atol=1e-4)
        last_feature = step.features[-1].copy()


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "eagle1, a window", "eagle3, a window in the first of two layers"])
def test_eagle_tree_rows_equal_the_chains_of_their_paths(name: str, backend: str, tmp_path: Path) -> None:
    """Nodes of a masked pass compute what they would at the end of a chain of their ancestors."""
    head, reference = open_variant(VARIANTS[name], tmp_path)
    random = np.random.default_rng(8)
    token_ids = random.integers(0, VOCAB_SIZE, NUM_PAIRS).tolist()
    features = random.normal(0, 1, (NUM_PAIRS, head.config.feature_size)).astype(np.float32)
    last = head.run_target_feature_pairs([true_rows(token_ids, features, 0, NUM_PAIRS)], needs_logits=True).features[-1].copy()
    parents, tokens, depths = [-1, -1, 0, 1, 2], [11, 12, 13, 14, 15], [1, 1, 2, 2, 3]
    mask = np.eye(5, dtype=np.bool_)
    inputs: list[NDArray[np.float32]] = []
    outputs: list[NDArray[np.float32]] = []
    for count in (2, 4, 5):  # the tree so far runs as a whole, level by level
        inputs = [last if parents[node] < 0 else outputs[parents[node]] for node in range(count)]
        for node in range(count):
            mask[node] |= mask[parents[node]] if parents[node] >= 0 else False
        rows = RowRange(0, count, NUM_PAIRS + 1, TABLE, mask[:count, :count].copy(), 1)
        positions = [NUM_PAIRS - 1 + depth for depth in depths[:count]]
        found = head.run_draft_feature_pairs([DraftFeaturePairs(tokens[:count], np.stack(inputs), positions, rows, range(count))])
        outputs = [row.copy() for row in found.features]
    true_inputs = torch.from_numpy(features) if reference.is_eagle1 else reference.fused(torch.from_numpy(features))
    for node in range(5):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        size = NUM_PAIRS + len(path)
        rows_in = torch.cat([true_inputs, torch.from_numpy(np.stack([inputs[step] for step in path]))])
        wanted, logits = reference.run([*token_ids, *(tokens[step] for step in path)], rows_in, range(size), np.tri(size, dtype=np.bool_))
        np.testing.assert_allclose(outputs[node], wanted[-1], atol=1e-4)
        np.testing.assert_allclose(found.logits[node], logits[-1], atol=1e-4)


PEAGLE = {
    "plain": {**E3, "num_hidden_layers": 2, "architectures": ["PEagleDraftModel"], "mask_token_id": 5},
    "vLLM's names": {**E3, "num_hidden_layers": 2, "parallel_drafting": True, "ptd_token_id": 5},
    "speculators": {
        **SPECULATORS, "speculators_model_type": "peagle", "mask_token_id": 5,
        "transformer_layer_config": {**LAYER_CONFIG, "num_hidden_layers": 2},
    },
    "a window": {
        **E3, "num_hidden_layers": 2, "mask_token_id": 5, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("form", PEAGLE)
def test_p_eagle_masked_rows_equal_the_reference_formula(form: str, is_normed: bool, backend: str, tmp_path: Path) -> None:
    """One pass over the last true pairs and the masked ones after them: positions continue, and each attends to all before it."""
    spec = {**PEAGLE[form], "fc_norm": is_normed}

    def tensors() -> Tensors:
        mask = torch.from_numpy(np.random.default_rng(6).normal(0, 1, (1, 1, 96)).astype(np.float32))
        layers = {**EAGLE3, "num_hidden_layers": 2}
        return eagle3_tensors(layers, has_own_embedding=True, fc_norm=is_normed, first_layer="layers.0.") | {"mask_hidden": mask}

    variant = Variant(spec, tensors, chunk_norms=is_normed, window=3 if form == "a window" else None)
    head, reference = open_variant(variant, tmp_path)
    random = np.random.default_rng(7)
    token_ids = random.integers(0, VOCAB_SIZE, NUM_PAIRS).tolist()
    features = random.normal(0, 1, (NUM_PAIRS, head.config.feature_size)).astype(np.float32)
    head.run_target_feature_pairs([true_rows(token_ids, features, 0, 6)], needs_logits=False)
    found = head.run_target_feature_pairs([true_rows(token_ids, features, 6, NUM_PAIRS)], needs_logits=True, num_masked=[4]).logits
    assert len(found) == 5
    count = NUM_PAIRS + 4
    seen = torch.cat([torch.from_numpy(features), reference.weights["mask_hidden"].reshape(1, -1).expand(4, -1)])
    _, logits = reference.run([*token_ids, 5, 5, 5, 5], reference.fused(seen), range(count), np.tri(count, dtype=np.bool_))
    np.testing.assert_allclose(found, logits[-5:], atol=1e-4)


def test_reordered_draft_vocabulary_of_an_eagle_head_keeps_its_logits(tmp_path: Path) -> None:
    """vLLM's `token_map` with an lm_head of its rows, or of all rows."""
    ids = np.random.default_rng(8).permutation(DRAFT_IDS)
    whole = own_matrix()["lm_head.weight"]
    logits = []
    for name, matrix in (("few", whole[ids]), ("all", whole)):
        more = {"lm_head.weight": matrix, "token_map": torch.from_numpy(ids)}
        spec = {**NESTED, "truncated_vocab_size": len(ids)}
        head, reference = open_variant(Variant(spec, lambda: eagle1_tensors(bias=False) | more), tmp_path / name)  # noqa: B023
        assert head.target_ids is not None
        assert head.target_ids.tolist() == DRAFT_IDS
        features = np.random.default_rng(9).normal(0, 1, (3, 32)).astype(np.float32)
        found = head.run_target_feature_pairs([true_rows([5, 6, 7], features, 0, 3)], needs_logits=True)
        logits.append(found.logits.copy())
        _, expected = reference.run([5, 6, 7], torch.from_numpy(features), range(3), np.tri(3, dtype=np.bool_))
        order = np.argsort(ids) if name == "few" else DRAFT_IDS
        np.testing.assert_allclose(logits[-1], expected[-1:, order], atol=1e-4)
    np.testing.assert_allclose(*logits, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_eagle_weights_in_16_bits_are_read_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    wide = VARIANTS["eagle3"].tensors()
    rounded = {name: values.to(dtype).float() if values.is_floating_point() else values for name, values in wide.items()}
    results = []
    for directory, tensors, stored in ((tmp_path / "narrow", wide, dtype), (tmp_path / "wide", rounded, torch.float32)):
        _, outputs = run_once(HeadFiles.open(write_head(directory, VARIANTS["eagle3"].spec, tensors, dtype=stored)), 3)
        results.append(outputs.features.copy())
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("has_own_embedding", [False, True])
@pytest.mark.parametrize(("matrix_type", "tolerance"), [("F32", 0.0), ("F16", 2e-3), ("Q8_0", 0.05), ("Q4_0", 0.4)])
def test_gguf_eagle_head_equals_the_safetensors_head(
    matrix_type: str, tolerance: float, tmp_path: Path, *, has_own_embedding: bool
) -> None:
    """Ids in place of offsets, interleaved rows and boundaries that begin with 1 included."""
    pytest.importorskip("gguf")
    spec = {**E3, "norm_before_residual": True, "intermediate_size": 64}
    tensors = eagle3_tensors(spec, has_own_embedding=has_own_embedding)
    path = write_gguf_head(tmp_path / "head.gguf", spec, tensors, boundaries=[1, 4, 6], matrix_type=matrix_type)
    files = open_gguf_eagle(path)
    assert files is not None
    results = []
    for source in (files, HeadFiles.open(write_head(tmp_path / "head", spec, tensors))):
        head, outputs = run_once(source, 5)
        assert head.target_ids is not None
        assert head.target_ids.tolist() == DRAFT_IDS
        results.append((outputs.features.copy(), outputs.logits.copy(), head.config.layer_boundaries))
    (found, found_logits, boundaries), (expected, expected_logits, _) = results
    assert boundaries == (1, 4, 6)
    np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max())
    np.testing.assert_allclose(found_logits, expected_logits, atol=tolerance * np.abs(expected_logits).max())
