"""Drafting by frequency, compared with counting in the whole text."""

from collections.abc import Sequence

import numpy as np
import pytest

from harness.decoding_rows import text_request
from paceline.drafters import suffix
from paceline.drafters.suffix import (
    MAX_COMPARED_NEXT_TOKENS,
    MAX_SIBLINGS,
    MIN_MATCH_TOKENS,
    MIN_PATH_PROB,
    OUTPUT_SEPARATOR,
    SuffixAutomaton,
    SuffixDrafter,
    SuffixStore,
)
from paceline.errors import ConfigError
from paceline.speculation.drafter import DraftBudget
from paceline.speculation.request import FinishReason, Request
from paceline.speculation.tree import DraftTree

Path = tuple[int, ...]


def make_request(token_ids: Sequence[int], num_prompt_tokens: int | None = None, namespace: str | None = None) -> Request:
    ids = [int(token) for token in token_ids]
    return text_request(ids[:num_prompt_tokens], ids[len(ids) if num_prompt_tokens is None else num_prompt_tokens :], namespace=namespace)


def law(text: Sequence[int], context: Sequence[int], min_match: int, max_match: int) -> list[tuple[int, float]]:
    """The definition: what followed the longest end of `context` that anything in `text` followed, most often first, then latest."""
    for length in range(min(max_match, len(context), len(text) - 1), min_match - 1, -1):
        ends = [end for end in range(length, len(text)) if list(text[end - length : end]) == list(context[len(context) - length :])]
        if ends:
            tokens = [text[end] for end in ends]
            last = {token: end for end, token in zip(ends, tokens, strict=True)}
            ranked = sorted(
                list(dict.fromkeys(tokens))[:MAX_COMPARED_NEXT_TOKENS], key=lambda token: (-tokens.count(token), -last[token], token)
            )
            return [(token, tokens.count(token) / len(tokens)) for token in ranked[:MAX_SIBLINGS]]
    return []


def search(text: Sequence[int], budget: DraftBudget, min_match: int, max_match: int) -> list[Path]:
    """The tree by its definition: again and again the node whose path is most probable, the earlier offered of equal ones."""
    nodes: list[Path] = [()]
    offered: list[tuple[Path, float]] = []

    def offer(node: Path, prob: float) -> None:
        if len(node) < budget.max_depth:
            for token, share in law(text, [*text, *node], min_match, max_match):
                if prob * share >= MIN_PATH_PROB:
                    offered.append(((*node, token), prob * share))

    offer((), 1.0)
    while offered and len(nodes) < budget.max_rows:
        best = max(offered, key=lambda one: one[1])
        offered.remove(best)
        nodes.append(best[0])
        offer(*best)
    return sorted(nodes[1:])


def paths(tree: DraftTree | None) -> list[Path]:
    if tree is None:
        return []
    texts: list[Path] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        texts.append((*texts[parent], token) if parent >= 0 else ())
    return sorted(texts[1:])


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 6])
def test_suffix_proposals_equal_counting_in_the_whole_text(vocab_size: int, seed: int, large_counts: bool) -> None:
    random = np.random.default_rng([seed, vocab_size])
    num_branching = num_proposals = 0
    for _ in range(60 if large_counts else 4):
        min_match = int(random.integers(1, 4))
        max_match = min_match + int(random.integers(0, 6))
        drafter = SuffixDrafter(min_match, max_match)
        request = make_request(random.integers(0, vocab_size, 3))
        while len(request.token_ids) < 60:
            new = random.integers(0, vocab_size, random.integers(1, 5)).tolist()
            if random.random() < 0.4:
                start = int(random.integers(0, len(request.token_ids)))
                new += request.token_ids[start : start + 8]
            request.token_ids.extend(new)
            budget = DraftBudget(int(random.integers(1, 14)), int(random.integers(0, 7)))
            (tree,) = drafter.propose([request], [budget])
            assert paths(tree) == search(request.token_ids, budget, min_match, max_match), (request.token_ids, budget)
            if tree is not None:
                tree.check()
                assert len(tree.parents) <= budget.max_rows
                assert tree.token_ids[0] == request.token_ids[-1]
                num_proposals += 1
                num_branching += list(tree.parents) != list(range(-1, tree.num_draft_tokens))
    assert num_proposals > 20
    assert num_branching > 3 or vocab_size == 1


@pytest.mark.parametrize("vocab_size", [1, 2, 4, 20])
def test_suffix_automaton_counts_equal_a_search(vocab_size: int, seed: int) -> None:
    random = np.random.default_rng([seed, vocab_size])
    automaton = SuffixAutomaton(5)
    text: list[int] = []
    for _ in range(120):
        text.append(int(random.integers(0, vocab_size)))
        automaton.append(text[-1])
        context = text[int(random.integers(0, len(text))) :][: int(random.integers(1, 9))]
        match = (0, 0)
        for token in context:
            match = automaton.extend_match(match, token)
        assert match[1] == min(5, len(context))
        found = [(token, share) for token, share, _ in automaton.next_tokens(match, 1)]
        assert found == law(text, context, 1, 5)


def test_suffix_draft_of_a_repeating_text_is_a_chain() -> None:
    (tree,) = SuffixDrafter().propose([make_request([5, 6, 7] * 4)], [DraftBudget(13, 10)])
    assert tree is not None
    assert list(tree.token_ids) == [7, 5, 6, 7, 5, 6, 7, 5, 6, 7, 5]
    assert list(tree.parents) == list(range(-1, 10))
    assert set(tree.sources[1:]) == {"suffix"}


