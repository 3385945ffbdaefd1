"""A small language model as guesser.

Each step costs as many draft passes as tokens are drafted: the first one also catches up on what the target committed since. Tokens are
picked with the same `token` noise as the target's (Gumbel coupling, Daliri et al. 2024, arXiv:2408.07978, section 3), so that the
two tend to draw the same token; at temperature 0 both take their argmax. Where drafts are kept by rejection they are drawn with noise of
their own, and the tree says from which law.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from paceline.errors import CapacityError, RequestError
from paceline.kv_cache.paged import CachedSequence, KVCache
from paceline.kv_cache.row_plan import RowPlan
from paceline.runtimes.base import FloatArray, Runtime, assemble
from paceline.sampling.draw import draw
from paceline.sampling.processors import Distribution
from paceline.sampling.residual import TokenProbs, draw_distinct
from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

CATCH_UP_ROWS = 256  # rows of one request in one catch-up pass


class IdTranslation(Protocol):
    """Carries tokens between a target and a draft model that has other ids for the same pieces."""

    def context(self, request: Request) -> Sequence[int]:
        """The draft model's ids of everything the request holds; from call to call it grows at its end only."""
        ...

    def target_row(self, row: FloatArray) -> FloatArray:
        """A draft row [V of the draft model] over the target's ids [V], -inf for those that cannot be drafted."""
        ...

    def draft_id(self, token_id: int) -> int:
        """The draft model's id of a target token that can be drafted."""
        ...

    def release(self, request: Request) -> None:
        """Forget a request; also called for requests never seen."""
        ...


@dataclass(slots=True)
class _State:
    """A request's rows in the draft cache: the tokens they were computed from, in the draft model's ids."""

    sequence: CachedSequence
    token_ids: list[int] = field(default_factory=list)
    num_agreed: int = 0  # of them, how many are known to be those of the request's text


@dataclass(slots=True)
class _Draft:
    """One request while its tree grows: a chain, and siblings of its nodes when the tree is wider."""

    request: Request
    state: _State
    depth: int
    pending: list[int]  # tokens of the next pass
    chain: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    tip: int = 0  # node of the chain's last token
    wants_draws: bool = False
    draft_probs: dict[int, TokenProbs] = field(default_factory=dict)  # by node


