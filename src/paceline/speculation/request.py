"""One sequence being generated. Changed only by the engine (state, cache) and by commit (tokens). No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from typing import Any, Protocol, Self

from paceline.config import MAX_DRAFT_TOKENS
from paceline.errors import RequestError
from paceline.kv_cache.paged import CachedSequence
from paceline.sampling.logprobs import TokenLogprobs
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.draft_length.acceptance import DraftHistory
from paceline.speculation.stats import SpeculationStats
from paceline.speculation.step_record import StepRecord

PROMPT_LOGPROBS_ROWS = 64
"""Prompt rows of one pass whose logits are all wanted: as many rows of V floats are made at once."""


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # its caller went away, or it failed: `Request.error` says which


class StopMatcher(Protocol):
    """Finds stop strings in the text of a request's tokens (`engine.text_stop.TextStop`)."""

    @property
    def is_stopped(self) -> bool:
        """A stop string is complete."""

    @property
    def can_stop(self) -> bool:
        """There are stop strings."""

    @property
    def text(self) -> str:
        """All text that is final."""

    @property
    def found(self) -> str | None:
        """The stop string that is complete."""

    def copy(self) -> Self:
        """Return a copy for a look ahead; its text begins here."""

    def take_new(self) -> str:
        """Return the text that became final since the last call."""

    def push(self, token_id: int) -> bool:
        """Add a token; return whether a stop string is complete."""

    def finish(self) -> str:
        """End the text, after which no token follows, and return all of it."""


class TokenOrigin(StrEnum):
    """Where an output token came from; a string, so that a list of them is JSON."""

    PLAIN = "plain"  # a step without drafts
    ACCEPTED = "accepted"  # a draft the target agreed with
    BONUS = "bonus"  # the target's own token of a step with drafts


@dataclass(frozen=True, slots=True)
class DraftHints:
    """What the sender of a request offers to drafters. It changes the speed, never a token.

    Attributes:
        prediction_token_ids: what the output is expected to resemble; empty = nothing is expected.
        namespace: requests with the same one may draft from each other's finished outputs; None = no sharing.
    """

    prediction_token_ids: Sequence[int] = ()
    namespace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpeculation:
    """How one request may be drafted for. It changes the speed, never a token.

    Attributes:
        enabled: False = plain steps only, and no drafter is told anything of the request.
        drafter: name of one of several loaded drafters; None = all that are loaded.
        max_draft_tokens: tokens drafted a step at most; 0 = as `enabled=False`, None = what the model was loaded with.
        trees: keep the draft of every step (`RequestOutput.steps`, `StreamChunk.steps`).

    Raises:
        RequestError: a value has the wrong type or is out of range.
    """

    enabled: bool = True
    drafter: str | None = None
    max_draft_tokens: int | None = None
    trees: bool = False

    def __post_init__(self) -> None:
        for name in ("enabled", "trees"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"speculation.{name} is {getattr(self, name)!r}: use true or false", parameter=f"speculation.{name}")
        if not isinstance(self.drafter, str | None):
            raise RequestError(
                f"speculation.drafter is {self.drafter!r}: give the name of a loaded one, or leave it out", parameter="speculation.drafter"
            )
        limit: object = self.max_draft_tokens
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= MAX_DRAFT_TOKENS):
            text = f"it must be a whole number in [0, {MAX_DRAFT_TOKENS}]; left out, it is what the model was loaded with"
            raise RequestError(f"speculation.max_draft_tokens is {limit!r}: {text}", parameter="speculation.max_draft_tokens")

    @classmethod
    def of(cls, given: "RequestSpeculation | Mapping[str, object] | None") -> "RequestSpeculation":
        """What was given, by name or as it is.

        Raises:
            RequestError: it is something else, or names what does not exist.
        """
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise RequestError(f"speculation is {given!r}: give a mapping with {', '.join(names)}", parameter="speculation")
        return cls(**given)  # type: ignore[arg-type]  # checked there

    @property
    def is_off(self) -> bool:
        """Whether all steps are plain."""
        return not self.enabled or self.max_draft_tokens == 0


