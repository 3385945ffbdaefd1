"""Gemma 4 assistants in the engine: accepted where they must be, found next to their target, refused for others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoint_files import edit_tensors
from harness.checkpoints import write_checkpoint
from harness.doctor_options import doctor_options
from harness.gemma4_assistants import CLUSTERS, VOCAB_SIZE, changed, without, write_assistant, write_right_pair, write_target
from harness.gemma4_checkpoints import EXPERTS, FULL, SLIDING
from harness.head_engines import GREEDY, SAMPLED, check_drafting, follow, ids_of, open_llm
from paceline.drafters.gemma4_assistant.checkpoint import load_assistant
from paceline.drafters.gemma4_assistant.drafter import AssistantDrafter
from paceline.drafters.gemma4_assistant.network import FEATURE, AssistantNetwork, TreeLevelInput
from paceline.drafters.head_files import HeadFiles
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.proof.doctor import diagnose
from paceline.runtimes.base import Numerics, assemble_pass
from paceline.runtimes.load import RuntimeOptions, load_network

PROMPTS = [[5, 6, 7], [9], np.random.default_rng(1).integers(1, VOCAB_SIZE, 120).tolist(), [31, 2]]
pytestmark = pytest.mark.usefixtures("always_drafts")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and an assistant with unrelated random weights."""
    folder = tmp_path_factory.mktemp("pair")
    return write_target(folder / "target"), write_assistant(folder / "assistant", **CLUSTERS)


@pytest.mark.parametrize(("changes", "options"), [({}, {}), ({}, {"tree_width": 3}), (CLUSTERS, {}), ({}, {"backend": "torch"})])
def test_perfect_gemma4_assistant_is_always_accepted(tmp_path: Path, changes: dict[str, Any], options: dict[str, Any]) -> None:
    """Over chunked prompts, batches, cached prompts, windows and preemptions."""
    target, assistant, successor = write_right_pair(tmp_path, sharpness=3.0, **changes)
    llm = open_llm(target, str(assistant), prefill_chunk_size=32, **options)
    for params in (GREEDY, SAMPLED, GREEDY):
        for batch in (PROMPTS, PROMPTS[2:3]):
            for output, prompt in zip(llm.generate(batch, params), batch, strict=True):
                assert output.token_ids == follow(successor, prompt[-1])
                stats = output.speculation
                assert stats.num_draft_tokens > 28
                if "tree_width" not in options:
                    assert stats.num_accepted_tokens == stats.num_draft_tokens
                assert stats.mean_acceptance_length > 3.5
    assert llm.stats().drafter_failures == 0


