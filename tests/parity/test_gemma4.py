"""Gemma 4 computes the logits transformers computes: layers of two sizes, shared keys and values, inputs of layers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoints import VOCAB_SIZE
from harness.gemma4_checkpoints import FULL, GEMMA4, SLIDING, write_gemma4
from harness.parity import (
    Reference,
    check_a_prompt,
    difference,
    make_reference,
    open_backend,
    prompt_logits,
    transformers_output,
)
from paceline.models.checkpoint import open_weights
from paceline.models.config import ModelConfig, WeightType, read_config
from paceline.models.layers import AttentionConfig, LayerConfig
from paceline.runtimes.base import assemble_pass
from paceline.runtimes.decoder import decoder

torch = pytest.importorskip("torch")

BOUND = 1e-4
BACKENDS = pytest.mark.parametrize("backend", ["torch", "native"])
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("gemma4_text", {}),
    "projected": ("gemma4_text", {"attention_k_eq_v": False, "hidden_size_per_layer_input": 0, "final_logit_softcapping": None}),
    "unified": ("gemma4_unified_text", {}),
    "default": ("gemma4_text", {"layer_types": None, "rope_parameters": None, "num_kv_shared_layers": 0, "attention_bias": True}),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    known: dict[str, Reference] = {}

    def reference(name: str) -> Reference:
        if name not in known:
            family, changes = CASES[name]
            known[name] = make_reference(write_gemma4(tmp_path_factory.mktemp(name), family, **changes))
        return known[name]

    return reference


@pytest.mark.spread(0.4)
@BACKENDS
@pytest.mark.parametrize("case", CASES)
def test_gemma4_prompt_logits_equal_transformers_whole_and_in_chunks(
    references: Callable[[str], Reference], case: str, backend: str
) -> None:
    reference = references(case)
    bound = max(BOUND, reference.rounding)
    check_a_prompt(reference, backend, bound=bound)
    runtime = open_backend(reference.directory, backend)
    cache = runtime.new_cache(32)
    plan = cache.reserve(cache.new_sequence(), range(-1, len(reference.token_ids) - 1))
    output = runtime.forward(*assemble_pass([plan], [reference.token_ids], [[0]]))
    assert difference(output.hidden_states, reference.hidden_states[-1]) <= 20 * bound


def with_layers(config: ModelConfig, change: Callable[[LayerConfig], LayerConfig]) -> ModelConfig:
    return replace(config, layers=tuple(map(change, config.layers)))


def with_mixer(**changes: Any) -> Callable[[LayerConfig], LayerConfig]:
    return lambda layer: replace(layer, mixer=replace(layer.mixer, **changes))


def rotated_alike(mixer: AttentionConfig) -> dict[str, Any]:
    """The part that turns is contiguous, as in other families."""
    return {} if mixer.window else {"rope": replace(mixer.rope, rotated_fraction=1.0)}


@pytest.mark.parametrize(
    ("case", "change"),
    {
        "window": ("all", lambda config: with_layers(config, lambda layer: with_mixer(window=layer.mixer.window and 17)(layer))),
        "scale": ("all", lambda config: with_layers(config, with_mixer(scale=0.25))),
        "value norm": ("all", lambda config: with_layers(config, with_mixer(has_value_norm=False))),
        "rope": ("all", lambda config: with_layers(config, lambda layer: with_mixer(**rotated_alike(layer.mixer))(layer))),
        "layer inputs": ("all", lambda config: with_layers(config, lambda layer: replace(layer, per_layer_input=None))),
        "layer scalar": ("all", lambda config: with_layers(config, lambda layer: replace(layer, has_output_scale=False))),
        "other owner": ("all", lambda config: with_layers(config, lambda layer: with_mixer(kv_layer=_earlier(layer))(layer))),
        "soft cap": ("all", lambda config: replace(config, logit_soft_cap=None)),
        "embedding scale": ("all", lambda config: replace(config, embedding_scale=1.0)),
        "unified's rope": ("unified", lambda config: with_layers(config, lambda layer: with_mixer(**rotated_alike(layer.mixer))(layer))),
    }.values(),
)  # fmt: skip
def test_gemma4_logits_change_if_a_part_is_left_out(
    references: Callable[[str], Reference], case: str, change: Callable[[ModelConfig], ModelConfig]
) -> None:
    """What the parity above can see."""
    from paceline.runtimes.torch.network import TorchNetwork

    reference = references(case)
    config = read_config(reference.directory)
    changed = change(config)
    assert changed != config
    weights = open_weights(reference.directory, config)
    found = prompt_logits(TorchNetwork(decoder(changed), changed, weights), reference.token_ids)
    assert np.abs(found - reference.logits).max() > 0.1


def _earlier(layer: LayerConfig) -> int | None:
    """The owner of the same kind in front of the right one."""
    return None if layer.mixer.kv_layer is None else layer.mixer.kv_layer - 2


@BACKENDS
def test_gemma4_bfloat16_logits_are_as_near_as_those_of_transformers(tmp_path: Path, backend: str, seed: int) -> None:
    directory = write_gemma4(tmp_path, dtype="bfloat16", seed=seed)
    token_ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, 60).tolist()
    exact, narrow = (transformers_output(directory, token_ids, dtype)[0] for dtype in ("float32", "bfloat16"))
    found = prompt_logits(open_backend(directory, backend, weight_type=WeightType.BF16), token_ids)
    assert np.abs(found - exact).mean() <= 1.2 * np.abs(narrow - exact).mean() <= 0.2


@BACKENDS
@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_gemma4_text_model_stored_with_encoders_has_equal_logits(
    references: Callable[[str], Reference], tmp_path: Path, kind: str, backend: str
) -> None:
    """Published files name the sizes of all global layers at once; transformers writes them for each layer."""
    from safetensors.torch import load_file, save_file

    plain = references("all" if kind == "gemma4" else "unified")
    tensors = {
        name.replace("model.", "model.language_model.", 1): one for name, one in load_file(plain.directory / "model.safetensors").items()
    }
    for part in ("vision_tower.patches", "embed_vision.embedding_projection", "audio_tower.layers.0", "embed_audio.a", "vision_embedder.b"):
        tensors[f"model.{part}.weight"] = torch.ones(2, 2)
    if kind == "gemma4":  # published checkpoints may hold what their last layers do not use
        tensors["model.language_model.layers.7.self_attn.k_proj.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((plain.directory / "config.json").read_text(encoding="utf-8"))
    del text["per_layer_config"], text["architectures"]
    text |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    values = {
        "model_type": kind,
        "architectures": ["AnyForConditionalGeneration"],
        "text_config": text,
        "vision_config": {},
        "audio_config": None,
    }
    (tmp_path / "config.json").write_text(json.dumps({**values, "dtype": "float32", "eos_token_id": [0, 5]}), encoding="utf-8")
    generation = {"suppress_tokens": [7, 9], "eos_token_id": [0, 6]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    config = read_config(tmp_path)
    assert config.eos_token_ids == (0, 6, 5)
    assert config.suppressed_token_ids == (7, 9)
    assert config.layers == read_config(plain.directory).layers
    found, expected = (prompt_logits(open_backend(directory, backend), plain.token_ids) for directory in (tmp_path, plain.directory))
    assert np.array_equal(found, expected)


def test_gemma4_layer_numbers_may_be_padded_with_zeros(references: Callable[[str], Reference], tmp_path: Path) -> None:
    """transformers saves "05" in models of more than ten layers."""
    path = references("all").directory / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    padded = {f"0{layer}": own for layer, own in values["per_layer_config"].items()}
    (tmp_path / "config.json").write_text(json.dumps({**values, "per_layer_config": padded}), encoding="utf-8")
    assert read_config(tmp_path).layers == read_config(path.parent).layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "has no 'num_experts'"),
        ({"sliding_window": 0}, "sliding_window = 0, expected"),
        ({"sliding_window": None}, "sliding_window"),
        ({"layer_types": [SLIDING, "chunked_attention"] * 4}, "layer_types = .*chunked_attention"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers = 7: no full_attention layer before them"),
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers = 8, expected fewer than num_hidden_layers = 8"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers = -1"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"vocab_size_per_layer_input": 50}, "vocab_size_per_layer_input = 50 is below vocab_size = 97"),
        ({"rope_parameters": {FULL: GEMMA4["rope_parameters"][FULL]}}, "rope_parameters = .*sliding_attention"),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config gives full_attention layers different sizes"),
        ({"per_layer_config": {"0": {"intermediate_size": 32}}}, "per_layer_config of layer 0"),
        ({"per_layer_config": [1]}, "per_layer_config"),
        ({"per_layer_config": None, "num_global_key_value_heads": 3}, "4 query heads over 3 key heads"),
    ],
)
def test_unsupported_gemma4_config_is_refused_by_the_name_of_its_field(
    references: Callable[[str], Reference], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    from paceline import CheckpointError

    values = json.loads((references("all").directory / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message) as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)
