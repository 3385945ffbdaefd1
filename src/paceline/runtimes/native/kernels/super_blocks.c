/* Products of Q4_K, Q5_K and Q6_K matrices in panels (layout: k_quants.h) with rows rounded to 8-bit codes. Results have the same bits
 * as those of panels.c for the same weights; scales and minimums are decoded in registers. */
#include "k_quants.h"
#include "transpose.h"

/* Add the products of a super-block's stored codes to the float sums; return the position in the packed rows after the super-block. */
INLINE const float *add_super_block(const uint8_t *stored, size_t panel_bytes, const float *x, floats scales[][MAX_GROUPS], floats minimums[][MAX_GROUPS],
                                    floats sum[][MAX_ROWS], const int rows, const int panels, const int kind, size_t distance) {
    const int high_bits = FORMAT(kind)->high_bits, group = FORMAT(kind)->group;
    for (int g = 0; g < SUPER_BLOCK / group; g++) {
        const int32_t *offsets = (const int32_t *)x + rows, *quad = (const int32_t *)x + GROUP_HEADER * rows;
        GroupSums sums;
        words high[MAX_PANELS] = {{0}};
        keep_sums_in_memory(sum, rows, panels);
        EACH_ROW EACH_PANEL sums.dot[n][row] = broadcast_int(initial_group_sum(offsets, row, kind));
        if (high_bits) {
            EACH_PANEL {
                high[n] = load_words(stored + (size_t)n * panel_bytes);
                PREFETCH(stored + (size_t)n * panel_bytes)
            }
            stored += sizeof(words);
        }
        _Pragma("unroll") for (int pair = 0; pair < group / 8; pair++, stored += sizeof(words)) {
            words codes[MAX_PANELS];
            EACH_PANEL {
                codes[n] = load_words(stored + (size_t)n * panel_bytes);
                PREFETCH(stored + (size_t)n * panel_bytes)
            }
            _Pragma("unroll") for (int number = 2 * pair; number < 2 * pair + 2; number++) {
                words w[MAX_PANELS];
                EACH_PANEL w[n] = join_quad(codes[n], high[n], number, high_bits);
                quad = add_quad_products(&sums, w, quad, rows, panels, number, QUADS_PER_SUM(4 + high_bits));
            }
        }
        add_group_sums(&sums, x, g, scales, minimums, sum, rows, panels, kind);
        x = (const float *)quad;
    }
    return x;
}

/* Compute a tile: `panels` panels (1, 2 or 4), for which the rows are loaded once, times `rows` packed rows. */
INLINE void multiply_tile(const Matrix *matrix, int first, const float *x, float *y, const int rows, int real_rows, size_t next_panel_bytes,
                          const int panels, const int kind) {
    const int header = header_bytes(kind, matrix->scale_columns), codes = super_block_codes_bytes(kind);
    const size_t panel_bytes = (size_t)matrix->row_bytes, distance = prefetch_distance(panels, next_panel_bytes);
    const uint8_t *at = matrix->codes + (size_t)(first / LANES) * panel_bytes;
    floats sum[MAX_PANELS][MAX_ROWS];
    EACH_PANEL EACH_ROW sum[n][row] = broadcast(0.0f);
    for (int begin = 0; begin < matrix->columns; begin += SUPER_BLOCK, at += codes) {
        floats scales[MAX_PANELS][MAX_GROUPS], minimums[MAX_PANELS][MAX_GROUPS];
        decode_header(at, panel_bytes, matrix->scale_columns, scales, minimums, panels, kind);
        EACH_PANEL for (int line = 0; line < header; line += 64) PREFETCH(at + (size_t)n * panel_bytes + line)
        at += header;
        x = add_super_block(at, panel_bytes, x, scales, minimums, sum, rows, panels, kind, distance);
    }
    EACH_PANEL store_sums(matrix, first + n * LANES, sum[n], rows, y, real_rows);
}

static PRODUCTS_OF_KIND(multiply_q4_k, PANELS_Q4_K) static PRODUCTS_OF_KIND(multiply_q5_k, PANELS_Q5_K)
static PRODUCTS_OF_KIND(multiply_q6_k, PANELS_Q6_K)

/* Compute outputs [first, end) of a K-quant matrix for one block of packed rows. */
void multiply_super_blocks(const Matrix *matrix, int first, int end, const float *x, float *y, int rows, int real_rows, size_t next_panel_bytes) {
    static Multiply *const MULTIPLY[] = {multiply_q4_k, multiply_q5_k, multiply_q6_k, multiply_q2_k, multiply_q3_k, multiply_iq4_xs};
    MULTIPLY[matrix->kind - PANELS_Q4_K](matrix, first, end, x, y, rows, real_rows, next_panel_bytes);
}

