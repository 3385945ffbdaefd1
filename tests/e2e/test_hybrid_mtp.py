"""Qwen's hybrid families draft with the MTP module in their files; errors name what is wrong with one."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoint_files import change_config, edit_tensors
from harness.checkpoints import VOCAB_SIZE
from harness.gguf_checkpoints import numbered_vocabulary
from harness.head_engines import GREEDY, SAMPLED, check_drafting, load_module, open_llm
from harness.hybrid_gguf import write_hybrid_gguf
from harness.hybrid_mtp import add_module, module_tensors, write_donor, write_host
from paceline.drafters.mtp import load_mtp, open_gguf_module
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.models.gguf.config import gguf_config
from paceline.models.gguf.file import open_gguf
from paceline.models.weights import as_float32

pytestmark = pytest.mark.usefixtures("always_drafts")


def write_whole(folder: Path, case: str = "qwen3_5", **layout: Any) -> Path:
    """A model with its module."""
    return add_module(write_host(folder / "model", case), module_tensors(write_donor(folder / "donor", case), **layout))


@pytest.mark.spread(0.1)
@pytest.mark.parametrize(
    ("case", "backend", "tree_width", "quantization"),
    [
        ("qwen3_5", "native", 1, "none"),
        ("qwen3_5", "native", 3, "int8"),
        ("qwen3_5_moe", "native", 1, "none"),
        ("qwen3_next", "native", 2, "none"),
        ("qwen3_5", "torch", 1, "none"),
        ("qwen3_next", "torch", 1, "none"),
    ],
)
def test_hybrid_model_with_mtp_drafts_equals_plain_decoding(
    tmp_path: Path, case: str, backend: str, tree_width: int, quantization: str
) -> None:
    """In batches, alone, and on a prefix that is cached; sampled and not. What torch rounds otherwise may decide near-ties."""
    target = write_whole(tmp_path, case)
    plain = open_llm(target, "none", backend=backend)
    llm = open_llm(target, "mtp", backend=backend, tree_width=tree_width, draft_quantization=quantization, prefill_chunk_size=32)
    assert llm.drafter_name == "mtp"
    for params in (GREEDY, SAMPLED, GREEDY):
        check_drafting(llm, plain, params)


@pytest.mark.parametrize("count", [0, 1])
def test_mtp_module_is_found_without_its_config_field(tmp_path: Path, count: int) -> None:
    """Fine-tuned checkpoints may state 0 modules and contain one, or state 1 and contain none."""
    target = write_whole(tmp_path) if count == 0 else write_host(tmp_path / "model", "qwen3_5")
    change_config(target, mtp_num_hidden_layers=count)
    assert open_llm(target, "auto").drafter_name == ("suffix+mtp" if count == 0 else "suffix")
    if count == 0:
        notices = open_llm(target, "none").notices
        assert any("contains a drafting head: use drafter='mtp'" in notice for notice in notices)
    else:
        with pytest.raises(IncompatibleDrafterError, match="holds no mtp head"):
            open_llm(target, "mtp")


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp."])
def test_mtp_module_of_a_multimodal_model_drafts_its_text(tmp_path: Path, prefix: str) -> None:
    """As Qwen3.5 is published: the text model is nested next to the image encoder, the module is at the top level."""
    target = write_whole(tmp_path, prefix=prefix)
    plain = open_llm(shutil.copytree(target, tmp_path / "plain"), "none")
    values = json.loads((target / "config.json").read_text(encoding="utf-8"))
    nested = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {}, "text_config": values}
    (target / "config.json").write_text(json.dumps(nested), encoding="utf-8")

    def nest(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("model.") and "mtp." not in name]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.patch_embed.proj.weight"] = np.zeros((4, 4), np.float32)

    edit_tensors(target, nest)
    llm = open_llm(target, "mtp")
    assert llm.drafter_name == "mtp"
    check_drafting(llm, plain, GREEDY)


def test_unusable_mtp_module_is_an_error_only_if_requested(tmp_path: Path) -> None:
    target = write_whole(tmp_path)
    edit_tensors(target, lambda tensors: tensors.pop("mtp.norm.weight"))
    with pytest.raises(CheckpointError, match=r"it lacks 1 tensor: mtp\.norm\.weight \[64\]"):
        open_llm(target, "mtp")
    llm = open_llm(target, "auto")
    assert llm.drafter_name == "suffix"
    assert any("contains a drafting head" in notice for notice in llm.notices)


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        (
            "mtp.layers.0.self_attn.q_proj.weight",
            (64, 64),
            r"q_proj\.weight' has shape \[64, 64\], expected \[128, 64\] for q_proj, attention_gate",
        ),
        ("mtp.fc.weight", (64, 64), r"mtp\.fc\.weight \[64, 64\] instead of \[64, 128\]"),
        ("mtp.embed_tokens.weight", (3,), r"mtp\.embed_tokens\.weight \[3\] instead of \[97, 64\]"),
        ("mtp.layers.0.self_attn.o_proj.bias", (64,), r"holds 1 tensor: mtp\.layers\.0\.self_attn\.o_proj\.bias that no known mtp"),
        ("mtp.layers.0.linear_attn.A_log", (4,), r"holds 1 tensor: mtp\.layers\.0\.linear_attn\.A_log that no known mtp head has"),
    ],
)
def test_wrong_shape_of_an_mtp_tensor_is_named(tmp_path: Path, name: str, shape: tuple[int, ...], text: str) -> None:
    target = write_whole(tmp_path)
    edit_tensors(target, lambda tensors: tensors.update({name: np.zeros(shape, np.float32)}))
    with pytest.raises(CheckpointError, match=text):
        load_module(target)


def test_mtp_module_uses_its_own_embedding_if_configured(tmp_path: Path) -> None:
    """Else it is a copy of the target's, which is used."""
    target = write_whole(tmp_path)
    change_config(target, mtp_use_dedicated_embeddings=True)
    with pytest.raises(
        CheckpointError, match=r"lacks mtp\.embed_tokens\.weight although its config\.json sets mtp_use_dedicated_embeddings"
    ):
        load_module(target)
    own = np.random.default_rng(2).normal(0, 0.3, (VOCAB_SIZE, 64)).astype(np.float32)
    edit_tensors(target, lambda tensors: tensors.update({"mtp.embed_tokens.weight": own}))
    module = load_module(target)
    assert np.array_equal(as_float32(module.embedding), own)
    change_config(target, mtp_use_dedicated_embeddings=False)
    module = load_module(target)
    assert not np.array_equal(as_float32(module.embedding), own)


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_hybrid_gguf_drafts_with_its_mtp_module(tmp_path: Path, case: str) -> None:
    target = write_hybrid_gguf(write_whole(tmp_path, case), tmp_path / "model.gguf", "Q8_0", metadata=numbered_vocabulary(VOCAB_SIZE))
    plain, llm = open_llm(target, "none"), open_llm(target, "mtp")
    assert open_llm(target, "auto").drafter_name == "suffix+mtp"
    assert any("contains a drafting head: use drafter='mtp'" in notice for notice in plain.notices)
    for params in (GREEDY, SAMPLED):
        check_drafting(llm, plain, params)


