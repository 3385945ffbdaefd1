"""The MTP drafter: modules inside a model's own checkpoint, loaded, named where they are wrong, and right where they must be."""

from pathlib import Path

import numpy as np
import pytest

from harness.checkpoint_files import edit_tensors
from harness.checkpoints import write_checkpoint
from harness.head_engines import GREEDY, PROMPTS, SAMPLED, check_drafting, follow, ids_of, load_module, open_llm
from harness.medusa_checkpoints import write_successor_target
from harness.mtp_checkpoints import (
    LAYOUTS,
    Arrays,
    add_module,
    perfect_module,
    random_matrix,
    random_module,
    write_mimo,
    write_speculators,
)
from harness.unconventional_heads import module_with_signs
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.mtp import load_mtp
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.weights import as_float32

pytestmark = pytest.mark.usefixtures("always_drafts")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_model_file_with_an_mtp_module_runs_without_it(tmp_path: Path, layout: str) -> None:
    target = write_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    before = ids_of(open_llm(target, "none").generate(PROMPTS, GREEDY))
    add_module(target, layout, random_module(), num_layers=2)
    llm = open_llm(target, "none")
    assert ids_of(llm.generate(PROMPTS, GREEDY)) == before
    assert any("contains a drafting head: use drafter='mtp'" in notice for notice in llm.notices)
    for drafter in ("mtp", ["ngram", "mtp"]):
        assert not any("contains a drafting head" in notice for notice in open_llm(target, drafter).notices)


def test_extra_decoder_layer_that_is_no_mtp_module_is_refused(tmp_path: Path) -> None:
    """config.json names too few layers: running without the others would give other tokens."""
    target = write_checkpoint(tmp_path, "qwen3", num_hidden_layers=3)
    config = target / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"holds 11 tensors: model\.layers\.2"):
        open_llm(target, "none")


