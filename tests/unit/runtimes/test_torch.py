"""The torch runtime and its two forms of attention."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoints import VOCAB_SIZE, write_checkpoint
from harness.model_configs import make_config
from paceline.errors import CapacityError, ConfigError
from paceline.kv_cache.cache import BLOCK_SIZE
from paceline.kv_cache.row_plan import tree_mask
from paceline.models.checkpoint import open_weights
from paceline.models.config import WeightType, read_config
from paceline.models.layers import AttentionConfig
from paceline.runtimes.base import Numerics, RowRange, assemble_pass

torch = pytest.importorskip("torch")

from paceline.runtimes.decoder import decoder  # noqa: E402
from paceline.runtimes.torch.attention import PaddedAttention, RangeAttention  # noqa: E402
from paceline.runtimes.torch.network import TorchNetwork  # noqa: E402


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=2)


def open_runtime(
    directory: Path,
    *,
    weight_type: WeightType = WeightType.F32,
    device: str = "cpu",
    collect_layers: Sequence[int] = (),
) -> TorchNetwork:
    config = read_config(directory)
    weights = open_weights(directory, config)
    return TorchNetwork(decoder(config, collect_layers), config, weights, device=device, weight_type=weight_type)


def test_torch_computes_logits_of_requested_rows_only(directory: Path) -> None:
    runtime = open_runtime(directory)
    cache = runtime.new_cache(4)
    plan = cache.reserve_rows(cache.new_sequence(), range(-1, 4))
    output = runtime.forward(*assemble_pass([plan], [[1, 2, 3, 4, 5]], [[]]))
    assert output.logits.shape == (0, VOCAB_SIZE)
    assert output.hidden_states.shape == (5, 64)
    assert output.collected_hidden_states == ()
    assert runtime.num_passes == 1


def random_ranges(seed: int) -> tuple[tuple[RowRange, ...], int]:
    """Paths of many lengths, one with a tree, over random blocks; and the number of blocks."""
    rng = np.random.default_rng(seed)
    free, ranges, start = rng.permutation(np.arange(1, 40)).astype(np.int32), [], 0
    for num_rows, cached_len, mask in [(1, 0, None), (5, 62, None), (1, 95, None), (7, 30, tree_mask([-1, 0, 0, 1, 1, 2, 3]))]:
        num_blocks = -(-(cached_len + num_rows) // BLOCK_SIZE)
        table, free = free[:num_blocks], free[num_blocks:]
        ranges.append(RowRange(start, num_rows, cached_len, table, mask))
        start += num_rows
    return tuple(ranges), 40


def attention_over(window: int | None) -> AttentionConfig:
    return make_config(attention={"window": window}).attention


def attend(
    form: type[RangeAttention] | type[PaddedAttention], device: str, seed: int, dtype: "torch.dtype", window: int | None = None
) -> "torch.Tensor":
    ranges, num_blocks = random_ranges(seed)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(rows.num_rows for rows in ranges), 4, 16, generator=generator)
    keys, values = torch.randn(2, num_blocks, 2, BLOCK_SIZE, 16, generator=generator)
    attention = form(ranges, BLOCK_SIZE, torch.device(device))
    return attention(*(part.to(device=device, dtype=dtype) for part in (q, keys, values)), attention_over(window)).float().cpu()


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("offset", range(3))
def test_torch_padded_attention_equals_plain_attention(seed: int, offset: int, window: int | None) -> None:
    plain = attend(RangeAttention, "cpu", seed + offset, torch.float32, window)
    padded = attend(PaddedAttention, "cpu", seed + offset, torch.float32, window)
    torch.testing.assert_close(padded, plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_torch_plain_attention_equals_its_definition(seed: int, window: int | None) -> None:
    ranges, _ = random_ranges(seed)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(14, 4, 16, generator=generator)
    keys, values = torch.randn(2, 40, 2, BLOCK_SIZE, 16, generator=generator)
    found = RangeAttention(ranges, BLOCK_SIZE, torch.device("cpu"))(q, keys, values, attention_over(window))
    for rows in ranges:
        for index in range(rows.num_rows):
            own = [index >= other if rows.mask is None else bool(rows.mask[index, other]) for other in range(rows.num_rows)]
            slots = [*range(rows.cached_len), *(rows.cached_len + other for other in range(rows.num_rows) if own[other])]
            slots = slots if window is None else slots[-window:]
            for head in range(4):
                where = [(int(rows.block_table[slot // BLOCK_SIZE]), head // 2, slot % BLOCK_SIZE) for slot in slots]
                key, value = torch.stack([keys[at] for at in where]), torch.stack([values[at] for at in where])
                weights = torch.softmax(key @ q[rows.start + index, head] / 4.0, dim=0)
                torch.testing.assert_close(found[rows.start + index, head], weights @ value, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_torch_padded_attention_on_cuda_equals_plain_on_the_cpu(seed: int, dtype: str, bound: float) -> None:
    plain = attend(RangeAttention, "cpu", seed, torch.float32)
    padded = attend(PaddedAttention, "cuda", seed, getattr(torch, dtype))
    torch.testing.assert_close(padded, plain, atol=bound, rtol=0)


@pytest.mark.gpu
def test_torch_prompt_logits_on_cuda_equal_those_on_the_cpu(directory: Path) -> None:
    outputs = []
    for device in ("cpu", "cuda"):
        runtime = open_runtime(directory, device=device)
        cache = runtime.new_cache(8)
        plan = cache.reserve_rows(cache.new_sequence(), range(-1, 49))
        outputs.append(runtime.forward(*assemble_pass([plan], [list(range(50))], [list(range(50))])).logits)
    assert np.abs(outputs[0] - outputs[1]).max() <= 1e-3


def test_layer_boundary_after_the_last_layer_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="from 0 to 2"):
        open_runtime(directory, collect_layers=(3,))


def test_torch_kv_cache_larger_than_memory_is_a_capacity_error(directory: Path) -> None:
    runtime = open_runtime(directory)
    with pytest.raises(CapacityError, match="cannot be allocated"):
        runtime.new_cache(2**40)


def test_torch_runtime_has_fast_numerics(directory: Path) -> None:
    assert open_runtime(directory).capabilities.numerics is Numerics.FAST
