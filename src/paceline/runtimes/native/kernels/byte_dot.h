/* Dot products of bytes: in each of 16 lanes, the products of four unsigned weight codes with four signed codes of a row of x (a quad) are added to
 * an integer sum. Sums are exact, so all instruction sets give the same result.
 *
 * HAS_DOT: one instruction multiplies and adds a quad (x86 VNNI, Arm dot product); on NEON without it, six do. Arm takes signed weights, so DOT_SHIFT
 * is subtracted from 8-bit codes, and the sums start at a value that corrects this. Otherwise even and odd bytes are multiplied as 16-bit words.
 * HAS_PAIRS: without HAS_DOT, codes of at most six bits are multiplied with the instruction maddubs, whose 16-bit sums are widened after several
 * quads.
 * HAS_SIGNS: on AVX2, table values w are multiplied with maddubs as |w| times sign(w) * x, so that the sums fit in 16 bits. */
#ifndef PACELINE_BYTE_DOT_H
#define PACELINE_BYTE_DOT_H

#include "vectors.h"

#ifdef __AVX2__
#include <immintrin.h>
#define DOT_SHIFT 0
#else
#include <arm_neon.h>
#define DOT_SHIFT 128
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_NEON)
#define HAS_DOT 1
#else
#define HAS_DOT 0
#endif
#define HAS_PAIRS !HAS_DOT
#if HAS_PAIRS && !defined(__AVX512BW__)
#define HAS_SIGNS 1
#else
#define HAS_SIGNS 0
#endif
/* 32-bit words of a packed quad of x: for 8-bit codes (DOT_WORDS), for codes of at most 6 bits, and for values of a table. */
#define DOT_WORDS (HAS_DOT ? 1 : 2)
#define NARROW_WORDS (HAS_PAIRS ? 1 : DOT_WORDS)
#define TABLE_WORDS (HAS_SIGNS ? 1 : DOT_WORDS)
#define TABLE_SHIFT (HAS_SIGNS ? 128 : DOT_SHIFT)

typedef int16_t shorts __attribute__((vector_size(64)));

/* A 512-bit vector and the registers that it is divided into. */
typedef union {
    words all;
#if defined(__AVX512BW__)
    __m512i part[1];
#elif defined(__AVX2__)
    __m256i part[2];
#else
    uint8x16_t part[4];
#endif
} vector_parts;

