/* Attention over the paged cache, as in flash decoding: scores, online softmax and weighted values, split over positions.
 *
 * A row attends to the cached rows and, in its own range, to earlier rows or to the rows that its mask allows. Numbered in this order, they are the
 * row's positions. Positions are processed in splits of fixed size, whose results are merged in order. So a row's bits depend neither on other rows
 * nor on which thread computes which split. */
#include "attention.h"
#include "attention_tiles.h"

#define NUM_PREFETCHED 2 /* head blocks prefetched to the second-level cache ahead of use: the hardware prefetcher cannot follow a block table */

/* The positions [begin, end) that a row attends to: p < first_masked is in cache slot p; the others are rows of the range that `mask` allows. */
typedef struct {
    int begin, first_masked, end;
    const uint8_t *mask;
} VisiblePositions;

/* Inputs and scratch memory for a chunk. A query is one query head of one row; each row has `group` queries for a KV head. */
typedef struct {
    const AttentionOperation *op;
    const Chunk *chunk;
    const VisiblePositions *visible; /* [rows] */
    ValueBlocks values;
    const uint8_t *keys;
    int kind, group, num_queries, head_size, split_start; /* num_queries = rows * group; split_start: first position of the split */
    float *packed_queries; /* [num_queries][padded head size] see pack_queries */
    uint8_t *bf16_block; /* [BLOCK_SLOTS][padded head size] values of an int8 block, converted */
    float *scores; /* [num_queries][SPLIT_POSITIONS] scores, then softmax weights */
    float *range_scores; /* [group][slots of the blocks that hold the range] scores of one row's queries with all keys of its range */
    int32_t *listed_slots; /* [SPLIT_POSITIONS] written by list_slots */
    float *results; /* [num_queries][split_result_floats] of the current split */
    const uint8_t *prefetch_blocks[2 * SPLIT_POSITIONS / BLOCK_SLOTS + NUM_PREFETCHED]; /* in the order of use, see list_prefetches */
} ChunkWork;

static int min_int(int a, int b) { return a < b ? a : b; }
static int max_int(int a, int b) { return a > b ? a : b; }
static int round_up_to_block(int slots) { return (slots + BLOCK_SLOTS - 1) / BLOCK_SLOTS * BLOCK_SLOTS; }
static int gqa_group_size(const AttentionOperation *op) { return op->heads / op->kv_heads; }

int max_chunk_rows(const AttentionOperation *op) { return max_int(1, MAX_QUERIES / gqa_group_size(op)); }
int split_result_floats(const AttentionOperation *op) { return padded_columns(op->head_size) + LANES; }

static int uses_mask(const AttentionOperation *op, const Range *range) { return range->mask_offset >= 0 && !op->is_causal; }

void find_chunk_splits(const AttentionOperation *op, const Chunk *chunk, int *first, int *end) {
    const Range *range = chunk->range;
    const int has_mask = uses_mask(op, range), row = has_mask ? 0 : chunk->first_row;
    const int begin = op->window ? range->cached_len + row + 1 - op->window : 0;
    *first = max_int(begin, range->first_slot) / SPLIT_POSITIONS;
    *end = (range->cached_len + (has_mask ? range->rows : chunk->first_row + chunk->rows) + SPLIT_POSITIONS - 1) / SPLIT_POSITIONS;
}

/* Return how many floats of scratch memory a thread needs for attention in a pass of `rows` rows. group: query heads per KV head. */
int64_t paceline_attention_floats(int32_t group, int32_t head_size, int32_t rows) {
    const int64_t queries = max_int(MAX_QUERIES, group), padded = padded_columns(head_size);
    return queries * (padded + SPLIT_POSITIONS + 2 * (padded + LANES)) + BLOCK_SLOTS / 2 * padded +
           (group + 1) * (int64_t)(round_up_to_block(rows) + BLOCK_SLOTS) + SPLIT_POSITIONS + 2 * LANES;
}

