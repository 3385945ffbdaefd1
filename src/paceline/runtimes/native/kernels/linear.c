/* Matrix products y = x W^T with row-major W: float32, float16, bfloat16, or 8-bit codes in groups (only for `--dtype f32` and for drafting heads).
 *
 * A tile is a number of outputs times a number of rows of x, chosen so that its sums stay in registers. Weights are converted to float32 once for
 * up to MAX_ROWS rows. If bfloat16 is the compute type, rows are rounded and multiplied as bfloat16 (bf16.h). Each result is one sum in 16 lanes
 * over ascending columns, whatever the number of rows, so a row's bits do not depend on the other rows. Rows of x are packed first (pack_rows): 16
 * or 32 columns of each row in turn. */
#include "linear.h"

/* Prefetch the next tile's weights to the second-level cache. The hardware prefetcher follows a row of W, but not to the next row. */
#define PREFETCH_NEXT(n, offset) __builtin_prefetch(codes[n] + next_tile + (offset), 0, 2);

INLINE void multiply_add(floats *sum, const floats *w, const float *packed, const int rows, const int outputs) {
    EACH_ROW {
        const floats xs = load(packed + row * LANES);
        EACH_OUTPUT sum[n * rows + row] = fmadd(w[n], xs, sum[n * rows + row]);
    }
}

/* Compute a tile of an F32, F16 or BF16 matrix: outputs [first, first + outputs) of all packed rows. */
INLINE void multiply_float_tile(const Matrix *matrix, int first, const float *x, float *y, int real_rows, const int kind, const int rows, const int outputs) {
    const int columns = matrix->columns;
    floats sum[MAX_TILE_OUTPUTS * MAX_ROWS], w[MAX_TILE_OUTPUTS];
    const uint8_t *codes[MAX_TILE_OUTPUTS];
    const size_t next_tile = (size_t)outputs * (size_t)matrix->row_bytes;
    EACH_OUTPUT {
        codes[n] = matrix->codes + (size_t)(first + n) * (size_t)matrix->row_bytes;
        EACH_ROW sum[n * rows + row] = broadcast(0.0f);
    }
    int column = 0;
    for (; column + LANES <= columns; column += LANES, x += rows * LANES) {
        EACH_OUTPUT {
            PREFETCH_NEXT(n, (kind == F32 ? 4 : 2) * (size_t)column)
            w[n] = load_weights(kind, codes[n], column, LANES);
        }
        multiply_add(sum, w, x, rows, outputs);
    }
    if (column < columns) {
        EACH_OUTPUT w[n] = load_weights(kind, codes[n], column, columns - column);
        multiply_add(sum, w, x, rows, outputs);
    }
    store_lane_sums(matrix, first, sum, outputs, rows, y, real_rows);
}

/* Compute a tile of a U8 or U8_MINIMUM matrix. A weight is scale * (code - zero_point) + minimum, rounded after each operation. */
INLINE void multiply_u8_tile(const Matrix *matrix, int first, const float *x, float *y, int real_rows, const int kind, const int rows, const int outputs) {
    const int columns = matrix->columns, group = matrix->group;
    const size_t groups = (size_t)(columns / group), next_tile = (size_t)outputs * (size_t)matrix->row_bytes;
    const float *scales = matrix->scales + (size_t)first * groups;
    const float *minimums = kind == U8_MINIMUM ? matrix->minimums + (size_t)first * groups : scales;
    floats sum[MAX_TILE_OUTPUTS * MAX_ROWS], w[MAX_TILE_OUTPUTS];
    const uint8_t *codes[MAX_TILE_OUTPUTS];
    EACH_OUTPUT {
        codes[n] = matrix->codes + (size_t)(first + n) * (size_t)matrix->row_bytes;
        EACH_ROW sum[n * rows + row] = broadcast(0.0f);
    }
    size_t g = 0;
    for (int begin = 0; begin < columns; begin += group, g++)
        for (int column = begin; column < begin + group; column += LANES, x += rows * LANES) {
            EACH_OUTPUT {
                PREFETCH_NEXT(n, column)
                bytes stored;
                memcpy(&stored, codes[n] + column, sizeof stored);
                const ints code = __builtin_convertvector(stored, ints) - matrix->zero_point;
                w[n] = __builtin_convertvector(code, floats) * broadcast(scales[(size_t)n * groups + g]);
                if (kind == U8_MINIMUM) w[n] = w[n] + broadcast(minimums[(size_t)n * groups + g]);
            }
            multiply_add(sum, w, x, rows, outputs);
        }
    store_lane_sums(matrix, first, sum, outputs, rows, y, real_rows);
}

