/* Vectors of 16 numbers of 32 bits (floats, ints, words), in the compiler's portable vector extension: one register with AVX-512, two with AVX2,
 * four with NEON. The number of lanes determines the order in which sums are added, so it is the same on all machines. */
#ifndef PACELINE_VECTORS_H
#define PACELINE_VECTORS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halfwords __attribute__((vector_size(32)));
typedef _Float16 halfs __attribute__((vector_size(32)));
typedef int8_t signed_bytes __attribute__((vector_size(16)));
typedef uint8_t bytes __attribute__((vector_size(16)));

INLINE floats broadcast(float x) { return (floats){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

INLINE floats load(const float *from) {
    floats v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, floats v) { memcpy(to, &v, sizeof v); }

/* Load `count` floats (at most 16); the other lanes are `padding`. */
INLINE floats load_padded(const float *from, int count, float padding) {
    if (count == LANES) return load(from);
    floats v = broadcast(padding);
    memcpy(&v, from, (size_t)count * sizeof(float));
    return v;
}

/* Load `count` floats (at most 16), padded with zeros. */
INLINE floats load_part(const float *from, int count) { return load_padded(from, count, 0.0f); }

INLINE words load_words(const uint8_t *from) {
    words v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE uint32_t load_word(const uint8_t *from) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

INLINE float load_one_float16(const uint8_t *from) {
    _Float16 half;
    memcpy(&half, from, sizeof half);
    return (float)half;
}

/* Loop over the columns of a row, 16 at a time: `column` is the first column, `count` the number of columns left, at most 16. */
#define EACH_16(column, count, width) \
    for (int column = 0, count; count = (width) - column < LANES ? (width) - column : LANES, column < (width); column += LANES)

/* Store the first `count` floats of v. */
INLINE void store_part(float *to, floats v, int count) {
    if (count == LANES) store(to, v);
    else memcpy(to, &v, (size_t)count * sizeof(float));
}

INLINE floats fmadd(floats a, floats b, floats c) { return __builtin_elementwise_fma(a, b, c); }

/* Return the sum of the lanes: add the upper half to the lower half until one lane is left. */
INLINE float lane_sum(floats v) {
    float lanes[LANES];
    memcpy(lanes, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

INLINE float dot_product(const float *x, const float *y, int count) {
    floats sum = broadcast(0.0f);
    EACH_16(i, lanes, count) sum = fmadd(load_part(x + i, lanes), load_part(y + i, lanes), sum);
    return lane_sum(sum);
}

#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define EVEN_LANES(a, b) SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD_LANES(a, b) SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)

/* Return the lane_sum of each of 16 vectors, with the same additions in the same order. */
INLINE floats lane_sums(const floats *v) {
    floats two[8], four[4], eight[2];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const floats a = v[2 * i], b = v[2 * i + 1];
        two[i] = SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                 SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const floats a = two[2 * i], b = two[2 * i + 1];
        four[i] = SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                  SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const floats a = four[2 * i], b = four[2 * i + 1];
        eight[i] = SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
                   SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    }
    return EVEN_LANES(eight[0], eight[1]) + ODD_LANES(eight[0], eight[1]);
}

/* Return e^x as the Cephes library does (x = n ln 2 + r): error about 2 units in the last place for x <= 88; 0 below -87; NaN for NaN. */
INLINE floats exponential(floats x) {
    const floats low = broadcast(-87.0f), high = broadcast(88.0f);
    const words too_small = (words)(x < low), not_a_number = (words)(x != x);
    x = __builtin_elementwise_min(__builtin_elementwise_max(x, low), high);
    floats n = __builtin_elementwise_roundeven(x * broadcast(1.44269504088896341f));
    floats r = fmadd(n, broadcast(-0.693359375f), x);
    r = fmadd(n, broadcast(2.12194440e-4f), r);
    floats p = broadcast(1.9875691500e-4f);
    p = fmadd(p, r, broadcast(1.3981999507e-3f));
    p = fmadd(p, r, broadcast(8.3334519073e-3f));
    p = fmadd(p, r, broadcast(4.1665795894e-2f));
    p = fmadd(p, r, broadcast(1.6666665459e-1f));
    p = fmadd(p, r, broadcast(5.0000001201e-1f));
    p = fmadd(p, r * r, r + broadcast(1.0f));
    ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return (floats)(((words)(p * (floats)power) & ~too_small) | not_a_number);
}

INLINE floats relu(floats x) { return (floats)((words)x & ~(words)(x < broadcast(0.0f))); }
INLINE floats sigmoid(floats x) { return broadcast(1.0f) / (broadcast(1.0f) + exponential(-x)); }

/* tanh(x) = 2 sigmoid(2 x) - 1. */
INLINE floats hyperbolic_tangent(floats x) { return broadcast(2.0f) * sigmoid(x + x) - broadcast(1.0f); }

#endif
