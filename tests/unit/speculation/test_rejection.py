"""The laws of rejection, enumerated: every draft and every decision with its exact probability, summed over all of them."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

from paceline.errors import CheckpointError
from paceline.kv_cache.paged import CachedSequence
from paceline.kv_cache.row_plan import TreeLayout, num_rows
from paceline.sampling.noise import Purpose, step_uniform
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.sampling.residual import TokenProbs, acceptance, excess
from paceline.speculation import rejection
from paceline.speculation.rejection import StepChance, Walk, verify_rejection
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree, Proposal
from paceline.speculation.verify import VerifyResult, verify
from scripted_target import ScriptedTarget

Text = tuple[int, ...]
Laws = Callable[[Text], TokenProbs]  # the drafted tokens so far -> the law of the next one
Law = dict[Text, Fraction]
Shape = Sequence[int]  # parents of the drawn nodes, breadth-first
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


def _laws(seed: int, case: int, vocab_size: int) -> Laws:
    """Random rational laws, one for each text; some tokens impossible, some certain."""

    def law(text: Text) -> TokenProbs:
        weights = np.random.default_rng([seed, case, len(text), *text]).integers(0, 6, vocab_size)
        if not weights.any():
            weights[text[-1] if text and text[-1] < vocab_size else 0] = 1
        return TokenProbs(np.array([Fraction(int(weight), int(weights.sum())) for weight in weights], object))

    return law


class Branching:
    """One way through all decisions, its probability, and the ways that turn off from it."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self._asked: set[tuple[object, ...]] = set()
        self.made: list[int] = []
        self.turns: list[tuple[int, ...]] = []
        self.mass = Fraction(1)

    def accepts(self, threshold: Any, depth: int, index: int) -> bool:
        assert isinstance(threshold, Fraction | int), "the algebra rounds"
        return self._choose([(True, min(Fraction(1), threshold)), (False, 1 - min(Fraction(1), threshold))], "accept", depth, index)

    def draw(self, probs: TokenProbs, depth: int, *which: object) -> int:
        options = list(enumerate(probs.values)) if probs.token_ids is None else list(zip(probs.token_ids, probs.values, strict=True))
        total = sum(value for _, value in options)
        return self._choose([(int(token), value / total) for token, value in options], "draw", depth, *which)

    def _choose(self, options: list[tuple[Any, Fraction]], *which: object) -> Any:
        assert which not in self._asked, "one random number for two decisions"
        self._asked.add(which)
        options = [option for option in options if option[1] > 0]
        turn = len(self.made)
        if turn >= len(self._script):
            self.turns.extend((*self.made, other) for other in range(1, len(options)))
        choice = self._script[turn] if turn < len(self._script) else 0
        self.made.append(choice)
        self.mass *= options[choice][1]
        return options[choice][0]


