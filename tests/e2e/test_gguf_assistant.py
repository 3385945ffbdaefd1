"""Gemma 4 assistants in GGUF files: equal to the directory of the same weights, found next to their target, refused when damaged."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.doctor_options import doctor_options
from harness.gemma4_assistants import (
    CLUSTERS,
    VOCAB_SIZE,
    Change,
    changed,
    edit_tensors,
    without,
    write_assistant,
    write_gguf_assistant,
    write_right_pair,
    write_target,
)
from harness.gguf_checkpoints import write_gguf
from harness.head_engines import GREEDY, follow, open_llm
from paceline.drafters import open_head_files
from paceline.drafters.gemma4_assistant.checkpoint import Assistant, load_assistant
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.checkpoint import read_model_config
from paceline.models.weights import Tensor
from paceline.proof.doctor import diagnose

pytest.importorskip("gguf")

PROMPTS = [[5, 6, 7], [9], np.random.default_rng(1).integers(1, VOCAB_SIZE, 120).tolist(), [31, 2]]
KINDS: dict[str, dict[str, Any]] = {"dense": {}, "clusters": CLUSTERS, "unified": {"is_unified": True}}
OLD_NAMES = {
    "nextn.pre_projection.weight": "mtp.pre_projection.weight",
    "nextn.post_projection.weight": "mtp.post_projection.weight",
    "masked_embd_centroids.weight": "mtp.centroids.weight",
    "masked_embd_ordering": "mtp.token_ordering.weight",
}
STRANGE_NAMES = {name: f"other.{number}.weight" for number, name in enumerate(OLD_NAMES)}
pytestmark = pytest.mark.usefixtures("always_drafts")


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A target and an assistant in directories, with unrelated random weights."""
    made: dict[str, tuple[Path, Path]] = {}

    def pair(kind: str) -> tuple[Path, Path]:
        if kind not in made:
            folder, is_unified = tmp_path_factory.mktemp(kind), kind == "unified"
            made[kind] = write_target(folder / "target", is_unified=is_unified), write_assistant(folder / "assistant", **KINDS[kind])
        return made[kind]

    return pair


def write_gguf_target(directory: Path, path: Path, types: str = "F32") -> Path:
    """The target of a directory as a file, with words to speak."""
    pieces = ["<unk>", "<s>", "</s>", *(f"▁w{number}" for number in range(VOCAB_SIZE - 3))]
    tokens = {
        "tokens": pieces,
        "scores": [-float(number) for number in range(VOCAB_SIZE)],
        "token_type": [2, 3, 3, *[1] * (VOCAB_SIZE - 3)],
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in {"model": "llama", **tokens}.items()}
    return write_gguf(directory, path, lambda name: "F32" if name.endswith(".proj.weight") else types, metadata=metadata)


def loaded(path: Path, target: Path) -> Assistant:
    files = open_head_files(path)
    assert files is not None
    return load_assistant(files, read_model_config(target))


def check_equal(found: Assistant, expected: Assistant) -> None:
    """All that they compute from, bit for bit."""
    layers = replace(found.config.layers, family=expected.config.layers.family)  # a file does not distinguish the two families
    assert replace(found.config, layers=layers) == expected.config
    assert set(found.weights) == set(expected.weights)
    for name in expected.weights:
        own, other = found.weights[name], expected.weights[name]
        assert isinstance(own, Tensor)
        assert isinstance(other, Tensor)
        assert own.weight_type is other.weight_type
        assert np.array_equal(own.array, other.array), name
    assert (found.token_ordering is None) == (expected.token_ordering is None)
    assert found.token_ordering is None or np.array_equal(found.token_ordering, expected.token_ordering)


@pytest.mark.parametrize("architecture", ["gemma4-assistant", "gemma4_assistant"])
@pytest.mark.parametrize("kind", KINDS)
def test_gguf_assistant_equals_its_safetensors_directory(
    pair_of: Callable[[str], tuple[Path, Path]], tmp_path: Path, kind: str, architecture: str
) -> None:
    target, directory = pair_of(kind)
    path = write_gguf_assistant(directory, tmp_path / "assistant.gguf", architecture=architecture)
    check_equal(loaded(path, target), loaded(directory, target))