@dataclass(slots=True, eq=False)
class Request:
    """State of one request.

    Attributes:
        token_ids: prompt and output; the last one is the pending root, whose key and value are not cached yet.
        num_prompt_tokens: how many of them are the prompt.
        sequence: its rows in the target's cache.
        seed, sample_index: with the position, the key of its token noise.
        max_len: tokens (prompt and output) at which it ends, by max_tokens or the context.
        end_token_ids: ids that end it (EOS unless ignored, stop tokens).
        text_stop: finds stop strings; None when there are none and the output is not streamed.
        hints: what its sender offers to drafters.
        speculation: how it may be drafted for.
        salt: only requests with the same one share cached blocks.
        adapter: name of the adapter that its tokens are to come from; None = the target's own.
        adapter_number, adapter_key: what the runtime calls it, and the digest of its values, from when the engine has the request.
        has_mixture_pass: its adapter is a mixture, so each of its rows runs twice.
        leader: another sample of the same prompt, whose cached prompt this one waits for.
        num_cached_tokens: prompt tokens whose rows were in the cache when it began.
        num_preemptions: how often its rows were dropped to make room for older requests; they run again.
        logprobs: of the output tokens, where asked for.
        prompt_logprobs: of the prompt tokens so far, where asked for; the first one has none.
        steps: the draft of every step, where wanted.
        error: why it failed; no other request is concerned.
        draft_histories: what the policy learned of drafts for it, by drafter.
        drafting: what drafters remember of it, by who remembers it (`speculation.drafter.RequestState`).
        started_s, first_token_s, last_token_s, finished_s: clock (`time.perf_counter`) at admission, after the prompt's last pass, after
            the latest step that gave it tokens, at the end.
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
    hints: DraftHints = DraftHints()
    speculation: RequestSpeculation = RequestSpeculation()
    salt: bytes = b""
    adapter: str | None = None
    adapter_number: int = 0
    adapter_key: bytes = b""
    has_mixture_pass: bool = False
    leader: "Request | None" = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    error: Exception | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    draft_histories: dict[str, DraftHistory] = field(default_factory=dict)
    origins: list[TokenOrigin] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    drafting: dict[object, Any] = field(default_factory=dict)
    started_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finished_s: float = 0.0

    @property
    def prefix_salt(self) -> bytes:
        """Salt and adapter in one: two requests share cached blocks only if both are the same."""
        return len(self.adapter_key).to_bytes(2, "little") + self.adapter_key + self.salt

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_len - len(self.token_ids)

    def limit_draft(self, row_budget: int, max_depth: int) -> tuple[int, int]:
        """Return the row budget and depth of a draft as far as the request can use them and allows them."""
        max_depth = min(max_depth, self.num_remaining_tokens - 1)
        allowed = self.speculation.max_draft_tokens
        return (row_budget, max_depth) if allowed is None else (min(row_budget, allowed + 1), min(max_depth, allowed))

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_released(self) -> bool:
        """Whether it has ended and the engine has let it go: nothing of it changes any more."""
        return self.finished_s > 0.0

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether log-probabilities of prompt tokens are still missing; their rows must run, so none may be adopted."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def num_uncached(self) -> int:
        """Number of tokens without rows in the cache; 1 while the request decodes."""
        return len(self.token_ids) - self.sequence.committed_len

    def num_next_tokens(self, max_rows: int) -> int:
        """Return the number of tokens that the next pass computes for the request, at most `max_rows`; 1 while it decodes."""
        return min(self.num_uncached, max_rows, PROMPT_LOGPROBS_ROWS) if self.wants_prompt_rows else min(self.num_uncached, max_rows)

    def fail(self, error: Exception) -> None:
        """End it with an error that is raised to its own caller."""
        self.error, self.finish_reason = error, FinishReason.ABORT
