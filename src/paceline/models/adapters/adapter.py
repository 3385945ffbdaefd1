"""A LoRA adapter in float32. An X-LoRA adapter is several LoRA adapters in one, with a classifier that weights them for each token.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1; Buehler and Buehler 2024, "X-LoRA: Mixture of
Low-Rank Adapter Experts", section 2 (arXiv:2402.07148).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank update of a matrix W: its output for x becomes W x + up @ (down @ x).

    Attributes:
        down: lora_A, [rank, in_features]. That of the embedding is [rank, vocab_size]: a token looks up a column.
        up: lora_B times the scale alpha / rank, [out_features, rank].
    """

    down: NDArray[np.float32]
    up: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class XLoraMixture:
    """How X-LoRA weights its K adapters for each token.

    A low-rank update has the ranks of all adapters, one adapter after the other. Before the forward pass for logits, a scaling pass
    computes the token's hidden state, from which the classifier computes L * K scalings. Each value of `down @ x` is multiplied by the
    scaling of its rank.

    Attributes:
        num_adapters: K.
        num_scaled_matrices: L, the number of matrices with scalings of their own; 1 = all matrices share K scalings.
        classifier: weight [out, in] and bias [out] of each linear layer. ReLU is between layers. The last layer has L * K outputs.
        temperature: temperature of the softmax over the K scalings of a matrix; None = no softmax.
        top_k: of K scalings only the largest `top_k` are kept, the first of equal ones; the others become 0. None = all are kept.
        has_softmax_of_top_k: the kept scalings are normalised by a second softmax.
        scaling_pass_value: the value of every scaling during the scaling pass.
        scaling_indices: [rank] int32 by name of the low-rank update: for each rank the index of its scaling among the L * K.
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
    """One adapter. Its matrices are named as in the target's checkpoint without `model.` and `.weight`: `layers.0.self_attn.q_proj`.

    Attributes:
        name: name by which requests select the adapter.
        digest: digest of every value that can change a token; part of the prefix cache's keys.
        low_rank_updates: low-rank updates of matrices, by name.
        biases: [out_features], added to the output of a matrix, by name.
        replacements: matrices that replace the target's, by name: only `embed_tokens` and `lm_head`.
        mixture: how X-LoRA weights the ranks of the updates; None = a plain LoRA adapter.
    """

    name: str
    digest: bytes
    low_rank_updates: Mapping[str, LowRank]
    biases: Mapping[str, NDArray[np.float32]]
    replacements: Mapping[str, NDArray[np.float32]]
    mixture: XLoraMixture | None = None
