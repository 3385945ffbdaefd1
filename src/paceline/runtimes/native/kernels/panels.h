/* What products with panels share (panels.c, super_blocks.c): 16 outputs side by side, rows packed as bytes. */
#ifndef PACELINE_PANELS_H
#define PACELINE_PANELS_H

#include "byte_dot.h"
#include "native.h"

#define MOST_PANELS 4
#define GROUP_HEADER 3 /* of a packed row's group: its scale, (shift of the weights - zero_point) sum q, scale sum q */
#define EACH_ROW _Pragma("unroll") for (int row = 0; row < rows; row++)
#define EACH_PANEL _Pragma("unroll") for (int n = 0; n < panels; n++)
/* The processor's own prefetching stops at every page, so ask early, `distance` bytes on; more rows than four take so long that what comes next
 * is wanted in the first-level cache as well. Without a branch: it would keep the compiler from ordering what is around it. */
#define PREFETCH(from)                                      \
    {                                                       \
        if (rows > 4) __builtin_prefetch((from) + 1024, 0, 3); \
        __builtin_prefetch((from) + distance, 0, 2);        \
    }

/* What is added up in a group: products, and pairs of products of narrow codes that are not widened yet. */
typedef struct {
    ints dot[MOST_PANELS][MAX_ROWS];
#if HAS_PAIRS
    pair_sums pairs[MOST_PANELS][MAX_ROWS];
#endif
} GroupSums;

/* Sums of all groups stay in memory where those of one group need the registers: compilers would move them there and back several times. */
INLINE void leave_in_memory(floats sum[][MAX_ROWS], const int rows, const int panels) {
    if (HAS_SIGNS) EACH_PANEL EACH_ROW __asm__("" : "+m"(sum[n][row]));
}

/* Quads of narrow codes whose pairs 16 bits hold: 8 of 4 bits, 4 of 5, 2 of 6. */
#define QUADS_AT_ONCE(bits) (8 >> ((bits) - 4))

/* Four columns of each panel for all rows; returns where the next quads are. at_once: 0 of codes of 8 bits; else `number` counts quads, and
 * pairs are widened behind every `at_once` of them. */
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
    weight_codes w[MOST_PANELS];
    EACH_PANEL w[n] = split_codes(codes[n]);
    EACH_ROW EACH_PANEL sums->dot[n][row] = dot_bytes(w[n], quad + row * DOT_WORDS, sums->dot[n][row]);
    return quad + rows * DOT_WORDS;
}

/* The same of codes that stand for values of a table. */
INLINE const int32_t *multiply_values(GroupSums *sums, const words *codes, code_table table, const int32_t *quad, const int rows, const int panels) {
    table_values w[MOST_PANELS];
    EACH_PANEL w[n] = look_up_values(codes[n], table);
    EACH_ROW EACH_PANEL sums->dot[n][row] = dot_values(w[n], quad + row * TABLE_WORDS, sums->dot[n][row], SIGNED);
    return quad + rows * TABLE_WORDS;
}

INLINE words load_codes(const uint8_t *from) {
    words codes;
    memcpy(&codes, from, sizeof codes);
    return codes;
}

/* The values of a kind with a table, unsigned at first. */
INLINE code_table table_of(const Matrix *matrix, const int form) {
    bytes table = {0};
    for (int i = 0; i < 16; i++) table[i] = (uint8_t)(matrix->table[i] + matrix->zero_point);
    return split_table(table, form);
}

INLINE floats load_halves(const uint8_t *from) {
    halfs stored;
    memcpy(&stored, from, sizeof stored);
    return __builtin_convertvector(stored, floats);
}

/* Sums with the bias, for the outputs and the rows that are there. */
INLINE void store_sums(const Matrix *matrix, int from, const floats *sums, const int rows, float *y, int real_rows) {
    const int outputs = matrix->outputs - from < LANES ? matrix->outputs - from : LANES;
    const floats bias = matrix->bias ? load_first(matrix->bias + from, outputs) : broadcast(0.0f);
    EACH_ROW if (row < real_rows) {
        const floats total = sums[row] + bias;
        store_part(y + (size_t)row * (size_t)matrix->outputs + from, total, outputs);
    }
}

/* Panels at once: as many streams as keep the memory busy while sums stay in registers; more rows are bound by arithmetic.
 * PRODUCTS(rows, panels) computes as many as there are. */
#if MAX_ROWS == 8
#define PANELS_OF(rows) ((rows) <= 4 ? MOST_PANELS : 1)
#else
#define PANELS_OF(rows) ((rows) == 1 ? MOST_PANELS : (rows) == 2 ? 2 : 1)
#endif

/* For what comes later in a panel, or, where an earlier block of rows has read this panel, for the same place of the next one, `ahead` bytes on.
 * One stream asks for more than each of several. */
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

/* Products of one kind of blocks, by a file's own multiply_tile. A function for each kind: compilers take much longer over one of all. */
#define KIND_TILE(rows, panels)                                             \
    for (; first + ((panels) - 1) * LANES < end; first += (panels) * LANES) \
        multiply_tile(matrix, first, x, y, rows, real_rows, ahead, panels, kind);
#define PRODUCTS_OF_KIND(name, kind_)                                                                                        \
    static __attribute__((noinline)) void name(const Matrix *matrix, int first, int end, const float *x, float *y, int rows, \
                                               int real_rows, size_t ahead) {                                                \
        const int kind = kind_;                                                                                              \
        switch (rows) { EACH_TILE(KIND_TILE) }                                                                               \
    }

/* What super_blocks.c leaves to small_blocks.c, by kinds. */
#define IS_SMALL(kind) ((kind) >= PANELS_Q2_K)
int64_t small_block_bytes(int32_t columns, int32_t block, int32_t kind);
void small_block_rows(const Matrix *matrix, const int32_t *numbers, int32_t count, float *to);
void fill_small_blocks(const SuperBlocks *from, int32_t begin, int32_t end, uint8_t *to);
void multiply_small_blocks(const Matrix *matrix, int first, int end, const float *x, float *y, int rows, int real_rows, size_t ahead);

void multiply_super_blocks(const Matrix *matrix, int first, int end, const float *x, float *y, int rows, int real_rows, size_t ahead);

/* Where few rows fill the registers, several blocks of rows share what is decoded of a super-block. */
#define SHARES_DECODING (MAX_ROWS == 4)
#define MOST_BLOCKS 8
int decode_iq4_xs(const uint8_t *header, int block, floats *scales);
void multiply_blocks_of_rows(const Matrix *matrix, int first, const float *packed, size_t step, float *y, int blocks, size_t ahead);
void multiply_table_blocks(const Matrix *matrix, int first, const float *packed, size_t step, float *y, int blocks, size_t ahead);

#endif
