/* Products of a block of the cache with several queries, and of their weights with its values. A key's product runs over ascending columns
 * in one lane, a sum of values over ascending positions, so that neither depends on what is worked on beside it. */
#ifndef PACELINE_ATTENTION_TILES_H
#define PACELINE_ATTENTION_TILES_H

#include "byte_dot.h"
#include "kv_blocks.h"
#include "softmax.h"

/* Queries that keys are loaded for once, and values, and vectors of the latter's columns. */
#ifdef __AVX512F__
#define SCORED 8
#define QUERIES 4
#define PARTS 4
#else
#define SCORED 2
#define QUERIES 2
#define PARTS 2
#endif
#define EACH_QUERY _Pragma("unroll") for (int query = 0; query < queries; query++)
#define EACH_HALF _Pragma("unroll") for (int half = 0; half < 2; half++)
#define EACH_PART _Pragma("unroll") for (int part = 0; part < parts; part++)

INLINE words load_words_at(const uint8_t *from) {
    words v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* 16 stored numbers; codes without their scale, not of bfloat16. */
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

/* What is asked for early while tiles work, some lines in each of their steps: bytes [far, end) of a unit from memory, and as many of the unit
 * before it, which were asked for before, from the second-level cache. Tiles that work on the same block share out what comes next, so that it
 * comes while all of them work. */
typedef struct {
    const uint8_t *far, *end, *near;
    int lines; /* of a step */
} Early;

#define LINE 64

/* For so many tiles of so many steps. `next`: the second of two units of `bytes` bytes; NULL = nothing. */
INLINE Early early_of(const uint8_t *const *next, size_t bytes, int tiles, int steps) {
    if (!next) return (Early){0};
    return (Early){next[0], next[0] + bytes, next[-1], ((int)(bytes / LINE) + tiles * steps - 1) / (tiles * steps)};
}

INLINE void ask_for(Early *early) {
    for (int i = 0; i < early->lines && early->far < early->end; i++, early->far += LINE, early->near += LINE) {
        __builtin_prefetch(early->far, 0, 2);
        __builtin_prefetch(early->near, 0, 3);
    }
}

/* Steps that a tile takes over a block of keys. */
INLINE int score_steps(const int kind, int size) { return kind == KV_S8 ? (size + 3) / 4 : kind == KV_BF16 ? (size + 1) / 2 : size; }

/* A query as codes of keys are multiplied with: quads of its own codes, and behind them their scale and sum. */
#define SCALE_OF_QUERY(padded) ((padded) - 2)
#define SUM_OF_QUERY(padded) ((padded) - 1)

/* scores[query][slot] = q[query] . keys[slot] for all slots of a block of codes, each lane four columns of a slot: products of whole numbers. */
INLINE void score_codes(const uint8_t *keys, Early *early, const float *q, int size, float *scores, int room, const int queries) {
    const int padded = padded_columns(size);
    const int32_t *packed = (const int32_t *)q;
    ints sum[SCORED][2];
    EACH_QUERY EACH_HALF sum[query][half] = broadcast_int((DOT_SHIFT - 128) * packed[query * padded + SUM_OF_QUERY(padded)]);
    for (int quad = 0; 4 * quad < size; quad++) {
        weight_codes k[2];
        EACH_HALF k[half] = split_codes(load_words_at(keys + (size_t)(2 * quad + half) * sizeof(words)) ^ 0x80808080u);
        EACH_QUERY EACH_HALF sum[query][half] = dot_bytes(k[half], packed + query * padded + quad * DOT_WORDS, sum[query][half]);
        ask_for(early);
    }
    EACH_QUERY EACH_HALF {
        const floats scale = load(scales_of(keys, size) + half * LANES) * broadcast(q[query * padded + SCALE_OF_QUERY(padded)]);
        store(scores + query * room + half * LANES, __builtin_convertvector(sum[query][half], floats) * scale);
    }
}

/* scores[query][slot] = q[query] . keys[slot] for all slots of a block. */
INLINE void score_tile(const int kind, const uint8_t *keys, Early *early, const float *q, int size, float *scores, int room, const int queries) {
    const int padded = padded_columns(size);
    floats sum[SCORED][2];
    if (kind == KV_S8) {
        score_codes(keys, early, q, size, scores, room, queries);
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
            ask_for(early);
        }
    else
        for (int column = 0; column < size; column++) {
            floats k[2];
            EACH_HALF k[half] = load_stored(kind, keys + (size_t)(2 * column + half) * LANES * item_bytes(kind));
            EACH_QUERY {
                const floats x = broadcast(q[query * padded + column]);
                EACH_HALF sum[query][half] = fused(k[half], x, sum[query][half]);
            }
            ask_for(early);
        }
    EACH_QUERY EACH_HALF store(scores + query * room + half * LANES, sum[query][half]);
}

/* Where values are read: block b at `values` + table[b] * stride. `next`: what is asked for meanwhile, by blocks from `first` on. */
typedef struct {
    const uint8_t *values;
    const uint8_t *const *next; /* units */
    int first;
    const int32_t *table;
    size_t stride;
    int padded;
} Values;

/* The values of a block of codes as bfloat16, which holds them, laid out as those are: once for all queries. */
INLINE void widen_codes(const uint8_t *unit, int padded, uint8_t *to) {
    for (int pair = 0; pair < SLOTS / 2; pair++)
        for (int column = 0; column < padded; column += LANES, to += sizeof(words)) {
            const uint8_t *first = unit + (size_t)(2 * pair * padded + column);
            const words both = (words)load_stored(KV_S8, first) >> 16 | (words)load_stored(KV_S8, first + padded);
            memcpy(to, &both, sizeof both);
        }
}

/* Steps that a tile takes over a block of values. */
INLINE int add_steps(const int kind) { return kind == KV_BF16 ? SLOTS / 2 : SLOTS; }

/* A pair of slots of bfloat16 at `columns` onto the sums of each query; a bit that is not `seen` counts as 0. */
INLINE void add_pair(const uint8_t *columns, uint32_t seen, const float *weights, int room, floats (*sum)[PARTS], const int queries, const int parts) {
    bf16s v[PARTS];
    EACH_PART v[part] = bf16_of(load_words_at(columns + part * sizeof(words)) & seen);
    EACH_QUERY {
        const bf16s weight = broadcast_pair(weights + query * room);
        EACH_PART sum[query][part] = dot_bf16(v[part], weight, sum[query][part]);
    }
}

/* sums[query] += weights[query][slot] values[slot] over slots [from, end) of one block, whose weights lie at [slot - base]; `parts` vectors of
 * columns from `begin` on. Slots of bfloat16 go two by two; of a pair that is not seen whole, the other row counts as nothing. */
INLINE void add_tile(const int kind, const uint8_t *unit, int padded, Early *early, int from, int end, int base, const float *weights, int room, int begin, float *sums, const int queries, const int parts) {
    const size_t width = (size_t)padded * item_bytes(kind);
    const uint8_t *columns = unit + (size_t)begin * item_bytes(kind) * (kind == KV_BF16 ? 2 : 1);
    floats sum[QUERIES][PARTS];
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
            ask_for(early);
        }
        if (slot < end) add_pair(at, 0xFFFFu, pair, room, sum, queries, parts);
    } else
        for (int slot = from; slot < end; slot++) {
            floats v[PARTS];
            EACH_PART v[part] = load_stored(kind, columns + (size_t)(slot % SLOTS) * width + part * LANES * item_bytes(kind));
            EACH_QUERY {
                const floats weight = broadcast(weights[query * room + slot - base]);
                EACH_PART sum[query][part] = fused(weight, v[part], sum[query][part]);
            }
            ask_for(early);
        }
    EACH_QUERY EACH_PART store(sums + query * (padded + LANES) + begin + part * LANES, sum[query][part]);
}

/* 16 values of a row as bfloat16, each in the low half of a word. */
INLINE words load_narrow(const int kind, const uint8_t *block, int slot, int column, int padded) {
    if (kind == KV_S8) return (words)load_stored(kind, block + (size_t)(slot * padded + column)) >> 16;
    const words two = load_words_at(block + 4 * (size_t)(slot / 2 * padded + column));
    return slot & 1 ? two >> 16 : two & 0xFFFFu;
}

/* The same for positions [from, end) of one path, whose rows lie in `slots`, of all queries of a row. A row that is not there counts as nothing. */
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