def test_mtp_module_of_a_gguf_is_found_by_its_tensors(tmp_path: Path) -> None:
    """Whether or not metadata counts it; where its last norm is left out, the model's is meant."""
    directory = write_whole(tmp_path)
    expected = read_model_config(directory)
    unsaid = write_hybrid_gguf(directory, tmp_path / "unsaid.gguf", metadata={"{a}.nextn_predict_layers": None})
    assert gguf_config(open_gguf(unsaid)) == expected
    files = open_gguf_module(unsaid)
    assert files is not None
    bare = write_hybrid_gguf(write_host(tmp_path / "bare", "qwen3_5"), tmp_path / "bare.gguf")
    assert open_gguf_module(bare) is None
    left_out = ("blk.4.nextn.shared_head_norm.weight",)
    path = write_hybrid_gguf(directory, tmp_path / "part.gguf", leaves_out=left_out)
    files = open_gguf_module(path)
    assert files is not None
    weights = open_weights(path, expected)
    module = load_mtp(files, expected, weights)
    assert np.array_equal(as_float32(module.weights["final_norm.weight"]), as_float32(weights["final_norm.weight"]))
    path = write_hybrid_gguf(directory, tmp_path / "less.gguf", leaves_out=("blk.4.nextn.hnorm.weight", "blk.4.attn_q.weight"))
    files = open_gguf_module(path)
    assert files is not None
    with pytest.raises(CheckpointError, match=r"module in block 4 lacks 2 tensors: blk\.4\.attn_q\.weight, blk\.4\.nextn\.hnorm\.weight"):
        load_mtp(files, expected, open_weights(path, expected))


def test_mtp_block_without_tensors_is_ignored(tmp_path: Path) -> None:
    """As converters wrote files that dropped it but counted it."""
    directory = write_host(tmp_path / "bare", "qwen3_5")
    counted = {"{a}.block_count": 5, "{a}.nextn_predict_layers": 1}
    path = write_hybrid_gguf(directory, tmp_path / "model.gguf", metadata=counted)
    config = read_model_config(path)
    assert config == read_model_config(directory)
    open_weights(path, config)
    assert open_gguf_module(path) is None
