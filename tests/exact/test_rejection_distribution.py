"""Text made of drafts kept by rejection has exactly the target's distribution.

Over seeds, with real logits, processors and noise, several steps; and by enumeration where trees are cut because blocks are short.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from harness.enumerated_distributions import (
    Branching,
    Drafts,
    Shape,
    distribution_of_step,
    draw_tree,
    ending_probs,
    full_probs,
    num_tokens,
    plain_distribution,
    sparse_probs,
)
from harness.scripted_target import LEAST_EXPECTED, ScriptedTarget, Tokens, chi_square_p_value, joint_counts
from paceline.drafters.draft_model import _tokens_per_level
from paceline.kv_cache.cache import KVCache
from paceline.sampling import residual as residual_module
from paceline.sampling.noise import Purpose, step_uniform
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.sampling.residual import TokenProbs, acceptance_ratio, draw_distinct
from paceline.speculation import rejection
from paceline.speculation.commit import commit
from paceline.speculation.propose import reserve_rows
from paceline.speculation.rejection import verify_rejection
from paceline.speculation.request import Request
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.tree import DraftSampling, DraftTree


@dataclass(frozen=True)
class Scene:
    """A target, a drafter that is right in part, and how much of what it drafts.

    Attributes:
        widths: draws at each node, by depth.
        share: of the target's logits in the drafter's.
        num_seeds: texts by default; one takes 0.6 ms, with penalties 1 ms.
    """

    params: SamplingParams
    widths: Sequence[int]
    num_seeds: int
    vocab_size: int = 32
    num_tokens: int = 3
    share: float = 0.6

    @property
    def target(self) -> ScriptedTarget:
        return TARGETS[self.vocab_size]

    def exact_distribution(self) -> dict[Tokens, float]:
        return self.target.exact_joint_distribution(self.params, self.num_tokens)

    def request(self, seed: int) -> Request:
        return self.target.request(self.params, seed, self.num_tokens)

    def draft_row(self, context: Tokens) -> np.ndarray:
        own = OTHERS[self.vocab_size].logits(context)
        return (self.share * self.target.logits(context) + 0.5 * own).astype(np.float32)


PROMPT = (2, 0, 1)
TARGETS = {size: ScriptedTarget(size, PROMPT, spread=1.2) for size in (3, 32)}
OTHERS = {3: ScriptedTarget(3, PROMPT, spread=2.4, script=3), 32: ScriptedTarget(32, PROMPT, spread=1.2, script=1)}
FREE = SamplingParams(temperature=1.0)
TOP_K = SamplingParams(temperature=1.0, top_k=4)
PENALTIES = SamplingParams(temperature=0.9, top_p=0.6, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.4)
SCENES = {
    "chain": Scene(TOP_K, (1, 1), 2_500),
    "chain with penalties": Scene(PENALTIES, (1, 1), 2_000),
    "tree": Scene(TOP_K, (2, 2), 2_500),
    "tree with penalties": Scene(PENALTIES, (2, 2), 2_000),
    "wide, then a chain": Scene(TOP_K, (3, 1), 2_000),
    "long chain over few ids": Scene(FREE, (1, 1, 1, 1), 2_000, vocab_size=3, num_tokens=5, share=0.0),
    "tree over few ids": Scene(FREE, (2, 1, 1), 2_000, vocab_size=3, num_tokens=5, share=0.0),
}
LARGE_NUM_SEEDS = 100_000
NUM_BROKEN_SEEDS = {3: 2_000, 32: 800}  # by vocabulary: what is wrong with noise shows late


def _draft(scene: Scene, request: Request) -> DraftTree:
    """Draws at every node, as deep as the text has room for."""
    widths = scene.widths[: request.num_remaining_tokens - 1]
    paths: list[Tokens] = [()]
    parents: list[int] = []
    draft_probs: dict[int, TokenProbs] = {}
    for node, path in enumerate(paths):  # `paths` grows while it is read
        if len(path) == len(widths):
            break
        draft_probs[node] = TokenProbs.from_distribution(request.processor.process(scene.draft_row((*request.token_ids, *path)), path))
        key = request.seed, request.sample_index, len(request.token_ids)
        drawn = draw_distinct(draft_probs[node], widths[len(path)], *key, len(path))
        paths.extend((*path, token) for token in drawn)
        parents.extend([node] * len(drawn))
    return DraftTree.from_nodes(request.token_ids[-1], [path[-1] for path in paths[1:]], parents, "test", draft_probs)


def _speak(scene: Scene, seed: int) -> tuple[Tokens, int]:
    """One text, and how many of its tokens were drafts."""
    request, num_accepted = scene.request(seed), 0
    while not request.is_finished:
        tree = _draft(scene, request)
        result = verify_rejection(tree, scene.target.tree_logits(request.token_ids, tree), request)
        num_accepted += len(result.accepted_nodes)
        commit(request, result.token_ids, len(result.accepted_nodes), has_draft=True)
    return tuple(request.output_token_ids), num_accepted


def _p_value(scene: Scene, seeds: Sequence[int]) -> float:
    texts = np.array([_speak(scene, one)[0] for one in seeds], np.int64)
    return chi_square_p_value(joint_counts(texts), scene.exact_distribution())


@pytest.mark.spread(0.5)
@pytest.mark.parametrize("name", SCENES)
def test_rejection_over_seeds_has_the_joint_distribution_of_the_target(name, seed, large_counts, tally):
    scene = SCENES[name]
    num_seeds = LARGE_NUM_SEEDS if large_counts else scene.num_seeds
    assert sum(mass * num_seeds >= LEAST_EXPECTED for mass in scene.exact_distribution().values()) > 40
    tally["texts with drafts kept by rejection"] += num_seeds
    assert _p_value(scene, range(seed, seed + num_seeds)) > 0.001


@pytest.mark.parametrize("name", SCENES)
def test_rejection_distribution_cases_accept_and_reject_drafts(name, seed):
    accepted = [_speak(SCENES[name], one)[1] for one in range(seed, seed + 100)]
    assert len(set(accepted)) >= 3


def test_rejection_distribution_cases_contain_chains_and_trees():
    proposals = {name: _draft(scene, scene.request(1)).draft_sampling for name, scene in SCENES.items()}
    assert proposals["chain"] is proposals["long chain over few ids"] is DraftSampling.SAMPLED
    assert proposals["tree"] is proposals["wide, then a chain"] is DraftSampling.WITHOUT_REPLACEMENT


Break = Callable[[pytest.MonkeyPatch], None]


def _change(name: str, replacement: object) -> Break:
    return lambda patch: patch.setattr(rejection, name, replacement)


def _by_position_alone(patch: pytest.MonkeyPatch) -> None:
    """Noise that the next step meets again at the same position."""

    def uniform(seed: int, sample_index: int, first_position: int, purpose: Purpose, depth: int, index: int = 0) -> float:
        return step_uniform(seed, sample_index, 0, purpose, first_position + depth, index)

    for module in (rejection, residual_module):
        patch.setattr(module, "step_uniform", uniform)


def _path_ignored(patch: pytest.MonkeyPatch) -> None:
    process = LogitsProcessor.process
    patch.setattr(LogitsProcessor, "process", lambda processor, logits, path=(): process(processor, logits))


def _of_one_purpose(*key: int) -> float:
    return step_uniform(*key[:3], Purpose.ACCEPT, *key[4:])


BROKEN: dict[str, tuple[str, Break]] = {
    "the target's distribution in place of the residual": ("chain", _change("residual", lambda target, weights: target)),
    "the target's distribution in place of a tree's residual": ("tree", _change("residual", lambda target, weights: target)),
    "target and draft swapped": ("chain", _change("acceptance_ratio", lambda target, draft, token: acceptance_ratio(draft, target, token))),
    "a block that may end as its last draft may": (
        "long chain over few ids",
        _change("block_threshold", lambda share, weights: share),
    ),
    "one noise for accepting and for the residual": ("tree over few ids", _change("step_uniform", _of_one_purpose)),
    "noise of a step met again in the next": ("long chain over few ids", _by_position_alone),
    "a path left out of the penalties": ("chain with penalties", _path_ignored),
    "a path left out of a tree's penalties": ("tree with penalties", _path_ignored),
}


@pytest.mark.parametrize("wrong", BROKEN)
def test_fault_of_a_wrong_acceptance_rule_is_found(wrong, seed, monkeypatch):
    name, spoil = BROKEN[wrong]
    spoil(monkeypatch)
    assert _p_value(SCENES[name], range(seed, seed + NUM_BROKEN_SEEDS[SCENES[name].vocab_size])) < 0.001


# Trees cut for memory: by the real cache, every draft and every decision enumerated

BLOCK_SIZE = 2
DraftsOf = Callable[..., Drafts]  # of seed, case and vocabulary size
CUT_SHAPES: dict[str, Shape] = {
    "chain": (0, 1, 2),
    "three draws": (0, 0, 0),
    "two draws, the first goes on": (0, 0, 1, 3),
    "two draws, both go on": (0, 0, 1, 2),
    "two draws, the first goes on with two": (0, 0, 1, 1),
}
NUM_FULL_CASES, NUM_CUT_CASES = 1, 2  # distributions that leave no token out have many more ways to go
NUM_WRONG_CUTS = 40  # the first one that shows it ends the search


class Room:
    """A cache with few blocks in which a request drafts, alone or in front of another one whose known tokens need room as well.

    Args:
        committed_len: rows the request has in the cache.
        num_blocks: free for the drafts' pass.
        num_others: known tokens of the other request; 0 = there is none.
    """

    def __init__(self, committed_len: int, num_blocks: int, num_others: int) -> None:
        used = -(-committed_len // BLOCK_SIZE)
        self._cache = KVCache([], used + num_blocks, block_size=BLOCK_SIZE)
        self._request, self._other = (SCENES["tree over few ids"].request(0) for _ in range(2))
        self._num_others = num_others
        self._request.cached_sequence, self._other.cached_sequence = self._cache.new_sequence(), self._cache.new_sequence()
        self._cache.reserve_rows(self._request.cached_sequence, range(-1, committed_len - 1))
        self._cache.keep_path(self._request.cached_sequence, committed_len - 1)

    def cut(self, tree: DraftTree) -> DraftTree:
        """What the step would keep of `tree`."""
        batch = [RequestRows(self._request, 1, tree)]
        if self._num_others:
            batch.append(RequestRows(self._other, self._num_others, None))
        reserve_rows(batch, self._cache)
        self._cache.check_consistency()
        for rows in batch:
            self._cache.drop_reserved_rows(rows.request.cached_sequence)
        assert batch[0].tree is not None
        batch[0].tree.check()
        return batch[0].tree


def _rooms(shape: Shape) -> dict[Shape, Room]:
    """One room for each thing that can be left of a tree of this shape, but all of it; those that leave most come first."""
    whole = draw_tree(shape, full_probs(0, 0, max(3, len(shape))), Branching(()))
    found: dict[Shape, Room] = {}
    for committed_len in (1, 2):
        for num_others in (3, 0, 1):
            least = 1 + -(-num_others // BLOCK_SIZE)  # for the root and the other request
            for num_blocks in range(least, least + 2 * len(shape)):
                room = Room(committed_len, num_blocks, num_others)
                left = tuple(room.cut(whole).parents)
                if len(left) < len(whole.parents):
                    found.setdefault(left, room)
    return dict(sorted(found.items(), key=lambda one: -len(one[0])))


def _keeps_the_distribution(shape: Shape, room: Room, drafts: DraftsOf, seed: int, num_cases: int) -> bool:
    """Whether the distribution of a step whose trees are cut in this room is the target's in every case, to the last digit."""
    targets = sparse_probs if drafts is sparse_probs else full_probs
    cases = ((targets(seed, 2 * case, 3), drafts(seed, 2 * case + 1, 3)) for case in range(num_cases))
    return all(
        distribution_of_step(shape, target, draft, cut=room.cut) == plain_distribution(target, num_tokens(shape)) for target, draft in cases
    )


