"""Random traffic through an engine: requests arrive, run together and end; each is compared with its output alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.engine_jobs import Job
from paceline import LLM
from paceline.engine.engine import Engine
from paceline.engine.inputs import RequestOptions
from paceline.kv_cache.row_plan import num_blocks_for
from paceline.speculation.request import FinishReason, Request

MAX_STEPS = 50_000


@dataclass(slots=True)
class Live:
    """A request in the engine."""

    job: int
    sample: int


class Traffic:
    """Jobs on their way through an engine.

    Attributes:
        live: what is in the engine.
        num_compared: token ids compared with those of plain decoding.
        num_ended: requests compared.
    """

    def __init__(self, llm: LLM, jobs: Sequence[Job], random: np.random.Generator) -> None:
        self.llm, self.jobs = llm, jobs
        self.live: dict[Request, Live] = {}
        self.num_compared = self.num_ended = 0
        self._random = random
        self._to_come: list[int] = random.permutation(len(jobs)).tolist()
        self._num_open = {index: len(job.answers) for index, job in enumerate(jobs)}

    @property
    def has_more(self) -> bool:
        return bool(self._to_come or self.live)

    def run(self, *, checks: bool = True) -> None:
        """Everything to its end: jobs come at random, limits change at random, each is compared when it has ended."""
        engine = self.llm.engine
        for number in range(MAX_STEPS):
            if not self.has_more:
                break
            if number % 40 == 0:
                self.change_limits()
            if self._to_come and (not engine.has_work or self._random.random() < 0.5):
                for _ in range(int(self._random.choice([1, 2, 3, 16]))):
                    self.submit_next()
            engine.step()
            if checks:
                check_engine(engine)
            self.settle()
        assert not self.has_more, "the engine does not come to an end"

    def change_limits(self) -> None:
        """Between two steps: how many run at a time, rows of a pass and of a chunk."""
        random, scheduler = self._random, self.llm.engine.scheduler
        scheduler.limits = replace(
            scheduler.limits,
            max_num_seqs=int(random.choice([1, 2, 3, 5, 8, 16, 16])),
            max_num_batched_tokens=int(random.choice([12, 48, 512])),
            prefill_chunk_size=int(random.choice([5, 32, 50, 256])),
            spare_blocks=int(random.random() < 0.15),
        )

    def submit_next(self) -> None:
        """The next job that may come: one that goes on from a text that has ended, or that comes first anyway."""
        ready = [index for index in self._to_come if self._may_come(index)]
        children = [index for index in ready if self.jobs[index].parent is not None]
        if ready:
            index = (children if children and self._random.random() < 0.5 else ready)[0]
            self._to_come.remove(index)
            self.submit(index)

    def _may_come(self, index: int) -> bool:
        parent = self.jobs[index].parent
        return parent is None or self._num_open[parent] == 0

    def submit(self, index: int) -> list[Request]:
        requests = self.make(index)
        for request in requests:
            self.llm.engine.add_request(request)
        return requests

    def make(self, index: int) -> list[Request]:
        """The samples of a job, as requests."""
        job, opened = self.jobs[index], self.llm._loaded
        options = RequestOptions(
            prediction=edited(job.beyond) if self.llm.engine.speculator.uses_predicted_outputs else None,
            namespace="one",
            speculation=self._speculation(job),
            cache_salt=job.salt,
        )
        requests = opened.make_requests([job.prompt], job.params, options, is_streamed=index % 3 == 0)
        self.live |= {request: Live(index, sample) for sample, request in enumerate(requests)}
        return requests

    def settle(self) -> None:
        """Compare those that have ended."""
        for request in [request for request in self.live if request.is_finished]:
            live = self.live.pop(request)
            self._num_open[live.job] -= 1
            self.num_compared += compare(self.llm, request, self.jobs[live.job], live.sample)
            self.num_ended += 1

    def _speculation(self, job: Job) -> Mapping[str, object]:
        names = [drafter.name for drafter in self.llm.engine.speculator.drafters]
        if len(names) > 1 and not job.speculation and self._random.random() < 0.3:
            return {"drafter": str(self._random.choice(names))}
        return job.speculation


def edited(token_ids: Sequence[int]) -> list[int]:
    """With a token here and there replaced, left out or added."""
    edits: list[Callable[[int], list[int]]] = [lambda token: [5], lambda token: [], lambda token: [token, 6, token]]
    return [new for at, token in enumerate(token_ids) for new in (edits[at % 3](token) if at % 7 == 5 else [token])]


def compare(llm: LLM, request: Request, job: Job, sample: int) -> int:
    """Tokens of a request that ended, all equal to those it gets alone; one that was aborted has a first part of them."""
    expected, found = job.answers[sample], llm._loaded.make_output(request)
    if request.error is not None:
        raise request.error
    told = f"{job.name}, prompt of {len(job.prompt)}, sample {sample}, preempted {request.num_preemptions} times"
    count = len(found.token_ids)
    if request.finish_reason is FinishReason.ABORT:
        assert found.token_ids == expected.token_ids[:count], told
    else:
        assert found.token_ids == expected.token_ids, told
        assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason), told
        assert found.logprobs == expected.logprobs, told
        assert found.prompt_logprobs == expected.prompt_logprobs, told
    stats = found.speculation
    assert stats.num_emitted_tokens == stats.num_accepted_tokens + stats.num_bonus_tokens == count == found.usage.completion_tokens, told
    assert sum(stats.num_accepted_tokens_by_position) == stats.num_accepted_tokens, told
    assert sum(stats.num_draft_tokens_by_position) == stats.num_draft_tokens, told
    assert stats.plain_steps <= stats.steps <= stats.num_emitted_tokens, told
    if not request.is_speculative:
        assert stats.num_draft_tokens == 0, told
    elif request.num_speculative_tokens is not None and request.params.grammar is None:
        assert len(stats.num_draft_tokens_by_position) <= request.num_speculative_tokens, told
    return count


def check_engine(engine: Engine) -> None:
    """What must hold between any two steps."""
    cache, scheduler = engine.cache, engine.scheduler
    cache.check_consistency()
    running, waiting = scheduler.running, list(scheduler.waiting)
    assert len({id(request) for request in (*running, *waiting)}) == len(running) + len(waiting), "a request stands here twice"
    assert {request.cached_sequence.id for request in (*running, *waiting)} == set(cache._sequences), "a sequence belongs to nobody here"
    for request in (*running, *waiting):
        sequence = request.cached_sequence
        assert not request.is_finished
        assert sequence.row_plan is None
        assert 0 <= sequence.committed_len < len(request.token_ids) <= request.max_len
        assert request.processor.num_output_tokens == request.num_output_tokens == len(request.origins) == request.stats.num_emitted_tokens
        assert len(sequence.block_table) == num_blocks_for(sequence.committed_len, cache.block_size)
        assert request.num_cached_tokens < request.num_prompt_tokens
        assert request.num_cached_tokens % cache.block_size == 0
    for request in waiting:
        assert not request.cached_sequence.block_table, "who waits holds nothing"
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting) == (len(running), len(waiting))


def check_clean(llm: LLM) -> None:
    """Check that no blocks are in use, and that the sums agree."""
    engine = llm.engine
    engine.cache.check_consistency()
    assert engine.is_idle
    assert engine.cache.pool.num_free == engine.cache.pool.num_blocks
    assert engine.cache._sequences == {}
    policy = engine.speculator.policy
    assert not any(isinstance(held, Request) for held in vars(policy).values()), "the policy holds a request that has ended"
    stats = engine.stats
    speculation = stats.speculation
    assert speculation.num_emitted_tokens == speculation.num_accepted_tokens + speculation.num_bonus_tokens == stats.completion_tokens
    assert sum(speculation.num_accepted_tokens_by_position) == speculation.num_accepted_tokens
    assert stats.num_cached_tokens <= stats.prompt_tokens
