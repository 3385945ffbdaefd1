/* Sample the target's tokens along draft trees, for requests that only use temperature, top-k, top-p and min-p.
 *
 * The reference implementation is sampling/processors.py and sampling/draw.py. Sums and exponentials here differ from it in the last bits. If the
 * outcome of a comparison depends on them, the row is UNDECIDED, and the reference samples the whole path. */
#include "block_max.h"
#include "native.h"
#include "noise.h"
#include "threads.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>

#define UNDECIDED (-1)
#define MAX_SUM_ERROR 0x1p-15    /* maximum relative difference between sums here and in the reference */
#define MAX_LOGIT_ERROR 0x1p-21f /* logits closer than this (relative) may be equal after division by the temperature */
#define MAX_WEIGHT_ERROR 1e-5f   /* weights closer than this (relative) may be in another order in the reference */
#define MAX_SCORE_ERROR 1e-9     /* scores plus noise closer than this (relative) may be in another order in the reference */
#define NEGLIGIBLE_LOG 14.0f     /* a total weight below e^-NEGLIGIBLE_LOG times the largest weight changes sums far less than MAX_SUM_ERROR */
#define MAX_SCORE 0x1p20f        /* with larger scores, score - log E is too imprecise */

/* A row of logits to sample from. A score is logit / temperature; a weight is exp(score - peak). */
typedef struct {
    const float *logits;
    float *block_max, *block_weight, *scratch; /* [blocks] maximum logit, and its weight; [columns] scratch memory */
    int columns, blocks;
    float temperature, peak; /* peak: the largest score */
    uint64_t key;
    float min_score;                  /* top-k: columns with smaller scores have weight 0 */
    float min_weight, rejected_logit; /* columns with smaller weights, or with logits up to rejected_logit, are not sampled */
    double total;                     /* sum of all weights; 0 = not computed yet */
} LogitsRow;

static int first_column_equal_to(const float *row, int columns, float target) {
    for (int column = 0; column < columns; column += LANES) {
        const floats logits = load_padded(row + column, columns - column < LANES ? columns - column : LANES, -INFINITY);
        if (!__builtin_reduce_or((ints)(logits == broadcast(target)))) continue;
        for (int lane = column;; lane++)
            if (row[lane] == target) return lane;
    }
    return UNDECIDED;
}

static int block_end(const LogitsRow *row, int block) {
    const int end = (block + 1) * BLOCK_COLUMNS;
    return end < row->columns ? end : row->columns;
}

INLINE floats logits_at(const LogitsRow *row, int column, int end) {
    return load_padded(row->logits + column, end - column < LANES ? end - column : LANES, -INFINITY);
}

INLINE floats logits_to_scores(const LogitsRow *row, floats logits) { return row->temperature == 1.0f ? logits : logits / broadcast(row->temperature); }

INLINE floats scores_to_weights(const LogitsRow *row, floats scores) {
    const floats weights = exponential(scores - broadcast(row->peak));
    return (floats)((ints)weights & (ints)(scores >= broadcast(row->min_score)));
}

/* Return the value at index `rank` of the values in descending order (quickselect). Reorders `values`. */
static float select_rank(float *values, int count, int rank) {
    int low = 0, high = count - 1;
    while (low < high) {
        const float pivot = values[low + (high - low) / 2];
        int left = low, right = high;
        while (left <= right) {
            while (values[left] > pivot) left++;
            while (values[right] < pivot) right--;
            if (left > right) break;
            const float moved = values[left];
            values[left++] = values[right];
            values[right--] = moved;
        }
        if (rank <= right) high = right;
        else if (rank >= left) low = left;
        else return values[rank];
    }
    return values[rank];
}

