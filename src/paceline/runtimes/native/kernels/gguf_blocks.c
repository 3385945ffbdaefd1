/* Repack GGUF blocks as panels when a model is loaded. 16 rows at a time are unpacked into memory small enough for a cache, with the same results
 * as models/gguf/blocks.py. Then panels.c or super_blocks.c fills a panel with them. */
#include <math.h>
#include <stdlib.h>

#include "panels.h"

#define RUN_COLUMNS 32 /* columns of a run: consecutive columns whose codes GGUF stores together */
#define MAX_FACTORS (SUPER_BLOCK / 16)

/* GGUF's tensor type numbers (ggml_type). */
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39 };

typedef uint32_t run_codes __attribute__((vector_size(RUN_COLUMNS))); /* a code in each byte, accessed as words of four codes */
typedef uint8_t run_bytes __attribute__((vector_size(RUN_COLUMNS)));
typedef uint32_t half_run __attribute__((vector_size(RUN_COLUMNS / 2)));

/* Unpacked rows, in the form that paceline_fill_panels or paceline_fill_super_blocks reads. Codes have 4 or 8 bits. Blocks of 32 columns have float
 * scales and minimums; super-blocks have float16 scales and integer factors. Formats without minimums leave their minimums unset. */
typedef struct {
    uint8_t *codes;
    float *scales, *minimums;
    uint16_t *float16_scales, *float16_minimums;
    uint8_t *factors, *minimum_factors;
} UnpackedRows;

typedef struct {
    int32_t type, columns, bytes; /* ggml_type; columns and bytes of a block */
    int32_t code_bits, group, has_minimum;
    void (*unpack)(const uint8_t *from, const UnpackedRows *to); /* unpacks one block */
} GgufFormat;

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

/* Move bits [at, at + count) of each byte to bit `to`. A macro, because it is used with two vector types. */
#define MOVE_BITS(codes, at, count, to) (((codes) >> (at) & ((1u << (count)) - 1) * 0x01010101u) << (to))

/* Join 32 codes of 5 bits, minus `offset`. Low four bits: the nibbles of 16 bytes. A multiplication spreads four fifth bits over four bytes. */
static void join_5_bits(const uint8_t *low, uint32_t fifth_bits, uint8_t offset, uint8_t *to) {
    const run_codes shifts = {0, 4, 8, 12, 16, 20, 24, 28};
    const run_codes spread = ((((run_codes){0} + fifth_bits) >> shifts & 15) * 0x00204081u & 0x01010101u) << 4;
    const half_run halves = load_half_run(low);
    const run_codes joined = SHUFFLE(MOVE_BITS(halves, 0, 4, 0), MOVE_BITS(halves, 4, 4, 0), 0, 1, 2, 3, 4, 5, 6, 7) | spread;
    const run_bytes codes = (run_bytes)joined - offset;
    memcpy(to, &codes, sizeof codes);
}

static void unpack_q4_0(const uint8_t *from, const UnpackedRows *to) {
    *to->scales = load_one_float16(from);
    memcpy(to->codes, from + 2, 16);
}

static void unpack_q4_1(const uint8_t *from, const UnpackedRows *to) {
    *to->scales = load_one_float16(from), *to->minimums = load_one_float16(from + 2);
    memcpy(to->codes, from + 4, 16);
}

static void unpack_q5_0(const uint8_t *from, const UnpackedRows *to) {
    *to->scales = load_one_float16(from);
    join_5_bits(from + 6, load_word(from + 2), 16, to->codes);
}

static void unpack_q5_1(const uint8_t *from, const UnpackedRows *to) {
    *to->scales = load_one_float16(from), *to->minimums = load_one_float16(from + 2);
    join_5_bits(from + 8, load_word(from + 4), 0, to->codes);
}

static void unpack_q8_0(const uint8_t *from, const UnpackedRows *to) {
    *to->scales = load_one_float16(from);
    memcpy(to->codes, from + 2, RUN_COLUMNS);
}

/* The scale is 2^(e - 128) for the stored byte e; e = 255 is NaN. */
static void unpack_mxfp4(const uint8_t *from, const UnpackedRows *to) {
    const uint32_t exponent = *from, bits = exponent == 255 ? 0x7FC00000u : exponent > 1 ? (exponent - 1) << 23 : 0x00200000u << exponent;
    memcpy(to->scales, &bits, sizeof bits);
    memcpy(to->codes, from + 1, 16);
}

