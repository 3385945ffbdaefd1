"""Medusa: each head predicts another future token from the target's last hidden state, so one pass drafts several positions.

All heads read the hidden state of position t. The target itself draws token t + 1, which is committed and the root of the draft tree. So
head 0 drafts the children of the root, token t + 2, and head d drafts token t + 2 + d.

Source: Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (arXiv:2401.10774).
Deviations: the root is committed before drafting; the target draws every accepted token (no typical acceptance); unless a published tree
is chosen, the tree contains the nodes most likely to be accepted, one for each row of the budget; at temperatures above 0 the first token
of each depth is drawn with the target's noise. Drafts for rejection sampling are chains, drawn with noise the target does not use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from paceline.drafters.draft_sampler import DraftSampler, DraftTokens, target_noise_sampling
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.medusa.checkpoint import load_medusa
from paceline.drafters.medusa.network import MedusaNetwork, MedusaOutputs
from paceline.drafters.medusa.trees import DYNAMIC_TREES, STATIC_TREES, static_tree_nodes
from paceline.drafters.recurrent_heads.tree import GrowingDraft
from paceline.drafters.target import LoadedTarget
from paceline.models.checkpoint import open_weights
from paceline.runtimes.base import FloatArray, split_into_passes
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds, DrafterTraits, LastHiddenStates, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Candidate, grow_tree

MAX_CANDIDATES_PER_DEPTH = 10
_NO_BLOCKS, _NO_FEATURES = np.empty(0, np.int32), np.empty((1, 0), np.float32)  # the heads have no cache and do not read their output
_PRIOR_FIRST_ACCURACY = 0.5  # accuracy assumed for a head's most probable token before any was verified
_PRIOR_SECOND_ACCURACY = 0.1  # accuracy assumed for a head's second most probable token; halved for each further rank
_PRIOR_TRIALS = 8.0  # weight of the assumed accuracies, as a number of verified tokens
_MAX_TRIALS = 512.0  # when a depth has this many trials, its counts are halved, so that old trials count less


@dataclass(slots=True)
class CandidateAccuracy:
    """How often each candidate of each head was the target's token."""

    num_trials: list[float] = field(default_factory=list)  # for each head the number of verified positions, where old ones count less
    num_hits: list[list[float]] = field(default_factory=list)  # [heads, ranks] number of trials in which the target's token had this rank

    def observe(self, candidates: Sequence[Sequence[int]], token_ids: Sequence[int]) -> None:
        """Count for each depth whether the target's token was among the candidates.

        Args:
            candidates: for each depth the ids of the candidates, most probable first.
            token_ids: tokens that the target emitted after the draft: the accepted tokens and the bonus token.
        """
        while len(self.num_trials) < len(candidates):
            self.num_trials.append(0.0)
            self.num_hits.append([0.0] * MAX_CANDIDATES_PER_DEPTH)
        for depth, (ids, token) in enumerate(zip(candidates, token_ids, strict=False)):
            if self.num_trials[depth] >= _MAX_TRIALS:
                self.num_trials[depth] /= 2.0
                self.num_hits[depth] = [hits / 2.0 for hits in self.num_hits[depth]]
            self.num_trials[depth] += 1.0
            if token in ids:
                self.num_hits[depth][ids.index(token)] += 1.0

    def estimate(self, depth: int, rank: int, prior: float) -> float:
        """Estimate how often the candidate of this rank at this depth is the target's token; `prior` is the estimate without trials."""
        trials, hits = (self.num_trials[depth], self.num_hits[depth][rank]) if depth < len(self.num_trials) else (0.0, 0.0)
        return (hits + _PRIOR_TRIALS * prior) / (trials + _PRIOR_TRIALS)


