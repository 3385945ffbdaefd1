/* Records shared with runtimes/native/program.py (ctypes), and what the files of this folder offer one another. */
#ifndef PACELINE_NATIVE_H
#define PACELINE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

/* Rows that share one decoding of a weight: as many as keep their sums in registers. */
#ifdef __AVX512F__
#define MAX_ROWS 8
#else
#define MAX_ROWS 4
#endif

/* How weights are stored. U8_MINIMUM and U4_MINIMUM add a minimum per group. */
#define F32 0
#define F16 1
#define BF16 2
#define S8 3
#define U8 4
#define U8_MINIMUM 5
#define U4 6
#define U4_MINIMUM 7
/* The same codes in strips of 16 outputs (strips.c), for rows that are rounded to bytes. */
#define STRIPS_8_BITS 8
#define STRIPS_8_BITS_MINIMUM 9
#define STRIPS_4_BITS 10
#define STRIPS_4_BITS_MINIMUM 11
#define MAX_GROUP 256 /* columns of a group of such rows */

/* W [outputs, columns]. */
typedef struct {
    int32_t kind, outputs, columns, group, zero_point, out; /* out: buffer of the result */
    int64_t row_bytes; /* of an output, or of a strip */
    const uint8_t *codes;
    const float *scales, *minimums; /* [outputs, columns / group] */
    const float *bias;              /* [outputs] or NULL */
} Matrix;

/* What an operation does; rows are those of the pass, or the selected ones once SELECT has run. */
enum { LINEAR, NORM, ROPE, ATTENTION, GATED, ADD, SELECT, SOFT_CAP, CONCAT, SILU_RESIDUAL };
enum { SILU, GELU_TANH };
/* How a product takes its rows: as they are, rounded to bfloat16 in pairs (all its matrices are BF16 then), or rounded to bytes (all its
 * matrices are strips then, with the same groups and the same zero point). */
enum { AS_FLOATS, AS_PAIRS, AS_BYTES };

typedef struct {
    int32_t code;
    int32_t x, y, z, out; /* buffers */
    int32_t count;        /* heads (NORM, ROPE), matrices (LINEAR), floats of a row of x (CONCAT) */
    int32_t width;        /* floats of a row, or of a head where there is a count */
    int32_t choice;       /* packing, rope table, activation, or layer */
    int32_t selected;     /* works on the selected rows */
    float number, limit;  /* epsilon or scale; soft cap, 0 = none */
    const void *data;     /* Matrix[count], or the norm's weight [width] */
} Operation;

/* Rows [start, start + rows) of the pass: one path. Its block table and its mask begin at these offsets; mask < 0: causal.
 * Cached slots before first_slot are not seen. */
typedef struct {
    int32_t start, rows, cached_len, table, mask, first_slot;
} Range;

typedef struct {
    int32_t rows, selected_rows, num_ranges;
    const Range *ranges;
    const int32_t *range_of_row; /* [rows] */
    const int32_t *block_tables;
    const uint8_t *masks;
    const int32_t *selected;   /* [selected_rows] */
    const float *cos[2], *sin[2]; /* [rows, rotary half] of each rope table */
} Pass;

typedef struct {
    const Operation *operations;
    int32_t num_operations, num_threads;
    float *const *buffers;
    float *packed;         /* packed_floats(rows, most_columns) */
    float *packed_rows;    /* per thread: packed_floats(1, most_columns) */
    float *const *scratch; /* per thread: (1 + heads / kv_heads) * (max_context + 16) floats */
    float *cache;          /* [2 * layers, num_blocks, kv_heads, block_size, head_size] */
    int32_t num_blocks, block_size, heads, kv_heads, head_size, rotary_half;
    int32_t max_context, most_columns;
    int32_t *tickets;      /* [2 * num_operations] */
} Program;


int tile_rows(int rows);
size_t packed_floats(int rows, int columns);
void pack_rows(const Matrix *matrix, const float *x, int rows, int packing, int block, float *packed);
void multiply(const Matrix *matrix, int begin, int end, int packing, const float *packed, float *y, int rows);

size_t packed_bytes_words(int columns, int group);
void pack_bytes(const float *x, int columns, int group, int zero_point, int first, int real, int padded, float *packed);
void multiply_bytes(const Matrix *matrix, int begin, int end, const float *packed, float *y, int rows);

void norm_row(const float *x, const float *weight, int width, float epsilon, float *out);
void rotate_head(const float *x, const float *cos, const float *sin, int width, int half, float *out);
void gate(const float *x, const float *up, int width, int activation, float *out);
void add(const float *x, const float *y, int width, float *out);
void soft_cap(const float *x, int width, float cap, float *out);
void add_silu(const float *x, const float *y, int width, float *out);
void join(const float *x, int width, const float *y, int begin, int count, float *out);

void keep_row(const Program *program, const Pass *pass, int layer, int row, const float *k, const float *v);
void attend(const Program *program, const Pass *pass, const Operation *operation, int row, int kv_head, float *scratch);

#endif
