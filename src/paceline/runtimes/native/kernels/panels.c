/* Integer products of quantised weights in panels (panels.h) with rows of x rounded to 8-bit codes, as in llama.cpp's ggml.
 *
 * Each group of a row of x has the scale max |x| / 127. With the codes c of the weights and q of the row,
 *     sum over columns of (scale_w (c - zero_point) + minimum) scale_x q
 *   = scale_w scale_x (sum c q - zero_point sum q) + minimum scale_x sum q,
 * and groups are added in float32. Integer sums are exact, so a row's bits do not depend on the instruction set or on other rows. */
#include "panels.h"
#include "transpose.h"

static int has_narrow_codes(int kind) { return kind >= PANELS_4_BITS; } /* codes have at most 6 bits */
static int has_minimum(int kind) { return kind == PANELS_8_BITS_MINIMUM || kind == PANELS_4_BITS_MINIMUM; }
static int has_float16_scales(int kind) { return kind == PANELS_4_BITS_FLOAT16 || kind == PANELS_4_BITS_TABLE_FLOAT16; }
static int quad_words(int kind) { return uses_table(kind) ? TABLE_WORDS : has_narrow_codes(kind) ? NARROW_WORDS : DOT_WORDS; }
static size_t group_words(const Matrix *matrix) { return (size_t)(GROUP_HEADER + matrix->group / 4 * quad_words(matrix->kind)); }

size_t packed_byte_row_words(const Matrix *matrix) { return (size_t)(matrix->columns / matrix->group) * group_words(matrix); }

/* Quantise one group of a row to int8 and write its codes as quads, `step` words apart; return the group's scale. *total: the sum of the codes. */
INLINE float quantize_group(const float *x, int group, int32_t *to, size_t step, int num_words, int32_t *total) {
    words largest = {0};
    for (int i = 0; i < group; i += LANES) { /* compared as integers, the bits of NaN are the largest */
        const words magnitudes = (words)load(x + i) & 0x7FFFFFFFu;
        largest = __builtin_elementwise_max(magnitudes, largest);
    }
    const uint32_t bits = __builtin_reduce_max(largest);
    float max_magnitude;
    memcpy(&max_magnitude, &bits, sizeof max_magnitude);
    const int is_finite = bits < 0x7F800000u;
    const floats inverse = broadcast(is_finite && max_magnitude > 1e-30f ? 127.0f / max_magnitude : 0.0f);
    ints sums = {0};
    for (int i = 0; i < group; i += LANES, to += 4 * step) {
        const floats value = is_finite ? load(x + i) : broadcast(0.0f);
        const ints codes = __builtin_convertvector(__builtin_elementwise_roundeven(value * inverse), ints);
        store_quads(to, codes, step, num_words);
        sums += codes;
    }
    *total = __builtin_reduce_add(sums);
    return is_finite ? max_magnitude / 127.0f : max_magnitude - max_magnitude; /* NaN if a value is infinite or NaN */
}

/* Pack columns [begin, end) of rows [first, first + real) of x as [columns / group][header, quads][padded]. row_indices as in pack_rows. Header:
 * see GROUP_HEADER. offset = (shift - zero_point) * sum of codes; the shift is subtracted from weights (DOT_SHIFT, TABLE_SHIFT). */
void pack_rows_as_bytes(const Matrix *matrix, const float *x, const int32_t *row_indices, int first, int real, int padded, int begin, int end, float *packed) {
    const int columns = matrix->columns, group = matrix->group, num_words = quad_words(matrix->kind);
    const int shift = (uses_table(matrix->kind) ? TABLE_SHIFT : has_narrow_codes(matrix->kind) ? 0 : DOT_SHIFT) - matrix->zero_point;
    const size_t step = (size_t)(padded * num_words), words_per_group = group_words(matrix) * (size_t)padded;
    packed += (size_t)(begin / group) * words_per_group;
    for (; begin < end; begin += group, packed += words_per_group)
        for (int row = 0; row < padded; row++) {
            int32_t total, *quads = (int32_t *)packed + GROUP_HEADER * padded + row * num_words;
            const int place = first + (row < real ? row : 0);
            const float *from = x + row_index(row_indices, place) * (size_t)columns + begin;
            const float scale = num_words == 1 ? quantize_group(from, group, quads, step, 1, &total) : quantize_group(from, group, quads, step, 2, &total);
            const int32_t offset = shift * total;
            packed[row] = scale;
            memcpy(packed + padded + row, &offset, sizeof offset);
            packed[2 * padded + row] = scale * (float)total;
        }
}

