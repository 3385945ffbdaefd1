"""A LoRA adapter with the internal tensor names and the row order of the network, as runtimes apply it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.models.adapters import modules
from paceline.models.adapters.adapter import Adapter, LowRankUpdate, XLoraMixture
from paceline.models.adapters.modules import NetworkMatrix, network_matrices
from paceline.models.config import ModelConfig

EMBEDDING, LM_HEAD = "embedding", "lm_head"


@dataclass(frozen=True, slots=True)
class NetworkAdapter:
    """An adapter whose matrices have internal names without `.weight`. The output matrix is `lm_head`, even if embeddings are tied.

    Attributes:
        low_rank_updates, biases, replacements, mixture: as in `Adapter`.
    """

    low_rank_updates: Mapping[str, LowRankUpdate]
    biases: Mapping[str, NDArray[np.float32]]
    replacements: Mapping[str, NDArray[np.float32]]
    mixture: XLoraMixture | None = None

    @property
    def changes_embedding(self) -> bool:
        return EMBEDDING in self.low_rank_updates or EMBEDDING in self.replacements

    def adapt_embeddings(self, embeddings: NDArray[np.float32], token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the target's `embeddings` [T, E] of tokens with the adapter applied, before `embedding_scale`.

        The products are added rank by rank, so that a token's bits do not depend on T.
        """
        if EMBEDDING in self.replacements:
            return self.replacements[EMBEDDING][token_ids]
        update = self.low_rank_updates.get(EMBEDDING)
        if update is None:
            return embeddings
        added = np.zeros_like(embeddings)
        for a_row, b_column in zip(update.lora_a, update.lora_b.T, strict=True):
            added += a_row[token_ids, None] * b_column
        return embeddings + added


def to_network_adapter(adapter: Adapter, config: ModelConfig) -> NetworkAdapter:
    """Convert an adapter that `read_any_adapter` returned to the names and the row order of the network with this config.

    Raises:
        ConfigError: The adapter both replaces and updates a matrix, which only merging supports.
    """
    matrices = network_matrices(config)
    replaced = {modules.EMBEDDING: EMBEDDING, modules.LM_HEAD: LM_HEAD}
    if both := sorted(adapter.replacements.keys() & {*adapter.low_rank_updates, *adapter.biases}):
        raise ConfigError(
            f"the adapter {adapter.name!r} replaces and updates {', '.join(both)}, which only merging supports: load the model with it "
            "merged (merge_adapter)"
        )
    return NetworkAdapter(
        {
            matrix.name: LowRankUpdate(update.lora_a, matrix.select_rows(update.lora_b))
            for name, update in adapter.low_rank_updates.items()
            for matrix in matrices[name]
        },
        {matrix.name: matrix.select_rows(bias) for name, bias in adapter.biases.items() for matrix in matrices[name]},
        {replaced[name]: values for name, values in adapter.replacements.items()},
        _rename_scaling_indices(adapter.mixture, matrices),
    )


def _rename_scaling_indices(mixture: XLoraMixture | None, matrices: Mapping[str, Sequence[NetworkMatrix]]) -> XLoraMixture | None:
    if mixture is None:
        return None
    indices = {matrix.name: indices for name, indices in mixture.scaling_indices.items() for matrix in matrices[name]}
    return replace(mixture, scaling_indices=indices)
