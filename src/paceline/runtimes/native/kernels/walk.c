/* The walk of speculation/verify.py for requests whose rows only temperature, top-k, top-p and min-p change: which tokens the target draws
 * along a tree. What sampling/processors.py and sampling/draw.py do is the definition. Sums and exponentials here differ from theirs in the
 * last places, so whatever comes too near to a border is left to them: a walk ends in front of a row that it cannot decide. */
#include "native.h"
#include "peaks.h"
#include "threads.h"
#include "vectors.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>

#define UNDECIDED (-1)
#define FEW_COLUMNS 64   /* of a block where top-k keeps more than there are blocks of PEAK_COLUMNS */
#define SLACK 0x1p-15    /* of the total weight: how far sums here and there may be apart, with room */
#define NEAR 0x1p-21f    /* of a logit: divided by the temperature two such may be equal */
#define NEAR_WEIGHT 1e-5f
#define NEAR_RACE 1e-9
#define LIGHT 14.0f      /* e^-LIGHT of the best weight is far below SLACK */
#define MOST_PEAK 0x1p20f /* beyond it differences of score and log noise lose too much */

typedef uint64_t wides __attribute__((vector_size(64)));

typedef struct {
    const float *row;
    float *peaks, *heaviest, *work; /* of each block of PEAK_COLUMNS the largest logit and its weight; room for as many floats as columns */
    int columns, blocks;
    float temperature, peak; /* peak: the largest score, which weighs 1 */
    uint64_t key;
    float least_score;    /* columns with smaller scores weigh nothing */
    float least, refused; /* columns that weigh less, or whose logits are no larger, are in no race */
    double total;         /* of the weights; 0 = not known yet */
} Row;

typedef struct {
    double best, second;
    float limit; /* of noise / weight: what is above it cannot win, nor come near to what does */
    int winner;
} Race;

INLINE floats load_or(const float *from, int count, float rest) {
    if (count == LANES) return load(from);
    floats v = broadcast(rest);
    memcpy(&v, from, (size_t)count * sizeof(float));
    return v;
}

INLINE uint64_t mix_one(uint64_t state) { /* sampling/noise.py */
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
    return state ^ (state >> 31);
}

static const uint64_t gamma_step = 0x9E3779B97F4A7C15u;

static uint64_t key_of(uint64_t seed, uint64_t sample_index, uint64_t position) {
    const uint64_t state = mix_one(mix_one(seed + gamma_step) ^ (sample_index << 8)); /* the purpose of a token's draw is 0 */
    return mix_one((state ^ position) + gamma_step);
}

INLINE words mixed_16(wides state) {
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
    state = state ^ (state >> 31);
    words bits;
    memcpy(&bits, &state, sizeof bits);
    return bits;
}

INLINE words noise_of_16(uint64_t key, int column) {
    return mixed_16(((wides){0, 1, 2, 3, 4, 5, 6, 7} + (uint64_t)(column / 2)) * gamma_step + key);
}

static double exponential_at(uint64_t key, int column) {
    const uint64_t mixed = mix_one((uint64_t)(column / 2) * gamma_step + key);
    const uint32_t bits = (uint32_t)(mixed >> (column % 2 * 32));
    return -log1p(-(((double)bits + 0.5) * 0x1p-32));
}

static int first_at(const float *row, int columns, float wanted) {
    for (int column = 0; column < columns; column += LANES) {
        const floats logits = load_or(row + column, columns - column < LANES ? columns - column : LANES, -INFINITY);
        if (!__builtin_reduce_or((ints)(logits == broadcast(wanted)))) continue;
        for (int lane = column;; lane++)
            if (row[lane] == wanted) return lane;
    }
    return UNDECIDED;
}

static int end_of(const Row *own, int block) {
    const int end = (block + 1) * PEAK_COLUMNS;
    return end < own->columns ? end : own->columns;
}

INLINE floats logits_at(const Row *own, int column, int end) {
    return load_or(own->row + column, end - column < LANES ? end - column : LANES, -INFINITY);
}

INLINE floats scores_of(const Row *own, floats logits) { return own->temperature == 1.0f ? logits : logits / broadcast(own->temperature); }

