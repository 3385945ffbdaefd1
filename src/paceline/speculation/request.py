"""One sequence being generated. Changed only by the engine (state, cache) and by commit (tokens). No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from paceline.kv_cache.paged import CachedSequence
from paceline.sampling.params import SamplingParams
from paceline.sampling.processors import LogitsProcessor
from paceline.speculation.stats import SpeculationStats
from paceline.speculation.stop import TextStop


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the end of the context


class TokenOrigin(Enum):
    """Where an output token came from."""

    PLAIN = "plain"  # a step without drafts
    ACCEPTED = "accepted"  # a draft the target agreed with
    BONUS = "bonus"  # the target's own token of a step with drafts


@dataclass(frozen=True, slots=True)
class DraftHints:
    """What the sender of a request offers to whoever guesses. It changes the speed, never a token.

    Attributes:
        prediction_token_ids: what the output is expected to resemble; empty = nothing is expected.
        namespace: whose finished outputs may be guessed from, and to which this one is added; None = nobody's.
    """

    prediction_token_ids: Sequence[int] = ()
    namespace: str | None = None


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
        text_stop: finds stop strings; None when there are none and nobody streams.
        hints: what its sender offers to drafters.
        started_s, first_token_s, finished_s: clock (`time.perf_counter`) at admission, after the prompt's last pass, at the end.
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
    text_stop: TextStop | None = None
    hints: DraftHints = DraftHints()
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    origins: list[TokenOrigin] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    started_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0

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

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None
