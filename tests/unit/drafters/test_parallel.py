"""P-EAGLE in the engine: one pass a proposal, for any depth and number of requests; right drafts stay right."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.eagle_checkpoints import (
    DRAFT_IDS,
    EAGLE3,
    FIRST_TOKEN,
    VOCAB_SIZE,
    eagle3_tensors,
    write_head,
    write_recalling_peagle,
    write_recalling_target,
)
from paceline import LLM, SamplingParams
from paceline.drafters.recurrent_heads.drafter import ParallelDrafter
from paceline.errors import CheckpointError, ConfigError, IncompatibleDrafterError
from paceline.runtimes.native.library import kernels_path
from paceline.sampling.draw import draw
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.request import Request

DEPTH = 5
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)

pytestmark = pytest.mark.skipif(kernels_path() is None, reason="no native kernels for this machine")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recalling_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recalling_peagle(tmp_path_factory.mktemp("head"))


def open_llm(target: Path, head: Path, *, max_rows: int | None = None, **options: object) -> LLM:
    given = {"backend": "native", "threads": 1, "max_model_len": 256, "kv_cache_gb": 0.05, "num_speculative_tokens": DEPTH, **options}
    llm = LLM(str(target), drafter=str(head), **given)  # type: ignore[arg-type]
    llm.engine.speculator.policy = FixedDraftLength(DEPTH, max_rows=max_rows)
    return llm


def drafter_of(llm: LLM) -> ParallelDrafter:
    assert isinstance(llm.drafter, ParallelDrafter)
    return llm.drafter


def prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [[FIRST_TOKEN, *random.choice(DRAFT_IDS, length - 1).tolist()] for length in lengths]


@pytest.mark.parametrize("width", [1, 3])
def test_peagle_proposal_is_one_pass_for_all_requests(width: int, target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(target, head, max_rows=1 + width * DEPTH, tree_width=width)
    drafter = drafter_of(llm)
    runtime, propose, depths = drafter.head.runtime, drafter.propose, []

    def counted(requests: Sequence[object], budgets: Sequence[object]) -> object:
        before = runtime.num_passes
        trees = propose(requests, budgets)  # type: ignore[arg-type]
        assert runtime.num_passes - before == any(tree is not None for tree in trees)
        depths.extend(tree.tree_depth for tree in trees if tree is not None)
        return trees

    monkeypatch.setattr(drafter, "propose", counted)
    for outputs in (llm.generate(prompts(31, 40, 64), GREEDY), llm.generate(prompts(33), GREEDY)):
        assert all(output.speculation.num_accepted_tokens > 25 for output in outputs)
    assert max(depths) == DEPTH
    assert "all positions in one pass" in drafter.traits.description


@pytest.mark.parametrize("changes", [{"repetition_penalty": 1.2}, {"temperature": 1.0, "top_k": 20, "seed": 5}, {"presence_penalty": 0.5}])
def test_peagle_drafts_follow_the_sampling_parameters(changes: dict[str, float], target: Path, head: Path) -> None:
    """Rows that more than the temperature changes: the path before a masked position counts."""
    params = replace(GREEDY, **changes)  # type: ignore[arg-type]
    texts = prompts(40, 33)
    plain = LLM(str(target), drafter="none", backend="native", threads=1, max_model_len=256, enable_prefix_caching=False)
    expected = [plain.generate([text], params)[0].token_ids for text in texts]
    for max_rows, width in ((None, 1), (16, 3)):
        outputs = open_llm(target, head, max_rows=max_rows, tree_width=width).generate(texts, params)
        assert [output.token_ids for output in outputs] == expected
        assert width > 1 or all(output.speculation.acceptance_rate == 1.0 for output in outputs)


def test_peagle_sampled_drafts_use_the_noise_of_their_positions(target: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is the token that the target would draw with the head's distribution, independent of the rest of the pass."""
    llm = open_llm(target, head)
    drafter = drafter_of(llm)
    run_target_feature_pairs, propose, seen, checked = drafter.head.run_target_feature_pairs, drafter.propose, [], []

    def remembered(*args: Any, **options: Any) -> Any:
        outputs = run_target_feature_pairs(*args, **options)
        seen.append(outputs.logits.copy())
        return outputs

    def compared(requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> object:
        seen.clear()
        trees = propose(requests, budgets)
        rows = iter(np.concatenate(seen)) if seen else iter(())
        for request, tree in zip(requests, trees, strict=True):
            for level, token in enumerate(() if tree is None else tree.token_ids[1:]):
                row = np.full(VOCAB_SIZE, -np.inf, np.float32)
                row[DRAFT_IDS] = next(rows)
                law = request.processor.process(row, tree.token_ids[1 : 1 + level])
                checked.append(token == draw(law, request.seed, 0, len(request.token_ids) + level))
        return trees

    monkeypatch.setattr(drafter.head, "run_target_feature_pairs", remembered)
    monkeypatch.setattr(drafter, "propose", compared)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=6.0, seed=3)
    for texts in (prompts(40), prompts(33, 40)):
        llm.generate(texts, params)
    assert len(checked) > 20
    assert all(checked)