INLINE floats weights_of(const Row *own, floats scores) {
    const floats weights = exponential(scores - broadcast(own->peak));
    return (floats)((ints)weights & (ints)(scores >= broadcast(own->least_score)));
}

/* The value that would stand at `rank` if the largest stood first; `values` is put in another order. */
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

/* The least score that top-k keeps. The k-th largest of the blocks' largest logits bounds it from below: k logits reach that. */
static float least_of_best(const Row *own, int top_k) {
    const int is_few = top_k > own->blocks, blocks = is_few ? (own->columns + FEW_COLUMNS - 1) / FEW_COLUMNS : own->blocks;
    if (is_few)
        find_peaks(own->row, own->columns, FEW_COLUMNS, own->work);
    else
        memcpy(own->work, own->peaks, (size_t)blocks * sizeof(float));
    const float bound = select_rank(own->work, blocks, top_k - 1);
    int count = 0;
    for (int block = 0; block < own->blocks; block++) {
        if (own->peaks[block] < bound) continue;
        const int end = end_of(own, block);
        for (int column = block * PEAK_COLUMNS; column < end; column += LANES) {
            if (!__builtin_reduce_or((ints)(logits_at(own, column, end) >= broadcast(bound)))) continue;
            for (int lane = column; lane < column + LANES && lane < end; lane++)
                if (own->row[lane] >= bound) own->work[count++] = own->row[lane];
        }
    }
    const float least = select_rank(own->work, count, top_k - 1) / own->temperature;
    return least > -3.40282347e38f ? least : -3.40282347e38f;
}

static void weigh_blocks(const Row *own) {
    for (int block = 0; block < own->blocks; block += LANES) {
        const int count = own->blocks - block < LANES ? own->blocks - block : LANES;
        store_part(own->heaviest + block, weights_of(own, scores_of(own, load_or(own->peaks + block, count, -INFINITY))), count);
    }
}

/* Whether any of the columns of a block has so little noise. Of columns behind the row there is noise too. */
static int has_low_noise(uint64_t key, int block, uint32_t most) {
    wides state = ((wides){0, 1, 2, 3, 4, 5, 6, 7} + (uint64_t)(block * (PEAK_COLUMNS / 2))) * gamma_step + key;
    words low = (words){0} - 1;
    for (int column = 0; column < PEAK_COLUMNS; column += LANES, state += 8 * gamma_step)
        low = __builtin_elementwise_min(low, mixed_16(state));
    return __builtin_reduce_or((ints)(low <= (words){0} + most)) != 0;
}

/* E / weight, times 2^32, and a little more: who is behind it is no rival of this column. */
static float limit_of(double noise, float weight) { return (float)(noise * 0x1p32 * 1.001) / weight; }

/* Let the columns of a block take part. noise / weight bounds E / weight from below. */
static void race_in(const Row *own, int block, Race *race) {
    const int end = end_of(own, block);
    for (int column = block * PEAK_COLUMNS; column < end; column += LANES) {
        const floats logits = logits_at(own, column, end), scores = scores_of(own, logits), weights = weights_of(own, scores);
        const floats noise = __builtin_convertvector(noise_of_16(own->key, column), floats) + broadcast(0.5f);
        const ints races = (ints)(noise <= weights * broadcast(race->limit)) & (ints)(weights > broadcast(0.0f)) &
                           (ints)(weights >= broadcast(own->least)) & (ints)(logits > broadcast(own->refused));
        if (!__builtin_reduce_or(races)) continue;
        for (int lane = 0; lane < LANES; lane++) {
            if (!races[lane]) continue;
            const double drawn = exponential_at(own->key, column + lane), value = (double)scores[lane] - log(drawn);
            const float limit = limit_of(drawn, weights[lane]);
            if (limit < race->limit) race->limit = limit;
            if (value > race->best) {
                race->second = race->best;
                race->best = value;
                race->winner = column + lane;
            } else if (value > race->second)
                race->second = value;
        }
    }
}

/* The column with the largest score - log E; UNDECIDED where the next one is too near. Noise of whole blocks is looked at alone first: few
 * have so little that one of theirs can win. `leader`: the column of the largest logit. */