def test_suffix_drafts_the_most_frequent_continuation_first() -> None:
    text = [1, 2, 3, 1, 2, 3, 1, 2, 4, 9, 1, 2]
    (chain,) = SuffixDrafter().propose([make_request(text)], [DraftBudget(2, 1)])
    assert paths(chain) == [(3,)]
    (tree,) = SuffixDrafter().propose([make_request(text)], [DraftBudget(3, 1)])
    assert paths(tree) == [(3,), (4,)]


def test_suffix_reads_a_long_prompt_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_INDEXED_TOKENS_PER_STEP", 5)
    drafter, request = SuffixDrafter(), make_request([1, 2, 3, 4] * 3)
    found = [drafter.propose([request], [DraftBudget(5, 4)])[0] for _ in range(3)]
    assert found[:2] == [None, None]
    assert paths(found[2]) == [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]


def test_suffix_match_shorter_than_min_match_proposes_nothing() -> None:
    assert MIN_MATCH_TOKENS == 2
    assert SuffixDrafter().propose([make_request([1, 2, 3, 9, 1])], [DraftBudget(9, 4)]) == [None]
    assert SuffixDrafter().propose([make_request([1])], [DraftBudget(9, 4)]) == [None]
    assert SuffixDrafter().propose([make_request([1, 2] * 9)], [DraftBudget(1, 4)]) == [None]
    for wrong in ((0, 4), (5, 4)):
        with pytest.raises(ConfigError, match="min_match"):
            SuffixDrafter(*wrong)


def finish(drafter: SuffixDrafter, output: Sequence[int], namespace: str | None) -> None:
    request = make_request([77, *output], 1, namespace)
    request.finish_reason = FinishReason.STOP
    drafter.release(request)


def draft_paths(drafter: SuffixDrafter, text: Sequence[int], namespace: str | None) -> list[Path]:
    request = make_request(text, 1, namespace)
    (tree,) = drafter.propose([request], [DraftBudget(9, 4)])
    return paths(tree)


def test_suffix_outputs_are_shared_only_within_a_namespace() -> None:
    output = [10, 11, 12, 13, 14, 15, 16]
    for store, theirs, ours in [(None, "a", "a"), (SuffixStore(), None, "a"), (SuffixStore(), "a", None), (SuffixStore(), "a", "b")]:
        drafter = SuffixDrafter(store=store)
        finish(drafter, output, theirs)
        assert draft_paths(drafter, [5, 11, 12], ours) == []
    shared = SuffixDrafter(store=SuffixStore())
    finish(shared, output, "a")
    assert draft_paths(shared, [5, 11, 12], "a") == [(13,), (13, 14), (13, 14, 15), (13, 14, 15, 16)]
    assert draft_paths(shared, [5, 77, 10], "a") == [], "prompts are not stored"
    assert "namespace" in shared.traits.description


def test_suffix_draft_ends_with_the_stored_output() -> None:
    drafter = SuffixDrafter(store=SuffixStore())
    for output in ([10, 11, 12], [20, 21, 22], [30, 11, 12]):
        finish(drafter, output, "a")
    assert draft_paths(drafter, [5, 10, 11], "a") == [(12,)]
    assert draft_paths(drafter, [5, 11, 12], "a") == []
    assert draft_paths(drafter, [5, 20, 21, 22], "a") == []


def test_suffix_prefers_its_own_text_unless_the_store_matches_longer() -> None:
    drafter = SuffixDrafter(store=SuffixStore())
    finish(drafter, [1, 2, 3, 4, 50, 51], "a")
    assert draft_paths(drafter, [3, 4, 60, 3, 4], "a")[0] == (60,)
    assert draft_paths(drafter, [3, 4, 60, 2, 3, 4], "a")[0] == (50,)


def test_suffix_store_changes_do_not_break_a_running_request(seed: int) -> None:
    random = np.random.default_rng(seed)
    store = SuffixStore(max_tokens=400)
    drafter = SuffixDrafter(1, 6, store=store)
    request = make_request([1], 1, "a")
    for _ in range(80):
        finish(drafter, random.integers(0, 4, random.integers(1, 40)).tolist(), "a")
        request.token_ids.extend(random.integers(0, 5, random.integers(1, 4)).tolist())
        (tree,) = drafter.propose([request], [DraftBudget(9, 4)])
        if tree is not None:
            tree.check()
            assert min(tree.token_ids) >= 0
        assert 0 < store.num_stored_tokens("a") <= 400
        for reader in drafter._texts[request].store_matches:
            length = reader.match[1]
            assert length <= 6
            fresh = (0, 0)
            for token in request.token_ids[len(request.token_ids) - length :]:
                fresh = reader.automaton.extend_match(fresh, token)
            assert fresh == reader.match


def test_suffix_store_is_bounded_in_tokens_and_namespaces() -> None:
    store = SuffixStore(max_tokens=100, max_namespaces=2)
    for index in range(50):
        store.add("a", [index] * 9)
        assert store.num_stored_tokens("a") <= 100
    assert store.num_stored_tokens("a") > 40
    store.add("a", [3] * 1000)
    assert store.num_stored_tokens("a") <= 100
    store.add("b", [1])
    store.add("a", [2])
    store.add("c", [1])
    assert [store.num_stored_tokens(name) > 0 for name in "abc"] == [True, False, True]
    store.clear("a")
    assert [store.num_stored_tokens(name) for name in "ac"] == [0, 2]
    store.clear()
    assert store.num_stored_tokens("c") == 0
    assert OUTPUT_SEPARATOR < 0
    for bound in ({"max_tokens": 0}, {"max_namespaces": 0}):
        with pytest.raises(ConfigError, match=next(iter(bound))):
            SuffixStore(**bound)
