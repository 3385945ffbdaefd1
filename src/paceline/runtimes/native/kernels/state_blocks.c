/* Matrices that each row of a text decays and adds an outer product to: S[t] = d[t] S[t-1] + k[t] u[t]^T, by blocks of columns.
 *
 * A state is read where it stands behind a multiple of GRID rows of its text, and taken forward by GRID rows at a time. Between, a row's
 * products with the state behind the row before it are those with the last such state, decayed, and those of its key and query with the
 * keys k[j] since then, times u[j]: the chunked form of linear attention and of the delta rule (Yang et al., 2024, section 3), with chunks
 * at fixed places of the text. So a row's result depends on the rows before it alone, and a tree's rows share what they read. */
#include "state_rows.h"
#include "vectors.h"

#define MOST_LANES 2 /* vectors side by side in a block of columns */
#ifdef __AVX512F__
#define MOST_ROWS 8 /* of a sweep, whose sums are in registers */
#define MOST_VECTORS 30
#else
#define MOST_ROWS 3
#define MOST_VECTORS 8
#endif

/* The columns of a head that one block holds; `width` of them are there. */
typedef struct {
    int head, key_head, first, width; /* first: column, counted over all heads */
    size_t at;                        /* of the block in a state */
} Block;

/* What products of a block with keys and queries of rows add up to. */
typedef struct {
    floats of_key[GRID][MOST_LANES], of_query[GRID][MOST_LANES];
} Sums;

/* GRID rows that a state takes in: S = decay S + sum of keys[j] added[j]^T. */
typedef struct {
    const float *keys[GRID];
    floats added[GRID][MOST_LANES];
    float decay;
} Path;

/* One sweep over a block. */
typedef struct {
    const float *from;
    float *to;           /* NULL = the state behind a path stays in registers */
    const Path *path;    /* what is taken in first, or NULL */
    const float *packed; /* [size][stride] keys and queries of the rows to multiply with, in turns */
    const float *soon;   /* what is asked for meanwhile, one vector in every 2^slow */
    int size, stride, lanes, slow;
} Sweep;

