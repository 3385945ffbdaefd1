"""The Medusa drafter: what it loads and what it proposes."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from harness.checkpoint_files import edit_tensors
from harness.checkpoints import write_checkpoint
from harness.loaded_targets import load_target
from harness.medusa_checkpoints import Arrays, random_heads, write_heads
from paceline import SamplingParams
from paceline.config import SpeculationConfig
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.medusa.drafter import CandidateAccuracy, MedusaDrafter, open_medusa
from paceline.drafters.medusa.network import MedusaOutputs
from paceline.drafters.medusa.trees import STATIC_TREES, static_tree_nodes
from paceline.errors import CheckpointError, IncompatibleDrafterError
from paceline.kv_cache.cache import CachedSequence
from paceline.runtimes.logits_summary import RowSampling, SummaryOptions, decode_summaries
from paceline.runtimes.torch.ops import summarize_logits
from paceline.sampling.draw import draw
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.drafter import CommittedRows, DraftBudget
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)


class Heads:
    """A network whose rows are written down: depth d of a feature f [1] is row f + d of a table."""

    def __init__(self, table: NDArray[np.float32], num_heads: int = 3, token_map: NDArray[np.int64] | None = None) -> None:
        self.table = table
        self.heads = SimpleNamespace(num_heads=num_heads, token_map=token_map, notices=(), num_lm_head_rows=table.shape[1])
        self.num_passes = 0
        self.summary_options: SummaryOptions | None = None

    def forward(self, features: NDArray[np.float32], num_heads: int, sampling: RowSampling | None = None) -> MedusaOutputs:
        self.num_passes += 1
        logits = [self.table[features[:, 0].astype(int) + depth] for depth in range(num_heads)]
        if self.summary_options is None:
            return MedusaOutputs(logits.__getitem__, [])
        of_heads = [None] * num_heads if sampling is None else sampling
        found = [summarize_logits(torch.from_numpy(rows), self.summary_options, draw) for rows, draw in zip(logits, of_heads, strict=True)]
        return MedusaOutputs(logits.__getitem__, [decode_summaries(records.numpy()) for records in found])


def a_drafter(table: NDArray[np.float32], vocab_size: int = 0, **options: object) -> MedusaDrafter:
    tree = str(options.pop("tree", "probability"))
    return MedusaDrafter(Heads(table, **options), vocab_size=vocab_size or table.shape[1], tree=tree)  # type: ignore[arg-type]


def a_request(token_ids: Sequence[int], params: SamplingParams = GREEDY, vocab_size: int = 50, seed: int = 0) -> Request:
    processor = LogitsProcessor(params, vocab_size, token_ids)
    return Request(list(token_ids), len(token_ids), params, processor, CachedSequence(), seed=seed, sample_index=0, max_len=999)


def show(drafter: MedusaDrafter, request: Request, feature: float, num_rows: int = 1) -> None:
    """As after a pass whose last row produced the request's last token."""
    start = len(request.token_ids) - 1 - num_rows
    rows = np.zeros((num_rows, 1), np.float32)
    rows[-1] = feature
    drafter.observe([CommittedRows(request, start, num_rows, rows)])


@pytest.fixture(scope="module")
def table() -> NDArray[np.float32]:
    return np.random.default_rng(8).normal(0, 2, (12, 50)).astype(np.float32)


