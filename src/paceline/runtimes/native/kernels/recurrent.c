/* What rows bring to the states of layers that keep one for a whole text: short convolutions, and the keys, queries and gates of recurrent
 * matrices, which state_blocks.c goes on with. */
#include "native.h"
#include "state_rows.h"
#include "vectors.h"

#include <math.h>

/* Input number i of a sequence, counted from the first pending one; those before it are in the state. Known rows follow one another. */
static const float *input_at(const StateRange *range, const ConvolutionOperation *own, const float *x, const float *kept, int i, int channel) {
    if (i < 0) return kept + (own->kernel_size - 1 + i) * PIECE_CHANNELS;
    if (i < range->num_pending)
        return record_of(range, range->pending[i]) + own->record_at + channel;
    return x + (size_t)(i - range->num_pending) * (size_t)own->channels + channel;
}

/* The last inputs before number `end`, as a state has them. */
static void keep_inputs(const StateRange *range, const ConvolutionOperation *own, const float *x, const float *kept, int end, int channel,
                        int count, float *state) {
    const int behind = own->kernel_size - 1;
    for (int i = 0; i < behind; i++)
        memcpy(state + own->conv_at + (size_t)i * (size_t)own->channels + channel, input_at(range, own, x, kept, end - behind + i, channel),
               (size_t)count * sizeof(float));
}

INLINE void convolve_row_of(const ConvolutionOperation *own, const float *const *inputs, int channel, int count, float *out, int size) {
    EACH_16(column, left, count) {
        floats sum = own->bias ? load_part(own->bias + channel + column, left) : broadcast(0.0f);
        for (int i = 0; i < size; i++) {
            const float *weight = own->weight + (size_t)i * (size_t)own->channels + channel + column;
            sum = fused(load_part(weight, left), load_part(inputs[i] + column, left), sum);
        }
        if (own->is_activated) sum = sum * sigmoid(sum);
        store_part(out + column, sum, left);
    }
}

static void convolve_row(const ConvolutionOperation *own, const float *const *inputs, int channel, int count, float *out) {
    if (own->kernel_size == 4)
        convolve_row_of(own, inputs, channel, count, out, 4);
    else
        convolve_row_of(own, inputs, channel, count, out, own->kernel_size);
}

/* Channels [channel, channel + count) of the rows of a range; x and out are those of its first row. */
void convolve(const StateRange *range, const ConvolutionOperation *own, int rows, int channel, int count, const float *x, float *out) {
    float kept[(MAX_KERNEL_SIZE - 1) * PIECE_CHANNELS];
    const int behind = own->kernel_size - 1;
    memset(kept, 0, (size_t)behind * PIECE_CHANNELS * sizeof(float));
    for (int i = 0; range->state && i < behind; i++)
        memcpy(kept + i * PIECE_CHANNELS, range->state + own->conv_at + (size_t)i * (size_t)own->channels + channel, (size_t)count * sizeof(float));
    for (int i = 0; i < range->num_saves; i++)
        keep_inputs(range, own, x, kept, (int)range->saves[i].count, channel, count, range->saves[i].state);
    if (range->num_folded) keep_inputs(range, own, x, kept, range->num_folded, channel, count, range->state);
    for (int row = 0; row < rows; row++) {
        const float *inputs[MAX_KERNEL_SIZE], *now = x + (size_t)row * (size_t)own->channels + channel;
        inputs[behind] = now;
        int ancestor = range->parents[row], before = range->num_pending - 1;
        for (int i = behind - 1; i >= 0; i--) {
            if (ancestor >= 0) {
                inputs[i] = x + (size_t)ancestor * (size_t)own->channels + channel;
                ancestor = range->parents[ancestor];
            } else
                inputs[i] = input_at(range, own, x, kept, before--, channel);
        }
        convolve_row(own, inputs, channel, count, out + (size_t)row * (size_t)own->channels + channel);
        if (range->rows[row] >= 0)
            memcpy(record_of(range, range->rows[row]) + own->record_at + channel, now, (size_t)count * sizeof(float));
    }
}