@pytest.mark.parametrize(
    ("names", "metadata"),
    [
        (OLD_NAMES, {"embedding_length_out": None, "n_embd_backbone": 64, "nextn_predict_layers": None, "use_ordered_embeddings": True}),
        (STRANGE_NAMES, {}),
        (OLD_NAMES, {"embedding_length_out": None, "attention.shared_kv_layers": None}),
    ],
    ids=["old", "strange", "without_sizes"],
)
def test_gguf_assistant_names_of_older_converters_are_read(
    pair_of: Callable[[str], tuple[Path, Path]], tmp_path: Path, names: dict[str, str], metadata: dict[str, Any]
) -> None:
    """Older converters used other names; unnamed tensors are recognised by their shapes."""
    target, directory = pair_of("clusters")
    path = write_gguf_assistant(directory, tmp_path / "assistant.gguf", architecture="gemma4_assistant", names=names, metadata=metadata)
    check_equal(loaded(path, target), loaded(directory, target))


@pytest.mark.parametrize(("changes", "types"), [({}, "Q8_0"), (CLUSTERS, "Q8_0"), (CLUSTERS, "BF16")])
def test_perfect_gguf_assistant_is_always_accepted_by_a_gguf_target(tmp_path: Path, changes: dict[str, Any], types: str) -> None:
    """Quantised as well: rounding errors are small compared with the margins."""
    target, directory, successor = write_right_pair(tmp_path, sharpness=3.0, **changes)
    model = write_gguf_target(target, tmp_path / "model.gguf", types)
    path = write_gguf_assistant(directory, tmp_path / "assistant.gguf", types)
    llm = open_llm(model, str(path))
    for output, prompt in zip(llm.generate(PROMPTS, GREEDY), PROMPTS, strict=True):
        assert output.token_ids == follow(successor, prompt[-1])
        assert output.speculation.num_draft_tokens > 28
        assert output.speculation.num_accepted_tokens == output.speculation.num_draft_tokens
    assert llm.stats().drafter_failures == 0


