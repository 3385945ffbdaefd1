"""A target with given logits at each position, whatever the text, and a drafter that is mostly right."""

from collections.abc import Mapping, Sequence

import numpy as np

from paceline.kv_cache.cache import KVCache
from paceline.kv_cache.full_attention import FullAttentionCache
from paceline.runtimes.base import FloatArray, ForwardBatch, ForwardOutput, IntArray, LogitsRows, Network
from paceline.runtimes.decoder import NetworkDefinition
from paceline.sampling.residual import TokenProbs, draw_distinct
from paceline.speculation.drafter import DraftBudget, Drafter
from paceline.speculation.request import Request
from paceline.speculation.tree import DraftTree

MAX_DEPTH = 7
NUM_POSITIONS = 40


class WrittenTarget(Network):
    """Row p of `table` [NUM_POSITIONS, V] is the logits after position p."""

    def __init__(self) -> None:
        self.table = np.zeros((NUM_POSITIONS, 1), np.float32)

    def new_cache(self, num_blocks: int) -> KVCache:
        return KVCache([], num_blocks, block_size=8)

    def allocate_kv(self, num_blocks: int) -> list[FullAttentionCache]:
        raise AssertionError

    def forward(self, inputs: Mapping[str, IntArray], batch: ForwardBatch, wanted: LogitsRows) -> ForwardOutput:
        logits = self.table[batch.positions[wanted.rows]]
        return ForwardOutput({"logits": logits, "hidden_states": np.zeros((len(batch.positions), 1), np.float32)})

    def embed(self, token_ids: IntArray) -> FloatArray:
        return np.zeros((len(token_ids), 1), np.float32)

    def network_with_same_weights(self, definition: NetworkDefinition) -> "WrittenTarget":
        raise AssertionError


class BlockDrafter(Drafter):
    """Right draft tokens in blocks of random sizes, with wrong ones after or next to them.

    Attributes:
        num_drafted: tokens of the text up to the last right draft token.
    """

    name = "blocks"

    def __init__(self, text: Sequence[int], vocab_size: int, random: np.random.Generator) -> None:
        self._text, self._vocab_size, self._random = text, vocab_size, random
        self.num_drafted = 0

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        (request,), random = requests, self._random
        start = len(request.token_ids)
        right = list(self._text[start : start + int(random.integers(0, MAX_DEPTH + 1))])
        self.num_drafted = start + len(right)
        wrong = random.integers(0, self._vocab_size, int(random.integers(0, 3))).tolist()
        if not right + wrong:
            return [None]
        if random.random() < 0.5:
            return [DraftTree.chain(request.token_ids[-1], right + wrong, self.name)]
        parents = [*range(len(right)), *random.integers(0, len(right) + 1, len(wrong)).tolist()]
        return [DraftTree.from_nodes(request.token_ids[-1], right + wrong, parents, self.name)]


class DrawingDrafter(Drafter):
    """Samples drafts from distributions that favour the right token of a text, and returns these distributions."""

    name = "drawing"

    def __init__(self, text: Sequence[int], vocab_size: int, random: np.random.Generator) -> None:
        self._text, self._vocab_size, self._random = text, vocab_size, random

    def propose(self, requests: Sequence[Request], budgets: Sequence[DraftBudget]) -> list[DraftTree | None]:
        (request,), (budget,), random = requests, budgets, self._random
        start, count = len(request.token_ids), 1 + int(random.random() < 0.3)
        depth = min(budget.max_depth, (budget.max_rows - 1) // count, len(self._text) - start)
        token_ids, parents, node = list[int](), list[int](), 0
        draft_probs: dict[int, TokenProbs] = {}
        for level in range(depth):
            others = random.integers(0, self._vocab_size, 3).tolist()
            values = np.bincount([self._text[start + level]] * 9 + others, minlength=self._vocab_size).astype(np.float64)
            draft_probs[node] = TokenProbs(values / values.sum())
            drawn = draw_distinct(draft_probs[node], count, request.seed, request.sample_index, start, level)
            parents += [node] * len(drawn)
            node = len(token_ids) + 1
            token_ids += drawn
        return [DraftTree.from_nodes(request.token_ids[-1], token_ids, parents, self.name, draft_probs)] if token_ids else [None]
