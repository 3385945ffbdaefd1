"""X-LoRA adapters as files, and their definition computed with transformers' models: two passes over a whole text, without a cache."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from harness.adapter_files import low_rank, write_adapter
from paceline.models.adapters.modules import target_modules
from paceline.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

Floats = NDArray[np.float32]
CLASSIFIER = "base_model.internal_xlora_classifier.layers"
ALPHA, LARGER = 6, 2.0
MODULES = (("self_attn.q_proj", "mlp.down_proj"), ("self_attn.q_proj", "self_attn.v_proj"), ("mlp.up_proj", "mlp.down_proj"))
"""What each adapter changes, in turn: some matrices are changed by all, some by one, and some by none."""


def write_xlora(
    directory: Path,
    config: ModelConfig,
    *,
    seed: int,
    modules: Sequence[Sequence[str]] = MODULES,
    **settings: Any,
) -> Path:
    """A directory as PEFT's save_pretrained() makes it, with one adapter for each of `modules`; ranks differ.

    Args:
        settings: values of adapter_config.json in addition to the sizes.
    """
    rng, shapes = np.random.default_rng(seed), target_modules(config)
    for number, own in enumerate(modules):
        rank, tensors = 2 + number, dict[str, Floats]()
        for layer in range(config.num_layers):
            for module in own:
                name = f"model.layers.{layer}.{module}"
                tensors |= {key: LARGER * one for key, one in low_rank(rng, name, shapes[name].shape, rank).items()}
        targets = [module.rpartition(".")[2] for module in own]
        write_adapter(directory / str(number), tensors, r=rank, lora_alpha=ALPHA, target_modules=targets)
    values = {
        "peft_type": "XLORA", "hidden_size": config.hidden_size, "adapters": {str(number): f"{number}" for number in range(len(modules))},
        "xlora_size": 24, **settings,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(values))
    num_layers = config.num_layers * len({module for own in modules for module in own}) if values.get("layerwise_scalings") else 1
    depth, step = values.get("xlora_depth", 1), 3 if values.get("xlora_dropout_p", 0.2) else 2
    sizes = [config.hidden_size, *[values["xlora_size"]] * (depth - 1), num_layers * len(modules)]
    tensors = {}
    for layer, (columns, rows) in enumerate(pairwise(sizes)):
        tensors[f"{CLASSIFIER}.{step * layer}.weight"] = rng.normal(0, 2.5 / columns**0.5, (rows, columns)).astype(np.float32)
        tensors[f"{CLASSIFIER}.{step * layer}.bias"] = rng.normal(0, 0.3, rows).astype(np.float32)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


class Definition:
    """What an X-LoRA adapter of `write_xlora` makes of a model of transformers.

    Args:
        base: directory of the model.
        directory: that of the adapter.
    """

    def __init__(self, base: Path, directory: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
        self._settings = json.loads((directory / "adapter_config.json").read_text())
        self._classifier = [
            torch.from_numpy(one) for _, one in sorted(load_file(directory / "adapter_model.safetensors").items(), key=_order)
        ]
        self._adapters = [_read(directory / name) for name in self._settings["adapters"]]
        held = {name for adapter in self._adapters for name in adapter}
        self._modules = [(name, module) for name, module in self._model.named_modules() if name in held]

    def logits(self, token_ids: Sequence[int]) -> Floats:
        """[T, V]"""
        import torch

        with torch.inference_mode():
            count = len(self._adapters)
            constant = torch.full((len(token_ids), len(self._modules), count), float(self._settings.get("scaling_pass_value", 0.0)))
            hidden = self._forward(token_ids, constant).hidden_states[-1][0]
            for number in range(0, len(self._classifier), 2):
                bias, weight = self._classifier[number : number + 2]
                hidden = (hidden.relu() if number else hidden) @ weight.T + bias
            scalings = hidden.reshape(len(token_ids), -1, count).expand(-1, len(self._modules), -1)
            if self._settings.get("enable_softmax", True):
                scalings = (scalings / self._settings.get("softmax_temperature", 1.0)).softmax(-1)
            logits: Floats = self._forward(token_ids, scalings).logits[0].numpy()
            return logits

    def _forward(self, token_ids: Sequence[int], scalings: "torch.Tensor") -> Any:
        import torch

        hooks = [module.register_forward_hook(self._hook(name, scalings[:, place])) for place, (name, module) in enumerate(self._modules)]
        try:
            return self._model(torch.tensor([list(token_ids)]), output_hidden_states=True, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str, scalings: "torch.Tensor") -> Callable[..., "torch.Tensor"]:
        weights = _of_top_k(scalings, self._settings)

        def hook(module: object, inputs: "tuple[torch.Tensor]", output: "torch.Tensor") -> "torch.Tensor":
            for number, adapter in enumerate(self._adapters):
                if name in adapter:
                    down, up = adapter[name]
                    factor = ALPHA / len(down) * self._settings.get("global_scaling_weight", 1.0)
                    output = output + ((inputs[0] * weights[None, :, number, None]) @ down.T) @ up.T * factor
            return output

        return hook


def _of_top_k(scalings: "torch.Tensor", settings: Mapping[str, Any]) -> "torch.Tensor":
    """Row by row, by definition: keep the largest, with a softmax if the settings specify it."""
    import torch

    found = scalings.clone()
    for row in found:
        if settings.get("top_k_lora"):
            row[row.argsort(descending=True)[settings["top_k_lora"] :]] = 0.0
        if settings.get("enable_softmax_topk") and (stays := row != 0).any():
            row[stays] = torch.softmax(row[stays], dim=-1)
    return found


def _order(item: tuple[str, Floats]) -> tuple[int, str]:
    return int(item[0].split(".")[-2]), item[0].rpartition(".")[2]


def _read(directory: Path) -> "dict[str, tuple[torch.Tensor, torch.Tensor]]":
    import torch

    tensors = {name.removeprefix("base_model.model."): one for name, one in load_file(directory / "adapter_model.safetensors").items()}
    names = {name.partition(".lora_")[0] for name in tensors}
    return {
        name: (torch.from_numpy(tensors[f"{name}.lora_A.weight"]), torch.from_numpy(tensors[f"{name}.lora_B.weight"])) for name in names
    }
