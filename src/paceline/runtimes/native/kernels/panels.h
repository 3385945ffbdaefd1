/* Products of quantised weights in panels with rows rounded to 8-bit codes ("packed as bytes"), for panels.c, super_blocks.c, small_blocks.c.
 *
 * A panel holds 16 outputs (rows of W), interleaved so that a vector instruction works on all of them. A quad is four consecutive columns: of
 * the weights 16 x 4 codes, one word of 4 bytes for each output; of a row of x one word of 4 codes, broadcast to all 16 lanes.
 *
 *     W, 16 outputs              panel: one stream                                        row of x, packed
 *     .--------------.           .--------------------------------------------.           .-------------------------.
 *     | output 0     |           | 16 scales (, 16 minimums) of group 0       |           | scale, offset, sum      | of group 0
 *     | output 1     |   --->    | quad 0: |o0|o1|o2|.....|o15| 4 bytes each  |     x     | |c0 c1 c2 c3|  quad 0   |
 *     |  ...         |           | quad 1: |o0|o1|o2|.....|o15|               |           | |c4 c5 c6 c7|  quad 1   |
 *     | output 15    |           |  ...                                       |           |  ...                    |
 *     '--------------'           | 16 scales of group 1, ...                  |           | scale, offset, sum ...  |
 *      columns in groups         '--------------------------------------------'           '-------------------------'
 *
 * Codes of 4 bits keep two quads in a word: columns 0 to 3 in the low nibbles of its bytes, 4 to 7 in the high ones. The FLOAT16 kinds store
 * the scales of two groups before the codes of both. Of TABLE kinds a code indexes 16 values. K-quants have a layout of their own (k_quants.h).
 * Several rows of x ("a block of rows", up to MAX_ROWS) are interleaved quad by quad, so that a quad of weights is loaded once for all. */
#ifndef PACELINE_PANELS_H
#define PACELINE_PANELS_H

#include "byte_dot.h"
#include "native.h"

#define MAX_PANELS 4
#define GROUP_HEADER 3 /* words of a packed row's group: scale, offset = (shift of the weights - zero_point) * sum of codes, scale * sum of codes */
#define EACH_ROW _Pragma("unroll") for (int row = 0; row < rows; row++)
#define EACH_PANEL _Pragma("unroll") for (int n = 0; n < panels; n++)
/* Prefetch `distance` bytes ahead, because the hardware prefetcher stops at page boundaries. With more than four rows a tile takes so long that
 * the next lines are also moved to the first-level cache. No run-time branch: it would keep the compiler from reordering. */
#define PREFETCH(from)                                      \
    {                                                       \
        if (rows > 4) __builtin_prefetch((from) + 1024, 0, 3); \
        __builtin_prefetch((from) + distance, 0, 2);        \
    }

/* Integer sums of a group: products, and for narrow codes 16-bit sums of pairs of products that are not widened yet. */
typedef struct {
    ints dot[MAX_PANELS][MAX_ROWS];
#if HAS_PAIRS
    pair_sums pairs[MAX_PANELS][MAX_ROWS];
#endif
} GroupSums;

/* Keep the float sums in memory during a group, where its integer sums need the registers. Otherwise compilers spill them several times. */
INLINE void keep_in_memory(floats sum[][MAX_ROWS], const int rows, const int panels) {
    if (HAS_SIGNS) EACH_PANEL EACH_ROW __asm__("" : "+m"(sum[n][row]));
}

/* Quads of narrow codes whose sums fit in 16 bits: 8 of 4 bits, 4 of 5, 2 of 6. */
#define QUADS_AT_ONCE(bits) (8 >> ((bits) - 4))

/* Add the products of a quad of each panel for all rows; return the row's next quad. `at_once` = 0: 8-bit codes. Else `number` counts quads, and
 * 16-bit sums are widened after every `at_once` of them. */
INLINE const int32_t *multiply_add(GroupSums *sums, const words *codes, const int32_t *quad, const int rows, const int panels, const int number,
                                   const int at_once) {
#if HAS_PAIRS
    if (at_once) {
        EACH_ROW EACH_PANEL {
            add_pairs(&sums->pairs[n][row], codes[n], quad[row], number % at_once == 0);
            if (number % at_once == at_once - 1) sums->dot[n][row] += widen_pairs(&sums->pairs[n][row]);
        }
        return quad + rows;
    }
#endif
    (void)number, (void)at_once;
    weight_codes w[MAX_PANELS];
    EACH_PANEL w[n] = split_codes(codes[n]);
    EACH_ROW EACH_PANEL sums->dot[n][row] = dot_bytes(w[n], quad + row * DOT_WORDS, sums->dot[n][row]);
    return quad + rows * DOT_WORDS;
}

