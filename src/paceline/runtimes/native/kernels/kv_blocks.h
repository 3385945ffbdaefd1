/* The layout of the KV cache, and int8 quantisation of cached rows and queries. The keys of a layer, and its values, are [blocks][kv heads][head
 * block]: a head block holds the BLOCK_SLOTS rows of one KV head in one block. Keys are column-major (a vector has one column of 16 rows), values
 * row-major. */
#ifndef PACELINE_KV_BLOCKS_H
#define PACELINE_KV_BLOCKS_H

#include "native.h"
#include "softmax.h"

#define BLOCK_SLOTS 32 /* rows (token positions) of a cache block */

/* Data type of cached keys and values. bfloat16 is interleaved in pairs for dot_bf16: two columns of keys, two rows of values. S8 (int8) keys are
 * interleaved in quads of columns for dot_bytes; an S8 head block ends with a float scale for each row. */
enum { KV_F32, KV_BF16, KV_F16, KV_S8 };

/* Return the number of columns in a stored row: the head size, rounded up to whole vectors. */
INLINE int padded_columns(int head_size) { return (head_size + LANES - 1) / LANES * LANES; }

INLINE size_t item_bytes(int kind) { return kind == KV_F32 ? 4 : kind == KV_S8 ? 1 : 2; }

INLINE size_t head_block_bytes(int kind, int head_size) {
    return BLOCK_SLOTS * ((size_t)padded_columns(head_size) * item_bytes(kind) + (kind == KV_S8 ? sizeof(float) : 0));
}

/* Return the row scales [BLOCK_SLOTS] of an S8 head block. */
INLINE const float *int8_row_scales(const uint8_t *head_block, int head_size) { return (const float *)(head_block + BLOCK_SLOTS * padded_columns(head_size)); }

/* Return the head block of a KV head's keys (or values) in block 0 of the cache. Those of consecutive blocks are block_bytes apart. */
INLINE uint8_t *first_head_block(const Program *program, const AttentionOperation *op, int is_value, int kv_head) {
    return program->kv_storage[2 * op->layer + is_value] + (size_t)kv_head * head_block_bytes(program->kv_kind, op->head_size);
}

INLINE size_t block_bytes(const Program *program, const AttentionOperation *op) {
    return (size_t)op->kv_heads * head_block_bytes(program->kv_kind, op->head_size);
}

/* Return the block table of a range for the operation's layer. */
INLINE const int32_t *block_table_of(const Pass *pass, const AttentionOperation *op, const Range *range) {
    return pass->block_tables + (size_t)op->block_table_set * (size_t)pass->blocks_per_table_set + range->table_offset;
}

/* Return the int8 scale of a row: max |x| / 127; NaN if a value is not finite. */
INLINE float int8_row_scale(const float *x, int head_size) {
    floats maxima = broadcast(0.0f), zero_or_nan = broadcast(0.0f);
    EACH_16(column, count, head_size) {
        const floats v = load_part(x + column, count);
        maxima = maximum((floats)((words)v & 0x7FFFFFFFu), maxima);
        zero_or_nan += v - v;
    }
    return largest_lane(maxima) / 127.0f + lane_sum(zero_or_nan);
}

/* Return the int8 codes of up to 16 values, padded with zeros; all zero if the scale is 0 or NaN. */
INLINE ints to_int8_codes(const float *x, int count, float scale) {
    const floats v = scale > 0.0f ? load_part(x, count) / broadcast(scale) : broadcast(0.0f);
    return __builtin_convertvector(__builtin_elementwise_roundeven(v), ints);
}

#endif
