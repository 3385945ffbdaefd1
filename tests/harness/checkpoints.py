"""Tiny random checkpoints and tokenizers in the real on-disk formats, for tests."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

VOCAB_SIZE = 97
END_OF_TEXT_ID = 0
_SPECIAL_PIECES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "sat",
    "ran",
    "flew",
    "on",
    "under",
    "over",
    "mat",
    "tree",
    "house",
    "and",
    "then",
    "it",
    "was",
    "very",
    "happy",
    "sad",
    "big",
    "small",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "red",
    "blue",
    "green",
    "yes",
    "no",
    "if",
    "else",
    "for",
    "in",
    "while",
    "return",
    "def",
    "class",
    "self",
    "print",
    "name",
    "value",
    "list",
    "set",
]
_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|> ' + message['role'] + ' ' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|> assistant' }}{% endif %}"
)
_WITH_OFFSET = ("gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "muse_glimmer_text")
"""Families whose files hold norm weights less 1."""
# Values of configs as published, small.
MUSE_GLIMMER = {
    "num_hidden_layers": 5,
    "sliding_window": 16,
    "qk_scale_factor": 3.0,
    "output_multiplier": 0.6,
    "final_logit_softcapping": 3.0,
    "rms_norm_eps": 1e-2,
    "post_norm_eps": 0.1,
}
_MUSE_GLIMMER_ENCODER = {
    "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8},
    "out_hidden_size": 128,
    "projector_hidden_size": 64,
}
OLMO3_ROPE = {
    "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
MINISTRAL3 = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3,
    }
}


_folder = tempfile.TemporaryDirectory(prefix="paceline-checkpoints-")
_made: dict[str, Path] = {}
"""By what was asked for: the directory that is copied."""


def write_checkpoint(
    directory: Path,
    family: str,
    *,
    dtype: str = "float32",
    seed: int = 0,
    query_key_scale: float = 1.0,
    **overrides: Any,
) -> Path:
    """A random model of `family` saved by transformers, with a tokenizer; its logits differ clearly between tokens.

    Each is made once a run and copied: making one takes eight times as long.

    Args:
        query_key_scale: factor on the weights of the query and key projections, of Gemma 3n and 4 their norms, for large attention scores.
        overrides: values of its transformers config.
    """
    options: dict[str, Any] = {"dtype": dtype, "seed": seed, "query_key_scale": query_key_scale}
    key = repr((family, options, sorted(overrides.items())))
    if key not in _made:
        _made[key] = Path(_folder.name) / str(len(_made))
        _make_checkpoint(_made[key], family, **options, **overrides)
    return Path(shutil.copytree(_made[key], directory, copy_function=shutil.copyfile, dirs_exist_ok=True))


def _make_checkpoint(directory: Path, family: str, *, dtype: str, seed: int, query_key_scale: float, **overrides: Any) -> None:
    import torch

    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": None,
        **({"sliding_window": None} if family == "mistral" else {}),
        **overrides,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_causal_lm().from_config(_transformers_config(family, values), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                torch.nn.init.uniform_(parameter, -3.0, 1.0)
            elif name.endswith((".D", "conv1d.weight", "conv.conv.weight", ".alpha_p", ".alpha_n")):
                torch.nn.init.normal_(parameter, std=0.5)
            elif name.endswith(("bias", "sinks")):
                torch.nn.init.normal_(parameter, std=1.0 if name.endswith("sinks") else 0.3)
            elif name.endswith("modality_router.weight"):
                torch.nn.init.normal_(parameter, std=6.0)  # of inputs divided by the hidden size, so that tanh is not nearly linear
            elif name.endswith("correct_output_scale"):
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith((".gate.weight", ".router.weight", ".router.proj.weight")):
                torch.nn.init.normal_(parameter, std=0.5)  # rows choose their experts clearly
            elif "norm" in name or name.endswith(("router.scale", "per_expert_scale")):
                is_plain = "linear_attn" in name or (family == "muse_glimmer_text" and name.endswith(".language_model.norm.weight"))
                offset = 1.0 if family in _WITH_OFFSET and not is_plain else 0.0
                torch.nn.init.uniform_(parameter, 0.5 - offset, 1.5 - offset)
                if family.startswith(("gemma3n", "gemma4")) and name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.data *= query_key_scale
            elif name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.data *= query_key_scale
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                torch.nn.init.normal_(buffer, std=0.3)
            if name.endswith(("layer_scalar", "act_fn.beta")):
                torch.nn.init.uniform_(buffer, 0.6, 1.4)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    write_tokenizer(directory, values["vocab_size"])


def auto_causal_lm() -> Any:
    """Return transformers' AutoModelForCausalLM, which then also knows Muse Glimmer: it has no class for the text model alone."""
    from transformers import AutoModelForCausalLM, MuseGlimmerConfig, MuseGlimmerForConditionalGeneration

    AutoModelForCausalLM.register(MuseGlimmerConfig, MuseGlimmerForConditionalGeneration, exist_ok=True)
    return AutoModelForCausalLM


def _transformers_config(family: str, values: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    if family != "muse_glimmer_text":
        return AutoConfig.for_model(family, **values)
    return AutoConfig.for_model("muse_glimmer", text_config={**values, "model_type": family}, **_MUSE_GLIMMER_ENCODER)


def write_tokenizer(directory: Path, vocab_size: int = VOCAB_SIZE) -> Path:
    """A word-level tokenizer with spaces in front of words, special pieces and a chat template; ids 0 to vocab_size - 1."""
    pieces = [*_SPECIAL_PIECES, "<unk>", *("▁" + word for word in _WORDS)][:vocab_size]
    pieces += [f"▁w{index}" for index in range(len(pieces), vocab_size)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    _write_tokenizer_json(
        directory,
        model={"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
        added=_SPECIAL_PIECES,
        pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
        decoder={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
    )
    return directory


def write_byte_fallback_tokenizer(directory: Path) -> Path:
    """A tokenizer in the manner of SentencePiece: ▁ for spaces, <0xNN> pieces for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehilorst.,!", "▁the", "é", "你"]
    _write_tokenizer_json(
        directory,
        model={
            "type": "BPE",
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": [],
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
        },
        added=("<unk>", "<s>", "</s>"),
        pre_tokenizer=None,
        normalizer={
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
    )
    return directory


def write_byte_level_tokenizer(directory: Path) -> Path:
    """A tokenizer in the manner of GPT-2: every byte is a piece, a few merges, one special and one plain added token."""
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = [*sorted(ByteLevel.alphabet()), "Ġt", "Ġth", "Ġthe", "ðŁ", "ðŁĺ"]
    _write_tokenizer_json(
        directory,
        model={
            "type": "BPE",
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": [["Ġ", "t"], ["Ġt", "h"], ["Ġth", "e"], ["ð", "Ł"], ["ðŁ", "ĺ"]],
        },
        added=("<|endoftext|>",),
        plain_added=("<think>",),
        pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        decoder={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    )
    return directory


def _write_tokenizer_json(
    directory: Path,
    *,
    model: dict[str, Any],
    added: tuple[str, ...],
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    plain_added: tuple[str, ...] = (),
    normalizer: dict[str, Any] | None = None,
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    next_id = len(model["vocab"])
    added_tokens = []
    for piece in (*added, *plain_added):
        token_id = model["vocab"].get(piece, next_id)
        next_id += token_id == next_id
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": piece in added}
        added_tokens.append({"id": token_id, "content": piece, **flags})
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": added[-1] if "</s>" in added else added[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE if "<|im_start|>" in added else None,
    }
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
