/* Functions shared by the matrix products with row-major weights (linear.c, few_registers.c, low_rank.c). */
#ifndef PACELINE_LINEAR_H
#define PACELINE_LINEAR_H

#include "bf16.h"
#include "native.h"

#define MAX_TILE_OUTPUTS 8
#define EACH_OUTPUT _Pragma("unroll") for (int n = 0; n < outputs; n++)

/* Load `count` weights of a row of an F32, F16 or BF16 matrix, from `column` on, and convert them to float32 (lossless); other lanes are 0. */
INLINE floats load_weights(const int kind, const uint8_t *codes, int column, int count) {
    if (kind == F32) return load_part((const float *)codes + column, count);
    halfwords bits = {0};
    memcpy(&bits, codes + 2 * (size_t)column, 2 * (size_t)count);
    if (kind == BF16) return (floats)(__builtin_convertvector(bits, words) << 16);
    return __builtin_convertvector((halfs)bits, floats);
}

/* Load `count` bfloat16 numbers, padded with zeros. */
INLINE words load_bf16_codes(const uint8_t *codes, int count) {
    words bits = {0};
    memcpy(&bits, codes, 2 * (size_t)count);
    return bits;
}

/* Store the results of outputs [first, first + outputs) for rows before real_rows (the others are padding). sums: [outputs][rows]; a
 * result is the sum of 16 lanes, plus the bias. */
INLINE void store_lane_sums(const Matrix *matrix, int first, const floats *sums, const int outputs, const int rows, float *y, int real_rows) {
    float totals[MAX_TILE_OUTPUTS * MAX_ROWS];
    _Pragma("unroll") for (int from = 0; from < outputs * rows; from += LANES) {
        floats padded[LANES];
        _Pragma("unroll") for (int i = 0; i < LANES; i++) padded[i] = from + i < outputs * rows ? sums[from + i] : broadcast(0.0f);
        store(totals + from, lane_sums(padded));
    }
    for (int row = 0; row < real_rows; row++)
        _Pragma("unroll") for (int n = 0; n < outputs; n++) {
            const float bias = matrix->bias ? matrix->bias[first + n] : 0.0f;
            y[(size_t)row * (size_t)matrix->outputs + (size_t)(first + n)] = totals[n * rows + row] + bias;
        }
}

#ifdef __AVX2__
void multiply_bf16_blocks(const Matrix *matrix, int begin, int end, const float *x, float *y, int rows, int real_rows); /* in few_registers.c */
#endif

#endif
