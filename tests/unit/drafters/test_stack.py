"""Who is asked, whose guess counts, and that what one lacks or breaks costs nothing where another has the answer."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from paceline.drafters.stack import StackDrafter
from paceline.kv_cache.paged import CachedSequence
from paceline.kv_cache.row_plan import TreeLayout, is_chain, num_rows
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.sampling.residual import TokenProbs
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree


class Recorder(Drafter):
    """Guesses for the requests whose last token it knows, and writes down what it is told."""

    def __init__(self, name: str, known: Sequence[int], needs: DrafterNeeds | None = None) -> None:
        self.name = name
        self.known = known
        self.needs = needs or DrafterNeeds()
        self.cache_bytes_per_token = 10
        self.calls: list[object] = []

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        self.calls.append([(request.token_ids[-1], budget.max_depth) for request, budget in zip(requests, budgets, strict=True)])
        return [DraftTree.chain(r.token_ids[-1], [7], self.name) if r.token_ids[-1] in self.known else None for r in requests]

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        self.calls.append(rows)

    def release(self, request: Request) -> None:
        self.calls.append(request)


def make_request(token_id: int) -> Request:
    params = SamplingParams()
    return Request([token_id], 1, params, LogitsProcessor(params, 9, [token_id]), CachedSequence(), seed=0, sample_index=0, max_len=9)


class Scripted(Drafter):
    """Gives the tree it is told to, after the time it is told to take, or raises."""

    def __init__(
        self, name: str, answer: Callable[[Request], DraftTree | None], clock: "Clock | None" = None, seconds: float = 0.0
    ) -> None:
        self.name, self.answer, self.clock, self.seconds = name, answer, clock, seconds
        self.num_asked = 0

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        self.num_asked += 1
        if self.clock is not None:
            self.clock.now += self.seconds
        return [self.answer(request) for request in requests]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("paceline.drafters.stack.time.perf_counter", clock)
    return clock


def chain(*tokens: int, source: str = "x") -> Callable[[Request], DraftTree]:
    return lambda request: DraftTree.chain(request.token_ids[-1], tokens, source)


def sure(prob: float, *tokens: int, source: str = "x") -> Callable[[Request], DraftTree]:
    """A chain whose drafter gives each guess this probability."""
    return lambda request: DraftTree.chain(request.token_ids[-1], tokens, source, [prob] * len(tokens))


def fail(request: Request) -> DraftTree:
    raise RuntimeError("broken")


def paths(tree: DraftTree | None) -> dict[tuple[int, ...], str]:
    assert tree is not None
    tree.check()
    texts: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        texts.append((*texts[parent], token) if parent >= 0 else ())
    return dict(zip(texts[1:], tree.sources[1:], strict=True))


def play(stack: StackDrafter, request: Request, emitted: Sequence[int], clock: Clock, budget: DraftBudget, pass_s: float = 0.1) -> None:
    """One step: propose, a target pass, observe."""
    stack.propose([request], [budget])
    clock.now += pass_s
    request.token_ids.extend(emitted)
    stack.observe([CommittedRows(request, len(request.token_ids) - len(emitted) - 1, len(emitted))])


def test_later_drafters_are_asked_only_where_those_before_had_less_to_say() -> None:
    first, second, third = Recorder("first", [1, 3]), Recorder("second", [0, 2]), Recorder("third", [0, 1])
    requests = [make_request(token) for token in (0, 1, 2, 3, 4)]
    trees = StackDrafter([first, second, third]).propose(requests, [DraftBudget(9, 1)] * 5)
    assert [tree and tree.sources[1] for tree in trees] == ["second", "first", "second", "first", None]
    assert first.calls == [[(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]]
    assert second.calls == [[(0, 1), (2, 1), (4, 1)]]
    assert third.calls == [[(4, 1)]]


def test_a_later_drafter_rests_where_the_first_knows_everything() -> None:
    first, second = Recorder("first", [1]), Recorder("second", [1])
    StackDrafter([first, second]).propose([make_request(1)], [DraftBudget(9, 1)])
    assert second.calls == []


@pytest.mark.parametrize("others", [[], ["late"], ["early"], ["early", "late"]], ids=str)
def test_one_that_fails_costs_nothing_where_another_has_the_answer(others: list[str], caplog: pytest.LogCaptureFixture) -> None:
    drafters: list[Drafter] = [Scripted("broken", fail)]
    if "early" in others:
        drafters.insert(0, Scripted("early", lambda request: chain(5, 6)(request) if request.token_ids[-1] == 1 else None))
    if "late" in others:
        drafters.append(Scripted("late", chain(7, 8)))
    stack = StackDrafter(drafters)
    requests, budgets = [make_request(1), make_request(2)], [DraftBudget(9, 4)] * 2
    for _ in range(3):
        if not others:
            with pytest.raises(RuntimeError, match="broken"):
                stack.propose(requests, budgets)
            continue
        one, two = stack.propose(requests, budgets)
        assert ((5, 6) in paths(one)) == ("early" in others)
        assert (two is not None) == ("late" in others)
    assert len(caplog.messages) == bool(others)
    assert all("broken, RuntimeError" in message for message in caplog.messages)


GARBAGE = {
    "too few": lambda requests: [],
    "no list": lambda requests: None,
    "no tree": lambda requests: ["tree"] * len(requests),
    "a loop": lambda requests: [DraftTree((1, 2), (-1, 1), (0, 1), ("", "x"))] * len(requests),
    "wrong depths": lambda requests: [DraftTree((1, 2), (-1, 0), (0, 5), ("", "x"))] * len(requests),
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_of_one_does_not_reach_the_others_answers(garbage: str) -> None:
    broken = Scripted("broken", fail)
    broken.propose = lambda requests, budgets: GARBAGE[garbage](requests)  # type: ignore[method-assign, assignment]
    for drafters in ([broken, Scripted("good", chain(7, 8))], [Scripted("good", chain(7, 8)), broken]):
        (tree,) = StackDrafter(drafters).propose([make_request(1)], [DraftBudget(9, 8)])
        assert list(paths(tree)) == [(7,), (7, 8)]


def test_answers_become_one_tree_without_twins(clock: Clock) -> None:
    a, b = Scripted("a", chain(1, 2, 3, source="a")), Scripted("b", chain(1, 5, source="b"))
    stack = StackDrafter([a, b])
    (tree,) = stack.propose([make_request(0)], [DraftBudget(20, 4, TreeLayout.MASK)])
    assert paths(tree) == {(1,): "a", (1, 2): "a", (1, 5): "b", (1, 2, 3): "a"}


@pytest.mark.parametrize("layout", [TreeLayout.PATHS, TreeLayout.MASK, TreeLayout.CHAIN])
def test_a_merged_tree_keeps_to_its_budget_in_the_layout_in_use(layout: TreeLayout, seed: int) -> None:
    random = np.random.default_rng(seed)
    num_merged = 0
    for _ in range(200):
        answers = [random.integers(0, 3, random.integers(0, 6)).tolist() for _ in range(3)]
        # the first answer is short, so everybody is asked
        stack = StackDrafter([Scripted(str(i), chain(*answer, source=str(i))) for i, answer in enumerate(sorted(answers, key=len))])
        budget = DraftBudget(int(random.integers(2, 12)), int(random.integers(1, 7)), layout)
        request = make_request(0)
        (tree,) = stack.propose([request], [budget])
        if tree is not None and len(stack._asked[request].trees) > 1:
            assert set(paths(tree)) <= {tuple(answer[:end]) for answer in answers for end in range(1, 6)}
            assert num_rows(tree.parents, layout) <= budget.row_budget
            assert max(tree.depths) <= budget.max_depth
            assert layout is not TreeLayout.CHAIN or is_chain(tree.parents)
            num_merged += 1
    assert num_merged > 50


def test_the_better_drafter_leads_once_it_is_known_whichever_comes_first(clock: Clock) -> None:
    for bad_first in (True, False):
        bad, good = Scripted("bad", chain(8, 8, source="bad"), clock), Scripted("good", chain(5, 6, source="good"), clock)
        stack = StackDrafter([bad, good] if bad_first else [good, bad])
        request = make_request(0)
        for _ in range(12):
            play(stack, request, [5, 6, 1], clock, DraftBudget(3, 2))
        (tree,) = stack.propose([request], [DraftBudget(3, 2)])
        assert paths(tree) == {(5,): "good", (5, 6): "good"}


def test_a_dear_drafter_is_asked_when_the_cheap_one_is_wrong_and_rests_when_it_is_right(clock: Clock) -> None:
    for cheap_is_right in (True, False):
        cheap = Scripted("cheap", chain(*((5, 6) if cheap_is_right else (8, 8)), source="cheap"), clock, 1e-5)
        dear = Scripted("dear", chain(5, 6, source="dear"), clock, 0.02)
        stack, request = StackDrafter([cheap, dear]), make_request(0)
        for _ in range(100):
            play(stack, request, [5, 6, 1], clock, DraftBudget(3, 2))
        assert cheap.num_asked == 100
        assert dear.num_asked <= 4 if cheap_is_right else dear.num_asked >= 90


def test_one_that_takes_too_long_is_left_alone_but_for_a_probe(clock: Clock) -> None:
    cheap = Scripted("cheap", chain(5, 8, source="cheap"), clock, 1e-5)  # half right
    dear = Scripted("dear", chain(5, 6, source="dear"), clock, 0.5)
    stack, request = StackDrafter([cheap, dear]), make_request(0)
    for _ in range(200):
        play(stack, request, [5, 6, 1], clock, DraftBudget(3, 2))
    assert 4 <= dear.num_asked <= 20


def test_a_new_request_begins_with_what_was_measured_lately(clock: Clock) -> None:
    bad, good = Scripted("bad", chain(8, 8, source="bad"), clock), Scripted("good", chain(5, 6, source="good"), clock)
    stack = StackDrafter([bad, good])
    request = make_request(0)
    for _ in range(40):
        play(stack, request, [5, 6, 1], clock, DraftBudget(3, 2))
    (tree,) = stack.propose([make_request(3)], [DraftBudget(3, 2)])
    assert set(paths(tree).values()) == {"good"}


def test_a_dear_drafter_is_asked_where_a_copy_is_unlikely_by_its_own_probability_and_not_where_it_is_likely(clock: Clock) -> None:
    """The copy is right half of the time; what tells the two cases apart is its probability alone."""
    step = [0]
    copy = Scripted("copy", lambda request: sure(0.9 if step[0] % 2 else 0.6, *((5, 6) if step[0] % 2 else (8, 8)))(request), clock, 1e-5)
    dear = Scripted("dear", sure(0.7, 5, 6, source="dear"), clock, 0.02)
    stack, asked = StackDrafter([copy, dear]), [0, 0]
    request = make_request(0)
    for step[0] in range(200):
        before = dear.num_asked
        play(stack, request, [5, 6, 1], clock, DraftBudget(3, 2))
        asked[step[0] % 2] += (dear.num_asked > before) * (step[0] >= 40)
    assert asked[0] == 80
    assert asked[1] <= 5


def test_what_drafters_say_is_put_right_for_each_by_itself(clock: Clock) -> None:
    """All say 0.8: one is always wrong, one always right."""
    step, request = [0], make_request(0)
    wrong = Scripted("wrong", lambda request: None if step[0] % 2 else sure(0.8, 8, 8)(request), clock, 1e-5)
    right = Scripted("right", lambda request: sure(0.8, 5, 6)(request) if step[0] % 2 else None, clock)
    stack = StackDrafter([wrong, right])
    for step[0] in range(80):
        play(stack, request, [5, 6, 1], clock, DraftBudget(5, 2))
    for step[0], least, most in ((0, 0.0, 0.2), (1, 0.9, 1.0)):
        (tree,) = stack.propose([request], [DraftBudget(5, 2)])
        assert tree is not None
        assert tree.probs is not None
        assert least < tree.probs[1] < most


def test_a_member_stops_by_the_chances_of_its_own_guesses(clock: Clock) -> None:
    """The copy's probabilities say nothing of the draft model's."""
    seen: list[float] = []
    copy, model = Scripted("copy", sure(0.8, 8, 8), clock, 1e-5), Scripted("model", sure(0.8, 5, 6), clock)
    stack, request = StackDrafter([copy, model]), make_request(0)
    for _ in range(40):
        play(stack, request, [5, 6, 1], clock, DraftBudget(3, 2))
    propose = model.propose

    def listening(requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        seen.extend(budget.chance(0.8) for budget in budgets)
        return propose(requests, budgets)

    model.propose = listening  # type: ignore[method-assign]
    stack.propose([request], [DraftBudget(3, 2, least_reach=0.3, chance_of=lambda prob: prob / 2)])
    assert 0.45 < seen[0] < 0.5, "then what is known of all of them together"


def test_only_who_copies_is_asked_where_nothing_else_is_worth_its_time(clock: Clock) -> None:
    copy, model = Scripted("copy", lambda request: chain(7)(request) if request.token_ids[-1] == 1 else None), Scripted("model", chain(5))
    copy.is_copier = True
    stack, requests = StackDrafter([copy, model]), [make_request(1), make_request(2)]
    budgets = [DraftBudget(3, 2, copies_only=True)] * 2
    assert [tree is not None for tree in stack.propose(requests, budgets)] == [True, False]
    assert model.num_asked == 0
    assert stack.can_copy(requests[0])
    copy.can_guess = lambda request: False  # type: ignore[method-assign]
    assert not stack.can_copy(requests[0])
    assert not model.can_copy(requests[0])


def test_the_depth_that_took_time_is_that_of_guesses_that_were_not_copied(clock: Clock) -> None:
    copy, model = Scripted("copy", chain(7, 8, 9)), Scripted("model", lambda request: None)
    copy.is_copier = True
    stack = StackDrafter([copy, model])
    stack.propose([make_request(1)], [DraftBudget(9, 5)])
    assert stack.timed_depth(3) == 0, "the model was asked, and took its time to say nothing"
    copy.answer, model.answer = lambda request: None, chain(5, 6)
    stack.propose([make_request(1)], [DraftBudget(9, 5)])
    assert stack.timed_depth(2) == 2
    copy.answer = chain(7, 8, 9)
    stack.propose([make_request(1)], [DraftBudget(9, 5)])
    assert stack.timed_depth(3) == 2, "the copy is deeper"
    stack.propose([make_request(1)], [DraftBudget(9, 5, copies_only=True)])
    assert stack.timed_depth(3) is None, "the model was not asked"


def test_where_all_copy_their_time_is_that_of_their_guesses(clock: Clock) -> None:
    members = [Scripted("first", chain(7, 8, 9)), Scripted("second", lambda request: None)]
    for member in members:
        member.is_copier = True
    stack = StackDrafter(members)
    stack.propose([make_request(1)], [DraftBudget(9, 5)])
    assert (stack.timed_depth(3), stack.timed_depth(0)) == (3, 0)


def test_no_chance_depends_on_guesses_that_were_drawn(clock: Clock) -> None:
    """With rejection a tree's shape alone may decide who is asked next: probabilities would tell which tokens were drawn."""
    drawn = TokenProbs(np.full(9, 1 / 9), None)

    def tree(prob: float) -> DraftTree:
        return replace(DraftTree.grow(1, [5], [0], "x", {0: drawn}), probs=[1.0, prob])

    stack, request = StackDrafter([Scripted("one", chain(5)), Scripted("other", chain(6))]), make_request(1)
    assert stack._chances(0, request, tree(0.9)) == stack._chances(0, request, tree(0.1))
    plain = [DraftTree.chain(1, [5], "x", [prob]) for prob in (0.9, 0.1)]
    assert stack._chances(0, request, plain[0]) != stack._chances(0, request, plain[1])


