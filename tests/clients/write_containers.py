"""Run by tools that quantise, in their environment: each writes matrices, and what it makes of them again.

`python write_containers.py FOLDER` writes a folder for every case: config.json, model.safetensors (module `layer`), expected.safetensors.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

ROWS, COLUMNS = 96, 256
FOLDER = Path(sys.argv[1])
torch.manual_seed(0)
WEIGHT = torch.randn(ROWS, COLUMNS) * 0.05
Tensors = dict[str, torch.Tensor]


def save(name: str, settings: dict[str, Any], tensors: Tensors, expected: torch.Tensor, dtype: str) -> None:
    """One case; `dtype` is what the tool computed `expected` in."""
    folder = FOLDER / name
    folder.mkdir(parents=True)
    save_file({f"layer.{part}": tensor.contiguous() for part, tensor in tensors.items()}, folder / "model.safetensors")
    save_file({"expected": expected.float().contiguous()}, folder / "expected.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings, "dtype": dtype}))


def scales_and_zeros(bits: int, group: int, *, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    groups = WEIGHT.reshape(ROWS, -1, group)
    if symmetric:
        scales = groups.abs().amax(2) / (2 ** (bits - 1) - 1)
        return scales.half().float(), torch.full_like(scales, 2 ** (bits - 1))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = (high - low) / (2**bits - 1)
    return scales.half().float(), torch.round(-low / scales).clamp(1)  # the first format of GPTQ stores no 0


def linear() -> torch.nn.Linear:
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data = WEIGHT.clone()
    return layer


def awq() -> None:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    for group in (32, 64, 128, COLUMNS):
        scales, zeros = scales_and_zeros(4, group, symmetric=False)
        packed = WQLinear_GEMM.from_linear(linear().half(), 4, group, False, scales.T.contiguous().half(), zeros.T.contiguous().int())
        tensors = {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales}
        settings = {"quant_method": "awq", "bits": 4, "group_size": -1 if group == COLUMNS else group, "version": "gemm"}
        save(f"awq-{group}", settings, tensors, dequantize_gemm(*tensors.values(), 4, group).T, "float16")


def auto_round() -> None:
    """Both formats of GPTQ."""
    for packing, module in (("auto_gptq", "qlinear_torch_zp"), ("gptqmodel", "qlinear_torch")):
        layer_of = import_module(f"auto_round_extension.torch.{module}").QuantLinear
        for bits in (2, 4, 8):
            for symmetric in (True, False):
                scales, zeros = scales_and_zeros(bits, 64, symmetric=symmetric)
                layer = layer_of(bits, 64, COLUMNS, ROWS, False)
                layer.device = "cpu"
                layer.pack(linear(), scales.clone(), zeros.clone(), None)
                if hasattr(layer, "post_init"):
                    layer.post_init()
                with torch.no_grad():
                    expected = layer(torch.eye(COLUMNS)).T
                settings = {"quant_method": "auto-round", "packing_format": f"auto_round:{packing}", "bits": bits, "group_size": 64}
                name = f"auto_round-{packing}-{bits}-{symmetric}"
                save(name, {**settings, "sym": symmetric}, dict(layer.state_dict()), expected, "float16")


def compressed_tensors() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def write(name: str, form: str, scales: torch.Tensor, others: Tensors | None = None, **weights: Any) -> None:
        compressor = BaseCompressor.get_value_from_registry(form)
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
        packed = compressor.compress({"weight": WEIGHT.bfloat16(), "weight_scale": scales, **(others or {})}, scheme)
        expected = compressor.decompress(dict(packed), scheme)["weight"]
        settings = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        }
        save(f"compressed_tensors-{name}", settings, packed, expected, str(expected.dtype).removeprefix("torch."))

    for bits in (4, 8):
        for group in (32, 128, COLUMNS):
            for symmetric in (True, False):
                scales, zeros = scales_and_zeros(bits, group, symmetric=symmetric)
                others = {} if symmetric else {"weight_zero_point": (zeros - 2 ** (bits - 1)).to(torch.int8)}
                of_groups = {"strategy": "channel"} if group == COLUMNS else {"strategy": "group", "group_size": group}
                for kind in (torch.bfloat16, torch.float32):
                    name = f"{bits}-{group}-{symmetric}-{kind}"
                    write(name, "pack-quantized", scales.to(kind), others, num_bits=bits, symmetric=symmetric, **of_groups)
                if bits == 8 and group == COLUMNS:
                    write(f"bytes-{symmetric}", "int-quantized", scales.bfloat16(), others, num_bits=8, symmetric=symmetric, **of_groups)
    for strategy, shape in (("tensor", (1,)), ("channel", (ROWS, 1))):
        largest = WEIGHT.abs().amax() if strategy == "tensor" else WEIGHT.abs().amax(1, keepdim=True)
        write(
            f"float-{strategy}", "float-quantized", (largest.reshape(shape) / 448).bfloat16(), num_bits=8, type="float", strategy=strategy
        )
    blocks = (WEIGHT.reshape(3, 32, 4, 64).abs().amax((1, 3)) / 448).bfloat16()
    write("float-block", "float-quantized", blocks, num_bits=8, type="float", strategy="block", block_structure=[32, 64])
    divisor = (2688 / WEIGHT.abs().amax()).reshape(1)
    scales = (WEIGHT.reshape(ROWS, -1, 16).abs().amax(2) / 6 * divisor).to(torch.float8_e4m3fn).float()
    small = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    write("nvfp4", "nvfp4-pack-quantized", scales, {"weight_global_scale": divisor}, **small)


def bitsandbytes() -> None:
    import bitsandbytes.functional as F

    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            for dtype in ("float16", "bfloat16"):
                packed, state = F.quantize_4bit(WEIGHT.to(getattr(torch, dtype)), blocksize=64, compress_statistics=nested, quant_type=kind)
                tensors = {"weight": packed, **{f"weight.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}}
                settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
                save(f"bitsandbytes-{kind}-{nested}-{dtype}", settings, tensors, F.dequantize_4bit(packed, state), dtype)
    packed, largest, _ = F.int8_vectorwise_quant(WEIGHT.half())
    tensors = {"weight": packed, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    save("bitsandbytes-int8", settings, tensors, F.int8_vectorwise_dequant(packed, largest), "float32")


def mlx() -> None:
    """In float32: in the narrower types MLX rounds each operation."""
    import mlx.core as mx

    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64, 128):
            packed, *numbers = mx.quantize(mx.array(WEIGHT.numpy()), group_size=group, bits=bits)
            expected = torch.from_numpy(np.array(mx.dequantize(packed, *numbers, group_size=group, bits=bits)))
            words = torch.from_numpy(np.array(packed).view(np.int32)).view(torch.uint32)
            scales, minimums = (torch.from_numpy(np.array(part)) for part in numbers)
            settings = {"group_size": group, "bits": bits, "mode": "affine"}
            save(f"mlx-{bits}-{group}", settings, {"weight": words, "scales": scales, "biases": minimums}, expected, "float32")


def fp8() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    for rows, columns in ((32, 64), (ROWS, COLUMNS)):
        scales = WEIGHT.reshape(ROWS // rows, rows, COLUMNS // columns, columns).abs().amax((1, 3)) / 448
        packed = (WEIGHT / scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)).to(torch.float8_e4m3fn)
        for dtype in ("bfloat16", "float32"):
            expected = Fp8Dequantize(None)._dequantize_one(packed, scales, output_dtype=getattr(torch, dtype))
            blocks = None if rows == ROWS else [rows, columns]
            settings = {"quant_method": "fp8", "weight_block_size": blocks, "activation_scheme": "dynamic"}
            tensors = {"weight": packed, "weight_scale_inv": scales if blocks else scales.reshape(())}
            save(f"fp8-{rows}-{dtype}", settings, tensors, expected, dtype)


for write_all in (awq, auto_round, compressed_tensors, bitsandbytes, mlx, fp8):
    write_all()
