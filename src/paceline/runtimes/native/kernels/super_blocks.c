/* Products with Q4_K, Q5_K and Q6_K in panels, of rows rounded to 8-bit codes. The sums are those of panels.c, with scales and minimums decoded
 * in registers; k_quants.h describes the layout. */
#include "k_quants.h"
#include "transpose.h"

/* Add the products of a super-block whose codes begin at `at`; return the position in the packed rows after them. */
INLINE const float *add_groups(const uint8_t *at, size_t next, const float *x, floats scales[][MAX_GROUPS], floats minimums[][MAX_GROUPS],
                               floats sum[][MAX_ROWS], const int rows, const int panels, const int kind, size_t distance) {
    const int high_bits = FORMAT(kind)->high_bits, group = FORMAT(kind)->group;
    for (int g = 0; g < SUPER_BLOCK / group; g++) {
        const int32_t *offsets = (const int32_t *)x + rows, *quad = (const int32_t *)x + GROUP_HEADER * rows;
        GroupSums sums;
        words high[MAX_PANELS] = {{0}};
        keep_in_memory(sum, rows, panels);
        EACH_ROW EACH_PANEL sums.dot[n][row] = broadcast_int(group_offset(offsets, row, kind));
        if (high_bits) {
            EACH_PANEL {
                high[n] = load_codes(at + (size_t)n * next);
                PREFETCH(at + (size_t)n * next)
            }
            at += sizeof(words);
        }
        _Pragma("unroll") for (int pair = 0; pair < group / 8; pair++, at += sizeof(words)) {
            words codes[MAX_PANELS];
            EACH_PANEL {
                codes[n] = load_codes(at + (size_t)n * next);
                PREFETCH(at + (size_t)n * next)
            }
            _Pragma("unroll") for (int number = 2 * pair; number < 2 * pair + 2; number++) {
                words w[MAX_PANELS];
                EACH_PANEL w[n] = join_quad(codes[n], high[n], number, high_bits);
                quad = multiply_add(&sums, w, quad, rows, panels, number, QUADS_AT_ONCE(4 + high_bits));
            }
        }
        add_group(&sums, x, g, scales, minimums, sum, rows, panels, kind);
        x = (const float *)quad;
    }
    return x;
}

/* One tile: `panels` panels (1, 2 or 4, which share the loaded rows) times `rows` packed rows. */
INLINE void multiply_tile(const Matrix *matrix, int first, const float *x, float *y, const int rows, int real_rows, size_t ahead,
                          const int panels, const int kind) {
    const int header = header_bytes(kind, matrix->block), codes = codes_bytes(kind);
    const size_t next = (size_t)matrix->row_bytes, distance = prefetch_distance(rows, ahead);
    const uint8_t *at = matrix->codes + (size_t)(first / LANES) * next;
    floats sum[MAX_PANELS][MAX_ROWS];
    EACH_PANEL EACH_ROW sum[n][row] = broadcast(0.0f);
    for (int begin = 0; begin < matrix->columns; begin += SUPER_BLOCK, at += codes) {
        floats scales[MAX_PANELS][MAX_GROUPS], minimums[MAX_PANELS][MAX_GROUPS];
        decode_header(at, next, matrix->block, scales, minimums, panels, kind);
        EACH_PANEL for (int line = 0; line < header; line += 64) PREFETCH(at + (size_t)n * next + line)
        at += header;
        x = add_groups(at, next, x, scales, minimums, sum, rows, panels, kind, distance);
    }
    EACH_PANEL store_sums(matrix, first + n * LANES, sum[n], rows, y, real_rows);
}

static PRODUCTS_OF_KIND(multiply_q4_k, PANELS_Q4_K)
static PRODUCTS_OF_KIND(multiply_q5_k, PANELS_Q5_K)
static PRODUCTS_OF_KIND(multiply_q6_k, PANELS_Q6_K)

