/* Recurrent state matrices S[t] = d[t] S[t-1] + k[t] u[t]^T (gated delta rule, Mamba-2), in blocks of columns.
 *
 * States are computed only after a multiple of CHECKPOINT_INTERVAL rows. The products of a row's key and query with S[t-1] are computed from the
 * last computed state and from the later rows j: from the dot products of the row's key and query with k[j], times u[j], all decayed. This is the
 * chunked form of linear attention and the delta rule (Yang et al. 2024, section 3), with chunks at fixed positions. So a row's bits depend only on
 * earlier rows of its sequence, and all rows of a draft tree share a state. */
#include "state_rows.h"
#include "vectors.h"

#define MAX_BLOCK_VECTORS 2 /* vectors (of 16 columns) in a row of a state block */
#ifdef __AVX512F__
#define MAX_SWEEP_ROWS 8 /* rows whose sums fit in registers, see Sweep */
#define MAX_VECTORS 30   /* registers for sums, updates and a vector of the state */
#else
#define MAX_SWEEP_ROWS 3
#define MAX_VECTORS 8
#endif

/* Some columns of the state matrix of one head. width: columns without padding. */
typedef struct {
    int head, key_head, first, width; /* first: its first column, counted over the columns of all heads */
    size_t at;                        /* offset of the block in a state */
} StateBlock;

/* Products S^T k and S^T q of a state block with the keys and the queries of rows. */
typedef struct {
    floats key_products[CHECKPOINT_INTERVAL][MAX_BLOCK_VECTORS], query_products[CHECKPOINT_INTERVAL][MAX_BLOCK_VECTORS];
} SweepSums;

/* The updates of CHECKPOINT_INTERVAL nodes, applied together: S becomes decay * S + sum over j of keys[j] updates[j]^T. */
typedef struct {
    const float *keys[CHECKPOINT_INTERVAL];
    floats updates[CHECKPOINT_INTERVAL][MAX_BLOCK_VECTORS];
    float decay;
} PathUpdates;

/* A sweep reads a state block once: it adds the updates of a path and multiplies the new state with the keys and queries of some rows. */
typedef struct {
    const float *from;
    float *to; /* where to store the updated block; NULL = nowhere */
    const PathUpdates *path; /* NULL = none */
    const float *packed; /* [size][stride] alternating keys and queries of the rows */
    const float *next_block; /* block to prefetch: one vector for every 2^prefetch_shift vectors read */
    int size, stride, vectors, prefetch_shift; /* size: number of floats in a key; vectors: in a row of the block */
} Sweep;

/* Process vectors [first, first + count) of each row of a state block, see Sweep. */
INLINE void sweep_vectors(const Sweep *task, int first, int count, int rows, int has_path, SweepSums *sums) {
    floats key_products[MAX_SWEEP_ROWS][MAX_BLOCK_VECTORS], query_products[MAX_SWEEP_ROWS][MAX_BLOCK_VECTORS];
    floats updates[CHECKPOINT_INTERVAL][MAX_BLOCK_VECTORS], decay = broadcast(0.0f);
    for (int row = 0; row < rows; row++)
        for (int lane = 0; lane < count; lane++) key_products[row][lane] = query_products[row][lane] = broadcast(0.0f);
    if (has_path) {
        decay = broadcast(task->path->decay);
        for (int j = 0; j < CHECKPOINT_INTERVAL; j++)
            for (int lane = 0; lane < count; lane++) updates[j][lane] = task->path->updates[j][first + lane];
    }
    for (int i = 0; i < task->size; i++) {
        const float *packed = task->packed + (size_t)i * (size_t)task->stride;
#pragma unroll
        for (int lane = 0; lane < count; lane++) {
            const int at = i * task->vectors + first + lane;
            __builtin_prefetch(task->next_block + (size_t)(at >> task->prefetch_shift) * LANES, 0, 2);
            floats v = load(task->from + (size_t)at * LANES);
            if (has_path) {
                v = decay * v;
#pragma unroll
                for (int j = 0; j < CHECKPOINT_INTERVAL; j++) v = fmadd(broadcast(task->path->keys[j][i]), updates[j][lane], v);
                if (task->to) store(task->to + (size_t)at * LANES, v);
            }
#pragma unroll
            for (int row = 0; row < rows; row++) {
                key_products[row][lane] = fmadd(broadcast(packed[2 * row]), v, key_products[row][lane]);
                query_products[row][lane] = fmadd(broadcast(packed[2 * row + 1]), v, query_products[row][lane]);
            }
        }
    }
    for (int row = 0; row < rows; row++)
        for (int lane = 0; lane < count; lane++) {
            sums->key_products[row][first + lane] = key_products[row][lane];
            sums->query_products[row][first + lane] = query_products[row][lane];
        }
}