class DraftModelDrafter(Drafter):
    """Drafts with a language model: one that has the target's ids, or one with others behind a translation.

    Args:
        runtime, cache: the draft model; only this drafter uses them.
        vocab_size: V of the target; draft ids beyond it are never proposed.
        num_known_ids: ids the draft model's tokenizer knows; its rows beyond them are padding, never proposed.
        translation: for a draft model with other ids.
        max_context: longest text the draft model is prepared for, in its own tokens; None = what it was made for.
        tree_width: guesses a position; 1 = a chain, else siblings of the chain's tokens, best first.
        note: what a user should know of the pair, for the banner.
    """

    name = "draft_model"

    def __init__(
        self,
        runtime: Runtime,
        cache: KVCache,
        *,
        vocab_size: int,
        num_known_ids: int | None = None,
        translation: IdTranslation | None = None,
        max_context: int | None = None,
        tree_width: int = 1,
        note: str = "",
    ) -> None:
        self.runtime, self.cache = runtime, cache
        self.cache_bytes_per_token = cache.storage.nbytes // max(1, cache.max_slots)
        self._vocab_size = vocab_size
        self._num_known_ids = runtime.config.vocab_size if num_known_ids is None else num_known_ids
        self._translation = translation
        self._max_context = runtime.config.max_positions if max_context is None else max_context
        self._tree_width = tree_width
        self._note = note
        self._states: dict[int, _State] = {}

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        drafts = []
        for request, budget in zip(requests, budgets, strict=True):
            context = request.token_ids if self._translation is None else self._translation.context(request)
            draft = self._begin(request, context, len(context), min(budget.max_depth, budget.row_budget - 1))
            if draft is not None:
                draft.wants_draws = budget.wants_draws
            drafts.append(draft)
        self._grow(requests, drafts, self._pick)
        return [None if draft is None or not draft.chain else self._tree(draft) for draft in drafts]

    def write(self, requests: Sequence[Request], contexts: Sequence[tuple[Sequence[int], int]], counts: Sequence[int]) -> list[list[int]]:
        """The draft model's most probable continuation of each context, in its own ids; empty where its context has no room.

        Args:
            contexts: ids of each request's whole text, and how many of them are as they were in the call before.
            counts: tokens to write.
        """
        drafts = [
            self._begin(request, context, num_unchanged, count)
            for request, (context, num_unchanged), count in zip(requests, contexts, counts, strict=True)
        ]
        self._grow(requests, drafts, lambda _, row: [int(np.argmax(row[: self._num_known_ids]))])
        return [[] if draft is None else draft.chain for draft in drafts]

    def release(self, request: Request) -> None:
        state = self._states.pop(id(request), None)
        if state is not None:
            self.cache.release(state.sequence)
        if self._translation is not None:
            self._translation.release(request)

    def describe(self) -> str:
        shape = "" if self._tree_width == 1 else f", {self._tree_width} guesses a position"
        return f"draft_model ({self.runtime.config.num_layers} layers, hidden size {self.runtime.config.hidden_size}{shape}{self._note})"

    def _begin(self, request: Request, context: Sequence[int], num_unchanged: int, depth: int) -> _Draft | None:
        depth = min(depth, self._max_context - len(context))
        if depth < 1 or not context:
            return None
        state = self._states.get(id(request))
        if state is None:
            state = self._states[id(request)] = self._new_state(request, context)
        self._drop_rejected(state, context, num_unchanged)
        self.cache.remember(state.sequence, state.token_ids, salt=request.salt)
        pending = list(context[len(state.token_ids) :])
        if max(pending) >= self.runtime.config.vocab_size:  # a token only the target knows
            return None
        return _Draft(request, state, depth, pending)

    def _new_state(self, request: Request, context: Sequence[int]) -> _State:
        """That of a request not seen before; rows of others that began with the same text need not run again."""
        sequence = self.cache.new_sequence()
        num_cached = self.cache.adopt_prefix(sequence, context, salt=request.salt)
        return _State(sequence, list(context[:num_cached]), num_cached)

    def _drop_rejected(self, state: _State, token_ids: Sequence[int], num_unchanged: int) -> None:
        """Keep the rows whose tokens the target committed; the root always runs again, for its logits."""
        agreed = min(state.num_agreed, num_unchanged)
        limit = min(len(state.token_ids), len(token_ids) - 1)
        while agreed < limit and state.token_ids[agreed] == token_ids[agreed]:
            agreed += 1
        agreed = min(agreed, limit)
        del state.token_ids[agreed:]
        state.num_agreed = agreed
        self.cache.truncate(state.sequence, agreed)

    def _grow(self, requests: Sequence[Request], drafts: Sequence[_Draft | None], pick: Callable[[_Draft, FloatArray], list[int]]) -> None:
        active = [draft for draft in drafts if draft is not None]
        try:
            self._catch_up(active)
            while active := [draft for draft in active if len(draft.chain) < draft.depth]:
                self._advance(active, pick)
        except Exception:
            for request in requests:  # a pass that broke off leaves no rows to trust
                self.release(request)
            raise

    def _catch_up(self, drafts: Sequence[_Draft]) -> None:
        """Run long prompts in chunks until one more pass reaches every root."""
        while behind := [draft for draft in drafts if len(draft.pending) > CATCH_UP_ROWS and draft.depth]:
            ran, _ = self._run(behind, [draft.pending[:CATCH_UP_ROWS] for draft in behind], wants_logits=False)
            for draft in ran:
                del draft.pending[:CATCH_UP_ROWS]

    def _advance(self, drafts: Sequence[_Draft], pick: Callable[[_Draft, FloatArray], list[int]]) -> None:
        """One pass: everybody's pending rows, one more token for each."""
        ran, logits = self._run(drafts, [draft.pending for draft in drafts], wants_logits=True)
        for draft, row in zip(ran, logits, strict=True):
            tokens = pick(draft, row)
            if not tokens:
                draft.depth = len(draft.chain)
                continue
            parent = draft.tip
            draft.tip = len(draft.token_ids) + 1
            draft.token_ids.extend(tokens)
            draft.parents.extend([parent] * len(tokens))
            draft.chain.append(tokens[0])
            draft.pending = [tokens[0] if self._translation is None else self._translation.draft_id(tokens[0])]

    def _pick(self, draft: _Draft, row: FloatArray) -> list[int]:
        """The token the target would draw if its row were this one, then the row's best others; nothing where nothing is allowed."""
        request = draft.request
        try:
            distribution = request.processor.process(self._as_target_row(row), draft.chain)
        except RequestError:
            return []
        if draft.wants_draws and not distribution.greedy:
            return self._draw(draft, distribution)
        position = len(request.token_ids) + len(draft.chain)
        first = draw(distribution, request.seed, request.sample_index, position)
        if self._tree_width == 1:
            return [first]
        best = np.argsort(-distribution.scores, kind="stable")[: self._tree_width]
        best = best[distribution.scores[best] > -np.inf]  # the rest cannot be drafted
        ids = best if distribution.token_ids is None else distribution.token_ids[best]
        return [first, *[int(token) for token in ids if token != first][: self._tree_width - 1]]

    def _draw(self, draft: _Draft, distribution: Distribution) -> list[int]:
        """Tokens drawn from the row, and the law they were drawn from kept for the tree."""
        request = draft.request
        probs = draft.draft_probs[draft.tip] = TokenProbs.of(distribution)
        key = request.seed, request.sample_index, len(request.token_ids)
        return draw_distinct(probs, self._tree_width, *key, len(draft.chain))

    def _tree(self, draft: _Draft) -> DraftTree:
        return DraftTree.grow(draft.request.token_ids[-1], draft.token_ids, draft.parents, self.name, draft.draft_probs)

    def _as_target_row(self, row: FloatArray) -> FloatArray:
        """The row over the target's ids: padding cropped, or added as -inf."""
        if self._translation is not None:
            return self._translation.target_row(row)
        row = row[: min(self._vocab_size, self._num_known_ids)]
        if len(row) == self._vocab_size:
            return row
        return np.concatenate([row, np.full(self._vocab_size - len(row), -np.inf, np.float32)])

    def _run(self, drafts: Sequence[_Draft], token_ids: Sequence[list[int]], *, wants_logits: bool) -> tuple[list[_Draft], FloatArray]:
        """One pass of the draft model; a draft for whose rows its cache has no block stays as long as it is.

        Returns:
            the drafts that ran, and the logits of the last row of each.
        """
        ran, plans, rows = list[_Draft](), list[RowPlan](), list[list[int]]()
        for draft, ids in zip(drafts, token_ids, strict=True):
            try:
                plans.append(self.cache.reserve(draft.state.sequence, range(-1, len(ids) - 1)))
            except CapacityError:
                draft.depth = len(draft.chain)
                self.release(draft.request)
                continue
            ran.append(draft)
            rows.append(ids)
        wanted = [[len(ids) - 1] if wants_logits else [] for ids in rows]
        if not ran:
            return ran, np.empty((0, 0), np.float32)
        output = self.runtime.forward(assemble(plans, rows, wanted))
        for draft, ids in zip(ran, rows, strict=True):
            self.cache.keep_path(draft.state.sequence, len(ids) - 1)
            draft.state.token_ids.extend(ids)
        return ran, output.logits
