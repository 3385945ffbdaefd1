"""Distributions of one step by enumeration: every draft and every decision with its exact probability, as rational numbers."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from harness.scripted_target import paths_of
from paceline.sampling.residual import TokenProbs
from paceline.speculation.rejection import RejectionSampler
from paceline.speculation.tree import DraftTree
from paceline.speculation.verify import VerifyResult

Text = tuple[int, ...]
ProbsOf = Callable[[Text], TokenProbs]  # the tokens of a step so far -> the probabilities of the next one
Drafts = Callable[[Text], TokenProbs | None]  # the drafted tokens so far -> what the next one is drawn from; None = nothing is drafted
TextProbs = dict[Text, Fraction]
Shape = Sequence[int]  # parents of the drawn nodes, breadth-first
Ends = Callable[[Text], bool]  # whether the text ends with its last token


def never(_: Text) -> bool:
    return False


class _Ahead:
    """The end condition of a text for `RejectionSampler`."""

    def __init__(self, ends: Ends) -> None:
        self._ends, self._text = ends, ()

    def finishes_with(self, token_id: int) -> bool:
        self._text = (*self._text, token_id)
        return self._ends(self._text)


def sparse_probs(seed: int, case: int, vocab_size: int) -> ProbsOf:
    """Random rational probabilities, others for each text; some tokens impossible, some certain."""

    @cache  # every path through a step needs the same texts again
    def probs(text: Text) -> TokenProbs:
        weights = np.random.default_rng([seed, case, len(text), *text]).integers(0, 6, vocab_size)
        if not weights.any():
            weights[text[-1] if text and text[-1] < vocab_size else 0] = 1
        return TokenProbs(np.array([Fraction(int(weight), int(weights.sum())) for weight in weights], object))

    return probs


def full_probs(seed: int, case: int, vocab_size: int = 3) -> ProbsOf:
    """Probabilities that leave no token out: every tree of a shape can be drawn."""

    @cache  # every path through a step needs the same texts again
    def probs(text: Text) -> TokenProbs:
        weights = np.random.default_rng([seed, case, len(text), *text]).integers(1, 6, vocab_size)
        return TokenProbs(np.array([Fraction(int(weight), int(weights.sum())) for weight in weights], object))

    return probs


def ending_probs(seed: int, case: int, vocab_size: int = 3) -> Drafts:
    """The same for a drafter that stops after token 1."""
    probs = full_probs(seed, case, vocab_size)
    return lambda text: None if text and text[-1] == 1 else probs(text)


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
        options = list(enumerate(probs.probs)) if probs.token_ids is None else list(zip(probs.token_ids, probs.probs, strict=True))
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


def every_way(run: Callable[[Branching], Any]) -> Iterator[tuple[Any, Fraction]]:
    """All outcomes of `run`, each way to one with its probability."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        chance = Branching(scripts.pop())
        outcome = run(chance)
        scripts.extend(chance.turns)
        yield outcome, chance.mass


def draw_tree(shape: Shape, draft: Drafts, chance: Branching) -> DraftTree:
    """Children drawn without replacement; a distribution over too few tokens has fewer children, none has none."""
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
        left[parent] = probs.without_token(token)
        texts[node] = (*texts[parent], token)
        tokens.append(token)
        parents.append(number[parent])
        number[node] = len(tokens)
    tree = DraftTree.from_nodes(
        99, tokens, parents, "test", {number[parent]: probs for parent in left if (probs := draft(texts[parent])) is not None}
    )
    tree.check()
    return tree


def walk(tree: DraftTree, target: ProbsOf, chance: Branching, ends: Ends = never) -> VerifyResult:
    paths = paths_of(tree)

    def target_probs(node: int, path: Sequence[int]) -> TokenProbs:
        assert tuple(path) == paths[node]
        return target(paths[node])

    result = RejectionSampler(tree, target_probs, lambda: _Ahead(ends), chance).verify()
    assert result.token_ids[: len(result.accepted_nodes)] == (paths[result.accepted_nodes[-1]] if result.accepted_nodes else ())
    assert len(result.token_ids) == len(result.accepted_nodes) + 1
    return result


def plain_distribution(target: ProbsOf, length: int, ends: Ends = never, start: Text = ()) -> TextProbs:
    """Texts of `length` tokens, shorter where one ends; all begin with `start`."""
    mass_of: TextProbs = {start: Fraction(1)}
    for _ in range(length - len(start)):
        longer: TextProbs = {}
        for text, mass in mass_of.items():
            if text and ends(text):
                longer[text] = mass
            else:
                longer.update({(*text, token): mass * value for token, value in enumerate(target(text).probs) if value > 0})
        mass_of = longer
    return mass_of


def num_tokens(shape: Shape) -> int:
    """Tokens that a step with a tree of this shape may emit."""
    depths = [0]
    for parent in shape:
        depths.append(depths[parent] + 1)
    return max(depths) + 1


def distribution_of_step(
    shape: Shape,
    target: ProbsOf,
    draft: Drafts,
    *,
    cut: Callable[[DraftTree], DraftTree] = lambda tree: tree,
    ends: Ends = never,
) -> TextProbs:
    """The distribution of the first tokens when one step drafts a tree of this shape and plain steps follow."""
    mass_of_start: defaultdict[Text, Fraction] = defaultdict(Fraction)
    for result, mass in every_way(lambda chance: walk(cut(draw_tree(shape, draft, chance)), target, chance, ends)):
        mass_of_start[result.token_ids] += mass
    mass_of: defaultdict[Text, Fraction] = defaultdict(Fraction)
    for start, mass in mass_of_start.items():
        for text, rest in plain_distribution(target, num_tokens(shape), ends, start).items():
            mass_of[text] += mass * rest
    return dict(mass_of)