def test_peagle_draft_across_a_block_border_uses_a_spare_block(target: Path, head: Path) -> None:
    llm = open_llm(target, head, enable_prefix_caching=False)
    for length in range(26, 36):
        (output,) = llm.generate(prompts(length), replace(GREEDY, max_tokens=14))
        assert output.speculation.acceptance_rate == 1.0


SIZES = {"hidden_size": 72, "head_dim": 18, "eagle_aux_hidden_state_layer_ids": [0, 2, 4]}


def random_peagle(directory: Path, mask: torch.Tensor | None, **config: object) -> Path:
    spec = {**EAGLE3, **SIZES, "parallel_drafting": True, **config}
    more = {} if mask is None else {"mask_hidden": mask}
    return write_head(directory, spec, eagle3_tensors(spec, target_hidden=72) | more)


def test_peagle_mask_token_id_may_be_given_as_an_option(target: Path, tmp_path: Path) -> None:
    """SpecForge's files have none."""
    files = random_peagle(tmp_path, torch.zeros(1, 1, 216))
    with pytest.raises(IncompatibleDrafterError, match=r"has no mask_token_id.*--drafter-options mask_token_id=ID"):
        open_llm(target, files)
    llm = open_llm(target, files, drafter_options={"mask_token_id": 7})
    assert drafter_of(llm).head.masked_pair is not None
    assert drafter_of(llm).head.masked_pair.mask_token_id == 7
    with pytest.raises(ConfigError, match="mask_token_id is -1: use a token id"):
        open_llm(target, files, drafter_options={"mask_token_id": -1})
    with pytest.raises(IncompatibleDrafterError, match="the mask_token_id is 97, embeddings end at 97"):
        open_llm(target, files, drafter_options={"mask_token_id": 97})


@pytest.mark.parametrize("names", [{"mask_token_id": 5}, {"pard_token": 5}, {"ptd_token_id": 5}, {"dflash_config": {"mask_token_id": 5}}])
@pytest.mark.parametrize("shape", [(216,), (1, 216), (1, 1, 216)])
def test_peagle_mask_is_read_under_all_names_and_shapes(
    names: dict[str, object], shape: tuple[int, ...], target: Path, tmp_path: Path
) -> None:
    llm = open_llm(target, random_peagle(tmp_path, torch.arange(216.0).reshape(shape), **names))
    masked = drafter_of(llm).head.masked_pair
    assert masked is not None
    assert masked.mask_token_id == 5
    assert masked.feature.tolist() == list(range(216))


def test_peagle_head_without_mask_hidden_is_refused(target: Path, tmp_path: Path) -> None:
    for name, mask in (("none", None), ("short", torch.zeros(1, 1, 72))):
        files = random_peagle(tmp_path / name, mask, mask_token_id=5)
        with pytest.raises(CheckpointError, match=r"mask_hidden.*\[1, 1, 216\]"):
            open_llm(target, files)
