"""One sequence being generated, as steps and drafters read it. `engine/request.py` adds what only the engine needs."""

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
    """Where an output token came from."""

    PLAIN = "plain"  # a step without drafts
    ACCEPTED = "accepted"  # a draft token that the target accepted
    BONUS = "bonus"  # the target's own token of a step with drafts


class StopMatcher(Protocol):
    """Finds stop strings in the text of a request's tokens (`engine.text_stop.TextStop`)."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete."""

    @property
    def can_stop(self) -> bool:
        """Whether there are stop strings."""

    def copy(self) -> Self:
        """Return a copy to which tokens that are not committed can be added."""

    def push(self, token_id: int) -> bool:
        """Add a token; return whether a stop string is complete."""

    def finish(self) -> str:
        """Return the whole text, after which no token follows."""


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. Tokens are appended by `commit` only.

    Attributes:
        token_ids: prompt and output. The last one is the root of the next draft: its key and value are not cached yet.
        sequence: its rows in the target's cache.
        seed, sample_index: with the position, the key of its token noise.
        max_len: number of tokens, prompt included, at which it ends.
        end_token_ids: ids that end it (EOS unless ignored, stop tokens).
        text_stop: finds stop strings; None = no text can end it.
        num_speculative_tokens: most tokens drafted in a step; 0 = plain steps only, None = no limit of its own.
        drafter: name of the only drafter that may draft for it; None = all loaded ones.
        keeps_steps: whether the draft of every step is kept in `steps`.
        prediction_token_ids: text that the output is expected to resemble, for drafters that copy from it.
        namespace: requests of the same namespace may draft from each other's finished outputs; None = no sharing.
        adapter, adapter_number: name of the LoRA adapter, and the runtime's number of it; None and 0 = the target alone.
        has_mixture_pass: whether the adapter is an X-LoRA one, with which each row runs twice.
        error: why it failed. No other request is affected.
        draft_histories: by drafter, what the policy learned about drafts for this request.
        origins: origin of each output token.
        drafting: per-request state of drafters (`speculation.drafter.RequestState`).
    """

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    processor: LogitsProcessor
    sequence: CachedSequence
    seed: int
    sample_index: int
    max_len: int
    end_token_ids: frozenset[int] = frozenset()
    text_stop: StopMatcher | None = None
    num_speculative_tokens: int | None = None
    drafter: str | None = None
    keeps_steps: bool = False
    prediction_token_ids: Sequence[int] = ()
    namespace: str | None = None
    adapter: str | None = None
    adapter_number: int = 0
    has_mixture_pass: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    draft_histories: dict[str, DraftHistory] = field(default_factory=dict)
    origins: list[TokenOrigin] = field(default_factory=list)
    drafting: dict[object, Any] = field(default_factory=dict)
    finish_reason: FinishReason | None = None
    error: Exception | None = None

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
        """Number of tokens without rows in the cache; 1 while the request decodes."""
        return len(self.token_ids) - self.sequence.committed_len

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether log-probabilities of prompt tokens are still missing. The rows of these tokens must run, cached or not."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_speculative(self) -> bool:
        """Whether tokens may be drafted for it; otherwise no drafter sees its rows."""
        return self.num_speculative_tokens != 0

    def limit_draft(self, row_budget: int, max_depth: int) -> tuple[int, int]:
        """Return the row budget and depth of a draft, reduced to what the request allows and can still emit."""
        max_depth = min(max_depth, self.num_remaining_tokens - 1)
        most = self.num_speculative_tokens
        return (row_budget, max_depth) if most is None else (min(row_budget, most + 1), min(max_depth, most))

    def fail(self, error: Exception) -> None:
        """End the request with an error that is raised to its caller."""
        self.error, self.finish_reason = error, FinishReason.ABORT
