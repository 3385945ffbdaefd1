"""`EngineRequest`, a request with the state that the engine adds, such as its output text, prefix-cache keys and timestamps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from paceline.config import MAX_SPECULATIVE_TOKENS
from paceline.engine.stop_matcher import StopStringMatcher
from paceline.errors import RequestError
from paceline.speculation.request import Request

MAX_PROMPT_LOGITS_ROWS = 64
"""Maximum prompt rows per pass of a request with `prompt_logprobs`, because each of these rows needs memory for V logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """How drafts are made for one request. With the acceptance rule "match", drafts do not change the output.

    Attributes:
        enabled: False = plain decoding, and no drafter observes the request's tokens.
        drafter: name of the loaded drafter to use; None = all loaded drafters.
        num_speculative_tokens: maximum draft tokens per step; 0 = as `enabled=False`, None = the limit that was set when loading.
        trees: whether the output contains the draft of every step (`RequestOutput.steps`, `StreamChunk.steps`).

    Raises:
        RequestError: a value has the wrong type or is out of range.
    """

    enabled: bool = True
    drafter: str | None = None
    num_speculative_tokens: int | None = None
    trees: bool = False

    def __post_init__(self) -> None:
        for name in ("enabled", "trees"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"speculation.{name} is {getattr(self, name)!r}: use true or false", parameter=f"speculation.{name}")
        if not isinstance(self.drafter, str | None):
            raise RequestError(
                f"speculation.drafter is {self.drafter!r}: give the name of a loaded one, or leave it out", parameter="speculation.drafter"
            )
        limit: object = self.num_speculative_tokens
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= MAX_SPECULATIVE_TOKENS):
            text = f"it must be a whole number in [0, {MAX_SPECULATIVE_TOKENS}]; left out, it is what the model was loaded with"
            name = "speculation.num_speculative_tokens"
            raise RequestError(f"{name} is {limit!r}: {text}", parameter=name)

    @classmethod
    def parse(cls, options: "SpeculationOptions | Mapping[str, object] | None") -> "SpeculationOptions":
        """Convert a mapping to options; return options unchanged. None = the defaults.

        Raises:
            RequestError: `options` has another type, or a key is unknown.
        """
        if options is None:
            return cls()
        if isinstance(options, cls):
            return options
        names = [field.name for field in fields(cls)]
        if not isinstance(options, Mapping) or not set(options) <= set(names):
            raise RequestError(f"speculation is {options!r}: give a mapping with {', '.join(names)}", parameter="speculation")
        return cls(**options)  # type: ignore[arg-type]  # checked there


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The checked `RequestOptions` of one prompt. Only `adapter` changes which tokens are generated.

    Attributes:
        prediction_token_ids: tokens that the output will resemble; empty = unknown.
        namespace: requests with the same namespace may draft from each other's finished outputs; None = no sharing.
        cache_salt: only requests with the same salt share cached blocks.
        shown_token_ids: special tokens that are part of the output's text.
        adapter: name of the adapter; None = no adapter.
    """

    speculation: SpeculationOptions = SpeculationOptions()
    prediction_token_ids: Sequence[int] = ()
    namespace: str | None = None
    cache_salt: bytes = b""
    shown_token_ids: Sequence[int] = ()
    adapter: str | None = None


@dataclass(slots=True, eq=False)
class EngineRequest(Request):
    """A request with the engine's state.

    Attributes:
        stop_matcher: collects the output's text and finds stop strings; None = no stop strings are given and the output is not streamed.
        cache_salt: only requests with the same salt and adapter share cached blocks.
        adapter_key: hash of the adapter's weights; empty = no adapter.
        first_sample: the first sample of the same prompt, whose prompt rows this request waits for; None = this is the first sample.
        num_cached_tokens: prompt tokens whose rows were found in the prefix cache.
        num_preemptions: how often the request's rows were dropped to free blocks for older requests, and computed again later.
        started_s, first_token_s, last_token_s, finished_s: time (`time.perf_counter`) of the first pass, the first token, the latest
            token, and the end of the request; 0 = it has not happened.
    """

    stop_matcher: StopStringMatcher | None = None
    cache_salt: bytes = b""
    adapter_key: bytes = b""
    first_sample: "EngineRequest | None" = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    started_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finished_s: float = 0.0

    @property
    def prefix_salt(self) -> bytes:
        """Adapter key and cache salt in one value. Only requests with the same value share cached blocks."""
        return len(self.adapter_key).to_bytes(2, "little") + self.adapter_key + self.cache_salt

    @property
    def is_released(self) -> bool:
        """Whether the request has ended and all its resources are freed."""
        return self.finished_s > 0.0

    def num_next_tokens(self, max_rows: int) -> int:
        """Return how many committed tokens the next pass computes, at most `max_rows`: a part of the prompt, or 1 while decoding."""
        return min(self.num_uncached, max_rows, MAX_PROMPT_LOGITS_ROWS if self.needs_prompt_logits else max_rows)
