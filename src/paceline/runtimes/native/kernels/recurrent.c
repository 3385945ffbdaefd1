/* Layers that keep a state for a whole text: short convolutions, and matrices that each row decays and adds an outer product to. A row's
 * result depends on the rows before it in its own text alone, each of them taken in by the same operations wherever the state is read. */
#include "native.h"
#include "vectors.h"

#include <math.h>

#define MOST_LANES 2 /* vectors side by side in a block of columns */

/* Input number i of a sequence, counted from the first pending one; those before it are in the state. Known rows follow one another. */
static const float *input_at(const StateRange *range, const ConvolutionOperation *own, const float *x, const float *kept, int i, int channel) {
    if (i < 0) return kept + (own->kernel_size - 1 + i) * PIECE_CHANNELS;
    if (i < range->num_pending)
        return range->records + (size_t)range->pending[i] * (size_t)range->record_floats + own->record_at + channel;
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

static void convolve_row(const ConvolutionOperation *own, const float *const *inputs, int channel, int count, float *out) {
    EACH_16(column, left, count) {
        floats sum = own->bias ? load_part(own->bias + channel + column, left) : broadcast(0.0f);
        for (int i = 0; i < own->kernel_size; i++) {
            const float *weight = own->weight + (size_t)i * (size_t)own->channels + channel + column;
            sum = fused(load_part(weight, left), load_part(inputs[i] + column, left), sum);
        }
        if (own->is_activated) sum = sum * sigmoid(sum);
        store_part(out + column, sum, left);
    }
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
            memcpy(range->records + (size_t)range->rows[row] * (size_t)range->record_floats + own->record_at + channel, now,
                   (size_t)count * sizeof(float));
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

/* The parts of a row's memory to work in. */
typedef struct {
    float *queries, *keys, *updates, *decays, *steps, *products;
} Worked;

static Worked worked_row(const StateOperation *own, float *row) {
    const size_t keys = (size_t)own->key_heads * (size_t)own->rows_of_state, values = (size_t)own->heads * (size_t)own->columns;
    Worked worked = {.queries = row, .keys = row + keys, .updates = row + 2 * keys};
    worked.decays = worked.updates + values;
    worked.steps = worked.decays + own->heads;
    worked.products = worked.steps + own->heads;
    return worked;
}

/* Keys, queries, decays and step sizes of a row, and of each key its product with the query. Record: NULL, or what stays of the row. */
void prepare_state_row(const StateOperation *own, const float *x, const float *a, const float *b, float *work, float *record) {
    const Worked worked = worked_row(own, work);
    const int size = own->rows_of_state, keys = own->key_heads * size;
    const float *queries = x, *from = x + keys;
    if (!own->is_delta) from = x + own->heads * own->columns, queries = from + keys;
    for (int head = 0; head < own->key_heads; head++) {
        const float *q = queries + head * size, *k = from + head * size;
        float *to_q = worked.queries + head * size, *to_k = worked.keys + head * size;
        if (own->is_delta) {
            scaled(q, size, 1.0f / sqrtf(sum_of_products(q, q, size) + 1e-6f) / sqrtf((float)size), to_q);
            scaled(k, size, 1.0f / sqrtf(sum_of_products(k, k, size) + 1e-6f), to_k);
        } else {
            memcpy(to_q, q, (size_t)size * sizeof(float));
            memcpy(to_k, k, (size_t)size * sizeof(float));
        }
        worked.products[head] = sum_of_products(to_q, to_k, size);
    }
    EACH_16(head, left, own->heads) {
        const floats given = load_part(a + head, left) + load_part(own->bias + head, left);
        floats time = __builtin_elementwise_min(__builtin_elementwise_max(softplus(given), broadcast(own->least)), broadcast(own->most));
        const words not_a_number = (words)(given != given); /* which minimum and maximum may lose */
        time = (floats)(((words)time & ~not_a_number) | ((words)given & not_a_number));
        const floats decays = exponential(load_part(own->decay + head, left) * time);
        store_part(worked.decays + head, decays, left);
        store_part(worked.steps + head, own->is_delta ? sigmoid(load_part(b + head, left)) : time, left);
    }
    if (!record) return;
    memcpy(record + own->keys_at, worked.keys, (size_t)keys * sizeof(float));
    memcpy(record + own->keys_at + keys + own->heads * own->columns, worked.decays, (size_t)own->heads * sizeof(float));
}

/* An update of a block of columns: state = decay * state + key update^T. */
typedef struct {
    const float *key, *update;
    float decay;
} Update;

/* What products of a block with a key and a query add up to. */
typedef struct {
    floats of_key[MOST_LANES], of_query[MOST_LANES];
} Sums;

/* What is asked for during a sweep: rows from `at` on, one in every 2^slow rows that the sweep takes. */
typedef struct {
    const float *at;
    int slow;
} Soon;

/* One sweep over a block: take in an update, if there is one, then multiply what is there with a key and a query, if they are given. */
INLINE void sweep(const float *from, float *to, const Soon *soon, int rows, int lanes, const Update *update, const float *key, const float *query,
                  Sums *sums) {
    floats added[MOST_LANES], of_key[MOST_LANES], of_query[MOST_LANES], decay = broadcast(0.0f);
    for (int lane = 0; lane < lanes; lane++) {
        of_key[lane] = of_query[lane] = broadcast(0.0f);
        if (update) added[lane] = load(update->update + lane * LANES);
    }
    if (update) decay = broadcast(update->decay);
    for (int row = 0; row < rows; row++)
#pragma unroll
        for (int lane = 0; lane < lanes; lane++) {
            const size_t at = (size_t)(row * lanes + lane) * LANES;
            __builtin_prefetch(soon->at + (size_t)((row >> soon->slow) * lanes + lane) * LANES, 0, 2);
            floats v = load(from + at);
            if (update) {
                v = fused(broadcast(update->key[row]), added[lane], decay * v);
                store(to + at, v);
            }
            if (key) {
                of_key[lane] = fused(broadcast(key[row]), v, of_key[lane]);
                of_query[lane] = fused(broadcast(query[row]), v, of_query[lane]);
            }
        }
    for (int lane = 0; lane < lanes; lane++) sums->of_key[lane] = of_key[lane], sums->of_query[lane] = of_query[lane];
}

#define SWEEP(lanes)                                                                    \
    if (update && key)                                                                  \
        sweep(from, to, soon, rows, lanes, update, key, query, sums);                   \
    else if (update)                                                                    \
        sweep(from, to, soon, rows, lanes, update, NULL, NULL, sums);                   \
    else                                                                                \
        sweep(from, to, soon, rows, lanes, NULL, key, query, sums)

static void sweep_block(const float *from, float *to, const Soon *soon, int rows, int lanes, const Update *update, const float *key,
                        const float *query, Sums *sums) {
    if (lanes == 1) {
        SWEEP(1);
    } else {
        SWEEP(2);
    }
}

/* The columns of a head that one block holds; `width` of them are there. */
typedef struct {
    int head, key_head, column, width;
    size_t at; /* of the block in a state */
} Block;

/* What a row adds to the state and what it gives, from the products of the state before it. */
static void finish_row(const StateOperation *own, const Block *block, const Sums *sums, const float *x, float *work, float *record, float *out) {
    const Worked worked = worked_row(own, work);
    const int first = block->head * own->columns + block->column, keys = own->key_heads * own->rows_of_state;
    const float *values = x + (own->is_delta ? 2 * keys : 0) + first;
    const floats decay = broadcast(worked.decays[block->head]), step = broadcast(worked.steps[block->head]);
    const floats product = broadcast(worked.products[block->key_head]);
    EACH_16(column, left, block->width) {
        const floats v = load_part(values + column, left);
        const floats update = own->is_delta ? step * (v - decay * sums->of_key[column / LANES]) : step * v;
        floats y = fused(product, update, decay * sums->of_query[column / LANES]);
        if (own->skip) y = fused(broadcast(own->skip[block->head]), v, y);
        store_part(worked.updates + first + column, update, left);
        store_part(out + first + column, y, left);
        if (record) store_part(record + own->keys_at + keys + first + column, update, left);
    }
}

static float *record_of(const StateRange *range, int number) {
    return number < 0 ? NULL : range->records + (size_t)number * (size_t)range->record_floats;
}

/* The update of a step: that of a pending row's record, or of a row of the pass; of a narrow block, with zeros behind it. */
static Update update_of(const StateRange *range, const StateOperation *own, const Block *block, const Step *step, float *work, float *padded) {
    const int keys = own->key_heads * own->rows_of_state, values = own->heads * own->columns;
    const int key = block->key_head * own->rows_of_state, first = block->head * own->columns + block->column;
    Update update;
    if (step->update >= 0) {
        const Worked worked = worked_row(own, work + (size_t)step->update * (size_t)own->work_floats);
        update = (Update){worked.keys + key, worked.updates + first, worked.decays[block->head]};
    } else {
        const float *record = record_of(range, range->pending[-2 - step->update]) + own->keys_at;
        update = (Update){record + key, record + keys + first, record[keys + values + block->head]};
    }
    if (block->width % LANES) {
        memset(padded, 0, MOST_LANES * LANES * sizeof(float));
        memcpy(padded, update.update, (size_t)block->width * sizeof(float));
        update.update = padded;
    }
    return update;
}

/* All rows of a range, of one block of columns; x, work and out are those of its first row. has_next: the caller goes on with the next block. */
void run_state_block(const StateRange *range, const StateOperation *own, int number, int has_next, const float *x, float *work, float *out,
                     float *scratch) {
    const int blocks = (own->columns + own->block - 1) / own->block, size = own->rows_of_state, lanes = own->block / LANES;
    const size_t block_floats = (size_t)size * (size_t)own->block;
    Block block = {.head = number / blocks, .column = number % blocks * own->block};
    block.key_head = block.head / (own->heads / own->key_heads);
    block.width = own->columns - block.column < own->block ? own->columns - block.column : own->block;
    block.at = (size_t)own->matrices_at + (size_t)number * block_floats;
    const int channels = own->channels;
    float *now = range->state ? range->state + block.at : scratch, padded[MOST_LANES * LANES];
    int slow = 0; /* the next block is asked for during as many sweeps as there are: the memory needs longer for it than one takes */
    while (2 << slow <= range->num_steps && slow < 3) slow++;
    int parts = range->state && has_next ? 1 << slow : 0;
    const float *next = parts ? now + block_floats : now;
    if (!range->state) memset(scratch, 0, block_floats * sizeof(float));
    for (int i = 0; i < range->num_steps; i++) {
        const Step *step = range->steps + i;
        Update update;
        Sums sums;
        if (step->load >= 0) now = memcpy(scratch, scratch + (size_t)(1 + step->load) * block_floats, block_floats * sizeof(float));
        const float *from = now, *key = NULL, *query = NULL;
        if (step->update != -1) {
            update = update_of(range, own, &block, step, work, padded);
            now = step->update < -1 && -2 - step->update < range->num_folded ? range->state + block.at : scratch;
        }
        if (step->row >= 0) {
            const Worked worked = worked_row(own, work + (size_t)step->row * (size_t)own->work_floats);
            key = worked.keys + block.key_head * size;
            query = worked.queries + block.key_head * size;
        }
        if (step->update != -1 || key) {
            const Soon soon = {parts ? next : from, slow};
            sweep_block(from, now, &soon, size, lanes, step->update != -1 ? &update : NULL, key, query, &sums);
            if (parts) parts--, next += (size_t)((size + (1 << slow) - 1) >> slow) * (size_t)own->block;
        }
        if (step->row >= 0)
            finish_row(own, &block, &sums, x + (size_t)step->row * (size_t)channels, work + (size_t)step->row * (size_t)own->work_floats,
                       record_of(range, range->rows[step->row]), out + (size_t)step->row * (size_t)(own->heads * own->columns));
        if (step->slot >= 0) memcpy(scratch + (size_t)(1 + step->slot) * block_floats, now, block_floats * sizeof(float));
        for (int save = 0; save < step->num_saves; save++)
            memcpy(range->saves[step->first_save + save].state + block.at, now, block_floats * sizeof(float));
    }
}
