/* Recurrent matrices S[t] = d[t] S[t-1] + k[t] u[t]^T (gated delta rule, Mamba-2), by blocks of columns.
 *
 * The stored state covers a prefix whose length is a multiple of CHECKPOINT_INTERVAL. In between, a row's product with S[t-1] is computed from
 * the last such state, decayed, and from the products of its key and query with the keys k[j] since then, times u[j]: the chunked form of
 * linear attention and the delta rule (Yang et al. 2024, section 3), with chunks at fixed positions. So a row's bits depend on earlier rows
 * only, and the rows of a draft tree share the state they read. */
#include "state_rows.h"
#include "vectors.h"

#define MAX_BLOCK_VECTORS 2 /* vectors of 16 columns in a block */
#ifdef __AVX512F__
#define MAX_SWEEP_ROWS 8 /* rows whose sums are in registers */
#define MAX_VECTORS 30
#else
#define MAX_SWEEP_ROWS 3
#define MAX_VECTORS 8
#endif

/* The columns of a head in one block; `width` of them are not padding. */
typedef struct {
    int head, key_head, first, width; /* first: column, counted over all heads */
    size_t at;                        /* of the block in a state */
} Block;

/* Products of a block with the keys and queries of rows. */
typedef struct {
    floats of_key[CHECKPOINT_INTERVAL][MAX_BLOCK_VECTORS], of_query[CHECKPOINT_INTERVAL][MAX_BLOCK_VECTORS];
} Sums;

/* The updates of CHECKPOINT_INTERVAL rows: S = decay S + sum of keys[j] added[j]^T. */
typedef struct {
    const float *keys[CHECKPOINT_INTERVAL];
    floats added[CHECKPOINT_INTERVAL][MAX_BLOCK_VECTORS];
    float decay;
} Path;

/* One sweep over a block. */
typedef struct {
    const float *from;
    float *to;           /* where to store the updated state; NULL = nowhere */
    const Path *path;    /* updates to add first, or NULL */
    const float *packed; /* [size][stride] alternating keys and queries of the rows to multiply with */
    const float *soon;   /* prefetched meanwhile, one vector in every 2^slow */
    int size, stride, lanes, slow;
} Sweep;

INLINE void sweep_lanes(const Sweep *own, int first, int count, int rows, int has_path, Sums *sums) {
    floats of_key[MAX_SWEEP_ROWS][MAX_BLOCK_VECTORS], of_query[MAX_SWEEP_ROWS][MAX_BLOCK_VECTORS], added[CHECKPOINT_INTERVAL][MAX_BLOCK_VECTORS], decay = broadcast(0.0f);
    for (int row = 0; row < rows; row++)
        for (int lane = 0; lane < count; lane++) of_key[row][lane] = of_query[row][lane] = broadcast(0.0f);
    if (has_path) {
        decay = broadcast(own->path->decay);
        for (int j = 0; j < CHECKPOINT_INTERVAL; j++)
            for (int lane = 0; lane < count; lane++) added[j][lane] = own->path->added[j][first + lane];
    }
    for (int i = 0; i < own->size; i++) {
        const float *packed = own->packed + (size_t)i * (size_t)own->stride;
#pragma unroll
        for (int lane = 0; lane < count; lane++) {
            const int at = i * own->lanes + first + lane;
            __builtin_prefetch(own->soon + (size_t)(at >> own->slow) * LANES, 0, 2);
            floats v = load(own->from + (size_t)at * LANES);
            if (has_path) {
                v = decay * v;
#pragma unroll
                for (int j = 0; j < CHECKPOINT_INTERVAL; j++) v = fused(broadcast(own->path->keys[j][i]), added[j][lane], v);
                if (own->to) store(own->to + (size_t)at * LANES, v);
            }
#pragma unroll
            for (int row = 0; row < rows; row++) {
                of_key[row][lane] = fused(broadcast(packed[2 * row]), v, of_key[row][lane]);
                of_query[row][lane] = fused(broadcast(packed[2 * row + 1]), v, of_query[row][lane]);
            }
        }
    }
    for (int row = 0; row < rows; row++)
        for (int lane = 0; lane < count; lane++) {
            sums->of_key[row][first + lane] = of_key[row][lane];
            sums->of_query[row][first + lane] = of_query[row][lane];
        }
}