INLINE ints broadcast_int(int32_t x) { return (ints){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

/* Store four quads of codes in [-127, 127], `step` words apart, in one word each, or in two: first the even codes, then the odd codes. */
INLINE void store_quads(int32_t *to, ints codes, size_t step, int num_words) {
    if (num_words == 1) {
        const signed_bytes quads = __builtin_convertvector(codes, signed_bytes);
        for (size_t i = 0; i < 4; i++) memcpy(to + i * step, (const uint8_t *)&quads + 4 * i, 4);
        return;
    }
    typedef uint32_t eight_words __attribute__((vector_size(32)));
    const eight_words left = (eight_words)SHUFFLE(codes, codes, 0, 1, 4, 5, 8, 9, 12, 13);
    const eight_words right = (eight_words)SHUFFLE(codes, codes, 2, 3, 6, 7, 10, 11, 14, 15), both = (left & 0xFFFF) | right << 16;
    for (size_t i = 0; i < 4; i++) memcpy(to + i * step, (const uint8_t *)&both + 8 * i, 8);
}

/* Replace each byte, an index below 16, by that byte of a table. */
INLINE words look_up_bytes(words indices, bytes table) {
#if defined(__AVX512BW__)
    return (words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4((__m128i)table), (__m512i)indices);
#elif defined(__AVX2__)
    vector_parts values = {indices};
    for (int i = 0; i < 2; i++) values.part[i] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256((__m128i)table), values.part[i]);
    return values.all;
#else
    vector_parts values = {indices};
    for (int i = 0; i < 4; i++) values.part[i] = vqtbl1q_u8((uint8x16_t)table, values.part[i]);
    return values.all;
#endif
}

/* Return the low or the high four bits of each byte. */
INLINE words select_nibbles(words codes, const int is_high) {
    typedef uint8_t all_bytes __attribute__((vector_size(64)));
    return is_high ? (words)((all_bytes)codes >> 4) : codes & 0x0F0F0F0Fu;
}

/* Weight codes prepared for dot_bytes, once for all rows: with HAS_DOT as they are, otherwise split into even and odd codes. */
typedef struct {
    words part[DOT_WORDS];
} weight_codes;

INLINE weight_codes to_weight_codes(words codes, const uint32_t shift) {
    codes ^= shift * 0x01010101u;
#if DOT_WORDS == 1
    return (weight_codes){{codes}};
#else
    return (weight_codes){{codes & 0x00FF00FFu, codes >> 8 & 0x00FF00FFu}};
#endif
}

/* A table of weight values: unsigned, or with HAS_SIGNS magnitudes and signs, after TABLE_SHIFT was subtracted. The sign of a weight is applied to
 * the codes q of a row by the instruction psignb (SIGN_BY_PSIGN) or, with higher throughput, by xor (SIGN_BY_XOR). But xor gives -q - 1 instead of
 * -q; add_negative_values computes the correction, once for all rows. So xor is faster only for many rows. */
enum { SIGN_BY_PSIGN, SIGN_BY_XOR };
typedef struct {
    bytes part[2];
} code_table;

INLINE code_table to_code_table(bytes values, const int sign_method) {
#if HAS_SIGNS
    const signed_bytes lowered = (signed_bytes)(values ^ 0x80), negative = lowered < 0;
    return (code_table){{(bytes)((lowered ^ negative) - negative), (bytes)(sign_method == SIGN_BY_XOR ? negative : lowered)}};
#else
    (void)sign_method;
    return (code_table){{values}};
#endif
}

typedef struct {
    words part[HAS_SIGNS ? 2 : DOT_WORDS];
} table_values;

INLINE table_values look_up_values(words codes, code_table table) {
#if HAS_SIGNS
    return (table_values){{look_up_bytes(codes, table.part[0]), look_up_bytes(codes, table.part[1])}};
#else
    const weight_codes w = to_weight_codes(look_up_bytes(codes, table.part[0]), DOT_SHIFT);
    table_values values;
    memcpy(&values, &w, sizeof w);
    return values;
#endif
}

#if DOT_WORDS == 2
/* Multiply signed 16-bit numbers and add the two products of each lane. */
INLINE ints multiply_shorts(words w, ints x) {
#if defined(__AVX512BW__)
    return (ints)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVX2__)
    vector_parts products = {w};
    const vector_parts factors = {(words)x};
    for (int i = 0; i < 2; i++) products.part[i] = _mm256_madd_epi16(products.part[i], factors.part[i]);
    return (ints)products.all;
#endif
}
#endif

#if HAS_PAIRS
typedef vector_parts pair_sums; /* 16-bit sums, two in a lane */
#if defined(__AVX512BW__)
#define MULTIPLY_PAIRS(w, x) _mm512_maddubs_epi16(w, x)
#define ADD_PAIRS(a, b) _mm512_add_epi16(a, b)
#define BROADCAST_QUAD(quad) _mm512_set1_epi32(quad)
#else
#define MULTIPLY_PAIRS(w, x) _mm256_maddubs_epi16(w, x)
#define ADD_PAIRS(a, b) _mm256_add_epi16(a, b)
#define BROADCAST_QUAD(quad) _mm256_set1_epi32(quad)
#endif

/* Multiply codes of at most 6 bits with a packed quad and add pairs of products (at most 2 * 63 * 127) to 16-bit sums. The empty asm keeps
 * compilers from reordering the additions, which would need more registers. */
INLINE void add_pair_products(pair_sums *sums, words codes, int32_t packed, const int is_first) {
    vector_parts w = {codes};
    for (size_t i = 0; i < sizeof w / sizeof *w.part; i++) {
        w.part[i] = MULTIPLY_PAIRS(w.part[i], BROADCAST_QUAD(packed));
        sums->part[i] = is_first ? w.part[i] : ADD_PAIRS(sums->part[i], w.part[i]);
        __asm__("" : "+x"(sums->part[i]));
    }
}