static VisiblePositions visible_positions(const Pass *pass, const AttentionOperation *op, const Range *range, int row) {
    VisiblePositions visible = {range->first_slot, range->cached_len + row + 1, range->cached_len + row + 1, 0};
    int end = visible.end; /* the sliding window counts only earlier rows, even if the mask allows later ones */
    if (uses_mask(op, range)) {
        visible.mask = pass->masks + range->mask_offset + row * range->rows;
        visible.first_masked = visible.end = end = range->cached_len;
        for (int other = 0; other < range->rows; other++) {
            visible.end += visible.mask[other];
            if (other <= row) end += visible.mask[other];
        }
    }
    if (op->window) visible.begin = max_int(visible.begin, end - op->window);
    return visible;
}

/* Pack a query for score_int8_tile: quads of int8 codes, the scale and the sum of the codes. */
static void pack_int8_query(const float *x, int size, float *to) {
    const int padded = padded_columns(size);
    const float scale = int8_row_scale(x, size);
    ints sum = broadcast_int(0);
    EACH_16(column, count, size) {
        const ints codes = to_int8_codes(x + column, count, scale);
        store_quads((int32_t *)to + column / 4 * DOT_WORDS, codes, DOT_WORDS, DOT_WORDS);
        sum += codes;
    }
    const int32_t total = __builtin_reduce_add(sum);
    memcpy(to + SUM_OF_QUERY(padded), &total, sizeof total);
    to[SCALE_OF_QUERY(padded)] = scale;
}

/* Pack the queries of the chunk, padded with zeros, in the data type of the keys. */
static void pack_queries(const Program *program, const ChunkWork *task) {
    const int size = task->head_size, padded = task->values.padded;
    for (int query = 0; query < task->num_queries; query++) {
        const size_t row = (size_t)(task->chunk->range->start + task->chunk->first_row + query / task->group);
        const size_t head = row * (size_t)task->op->heads + (size_t)(task->chunk->kv_head * task->group + query % task->group);
        const float *x = program->buffers[task->op->q] + head * (size_t)size;
        float *to = task->packed_queries + query * padded;
        if (task->kind == KV_S8) {
            pack_int8_query(x, size, to);
            continue;
        }
        memset(to, 0, (size_t)round_up_to_block(padded) * sizeof(float)); /* may overwrite the start of the next query, which is packed later */
        memcpy(to, x, (size_t)size * sizeof(float));
        if (task->kind == KV_BF16 && task->op->latent_size)
            for (int column = 0; column < padded; column += LANES) store(to + column, round_to_bf16(load(to + column)));
        else if (task->kind == KV_BF16) pack_bf16_pairs(to, 0, round_up_to_block(padded));
    }
}

/* Evaluate `call` with the cache's data type as the compile-time constant KIND. */
#define DISPATCH_KIND(call)                                     \
    switch (task->kind) {                                       \
        case KV_F32: { enum { KIND = KV_F32 }; call; break; }   \
        case KV_BF16: { enum { KIND = KV_BF16 }; call; break; } \
        case KV_F16: { enum { KIND = KV_F16 }; call; break; }   \
        default: { enum { KIND = KV_S8 }; call; break; }        \
    }
/* As DISPATCH_KIND, for values: int8 values are multiplied as bfloat16. */
#define DISPATCH_VALUE_KIND(call)                             \
    switch (task->kind) {                                     \
        case KV_F32: { enum { KIND = KV_F32 }; call; break; } \
        case KV_F16: { enum { KIND = KV_F16 }; call; break; } \
        default: { enum { KIND = KV_BF16 }; call; break; }    \
    }

