/* Products with K-quants at their stored size, of rows rounded to 8-bit codes: the sums of panels.c, whose scales and minimums are decoded in
 * registers.
 *
 * A super-block has 256 columns in groups of 32 (Q6_K: 16). A group's scale is its whole factor times the super-block's float16, its minimum
 * likewise, negated. The products are exact in float32, so sums have the bits they would have of scales stored as float32. Where columns were
 * put in another order, each half of a super-block has float16 numbers of its own (`block` = 128).
 *
 * Weights lie in panels of 16 outputs side by side, one super-block after the other:
 *     Q4_K, Q5_K   float16 [1 or 2 halves][scale, minimum][16 outputs]; words [3][16 outputs]: the low four bits of eight factors, of eight
 *                  factors of minimums, the high two bits of both (2 g and 16 + 2 g bits up); eight groups
 *     Q6_K         float16 [2 halves][16 outputs]; int8 factors [16 groups][16 outputs]; 16 groups
 * A group is a word of high bits for each output (those of column j of quad i are i + 8 j bits up, with two bits 2 i + 8 j; none with Q4_K),
 * and the codes' low four bits as in panels.c. */
#include "panels.h"
#include "transpose.h"

#define MOST_GROUPS (SUPER_BLOCK / 16)
#define FACTORS 8 /* of 6 bits, in a super-block of Q4_K and Q5_K */

static int has_minimums(int kind) { return kind != PANELS_Q6_K; }
static int group_of(int kind) { return has_minimums(kind) ? 32 : 16; }
static int high_bits_of(int kind) { return kind - PANELS_Q4_K; }
static int halves_bytes(int kind, int block) { return has_minimums(kind) ? 64 * (SUPER_BLOCK / block) : 64; }
static int header_bytes(int kind, int block) { return halves_bytes(kind, block) + (has_minimums(kind) ? 3 * (int)sizeof(words) : 256); }

/* Bits [at, at + count) of every word, `to` bits up. */
INLINE words bits_of(words from, const int at, const int count, const int to) {
    return (at > to ? from >> (at - to) : from << (to - at)) & (uint32_t)(((1 << count) - 1) << to);
}

INLINE floats float_of(words factors) { return __builtin_convertvector((ints)factors, floats); }

/* Scales and minimums of the groups of a super-block. */
INLINE void decode_6_bits(const uint8_t *header, int block, floats *scales, floats *minimums) {
    const int has_one = block == SUPER_BLOCK;
    const uint8_t *packed = header + (has_one ? 64 : 128);
    const words low = load_codes(packed), low_minimums = load_codes(packed + 64), high = load_codes(packed + 128);
    floats scale = load_halves(header), minimum = -load_halves(header + 32);
    _Pragma("unroll") for (int g = 0; g < FACTORS; g++) {
        if (g == FACTORS / 2 && !has_one) {
            scale = load_halves(header + 64);
            minimum = -load_halves(header + 96);
        }
        scales[g] = scale * float_of(bits_of(low, 4 * g, 4, 0) | bits_of(high, 2 * g, 2, 4));
        minimums[g] = minimum * float_of(bits_of(low_minimums, 4 * g, 4, 0) | bits_of(high, 16 + 2 * g, 2, 4));
    }
}

INLINE void decode_8_bits(const uint8_t *header, floats *scales) {
    const floats halves[2] = {load_halves(header), load_halves(header + 32)};
    _Pragma("unroll") for (int g = 0; g < MOST_GROUPS; g++) {
        signed_bytes factors;
        memcpy(&factors, header + 64 + g * LANES, sizeof factors);
        scales[g] = halves[g / (MOST_GROUPS / 2)] * __builtin_convertvector(__builtin_convertvector(factors, ints), floats);
    }
}

/* Quad `number` of a group, from the word with its low bits. */
INLINE words quad_of(words codes, words high, const int number, const int high_bits) {
    const words low = codes >> (number % 2 * 4) & 0x0F0F0F0Fu;
    if (!high_bits) return low;
    const int at = high_bits * number, ones = high_bits == 1 ? 0x10101010 : 0x30303030;
    return low | ((at > 4 ? high >> (at - 4) : high << (4 - at)) & (uint32_t)ones);
}

/* The scales and minimums of a super-block's panels, from its header. */
INLINE void decode_header(const uint8_t *at, size_t next, int block, floats scales[][MOST_GROUPS], floats minimums[][FACTORS], const int panels,
                          const int kind) {
    EACH_PANEL {
        if (has_minimums(kind))
            decode_6_bits(at + (size_t)n * next, block, scales[n], minimums[n]);
        else
            decode_8_bits(at + (size_t)n * next, scales[n]);
    }
}