/* Outputs computed together for a single bfloat16 row. Reading W takes most of the time and is fastest in storage order, so there are few outputs.
 * With only one, each addition would wait for the previous addition. */
#ifdef __AVX512BF16__
#define ONE_ROW_OUTPUTS 2
#else
#define ONE_ROW_OUTPUTS 4
#endif

#define PREFETCH_DISTANCE_BYTES 3072 /* prefetch distance if outputs are computed one after another */

/* Compute the sums of `outputs` outputs for one bfloat16 row, and prefetch the weights that follow in storage order. */
INLINE void sum_bf16_row(const Matrix *matrix, int first, const float *x, floats *sums, const int outputs) {
    const int columns = matrix->columns;
    const size_t row_bytes = (size_t)matrix->row_bytes;
    const uint8_t *const codes = matrix->codes + (size_t)first * row_bytes;
    const uint8_t *next = codes + (outputs > 1 ? (size_t)outputs * row_bytes : PREFETCH_DISTANCE_BYTES);
    EACH_OUTPUT sums[n] = broadcast(0.0f);
    int column = 0;
    for (; column + BF16_STEP <= columns; column += BF16_STEP, x += BF16_STEP_FLOATS)
        _Pragma("unroll") for (int n = 0; n < outputs; n++, next += sizeof(words)) {
            __builtin_prefetch(next, 0, 2);
            const bf16s w = unpack_bf16(load_bf16_codes(codes + (size_t)n * row_bytes + 2 * (size_t)column, BF16_STEP));
            sums[n] = dot_bf16(w, load_bf16(x), sums[n]);
        }
    if (column < columns)
        EACH_OUTPUT {
            const bf16s w = unpack_bf16(load_bf16_codes(codes + (size_t)n * row_bytes + 2 * (size_t)column, columns - column));
            sums[n] = dot_bf16(w, load_bf16(x), sums[n]);
        }
}

INLINE void multiply_add_bf16(floats *sum, const bf16s *w, const float *packed, const int rows, const int outputs) {
    EACH_ROW {
        const bf16s xs = load_bf16(packed + row * (int)BF16_STEP_FLOATS);
        EACH_OUTPUT sum[n * rows + row] = dot_bf16(w[n], xs, sum[n * rows + row]);
    }
}

/* Compute a tile of bfloat16 weights and rows. Prefetch the next tile to the second-level cache, this tile from there to the first level. */
INLINE void multiply_bf16_tile(const Matrix *matrix, int first, const float *x, float *y, int real_rows, const int rows, const int outputs) {
    floats sum[MAX_TILE_OUTPUTS * MAX_ROWS];
    if (rows == 1) {
        const int count = outputs < ONE_ROW_OUTPUTS ? outputs : ONE_ROW_OUTPUTS;
        _Pragma("unroll") for (int n = 0; n < outputs; n += count) sum_bf16_row(matrix, first + n, x, sum + n, count);
        store_lane_sums(matrix, first, sum, outputs, rows, y, real_rows);
        return;
    }
    const int columns = matrix->columns;
    bf16s w[MAX_TILE_OUTPUTS];
    const uint8_t *codes[MAX_TILE_OUTPUTS];
    const size_t next_tile = (size_t)outputs * (size_t)matrix->row_bytes;
    EACH_OUTPUT {
        codes[n] = matrix->codes + (size_t)(first + n) * (size_t)matrix->row_bytes;
        EACH_ROW sum[n * rows + row] = broadcast(0.0f);
    }
    int column = 0;
    for (; column + BF16_STEP <= columns; column += BF16_STEP, x += (size_t)rows * BF16_STEP_FLOATS) {
        EACH_OUTPUT {
            PREFETCH_NEXT(n, 2 * (size_t)column)
            __builtin_prefetch(codes[n] + 2 * (size_t)column + 512, 0, 3);
            w[n] = unpack_bf16(load_bf16_codes(codes[n] + 2 * (size_t)column, BF16_STEP));
        }
        multiply_add_bf16(sum, w, x, rows, outputs);
    }
    if (column < columns) {
        EACH_OUTPUT w[n] = unpack_bf16(load_bf16_codes(codes[n] + 2 * (size_t)column, columns - column));
        multiply_add_bf16(sum, w, x, rows, outputs);
    }
    store_lane_sums(matrix, first, sum, outputs, rows, y, real_rows);
}

