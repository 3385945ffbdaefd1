"""The modules of mixtures of experts, which are mixtures too, in directories and in GGUF files."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoint_files import change_config, edit_tensors
from harness.checkpoints import VOCAB_SIZE
from harness.expert_checkpoints import in_stacks
from harness.gguf_checkpoints import numbered_vocabulary, write_gguf
from harness.head_engines import GREEDY, SAMPLED, check_drafting, load_module, open_llm
from harness.mtp_checkpoints import random_matrix, write_glm4_moe
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.mtp import load_mtp
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.gguf.config import gguf_config
from paceline.models.gguf.file import open_gguf
from paceline.models.gguf.weights import num_mtp_modules, open_mtp_module
from paceline.models.weights import as_float32

TOKENIZER = numbered_vocabulary(VOCAB_SIZE)
MODULE_PARTS = ("fc.weight", "embedding_norm.weight", "feature_norm.weight", "final_norm.weight")
pytestmark = pytest.mark.usefixtures("always_drafts")


@pytest.mark.parametrize(("case", "quantization"), [("glm4_moe", "none"), ("glm4_moe-groups", "int8"), ("deepseek_v3", "int8")])
def test_moe_model_drafts_with_its_mtp_module(tmp_path: Path, case: str, quantization: str) -> None:
    """GLM-4.5: the module is a mixture too, its experts one by one or in stacks; in batches and alone, greedy and sampled."""
    bare = write_glm4_moe(tmp_path / "bare", case, has_module=False)
    plain = open_llm(bare, "none")
    with pytest.raises(IncompatibleDrafterError, match="holds no mtp head"):
        open_llm(bare, "mtp")
    target = write_glm4_moe(tmp_path / "target", case)
    for directory in (target, in_stacks(target, tmp_path / "stacked")):
        llm = open_llm(directory, "mtp", draft_quantization=quantization)
        for params in (GREEDY, SAMPLED):
            check_drafting(llm, plain, params)
    assert any("contains a drafting head: use drafter='mtp'" in notice for notice in open_llm(target, "none").notices)
    assert open_llm(target, "auto").drafter_name == "suffix+mtp"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_routed_experts": 5}, r"layers\.3\.mlp\.experts\.\* are 6 experts, but config\.json has n_routed_experts = 5"),
        ({"n_routed_experts": 7}, r"layers\.3\.mlp\.experts\.\* are 6 experts, but config\.json has n_routed_experts = 7"),
        ("mlp.gate.weight", r"it lacks 1 tensor: layers\.3\.mlp\.gate\.weight \[6, 64\]"),
        ("mlp.gate.e_score_correction_bias", r"it lacks 1 tensor: layers\.3\.mlp\.gate\.e_score_correction_bias \[6\]"),
        ("mlp.shared_experts.up_proj.weight", r"it lacks 1 tensor: layers\.3\.mlp\.shared_experts\.up_proj\.weight \[32, 64\]"),
        ("mlp.experts.4.up_proj.weight", r"it lacks 1 tensor: layers\.3\.mlp\.experts\.4\.up_proj\.weight \[32, 64\]"),
    ],
)
def test_mtp_expert_count_unlike_the_config_is_refused(tmp_path: Path, change: "dict[str, int] | str", message: str) -> None:
    target = write_glm4_moe(tmp_path)
    config = read_model_config(target)
    weights = open_weights(target, config)
    if isinstance(change, str):
        edit_tensors(target, lambda tensors: tensors.pop(f"model.layers.3.{change}"))
    else:
        change_config(target, **change)
        config = read_model_config(target)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_mtp(HeadFiles.open(target), config, weights)
    assert "\n" not in str(raised.value)
    if not isinstance(change, str):
        with pytest.raises(CheckpointError, match=r"lacks|holds .*model\.layers\.1\.mlp\.experts\.5"):
            open_weights(target, config)  # of the model itself


def test_mtp_expert_stack_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    target = in_stacks(write_glm4_moe(tmp_path / "one-by-one"), tmp_path / "target")
    weights = open_weights(target, read_model_config(target))
    name = "model.layers.3.mlp.experts.down_proj"
    edit_tensors(target, lambda tensors: tensors.update({name: tensors[name][:4]}))
    message = "tensor 'layers.3.mlp.experts.down_proj' has shape [4, 64, 32], expected [6, 64, 32]: config.json has n_routed_experts = 6"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_mtp(HeadFiles.open(target), read_model_config(target), weights)


def test_moe_gguf_drafts_with_its_mtp_module(tmp_path: Path) -> None:
    """Blocks count it; its values are those of the directory, or rounded as the model's are."""
    directory = write_glm4_moe(tmp_path / "model", "glm4_moe-groups")
    plain = write_gguf(directory, tmp_path / "plain.gguf", metadata=TOKENIZER)
    module, expected = load_module(plain), load_module(directory)
    assert module.config == expected.config
    assert list(module.weights) == list(expected.weights)
    for name in module.weights:
        assert np.array_equal(as_float32(module.weights[name]), as_float32(expected.weights[name])), name
    quantised = write_gguf(directory, tmp_path / "quantised.gguf", "Q8_0", metadata=TOKENIZER)
    without = open_llm(quantised, "none")
    (notice,) = [notice for notice in without.notices if "head" in notice]
    assert notice == f"{quantised} also contains a drafting head: use drafter='mtp'"
    for drafter, quantization in (("mtp", "none"), (str(quantised), "int4")):
        llm = open_llm(quantised, drafter, draft_quantization=quantization)
        assert llm.drafter_name == "mtp"
        for params in (GREEDY, SAMPLED):
            check_drafting(llm, without, params)