@pytest.mark.spread(0.3)
@pytest.mark.parametrize("drafts", [full_probs, sparse_probs, ending_probs])
@pytest.mark.parametrize("name", CUT_SHAPES)
def test_sampled_trees_pruned_for_memory_keep_the_exact_distribution(name, drafts, seed, tally, large_counts):
    rooms = _rooms(CUT_SHAPES[name])
    assert any(len(left) > 2 for left in rooms), "drafts are left"
    num_cases = 10 if large_counts else NUM_FULL_CASES if drafts is full_probs else NUM_CUT_CASES
    for left, room in rooms.items():
        assert _keeps_the_distribution(CUT_SHAPES[name], room, drafts, seed, num_cases), left
    tally["shapes of trees cut for memory"] += len(rooms)


Order = Callable[[DraftTree], Iterable[int]]


def _prune_by(order: Order) -> Callable[..., DraftTree]:
    """`DraftTree.prune` that takes nodes in another order; what is left passes for drawn all the same."""

    def prune(tree: DraftTree, fits: Callable[[Sequence[int]], bool]) -> DraftTree:
        def part(kept: Sequence[int]) -> DraftTree:
            index = {node: position for position, node in enumerate(kept)}
            parents = [index[tree.parents[node]] for node in kept[1:]]
            draft_probs = {index[node]: distribution for node, distribution in tree.draft_probs.items() if index.get(node) in parents}
            return DraftTree.from_nodes(tree.token_ids[0], [tree.token_ids[node] for node in kept[1:]], parents, "test", draft_probs)

        kept = [0]
        for node in order(tree):
            if tree.parents[node] in kept and fits(part(sorted((*kept, node))).parents):
                kept = sorted((*kept, node))
        return part(kept)

    return prune


