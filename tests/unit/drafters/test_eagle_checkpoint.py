"""How files of EAGLE heads are recognised, and the errors for unusable ones."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.eagle_checkpoints import DRAFT_IDS, EAGLE1, EAGLE3, VOCAB_SIZE, Tensors, eagle1_tensors, eagle3_tensors, write_head
from harness.model_configs import make_config
from paceline.drafters import open_head_files
from paceline.drafters.eagle.checkpoint import EagleCheckpoint, open_eagle_checkpoint
from paceline.drafters.eagle.config import TENSOR_NAME_ALIASES, read_eagle_config
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.config import ModelConfig, WeightType
from paceline.models.rope_config import RopeConfig, RopeType

TARGET = make_config(
    family="llama", vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_layers=32, num_heads=4, num_kv_heads=2, head_size=8,
    norm_eps=1e-5, max_positions=512, rope=RopeConfig(theta=5e5), weight_type=WeightType.F32,
)  # fmt: skip
IDS = "eagle_aux_hidden_state_layer_ids"


def opened(directory: Path, config: Mapping[str, Any], tensors: Tensors, target: ModelConfig = TARGET) -> EagleCheckpoint:
    files = HeadFiles.open(write_head(directory, config, tensors))
    return open_eagle_checkpoint(files, read_eagle_config(files, target), target)


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: values for name, values in tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("config", "boundaries"),
    [
        ({}, (2, 16, 29)),  # the default
        ({IDS: [29, 2, 16]}, (2, 16, 29)),  # in execution order, whatever their order in the file
        ({"eagle_config": {IDS: [1, 15, 28]}}, (2, 16, 29)),  # outputs of layers
        ({IDS: [24, 30, 32]}, (24, 30, 32)),  # the last one is the last layer's output
        ({IDS: [1, 15, 28], "speculators_model_type": "eagle3"}, (1, 15, 28)),  # boundaries, by definition
        ({IDS: [0, 15, 28]}, (0, 15, 28)),
    ],
)
def test_eagle3_hidden_state_layers_are_read_from_the_config(
    config: Mapping[str, Any], boundaries: tuple[int, ...], tmp_path: Path
) -> None:
    assert opened(tmp_path, {**EAGLE3, **config}, eagle3_tensors()).config.layer_boundaries == boundaries


def test_partial_rotary_factor_of_speculators_heads_is_ignored(tmp_path: Path) -> None:
    layers = {**EAGLE3, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    head = {"speculators_model_type": "eagle3", "norm_before_residual": False, "norm_output": False, IDS: [0, 15, 32]}
    files = HeadFiles.open(write_head(tmp_path, {**head, "transformer_layer_config": layers}, eagle3_tensors()))
    config = read_eagle_config(files, TARGET)
    assert config.layers.attention.rope.rotated_fraction == 1.0


@pytest.mark.parametrize("ids", [[2, 16], [2, 16, 33], [2, 16, 16], [1, 2, 3, 4]])
def test_invalid_eagle3_hidden_state_layers_are_refused(ids: list[int], tmp_path: Path) -> None:
    with pytest.raises(IncompatibleDrafterError, match="reads 3 of the target's layer boundaries"):
        opened(tmp_path, {**EAGLE3, IDS: ids}, eagle3_tensors())


def test_eagle3_default_layers_are_refused_for_a_shallow_target(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleDrafterError, match=r"the default gives \[2, 2, 1\] for its 4 layers"):
        opened(tmp_path, EAGLE3, eagle3_tensors(), replace(TARGET, layers=TARGET.layers[:4]))


def test_eagle_rope_theta_does_not_come_from_the_target(tmp_path: Path) -> None:
    assert opened(tmp_path / "absent", EAGLE3, eagle3_tensors()).config.layers.attention.rope.theta == 10000.0
    assert opened(tmp_path / "given", {**EAGLE3, "rope_theta": 1e6}, eagle3_tensors()).config.layers.attention.rope.theta == 1e6
    scaled = {**EAGLE3, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert opened(tmp_path / "linear", scaled, eagle3_tensors()).config.layers.attention.rope.type is RopeType.LINEAR
    text = {**EAGLE3, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    assert opened(tmp_path / "mrope", text, eagle3_tensors()).config.layers.attention.rope.type is RopeType.DEFAULT


def test_eagle_draft_vocabulary_offsets_become_target_ids(tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    assert tensors["d2t"][1] == DRAFT_IDS[1] - 1
    ids = opened(tmp_path / "narrow", EAGLE3, tensors).target_ids
    assert ids is not None
    assert ids.tolist() == DRAFT_IDS
    marks = {**tensors, "t2d": tensors["t2d"].to(torch.uint8)}
    assert opened(tmp_path / "old", EAGLE3, marks).target_ids is not None
    whole = {**EAGLE3, "draft_vocab_size": VOCAB_SIZE}
    zeros = {"d2t": torch.zeros(VOCAB_SIZE, dtype=torch.int64)}
    assert opened(tmp_path / "zeros", whole, eagle3_tensors(whole, draft_ids=None) | zeros).target_ids is None
    assert opened(tmp_path / "absent", whole, eagle3_tensors(whole, draft_ids=None)).target_ids is None


@pytest.mark.parametrize(
    ("tables", "kind", "message"),
    [
        ({"d2t": torch.tensor(DRAFT_IDS)}, IncompatibleDrafterError, "holds ids in place of offsets"),
        ({"d2t": torch.zeros(29, dtype=torch.int64)}, CheckpointError, r"d2t has \[29\] entries for 30 rows"),
        ({"d2t": -torch.arange(30)}, IncompatibleDrafterError, "do not ascend"),
        ({"d2t": torch.arange(30)}, CheckpointError, "d2t and t2d name different target ids"),
        ({"d2t": torch.zeros(30)}, CheckpointError, "expected integers"),
    ],
)
def test_invalid_eagle_draft_vocabulary_table_is_refused(tables: Tensors, kind: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=message):
        opened(tmp_path, EAGLE3, eagle3_tensors() | tables)


def test_missing_and_misshapen_eagle_tensors_are_all_named(tmp_path: Path) -> None:
    broken = without(eagle3_tensors(), "midlayer.hidden_norm.weight", "midlayer.self_attn.v_proj.weight", "norm.weight")
    broken["midlayer.mlp.down_proj.weight"] = torch.zeros(32, 40)
    with pytest.raises(CheckpointError) as error:
        opened(tmp_path, EAGLE3, broken)
    text = str(error.value)
    assert "layers.0.hidden_norm.weight [32]" in text
    assert "layers.0.self_attn.v_proj.weight [16, 64]" in text
    assert "norm.weight [32]" in text
    assert "layers.0.mlp.down_proj.weight [32, 40] instead of [32, 48]" in text


def test_eagle_head_with_a_draft_vocabulary_needs_its_own_lm_head(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lm_head.weight \[30, 32\]"):
        opened(tmp_path / "narrow", EAGLE3, without(eagle3_tensors(), "lm_head.weight"))
    whole = without(eagle3_tensors({**EAGLE3, "draft_vocab_size": None}, draft_ids=None), "lm_head.weight")
    checkpoint = opened(tmp_path / "whole", {**EAGLE3, "draft_vocab_size": None}, whole)
    assert not checkpoint.weights.has_tensor("lm_head.weight")


def test_tie_word_embeddings_of_an_eagle_head_is_ignored(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, {**EAGLE3, "tie_word_embeddings": True}, eagle3_tensors(has_own_embedding=True))
    assert checkpoint.weights["lm_head.weight"].shape == (30, 32)


def test_unknown_eagle_tensors_are_refused_and_unused_ones_ignored(tmp_path: Path) -> None:
    known = {"verifier_norm.weight": torch.zeros(32), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    opened(tmp_path / "known", EAGLE1, eagle1_tensors() | known)
    with pytest.raises(CheckpointError, match=r"holds 1 tensor: strange\.weight that no known eagle head has"):
        opened(tmp_path / "strange", EAGLE1, eagle1_tensors() | known | {"strange.weight": torch.zeros(3)})


def test_eagle_sizes_are_taken_from_the_tensors_not_the_config(tmp_path: Path) -> None:
    """As in a head whose config describes a mixture of experts that its file does not hold."""
    wide = {**EAGLE1, "num_key_value_heads": 4, "intermediate_size": 80}
    checkpoint = opened(tmp_path, {**EAGLE1, "num_local_experts": 8}, eagle1_tensors(wide))
    assert checkpoint.config.layers.attention.num_kv_heads == 4
    assert checkpoint.config.layers.layers[0].mlp.intermediate_size == 80


def test_eagle_biases_are_used_if_stored_whatever_the_config_says(tmp_path: Path) -> None:
    assert opened(tmp_path / "with", {**EAGLE1, "bias": False}, eagle1_tensors()).weights.has_tensor("fc.bias")
    assert not opened(tmp_path / "without", {**EAGLE1, "bias": True}, eagle1_tensors(bias=False)).weights.has_tensor("fc.bias")


def test_eagle_context_length_is_read_from_the_config_or_2048(tmp_path: Path) -> None:
    lengthless = {name: value for name, value in EAGLE1.items() if name != "max_position_embeddings"}
    assert opened(tmp_path / "absent", lengthless, eagle1_tensors()).config.layers.max_positions == 2048
    other = {**lengthless, "max_sequence_length": 4096}
    assert opened(tmp_path / "sequence", other, eagle1_tensors()).config.layers.max_positions == 4096


@pytest.mark.parametrize(
    ("config", "target", "message"),
    [
        (EAGLE3, replace(TARGET, hidden_size=40), "fc.weight has 96 columns"),
        (EAGLE3, replace(TARGET, vocab_size=9000), "token ids|d2t"),
        ({**EAGLE3, "target_hidden_size": 48}, TARGET, "made for another model"),
        ({**EAGLE3, "eagle_config": {"parallel_draft_step": 3}}, TARGET, "parallel_draft_step"),
        ({**EAGLE3, "eagle_config": {"use_mtp_layernorm": True}}, TARGET, "use_mtp_layernorm"),
    ],
)
def test_eagle_head_for_another_target_is_refused(config: Mapping[str, Any], target: ModelConfig, message: str, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleDrafterError, match=message):
        opened(tmp_path, config, eagle3_tensors(), target)


def test_eagle_head_without_config_is_refused(tmp_path: Path) -> None:
    directory = write_head(tmp_path / "head", EAGLE1, eagle1_tensors())
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        read_eagle_config(HeadFiles.open(directory), TARGET)


def test_eagle3_layer_name_prefixes_are_equivalent(tmp_path: Path) -> None:
    files = [
        HeadFiles.open(write_head(tmp_path / name.strip("."), EAGLE3, eagle3_tensors(first_layer=name))).with_canonical_names(
            TENSOR_NAME_ALIASES
        )
        for name in ("midlayer.", "layers.0.", "model.midlayer.")
    ]
    assert all(one.kind is HeadKind.EAGLE3 for one in files)
    assert files[0].tensors.keys() == files[1].tensors.keys() == files[2].tensors.keys()
    assert np.array_equal(files[0].weight("norm.weight").array, eagle3_tensors()["norm.weight"].numpy())


NESTED = {"model_type": "eagle", "model": {**EAGLE1, "model_type": "llama"}}
OLD = {"speculators_model_type": "eagle", "transformer_layer_config": {**EAGLE1, "model_type": "llama"}}
NORMS = ("embedding_layernorm.weight", "transformer.input_layernorm.weight", "pre_lm_head_layernorm.weight")


def old_tensors(*norms: str) -> Tensors:
    """An EAGLE head of speculators 0.1, with some of its norms."""
    names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    plain = without(eagle1_tensors(bias=False), "embed_tokens.weight")
    renamed = {next((new + name[len(old) :] for old, new in names.items() if name.startswith(old)), name): t for name, t in plain.items()}
    return renamed | {norm: torch.ones(32) for norm in norms}


def test_norms_of_an_old_speculators_head_follow_its_config(tmp_path: Path) -> None:
    assert opened(tmp_path / "said", {**OLD, "layernorms": True}, old_tensors(*NORMS)).config.has_final_norm
    assert opened(tmp_path / "unsaid", OLD, old_tensors(*NORMS)).config.has_input_norm
    assert not opened(tmp_path / "none", {**OLD, "layernorms": False}, old_tensors()).config.has_embedding_norm
    with pytest.raises(CheckpointError, match=r"it lacks 1 tensor: norm\.weight \[32\]"):
        opened(tmp_path / "few", {**OLD, "layernorms": True}, old_tensors(*NORMS[:2]))
    with pytest.raises(CheckpointError, match="holds 3 tensors: "):
        opened(tmp_path / "denied", {**OLD, "layernorms": False}, old_tensors(*NORMS))


def test_eagle1_head_may_have_its_own_lm_head(tmp_path: Path) -> None:
    """In its plain form, and with a config that vLLM nests; without one the target's is used."""
    own = {"lm_head.weight": torch.ones(VOCAB_SIZE, 32)}
    for name, config, tensors in (("plain", EAGLE1, eagle1_tensors()), ("nested", NESTED, eagle1_tensors(bias=False))):
        checkpoint = opened(tmp_path / name, config, tensors | own)
        assert checkpoint.config.kind is HeadKind.EAGLE
        assert checkpoint.config.has_own_lm_head
        assert checkpoint.weights["lm_head.weight"].shape == (VOCAB_SIZE, 32)
        assert not opened(tmp_path / f"{name}-without", config, tensors).weights.has_tensor("lm_head.weight")
    with pytest.raises(IncompatibleDrafterError, match="has 9000 token ids"):
        opened(tmp_path / "other", EAGLE1, eagle1_tensors() | {"lm_head.weight": torch.ones(9000, 32)})


