"""Drafters for EAGLE, MTP and P-EAGLE heads, small decoders that read the target's features (hidden states).

The head's input at a position is a feature pair: a token, and the feature of the position before it. A draft begins with a pass over the
tokens committed since the last draft, with features that the target computed. The last of them gives the first level of draft tokens. Each
further level takes a pass over the most probable draft tokens, with features that the head predicted; P-EAGLE heads draft all levels in
one pass. Cache rows of draft tokens are overwritten later, when the target has computed the features.

Sources: EAGLE (Li et al. 2024, arXiv:2401.15077), EAGLE-2 (arXiv:2406.16858), EAGLE-3 (Li et al. 2025, arXiv:2503.01840). Deviations: the
target draws every accepted token (`speculation/verify.py`); at temperatures above 0, draft tokens are drawn with the target's noise; the
head attends to at most as many positions as it was trained with.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from paceline.drafters.draft_sampler import DraftSampler, target_noise_sampling
from paceline.drafters.head_cache import NUM_SPARE_BLOCKS
from paceline.drafters.recurrent_heads.cache import FeaturePairCache, RequestFeaturePairs
from paceline.drafters.recurrent_heads.head import FeaturePairOutputs, RecurrentHead
from paceline.drafters.recurrent_heads.tree import GrowingDraft, draft_depth_and_width, frontier_sampling
from paceline.kv_cache.cache import KVCache
from paceline.runtimes.base import FloatArray, split_into_passes
from paceline.runtimes.logits_summary import RowSampling
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds, DrafterTraits
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

MAX_PENDING_PAIRS = 32  # `observe` runs committed tokens if there are more, so that the next draft does not take long


class EagleStyleDrafter(Drafter):
    """Drafts with an EAGLE or MTP head, one level of a tree per pass.

    Args:
        cache: the target's KV cache; the head's KV cache uses the same block tables.
        vocab_size: V of the target; ids >= V are never drafted.
        tree_width: draft tokens after each node, and number of nodes of a level that get children; 1 = a chain.
    """

    def __init__(self, head: RecurrentHead, cache: KVCache, *, vocab_size: int, tree_width: int = 1) -> None:
        config = head.config
        self.name = config.kind.value
        self.needs = DrafterNeeds(hidden_states=config.has_final_state, layers=config.layer_boundaries)
        self.head = head
        self.pair_cache = FeaturePairCache(
            head.runtime, cache, feature_size=config.feature_size, window=config.layers.max_positions, first_slot=config.first_slot
        )
        self._sampler = DraftSampler(head.target_ids, vocab_size, head.num_embedded_ids)
        self._tree_width = tree_width
        head.summary_options = self._sampler.summary_options(tree_width)
        self.traits = DrafterTraits(self._description(), notices=head.notices, cache_bytes_per_token=self.pair_cache.bytes_per_token)

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        requests_to_run = []
        for committed in rows:
            num_pending = self.pair_cache.append_features(committed.request, committed.first_position, self._features(committed))
            if num_pending > MAX_PENDING_PAIRS or committed.request.is_finished:
                requests_to_run.append(committed.request)
        self._compute_pending_pairs(requests_to_run)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        trees: dict[int, DraftTree | None] = {}
        shapes = [(*one, *draft_depth_and_width(one[1], self._tree_width)) for one in zip(requests, budgets, strict=True)]
        for part in split_into_passes(shapes, lambda one: self._num_draft_slots(*one[2:]) + self.pair_cache.num_pending_pairs(one[0])):
            group: list[tuple[RequestFeaturePairs, GrowingDraft]] = []
            num_used = 0
            for request, budget, depth, width in part:
                num_slots = self._num_draft_slots(depth, width)
                needed = self.pair_cache.num_spare_blocks_needed(request, len(request.token_ids) + num_slots)
                if depth < 1 or needed > NUM_SPARE_BLOCKS:
                    continue
                if num_used + needed > NUM_SPARE_BLOCKS:
                    trees |= self._draft_group(group)
                    group, num_used = [], 0
                pairs = self.pair_cache.pending_pairs(request, include_root=True, num_draft_rows=num_slots, num_used_spare_blocks=num_used)
                if pairs is None or max(pairs.token_ids.tolist()) >= self.head.num_embedded_ids:
                    continue
                num_used += needed
                group.append((pairs, GrowingDraft(request, budget, depth, width, pairs.rows.block_table, pairs.rows.first_visible_slot)))
            trees |= self._draft_group(group)
        return [trees.get(id(request)) for request in requests]

    def release(self, request: Request) -> None:
        self.pair_cache.release(request)

    def _description(self) -> str:
        config = self.head.config
        layers = config.layers
        details = [f"{layers.num_layers} layer{'s' if layers.num_layers > 1 else ''}", f"hidden size {layers.hidden_size}"]
        if config.layer_boundaries:
            names = [*map(str, config.layer_boundaries), *["final"] * config.has_final_state]
            details.append(f"features of layers {', '.join(names)}")
        if self.head.target_ids is not None:
            details.append(f"{len(self.head.target_ids)} draft ids")
        if self.head.draft_vocab_size is not None:
            details.append(f"drafts ids below {self.head.draft_vocab_size}")
        if self._tree_width > 1:
            details.append(f"trees {self._tree_width} wide")
        return f"{self.name} ({', '.join(details)}, sees the last {self.pair_cache.window} tokens)"

    def _num_draft_slots(self, depth: int, width: int) -> int:
        """Return how many cache slots after the committed tokens a draft needs."""
        return depth if width == 1 else width * depth

    def _features(self, rows: CommittedRows) -> FloatArray:
        """Return the features [num_rows, F]: the hidden states of the layer boundaries, then the final ones, if the head reads them."""
        hidden_states = [*rows.collected_hidden_states]
        if self.needs.hidden_states and rows.hidden_states is not None:
            hidden_states.append(rows.hidden_states)
        if len(hidden_states) != len(self.needs.layers) + self.needs.hidden_states:
            raise RuntimeError(f"the target returned no activations for {self.name}, which needs {self.needs}")
        return hidden_states[0] if len(hidden_states) == 1 else np.concatenate(hidden_states, axis=1)

    def _compute_pending_pairs(self, requests: Sequence[Request]) -> None:
        """Run the committed tokens of these requests that the head has not run yet, without drafting."""
        group: list[RequestFeaturePairs] = []
        for request in requests:
            pairs = self.pair_cache.pending_pairs(request, include_root=False)
            if pairs is None or max(pairs.token_ids.tolist()) >= self.head.num_embedded_ids:
                continue
            group.append(pairs)
        for part in split_into_passes(group, lambda pairs: len(pairs.token_ids)):
            self._run_target_pairs(part, needs_logits=False)

    def _draft_group(self, group: Sequence[tuple[RequestFeaturePairs, GrowingDraft]]) -> dict[int, DraftTree | None]:
        if not group:
            return {}
        drafts = [draft for _, draft in group]
        self._grow_drafts([pairs for pairs, _ in group], drafts)
        return {id(draft.request): draft.to_tree(self.name) for draft in drafts}

    def _grow_drafts(self, pairs: Sequence[RequestFeaturePairs], drafts: Sequence[GrowingDraft]) -> None:
        self._add_levels(drafts, self._run_target_pairs(pairs, needs_logits=True, sampling=frontier_sampling(drafts)))
        while active := [draft for draft in drafts if draft.frontier]:
            draft_pairs = [draft.frontier_pairs() for draft in active]
            self._add_levels(active, self.head.run_draft_feature_pairs(draft_pairs, frontier_sampling(active)))

    def _add_levels(self, drafts: Sequence[GrowingDraft], outputs: FeaturePairOutputs) -> None:
        """Add a level to each draft, sampled from the logits of its frontier nodes."""
        output, summaries, first = outputs.output, outputs.output.summaries, 0
        for draft in drafts:
            last = first + len(draft.frontier)
            drafted = [draft.sample(self._sampler, node, output, row, summaries) for row, node in enumerate(draft.frontier, first)]
            draft.add_level(drafted, outputs.features[first:last])
            first = last

    def _run_target_pairs(
        self,
        pairs: Sequence[RequestFeaturePairs],
        *,
        needs_logits: bool,
        num_masked: Sequence[int] = (),
        sampling: RowSampling | None = None,
    ) -> FeaturePairOutputs:
        """Run committed tokens and record their slots as computed; the returned features are those of each request's last token."""
        try:
            outputs = self.head.run_target_feature_pairs(pairs, needs_logits=needs_logits, num_masked=num_masked, sampling=sampling)
        except BaseException:
            for one in pairs:  # an interrupted pass may have left cache rows unwritten: none of these requests' rows can be used
                self.pair_cache.release(one.request)
            raise
        masked = num_masked or [0] * len(pairs)
        last_rows = [end - 1 for end in accumulate(len(one.token_ids) + count for one, count in zip(pairs, masked, strict=True))]
        for one in pairs:
            self.pair_cache.mark_computed(one.request, one.token_ids)
        return FeaturePairOutputs(outputs.output, outputs.features[last_rows])


