"""X-LoRA directories are used whole or refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from harness.adapter_files import low_rank, write_adapter
from harness.model_configs import make_config
from harness.xlora_files import CLASSIFIER, write_xlora
from paceline.errors import CapacityError, CheckpointError
from paceline.models.adapters.adapter import Adapter
from paceline.models.adapters.network_adapter import to_network_adapter
from paceline.models.adapters.xlora import read_any_adapter
from paceline.models.config import ModelConfig

CONFIG = make_config(num_layers=2)


def read(directory: Path, config: ModelConfig = CONFIG, **more: Any) -> Adapter:
    return read_any_adapter(directory, name="mix", config=config, **more)


def change_settings(directory: Path, **settings: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def change_tensors(directory: Path, tensors: dict[str, Any]) -> None:
    path = directory / "adapter_model.safetensors"
    save_file({name: one for name, one in {**load_file(path), **tensors}.items() if one is not None}, path)


def test_xlora_ranks_are_those_of_its_adapters(tmp_path: Path) -> None:
    adapter = read(write_xlora(tmp_path, CONFIG, seed=1, layerwise_scalings=True))
    mixture = adapter.mixture
    assert mixture is not None
    assert (mixture.num_adapters, mixture.num_scaled_matrices) == (3, 8)
    assert mixture.scaling_indices["layers.0.self_attn.q_proj"].tolist() == [0, 0, 1, 1, 1]
    assert mixture.scaling_indices["layers.0.self_attn.v_proj"].tolist() == [4, 4, 4]
    assert mixture.scaling_indices["layers.0.mlp.up_proj"].tolist() == [8, 8, 8, 8]
    assert mixture.scaling_indices["layers.1.mlp.down_proj"].tolist() == [21, 21, 23, 23, 23, 23]
    assert {name: len(low.lora_a) for name, low in adapter.low_rank_updates.items()} == {
        name: len(own) for name, own in mixture.scaling_indices.items()
    }
    network = to_network_adapter(adapter, CONFIG)
    assert network.mixture is not None
    assert network.mixture.scaling_indices.keys() == network.low_rank_updates.keys()
    shared = read(write_xlora(tmp_path / "shared", CONFIG, seed=1)).mixture
    assert shared is not None
    assert shared.scaling_indices["layers.1.mlp.down_proj"].tolist() == [0, 0, 2, 2, 2, 2]


def test_xlora_cache_key_depends_on_every_value_that_changes_a_token(tmp_path: Path) -> None:
    first = write_xlora(tmp_path / "first", CONFIG, seed=1)
    keys = {read(first).digest}
    change_settings(first, xlora_dropout_p=0.3, use_trainable_adapters=True, peft_version="0.21.2")
    assert read(first).digest in keys
    changes = ({"softmax_temperature": 2.0}, {"top_k_lora": 2}, {"global_scaling_weight": 1.5}, {"enable_softmax": False})
    for number, change in enumerate(changes):
        keys.add(read(write_xlora(tmp_path / f"{number}", CONFIG, seed=1, **change)).digest)
    bias = f"{CLASSIFIER}.0.bias"
    change_tensors(first, {bias: load_file(first / "adapter_model.safetensors")[bias] + np.float32(0.1)})
    keys.add(read(first).digest)
    shutil.copytree(tmp_path / "0", tmp_path / "last")
    shutil.rmtree(tmp_path / "last" / "2")
    shutil.copytree(write_xlora(tmp_path / "other", CONFIG, seed=2) / "2", tmp_path / "last" / "2")
    keys.add(read(tmp_path / "last").digest)
    assert len(keys) == len(changes) + 3


def test_xlora_adapter_folders_are_numbered_or_configured(tmp_path: Path) -> None:
    directory = write_xlora(tmp_path / "mix", CONFIG, seed=1)
    key = read(directory).digest
    (directory / "1").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"number 1 \('1'\) is missing: put its directory there as .*mix/1"):
        read(directory)
    change_settings(directory, adapters={"0": "", "1": str(tmp_path / "elsewhere"), "2": "owner/name"})
    assert read(directory).digest == key


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"use_something_new": True}, "'use_something_new' are set, which no known X-LoRA adapter has"),
    "bias": ({"use_bias": False}, "use_bias is false, and PEFT's classifier has biases"),
    "no-adapters": ({"adapters": {}}, "adapters = {}, expected an object of 1 to 256 names with a directory each"),
    "no-paths": ({"adapters": {"0": 1}}, "adapters = {'0': 1}, expected an object"),
    "list": ({"adapters": ["0"]}, r"adapters = \['0'\], expected an object"),
    "names": ({"adapters": {"sql": "0", "math": "1"}}, r"adapters are named 'sql', 'math', and PEFT finds .* name them \"0\" to \"1\""),
    "order": ({"adapters": {"1": "1", "0": "0", "2": "2"}}, "adapters are named '1', '0', '2', and PEFT finds"),
    "hidden": ({"hidden_size": 48}, "hidden_size = 48, the model's is 64: use the adapter with the model it was made for"),
    "temperature": ({"softmax_temperature": 0.0}, "softmax_temperature = 0, expected a number of at least 1.18e-38"),
    "temperature of no float32": ({"softmax_temperature": 1e-45}, "softmax_temperature = 1.*e-45, expected a number of at least 1.18e-38"),
    "top-k": ({"top_k_lora": 4}, "top_k_lora = 4, expected an integer from 1 to 3"),
    "none-chosen": ({"top_k_lora": 0}, "top_k_lora = 0, expected an integer from 1 to 3"),
    "ties": ({"top_k_lora": 2, "scaling_pass_value": 0.5}, "scaling_pass_value = 0.5 with top_k_lora = 2 of 3: .* are not defined"),
    "no-value": (
        {"scaling_pass_value": None},
        "scaling_pass_value is null, which PEFT cannot compute with: set a number, such as 0.33",
    ),
    "depth": ({"xlora_depth": 0}, "xlora_depth = 0, expected an integer from 1"),
    "softmax": ({"enable_softmax": "yes"}, "enable_softmax = 'yes', expected true or false"),
    "weight": ({"global_scaling_weight": 1e39}, r"global_scaling_weight = 1e\+39, expected a number"),
    "beyond": ({"global_scaling_weight": 3e38}, r"with global_scaling_weight = 3e\+38, values of .* exceed float32"),
    "other-depth": ({"xlora_depth": 2}, r"layers\.0\.weight is \[3, 64\] instead of \[24, 64\]"),
    "other-count": ({"adapters": {"0": "0", "1": "1"}}, r"does not hold the classifier that .* \[3, 64\] instead of \[2, 64\]"),
    "layerwise": ({"layerwise_scalings": True}, r"layers\.0\.weight is \[3, 64\] instead of \[24, 64\]"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_unsupported_xlora_setting_is_refused_by_name(name: str, tmp_path: Path) -> None:
    settings, text = SETTINGS[name]
    directory = write_xlora(tmp_path, CONFIG, seed=1)
    change_settings(directory, **settings)
    with pytest.raises(CheckpointError, match=text):
        read(directory)


TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": (
        {"base_model.model.lora_A.weight": np.zeros(3, np.float32)},
        "holds 1 tensor: .*lora_A.weight that no X-LoRA",
    ),
    "one-too-many": ({f"{CLASSIFIER}.3.bias": np.zeros(3, np.float32)}, r"layers\.3\.bias is not expected"),
    "missing": ({f"{CLASSIFIER}.0.bias": None}, r"layers\.0\.bias \[3\] is missing; PEFT 0\.21\.2 omits layers"),
    "twice": ({f"{CLASSIFIER.replace('base_model.', '')}.0.bias": np.zeros(3, np.float32)}, "which are the same"),
    "nan": ({f"{CLASSIFIER}.0.bias": np.full(3, np.nan, np.float32)}, r"layers\.0\.bias holds NaN or infinite values"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_incomplete_xlora_classifier_is_refused(name: str, tmp_path: Path) -> None:
    tensors, text = TENSORS[name]
    directory = write_xlora(tmp_path, CONFIG, seed=1)
    change_tensors(directory, tensors)
    with pytest.raises(CheckpointError, match=text):
        read(directory)


def test_missing_xlora_classifier_file_is_named(tmp_path: Path) -> None:
    (write_xlora(tmp_path, CONFIG, seed=1) / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds neither .* nor adapter_model\.bin, where X-LoRA's classifier is"):
        read(tmp_path)


ADAPTERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "whole": (
        {"lm_head.weight": np.zeros((97, 64), np.float32)},
        {"modules_to_save": ["lm_head"]},
        "changes 1 part: the whole of lm_head, which X-LoRA does not scale",
    ),
    "bias": (
        {"model.layers.0.self_attn.q_proj.lora_B.bias": np.ones(64, np.float32)},
        {"lora_bias": True},
        r"changes 1 part: the bias of layers\.0\.self_attn\.q_proj, which X-LoRA does not scale",
    ),
    "head": (
        low_rank(np.random.default_rng(0), "lm_head", (97, 64)),
        {"target_modules": ["q_proj", "lm_head"]},
        "changes 1 product: lm_head, for which X-LoRA is not supported",
    ),
    "mixture": ({}, {"peft_type": "XLORA"}, "so it can neither be merged nor be part of another X-LoRA adapter"),
    "dora": ({}, {"use_dora": True}, "use_dora = True is not supported"),
    "parameters": ({}, {"target_parameters": ["q_proj.weight"]}, r"parameters \(target_parameters\), for which X-LoRA is not supported"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_unsupported_adapter_within_an_xlora_is_refused_by_directory(name: str, tmp_path: Path) -> None:
    tensors, settings, text = ADAPTERS[name]
    directory = write_xlora(tmp_path, CONFIG, seed=1)
    own = low_rank(np.random.default_rng(0), "model.layers.0.self_attn.q_proj", (64, 64))
    write_adapter(directory / "1", {**own, **tensors}, **{"layers_to_transform": None if "head" in name else [0], **settings})
    if name == "head":
        own = low_rank(np.random.default_rng(0), "model.layers.1.self_attn.q_proj", (64, 64)) | own
        write_adapter(directory / "1", {**own, **tensors}, **settings)
    with pytest.raises(CheckpointError, match=text) as caught:
        read(directory)
    assert str(directory / "1") in str(caught.value)


def test_layerwise_scalings_need_a_known_module_order(tmp_path: Path) -> None:
    fused = make_config(num_layers=1, family="phi3")
    modules = (("self_attn.qkv_proj",), ("mlp.down_proj",))
    assert read(write_xlora(tmp_path / "plain", fused, seed=1, modules=modules), fused).mixture
    with pytest.raises(CheckpointError, match=r"layerwise_scalings with .* in a phi3 model"):
        read(write_xlora(tmp_path / "layers", fused, seed=1, modules=modules, layerwise_scalings=True), fused)


def test_xlora_larger_than_memory_is_refused_before_reading(tmp_path: Path) -> None:
    directory = write_xlora(tmp_path, CONFIG, seed=1)
    first = 2 * 4 * sum(one.size for one in load_file(directory / "0" / "adapter_model.safetensors").values())
    with pytest.raises(CapacityError, match=r"/1/adapter_model\.safetensors takes .* GB while it is read"):
        read(directory, memory_bytes=first + 10)
    assert read(directory, memory_bytes=1 << 30).mixture