def _every_way(run: Callable[[Branching], Any]) -> Iterator[tuple[Any, Fraction]]:
    """All outcomes of `run`, each way to one with its probability."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        chance = Branching(scripts.pop())
        outcome = run(chance)
        scripts.extend(chance.turns)
        yield outcome, chance.mass


def _draw_tree(shape: Shape, draft: Laws, chance: Branching) -> DraftTree:
    """Children drawn without replacement; a law with too few tokens has fewer children."""
    texts: dict[int, Text] = {0: ()}
    left: dict[int, TokenProbs | None] = {}
    number: dict[int, int] = {0: 0}
    tokens: list[int] = []
    parents: list[int] = []
    for node, parent in enumerate(shape, 1):
        if parent not in texts:
            continue
        probs = left.get(parent, draft(texts[parent]))
        if probs is None:
            continue
        token = chance.draw(probs, len(texts[parent]), "draft", node)
        left[parent] = probs.without(token)
        texts[node] = (*texts[parent], token)
        tokens.append(token)
        parents.append(number[parent])
        number[node] = len(tokens)
    tree = DraftTree.grow(99, tokens, parents, "test", {number[parent]: draft(texts[parent]) for parent in left})
    tree.check()
    return tree


def _paths(tree: DraftTree) -> list[Text]:
    paths: list[Text] = [()]
    for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def _walk(tree: DraftTree, target: Laws, chance: Branching, ends: frozenset[int] = frozenset()) -> VerifyResult:
    paths = _paths(tree)

    def target_probs(node: int, path: Sequence[int]) -> TokenProbs:
        assert tuple(path) == paths[node]
        return target(paths[node])

    result = Walk(tree, target_probs, ends, chance).run()
    assert result.token_ids[: len(result.accepted_nodes)] == (paths[result.accepted_nodes[-1]] if result.accepted_nodes else ())
    assert len(result.token_ids) == len(result.accepted_nodes) + 1
    return result


def _plain_law(target: Laws, length: int, ends: frozenset[int] = frozenset(), start: Text = ()) -> Law:
    """Texts of `length` tokens, shorter where one ends; all begin with `start`."""
    law: Law = {start: Fraction(1)}
    for _ in range(length - len(start)):
        longer: Law = {}
        for text, mass in law.items():
            if text and text[-1] in ends:
                longer[text] = mass
            else:
                longer.update({(*text, token): mass * value for token, value in enumerate(target(text).values) if value > 0})
        law = longer
    return law


def _num_tokens(shape: Shape) -> int:
    """Tokens that a step with a tree of this shape may emit."""
    depths = [0]
    for parent in shape:
        depths.append(depths[parent] + 1)
    return max(depths) + 1


def _law(
    shape: Shape,
    target: Laws,
    draft: Laws,
    *,
    cut: Callable[[DraftTree], DraftTree] = lambda tree: tree,
    ends: frozenset[int] = frozenset(),
) -> Law:
    """The law of the first tokens when one step drafts a tree of this shape and plain steps follow."""
    law: defaultdict[Text, Fraction] = defaultdict(Fraction)
    for result, mass in _every_way(lambda chance: _walk(cut(_draw_tree(shape, draft, chance)), target, chance, ends)):
        for text, rest in _plain_law(target, _num_tokens(shape), ends, result.token_ids).items():
            law[text] += mass * rest
    return dict(law)


def _is_exact(shape: Shape, seed: int, num_cases: int = NUM_CASES, **changes: Any) -> bool:
    """Whether the law is the target's in every case."""
    for case in range(num_cases):
        target, draft = _laws(seed, 2 * case, 3), _laws(seed, 2 * case + 1, 3)
        if _law(shape, target, draft, **changes) != _plain_law(target, _num_tokens(shape), changes.get("ends", frozenset())):
            return False
    return True


@pytest.mark.parametrize("name", SHAPES)
def test_drawn_drafts_leave_the_targets_law_to_the_last_digit(name, seed):
    assert _is_exact(SHAPES[name], seed)


@pytest.mark.parametrize("name", ["chain of 3", "two draws at two depths"])
def test_an_end_token_among_the_drafts_ends_the_text_and_keeps_the_law(name, seed):
    assert _is_exact(SHAPES[name], seed, ends=frozenset({1}))


def test_a_chain_by_single_draws_has_the_law_too_and_keeps_fewer_tokens_than_as_a_block(seed, monkeypatch):
    def mean_length(shape: Shape, case: int) -> Fraction:
        target, draft = _laws(seed, 2 * case, 3), _laws(seed, 2 * case + 1, 3)
        ways = _every_way(lambda chance: _walk(_draw_tree(shape, draft, chance), target, chance))
        return sum((len(result.accepted_nodes) * mass for result, mass in ways), Fraction(0))

    shape = SHAPES["chain of 2"]
    as_block = [mean_length(shape, case) for case in range(NUM_CASES)]
    monkeypatch.setattr(DraftTree, "proposal", Proposal.WITHOUT_REPLACEMENT)
    assert _is_exact(shape, seed)
    one_by_one = [mean_length(shape, case) for case in range(NUM_CASES)]
    assert all(block >= single for block, single in zip(as_block, one_by_one, strict=True))
    assert any(block > single for block, single in zip(as_block, one_by_one, strict=True))


