/* Attention over the paged cache (as flash decoding: scores, online softmax and weighted values, split over positions).
 *
 * A row attends to the cached rows and, in its op range, to earlier rows or those its mask allows: a path, on which every row has a position.
 * Positions are processed in splits of fixed size whose results are merged in order. A row's bits depend on its op path only, not on other
 * rows or on how splits are divided among threads. */
#include "attention.h"
#include "attention_tiles.h"
#include "row_codes.h"

/* Blocks to prefetch ahead to the second-level cache; blocks are scattered in memory. */
#define AHEAD 2

/* The positions [begin, end) a row attends to. Those before `straight` are in the slot of the same number; the rest are the rows of the range
 * that `mask` allows. */
typedef struct {
    int begin, straight, end;
    const uint8_t *mask;
} Seen;

/* The inputs and scratch memory for a chunk. Arrays have an entry, or a row, for each query. */
typedef struct {
    const AttentionOperation *op;
    const Chunk *chunk;
    const Seen *seen; /* [rows] */
    Values values;
    const uint8_t *keys;
    int kind, group, queries, size, base; /* base: the first position of the split */
    float *packed;  /* [queries][padded] */
    uint8_t *wide;  /* the values of an int8 block as bfloat16 */
    float *scores;  /* [queries][SPLIT] */
    float *range_scores; /* [group][rows of the range, padded to blocks, and one more block] */
    int32_t *slots; /* of some positions of one row */
    float *sums;    /* [queries][split_result_floats] */
    const uint8_t *ahead[2 * SPLIT / SLOTS + AHEAD]; /* the units of the split in reading order, and the next ones */
} ChunkWork;

static int smaller(int a, int b) { return a < b ? a : b; }
static int larger(int a, int b) { return a > b ? a : b; }
static int whole_blocks(int slots) { return (slots + SLOTS - 1) / SLOTS * SLOTS; }
static int group_of(const AttentionOperation *op) { return op->heads / op->kv_heads; }

int chunk_rows(const AttentionOperation *op) { return larger(1, MAX_QUERIES / group_of(op)); }
int split_result_floats(const AttentionOperation *op) { return padded_columns(op->head_size) + LANES; }

static int uses_mask(const AttentionOperation *op, const Range *range) { return range->mask >= 0 && !op->is_causal; }

void splits_of(const AttentionOperation *op, const Chunk *chunk, int *first, int *end) {
    const Range *range = chunk->range;
    const int has_mask = uses_mask(op, range), row = has_mask ? 0 : chunk->row;
    const int begin = op->window ? range->cached_len + row + 1 - op->window : 0;
    *first = larger(begin, range->first_slot) / SPLIT;
    *end = (range->cached_len + (has_mask ? range->rows : chunk->row + chunk->rows) + SPLIT - 1) / SPLIT;
}

/* Return the floats of a thread's scratch memory for a pass of `rows` rows. */
int64_t paceline_attention_floats(int32_t group, int32_t head_size, int32_t rows) {
    const int64_t queries = larger(MAX_QUERIES, group), padded = padded_columns(head_size);
    return queries * (padded + SPLIT + 2 * (padded + LANES)) + SLOTS / 2 * padded + (group + 1) * (int64_t)(whole_blocks(rows) + SLOTS) + SPLIT + 2 * LANES;
}

static Seen seen_of(const Pass *pass, const AttentionOperation *op, const Range *range, int row) {
    Seen seen = {range->first_slot, range->cached_len + row + 1, range->cached_len + row + 1, 0};
    int end = seen.end; /* end of the row's path: a mask may allow later rows, which a window does not count */
    if (uses_mask(op, range)) {
        seen.mask = pass->masks + range->mask + row * range->rows;
        seen.straight = seen.end = end = range->cached_len;
        for (int other = 0; other < range->rows; other++) {
            seen.end += seen.mask[other];
            if (other <= row) end += seen.mask[other];
        }
    }
    if (op->window) seen.begin = larger(seen.begin, end - op->window);
    return seen;
}