/* Add the products of a quad of table codes. */
INLINE const int32_t *multiply_values(GroupSums *sums, const words *codes, code_table table, const int32_t *quad, const int rows, const int panels) {
    table_values w[MAX_PANELS];
    EACH_PANEL w[n] = look_up_values(codes[n], table);
    EACH_ROW EACH_PANEL sums->dot[n][row] = dot_values(w[n], quad + row * TABLE_WORDS, sums->dot[n][row], SIGNED);
    return quad + rows * TABLE_WORDS;
}

INLINE words load_codes(const uint8_t *from) {
    words codes;
    memcpy(&codes, from, sizeof codes);
    return codes;
}

/* Whether codes index a table, whose values can be as large as a byte. */
INLINE int is_by_table(int kind) {
    return kind == PANELS_4_BITS_TABLE || kind == PANELS_4_BITS_TABLE_FLOAT16 || kind == PANELS_IQ4_XS;
}

/* Return the table of values, shifted to be unsigned. */
INLINE code_table table_of(const Matrix *matrix, const int form) {
    bytes table = {0};
    for (int i = 0; i < 16; i++) table[i] = (uint8_t)(matrix->table[i] + matrix->zero_point);
    return split_table(table, form);
}

INLINE floats load_float16(const uint8_t *from) {
    halfs stored;
    memcpy(&stored, from, sizeof stored);
    return __builtin_convertvector(stored, floats);
}

/* Store sums with the bias; padding outputs and rows are dropped. */
INLINE void store_sums(const Matrix *matrix, int from, const floats *sums, const int rows, float *y, int real_rows) {
    const int outputs = matrix->outputs - from < LANES ? matrix->outputs - from : LANES;
    const floats bias = matrix->bias ? load_first(matrix->bias + from, outputs) : broadcast(0.0f);
    EACH_ROW if (row < real_rows) {
        const floats total = sums[row] + bias;
        store_part(y + (size_t)row * (size_t)matrix->outputs + from, total, outputs);
    }
}

/* Panels of a tile: as many streams as keep the memory busy while sums stay in registers; with more rows, arithmetic is the limit. */
#if MAX_ROWS == 8
#define PANELS_OF(rows) ((rows) <= 4 ? MAX_PANELS : 1)
#else
#define PANELS_OF(rows) ((rows) == 1 ? MAX_PANELS : (rows) == 2 ? 2 : 1)
#endif

/* Return the prefetch distance: later in this panel, or, if an earlier block of rows has read it, `ahead` bytes on in the next panel. A single
 * stream prefetches farther than each of several. */
INLINE size_t prefetch_distance(const int rows, size_t ahead) { return ahead ? ahead : PANELS_OF(rows) > 1 ? 1024 : 4096; }

#define TILE_OF(rows, PRODUCTS)         \
    case rows:                          \
        PRODUCTS(rows, PANELS_OF(rows)) \
        if (PANELS_OF(rows) > 1) {      \
            PRODUCTS(rows, 1)           \
        }                               \
        break;
#if MAX_ROWS == 8
#define EACH_TILE(PRODUCTS) \
    TILE_OF(1, PRODUCTS) TILE_OF(2, PRODUCTS) TILE_OF(3, PRODUCTS) TILE_OF(4, PRODUCTS) TILE_OF(6, PRODUCTS) TILE_OF(8, PRODUCTS)
#else
#define EACH_TILE(PRODUCTS) TILE_OF(1, PRODUCTS) TILE_OF(2, PRODUCTS) TILE_OF(3, PRODUCTS) TILE_OF(4, PRODUCTS)
#endif

/* PRODUCTS_OF_KIND defines the product of one kind from the file's multiply_tile. One function for all kinds takes much longer to compile. */
#define KIND_TILE(rows, panels)                                             \
    for (; first + ((panels) - 1) * LANES < end; first += (panels) * LANES) \
        multiply_tile(matrix, first, x, y, rows, real_rows, ahead, panels, kind);
#define PRODUCTS_OF_KIND(name, kind_)                                                                                        \
    __attribute__((noinline)) void name(const Matrix *matrix, int first, int end, const float *x, float *y, int rows,         \
                                        int real_rows, size_t ahead) {                                                       \
        const int kind = kind_;                                                                                              \
        switch (rows) { EACH_TILE(KIND_TILE) }                                                                               \
    }

/* Outputs [first, end) of one block of packed rows, of which `real_rows` are stored; `ahead`: see prefetch_distance. */
typedef void Multiply(const Matrix *matrix, int first, int end, const float *x, float *y, int rows, int real_rows, size_t ahead);
Multiply multiply_super_blocks;

#if MAX_ROWS == 4
/* Outputs [first, first + 16) of several whole blocks of packed rows, `step` words apart (few_registers.c). */
#define MAX_BLOCKS 8
typedef void MultiplyBlocks(const Matrix *matrix, int first, const float *packed, size_t step, float *y, int blocks, size_t ahead);
MultiplyBlocks *blocks_product_of(const Matrix *matrix);
#endif

#endif