/* Return the size in bytes of a panel of a K-quant: its super-blocks of 16 outputs. */
int64_t paceline_super_block_bytes(int32_t columns, int32_t scale_columns, int32_t kind) {
    return (int64_t)columns / SUPER_BLOCK * (header_bytes(kind, scale_columns) + super_block_codes_bytes(kind));
}

static void or_lane_bits(uint8_t *to, int lane, uint32_t bits) {
    bits |= load_word(to + 4 * lane);
    memcpy(to + 4 * lane, &bits, sizeof bits);
}

/* Return the code of one column of one output in a super-block of any kind. */
INLINE int code_at(const uint8_t *codes, const int kind, int lane, int column) {
    const int word = (int)sizeof(words), high_bits = FORMAT(kind)->high_bits, group = FORMAT(kind)->group;
    codes += 4 * lane + column % 4;
    if (FORMAT(kind)->low_bits == 2) { /* Q2_K and Q3_K store two groups of 16 columns together */
        const int quad = column % 16 / 4, half = column % 32 / 16;
        const uint8_t *pair = codes + column / 32 * (2 + high_bits) * word;
        return (pair[(high_bits + half) * word] >> 2 * quad & 3) | (high_bits ? (pair[0] >> (4 * half + quad) & 1) << 2 : 0);
    }
    const int quad = column % group / 4;
    codes += column / group * (group * (4 + high_bits) / 8 * LANES);
    const int high = high_bits ? codes[0] >> high_bits * quad & ((1 << high_bits) - 1) : 0;
    return (codes[((high_bits > 0) + quad / 2) * word] >> quad % 2 * 4 & 15) | high << 4;
}

/* Write one output's dequantised weights [SUPER_BLOCK] of the super-block at `header` (lossless). With a constant kind, divisions become shifts. */
INLINE void write_weights(const Matrix *matrix, const uint8_t *header, int lane, float *to, const int kind) {
    const uint8_t *codes = header + header_bytes(kind, matrix->scale_columns);
    floats scales[1][MAX_GROUPS], minimums[1][MAX_GROUPS];
    decode_header(header, 0, matrix->scale_columns, scales, minimums, 1, kind);
    for (int column = 0; column < SUPER_BLOCK; column++) {
        const int code = code_at(codes, kind, lane, column), g = column / FORMAT(kind)->group;
        const float value = (float)(kind == PANELS_IQ4_XS ? matrix->table[code] : code - matrix->zero_point) * scales[0][g][lane];
        to[column] = FORMAT(kind)->has_minimums ? value + minimums[0][g][lane] : value;
    }
}

#define WRITE(kind_constant)                                            \
    case kind_constant:                                                 \
        write_weights(matrix, header, lane, to, kind_constant);         \
        break;

/* Write the dequantised weights of some outputs, [count, columns]. output_indices: [count]. */
void paceline_super_block_rows(const Matrix *matrix, const int32_t *output_indices, int32_t count, float *to) {
    const size_t bytes = header_bytes(matrix->kind, matrix->scale_columns) + super_block_codes_bytes(matrix->kind);
    for (int i = 0; i < count; i++) {
        const int lane = output_indices[i] % LANES;
        const uint8_t *header = matrix->codes + (size_t)(output_indices[i] / LANES) * (size_t)matrix->row_bytes;
        for (int begin = 0; begin < matrix->columns; begin += SUPER_BLOCK, to += SUPER_BLOCK, header += bytes) {
            switch (matrix->kind) {
                WRITE(PANELS_Q4_K) WRITE(PANELS_Q5_K) WRITE(PANELS_Q6_K) WRITE(PANELS_Q2_K) WRITE(PANELS_Q3_K) WRITE(PANELS_IQ4_XS)
            }
        }
    }
}

