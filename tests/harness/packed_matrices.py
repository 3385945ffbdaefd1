"""Quantised matrices as other tools store them, written here from their definitions, with the represented values in float64."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tensors = dict[str, tuple[str, Array]]


@dataclass(frozen=True)
class Packed:
    """One matrix: `quantization_config`, tensors of a module (type name, array), its values, and whether it becomes floats."""

    settings: dict[str, Any]
    tensors: Tensors
    values: NDArray[np.float64]
    becomes_floats: bool = False


def some_scales(rng: np.random.Generator, shape: tuple[int, ...], kind: type = np.float16) -> Array:
    """Of either sign, and none so small that a power of two would round it."""
    return (rng.uniform(0.01, 0.03, shape) * rng.choice([-1, 1], shape)).astype(kind)


def bits_of(values: Array, bits: int, axis: int) -> Array:
    """Codes packed along an axis into words of 32 bits, the lowest first."""
    moved = np.moveaxis(values.astype(np.uint64), axis, -1)
    as_bits = (moved[..., None] >> np.arange(bits, dtype=np.uint64) & np.uint64(1)).reshape(*moved.shape[:-1], -1)
    as_bits = np.pad(as_bits, [(0, 0)] * (as_bits.ndim - 1) + [(0, -as_bits.shape[-1] % 32)])
    words = (as_bits.reshape(*as_bits.shape[:-1], -1, 32) << np.arange(32, dtype=np.uint64)).sum(-1)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).astype(np.uint32)


def gptq(
    shape: tuple[int, int],
    *,
    bits: int = 4,
    group: int = 32,
    second: bool = False,
    symmetric: bool = False,
    order: str = "",
    says: str | None = None,
    seed: int = 0,
) -> Packed:
    """Codes down the columns; the zero points of the first format are stored less 1."""
    rng, (rows, columns) = np.random.default_rng(seed), shape
    own = columns if group == -1 else group
    count = -(-columns // own)
    codes = rng.integers(0, 2**bits, (columns, rows))
    zeros = np.full((count, rows), 2 ** (bits - 1)) if symmetric else rng.integers(1, 2**bits, (count, rows))
    scales = some_scales(rng, (count, rows))
    groups = np.arange(columns) // own
    groups = rng.permutation(groups) if order == "shuffled" else groups
    tensors: Tensors = {
        "qweight": ("I32", bits_of(codes, bits, 0)),
        "qzeros": ("I32", bits_of(zeros if second else zeros - 1, bits, 1)),
        "scales": ("F16", scales),
    }
    if order:
        tensors["g_idx"] = ("I32", (np.zeros_like(groups) if order == "zeros" else groups).astype(np.uint32))
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": bool(order)}
    settings |= {"checkpoint_format": says or ("gptq_v2" if second else "gptq")}
    values = scales.astype(np.float64)[groups] * (codes - zeros[groups])
    return Packed(settings, tensors, values.T, order == "shuffled")


def awq(shape: tuple[int, int], *, group: int = 32, seed: int = 0) -> Packed:
    """Eight outputs a word, at the places 0 4 1 5 2 6 3 7."""
    rng, (rows, columns) = np.random.default_rng(seed), shape
    own = columns if group == -1 else group
    codes, zeros = rng.integers(0, 16, (columns, rows)), rng.integers(0, 16, (columns // own, rows))
    scales = some_scales(rng, zeros.shape)
    in_word = [0, 2, 4, 6, 1, 3, 5, 7]  # which output is at each place

    def words(values: Array) -> Array:
        return bits_of(values.reshape(len(values), -1, 8)[:, :, in_word].reshape(values.shape), 4, 1)

    tensors: Tensors = {"qweight": ("I32", words(codes)), "qzeros": ("I32", words(zeros)), "scales": ("F16", scales)}
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    groups = np.arange(columns) // own
    return Packed(settings, tensors, (scales.astype(np.float64)[groups] * (codes - zeros[groups])).T)


def packed_integers(
    shape: tuple[int, int],
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    type_name: str = "F16",
    shuffled: bool = False,
    seed: int = 0,
) -> Packed:
    """compressed-tensors: codes along the columns, zero points along the rows."""
    rng, (rows, columns) = np.random.default_rng(seed), shape
    own = columns if group == -1 else group
    codes, zeros = rng.integers(0, 2**bits, shape), rng.integers(0, 2**bits, (rows, columns // own))
    zeros = np.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
    scales = some_scales(rng, zeros.shape, np.float16 if type_name == "F16" else np.float32)
    groups = np.arange(columns) // own
    groups = rng.permutation(groups) if shuffled else groups
    tensors: Tensors = {
        "weight_packed": ("I32", bits_of(codes, bits, 1)),
        "weight_scale": (type_name, scales),
        "weight_shape": ("I64", np.array(shape)),
    }
    if not symmetric:
        tensors["weight_zero_point"] = ("I32", bits_of(zeros, bits, 0))
    if shuffled:
        tensors["weight_g_idx"] = ("I32", groups.astype(np.uint32))
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
    values = scales.astype(np.float64)[:, groups] * (codes - zeros[:, groups])
    return Packed(settings, tensors, values, shuffled or (bits == 8 and not symmetric and type_name == "F32"))


def bytes_of_integers(shape: tuple[int, int], *, symmetric: bool = True, seed: int = 0) -> Packed:
    """compressed-tensors: an integer a byte."""
    rng = np.random.default_rng(seed)
    codes, zeros = rng.integers(-128, 128, shape), rng.integers(-20, 20, (shape[0], 1)) * (not symmetric)
    scales = some_scales(rng, zeros.shape)
    tensors: Tensors = {"weight": ("I8", codes.astype(np.int8)), "weight_scale": ("F16", scales)}
    if not symmetric:
        tensors["weight_zero_point"] = ("I8", zeros.astype(np.int8))
    activations = {"num_bits": 8, "dynamic": True}
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    settings |= {"config_groups": {"group_0": {"weights": {"num_bits": 8}, "input_activations": activations}}}
    return Packed(settings, tensors, scales.astype(np.float64) * (codes - zeros))


def e4m3(codes: Array) -> NDArray[np.float64]:
    exponent, mantissa = codes >> 3 & 15, codes & 7
    return np.where(codes < 128, 1, -1) * np.where(exponent == 0, mantissa / 512, (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7))


def fp8(
    shape: tuple[int, int], *, block: tuple[int, int] | None = (32, 64), by_row: bool = False, e8m0: bool = False, seed: int = 0
) -> Packed:
    """8-bit floats with scales of blocks, which may reach over the edge, of rows, or one."""
    rng, (rows, columns) = np.random.default_rng(seed), shape
    codes = rng.integers(0, 127, shape) + 128 * rng.integers(0, 2, shape)
    sizes = (1, columns) if by_row else block or shape
    grid = (-(-rows // sizes[0]), -(-columns // sizes[1]))
    scales = 2.0 ** rng.integers(-12, -5, grid) if e8m0 else rng.uniform(1e-4, 1e-3, grid).astype(np.float32)
    stored = ("F8_E8M0", (np.log2(scales) + 127).astype(np.uint8)) if e8m0 else ("F32", scales.astype(np.float32))
    values = e4m3(codes) * scales.repeat(sizes[0], 0)[:rows].repeat(sizes[1], 1)[:, :columns]
    part = "weight_scale" if by_row else "weight_scale_inv"
    tensors: Tensors = {"weight": ("F8_E4M3", codes.astype(np.uint8)), part: stored}
    settings: dict[str, Any] = {"quant_method": "fbgemm_fp8" if by_row else "fp8", "activation_scheme": "dynamic"}
    return Packed({**settings, "weight_block_size": list(block) if block else None}, tensors, values, becomes_floats=True)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e2m1(shape: tuple[int, int], *, kind: str, seed: int = 0) -> Packed:
    """4-bit floats: NVFP4 of compressed-tensors or ModelOpt, or MXFP4."""
    rng, (rows, columns) = np.random.default_rng(seed), shape
    codes, group = rng.integers(0, 16, shape), 32 if kind == "mxfp4" else 16
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    numbers = rng.integers(118, 124, (rows, columns // group)) if kind == "mxfp4" else rng.integers(1, 127, (rows, columns // group))
    factor = np.float32(1 / 313.7) if kind == "compressed" else np.float32(0.0017)
    if kind == "mxfp4":
        scales = 2.0 ** (numbers - 127)
    else:  # rounded to float32 once, as published
        own = e4m3(numbers).astype(np.float32)
        scales = (own / np.float32(313.7) if kind == "compressed" else own * factor).astype(np.float64)
    names = {"modelopt": ("weight", "weight_scale")}.get(kind, ("weight_packed", "weight_scale"))
    tensors: Tensors = {names[0]: ("U8", pairs), names[1]: ("U8" if kind == "mxfp4" else "F8_E4M3", numbers.astype(np.uint8))}
    if kind == "compressed":
        tensors["weight_global_scale"] = ("F32", np.array([313.7], np.float32))
    if kind == "modelopt":
        tensors["weight_scale_2"] = ("F32", np.array(factor))
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if kind != "modelopt":
        settings = {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized" if kind == "compressed" else "mxfp4-pack-quantized",
        }
    return Packed(settings, tensors, E2M1[codes] * np.repeat(scales, group, 1))


def nf4(shape: tuple[int, int], *, nested: bool = False, block: int = 64, seed: int = 0) -> Packed:
    """bitsandbytes: codes of a table in blocks of the flattened matrix, the first of a byte in its high half."""
    rng, size = np.random.default_rng(seed), shape[0] * shape[1]
    codes, table = rng.integers(0, 16, size), np.sort(rng.normal(size=16)).astype(np.float32)
    count = -(-size // block)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    own = {"weight": ("U8", (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]), "weight.quant_map": ("F32", table)}
    if nested:
        numbers, second = rng.integers(0, 256, count), rng.normal(size=256).astype(np.float32)
        largest = rng.uniform(0.01, 0.02, -(-count // 8)).astype(np.float32)
        state |= {"nested_blocksize": 8, "nested_dtype": "float32", "nested_offset": 0.25}
        scales = second[numbers] * largest[np.arange(count) // 8] + np.float32(0.25)
        own |= {"weight.absmax": ("U8", numbers.astype(np.uint8)), "weight.nested_absmax": ("F32", largest)}
        own["weight.nested_quant_map"] = ("F32", second)
    else:
        scales = rng.uniform(0.01, 0.02, count).astype(np.float32)
        own["weight.absmax"] = ("F32", scales)
    own["weight.quant_state.bitsandbytes__nf4"] = ("U8", np.frombuffer(json.dumps(state).encode(), np.uint8))
    values = table[codes].astype(np.float64) * scales.astype(np.float64)[np.arange(size) // block]
    return Packed({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, own, values.reshape(shape), True)


def int8_rows(shape: tuple[int, int], *, seed: int = 0) -> Packed:
    """bitsandbytes: an integer a byte, times a row's largest value over 127."""
    rng = np.random.default_rng(seed)
    codes, largest = rng.integers(-127, 128, shape), rng.uniform(0.1, 2, shape[0]).astype(np.float32)
    tensors: Tensors = {"weight": ("I8", codes.astype(np.int8)), "SCB": ("F32", largest), "weight_format": ("U8", np.array(0, np.uint8))}
    values = codes * (largest / np.float32(127)).astype(np.float64)[:, None]
    return Packed({"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors, values)


def mlx(shape: tuple[int, int], *, bits: int = 4, group: int = 64, seed: int = 0) -> Packed:
    """Codes side by side, a scale and a minimum a group."""
    rng, (rows, columns) = np.random.default_rng(seed), shape
    codes = rng.integers(0, 2**bits, shape)
    scales, minimums = (some_scales(rng, (rows, columns // group)) for _ in range(2))
    tensors: Tensors = {"weight": ("U32", bits_of(codes, bits, 1)), "scales": ("F16", scales), "biases": ("F16", minimums)}
    repeated = [np.repeat(part.astype(np.float64), group, 1) for part in (scales, minimums)]
    return Packed({"group_size": group, "bits": bits}, tensors, codes * repeated[0] + repeated[1])


KINDS: dict[str, Callable[[tuple[int, int]], Packed]] = {
    "gptq": lambda shape: gptq(shape),
    "gptq-8": lambda shape: gptq(shape, bits=8),
    "awq": lambda shape: awq(shape),
    "integers": lambda shape: packed_integers(shape, symmetric=False),
    "bytes": lambda shape: bytes_of_integers(shape),
    "fp8": lambda shape: fp8(shape),
    "nvfp4": lambda shape: e2m1(shape, kind="compressed"),
    "nf4": lambda shape: nf4(shape),
    "mlx": lambda shape: mlx(shape, group=32),
}
"""One of each, for whole models."""


def write_packed(path: Path, tensors: Tensors) -> None:
    """A safetensors file of such tensors."""
    header, begin = {}, 0
    for name, (type_name, array) in tensors.items():
        header[name] = {"dtype": type_name, "shape": list(array.shape), "data_offsets": [begin, begin + array.nbytes]}
        begin += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for _, array in tensors.values()))
