/* Products with weights in groups of 4- or 8-bit codes, of rows rounded to 8-bit codes group by group, in integers.
 *
 * A row's group has the scale max |x| / 127. With codes c of the weights and q of the row,
 *     sum over columns of (scale_w (c - zero_point) + minimum) scale_x q
 *   = scale_w scale_x (sum c q - zero_point sum q) + minimum scale_x sum q,
 * one group after the other, in float32. Sums of integers are exact, so a row's bits depend on nothing else.
 *
 * Weights lie in panels of 16 outputs side by side, one group of columns after the other: 16 scales, 16 minimums if there are any (or, of the
 * kinds with halves, 16 scales of this group and of the next one, in front of every other group), then the codes, [columns / 4][16 outputs]
 * [4 columns], or [columns / 8][16 outputs][4 bytes] with four columns in the low halves of the bytes and the next four in the high ones. What
 * a pass reads is one stream. K-quants have panels of their own (super_blocks.c). */
#include "panels.h"
#include "transpose.h"

static int is_narrow(int kind) { return kind >= PANELS_4_BITS; }
static int has_minimum(int kind) { return kind == PANELS_8_BITS_MINIMUM || kind == PANELS_4_BITS_MINIMUM; }
static int has_halves(int kind) { return kind >= PANELS_4_BITS_HALVES; }

static size_t group_words(int group) { return (size_t)(GROUP_HEADER + group / 4 * DOT_WORDS); }

size_t packed_bytes_words(int columns, int group) { return (size_t)(columns / group) * group_words(group); }

/* The codes of one group of a row; returns its scale. */
static float quantize(const float *x, int group, int32_t *codes, int32_t *total) {
    words largest = {0};
    for (int i = 0; i < group; i += LANES) { /* as bits, so that what is not a number is the largest */
        const words size = (words)load(x + i) & 0x7FFFFFFFu;
        largest = __builtin_elementwise_max(size, largest);
    }
    uint32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits = largest[lane] > bits ? largest[lane] : bits;
    float most;
    memcpy(&most, &bits, sizeof most);
    const int is_finite = bits < 0x7F800000u;
    const floats inverse = broadcast(is_finite && most > 1e-30f ? 127.0f / most : 0.0f);
    ints sums = {0};
    for (int i = 0; i < group; i += LANES) {
        const floats value = is_finite ? load(x + i) : broadcast(0.0f);
        const ints code = __builtin_convertvector(__builtin_elementwise_roundeven(value * inverse), ints);
        memcpy(codes + i, &code, sizeof code);
        sums += code;
    }
    *total = 0;
    for (int lane = 0; lane < LANES; lane++) *total += sums[lane];
    return is_finite ? most / 127.0f : most - most; /* not a number */
}

/* `real` rows of x [rows, columns] from row `first` on as [columns / group][header, then quads][padded rows]; numbers as in pack_rows. */
void pack_bytes(const float *x, const int32_t *numbers, int columns, int group, int zero_point, int first, int real, int padded, float *packed) {
    int32_t codes[MAX_GROUP];
    for (int begin = 0; begin < columns; begin += group, packed += group_words(group) * (size_t)padded)
        for (int row = 0; row < padded; row++) {
            int32_t total, *quad = (int32_t *)packed + GROUP_HEADER * padded + row * DOT_WORDS;
            const int place = first + (row < real ? row : 0);
            const float scale = quantize(x + (size_t)(numbers ? numbers[place] : place) * (size_t)columns + begin, group, codes, &total);
            const int32_t offset = (DOT_SHIFT - zero_point) * total;
            packed[row] = scale;
            memcpy(packed + padded + row, &offset, sizeof offset);
            packed[2 * padded + row] = scale * (float)total;
            for (int i = 0; i < group; i += 4, quad += padded * DOT_WORDS) store_codes(quad, codes + i);
        }
}

