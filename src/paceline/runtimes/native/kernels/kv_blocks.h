/* The layout of the KV cache, and how a row is quantised to int8 with one scale, for int8 caches and the queries multiplied with them. The
 * keys of a layer, and its values, are [blocks][kv heads][head block]: a head block holds the SLOTS rows of one kv head in one block. Keys are
 * column-major, so that a vector has one column of 16 rows. Values are row-major. */
#ifndef PACELINE_KV_BLOCKS_H
#define PACELINE_KV_BLOCKS_H

#include "native.h"
#include "softmax.h"

#define SLOTS 32 /* rows of a block */

/* The type of the cached numbers. bfloat16 is interleaved in pairs for dot_bf16: two columns of keys, two rows of values. S8 (int8) keys are
 * interleaved in quads of columns for dot_bytes; an S8 head block ends with a float scale for each row. */
enum { KV_F32, KV_BF16, KV_F16, KV_S8 };

/* Return the columns of a stored row: the head size, rounded up to whole vectors. */
INLINE int padded_columns(int size) { return (size + LANES - 1) / LANES * LANES; }

INLINE size_t item_bytes(int kind) { return kind == KV_F32 ? 4 : kind == KV_S8 ? 1 : 2; }

INLINE size_t head_block_bytes(int kind, int size) {
    return SLOTS * ((size_t)padded_columns(size) * item_bytes(kind) + (kind == KV_S8 ? sizeof(float) : 0));
}

/* Return the scales [SLOTS] of an S8 head block. */
INLINE const float *scales_of(const uint8_t *head_block, int size) { return (const float *)(head_block + SLOTS * padded_columns(size)); }

/* Return the first head block of a kv head's keys (side 0) or values (side 1); that of the next block is `block_bytes` later. */
INLINE uint8_t *kv_base(const Program *program, const AttentionOperation *op, int side, int kv_head) {
    return program->kv_storage[2 * op->layer + side] + (size_t)kv_head * head_block_bytes(program->kv_kind, op->head_size);
}

INLINE size_t block_bytes(const Program *program, const AttentionOperation *op) {
    return (size_t)op->kv_heads * head_block_bytes(program->kv_kind, op->head_size);
}

/* Return the block table of a range for the operation's layer. */
INLINE const int32_t *block_table_of(const Pass *pass, const AttentionOperation *op, const Range *range) {
    return pass->block_tables + (size_t)op->tables * (size_t)pass->blocks_per_table_set + range->table;
}

/* Return the scale of a row: max |x| / 127; NaN if a value is not finite. */
INLINE float scale_of_row(const float *x, int size) {
    floats most = broadcast(0.0f), zero_or_nan = broadcast(0.0f);
    EACH_16(column, count, size) {
        const floats v = load_part(x + column, count);
        most = maximum((floats)((words)v & 0x7FFFFFFFu), most);
        zero_or_nan += v - v;
    }
    return largest_lane(most) / 127.0f + lane_sum(zero_or_nan);
}

/* Return the codes of up to 16 values, padded with zeros; all zero if the scale is 0 or NaN. */
INLINE ints codes_of(const float *x, int count, float scale) {
    const floats v = scale > 0.0f ? load_part(x, count) / broadcast(scale) : broadcast(0.0f);
    return __builtin_convertvector(__builtin_elementwise_roundeven(v), ints);
}

#endif
