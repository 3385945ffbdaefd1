/* Sample the target's tokens along draft trees, for requests that only use temperature, top-k, top-p and min-p.
 *
 * The reference is sampling/processors.py and sampling/draw.py. Sums and exponentials here differ from theirs in the last bits. If a decision is
 * within that error, the row is UNDECIDED, and the reference samples its path instead. */
#include "block_max.h"
#include "native.h"
#include "noise.h"
#include "threads.h"
#include "vectors.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>

#define UNDECIDED (-1)
#define SLACK 0x1p-15    /* bound on the relative difference of sums here and in the reference */
#define NEAR 0x1p-21f    /* relative difference of logits that may become equal when divided by the temperature */
#define NEAR_WEIGHT 1e-5f
#define NEAR_SCORE 1e-9
#define LIGHT 14.0f      /* weights below e^-LIGHT of the largest are far below SLACK */
#define MAX_PEAK 0x1p20f /* larger scores lose too much precision in score - log noise */

typedef struct {
    const float *row;
    float *block_max, *block_weight, *work; /* of each block the maximum logit and its weight; scratch of `columns` floats */
    int columns, blocks;
    float temperature, peak; /* peak: the largest score; its weight is 1 */
    uint64_t key;
    float min_score;        /* columns with smaller scores have weight 0 */
    float min_weight, refused; /* columns with smaller weight, or with a logit not above `refused`, cannot win */
    double total;           /* of the weights; 0 = not computed yet */
} Row;

INLINE floats load_or(const float *from, int count, float rest) {
    if (count == LANES) return load(from);
    floats v = broadcast(rest);
    memcpy(&v, from, (size_t)count * sizeof(float));
    return v;
}

static int first_at(const float *row, int columns, float target) {
    for (int column = 0; column < columns; column += LANES) {
        const floats logits = load_or(row + column, columns - column < LANES ? columns - column : LANES, -INFINITY);
        if (!__builtin_reduce_or((ints)(logits == broadcast(target)))) continue;
        for (int lane = column;; lane++)
            if (row[lane] == target) return lane;
    }
    return UNDECIDED;
}

static int end_of(const Row *own, int block) {
    const int end = (block + 1) * BLOCK_COLUMNS;
    return end < own->columns ? end : own->columns;
}

INLINE floats logits_at(const Row *own, int column, int end) {
    return load_or(own->row + column, end - column < LANES ? end - column : LANES, -INFINITY);
}

INLINE floats scores_of(const Row *own, floats logits) { return own->temperature == 1.0f ? logits : logits / broadcast(own->temperature); }

INLINE floats weights_of(const Row *own, floats scores) {
    const floats weights = exponential(scores - broadcast(own->peak));
    return (floats)((ints)weights & (ints)(scores >= broadcast(own->min_score)));
}

/* Return the value at `rank` in descending order (quickselect); reorders `values`. */
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
        if (rank <= right)
            high = right;
        else if (rank >= left)
            low = left;
        else
            return values[rank];
    }
    return values[rank];
}

/* Return the smallest score that top-k keeps. The k-th largest block maximum is a lower bound: k logits reach it. */
static float min_score_of_top_k(const Row *own, int top_k) {
    const int size = top_k > own->blocks ? LANES : BLOCK_COLUMNS, maxima = (own->columns + size - 1) / size;
    float bound = -INFINITY;
    if (top_k <= maxima) {
        if (size == LANES)
            find_block_max(own->row, own->columns, size, own->work);
        else
            memcpy(own->work, own->block_max, (size_t)maxima * sizeof(float));
        bound = select_rank(own->work, maxima, top_k - 1);
    }
    int count = 0;
    for (int block = 0; block < own->blocks; block++) {
        if (own->block_max[block] < bound) continue;
        const int end = end_of(own, block);
        for (int column = block * BLOCK_COLUMNS; column < end; column += LANES) {
            if (!__builtin_reduce_or((ints)(logits_at(own, column, end) >= broadcast(bound)))) continue;
            for (int lane = column; lane < column + LANES && lane < end; lane++)
                if (own->row[lane] >= bound) own->work[count++] = own->row[lane];
        }
    }
    const float least = select_rank(own->work, count, top_k - 1) / own->temperature;
    return least > -FLT_MAX ? least : -FLT_MAX;
}

static void weigh_blocks(const Row *own) {
    for (int block = 0; block < own->blocks; block += LANES) {
        const int count = own->blocks - block < LANES ? own->blocks - block : LANES;
        store_part(own->block_weight + block, weights_of(own, scores_of(own, load_or(own->block_max + block, count, -INFINITY))), count);
    }
}

