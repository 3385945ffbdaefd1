"""Medusa: extra heads on the target's own last feature guess several positions at once.

Source: Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (arXiv:2401.10774).
Deviations: the root is the token the target has already committed, so heads guess from its first child on; every kept token is the
target's own draw (no typical acceptance); the tree is grown by probability per row of the target pass unless a fixed one is named; for
sampled requests the first guess at a depth is drawn with the target's own noise, or, for rejection sampling, a chain with separate noise.

Head d reads the feature f of position t and guesses token t + 2 + d. The token t + 1 is the root, so head 0 guesses its children. The
heads have no cache, and the feature comes from the pass that produced the root.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.drafters.head_files import HeadFiles
from paceline.drafters.medusa.checkpoint import load_medusa
from paceline.drafters.medusa.guesses import NUM_RANKS, Guesses, RankAccuracy, drawn_chain
from paceline.drafters.medusa.network import HeadOutputs, MedusaNetwork
from paceline.drafters.medusa.trees import GROWN_TREES, STATIC_TREES, static_shape
from paceline.drafters.target import LoadedTarget
from paceline.errors import ConfigError
from paceline.kv_cache.row_plan import TreeLayout
from paceline.models.checkpoint import open_weights
from paceline.runtimes.base import FloatArray, split_into_passes
from paceline.runtimes.ranking import DRAW, Draws, Ranking
from paceline.sampling.noise import Purpose, noise_key
from paceline.speculation.drafter import CommittedRows, DraftBudget, Drafter, DrafterNeeds, DrafterTraits, RequestState
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree
from paceline.speculation.tree_growth import Candidate, grow_tree

_FIRST_ACCURACY = 0.5  # of a first guess, before anything is measured
_NEXT_ACCURACY = 0.1  # of the second guess; halved for each one after it


@dataclass(slots=True)
class _Feature:
    """The target's final hidden state [E] of the token at `position`."""

    position: int
    values: FloatArray


@dataclass(slots=True)
class _Asked:
    """A request that drafts in this step.

    Attributes:
        reads_ranks: whether the pass's own ranking of its rows is enough.
        is_drawn: whether that includes a draw.
    """

    request: Request
    budget: DraftBudget
    feature: _Feature
    depth: int
    reads_ranks: bool
    is_drawn: bool