/* What the sums of a group add to those of the panels' outputs. */
INLINE void add_group(const GroupSums *sums, const float *x, int g, floats scales[][MOST_GROUPS], floats minimums[][FACTORS],
                      floats sum[][MAX_ROWS], const int rows, const int panels, const int kind) {
    EACH_PANEL {
        EACH_ROW sum[n][row] = fused(__builtin_convertvector(sums->dot[n][row], floats), scales[n][g] * broadcast(x[row]), sum[n][row]);
        if (has_minimums(kind)) EACH_ROW sum[n][row] = fused(minimums[n][g], broadcast(x[2 * rows + row]), sum[n][row]);
    }
}

/* Where the dot products of a group begin; Q4_K and Q5_K have no zero point. */
INLINE int32_t offset_of(const int32_t *offsets, const int row, const int kind) { return DOT_SHIFT || !has_minimums(kind) ? offsets[row] : 0; }

/* Adds the products of a super-block's codes, which begin at `at`; returns where the next quads are. */
INLINE const float *add_groups(const uint8_t *at, size_t next, const float *x, floats scales[][MOST_GROUPS], floats minimums[][FACTORS],
                               floats sum[][MAX_ROWS], const int rows, const int panels, const int kind, size_t distance) {
    const int high_bits = high_bits_of(kind), group = group_of(kind);
    for (int g = 0; g < SUPER_BLOCK / group; g++) {
        const int32_t *offsets = (const int32_t *)x + rows, *quad = (const int32_t *)x + GROUP_HEADER * rows;
        GroupSums sums;
        words high[MOST_PANELS] = {{0}};
        leave_in_memory(sum, rows, panels);
        EACH_ROW EACH_PANEL sums.dot[n][row] = broadcast_int(offset_of(offsets, row, kind));
        if (high_bits) {
            EACH_PANEL {
                high[n] = load_codes(at + (size_t)n * next);
                PREFETCH(at + (size_t)n * next)
            }
            at += sizeof(words);
        }
        _Pragma("unroll") for (int pair = 0; pair < group / 8; pair++, at += sizeof(words)) {
            words codes[MOST_PANELS];
            EACH_PANEL {
                codes[n] = load_codes(at + (size_t)n * next);
                PREFETCH(at + (size_t)n * next)
            }
            _Pragma("unroll") for (int number = 2 * pair; number < 2 * pair + 2; number++) {
                words w[MOST_PANELS];
                EACH_PANEL w[n] = quad_of(codes[n], high[n], number, high_bits);
                quad = multiply_add(&sums, w, quad, rows, panels, number, QUADS_AT_ONCE(4 + high_bits));
            }
        }
        add_group(&sums, x, g, scales, minimums, sum, rows, panels, kind);
        x = (const float *)quad;
    }
    return x;
}

/* As multiply_panels of panels.c. */
INLINE void multiply_tile(const Matrix *matrix, int first, const float *x, float *y, const int rows, int real_rows, size_t ahead,
                          const int panels, const int kind) {
    const int header = header_bytes(kind, matrix->block), codes = SUPER_BLOCK / 8 * (64 + 16 * high_bits_of(kind));
    const size_t next = (size_t)matrix->row_bytes, distance = prefetch_distance(rows, ahead);
    const uint8_t *at = matrix->codes + (size_t)(first / LANES) * next;
    floats sum[MOST_PANELS][MAX_ROWS];
    EACH_PANEL EACH_ROW sum[n][row] = broadcast(0.0f);
    for (int begin = 0; begin < matrix->columns; begin += SUPER_BLOCK, at += codes) {
        floats scales[MOST_PANELS][MOST_GROUPS], minimums[MOST_PANELS][FACTORS];
        decode_header(at, next, matrix->block, scales, minimums, panels, kind);
        EACH_PANEL for (int line = 0; line < header; line += 64) PREFETCH(at + (size_t)n * next + line)
        at += header;
        x = add_groups(at, next, x, scales, minimums, sum, rows, panels, kind, distance);
    }
    EACH_PANEL store_sums(matrix, first + n * LANES, sum[n], rows, y, real_rows);
}

