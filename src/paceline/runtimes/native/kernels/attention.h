/* Attention in pieces: chunks of rows and splits of positions, which attention_work.c divides among threads. */
#ifndef PACELINE_ATTENTION_H
#define PACELINE_ATTENTION_H

#include "native.h"

/* Positions of a split: computed separately, then merged in order. Results depend on the size, so it is the same on all machines. */
#define SPLIT 256
#define MAX_QUERIES 64 /* maximum number of queries (rows times query heads) of a chunk, if it has several rows */

/* Consecutive rows of a range, and one KV head. A block of the cache is read once for all of them. */
typedef struct {
    const Range *range;
    int row, rows, kv_head; /* row: the first row, counted from the start of the range */
} Chunk;

/* Return the rows of a chunk, except the last one of a range. */
int chunk_rows(const AttentionOperation *op);
/* Set [*first, *end) to the splits that contain positions of the rows of a chunk. */
void find_splits(const AttentionOperation *op, const Chunk *chunk, int *first, int *end);
/* Return the floats of a split's result for one query: weighted sum of values, maximum score, sum of weights, padding. */
int split_result_floats(const AttentionOperation *op);
/* Compute `count` splits from `first` on for each query of the chunk. The results of a split are `stride` floats after those of the one before. */
void attend_splits(const Program *program, const Pass *pass, const AttentionOperation *op, const Chunk *chunk, int first, int count, float *scratch,
                   float *results, size_t stride);
/* Merge the results of `count` splits, which are `stride` floats apart, and write the attention outputs of the rows. */
void finish_attention(const Program *program, const AttentionOperation *op, const Chunk *chunk, float *results, int count, size_t stride);
/* Compute all splits of a chunk, one after another, and write the attention outputs. */
void attend_chunk(const Program *program, const Pass *pass, const AttentionOperation *op, const Chunk *chunk, float *scratch);

#endif
