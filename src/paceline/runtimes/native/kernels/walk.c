/* The walk of speculation/verify.py for requests whose rows only temperature, top-k, top-p and min-p change: which tokens the target draws
 * along a tree. What sampling/processors.py and sampling/draw.py do is the definition. Sums and exponentials here differ from theirs in the
 * last places, so whatever comes too near to a border is left to them: a walk ends in front of a row that it cannot decide. */
#include "native.h"
#include "threads.h"
#include "vectors.h"

#include <math.h>
#include <stdatomic.h>

#define UNDECIDED (-1)
#define SUMMED 256       /* columns whose weights are summed in float32 */
#define BLOCK 64         /* columns whose largest logit is looked at first for top-k */
#define SLACK 0x1p-15    /* of the total weight: how far sums here and there may be apart, with room */
#define NEAR 0x1p-21f    /* of a logit: divided by the temperature two such may be equal */
#define NEAR_WEIGHT 1e-5f
#define NEAR_RACE 1e-9
#define LIGHT 14.0f      /* e^-LIGHT of the best weight is far below SLACK, and below what MOST_TOP_P leaves out */
#define MOST_TOP_P 0.9999
#define MOST_PEAK 0x1p20f /* beyond it differences of score and log noise lose too much */

typedef uint64_t wides __attribute__((vector_size(64)));

typedef struct {
    const float *row;
    float *weights, *ratios; /* [columns, rounded up to 16] */
    float *heaviest, *lowest; /* by blocks of SUMMED columns: the largest weight, the smallest ratio; they lie where `ratios` do */
    int columns;
    float temperature, peak;
    uint64_t key;
    float least, refused; /* columns that weigh less, or whose logits are no larger, are in no race */
} Row;

INLINE floats load_or(const float *from, int count, float rest) {
    if (count == LANES) return load(from);
    floats v = broadcast(rest);
    memcpy(&v, from, (size_t)count * sizeof(float));
    return v;
}

static float most_of(floats v) {
    float most = v[0];
    for (int lane = 1; lane < LANES; lane++) most = v[lane] > most ? v[lane] : most;
    return most;
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

INLINE words noise_of_16(uint64_t key, int column) {
    wides state = ((wides){0, 1, 2, 3, 4, 5, 6, 7} + (uint64_t)(column / 2)) * gamma_step + key;
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
    state = state ^ (state >> 31);
    words bits;
    memcpy(&bits, &state, sizeof bits);
    return bits;
}

static double exponential_at(uint64_t key, int column) {
    const uint64_t mixed = mix_one((uint64_t)(column / 2) * gamma_step + key);
    const uint32_t bits = (uint32_t)(mixed >> (column % 2 * 32));
    return -log1p(-(((double)bits + 0.5) * 0x1p-32));
}

/* The largest logit; NaN if there is one. */
static float peak_of(const float *row, int columns) {
    floats most[4] = {broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY), broadcast(-INFINITY)};
    ints odd = (ints)(most[0] != most[0]);
    int column = 0;
    for (; column + 4 * LANES <= columns; column += 4 * LANES)
        for (int part = 0; part < 4; part++) {
            const floats logits = load(row + column + part * LANES);
            most[part] = __builtin_elementwise_max(most[part], logits);
            odd |= logits != logits;
        }
    for (; column < columns; column += LANES) {
        const floats logits = load_or(row + column, columns - column < LANES ? columns - column : LANES, -INFINITY);
        most[0] = __builtin_elementwise_max(most[0], logits);
        odd |= logits != logits;
    }
    if (__builtin_reduce_or(odd)) return NAN;
    return most_of(__builtin_elementwise_max(__builtin_elementwise_max(most[0], most[1]), __builtin_elementwise_max(most[2], most[3])));
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
    const int blocks = (own->columns + BLOCK - 1) / BLOCK;
    for (int block = 0; block < blocks; block++) {
        floats most = broadcast(-INFINITY);
        const int end = (block + 1) * BLOCK < own->columns ? (block + 1) * BLOCK : own->columns;
        for (int column = block * BLOCK; column < end; column += LANES)
            most = __builtin_elementwise_max(most, load_or(own->row + column, end - column < LANES ? end - column : LANES, -INFINITY));
        own->ratios[block] = most_of(most);
    }
    const float bound = select_rank(own->ratios, blocks, top_k - 1);
    int count = 0;
    for (int column = 0; column < own->columns; column += LANES) {
        const int width = own->columns - column < LANES ? own->columns - column : LANES;
        if (!__builtin_reduce_or((ints)(load_or(own->row + column, width, -INFINITY) >= broadcast(bound)))) continue;
        for (int lane = column; lane < column + width; lane++)
            if (own->row[lane] >= bound) own->weights[count++] = own->row[lane];
    }
    const float least = select_rank(own->weights, count, top_k - 1) / own->temperature;
    return least > -3.40282347e38f ? least : -3.40282347e38f;
}

