"""Writes LoRA adapters of many kinds with PEFT, and what PEFT computes with each; runs in PEFT's environment.

Arguments: a folder of models, `NAME/base` each. Adapters are written next to the bases, with `expected.safetensors` (ids and logits) and,
where PEFT can merge them, the merged model in `merged`; then an empty file `done`, a model after the other in the order of their names.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

IDS = [5, 17, 3, 44, 60, 2, 9, 31]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "linear": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*\.(?:layers\.[01])\..*(up|down)_proj"},
    "stabilized": {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "patterns": {
        "rank_pattern": {"q_proj": 2, r"layers\.1\..*down_proj": 6},
        "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 3, "down_proj": 5},
        "target_modules": ["q_proj", "down_proj", "o_proj"],
    },
    "layers": {"layers_to_transform": [1], "layers_pattern": "layers", "target_modules": ["q_proj"]},
    "excluded": {"exclude_modules": ["layers.1.self_attn.q_proj"], "target_modules": ["q_proj"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "transposed": {"target_modules": ["q_proj"], "fan_in_fan_out": True},
    "lora-bias": {"target_modules": ["q_proj", "up_proj"], "lora_bias": True},
    "all-biases": {"target_modules": ["q_proj"], "bias": "all"},
    "own-biases": {"target_modules": ["q_proj"], "bias": "lora_only"},
}
TIED: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "both": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved-both": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}


def open_model(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def variants_of(base: Path) -> dict[str, dict[str, Any]]:
    """All for the first model, those about ties for the tied one; of others all linear layers, and the parameters of experts."""
    if base.parent.name == "llama":
        return VARIANTS
    if base.parent.name == "llama-tied":
        return TIED
    model = open_model(base)
    stacks = {".".join(name.split(".")[-2:]) for name, one in model.named_parameters() if one.dim() == 3 and "conv" not in name}
    routers = {".".join(name.split(".")[-2:]) for name, _ in model.named_parameters() if name.endswith((".gate.weight", ".router.weight"))}
    experts = {"target_modules": ["q_proj"], "target_parameters": sorted(stacks | routers)}
    refused = {"kv_b_proj"}  # by paceline, in latent attention
    if model.config.model_type in ("nemotron_h", "falcon_h1"):
        refused.add("out_proj")  # by PEFT
    excluded = sorted(refused & {name.split(".")[-1] for name, _ in model.named_modules()})
    linear = {"target_modules": "all-linear", **({"exclude_modules": excluded} if excluded else {})}
    return {"linear": linear, **({"experts": experts} if stacks else {})}


def write(base: Path, folder: Path, variant: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = get_peft_model(open_model(base), LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 7, **variant}))
    rng = torch.Generator().manual_seed(0)
    for name, one in model.named_parameters():
        if one.requires_grad:
            keeps = "modules_to_save" in name or name.endswith("base_layer.bias")
            noise = torch.randn(one.shape, generator=rng) * 0.05
            one.data.copy_(0.5 * one.data + noise if keeps else noise)  # in place: tied ones share their memory
    model.save_pretrained(folder)
    model = PeftModel.from_pretrained(open_model(base), folder).eval()
    ids = torch.tensor([IDS])
    with torch.no_grad():
        save_file({"logits": model(ids).logits[0].contiguous(), "ids": ids[0]}, folder / "expected.safetensors")
    if base.parent.name == "llama":
        model.merge_and_unload().save_pretrained(folder / "merged")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for base in sorted(Path(sys.argv[1]).glob("*/base")):
        for name, variant in variants_of(base).items():
            write(base, base.parent / name, variant)
        (base.parent / "done").touch()