/* Whether a product computes one output after another, in storage order: only for a single row and a matrix too large for a cache. Then one sum at
 * a time is as fast as memory, because vdpbf16ps multiplies a whole cache line. */
#ifdef __AVX512BF16__
#define READS_IN_ORDER(matrix, rows) ((rows) == 1 && (size_t)(matrix)->outputs * (size_t)(matrix)->row_bytes >= 2 << 20)
#else
#define READS_IN_ORDER(matrix, rows) 0
#endif

/* Compute outputs [n, end) for one bfloat16 row, one output after another. */
static void multiply_bf16_in_order(const Matrix *matrix, int n, int end, const float *x, float *y) {
    enum { outputs = MAX_TILE_OUTPUTS };
    floats sums[outputs];
    for (; n + outputs <= end; n += outputs) {
        _Pragma("unroll") for (int i = 0; i < outputs; i++) sum_bf16_row(matrix, n + i, x, sums + i, 1);
        store_lane_sums(matrix, n, sums, outputs, 1, y, 1);
    }
    for (; n < end; n++) {
        sum_bf16_row(matrix, n, x, sums, 1);
        store_lane_sums(matrix, n, sums, 1, 1, y, 1);
    }
}

/* PRODUCT(name, tile, ...) defines a function that computes outputs [n, end) in tiles. TILE(rows, outputs) sets the outputs of a tile for a number
 * of rows; the last outputs are computed in tiles of one output. */
#if MAX_ROWS == 8
#define EACH_TILE(...) \
    TILE(1, 8, __VA_ARGS__) TILE(2, 8, __VA_ARGS__) TILE(3, 6, __VA_ARGS__) TILE(4, 6, __VA_ARGS__) TILE(6, 4, __VA_ARGS__) TILE(8, 3, __VA_ARGS__)
