"""Drafting with a block drafter: one pass drafts all positions of a block.

Sources: DFlash and DFlash2 (z-lab), DSpark (deepseek-ai/DeepSpec), trees over independent rows as DDTree of mlx-vlm. Deviations: every
accepted token is the target's own draw; a draft may be shorter than the drafter's block; trees are chosen by probability per row of the
target's pass.

Context rows are computed from the target's hidden states once per committed position, before the first draft that needs them. There is no
pass over the prompt.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from paceline.drafters.block.config import describe_alignment
from paceline.drafters.block.context import SPARE_BLOCKS, ContextCache
from paceline.drafters.block.network import SELECTED, BlockHead, DraftBlock, PendingContext
from paceline.drafters.draft_sampler import NO_TOKENS, DraftSampler, DraftTokens, token_draws
from paceline.drafters.recurrent_heads.tree import GrowingDraft, draft_depth_and_width, frontier_draws
from paceline.kv_cache.cache import KVCache
from paceline.runtimes.base import FloatArray, IntArray, split_into_passes
from paceline.runtimes.logits_summary import LogitsSummary, RowSampling
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds, DrafterTraits, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Candidate, grow_tree

MAX_PENDING_ROWS = 64  # with more pending rows, context rows are computed outside of drafting
MIN_ALIGNMENT_LEAD, MAX_ALIGNMENT_COMPARISONS = 4, 24
"""If the config does not state which position a row drafts, it is decided by a lead of MIN_ALIGNMENT_LEAD correct
predictions, or after MAX_ALIGNMENT_COMPARISONS."""


class BlockDrafter(Drafter):
    """Drafts a block of tokens in one pass.

    Args:
        cache: the target's KV cache; context rows are stored in the same blocks.
        vocab_size: V of the target; ids beyond it are never drafted.
        drafts_at_anchor: initial alignment, see `BlockConfig`.
        tree_width: draft tokens per node; 1 = a chain.
    """

    def __init__(
        self,
        head: BlockHead,
        cache: KVCache,
        *,
        vocab_size: int,
        drafts_at_anchor: bool,
        tree_width: int = 1,
    ) -> None:
        config = head.config
        self.name = config.kind.value
        self.needs = DrafterNeeds(layers=config.boundaries)
        self.head, self.drafts_at_anchor = head, drafts_at_anchor
        self.context = ContextCache(head.runtime, cache, window=config.layers.max_positions)
        self._sampler = DraftSampler(head.target_ids, vocab_size, head.embedded_ids)
        self._tree_width = tree_width
        ranking = self._sampler.ranking(tree_width)
        head.set_ranking(replace(ranking, count=config.num_candidates) if config.num_candidates else ranking)
        self._is_alignment_unknown = config.drafts_at_anchor is None
        self._num_correct = [0, 0]  # number of correct predictions of the next token by row 0, and by row 1
        self._num_compared = 0
        self._first_row_tokens = RequestState[tuple[int, int, int]]()  # per request: position, top tokens of rows 0 and 1
        self.traits = DrafterTraits(self._description(), cache_bytes_per_token=self.context.bytes_per_token)

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        late = []
        for one in rows:
            collected = one.collected_hidden_states
            if collected is None:
                raise RuntimeError(f"the target returned none of the hidden states that {self.name} reads")
            features = collected.transpose(1, 0, 2).reshape(one.num_rows, -1)
            if self.context.observe(one.request, one.start, features) > MAX_PENDING_ROWS or one.request.is_finished:
                late.append(one.request)
        self._compute_pending_contexts(late)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        pairs = [(one, budget) for one, budget in zip(requests, budgets, strict=True) if self.context.is_ready(one)]
        self._compute_pending_contexts([request for request, _ in pairs])
        trees: dict[int, DraftTree | None] = {}
        for part in split_into_passes(pairs, lambda pair: self._num_rows(pair[1])):
            group: list[tuple[DraftBlock, GrowingDraft]] = []
            num_spare_blocks = 0
            for request, budget in part:
                self._update_alignment(request)
                depth, width = self._depth_and_width(budget)
                count = self._num_rows(budget)
                needed = self.context.num_spare_blocks_needed(request, count)
                if depth < 1 or needed > SPARE_BLOCKS or request.token_ids[-1] >= self.head.embedded_ids:
                    continue
                if num_spare_blocks + needed > SPARE_BLOCKS:
                    trees |= self._draft_blocks(group)
                    group, num_spare_blocks = [], 0
                rows = self.context.draft_row_range(request, count, num_spare_blocks)
                if rows is None:
                    continue
                num_spare_blocks += needed
                draft = GrowingDraft(request, budget, depth, width, rows.block_table, rows.first_slot)
                group.append((DraftBlock(request.token_ids[-1], rows, range(count)), draft))
            trees |= self._draft_blocks(group)
        return [trees.get(id(request)) for request in requests]

    def release(self, request: Request) -> None:
        self.context.release(request)
        self._first_row_tokens.pop(request)

    def _description(self) -> str:
        config, layers = self.head.config, self.head.config.layers
        parts = f"{layers.num_layers} layers, hidden size {layers.hidden_size}, blocks of {config.block_size}"
        place = describe_alignment(drafts_at_anchor=self.drafts_at_anchor, is_known=not self._is_alignment_unknown)
        return f"{self.name} ({parts}, {place})"

    def _depth_and_width(self, budget: DraftBudget) -> tuple[int, int]:
        depth, width = draft_depth_and_width(budget, self._tree_width)
        return min(depth, self.head.config.block_size - (not self.drafts_at_anchor)), width

    def _num_rows(self, budget: DraftBudget) -> int:
        """Return the number of rows of a block for a budget; one more while it is unknown which position a row drafts."""
        depth = self._depth_and_width(budget)[0]
        return min(self.head.config.block_size, depth if self.drafts_at_anchor and not self._is_alignment_unknown else depth + 1)

    def _compute_pending_contexts(self, requests: Sequence[Request]) -> None:
        pending = [(request, rows) for request in requests if (rows := self.context.pending_rows(request)) is not None]
        for part in split_into_passes(pending, lambda pair: pair[1].rows.num_rows):
            self._run_context_pass([request for request, _ in part], [rows for _, rows in part])

    def _run_context_pass(self, requests: Sequence[Request], rows: Sequence[PendingContext]) -> None:
        try:
            self.head.run_context(rows)
        except BaseException:  # an interrupted pass leaves no valid rows
            for request in requests:
                self.context.release(request)
            raise
        for request in requests:
            self.context.mark_computed(request)

    def _draft_blocks(self, group: Sequence[tuple[DraftBlock, GrowingDraft]]) -> dict[int, DraftTree | None]:
        if not group:
            return {}
        is_biased, has_selector = self.head.markov_rank > 0, self.head.config.num_candidates > 0
        shift = 0 if self.drafts_at_anchor else 1
        output = self.head.run_block([rows for rows, _ in group], None if is_biased or has_selector else _block_draws(group, shift))
        if is_biased:
            logits, hidden = np.array(output.logits), np.array(output.hidden_states)
        first, trees = 0, dict[int, DraftTree | None]()
        for rows, draft in group:
            count = len(rows.logit_rows)
            if is_biased:
                self._store_first_row_tokens(draft.request, logits[first : first + count].argmax(-1)[:2].tolist())
                self._add_markov_biased_levels(draft, logits[first + shift : first + count], hidden[first : first + count])
                trees[id(draft.request)] = draft.to_tree(self.name)
            else:
                ranked = output.summaries[first : first + count]
                self._store_first_row_tokens(draft.request, [row.token_ids[0] for row in ranked[:2]])
                if has_selector:
                    self._add_selected_levels(draft, ranked[shift:], output.results[SELECTED][first + shift : first + count])
                    trees[id(draft.request)] = draft.to_tree(self.name)
                else:
                    trees[id(draft.request)] = self._unbiased_tree(draft, ranked[shift:], output.logits[first + shift : first + count])
            first += count
        return trees

    def _unbiased_tree(self, draft: GrowingDraft, ranked: Sequence[LogitsSummary], logits: FloatArray) -> DraftTree | None:
        """Return a tree from rows that do not depend on the drafted tokens."""
        request, width = draft.request, draft.width
        if draft.uses_ranking:
            is_greedy = request.params.is_greedy
            tokens = [self._sampler.sample_ranked(row, width, is_greedy=is_greedy) for row in ranked[: draft.depth]]

        def tokens_after(path: Sequence[int]) -> DraftTokens:
            if draft.uses_ranking:
                return tokens[len(path)]
            return self._sampler.sample(request, path, logits[len(path)], width, needs_draft_probs=draft.budget.needs_draft_probs)

        if width > 1:
            return best_first_tree(request.token_ids[-1], draft.budget, draft.depth, tokens_after, self.name)
        for _ in range(draft.depth):
            if draft.frontier:
                draft.add_level([tokens_after(draft.path(draft.frontier[0]))], np.empty((1, 0), np.float32))
        return draft.to_tree(self.name)

    def _add_selected_levels(self, draft: GrowingDraft, ranked: Sequence[LogitsSummary], selected: FloatArray) -> None:
        """Add levels from left to right; the candidates of each row are scored again, given the token before it."""
        for level in range(draft.depth):
            nodes, (log_sum, _, scores, ids) = draft.frontier, ranked[level]
            if not nodes:
                return
            count = ids.index(-1) if -1 in ids else len(ids)
            order = np.argsort(ids[:count])  # distributions list ids in this order
            token_ids, kept = np.array(ids[:count], np.int32)[order], np.array(scores[:count], np.float32)[order]
            found = [NO_TOKENS] * len(nodes)
            if count and math.isfinite(log_sum):
                previous = [draft.request.token_ids[-1] if node == 0 else draft.token_ids[node] for node in nodes]
                rows = self.head.rescore(previous, selected[level], token_ids, kept)
                found = [self._choose(draft, node, token_ids, row) for node, row in zip(nodes, rows, strict=True)]
            draft.add_level(found, np.empty((len(nodes), 0), np.float32))

    def _choose(self, draft: GrowingDraft, node: int, token_ids: IntArray, scores: FloatArray) -> DraftTokens:
        needs_draft_probs = draft.budget.needs_draft_probs
        return self._sampler.sample_candidates(
            draft.request, draft.path(node), token_ids, scores, draft.width, needs_draft_probs=needs_draft_probs
        )

    def _add_markov_biased_levels(self, draft: GrowingDraft, logits: FloatArray, hidden: FloatArray) -> None:
        """Add levels from left to right; each row gets the bias of the tokens before it.

        Args:
            logits: [D, Vd] of the rows that draft.
            hidden: [B, E] of all rows.
        """
        head, anchor = self.head, draft.request.token_ids[-1]
        states = {0: head.first_markov_state(anchor, hidden[0], drafts_at_anchor=self.drafts_at_anchor)}
        hidden = hidden[len(hidden) - len(logits) :]
        for level in range(draft.depth):
            nodes = draft.frontier
            if not nodes:
                return
            rows = [head.markov_embedding(anchor if node == 0 else draft.token_ids[node]) for node in nodes]
            made = [
                head.markov_latent(row, hidden[level], states[draft.parents[node] if node else 0])
                for node, row in zip(nodes, rows, strict=True)
            ]
            states |= {node: state for node, (_, state) in zip(nodes, made, strict=True)}
            base = np.repeat(logits[level : level + 1], len(nodes), 0)
            output = head.run_bias(np.stack([latent for latent, _ in made]), base, frontier_draws([draft]))
            if draft.uses_ranking:
                is_greedy = draft.request.params.is_greedy
                found = [self._sampler.sample_ranked(row, draft.width, is_greedy=is_greedy) for row in output.summaries]
            else:
                found = [self._sample_children(draft, node, row) for node, row in zip(nodes, output.logits, strict=True)]
            if head.config.has_confidence:
                found = [_scale_to_confidence(one, head.confidence(hidden[level], row)) for one, row in zip(found, rows, strict=True)]
            draft.add_level(found, np.empty((len(nodes), 0), np.float32))

    def _sample_children(self, draft: GrowingDraft, node: int, row: FloatArray) -> DraftTokens:
        return self._sampler.sample(draft.request, draft.path(node), row, draft.width, needs_draft_probs=draft.budget.needs_draft_probs)

    def _store_first_row_tokens(self, request: Request, best: Sequence[int]) -> None:
        """Store the most probable tokens of the first two rows while it is unknown which position a row drafts."""
        if self._is_alignment_unknown and len(best) == 2:
            self._first_row_tokens[request] = len(request.token_ids), best[0], best[1]

    def _update_alignment(self, request: Request) -> None:
        """Count which of the first two rows predicted the token that followed; after some comparisons set `drafts_at_anchor` by it."""
        noted = self._first_row_tokens.pop(request) if self._is_alignment_unknown else None
        if noted is None or len(request.token_ids) <= noted[0]:
            return
        actual, ids = request.token_ids[noted[0]], self.head.target_ids
        rows = [int(best if ids is None or self.head.markov_rank == 0 else ids[best]) for best in noted[1:]]
        for index, token in enumerate(rows):
            self._num_correct[index] += token == actual
        self._num_compared += 1
        lead = self._num_correct[0] - self._num_correct[1]
        if abs(lead) >= MIN_ALIGNMENT_LEAD or self._num_compared >= MAX_ALIGNMENT_COMPARISONS:
            self._is_alignment_unknown = False
            self.drafts_at_anchor = lead > 0 if lead else self.drafts_at_anchor
            self.traits = replace(self.traits, description=self._description())


def best_first_tree(
    root: int, budget: DraftBudget, depth: int, tokens_after: Callable[[Sequence[int]], DraftTokens], source: str
) -> DraftTree | None:
    """Return the tree of the most probable paths over independent rows, by the product of the rows' probabilities (DDTree).

    Args:
        root: the last token.
        depth: number of rows.
        tokens_after: returns the candidates after a path.
        source: name of the drafter.
    """

    def expand(path: tuple[int, ...]) -> list[Candidate[tuple[int, ...]]]:
        if len(path) == depth:
            return []
        found = tokens_after(path)
        return [(token, prob, source, (*path, token)) for token, prob in zip(found.token_ids, found.probs, strict=True)]

    start: tuple[int, ...] = ()
    return grow_tree(root, budget, start, expand)


def _block_draws(group: Sequence[tuple[DraftBlock, GrowingDraft]], shift: int) -> RowSampling | None:
    """Return how to sample the tokens of all rows: row j with the noise of the position it drafts; the first `shift` rows draft nothing."""
    return token_draws(
        [
            (draft.request, row - shift) if draft.is_drawn and row >= shift else None
            for rows, draft in group
            for row in range(len(rows.logit_rows))
        ]
    )


def _scale_to_confidence(found: DraftTokens, confidence: float) -> DraftTokens:
    """Replace the first token's probability by the confidence, and scale those of its siblings to sum to at most 1 - confidence."""
    if not found.token_ids or found.draft_probs is not None or not 0.0 <= confidence <= 1.0:  # NaN of a damaged file
        return found
    rest = sum(found.probs[1:])
    scale = min(1.0, (1.0 - confidence) / rest) if rest > 0.0 else 0.0
    return DraftTokens(found.token_ids, (confidence, *[prob * scale for prob in found.probs[1:]]))
