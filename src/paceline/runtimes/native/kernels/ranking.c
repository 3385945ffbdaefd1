/* Summaries of rows of logits for drafting: top tokens, log-sum-exp and a token sampled by Gumbel-max, computed while the row is in the cache.
 *
 * A row is processed in pieces of fixed size, which `join_pieces` combines in order: nothing depends on the number of threads. */
#include "native.h"
#include "noise.h"
#include "vectors.h"

#include <math.h>

#define STRIDE 256 /* columns of a block whose maximum is kept */

typedef struct {
    float peak, sum; /* sum of exp(score - peak) */
    double gumbel_score; /* the largest score - log E; -inf = not sampled */
    int32_t drawn, num_best;
} Piece;

static float lane_max(floats v) {
    float most = v[0];
    for (int lane = 1; lane < LANES; lane++) most = v[lane] > most ? v[lane] : most;
    return most;
}

static const ints lane_numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* Return the first of STRIDE scores that equals `target`, set it to -inf, and compute the maximum of the others. */
static int take_first(float *scores, float target, float *next_max) {
    ints first = lane_numbers - lane_numbers + INT32_MAX;
    for (int column = 0; column < STRIDE; column += LANES) {
        const ints equal = load(scores + column) == broadcast(target), number = lane_numbers + column;
        first = __builtin_elementwise_min(first, (number & equal) | (INT32_MAX & ~equal));
    }
    int found = first[0];
    for (int lane = 1; lane < LANES; lane++) found = first[lane] < found ? first[lane] : found;
    scores[found] = -INFINITY;
    floats most = broadcast(-INFINITY);
    for (int column = 0; column < STRIDE; column += LANES) most = __builtin_elementwise_max(most, load(scores + column));
    *next_max = lane_max(most);
    return found;
}

/* Find the `count` largest scores, largest first, ties: lower column; none at -inf. Changes `scores`. */
static int top_n(float *scores, float *stride_max, int strides, int begin, int count, float *values, int32_t *columns) {
    for (int rank = 0; rank < count; rank++) {
        int stride = 0;
        for (int other = 1; other < strides; other++)
            if (stride_max[other] > stride_max[stride]) stride = other;
        if (!(stride_max[stride] > -INFINITY)) return rank;
        values[rank] = stride_max[stride];
        const int place = take_first(scores + stride * STRIDE, stride_max[stride], stride_max + stride);
        columns[rank] = begin + stride * STRIDE + place;
    }
    return count;
}

static int piece_floats(int count) { return (int)(sizeof(Piece) / sizeof(float)) + 2 * count; }

static int record_floats(int count) { return 2 + 2 * count; }

static float *piece_at(float *out, int count, int piece) { return out + record_floats(count) + piece * piece_floats(count); }

/* Summarise columns [PIECE_COLUMNS * number, ...) of a row. */
void rank_piece(const RankOperation *ranking, const Draw *draw, const float *row, int number, float *out) {
    float scores[PIECE_COLUMNS], stride_max[PIECE_COLUMNS / STRIDE];
    const int begin = number * PIECE_COLUMNS;
    const int count = ranking->columns - begin < PIECE_COLUMNS ? ranking->columns - begin : PIECE_COLUMNS;
    const int strides = (count + STRIDE - 1) / STRIDE, draws = draw && draw->temperature > 0.0f;
    memcpy(scores, row + begin, (size_t)count * sizeof(float));
    for (int column = count; column < strides * STRIDE; column++) scores[column] = -INFINITY;
    if (draws && draw->temperature != 1.0f)
        for (int column = 0; column < count; column += LANES) store(scores + column, load(scores + column) / broadcast(draw->temperature));
    Piece piece = {-INFINITY, 0.0f, -INFINITY, -1, 0};
    for (int stride = 0; stride < strides; stride++) {
        floats most = broadcast(-INFINITY);
        for (int column = stride * STRIDE; column < (stride + 1) * STRIDE; column += LANES)
            most = __builtin_elementwise_max(most, load(scores + column));
        stride_max[stride] = lane_max(most);
        piece.peak = stride_max[stride] > piece.peak ? stride_max[stride] : piece.peak;
    }
    const floats shift = broadcast(piece.peak > -INFINITY ? piece.peak : 0.0f);
    floats sum = broadcast(0.0f);
    GumbelMax search = {-INFINITY, -INFINITY, INFINITY, -1};
    for (int column = 0; column < strides * STRIDE; column += LANES) {
        const floats score = load(scores + column), weight = exponential(score - shift);
        sum += weight;
        if (draws && column < count)
            compare_16(&search, score, weight, noise_of_ids(draw->key, ranking->target_ids, begin + column), lane_numbers >= 0, begin + column);
    }
    piece.sum = lane_sum(sum);
    piece.gumbel_score = search.best;
    piece.drawn = search.winner;
    float *at = piece_at(out, ranking->count, number), *values = at + sizeof(Piece) / sizeof(float);
    piece.num_best = top_n(scores, stride_max, strides, begin, ranking->count, values, (int32_t *)(values + ranking->count));
    memcpy(at, &piece, sizeof piece);
}

