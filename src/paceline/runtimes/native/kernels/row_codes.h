/* Rounding a row to int8 codes with one scale: for an int8 KV cache, and for the queries that are multiplied with it. */
#ifndef PACELINE_ROW_CODES_H
#define PACELINE_ROW_CODES_H

#include "softmax.h"

/* Return the scale of a row: max |x| / 127; NaN if a value is not finite. */
INLINE float scale_of_row(const float *x, int size) {
    floats most = broadcast(0.0f), zero_or_nan = broadcast(0.0f);
    EACH_16(column, count, size) {
        const floats v = load_part(x + column, count);
        most = maximum((floats)((words)v & 0x7FFFFFFFu), most);
        zero_or_nan += v - v;
    }
    return largest_lane(most) / 127.0f + lane_sum(zero_or_nan);
}

/* Return the codes of up to 16 values, padded with zeros; all zero if the scale is 0 or NaN. */
INLINE ints codes_of(const float *x, int count, float scale) {
    const floats v = scale > 0.0f ? load_part(x, count) / broadcast(scale) : broadcast(0.0f);
    return __builtin_convertvector(__builtin_elementwise_roundeven(v), ints);
}

#endif
