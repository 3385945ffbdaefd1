/* The layout of the KV cache. A layer's keys, and its values, are [blocks][kv heads][unit]; a unit has the SLOTS rows of one block and head. Keys
 * are stored column-major, so that a vector holds one column of 16 rows; values row-major. */
#ifndef PACELINE_KV_BLOCKS_H
#define PACELINE_KV_BLOCKS_H

#include "native.h"
#include "vectors.h"

#define SLOTS 32 /* rows of a block */

/* The type of a number. bfloat16 is interleaved in pairs for its dot product: two columns of a key, two rows of values. S8 keys are interleaved in
 * quads of columns; S8 has a float scale for each row, after all codes. */
enum { KV_F32, KV_BF16, KV_F16, KV_S8 };

/* Return the stored columns of a row, padded to whole vectors. */
INLINE int padded_columns(int size) { return (size + LANES - 1) / LANES * LANES; }

INLINE size_t item_bytes(int kind) { return kind == KV_F32 ? 4 : kind == KV_S8 ? 1 : 2; }

/* Return the bytes of a unit. */
INLINE size_t unit_bytes(int kind, int size) {
    return SLOTS * ((size_t)padded_columns(size) * item_bytes(kind) + (kind == KV_S8 ? sizeof(float) : 0));
}

/* Return the scales [SLOTS] of an S8 unit. */
INLINE const float *scales_of(const uint8_t *unit, int size) { return (const float *)(unit + SLOTS * padded_columns(size)); }

/* Return the first unit of a kv head's keys (side 0) or values (side 1); units of consecutive blocks are `block_bytes` apart. */
INLINE uint8_t *kv_base(const Program *program, const AttentionOperation *own, int side, int kv_head) {
    return program->kv_storage[2 * own->layer + side] + (size_t)kv_head * unit_bytes(program->kv_kind, own->head_size);
}

INLINE size_t block_bytes(const Program *program, const AttentionOperation *own) {
    return (size_t)own->kv_heads * unit_bytes(program->kv_kind, own->head_size);
}

/* Return the block table of a range for a layer. */
INLINE const int32_t *table_of(const Pass *pass, const AttentionOperation *own, const Range *range) {
    return pass->block_tables + (size_t)own->tables * (size_t)pass->blocks_per_table_set + range->table;
}

#endif
