/* What drafting needs of a row of logits, found while the row is in the cache: its top tokens, log(sum(exp)), and the token that noise draws.
 *
 * A row is looked at in pieces of fixed size, each of which leaves a Piece; `join_pieces` makes the record of them. So nothing depends on
 * the number of threads, and every sum has one order. */
#include "native.h"
#include "noise.h"
#include "vectors.h"

#include <math.h>

#define STRIDE 256 /* columns whose largest score is remembered */
#define INT_MOST 0x7fffffff

typedef struct {
    float peak, sum; /* sum of exp(score - peak) */
    double gumbel_score; /* the largest score - log E; -inf where nothing was drawn */
    int32_t drawn, num_best;
} Piece;

static float lane_most(floats v) {
    float most = v[0];
    for (int lane = 1; lane < LANES; lane++) most = v[lane] > most ? v[lane] : most;
    return most;
}

static const ints lane_numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* The first of STRIDE scores that equals `wanted`, and the largest of the others. */
static int take_first(float *scores, float wanted, float *most_left) {
    ints first = lane_numbers - lane_numbers + INT_MOST;
    for (int column = 0; column < STRIDE; column += LANES) {
        const ints equal = load(scores + column) == broadcast(wanted), number = lane_numbers + column;
        first = __builtin_elementwise_min(first, (number & equal) | (INT_MOST & ~equal));
    }
    int found = first[0];
    for (int lane = 1; lane < LANES; lane++) found = first[lane] < found ? first[lane] : found;
    scores[found] = -INFINITY;
    floats most = broadcast(-INFINITY);
    for (int column = 0; column < STRIDE; column += LANES) most = __builtin_elementwise_max(most, load(scores + column));
    *most_left = lane_most(most);
    return found;
}

/* 32 random bits for each of 16 ids: of those from `column` on, an even number, or of `ids`. */
INLINE words noise(uint64_t key, const int32_t *ids, int column) {
    if (!ids) return noise_of_state(noise_state(key, column));
    words bits;
    for (int half = 0; half < LANES; half += 8) {
        wides id;
        for (int lane = 0; lane < 8; lane++) id[lane] = (uint64_t)(uint32_t)ids[column + half + lane];
        const wides mixed = mix_8((id >> 1) * NOISE_STEP + key) >> ((id & 1) << 5);
        for (int lane = 0; lane < 8; lane++) bits[half + lane] = (uint32_t)mixed[lane];
    }
    return bits;
}

/* The `wanted` largest of the scores, largest first, the first one on ties; none at -inf. `scores` is changed. */
static int top_n(float *scores, float *stride_max, int strides, int begin, int wanted, float *values, int32_t *columns) {
    for (int rank = 0; rank < wanted; rank++) {
        int stride = 0;
        for (int other = 1; other < strides; other++)
            if (stride_max[other] > stride_max[stride]) stride = other;
        if (!(stride_max[stride] > -INFINITY)) return rank;
        values[rank] = stride_max[stride];
        const int place = take_first(scores + stride * STRIDE, stride_max[stride], stride_max + stride);
        columns[rank] = begin + stride * STRIDE + place;
    }
    return wanted;
}

static int floats_of_piece(int wanted) { return (int)(sizeof(Piece) / sizeof(float)) + 2 * wanted; }

static int floats_of_record(int wanted) { return 2 + 2 * wanted; }

static float *piece_at(float *out, int wanted, int piece) { return out + floats_of_record(wanted) + piece * floats_of_piece(wanted); }

/* A part of a row: what `join_pieces` needs of columns [PIECE_COLUMNS * number, ...). */
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
        stride_max[stride] = lane_most(most);
        piece.peak = stride_max[stride] > piece.peak ? stride_max[stride] : piece.peak;
    }
    const floats shift = broadcast(piece.peak > -INFINITY ? piece.peak : 0.0f);
    floats sum = broadcast(0.0f);
    Candidates candidates = {-INFINITY, -INFINITY, INFINITY, -1};
    for (int column = 0; column < strides * STRIDE; column += LANES) {
        const floats score = load(scores + column), weight = exponential(score - shift);
        sum += weight;
        if (draws && column < count)
            compare_16(&candidates, score, weight, noise(draw->key, ranking->target_ids, begin + column), lane_numbers >= 0, begin + column);
    }
    piece.sum = lane_sum(sum);
    piece.gumbel_score = candidates.best;
    piece.drawn = candidates.winner;
    float *at = piece_at(out, ranking->count, number), *values = at + sizeof(Piece) / sizeof(float);
    piece.num_best = top_n(scores, stride_max, strides, begin, ranking->count, values, (int32_t *)(values + ranking->count));
    memcpy(at, &piece, sizeof piece);
}

/* Put a score where it belongs among `kept` of at most `wanted`; behind equal ones. */
static int insert(float value, int32_t column, float *values, int32_t *columns, int kept, int wanted) {
    int place = kept;
    while (place > 0 && value > values[place - 1]) place--;
    if (place == wanted) return kept;
    const int moved = (kept < wanted ? kept : wanted - 1) - place;
    memmove(values + place + 1, values + place, (size_t)moved * sizeof(float));
    memmove(columns + place + 1, columns + place, (size_t)moved * sizeof(int32_t));
    values[place] = value;
    columns[place] = column;
    return kept < wanted ? kept + 1 : kept;
}

/* The record of a row: log(sum(exp)), not finite where the row is none; the token drawn, -1 where none is; `count` scores and their ids,
 * -inf and -1 behind the last one. */
void join_pieces(const RankOperation *ranking, float *out) {
    const int wanted = ranking->count, pieces = pieces_of(ranking->columns);
    float *values = out + 2;
    int32_t *columns = (int32_t *)(values + wanted), drawn = -1;
    float peak = -INFINITY, sum = 0.0f;
    double furthest = -INFINITY;
    int kept = 0;
    Piece piece;
    for (int number = 0; number < pieces; number++) {
        const float *at = piece_at(out, wanted, number), *others = at + sizeof piece / sizeof(float);
        memcpy(&piece, at, sizeof piece);
        peak = piece.peak > peak ? piece.peak : peak;
        for (int rank = 0; rank < piece.num_best; rank++)
            kept = insert(others[rank], ((const int32_t *)(others + wanted))[rank], values, columns, kept, wanted);
        if (piece.gumbel_score > furthest) {
            furthest = piece.gumbel_score;
            drawn = piece.drawn;
        }
    }
    for (int number = 0; number < pieces; number++) {
        memcpy(&piece, piece_at(out, wanted, number), sizeof piece);
        const floats share = exponential(broadcast(piece.peak > -INFINITY ? piece.peak - peak : -INFINITY));
        sum += piece.sum * share[0];
    }
    for (int rank = kept; rank < wanted; rank++) {
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

/* Floats of a row of the operation's buffer: the record, and behind it the pieces. */
int32_t paceline_ranking_floats(int32_t columns, int32_t count) {
    return floats_of_record(count) + pieces_of(columns) * floats_of_piece(count);
}
