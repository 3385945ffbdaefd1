"""Network of Medusa heads: no cache, no recurrence, one pass for all requests.

Source: Cai et al. 2024, "Medusa" (arXiv:2401.10774), section 2.1.1: head i is blocks x + SiLU(W x + b), then a vocabulary matrix.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from paceline.drafters.medusa.checkpoint import MedusaHeads
from paceline.models.config import ModelConfig
from paceline.runtimes.base import FloatArray, ForwardBatch, IntArray, LogitsRows, Network
from paceline.runtimes.decoder import LOGITS, SUMMARY, Blocks, Value
from paceline.runtimes.load import load_head
from paceline.runtimes.logits_summary import LogitsSummary, RowSampling, SummaryOptions, decode_summaries


@dataclass(frozen=True, slots=True)
class HeadOutputs:
    """Results of a pass for the first heads.

    Attributes:
        logits_of: a head -> [B, rows], views that the next pass overwrites.
        ranked: [B] rankings by head; empty without a ranking.
    """

    logits_of: Callable[[int], FloatArray]
    ranked: Sequence[Sequence[LogitsSummary]]


class MedusaNetwork:
    """Runs the first heads on features; keeps one network for every number of heads in use.

    Args:
        target: the heads read its features.
        backend, device, lm_head_of: see `load_head`.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        target: ModelConfig,
        *,
        num_threads: int,
        backend: str = "auto",
        device: str = "cpu",
        lm_head_of: Network | None = None,
    ) -> None:
        self.heads = heads
        self.hidden_size = target.hidden_size
        self._ranking: SummaryOptions | None = None
        one_head = partial(self._compose, num_heads=1)
        first = load_head(
            one_head,
            target,
            heads.weights,
            num_threads=num_threads,
            max_model_len=1,
            backend=backend,
            device=device,
            lm_head_of=lm_head_of,
        )
        self._networks: dict[int, Network] = {1: first}
        # a shared vocabulary matrix is read once, for the rows of all heads together
        self._lm_head = first.network_with_same_weights(self._compose_lm_head) if heads.has_shared_lm_head else None

    def set_ranking(self, ranking: SummaryOptions) -> None:
        """Set the ranking with which later passes summarise their rows of logits."""
        self._ranking = ranking

    def forward(self, features: FloatArray, num_heads: int, draws: RowSampling | None = None) -> HeadOutputs:
        """Run the first heads on features [B, E].

        Args:
            draws: [num_heads, B] how the token of each row is drawn; None = no draws.
        """
        network, ranking = self._network(num_heads), self._ranking
        batch_size, is_ranked, heads = len(features), ranking is not None, range(num_heads)
        batch, rows = _rows_without_attention(batch_size)
        if self._lm_head is None:
            results = network.forward({"features": features}, batch, LogitsRows(rows, ranking, draws)).results
            ranked = [decode_summaries(results[f"{SUMMARY}.{head}"]) for head in heads] if is_ranked else []
            return HeadOutputs(lambda head: results[f"{LOGITS}.{head}"], ranked)
        results = network.forward({"features": features}, batch, LogitsRows(rows)).results
        hidden = np.concatenate([results[f"head.{head}"] for head in heads])
        batch, rows = _rows_without_attention(num_heads * batch_size)
        output = self._lm_head.forward({"hidden": hidden}, batch, LogitsRows(rows, ranking, draws))
        found = output.summaries if is_ranked else []
        ranked = [found[head * batch_size : (head + 1) * batch_size] for head in heads] if is_ranked else []
        logits = output.logits.reshape(num_heads, batch_size, -1)
        return HeadOutputs(logits.__getitem__, ranked)

    def _network(self, num_heads: int) -> Network:
        network = self._networks.get(num_heads)
        if network is None:
            network = self._networks[num_heads] = self._networks[1].network_with_same_weights(partial(self._compose, num_heads=num_heads))
        return network

    def _compose(self, blocks: Blocks[Value], *, num_heads: int) -> Mapping[str, Value]:
        """Compose the heads: logits of each, or the inputs of a shared vocabulary matrix."""
        features = blocks.input("features", self.hidden_size)
        hidden = [features] * num_heads
        for block in range(self.heads.num_blocks):
            names = [f"heads.{head}.blocks.{block}" for head in range(num_heads)]
            if block == 0:  # the first blocks of all heads have the same input: one product
                products = blocks.linear(features, *names)
            else:
                products = tuple(blocks.linear(x, name)[0] for x, name in zip(hidden, names, strict=True))
            hidden = [blocks.silu_residual(x, product) for x, product in zip(hidden, products, strict=True)]
        if self.heads.has_shared_lm_head:
            return {f"head.{head}": x for head, x in enumerate(hidden)}
        return {f"{LOGITS}.{head}": blocks.lm_head(x, f"heads.{head}.lm_head") for head, x in enumerate(hidden)}

    def _compose_lm_head(self, blocks: Blocks[Value]) -> Mapping[str, Value]:
        logits = blocks.lm_head(blocks.input("hidden", self.hidden_size), "lm_head")
        return {LOGITS: logits if self.heads.soft_cap is None else blocks.soft_cap(logits, self.heads.soft_cap)}


def _rows_without_attention(count: int) -> tuple[ForwardBatch, IntArray]:
    """Return the batch and row indices of `count` rows without attention."""
    rows = np.arange(count, dtype=np.int32)
    return ForwardBatch(rows, ()), rows