/* exp(score - peak) of what is not below `least`, else 0; returns their sum. Where no score of 16 reaches `least` or `dust`, nothing is
 * computed: what is below `dust` weighs less than SLACK in all, and is never drawn. */
static double weigh(const Row *own, float least, float dust) {
    const float reached = least > dust ? least : dust;
    double total = 0.0;
    for (int begin = 0; begin < own->columns; begin += SUMMED) {
        const int end = begin + SUMMED < own->columns ? begin + SUMMED : own->columns;
        floats sum = broadcast(0.0f), most = broadcast(0.0f);
        for (int column = begin; column < end; column += LANES) {
            const floats logits = load_or(own->row + column, end - column < LANES ? end - column : LANES, -INFINITY);
            const floats scores = own->temperature == 1.0f ? logits : logits / broadcast(own->temperature);
            if (!__builtin_reduce_or((ints)(scores >= broadcast(reached)))) {
                store(own->weights + column, broadcast(0.0f));
                continue;
            }
            const floats weights = exponential(scores - broadcast(own->peak));
            const floats kept = (floats)((ints)weights & (ints)(scores >= broadcast(least)));
            store(own->weights + column, kept);
            sum += kept;
            most = __builtin_elementwise_max(most, kept);
        }
        own->heaviest[begin / SUMMED] = most_of(most);
        total += (double)lane_sum(sum);
    }
    return total;
}

/* noise / weight, which bounds E / weight from below, of 16 columns; infinite of those that are in no race. */
INLINE floats ratios_of_16(const Row *own, int column) {
    const floats weights = load(own->weights + column);
    const floats logits = load_or(own->row + column, own->columns - column < LANES ? own->columns - column : LANES, -INFINITY);
    const ints heavy = (ints)(weights >= broadcast(own->least)) & (ints)(weights > broadcast(0.0f)) & (ints)(logits > broadcast(own->refused));
    if (!__builtin_reduce_or(heavy)) return broadcast(INFINITY);
    const floats noise = __builtin_convertvector(noise_of_16(own->key, column), floats) + broadcast(0.5f);
    return (floats)(((ints)(noise / weights) & heavy) | ((ints)broadcast(INFINITY) & ~heavy));
}

/* The smallest ratio of all columns, and of each block. */
static float bound_races(const Row *own) {
    float smallest = INFINITY;
    for (int begin = 0; begin < own->columns; begin += SUMMED) {
        float *lowest = own->lowest + begin / SUMMED;
        *lowest = INFINITY;
        if (own->heaviest[begin / SUMMED] < own->least || own->heaviest[begin / SUMMED] == 0.0f) continue;
        const int end = begin + SUMMED < own->columns ? begin + SUMMED : own->columns;
        floats least = broadcast(INFINITY);
        for (int column = begin; column < end; column += LANES) least = __builtin_elementwise_min(least, ratios_of_16(own, column));
        *lowest = -most_of(-least);
        if (*lowest < smallest) smallest = *lowest;
    }
    return smallest;
}

/* The first column with a ratio; it is one of those that `bound_races` saw. */
static int leader_of(const Row *own, float ratio) {
    int column = 0;
    while (own->lowest[column / SUMMED] != ratio) column += SUMMED;
    for (;; column += LANES) {
        const floats ratios = ratios_of_16(own, column);
        for (int lane = 0; lane < LANES; lane++)
            if (ratios[lane] == ratio) return column + lane;
    }
}

/* The column with the largest score - log E; UNDECIDED where the next one is too near. `smallest` is the least of the ratios. */
static int winner_of(const Row *own, float smallest) {
    const int leader = leader_of(own, smallest);
    const float limit = (float)(exponential_at(own->key, leader) * 0x1p32 * 1.001) / own->weights[leader];
    double best = -INFINITY, second = -INFINITY;
    int winner = UNDECIDED;
    for (int column = 0; column < own->columns; column += LANES) {
        if (own->lowest[column / SUMMED] > limit) {
            column += SUMMED - LANES;
            continue;
        }
        const floats ratios = ratios_of_16(own, column);
        if (!__builtin_reduce_or((ints)(ratios <= broadcast(limit)))) continue;
        for (int lane = column; lane < column + LANES && lane < own->columns; lane++) {
            if (!(ratios[lane - column] <= limit)) continue;
            const double race = (double)(own->row[lane] / own->temperature) - log(exponential_at(own->key, lane));
            if (race > best) {
                second = best;
                best = race;
                winner = lane;
            } else if (race > second)
                second = race;
        }
    }
    return best - second > NEAR_RACE * (1.0 + fabs(best)) ? winner : UNDECIDED;
}

