"""Each family of dense transformers computes the logits transformers computes, on tiny random checkpoints.

Bounds on max |Δlogit| in float32 (the logits have a standard deviation of about 1.3) are in `BOUNDS`; a pass of one row uses
other kernels than transformers' whole prompt, hence three times that. A case whose scores are made large on purpose amplifies rounding:
there transformers' own distance from float64 is the bound, where it is larger.
"""

from pathlib import Path

import numpy as np
import pytest

from harness.checkpoint_files import read_tensors, read_values, write_tensors, write_values
from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.dense_checkpoints import CASES, MAX_MODEL_LEN
from harness.model_changes import Change, change_layers, change_mixers, change_model, change_rope, change_window
from harness.mtp_checkpoints import add_module, random_module, write_mimo
from harness.parity import (
    BOUNDS,
    PROMPT_LEN,
    References,
    check_a_prompt,
    check_change_matters,
    difference,
    open_backend,
    prompt_logits,
    transformers_output,
)
from paceline.models.config import WeightType, read_config
from paceline.models.layers import AttentionGate, QKNorm
from paceline.runtimes.base import Numerics, assemble_pass
from paceline.runtimes.load import RuntimeOptions, load_network

pytest.importorskip("torch")
WINDOWS = [name for name in CASES if name.endswith("-window")]
BY_CASE_AND_BACKEND = pytest.mark.parametrize(("case", "backend"), [(case, backend) for case in CASES for backend in BOUNDS])


@pytest.mark.spread(0.25)
@BY_CASE_AND_BACKEND
def test_family_prompt_logits_equal_transformers_whole_and_in_chunks(references: References, case: str, backend: str) -> None:
    check_a_prompt(references(case), backend, max_model_len=MAX_MODEL_LEN.get(case))


@pytest.mark.spread(0.25)
@BY_CASE_AND_BACKEND
def test_embeddings_and_hidden_states_equal_those_of_transformers(references: References, case: str, backend: str) -> None:
    reference = references(case)
    runtime = open_backend(reference.directory, backend, max_model_len=MAX_MODEL_LEN.get(case), collect_layers=(0, 2))
    embedded = runtime.embed(np.array(reference.token_ids, np.int32))
    if runtime.config.has_embedding_norm:  # drafters that read the target's embeddings take them without the norm
        normed = embedded / np.sqrt(np.square(embedded).mean(-1, keepdims=True) + np.float32(runtime.config.norm_eps))
        assert difference(normed, reference.hidden_states[0]) <= 1e-6
        assert difference(embedded, reference.hidden_states[0]) > 1.0
    else:
        assert difference(embedded, reference.hidden_states[0]) == 0.0
    cache = runtime.new_cache(64)
    plan = cache.reserve_rows(cache.new_sequence(), range(-1, PROMPT_LEN - 1))
    output = runtime.forward(*assemble_pass([plan], [reference.token_ids], [[0]]))
    bound = 100 * BOUNDS[backend]  # the residual stream is that much larger than the logits
    assert difference(output.hidden_states, reference.hidden_states[-1]) <= bound
    for found, layer in zip(output.collected_hidden_states, (0, 2), strict=True):
        assert difference(found, reference.hidden_states[layer]) <= bound