def test_one_draft_is_kept_as_often_as_the_laws_overlap(seed):
    for case in range(NUM_CASES):
        target, draft = _laws(seed, 2 * case, 3), _laws(seed, 2 * case + 1, 3)
        overlap = sum(map(min, target(()).values, draft(()).values))
        ways = _every_way(lambda chance: _walk(_draw_tree((0,), draft, chance), target, chance))  # noqa: B023
        assert sum(mass for result, mass in ways if result.accepted_nodes) == overlap


def test_drafts_from_the_targets_own_law_are_all_kept(seed):
    for case in range(NUM_CASES):
        target = _laws(seed, case, 3)
        for shape in (SHAPES["chain of 3"], SHAPES["two draws at two depths"]):
            ways = _every_way(lambda chance: _walk(_draw_tree(shape, target, chance), target, chance))  # noqa: B023
            depth = 3 if len(shape) == 3 else 1
            assert all(len(result.accepted_nodes) >= depth for result, mass in ways)


WRONG: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "the target's law in place of the residual": ("residual", lambda target, weights: target, ("one draft", "chain of 2", "two draws")),
    "target and draft swapped in the ratio": (
        "acceptance",
        lambda target, draft, token: acceptance(draft, target, token),
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
    "a residual for the whole of the target's law": (
        "excess",
        lambda target, draft, share=1: excess(target, draft),
        ("chain of 2", "chain of 3"),
    ),
}


@pytest.mark.parametrize(("wrong", "name"), [(wrong, name) for wrong, (_, _, names) in WRONG.items() for name in names])
def test_a_wrong_law_is_noticed(wrong, name, seed, monkeypatch):
    function, replacement, _ = WRONG[wrong]
    monkeypatch.setattr(rejection, function, replacement)
    assert not _is_exact(SHAPES[name], seed, NUM_WRONG_CASES)


@pytest.mark.parametrize("name", ["two draws", "two draws at two depths"])
def test_a_second_draw_judged_by_the_wrong_law_is_noticed(name, seed, monkeypatch):
    draw_tree = _draw_tree

    def judged(without: Callable[[TokenProbs, int], TokenProbs]) -> Callable[..., DraftTree]:
        def draw_then_break(*arguments: Any) -> DraftTree:
            with monkeypatch.context() as honest:
                honest.setattr(TokenProbs, "without", right)
                return draw_tree(*arguments)

        monkeypatch.setattr(TokenProbs, "without", without)
        return draw_then_break

    right = TokenProbs.without
    not_renormalised = lambda probs, token: TokenProbs(np.where(np.arange(3) == token, Fraction(0), probs.values))  # noqa: E731
    for wrong in (not_renormalised, lambda probs, token: probs):
        monkeypatch.setitem(globals(), "_draw_tree", judged(wrong))
        assert not _is_exact(SHAPES[name], seed, NUM_WRONG_CASES)


def test_siblings_judged_in_another_order_than_they_were_drawn_are_noticed(seed, monkeypatch):
    children = DraftTree.children
    monkeypatch.setattr(DraftTree, "children", lambda tree, node: children(tree, node)[::-1])
    assert not _is_exact(SHAPES["two draws"], seed, NUM_WRONG_CASES)


def _trim(layout: TreeLayout, max_depth: int, row_budget: int, vocab_size: int = 3) -> Callable[[DraftTree], DraftTree]:
    return lambda tree: tree.trim(vocab_size=vocab_size, max_depth=max_depth, row_budget=row_budget, layout=layout)


def _full_laws(seed: int, case: int, vocab_size: int = 3) -> Laws:
    """Laws that leave no token out: every tree of a shape can be drawn."""

    def law(text: Text) -> TokenProbs:
        weights = np.random.default_rng([seed, case, len(text), *text]).integers(1, 6, vocab_size)
        return TokenProbs(np.array([Fraction(int(weight), int(weights.sum())) for weight in weights], object))

    return law


