"""Many requests on one target: who runs in the next step, and giving everything back however a request ends."""

import time
from collections.abc import Generator, Sequence

from paceline.errors import CapacityError
from paceline.kv_cache.paged import KVCache
from paceline.kv_cache.row_plan import blocks_for
from paceline.runtimes.base import Runtime
from paceline.speculation.guess import Guesser
from paceline.speculation.request import Request
from paceline.speculation.step import step

MAX_STEP_ROWS = 512
"""Known tokens of all requests together that one pass takes; drafts come on top."""


class Engine:
    """Runs requests to their end, first come, first served.

    A request is admitted when the cache has blocks for the longest it may become, so it never fails half-way for want of memory;
    drafts only take blocks that are free.

    Args:
        runtime, cache: the target.
        guesser: drafter and policy.
        max_num_seqs: requests in one pass.
        chunk_rows: prompt rows of one request in one pass.
    """

    def __init__(self, runtime: Runtime, cache: KVCache, guesser: Guesser, *, max_num_seqs: int, chunk_rows: int) -> None:
        self.runtime, self.cache, self.guesser = runtime, cache, guesser
        self._max_num_seqs = max_num_seqs
        self._chunk_rows = chunk_rows
        self._num_runs = 0

    @property
    def is_idle(self) -> bool:
        """Whether no run has begun that is not closed."""
        return self._num_runs == 0

    def run(self, requests: Sequence[Request]) -> Generator[None, None, None]:
        """Advance `requests` until all are finished, yielding after every step; each needs a sequence of `cache`.

        All sequences are released when the iterator ends, breaks off or raises.

        Raises:
            CapacityError: one request alone is larger than the cache; nothing ran.
            CheckpointError: the target produced NaN.
        """
        waiting, running = list(requests), list[Request]()
        self._num_runs += 1
        try:
            for request in requests:
                self._check_fits(request)
            while waiting or running:
                self._admit(waiting, running)
                step(self._pick(running), self.runtime, self.cache, self.guesser, chunk_rows=self._chunk_rows)
                now = time.perf_counter()
                for request in running:
                    if request.num_output_tokens and not request.first_token_s:
                        request.first_token_s = now
                for request in [request for request in running if request.is_finished]:
                    running.remove(request)  # first, so that it is released once even if that raises
                    request.finished_s = now
                    self._release(request)
                yield
        finally:
            self._num_runs -= 1
            for request in (*waiting, *running):
                self._release(request)

    def _admit(self, waiting: list[Request], running: list[Request]) -> None:
        promised = sum(self._blocks_of(request) for request in running)
        while waiting and len(running) < self._max_num_seqs:
            promised += self._blocks_of(waiting[0])
            if promised > self.cache.pool.num_blocks - 1:
                break
            request = waiting.pop(0)
            request.started_s = time.perf_counter()
            running.append(request)

    def _pick(self, running: Sequence[Request]) -> list[Request]:
        """Everybody who decodes, and prompts until the pass is full."""
        picked: list[Request] = []
        rows = 0
        for request in running:
            given = min(len(request.token_ids) - request.sequence.committed_len, self._chunk_rows)
            if given == 1 or rows + given <= max(MAX_STEP_ROWS, self._chunk_rows):
                picked.append(request)
                rows += given
        return picked

    def _blocks_of(self, request: Request) -> int:
        return blocks_for(request.max_len, self.cache.block_size)

    def _check_fits(self, request: Request) -> None:
        if self._blocks_of(request) > self.cache.pool.num_blocks - 1:
            raise CapacityError(
                f"prompt and output of {request.max_len} tokens do not fit the cache of {self.cache.max_slots} tokens: "
                "lower max_tokens or raise cache_gb"
            )

    def _release(self, request: Request) -> None:
        self.guesser.release(request)
        self.cache.release(request.sequence)