def _likeliest_first(tree: DraftTree) -> Iterable[int]:
    """Level by level, those of a level by the probability they were drawn with."""
    drawn_with = [tree.draft_probs[parent].prob(token) for parent, token in zip(tree.parents[1:], tree.token_ids[1:], strict=True)]
    return sorted(range(1, len(tree.parents)), key=lambda node: (tree.depths[node], -drawn_with[node - 1]))


def _first_path_first(tree: DraftTree) -> Iterable[int]:
    """As for chosen draft tokens: the length of the first chain, which depends on the drawn tokens, decides whether it stays a chain."""
    return dict.fromkeys((*tree.first_child_path(), *range(1, len(tree.parents))))


WRONG_CUTS: dict[str, tuple[str, DraftsOf, Order]] = {
    "the likeliest of several draws": ("three draws", full_probs, _likeliest_first),
    "the likeliest of draws that go on": ("two draws, both go on", full_probs, _likeliest_first),
    "the first path before its siblings": ("two draws, the first goes on", ending_probs, _first_path_first),
}


@pytest.mark.parametrize("wrong", WRONG_CUTS)
def test_fault_of_pruning_a_sampled_tree_by_token_is_found(wrong, seed, monkeypatch):
    name, drafts, order = WRONG_CUTS[wrong]
    rooms = _rooms(CUT_SHAPES[name]).values()
    monkeypatch.setattr(DraftTree, "prune", _prune_by(order))
    assert not all(
        _keeps_the_distribution(CUT_SHAPES[name], room, drafts, seed + case, 1) for case in range(NUM_WRONG_CUTS) for room in rooms
    )


