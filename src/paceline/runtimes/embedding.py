"""Look up embedding rows, rounded as the transformers library rounds them if it computes in a 16-bit type."""

import numpy as np
from numpy.typing import NDArray

from paceline.models.config import ModelConfig, WeightType
from paceline.models.weights import AnyTensor, GroupedTensor, Weights, as_float32, to_bf16


def round_to_type(values: NDArray[np.float32], weight_type: WeightType) -> NDArray[np.float32]:
    """Return `values` rounded to a type, as float32."""
    if weight_type is WeightType.BF16:
        return (to_bf16(values).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float16).astype(np.float32) if weight_type is WeightType.F16 else values


def embedding_rows(
    embedding: AnyTensor, token_ids: NDArray[np.int32], config: ModelConfig, compute_type: WeightType
) -> NDArray[np.float32]:
    """Return the rows [T, E] of `token_ids`, rounded to `compute_type`, scaled by `config.embedding_scale` and rounded again."""
    return scaled_embeddings(unscaled_embedding_rows(embedding, token_ids, compute_type), config, compute_type)


def unscaled_embedding_rows(table: AnyTensor, token_ids: NDArray[np.int32], compute_type: WeightType) -> NDArray[np.float32]:
    """Return the rows of `embedding_rows` before they are multiplied by `config.embedding_scale`."""
    rows = as_float32(table, token_ids)
    is_exact = isinstance(table, GroupedTensor) or table.weight_type is compute_type
    return rows if is_exact else round_to_type(rows, compute_type)


def per_layer_embedding_rows(
    weights: Weights, token_ids: NDArray[np.int32], config: ModelConfig, compute_type: WeightType
) -> NDArray[np.float32]:
    """Return rows [T, L * size] float32 of the table of per-layer embeddings, rounded to `compute_type`, times sqrt(size)."""
    rows = round_to_type(weights.read_rows("layer_embedding.weight", per_layer_row_indices(token_ids, config)), compute_type)
    return _scale_and_round(rows, float(config.per_layer_input_size**0.5), compute_type)


def per_layer_row_indices(token_ids: NDArray[np.int32], config: ModelConfig) -> NDArray[np.int32]:
    """Return each token's row in the table of per-layer embeddings; 0 for token ids beyond the table."""
    return np.where(token_ids < config.per_layer_vocab_size, token_ids, 0).astype(np.int32)


def scaled_embeddings(rows: NDArray[np.float32], config: ModelConfig, compute_type: WeightType) -> NDArray[np.float32]:
    """Return embedding rows times `config.embedding_scale`, rounded to `compute_type`."""
    return rows if config.embedding_scale == 1.0 else _scale_and_round(rows, config.embedding_scale, compute_type)


def _scale_and_round(rows: NDArray[np.float32], factor: float, compute_type: WeightType) -> NDArray[np.float32]:
    return round_to_type(rows * round_to_type(np.array([factor], np.float32), compute_type), compute_type)
