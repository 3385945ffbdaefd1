"""Drafting with pairs: a small decoder over the target's own features guesses token after token, and continues its features itself.

Sources: EAGLE (Li et al. 2024, arXiv:2401.15077), EAGLE-2 (arXiv:2406.16858), EAGLE-3 (Li et al. 2025, arXiv:2503.01840). Deviations: every
kept token is the target's own draw (`speculation/verify.py`); sampled requests draft a chain with the target's noise; a draft sees the
last pairs only, as many as the head was trained for.

One step of a request with root x_n: the pairs of what was committed since the last draft run with the target's features (catch-up); the
last of them, (x_n, f_(n-1)), says what follows the root. Then level by level, for all requests together: the best guesses become pairs
with the head's own outputs as features. Their rows are overwritten by true pairs later.
"""

from collections.abc import Sequence
from itertools import accumulate

from paceline.drafters.pairs.cache import SPARE_BLOCKS, PairCache, PairRows
from paceline.drafters.pairs.guesses import Guesses
from paceline.drafters.pairs.head import PairHead, PairOutputs
from paceline.drafters.pairs.tree import GrowingDraft, draws_of, shape_of
from paceline.kv_cache.paged import KVCache
from paceline.runtimes.base import FloatArray, split_into_passes
from paceline.runtimes.ranking import Draws
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds, DrafterTraits
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

FLUSH_ROWS = 32  # pairs that wait before they are run without a draft


