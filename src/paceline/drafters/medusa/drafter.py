"""Medusa: extra heads on the target's last feature draft several positions at once.

Head d reads the feature of position t and drafts token t + 2 + d. Token t + 1 is the root, so head 0 drafts its children. The heads have no
cache; the feature is that of the pass that produced the root.

Source: Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (arXiv:2401.10774).
Deviations: the root is already committed; every kept token is the target's own draw (no typical acceptance); the tree grows by probability
per row of the target pass unless a published tree is named; sampled requests draw the first token of a depth with the target's noise, or,
for rejection sampling, a chain with separate noise.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.draft_sampler import NO_TOKENS, DraftTokens, token_draws
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.medusa.checkpoint import load_medusa
from paceline.drafters.medusa.network import HeadOutputs, MedusaNetwork
from paceline.drafters.medusa.trees import GROWN_TREES, STATIC_TREES, static_tree_nodes
from paceline.drafters.target import LoadedTarget
from paceline.errors import ConfigError, PacelineError
from paceline.kv_cache.row_plan import TreeLayout
from paceline.models.checkpoint import open_weights
from paceline.runtimes.base import FloatArray, split_into_passes
from paceline.runtimes.logits_summary import LogitsSummary, SummaryOptions
from paceline.sampling.residual import TokenProbs, draw_distinct
from paceline.sampling.truncation import top_probs
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds, DrafterTraits, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Candidate, grow_tree

MAX_CANDIDATES_PER_DEPTH = 10  # candidates of a depth
_FIRST_ACCURACY = 0.5  # prior accuracy of the best candidate of a head
_NEXT_ACCURACY = 0.1  # prior accuracy of the second candidate; halved for each further one
_PRIOR_TRIALS = 8.0  # number of trials that the prior accuracies count for
_MAX_TRIALS = 512.0  # trials of a depth at which all its counts are halved


@dataclass(slots=True)
class _LastHiddenState:
    """The target's final hidden state [E] of the token at `position`."""

    position: int
    hidden_state: FloatArray


@dataclass(slots=True)
class _RequestDraft:
    """A request that drafts in this step.

    Attributes:
        uses_ranking: whether the ranking made by the pass suffices; otherwise whole rows of logits are sampled.
        is_drawn: whether that ranking includes a draw.
    """

    request: Request
    budget: DraftBudget
    feature: _LastHiddenState
    depth: int
    uses_ranking: bool
    is_drawn: bool


@dataclass(slots=True)
class CandidateAccuracy:
    """How often the target's token was a head's r-th candidate, counted over positions whose earlier candidates were right.

    Attributes:
        trials: [depths].
        hits: [depths, ranks].
    """

    trials: list[float] = field(default_factory=list)
    hits: list[list[float]] = field(default_factory=list)

    def observe(self, candidates: Sequence[Sequence[int]], token_ids: Sequence[int]) -> None:
        """Record the target's tokens; the last of `token_ids` is the first one that no candidate matched, or the bonus token.

        Args:
            candidates: by depth, the candidate ids, best first.
        """
        while len(self.trials) < len(candidates):
            self.trials.append(0.0)
            self.hits.append([0.0] * MAX_CANDIDATES_PER_DEPTH)
        for depth, (ids, token) in enumerate(zip(candidates, token_ids, strict=False)):
            if self.trials[depth] >= _MAX_TRIALS:
                self.trials[depth] /= 2.0
                self.hits[depth] = [hits / 2.0 for hits in self.hits[depth]]
            self.trials[depth] += 1.0
            if token in ids:
                self.hits[depth][ids.index(token)] += 1.0

    def estimate(self, depth: int, rank: int, prior: float) -> float:
        """Return the accuracy of the candidate `rank` at a depth; `prior` counts as `_PRIOR_TRIALS` trials."""
        trials, hits = (self.trials[depth], self.hits[depth][rank]) if depth < len(self.trials) else (0.0, 0.0)
        return (hits + _PRIOR_TRIALS * prior) / (trials + _PRIOR_TRIALS)


