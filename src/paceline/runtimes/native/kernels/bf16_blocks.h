/* Included by linear.c where vectors are of 8 floats and registers few (AVX2): products of three or four rows packed as bfloat16, a block of
 * columns after the other.
 *
 * A sum's 16 lanes never meet before its end, so one half of them is computed for more outputs at once than whole sums would leave registers
 * for: 12 sums in flight. The rows' columns of a block stay in the first-level cache for all outputs; sums wait in memory meanwhile. Each lane
 * adds up what the tiles of bf16_tile.h add, in their order. */
typedef float octet __attribute__((vector_size(32)));
typedef uint32_t octet_words __attribute__((vector_size(32)));

#define BLOCK_COLUMNS 1024
#define BLOCK_OUTPUTS 3
#define MOST_OUTPUTS 48 /* whose sums wait */
#define EACH_OUTPUT _Pragma("unroll") for (int n = 0; n < outputs; n++)
#define EACH_ROW _Pragma("unroll") for (int row = 0; row < rows; row++)

INLINE octet load_octet(const float *from) {
    octet v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* sums [outputs][rows] += the products of one half of the lanes; `count` columns from `codes` on, whose next rows of W are to be fetched, and
 * x [steps][rows][first and second values]. */
INLINE void add_half(const uint8_t *const *codes, size_t next_tile, const float *x, int count, floats *sums, const int half, const int outputs,
                     const int rows) {
    octet sum[BLOCK_OUTPUTS][MAX_ROWS];
    EACH_OUTPUT EACH_ROW sum[n][row] = load_octet((const float *)(sums + n * rows + row) + half * 8);
    for (int column = 0; column < count; column += BF16_STEP, x += rows * BF16_STEP_FLOATS) {
        octet_words w[BLOCK_OUTPUTS];
        octet second[BLOCK_OUTPUTS], first[BLOCK_OUTPUTS];
        EACH_OUTPUT {
            if (!half) __builtin_prefetch(codes[n] + next_tile + 2 * (size_t)column, 0, 2);
            memcpy(&w[n], codes[n] + 2 * (size_t)column + half * 32, sizeof w[n]);
            second[n] = (octet)(w[n] & 0xFFFF0000u);
        }
        EACH_ROW {
            const octet xs = load_octet(x + row * BF16_STEP_FLOATS + LANES + half * 8);
            EACH_OUTPUT sum[n][row] = __builtin_elementwise_fma(second[n], xs, sum[n][row]);
        }
        EACH_OUTPUT first[n] = (octet)(w[n] << 16);
        EACH_ROW {
            const octet xs = load_octet(x + row * BF16_STEP_FLOATS + half * 8);
            EACH_OUTPUT sum[n][row] = __builtin_elementwise_fma(first[n], xs, sum[n][row]);
        }
    }
    EACH_OUTPUT EACH_ROW memcpy((float *)(sums + n * rows + row) + half * 8, &sum[n][row], sizeof(octet));
}

/* Outputs [begin, end), at most MOST_OUTPUTS, of `rows` packed rows. */
INLINE void multiply_blocks(const Matrix *matrix, int begin, int end, const float *x, float *y, const int rows, int real_rows) {
    const int columns = matrix->columns, whole = columns / BF16_STEP * BF16_STEP;
    const size_t row_bytes = (size_t)matrix->row_bytes;
    floats sums[MOST_OUTPUTS * MAX_ROWS];
    for (int i = 0; i < (end - begin) * rows; i++) sums[i] = broadcast(0.0f);
    for (int column = 0; column < columns; column += BLOCK_COLUMNS) {
        const int count = whole - column < BLOCK_COLUMNS ? whole - column : BLOCK_COLUMNS;
        const float *from = x + (size_t)(column / BF16_STEP * rows) * BF16_STEP_FLOATS;
        for (int n = begin; n < end;) {
            const uint8_t *row = matrix->codes + (size_t)n * row_bytes + 2 * (size_t)column;
            const uint8_t *const codes[BLOCK_OUTPUTS] = {row, row + row_bytes, row + 2 * row_bytes};
            floats *const own = sums + (n - begin) * rows;
            const int outputs = end - n >= BLOCK_OUTPUTS ? BLOCK_OUTPUTS : 1;
            if (outputs == BLOCK_OUTPUTS) {
                add_half(codes, BLOCK_OUTPUTS * row_bytes, from, count, own, 0, BLOCK_OUTPUTS, rows);
                add_half(codes, 0, from, count, own, 1, BLOCK_OUTPUTS, rows);
            } else {
                add_half(codes, 0, from, count, own, 0, 1, rows);
                add_half(codes, 0, from, count, own, 1, 1, rows);
            }
            n += outputs;
        }
    }
    for (int n = begin; n < end; n++) {
        floats *const own = sums + (n - begin) * rows;
        if (whole < columns) {
            const bf16s w = bf16_of(load_words(matrix->codes + (size_t)n * row_bytes + 2 * (size_t)whole, columns - whole));
            EACH_ROW own[row] = dot_bf16(w, load_bf16(x + (size_t)(whole / BF16_STEP * rows + row) * BF16_STEP_FLOATS), own[row]);
        }
        finish(matrix, n, own, 1, rows, y, real_rows);
    }
}

static void bf16_blocks(const Matrix *matrix, int begin, int end, const float *x, float *y, int rows, int real_rows) {
    for (int to; begin < end; begin = to) {
        to = begin + MOST_OUTPUTS < end ? begin + MOST_OUTPUTS : end;
        if (rows == 3)
            multiply_blocks(matrix, begin, to, x, y, 3, real_rows);
        else
            multiply_blocks(matrix, begin, to, x, y, 4, real_rows);
    }
}

#undef EACH_OUTPUT
#undef EACH_ROW
