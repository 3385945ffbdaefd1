"""Attention with capped scores is its definition, in the plain form and in the batched one."""

from dataclasses import replace

import numpy as np
import pytest

from harness.model_configs import make_config
from paceline.runtimes.base import RowRange

torch = pytest.importorskip("torch")

from paceline.runtimes.torch.attention import PaddedAttention, PlainAttention  # noqa: E402

BLOCK_SIZE = 4
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 8
CAPPED = make_config(attention={"scale": 0.7, "soft_cap": 3.0}).attention


@pytest.mark.parametrize("form", [PlainAttention, PaddedAttention])
def test_capped_attention_is_its_definition(form: type[PlainAttention] | type[PaddedAttention], seed: int) -> None:
    tree = np.tril(np.ones((3, 3), np.bool_))
    tree[2, 1] = False
    ranges = (
        RowRange(0, 3, 5, np.array([2, 1], np.int32), tree),
        RowRange(3, 1, 0, np.array([4], np.int32)),
        RowRange(4, 2, 3, np.array([3, 0], np.int32)),
    )
    generator = torch.Generator().manual_seed(seed)
    q = 3 * torch.randn(6, NUM_HEADS, HEAD_SIZE, generator=generator)
    keys, values = torch.randn(2, 5, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE, generator=generator)
    found = form(ranges, BLOCK_SIZE, torch.device("cpu"))(q, keys, values, CAPPED)
    uncapped = form(ranges, BLOCK_SIZE, torch.device("cpu"))(q, keys, values, replace(CAPPED, soft_cap=None))
    assert (found - uncapped).abs().max() > 0.1
    for rows in ranges:
        for index in range(rows.num_rows):
            own = [other for other in range(rows.num_rows) if (index >= other if rows.mask is None else rows.mask[index, other])]
            slots = [*range(rows.cached_len), *(rows.cached_len + other for other in own)]
            for head in range(NUM_HEADS):
                where = [(int(rows.block_table[slot // BLOCK_SIZE]), head // 2, slot % BLOCK_SIZE) for slot in slots]
                scores = 0.7 * torch.stack([keys[at] for at in where]) @ q[rows.start + index, head]
                weights = torch.softmax(3.0 * torch.tanh(scores / 3.0), dim=0)
                expected = weights @ torch.stack([values[at] for at in where])
                torch.testing.assert_close(found[rows.start + index, head], expected, atol=1e-5, rtol=0)
