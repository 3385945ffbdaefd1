"""The distributions of rejection, enumerated: every draft and every decision with its exact probability, summed over all of them."""

from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

from harness import enumerated_distributions
from harness.enumerated_distributions import (
    Branching,
    Shape,
    Text,
    distribution_of_step,
    draw_tree,
    every_way,
    full_probs,
    never,
    num_tokens,
    plain_distribution,
    sparse_probs,
    walk,
)
from harness.scripted_target import ScriptedTarget
from paceline.errors import CheckpointError
from paceline.sampling.noise import Purpose, step_uniform
from paceline.sampling.params import SamplingParams
from paceline.sampling.residual import TokenProbs, acceptance_ratio, excess
from paceline.speculation import rejection
from paceline.speculation.rejection import StepRandomness, verify_rejection
from paceline.speculation.tree import DraftSampling, DraftTree
from paceline.speculation.verify import verify

NUM_CASES = 6
NUM_WRONG_CASES = 100  # the first one that shows it ends the search
SHAPES: dict[str, Shape] = {
    "one draft": (0,),
    "chain of 2": (0, 1),
    "chain of 3": (0, 1, 2),
    "two draws": (0, 0),
    "three draws": (0, 0, 0),
    "two draws, the first goes on": (0, 0, 1),
    "two draws, the second goes on": (0, 0, 2),
    "two draws at two depths": (0, 0, 1, 1),
}


def _is_exact(shape: Shape, seed: int, num_cases: int = NUM_CASES, **changes: Any) -> bool:
    """Whether the distribution is the target's in every case."""
    for case in range(num_cases):
        target, draft = sparse_probs(seed, 2 * case, 3), sparse_probs(seed, 2 * case + 1, 3)
        if distribution_of_step(shape, target, draft, **changes) != plain_distribution(
            target, num_tokens(shape), changes.get("ends", never)
        ):
            return False
    return True


@pytest.mark.parametrize("name", SHAPES)
def test_rejection_sampling_has_exactly_the_target_distribution(name, seed):
    assert _is_exact(SHAPES[name], seed)


@pytest.mark.parametrize("name", ["chain of 3", "two draws at two depths"])
def test_end_token_in_a_draft_keeps_the_distribution(name, seed):
    assert _is_exact(SHAPES[name], seed, ends=lambda text: text[-1] == 1)


@pytest.mark.parametrize("name", ["chain of 3", "two draws, the first goes on", "two draws at two depths"])
def test_stop_string_across_drafts_keeps_the_distribution(name, seed):
    assert _is_exact(SHAPES[name], seed, ends=lambda text: text[-2:] in ((0, 1), (2, 2)))


def test_block_verification_accepts_at_least_as_much_as_token_by_token(seed, monkeypatch):
    def mean_length(shape: Shape, case: int) -> Fraction:
        target, draft = sparse_probs(seed, 2 * case, 3), sparse_probs(seed, 2 * case + 1, 3)
        ways = every_way(lambda chance: walk(draw_tree(shape, draft, chance), target, chance))
        return sum((len(result.accepted_nodes) * mass for result, mass in ways), Fraction(0))

    shape = SHAPES["chain of 2"]
    as_block = [mean_length(shape, case) for case in range(NUM_CASES)]
    monkeypatch.setattr(DraftTree, "draft_sampling", DraftSampling.WITHOUT_REPLACEMENT)
    assert _is_exact(shape, seed)
    one_by_one = [mean_length(shape, case) for case in range(NUM_CASES)]
    assert all(block >= single for block, single in zip(as_block, one_by_one, strict=True))
    assert any(block > single for block, single in zip(as_block, one_by_one, strict=True))


def test_acceptance_rate_equals_the_overlap_of_distributions(seed):
    for case in range(NUM_CASES):
        target, draft = sparse_probs(seed, 2 * case, 3), sparse_probs(seed, 2 * case + 1, 3)
        overlap = sum(map(min, target(()).probs, draft(()).probs))
        ways = every_way(lambda chance: walk(draw_tree((0,), draft, chance), target, chance))  # noqa: B023
        assert sum(mass for result, mass in ways if result.accepted_nodes) == overlap


