/* Products of queries with the keys of a cache block, and of softmax weights with its values. A score is a sum over ascending columns in one lane;
 * a weighted sum of values runs over ascending positions. So neither depends on the other queries. */
#ifndef PACELINE_ATTENTION_TILES_H
#define PACELINE_ATTENTION_TILES_H

#include "byte_dot.h"
#include "kv_blocks.h"

/* Sizes of tiles whose sums stay in registers. KEY_QUERIES: queries for which keys are loaded once. A tile of values has VALUE_QUERIES queries and
 * VALUE_VECTORS vectors of columns. */
#ifdef __AVX512F__
#define KEY_QUERIES 8
#define VALUE_QUERIES 4
#define VALUE_VECTORS 4
#else
#define KEY_QUERIES 2
#define VALUE_QUERIES 2
#define VALUE_VECTORS 2
#endif
#define EACH_QUERY _Pragma("unroll") for (int query = 0; query < queries; query++)
#define EACH_HALF _Pragma("unroll") for (int half = 0; half < 2; half++)
#define EACH_VALUE_VECTOR _Pragma("unroll") for (int vector = 0; vector < num_vectors; vector++)

/* Load 16 cached numbers as float32. int8 numbers are not multiplied by their scale; bfloat16 is not supported. */
INLINE floats load_cached(const int kind, const uint8_t *from) {
    if (kind == KV_F32) return load((const float *)from);
    if (kind == KV_F16) {
        halfs v;
        memcpy(&v, from, sizeof v);
        return __builtin_convertvector(v, floats);
    }
    signed_bytes v;
    memcpy(&v, from, sizeof v);
    return __builtin_convertvector(__builtin_convertvector(v, ints), floats);
}

/* Prefetching spread over the steps of tiles: bytes [next_l2, end_l2) of the next head block from memory to the second-level cache, and as many
 * bytes, from next_l1 on, of the head block prefetched before it to the first-level cache. */
typedef struct {
    const uint8_t *next_l2, *end_l2, *next_l1;
    int lines; /* cache lines to prefetch at each step */
} Prefetch;

#define CACHE_LINE_BYTES 64

/* Spread the prefetch of head block next[0], of `bytes` bytes, over `tiles` tiles of `steps` steps. next NULL = prefetch nothing. */
INLINE Prefetch make_prefetch(const uint8_t *const *next, size_t bytes, int tiles, int steps) {
    if (!next) return (Prefetch){0};
    return (Prefetch){next[0], next[0] + bytes, next[-1], ((int)(bytes / CACHE_LINE_BYTES) + tiles * steps - 1) / (tiles * steps)};
}

INLINE void prefetch_step(Prefetch *prefetch) {
    for (int i = 0; i < prefetch->lines && prefetch->next_l2 < prefetch->end_l2;
         i++, prefetch->next_l2 += CACHE_LINE_BYTES, prefetch->next_l1 += CACHE_LINE_BYTES) {
        __builtin_prefetch(prefetch->next_l2, 0, 2);
        __builtin_prefetch(prefetch->next_l1, 0, 3);
    }
}

/* Return the number of steps in which a tile multiplies a block of keys. */
INLINE int score_tile_steps(const int kind, int size) { return kind == KV_S8 ? (size + 3) / 4 : kind == KV_BF16 ? (size + 1) / 2 : size; }

/* Index in a packed query at which pack_int8_query stores the scale, and the sum of the codes. */
#define SCALE_OF_QUERY(padded) ((padded) - 2)
#define SUM_OF_QUERY(padded) ((padded) - 1)

/* As score_tile, for an int8 block: integer products, times the scales of query and key. */
INLINE void score_int8_tile(const uint8_t *keys, Prefetch *prefetch, const float *q, int size, float *scores, int row_stride,
                            const int queries) {
    const int padded = padded_columns(size);
    const int32_t *packed = (const int32_t *)q;
    ints sum[KEY_QUERIES][2];
    EACH_QUERY EACH_HALF sum[query][half] = broadcast_int((DOT_SHIFT - 128) * packed[query * padded + SUM_OF_QUERY(padded)]);
    for (int quad = 0; 4 * quad < size; quad++) {
        weight_codes k[2];
        EACH_HALF k[half] = to_weight_codes(load_words(keys + (size_t)(2 * quad + half) * sizeof(words)), 128 ^ DOT_SHIFT);
        EACH_QUERY EACH_HALF sum[query][half] = dot_bytes(k[half], packed + query * padded + quad * DOT_WORDS, sum[query][half]);
        prefetch_step(prefetch);
    }
    EACH_QUERY EACH_HALF {
        const floats scale = load(int8_row_scales(keys, size) + half * LANES) * broadcast(q[query * padded + SCALE_OF_QUERY(padded)]);
        store(scores + query * row_stride + half * LANES, __builtin_convertvector(sum[query][half], floats) * scale);
    }
}

