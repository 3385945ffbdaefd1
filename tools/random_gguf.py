"""Write GGUF files with random weights in the shapes of published models, cut to fewer layers, for `bench.py passes`.

python tools/random_gguf.py DIR/qwen3-30b-a3b.gguf --model qwen3-30b-a3b --layers 10
python tools/random_gguf.py DIR/llama-8b.gguf --model llama-8b-q4_k_m --layers 32
python tools/random_gguf.py DIR/qwen3.5-0.8b.gguf --model qwen3.5-0.8b-q8_0 --layers 24
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Tensor:
    """Rows of a tensor: a matrix, a stack of them, or a vector in float32."""

    name: str
    shape: tuple[int, ...]
    kind: str


@dataclass
class Model:
    """Content of a file: architecture, metadata by name without the architecture's prefix, and tensors."""

    architecture: str
    metadata: dict[str, Any]
    tensors: list[Tensor] = field(default_factory=list)

    def add(self, name: str, shape: tuple[int, ...], kind: str = "F32") -> None:
        self.tensors.append(Tensor(name, shape, kind))


def _attention(model: Model, prefix: str, hidden: int, sizes: tuple[int, int, int], kind: str, *, has_norms: bool) -> None:
    heads, kv_heads, head = sizes
    model.add(f"{prefix}.attn_norm.weight", (hidden,))
    for part, rows in (("q", heads * head), ("k", kv_heads * head), ("v", kv_heads * head)):
        model.add(f"{prefix}.attn_{part}.weight", (rows, hidden), kind)
    model.add(f"{prefix}.attn_output.weight", (hidden, heads * head), kind)
    if has_norms:
        model.add(f"{prefix}.attn_q_norm.weight", (head,))
        model.add(f"{prefix}.attn_k_norm.weight", (head,))


def _experts(model: Model, prefix: str, hidden: int, count: int, inner: int, kind: str) -> None:
    model.add(f"{prefix}.ffn_gate_inp.weight", (count, hidden))
    model.add(f"{prefix}.ffn_gate_exps.weight", (count, inner, hidden), kind)
    model.add(f"{prefix}.ffn_up_exps.weight", (count, inner, hidden), kind)
    model.add(f"{prefix}.ffn_down_exps.weight", (count, hidden, inner), kind)


def qwen3_30b_a3b(layers: int) -> Model:
    """128 experts of which each row chooses 8."""
    hidden, vocab = 2048, 151936
    model = Model(
        "qwen3moe",
        {
            "embedding_length": hidden, "feed_forward_length": 6144, "attention.head_count": 32, "attention.head_count_kv": 4,
            "attention.key_length": 128, "attention.value_length": 128, "rope.freq_base": 1e6, "expert_count": 128,
            "expert_used_count": 8, "expert_feed_forward_length": 768, "context_length": 32768, "vocab_size": vocab,
            "attention.layer_norm_rms_epsilon": 1e-6, "block_count": layers,
        },
    )  # fmt: skip
    model.add("token_embd.weight", (vocab, hidden), "Q4_0")
    for layer in range(layers):
        prefix = f"blk.{layer}"
        _attention(model, prefix, hidden, (32, 4, 128), "Q4_0", has_norms=True)
        model.add(f"{prefix}.ffn_norm.weight", (hidden,))
        _experts(model, prefix, hidden, 128, 768, "Q4_0")
    model.add("output_norm.weight", (hidden,))
    model.add("output.weight", (vocab, hidden), "Q4_0")
    return model