/* Process both vectors of a block at once if there are registers for it. */
INLINE void sweep_rows(const Sweep *own, int rows, int has_path, Sums *sums) {
    if (own->lanes == 2 && 2 * (2 * rows + 1 + (has_path ? CHECKPOINT_INTERVAL + 1 : 0)) <= MAX_VECTORS)
        sweep_lanes(own, 0, 2, rows, has_path, sums);
    else
        for (int lane = 0; lane < own->lanes; lane++) sweep_lanes(own, lane, 1, rows, has_path, sums);
}

#define CASE(rows)                                                      \
    case rows:                                                          \
        if (own->path) return sweep_rows(own, rows, 1, sums);           \
        return sweep_rows(own, rows, 0, sums);

static void sweep(const Sweep *own, int rows, Sums *sums) {
    switch (rows) {
        CASE(0) CASE(1) CASE(2) CASE(3)
#if MAX_SWEEP_ROWS == 8
        CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#endif
    }
}

/* Collect the updates of a step's path, each decayed by the rows after it. */
static void collect_path(const StateRange *range, const StateOperation *own, const Block *block, int number, float *work, Path *path) {
    const int32_t *nodes = range->paths + (size_t)number * CHECKPOINT_INTERVAL;
    path->decay = 1.0f;
    for (int j = CHECKPOINT_INTERVAL - 1; j >= 0; j--) {
        const Node node = node_of(range, own, work, nodes[j]);
        path->keys[j] = node.keys + (size_t)block->key_head * (size_t)own->rows_of_state;
        EACH_16(column, left, block->width)
            path->added[j][column / LANES] = broadcast(path->decay) * load_part(node.updates + block->first + column, left);
        path->decay *= node.decays[block->head];
    }
}

/* Compute a row's update and output from the products of its step's state. */
static void finish_row(const StateRange *range, const StateOperation *own, const Block *block, int row, const floats *of_key,
                       const floats *of_query, const float *values, float *work, float *out) {
    const WorkedRow worked = worked_row(own, work_of(own, work, row));
    const int32_t *before = range->ancestors + (size_t)row * CHECKPOINT_INTERVAL;
    const float *products = worked.products + (size_t)block->key_head * 2 * CHECKPOINT_INTERVAL, *updates[CHECKPOINT_INTERVAL];
    float key_factors[CHECKPOINT_INTERVAL], query_factors[CHECKPOINT_INTERVAL], decay = worked.decays[block->head];
    int count = 0;
    while (before[count] != NO_NODE) count++;
    for (int j = count - 1; j >= 0; j--) {
        const Node node = node_of(range, own, work, before[j]);
        updates[j] = node.updates + block->first;
        key_factors[j] = decay * products[2 * j];
        query_factors[j] = decay * products[2 * j + 1];
        decay *= node.decays[block->head];
    }
    float *record = record_of(range, range->rows[row]);
    EACH_16(column, left, block->width) {
        const floats v = load_part(values + block->first + column, left);
        floats update = v, y = broadcast(decay) * of_query[column / LANES], known = broadcast(decay) * of_key[column / LANES];
        for (int j = 0; j < count; j++) {
            const floats other = load_part(updates[j] + column, left);
            known = fused(broadcast(key_factors[j]), other, known);
            y = fused(broadcast(query_factors[j]), other, y);
        }
        if (own->is_delta) update = v - known;
        update = broadcast(worked.steps[block->head]) * update;
        y = fused(broadcast(products[2 * count + 1]), update, y);
        if (own->skip) y = fused(broadcast(own->skip[block->head]), v, y);
        store_part(worked.updates + block->first + column, update, left);
        store_part(out + block->first + column, y, left);
        if (record) store_part(record + recorded(own).updates + block->first + column, update, left);
    }
}

static Block block_at(const StateOperation *own, int number) {
    const int blocks = (own->columns + own->block - 1) / own->block, column = number % blocks * own->block;
    Block block = {.head = number / blocks, .width = own->columns - column < own->block ? own->columns - column : own->block};
    block.first = block.head * own->columns + column;
    block.key_head = block.head / (own->heads / own->key_heads);
    block.at = (size_t)own->matrices_at + (size_t)number * (size_t)own->rows_of_state * (size_t)own->block;
    return block;
}

/* Blocks of a thread's scratch memory: zeros for a text without a state, one for a step of several sweeps, and the slots. */
enum { ZEROS, OWN, FIRST_SLOT };

