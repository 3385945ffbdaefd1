"""X-LoRA: a mixture of LoRA adapters, in which each row has a scaling for each layer and each adapter.

A scaling pass, in which all scalings are constant, precedes the actual pass; a classifier computes the scalings of the actual pass from
its final hidden states. The scaling pass has only the rows with an X-LoRA adapter, and its own keys and values. The actual pass multiplies
the output of each adapter's down projection by the scalings.

Source: Buehler and Buehler 2024, "X-LoRA"; PEFT 0.21, `XLoraClassifier` and `XLoraLayer.get_maybe_topk_scalings`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.models.adapters.adapter import Adapter, XLoraMixture
from paceline.models.config import ModelConfig
from paceline.runtimes.base import FloatArray, ForwardBatch, Network

Inputs = Mapping[str, NDArray[Any]]
Scalings = Mapping[int, FloatArray]
"""By adapter number: scalings [rows, L * K] of the rows with this X-LoRA adapter. L and K: see `XLoraMixture`."""


class Classifier(ABC):
    """Computes scalings from the hidden states of the scaling pass. Each runtime implements `logits`.

    Attributes:
        scaling_pass_value: the constant scaling during the scaling pass; 0 = no adapter is applied in it.
    """

    def __init__(self, mixture: XLoraMixture) -> None:
        self._mixture, self.scaling_pass_value = mixture, mixture.scaling_pass_value

    @abstractmethod
    def logits(self, hidden_states: Any) -> FloatArray:
        """Return the classifier's output [rows, L * K] for hidden states [rows, E] after the final norm."""

    def constant_scalings(self, num_rows: int) -> FloatArray:
        """Return the constant scalings [rows, L * K] of the scaling pass."""
        return np.full((num_rows, self._mixture.num_scaled_matrices * self._mixture.num_adapters), self.scaling_pass_value, np.float32)

    @np.errstate(over="ignore", invalid="ignore")  # the caller of the pass reports rows with NaN or infinity
    def scalings(self, hidden_states: Any) -> FloatArray:
        """Return the scalings [rows, L * K] of the actual pass, from the hidden states of the scaling pass."""
        mixture, scalings = self._mixture, self.logits(hidden_states)
        num_rows, width = scalings.shape
        scalings = scalings.reshape(-1, mixture.num_scaled_matrices, mixture.num_adapters)
        if mixture.temperature is not None:
            scalings = _softmax(scalings / np.float32(mixture.temperature))
        if mixture.top_k is not None:
            chosen = np.argsort(-scalings, axis=-1, kind="stable")[..., : mixture.top_k]  # if scalings are equal, the lower index is chosen
            is_top = np.zeros(scalings.shape, np.bool_)
            np.put_along_axis(is_top, chosen, values=True, axis=-1)
            scalings = np.where(is_top, scalings, np.float32(0.0))
        if mixture.has_softmax_of_top_k:
            scalings = np.where(scalings != 0.0, _softmax(np.where(scalings != 0.0, scalings, np.float32(-np.inf))), np.float32(0.0))
        return np.array(scalings.reshape(num_rows, width), np.float32, order="C")


def compute_scalings(
    classifiers: Mapping[int, Classifier], inputs: Inputs, batch: ForwardBatch, run_pass: Callable[[Inputs, ForwardBatch, Scalings], Any]
) -> dict[int, FloatArray]:
    """Run the scaling pass of a batch, unless no row has an X-LoRA adapter, and return the scalings of the rows.

    Args:
        classifiers: classifiers of all loaded X-LoRA adapters, by adapter number.
        inputs, batch: inputs and rows of the actual pass.
        run_pass: function that runs the scaling pass with inputs, rows and constant scalings and returns hidden states [rows, E].
    """
    mixed = [item for item in batch.ranges if item.adapter_number in classifiers]
    if not mixed:
        return {}
    indices = np.concatenate([np.arange(item.start, item.start + item.num_rows) for item in mixed])
    starts = accumulate((item.num_rows for item in mixed), initial=0)
    ranges = [item._replace(start=start) for item, start in zip(mixed, starts, strict=False)]
    rows_of_adapter = ForwardBatch(batch.positions[indices], tuple(ranges)).rows_by_adapter()
    adapted = {adapter: rows for adapter, rows in rows_of_adapter.items() if classifiers[adapter].scaling_pass_value != 0.0}
    constants = {adapter: classifiers[adapter].constant_scalings(len(rows)) for adapter, rows in adapted.items()}
    ranges = [item if item.adapter_number in adapted else item._replace(adapter_number=0) for item in ranges]
    scaling_batch = ForwardBatch(batch.positions[indices], tuple(ranges))
    hidden = run_pass({name: values[indices] for name, values in inputs.items()}, scaling_batch, constants)
    return {adapter: classifiers[adapter].scalings(hidden[rows.astype(np.int64)]) for adapter, rows in rows_of_adapter.items()}


def check_supports_xlora(config: ModelConfig) -> None:
    """Raise ConfigError if the model has layers that do not support a scaling pass."""
    if config.recurrent_layers:
        raise ConfigError(
            "X-LoRA's scaling pass would need states of its own, and the model has recurrent layers: use its adapters one by one"
        )


def check_xlora_enabled(network: Network, adapter: Adapter) -> None:
    """Raise ConfigError if `adapter` is an X-LoRA adapter and the network has no cache for scaling passes."""
    if adapter.mixture is not None and not network.supports_xlora:
        raise ConfigError(
            f"the X-LoRA adapter {adapter.name!r} needs a second set of keys and values, which is only allocated when a model is loaded: "
            "pass this or another X-LoRA adapter to adapters= (--adapter)"
        )


def _softmax(values: FloatArray) -> FloatArray:
    """Return the softmax over the last axis. Sums are in index order, so that a row's bits do not depend on the number of rows."""
    largest = values.max(axis=-1, keepdims=True)
    powers: FloatArray = np.exp(values - np.where(np.isfinite(largest), largest, np.float32(0.0)))
    total = powers[..., :1].copy()
    for index in range(1, values.shape[-1]):
        total += powers[..., index : index + 1]
    total[total == 0.0] = 1.0  # if all values are -inf: 0 / 1 instead of 0 / 0
    return powers / total
