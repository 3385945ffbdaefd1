"""LoRA adapters as tensors; what they add to the rows of a pass is computed in float32, whatever the network's type."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.models.adapters.adapter import XLoraMixture
from paceline.models.adapters.network_adapter import EMBEDDING, LM_HEAD, NetworkAdapter
from paceline.runtimes.base import FloatArray, ForwardBatch, LogitsRows
from paceline.runtimes.mixture import Classifier, Scalings


class TorchAdapter:
    """One adapter on a device.

    Attributes:
        products: down [rank, in] and up [out, rank] by internal names.
        biases: [out], likewise.
        saved: matrices that replace the target's.
        columns: [rank] of each product of a mixture, the columns of a row's scalings; empty for a plain adapter.
        classifier: computes the scalings of an X-LoRA adapter; None = a plain adapter.
    """

    def __init__(self, network_adapter: NetworkAdapter, device: torch.device) -> None:
        def tensor(values: NDArray[np.float32]) -> torch.Tensor:
            return torch.from_numpy(np.array(values, np.float32)).to(device)

        self.products = {name: (tensor(low.down), tensor(low.up)) for name, low in network_adapter.low_rank_updates.items()}
        self.biases = {name: tensor(values) for name, values in network_adapter.biases.items()}
        self.saved = {name: tensor(values) for name, values in network_adapter.replacements.items()}
        mixture = network_adapter.mixture
        self.classifier = None if mixture is None else TorchClassifier(mixture, device)
        columns = {} if mixture is None else mixture.scaling_indices
        self.columns = {name: torch.from_numpy(own.astype("int64")).to(device) for name, own in columns.items()}

    def product(self, name: str, x: torch.Tensor, y: torch.Tensor, scalings: torch.Tensor | None = None) -> torch.Tensor:
        """Return y, the product `name` of rows x, with the adapter applied, float32.

        Args:
            scalings: [rows, L * K] of a mixture.
        """
        found = x @ self.saved[name].T if name in self.saved else y
        if name in self.products:
            down, up = self.products[name]
            low = x @ down.T
            if scalings is not None:
                low = low * scalings[:, self.columns[name]]
            found = found + low @ up.T
        return found + self.biases[name] if name in self.biases else found

    def embedding(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of the embedding with the adapter applied, not scaled, float32."""
        if EMBEDDING in self.saved:
            return self.saved[EMBEDDING][token_ids]
        if EMBEDDING not in self.products:
            return rows
        down, up = self.products[EMBEDDING]
        return rows + down[:, token_ids].T @ up.T


class TorchClassifier(Classifier):
    """A mixture's classifier, computed on a device in float32."""

    def __init__(self, mixture: XLoraMixture, device: torch.device) -> None:
        super().__init__(mixture)
        self._layers = [
            (torch.from_numpy(weight.copy()).to(device), torch.from_numpy(bias.copy()).to(device)) for weight, bias in mixture.classifier
        ]

    def logits(self, hidden_states: torch.Tensor) -> FloatArray:
        values = hidden_states.float()
        for number, (weight, bias) in enumerate(self._layers):
            values = torch.nn.functional.linear(values if number == 0 else values.relu(), weight, bias)
        found: FloatArray = values.cpu().numpy()
        return found


@dataclass(frozen=True, slots=True)
class _AdapterRows:
    """The rows of a pass that have one adapter: among all rows and among rows of logits; for X-LoRA with their scalings."""

    adapter: TorchAdapter
    rows: torch.Tensor
    logits_rows: torch.Tensor
    scalings: torch.Tensor | None


class AdaptedRows:
    """The rows of a pass that have adapters.

    Args:
        adapters: by number.
        scalings: scalings of the rows of each X-LoRA adapter, by adapter number.
    """

    def __init__(
        self,
        adapters: Mapping[int, TorchAdapter],
        batch: ForwardBatch,
        logits_rows: LogitsRows,
        device: torch.device,
        scalings: Scalings,
    ) -> None:
        def on_device(numbers: NDArray[np.integer]) -> torch.Tensor:
            return torch.from_numpy(numbers.astype(np.int64)).to(device)

        self._own = [
            _AdapterRows(
                adapters[number],
                on_device(rows),
                on_device(np.flatnonzero(np.isin(logits_rows.rows, rows))),
                torch.from_numpy(scalings[number]).to(device) if number in scalings else None,
            )
            for number, rows in batch.rows_by_adapter().items()
        ]

    def linear(
        self, x: torch.Tensor, names: Sequence[str], outs: tuple[torch.Tensor, ...], chosen: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the products of x with each row's adapter applied.

        Args:
            chosen: the pass's rows that x holds, in its order; None = all.
        """
        for own in self._own:
            changed = [pair for pair in zip(names, outs, strict=True) if pair[0] in own.adapter.products or pair[0] in own.adapter.biases]
            if not changed:
                continue
            rows = own.rows if chosen is None else torch.isin(chosen, own.rows).nonzero().flatten()
            for name, out in changed:
                out[rows] = own.adapter.product(name, x[rows].float(), out[rows].float(), own.scalings).to(out.dtype)
        return outs

    def lm_head(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return logits with each row's adapter applied."""
        for own in self._own:
            logits[own.logits_rows] = own.adapter.product(LM_HEAD, x[own.logits_rows].float(), logits[own.logits_rows])
        return logits

    def embedding(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for own in self._own:
            rows[own.rows] = own.adapter.embedding(token_ids[own.rows], rows[own.rows].float()).to(rows.dtype)
        return rows
