"""Mixtures of experts compute the logits transformers computes, however their checkpoints store them."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoint_files import change_config, edit_tensors, read_tensors, read_values, write_values
from harness.checkpoints import write_checkpoint
from harness.expert_checkpoints import CASES, LATENT, in_stacks
from harness.gguf_checkpoints import write_gguf
from harness.model_changes import Change, change_mixers, change_mixtures, change_routing, change_window, map_mixers, map_mlps
from harness.parity import BOUNDS, References, check_a_prompt, check_change_matters, difference, make_reference, open_backend, prompt_logits
from paceline.errors import CheckpointError
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.config import read_config
from paceline.models.layers import ClampedSwiGLU, ExpertMLP
from paceline.models.rope_config import RopeConfig
from paceline.models.weights import as_float32

torch = pytest.importorskip("torch")

BOUND = 1e-4
"""Routers that choose clearly make rounding larger: transformers' own distance from float64 is up to 5e-5 here."""
BY_BACKEND = pytest.mark.parametrize("backend", list(BOUNDS))


@pytest.mark.spread(0.25)
@pytest.mark.parametrize("case", CASES)
@BY_BACKEND
def test_moe_prompt_logits_equal_transformers_whole_and_in_chunks(references: References, case: str, backend: str) -> None:
    check_a_prompt(references(case), backend, bound=BOUND)


def mixture_expert(**changes: Any) -> Change:
    return map_mlps(lambda mlp: {"expert": replace(mlp.expert, **changes)}, ExpertMLP)


CHANGES: list[tuple[str, Change]] = [
    ("mixtral", change_routing(has_normalized_weights=False)),
    ("mixtral", change_routing(num_experts_per_token=1)),
    ("qwen2_moe", change_routing(has_normalized_weights=True)),
    ("qwen2_moe", change_mixtures(shared_expert=None)),
    ("qwen2_moe", change_mixtures(has_shared_expert_gate=False)),
    ("qwen3_moe", change_routing(has_normalized_weights=False)),
    ("qwen3_moe", change_routing(num_experts_per_token=4)),
    ("olmoe", change_routing(has_normalized_weights=True)),
    ("ernie4_5_moe", change_routing(has_correction_bias=False)),
    ("ernie4_5_moe", change_routing(has_normalized_weights=False)),
    ("ernie4_5_moe", change_mixtures(shared_expert=None)),
    ("glm4_moe", change_routing(has_correction_bias=False)),
    ("glm4_moe", change_routing(has_normalized_weights=False)),
    ("glm4_moe", change_routing(routed_scaling_factor=1.0)),
    ("glm4_moe", change_mixtures(shared_expert=None)),
    ("glm4_moe-groups", change_routing(num_expert_groups=1, num_selected_groups=1)),
    ("glm4_moe-groups", change_routing(num_selected_groups=1)),
    ("glm4_moe-groups", change_routing(has_normalized_weights=True)),
    ("deepseek_v2", change_routing(num_expert_groups=1, num_selected_groups=1)),
    ("deepseek_v2", change_routing(top_scores_per_group=2)),
    ("deepseek_v2", change_routing(routed_scaling_factor=1.0)),
    ("deepseek_v2", change_mixers(scale=48**-0.5)),
    ("deepseek_v3", change_routing(num_expert_groups=1, num_selected_groups=1)),
    ("deepseek_v3", change_mixers(rope=RopeConfig())),
    ("deepseek_v3", map_mixers(lambda own: {"latent": replace(own.latent, norm_eps=1e-2)})),
    ("gpt_oss-window", change_mixers(has_sinks=False)),
    ("gpt_oss-window", mixture_expert(activation=ClampedSwiGLU(1.702, 7.0))),
    ("gpt_oss-window", mixture_expert(activation=ClampedSwiGLU(1.0, 0.5))),
    ("gemma4-window", change_routing(has_expert_scales=False)),
    ("gemma4-window", change_mixtures(router_scale=1.0)),
    ("gemma4-window", change_mixtures(has_expert_norms=False)),
    *((name, change_window(size)) for name in CASES if name.endswith("-window") for size in (None, 15, 17)),
]