INLINE void sweep_lanes(const Sweep *own, int first, int count, int rows, int has_path, Sums *sums) {
    floats of_key[MOST_ROWS][MOST_LANES], of_query[MOST_ROWS][MOST_LANES], added[GRID][MOST_LANES], decay = broadcast(0.0f);
    for (int row = 0; row < rows; row++)
        for (int lane = 0; lane < count; lane++) of_key[row][lane] = of_query[row][lane] = broadcast(0.0f);
    if (has_path) {
        decay = broadcast(own->path->decay);
        for (int j = 0; j < GRID; j++)
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
                for (int j = 0; j < GRID; j++) v = fused(broadcast(own->path->keys[j][i]), added[j][lane], v);
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

/* Both vectors of a block at once where there are registers for it. */
INLINE void sweep_rows(const Sweep *own, int rows, int has_path, Sums *sums) {
    if (own->lanes == 2 && 2 * (2 * rows + 1 + (has_path ? GRID + 1 : 0)) <= MOST_VECTORS)
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
#if MOST_ROWS == 8
        CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#endif
    }
}

/* The path that a step takes in; each update is decayed by the rows behind it. */
static void open_path(const StateRange *range, const StateOperation *own, const Block *block, int number, float *work, Path *path) {
    const int32_t *nodes = range->paths + (size_t)number * GRID;
    path->decay = 1.0f;
    for (int j = GRID - 1; j >= 0; j--) {
        const Node node = node_of(range, own, work, nodes[j]);
        path->keys[j] = node.keys + (size_t)block->key_head * (size_t)own->rows_of_state;
        EACH_16(column, left, block->width)
            path->added[j][column / LANES] = broadcast(path->decay) * load_part(node.updates + block->first + column, left);
        path->decay *= node.decays[block->head];
    }
}

/* What a row adds to the state and what it gives, from the products of its step's state. */
static void finish_row(const StateRange *range, const StateOperation *own, const Block *block, int row, const floats *of_key,
                       const floats *of_query, const float *values, float *work, float *out) {
    const WorkedRow worked = worked_row(own, work_of(own, work, row));
    const int32_t *before = range->ancestors + (size_t)row * GRID;
    const float *products = worked.products + (size_t)block->key_head * 2 * GRID, *updates[GRID];
    float key_factors[GRID], query_factors[GRID], decay = worked.decays[block->head];
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

static Block open_block(const StateOperation *own, int number) {
    const int blocks = (own->columns + own->block - 1) / own->block, column = number % blocks * own->block;
    Block block = {.head = number / blocks, .width = own->columns - column < own->block ? own->columns - column : own->block};
    block.first = block.head * own->columns + column;
    block.key_head = block.head / (own->heads / own->key_heads);
    block.at = (size_t)own->matrices_at + (size_t)number * (size_t)own->rows_of_state * (size_t)own->block;
    return block;
}

/* Places of blocks in a thread's memory: zeros for a text without a state, a state of its own for a step in parts, and the slots. */
enum { ZEROS, OWN, FIRST_SLOT };

/* One step: its rows in parts, of which the first takes its path in. */
static void run_step(const StateRange *range, const StateOperation *own, const Block *block, const Step *step, Sweep *sweep_of, int rows,
                     const float *x, float *work, float *out) {
    Path path;
    Sums sums;
    const int values = own->heads * own->columns, before_values = own->is_delta ? 2 * own->key_heads * own->rows_of_state : 0;
    const float *packed = packed_of(own, work, rows, block->key_head, step->first_row);
    if (step->path >= 0) open_path(range, own, block, step->path, work, &path), sweep_of->path = &path;
    sweep_of->stride = 2 * step->num_rows;
    for (int first = 0; !first || first < step->num_rows; first += MOST_ROWS) {
        const int count = step->num_rows - first < MOST_ROWS ? step->num_rows - first : MOST_ROWS;
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

/* Where a block begins, NULL = nowhere yet; what its few rows read and write is asked for, which lies about in lines of its own. */
const float *ask_for_state_block(const StateRange *range, const StateOperation *own, int rows, int number, const float *x, float *out) {
    const Block block = open_block(own, number);
    const size_t updates = recorded(own).updates + (size_t)block.first;
    const int values = own->is_delta ? 2 * own->key_heads * own->rows_of_state : 0, num_few = rows <= 2 * GRID ? rows : 0;
    for (int i = 0; i < range->num_pending; i++) ask_for(record_of(range, range->pending[i]) + updates, own->block, 0);
    for (int row = 0; row < num_few; row++) {
        ask_for(x + (size_t)row * (size_t)own->channels + values + block.first, own->block, 0);
        ask_for(out + (size_t)row * (size_t)(own->heads * own->columns) + block.first, own->block, 1);
        if (range->rows[row] >= 0) ask_for(record_of(range, range->rows[row]) + updates, own->block, 1);
    }
    return range->state ? range->state + block.at : NULL;
}

/* All rows of a range, of one block of columns; x, work and out are those of its first row. next: the block that the thread runs behind it,
 * or NULL. */
void run_state_block(const StateRange *range, const StateOperation *own, int rows, int number, const float *next, const float *x, float *work,
                     float *out, float *scratch) {
    const Block block = open_block(own, number);
    const int size = own->rows_of_state, lanes = own->block / LANES;
    const size_t floats_a_block = (size_t)size * (size_t)own->block;
    float *state = range->state ? range->state + block.at : scratch + ZEROS * floats_a_block;
    if (!range->state) memset(state, 0, floats_a_block * sizeof(float));
    int slow = 0; /* the next block is asked for during as many sweeps as there are: the memory needs longer for it than one takes */
    while (2 << slow <= range->num_steps && slow < 3) slow++;
    int parts = next ? 1 << slow : 0;
    for (int i = 0; i < range->num_steps; i++) {
        const Step *step = range->steps + i;
        float *slots = scratch + FIRST_SLOT * floats_a_block;
        Sweep sweep = {.from = step->from == IN_PLACE ? state : slots + (size_t)step->from * floats_a_block, .size = size, .lanes = lanes};
        if (step->path >= 0) {
            if (step->to == IN_PLACE)
                sweep.to = state;
            else if (step->to >= 0)
                sweep.to = slots + (size_t)step->to * floats_a_block;
            else if (step->num_rows > MOST_ROWS)
                sweep.to = scratch + OWN * floats_a_block;
        }
        sweep.soon = parts ? next : sweep.from, sweep.slow = slow;
        if (parts) parts--, next += (floats_a_block / LANES >> slow) * LANES;
        const float *behind = sweep.to;
        run_step(range, own, &block, step, &sweep, rows, x, work, out);
        for (int save = 0; save < step->num_saves; save++)
            memcpy(range->saves[step->first_save + save].state + block.at, behind, floats_a_block * sizeof(float));
    }
}
