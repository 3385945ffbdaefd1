/* Included with KIND, ROWS and OUTPUTS defined: outputs [first, first + OUTPUTS) of ROWS packed rows.
 * Arrays are indexed by constants alone once the loops are unrolled, so that they live in registers. */
#define EACH_OUTPUT _Pragma("unroll") for (int n = 0; n < OUTPUTS; n++)
#define EACH_ROW _Pragma("unroll") for (int row = 0; row < ROWS; row++)
#define MULTIPLY_ADD(w, packed)                                                   \
    EACH_ROW {                                                                    \
        const floats xs = load((packed) + row * LANES);                           \
        EACH_OUTPUT sum[n][row] = fused((w)[n], xs, sum[n][row]);                 \
    }
/* The next tile's weights, wanted in a few microseconds: the processor's own prefetching starts anew with every row of W. */
#define PREFETCH_NEXT(n, offset) __builtin_prefetch(codes[n] + next_tile + (offset), 0, 2);
#define HAS_MINIMUM (KIND == U8_MINIMUM || KIND == U4_MINIMUM)

static void TILE_OF(ROWS, OUTPUTS)(const Matrix *matrix, int first, const float *x, float *y, int real_rows) {
    const int columns = matrix->columns, group = matrix->group, zero_point = matrix->zero_point;
    floats sum[OUTPUTS][ROWS], w[OUTPUTS];
    const uint8_t *codes[OUTPUTS];
    const size_t next_tile = OUTPUTS * (size_t)matrix->row_bytes;
    EACH_OUTPUT {
        codes[n] = matrix->codes + (size_t)(first + n) * (size_t)matrix->row_bytes;
        EACH_ROW sum[n][row] = broadcast(0.0f);
    }
#if KIND == F32 || KIND == F16 || KIND == BF16
    (void)group, (void)zero_point;
    int column = 0;
    for (; column + LANES <= columns; column += LANES, x += ROWS * LANES) {
        EACH_OUTPUT {
            PREFETCH_NEXT(n, (KIND == F32 ? 4 : 2) * (size_t)column)
            w[n] = decode_plain(KIND, codes[n], column, LANES);
        }
        MULTIPLY_ADD(w, x)
    }
    if (column < columns) {
        EACH_OUTPUT w[n] = decode_plain(KIND, codes[n], column, columns - column);
        MULTIPLY_ADD(w, x)
    }
#else
    const size_t groups = (size_t)(columns / group);
    const float *scales = matrix->scales + (size_t)first * groups;
    const float *minimums = HAS_MINIMUM ? matrix->minimums + (size_t)first * groups : scales;
    (void)minimums;
#if KIND >= U4
    const ints counting = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const floats code_values = KIND == U4_TABLE ? table_of(matrix) : __builtin_convertvector(counting - zero_point, floats);
    const int half_groups = group == 16, step = half_groups ? 32 : group;
    size_t g = 0;
    for (int begin = 0; begin < columns; begin += step, g += half_groups ? 2 : 1) {
        GroupOf4Bits low[OUTPUTS], high[OUTPUTS];
        EACH_OUTPUT {
            const float *scale = scales + n * groups + g, *minimum = minimums + n * groups + g;
            low[n] = group_of_4_bits(code_values, scale[0], minimum[0], KIND);
            high[n] = half_groups ? group_of_4_bits(code_values, scale[1], minimum[1], KIND) : low[n];
        }
        for (int column = begin; column < begin + step; column += 32, x += 2 * ROWS * LANES) {
            ints both[OUTPUTS];
            EACH_OUTPUT {
                PREFETCH_NEXT(n, column / 2)
                both[n] = load_bytes(codes[n] + column / 2);
            }
            EACH_OUTPUT w[n] = decode_4_bits(both[n], low[n], zero_point, KIND);
            MULTIPLY_ADD(w, x)
            EACH_OUTPUT w[n] = decode_4_bits(both[n] >> 4, high[n], zero_point, KIND);
            MULTIPLY_ADD(w, x + ROWS * LANES)
        }
    }
#else
    size_t g = 0;
    for (int begin = 0; begin < columns; begin += group, g++) {
        floats scale[OUTPUTS], minimum[OUTPUTS];
        EACH_OUTPUT {
            scale[n] = broadcast(scales[n * groups + g]);
            minimum[n] = broadcast(minimums[n * groups + g]);
        }
        for (int column = begin; column < begin + group; column += LANES, x += ROWS * LANES) {
            EACH_OUTPUT {
                PREFETCH_NEXT(n, column)
                w[n] = decode_8_bits(KIND, codes[n] + column, zero_point) * scale[n];
                if (HAS_MINIMUM) w[n] = w[n] + minimum[n];
            }
            MULTIPLY_ADD(w, x)
        }
    }
#endif
#endif
    finish(matrix, first, &sum[0][0], OUTPUTS, ROWS, y, real_rows);
}

#undef EACH_OUTPUT
#undef EACH_ROW
#undef MULTIPLY_ADD
#undef PREFETCH_NEXT
#undef HAS_MINIMUM
#undef OUTPUTS
