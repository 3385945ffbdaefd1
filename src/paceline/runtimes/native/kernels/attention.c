/* Attention over blocks of cached rows. A row sees the cached rows and, of its own range, what comes before it or what its mask
 * allows; they are visited in the order of their slots, so skipping some leaves the arithmetic that decoding alone would do. */
#include "native.h"
#include "vectors.h"

/* Rows of the cache that one call works through before it turns to the next query head: their keys stay in the nearest cache. */
#define STRETCH 64

/* Where a kv head's keys (side 0) or values (side 1) begin: a layer's are [num_blocks][kv_heads][block_size][head_size]. */
static float *side_of(const Program *program, const AttentionOperation *own, int side, int kv_head) {
    return program->planes[2 * own->layer + side] + (size_t)kv_head * (size_t)program->block_size * (size_t)own->head_size;
}

/* The blocks of a range's sequence in the memory of this layer. */
static const int32_t *table_of(const Pass *pass, const AttentionOperation *own, const Range *range) {
    return pass->block_tables + (size_t)own->tables * (size_t)pass->blocks_of_tables + range->table;
}

/* Row of a slot, counted from `side_of`. */
static int32_t row_of(const Program *program, const AttentionOperation *own, const int32_t *table, int slot) {
    return table[slot / program->block_size] * own->kv_heads * program->block_size + slot % program->block_size;
}

/* Write one row's k and v [kv_heads * head_size] to its slot. */
void write_kv(const Program *program, const Pass *pass, const AttentionOperation *own, int row) {
    const Range *range = pass->ranges + pass->range_of_row[row];
    const size_t size = (size_t)own->head_size, begin = (size_t)row * (size_t)own->kv_heads * size;
    const float *k = program->buffers[own->k] + begin, *v = program->buffers[own->v] + begin;
    const int32_t place = row_of(program, own, table_of(pass, own, range), range->cached_len + row - range->start);
    for (int head = 0; head < own->kv_heads; head++) {
        memcpy(side_of(program, own, 0, head) + (size_t)place * size, k + (size_t)head * size, size * sizeof(float));
        memcpy(side_of(program, own, 1, head) + (size_t)place * size, v + (size_t)head * size, size * sizeof(float));
    }
}

/* Rows of the cache that `row` may see, in the order of their slots. They are a path, each one position behind the one before, so a window is
 * the last of them. */
static int visible_rows(const Program *program, const Pass *pass, const AttentionOperation *own, int row, int32_t *visible) {
    const Range *range = pass->ranges + pass->range_of_row[row];
    const int32_t *table = table_of(pass, own, range);
    const int index = row - range->start, size = program->block_size;
    const uint8_t *mask = range->mask < 0 ? 0 : pass->masks + range->mask + index * range->rows;
    const int known = range->cached_len + (mask ? 0 : index + 1);
    int hidden = 0; /* of the range's own rows that the mask shows, those that the window hides */
    int slot = range->first_slot;
    if (own->window) {
        int own_rows = 0;
        for (int other = 0; mask && other < range->rows; other++) own_rows += mask[other];
        hidden = own_rows > own->window ? own_rows - own->window : 0;
        const int first = known - (own->window - (own_rows - hidden));
        if (first > slot) slot = first;
    }
    int count = 0;
    while (slot < known) {
        const int32_t first = table[slot / size] * own->kv_heads * size;
        for (int32_t in_block = slot % size; in_block < size && slot < known; in_block++, slot++) visible[count++] = first + in_block;
    }
    for (int other = 0; mask && other < range->rows; other++)
        if (mask[other] && hidden-- <= 0) visible[count++] = row_of(program, own, table, range->cached_len + other);
    return count;
}

/* Query heads that are worked on together, so that a row of the cache is loaded once for all of them. */
#ifdef __AVX512F__
#define HEADS 4
#else
#define HEADS 1
#endif
#define EACH_HEAD _Pragma("unroll") for (int head = 0; head < heads; head++)
#define EACH_PART _Pragma("unroll") for (int part = 0; part < parts; part++)
#define AHEAD 16 /* rows that are asked for early: blocks lie anywhere, a page apart */

/* The query heads of one kv head, and the rows of the cache that they see; a head's scores lie `room` apart. */
typedef struct {
    const float *keys, *values;
    const int32_t *rows;
    int count, size, room;
} Seen;

INLINE void prefetch_row(const float *side, int32_t row, int size) {
    for (int i = 0; i < size; i += LANES) __builtin_prefetch(side + (size_t)row * (size_t)size + i, 0, 3);
}

/* scores[head][i] = scale (q[head] . keys[rows[i]]) for `heads` heads and rows [from, end); `parts` vectors a row, the last of which may not be
 * whole. Sixteen dot products are added up at once. */
INLINE void score_heads(const Seen *seen, const float *q, int from, int end, float scale, float *scores, const int heads, const int parts, const int is_whole) {
    const int size = seen->size, last = is_whole ? LANES : size - (parts - 1) * LANES;
    for (; from < end; from += LANES) {
        const int some = end - from < LANES ? end - from : LANES;
        floats sums[HEADS][LANES];
        for (int i = 0; i < some; i++) {
            const float *key = seen->keys + (size_t)seen->rows[from + i] * (size_t)size;
            const int soon = from + i + AHEAD;
            if (soon < seen->count)
                prefetch_row(seen->keys, seen->rows[soon], size);
            else if (soon - seen->count < seen->count)
                prefetch_row(seen->values, seen->rows[soon - seen->count], size);
            floats sum[HEADS];
            EACH_HEAD sum[head] = broadcast(0.0f);
            EACH_PART {
                const floats k = is_whole || part + 1 < parts ? load(key + part * LANES) : load_first(key + part * LANES, last);
                EACH_HEAD {
                    const float *query = q + head * size + part * LANES;
                    sum[head] = fused(is_whole || part + 1 < parts ? load(query) : load_first(query, last), k, sum[head]);
                }
            }
            EACH_HEAD sums[head][i] = sum[head];
        }
        for (int i = some; i < LANES; i++) EACH_HEAD sums[head][i] = broadcast(0.0f);
        EACH_HEAD {
            const floats totals = lane_sums(sums[head]) * broadcast(scale);
            memcpy(scores + head * seen->room + from, &totals, (size_t)some * sizeof(float));
        }
    }
}

