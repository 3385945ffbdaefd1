/* Products of a cache block's keys with several queries, and of softmax weights with its values. A score is summed over ascending columns in one
 * lane, a value over ascending positions, so neither depends on the other queries. */
#ifndef PACELINE_ATTENTION_TILES_H
#define PACELINE_ATTENTION_TILES_H

#include "byte_dot.h"
#include "kv_blocks.h"
#include "softmax.h"

/* Register tiles: queries that share loaded keys; queries and vectors of columns that share loaded values. */
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
#define EACH_PART _Pragma("unroll") for (int part = 0; part < parts; part++)

INLINE words load_words_at(const uint8_t *from) {
    words v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* Load 16 stored numbers as float32; int8 without scale; not for bfloat16. */
INLINE floats load_stored(const int kind, const uint8_t *from) {
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

/* Prefetches spread over the steps of tiles: bytes [far, end) of a unit from memory, and the same bytes of the unit before it (prefetched earlier)
 * from the second-level to the first-level cache. */
typedef struct {
    const uint8_t *far, *end, *near;
    int lines; /* per step */
} Prefetch;

#define LINE 64

/* Spread the prefetch of `next`, the second of two units of `bytes` bytes, over `tiles` tiles of `steps` steps; NULL = nothing. */
INLINE Prefetch make_prefetch(const uint8_t *const *next, size_t bytes, int tiles, int steps) {
    if (!next) return (Prefetch){0};
    return (Prefetch){next[0], next[0] + bytes, next[-1], ((int)(bytes / LINE) + tiles * steps - 1) / (tiles * steps)};
}

INLINE void prefetch_step(Prefetch *prefetch) {
    for (int i = 0; i < prefetch->lines && prefetch->far < prefetch->end; i++, prefetch->far += LINE, prefetch->near += LINE) {
        __builtin_prefetch(prefetch->far, 0, 2);
        __builtin_prefetch(prefetch->near, 0, 3);
    }
}

/* Return the steps of a tile over a block of keys. */
INLINE int score_steps(const int kind, int size) { return kind == KV_S8 ? (size + 3) / 4 : kind == KV_BF16 ? (size + 1) / 2 : size; }

/* Where a query packed as quads of int8 codes has its scale and its sum. */
#define SCALE_OF_QUERY(padded) ((padded) - 2)
#define SUM_OF_QUERY(padded) ((padded) - 1)

/* scores[query][slot] = q[query] . keys[slot] for all slots of an int8 block, in integers. */
INLINE void score_codes(const uint8_t *keys, Prefetch *prefetch, const float *q, int size, float *scores, int room, const int queries) {
    const int padded = padded_columns(size);
    const int32_t *packed = (const int32_t *)q;
    ints sum[KEY_QUERIES][2];
    EACH_QUERY EACH_HALF sum[query][half] = broadcast_int((DOT_SHIFT - 128) * packed[query * padded + SUM_OF_QUERY(padded)]);
    for (int quad = 0; 4 * quad < size; quad++) {
        weight_codes k[2];
        EACH_HALF k[half] = split_codes(load_words_at(keys + (size_t)(2 * quad + half) * sizeof(words)) ^ 0x80808080u);
        EACH_QUERY EACH_HALF sum[query][half] = dot_bytes(k[half], packed + query * padded + quad * DOT_WORDS, sum[query][half]);
        prefetch_step(prefetch);
    }
    EACH_QUERY EACH_HALF {
        const floats scale = load(scales_of(keys, size) + half * LANES) * broadcast(q[query * padded + SCALE_OF_QUERY(padded)]);
        store(scores + query * room + half * LANES, __builtin_convertvector(sum[query][half], floats) * scale);
    }
}

/* scores[query][slot] = q[query] . keys[slot] for all slots of a block. */
INLINE void score_tile(const int kind, const uint8_t *keys, Prefetch *prefetch, const float *q, int size, float *scores, int room, const int queries) {
    const int padded = padded_columns(size);
    floats sum[KEY_QUERIES][2];
    if (kind == KV_S8) {
        score_codes(keys, prefetch, q, size, scores, room, queries);
        return;
    }
    EACH_QUERY EACH_HALF sum[query][half] = broadcast(0.0f);
    if (kind == KV_BF16)
        for (int pair = 0; 2 * pair < size; pair++) {
            bf16s k[2];
            EACH_HALF k[half] = bf16_of(load_words_at(keys + (size_t)(2 * pair + half) * 2 * SLOTS));
            EACH_QUERY {
                const bf16s x = broadcast_pair(q + query * padded + pair * PAIR_FLOATS);
                EACH_HALF sum[query][half] = dot_bf16(k[half], x, sum[query][half]);
            }
            prefetch_step(prefetch);
        }
    else
        for (int column = 0; column < size; column++) {
            floats k[2];
            EACH_HALF k[half] = load_stored(kind, keys + (size_t)(2 * column + half) * LANES * item_bytes(kind));
            EACH_QUERY {
                const floats x = broadcast(q[query * padded + column]);
                EACH_HALF sum[query][half] = fused(k[half], x, sum[query][half]);
            }
            prefetch_step(prefetch);
        }
    EACH_QUERY EACH_HALF store(scores + query * room + half * LANES, sum[query][half]);
}

/* Where values are read: block b at `values` + table[b] * stride. `next`: units to prefetch, by blocks from `first` on. */
typedef struct {
    const uint8_t *values;
    const uint8_t *const *next; /* units */
    int first;
    const int32_t *table;
    size_t stride;
    int padded;
} Values;

/* Convert an int8 block of values to bfloat16 (exact) in its layout, once for all queries. */
INLINE void widen_codes(const uint8_t *unit, int padded, uint8_t *to) {
    for (int pair = 0; pair < SLOTS / 2; pair++)
        for (int column = 0; column < padded; column += LANES, to += sizeof(words)) {
            const uint8_t *first = unit + (size_t)(2 * pair * padded + column);
            const words both = (words)load_stored(KV_S8, first) >> 16 | (words)load_stored(KV_S8, first + padded);
            memcpy(to, &both, sizeof both);
        }
}

/* Return the steps of a tile over a block of values. */
INLINE int add_steps(const int kind) { return kind == KV_BF16 ? SLOTS / 2 : SLOTS; }

/* Add a pair of bfloat16 slots at `columns` to the sums of each query; `seen` masks out one of the two. */
INLINE void add_pair(const uint8_t *columns, uint32_t seen, const float *weights, int room, floats (*sum)[VALUE_VECTORS], const int queries, const int parts) {
    bf16s v[VALUE_VECTORS];
    EACH_PART v[part] = bf16_of(load_words_at(columns + part * sizeof(words)) & seen);
    EACH_QUERY {
        const bf16s weight = broadcast_pair(weights + query * room);
        EACH_PART sum[query][part] = dot_bf16(v[part], weight, sum[query][part]);
    }
}

/* sums[query] += weights[query][slot - base] * values[slot] over slots [from, end) of one block, for `parts` vectors of columns from `begin` on.
 * bfloat16 slots are multiplied in pairs; the unused row of a partial pair is masked out. */
INLINE void add_tile(const int kind, const uint8_t *unit, int padded, Prefetch *prefetch, int from, int end, int base, const float *weights, int room, int begin, float *sums, const int queries, const int parts) {
    const size_t width = (size_t)padded * item_bytes(kind);
    const uint8_t *columns = unit + (size_t)begin * item_bytes(kind) * (kind == KV_BF16 ? 2 : 1);
    floats sum[VALUE_QUERIES][VALUE_VECTORS];
    EACH_QUERY EACH_PART sum[query][part] = load(sums + query * (padded + LANES) + begin + part * LANES);
    if (kind == KV_BF16) {
        const uint8_t *at = columns + (size_t)(from % SLOTS / 2) * 2 * width;
        const float *pair = weights + (from - base) / 2 * PAIR_FLOATS;
        int slot = from;
        if (slot & 1) {
            add_pair(at, 0xFFFF0000u, pair, room, sum, queries, parts);
            slot++, at += 2 * width, pair += PAIR_FLOATS;
        }
        for (; slot + 1 < end; slot += 2, at += 2 * width, pair += PAIR_FLOATS) {
            add_pair(at, 0xFFFFFFFFu, pair, room, sum, queries, parts);
            prefetch_step(prefetch);
        }
        if (slot < end) add_pair(at, 0xFFFFu, pair, room, sum, queries, parts);
    } else
        for (int slot = from; slot < end; slot++) {
            floats v[VALUE_VECTORS];
            EACH_PART v[part] = load_stored(kind, columns + (size_t)(slot % SLOTS) * width + part * LANES * item_bytes(kind));
            EACH_QUERY {
                const floats weight = broadcast(weights[query * room + slot - base]);
                EACH_PART sum[query][part] = fused(weight, v[part], sum[query][part]);
            }
            prefetch_step(prefetch);
        }
    EACH_QUERY EACH_PART store(sums + query * (padded + LANES) + begin + part * LANES, sum[query][part]);
}

/* Load 16 values of a row as bfloat16, each in the low half of a word. */
INLINE words load_narrow(const int kind, const uint8_t *block, int slot, int column, int padded) {
    if (kind == KV_S8) return (words)load_stored(kind, block + (size_t)(slot * padded + column)) >> 16;
    const words two = load_words_at(block + 4 * (size_t)(slot / 2 * padded + column));
    return slot & 1 ? two >> 16 : two & 0xFFFFu;
}

/* Add weighted values of positions [from, end) of one path, whose rows are in `slots`, for all queries of a row. */
INLINE void add_listed(const int kind, const Values *own, const int32_t *slots, int from, int end, int base, const float *weights, int room, float *sums, int queries) {
    const int padded = own->padded, in_pairs = kind == KV_BF16 || kind == KV_S8;
    for (int query = 0; query < queries; query++)
        for (int column = 0; column < padded; column += LANES) {
            float *to = sums + query * (padded + LANES) + column;
            floats sum = load(to);
            words pair = {0};
            for (int position = from; position < end; position++) {
                const int slot = slots[position - from], is_second = position & 1;
                const uint8_t *block = own->values + (size_t)own->table[slot / SLOTS] * own->stride;
                const float *weight = weights + query * room + (in_pairs ? (position - base) / 2 * PAIR_FLOATS : position - base);
                if (!in_pairs) {
                    const uint8_t *row = block + (size_t)(slot % SLOTS * padded + column) * item_bytes(kind);
                    sum = fused(broadcast(*weight), load_stored(kind, row), sum);
                    continue;
                }
                const words one = load_narrow(kind, block, slot % SLOTS, column, padded);
                pair |= is_second ? one << 16 : one;
                if (!is_second && position + 1 < end) continue;
                sum = dot_bf16(bf16_of(pair), broadcast_pair(weight), sum);
                pair = (words){0};
            }
            store(to, sum);
        }
}

#endif