/* Pack a query as quads of int8 codes with its scale and sum, for score_codes. */
static void pack_codes(const float *x, int size, float *to) {
    const int padded = padded_columns(size);
    const float scale = scale_of_row(x, size);
    ints sum = broadcast_int(0);
    EACH_16(column, count, size) {
        const ints codes = codes_of(x + column, count, scale);
        store_quads((int32_t *)to + column / 4 * DOT_WORDS, codes, DOT_WORDS, DOT_WORDS);
        sum += codes;
    }
    int32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    memcpy(to + SUM_OF_QUERY(padded), &total, sizeof total);
    to[SCALE_OF_QUERY(padded)] = scale;
}

/* Pack the queries of the chunk, zero-padded, in the type of the keys. */
static void pack_queries(const Program *program, const ChunkWork *task) {
    const int size = task->size, padded = task->values.padded;
    for (int query = 0; query < task->queries; query++) {
        const size_t row = (size_t)(task->chunk->range->start + task->chunk->row + query / task->group);
        const size_t head = row * (size_t)task->op->heads + (size_t)(task->chunk->kv_head * task->group + query % task->group);
        const float *x = program->buffers[task->op->q] + head * (size_t)size;
        float *to = task->packed + query * padded;
        if (task->kind == KV_S8) {
            pack_codes(x, size, to);
            continue;
        }
        memset(to, 0, (size_t)whole_blocks(padded) * sizeof(float)); /* may reach into the next query, which is written later */
        memcpy(to, x, (size_t)size * sizeof(float));
        if (task->kind == KV_BF16) pack_pairs(to, 0, whole_blocks(padded));
    }
}

#define BY_KIND(call)                                       \
    switch (task->kind) {                                   \
        case KV_F32: { enum { KIND = KV_F32 }; call; break; }   \
        case KV_BF16: { enum { KIND = KV_BF16 }; call; break; } \
        case KV_F16: { enum { KIND = KV_F16 }; call; break; }   \
        default: { enum { KIND = KV_S8 }; call; break; }        \
    }
/* The same for values, of which int8 ones are multiplied as bfloat16. */
#define BY_KIND_OF_SUMS(call)                                   \
    switch (task->kind) {                                       \
        case KV_F32: { enum { KIND = KV_F32 }; call; break; }   \
        case KV_F16: { enum { KIND = KV_F16 }; call; break; }   \
        default: { enum { KIND = KV_BF16 }; call; break; }      \
    }

/* Compute scores of queries [first, end) with the rows of a block, prefetching `next` (NULL = nothing). */
INLINE void score_queries(const int kind, const ChunkWork *task, const uint8_t *keys, const uint8_t *const *next, int first, int end, float *scores, int room) {
    const int size = task->size, padded = task->values.padded, rest = (end - first) % KEY_QUERIES, fours = KEY_QUERIES > VALUE_QUERIES ? rest / VALUE_QUERIES : 0;
    Prefetch prefetch = make_prefetch(next, unit_bytes(kind, size), (end - first) / KEY_QUERIES + fours + rest - fours * VALUE_QUERIES, score_steps(kind, size));
    const float *q = task->packed;
    int query = first;
    for (; query + KEY_QUERIES <= end; query += KEY_QUERIES)
        score_tile(kind, keys, &prefetch, q + query * padded, size, scores + (query - first) * room, room, KEY_QUERIES);
    for (; KEY_QUERIES > VALUE_QUERIES && query + VALUE_QUERIES <= end; query += VALUE_QUERIES)
        score_tile(kind, keys, &prefetch, q + query * padded, size, scores + (query - first) * room, room, VALUE_QUERIES);
    for (; query < end; query++) score_tile(kind, keys, &prefetch, q + query * padded, size, scores + (query - first) * room, room, 1);
}

