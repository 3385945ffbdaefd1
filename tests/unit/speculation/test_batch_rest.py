"""Requests of a batch rest together, each as many steps as it was to rest, and nothing that was measured meanwhile is lost."""

from typing import Any

import numpy as np
import pytest

from harness.replay import Costs, controller, made_up, replay
from paceline.drafters.stack import StackDrafter
from paceline.kv_cache.paged import CachedSequence
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation import draft_learning
from paceline.speculation.acceptance import RequestAcceptance
from paceline.speculation.batch_rest import LONGEST, BatchRest, rest_after, steps_until
from paceline.speculation.controller import DraftController
from paceline.speculation.draft_learning import MOST_IDLE
from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request import FinishReason, Request, RequestSpeculation
from paceline.speculation.request_rows import RequestRows
from paceline.speculation.stats import PlainReason
from paceline.speculation.tree import DraftTree
from paceline.speculation.vain_time import OF_COPIES, OF_OTHERS, Limits, VainTime

COSTS = Costs(lambda rows: 0.010 * (1 + 0.5 * (rows - 1)))


class Player(Drafter):
    name = "player"

    def propose(self, requests: Any, budgets: Any) -> Any:
        return [None] * len(requests)


PLAYER = Player()


def decoding(num_idle: int | None, **fields: Any) -> Request:
    """A request that is to rest so long; None = of which nothing is known."""
    params = SamplingParams()
    sequence = CachedSequence()
    sequence.committed_len = 99
    request = Request([1] * 100, 10, params, LogitsProcessor(params, 4, [1]), sequence, seed=0, sample_index=0, max_len=500, **fields)
    request.acceptance = None if num_idle is None else RequestAcceptance("player", num_idle=num_idle)
    return request


def rows_of(requests: list[Request], num_known: int = 1) -> list[RequestRows]:
    return [RequestRows.of(request, num_known) for request in requests]


def begun(batch: list[RequestRows]) -> BatchRest:
    """The rest behind a plain step of these."""
    rest = BatchRest()
    rest.take(batch)
    rest.begin(batch)
    return rest


def idle(requests: list[Request]) -> list[int]:
    return [-1 if request.acceptance is None else request.acceptance.num_idle for request in requests]


@pytest.mark.parametrize("rest", [0, 1, 3, 7, 15])
def test_who_rests_as_long_is_thought_of_again_in_the_same_step(rest: int) -> None:
    ends = {step + steps_until(rest, step) for step in range(100, 100 + rest + 1)}
    assert len(ends) <= 2
    assert all(end % (rest + 1) == 0 for end in ends)
    assert all(0 <= steps_until(rest, step) <= rest for step in range(50))


def test_rests_grow_with_what_was_in_vain() -> None:
    assert [rest_after(count, 4, 7) for count in (0, 3, 4, 11, 12, 27, 28, 900)] == [0, 0, 1, 1, 3, 3, 7, 7]
    assert all(rest_after(count, 8, 7) <= count / 8 for count in range(300))


def test_a_batch_rests_as_long_as_everybody_in_it_may() -> None:
    requests = [decoding(5), decoding(3), decoding(None, speculation=RequestSpeculation(enabled=False))]
    rest = begun(rows_of(requests))
    for _ in range(3):
        batch = rows_of(requests)
        assert rest.left > 0
        assert rest.begins(batch)
        assert [rows.plain_reason for rows in batch] == [PlainReason.DID_NOT_PAY, PlainReason.DID_NOT_PAY, PlainReason.OFF]
    assert rest.left == 0
    assert idle(requests) == [2, 0, -1]


def test_a_batch_of_which_nobody_may_draft_rests_for_a_while() -> None:
    requests = [decoding(None, speculation=RequestSpeculation(max_draft_tokens=0))] * 2
    assert begun(rows_of(requests)).left == LONGEST


def test_nobody_rests_who_has_a_guess_a_prompt_or_a_grammar_or_has_ended() -> None:
    held, ended, prompt = decoding(5), decoding(5), decoding(5)
    held.processor.constraint = object()  # type: ignore[assignment]
    ended.finish_reason = FinishReason.LENGTH
    prompt.sequence.committed_len = 90
    for request in (decoding(0), decoding(None), held, ended):
        assert begun(rows_of([decoding(5), request])).left == 0
    assert begun([*rows_of([decoding(5)]), *rows_of([prompt], 10)]).left == 0


def test_where_others_take_part_a_rest_ends_and_each_goes_on_with_its_own() -> None:
    for change in ("one more", "one less", "another", "a prompt", "one more with a prompt"):
        requests = [decoding(9), decoding(6)]
        rest = begun(rows_of(requests))
        assert rest.begins(rows_of(requests))
        if change == "a prompt":
            requests[1].sequence.committed_len = 90
            batch = [*rows_of(requests[:1]), *rows_of(requests[1:], 10)]
        elif change == "one more with a prompt":
            begins = decoding(None)
            begins.sequence.committed_len = 90
            batch = [*rows_of(requests), *rows_of([begins], 10)]
        else:
            others = {"one more": [*requests, decoding(4)], "one less": requests[:1], "another": [requests[0], decoding(4)]}
            batch = rows_of(others[change])
        assert not rest.begins(batch)
        assert rest.left == 0
        assert idle(requests) == [8, 5]


