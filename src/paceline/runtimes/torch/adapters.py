"""Adapters as tensors, and what they add to the rows of a pass; computed in float32, whatever the type of the network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.models.adapters.adapter import Mixture
from paceline.models.adapters.network_adapter import EMBEDDING, LM_HEAD, NetworkAdapter
from paceline.runtimes.adapter_rows import rows_by_adapter
from paceline.runtimes.base import ForwardBatch, Wanted


class TorchAdapter:
    """One adapter on a device.

    Attributes:
        products: down [rank, in] and up [out, rank] by our names.
        biases: [out], likewise.
        saved: matrices in the place of the target's.
        mixture: of X-LoRA, what makes the scalings of its rows; None = a plain one.
    """

    def __init__(self, placed: NetworkAdapter, device: torch.device) -> None:
        def tensor(values: NDArray[np.float32]) -> torch.Tensor:
            return torch.from_numpy(np.array(values, np.float32)).to(device)

        self.products = {name: (tensor(low.down), tensor(low.up)) for name, low in placed.products.items()}
        self.biases = {name: tensor(values) for name, values in placed.biases.items()}
        self.saved = {name: tensor(values) for name, values in placed.saved.items()}
        self.mixture = None if placed.mixture is None else TorchMixture(placed.mixture, device)

    def product(self, name: str, x: torch.Tensor, y: torch.Tensor, scalings: torch.Tensor | None = None) -> torch.Tensor:
        """Rows y of the product `name` with rows x, as the adapter has them, float32.

        Args:
            scalings: [rows, L * K] of X-LoRA.
        """
        found = x @ self.saved[name].T if name in self.saved else y
        if name in self.products:
            down, up = self.products[name]
            low = x @ down.T
            if self.mixture is not None and scalings is not None:
                low = low * scalings[:, self.mixture.columns[name]]
            found = found + low @ up.T
        return found + self.biases[name] if name in self.biases else found

    def embedding(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, not scaled, float32."""
        if EMBEDDING in self.saved:
            return self.saved[EMBEDDING][token_ids]
        if EMBEDDING not in self.products:
            return rows
        down, up = self.products[EMBEDDING]
        return rows + down[:, token_ids].T @ up.T


class TorchMixture:
    """X-LoRA's scalings, computed on a device in float32: what each row multiplies the ranks of its adapters by.

    Source: PEFT 0.21, `XLoraClassifier` and `XLoraLayer.get_maybe_topk_scalings`.

    Attributes:
        columns: [rank] of each product, which of a row's scalings is whose.
        pass_scaling: every scaling of the scaling pass; 0 = that is a pass of the target alone.
    """

    def __init__(self, mixture: Mixture, device: torch.device) -> None:
        self._mixture, self.pass_scaling = mixture, mixture.pass_scaling
        self._classifier = [
            (torch.from_numpy(weight.copy()).to(device), torch.from_numpy(bias.copy()).to(device)) for weight, bias in mixture.classifier
        ]
        self.columns = {name: torch.from_numpy(own.astype("int64")).to(device) for name, own in mixture.columns.items()}

    def constant(self, num_rows: int) -> torch.Tensor:
        """The scalings [rows, L * K] of a scaling pass."""
        mixture, device = self._mixture, self._classifier[0][0].device
        return torch.full((num_rows, mixture.num_layers * mixture.num_adapters), self.pass_scaling, device=device)

    def scalings(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The scalings [rows, L * K] of the real pass.

        Args:
            hidden_states: [rows, E] of the scaling pass, after the final norm.
        """
        mixture, values = self._mixture, hidden_states.float()
        for number, (weight, bias) in enumerate(self._classifier):
            values = torch.nn.functional.linear(values if number == 0 else values.relu(), weight, bias)
        scalings = values.reshape(-1, mixture.num_layers, mixture.num_adapters)
        if mixture.temperature is not None:
            scalings = (scalings / mixture.temperature).softmax(dim=-1)
        if mixture.top_k is not None:
            chosen = scalings.sort(dim=-1, descending=True, stable=True).indices[..., : mixture.top_k]  # the first of equal ones
            scalings = scalings * torch.zeros_like(scalings).scatter(-1, chosen, 1.0)
        if mixture.has_softmax_of_top_k:
            is_zero = scalings == 0
            scalings = scalings.masked_fill(is_zero, -torch.inf).softmax(dim=-1).masked_fill(is_zero, 0.0)
        return scalings.flatten(1)


@dataclass(frozen=True, slots=True)
class _OwnRows:
    """The rows of one adapter, of all and of those whose logits are wanted, and the scalings of all where it is X-LoRA's."""

    adapter: TorchAdapter
    rows: torch.Tensor
    wanted: torch.Tensor
    scalings: torch.Tensor | None


class AdaptedRows:
    """The rows of a pass that have adapters.

    Args:
        adapters: by number.
        scalings: of the rows of each X-LoRA adapter, by its number.
    """

    def __init__(
        self,
        adapters: Mapping[int, TorchAdapter],
        batch: ForwardBatch,
        wanted: Wanted,
        device: torch.device,
        scalings: Mapping[int, torch.Tensor],
    ) -> None:
        def on_device(numbers: NDArray[np.integer]) -> torch.Tensor:
            return torch.from_numpy(numbers.astype(np.int64)).to(device)

        self._own = [
            _OwnRows(adapters[number], on_device(rows), on_device(np.flatnonzero(np.isin(wanted.rows, rows))), scalings.get(number))
            for number, rows in rows_by_adapter(batch).items()
        ]

    def linear(
        self, x: torch.Tensor, names: Sequence[str], outs: tuple[torch.Tensor, ...], chosen: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Products of x as each row's adapter has them.

        Args:
            chosen: the rows of the pass that x has, in its order; None = all.
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
        """Logits of the rows that are wanted."""
        for own in self._own:
            logits[own.wanted] = own.adapter.product(LM_HEAD, x[own.wanted].float(), logits[own.wanted])
        return logits

    def embedding(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        for own in self._own:
            rows[own.rows] = own.adapter.embedding(token_ids[own.rows], rows[own.rows].float()).to(rows.dtype)
        return rows
