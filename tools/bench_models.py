"""Random Llama checkpoints of any shape, and the same weights as a GGUF file. Needs torch for the first, gguf and numpy for the second."""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's shape."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int = 16384

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "attention_bias": False,
            "mlp_bias": False,
        }


def write_llama(directory: Path, shape: Shape) -> None:
    """A random bf16 checkpoint without a tokenizer."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def matrix(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=torch.float32).normal_(0.0, 0.02, generator=generator).to(torch.bfloat16)

    def ones() -> torch.Tensor:
        return torch.ones(shape.hidden, dtype=torch.bfloat16)

    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors = {"model.embed_tokens.weight": matrix(shape.vocab, shape.hidden), "lm_head.weight": matrix(shape.vocab, shape.hidden)}
    tensors["model.norm.weight"] = ones()
    sizes = {
        "self_attn.q_proj": (query, shape.hidden),
        "self_attn.k_proj": (key, shape.hidden),
        "self_attn.v_proj": (key, shape.hidden),
        "self_attn.o_proj": (shape.hidden, query),
        "mlp.gate_proj": (shape.ffn, shape.hidden),
        "mlp.up_proj": (shape.ffn, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.ffn),
    }
    for layer in range(shape.layers):
        tensors.update({f"model.layers.{layer}.{name}.weight": matrix(*size) for name, size in sizes.items()})
        tensors.update({f"model.layers.{layer}.{name}.weight": ones() for name in ("input_layernorm", "post_attention_layernorm")})
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(shape.config(), indent=1), encoding="utf-8")


def write_gguf(checkpoint: Path, file: Path, kind: str = "BF16") -> None:
    """A bf16 Llama checkpoint as a GGUF file, rows of Q and K in llama.cpp's order of rotary pairs.

    Args:
        kind: block type of the matrices: "BF16" or one that the gguf package quantises.

    With a byte-level BPE tokenizer.json beside the weights the file has the tokenizer too, else it has none.
    """
    gguf = importlib.import_module("gguf")
    numpy = importlib.import_module("numpy")
    config = json.loads((checkpoint / "config.json").read_text())
    wanted = gguf.GGMLQuantizationType[kind]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(file.with_suffix(".part")), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(int(gguf.LlamaFileType[f"MOSTLY_{kind}"]))
    if (checkpoint / "tokenizer.json").is_file() and (checkpoint / "tokenizer_config.json").is_file():
        _add_tokenizer(writer, gguf, checkpoint, config)
    else:
        writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, item in stored_tensors(checkpoint).items():
        bits = numpy.memmap(item["file"], numpy.uint16, "r", item["offset"], tuple(item["shape"]))
        target = names.get_name(name, try_suffixes=(".weight",))
        if len(item["shape"]) == 1:
            writer.add_tensor(target, (bits.astype(numpy.uint32) << 16).view(numpy.float32))
            continue
        if ".q_proj." in name or ".k_proj." in name:
            count = heads if ".q_proj." in name else kv_heads
            pairs = bits.reshape(count, 2, bits.shape[0] // count // 2, bits.shape[1]).swapaxes(1, 2)
            bits = numpy.ascontiguousarray(pairs.reshape(bits.shape))
        if wanted is gguf.GGMLQuantizationType.BF16:
            writer.add_tensor(target, bits.view(numpy.uint8), raw_dtype=wanted)
        else:
            values = (bits.astype(numpy.uint32) << 16).view(numpy.float32)
            writer.add_tensor(target, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.with_suffix(".part").rename(file)


def _add_tokenizer(writer: Any, gguf: Any, checkpoint: Path, config: dict[str, Any]) -> None:
    """A byte-level BPE with GPT-2's splitting, and its chat template."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    ids = dict(tokenizer["model"]["vocab"])
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids |= special
    pieces = sorted(ids, key=lambda piece: int(ids[piece]))
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces)
    writer.add_token_types([control if piece in special else normal for piece in pieces])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(ids[settings["eos_token"]])
    writer.add_add_bos_token(False)
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])


def stored_tensors(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Shape, file and byte offset of every tensor of the checkpoint's safetensors files."""
    found = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        for name, item in header.items():
            found[name] = {"shape": item["shape"], "file": file, "offset": 8 + size + item["data_offsets"][0]}
    return found
