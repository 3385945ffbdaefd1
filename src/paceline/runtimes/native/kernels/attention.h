/* Attention in pieces: chunks of rows and splits of positions, which attention_work.c divides among threads. */
#ifndef PACELINE_ATTENTION_H
#define PACELINE_ATTENTION_H

#include "native.h"

/* Positions of a split. Its sums are computed separately and then merged in order. Results depend on it, so it is the same on all machines. */
#define SPLIT 256
#define MAX_QUERIES 64 /* queries of a chunk, unless a single row has more */

/* Consecutive rows of a range and one kv head; each block of the cache is read once for all of them. */
typedef struct {
    const Range *range;
    int row, rows, kv_head; /* row: first row, within the range */
} Chunk;

int chunk_rows(const AttentionOperation *op);
/* Find the splits [*first, *end) that rows of a chunk attend to. */
void splits_of(const AttentionOperation *op, const Chunk *chunk, int *first, int *end);
/* Return the floats of a split's result for one query: weighted sum of values, maximum score, sum of weights. */
int split_result_floats(const AttentionOperation *op);
/* Compute the results of `count` splits from `first` on, for each query of the chunk, at `results`; splits are `stride` floats apart. */
void attend_splits(const Program *program, const Pass *pass, const AttentionOperation *op, const Chunk *chunk, int first, int count, float *scratch,
                   float *results, size_t stride);
/* Merge the results of `count` splits, `stride` floats apart, and write the rows' outputs. */
void finish_attention(const Program *program, const AttentionOperation *op, const Chunk *chunk, float *results, int count, size_t stride);
/* Compute all splits of a chunk one after another and write the outputs. */
void attend(const Program *program, const Pass *pass, const AttentionOperation *op, const Chunk *chunk, float *scratch);

#endif
