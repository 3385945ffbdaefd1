/* The part of recurrent layers before the state update (state_blocks.c): causal convolutions, keys, queries and gates. */
#include "native.h"
#include "state_rows.h"
#include "vectors.h"

#include <math.h>

/* Return input i of a convolution. Input 0 belongs to the first pending row; inputs with negative i are stored in the state (state_inputs). */
static const float *conv_input_at(const StateRange *range, const ConvolutionOperation *op, const float *x, const float *state_inputs, int i, int channel) {
    if (i < 0) return state_inputs + (op->kernel_size - 1 + i) * PIECE_CHANNELS;
    if (i < range->num_pending) return replay_record_at(range, range->pending[i]) + op->record_offset + channel;
    return x + (size_t)(i - range->num_pending) * (size_t)op->channels + channel;
}

/* Write the last kernel_size - 1 inputs before input `end` to a state. */
static void save_conv_inputs(const StateRange *range, const ConvolutionOperation *op, const float *x, const float *state_inputs, int end, int channel,
                             int count, float *state) {
    const int num_state_inputs = op->kernel_size - 1;
    for (int i = 0; i < num_state_inputs; i++)
        memcpy(state + op->conv_offset + (size_t)i * (size_t)op->channels + channel,
               conv_input_at(range, op, x, state_inputs, end - num_state_inputs + i, channel), (size_t)count * sizeof(float));
}

/* Convolve `count` channels of one row. inputs: [size] those of the rows on its path, its own last; size: kernel size, often a constant. */
INLINE void convolve_inputs(const ConvolutionOperation *op, const float *const *inputs, int channel, int count, float *out, int size) {
    EACH_16(column, lanes, count) {
        floats sum = op->bias ? load_part(op->bias + channel + column, lanes) : broadcast(0.0f);
        for (int i = 0; i < size; i++) {
            const float *weight = op->weight + (size_t)i * (size_t)op->channels + channel + column;
            sum = fmadd(load_part(weight, lanes), load_part(inputs[i] + column, lanes), sum);
        }
        if (op->is_activated) sum = sum * sigmoid(sum);
        store_part(out + column, sum, lanes);
    }
}

/* Convolve channels [channel, channel + count) of the rows of a range. x and out point to the first row of the range. */
void convolve(const StateRange *range, const ConvolutionOperation *op, int rows, int channel, int count, const float *x, float *out) {
    float state_inputs[(MAX_KERNEL_SIZE - 1) * PIECE_CHANNELS];
    const int num_state_inputs = op->kernel_size - 1;
    memset(state_inputs, 0, (size_t)num_state_inputs * PIECE_CHANNELS * sizeof(float));
    for (int i = 0; range->state && i < num_state_inputs; i++)
        memcpy(state_inputs + i * PIECE_CHANNELS, range->state + op->conv_offset + (size_t)i * (size_t)op->channels + channel, (size_t)count * sizeof(float));
    for (int i = 0; i < range->num_saves; i++)
        save_conv_inputs(range, op, x, state_inputs, (int)range->saves[i].count, channel, count, range->saves[i].state);
    if (range->num_applied) save_conv_inputs(range, op, x, state_inputs, range->num_applied, channel, count, range->state);
    for (int row = 0; row < rows; row++) {
        const float *inputs[MAX_KERNEL_SIZE], *now = x + (size_t)row * (size_t)op->channels + channel;
        inputs[num_state_inputs] = now;
        int ancestor = range->parents[row], before = range->num_pending - 1;
        for (int i = num_state_inputs - 1; i >= 0; i--) {
            if (ancestor >= 0) {
                inputs[i] = x + (size_t)ancestor * (size_t)op->channels + channel;
                ancestor = range->parents[ancestor];
            } else inputs[i] = conv_input_at(range, op, x, state_inputs, before--, channel);
        }
        float *const to = out + (size_t)row * (size_t)op->channels + channel;
        if (op->kernel_size == 4) convolve_inputs(op, inputs, channel, count, to, 4);
        else convolve_inputs(op, inputs, channel, count, to, op->kernel_size);
        if (range->row_records[row] >= 0)
            memcpy(replay_record_at(range, range->row_records[row]) + op->record_offset + channel, now, (size_t)count * sizeof(float));
    }
}

