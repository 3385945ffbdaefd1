"""An adapter with the internal names and the row order of the network, as runtimes apply it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.models.adapters import modules
from paceline.models.adapters.adapter import Adapter, LowRank, XLoraMixture
from paceline.models.adapters.modules import NetworkMatrix, network_matrices
from paceline.models.config import ModelConfig
from paceline.models.tensor_names import tensor_shapes

EMBEDDING, LM_HEAD = "embedding", "lm_head"
_MAX_LISTED_NAMES = 8  # number of names that an error lists


@dataclass(frozen=True, slots=True)
class NetworkAdapter:
    """An adapter whose matrices have internal names without `.weight`. The output matrix is `lm_head`, even if embeddings are tied.

    Attributes:
        low_rank_updates, biases, replacements, mixture: as in `Adapter`.
    """

    low_rank_updates: Mapping[str, LowRank]
    biases: Mapping[str, NDArray[np.float32]]
    replacements: Mapping[str, NDArray[np.float32]]
    mixture: XLoraMixture | None = None

    @property
    def has_embedding_change(self) -> bool:
        return EMBEDDING in self.low_rank_updates or EMBEDDING in self.replacements

    def adapt_embeddings(self, embeddings: NDArray[np.float32], token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the embeddings [T, E] of tokens with the adapter applied, before `embedding_scale`.

        Ranks are added one by one, so that a token's bits do not depend on T.

        Args:
            embeddings: embeddings of the tokens in the target.
        """
        if EMBEDDING in self.replacements:
            return self.replacements[EMBEDDING][token_ids]
        update = self.low_rank_updates.get(EMBEDDING)
        if update is None:
            return embeddings
        added = np.zeros_like(embeddings)
        for down, up in zip(update.down, update.up.T, strict=True):
            added += down[token_ids, None] * up
        return embeddings + added


def to_network_adapter(adapter: Adapter, config: ModelConfig) -> NetworkAdapter:
    """Return an adapter with the names and the row order of a network.

    Raises:
        ConfigError: The adapter changes a tensor that only merging can change, or its shapes differ from the target's.
    """
    matrices = network_matrices(config)
    replaceable = {modules.EMBEDDING: EMBEDDING, modules.LM_HEAD: LM_HEAD}
    changed, replaced = {*adapter.low_rank_updates, *adapter.biases}, adapter.replacements.keys()
    unknown = sorted({*(changed - matrices.keys()), *(replaced - replaceable.keys()), *(replaced & changed)})
    if unknown:
        shown = ", ".join(unknown[:_MAX_LISTED_NAMES]) + (
            f" and {len(unknown) - _MAX_LISTED_NAMES} more" if len(unknown) > _MAX_LISTED_NAMES else ""
        )
        raise ConfigError(
            f"the adapter {adapter.name!r} changes {shown}, which only merging can change: load the model with it merged (merge_adapter)"
        )
    network_adapter = NetworkAdapter(
        {
            matrix.name: update if matrix.rows is None else LowRank(update.down, update.up[matrix.rows])
            for name, update in adapter.low_rank_updates.items()
            for matrix in matrices[name]
        },
        {
            matrix.name: bias if matrix.rows is None else bias[matrix.rows]
            for name, bias in adapter.biases.items()
            for matrix in matrices[name]
        },
        {replaceable[name]: values for name, values in adapter.replacements.items()},
        _rename_mixture(adapter.mixture, matrices),
    )
    _check_shapes(adapter.name, network_adapter, config)
    return network_adapter


def _rename_mixture(mixture: XLoraMixture | None, matrices: Mapping[str, Sequence[NetworkMatrix]]) -> XLoraMixture | None:
    if mixture is None:
        return None
    indices = {matrix.name: indices for name, indices in mixture.scaling_indices.items() for matrix in matrices[name]}
    return replace(mixture, scaling_indices=indices)


def _check_shapes(adapter_name: str, adapter: NetworkAdapter, config: ModelConfig) -> None:
    shapes = {name.removesuffix(".weight"): shape for name, shape in tensor_shapes(config).items() if name.endswith(".weight")}
    shapes[LM_HEAD] = shapes[EMBEDDING]
    wrong = []
    for name, update in adapter.low_rank_updates.items():
        outputs, columns = shapes[name][::-1] if name == EMBEDDING else shapes[name]
        if update.up.shape != (outputs, len(update.down)) or update.down.shape != (len(update.down), columns):
            wrong.append(f"{name} as {list(update.up.shape)} x {list(update.down.shape)}, the target has {[outputs, columns]}")
    wrong += [f"the bias of {name}" for name, bias in adapter.biases.items() if bias.shape != shapes[name][:1]]
    wrong += [f"{name} of shape {list(values.shape)}" for name, values in adapter.replacements.items() if values.shape != shapes[name]]
    if wrong:
        raise ConfigError(f"the adapter {adapter_name!r} is another model's: {'; '.join(wrong[:_MAX_LISTED_NAMES])}")
