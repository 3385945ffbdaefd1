/* Scores of attention become weights: powers of two, for which the scale of the scores has log2 e in it. */
#ifndef PACELINE_SOFTMAX_H
#define PACELINE_SOFTMAX_H

#include "bf16.h"

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

/* Vectors of weights that are made together. */
#ifdef __AVX512F__
#define MOST_VECTORS 4
#else
#define MOST_VECTORS 2
#endif

#define LOG2_E 1.44269504088896341f

/* The larger one; b where either is not a number, as the instruction of x86. */
INLINE floats larger_of(floats a, floats b) {
#ifdef __AVX512F__
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    const words is_first = (words)(a > b);
    return (floats)(((words)a & is_first) | ((words)b & ~is_first));
#endif
}

#define EACH_VECTOR _Pragma("unroll") for (int i = 0; i < count; i++)

/* x becomes 2^x, for x <= 0; 0 below -125.5, 1 of 0, NaN of NaN. To about a unit in the last place, or, of what is rounded to bfloat16, to
 * 3e-6: the whole part of x becomes the exponent, of the rest there is a polynomial, twice as large, so that the smallest exponent makes 0.
 * Vectors go step by step together: each step waits for the one before. */
INLINE void powers_of_two(floats *x, const int count, const int is_rounded) {
    static const float exact[] = {3.0706723639e-4f, 2.6797748891e-3f, 1.9236874717e-2f, 1.1100664942e-1f, 4.8045295827e-1f, 1.3862944057f, 2.0f};
    static const float rounded[] = {1.9165705731e-2f, 1.1181284985e-1f, 4.8048197234e-1f, 1.3862483867f, 2.0f};
    const float *of = is_rounded ? rounded : exact;
    const int degree = is_rounded ? 4 : 6;
    const floats shift = broadcast(12582912.0f + 126.0f); /* 1.5 * 2^23: sums are whole numbers, in the low bits */
    floats whole[MOST_VECTORS], p[MOST_VECTORS];
    EACH_VECTOR x[i] = larger_of(broadcast(-126.0f), x[i]);
    EACH_VECTOR whole[i] = x[i] + shift;
    EACH_VECTOR p[i] = whole[i] - shift;
    EACH_VECTOR x[i] -= p[i];
    EACH_VECTOR p[i] = fused(broadcast(of[0]), x[i], broadcast(of[1]));
    _Pragma("unroll") for (int term = 2; term <= degree; term++) EACH_VECTOR p[i] = fused(p[i], x[i], broadcast(of[term]));
    EACH_VECTOR x[i] = p[i] * (floats)((words)whole[i] << 23);
}

INLINE float power_of_two(float x) {
    floats v = broadcast(x);
    powers_of_two(&v, 1, 0);
    return v[0];
}

INLINE float largest_lane(floats v) {
    v = larger_of(v, SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = larger_of(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = larger_of(v, SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    v = larger_of(v, SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return v[0];
}

/* The largest of scores [first, last), multiples of 32. */
INLINE float largest_score(const float *scores, int first, int last) {
    floats even = load(scores + first), odd = load(scores + first + LANES);
    for (int i = first + 2 * LANES; i < last; i += 2 * LANES) {
        even = larger_of(load(scores + i), even);
        odd = larger_of(load(scores + i + LANES), odd);
    }
    return largest_lane(larger_of(even, odd));
}

/* 32 weights, rounded to bfloat16, are laid out in pairs of neighbours at `to` (see pack_pairs), and added to a sum, as they are then. */
INLINE floats keep_pairs(floats a, floats b, floats sum, float *to) {
#ifdef __AVX512BF16__
    const words both = (words)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    store(to, (floats)both);
    return dot_bf16(both, (words){0} + 0x3F803F80u, sum); /* pairs of 1 */
#else
    a = round_to_bf16(a);
    b = round_to_bf16(b);
    store(to, a);
    store(to + LANES, b);
    sum += SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return sum + SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#endif
}

/* `count` vectors of weights_of; returns the sum. */
INLINE floats weigh_vectors(float *scores, int at, const int count, float factor, float largest, floats sum, const int is_rounded) {
    floats x[MOST_VECTORS];
    EACH_VECTOR x[i] = load(scores + at + i * LANES) * broadcast(factor);
    EACH_VECTOR x[i] -= broadcast(largest);
    powers_of_two(x, count, is_rounded);
    if (is_rounded)
        for (int i = 0; i < count; i += 2) sum = keep_pairs(x[i], x[i + 1], sum, scores + (at / 2 + i / 2 * LANES) * PAIR_FLOATS);
    else
        EACH_VECTOR {
            store(scores + at + i * LANES, x[i]);
            sum += x[i];
        }
    return sum;
}

/* Scores [first, last), multiples of 32, become weights 2^(factor * score - largest), as pairs of bfloat16 where `is_rounded`; their sum, as
 * they are then. */
INLINE float weights_of(float *scores, int first, int last, float factor, float largest, const int is_rounded) {
    floats sum = broadcast(0.0f);
    int at = first;
    for (; at + MOST_VECTORS * LANES <= last; at += MOST_VECTORS * LANES)
        sum = weigh_vectors(scores, at, MOST_VECTORS, factor, largest, sum, is_rounded);
    for (; at < last; at += 2 * LANES) sum = weigh_vectors(scores, at, 2, factor, largest, sum, is_rounded);
    return lane_sum(sum);
}

#endif