/* Compute the scores of queries [first, end) with the keys of a block. next: see make_prefetch. */
INLINE void score_queries(const int kind, const ChunkWork *task, const uint8_t *keys, const uint8_t *const *next, int first, int end,
                          float *scores, int row_stride) {
    const int size = task->head_size, padded = task->values.padded, rest = (end - first) % KEY_QUERIES;
    const int fours = KEY_QUERIES > VALUE_QUERIES ? rest / VALUE_QUERIES : 0;
    Prefetch prefetch = make_prefetch(next, head_block_bytes(kind, size), (end - first) / KEY_QUERIES + fours + rest - fours * VALUE_QUERIES,
                                      score_tile_steps(kind, size));
    const float *q = task->packed_queries;
    int query = first;
    for (; query + KEY_QUERIES <= end; query += KEY_QUERIES)
        score_tile(kind, keys, &prefetch, q + query * padded, size, scores + (query - first) * row_stride, row_stride, KEY_QUERIES);
    for (; KEY_QUERIES > VALUE_QUERIES && query + VALUE_QUERIES <= end; query += VALUE_QUERIES)
        score_tile(kind, keys, &prefetch, q + query * padded, size, scores + (query - first) * row_stride, row_stride, VALUE_QUERIES);
    for (; query < end; query++) score_tile(kind, keys, &prefetch, q + query * padded, size, scores + (query - first) * row_stride, row_stride, 1);
}

/* Compute the scores of queries [first, end) with a block of latents (MLA), which are both keys and values. */
INLINE void score_latents(const int kind, const ChunkWork *task, const uint8_t *block, const uint8_t *const *next, int first, int end,
                          float *scores, int row_stride) {
    const int padded = task->values.padded, count = end - first, tiles = count / VALUE_QUERIES + count % VALUE_QUERIES;
    Prefetch prefetch = make_prefetch(next, head_block_bytes(kind, task->head_size), tiles, BLOCK_SLOTS / 4 * (padded / LANES));
    const float *q = task->packed_queries + first * padded;
    int query = 0;
    for (; query + VALUE_QUERIES <= count; query += VALUE_QUERIES)
        score_latent_tile(kind, block, &prefetch, q + query * padded, padded, scores + query * row_stride, row_stride, VALUE_QUERIES);
    for (; query < count; query++) score_latent_tile(kind, block, &prefetch, q + query * padded, padded, scores + query * row_stride, row_stride, 1);
}

/* Compute the scores of queries [first, end) with all keys of the blocks that contain slots [from, stop). next: see make_prefetch. */
static void score_slots(const ChunkWork *task, int first, int end, int from, int stop, const uint8_t *const *next, float *scores,
                        int row_stride) {
    for (int slot = from / BLOCK_SLOTS * BLOCK_SLOTS; slot < stop; slot += BLOCK_SLOTS) {
        const uint8_t *keys = task->keys + (size_t)task->values.table[slot / BLOCK_SLOTS] * task->values.stride;
        const uint8_t *const *next_block = next ? next + slot / BLOCK_SLOTS - from / BLOCK_SLOTS : NULL;
        float *to = scores + slot - from / BLOCK_SLOTS * BLOCK_SLOTS;
        if (task->op->latent_size) DISPATCH_VALUE_KIND(score_latents(KIND, task, keys, next_block, first, end, to, row_stride))
        else DISPATCH_KIND(score_queries(KIND, task, keys, next_block, first, end, to, row_stride))
    }
}

/* Add the weighted values of slots [from, end) of a block, in all columns, to the sums of `queries` queries from `query` on. */
INLINE void add_weighted_columns(const int kind, const ChunkWork *task, const uint8_t *head_block, Prefetch *prefetch, int from, int end,
                                 int query, const int queries) {
    const int padded = task->values.padded;
    const float *weights = task->scores + query * SPLIT_POSITIONS;
    float *sums = task->results + query * (padded + LANES);
    int begin = 0;
    for (; begin + VALUE_VECTORS * LANES <= task->values.columns; begin += VALUE_VECTORS * LANES)
        add_value_tile(kind, head_block, padded, prefetch, from, end, task->split_start, weights, SPLIT_POSITIONS, begin, sums, queries, VALUE_VECTORS);
    for (; begin < task->values.columns; begin += LANES)
        add_value_tile(kind, head_block, padded, prefetch, from, end, task->split_start, weights, SPLIT_POSITIONS, begin, sums, queries, 1);
}