def test_a_prompt_that_joins_ends_a_rest_and_its_pass_is_no_plain_step_of_the_others() -> None:
    requests, newcomer = [decoding(9), decoding(6)], decoding(None)
    newcomer.sequence.committed_len = 90
    rest = begun(rows_of(requests))
    assert rest.begins(rows_of(requests))
    batch = [*rows_of(requests), *rows_of([newcomer], 10)]
    assert not rest.is_of(batch)
    assert not rest.begins(batch)
    assert [rows.plain_reason for rows in batch] == [None] * 3
    assert (rest.left, idle(requests)) == (0, [8, 5])


def test_steps_of_prompts_alone_are_not_learned_of_as_those_of_requests_that_ended() -> None:
    requests, prompt, policy = [decoding(9), decoding(9)], decoding(None), controller(COSTS)
    prompt.sequence.committed_len = 90
    policy.observe_step(rows_of(requests), 0.01, 0.001)
    policy.release(requests[0])
    policy.observe_step(rows_of([prompt], 5), 9.0, 0.001)
    assert 9.0 not in policy._rest.steps.passes_s


def random_steps(policy: DraftController, seed: int, *, together: bool) -> list[tuple[int, int]]:
    """(step, request) of everybody who is thought of, where requests come and go; the same ones whether or not batches rest as a whole."""
    random, thought_of = np.random.default_rng(seed), list[tuple[int, int]]()
    requests = [decoding(0) for _ in range(6)]
    for step in range(400):
        batch = rows_of([request for request in requests if random.random() < (0.98 if step % 50 else 0.3)])
        if not together:
            policy._rest.stop()
        rests = together and policy.rests_together(batch)
        for rows in batch:
            own = rows.request.acceptance
            if own is not None and not rests and policy.rests(rows.request) is None:
                number = requests.index(rows.request)
                thought_of.append((step, number))
                own.num_idle = (7 * number + step) % 12
        policy.observe_step(batch, 0.01, 0.001)
    return thought_of


def test_whether_a_batch_rests_together_changes_nothing_of_who_is_thought_of_when(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_learning, "VAIN_SHARE", 10**6)  # else they rest longer by themselves,
    monkeypatch.setattr(VainTime, "add", lambda *_: 0)  # and where their other work, the same for any number, is not as it was learned
    alone, plans = random_steps(controller(COSTS), seed, together=False), random_steps(controller(COSTS), seed, together=True)
    assert plans == alone
    assert len(plans) < 600


def test_the_steps_of_a_rest_are_learned_of_as_if_they_had_been_noted_one_by_one(seed: int) -> None:
    random, rested, noted = np.random.default_rng(seed), controller(COSTS), controller(COSTS)
    for _ in range(12):
        requests, known = [decoding(7), decoding(7), decoding(9)], [decoding(None)] * 3
        rested.observe_step(rows_of(requests), 0.012, 0.001)
        noted.observe_step(rows_of(known), 0.012, 0.001)
        for _ in range(7):
            pass_s, host_s = 0.012 * (1.0 + 0.2 * random.random()), 0.001 * (1.0 + random.random())
            batch = rows_of(requests)
            assert rested.rests_together(batch)
            rested.observe_step(batch, pass_s, host_s)
            noted.observe_step(rows_of(known), pass_s, host_s)
        assert not rested.rests_together(rows_of(requests))
    assert rested.host.at(3.0, 0.0) == pytest.approx(noted.host.at(3.0, 0.0), rel=1e-6)
    assert rested.costs.at(3) == pytest.approx(noted.costs.at(3), rel=1e-6)
    assert rested.times.rate == pytest.approx(noted.times.rate, rel=0.03)


def test_a_request_that_ends_is_held_by_no_rest() -> None:
    requests, policy = [decoding(6), decoding(6), decoding(6)], controller(COSTS)
    policy.observe_step(rows_of(requests), 0.01, 0.001)
    assert policy.rests_together(rows_of(requests))
    policy.release(requests[0])
    assert not policy._rest.holds(requests[1])
    assert idle(requests) == [-1, 5, 5]


@pytest.mark.parametrize("count", [2, 3])
def test_what_was_in_vain_for_several_is_soon_thought_of_for_the_last_one(count: int) -> None:
    requests, policy = [decoding(60) for _ in range(count)], controller(COSTS)
    policy.observe_step(rows_of(requests), 0.01, 0.001)
    assert policy.rests_together(rows_of(requests))
    policy.release(requests[0])
    assert idle(requests)[1:] == ([MOST_IDLE] if count == 2 else [59, 59])


