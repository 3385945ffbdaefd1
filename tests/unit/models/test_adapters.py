"""Adapter files are used whole or refused by name."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.adapter_files import low_rank, write_adapter
from harness.model_configs import make_config
from paceline.config import QuantOptions
from paceline.errors import CapacityError, CheckpointError, ConfigError
from paceline.models.adapters import patterns
from paceline.models.adapters.merge import MergedWeights
from paceline.models.adapters.patterns import ModuleSelector, first_matching_patterns
from paceline.models.adapters.read import read_adapter
from paceline.models.config import ModelConfig, WeightType
from paceline.models.quantize import quantize_matrix
from paceline.models.storage.quantized_cache import quantized_weights
from paceline.models.tensor_names import tensor_shapes
from paceline.models.weights import GroupedTensor, Tensor, Weights, as_float32

LAYERS = 2
CONFIG = make_config(num_layers=LAYERS)
QUERIES = tuple(f"model.layers.{layer}.self_attn.q_proj" for layer in range(LAYERS))
Tensors = dict[str, NDArray[Any]]


def of_queries(rank: int = 4, before: str = "") -> Tensors:
    rng = np.random.default_rng(0)
    return {name: one for module in QUERIES for name, one in low_rank(rng, before + module, (64, 64), rank).items()}


def read(directory: Path, config: ModelConfig = CONFIG, **more: Any) -> Any:
    return read_adapter(directory, name="a", config=config, **more)


def random_weights(config: ModelConfig, seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    values = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in tensor_shapes(config).items()}
    return Weights({name: Tensor(one, WeightType.F32, one.shape) for name, one in values.items()})


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, r"use_dora = True is not supported: it computes something else"),
    "replication": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
    "alora": ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "qalora": ({"use_qalora": True}, "use_qalora"),
    "blocks": ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
    "arrow": ({"arrow_config": {"top_k": 3}}, "arrow_config"),
    "megatron": ({"megatron_config": {"a": 1}}, "megatron_config"),
    "pissa": ({"init_lora_weights": "pissa_niter_16"}, r"init_lora_weights = 'pissa_niter_16' changed the model's own weights"),
    "olora": ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
    "loftq": ({"init_lora_weights": "loftq"}, "init_lora_weights = 'loftq'"),
    "kind": ({"peft_type": "IA3"}, "peft_type = 'IA3' is not supported, only 'LORA' and 'XLORA' are"),
    "mixture": ({"peft_type": "XLORA"}, "peft_type = 'XLORA': what X-LoRA adds depends on the text, so it can neither be merged"),
    "unknown": ({"use_something_new": True}, "'use_something_new' are set, which no known LoRA adapter has"),
    "rank": ({"r": 0}, "r = 0, expected an integer from 1"),
    "ranks": ({"rank_pattern": {"q_proj": 0}}, "rank_pattern gives 'q_proj' the rank 0"),
    "alpha": ({"lora_alpha": "7"}, "lora_alpha = '7', expected a number from"),
    "alpha-beyond": ({"lora_alpha": 1e308}, r"lora_alpha = 1e\+308, expected a number from -3\.4e\+38 to 3\.4e\+38 \(float32\)"),
    "alphas-beyond": ({"alpha_pattern": {"q_proj": -1e39}}, r"the alpha -1e\+39, expected a number from -3\.4e\+38"),
    "transposed": ({"fan_in_fan_out": "x"}, "fan_in_fan_out = 'x', expected true or false"),
    "saved-head": ({"modules_to_save": ["lm_head"]}, "holds no whole matrix for 1 module: lm_head that .*modules_to_save"),
    "saved-norm": ({"modules_to_save": ["1.input_layernorm"]}, r"1 module: model\.layers\.1\.input_layernorm that .*modules_to_save"),
    "low-rank-biases": ({"lora_bias": True}, r"q_proj without its lora_B\.bias"),
    "alphas": ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern gives 'q_proj' the alpha None"),
    "bias": ({"bias": "some"}, "bias = 'some', expected none, all or lora_only"),
    "targets": ({"target_modules": {"q_proj": 1}}, "target_modules = .*expected a name or a list"),
    "layers": ({"layers_to_transform": ["1"]}, "layers_to_transform = .*expected a layer"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_unsupported_adapter_setting_is_refused_by_name(name: str, tmp_path: Path) -> None:
    settings, text = SETTINGS[name]
    with pytest.raises(CheckpointError, match=text):
        read(write_adapter(tmp_path, of_queries(), **settings))


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_adapter_init_settings_without_effect_on_weights_are_accepted(start: object, tmp_path: Path) -> None:
    assert len(read(write_adapter(tmp_path, of_queries(), init_lora_weights=start)).low_rank_updates) == LAYERS


def test_adapter_settings_without_effect_are_ignored(tmp_path: Path) -> None:
    settings = {
        "lora_dropout": 0.1,
        "task_type": "CAUSAL_LM",
        "peft_version": "0.21.2",
        "megatron_core": "megatron.core",
        "inference_mode": True,
    }
    assert len(read(write_adapter(tmp_path, of_queries(), new_and_empty=None, **settings)).low_rank_updates) == LAYERS


FILES: dict[str, tuple[Tensors, str]] = {
    "width": (
        {f"{QUERIES[0]}.lora_A.weight": np.zeros((4, 32), np.float32)},
        r"layers\.0\.self_attn\.q_proj\.lora_A\.weight \[4, 32\] instead of \[4, 64\]",
    ),
    "rank": ({f"{QUERIES[0]}.lora_B.weight": np.zeros((64, 8), np.float32)}, r"lora_B\.weight \[64, 8\] instead of \[64, 4\]"),
    "layer": (low_rank(np.random.default_rng(0), "model.layers.2.self_attn.q_proj", (64, 64)), "does not have 2 tensors: .*layers.2"),
    "module": (low_rank(np.random.default_rng(0), "model.layers.0.self_attn.qkv_proj", (64, 64)), "does not have 2 tensors: .*qkv_proj"),
    "magnitude": (
        {f"{QUERIES[0]}.lora_magnitude_vector": np.zeros(64, np.float32)},
        "1 tensor: .*lora_magnitude_vector that no plain",
    ),
    "whole": ({"model.norm.weight": np.zeros(64, np.float32)}, r"does not have 1 tensor: base_model\.model\.model\.norm\.weight"),
    "half": ({"model.layers.0.self_attn.v_proj.lora_A.weight": np.zeros((4, 64), np.float32)}, "v_proj without its lora_B"),
    "rows": ({"lm_head.weight": np.zeros((98, 64), np.float32)}, r"lm_head\.weight \[98, 64\] instead of \[97, 64\]"),
    "bias": (
        {f"{QUERIES[1]}.lora_B.bias": np.zeros(64, np.float32)},
        r"holds 1 tensor: .*layers\.1\.self_attn\.q_proj\.lora_B\.bias without lora_bias in .*adapter_config\.json: set lora_bias",
    ),
    "twice": ({f"{QUERIES[0]}.lora_A.default.weight": np.zeros((4, 64), np.float32)}, "which are the same"),
    "nan": ({f"{QUERIES[0]}.lora_A.weight": np.full((4, 64), np.nan, np.float32)}, "lora_A.weight holds NaN or infinite values"),
    "integers": ({f"{QUERIES[0]}.lora_A.weight": np.zeros((4, 64), np.int8)}, "is of type I8, supported are F32, F16, F64, BF16"),
    "other": (
        low_rank(np.random.default_rng(0), "model.layers.0.self_attn.o_proj", (64, 64)),
        "adapts 1 module: .*o_proj that",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_unused_adapter_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    more, text = FILES[name]
    with pytest.raises(CheckpointError, match=text):
        read(write_adapter(tmp_path, {**of_queries(), **more}, base_model_name_or_path="owner/base"))


def test_adapter_rank_larger_than_both_matrix_sides_is_refused(tmp_path: Path) -> None:
    assert len(read(write_adapter(tmp_path, of_queries(64), r=64)).low_rank_updates) == LAYERS
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj of rank 65, a matrix of \[64, 64\] takes at most 64"):
        read(write_adapter(tmp_path, of_queries(65), r=65))


def test_adapter_larger_than_memory_is_refused_before_reading(tmp_path: Path) -> None:
    adapter, size = write_adapter(tmp_path, of_queries()), 2 * 4 * LAYERS * 2 * 4 * 64
    assert read(adapter, memory_bytes=size).low_rank_updates
    with pytest.raises(CapacityError, match=r"takes 8\.19e-06 GB while it is read, .* GB are free: use an adapter of a lower rank"):
        read(adapter, memory_bytes=size - 1)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin", "adapter_config.json"])
def test_adapter_file_that_is_a_pipe_or_link_loop_is_refused(name: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, of_queries()) / name
    if name.startswith("adapter_model"):
        (tmp_path / "adapter_model.safetensors").unlink()
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=rf"{name} is a pipe, expected a regular file; download it again"):
        read(tmp_path)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: Too many levels of symbolic links"):
        read(tmp_path)


def test_bytes_after_the_last_adapter_tensor_are_refused(tmp_path: Path) -> None:
    with (write_adapter(tmp_path, of_queries()) / "adapter_model.safetensors").open("ab") as file:
        file.write(b"123")
    with pytest.raises(CheckpointError, match="holds 3 bytes after its last tensor, which is invalid"):
        read(tmp_path)


def test_adapter_for_another_number_of_layers_is_refused(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, of_queries(), base_model_name_or_path="owner/base")
    with pytest.raises(CheckpointError, match=r"layers\.1\..* use it with the model it was made for, 'owner/base'"):
        read(adapter, make_config(num_layers=1))
    with pytest.raises(
        CheckpointError, match=r"does not adapt 1 module: model\.layers\.2\.self_attn\.q_proj of this model that .* selects"
    ):
        read(adapter, make_config(num_layers=3))


def test_directory_without_adapter_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no adapter_config\.json: give the directory of a LoRA adapter"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds neither adapter_model\.safetensors nor adapter_model\.bin"):
        read(tmp_path)
    write_adapter(tmp_path, {})
    with pytest.raises(CheckpointError, match="holds no tensors"):
        read(tmp_path)
    write_adapter(tmp_path, {"model.visual.blocks.0.attn.qkv.lora_A.weight": np.zeros((4, 8), np.float32)})
    with pytest.raises(CheckpointError, match="only tensors of image or audio encoders"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["", " ", "a\nb", "x" * 201])
def test_adapter_name_unusable_in_requests_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use 1 to 200 printable characters"):
        read_adapter(write_adapter(tmp_path, of_queries()), name=name, config=CONFIG)


@pytest.mark.parametrize("before", ["model.language_model.", "language_model.model."])
def test_adapter_module_prefixes_are_ignored(before: str, tmp_path: Path) -> None:
    plain = read(write_adapter(tmp_path / "plain", of_queries()))
    wrapped = {name.replace("model.", before, 1): one for name, one in of_queries().items()}
    wrapped["model.visual.blocks.0.attn.qkv.lora_A.weight"] = np.zeros((4, 8), np.float32)
    found = read(write_adapter(tmp_path / "wrapped", wrapped, target_modules=r"^(?!.*visual).*\.q_proj$"))
    assert found.digest == plain.digest
    assert set(found.low_rank_updates) == {"layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"}


def test_pytorch_adapter_file_equals_the_safetensors_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    found = read(write_adapter(tmp_path, of_queries()))
    torch.save({f"base_model.model.{name}": torch.from_numpy(one) for name, one in of_queries().items()}, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").unlink()
    assert read(tmp_path).digest == found.digest


def test_adapter_cache_key_depends_on_every_value(tmp_path: Path) -> None:
    tensors = of_queries()
    keys = [read(write_adapter(tmp_path, tensors, lora_alpha=alpha)).digest for alpha in (6, 6, 7)]
    last = next(reversed(tensors))
    keys.append(read(write_adapter(tmp_path, {**tensors, last: np.nextafter(tensors[last], np.float32(1))})).digest)
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_adapter_base_layer_bias_without_model_weights_is_refused(tmp_path: Path) -> None:
    config = make_config(num_layers=LAYERS, attention={"bias": True})
    adapter = write_adapter(tmp_path, {**of_queries(), f"{QUERIES[0]}.base_layer.bias": np.ones(64, np.float32)}, bias="lora_only")
    with pytest.raises(ConfigError, match="pass `weights`, which they are compared with"):
        read(adapter, config)
    weights = random_weights(config)
    found = read(adapter, config, weights=weights)
    assert np.allclose(found.biases["layers.0.self_attn.q_proj"] + as_float32(weights["layers.0.q_proj.bias"]), 1, atol=1e-7)


def test_merged_adapter_matrices_are_quantised_after_merging(tmp_path: Path) -> None:
    base = random_weights(CONFIG)
    adapter = read(write_adapter(tmp_path, of_queries()))
    ours = quantized_weights(MergedWeights(base, CONFIG, adapter, weight_type=WeightType.F32), QuantOptions(bits=8, group=64), None)
    low = adapter.low_rank_updates["layers.0.self_attn.q_proj"]
    whole = as_float32(base["layers.0.q_proj.weight"]) + low.lora_b @ low.lora_a
    found, expected = ours["layers.0.q_proj.weight"], quantize_matrix(whole, bits=8, group_size=64)
    assert isinstance(found, GroupedTensor)
    assert np.array_equal(found.matrix.codes, expected.codes)
    assert not np.array_equal(expected.codes, quantize_matrix(as_float32(base["layers.0.q_proj.weight"]), bits=8, group_size=64).codes)


def test_quantised_matrices_with_a_merged_adapter_become_floats(tmp_path: Path) -> None:
    plain = random_weights(CONFIG)
    base = quantized_weights(plain, QuantOptions(bits=8, group=64), None)
    ours = MergedWeights(base, CONFIG, read(write_adapter(tmp_path, of_queries())), weight_type=WeightType.BF16)
    assert ours.tensor_info("layers.0.q_proj.weight").bits is None
    assert isinstance(ours["layers.0.k_proj.weight"], GroupedTensor)
    assert any("2 quantised matrices become bf16 with the adapter merged" in notice for notice in ours.notices)


def test_quantised_weight_cache_is_separate_for_each_merged_adapter(tmp_path: Path) -> None:
    base, options = random_weights(CONFIG), QuantOptions(bits=8, group=64)
    adapters = [read(write_adapter(tmp_path / str(alpha), of_queries(), lora_alpha=alpha)) for alpha in (6, 7)]
    for adapter in adapters:
        merged = MergedWeights(base, CONFIG, adapter, weight_type=WeightType.F32)
        found = quantized_weights(merged, options, tmp_path / "cache", files=[tmp_path / "6" / "adapter_config.json"])
        low = adapter.low_rank_updates["layers.0.self_attn.q_proj"]
        expected = quantize_matrix(as_float32(base["layers.0.q_proj.weight"]) + low.lora_b @ low.lora_a, bits=8, group_size=64)
        assert np.array_equal(found["layers.0.q_proj.weight"].matrix.codes, expected.codes)  # type: ignore[union-attr]
    assert len(os.listdir(tmp_path / "cache" / "quantised")) == 2


MODULES = [f"model.layers.{layer}.{part}" for layer in range(12) for part in ("self_attn.q_proj", "mlp.up_proj")] + ["lm_head"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"target_modules": ("q_proj",)}, lambda name: name.endswith("q_proj")),
        ({"target_modules": ("proj",)}, lambda name: False),
        ({"target_modules": "all-linear"}, lambda name: name != "lm_head"),
        ({"target_modules": r".*\.layers\.(1|11)\..*"}, lambda name: ".1." in name or ".11." in name),
        (
            {"target_modules": ("q_proj", "lm_head"), "layers_to_transform": (1,)},
            lambda name: name in ("model.layers.1.self_attn.q_proj", "lm_head"),
        ),
        ({"target_modules": ("q_proj",), "layers_to_transform": (1,), "layers_pattern": ("blocks",)}, lambda name: False),
        (
            {"target_modules": ("q_proj",), "exclude_modules": r".*\.[0-8]\..*"},
            lambda name: name.endswith("q_proj") and int(name.split(".")[2]) > 8,
        ),
        ({"target_modules": "all-linear", "modules_to_save": ("mlp",)}, lambda name: name.endswith("q_proj")),
    ],
)  # fmt: skip
def test_adapter_target_modules_are_selected_as_in_peft(settings: dict[str, Any], expected: Any) -> None:
    nothing: dict[str, Any] = {"exclude_modules": (), "modules_to_save": (), "layers_to_transform": (), "layers_pattern": ()}
    found = ModuleSelector(path=Path("adapter_config.json"), **{**nothing, **settings}).select_modules(MODULES)
    assert sorted(found) == sorted(filter(expected, MODULES))


def test_first_matching_rank_pattern_applies_to_a_module() -> None:
    endings = ["layers.1.self_attn.q_proj", r".*\.(?:1|2)\..*", "q_proj", "^lm_head"]
    found = first_matching_patterns(endings, MODULES, Path("x"))
    assert found["model.layers.1.self_attn.q_proj"] == endings[0]
    assert found["model.layers.2.self_attn.q_proj"] == endings[1]
    assert found["model.layers.3.self_attn.q_proj"] == endings[2]
    assert found["lm_head"] == endings[3]
    assert "model.layers.3.mlp.up_proj" not in found


def test_adapter_module_pattern_that_takes_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_MATCHING_TIMEOUT_S", 0.5)
    with pytest.raises(CheckpointError, match=r"takes longer than 0\.5 s: name the modules one by one"):
        read(write_adapter(tmp_path, of_queries(), target_modules=r"(([a-z._0-9]+)*)*X"))


def test_invalid_adapter_module_pattern_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\(q_proj.* cannot be used as regular expressions"):
        read(write_adapter(tmp_path, of_queries(), rank_pattern={"(q_proj": 4}))


def test_fuzzed_adapter_config_is_read_or_refused(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path, of_queries())
    for value in (None, 0, "", [], {}, "x", [None], {"a": None}, 1e308, -1):
        for name in json.loads((adapter / "adapter_config.json").read_text()):
            values = {**json.loads((adapter / "adapter_config.json").read_text()), name: value}
            (tmp_path / "adapter_config.json").write_text(json.dumps(values))
            try:
                read(tmp_path)
            except CheckpointError:
                continue
            finally:
                write_adapter(tmp_path, of_queries())
