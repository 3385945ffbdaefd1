"""The interface of drafters. A drafter can make generation slow, but never wrong: every draft is verified."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from paceline.errors import ConfigError
from paceline.runtimes.base import FloatArray
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

StateT = TypeVar("StateT")

FREE_PREFILL_TOKENS = 16
"""Number of tokens up to which a prefill costs nothing extra: a pass over that many rows takes about the time of one row."""
MAX_CATCH_UP_TOKENS = 128
"""Maximum number of new tokens that a lookup drafter reads in `has_candidates`; it leaves longer texts to `propose`."""
NEW_SAMPLE_WEIGHT = 0.25  # weight of a new sample in the running average of prefill times
RESERVED_NAMES = ("none", "auto", "grammar")


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """How much to draft for one request in one step.

    Attributes:
        max_rows: maximum number of rows of the target's pass that the tree takes: one for each node, root included.
        max_depth: maximum number of tokens on a path, root excluded.
        needs_draft_probs: whether `acceptance="rejection"` requires sampled drafts. Tokens are then sampled with `draw_distinct`
            (`paceline.sampling.residual`), whose noise is not the target's, and `DraftTree.draft_probs` contains the distributions.
        min_path_prob: path probability below which another token costs more time than it saves. 0 for sampled drafts, whose length must
            not depend on the sampled tokens.
        calibrate: maps the drafter's probability of a token to its acceptance rate; None = both are equal.
    """

    max_rows: int
    max_depth: int
    needs_draft_probs: bool = False
    min_path_prob: float = 0.0
    calibrate: Callable[[float], float] | None = None

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest chain within the budget."""
        return min(self.max_depth, self.max_rows - 1)

    def acceptance_rate(self, prob: float) -> float:
        """Return the acceptance rate of a token with this probability under the drafter, given that the tokens before it are accepted."""
        return prob if self.calibrate is None else self.calibrate(prob)


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """Target activations that `Drafter.observe` receives.

    Attributes:
        hidden_states: whether `observe` receives the final hidden states.
        layers: layer boundaries whose hidden states `observe` receives. Boundary i is the input of layer i.
    """

    hidden_states: bool = False
    layers: tuple[int, ...] = ()

    @classmethod
    def union(cls, drafters: "Sequence[Drafter]") -> "DrafterNeeds":
        layers = {layer for drafter in drafters for layer in drafter.needs.layers}
        return cls(any(drafter.needs.hidden_states for drafter in drafters), tuple(sorted(layers)))


@dataclass(frozen=True, slots=True)
class DrafterTraits:
    """Properties of a drafter that users and the engine need.

    Attributes:
        description: text for the banner at load; empty = the drafter's name.
        notices: further lines to show the user when the model is loaded.
        is_lookup: whether the drafter copies from texts, which takes next to no time.
        uses_predicted_outputs: whether the drafter copies from `Request.prediction_token_ids`. Without such a drafter, requests with
            predictions are rejected.
        cache_bytes_per_token: bytes of the drafter's own cache for one token.
    """

    description: str = ""
    notices: Sequence[str] = ()
    is_lookup: bool = False
    uses_predicted_outputs: bool = False
    cache_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """Rows of a target pass that stay in the cache: those of a request's prompt tokens, its last token and its accepted draft tokens.

    Attributes:
        request: the request; its `token_ids` already include the emitted tokens.
        first_position: position of the first row; row i belongs to token `request.token_ids[first_position + i]`.
        hidden_states: [num_rows, E] or None, valid during the call.
        collected_hidden_states: [num_rows, E] at each layer boundary of `DrafterNeeds.layers`, valid during the call.
    """

    request: Request
    first_position: int
    num_rows: int
    hidden_states: FloatArray | None = None
    collected_hidden_states: tuple[FloatArray, ...] = ()

    def select_layers(self, collected_layers: Sequence[int], wanted_layers: Sequence[int]) -> "CommittedRows":
        """Return the rows with hidden states of only `wanted_layers`, a subset of `collected_layers`."""
        if tuple(collected_layers) == tuple(wanted_layers):
            return self
        wanted = tuple(self.collected_hidden_states[collected_layers.index(layer)] for layer in wanted_layers)
        return replace(self, collected_hidden_states=wanted)