/* Add the weighted values of slots [from, end) of one block to the sums of queries [first, last). The block stays in the first-level cache. */
INLINE void add_weighted_block(const int kind, const ChunkWork *task, const uint8_t *head_block, int from, int end, int first, int last) {
    const int vectors = task->values.columns / LANES, columns = vectors / VALUE_VECTORS + vectors % VALUE_VECTORS;
    const int tiles = columns * ((last - first) / VALUE_QUERIES + (last - first) % VALUE_QUERIES);
    Prefetch prefetch = make_prefetch(task->values.prefetch_blocks + from / BLOCK_SLOTS - task->values.first_block,
                                      head_block_bytes(task->kind, task->head_size), tiles, value_tile_steps(kind));
    int query = first;
    for (; query + VALUE_QUERIES <= last; query += VALUE_QUERIES) add_weighted_columns(kind, task, head_block, &prefetch, from, end, query, VALUE_QUERIES);
    for (; query < last; query++) add_weighted_columns(kind, task, head_block, &prefetch, from, end, query, 1);
}

/* Add the weighted values of slots [from, end) to the sums of queries [first, last). All precede first_masked, so slot = position. */
static void add_weighted_slots(const ChunkWork *task, int from, int end, int first, int last) {
    for (int slot = from, stop; slot < end; slot = stop) {
        stop = min_int((slot | (BLOCK_SLOTS - 1)) + 1, end);
        const uint8_t *head_block = task->values.values + (size_t)task->values.table[slot / BLOCK_SLOTS] * task->values.stride;
        if (task->kind == KV_S8) {
            int8_to_bf16_block(head_block, task->values.padded, task->bf16_block);
            head_block = task->bf16_block;
        }
        DISPATCH_VALUE_KIND(add_weighted_block(KIND, task, head_block, slot, stop, first, last))
    }
}

/* Store the slots of positions [from, end) of a row in task->listed_slots. */
static void list_slots(const ChunkWork *task, const VisiblePositions *visible, int from, int end) {
    int position = from;
    for (; position < min_int(visible->first_masked, end); position++) task->listed_slots[position - from] = position;
    for (int other = 0, at = visible->first_masked; at < end; other++) {
        if (!visible->mask[other]) continue;
        if (at >= from) task->listed_slots[at - from] = task->chunk->range->cached_len + other;
        at++;
    }
}

/* Score masked positions [from, end) of a row: score all keys of its range, then copy the scores of allowed rows to their positions. */
static void score_range(const ChunkWork *task, const VisiblePositions *visible, int row, int from, int end) {
    const int first = row * task->group, start = task->chunk->range->cached_len, skipped = start / BLOCK_SLOTS * BLOCK_SLOTS;
    const int stop = start + task->chunk->range->rows, row_stride = round_up_to_block(stop - skipped);
    score_slots(task, first, first + task->group, start, stop, NULL, task->range_scores, row_stride);
    list_slots(task, visible, from, end);
    for (int query = 0; query < task->group; query++)
        for (int position = from; position < end; position++)
            task->scores[(first + query) * SPLIT_POSITIONS + position - task->split_start] =
                task->range_scores[query * row_stride + task->listed_slots[position - from] - skipped];
}

static const float *value_scales_at(const ChunkWork *task, int slot) {
    return int8_row_scales(task->values.values + (size_t)task->values.table[slot / BLOCK_SLOTS] * task->values.stride, task->head_size);
}

