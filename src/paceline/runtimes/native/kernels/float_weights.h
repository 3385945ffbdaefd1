/* Loading weights stored as float32, float16 or bfloat16: they are converted to float32, which is exact. */
#ifndef PACELINE_FLOAT_WEIGHTS_H
#define PACELINE_FLOAT_WEIGHTS_H

#include "native.h"
#include "vectors.h"

/* Return `count` values from `column` on, padded with zeros. */
INLINE floats load_weights(const int kind, const uint8_t *codes, int column, int count) {
    if (kind == F32) return load_part((const float *)codes + column, count);
    halfwords bits = {0};
    memcpy(&bits, codes + 2 * (size_t)column, 2 * (size_t)count);
    if (kind == BF16) return (floats)(__builtin_convertvector(bits, words) << 16);
    return __builtin_convertvector((halfs)bits, floats);
}

#endif