/* Compute outputs [first, end) of one block of packed rows. */
void multiply_super_blocks(const Matrix *matrix, int first, int end, const float *x, float *y, int rows, int real_rows, size_t ahead) {
    static Multiply *const MULTIPLY[] = {multiply_q4_k, multiply_q5_k, multiply_q6_k, multiply_q2_k, multiply_q3_k, multiply_iq4_xs};
    MULTIPLY[matrix->kind - PANELS_Q4_K](matrix, first, end, x, y, rows, real_rows, ahead);
}

/* Return the bytes of a panel. */
int64_t paceline_super_block_bytes(int32_t columns, int32_t block, int32_t kind) {
    return (int64_t)columns / SUPER_BLOCK * (header_bytes(kind, block) + codes_bytes(kind));
}

static uint32_t word_at(const uint8_t *from, int lane) {
    uint32_t word;
    memcpy(&word, from + 4 * lane, sizeof word);
    return word;
}

static void add_bits(uint8_t *to, int lane, uint32_t bits) {
    bits |= word_at(to, lane);
    memcpy(to + 4 * lane, &bits, sizeof bits);
}

static float half_at(const uint8_t *from, int lane) {
    _Float16 half;
    memcpy(&half, from + 2 * lane, sizeof half);
    return (float)half;
}

/* Decode the scale and minimum of group g for one output. */
static void decode_group(const uint8_t *header, int kind, int block, int lane, int g, float *scale, float *minimum) {
    const uint8_t *packed = header + scale_bytes(kind, block);
    if (!FORMAT(kind)->has_minimums) {
        *scale = half_at(header + g / (MAX_GROUPS / 2) * 32, lane) * (float)(int8_t)packed[g * LANES + lane];
        return;
    }
    const uint32_t low = word_at(packed, lane), low_minimums = word_at(packed + 64, lane), high = word_at(packed + 128, lane);
    const uint8_t *halves = header + g * (32) / block * 64;
    *scale = half_at(halves, lane) * (float)((low >> 4 * g & 15) | (high >> 2 * g & 3) << 4);
    *minimum = -half_at(halves + 32, lane) * (float)((low_minimums >> 4 * g & 15) | (high >> (16 + 2 * g) & 3) << 4);
}

/* Write the exact values of some outputs, [count, columns]. */
void paceline_super_block_rows(const Matrix *matrix, const int32_t *numbers, int32_t count, float *to) {
    if (IS_SMALL(matrix->kind)) {
        small_block_rows(matrix, numbers, count, to);
        return;
    }
    const int kind = matrix->kind, high_bits = FORMAT(kind)->high_bits, group = FORMAT(kind)->group;
    const uint32_t ones = (1u << high_bits) - 1;
    for (int i = 0; i < count; i++) {
        const int lane = numbers[i] % LANES;
        const uint8_t *at = matrix->codes + (size_t)(numbers[i] / LANES) * (size_t)matrix->row_bytes, *header = at;
        for (int column = 0; column < matrix->columns; column += group) {
            const int g = column % SUPER_BLOCK / group;
            if (!g) {
                header = at;
                at += header_bytes(kind, matrix->block);
            }
            float scale, minimum = 0.0f;
            decode_group(header, kind, matrix->block, lane, g, &scale, &minimum);
            const uint32_t high = high_bits ? word_at(at, lane) : 0;
            at += high_bits ? sizeof(words) : 0;
            for (int quad = 0; quad < group / 4; quad++) {
                const uint32_t low = word_at(at + quad / 2 * (int)sizeof(words), lane) >> quad % 2 * 4, more = high >> high_bits * quad;
                for (int shift = 0; shift < 32; shift += 8) {
                    const float code = (float)((int)((low >> shift & 15) | (more >> shift & ones) << 4) - matrix->zero_point);
                    *to++ = FORMAT(kind)->has_minimums ? code * scale + minimum : code * scale;
                }
            }
            at += group / 8 * (int)sizeof(words);
        }
    }
}

