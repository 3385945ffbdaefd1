"""Tokenizers with one piece for each byte, a few control tokens and any chat template."""

from typing import Any

from tokenizers import pre_tokenizers

from paceline.engine.input_processor import InputProcessor
from paceline.tokenizer.tokenizer import Tokenizer

CONTROLS = ("<|im_start|>", "<|im_end|>", "</think>")
CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def chat_tokenizer(template: str, tool_template: str = "") -> Tokenizer:
    """A tokenizer as GGUF files describe them. `<tool>` is a token, but no control token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*alphabet, *CONTROLS, "<tool>"],
        "tokenizer.ggml.token_type": [1] * len(alphabet) + [3] * len(CONTROLS) + [4],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": len(alphabet) + 1,
        "tokenizer.chat_template": template,
    }
    if tool_template:
        metadata |= {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": tool_template}
    return Tokenizer.from_gguf(metadata, "x.gguf")


def new_input_processor(template: str, tool_template: str = "", max_model_len: int = 4096) -> InputProcessor:
    """Makes prompts for a target with that tokenizer."""
    tokenizer = chat_tokenizer(template, tool_template)
    return InputProcessor(tokenizer, vocab_size=tokenizer.vocab_size, max_model_len=max_model_len, eos_token_ids=tokenizer.end_token_ids)
