"""A checkpoint with an adapter merged at load is the checkpoint whose stored matrices were changed by the adapter's definition.

Adapters are written without PEFT (tests/clients/test_peft.py holds the reader to its files), and added to the stored tensors here, so
that no row order of ours is trusted.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from harness import expert_checkpoints, hybrid_checkpoints
from harness.adapter_files import added, low_rank, write_adapter
from harness.checkpoints import write_checkpoint
from harness.exact_targets import skip_without_kernels
from harness.gguf_checkpoints import write_gguf
from harness.parity import difference, prompt_logits, transformers_output
from paceline.errors import CapacityError
from paceline.models.adapters.merge import MergedWeights, merged_config
from paceline.models.adapters.read import read_adapter
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.config import WeightType
from paceline.models.weights import as_float32
from paceline.runtimes.base import Network
from paceline.runtimes.decoder import decoder
from paceline.runtimes.load import LoadedNetwork, RuntimeOptions, load_network

pytest.importorskip("torch")
Tensors = dict[str, NDArray[Any]]
LAYER = "model.layers.1."
TOLERANCE, LOGITS = 1e-6, 1e-4


@dataclass(frozen=True)
class Case:
    """A model, the modules that are adapted, and how.

    Attributes:
        modules: names after that of the layer, as the file of the model has them.
        settings: values of adapter_config.json.
        scale: of every product.
    """

    family: str
    modules: tuple[str, ...]
    settings: dict[str, Any]
    scale: float = 6 / 4
    overrides: dict[str, Any] | None = None
    rank: int = 4
    layer: str = LAYER


ONE_LAYER = {"layers_to_transform": [1]}
ALPHAS = {"mlp.gate_proj": 5, r"layers\.\d+\.mlp\.up_proj": 2}
MIXTRAL = expert_checkpoints.CASES["mixtral"][1]
CASES = {
    "plain": Case("llama", ("self_attn.q_proj", "mlp.down_proj"), {"target_modules": ["q_proj", "down_proj"], **ONE_LAYER}),
    "regex": Case("llama", ("self_attn.v_proj",), {"target_modules": r".*layers\.1\.(?:.*)v_pro."}),
    "beside-experts": Case("mixtral", ("self_attn.o_proj",), {"target_modules": ["o_proj"], **ONE_LAYER}, overrides=MIXTRAL),
    "stabilized": Case("llama", ("self_attn.q_proj",), {"use_rslora": True, **ONE_LAYER}, 6 / math.sqrt(4)),
    "ranks": Case("llama", ("mlp.up_proj",), {"target_modules": ["up_proj"], "rank_pattern": {"up_proj": 2}, **ONE_LAYER}, 6 / 2, rank=2),
    "alphas": Case("llama", ("mlp.up_proj",), {"target_modules": ["up_proj"], "alpha_pattern": ALPHAS, **ONE_LAYER}, 2 / 4),
    "transposed": Case("llama", ("self_attn.q_proj",), {"fan_in_fan_out": True, **ONE_LAYER}),
    "excluded": Case("llama", ("self_attn.q_proj",), {"exclude_modules": ["layers.0.self_attn.q_proj", "layers.2.self_attn.q_proj"]}),
    "fused": Case("phi3", ("self_attn.qkv_proj", "mlp.gate_up_proj"), {"target_modules": ["qkv_proj", "gate_up_proj"], **ONE_LAYER}),
    "interleaved": Case("glm4", ("self_attn.q_proj", "self_attn.k_proj"), {"target_modules": ["q_proj", "k_proj"], **ONE_LAYER}),
    "gated": Case(
        "qwen3_5_text",
        ("self_attn.q_proj",),
        {"layers_to_transform": [3]},
        overrides=hybrid_checkpoints.CASES["qwen3_5"][1],
        layer="model.layers.3.",
    ),
    "latent": Case(
        "deepseek_v3",
        ("self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj"),
        {"target_modules": ["q_b_proj", "kv_a_proj_with_mqa", "o_proj"], **ONE_LAYER},
        overrides=expert_checkpoints.CASES["deepseek_v3"][1],
    ),
    "experts": Case(
        "qwen3_moe",
        ("mlp.experts.3.up_proj", "mlp.experts.7.down_proj"),
        {"target_modules": ["up_proj", "down_proj"], **ONE_LAYER},
        overrides=expert_checkpoints.CASES["qwen3_moe"][1],
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, Any] | None], Path]:
    def written(family: str, overrides: dict[str, Any] | None = None) -> Path:
        return write_checkpoint(tmp_path_factory.mktemp(family), family, **(overrides or {}))

    return written


def with_added(model: Path, folder: Path, change: Callable[[Tensors], None]) -> Path:
    """A copy of a checkpoint with other tensors."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file({name: np.ascontiguousarray(values.astype(np.float32)) for name, values in tensors.items()}, folder / "model.safetensors")
    return folder


