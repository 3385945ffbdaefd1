"""Simulate many replicas of `paceline serve --replicas` by discrete events, from times measured on one.

    python tools/simulate_replicas.py
    python tools/simulate_replicas.py --replicas 1 10 100 --load 0.8 --max-lead 4 --seed 3

Requests come at random (Poisson) and pass a front, which chooses a replica by `choose_replica`, as the server does. A replica runs some
samples at a time; with k of them each makes the measured number of tokens a second. Sizes are drawn from measured requests, beginnings
from a few popular ones (Zipf). A replica keeps the rows of the last beginnings; a failure loses them and its requests.

docs/scaling.md explains the times. The same seed gives the same table.
"""

import argparse
import heapq
import json
import math
import random
import statistics
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from reporting import REPOSITORY, markdown_table

sys.path[:0] = [str(REPOSITORY / "src")]

from paceline.server.replicas.routing import DEFAULT_MAX_LEAD, choose_replica  # noqa: E402

TIMES = Path(__file__).with_name("replica_times.json")
REPLICAS = (1, 2, 10, 100, 1000)
REQUESTS_A_REPLICA = 300
MIN_REQUESTS = 3000
FRONT_LOAD = 0.7
"""Share of its time that a front may be busy; where more is needed there are several."""


@dataclass(frozen=True, slots=True)
class Times:
    """What was measured of one replica and its front.

    Attributes:
        sizes: prompt tokens and output tokens of requests.
        tokens_per_s: of each of k samples that run together, from k = 1 on.
        prompt_token_s: of a prompt token that is not in the cache, in seconds of a replica of its own.
        front_s: that a front is busy with a request, and with each part of a streamed answer.
    """

    sizes: Sequence[tuple[int, int]]
    tokens_per_s: Sequence[float]
    prompt_token_s: float
    front_s: float
    front_part_s: float

    @classmethod
    def read(cls, path: Path) -> "Times":
        found = json.loads(path.read_text(encoding="utf-8"))
        sizes = [(int(prompt), int(output)) for prompt, output in found["sizes"]]
        return cls(sizes, found["tokens_per_s"], found["prompt_token_s"], found["front_s"], found["front_part_s"])

    def slower(self, factor: float) -> "Times":
        """The same front before a model that takes `factor` times as long."""
        return replace(self, tokens_per_s=[one / factor for one in self.tokens_per_s], prompt_token_s=self.prompt_token_s * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What is simulated besides.

    Attributes:
        num_running: samples that a replica runs at a time.
        load: requests that come, as a share of those that all replicas could answer if they met no beginning again.
        max_lead: of `choose_replica`.
        num_beginnings: for each replica, how many beginnings are popular; 0 = none is ever met again.
        shared: part of a prompt that is its beginning.
        num_kept: beginnings that a replica keeps.
        mtbf_s, restart_s: mean time between two failures of a replica, and until it is back.
        fronts: 0 = as many as are needed for `FRONT_LOAD`, but none without a replica.
    """

    num_replicas: int
    num_running: int
    num_requests: int
    load: float = 0.7
    max_lead: int = DEFAULT_MAX_LEAD
    num_beginnings: int = 50
    shared: float = 0.6
    num_kept: int = 64
    mtbf_s: float = math.inf
    restart_s: float = 60.0
    fronts: int = 0


@dataclass(slots=True)
class Job:
    """A request on its way.

    Attributes:
        work: tokens it costs, those of its prompt included, in tokens of a decoding sample.
    """

    came_s: float
    key: int
    front: int
    prompt: int
    output: int
    work: float = 0.0
    began_s: float = 0.0
    is_hit: bool = False


@dataclass(slots=True)
class Replica:
    """One engine. `done` is the work that a sample has got that ran since the beginning; all that run get the same."""

    name: str
    is_up: bool = True
    done: float = 0.0
    at_s: float = 0.0
    running: list[tuple[float, int, Job]] = field(default_factory=list)
    waiting: deque[Job] = field(default_factory=deque)
    kept: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    version: int = 0


@dataclass(slots=True)
class Outcome:
    """What became of all requests."""

    latencies_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    num_hits: int = 0
    num_lost: int = 0
    num_refused: int = 0
    output_tokens: int = 0
    ended_s: float = 0.0
    fronts: int = 1
    rate: float = 0.0

    def latency_s(self, share: float) -> float:
        """The latency that `share` of the answers stay below."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Simulation:
    """One world, event by event.

    Args:
        draw_work: the work of a job in place of the measured one, and `rate` of requests a second in place of `World.load`: for theory.
    """

    def __init__(
        self, times: Times, world: World, seed: int, *, draw_work: Callable[[random.Random], float] | None = None, rate: float | None = None
    ) -> None:
        self._times, self._world, self._draw_work = times, world, draw_work
        self._draws = random.Random(seed)
        self._replicas = {f"replica-{index}": Replica(f"replica-{index}") for index in range(world.num_replicas)}
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._num_events, self._num_left = 0, world.num_requests
        self._now_s = 0.0
        self.outcome = Outcome(rate=rate or world.load * world.num_replicas * self._requests_per_s())
        busy_s = times.front_s + times.front_part_s * statistics.mean(output for _, output in times.sizes)
        self.outcome.fronts = world.fronts or min(world.num_replicas, max(1, math.ceil(self.outcome.rate * busy_s / FRONT_LOAD)))
        self._front_free_s = [0.0] * self.outcome.fronts
        names = list(self._replicas)
        self._loads = [dict.fromkeys(names[front :: self.outcome.fronts], 0) for front in range(self.outcome.fronts)]
        self._cumulated = list(accumulate(1.0 / (rank + 1) for rank in range(world.num_beginnings * world.num_replicas)))

    def run(self) -> Outcome:
        """All requests, to their ends."""
        self._at(self._draws.expovariate(self.outcome.rate), self._come)
        if math.isfinite(self._world.mtbf_s):
            for replica in self._replicas.values():
                self._at(self._draws.expovariate(1 / self._world.mtbf_s), self._fail, replica)
        num_requests = self._world.num_requests
        while self._events:
            self._now_s, _, happen, arguments = heapq.heappop(self._events)
            happen(*arguments)
            outcome = self.outcome
            if len(outcome.latencies_s) + outcome.num_lost + outcome.num_refused == num_requests:
                break
        self.outcome.ended_s = self._now_s
        return self.outcome

    def _requests_per_s(self) -> float:
        """What one full replica answers."""
        times, k = self._times, self._world.num_running
        work = statistics.mean(output + prompt * times.prompt_token_s * self._rate(1) for prompt, output in times.sizes)
        return k * self._rate(k) / work

    def _rate(self, num_running: int) -> float:
        return self._times.tokens_per_s[min(num_running, len(self._times.tokens_per_s)) - 1]

    def _at(self, time_s: float, happen: Callable[..., None], *arguments: object) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, happen, arguments))

    def _come(self) -> None:
        """A request arrives at a front, and waits there for its turn."""
        self._num_left -= 1
        if self._num_left:
            self._at(self._now_s + self._draws.expovariate(self.outcome.rate), self._come)
        prompt, output = self._draws.choice(self._times.sizes)
        key = self._draws.choices(range(len(self._cumulated)), cum_weights=self._cumulated)[0] if self._cumulated else -self._num_events
        front = self._draws.randrange(self.outcome.fronts)
        job = Job(self._now_s, key, front, prompt, output)
        begin_s = max(self._now_s, self._front_free_s[front])
        self._front_free_s[front] = begin_s + self._times.front_s + output * self._times.front_part_s
        self._at(begin_s + self._times.front_s, self._route, job)

    def _route(self, job: Job) -> None:
        known = self._loads[job.front]
        loads = {name: load for name, load in known.items() if self._replicas[name].is_up}
        if not loads:
            self.outcome.num_refused += 1
            return
        lead = self._world.max_lead if self._cumulated else 0
        replica = self._replicas[choose_replica(loads, job.key, max_lead=lead)]
        known[replica.name] += 1
        self._catch_up(replica)
        replica.waiting.append(job)
        self._start(replica)

    def _start(self, replica: Replica) -> None:
        """Let waiting jobs run while there is room, and return when the next one ends."""
        while replica.waiting and len(replica.running) < self._world.num_running:
            job = replica.waiting.popleft()
            job.began_s, job.work = self._now_s, self._work(replica, job)
            heapq.heappush(replica.running, (replica.done + job.work, self._num_events, job))
            self._num_events += 1
        replica.version += 1
        if replica.running:
            left = replica.running[0][0] - replica.done
            self._at(self._now_s + left / self._rate(len(replica.running)), self._end_first, replica, replica.version)

    def _work(self, replica: Replica, job: Job) -> float:
        if self._draw_work is not None:
            return self._draw_work(self._draws)
        job.is_hit = job.key in replica.kept
        replica.kept[job.key] = None
        replica.kept.move_to_end(job.key)
        if len(replica.kept) > self._world.num_kept:
            replica.kept.popitem(last=False)
        num_rows = job.prompt * (1 - self._world.shared * job.is_hit)
        return job.output + num_rows * self._times.prompt_token_s * self._rate(1)

    def _catch_up(self, replica: Replica) -> None:
        if replica.running:
            replica.done += (self._now_s - replica.at_s) * self._rate(len(replica.running))
        replica.at_s = self._now_s

    def _end_first(self, replica: Replica, version: int) -> None:
        if version != replica.version:
            return
        self._catch_up(replica)
        job = heapq.heappop(replica.running)[2]
        self._loads[job.front][replica.name] -= 1
        self.outcome.latencies_s.append(self._now_s - job.came_s)
        self.outcome.waits_s.append(job.began_s - job.came_s)
        self.outcome.num_hits += job.is_hit
        self.outcome.output_tokens += job.output
        self._start(replica)

    def _fail(self, replica: Replica) -> None:
        """All that a replica had is lost."""
        lost = [*(job for _, _, job in replica.running), *replica.waiting]
        for job in lost:
            self._loads[job.front][replica.name] -= 1
        self.outcome.num_lost += len(lost)
        replica.running.clear()
        replica.waiting.clear()
        replica.kept.clear()
        replica.is_up, replica.version = False, replica.version + 1
        self._at(self._now_s + self._world.restart_s, self._restart, replica)

    def _restart(self, replica: Replica) -> None:
        replica.is_up, replica.at_s = True, self._now_s
        self._at(self._now_s + self._draws.expovariate(1 / self._world.mtbf_s), self._fail, replica)


