/* Included with KIND, TILE (the file of its tiles) and PRODUCT defined: a tile for every number of rows, and PRODUCT_KIND, which covers a
 * range of outputs with them.
 * As many outputs share a tile as keep all sums in registers; a tile of one output takes what is left over. */
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define TILE_OF(rows, outputs) JOIN(JOIN(JOIN(JOIN(tile, PRODUCT), KIND), rows), outputs)

#if MAX_ROWS == 8 && KIND < U4
#define ROWS 1
#define OUTPUTS 8
#include TILE
#define OUTPUTS 1
#include TILE
#undef ROWS
#define ROWS 2
#define OUTPUTS 8
#include TILE
#define OUTPUTS 1
#include TILE
#undef ROWS
#define ROWS 3
#define OUTPUTS 6
#include TILE
#define OUTPUTS 1
#include TILE
#undef ROWS
#define ROWS 4
#define OUTPUTS 6
#include TILE
#define OUTPUTS 1
#include TILE
#undef ROWS
#define ROWS 6
#define OUTPUTS 4
#include TILE
#define OUTPUTS 1
#include TILE
#undef ROWS
#define ROWS 8
#define OUTPUTS 3
#include TILE
#define OUTPUTS 1
#include TILE
#undef ROWS
#define CASES CASE(1, 8) CASE(2, 8) CASE(3, 6) CASE(4, 6) CASE(6, 4) CASE(8, 3)
#elif MAX_ROWS == 8 /* tables of 4-bit values take registers too */
#define ROWS 1
#define OUTPUTS 8
#include TILE
#define OUTPUTS 1
#include TILE
#undef ROWS
#define ROWS 2
#define OUTPUTS 4
#include TILE
#define OUTPUTS 1
#include TILE
#undef ROWS
#define ROWS 3
#define OUTPUTS 4
#include TILE
#define OUTPUTS 1
#include TILE
#undef ROWS
#define ROWS 4
#define OUTPUTS 4
#include TILE
#define OUTPUTS 1
#include TILE
#undef ROWS
#define ROWS 6
#define OUTPUTS 3
#include TILE
#define OUTPUTS 1
#include TILE
#undef ROWS
#define ROWS 8
#define OUTPUTS 3
#include TILE
#define OUTPUTS 1
#include TILE
#undef ROWS
#define CASES CASE(1, 8) CASE(2, 4) CASE(3, 4) CASE(4, 4) CASE(6, 3) CASE(8, 3)
#else
#define ROWS 1
#define OUTPUTS 4
#include TILE
#define OUTPUTS 1
#include TILE
#undef ROWS
#define ROWS 2
#define OUTPUTS 2
#include TILE
#define OUTPUTS 1
#include TILE
#undef ROWS
#define ROWS 3
#define OUTPUTS 1
#include TILE
#undef ROWS
#define ROWS 4
#define OUTPUTS 1
#include TILE
#undef ROWS
#define CASES CASE(1, 4) CASE(2, 2) CASE(3, 1) CASE(4, 1)
#endif

#define CASE(rows, outputs)                                                                          \
    case rows:                                                                                       \
        for (; n + outputs <= end; n += outputs) TILE_OF(rows, outputs)(matrix, n, x, y, real_rows); \
        for (; n < end; n++) TILE_OF(rows, 1)(matrix, n, x, y, real_rows);                           \
        break;

static void JOIN(PRODUCT, KIND)(const Matrix *matrix, int n, int end, const float *x, float *y, int rows, int real_rows) {
    switch (rows) { CASES }
}

#undef CASE
#undef CASES
#undef TILE_OF
#undef JOIN
#undef JOIN_
#undef KIND
