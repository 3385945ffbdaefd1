/* Recurrent state matrices S[t] = d[t] S[t-1] + k[t] u[t]^T (gated delta rule, Mamba-2), in blocks of columns.
 *
 * States are computed only after a multiple of CHECKPOINT_INTERVAL rows. The product of a row's key or query with S[t-1] is computed from the last
 * such state and from the rows j since then: from the products of the row's key or query with k[j], times u[j], all decayed. This is the chunked
 * form of linear attention and the delta rule (Yang et al. 2024, section 3), with chunks at fixed positions. So a row's bits depend only on earlier
 * rows of its sequence, and all rows of a draft tree share a state. */
#include "state_rows.h"
#include "vectors.h"

#define MAX_BLOCK_VECTORS 2 /* vectors of 16 columns in a block */
#ifdef __AVX512F__
#define MAX_SWEEP_ROWS 8 /* rows of a sweep (see Sweep): their sums are in registers */
#define MAX_VECTORS 30   /* vectors that fit in registers */
#else
#define MAX_SWEEP_ROWS 3
#define MAX_VECTORS 8
#endif

/* A block: some columns of the matrix of one head; `width` of them are not padding. */
typedef struct {
    int head, key_head, first, width; /* first: its first column, counted over the columns of all heads */
    size_t at;                        /* offset of the block in a state */
} Block;

/* Products S^T k and S^T q of a block with the keys and the queries of rows. */
typedef struct {
    floats of_key[CHECKPOINT_INTERVAL][MAX_BLOCK_VECTORS], of_query[CHECKPOINT_INTERVAL][MAX_BLOCK_VECTORS];
} Sums;

/* The updates of CHECKPOINT_INTERVAL nodes together: S becomes decay * S + the sum of keys[j] updates[j]^T. */
typedef struct {
    const float *keys[CHECKPOINT_INTERVAL];
    floats updates[CHECKPOINT_INTERVAL][MAX_BLOCK_VECTORS];
    float decay;
} Path;

/* A sweep: reading a block of a state once, to add the updates of a path and to compute products with some rows. */
typedef struct {
    const float *from;
    float *to;               /* where to store the state with the updates; NULL = nowhere */
    const Path *path;        /* NULL = none */
    const float *packed;     /* [size][stride] alternating keys and queries of the rows */
    const float *next_block; /* to prefetch meanwhile, one vector for every 2^prefetch_shift vectors that are read */
    int size, stride, vectors, prefetch_shift; /* size: of a key; vectors: of a row of the block */
} Sweep;