/* Compute a tile: `panels` panels (1, 2 or 4), for which the rows are loaded once, times `rows` packed rows. quads_per_sum: see add_quad_products. */
INLINE void multiply_panel_tile(const Matrix *matrix, int first, const float *x, float *y, const int rows, int real_rows, size_t next_panel_bytes,
                                const int panels, const int narrow, const int minimum, const int by_table, const int float16, const int group,
                                const int quads_per_sum) {
    const int columns = matrix->columns, step = quads_per_sum ? 4 * quads_per_sum : narrow ? 8 : 4;
    const size_t panel_bytes = (size_t)matrix->row_bytes, distance = prefetch_distance(panels, next_panel_bytes);
    const uint8_t *at = matrix->codes + (size_t)(first / LANES) * panel_bytes, *header = at;
    floats sum[MAX_PANELS][MAX_ROWS];
    const code_table table = by_table ? value_table_of(matrix, SIGN_BY_PSIGN) : (code_table){0};
    EACH_PANEL EACH_ROW sum[n][row] = broadcast(0.0f);
    for (int begin = 0; begin < columns; begin += group) {
        const int32_t *offsets = (const int32_t *)x + rows, *quad = (const int32_t *)x + GROUP_HEADER * rows;
        const int is_second = float16 && begin / group % 2;
        GroupSums sums;
        if (rows > 2 && quads_per_sum) keep_sums_in_memory(sum, rows, panels);
        EACH_ROW EACH_PANEL sums.dot[n][row] = broadcast_int(offsets[row]);
        EACH_PANEL for (int line = 0; line < (minimum ? 2 : 1); line++) PREFETCH(at + (size_t)n * panel_bytes + line * sizeof(floats))
        header = is_second ? header + sizeof(halfs) : at;
        at += is_second ? 0 : (minimum ? 2 : 1) * sizeof(floats);
        for (int column = 0; column < group; column += step)
            _Pragma("unroll") for (int number = 0; number < step / 4; number += narrow ? 2 : 1, at += sizeof(words)) {
                words codes[MAX_PANELS], quads[MAX_PANELS];
                EACH_PANEL {
                    codes[n] = load_words(at + (size_t)n * panel_bytes);
                    PREFETCH(at + (size_t)n * panel_bytes)
                }
                _Pragma("unroll") for (int part = 0; part < (narrow ? 2 : 1); part++) {
                    EACH_PANEL quads[n] = narrow ? select_nibbles(codes[n], part) : codes[n];
                    quad = by_table ? add_table_products(&sums, quads, table, quad, rows, panels)
                                    : add_quad_products(&sums, quads, quad, rows, panels, number + part, quads_per_sum);
                }
            }
        EACH_PANEL {
            const floats scale = float16 ? load_float16(header + (size_t)n * panel_bytes) : load((const float *)(header + (size_t)n * panel_bytes));
            EACH_ROW sum[n][row] = fmadd(__builtin_convertvector(sums.dot[n][row], floats), scale * broadcast(x[row]), sum[n][row]);
            if (minimum) {
                const floats minimums = load((const float *)(header + (size_t)n * panel_bytes) + LANES);
                EACH_ROW sum[n][row] = fmadd(minimums, broadcast(x[2 * rows + row]), sum[n][row]);
            }
        }
        x = (const float *)quad;
    }
    EACH_PANEL store_sums(matrix, first + n * LANES, sum[n], rows, y, real_rows);
}

#define PRODUCT_BY(rows, panels, condition, narrow, minimum, by_table, float16, group, quads_per_sum) \
    if (condition)                                                                                    \
        for (; first + ((panels) - 1) * LANES < end; first += (panels) * LANES)                       \
            multiply_panel_tile(matrix, first, x, y, rows, real_rows, next_panel_bytes, panels, narrow, minimum, by_table, float16, group, quads_per_sum);