/* Return the smallest score that top-k keeps. At least k logits are as large as the k-th largest block maximum, so smaller logits need no sorting. */
static float min_score_of_top_k(const LogitsRow *row, int top_k) {
    const int size = top_k > row->blocks ? LANES : BLOCK_COLUMNS, maxima = (row->columns + size - 1) / size;
    float bound = -INFINITY;
    if (top_k <= maxima) {
        if (size == LANES) find_block_max(row->logits, row->columns, size, row->scratch);
        else memcpy(row->scratch, row->block_max, (size_t)maxima * sizeof(float));
        bound = select_rank(row->scratch, maxima, top_k - 1);
    }
    int count = 0;
    for (int block = 0; block < row->blocks; block++) {
        if (row->block_max[block] < bound) continue;
        const int end = block_end(row, block);
        for (int column = block * BLOCK_COLUMNS; column < end; column += LANES) {
            if (!__builtin_reduce_or((ints)(logits_at(row, column, end) >= broadcast(bound)))) continue;
            for (int lane = column; lane < column + LANES && lane < end; lane++)
                if (row->logits[lane] >= bound) row->scratch[count++] = row->logits[lane];
        }
    }
    const float least = select_rank(row->scratch, count, top_k - 1) / row->temperature;
    return least > -FLT_MAX ? least : -FLT_MAX;
}

static void compute_block_weights(const LogitsRow *row) {
    for (int block = 0; block < row->blocks; block += LANES) {
        const int count = row->blocks - block < LANES ? row->blocks - block : LANES;
        store_part(row->block_weight + block, scores_to_weights(row, logits_to_scores(row, load_padded(row->block_max + block, count, -INFINITY))), count);
    }
}

/* Return whether any column of a block has noise of at most max_noise. Columns past the end of the row count too: it may be a false 1. */
static int has_low_noise(uint64_t key, int block, uint32_t max_noise) {
    long_words state = noise_state(key, block * BLOCK_COLUMNS);
    words low = (words){0} - 1;
    for (int column = 0; column < BLOCK_COLUMNS; column += LANES, state += 8 * NOISE_STEP)
        low = __builtin_elementwise_min(low, noise_of_state(state));
    return __builtin_reduce_or((ints)(low <= (words){0} + max_noise)) != 0;
}

static void search_block(const LogitsRow *row, int block, GumbelMax *search) {
    const int end = block_end(row, block);
    for (int column = block * BLOCK_COLUMNS; column < end; column += LANES) {
        const floats logits = logits_at(row, column, end), scores = logits_to_scores(row, logits), weights = scores_to_weights(row, scores);
        const ints eligible = (ints)(weights >= broadcast(row->min_weight)) & (ints)(logits > broadcast(row->rejected_logit));
        update_gumbel_max(search, scores, weights, noise_of_state(noise_state(row->key, column)), eligible, column);
    }
}

/* Return the column with the largest score - log E; UNDECIDED if the second largest is too close. Most blocks are skipped, because none of their
 * columns has noise low enough. top_column: the column of the largest logit. */
static int gumbel_argmax(const LogitsRow *row, int top_column) {
    const double top_noise = exponential_variate(noise_of_id(row->key, top_column));
    GumbelMax search = {-INFINITY, -INFINITY, noise_ratio_limit(top_noise, 1.0f), UNDECIDED};
    for (int block = 0; block < row->blocks; block++) {
        const float max_noise = row->block_weight[block] * search.max_ratio;
        if (max_noise < 0.5f || row->block_weight[block] < row->min_weight || row->block_max[block] <= row->rejected_logit) continue;
        if (has_low_noise(row->key, block, max_noise < 0x1p31f ? (uint32_t)max_noise : UINT32_MAX)) search_block(row, block, &search);
    }
    return search.max_score - search.second_score > MAX_SCORE_ERROR * (1.0 + fabs(search.max_score)) ? search.argmax : UNDECIDED;
}

