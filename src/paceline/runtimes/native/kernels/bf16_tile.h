/* Included with KIND, ROWS and OUTPUTS defined: as tile.h, of bfloat16 weights and rows packed as bfloat16. */
#define EACH_OUTPUT _Pragma("unroll") for (int n = 0; n < OUTPUTS; n++)
#define EACH_ROW _Pragma("unroll") for (int row = 0; row < ROWS; row++)
#define MULTIPLY_ADD                                               \
    EACH_ROW {                                                     \
        const bf16s xs = load_bf16(x + row * BF16_STEP_FLOATS);    \
        EACH_OUTPUT sum[n][row] = dot_bf16(w[n], xs, sum[n][row]); \
    }
/* Prefetch. There is time to bring the next tile's weights into the second-level cache, and this tile's from there into the first. */
#define PREFETCH(n, offset)                                    \
    __builtin_prefetch(codes[n] + next_tile + (offset), 0, 2); \
    __builtin_prefetch(codes[n] + (offset) + 512, 0, 3);

static void TILE_OF(ROWS, OUTPUTS)(const Matrix *matrix, int first, const float *x, float *y, int real_rows) {
    floats sum[OUTPUTS][ROWS];
#if ROWS == 1
    const int at_once = OUTPUTS < ROW_OUTPUTS ? OUTPUTS : ROW_OUTPUTS;
    _Pragma("unroll") for (int n = 0; n < OUTPUTS; n += at_once) bf16_row(matrix, first + n, x, sum + n, at_once);
#else
    const int columns = matrix->columns;
    bf16s w[OUTPUTS];
    const uint8_t *codes[OUTPUTS];
    const size_t next_tile = OUTPUTS * (size_t)matrix->row_bytes;
    EACH_OUTPUT {
        codes[n] = matrix->codes + (size_t)(first + n) * (size_t)matrix->row_bytes;
        EACH_ROW sum[n][row] = broadcast(0.0f);
    }
    int column = 0;
    for (; column + BF16_STEP <= columns; column += BF16_STEP, x += ROWS * BF16_STEP_FLOATS) {
        EACH_OUTPUT {
            PREFETCH(n, 2 * (size_t)column)
            w[n] = bf16_of(load_words(codes[n] + 2 * (size_t)column, BF16_STEP));
        }
        MULTIPLY_ADD
    }
    if (column < columns) {
        EACH_OUTPUT w[n] = bf16_of(load_words(codes[n] + 2 * (size_t)column, columns - column));
        MULTIPLY_ADD
    }
#endif
    finish(matrix, first, &sum[0][0], OUTPUTS, ROWS, y, real_rows);
}

#undef EACH_OUTPUT
#undef EACH_ROW
#undef MULTIPLY_ADD
#undef PREFETCH
#undef OUTPUTS