class PairDrafter(Drafter):
    """Drafts with a head that takes pairs.

    Args:
        cache: the target's; the head's pairs are kept in step with it.
        vocab_size: V of the target; ids beyond it are never proposed.
        tree_width: guesses per node, and nodes expanded per level; 1 = a chain.
        collected: the boundaries the target collects, those of the head among them; None = just these.
        notices: what a user should know, besides the head's own.
    """

    def __init__(
        self,
        head: PairHead,
        cache: KVCache,
        *,
        vocab_size: int,
        tree_width: int = 1,
        collected: tuple[int, ...] | None = None,
        notices: Sequence[str] = (),
    ) -> None:
        config = head.config
        collected = config.boundaries if collected is None or not config.boundaries else collected
        self.name = config.kind.value
        self.needs = DrafterNeeds(hidden_states=not config.boundaries, layers=collected)
        self.head = head
        self.pairs = PairCache(head.runtime, cache, feature_size=config.num_features, window=config.layers.max_positions)
        self._guesses = Guesses(head.target_ids, vocab_size, head.embedded_ids)
        self._tree_width = tree_width
        head.rank(self._guesses.ranking(tree_width))
        self.traits = DrafterTraits(self._describe(), notices=(*head.notices, *notices), cache_bytes_per_token=self.pairs.bytes_per_token)
        self._chosen = None if collected == config.boundaries else [collected.index(boundary) for boundary in config.boundaries]

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        behind = []
        for one in rows:
            num_waiting = self.pairs.observe(one.request, one.start, self._features(one))
            if num_waiting > FLUSH_ROWS or one.request.is_finished:
                behind.append(one.request)
        self._catch_up(behind)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        trees: dict[int, DraftTree | None] = {}
        for part in split_into_passes(zip(requests, budgets, strict=True), lambda one: self._most_rows(*one)):
            group: list[tuple[PairRows, GrowingDraft]] = []
            num_spares = 0
            for request, budget in part:
                depth, width = shape_of(budget, self._tree_width)
                num_drafted = self._num_drafted(depth, width)
                needed = self.pairs.num_spares(request, num_drafted)
                if depth < 1 or needed > SPARE_BLOCKS:
                    continue
                if num_spares + needed > SPARE_BLOCKS:
                    trees |= self._draft(group)
                    group, num_spares = [], 0
                pairs = self.pairs.waiting_rows(request, with_root=True, num_drafted=num_drafted, spares=num_spares)
                if pairs is None or max(pairs.token_ids.tolist()) >= self.head.embedded_ids:
                    continue
                num_spares += needed
                group.append((pairs, GrowingDraft(request, budget, depth, width, pairs.rows.block_table, pairs.rows.first_slot)))
            trees |= self._draft(group)
        return [trees.get(id(request)) for request in requests]

    def release(self, request: Request) -> None:
        self.pairs.release(request)

    def _describe(self) -> str:
        config = self.head.config
        layers = config.layers
        parts = [f"{layers.num_layers} layer{'s' if layers.num_layers > 1 else ''}", f"hidden size {layers.hidden_size}"]
        if config.boundaries:
            parts.append(f"features of layers {', '.join(map(str, config.boundaries))}")
        if self.head.target_ids is not None:
            parts.append(f"{len(self.head.target_ids)} draft ids")
        if self.head.num_ids is not None:
            parts.append(f"guesses ids below {self.head.num_ids}")
        if self._tree_width > 1:
            parts.append(f"trees {self._tree_width} wide")
        return f"{self.name} ({', '.join(parts)}, sees the last {self.pairs.window} tokens)"

    def _most_rows(self, request: Request, budget: DraftBudget) -> int:
        """Rows of all drafting passes for a request."""
        return self._num_drafted(*shape_of(budget, self._tree_width)) + self.pairs.num_waiting(request)

    def _num_drafted(self, depth: int, width: int) -> int:
        """Rows behind the true pairs that a draft takes."""
        return depth if width == 1 else width * depth

    def _features(self, rows: CommittedRows) -> FloatArray:
        """[num_rows, F]"""
        collected = rows.collected_hidden_states
        if collected is not None and self.head.config.boundaries:
            chosen = collected if self._chosen is None else collected[self._chosen]
            return chosen.transpose(1, 0, 2).reshape(rows.num_rows, -1)
        if rows.hidden_states is None:
            raise RuntimeError(f"the target returned none of the activations that {self.name} reads")
        return rows.hidden_states

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Run waiting pairs that no draft has run."""
        group: list[PairRows] = []
        for request in requests:
            pairs = self.pairs.waiting_rows(request, with_root=False)
            if pairs is None or max(pairs.token_ids.tolist()) >= self.head.embedded_ids:
                continue
            group.append(pairs)
        for part in split_into_passes(group, lambda pairs: len(pairs.token_ids)):
            self._run_true(part, wants_logits=False)

    def _draft(self, group: Sequence[tuple[PairRows, GrowingDraft]]) -> dict[int, DraftTree | None]:
        if not group:
            return {}
        drafts = [draft for _, draft in group]
        outputs = self._run_true([pairs for pairs, _ in group], wants_logits=True, draws=draws_of(drafts))
        self._take(drafts, outputs)
        while active := [draft for draft in drafts if draft.frontier]:
            self._take(active, self.head.run_drafted([draft.next_rows() for draft in active], draws_of(active)))
        return {id(draft.request): draft.finished(self.name) for draft in drafts}

    def _take(self, drafts: Sequence[GrowingDraft], outputs: PairOutputs) -> None:
        """Hand out rows [nodes of all frontiers] to the drafts."""
        ranked, first = outputs.ranked(), 0
        for draft in drafts:
            last = first + len(draft.frontier)
            if draft.reads_ranks:
                is_greedy = draft.request.params.is_greedy
                guesses = [self._guesses.of_ranked(row, draft.width, is_greedy=is_greedy) for row in ranked[first:last]]
            else:
                guesses = [
                    self._guesses.next_token(draft.request, draft.path(node), row, draft.width, wants_draws=draft.budget.wants_draws)
                    for node, row in zip(draft.frontier, outputs.logits[first:last], strict=True)
                ]
            draft.take(guesses, outputs.features[first:last])
            first = last

    def _run_true(
        self, pairs: Sequence[PairRows], *, wants_logits: bool, num_masked: Sequence[int] = (), draws: Draws | None = None
    ) -> PairOutputs:
        """One pass; returned features are those of each request's last pair."""
        try:
            outputs = self.head.run_true(pairs, wants_logits=wants_logits, num_masked=num_masked, draws=draws)
        except BaseException:
            for one in pairs:  # an interrupted pass leaves no valid rows
                self.pairs.release(one.request)
            raise
        behind = num_masked or [0] * len(pairs)
        last = [end - 1 for end in accumulate(len(one.token_ids) + count for one, count in zip(pairs, behind, strict=True))]
        for one in pairs:
            self.pairs.keep(one.request, one.token_ids)
        return PairOutputs(outputs.output, outputs.features[last])
