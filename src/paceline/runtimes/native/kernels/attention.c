/* Attention over blocks of cached rows. A row sees the cached rows and, of its own range, what comes before it or what its mask
 * allows; they are visited in the order of their slots, so skipping some leaves the arithmetic that decoding alone would do. */
#include "native.h"
#include "vectors.h"

/* Rows of the cache that one call works through before it turns to the next query head: their keys stay in the nearest cache. */
#define STRETCH 64

/* The cache holds, for each layer, keys (side 0) and values (side 1) as [num_blocks][kv_heads][block_size][head_size]. */
static float *side_of(const Program *program, int layer, int side, int kv_head) {
    const size_t plane = (size_t)(2 * layer + side) * (size_t)program->num_blocks * (size_t)program->kv_heads + (size_t)kv_head;
    return program->cache + plane * (size_t)program->block_size * (size_t)program->head_size;
}

/* Row of a slot, counted from `side_of`. */
static int32_t row_of(const Program *program, const int32_t *table, int slot) {
    return table[slot / program->block_size] * program->kv_heads * program->block_size + slot % program->block_size;
}

/* Write one row's k and v [kv_heads * head_size] to its slot. */
void keep_row(const Program *program, const Pass *pass, int layer, int row, const float *k, const float *v) {
    const Range *range = pass->ranges + pass->range_of_row[row];
    const size_t size = (size_t)program->head_size;
    const int32_t place = row_of(program, pass->block_tables + range->table, range->cached_len + row - range->start);
    for (int head = 0; head < program->kv_heads; head++) {
        memcpy(side_of(program, layer, 0, head) + (size_t)place * size, k + (size_t)head * size, size * sizeof(float));
        memcpy(side_of(program, layer, 1, head) + (size_t)place * size, v + (size_t)head * size, size * sizeof(float));
    }
}

/* Rows of the cache that `row` may see, in the order of their slots. */
static int visible_rows(const Program *program, const Pass *pass, const Range *range, int row, int32_t *visible) {
    const int32_t *table = pass->block_tables + range->table;
    const int index = row - range->start, size = program->block_size, causal = range->mask < 0;
    const int known = range->cached_len + (causal ? index + 1 : 0);
    int count = 0, slot = range->first_slot;
    while (slot < known) {
        const int32_t first = table[slot / size] * program->kv_heads * size;
        for (int32_t in_block = slot % size; in_block < size && slot < known; in_block++, slot++) visible[count++] = first + in_block;
    }
    if (!causal)
        for (int other = 0; other < range->rows; other++)
            if (pass->masks[range->mask + index * range->rows + other]) visible[count++] = row_of(program, table, range->cached_len + other);
    return count;
}

INLINE float dot(const float *a, const float *b, int size) {
    floats sum = broadcast(0.0f);
    int i = 0;
    for (; i + LANES <= size; i += LANES) sum = fused(load(a + i), load(b + i), sum);
    if (i < size) sum = fused(load_first(a + i, size - i), load_first(b + i, size - i), sum);
    return lane_sum(sum);
}

/* Scores to weights that are not yet divided by their sum, which is returned. `count` is followed by 16 floats of room. */
static float soften(float *scores, int count) {
    float largest = scores[0];
    for (int i = 1; i < count; i++) largest = scores[i] > largest ? scores[i] : largest;
    floats sum = broadcast(0.0f);
    for (int i = count; i < count + LANES; i++) scores[i] = -__builtin_inff();
    for (int i = 0; i < count; i += LANES) {
        const floats weight = exponential(load(scores + i) - broadcast(largest));
        store(scores + i, weight);
        sum += weight;
    }
    return lane_sum(sum);
}

/* sum += weights[i] * values[rows[i]] over `count` rows of `size` floats, in order. */
static void add_weighted(const float *values, const int32_t *rows, const float *weights, int count, int size, float *sum) {
    int i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES) {
        floats a = load(sum + i), b = load(sum + i + LANES), c = load(sum + i + 2 * LANES), d = load(sum + i + 3 * LANES);
        for (int j = 0; j < count; j++) {
            const float *from = values + (size_t)rows[j] * (size_t)size + i;
            const floats weight = broadcast(weights[j]);
            a = fused(weight, load(from), a);
            b = fused(weight, load(from + LANES), b);
            c = fused(weight, load(from + 2 * LANES), c);
            d = fused(weight, load(from + 3 * LANES), d);
        }
        store(sum + i, a), store(sum + i + LANES, b), store(sum + i + 2 * LANES, c), store(sum + i + 3 * LANES, d);
    }
    for (; i < size; i += LANES) {
        const int width = size - i < LANES ? size - i : LANES;
        floats a = load_first(sum + i, width);
        for (int j = 0; j < count; j++)
            a = fused(broadcast(weights[j]), load_first(values + (size_t)rows[j] * (size_t)size + i, width), a);
        memcpy(sum + i, &a, (size_t)width * sizeof(float));
    }
}

/* The query heads of `kv_head` in one row. Scratch: the visible rows, then each head's scores. */
void attend(const Program *program, const Pass *pass, const Operation *operation, int row, int kv_head, float *scratch) {
    const int size = program->head_size, group = program->heads / program->kv_heads, room = program->max_context + LANES;
    int32_t *visible = (int32_t *)scratch;
    float *scores = scratch + room;
    const int count = visible_rows(program, pass, pass->ranges + pass->range_of_row[row], row, visible);
    const size_t place = ((size_t)row * (size_t)program->heads + (size_t)(kv_head * group)) * (size_t)size;
    const float *q = program->buffers[operation->x] + place, *keys = side_of(program, operation->choice, 0, kv_head);
    const float *values = side_of(program, operation->choice, 1, kv_head);
    float *out = program->buffers[operation->out] + place;
    for (int from = 0; from < count; from += STRETCH)
        for (int head = 0; head < group; head++)
            for (int i = from; i < from + STRETCH && i < count; i++)
                scores[head * room + i] = dot(q + head * size, keys + (size_t)visible[i] * (size_t)size, size) * operation->number;
    for (int head = 0; head < group; head++) {
        float *own = scores + head * room;
        if (operation->limit > 0.0f) soft_cap(own, count, operation->limit, own);
        const float share = 1.0f / soften(own, count);
        for (int i = 0; i < count; i += LANES) store(own + i, load(own + i) * broadcast(share));
    }
    memset(out, 0, (size_t)(group * size) * sizeof(float));
    for (int from = 0; from < count; from += STRETCH)
        for (int head = 0; head < group; head++)
            add_weighted(values, visible + from, scores + head * room + from, count - from < STRETCH ? count - from : STRETCH, size, out + head * size);
}
