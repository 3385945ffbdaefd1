"""Drafting with a block drafter: one pass drafts all positions of a block.

The block's input is the last committed token, called the anchor, and mask tokens. They attend to the context: keys and values computed from
the target's hidden states, once for each committed position. The drafter does not run the prompt itself.

Sources: DFlash and DFlash2 (z-lab), DSpark (deepseek-ai/DeepSpec), DDTree of mlx-vlm. Deviations: every accepted token is drawn by the
target; a draft may be shorter than the block; a tree contains the nodes most likely to be accepted, one for each row of the budget.

The cached keys and values are called context rows. Those of a prompt are computed after each of its chunks, those of generated tokens
before the next draft. If a request goes without drafts for long, the oldest context rows that are not computed yet are dropped. Later
drafts do not attend to that text.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from paceline.drafters.block.config import describe_drafted_position
from paceline.drafters.block.context import ContextCache
from paceline.drafters.block.network import SELECTOR_VECTORS, BlockHead, DraftBlock, PendingContext
from paceline.drafters.draft_sampler import NO_TOKENS, DraftSampler, DraftTokens, target_noise_sampling
from paceline.drafters.head_cache import NUM_SPARE_BLOCKS
from paceline.drafters.recurrent_heads.tree import GrowingDraft, draft_depth_and_width, frontier_sampling
from paceline.kv_cache.cache import KVCache
from paceline.runtimes.base import FloatArray, split_into_passes
from paceline.runtimes.logits_summary import LogitsSummary, RowSampling
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds, DrafterTraits, PrefillTime, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Candidate, grow_tree

MAX_PENDING_CONTEXT_ROWS = 64  # `observe` computes context rows of a prompt if more are pending: the next draft then takes less time
MAX_DEFERRED_CONTEXT_ROWS = 256  # if a request without drafts has more pending context rows, the oldest of them are dropped
MIN_ANCHOR_DETECTION_LEAD, MAX_ANCHOR_DETECTION_COMPARISONS = 4, 24
"""If the config lacks `sample_from_anchor`, the first two rows of each block are compared with the next token of the target. The row that
leads by MIN_ANCHOR_DETECTION_LEAD correct predictions, or after MAX_ANCHOR_DETECTION_COMPARISONS comparisons, is the first that drafts."""


class BlockDrafter(Drafter):
    """Drafts a block of tokens in one pass.

    Args:
        head: the drafter's networks.
        cache: the target's KV cache; the drafter's context rows use the same block tables.
        vocab_size: V of the target; ids >= V are never drafted.
        sample_from_anchor: whether the anchor's row drafts, see `BlockConfig`; only a first assumption if the config does not specify it.
        tree_width: draft tokens after each node; 1 = a chain.
    """

    def __init__(self, head: BlockHead, cache: KVCache, *, vocab_size: int, sample_from_anchor: bool, tree_width: int = 1) -> None:
        config = head.config
        self.name = config.kind.value
        self.needs = DrafterNeeds(layers=config.layer_boundaries)
        self.head, self.sample_from_anchor = head, sample_from_anchor
        self.context_cache = ContextCache(head.runtime, cache, window=config.layers.max_positions)
        self._sampler = DraftSampler(head.target_ids, vocab_size, head.num_embedded_ids)
        self._tree_width = tree_width
        self._prefill_time = PrefillTime()
        self._last_request_accepted_drafts = True  # whether the last finished request that drafted had accepted draft tokens
        summary_options = self._sampler.summary_options(tree_width)
        num_top_tokens = config.num_rescored_tokens or summary_options.num_top_tokens
        head.summary_options = replace(summary_options, num_top_tokens=num_top_tokens)
        self._is_detecting_anchor_use = config.sample_from_anchor is None
        self._num_first_row_comparisons, self._first_row_lead = 0, 0  # lead: correct predictions of row 0 minus row 1
        self._first_row_tokens = RequestState[tuple[int, int, int]]()  # position and most probable tokens of the first two rows
        self.traits = DrafterTraits(self._description(), cache_bytes_per_token=self.context_cache.bytes_per_token)

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        to_compute = []
        for committed in rows:
            if len(committed.collected_hidden_states) != len(self.needs.layers):
                raise RuntimeError(f"the target returned none of the hidden states that {self.name} reads")
            hidden_states = np.concatenate(committed.collected_hidden_states, axis=1)
            num_pending = self.context_cache.append_hidden_states(committed.request, committed.first_position, hidden_states)
            request, stats = committed.request, committed.request.stats
            if request.is_finished:  # a later request may begin with this text: its drafts then need these rows
                is_due = num_pending <= MAX_PENDING_CONTEXT_ROWS or stats.num_accepted_tokens > 0
                if stats.num_draft_tokens > 0:
                    self._last_request_accepted_drafts = stats.num_accepted_tokens > 0
            else:
                is_prompt = committed.first_position < request.num_prompt_tokens or request.num_uncached > 1
                is_prefill = is_prompt or committed.num_rows > MAX_PENDING_CONTEXT_ROWS
                is_due = is_prefill and self._last_request_accepted_drafts and num_pending > MAX_PENDING_CONTEXT_ROWS
            if is_due:
                to_compute.append(request)
            elif num_pending > MAX_DEFERRED_CONTEXT_ROWS:
                self.context_cache.drop_oldest_pending(request, MAX_DEFERRED_CONTEXT_ROWS - MAX_PENDING_CONTEXT_ROWS)
        self._compute_pending_contexts(to_compute)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        ready_requests = [pair for pair in zip(requests, budgets, strict=True) if self.context_cache.has_all_hidden_states(pair[0])]
        self._compute_pending_contexts([request for request, _ in ready_requests])
        trees: dict[int, DraftTree | None] = {}
        for part in split_into_passes(ready_requests, lambda pair: self._num_rows(pair[1])):
            group: list[tuple[DraftBlock, GrowingDraft]] = []
            num_spare_blocks = 0
            for request, budget in part:
                self._update_sample_from_anchor(request)
                depth, width = self._depth_and_width(budget)
                count = self._num_rows(budget)
                needed = self.context_cache.num_spare_blocks_needed(request, len(request.token_ids) - 1 + count)
                if depth < 1 or needed > NUM_SPARE_BLOCKS or request.token_ids[-1] >= self.head.num_embedded_ids:
                    continue
                if num_spare_blocks + needed > NUM_SPARE_BLOCKS:
                    trees |= self._draft_blocks(group)
                    group, num_spare_blocks = [], 0
                rows = self.context_cache.draft_row_range(request, count, num_spare_blocks)
                if rows is None:
                    continue
                num_spare_blocks += needed
                draft = GrowingDraft(request, budget, depth, width, rows.block_table, rows.first_visible_slot)
                group.append((DraftBlock(request.token_ids[-1], rows), draft))
            trees |= self._draft_blocks(group)
        return [trees.get(id(request)) for request in requests]

    def prefill_s(self, request: Request) -> float:
        return self._prefill_time.expected_s(self.context_cache.num_pending(request))

    def release(self, request: Request) -> None:
        self.context_cache.release(request)
        self._first_row_tokens.pop(request)

    def _description(self) -> str:
        config, layers = self.head.config, self.head.config.layers
        sizes = f"{layers.num_layers} layers, hidden size {layers.hidden_size}, blocks of {config.block_size}"
        place = describe_drafted_position(sample_from_anchor=self.sample_from_anchor, is_known=not self._is_detecting_anchor_use)
        return f"{self.name} ({sizes}, {place})"

    def _depth_and_width(self, budget: DraftBudget) -> tuple[int, int]:
        depth, width = draft_depth_and_width(budget, self._tree_width)
        return min(depth, self.head.config.block_size - (not self.sample_from_anchor)), width

    def _num_rows(self, budget: DraftBudget) -> int:
        """Return how many rows of a block to run for a budget; one more while it is unknown whether the anchor's row drafts."""
        depth = self._depth_and_width(budget)[0]
        return min(self.head.config.block_size, depth if self.sample_from_anchor and not self._is_detecting_anchor_use else depth + 1)

    def _compute_pending_contexts(self, requests: Sequence[Request]) -> None:
        pending = [(request, context) for request in requests if (context := self.context_cache.pending_context(request)) is not None]
        for part in split_into_passes(pending, lambda pair: pair[1].rows.num_rows):
            self._run_context_pass([request for request, _ in part], [context for _, context in part])

    def _run_context_pass(self, requests: Sequence[Request], contexts: Sequence[PendingContext]) -> None:
        start_s = perf_counter()
        try:
            self.head.run_context(contexts)
        except BaseException:  # an interrupted pass may have left cache rows unwritten: none of these requests' rows can be used
            for request in requests:
                self.context_cache.release(request)
            raise
        self._prefill_time.observe(sum(context.rows.num_rows for context in contexts), perf_counter() - start_s)
        for request in requests:
            self.context_cache.mark_computed(request)

    def _draft_blocks(self, group: Sequence[tuple[DraftBlock, GrowingDraft]]) -> dict[int, DraftTree | None]:
        if not group:
            return {}
        is_biased, has_selector = self.head.markov_rank > 0, self.head.config.num_rescored_tokens > 0
        num_undrafted = 0 if self.sample_from_anchor else 1
        sampling = None if is_biased or has_selector else _block_noise_sampling(group, num_undrafted)
        output = self.head.run_block([block for block, _ in group], sampling)
        if is_biased:
            logits, hidden = np.array(output.logits), np.array(output.hidden_states)
        first, trees = 0, dict[int, DraftTree | None]()
        for block, draft in group:
            count = block.rows.num_rows
            drafting_rows = slice(first + num_undrafted, first + count)
            if is_biased:
                self._store_first_row_tokens(draft.request, logits[first : first + count].argmax(-1)[:2].tolist())
                self._add_markov_biased_levels(draft, logits[drafting_rows], hidden[first : first + count])
                trees[id(draft.request)] = draft.to_tree(self.name)
            else:
                summaries = output.summaries[first : first + count]
                self._store_first_row_tokens(draft.request, [row.token_ids[0] for row in summaries[:2]])
                if has_selector:
                    self._add_rescored_levels(draft, summaries[num_undrafted:], output.results[SELECTOR_VECTORS][drafting_rows])
                    trees[id(draft.request)] = draft.to_tree(self.name)
                else:
                    trees[id(draft.request)] = self._unbiased_tree(draft, summaries[num_undrafted:], output.logits[drafting_rows])
            first += count
        return trees

    def _unbiased_tree(self, draft: GrowingDraft, row_summaries: Sequence[LogitsSummary], logits: FloatArray) -> DraftTree | None:
        """Return the tree or chain of a DFlash block, from the top tokens (`row_summaries`) or logits of its independent rows."""
        request, width = draft.request, draft.width
        if draft.uses_top_tokens:
            is_greedy = request.params.is_greedy
            tokens = [self._sampler.sample_from_top_tokens(row, width, is_greedy=is_greedy) for row in row_summaries[: draft.max_depth]]

        def tokens_after(path: Sequence[int]) -> DraftTokens:
            if draft.uses_top_tokens:
                return tokens[len(path)]
            return self._sampler.sample(request, path, logits[len(path)], width, needs_draft_probs=draft.budget.needs_draft_probs)

        if width > 1:
            return best_first_tree(request.token_ids[-1], draft.budget, draft.max_depth, tokens_after, self.name)
        for _ in range(draft.max_depth):
            if draft.frontier:
                draft.add_level([tokens_after(draft.path(draft.frontier[0]))], np.empty((1, 0), np.float32))
        return draft.to_tree(self.name)

    def _add_rescored_levels(self, draft: GrowingDraft, row_summaries: Sequence[LogitsSummary], selector_vectors: FloatArray) -> None:
        """Draft one level after another with DFlash2: rescore the top tokens of each row, given the token drafted before them."""
        for level in range(draft.max_depth):
            nodes, (log_sum, _, scores, ids) = draft.frontier, row_summaries[level]
            if not nodes:
                return
            count = ids.index(-1) if -1 in ids else len(ids)
            order = np.argsort(ids[:count])  # `sample_candidates` needs ascending ids
            token_ids, candidate_scores = np.array(ids[:count], np.int32)[order], np.array(scores[:count], np.float32)[order]
            drafted = [NO_TOKENS] * len(nodes)
            if count and math.isfinite(log_sum):
                previous = [draft.request.token_ids[-1] if node == 0 else draft.token_ids[node] for node in nodes]
                rows = self.head.rescore_candidates(previous, selector_vectors[level], token_ids, candidate_scores)
                request, needs_draft_probs = draft.request, draft.budget.needs_draft_probs
                drafted = [
                    self._sampler.sample_candidates(
                        request, draft.path(node), token_ids, row, draft.width, needs_draft_probs=needs_draft_probs
                    )
                    for node, row in zip(nodes, rows, strict=True)
                ]
            draft.add_level(drafted, np.empty((len(nodes), 0), np.float32))

    def _add_markov_biased_levels(self, draft: GrowingDraft, logits: FloatArray, hidden: FloatArray) -> None:
        """Draft one level after another with DSpark: add the bias that depends on the tokens drafted before to each row of logits.

        Args:
            logits: [n, Vd] logits of the n rows that draft.
            hidden: [block_size, E] hidden states of all rows of the block.
        """
        head, anchor = self.head, draft.request.token_ids[-1]
        states = {0: head.first_markov_state(anchor, hidden[0], sample_from_anchor=self.sample_from_anchor)}
        hidden = hidden[len(hidden) - len(logits) :]
        for level in range(draft.max_depth):
            nodes = draft.frontier
            if not nodes:
                return
            rows = [head.markov_embedding(anchor if node == 0 else draft.token_ids[node]) for node in nodes]
            latents = [
                head.markov_latent(row, hidden[level], states[draft.parents[node] if node else 0])
                for node, row in zip(nodes, rows, strict=True)
            ]
            states |= {node: state for node, (_, state) in zip(nodes, latents, strict=True)}
            base = np.repeat(logits[level : level + 1], len(nodes), 0)
            output = head.add_markov_bias(np.stack([latent for latent, _ in latents]), base, frontier_sampling([draft]))
            summaries = output.summaries if draft.uses_top_tokens else []
            drafted = [draft.sample(self._sampler, node, output, row, summaries) for row, node in enumerate(nodes)]
            if head.config.has_confidence:
                drafted = [
                    _apply_confidence(one, head.predict_confidence(hidden[level], row)) for one, row in zip(drafted, rows, strict=True)
                ]
            draft.add_level(drafted, np.empty((len(nodes), 0), np.float32))

    def _store_first_row_tokens(self, request: Request, top_tokens: Sequence[int]) -> None:
        """Store the most probable tokens of the first two rows, while it is unknown which of the two is the first that drafts."""
        if self._is_detecting_anchor_use and len(top_tokens) == 2:
            self._first_row_tokens[request] = len(request.token_ids), top_tokens[0], top_tokens[1]

    def _update_sample_from_anchor(self, request: Request) -> None:
        """Count which of the first two rows predicted the target's next token; after enough comparisons set `sample_from_anchor`."""
        stored = self._first_row_tokens.pop(request) if self._is_detecting_anchor_use else None
        if stored is None or len(request.token_ids) <= stored[0]:
            return
        actual, ids = request.token_ids[stored[0]], self.head.target_ids
        first, second = ((best if ids is None or self.head.markov_rank == 0 else ids[best]) == actual for best in stored[1:])
        self._first_row_lead += int(first) - int(second)
        self._num_first_row_comparisons += 1
        if abs(self._first_row_lead) >= MIN_ANCHOR_DETECTION_LEAD or self._num_first_row_comparisons >= MAX_ANCHOR_DETECTION_COMPARISONS:
            self._is_detecting_anchor_use = False
            self.sample_from_anchor = self._first_row_lead > 0 if self._first_row_lead else self.sample_from_anchor
            self.traits = replace(self.traits, description=self._description())


