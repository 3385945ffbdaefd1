/* Matrix products y = x W^T with W as it is stored: float32, float16, bfloat16, or integer codes in groups.
 *
 * Weights are decoded to their exact float32 values in registers, once for up to MAX_ROWS rows of x, and multiplied in float32. Where
 * bfloat16 is the type of computation, rows of x are rounded to it and multiplied with bfloat16 weights as they are (bf16.h). Every output is
 * one sum in 16 lanes over ascending columns, whatever the number of rows: a row's bits never depend on its neighbours. Rows of x are packed
 * first (pack_rows), so that what one step needs of all rows lies side by side. */
#include "native.h"
#include "bf16.h"
#include "plain.h"
#include "vectors.h"

INLINE ints load_bytes(const uint8_t *codes) {
    bytes from;
    memcpy(&from, codes, sizeof from);
    return __builtin_convertvector(from, ints);
}

INLINE floats decode_8_bits(const int kind, const uint8_t *codes, int zero_point) {
    if (kind != S8) return __builtin_convertvector(load_bytes(codes) - zero_point, floats);
    signed_bytes from;
    memcpy(&from, codes, sizeof from);
    return __builtin_convertvector(__builtin_convertvector(from, ints), floats);
}

/* What turns the 4-bit codes of one group into values: with AVX-512 the values of all 16 codes. */
typedef struct {
#ifdef __AVX512F__
    floats table;
#else
    floats codes, scale, minimum;
#endif
} GroupOf4Bits;

/* The values of the codes of U4_TABLE, before they are scaled. */
INLINE floats table_of(const Matrix *matrix) {
    signed_bytes values;
    memcpy(&values, matrix->table, sizeof values);
    return __builtin_convertvector(__builtin_convertvector(values, ints), floats);
}

INLINE GroupOf4Bits group_of_4_bits(floats code_values, float scale, float minimum, const int kind) {
#ifdef __AVX512F__
    const floats table = code_values * broadcast(scale);
    return (GroupOf4Bits){kind == U4_MINIMUM ? table + broadcast(minimum) : table};
#else
    (void)kind;
    return (GroupOf4Bits){code_values, broadcast(scale), broadcast(minimum)};
#endif
}

/* The values of the low 4 bits of each code. */
INLINE floats decode_4_bits(ints codes, GroupOf4Bits group, int zero_point, const int kind) {
#ifdef __AVX512F__
    (void)zero_point, (void)kind;
    return (floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)group.table);
#else
    if (kind == U4_TABLE) {
        floats value;
        for (int lane = 0; lane < LANES; lane++) value[lane] = group.codes[codes[lane] & 15];
        return value * group.scale;
    }
    const floats value = __builtin_convertvector((codes & 15) - zero_point, floats) * group.scale;
    return kind == U4_MINIMUM ? value + group.minimum : value;
#endif
}

/* `count` bfloat16 of a row, the rest zero. */
INLINE words load_words(const uint8_t *codes, int count) {
    words bits = {0};
    memcpy(&bits, codes, 2 * (size_t)count);
    return bits;
}

/* The lanes of the sums [outputs][rows] of a tile added up, with the bias, for the rows that are there. */
INLINE void finish(const Matrix *matrix, int first, const floats *sums, const int outputs, const int rows, float *y, int real_rows) {
    float totals[8 * MAX_ROWS];
    _Pragma("unroll") for (int from = 0; from < outputs * rows; from += LANES) {
        floats some[LANES];
        _Pragma("unroll") for (int i = 0; i < LANES; i++) some[i] = from + i < outputs * rows ? sums[from + i] : broadcast(0.0f);
        store(totals + from, lane_sums(some));
    }
    for (int row = 0; row < real_rows; row++)
        _Pragma("unroll") for (int n = 0; n < outputs; n++) {
            const float bias = matrix->bias ? matrix->bias[first + n] : 0.0f;
            y[(size_t)row * (size_t)matrix->outputs + (size_t)(first + n)] = totals[n * rows + row] + bias;
        }
}

