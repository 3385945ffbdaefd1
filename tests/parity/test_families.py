"""Each family of dense transformers computes the logits transformers computes, on tiny random checkpoints.

Bounds on max |Δlogit| in float32 (the logits have a standard deviation of about 1.3) are in `BOUNDS`; a pass of one row uses
other kernels than transformers' whole prompt, hence three times that. A case whose scores are made large on purpose amplifies rounding:
there transformers' own distance from float64 is the bound, where it is larger.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoints import MINISTRAL3, MUSE_GLIMMER, OLMO3_ROPE, VOCAB_SIZE, write_checkpoint
from harness.model_configs import map_attention
from harness.mtp_checkpoints import add_module, random_module, write_mimo
from harness.parity import (
    BOUNDS,
    PROMPT_LEN,
    Reference,
    check_a_prompt,
    difference,
    make_reference,
    open_backend,
    prompt_logits,
    torch_logits,
    transformers_output,
)
from paceline.models.config import WeightType, read_config
from paceline.models.layers import AttentionGate, QKNorm
from paceline.runtimes.base import Numerics, assemble_pass
from paceline.runtimes.load import RuntimeOptions, load_runtime

torch = pytest.importorskip("torch")
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * index for index in range(6)],
    "long_factor": [1.5 + 0.7 * index for index in range(6)],
    "partial_rotary_factor": 0.75,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}
LOCAL_AND_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
}
GEMMA = {"query_pre_attn_scalar": 24, "tie_word_embeddings": True}
GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22, "logits_scaling": 1.5}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
LARGE_SCORES = {**GEMMA, "query_pre_attn_scalar": 4, "query_key_scale": 1.7}


@dataclass(frozen=True)
class Case:
    """A checkpoint and the context a runtime is opened for."""

    family: str
    overrides: dict[str, Any]
    max_model_len: int | None = None
    backends: tuple[str, ...] = tuple(BOUNDS)


CASES = {
    "llama": Case("llama", {}),
    "llama-biased-tied": Case("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": Case("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-llama3": Case("llama", {"rope_parameters": LLAMA3}),
    "mistral": Case("mistral", {"head_dim": 32}),
    "qwen2-tied": Case("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": Case("qwen2", {"rope_parameters": {**YARN, "rope_theta": 1e6}}),
    "qwen3": Case("qwen3", {}),
    "qwen3-biased-tied": Case("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "phi3": Case("phi3", {}),
    "phi3-partial": Case("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "phi3-short": Case("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 400, "tie_word_embeddings": True}),
    "phi3-long": Case("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}, max_model_len=PROMPT_LEN),
    "llama-dynamic-short": Case("llama", DYNAMIC),
    "llama-dynamic-long": Case("llama", {**DYNAMIC, "max_position_embeddings": 128}, max_model_len=PROMPT_LEN),
    "gemma2": Case("gemma2", LARGE_SCORES, backends=("torch", "native")),
    "gemma2-untied-biased": Case(
        "gemma2",
        {**GEMMA, "tie_word_embeddings": False, "attention_bias": True, "final_logit_softcapping": 2.0},
        backends=("torch", "native"),
    ),
    "gemma3": Case("gemma3_text", {**GEMMA, "num_hidden_layers": 6}),
    "gemma3-ropes": Case(
        "gemma3_text",
        {
            **GEMMA,
            "rope_parameters": LOCAL_AND_GLOBAL,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 3.0,
        },
    ),
    "olmo2": Case("olmo2", {"num_key_value_heads": 2}),
    "olmo2-tied-biased": Case("olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
    "granite": Case("granite", GRANITE),
    "seed_oss": Case("seed_oss", {}),
    "glm4": Case("glm4", {}),
    "ministral3": Case("ministral3", MINISTRAL3),
    "glm4-yarn": Case("glm4", {"rope_parameters": YARN, "attention_bias": False, "tie_word_embeddings": True}),
    "smollm3": Case("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "smollm3-listed": Case("smollm3", {"no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True}),
    "smollm3-unturned": Case("smollm3", {"no_rope_layers": [0, 0, 0]}),
    "seed_oss-biased-tied": Case("seed_oss", {"attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granite-tied-biased": Case("granite", {**GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "olmo3": Case("olmo3", {"num_hidden_layers": 5, "rope_parameters": OLMO3_ROPE, "num_key_value_heads": 2}),
    "exaone4": Case("exaone4", {"num_hidden_layers": 5, "sliding_window": None, "layer_types": ["full_attention"] * 5}),
    "ernie4_5": Case("ernie4_5", {"use_bias": True}),
    "hunyuan": Case("hunyuan_v1_dense", {"rope_parameters": {**DYNAMIC["rope_parameters"], "alpha": 20.0}, "attention_bias": True}),
    "apertus": Case("apertus", {"rope_parameters": LLAMA3, "attention_bias": True}),
    "arcee": Case("arcee", {"num_key_value_heads": 4}),
    "arcee-yarn": Case("arcee", {"rope_parameters": dict(YARN), "attention_bias": True, "tie_word_embeddings": True}),
    "cohere": Case("cohere", {"logit_scale": 0.4, "attention_bias": True}),
    "starcoder2": Case("starcoder2", {}),
    "stablelm": Case("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": Case("stablelm", {"use_parallel_residual": True, "tie_word_embeddings": True}),
    "phi": Case("phi", {"layer_norm_eps": 0.1}),
    # windows that a prompt crosses many times
    "mistral-window": Case("mistral", {"sliding_window": 16}),
    "phi3-window": Case("phi3", {"sliding_window": 16}),
    "qwen2-window": Case("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3-window": Case("qwen3", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}),
    "smollm3-window": Case("smollm3", {"num_hidden_layers": 5, "sliding_window": 16, "use_sliding_window": True}),
    "ministral3-window": Case("ministral3", {**MINISTRAL3, "sliding_window": 16}),
    "cohere2-window": Case("cohere2", {"num_hidden_layers": 5, "sliding_window": 16, "logit_scale": 0.4}),
    "starcoder2-window": Case("starcoder2", {"sliding_window": 16, "use_bias": False, "tie_word_embeddings": False}),
    "granite_swa-window": Case(
        "granite_swa",
        {**GRANITE, "num_hidden_layers": 5, "sliding_window": 16, "layer_rope_theta": [1e4, 1e4, 0, 500.0, 0], "attention_bias": True},
    ),
    "olmo3-window": Case("olmo3", {"num_hidden_layers": 5, "sliding_window": 16, "rope_parameters": OLMO3_ROPE}),
    "exaone4-window": Case("exaone4", {"num_hidden_layers": 5, "sliding_window": 16}),
    "muse_glimmer-window": Case("muse_glimmer_text", MUSE_GLIMMER),
    "gemma2-window": Case("gemma2", {**LARGE_SCORES, "sliding_window": 16}),
    "gemma3-window": Case(
        "gemma3_text", {**GEMMA, "num_hidden_layers": 6, "sliding_window": 16, "rope_parameters": LOCAL_AND_GLOBAL, "query_key_scale": 2.0}
    ),
}
WINDOWS = [name for name in CASES if name.endswith("-window")]
BY_CASE_AND_BACKEND = pytest.mark.parametrize(
    ("case", "backend"), [(name, backend) for name, case in CASES.items() for backend in case.backends]
)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    known: dict[str, Reference] = {}

    def reference(name: str) -> Reference:
        if name not in known:
            directory = write_checkpoint(tmp_path_factory.mktemp(name), CASES[name].family, **CASES[name].overrides)
            known[name] = make_reference(directory)
        return known[name]

    return reference


@pytest.mark.spread(0.25)
@BY_CASE_AND_BACKEND
def test_family_prompt_logits_equal_transformers_whole_and_in_chunks(
    references: Callable[[str], Reference], case: str, backend: str
) -> None:
    check_a_prompt(references(case), backend, max_model_len=CASES[case].max_model_len)


@pytest.mark.spread(0.25)
@BY_CASE_AND_BACKEND
def test_embeddings_and_hidden_states_equal_those_of_transformers(references: Callable[[str], Reference], case: str, backend: str) -> None:
    reference = references(case)
    runtime = open_backend(reference.directory, backend, max_model_len=CASES[case].max_model_len, collect_layers=(0, 2))
    embedded = runtime.embed(np.array(reference.token_ids, np.int32))
    if runtime.config.has_embedding_norm:  # drafters that read the target's embeddings take them without the norm
        normed = embedded / np.sqrt(np.square(embedded).mean(-1, keepdims=True) + np.float32(runtime.config.norm_eps))
        assert difference(normed, reference.hidden_states[0]) <= 1e-6
        assert difference(embedded, reference.hidden_states[0]) > 1.0
    else:
        assert difference(embedded, reference.hidden_states[0]) == 0.0
    cache = runtime.new_cache(64)
    plan = cache.reserve(cache.new_sequence(), range(-1, PROMPT_LEN - 1))
    output = runtime.forward(*assemble_pass([plan], [reference.token_ids], [[0]]))
    bound = 100 * BOUNDS[backend]  # the residual stream is that much larger than the logits
    assert difference(output.hidden_states, reference.hidden_states[-1]) <= bound
    for found, layer in zip(output.collected_hidden_states, (0, 2), strict=True):
        assert difference(found, reference.hidden_states[layer]) <= bound


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("gemma2", {"soft_cap": None}),
        ("gemma2-untied-biased", {"logit_soft_cap": None}),
        ("gemma3-ropes", {"rope": None}),
        ("gemma3-ropes", {"embedding_scale": 1.0}),
        ("gemma3", {"scale": 0.25}),
        ("phi3-partial", {"rope": None}),
        ("phi3-long", {"rope": None}),
        ("llama-dynamic-long", {"rope": None}),
        ("glm4", {"rope": None}),
        ("glm4-yarn", {"rope": None}),
        ("ministral3", {"temperature": 0.0}),
        ("apertus", {"has_rope_embedding": False}),
        ("apertus", {"qk_norm": QKNorm.NONE}),
        ("granite_swa-window", {"has_rope_embedding": True}),
        ("granite_swa-window", {"has_rope_embedding": False}),
        ("granite_swa-window", {"has_sinks": False}),
        ("granite_swa-window", {"residual_scale": 1.0}),
        ("granite_swa-window", {"rope": None}),
        *(
            ("muse_glimmer-window", changes)
            for changes in (
                *({"qk_norm": QKNorm.NONE}, {"scale": 0.25}, {"gate": AttentionGate.NONE}, {"has_embedding_norm": False}),
                *({"has_rope_embedding": True}, {"has_rope_embedding": False}, {"output_norm_eps": None}, {"norm_eps": 1e-5}),
                *({"logit_scale": 1.0}, {"logit_soft_cap": None}),
            )
        ),
        ("hunyuan", {"rope": None}),
        ("hunyuan", {"qk_norm": QKNorm.HEAD}),
        *((name, {"has_layer_norm": False}) for name in ("starcoder2", "stablelm", "phi")),
        ("cohere", {"logit_scale": 1.0}),
        ("cohere2-window", {"has_rope_embedding": True}),
        ("cohere2-window", {"has_rope_embedding": False}),
        *((name, {"rope": None}) for name in ("stablelm", "phi")),
        ("phi", {"norm_eps": 1e-5}),
        ("granite", {"embedding_scale": 1.0}),
        ("granite", {"scale": 0.25}),
        ("granite", {"residual_scale": 1.0}),
        ("granite", {"logit_scale": 1.0}),
        ("smollm3", {"has_rope_embedding": True}),
        ("smollm3-listed", {"has_rope_embedding": True}),
        ("smollm3-listed", {"has_rope_embedding": False}),
        *((name, {"window": window}) for name in WINDOWS for window in (None, 15, 17)),
    ],
)
def test_family_logits_change_if_a_part_is_left_out(references: Callable[[str], Reference], case: str, changes: dict[str, Any]) -> None:
    """Sensitivity of the parity tests above: without the soft cap, for example, they would fail by far more than the bound."""
    reference = references(case)
    config = read_config(reference.directory).for_context(CASES[case].max_model_len)
    if "rope" in changes:
        rope = config.layers[-1].mixer.rope
        changes = {"rope": replace(rope, theta=1e4, rotated_fraction=1.0, context_len=0, long_factors=(), short_factors=(1.0,) * 8)}
    if "temperature" in changes:
        changes = {"rope": replace(config.attention.rope, **changes)}
    if changes.keys() <= {"residual_scale", "has_layer_norm", "output_norm_eps"}:
        changes = {"layers": tuple(replace(layer, **changes) for layer in config.layers)}
    is_of_whole = changes.keys() <= {"logit_soft_cap", "logit_scale", "embedding_scale", "has_embedding_norm", "norm_eps", "layers"}
    if "window" in changes:
        changed = config.map_attention(lambda attention: replace(attention, window=attention.window and changes["window"]))
    else:
        changed = replace(config, **changes) if is_of_whole else map_attention(config, **changes)
    assert difference(torch_logits(config, reference), reference.logits) <= reference.allowed("torch")
    assert difference(torch_logits(changed, reference), reference.logits) > 0.1


@pytest.mark.parametrize("has_kernels", [True, False])
def test_gemma2_soft_cap_is_applied_with_and_without_kernels(
    references: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch, *, has_kernels: bool
) -> None:
    reference = references("gemma2")
    if not has_kernels:
        monkeypatch.setattr("paceline.runtimes.load.kernels_path", lambda: None)
    loaded = load_runtime(reference.directory, RuntimeOptions(numerics=Numerics.FAST, device="cpu"))
    if not has_kernels:
        assert sum("using torch" in notice for notice in loaded.notices) == 1
    assert difference(prompt_logits(loaded.runtime, reference.token_ids), reference.logits) <= reference.allowed("native")


@pytest.mark.parametrize(
    ("case", "backend", "bound"),
    [
        *((case, "torch", 1e-3) for case in ("llama", "qwen3", "phi3-short", "gemma3", "glm4", "ministral3")),
        *((case, "native", 0.3) for case in ("llama", "qwen3", "phi3-short", "gemma3", "glm4", "ministral3")),
        ("granite", "torch", 0.05),
        ("granite", "native", 0.3),
        ("gemma2", "torch", 0.1),  # not native: with scores this large transformers' own bfloat16 scores are off by 0.25
    ],
)
def test_bfloat16_family_logits_are_within_their_bound_of_transformers(
    tmp_path: Path, case: str, backend: str, bound: float, seed: int
) -> None:
    """Gemma-2's is wider on torch because transformers caps logits in bfloat16, we in float32."""
    directory = write_checkpoint(tmp_path, CASES[case].family, dtype="bfloat16", seed=seed, **CASES[case].overrides)
    token_ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, 60).tolist()
    runtime = open_backend(directory, backend, weight_type=WeightType.BF16)
    expected, hidden_states = transformers_output(directory, token_ids, "bfloat16")
    assert difference(runtime.embed(np.array(token_ids, np.int32)), hidden_states[0]) == 0.0
    assert difference(prompt_logits(runtime, token_ids), expected) <= bound


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("nesting", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize(("case", "kind"), [("gemma3", "gemma3"), ("ministral3", "mistral3")])
def test_text_model_stored_with_an_image_encoder_has_equal_logits(
    references: Callable[[str], Reference], tmp_path: Path, case: str, kind: str, nesting: str, backend: str
) -> None:
    from safetensors.torch import load_file, save_file

    plain = references(case)
    tensors = load_file(plain.directory / "model.safetensors")
    nested = {name.replace("model.", nesting, 1): tensor for name, tensor in tensors.items()}
    image_prefix = "model." if nesting.startswith("model.") else ""
    nested |= {f"{image_prefix}{part}.weight": torch.ones(2, 2) for part in ("vision_tower.patches", "multi_modal_projector.matrix")}
    save_file(nested, tmp_path / "model.safetensors")
    text = json.loads((plain.directory / "config.json").read_text(encoding="utf-8"))
    architecture = f"{kind.capitalize()}ForConditionalGeneration"
    values = {"model_type": kind, "architectures": [architecture], "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps({**values, "dtype": "float32", "eos_token_id": [0, 5]}), encoding="utf-8")
    assert read_config(tmp_path).eos_token_ids == (0, 5)
    notices = [load_runtime(one, RuntimeOptions(device="cpu", backend="torch")).notices for one in (tmp_path, plain.directory)]
    assert [sum("encoders are not loaded" in notice for notice in own) for own in notices] == [1, 0]
    found, expected = (prompt_logits(open_backend(directory, backend), plain.token_ids) for directory in (tmp_path, plain.directory))
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("backend", list(BOUNDS))
def test_mimo_has_the_logits_of_qwen2(tmp_path: Path, backend: str) -> None:
    """transformers has no class of its own for it: the model's own code derives from qwen2's and adds a module for drafting."""
    qwen2 = write_checkpoint(tmp_path / "qwen2", "qwen2")
    mimo = write_mimo(tmp_path / "mimo")
    add_module(mimo, "mtp_layers", random_module(family="mimo"), num_layers=3)
    token_ids = np.random.default_rng(2).integers(0, VOCAB_SIZE, 60).tolist()
    expected, _ = transformers_output(qwen2, token_ids)
    assert difference(prompt_logits(open_backend(mimo, backend), token_ids), expected) <= BOUNDS[backend]
