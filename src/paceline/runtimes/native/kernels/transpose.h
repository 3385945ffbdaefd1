/* Transpose 16 rows of 16 words in registers: vector i of the result has word i of each row. */
#ifndef PACELINE_TRANSPOSE_H
#define PACELINE_TRANSPOSE_H

#include "vectors.h"

/* LOWER_width interleaves the lower `width` lanes of each group of 2 * width lanes of a and b; UPPER_width interleaves the upper lanes. */
#define LOWER_1(a, b) SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define UPPER_1(a, b) SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
#define LOWER_2(a, b) SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define UPPER_2(a, b) SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define LOWER_4(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define UPPER_4(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define LOWER_8(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define UPPER_8(a, b) SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
/* One step of the transposition: transpose every square of 2 * width lanes as 2 x 2 blocks of `width` lanes. */
#define EXCHANGE(width)                                                                  \
    _Pragma("unroll") for (int i = 0; i < LANES; i++) if (!(i & (width))) {              \
        const words a = v[i], b = v[i + (width)];                                        \
        v[i] = LOWER_##width(a, b);                                                      \
        v[i + (width)] = UPPER_##width(a, b);                                            \
    }

/* Load `rows` rows of `bytes` bytes (at most 64), `stride` bytes apart and padded with zeros, and transpose them: v[i] has word i of each row. */
INLINE void load_transposed(const uint8_t *from, size_t stride, int rows, size_t bytes, words *v) {
    for (int row = 0; row < LANES; row++) {
        v[row] = (words){0};
        if (row < rows) memcpy(v + row, from + (size_t)row * stride, bytes);
    }
    EXCHANGE(1) EXCHANGE(2) EXCHANGE(4) EXCHANGE(8)
}

/* Store a vector; return the position after it. */
INLINE uint8_t *store_words(words v, uint8_t *to) {
    memcpy(to, &v, sizeof v);
    return to + sizeof v;
}

#endif
