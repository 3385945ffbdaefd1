/* How keys and values lie in the cache. A layer's keys, and its values, are [blocks][kv heads][unit]; a unit holds the rows of one block
 * and head. Keys stand column by column, a column of all slots beside the next, so that a vector holds as many rows. */
#ifndef PACELINE_KV_BLOCKS_H
#define PACELINE_KV_BLOCKS_H

#include "native.h"
#include "vectors.h"

#define SLOTS 32 /* rows of a block */

/* How one number is stored. Bfloat16 lies in pairs, as its products take them: of two columns of a key, of two rows of values. S8 lies in
 * quads of columns of a key; it has a scale a row, which lie behind the codes of all rows. */
enum { KV_F32, KV_BF16, KV_F16, KV_S8 };

/* Columns of a row as it is stored: whole vectors. */
INLINE int padded_columns(int size) { return (size + LANES - 1) / LANES * LANES; }

INLINE size_t item_bytes(int kind) { return kind == KV_F32 ? 4 : kind == KV_S8 ? 1 : 2; }

/* Bytes of a unit. */
INLINE size_t unit_bytes(int kind, int size) {
    return SLOTS * ((size_t)padded_columns(size) * item_bytes(kind) + (kind == KV_S8 ? sizeof(float) : 0));
}

/* The scales [SLOTS] of a unit of S8. */
INLINE const float *scales_of(const uint8_t *unit, int size) { return (const float *)(unit + SLOTS * padded_columns(size)); }

/* Where the keys (side 0) or values (side 1) of a kv head begin; those of a block lie `block_bytes` behind those of the one before. */
INLINE uint8_t *side_of(const Program *program, const AttentionOperation *own, int side, int kv_head) {
    return program->planes[2 * own->layer + side] + (size_t)kv_head * unit_bytes(program->kv_kind, own->head_size);
}

INLINE size_t block_bytes(const Program *program, const AttentionOperation *own) {
    return (size_t)own->kv_heads * unit_bytes(program->kv_kind, own->head_size);
}

/* The blocks of a range's sequence in the memory of a layer. */
INLINE const int32_t *table_of(const Pass *pass, const AttentionOperation *own, const Range *range) {
    return pass->block_tables + (size_t)own->tables * (size_t)pass->blocks_of_tables + range->table;
}

#endif
