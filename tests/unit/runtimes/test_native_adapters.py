"""What adapters add to products in the native runtime: right, for their own rows alone, and the same bits in whatever company."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from harness.native_network import BUILT, Network, make_batch, plain_tensor
from paceline.models.adapters.adapter import LowRankUpdate
from paceline.models.adapters.network_adapter import NetworkAdapter
from paceline.models.quantize import quantize_matrix
from paceline.models.weights import AnyTensor, GroupedTensor
from paceline.runtimes.base import FloatArray, RowRange
from paceline.runtimes.native.adapters import NativeAdapter
from paceline.runtimes.native.library import kernels_path
from paceline.runtimes.native.program import NativeOps, Value

pytestmark = pytest.mark.skipif(kernels_path() is None, reason="no native kernels for this machine")

COLUMNS = 96
OUTPUTS = {"q_proj": 64, "k_proj": 36, "v_proj": 7}


def normal(random: np.random.Generator, *shape: int) -> FloatArray:
    return random.standard_normal(shape).astype(np.float32)


def adapter_of(random: np.random.Generator, ranks: Mapping[str, int], *, biases: Sequence[str] = ()) -> NetworkAdapter:
    products = {name: LowRankUpdate(normal(random, rank, COLUMNS), normal(random, OUTPUTS[name], rank)) for name, rank in ranks.items()}
    return NetworkAdapter(products, {name: normal(random, OUTPUTS[name]) for name in biases}, {})


def build(ops: NativeOps, inputs: list[Value]) -> Sequence[Value]:
    return ops.linear(inputs[0], *OUTPUTS)


def network_of(tensors: Mapping[str, AnyTensor], adapters: Mapping[int, NetworkAdapter], **options: object) -> Network:
    native = {number: NativeAdapter(one) for number, one in adapters.items()}
    return Network([COLUMNS], build, tensors=tensors, adapters=native, **options)  # type: ignore[arg-type]


def run(network: Network, x: FloatArray, numbers: Sequence[int]) -> list[FloatArray]:
    """Rows that each have the adapter of their number; neighbours of the same one are a range."""
    ranges: list[RowRange] = []
    for row, number in enumerate(numbers):
        if ranges and ranges[-1].adapter_number == number:
            ranges[-1] = ranges[-1]._replace(num_rows=ranges[-1].num_rows + 1)
        else:
            ranges.append(RowRange(row, 1, 0, np.arange(4, dtype=np.int32), adapter_number=number))
    return network(x, batch=make_batch(ranges))


def expected(base: list[FloatArray], x: FloatArray, adapters: Mapping[int, NetworkAdapter], numbers: Sequence[int]) -> list[FloatArray]:
    found = [part.astype(np.float64) for part in base]
    for row, number in enumerate(numbers):
        for part, name in zip(found, OUTPUTS, strict=True):
            if number and name in adapters[number].low_rank_updates:
                low = adapters[number].low_rank_updates[name]
                part[row] += low.lora_b.astype(np.float64) @ (low.lora_a.astype(np.float64) @ x[row])
            if number and name in adapters[number].biases:
                part[row] += adapters[number].biases[name]
    return [part.astype(np.float32) for part in found]


def floats(random: np.random.Generator) -> dict[str, AnyTensor]:
    return {f"{name}.weight": plain_tensor(normal(random, outputs, COLUMNS)) for name, outputs in OUTPUTS.items()}


def some_adapters(random: np.random.Generator) -> dict[int, NetworkAdapter]:
    exact = adapter_of(random, {"q_proj": 16, "v_proj": 1})
    for low in exact.low_rank_updates.values():  # bfloat16 holds them
        low.lora_a.view(np.uint32)[...] &= 0xFFFF0000
        low.lora_b.view(np.uint32)[...] &= 0xFFFF0000
    return {
        1: adapter_of(random, {"q_proj": 8, "k_proj": 5, "v_proj": 3}),
        2: exact,
        3: adapter_of(random, {"k_proj": 20}, biases=["q_proj", "k_proj"]),
        4: adapter_of(random, {}, biases=["v_proj"]),
    }


def test_native_adapter_changes_only_the_rows_that_use_it(seed: int) -> None:
    random = np.random.default_rng(seed)
    tensors, adapters = floats(random), some_adapters(random)
    network = network_of(tensors, adapters)
    for count in (1, 2, 3, 9, 40):
        x, numbers = normal(random, count, COLUMNS), random.integers(0, 5, count).tolist()
        base, found = run(network, x, [0] * count), run(network, x, numbers)
        for own, wanted, plain in zip(found, expected(base, x, adapters, numbers), base, strict=True):
            np.testing.assert_allclose(own, wanted, rtol=2e-5, atol=2e-4)
            rows = [row for row, number in enumerate(numbers) if number == 0]
            assert np.array_equal(own[rows].view(np.int32), plain[rows].view(np.int32))


@pytest.mark.parametrize("stored", ["floats", "panels"])
def test_native_adapter_bits_are_independent_of_rows_and_threads(stored: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    tensors, adapters = floats(random), some_adapters(random)
    if stored == "panels":
        matrices = {name: normal(random, outputs, COLUMNS) for name, outputs in OUTPUTS.items()}
        tensors = {f"{name}.weight": GroupedTensor(quantize_matrix(one, bits=8, group_size=32)) for name, one in matrices.items()}
    networks = [network_of(tensors, adapters, num_threads=threads, packed=stored == "panels") for threads in (1, 3)]
    x, numbers = normal(random, 23, COLUMNS), random.integers(0, 5, 23).tolist()
    alone = [run(networks[0], x[row : row + 1], [number]) for row, number in enumerate(numbers)]
    for network in networks:
        for _ in range(3):
            order = random.permutation(23)[: random.integers(1, 24)]
            together = run(network, x[order], [numbers[row] for row in order])
            for place, row in enumerate(order):
                for part, own in zip(together, alone[row], strict=True):
                    assert np.array_equal(part[place].view(np.int32), own[0].view(np.int32))


@pytest.mark.parametrize("level", BUILT)
def test_native_adapter_bits_are_equal_on_every_instruction_set(level: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    tensors, adapters = floats(random), some_adapters(random)
    x, numbers = normal(random, 17, COLUMNS), random.integers(0, 5, 17).tolist()
    first, own = (run(network_of(tensors, adapters, level=one), x, numbers) for one in (BUILT[0], level))
    for left, right in zip(first, own, strict=True):
        assert np.array_equal(left.view(np.int32), right.view(np.int32))


def test_adapter_lm_head_replaces_that_of_the_model(seed: int) -> None:
    random = np.random.default_rng(seed)
    head, saved = normal(random, 70, COLUMNS), normal(random, 70, COLUMNS)
    adapters = {1: NativeAdapter(NetworkAdapter({}, {}, {"lm_head": saved})), 2: NativeAdapter(NetworkAdapter({}, {}, {}))}

    def logits(ops: NativeOps, inputs: list[Value]) -> Sequence[Value]:
        return [ops.lm_head(ops.logits_rows(inputs[0]), "embedding")]

    network = Network([COLUMNS], logits, tensors={"embedding.weight": plain_tensor(head)}, adapters=adapters)
    x, table = normal(random, 6, COLUMNS), np.arange(4, dtype=np.int32)
    ranges = [RowRange(0, 2, 0, table), RowRange(2, 3, 0, table, adapter_number=1), RowRange(5, 1, 0, table, adapter_number=2)]
    (found,) = network(x, batch=make_batch(ranges, wanted=[5, 4, 0, 2]))
    for own, (row, matrix) in zip(found, [(5, head), (4, saved), (0, head), (2, saved)], strict=True):
        np.testing.assert_allclose(own, matrix @ x[row], rtol=2e-5, atol=2e-5)
    (none,) = network(x, batch=make_batch(ranges, wanted=[0, 1]))
    np.testing.assert_allclose(none, x[:2] @ head.T, rtol=2e-5, atol=2e-5)
