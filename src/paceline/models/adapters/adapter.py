"""What a LoRA adapter adds to a model, under the target's own names and in float32.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
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
class Adapter:
    """One adapter. Names are those of the target's checkpoint without `model.` and `.weight`: `layers.0.self_attn.q_proj`.

    Attributes:
        name: as requests call it.
        key: digest of every value that changes a token; part of the key of the prefix index.
        products: what is added to products, by the name of their matrix.
        biases: [out_features] float32, added to (not in the place of) what a product has as its bias, by the same names.
        saved: whole matrices in the place of the target's: `embed_tokens`, `lm_head`.
    """

    name: str
    key: bytes
    products: Mapping[str, LowRank]
    biases: Mapping[str, NDArray[np.float32]]
    saved: Mapping[str, NDArray[np.float32]]
