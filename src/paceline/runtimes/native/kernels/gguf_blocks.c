/* Repack GGUF blocks as panels when a model is loaded: 16 rows at a time are unpacked into cached memory, as models/gguf/blocks.py does, and then
 * written to a panel by panels.c or super_blocks.c. */
#include <stdlib.h>

#include "panels.h"
#include "vectors.h"

#define RUN 32
#define MAX_FACTORS (SUPER_BLOCK / 16)

/* GGUF's type numbers. */
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39 };

typedef uint32_t run_codes __attribute__((vector_size(RUN))); /* bytes, four in a word */
typedef uint8_t run_bytes __attribute__((vector_size(RUN)));
typedef uint32_t half_run __attribute__((vector_size(RUN / 2)));

/* Unpacked rows, from which panels are filled: codes of 4 bits in runs of 32, or bytes; float scales and minimums of small blocks, or float16 scales
 * and integer factors of super-blocks. Types without minimums do not write them. */
typedef struct {
    uint8_t *codes;
    float *scales, *minimums;
    uint16_t *halves, *half_minimums;
    uint8_t *factors, *minimum_factors;
} Groups;

typedef struct {
    int32_t type, columns, bytes; /* columns and bytes of a block */
    int32_t code_bits, group, has_minimum;
    void (*unpack)(const uint8_t *from, const Groups *to); /* unpacks one block */
} Type;

static float float_at(const uint8_t *from) {
    _Float16 half;
    memcpy(&half, from, sizeof half);
    return (float)half;
}

static void copy_half(const uint8_t *from, uint16_t *to) { memcpy(to, from, sizeof *to); }

static uint32_t word_of(const uint8_t *from) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

static run_codes load_run(const uint8_t *from) {
    run_codes codes;
    memcpy(&codes, from, sizeof codes);
    return codes;
}

static half_run load_half_run(const uint8_t *from) {
    half_run codes;
    memcpy(&codes, from, sizeof codes);
    return codes;
}

/* Move bits [at, at + count) of every byte to bit `to`; a macro because it is used with two vector types. */
#define BITS(codes, at, count, to) (((codes) >> (at) & ((1u << (count)) - 1) * 0x01010101u) << (to))

/* Join 32 codes: low four bits in the nibbles of 16 bytes, fifth bits in a word, spread over bytes by a multiplication. */
static void join_5_bits(const uint8_t *low, uint32_t fifth_bits, uint8_t offset, uint8_t *to) {
    const run_codes shifts = {0, 4, 8, 12, 16, 20, 24, 28};
    const run_codes spread = ((((run_codes){0} + fifth_bits) >> shifts & 15) * 0x00204081u & 0x01010101u) << 4;
    const half_run halves = load_half_run(low);
    const run_codes joined = SHUFFLE(BITS(halves, 0, 4, 0), BITS(halves, 4, 4, 0), 0, 1, 2, 3, 4, 5, 6, 7) | spread;
    const run_bytes codes = (run_bytes)joined - offset;
    memcpy(to, &codes, sizeof codes);
}

static void unpack_q4_0(const uint8_t *from, const Groups *to) {
    *to->scales = float_at(from);
    memcpy(to->codes, from + 2, 16);
}

static void unpack_q4_1(const uint8_t *from, const Groups *to) {
    *to->scales = float_at(from), *to->minimums = float_at(from + 2);
    memcpy(to->codes, from + 4, 16);
}

static void unpack_q5_0(const uint8_t *from, const Groups *to) {
    *to->scales = float_at(from);
    join_5_bits(from + 6, word_of(from + 2), 16, to->codes);
}

static void unpack_q5_1(const uint8_t *from, const Groups *to) {
    *to->scales = float_at(from), *to->minimums = float_at(from + 2);
    join_5_bits(from + 8, word_of(from + 4), 0, to->codes);
}

static void unpack_q8_0(const uint8_t *from, const Groups *to) {
    *to->scales = float_at(from);
    memcpy(to->codes, from + 2, RUN);
}