#define PRODUCT_OF(rows, panels, kind_, ...) PRODUCT_BY(rows, panels, matrix->kind == kind_, __VA_ARGS__, matrix->group, 0)
#if HAS_PAIRS /* groups are multiples of 16 columns; loops over groups of 32, the usual size, are unrolled */
#define NARROW_PRODUCT_OF(rows, panels, kind_, ...)                                                              \
    PRODUCT_BY(rows, panels, matrix->kind == kind_ && matrix->group == 32, __VA_ARGS__, 32, 8)                   \
    PRODUCT_BY(rows, panels, matrix->kind == kind_ && matrix->group % 32 == 0, __VA_ARGS__, matrix->group, 8)    \
    PRODUCT_BY(rows, panels, matrix->kind == kind_, __VA_ARGS__, matrix->group, 4)
#else
#define NARROW_PRODUCT_OF(rows, panels, kind_, ...) PRODUCT_BY(rows, panels, matrix->kind == kind_, __VA_ARGS__, matrix->group, 2)
#endif
#define PRODUCTS_OF(rows, panels)                                      \
    PRODUCT_OF(rows, panels, PANELS_8_BITS, 0, 0, 0, 0)                \
    PRODUCT_OF(rows, panels, PANELS_8_BITS_MINIMUM, 0, 1, 0, 0)        \
    NARROW_PRODUCT_OF(rows, panels, PANELS_4_BITS, 1, 0, 0, 0)         \
    NARROW_PRODUCT_OF(rows, panels, PANELS_4_BITS_MINIMUM, 1, 1, 0, 0) \
    PRODUCT_OF(rows, panels, PANELS_4_BITS_TABLE, 1, 0, 1, 0)          \
    NARROW_PRODUCT_OF(rows, panels, PANELS_4_BITS_FLOAT16, 1, 0, 0, 1) \
    PRODUCT_OF(rows, panels, PANELS_4_BITS_TABLE_FLOAT16, 1, 0, 1, 1)
/* Compute outputs [first, end) for one block of packed rows; `first` is a multiple of 16. */
static void multiply_row_block(const Matrix *matrix, int first, int end, const float *x, float *y, int rows, int real_rows, size_t next_panel_bytes) {
    if (matrix->scale_columns) {
        multiply_super_blocks(matrix, first, end, x, y, rows, real_rows, next_panel_bytes);
        return;
    }
    switch (rows) { EACH_TILE(PRODUCTS_OF) }
}

/* Compute outputs [begin, end) for all rows. With several blocks of rows, each panel is multiplied with all blocks before the next panel: it stays
 * in the second-level cache, and the next panel is prefetched. */
void multiply_bytes(const Matrix *matrix, int begin, int end, const float *packed, float *y, int rows) {
    const int step = rows > MAX_ROWS ? LANES : end - begin;
    const size_t row_words = packed_byte_row_words(matrix);
#if MAX_ROWS == 4
    MultiplyBlocks *const multiply_blocks = find_multiply_blocks(matrix);
#endif
    for (int from = begin; from < end; from += step)
        for (int row = 0; row < rows; row += MAX_ROWS) {
#if MAX_ROWS == 4
            const int whole = (rows - row) / MAX_ROWS, blocks = whole < MAX_BLOCKS ? whole : MAX_BLOCKS;
            if (blocks > 1 && multiply_blocks) {
                multiply_blocks(matrix, from, packed + (size_t)row * row_words, MAX_ROWS * row_words, y + (size_t)row * (size_t)matrix->outputs, blocks,
                      row ? (size_t)matrix->row_bytes : 0);
                row += (blocks - 1) * MAX_ROWS;
                continue;
            }
#endif
            const int real = rows - row < MAX_ROWS ? rows - row : MAX_ROWS, to = from + step < end ? from + step : end;
            multiply_row_block(matrix, from, to, packed + (size_t)row * row_words, y + (size_t)row * (size_t)matrix->outputs, padded_block_rows(real), real,
                           row ? (size_t)matrix->row_bytes : 0);
        }
}