class PrefillTime:
    """Seconds of a draft model's prefill, as a running average per token.

    Args:
        token_s: seconds per token, if measured before; 0 = unknown.
    """

    def __init__(self, token_s: float = 0.0) -> None:
        self.token_s = token_s

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add a measured prefill time to the running average; prefills of up to `FREE_PREFILL_TOKENS` tokens are ignored."""
        if num_tokens > FREE_PREFILL_TOKENS:
            token_s = seconds / num_tokens
            self.token_s += (token_s - self.token_s) * (NEW_SAMPLE_WEIGHT if self.token_s else 1.0)

    def expected_s(self, num_tokens: int) -> float:
        """Return the expected seconds of a prefill; 0 for up to `FREE_PREFILL_TOKENS` tokens, or if no prefill was measured."""
        return self.token_s * num_tokens if num_tokens > FREE_PREFILL_TOKENS else 0.0


def check_drafter(drafter: "Drafter") -> None:
    """Check the name, needs and traits of a drafter object.

    Raises:
        ConfigError: an attribute is missing, has another type, or cannot be read.
    """
    class_name = type(drafter).__name__
    try:
        attributes: tuple[Any, Any, Any] = drafter.name, drafter.needs, drafter.traits
    except Exception as error:
        text = f"name, needs and traits of the drafter {class_name} cannot be read ({type(error).__name__}: {error}): set them"
        raise ConfigError(text) from error
    name, needs, traits = attributes
    if not isinstance(name, str) or not name or not name.isprintable() or "+" in name or name in RESERVED_NAMES:
        reserved = ", ".join(RESERVED_NAMES)
        raise ConfigError(f"the drafter {class_name} has the name {name!r}: use a printable text without '+' that is none of {reserved}")
    if not isinstance(needs, DrafterNeeds):
        raise ConfigError(f"needs of the drafter {name!r} is {needs!r}: use DrafterNeeds")
    is_usable = isinstance(traits, DrafterTraits) and not isinstance(traits.notices, str)
    texts: list[Any] = [traits.description, *traits.notices] if is_usable else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"traits of the drafter {name!r} is {traits!r}: use DrafterTraits with a text and a list of texts")


class RequestState(Generic[StateT]):
    """A drafter's state for each request. The state is stored in the request, so that both are freed together."""

    __slots__ = ()

    def get(self, request: Request) -> StateT | None:
        state: StateT | None = request.drafter_states.get(self)
        return state

    def __getitem__(self, request: Request) -> StateT:
        state: StateT = request.drafter_states[self]
        return state

    def __setitem__(self, request: Request, state: StateT) -> None:
        request.drafter_states[self] = state

    def pop(self, request: Request) -> StateT | None:
        """Remove and return the state of a request, or None."""
        state: StateT | None = request.drafter_states.pop(self, None)
        return state


class LastHiddenStates:
    """The target's final hidden states from which heads without a cache draft: one for each request."""

    def __init__(self) -> None:
        self._states = RequestState[tuple[int, FloatArray]]()

    def observe(self, rows: CommittedRows) -> None:
        """Keep the last row's hidden state if no later row of the request has run."""
        last = rows.first_position + rows.num_rows - 1
        if rows.hidden_states is not None and last == len(rows.request.token_ids) - 2:
            self._states[rows.request] = last, np.array(rows.hidden_states[-1], np.float32)

    def find(self, request: Request) -> FloatArray | None:
        """Return the hidden state [E] of the token before the last one; None if it was not observed."""
        position, hidden_state = self._states.get(request) or (None, None)
        return hidden_state if position == len(request.token_ids) - 2 else None


class Drafter(ABC):
    """Drafts the next tokens of a batch of requests.

    Each step calls `has_candidates`, `prefill_s` and `propose` before the target's pass, and `observe` after it. `release` is called when a
    request ends or its cache rows are evicted. If a drafter raises, requests go on without its draft, and the failure is counted. A drafter
    must not use the tokens of one request for another. Store state of a request in a `RequestState`.

    Attributes:
        name: name by which requests select the drafter; also the source of its draft tokens.
        needs: target activations that `observe` receives. They are fixed when the target is loaded.
        traits: other properties of the drafter.
    """

    name: str
    needs: DrafterNeeds = DrafterNeeds()
    traits: DrafterTraits = DrafterTraits()

    @abstractmethod
    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        """Return a tree whose root is the last token of each request, or None for no draft. Trees that exceed the budget are trimmed."""

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        """Receive the rows that a target pass added to the cache, prompt chunks included. Work may be deferred to `propose`."""

    def has_candidates(self, request: Request) -> bool:
        """Return False if `propose` would find no draft for the request. Called in every step, so it must take microseconds."""
        return True

    def prefill_s(self, request: Request) -> float:
        """Return the expected seconds of the drafter's own prefill before the next draft. Called in every step: be fast."""
        return 0.0

    def release(self, request: Request) -> None:
        """Free the state of a request, such as cache blocks. May be called twice, or for requests that the drafter never observed."""
