"""Write a trained EAGLE-3 head as one GGUF file of 4 or 8 bits, for a package or a download. It needs the packages gguf and torch.

    python tools/pack_drafter.py drafter/ eagle3.gguf --type Q4_0 --draft-vocab-size 12288

The first argument is the output directory of `paceline train eagle3`. With `--draft-vocab-size` only the ids that are most frequent in the
recorded answers (`data/` in that directory) stay. Names and layout are those of llama.cpp's converter.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

LAYER_NAMES = {
    "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
NAMES = {"norm": "output_norm", "lm_head": "output", "fc": "fc"} | {
    f"layers.0.{name}": f"blk.0.{gguf_name}" for name, gguf_name in LAYER_NAMES.items()
}


def main() -> None:
    """Read the directory and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", default="Q4_0", choices=["Q4_0", "Q8_0", "BF16"])
    parser.add_argument("--draft-vocab-size", type=int)
    arguments = parser.parse_args()
    tensors = read_head(arguments.directory)
    if arguments.draft_vocab_size is not None:
        tensors = keep_most_frequent(tensors, arguments.directory / "data", arguments.draft_vocab_size)
    config = json.loads((arguments.directory / "config.json").read_text(encoding="utf-8"))
    write_head(arguments.file, config, tensors, gguf.GGMLQuantizationType[arguments.type])
    print(f"{arguments.file}: {arguments.file.stat().st_size / 1e6:.2f} MB, {len(tensors['d2t']):,} draft ids")


def read_head(directory: Path) -> dict[str, NDArray[Any]]:
    """Return the tensors as float32, and in `d2t` the target id of each draft id."""
    found = load_file(directory / "model.safetensors")
    found.pop("t2d", None)
    offsets = found.pop("d2t").numpy()
    tensors = {name: values.to(torch.float32).numpy() for name, values in found.items()}
    return tensors | {"d2t": offsets.astype(np.int64) + np.arange(len(offsets))}


def keep_most_frequent(tensors: dict[str, NDArray[Any]], data: Path, size: int) -> dict[str, NDArray[Any]]:
    """Return the tensors with the `size` draft ids only that are most frequent in the answers."""
    counts = np.zeros(int(tensors["d2t"].max()) + 1, np.int64)
    for path in sorted(data.glob("train-*.safetensors")):
        shard = load_file(path)
        ids = shard["token_ids"][shard["is_answer"].bool()].numpy()
        counts += np.bincount(ids, minlength=len(counts))[: len(counts)]
    kept = np.sort(np.argsort(-counts[tensors["d2t"]], kind="stable")[:size])
    return tensors | {"d2t": tensors["d2t"][kept], "lm_head.weight": tensors["lm_head.weight"][kept]}


def write_head(path: Path, config: dict[str, Any], tensors: dict[str, NDArray[Any]], matrix_type: gguf.GGMLQuantizationType) -> None:
    """Write the GGUF file."""
    layer, writer = config["transformer_layer_config"], gguf.GGUFWriter(path, "eagle3")
    writer.add_embedding_length(layer["hidden_size"])
    writer.add_feed_forward_length(layer["intermediate_size"])
    writer.add_head_count(layer["num_attention_heads"])
    writer.add_head_count_kv(layer["num_key_value_heads"])
    writer.add_key_length(layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"])
    writer.add_context_length(layer["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(layer["rms_norm_eps"])
    writer.add_rope_freq_base(layer["rope_theta"])
    writer.add_vocab_size(layer["vocab_size"])
    writer.add_array("eagle3.extract_layers", list(config["eagle_aux_hidden_state_layer_ids"]))
    writer.add_uint32("eagle3.target_hidden_size", config["target_hidden_size"])
    writer.add_bool("eagle3.norm_before_residual", config["norm_before_residual"])
    heads = {"q_proj": layer["num_attention_heads"], "k_proj": layer["num_key_value_heads"]}
    for name, values in tensors.items():
        if name == "d2t":
            writer.add_tensor(name, values)
            continue
        stem = name.removesuffix(".weight")
        if count := heads.get(stem.rsplit(".", 1)[-1]):  # rotary embeddings of neighbours instead of halves
            values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        kind = matrix_type if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{NAMES[stem]}.weight", gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
