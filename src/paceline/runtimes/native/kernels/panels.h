/* Products of quantised weights in panels with rows of x rounded to 8-bit codes: what panels.c, super_blocks.c and low_bit_blocks.c share.
 *
 * A panel holds 16 outputs (rows of W), interleaved so that a vector has a part of each of them. A quad is four consecutive columns. A quad of a
 * panel is a vector: for each output one word of four codes. A quad of a row of x is one word of four codes, which is broadcast to all 16 lanes.
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
 * A word of 4-bit codes has two quads: columns 0 to 3 in the low nibbles of its bytes, 4 to 7 in the high ones. FLOAT16 kinds store the scales of
 * two groups before the codes of both. In TABLE kinds a code is an index into a table of 16 values. K-quants have another layout (k_quants.h).
 * Up to MAX_ROWS rows of x (a block of rows) are interleaved quad by quad, so that a quad of weights is loaded once for all of them. */
#ifndef PACELINE_PANELS_H
#define PACELINE_PANELS_H

#include "byte_dot.h"
#include "native.h"

#define MAX_PANELS 4 /* maximum number of panels of a tile */
/* Words of a packed row before a group's codes: scale; offset, the initial integer sum of the group (see pack_rows_as_bytes); scale * sum of codes. */
#define GROUP_HEADER 3
#define EACH_PANEL _Pragma("unroll") for (int n = 0; n < panels; n++)
/* Prefetch `distance` bytes ahead, because the hardware prefetcher stops at page boundaries. With more than four rows, a tile takes so long that
 * the next lines can also be moved to the first-level cache. `rows` is a constant: a branch at run time would keep the compiler from reordering. */
#define PREFETCH(from)                                         \
    {                                                          \
        if (rows > 4) __builtin_prefetch((from) + 1024, 0, 3); \
        __builtin_prefetch((from) + distance, 0, 2);           \
    }

/* Integer sums of a group. dot: sums of products. pairs: for codes of at most 6 bits, 16-bit sums not yet added to `dot`. */
typedef struct {
    ints dot[MAX_PANELS][MAX_ROWS];
#if HAS_PAIRS
    pair_sums pairs[MAX_PANELS][MAX_ROWS];
#endif
} GroupSums;

/* Make the compiler keep float sums in memory while a group's integer sums need the registers. Otherwise it moves the float sums several times. */
INLINE void keep_sums_in_memory(floats sum[][MAX_ROWS], const int rows, const int panels) {
    if (HAS_SIGNS) EACH_PANEL EACH_ROW __asm__("" : "+m"(sum[n][row]));
}

/* How many quads of products a 16-bit sum can hold: 8 quads of 4-bit codes, 4 of 5-bit codes, 2 of 6-bit codes. */
#define QUADS_PER_SUM(bits) (8 >> ((bits) - 4))

/* Add the products of a quad of each panel with the quads of all rows; return the position of the rows' next quads. number: index of the quad in
 * its group. quads_per_sum: QUADS_PER_SUM of the codes, after which 16-bit sums are widened; 0 for 8-bit codes. */
INLINE const int32_t *add_quad_products(GroupSums *sums, const words *codes, const int32_t *quad, const int rows, const int panels, const int number,
                                        const int quads_per_sum) {
#if HAS_PAIRS
    if (quads_per_sum) {
        EACH_ROW EACH_PANEL {
            add_pair_products(&sums->pairs[n][row], codes[n], quad[row], number % quads_per_sum == 0);
            if (number % quads_per_sum == quads_per_sum - 1) sums->dot[n][row] += widen_pair_sums(&sums->pairs[n][row]);
        }
        return quad + rows;
    }
#endif
    (void)number;
    weight_codes w[MAX_PANELS];
    EACH_PANEL w[n] = to_weight_codes(codes[n], quads_per_sum ? 0 : DOT_SHIFT);
#ifdef __ARM_NEON
    if (rows == 4) { /* one load for all rows, because the instruction can take a lane of a vector */
        int32x4_t x = vld1q_s32(quad);
        __asm__("" : "+w"(x));
        EACH_ROW EACH_PANEL sums->dot[n][row] = dot_repeated(w[n], (int32x4_t){x[row], x[row], x[row], x[row]}, sums->dot[n][row]);
        return quad + rows;
    }
#endif
    EACH_ROW EACH_PANEL sums->dot[n][row] = dot_bytes(w[n], quad + row * DOT_WORDS, sums->dot[n][row]);
    return quad + rows * DOT_WORDS;
}

/* As add_quad_products, for codes that are indices into a table. */
INLINE const int32_t *add_table_products(GroupSums *sums, const words *codes, code_table table, const int32_t *quad, const int rows, const int panels) {
    table_values w[MAX_PANELS];
    EACH_PANEL w[n] = look_up_values(codes[n], table);
    EACH_ROW EACH_PANEL sums->dot[n][row] = dot_table_values(w[n], quad + row * TABLE_WORDS, sums->dot[n][row], SIGN_BY_PSIGN);
    return quad + rows * TABLE_WORDS;
}

