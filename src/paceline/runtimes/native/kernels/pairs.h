/* Pairs of bfloat16: 32 values as 16 pairs, and their products added to 16 sums, bit for bit what the instruction vdpbf16ps does:
 * first the second values' product, then the first ones', each with one rounding (a product of two bfloat16 is exact in float32). */
#ifndef PACELINE_PAIRS_H
#define PACELINE_PAIRS_H

#include "vectors.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define PAIRED (2 * LANES)

#ifdef __AVX512BF16__
typedef words pairs; /* the first value of each pair in the low half */

INLINE pairs pair_up(floats first, floats second) { return (words)first >> 16 | (words)second; }

INLINE pairs pairs_of(words stored) { return stored; }

INLINE floats multiply_pairs(pairs w, pairs x, floats sum) { return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x); }
#else
typedef struct {
    floats first, second;
} pairs;

/* Both exact in bfloat16. */
INLINE pairs pair_up(floats first, floats second) { return (pairs){first, second}; }

/* 32 bfloat16 as they lie in memory. */
INLINE pairs pairs_of(words stored) { return (pairs){(floats)(stored << 16), (floats)(stored & 0xFFFF0000u)}; }

INLINE floats multiply_pairs(pairs w, pairs x, floats sum) { return fused(w.first, x.first, fused(w.second, x.second, sum)); }
#endif

INLINE pairs load_pairs(const float *from) {
    pairs v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* Floats that a step of 32 packed columns takes. */
#define PAIRS_FLOATS (sizeof(pairs) / sizeof(float))

/* The nearest bfloat16, ties to the even one. */
INLINE floats round_to_bf16(floats x) {
    const words bits = (words)x, not_a_number = (words)(x != x);
    const words nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
    return (floats)((nearest & ~not_a_number) | (not_a_number & 0x7FC00000u));
}

#endif
