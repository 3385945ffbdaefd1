/* Matrix products for processors with few registers (MAX_ROWS == 4: AVX2, NEON), in an order that loads or decodes weights less often.
 *
 * Quantised weights: panels of K-quants (k_quants.h) and of codes that are indices into a table (panels.h) are decoded once for several blocks of
 * input rows. With Arm's i8mm, a decoded panel is multiplied two outputs by two input rows at a time.
 * bfloat16 with AVX2: 3 or 4 rows are multiplied in blocks of columns that stay in the first-level cache. The 16 lanes of a sum are independent until
 * its end. So one half of the lanes is computed for several outputs, whose full vectors would not fit in registers; then the other half. Each lane
 * adds the same products in the same order as linear.c, so results have the same bits. */
#include "k_quants.h"
#include "linear.h"

#if MAX_ROWS == 4
enum { rows = MAX_ROWS };

#ifdef __ARM_FEATURE_MATMUL_INT8
/* Interleave two quads of a panel so that the eight columns of each output are adjacent, as the instruction smmla requires. */
INLINE void interleave_quads(words *quads) {
    const words even = quads[0], odd = quads[1];
    quads[0] = SHUFFLE(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    quads[1] = SHUFFLE(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

/* Compute the sums of a group (of columns with one scale) for four rows. smmla multiplies eight columns of two rows with those of two outputs and
 * adds to a tile of 2 x 2 sums [row][output]. Two vectors hold the tiles of rows 0 and 1, two those of rows 2 and 3. w: interleaved quads. */
INLINE const int32_t *sum_group_by_tiles(const words *w, const int quads, const int32_t *offsets, const int32_t *quad, ints *dot) {
    vector_parts tiles[4] = {{{0}}};
    _Pragma("unroll") for (int i = 0; i < quads; i += 2, w += 2, quad += 2 * rows) {
        const int32x4x2_t x = vzipq_s32(vld1q_s32(quad), vld1q_s32(quad + rows)); /* rows 0 and 1, rows 2 and 3 */
        _Pragma("unroll") for (int part = 0; part < 16; part++) {
            uint8x16_t *const tile = &tiles[part % 2 * 2 + part / 8].part[part / 2 % 4];
            *tile = (uint8x16_t)vmmlaq_s32((int32x4_t)*tile, (int8x16_t)x.val[part % 2], vld1q_s8((const int8_t *)w + part / 2 * 16));
            __asm__ volatile("" : "+w"(*tile)); /* keeps the compiler from loading weights early, as in dot_repeated */
        }
    }
    typedef int64_t row_pairs __attribute__((vector_size(64)));
    for (int i = 0; i < 4; i += 2) {
        const row_pairs left = (row_pairs)tiles[i].all, right = (row_pairs)tiles[i + 1].all;
        dot[i] = (ints)SHUFFLE(left, right, 0, 2, 4, 6, 8, 10, 12, 14);
        dot[i + 1] = (ints)SHUFFLE(left, right, 1, 3, 5, 7, 9, 11, 13, 15);
    }
    if (offsets) EACH_ROW dot[row] += offsets[row];
    return quad;
}
#endif

/* Decode all quads of a super-block from its stored codes. */
INLINE void decode_codes(const uint8_t *stored, words *quads, const int rows, const int kind, size_t distance) {
    const int high_bits = FORMAT(kind)->high_bits, group = FORMAT(kind)->group;
    for (int g = 0; g < SUPER_BLOCK / group; g++, quads += group / 4) {
        words high = {0};
        if (high_bits) {
            high = load_words(stored);
            PREFETCH(stored)
            stored += sizeof(words);
        }
        _Pragma("unroll") for (int pair = 0; pair < group / 8; pair++, stored += sizeof(words)) {
            const words codes = load_words(stored);
            PREFETCH(stored)
            quads[2 * pair] = join_quad(codes, high, 2 * pair, high_bits);
            quads[2 * pair + 1] = join_quad(codes, high, 2 * pair + 1, high_bits);
#ifdef __ARM_FEATURE_MATMUL_INT8
            interleave_quads(quads + 2 * pair);
#endif
        }
    }
}

/* Add the products of a decoded super-block with a block of rows to the float sums; return the position in the packed rows after it. */
INLINE const float *add_decoded_super_block(const words *w, const float *x, floats scales[][MAX_GROUPS], floats minimums[][MAX_GROUPS], floats sum[][MAX_ROWS],
                                            const int rows, const int kind) {
    const int group = FORMAT(kind)->group;
    for (int g = 0; g < SUPER_BLOCK / group; g++, w += group / 4) {
        const int32_t *offsets = (const int32_t *)x + rows, *quad = (const int32_t *)x + GROUP_HEADER * rows;
        GroupSums sums;
#ifdef __ARM_FEATURE_MATMUL_INT8
        quad = sum_group_by_tiles(w, group / 4, FORMAT(kind)->has_minimums ? NULL : offsets, quad, sums.dot[0]);
#else
        EACH_ROW sums.dot[0][row] = broadcast_int(initial_group_sum(offsets, row, kind));
        _Pragma("unroll") for (int number = 0; number < group / 4; number++)
            quad = add_quad_products(&sums, w + number, quad, rows, 1, number, QUADS_PER_SUM(4 + FORMAT(kind)->high_bits));
#endif
        add_group_sums(&sums, x, g, scales, minimums, sum, rows, 1, kind);
        x = (const float *)quad;
    }
    return x;
}

/* Multiply a panel of a K-quant with full blocks of rows, which are `step` words apart. Each super-block is decoded once for all blocks. */
INLINE void multiply_blocks(const Matrix *matrix, int first, const float *packed, size_t step, float *y, const int blocks, size_t next_panel_bytes,
                            const int kind) {
    const int header = header_bytes(kind, matrix->scale_columns), codes = super_block_codes_bytes(kind);
    const size_t distance = prefetch_distance(1, next_panel_bytes);
    const uint8_t *at = matrix->codes + (size_t)(first / LANES) * (size_t)matrix->row_bytes;
    floats sum[MAX_BLOCKS][1][MAX_ROWS];
    for (int i = 0; i < blocks; i++) EACH_ROW sum[i][0][row] = broadcast(0.0f);
    for (int begin = 0; begin < matrix->columns; begin += SUPER_BLOCK, at += codes) {
        floats scales[1][MAX_GROUPS], minimums[1][MAX_GROUPS];
        words quads[SUPER_BLOCK / 4];
        decode_header(at, 0, matrix->scale_columns, scales, minimums, 1, kind);
        for (int line = 0; line < header; line += 64) PREFETCH(at + line)
        at += header;
        decode_codes(at, quads, rows, kind, distance);
        const float *x = packed;
        for (int i = 0; i < blocks; i++) x = add_decoded_super_block(quads, packed + (size_t)i * step, scales, minimums, sum[i], rows, kind);
        packed = x - (size_t)(blocks - 1) * step;
    }
    for (int i = 0; i < blocks; i++)
        store_sums(matrix, first, sum[i][0], rows, y + (size_t)(i * rows) * (size_t)matrix->outputs, rows);
}

#define BLOCKS_OF_KIND(name, kind)                                                                                                      \
    static __attribute__((noinline)) void name(const Matrix *matrix, int first, const float *packed, size_t step, float *y, int blocks, \
                                               size_t next_panel_bytes) {                                                               \
        multiply_blocks(matrix, first, packed, step, y, blocks, next_panel_bytes, kind);                                                \
    }
BLOCKS_OF_KIND(multiply_q4_k_blocks, PANELS_Q4_K) BLOCKS_OF_KIND(multiply_q5_k_blocks, PANELS_Q5_K) BLOCKS_OF_KIND(multiply_q6_k_blocks, PANELS_Q6_K)

/* Decoded groups of a panel, which are multiplied with all rows before the next groups are decoded: 256 columns, but at least two groups, because
 * two may store their scales together. */
typedef struct {
    floats scales[MAX_GROUPS];
    ints negative[MAX_GROUPS];
    table_values quads[2 * MAX_GROUP / 4];
} DecodedGroups;

/* Look up the table values of a group's codes. *negative: the sum of the negative values. */
INLINE void look_up_group(const uint8_t *stored, code_table table, int group, table_values *quads, ints *negative, size_t distance) {
    negative_sums sums = {{0}};
    for (int column = 0; column < group; column += 8, stored += sizeof(words), quads += 2) {
        const words codes = load_words(stored);
        PREFETCH(stored)
        for (int part = 0; part < 2; part++) {
            quads[part] = look_up_values(select_nibbles(codes, part), table);
            add_negative_values(&sums, quads[part]);
        }
#ifdef __ARM_FEATURE_MATMUL_INT8
        interleave_quads(quads[0].part);
#endif
    }
    *negative = negative_total(&sums);
}

/* Decode the next `count` groups of a panel from its stored bytes; return the position after them. */
INLINE const uint8_t *decode_groups(const Matrix *matrix, const uint8_t *stored, code_table table, int count, DecodedGroups *groups, const int group,
                                    size_t distance) {
    const int kind = matrix->kind, codes = group * 8;
    if (kind == PANELS_IQ4_XS) {
        for (int line = 0; line < 128; line += 64) PREFETCH(stored + line)
        decode_low_bit_header(stored, matrix->scale_columns, groups->scales, NULL, PANELS_IQ4_XS);
        stored += header_bytes(PANELS_IQ4_XS, matrix->scale_columns);
    }
    for (int g = 0; g < count; g++, stored += codes) {
        if (kind == PANELS_4_BITS_TABLE_FLOAT16 && g % 2) groups->scales[g] = load_float16(stored - codes - sizeof(halfs));
        else if (kind != PANELS_IQ4_XS) {
            PREFETCH(stored)
            groups->scales[g] = kind == PANELS_4_BITS_TABLE_FLOAT16 ? load_float16(stored) : load((const float *)stored);
            stored += sizeof(floats);
        }
        look_up_group(stored, table, group, groups->quads + g * group / 4, groups->negative + g, distance);
    }
    return stored;
}

/* Add the products of decoded groups with a block of rows to the float sums; return the position in the packed rows after the groups. */
INLINE const float *add_group_products(const DecodedGroups *groups, int count, const float *x, floats *sum, const int group) {
    for (int g = 0; g < count; g++) {
        const int32_t *offsets = (const int32_t *)x + rows, *quad = (const int32_t *)x + GROUP_HEADER * rows;
        const table_values *w = groups->quads + g * group / 4;
        ints dot[MAX_ROWS];
#ifdef __ARM_FEATURE_MATMUL_INT8
        quad = sum_group_by_tiles(w->part, group / 4, offsets, quad, dot);
#else
        EACH_ROW dot[row] = broadcast_int(offsets[row]) - groups->negative[g];
        for (int column = 0; column < group; column += 16)
            _Pragma("unroll") for (int i = 0; i < 4; i++, w++, quad += rows * TABLE_WORDS)
                EACH_ROW dot[row] = dot_table_values(*w, quad + row * TABLE_WORDS, dot[row], SIGN_BY_XOR);
#endif
        EACH_ROW sum[row] = fmadd(__builtin_convertvector(dot[row], floats), groups->scales[g] * broadcast(x[row]), sum[row]);
        x = (const float *)quad;
    }
    return x;
}

/* Multiply a panel of codes that are indices into a table, in groups of `group` columns, with several blocks of rows. */
INLINE void multiply_table_groups(const Matrix *matrix, int first, const float *packed, size_t step, float *y, int blocks, size_t next_panel_bytes,
                                  const int group) {
    const int max_count = group > SUPER_BLOCK / 2 ? 2 : SUPER_BLOCK / group / 2 * 2;
    const size_t distance = prefetch_distance(1, next_panel_bytes);
    const uint8_t *at = matrix->codes + (size_t)(first / LANES) * (size_t)matrix->row_bytes;
    const code_table table = value_table_of(matrix, SIGN_BY_XOR);
    floats sum[MAX_BLOCKS][MAX_ROWS];
    for (int i = 0; i < blocks; i++) EACH_ROW sum[i][row] = broadcast(0.0f);
    for (int left = matrix->columns / group; left > 0; left -= max_count) {
        DecodedGroups groups;
        const int count = left < max_count ? left : max_count;
        at = decode_groups(matrix, at, table, count, &groups, group, distance);
        const float *x = packed;
        for (int i = 0; i < blocks; i++) x = add_group_products(&groups, count, packed + (size_t)i * step, sum[i], group);
        packed = x - (size_t)(blocks - 1) * step;
    }
    for (int i = 0; i < blocks; i++)
        store_sums(matrix, first, sum[i], rows, y + (size_t)(i * rows) * (size_t)matrix->outputs, rows);
}

/* Call multiply_table_groups; loops over groups of 32 columns, the usual size, are unrolled. */
static void multiply_table_blocks(const Matrix *matrix, int first, const float *packed, size_t step, float *y, int blocks, size_t next_panel_bytes) {
    if (matrix->group == 32) multiply_table_groups(matrix, first, packed, step, y, blocks, next_panel_bytes, 32);
    else multiply_table_groups(matrix, first, packed, step, y, blocks, next_panel_bytes, matrix->group);
}

/* Return the function that decodes a panel once for several blocks of rows; NULL = not implemented for the matrix's kind. */
MultiplyBlocks *find_multiply_blocks(const Matrix *matrix) {
    static MultiplyBlocks *const K_QUANTS_BLOCKS[] = {multiply_q4_k_blocks, multiply_q5_k_blocks, multiply_q6_k_blocks};
    if (uses_table(matrix->kind)) return multiply_table_blocks;
    return matrix->scale_columns && !IS_LOW_BIT(matrix->kind) ? K_QUANTS_BLOCKS[matrix->kind - PANELS_Q4_K] : NULL;
}
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
typedef float floats8 __attribute__((vector_size(32)));
typedef uint32_t words8 __attribute__((vector_size(32)));

#define CACHED_COLUMNS 1024  /* columns of input rows that stay in the first-level cache */
#define REGISTER_OUTPUTS 3   /* outputs whose sums stay in registers */
#define MAX_BLOCK_OUTPUTS 48 /* outputs whose sums are kept in memory */

INLINE floats8 load_floats8(const float *from) {
    floats8 v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* Add the products of `count` columns to one half of the lanes of sums [outputs][rows]. x is packed as pack_rows does for bfloat16: for each 32
 * columns and each row, the first numbers of all 16 pairs, then their second numbers. */
INLINE void add_half_lanes(const uint8_t *const *codes, size_t next_tile, const float *x, int count, floats *sums, const int half, const int outputs,
                           const int rows) {
    floats8 sum[REGISTER_OUTPUTS][MAX_ROWS];
    EACH_OUTPUT EACH_ROW sum[n][row] = load_floats8((const float *)(sums + n * rows + row) + half * 8);
    for (int column = 0; column < count; column += BF16_STEP, x += rows * BF16_STEP_FLOATS) {
        words8 w[REGISTER_OUTPUTS];
        floats8 second[REGISTER_OUTPUTS], first[REGISTER_OUTPUTS];
        EACH_OUTPUT {
            if (!half) __builtin_prefetch(codes[n] + next_tile + 2 * (size_t)column, 0, 2);
            memcpy(&w[n], codes[n] + 2 * (size_t)column + half * 32, sizeof w[n]);
            second[n] = (floats8)(w[n] & 0xFFFF0000u);
        }
        EACH_ROW {
            const floats8 xs = load_floats8(x + row * BF16_STEP_FLOATS + LANES + half * 8);
            EACH_OUTPUT sum[n][row] = __builtin_elementwise_fma(second[n], xs, sum[n][row]);
        }
        EACH_OUTPUT first[n] = (floats8)(w[n] << 16);
        EACH_ROW {
            const floats8 xs = load_floats8(x + row * BF16_STEP_FLOATS + half * 8);
            EACH_OUTPUT sum[n][row] = __builtin_elementwise_fma(first[n], xs, sum[n][row]);
        }
    }
    EACH_OUTPUT EACH_ROW memcpy((float *)(sums + n * rows + row) + half * 8, &sum[n][row], sizeof(floats8));
}

/* Compute outputs [begin, end), at most MAX_BLOCK_OUTPUTS, for `rows` packed rows. */
INLINE void multiply_bf16_block(const Matrix *matrix, int begin, int end, const float *x, float *y, const int rows, int real_rows) {
    const int columns = matrix->columns, whole = columns / BF16_STEP * BF16_STEP;
    const size_t row_bytes = (size_t)matrix->row_bytes;
    floats sums[MAX_BLOCK_OUTPUTS * MAX_ROWS];
    for (int i = 0; i < (end - begin) * rows; i++) sums[i] = broadcast(0.0f);
    for (int column = 0; column < columns; column += CACHED_COLUMNS) {
        const int count = whole - column < CACHED_COLUMNS ? whole - column : CACHED_COLUMNS;
        const float *from = x + (size_t)(column / BF16_STEP * rows) * BF16_STEP_FLOATS;
        for (int n = begin; n < end;) {
            const uint8_t *row = matrix->codes + (size_t)n * row_bytes + 2 * (size_t)column;
            const uint8_t *const codes[REGISTER_OUTPUTS] = {row, row + row_bytes, row + 2 * row_bytes};
            floats *const row_sums = sums + (n - begin) * rows;
            const int outputs = end - n >= REGISTER_OUTPUTS ? REGISTER_OUTPUTS : 1;
            if (outputs == REGISTER_OUTPUTS) {
                add_half_lanes(codes, REGISTER_OUTPUTS * row_bytes, from, count, row_sums, 0, REGISTER_OUTPUTS, rows);
                add_half_lanes(codes, 0, from, count, row_sums, 1, REGISTER_OUTPUTS, rows);
            } else {
                add_half_lanes(codes, 0, from, count, row_sums, 0, 1, rows);
                add_half_lanes(codes, 0, from, count, row_sums, 1, 1, rows);
            }
            n += outputs;
        }
    }
    for (int n = begin; n < end; n++) {
        floats *const row_sums = sums + (n - begin) * rows;
        if (whole < columns) {
            const bf16s w = unpack_bf16(load_bf16_codes(matrix->codes + (size_t)n * row_bytes + 2 * (size_t)whole, columns - whole));
            EACH_ROW row_sums[row] = dot_bf16(w, load_bf16(x + (size_t)(whole / BF16_STEP * rows + row) * BF16_STEP_FLOATS), row_sums[row]);
        }
        store_lane_sums(matrix, n, row_sums, 1, rows, y, real_rows);
    }
}

void multiply_bf16_blocks(const Matrix *matrix, int begin, int end, const float *x, float *y, int rows, int real_rows) {
    for (int to; begin < end; begin = to) {
        to = begin + MAX_BLOCK_OUTPUTS < end ? begin + MAX_BLOCK_OUTPUTS : end;
        if (rows == 3) multiply_bf16_block(matrix, begin, to, x, y, 3, real_rows);
        else multiply_bf16_block(matrix, begin, to, x, y, 4, real_rows);
    }
}
#endif