#define PRODUCT product
#define TILE "tile.h"
#define KIND F32
#include "tiles_of_kind.h"
#define KIND F16
#include "tiles_of_kind.h"
#define KIND BF16
#include "tiles_of_kind.h"
#define KIND S8
#include "tiles_of_kind.h"
#define KIND U8
#include "tiles_of_kind.h"
#define KIND U8_MINIMUM
#include "tiles_of_kind.h"
#define KIND U4
#include "tiles_of_kind.h"
#define KIND U4_MINIMUM
#include "tiles_of_kind.h"
#define KIND U4_TABLE
#include "tiles_of_kind.h"
#undef PRODUCT
#undef TILE

/* Outputs that one row packed as bfloat16 is multiplied with at once: nothing but memory is waited for, which is fastest where it is read in
 * the order it lies in. Two sums hide how long one addition takes, which counts where weights are in a cache. */
#ifdef __AVX512BF16__
#define ROW_OUTPUTS 2
#else
#define ROW_OUTPUTS 4
#endif

#define BYTES_AHEAD 3072 /* of what is asked for where one output follows another */

/* sums [outputs] of one row. What comes next is asked for meanwhile, in the order it lies in. */
INLINE void bf16_row(const Matrix *matrix, int first, const float *x, floats (*sums)[1], const int outputs) {
    const int columns = matrix->columns;
    const size_t row_bytes = (size_t)matrix->row_bytes;
    const uint8_t *const codes = matrix->codes + (size_t)first * row_bytes;
    const uint8_t *next = codes + (outputs > 1 ? (size_t)outputs * row_bytes : BYTES_AHEAD);
    _Pragma("unroll") for (int n = 0; n < outputs; n++) sums[n][0] = broadcast(0.0f);
    int column = 0;
    for (; column + BF16_STEP <= columns; column += BF16_STEP, x += BF16_STEP_FLOATS)
        _Pragma("unroll") for (int n = 0; n < outputs; n++, next += sizeof(words)) {
            __builtin_prefetch(next, 0, 2);
            const bf16s w = bf16_of(load_words(codes + (size_t)n * row_bytes + 2 * (size_t)column, BF16_STEP));
            sums[n][0] = dot_bf16(w, load_bf16(x), sums[n][0]);
        }
    if (column < columns)
        _Pragma("unroll") for (int n = 0; n < outputs; n++) {
            const bf16s w = bf16_of(load_words(codes + (size_t)n * row_bytes + 2 * (size_t)column, columns - column));
            sums[n][0] = dot_bf16(w, load_bf16(x), sums[n][0]);
        }
}

/* With one instruction a cache line a lone sum keeps up with memory: a row of a pass alone then reads a large matrix, which one expects in no
 * cache, output by output. */
#ifdef __AVX512BF16__
#define IN_ORDER(matrix, rows) ((rows) == 1 && (size_t)(matrix)->outputs * (size_t)(matrix)->row_bytes >= 2 << 20)
#else
#define IN_ORDER(matrix, rows) 0
#endif

/* Outputs [n, end) of one row. */
static void bf16_in_order(const Matrix *matrix, int n, int end, const float *x, float *y) {
    enum { outputs = 8 };
    floats sums[outputs][1];
    for (; n + outputs <= end; n += outputs) {
        _Pragma("unroll") for (int i = 0; i < outputs; i++) bf16_row(matrix, n + i, x, sums + i, 1);
        finish(matrix, n, &sums[0][0], outputs, 1, y, 1);
    }
    for (; n < end; n++) {
        bf16_row(matrix, n, x, sums, 1);
        finish(matrix, n, &sums[0][0], 1, 1, y, 1);
    }
}

#define PRODUCT bf16
#define TILE "bf16_tile.h"
#define KIND BF16
#include "tiles_of_kind.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#include "bf16_blocks.h"
#define IN_BLOCKS(rows) ((rows) > 2)
#else
#define bf16_blocks bf16_2
#define IN_BLOCKS(rows) 0
#endif

typedef void Product(const Matrix *, int, int, const float *, float *, int, int);
static Product *const PRODUCTS[] = {product_0, product_1, product_2, product_3, product_4, product_5, product_6, product_7, product_8};

/* Rows of a block as computed: some counts have no tile of their own and take the next larger one. */
int tile_rows(int rows) { return MAX_ROWS == 8 && (rows == 5 || rows == 7) ? rows + 1 : rows; }

