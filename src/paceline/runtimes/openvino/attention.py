"""Everything experimental about OpenVINO's PagedAttention: its 28 inputs, its lone-row kernel and how rows are repeated for it.

The op takes another kernel for a sequence that brings one row, and its bits differ. Repeating the lone row just in front of
the op and dropping the repetition right after keeps every row's bits independent of what else is in the pass, while all matrix
products still see the row once. The repetition writes one slot past the row; where no block of the sequence covers that slot
it goes to the scratch block, which nobody reads.
"""

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension as PagedAttention

from paceline.kv_cache.block_pool import SCRATCH_BLOCK
from paceline.kv_cache.paged import BLOCK_SIZE
from paceline.runtimes.base import ForwardBatch

IntArray = NDArray[np.int32]


# Graph inputs beside tokens, rotary tables and caches: name -> (element type, rank).
ATTENTION_INPUTS: dict[str, tuple[ov.Type, int]] = {
    "past_lens": (ov.Type.i32, 1),
    "subsequence_begins": (ov.Type.i32, 1),
    "block_indices": (ov.Type.i32, 1),
    "block_indices_begins": (ov.Type.i32, 1),
    "max_context_len": (ov.Type.i32, 0),
    "qq_bias": (ov.Type.u8, 1),
    "qq_bias_begins": (ov.Type.i32, 1),
    "attention_rows": (ov.Type.i32, 1),  # row of the network each row of the attention op is
    "row_of_attention": (ov.Type.i32, 1),  # first attention row of each network row
}


def attention_inputs(batch: ForwardBatch, *, repeat_lone_rows: bool) -> dict[str, np.ndarray]:
    """Values of `ATTENTION_INPUTS` for one pass: who is which sequence, what is cached where, which lone rows are repeated."""
    rows: list[IntArray] = []
    first_of_range: list[IntArray] = []
    begins, block_begins, blocks, past_lens = [0], [0], [], []
    masks: list[NDArray[np.uint8]] = []
    mask_begins = [0]
    has_mask = any(item.mask is not None for item in batch.ranges)
    longest = 0
    for item in batch.ranges:
        repeated = repeat_lone_rows and item.num_rows == 1
        count = 2 if repeated else item.num_rows
        row_ids = np.arange(item.start, item.start + item.num_rows, dtype=np.int32)
        rows.append(np.repeat(row_ids, 2) if repeated else row_ids)
        first_of_range.append(np.arange(begins[-1], begins[-1] + item.num_rows, dtype=np.int32))
        begins.append(begins[-1] + count)
        context_len = item.cached_len + count
        longest = max(longest, context_len)
        needed = -(-context_len // BLOCK_SIZE)
        table = item.block_table[:needed]
        if len(table) < needed:
            table = np.append(table, np.int32(SCRATCH_BLOCK))
        blocks.append(table)
        block_begins.append(block_begins[-1] + needed)
        past_lens.append(item.cached_len)
        if has_mask:
            mask = np.tril(np.ones((count, count), np.uint8)) if item.mask is None else item.mask.astype(np.uint8)
            masks.append(mask.reshape(-1))
            mask_begins.append(mask_begins[-1] + mask.size)
    empty = np.zeros(0, np.int32)
    return {
        "past_lens": np.array(past_lens, np.int32),
        "subsequence_begins": np.array(begins, np.int32),
        "block_indices": np.concatenate(blocks),
        "block_indices_begins": np.array(block_begins, np.int32),
        "max_context_len": np.array(longest, np.int32),
        "qq_bias": np.concatenate(masks) if has_mask else np.zeros(0, np.uint8),
        "qq_bias_begins": np.array(mask_begins, np.int32) if has_mask else empty,
        "attention_rows": np.concatenate(rows),
        "row_of_attention": np.concatenate(first_of_range),
    }


def paged_attention(
    rows: tuple[ov.Output, ov.Output, ov.Output],
    caches: tuple[ov.Output, ov.Output],
    inputs: dict[str, ov.Output],
    num_kv_heads: int,
    head_size: int,
    score_scale: float,
) -> ov.Output:
    """Write k and v [T', K * D] of `rows` (q, k, v) into the caches and attend q [T', H * D]; T' counts repeated lone rows."""
    no_ints = ops.constant(np.zeros(0, np.int32)).output(0)
    no_floats = ops.constant(np.zeros(0, np.float32)).output(0)
    zero = ops.constant(np.int32(0)).output(0)
    scale = ops.constant(np.float32(score_scale)).output(0)
    node = PagedAttention(
        [
            *rows, *caches,
            inputs["past_lens"], inputs["subsequence_begins"], inputs["block_indices"], inputs["block_indices_begins"],
            scale,
            zero,  # sliding window: none
            no_floats,  # alibi slopes
            inputs["max_context_len"],
            no_ints,  # score aggregation window
            no_ints, no_ints, no_floats,  # rotated block indices, rotation deltas, rotation table
            no_floats, zero, zero,  # xattention threshold, block size, stride
            no_floats,  # sinks
            zero, no_ints, no_ints, no_ints,  # adaptive eviction: start size, evictable sizes, diversity block sets and begins
            no_ints,  # token types
            inputs["qq_bias"], inputs["qq_bias_begins"],
        ]
    )  # fmt: skip
    info = node.get_rt_info()
    info["num_k_heads"] = info["num_v_heads"] = num_kv_heads
    info["k_head_size"] = info["v_head_size"] = head_size
    return node.output(0)