def merged(model: Path, adapter: Path) -> tuple[Any, MergedWeights]:
    config = read_model_config(model)
    weights = open_weights(model, config)
    read = read_adapter(adapter, name="a", config=config, weights=weights)
    return merged_config(config, read), MergedWeights(weights, config, read, weight_type=WeightType.F32)


def check_same(model: Path, adapter: Path, expected: Path) -> None:
    """That every matrix is that of a changed checkpoint."""
    _, ours = merged(model, adapter)
    theirs = open_weights(expected, read_model_config(expected))
    assert set(theirs) <= set(ours)
    for name in theirs:
        assert np.abs(as_float32(ours[name]) - as_float32(theirs[name])).max() <= TOLERANCE, name


def native(config: Any, weights: MergedWeights) -> Network:
    from paceline.runtimes.native.network import NativeNetwork

    skip_without_kernels()
    return NativeNetwork(decoder(config), config, weights, num_threads=1, max_model_len=64, compute_type=WeightType.F32, packed=None)


def write_case(case: Case, model: Path, folder: Path) -> tuple[Path, Path]:
    """The adapter of a case, and the checkpoint with its products added."""
    stored, tensors, rng = load_file(model / "model.safetensors"), dict[str, NDArray[Any]](), np.random.default_rng(0)
    names = [case.layer + module for module in case.modules]
    for name in names:
        tensors |= low_rank(rng, name, stored[f"{name}.weight"].shape, case.rank)

    def change(own: Tensors) -> None:
        for name in names:
            own[f"{name}.weight"] = own[f"{name}.weight"] + added(tensors, name, case.scale)

    return write_adapter(folder / "adapter", tensors, **case.settings), with_added(model, folder / "changed", change)


@pytest.mark.parametrize("name", CASES)
def test_merged_matrix_is_the_stored_one_plus_the_adapter_product(name: str, models: Any, tmp_path: Path) -> None:
    model = models(CASES[name].family, CASES[name].overrides)
    check_same(model, *write_case(CASES[name], model, tmp_path))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapter_on_stacked_experts_is_merged_into_each_expert(family: str, models: Any, tmp_path: Path) -> None:
    rng, count, rank = np.random.default_rng(1), 6, 3
    overrides = {**expert_checkpoints.CASES[family][1], "num_local_experts" if family == "gpt_oss" else "num_experts": count}
    model = models(family, overrides)
    config = read_model_config(model)
    inner, hidden = config.layers[0].mlp.expert.intermediate_size, config.hidden_size  # type: ignore[union-attr]
    container = LAYER + "mlp.experts"
    shapes = {f"{container}.base_layer": (hidden, 2 * inner), container: (inner, hidden)}  # columns and outputs, the first inside
    tensors = {
        f"{module}.{part}.weight": rng.normal(0, 0.1, shape).astype(np.float32)
        for module, (columns, outputs) in shapes.items()
        for part, shape in (("lora_A", (count * rank, columns)), ("lora_B", (outputs, count * rank)))
    }
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    adapter = write_adapter(tmp_path / "adapter", tensors, r=rank, target_modules=[], target_parameters=targets)

    def delta(module: str, expert: int) -> NDArray[np.float64]:
        down, up = (tensors[f"{module}.{part}.weight"].astype(np.float64) for part in ("lora_A", "lora_B"))
        return 6 / rank * (up.reshape(len(up), rank, count)[:, :, expert] @ down.reshape(count, rank, -1)[expert])

    def change(own: Tensors) -> None:
        for expert in range(count):
            front, back = delta(f"{container}.base_layer", expert), delta(container, expert)
            if family == "gpt_oss":
                own[f"{container}.gate_up_proj"] = own[f"{container}.gate_up_proj"].astype(np.float64)
                own[f"{container}.gate_up_proj"][expert] += front.T
                own[f"{container}.down_proj"] = own[f"{container}.down_proj"].astype(np.float64)
                own[f"{container}.down_proj"][expert] += back.T
                continue
            for part, rows in (("gate_proj", front[:inner]), ("up_proj", front[inner:]), ("down_proj", back)):
                name = f"{container}.{expert}.{part}.weight"
                own[name] = own[name] + rows

    check_same(model, adapter, with_added(model, tmp_path / "changed", change))


def test_adapter_bias_replaces_and_lora_bias_is_added(models: Any, tmp_path: Path) -> None:
    rng, model = np.random.default_rng(2), models("llama", {"attention_bias": True})
    module = LAYER + "self_attn.q_proj"
    tensors: Tensors = low_rank(rng, module, (64, 64))
    tensors[f"{module}.lora_B.bias"] = rng.normal(0, 1, 64).astype(np.float32)
    tensors[f"{module}.base_layer.bias"] = rng.normal(0, 1, 64).astype(np.float32)
    tensors[f"{LAYER}self_attn.k_proj.bias"] = rng.normal(0, 1, 32).astype(np.float32)
    adapter = write_adapter(tmp_path / "adapter", tensors, bias="all", lora_bias=True, **ONE_LAYER)

    def change(own: Tensors) -> None:
        own[f"{module}.weight"] = own[f"{module}.weight"] + added(tensors, module)
        own[f"{module}.bias"] = tensors[f"{module}.base_layer.bias"] + 6 / 4 * tensors[f"{module}.lora_B.bias"]
        own[f"{LAYER}self_attn.k_proj.bias"] = tensors[f"{LAYER}self_attn.k_proj.bias"]

    check_same(model, adapter, with_added(model, tmp_path / "changed", change))


