"""Writes X-LoRA adapters with PEFT, and what PEFT computes with each; runs in PEFT's environment.

Arguments: a folder of models, `NAME/base` each. Adapters are written next to the bases, with `expected.safetensors`: ids, logits of a pass
over all of them, ids that PEFT generates (without a cache, as it does by itself), and how many rows a cache holds that is given to it.
What PEFT itself saves (0.21.2) lies in `NAME/saved`: of the classifier it leaves out layers whose number is also an adapter's.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, XLoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache

IDS = [5, 17, 3, 44, 60, 2, 9, 31]
NUM_NEW = 12
TARGETS = (["q_proj", "down_proj"], ["q_proj", "v_proj"], ["up_proj", "down_proj"])
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layerwise": {"layerwise_scalings": True},
    "linear": {"enable_softmax": False, "layerwise_scalings": True},
    "temperature": {"softmax_temperature": 0.3, "global_scaling_weight": 1.7},
    "top-k": {"top_k_lora": 2, "layerwise_scalings": True},
    "top-k-softmax": {"top_k_lora": 2, "enable_softmax": False, "enable_softmax_topk": True},
    "two-softmaxes": {"enable_softmax_topk": True, "top_k_lora": 2},
    "pass-value": {"scaling_pass_value": 0.4, "layerwise_scalings": True},
    "pass-value-softmax": {"scaling_pass_value": 0.4, "enable_softmax_topk": True},
    "deep": {"xlora_depth": 3, "xlora_size": 24, "layerwise_scalings": True},
    "deep-without-dropout": {"xlora_depth": 2, "xlora_size": 24, "xlora_dropout_p": 0.0},
}


def open_model(base: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.config.use_cache = False  # with which PEFT refuses it
    return model


def randomize(model: Any, part: str, strength: float, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for name, one in model.named_parameters():
        if part in name:
            one.data.copy_(torch.randn(one.shape, generator=rng) * strength)


def write_adapters(base: Path) -> dict[str, str]:
    """The LoRA adapters of a base, by their numbers."""
    found = {}
    for number, targets in enumerate(TARGETS):
        settings = LoraConfig(task_type="CAUSAL_LM", r=2 + number, lora_alpha=7, target_modules=targets)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings)
        randomize(model, ".lora_", 0.4, number)
        directory = base.parent / "adapters" / str(number)
        model.save_pretrained(directory)
        found[str(number)] = str(directory)
    return found


def write(base: Path, adapters: dict[str, str], folder: Path, variant: dict[str, Any]) -> None:
    settings = XLoraConfig(task_type="CAUSAL_LM", hidden_size=open_model(base).config.hidden_size, adapters=adapters, **variant)
    model = get_peft_model(open_model(base), settings)
    randomize(model, "internal_xlora_classifier", 0.3, 9)
    made = model.eval()
    settings.save_pretrained(folder)
    classifier = {name: one.contiguous() for name, one in model.state_dict().items() if "internal_xlora_classifier" in name}
    save_file(classifier, folder / "adapter_model.safetensors")
    model = PeftModel.from_pretrained(open_model(base), folder).eval()
    ids, cache = torch.tensor([IDS]), DynamicCache()
    with torch.no_grad():
        logits = model(ids).logits[0].contiguous()
        assert torch.equal(logits, made(ids).logits[0])  # PEFT reads what was written
        generated = model.generate(input_ids=ids, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None)[0, len(IDS) :].contiguous()
        model(ids, past_key_values=cache, use_cache=True)
    values = {"logits": logits, "ids": ids[0], "generated": generated, "cached_rows": torch.tensor([cache.get_seq_length()])}
    save_file(values, folder / "expected.safetensors")
    if not variant:
        made.save_pretrained(base.parent / "saved")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for base in sorted(Path(sys.argv[1]).glob("*/base")):
        adapters = write_adapters(base)
        for name, variant in VARIANTS.items():
            write(base, adapters, base.parent / name, variant)