def gpt_oss_20b(layers: int) -> Model:
    """32 experts in MXFP4 of which each row chooses 4; every other layer sees 128 tokens."""
    hidden, vocab, inner = 2880, 201088, 2880
    model = Model(
        "gpt-oss",
        {
            "embedding_length": hidden, "feed_forward_length": inner, "attention.head_count": 64, "attention.head_count_kv": 8,
            "attention.key_length": 64, "attention.value_length": 64, "rope.freq_base": 150000.0, "expert_count": 32,
            "expert_used_count": 4, "expert_feed_forward_length": inner, "context_length": 131072, "vocab_size": vocab,
            "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 128, "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 4096, "block_count": layers,
        },
    )  # fmt: skip
    model.add("token_embd.weight", (vocab, hidden), "Q8_0")
    for layer in range(layers):
        prefix = f"blk.{layer}"
        _attention(model, prefix, hidden, (64, 8, 64), "Q8_0", has_norms=False)
        for part, rows in (("q", 4096), ("k", 512), ("v", 512), ("output", hidden)):
            model.add(f"{prefix}.attn_{part}.bias", (rows,))
        model.add(f"{prefix}.attn_sinks.weight", (64,))
        model.add(f"{prefix}.post_attention_norm.weight", (hidden,))
        _experts(model, prefix, hidden, 32, inner, "MXFP4")
        model.add(f"{prefix}.ffn_gate_inp.bias", (32,))
        for part, rows in (("gate", inner), ("up", inner), ("down", hidden)):
            model.add(f"{prefix}.ffn_{part}_exps.bias", (32, rows))
    model.add("output_norm.weight", (hidden,))
    model.add("output.weight", (vocab, hidden), "Q8_0")
    return model


def gemma4_e4b(layers: int) -> Model:
    """Every 6th layer sees the whole text; the last 18 of 42 layers read the keys and values of others."""
    hidden, vocab, inner, taken_in = 2560, 262144, 10240, 256
    shared, pattern = round(layers * 18 / 42), [(layer + 1) % 6 > 0 for layer in range(layers)]
    model = Model(
        "gemma4",
        {
            "embedding_length": hidden, "feed_forward_length": inner, "attention.head_count": 8, "attention.head_count_kv": 2,
            "attention.key_length": 512, "attention.value_length": 512, "attention.key_length_swa": 256, "attention.value_length_swa": 256,
            "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "rope.dimension_count": 512, "rope.dimension_count_swa": 256,
            "context_length": 131072, "vocab_size": vocab, "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 512,
            "attention.sliding_window_pattern": pattern, "attention.shared_kv_layers": shared,
            "embedding_length_per_layer_input": taken_in, "final_logit_softcapping": 30.0, "block_count": layers,
        },
    )  # fmt: skip
    model.add("token_embd.weight", (vocab, hidden), "Q4_0")
    model.add("per_layer_token_embd.weight", (vocab, layers * taken_in), "Q4_0")
    model.add("per_layer_model_proj.weight", (layers * taken_in, hidden), "Q4_0")
    model.add("per_layer_proj_norm.weight", (taken_in,))
    model.add("rope_freqs.weight", (256,))
    for layer, is_local in enumerate(pattern):
        prefix, head = f"blk.{layer}", 256 if is_local else 512
        _attention(model, prefix, hidden, (8, 2, head), "Q4_0", has_norms=True)
        for norm in ("post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"):
            model.add(f"{prefix}.{norm}.weight", (hidden,))
        model.add(f"{prefix}.layer_output_scale.weight", (1,))
        model.add(f"{prefix}.inp_gate.weight", (taken_in, hidden), "Q4_0")
        model.add(f"{prefix}.proj.weight", (hidden, taken_in), "Q4_0")
        for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            model.add(f"{prefix}.ffn_{part}.weight", shape, "Q4_0")
    model.add("output_norm.weight", (hidden,))
    return model