class DepthCandidates:
    """Candidates of one request by depth, computed on first access, in order.

    A depth's candidates do not depend on those before, except through processors that use the history (penalties): these see the chain of
    first candidates.

    Args:
        row_of: a depth -> the head's row over the target's ids [V].
        max_candidates: candidates of a depth.
        needs_probs: whether probabilities are used; otherwise all are 1.
        ranked: the pass's ranking of each depth's row, if that suffices; else None.
    """

    def __init__(
        self,
        request: Request,
        row_of: Callable[[int], FloatArray],
        max_candidates: int,
        *,
        needs_probs: bool,
        ranked: Sequence[LogitsSummary] | None = None,
    ) -> None:
        self._ranked = ranked
        self._request, self._row_of = request, row_of
        self._num_ranks, self._wants_probs = max_candidates, needs_probs
        self.by_depth: list[DraftTokens] = []

    def candidates_at(self, depth: int) -> DraftTokens:
        """Return the candidates of head `depth`; 0 drafts the token after the root's child. None if no token that it ranks is allowed."""
        while len(self.by_depth) <= depth:
            at = len(self.by_depth)
            self.by_depth.append(self._from_row(at) if self._ranked is None else self._from_ranking(self._ranked[at]))
        return self.by_depth[depth]

    def _from_ranking(self, row: LogitsSummary) -> DraftTokens:
        """Return candidates as `_from_row` does, for a request whose logits are changed by the temperature only."""
        log_sum, drawn, scores, ids = row
        if not math.isfinite(log_sum):
            return NO_TOKENS
        is_greedy = self._request.params.is_greedy
        if self._num_ranks == 1:
            return DraftTokens((ids[0] if is_greedy else drawn,), (1.0,))
        listed = [token for token in ids[: self._num_ranks] if token >= 0]
        probs = [1.0] * len(listed)
        if self._wants_probs:
            probs = [math.exp(score - log_sum) for score in scores[: len(listed)]]
        return DraftTokens(listed, probs) if is_greedy else self._drawn_token_first(drawn, listed, probs)

    def _drawn_token_first(self, first: int, ids: Sequence[int], probs: Sequence[float]) -> DraftTokens:
        """Return the candidates with the drawn token first."""
        others = [(token, prob) for token, prob in zip(ids, probs, strict=True) if token != first][: self._num_ranks - 1]
        own = probs[ids.index(first)] if first in ids else probs[-1]
        return DraftTokens([first, *[token for token, _ in others]], [own, *[prob for _, prob in others]])

    def _from_row(self, depth: int) -> DraftTokens:
        request = self._request
        chain = [one.token_ids[0] for one in self.by_depth if one.token_ids]
        try:
            edited = request.processor.edit(self._row_of(depth), chain)
        except PacelineError:
            return NO_TOKENS
        first = edited.draw(request.seed, request.sample_index, len(request.token_ids) + depth)
        if self._num_ranks == 1:
            return DraftTokens([first], [1.0])
        best, probs = top_probs(request.params, edited.scale(), self._num_ranks)
        ids: list[int] = best.tolist()
        if not self._wants_probs:
            probs = [1.0] * len(ids)
        return DraftTokens(ids, probs) if request.params.is_greedy else self._drawn_token_first(first, ids, probs)