@pytest.mark.parametrize("ties", [False, True])
def test_embedding_adapter_changes_a_tied_lm_head_only_if_configured(ties: bool, models: Any, tmp_path: Path) -> None:
    rng, model = np.random.default_rng(3), models("llama", {"tie_word_embeddings": True})
    down, up = rng.normal(0, 0.1, (4, 97)).astype(np.float32), rng.normal(0, 0.1, (64, 4)).astype(np.float32)
    tensors = {"model.embed_tokens.lora_embedding_A": down, "model.embed_tokens.lora_embedding_B": up}
    settings = {"target_modules": ["embed_tokens"], **({"ensure_weight_tying": True} if ties else {})}
    config, ours = merged(model, write_adapter(tmp_path / "adapter", tensors, **settings))
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"].astype(np.float64)
    changed = table + 6 / 4 * (up.astype(np.float64) @ down).T
    assert not config.tied_embeddings
    assert np.abs(as_float32(ours["embedding.weight"]) - changed).max() <= TOLERANCE
    assert np.abs(as_float32(ours["lm_head.weight"]) - (changed if ties else table)).max() <= TOLERANCE


def test_modules_to_save_of_an_adapter_replace_model_matrices(models: Any, tmp_path: Path) -> None:
    rng, model = np.random.default_rng(4), models("llama")
    stored = load_file(model / "model.safetensors")
    tensors: Tensors = low_rank(rng, LAYER + "self_attn.q_proj", (64, 64))
    tensors["lm_head.modules_to_save.weight"] = rng.normal(0, 0.1, (97, 64)).astype(np.float32)
    tensors["model.embed_tokens.weight"] = stored["model.embed_tokens.weight"]
    adapter = write_adapter(tmp_path / "adapter", tensors, modules_to_save=["lm_head", "embed_tokens"], **ONE_LAYER)
    config = read_model_config(model)
    read = read_adapter(adapter, name="a", config=config, weights=open_weights(model, config))
    assert set(read.replacements) == {"lm_head"}
    _, ours = merged(model, adapter)
    assert np.array_equal(as_float32(ours["lm_head.weight"]), tensors["lm_head.modules_to_save.weight"])


@pytest.mark.parametrize("name", ["plain", "fused", "interleaved"])
def test_merged_model_has_the_logits_of_transformers(name: str, models: Any, tmp_path: Path) -> None:
    model = models(CASES[name].family, CASES[name].overrides)
    adapter, changed = write_case(CASES[name], model, tmp_path)
    config, weights = merged(model, adapter)
    ids = np.random.default_rng(5).integers(0, 97, 48).tolist()
    expected, _ = transformers_output(changed, ids)
    before, _ = transformers_output(model, ids)
    assert difference(before, expected) > 100 * LOGITS
    assert difference(prompt_logits(native(config, weights), ids), expected) <= LOGITS


def test_merging_into_gguf_converts_changed_matrices_to_float16(models: Any, tmp_path: Path) -> None:
    skip_without_kernels()
    file = write_gguf(models("llama"), tmp_path / "model.gguf", "Q8_0")
    adapter = write_adapter(tmp_path / "adapter", low_rank(np.random.default_rng(6), f"{LAYER}self_attn.q_proj", (64, 64)), **ONE_LAYER)

    def load(**more: Any) -> LoadedNetwork:
        return load_network(file, RuntimeOptions(device="cpu", backend="native", max_model_len=64, merge_adapter=adapter, **more))

    halves, floats = load(), load(dtype=WeightType.F32)
    for loaded, weight_type in ((halves, "f16"), (floats, "f32")):
        assert sum(f"1 quantised matrices become {weight_type} with the adapter merged" in notice for notice in loaded.notices) == 1
        assert loaded.network.weights.tensor_info("layers.1.q_proj.weight").weight_type.value == weight_type
        assert loaded.network.weights.stored_blocks("layers.1.q_proj.weight") is None
        assert loaded.network.weights.stored_blocks("layers.1.k_proj.weight") is not None
    exact = as_float32(floats.network.weights["layers.1.q_proj.weight"])
    assert np.array_equal(as_float32(halves.network.weights["layers.1.q_proj.weight"]), exact.astype(np.float16).astype(np.float32))
    ours, theirs = (prompt_logits(native(one.network.config, one.network.weights), list(range(1, 33))) for one in (halves, floats))
    assert 0 < difference(ours, theirs) <= 0.01
    with pytest.raises(CapacityError, match=r"with the adapter merged take 8\.19e-06 GB, 8e-06 GB are free: use quantization='int8'"):
        load(memory_bytes=8000)
