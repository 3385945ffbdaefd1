/* Summaries of rows of logits for drafting: top tokens, log-sum-exp and a token sampled by Gumbel-max, computed while the row is in a cache.
 *
 * A row is summarised in pieces of fixed size; join_summaries combines them in order, so results do not depend on the number of threads. */
#include "native.h"
#include "noise.h"

#include <math.h>

#define BLOCK_SCORES 256 /* scores of a block; the maxima of all blocks are kept, so that the top tokens are found quickly */

typedef struct {
    float peak, sum; /* peak: the largest score; sum: sum of exp(score - peak) */
    double gumbel_score; /* the largest score - log E, see noise.h; -inf = not sampled */
    int32_t sampled, num_top; /* sampled: the column with gumbel_score; num_top: number of top scores found */
} PieceSummary;

static float max_of_block(const float *scores) {
    floats maxima = broadcast(-INFINITY);
    for (int column = 0; column < BLOCK_SCORES; column += LANES) maxima = __builtin_elementwise_max(maxima, load(scores + column));
    float largest = maxima[0];
    for (int lane = 1; lane < LANES; lane++) largest = maxima[lane] > largest ? maxima[lane] : largest;
    return largest;
}

static const ints lane_indices = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Set the first of BLOCK_SCORES scores that equals `target` to -inf and return its index. *next_max: the maximum of the remaining scores. */
static int remove_first_equal(float *scores, float target, float *next_max) {
    ints first = lane_indices - lane_indices + INT32_MAX;
    for (int column = 0; column < BLOCK_SCORES; column += LANES) {
        const ints equal = load(scores + column) == broadcast(target), number = lane_indices + column;
        first = __builtin_elementwise_min(first, (number & equal) | (INT32_MAX & ~equal));
    }
    const int found = __builtin_reduce_min(first);
    scores[found] = -INFINITY;
    *next_max = max_of_block(scores);
    return found;
}

/* Find the `count` largest scores above -inf, in descending order; equal scores in the order of columns. Return their number. Overwrites `scores`. */
static int top_n(float *scores, float *block_max, int blocks, int begin, int count, float *values, int32_t *columns) {
    for (int rank = 0; rank < count; rank++) {
        int block = 0;
        for (int other = 1; other < blocks; other++)
            if (block_max[other] > block_max[block]) block = other;
        if (!(block_max[block] > -INFINITY)) return rank;
        values[rank] = block_max[block];
        const int place = remove_first_equal(scores + block * BLOCK_SCORES, block_max[block], block_max + block);
        columns[rank] = begin + block * BLOCK_SCORES + place;
    }
    return count;
}

static int piece_summary_floats(int count) { return (int)(sizeof(PieceSummary) / sizeof(float)) + 2 * count; }
static int summary_floats(int count) { return 2 + 2 * count; }
static float *piece_summary_at(float *out, int count, int piece) { return out + summary_floats(count) + piece * piece_summary_floats(count); }

/* Summarise piece `number` of a row: up to SUMMARY_COLUMNS columns. */
void summarize_piece(const SummarizeOperation *op, const RowSampling *sampling, const float *row, int number, float *out) {
    float scores[SUMMARY_COLUMNS], block_max[SUMMARY_COLUMNS / BLOCK_SCORES];
    const int begin = number * SUMMARY_COLUMNS;
    const int count = op->columns - begin < SUMMARY_COLUMNS ? op->columns - begin : SUMMARY_COLUMNS;
    const int blocks = (count + BLOCK_SCORES - 1) / BLOCK_SCORES, is_sampled = sampling && sampling->temperature > 0.0f;
    memcpy(scores, row + begin, (size_t)count * sizeof(float));
    for (int column = count; column < blocks * BLOCK_SCORES; column++) scores[column] = -INFINITY;
    if (is_sampled && sampling->temperature != 1.0f)
        for (int column = 0; column < count; column += LANES) store(scores + column, load(scores + column) / broadcast(sampling->temperature));
    PieceSummary piece = {-INFINITY, 0.0f, -INFINITY, -1, 0};
    for (int block = 0; block < blocks; block++) {
        block_max[block] = max_of_block(scores + block * BLOCK_SCORES);
        piece.peak = block_max[block] > piece.peak ? block_max[block] : piece.peak;
    }
    const floats shift = broadcast(piece.peak > -INFINITY ? piece.peak : 0.0f);
    floats sum = broadcast(0.0f);
    GumbelMax search = {-INFINITY, -INFINITY, INFINITY, -1};
    for (int column = 0; column < blocks * BLOCK_SCORES; column += LANES) {
        const floats score = load(scores + column), weight = exponential(score - shift);
        sum += weight;
        if (is_sampled && column < count)
            update_gumbel_max(&search, score, weight, noise_of_ids(sampling->key, op->target_ids, begin + column), lane_indices >= 0, begin + column);
    }
    piece.sum = lane_sum(sum);
    piece.gumbel_score = search.max_score;
    piece.sampled = search.argmax;
    float *at = piece_summary_at(out, op->count, number), *values = at + sizeof(PieceSummary) / sizeof(float);
    piece.num_top = top_n(scores, block_max, blocks, begin, op->count, values, (int32_t *)(values + op->count));
    memcpy(at, &piece, sizeof piece);
}

