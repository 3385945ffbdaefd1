"""Tiny dense transformers of every family, for tests."""

from typing import Any

from harness.checkpoints import MINISTRAL3, MUSE_GLIMMER, OLMO3_ROPE

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * index for index in range(6)],
    "long_factor": [1.5 + 0.7 * index for index in range(6)],
    "partial_rotary_factor": 0.75,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}
LOCAL_AND_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
}
GEMMA = {"query_pre_attn_scalar": 24, "tie_word_embeddings": True}
GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22, "logits_scaling": 1.5}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
LARGE_SCORES = {**GEMMA, "query_pre_attn_scalar": 4, "query_key_scale": 1.7}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"head_dim": 32}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": {**YARN, "rope_theta": 1e6}}),
    "qwen3": ("qwen3", {}),
    "qwen3-biased-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "phi3": ("phi3", {}),
    "phi3-partial": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "phi3-short": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 400, "tie_word_embeddings": True}),
    "phi3-long": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}),
    "llama-dynamic-short": ("llama", DYNAMIC),
    "llama-dynamic-long": ("llama", {**DYNAMIC, "max_position_embeddings": 128}),
    "gemma2": ("gemma2", LARGE_SCORES),
    "gemma2-untied-biased": (
        "gemma2",
        {**GEMMA, "tie_word_embeddings": False, "attention_bias": True, "final_logit_softcapping": 2.0},
    ),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 6}),
    "gemma3-ropes": (
        "gemma3_text",
        {
            **GEMMA,
            "rope_parameters": LOCAL_AND_GLOBAL,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 3.0,
        },
    ),
    "olmo2": ("olmo2", {"num_key_value_heads": 2}),
    "olmo2-tied-biased": ("olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
    "granite": ("granite", GRANITE),
    "seed_oss": ("seed_oss", {}),
    "glm4": ("glm4", {}),
    "ministral3": ("ministral3", MINISTRAL3),
    "glm4-yarn": ("glm4", {"rope_parameters": YARN, "attention_bias": False, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "smollm3-listed": ("smollm3", {"no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True}),
    "smollm3-unturned": ("smollm3", {"no_rope_layers": [0, 0, 0]}),
    "seed_oss-biased-tied": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granite-tied-biased": ("granite", {**GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "olmo3": ("olmo3", {"num_hidden_layers": 5, "rope_parameters": OLMO3_ROPE, "num_key_value_heads": 2}),
    "exaone4": ("exaone4", {"num_hidden_layers": 5, "sliding_window": None, "layer_types": ["full_attention"] * 5}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "hunyuan": ("hunyuan_v1_dense", {"rope_parameters": {**DYNAMIC["rope_parameters"], "alpha": 20.0}, "attention_bias": True}),
    "apertus": ("apertus", {"rope_parameters": LLAMA3, "attention_bias": True}),
    "arcee": ("arcee", {"num_key_value_heads": 4}),
    "arcee-yarn": ("arcee", {"rope_parameters": dict(YARN), "attention_bias": True, "tie_word_embeddings": True}),
    "cohere": ("cohere", {"logit_scale": 0.4, "attention_bias": True}),
    "starcoder2": ("starcoder2", {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "tie_word_embeddings": True}),
    "phi": ("phi", {"layer_norm_eps": 0.1}),
    # windows that a prompt crosses many times
    "mistral-window": ("mistral", {"sliding_window": 16}),
    "phi3-window": ("phi3", {"sliding_window": 16}),
    "qwen2-window": ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3-window": ("qwen3", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}),
    "smollm3-window": ("smollm3", {"num_hidden_layers": 5, "sliding_window": 16, "use_sliding_window": True}),
    "ministral3-window": ("ministral3", {**MINISTRAL3, "sliding_window": 16}),
    "cohere2-window": ("cohere2", {"num_hidden_layers": 5, "sliding_window": 16, "logit_scale": 0.4}),
    "starcoder2-window": ("starcoder2", {"sliding_window": 16, "use_bias": False, "tie_word_embeddings": False}),
    "granite_swa-window": (
        "granite_swa",
        {**GRANITE, "num_hidden_layers": 5, "sliding_window": 16, "layer_rope_theta": [1e4, 1e4, 0, 500.0, 0], "attention_bias": True},
    ),
    "olmo3-window": ("olmo3", {"num_hidden_layers": 5, "sliding_window": 16, "rope_parameters": OLMO3_ROPE}),
    "exaone4-window": ("exaone4", {"num_hidden_layers": 5, "sliding_window": 16}),
    "muse_glimmer-window": ("muse_glimmer_text", MUSE_GLIMMER),
    "gemma2-window": ("gemma2", {**LARGE_SCORES, "sliding_window": 16}),
    "gemma3-window": (
        "gemma3_text",
        {**GEMMA, "num_hidden_layers": 6, "sliding_window": 16, "rope_parameters": LOCAL_AND_GLOBAL, "query_key_scale": 2.0},
    ),
}
MAX_MODEL_LEN = {"phi3-long": 300, "llama-dynamic-long": 300}
"""Contexts that runtimes are opened for, where they matter."""

OF_CONVERTERS = [
    *("llama", "llama-biased-tied", "llama-linear", "qwen2-tied", "qwen2-yarn", "qwen3", "qwen3-biased-tied", "phi3-partial", "olmo2"),
    *("olmo3-window", "exaone4", "exaone4-window", "granite", "granite-tied-biased", "seed_oss", "seed_oss-biased-tied", "glm4"),
    *("glm4-yarn", "ministral3", "smollm3", "ernie4_5", "arcee", "arcee-yarn", "starcoder2", "stablelm", "stablelm-parallel", "phi"),
]
"""Those whose configs GGUF metadata has room for."""
