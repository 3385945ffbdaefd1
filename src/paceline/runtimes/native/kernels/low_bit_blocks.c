/* Products of Q2_K, Q3_K and IQ4_XS matrices in panels (layout: k_quants.h) with rows rounded to 8-bit codes, as in super_blocks.c. */
#include "k_quants.h"
#include "transpose.h"

#define HALF_BLOCK (SUPER_BLOCK / 2)

/* Compute a tile: `panels` panels (1, 2 or 4), for which the rows are loaded once, times `rows` packed rows. */
INLINE void multiply_tile(const Matrix *matrix, int first, const float *x, float *y, const int rows, int real_rows, size_t next_panel_bytes,
                          const int panels, const int kind) {
    const int columns = matrix->columns, scale_columns = matrix->scale_columns, header = header_bytes(kind, scale_columns), group = FORMAT(kind)->group;
    const size_t panel_bytes = (size_t)matrix->row_bytes, distance = prefetch_distance(panels, next_panel_bytes);
    const uint8_t *at = matrix->codes + (size_t)(first / LANES) * panel_bytes;
    floats sum[MAX_PANELS][MAX_ROWS];
    const code_table table = kind == PANELS_IQ4_XS ? value_table_of(matrix, SIGN_BY_PSIGN) : (code_table){0};
    EACH_PANEL EACH_ROW sum[n][row] = broadcast(0.0f);
    for (int begin = 0; begin < columns; begin += SUPER_BLOCK) {
        floats scales[MAX_PANELS][MAX_GROUPS], minimums[MAX_PANELS][MAX_GROUPS];
        EACH_PANEL {
            decode_low_bit_header(at + (size_t)n * panel_bytes, scale_columns, scales[n], minimums[n], kind);
            for (int line = 0; line < header; line += 64) PREFETCH(at + (size_t)n * panel_bytes + line)
        }
        at += header;
        for (int pair = 0; pair < SUPER_BLOCK / group / 2; pair++) {
            words third_bits[MAX_PANELS] = {{0}};
            if (kind == PANELS_Q3_K) {
                EACH_PANEL {
                    third_bits[n] = load_words(at + (size_t)n * panel_bytes);
                    PREFETCH(at + (size_t)n * panel_bytes)
                }
                at += sizeof(words);
            }
            _Pragma("unroll") for (int half = 0; half < 2; half++) {
                const int g = 2 * pair + half;
                const int32_t *offsets = (const int32_t *)x + rows, *quad = (const int32_t *)x + GROUP_HEADER * rows;
                GroupSums sums;
                if (rows > 2 && kind != PANELS_IQ4_XS) keep_sums_in_memory(sum, rows, panels);
                words codes[MAX_PANELS];
                EACH_ROW EACH_PANEL sums.dot[n][row] = broadcast_int(offsets[row]);
                _Pragma("unroll") for (int number = 0; number < group / 4; number++) {
                    if (number % (kind == PANELS_IQ4_XS ? 2 : 4) == 0) {
                        EACH_PANEL {
                            codes[n] = load_words(at + (size_t)n * panel_bytes);
                            PREFETCH(at + (size_t)n * panel_bytes)
                        }
                        at += sizeof(words);
                    }
                    words quads[MAX_PANELS];
                    EACH_PANEL {
                        quads[n] = kind == PANELS_IQ4_XS ? select_nibbles(codes[n], number % 2) : codes[n] >> (2 * number) & 0x03030303u;
                        if (kind == PANELS_Q3_K) quads[n] |= (third_bits[n] >> (4 * half + number) & 0x01010101u) << 2;
                    }
                    quad = kind == PANELS_IQ4_XS ? add_table_products(&sums, quads, table, quad, rows, panels)
                                                 : add_quad_products(&sums, quads, quad, rows, panels, number, 4);
                }
                add_group_sums(&sums, x, g, scales, minimums, sum, rows, panels, kind);
                x = (const float *)quad;
            }
        }
    }
    EACH_PANEL store_sums(matrix, first + n * LANES, sum[n], rows, y, real_rows);
}

PRODUCTS_OF_KIND(multiply_q2_k, PANELS_Q2_K) PRODUCTS_OF_KIND(multiply_q3_k, PANELS_Q3_K) PRODUCTS_OF_KIND(multiply_iq4_xs, PANELS_IQ4_XS)