/* Write the header of super-block `number` for one output, over zeros. */
static void fill_header(const SuperBlocks *from, int output, int lane, int number, uint8_t *to) {
    const int group = FORMAT(from->kind)->group, minimum = FORMAT(from->kind)->has_minimums, groups = SUPER_BLOCK / group;
    const size_t blocks = (size_t)(from->columns / from->block), first_block = (size_t)(number * (SUPER_BLOCK / from->block));
    const size_t first_group = (size_t)output * (size_t)(from->columns / group) + (size_t)(number * groups);
    for (int half = 0; half < (minimum ? SUPER_BLOCK / from->block : 2); half++) {
        const size_t block = (size_t)output * blocks + first_block + (size_t)(half * (SUPER_BLOCK / 2) / from->block);
        memcpy(to + half * (minimum ? 64 : 32) + 2 * lane, from->scales + block, 2);
        if (minimum) memcpy(to + half * 64 + 32 + 2 * lane, from->minimums + block, 2);
    }
    to += scale_bytes(from->kind, from->block);
    for (int g = 0; g < groups; g++) {
        const uint32_t factor = from->factors[first_group + (size_t)g];
        if (!minimum) {
            to[g * LANES + lane] = (uint8_t)factor;
            continue;
        }
        const uint32_t other = from->minimum_factors[first_group + (size_t)g];
        add_bits(to, lane, (factor & 15) << 4 * g);
        add_bits(to + sizeof(words), lane, (other & 15) << 4 * g);
        add_bits(to + 2 * sizeof(words), lane, factor >> 4 << 2 * g | other >> 4 << (16 + 2 * g));
    }
}

/* Load the quads of 32 columns as unsigned codes. */
static void load_quads(const SuperBlocks *from, int first, int outputs, int column, words *quads) {
    const size_t stride = (size_t)from->row_bytes;
    const uint8_t *const rows = from->codes + (size_t)first * stride;
    words own[LANES];
    if (from->kind == PANELS_Q4_K) { /* runs of 32 */
        load_transposed(rows + column / 2, stride, outputs, 16, own);
        for (int i = 0; i < 8; i++) quads[i] = own[i % 4] >> i / 4 * 4 & 0x0F0F0F0Fu;
        return;
    }
    load_transposed(rows + column, stride, outputs, 32, own); /* signed 6-bit codes; flipping the sign bit makes them unsigned */
    for (int i = 0; i < 8; i++) quads[i] = (own[i] & 0x3F3F3F3Fu) ^ (uint32_t)from->zero_point * 0x01010101u;
}

/* Write the codes of a group of all outputs, from its quads. */
static void fill_group(int kind, const words *quads, uint8_t *to) {
    const int high_bits = FORMAT(kind)->high_bits, count = FORMAT(kind)->group / 4;
    words high = {0};
    for (int i = 0; i < count && high_bits; i++) high |= (quads[i] >> 4 & ((1u << high_bits) - 1) * 0x01010101u) << high_bits * i;
    if (high_bits) to = put(high, to);
    for (int i = 0; i < count; i += 2) to = put((quads[i] & 0x0F0F0F0Fu) | (quads[i + 1] & 0x0F0F0F0Fu) << 4, to);
}

/* Fill panels [begin, end) from a matrix stored row by row; missing outputs are zero. */
void paceline_fill_super_blocks(const SuperBlocks *from, int32_t begin, int32_t end, uint8_t *to) {
    if (IS_SMALL(from->kind)) {
        fill_small_blocks(from, begin, end, to);
        return;
    }
    const int group = FORMAT(from->kind)->group, group_bytes = group * (4 + FORMAT(from->kind)->high_bits) / 8 * LANES;
    const int64_t panel_bytes = paceline_super_block_bytes(from->columns, from->block, from->kind);
    for (int panel = begin; panel < end; panel++) {
        uint8_t *at = to + panel * panel_bytes;
        memset(at, 0, (size_t)panel_bytes);
        const int first = panel * LANES, outputs = from->outputs - first < LANES ? from->outputs - first : LANES;
        words quads[8];
        for (int column = 0; column < from->columns; column += group, at += group_bytes) {
            if (column % SUPER_BLOCK == 0) {
                for (int n = 0; n < outputs; n++) fill_header(from, first + n, n, column / SUPER_BLOCK, at);
                at += header_bytes(from->kind, from->block);
            }
            if (column % 32 == 0) load_quads(from, first, outputs, column, quads);
            fill_group(from->kind, quads + column % 32 / 4, at);
        }
    }
}
