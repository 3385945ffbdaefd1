"""What a LoRA adapter adds to a model, under the target's own names and in float32; of X-LoRA, what several of them add together.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1; Buehler and Buehler 2024, "X-LoRA: Mixture of
Low-Rank Adapter Experts", section 2 (arXiv:2402.07148).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LowRank:
    """What one adapter adds to one product with a matrix: up @ (down @ x).

    Attributes:
        down: [rank, in_features] float32; of the embedding [rank, vocab], whose columns are looked up.
        up: [out_features, rank] float32, the adapter's scale already multiplied in.
    """

    down: NDArray[np.float32]
    up: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Mixture:
    """How X-LoRA weighs its adapters, K of them, for each row by itself.

    The ranks of its products are those of all adapters, one adapter's behind another's. A scaling pass in front of the real one gives the
    row's hidden state, the classifier makes L * K scalings of it, and what `down` gives for a rank is multiplied by the rank's own.

    Attributes:
        num_adapters: K.
        num_layers: L, the matrices that have scalings of their own; 1 = all have the same.
        classifier: weight [out, in] and bias [out] float32 of each layer, ReLU between them; the last one has L * K outputs.
        temperature: of the softmax over the K outputs of a matrix; None = outputs are scalings.
        top_k: the largest scalings that stay, of equal ones the first; the others are 0. None = all stay.
        has_softmax_of_top_k: those that stay go through a softmax of their own, without those that are 0.
        pass_scaling: every scaling of the scaling pass.
        columns: by the name of a product, [rank] int32: which of the L * K scalings each rank is multiplied by.
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
        name: as requests call it.
        key: digest of every value that changes a token; part of the key of the prefix index.
        products: what is added to products, by the name of their matrix.
        biases: [out_features] float32, added to (not in the product of) what a product has as its bias, by the same names.
        saved: whole matrices in the product of the target's: `embed_tokens`, `lm_head`.
        mixture: of X-LoRA, how its products are weighed; None = a plain one.
    """

    name: str
    key: bytes
    products: Mapping[str, LowRank]
    biases: Mapping[str, NDArray[np.float32]]
    saved: Mapping[str, NDArray[np.float32]]
    mixture: Mixture | None = None