#if SHARES_DECODING
/* The quads of a super-block, whose codes begin at `at`. */
INLINE void decode_codes(const uint8_t *at, words *quads, const int rows, const int kind, size_t distance) {
    const int high_bits = high_bits_of(kind), group = group_of(kind);
    for (int g = 0; g < SUPER_BLOCK / group; g++, quads += group / 4) {
        words high = {0};
        if (high_bits) {
            high = load_codes(at);
            PREFETCH(at)
            at += sizeof(words);
        }
        _Pragma("unroll") for (int pair = 0; pair < group / 8; pair++, at += sizeof(words)) {
            const words codes = load_codes(at);
            PREFETCH(at)
            quads[2 * pair] = quad_of(codes, high, 2 * pair, high_bits);
            quads[2 * pair + 1] = quad_of(codes, high, 2 * pair + 1, high_bits);
        }
    }
}

/* As add_groups, of one panel and of quads that are decoded. */
INLINE const float *add_decoded(const words *w, const float *x, floats scales[][MOST_GROUPS], floats minimums[][FACTORS], floats sum[][MAX_ROWS],
                                const int rows, const int kind) {
    const int group = group_of(kind);
    for (int g = 0; g < SUPER_BLOCK / group; g++, w += group / 4) {
        const int32_t *offsets = (const int32_t *)x + rows, *quad = (const int32_t *)x + GROUP_HEADER * rows;
        GroupSums sums;
        EACH_ROW sums.dot[0][row] = broadcast_int(offset_of(offsets, row, kind));
        _Pragma("unroll") for (int number = 0; number < group / 4; number++)
            quad = multiply_add(&sums, w + number, quad, rows, 1, number, QUADS_AT_ONCE(4 + high_bits_of(kind)));
        add_group(&sums, x, g, scales, minimums, sum, rows, 1, kind);
        x = (const float *)quad;
    }
    return x;
}

/* As multiply_tile of one panel, for several whole blocks of rows, `step` words apart: what a super-block holds is decoded once for all. */
INLINE void multiply_blocks(const Matrix *matrix, int first, const float *packed, size_t step, float *y, const int blocks, size_t ahead,
                            const int kind) {
    enum { rows = MAX_ROWS };
    const int header = header_bytes(kind, matrix->block), codes = SUPER_BLOCK / 8 * (64 + 16 * high_bits_of(kind));
    const size_t distance = prefetch_distance(rows, ahead);
    const uint8_t *at = matrix->codes + (size_t)(first / LANES) * (size_t)matrix->row_bytes;
    floats sum[MOST_BLOCKS][1][MAX_ROWS];
    for (int i = 0; i < blocks; i++) EACH_ROW sum[i][0][row] = broadcast(0.0f);
    for (int begin = 0; begin < matrix->columns; begin += SUPER_BLOCK, at += codes) {
        floats scales[1][MOST_GROUPS], minimums[1][FACTORS];
        words quads[SUPER_BLOCK / 4];
        decode_header(at, 0, matrix->block, scales, minimums, 1, kind);
        for (int line = 0; line < header; line += 64) PREFETCH(at + line)
        at += header;
        decode_codes(at, quads, rows, kind, distance);
        const float *x = packed;
        for (int i = 0; i < blocks; i++) x = add_decoded(quads, packed + (size_t)i * step, scales, minimums, sum[i], rows, kind);
        packed = x - (size_t)(blocks - 1) * step;
    }
    for (int i = 0; i < blocks; i++)
        store_sums(matrix, first, sum[i][0], rows, y + (size_t)(i * rows) * (size_t)matrix->outputs, rows);
}

#define BLOCKS_OF_KIND(name, kind)                                                                                            \
    static __attribute__((noinline)) void name(const Matrix *matrix, int first, const float *packed, size_t step, float *y, int blocks, \
                                               size_t ahead) {                                                                \
        multiply_blocks(matrix, first, packed, step, y, blocks, ahead, kind);                                                 \
    }
BLOCKS_OF_KIND(blocks_of_q4_k, PANELS_Q4_K)
BLOCKS_OF_KIND(blocks_of_q5_k, PANELS_Q5_K)
BLOCKS_OF_KIND(blocks_of_q6_k, PANELS_Q6_K)

/* One panel for `blocks` whole blocks of packed rows. */
void multiply_blocks_of_rows(const Matrix *matrix, int first, const float *packed, size_t step, float *y, int blocks, size_t ahead) {
    if (matrix->kind == PANELS_Q4_K)
        blocks_of_q4_k(matrix, first, packed, step, y, blocks, ahead);
    else if (matrix->kind == PANELS_Q5_K)
        blocks_of_q5_k(matrix, first, packed, step, y, blocks, ahead);
    else
        blocks_of_q6_k(matrix, first, packed, step, y, blocks, ahead);
}
#endif

