"""Export a Llama-like checkpoint with its tokenizer as a GGUF file. Runs in llama.cpp's environment, which has the gguf package.

Matrices are written as BF16, F16 or F32; every other type is made of a BF16 file by llama.cpp's own `llama_model_quantize`, as its users'
files are. One tensor is in memory at a time.
"""

import importlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]

ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""llama.cpp's architecture of a model_type."""

_NEIGHBOURS = "LLAMA"  # its rotary pairs are neighbours there: rows of Q and K are put in that order
_SPLITS = (  # a part of the tokenizer's split pattern, and llama.cpp's name of the pattern
    (r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*", "llama-bpe"),
    (r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*", "qwen2"),
)
_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class Stored:
    """Location of a tensor in a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int


def export_gguf(source: Path, target: Path, kind: str) -> None:
    """Write `source`, a directory with safetensors, to `target` with matrices of type `kind`.

    Raises:
        ValueError: a model or tokenizer that is not written here, or llama.cpp does not quantise it so.
    """
    if kind not in _BYTES:
        wide = target.with_name(f"{target.name}.bf16")
        try:
            export_gguf(source, wide, "BF16")
            _quantize(wide, target, kind)
        finally:
            wide.unlink(missing_ok=True)
        return
    gguf = importlib.import_module("gguf")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in ARCHITECTURES:
        raise ValueError(f"{source} is a {config['model_type']}; written as GGUF are {', '.join(ARCHITECTURES)}: name a GGUF file instead")
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[config["model_type"]]]
    writer = gguf.GGUFWriter(str(target), gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_file_type(int(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"]))
    _add_sizes(writer, gguf, config)
    _add_tokenizer(writer, gguf, source, config)
    _write_tensors(writer, gguf, gguf.get_tensor_name_map(architecture, config["num_hidden_layers"]), source, config, kind)
    writer.close()


def stored_tensors(source: Path) -> list[Stored]:
    """Return the tensors of a directory's safetensors files, in the order of the files."""
    found = []
    for file in sorted(source.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        found += [
            Stored(name, item["dtype"], tuple(item["shape"]), file, 8 + size + item["data_offsets"][0]) for name, item in header.items()
        ]
    return found


def rope_factors(config: Config) -> list[float] | None:
    """Return the divisor of each rotary pair's frequency; None where frequencies are not scaled.

    Source: `rope_type` "llama3" of transformers.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rotary positions of type {kind} are not written as GGUF here: name a GGUF file instead")
    size, factor = _head_size(config), rope["factor"]
    low, high, trained = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for pair in range(0, size, 2):
        turns = trained / (2 * math.pi * _rope_theta(config) ** (pair / size))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _rope_theta(config: Config) -> float:
    return float((config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10000.0)


def _head_size(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _kv_heads(config: Config) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _add_sizes(writer: Any, gguf: Any, config: Config) -> None:
    head = _head_size(config)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(_kv_heads(config))
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(_rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("paceline_grown"):
        writer.add_bool("paceline_grown", True)


def _add_tokenizer(writer: Any, gguf: Any, source: Path, config: Config) -> None:
    """Add a byte-level BPE tokenizer with special tokens and chat template, if the directory has one."""
    path = source / "tokenizer.json"
    if not path.is_file():
        writer.add_tokenizer_model("no_vocab")
        return
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ValueError(f"{path} is no byte-level BPE, the one kind that is written as GGUF here: name a GGUF file instead")
    special = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    pieces = {index: piece for piece, index in {**model["vocab"], **special}.items()}
    size = config["vocab_size"]
    control, normal, unused = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.UNUSED
    writer.add_tokenizer_model("gpt2")
    patterns = json.dumps(tokenizer.get("pre_tokenizer"))
    writer.add_tokenizer_pre(next((name for part, name in _SPLITS if json.dumps(part)[1:-1] in patterns), "gpt-2"))
    writer.add_token_list([pieces.get(index, f"[PAD{index}]") for index in range(size)])
    writer.add_token_types([unused if index not in pieces else control if pieces[index] in special else normal for index in range(size)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    settings_file = source / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8")) if settings_file.is_file() else {}
    end = settings.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    ends = {piece: index for index, piece in pieces.items()}
    if config.get("bos_token_id") is not None:
        writer.add_bos_token_id(config["bos_token_id"])
    if end in ends:
        writer.add_eos_token_id(ends[end])
    writer.add_add_bos_token(bool(settings.get("add_bos_token")))
    template = source / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    if isinstance(text, str):
        writer.add_chat_template(text)


def _write_tensors(writer: Any, gguf: Any, names: Any, source: Path, config: Config, kind: str) -> None:
    numpy = importlib.import_module("numpy")
    types = gguf.GGMLQuantizationType
    factors = rope_factors(config)
    tensors = []
    for tensor in stored_tensors(source):
        name = names.get_name(tensor.name, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"{source} holds {tensor.name}, which is not written as GGUF here: name a GGUF file instead")
        if tensor.name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        stored = kind if len(tensor.shape) > 1 else "F32"
        tensors.append((tensor, stored))
        writer.add_tensor_info(name, tensor.shape, numpy.dtype("f4"), math.prod(tensor.shape) * _BYTES[stored], types[stored])
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", (len(factors),), numpy.dtype("f4"), 4 * len(factors), types.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, stored in tensors:
        writer.write_tensor_data(_values(numpy, tensor, config, stored))
    if factors is not None:
        writer.write_tensor_data(numpy.array(factors, "f4"))


def _values(numpy: Any, tensor: Stored, config: Config, kind: str) -> Any:
    """Return the tensor as an array whose bytes have type `kind`."""
    if tensor.dtype not in _BYTES:
        raise ValueError(f"{tensor.name} is stored as {tensor.dtype}; written as GGUF are {', '.join(_BYTES)}: name a GGUF file instead")
    item = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}
    array = numpy.memmap(tensor.file, item[tensor.dtype], "r", tensor.offset, tensor.shape)
    array = _paired(numpy, array, tensor.name, config)
    if tensor.dtype == kind:
        return numpy.ascontiguousarray(array)
    wide = (array.astype("<u4") << 16).view("<f4") if tensor.dtype == "BF16" else array.astype("<f4")
    if kind == "BF16":  # rounded to the nearest, ties to even
        bits = wide.view("<u4")
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return wide.astype(item[kind])


def _paired(numpy: Any, array: Any, name: str, config: Config) -> Any:
    """Rows of Q and K in llama.cpp's order of rotary pairs."""
    part = name.split(".")[-2]
    if ARCHITECTURES[config["model_type"]] != _NEIGHBOURS or part not in ("q_proj", "k_proj"):
        return array
    heads = config["num_attention_heads"] if part == "q_proj" else _kv_heads(config)
    return array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def _quantize(source: Path, target: Path, kind: str) -> None:
    api, gguf = importlib.import_module("llama_cpp"), importlib.import_module("gguf")
    options = api.llama_model_quantize_default_params()
    options.nthread = int(os.environ.get("OMP_NUM_THREADS", "0"))
    options.ftype = int(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    if api.llama_model_quantize(str(source).encode(), str(target).encode(), importlib.import_module("ctypes").byref(options)):
        raise ValueError(f"llama.cpp does not quantise {source} to {kind}")
