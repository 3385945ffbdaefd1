"""LoRA adapters as tensors. Their updates are computed in float32, whatever the network's type."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.models.adapters.adapter import XLoraMixture
from paceline.models.adapters.network_adapter import EMBEDDING, LM_HEAD, NetworkAdapter
from paceline.runtimes.base import FloatArray, ForwardBatch, LogitsRows
from paceline.runtimes.xlora import Classifier, Scalings


class TorchAdapter:
    """A LoRA or X-LoRA adapter on a device.

    Attributes:
        low_rank: down [rank, in] and up [out, rank] by internal name of the matrix to which up @ down is added.
        biases: bias [out] by internal name.
        replacements: matrices that replace those of the target (PEFT's modules_to_save), by internal name.
        scaling_indices: X-LoRA: for each matrix, [rank] indices into a row's scalings, which multiply the outputs of `down`; LoRA: empty.
        classifier: X-LoRA: computes scalings; LoRA: None.
    """

    def __init__(self, network_adapter: NetworkAdapter, device: torch.device) -> None:
        def tensor(values: NDArray[np.float32]) -> torch.Tensor:
            return torch.from_numpy(np.array(values, np.float32)).to(device)

        self.low_rank = {name: (tensor(update.lora_a), tensor(update.lora_b)) for name, update in network_adapter.low_rank_updates.items()}
        self.biases = {name: tensor(values) for name, values in network_adapter.biases.items()}
        self.replacements = {name: tensor(values) for name, values in network_adapter.replacements.items()}
        mixture = network_adapter.mixture
        self.classifier = None if mixture is None else TorchClassifier(mixture, device)
        scaling_indices = {} if mixture is None else mixture.scaling_indices
        self.scaling_indices = {name: torch.from_numpy(indices.astype("int64")).to(device) for name, indices in scaling_indices.items()}

    def apply_to_product(self, name: str, x: torch.Tensor, y: torch.Tensor, scalings: torch.Tensor | None = None) -> torch.Tensor:
        """Return y with the adapter applied, in float32, where y = x W^T for a matrix W of the target.

        Args:
            name: internal name of W.
            scalings: [rows, L * K] for X-LoRA; None for LoRA.
        """
        result = x @ self.replacements[name].T if name in self.replacements else y
        if name in self.low_rank:
            down, up = self.low_rank[name]
            reduced = x @ down.T
            if scalings is not None:
                reduced = reduced * scalings[:, self.scaling_indices[name]]
            result = result + reduced @ up.T
        return result + self.biases[name] if name in self.biases else result

    def apply_to_embedding(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return embedding rows with the adapter applied, in float32. `rows`: the target's rows of `token_ids`, not scaled yet."""
        if EMBEDDING in self.replacements:
            return self.replacements[EMBEDDING][token_ids]
        if EMBEDDING not in self.low_rank:
            return rows
        down, up = self.low_rank[EMBEDDING]
        return rows + down[:, token_ids].T @ up.T


class TorchClassifier(Classifier):
    """An X-LoRA classifier, computed on a device in float32."""

    def __init__(self, mixture: XLoraMixture, device: torch.device) -> None:
        super().__init__(mixture)
        self._layers = [
            (torch.from_numpy(weight.copy()).to(device), torch.from_numpy(bias.copy()).to(device)) for weight, bias in mixture.classifier
        ]

    def logits(self, hidden_states: torch.Tensor) -> FloatArray:
        values = hidden_states.float()
        for number, (weight, bias) in enumerate(self._layers):
            values = torch.nn.functional.linear(values if number == 0 else values.relu(), weight, bias)
        result: FloatArray = values.cpu().numpy()
        return result


@dataclass(frozen=True, slots=True)
class _AdapterRows:
    """The rows of a pass that use an adapter: their indices among all rows and among the rows of logits, and X-LoRA scalings."""

    adapter: TorchAdapter
    rows: torch.Tensor
    logits_rows: torch.Tensor
    scalings: torch.Tensor | None


class BatchAdapters:
    """Applies to each row of a pass the adapter of the row.

    Args:
        adapters: loaded adapters by number.
        scalings: see `xlora.Scalings`.
    """

    def __init__(
        self, adapters: Mapping[int, TorchAdapter], batch: ForwardBatch, logits_rows: LogitsRows, device: torch.device, scalings: Scalings
    ) -> None:
        def on_device(numbers: NDArray[np.integer]) -> torch.Tensor:
            return torch.from_numpy(numbers.astype(np.int64)).to(device)

        self._adapter_rows = [
            _AdapterRows(
                adapters[number],
                on_device(rows),
                on_device(np.flatnonzero(np.isin(logits_rows.rows, rows))),
                torch.from_numpy(scalings[number]).to(device) if number in scalings else None,
            )
            for number, rows in batch.rows_by_adapter().items()
        ]

    def apply_to_products(
        self, x: torch.Tensor, names: Sequence[str], products: tuple[torch.Tensor, ...], pass_rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return products of x with the adapter of each row applied.

        Args:
            names, products: internal names of the matrices, and the products of x with them, which are overwritten.
            pass_rows: index in the pass of each row of x; None = x has all rows.
        """
        for own in self._adapter_rows:
            changed = [one for one in zip(names, products, strict=True) if one[0] in own.adapter.low_rank or one[0] in own.adapter.biases]
            if not changed:
                continue
            rows = own.rows if pass_rows is None else torch.isin(pass_rows, own.rows).nonzero().flatten()
            for name, product in changed:
                product[rows] = own.adapter.apply_to_product(name, x[rows].float(), product[rows].float(), own.scalings).to(product.dtype)
        return products

    def apply_to_logits(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return logits with the adapter of each row applied. x: input of `lm_head`."""
        for own in self._adapter_rows:
            logits[own.logits_rows] = own.adapter.apply_to_product(LM_HEAD, x[own.logits_rows].float(), logits[own.logits_rows])
        return logits

    def apply_to_embedding(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for own in self._adapter_rows:
            rows[own.rows] = own.adapter.apply_to_embedding(token_ids[own.rows], rows[own.rows].float()).to(rows.dtype)
        return rows
