/* Gumbel-max sampling with counter-based noise, bit for bit as sampling/draw.py and sampling/noise.py define it.
 *
 * A column's noise is 32 bits of SplitMix64 of a key and half its id; each 64-bit result serves two ids. The sampled column has the largest
 * score - log E, E = -log1p(-noise). */
#ifndef PACELINE_NOISE_H
#define PACELINE_NOISE_H

#include "vectors.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#define NOISE_STEP 0x9E3779B97F4A7C15u

typedef uint64_t wides __attribute__((vector_size(64)));

INLINE wides mix_8(wides state) {
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
    return state ^ (state >> 31);
}

INLINE uint64_t mix(uint64_t state) { return mix_8((wides){state})[0]; }

/* Return the key of a token's noise (purpose 0). */
INLINE uint64_t token_key(uint64_t seed, uint64_t sample_index, uint64_t position) {
    return mix((mix(mix(seed + NOISE_STEP) ^ (sample_index << 8)) ^ position) + NOISE_STEP);
}

/* Return the argument of mix_8 for 16 ids from an even one on; add 8 * NOISE_STEP for the next 16. */
INLINE wides noise_state(uint64_t key, int id) {
    return ((wides){0, 1, 2, 3, 4, 5, 6, 7} + (uint64_t)(id / 2)) * NOISE_STEP + key;
}

INLINE words noise_of_state(wides state) {
    const wides mixed = mix_8(state);
    words bits;
    memcpy(&bits, &mixed, sizeof bits);
    return bits;
}

/* Return 32 random bits for each of 16 ids: from `column` on, an even number, or ids[column] on. */
INLINE words noise_of_ids(uint64_t key, const int32_t *ids, int column) {
    if (!ids) return noise_of_state(noise_state(key, column));
    words bits;
    for (int half = 0; half < LANES; half += 8) {
        wides id;
        for (int lane = 0; lane < 8; lane++) id[lane] = (uint64_t)(uint32_t)ids[column + half + lane];
        const wides mixed = mix_8((id >> 1) * NOISE_STEP + key) >> ((id & 1) << 5);
        for (int lane = 0; lane < 8; lane++) bits[half + lane] = (uint32_t)mixed[lane];
    }
    return bits;
}

INLINE uint32_t noise_of_id(uint64_t key, int id) { return (uint32_t)(mix((uint64_t)(id / 2) * NOISE_STEP + key) >> (id % 2 * 32)); }

/* Return E = -log1p(-w) of 32 random bits, w = (bits + 1/2) / 2^32. */
INLINE double exponential_variate(uint32_t bits) { return -log1p(-(((double)bits + 0.5) * 0x1p-32)); }

/* The search for the column with the largest Gumbel score, score - log E. A column's weight is exp(score - constant). */
typedef struct {
    double best, second;
    float limit; /* on noise / weight: a column above it can neither win nor come near to the winner */
    int winner;  /* -1 = none yet */
} GumbelMax;

/* Return the limit a column implies: its E / weight, times 2^32, plus a margin. */
INLINE float limit_of(double noise, float weight) { return (float)(noise * 0x1p32 * 1.001) / weight; }

/* Compare 16 columns, of which `eligible` take part. Since E >= w, the cheap w / weight excludes most before E is computed. */
INLINE void compare_16(GumbelMax *search, floats scores, floats weights, words bits, ints eligible, int column) {
    const floats noise = __builtin_convertvector(bits, floats) + broadcast(0.5f);
    const ints hits = eligible & (ints)(weights > broadcast(0.0f)) & (ints)(noise <= weights * broadcast(search->limit));
    if (!__builtin_reduce_or(hits)) return;
    for (int lane = 0; lane < LANES; lane++) {
        if (!hits[lane]) continue;
        const double drawn = exponential_variate(bits[lane]), value = (double)scores[lane] - log(drawn);
        const float limit = limit_of(drawn, weights[lane]);
        if (limit < search->limit) search->limit = limit;
        if (value > search->best) {
            search->second = search->best;
            search->best = value;
            search->winner = column + lane;
        } else if (value > search->second)
            search->second = value;
    }
}

#endif