def test_each_member_sees_the_boundaries_it_asked_for() -> None:
    first, second, third = Recorder("a", [], DrafterNeeds(layers=(4, 1))), Recorder("b", [], DrafterNeeds(layers=(2,))), Recorder("c", [])
    stack = StackDrafter([first, second, third])
    collected = np.arange(3 * 2 * 5, dtype=np.float32).reshape(3, 2, 5)  # of boundaries 1, 2, 4
    stack.observe([CommittedRows(make_request(0), 0, 2, None, collected)])
    seen = [drafter.calls[0][0].collected_hidden_states for drafter in (first, second, third)]  # type: ignore[index]
    assert np.array_equal(seen[0], collected[[2, 0]])
    assert np.array_equal(seen[1], collected[[1]])
    assert seen[2] is None


@pytest.mark.parametrize("call", ["observe", "release"])
def test_all_others_hear_what_one_fails_to_take(call: str) -> None:
    deaf, last = Recorder("deaf", []), Recorder("last", [])
    setattr(deaf, call, lambda *args: fail(make_request(0)))
    stack, request = StackDrafter([deaf, last]), make_request(0)
    arguments = {"observe": ([CommittedRows(request, 0, 1)],), "release": (request,)}[call]
    with pytest.raises(RuntimeError, match="broken"):
        getattr(stack, call)(*arguments)
    assert len(last.calls) == 1


