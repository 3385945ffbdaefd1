"""The interface of drafters. A drafter can make generation slow, never wrong: every draft is verified."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from paceline.errors import ConfigError
from paceline.kv_cache.row_plan import TreeLayout
from paceline.runtimes.base import FloatArray
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

StateT = TypeVar("StateT")


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """How much to draft for one request in one step.

    Attributes:
        row_budget: rows of the target's pass that the tree may take, root included.
        max_depth: tokens from the root to the deepest node.
        layout: how the tree is laid out in the cache, which decides the rows of a branch (`num_rows` of kv_cache/row_plan.py).
        wants_draws: for `acceptance="rejection"`: draw the draft from the drafter's distribution with `draft` noise
            (`paceline.sampling.residual.draw_distinct`), not with the target's noise, and give the distribution in
            `DraftTree.draft_probs`.
        min_reach: chance of a path below which another token after it is not worth its time. Not for drawn drafts, whose length must not
            depend on the tokens drawn.
        rate_of: acceptance rate of a token by the drafter's own probability; None = they are equal.
    """

    row_budget: int
    max_depth: int
    layout: TreeLayout = TreeLayout.PATHS
    wants_draws: bool = False
    min_reach: float = 0.0
    rate_of: Callable[[float], float] | None = None

    @property
    def max_tokens(self) -> int:
        """The longest chain within the budget."""
        return min(self.max_depth, self.row_budget - 1)

    def rate(self, prob: float) -> float:
        """The acceptance rate of a token to which the drafter gives this probability, once the tokens before it are accepted."""
        return prob if self.rate_of is None else self.rate_of(prob)


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """Target activations that a drafter observes.

    Attributes:
        hidden_states: the final hidden states.
        layers: layer boundaries to collect, fixed when the target is loaded.
    """

    hidden_states: bool = False
    layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, drafters: "Sequence[Drafter]") -> "DrafterNeeds":
        """What several drafters need together."""
        layers = {layer for drafter in drafters for layer in drafter.needs.layers}
        return cls(any(drafter.needs.hidden_states for drafter in drafters), tuple(sorted(layers)))


@dataclass(frozen=True, slots=True)
class DrafterTraits:
    """What users and the engine should know of a drafter.

    Attributes:
        description: for the banner at load; empty = its name.
        notices: lines for the user at load.
        is_lookup: it copies from texts, which takes next to no time.
        uses_predictions: it drafts from `hints.prediction_token_ids`; without such a drafter, requests that carry some are refused.
        cache_bytes_per_token: memory that its own cache takes.
    """

    description: str = ""
    notices: Sequence[str] = ()
    is_lookup: bool = False
    uses_predictions: bool = False
    cache_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """Rows of one request that a target pass just made permanent.

    Attributes:
        request: its `token_ids` already hold what the step emitted.
        start: position of the first row; row i carries token `request.token_ids[start + i]`.
        num_rows: how many.
        hidden_states: [num_rows, E] or None, valid during the call.
        collected_hidden_states: [num_layers, num_rows, E] or None, valid during the call.
    """

    request: Request
    start: int
    num_rows: int
    hidden_states: FloatArray | None = None
    collected_hidden_states: FloatArray | None = None

    def with_layers(self, collected: Sequence[int], wanted: Sequence[int]) -> "CommittedRows":
        """The rows with some of the collected layer boundaries, in the order of `wanted`."""
        if self.collected_hidden_states is None or tuple(collected) == tuple(wanted):
            return self
        indices = [collected.index(layer) for layer in wanted]
        return replace(self, collected_hidden_states=self.collected_hidden_states[indices] if indices else None)


RESERVED_NAMES = ("none", "auto", "grammar")


def check_drafter(drafter: "Drafter") -> None:
    """Check the name, needs and traits of a drafter object.

    Raises:
        ConfigError: one is missing, has another type, or cannot be read.
    """
    kind = type(drafter).__name__
    try:
        given: tuple[Any, Any, Any] = drafter.name, drafter.needs, drafter.traits
    except Exception as error:
        text = f"name, needs and traits of the drafter {kind} cannot be read ({type(error).__name__}: {error}): set them"
        raise ConfigError(text) from error
    name, needs, traits = given
    if not isinstance(name, str) or not name or not name.isprintable() or "+" in name or name in RESERVED_NAMES:
        reserved = ", ".join(RESERVED_NAMES)
        raise ConfigError(f"the drafter {kind} is called {name!r}: use a printable text without '+' that is none of {reserved}")
    if not isinstance(needs, DrafterNeeds):
        raise ConfigError(f"needs of the drafter {name!r} is {needs!r}: use DrafterNeeds")
    is_usable = isinstance(traits, DrafterTraits) and not isinstance(traits.notices, str)
    texts: list[Any] = [traits.description, *traits.notices] if is_usable else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"traits of the drafter {name!r} is {traits!r}: use DrafterTraits with a text and a list of texts")


class RequestState(Generic[StateT]):
    """A drafter's state by request. The entries are stored in the requests, so that they end with them and no other request sees them."""

    __slots__ = ()

    def get(self, request: Request) -> StateT | None:
        """The state of a request, or None."""
        state: StateT | None = request.drafting.get(self)
        return state

    def __getitem__(self, request: Request) -> StateT:
        state: StateT = request.drafting[self]
        return state

    def __setitem__(self, request: Request, state: StateT) -> None:
        request.drafting[self] = state

    def pop(self, request: Request) -> StateT | None:
        """Remove and return the state of a request, or None."""
        state: StateT | None = request.drafting.pop(self, None)
        return state


class Drafter(ABC):
    """Drafts the next tokens of a batch of requests.

    In every step the engine calls `has_candidates` and `prefill_s`, `propose` before the target's pass, and `observe` after it; `release`
    when a request ends or its cache rows are evicted. Whatever a drafter raises, requests go on: the step is plain and counted.
    A drafter never uses one request's tokens to draft for another. State of a request belongs in a `RequestState`.

    Attributes:
        name: by which requests select it, and which its drafts carry.
        needs: target activations to observe; fixed before the target is loaded.
        traits: description, notices and memory.
    """

    name: str
    needs: DrafterNeeds = DrafterNeeds()
    traits: DrafterTraits = DrafterTraits()

    @abstractmethod
    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        """Return a tree under each request's last token, or None for no draft. Trees that exceed the budget are trimmed."""

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        """Take the rows that a target pass made permanent, prompt chunks included. Work may be deferred to `propose`."""

    def has_candidates(self, request: Request) -> bool:
        """Return whether there is anything to draft from; called in every step, so it must take microseconds."""
        return True

    def prefill_s(self, request: Request) -> float:
        """Return the seconds that the next draft takes longer because text of the request was not read yet; must take microseconds."""
        return 0.0

    def release(self, request: Request) -> None:
        """Free what is held for a request outside of it, such as cache blocks. May be called twice, or for requests never seen."""