/* Return the total weight of the blocks whose maximum logit is below max_logit, without blocks of negligible weight. */
static double total_weight_below(const LogitsRow *row, float max_logit) {
    const float min_block_score = row->peak - logf((float)row->columns) - NEGLIGIBLE_LOG;
    double total = 0.0;
    for (int block = 0; block < row->blocks; block++) {
        if (!(row->block_max[block] < max_logit) || row->block_weight[block] == 0.0f || row->block_max[block] / row->temperature < min_block_score) continue;
        const int end = block_end(row, block);
        floats sum = broadcast(0.0f);
        for (int column = block * BLOCK_COLUMNS; column < end; column += LANES)
            sum += scores_to_weights(row, logits_to_scores(row, logits_at(row, column, end)));
        total += (double)lane_sum(sum);
    }
    return total;
}

/* Return whether top-p keeps a column: 1, 0, or UNDECIDED. It is kept if the columns with larger logits together have less than top_p of the
 * total weight. Blocks that may contain such columns are summed first, because they alone often decide. */
static int is_kept_by_top_p(LogitsRow *row, int column, double top_p) {
    const float logit = row->logits[column], error = fmaxf(fabsf(logit) * MAX_LOGIT_ERROR, FLT_MIN); /* FLT_MIN: quotients may be denormal */
    const floats above = broadcast(logit + error), below = broadcast(logit - error);
    double before = 0.0, tied = 0.0, summed = 0.0;
    for (int block = 0; block < row->blocks; block++) {
        if (row->block_max[block] < below[0]) continue;
        const int end = block_end(row, block);
        floats larger = broadcast(0.0f), equal = larger, all = larger;
        for (int at = block * BLOCK_COLUMNS; at < end; at += LANES) {
            const floats logits = logits_at(row, at, end), weights = scores_to_weights(row, logits_to_scores(row, logits));
            const ints is_above = (ints)(logits > above), is_below = (ints)(logits < below);
            all += weights;
            larger += (floats)((ints)weights & is_above);
            equal += (floats)((ints)weights & ~is_above & ~is_below);
        }
        before += (double)lane_sum(larger);
        tied += (double)lane_sum(equal);
        summed += (double)lane_sum(all);
    }
    tied -= (double)scores_to_weights(row, logits_to_scores(row, broadcast(logit)))[0];
    if (before + tied <= 0.0 || before + tied + MAX_SUM_ERROR * summed < top_p * summed) return 1;
    if (row->total == 0.0) row->total = summed + total_weight_below(row, below[0]);
    if (before + tied + MAX_SUM_ERROR * row->total < top_p * row->total) return 1;
    return before - MAX_SUM_ERROR * row->total > top_p * row->total ? 0 : UNDECIDED;
}

static int sample_by_temperature(LogitsRow *row, const SampleOptions *options, int top_column) {
    if (options->top_k > 0 && options->top_k < row->columns) row->min_score = min_score_of_top_k(row, options->top_k);
    compute_block_weights(row);
    const float min_p = (float)options->min_p;
    row->min_weight = min_p * (1.0f - MAX_WEIGHT_ERROR);
    for (;;) {
        const int argmax = gumbel_argmax(row, top_column);
        if (argmax == UNDECIDED) return UNDECIDED;
        const float weight = scores_to_weights(row, logits_to_scores(row, broadcast(row->logits[argmax])))[0];
        if (min_p > 0.0f && fabsf(weight - min_p) <= min_p * MAX_WEIGHT_ERROR) return UNDECIDED;
        const int kept = options->top_p < 1.0 ? is_kept_by_top_p(row, argmax, options->top_p) : 1;
        if (kept) return kept == 1 ? argmax : UNDECIDED;
        row->rejected_logit = row->logits[argmax]; /* top-p also rejects all columns with smaller logits */
        /* columns with less weight than this are rejected by top-p: together they weigh less than the part that top-p excludes */
        const float min_weight = (float)((1.0 - options->top_p) * row->total / row->columns * (1.0 - 2e-3));
        if (min_weight > row->min_weight) row->min_weight = min_weight;
    }
}