def test_everybody_is_told_everything() -> None:
    drafters = [Recorder("a", []), Recorder("b", [])]
    stack = StackDrafter(drafters)
    request = make_request(0)
    rows = [CommittedRows(request, 0, 1)]
    stack.observe(rows)
    stack.release(request)
    for drafter in drafters:
        assert drafter.calls == [rows, request]


def test_a_stack_needs_and_costs_what_its_drafters_do() -> None:
    stack = StackDrafter(
        [
            Recorder("a", [], DrafterNeeds(layers=(4, 1))),
            Recorder("b", [], DrafterNeeds(hidden_states=True, layers=(1, 2))),
        ]
    )
    assert stack.needs == DrafterNeeds(hidden_states=True, layers=(1, 2, 4))
    assert stack.cache_bytes_per_token == 20
    assert (stack.name, stack.describe()) == ("a+b", "a + b")


def test_a_drafter_that_returns_too_little_is_noticed() -> None:
    short = Recorder("short", [])
    short.propose = lambda requests, budgets: []  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="shorter"):
        StackDrafter([short]).propose([make_request(0)], [DraftBudget(9, 1)])


def test_who_would_have_to_read_for_too_long_is_not_asked_and_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    quick, slow = Scripted("quick", lambda request: None), Scripted("slow", chain(5, 6))
    monkeypatch.setattr(slow, "reading_s", lambda request: 3.0)
    stack, request = StackDrafter([quick, slow]), make_request(1)
    assert stack.reading_s(request) == 3.0
    assert stack.may_guess(request, 1.0), "one of them may"
    assert stack.propose([request], [DraftBudget(9, 4, max_reading_s=1.0)]) == [None]
    assert (quick.num_asked, slow.num_asked) == (1, 0)
    (tree,) = stack.propose([request], [DraftBudget(9, 4, max_reading_s=4.0)])
    assert (5, 6) in paths(tree)
    monkeypatch.setattr(quick, "reading_s", lambda request: 2.0)
    assert not stack.may_guess(request, 1.0)