def test_missing_and_incomplete_mtp_modules_are_named(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    with pytest.raises(IncompatibleDrafterError, match=r"holds no mtp head"):
        open_llm(target, "mtp")
    add_module(target, "mtp", random_module(), num_layers=2)
    edit_tensors(target, lambda tensors: tensors.pop("mtp.norm.weight"))
    edit_tensors(target, lambda tensors: tensors.pop("mtp.layers.0.self_attn.k_norm.weight"))
    with pytest.raises(
        CheckpointError, match=r"it lacks 2 tensors: mtp\.layers\.0\.self_attn\.k_norm\.weight \[16\], mtp\.norm\.weight \[64\]"
    ):
        load_module(target)

    def widen(tensors: Arrays) -> None:
        tensors["mtp.norm.weight"] = np.zeros(64, np.float32)
        tensors["mtp.layers.0.self_attn.k_norm.weight"] = np.zeros(16, np.float32)
        tensors["mtp.layers.0.self_attn.q_proj.weight"] = np.zeros((128, 64), np.float32)  # with an output gate, as hybrid models have it

    edit_tensors(target, widen)
    with pytest.raises(
        CheckpointError, match=r"it holds 1 tensor: mtp\.layers\.0\.self_attn\.q_proj\.weight \[128, 64\] instead of \[64, 64\]"
    ):
        load_module(target)


def test_mtp_norm_weights_stored_minus_one_get_one_added(tmp_path: Path) -> None:
    arrays = random_module()
    for layout in LAYOUTS:
        target = write_checkpoint(tmp_path / layout, "qwen3", num_hidden_layers=2)
        module = load_module(add_module(target, layout, arrays, num_layers=2))
        for ours, name in {"final_norm": "norm", "layers.0.q_norm": "layer.self_attn.q_norm"}.items():
            assert np.allclose(as_float32(module.weights[f"{ours}.weight"]), arrays[name], atol=1e-6)
        assert module.config.normed_recurrence


def test_mtp_matrices_equal_to_those_of_the_target_are_shared(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    config = read_model_config(target)
    own = {
        name: as_float32(open_weights(target, config)[f"{ours}.weight"]).copy()
        for name, ours in {"lm_head": "lm_head", "embed": "embedding"}.items()
    }
    add_module(target, "extra_layer", random_module(), num_layers=2, **own)
    weights = open_weights(target, config)
    module = load_mtp(HeadFiles.open(target), config, weights)
    assert module.weights["lm_head.weight"] is weights["lm_head.weight"]
    assert module.embedding is weights["embedding.weight"]
    edit_tensors(target, lambda tensors: tensors.update({"model.layers.2.shared_head.head.weight": random_matrix(1)}))
    module = load_module(target)
    assert np.array_equal(as_float32(module.weights["lm_head.weight"]), own["lm_head"]), "the target's, as transformers has it"


def test_mtp_modules_after_the_first_are_ignored_with_a_notice(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    add_module(target, "extra_layer", random_module(), num_layers=2)
    assert load_module(target).notices == ()
    add_module(target, "extra_layer", random_module(seed=1), num_layers=3)
    assert any("of 2 MTP modules the first one drafts every position" in notice for notice in load_module(target).notices)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("mtp", "mtp.shared_head.weight"),
        ("mtp", "mtp.layers.0.mlp.shared_expert.up_proj.weight"),
        ("extra_layer", "model.layers.2.self_attn.gate_proj.weight"),
        ("mtp_layers", "model.mtp_layers.0.attention_sink"),
    ],
)
def test_unknown_tensors_of_an_mtp_module_are_refused(layout: str, name: str, tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path, "qwen3", num_hidden_layers=2)
    add_module(target, layout, random_module(), num_layers=2)
    load_module(target)
    edit_tensors(target, lambda tensors: tensors.update({name: np.zeros(3, np.float32)}))
    with pytest.raises(CheckpointError, match=f"holds 1 tensor: {name.removeprefix('model.')} that no known mtp head has"):
        load_module(target)


def test_mtp_modules_after_the_first_are_ignored_in_every_layout(tmp_path: Path) -> None:
    for layout, name in (("mtp", "mtp.layers.1.mlp.up_proj.weight"), ("mtp_layers", "model.mtp_layers.1.input_proj.weight")):
        target = write_checkpoint(tmp_path / layout, "qwen3", num_hidden_layers=2)
        add_module(target, layout, random_module(), num_layers=2)
        edit_tensors(target, lambda tensors: tensors.update({name: np.zeros((2, 2), np.float32)}))  # noqa: B023
        assert load_module(target).notices == (f"{target}: of 2 MTP modules the first one drafts every position",)


def test_mimo_drafts_with_its_mtp_module(tmp_path: Path) -> None:
    """Its target is a qwen2 by another name: biases, no norms of q and k; in batches and alone, greedy and sampled."""
    plain = open_llm(write_mimo(tmp_path, num_hidden_layers=2), "none")
    target = add_module(tmp_path, "mtp_layers", random_module(family="mimo"), num_layers=2)
    llm = open_llm(target, "mtp")
    for params in (GREEDY, SAMPLED):
        check_drafting(llm, plain, params)
    assert any("drafter='mtp'" in notice for notice in open_llm(target, "none").notices)


@pytest.mark.parametrize("is_normed", [False, True])
def test_mtp_normed_recurrence_option_selects_the_unnormed_state(is_normed: bool, tmp_path: Path) -> None:
    target, successor = write_successor_target(tmp_path, "qwen3")
    add_module(target, "extra_layer", module_with_signs(successor, is_normed=is_normed), num_layers=2)
    llm = open_llm(target, "mtp", drafter_options={} if is_normed else {"normed_recurrence": False})
    (output,) = llm.generate([[5, 6, 7]], GREEDY)
    assert output.speculation.acceptance_rate == 1.0


def test_own_directory_as_drafter_selects_its_mtp_module(tmp_path: Path) -> None:
    """A draft model that is the target itself could never pay."""
    target = write_checkpoint(tmp_path / "target", "qwen3", num_hidden_layers=2)
    add_module(target, "extra_layer", random_module(), num_layers=2)
    assert open_llm(target, f"{target}/../target").drafter_name == "mtp"
    other = write_checkpoint(tmp_path / "other", "qwen3", num_hidden_layers=2)
    assert open_llm(other, str(target)).drafter_name == "draft_model"


def test_speculators_mtp_module_concatenates_the_embedding_first(tmp_path: Path) -> None:
    """With sizes and rotations of its own config; a layer of another family is refused."""
    target, successor = write_successor_target(tmp_path / "target", "qwen3", sharpness=3.0)
    head = write_speculators(tmp_path / "head", perfect_module(), target)
    llm = open_llm(target, str(head))
    for params in (GREEDY, SAMPLED):
        for output, prompt in zip(llm.generate(PROMPTS, params), PROMPTS, strict=True):
            assert output.token_ids == follow(successor.tolist(), prompt[-1])
            assert output.speculation.num_accepted_tokens == output.speculation.num_draft_tokens > 28
    texts = {"mamba": "'mamba'", "qwen3_next": r"expected \[128, 128\] for q_proj, attention_gate"}
    for number, (family, text) in enumerate(texts.items()):
        other = write_speculators(tmp_path / f"other{number}", perfect_module(), target, model_type=family)
        with pytest.raises(CheckpointError, match=text):
            open_llm(target, str(other))
    edit_tensors(head, lambda tensors: tensors.update({"verifier_lm_head.weight": np.zeros(3, np.float32)}))
    open_llm(target, str(head))  # what training kept of the target
    edit_tensors(head, lambda tensors: tensors.update({"norm.weight": np.zeros(3, np.float32)}))
    with pytest.raises(CheckpointError, match=r"holds 1 tensor: norm\.weight that no known mtp head has"):
        open_llm(target, str(head))
