"""Block drafters are recognised, refused by what they are, and read the right row."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.always_drafts import draft_always
from harness.block_checkpoints import (
    DFLASH,
    DFLASH2,
    DSPARK,
    block_tensors,
    perfect_block,
    write_perfect_block,
    write_random_block,
    write_random_block2,
)
from harness.block_gguf import write_gguf_block
from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.doctor_options import doctor_options
from harness.eagle_checkpoints import write_head
from harness.exact_targets import skip_without_kernels
from harness.gguf_checkpoints import write_gguf
from harness.medusa_checkpoints import write_successor_target
from harness.model_configs import make_config
from paceline import LLM, SamplingParams
from paceline.drafters import open_head_files
from paceline.drafters.block.checkpoint import open_block_checkpoint
from paceline.drafters.block.config import read_block_config
from paceline.drafters.block.drafter import MAX_DEFERRED_CONTEXT_ROWS, MAX_PENDING_CONTEXT_ROWS, BlockDrafter, best_first_tree
from paceline.drafters.block.network import PendingContext
from paceline.drafters.draft_sampler import DraftSampler, DraftTokens
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.head_kinds import HeadKind
from paceline.engine import loader as loader_module
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.models.checkpoint import read_model_config
from paceline.proof.doctor import diagnose
from paceline.sampling.draw import Distribution, draw
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request import Request
from paceline.speculation.stats import SkipReason
from paceline.speculation.tree import DraftTree

TARGET = make_config(hidden_size=32, vocab_size=97, num_layers=9)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (DFLASH, HeadKind.DFLASH),
        ({**DFLASH, "architectures": ["MuseGlimmerAssistantModel"]}, HeadKind.DFLASH),
        ({**DFLASH, "architectures": []}, HeadKind.DFLASH),
        (DSPARK, HeadKind.DSPARK),
        ({**DSPARK, "architectures": ["Lfm2DSparkDraftModel"]}, HeadKind.DSPARK),
        ({**DFLASH, "architectures": ["DFlash2DraftModel"]}, HeadKind.DFLASH2),
        ({**DFLASH, "architectures": ["LiLiCorrDraftModel"]}, HeadKind.LILICORR),
        ({**DFLASH, "projector_type": "domino"}, HeadKind.DOMINO),
    ],
)
def test_block_drafter_kind_is_recognised_from_its_config(config: Any, kind: HeadKind, tmp_path: Path) -> None:
    assert HeadFiles.open(write_head(tmp_path, config, block_tensors())).kind is kind


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"architectures": ["LingDSparkModel"]}, "of the kind LingDSparkModel, which is not supported"),
        ({"dflash_config": {"projector_type": "lattice"}}, "with projector_type 'lattice', which is not supported"),
        ({"lilicorr_top_k": 4}, "'lilicorr_top_k', which is not supported"),
        ({"markov_head_type": "lstm"}, "markov_head_type 'lstm' is not supported; vanilla, gated, rnn are"),
        ({"mask_token_id": 97}, r"mask_token_id = \[97\], expected one id below the target's 97"),
        ({"target_layer_ids": [1, 3]}, r"reads 3 of the target's layer boundaries, and its config names \[2, 4\]"),
        ({"target_layer_ids": [1, 3, 9]}, "its config names .* of 9 layers: it was made for another model"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 4, "is_causal": False}, "shorter than a block"),
    ],
)
def test_unsupported_block_drafter_kind_is_refused(more: Any, what: str, tmp_path: Path) -> None:
    files = HeadFiles.open(write_head(tmp_path, {**DSPARK, **more}, block_tensors(markov="vanilla")))
    with pytest.raises(IncompatibleDrafterError, match=what):
        read_block_config(files, TARGET)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"rms_norm_eps": -1}, "rms_norm_eps = -1.0, expected a number from 0 to 1"),
        ({"block_size": -1}, "block_size = -1, expected an integer from 2 to 256"),
        ({"mask_token_id": None}, "has no mask_token_id, the token that fills a block"),
        ({"input_embedding_scale": -2.0}, "input_embedding_scale = -2.0, expected a number above 0"),
        ({"output_multiplier": 0}, "output_multiplier = 0.0, expected a number above 0"),
        ({"final_logit_softcapping": -3.0}, "final_logit_softcapping = -3.0, expected a number above 0"),
        ({"is_causal": "yes"}, "is_causal = 'yes', expected true or false"),
        ({"hidden_size": 64}, "hidden_size = 64, and the tensors of .* have 32"),
        ({"num_hidden_layers": 5}, "num_hidden_layers = 5, and the tensors of .* have 3"),
        ({"markov_rank": 256}, "markov_rank = 256, and the tensors of .* have 6"),
        ({"rope_scaling": {"type": "yarn"}}, "has no 'max_position_embeddings'|'yarn' have neither factor nor original_max_position"),
        ({"rope_scaling": {"type": "yarn"}, "max_position_embeddings": None}, "has no 'max_position_embeddings'"),
        ({"rope_scaling": {"rope_dim": 99}}, "rope_dim = 99, expected an integer from 1 to 16"),
        ({"head_dim": 2**20, "num_attention_heads": 64}, "64 heads of 1048576 values, expected 64 in all"),
        ({"conv_kernel_size": 2}, "conv_kernel_size is set, and .* holds no attention_conv"),
        ({"architectures": ["DFlash2DraftModel"]}, r"a dflash2 drafter without candidate_selector\.\*"),
    ],
)
def test_invalid_value_in_a_block_drafter_config_is_refused(more: Any, what: str, tmp_path: Path) -> None:
    config = {name: value for name, value in {**DSPARK, **more}.items() if value is not None}
    files = HeadFiles.open(write_head(tmp_path, config, block_tensors(markov="vanilla")))
    with pytest.raises(CheckpointError, match=what):
        read_block_config(files, TARGET)


def test_dspark_drafter_with_a_dflash_config_is_recognised(tmp_path: Path) -> None:
    """As SpecForge writes them; whether the confidence head reads the token shows in its width."""
    nested = {"mask_token_id": 96, "target_layer_ids": [1, 3, 5], "projector_type": "dspark", "enable_confidence_head": True}
    tensors = block_tensors(markov="vanilla", confidence=True)
    files = HeadFiles.open(write_head(tmp_path, {**DFLASH, "dflash_config": nested}, tensors))
    config = read_block_config(files, TARGET)
    assert (files.kind, config.sample_from_anchor, config.confidence_reads_markov_embedding) == (HeadKind.DSPARK, None, True)
    assert open_block_checkpoint(files, config, TARGET).lookup_tables.keys() == {"markov_w1"}


def test_target_with_too_few_layers_for_a_block_drafter_is_refused(tmp_path: Path) -> None:
    files = HeadFiles.open(write_head(tmp_path, {**DFLASH, "dflash_config": {"mask_token_id": 3}}, block_tensors()))
    with pytest.raises(
        IncompatibleDrafterError, match="has no target_layer_ids, and the usual ones for 3 layers do not exist in a target of 2"
    ):
        read_block_config(files, make_config(hidden_size=32, vocab_size=97, num_layers=2))


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"conv_group_size": 5}, "groups of 5 values"),
        ({"conv_kernel_size": 3}, "convolutions of 3 rows"),
        ({"selector_top_k": 0}, "selector_top_k = 0, expected an integer from 1 to 1024"),
        ({"selector_rank": 9}, "selector_rank = 9, and the tensors of .* have 8"),
    ],
)
def test_invalid_dflash2_sizes_are_refused(more: Any, what: str, tmp_path: Path) -> None:
    config = {**DFLASH2, "dflash_config": {**DFLASH2["dflash_config"], **more}}
    files = HeadFiles.open(write_head(tmp_path, config, block_tensors(DFLASH2)))
    with pytest.raises(CheckpointError, match=what):
        read_block_config(files, TARGET)


def test_block_drafter_without_config_is_refused(tmp_path: Path) -> None:
    path = write_head(tmp_path, DFLASH, block_tensors())
    (path / "config.json").unlink()
    files = HeadFiles.open(path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json is missing: it holds a block drafter's sizes"):
        read_block_config(files, TARGET)


def test_mask_embedding_file_replaces_the_embedding_of_the_mask_token(tmp_path: Path) -> None:
    path = write_head(tmp_path, DFLASH, block_tensors())
    torch.save({"mask_token_id": 96, "embedding": torch.arange(32.0)}, path / "mask_embedding.pt")
    files = HeadFiles.open(path)
    row = open_block_checkpoint(files, read_block_config(files, TARGET), TARGET).mask_embedding
    assert row is not None
    assert row.tolist() == list(range(32))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "is no regular file"),
        ({"embedding": torch.zeros(32), "other": torch.zeros(1)}, "holds .*other.*, expected a tensor 'embedding' and a 'mask_token_id'"),
        ({"weight": torch.zeros(32)}, "holds .*weight.*, expected a tensor 'embedding'"),
        ([1, 2], "holds list, expected a tensor 'embedding'"),
        ({"embedding": torch.zeros(32), "mask_token_id": 5}, "is for mask_token_id 5, config.json has 96"),
        ({"embedding": torch.zeros(32), "mask_token_id": torch.zeros(2)}, "is for mask_token_id tensor"),
        ({"embedding": torch.zeros(31)}, "holds a row of 31 values, expected 32 numbers"),
        ({"embedding": "x"}, "expected a tensor 'embedding'"),
    ],
)
def test_invalid_mask_embedding_file_is_refused(content: Any, what: str, tmp_path: Path) -> None:
    path = write_head(tmp_path, DFLASH, block_tensors())
    if content is None:
        (path / "mask_embedding.pt").mkdir()
    else:
        torch.save(content, path / "mask_embedding.pt")
    files = HeadFiles.open(path)
    with pytest.raises(CheckpointError, match=what):
        open_block_checkpoint(files, read_block_config(files, TARGET), TARGET)


@pytest.mark.parametrize(
    ("metadata", "what"),
    [
        ({"block_size": 1}, r"dflash\.block_size = 1, expected an integer from 2 to 256"),
        ({"target_layers": 3}, r"dflash\.target_layers = 3, expected a list of layers"),
        ({"embedding_length": 64}, r"dflash\.embedding_length = 64, and the tensors"),
        ({"attention.value_length": 8}, r"dflash\.attention\.value_length = 8, expected the size of keys, 16"),
        ({"rope.dimension_sections": [4, 4, 0, 0]}, r"dflash\.rope\.dimension_sections = \[4, 4, 0, 0\], expected a single section"),
        ({"mask_token_id": 200}, "mask_token_id = .200., expected one id below the target's 97"),
    ],
)
def test_invalid_metadata_of_a_gguf_block_drafter_is_refused(metadata: Any, what: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    write_gguf_block(tmp_path / "drafter.gguf", DFLASH, block_tensors(), metadata=metadata)
    with pytest.raises((CheckpointError, IncompatibleDrafterError), match=what):
        read_block_config(find_block(tmp_path / "drafter.gguf"), TARGET)


def find_block(path: Path) -> HeadFiles:
    files = open_head_files(path)
    assert files is not None
    return files


def test_huge_head_dim_of_a_block_drafter_is_refused_before_allocation(tmp_path: Path) -> None:
    files = HeadFiles.open(write_head(tmp_path, {**DFLASH, "head_dim": 10**9}, block_tensors()))
    with pytest.raises(CheckpointError, match="heads of 1000000000 values, expected 64 in all as q_proj has"):
        read_block_config(files, TARGET)


def test_block_drafter_of_another_hidden_size_is_refused(tmp_path: Path) -> None:
    files = HeadFiles.open(write_random_block(tmp_path, hidden_size=64))
    with pytest.raises(IncompatibleDrafterError, match="it was made for another model"):
        read_block_config(files, make_config(hidden_size=48, vocab_size=97, num_layers=9))


def test_block_drafter_ignores_copied_target_tensors_and_refuses_unknown(tmp_path: Path) -> None:
    copies = {"embed_tokens.weight": torch.zeros(97, 32), "lm_head.weight": torch.zeros(97, 32)}
    files = HeadFiles.open(write_head(tmp_path / "copies", DFLASH, block_tensors() | copies))
    assert not {"embedding.weight", "lm_head.weight"} & set(open_block_checkpoint(files, read_block_config(files, TARGET), TARGET).weights)
    files = HeadFiles.open(write_head(tmp_path / "unknown", DFLASH, block_tensors() | {"layers.0.extra.weight": torch.zeros(2, 2)}))
    with pytest.raises(CheckpointError, match=r"layers\.0\.extra\.weight"):
        open_block_checkpoint(files, read_block_config(files, TARGET), TARGET)


def test_block_drafter_without_target_layer_ids_uses_evenly_spaced_layers(tmp_path: Path) -> None:
    files = HeadFiles.open(write_head(tmp_path, {**DFLASH, "dflash_config": {"mask_token_id": 3}}, block_tensors()))
    assert read_block_config(files, TARGET).layer_boundaries == (2, 5, 7)  # outputs of layers 1, round(3.5) and 6


def test_block_row_offset_is_found_from_the_first_drafts_if_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_kernels()
    draft_always(monkeypatch)
    target, _ = write_successor_target(tmp_path / "target", "qwen3", sharpness=4.0)
    config = {
        **{name: value for name, value in DSPARK.items() if name not in ("sample_from_anchor", "target_layer_ids")},
        "aux_hidden_state_layer_ids": [0, 1, 2], "hidden_size": 128, "num_hidden_layers": 2, "mask_token_id": 3, "vocab_size": 97,
    }  # fmt: skip
    tensors = block_tensors(config, target_hidden=128)
    for name, values in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            values.zero_()  # so the row of the last token names the token after it, and rows of masks name another
        if name == "norm.weight":
            values.fill_(1.0)
    with LLM(str(target), drafter=str(write_head(tmp_path / "drafter", config, tensors)), kv_cache_gb=0.05) as llm:
        (drafter,) = llm.engine.speculator.drafters
        assert isinstance(drafter, BlockDrafter)
        before = drafter.sample_from_anchor
        assert "a row is expected to draft the token at its own position, which the first drafts will show" in llm.banner
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        plain = llm.generate([[5, 6]], sampling, speculation={"enabled": False})[0]
        first, second = llm.generate([[5, 6]], sampling)[0], llm.generate([[5, 6]], sampling)[0]
        assert llm.explain(second)[-1].endswith("blocks of 7, a row drafts the token after its own position)")
    assert first.token_ids == second.token_ids == plain.token_ids
    assert (before, drafter.sample_from_anchor) == (False, True)
    assert second.speculation.mean_acceptance_length > 1.5


def test_doctor_checks_a_block_drafter_without_loading_it(tmp_path: Path) -> None:
    target, successor = write_successor_target(tmp_path / "target", "qwen3", sharpness=4.0)
    drafter = write_perfect_block(tmp_path / "drafter", successor, sharpness=4.0)
    found = diagnose(doctor_options(model=str(target), drafters=(str(drafter),)))
    assert found.problems == []
    (one,) = found.drafters
    assert one.pair is not None
    summary = (
        "dspark drafter, blocks of 7, that reads layer boundaries 0, 1, 2; a row drafts the token after its own position; its sizes fit"
    )
    assert one.pair.summary.startswith(summary)
    config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
    del config["sample_from_anchor"]
    (drafter / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (one,) = diagnose(doctor_options(model=str(target), drafters=(str(drafter),))).drafters
    assert one.pair is not None
    assert "a row is expected to draft the token after its own position, which the first drafts will show; its" in one.pair.summary
    other = write_random_block(tmp_path / "other", hidden_size=64)
    found = diagnose(doctor_options(model=str(target), drafters=(str(other),)))
    assert not found.works
    assert any("it was made for another model" in problem for problem in found.problems)


def test_auto_uses_the_block_drafter_in_the_draft_folder_of_the_target(tmp_path: Path) -> None:
    skip_without_kernels()
    target, successor = write_successor_target(tmp_path / "target", "qwen3", sharpness=4.0)
    write_perfect_block(target / "draft", successor, sharpness=4.0)
    with LLM(str(target), kv_cache_gb=0.05) as llm:
        assert [drafter.name for drafter in llm.engine.speculator.drafters] == ["suffix", "dspark"]
    with pytest.raises(IncompatibleDrafterError, match="holds a dspark drafter and no draft model: use drafter='auto'"):
        LLM(str(target), drafter="draft_model")


@pytest.mark.parametrize("folder", ["draft", "assistant"])
@pytest.mark.parametrize("is_file", [False, True])
def test_auto_uses_the_gguf_block_drafter_next_to_its_target(is_file: bool, folder: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    skip_without_kernels()
    target, successor = write_successor_target(tmp_path / "target", "qwen3", sharpness=4.0)
    config, tensors = perfect_block(successor, sharpness=4.0)
    write_gguf_block(target / folder / "drafter.gguf", config, tensors)
    count = len(successor)
    tokens = {
        "model": "llama", "tokens": [f"<{number}>" for number in range(count)], "scores": [-float(number) for number in range(count)],
        "token_type": [2, *[1] * (count - 1)],
    }  # fmt: skip
    metadata = {f"tokenizer.ggml.{name}": value for name, value in tokens.items()}
    model = write_gguf(target, target / "model.gguf", metadata=metadata) if is_file else target
    if is_file:
        (target / "model.safetensors").unlink()
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(str(model), kv_cache_gb=0.05) as llm:
        assert [drafter.name for drafter in llm.engine.speculator.drafters] == ["suffix", "dspark"]
        plain = llm.generate([[5, 6]], sampling, speculation={"enabled": False})[0]
        assert llm.generate([[5, 6]], sampling)[0].token_ids == plain.token_ids


def test_gguf_drafter_given_as_model_gets_a_hint(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    write_gguf_block(tmp_path / "drafter.gguf", DFLASH, block_tensors())
    with pytest.raises(CheckpointError, match=r"holds a drafter \(dflash\): pass it as the drafter of its target"):
        read_model_config(tmp_path / "drafter.gguf")


def test_doctor_checks_a_gguf_block_drafter(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    target, successor = write_successor_target(tmp_path / "target", "qwen3", sharpness=4.0)
    config, tensors = perfect_block(successor, sharpness=4.0)
    write_gguf_block(tmp_path / "drafter.gguf", config, tensors, "Q8_0")
    found = diagnose(doctor_options(model=str(target), drafters=(str(tmp_path / "drafter.gguf"),)))
    assert found.problems == []
    (one,) = found.drafters
    assert one.pair is not None
    assert one.pair.summary.startswith(
        "dspark drafter, blocks of 7, that reads layer boundaries 0, 1, 2; a row drafts the token after its own"
    )


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_dflash2_candidates_are_sampled_from_their_own_distribution(
    acceptance: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a temperature: with the target's noise, or with separate noise and the probabilities that rejection needs."""
    skip_without_kernels()
    draft_always(monkeypatch)
    real, seen = DraftSampler.sample_candidates, []

    def recording(self: DraftSampler, request: Request, path: Any, token_ids: Any, scores: Any, width: int, **more: Any) -> DraftTokens:
        found = real(self, request, path, token_ids, scores, width, **more)
        seen.append(((request.seed, request.sample_index, len(request.token_ids) + len(path)), token_ids.copy(), scores.copy(), found))
        return found

    monkeypatch.setattr(DraftSampler, "sample_candidates", recording)
    target = write_checkpoint(tmp_path / "target", "qwen3", num_hidden_layers=3, seed=4)
    drafter = str(write_random_block2(tmp_path / "drafter"))
    with LLM(str(target), drafter=drafter, kv_cache_gb=0.05, acceptance=acceptance) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True))
    assert len(seen) > 20
    for place, token_ids, scores, found in seen:
        assert len(token_ids) == 5
        exact = np.exp((scores.astype(np.float64) - scores.max()) / 0.8)
        (token,) = found.token_ids
        assert token in token_ids
        if acceptance == "rejection":
            assert found.draft_probs is not None
            np.testing.assert_array_equal(found.draft_probs.token_ids, token_ids)
            np.testing.assert_allclose(found.draft_probs.probs, exact / exact.sum(), atol=1e-6)
        else:
            assert token == draw(Distribution((scores / 0.8).astype(np.float32), token_ids.astype(np.int64), False), *place)


