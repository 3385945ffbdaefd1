/* Attention is computed in chunks of rows and splits of positions, which attention_work.c divides among threads. */
#ifndef PACELINE_ATTENTION_H
#define PACELINE_ATTENTION_H

#include "native.h"

/* Splits of a sequence are computed separately, then merged in order. Results depend on the split size, so it is the same on all machines. */
#define SPLIT_POSITIONS 256
#define MAX_QUERIES 64 /* maximum number of queries (rows times query heads) of a chunk of several rows */

/* Consecutive rows of a range, and one KV head. A block of the cache is read once for all rows of a chunk. */
typedef struct {
    const Range *range;
    int first_row, rows, kv_head; /* first_row: counted from the start of the range */
} Chunk;

/* Return the number of rows in a chunk; the last chunk of a range may have fewer. */
int max_chunk_rows(const AttentionOperation *op);
/* Set [*first, *end) to the splits that contain positions of the rows of a chunk. */
void find_chunk_splits(const AttentionOperation *op, const Chunk *chunk, int *first, int *end);
/* Return the number of floats in a split's result for one query: weighted sum of values, largest score, sum of weights, padding. */
int split_result_floats(const AttentionOperation *op);
/* Compute `count` splits from `first` on for each query of the chunk. The results of consecutive splits are `stride` floats apart. */
void attend_splits(const Program *program, const Pass *pass, const AttentionOperation *op, const Chunk *chunk, int first, int count, float *scratch,
                   float *results, size_t stride);
/* Merge the results of `count` splits, which are `stride` floats apart, and write the attention outputs of the rows. */
void merge_and_write_outputs(const Program *program, const AttentionOperation *op, const Chunk *chunk, float *results, int count, size_t stride);
/* Compute all splits of a chunk, one after another, and write the attention outputs. */
void attend_chunk(const Program *program, const Pass *pass, const AttentionOperation *op, const Chunk *chunk, float *scratch);

#endif
