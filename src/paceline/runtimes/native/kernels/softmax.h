/* Softmax with powers of two instead of e^x (scores are multiplied by log2 e), and pairs of bfloat16 weights, the operands of dot_bf16. */
#ifndef PACELINE_SOFTMAX_H
#define PACELINE_SOFTMAX_H

#include "bf16.h"

/* Broadcast a pair of bfloat16, stored by pack_bf16_pairs in PAIR_FLOATS floats, to all lanes. */
#ifdef __AVX512BF16__
#define PAIR_FLOATS 1
INLINE bf16s broadcast_bf16_pair(const float *from) {
    uint32_t pair;
    memcpy(&pair, from, sizeof pair);
    return (words){0} + pair;
}
#else
#define PAIR_FLOATS 2
INLINE bf16s broadcast_bf16_pair(const float *from) { return (bf16s){broadcast(from[0]), broadcast(from[1])}; }
#endif

/* Round floats [from, end) of x to pairs of bfloat16, in place. Pair i is at x[i * PAIR_FLOATS]; from and end are multiples of 32. */
INLINE void pack_bf16_pairs(float *x, int from, int end) {
    for (int i = from; i < end; i += 2 * LANES) {
        const floats a = round_to_bf16(load(x + i)), b = round_to_bf16(load(x + i + LANES));
#ifdef __AVX512BF16__
        store(x + i / 2, (floats)join_bf16(EVEN_LANES(a, b), ODD_LANES(a, b)));
#else
        store(x + i, a);
        store(x + i + LANES, b);
#endif
    }
}

/* Vectors computed together: a single vector would be slow, because each instruction of powers_of_two needs the result of the previous one. */
#ifdef __AVX512F__
#define MAX_VECTORS 4
#else
#define MAX_VECTORS 2
#endif

#define LOG2_E 1.44269504088896341f

/* Return the maximum; b if a or b is NaN, as the instruction maxps does. */
INLINE floats maximum(floats a, floats b) {
#ifdef __AVX512F__
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    const words is_first = (words)(a > b);
    return (floats)(((words)a & is_first) | ((words)b & ~is_first));
#endif
}

#define EACH_VECTOR _Pragma("unroll") for (int i = 0; i < count; i++)

/* Replace each x <= 0 by 2^x: 0 below -125.5, exact for 0, NaN for NaN. The error is one unit in the last place; for_bf16, it is 3e-6, enough for a
 * result that is rounded to bfloat16. The integer part of x becomes the exponent. The polynomial computes 2 * 2^fraction, so that the smallest
 * exponent field, 0, gives the result 0. */
INLINE void powers_of_two(floats *x, const int count, const int for_bf16) {
    static const float exact[] = {3.0706723639e-4f, 2.6797748891e-3f, 1.9236874717e-2f, 1.1100664942e-1f, 4.8045295827e-1f, 1.3862944057f, 2.0f};
    static const float rounded[] = {1.9165705731e-2f, 1.1181284985e-1f, 4.8048197234e-1f, 1.3862483867f, 2.0f};
    const float *coefficients = for_bf16 ? rounded : exact;
    const int degree = for_bf16 ? 4 : 6;
    const floats shift = broadcast(12582912.0f + 126.0f); /* 1.5 * 2^23: the sum's low bits are the rounded integer */
    floats whole[MAX_VECTORS], p[MAX_VECTORS];
    EACH_VECTOR x[i] = maximum(broadcast(-126.0f), x[i]);
    EACH_VECTOR whole[i] = x[i] + shift;
    EACH_VECTOR p[i] = whole[i] - shift;
    EACH_VECTOR x[i] -= p[i];
    EACH_VECTOR p[i] = fmadd(broadcast(coefficients[0]), x[i], broadcast(coefficients[1]));
    _Pragma("unroll") for (int term = 2; term <= degree; term++) EACH_VECTOR p[i] = fmadd(p[i], x[i], broadcast(coefficients[term]));
    EACH_VECTOR x[i] = p[i] * (floats)((words)whole[i] << 23);
}

INLINE float power_of_two(float x) {
    floats v = broadcast(x);
    powers_of_two(&v, 1, 0);
    return v[0];
}

INLINE float largest_lane(floats v) {
    v = maximum(v, SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = maximum(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = maximum(v, SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    v = maximum(v, SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return v[0];
}

/* Return the maximum of scores [first, last); both are multiples of 32. */
INLINE float largest_score(const float *scores, int first, int last) {
    floats even = load(scores + first), odd = load(scores + first + LANES);
    for (int i = first + 2 * LANES; i < last; i += 2 * LANES) {
        even = maximum(load(scores + i), even);
        odd = maximum(load(scores + i + LANES), odd);
    }
    return largest_lane(maximum(even, odd));
}

/* Round 32 weights to bfloat16, store them as pairs (see pack_bf16_pairs), and return `sum` plus the rounded weights. */
INLINE floats store_bf16_pairs(floats a, floats b, floats sum, float *to) {
#ifdef __AVX512BF16__
    const words both = (words)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    store(to, (floats)both);
    return dot_bf16(both, (words){0} + 0x3F803F80u, sum); /* with pairs of 1.0, it adds both weights */
#else
    a = round_to_bf16(a);
    b = round_to_bf16(b);
    store(to, a);
    store(to + LANES, b);
    sum += ODD_LANES(a, b);
    return sum + EVEN_LANES(a, b);
#endif
}

/* The part of exp2_weights for `count` vectors of scores from index `at` on: return `sum` plus their weights. */
INLINE floats exp2_vectors(float *scores, int at, const int count, float factor, float largest, floats sum, const int for_bf16) {
    floats x[MAX_VECTORS];
    EACH_VECTOR x[i] = load(scores + at + i * LANES) * broadcast(factor);
    EACH_VECTOR x[i] -= broadcast(largest);
    powers_of_two(x, count, for_bf16);
    if (for_bf16)
        for (int i = 0; i < count; i += 2) sum = store_bf16_pairs(x[i], x[i + 1], sum, scores + (at / 2 + i / 2 * LANES) * PAIR_FLOATS);
    else
        EACH_VECTOR {
            store(scores + at + i * LANES, x[i]);
            sum += x[i];
        }
    return sum;
}

/* Replace scores [first, last) by 2^(factor * score - largest), as pairs of bfloat16 if for_bf16. Return their sum. first, last: multiples of 32. */
INLINE float exp2_weights(float *scores, int first, int last, float factor, float largest, const int for_bf16) {
    floats sum = broadcast(0.0f);
    int at = first;
    for (; at + MAX_VECTORS * LANES <= last; at += MAX_VECTORS * LANES)
        sum = exp2_vectors(scores, at, MAX_VECTORS, factor, largest, sum, for_bf16);
    for (; at < last; at += 2 * LANES) sum = exp2_vectors(scores, at, 2, factor, largest, sum, for_bf16);
    return lane_sum(sum);
}

#endif