def qwen35(layers: int, hidden: int, inner: int, heads: tuple[int, int], value_heads: int, kind: str) -> Model:
    """Three of four layers have a gated delta rule, with 16 key heads of 128 values.

    Args:
        heads: of attention, for queries and for keys.
    """
    vocab, head, keys, values = 248320, 256, 16 * 128, value_heads * 128
    model = Model(
        "qwen35",
        {
            "embedding_length": hidden, "feed_forward_length": inner, "attention.head_count": heads[0], "attention.head_count_kv": heads[1],
            "attention.key_length": head, "attention.value_length": head, "rope.freq_base": 1e7, "rope.dimension_count": 64,
            "rope.dimension_sections": [11, 11, 10, 0], "context_length": 262144, "vocab_size": vocab, "full_attention_interval": 4,
            "attention.layer_norm_rms_epsilon": 1e-6, "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16,
            "ssm.time_step_rank": value_heads, "ssm.inner_size": values, "block_count": layers,
        },
    )  # fmt: skip
    model.add("token_embd.weight", (vocab, hidden), "Q6_K" if kind == "Q4_K" else kind)
    for layer in range(layers):
        prefix = f"blk.{layer}"
        if (layer + 1) % 4 == 0:
            _attention(model, prefix, hidden, (2 * heads[0], heads[1], head), kind, has_norms=True)
            model.tensors[-3] = Tensor(f"{prefix}.attn_output.weight", (hidden, heads[0] * head), kind)  # the other half are gates
        else:
            model.add(f"{prefix}.attn_norm.weight", (hidden,))
            for part, shape in (("attn_qkv", (2 * keys + values, hidden)), ("attn_gate", (values, hidden)), ("ssm_out", (hidden, values))):
                model.add(f"{prefix}.{part}.weight", shape, kind)
            for part in ("ssm_alpha", "ssm_beta"):
                model.add(f"{prefix}.{part}.weight", (value_heads, hidden), kind)
            model.add(f"{prefix}.ssm_conv1d.weight", (2 * keys + values, 4))
            model.add(f"{prefix}.ssm_a", (value_heads,))
            model.add(f"{prefix}.ssm_dt.bias", (value_heads,))
            model.add(f"{prefix}.ssm_norm.weight", (128,))
        model.add(f"{prefix}.post_attention_norm.weight", (hidden,))
        for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            model.add(f"{prefix}.ffn_{part}.weight", shape, kind)
    model.add("output_norm.weight", (hidden,))
    return model


def qwen35_small(kind: str) -> Callable[[int], Model]:
    """Qwen3.5-0.8B."""
    return lambda layers: qwen35(layers, 1024, 3584, (8, 2), 16, kind)


def qwen35_large(kind: str) -> Callable[[int], Model]:
    """Qwen3.5-9B; with 8 layers of 32 its weights are 2 billion."""
    return lambda layers: qwen35(layers, 4096, 12288, (16, 4), 32, kind)