/* The scale is 2^(e - 128); e = 255 is NaN. */
static void unpack_mxfp4(const uint8_t *from, const Groups *to) {
    const uint32_t exponent = *from, bits = exponent == 255 ? 0x7FC00000u : exponent > 1 ? (exponent - 1) << 23 : 0x00200000u << exponent;
    memcpy(to->scales, &bits, sizeof bits);
    memcpy(to->codes, from + 1, 16);
}

/* Unpack run `run` of 2-bit codes, four runs in 32 bytes, with third bits or NULL. */
static void join_3_bits(const uint8_t *low, const uint8_t *third_bits, int run, uint8_t *to) {
    run_codes codes = BITS(load_run(low + run / 4 * RUN), run % 4 * 2, 2, 0);
    if (third_bits) codes |= BITS(load_run(third_bits), run, 1, 2);
    const half_run halves = SHUFFLE(codes, codes, 0, 1, 2, 3) | SHUFFLE(codes, codes, 4, 5, 6, 7) << 4;
    memcpy(to, &halves, sizeof halves);
}

static void unpack_q2_k(const uint8_t *from, const Groups *to) {
    copy_half(from + 80, to->halves), copy_half(from + 82, to->half_minimums);
    for (int i = 0; i < 16; i++) to->factors[i] = from[i] & 15, to->minimum_factors[i] = from[i] >> 4;
    for (int run = 0; run < 8; run++) join_3_bits(from + 16, NULL, run, to->codes + 16 * run);
}

static void unpack_q3_k(const uint8_t *from, const Groups *to) {
    const uint8_t *low = from + 96, *high = from + 104;
    copy_half(from + 108, to->halves);
    for (int i = 0; i < 16; i++) to->factors[i] = (uint8_t)(((low[i % 8] >> i / 8 * 4 & 15) | (high[i % 4] >> i / 4 * 2 & 3) << 4) - 32);
    for (int run = 0; run < 8; run++) join_3_bits(from + 32, from, run, to->codes + 16 * run);
}

static void unpack_6_bits(const uint8_t *from, const Groups *to) {
    copy_half(from, to->halves), copy_half(from + 2, to->half_minimums);
    const uint8_t *first = from + 4, *second = from + 8, *third = from + 12;
    for (int i = 0; i < 4; i++) {
        to->factors[i] = first[i] & 63, to->minimum_factors[i] = second[i] & 63;
        to->factors[i + 4] = (uint8_t)((third[i] & 15) | first[i] >> 6 << 4);
        to->minimum_factors[i + 4] = (uint8_t)(third[i] >> 4 | second[i] >> 6 << 4);
    }
}

/* 32 stored bytes hold a run in their low nibbles and the next one in the high nibbles. */
static void unpack_q4_k(const uint8_t *from, const Groups *to) {
    unpack_6_bits(from, to);
    for (int pair = 0; pair < 4; pair++) {
        const half_run front = load_half_run(from + 16 + RUN * pair), back = load_half_run(from + 32 + RUN * pair);
        const half_run runs[2] = {BITS(front, 0, 4, 0) | BITS(back, 0, 4, 4), BITS(front, 4, 4, 0) | BITS(back, 4, 4, 4)};
        memcpy(to->codes + RUN * pair, runs, sizeof runs);
    }
}

static void unpack_q5_k(const uint8_t *from, const Groups *to) {
    unpack_6_bits(from, to);
    const run_codes fifth_bits = load_run(from + 16);
    for (int run = 0; run < 8; run++) {
        const run_codes codes = BITS(load_run(from + 48 + run / 2 * RUN), run % 2 * 4, 4, 0) | BITS(fifth_bits, run, 1, 4);
        memcpy(to->codes + RUN * run, &codes, sizeof codes);
    }
}

static void unpack_q6_k(const uint8_t *from, const Groups *to) {
    copy_half(from + 208, to->halves);
    memcpy(to->factors, from + 192, MAX_FACTORS);
    for (int run = 0; run < 8; run++) {
        const run_codes low = load_run(from + run / 4 * 64 + run % 2 * RUN), high = load_run(from + 128 + run / 4 * RUN);
        const run_bytes codes = (run_bytes)(BITS(low, run % 4 / 2 * 4, 4, 0) | BITS(high, run % 4 * 2, 2, 4)) - 32;
        memcpy(to->codes + RUN * run, &codes, sizeof codes);
    }
}

