"""A LoRA adapter in float32, by the target's own names; for X-LoRA, the sum of several adapters with their weights.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1; Buehler and Buehler 2024, "X-LoRA: Mixture of
Low-Rank Adapter Experts", section 2 (arXiv:2402.07148).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank update of one matrix: up @ (down @ x) is added to its product.

    Attributes:
        down: lora_A, [rank, in_features] float32. For the embedding [rank, vocab], whose columns are looked up.
        up: lora_B times the adapter's scale, [out_features, rank] float32.
    """

    down: NDArray[np.float32]
    up: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class XLoraMixture:
    """How X-LoRA weights its K adapters, for each row separately.

    The ranks of a product are those of all adapters, one adapter after the other. A scaling pass before the real pass computes the hidden
    state of a row. The classifier turns it into L * K scalings. What `down` gives for a rank is multiplied by the scaling of that rank.

    Attributes:
        num_adapters: K.
        num_layers: L, the matrices with scalings of their own; 1 = all matrices have the same.
        classifier: weight [out, in] and bias [out] float32 of each linear layer, with ReLU between layers. The last has L * K outputs.
        temperature: temperature of the softmax over the K outputs of a matrix; None = no softmax.
        top_k: only the largest `top_k` scalings are kept, the first of equal ones; the others become 0. None = all are kept.
        has_softmax_of_top_k: the kept scalings are normalised by a second softmax.
        pass_scaling: the value of every scaling in the scaling pass.
        columns: [rank] int32 by the name of a product: the index among the L * K scalings for each rank.
    """

    num_adapters: int
    num_layers: int
    classifier: tuple[tuple[NDArray[np.float32], NDArray[np.float32]], ...]
    temperature: float | None
    top_k: int | None
    has_softmax_of_top_k: bool
    pass_scaling: float
    columns: Mapping[str, NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter. Names are those of the target's checkpoint without `model.` and `.weight`: `layers.0.self_attn.q_proj`.

    Attributes:
        name: as requests select it.
        key: digest of every value that can change a token; part of the prefix cache key.
        products: low-rank updates, by the name of their matrix.
        biases: [out_features] float32, added to the bias of a matrix, by the same names.
        saved: whole matrices that replace the target's: `embed_tokens`, `lm_head`.
        mixture: how X-LoRA weights the products; None = a plain LoRA adapter.
    """

    name: str
    key: bytes
    products: Mapping[str, LowRank]
    biases: Mapping[str, NDArray[np.float32]]
    saved: Mapping[str, NDArray[np.float32]]
    mixture: XLoraMixture | None = None