static void score(const Seen *seen, const float *q, int from, int end, int group, float scale, float *scores) {
    const int size = seen->size, whole = size / LANES, parts = (size + LANES - 1) / LANES;
    int head = 0;
    for (; head + HEADS <= group && (size == 64 || size == 128); head += HEADS)
        if (size == 64)
            score_heads(seen, q + head * size, from, end, scale, scores + head * seen->room, HEADS, 4, 1);
        else
            score_heads(seen, q + head * size, from, end, scale, scores + head * seen->room, HEADS, 8, 1);
    for (; head < group; head++)
        if (whole == parts)
            score_heads(seen, q + head * size, from, end, scale, scores + head * seen->room, 1, parts, 1);
        else
            score_heads(seen, q + head * size, from, end, scale, scores + head * seen->room, 1, parts, 0);
}

/* The first half of softmax: each score becomes exp(score - largest); returns the sum, with that of the sink where there is one. 16 floats of
 * room follow the scores. */
static float exponentials(float *scores, int count, const float *sink) {
    float largest = sink ? *sink : scores[0];
    for (int i = 0; i < count; i++) largest = scores[i] > largest ? scores[i] : largest;
    floats sum = broadcast(0.0f);
    for (int i = count; i < count + LANES; i++) scores[i] = -__builtin_inff();
    for (int i = 0; i < count; i += LANES) {
        const floats weight = exponential(load(scores + i) - broadcast(largest));
        store(scores + i, weight);
        sum += weight;
    }
    return sink ? lane_sum(sum) + exponential(broadcast(*sink - largest))[0] : lane_sum(sum);
}

/* sums[head] += weights[head][i] values[rows[i]] over rows [from, end), in order, for `heads` heads and `parts` vectors of `width` floats from
 * column `begin` on. */
INLINE void add_part(const Seen *seen, const float *weights, int from, int end, int begin, int width, float *sums, const int heads, const int parts) {
    const int size = seen->size;
    floats sum[HEADS][4];
    EACH_HEAD EACH_PART sum[head][part] = load_first(sums + head * size + begin + part * LANES, width);
    for (int i = from; i < end; i++) {
        const float *value = seen->values + (size_t)seen->rows[i] * (size_t)size + begin;
        floats v[4];
        if (i + AHEAD < seen->count) prefetch_row(seen->values, seen->rows[i + AHEAD], size);
        EACH_PART v[part] = load_first(value + part * LANES, width);
        EACH_HEAD {
            const floats weight = broadcast(weights[head * seen->room + i]);
            EACH_PART sum[head][part] = fused(weight, v[part], sum[head][part]);
        }
    }
    EACH_HEAD EACH_PART memcpy(sums + head * size + begin + part * LANES, &sum[head][part], (size_t)width * sizeof(float));
}

static void add_weighted(const Seen *seen, const float *weights, int from, int end, int group, float *sums) {
    const int size = seen->size, together = size % (4 * LANES) ? 1 : HEADS;
    for (int head = 0; head < group;) {
        const int heads = head + together <= group ? together : 1;
        const float *own = weights + head * seen->room;
        float *to = sums + head * size;
        int begin = 0;
        for (; begin + 4 * LANES <= size; begin += 4 * LANES)
            if (heads == HEADS)
                add_part(seen, own, from, end, begin, LANES, to, HEADS, 4);
            else
                add_part(seen, own, from, end, begin, LANES, to, 1, 4);
        for (; begin < size; begin += LANES) add_part(seen, own, from, end, begin, size - begin < LANES ? size - begin : LANES, to, 1, 1);
        head += heads;
    }
}

/* The query heads of `kv_head` in one row. Scratch: the visible rows, then each head's scores. */
void attend(const Program *program, const Pass *pass, const AttentionOperation *own, int row, int kv_head, float *scratch) {
    const int size = own->head_size, group = own->heads / own->kv_heads, room = program->max_context + LANES;
    int32_t *visible = (int32_t *)scratch;
    float *scores = scratch + room;
    const int count = visible_rows(program, pass, own, row, visible);
    const size_t place = ((size_t)row * (size_t)own->heads + (size_t)(kv_head * group)) * (size_t)size;
    const float *q = program->buffers[own->q] + place;
    float *out = program->buffers[own->head.out] + place;
    const Seen seen = {side_of(program, own, 0, kv_head), side_of(program, own, 1, kv_head), visible, count, size, room};
    for (int from = 0; from < count; from += STRETCH)
        score(&seen, q, from, count - from < STRETCH ? count : from + STRETCH, group, own->scale, scores);
    for (int head = 0; head < group; head++) {
        float *of_head = scores + head * room;
        if (own->soft_cap > 0.0f) soft_cap(of_head, count, own->soft_cap, of_head);
        const float share = 1.0f / exponentials(of_head, count, own->sinks ? own->sinks + kv_head * group + head : NULL);
        for (int i = 0; i < count; i += LANES) store(of_head + i, load(of_head + i) * broadcast(share));
    }
    memset(out, 0, (size_t)(group * size) * sizeof(float));
    for (int from = 0; from < count; from += STRETCH)
        add_weighted(&seen, scores, from, count - from < STRETCH ? count : from + STRETCH, group, out);
}
