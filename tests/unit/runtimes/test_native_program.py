"""What a program of the kernels may hold: layers of any geometry, and operations on some of the rows."""

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest

from harness.model_configs import make_config
from harness.native_network import BUILT, Network, make_batch, native_config, plain_tensor
from paceline.kv_cache.cache import BLOCK_SIZE
from paceline.models.rope_config import RopeConfig
from paceline.models.weights import Tensor
from paceline.runtimes.base import FloatArray, RowRange
from paceline.runtimes.native.program import NativeOps, Value
from paceline.runtimes.native.records import AttentionOperation, RopeOperation, SummarizeOperation
from paceline.runtimes.native.rotary import RotaryTables

BY_LEVEL = pytest.mark.parametrize("level", BUILT)
WIDTH = 48


@dataclass(frozen=True, slots=True)
class Geometry:
    """Of one attention layer; `rotary_half`: pairs that are turned, by the angles of `table`."""

    heads: int
    kv_heads: int
    head_size: int
    scale: float
    soft_cap: float
    window: int
    rotary_half: int
    table: int


LAYERS = (
    Geometry(heads=4, kv_heads=2, head_size=16, scale=0.25, soft_cap=0.0, window=0, rotary_half=8, table=2),
    Geometry(heads=6, kv_heads=1, head_size=40, scale=0.1, soft_cap=3.0, window=5, rotary_half=10, table=0),
)


def tables() -> RotaryTables:
    """Three: of 10, 4 and 8 pairs."""
    joined = RotaryTables(native_config(), 64)
    bases = [(40, 0.5, 1e4), (8, 1.0, 100.0), (16, 1.0, 500.0)]
    configs = [make_config(head_size=size, rope=RopeConfig(theta=theta, rotated_fraction=part)) for size, part, theta in bases]
    joined.cos_sin = [RotaryTables(config, 64).cos_sin[0] for config in configs]
    return joined


def weights(seed: int) -> dict[str, Tensor]:
    random = np.random.default_rng(seed)
    shapes = {}
    for number, layer in enumerate(LAYERS):
        shapes[f"{number}.q"] = (layer.heads * layer.head_size, WIDTH)
        shapes[f"{number}.k"] = shapes[f"{number}.v"] = (layer.kv_heads * layer.head_size, WIDTH)
        shapes[f"{number}.o"] = (WIDTH, layer.heads * layer.head_size)
    return {f"{name}.weight": plain_tensor(random.normal(0, 0.3, shape).astype(np.float32)) for name, shape in shapes.items()}


def build(ops: NativeOps, inputs: list[Value]) -> list[Value]:
    """Layers of attention alone, each added to the stream."""
    (x,) = inputs
    for number, layer in enumerate(LAYERS):
        q, k, v = ops.linear(x, f"{number}.q", f"{number}.k", f"{number}.v")
        size, half = layer.head_size, layer.rotary_half
        turned = [
            ops._append(RopeOperation(x=value.index, heads=heads, head_size=size, rotary_half=half, angle_table=layer.table), value)
            for value, heads in ((q, layer.heads), (k, layer.kv_heads))
        ]
        attention = AttentionOperation(
            q=turned[0].index, k=turned[1].index, v=v.index, heads=layer.heads, kv_heads=layer.kv_heads, head_size=layer.head_size,
            layer=number, block_table_set=0, window=layer.window, is_causal=0, latent_size=0, scale=layer.scale, soft_cap=layer.soft_cap,
                sinks=None,
        )  # fmt: skip
        x = ops.add(x, *ops.linear(ops._append(attention, q), f"{number}.o"))
    return [x]


def turned(x: np.ndarray, layer: Geometry, pair: tuple[FloatArray, FloatArray]) -> np.ndarray:
    """Heads [T, heads, head_size] of positions 0 to T - 1."""
    half = layer.rotary_half
    cos, sin = (table[: len(x), None].astype(np.float64) for table in pair)
    first, second = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], axis=-1)


def expected(x: FloatArray, seed: int) -> np.ndarray:
    """The definition, in float64."""
    tensors = {name.removesuffix(".weight"): tensor.array.astype(np.float64) for name, tensor in weights(seed).items()}
    pairs, stream = tables().cos_sin, x.astype(np.float64)
    for number, layer in enumerate(LAYERS):
        q, k, v = ((stream @ tensors[f"{number}.{name}"].T).reshape(len(x), -1, layer.head_size) for name in "qkv")
        q, k = (turned(heads, layer, pairs[layer.table]) for heads in (q, k))
        k, v = (heads.repeat(layer.heads // layer.kv_heads, axis=1) for heads in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * layer.scale
        if layer.soft_cap:
            scores = layer.soft_cap * np.tanh(scores / layer.soft_cap)
        behind = np.arange(len(x))[:, None] - np.arange(len(x))
        scores[:, (behind < 0) | ((behind >= layer.window) if layer.window else False)] = -np.inf
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        stream = stream + np.einsum("hqk,khd->qhd", shares, v).reshape(len(x), -1) @ tensors[f"{number}.o"].T
    return stream


@BY_LEVEL
@pytest.mark.parametrize("num_threads", [1, 2])
def test_attention_layers_of_different_shapes_run_in_one_program(level: str, num_threads: int, seed: int) -> None:
    """Heads, head sizes, windows, soft caps and rotary tables of their own; a prompt, then rows after it."""
    run = Network([WIDTH], build, tensors=weights(seed), num_threads=num_threads, level=level, tables=tables())
    run.execution.set_cache(
        [np.full((4, layer.kv_heads, BLOCK_SIZE, layer.head_size), np.nan, np.float32) for layer in LAYERS for _ in range(2)]
    )
    x = np.random.default_rng(seed).normal(size=(45, WIDTH)).astype(np.float32)
    found, table = [], np.array([2, 1], np.int32)
    for begin, end in ((0, 7), (7, 8), (8, 45)):
        batch = make_batch([RowRange(0, end - begin, begin, table)], positions=range(begin, end))
        found.append(run(x[begin:end], batch=batch)[0])
    right = expected(x, seed)
    wrong = np.concatenate(found) - right
    assert np.abs(wrong).max() < 1e-5 * np.abs(right).max()
    assert np.sqrt(np.mean(wrong**2)) < 1e-6 * np.abs(right).max()


@pytest.mark.parametrize(
    "fields", [{}, {"x": 0, "heads": 1}, {"x": 0, "heads": 1, "head_size": 2, "rotary_half": 1, "angle_table": 0, "width": 4}]
)
def test_native_operation_with_missing_or_extra_fields_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(TypeError, match="the operation ROPE has the fields"):
        RopeOperation(**fields)


def test_native_operation_keeps_its_arrays_alive() -> None:
    ids = (ctypes.c_int32 * 3)(4, 5, 6)
    operation = SummarizeOperation(x=0, width=3, summary_index=0, columns=3, count=1, target_ids=ids)
    del ids
    assert operation.target_ids[:3] == [4, 5, 6]
