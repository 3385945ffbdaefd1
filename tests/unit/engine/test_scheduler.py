"""Who runs when, with requests that are numbers and a cache that only counts blocks."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from paceline.engine.scheduler import MAX_OVERTAKES, Scheduler, SchedulerLimits, share_prompt_rows

BLOCK_SIZE = 4


@dataclass(eq=False)
class Job:
    """A request: so many known tokens, so many of them with rows, and where it ends."""

    name: str
    num_known: int
    num_output: int = 1
    num_cached: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    is_ready: bool = True
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.num_known + self.num_output

    @property
    def num_uncached(self) -> int:
        return self.num_known - self.num_cached

    def num_next_tokens(self, max_rows: int) -> int:
        return min(self.num_uncached, max_rows)

    def run(self, num_rows: int) -> None:
        """Simulate a pass: rows for known tokens, one more token after the last of them."""
        self.num_cached += num_rows
        self.num_known += self.num_cached == self.num_known

    @property
    def is_finished(self) -> bool:
        return self.num_known >= self.end


class CountedBlocks:
    """Blocks without contents. `shared` prompt rows are found again by everyone who begins."""

    def __init__(self, num_blocks: int, *, shared: int = 0) -> None:
        self.num_blocks, self.shared = num_blocks, shared
        self.num_taken = 0
        self.begun: list[str] = []

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_taken

    def num_blocks_needed(self, job: Job, num_rows: int) -> int:
        return -(-(job.num_cached + num_rows) // BLOCK_SIZE) - job.num_blocks

    def cached_prefix_len(self, job: Job) -> int:
        return min(self.shared, job.num_known - 1, self.num_free * BLOCK_SIZE) // BLOCK_SIZE * BLOCK_SIZE

    def match_prefix(self, job: Job) -> None:
        self.begun.append(job.name)
        job.num_cached = self.cached_prefix_len(job)
        self.take(job, job.num_cached // BLOCK_SIZE)

    def take(self, job: Job, count: int) -> None:
        job.num_blocks += count
        self.num_taken += count
        assert self.num_taken <= self.num_blocks, "more blocks were promised than there are"

    def release_prefix(self, job: Job) -> None:
        self._give_back(job)

    def free_blocks(self, job: Job) -> None:
        job.num_preemptions += job.num_cached > self.shared
        self._give_back(job)

    def _give_back(self, job: Job) -> None:
        self.num_taken -= job.num_blocks
        job.num_cached = job.num_blocks = 0


class Simulation:
    """Passes over jobs until nothing is left."""

    def __init__(self, num_blocks: int, *, shared: int = 0, **limits: int) -> None:
        self.blocks = CountedBlocks(num_blocks, shared=shared)
        self.limits = SchedulerLimits(
            **{"max_num_seqs": 4, "max_num_batched_tokens": 16, "prefill_chunk_size": 8, "spare_blocks": 0, **limits}
        )
        self.scheduler: Scheduler = Scheduler(self.blocks, self.limits, lambda job: job.is_ready)
        self.passes: list[list[str]] = []
        self.rows: list[list[int]] = []
        self.num_kept_waiting = 0  # passes without a row for a decoding request: only if blocks are missing

    def add(self, *jobs: Job) -> None:
        for job in jobs:
            self.scheduler.add(job)

    def run_already(self, *jobs: Job) -> None:
        """Jobs that have begun, oldest first, with blocks for the rows they have."""
        for job in jobs:
            self.scheduler.add(job)
            self.scheduler._dequeue(job)
            self.scheduler.running.append(job)
            self.blocks.take(job, -(-job.num_cached // BLOCK_SIZE))

    def step(self) -> list[Job]:
        decoding = [job for job in self.scheduler.running if job.num_next_tokens(2) == 1]
        scheduled = self.scheduler.next_pass()
        self.passes.append([job.name for job in scheduled])
        self.rows.append(list(scheduled.values()))
        assert sum(self.rows[-1]) <= self.limits.max_num_batched_tokens
        assert all(0 < num_rows <= self.limits.prefill_chunk_size for num_rows in self.rows[-1])
        assert len(self.scheduler.running) <= self.limits.max_num_seqs
        self.num_kept_waiting += len([job for job in decoding if job in self.scheduler.running and job not in scheduled])
        for job, num_rows in scheduled.items():
            self.blocks.take(job, self.blocks.num_blocks_needed(job, num_rows))
        for job, num_rows in scheduled.items():
            job.run(num_rows)
            if job.is_finished:
                assert self.scheduler.remove(job)
                self.blocks.free_blocks(job)
        return list(scheduled)


def _decoding(name: str, num_cached: int) -> Job:
    return Job(name, num_cached + 1, num_output=8, num_cached=num_cached)


def test_requests_start_in_order_of_arrival_up_to_the_limit():
    simulation = Simulation(100, max_num_seqs=2)
    simulation.add(*(Job(name, 3, num_output=count) for name, count in (("a", 3), ("b", 1), ("c", 2), ("d", 1))))
    for _ in range(4):
        simulation.step()
    assert simulation.passes == [["a", "b"], ["a", "c"], ["a", "c"], ["d"]]


def test_prefill_rows_fill_the_pass_next_to_decoding_requests():
    simulation = Simulation(100)
    simulation.add(Job("decoding", 1, num_output=20), Job("long", 20, num_output=2), Job("other", 20, num_output=2))
    for _ in range(6):
        simulation.step()
    assert simulation.rows == [[1, 7], [1, 8], [1, 5, 3], [1, 1, 8], [1, 8], [1, 1]]
    assert simulation.passes[0] == ["decoding", "long"], "of two equal prompts the older one runs first"


def test_prefill_chunk_shrinks_to_the_rows_left():
    simulation = Simulation(100, max_num_batched_tokens=4)
    simulation.add(Job("a", 10))
    for _ in range(3):
        simulation.step()
    assert simulation.rows == [[4], [4], [2]]


@pytest.mark.parametrize("prefill_chunk_size", [1, 4, 8, 100])
def test_long_prompt_advances_while_decoding_leaves_few_rows(prefill_chunk_size):
    simulation = Simulation(100, max_num_batched_tokens=4, prefill_chunk_size=prefill_chunk_size)
    simulation.run_already(*(_decoding(name, 3) for name in "abc"))
    simulation.add(Job("long", 5))
    for _ in range(5):
        assert simulation.step()[-1].name == "long"
    assert simulation.rows == [[1, 1, 1, 1]] * 5


def test_every_decoding_request_has_a_row_in_a_full_pass():
    simulation = Simulation(100, max_num_batched_tokens=8)
    simulation.run_already(Job("long", 30), *(_decoding(name, 3) for name in "abc"))
    simulation.step()
    assert simulation.passes == [["long", "a", "b", "c"]]
    assert simulation.rows == [[5, 1, 1, 1]]


def test_decoding_requests_never_wait_while_blocks_are_free(seed):
    generator = np.random.default_rng(seed)
    for case in range(40):
        limits = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": int(generator.integers(1, 20)),
            "prefill_chunk_size": int(generator.integers(1, 20)),
        }
        simulation = Simulation(10_000, **limits)
        simulation.add(*(Job(f"{case}/{index}", *_lengths(generator, 60)) for index in range(20)))
        while simulation.scheduler.running or simulation.scheduler.waiting:
            simulation.step()
        assert simulation.num_kept_waiting == 0


def test_running_requests_are_limited_by_the_rows_of_a_pass():
    simulation = Simulation(100, max_num_batched_tokens=3, max_num_seqs=8)
    simulation.add(*(Job(name, 1, num_output=3) for name in "abcdef"))
    simulation.step()
    assert simulation.passes == [["a", "b", "c"]]


def test_youngest_request_is_preempted_and_resumes_first():
    simulation = Simulation(5)
    old, young, waiting = _decoding("old", 12), _decoding("young", 7), Job("waiting", 9)
    simulation.run_already(old, young)
    simulation.add(waiting)
    assert simulation.step() == [old]
    assert (old.num_preemptions, young.num_preemptions, young.num_blocks) == (0, 1, 0)
    assert list(simulation.scheduler.waiting) == [young, waiting]
    assert young.num_known == 8, "its tokens stay"
    for _ in range(40):
        simulation.step()
    assert old.is_finished
    assert young.num_known == young.end
    assert waiting.is_finished


def test_requests_preempted_together_keep_their_order():
    simulation = Simulation(6)
    old, jobs = _decoding("old", 12), [_decoding(name, 3) for name in "bcd"]
    old.num_known += 8  # a prompt that goes on: two more blocks
    simulation.run_already(old, *jobs)
    assert simulation.step() == [old, jobs[0]]
    assert list(simulation.scheduler.waiting) == jobs[1:]
    assert simulation.scheduler.num_preemptions == 2


def test_no_request_starts_in_a_pass_with_a_preemption():
    simulation = Simulation(6)
    simulation.run_already(_decoding("old", 12), _decoding("young", 9))
    simulation.add(Job("new", 1))
    simulation.step()
    assert simulation.passes == [["old"]], "three blocks came free, for whoever was there before"


def test_youngest_request_without_blocks_keeps_its_rows():
    simulation = Simulation(4)
    old, young = _decoding("old", 6), _decoding("young", 8)
    simulation.run_already(old, young)
    simulation.add(Job("new", 1))
    assert simulation.step() == [old], "there is no third block for the younger one, nor one for a new one"
    assert (young.num_blocks, young.num_preemptions) == (2, 0)
    assert simulation.step() == [old]
    assert simulation.step() == [old]
    assert young.num_preemptions == 1, "now the older one needs what it has"


@pytest.mark.parametrize(("spare_blocks", "begin"), [(0, "abc"), (1, "ab"), (2, "a")])
def test_scheduler_leaves_spare_blocks_when_a_request_starts(spare_blocks, begin):
    simulation = Simulation(6, spare_blocks=spare_blocks, max_num_batched_tokens=100, prefill_chunk_size=100)
    simulation.add(*(Job(name, 7, num_output=9) for name in "abcd"))
    simulation.step()
    assert simulation.passes == [list(begin)]


def test_scheduler_needs_no_spare_blocks_for_a_single_request():
    simulation = Simulation(2, spare_blocks=5)
    simulation.add(Job("a", 7))
    simulation.step()
    assert simulation.passes == [["a"]]


def test_prefix_cache_is_searched_again_after_a_block_is_freed():
    simulation = Simulation(4, shared=4, max_num_batched_tokens=100, prefill_chunk_size=100)
    first, large, small = Job("first", 7, num_output=5), Job("large", 15), Job("small", 1)
    simulation.add(first, large, small)
    assert simulation.step() == [first, small]
    for _ in range(3):
        assert simulation.step() == [first]
        assert large.num_blocks == 0, "what it had adopted was given back"
    assert simulation.blocks.begun == ["first", "large", "small"], "a small request overtakes"
    simulation.step()
    assert first.is_finished
    assert simulation.step() == [large]
    assert simulation.blocks.begun == ["first", "large", "small", "large"]


def test_scheduler_runs_later_requests_while_a_sample_is_not_ready():
    simulation = Simulation(100)
    sibling = Job("sibling", 3, is_ready=False)
    simulation.add(sibling, Job("a", 3, num_output=2))
    simulation.step()
    assert simulation.passes == [["a"]]
    sibling.is_ready = True
    simulation.step()
    assert simulation.passes[-1] == ["sibling", "a"], "in the order of arrival"


def test_scheduler_runs_nothing_if_all_blocks_are_held_elsewhere():
    simulation = Simulation(4)
    simulation.blocks.num_taken = 4
    simulation.add(Job("a", 3))
    assert simulation.step() == []


def test_scheduler_remove_returns_whether_it_held_the_request():
    simulation = Simulation(100, max_num_seqs=1)
    running, waiting = Job("running", 3, num_output=5), Job("waiting", 3)
    simulation.add(running, waiting)
    simulation.step()
    assert simulation.scheduler.remove(running)
    assert simulation.scheduler.remove(waiting)
    assert not simulation.scheduler.remove(running)
    assert simulation.step() == []


@pytest.mark.parametrize("spare_blocks", [0, 1])
def test_scheduler_finishes_every_request_and_advances_the_oldest(spare_blocks, seed, large_counts):
    generator = np.random.default_rng([seed, spare_blocks])
    num_preemptions = 0
    for case in range(2000 if large_counts else 60):
        num_blocks = int(generator.integers(6, 30))
        simulation = Simulation(
            num_blocks,
            shared=int(generator.integers(0, 3)) * BLOCK_SIZE,
            max_num_seqs=int(generator.integers(1, 9)),
            max_num_batched_tokens=int(generator.integers(1, 33)),
            prefill_chunk_size=int(generator.integers(1, 17)),
            spare_blocks=spare_blocks,
        )
        largest = num_blocks * BLOCK_SIZE
        jobs = [Job(f"{case}/{index}", *_lengths(generator, largest)) for index in range(12)]
        pending = list(jobs)
        for _ in range(20_000):
            if not (pending or simulation.scheduler.running or simulation.scheduler.waiting):
                break
            if pending and generator.random() < 0.3:
                simulation.add(pending.pop(0))
            oldest = simulation.scheduler.running[0] if simulation.scheduler.running else None
            before = oldest and (oldest.num_known, oldest.num_cached)
            picked = simulation.step()
            if oldest is not None and not any(jobs.index(job) < jobs.index(oldest) for job in picked):  # unless an older one started
                assert oldest in picked
                assert (oldest.num_known, oldest.num_cached) != before
            for group in (simulation.scheduler.running, simulation.scheduler.waiting):
                order = [jobs.index(job) for job in group]
                assert order == sorted(order), "by arrival"
        assert all(job.is_finished for job in jobs)
        assert simulation.blocks.num_taken == 0
        num_preemptions += simulation.scheduler.num_preemptions
    assert num_preemptions > 20


def _lengths(generator: np.random.Generator, largest: int) -> tuple[int, int]:
    num_prompt = int(generator.integers(1, largest - 1))
    return num_prompt, int(generator.integers(1, largest - num_prompt + 1))


# Fair rows


DEFAULTS = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "prefill_chunk_size": 256, "spare_blocks": 1}


def _passes_until_begun(simulation: Simulation, job: Job) -> int:
    """Passes until the first token of a job that was just added."""
    for count in range(1, 10_000):
        simulation.step()
        if job.num_known > job.end - job.num_output:
            return count
    raise AssertionError("it never gets a token")


@pytest.mark.parametrize("order", ["equal", "growing", "shrinking"])
@pytest.mark.parametrize("num_long", [1, 2, 8, 40])
def test_short_prompt_runs_in_one_pass_next_to_many_long_ones(num_long, order):
    lengths = {"equal": [6000] * num_long, "growing": range(3000, 3000 + num_long), "shrinking": range(3000 + num_long, 3000, -1)}[order]
    simulation = Simulation(1_000_000, **DEFAULTS)
    for index, length in enumerate(lengths):
        simulation.add(Job(f"long {index}", length))
        simulation.step()
    for index in range(12):
        short = Job(f"short {index}", 35)
        simulation.add(short)
        assert _passes_until_begun(simulation, short) == 1
        assert sum(simulation.rows[-1]) <= 256 + 16, "a pass takes no longer however many prompts there are"


def test_short_prompts_take_half_of_the_rows_until_done():
    simulation = Simulation(1_000_000, **DEFAULTS)
    simulation.add(Job("a", 6000), Job("b", 6000))
    simulation.step()
    shorts = [Job(f"short {index}", 100) for index in range(10)]
    simulation.add(*shorts)
    for _ in range(-(-10 * 100 // 128)):
        simulation.step()
    assert all(job.is_finished for job in shorts)


def test_long_prompts_keep_half_of_the_rows_next_to_short_ones():
    simulation = Simulation(1_000_000, **DEFAULTS)
    longs = [Job(f"long {index}", 2000) for index in range(3)]
    simulation.add(*longs)
    for count in range(1, 1000):
        simulation.add(*(Job(f"{count}/{index}", 60) for index in range(6)))  # more than the other half of the rows
        simulation.step()
        if all(job.is_finished for job in longs):
            break
    assert count <= 3 * -(-2000 // 128)


def test_medium_prompt_waits_for_older_but_not_for_newer_prompts():
    simulation = Simulation(1_000_000, **DEFAULTS)
    old, middle = Job("old", 2000), Job("middle", 1000)
    simulation.add(old, middle)
    for count in range(1, 1000):
        simulation.add(*(Job(f"{count}/{index}", 60) for index in range(6)))
        simulation.step()
        if middle.is_finished:
            break
    assert count <= -(-3000 // 128) + 1


def test_scheduler_uses_all_prefill_rows_while_prompts_remain(seed):
    generator = np.random.default_rng(seed)
    lengths = [int(length) for length in generator.integers(1, 2000, 40)]
    simulation = Simulation(1_000_000, **DEFAULTS)
    simulation.add(*(Job(str(index), length) for index, length in enumerate(lengths)))
    while simulation.scheduler.running or simulation.scheduler.waiting:
        simulation.step()
    assert len(simulation.passes) == -(-sum(lengths) // 256)


def test_short_prompt_latency_does_not_depend_on_its_arrival():
    for place in range(5):
        simulation = Simulation(1_000_000, **DEFAULTS)
        jobs = [Job(f"long {index}", 3000) for index in range(4)]
        short = Job("short", 35)
        jobs.insert(place, short)
        simulation.add(*jobs)
        assert _passes_until_begun(simulation, short) == 1


def test_half_of_the_running_requests_are_reserved_for_short_prompts():
    simulation = Simulation(1_000_000, **{**DEFAULTS, "max_num_seqs": 4})
    for length in range(3000, 800, -400):  # each shorter than what is left of the one before
        simulation.add(Job(str(length), length))
        simulation.step()
    unfinished = [job for job in simulation.scheduler.running if job.num_uncached > 1]
    assert len(unfinished) == 2
    short = Job("short", 35)
    simulation.add(short)
    assert _passes_until_begun(simulation, short) == 1


def test_prompt_with_a_long_cached_prefix_counts_as_short():
    simulation = Simulation(1_000_000, **DEFAULTS)
    simulation.add(Job("a", 6000), Job("b", 5000))
    simulation.step()
    simulation.blocks.shared = 4000
    again = Job("again", 4030)
    simulation.add(again)
    assert _passes_until_begun(simulation, again) == 1


def test_further_samples_start_after_the_prompt_of_the_first():
    simulation = Simulation(1_000_000, **DEFAULTS)
    sample = Job("sample", 4030, is_ready=False)
    simulation.add(Job("a", 3000), sample, Job("b", 2000))
    simulation.step()
    simulation.blocks.shared, sample.is_ready = 4000, True
    assert _passes_until_begun(simulation, sample) == 1


def test_request_without_blocks_is_overtaken_a_bounded_number_of_times():
    simulation = Simulation(40, max_num_seqs=4, max_num_batched_tokens=256, prefill_chunk_size=128, spare_blocks=0)
    holder, large = Job("holder", 60, num_output=90), Job("large", 100, num_output=4)  # 25 blocks while 15 of 40 are held
    simulation.add(holder)
    simulation.step()
    simulation.add(Job("other", 20, num_output=60), large)
    simulation.step()
    while large in simulation.scheduler.waiting:
        simulation.add(Job("small", 4, num_output=2))
        simulation.step()
        assert len(simulation.passes) < 300
    last = len(simulation.blocks.begun) - simulation.blocks.begun[::-1].index("large")
    assert simulation.blocks.begun[:last].count("small") == MAX_OVERTAKES
    while not large.is_finished:
        simulation.step()


def test_long_queue_is_served_in_a_fixed_order(seed):
    def passes() -> list[list[str]]:
        generator = np.random.default_rng(seed)
        simulation = Simulation(400, **DEFAULTS)
        simulation.add(*(Job(str(index), int(generator.integers(1, 300)), int(generator.integers(1, 20))) for index in range(200)))
        while simulation.scheduler.running or simulation.scheduler.waiting:
            simulation.step()
        return simulation.passes

    assert passes() == passes()


@pytest.mark.parametrize(
    ("num_uncached", "shares"),
    [
        ([6000, 6000, 35], [221, 0, 35]),
        ([6000, 5000, 35], [128, 93, 35]),
        ([100, 6000, 100], [100, 56, 100]),
        ([200, 6000], [200, 56]),
        ([10, 10], [10, 10]),
        ([], []),
    ],
)
def test_share_prompt_rows_gives_half_to_the_oldest_and_half_to_the_shortest(num_uncached, shares):
    assert share_prompt_rows(num_uncached, [min(count, 256) for count in num_uncached], 256) == shares