/* Return the size in bytes of a panel that is not a K-quant. */
int64_t paceline_panel_bytes(int32_t columns, int32_t group, int32_t kind) {
    const int64_t header = has_float16_scales(kind) ? (int64_t)sizeof(halfs) : (has_minimum(kind) ? 2 : 1) * (int64_t)sizeof(floats);
    return columns / group * (header + (int64_t)group * (has_narrow_codes(kind) ? 8 : 16));
}

/* Write one group of 8-bit codes of a panel's outputs; return the position after the group. */
static uint8_t *fill_byte_codes(const Matrix *from, words sign_mask, int first, int outputs, int column, uint8_t *to) {
    const uint8_t *const rows = from->codes + (size_t)first * (size_t)from->row_bytes;
    for (const int end = column + from->group; column < end; column += 64) {
        const int count = end - column < 64 ? (end - column) / 4 : LANES;
        words transposed[LANES];
        load_transposed(rows + column, (size_t)from->row_bytes, outputs, 4 * (size_t)count, transposed);
        for (int i = 0; i < count; i++) to = store_words(transposed[i] ^ sign_mask, to);
    }
    return to;
}

/* As fill_byte_codes, for 4-bit codes in runs of 32 columns: eight columns are the low nibbles, or the high nibbles, of two words. */
static uint8_t *fill_4_bit_codes(const Matrix *from, int first, int outputs, int column, uint8_t *to) {
    const uint8_t *const rows = from->codes + (size_t)first * (size_t)from->row_bytes;
    const int end = column + from->group;
    while (column < end) {
        const int run = column / 32, left = (end + 31) / 32 - run, runs = left < 4 ? left : 4;
        words transposed[LANES];
        load_transposed(rows + run * 16, (size_t)from->row_bytes, outputs, 16 * (size_t)runs, transposed);
        for (; column < end && column < (run + runs) * 32; column += 8) {
            const words *const pair = transposed + (column / 32 - run) * 4 + column % 16 / 8 * 2;
            const int shift = column % 32 / 16 * 4;
            to = store_words((pair[0] >> shift & 0x0F0F0F0Fu) | (pair[1] >> shift & 0x0F0F0F0Fu) << 4, to);
        }
    }
    return to;
}

/* Fill panels [begin, end) from a matrix stored row by row: codes [outputs, columns], scales and minimums [outputs, columns / group]. A code is a
 * byte, or 4 bits in runs of 32 columns: 16 bytes with the first 16 columns in the low nibbles, the others in the high nibbles. Outputs past the
 * end of the matrix are zeros. sign_mask: XORed with byte codes; 128 makes signed codes unsigned. */
void paceline_fill_panels(const Matrix *from, int32_t kind, int32_t sign_mask, int32_t begin, int32_t end, uint8_t *to) {
    const int group = from->group, groups = from->columns / group, narrow = has_narrow_codes(kind);
    const int64_t panel_bytes = paceline_panel_bytes(from->columns, group, kind);
    const words sign_masks = (words){0} + (uint32_t)sign_mask * 0x01010101u;
    for (int number = begin; number < end; number++) {
        uint8_t *at = to + number * panel_bytes;
        memset(at, 0, (size_t)panel_bytes);
        const int first = number * LANES, outputs = from->outputs - first < LANES ? from->outputs - first : LANES;
        for (int g = 0; g < groups; g++) {
            for (int n = 0; n < outputs; n++) {
                const float *scale = from->scales + (size_t)(first + n) * (size_t)groups + (size_t)g;
                if (!has_float16_scales(kind)) {
                    memcpy(at + 4 * n, scale, 4);
                    continue;
                }
                for (int i = 0; i < 2 && g % 2 == 0; i++) {
                    const _Float16 half = (_Float16)scale[i];
                    memcpy(at + i * (int)sizeof(halfs) + 2 * n, &half, 2);
                }
            }
            at += has_float16_scales(kind) && g % 2 ? 0 : sizeof(floats);
            if (has_minimum(kind)) {
                for (int n = 0; n < outputs; n++) memcpy(at + 4 * n, from->minimums + (size_t)(first + n) * (size_t)groups + (size_t)g, 4);
                at += sizeof(floats);
            }
            at = narrow ? fill_4_bit_codes(from, first, outputs, g * group, at) : fill_byte_codes(from, sign_masks, first, outputs, g * group, at);
        }
    }
}