def test_gguf_mtp_module_ignores_copies_of_target_tensors_only(tmp_path: Path) -> None:
    directory = write_glm4_moe(tmp_path / "model")
    copies = {"model.layers.3.embed_tokens.weight": random_matrix(1), "model.layers.3.shared_head.head.weight": random_matrix(2)}
    edit_tensors(directory, lambda tensors: tensors.update(copies))
    file = open_gguf(write_gguf(directory, tmp_path / "model.gguf", metadata=TOKENIZER))
    assert {"blk.3.nextn.embed_tokens.weight", "blk.3.nextn.shared_head_head.weight"} <= set(file.tensors)
    config = gguf_config(file)
    assert {name for name in open_mtp_module(file, config, config.layers[-1]) if not name.startswith("layers.0.")} == set(MODULE_PARTS)
    more = {name.replace("blk.3.", "blk.4."): tensor for name, tensor in file.tensors.items() if name.startswith("blk.3.")}
    assert [num_mtp_modules(replace(file, tensors={**file.tensors, **tensors}), config) for tensors in ({}, more)] == [1, 2]
    strange = replace(file, tensors={**file.tensors, "blk.3.attn_gate.weight": file.tensors["blk.3.attn_q.weight"]})
    with pytest.raises(CheckpointError, match=r"holds 1 tensor: blk\.3\.attn_gate\.weight that no known mtp head has"):
        open_mtp_module(strange, config, config.layers[-1])


def test_gguf_with_an_incomplete_mtp_module_is_refused(tmp_path: Path) -> None:
    bare = write_glm4_moe(tmp_path / "bare", has_module=False)
    path = write_gguf(bare, tmp_path / "bare.gguf", metadata=TOKENIZER)
    with pytest.raises(IncompatibleDrafterError, match="GGUF file that holds no mtp head"):
        open_llm(path, "mtp")
    directory = write_glm4_moe(tmp_path / "model")
    path = write_gguf(directory, tmp_path / "unsaid.gguf", metadata={**TOKENIZER, "glm4moe.nextn_predict_layers": 0})
    with pytest.raises(CheckpointError, match=r"holds 4 tensors: blk\.3\.nextn\..* that a glm4_moe model does not have"):
        open_llm(path, "none")
    edit_tensors(directory, lambda tensors: tensors.pop("model.layers.3.mlp.gate.weight"))
    edit_tensors(directory, lambda tensors: tensors.pop("model.layers.3.hnorm.weight"))
    path = write_gguf(directory, tmp_path / "part.gguf", metadata=TOKENIZER)
    open_llm(path, "none")
    with pytest.raises(
        CheckpointError, match=r"module in block 3 lacks 2 tensors: blk\.3\.ffn_gate_inp\.weight, blk\.3\.nextn\.hnorm\.weight;"
    ):
        open_llm(path, "mtp")
    for count in (4, 9):
        path = write_gguf(directory, tmp_path / "many.gguf", metadata={**TOKENIZER, "glm4moe.nextn_predict_layers": count})
        with pytest.raises(CheckpointError, match=rf"glm4moe\.nextn_predict_layers = {count}, expected fewer than block_count"):
            open_llm(path, "none")
