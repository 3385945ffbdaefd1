"""The networks of a block drafter.

`context_network` computes keys and values of committed positions from the target's hidden states; they stay cached. `block_network` runs
the last committed token, called the anchor, and mask tokens; their keys and values are not kept. DSpark adds a bias to each row of logits
that depends on the tokens drafted so far (`markov_bias_network`). DFlash2 rescores the most probable tokens of each row, depending on the
token drafted before them (`BlockHead.rescore_candidates`).

Sources: DFlash and DFlash2 (z-lab `dflash/model.py`), DSpark (deepseek-ai/DeepSpec `modeling/dspark`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Unpack

import numpy as np

from paceline.drafters.block.checkpoint import BlockCheckpoint
from paceline.drafters.block.config import BlockConfig, MarkovKind
from paceline.models.config import WeightType
from paceline.models.layers import QKNorm
from paceline.models.weights import AnyTensor, Tensor, Weights, as_float32
from paceline.runtimes.base import FloatArray, ForwardBatch, ForwardOutput, IntArray, LogitsRows, RowRange
from paceline.runtimes.decoder import HIDDEN_STATES, LOGITS, NetworkDefinition, Ops, Value, decoder_layer
from paceline.runtimes.embedding import embedding_rows
from paceline.runtimes.load import HeadPlacement, load_head
from paceline.runtimes.logits_summary import RowSampling, SummaryOptions

BOUNDARY, EMBEDDING, MARKOV_LATENT, BASE_LOGITS = "boundary", "embedding", "latent", "base"
SELECTOR_VECTORS = "selector_vectors"
"""Names of inputs: the target's hidden states at a layer boundary (`boundary.0`, …), token embeddings of a block, latent vectors of the
Markov head, logits before their bias. Name of a result: the vector of each row with which DFlash2's selector rescores its top tokens."""


def context_network(config: BlockConfig) -> NetworkDefinition:
    """Return the network that computes and caches keys and values of committed positions."""

    def define_network(ops: Ops[Value]) -> Mapping[str, Value]:
        hidden_states = [ops.input(f"{BOUNDARY}.{index}", config.target_hidden_size) for index in range(len(config.layer_boundaries))]
        (mixed,) = ops.linear(ops.concat(*hidden_states), "fc")
        context, stored = ops.rms_norm(mixed, "hidden_norm"), []
        for layer, attention in config.layers.attention_layers.items():
            prefix = f"layers.{layer}."
            names = ["k_proj"] if attention.uses_keys_as_values else ["k_proj", "v_proj"]
            k, *values = ops.linear(context, *(prefix + name for name in names))
            v = values[0] if values else k
            if attention.qk_norm is QKNorm.HEAD:
                k = ops.head_norm(k, prefix + "k_norm", attention.num_kv_heads)
            k = ops.rope(k, attention.num_kv_heads, attention.key_rope)
            v = ops.head_norm(v, None, attention.num_kv_heads) if attention.has_value_norm else v
            v = v if attention.value_scale == 1.0 else ops.scale(v, attention.value_scale)
            stored.append(ops.store_kv(k, v, attention, layer))
        return {f"stored.{layer}": value for layer, value in enumerate(stored)}

    return define_network


def block_network(config: BlockConfig) -> NetworkDefinition:
    """Return the network that runs a block. Results: final `hidden_states` [T, E], `logits` [R, V of drafts]; DFlash2: selector vectors."""

    def define_network(ops: Ops[Value]) -> Mapping[str, Value]:
        x = ops.input(EMBEDDING, config.layers.hidden_size)
        for index, layer in enumerate(config.layers.layers):
            x = decoder_layer(ops, layer, x, index)
        hidden = ops.rms_norm(x, "final_norm")
        logits = ops.lm_head(ops.logits_rows(hidden), "lm_head")
        if config.logit_scale != 1.0:
            logits = ops.scale(logits, config.logit_scale)
        if config.logit_soft_cap is not None:
            logits = ops.soft_cap(logits, config.logit_soft_cap)
        vectors = {SELECTOR_VECTORS: ops.linear(hidden, "selector")[0]} if config.num_rescored_tokens else {}
        return {LOGITS: logits, HIDDEN_STATES: hidden, **vectors}

    return define_network


def markov_bias_network(config: BlockConfig, markov_rank: int) -> NetworkDefinition:
    """Return the network that turns latent vectors [T, r] of DSpark's Markov head into a bias, and adds it to `logits` [R, Vd]."""

    def define_network(ops: Ops[Value]) -> Mapping[str, Value]:
        bias = ops.lm_head(ops.logits_rows(ops.input(MARKOV_LATENT, markov_rank)), "markov_output")
        return {LOGITS: ops.add(bias, ops.logits_rows(ops.input(BASE_LOGITS, config.layers.vocab_size)))}

    return define_network


