"""The language model inside a model of texts and images gives, for texts, the logits of the whole in transformers."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoint_files import read_values, write_values
from harness.checkpoints import MINISTRAL3, VOCAB_SIZE, write_tokenizer
from harness.parity import difference, open_backend, prompt_logits
from paceline.errors import CheckpointError
from paceline.models.checkpoint import open_weights
from paceline.models.config import read_config
from paceline.models.multimodal import MULTIMODAL_MODELS, text_model_fields
from paceline.runtimes.load import RuntimeOptions, load_network

torch = pytest.importorskip("torch")
BOUND = 1e-4
Whole = Callable[[str], tuple[Path, list[int]]]
PROMPT_LEN = 60
TEXT = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.15, "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_heads": 2, "depth": 1,
    "embed_dim": 32,
    "image_size": 16, "patch_size": 8, "out_hidden_size": 64, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0],
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 3, 3]}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("qwen2_vl_text", MROPE, {**VISION, "hidden_size": 64}),
    "qwen2_5_vl": ("qwen2_5_vl_text", MROPE, VISION),
    "qwen3_vl": ("qwen3_vl_text", MROPE, VISION),
    "llava": ("llama", {}, {**VISION, "model_type": "clip_vision_model"}),
    "llava_next": ("mistral", {"sliding_window": None}, {**VISION, "model_type": "clip_vision_model"}),
    "llava_onevision": ("qwen2", {}, {**VISION, "model_type": "siglip_vision_model"}),
    "vipllava": ("llama", {}, {**VISION, "model_type": "clip_vision_model"}),
    "internvl": ("qwen3", {}, {**VISION, "image_size": [16, 16], "patch_size": [8, 8]}),
    "idefics3": ("llama", {}, VISION),
    "smolvlm": ("llama", {}, VISION),
    "mistral3": ("ministral3", MINISTRAL3, {**VISION, "model_type": "pixtral"}),
    "lfm2_vl": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        {**VISION, "model_type": "siglip2_vision_model", "num_patches": 4},
    ),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 24}, {**VISION, "model_type": "siglip_vision_model"}),
}
"""By the `model_type` of the whole: that of its text model, values of its config, and of the encoder's."""


def write_whole(directory: Path, kind: str) -> list[int]:
    """A random model of texts and images as transformers saves it; returns a prompt."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text_type, own, vision = CASES[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text = {**TEXT, "model_type": text_type, **own}
        config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, tie_word_embeddings=False)
        config.text_config.tie_word_embeddings = False
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    write_tokenizer(directory, VOCAB_SIZE)
    token_ids = np.random.default_rng(0).integers(4, VOCAB_SIZE, PROMPT_LEN).tolist()
    with torch.inference_mode():
        logits = model.eval()(input_ids=torch.tensor([token_ids])).logits[0]
    np.save(directory / "logits.npy", logits.numpy())
    return token_ids


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    @cache
    def written(kind: str) -> tuple[Path, list[int]]:
        directory = tmp_path_factory.mktemp(kind)
        return directory, write_whole(directory, kind)

    return written


@pytest.mark.parametrize(("kind", "backend"), [*((kind, "native") for kind in CASES), ("qwen2_vl", "torch"), ("llava", "torch")])
def test_text_logits_of_a_multimodal_model_equal_the_whole_model(whole: Whole, kind: str, backend: str) -> None:
    directory, token_ids = whole(kind)
    expected = np.load(directory / "logits.npy")
    assert expected.std() > 0.1
    assert difference(prompt_logits(open_backend(directory, backend), token_ids), expected) <= BOUND
    if backend == "torch":
        notices = load_network(directory, RuntimeOptions(device="cpu", backend="torch")).notices
        assert sum("encoders are not loaded" in notice for notice in notices) == 1
    assert open_weights(directory, read_config(directory)).has_encoders


def test_mrope_positions_of_text_are_equal_in_all_three_dimensions() -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model("qwen2_5_vl", text_config={**TEXT, **MROPE, "model_type": "qwen2_5_vl_text"}, vision_config=VISION)
    model = AutoModelForImageTextToText.from_config(config)
    seen = []
    model.model.language_model.rotary_emb.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1]))
    model(input_ids=torch.arange(4, 12)[None])
    assert torch.equal(seen[0].reshape(-1, 8)[-3:], torch.arange(8).expand(3, 8))


def test_flat_qwen_vl_config_with_mrope_is_read(whole: Whole, tmp_path: Path) -> None:
    directory, _ = whole("qwen2_vl")
    nested = read_values(directory)
    text = {name: value for name, value in nested["text_config"].items() if name not in ("model_type", "rope_parameters", "head_dim")}
    flat = {**text, "rope_theta": 1e5, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    flat |= {name: nested[name] for name in ("model_type", "architectures", "vision_config", "dtype")}
    write_values(tmp_path, flat)
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    assert read_config(tmp_path) == read_config(directory)


@pytest.mark.parametrize(
    ("kind", "text"), [("llava", {"model_type": "llama"}), ("llava_next", {"model_type": "mistral"}), ("internvl", {}), ("qwen2_vl", {})]
)
def test_multimodal_text_config_defaults_equal_those_of_transformers(tmp_path: Path, kind: str, text: dict[str, Any]) -> None:
    from transformers import AutoConfig

    write_values(tmp_path, {"model_type": kind, "text_config": text, "dtype": "float16"})
    assumed = AutoConfig.for_model(kind, text_config=text or None).text_config
    config = read_config(tmp_path)
    found = (config.vocab_size, config.hidden_size, config.num_layers, config.attention.num_heads, config.attention.num_kv_heads)
    wanted = (assumed.vocab_size, assumed.hidden_size, assumed.num_hidden_layers, assumed.num_attention_heads, assumed.num_key_value_heads)
    assert found == wanted
    assert (config.layers[0].mlp.intermediate_size, config.norm_eps) == (assumed.intermediate_size, assumed.rms_norm_eps)


@pytest.mark.parametrize("outer", [True, False])
def test_multimodal_tie_word_embeddings_follows_the_stored_tensors(whole: Whole, tmp_path: Path, outer: bool) -> None:
    directory, _ = whole("llava")
    values = read_values(directory)
    values["tie_word_embeddings"], values["text_config"]["tie_word_embeddings"] = outer, not outer
    write_values(tmp_path, values)
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    assert not read_config(tmp_path).tied_embeddings


def test_every_supported_multimodal_model_is_compared_with_transformers() -> None:
    elsewhere = {"gemma3n", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_5_moe", "muse_glimmer"}
    assert set(MULTIMODAL_MODELS) == {*CASES, *elsewhere}


def test_text_config_that_is_no_json_object_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"text_config of a gemma3 model is \[1\]: it must be an object"):
        text_model_fields({"model_type": "gemma3", "text_config": [1]})
