/* Attention over blocks of cached rows. A row sees the cached rows and, of its own range, what comes before it or what its mask allows: a
 * path, in which every row has a position. Positions are worked through in splits that begin at fixed ones, and what splits give is merged in
 * their order: a row's bits depend on its own path alone, whoever else is in the pass and however the splits are shared out. */
#include "attention.h"
#include "attention_tiles.h"
#include "row_codes.h"

/* Blocks that are asked for early, for the second-level cache: they lie anywhere in memory. */
#define AHEAD 2

/* A row sees positions [begin, end): those before `known` lie in the slot of the same number, of the rest `mask` says which of the range's
 * rows they are. */
typedef struct {
    int begin, known, end;
    const uint8_t *mask;
} Seen;

/* What a split of a chunk is worked on with; arrays have an entry, or a row, for each query. */
typedef struct {
    const AttentionOperation *own;
    const Chunk *chunk;
    const Seen *seen; /* [rows] */
    Values values;
    const uint8_t *keys;
    int kind, group, queries, size, base; /* base: the first position of the split */
    float *packed;  /* [queries][padded] */
    uint8_t *wide;  /* the values of a block of codes as bfloat16 */
    float *scores;  /* [queries][SPLIT] */
    float *of_range; /* [group][rows of the range, padded to blocks, and one more] */
    int32_t *slots; /* of some positions of one row */
    float *sums;    /* [queries][part_floats] */
    const uint8_t *ahead[2 * SPLIT / SLOTS + AHEAD]; /* the units of the split in the order they are read, and what follows */
} Task;

static int smaller(int a, int b) { return a < b ? a : b; }
static int larger(int a, int b) { return a > b ? a : b; }
static int whole_blocks(int slots) { return (slots + SLOTS - 1) / SLOTS * SLOTS; }
static int group_of(const AttentionOperation *own) { return own->heads / own->kv_heads; }

int chunk_rows(const AttentionOperation *own) { return larger(1, MOST_QUERIES / group_of(own)); }
int part_floats(const AttentionOperation *own) { return padded_columns(own->head_size) + LANES; }

/* Whether the mask of a range counts in a layer. */
static int has_mask_of(const AttentionOperation *own, const Range *range) { return range->mask >= 0 && !own->is_causal; }

void splits_of(const AttentionOperation *own, const Chunk *chunk, int *first, int *end) {
    const Range *range = chunk->range;
    const int has_mask = has_mask_of(own, range), row = has_mask ? 0 : chunk->row;
    const int begin = own->window ? range->cached_len + row + 1 - own->window : 0;
    *first = larger(begin, range->first_slot) / SPLIT;
    *end = (range->cached_len + (has_mask ? range->rows : chunk->row + chunk->rows) + SPLIT - 1) / SPLIT;
}

/* Floats that a thread works in, for a pass of so many rows. */
int64_t paceline_attention_floats(int32_t group, int32_t head_size, int32_t rows) {
    const int64_t queries = larger(MOST_QUERIES, group), padded = padded_columns(head_size);
    return queries * (padded + SPLIT + 2 * (padded + LANES)) + SLOTS / 2 * padded + (group + 1) * (int64_t)(whole_blocks(rows) + SLOTS) + SPLIT + 2 * LANES;
}

static Seen seen_of(const Pass *pass, const AttentionOperation *own, const Range *range, int row) {
    Seen seen = {range->first_slot, range->cached_len + row + 1, range->cached_len + row + 1, 0};
    int end = seen.end; /* of the row and those before it, from which a window counts */
    if (has_mask_of(own, range)) {
        seen.mask = pass->masks + range->mask + row * range->rows;
        seen.known = seen.end = end = range->cached_len;
        for (int other = 0; other < range->rows; other++) {
            seen.end += seen.mask[other];
            if (other <= row) end += seen.mask[other];
        }
    }
    if (own->window) seen.begin = larger(seen.begin, end - own->window);
    return seen;
}

/* A query as quads of codes, its scale and their sum, which keys are multiplied with as score_codes does it. */
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

