"""A small language model as guesser.

Each step costs one draft pass per token of the chain; the first one also catches up on what the target committed since. A tree adds
siblings to a chain, from rows that the chain needs anyway; it grows by expected tokens per row, within the row budget. Tokens are picked
with the same `token` noise as the target's (Gumbel coupling, Daliri et al. 2024, arXiv:2408.07978, section 3), so that the two tend to
draw the same token; at temperature 0 both take the argmax. For rejection sampling, drafts are drawn with separate noise, and the tree
holds the distributions they were drawn from.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from time import perf_counter
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from paceline.drafters.pairs.guesses import NOTHING, Guessed, Guesses
from paceline.errors import CapacityError, RequestError
from paceline.kv_cache.paged import CachedSequence, KVCache
from paceline.kv_cache.row_plan import RowPlan, TreeLayout
from paceline.runtimes.base import FloatArray, Network, assemble, split_into_passes
from paceline.runtimes.ranking import DRAW, Draws, RankedRow
from paceline.sampling.noise import Purpose, noise_key
from paceline.sampling.residual import TokenProbs, draw_distinct
from paceline.speculation.drafter import DraftBudget, Drafter, DrafterTraits, RequestState
from paceline.speculation.reading import FREE_PREFILL_TOKENS, PrefillTime
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Candidate, growing_tree

CATCH_UP_ROWS = 256  # rows of one request in one catch-up pass

ResultT = TypeVar("ResultT")
Path: TypeAlias = Sequence[int]
"""Tokens from the root's child on."""


class DraftRow(NamedTuple):
    """The draft model's logits [V] after a path, and their ranking by the pass where no sampling parameter needs more."""

    logits: FloatArray
    ranked: RankedRow | None = None


Drafting: TypeAlias = Generator[Path, DraftRow | None, ResultT]
"""Generator of a draft, token by token. Yields the path after which it needs logits: () for the root, then each time the previous
path plus one token. Is sent that row, or None if there is none, and returns what was drafted."""


class IdTranslation(Protocol):
    """Carries tokens between a target and a draft model that has other ids for the same pieces."""

    def context(self, request: Request) -> Sequence[int]:
        """The draft model's ids of everything the request holds; later calls only append."""
        ...

    def target_row(self, row: FloatArray) -> FloatArray:
        """A draft row [V of the draft model] over the target's ids [V], -inf for those that cannot be drafted."""
        ...

    def draft_id(self, token_id: int) -> int:
        """The draft model's id of a target token that can be drafted."""
        ...


def chain(depth: int, pick: Callable[[DraftRow, Path], int | None]) -> Drafting[list[int]]:
    """One token per row, until `pick` returns None."""
    path: list[int] = []
    while len(path) < depth:
        row = yield path
        token = None if row is None else pick(row, path)
        if token is None:
            break
        path.append(token)
    return path


@dataclass(slots=True)
class _State:
    """A request's rows in the draft cache: the tokens they were computed from, in the draft model's ids."""

    sequence: CachedSequence
    token_ids: list[int] = field(default_factory=list)
    num_agreed: int = 0  # how many of them are known to match the request's text
    num_read: int = 0  # tokens of the request at its last draft; before the first one, those in the prefix cache


@dataclass(slots=True)
class _Draft(Generic[ResultT]):
    """One request's draft in progress.

    Attributes:
        pending: tokens of the next pass; none once the draft is finished.
        reads_ranks: whether what the pass finds in its rows is enough.
        truncates: whether top-k, top-p or min-p leave tokens out.
        level: rows it was given.
        result: once it is finished.
    """

    request: Request
    state: _State
    drafting: Drafting[ResultT]
    pending: list[int]
    reads_ranks: bool = False
    truncates: bool = False
    level: int = 0
    result: ResultT | None = None