/* Return whether codes of this kind are indices into a table, whose values may need all 8 bits. */
INLINE int uses_table(int kind) { return kind == PANELS_4_BITS_TABLE || kind == PANELS_4_BITS_TABLE_FLOAT16 || kind == PANELS_IQ4_XS; }

/* Return the value table of a matrix; zero_point is added, so that its values are unsigned. */
INLINE code_table value_table_of(const Matrix *matrix, const int sign_method) {
    bytes table = {0};
    for (int i = 0; i < 16; i++) table[i] = (uint8_t)(matrix->table[i] + matrix->zero_point);
    return to_code_table(table, sign_method);
}

INLINE floats load_float16(const uint8_t *from) {
    halfs stored;
    memcpy(&stored, from, sizeof stored);
    return __builtin_convertvector(stored, floats);
}

/* Store the sums plus the bias for outputs [from, from + 16). Rows from real_rows on are padding and are not stored. */
INLINE void store_sums(const Matrix *matrix, int from, const floats *sums, const int rows, float *y, int real_rows) {
    const int outputs = matrix->outputs - from < LANES ? matrix->outputs - from : LANES;
    const floats bias = matrix->bias ? load_part(matrix->bias + from, outputs) : broadcast(0.0f);
    EACH_ROW if (row < real_rows) {
        const floats total = sums[row] + bias;
        store_part(y + (size_t)row * (size_t)matrix->outputs + from, total, outputs);
    }
}

/* Panels of a tile. Few rows: several panels, because several read streams use the memory bandwidth better; one if is_one_stream_best (Zen 5). More
 * rows: one panel, because registers are scarce and arithmetic takes longer than memory. */
extern int is_one_stream_best;
#if MAX_ROWS == 8
#define PANELS_OF(rows) ((rows) <= 4 ? MAX_PANELS : 1)
#else
#define PANELS_OF(rows) ((rows) == 1 ? MAX_PANELS : (rows) == 2 ? 2 : 1)
#endif

/* Return the prefetch distance in bytes. next_panel_bytes = 0: prefetch later weights of the same panel, farther ahead if it is the only read
 * stream. next_panel_bytes > 0: an earlier block of rows has loaded this panel, so prefetch the next panel, next_panel_bytes ahead. */
INLINE size_t prefetch_distance(const int panels, size_t next_panel_bytes) { return next_panel_bytes ? next_panel_bytes : panels > 1 ? 1024 : 4096; }

#define TILE_OF(rows, PRODUCTS)                                                             \
    case rows:                                                                              \
        if (PANELS_OF(rows) > 1 && !is_one_stream_best) { PRODUCTS(rows, PANELS_OF(rows)) } \
        PRODUCTS(rows, 1)                                                                   \
        break;
#if MAX_ROWS == 8
#define EACH_TILE(PRODUCTS) \
    TILE_OF(1, PRODUCTS) TILE_OF(2, PRODUCTS) TILE_OF(3, PRODUCTS) TILE_OF(4, PRODUCTS) TILE_OF(6, PRODUCTS) TILE_OF(8, PRODUCTS)
#else
#define EACH_TILE(PRODUCTS) TILE_OF(1, PRODUCTS) TILE_OF(2, PRODUCTS) TILE_OF(3, PRODUCTS) TILE_OF(4, PRODUCTS)
#endif

/* PRODUCTS_OF_KIND defines one kind's function from the includer's multiply_tile. One function for all kinds would take longer to compile. */
#define KIND_TILE(rows, panels)                                             \
    for (; first + ((panels) - 1) * LANES < end; first += (panels) * LANES) \
        multiply_tile(matrix, first, x, y, rows, real_rows, next_panel_bytes, panels, kind);
#define PRODUCTS_OF_KIND(name, kind_)                                                                                 \
    __attribute__((noinline)) void name(const Matrix *matrix, int first, int end, const float *x, float *y, int rows, \
                                        int real_rows, size_t next_panel_bytes) {                                     \
        const int kind = kind_;                                                                                       \
        switch (rows) { EACH_TILE(KIND_TILE) }                                                                        \
    }

/* Compute outputs [first, end) for one block of packed rows. Rows from real_rows on are padding. next_panel_bytes: see prefetch_distance. */
typedef void Multiply(const Matrix *matrix, int first, int end, const float *x, float *y, int rows, int real_rows, size_t next_panel_bytes);
Multiply multiply_super_blocks;

#if MAX_ROWS == 4
/* Compute outputs [first, first + 16) for several full blocks of packed rows, which are `step` words apart (few_registers.c). */
#define MAX_BLOCKS 8
typedef void MultiplyBlocks(const Matrix *matrix, int first, const float *packed, size_t step, float *y, int blocks, size_t next_panel_bytes);
MultiplyBlocks *find_multiply_blocks(const Matrix *matrix);
#endif

#endif