/* log(x) of x from 1 to 2, Cephes' polynomial; log1p(u) = log(1 + u) u / ((1 + u) - 1), which takes back what the sum was rounded by. */
INLINE floats logarithm_of_sum(floats u) {
    const floats one = broadcast(1.0f), y = one + u;
    const words is_large = (words)(y > broadcast(1.41421356f));
    const floats halved = y * broadcast(0.5f);
    const floats m = (floats)(((words)halved & is_large) | ((words)y & ~is_large)) - one;
    const floats n = (floats)((words)one & is_large);
    floats p = broadcast(7.0376836292e-2f);
    p = fused(p, m, broadcast(-1.1514610310e-1f));
    p = fused(p, m, broadcast(1.1676998740e-1f));
    p = fused(p, m, broadcast(-1.2420140846e-1f));
    p = fused(p, m, broadcast(1.4249322787e-1f));
    p = fused(p, m, broadcast(-1.6668057665e-1f));
    p = fused(p, m, broadcast(2.0000714765e-1f));
    p = fused(p, m, broadcast(-2.4999993993e-1f));
    p = fused(p, m, broadcast(3.3333331174e-1f));
    const floats square = m * m;
    floats log = fused(p * m, square, n * broadcast(-2.12194440e-4f));
    log = fused(broadcast(-0.5f), square, log);
    log = fused(n, broadcast(0.693359375f), log + m);
    const floats left = y - one;
    const words is_nothing = (words)(left == broadcast(0.0f));
    const floats ratio = u / (floats)(((words)one & is_nothing) | ((words)left & ~is_nothing));
    return (floats)(((words)u & is_nothing) | ((words)(log * ratio) & ~is_nothing));
}

/* log(1 + e^x). */
INLINE floats softplus(floats x) {
    const floats zero = broadcast(0.0f);
    return __builtin_elementwise_max(x, zero) + logarithm_of_sum(exponential(-__builtin_elementwise_abs(x)));
}

static float sum_of_products(const float *x, const float *y, int count) {
    floats sum = broadcast(0.0f);
    EACH_16(i, left, count) sum = fused(load_part(x + i, left), load_part(y + i, left), sum);
    return lane_sum(sum);
}

static void scaled(const float *x, int count, float factor, float *out) {
    for (int i = 0; i < count; i++) out[i] = x[i] * factor;
}

/* Decays and step sizes of a row. */
void prepare_gates(const StateOperation *own, const float *a, const float *b, float *work, float *record) {
    const WorkedRow row = worked_row(own, work);
    EACH_16(head, left, own->heads) {
        const floats given = load_part(a + head, left) + load_part(own->bias + head, left);
        floats time = __builtin_elementwise_min(__builtin_elementwise_max(softplus(given), broadcast(own->least)), broadcast(own->most));
        const words not_a_number = (words)(given != given); /* which minimum and maximum may lose */
        time = (floats)(((words)time & ~not_a_number) | ((words)given & not_a_number));
        const floats decays = exponential(load_part(own->decay + head, left) * time);
        store_part(row.decays + head, decays, left);
        store_part(row.steps + head, own->is_delta ? sigmoid(load_part(b + head, left)) : time, left);
    }
    if (record) memcpy(record + recorded(own).decays, row.decays, (size_t)own->heads * sizeof(float));
}

/* Products of a row's key and query with `count` keys, in turns: [2 GRID], those of no key 0. */
static void multiply_keys(const float *key, const float *query, const float *const *others, int count, int size, float *products) {
    floats sums[2 * GRID];
    for (int i = 0; i < GRID; i++) {
        floats of_key = broadcast(0.0f), of_query = broadcast(0.0f);
        if (i < count)
            EACH_16(at, left, size) {
                const floats other = load_part(others[i] + at, left);
                of_key = fused(load_part(key + at, left), other, of_key);
                of_query = fused(load_part(query + at, left), other, of_query);
            }
        sums[2 * i] = of_key, sums[2 * i + 1] = of_query;
    }
    store(products, lane_sums(sums));
}