@pytest.mark.parametrize(("case", "change"), CHANGES, ids=[f"{number}-{case}" for number, (case, _) in enumerate(CHANGES)])
def test_moe_logits_change_with_another_routing_or_activation(references: References, case: str, change: Change) -> None:
    check_change_matters(references(case), change)


KIMI_K2 = {
    **LATENT, "q_lora_rank": 48, "norm_topk_prob": True, "routed_scaling_factor": 2.827, "n_group": 1, "topk_group": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "original_max_position_embeddings": 64, "beta_fast": 1.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
OF_KIMI_K2 = {"ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001, "num_nextn_predict_layers": 0, "pretraining_tp": 1}
"""Fields of its config.json that the class in transformers does not have."""


@BY_BACKEND
def test_kimi_k2_logits_equal_those_of_deepseek_v3_in_transformers(tmp_path: Path, backend: str) -> None:
    from transformers import Kimi_K25Config

    assert Kimi_K25Config(text_config={"model_type": "kimi_k2"}).text_config.model_type == "deepseek_v3"
    reference = make_reference(write_checkpoint(tmp_path, "deepseek_v3", **KIMI_K2))
    values = read_values(tmp_path)
    rope = values.pop("rope_parameters")
    old = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "type": rope.pop("rope_type")}}
    added = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, **OF_KIMI_K2}
    values = {**values, **old, **added}
    for model_type, family in ((None, "deepseek_v3"), ("kimi_k2", "kimi_k2")):
        write_values(tmp_path, {**values, "model_type": model_type})
        assert read_config(tmp_path).family == family
    check_a_prompt(reference, backend, bound=BOUND)


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "glm4_moe-groups"])
def test_stacked_experts_equal_experts_stored_one_by_one(references: References, tmp_path: Path, case: str) -> None:
    reference = references(case)
    stacked = in_stacks(reference.directory, tmp_path / "stacked")
    assert sum(name.endswith(".experts.gate_up_proj") for name in read_tensors(stacked)) >= 2
    found, expected = (prompt_logits(open_backend(one, "native"), reference.token_ids) for one in (stacked, reference.directory))
    assert np.array_equal(found, expected)