/* Whether top-p keeps a column: 1, 0, or UNDECIDED. The weight before it counts, that of larger logits. */
static int is_kept(const Row *own, int column, double wanted, double total) {
    const float logit = own->row[column], near = fabsf(logit) * NEAR;
    const floats above = broadcast(logit + near), below = broadcast(logit - near);
    const float light = own->weights[column] * expf(-2.0f * near / own->temperature) * (1.0f - NEAR_WEIGHT); /* a lighter one is below */
    double before = 0.0, tied = -(double)own->weights[column];
    for (int begin = 0; begin < own->columns; begin += SUMMED) {
        if (own->heaviest[begin / SUMMED] < light) continue;
        const int end = begin + SUMMED < own->columns ? begin + SUMMED : own->columns;
        floats larger = broadcast(0.0f), alike = broadcast(0.0f);
        for (int at = begin; at < end; at += LANES) {
            const floats logits = load_or(own->row + at, end - at < LANES ? end - at : LANES, -INFINITY), weights = load(own->weights + at);
            const ints is_above = (ints)(logits > above), is_below = (ints)(logits < below);
            larger += (floats)((ints)weights & is_above);
            alike += (floats)((ints)weights & ~is_above & ~is_below);
        }
        before += (double)lane_sum(larger);
        tied += (double)lane_sum(alike);
    }
    if (before + tied + SLACK * total < wanted) return 1;
    return before - SLACK * total > wanted ? 0 : UNDECIDED;
}

static int draw_from(Row *own, const WalkOptions *options) {
    float least = -INFINITY;
    if (options->top_k > 0 && options->top_k < own->columns) {
        if (options->top_k > (own->columns + BLOCK - 1) / BLOCK) return UNDECIDED;
        least = least_of_best(own, options->top_k);
    }
    const int leaves_dust = options->top_p <= MOST_TOP_P || options->min_p >= 1.0 - MOST_TOP_P;
    const float dust = leaves_dust ? own->peak - logf((float)own->columns) - LIGHT : -INFINITY;
    const double total = weigh(own, least, dust), wanted = options->top_p * total;
    const float min_p = (float)options->min_p;
    /* all columns lighter than this together weigh less than what top-p leaves out */
    const float light = options->top_p < 1.0 ? (float)((total - wanted) / own->columns * (1.0 - 2e-3)) : 0.0f;
    const float floor_of_min_p = min_p * (1.0f - NEAR_WEIGHT);
    own->least = light > floor_of_min_p ? light : floor_of_min_p;
    own->refused = -INFINITY;
    float smallest = bound_races(own);
    while (smallest < INFINITY) {
        const int winner = winner_of(own, smallest);
        if (winner == UNDECIDED || (min_p > 0.0f && fabsf(own->weights[winner] - min_p) <= min_p * NEAR_WEIGHT)) return UNDECIDED;
        const int kept = options->top_p < 1.0 ? is_kept(own, winner, wanted, total) : 1;
        if (kept) return kept == 1 ? winner : UNDECIDED;
        own->refused = own->row[winner]; /* and with it all that is no larger */
        smallest = bound_races(own);
    }
    return UNDECIDED;
}

static int token_of(Row *own, const WalkOptions *options) {
    const float peak = peak_of(own->row, own->columns);
    if (!(peak > -INFINITY && peak < INFINITY)) return UNDECIDED;
    if (own->temperature == 0.0f) return first_at(own->row, own->columns, peak);
    own->peak = peak / own->temperature;
    return fabsf(own->peak) <= MOST_PEAK ? draw_from(own, options) : UNDECIDED;
}

/* Tokens drawn along a tree, and the nodes that hold them, both to `found`: [2, num_nodes].
 *
 * logits: [num_nodes, columns], rows `stride` floats apart; tree: [2, num_nodes], tokens, then parents; scratch: twice the columns rounded up
 * to 16. Returns how many tokens were drawn: the walk ended behind the last one. Less than 0: it ended in front of a row that could not be
 * decided, after -1 - result tokens, all of which a node holds. */
int32_t paceline_walk(
    const float *logits, int64_t stride, const WalkOptions *options, const int32_t *tree, int32_t num_nodes, uint64_t position,
    float *scratch, int32_t *found) {
    const int columns = options->columns, room = (columns + LANES - 1) / LANES * LANES;
    const int32_t *tokens = tree, *parents = tree + num_nodes;
    for (int node = 0, count = 0;; count++) {
        float *blocks = scratch + room;
        Row own = {logits + node * stride, scratch, blocks, blocks, blocks + room / 2, columns, options->temperature, 0.0f, 0, 0.0f, 0.0f};
        own.key = options->temperature > 0.0f ? key_of(options->seed, options->sample_index, position + (uint64_t)count) : 0;
        const int token = token_of(&own, options);
        if (token == UNDECIDED) return -1 - count;
        found[count] = token;
        int child = node + 1;
        while (child < num_nodes && !(parents[child] == node && tokens[child] == token)) child++;
        if (child >= num_nodes) return count + 1;
        found[num_nodes + count] = child;
        node = child;
    }
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
        one->result = paceline_walk(one->logits, one->stride, one->options, one->tree, one->num_nodes, one->position, scratch, one->found);
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