class DraftModelDrafter(Drafter):
    """Drafts with a language model that has the target's token ids, or other ids and a translation.

    Args:
        runtime, cache: the draft model; only this drafter uses them.
        vocab_size: V of the target; draft ids beyond it are never proposed.
        num_known_ids: ids the draft model's tokenizer knows; its rows beyond them are padding, never proposed.
        translation: for a draft model with other ids.
        max_model_len: longest text the draft model is prepared for, in its own tokens; None = what it was made for.
        tree_width: guesses per position; 1 = a chain, else siblings of the chain's tokens, best first.
        note: what a user should know of the pair, for the banner.
        read_s: seconds to prefill one token of a long text; 0 = not measured yet.
    """

    name = "draft_model"

    def __init__(
        self,
        runtime: Network,
        cache: KVCache,
        *,
        vocab_size: int,
        num_known_ids: int | None = None,
        translation: IdTranslation | None = None,
        max_model_len: int | None = None,
        tree_width: int = 1,
        note: str = "",
        read_s: float = 0.0,
    ) -> None:
        self.runtime, self.cache = runtime, cache
        self._vocab_size = vocab_size
        self._num_known_ids = runtime.config.vocab_size if num_known_ids is None else num_known_ids
        self._translation = translation
        self.max_model_len = runtime.config.max_positions if max_model_len is None else max_model_len
        self._tree_width = tree_width
        self.traits = DrafterTraits(_description(runtime, tree_width, note), cache_bytes_per_token=cache.bytes_per_token)
        self._states = RequestState[_State]()
        self._reading = PrefillTime(read_s)
        self._guesses = Guesses(None, vocab_size, self._num_known_ids)
        self._ranking, self._truncated_ranking = self._guesses.ranking(tree_width), self._guesses.truncated_ranking(tree_width)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        drafts: list[_Draft[DraftTree | None] | None] = []
        for request, budget in zip(requests, budgets, strict=True):
            context = request.token_ids if self._translation is None else self._translation.context(request)
            depth = min(budget.max_depth, budget.row_budget - 1, self.max_model_len - len(context))
            draft = self._begin(request, context, len(context), depth, self._drafting(request, replace(budget, max_depth=depth)))
            if draft is not None:
                is_drawn = budget.wants_draws and not request.params.is_greedy
                draft.reads_ranks = self._translation is None and request.processor.leaves_rows and not is_drawn
                draft.truncates = request.processor.truncates
            drafts.append(draft)
        self._grow(requests, drafts)
        return [None if draft is None else draft.result for draft in drafts]

    def write(self, requests: Sequence[Request], contexts: Sequence[tuple[Sequence[int], int]], counts: Sequence[int]) -> list[list[int]]:
        """The draft model's most probable continuation of each context, in its own ids; empty where its context has no room.

        Args:
            contexts: ids of each request's whole text, and how many of them are unchanged since the last call.
            counts: tokens to write.
        """
        drafts: list[_Draft[list[int]] | None] = []
        for request, (context, num_unchanged), count in zip(requests, contexts, counts, strict=True):
            depth = min(count, self.max_model_len - len(context))
            writing = chain(depth, lambda row, _: int(np.argmax(row.logits[: self._num_known_ids])))
            drafts.append(self._begin(request, context, num_unchanged, depth, writing))
        self._grow(requests, drafts)
        return [draft.result or [] if draft is not None else [] for draft in drafts]

    def prefill_s(self, request: Request) -> float:
        return self._reading.of(len(request.token_ids) - self._state_of(request).num_read)

    def release(self, request: Request) -> None:
        state = self._states.pop(request)
        if state is not None:
            self.cache.release(state.sequence)

    def _begin(
        self, request: Request, context: Sequence[int], num_unchanged: int, depth: int, drafting: Drafting[ResultT]
    ) -> _Draft[ResultT] | None:
        if depth < 1 or not context:
            return None
        state = self._state_of(request)
        if not state.token_ids:  # rows in the prefix cache need not run again
            state.num_agreed = self.cache.adopt_prefix(state.sequence, context)
            state.token_ids.extend(context[: state.num_agreed])
        state.num_read = len(request.token_ids)
        self._drop_rejected(state, context, num_unchanged)
        self.cache.remember(state.sequence, state.token_ids)
        pending = list(context[len(state.token_ids) :])
        if max(pending) >= self.runtime.config.vocab_size:  # a token only the target knows
            return None
        next(drafting)  # the root's row comes first
        return _Draft(request, state, drafting, pending)

    def _state_of(self, request: Request) -> _State:
        """The request's state, created if new. With translated ids the prefix cache is not counted on."""
        state = self._states.get(request)
        if state is None:
            state = self._states[request] = _State(self.cache.new_sequence(request.prefix_salt))
            if self._translation is None:
                state.num_read = self.cache.count_prefix(state.sequence, request.token_ids)
        return state

    def _drop_rejected(self, state: _State, token_ids: Sequence[int], num_unchanged: int) -> None:
        """Keep the rows whose tokens the target committed; the root always runs again, for its logits."""
        agreed = min(state.num_agreed, num_unchanged)
        limit = min(len(state.token_ids), len(token_ids) - 1)
        while agreed < limit and state.token_ids[agreed] == token_ids[agreed]:
            agreed += 1
        state.num_agreed = self.cache.truncate(state.sequence, min(agreed, limit))
        del state.token_ids[state.num_agreed :]

    def _grow(self, requests: Sequence[Request], drafts: Sequence[_Draft[ResultT] | None]) -> None:
        """Run passes until every draft is finished."""
        active = [draft for draft in drafts if draft is not None]
        try:
            self._catch_up(active)
            while active := [draft for draft in active if draft.pending]:
                for part in split_into_passes(active, lambda draft: len(draft.pending)):
                    ran, found = self._run(part, [draft.pending for draft in part], wants_logits=True)
                    for draft, row in zip(ran, found, strict=True):
                        self._advance(draft, row)
        except BaseException:
            for request in requests:  # an interrupted pass leaves no valid rows
                self.release(request)
            raise

    def _catch_up(self, drafts: Sequence[_Draft[ResultT]]) -> None:
        """Run long prompts in chunks until one more pass reaches every root."""
        while behind := [draft for draft in drafts if len(draft.pending) > CATCH_UP_ROWS]:
            for part in split_into_passes(behind, lambda _: CATCH_UP_ROWS):
                ran, _ = self._run(part, [draft.pending[:CATCH_UP_ROWS] for draft in part], wants_logits=False)
                for draft in ran:
                    del draft.pending[:CATCH_UP_ROWS]
                    draft.state.num_agreed = len(draft.state.token_ids)  # all of them are the request's

    def _advance(self, draft: _Draft[ResultT], row: DraftRow | None) -> None:
        """Give a draft the row it waits for, None if there is none."""
        draft.level += 1
        try:
            token = draft.drafting.send(row)[-1]
            draft.pending = [token if self._translation is None else self._translation.draft_id(token)]
        except StopIteration as end:
            draft.pending, draft.result = [], end.value

    def _drafting(self, request: Request, budget: DraftBudget) -> Drafting[DraftTree | None]:
        if budget.wants_draws and not request.params.is_greedy:
            return self._drawn(request, budget)
        if self._tree_width == 1 or budget.layout is TreeLayout.CHAIN:
            return self._picked(request, budget)
        return self._grown(request, budget)

    def _picked(self, request: Request, budget: DraftBudget) -> Drafting[DraftTree | None]:
        """A chain of tokens that the target would draw if its rows were these; it ends where nothing is allowed, or nothing is expected."""
        path: list[int] = []
        probs: list[float] = []
        reached = 1.0
        while len(path) < budget.max_depth and reached >= budget.min_reach:
            row = yield path
            guessed = self._guessed(request, row, path, 1)
            if not guessed.token_ids:
                break
            path.append(guessed.token_ids[0])
            probs.append(guessed.probs[0])
            reached *= budget.rate(probs[-1])
        return DraftTree.chain(request.token_ids[-1], path, self.name, probs) if path else None

    def _grown(self, request: Request, budget: DraftBudget) -> Drafting[DraftTree | None]:
        """The same chain plus siblings, the next best tokens of its rows, by expected tokens per row of the target's pass."""
        root: Path | None = ()
        growth, reached = growing_tree(request.token_ids[-1], budget, root), 1.0
        try:
            path = next(growth)
            while True:
                # no row is wanted behind siblings, nor where a chain would end
                guesses = self._ranked(request, (yield path), path) if path is not None and reached >= budget.min_reach else []
                reached *= budget.rate(guesses[0][1]) if guesses else 1.0
                path = growth.send(guesses)
        except StopIteration as end:
            tree: DraftTree | None = end.value
            return tree

    def _drawn(self, request: Request, budget: DraftBudget) -> Drafting[DraftTree | None]:
        """Tokens drawn from the rows, with their distributions; the number of draws at a node does not depend on any draw."""
        token_ids: list[int] = []
        parents: list[int] = []
        draft_probs: dict[int, TokenProbs] = {}
        path, node = list[int](), 0
        key = request.seed, request.sample_index, len(request.token_ids)
        for count in _fan(self._tree_width, budget.max_depth, budget.row_budget, budget.layout):
            row = yield path
            if row is None:
                break
            try:
                draft_probs[node] = TokenProbs.of(request.processor.process(self._as_target_row(row.logits), path))
            except RequestError:  # no token is allowed
                break
            tokens = draw_distinct(draft_probs[node], count, *key, len(path))
            parents += [node] * len(tokens)
            node = len(token_ids) + 1
            token_ids += tokens
            path.append(tokens[0])
        return DraftTree.grow(request.token_ids[-1], token_ids, parents, self.name, draft_probs) if token_ids else None

    def _guessed(self, request: Request, row: DraftRow | None, path: Path, width: int) -> Guessed:
        """The token the target would draw if its row were this one, and the best others, each with its probability."""
        if row is None:
            return NOTHING
        ranked = row.ranked
        if ranked is not None and math.isfinite(ranked.log_sum):
            if not request.processor.truncates:
                return self._guesses.of_ranked(ranked, width, is_greedy=request.params.is_greedy)
            guessed = self._guesses.of_truncated(request, path, ranked, width)
            if guessed is not None:
                return guessed
        try:
            return self._guesses.of_target_row(request, path, self._as_target_row(row.logits), width, wants_draws=False)
        except RequestError:  # no token is allowed
            return NOTHING

    def _ranked(self, request: Request, row: DraftRow | None, path: Path) -> list[Candidate[Path | None]]:
        """The same as guesses: of the first one the row behind it will be wanted."""
        guessed = self._guessed(request, row, path, self._tree_width)
        return [
            (token, prob, self.name, None if rank else (*path, token))
            for rank, (token, prob) in enumerate(zip(guessed.token_ids, guessed.probs, strict=True))
        ]

    def _as_target_row(self, row: FloatArray) -> FloatArray:
        """The row over the target's ids: padding cropped, or added as -inf."""
        if self._translation is not None:
            return self._translation.target_row(row)
        row = row[: min(self._vocab_size, self._num_known_ids)]
        if len(row) == self._vocab_size:
            return row
        return np.concatenate([row, np.full(self._vocab_size - len(row), -np.inf, np.float32)])

    def _run(
        self, drafts: Sequence[_Draft[ResultT]], token_ids: Sequence[list[int]], *, wants_logits: bool
    ) -> tuple[list[_Draft[ResultT]], list[DraftRow]]:
        """One pass of the draft model; a draft that gets no cache block grows no further.

        Returns:
            the drafts that ran, and the last row of each.
        """
        ran, plans, rows = list[_Draft[ResultT]](), list[RowPlan](), list[list[int]]()
        for draft, ids in zip(drafts, token_ids, strict=True):
            try:
                # The last row of a text may be cut and run again, for its logits; those before it are agreed.
                num_known = len(ids) - wants_logits if len(ids) > 1 else 1
                state = draft.state
                plans.append(self.cache.reserve(state.sequence, range(-1, len(ids) - 1), num_known, num_firm=state.num_agreed))
            except CapacityError:
                self._advance(draft, None)
                self.release(draft.request)
                continue
            ran.append(draft)
            rows.append(ids)
        wanted = [[len(ids) - 1] if wants_logits else [] for ids in rows]
        if not ran:
            return ran, []
        start = perf_counter()
        inputs, batch, asked = assemble(plans, rows, wanted)
        is_ranked = wants_logits and any(draft.reads_ranks for draft in ran)
        if is_ranked:
            truncates = any(draft.truncates and draft.reads_ranks for draft in ran)
            asked = asked._replace(ranking=self._truncated_ranking if truncates else self._ranking, draws=_draws_of(ran))
        output = self.runtime.forward(inputs, batch, asked)
        num_rows = sum(map(len, rows))
        if num_rows > FREE_PREFILL_TOKENS * len(rows):
            self._reading.observe(num_rows, perf_counter() - start)
        for draft, ids in zip(ran, rows, strict=True):
            self.cache.keep_path(draft.state.sequence, len(ids) - 1)
            draft.state.token_ids.extend(ids)
        if not wants_logits:
            return ran, []
        ranked = output.ranked if is_ranked else [None] * len(ran)
        return ran, [
            DraftRow(logits, found if draft.reads_ranks else None) for draft, logits, found in zip(ran, output.logits, ranked, strict=True)
        ]