/* Compute scores of queries [first, end) with all rows of the blocks of slots [from, stop). */
static void score_slots(const ChunkWork *task, int first, int end, int from, int stop, const uint8_t *const *next, float *scores, int room) {
    for (int slot = from / SLOTS * SLOTS; slot < stop; slot += SLOTS) {
        const uint8_t *keys = task->keys + (size_t)task->values.table[slot / SLOTS] * task->values.stride;
        const uint8_t *const *soon = next ? next + slot / SLOTS - from / SLOTS : NULL;
        BY_KIND(score_queries(KIND, task, keys, soon, first, end, scores + slot - from / SLOTS * SLOTS, room))
    }
}

INLINE void add_columns(const int kind, const ChunkWork *task, const uint8_t *unit, Prefetch *prefetch, int from, int end, int query, const int queries) {
    const int padded = task->values.padded;
    const float *weights = task->scores + query * SPLIT;
    float *sums = task->sums + query * (padded + LANES);
    int begin = 0;
    for (; begin + VALUE_VECTORS * LANES <= padded; begin += VALUE_VECTORS * LANES)
        add_tile(kind, unit, padded, prefetch, from, end, task->base, weights, SPLIT, begin, sums, queries, VALUE_VECTORS);
    for (; begin < padded; begin += LANES) add_tile(kind, unit, padded, prefetch, from, end, task->base, weights, SPLIT, begin, sums, queries, 1);
}

/* Add weighted values of slots [from, end), all of one block, to the sums of queries [first, last), while the block is in the first-level cache. */
INLINE void add_block(const int kind, const ChunkWork *task, const uint8_t *unit, int from, int end, int first, int last) {
    const int parts = task->values.padded / LANES, columns = parts / VALUE_VECTORS + parts % VALUE_VECTORS, tiles = columns * ((last - first) / VALUE_QUERIES + (last - first) % VALUE_QUERIES);
    Prefetch prefetch = make_prefetch(task->values.next + from / SLOTS - task->values.first, unit_bytes(task->kind, task->size), tiles, add_steps(kind));
    int query = first;
    for (; query + VALUE_QUERIES <= last; query += VALUE_QUERIES) add_columns(kind, task, unit, &prefetch, from, end, query, VALUE_QUERIES);
    for (; query < last; query++) add_columns(kind, task, unit, &prefetch, from, end, query, 1);
}

/* Add weighted values of slots [from, end) to the sums of queries [first, last). */
static void add_slots(const ChunkWork *task, int from, int end, int first, int last) {
    for (int slot = from, stop; slot < end; slot = stop) {
        stop = smaller((slot | (SLOTS - 1)) + 1, end);
        const uint8_t *unit = task->values.values + (size_t)task->values.table[slot / SLOTS] * task->values.stride;
        if (task->kind == KV_S8) {
            widen_codes(unit, task->values.padded, task->wide);
            unit = task->wide;
        }
        BY_KIND_OF_SUMS(add_block(KIND, task, unit, slot, stop, first, last))
    }
}

/* List the slots of positions [from, end) of a row. */
static void list_slots(const ChunkWork *task, const Seen *seen, int from, int end) {
    int position = from;
    for (; position < smaller(seen->straight, end); position++) task->slots[position - from] = position;
    for (int other = 0, at = seen->straight; at < end; other++) {
        if (!seen->mask[other]) continue;
        if (at >= from) task->slots[at - from] = task->chunk->range->cached_len + other;
        at++;
    }
}

/* Compute the scores of a row with its op range under a mask: with all rows of the range, then copied to the row's positions. */
static void score_range(const ChunkWork *task, const Seen *seen, int row, int from, int end) {
    const int first = row * task->group, start = task->chunk->range->cached_len, skipped = start / SLOTS * SLOTS;
    const int stop = start + task->chunk->range->rows, room = whole_blocks(stop - skipped);
    score_slots(task, first, first + task->group, start, stop, NULL, task->range_scores, room);
    list_slots(task, seen, from, end);
    for (int query = 0; query < task->group; query++)
        for (int position = from; position < end; position++)
            task->scores[(first + query) * SPLIT + position - task->base] = task->range_scores[query * room + task->slots[position - from] - skipped];
}

