"""An adapter by the network's own names, with rows in the network's order."""

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
_MAX_LISTED_NAMES = 8  # listed in an error


@dataclass(frozen=True, slots=True)
class NetworkAdapter:
    """The changes of an adapter by internal tensor names without `.weight`. The output matrix is `lm_head`, also where embeddings are tied.

    Attributes:
        products, biases, saved, mixture: as in `Adapter`.
    """

    products: Mapping[str, LowRank]
    biases: Mapping[str, NDArray[np.float32]]
    saved: Mapping[str, NDArray[np.float32]]
    mixture: XLoraMixture | None = None

    @property
    def has_embedding_change(self) -> bool:
        return EMBEDDING in self.products or EMBEDDING in self.saved

    def embedding_rows(self, rows: NDArray[np.float32], token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return embedding rows [T, E] with the adapter applied, before scaling. Ranks are added one by one, so bits do not depend on T.

        Args:
            rows: the rows of the target's embedding.
        """
        if EMBEDDING in self.saved:
            return self.saved[EMBEDDING][token_ids]
        low = self.products.get(EMBEDDING)
        if low is None:
            return rows
        added = np.zeros_like(rows)
        for down, up in zip(low.down, low.up.T, strict=True):
            added += down[token_ids, None] * up
        return rows + added


def to_network_adapter(adapter: Adapter, config: ModelConfig) -> NetworkAdapter:
    """Return an adapter as the network of `config` needs it.

    Raises:
        ConfigError: It changes a tensor that only merging can change, or has other shapes than the target. Every name is listed.
    """
    matrices = network_matrices(config)
    saved = {modules.EMBEDDING: EMBEDDING, modules.LM_HEAD: LM_HEAD}
    named = {*adapter.products, *adapter.biases}
    unknown = sorted({*(named - matrices.keys()), *(adapter.saved.keys() - saved.keys()), *(adapter.saved.keys() & named)})
    if unknown:
        shown = ", ".join(unknown[:_MAX_LISTED_NAMES]) + (
            f" and {len(unknown) - _MAX_LISTED_NAMES} more" if len(unknown) > _MAX_LISTED_NAMES else ""
        )
        raise ConfigError(
            f"the adapter {adapter.name!r} changes {shown}, which only merging can change: load the model with it merged (merge_adapter)"
        )
    found = NetworkAdapter(
        {
            matrix.name: low if matrix.rows is None else LowRank(low.down, low.up[matrix.rows])
            for name, low in adapter.products.items()
            for matrix in matrices[name]
        },
        {
            matrix.name: bias if matrix.rows is None else bias[matrix.rows]
            for name, bias in adapter.biases.items()
            for matrix in matrices[name]
        },
        {saved[name]: values for name, values in adapter.saved.items()},
        _network_mixture(adapter.mixture, matrices),
    )
    _check_shapes(adapter.name, found, config)
    return found


def _network_mixture(mixture: XLoraMixture | None, matrices: Mapping[str, Sequence[NetworkMatrix]]) -> XLoraMixture | None:
    if mixture is None:
        return None
    return replace(mixture, columns={matrix.name: columns for name, columns in mixture.columns.items() for matrix in matrices[name]})


def _check_shapes(adapter: str, found: NetworkAdapter, config: ModelConfig) -> None:
    shapes = {name.removesuffix(".weight"): shape for name, shape in tensor_shapes(config).items() if name.endswith(".weight")}
    shapes[LM_HEAD] = shapes[EMBEDDING]
    wrong = []
    for name, low in found.products.items():
        outputs, columns = shapes[name][::-1] if name == EMBEDDING else shapes[name]
        if low.up.shape != (outputs, len(low.down)) or low.down.shape != (len(low.down), columns):
            wrong.append(f"{name} as {list(low.up.shape)} x {list(low.down.shape)}, the target has {[outputs, columns]}")
    wrong += [f"the bias of {name}" for name, bias in found.biases.items() if bias.shape != shapes[name][:1]]
    wrong += [f"{name} of shape {list(values.shape)}" for name, values in found.saved.items() if values.shape != shapes[name]]
    if wrong:
        raise ConfigError(f"the adapter {adapter!r} is another model's: {'; '.join(wrong[:_MAX_LISTED_NAMES])}")