def test_drafts_from_the_target_distribution_are_all_accepted(seed):
    for case in range(NUM_CASES):
        target = sparse_probs(seed, case, 3)
        for shape in (SHAPES["chain of 3"], SHAPES["two draws at two depths"]):
            ways = every_way(lambda chance: walk(draw_tree(shape, target, chance), target, chance))  # noqa: B023
            depth = 3 if len(shape) == 3 else 1
            assert all(len(result.accepted_nodes) >= depth for result, mass in ways)


WRONG: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "the target's distribution in place of the residual": (
        "residual",
        lambda target, weights: target,
        ("one draft", "chain of 2", "two draws"),
    ),
    "target and draft swapped in the ratio": (
        "acceptance_ratio",
        lambda target, draft, token: acceptance_ratio(draft, target, token),
        ("one draft", "chain of 2", "two draws"),
    ),
    "target and draft swapped in the residual": (
        "excess",
        lambda target, draft, share=1: excess(draft, target) * share,
        ("one draft", "chain of 2", "two draws"),
    ),
    "a residual that is not normalised": (
        "residual",
        lambda target, weights: TokenProbs(weights) if weights.any() else target,
        ("two draws", "three draws"),
    ),
    "a block that may end as its last draft may": ("block_threshold", lambda share, weights: share, ("chain of 2", "chain of 3")),
    "a block that never ends early": ("block_threshold", lambda share, weights: 0, ("chain of 2", "chain of 3")),
    "a residual for the whole of the target's distribution": (
        "excess",
        lambda target, draft, share=1: excess(target, draft),
        ("chain of 2", "chain of 3"),
    ),
}


@pytest.mark.parametrize(("wrong", "name"), [(wrong, name) for wrong, (_, _, names) in WRONG.items() for name in names])
def test_fault_of_wrong_draft_probabilities_is_found(wrong, name, seed, monkeypatch):
    function, replacement, _ = WRONG[wrong]
    monkeypatch.setattr(rejection, function, replacement)
    assert not _is_exact(SHAPES[name], seed, NUM_WRONG_CASES)


@pytest.mark.parametrize("name", ["two draws", "two draws at two depths"])
def test_fault_of_a_wrong_residual_after_a_second_draw_is_found(name, seed, monkeypatch):
    really_draw = draw_tree

    def judged(without: Callable[[TokenProbs, int], TokenProbs]) -> Callable[..., DraftTree]:
        def draw_then_break(*arguments: Any) -> DraftTree:
            with monkeypatch.context() as honest:
                honest.setattr(TokenProbs, "without_token", right)
                return really_draw(*arguments)

        monkeypatch.setattr(TokenProbs, "without_token", without)
        return draw_then_break

    right = TokenProbs.without_token
    not_renormalised = lambda probs, token: TokenProbs(np.where(np.arange(3) == token, Fraction(0), probs.probs))  # noqa: E731
    for wrong in (not_renormalised, lambda probs, token: probs):
        monkeypatch.setattr(enumerated_distributions, "draw_tree", judged(wrong))
        assert not _is_exact(SHAPES[name], seed, NUM_WRONG_CASES)


def test_fault_of_verifying_siblings_in_reverse_order_is_found(seed, monkeypatch):
    children = DraftTree.children
    monkeypatch.setattr(DraftTree, "children", lambda tree, node: children(tree, node)[::-1])
    assert not _is_exact(SHAPES["two draws"], seed, NUM_WRONG_CASES)


def _trim(max_depth: int, max_rows: int, vocab_size: int = 3) -> Callable[[DraftTree], DraftTree]:
    return lambda tree: tree.trim(vocab_size=vocab_size, max_depth=max_depth, max_rows=max_rows)