/* Insert a score into `kept` sorted ones of at most `count`, after equal ones; return the new number. */
static int insert(float value, int32_t column, float *values, int32_t *columns, int kept, int count) {
    int place = kept;
    while (place > 0 && value > values[place - 1]) place--;
    if (place == count) return kept;
    const int moved = (kept < count ? kept : count - 1) - place;
    memmove(values + place + 1, values + place, (size_t)moved * sizeof(float));
    memmove(columns + place + 1, columns + place, (size_t)moved * sizeof(int32_t));
    values[place] = value;
    columns[place] = column;
    return kept < count ? kept + 1 : kept;
}

/* Combine the pieces to the record of a row: log(sum(exp)), not finite if a logit is NaN or +inf; the sampled token, -1 = not sampled; `count`
 * scores and their ids, padded with -inf and -1. */
void join_pieces(const RankOperation *ranking, float *out) {
    const int count = ranking->count, pieces = pieces_of(ranking->columns);
    float *values = out + 2;
    int32_t *columns = (int32_t *)(values + count), drawn = -1;
    float peak = -INFINITY, sum = 0.0f;
    double best_score = -INFINITY;
    int kept = 0;
    Piece piece;
    for (int number = 0; number < pieces; number++) {
        const float *at = piece_at(out, count, number), *others = at + sizeof piece / sizeof(float);
        memcpy(&piece, at, sizeof piece);
        peak = piece.peak > peak ? piece.peak : peak;
        for (int rank = 0; rank < piece.num_best; rank++)
            kept = insert(others[rank], ((const int32_t *)(others + count))[rank], values, columns, kept, count);
        if (piece.gumbel_score > best_score) {
            best_score = piece.gumbel_score;
            drawn = piece.drawn;
        }
    }
    for (int number = 0; number < pieces; number++) {
        memcpy(&piece, piece_at(out, count, number), sizeof piece);
        const floats share = exponential(broadcast(piece.peak > -INFINITY ? piece.peak - peak : -INFINITY));
        sum += piece.sum * share[0];
    }
    for (int rank = kept; rank < count; rank++) {
        values[rank] = -INFINITY;
        columns[rank] = -1;
    }
    out[0] = peak + (float)log((double)sum);
    if (ranking->target_ids) {
        for (int rank = 0; rank < kept; rank++) columns[rank] = ranking->target_ids[columns[rank]];
        drawn = drawn < 0 ? drawn : ranking->target_ids[drawn];
    }
    memcpy(out + 1, &drawn, sizeof drawn);
}

int pieces_of(int columns) { return (columns + PIECE_COLUMNS - 1) / PIECE_COLUMNS; }

/* Return the floats of a row of the operation's buffer: the record, then the pieces. */
int32_t paceline_ranking_floats(int32_t columns, int32_t count) {
    return record_floats(count) + pieces_of(columns) * piece_floats(count);
}
