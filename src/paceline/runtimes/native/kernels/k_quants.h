/* GGUF's K-quants and IQ4_XS in panels, with as many bits as in the file: a table of the formats, and how scales and codes are decoded.
 *
 * A super-block has 256 columns in groups of 32 or 16. The scale of a group is an integer factor times a float16 scale; its minimum is minus an
 * integer factor times a float16 minimum. These products are exact in float32, so results have the same bits as with scales stored as float32. The
 * float16 numbers are those of the super-block, or, if its columns were reordered, of each half of it (`scale_columns` = 128); [halves]: 1 or 2.
 *
 * A panel has, for each super-block, a header and then the codes of all groups; [16] means one number for each output:
 *     Q4_K, Q5_K  header: float16 [halves][scale, minimum][16]; words [3][16]: factors of groups 0 to 3, of 4 to 7, minimum factors of 0 to 3,
 *                 each 6 bits of a byte; the minimum factors of groups 4 to 7 are in the high 2 bits of these bytes, lowest first
 *     Q6_K        header: float16 [2 halves][16]; int8 factors [16 groups][16]
 *                 codes of a group (Q4_K, too): in Q5_K and Q6_K a word of high bits [16]; then the low 4 bits as in panels.h
 *     Q2_K        header: float16 [halves][scale, minimum][16]; bytes [16 groups][16]: factor in the low nibble, minimum's factor in the high one;
 *                 codes of a group: a word [16] with columns 4 i to 4 i + 3 at bit 2 i of its four bytes
 *     Q3_K        header: float16 [2 halves][16]; words [3][16]: low 4 bits of factors 0 to 7, of 8 to 15, high 2 bits of all;
 *                 codes of two groups: a word of third bits [16], then for each group a word as in Q2_K
 *     IQ4_XS      header: [halves][float16 [16], 16 bits [16] with the high 2 bits of 8 factors]; a word [16]: low 4 bits of the factors;
 *                 codes of a group as in panels.h; they are indices into a table of values */
#ifndef PACELINE_K_QUANTS_H
#define PACELINE_K_QUANTS_H

#include "panels.h"

#define MAX_GROUPS (SUPER_BLOCK / 16)

typedef struct {
    int group, low_bits, high_bits; /* columns of a group; low bits and high bits of a code are stored separately */
    int has_minimums;
    int two_halves;   /* 1 = the header has float16 scales of both halves even if they are equal */
    int factor_bytes; /* bytes of the factors of a super-block */
} KQuant;

static const KQuant K_QUANTS[] = {
    [PANELS_Q4_K - PANELS_Q4_K] = {32, 4, 0, 1, 0, 192}, [PANELS_Q5_K - PANELS_Q4_K] = {32, 4, 1, 1, 0, 192},
    [PANELS_Q6_K - PANELS_Q4_K] = {16, 4, 2, 0, 1, 256}, [PANELS_Q2_K - PANELS_Q4_K] = {16, 2, 0, 1, 0, 256},
    [PANELS_Q3_K - PANELS_Q4_K] = {16, 2, 1, 0, 1, 192}, [PANELS_IQ4_XS - PANELS_Q4_K] = {32, 4, 0, 0, 0, 64},
};
#define FORMAT(kind) (&K_QUANTS[(kind) - PANELS_Q4_K])

INLINE int header_scale_bytes(const int kind, int scale_columns) { return FORMAT(kind)->two_halves ? 64 : 64 * (SUPER_BLOCK / scale_columns); }
INLINE int header_bytes(const int kind, int scale_columns) { return header_scale_bytes(kind, scale_columns) + FORMAT(kind)->factor_bytes; }
INLINE int super_block_codes_bytes(const int kind) { return SUPER_BLOCK / 8 * LANES * (FORMAT(kind)->low_bits + FORMAT(kind)->high_bits); }

INLINE floats to_floats(words factors) { return __builtin_convertvector((ints)factors, floats); }

/* Decode the scales and minimums of a super-block of Q4_K or Q5_K, whose factors have 6 bits. */
INLINE void decode_6_bit_header(const uint8_t *header, int scale_columns, floats *scales, floats *minimums) {
    const int has_one = scale_columns == SUPER_BLOCK;
    const uint8_t *packed = header + (has_one ? 64 : 128);
    const words first = load_words(packed), second = load_words(packed + 64), third = load_words(packed + 128);
    const words last = (first >> 6 & 0x03030303u) | (second >> 4 & 0x0C0C0C0Cu) | (third >> 2 & 0x30303030u);
    const words factors[] = {first & 0x3F3F3F3Fu, second & 0x3F3F3F3Fu, third & 0x3F3F3F3Fu, last};
    floats scale = load_float16(header), minimum = -load_float16(header + 32);
    _Pragma("unroll") for (int g = 0; g < 8; g++) {
        if (g == 4 && !has_one) {
            scale = load_float16(header + 64);
            minimum = -load_float16(header + 96);
        }
        scales[g] = scale * to_floats(factors[g / 4] >> g % 4 * 8 & 255u);
        minimums[g] = minimum * to_floats(factors[2 + g / 4] >> g % 4 * 8 & 255u);
    }
}

