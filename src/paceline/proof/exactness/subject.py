"""The engine that is examined: loaded once, run in any setting, and asked for plain answers."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import numpy as np

from paceline.config import EngineConfig, SpeculationConfig
from paceline.engine.inputs import RequestOptions
from paceline.engine.loader import LoadedEngine, load_engine
from paceline.engine.request import EngineRequest
from paceline.engine.scheduler import SchedulerLimits
from paceline.errors import ConfigError
from paceline.kv_cache.row_plan import blocks_for
from paceline.outputs import RequestOutput
from paceline.proof.exactness.adversaries import Answers, ErringDrafter, WrongDrafter
from paceline.proof.exactness.cases import TOGETHER, Setting
from paceline.proof.exactness.rows import RowWatch, WatchedSpeculator
from paceline.sampling.params import SamplingParams
from paceline.speculation.draft_length.policy import FixedDraftLength
from paceline.speculation.drafter import Drafter

_TREE_ROWS = 3  # for each draft token, where there are branches
_PREEMPT_STEPS = 40  # steps of a case in which requests are preempted
_PREEMPT_EVERY = 3
_CHUNKS = (5, 7, 16, 31, 33)  # rows, around the borders of blocks and not
_EDIT_EVERY = 7  # predictions have a wrong token so often


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it runs.

    Attributes:
        expected: what plain decoding answers; None = nobody knows, and it is decoded plainly.
        drafter, num_speculative_tokens: who guesses how much.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    expected: Sequence[int] | None = None
    drafter: str = TOGETHER
    num_speculative_tokens: int | None = None


class Subject:
    """An engine with all drafters and the two adversaries, and what a case may change of it.

    Args:
        loaded: the engine; it is changed and serves nothing else from now on.

    Attributes:
        drafter_names: of all that can be asked for.
        is_exact: whether rows must have the bits of plain decoding.
    """

    def __init__(self, loaded: LoadedEngine) -> None:
        self.loaded, engine = loaded, loaded.engine
        before = engine.speculator
        members = list(before.drafters)
        _tell_apart(members)
        vocab_size = loaded.input_processor.vocab_size
        self._answers = Answers()
        self._erring = ErringDrafter(self._answers, vocab_size)
        self._as_users_have_it = before.policy
        members += [WrongDrafter(self._answers, vocab_size), self._erring]
        self.drafter_names = [drafter.name for drafter in members]
        self._speculator = WatchedSpeculator(members, before.policy, vocab_size=vocab_size, layout=engine.cache.layout)
        self._speculator.watches = {}
        engine.speculator = self._speculator
        self.is_exact = loaded.numerics == "exact"
        self._limits = engine.scheduler.limits
        self._num_salts = 0

    def plain(self, asked: Asked, watch: RowWatch) -> RequestOutput:
        """The answer to a request that runs alone, without drafts and without cached rows, its prompt in as few passes as can be."""
        limits = replace(self._limits, prefill_chunk_size=self._limits.max_num_batched_tokens)
        (output,) = self._run([asked], [watch], limits, self.new_salts(1), np.random.default_rng(0), event="cold")
        return output

    def answers(
        self, asked: Sequence[Asked], watches: Sequence[RowWatch], setting: Setting, salts: Sequence[str], random: np.random.Generator
    ) -> list[RequestOutput]:
        """What requests get that run together in a setting.

        Args:
            watches: of each, see its rows.
            salts: of each; those of the same salt share cached rows.
            random: decides who is preempted and how small chunks and passes are.

        Raises:
            Exception: whatever goes wrong; the engine is as it was before.
        """
        self._speculator.policy = self._policy(setting)
        self._erring.begin(int(random.integers(2**31)))
        try:
            return self._run(asked, watches, self._limits_of(setting, random), salts, random, setting.event)
        finally:
            self._speculator.policy = self._as_users_have_it

    def new_salts(self, count: int) -> list[str]:
        """Salts that no request has had."""
        self._num_salts += count
        return [f"proof {number}" for number in range(self._num_salts - count, self._num_salts)]

    def check(self) -> None:
        """That the cache's books are right while nothing runs.

        Raises:
            RuntimeError: they are not.
        """
        cache = self.loaded.engine.cache
        cache.check()
        if cache.pool.num_free != cache.pool.num_blocks:
            raise RuntimeError(f"{cache.pool.num_blocks - cache.pool.num_free} blocks of the cache belong to nobody's request")

    def _run(
        self,
        asked: Sequence[Asked],
        watches: Sequence[RowWatch],
        limits: SchedulerLimits,
        salts: Sequence[str],
        random: np.random.Generator,
        event: str,
    ) -> list[RequestOutput]:
        engine = self.loaded.engine
        requests = [self._request(one, salt) for one, salt in zip(asked, salts, strict=True)]
        for request, one, watch in zip(requests, asked, watches, strict=True):
            self._speculator.watches[request] = watch
            if one.expected is not None:
                self._answers.know(request, one.expected)
        engine.scheduler.limits = limits
        most_steps = 1000 + 50 * sum(request.max_len for request in requests)
        try:
            with self._little_room(requests, event), closing(engine.run(requests)) as steps:
                for number, _ in enumerate(steps):
                    if event == "preempted" and number < _PREEMPT_STEPS and number % _PREEMPT_EVERY == _PREEMPT_EVERY - 1:
                        self._preempt_one(random)
                    if number > most_steps:
                        raise RuntimeError(f"{len(requests)} requests did not end in {most_steps} steps")
            return [self.loaded.output(request) for request in requests]
        finally:
            engine.scheduler.limits = self._limits
            self._speculator.watches.clear()
            self._answers.forget()

    def _request(self, asked: Asked, salt: str) -> EngineRequest:
        options: RequestOptions = {"cache_salt": salt, "namespace": salt}
        if asked.expected is None:
            options["speculation"] = {"enabled": False}
        else:
            name = None if asked.drafter == TOGETHER else asked.drafter
            options["speculation"] = {"drafter": name, "num_speculative_tokens": asked.num_speculative_tokens, "trees": True}
            if self._speculator.uses_predictions:
                options["prediction"] = self._prediction(asked.expected)
        (request,) = self.loaded.requests([list(asked.prompt_token_ids)], asked.params, options, is_streamed=False)
        return request

    def _prediction(self, expected: Sequence[int]) -> list[int]:
        """The answer with a token replaced here and there."""
        vocab_size = self.loaded.input_processor.vocab_size
        return [(token + (at % _EDIT_EVERY == _EDIT_EVERY - 2)) % vocab_size for at, token in enumerate(expected)]

    def _policy(self, setting: Setting) -> FixedDraftLength:
        if setting.num_speculative_tokens == "auto":
            return self._as_users_have_it
        count = int(setting.num_speculative_tokens)
        return FixedDraftLength(count, row_budget=1 + count * (_TREE_ROWS if setting.shape == "tree" else 1))

    def _limits_of(self, setting: Setting, random: np.random.Generator) -> SchedulerLimits:
        if setting.event == "chunked":
            return replace(self._limits, prefill_chunk_size=int(random.choice(_CHUNKS)))
        if setting.event == "full passes":
            rows = setting.batch + int(random.integers(2, 24))
            return replace(self._limits, max_num_batched_tokens=rows, prefill_chunk_size=rows)
        return replace(self._limits, spare_blocks=0) if setting.event == "preempted" else self._limits

    @contextmanager
    def _little_room(self, requests: Sequence[EngineRequest], event: str) -> Iterator[None]:
        """Where requests are to be preempted, blocks for the longest of them and a few more are left of the cache."""
        cache = self.loaded.engine.cache
        room = max(blocks_for(request.max_len, cache.block_size) for request in requests) + len(requests)
        taken = cache.pool.allocate(max(0, cache.pool.num_free - room)) if event == "preempted" else []
        try:
            yield
        finally:
            cache.pool.release(taken)

    def _preempt_one(self, random: np.random.Generator) -> None:
        scheduler = self.loaded.engine.scheduler
        if scheduler.running:
            scheduler.preempt(scheduler.running[int(random.integers(len(scheduler.running)))])


def open_subject(engine: EngineConfig, speculation: SpeculationConfig) -> Subject:
    """Load a target with the drafters that `speculation` names.

    Raises:
        PacelineError: it cannot be loaded.
        ConfigError: the settings allow no comparison.
    """
    names = (speculation.drafter,) if isinstance(speculation.drafter, str) else speculation.drafter
    if "none" in names:
        raise ConfigError("drafter 'none' leaves nothing to compare plain decoding with: name a drafter, or none at all for every one")
    return Subject(load_engine(engine, speculation))


def _tell_apart(drafters: Sequence[Drafter]) -> None:
    """Number those that have the same name."""
    seen: dict[str, int] = {}
    for drafter in drafters:
        seen[drafter.name] = seen.get(drafter.name, 0) + 1
        if seen[drafter.name] > 1:
            drafter.name = f"{drafter.name} {seen[drafter.name]}"
