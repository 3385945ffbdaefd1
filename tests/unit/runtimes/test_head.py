"""Heads: the same numbers with our kernels and torch, one cache for several networks, and masked slots."""

from collections.abc import Mapping

import numpy as np
import pytest

from harness.model_configs import make_config
from harness.native_network import plain_tensor
from paceline.errors import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.layers import Activation, BlockConvolution
from paceline.models.tensor_names import tensor_shapes
from paceline.models.weights import Weights
from paceline.runtimes.base import FloatArray, ForwardBatch, LogitsRows, Network, RowRange
from paceline.runtimes.decoder import Ops, Value, decoder, decoder_layer
from paceline.runtimes.load import load_head
from paceline.runtimes.logits_summary import SAMPLING_DTYPE, SummaryOptions
from paceline.runtimes.native.library import kernels_path
from paceline.sampling.draw import Distribution, draw
from paceline.sampling.noise import Purpose, noise_key

CONFIG = make_config(hidden_size=48)
WIDTH = CONFIG.hidden_size
BACKENDS = ["native", "torch"]


def network(ops: Ops[Value]) -> Mapping[str, Value]:
    """Two inputs side by side, a product, a residual activation, a decoder layer, and a head over the selected rows."""
    joined = ops.concat(ops.input("left", WIDTH), ops.input("right", 20), ops.input("left", WIDTH))
    (mixed,) = ops.linear(joined, "mix")
    (pushed,) = ops.linear(mixed, "push")
    out = decoder_layer(ops, CONFIG.layers[0], ops.add(mixed, ops.activated(pushed, Activation.SILU)), 0)
    selected = ops.logits_rows(out)
    return {
        "out": out,
        "logits": ops.lm_head(ops.add(selected, ops.activated(selected, Activation.SILU)), "lm_head"),
        "mixed": mixed,
    }


def push(ops: Ops[Value]) -> Mapping[str, Value]:
    return {"pushed": ops.linear(ops.input("right", WIDTH), "push")[0]}