def write_mxfp4(directory: Path, to: Path, seed: int) -> Path:
    """A gpt-oss checkpoint with random experts in MXFP4, as it was published."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(directory, to)
    random, tensors = np.random.default_rng(seed), load_file(to / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.from_numpy(random.integers(0, 256, (count, rows, columns // 32, 16), np.uint8))
        tensors[f"{name}_scales"] = torch.from_numpy(random.integers(121, 125, (count, rows, columns // 32), np.uint8))
    save_file(tensors, to / "model.safetensors")
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return change_config(to, quantization_config=settings)


def expanded(packed: Path, to: Path) -> Path:
    """The same checkpoint with its experts expanded to float32 by transformers."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    shutil.copytree(packed, to)
    tensors = load_file(packed / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        stack = name.removesuffix("_blocks")
        blocks, scales = tensors.pop(name), tensors.pop(f"{stack}_scales")
        tensors[stack] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return write_values(to, {name: value for name, value in read_values(to).items() if name != "quantization_config"})


def test_mxfp4_values_equal_those_of_transformers_and_gguf(references: References, tmp_path: Path, seed: int) -> None:
    packed = write_mxfp4(references("gpt_oss").directory, tmp_path / "packed", seed)
    plain = expanded(packed, tmp_path / "plain")
    path = write_gguf(plain, tmp_path / "model.gguf", lambda name: "MXFP4" if "_exps" in name else "F32")
    reference = make_reference(plain)
    assert difference(prompt_logits(open_backend(packed, "torch"), reference.token_ids), reference.logits) <= BOUND
    found, of_gguf, expected = (open_weights(one, read_model_config(one)) for one in (packed, path, plain))
    assert list(found) == list(expected) == list(of_gguf)
    for name in found:
        assert np.array_equal(as_float32(found[name]), as_float32(expected[name])), name
        assert np.array_equal(as_float32(of_gguf[name]), as_float32(expected[name])), name
    assert found.nbytes == of_gguf.nbytes < expected.nbytes / 2
    in_integers = prompt_logits(open_backend(packed, "native", weight_type=None), reference.token_ids)
    # rows are rounded to bytes, and where two experts are nearly level the other one may be chosen
    assert 1e-3 < np.median(np.abs(in_integers - reference.logits)) < 0.05
    assert np.array_equal(in_integers, prompt_logits(open_backend(path, "native", weight_type=None), reference.token_ids))


BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "more": ("qwen3_moe", {"num_experts": 21}, r"lacks 9 tensors: model\.layers\.0\.mlp\.experts\.20\.gate_proj\.weight"),
    "fewer": ("qwen3_moe", {"num_experts": 19}, r"holds 9 tensors: .*experts\.19\..* does not have"),
    "width": ("qwen3_moe", {"moe_intermediate_size": 64}, r"experts\.0\.gate_proj\.weight' has shape \[32, 64\], but config\.json"),
    "chosen": ("qwen3_moe", {"num_experts_per_tok": 21}, r"num_experts_per_tok = 21, but there are only 20 experts"),
    "many": ("qwen3_moe", {"num_experts": 4096}, r"num_local_experts = 4096, expected an integer from 1 to 1024"),
    "groups": ("glm4_moe-groups", {"topk_group": 5}, r"12 experts in n_group = 4 groups, topk_group = 5 selected"),
    "latent": (
        "deepseek_v3",
        {"kv_lora_rank": 48},
        r"kv_a_proj_with_mqa.weight' has shape \[112, 64\], but config\.json requires \[64, 64\]",
    ),
    "heads": ("deepseek_v3", {"num_key_value_heads": 2}, r"num_key_value_heads = 2 is not supported for deepseek_v3"),
    "choice": ("deepseek_v2", {"topk_method": "noaux_tc"}, r"topk_method = 'noaux_tc' is not supported, only 'greedy' and"),
    "halves": ("glm4_moe_lite", {"rope_interleave": False}, r"rope_interleave = false is not supported for glm4_moe_lite, only true is"),
    "clip": ("olmoe", {"clip_qkv": 8.0}, r"clip_qkv = 8\.0 is not supported"),
    "window": ("gpt_oss", {"sliding_window": 0}, r"sliding_window = 0, expected an integer from 1"),
    "layer": ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}, r"layer_types = .*expected sliding_attention or full"),
    "stack": ("gpt_oss", {"num_local_experts": 5}, r"gate_up_proj_bias' has shape \[6, 192\], but config\.json requires \[5, 192\]"),
    "causal": ("mixtral", {"is_causal": False}, r"is_causal is false: embedding models"),
    "layers": ("mixtral", {"per_layer_config": {"1": {"num_experts_per_tok": 1}}}, r"per_layer_config = .* is not supported for mixtral"),
    "null": ("gemma4-window", {"top_k_experts": None}, r"has no 'top_k_experts'"),
    "beside": ("gemma4-window", {"num_experts": 5}, r"experts\.gate_up_proj' has shape \[6, 64, 64\], but config\.json"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_moe_tensors_unlike_the_config_are_refused_by_name(references: References, tmp_path: Path, name: str) -> None:
    case, changes, message = BROKEN[name]
    changed = shutil.copytree(references(case).directory, tmp_path / "changed")
    renamed = {"num_experts": "num_local_experts"} if "num_local_experts" in read_values(changed) else {}
    change_config(changed, **{renamed.get(key, key): value for key, value in changes.items()})
    with pytest.raises(CheckpointError, match=message) as caught:
        open_weights(changed, read_config(changed))
    assert "\n" not in str(caught.value)


def test_missing_moe_router_is_named(references: References, tmp_path: Path) -> None:
    changed = shutil.copytree(references("mixtral").directory, tmp_path / "changed")
    edit_tensors(changed, lambda tensors: tensors.pop(next(name for name in tensors if name.endswith("gate.weight"))))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor: model\.layers\.0\.mlp\.gate\.weight"):
        open_weights(changed, read_config(changed))


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("gemma4-window", {"num_experts_per_tok": 1, "experts_per_token": 1}),
        ("qwen3_moe", {"top_k_experts": 1, "experts_per_token": 1}),
        ("gpt_oss", {"layer_types": None, "sliding_window_pattern": 1}),
    ],
)
def test_config_fields_unknown_to_a_moe_family_are_ignored(
    references: References, tmp_path: Path, case: str, changes: dict[str, Any]
) -> None:
    """As in transformers, whose classes do not read them either."""
    changed = shutil.copytree(references(case).directory, tmp_path / "changed")
    assert read_config(change_config(changed, **changes)) == read_config(references(case).directory)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("down_proj_scales", None, r"lacks model\.layers\.0\.mlp\.experts\.down_proj_scales"),
        ("gate_up_proj_blocks", None, r"lacks model\.layers\.0\.mlp\.experts\.gate_up_proj_blocks"),
        ("gate_up_proj_bias", None, r"lacks model\.layers\.0\.mlp\.experts\.gate_up_proj_bias"),
        (
            "down_proj_scales",
            lambda tensor: tensor[:-1],
            r"down_proj_scales' is of .* shape \[5, 64, 3\].* shape \[6, 64, 3\]",
        ),
        ("down_proj_blocks", lambda tensor: tensor.view(torch.int8), r"down_proj_blocks' is of type I8 and shape"),
    ],
)
def test_damaged_mxfp4_expert_stack_is_refused_by_name(
    references: References, tmp_path: Path, seed: int, name: str, change: Callable[[Any], Any] | None, message: str
) -> None:
    from safetensors.torch import load_file, save_file

    packed = write_mxfp4(references("gpt_oss").directory, tmp_path / "packed", seed)
    tensors = load_file(packed / "model.safetensors")
    tensor = tensors.pop(f"model.layers.0.mlp.experts.{name}")
    if change is not None:
        tensors[f"model.layers.0.mlp.experts.{name}"] = change(tensor).contiguous()
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_weights(packed, read_config(packed))