class MedusaDrafter(Drafter):
    """Drafts trees of the heads' candidates.

    Args:
        vocab_size: V of the target; ids beyond it are never proposed.
        tree: "probability" (grown by the heads' own probabilities), "accuracy" (grown by how often each head's r-th candidate was right),
            or the name of a published fixed tree.

    Raises:
        ConfigError: there is no such tree.
    """

    name = "medusa"
    needs = DrafterNeeds(hidden_states=True)

    def __init__(self, network: MedusaNetwork, *, vocab_size: int, tree: str = "probability") -> None:
        if tree not in GROWN_TREES and tree not in STATIC_TREES:
            raise ConfigError(f"medusa tree {tree!r} is unknown: use one of {', '.join((*GROWN_TREES, *STATIC_TREES))}")
        self._network, self._vocab_size, self._tree = network, vocab_size, tree
        self.traits = DrafterTraits(self._banner_text(), network.heads.notices)
        self._features = RequestState[_LastHiddenState]()
        # per request: its number of tokens at its last draft, and the candidates of each depth
        self._pending = RequestState[tuple[int, Sequence[Sequence[int]]]]()
        self._accuracy = {is_greedy: CandidateAccuracy() for is_greedy in (True, False)}
        self._token_map = network.heads.token_map
        if self._token_map is not None:  # rows of ids beyond the target's vocabulary are ignored
            self._known_rows = np.flatnonzero(self._token_map < vocab_size)
            self._known_ids = self._token_map[self._known_rows]
        self._is_ranked = _has_unique_ascending_ids(self._token_map, vocab_size)
        if self._is_ranked:
            network.set_ranking(
                SummaryOptions(vocab_size if self._token_map is None else len(self._token_map), MAX_CANDIDATES_PER_DEPTH, self._token_map)
            )

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        for one in rows:
            self._update_accuracy(one.request)
            last = one.start + one.num_rows - 1
            if one.hidden_states is not None and last == len(one.request.token_ids) - 2:  # it produced the root
                self._features[one.request] = _LastHiddenState(last, np.array(one.hidden_states[-1], np.float32))

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        trees: dict[int, DraftTree | None] = {}
        jobs = [self._new_request_draft(request, budget) for request, budget in zip(requests, budgets, strict=True)]
        for active in split_into_passes([job for job in jobs if job is not None], lambda _: self._network.heads.num_heads):
            depth = max([job.depth for job in active])
            draws = token_draws([(job.request, d) if job.is_drawn and d < job.depth else None for d in range(depth) for job in active])
            if draws is not None:
                draws = draws.reshape(depth, len(active))
            outputs = self._network.forward(np.stack([job.feature.hidden_state for job in active]), depth, draws)
            trees |= {id(job.request): self._draft(job, outputs, row) for row, job in enumerate(active)}
        return [trees.get(id(request)) for request in requests]

    def _banner_text(self) -> str:
        heads = self._network.heads
        tree = f"trees by {self._tree}" if self._tree in GROWN_TREES else f"tree {self._tree}"
        return f"medusa ({heads.num_heads} head{'s' if heads.num_heads > 1 else ''}, {tree})"

    def _new_request_draft(self, request: Request, budget: DraftBudget) -> _RequestDraft | None:
        feature = self._features.get(request)
        depth = min(budget.max_depth, budget.row_budget - 1, self._network.heads.num_heads)
        if feature is None or feature.position != len(request.token_ids) - 2 or depth < 1:
            return None
        is_greedy = request.params.is_greedy
        uses_ranking = self._is_ranked and request.processor.only_scales and (is_greedy or not budget.needs_draft_probs)
        return _RequestDraft(request, budget, feature, depth, uses_ranking, uses_ranking and not is_greedy)

    def _draft(self, job: _RequestDraft, outputs: HeadOutputs, row: int) -> DraftTree | None:
        """Return a request's tree from row `row` of each head's logits."""
        request, budget = job.request, job.budget

        def row_of(depth: int) -> FloatArray:
            return self._as_target_row(outputs.logits_of(depth)[row])

        if budget.needs_draft_probs and not request.params.is_greedy:
            token_ids, draft_probs = _draw_chain(request, row_of, job.depth)
            return DraftTree.grow(request.token_ids[-1], token_ids, range(len(token_ids)), self.name, draft_probs) if token_ids else None
        shape = None
        max_candidates = MAX_CANDIDATES_PER_DEPTH
        needs_probs = self._tree == "probability"
        if self._tree in STATIC_TREES:
            shape = static_tree_nodes(self._tree, job.depth, budget.row_budget, budget.layout)
            max_candidates = 1 + max((rank for _, _, rank in shape), default=0)
        elif needs_probs:  # a tree takes at most this many candidates per depth
            max_candidates = 1 if budget.layout is TreeLayout.CHAIN else min(MAX_CANDIDATES_PER_DEPTH, budget.row_budget - 1)
        ranked = [of_head[row] for of_head in outputs.ranked] if job.uses_ranking else None
        candidates = DepthCandidates(request, row_of, max_candidates, needs_probs=needs_probs, ranked=ranked)
        tree = self._grow_tree(job, candidates) if shape is None else self._fill_static_tree(job, candidates, shape)
        self._pending[request] = len(request.token_ids), [one.token_ids for one in candidates.by_depth]
        return tree

    def _fill_static_tree(self, job: _RequestDraft, candidates: DepthCandidates, shape: Sequence[tuple[int, int, int]]) -> DraftTree | None:
        """Fill a published tree, given as (parent, depth, rank) per node, with this step's candidates."""
        token_ids: list[int] = []
        parents: list[int] = []
        node_of = {0: 0}  # with a small vocabulary a rank may not exist: its node is omitted
        for node, (parent, depth, rank) in enumerate(shape, start=1):
            ids = candidates.candidates_at(depth).token_ids if parent in node_of else ()
            if rank < len(ids):
                token_ids.append(ids[rank])
                parents.append(node_of[parent])
                node_of[node] = len(token_ids)
        return DraftTree.grow(job.request.token_ids[-1], token_ids, parents, self.name) if token_ids else None

    def _grow_tree(self, job: _RequestDraft, candidates: DepthCandidates) -> DraftTree | None:
        is_greedy = job.request.params.is_greedy
        by_depth: list[list[Candidate[int]]] = []

        def expand(depth: int) -> list[Candidate[int]]:
            if depth == len(by_depth):
                tokens = candidates.candidates_at(depth)
                probs = self._acceptance_rates(depth, tokens.probs, is_greedy=is_greedy)
                by_depth.append([(token, prob, self.name, depth + 1) for token, prob in zip(tokens.token_ids, probs, strict=True)])
            return by_depth[depth]

        budget = DraftBudget(job.budget.row_budget, job.depth, job.budget.layout)
        return grow_tree(job.request.token_ids[-1], budget, 0, expand)

    def _acceptance_rates(self, depth: int, probs: Sequence[float], *, is_greedy: bool) -> Sequence[float]:
        """Estimate the acceptance rate of each candidate of a depth, given that the tokens before it are accepted."""
        accuracy = self._accuracy[is_greedy]
        if self._tree == "accuracy":
            priors = [_FIRST_ACCURACY, *(_NEXT_ACCURACY * 0.5**rank for rank in range(len(probs) - 1))]
            return [accuracy.estimate(depth, rank, prior) for rank, prior in enumerate(priors)]
        if is_greedy:
            return probs
        # a candidate drawn with the target's noise is right far more often than its probability
        first = max(probs[0], accuracy.estimate(depth, 0, _FIRST_ACCURACY))
        rest = sum(probs[1:])
        scale = min(1.0, (1.0 - first) / rest) if rest > 0.0 else 0.0
        return [first, *[prob * scale for prob in probs[1:]]]

    def _update_accuracy(self, request: Request) -> None:
        """Compare the candidates of the last draft with the tokens that the target produced."""
        pending = self._pending.pop(request)
        if pending is not None:
            num_tokens, candidates = pending
            self._accuracy[request.params.is_greedy].observe(candidates, request.token_ids[num_tokens:])

    def _as_target_row(self, row: FloatArray) -> FloatArray:
        """Return a head's row over the target's ids [V], -inf for ids without a row."""
        if self._token_map is None and len(row) >= self._vocab_size:
            return row[: self._vocab_size]
        full = np.full(self._vocab_size, -np.inf, np.float32)
        if self._token_map is None:
            full[: len(row)] = row
        else:
            full[self._known_ids] = row[self._known_rows]
        return full


