/* Products of a block of the cache with several queries, and of their weights with its values. A key's product runs over ascending columns
 * in one lane, a sum of values over ascending positions, so that neither depends on what is worked on beside it. */
#ifndef PACELINE_ATTENTION_TILES_H
#define PACELINE_ATTENTION_TILES_H

#include "bf16.h"
#include "kv_blocks.h"

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

/* Two bfloat16 in every lane; `pack_pairs` has laid them out. */
#ifdef __AVX512BF16__
#define PAIR_FLOATS 1
INLINE bf16s broadcast_pair(const float *from) {
    uint32_t pair;
    memcpy(&pair, from, sizeof pair);
    return (words){0} + pair;
}
#else
#define PAIR_FLOATS 2
INLINE bf16s broadcast_pair(const float *from) { return (bf16s){broadcast(from[0]), broadcast(from[1])}; }
#endif

/* Floats [from, end) of x, multiples of 32, rounded to pairs of bfloat16, in place; what is now pair i begins at x[i * PAIR_FLOATS]. */
INLINE void pack_pairs(float *x, int from, int end) {
    for (int i = from; i < end; i += 2 * LANES) {
        const floats a = round_to_bf16(load(x + i)), b = round_to_bf16(load(x + i + LANES));
#ifdef __AVX512BF16__
        const words first = (words)SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const words second = (words)SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        store(x + i / 2, (floats)(first >> 16 | second));
#else
        store(x + i, a);
        store(x + i + LANES, b);
#endif
    }
}

/* 16 stored numbers; not of bfloat16. */
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

/* scores[query][slot] = q[query] . keys[slot] for all slots of a block; what comes from memory next is asked for. */
INLINE void score_tile(const int kind, const uint8_t *keys, const uint8_t *next, const float *q, int size, float *scores, int room, const int queries) {
    const int padded = padded_columns(size);
    floats sum[SCORED][2];
    EACH_QUERY EACH_HALF sum[query][half] = broadcast(0.0f);
    if (kind == KV_BF16)
        for (int pair = 0; 2 * pair < size; pair++) {
            bf16s k[2];
            EACH_HALF {
                const size_t at = (size_t)(2 * pair + half) * 2 * SLOTS;
                k[half] = bf16_of(load_words_at(keys + at));
                __builtin_prefetch(next + at, 0, 2);
            }
            EACH_QUERY {
                const bf16s x = broadcast_pair(q + query * padded + pair * PAIR_FLOATS);
                EACH_HALF sum[query][half] = dot_bf16(k[half], x, sum[query][half]);
            }
        }
    else
        for (int column = 0; column < size; column++) {
            floats k[2];
            EACH_HALF {
                const size_t at = (size_t)(2 * column + half) * LANES * item_bytes(kind);
                k[half] = load_stored(kind, keys + at);
                if (at % 64 == 0) __builtin_prefetch(next + at, 0, 2);
            }
            EACH_QUERY {
                const floats x = broadcast(q[query * padded + column]);
                EACH_HALF sum[query][half] = fused(k[half], x, sum[query][half]);
            }
        }
    EACH_QUERY EACH_HALF {
        const floats scale = kind == KV_S8 ? load(scales_of(keys, size) + half * LANES) : broadcast(1.0f);
        store(scores + query * room + half * LANES, kind == KV_S8 ? sum[query][half] * scale : sum[query][half]);
    }
}

/* Where values are read: block b at `values` + table[b] * stride. `next`: what is asked for meanwhile, by blocks from `first` on. */
typedef struct {
    const uint8_t *values;
    const uint8_t *const *next;
    int first;
    const int32_t *table;
    size_t stride;
    int padded;
} Values;

/* sums[query] += weights[query][slot] values[slot] over slots [from, end), whose weights lie at [slot - base]; `parts` vectors of columns
 * from `begin` on. Slots of bfloat16 go two by two; of a pair that is not seen whole, the other row counts as nothing. */