def test_medusa_tensor_errors_name_the_wrong_tensors(tmp_path: Path) -> None:
    target = load_target(write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=1), SpeculationConfig())

    def opened(name: str, layout: str, arrays: Arrays, **options: object) -> MedusaDrafter:
        files = HeadFiles.open(write_heads(tmp_path / name, layout, arrays, **options))  # type: ignore[arg-type]
        return open_medusa(files, target)

    arrays = random_heads()
    lacking = {name: array for name, array in arrays.items() if name not in ("1.0.linear.bias", "2.1.weight")}
    with pytest.raises(CheckpointError, match=r"it lacks 2 tensors: 1\.0\.linear\.bias \[64\], 2\.1\.weight \[97, 64\]"):
        opened("lacking", "rows", lacking)
    wrong = arrays | {"2.1.weight": np.zeros((90, 64), np.float32)}
    with pytest.raises(CheckpointError, match=r"it holds 1 tensor: lm_heads\.2\.weight \[90, 64\] instead of \[97, 64\]"):
        opened("wrong", "vllm", wrong)
    with pytest.raises(IncompatibleDrafterError, match=r"features of 32 values, the target's have 64"):
        opened("narrow", "rows", random_heads(hidden=32))
    with pytest.raises(IncompatibleDrafterError, match=r"has 4000 token ids, the target 97"):
        opened("wide", "rows", random_heads(rows=4000))
    with pytest.raises(CheckpointError, match=r"token_map has 96 entries for vocabulary matrices of 97 rows"):
        opened("short map", "vllm", arrays, token_map=np.arange(96))
    with pytest.raises(IncompatibleDrafterError, match=r"token_map has 97 ids, from 1 to 97, of the target's 97"):
        opened("wrong map", "vllm", arrays, token_map=np.arange(1, 98))
    with pytest.raises(IncompatibleDrafterError, match=r"token_map has 97 ids, from 0 to 0, of the target's 97, each at most once"):
        opened("double map", "vllm", arrays, token_map=np.zeros(97, np.int64))
    bare = tmp_path / "lacking" / "medusa_lm_head.safetensors"
    edit_tensors(bare.parent, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".linear." in name], bare.name)
    with pytest.raises(CheckpointError, match="holds no medusa heads"):
        open_medusa(HeadFiles.open(bare), target)


def test_number_of_medusa_heads_is_taken_from_the_tensors(tmp_path: Path) -> None:
    target = load_target(write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=1), SpeculationConfig())
    directory = write_heads(tmp_path / "heads", "rows", random_heads(num_heads=5), config={"medusa_num_heads": 2})
    drafter = open_medusa(HeadFiles.open(directory), target)
    assert drafter.traits.description.startswith("medusa (5 heads")
    assert any("names 2 medusa heads, the file holds 5" in notice for notice in drafter.traits.notices)


def test_medusa_chain_takes_the_best_token_of_each_head(table: NDArray[np.float32]) -> None:
    drafter = a_drafter(sharpened(table))
    request = a_request([1, 2, 3, 4])
    show(drafter, request, 5.0, num_rows=2)
    (tree,) = drafter.propose([request], [DraftBudget(4, 3)])
    assert tree is not None
    assert list(tree.token_ids) == [4, *(int(table[5 + depth].argmax()) for depth in range(3))]
    assert list(tree.parents) == [-1, 0, 1, 2]


def test_sampled_medusa_chain_uses_the_noise_of_the_target(table: NDArray[np.float32]) -> None:
    """What the target draws where its row is the head's: the processors see the chain before."""
    params = SamplingParams(temperature=1.2, top_k=20, repetition_penalty=1.5)
    for seed in range(40):
        drafter, request = a_drafter(table), a_request([1, 2, 3, 4], params, seed=seed)
        show(drafter, request, 2.0)
        (tree,) = drafter.propose([request], [DraftBudget(64, 3)])
        assert tree is not None
        chain: list[int] = []
        for depth in range(3):
            chain.append(draw(request.processor.process(table[2 + depth], chain), seed, 0, 4 + depth))
        assert tuple(chain) in paths_of(tree)


def test_medusa_tree_contains_the_most_probable_nodes(table: NDArray[np.float32]) -> None:
    """With a mask every node costs a row: the tree is the best N by probability of their whole path, which the heads give by product."""
    drafter, request = a_drafter(table), a_request([4, 4])
    show(drafter, request, 0.0)
    (tree,) = drafter.propose([request], [DraftBudget(13, 3)])
    assert tree is not None
    probs = [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in table[:3].astype(np.float64)]
    ranks = [np.argsort(-row)[:12] for row in table[:3]]
    paths = {(int(a),): probs[0][a] for a in ranks[0]}
    paths |= {(int(a), int(b)): probs[0][a] * probs[1][b] for a in ranks[0] for b in ranks[1]}
    paths |= {(int(a), int(b), int(c)): probs[0][a] * probs[1][b] * probs[2][c] for a in ranks[0] for b in ranks[1] for c in ranks[2]}
    best = sorted(paths, key=lambda path: -paths[path])[:12]
    assert paths_of(tree) == set(best)


