"""The kernels' mixtures of experts: what rows choose, what they get, and what is read for it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.native_network import BUILT, Network, count_claimed_pieces, plain_tensor
from paceline.models.config import WeightType
from paceline.models.grouped import DOUBLED_E2M1_VALUES, GroupedMatrix
from paceline.models.layers import ClampedSwiGLU, DenseMLP, ExpertMLP, ExpertRouting, RouterScoring
from paceline.models.quantize import quantize_matrix
from paceline.models.weights import AnyTensor, GroupedTensor, Tensor, as_float32, to_bf16
from paceline.runtimes.base import FloatArray
from paceline.runtimes.native.program import NativeOps, Value
from paceline.runtimes.native.records import ExpertsOperation

BY_LEVEL = pytest.mark.parametrize("level", BUILT)
WIDTH, INNER, COUNT = 64, 96, 11
PLAIN = ExpertMLP(routing=ExpertRouting(num_experts=COUNT, num_experts_per_token=3), expert=DenseMLP(intermediate_size=INNER))
KINDS = ["f32", "bf16", "int4", "int8", "mxfp4"]


def stored(kind: str, values: FloatArray, random: np.random.Generator) -> AnyTensor:
    if kind == "bf16":
        return Tensor(to_bf16(values), WeightType.BF16, values.shape)
    if kind in ("int4", "int8"):
        return GroupedTensor(quantize_matrix(values, bits=int(kind[3:]), group_size=32))
    if kind == "mxfp4":
        codes = random.integers(0, 256, (len(values), values.shape[1] // 2), np.uint8)
        scales = np.full((len(values), values.shape[1] // 32), 1 / 64, np.float32)
        return GroupedTensor(GroupedMatrix(codes, scales, None, 4, code_values=DOUBLED_E2M1_VALUES))
    return plain_tensor(values)


def make_weights(kind: str, mlp: ExpertMLP, seed: int) -> dict[str, AnyTensor]:
    random, tensors = np.random.default_rng(seed), dict[str, AnyTensor]()
    shapes = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}
    for expert in range(mlp.routing.num_experts):
        for part, shape in shapes.items():
            name = f"experts.{expert}.{part}"
            tensors[f"{name}.weight"] = stored(kind, random.normal(0, 0.2, shape).astype(np.float32), random)
            if mlp.expert.bias:
                tensors[f"{name}.bias"] = plain_tensor(random.normal(0, 0.5, shape[0]).astype(np.float32))
    for name in ("correction", "scales"):
        tensors[f"router.{name}"] = plain_tensor(random.uniform(0.2, 1.2, mlp.routing.num_experts).astype(np.float32))
    return tensors


def network(kind: str, mlp: ExpertMLP, tensors: dict[str, AnyTensor], **options: Any) -> Network:
    def build(ops: NativeOps, inputs: list[Value]) -> list[Value]:
        x, logits = inputs
        return [ops.experts(x, logits, mlp, "")]

    compute_type = WeightType.BF16 if kind == "bf16" else WeightType.F32
    packed = kind in ("int4", "int8", "mxfp4") and options.pop("packed", True)
    return Network([WIDTH, mlp.routing.num_experts], build, tensors=tensors, compute_type=compute_type, packed=packed, **options)


def weights_of(routing: ExpertRouting, logits: np.ndarray, tensors: dict[str, AnyTensor]) -> np.ndarray:
    """[experts] of one row, 0 where one is not chosen: the definition, in float64."""
    scores = 1 / (1 + np.exp(-logits)) if routing.scoring is RouterScoring.SIGMOID else np.exp(logits - logits.max())
    scores = scores if routing.scoring is RouterScoring.SIGMOID else scores / scores.sum()
    compared = scores + as_float32(tensors["router.correction"]) if routing.has_correction_bias else scores.copy()
    if routing.num_expert_groups > 1:
        groups = compared.reshape(routing.num_expert_groups, -1)
        sums = np.sort(groups)[:, -2:].sum(axis=1)
        groups[np.argsort(-sums, kind="stable")[routing.num_selected_groups :]] = -np.inf
        compared = groups.reshape(-1)
    chosen = np.argsort(-compared, kind="stable")[: routing.num_experts_per_token]
    weights = np.zeros_like(scores)
    weights[chosen] = scores[chosen] / ((scores[chosen].sum() + routing.weight_sum_epsilon) if routing.has_normalized_weights else 1)
    return weights * routing.routed_scaling_factor * (as_float32(tensors["router.scales"]) if routing.has_expert_scales else 1)


def expected(mlp: ExpertMLP, tensors: dict[str, AnyTensor], x: FloatArray, logits: FloatArray) -> np.ndarray:
    parts = {name: as_float32(tensor).astype(np.float64) for name, tensor in tensors.items()}
    mixed, activation = np.zeros((len(x), WIDTH)), mlp.expert.activation

    def product(expert: int, part: str, row: np.ndarray) -> np.ndarray:
        name = f"experts.{expert}.{part}"
        return parts[f"{name}.weight"] @ row + parts.get(f"{name}.bias", 0.0)

    for row in range(len(x)):
        for expert, weight in enumerate(weights_of(mlp.routing, logits[row].astype(np.float64), tensors)):
            gate, up = (product(expert, part, x[row]) for part in ("gate_proj", "up_proj"))
            if isinstance(activation, ClampedSwiGLU):
                gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit) + 1
                active = gate / (1 + np.exp(-activation.sigmoid_slope * gate)) * up
            else:
                active = gate / (1 + np.exp(-gate)) * up
            mixed[row] += weight * product(expert, "down_proj", active)
    return mixed


def rows_of(seed: int, count: int, num_experts: int = COUNT) -> tuple[FloatArray, FloatArray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(count, WIDTH)).astype(np.float32), random.normal(0, 2, (count, num_experts)).astype(np.float32)


@pytest.mark.spread(0.3)
@BY_LEVEL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_moe_row_is_independent_of_other_rows(kind: str, num_threads: int, level: str, seed: int, large_counts: bool) -> None:
    mlp = replace(PLAIN, expert=replace(PLAIN.expert, bias=True))
    tensors, bounds = make_weights(kind, mlp, seed), {"f32": 1e-4, "bf16": 0.1}
    run = network(kind, mlp, tensors, num_threads=num_threads, level=level)
    x, logits = rows_of(seed, 120 if large_counts else 41)
    (together,) = run(x, logits)
    alone = np.concatenate([run(x[row : row + 1], logits[row : row + 1])[0] for row in range(len(x))])
    assert np.array_equal(together, alone)
    for begin, end in ((0, 2), (2, 7), (7, 40)):
        assert np.array_equal(run(x[begin:end], logits[begin:end])[0], together[begin:end])
    assert np.abs(together - expected(mlp, tensors, x, logits)).max() < bounds.get(kind, 0.3)


@pytest.mark.parametrize("kind", ["int4", "int8", "mxfp4"])
@BY_LEVEL
def test_grouped_expert_weights_accept_unrounded_rows(kind: str, level: str, seed: int) -> None:
    tensors = make_weights(kind, PLAIN, seed)
    run = network(kind, PLAIN, tensors, num_threads=2, level=level, packed=False)
    x, logits = rows_of(seed, 20)
    assert np.abs(run(x, logits)[0] - expected(PLAIN, tensors, x, logits)).max() < 1e-4


ROUTINGS = {
    "one": replace(PLAIN.routing, num_experts_per_token=1),
    "all": replace(PLAIN.routing, num_experts_per_token=COUNT),
    "not normalised": replace(PLAIN.routing, has_normalized_weights=False),
    "scaled": replace(PLAIN.routing, has_expert_scales=True, routed_scaling_factor=1.5),
    "sigmoid": replace(PLAIN.routing, scoring=RouterScoring.SIGMOID, weight_sum_epsilon=1e-20, has_correction_bias=True),
    "plain sigmoid": replace(PLAIN.routing, scoring=RouterScoring.SIGMOID, has_normalized_weights=False, routed_scaling_factor=2.5),
    "groups": ExpertRouting(
        num_experts=40,
        num_experts_per_token=6,
        scoring=RouterScoring.SIGMOID,
        num_expert_groups=5,
        num_selected_groups=2,
        has_correction_bias=True,
        has_normalized_weights=True,
    ),
    "many": ExpertRouting(num_experts=300, num_experts_per_token=8),
}


@pytest.mark.spread(0.3)
@BY_LEVEL
@pytest.mark.parametrize("name", ROUTINGS)
def test_every_moe_routing_method_equals_its_definition(name: str, level: str, seed: int) -> None:
    mlp = replace(PLAIN, routing=ROUTINGS[name])
    tensors = make_weights("f32", mlp, seed)
    run = network("f32", mlp, tensors, num_threads=2, level=level)
    x, logits = rows_of(seed, 13, mlp.routing.num_experts)
    assert np.abs(run(x, logits)[0] - expected(mlp, tensors, x, logits)).max() < 2e-4


@BY_LEVEL
def test_moe_routing_ties_select_the_first_experts(level: str, seed: int) -> None:
    tensors = make_weights("f32", PLAIN, seed)
    x, logits = rows_of(seed, 3)
    logits[0] = 0.5
    logits[1] = np.where(np.arange(COUNT) % 2, 1.0, 0.0)
    logits[2] = -np.inf
    logits[2, 4:] = 1.0
    run = network("f32", PLAIN, tensors, level=level)
    assert np.abs(run(x, logits)[0] - expected(PLAIN, tensors, x, logits)).max() < 1e-4


@BY_LEVEL
def test_nan_router_logits_affect_only_their_row(level: str, seed: int) -> None:
    tensors = make_weights("f32", PLAIN, seed)
    x, logits = rows_of(seed, 9)
    run = network("f32", PLAIN, tensors, num_threads=2, level=level)
    (clean,) = run(x, logits)
    logits[3], logits[5, 2] = np.nan, np.nan
    (mixed,) = run(x, logits)
    assert np.isnan(mixed[3]).all()
    others = [0, 1, 2, 4, 6, 7, 8]
    assert np.array_equal(mixed[others], clean[others])


@BY_LEVEL
def test_clamped_swiglu_experts_equal_their_definition(level: str, seed: int) -> None:
    mlp = replace(PLAIN, expert=DenseMLP(intermediate_size=INNER, activation=ClampedSwiGLU(1.702, 0.7), bias=True))
    tensors = make_weights("f32", mlp, seed)
    x, logits = rows_of(seed, 5)
    assert np.abs(network("f32", mlp, tensors, level=level)(x, logits)[0] - expected(mlp, tensors, x, logits)).max() < 1e-4


@pytest.mark.parametrize("num_rows", [1, 2, 9, 40])
def test_each_selected_expert_is_read_once_per_pass(num_rows: int, seed: int) -> None:
    """Every piece of a matrix that threads take from the list of work is one reading of those outputs."""
    mlp = replace(PLAIN, routing=replace(PLAIN.routing, num_experts=64, num_experts_per_token=2))
    run = network("f32", mlp, make_weights("f32", mlp, seed), num_threads=1)
    x, logits = rows_of(seed, num_rows, 64)
    run(x, logits)
    active = len({expert for row in logits for expert in np.argsort(-row, kind="stable")[:2]})
    operations = run._blocks.operations
    for index, operation in enumerate(operations):
        if isinstance(operation, ExpertsOperation):
            taken = count_claimed_pieces(run.execution, index, 1)
            outputs = operation.matrices[0].outputs
            assert taken == active * operation.num_matrices * -(-outputs // 48)