def test_trimming_sampled_trees_keeps_the_exact_distribution(seed, tally):
    shape = (0, 0, 1, 1, 2)
    target, draft = full_probs(seed, 1), full_probs(seed, 2)
    wanted = plain_distribution(target, num_tokens(shape))
    whole = draw_tree(shape, draft, Branching(()))
    trims: dict[tuple[int, ...], Callable[[DraftTree], DraftTree]] = {}  # one for each shape that is left
    for depth, budget in product((1, 2), range(1, len(whole.parents) + 1)):
        trim = _trim(depth, budget)
        trims.setdefault(tuple(trim(whole).parents), trim)
    for left, trim in trims.items():
        assert distribution_of_step(shape, target, draft, cut=trim) == wanted, left
    tally["shapes of trimmed trees"] += len(trims)
    assert {trim(whole).draft_sampling for trim in trims.values()} == set(DraftSampling)


def test_draft_probs_of_unknown_ids_keep_the_exact_distribution(seed, monkeypatch):
    """Whatever was drawn: to change the type only where an unknown id came up would be wrong."""
    target, draft = full_probs(seed, 1), full_probs(seed, 2, vocab_size=4)
    trim = _trim(9, 99)
    for shape in ((0,), (0, 1), (0, 0)):
        wanted = plain_distribution(target, num_tokens(shape))
        assert distribution_of_step(shape, target, draft, cut=trim) == wanted
        with monkeypatch.context() as wrong:
            wrong.setattr(TokenProbs, "is_within", lambda probs, vocab_size: True)
            assert distribution_of_step(shape, target, draft, cut=trim) != wanted


def test_drafts_pruned_by_token_value_are_treated_as_deterministic(seed):
    target, draft = full_probs(seed, 1), full_probs(seed, 2)
    shape = (0, 0)
    wanted = plain_distribution(target, num_tokens(shape))

    def likeliest(tree: DraftTree) -> DraftTree:
        best = max(tree.token_ids[1:], key=lambda token: (tree.draft_probs[0].prob(token), token))
        return DraftTree.chain(99, [best], "test")

    def still_drawn(tree: DraftTree) -> DraftTree:
        return DraftTree.from_nodes(99, likeliest(tree).token_ids[1:], [0], "test", tree.draft_probs)

    def drawn_where_nothing_changed(tree: DraftTree) -> DraftTree:
        return still_drawn(tree) if tree.token_ids[1] == likeliest(tree).token_ids[1] else likeliest(tree)

    def without_the_first(tree: DraftTree) -> DraftTree:
        return DraftTree.from_nodes(99, tree.token_ids[2:], [0], "test", tree.draft_probs)

    assert distribution_of_step(shape, target, draft, cut=likeliest) == wanted
    assert distribution_of_step(shape, target, draft, cut=without_the_first) != wanted
    assert distribution_of_step(shape, target, draft, cut=still_drawn) != wanted
    assert distribution_of_step(shape, target, draft, cut=drawn_where_nothing_changed) != wanted


def test_invalid_logits_row_fails_only_outputs_that_reach_it(seed):
    target, draft = full_probs(seed, 1), full_probs(seed, 2)
    dead: Text = (0, 1)

    def failing(text: Text) -> TokenProbs:
        if text == dead:
            raise CheckpointError("this row is damaged")
        return target(text)

    def run(chance: Branching) -> Text:
        try:
            text = walk(draw_tree((0, 1, 2), draft, chance), failing, chance).token_ids
        except CheckpointError:
            return dead
        assert text[:2] != dead or text == dead, "it went on without the row"
        return text

    distribution: defaultdict[Text, Fraction] = defaultdict(Fraction)
    for text, mass in every_way(run):
        for longer, rest in plain_distribution(target, 4, start=text).items():
            distribution[dead if longer[:2] == dead else longer] += mass * rest
    wanted: defaultdict[Text, Fraction] = defaultdict(Fraction)
    for text, mass in plain_distribution(target, 4).items():
        wanted[dead if text[:2] == dead else text] += mass
    assert distribution == wanted


# What a request's noise makes of it