/* Sweep vectors [first, first + count) of a block. */
INLINE void sweep_vectors(const Sweep *task, int first, int count, int rows, int has_path, Sums *sums) {
    floats of_key[MAX_SWEEP_ROWS][MAX_BLOCK_VECTORS], of_query[MAX_SWEEP_ROWS][MAX_BLOCK_VECTORS];
    floats updates[CHECKPOINT_INTERVAL][MAX_BLOCK_VECTORS], decay = broadcast(0.0f);
    for (int row = 0; row < rows; row++)
        for (int lane = 0; lane < count; lane++) of_key[row][lane] = of_query[row][lane] = broadcast(0.0f);
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
                for (int j = 0; j < CHECKPOINT_INTERVAL; j++) v = fused(broadcast(task->path->keys[j][i]), updates[j][lane], v);
                if (task->to) store(task->to + (size_t)at * LANES, v);
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

/* Sweep both vectors of a block at once if there are enough registers. */
INLINE void sweep_rows(const Sweep *task, int rows, int has_path, Sums *sums) {
    if (task->vectors == 2 && 2 * (2 * rows + 1 + (has_path ? CHECKPOINT_INTERVAL + 1 : 0)) <= MAX_VECTORS)
        sweep_vectors(task, 0, 2, rows, has_path, sums);
    else
        for (int lane = 0; lane < task->vectors; lane++) sweep_vectors(task, lane, 1, rows, has_path, sums);
}

#define SWEEP_CASE(rows)                                                      \
    case rows:                                                          \
        if (task->path) return sweep_rows(task, rows, 1, sums);           \
        return sweep_rows(task, rows, 0, sums);

static void run_sweep(const Sweep *task, int rows, Sums *sums) {
    switch (rows) {
        SWEEP_CASE(0) SWEEP_CASE(1) SWEEP_CASE(2) SWEEP_CASE(3)
#if MAX_SWEEP_ROWS == 8
        SWEEP_CASE(4) SWEEP_CASE(5) SWEEP_CASE(6) SWEEP_CASE(7) SWEEP_CASE(8)
#endif
    }
}

/* Collect the updates of a path. Each is multiplied by the decays of the nodes after it. */
static void collect_path(const StateRange *range, const StateOperation *op, const Block *block, int number, float *prepared, Path *path) {
    const int32_t *nodes = range->paths + (size_t)number * CHECKPOINT_INTERVAL;
    path->decay = 1.0f;
    for (int j = CHECKPOINT_INTERVAL - 1; j >= 0; j--) {
        const Node node = node_of(range, op, prepared, nodes[j]);
        path->keys[j] = node.keys + (size_t)block->key_head * (size_t)op->rows_of_state;
        EACH_16(column, left, block->width)
            path->updates[j][column / LANES] = broadcast(path->decay) * load_part(node.updates + block->first + column, left);
        path->decay *= node.decays[block->head];
    }
}

/* Compute the update and the output of a row. of_key, of_query: products of its key and query with the state of its step. */
static void compute_row(const StateRange *range, const StateOperation *op, const Block *block, int row, const floats *of_key,
                       const floats *of_query, const float *values, float *prepared, float *out) {
    const PreparedRow parts = prepared_row(op, prepared_at(op, prepared, row));
    const int32_t *before = range->ancestors + (size_t)row * CHECKPOINT_INTERVAL;
    const float *products = parts.products + (size_t)block->key_head * 2 * CHECKPOINT_INTERVAL, *updates[CHECKPOINT_INTERVAL];
    float key_factors[CHECKPOINT_INTERVAL], query_factors[CHECKPOINT_INTERVAL], decay = parts.decays[block->head];
    int count = 0;
    while (before[count] != NO_NODE) count++;
    for (int j = count - 1; j >= 0; j--) {
        const Node node = node_of(range, op, prepared, before[j]);
        updates[j] = node.updates + block->first;
        key_factors[j] = decay * products[2 * j];
        query_factors[j] = decay * products[2 * j + 1];
        decay *= node.decays[block->head];
    }
    float *record = record_of(range, range->row_records[row]);
    EACH_16(column, left, block->width) {
        const floats v = load_part(values + block->first + column, left);
        floats update = v, y = broadcast(decay) * of_query[column / LANES], predicted = broadcast(decay) * of_key[column / LANES];
        for (int j = 0; j < count; j++) {
            const floats other = load_part(updates[j] + column, left);
            predicted = fused(broadcast(key_factors[j]), other, predicted);
            y = fused(broadcast(query_factors[j]), other, y);
        }
        if (op->is_delta) update = v - predicted;
        update = broadcast(parts.steps[block->head]) * update;
        y = fused(broadcast(products[2 * count + 1]), update, y);
        if (op->skip) y = fused(broadcast(op->skip[block->head]), v, y);
        store_part(parts.updates + block->first + column, update, left);
        store_part(out + block->first + column, y, left);
        if (record) store_part(record + record_offsets(op).updates + block->first + column, update, left);
    }
}

/* Return block `number`, counted over all heads. */
static Block block_at(const StateOperation *op, int number) {
    const int blocks = (op->columns + op->block_columns - 1) / op->block_columns, column = number % blocks * op->block_columns;
    Block block = {.head = number / blocks, .width = op->columns - column < op->block_columns ? op->columns - column : op->block_columns};
    block.first = block.head * op->columns + column;
    block.key_head = block.head / (op->heads / op->key_heads);
    block.at = (size_t)op->matrices_at + (size_t)number * (size_t)op->rows_of_state * (size_t)op->block_columns;
    return block;
}

/* Blocks of a thread's scratch memory: zeros for a sequence without a state, a block for a step of several sweeps, and the temporary states. */
enum { ZERO_BLOCK, WORKING_BLOCK, FIRST_TEMPORARY };

/* Run a step in sweeps of at most MAX_SWEEP_ROWS rows. The first sweep adds the path. */
static void run_step(const StateRange *range, const StateOperation *op, const Block *block, const StateStep *step, Sweep *sweep, int rows,
                     const float *x, float *prepared, float *out) {
    Path path;
    Sums sums;
    const int values = op->heads * op->columns, before_values = op->is_delta ? 2 * op->key_heads * op->rows_of_state : 0;
    const float *packed = packed_of(op, prepared, rows, block->key_head, step->first_row);
    if (step->path >= 0) collect_path(range, op, block, step->path, prepared, &path), sweep->path = &path;
    sweep->stride = 2 * step->num_rows;
    for (int first = 0; !first || first < step->num_rows; first += MAX_SWEEP_ROWS) {
        const int count = step->num_rows - first < MAX_SWEEP_ROWS ? step->num_rows - first : MAX_SWEEP_ROWS;
        sweep->packed = packed + 2 * first;
        run_sweep(sweep, count, &sums);
        if (sweep->path) sweep->from = sweep->to, sweep->path = NULL;
        for (int i = 0; i < count; i++) {
            const size_t row = (size_t)range->order[step->first_row + first + i];
            compute_row(range, op, block, (int)row, sums.of_key[i], sums.of_query[i], x + row * (size_t)op->channels + before_values, prepared,
                       out + row * (size_t)values);
        }
    }
}

/* Prefetch what the rows of a range read and write for a block. Return its address in the state; NULL = the sequence has no state yet. */
const float *prefetch_state_block(const StateRange *range, const StateOperation *op, int rows, int number, const float *x, float *out) {
    const Block block = block_at(op, number);
    const size_t updates = record_offsets(op).updates + (size_t)block.first;
    const int values = op->is_delta ? 2 * op->key_heads * op->rows_of_state : 0, num_few = rows <= 2 * CHECKPOINT_INTERVAL ? rows : 0;
    for (int i = 0; i < range->num_pending; i++) prefetch_floats(record_of(range, range->pending[i]) + updates, op->block_columns, 0);
    for (int row = 0; row < num_few; row++) {
        prefetch_floats(x + (size_t)row * (size_t)op->channels + values + block.first, op->block_columns, 0);
        prefetch_floats(out + (size_t)row * (size_t)(op->heads * op->columns) + block.first, op->block_columns, 1);
        if (range->row_records[row] >= 0) prefetch_floats(record_of(range, range->row_records[row]) + updates, op->block_columns, 1);
    }
    return range->state ? range->state + block.at : NULL;
}

/* Run all rows of a range for one block. x, prepared and out point to the first row of the range. next: the block to prefetch; NULL = none. */
void run_state_block(const StateRange *range, const StateOperation *op, int rows, int number, const float *next, const float *x, float *prepared,
                     float *out, float *scratch) {
    const Block block = block_at(op, number);
    const int size = op->rows_of_state, vectors = op->block_columns / LANES;
    const size_t block_floats = (size_t)size * (size_t)op->block_columns;
    float *state = range->state ? range->state + block.at : scratch + ZERO_BLOCK * block_floats;
    if (!range->state) memset(state, 0, block_floats * sizeof(float));
    int prefetch_shift = 0; /* > 0 spreads the prefetch over several steps, because it takes longer than a sweep */
    while (2 << prefetch_shift <= range->num_steps && prefetch_shift < 3) prefetch_shift++;
    int parts = next ? 1 << prefetch_shift : 0;
    for (int i = 0; i < range->num_steps; i++) {
        const StateStep *step = range->steps + i;
        float *temporary = scratch + FIRST_TEMPORARY * block_floats;
        Sweep sweep = {.from = step->from == IN_PLACE ? state : temporary + (size_t)step->from * block_floats, .size = size, .vectors = vectors};
        if (step->path >= 0) {
            if (step->to == IN_PLACE) sweep.to = state;
            else if (step->to >= 0) sweep.to = temporary + (size_t)step->to * block_floats;
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