/* Process both vectors of each row at once if there are enough registers. */
INLINE void sweep_rows(const Sweep *task, int rows, int has_path, SweepSums *sums) {
    if (task->vectors == 2 && 2 * (2 * rows + 1 + (has_path ? CHECKPOINT_INTERVAL + 1 : 0)) <= MAX_VECTORS)
        sweep_vectors(task, 0, 2, rows, has_path, sums);
    else
        for (int lane = 0; lane < task->vectors; lane++) sweep_vectors(task, lane, 1, rows, has_path, sums);
}

#define SWEEP_CASE(rows)                                        \
    case rows:                                                  \
        if (task->path) return sweep_rows(task, rows, 1, sums); \
        return sweep_rows(task, rows, 0, sums);

static void run_sweep(const Sweep *task, int rows, SweepSums *sums) {
    switch (rows) {
        SWEEP_CASE(0) SWEEP_CASE(1) SWEEP_CASE(2) SWEEP_CASE(3)
#if MAX_SWEEP_ROWS == 8
        SWEEP_CASE(4) SWEEP_CASE(5) SWEEP_CASE(6) SWEEP_CASE(7) SWEEP_CASE(8)
#endif
    }
}

/* Collect the updates of path `number`. Each is multiplied by the decays of the nodes after it. */
static void collect_path(const StateRange *range, const StateOperation *op, const StateBlock *block, int number, float *prepared, PathUpdates *path) {
    const int32_t *nodes = range->paths + (size_t)number * CHECKPOINT_INTERVAL;
    path->decay = 1.0f;
    for (int j = CHECKPOINT_INTERVAL - 1; j >= 0; j--) {
        const Node node = node_at(range, op, prepared, nodes[j]);
        path->keys[j] = node.keys + (size_t)block->key_head * (size_t)op->rows_of_state;
        EACH_16(column, lanes, block->width)
            path->updates[j][column / LANES] = broadcast(path->decay) * load_part(node.updates + block->first + column, lanes);
        path->decay *= node.decays[block->head];
    }
}

/* Compute the update and the output of a row. key_products, query_products: products of its key and query with the state of its step. */
static void compute_row_output(const StateRange *range, const StateOperation *op, const StateBlock *block, int row, const floats *key_products,
                               const floats *query_products, const float *values, float *prepared, float *out) {
    const PreparedRow parts = prepared_row_parts(op, prepared_row_at(op, prepared, row));
    const int32_t *before = range->ancestors + (size_t)row * CHECKPOINT_INTERVAL;
    const float *products = parts.products + (size_t)block->key_head * 2 * CHECKPOINT_INTERVAL, *updates[CHECKPOINT_INTERVAL];
    float key_factors[CHECKPOINT_INTERVAL], query_factors[CHECKPOINT_INTERVAL], decay = parts.decays[block->head];
    int count = 0;
    while (before[count] != NO_NODE) count++;
    for (int j = count - 1; j >= 0; j--) {
        const Node node = node_at(range, op, prepared, before[j]);
        updates[j] = node.updates + block->first;
        key_factors[j] = decay * products[2 * j];
        query_factors[j] = decay * products[2 * j + 1];
        decay *= node.decays[block->head];
    }
    float *record = replay_record_at(range, range->row_records[row]);
    EACH_16(column, lanes, block->width) {
        const floats v = load_part(values + block->first + column, lanes);
        floats update = v, y = broadcast(decay) * query_products[column / LANES], predicted = broadcast(decay) * key_products[column / LANES];
        for (int j = 0; j < count; j++) {
            const floats other = load_part(updates[j] + column, lanes);
            predicted = fmadd(broadcast(key_factors[j]), other, predicted);
            y = fmadd(broadcast(query_factors[j]), other, y);
        }
        if (op->is_delta) update = v - predicted;
        update = broadcast(parts.steps[block->head]) * update;
        y = fmadd(broadcast(products[2 * count + 1]), update, y);
        if (op->skip) y = fmadd(broadcast(op->skip[block->head]), v, y);
        store_part(parts.updates + block->first + column, update, lanes);
        store_part(out + block->first + column, y, lanes);
        if (record) store_part(record + record_offsets(op).updates + block->first + column, update, lanes);
    }
}

/* Return state block `number`, counted over all heads. */
static StateBlock state_block_at(const StateOperation *op, int number) {
    const int blocks = (op->columns + op->block_columns - 1) / op->block_columns, column = number % blocks * op->block_columns;
    StateBlock block = {.head = number / blocks, .width = op->columns - column < op->block_columns ? op->columns - column : op->block_columns};
    block.first = block.head * op->columns + column;
    block.key_head = block.head / (op->heads / op->key_heads);
    block.at = (size_t)op->matrices_offset + (size_t)number * (size_t)op->rows_of_state * (size_t)op->block_columns;
    return block;
}