/* `panels` panels (1, 2 or 4, which share what is loaded of the rows) for `rows` packed rows. */
INLINE void multiply_panels(const Matrix *matrix, int first, const float *x, float *y, const int rows, int real_rows, size_t ahead,
                            const int panels, const int narrow, const int minimum, const int has_table, const int halves) {
    const int group = matrix->group, columns = matrix->columns;
    const size_t next = (size_t)matrix->row_bytes, distance = prefetch_distance(rows, ahead);
    const uint8_t *at = matrix->codes + (size_t)(first / LANES) * next, *header = at;
    floats sum[MOST_PANELS][MAX_ROWS];
    bytes table = {0};
    for (int i = 0; has_table && i < 16; i++) table[i] = (uint8_t)(matrix->table[i] + matrix->zero_point);
    EACH_PANEL EACH_ROW sum[n][row] = broadcast(0.0f);
    for (int begin = 0; begin < columns; begin += group) {
        const int32_t *offsets = (const int32_t *)x + rows, *quad = (const int32_t *)x + GROUP_HEADER * rows;
        const int is_second = halves && begin / group % 2;
        ints dot[MOST_PANELS][MAX_ROWS];
        EACH_ROW EACH_PANEL dot[n][row] = broadcast_int(offsets[row]);
        EACH_PANEL for (int line = 0; line < (minimum ? 2 : 1); line++) PREFETCH(at + (size_t)n * next + line * sizeof(floats))
        header = is_second ? header + sizeof(halfs) : at;
        at += is_second ? 0 : (minimum ? 2 : 1) * sizeof(floats);
        for (int column = 0; column < group; column += narrow ? 8 : 4, at += sizeof(words)) {
            words codes[MOST_PANELS];
            EACH_PANEL {
                codes[n] = load_codes(at + (size_t)n * next);
                PREFETCH(at + (size_t)n * next)
            }
            _Pragma("unroll") for (int shift = 0; shift < (narrow ? 8 : 4); shift += 4) {
                weight_codes w[MOST_PANELS];
                EACH_PANEL {
                    const words own = narrow ? codes[n] >> shift & 0x0F0F0F0Fu : codes[n];
                    w[n] = split_codes(has_table ? look_up(own, table) : own);
                }
                MULTIPLY_ADD(w)
            }
        }
        EACH_PANEL {
            const floats scale = halves ? load_halves(header + (size_t)n * next) : load((const float *)(header + (size_t)n * next));
            EACH_ROW sum[n][row] = fused(__builtin_convertvector(dot[n][row], floats), scale * broadcast(x[row]), sum[n][row]);
            if (minimum) {
                const floats least = load((const float *)(header + (size_t)n * next) + LANES);
                EACH_ROW sum[n][row] = fused(least, broadcast(x[2 * rows + row]), sum[n][row]);
            }
        }
        x = (const float *)quad;
    }
    EACH_PANEL store_sums(matrix, first + n * LANES, sum[n], rows, y, real_rows);
}

#define PRODUCT_OF(rows, panels, kind_, narrow, minimum, has_table, halves)                                                    \
    if (matrix->kind == kind_)                                                                                                \
        for (; first + ((panels) - 1) * LANES < end; first += (panels) * LANES)                                                 \
            multiply_panels(matrix, first, x, y, rows, real_rows, ahead, panels, narrow, minimum, has_table, halves);
#define PRODUCTS_OF(rows, panels)                                  \
    PRODUCT_OF(rows, panels, PANELS_8_BITS, 0, 0, 0, 0)            \
    PRODUCT_OF(rows, panels, PANELS_8_BITS_MINIMUM, 0, 1, 0, 0)    \
    PRODUCT_OF(rows, panels, PANELS_4_BITS, 1, 0, 0, 0)            \
    PRODUCT_OF(rows, panels, PANELS_4_BITS_MINIMUM, 1, 1, 0, 0)    \
    PRODUCT_OF(rows, panels, PANELS_4_BITS_TABLE, 1, 0, 1, 0)      \
    PRODUCT_OF(rows, panels, PANELS_4_BITS_HALVES, 1, 0, 0, 1)     \
    PRODUCT_OF(rows, panels, PANELS_4_BITS_TABLE_HALVES, 1, 0, 1, 1)
/* Outputs [first, end) of one block of packed rows; `first` is a multiple of 16. */
static void multiply_block(const Matrix *matrix, int first, int end, const float *x, float *y, int rows, int real_rows, size_t ahead) {
    if (matrix->block) {
        multiply_super_blocks(matrix, first, end, x, y, rows, real_rows, ahead);
        return;
    }
    switch (rows) { EACH_TILE(PRODUCTS_OF) }
}

/* Outputs [begin, end) of every row, panel after panel where there are more blocks of rows than one: the blocks behind the first find a panel in
 * the second-level cache, and the memory has their time to bring the next one. */
