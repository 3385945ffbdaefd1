/* The noise of sampling/noise.py, bit for bit, and the Gumbel-max search of sampling/draw.py. SplitMix64 of a key and a pair of ids gives 64
 * bits, one half for each id. */
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

/* noise_key of sampling/noise.py for Purpose.TOKEN, which is 0. */
INLINE uint64_t token_key(uint64_t seed, uint64_t sample_index, uint64_t position) {
    return mix((mix(mix(seed + NOISE_STEP) ^ (sample_index << 8)) ^ position) + NOISE_STEP);
}

/* The state for mix_8 of 16 ids, the first of them even. Add 8 * NOISE_STEP for the next 16 ids. */
INLINE wides noise_state(uint64_t key, int id) {
    return ((wides){0, 1, 2, 3, 4, 5, 6, 7} + (uint64_t)(id / 2)) * NOISE_STEP + key;
}

INLINE words noise_of_state(wides state) {
    const wides mixed = mix_8(state);
    words bits;
    memcpy(&bits, &mixed, sizeof bits);
    return bits;
}

INLINE uint32_t noise_of_id(uint64_t key, int id) { return (uint32_t)(mix((uint64_t)(id / 2) * NOISE_STEP + key) >> (id % 2 * 32)); }

/* The exponential variate E = -log1p(-w), w = (bits + 1/2) / 2^32. */
INLINE double exponential_variate(uint32_t bits) { return -log1p(-(((double)bits + 0.5) * 0x1p-32)); }

/* State of the search for the column with the largest score - log E. The weight of a column is exp(score - constant). */
typedef struct {
    double best, second;
    float limit; /* a column with noise / weight above it can neither win nor be close to the winner */
    int winner;  /* -1 = none yet */
} Candidates;

/* The limit after a column: its E / weight, times 2^32 and a margin. */
INLINE float limit_of(double noise, float weight) { return (float)(noise * 0x1p32 * 1.001) / weight; }

/* Compare the `eligible` ones of 16 columns. E >= w, so the cheap w / weight shows which columns need log1p. */
INLINE void compare_16(Candidates *candidates, floats scores, floats weights, words bits, ints eligible, int column) {
    const floats noise = __builtin_convertvector(bits, floats) + broadcast(0.5f);
    const ints hits = eligible & (ints)(weights > broadcast(0.0f)) & (ints)(noise <= weights * broadcast(candidates->limit));
    if (!__builtin_reduce_or(hits)) return;
    for (int lane = 0; lane < LANES; lane++) {
        if (!hits[lane]) continue;
        const double drawn = exponential_variate(bits[lane]), value = (double)scores[lane] - log(drawn);
        const float limit = limit_of(drawn, weights[lane]);
        if (limit < candidates->limit) candidates->limit = limit;
        if (value > candidates->best) {
            candidates->second = candidates->best;
            candidates->best = value;
            candidates->winner = column + lane;
        } else if (value > candidates->second)
            candidates->second = value;
    }
}

#endif
