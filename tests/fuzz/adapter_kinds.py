"""The files of LoRA adapters."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.kind import HIDDEN, LAYERS, LLAMA, JsonKind, Kind, SafetensorsKind
from harness.adapter_files import low_rank, write_adapter

SETTINGS: dict[str, Any] = {
    "peft_type": "LORA", "base_model_name_or_path": "owner/base", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"],
    "rank_pattern": {"layers.1.self_attn.q_proj": 4}, "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 2.5}, "use_rslora": True,
    "layers_to_transform": list(range(LAYERS)), "layers_pattern": "layers", "exclude_modules": ["v_proj"], "bias": "none",
    "modules_to_save": ["lm_head"], "init_lora_weights": True, "fan_in_fan_out": False, "target_parameters": None,
}  # fmt: skip


def write(folder: Path) -> None:
    """A whole adapter."""
    rng = np.random.default_rng(0)
    tensors = {}
    for layer in range(LAYERS):
        tensors |= low_rank(rng, f"model.layers.{layer}.self_attn.q_proj", (HIDDEN, HIDDEN))
    tensors["lm_head.weight"] = rng.normal(size=(LLAMA["vocab_size"], HIDDEN)).astype(np.float32)
    write_adapter(folder, tensors, **SETTINGS)


class AdapterFile(Kind):
    """A kind of file that is read together with a model's config."""

    def prepare(self) -> None:
        write(self.folder)
        self.valid = self.path.read_bytes()

    def use(self, index: int) -> None:
        from paceline.models.adapters.read import read_adapter
        from paceline.models.config import config_from_values

        found = read_adapter(self.folder, name="a", config=config_from_values(LLAMA, Path("config.json")))
        assert len(found.digest) == 32


class AdapterSettingsFile(AdapterFile, JsonKind):
    name, share = "adapter_config.json", 30

    def prepare(self) -> None:
        super().prepare()
        self.values = json.loads(self.valid)


class AdapterSafetensorsFile(AdapterFile, SafetensorsKind):
    name, share = "adapter_model.safetensors", 60
