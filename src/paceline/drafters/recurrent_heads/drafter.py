"""Drafter of heads that feed themselves: a small decoder over the target's features drafts token after token.

One step of a request with root x_n: the pairs of the tokens committed since the last draft run with the target's features (catch-up). The
last of them, (x_n, f_(n-1)), gives the first level. Each further level runs, for all requests together, the best draft tokens paired with
the head's own output features. True pairs overwrite these rows later.

Sources: EAGLE (Li et al. 2024, arXiv:2401.15077), EAGLE-2 (arXiv:2406.16858), EAGLE-3 (Li et al. 2025, arXiv:2503.01840). Deviations: every
kept token is the target's own draw (`speculation/verify.py`); sampled requests draft with the target's noise; a draft attends to as many of
the last pairs as the head was trained with.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from paceline.drafters.draft_sampler import DraftSampler, DraftTokens, token_draws
from paceline.drafters.recurrent_heads.cache import SPARE_BLOCKS, PairCache, RequestTruePairs
from paceline.drafters.recurrent_heads.head import PairOutputs, RecurrentHead
from paceline.drafters.recurrent_heads.tree import GrowingDraft, draft_depth_and_width, frontier_draws
from paceline.kv_cache.cache import KVCache
from paceline.runtimes.base import FloatArray, split_into_passes
from paceline.runtimes.logits_summary import LogitsSummary, RowSampling
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds, DrafterTraits
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

MAX_PENDING_PAIRS = 32  # with more pending pairs, `observe` runs them without a draft


class EagleStyleDrafter(Drafter):
    """Drafts with a head that takes pairs of token and feature.

    Args:
        cache: the target's; the head's rows are in the same blocks.
        vocab_size: V of the target; ids beyond it are never proposed.
        tree_width: draft tokens per node, and nodes expanded per level; 1 = a chain.
    """

    def __init__(self, head: RecurrentHead, cache: KVCache, *, vocab_size: int, tree_width: int = 1) -> None:
        config = head.config
        self.name = config.kind.value
        self.needs = DrafterNeeds(hidden_states=not config.boundaries, layers=config.boundaries)
        self.head = head
        self.pairs = PairCache(head.runtime, cache, feature_size=config.num_features, window=config.layers.max_positions)
        self._sampler = DraftSampler(head.target_ids, vocab_size, head.embedded_ids)
        self._tree_width = tree_width
        head.set_ranking(self._sampler.ranking(tree_width))
        self.traits = DrafterTraits(self._banner_text(), notices=head.notices, cache_bytes_per_token=self.pairs.bytes_per_token)

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        late = []
        for one in rows:
            num_pending = self.pairs.append_features(one.request, one.start, self._features(one))
            if num_pending > MAX_PENDING_PAIRS or one.request.is_finished:
                late.append(one.request)
        self._catch_up(late)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        trees: dict[int, DraftTree | None] = {}
        for part in split_into_passes(zip(requests, budgets, strict=True), lambda one: self._max_draft_rows(*one)):
            group: list[tuple[RequestTruePairs, GrowingDraft]] = []
            num_spares = 0
            for request, budget in part:
                depth, width = draft_depth_and_width(budget, self._tree_width)
                num_draft_rows = self._num_draft_slots(depth, width)
                needed = self.pairs.num_spare_blocks_needed(request, num_draft_rows)
                if depth < 1 or needed > SPARE_BLOCKS:
                    continue
                if num_spares + needed > SPARE_BLOCKS:
                    trees |= self._draft(group)
                    group, num_spares = [], 0
                pairs = self.pairs.pending_pairs(request, with_root=True, num_draft_rows=num_draft_rows, num_used_spare_blocks=num_spares)
                if pairs is None or max(pairs.token_ids.tolist()) >= self.head.embedded_ids:
                    continue
                num_spares += needed
                group.append((pairs, GrowingDraft(request, budget, depth, width, pairs.rows.block_table, pairs.rows.first_slot)))
            trees |= self._draft(group)
        return [trees.get(id(request)) for request in requests]

    def release(self, request: Request) -> None:
        self.pairs.release(request)

    def _banner_text(self) -> str:
        config = self.head.config
        layers = config.layers
        parts = [f"{layers.num_layers} layer{'s' if layers.num_layers > 1 else ''}", f"hidden size {layers.hidden_size}"]
        if config.boundaries:
            parts.append(f"features of layers {', '.join(map(str, config.boundaries))}")
        if self.head.target_ids is not None:
            parts.append(f"{len(self.head.target_ids)} draft ids")
        if self.head.draft_vocab_size is not None:
            parts.append(f"drafts ids below {self.head.draft_vocab_size}")
        if self._tree_width > 1:
            parts.append(f"trees {self._tree_width} wide")
        return f"{self.name} ({', '.join(parts)}, sees the last {self.pairs.window} tokens)"

    def _max_draft_rows(self, request: Request, budget: DraftBudget) -> int:
        """Return the maximum number of rows that a request takes in the passes of one draft."""
        return self._num_draft_slots(*draft_depth_and_width(budget, self._tree_width)) + self.pairs.num_pending_pairs(request)

    def _num_draft_slots(self, depth: int, width: int) -> int:
        """Return the number of slots that a draft takes after the true pairs."""
        return depth if width == 1 else width * depth

    def _features(self, rows: CommittedRows) -> FloatArray:
        """Return the features [num_rows, F]: the target's hidden states that the head reads, concatenated."""
        collected = rows.collected_hidden_states
        if collected is not None and self.head.config.boundaries:
            return collected.transpose(1, 0, 2).reshape(rows.num_rows, -1)
        if rows.hidden_states is None:
            raise RuntimeError(f"the target returned no activations for {self.name}, which needs {self.needs}")
        return rows.hidden_states

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Compute pending pairs of these requests without drafting."""
        group: list[RequestTruePairs] = []
        for request in requests:
            pairs = self.pairs.pending_pairs(request, with_root=False)
            if pairs is None or max(pairs.token_ids.tolist()) >= self.head.embedded_ids:
                continue
            group.append(pairs)
        for part in split_into_passes(group, lambda pairs: len(pairs.token_ids)):
            self._run_true_pairs_pass(part, needs_logits=False)

    def _draft(self, group: Sequence[tuple[RequestTruePairs, GrowingDraft]]) -> dict[int, DraftTree | None]:
        if not group:
            return {}
        drafts = [draft for _, draft in group]
        self._add_levels(drafts, self._run_true_pairs_pass([pairs for pairs, _ in group], needs_logits=True, draws=frontier_draws(drafts)))
        while active := [draft for draft in drafts if draft.frontier]:
            self._add_levels(active, self.head.run_draft_pairs([draft.frontier_rows() for draft in active], frontier_draws(active)))
        return {id(draft.request): draft.to_tree(self.name) for draft in drafts}

    def _add_levels(self, drafts: Sequence[GrowingDraft], outputs: PairOutputs) -> None:
        """Add a level to each draft, from the logits of all frontier nodes."""
        ranked, first = outputs.ranked(), 0
        for draft in drafts:
            last = first + len(draft.frontier)
            rows = range(first, last)
            drafted = [self._sample(draft, node, ranked, outputs.logits, row) for node, row in zip(draft.frontier, rows, strict=True)]
            draft.add_level(drafted, outputs.features[first:last])
            first = last

    def _sample(self, draft: GrowingDraft, node: int, ranked: Sequence[LogitsSummary], logits: FloatArray, row: int) -> DraftTokens:
        """Sample the draft tokens after a node from one row of the pass."""
        request = draft.request
        if draft.uses_ranking:
            return self._sampler.sample_ranked(ranked[row], draft.width, is_greedy=request.params.is_greedy)
        return self._sampler.sample(request, draft.path(node), logits[row], draft.width, needs_draft_probs=draft.budget.needs_draft_probs)

    def _run_true_pairs_pass(
        self, pairs: Sequence[RequestTruePairs], *, needs_logits: bool, num_masked: Sequence[int] = (), draws: RowSampling | None = None
    ) -> PairOutputs:
        """Run one pass over true pairs and keep its cache rows; return the features of each request's last pair."""
        try:
            outputs = self.head.run_true_pairs(pairs, needs_logits=needs_logits, num_masked=num_masked, draws=draws)
        except BaseException:
            for one in pairs:  # an interrupted pass leaves no valid rows
                self.pairs.release(one.request)
            raise
        masked = num_masked or [0] * len(pairs)
        last = [end - 1 for end in accumulate(len(one.token_ids) + count for one, count in zip(pairs, masked, strict=True))]
        for one in pairs:
            self.pairs.mark_computed(one.request, one.token_ids)
        return PairOutputs(outputs.output, outputs.features[last])