static void unpack_iq4_xs(const uint8_t *from, const Groups *to) {
    copy_half(from, to->halves);
    const uint8_t *high = from + 2, *low = from + 4;
    for (int i = 0; i < 8; i++) to->factors[i] = (uint8_t)(((low[i / 2] >> i % 2 * 4 & 15) | (high[i / 4] >> i % 4 * 2 & 3) << 4) - 32);
    memcpy(to->codes, from + 8, SUPER_BLOCK / 2);
}

static const Type TYPES[] = {
    {Q4_0, RUN, 18, 4, 32, 0, unpack_q4_0},          {Q4_1, RUN, 20, 4, 32, 1, unpack_q4_1},
    {Q5_0, RUN, 22, 8, 32, 0, unpack_q5_0},          {Q5_1, RUN, 24, 8, 32, 1, unpack_q5_1},
    {Q8_0, RUN, 34, 8, 32, 0, unpack_q8_0},          {IQ4_NL, RUN, 18, 4, 32, 0, unpack_q4_0},
    {MXFP4, RUN, 17, 4, 32, 0, unpack_mxfp4},        {Q2_K, SUPER_BLOCK, 84, 4, 16, 1, unpack_q2_k},
    {Q3_K, SUPER_BLOCK, 110, 4, 16, 0, unpack_q3_k}, {Q4_K, SUPER_BLOCK, 144, 4, 32, 1, unpack_q4_k},
    {Q5_K, SUPER_BLOCK, 176, 8, 32, 1, unpack_q5_k}, {Q6_K, SUPER_BLOCK, 210, 8, 16, 0, unpack_q6_k},
    {IQ4_XS, SUPER_BLOCK, 136, 4, 32, 0, unpack_iq4_xs},
};

static size_t groups_in(const Type *type, size_t columns) { return columns / (size_t)type->group; }

/* Return pointers to row `row` of `columns` columns, at a column that begins a block of `block` columns. */
static Groups groups_at(const Groups *from, const Type *type, size_t row, size_t columns, size_t column, size_t block) {
    const size_t at = row * columns + column, groups = groups_in(type, at), blocks = at / block;
    return (Groups){from->codes + at * (size_t)type->code_bits / 8, from->scales + groups, from->minimums + groups, from->halves + blocks,
                    from->half_minimums + blocks, from->factors + groups, from->minimum_factors + groups};
}

/* Allocate memory for rows of `columns` columns in total; NULL = out of memory. The caller frees the result. */
static void *allocate(size_t columns, Groups *to) {
    const size_t groups = columns / 16, blocks = columns / RUN;
    uint8_t *const memory = malloc(columns + groups * (2 * sizeof(float) + 2) + blocks * 2 * sizeof(uint16_t));
    if (!memory) return NULL;
    to->scales = (float *)(void *)memory, to->minimums = to->scales + groups;
    to->halves = (uint16_t *)(to->minimums + groups), to->half_minimums = to->halves + blocks;
    to->factors = (uint8_t *)(to->half_minimums + blocks), to->minimum_factors = to->factors + groups;
    to->codes = to->minimum_factors + groups;
    return memory;
}

/* Copy an unpacked row with its runs in another order, or with the scale of each group computed. */
static void rearrange(const Blocks *from, const Type *type, const Groups *stored, const Groups *to) {
    const int is_small = type->columns == RUN, run_groups = RUN / type->group;
    for (int run = 0; run < from->columns / RUN; run++) {
        const size_t column = (size_t)(from->places ? from->places[run] : run) * RUN;
        const Groups own = groups_at(stored, type, 0, 0, (size_t)run * RUN, (size_t)type->columns);
        const Groups there = groups_at(to, type, 0, 0, column, from->block ? (size_t)from->block : RUN);
        memcpy(there.codes, own.codes, (size_t)(RUN * type->code_bits / 8));
        if (from->block) *there.halves = *own.halves, *there.half_minimums = *own.half_minimums;
        for (int g = 0; g < run_groups; g++) {
            if (from->block) {
                there.factors[g] = own.factors[g], there.minimum_factors[g] = own.minimum_factors[g];
                continue;
            }
            const float factor = type->has_minimum ? (float)own.factors[g] : (float)(int8_t)own.factors[g];
            there.scales[g] = is_small ? own.scales[g] : float_at((const uint8_t *)own.halves) * factor;
            if (type->has_minimum)
                there.minimums[g] = is_small ? own.minimums[g] : -(float_at((const uint8_t *)own.half_minimums) * (float)own.minimum_factors[g]);
        }
    }
}

