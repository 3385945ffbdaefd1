/* A row of floats as codes of 8 bits: of keys and values as they are kept, and of queries in front of products. */
#ifndef PACELINE_ROW_CODES_H
#define PACELINE_ROW_CODES_H

#include "softmax.h"

/* What the codes of a row are multiplied with: the largest value's code is 127. Not a number where a value is not finite. */
INLINE float scale_of_row(const float *x, int size) {
    floats most = broadcast(0.0f), nothing = broadcast(0.0f);
    EACH_16(column, count, size) {
        const floats v = load_part(x + column, count);
        most = larger_of((floats)((words)v & 0x7FFFFFFFu), most);
        nothing += v - v;
    }
    return largest_lane(most) / 127.0f + lane_sum(nothing);
}

/* The codes of up to 16 values, zeros behind them; of a row that has no scale, zeros. */
INLINE ints codes_of(const float *x, int count, float scale) {
    const floats v = scale > 0.0f ? load_part(x, count) / broadcast(scale) : broadcast(0.0f);
    return __builtin_convertvector(__builtin_elementwise_roundeven(v), ints);
}

#endif