/* Multiply the weights of positions [from, end) by the scales of the int8 values. Outside, weights stay 0, even if a scale is NaN. */
static void scale_weights(const ChunkWork *task, const VisiblePositions *visible, float *weights, int from, int end) {
    const int whole = visible->mask ? min_int(end, visible->first_masked / BLOCK_SLOTS * BLOCK_SLOTS) : end, begin = max_int(from, whole);
    for (int slot = from / BLOCK_SLOTS * BLOCK_SLOTS; slot < whole; slot += BLOCK_SLOTS)
        for (int i = 0; i < BLOCK_SLOTS; i += LANES) {
            float *to = weights + slot + i - task->split_start;
            store(to, load(to) * load(value_scales_at(task, slot) + i));
        }
    if (from < whole) {
        for (int slot = from / BLOCK_SLOTS * BLOCK_SLOTS; slot < from; slot++) weights[slot - task->split_start] = 0.0f;
        for (int slot = whole; slot < round_up_to_block(whole); slot++) weights[slot - task->split_start] = 0.0f;
    }
    if (begin >= end) return;
    list_slots(task, visible, begin, end);
    for (int position = begin; position < end; position++) {
        const int slot = task->listed_slots[position - begin];
        weights[position - task->split_start] *= value_scales_at(task, slot)[slot % BLOCK_SLOTS];
    }
}

/* Replace the scores of positions [from, end) by unnormalised softmax weights. stats: largest scaled score times log2 e, sum of weights. */
static void softmax_split(const ChunkWork *task, const VisiblePositions *visible, float *scores, int from, int end, float *stats) {
    const int begin = from - task->split_start, stop = end - task->split_start, first = begin / BLOCK_SLOTS * BLOCK_SLOTS, last = round_up_to_block(stop);
    float factor = task->op->scale * LOG2_E;
    if (task->op->soft_cap > 0.0f) {
        scale_row(scores + first, last - first, task->op->scale, scores + first);
        soft_cap_row(scores + first, last - first, task->op->soft_cap, scores + first);
        factor = LOG2_E;
    }
    for (int i = first; i < begin; i++) scores[i] = -__builtin_inff();
    for (int i = stop; i < last; i++) scores[i] = -__builtin_inff();
    stats[0] = largest_score(scores, first, last) * factor;
    stats[1] = task->kind == KV_BF16 ? exp2_weights(scores, first, last, factor, stats[0], 1) : exp2_weights(scores, first, last, factor, stats[0], 0);
    if (task->kind == KV_S8) {
        scale_weights(task, visible, scores, from, end);
        pack_bf16_pairs(scores, first, last);
    }
}

/* Add the weighted values of positions [from[row], end[row]) of each row. Slots that all rows attend to are read once for all rows. This common
 * part begins and ends at even slots, because bfloat16 values are stored in pairs. */
static void add_weighted_values(const ChunkWork *task, const int *from, const int *end) {
    const int rows = task->chunk->rows, group = task->group;
    int stop[MAX_QUERIES], first = 0, last = task->split_start + SPLIT_POSITIONS;
    for (int row = 0; row < rows; row++) {
        const VisiblePositions *visible = task->visible + row;
        stop[row] = end[row] > visible->first_masked ? max_int(from[row], visible->first_masked / 2 * 2) : end[row];
        first = max_int(first, (from[row] + 1) / 2 * 2);
        last = min_int(last, stop[row] / 2 * 2);
        if (from[row] >= end[row]) stop[row] = last = -1;
    }
    if (first >= last) first = last = 0;
    for (int row = 0; row < rows; row++)
        add_weighted_slots(task, from[row], first < last ? min_int(first, stop[row]) : stop[row], row * group, (row + 1) * group);
    add_weighted_slots(task, first, last, 0, rows * group);
    for (int row = 0; row < rows; row++) {
        const int begin = row * group;
        if (first < last) add_weighted_slots(task, last, stop[row], begin, begin + group);
        if (stop[row] < 0 || stop[row] >= end[row]) continue;
        list_slots(task, task->visible + row, stop[row], end[row]);
        const float *weights = task->scores + begin * SPLIT_POSITIONS;
        float *sums = task->results + begin * split_result_floats(task->op);
        DISPATCH_KIND(add_listed_slots(KIND, &task->values, task->listed_slots, stop[row], end[row], task->split_start, weights, SPLIT_POSITIONS, sums, group))
    }
}

