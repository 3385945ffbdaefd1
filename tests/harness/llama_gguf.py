"""Write a bf16 Llama checkpoint as a GGUF file, with the gguf package alone."""

import importlib
import json
from pathlib import Path
from typing import Any


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
