/* The maximum of each block of a row of logits. Sampling uses it to skip blocks that cannot contain the sampled token. */
#ifndef PACELINE_BLOCK_MAX_H
#define PACELINE_BLOCK_MAX_H

#define BLOCK_COLUMNS 192 /* logits of a block: a multiple of the outputs of a tile and of a panel, because a product computes whole blocks */

float max_or_nan(const float *x, int count);
void find_block_max(const float *x, int count, int size, float *block_max);
void store_block_max(const float *x, int width, int rows, int begin, float *block_max);

#endif