static int sample_token(LogitsRow *row, const SampleOptions *options) {
    const float max_logit = max_or_nan(row->block_max, row->blocks);
    if (!(max_logit > -INFINITY && max_logit < INFINITY)) return UNDECIDED;
    int block = 0;
    while (row->block_max[block] != max_logit) block++;
    const int begin = block * BLOCK_COLUMNS, place = first_column_equal_to(row->logits + begin, block_end(row, block) - begin, max_logit);
    if (place == UNDECIDED || row->temperature == 0.0f) return place == UNDECIDED ? UNDECIDED : begin + place;
    row->peak = max_logit / row->temperature;
    return fabsf(row->peak) <= MAX_SCORE ? sample_by_temperature(row, options, begin + place) : UNDECIDED;
}

/* Set the block maxima of a row. Maxima computed with the logits may include columns beyond the vocabulary, so the last block is computed again. */
static void set_block_max(const LogitsRow *row, const float *computed) {
    const int last = row->blocks - 1;
    if (!computed) {
        find_block_max(row->logits, row->columns, BLOCK_COLUMNS, row->block_max);
        return;
    }
    memcpy(row->block_max, computed, (size_t)last * sizeof(float));
    row->block_max[last] = max_or_nan(row->logits + last * BLOCK_COLUMNS, row->columns - last * BLOCK_COLUMNS);
}

/* Sample tokens from the root on while a child holds the sampled token. Return their number; 0 if a row is undecided. */
static int sample_path(const SamplePath *path, float *scratch) {
    const SampleOptions *options = path->options;
    const int columns = options->columns, padded = (columns + LANES - 1) / LANES * LANES, num_nodes = path->num_nodes;
    const int32_t *tokens = path->tree, *parents = path->tree + num_nodes;
    for (int node = 0, count = 0;; count++) {
        LogitsRow row = {.logits = path->logits + node * path->logits_stride, .block_max = scratch, .block_weight = scratch + padded,
                         .scratch = scratch + 2 * padded, .columns = columns, .blocks = (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS,
                         .temperature = options->temperature, .min_score = -INFINITY, .rejected_logit = -INFINITY};
        set_block_max(&row, path->block_max ? path->block_max + node * path->block_max_stride : NULL);
        if (options->temperature > 0.0f) row.key = token_noise_key(path->seed, path->sample_index, path->position + (uint64_t)count);
        const int token = sample_token(&row, options);
        if (token == UNDECIDED) return 0;
        path->result[count] = token;
        int child = node + 1;
        while (child < num_nodes && !(parents[child] == node && tokens[child] == token)) child++;
        if (child >= num_nodes) return count + 1;
        path->result[num_nodes + count] = child;
        node = child;
    }
}

typedef struct {
    SamplePath *paths;
    int32_t count;
    atomic_int next;
    float *scratch;
    int64_t scratch_floats;
} SamplePathsCall;

static void sample_paths(void *argument, int thread, int num_threads) {
    SamplePathsCall *call = argument;
    float *scratch = call->scratch + thread * call->scratch_floats;
    (void)num_threads;
    for (int index; (index = atomic_fetch_add(&call->next, 1)) < call->count;) {
        SamplePath *path = call->paths + index;
        path->num_tokens = sample_path(path, scratch);
    }
}

/* Sample paths, divided among threads. scratch: scratch_floats = 3 * (vocabulary size rounded up to a multiple of 16) floats per thread. */
void paceline_sample_paths(SamplePath *paths, int32_t count, int32_t num_threads, float *scratch, int64_t scratch_floats) {
    SamplePathsCall call = {.paths = paths, .count = count, .scratch = scratch, .scratch_floats = scratch_floats};
    atomic_init(&call.next, 0);
    if (num_threads > 1) run_on_threads(NULL, sample_paths, &call, num_threads);
    else sample_paths(&call, 0, 1);
}