def test_trimming_to_depth_and_rows_keeps_draws_drawn_and_their_law(seed, tally):
    shape = (0, 0, 1, 1, 2)
    target, draft = _full_laws(seed, 1), _full_laws(seed, 2)
    wanted = _plain_law(target, _num_tokens(shape))
    whole = _draw_tree(shape, draft, Branching(()))
    trims: dict[tuple[int, ...], Callable[[DraftTree], DraftTree]] = {}  # one for each shape that is left
    for layout in TreeLayout:
        for depth, budget in product((1, 2), range(1, num_rows(whole.parents, layout) + 1)):
            trim = _trim(layout, depth, budget)
            trims.setdefault(tuple(trim(whole).parents), trim)
    for left, trim in trims.items():
        assert _law(shape, target, draft, cut=trim) == wanted, left
    tally["shapes of trimmed trees"] += len(trims)
    assert {trim(whole).proposal for trim in trims.values()} == set(Proposal)


def test_a_law_that_reaches_unknown_ids_makes_its_drafts_chosen_ones_and_keeps_the_targets_law(seed, monkeypatch):
    """Whatever was drawn: to change the type only where an unknown id came up would be wrong."""
    target, draft = _full_laws(seed, 1), _full_laws(seed, 2, vocab_size=4)
    trim = _trim(TreeLayout.MASK, 9, 99)
    for shape in ((0,), (0, 1), (0, 0)):
        wanted = _plain_law(target, _num_tokens(shape))
        assert _law(shape, target, draft, cut=trim) == wanted
        with monkeypatch.context() as wrong:
            wrong.setattr(TokenProbs, "is_within", lambda probs, vocab_size: True)
            assert _law(shape, target, draft, cut=trim) != wanted


def test_drafts_pruned_in_other_ways_have_the_law_only_as_chosen_ones(seed):
    target, draft = _full_laws(seed, 1), _full_laws(seed, 2)
    shape = (0, 0)
    wanted = _plain_law(target, _num_tokens(shape))

    def likeliest(tree: DraftTree) -> DraftTree:
        best = max(tree.token_ids[1:], key=lambda token: (tree.draft_probs[0].prob(token), token))
        return DraftTree.chain(99, [best], "test")

    def still_drawn(tree: DraftTree) -> DraftTree:
        return DraftTree.grow(99, likeliest(tree).token_ids[1:], [0], "test", tree.draft_probs)

    def drawn_where_nothing_changed(tree: DraftTree) -> DraftTree:
        return still_drawn(tree) if tree.token_ids[1] == likeliest(tree).token_ids[1] else likeliest(tree)

    def without_the_first(tree: DraftTree) -> DraftTree:
        return DraftTree.grow(99, tree.token_ids[2:], [0], "test", tree.draft_probs)

    assert _law(shape, target, draft, cut=likeliest) == wanted
    assert _law(shape, target, draft, cut=without_the_first) != wanted
    assert _law(shape, target, draft, cut=still_drawn) != wanted
    assert _law(shape, target, draft, cut=drawn_where_nothing_changed) != wanted


def test_a_row_that_cannot_be_processed_matters_only_to_the_texts_that_reach_it(seed):
    target, draft = _full_laws(seed, 1), _full_laws(seed, 2)
    dead: Text = (0, 1)

    def failing(text: Text) -> TokenProbs:
        if text == dead:
            raise CheckpointError("this row is damaged")
        return target(text)

    def run(chance: Branching) -> Text:
        try:
            text = _walk(_draw_tree((0, 1, 2), draft, chance), failing, chance).token_ids
        except CheckpointError:
            return dead
        assert text[:2] != dead or text == dead, "it went on without the row"
        return text

    law: defaultdict[Text, Fraction] = defaultdict(Fraction)
    for text, mass in _every_way(run):
        for longer, rest in _plain_law(target, 4, start=text).items():
            law[dead if longer[:2] == dead else longer] += mass * rest
    wanted: defaultdict[Text, Fraction] = defaultdict(Fraction)
    for text, mass in _plain_law(target, 4).items():
        wanted[dead if text[:2] == dead else text] += mass
    assert law == wanted


# What a request's noise makes of it


def _request(target: ScriptedTarget, params: SamplingParams, seed: int) -> Request:
    processor = LogitsProcessor(params, target.vocab_size, target.prompt)
    return Request(list(target.prompt), len(target.prompt), params, processor, CachedSequence(), seed, 0, max_len=100)


def _rows(target: ScriptedTarget, request: Request, tree: DraftTree) -> np.ndarray:
    return np.stack([target.logits((*request.token_ids, *path)) for path in _paths(tree)])


