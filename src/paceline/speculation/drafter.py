"""The interface of everything that guesses. A drafter can make us slow, never wrong: it is only asked, nothing it says is believed."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.kv_cache.row_plan import TreeLayout
from paceline.runtimes.base import FloatArray
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

StateT = TypeVar("StateT")


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """How much one request may draft this step.

    Attributes:
        row_budget: rows of the target pass, root included.
        max_depth: tokens from the root to the deepest node.
        layout: how the tree will be laid out, which decides what a branch costs (`num_rows` of kv_cache/row_plan.py).
        wants_draws: drafts are kept by `acceptance="rejection"`: a drafter with a distribution draws from it with `draft` noise
            (`paceline.sampling.residual.draw_distinct`) instead of the target's noise, and names it in `DraftTree.draft_probs`.
        max_reading_s: seconds that reading may take (`Drafter.reading_s`); a drafter that needs more is not asked.
        least_reach: chance of a path below which guessing further behind it is not worth the time; not for drawn guesses, which may not
            depend on what was drawn.
        chance_of: the chance of a guess by the drafter's own probability for it; None = that is the chance.
        copies_only: nothing but a copy, which takes next to no time, is worth its time now.
    """

    row_budget: int
    max_depth: int
    layout: TreeLayout = TreeLayout.PATHS
    wants_draws: bool = False
    max_reading_s: float = math.inf
    least_reach: float = 0.0
    chance_of: Callable[[float], float] | None = None
    copies_only: bool = False

    def chance(self, prob: float) -> float:
        """The chance that a guess is kept, once those before it are, by the drafter's own probability for it."""
        return prob if self.chance_of is None else self.chance_of(prob)


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """Target activations a drafter wants to observe.

    Attributes:
        hidden_states: the final hidden states.
        layers: boundaries to collect (fixed when the target is built).
    """

    hidden_states: bool = False
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CommittedRows:
    """Rows of one request that a target pass just made permanent.

    Attributes:
        request: whose rows; its `token_ids` already hold what the step emitted.
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


class RequestState(Generic[StateT]):
    """What a drafter remembers of each request: a dictionary by request, whose entries lie in the requests.

    So they end with the request, whether or not anybody releases it, and no other request can be given them.
    """

    __slots__ = ()

    def get(self, request: Request) -> StateT | None:
        """None where nothing is remembered."""
        state: StateT | None = request.drafting.get(self)
        return state

    def __getitem__(self, request: Request) -> StateT:
        state: StateT = request.drafting[self]
        return state

    def __setitem__(self, request: Request, state: StateT) -> None:
        request.drafting[self] = state

    def pop(self, request: Request) -> StateT | None:
        """The same as `get`, and forget it."""
        state: StateT | None = request.drafting.pop(self, None)
        return state


class Drafter(ABC):
    """Guesses next tokens for a batch of requests. What it remembers of one it keeps in a `RequestState`.

    Called by the engine in this order, every step: `propose` before the target pass, `observe` after it; `release` when a request
    ends, however it ends. Nothing a drafter raises reaches a user's request: the step becomes a plain one and is counted.
    A drafter never reads one request's tokens while guessing for another.
    """

    name: str
    needs: DrafterNeeds = DrafterNeeds()
    cache_bytes_per_token: int = 0
    reads_predictions: bool = False
    """Whether a request's `hints.prediction_token_ids` are of use; requests that carry some are refused where they are not."""
    stops_early: bool = True
    """Whether it stops guessing by `DraftBudget.least_reach` and `chance`; where not, these are not worked out for it."""
    is_copier: bool = False
    """Whether it copies what was said before, in next to no time."""
    notices: Sequence[str] = ()
    """Lines a user should see at load."""

    @abstractmethod
    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        """A tree under each request's last token, or None for a plain step. May exceed the budget; the step trims it."""

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        """Told after every target pass, prompt chunks included. May defer its work to `propose`."""

    def reading_s(self, request: Request) -> float:
        """Seconds that guessing for a request would take now beyond what a guess takes: for reading what was not seen of it.

        Asked before every proposal, so it must cost next to nothing.
        """
        return 0.0

    def time_guess(self) -> float:
        """Seconds that one more guess of a request takes, measured now, at load; 0 = next to nothing, or it is learned as it goes."""
        return 0.0

    def can_guess(self, request: Request) -> bool:
        """Whether it may guess for a request now; where not, it is not asked. Asked in every step, so it must cost next to nothing."""
        return True

    def can_copy(self, request: Request) -> bool:
        """Whether it can guess for a request in next to no time, although its other guesses take longer."""
        return False

    def timed_depth(self, deepest: int) -> int | None:
        """The depth of guesses that the last proposal's time is of, whose deepest guess was `deepest`; None = only copies were asked for,
        whose time says nothing of other guesses."""
        return deepest

    def may_guess(self, request: Request, max_reading_s: float) -> bool:
        """Whether it can guess for a request without reading for longer than this."""
        return max_reading_s == math.inf or self.reading_s(request) <= max_reading_s

    def preempt(self, request: Request) -> None:
        """The target's rows of a request were dropped: they will be observed again from some block border on. Releases it by default."""
        self.release(request)

    def release(self, request: Request) -> None:
        """Give back what is held for a request outside of it, such as blocks of a cache: what lies with the request goes with it.

        Also called for requests never seen, and more than once.
        """

    def describe(self) -> str:
        """One line for the banner at load."""
        return self.name