/* Queries of the chunk one behind another, with zeros behind each; as pairs of bfloat16 or as codes where keys are. */
static void pack_queries(const Program *program, const Task *task) {
    const int size = task->size, padded = task->values.padded;
    for (int query = 0; query < task->queries; query++) {
        const size_t row = (size_t)(task->chunk->range->start + task->chunk->row + query / task->group);
        const size_t head = row * (size_t)task->own->heads + (size_t)(task->chunk->kv_head * task->group + query % task->group);
        const float *x = program->buffers[task->own->q] + head * (size_t)size;
        float *to = task->packed + query * padded;
        if (task->kind == KV_S8) {
            pack_codes(x, size, to);
            continue;
        }
        memset(to, 0, (size_t)whole_blocks(padded) * sizeof(float)); /* and the beginning of the next */
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
/* The same where codes are multiplied as bfloat16. */
#define BY_KIND_OF_SUMS(call)                                   \
    switch (task->kind) {                                       \
        case KV_F32: { enum { KIND = KV_F32 }; call; break; }   \
        case KV_F16: { enum { KIND = KV_F16 }; call; break; }   \
        default: { enum { KIND = KV_BF16 }; call; break; }      \
    }

/* Scores of queries [first, end) with the rows of a block; `next` is asked for meanwhile (NULL = nothing). */
INLINE void score_queries(const int kind, const Task *task, const uint8_t *keys, const uint8_t *const *next, int first, int end, float *scores, int room) {
    const int size = task->size, padded = task->values.padded, rest = (end - first) % SCORED, fours = SCORED > QUERIES ? rest / QUERIES : 0;
    Early early = early_of(next, unit_bytes(kind, size), (end - first) / SCORED + fours + rest - fours * QUERIES, score_steps(kind, size));
    const float *q = task->packed;
    int query = first;
    for (; query + SCORED <= end; query += SCORED)
        score_tile(kind, keys, &early, q + query * padded, size, scores + (query - first) * room, room, SCORED);
    for (; SCORED > QUERIES && query + QUERIES <= end; query += QUERIES)
        score_tile(kind, keys, &early, q + query * padded, size, scores + (query - first) * room, room, QUERIES);
    for (; query < end; query++) score_tile(kind, keys, &early, q + query * padded, size, scores + (query - first) * room, room, 1);
}

/* Scores of queries [first, end) with all rows of the blocks that slots [from, stop) are in. */
static void score_slots(const Task *task, int first, int end, int from, int stop, const uint8_t *const *next, float *scores, int room) {
    for (int slot = from / SLOTS * SLOTS; slot < stop; slot += SLOTS) {
        const uint8_t *keys = task->keys + (size_t)task->values.table[slot / SLOTS] * task->values.stride;
        const uint8_t *const *soon = next ? next + slot / SLOTS - from / SLOTS : NULL;
        BY_KIND(score_queries(KIND, task, keys, soon, first, end, scores + slot - from / SLOTS * SLOTS, room))
    }
}

INLINE void add_columns(const int kind, const Task *task, const uint8_t *unit, Early *early, int from, int end, int query, const int queries) {
    const int padded = task->values.padded;
    const float *weights = task->scores + query * SPLIT;
    float *sums = task->sums + query * (padded + LANES);
    int begin = 0;
    for (; begin + PARTS * LANES <= padded; begin += PARTS * LANES)
        add_tile(kind, unit, padded, early, from, end, task->base, weights, SPLIT, begin, sums, queries, PARTS);
    for (; begin < padded; begin += LANES) add_tile(kind, unit, padded, early, from, end, task->base, weights, SPLIT, begin, sums, queries, 1);
}

/* Values of slots [from, end), all of one block, onto the sums of queries [first, last): all of them while it is in the fastest cache. */
INLINE void add_block(const int kind, const Task *task, const uint8_t *unit, int from, int end, int first, int last) {
    const int parts = task->values.padded / LANES, columns = parts / PARTS + parts % PARTS, tiles = columns * ((last - first) / QUERIES + (last - first) % QUERIES);
    Early early = early_of(task->values.next + from / SLOTS - task->values.first, unit_bytes(task->kind, task->size), tiles, add_steps(kind));
    int query = first;
    for (; query + QUERIES <= last; query += QUERIES) add_columns(kind, task, unit, &early, from, end, query, QUERIES);
    for (; query < last; query++) add_columns(kind, task, unit, &early, from, end, query, 1);
}

/* Values of slots [from, end) onto the sums of queries [first, last). */
static void add_slots(const Task *task, int from, int end, int first, int last) {
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

/* The slots of positions [from, end) of a row, in their order. */
static void list_slots(const Task *task, const Seen *seen, int from, int end) {
    int position = from;
    for (; position < smaller(seen->known, end); position++) task->slots[position - from] = position;
    for (int other = 0, at = seen->known; at < end; other++) {
        if (!seen->mask[other]) continue;
        if (at >= from) task->slots[at - from] = task->chunk->range->cached_len + other;
        at++;
    }
}

/* Scores of a row's own range, where its mask says which it sees: those of all its rows, then at the place of its positions. */
static void score_range(const Task *task, const Seen *seen, int row, int from, int end) {
    const int first = row * task->group, start = task->chunk->range->cached_len, skipped = start / SLOTS * SLOTS;
    const int stop = start + task->chunk->range->rows, room = whole_blocks(stop - skipped);
    score_slots(task, first, first + task->group, start, stop, NULL, task->of_range, room);
    list_slots(task, seen, from, end);
    for (int query = 0; query < task->group; query++)
        for (int position = from; position < end; position++)
            task->scores[(first + query) * SPLIT + position - task->base] = task->of_range[query * room + task->slots[position - from] - skipped];
}

static const float *scales_at(const Task *task, int slot) {
    return scales_of(task->values.values + (size_t)task->values.table[slot / SLOTS] * task->values.stride, task->size);
}

/* Weights times the scales of the values' rows; what is not seen stays nothing, whatever scale it has. */
static void scale_weights(const Task *task, const Seen *seen, float *weights, int from, int end) {
    const int whole = seen->mask ? smaller(end, seen->known / SLOTS * SLOTS) : end, begin = larger(from, whole);
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

/* Scores of positions [from, end) become weights of base 2; the largest score, as an exponent of it, and the weights' sum are told. */
static void weigh(const Task *task, const Seen *seen, float *scores, int from, int end, float *told) {
    const int begin = from - task->base, stop = end - task->base, first = begin / SLOTS * SLOTS, last = whole_blocks(stop);
    float factor = task->own->scale * LOG2_E;
    if (task->own->soft_cap > 0.0f) {
        scale(scores + first, last - first, task->own->scale, scores + first);
        soft_cap(scores + first, last - first, task->own->soft_cap, scores + first);
        factor = LOG2_E;
    }
    for (int i = first; i < begin; i++) scores[i] = -__builtin_inff();
    for (int i = stop; i < last; i++) scores[i] = -__builtin_inff();
    told[0] = largest_score(scores, first, last) * factor;
    if (task->kind == KV_BF16)
        told[1] = weights_of(scores, first, last, factor, told[0], 1);
    else
        told[1] = weights_of(scores, first, last, factor, told[0], 0);
    if (task->kind == KV_S8) {
        scale_weights(task, seen, scores, from, end);
        pack_pairs(scores, first, last);
    }
}

/* Values of positions onto the sums of each row: those of the slots that all rows see are read once. `from` and `end`: what each row sees in
 * the split. Pairs of rows stay together. */
static void add_values(const Task *task, const int *from, const int *end) {
    const int rows = task->chunk->rows, group = task->group;
    int stop[MOST_QUERIES], first = 0, last = task->base + SPLIT;
    for (int row = 0; row < rows; row++) {
        const Seen *seen = task->seen + row;
        stop[row] = end[row] > seen->known ? larger(from[row], seen->known / 2 * 2) : end[row];
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
        float *sums = task->sums + begin * part_floats(task->own);
        BY_KIND(add_listed(KIND, &task->values, task->slots, stop[row], end[row], task->base, weights, SPLIT, sums, group))
    }
}

/* Name what is read in this split, from slot `first` to `last`, and behind it. */
static void look_ahead(Task *task, int first, int last) {
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

static void run_split(Task *task, int split, float *parts) {
    const int rows = task->chunk->rows, group = task->group, floats_a_part = part_floats(task->own);
    int from[MOST_QUERIES], end[MOST_QUERIES], first = (split + 1) * SPLIT, last = 0;
    task->base = split * SPLIT;
    task->sums = parts;
    memset(parts, 0, (size_t)(task->queries * floats_a_part) * sizeof(float));
    for (int row = 0; row < rows; row++) {
        const Seen *seen = task->seen + row;
        from[row] = larger(seen->begin, task->base);
        end[row] = smaller(seen->end, task->base + SPLIT);
        if (from[row] >= end[row]) continue;
        first = smaller(first, from[row]);
        last = larger(last, smaller(seen->known, end[row]));
    }
    look_ahead(task, first, last);
    if (first < last)
        score_slots(task, 0, task->queries, first, last, task->ahead + AHEAD, task->scores + first / SLOTS * SLOTS - task->base, SPLIT);
    for (int row = 0; row < rows; row++) {
        const Seen *seen = task->seen + row;
        if (from[row] >= end[row]) continue;
        if (end[row] > seen->known) score_range(task, seen, row, larger(from[row], seen->known), end[row]);
        for (int query = row * group; query < (row + 1) * group; query++)
            weigh(task, seen, task->scores + query * SPLIT, from[row], end[row], parts + query * floats_a_part + task->values.padded);
    }
    add_values(task, from, end);
}

/* `running` takes in a part of later positions. Whoever sees nothing in a split has weights that sum up to 0, and only he. */
static void merge(float *running, const float *part, int padded) {
    const float *told = part + padded;
    float *kept = running + padded;
    if (told[1] == 0.0f) return;
    if (kept[1] == 0.0f) {
        memcpy(running, part, (size_t)(padded + 2) * sizeof(float));
        return;
    }
    const float more = told[0] - kept[0], share = power_of_two(more > 0.0f ? -more : more);
    const floats old = broadcast(more > 0.0f ? share : 1.0f), new = broadcast(more > 0.0f ? 1.0f : share);
    for (int i = 0; i < padded; i += LANES) store(running + i, fused(load(part + i), new, load(running + i) * old));
    kept[1] = kept[1] * old[0] + told[1] * new[0];
    kept[0] = more > 0.0f ? told[0] : kept[0];
}

static void merge_all(const AttentionOperation *own, const Chunk *chunk, float *running, const float *parts) {
    const int floats_a_part = part_floats(own), queries = chunk->rows * group_of(own);
    for (int query = 0; query < queries; query++) merge(running + query * floats_a_part, parts + query * floats_a_part, floats_a_part - LANES);
}

void finish_attention(const Program *program, const AttentionOperation *own, const Chunk *chunk, float *parts, int count, size_t stride) {
    const int group = group_of(own), floats_a_part = part_floats(own), padded = floats_a_part - LANES;
    for (int split = 1; split < count; split++) merge_all(own, chunk, parts, parts + (size_t)split * stride);
    for (int query = 0; query < chunk->rows * group; query++) {
        const int head = chunk->kv_head * group + query % group;
        const size_t row = (size_t)(chunk->range->start + chunk->row + query / group);
        float *sums = parts + query * floats_a_part, share = 1.0f / sums[padded + 1];
        if (own->sinks) {
            const float sink = own->sinks[head] * LOG2_E, largest = sink > sums[padded] ? sink : sums[padded];
            const float factor = power_of_two(sums[padded] - largest);
            share = factor / (sums[padded + 1] * factor + power_of_two(sink - largest));
        }
        scale(sums, own->head_size, share, program->buffers[own->head.out] + (row * (size_t)own->heads + (size_t)head) * (size_t)own->head_size);
    }
}

/* What is needed for a chunk, in `scratch`; returns what is left of it. */
static float *prepare(Task *task, Seen *seen, const Program *program, const Pass *pass, const AttentionOperation *own, const Chunk *chunk, float *scratch) {
    const int padded = padded_columns(own->head_size), queries = larger(MOST_QUERIES, group_of(own));
    const size_t of_range = (size_t)(whole_blocks(chunk->range->rows) + SLOTS);
    *task = (Task){.own = own, .chunk = chunk, .seen = seen, .kind = program->kv_kind, .group = group_of(own), .size = own->head_size};
    task->queries = chunk->rows * task->group;
    task->keys = side_of(program, own, 0, chunk->kv_head);
    task->values = (Values){side_of(program, own, 1, chunk->kv_head), NULL, 0, table_of(pass, own, chunk->range), block_bytes(program, own), padded};
    task->packed = scratch;
    task->wide = (uint8_t *)(task->packed + queries * padded + 2 * LANES);
    task->scores = task->packed + queries * padded + 2 * LANES + SLOTS / 2 * padded;
    task->of_range = task->scores + queries * SPLIT;
    task->slots = (int32_t *)(task->of_range + (size_t)task->group * of_range);
    for (int row = 0; row < chunk->rows; row++) seen[row] = seen_of(pass, own, chunk->range, chunk->row + row);
    pack_queries(program, task);
    return (float *)task->slots + SPLIT + of_range;
}

void attend_splits(const Program *program, const Pass *pass, const AttentionOperation *own, const Chunk *chunk, int first, int count, float *scratch, float *parts, size_t stride) {
    Task task;
    Seen seen[MOST_QUERIES];
    prepare(&task, seen, program, pass, own, chunk, scratch);
    for (int i = 0; i < count; i++) run_split(&task, first + i, parts + (size_t)i * stride);
}

void attend(const Program *program, const Pass *pass, const AttentionOperation *own, const Chunk *chunk, float *scratch) {
    Task task;
    Seen seen[MOST_QUERIES];
    float *running = prepare(&task, seen, program, pass, own, chunk, scratch), *parts = running + task.queries * part_floats(own);
    int first, end;
    splits_of(own, chunk, &first, &end);
    run_split(&task, first, running);
    for (int split = first + 1; split < end; split++) {
        run_split(&task, split, parts);
        merge_all(own, chunk, running, parts);
    }
    finish_attention(program, own, chunk, running, 1, 0);
}