def weights(seed: int = 0) -> Weights:
    random = np.random.default_rng(seed)
    query, kv, inner = CONFIG.attention.query_size, CONFIG.attention.kv_size, CONFIG.layers[0].mlp.intermediate_size
    shapes = {
        "mix": (WIDTH, 2 * WIDTH + 20), "push": (WIDTH, WIDTH), "lm_head": (33, WIDTH), "layers.0.q_proj": (query, WIDTH),
        "layers.0.k_proj": (kv, WIDTH), "layers.0.v_proj": (kv, WIDTH), "layers.0.o_proj": (WIDTH, query),
        "layers.0.gate_proj": (inner, WIDTH), "layers.0.up_proj": (inner, WIDTH), "layers.0.down_proj": (WIDTH, inner),
    }  # fmt: skip
    tensors = {f"{name}.weight": random.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    tensors |= {f"layers.0.{name}.weight": random.uniform(0.5, 1.5, WIDTH).astype(np.float32) for name in ("attention_norm", "mlp_norm")}
    tensors["mix.bias"] = random.normal(0, 0.2, WIDTH).astype(np.float32)
    return Weights({name: plain_tensor(values) for name, values in tensors.items()})


def open_network(backend: str, config: ModelConfig = CONFIG, *, num_threads: int = 2, num_blocks: int = 8) -> Network:
    if backend == "native" and kernels_path() is None:
        pytest.skip("no native kernels for this machine")
    head = load_head(network, config, weights(), num_threads=num_threads, max_model_len=512, backend=backend)
    head.new_cache(num_blocks)
    return head


def batch_of(
    *ranges: RowRange, positions: list[int] | None = None, logits_rows: list[int] | None = None
) -> tuple[ForwardBatch, LogitsRows]:
    num_rows = sum(item.num_rows for item in ranges)
    where = np.concatenate([np.arange(item.cached_len, item.cached_len + item.num_rows) for item in ranges])
    at = np.array(where if positions is None else positions, np.int32)
    wanted = np.array(range(num_rows) if logits_rows is None else logits_rows, np.int32)
    return ForwardBatch(at, ranges), LogitsRows(wanted)


def rows(count: int, seed: int = 1) -> dict[str, FloatArray]:
    random = np.random.default_rng(seed)
    return {"left": random.normal(0, 1, (count, WIDTH)).astype(np.float32), "right": random.normal(0, 1, (count, 20)).astype(np.float32)}


def run(head: Network, inputs: Mapping[str, FloatArray], batch: tuple[ForwardBatch, LogitsRows]) -> dict[str, FloatArray]:
    return {name: result.copy() for name, result in head.forward(inputs, *batch).results.items()}


def table(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def part(inputs: Mapping[str, FloatArray], first: int, last: int) -> dict[str, FloatArray]:
    return {name: values[first:last] for name, values in inputs.items()}


def test_native_and_torch_head_networks_compute_equal_outputs() -> None:
    tree = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)
    found = []
    for backend in BACKENDS:
        head = open_network(backend)
        first = run(head, rows(40), batch_of(RowRange(0, 37, 0, table(1, 2)), RowRange(37, 3, 0, table(4))))
        then = batch_of(RowRange(0, 3, 37, table(1, 2), tree), RowRange(3, 1, 3, table(4)), positions=[37, 38, 38, 3], logits_rows=[3, 1])
        found.append((first, run(head, rows(4, seed=2), then)))
    for native, reference in zip(*found, strict=True):
        assert native.keys() == reference.keys() == {"out", "logits", "mixed"}
        for name in native:
            np.testing.assert_allclose(native[name], reference[name], atol=2e-5)
    assert found[0][1]["logits"].shape == (2, 33)


@pytest.mark.parametrize("backend", BACKENDS)
def test_head_pass_split_into_pieces_equals_the_whole_pass(backend: str) -> None:
    head = open_network(backend)
    inputs = rows(50)
    whole = run(head, inputs, batch_of(RowRange(0, 50, 0, table(3, 5))))
    for first, last in ((0, 31), (31, 33), (33, 34), (34, 50)):
        piece = run(head, part(inputs, first, last), batch_of(RowRange(0, last - first, first, table(1, 2))))
        np.testing.assert_allclose(piece["out"], whole["out"][first:last], atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hidden", [1, 31, 32, 33, 40])
def test_head_rows_before_first_slot_are_masked(backend: str, hidden: int) -> None:
    """Rows that see slots from `hidden` on compute what they would if the text began there; rotary positions are relative."""
    head = open_network(backend)
    inputs = rows(60)
    alone = run(head, part(inputs, hidden, 60), batch_of(RowRange(0, 60 - hidden, 0, table(5, 6))))
    run(head, part(inputs, 0, hidden), batch_of(RowRange(0, hidden, 0, table(1, 2))))
    behind = run(head, part(inputs, hidden, 60), batch_of(RowRange(0, 60 - hidden, hidden, table(1, 2), None, hidden)))
    np.testing.assert_allclose(behind["out"], alone["out"], atol=2e-5)
    seen = run(head, part(inputs, hidden, 60), batch_of(RowRange(0, 60 - hidden, hidden, table(1, 2))))
    assert np.abs(seen["out"] - alone["out"]).max() > 1e-2
    masked = RowRange(0, 60 - hidden, hidden, table(1, 2), np.tri(60 - hidden, dtype=np.bool_), hidden)
    np.testing.assert_allclose(run(head, part(inputs, hidden, 60), batch_of(masked))["out"], alone["out"], atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sibling_head_networks_share_weights_and_cache(backend: str) -> None:
    head = open_network(backend)
    twin, other = head.network_with_same_weights(network), head.network_with_same_weights(push)
    inputs = rows(20)
    whole = run(head, inputs, batch_of(RowRange(0, 20, 0, table(1))))
    behind = run(twin, part(inputs, 12, 20), batch_of(RowRange(0, 8, 12, table(1))))
    np.testing.assert_allclose(behind["out"], whole["out"][12:], atol=1e-5)
    twin.new_cache(4)
    run(twin, part(inputs, 0, 12), batch_of(RowRange(0, 12, 0, table(2))))
    np.testing.assert_allclose(run(head, part(inputs, 12, 20), batch_of(RowRange(0, 8, 12, table(2))))["out"], whole["out"][12:], atol=1e-5)
    nothing = ForwardBatch(np.zeros(3, np.int32), ()), LogitsRows(np.zeros(0, np.int32))
    given = np.random.default_rng(3).normal(0, 1, (3, WIDTH)).astype(np.float32)
    matrix = weights()["push.weight"].array
    np.testing.assert_allclose(other.forward({"right": given}, *nothing).results["pushed"], given @ matrix.T, atol=1e-5)
    assert head.num_passes == 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_head_ranking_equals_the_ranking_of_its_logits(backend: str, seed: int) -> None:
    """The best few, the sum of all, and the token that noise draws, with the logits and in their place."""
    if backend == "native" and kernels_path() is None:
        pytest.skip("no native kernels for this machine")
    config, random = make_config(num_layers=2, tied_embeddings=True, logit_soft_cap=5.0), np.random.default_rng(seed)
    tensors = {name: plain_tensor(random.normal(0, 0.3, shape).astype(np.float32)) for name, shape in tensor_shapes(config).items()}
    target = load_head(decoder(config), config, Weights(tensors), num_threads=2, max_model_len=64, backend=backend)
    target.new_cache(4)
    inputs = {"token_ids": random.integers(0, config.vocab_size, 20).astype(np.int32)}
    batch, wanted = batch_of(RowRange(0, 20, 0, table(1)), logits_rows=[19, 3, 4])
    keys = [noise_key(seed, 0, position, Purpose.TOKEN) for position in (20, 4, 5)]
    draws = np.array([[(key, 0.8, 0) for key in keys]], SAMPLING_DTYPE)
    logits = target.forward(inputs, batch, wanted).logits.copy()
    ranking = SummaryOptions(config.vocab_size, 3)
    for _ in range(2):
        found = target.forward(inputs, batch, wanted._replace(summary=ranking, sampling=draws)).summaries
        for row, scores, position in zip(found, logits / np.float32(0.8), (20, 4, 5), strict=True):
            assert row.token_ids == np.argsort(-scores, kind="stable")[:3].tolist()
            np.testing.assert_allclose(row.log_sum_exp, np.log(np.exp(scores.astype(np.float64)).sum()), rtol=1e-5)
            assert row.sampled_id == draw(Distribution(scores, None, greedy=False), seed, 0, position)
        assert np.array_equal(target.forward(inputs, batch, wanted).logits, logits)
    assert target.num_passes == 5


def test_unknown_head_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="'onnx'"):
        load_head(network, CONFIG, weights(), num_threads=1, max_model_len=8, backend="onnx")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("width", "group", "size"), [(40, 5, 3), (1040, 16, 2), (48, 48, 4), (33, 1, 1)])
def test_block_convolution_does_not_mix_rows_of_two_ranges(width: int, group: int, size: int, backend: str) -> None:
    """Two ranges of 7 rows and of 2, on widths that fill no vector and on several pieces."""
    if backend == "native" and kernels_path() is None:
        pytest.skip("no native kernels for this machine")
    convolution, random = BlockConvolution(kernel_size=size, group_size=group), np.random.default_rng(3)
    groups, base = width // group, random.normal(size=(2, size, width)).astype(np.float32)

    def convolve(ops: Ops[Value]) -> Mapping[str, Value]:
        x, added = ops.input("x", width), ops.input("added", 2 * size * groups)
        return {f"side {side}": ops.block_convolution(x, added, convolution, "base", side) for side in (0, 1)}

    held = Weights({"base.weight": plain_tensor(base.reshape(-1))})
    head = load_head(convolve, CONFIG, held, num_threads=3, max_model_len=64, backend=backend)
    head.new_cache(8)
    x = random.normal(size=(9, width)).astype(np.float32)
    added = random.normal(size=(9, 2, size, groups)).astype(np.float32)
    found = run(head, {"x": x, "added": added.reshape(9, -1)}, batch_of(RowRange(0, 7, 3, table(1)), RowRange(7, 2, 0, table(2))))
    for side in (0, 1):
        expected = np.zeros((9, width))
        for row in range(9):
            for tap in range(min(size, (row if row < 7 else row - 7) + 1)):
                expected[row] += (base[side, tap] + np.repeat(added[row, side, tap], group)) * x[row - tap]
        np.testing.assert_allclose(found[f"side {side}"], expected, atol=1e-5)