class MedusaDrafter(Drafter):
    """Proposes trees of what the heads guess.

    Args:
        vocab_size: V of the target; ids beyond it are never proposed.
        tree: "probability" (grown by the heads' own probabilities), "accuracy" (grown by how often each head's r-th guess was right),
            or the name of a published fixed tree.
        note: what a user should know, for the banner.

    Raises:
        ConfigError: there is no such tree.
    """

    name = "medusa"
    needs = DrafterNeeds(hidden_states=True)

    def __init__(self, network: MedusaNetwork, *, vocab_size: int, tree: str = "probability", note: str = "") -> None:
        if tree not in GROWN_TREES and tree not in STATIC_TREES:
            raise ConfigError(f"medusa tree {tree!r} is unknown: use one of {', '.join((*GROWN_TREES, *STATIC_TREES))}")
        self._network, self._vocab_size, self._tree, self._note = network, vocab_size, tree, note
        self.traits = DrafterTraits(self._describe(), network.heads.notices)
        self._features = RequestState[_Feature]()
        # tokens of the request when it was asked, what was guessed at each depth
        self._pending = RequestState[tuple[int, Sequence[Sequence[int]]]]()
        self._accuracy = {is_greedy: RankAccuracy() for is_greedy in (True, False)}
        self._token_map = network.heads.token_map
        if self._token_map is not None:  # ignore rows of ids that the target's tokenizer does not know
            self._known_rows = np.flatnonzero(self._token_map < vocab_size)
            self._known_ids = self._token_map[self._known_rows]
        self._is_ranked = _can_rank(self._token_map, vocab_size)
        if self._is_ranked:
            network.rank(Ranking(vocab_size if self._token_map is None else len(self._token_map), NUM_RANKS, self._token_map))

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        for one in rows:
            self._measure(one.request)
            last = one.start + one.num_rows - 1
            if one.hidden_states is not None and last == len(one.request.token_ids) - 2:  # it produced the root
                self._features[one.request] = _Feature(last, np.array(one.hidden_states[-1], np.float32))

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        trees: dict[int, DraftTree | None] = {}
        asked = [self._ask(request, budget) for request, budget in zip(requests, budgets, strict=True)]
        for active in split_into_passes([one for one in asked if one is not None], lambda _: self._network.heads.num_heads):
            depth = max([one.depth for one in active])
            draws = _draws(active, depth) if any(one.is_drawn for one in active) else None
            outputs = self._network.forward(np.stack([one.feature.values for one in active]), depth, draws)
            trees |= {id(one.request): self._guess(one, outputs, row) for row, one in enumerate(active)}
        return [trees.get(id(request)) for request in requests]

    def _describe(self) -> str:
        heads = self._network.heads
        tree = f"trees by {self._tree}" if self._tree in GROWN_TREES else f"tree {self._tree}"
        return f"medusa ({heads.num_heads} head{'s' if heads.num_heads > 1 else ''}, {tree}{self._note})"

    def _ask(self, request: Request, budget: DraftBudget) -> _Asked | None:
        feature = self._features.get(request)
        depth = min(budget.max_depth, budget.row_budget - 1, self._network.heads.num_heads)
        if feature is None or feature.position != len(request.token_ids) - 2 or depth < 1:
            return None
        is_greedy = request.params.is_greedy
        reads_ranks = self._is_ranked and request.processor.only_scales and (is_greedy or not budget.wants_draws)
        return _Asked(request, budget, feature, depth, reads_ranks, reads_ranks and not is_greedy)

    def _guess(self, one: _Asked, outputs: HeadOutputs, row: int) -> DraftTree | None:
        """A request's tree, from row `row` of the pass."""
        request = one.request

        def row_of(depth: int) -> FloatArray:
            return self._as_target_row(outputs.logits_of(depth)[row])

        if one.budget.wants_draws and not request.params.is_greedy:
            token_ids, draft_probs = drawn_chain(request, row_of, one.depth)
            return DraftTree.grow(request.token_ids[-1], token_ids, range(len(token_ids)), self.name, draft_probs) if token_ids else None
        shape = None
        num_ranks = NUM_RANKS
        if self._tree in STATIC_TREES:
            shape = static_shape(self._tree, one.depth, one.budget.row_budget, one.budget.layout)
            num_ranks = 1 + max((rank for _, _, rank in shape), default=0)
        elif self._tree == "probability":
            num_ranks = _num_ranks(one.budget)
        wants_probs = self._tree == "probability"
        ranked = [of_head[row] for of_head in outputs.ranked] if one.reads_ranks else None
        guesses = Guesses(request, row_of, num_ranks, wants_probs=wants_probs, ranked=ranked)
        tree = self._grown(one, guesses) if shape is None else self._static(one, guesses, shape)
        self._pending[request] = len(request.token_ids), [candidates.token_ids for candidates in guesses.by_depth]
        return tree

    def _static(self, one: _Asked, guesses: Guesses, shape: Sequence[tuple[int, int, int]]) -> DraftTree | None:
        """The named tree, given as (parent, depth, rank) per node, filled with this step's guesses."""
        token_ids: list[int] = []
        parents: list[int] = []
        node_of = {0: 0}  # a rank that a narrow vocabulary does not have leaves a gap
        for node, (parent, depth, rank) in enumerate(shape, start=1):
            candidates = guesses.at(depth).token_ids if parent in node_of else ()
            if rank < len(candidates):
                token_ids.append(candidates[rank])
                parents.append(node_of[parent])
                node_of[node] = len(token_ids)
        return DraftTree.grow(one.request.token_ids[-1], token_ids, parents, self.name) if token_ids else None

    def _grown(self, one: _Asked, guesses: Guesses) -> DraftTree | None:
        is_greedy = one.request.params.is_greedy
        by_depth: list[list[Candidate[int]]] = []

        def expand(depth: int) -> list[Candidate[int]]:
            if depth == len(by_depth):
                candidates = guesses.at(depth)
                probs = self._probs(depth, candidates.probs, is_greedy=is_greedy)
                by_depth.append([(token, prob, self.name, depth + 1) for token, prob in zip(candidates.token_ids, probs, strict=True)])
            return by_depth[depth]

        budget = DraftBudget(one.budget.row_budget, one.depth, one.budget.layout)
        return grow_tree(one.request.token_ids[-1], budget, 0, expand)

    def _probs(self, depth: int, probs: Sequence[float], *, is_greedy: bool) -> Sequence[float]:
        """The estimated chance of each guess at a depth, once everything before it was right."""
        accuracy = self._accuracy[is_greedy]
        if self._tree == "accuracy":
            expected = [_FIRST_ACCURACY, *(_NEXT_ACCURACY * 0.5**rank for rank in range(len(probs) - 1))]
            return [accuracy.of(depth, rank, share) for rank, share in enumerate(expected)]
        if is_greedy:
            return probs
        # Drawn with the target's noise, the first guess is right far more often than its probability says.
        first = max(probs[0], accuracy.of(depth, 0, _FIRST_ACCURACY))
        rest = sum(probs[1:])
        scale = min(1.0, (1.0 - first) / rest) if rest > 0.0 else 0.0
        return [first, *[prob * scale for prob in probs[1:]]]

    def _measure(self, request: Request) -> None:
        """Compare the guesses with the target's tokens."""
        pending = self._pending.pop(request)
        if pending is not None:
            asked_at, guessed = pending
            self._accuracy[request.params.is_greedy].observe(guessed, request.token_ids[asked_at:])

    def _as_target_row(self, row: FloatArray) -> FloatArray:
        """A head's row over the target's ids [V], -inf for those it does not know."""
        if self._token_map is None and len(row) >= self._vocab_size:
            return row[: self._vocab_size]
        full = np.full(self._vocab_size, -np.inf, np.float32)
        if self._token_map is None:
            full[: len(row)] = row
        else:
            full[self._known_ids] = row[self._known_rows]
        return full


