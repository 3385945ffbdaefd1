/* The work of an attention operation in pieces, for whoever shares it out. */
#ifndef PACELINE_ATTENTION_H
#define PACELINE_ATTENTION_H

#include "native.h"

/* Positions whose weights and values are summed up by themselves; the sums are then merged in the order of the positions. It is part of the
 * arithmetic, so it is the same everywhere. */
#define SPLIT 256
#define MOST_QUERIES 64 /* of a chunk, unless a single row has more */

/* Rows of a range that are worked on together, so that each block of the cache is read once for all of them, and one kv head. */
typedef struct {
    const Range *range;
    int row, rows, kv_head; /* row: of the range */
} Chunk;

int chunk_rows(const AttentionOperation *own);
/* The splits that rows of a chunk can see: [*first, *end). */
void splits_of(const AttentionOperation *own, const Chunk *chunk, int *first, int *end);
/* Floats of what one split gives for one query: the sums of the values, their largest score, the sum of their weights. */
int part_floats(const AttentionOperation *own);
/* A part for each query of the chunk and each of `count` splits from `first` on, at `parts`; those of a split lie `stride` floats behind the
 * ones before. */
void attend_splits(const Program *program, const Pass *pass, const AttentionOperation *own, const Chunk *chunk, int first, int count, float *scratch, float *parts, size_t stride);
/* Merge `count` splits' parts, which lie `stride` floats apart, and write the rows' results. */
void finish_attention(const Program *program, const AttentionOperation *own, const Chunk *chunk, float *parts, int count, size_t stride);
/* All splits of a chunk, one after another, and the results. */
void attend(const Program *program, const Pass *pass, const AttentionOperation *own, const Chunk *chunk, float *scratch);

#endif