def llama(layers: int, hidden: int, inner: int, vocab: int, kind: str) -> Model:
    """Llama 3: queries of 64 values a head in 2048 columns, of 128 in 4096, a quarter as many heads of keys.

    Args:
        kind: of all matrices; Q4_K_M: Q4_K, but Q6_K for the output and for values and the way down of every other layer.
    """
    head = 64 if hidden <= 2048 else 128
    heads, plain, fine = (hidden // head, hidden // head // 4, head), kind, kind
    if kind == "Q4_K_M":
        plain, fine = "Q4_K", "Q6_K"
    model = Model(
        "llama",
        {
            "embedding_length": hidden, "feed_forward_length": inner, "attention.head_count": heads[0], "attention.head_count_kv": heads[1],
            "attention.key_length": head, "attention.value_length": head, "rope.freq_base": 5e5, "rope.dimension_count": head,
            "context_length": 16384, "vocab_size": vocab, "attention.layer_norm_rms_epsilon": 1e-5, "block_count": layers,
        },
    )  # fmt: skip
    model.add("token_embd.weight", (vocab, hidden), plain)
    for layer in range(layers):
        prefix, own = f"blk.{layer}", fine if layer % 2 == 0 else plain
        _attention(model, prefix, hidden, heads, plain, has_norms=False)
        model.tensors[-2] = Tensor(f"{prefix}.attn_v.weight", (heads[1] * head, hidden), own)
        _mlp(model, prefix, hidden, inner, plain, own)
    model.add("output_norm.weight", (hidden,))
    model.add("output.weight", (vocab, hidden), fine)
    return model


def tied(
    architecture: str, sizes: tuple[int, int, int], heads: tuple[int, int, int], kind: str, attention: Sequence[int] | None = None
) -> Callable[[int], Model]:
    """A dense model whose output matrix is the embedding.

    Args:
        sizes: hidden, of the MLP, of the vocabulary.
        heads: of queries and of keys, and their size.
        kind: of all matrices; Q4_K_M: Q4_K, but Q6_K for the embedding and the way down of every other layer.
        attention: layers with attention, the others have short convolutions; None = all.
    """
    hidden, inner, vocab = sizes
    plain, fine = ("Q4_K", "Q6_K") if kind == "Q4_K_M" else (kind, kind)

    def make(layers: int) -> Model:
        counts = [heads[1] if attention is None or layer in attention else 0 for layer in range(layers)]
        metadata: dict[str, Any] = {
            "embedding_length": hidden, "feed_forward_length": inner, "attention.head_count": heads[0], "attention.key_length": heads[2],
            "attention.head_count_kv": heads[1] if attention is None else counts, "attention.value_length": heads[2], "rope.freq_base": 1e6,
            "context_length": 32768, "vocab_size": vocab, "attention.layer_norm_rms_epsilon": 1e-6, "block_count": layers,
        }  # fmt: skip
        model = Model(architecture, metadata if attention is None else metadata | {"shortconv.l_cache": 3})
        model.add("token_embd.weight", (vocab, hidden), fine)
        for layer, count in enumerate(counts):
            prefix = f"blk.{layer}"
            if count:
                _attention(model, prefix, hidden, heads, plain, has_norms=True)
            else:
                model.add(f"{prefix}.attn_norm.weight", (hidden,))
                model.add(f"{prefix}.shortconv.in_proj.weight", (3 * hidden, hidden), plain)
                model.add(f"{prefix}.shortconv.conv.weight", (hidden, 3))
                model.add(f"{prefix}.shortconv.out_proj.weight", (hidden, hidden), plain)
            _mlp(model, prefix, hidden, inner, plain, fine if layer % 2 == 0 else plain)
        model.add("output_norm.weight" if attention is None else "token_embd_norm.weight", (hidden,))
        return model

    return make


def _mlp(model: Model, prefix: str, hidden: int, inner: int, kind: str, down: str) -> None:
    model.add(f"{prefix}.ffn_norm.weight", (hidden,))
    for part, shape, own in (("gate", (inner, hidden), kind), ("up", (inner, hidden), kind), ("down", (hidden, inner), down)):
        model.add(f"{prefix}.ffn_{part}.weight", shape, own)


def llama_of(hidden: int, inner: int, vocab: int, kind: str) -> Callable[[int], Model]:
    """By its number of layers."""
    return lambda layers: llama(layers, hidden, inner, vocab, kind)


MODELS: dict[str, Callable[[int], Model]] = {"qwen3-30b-a3b": qwen3_30b_a3b, "gpt-oss-20b": gpt_oss_20b, "gemma-4-e4b": gemma4_e4b}
MODELS |= {f"qwen3.5-0.8b-{kind.lower()}": qwen35_small(kind) for kind in ("Q8_0", "Q4_0", "Q4_K")}
MODELS |= {f"qwen3.5-9b-{kind.lower()}": qwen35_large(kind) for kind in ("Q8_0", "Q4_0", "Q4_K")}
for kind in ("Q4_K_M", "BF16"):
    MODELS[f"lfm2.5-1.2b-{kind.lower()}"] = tied("lfm2", (2048, 8192, 65536), (32, 8, 64), kind, (2, 5, 8, 10, 12, 14))  # 16 layers
    MODELS[f"qwen3-4b-{kind.lower()}"] = tied("qwen3", (2560, 9728, 151936), (32, 8, 128), kind)  # 36 layers
LLAMA_WEIGHT_TYPES = [
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q4_K_M", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS",
    "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0",
]  # fmt: skip
MODELS |= {f"llama-1b-{kind.lower()}": llama_of(2048, 8192, 32000, kind) for kind in LLAMA_WEIGHT_TYPES}  # 16 layers: 1.04 billion weights
MODELS |= {f"llama-8b-{kind.lower()}": llama_of(4096, 14336, 128256, kind) for kind in LLAMA_WEIGHT_TYPES}  # 32 layers


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Tokens without a text, so that a tokenizer can be made of the file."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = ["<|endoftext|>", "w", "1", "w1"]
    writer.add_token_list(tokens + [f"q{number}" for number in range(size - len(tokens))])
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (size - 1)])
    writer.add_token_merges(["w 1"])


