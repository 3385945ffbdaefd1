"""Who runs when, with requests that are numbers and a cache that only counts blocks."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from paceline.engine.scheduler import Limits, Scheduler

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

    def num_due(self, max_rows: int) -> int:
        return min(self.num_known - self.num_cached, max_rows)

    def run(self, num_rows: int) -> None:
        """What a pass does: rows for known tokens, one more token behind the last of them."""
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

    def num_needed(self, job: Job, num_rows: int) -> int:
        return -(-(job.num_cached + num_rows) // BLOCK_SIZE) - job.num_blocks

    def adopt_prefix(self, job: Job) -> None:
        self.begun.append(job.name)
        count = min(self.shared, job.num_known - 1, self.num_free * BLOCK_SIZE) // BLOCK_SIZE
        job.num_cached = count * BLOCK_SIZE
        self.take(job, count)

    def take(self, job: Job, count: int) -> None:
        job.num_blocks += count
        self.num_taken += count
        assert self.num_taken <= self.num_blocks, "more blocks were promised than there are"

    def return_prefix(self, job: Job) -> None:
        self._give_back(job)

    def free(self, job: Job) -> None:
        job.num_preemptions += job.num_cached > self.shared
        self._give_back(job)

    def _give_back(self, job: Job) -> None:
        self.num_taken -= job.num_blocks
        job.num_cached = job.num_blocks = 0


class Simulation:
    """Passes over jobs until nothing is left."""

    def __init__(self, num_blocks: int, *, shared: int = 0, **limits: int) -> None:
        self.blocks = CountedBlocks(num_blocks, shared=shared)
        self.limits = Limits(**{"max_num_seqs": 4, "max_step_rows": 16, "chunk_rows": 8, "spare_blocks": 0, **limits})
        self.scheduler: Scheduler[Job] = Scheduler(self.blocks, self.limits, lambda job: job.is_ready)
        self.passes: list[list[str]] = []
        self.rows: list[list[int]] = []
        self.num_kept_waiting = 0  # passes without a row for somebody who decodes: only for want of blocks

    def add(self, *jobs: Job) -> None:
        for job in jobs:
            self.scheduler.add(job)

    def run_already(self, *jobs: Job) -> None:
        """Jobs that have begun, oldest first, with blocks for the rows they have."""
        for job in jobs:
            self.scheduler.running.append(job)
            self.blocks.take(job, -(-job.num_cached // BLOCK_SIZE))

    def step(self) -> list[Job]:
        decoding = [job for job in self.scheduler.running if job.num_due(2) == 1]
        scheduled = self.scheduler.next_pass()
        picked = [one.request for one in scheduled]
        self.passes.append([job.name for job in picked])
        self.rows.append([one.num_rows for one in scheduled])
        assert sum(self.rows[-1]) <= self.limits.max_step_rows
        assert all(0 < one.num_rows <= self.limits.chunk_rows for one in scheduled)
        assert len(self.scheduler.running) <= self.limits.max_num_seqs
        self.num_kept_waiting += len([job for job in decoding if job in self.scheduler.running and job not in picked])
        for one in scheduled:
            self.blocks.take(one.request, self.blocks.num_needed(one.request, one.num_rows))
        for job, num_rows in zip(picked, self.rows[-1], strict=True):
            job.run(num_rows)
            if job.is_finished:
                assert self.scheduler.remove(job)
                self.blocks.free(job)
        return picked


def _decoding(name: str, num_cached: int) -> Job:
    return Job(name, num_cached + 1, num_output=8, num_cached=num_cached)


def test_requests_begin_in_the_order_they_came_and_no_more_than_may():
    simulation = Simulation(100, max_num_seqs=2)
    simulation.add(*(Job(name, 3, num_output=count) for name, count in (("a", 3), ("b", 1), ("c", 2), ("d", 1))))
    for _ in range(4):
        simulation.step()
    assert simulation.passes == [["a", "b"], ["a", "c"], ["a", "c"], ["d"]]


def test_prompts_run_in_chunks_beside_those_that_decode_and_only_as_many_as_a_pass_holds():
    simulation = Simulation(100)
    decoding = Job("decoding", 1, num_output=20)
    simulation.add(decoding, Job("long", 20, num_output=2), Job("other", 20, num_output=2))
    for _ in range(5):
        simulation.step()
    both = ["decoding", "long", "other"]
    assert simulation.passes == [both, both, both, both, ["decoding"]]
    assert simulation.rows == [[1, 8, 7], [1, 8, 7], [1, 4, 6], [1, 1, 1], [1]], "1 + 8 + 8 rows are more than 16"


def test_a_chunk_shrinks_to_the_rows_that_are_left():
    simulation = Simulation(100, max_step_rows=4)
    simulation.add(Job("a", 10))
    for _ in range(3):
        simulation.step()
    assert simulation.rows == [[4], [4], [2]]


@pytest.mark.parametrize("chunk_rows", [1, 4, 8, 100])
def test_a_long_prompt_goes_on_beside_those_that_decode_however_few_rows_a_pass_has(chunk_rows):
    simulation = Simulation(100, max_step_rows=4, chunk_rows=chunk_rows)
    simulation.run_already(*(_decoding(name, 3) for name in "abc"))
    simulation.add(Job("long", 5))
    for _ in range(5):
        assert simulation.step()[-1].name == "long"
    assert simulation.rows == [[1, 1, 1, 1]] * 5


def test_everybody_who_decodes_has_a_row_however_full_the_pass_is():
    simulation = Simulation(100, max_step_rows=8)
    simulation.run_already(Job("long", 30), *(_decoding(name, 3) for name in "abc"))
    simulation.step()
    assert simulation.passes == [["long", "a", "b", "c"]]
    assert simulation.rows == [[5, 1, 1, 1]]


def test_nobody_who_decodes_waits_where_there_are_blocks(seed):
    generator = np.random.default_rng(seed)
    for case in range(40):
        limits = {"max_num_seqs": 8, "max_step_rows": int(generator.integers(1, 20)), "chunk_rows": int(generator.integers(1, 20))}
        simulation = Simulation(10_000, **limits)
        simulation.add(*(Job(f"{case}/{index}", *_lengths(generator, 60)) for index in range(20)))
        while simulation.scheduler.running or simulation.scheduler.waiting:
            simulation.step()
        assert simulation.num_kept_waiting == 0


def test_no_more_run_at_a_time_than_a_pass_has_rows():
    simulation = Simulation(100, max_step_rows=3, max_num_seqs=8)
    simulation.add(*(Job(name, 1, num_output=3) for name in "abcdef"))
    simulation.step()
    assert simulation.passes == [["a", "b", "c"]]


def test_the_youngest_makes_room_and_is_the_first_to_begin_again():
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


def test_several_that_are_preempted_at_once_keep_their_order():
    simulation = Simulation(6)
    old, jobs = _decoding("old", 12), [_decoding(name, 3) for name in "bcd"]
    old.num_known += 8  # a prompt that goes on: two more blocks
    simulation.run_already(old, *jobs)
    assert simulation.step() == [old, jobs[0]]
    assert list(simulation.scheduler.waiting) == jobs[1:]
    assert simulation.scheduler.num_preemptions == 2


def test_nobody_begins_in_a_pass_in_which_somebody_found_no_room():
    simulation = Simulation(6)
    simulation.run_already(_decoding("old", 12), _decoding("young", 9))
    simulation.add(Job("new", 1))
    simulation.step()
    assert simulation.passes == [["old"]], "three blocks came free, for whoever was there before"


def test_who_finds_no_room_and_has_nobody_younger_keeps_what_it_has():
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
def test_blocks_are_left_for_those_that_run_when_others_begin(spare_blocks, begin):
    simulation = Simulation(6, spare_blocks=spare_blocks, max_step_rows=100)
    simulation.add(*(Job(name, 7, num_output=9) for name in "abcd"))
    simulation.step()
    assert simulation.passes == [list(begin)]


def test_who_would_run_alone_needs_to_leave_nothing():
    simulation = Simulation(2, spare_blocks=5)
    simulation.add(Job("a", 7))
    simulation.step()
    assert simulation.passes == [["a"]]


def test_a_request_that_does_not_fit_is_looked_up_again_only_when_something_came_free():
    simulation = Simulation(4, shared=4, max_step_rows=100, chunk_rows=100)
    first, large, small = Job("first", 7, num_output=5), Job("large", 15), Job("small", 1)
    simulation.add(first, large, small)
    for _ in range(4):
        assert simulation.step() == [first]
        assert large.num_blocks == 0, "what it had adopted was given back"
    assert simulation.blocks.begun == ["first", "large"]
    simulation.step()
    assert first.is_finished
    assert simulation.step() == [large]
    assert simulation.blocks.begun == ["first", "large", "large", "small"], "nobody overtakes"


def test_who_is_not_ready_is_passed_by_the_others():
    simulation = Simulation(100)
    sibling = Job("sibling", 3, is_ready=False)
    simulation.add(sibling, Job("a", 3, num_output=2))
    simulation.step()
    assert simulation.passes == [["a"]]
    sibling.is_ready = True
    simulation.step()
    assert simulation.passes[-1] == ["a", "sibling"]


def test_a_pass_is_empty_where_others_hold_all_blocks():
    simulation = Simulation(4)
    simulation.blocks.num_taken = 4
    simulation.add(Job("a", 3))
    assert simulation.step() == []


def test_removing_whoever_it_is_says_whether_it_was_there():
    simulation = Simulation(100, max_num_seqs=1)
    running, waiting = Job("running", 3, num_output=5), Job("waiting", 3)
    simulation.add(running, waiting)
    simulation.step()
    assert simulation.scheduler.remove(running)
    assert simulation.scheduler.remove(waiting)
    assert not simulation.scheduler.remove(running)
    assert simulation.step() == []


@pytest.mark.parametrize("spare_blocks", [0, 1])
def test_whatever_comes_everybody_comes_to_an_end_and_the_oldest_always_goes_on(spare_blocks, seed, large_counts):
    generator = np.random.default_rng([seed, spare_blocks])
    num_preemptions = 0
    for case in range(2000 if large_counts else 60):
        num_blocks = int(generator.integers(6, 30))
        simulation = Simulation(
            num_blocks,
            shared=int(generator.integers(0, 3)) * BLOCK_SIZE,
            max_num_seqs=int(generator.integers(1, 9)),
            max_step_rows=int(generator.integers(1, 33)),
            chunk_rows=int(generator.integers(1, 17)),
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
            if oldest is not None:
                assert oldest in picked
                assert (oldest.num_known, oldest.num_cached) != before
            order = [jobs.index(job) for job in (*simulation.scheduler.running, *simulation.scheduler.waiting)]
            assert order == sorted(order), "first come, first served"
        assert all(job.is_finished for job in jobs)
        assert simulation.blocks.num_taken == 0
        num_preemptions += simulation.scheduler.num_preemptions
    assert num_preemptions > 20


def _lengths(generator: np.random.Generator, largest: int) -> tuple[int, int]:
    num_prompt = int(generator.integers(1, largest - 1))
    return num_prompt, int(generator.integers(1, largest - num_prompt + 1))
