/* Dot products of bfloat16: 16 lanes of two values each, added to 16 sums. All processors give the bits of the instruction vdpbf16ps: the second
 * values' product is added first, then the first ones', each with one rounding. Only denormal float32 numbers differ: the instruction flushes
 * them to zero. */
#ifndef PACELINE_BF16_H
#define PACELINE_BF16_H

#include "vectors.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define BF16_STEP (2 * LANES)

#ifdef __AVX512BF16__
typedef words bf16s; /* the first value of each lane is in the low half */

INLINE bf16s join_bf16(floats first, floats second) { return (words)first >> 16 | (words)second; }

INLINE bf16s bf16_of(words stored) { return stored; }

INLINE floats dot_bf16(bf16s w, bf16s x, floats sum) { return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x); }
#else
typedef struct {
    floats first, second;
} bf16s;

/* Both numbers must be exact in bfloat16. */
INLINE bf16s join_bf16(floats first, floats second) { return (bf16s){first, second}; }

/* Convert 32 bfloat16 as stored. */
INLINE bf16s bf16_of(words stored) { return (bf16s){(floats)(stored << 16), (floats)(stored & 0xFFFF0000u)}; }

INLINE floats dot_bf16(bf16s w, bf16s x, floats sum) { return fused(w.first, x.first, fused(w.second, x.second, sum)); }
#endif

INLINE bf16s load_bf16(const float *from) {
    bf16s v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* Number of floats that 32 packed columns take. */
#define BF16_STEP_FLOATS (sizeof(bf16s) / sizeof(float))

/* Round to the nearest bfloat16, ties to even. */
INLINE floats round_to_bf16(floats x) {
    const words bits = (words)x, not_a_number = (words)(x != x);
    const words nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
    return (floats)((nearest & ~not_a_number) | (not_a_number & 0x7FC00000u));
}

#endif
