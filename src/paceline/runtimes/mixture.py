"""X-LoRA, a mixture of LoRA adapters: a pass with constant weights (the scaling pass) decides how much each adapter counts in a row.

The scaling pass runs only the rows with such an adapter, before the pass for logits, and has keys and values of its own. Its final hidden
states go through the mixture's classifier. The result, a row's scalings, multiplies the output of each adapter's down projection.

Source: Buehler and Buehler 2024, "X-LoRA"; PEFT 0.21, `XLoraClassifier` and `XLoraLayer.get_maybe_topk_scalings`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.models.adapters.adapter import Adapter, XLoraMixture
from paceline.models.config import ModelConfig
from paceline.runtimes.base import FloatArray, ForwardBatch, Network, RowRange

Inputs = Mapping[str, NDArray[Any]]
Scalings = Mapping[int, FloatArray]
"""[rows, L * K] scalings of the rows of each mixture, by adapter number."""


class Classifier(ABC):
    """Computes the scalings of rows; each runtime provides the matrix products.

    Attributes:
        scaling_pass_value: the constant scaling during the scaling pass; 0 = that pass runs without adapters.
    """

    def __init__(self, mixture: XLoraMixture) -> None:
        self._mixture, self.scaling_pass_value = mixture, mixture.scaling_pass_value

    @abstractmethod
    def logits(self, hidden_states: Any) -> FloatArray:
        """Return the classifier's output [rows, L * K] for hidden states [rows, E] after the final norm."""

    def constant(self, num_rows: int) -> FloatArray:
        """Return the constant scalings [rows, L * K] that adapters have in the scaling pass (L layers, K adapters)."""
        return np.full((num_rows, self._mixture.num_scaled_matrices * self._mixture.num_adapters), self.scaling_pass_value, np.float32)

    @np.errstate(over="ignore", invalid="ignore")  # rows with NaN or infinity are reported after the pass
    def scalings(self, hidden_states: Any) -> FloatArray:
        """Return the scalings [rows, L * K] of the adapters in the pass that computes logits, from the scaling pass's hidden states."""
        mixture, found = self._mixture, self.logits(hidden_states)
        num_rows, width = found.shape
        found = found.reshape(-1, mixture.num_scaled_matrices, mixture.num_adapters)
        if mixture.temperature is not None:
            found = _softmax(found / np.float32(mixture.temperature))
        if mixture.top_k is not None:
            chosen = np.argsort(-found, axis=-1, kind="stable")[..., : mixture.top_k]  # ties: the lower index
            stays = np.zeros(found.shape, np.bool_)
            np.put_along_axis(stays, chosen, values=True, axis=-1)
            found = np.where(stays, found, np.float32(0.0))
        if mixture.has_softmax_of_top_k:
            found = np.where(found != 0.0, _softmax(np.where(found != 0.0, found, np.float32(-np.inf))), np.float32(0.0))
        return np.array(found.reshape(num_rows, width), np.float32, order="C")


def row_scalings(
    classifiers: Mapping[int, Classifier], inputs: Inputs, batch: ForwardBatch, run_pass: Callable[[Inputs, ForwardBatch, Scalings], Any]
) -> dict[int, FloatArray]:
    """Run the scaling pass of a batch and return the scalings of its rows; no pass if no row has a mixture.

    Args:
        classifiers: classifiers of all loaded X-LoRA adapters, by adapter number.
        inputs, batch: of the pass that computes logits.
        run_pass: runs the scaling pass from inputs, rows and constant scalings; returns hidden states [rows, E].
    """
    ranges, taken, rows, start = list[RowRange](), list[NDArray[np.int32]](), dict[int, list[NDArray[np.int32]]](), 0
    for item in batch.ranges:
        if item.adapter in classifiers:
            adapter = item.adapter if classifiers[item.adapter].scaling_pass_value != 0.0 else 0
            ranges.append(item._replace(start=start, adapter=adapter))
            taken.append(np.arange(item.start, item.start + item.num_rows, dtype=np.int32))
            rows.setdefault(item.adapter, []).append(np.arange(start, start + item.num_rows, dtype=np.int32))
            start += item.num_rows
    if not ranges:
        return {}
    numbers, own_rows = np.concatenate(taken), {adapter: np.concatenate(parts) for adapter, parts in rows.items()}
    used = {adapter: own for adapter, own in own_rows.items() if classifiers[adapter].scaling_pass_value}
    constants = {adapter: classifiers[adapter].constant(len(own)) for adapter, own in used.items()}
    part = ForwardBatch(batch.positions[numbers], tuple(ranges))
    hidden = run_pass({name: values[numbers] for name, values in inputs.items()}, part, constants)
    return {adapter: classifiers[adapter].scalings(hidden[own.astype(np.int64)]) for adapter, own in own_rows.items()}


def check_supports_xlora(config: ModelConfig) -> None:
    """Raise ConfigError if the model's layers cannot run a scaling pass."""
    if config.recurrent_layers:
        raise ConfigError(
            "X-LoRA's scaling pass would need states of its own, and the model has recurrent layers: use its adapters one by one"
        )


def check_xlora_enabled(network: Network, adapter: Adapter) -> None:
    """Raise ConfigError if `adapter` is a mixture and the network has no cache for scaling passes."""
    if adapter.mixture is not None and not network.supports_xlora:
        raise ConfigError(
            f"the X-LoRA adapter {adapter.name!r} needs a second set of keys and values, which is planned when a model is opened: give it, "
            "or another X-LoRA adapter, in adapters= (--adapter) then"
        )


def _softmax(values: FloatArray) -> FloatArray:
    """Softmax of the last axis, summed in index order: a row's bits do not depend on the number of rows."""
    largest = values.max(axis=-1, keepdims=True)
    powers: FloatArray = np.exp(values - np.where(np.isfinite(largest), largest, np.float32(0.0)))
    total = powers[..., :1].copy()
    for place in range(1, values.shape[-1]):
        total += powers[..., place : place + 1]
    total[total == 0.0] = 1.0  # all scalings are 0
    return powers / total