def write(path: Path, model: Model) -> None:
    """The file; tensors are made one after another."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path.with_suffix(".part"), model.architecture)
    for name, value in model.metadata.items():
        key = f"{model.architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
    _add_vocabulary(writer, model.metadata["vocab_size"])
    for tensor in model.tensors:
        shape = byte_shape(tensor)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=gguf.GGMLQuantizationType[tensor.kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in model.tensors:
        writer.write_tensor_data(random_bytes(tensor, random))
    writer.close()
    path.with_suffix(".part").rename(path)


def byte_shape(tensor: Tensor) -> tuple[int, ...]:
    """The last dimension in bytes."""
    num_items, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.kind]]
    return (*tensor.shape[:-1], tensor.shape[-1] // num_items * num_bytes)


_SCALE_OFFSETS = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,),
    "TQ2_0": (64,),
}  # fmt: skip
"""Where a block's float16 numbers begin: its scale, and what is added or subtracted. Other types have only a scale, in front."""


def _set_scale(kind: str, blocks: NDArray[np.uint8], numbers: Sequence[float]) -> None:
    """Write the same quantisation scale into all blocks, and the same offset (minimum) into those of types that have one."""
    halves = np.array(numbers, "<f2")
    if kind == "MXFP4":
        blocks[:, 0] = 127 + round(math.log2(numbers[0]))
    elif kind == "NVFP4":  # four scales, multiples of 2^-9 as long as they are small
        blocks[:, :4] = min(max(round(numbers[0] * 512), 1), 126)
    elif kind == "IQ1_M":  # four bits of the float16 number in the upper half of every second byte
        nibbles = halves.view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16) & 15
        blocks[:, 49::2] = blocks[:, 49::2] & 15 | nibbles.astype(np.uint8) << 4
    else:
        for offset, half in zip(_SCALE_OFFSETS.get(kind, (0,)), halves, strict=True):
            blocks[:, offset : offset + 2] = half.reshape(1).view(np.uint8)


@cache
def _scale(kind: str, width: int) -> tuple[float, ...]:
    """Return the numbers of `_set_scale` with which random blocks have a mean near 0 and values near 1 / sqrt(width)."""
    if kind == "Q1_0":  # the library cannot decode it; all values are 1 or -1
        return (1 / math.sqrt(width),)
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = np.random.default_rng(1).integers(0, 256, (256, num_bytes), np.uint8)

    def decode(*numbers: float) -> NDArray[np.float32]:
        _set_scale(kind, blocks, numbers)
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])

    if len(_SCALE_OFFSETS.get(kind, (0,))) == 1:
        return (1 / 128 / float(decode(1 / 128).std() * math.sqrt(width)),)
    scaled, added = decode(1.0, 0.0), decode(0.0, 1.0)
    ratio = -float(scaled.mean() / added.mean())
    scale = 1 / float((scaled + ratio * added).std() * math.sqrt(width))
    return scale, ratio * scale


def random_bytes(tensor: Tensor, random: np.random.Generator) -> NDArray[np.uint8]:
    """Values of a size that keeps activations near 1: matrices get smaller with their width, vectors of norms are near 1."""
    if tensor.name == "rope_freqs.weight":  # a quarter of the pairs turns
        return np.repeat(np.array([1.0, 1e30], np.float32), [tensor.shape[0] // 4, tensor.shape[0] * 3 // 4]).view(np.uint8)
    if tensor.name.endswith("ssm_a"):
        return -np.exp(random.uniform(-4, 1, tensor.shape)).astype(np.float32).view(np.uint8)
    if tensor.kind == "F32":
        is_matrix = len(tensor.shape) > 1 and not tensor.name.endswith(".bias")
        values = random.normal(0.0 if is_matrix or tensor.name.endswith(".bias") else 1.0, 0.02, tensor.shape).astype(np.float32)
        return np.ascontiguousarray(values).view(np.uint8)
    if tensor.kind == "BF16":
        values = random.standard_normal(tensor.shape, np.float32) * np.float32(tensor.shape[-1] ** -0.5)
        return np.ascontiguousarray(values.view(np.uint16)[..., 1::2]).view(np.uint8)
    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.kind]]
    blocks = random.integers(0, 256, byte_shape(tensor), np.uint8)
    _set_scale(tensor.kind, blocks.reshape(-1, num_bytes), _scale(tensor.kind, tensor.shape[-1]))
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--layers", type=int, required=True)
    options = parser.parse_args()
    write(options.path, MODELS[options.model](options.layers))


if __name__ == "__main__":
    main()