static int winner_of(const Row *own, int leader) {
    Race race = {-INFINITY, -INFINITY, limit_of(exponential_at(own->key, leader), 1.0f), UNDECIDED};
    for (int block = 0; block < own->blocks; block++) {
        const float most = own->heaviest[block] * race.limit;
        if (most < 0.5f || own->heaviest[block] < own->least || own->peaks[block] <= own->refused) continue;
        if (has_low_noise(own->key, block, most < 0x1p31f ? (uint32_t)most : UINT32_MAX)) race_in(own, block, &race);
    }
    return race.best - race.second > NEAR_RACE * (1.0 + fabs(race.best)) ? race.winner : UNDECIDED;
}

/* The weight of all blocks whose largest logits are below a border, but for those that are too light to matter. */
static double weight_below(const Row *own, float border) {
    const float dust = own->peak - logf((float)own->columns) - LIGHT;
    double total = 0.0;
    for (int block = 0; block < own->blocks; block++) {
        if (!(own->peaks[block] < border) || own->heaviest[block] == 0.0f || own->peaks[block] / own->temperature < dust) continue;
        const int end = end_of(own, block);
        floats sum = broadcast(0.0f);
        for (int column = block * PEAK_COLUMNS; column < end; column += LANES)
            sum += weights_of(own, scores_of(own, logits_at(own, column, end)));
        total += (double)lane_sum(sum);
    }
    return total;
}

/* Whether top-p keeps a column: 1, 0, or UNDECIDED. The weight before it counts, that of larger logits. The blocks that hold such are summed
 * first; they often say enough. */
