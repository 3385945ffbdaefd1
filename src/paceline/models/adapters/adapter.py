"""A LoRA adapter in float32. An X-LoRA adapter consists of several LoRA adapters, and a classifier that weighs them for each token.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1; Buehler and Buehler 2024, "X-LoRA: Mixture of
Low-Rank Adapter Experts", section 2 (arXiv:2402.07148).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """The low-rank update of a matrix W: its output for x becomes W x + lora_b @ (lora_a @ x).

    Attributes:
        lora_a: [rank, in_features]; for the embedding [rank, vocab_size], where a token selects its column.
        lora_b: [out_features, rank], already multiplied by the scale, which is usually alpha / rank.
    """

    lora_a: NDArray[np.float32]
    lora_b: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class XLoraMixture:
    """How X-LoRA weighs its K adapters for each token.

    The low-rank matrices of all adapters are concatenated along the rank. Before the forward pass for logits, a scaling pass computes the
    token's hidden state, from which the classifier computes L * K scalings. Each value of `lora_a @ x` is multiplied by one of them.

    Attributes:
        num_adapters: K.
        num_scaled_matrices: L, the number of matrices that have their own K scalings; 1 = all matrices share K scalings.
        classifier: weight [out, in] and bias [out] of each linear layer, with ReLU between layers. The last layer has L * K outputs.
        temperature: temperature of the softmax over the K scalings of a matrix; None = no softmax.
        top_k: only the `top_k` largest of K scalings are kept (of equal scalings the first); the others become 0. None = all are kept.
        has_softmax_of_top_k: a second softmax normalises the scalings that `top_k` keeps.
        scaling_pass_value: the value of every scaling during the scaling pass.
        scaling_indices: by name of the low-rank update, [rank] int32: index, among the L * K, of the scaling of each rank.
    """

    num_adapters: int
    num_scaled_matrices: int
    classifier: tuple[tuple[NDArray[np.float32], NDArray[np.float32]], ...]
    temperature: float | None
    top_k: int | None
    has_softmax_of_top_k: bool
    scaling_pass_value: float
    scaling_indices: Mapping[str, NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter. Its matrices have their names in the target's checkpoint without `model.` and `.weight`: `layers.0.self_attn.q_proj`.

    Attributes:
        name: name by which requests select the adapter.
        digest: digest of every value that can change a token; part of the prefix cache's keys.
        low_rank_updates: low-rank updates of matrices, by name.
        biases: [out_features], added to the output of a matrix, by name.
        replacements: matrices that replace the target's, by name: only `embed_tokens` and `lm_head`.
        mixture: how X-LoRA weighs the updates; None = a plain LoRA adapter.
    """

    name: str
    digest: bytes
    low_rank_updates: Mapping[str, LowRankUpdate]
    biases: Mapping[str, NDArray[np.float32]]
    replacements: Mapping[str, NDArray[np.float32]]
    mixture: XLoraMixture | None = None