PLAIN_ROPE = change_rope(theta=1e4, rotated_fraction=1.0, scaled_context_len=0, long_factors=(), short_factors=(1.0,) * 8)
CHANGES: list[tuple[str, Change]] = [
    ("gemma2", change_mixers(soft_cap=None)),
    ("gemma2-untied-biased", change_model(logit_soft_cap=None)),
    ("gemma3-ropes", PLAIN_ROPE),
    ("gemma3-ropes", change_model(embedding_scale=1.0)),
    ("gemma3", change_mixers(scale=0.25)),
    *(
        (name, PLAIN_ROPE)
        for name in ("phi3-partial", "phi3-long", "llama-dynamic-long", "glm4", "glm4-yarn", "hunyuan", "stablelm", "phi")
    ),
    ("ministral3", change_rope(attention_temperature_scale=0.0)),
    ("apertus", change_mixers(has_rope_embedding=False)),
    ("apertus", change_mixers(qk_norm=QKNorm.NONE)),
    ("granite_swa-window", change_mixers(has_rope_embedding=True)),
    ("granite_swa-window", change_mixers(has_rope_embedding=False)),
    ("granite_swa-window", change_mixers(has_sinks=False)),
    ("granite_swa-window", change_layers(residual_scale=1.0)),
    ("granite_swa-window", PLAIN_ROPE),
    ("muse_glimmer-window", change_mixers(qk_norm=QKNorm.NONE)),
    ("muse_glimmer-window", change_mixers(scale=0.25)),
    ("muse_glimmer-window", change_mixers(gate=AttentionGate.NONE)),
    ("muse_glimmer-window", change_model(has_embedding_norm=False)),
    ("muse_glimmer-window", change_mixers(has_rope_embedding=True)),
    ("muse_glimmer-window", change_mixers(has_rope_embedding=False)),
    ("muse_glimmer-window", change_layers(output_norm_eps=None)),
    ("muse_glimmer-window", change_model(norm_eps=1e-5)),
    ("muse_glimmer-window", change_model(logit_scale=1.0)),
    ("muse_glimmer-window", change_model(logit_soft_cap=None)),
    ("hunyuan", change_mixers(qk_norm=QKNorm.HEAD)),
    *((name, change_layers(has_layer_norm=False)) for name in ("starcoder2", "stablelm", "phi")),
    ("cohere", change_model(logit_scale=1.0)),
    ("cohere2-window", change_mixers(has_rope_embedding=True)),
    ("cohere2-window", change_mixers(has_rope_embedding=False)),
    ("phi", change_model(norm_eps=1e-5)),
    ("granite", change_model(embedding_scale=1.0)),
    ("granite", change_mixers(scale=0.25)),
    ("granite", change_layers(residual_scale=1.0)),
    ("granite", change_model(logit_scale=1.0)),
    ("smollm3", change_mixers(has_rope_embedding=True)),
    ("smollm3-listed", change_mixers(has_rope_embedding=True)),
    ("smollm3-listed", change_mixers(has_rope_embedding=False)),
    *((name, change_window(size)) for name in WINDOWS for size in (None, 15, 17)),
]


@pytest.mark.parametrize(("case", "change"), CHANGES, ids=[f"{number}-{case}" for number, (case, _) in enumerate(CHANGES)])
def test_family_logits_change_if_a_setting_is_changed(references: References, case: str, change: Change) -> None:
    check_change_matters(references(case), change, MAX_MODEL_LEN.get(case))


@pytest.mark.parametrize("has_kernels", [True, False])
def test_gemma2_soft_cap_is_applied_with_and_without_kernels(
    references: References, monkeypatch: pytest.MonkeyPatch, *, has_kernels: bool
) -> None:
    reference = references("gemma2")
    if not has_kernels:
        monkeypatch.setattr("paceline.runtimes.load.kernels_path", lambda: None)
    loaded = load_network(reference.directory, RuntimeOptions(numerics=Numerics.FAST, device="cpu"))
    if not has_kernels:
        assert sum("using torch" in notice for notice in loaded.notices) == 1
    assert difference(prompt_logits(loaded.network, reference.token_ids), reference.logits) <= reference.allowed("native")


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
    family, values = CASES[case]
    directory = write_checkpoint(tmp_path, family, dtype="bfloat16", seed=seed, **values)
    token_ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, 60).tolist()
    runtime = open_backend(directory, backend, weight_type=WeightType.BF16)
    expected, hidden_states = transformers_output(directory, token_ids, "bfloat16")
    assert difference(runtime.embed(np.array(token_ids, np.int32)), hidden_states[0]) == 0.0
    assert difference(prompt_logits(runtime, token_ids), expected) <= bound


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("nesting", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize(("case", "kind"), [("gemma3", "gemma3"), ("ministral3", "mistral3")])
def test_text_model_stored_with_an_image_encoder_has_equal_logits(
    references: References, tmp_path: Path, case: str, kind: str, nesting: str, backend: str
) -> None:
    plain, ones = references(case), np.ones((2, 2), np.float32)
    nested = {name.replace("model.", nesting, 1): tensor for name, tensor in read_tensors(plain.directory).items()}
    image_prefix = "model." if nesting.startswith("model.") else ""
    nested |= {f"{image_prefix}{part}.weight": ones for part in ("vision_tower.patches", "multi_modal_projector.matrix")}
    write_tensors(tmp_path, nested)
    architecture = f"{kind.capitalize()}ForConditionalGeneration"
    values = {"model_type": kind, "architectures": [architecture], "text_config": read_values(plain.directory), "vision_config": {}}
    write_values(tmp_path, {**values, "dtype": "float32", "eos_token_id": [0, 5]})
    assert read_config(tmp_path).eos_token_ids == (0, 5)
    notices = [load_network(one, RuntimeOptions(device="cpu", backend="torch")).notices for one in (tmp_path, plain.directory)]
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
