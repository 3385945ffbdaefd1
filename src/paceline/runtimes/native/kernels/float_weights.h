/* Weights stored as float32, float16 or bfloat16, converted to float32 in registers (exactly). */
#ifndef PACELINE_FLOAT_WEIGHTS_H
#define PACELINE_FLOAT_WEIGHTS_H

#include "native.h"
#include "vectors.h"

/* Return `count` values from `column` on, padded with zeros. */
INLINE floats load_weights(const int kind, const uint8_t *codes, int column, int count) {
    if (kind == F32) {
        const float *from = (const float *)codes + column;
        return count == LANES ? load(from) : load_first(from, count);
    }
    halfwords bits = {0};
    memcpy(&bits, codes + 2 * (size_t)column, 2 * (size_t)count);
    if (kind == BF16) return (floats)(__builtin_convertvector(bits, words) << 16);
    return __builtin_convertvector((halfs)bits, floats);
}

#endif
