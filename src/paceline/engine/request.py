"""The part of a request that only the engine uses: its options, samples of the same prompt, preemptions and times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from paceline.config import MAX_SPECULATIVE_TOKENS
from paceline.engine.text_stop import TextStop
from paceline.errors import RequestError
from paceline.speculation.request import Request

PROMPT_LOGITS_ROWS = 64
"""Most prompt rows of one pass whose logits are all needed: memory for so many rows of V floats is allocated at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """How drafts are made for one request. They change the speed, never a token.

    Attributes:
        enabled: False = plain steps only, and no drafter sees the request's tokens.
        drafter: name of one of several loaded drafters; None = all that are loaded.
        num_speculative_tokens: most tokens drafted in a step; 0 = as `enabled=False`, None = the value the model was loaded with.
        trees: keep the draft of every step (`RequestOutput.steps`, `StreamChunk.steps`).

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
        most: object = self.num_speculative_tokens
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or not 0 <= most <= MAX_SPECULATIVE_TOKENS):
            text = f"it must be a whole number in [0, {MAX_SPECULATIVE_TOKENS}]; left out, it is what the model was loaded with"
            name = "speculation.num_speculative_tokens"
            raise RequestError(f"{name} is {most!r}: {text}", parameter=name)

    @classmethod
    def parse(cls, given: "SpeculationOptions | Mapping[str, object] | None") -> "SpeculationOptions":
        """Return the options of a mapping, or those given.

        Raises:
            RequestError: it is something else, or has an unknown name.
        """
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise RequestError(f"speculation is {given!r}: give a mapping with {', '.join(names)}", parameter="speculation")
        return cls(**given)  # type: ignore[arg-type]  # checked there


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The checked `RequestOptions` of one prompt. Only the adapter changes a token.

    Attributes:
        prediction_token_ids: text that the output is expected to resemble; empty = none is given.
        namespace: requests of the same namespace may draft from each other's finished outputs; None = no sharing.
        salt: only requests of the same salt share cached blocks.
        shown_token_ids: special tokens that are part of the text.
        adapter: its name; None = none.
    """

    speculation: SpeculationOptions = SpeculationOptions()
    prediction_token_ids: Sequence[int] = ()
    namespace: str | None = None
    salt: bytes = b""
    shown_token_ids: Sequence[int] = ()
    adapter: str | None = None


@dataclass(slots=True, eq=False)
class EngineRequest(Request):
    """A request in an engine.

    Attributes:
        text_stop: the text of its tokens; None = there are no stop strings and the output is not streamed.
        salt: only requests of the same salt and adapter share cached blocks.
        adapter_key: digest of the adapter's values.
        leader: first sample of the same prompt, whose cached prompt rows this one waits for.
        num_cached_tokens: prompt tokens whose rows were in the cache when it began.
        num_preemptions: how often its rows were dropped to make room for older requests; they run again.
        started_s, first_token_s, last_token_s, finished_s: clock (`time.perf_counter`) at the first pass, after the prompt's last pass,
            after the latest step that emitted tokens, and at the end; 0 = not yet.
    """

    text_stop: TextStop | None = None
    salt: bytes = b""
    adapter_key: bytes = b""
    leader: "EngineRequest | None" = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    started_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finished_s: float = 0.0

    @property
    def prefix_salt(self) -> bytes:
        """Salt and adapter in one: two requests share cached blocks only if both are the same."""
        return len(self.adapter_key).to_bytes(2, "little") + self.adapter_key + self.salt

    @property
    def is_released(self) -> bool:
        """Whether the request has ended and all its resources are freed."""
        return self.finished_s > 0.0

    def num_next_tokens(self, max_rows: int) -> int:
        """Return the number of tokens that the next pass computes for the request, at most `max_rows`; 1 while it decodes."""
        return min(self.num_uncached, max_rows, PROMPT_LOGITS_ROWS if self.needs_prompt_logits else max_rows)