/* List the head blocks to prefetch: keys, then values of slots [first, last) of this split, then the first blocks of the next split. */
static void list_prefetches(ChunkWork *task, int first, int last) {
    const int begin = first / BLOCK_SLOTS, blocks = first < last ? round_up_to_block(last) / BLOCK_SLOTS - begin : 0;
    const int total = (task->chunk->range->cached_len + task->chunk->range->rows - 1) / BLOCK_SLOTS;
    const uint8_t *values = task->values.values + (size_t)task->values.table[min_int(begin, total)] * task->values.stride;
    for (int i = 0; i < 2 * blocks + NUM_PREFETCHED; i++) {
        const int block = i < blocks ? begin + i : begin + i - blocks;
        const uint8_t *side = i >= blocks && i < 2 * blocks ? task->values.values : task->keys;
        task->prefetch_blocks[i] = block <= total ? side + (size_t)task->values.table[block] * task->values.stride : values;
    }
    task->values.prefetch_blocks = task->prefetch_blocks + blocks + NUM_PREFETCHED;
    task->values.first_block = begin;
}

static void compute_split(ChunkWork *task, int split, float *results) {
    const int rows = task->chunk->rows, group = task->group, result_floats = split_result_floats(task->op);
    int from[MAX_QUERIES], end[MAX_QUERIES], first = (split + 1) * SPLIT_POSITIONS, last = 0;
    task->split_start = split * SPLIT_POSITIONS;
    task->results = results;
    memset(results, 0, (size_t)(task->num_queries * result_floats) * sizeof(float));
    for (int row = 0; row < rows; row++) {
        const VisiblePositions *visible = task->visible + row;
        from[row] = max_int(visible->begin, task->split_start);
        end[row] = min_int(visible->end, task->split_start + SPLIT_POSITIONS);
        if (from[row] >= end[row]) continue;
        first = min_int(first, from[row]);
        last = max_int(last, min_int(visible->first_masked, end[row]));
    }
    list_prefetches(task, first, last);
    if (first < last)
        score_slots(task, 0, task->num_queries, first, last, task->prefetch_blocks + NUM_PREFETCHED,
                    task->scores + first / BLOCK_SLOTS * BLOCK_SLOTS - task->split_start, SPLIT_POSITIONS);
    for (int row = 0; row < rows; row++) {
        const VisiblePositions *visible = task->visible + row;
        if (from[row] >= end[row]) continue;
        if (end[row] > visible->first_masked) score_range(task, visible, row, max_int(from[row], visible->first_masked), end[row]);
        for (int query = row * group; query < (row + 1) * group; query++)
            softmax_split(task, visible, task->scores + query * SPLIT_POSITIONS, from[row], end[row], results + query * result_floats + task->values.padded);
    }
    add_weighted_values(task, from, end);
}

/* Merge a query's result of a later split into `merged`. A sum of weights of 0 means that the row attends to no position of that split. */
static void merge_results(float *merged, const float *later, int padded) {
    const float *stats = later + padded;
    float *total = merged + padded;
    if (stats[1] == 0.0f) return;
    if (total[1] == 0.0f) {
        memcpy(merged, later, (size_t)(padded + 2) * sizeof(float));
        return;
    }
    const float difference = stats[0] - total[0], ratio = power_of_two(difference > 0.0f ? -difference : difference);
    const floats old_factor = broadcast(difference > 0.0f ? ratio : 1.0f), new_factor = broadcast(difference > 0.0f ? 1.0f : ratio);
    for (int i = 0; i < padded; i += LANES) store(merged + i, fmadd(load(later + i), new_factor, load(merged + i) * old_factor));
    total[1] = total[1] * old_factor[0] + stats[1] * new_factor[0];
    total[0] = difference > 0.0f ? stats[0] : total[0];
}

static void merge_chunk_results(const AttentionOperation *op, const Chunk *chunk, float *merged, const float *results) {
    const int result_floats = split_result_floats(op), queries = chunk->rows * gqa_group_size(op);
    for (int query = 0; query < queries; query++) merge_results(merged + query * result_floats, results + query * result_floats, result_floats - LANES);
}

