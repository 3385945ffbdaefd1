/* The largest of blocks of logits, for draws that read a block only where it can matter. */
#ifndef PACELINE_PEAKS_H
#define PACELINE_PEAKS_H

#define PEAK_COLUMNS 192 /* of a block, and of a piece of a product that keeps peaks: whole tiles and panels */

float peak_of(const float *x, int count);
void find_peaks(const float *x, int count, int size, float *peaks);
void note_peaks(const float *x, int width, int rows, int begin, float *peaks);

#endif