#else
#define EACH_TILE(...) TILE(1, 4, __VA_ARGS__) TILE(2, 2, __VA_ARGS__) TILE(3, 1, __VA_ARGS__) TILE(4, 1, __VA_ARGS__)
#endif
#define TILE(rows, outputs, tile, ...)                                                                           \
    case rows:                                                                                                   \
        for (; n + outputs <= end; n += outputs) tile(matrix, n, x, y, real_rows, ##__VA_ARGS__, rows, outputs); \
        for (; n < end; n++) tile(matrix, n, x, y, real_rows, ##__VA_ARGS__, rows, 1);                           \
        break;
#define PRODUCT(name, ...)                                                                                      \
    static void name(const Matrix *matrix, int n, int end, const float *x, float *y, int rows, int real_rows) { \
        switch (rows) { EACH_TILE(__VA_ARGS__) }                                                                \
    }
PRODUCT(multiply_f32, multiply_float_tile, F32) PRODUCT(multiply_f16, multiply_float_tile, F16) PRODUCT(multiply_bf16_as_floats, multiply_float_tile, BF16)
PRODUCT(multiply_u8, multiply_u8_tile, U8) PRODUCT(multiply_u8_minimum, multiply_u8_tile, U8_MINIMUM) PRODUCT(multiply_bf16, multiply_bf16_tile)

typedef void Product(const Matrix *, int, int, const float *, float *, int, int);
static Product *const PRODUCTS[] = {
    [F32] = multiply_f32, [F16] = multiply_f16, [BF16] = multiply_bf16_as_floats, [U8] = multiply_u8, [U8_MINIMUM] = multiply_u8_minimum,
};

/* Return the function that multiplies a block of `rows` rows packed AS_BF16. */
static Product *bf16_product(int rows) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if (rows > 2) return multiply_bf16_blocks;
#endif
    (void)rows;
    return multiply_bf16;
}

/* Return the number of rows to which a block of rows is padded: no tile has 5 or 7 rows. */
int padded_block_rows(int rows) { return MAX_ROWS == 8 && (rows == 5 || rows == 7) ? rows + 1 : rows; }

/* Return the number of floats in one row packed AS_FLOATS or AS_BF16. */
static size_t packed_columns_floats(int columns, int packing) {
    return packing == AS_FLOATS ? (size_t)ceil_div(columns, LANES) * LANES : (size_t)ceil_div(columns, BF16_STEP) * BF16_STEP_FLOATS;
}

size_t packed_row_floats(const Matrix *matrix, int packing) {
    return packing == AS_BYTES ? packed_byte_row_words(matrix) : packed_columns_floats(matrix->columns, packing);
}

size_t packed_floats(int rows, int columns) {
    const size_t floats_per_row = packed_columns_floats(columns, AS_FLOATS), bf16_per_row = packed_columns_floats(columns, AS_BF16);
    return (size_t)ceil_div(rows, MAX_ROWS) * MAX_ROWS * (floats_per_row > bf16_per_row ? floats_per_row : bf16_per_row);
}

/* Return 16 columns of a row from `column` on, padded with zeros. */
INLINE floats load_columns(const float *x, int columns, size_t row, int column) {
    const int count = columns - column < LANES ? columns - column : LANES;
    return count > 0 ? load_part(x + row * (size_t)columns + column, count) : broadcast(0.0f);
}

/* Return 32 columns of a row from `column` on, rounded to bfloat16. */
static bf16s load_columns_bf16(const float *x, int columns, size_t row, int column) {
    const floats a = round_to_bf16(load_columns(x, columns, row, column)), b = round_to_bf16(load_columns(x, columns, row, column + LANES));
    return join_bf16(EVEN_LANES(a, b), ODD_LANES(a, b));
}

/* Pack columns [begin, end) of one block of up to MAX_ROWS rows for products with `matrix`: [columns / step][rows][step], padded with zeros. A step
 * is 16 columns as floats, 32 as bfloat16. begin and end are multiples of the group size and of 32, or the number of columns. row_indices: [rows]
 * index in x of each row, of all blocks; NULL = 0, 1, 2, ... */
void pack_rows(const Matrix *matrix, const float *x, const int32_t *row_indices, int rows, int packing, int block, int begin, int end, float *packed) {
    const int first = block * MAX_ROWS, real = rows - first < MAX_ROWS ? rows - first : MAX_ROWS, padded = padded_block_rows(real);
    const int columns = matrix->columns;
    float *to = packed + (size_t)first * packed_row_floats(matrix, packing);
    if (packing == AS_BYTES) {
        pack_rows_as_bytes(matrix, x, row_indices, first, real, padded, begin, end, to);
        return;
    }
    if (packing == AS_FLOATS) {
        to += (size_t)begin * (size_t)padded;
        for (int column = begin; column < end; column += LANES)
            for (int row = 0; row < padded; row++, to += LANES)
                store(to, row < real ? load_columns(x, columns, row_index(row_indices, first + row), column) : broadcast(0.0f));
        return;
    }
    to += (size_t)(begin / BF16_STEP * padded) * BF16_STEP_FLOATS;
    for (int column = begin; column < end; column += BF16_STEP)
        for (int row = 0; row < padded; row++, to += BF16_STEP_FLOATS) {
            const bf16s pairs = load_columns_bf16(x, columns, row_index(row_indices, first + (row < real ? row : 0)), column);
            memcpy(to, &pairs, sizeof pairs);
        }
}

/* Compute outputs [begin, end) of a matrix for all packed rows. */
void multiply_packed_rows(const Matrix *matrix, int begin, int end, int packing, const float *packed, float *y, int rows) {
    if (packing == AS_BYTES) {
        multiply_bytes(matrix, begin, end, packed, y, rows);
        return;
    }
    if (packing == AS_BF16 && READS_IN_ORDER(matrix, rows)) {
        multiply_bf16_in_order(matrix, begin, end, packed, y);
        return;
    }
    for (int first = 0; first < rows; first += MAX_ROWS) {
        const int real = rows - first < MAX_ROWS ? rows - first : MAX_ROWS;
        Product *const product = packing == AS_BF16 ? bf16_product(real) : PRODUCTS[matrix->kind];
        product(matrix, begin, end, packed + (size_t)first * packed_row_floats(matrix, packing),
                y + (size_t)first * (size_t)matrix->outputs, padded_block_rows(real), real);
    }
}