def test_at_temperature_0_rejection_is_the_plain_match():
    target = ScriptedTarget()
    params = SamplingParams(repetition_penalty=1.3)
    for seed in range(20):
        request = _request(target, params, seed)
        right = target.generate(params, seed, 4)
        tree = DraftTree.grow(request.token_ids[-1], [*right[:3], 7], [0, 1, 2, 0], "test")
        rows = _rows(target, request, tree)
        assert verify_rejection(tree, rows, request) == verify(tree, rows, request)


def test_rows_that_the_walk_of_chosen_drafts_does_not_reach_are_not_read():
    target = ScriptedTarget()
    request = _request(target, SamplingParams(temperature=1.0), seed=5)
    tree = DraftTree.grow(request.token_ids[-1], range(32), [0] * 32, "test")
    rows = _rows(target, request, tree)
    (node,) = verify_rejection(tree, rows, request).accepted_nodes
    rows[[other for other in range(1, 33) if other != node]] = np.nan
    assert verify_rejection(tree, rows, request).accepted_nodes == (node,)


def test_damaged_rows_behind_a_refused_draft_harm_nobody():
    target = ScriptedTarget()
    context = target.prompt
    for _ in range(3):  # the second best: neither always kept nor always refused where it has half of the draft's law
        context = (*context, int(np.argsort(-target.logits(context))[1]))
    drafts = context[len(target.prompt) :]
    laws = {node: TokenProbs(np.array([0.5, 0.5]), np.array(sorted({token, 32}))) for node, token in enumerate(drafts)}
    tree = DraftTree.grow(target.prompt[-1], drafts, range(3), "test", laws)
    tree.check()
    lengths = []
    for seed in range(60):
        request = _request(target, SamplingParams(temperature=1.0), seed)
        rows = _rows(target, request, tree)
        rows[2:] = np.nan
        try:
            lengths.append(len(verify_rejection(tree, rows, request).accepted_nodes))
        except CheckpointError:
            lengths.append(2)
    assert set(lengths) == {0, 1, 2}


def test_decisions_use_noise_of_their_own_that_no_other_step_meets(monkeypatch):
    asked: list[tuple[object, ...]] = []

    def remembering(*key: Any) -> float:
        asked.append(key)
        return step_uniform(*key)

    monkeypatch.setattr(rejection, "step_uniform", remembering)
    target = ScriptedTarget()
    request = _request(target, SamplingParams(temperature=1.0), seed=1)
    law = TokenProbs.of(request.processor.process(target.logits(request.token_ids)))
    for _ in range(4):
        drafts = [int(np.argmax(law.values))] * 3
        tree = DraftTree.grow(request.token_ids[-1], drafts, range(3), "test", dict.fromkeys(range(3), law))
        result = verify_rejection(tree, _rows(target, request, tree), request)
        request.token_ids.append(result.token_ids[0])  # the next step draws for positions that this one drew for
    assert {key[3] for key in asked} == {Purpose.ACCEPT, Purpose.RESIDUAL}
    assert len(set(asked)) == len(asked) == len({step_uniform(*key) for key in asked}) > 12


def test_the_numbers_of_a_step_are_uniform_and_inside_the_open_interval():
    places = [(purpose, depth, index) for purpose in Purpose for depth in (0, 1) for index in (0, 1)]
    numbers = np.array([step_uniform(seed, 0, 100, *place) for seed in range(200) for place in places])
    assert 0.0 < numbers.min() < 0.01 < 0.99 < numbers.max() < 1.0
    assert len(np.unique(numbers)) == len(numbers)
    counts = np.histogram(numbers, 16, (0.0, 1.0))[0]
    assert ((counts - len(numbers) / 16) ** 2 / (len(numbers) / 16)).sum() < 45  # chi-square of 15 degrees: p > 1e-4


def test_accepting_never_fails_from_1_on_and_never_happens_at_0():
    request = _request(ScriptedTarget(), SamplingParams(temperature=1.0), seed=2)
    chance = StepChance(request)
    assert all(chance.accepts(1.0, depth, 0) and not chance.accepts(0.0, depth, 0) for depth in range(500))
