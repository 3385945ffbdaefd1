/* Dot products of bfloat16: in each of 16 lanes, two products are added to a sum. The result has the same bits on all processors,
 * those of the instruction vdpbf16ps: it adds the second value's product, rounds, adds the first value's product, and rounds again. Only
 * denormal float32 numbers differ: the instruction treats them as zero. */
#ifndef PACELINE_BF16_H
#define PACELINE_BF16_H

#include "vectors.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define BF16_STEP (2 * LANES) /* columns of a row that one bf16s vector holds: a pair in each lane */

#ifdef __AVX512BF16__
typedef words bf16s; /* the first value of each lane is in the low half */

INLINE bf16s join_bf16(floats first, floats second) { return (words)first >> 16 | (words)second; }
INLINE bf16s unpack_bf16(words stored) { return stored; }
INLINE floats dot_bf16(bf16s w, bf16s x, floats sum) { return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x); }
#else
typedef struct {
    floats first, second;
} bf16s;

/* Pair numbers that are already rounded to bfloat16. */
INLINE bf16s join_bf16(floats first, floats second) { return (bf16s){first, second}; }

/* Unpack 32 bfloat16 numbers: a pair in each 32-bit word, the first one in the low half. */
INLINE bf16s unpack_bf16(words stored) { return (bf16s){(floats)(stored << 16), (floats)(stored & 0xFFFF0000u)}; }

INLINE floats dot_bf16(bf16s w, bf16s x, floats sum) { return fmadd(w.first, x.first, fmadd(w.second, x.second, sum)); }
#endif

INLINE bf16s load_bf16(const float *from) {
    bf16s v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* Floats of memory for BF16_STEP packed columns. */
#define BF16_STEP_FLOATS (sizeof(bf16s) / sizeof(float))

/* Round to the nearest bfloat16, ties to even. */
INLINE floats round_to_bf16(floats x) {
    const words bits = (words)x, not_a_number = (words)(x != x);
    const words nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
    return (floats)((nearest & ~not_a_number) | (not_a_number & 0x7FC00000u));
}

#endif