/* One head's key and query of a row, and their products with the keys that the state of its step has not taken in, its own the last. */
static void prepare_key(const StateRange *range, const StateOperation *own, int row, int head, const float *x, float *work) {
    const int size = own->rows_of_state, keys = own->key_heads * size, at = head * size;
    const float *queries = x, *from = x + keys;
    if (!own->is_delta) from = x + own->heads * own->columns, queries = from + keys;
    const float *q = queries + at, *k = from + at;
    const WorkedRow to = worked_row(own, work_of(own, work, row));
    if (own->is_delta) {
        scaled(q, size, 1.0f / sqrtf(sum_of_products(q, q, size) + 1e-6f) / sqrtf((float)size), to.queries + at);
        scaled(k, size, 1.0f / sqrtf(sum_of_products(k, k, size) + 1e-6f), to.keys + at);
    } else {
        memcpy(to.queries + at, q, (size_t)size * sizeof(float));
        memcpy(to.keys + at, k, (size_t)size * sizeof(float));
    }
    const int32_t *before = range->ancestors + (size_t)row * GRID;
    const float *others[GRID];
    int count = 0;
    for (; before[count] != NO_NODE; count++) others[count] = node_of(range, own, work, before[count]).keys + at;
    others[count++] = to.keys + at;
    multiply_keys(to.keys + at, to.queries + at, others, count, size, to.products + (size_t)head * 2 * GRID);
    float *record = record_of(range, range->rows[row]);
    if (record) memcpy(record + recorded(own).keys + at, to.keys + at, (size_t)size * sizeof(float));
}

/* What prepare_keys reads and writes comes from other threads' caches and, of records, from memory: it is asked for all at once. */
static void ask_for_keys(const StateRange *range, const StateOperation *own, int rows, int head, const float *x) {
    const int size = own->rows_of_state, keys = own->key_heads * size, at = head * size;
    const int first = own->is_delta ? 0 : own->heads * own->columns;
    const size_t in_record = recorded(own).keys + (size_t)at;
    for (int i = range->num_pending < GRID ? 0 : range->num_pending - GRID; i < range->num_pending; i++)
        ask_for(record_of(range, range->pending[i]) + in_record, size, 0);
    for (int row = 0; row < rows; row++) {
        const float *from = x + (size_t)row * (size_t)own->channels + first + at;
        ask_for(from, size, 0);
        ask_for(from + keys, size, 0);
        if (range->rows[row] >= 0) ask_for(record_of(range, range->rows[row]) + in_record, size, 1);
    }
}

/* One head's keys and queries of all rows of a range, those of a step's rows side by side; x and work are those of its first row. */
void prepare_keys(const StateRange *range, const StateOperation *own, int rows, int head, const float *x, float *work) {
    const int size = own->rows_of_state;
    if (rows <= 2 * GRID) ask_for_keys(range, own, rows, head, x);
    for (int row = 0; row < rows; row++) prepare_key(range, own, row, head, x + (size_t)row * (size_t)own->channels, work);
    for (int i = 0; i < range->num_steps; i++) {
        const Step *step = range->steps + i;
        float *packed = packed_of(own, work, rows, head, step->first_row);
        for (int number = 0; number < step->num_rows; number++) {
            const WorkedRow row = worked_row(own, work_of(own, work, range->order[step->first_row + number]));
            const float *key = row.keys + head * size, *query = row.queries + head * size;
            for (int at = 0; at < size; at++) {
                const float pair[] = {key[at], query[at]};
                memcpy(packed + 2 * ((size_t)at * (size_t)step->num_rows + (size_t)number), pair, sizeof pair);
            }
        }
    }
}