@pytest.mark.parametrize(
    ("ids", "rows", "kind", "message"),
    [
        ([5, 6, 96], 3, None, ""),
        ([5, 6, 97], 3, IncompatibleDrafterError, "token_map has 3 ids, from 5 to 97, of the target's 97"),
        ([5, 6, 6], 3, IncompatibleDrafterError, "each at most once"),
        ([], 3, IncompatibleDrafterError, "token_map has 0 ids, none"),
        ([5, 6, 96], 50, CheckpointError, "token_map has 3 ids for 50 rows"),
        ([5, 6, 96], None, CheckpointError, r"lacks 1 tensor: lm_head\.weight \[3, 32\]"),
    ],
)
def test_invalid_eagle_token_map_is_refused(
    ids: list[int], rows: int | None, kind: type[Exception] | None, message: str, tmp_path: Path
) -> None:
    tensors = eagle1_tensors(bias=False) | {"token_map": torch.tensor(ids, dtype=torch.int64)}
    tensors |= {} if rows is None else {"lm_head.weight": torch.ones(rows, 32)}
    if kind is None:
        assert opened(tmp_path, NESTED, tensors).config.layers.vocab_size == 3
        return
    with pytest.raises(kind, match=message):
        opened(tmp_path, NESTED, tensors)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, 8),
        ({"layer_types": ["sliding_attention", "linear_attention"], "sliding_window": 8}, 8),  # of the target's other layers
        ({"layer_types": ["full_attention"], "sliding_window": 8}, None),
        ({"layer_types": ["sliding_attention"], "sliding_window": None}, None),
        ({"sliding_window": 8}, None),
        ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, 8),
        ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8}, None),  # its first 28 layers see everything
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 8}, None),  # switched off
    ],
)
def test_sliding_window_of_an_eagle_head_is_read_from_its_config(config: Mapping[str, Any], window: int | None, tmp_path: Path) -> None:
    assert opened(tmp_path, {**EAGLE3, **config}, eagle3_tensors()).config.layers.attention.window == window


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        ({"layer_types": ["chunked_attention"], "sliding_window": 8}, CheckpointError, "expected sliding_attention or full_attention"),
        ({"layer_types": [], "sliding_window": 8}, CheckpointError, "for each of 1 layers"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 0}, CheckpointError, "sliding_window = 0"),
        ({"logit_scale": 0.5}, IncompatibleDrafterError, "logit_scale = 0.5: heads that scale logits cannot be used"),
        ({"norm_before_fc": True}, CheckpointError, r"lacks 1 tensor: input_norm\.weight \[96\]"),
        ({"fc_norm": True}, CheckpointError, r"lacks 3 tensors: fc_norm\.0\.weight"),
        (
            {"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "gemma3_text"}},
            IncompatibleDrafterError,
            "its layers are 'gemma3_text'; eagle3 heads with layers of llama, qwen3 can be used",
        ),
        (
            {"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "qwen3"}},
            CheckpointError,
            r"lacks 2 tensors: layers\.0\.self_attn\.q_norm",
        ),
    ],
)
def test_unsupported_eagle_config_switches_are_refused(
    config: Mapping[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        opened(tmp_path, {**EAGLE3, **config}, eagle3_tensors())


def test_tensor_stored_under_two_names_is_refused(tmp_path: Path) -> None:
    more = {"layers.0.hidden_norm.weight": torch.ones(32)}
    with pytest.raises(CheckpointError, match=r"holds layers\.0\.hidden_norm\.weight under two names"):
        opened(tmp_path, EAGLE3, eagle3_tensors() | more)


@pytest.mark.parametrize("named", ["xpress", "mlp"])
def test_unsupported_speculators_method_is_named_in_the_error(named: str, tmp_path: Path) -> None:
    head = write_head(tmp_path, {**EAGLE3, "speculators_model_type": named}, eagle3_tensors())
    with pytest.raises(IncompatibleDrafterError, match=f"is a {named} drafter, which is not supported; those of medusa, eagle, .* are"):
        open_head_files(head)
