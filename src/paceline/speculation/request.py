"""One sequence that is being generated, with the fields that steps and drafters use. `engine/request.py` adds the fields of the engine."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Protocol, Self

from paceline.kv_cache.cache import CachedSequence
from paceline.sampling.logprobs import TokenLogprobs
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.draft_length.acceptance import DraftHistory
from paceline.speculation.stats import SpeculationStats, StepRecord


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # cancelled by its caller, or failed (`Request.error`)


class TokenOrigin(StrEnum):
    """How an output token was produced."""

    PLAIN = "plain"  # sampled by the target, in a step without a draft
    ACCEPTED = "accepted"  # drafted, and accepted by the target
    BONUS = "bonus"  # sampled by the target, in a step with a draft


class StopMatcher(Protocol):
    """Finds stop strings in the text of a request's tokens (`engine.stop_matcher.StopStringMatcher`)."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete."""

    @property
    def can_stop(self) -> bool:
        """Whether the request has stop strings."""

    def copy(self) -> Self:
        """Return a copy that can be advanced over draft tokens, while this one stays at the committed tokens."""

    def push(self, token_id: int) -> bool:
        """Add a token; return whether a stop string is complete."""

    def finish(self) -> str:
        """End the text, because no token follows, and return the whole text."""


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. Tokens are appended by `commit` only."""

    token_ids: list[int]  # prompt and output; the last token is the root of the next draft: its key and value are not cached yet
    num_prompt_tokens: int
    params: SamplingParams
    processor: LogitsProcessor
    cached_sequence: CachedSequence  # the request's rows in the target's cache
    seed: int  # selects the noise with which tokens are sampled, together with `sample_index` and the token's position
    sample_index: int
    max_len: int  # number of tokens, prompt included, at which the request ends
    end_token_ids: frozenset[int] = frozenset()  # ids that end the request: stop tokens, and EOS unless it is ignored
    stop_matcher: StopMatcher | None = None  # finds stop strings; None = there are none
    num_speculative_tokens: int | None = None  # maximum draft tokens in a step; 0 = plain steps only, None = only the policy limits drafts
    drafter: str | None = None  # name of the only drafter that may draft for the request; None = all drafters may
    keeps_step_records: bool = False  # whether a record of every step is kept in `steps`
    prediction_token_ids: Sequence[int] = ()  # text that the output is expected to resemble, for drafters that copy from it
    namespace: str | None = None  # requests of the same namespace may draft from each other's finished outputs; None = no sharing
    adapter: str | None = None  # name of the LoRA adapter; None = no adapter
    adapter_number: int = 0  # number of the adapter in the runtime; 0 = no adapter
    has_mixture_pass: bool = False  # whether the adapter is an X-LoRA adapter, with which each row runs twice
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    draft_histories: dict[str, DraftHistory] = field(default_factory=lambda: defaultdict(DraftHistory))  # acceptance and backoff by drafter
    origins: list[TokenOrigin] = field(default_factory=list)  # how each output token was produced
    drafter_states: dict[object, Any] = field(default_factory=dict)  # per-request state of drafters (`speculation.drafter.RequestState`)
    finish_reason: FinishReason | None = None
    error: Exception | None = None  # error that ended the request; other requests are not affected

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Number of tokens that may still be emitted."""
        return self.max_len - len(self.token_ids)

    @property
    def num_uncached(self) -> int:
        """Number of tokens without rows in the cache; 1 when the prompt is cached and the request decodes."""
        return len(self.token_ids) - self.cached_sequence.committed_len

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether log-probabilities of prompt tokens are missing. The rows of these tokens must be computed even if they are cached."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_speculative(self) -> bool:
        """Whether drafts are allowed. If not, drafters do not receive the rows of the request either."""
        return self.num_speculative_tokens != 0

    def limit_draft(self, max_rows: int, max_depth: int) -> tuple[int, int]:
        """Return the given row budget and depth, each limited by `num_speculative_tokens` and by the tokens that may still be emitted."""
        max_depth, limit = min(max_depth, self.num_remaining_tokens - 1), self.num_speculative_tokens
        return (max_rows, max_depth) if limit is None else (min(max_rows, limit + 1), min(max_depth, limit))

    def fail(self, error: Exception) -> None:
        """End the request with an error, which the caller of the engine receives."""
        self.error, self.finish_reason = error, FinishReason.ABORT
