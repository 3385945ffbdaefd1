"""Network of Medusa heads. It has no KV cache: the only input of a pass is the last hidden state of each request.

Source: Cai et al. 2024, "Medusa" (arXiv:2401.10774), section 2.1.1: head i is residual blocks x + SiLU(W x + b) and an lm_head.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Unpack

import numpy as np

from paceline.drafters.medusa.checkpoint import MedusaHeads
from paceline.models.config import ModelConfig
from paceline.models.layers import Activation
from paceline.runtimes.base import FloatArray, ForwardBatch, IntArray, LogitsRows, Network
from paceline.runtimes.decoder import LOGITS, SUMMARY, Ops, Value
from paceline.runtimes.load import HeadPlacement, load_head
from paceline.runtimes.logits_summary import LogitsSummary, RowSampling, SummaryOptions, decode_summaries


@dataclass(frozen=True, slots=True)
class MedusaOutputs:
    """Results of a pass of one or more heads for B requests."""

    logits_of_head: Callable[[int], FloatArray]  # returns the logits [B, rows] of a head; the next pass overwrites them
    top_tokens: Sequence[Sequence[LogitsSummary]]  # for each head the top tokens of its B rows of logits; empty if none were requested


class MedusaNetwork:
    """Runs Medusa heads. Shorter drafts need fewer heads, so it has a network for the first head, for the first two, and so on.

    Args:
        target: config of the target whose hidden states the heads read.

    Attributes:
        summary_options: which top tokens later passes return for each row of logits; None = none.
    """

    def __init__(self, heads: MedusaHeads, target: ModelConfig, **placement: Unpack[HeadPlacement]) -> None:
        self.heads = heads
        self.hidden_size = target.hidden_size
        self.summary_options: SummaryOptions | None = None
        placement["max_model_len"] = 1  # the heads have no cache
        first = load_head(partial(self._define_network, num_heads=1), target, heads.weights, **placement)
        self._networks: dict[int, Network] = {1: first}
        # a shared lm_head has a network of its own, so that it is read from memory once for the rows of all heads
        self._lm_head = first.network_with_same_weights(self._define_lm_head) if heads.heads_share_lm_head else None

    def forward(self, hidden_states: FloatArray, num_heads: int, sampling: RowSampling | None = None) -> MedusaOutputs:
        """Run the first `num_heads` heads on the last hidden states [B, E] of B requests.

        Args:
            sampling: [num_heads, B] noise keys and temperatures to draw one token from each row of logits; None = draw none.
        """
        network, summary_options = self._get_or_create_network(num_heads), self.summary_options
        batch_size, has_summaries, heads = len(hidden_states), summary_options is not None, range(num_heads)
        batch, rows = _rows_without_attention(batch_size)
        if self._lm_head is None:
            results = network.forward({"hidden_states": hidden_states}, batch, LogitsRows(rows, summary_options, sampling)).results
            summaries = [decode_summaries(results[f"{SUMMARY}.{head}"]) for head in heads] if has_summaries else []
            return MedusaOutputs(lambda head: results[f"{LOGITS}.{head}"], summaries)
        results = network.forward({"hidden_states": hidden_states}, batch, LogitsRows(rows)).results
        hidden = np.concatenate([results[f"head.{head}"] for head in heads])
        batch, rows = _rows_without_attention(num_heads * batch_size)
        output = self._lm_head.forward({"hidden": hidden}, batch, LogitsRows(rows, summary_options, sampling))
        all_summaries = output.summaries if has_summaries else []
        summaries = [all_summaries[head * batch_size : (head + 1) * batch_size] for head in heads] if has_summaries else []
        logits = output.logits.reshape(num_heads, batch_size, -1)
        return MedusaOutputs(logits.__getitem__, summaries)

    def _get_or_create_network(self, num_heads: int) -> Network:
        network = self._networks.get(num_heads)
        if network is None:
            network = self._networks[num_heads] = self._networks[1].network_with_same_weights(
                partial(self._define_network, num_heads=num_heads)
            )
        return network

    def _define_network(self, ops: Ops[Value], *, num_heads: int) -> Mapping[str, Value]:
        """Compose the first heads. Results: the logits of each head, or the hidden states that a shared lm_head takes."""
        hidden_states = ops.input("hidden_states", self.hidden_size)
        hidden = [hidden_states] * num_heads
        for block in range(self.heads.num_blocks):
            names = [f"heads.{head}.blocks.{block}" for head in range(num_heads)]
            if block == 0:  # the first blocks of all heads have the same input, so one matrix product computes them
                products = ops.linear(hidden_states, *names)
            else:
                products = tuple(ops.linear(x, name)[0] for x, name in zip(hidden, names, strict=True))
            hidden = [ops.add(x, ops.activated(product, Activation.SILU)) for x, product in zip(hidden, products, strict=True)]
        if self.heads.heads_share_lm_head:
            return {f"head.{head}": x for head, x in enumerate(hidden)}
        return {f"{LOGITS}.{head}": ops.lm_head(x, f"heads.{head}.lm_head") for head, x in enumerate(hidden)}

    def _define_lm_head(self, ops: Ops[Value]) -> Mapping[str, Value]:
        logits = ops.lm_head(ops.input("hidden", self.hidden_size), "lm_head")
        return {LOGITS: logits if self.heads.soft_cap is None else ops.soft_cap(logits, self.heads.soft_cap)}


def _rows_without_attention(count: int) -> tuple[ForwardBatch, IntArray]:
    """Return a `ForwardBatch` of `count` rows for a network without attention, and the row indices."""
    rows = np.arange(count, dtype=np.int32)
    return ForwardBatch(rows, ()), rows
