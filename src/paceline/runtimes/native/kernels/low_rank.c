/* LoRA adapters: y += up (down x) for the rows of each adapter.
 *
 * `down` and `up` are read once in a pass, for all rows of the adapter, in panels of 8 (down) or 16 (up) outputs. An output of `down` is one sum in
 * 16 lanes over ascending columns, an output of `up` a sum over ascending ranks, so a row's bits do not depend on other rows or adapters. Rows of x
 * are float32, even if the product with the base weights rounds them. With experts, the pairs of an expert with the same adapter are consecutive
 * (sort_pairs) and are computed together. */
#include "linear.h"
#include "work.h"

#define DOWN_OUTPUTS 8 /* outputs of a panel of `down`, or of a replacement matrix: [columns / 16][8][16], padded with zeros */
#define PREFETCH_DISTANCE_BYTES 4096 /* the hardware prefetcher stops at page boundaries */
#define CACHE_LINE_BYTES 64
#define NUM_SUMS 16 /* sums that stay in registers: 8 outputs times two rows */
#define EACH_INDEX(i, count) _Pragma("unroll") for (int i = 0; i < (count); i++)

/* Addresses of the inputs and outputs of up to 8 rows. Rows from num_real on are padding. */
typedef struct {
    const float *x[8];
    float *to[8];
    int num_real;
} RowBatch;

/* Compute one panel of a `down` or replacement matrix for `rows` rows. */
INLINE void compute_down_panel(const int kind, const Matrix *matrix, int panel, const RowBatch *batch, const int rows) {
    const int first = panel * DOWN_OUTPUTS, left = matrix->outputs - first, count = left < DOWN_OUTPUTS ? left : DOWN_OUTPUTS;
    const uint8_t *codes = matrix->codes + (size_t)panel * (size_t)matrix->row_bytes;
    floats sum[NUM_SUMS];
    EACH_INDEX(i, NUM_SUMS) sum[i] = broadcast(0.0f);
    for (int column = 0; column < matrix->columns; column += LANES) {
        const int num_real = matrix->columns - column < LANES ? matrix->columns - column : LANES;
        floats x[2];
        EACH_INDEX(row, rows) x[row] = load_part(batch->x[row] + column, num_real);
        EACH_INDEX(line, DOWN_OUTPUTS / (kind == F32 ? 1 : 2))
            __builtin_prefetch(codes + (size_t)column * DOWN_OUTPUTS * (kind == F32 ? 4 : 2) + PREFETCH_DISTANCE_BYTES + line * CACHE_LINE_BYTES, 0, 2);
        EACH_INDEX(n, DOWN_OUTPUTS) {
            const floats w = load_weights(kind, codes, column * DOWN_OUTPUTS + n * LANES, LANES);
            EACH_INDEX(row, rows) sum[n * rows + row] = fmadd(w, x[row], sum[n * rows + row]);
        }
    }
    float totals[NUM_SUMS];
    store(totals, lane_sums(sum));
    EACH_INDEX(row, rows)
        for (int n = 0; n < count; n++) batch->to[row][first + n] = totals[n * rows + row];
}

INLINE void compute_down_panels(const int kind, const Matrix *matrix, int begin, int end, const RowBatch *batch) {
    for (int panel = begin; panel < end; panel++)
        if (batch->num_real == 1) compute_down_panel(kind, matrix, panel, batch, 1);
        else compute_down_panel(kind, matrix, panel, batch, 2);
}

/* Compute panels [begin, end) of a matrix for `count` rows of x. is_scattered: store results at the rows' indices, else consecutively. */
static void multiply_down(const Matrix *matrix, int begin, int end, const float *x, const int32_t *row_indices, int count, float *to, size_t width,
                            int is_scattered) {
    for (int first = 0; first < count; first += 2) {
        RowBatch batch = {.num_real = count - first < 2 ? 1 : 2};
        for (int row = 0; row < batch.num_real; row++) {
            const int place = first + row;
            batch.x[row] = x + row_index(row_indices, place) * (size_t)matrix->columns;
            batch.to[row] = to + row_index(is_scattered ? row_indices : NULL, place) * width;
        }
        if (matrix->kind == F32) compute_down_panels(F32, matrix, begin, end, &batch);
        else if (matrix->kind == F16) compute_down_panels(F16, matrix, begin, end, &batch);
        else compute_down_panels(BF16, matrix, begin, end, &batch);
    }
}

