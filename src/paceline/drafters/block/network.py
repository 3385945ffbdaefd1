"""The networks of a block drafter.

`context_network` computes keys and values of committed positions from the target's hidden states; they stay cached. `block_network` runs
the last token and mask tokens; their keys and values are dropped. With DSpark a bias that depends on the tokens drafted so far is added to
each row of logits (`markov_bias_network`). With DFlash2 the most probable tokens of a row are scored again, given the token before it
(`rescore`).

Sources: DFlash and DFlash2 (z-lab `dflash/model.py`), DSpark (deepseek-ai/DeepSpec `modeling/dspark`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from paceline.drafters.block.checkpoint import BlockCheckpoint
from paceline.drafters.block.config import BlockConfig, MarkovKind
from paceline.models.config import WeightType
from paceline.models.layers import QKNorm
from paceline.models.weights import AnyTensor, Tensor, Weights, as_float32
from paceline.runtimes.base import FloatArray, ForwardBatch, ForwardOutput, IntArray, LogitsRows, Network, RowRange
from paceline.runtimes.decoder import HIDDEN_STATES, LOGITS, Blocks, NetworkDefinition, Value, decoder_layer
from paceline.runtimes.embedding import embedding_rows
from paceline.runtimes.load import load_head
from paceline.runtimes.logits_summary import RowSampling, SummaryOptions

BOUNDARY, EMBEDDING, LATENT, BASE, SELECTED = "boundary", "embedding", "latent", "base", "selected"
"""Input names: the target's hidden states `boundary.0` …; embeddings of a block; latent vectors of the Markov head; logits to be biased.
Result name: the vectors that DFlash2 scores candidates with."""


def context_network(config: BlockConfig) -> NetworkDefinition:
    """Return the network that stores keys and values of committed positions."""

    def compose(blocks: Blocks[Value]) -> Mapping[str, Value]:
        chunks = [blocks.input(f"{BOUNDARY}.{index}", config.feature_size) for index in range(len(config.boundaries))]
        (mixed,) = blocks.linear(blocks.concat(*chunks), "fc")
        context, stored = blocks.rms_norm(mixed, "hidden_norm"), []
        for layer, attention in config.layers.attention_layers.items():
            prefix = f"layers.{layer}."
            names = ["k_proj"] if attention.has_keys_as_values else ["k_proj", "v_proj"]
            k, *others = blocks.linear(context, *(prefix + name for name in names))
            v = others[0] if others else k
            if attention.qk_norm is QKNorm.HEAD:
                k = blocks.head_norm(k, prefix + "k_norm", attention.num_kv_heads)
            k = blocks.rope(k, attention.num_kv_heads, attention.key_rope)
            v = blocks.head_norm(v, None, attention.num_kv_heads) if attention.has_value_norm else v
            v = v if attention.value_scale == 1.0 else blocks.scale(v, attention.value_scale)
            stored.append(blocks.store_kv(k, v, attention, layer))
        return {f"stored.{layer}": value for layer, value in enumerate(stored)}

    return compose


def block_network(config: BlockConfig) -> NetworkDefinition:
    """Return the network of a block: `hidden_states` [T, E] after the final norm, and `logits` [R, Vd]; DFlash2: `selected` [T, r]."""

    def compose(blocks: Blocks[Value]) -> Mapping[str, Value]:
        x = blocks.input(EMBEDDING, config.layers.hidden_size)
        for index, layer in enumerate(config.layers.layers):
            x = decoder_layer(blocks, layer, x, index)
        hidden = blocks.rms_norm(x, "final_norm")
        logits = blocks.lm_head(blocks.logits_rows(hidden), "lm_head")
        if config.logit_scale != 1.0:
            logits = blocks.scale(logits, config.logit_scale)
        if config.logit_soft_cap is not None:
            logits = blocks.soft_cap(logits, config.logit_soft_cap)
        selected = {SELECTED: blocks.linear(hidden, "selector")[0]} if config.num_candidates else {}
        return {LOGITS: logits, HIDDEN_STATES: hidden, **selected}

    return compose


def markov_bias_network(config: BlockConfig, markov_rank: int) -> NetworkDefinition:
    """Return the network that adds the bias of DSpark, from latent vectors [T, r], to rows of a block: `logits` [R, Vd]."""

    def compose(blocks: Blocks[Value]) -> Mapping[str, Value]:
        bias = blocks.lm_head(blocks.logits_rows(blocks.input(LATENT, markov_rank)), "markov_output")
        return {LOGITS: blocks.add(bias, blocks.logits_rows(blocks.input(BASE, config.layers.vocab_size)))}

    return compose


@dataclass(frozen=True, slots=True)
class PendingContext:
    """Committed positions of one request whose keys and values are to be computed.

    Attributes:
        features: [T, F] hidden states of the target, all boundaries of a row next to one another.
        rows: cache range they are written to.
    """

    features: FloatArray
    rows: RowRange


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """The rows of one request that are run to draft a block.

    Attributes:
        anchor: the last token.
        rows: cache range of the block; the anchor's row is the first.
        logit_rows: rows of the block whose logits are returned.
    """

    anchor: int
    rows: RowRange
    logit_rows: Sequence[int]


class BlockHead:
    """Runs a block drafter.

    Args:
        checkpoint: the opened drafter.
        tensors: weights of its networks by name; `lm_head.weight` may be the target's.
        embedding: embedding table of the tokens.
        lm_head_of: see `load_head`.

    Attributes:
        runtime: the network of committed positions; the other networks use its cache.
        embedded_ids: number of token ids that have an embedding, and rows in the tables of DFlash2.
    """

    def __init__(
        self,
        checkpoint: BlockCheckpoint,
        tensors: Mapping[str, AnyTensor],
        embedding: AnyTensor,
        *,
        num_threads: int,
        max_model_len: int,
        backend: str = "auto",
        device: str = "cpu",
        lm_head_of: Network | None = None,
    ) -> None:
        config = checkpoint.config
        self.config, self.target_ids, self._small_tensors = config, checkpoint.target_ids, checkpoint.small_tensors
        self._tables = checkpoint.tables
        self.markov_rank = self._tables["markov_w1"].shape[1] if config.markov is not None else 0
        self.runtime = load_head(
            context_network(config), config.layers, Weights(dict(tensors)), num_threads=num_threads, max_model_len=max_model_len,
            backend=backend, device=device, lm_head_of=lm_head_of,
        )  # fmt: skip
        self._block = self.runtime.network_with_same_weights(block_network(config))
        self._biased = self.runtime.network_with_same_weights(markov_bias_network(config, self.markov_rank)) if self.markov_rank else None
        self._ranking: SummaryOptions | None = None
        self._embedding = replace(embedding, array=np.asarray(embedding.array)) if isinstance(embedding, Tensor) else embedding
        self._plain = replace(config.layers, embedding_scale=1.0)
        self._mask_row = checkpoint.mask_embedding
        before, after = (
            self._tables[name].shape[0] if name in self._tables else embedding.shape[0] for name in ("predecessor", "successor")
        )
        self._scores_draft_ids = self.target_ids is not None and after == len(self.target_ids)
        self.embedded_ids = min(embedding.shape[0], before, before if self._scores_draft_ids else after)
        self._names = [f"{BOUNDARY}.{index}" for index in range(len(config.boundaries))]

    def set_ranking(self, ranking: SummaryOptions) -> None:
        """Set the ranking with which later passes summarise their rows of logits."""
        self._ranking = ranking

    def run_context(self, parts: Sequence[PendingContext]) -> None:
        """Compute and cache keys and values of committed positions of several requests."""
        features = np.concatenate([part.features for part in parts]) if len(parts) > 1 else parts[0].features
        size = self.config.feature_size
        inputs = {name: np.ascontiguousarray(features[:, index * size : (index + 1) * size]) for index, name in enumerate(self._names)}
        positions = [np.arange(part.rows.cached_len, part.rows.cached_len + part.rows.num_rows, dtype=np.int32) for part in parts]
        self.runtime.forward(inputs, _batch([part.rows for part in parts], positions), LogitsRows(np.empty(0, np.int32)))

    def run_block(self, parts: Sequence[DraftBlock], draws: RowSampling | None = None) -> ForwardOutput:
        """Run one pass over the blocks of several requests; logits are those of their `logit_rows`, request by request."""
        starts = [0, *accumulate(part.rows.num_rows for part in parts)]
        token_ids = np.full(starts[-1], self.config.mask_token_id, np.int32)
        token_ids[starts[:-1]] = [part.anchor for part in parts]
        rows = embedding_rows(self._embedding, token_ids, self._plain, WeightType.F32)
        if self._mask_row is not None:
            rows[np.setdiff1d(np.arange(starts[-1]), starts[:-1])] = self._mask_row
        if self.config.embedding_scale != 1.0:
            rows = rows * np.float32(self.config.embedding_scale)
        positions = [np.arange(part.rows.cached_len, part.rows.cached_len + part.rows.num_rows, dtype=np.int32) for part in parts]
        wanted = np.array([start + row for start, part in zip(starts, parts, strict=False) for row in part.logit_rows], np.int32)
        ranking = self._ranking if self._biased is None else None
        return self._block.forward({EMBEDDING: rows}, _batch([part.rows for part in parts], positions), LogitsRows(wanted, ranking, draws))

    def run_bias(self, latent: FloatArray, base: FloatArray, draws: RowSampling | None = None) -> ForwardOutput:
        """Return the logits `base` [n, Vd] plus the Markov bias of `latent` [n, r]."""
        if self._biased is None:
            raise RuntimeError("this drafter has no Markov head")
        rows = np.arange(len(latent), dtype=np.int32)
        return self._biased.forward({LATENT: latent, BASE: base}, ForwardBatch(rows, ()), LogitsRows(rows, self._ranking, draws))

    def markov_embedding(self, token_id: int) -> FloatArray:
        """Return the Markov embedding [r] of the previous token; zeros for an id beyond the table."""
        table = self._tables["markov_w1"]
        known = token_id < table.shape[0]
        return as_float32(table, np.array([token_id], np.int32))[0] if known else np.zeros(self.markov_rank, np.float32)

    def rescore(self, previous: Sequence[int], selected: FloatArray, token_ids: IntArray, scores: FloatArray) -> FloatArray:
        """Return the scores of a row's candidates after each of several previous tokens, [n, k].

        Args:
            previous: [n] token ids.
            selected: [r] of the row.
            token_ids, scores: [k] of the candidates.
        """
        before = as_float32(self._tables["predecessor"], np.array(previous, np.int32)) * selected
        if self._scores_draft_ids and self.target_ids is not None:
            token_ids = self.target_ids.searchsorted(token_ids).astype(np.int32)
        return np.asarray(scores + before @ as_float32(self._tables["successor"], token_ids).T, np.float32)

    def first_markov_state(self, anchor: int, hidden: FloatArray, *, drafts_at_anchor: bool) -> FloatArray:
        """Return the recurrent state [r] before the first row that drafts.

        If the anchor's row drafts nothing, the state is updated with it nevertheless, as speculators trains it.

        Args:
            hidden: [E] of the anchor's row.
        """
        state = np.zeros(self.markov_rank, np.float32)
        return state if drafts_at_anchor else self.markov_latent(self.markov_embedding(anchor), hidden, state)[1]

    def markov_latent(self, row: FloatArray, hidden: FloatArray, state: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the latent vector [r] of a row's bias, and the next recurrent state [r].

        Args:
            row: [r] of the previous token.
            hidden: [E] of the row.
            state: [r] after the tokens before it; zeros at the first row. Only `MarkovKind.RNN` uses it.
        """
        kind = self.config.markov
        if kind is MarkovKind.GATED:
            gate = self._small_tensors["gate"] @ np.concatenate([hidden, row]) + self._small_tensors["gate_bias"]
            return row * _sigmoid(gate), state
        if kind is MarkovKind.RNN:
            joint = self._small_tensors["joint"] @ np.concatenate([state, row, hidden]) + self._small_tensors["joint_bias"]
            gate, candidate, out = np.split(joint, 3)
            state = _sigmoid(gate) * state + (1.0 - _sigmoid(gate)) * np.tanh(candidate)
            return np.tanh(out), state
        return row, state

    def confidence(self, hidden: FloatArray, row: FloatArray) -> float:
        """Return the predicted probability that the token drafted at a row is accepted, given that those before it are."""
        features = np.concatenate([hidden, row]) if self.config.has_markov_confidence else hidden
        bias = self._small_tensors.get("confidence_bias")
        return float(_sigmoid(self._small_tensors["confidence"][0] @ features + (0.0 if bias is None else bias[0])))


def _sigmoid(x: FloatArray) -> FloatArray:
    with np.errstate(over="ignore"):  # exp may overflow to inf, and 1 / inf is 0
        return np.asarray(1.0 / (1.0 + np.exp(-x)), np.float32)


def _batch(rows: Sequence[RowRange], positions: Sequence[IntArray]) -> ForwardBatch:
    starts = accumulate((one.num_rows for one in rows), initial=0)
    ranges = tuple([one._replace(start=start) for one, start in zip(rows, starts, strict=False)])
    return ForwardBatch(np.concatenate(positions) if len(positions) > 1 else positions[0], ranges)