@dataclass(frozen=True, slots=True)
class PendingContext:
    """Committed positions of one request whose context keys and values are computed in the next pass."""

    hidden_states: FloatArray  # [T, F] of the target; those of all layer boundaries of a position are concatenated
    rows: RowRange  # cache rows that the keys and values are written to


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """Input rows that draft a block for one request."""

    anchor_id: int  # id of the last committed token, the first input token of the block; the others are mask tokens
    rows: RowRange  # cache rows of the block, the anchor's row first


class BlockHead:
    """Runs the networks of a block drafter.

    Args:
        checkpoint: config and weights of the drafter.
        tensors: weights of the networks by name; `lm_head.weight` may be the target's.
        embedding: [V, E] embedding table of the tokens.

    Attributes:
        runtime: the network that caches committed positions; the other networks use the same KV cache.
        num_embedded_ids: the drafter can read and draft only token ids below this number. Other ids have no embedding or, with
            DFlash2, no row in the selector's tables.
        summary_options: which top tokens later passes return for each row of logits (`ForwardOutput.summaries`); None = none.
    """

    def __init__(
        self, checkpoint: BlockCheckpoint, tensors: Mapping[str, AnyTensor], embedding: AnyTensor, **placement: Unpack[HeadPlacement]
    ) -> None:
        config = checkpoint.config
        self.config, self.target_ids, self._numpy_tensors = config, checkpoint.target_ids, checkpoint.numpy_tensors
        self._tables = checkpoint.lookup_tables
        self.markov_rank = self._tables["markov_w1"].shape[1] if config.markov is not None else 0
        self.runtime = load_head(context_network(config), config.layers, Weights(dict(tensors)), **placement)
        with_same_weights = self.runtime.network_with_same_weights
        self._block_network = with_same_weights(block_network(config))
        self._markov_network = with_same_weights(markov_bias_network(config, self.markov_rank)) if self.markov_rank else None
        self.summary_options: SummaryOptions | None = None
        self._embedding = replace(embedding, array=np.asarray(embedding.array)) if isinstance(embedding, Tensor) else embedding
        self._unscaled_config = replace(config.layers, embedding_scale=1.0)
        self._mask_embedding = checkpoint.mask_embedding
        before, after = (
            self._tables[name].shape[0] if name in self._tables else embedding.shape[0] for name in ("predecessor", "successor")
        )
        self._scores_draft_ids = self.target_ids is not None and after == len(self.target_ids)
        self.num_embedded_ids = min(embedding.shape[0], before, before if self._scores_draft_ids else after)
        self._input_names = [f"{BOUNDARY}.{index}" for index in range(len(config.layer_boundaries))]

    def run_context(self, contexts: Sequence[PendingContext]) -> None:
        """Compute and cache the context keys and values of committed positions of several requests."""
        states = np.concatenate([context.hidden_states for context in contexts]) if len(contexts) > 1 else contexts[0].hidden_states
        size = self.config.target_hidden_size
        inputs = {name: np.ascontiguousarray(states[:, index * size : (index + 1) * size]) for index, name in enumerate(self._input_names)}
        self.runtime.forward(inputs, _make_batch([context.rows for context in contexts]), LogitsRows(np.empty(0, np.int32)))

    def run_block(self, blocks: Sequence[DraftBlock], sampling: RowSampling | None = None) -> ForwardOutput:
        """Run one pass over the blocks of several requests; return the logits of all rows, in the order of the requests."""
        starts = [0, *accumulate(block.rows.num_rows for block in blocks)]
        token_ids = np.full(starts[-1], self.config.mask_token_id, np.int32)
        token_ids[starts[:-1]] = [block.anchor_id for block in blocks]
        rows = embedding_rows(self._embedding, token_ids, self._unscaled_config, WeightType.F32)
        if self._mask_embedding is not None:
            rows[np.setdiff1d(np.arange(starts[-1]), starts[:-1])] = self._mask_embedding
        if self.config.embedding_scale != 1.0:
            rows = rows * np.float32(self.config.embedding_scale)
        summary = self.summary_options if self._markov_network is None else None
        requested = LogitsRows(np.arange(starts[-1], dtype=np.int32), summary, sampling)
        return self._block_network.forward({EMBEDDING: rows}, _make_batch([block.rows for block in blocks]), requested)

    def add_markov_bias(self, latents: FloatArray, base_logits: FloatArray, sampling: RowSampling | None = None) -> ForwardOutput:
        """Return `base_logits` [n, Vd] plus the bias computed from the Markov head's `latents` [n, r]."""
        if self._markov_network is None:
            raise RuntimeError("this drafter has no Markov head")
        rows = np.arange(len(latents), dtype=np.int32)
        inputs = {MARKOV_LATENT: latents, BASE_LOGITS: base_logits}
        return self._markov_network.forward(inputs, ForwardBatch(rows, ()), LogitsRows(rows, self.summary_options, sampling))

    def markov_embedding(self, token_id: int) -> FloatArray:
        """Return the Markov embedding [r] of a token; zeros if it has none."""
        table = self._tables["markov_w1"]
        has_embedding = token_id < table.shape[0]
        return as_float32(table, np.array([token_id], np.int32))[0] if has_embedding else np.zeros(self.markov_rank, np.float32)

    def rescore_candidates(
        self, previous_token_ids: Sequence[int], selector_vector: FloatArray, token_ids: IntArray, scores: FloatArray
    ) -> FloatArray:
        """Rescore the candidate tokens of a row with DFlash2's selector; return [n, k] scores, given each of n possible previous tokens.

        Args:
            previous_token_ids: [n] the possible tokens before the candidates.
            selector_vector: [r] result `selector_vectors` of the row.
            token_ids, scores: [k] ids and logits of the candidates.
        """
        before = as_float32(self._tables["predecessor"], np.array(previous_token_ids, np.int32)) * selector_vector
        if self._scores_draft_ids and self.target_ids is not None:
            token_ids = self.target_ids.searchsorted(token_ids).astype(np.int32)
        return np.asarray(scores + before @ as_float32(self._tables["successor"], token_ids).T, np.float32)

    def first_markov_state(self, anchor_id: int, hidden: FloatArray, *, sample_from_anchor: bool) -> FloatArray:
        """Return the Markov head's recurrent state [r] before the first row that drafts, given the anchor's hidden state [E].

        If the anchor's row drafts nothing, the anchor still updates the state, as in speculators' training.
        """
        state = np.zeros(self.markov_rank, np.float32)
        return state if sample_from_anchor else self.markov_latent(self.markov_embedding(anchor_id), hidden, state)[1]

    def markov_latent(self, embedding: FloatArray, hidden: FloatArray, state: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the latent vector [r] from which a row's logits bias is computed, and the next recurrent state [r].

        Args:
            embedding: [r] Markov embedding of the token before the one that the row drafts.
            hidden: [E] hidden state of the row.
            state: [r] recurrent state after the tokens before that token; zeros at the first row. Only `MarkovKind.RNN` uses it.
        """
        kind = self.config.markov
        if kind is MarkovKind.GATED:
            gate = self._numpy_tensors["gate.weight"] @ np.concatenate([hidden, embedding]) + self._numpy_tensors["gate.bias"]
            return embedding * _sigmoid(gate), state
        if kind is MarkovKind.RNN:
            joint = self._numpy_tensors["joint.weight"] @ np.concatenate([state, embedding, hidden]) + self._numpy_tensors["joint.bias"]
            gate, candidate, out = np.split(joint, 3)
            state = _sigmoid(gate) * state + (1.0 - _sigmoid(gate)) * np.tanh(candidate)
            return np.tanh(out), state
        return embedding, state

    def predict_confidence(self, hidden: FloatArray, embedding: FloatArray) -> float:
        """Predict the acceptance probability of a row's token from the row's hidden state and the previous token's Markov embedding."""
        inputs = np.concatenate([hidden, embedding]) if self.config.confidence_reads_markov_embedding else hidden
        bias = self._numpy_tensors.get("confidence.bias")
        return float(_sigmoid(self._numpy_tensors["confidence.weight"][0] @ inputs + (0.0 if bias is None else bias[0])))


def _sigmoid(x: FloatArray) -> FloatArray:
    with np.errstate(over="ignore"):  # exp may overflow to inf: 1 / inf = 0 is correct
        return np.asarray(1.0 / (1.0 + np.exp(-x)), np.float32)


def _make_batch(ranges: Sequence[RowRange]) -> ForwardBatch:
    """Return a batch of row ranges. Positions continue after the cached rows of each range."""
    positions = [np.arange(row_range.cached_len, row_range.cached_len + row_range.num_rows, dtype=np.int32) for row_range in ranges]
    starts = accumulate((row_range.num_rows for row_range in ranges), initial=0)
    placed_ranges = tuple([row_range._replace(start=start) for row_range, start in zip(ranges, starts, strict=False)])
    return ForwardBatch(np.concatenate(positions) if len(positions) > 1 else positions[0], placed_ranges)