def _has_unique_ascending_ids(token_map: NDArray[np.int64] | None, vocab_size: int) -> bool:
    """Return whether the rows of a head have distinct ids in ascending order, so that a ranking has no duplicates and breaks ties by id."""
    return token_map is None or bool(len(token_map) and np.all(np.diff(token_map) > 0) and token_map[-1] < vocab_size)


def _draw_chain(request: Request, row_of: Callable[[int], FloatArray], depth: int) -> tuple[list[int], dict[int, TokenProbs]]:
    """Draw one token per depth from its head's distribution with separate noise; return them with the distributions by node."""
    token_ids: list[int] = []
    draft_probs: dict[int, TokenProbs] = {}
    for node in range(depth):
        try:
            draft_probs[node] = TokenProbs.from_distribution(request.processor.process(row_of(node), token_ids))
        except PacelineError:
            break
        token_ids += draw_distinct(draft_probs[node], 1, request.seed, request.sample_index, len(request.token_ids), node)
    return token_ids, draft_probs


def open_medusa(files: HeadFiles, target: LoadedTarget) -> MedusaDrafter:
    """Open the drafter for the files of heads.

    Raises:
        CheckpointError, IncompatibleDrafterError: the files do not hold what heads for this target need.
    """
    config = target.runtime.config
    target_weights = open_weights(target.directory, config)
    heads = load_medusa(files, config, target_weights["embedding.weight" if config.tied_embeddings else "lm_head.weight"])
    heads = replace(heads, weights=target.quantized(heads.weights, files.files))
    shared = target.lm_head_of if heads.has_target_lm_head else None
    network = MedusaNetwork(heads, config, num_threads=target.engine.num_threads, device=target.device, lm_head_of=shared)
    return MedusaDrafter(network, vocab_size=target.vocab_size, tree=target.head_options.tree or GROWN_TREES[0])
