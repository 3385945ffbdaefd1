/* The largest logit of each block of a row, for sampling that reads a block only where it can matter. */
#ifndef PACELINE_BLOCK_MAX_H
#define PACELINE_BLOCK_MAX_H

#define BLOCK_COLUMNS 192 /* of a block, and of a piece of a product that keeps them: whole tiles and panels */

float max_of(const float *x, int count);
void find_block_max(const float *x, int count, int size, float *block_max);
void keep_block_max(const float *x, int width, int rows, int begin, float *block_max);

#endif
