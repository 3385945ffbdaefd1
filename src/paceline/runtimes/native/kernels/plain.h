/* Weights stored as floats, decoded to their exact float32 values in registers. */
#ifndef PACELINE_PLAIN_H
#define PACELINE_PLAIN_H

#include "native.h"
#include "vectors.h"

/* `count` values from `column` on, the rest zero. */
INLINE floats decode_plain(const int kind, const uint8_t *codes, int column, int count) {
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