class ParallelDrafter(EagleStyleDrafter):
    """Drafts all positions in one pass, with a head that takes masked pairs.

    The root's pair gives the first level. The k masked pairs after it give the next levels: each attends to the true pairs and the masked
    ones before it. A level's draft tokens depend on the true pairs alone, so they are the same after each node of the level before.

    Source: P-EAGLE (arXiv:2602.01469) and its code in speculators and vLLM. Deviations: those of `EagleStyleDrafter`, and trees.
    """

    def _banner_text(self) -> str:
        return super()._banner_text().removesuffix(")") + ", all positions in one pass)"

    def _num_draft_slots(self, depth: int, width: int) -> int:
        return depth - 1

    def _draft(self, group: Sequence[tuple[RequestTruePairs, GrowingDraft]]) -> dict[int, DraftTree | None]:
        if not group:
            return {}
        drafts = [draft for _, draft in group]
        num_masked = [draft.depth - 1 for draft in drafts]
        draws = token_draws([(draft.request, level) if draft.is_drawn else None for draft in drafts for level in range(draft.depth)])
        outputs = self._run_true_pairs_pass([pairs for pairs, _ in group], needs_logits=True, num_masked=num_masked, draws=draws)
        ranked, first = outputs.ranked(), 0
        for draft in drafts:
            for row in range(first, first + draft.depth):
                if not draft.frontier:
                    break
                drafted = [self._sample(draft, node, ranked, outputs.logits, row) for node in draft.frontier]
                draft.add_level(drafted, np.empty((len(drafted), 0), np.float32))  # features are unused: later positions have masked pairs
            first += draft.depth
        return {id(draft.request): draft.to_tree(self.name) for draft in drafts}