/* Run one step in sweeps of MAX_SWEEP_ROWS rows; the first one adds its path. */
static void run_step(const StateRange *range, const StateOperation *own, const Block *block, const Step *step, Sweep *sweep_of, int rows,
                     const float *x, float *work, float *out) {
    Path path;
    Sums sums;
    const int values = own->heads * own->columns, before_values = own->is_delta ? 2 * own->key_heads * own->rows_of_state : 0;
    const float *packed = packed_of(own, work, rows, block->key_head, step->first_row);
    if (step->path >= 0) collect_path(range, own, block, step->path, work, &path), sweep_of->path = &path;
    sweep_of->stride = 2 * step->num_rows;
    for (int first = 0; !first || first < step->num_rows; first += MAX_SWEEP_ROWS) {
        const int count = step->num_rows - first < MAX_SWEEP_ROWS ? step->num_rows - first : MAX_SWEEP_ROWS;
        sweep_of->packed = packed + 2 * first;
        sweep(sweep_of, count, &sums);
        if (sweep_of->path) sweep_of->from = sweep_of->to, sweep_of->path = NULL;
        for (int i = 0; i < count; i++) {
            const size_t row = (size_t)range->order[step->first_row + first + i];
            finish_row(range, own, block, (int)row, sums.of_key[i], sums.of_query[i], x + row * (size_t)own->channels + before_values, work,
                       out + row * (size_t)values);
        }
    }
}

/* Prefetch what a block's rows read and write, and return the block's address; NULL = the text has no state yet. */
const float *prefetch_state_block(const StateRange *range, const StateOperation *own, int rows, int number, const float *x, float *out) {
    const Block block = block_at(own, number);
    const size_t updates = recorded(own).updates + (size_t)block.first;
    const int values = own->is_delta ? 2 * own->key_heads * own->rows_of_state : 0, num_few = rows <= 2 * CHECKPOINT_INTERVAL ? rows : 0;
    for (int i = 0; i < range->num_pending; i++) prefetch_floats(record_of(range, range->pending[i]) + updates, own->block, 0);
    for (int row = 0; row < num_few; row++) {
        prefetch_floats(x + (size_t)row * (size_t)own->channels + values + block.first, own->block, 0);
        prefetch_floats(out + (size_t)row * (size_t)(own->heads * own->columns) + block.first, own->block, 1);
        if (range->rows[row] >= 0) prefetch_floats(record_of(range, range->rows[row]) + updates, own->block, 1);
    }
    return range->state ? range->state + block.at : NULL;
}

/* Run all rows of a range for one block of columns; x, work and out point to its first row. next: the thread's next block, to prefetch, or NULL. */
void run_state_block(const StateRange *range, const StateOperation *own, int rows, int number, const float *next, const float *x, float *work,
                     float *out, float *scratch) {
    const Block block = block_at(own, number);
    const int size = own->rows_of_state, lanes = own->block / LANES;
    const size_t block_floats = (size_t)size * (size_t)own->block;
    float *state = range->state ? range->state + block.at : scratch + ZEROS * block_floats;
    if (!range->state) memset(state, 0, block_floats * sizeof(float));
    int slow = 0; /* spread the prefetch of the next block over the sweeps: it takes longer than one */
    while (2 << slow <= range->num_steps && slow < 3) slow++;
    int parts = next ? 1 << slow : 0;
    for (int i = 0; i < range->num_steps; i++) {
        const Step *step = range->steps + i;
        float *slots = scratch + FIRST_SLOT * block_floats;
        Sweep sweep = {.from = step->from == IN_PLACE ? state : slots + (size_t)step->from * block_floats, .size = size, .lanes = lanes};
        if (step->path >= 0) {
            if (step->to == IN_PLACE)
                sweep.to = state;
            else if (step->to >= 0)
                sweep.to = slots + (size_t)step->to * block_floats;
            else if (step->num_rows > MAX_SWEEP_ROWS)
                sweep.to = scratch + OWN * block_floats;
        }
        sweep.soon = parts ? next : sweep.from, sweep.slow = slow;
        if (parts) parts--, next += (block_floats / LANES >> slow) * LANES;
        const float *updated = sweep.to;
        run_step(range, own, &block, step, &sweep, rows, x, work, out);
        for (int save = 0; save < step->num_saves; save++)
            memcpy(range->saves[step->first_save + save].state + block.at, updated, block_floats * sizeof(float));
    }
}