/* Unpack a run of codes of 2 or 3 bits. 32 bytes hold the low bits of four runs; third_bits: those of eight runs, NULL = 2-bit codes. */
static void join_2_or_3_bits(const uint8_t *low, const uint8_t *third_bits, int run, uint8_t *to) {
    run_codes codes = MOVE_BITS(load_run(low + run / 4 * RUN_COLUMNS), run % 4 * 2, 2, 0);
    if (third_bits) codes |= MOVE_BITS(load_run(third_bits), run, 1, 2);
    const half_run halves = SHUFFLE(codes, codes, 0, 1, 2, 3) | SHUFFLE(codes, codes, 4, 5, 6, 7) << 4;
    memcpy(to, &halves, sizeof halves);
}

static void unpack_q2_k(const uint8_t *from, const UnpackedRows *to) {
    memcpy(to->float16_scales, from + 80, 2), memcpy(to->float16_minimums, from + 82, 2);
    for (int i = 0; i < 16; i++) to->factors[i] = from[i] & 15, to->minimum_factors[i] = from[i] >> 4;
    for (int run = 0; run < 8; run++) join_2_or_3_bits(from + 16, NULL, run, to->codes + 16 * run);
}

static void unpack_q3_k(const uint8_t *from, const UnpackedRows *to) {
    const uint8_t *low = from + 96, *high = from + 104;
    memcpy(to->float16_scales, from + 108, 2);
    for (int i = 0; i < 16; i++) to->factors[i] = (uint8_t)(((low[i % 8] >> i / 8 * 4 & 15) | (high[i % 4] >> i / 4 * 2 & 3) << 4) - 32);
    for (int run = 0; run < 8; run++) join_2_or_3_bits(from + 32, from, run, to->codes + 16 * run);
}

static void unpack_6_bit_factors(const uint8_t *from, const UnpackedRows *to) {
    memcpy(to->float16_scales, from, 2), memcpy(to->float16_minimums, from + 2, 2);
    const uint8_t *first = from + 4, *second = from + 8, *third = from + 12;
    for (int i = 0; i < 4; i++) {
        to->factors[i] = first[i] & 63, to->minimum_factors[i] = second[i] & 63;
        to->factors[i + 4] = (uint8_t)((third[i] & 15) | first[i] >> 6 << 4);
        to->minimum_factors[i + 4] = (uint8_t)(third[i] >> 4 | second[i] >> 6 << 4);
    }
}

/* 32 stored bytes hold one run in their low nibbles and the next run in their high nibbles. */
static void unpack_q4_k(const uint8_t *from, const UnpackedRows *to) {
    unpack_6_bit_factors(from, to);
    for (int pair = 0; pair < 4; pair++) {
        const half_run first = load_half_run(from + 16 + RUN_COLUMNS * pair), second = load_half_run(from + 32 + RUN_COLUMNS * pair);
        const half_run runs[2] = {MOVE_BITS(first, 0, 4, 0) | MOVE_BITS(second, 0, 4, 4), MOVE_BITS(first, 4, 4, 0) | MOVE_BITS(second, 4, 4, 4)};
        memcpy(to->codes + RUN_COLUMNS * pair, runs, sizeof runs);
    }
}

static void unpack_q5_k(const uint8_t *from, const UnpackedRows *to) {
    unpack_6_bit_factors(from, to);
    const run_codes fifth_bits = load_run(from + 16);
    for (int run = 0; run < 8; run++) {
        const run_codes codes = MOVE_BITS(load_run(from + 48 + run / 2 * RUN_COLUMNS), run % 2 * 4, 4, 0) | MOVE_BITS(fifth_bits, run, 1, 4);
        memcpy(to->codes + RUN_COLUMNS * run, &codes, sizeof codes);
    }
}

static void unpack_q6_k(const uint8_t *from, const UnpackedRows *to) {
    memcpy(to->float16_scales, from + 208, 2);
    memcpy(to->factors, from + 192, MAX_FACTORS);
    for (int run = 0; run < 8; run++) {
        const run_codes low = load_run(from + run / 4 * 64 + run % 2 * RUN_COLUMNS), high = load_run(from + 128 + run / 4 * RUN_COLUMNS);
        const run_bytes codes = (run_bytes)(MOVE_BITS(low, run % 4 / 2 * 4, 4, 0) | MOVE_BITS(high, run % 4 * 2, 2, 4)) - 32;
        memcpy(to->codes + RUN_COLUMNS * run, &codes, sizeof codes);
    }
}