def test_medusa_rows_form_a_tree_if_the_heads_are_uncertain(table: NDArray[np.float32]) -> None:
    """A tree width of 1 limits the number of draft tokens, not their shape."""
    sure = np.zeros_like(table)
    sure[:, 7] = 30.0
    for rows, parents in ((table * 0.01, (-1, 0, 0, 0)), (sure, (-1, 0, 1, 2))):
        drafter, request = a_drafter(rows), a_request([4, 4])
        show(drafter, request, 0.0)
        (tree,) = drafter.propose([request], [DraftBudget(4, 3)])
        assert tree is not None
        assert tuple(tree.parents) == parents


def sharpened(table: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows with the same best token, which has nearly all the probability."""
    return table + 30 * (table == table.max(axis=1, keepdims=True)).astype(np.float32)


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return set(paths[1:])


@pytest.mark.parametrize("name", STATIC_TREES)
def test_published_medusa_trees_are_valid(name: str) -> None:
    choices = STATIC_TREES[name].split()
    assert len(choices) == len(set(choices)) == 63
    assert max(map(len, choices)) <= 4
    assert all(choice[:-1] in {"", *choices[:index]} for index, choice in enumerate(choices))  # parents first
    full = static_tree_nodes(name, 9, 64)
    assert len(full) == 63
    assert static_tree_nodes(name, 9, 9) == full[:8]
    assert all(depth < 2 for _, depth, _ in static_tree_nodes(name, 2, 64))


def test_published_medusa_tree_drafts_the_listed_ranks(table: NDArray[np.float32]) -> None:
    drafter, request = a_drafter(table, tree="zephyr_stage2", num_heads=4), a_request([7, 7])
    show(drafter, request, 1.0)
    (tree,) = drafter.propose([request], [DraftBudget(64, 4)])
    assert tree is not None
    ranks = [np.argsort(-row, kind="stable") for row in table[1:5]]
    expected = {
        tuple(int(ranks[depth][int(rank)]) for depth, rank in enumerate(choice)) for choice in STATIC_TREES["zephyr_stage2"].split()
    }
    assert paths_of(tree) == expected


def test_medusa_accuracy_tree_follows_the_measured_accuracy(table: NDArray[np.float32]) -> None:
    """If the third candidate of a head is always right, it is drafted, and alone if there is room for one."""
    drafter = a_drafter(table, tree="accuracy", num_heads=1)
    ranks = np.argsort(-table[3])
    tried = []
    for _ in range(30):
        request = a_request([1, 1])
        show(drafter, request, 3.0)
        (tree,) = drafter.propose([request], [DraftBudget(2, 4)])
        assert tree is not None
        tried.append(tree.token_ids[1])
        request.token_ids.append(int(ranks[2]))
        show(drafter, request, 3.0)
        drafter.release(request)
    assert tried[0] == ranks[0]
    assert tried[-1] == ranks[2]


def test_medusa_accuracy_counts_positions_after_accepted_drafts() -> None:
    accuracy = CandidateAccuracy()
    candidates = [[4, 5], [6, 7], [8]]
    accuracy.observe(candidates, [5, 6])  # the first head's second candidate, then the second head's first; the third has no statistics
    assert accuracy.num_trials == [1.0, 1.0, 0.0]
    assert [hits[:2] for hits in accuracy.num_hits] == [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    assert accuracy.estimate(7, 0, 0.25) == 0.25


def test_sampled_medusa_drafts_carry_their_distribution(table: NDArray[np.float32], large_counts: bool) -> None:
    """Drawn from each head's distribution, which the tree contains, and with other noise than the target's."""
    num_seeds = 3000 if large_counts else 1500
    counts = np.zeros(50)
    differ = 0
    for seed in range(num_seeds):
        drafter, request = a_drafter(table, num_heads=1), a_request([1, 2], SAMPLED, seed=seed)
        show(drafter, request, 6.0)
        (tree,) = drafter.propose([request], [DraftBudget(2, 3, needs_draft_probs=True)])
        assert tree is not None
        distribution = tree.draft_probs[0]
        counts[tree.token_ids[1]] += 1
        differ += tree.token_ids[1] != draw(request.processor.process(table[6]), seed, 0, 2)
    probs = np.exp(table[6] - table[6].max())
    probs /= probs.sum()
    assert np.allclose(distribution.probs, probs, atol=1e-6)
    expected = num_seeds * probs
    large = expected > 10
    statistic = ((counts[large] - expected[large]) ** 2 / expected[large]).sum()
    assert statistic < large.sum() + 5 * np.sqrt(2 * large.sum())
    assert differ > num_seeds / 6


def test_medusa_propose_runs_one_pass_for_all_requests(table: NDArray[np.float32]) -> None:
    drafter = a_drafter(sharpened(table))
    requests = [a_request([1, token]) for token in (2, 3, 4, 5)]
    for feature, request in enumerate(requests[:3]):
        show(drafter, request, float(feature))
    budgets = [DraftBudget(4, 3), DraftBudget(3, 3), DraftBudget(1, 3), DraftBudget(9, 3)]
    trees = drafter.propose(requests, budgets)
    assert [None if tree is None else tree.num_draft_tokens for tree in trees] == [3, 2, None, None]
    assert drafter._network.num_passes == 1  # type: ignore[attr-defined]
    assert [int(token) for token in trees[1].token_ids[1:]] == [int(table[1].argmax()), int(table[2].argmax())]  # type: ignore[union-attr]


def test_medusa_ignores_a_hidden_state_of_another_position(table: NDArray[np.float32]) -> None:
    drafter, request = a_drafter(table), a_request([1, 2, 3])
    budget = DraftBudget(4, 3)
    assert drafter.propose([request], [budget]) == [None]
    drafter.observe([CommittedRows(request, 0, 1, np.zeros((1, 1), np.float32))])  # a chunk of the prompt that emits nothing
    assert drafter.propose([request], [budget]) == [None]
    show(drafter, request, 1.0)
    assert drafter.propose([request], [budget]) != [None]
    request.token_ids.append(5)  # a token whose row this drafter was not shown
    assert drafter.propose([request], [budget]) == [None]
    show(drafter, request, 1.0)
    assert drafter.propose([request], [budget]) != [None]


def test_medusa_never_drafts_ids_beyond_the_target_vocabulary() -> None:
    wide = np.zeros((1, 60), np.float32)
    wide[0, 55], wide[0, 8] = 9.0, 5.0
    narrow = np.array([[0.0, 3.0, 2.0, 9.0]], np.float32)
    for drafter, expected in (
        (a_drafter(wide, vocab_size=50, num_heads=1), [8]),
        (a_drafter(narrow, vocab_size=50, num_heads=1), [3]),
        (a_drafter(narrow, vocab_size=50, num_heads=1, token_map=np.array([20, 30, 40, 55])), [30]),
    ):
        request = a_request([1, 2])
        show(drafter, request, 0.0)
        (tree,) = drafter.propose([request], [DraftBudget(2, 4)])
        assert tree is not None
        assert list(tree.token_ids[1:]) == expected


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tree", ["probability", "accuracy", "zephyr_stage2"])
def test_nan_medusa_logits_remove_the_draft_of_one_request_only(table: NDArray[np.float32], tree: str, params: SamplingParams) -> None:
    broken = table.copy()
    broken[0] = np.nan
    drafter, requests = a_drafter(broken, num_heads=1, tree=tree), [a_request([1, 2], params), a_request([1, 3], params)]
    show(drafter, requests[0], 0.0)
    show(drafter, requests[1], 4.0)
    trees = drafter.propose(requests, [DraftBudget(2, 1)] * 2)
    assert trees[0] is None
    assert trees[1] is not None
