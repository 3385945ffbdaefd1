/* Products with codes of 4 bits that stand for values of a table (panels.c, small_blocks.c), for several whole blocks of rows: where few rows
 * fill the registers, values are looked up once for all of them. */
#include "panels.h"

#if SHARES_DECODING
#define MOST_GROUPS (SUPER_BLOCK / 16)

enum { rows = MAX_ROWS };

/* Groups that are multiplied with all rows before the next ones are read: 256 columns, or two groups, which can have scales side by side. */
typedef struct {
    floats scales[MOST_GROUPS];
    ints negative[MOST_GROUPS];
    table_values quads[2 * MAX_GROUP / 4];
} Groups;

/* The values of a group's codes, and the sum of the negative ones. */
INLINE void read_codes(const uint8_t *at, code_table table, int group, table_values *quads, ints *negative, size_t distance) {
    negative_sums sums = {0};
    for (int column = 0; column < group; column += 8, at += sizeof(words), quads += 2) {
        const words codes = load_codes(at);
        PREFETCH(at)
        for (int part = 0; part < 2; part++) {
            quads[part] = look_up_values(codes >> 4 * part & 0x0F0F0F0Fu, table);
            count_negative(&sums, quads[part]);
        }
    }
    *negative = sum_of_negative(&sums);
}

/* The next `count` groups of a panel, which begin at `at`; returns where the ones behind them do. */
INLINE const uint8_t *read_groups(const Matrix *matrix, const uint8_t *at, code_table table, int count, Groups *groups, const int group,
                                  size_t distance) {
    const int kind = matrix->kind, codes = group * 8;
    if (kind == PANELS_IQ4_XS) {
        for (int line = 0; line < 128; line += 64) PREFETCH(at + line)
        at += decode_iq4_xs(at, matrix->block, groups->scales);
    }
    for (int g = 0; g < count; g++, at += codes) {
        if (kind == PANELS_4_BITS_TABLE_HALVES && g % 2)
            groups->scales[g] = load_halves(at - codes - sizeof(halfs));
        else if (kind != PANELS_IQ4_XS) {
            PREFETCH(at)
            groups->scales[g] = kind == PANELS_4_BITS_TABLE_HALVES ? load_halves(at) : load((const float *)at);
            at += sizeof(floats);
        }
        read_codes(at, table, group, groups->quads + g * group / 4, groups->negative + g, distance);
    }
    return at;
}

/* Adds the products of groups to the sums of a block of rows; returns where the next quads are. */
INLINE const float *add_groups(const Groups *groups, int count, const float *x, floats *sum, const int group) {
    for (int g = 0; g < count; g++) {
        const int32_t *offsets = (const int32_t *)x + rows, *quad = (const int32_t *)x + GROUP_HEADER * rows;
        const table_values *w = groups->quads + g * group / 4;
        ints dot[MAX_ROWS];
        EACH_ROW dot[row] = broadcast_int(offsets[row]) - groups->negative[g];
        for (int column = 0; column < group; column += 16)
            _Pragma("unroll") for (int i = 0; i < 4; i++, w++, quad += rows * TABLE_WORDS)
                EACH_ROW dot[row] = dot_values(*w, quad + row * TABLE_WORDS, dot[row], TURNED);
        EACH_ROW sum[row] = fused(__builtin_convertvector(dot[row], floats), groups->scales[g] * broadcast(x[row]), sum[row]);
        x = (const float *)quad;
    }
    return x;
}

INLINE void multiply_groups(const Matrix *matrix, int first, const float *packed, size_t step, float *y, int blocks, size_t ahead,
                            const int group) {
    const int most = group > SUPER_BLOCK / 2 ? 2 : SUPER_BLOCK / group / 2 * 2;
    const size_t distance = prefetch_distance(rows, ahead);
    const uint8_t *at = matrix->codes + (size_t)(first / LANES) * (size_t)matrix->row_bytes;
    const code_table table = table_of(matrix, TURNED);
    floats sum[MOST_BLOCKS][MAX_ROWS];
    for (int i = 0; i < blocks; i++) EACH_ROW sum[i][row] = broadcast(0.0f);
    for (int left = matrix->columns / group; left > 0; left -= most) {
        Groups groups;
        const int count = left < most ? left : most;
        at = read_groups(matrix, at, table, count, &groups, group, distance);
        const float *x = packed;
        for (int i = 0; i < blocks; i++) x = add_groups(&groups, count, packed + (size_t)i * step, sum[i], group);
        packed = x - (size_t)(blocks - 1) * step;
    }
    for (int i = 0; i < blocks; i++)
        store_sums(matrix, first, sum[i], rows, y + (size_t)(i * rows) * (size_t)matrix->outputs, rows);
}

/* As multiply_blocks_of_rows. Groups of 32, which most files have, as straight code. */
void multiply_table_blocks(const Matrix *matrix, int first, const float *packed, size_t step, float *y, int blocks, size_t ahead) {
    if (matrix->group == 32)
        multiply_groups(matrix, first, packed, step, y, blocks, ahead, 32);
    else
        multiply_groups(matrix, first, packed, step, y, blocks, ahead, matrix->group);
}
#endif