static void unpack_iq4_xs(const uint8_t *from, const UnpackedRows *to) {
    memcpy(to->float16_scales, from, 2);
    const uint8_t *high = from + 2, *low = from + 4;
    for (int i = 0; i < 8; i++) to->factors[i] = (uint8_t)(((low[i / 2] >> i % 2 * 4 & 15) | (high[i / 4] >> i % 4 * 2 & 3) << 4) - 32);
    memcpy(to->codes, from + 8, SUPER_BLOCK / 2);
}

static const GgufFormat FORMATS[] = {
    {Q4_0, RUN_COLUMNS, 18, 4, 32, 0, unpack_q4_0},          {Q4_1, RUN_COLUMNS, 20, 4, 32, 1, unpack_q4_1},
    {Q5_0, RUN_COLUMNS, 22, 8, 32, 0, unpack_q5_0},          {Q5_1, RUN_COLUMNS, 24, 8, 32, 1, unpack_q5_1},
    {Q8_0, RUN_COLUMNS, 34, 8, 32, 0, unpack_q8_0},          {IQ4_NL, RUN_COLUMNS, 18, 4, 32, 0, unpack_q4_0},
    {MXFP4, RUN_COLUMNS, 17, 4, 32, 0, unpack_mxfp4},        {Q2_K, SUPER_BLOCK, 84, 4, 16, 1, unpack_q2_k},
    {Q3_K, SUPER_BLOCK, 110, 4, 16, 0, unpack_q3_k}, {Q4_K, SUPER_BLOCK, 144, 4, 32, 1, unpack_q4_k},
    {Q5_K, SUPER_BLOCK, 176, 8, 32, 1, unpack_q5_k}, {Q6_K, SUPER_BLOCK, 210, 8, 16, 0, unpack_q6_k},
    {IQ4_XS, SUPER_BLOCK, 136, 4, 32, 0, unpack_iq4_xs},
};

static size_t num_groups(const GgufFormat *format, size_t columns) { return columns / (size_t)format->group; }

/* Return pointers to one row of `from`, starting at `column`, which begins a block. columns, block: columns per row, per block. */
static UnpackedRows unpacked_rows_at(const UnpackedRows *from, const GgufFormat *format, size_t row, size_t columns, size_t column, size_t block) {
    const size_t at = row * columns + column, groups = num_groups(format, at), blocks = at / block;
    return (UnpackedRows){from->codes + at * (size_t)format->code_bits / 8, from->scales + groups, from->minimums + groups, from->float16_scales + blocks,
                    from->float16_minimums + blocks, from->factors + groups, from->minimum_factors + groups};
}

/* Allocate memory, which the caller frees, for rows with `columns` columns in total. Return NULL if out of memory. */
static void *allocate_rows(size_t columns, UnpackedRows *to) {
    const size_t groups = columns / 16, blocks = columns / RUN_COLUMNS;
    uint8_t *const memory = malloc(columns + groups * (2 * sizeof(float) + 2) + blocks * 2 * sizeof(uint16_t));
    if (!memory) return NULL;
    to->scales = (float *)(void *)memory, to->minimums = to->scales + groups;
    to->float16_scales = (uint16_t *)(to->minimums + groups), to->float16_minimums = to->float16_scales + blocks;
    to->factors = (uint8_t *)(to->float16_minimums + blocks), to->minimum_factors = to->factors + groups;
    to->codes = to->minimum_factors + groups;
    return memory;
}

/* Copy an unpacked row with its runs in the order of run_positions. If scale_columns is 0, compute the float scale of each group. */
static void reorder_runs(const GgufBlocks *from, const GgufFormat *format, const UnpackedRows *stored, const UnpackedRows *to) {
    const int has_float_scales = format->columns == RUN_COLUMNS, run_groups = RUN_COLUMNS / format->group;
    for (int run = 0; run < from->columns / RUN_COLUMNS; run++) {
        const size_t column = (size_t)(from->run_positions ? from->run_positions[run] : run) * RUN_COLUMNS;
        const UnpackedRows source = unpacked_rows_at(stored, format, 0, 0, (size_t)run * RUN_COLUMNS, (size_t)format->columns);
        const UnpackedRows target = unpacked_rows_at(to, format, 0, 0, column, from->scale_columns ? (size_t)from->scale_columns : RUN_COLUMNS);
        memcpy(target.codes, source.codes, (size_t)(RUN_COLUMNS * format->code_bits / 8));
        if (from->scale_columns) *target.float16_scales = *source.float16_scales, *target.float16_minimums = *source.float16_minimums;
        for (int g = 0; g < run_groups; g++) {
            if (from->scale_columns) {
                target.factors[g] = source.factors[g], target.minimum_factors[g] = source.minimum_factors[g];
                continue;
            }
            const float factor = format->has_minimum ? (float)source.factors[g] : (float)(int8_t)source.factors[g];
            target.scales[g] = has_float_scales ? source.scales[g] : load_one_float16((const uint8_t *)source.float16_scales) * factor;
            if (format->has_minimum)
                target.minimums[g] = has_float_scales ? source.minimums[g]
                                                      : -(load_one_float16((const uint8_t *)source.float16_minimums) * (float)source.minimum_factors[g]);
        }
    }
}