def row_of(world: World, outcome: Outcome) -> list[str]:
    """The row of the table."""
    answered, lost = len(outcome.latencies_s), outcome.num_lost + outcome.num_refused
    p50, p95, p99 = (f"{outcome.latency_s(share):.3f}" for share in (0.5, 0.95, 0.99))
    rates = f"{outcome.rate:,.1f}", f"{outcome.output_tokens / outcome.ended_s:,.0f}"
    ends = f"{statistics.mean(outcome.waits_s):.3f}", f"{outcome.num_hits / answered:.0%}", f"{1e6 * lost / (answered + lost):,.0f}"
    return [str(world.num_replicas), str(outcome.fronts), *rates, p50, p95, p99, *ends]


OPTIONS = (
    ("num_running", 8, "samples that a replica runs at a time"),
    ("load", 0.7, "requests, as a share of what all replicas could answer"),
    ("max_lead", DEFAULT_MAX_LEAD, "bound on the affinity of prefixes"),
    ("num_beginnings", 50, "popular beginnings for each replica; 0 = none"),
    ("mtbf_s", 7 * 86_400.0, "mean seconds between two failures of a replica"),
    ("restart_s", 60.0, "seconds until a failed replica is back"),
    ("fronts", 0, "0 = as many as are needed"),
)
HEADERS = ["replicas", "fronts", "requests/s", "tokens/s", "p50 s", "p95 s", "p99 s", "wait s", "prefix hits", "lost of a million"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=Path, default=TIMES, help="JSON file of the times of one replica and its front")
    parser.add_argument("--replicas", type=int, nargs="+", default=REPLICAS)
    parser.add_argument("--slower", type=float, default=1.0, help="a model that takes this many times as long, with the same front")
    for name, value, text in OPTIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=text)
    parser.add_argument("--requests", type=int, default=REQUESTS_A_REPLICA, help="for each replica")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    times = Times.read(options.times).slower(options.slower)
    rows = []
    for num_replicas in options.replicas:
        num_requests = max(MIN_REQUESTS, options.requests * num_replicas)
        settings = {name: getattr(options, name) for name, *_ in OPTIONS}
        world = World(num_replicas=num_replicas, num_requests=num_requests, **settings)
        rows.append(row_of(world, Simulation(times, world, options.seed).run()))
    print(markdown_table(HEADERS, rows))


if __name__ == "__main__":
    main()