/* Return whether any column of a block has noise of at most `most`. Columns after the row's end are included. */
static int has_low_noise(uint64_t key, int block, uint32_t most) {
    wides state = noise_state(key, block * BLOCK_COLUMNS);
    words low = (words){0} - 1;
    for (int column = 0; column < BLOCK_COLUMNS; column += LANES, state += 8 * NOISE_STEP)
        low = __builtin_elementwise_min(low, noise_of_state(state));
    return __builtin_reduce_or((ints)(low <= (words){0} + most)) != 0;
}

static void compare_block(const Row *own, int block, GumbelMax *search) {
    const int end = end_of(own, block);
    for (int column = block * BLOCK_COLUMNS; column < end; column += LANES) {
        const floats logits = logits_at(own, column, end), scores = scores_of(own, logits), weights = weights_of(own, scores);
        const ints eligible = (ints)(weights >= broadcast(own->min_weight)) & (ints)(logits > broadcast(own->refused));
        compare_16(search, scores, weights, noise_of_state(noise_state(own->key, column)), eligible, column);
    }
}

/* Return the column with the largest score - log E; UNDECIDED if the second is too near. Blocks whose noise is too high to win, which are most, are
 * skipped. `leader`: the column of the largest logit. */
static int winner_of(const Row *own, int leader) {
    const double leader_noise = exponential_variate(noise_of_id(own->key, leader));
    GumbelMax search = {-INFINITY, -INFINITY, limit_of(leader_noise, 1.0f), UNDECIDED};
    for (int block = 0; block < own->blocks; block++) {
        const float most = own->block_weight[block] * search.limit;
        if (most < 0.5f || own->block_weight[block] < own->min_weight || own->block_max[block] <= own->refused) continue;
        if (has_low_noise(own->key, block, most < 0x1p31f ? (uint32_t)most : UINT32_MAX)) compare_block(own, block, &search);
    }
    return search.best - search.second > NEAR_SCORE * (1.0 + fabs(search.best)) ? search.winner : UNDECIDED;
}

/* Return the weight of all blocks whose maximum is below `border`, except those too light to matter. */
static double weight_below(const Row *own, float border) {
    const float dust = own->peak - logf((float)own->columns) - LIGHT;
    double total = 0.0;
    for (int block = 0; block < own->blocks; block++) {
        if (!(own->block_max[block] < border) || own->block_weight[block] == 0.0f || own->block_max[block] / own->temperature < dust) continue;
        const int end = end_of(own, block);
        floats sum = broadcast(0.0f);
        for (int column = block * BLOCK_COLUMNS; column < end; column += LANES)
            sum += weights_of(own, scores_of(own, logits_at(own, column, end)));
        total += (double)lane_sum(sum);
    }
    return total;
}

/* Return whether top-p keeps a column: 1, 0, or UNDECIDED. It depends on the total weight of larger logits. Only blocks that contain such are summed
 * first, which often suffices. */
static int is_kept(Row *own, int column, double top_p) {
    const float logit = own->row[column], near = fmaxf(fabsf(logit) * NEAR, FLT_MIN); /* denormals may become equal too */
    const floats above = broadcast(logit + near), below = broadcast(logit - near);
    double before = 0.0, tied = 0.0, seen = 0.0;
    for (int block = 0; block < own->blocks; block++) {
        if (own->block_max[block] < below[0]) continue;
        const int end = end_of(own, block);
        floats larger = broadcast(0.0f), alike = larger, all = larger;
        for (int at = block * BLOCK_COLUMNS; at < end; at += LANES) {
            const floats logits = logits_at(own, at, end), weights = weights_of(own, scores_of(own, logits));
            const ints is_above = (ints)(logits > above), is_below = (ints)(logits < below);
            all += weights;
            larger += (floats)((ints)weights & is_above);
            alike += (floats)((ints)weights & ~is_above & ~is_below);
        }
        before += (double)lane_sum(larger);
        tied += (double)lane_sum(alike);
        seen += (double)lane_sum(all);
    }
    tied -= (double)weights_of(own, scores_of(own, broadcast(logit)))[0];
    if (before + tied <= 0.0 || before + tied + SLACK * seen < top_p * seen) return 1;
    if (own->total == 0.0) own->total = seen + weight_below(own, below[0]);
    if (before + tied + SLACK * own->total < top_p * own->total) return 1;
    return before - SLACK * own->total > top_p * own->total ? 0 : UNDECIDED;
}

