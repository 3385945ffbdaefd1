/* Matrix products y = x W^T with W as it is stored: float32, float16, bfloat16, or integer codes in groups.
 *
 * Weights are decoded to their exact float32 values in registers, once for up to MAX_ROWS rows of x, and multiplied in float32.
 * Every output is one sum in 16 lanes over ascending columns, whatever the number of rows: a row's bits never depend on its
 * neighbours. Rows of x come packed (pack_rows), so that the rows of one step lie side by side in memory. */
#include "native.h"
#include "vectors.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

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

INLINE ints load_bytes(const uint8_t *codes) {
    bytes from;
    memcpy(&from, codes, sizeof from);
    return __builtin_convertvector(from, ints);
}

INLINE floats decode_8_bits(const int kind, const uint8_t *codes, int zero_point) {
    if (kind != S8) return __builtin_convertvector(load_bytes(codes) - zero_point, floats);
    signed_bytes from;
    memcpy(&from, codes, sizeof from);
    return __builtin_convertvector(__builtin_convertvector(from, ints), floats);
}

/* What turns the 4-bit codes of one group into values: with AVX-512 the values of all 16 codes. */
typedef struct {
#ifdef __AVX512F__
    floats table;
#else
    floats scale, minimum;
#endif
} GroupOf4Bits;

INLINE GroupOf4Bits group_of_4_bits(floats code_values, float scale, float minimum, const int has_minimum) {
#ifdef __AVX512F__
    const floats table = code_values * broadcast(scale);
    return (GroupOf4Bits){has_minimum ? table + broadcast(minimum) : table};
#else
    (void)code_values, (void)has_minimum;
    return (GroupOf4Bits){broadcast(scale), broadcast(minimum)};
#endif
}

/* The values of the low 4 bits of each code. */
INLINE floats decode_4_bits(ints codes, GroupOf4Bits group, int zero_point, const int has_minimum) {
#ifdef __AVX512F__
    (void)zero_point, (void)has_minimum;
    return (floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)group.table);
#else
    const floats value = __builtin_convertvector((codes & 15) - zero_point, floats) * group.scale;
    return has_minimum ? value + group.minimum : value;
#endif
}

#define KIND F32
#include "tiles_of_kind.h"
#define KIND F16
#include "tiles_of_kind.h"
#define KIND BF16
#include "tiles_of_kind.h"
#define KIND S8
#include "tiles_of_kind.h"
#define KIND U8
#include "tiles_of_kind.h"
#define KIND U8_MINIMUM
#include "tiles_of_kind.h"
#define KIND U4
#include "tiles_of_kind.h"
#define KIND U4_MINIMUM
#include "tiles_of_kind.h"

typedef void Product(const Matrix *, int, int, const float *, float *, int, int);
static Product *const PRODUCTS[] = {product_0, product_1, product_2, product_3, product_4, product_5, product_6, product_7};

/* Rows of a block as computed: some counts have no tile of their own and take the next larger one. */
static int tile_rows(int rows) { return MAX_ROWS == 8 && (rows == 5 || rows == 7) ? rows + 1 : rows; }

static size_t packed_columns(int columns) { return (size_t)(columns + LANES - 1) / LANES * LANES; }

size_t packed_floats(int rows, int columns) { return (size_t)(rows + MAX_ROWS - 1) / MAX_ROWS * MAX_ROWS * packed_columns(columns); }

/* Block `block` of x [rows, columns] as [columns / 16][rows of the block][16], zero where there is nothing. */
void pack_rows(const float *x, int rows, int columns, int block, float *packed) {
    const int first = block * MAX_ROWS, real = rows - first < MAX_ROWS ? rows - first : MAX_ROWS, padded = tile_rows(real);
    float *to = packed + (size_t)first * packed_columns(columns);
    for (int column = 0; column < columns; column += LANES)
        for (int row = 0; row < padded; row++, to += LANES) {
            const int count = row < real ? (columns - column < LANES ? columns - column : LANES) : 0;
            const float *from = x + (size_t)(first + (row < real ? row : 0)) * columns + column;
            store(to, count == LANES ? load(from) : load_first(from, count));
        }
}

/* Outputs [begin, end) of every row. */
void multiply(const Matrix *matrix, int begin, int end, const float *packed, float *y, int rows) {
    for (int first = 0; first < rows; first += MAX_ROWS) {
        const int real = rows - first < MAX_ROWS ? rows - first : MAX_ROWS;
        PRODUCTS[matrix->kind](matrix, begin, end, packed + (size_t)first * packed_columns(matrix->columns),
                               y + (size_t)first * (size_t)matrix->outputs, tile_rows(real), real);
    }
}