/* Add a panel of `up` times the result of `down`, and the bias, to the outputs of some rows. */
INLINE void add_up_panel(const int kind, const AdapterProduct *product, int panel, int outputs, const RowBatch *batch, const int rows) {
    const int rank = product->rank, at = panel * LANES, count = outputs - at < LANES ? outputs - at : LANES;
    const uint8_t *up = product->up + (size_t)panel * (size_t)rank * LANES * (kind == F32 ? 4 : 2);
    floats sum[8];
    EACH_INDEX(row, rows) sum[row] = broadcast(0.0f);
    for (int r = 0; r < rank; r++) {
        const floats w = load_weights(kind, up, r * LANES, LANES);
        EACH_INDEX(row, rows) sum[row] = fmadd(w, broadcast(batch->x[row][r]), sum[row]);
    }
    for (int row = 0; row < batch->num_real; row++) {
        if (product->bias) sum[row] = sum[row] + load_part(product->bias + at, count);
        store_part(batch->to[row] + at, load_part(batch->to[row] + at, count) + sum[row], count);
    }
}

INLINE void add_up_panels(const int kind, const AdapterProduct *product, int begin, int end, int outputs, const RowBatch *batch) {
    for (int panel = begin; panel < end; panel++)
        if (batch->num_real == 1) add_up_panel(kind, product, panel, outputs, batch, 1);
        else if (batch->num_real == 2) add_up_panel(kind, product, panel, outputs, batch, 2);
        else if (batch->num_real <= 4) add_up_panel(kind, product, panel, outputs, batch, 4);
        else add_up_panel(kind, product, panel, outputs, batch, 8);
}

/* Add panels [begin, end) of a LoRA update to the outputs of `count` rows. */
static void add_updates(const AdapterProduct *product, int begin, int end, int outputs, const float *low_rank, size_t width, const int32_t *row_indices,
                          int count, float *y) {
    for (int first = 0; first < count; first += 8) {
        RowBatch batch = {.num_real = count - first < 8 ? count - first : 8};
        for (int row = 0; row < 8; row++) {
            const int place = first + (row < batch.num_real ? row : 0);
            batch.x[row] = low_rank + (size_t)place * width + product->first_rank;
            batch.to[row] = y + row_index(row_indices, place) * (size_t)outputs;
        }
        if (product->kind == F32) add_up_panels(F32, product, begin, end, outputs, &batch);
        else if (product->kind == F16) add_up_panels(F16, product, begin, end, outputs, &batch);
        else add_up_panels(BF16, product, begin, end, outputs, &batch);
    }
}

static const AdapterSite *adapter_site_of(const PassAdapter *adapter, const LinearOperation *op) {
    const AdapterSite *site = adapter->sites + op->adapter_site;
    return site->products && adapter->count[op->common.rows == LOGITS_ROWS] ? site : NULL;
}

/* Return whether any row of the operation has an adapter that changes its results. */
int has_adapters_for(const Pass *pass, const LinearOperation *op) {
    for (int number = 0; op->adapter_site >= 0 && number < pass->num_adapters; number++)
        if (adapter_site_of(pass->adapters + number, op)) return 1;
    return 0;
}

/* Multiply results [begin, end) of `down` by the X-LoRA scalings of each row. */
static void apply_xlora_scalings(const PassAdapter *adapter, const int32_t *columns, int begin, int end, float *low_rank, size_t width) {
    for (int row = 0; row < adapter->count[0]; row++)
        for (int rank = begin; rank < end; rank++)
            low_rank[(size_t)row * width + (size_t)rank] *= adapter->scalings[(size_t)row * (size_t)adapter->num_scalings + (size_t)columns[rank]];
}