@pytest.mark.parametrize(
    ("case", "key", "value", "message"),
    [
        (
            "gpt_oss",
            "gpt-oss.attention.sliding_window",
            0,
            r"gpt-oss\.attention\.sliding_window = 0",
        ),
        ("gemma4-window", "gemma4.attention.sliding_window", 0, r"gemma4\.attention\.sliding_window = 0"),
        ("gpt_oss", "gpt-oss.expert_used_count", 50, r"gpt-oss\.expert_used_count = 50, but there are only 6 experts"),
        ("gpt_oss", "gpt-oss.expert_count", 5000, r"gpt-oss\.expert_count = 5000, expected"),
        (
            "gpt_oss",
            "gpt-oss.attention.head_count",
            3,
            r"gpt-oss\.attention\.head_count = 3 must be a multiple",
        ),
    ],
)
def test_moe_metadata_error_names_the_gguf_key(
    references: References, tmp_path: Path, case: str, key: str, value: int, message: str
) -> None:
    path = write_gguf(references(case).directory, tmp_path / "model.gguf", metadata={key: value})
    with pytest.raises(CheckpointError, match=message):
        read_model_config(path)


@pytest.mark.parametrize("case", ["gpt_oss", "qwen2_moe-plain", "olmoe", "glm4_moe", "qwen3_moe", "mixtral"])
def test_gguf_without_lm_head_is_read_or_refused_as_by_llama_cpp(references: References, tmp_path: Path, case: str) -> None:
    copy = shutil.copytree(references(case).directory, tmp_path / "copy")
    edit_tensors(copy, lambda tensors: tensors.pop("lm_head.weight"))
    config = read_model_config(path := write_gguf(copy, tmp_path / "model.gguf"))
    if case in ("glm4_moe", "qwen3_moe", "mixtral"):
        assert config.tied_embeddings
        assert not open_weights(path, config).has_tensor("lm_head.weight")
    else:
        with pytest.raises(CheckpointError, match=r"lacks 1 tensor: output\.weight"):
            open_weights(path, config)