@pytest.mark.parametrize("shape", [{"num_speculative_tokens": 4}, {"num_speculative_tokens": 4, "tree_width": 3}], ids=["chain", "tree"])
def test_gemma4_assistant_of_a_moe_target_changes_no_token(tmp_path: Path, shape: dict[str, int]) -> None:
    """As with 26B-A4B: a batch whose rows choose different experts, and each row alone."""
    values = {**EXPERTS, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    target, assistant = write_target(tmp_path / "target", **values), write_assistant(tmp_path / "assistant")
    plain, drafting = open_llm(target, "none"), open_llm(target, str(assistant), **shape)
    for params in (GREEDY, SAMPLED):
        check_drafting(drafting, plain, params, PROMPTS)
        assert [drafting.generate([prompt], params)[0].token_ids for prompt in PROMPTS] == ids_of(plain.generate(PROMPTS, params))
    assert drafting.numerics == "exact"
    drafting.engine.cache.check_consistency()


def test_gemma4_assistant_drafts_do_not_depend_on_earlier_steps(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """After steps that accepted and rejected drafts, moving windows and cached prompts."""
    target, assistant = pair
    llm = open_llm(target, str(assistant), prefill_chunk_size=32)
    seen: list[tuple[list[int], list[int]]] = []
    real = AssistantDrafter.propose

    def watched(drafter: AssistantDrafter, requests: Any, budgets: Any) -> Any:
        trees = real(drafter, requests, budgets)
        seen.extend((list(one.token_ids), list(tree.token_ids[1:])) for one, tree in zip(requests, trees, strict=True) if tree is not None)
        return trees

    monkeypatch.setattr(AssistantDrafter, "propose", watched)
    for _ in range(2):
        llm.generate(PROMPTS, GREEDY)
    assert llm.stats().num_cached_tokens > 0
    runtime = load_network(target, RuntimeOptions(numerics=Numerics.FAST, num_threads=2, backend="native")).network
    network = AssistantNetwork(load_assistant(HeadFiles.open(assistant), runtime.config), runtime, max_model_len=256)
    cache = runtime.new_cache(16)
    for token_ids, drafted in seen[::7]:
        sequence, behind = cache.new_sequence(), len(token_ids) - 1
        output = runtime.forward(*assemble_pass([cache.reserve_rows(sequence, range(-1, behind - 1))], [token_ids[:-1]], [[0]]))
        cache.keep_path(sequence, behind - 1)
        token, feature, expected = token_ids[-1], output.hidden_states[-1:].copy(), list[int]()
        for _ in drafted:
            output = network.forward([TreeLevelInput((token,), feature, sequence)], None, None)
            ids, scores = network.cluster_candidates(output, 0, VOCAB_SIZE)
            token, feature = int(ids[scores.argmax()]), output.results[FEATURE].copy()
            expected.append(token)
        assert drafted == expected, len(token_ids)
        cache.release_sequence(sequence)
    assert len(seen) > 100


@pytest.mark.parametrize("changes", [{}, CLUSTERS])
def test_gemma4_assistant_drafts_are_accepted_by_rejection_sampling(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Drawn with noise of its own: tokens outside the clusters have probability 0, so the law stays the target's."""
    target, assistant, _ = write_right_pair(tmp_path, sharpness=0.5, **changes)
    llm = open_llm(target, str(assistant), acceptance="rejection")
    outputs = llm.generate(PROMPTS, SAMPLED)
    stats = [output.speculation for output in outputs]
    assert sum(one.num_draft_tokens for one in stats) > 100
    assert sum(one.num_accepted_tokens for one in stats) >= sum(one.num_draft_tokens for one in stats) * (0.7 if changes else 0.999)
    assert llm.stats().drafter_failures == 0


def test_gemma4_assistant_next_to_its_target_is_used_by_default(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target = shutil.copytree(pair[0], tmp_path / "target")
    assert open_llm(target, "auto").drafter.name == "suffix"
    shutil.copytree(pair[1], target / "assistant")
    llm = open_llm(target, "auto")
    assert llm.drafter_name == open_llm(target, ["suffix", str(pair[1])]).drafter_name == "suffix+gemma4_assistant"
    assert "4 of 12 clusters" in llm.banner


def test_doctor_accepts_a_gemma4_assistant(pair: tuple[Path, Path]) -> None:
    diagnosis = diagnose(doctor_options(model=str(pair[0]), drafters=(str(pair[1]),)))
    assert not diagnosis.problems


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "takes features of 48 values, the target's have 64"),
        ({"text_config": {"vocab_size": 5000}}, "has 5000 token ids, the target 96"),
        ({"text_config": {"sliding_window": 8}}, "has sliding_window = 8, the target 16"),
        ({"text_config": {"head_dim": 8}}, "4 query heads of 8 values where the target's layer 4 has 2 key heads of 16"),
        ({"text_config": {"num_attention_heads": 3, "num_key_value_heads": 1}}, "3 query heads of 16 values where the target's layer 4"),
    ],
)
def test_gemma4_assistant_of_another_target_is_refused_in_one_line(
    pair: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(IncompatibleDrafterError, match=message) as caught:
        open_llm(pair[0], str(write_assistant(tmp_path, **changes)))
    assert "\n" not in str(caught.value)


def test_gemma4_assistant_of_another_architecture_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    llama = write_checkpoint(tmp_path / "llama", "llama", vocab_size=VOCAB_SIZE)
    with pytest.raises(IncompatibleDrafterError, match="is an assistant of Gemma 4, and the target is a llama"):
        open_llm(llama, str(pair[1]))
    whole = write_target(tmp_path / "whole", layer_types=[FULL] * 8)
    with pytest.raises(IncompatibleDrafterError, match="has sliding_attention layers, the target has none that keep keys"):
        open_llm(whole, str(pair[1]))


ORDER = "masked_embedding.token_ordering"


@pytest.mark.parametrize(
    ("change", "values", "message"),
    [
        (without("pre_projection.weight"), {}, r"lacks .*pre_projection.weight \[32, 128\]"),
        (changed("model.gate.weight", lambda _: np.ones((2, 2), np.float32)), {}, "gate.weight"),
        (changed(ORDER, lambda order: order[[*range(95), 0]]), {}, "token_ordering does not hold each of the 96 token ids once"),
        (None, {"num_centroids": 7}, "num_centroids = 7"),
        (None, {"centroid_intermediate_top_k": 13}, "centroid_intermediate_top_k = 13"),
        (None, {"text_config": None}, "text_config = None"),
        (None, {"text_config": {"hidden_size_per_layer_input": 8}}, "hidden_size_per_layer_input = 8"),
        (None, {"text_config": {"num_kv_shared_layers": 2}}, "num_kv_shared_layers = 2, expected all 4 layers"),
        (None, {"text_config": {"layer_types": [SLIDING, "chunked", SLIDING, FULL]}}, "layer_types"),
    ],
)
def test_damaged_gemma4_assistant_is_refused_in_one_line(
    pair: tuple[Path, Path], tmp_path: Path, change: Callable[[dict[str, Any]], None] | None, values: dict[str, Any], message: str
) -> None:
    assistant = shutil.copytree(pair[1], tmp_path / "assistant")
    config = json.loads((assistant / "config.json").read_text(encoding="utf-8"))
    nested = values.get("text_config")
    config |= {**values, **({"text_config": {**config["text_config"], **nested}} if nested else {})}
    (assistant / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if change is not None:
        edit_tensors(assistant, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_llm(pair[0], str(assistant))
    assert "\n" not in str(caught.value)