static int is_finite(float x) { return x - x == 0.0f; }

static int has_finite_scales(const Groups *own, const Type *type, int columns) {
    int found = 1;
    for (int i = 0; i < columns / type->columns; i++) {
        if (type->columns == RUN)
            found &= is_finite(own->scales[i]) & (!type->has_minimum || is_finite(own->minimums[i]));
        else
            found &= (own->halves[i] & 0x7C00) != 0x7C00 && (!type->has_minimum || (own->half_minimums[i] & 0x7C00) != 0x7C00);
    }
    return found;
}

/* Unpack a row; return whether its scales are finite. `spare`: memory for a row. */
static int unpack_row(const Blocks *from, const Type *type, const uint8_t *stored, const Groups *spare, const Groups *to) {
    const int is_direct = !from->places && (from->block == SUPER_BLOCK || type->columns == RUN);
    const Groups *const first = is_direct ? to : spare;
    for (int column = 0; column < from->columns; column += type->columns, stored += type->bytes) {
        const Groups own = groups_at(first, type, 0, 0, (size_t)column, (size_t)type->columns);
        type->unpack(stored, &own);
    }
    const int found = has_finite_scales(first, type, from->columns);
    if (!is_direct) rearrange(from, type, spare, to);
    return found;
}

static void fill(const Blocks *from, const Type *type, const Groups *rows, int count, uint8_t *to) {
    const int64_t row_bytes = from->columns * type->code_bits / 8;
    if (from->block) {
        const SuperBlocks own = {from->kind, count, from->columns, from->block, from->zero_point, row_bytes, rows->codes,
                                 rows->halves, type->has_minimum ? rows->half_minimums : NULL, rows->factors,
                                 type->has_minimum ? rows->minimum_factors : NULL};
        paceline_fill_super_blocks(&own, 0, 1, to);
        return;
    }
    const Matrix own = {.kind = from->kind, .outputs = count, .columns = from->columns, .group = type->group, .row_bytes = row_bytes,
                        .codes = rows->codes, .scales = rows->scales, .minimums = rows->minimums};
    paceline_fill_panels(&own, from->kind, from->flipped, 0, 1, to);
}

/* Fill panels [begin, end). Return -1; or the number of the first output whose scale is not finite; or -2 = out of memory; or -3 = unknown type. */
int32_t paceline_pack_gguf_blocks(const Blocks *from, int32_t begin, int32_t end, int64_t panel_bytes, uint8_t *to) {
    const Type *type = TYPES, *const after = TYPES + sizeof TYPES / sizeof *TYPES;
    while (type < after && type->type != from->type) type++;
    if (type == after) return -3;
    const size_t columns = (size_t)from->columns, block = from->block ? (size_t)from->block : RUN;
    Groups rows;
    void *const memory = allocate((LANES + 1) * columns, &rows);
    if (!memory) return -2;
    const Groups spare = groups_at(&rows, type, LANES, columns, 0, RUN);
    int32_t wrong = -1;
    for (int panel = begin; panel < end && wrong < 0; panel++) {
        const int first = panel * LANES, count = from->outputs - first < LANES ? from->outputs - first : LANES;
        for (int row = 0; row < count && wrong < 0; row++) {
            const int64_t number = from->order ? from->order[first + row] : first + row;
            const Groups to_row = groups_at(&rows, type, (size_t)row, columns, 0, block);
            if (!unpack_row(from, type, from->rows + number * from->row_bytes, &spare, &to_row)) wrong = first + row;
        }
        if (wrong < 0) fill(from, type, &rows, count, to + panel * panel_bytes);
    }
    free(memory);
    return wrong;
}