/* Return the number of pieces of work for `compute_down_piece`: the panels of `down` of all adapters. */
int num_down_pieces(const Work *work, const LinearOperation *op) {
    int pieces = 0;
    for (int number = 0; number < work->pass->num_adapters; number++) {
        const AdapterSite *site = adapter_site_of(work->pass->adapters + number, op);
        if (site && site->down) pieces += ceil_div(site->down->outputs, DOWN_OUTPUTS);
    }
    return pieces;
}

/* Compute one piece: a panel of an adapter's `down`, for all rows of the adapter. */
void compute_down_piece(const Work *work, const LinearOperation *op, int piece) {
    const Pass *pass = work->pass;
    const int is_logits = op->common.rows == LOGITS_ROWS;
    const size_t width = (size_t)pass->low_rank_floats;
    const PassAdapter *adapter = pass->adapters;
    for (;; adapter++) {
        const AdapterSite *site = adapter_site_of(adapter, op);
        const int panels = site && site->down ? ceil_div(site->down->outputs, DOWN_OUTPUTS) : 0;
        if (piece < panels) break;
        piece -= panels;
    }
    const AdapterSite *site = adapter_site_of(adapter, op);
    const int first = adapter->first[is_logits], begin = piece * DOWN_OUTPUTS, left = site->down->outputs - begin;
    float *low_rank = pass->low_rank + (size_t)first * width;
    multiply_down(site->down, piece, piece + 1, buffer(work, op->x), pass->adapter_rows + first, adapter->count[is_logits], low_rank, width, 0);
    if (site->scaling_columns && adapter->scalings && !is_logits)
        apply_xlora_scalings(adapter, site->scaling_columns, begin, begin + (left < DOWN_OUTPUTS ? left : DOWN_OUTPUTS), low_rank, width);
}

/* Prefetch the weights of `up` for outputs [begin, end). */
static void prefetch_up(const AdapterProduct *product, int begin, int end) {
    if (!product->up) return;
    const size_t panel_bytes = (size_t)product->rank * LANES * (product->kind == F32 ? 4 : 2);
    const uint8_t *up = product->up + (size_t)(begin / LANES) * panel_bytes;
    const size_t bytes = (size_t)ceil_div(end - begin, LANES) * panel_bytes;
    for (size_t at = 0; at < bytes; at += CACHE_LINE_BYTES) __builtin_prefetch(up + at, 0, 2);
}

/* Prefetch the weights that add_low_rank reads for the same arguments. */
void prefetch_low_rank(const Work *work, const LinearOperation *op, int matrix, int begin, int end) {
    for (int number = 0; number < work->pass->num_adapters; number++) {
        const AdapterSite *site = adapter_site_of(work->pass->adapters + number, op);
        if (site) prefetch_up(site->products + matrix, begin, end);
    }
}

/* Add the LoRA updates of all rows to outputs [begin, end) of a matrix of the operation; begin is a multiple of 16. */
void add_low_rank(const Work *work, const LinearOperation *op, int matrix, int begin, int end) {
    const Pass *pass = work->pass;
    const int is_logits = op->common.rows == LOGITS_ROWS, outputs = op->matrices[matrix].outputs;
    const size_t width = (size_t)pass->low_rank_floats;
    float *y = buffer(work, op->matrices[matrix].out);
    for (int number = 0; number < pass->num_adapters; number++) {
        const PassAdapter *adapter = pass->adapters + number;
        const AdapterSite *site = adapter_site_of(adapter, op);
        if (!site) continue;
        const AdapterProduct *product = site->products + matrix;
        const int first = adapter->first[is_logits], count = adapter->count[is_logits];
        const int32_t *row_indices = pass->adapter_rows + first;
        if (product->replacement)
            multiply_down(product->replacement, begin / DOWN_OUTPUTS, ceil_div(end, DOWN_OUTPUTS), buffer(work, op->x), row_indices, count, y,
                     (size_t)outputs, 1);
        if (product->up)
            add_updates(product, begin / LANES, ceil_div(end, LANES), outputs, pass->low_rank + (size_t)first * width, width, row_indices, count, y);
    }
}