def _can_rank(token_map: NDArray[np.int64] | None, vocab_size: int) -> bool:
    """Whether every row of a head has its own id: then the pass's ranking has no id twice, and lower ids first on ties."""
    return token_map is None or bool(len(token_map) and np.all(np.diff(token_map) > 0) and token_map[-1] < vocab_size)


def _num_ranks(budget: DraftBudget) -> int:
    """Guesses per depth: a tree cannot take more of one depth."""
    return 1 if budget.layout is TreeLayout.CHAIN else min(NUM_RANKS, budget.row_budget - 1)


def _draws(active: Sequence[_Asked], depth: int) -> Draws:
    """[depth, B] how the tokens of each depth are drawn."""
    draws = np.zeros((depth, len(active)), DRAW)
    for index, one in enumerate(active):
        if one.is_drawn:
            request, temperature = one.request, one.request.params.temperature
            first = len(request.token_ids)
            for ahead in range(one.depth):
                key = noise_key(request.seed, request.sample_index, first + ahead, Purpose.TOKEN)
                draws[ahead, index] = (key, temperature, 0)
    return draws


def open_medusa(files: HeadFiles, target: LoadedTarget) -> MedusaDrafter:
    """The drafter for the files of heads.

    Raises:
        CheckpointError, IncompatibleDrafterError: the files do not hold what heads for this target need.
    """
    config = target.runtime.config
    target_weights = open_weights(target.directory, config)
    heads = load_medusa(files, config, target_weights["embedding.weight" if config.tied_embeddings else "lm_head.weight"])
    heads = replace(heads, weights=target.quantized(heads.weights, files.files))
    shared = target.lm_head_of if heads.borrows_lm_head else None
    network = MedusaNetwork(heads, config, num_threads=target.engine.num_threads, device=target.device, lm_head_of=shared)
    return MedusaDrafter(network, vocab_size=target.vocab_size, tree=target.head_options.medusa_tree or GROWN_TREES[0])
