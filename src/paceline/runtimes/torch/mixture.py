"""X-LoRA's scalings: what each row multiplies the ranks of its adapters by; computed in float32.

Source: PEFT 0.21, `XLoraClassifier` and `XLoraLayer.get_maybe_topk_scalings`.
"""

import torch

from paceline.models.adapters.adapter import Mixture


class TorchMixture:
    """A mixture on a device.

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
