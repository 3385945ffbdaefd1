/* The maximum of each block of a row of logits (block_max.h). */
#include "block_max.h"

#include "vectors.h"

#include <math.h>

INLINE floats larger_of(floats a, floats b) { return __builtin_elementwise_max(a, b); }
INLINE words size_of(floats x) { return (words)x & 0x7FFFFFFFu; } /* as an integer: monotonic in |x|, largest for NaN */

/* Return the maximum of `count` numbers; NaN if any is NaN. */
float max_of(const float *x, int count) {
    floats most[4] = {broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY)};
    words sizes[4] = {{0}, {0}, {0}, {0}};
    int at = 0;
    for (; at + 4 * LANES <= count; at += 4 * LANES)
        for (int part = 0; part < 4; part++) {
            const floats numbers = load(x + at + part * LANES);
            most[part] = larger_of(most[part], numbers);
            sizes[part] = __builtin_elementwise_max(sizes[part], size_of(numbers));
        }
    for (; at < count; at += LANES) {
        floats numbers = broadcast(-INFINITY);
        if (count - at >= LANES)
            numbers = load(x + at);
        else
            memcpy(&numbers, x + at, (size_t)(count - at) * sizeof(float));
        most[0] = larger_of(most[0], numbers);
        sizes[0] = __builtin_elementwise_max(sizes[0], size_of(numbers));
    }
    const words largest =
        __builtin_elementwise_max(__builtin_elementwise_max(sizes[0], sizes[1]), __builtin_elementwise_max(sizes[2], sizes[3]));
    if (__builtin_reduce_or((ints)(largest > (words){0} + 0x7F800000u))) return NAN;
    return __builtin_reduce_max(larger_of(larger_of(most[0], most[1]), larger_of(most[2], most[3])));
}

/* Compute max_of of each `size` numbers; the last block may be shorter. */
void find_block_max(const float *x, int count, int size, float *block_max) {
    for (int begin = 0; begin < count; begin += size) *block_max++ = max_of(x + begin, begin + size < count ? size : count - begin);
}

/* Store max_of of the block that begins at column `begin`, in each of `rows` rows of `width` numbers. */
void keep_block_max(const float *x, int width, int rows, int begin, float *block_max) {
    const int count = width - begin < BLOCK_COLUMNS ? width - begin : BLOCK_COLUMNS, blocks = (width + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
    for (int row = 0; row < rows; row++)
        block_max[(size_t)row * (size_t)blocks + (size_t)(begin / BLOCK_COLUMNS)] = max_of(x + (size_t)row * (size_t)width + (size_t)begin, count);
}