def test_rejection_at_temperature_0_equals_exact_match_verification():
    target = ScriptedTarget()
    params = SamplingParams(repetition_penalty=1.3)
    for seed in range(20):
        request = target.request(params, seed)
        right = target.generate(params, seed, 4)
        tree = DraftTree.from_nodes(request.token_ids[-1], [*right[:3], 7], [0, 1, 2, 0], "test")
        rows = target.tree_logits(request.token_ids, tree)
        assert verify_rejection(tree, rows, request) == verify(tree, rows, request)


def test_logits_after_a_rejected_deterministic_draft_are_not_read():
    target = ScriptedTarget()
    request = target.request(SamplingParams(temperature=1.0), seed=5)
    tree = DraftTree.from_nodes(request.token_ids[-1], range(32), [0] * 32, "test")
    rows = target.tree_logits(request.token_ids, tree)
    (node,) = verify_rejection(tree, rows, request).accepted_nodes
    rows[[other for other in range(1, 33) if other != node]] = np.nan
    assert verify_rejection(tree, rows, request).accepted_nodes == (node,)


def test_damaged_logits_rows_after_a_rejected_draft_are_ignored():
    target = ScriptedTarget()
    context = target.prompt
    for _ in range(3):  # the second best: neither always kept nor always refused where it has half of the draft's distribution
        context = (*context, int(np.argsort(-target.logits(context))[1]))
    drafts = context[len(target.prompt) :]
    draft_probs = {node: TokenProbs(np.array([0.5, 0.5]), np.array(sorted({token, 32}))) for node, token in enumerate(drafts)}
    tree = DraftTree.from_nodes(target.prompt[-1], drafts, range(3), "test", draft_probs)
    tree.check()
    kept = set()
    for seed in range(60):
        request = target.request(SamplingParams(temperature=1.0), seed)
        rows = target.tree_logits(request.token_ids, tree)
        rows[2:] = np.nan
        result = verify_rejection(tree, rows, request)
        kept.add((len(result.accepted_nodes), result.token_ids == drafts[: len(result.token_ids)]))
    assert kept == {(0, False), (1, False), (1, True)}, "where both drafts in front of the row are kept, the second is the last token"


def test_acceptance_noise_is_independent_of_other_steps(monkeypatch):
    asked: list[tuple[object, ...]] = []

    def remembering(*key: Any) -> float:
        asked.append(key)
        return step_uniform(*key)

    monkeypatch.setattr(rejection, "step_uniform", remembering)
    target = ScriptedTarget()
    request = target.request(SamplingParams(temperature=1.0), seed=1)
    distribution = TokenProbs.from_distribution(request.processor.process(target.logits(request.token_ids)))
    for _ in range(4):
        drafts = [int(np.argmax(distribution.probs))] * 3
        tree = DraftTree.from_nodes(request.token_ids[-1], drafts, range(3), "test", dict.fromkeys(range(3), distribution))
        result = verify_rejection(tree, target.tree_logits(request.token_ids, tree), request)
        request.token_ids.append(result.token_ids[0])  # the next step draws for positions that this one drew for
    assert {key[3] for key in asked} == {Purpose.ACCEPT, Purpose.RESIDUAL}
    assert len(set(asked)) == len(asked) == len({step_uniform(*key) for key in asked}) > 12


def test_acceptance_noise_is_uniform_in_the_open_interval():
    places = [(purpose, depth, index) for purpose in Purpose for depth in (0, 1) for index in (0, 1)]
    numbers = np.array([step_uniform(seed, 0, 100, *place) for seed in range(200) for place in places])
    assert 0.0 < numbers.min() < 0.01 < 0.99 < numbers.max() < 1.0
    assert len(np.unique(numbers)) == len(numbers)
    counts = np.histogram(numbers, 16, (0.0, 1.0))[0]
    assert ((counts - len(numbers) / 16) ** 2 / (len(numbers) / 16)).sum() < 45  # chi-square of 15 degrees: p > 1e-4


def test_acceptance_is_certain_at_probability_1_and_never_at_0():
    request = ScriptedTarget().request(SamplingParams(temperature=1.0), seed=2)
    chance = StepRandomness(request)
    assert all(chance.accepts(1.0, depth, 0) and not chance.accepts(0.0, depth, 0) for depth in range(500))