static const float *scales_at(const ChunkWork *task, int slot) {
    return scales_of(task->values.values + (size_t)task->values.table[slot / SLOTS] * task->values.stride, task->size);
}

/* Multiply weights by the scales of int8 values. Rows not attended to keep weight 0, even if their scale is NaN. */
static void scale_weights(const ChunkWork *task, const Seen *seen, float *weights, int from, int end) {
    const int whole = seen->mask ? smaller(end, seen->straight / SLOTS * SLOTS) : end, begin = larger(from, whole);
    for (int slot = from / SLOTS * SLOTS; slot < whole; slot += SLOTS)
        for (int i = 0; i < SLOTS; i += LANES) {
            float *to = weights + slot + i - task->base;
            store(to, load(to) * load(scales_at(task, slot) + i));
        }
    if (from < whole) {
        for (int slot = from / SLOTS * SLOTS; slot < from; slot++) weights[slot - task->base] = 0.0f;
        for (int slot = whole; slot < whole_blocks(whole); slot++) weights[slot - task->base] = 0.0f;
    }
    if (begin >= end) return;
    list_slots(task, seen, begin, end);
    for (int position = begin; position < end; position++) {
        const int slot = task->slots[position - begin];
        weights[position - task->base] *= scales_at(task, slot)[slot % SLOTS];
    }
}

/* Turn the scores of positions [from, end) into softmax weights. stats: the maximum (as an exponent of 2) and the sum of the weights. */
static void softmax_split(const ChunkWork *task, const Seen *seen, float *scores, int from, int end, float *stats) {
    const int begin = from - task->base, stop = end - task->base, first = begin / SLOTS * SLOTS, last = whole_blocks(stop);
    float factor = task->op->scale * LOG2_E;
    if (task->op->soft_cap > 0.0f) {
        scale(scores + first, last - first, task->op->scale, scores + first);
        soft_cap(scores + first, last - first, task->op->soft_cap, scores + first);
        factor = LOG2_E;
    }
    for (int i = first; i < begin; i++) scores[i] = -__builtin_inff();
    for (int i = stop; i < last; i++) scores[i] = -__builtin_inff();
    stats[0] = largest_score(scores, first, last) * factor;
    if (task->kind == KV_BF16)
        stats[1] = exp2_weights(scores, first, last, factor, stats[0], 1);
    else
        stats[1] = exp2_weights(scores, first, last, factor, stats[0], 0);
    if (task->kind == KV_S8) {
        scale_weights(task, seen, scores, from, end);
        pack_pairs(scores, first, last);
    }
}

/* Add the weighted values of positions [from, end) of each row. Slots that all rows attend to are read once. Splits at even slots, because bfloat16
 * is stored in pairs. */
static void add_values(const ChunkWork *task, const int *from, const int *end) {
    const int rows = task->chunk->rows, group = task->group;
    int stop[MAX_QUERIES], first = 0, last = task->base + SPLIT;
    for (int row = 0; row < rows; row++) {
        const Seen *seen = task->seen + row;
        stop[row] = end[row] > seen->straight ? larger(from[row], seen->straight / 2 * 2) : end[row];
        first = larger(first, (from[row] + 1) / 2 * 2);
        last = smaller(last, stop[row] / 2 * 2);
        if (from[row] >= end[row]) stop[row] = last = -1;
    }
    if (first >= last) first = last = 0;
    for (int row = 0; row < rows; row++) add_slots(task, from[row], first < last ? smaller(first, stop[row]) : stop[row], row * group, (row + 1) * group);
    add_slots(task, first, last, 0, rows * group);
    for (int row = 0; row < rows; row++) {
        const int begin = row * group;
        if (first < last) add_slots(task, last, stop[row], begin, begin + group);
        if (stop[row] < 0 || stop[row] >= end[row]) continue;
        list_slots(task, task->seen + row, stop[row], end[row]);
        const float *weights = task->scores + begin * SPLIT;
        float *sums = task->sums + begin * split_result_floats(task->op);
        BY_KIND(add_listed(KIND, &task->values, task->slots, stop[row], end[row], task->base, weights, SPLIT, sums, group))
    }
}

