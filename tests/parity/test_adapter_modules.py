"""Adapters can change every linear layer of transformers' models, by the name that it has there."""

from pathlib import Path
from typing import Any

import pytest

from harness import expert_checkpoints, gemma4_checkpoints, hybrid_checkpoints
from harness.checkpoints import write_checkpoint
from paceline.models.adapters.modules import target_modules
from paceline.models.checkpoint import read_model_config

torch = pytest.importorskip("torch")
PLAIN = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "glm4",
    "olmo2",
    "exaone4",
    "granite",
    "seed_oss",
    "smollm3",
    "starcoder2",
    "cohere2",
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in PLAIN},
    "gemma4": ("gemma4_text", gemma4_checkpoints.GEMMA4),
    **expert_checkpoints.CASES,
    **hybrid_checkpoints.CASES,
}
REFUSED = ".self_attn.kv_b_proj"  # in latent attention: keys and values are cached before it


@pytest.mark.parametrize("model", MODELS)
def test_adapters_can_change_every_linear_layer_of_transformers(model: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    family, values = MODELS[model]
    directory = write_checkpoint(tmp_path / "model", family, **values)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    layers = {name for name, module in theirs.named_modules() if isinstance(module, torch.nn.Linear) and not name.endswith(REFUSED)}
    assert layers - target_modules(read_model_config(directory)).keys() == set()
