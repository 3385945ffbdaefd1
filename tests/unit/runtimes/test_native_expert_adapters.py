"""What adapters add to experts in the native runtime: right, for their own pairs alone, and the same bits in whatever company."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from harness.native_network import BUILT, Network, make_batch, plain_tensor
from paceline.models.adapters.adapter import LowRankUpdate
from paceline.models.adapters.network_adapter import NetworkAdapter
from paceline.models.layers import DenseMLP, ExpertMLP, ExpertRouting
from paceline.models.quantize import quantize_matrix
from paceline.models.weights import AnyTensor, GroupedTensor, as_float32
from paceline.runtimes.base import FloatArray, RowRange
from paceline.runtimes.native.adapters import NativeAdapter
from paceline.runtimes.native.library import kernels_path
from paceline.runtimes.native.program import NativeOps, Value
from paceline.runtimes.native.records import MAX_OPERATION_PHASES, ExpertsOperation

pytestmark = pytest.mark.skipif(kernels_path() is None, reason="no native kernels for this machine")

WIDTH, INNER, COUNT, CHOSEN = 64, 96, 11, 3
SHAPES = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}
MLP = ExpertMLP(routing=ExpertRouting(num_experts=COUNT, num_experts_per_token=CHOSEN), expert=DenseMLP(intermediate_size=INNER, bias=True))
Given = tuple[FloatArray, FloatArray]


def normal(random: np.random.Generator, *shape: int, scale: float = 1.0) -> FloatArray:
    return (scale * random.standard_normal(shape)).astype(np.float32)


def make_weights(random: np.random.Generator, stored: str = "floats") -> dict[str, AnyTensor]:
    tensors: dict[str, AnyTensor] = {}
    for expert in range(COUNT):
        for part, shape in SHAPES.items():
            matrix = normal(random, *shape, scale=0.2)
            is_plain = stored == "floats"
            tensors[f"experts.{expert}.{part}.weight"] = (
                plain_tensor(matrix) if is_plain else GroupedTensor(quantize_matrix(matrix, bits=8, group_size=32))
            )
            tensors[f"experts.{expert}.{part}.bias"] = plain_tensor(normal(random, shape[0], scale=0.5))
    return tensors


def adapter_of(random: np.random.Generator, ranks: Mapping[str, int], experts: Sequence[int], biases: Sequence[str] = ()) -> NetworkAdapter:
    products, offsets = dict[str, LowRankUpdate](), dict[str, FloatArray]()
    for expert in experts:
        for part, rank in ranks.items():
            outputs, columns = SHAPES[part]
            low = LowRankUpdate(normal(random, rank, columns, scale=0.1), normal(random, outputs, rank, scale=0.5))
            products[f"experts.{expert}.{part}"] = low
        for part in biases:
            offsets[f"experts.{expert}.{part}"] = normal(random, SHAPES[part][0])
    return NetworkAdapter(products, offsets, {})


def some_adapters(random: np.random.Generator) -> dict[int, NetworkAdapter]:
    exact = adapter_of(random, {"gate_proj": 9}, range(5))
    for low in exact.low_rank_updates.values():  # bfloat16 holds them
        low.lora_a.view(np.uint32)[...] &= 0xFFFF0000
        low.lora_b.view(np.uint32)[...] &= 0xFFFF0000
    return {
        1: adapter_of(random, {"gate_proj": 5, "up_proj": 3, "down_proj": 4}, range(COUNT)),
        2: exact,
        3: adapter_of(random, {"down_proj": 20}, range(1, COUNT, 2), biases=["up_proj"]),
        4: NetworkAdapter({}, {}, {}),
    }


def build(ops: NativeOps, inputs: list[Value]) -> Sequence[Value]:
    return [ops.experts(*inputs, MLP, "")]


def network_of(tensors: Mapping[str, AnyTensor], adapters: Mapping[int, NetworkAdapter] | None, **options: Any) -> Network:
    native = None if adapters is None else {number: NativeAdapter(one) for number, one in adapters.items()}
    return Network([WIDTH, COUNT], build, tensors=tensors, adapters=native, **options)


def rows_of(random: np.random.Generator, count: int) -> Given:
    return normal(random, count, WIDTH), normal(random, count, COUNT, scale=2.0)


def run(network: Network, given: Given, numbers: Sequence[int]) -> FloatArray:
    """Rows that each have the adapter of their number."""
    ranges = [RowRange(row, 1, 0, np.arange(4, dtype=np.int32), adapter_number=number) for row, number in enumerate(numbers)]
    return network(*given, batch=make_batch(ranges))[0]


def merged(tensors: Mapping[str, AnyTensor], adapter: NetworkAdapter) -> dict[str, AnyTensor]:
    """The weights with what an adapter adds in them."""
    found = dict(tensors)
    for name, low in adapter.low_rank_updates.items():
        found[f"{name}.weight"] = plain_tensor(as_float32(tensors[f"{name}.weight"]) + low.lora_b @ low.lora_a)
    for name, bias in adapter.biases.items():
        found[f"{name}.bias"] = plain_tensor(as_float32(tensors[f"{name}.bias"]) + bias)
    return found


def test_expert_adapter_changes_only_the_rows_that_use_it(seed: int) -> None:
    random = np.random.default_rng(seed)
    tensors, adapters = make_weights(random), some_adapters(random)
    network = network_of(tensors, adapters)
    plain = {number: network_of(merged(tensors, one), None) for number, one in adapters.items()}
    for count in (1, 2, 3, 9, 40):
        given, numbers = rows_of(random, count), random.integers(0, 5, count).tolist()
        base, found = run(network, given, [0] * count), run(network, given, numbers)
        for row, number in enumerate(numbers):
            if number in (0, 4):
                assert np.array_equal(found[row].view(np.int32), base[row].view(np.int32))
                continue
            (wanted,) = plain[number](given[0][row : row + 1], given[1][row : row + 1])
            np.testing.assert_allclose(found[row], wanted[0], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("stored", ["floats", "panels"])
def test_expert_adapter_bits_are_independent_of_rows_and_threads(stored: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    tensors, adapters = make_weights(random, stored), some_adapters(random)
    networks = [network_of(tensors, adapters, num_threads=threads, packed=stored == "panels") for threads in (1, 3)]
    given, numbers = rows_of(random, 23), random.integers(0, 5, 23).tolist()
    alone = [run(networks[0], (given[0][row : row + 1], given[1][row : row + 1]), [number]) for row, number in enumerate(numbers)]
    base = run(networks[0], given, [0] * 23)
    assert any(not np.array_equal(own[0], base[row]) for row, own in enumerate(alone))
    for network in networks:
        for _ in range(3):
            order = random.permutation(23)[: random.integers(1, 24)]
            together = run(network, (given[0][order], given[1][order]), [numbers[row] for row in order])
            for place, row in enumerate(order):
                assert np.array_equal(together[place].view(np.int32), alone[row][0].view(np.int32))


@pytest.mark.parametrize("level", BUILT)
def test_expert_adapter_bits_are_equal_on_every_instruction_set(level: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    tensors, adapters = make_weights(random), some_adapters(random)
    given, numbers = rows_of(random, 17), random.integers(0, 5, 17).tolist()
    first, own = (run(network_of(tensors, adapters, level=one), given, numbers) for one in (BUILT[0], level))
    assert np.array_equal(first.view(np.int32), own.view(np.int32))


@pytest.mark.parametrize("num_rows", [2, 9, 40])
def test_adapter_factors_are_read_once_per_chosen_expert(num_rows: int, seed: int) -> None:
    """Every panel of `down` that threads take from the list of work is one reading of it."""
    random = np.random.default_rng(seed)
    network = network_of(make_weights(random), adapters := some_adapters(random))
    given, numbers = rows_of(random, num_rows), [1, *random.integers(0, 5, num_rows - 1).tolist()]
    run(network, given, numbers)
    chosen = [np.argsort(-row, kind="stable")[:CHOSEN].tolist() for row in given[1]]
    pairs = {(expert, number) for number, experts in zip(numbers, chosen, strict=True) for expert in experts if number}
    counts = [sum(expert in experts for experts in chosen) for expert in range(COUNT)]
    for index, operation in enumerate(network._blocks.operations):
        if not isinstance(operation, ExpertsOperation):
            continue
        parts = ["down_proj"] if operation.is_per_pair else ["gate_proj", "up_proj"]
        panels = 0
        for expert, number in pairs:
            lows = [adapters[number].low_rank_updates.get(f"experts.{expert}.{part}") for part in parts]
            panels += -(-sum(len(low.lora_a) for low in lows if low is not None) // 8)
        blocks = sum(-(-count // 8) for count in counts)  # of packed rows
        taken = int(network.execution._tickets[MAX_OPERATION_PHASES * index]) - 1  # the last one finds no work
        assert panels > 0
        assert taken in (panels + blocks, panels + sum(-(-count // 4) for count in counts))  # as many rows as the processor packs at a time