def best_first_tree(
    root: int, budget: DraftBudget, depth: int, tokens_after: Callable[[Sequence[int]], DraftTokens], source: str
) -> DraftTree | None:
    """Return the tree of the most probable paths (DDTree). The probability of a path is the product of its tokens' probabilities.

    Args:
        root: the last committed token.
        budget, depth: maximum number of rows of the tree, and of draft tokens on a path.
        tokens_after: returns the possible next tokens after the draft tokens of a path, and their probabilities.
        source: name of the drafter.
    """

    def expand(path: tuple[int, ...]) -> list[Candidate[tuple[int, ...]]]:
        if len(path) == depth:
            return []
        tokens = tokens_after(path)
        return [(token, prob, (*path, token)) for token, prob in zip(tokens.token_ids, tokens.probs, strict=True)]

    root_path: tuple[int, ...] = ()
    return grow_tree(root, budget, root_path, expand, source)


def _block_noise_sampling(group: Sequence[tuple[DraftBlock, GrowingDraft]], first_drafting_row: int) -> RowSampling | None:
    """Return noise keys and temperatures to draw a token from each drafting row, with the target's noise for the position it drafts."""
    return target_noise_sampling(
        [
            (draft.request, row - first_drafting_row) if draft.draws_tokens and row >= first_drafting_row else None
            for block, draft in group
            for row in range(block.rows.num_rows)
        ]
    )


def _apply_confidence(tokens: DraftTokens, confidence: float) -> DraftTokens:
    """Set the first token's probability to `confidence`, predicted by the head, and scale the others to sum to at most 1 - confidence."""
    is_valid = 0.0 <= confidence <= 1.0  # False for NaN, from a damaged file
    if not tokens.token_ids or tokens.draft_probs is not None or not is_valid:
        return tokens
    sibling_mass = sum(tokens.probs[1:])
    scale = min(1.0, (1.0 - confidence) / sibling_mass) if sibling_mass > 0.0 else 0.0
    return DraftTokens(tokens.token_ids, (confidence, *[prob * scale for prob in tokens.probs[1:]]))