/* Return log(1 + u) for u in [0, 1]: the Cephes polynomial for log(1 + u), times u / ((1 + u) - 1), which corrects the rounding of 1 + u. */
INLINE floats log1p_of_unit(floats u) {
    const floats one = broadcast(1.0f), y = one + u;
    const words is_large = (words)(y > broadcast(1.41421356f));
    const floats halved = y * broadcast(0.5f);
    const floats m = (floats)(((words)halved & is_large) | ((words)y & ~is_large)) - one;
    const floats n = (floats)((words)one & is_large);
    floats p = broadcast(7.0376836292e-2f);
    p = fmadd(p, m, broadcast(-1.1514610310e-1f));
    p = fmadd(p, m, broadcast(1.1676998740e-1f));
    p = fmadd(p, m, broadcast(-1.2420140846e-1f));
    p = fmadd(p, m, broadcast(1.4249322787e-1f));
    p = fmadd(p, m, broadcast(-1.6668057665e-1f));
    p = fmadd(p, m, broadcast(2.0000714765e-1f));
    p = fmadd(p, m, broadcast(-2.4999993993e-1f));
    p = fmadd(p, m, broadcast(3.3333331174e-1f));
    const floats square = m * m;
    floats log = fmadd(p * m, square, n * broadcast(-2.12194440e-4f));
    log = fmadd(broadcast(-0.5f), square, log);
    log = fmadd(n, broadcast(0.693359375f), log + m);
    const floats rounded_u = y - one;
    const words is_zero = (words)(rounded_u == broadcast(0.0f));
    const floats ratio = u / (floats)(((words)one & is_zero) | ((words)rounded_u & ~is_zero));
    return (floats)(((words)u & is_zero) | ((words)(log * ratio) & ~is_zero));
}

INLINE floats softplus(floats x) {
    const floats zero = broadcast(0.0f);
    return __builtin_elementwise_max(x, zero) + log1p_of_unit(exponential(-__builtin_elementwise_abs(x)));
}

/* Compute the decay and the step size of a row for each head. The step size is Mamba-2's dt, or beta of the delta rule. */
void prepare_gates(const StateOperation *op, const float *a, const float *b, float *prepared, float *record) {
    const PreparedRow row = prepared_row_parts(op, prepared);
    EACH_16(head, lanes, op->heads) {
        const floats input = load_part(a + head, lanes) + load_part(op->bias + head, lanes);
        floats time = __builtin_elementwise_min(__builtin_elementwise_max(softplus(input), broadcast(op->min_step)), broadcast(op->max_step));
        const words not_a_number = (words)(input != input); /* __builtin_elementwise_min and max may return the other operand instead of NaN */
        time = (floats)(((words)time & ~not_a_number) | ((words)input & not_a_number));
        const floats decays = exponential(load_part(op->decay + head, lanes) * time);
        store_part(row.decays + head, decays, lanes);
        store_part(row.steps + head, op->is_delta ? broadcast(op->beta_scale) * sigmoid(load_part(b + head, lanes)) : time, lanes);
    }
    if (record) memcpy(record + record_offsets(op).decays, row.decays, (size_t)op->heads * sizeof(float));
}

/* Compute the dot products of a row's key and query with `count` keys: [CHECKPOINT_INTERVAL][key, query], padded with 0. */
static void multiply_keys(const float *key, const float *query, const float *const *other_keys, int count, int size, float *products) {
    floats sums[2 * CHECKPOINT_INTERVAL];
    for (int i = 0; i < CHECKPOINT_INTERVAL; i++) {
        floats key_products = broadcast(0.0f), query_products = broadcast(0.0f);
        if (i < count)
            EACH_16(at, lanes, size) {
                const floats other = load_part(other_keys[i] + at, lanes);
                key_products = fmadd(load_part(key + at, lanes), other, key_products);
                query_products = fmadd(load_part(query + at, lanes), other, query_products);
            }
        sums[2 * i] = key_products, sums[2 * i + 1] = query_products;
    }
    store(products, lane_sums(sums));
}

