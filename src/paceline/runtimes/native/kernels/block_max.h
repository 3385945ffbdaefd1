/* The maximum of each block of a row of logits. Sampling reads a block only if its maximum can matter. */
#ifndef PACELINE_BLOCK_MAX_H
#define PACELINE_BLOCK_MAX_H

#define BLOCK_COLUMNS 192 /* logits of a block: a multiple of the outputs of tiles and panels; products that compute block_max work on whole blocks */

float max_of(const float *x, int count);
void find_block_max(const float *x, int count, int size, float *block_max);
void keep_block_max(const float *x, int width, int rows, int begin, float *block_max);

#endif