/* Set scores[query][slot] to the dot product of q[query] and keys[slot], for all slots of a block. */
INLINE void score_tile(const int kind, const uint8_t *keys, Prefetch *prefetch, const float *q, int size, float *scores, int row_stride,
                       const int queries) {
    const int padded = padded_columns(size);
    floats sum[KEY_QUERIES][2];
    if (kind == KV_S8) {
        score_int8_tile(keys, prefetch, q, size, scores, row_stride, queries);
        return;
    }
    EACH_QUERY EACH_HALF sum[query][half] = broadcast(0.0f);
    if (kind == KV_BF16)
        for (int pair = 0; 2 * pair < size; pair++) {
            bf16s k[2];
            EACH_HALF k[half] = unpack_bf16(load_words(keys + (size_t)(2 * pair + half) * 2 * BLOCK_SLOTS));
            EACH_QUERY {
                const bf16s x = broadcast_bf16_pair(q + query * padded + pair * PAIR_FLOATS);
                EACH_HALF sum[query][half] = dot_bf16(k[half], x, sum[query][half]);
            }
            prefetch_step(prefetch);
        }
    else
        for (int column = 0; column < size; column++) {
            floats k[2];
            EACH_HALF k[half] = load_cached(kind, keys + (size_t)(2 * column + half) * LANES * item_bytes(kind));
            EACH_QUERY {
                const floats x = broadcast(q[query * padded + column]);
                EACH_HALF sum[query][half] = fmadd(k[half], x, sum[query][half]);
            }
            prefetch_step(prefetch);
        }
    EACH_QUERY EACH_HALF store(scores + query * row_stride + half * LANES, sum[query][half]);
}

/* Set scores[query][slot] to the dot product of q[query] and the latent in the slot (MLA). Latents are row-major, so each sum has 16 lanes. */
INLINE void score_latent_tile(const int kind, const uint8_t *block, Prefetch *prefetch, const float *q, int padded, float *scores, int row_stride,
                              const int queries) {
    for (int slot = 0; slot < BLOCK_SLOTS; slot += 4) {
        floats sum[LANES] = {0}; /* [VALUE_QUERIES][4 slots] */
        for (int column = 0; column < padded; column += LANES) {
            floats row[4];
            _Pragma("unroll") for (int i = 0; i < 4; i++) {
                const words two = load_words(block + 4 * (size_t)((slot + i) / 2 * padded + column)); /* bfloat16: two interleaved rows */
                row[i] = kind == KV_BF16 ? (floats)(i & 1 ? two & 0xFFFF0000u : two << 16)
                                         : load_cached(kind, block + (size_t)((slot + i) * padded + column) * item_bytes(kind));
            }
            EACH_QUERY {
                const floats x = load(q + query * padded + column);
                _Pragma("unroll") for (int i = 0; i < 4; i++) sum[4 * query + i] = fmadd(row[i], x, sum[4 * query + i]);
            }
            prefetch_step(prefetch);
        }
        const floats totals = lane_sums(sum);
        EACH_QUERY memcpy(scores + query * row_stride + slot, (const float *)&totals + 4 * query, 4 * sizeof(float));
    }
}

/* Values of a KV head: block b of a sequence is at values + table[b] * stride. prefetch_blocks[i] is prefetched during block first_block + i. */
typedef struct {
    const uint8_t *values;
    const uint8_t *const *prefetch_blocks;
    int first_block;
    const int32_t *table;
    size_t stride;
    int padded, columns; /* columns of a stored row; number of them that are read */
} ValueBlocks;

/* Convert an int8 block of values to bfloat16 (lossless), in the layout of bfloat16 blocks. */
INLINE void int8_to_bf16_block(const uint8_t *head_block, int padded, uint8_t *to) {
    for (int pair = 0; pair < BLOCK_SLOTS / 2; pair++)
        for (int column = 0; column < padded; column += LANES, to += sizeof(words)) {
            const uint8_t *first = head_block + (size_t)(2 * pair * padded + column);
            const words both = (words)load_cached(KV_S8, first) >> 16 | (words)load_cached(KV_S8, first + padded);
            memcpy(to, &both, sizeof both);
        }
}

/* Return the number of steps in which a tile multiplies a block of values. */
INLINE int value_tile_steps(const int kind) { return kind == KV_BF16 ? BLOCK_SLOTS / 2 : BLOCK_SLOTS; }

/* Add the weighted bfloat16 values of a pair of slots to the sums of each query. used_bits: a mask with zeros for a slot that does not count. */
INLINE void add_slot_pair(const uint8_t *columns, uint32_t used_bits, const float *weights, int row_stride, floats (*sum)[VALUE_VECTORS],
                     const int queries, const int num_vectors) {
    bf16s v[VALUE_VECTORS];
    EACH_VALUE_VECTOR v[vector] = unpack_bf16(load_words(columns + vector * sizeof(words)) & used_bits);
    EACH_QUERY {
        const bf16s weight = broadcast_bf16_pair(weights + query * row_stride);
        EACH_VALUE_VECTOR sum[query][vector] = dot_bf16(v[vector], weight, sum[query][vector]);
    }
}

