"""The files of a model: configs, weights in safetensors and GGUF, adapters, and what we keep of them ourselves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.damage import BYTES, Rng, damaged_json_text, pick
from fuzz.kind import LAYERS, LLAMA, GgufKind, JsonKind, Kind, SafetensorsKind, random_tensors, write_model
from fuzz.tokenizer_kinds import use_tokenizer

GENERATION = {"bos_token_id": 1, "eos_token_id": [1, 2], "pad_token_id": 0, "temperature": 0.6, "top_p": 0.9}
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "owner/base", "r": 8, "target_modules": ["q_proj"]}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
)
FAMILIES: tuple[dict[str, Any], ...] = (
    {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 256},
    {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 3,
     "sliding_window": 256},
    {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8},
    {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 128, "partial_rotary_factor": 1.0,
     "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
    {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 256},
    {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "head_dim": 8, "rope_local_base_freq": 1e4}},
    {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", "head_dim": 8, "hidden_size_per_layer_input": 0}},
    {"model_type": "gemma3n_text", "architectures": ["Gemma3nForCausalLM"], "head_dim": 8, "num_kv_shared_layers": 2,
     "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2), "hidden_size_per_layer_input": 8, "laurel_rank": 4,
     "vocab_size_per_layer_input": 100, "activation_sparsity_pattern": [0.9] * (LAYERS // 2) + [0.0] * (LAYERS - LAYERS // 2),
     "altup_num_inputs": 3, "altup_active_idx": 1},
    {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "head_dim": 8, "sliding_window": 64, "num_kv_shared_layers": 2,
     "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2), "hidden_size_per_layer_input": 8,
     "vocab_size_per_layer_input": 120, "attention_k_eq_v": True, "use_double_wide_mlp": True,
     "per_layer_config": {str(layer): {"head_dim": 16, "num_key_value_heads": 1} for layer in range(1, LAYERS, 2)}},
    {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 8, "layer_types": ["full_attention"] * LAYERS},
    {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 8, "partial_rotary_factor": 0.5,
     "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2), "linear_num_key_heads": 2, "linear_num_value_heads": 4,
     "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4},
    {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "num_key_value_heads": None, "kv_lora_rank": 16,
     "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
     "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 2},
    {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
     "conv_L_cache": 3, "conv_bias": False, "block_auto_adjust_ff_dim": False},
    {"model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "mamba_n_heads": 4, "mamba_d_head": 16,
     "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "num_local_experts": 0,
     "shared_intermediate_size": 48, "layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*-M" * (LAYERS // 4),
     "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8, "conv_kernel": 4, "head_dim": 8},
)  # fmt: skip


class ConfigFile(JsonKind):
    """Every 8th goes through doctor, every 16th that can is loaded and computes."""

    name, share = "config.json", 200
    values = LLAMA

    def prepare(self) -> None:
        write_model(self.folder)

    def make(self, rng: Rng) -> bytes:
        values = {**LLAMA, **({"rope_scaling": pick(rng, ROPES)} if rng.integers(2) else {})}
        if rng.integers(3) == 0:
            values |= pick(rng, FAMILIES)
        return damaged_json_text(values, rng)

    def use(self, index: int) -> None:
        from harness.doctor_options import doctor_options
        from paceline.models.checkpoint import open_weights, read_model_config
        from paceline.proof.doctor import diagnose
        from paceline.runtimes.base import Numerics
        from paceline.runtimes.load import RuntimeOptions, load_network

        if index % 8 == 0:
            assert all(map(str.isprintable, diagnose(doctor_options(model=str(self.folder), drafters=("ngram",))).problems))
        config = read_model_config(self.folder)
        for context in (2, 100_000):
            config.for_context(context)
        open_weights(self.folder, config)
        if index % 16 == 0:
            load_network(self.folder, RuntimeOptions(numerics=Numerics.FAST, backend="native"))


class GenerationConfigFile(JsonKind):
    name, share = "generation_config.json", 30
    values = GENERATION

    def prepare(self) -> None:
        write_model(self.folder)

    def use(self, index: int) -> None:
        from paceline.models.checkpoint import read_model_config

        read_model_config(self.folder)


class AdapterConfigFile(JsonKind):
    name, share = "adapter_config.json", 10
    values = ADAPTER

    def prepare(self) -> None:
        pass

    def use(self, index: int) -> None:
        from paceline.hub import resolve_model

        resolve_model(self.folder)


class SafetensorsFile(SafetensorsKind):
    name, share = "model.safetensors", 150

    def prepare(self) -> None:
        write_model(self.folder)
        self.valid = self.path.read_bytes()

    def use(self, index: int) -> None:
        from paceline.models.checkpoint import open_weights, read_model_config

        weights = open_weights(self.folder, read_model_config(self.folder))
        assert weights.nbytes > 0


class IndexFile(JsonKind):
    name, share = "model.safetensors.index.json", 40

    def prepare(self) -> None:
        from safetensors.numpy import save_file

        write_model(self.folder)
        (self.folder / "model.safetensors").unlink()
        tensors = random_tensors(LLAMA)
        files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
        for file in sorted(set(files.values())):
            save_file({name: tensors[name] for name in tensors if files[name] == file}, self.folder / file)
        self.values = {"metadata": {"total_size": 1}, "weight_map": files}

    def use(self, index: int) -> None:
        from paceline.models.checkpoint import open_weights, read_model_config

        open_weights(self.folder, read_model_config(self.folder))


class GgufModelFile(GgufKind):
    """Header, metadata, tensors, blocks and tokenizer: all that is in the file is read."""

    name, share = "model.gguf", 200

    def prepare(self) -> None:
        import gguf

        writer = gguf.GGUFWriter(self.path, "llama")
        writer.add_context_length(128)
        writer.add_embedding_length(64)
        writer.add_block_count(2)
        writer.add_feed_forward_length(96)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "ab", "▁a", "cd", "abcd"]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([-float(index) for index in range(len(pieces))])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)])
        writer.add_eos_token_id(2)
        writer.add_chat_template("{{ messages }}")
        for key, value, kind in (("i8", -1, "int8"), ("u16", 7, "uint16"), ("i64", -(2**40), "int64"), ("f64", 0.1, "float64")):
            getattr(writer, f"add_{kind}")(f"test.{key}", value)
        writer.add_bool("test.bool", True)
        writer.add_array("test.bools", [True, False])
        rng = np.random.default_rng(0)
        for name, shape in gguf_shapes(len(pieces)):
            kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(rng.normal(size=shape).astype(np.float32), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        self.keep_file(self.path)

    def use(self, index: int) -> None:
        from paceline.models.checkpoint import open_weights, read_model_config
        from paceline.models.gguf.file import open_gguf
        from paceline.tokenizer.tokenizer import Tokenizer

        file = open_gguf(self.path)
        assert all(value is not None for value in file.metadata.values())
        if index % 4 == 0:
            use_tokenizer(Tokenizer.open(self.path))
        weights = open_weights(self.path, read_model_config(self.path))
        assert weights.nbytes > 0
        assert len(list(weights.values())) == len(weights)


def gguf_shapes(num_tokens: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (num_tokens, 64)
    yield "output_norm.weight", (64,)
    for layer in range(2):
        sizes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
        sizes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
        norms: dict[str, tuple[int, ...]] = {"attn_norm": (64,), "ffn_norm": (64,)}
        for name, shape in (sizes | norms).items():
            yield f"blk.{layer}.{name}.weight", shape


class QuantizedCacheFile(Kind):
    """A damaged file is made anew: whatever it holds, the values are right."""

    name, share = "quantised", 30

    def prepare(self) -> None:
        from paceline.config import QuantOptions
        from paceline.models.storage.quantized_cache import CACHE_FOLDER, quantized_weights
        from paceline.models.weights import as_float32

        rng = np.random.default_rng(0)
        self.options = QuantOptions(bits=4)
        self.weights = self._weights({f"layers.{layer}.q_proj.weight": rng.normal(size=(96, 128)).astype(np.float32) for layer in range(2)})
        found = quantized_weights(self.weights, self.options, self.folder)
        self.expected = {name: as_float32(found[name]).copy() for name in found}
        (self.file,) = (self.folder / CACHE_FOLDER).iterdir()
        self.valid = self.file.read_bytes()

    @property
    def path(self) -> Path:
        return self.file

    @staticmethod
    def _weights(arrays: dict[str, np.ndarray]) -> Any:
        from paceline.models.config import WeightType
        from paceline.models.weights import Tensor, Weights

        return Weights({name: Tensor(array, WeightType.F32, array.shape) for name, array in arrays.items()})

    def make(self, rng: Rng) -> bytes:
        return bytes(pick(rng, BYTES)(self.valid, rng))

    def use(self, index: int) -> None:
        from paceline.models.storage.quantized_cache import quantized_weights
        from paceline.models.weights import as_float32

        found = quantized_weights(self.weights, self.options, self.folder)
        assert all(np.array_equal(as_float32(found[name]), self.expected[name]) for name in self.expected)
