"""The simulation of many replicas agrees with queueing theory, and is determined by its seed."""

import math
from dataclasses import replace

import pytest

from simulate_replicas import Outcome, Simulation, Times, World, row_of

EQUAL = Times(sizes=[(0, 1)], tokens_per_s=[1.0] * 16, prompt_token_s=0.0, front_s=0.0, front_part_s=0.0)
SHARED = replace(EQUAL, tokens_per_s=[1.0 / count for count in range(1, 201)])
CHATS = Times(
    sizes=[(40, 20), (10, 60), (90, 30)], tokens_per_s=[200.0, 180.0, 160.0, 140.0], prompt_token_s=0.001, front_s=0.0005, front_part_s=1e-5
)
FLEET = World(num_replicas=20, num_running=4, num_requests=6000)


def simulated(times: Times, world: World, seed: int, rate: float, *, fixed: bool = False) -> Outcome:
    """With work of mean 1, exponential or always the same."""
    return Simulation(times, world, seed, draw_work=(lambda _: 1.0) if fixed else (lambda draws: draws.expovariate(1.0)), rate=rate).run()


def erlang_wait_s(rate: float, servers: int) -> float:
    """Mean wait in M/M/c, where a server answers one request a second.

    Source: A. K. Erlang, "Solution of some problems in the theory of probabilities of significance in automatic telephone exchanges"
    (1917).
    """
    busy = rate / servers
    full = rate**servers / math.factorial(servers) / (1 - busy)
    waits = full / (sum(rate**count / math.factorial(count) for count in range(servers)) + full)
    return waits / (servers - rate)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(("servers", "rate"), [(4, 3.0), (16, 12.0)])
def test_simulated_wait_of_one_replica_equals_the_erlang_c_formula(servers: int, rate: float, seed: int, large_counts: bool) -> None:
    world = World(num_replicas=1, num_running=servers, num_requests=600_000 if large_counts else 60_000, num_beginnings=0)
    outcome = simulated(EQUAL, world, seed, rate)
    # four standard errors over seeds: the mean wait of 60,000 requests scatters by 5 to 8 %, as waits in a row depend on one another
    assert mean(outcome.waits_s) == pytest.approx(erlang_wait_s(rate, servers), rel=0.1 if large_counts else 0.3)
    assert mean(outcome.latencies_s) == pytest.approx(1.0 + erlang_wait_s(rate, servers), rel=0.04 if large_counts else 0.12)


@pytest.mark.parametrize("fixed", [False, True], ids=["any work", "equal work"])
def test_simulated_latency_equals_processor_sharing(fixed: bool, seed: int) -> None:
    """Whatever the law of their work is."""
    world = World(num_replicas=1, num_running=200, num_requests=20_000, num_beginnings=0)
    assert mean(simulated(SHARED, world, seed, 0.6, fixed=fixed).latencies_s) == pytest.approx(1 / (1 - 0.6), rel=0.08)


def test_simulated_wait_of_two_replicas_is_near_that_of_one_queue(seed: int) -> None:
    """Each for itself would wait 2.25 times as long; 20,000 requests scatter by a tenth."""
    world = World(num_replicas=2, num_running=1, num_requests=20_000, num_beginnings=0)
    wait_s = mean(simulated(EQUAL, world, seed, 1.6).waits_s)
    assert 0.75 < wait_s / erlang_wait_s(1.6, 2) < 1.4


def test_simulated_wait_of_a_front_equals_the_md1_queue(seed: int) -> None:
    """M/D/1: replicas with negligible service time and a front that is busy half of the time."""
    times = replace(EQUAL, front_s=0.5)
    world = World(num_replicas=4, num_running=16, num_requests=20_000, num_beginnings=0, fronts=1)
    outcome = Simulation(times, world, seed, draw_work=lambda _: 1e-9, rate=1.0).run()
    assert mean(outcome.latencies_s) == pytest.approx(0.5 + 0.5 * 0.5 / (2 * (1 - 0.5)), rel=0.05)


def test_simulation_with_the_same_seed_gives_the_same_table() -> None:
    def row(seed: int) -> list[str]:
        return row_of(FLEET, Simulation(CHATS, FLEET, seed).run())

    assert row(1) == row(1) != row(2)


def test_simulated_prefix_hits_grow_with_max_lead() -> None:
    shares = []
    for max_lead in (0, 4):
        outcome = Simulation(CHATS, replace(FLEET, max_lead=max_lead, num_kept=16), 1).run()
        shares.append(outcome.num_hits / len(outcome.latencies_s))
    assert shares[1] > shares[0] + 0.1


def test_simulated_failure_loses_the_requests_of_one_replica() -> None:
    world = replace(FLEET, mtbf_s=20.0, restart_s=2.0)
    outcome = Simulation(CHATS, world, 1).run()
    assert len(outcome.latencies_s) + outcome.num_lost + outcome.num_refused == world.num_requests
    failures = world.num_replicas * outcome.ended_s / (world.mtbf_s + world.restart_s)
    assert 0.3 < outcome.num_lost / (failures * world.num_running * world.load) < 3.0
    assert Simulation(CHATS, FLEET, 1).run().num_lost == 0
    alone = replace(world, num_replicas=1, num_requests=500, mtbf_s=1.0)
    assert Simulation(CHATS, alone, 1).run().num_refused > 0


def test_simulated_number_of_fronts_follows_from_the_load() -> None:
    few, many = (Simulation(CHATS, replace(FLEET, num_replicas=count), 1).outcome for count in (20, 200))
    assert (few.fronts, many.fronts) == (1, math.ceil(many.rate * (0.0005 + 1e-5 * (20 + 60 + 30) / 3) / 0.7))
    assert many.fronts > 1


def test_simulated_latency_is_at_least_the_service_time(seed: int) -> None:
    outcome = simulated(EQUAL, World(num_replicas=3, num_running=2, num_requests=2000, num_beginnings=0), seed, 4.0, fixed=True)
    assert min(outcome.latencies_s) == pytest.approx(1.0)


def test_simulated_slower_model_needs_fewer_fronts() -> None:
    quick, slow = (Simulation(CHATS.slower(factor), replace(FLEET, num_replicas=200, num_requests=4000), 1).run() for factor in (1, 10))
    assert quick.fronts > slow.fronts == 1
    assert slow.rate == pytest.approx(quick.rate / 10)
    assert slow.latency_s(0.5) > 5 * quick.latency_s(0.5)
