"""Where requests go: a function of loads and beginnings, tried with a simulated clock."""

import heapq
import json
import random
from collections import Counter
from typing import Any

import pytest

from paceline.server.replicas.front import merged_metrics
from paceline.server.replicas.routing import PROMPT_CHARS, PROMPT_TOKENS, choose_replica, prefix_key

USER = {"role": "user", "content": "I need a taxi."}
SYSTEM = {"role": "system", "content": "You answer."}


def key(**fields: Any) -> int | None:
    return prefix_key(json.dumps(fields).encode())


def names(count: int) -> list[str]:
    return [f"replica {index}" for index in range(count)]


def test_prefix_key_is_equal_for_later_turns_of_a_chat_only() -> None:
    answer, more = {"role": "assistant", "content": "Where to?"}, {"role": "user", "content": "The airport."}
    assert key(messages=[SYSTEM, USER]) == key(messages=[SYSTEM, USER, answer, more], temperature=0, stream=True)
    assert len({key(messages=[SYSTEM, USER]), key(messages=[USER]), key(messages=[SYSTEM, more]), key(messages=[USER], system="x")}) == 4


def test_prefix_key_of_a_prompt_depends_on_its_beginning() -> None:
    long, ids = "a" * PROMPT_CHARS, list(range(PROMPT_TOKENS))
    assert key(prompt=long + "b") == key(prompt=long + "c") == key(prompt=[long + "d", "other"])
    assert key(prompt=[*ids, 1]) == key(prompt=[*ids, 2]) == key(prompt=[[*ids, 3], [4]])
    assert len({key(prompt=long), key(prompt="b" + long), key(prompt=ids), key(prompt=ids[1:])}) == 4


@pytest.mark.parametrize(
    "body", [b"", b"oops", b"[]", b"{}", b'{"prompt": ""}', b'{"prompt": []}', b'{"messages": []}', b'{"messages": "x"}', b"[" * 100_000]
)
def test_request_without_prompt_or_messages_has_no_prefix_key(body: bytes) -> None:
    assert prefix_key(body) is None


@pytest.mark.parametrize("messages", [[3], [{}], [USER, None], [{"role": ["user"]}]], ids=str)
def test_malformed_messages_have_a_prefix_key(messages: list[Any]) -> None:
    assert isinstance(key(messages=messages), int)


def test_choose_replica_keeps_the_affine_replica_within_max_lead() -> None:
    loads = dict.fromkeys(names(8), 3)
    affine = choose_replica(loads, 77, max_lead=4)
    assert choose_replica({**loads, affine: 7}, 77, max_lead=4) == affine
    assert choose_replica({**loads, affine: 8}, 77, max_lead=4) != affine
    least = {**loads, affine: 8, "replica 2": 2}
    assert choose_replica(least, 77, max_lead=4) == min(least, key=lambda name: least[name])


def test_second_choice_of_a_replica_is_stable_for_a_prefix_key() -> None:
    loads = dict.fromkeys(names(8), 0)
    affine = choose_replica(loads, 77)
    assert len({choose_replica({**loads, affine: 100 + more}, 77) for more in range(20)}) == 1


def test_choose_replica_with_max_lead_0_takes_the_least_loaded() -> None:
    draws = random.Random(3)
    for number in range(300):
        loads = {name: draws.randrange(5) for name in names(1 + draws.randrange(9))}
        assert loads[choose_replica(loads, number, max_lead=0)] == min(loads.values())


def test_prefix_keys_are_spread_evenly_and_few_move_with_a_lost_replica() -> None:
    loads = dict.fromkeys(names(10), 0)
    draws = random.Random(4)
    keys = [draws.getrandbits(64) for _ in range(4000)] + list(range(4000))
    before = {one: choose_replica(loads, one) for one in keys}
    counts = Counter(before.values())
    assert all(0.85 < counts[name] / 800 < 1.15 for name in loads), counts
    gone = "replica 4"
    fewer = {name: load for name, load in loads.items() if name != gone}
    moved = [one for one in keys if choose_replica(fewer, one) != before[one]]
    assert {before[one] for one in moved} == {gone}


def test_replica_load_never_exceeds_the_least_by_more_than_max_lead() -> None:
    """All requests begin alike and last long: the affine replica takes its lead, then all replicas take turns."""
    loads = dict.fromkeys(names(5), 0)
    for _ in range(100):
        loads[choose_replica(loads, 1, max_lead=3)] += 1
        assert max(loads.values()) - min(loads.values()) <= 4
    assert sum(loads.values()) == 100


def waiting_s(*, max_lead: int, num_keys: int) -> float:
    """Mean time a request waits for others of its replica, on a simulated clock: 8 replicas, one at a time each, 70 % busy."""
    draws = random.Random(5)
    loads = dict.fromkeys(names(8), 0)
    free_at = dict.fromkeys(loads, 0.0)
    ends: list[tuple[float, str]] = []
    clock, waited = 0.0, 0.0
    for _ in range(6000):
        clock += draws.expovariate(0.7 * 8)
        while ends and ends[0][0] <= clock:
            loads[heapq.heappop(ends)[1]] -= 1
        chosen = choose_replica(loads, draws.randrange(num_keys), max_lead=max_lead)
        begin = max(clock, free_at[chosen])
        free_at[chosen] = begin + draws.expovariate(1.0)
        waited += begin - clock
        loads[chosen] += 1
        heapq.heappush(ends, (free_at[chosen], chosen))
    return waited / 6000


def test_max_lead_bounds_the_waiting_time_of_a_popular_prefix() -> None:
    assert waiting_s(max_lead=0, num_keys=10**9) < 1.0
    assert waiting_s(max_lead=2, num_keys=1) < 2.5
    assert waiting_s(max_lead=10**9, num_keys=1) > 100.0


def test_metrics_of_replicas_are_merged_with_a_replica_label() -> None:
    page = '# HELP a Text.\n# TYPE a counter\na{engine="0",model_name="m"} 1.0\n# HELP b Text.\n# TYPE b gauge\nb{x="1",engine="0"} 2.0\n'
    merged = merged_metrics({"one": page, "two": page.replace("1.0", "5.0")})
    assert merged.splitlines() == [
        "# HELP a Text.",
        "# TYPE a counter",
        'a{engine="one",model_name="m"} 1.0',
        'a{engine="two",model_name="m"} 5.0',
        "# HELP b Text.",
        "# TYPE b gauge",
        'b{x="1",engine="one"} 2.0',
        'b{x="1",engine="two"} 2.0',
    ]
    assert merged_metrics({}) == ""
