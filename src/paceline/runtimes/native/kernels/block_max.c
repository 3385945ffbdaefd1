/* The maximum of each block of a row of logits, see block_max.h. */
#include "block_max.h"

#include "vectors.h"

#include <math.h>

/* Return the bits of |x|. Compared as integers they are ordered as |x|, and NaN is larger than infinity. */
INLINE words magnitude_bits(floats x) { return (words)x & 0x7FFFFFFFu; }

/* Return the maximum of `count` numbers; NaN if any is NaN. */
float max_or_nan(const float *x, int count) {
    floats maxima[4] = {broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY)};
    words magnitudes[4] = {{0}, {0}, {0}, {0}};
    int at = 0;
    for (; at + 4 * LANES <= count; at += 4 * LANES)
        for (int part = 0; part < 4; part++) {
            const floats numbers = load(x + at + part * LANES);
            maxima[part] = __builtin_elementwise_max(maxima[part], numbers);
            magnitudes[part] = __builtin_elementwise_max(magnitudes[part], magnitude_bits(numbers));
        }
    for (; at < count; at += LANES) {
        const floats numbers = load_padded(x + at, count - at < LANES ? count - at : LANES, -INFINITY);
        maxima[0] = __builtin_elementwise_max(maxima[0], numbers);
        magnitudes[0] = __builtin_elementwise_max(magnitudes[0], magnitude_bits(numbers));
    }
    const words largest =
        __builtin_elementwise_max(__builtin_elementwise_max(magnitudes[0], magnitudes[1]), __builtin_elementwise_max(magnitudes[2], magnitudes[3]));
    if (__builtin_reduce_or((ints)(largest > (words){0} + 0x7F800000u))) return NAN;
    return __builtin_reduce_max(__builtin_elementwise_max(__builtin_elementwise_max(maxima[0], maxima[1]), __builtin_elementwise_max(maxima[2], maxima[3])));
}

/* Compute the maximum of each block of `size` numbers; the last block may be shorter. */
void find_block_max(const float *x, int count, int size, float *block_max) {
    for (int begin = 0; begin < count; begin += size) *block_max++ = max_or_nan(x + begin, begin + size < count ? size : count - begin);
}

/* Store the maximum of the block that begins at column `begin` of each of `rows` rows of `width` numbers. */
void store_block_max(const float *x, int width, int rows, int begin, float *block_max) {
    const int count = width - begin < BLOCK_COLUMNS ? width - begin : BLOCK_COLUMNS, blocks = (width + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
    for (int row = 0; row < rows; row++)
        block_max[(size_t)row * (size_t)blocks + (size_t)(begin / BLOCK_COLUMNS)] = max_or_nan(x + (size_t)row * (size_t)width + (size_t)begin, count);
}