/* sums[query] += weights[query][slot - split_start] * values[slot] for slots [from, end) of one block, in num_vectors vectors of columns from
 * `begin` on. bfloat16 slots are multiplied in pairs; a slot of a pair outside [from, end) is masked out. */
INLINE void add_value_tile(const int kind, const uint8_t *head_block, int padded, Prefetch *prefetch, int from, int end, int split_start,
                           const float *weights, int row_stride, int begin, float *sums, const int queries, const int num_vectors) {
    const size_t width = (size_t)padded * item_bytes(kind);
    const uint8_t *columns = head_block + (size_t)begin * item_bytes(kind) * (kind == KV_BF16 ? 2 : 1);
    floats sum[VALUE_QUERIES][VALUE_VECTORS];
    EACH_QUERY EACH_VALUE_VECTOR sum[query][vector] = load(sums + query * (padded + LANES) + begin + vector * LANES);
    if (kind == KV_BF16) {
        const uint8_t *at = columns + (size_t)(from % BLOCK_SLOTS / 2) * 2 * width;
        const float *pair = weights + (from - split_start) / 2 * PAIR_FLOATS;
        int slot = from;
        if (slot & 1) {
            add_slot_pair(at, 0xFFFF0000u, pair, row_stride, sum, queries, num_vectors);
            slot++, at += 2 * width, pair += PAIR_FLOATS;
        }
        for (; slot + 1 < end; slot += 2, at += 2 * width, pair += PAIR_FLOATS) {
            add_slot_pair(at, 0xFFFFFFFFu, pair, row_stride, sum, queries, num_vectors);
            prefetch_step(prefetch);
        }
        if (slot < end) add_slot_pair(at, 0xFFFFu, pair, row_stride, sum, queries, num_vectors);
    } else
        for (int slot = from; slot < end; slot++) {
            floats v[VALUE_VECTORS];
            EACH_VALUE_VECTOR v[vector] = load_cached(kind, columns + (size_t)(slot % BLOCK_SLOTS) * width + vector * LANES * item_bytes(kind));
            EACH_QUERY {
                const floats weight = broadcast(weights[query * row_stride + slot - split_start]);
                EACH_VALUE_VECTOR sum[query][vector] = fmadd(weight, v[vector], sum[query][vector]);
            }
            prefetch_step(prefetch);
        }
    EACH_QUERY EACH_VALUE_VECTOR store(sums + query * (padded + LANES) + begin + vector * LANES, sum[query][vector]);
}

/* Load 16 values of a slot as bfloat16, each in the low half of a word. */
INLINE words load_as_bf16(const int kind, const uint8_t *block, int slot, int column, int padded) {
    if (kind == KV_S8) return (words)load_cached(kind, block + (size_t)(slot * padded + column)) >> 16;
    const words two = load_words(block + 4 * (size_t)(slot / 2 * padded + column));
    return slot & 1 ? two >> 16 : two & 0xFFFFu;
}

/* Add the weighted values of positions [from, end) of one row to the sums of its queries. slots: cache slot of each position. */
INLINE void add_listed_slots(const int kind, const ValueBlocks *blocks, const int32_t *slots, int from, int end, int split_start,
                             const float *weights, int row_stride, float *sums, int queries) {
    const int padded = blocks->padded, in_pairs = kind == KV_BF16 || kind == KV_S8;
    for (int query = 0; query < queries; query++)
        for (int column = 0; column < blocks->columns; column += LANES) {
            float *to = sums + query * (padded + LANES) + column;
            floats sum = load(to);
            words pair = {0};
            for (int position = from; position < end; position++) {
                const int slot = slots[position - from], is_second = position & 1;
                const uint8_t *block = blocks->values + (size_t)blocks->table[slot / BLOCK_SLOTS] * blocks->stride;
                const float *weight = weights + query * row_stride + (in_pairs ? (position - split_start) / 2 * PAIR_FLOATS : position - split_start);
                if (!in_pairs) {
                    const uint8_t *row = block + (size_t)(slot % BLOCK_SLOTS * padded + column) * item_bytes(kind);
                    sum = fmadd(broadcast(*weight), load_cached(kind, row), sum);
                    continue;
                }
                const words one = load_as_bf16(kind, block, slot % BLOCK_SLOTS, column, padded);
                pair |= is_second ? one << 16 : one;
                if (!is_second && position + 1 < end) continue;
                sum = dot_bf16(unpack_bf16(pair), broadcast_bf16_pair(weight), sum);
                pair = (words){0};
            }
            store(to, sum);
        }
}

#endif