static int is_kept(Row *own, int column, double top_p) {
    const float logit = own->row[column], near = fmaxf(fabsf(logit) * NEAR, FLT_MIN); /* denormals become equal too */
    const floats above = broadcast(logit + near), below = broadcast(logit - near);
    double before = 0.0, tied = 0.0, seen = 0.0;
    for (int block = 0; block < own->blocks; block++) {
        if (own->peaks[block] < below[0]) continue;
        const int end = end_of(own, block);
        floats larger = broadcast(0.0f), alike = larger, all = larger;
        for (int at = block * PEAK_COLUMNS; at < end; at += LANES) {
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

static int draw_from(Row *own, const WalkOptions *options, int leader) {
    if (options->top_k > 0 && options->top_k < own->columns) {
        if (options->top_k > (own->columns + FEW_COLUMNS - 1) / FEW_COLUMNS) return UNDECIDED;
        own->least_score = least_of_best(own, options->top_k);
    }
    weigh_blocks(own);
    const float min_p = (float)options->min_p;
    own->least = min_p * (1.0f - NEAR_WEIGHT);
    for (;;) {
        const int winner = winner_of(own, leader);
        if (winner == UNDECIDED) return UNDECIDED;
        const float weight = weights_of(own, scores_of(own, broadcast(own->row[winner])))[0];
        if (min_p > 0.0f && fabsf(weight - min_p) <= min_p * NEAR_WEIGHT) return UNDECIDED;
        const int kept = options->top_p < 1.0 ? is_kept(own, winner, options->top_p) : 1;
        if (kept) return kept == 1 ? winner : UNDECIDED;
        own->refused = own->row[winner]; /* and with it all that is no larger */
        /* all columns lighter than this together weigh less than what top-p leaves out */
        const float light = (float)((1.0 - options->top_p) * own->total / own->columns * (1.0 - 2e-3));
        if (light > own->least) own->least = light;
    }
}

/* The first of the largest logits of a row. */
static int largest_at(const float *row, int columns) {
    const float peak = peak_of(row, columns);
    return peak > -INFINITY && peak < INFINITY ? first_at(row, columns, peak) : UNDECIDED;
}

static int token_of(Row *own, const WalkOptions *options) {
    const float peak = peak_of(own->peaks, own->blocks);
    if (!(peak > -INFINITY && peak < INFINITY)) return UNDECIDED;
    int block = 0;
    while (own->peaks[block] != peak) block++;
    const int begin = block * PEAK_COLUMNS, place = first_at(own->row + begin, end_of(own, block) - begin, peak);
    if (place == UNDECIDED || own->temperature == 0.0f) return place == UNDECIDED ? UNDECIDED : begin + place;
    own->peak = peak / own->temperature;
    return fabsf(own->peak) <= MOST_PEAK ? draw_from(own, options, begin + place) : UNDECIDED;
}

/* The peaks of a row; given ones may be of more columns than count, so the last block's is looked for again. */
static void take_peaks(const Row *own, const float *given) {
    const int last = own->blocks - 1;
    if (!given) {
        find_peaks(own->row, own->columns, PEAK_COLUMNS, own->peaks);
        return;
    }
    memcpy(own->peaks, given, (size_t)last * sizeof(float));
    own->peaks[last] = peak_of(own->row + last * PEAK_COLUMNS, own->columns - last * PEAK_COLUMNS);
}

static int32_t walk(const WalkRecord *one, float *scratch) {
    const WalkOptions *options = one->options;
    const int columns = options->columns, room = (columns + LANES - 1) / LANES * LANES, num_nodes = one->num_nodes;
    const int32_t *tokens = one->tree, *parents = one->tree + num_nodes;
    for (int node = 0, count = 0;; count++) {
        Row own = {.row = one->logits + node * one->stride, .peaks = scratch, .heaviest = scratch + room, .work = scratch + 2 * room,
                   .columns = columns, .blocks = (columns + PEAK_COLUMNS - 1) / PEAK_COLUMNS, .temperature = options->temperature,
                   .least_score = -INFINITY, .refused = -INFINITY};
        const float *given = one->peaks ? one->peaks + node * one->peaks_stride : NULL;
        const int is_read_once = !given && options->temperature == 0.0f;
        if (!is_read_once) take_peaks(&own, given);
        if (options->temperature > 0.0f) own.key = key_of(options->seed, options->sample_index, one->position + (uint64_t)count);
        const int token = is_read_once ? largest_at(own.row, columns) : token_of(&own, options);
        if (token == UNDECIDED) return -1 - count;
        one->found[count] = token;
        int child = node + 1;
        while (child < num_nodes && !(parents[child] == node && tokens[child] == token)) child++;
        if (child >= num_nodes) return count + 1;
        one->found[num_nodes + count] = child;
        node = child;
    }
}

/* Tokens drawn along a tree, and the nodes that hold them, both to `found`: [2, num_nodes].
 *
 * logits: [num_nodes, columns], rows `stride` floats apart; tree: [2, num_nodes], tokens, then parents; scratch: three times the columns
 * rounded up to 16. Returns how many tokens were drawn: the walk ended behind the last one. Less than 0: it ended in front of a row that
 * could not be decided, after -1 - result tokens, all of which a node holds. */
int32_t paceline_walk(
    const float *logits, int64_t stride, const WalkOptions *options, const int32_t *tree, int32_t num_nodes, uint64_t position,
    float *scratch, int32_t *found) {
    const WalkRecord one = {.logits = logits, .stride = stride, .options = options, .tree = tree, .position = position, .found = found,
                            .num_nodes = num_nodes};
    return walk(&one, scratch);
}

typedef struct {
    WalkRecord *walks;
    int32_t count;
    atomic_int next;
    float *scratch;
    int64_t scratch_floats;
} Walks;

static void take_walks(void *argument, int thread, int num_threads) {
    Walks *own = argument;
    float *scratch = own->scratch + thread * own->scratch_floats;
    (void)num_threads;
    for (int index; (index = atomic_fetch_add(&own->next, 1)) < own->count;) {
        WalkRecord *one = own->walks + index;
        one->result = walk(one, scratch);
    }
}

static void nothing_shared(void *argument) { (void)argument; }

/* Several walks, shared out among the threads, each of which has `scratch_floats` of the scratch. */
void paceline_walk_each(WalkRecord *walks, int32_t count, int32_t num_threads, float *scratch, int64_t scratch_floats) {
    Walks own = {.walks = walks, .count = count, .scratch = scratch, .scratch_floats = scratch_floats};
    atomic_init(&own.next, 0);
    if (num_threads > 1)
        run_on_threads(nothing_shared, take_walks, &own, num_threads);
    else
        take_walks(&own, 0, 1);
}