def test_gguf_assistant_next_to_its_target_is_used_by_default(pair_of: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    """In the folder `assistant` next to a GGUF file, or in a directory; one for another model is not used."""
    target, directory = pair_of("clusters")
    model = write_gguf_target(target, tmp_path / "model.gguf")
    folder = tmp_path / "assistant"
    assert drafter_of(model) == "suffix"
    folder.mkdir()
    assert drafter_of(model) == "suffix"
    write_gguf_assistant(directory, folder / "a.gguf")
    assert drafter_of(model) == "suffix+gemma4_assistant"
    whole = shutil.copytree(target, tmp_path / "whole")
    shutil.copytree(folder, whole / "assistant")
    assert drafter_of(whole) == "suffix+gemma4_assistant"
    shutil.rmtree(folder)
    shutil.copytree(directory, folder)
    assert drafter_of(model) == "suffix+gemma4_assistant"
    shutil.rmtree(folder)
    folder.mkdir()
    write_gguf_assistant(write_assistant(tmp_path / "other", hidden_size=48), folder / "a.gguf")
    assert drafter_of(model) == "suffix"


def drafter_of(model: Path) -> str:
    return str(open_llm(model, "auto").drafter_name)


def test_doctor_accepts_a_gguf_assistant(pair_of: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    target, directory = pair_of("clusters")
    path = write_gguf_assistant(directory, tmp_path / "assistant.gguf", "Q8_0")
    assert not diagnose(doctor_options(model=str(target), drafters=(str(path),))).problems


ORDER, CENTROIDS = "masked_embd_ordering", "masked_embd_centroids.weight"
NOT_A_PERMUTATION = f"{ORDER} does not hold each of the 96 token ids once"


def with_matrix(name: str) -> Change:
    return changed(name, lambda _: np.ones((2, 2), np.float32))


@pytest.mark.parametrize(
    ("change", "metadata", "message"),
    [
        (without("nextn.pre_projection.weight"), {}, r"lacks 1 tensor: nextn\.pre_projection\.weight"),
        (without(ORDER), {}, "lacks 1 tensor: masked_embd_ordering"),
        (
            without(ORDER, CENTROIDS),
            {"use_ordered_embeddings": True},
            "lacks 2 tensors: masked_embd_centroids.weight, masked",
        ),
        (without("blk.1.attn_q_norm.weight"), {}, r"lacks 1 tensor: blk\.1\.attn_q_norm\.weight"),
        (with_matrix("blk.0.ffn_gate_inp.weight"), {}, r"holds 1 tensor: blk\.0\.ffn_gate_inp\.weight that no assistant has"),
        (with_matrix("gate.weight"), {}, r"holds 1 tensor: gate\.weight that no assistant has"),
        (changed(ORDER, lambda order: order[[*range(95), 0]]), {}, NOT_A_PERMUTATION),
        (
            changed(ORDER, lambda order: np.where(order == 3, VOCAB_SIZE, order).astype(np.int32)),
            {},
            NOT_A_PERMUTATION,
        ),
        (changed(ORDER, lambda order: order.astype(np.float32)), {}, "masked_embd_ordering' is of type F32, expected integers"),
        (changed(ORDER, lambda order: order[:-1]), {}, NOT_A_PERMUTATION),
        (changed(CENTROIDS, lambda centroids: centroids[:7]), {}, "num_centroids = 7 with .* of 96 tokens"),
        (None, {"centroid_top_k": 13}, "centroid_top_k = 13"),
        (None, {"centroid_top_k": "four"}, "centroid_top_k = 'four'"),
        (None, {"block_count": 5, "nextn_predict_layers": 5}, "attention.shared_kv_layers = 4, expected all 5 layers"),
        (None, {"block_count": None}, "has no metadata gemma4-assistant.block_count"),
        (None, {"block_count": 2**31 - 1}, "block_count = 2147483647, expected at most the number of tensors"),
        (None, {"nextn_predict_layers": 1}, "nextn_predict_layers = 1, expected all 4 layers"),
        (None, {"attention.shared_kv_layers": 2}, "attention.shared_kv_layers = 2, expected all 4 layers"),
        (None, {"embedding_length": 48}, r"token_embd.weight has shape \[96, 32\], expected \[vocabulary, 48\]"),
        (None, {"embedding_length_per_layer_input": 8}, "embedding_length_per_layer_input = 8 is not supported for assistants"),
        (None, {"attention.key_length_swa": 4096}, "attention.value_length_swa = 16, expected the size of keys, 4096"),
        (None, {"attention.sliding_window_pattern": [True]}, r"pattern = \[True\], expected for each of 4 layers"),
        (None, {"attention.head_count": 3}, "head_count = 3 must be a multiple of gemma4-assistant.attention.head_count_kv = 2"),
        (None, {"attention.layer_norm_rms_epsilon": "small"}, "attention.layer_norm_rms_epsilon = 'small'"),
        (None, {"rope.freq_base_swa": 1.4e-45}, "rope parameters of type 'default' give frequencies that are not finite"),
        (None, {"feed_forward_length": 64}, r"blk\.0\.ffn_gate\.weight' has shape \[48, 32\]"),
    ],
)
def test_damaged_gguf_assistant_is_refused_in_one_line(
    pair_of: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
    change: Change | None,
    metadata: dict[str, Any],
    message: str,
) -> None:
    target, directory = pair_of("clusters")
    path = write_gguf_assistant(directory, tmp_path / "assistant.gguf", change=change, metadata=metadata)
    with pytest.raises(CheckpointError, match=message) as caught:
        loaded(path, target)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_gguf_assistant_is_refused_as_a_target(pair_of: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    path = write_gguf_assistant(pair_of("dense")[1], tmp_path / "assistant.gguf")
    with pytest.raises(CheckpointError, match="holds an assistant, a drafter for a Gemma 4 model: pass the file as its drafter"):
        read_model_config(path)


def test_gguf_assistant_of_another_target_is_refused(pair_of: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    path = write_gguf_assistant(write_assistant(tmp_path / "other", hidden_size=48), tmp_path / "assistant.gguf")
    with pytest.raises(IncompatibleDrafterError, match="takes features of 48 values, the target's have 64") as caught:
        loaded(path, pair_of("clusters")[0])
    assert "\n" not in str(caught.value)


def test_gguf_assistant_may_have_its_own_lm_head(pair_of: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    target, directory = pair_of("clusters")
    other = shutil.copytree(directory, tmp_path / "other")

    def with_lm_head(name: str, embedding: str) -> Change:
        return lambda arrays: arrays.update({name: arrays[embedding] + 1})

    edit_tensors(other, with_lm_head("lm_head.weight", "model.embed_tokens.weight"))
    path = write_gguf_assistant(directory, tmp_path / "a.gguf", change=with_lm_head("output.weight", "token_embd.weight"))
    check_equal(loaded(path, target), loaded(other, target))