static int draw_from(Row *own, const SampleOptions *options, int leader) {
    if (options->top_k > 0 && options->top_k < own->columns) own->min_score = min_score_of_top_k(own, options->top_k);
    weigh_blocks(own);
    const float min_p = (float)options->min_p;
    own->min_weight = min_p * (1.0f - NEAR_WEIGHT);
    for (;;) {
        const int winner = winner_of(own, leader);
        if (winner == UNDECIDED) return UNDECIDED;
        const float weight = weights_of(own, scores_of(own, broadcast(own->row[winner])))[0];
        if (min_p > 0.0f && fabsf(weight - min_p) <= min_p * NEAR_WEIGHT) return UNDECIDED;
        const int kept = options->top_p < 1.0 ? is_kept(own, winner, options->top_p) : 1;
        if (kept) return kept == 1 ? winner : UNDECIDED;
        own->refused = own->row[winner]; /* and all columns with a logit not larger */
        /* all columns lighter than this have less weight together than top-p drops */
        const float light = (float)((1.0 - options->top_p) * own->total / own->columns * (1.0 - 2e-3));
        if (light > own->min_weight) own->min_weight = light;
    }
}

static int token_of(Row *own, const SampleOptions *options) {
    const float max_logit = max_of(own->block_max, own->blocks);
    if (!(max_logit > -INFINITY && max_logit < INFINITY)) return UNDECIDED;
    int block = 0;
    while (own->block_max[block] != max_logit) block++;
    const int begin = block * BLOCK_COLUMNS, place = first_at(own->row + begin, end_of(own, block) - begin, max_logit);
    if (place == UNDECIDED || own->temperature == 0.0f) return place == UNDECIDED ? UNDECIDED : begin + place;
    own->peak = max_logit / own->temperature;
    return fabsf(own->peak) <= MAX_PEAK ? draw_from(own, options, begin + place) : UNDECIDED;
}

/* Set the block_max of a row. A given one may include columns beyond the vocabulary, so the last block is computed again. */
static void set_block_max(const Row *own, const float *given) {
    const int last = own->blocks - 1;
    if (!given) {
        find_block_max(own->row, own->columns, BLOCK_COLUMNS, own->block_max);
        return;
    }
    memcpy(own->block_max, given, (size_t)last * sizeof(float));
    own->block_max[last] = max_of(own->row + last * BLOCK_COLUMNS, own->columns - last * BLOCK_COLUMNS);
}

/* Sample one path. Return the number of tokens, one more than accepted nodes; 0 if a row is undecided. */
static int sample_path(const SamplePath *one, float *scratch) {
    const SampleOptions *options = one->options;
    const int columns = options->columns, room = (columns + LANES - 1) / LANES * LANES, num_nodes = one->num_nodes;
    const int32_t *tokens = one->tree, *parents = one->tree + num_nodes;
    for (int node = 0, count = 0;; count++) {
        Row own = {.row = one->logits + node * one->stride, .block_max = scratch, .block_weight = scratch + room, .work = scratch + 2 * room,
                   .columns = columns, .blocks = (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS, .temperature = options->temperature,
                   .min_score = -INFINITY, .refused = -INFINITY};
        set_block_max(&own, one->block_max ? one->block_max + node * one->block_max_stride : NULL);
        if (options->temperature > 0.0f) own.key = token_key(one->seed, one->sample_index, one->position + (uint64_t)count);
        const int token = token_of(&own, options);
        if (token == UNDECIDED) return 0;
        one->result[count] = token;
        int child = node + 1;
        while (child < num_nodes && !(parents[child] == node && tokens[child] == token)) child++;
        if (child >= num_nodes) return count + 1;
        one->result[num_nodes + count] = child;
        node = child;
    }
}

typedef struct {
    SamplePath *paths;
    int32_t count;
    atomic_int next;
    float *scratch;
    int64_t scratch_floats;
} Paths;

static void sample_paths(void *argument, int thread, int num_threads) {
    Paths *own = argument;
    float *scratch = own->scratch + thread * own->scratch_floats;
    (void)num_threads;
    for (int index; (index = atomic_fetch_add(&own->next, 1)) < own->count;) {
        SamplePath *one = own->paths + index;
        one->num_tokens = sample_path(one, scratch);
    }
}

static void nothing_shared(void *argument) { (void)argument; }

/* Sample several paths, divided among threads. Each thread has `scratch_floats` of scratch: three times the columns, rounded up to 16. */
void paceline_sample_paths(SamplePath *paths, int32_t count, int32_t num_threads, float *scratch, int64_t scratch_floats) {
    Paths own = {.paths = paths, .count = count, .scratch = scratch, .scratch_floats = scratch_floats};
    atomic_init(&own.next, 0);
    if (num_threads > 1)
        run_on_threads(nothing_shared, sample_paths, &own, num_threads);
    else
        sample_paths(&own, 0, 1);
}