INLINE ints widen_pair_sums(const pair_sums *sums) { return multiply_shorts(sums->all, broadcast_int(0x00010001)); }
#endif

#ifdef __ARM_NEON
/* Return sum + products of weight codes with four copies of a quad of x. The empty asm keeps compilers from loading all weights of a group first,
 * for which there are not enough registers. */
INLINE ints dot_repeated(weight_codes w, int32x4_t quads, ints sum) {
    vector_parts sums = {(words)sum};
    const vector_parts codes = {w.part[0]};
    for (int i = 0; i < 4; i++) {
        const int8x16_t four = (int8x16_t)codes.part[i], x = (int8x16_t)quads;
#ifdef __ARM_FEATURE_DOTPROD
        sums.part[i] = (uint8x16_t)vdotq_s32((int32x4_t)sums.part[i], four, x);
#else
        const int32x4_t products = vpaddq_s32(vpaddlq_s16(vmull_s8(vget_low_s8(four), vget_low_s8(x))), vpaddlq_s16(vmull_high_s8(four, x)));
        sums.part[i] = (uint8x16_t)((int32x4_t)sums.part[i] + products);
#endif
        __asm__ volatile("" : "+w"(sums.part[i]));
    }
    return (ints)sums.all;
}
#endif

/* Return sum + products of weight codes with one packed quad, which is broadcast to all 16 lanes. */
INLINE ints dot_bytes(weight_codes w, const int32_t *packed, ints sum) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w.part[0], _mm512_set1_epi32(packed[0]));
#elif defined(__AVXVNNI__)
    vector_parts sums = {(words)sum};
    const vector_parts codes = {w.part[0]};
    for (int i = 0; i < 2; i++) sums.part[i] = _mm256_dpbusd_avx_epi32(sums.part[i], codes.part[i], _mm256_set1_epi32(packed[0]));
    return (ints)sums.all;
#elif defined(__ARM_NEON)
    return dot_repeated(w, vdupq_n_s32(packed[0]), sum);
#else
    return sum + multiply_shorts(w.part[0], broadcast_int(packed[0])) + multiply_shorts(w.part[1], broadcast_int(packed[1]));
#endif
}

/* Return sum + products of table values with one packed quad. */
INLINE ints dot_table_values(table_values w, const int32_t *packed, ints sum, const int sign_method) {
#if HAS_SIGNS
    vector_parts sums = {(words)sum};
    const vector_parts magnitude = {w.part[0]}, sign = {w.part[1]};
    const __m256i x = _mm256_set1_epi32(packed[0]);
    for (int i = 0; i < 2; i++) {
        const __m256i signed_x = sign_method == SIGN_BY_XOR ? _mm256_xor_si256(x, sign.part[i]) : _mm256_sign_epi8(x, sign.part[i]);
        sums.part[i] = _mm256_add_epi32(sums.part[i], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude.part[i], signed_x), _mm256_set1_epi16(1)));
        __asm__("" : "+x"(sums.part[i])); /* keeps the compiler from reordering, as in add_pair_products */
    }
    return (ints)sums.all;
#else
    (void)sign_method;
    weight_codes codes;
    memcpy(&codes, &w, sizeof codes);
    return dot_bytes(codes, packed, sum);
#endif
}

/* Sum of the negative weights, to subtract: a sum of SIGN_BY_XOR products is the exact sum plus it. 16 bits hold the sum of 256 weights. */
typedef vector_parts negative_sums;

INLINE void add_negative_values(negative_sums *sums, table_values w) {
#if HAS_SIGNS
    const vector_parts magnitude = {w.part[0]}, sign = {w.part[1]};
    for (int i = 0; i < 2; i++) sums->part[i] = ADD_PAIRS(sums->part[i], MULTIPLY_PAIRS(magnitude.part[i], sign.part[i]));
#else
    (void)sums, (void)w;
#endif
}

INLINE ints negative_total(const negative_sums *sums) {
#if HAS_SIGNS
    return widen_pair_sums(sums);
#else
    (void)sums;
    return broadcast_int(0);
#endif
}

#endif