static int has_finite_scales(const UnpackedRows *row, const GgufFormat *format, int columns) {
    int is_finite = 1;
    for (int i = 0; i < columns / format->columns; i++) {
        if (format->columns == RUN_COLUMNS)
            is_finite &= isfinite(row->scales[i]) && (!format->has_minimum || isfinite(row->minimums[i]));
        else
            is_finite &= (row->float16_scales[i] & 0x7C00) != 0x7C00 && (!format->has_minimum || (row->float16_minimums[i] & 0x7C00) != 0x7C00);
    }
    return is_finite;
}

/* Unpack a row; return whether its scales are finite. scratch: memory for another row, used if runs are reordered. */
static int unpack_row(const GgufBlocks *from, const GgufFormat *format, const uint8_t *stored, const UnpackedRows *scratch, const UnpackedRows *to) {
    const int is_direct = !from->run_positions && (from->scale_columns == SUPER_BLOCK || format->columns == RUN_COLUMNS);
    const UnpackedRows *const first = is_direct ? to : scratch;
    for (int column = 0; column < from->columns; column += format->columns, stored += format->bytes) {
        const UnpackedRows block = unpacked_rows_at(first, format, 0, 0, (size_t)column, (size_t)format->columns);
        format->unpack(stored, &block);
    }
    const int is_finite = has_finite_scales(first, format, from->columns);
    if (!is_direct) reorder_runs(from, format, scratch, to);
    return is_finite;
}

static void fill_panels(const GgufBlocks *from, const GgufFormat *format, const UnpackedRows *rows, int count, uint8_t *to) {
    const int64_t row_bytes = from->columns * format->code_bits / 8;
    if (from->scale_columns) {
        const SuperBlocks matrix = {from->kind, count, from->columns, from->scale_columns, from->zero_point, row_bytes, rows->codes,
                                 rows->float16_scales, format->has_minimum ? rows->float16_minimums : NULL, rows->factors,
                                 format->has_minimum ? rows->minimum_factors : NULL};
        paceline_fill_super_blocks(&matrix, 0, 1, to);
        return;
    }
    const Matrix matrix = {.kind = from->kind, .outputs = count, .columns = from->columns, .group = format->group, .row_bytes = row_bytes,
                        .codes = rows->codes, .scales = rows->scales, .minimums = rows->minimums};
    paceline_fill_panels(&matrix, from->kind, from->sign_mask, 0, 1, to);
}

/* Fill panels [begin, end). Return -1 = success, -2 = no memory, -3 = unknown type, >= 0: index of an output whose scale is not finite. */
int32_t paceline_pack_gguf_blocks(const GgufBlocks *from, int32_t begin, int32_t end, int64_t panel_bytes, uint8_t *to) {
    const GgufFormat *format = FORMATS, *const after = FORMATS + sizeof FORMATS / sizeof *FORMATS;
    while (format < after && format->type != from->type) format++;
    if (format == after) return -3;
    const size_t columns = (size_t)from->columns, block = from->scale_columns ? (size_t)from->scale_columns : RUN_COLUMNS;
    UnpackedRows rows;
    void *const memory = allocate_rows((LANES + 1) * columns, &rows);
    if (!memory) return -2;
    const UnpackedRows scratch = unpacked_rows_at(&rows, format, LANES, columns, 0, RUN_COLUMNS);
    int32_t failure = -1;
    for (int panel = begin; panel < end && failure < 0; panel++) {
        const int first = panel * LANES, count = from->outputs - first < LANES ? from->outputs - first : LANES;
        for (int row = 0; row < count && failure < 0; row++) {
            const int64_t number = from->row_order ? from->row_order[first + row] : first + row;
            const UnpackedRows to_row = unpacked_rows_at(&rows, format, (size_t)row, columns, 0, block);
            if (!unpack_row(from, format, from->rows + number * from->row_bytes, &scratch, &to_row)) failure = first + row;
        }
        if (failure < 0) fill_panels(from, format, &rows, count, to + panel * panel_bytes);
    }
    free(memory);
    return failure;
}