/* Prepare a row's key and query for one head, and their products with the keys of the row and of ancestors not yet in its step's state. */
static void prepare_key(const StateRange *range, const StateOperation *op, int row, int head, const float *x, float *prepared) {
    const int size = op->rows_of_state, keys = op->key_heads * size, at = head * size;
    const float *queries = x, *from = x + keys;
    if (!op->is_delta) from = x + op->heads * op->columns, queries = from + keys;
    const float *q = queries + at, *k = from + at;
    const PreparedRow to = prepared_row_parts(op, prepared_row_at(op, prepared, row));
    if (op->is_delta) {
        scale_row(q, size, 1.0f / sqrtf(dot_product(q, q, size) + 1e-6f) / sqrtf((float)size), to.queries + at);
        scale_row(k, size, 1.0f / sqrtf(dot_product(k, k, size) + 1e-6f), to.keys + at);
    } else {
        memcpy(to.queries + at, q, (size_t)size * sizeof(float));
        memcpy(to.keys + at, k, (size_t)size * sizeof(float));
    }
    const int32_t *before = range->ancestors + (size_t)row * CHECKPOINT_INTERVAL;
    const float *other_keys[CHECKPOINT_INTERVAL];
    int count = 0;
    for (; before[count] != NO_NODE; count++) other_keys[count] = node_at(range, op, prepared, before[count]).keys + at;
    other_keys[count++] = to.keys + at;
    multiply_keys(to.keys + at, to.queries + at, other_keys, count, size, to.products + (size_t)head * 2 * CHECKPOINT_INTERVAL);
    float *record = replay_record_at(range, range->row_records[row]);
    if (record) memcpy(record + record_offsets(op).keys + at, to.keys + at, (size_t)size * sizeof(float));
}

/* Prefetch the inputs and outputs of prepare_keys, which are in other cores' caches or, for records, in memory. */
static void prefetch_keys(const StateRange *range, const StateOperation *op, int rows, int head, const float *x) {
    const int size = op->rows_of_state, keys = op->key_heads * size, at = head * size;
    const int first = op->is_delta ? 0 : op->heads * op->columns;
    const size_t in_record = record_offsets(op).keys + (size_t)at;
    for (int i = range->num_pending < CHECKPOINT_INTERVAL ? 0 : range->num_pending - CHECKPOINT_INTERVAL; i < range->num_pending; i++)
        prefetch_floats(replay_record_at(range, range->pending[i]) + in_record, size, 0);
    for (int row = 0; row < rows; row++) {
        const float *from = x + (size_t)row * (size_t)op->channels + first + at;
        prefetch_floats(from, size, 0);
        prefetch_floats(from + keys, size, 0);
        if (range->row_records[row] >= 0) prefetch_floats(replay_record_at(range, range->row_records[row]) + in_record, size, 1);
    }
}

/* Prepare the keys and queries of all rows of a range for one head, and pack them by step. x and prepared start at the range's first row. */
void prepare_keys(const StateRange *range, const StateOperation *op, int rows, int head, const float *x, float *prepared) {
    const int size = op->rows_of_state;
    if (rows <= 2 * CHECKPOINT_INTERVAL) prefetch_keys(range, op, rows, head, x);
    for (int row = 0; row < rows; row++) prepare_key(range, op, row, head, x + (size_t)row * (size_t)op->channels, prepared);
    for (int i = 0; i < range->num_steps; i++) {
        const StateStep *step = range->steps + i;
        float *packed = packed_keys_at(op, prepared, rows, head, step->first_row);
        for (int number = 0; number < step->num_rows; number++) {
            const PreparedRow row = prepared_row_parts(op, prepared_row_at(op, prepared, range->order[step->first_row + number]));
            const float *key = row.keys + head * size, *query = row.queries + head * size;
            for (int at = 0; at < size; at++) {
                const float pair[] = {key[at], query[at]};
                memcpy(packed + 2 * ((size_t)at * (size_t)step->num_rows + (size_t)number), pair, sizeof pair);
            }
        }
    }
}