void multiply_bytes(const Matrix *matrix, int begin, int end, const float *packed, float *y, int rows) {
    const int step = rows > MAX_ROWS ? LANES : end - begin;
    const size_t row_words = packed_bytes_words(matrix->columns, matrix->group);
    for (int from = begin; from < end; from += step)
        for (int row = 0; row < rows; row += MAX_ROWS) {
            const int real = rows - row < MAX_ROWS ? rows - row : MAX_ROWS, to = from + step < end ? from + step : end;
            multiply_block(matrix, from, to, packed + (size_t)row * row_words, y + (size_t)row * (size_t)matrix->outputs, tile_rows(real), real,
                           row ? (size_t)matrix->row_bytes : 0);
        }
}

/* Bytes of a panel. */
int64_t paceline_panel_bytes(int32_t columns, int32_t group, int32_t kind) {
    const int64_t header = has_halves(kind) ? (int64_t)sizeof(halfs) : (has_minimum(kind) ? 2 : 1) * (int64_t)sizeof(floats);
    return columns / group * (header + (int64_t)group * (is_narrow(kind) ? 8 : 16));
}

static uint8_t *fill_bytes(const Matrix *from, words flipped, int first, int outputs, int column, uint8_t *to) {
    const uint8_t *const rows = from->codes + (size_t)first * (size_t)from->row_bytes;
    for (const int end = column + from->group; column < end; column += 64) {
        const int count = end - column < 64 ? (end - column) / 4 : LANES;
        words own[LANES];
        load_transposed(rows + column, (size_t)from->row_bytes, outputs, 4 * (size_t)count, own);
        for (int i = 0; i < count; i++) to = put(own[i] ^ flipped, to);
    }
    return to;
}

/* Columns of one half of a run lie side by side: eight of them are the same halves of two words of each row. */
static uint8_t *fill_halves(const Matrix *from, int first, int outputs, int column, uint8_t *to) {
    const uint8_t *const rows = from->codes + (size_t)first * (size_t)from->row_bytes;
    const int end = column + from->group;
    while (column < end) {
        const int run = column / 32, left = (end + 31) / 32 - run, runs = left < 4 ? left : 4;
        words own[LANES];
        load_transposed(rows + run * 16, (size_t)from->row_bytes, outputs, 16 * (size_t)runs, own);
        for (; column < end && column < (run + runs) * 32; column += 8) {
            const words *const pair = own + (column / 32 - run) * 4 + column % 16 / 8 * 2;
            const int shift = column % 32 / 16 * 4;
            to = put((pair[0] >> shift & 0x0F0F0F0Fu) | (pair[1] >> shift & 0x0F0F0F0Fu) << 4, to);
        }
    }
    return to;
}

/* Panels [begin, end) of a matrix stored row by row: codes [outputs, columns] of bytes, or of halves in runs of 32, the first 16 of a run in
 * the low ones; scales and minimums [outputs, columns / group]. Outputs that are not there become zeros. `flipped` is added to every byte:
 * 128 makes signed codes unsigned. */
void paceline_fill_panels(const Matrix *from, int32_t kind, int32_t flipped, int32_t begin, int32_t end, uint8_t *to) {
    const int group = from->group, groups = from->columns / group, narrow = is_narrow(kind);
    const int64_t panel_bytes = paceline_panel_bytes(from->columns, group, kind);
    const words flips = (words){0} + (uint32_t)flipped * 0x01010101u;
    for (int number = begin; number < end; number++) {
        uint8_t *at = to + number * panel_bytes;
        memset(at, 0, (size_t)panel_bytes);
        const int first = number * LANES, outputs = from->outputs - first < LANES ? from->outputs - first : LANES;
        for (int g = 0; g < groups; g++) {
            for (int n = 0; n < outputs; n++) {
                const float *scale = from->scales + (size_t)(first + n) * (size_t)groups + (size_t)g;
                if (!has_halves(kind)) {
                    memcpy(at + 4 * n, scale, 4);
                    continue;
                }
                for (int own = 0; own < 2 && g % 2 == 0; own++) {
                    const _Float16 half = (_Float16)scale[own];
                    memcpy(at + own * (int)sizeof(halfs) + 2 * n, &half, 2);
                }
            }
            at += has_halves(kind) && g % 2 ? 0 : sizeof(floats);
            if (has_minimum(kind)) {
                for (int n = 0; n < outputs; n++) memcpy(at + 4 * n, from->minimums + (size_t)(first + n) * (size_t)groups + (size_t)g, 4);
                at += sizeof(floats);
            }
            at = narrow ? fill_halves(from, first, outputs, g * group, at) : fill_bytes(from, flips, first, outputs, g * group, at);
        }
    }
}