void merge_and_write_outputs(const Program *program, const AttentionOperation *op, const Chunk *chunk, float *results, int count, size_t stride) {
    const int group = gqa_group_size(op), result_floats = split_result_floats(op), padded = result_floats - LANES;
    const int size = op->latent_size ? op->latent_size : op->head_size;
    for (int split = 1; split < count; split++) merge_chunk_results(op, chunk, results, results + (size_t)split * stride);
    for (int query = 0; query < chunk->rows * group; query++) {
        const int head = chunk->kv_head * group + query % group;
        const size_t row = (size_t)(chunk->range->start + chunk->first_row + query / group);
        float *sums = results + query * result_floats, normalizer = 1.0f / sums[padded + 1];
        if (op->sinks) {
            const float sink = op->sinks[head] * LOG2_E, largest = sink > sums[padded] ? sink : sums[padded];
            const float factor = power_of_two(sums[padded] - largest);
            normalizer = factor / (sums[padded + 1] * factor + power_of_two(sink - largest));
        }
        scale_row(sums, size, normalizer, program->buffers[op->common.out] + (row * (size_t)op->heads + (size_t)head) * (size_t)size);
    }
}

/* Initialise the work on a chunk with memory from `scratch`; return the memory after it. */
static float *init_chunk_work(ChunkWork *task, VisiblePositions *visible, const Program *program, const Pass *pass,
                              const AttentionOperation *op, const Chunk *chunk, float *scratch) {
    const int padded = padded_columns(op->head_size), queries = max_int(MAX_QUERIES, gqa_group_size(op));
    const size_t range_scores = (size_t)(round_up_to_block(chunk->range->rows) + BLOCK_SLOTS);
    *task = (ChunkWork){.op = op, .chunk = chunk, .visible = visible, .kind = program->kv_kind, .group = gqa_group_size(op), .head_size = op->head_size};
    task->num_queries = chunk->rows * task->group;
    task->keys = first_head_block(program, op, 0, chunk->kv_head);
    task->values = (ValueBlocks){first_head_block(program, op, 1, chunk->kv_head), NULL, 0, block_table_of(pass, op, chunk->range),
                                 block_bytes(program, op), padded, op->latent_size ? padded_columns(op->latent_size) : padded};
    task->packed_queries = scratch;
    task->bf16_block = (uint8_t *)(task->packed_queries + queries * padded + 2 * LANES);
    task->scores = task->packed_queries + queries * padded + 2 * LANES + BLOCK_SLOTS / 2 * padded;
    task->range_scores = task->scores + queries * SPLIT_POSITIONS;
    task->listed_slots = (int32_t *)(task->range_scores + (size_t)task->group * range_scores);
    for (int row = 0; row < chunk->rows; row++) visible[row] = visible_positions(pass, op, chunk->range, chunk->first_row + row);
    pack_queries(program, task);
    return (float *)task->listed_slots + SPLIT_POSITIONS + range_scores;
}

void attend_splits(const Program *program, const Pass *pass, const AttentionOperation *op, const Chunk *chunk, int first, int count,
                   float *scratch, float *results, size_t stride) {
    ChunkWork task;
    VisiblePositions visible[MAX_QUERIES];
    init_chunk_work(&task, visible, program, pass, op, chunk, scratch);
    for (int i = 0; i < count; i++) compute_split(&task, first + i, results + (size_t)i * stride);
}

void attend_chunk(const Program *program, const Pass *pass, const AttentionOperation *op, const Chunk *chunk, float *scratch) {
    ChunkWork task;
    VisiblePositions visible[MAX_QUERIES];
    float *merged = init_chunk_work(&task, visible, program, pass, op, chunk, scratch), *results = merged + task.num_queries * split_result_floats(op);
    int first, end;
    find_chunk_splits(op, chunk, &first, &end);
    compute_split(&task, first, merged);
    for (int split = first + 1; split < end; split++) {
        compute_split(&task, split, results);
        merge_chunk_results(op, chunk, merged, results);
    }
    merge_and_write_outputs(program, op, chunk, merged, 1, 0);
}