class ParallelDrafter(EagleStyleDrafter):
    """Drafts all positions in one pass, with a P-EAGLE head or a PARD-2 draft model.

    The row of the last committed token drafts the first level. The masked rows after it, each with the mask token and the mask feature,
    draft the other levels. No row depends on a draft token, so all nodes of a level have the same candidates for their children.

    Source: P-EAGLE (arXiv:2602.01469) and its code in speculators and vLLM. Deviations: as in the module docstring; drafts may be trees.
    """

    def _description(self) -> str:
        return super()._description().removesuffix(")") + ", all positions in one pass)"

    def _num_draft_slots(self, depth: int, width: int) -> int:
        return depth - 1

    def _grow_drafts(self, pairs: Sequence[RequestFeaturePairs], drafts: Sequence[GrowingDraft]) -> None:
        num_masked = [draft.max_depth - 1 for draft in drafts]
        sampling = target_noise_sampling(
            [(draft.request, level) if draft.draws_tokens else None for draft in drafts for level in range(draft.max_depth)]
        )
        outputs = self._run_target_pairs(pairs, needs_logits=True, num_masked=num_masked, sampling=sampling)
        output, summaries, first = outputs.output, outputs.output.summaries, 0
        for draft in drafts:
            for row in range(first, first + draft.max_depth):
                if not draft.frontier:
                    break
                drafted = [draft.sample(self._sampler, node, output, row, summaries) for node in draft.frontier]
                draft.add_level(drafted, np.empty((len(drafted), 0), np.float32))  # no later pass reads features
            first += draft.max_depth