/* Write one output's scales and factors to a zeroed header of a super-block. number: index of the super-block in a row. */
static void fill_header(const SuperBlocks *from, int output, int lane, int number, uint8_t *to) {
    const int kind = from->kind, groups = SUPER_BLOCK / FORMAT(kind)->group;
    const size_t blocks = (size_t)(from->columns / from->scale_columns), first_block = (size_t)(number * (SUPER_BLOCK / from->scale_columns));
    const uint16_t *scales = from->scales + (size_t)output * blocks + first_block;
    for (int half = 0; half < SUPER_BLOCK / from->scale_columns; half++) {
        uint8_t *const header = to + half * (kind == PANELS_Q3_K ? 32 : 64) + 2 * lane;
        memcpy(header, scales + half, 2);
        if (kind == PANELS_Q2_K) memcpy(header + 32, from->minimums + (scales - from->scales) + half, 2);
    }
    uint8_t *const packed = to + header_scale_bytes(kind, from->scale_columns);
    const size_t first_group = (size_t)output * (size_t)(from->columns / FORMAT(kind)->group) + (size_t)(number * groups);
    uint32_t low[2] = {0}, high = 0;
    for (int g = 0; g < groups; g++) {
        if (kind == PANELS_Q2_K) {
            packed[g * LANES + lane] = (uint8_t)(from->factors[first_group + (size_t)g] | from->minimum_factors[first_group + (size_t)g] << 4);
            continue;
        }
        const uint32_t factor = (uint32_t)((int8_t)from->factors[first_group + (size_t)g] + 32);
        low[g / 8] |= (factor & 15) << g % 8 * 4, high |= factor >> 4 << 2 * g;
    }
    if (kind == PANELS_Q2_K) return;
    memcpy(packed + 4 * lane, low, 4);
    if (kind == PANELS_Q3_K) {
        memcpy(packed + sizeof(words) + 4 * (size_t)lane, low + 1, 4);
        memcpy(packed + 2 * sizeof(words) + 4 * (size_t)lane, &high, 4);
    } else {
        memcpy(to + 32 + 2 * lane, &high, 2);
    }
}

/* Write 32 columns of a panel's outputs. Word i of `stored`: columns 4 i to 4 i + 3 in the low nibbles, the columns 16 later in the high ones. */
static uint8_t *fill_run(int kind, const words *stored, uint8_t *to) {
    words quads[8], low[2] = {{0}, {0}}, third_bits = {0};
    for (int i = 0; i < 8; i++) quads[i] = stored[i % 4] >> (i / 4 * 4) & 0x0F0F0F0Fu;
    if (kind == PANELS_IQ4_XS) {
        for (int i = 0; i < 8; i += 2) to = store_words(quads[i] | quads[i + 1] << 4, to);
        return to;
    }
    for (int i = 0; i < 8; i++) {
        low[i / 4] |= (quads[i] & 0x03030303u) << (i % 4 * 2);
        third_bits |= (quads[i] >> 2 & 0x01010101u) << i;
    }
    if (kind == PANELS_Q3_K) to = store_words(third_bits, to);
    return store_words(low[1], store_words(low[0], to));
}

/* The part of paceline_fill_super_blocks for Q2_K, Q3_K and IQ4_XS. */
void fill_low_bit_blocks(const SuperBlocks *from, int32_t begin, int32_t end, uint8_t *to) {
    const int64_t panel_bytes = paceline_super_block_bytes(from->columns, from->scale_columns, from->kind);
    const size_t stride = (size_t)from->row_bytes;
    for (int panel = begin; panel < end; panel++) {
        uint8_t *at = to + panel * panel_bytes;
        const int first = panel * LANES, outputs = from->outputs - first < LANES ? from->outputs - first : LANES;
        for (int number = 0; number < from->columns / SUPER_BLOCK; number++) {
            memset(at, 0, (size_t)header_bytes(from->kind, from->scale_columns));
            for (int n = 0; n < outputs; n++) fill_header(from, first + n, n, number, at);
            at += header_bytes(from->kind, from->scale_columns);
            for (int part = 0; part < 2; part++) {
                words transposed[LANES]; /* 128 columns of each output */
                load_transposed(from->codes + (size_t)first * stride + (size_t)(number * HALF_BLOCK + part * 64), stride, outputs, 64, transposed);
                for (int run = 0; run < 4; run++) at = fill_run(from->kind, transposed + 4 * run, at);
            }
        }
    }
}