class MedusaDrafter(Drafter):
    """Drafts trees of the heads' most probable tokens.

    Args:
        vocab_size: V of the target; ids >= V are never drafted.
        tree: how nodes are chosen: "probability" (by the heads' probabilities), "accuracy" (by how often the head's candidate of this rank
            was right before), or the name of a published tree of fixed shape.
    """

    name = "medusa"
    needs = DrafterNeeds(hidden_states=True)

    def __init__(self, network: MedusaNetwork, *, vocab_size: int, tree: str = "probability") -> None:
        self._network, self._tree = network, tree
        self.traits = DrafterTraits(self._description(), network.heads.notices)
        self._features = LastHiddenStates()
        # by request: number of tokens of the request at the last draft, and the candidates of each depth
        self._pending = RequestState[tuple[int, Sequence[Sequence[int]]]]()
        self._accuracy = {is_greedy: CandidateAccuracy() for is_greedy in (True, False)}
        heads = network.heads
        self._sampler = DraftSampler(heads.token_map, vocab_size, heads.num_lm_head_rows if heads.token_map is None else None)
        network.summary_options = self._sampler.summary_options(MAX_CANDIDATES_PER_DEPTH)

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        for committed in rows:
            self._update_accuracy(committed.request)
            self._features.observe(committed)

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        trees: dict[int, DraftTree | None] = {}
        features, drafts = dict[int, FloatArray](), list[GrowingDraft]()
        for request, budget in zip(requests, budgets, strict=True):
            feature, depth = self._features.find(request), min(budget.max_tokens, self._network.heads.num_heads)
            if feature is not None and depth > 0:
                features[id(request)] = feature
                drafts.append(GrowingDraft(request, budget, depth, 1, _NO_BLOCKS, 0))
        for active in split_into_passes(drafts, lambda _: self._network.heads.num_heads):
            depth = max([draft.max_depth for draft in active])
            drawn = [(draft.request, d) if draft.draws_tokens and d < draft.max_depth else None for d in range(depth) for draft in active]
            sampling = target_noise_sampling(drawn)
            if sampling is not None:
                sampling = sampling.reshape(depth, len(active))
            outputs = self._network.forward(np.stack([features[id(draft.request)] for draft in active]), depth, sampling)
            trees |= {id(draft.request): self._draft(draft, outputs, row) for row, draft in enumerate(active)}
        return [trees.get(id(request)) for request in requests]

    def _description(self) -> str:
        heads = self._network.heads
        tree = f"trees by {self._tree}" if self._tree in DYNAMIC_TREES else f"tree {self._tree}"
        return f"medusa ({heads.num_heads} head{'s' if heads.num_heads > 1 else ''}, {tree})"

    def _draft(self, draft: GrowingDraft, outputs: MedusaOutputs, row: int) -> DraftTree | None:
        """Return a request's draft tree, made from row `row` of each head's logits."""
        request, budget = draft.request, draft.budget
        if budget.needs_draft_probs and not request.params.is_greedy:
            for depth in range(draft.max_depth):  # rejection sampling: a chain, drawn with noise that the target does not use
                if draft.frontier:
                    draft.add_level([self._sample(draft, outputs, row, depth, draft.token_ids[1:], 1)], _NO_FEATURES)
            return draft.to_tree(self.name)
        shape = None
        max_candidates = MAX_CANDIDATES_PER_DEPTH
        if self._tree in STATIC_TREES:
            shape = static_tree_nodes(self._tree, draft.max_depth, budget.max_rows)
            max_candidates = 1 + max((rank for _, _, rank in shape), default=0)
        elif self._tree == "probability":  # a depth has at most as many nodes as the tree
            max_candidates = min(MAX_CANDIDATES_PER_DEPTH, budget.max_rows - 1)
        tokens_by_depth: list[DraftTokens] = []

        def candidates_at(depth: int) -> DraftTokens:
            """Return the candidates of all nodes of a depth, sampled as if each token before them were the first candidate of its depth."""
            while len(tokens_by_depth) <= depth:
                path = [tokens.token_ids[0] for tokens in tokens_by_depth if tokens.token_ids]
                tokens_by_depth.append(self._sample(draft, outputs, row, len(tokens_by_depth), path, max_candidates))
            return tokens_by_depth[depth]

        tree = self._grow_tree(draft, candidates_at) if shape is None else self._fill_static_tree(draft, candidates_at, shape)
        self._pending[request] = len(request.token_ids), [tokens.token_ids for tokens in tokens_by_depth]
        return tree

    def _sample(self, draft: GrowingDraft, outputs: MedusaOutputs, row: int, depth: int, path: Sequence[int], width: int) -> DraftTokens:
        """Sample up to `width` tokens from row `row` of the logits of head `depth`. Head 0 drafts the children of the root."""
        request, needs_draft_probs = draft.request, draft.budget.needs_draft_probs
        if draft.uses_top_tokens:
            return self._sampler.sample_from_top_tokens(outputs.top_tokens[depth][row], width, is_greedy=request.params.is_greedy)
        return self._sampler.sample(request, path, outputs.logits_of_head(depth)[row], width, needs_draft_probs=needs_draft_probs)

    def _fill_static_tree(
        self, draft: GrowingDraft, candidates_at: Callable[[int], DraftTokens], shape: Sequence[tuple[int, int, int]]
    ) -> DraftTree | None:
        """Return the tree of a published shape, (parent, depth, rank) for each node, with this step's candidates as tokens."""
        token_ids: list[int] = []
        parents: list[int] = []
        drafted_node = {0: 0}  # nodes whose rank the head has no candidate for are dropped
        for node, (parent, depth, rank) in enumerate(shape, start=1):
            ids = candidates_at(depth).token_ids if parent in drafted_node else ()
            if rank < len(ids):
                token_ids.append(ids[rank])
                parents.append(drafted_node[parent])
                drafted_node[node] = len(token_ids)
        return DraftTree.from_nodes(draft.request.token_ids[-1], token_ids, parents, self.name) if token_ids else None

    def _grow_tree(self, draft: GrowingDraft, candidates_at: Callable[[int], DraftTokens]) -> DraftTree | None:
        is_greedy = draft.request.params.is_greedy
        candidates_by_depth: list[list[Candidate[int]]] = []

        def children_of(depth: int) -> list[Candidate[int]]:
            """Return the candidates for the children of any node of this depth; the root's depth is 0."""
            if depth == len(candidates_by_depth):
                tokens = candidates_at(depth)
                probs = self._acceptance_rates(depth, tokens.probs, is_greedy=is_greedy)
                candidates_by_depth.append([(token, prob, depth + 1) for token, prob in zip(tokens.token_ids, probs, strict=True)])
            return candidates_by_depth[depth]

        budget = DraftBudget(draft.budget.max_rows, draft.max_depth)
        return grow_tree(draft.request.token_ids[-1], budget, 0, children_of, self.name)

    def _acceptance_rates(self, depth: int, probs: Sequence[float], *, is_greedy: bool) -> Sequence[float]:
        """Estimate for each candidate of a depth the probability that it is accepted, given that the tokens before it are."""
        accuracy = self._accuracy[is_greedy]
        if not probs:
            return probs
        if self._tree == "accuracy":
            priors = [_PRIOR_FIRST_ACCURACY, *(_PRIOR_SECOND_ACCURACY * 0.5**rank for rank in range(len(probs) - 1))]
            return [accuracy.estimate(depth, rank, prior) for rank, prior in enumerate(priors)]
        if is_greedy:
            return probs
        # the first candidate is drawn with the target's noise, so its hit rate is far above its probability
        first = max(probs[0], accuracy.estimate(depth, 0, _PRIOR_FIRST_ACCURACY))
        sibling_mass = sum(probs[1:])
        scale = min(1.0, (1.0 - first) / sibling_mass) if sibling_mass > 0.0 else 0.0
        return [first, *[prob * scale for prob in probs[1:]]]

    def _update_accuracy(self, request: Request) -> None:
        """Count the hits of the last draft's candidates among the tokens that the target emitted."""
        pending = self._pending.pop(request)
        if pending is not None:
            num_tokens, candidates = pending
            self._accuracy[request.params.is_greedy].observe(candidates, request.token_ids[num_tokens:])


def open_medusa(files: HeadFiles, target: LoadedTarget) -> MedusaDrafter:
    """Create the drafter for a loaded target from the files of Medusa heads.

    Raises:
        CheckpointError: tensors are missing or damaged.
        IncompatibleDrafterError: the heads were made for another target.
    """
    config = target.runtime.config
    target_weights = open_weights(target.directory, config)
    heads = load_medusa(files, config, target_weights["embedding.weight" if config.tied_embeddings else "lm_head.weight"])
    heads = replace(heads, weights=target.quantize(heads.weights, files.files, uses_target_lm_head=heads.uses_target_lm_head))
    placement = target.placement
    if not heads.uses_target_lm_head or target.copies_lm_head:
        placement["lm_head_source"] = None
    return MedusaDrafter(
        MedusaNetwork(heads, config, **placement), vocab_size=target.vocab_size, tree=target.head_options.tree or DYNAMIC_TREES[0]
    )