/* Write one output's scales and factors to a zeroed header of a super-block. number: index of the super-block in a row. */
static void fill_header(const SuperBlocks *from, int output, int lane, int number, uint8_t *to) {
    const int group = FORMAT(from->kind)->group, minimum = FORMAT(from->kind)->has_minimums, groups = SUPER_BLOCK / group;
    const size_t blocks = (size_t)(from->columns / from->scale_columns), first_block = (size_t)(number * (SUPER_BLOCK / from->scale_columns));
    const size_t first_group = (size_t)output * (size_t)(from->columns / group) + (size_t)(number * groups);
    for (int half = 0; half < (minimum ? SUPER_BLOCK / from->scale_columns : 2); half++) {
        const size_t block = (size_t)output * blocks + first_block + (size_t)(half * (SUPER_BLOCK / 2) / from->scale_columns);
        memcpy(to + half * (minimum ? 64 : 32) + 2 * lane, from->scales + block, 2);
        if (minimum) memcpy(to + half * 64 + 32 + 2 * lane, from->minimums + block, 2);
    }
    to += header_scale_bytes(from->kind, from->scale_columns);
    for (int g = 0; g < groups; g++) {
        const uint32_t factor = from->factors[first_group + (size_t)g];
        if (!minimum) {
            to[g * LANES + lane] = (uint8_t)factor;
            continue;
        }
        const uint32_t other = from->minimum_factors[first_group + (size_t)g];
        or_lane_bits(to + (size_t)(g / 4) * sizeof(words), lane, factor << g % 4 * 8);
        if (g < 4) or_lane_bits(to + 2 * sizeof(words), lane, other << g * 8);
        for (size_t i = 0; g >= 4 && i < 3; i++) or_lane_bits(to + i * sizeof(words), lane, (other >> 2 * i & 3) << (g % 4 * 8 + 6));
    }
}

/* Load the quads of 32 columns of a panel's outputs as unsigned codes. */
static void load_quads(const SuperBlocks *from, int first, int outputs, int column, words *quads) {
    const size_t stride = (size_t)from->row_bytes;
    const uint8_t *const rows = from->codes + (size_t)first * stride;
    words transposed[LANES];
    if (from->kind == PANELS_Q4_K) { /* 4 bits in runs of 32 columns, see paceline_fill_panels */
        load_transposed(rows + column / 2, stride, outputs, 16, transposed);
        for (int i = 0; i < 8; i++) quads[i] = transposed[i % 4] >> i / 4 * 4 & 0x0F0F0F0Fu;
        return;
    }
    load_transposed(rows + column, stride, outputs, 32, transposed); /* signed 6-bit codes: inverting the sign bit makes them unsigned */
    for (int i = 0; i < 8; i++) quads[i] = (transposed[i] & 0x3F3F3F3Fu) ^ (uint32_t)from->zero_point * 0x01010101u;
}

/* Write the codes of a group of a panel's outputs, from its quads. */
static void fill_group(int kind, const words *quads, uint8_t *to) {
    const int high_bits = FORMAT(kind)->high_bits, count = FORMAT(kind)->group / 4;
    words high = {0};
    for (int i = 0; i < count && high_bits; i++) high |= (quads[i] >> 4 & ((1u << high_bits) - 1) * 0x01010101u) << high_bits * i;
    if (high_bits) to = store_words(high, to);
    for (int i = 0; i < count; i += 2) to = store_words((quads[i] & 0x0F0F0F0Fu) | (quads[i + 1] & 0x0F0F0F0Fu) << 4, to);
}

/* Fill panels [begin, end) from a matrix stored row by row; outputs past the end of the matrix are zeros. */
void paceline_fill_super_blocks(const SuperBlocks *from, int32_t begin, int32_t end, uint8_t *to) {
    if (IS_LOW_BIT(from->kind)) {
        fill_low_bit_blocks(from, begin, end, to);
        return;
    }
    const int group = FORMAT(from->kind)->group, group_bytes = group * (4 + FORMAT(from->kind)->high_bits) / 8 * LANES;
    const int64_t panel_bytes = paceline_super_block_bytes(from->columns, from->scale_columns, from->kind);
    for (int panel = begin; panel < end; panel++) {
        uint8_t *at = to + panel * panel_bytes;
        memset(at, 0, (size_t)panel_bytes);
        const int first = panel * LANES, outputs = from->outputs - first < LANES ? from->outputs - first : LANES;
        words quads[8];
        for (int column = 0; column < from->columns; column += group, at += group_bytes) {
            if (column % SUPER_BLOCK == 0) {
                for (int n = 0; n < outputs; n++) fill_header(from, first + n, n, column / SUPER_BLOCK, at);
                at += header_bytes(from->kind, from->scale_columns);
            }
            if (column % 32 == 0) load_quads(from, first, outputs, column, quads);
            fill_group(from->kind, quads + column % 32 / 4, at);
        }
    }
}