/* Insert a score into a descending list of num_kept scores, after equal scores; the list holds at most `count`. Return its new length. */
static int insert_score(float value, int32_t column, float *values, int32_t *columns, int num_kept, int count) {
    int place = num_kept;
    while (place > 0 && value > values[place - 1]) place--;
    if (place == count) return num_kept;
    const int moved = (num_kept < count ? num_kept : count - 1) - place;
    memmove(values + place + 1, values + place, (size_t)moved * sizeof(float));
    memmove(columns + place + 1, columns + place, (size_t)moved * sizeof(int32_t));
    values[place] = value;
    columns[place] = column;
    return num_kept < count ? num_kept + 1 : num_kept;
}

/* Combine the pieces into the summary of a row (runtimes/logits_summary.py): log(sum(exp(score))), not finite if a logit is NaN or +inf; the
 * sampled token, -1 = none; `count` scores, then their ids, padded with -inf and -1. */
void join_summaries(const SummarizeOperation *op, float *out) {
    const int count = op->count, pieces = ceil_div(op->columns, SUMMARY_COLUMNS);
    float *values = out + 2;
    int32_t *columns = (int32_t *)(values + count), sampled = -1;
    float peak = -INFINITY, sum = 0.0f;
    double best_score = -INFINITY;
    int num_kept = 0;
    PieceSummary piece;
    for (int number = 0; number < pieces; number++) {
        const float *at = piece_summary_at(out, count, number), *others = at + sizeof piece / sizeof(float);
        memcpy(&piece, at, sizeof piece);
        peak = piece.peak > peak ? piece.peak : peak;
        for (int rank = 0; rank < piece.num_top; rank++)
            num_kept = insert_score(others[rank], ((const int32_t *)(others + count))[rank], values, columns, num_kept, count);
        if (piece.gumbel_score > best_score) {
            best_score = piece.gumbel_score;
            sampled = piece.sampled;
        }
    }
    for (int number = 0; number < pieces; number++) {
        memcpy(&piece, piece_summary_at(out, count, number), sizeof piece);
        const floats share = exponential(broadcast(piece.peak > -INFINITY ? piece.peak - peak : -INFINITY));
        sum += piece.sum * share[0];
    }
    for (int rank = num_kept; rank < count; rank++) {
        values[rank] = -INFINITY;
        columns[rank] = -1;
    }
    out[0] = peak + (float)log((double)sum);
    if (op->target_ids) {
        for (int rank = 0; rank < num_kept; rank++) columns[rank] = op->target_ids[columns[rank]];
        sampled = sampled < 0 ? sampled : op->target_ids[sampled];
    }
    memcpy(out + 1, &sampled, sizeof sampled);
}

/* Return the number of floats in a row of the operation's result buffer: the summary, then scratch memory for the pieces. */
int32_t paceline_summary_floats(int32_t columns, int32_t count) {
    return summary_floats(count) + ceil_div(columns, SUMMARY_COLUMNS) * piece_summary_floats(count);
}
