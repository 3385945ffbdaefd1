"""Over seeds, speculative output has exactly the target's distribution, and equals plain decoding for each seed."""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest

from harness.scripted_target import LEAST_EXPECTED, ScriptedTarget, Tokens, chi_square_p_value, joint_counts
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import EditedRow, LogitsProcessor
from paceline.speculation.commit import commit
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import VerifyResult, verify

NUM_TOKENS = 3
TARGET = ScriptedTarget(vocab_size=12, spread=1.0)  # flat enough that drafts fail at every depth
PARAMS = {
    "top-k": SamplingParams(temperature=1.0, top_k=5),
    "penalties": SamplingParams(temperature=0.8, top_k=6, repetition_penalty=1.6, frequency_penalty=0.8, presence_penalty=0.6),
}
Candidate = tuple[DraftTree, np.ndarray]  # a tree and the target's row for each of its nodes
Proposer = Callable[[Tokens], Candidate]
Commit = Callable[[Request, VerifyResult, DraftTree], None]


def _best(context: Tokens, count: int) -> list[int]:
    return np.argsort(-TARGET.logits(context), kind="stable")[:count].tolist()


def _max_depth(context: Tokens) -> int:
    """As deep as a step drafts: the last token is always the target's own."""
    return len(TARGET.prompt) + NUM_TOKENS - len(context) - 1


@cache
def _argmax_chain(context: Tokens) -> Candidate:
    text = list(context)
    for _ in range(_max_depth(context)):
        text.append(_best(tuple(text), 1)[0])
    tree = DraftTree.chain(context[-1], text[len(context) :], "argmax")
    return tree, TARGET.tree_logits(context, tree)


@cache
def _two_best_a_level(context: Tokens) -> Candidate:
    paths: list[Tokens] = [()]
    parents: list[int] = []
    for parent, path in enumerate(paths):  # `paths` grows while it is read
        if len(path) < _max_depth(context):
            children = _best((*context, *path), 2)
            paths.extend((*path, token) for token in children)
            parents.extend([parent] * len(children))
    tree = DraftTree.from_nodes(context[-1], [path[-1] for path in paths[1:]], parents, "two best")
    return tree, TARGET.tree_logits(context, tree)


PROPOSERS: dict[str, Proposer] = {"chain": _argmax_chain, "tree": _two_best_a_level}
# Parameters, drafts, and default number of seeds: a text takes 0.5 ms, with penalties 0.8 ms.
NUM_SEEDS = {("top-k", "chain"): 4_000, ("penalties", "tree"): 3_000, ("top-k", "tree"): 2_000, ("penalties", "chain"): 2_000}
LARGE_NUM_SEEDS = 50_000
NUM_BROKEN_SEEDS = 1_500
EVERY = [pytest.param(*names, id=", ".join(names)) for names in NUM_SEEDS]


def _commit(request: Request, result: VerifyResult, tree: DraftTree) -> None:
    commit(request, result.token_ids, len(result.accepted_nodes), has_draft=tree.num_draft_tokens > 0)


def _speculate(params: SamplingParams, seed: int, propose: Proposer, commit_result: Commit = _commit) -> tuple[Tokens, int]:
    """The first tokens of one request, and how many of them were drafted."""
    request, num_accepted = TARGET.request(params, seed, NUM_TOKENS), 0
    while not request.is_finished:
        tree, logits = propose(tuple(request.token_ids))
        result = verify(tree, logits, request)
        num_accepted += len(result.accepted_nodes)
        commit_result(request, result, tree)
    return tuple(request.output_token_ids), num_accepted


def _texts(name: str, proposer: str, seeds: Sequence[int], commit_result: Commit = _commit) -> np.ndarray:
    return np.array([_speculate(PARAMS[name], one, PROPOSERS[proposer], commit_result)[0] for one in seeds], np.int64)


def _plain_texts(name: str, seeds: Sequence[int]) -> np.ndarray:
    return TARGET.generate_many(PARAMS[name], np.array(seeds, np.uint64), NUM_TOKENS)


@pytest.mark.parametrize(("name", "proposer"), EVERY)
def test_verified_drafts_have_the_joint_distribution_of_the_target(name, proposer, seed, large_counts):
    num_seeds = LARGE_NUM_SEEDS if large_counts else NUM_SEEDS[name, proposer]
    seeds = range(seed, seed + num_seeds)
    exact = TARGET.exact_joint_distribution(PARAMS[name], NUM_TOKENS)
    assert sum(mass * num_seeds >= LEAST_EXPECTED for mass in exact.values()) > 40
    texts = _texts(name, proposer, seeds)
    assert (texts == _plain_texts(name, seeds)).all()
    assert chi_square_p_value(joint_counts(texts), exact) > 0.001


@pytest.mark.parametrize(("name", "proposer"), EVERY)
def test_distribution_test_drafts_are_accepted_and_rejected(name, proposer, seed):
    accepted = [_speculate(PARAMS[name], one, PROPOSERS[proposer])[1] for one in range(seed, seed + 200)]
    assert set(accepted) >= {0, 1, 2}


@pytest.mark.parametrize(("name", "proposer"), EVERY[:2])
def test_fault_of_noise_reused_at_the_next_position_is_found(name, proposer, seed, monkeypatch):
    first = len(TARGET.prompt)
    draw = EditedRow.draw
    monkeypatch.setattr(EditedRow, "draw", lambda row, one, sample, position: draw(row, one, sample, max(first, position - 1)))
    _check_notices(name, proposer, seed)


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_fault_of_penalties_that_ignore_the_draft_path_is_found(proposer, seed, monkeypatch):
    edit = LogitsProcessor.edit
    seeds = range(seed, seed + NUM_BROKEN_SEEDS)
    plain = _plain_texts("penalties", seeds)
    monkeypatch.setattr(LogitsProcessor, "edit", lambda processor, logits, path=(): edit(processor, logits))
    texts = _texts("penalties", proposer, seeds)
    monkeypatch.undo()
    _check_differs("penalties", texts, plain)


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_fault_of_a_rejected_draft_kept_in_history_is_found(proposer, seed):
    def commit_all(request: Request, result: VerifyResult, tree: DraftTree) -> None:
        _commit(request, result, tree)
        for node in range(1, len(tree.token_ids)):
            if node not in result.accepted_nodes:
                request.processor.commit(tree.token_ids[node])

    _check_notices("penalties", proposer, seed, commit_all)


def _check_notices(name: str, proposer: str, seed: int, commit_result: Commit = _commit) -> None:
    seeds = range(seed, seed + NUM_BROKEN_SEEDS)
    _check_differs(name, _texts(name, proposer, seeds, commit_result), _plain_texts(name, seeds))


def _check_differs(name: str, texts: np.ndarray, plain: np.ndarray) -> None:
    """Both checks of this file fail: equality seed by seed, and the joint distribution."""
    exact = TARGET.exact_joint_distribution(PARAMS[name], NUM_TOKENS)
    assert (texts != plain).any(axis=1).mean() > 0.01
    assert chi_square_p_value(joint_counts(plain), exact) > 0.001
    assert chi_square_p_value(joint_counts(texts), exact) < 0.001