PRODUCTS_OF_KIND(multiply_q4_k, PANELS_Q4_K)
PRODUCTS_OF_KIND(multiply_q5_k, PANELS_Q5_K)
PRODUCTS_OF_KIND(multiply_q6_k, PANELS_Q6_K)

/* As multiply_block of panels.c. */
void multiply_super_blocks(const Matrix *matrix, int first, int end, const float *x, float *y, int rows, int real_rows, size_t ahead) {
    if (IS_SMALL(matrix->kind))
        multiply_small_blocks(matrix, first, end, x, y, rows, real_rows, ahead);
    else if (matrix->kind == PANELS_Q4_K)
        multiply_q4_k(matrix, first, end, x, y, rows, real_rows, ahead);
    else if (matrix->kind == PANELS_Q5_K)
        multiply_q5_k(matrix, first, end, x, y, rows, real_rows, ahead);
    else
        multiply_q6_k(matrix, first, end, x, y, rows, real_rows, ahead);
}

/* Bytes of a panel. */
int64_t paceline_super_block_bytes(int32_t columns, int32_t block, int32_t kind) {
    if (IS_SMALL(kind)) return small_block_bytes(columns, block, kind);
    return (int64_t)columns / SUPER_BLOCK * (header_bytes(kind, block) + SUPER_BLOCK / 8 * (64 + 16 * high_bits_of(kind)));
}

static uint32_t word_at(const uint8_t *from, int lane) {
    uint32_t word;
    memcpy(&word, from + 4 * lane, sizeof word);
    return word;
}

static void add_bits(uint8_t *to, int lane, uint32_t bits) {
    bits |= word_at(to, lane);
    memcpy(to + 4 * lane, &bits, sizeof bits);
}

static float half_at(const uint8_t *from, int lane) {
    _Float16 half;
    memcpy(&half, from + 2 * lane, sizeof half);
    return (float)half;
}

/* Scale and minimum of group g. */
static void decode_group(const uint8_t *header, int kind, int block, int lane, int g, float *scale, float *minimum) {
    const uint8_t *packed = header + halves_bytes(kind, block);
    if (!has_minimums(kind)) {
        *scale = half_at(header + g / (MOST_GROUPS / 2) * 32, lane) * (float)(int8_t)packed[g * LANES + lane];
        return;
    }
    const uint32_t low = word_at(packed, lane), low_minimums = word_at(packed + 64, lane), high = word_at(packed + 128, lane);
    const uint8_t *halves = header + g * (SUPER_BLOCK / FACTORS) / block * 64;
    *scale = half_at(halves, lane) * (float)((low >> 4 * g & 15) | (high >> 2 * g & 3) << 4);
    *minimum = -half_at(halves + 32, lane) * (float)((low_minimums >> 4 * g & 15) | (high >> (16 + 2 * g) & 3) << 4);
}

/* The exact values of some outputs, [count, columns]. */
void paceline_super_block_rows(const Matrix *matrix, const int32_t *numbers, int32_t count, float *to) {
    if (IS_SMALL(matrix->kind)) {
        small_block_rows(matrix, numbers, count, to);
        return;
    }
    const int kind = matrix->kind, high_bits = high_bits_of(kind), group = group_of(kind);
    const uint32_t ones = (1u << high_bits) - 1;
    for (int i = 0; i < count; i++) {
        const int lane = numbers[i] % LANES;
        const uint8_t *at = matrix->codes + (size_t)(numbers[i] / LANES) * (size_t)matrix->row_bytes, *header = at;
        for (int column = 0; column < matrix->columns; column += group) {
            const int g = column % SUPER_BLOCK / group;
            if (!g) {
                header = at;
                at += header_bytes(kind, matrix->block);
            }
            float scale, minimum = 0.0f;
            decode_group(header, kind, matrix->block, lane, g, &scale, &minimum);
            const uint32_t high = high_bits ? word_at(at, lane) : 0;
            at += high_bits ? sizeof(words) : 0;
            for (int quad = 0; quad < group / 4; quad++) {
                const uint32_t low = word_at(at + quad / 2 * (int)sizeof(words), lane) >> quad % 2 * 4, more = high >> high_bits * quad;
                for (int shift = 0; shift < 32; shift += 8) {
                    const float code = (float)((int)((low >> shift & 15) | (more >> shift & ones) << 4) - matrix->zero_point);
                    *to++ = has_minimums(kind) ? code * scale + minimum : code * scale;
                }
            }
            at += group / 8 * (int)sizeof(words);
        }
    }
}