def _description(runtime: Network, tree_width: int, note: str) -> str:
    num_layers = runtime.config.num_layers
    layers = f"{num_layers} layer{'s' if num_layers > 1 else ''}"
    shape = "" if tree_width == 1 else f", {tree_width} tokens a position"
    return f"draft_model ({layers}, hidden size {runtime.config.hidden_size}{shape}{note})"


def _draws_of(drafts: Sequence[_Draft[ResultT]]) -> Draws | None:
    """How the next token of each draft is drawn."""
    if not any(draft.reads_ranks and not draft.request.params.is_greedy for draft in drafts):
        return None
    draws = np.zeros(len(drafts), DRAW)
    for index, draft in enumerate(drafts):
        request = draft.request
        if draft.reads_ranks and not request.params.is_greedy:
            key = noise_key(request.seed, request.sample_index, len(request.token_ids) + draft.level, Purpose.TOKEN)
            draws[index] = (key, request.params.temperature, 0)
    return draws


@lru_cache(maxsize=256)
def _fan(width: int, depth: int, row_budget: int, layout: TreeLayout) -> tuple[int, ...]:
    """Guesses per level of a chain with `width` - 1 siblings beside each token, within `row_budget` rows."""
    parents = [1 + (level - 1) * width if level else 0 for level in range(depth) for _ in range(width)]
    tree = DraftTree.grow(0, [*range(width)] * depth, parents, "").trim(
        vocab_size=width, max_depth=depth, row_budget=row_budget, layout=layout
    )
    return tuple(tree.depths.count(level) for level in range(1, tree.tree_depth + 1))