/* State blocks in a thread's scratch memory: zeros for a sequence without a state, a block for a step of several sweeps, and the temporary states. */
enum { ZERO_BLOCK, WORKING_BLOCK, FIRST_TEMPORARY };

/* Run a step in sweeps of at most MAX_SWEEP_ROWS rows. Only the first sweep adds the updates of the path. */
static void run_step(const StateRange *range, const StateOperation *op, const StateBlock *block, const StateStep *step, Sweep *sweep, int rows,
                     const float *x, float *prepared, float *out) {
    PathUpdates path;
    SweepSums sums;
    const int values = op->heads * op->columns, before_values = op->is_delta ? 2 * op->key_heads * op->rows_of_state : 0;
    const float *packed = packed_keys_at(op, prepared, rows, block->key_head, step->first_row);
    if (step->path >= 0) collect_path(range, op, block, step->path, prepared, &path), sweep->path = &path;
    sweep->stride = 2 * step->num_rows;
    for (int first = 0; !first || first < step->num_rows; first += MAX_SWEEP_ROWS) {
        const int count = step->num_rows - first < MAX_SWEEP_ROWS ? step->num_rows - first : MAX_SWEEP_ROWS;
        sweep->packed = packed + 2 * first;
        run_sweep(sweep, count, &sums);
        if (sweep->path) sweep->from = sweep->to, sweep->path = NULL;
        for (int i = 0; i < count; i++) {
            const size_t row = (size_t)range->order[step->first_row + first + i];
            compute_row_output(range, op, block, (int)row, sums.key_products[i], sums.query_products[i],
                               x + row * (size_t)op->channels + before_values, prepared, out + row * (size_t)values);
        }
    }
}

/* Prefetch a range's inputs and outputs of state block `number`. Return its address in the state; NULL = the sequence has no state. */
const float *prefetch_state_block(const StateRange *range, const StateOperation *op, int rows, int number, const float *x, float *out) {
    const StateBlock block = state_block_at(op, number);
    const size_t updates = record_offsets(op).updates + (size_t)block.first;
    const int values = op->is_delta ? 2 * op->key_heads * op->rows_of_state : 0, num_few = rows <= 2 * CHECKPOINT_INTERVAL ? rows : 0;
    for (int i = 0; i < range->num_pending; i++) prefetch_floats(replay_record_at(range, range->pending[i]) + updates, op->block_columns, 0);
    for (int row = 0; row < num_few; row++) {
        prefetch_floats(x + (size_t)row * (size_t)op->channels + values + block.first, op->block_columns, 0);
        prefetch_floats(out + (size_t)row * (size_t)(op->heads * op->columns) + block.first, op->block_columns, 1);
        if (range->row_records[row] >= 0) prefetch_floats(replay_record_at(range, range->row_records[row]) + updates, op->block_columns, 1);
    }
    return range->state ? range->state + block.at : NULL;
}

/* Process all rows of a range for state block `number`. x, prepared and out start at the range's first row. next: block to prefetch or NULL. */
void run_state_block(const StateRange *range, const StateOperation *op, int rows, int number, const float *next, const float *x, float *prepared,
                     float *out, float *scratch) {
    const StateBlock block = state_block_at(op, number);
    const int size = op->rows_of_state, vectors = op->block_columns / LANES;
    const size_t block_floats = (size_t)size * (size_t)op->block_columns;
    float *state = range->state ? range->state + block.at : scratch + ZERO_BLOCK * block_floats;
    if (!range->state) memset(state, 0, block_floats * sizeof(float));
    int prefetch_shift = 0; /* > 0 spreads the prefetch over several steps, because it takes longer than one sweep */
    while (2 << prefetch_shift <= range->num_steps && prefetch_shift < 3) prefetch_shift++;
    int parts = next ? 1 << prefetch_shift : 0;
    for (int i = 0; i < range->num_steps; i++) {
        const StateStep *step = range->steps + i;
        float *temporary = scratch + FIRST_TEMPORARY * block_floats;
        Sweep sweep = {.from = step->from_state == IN_PLACE ? state : temporary + (size_t)step->from_state * block_floats, .size = size, .vectors = vectors};
        if (step->path >= 0) {
            if (step->to_state == IN_PLACE) sweep.to = state;
            else if (step->to_state >= 0) sweep.to = temporary + (size_t)step->to_state * block_floats;
            else if (step->num_rows > MAX_SWEEP_ROWS) sweep.to = scratch + WORKING_BLOCK * block_floats;
        }
        sweep.next_block = parts ? next : sweep.from, sweep.prefetch_shift = prefetch_shift;
        if (parts) parts--, next += (block_floats / LANES >> prefetch_shift) * LANES;
        const float *updated = sweep.to;
        run_step(range, op, &block, step, &sweep, rows, x, prepared, out);
        for (int save = 0; save < step->num_saves; save++)
            memcpy(range->saves[step->first_save + save].state + block.at, updated, block_floats * sizeof(float));
    }
}
