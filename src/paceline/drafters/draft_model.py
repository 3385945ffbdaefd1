"""A small language model as guesser.

Each step costs as many draft passes as tokens are drafted: the first one also catches up on what the target committed since. Tokens are
picked with the same `token` noise as the target's (Gumbel coupling, Daliri et al. 2024, arXiv:2408.07978, section 3), so that the
two tend to draw the same token; at temperature 0 both take their argmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.kv_cache.paged import CachedSequence, KVCache
from paceline.runtimes.base import FloatArray, Runtime, assemble
from paceline.sampling.draw import draw
from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

CATCH_UP_ROWS = 256  # rows of one request in one catch-up pass


@dataclass(slots=True)
class _State:
    """A request's rows in the draft cache: the tokens they were computed from."""

    sequence: CachedSequence
    token_ids: list[int] = field(default_factory=list)
    num_agreed: int = 0  # of them, how many are known to be the request's


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


class DraftModelDrafter(Drafter):
    """Drafts with a language model whose vocabulary has the target's ids.

    Args:
        runtime, cache: the draft model; only this drafter uses them.
        vocab_size: V of the target; draft ids beyond it are never proposed.
        tree_width: guesses a position; 1 = a chain, else siblings of the chain's tokens, best first.
    """

    name = "draft_model"

    def __init__(self, runtime: Runtime, cache: KVCache, *, vocab_size: int, tree_width: int = 1) -> None:
        self.runtime, self.cache = runtime, cache
        self.cache_bytes_per_token = cache.storage.nbytes // max(1, cache.max_slots)
        self._vocab_size = vocab_size
        self._tree_width = tree_width
        self._states: dict[int, _State] = {}

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        drafts = [self._begin(request, budget) for request, budget in zip(requests, budgets, strict=True)]
        active = [draft for draft in drafts if draft is not None]
        try:
            self._catch_up(active)
            while active:
                self._advance(active)
                active = [draft for draft in active if len(draft.chain) < draft.depth]
        except Exception:
            for request in requests:  # a pass that broke off leaves no rows to trust
                self.release(request)
            raise
        return [None if d is None else DraftTree.grow(d.request.token_ids[-1], d.token_ids, d.parents, self.name) for d in drafts]

    def release(self, request: Request) -> None:
        state = self._states.pop(id(request), None)
        if state is not None:
            self.cache.release(state.sequence)

    def describe(self) -> str:
        shape = "" if self._tree_width == 1 else f", {self._tree_width} guesses a position"
        return f"draft_model ({self.runtime.config.num_layers} layers, hidden size {self.runtime.config.hidden_size}{shape})"

    def _begin(self, request: Request, budget: DraftBudget) -> _Draft | None:
        room = self.runtime.config.max_positions - len(request.token_ids)
        depth = min(budget.max_depth, budget.row_budget - 1, room)
        if depth < 1:
            return None
        state = self._states.get(id(request))
        if state is None:
            state = self._states[id(request)] = _State(self.cache.new_sequence())
        self._drop_rejected(state, request.token_ids)
        pending = list(request.token_ids[len(state.token_ids) :])
        if max(pending) >= self.runtime.config.vocab_size:  # a token only the target knows
            return None
        return _Draft(request, state, depth, pending)

    def _drop_rejected(self, state: _State, token_ids: Sequence[int]) -> None:
        """Keep the rows whose tokens the target committed; the root always runs again, for its logits."""
        agreed = state.num_agreed
        limit = min(len(state.token_ids), len(token_ids) - 1)
        while agreed < limit and state.token_ids[agreed] == token_ids[agreed]:
            agreed += 1
        del state.token_ids[agreed:]
        state.num_agreed = agreed
        self.cache.truncate(state.sequence, agreed)

    def _catch_up(self, drafts: Sequence[_Draft]) -> None:
        """Run long prompts in chunks until one more pass reaches every root."""
        while behind := [draft for draft in drafts if len(draft.pending) > CATCH_UP_ROWS]:
            self._run(behind, [draft.pending[:CATCH_UP_ROWS] for draft in behind], wants_logits=False)
            for draft in behind:
                del draft.pending[:CATCH_UP_ROWS]

    def _advance(self, drafts: Sequence[_Draft]) -> None:
        """One pass: everybody's pending rows, one more token for each."""
        logits = self._run(drafts, [draft.pending for draft in drafts], wants_logits=True)
        for draft, row in zip(drafts, logits, strict=True):
            tokens = self._pick(draft, self._as_target_row(row))
            parent = draft.tip
            draft.tip = len(draft.token_ids) + 1
            draft.token_ids.extend(tokens)
            draft.parents.extend([parent] * len(tokens))
            draft.chain.append(tokens[0])
            draft.pending = [tokens[0]]

    def _pick(self, draft: _Draft, row: FloatArray) -> list[int]:
        """The token the target would draw if its row were this one, then the row's best others."""
        request = draft.request
        distribution = request.processor.process(row, draft.chain)
        position = len(request.token_ids) + len(draft.chain)
        first = draw(distribution, request.seed, request.sample_index, position)
        if self._tree_width == 1:
            return [first]
        best = np.argsort(-distribution.scores, kind="stable")[: self._tree_width]
        ids = best if distribution.token_ids is None else distribution.token_ids[best]
        return [first, *[int(token) for token in ids if token != first][: self._tree_width - 1]]

    def _as_target_row(self, row: FloatArray) -> FloatArray:
        """The row over the target's ids: padding cropped, or added as -inf."""
        if len(row) >= self._vocab_size:
            return row[: self._vocab_size]
        return np.concatenate([row, np.full(self._vocab_size - len(row), -np.inf, np.float32)])

    def _run(self, drafts: Sequence[_Draft], token_ids: Sequence[list[int]], *, wants_logits: bool) -> FloatArray:
        plans = [self.cache.reserve(draft.state.sequence, range(-1, len(ids) - 1)) for draft, ids in zip(drafts, token_ids, strict=True)]
        wanted = [[len(ids) - 1] if wants_logits else [] for ids in token_ids]
        output = self.runtime.forward(assemble(plans, token_ids, wanted))
        for draft, ids in zip(drafts, token_ids, strict=True):
            self.cache.keep_path(draft.state.sequence, len(ids) - 1)
            draft.state.token_ids.extend(ids)
        return output.logits