/* List the units to prefetch: those of this split from slot `first` to `last`, and the next ones. */
static void list_prefetches(ChunkWork *task, int first, int last) {
    const int begin = first / SLOTS, blocks = first < last ? whole_blocks(last) / SLOTS - begin : 0;
    const int total = (task->chunk->range->cached_len + task->chunk->range->rows - 1) / SLOTS;
    const uint8_t *values = task->values.values + (size_t)task->values.table[smaller(begin, total)] * task->values.stride;
    for (int i = 0; i < 2 * blocks + AHEAD; i++) {
        const int block = i < blocks ? begin + i : begin + i - blocks;
        const uint8_t *side = i >= blocks && i < 2 * blocks ? task->values.values : task->keys;
        task->ahead[i] = block <= total ? side + (size_t)task->values.table[block] * task->values.stride : values;
    }
    task->values.next = task->ahead + blocks + AHEAD;
    task->values.first = begin;
}

static void run_split(ChunkWork *task, int split, float *parts) {
    const int rows = task->chunk->rows, group = task->group, result_floats = split_result_floats(task->op);
    int from[MAX_QUERIES], end[MAX_QUERIES], first = (split + 1) * SPLIT, last = 0;
    task->base = split * SPLIT;
    task->sums = parts;
    memset(parts, 0, (size_t)(task->queries * result_floats) * sizeof(float));
    for (int row = 0; row < rows; row++) {
        const Seen *seen = task->seen + row;
        from[row] = larger(seen->begin, task->base);
        end[row] = smaller(seen->end, task->base + SPLIT);
        if (from[row] >= end[row]) continue;
        first = smaller(first, from[row]);
        last = larger(last, smaller(seen->straight, end[row]));
    }
    list_prefetches(task, first, last);
    if (first < last)
        score_slots(task, 0, task->queries, first, last, task->ahead + AHEAD, task->scores + first / SLOTS * SLOTS - task->base, SPLIT);
    for (int row = 0; row < rows; row++) {
        const Seen *seen = task->seen + row;
        if (from[row] >= end[row]) continue;
        if (end[row] > seen->straight) score_range(task, seen, row, larger(from[row], seen->straight), end[row]);
        for (int query = row * group; query < (row + 1) * group; query++)
            softmax_split(task, seen, task->scores + query * SPLIT, from[row], end[row], parts + query * result_floats + task->values.padded);
    }
    add_values(task, from, end);
}

/* Merge the result of later positions into `running`. A sum of weights of 0 means that the row attends to nothing in the split. */
static void merge(float *running, const float *part, int padded) {
    const float *stats = part + padded;
    float *total = running + padded;
    if (stats[1] == 0.0f) return;
    if (total[1] == 0.0f) {
        memcpy(running, part, (size_t)(padded + 2) * sizeof(float));
        return;
    }
    const float more = stats[0] - total[0], share = power_of_two(more > 0.0f ? -more : more);
    const floats old = broadcast(more > 0.0f ? share : 1.0f), new = broadcast(more > 0.0f ? 1.0f : share);
    for (int i = 0; i < padded; i += LANES) store(running + i, fused(load(part + i), new, load(running + i) * old));
    total[1] = total[1] * old[0] + stats[1] * new[0];
    total[0] = more > 0.0f ? stats[0] : total[0];
}