/* The header of super-block `number` of one output. */
static void fill_header(const SuperBlocks *from, int output, int lane, int number, uint8_t *to) {
    const int group = group_of(from->kind), minimum = has_minimums(from->kind), groups = SUPER_BLOCK / group;
    const size_t blocks = (size_t)(from->columns / from->block), first_block = (size_t)(number * (SUPER_BLOCK / from->block));
    const size_t first_group = (size_t)output * (size_t)(from->columns / group) + (size_t)(number * groups);
    for (int half = 0; half < (minimum ? SUPER_BLOCK / from->block : 2); half++) {
        const size_t block = (size_t)output * blocks + first_block + (size_t)(half * (SUPER_BLOCK / 2) / from->block);
        memcpy(to + half * (minimum ? 64 : 32) + 2 * lane, from->scales + block, 2);
        if (minimum) memcpy(to + half * 64 + 32 + 2 * lane, from->minimums + block, 2);
    }
    to += halves_bytes(from->kind, from->block);
    for (int g = 0; g < groups; g++) {
        const uint32_t factor = from->factors[first_group + (size_t)g];
        if (!minimum) {
            to[g * LANES + lane] = (uint8_t)factor;
            continue;
        }
        const uint32_t other = from->minimum_factors[first_group + (size_t)g];
        add_bits(to, lane, (factor & 15) << 4 * g);
        add_bits(to + sizeof(words), lane, (other & 15) << 4 * g);
        add_bits(to + 2 * sizeof(words), lane, factor >> 4 << 2 * g | other >> 4 << (16 + 2 * g));
    }
}

/* Quads of the run of 32 columns that begins at a column, unsigned. */
static void load_quads(const SuperBlocks *from, int first, int outputs, int column, words *quads) {
    const size_t stride = (size_t)from->row_bytes;
    const uint8_t *const rows = from->codes + (size_t)first * stride;
    words own[LANES];
    if (from->kind == PANELS_Q4_K) { /* runs of 32 */
        load_transposed(rows + column / 2, stride, outputs, 16, own);
        for (int i = 0; i < 8; i++) quads[i] = own[i % 4] >> i / 4 * 4 & 0x0F0F0F0Fu;
        return;
    }
    load_transposed(rows + column, stride, outputs, 32, own); /* 6 bits of signed codes, whose highest one is the sign */
    for (int i = 0; i < 8; i++) quads[i] = (own[i] & 0x3F3F3F3Fu) ^ (uint32_t)from->zero_point * 0x01010101u;
}

/* The codes of a group of all outputs, from its quads. */
static void fill_group(int kind, const words *quads, uint8_t *to) {
    const int high_bits = high_bits_of(kind), count = group_of(kind) / 4;
    words high = {0};
    for (int i = 0; i < count && high_bits; i++) high |= (quads[i] >> 4 & ((1u << high_bits) - 1) * 0x01010101u) << high_bits * i;
    if (high_bits) to = put(high, to);
    for (int i = 0; i < count; i += 2) to = put((quads[i] & 0x0F0F0F0Fu) | (quads[i + 1] & 0x0F0F0F0Fu) << 4, to);
}

/* Panels [begin, end) of a matrix stored row by row; outputs that are not there become zeros. */
void paceline_fill_super_blocks(const SuperBlocks *from, int32_t begin, int32_t end, uint8_t *to) {
    if (IS_SMALL(from->kind)) {
        fill_small_blocks(from, begin, end, to);
        return;
    }
    const int group = group_of(from->kind), group_bytes = group * (4 + high_bits_of(from->kind)) / 8 * LANES;
    const int64_t panel_bytes = paceline_super_block_bytes(from->columns, from->block, from->kind);
    for (int panel = begin; panel < end; panel++) {
        uint8_t *at = to + panel * panel_bytes;
        memset(at, 0, (size_t)panel_bytes);
        const int first = panel * LANES, outputs = from->outputs - first < LANES ? from->outputs - first : LANES;
        words quads[8];
        for (int column = 0; column < from->columns; column += group, at += group_bytes) {
            if (column % SUPER_BLOCK == 0) {
                for (int n = 0; n < outputs; n++) fill_header(from, first + n, n, column / SUPER_BLOCK, at);
                at += header_bytes(from->kind, from->block);
            }
            if (column % 32 == 0) load_quads(from, first, outputs, column, quads);
            fill_group(from->kind, quads + column % 32 / 4, at);
        }
    }
}