INLINE void add_tile(const int kind, const Values *own, int from, int end, int base, const float *weights, int room, int begin, float *sums, const int queries, const int parts) {
    const size_t width = (size_t)own->padded * item_bytes(kind), column = (size_t)begin * item_bytes(kind);
    floats sum[QUERIES][PARTS];
    EACH_QUERY EACH_PART sum[query][part] = load(sums + query * (own->padded + LANES) + begin + part * LANES);
    for (int slot = from; slot < end;) {
        const uint8_t *block = own->values + (size_t)own->table[slot / SLOTS] * own->stride;
        const int stop = (slot | (SLOTS - 1)) + 1 < end ? (slot | (SLOTS - 1)) + 1 : end;
        const uint8_t *next = own->next[slot / SLOTS - own->first];
        if (kind == KV_BF16)
            for (; slot < stop; slot = (slot | 1) + 1) {
                const size_t at = (size_t)(slot % SLOTS / 2) * 2 * width + 2 * column;
                const uint32_t seen = (slot & 1 ? 0xFFFF0000u : 0xFFFFFFFFu) & ((slot | 1) < end ? 0xFFFFFFFFu : 0x0000FFFFu);
                bf16s v[PARTS];
                EACH_PART {
                    v[part] = bf16_of(load_words_at(block + at + part * sizeof(words)) & seen);
                    __builtin_prefetch(next + at + part * sizeof(words), 0, 2);
                }
                EACH_QUERY {
                    const bf16s weight = broadcast_pair(weights + query * room + (slot - base) / 2 * PAIR_FLOATS);
                    EACH_PART sum[query][part] = dot_bf16(v[part], weight, sum[query][part]);
                }
            }
        else
            for (; slot < stop; slot++) {
                const size_t at = (size_t)(slot % SLOTS) * width + column;
                floats v[PARTS];
                EACH_PART {
                    v[part] = load_stored(kind, block + at + part * LANES * item_bytes(kind));
                    if (part * LANES * item_bytes(kind) % 64 == 0) __builtin_prefetch(next + at + part * LANES * item_bytes(kind), 0, 2);
                }
                EACH_QUERY {
                    const floats weight = broadcast(weights[query * room + slot - base]);
                    EACH_PART sum[query][part] = fused(weight, v[part], sum[query][part]);
                }
            }
    }
    EACH_QUERY EACH_PART store(sums + query * (own->padded + LANES) + begin + part * LANES, sum[query][part]);
}

/* The same for positions [from, end) of one path, whose rows lie in `slots`, of all queries of a row. A row that is not there counts as nothing. */
INLINE void add_listed(const int kind, const Values *own, const int32_t *slots, int from, int end, int base, const float *weights, int room, float *sums, int queries) {
    const size_t width = (size_t)own->padded * item_bytes(kind);
    for (int query = 0; query < queries; query++)
        for (int column = 0; column < own->padded; column += LANES) {
            float *to = sums + query * (own->padded + LANES) + column;
            floats sum = load(to);
            for (int position = from; position < end;) {
                const int pair = kind == KV_BF16 && !(position & 1) ? 2 : 1;
                bf16s both = bf16_of((words){0});
                words v = {0};
                for (int i = 0; i < pair && position + i < end; i++) {
                    const int slot = slots[position + i - from];
                    const uint8_t *block = own->values + (size_t)own->table[slot / SLOTS] * own->stride;
                    if (kind != KV_BF16) {
                        const floats row = load_stored(kind, block + (size_t)(slot % SLOTS) * width + (size_t)column * item_bytes(kind));
                        sum = fused(broadcast(weights[query * room + position - base]), row, sum);
                        continue;
                    }
                    const words two = load_words_at(block + (size_t)(slot % SLOTS / 2) * 2 * width + 4 * (size_t)column);
                    const words one = slot & 1 ? two >> 16 : two & 0xFFFFu;
                    v |= (position + i) & 1 ? one << 16 : one;
                }
                both = bf16_of(v);
                if (kind == KV_BF16) sum = dot_bf16(both, broadcast_pair(weights + query * room + (position - base) / 2 * PAIR_FLOATS), sum);
                position += pair;
            }
            store(to, sum);
        }
}

#endif