static void merge_all(const AttentionOperation *op, const Chunk *chunk, float *running, const float *parts) {
    const int result_floats = split_result_floats(op), queries = chunk->rows * group_of(op);
    for (int query = 0; query < queries; query++) merge(running + query * result_floats, parts + query * result_floats, result_floats - LANES);
}

void finish_attention(const Program *program, const AttentionOperation *op, const Chunk *chunk, float *parts, int count, size_t stride) {
    const int group = group_of(op), result_floats = split_result_floats(op), padded = result_floats - LANES;
    for (int split = 1; split < count; split++) merge_all(op, chunk, parts, parts + (size_t)split * stride);
    for (int query = 0; query < chunk->rows * group; query++) {
        const int head = chunk->kv_head * group + query % group;
        const size_t row = (size_t)(chunk->range->start + chunk->row + query / group);
        float *sums = parts + query * result_floats, share = 1.0f / sums[padded + 1];
        if (op->sinks) {
            const float sink = op->sinks[head] * LOG2_E, largest = sink > sums[padded] ? sink : sums[padded];
            const float factor = power_of_two(sums[padded] - largest);
            share = factor / (sums[padded + 1] * factor + power_of_two(sink - largest));
        }
        scale(sums, op->head_size, share, program->buffers[op->head.out] + (row * (size_t)op->heads + (size_t)head) * (size_t)op->head_size);
    }
}

/* Set up the work on a chunk in `scratch`; return the unused rest of it. */
static float *prepare(ChunkWork *task, Seen *seen, const Program *program, const Pass *pass, const AttentionOperation *op, const Chunk *chunk, float *scratch) {
    const int padded = padded_columns(op->head_size), queries = larger(MAX_QUERIES, group_of(op));
    const size_t range_scores = (size_t)(whole_blocks(chunk->range->rows) + SLOTS);
    *task = (ChunkWork){.op = op, .chunk = chunk, .seen = seen, .kind = program->kv_kind, .group = group_of(op), .size = op->head_size};
    task->queries = chunk->rows * task->group;
    task->keys = kv_base(program, op, 0, chunk->kv_head);
    task->values = (Values){kv_base(program, op, 1, chunk->kv_head), NULL, 0, table_of(pass, op, chunk->range), block_bytes(program, op), padded};
    task->packed = scratch;
    task->wide = (uint8_t *)(task->packed + queries * padded + 2 * LANES);
    task->scores = task->packed + queries * padded + 2 * LANES + SLOTS / 2 * padded;
    task->range_scores = task->scores + queries * SPLIT;
    task->slots = (int32_t *)(task->range_scores + (size_t)task->group * range_scores);
    for (int row = 0; row < chunk->rows; row++) seen[row] = seen_of(pass, op, chunk->range, chunk->row + row);
    pack_queries(program, task);
    return (float *)task->slots + SPLIT + range_scores;
}

void attend_splits(const Program *program, const Pass *pass, const AttentionOperation *op, const Chunk *chunk, int first, int count, float *scratch, float *parts, size_t stride) {
    ChunkWork task;
    Seen seen[MAX_QUERIES];
    prepare(&task, seen, program, pass, op, chunk, scratch);
    for (int i = 0; i < count; i++) run_split(&task, first + i, parts + (size_t)i * stride);
}

void attend(const Program *program, const Pass *pass, const AttentionOperation *op, const Chunk *chunk, float *scratch) {
    ChunkWork task;
    Seen seen[MAX_QUERIES];
    float *running = prepare(&task, seen, program, pass, op, chunk, scratch), *parts = running + task.queries * split_result_floats(op);
    int first, end;
    splits_of(op, chunk, &first, &end);
    run_split(&task, first, running);
    for (int split = first + 1; split < end; split++) {
        run_split(&task, split, parts);
        merge_all(op, chunk, running, parts);
    }
    finish_attention(program, op, chunk, running, 1, 0);
}