/* Pairs [first, first + count) of an expert, all with the same adapter, and the adapter's update of this expert. */
typedef struct {
    const AdapterSite *site;
    int first, count;
} AdapterPairs;

/* Return the next pairs of an expert, from `pair` on, that an adapter changes; count 0 = none. */
static AdapterPairs next_pairs(const Pass *pass, const ExpertsOperation *op, const Routes *routes, const ActiveExpert *active, int pair) {
    const int end = active->first + active->count;
    while (pair < end) {
        const int first = pair, number = pass->adapter_of_row[routes->rows[first]];
        while (pair < end && pass->adapter_of_row[routes->rows[pair]] == number) pair++;
        const AdapterSite *site = number < 0 ? NULL : pass->adapters[number].sites + op->adapter_site + active->expert;
        if (site && site->products) return (AdapterPairs){site, first, pair - first};
    }
    return (AdapterPairs){NULL, end, 0};
}

#define EACH_ADAPTER_PAIRS(pairs, active)                                                         \
    for (AdapterPairs pairs = next_pairs(pass, op, routes, active, (active)->first); pairs.count; \
         pairs = next_pairs(pass, op, routes, active, pairs.first + pairs.count))

/* Return whether any pair has an adapter that changes its expert. */
int has_low_rank_pairs(const Pass *pass, const ExpertsOperation *op, const Routes *routes) {
    if (op->adapter_site < 0 || !pass->num_adapters) return 0;
    for (int number = 0; number < *routes->num_active; number++) {
        const ActiveExpert *active = routes->active + number;
        if (next_pairs(pass, op, routes, active, active->first).count) return 1;
    }
    return 0;
}

/* Compute `down` for all pairs. Tickets below num_packed are for pack_expert_rows, others are panels. ticket: drawn but not yet used. */
void compute_down_of_pairs(const Work *work, const ExpertsOperation *op, const Routes *routes, int ticket, int num_packed) {
    const Pass *pass = work->pass;
    const size_t width = (size_t)pass->low_rank_floats;
    const float *x = buffer(work, op->x);
    for (int number = 0; number < *routes->num_active; number++)
        EACH_ADAPTER_PAIRS(pairs, routes->active + number) {
            const Matrix *down = pairs.site->down;
            if (!down) continue;
            const int panels = ceil_div(down->outputs, DOWN_OUTPUTS);
            for (; ticket - num_packed < panels; ticket = next_ticket(work, 0))
                multiply_down(down, ticket - num_packed, ticket - num_packed + 1, op->is_per_pair ? x + (size_t)pairs.first * (size_t)down->columns : x,
                         op->is_per_pair ? NULL : routes->rows + pairs.first, pairs.count, pass->low_rank + (size_t)pairs.first * width, width, 0);
            num_packed += panels;
        }
}

/* Prefetch the weights that add_low_rank_to_pairs reads for the same arguments. */
void prefetch_low_rank_of_pairs(const Work *work, const ExpertsOperation *op, const Routes *routes, const ActiveExpert *active, int matrix,
                                int begin, int end) {
    const Pass *pass = work->pass;
    EACH_ADAPTER_PAIRS(pairs, active) prefetch_up(pairs.site->products + matrix, begin, end);
}

/* Add the LoRA updates of the pairs of one expert to outputs [begin, end) of one of its matrices. */
void add_low_rank_to_pairs(const Work *work, const ExpertsOperation *op, const Routes *routes, const ActiveExpert *active, int matrix, int begin, int end) {
    const Pass *pass = work->pass;
    const Matrix *like = op->matrices + matrix * op->num_experts;
    const size_t width = (size_t)pass->low_rank_floats;
    EACH_ADAPTER_PAIRS(pairs, active) {
        const AdapterProduct *product = pairs.site->products + matrix;
        if (product->up)
            add_updates(product, begin / LANES, ceil_div(end, LANES), like->outputs, pass->low_rank + (size_t)pairs.first * width, width, NULL,
                     pairs.count, buffer(work, like->out) + (size_t)pairs.first * (size_t)like->outputs);
    }
}