static size_t steps_of(int columns, int step) { return (size_t)(columns + step - 1) / (size_t)step; }

/* Floats of a packed row. */
static size_t packed_columns(int columns, int packing) {
    return packing == AS_FLOATS ? steps_of(columns, LANES) * LANES : steps_of(columns, BF16_STEP) * BF16_STEP_FLOATS;
}

size_t packed_row(const Matrix *matrix, int packing) {
    return packing == AS_BYTES ? packed_bytes_words(matrix) : packed_columns(matrix->columns, packing);
}

size_t packed_floats(int rows, int columns) {
    const size_t floats_a_row = packed_columns(columns, AS_FLOATS), bf16_a_row = packed_columns(columns, AS_BF16);
    return steps_of(rows, MAX_ROWS) * MAX_ROWS * (floats_a_row > bf16_a_row ? floats_a_row : bf16_a_row);
}

/* Row `row` of x from `column` on, zero behind its last column. */
INLINE floats take(const float *x, int columns, int row, int column) {
    const float *from = x + (size_t)row * columns + column;
    if (column + LANES <= columns) return load(from);
    return column < columns ? load_first(from, columns - column) : broadcast(0.0f);
}

/* 32 columns from `column` on as pairs of bfloat16. */
static bf16s take_bf16(const float *x, int columns, int row, int column) {
    const floats a = round_to_bf16(take(x, columns, row, column)), b = round_to_bf16(take(x, columns, row, column + LANES));
    return join_bf16(SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                     SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31));
}

INLINE int number_of(const int32_t *numbers, int row) { return numbers ? numbers[row] : row; }

/* Columns [begin, end) of block `block` of x [rows, columns] as [columns / step][rows of the block][step], zero where there is nothing: for
 * products with `matrix`. Both are multiples of the group, or of 32, or the end of the columns.
 * numbers [rows]: which rows of x they are; NULL = the first ones. */
void pack_rows(const Matrix *matrix, const float *x, const int32_t *numbers, int rows, int packing, int block, int begin, int end, float *packed) {
    const int first = block * MAX_ROWS, real = rows - first < MAX_ROWS ? rows - first : MAX_ROWS, padded = tile_rows(real);
    const int columns = matrix->columns;
    float *to = packed + (size_t)first * packed_row(matrix, packing);
    if (packing == AS_BYTES) {
        pack_bytes(matrix, x, numbers, first, real, padded, begin, end, to);
        return;
    }
    if (packing == AS_FLOATS) {
        to += (size_t)begin * (size_t)padded;
        for (int column = begin; column < end; column += LANES)
            for (int row = 0; row < padded; row++, to += LANES)
                store(to, row < real ? take(x, columns, number_of(numbers, first + row), column) : broadcast(0.0f));
        return;
    }
    to += (size_t)(begin / BF16_STEP * padded) * BF16_STEP_FLOATS;
    for (int column = begin; column < end; column += BF16_STEP)
        for (int row = 0; row < padded; row++, to += BF16_STEP_FLOATS) {
            const bf16s taken = take_bf16(x, columns, number_of(numbers, first + (row < real ? row : 0)), column);
            memcpy(to, &taken, sizeof taken);
        }
}

/* Outputs [begin, end) of every row. */
void multiply(const Matrix *matrix, int begin, int end, int packing, const float *packed, float *y, int rows) {
    if (packing == AS_BYTES) {
        multiply_bytes(matrix, begin, end, packed, y, rows);
        return;
    }
    if (packing == AS_BF16 && IN_ORDER(matrix, rows)) {
        bf16_in_order(matrix, begin, end, packed, y);
        return;
    }
    for (int first = 0; first < rows; first += MAX_ROWS) {
        const int real = rows - first < MAX_ROWS ? rows - first : MAX_ROWS;
        Product *const product = packing != AS_BF16 ? PRODUCTS[matrix->kind] : IN_BLOCKS(real) ? bf16_blocks : bf16_2;
        product(matrix, begin, end, packed + (size_t)first * packed_row(matrix, packing),
                y + (size_t)first * (size_t)matrix->outputs, tile_rows(real), real);
    }
}