# Trees over independent rows


def marginals(random: np.random.Generator, confidence: float, num_rows: int = 15) -> list[DraftTokens]:
    """The four best tokens of each row, 0 to 3; 4 = any other."""
    rows = []
    for depth in range(num_rows):
        best = confidence * 0.97**depth
        others = np.sort(random.dirichlet(np.full(4, 0.5)) * (1.0 - best))[::-1]
        probs = sorted([best, *others[:3].tolist()], reverse=True)
        rows.append(DraftTokens(range(4), probs))
    return rows


def best_first(rows: Sequence[DraftTokens], num_rows: int) -> DraftTree:
    budget = DraftBudget(max_rows=num_rows, max_depth=len(rows))
    tree = best_first_tree(9, budget, len(rows), lambda path: rows[len(path)], "test")
    assert tree is not None
    tree.check()
    return tree


@pytest.mark.parametrize("confidence", [0.9, 0.7, 0.5])
def test_tree_from_independent_positions_contains_the_most_probable_paths(confidence: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(20):
        rows = [DraftTokens(row.token_ids[:3], row.probs[:3]) for row in marginals(random, confidence, 8)]
        tree = best_first(rows, 16)
        level, every = [1.0], [1.0]
        for row in rows:
            level = [prob * own for prob in level for own in row.probs]
            every += level
        reached = [1.0]
        assert tree.confidences is not None
        for parent, prob in zip(tree.parents[1:], tree.confidences[1:], strict=True):
            reached.append(reached[parent] * prob)
        np.testing.assert_allclose(sorted(reached), sorted(every)[-16:])


@pytest.mark.parametrize(("confidence", "least_gain"), [(0.9, 1.02), (0.8, 1.1), (0.7, 1.2), (0.5, 1.4)])
def test_tree_from_independent_positions_emits_more_than_an_equal_chain(confidence: float, least_gain: float, seed: int) -> None:
    random, emitted = np.random.default_rng(seed), {"chain": 0, "tree": 0}
    for _ in range(100):
        rows = marginals(random, confidence)
        trees = {
            "tree": best_first(rows, 16),
            "chain": DraftTree.chain(9, [row.token_ids[0] for row in rows], "test"),  # 16 rows with the root
        }
        borders = np.cumsum([row.probs for row in rows], 1)
        for _ in range(20):
            text = (borders < random.random((len(rows), 1))).sum(1).tolist()
            for name, tree in trees.items():
                emitted[name] += 1 + len(accepted(tree, text))
    assert emitted["tree"] > least_gain * emitted["chain"]


def accepted(tree: DraftTree, text: Sequence[int]) -> list[int]:
    """The nodes whose paths the text begins with."""
    nodes: list[int] = []
    for token in text:
        found = [node for node in tree.children(nodes[-1] if nodes else 0) if tree.token_ids[node] == token]
        if not found:
            break
        nodes += found
    return nodes


@pytest.mark.parametrize("tree_width", [1, 3])
def test_block_drafts_from_full_logits_equal_those_from_ranked_logits(
    tree_width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A banned id that neither text nor drafts hold keeps the pass from ranking the rows, and changes nothing else."""
    skip_without_kernels()
    draft_always(monkeypatch)
    target = write_checkpoint(tmp_path / "target", "llama")
    drafter = write_random_block(tmp_path / "drafter", vocab_size=VOCAB_SIZE)
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    options = {"tree_width": tree_width, "num_speculative_tokens": 6, "kv_cache_gb": 0.05}
    with LLM(str(target), drafter=str(drafter), **options) as llm:
        ranked = llm.generate([[5, 6, 7]], sampling, speculation={"trees": True})[0]
        used = {*ranked.token_ids, *(token for step in ranked.steps or () for token in step.draft_token_ids)}
        banned = next(token for token in range(VOCAB_SIZE) if token not in used)
        whole = llm.generate([[5, 6, 7]], replace(sampling, banned_token_ids=[banned]), speculation={"trees": True})[0]
    drafts = [[step.draft_token_ids for step in output.steps or ()] for output in (ranked, whole)]
    assert drafts[0] == drafts[1]
    assert any(len(set(step)) > 1 for step in drafts[0])


def test_block_drafter_skips_context_passes_while_drafting_does_not_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first draft afterwards attends to the last rows only."""
    skip_without_kernels()
    num_plain = 300

    class DraftsLate(FixedDraftLength):
        def skip_reason(self, request: Request, drafter: Drafter) -> SkipReason | None:
            return SkipReason.UNPROFITABLE if request.num_output_tokens < num_plain else None

    monkeypatch.setattr(loader_module, "_make_policy", lambda *_: DraftsLate(6))
    target = write_checkpoint(tmp_path / "target", "llama")
    folder = write_random_block(tmp_path / "drafter", vocab_size=VOCAB_SIZE)
    options: dict[str, Any] = {"dtype": "f32", "draft_quantization": "none", "max_model_len": 512, "kv_cache_gb": 0.05}
    with LLM(str(target), drafter=str(folder), **options) as llm:
        (drafter,) = llm.engine.speculator.drafters
        assert isinstance(drafter, BlockDrafter)
        passes, run_context = list[PendingContext](), drafter.head.run_context
        monkeypatch.setattr(drafter.head, "run_context", lambda rows: passes.extend(rows) or run_context(rows))
        hidden_states, cache = list[Any](), drafter.context_cache
        append = cache.append_hidden_states
        monkeypatch.setattr(cache, "append_hidden_states", lambda *args: hidden_states.extend(args[2].copy()) or append(*args))
        sampling = SamplingParams(max_tokens=num_plain + 20, ignore_eos=True)
        (output,) = llm.generate([[7, 9] * 40], sampling, speculation={"trees": True})
    counts = [one.rows.num_rows for one in passes]
    assert counts[0] == 80
    assert MAX_PENDING_CONTEXT_ROWS < counts[1] <= MAX_DEFERRED_CONTEXT_ROWS
    assert max(counts[2:]) <= 7
    late = passes[1]
    first = 80 + num_plain - 1 - counts[1]
    assert (late.rows.cached_len, late.rows.first_visible_slot) == (first, first)
    np.testing.assert_array_equal(late.hidden_states, hidden_states[first : first + counts[1]])
    assert any(step.draft_token_ids for step in output.steps or ())


@pytest.mark.parametrize("num_drafting", [0, 40])
def test_follow_up_request_finds_the_context_of_a_text_whose_drafts_were_accepted(
    num_drafting: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last 100 tokens were generated without drafts, and their context rows are computed when the request ends."""
    skip_without_kernels()

    class DraftsEarly(FixedDraftLength):
        def skip_reason(self, request: Request, drafter: Drafter) -> SkipReason | None:
            return None if request.num_output_tokens < num_drafting else SkipReason.UNPROFITABLE

    monkeypatch.setattr(loader_module, "_make_policy", lambda *_: DraftsEarly(4))
    target, successor = write_successor_target(tmp_path / "target", "qwen3", sharpness=4.0)
    folder = write_perfect_block(tmp_path / "drafter", successor, sharpness=4.0)
    with LLM(str(target), drafter=str(folder), max_model_len=512, kv_cache_gb=0.05) as llm:
        (drafter,) = llm.engine.speculator.drafters
        assert isinstance(drafter, BlockDrafter)
        passes, run_context = list[PendingContext](), drafter.head.run_context
        prompt = [5, 6] * 40
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=num_drafting + 100, ignore_eos=True))
        assert (output.speculation.num_accepted_tokens > 0) == (num_drafting > 0)
        monkeypatch.setattr(drafter.head, "run_context", lambda rows: passes.extend(rows) or run_context(rows))
        llm.generate([[*prompt, *output.token_ids, *range(5, 85)]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert (passes[0].rows.first_visible_slot == 0) == (num_drafting > 0)


@pytest.mark.parametrize("is_right", [False, True])
def test_prompt_context_waits_for_a_draft_if_the_last_requests_drafts_were_all_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_right: bool
) -> None:
    skip_without_kernels()
    monkeypatch.setattr(loader_module, "_make_policy", lambda *_: FixedDraftLength(4))
    target, successor = write_successor_target(tmp_path / "target", "qwen3", sharpness=4.0)
    drafted = successor if is_right else np.roll(successor, len(successor) // 2)
    folder = write_perfect_block(tmp_path / "drafter", drafted, sharpness=4.0)
    with LLM(str(target), drafter=str(folder), max_model_len=512, kv_cache_gb=0.05) as llm:
        (drafter,) = llm.engine.speculator.drafters
        assert isinstance(drafter, BlockDrafter)
        (first,) = llm.generate([[5, 6] * 40], SamplingParams(max_tokens=20, ignore_eos=True))
        assert first.speculation.num_draft_tokens > 0
        assert (first.speculation.num_accepted_tokens > 0) == is_right
        passes, run_context = list[PendingContext](), drafter.head.run_context
        monkeypatch.setattr(drafter.head, "run_context", lambda rows: passes.extend(rows) or run_context(rows))
        llm.generate([[7, 8] * 40], SamplingParams(max_tokens=2, ignore_eos=True))  # too short for a draft
    assert [one.rows.num_rows for one in passes[:1]] == ([80] if is_right else [])


def test_dropped_context_positions_are_unknown_to_later_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_kernels()
    target = write_checkpoint(tmp_path / "target", "llama")
    folder = write_random_block(tmp_path / "drafter", vocab_size=VOCAB_SIZE)
    with LLM(str(target), drafter=str(folder), kv_cache_gb=0.05) as llm:
        (drafter,) = llm.engine.speculator.drafters
        assert isinstance(drafter, BlockDrafter)
        dropped: list[int] = []
        context, drop = drafter.context_cache, drafter.context_cache.drop_oldest_pending

        def drop_and_look(request: Request, num_kept: int) -> None:
            context._hashes[:] = 7  # as if all slots held rows of other requests
            drop(request, num_kept)
            dropped.append(int((context._hashes == 0).sum()))

        monkeypatch.setattr(context, "drop_oldest_pending", drop_and_look)
        monkeypatch.setattr(llm.engine.speculator.policy, "skip_reason", lambda *_: SkipReason.UNPROFITABLE)
        llm.generate([[7, 9]], SamplingParams(max_tokens=MAX_DEFERRED_CONTEXT_ROWS + 20, ignore_eos=True))
    assert dropped == [MAX_PENDING_CONTEXT_ROWS + 1]
