/* Gumbel-max sampling with counter-based noise, with the same bits as sampling/draw.py and sampling/noise.py.
 *
 * The noise of a token id is 32 bits of SplitMix64 of a key and half the id: each 64-bit result serves two ids. These bits give w in (0, 1) and the
 * exponential variate E = -log(1 - w). The sampled column is the column with the largest score - log E. */
#ifndef PACELINE_NOISE_H
#define PACELINE_NOISE_H

#include "vectors.h"

#include <math.h>

#define NOISE_STEP 0x9E3779B97F4A7C15u

typedef uint64_t long_words __attribute__((vector_size(64)));

INLINE long_words splitmix64_vector(long_words state) {
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
    return state ^ (state >> 31);
}

INLINE uint64_t splitmix64(uint64_t state) { return splitmix64_vector((long_words){state})[0]; }

/* Return the key of the noise with which the target samples a token (Purpose.TOKEN in sampling/noise.py). */
INLINE uint64_t token_noise_key(uint64_t seed, uint64_t sample_index, uint64_t position) {
    return splitmix64((splitmix64(splitmix64(seed + NOISE_STEP) ^ (sample_index << 8)) ^ position) + NOISE_STEP);
}

/* Return the argument of splitmix64_vector for the noise of 16 ids from the even number `id` on. Add 8 * NOISE_STEP for the next 16 ids. */
INLINE long_words noise_state(uint64_t key, int id) { return ((long_words){0, 1, 2, 3, 4, 5, 6, 7} + (uint64_t)(id / 2)) * NOISE_STEP + key; }

INLINE words noise_of_state(long_words state) {
    const long_words mixed = splitmix64_vector(state);
    words bits;
    memcpy(&bits, &mixed, sizeof bits);
    return bits;
}

/* Return the noise of 16 columns from the even number `column` on. ids: the token id of each column; NULL = the column is the id. */
INLINE words noise_of_ids(uint64_t key, const int32_t *ids, int column) {
    if (!ids) return noise_of_state(noise_state(key, column));
    words bits;
    for (int half = 0; half < LANES; half += 8) {
        long_words id;
        for (int lane = 0; lane < 8; lane++) id[lane] = (uint64_t)(uint32_t)ids[column + half + lane];
        const long_words mixed = splitmix64_vector((id >> 1) * NOISE_STEP + key) >> ((id & 1) << 5);
        for (int lane = 0; lane < 8; lane++) bits[half + lane] = (uint32_t)mixed[lane];
    }
    return bits;
}

INLINE uint32_t noise_of_id(uint64_t key, int id) { return (uint32_t)(splitmix64((uint64_t)(id / 2) * NOISE_STEP + key) >> (id % 2 * 32)); }

/* Return E = -log(1 - w) with w = (bits + 1/2) / 2^32. */
INLINE double exponential_variate(uint32_t bits) { return -log1p(-(((double)bits + 0.5) * 0x1p-32)); }

/* The state of a search for the column with the largest score - log E. A column's weight is exp(score - constant). */
typedef struct {
    double max_score, second_score;
    float max_ratio; /* a column whose quotient noise / weight is larger can neither be sampled nor come close to the largest score */
    int argmax;      /* column that has max_score; -1 = none yet */
} GumbelMax;

/* Return the largest noise / weight (in units of 2^-32, with a margin) at which a column may beat one with this variate E and weight. */
INLINE float noise_ratio_limit(double variate, float weight) { return (float)(variate * 0x1p32 * 1.001) / weight; }

/* Update the search with those of 16 columns that are `eligible`. Since E >= w, w / weight excludes most columns without computing E. */
INLINE void update_gumbel_max(GumbelMax *search, floats scores, floats weights, words bits, ints eligible, int column) {
    const floats noise = __builtin_convertvector(bits, floats) + broadcast(0.5f);
    const ints candidates = eligible & (ints)(weights > broadcast(0.0f)) & (ints)(noise <= weights * broadcast(search->max_ratio));
    if (!__builtin_reduce_or(candidates)) return;
    for (int lane = 0; lane < LANES; lane++) {
        if (!candidates[lane]) continue;
        const double exponential_noise = exponential_variate(bits[lane]), value = (double)scores[lane] - log(exponential_noise);
        const float ratio = noise_ratio_limit(exponential_noise, weights[lane]);
        if (ratio < search->max_ratio) search->max_ratio = ratio;
        if (value > search->max_score) {
            search->second_score = search->max_score;
            search->max_score = value;
            search->argmax = column + lane;
        } else if (value > search->second_score) search->second_score = value;
    }
}

#endif