def test_pruning_a_sampled_tree_in_node_order_keeps_the_distribution(seed, monkeypatch):
    """So what the wrong ones are noticed by is their order, not how they are put together here."""
    monkeypatch.setattr(DraftTree, "prune", _prune_by(lambda tree: range(1, len(tree.parents))))
    for name, drafts, _ in WRONG_CUTS.values():
        first, *_ = _rooms(CUT_SHAPES[name]).values()
        assert _keeps_the_distribution(CUT_SHAPES[name], first, drafts, seed, 3)


@pytest.mark.parametrize("drafts", [sparse_probs, ending_probs])
def test_fault_of_a_sampled_tree_that_widens_with_depth_is_found(drafts, seed):
    """Where nothing is cut at all: two draws after a chain, of which there may be fewer. So levels must not become wider."""
    cases = ((full_probs(seed, 2 * case), drafts(seed, 2 * case + 1, 3)) for case in range(NUM_WRONG_CUTS))
    assert any(distribution_of_step((0, 1, 2, 2), target, draft) != plain_distribution(target, 4) for target, draft in cases)


def test_sampled_draft_trees_never_widen_with_depth():
    for width, depth, budget in product(range(1, 5), range(1, 6), range(2, 26)):
        counts = _tokens_per_level(width, depth, budget)
        assert list(counts) == sorted(counts, reverse=True)
    for width, depth in ((2, 2), (2, 3), (3, 2), (4, 3)):
        shape = [1 + (level - 1) * width if level else 0 for level in range(depth) for _ in range(width)]
        for left in _rooms(shape):
            depths = [0]
            for parent in left[1:]:
                depths.append(depths[parent] + 1)
            counts = [depths.count(level) for level in range(1, max(depths) + 1)]
            assert counts == sorted(counts, reverse=True), left