/* Decode the scales of a super-block of Q6_K, whose factors have 8 bits. */
INLINE void decode_8_bit_header(const uint8_t *header, floats *scales) {
    const floats halves[2] = {load_float16(header), load_float16(header + 32)};
    _Pragma("unroll") for (int g = 0; g < MAX_GROUPS; g++) {
        signed_bytes factors;
        memcpy(&factors, header + 64 + g * LANES, sizeof factors);
        scales[g] = halves[g / (MAX_GROUPS / 2)] * __builtin_convertvector(__builtin_convertvector(factors, ints), floats);
    }
}

/* Decode the scales of a super-block of Q2_K, Q3_K or IQ4_XS, and the minimums of Q2_K. Six-bit factors are stored with 32 added. */
INLINE void decode_low_bit_header(const uint8_t *header, int scale_columns, floats *scales, floats *minimums, const int kind) {
    const int second = scale_columns == SUPER_BLOCK ? 0 : kind == PANELS_Q3_K ? 32 : 64; /* byte offset of the second half's scales */
    const floats halves[2] = {load_float16(header), load_float16(header + second)};
    const uint8_t *packed = header + header_scale_bytes(kind, scale_columns);
    if (kind == PANELS_Q2_K) {
        const floats minimum[2] = {-load_float16(header + 32), -load_float16(header + second + 32)};
        _Pragma("unroll") for (int g = 0; g < MAX_GROUPS; g++) {
            bytes both;
            memcpy(&both, packed + g * LANES, sizeof both);
            scales[g] = halves[g / 8] * __builtin_convertvector(__builtin_convertvector(both & 15, ints), floats);
            minimums[g] = minimum[g / 8] * __builtin_convertvector(__builtin_convertvector(both >> 4, ints), floats);
        }
        return;
    }
    words high;
    if (kind == PANELS_Q3_K) {
        high = load_words(packed + 2 * sizeof(words));
    } else {
        halfwords stored;
        memcpy(&stored, header + 32, sizeof stored);
        high = __builtin_convertvector(stored, words);
    }
    const int groups = SUPER_BLOCK / FORMAT(kind)->group;
    _Pragma("unroll") for (int g = 0; g < groups; g++) {
        const words low = load_words(packed + (size_t)(g / 8) * sizeof(words));
        const ints factor = (ints)((low >> (4 * (g % 8)) & 15u) | (high >> (2 * g) & 3u) << 4) - 32;
        scales[g] = halves[g / (groups / 2)] * __builtin_convertvector(factor, floats);
    }
}

/* Decode the scales and minimums of one super-block in each of `panels` panels, which are panel_bytes apart. */
INLINE void decode_header(const uint8_t *stored, size_t panel_bytes, int scale_columns, floats scales[][MAX_GROUPS], floats minimums[][MAX_GROUPS],
                          const int panels, const int kind) {
    EACH_PANEL {
        const uint8_t *const header = stored + (size_t)n * panel_bytes;
        if (kind == PANELS_Q4_K || kind == PANELS_Q5_K) decode_6_bit_header(header, scale_columns, scales[n], minimums[n]);
        else if (kind == PANELS_Q6_K) decode_8_bit_header(header, scales[n]);
        else decode_low_bit_header(header, scale_columns, scales[n], minimums[n], kind);
    }
}

/* Return the codes of quad `number` of a group of Q4_K, Q5_K or Q6_K. codes: the word with its low bits; high: the high bits of the group. */
INLINE words join_quad(words codes, words high, const int number, const int high_bits) {
    const words low = select_nibbles(codes, number % 2);
    if (!high_bits) return low;
    const int at = high_bits * number, ones = high_bits == 1 ? 0x10101010 : 0x30303030;
    return low | ((at > 4 ? high >> (at - 4) : high << (4 - at)) & (uint32_t)ones);
}

/* Add the integer sums of group g, times its scale, and its minimums to the float sums of all panels and rows. */
INLINE void add_group_sums(const GroupSums *sums, const float *x, int g, floats scales[][MAX_GROUPS], floats minimums[][MAX_GROUPS],
                           floats sum[][MAX_ROWS], const int rows, const int panels, const int kind) {
    EACH_PANEL {
        EACH_ROW sum[n][row] = fmadd(__builtin_convertvector(sums->dot[n][row], floats), scales[n][g] * broadcast(x[row]), sum[n][row]);
        if (FORMAT(kind)->has_minimums) EACH_ROW sum[n][row] = fmadd(minimums[n][g], broadcast(x[2 * rows + row]), sum[n][row]);
    }
}

/* Return the initial value of a group's integer sums; a constant 0 for kinds without a zero point (Q4_K, Q5_K), so that compilers can omit it. */
INLINE int32_t initial_group_sum(const int32_t *offsets, const int row, const int kind) { return !FORMAT(kind)->has_minimums ? offsets[row] : 0; }

/* Whether low_bit_blocks.c implements a kind: Q2_K, Q3_K and IQ4_XS, which have less than 4.5 bits per weight. */
#define IS_LOW_BIT(kind) ((kind) >= PANELS_Q2_K)
Multiply multiply_q2_k, multiply_q3_k, multiply_iq4_xs;
int64_t paceline_super_block_bytes(int32_t columns, int32_t scale_columns, int32_t kind);
void fill_low_bit_blocks(const SuperBlocks *from, int32_t begin, int32_t end, uint8_t *to);

#endif