@pytest.mark.parametrize(("names", "limits"), [(("player", "suffix"), OF_COPIES), (("player", "second"), OF_OTHERS)])
def test_who_copies_is_thought_of_more_often(names: tuple[str, str], limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters that take half of a pass, for two requests: nothing is expected of them."""
    members = [type("Member", (Player,), {"name": name, "is_copier": name == "suffix"})() for name in names]
    policy, stack, used = controller(COSTS), StackDrafter(members), set[Limits]()
    policy.know_time(stack.name, 0.005)
    monkeypatch.setattr(VainTime, "add", lambda _, step, spent, limits: used.add(limits) or 31)
    requests = [decoding(None), decoding(None)]
    for _ in range(12):
        batch = rows_of(requests)
        if not policy.rests_together(batch):
            drafting: list[tuple[RequestRows, Drafter]] = [(rows, stack) for rows in batch if policy.rests(rows.request) is None]
            for rows, _ in drafting:
                rows.budget = rows.given = DraftBudget(3, 2)
            policy.plan(batch, drafting, None)
        policy.observe_step(batch, 0.01, 0.001)
    assert used == {limits}


def test_a_request_is_told_whether_it_rests_for_want_of_a_guess_or_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, requests = controller(COSTS), [decoding(None), decoding(None)]
    for request in requests:
        policy.note_no_guess(request, PLAYER)
        own = request.acceptance
        assert own is not None
        own.num_idle = 2
    assert [policy.rests(request) for request in requests] == [PlainReason.NO_GUESS] * 2
    monkeypatch.setattr(VainTime, "add", lambda *_: 31)  # thinking of them takes too long
    policy.observe_step(rows_of(requests), 0.01, 0.001)
    batch = rows_of(requests)
    assert policy.rests_together(batch)
    assert [rows.plain_reason for rows in batch] == [PlainReason.DID_NOT_PAY] * 2


def test_a_step_that_failed_is_not_taken_for_one_that_was_rested() -> None:
    requests, policy = [decoding(1), decoding(1)], controller(COSTS)
    policy.observe_step(rows_of(requests), 0.01, 0.001)
    assert policy.rests_together(rows_of(requests))  # and its pass fails: nobody says what it took
    assert not policy.rests_together(rows_of(requests))
    assert not policy._rest.is_under_way


def looks_at(policy: DraftController, request: Request, num_steps: int) -> list[int]:
    """Steps in which a request's drafter is thought of, which has nothing to guess from."""
    looks = []
    for step in range(num_steps):
        batch = rows_of([request])
        if not policy.rests_together(batch) and policy.rests(request) is None:
            looks.append(step)
            policy.note_no_guess(request, PLAYER)
        else:
            assert request.acceptance is not None
        policy.observe_step(batch, 0.01, 0.001)
    return looks


def test_a_request_without_a_guess_for_long_is_looked_at_less_often() -> None:
    looks = looks_at(controller(COSTS), decoding(None), 600)
    assert looks[:8] == list(range(8)), "at first in every step"
    gaps = np.diff(looks)
    assert max(gaps) == 8
    assert all(gap <= 1 + look / 4 for look, gap in zip(looks, gaps, strict=False)), "never for more than a part of what it waited"
    assert len(looks) < 130


def test_a_new_request_is_looked_at_as_seldom_as_others_at_their_ends() -> None:
    policy, counts = controller(COSTS), list[int]()
    for _ in range(6):
        request = decoding(None)
        counts.append(len(looks_at(policy, request, 96)))
        policy.release(request)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 36
    assert counts[-1] == 96 // 4, "in one of four steps from the first one on"


def test_one_kept_guess_ends_that_for_the_request_and_for_those_behind_it() -> None:
    policy, request = controller(COSTS), decoding(None)
    looks_at(policy, request, 96)
    own = request.acceptance
    assert own is not None
    num_unable = own.num_unable
    assert num_unable > 20
    tree = DraftTree.chain(1, [1, 1], PLAYER.name)
    policy.observe(request, tree, [])
    assert own.num_unable == num_unable
    policy.observe(request, tree, [1])
    assert own.num_unable == 0
    policy.release(request)
    own = policy._own(decoding(None), PLAYER)
    assert own.num_unable == 0


def test_what_guesses_of_a_failed_step_were_to_bring_is_not_credited_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, request = Costs(lambda rows: 0.010 * (1 + 0.01 * (rows - 1))), decoding(None)
    policy, credited = controller(costs), list[float]()
    replay(policy, [made_up(64, lambda _: 1.0, np.random.default_rng(0))], costs)  # guesses are worth a lot
    monkeypatch.setattr(policy.times, "saved_s", lambda plain_s, taken_s, brought, other_s: credited.append(brought) or 0.0)

    def begin_step(guessed: list[int]) -> list[RequestRows]:
        batch = rows_of([request])
        batch[0].budget = batch[0].given = DraftBudget(17, 16)
        policy.plan(batch, [(batch[0], PLAYER)], None)
        batch[0].set_guesses(DraftTree.chain(1, guessed, PLAYER.name), len(guessed), PlainReason.CUT)
        policy.select(batch, None)
        return batch

    assert begin_step([1] * 8)[0].num_guesses > 0  # and its pass fails
    policy.observe_step(begin_step([]), 0.010, 0.0)
    assert credited == [0]
