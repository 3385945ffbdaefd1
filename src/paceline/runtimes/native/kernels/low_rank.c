/* LoRA: y += up (down x) for the rows of each adapter.
 *
 * Both factors are read once a pass, for all rows of the adapter, in panels of 8 (down) or 16 (up) outputs. An output of `down` is one sum in 16
 * lanes over ascending columns, one of `up` a sum over ascending ranks, so a row's bits do not depend on other rows or adapters. Rows are
 * float32, however the product itself rounds them. Of an expert, the pairs with the same adapter are consecutive (sort_pairs) and computed
 * together. */
#include "float_weights.h"
#include "work.h"

#define DOWN_OUTPUTS 8 /* of a panel of `down` or of a replacement matrix: [columns / 16, padded][8][16] */
#define AHEAD 4096 /* prefetch distance in bytes: the hardware prefetcher stops at page boundaries */
#define CACHE_LINE 64
#define SUMS 16 /* in registers: 8 outputs times two rows */
#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < (count); i++)

/* Inputs and outputs of some rows; `real`: how many are not padding. */
typedef struct {
    const float *x[8];
    float *to[8];
    int real;
} Rows;

/* Compute outputs [8 panel, 8 panel + 8) of a matrix for `rows` rows, without padding outputs. */
INLINE void sum_panel(const int kind, const Matrix *matrix, int panel, const Rows *own, const int rows) {
    const int first = panel * DOWN_OUTPUTS, left = matrix->outputs - first, count = left < DOWN_OUTPUTS ? left : DOWN_OUTPUTS;
    const uint8_t *codes = matrix->codes + (size_t)panel * (size_t)matrix->row_bytes;
    floats sum[SUMS];
    EACH(i, SUMS) sum[i] = broadcast(0.0f);
    for (int column = 0; column < matrix->columns; column += LANES) {
        const int real = matrix->columns - column < LANES ? matrix->columns - column : LANES;
        floats x[2];
        EACH(row, rows) x[row] = load_part(own->x[row] + column, real);
        EACH(line, DOWN_OUTPUTS / (kind == F32 ? 1 : 2))
            __builtin_prefetch(codes + (size_t)column * DOWN_OUTPUTS * (kind == F32 ? 4 : 2) + AHEAD + line * CACHE_LINE, 0, 2);
        EACH(n, DOWN_OUTPUTS) {
            const floats w = load_weights(kind, codes, column * DOWN_OUTPUTS + n * LANES, LANES);
            EACH(row, rows) sum[n * rows + row] = fused(w, x[row], sum[n * rows + row]);
        }
    }
    float totals[SUMS];
    store(totals, lane_sums(sum));
    EACH(row, rows)
        for (int n = 0; n < count; n++) own->to[row][first + n] = totals[n * rows + row];
}

INLINE void sum_kind(const int kind, const Matrix *matrix, int begin, int end, const Rows *own) {
    if (own->real == 1)
        for (int panel = begin; panel < end; panel++) sum_panel(kind, matrix, panel, own, 1);
    else
        for (int panel = begin; panel < end; panel++) sum_panel(kind, matrix, panel, own, 2);
}

/* Return the index of a row; numbers NULL = 0, 1, 2, ... */
static size_t place_of(const int32_t *numbers, int number) { return (size_t)(numbers ? numbers[number] : number); }

/* Compute panels [begin, end) for `count` rows of x. is_scattered: results are at the rows' indices; else consecutive. */
static void sum_rows(const Matrix *matrix, int begin, int end, const float *x, const int32_t *numbers, int count, float *to, size_t width,
                     int is_scattered) {
    for (int first = 0; first < count; first += 2) {
        Rows own = {.real = count - first < 2 ? 1 : 2};
        for (int row = 0; row < own.real; row++) {
            const int place = first + row;
            own.x[row] = x + place_of(numbers, place) * (size_t)matrix->columns;
            own.to[row] = to + place_of(is_scattered ? numbers : NULL, place) * width;
        }
        if (matrix->kind == F32)
            sum_kind(F32, matrix, begin, end, &own);
        else if (matrix->kind == F16)
            sum_kind(F16, matrix, begin, end, &own);
        else
            sum_kind(BF16, matrix, begin, end, &own);
    }
}

/* Add one panel of `up` times x = down's result, and the bias, for some rows. */
INLINE void add_panel(const int kind, const AdapterProduct *product, int panel, int outputs, const Rows *own, const int rows) {
    const int rank = product->rank, at = panel * LANES, count = outputs - at < LANES ? outputs - at : LANES;
    const uint8_t *up = product->up + (size_t)panel * (size_t)rank * LANES * (kind == F32 ? 4 : 2);
    floats sum[8];
    EACH(row, rows) sum[row] = broadcast(0.0f);
    for (int r = 0; r < rank; r++) {
        const floats w = load_weights(kind, up, r * LANES, LANES);
        EACH(row, rows) sum[row] = fused(w, broadcast(own->x[row][r]), sum[row]);
    }
    for (int row = 0; row < own->real; row++) {
        if (product->bias) sum[row] = sum[row] + load_part(product->bias + at, count);
        store_part(own->to[row] + at, load_part(own->to[row] + at, count) + sum[row], count);
    }
}

INLINE void add_kind(const int kind, const AdapterProduct *product, int begin, int end, int outputs, const Rows *own) {
    if (own->real == 1)
        for (int panel = begin; panel < end; panel++) add_panel(kind, product, panel, outputs, own, 1);
    else if (own->real == 2)
        for (int panel = begin; panel < end; panel++) add_panel(kind, product, panel, outputs, own, 2);
    else if (own->real <= 4)
        for (int panel = begin; panel < end; panel++) add_panel(kind, product, panel, outputs, own, 4);
    else
        for (int panel = begin; panel < end; panel++) add_panel(kind, product, panel, outputs, own, 8);
}

/* Add panels [begin, end) of a product for `count` rows. */
static void add_rows(const AdapterProduct *product, int begin, int end, int outputs, const float *low_rank, size_t width, const int32_t *numbers,
                     int count, float *y) {
    for (int first = 0; first < count; first += 8) {
        Rows own = {.real = count - first < 8 ? count - first : 8};
        for (int row = 0; row < 8; row++) {
            const int place = first + (row < own.real ? row : 0);
            own.x[row] = low_rank + (size_t)place * width + product->first;
            own.to[row] = y + place_of(numbers, place) * (size_t)outputs;
        }
        if (product->kind == F32)
            add_kind(F32, product, begin, end, outputs, &own);
        else if (product->kind == F16)
            add_kind(F16, product, begin, end, outputs, &own);
        else
            add_kind(BF16, product, begin, end, outputs, &own);
    }
}

static const AdapterSite *site_of(const PassAdapter *adapter, const LinearOperation *own) {
    const AdapterSite *site = adapter->sites + own->site;
    return site->products && adapter->count[own->head.rows == LOGITS_ROWS] ? site : NULL;
}

/* Return whether any row of the operation has an adapter that changes it. */
int has_low_rank(const Pass *pass, const LinearOperation *own) {
    for (int number = 0; own->site >= 0 && number < pass->num_adapters; number++)
        if (site_of(pass->adapters + number, own)) return 1;
    return 0;
}

/* Multiply the results of `down` for ranks [begin, end) by the rows' scalings (of a mixture of adapters). */
static void scale_rows(const PassAdapter *adapter, const int32_t *columns, int begin, int end, float *low_rank, size_t width) {
    for (int row = 0; row < adapter->count[0]; row++)
        for (int rank = begin; rank < end; rank++)
            low_rank[(size_t)row * width + (size_t)rank] *= adapter->scalings[(size_t)row * (size_t)adapter->num_scalings + (size_t)columns[rank]];
}

/* Return the number of pieces of `run_down`. */
int pieces_of_down(const Work *work, const LinearOperation *own) {
    int pieces = 0;
    for (int number = 0; number < work->pass->num_adapters; number++) {
        const AdapterSite *site = site_of(work->pass->adapters + number, own);
        if (site && site->down) pieces += parts_of(site->down->outputs, DOWN_OUTPUTS);
    }
    return pieces;
}

/* Compute one panel of an adapter's `down` for its rows. */
void run_down(const Work *work, const LinearOperation *own, int piece) {
    const Pass *pass = work->pass;
    const int is_logits = own->head.rows == LOGITS_ROWS;
    const size_t width = (size_t)pass->low_rank_floats;
    const PassAdapter *adapter = pass->adapters;
    for (;; adapter++) {
        const AdapterSite *site = site_of(adapter, own);
        const int panels = site && site->down ? parts_of(site->down->outputs, DOWN_OUTPUTS) : 0;
        if (piece < panels) break;
        piece -= panels;
    }
    const AdapterSite *site = site_of(adapter, own);
    const int first = adapter->first[is_logits], begin = piece * DOWN_OUTPUTS, left = site->down->outputs - begin;
    float *low_rank = pass->low_rank + (size_t)first * width;
    sum_rows(site->down, piece, piece + 1, buffer(work, own->x), pass->adapter_rows + first, adapter->count[is_logits], low_rank, width, 0);
    if (site->scaling_columns && adapter->scalings && !is_logits)
        scale_rows(adapter, site->scaling_columns, begin, begin + (left < DOWN_OUTPUTS ? left : DOWN_OUTPUTS), low_rank, width);
}

/* Prefetch `up` of outputs [begin, end). */
static void prefetch_up(const AdapterProduct *product, int begin, int end) {
    if (!product->up) return;
    const size_t panel_bytes = (size_t)product->rank * LANES * (product->kind == F32 ? 4 : 2);
    const uint8_t *up = product->up + (size_t)(begin / LANES) * panel_bytes;
    const size_t bytes = (size_t)parts_of(end - begin, LANES) * panel_bytes;
    for (size_t at = 0; at < bytes; at += CACHE_LINE) __builtin_prefetch(up + at, 0, 2);
}

/* Prefetch what `add_low_rank` will read. */
void prefetch_low_rank(const Work *work, const LinearOperation *own, int matrix, int begin, int end) {
    for (int number = 0; number < work->pass->num_adapters; number++) {
        const AdapterSite *site = site_of(work->pass->adapters + number, own);
        if (site) prefetch_up(site->products + matrix, begin, end);
    }
}

/* Apply adapters to outputs [begin, end) of a product; `begin` is a multiple of 16. */
void add_low_rank(const Work *work, const LinearOperation *own, int matrix, int begin, int end) {
    const Pass *pass = work->pass;
    const int is_logits = own->head.rows == LOGITS_ROWS, outputs = own->matrices[matrix].outputs;
    const size_t width = (size_t)pass->low_rank_floats;
    float *y = buffer(work, own->matrices[matrix].out);
    for (int number = 0; number < pass->num_adapters; number++) {
        const PassAdapter *adapter = pass->adapters + number;
        const AdapterSite *site = site_of(adapter, own);
        if (!site) continue;
        const AdapterProduct *product = site->products + matrix;
        const int first = adapter->first[is_logits], count = adapter->count[is_logits];
        const int32_t *numbers = pass->adapter_rows + first;
        if (product->replacement)
            sum_rows(product->replacement, begin / DOWN_OUTPUTS, parts_of(end, DOWN_OUTPUTS), buffer(work, own->x), numbers, count, y,
                     (size_t)outputs, 1);
        if (product->up)
            add_rows(product, begin / LANES, parts_of(end, LANES), outputs, pass->low_rank + (size_t)first * width, width, numbers, count, y);
    }
}

/* Pairs [first, first + count) of an expert with the same adapter, and its site. */
typedef struct {
    const AdapterSite *site;
    int first, count;
} AdapterPairs;

/* Return the next pairs of an expert with an adapter, from `pair` on; count 0 = none. */
static AdapterPairs next_pairs(const Pass *pass, const ExpertsOperation *own, const Routes *routes, const struct Active *active, int pair) {
    const int end = active->first + active->count;
    while (pair < end) {
        const int first = pair, number = pass->adapter_of_row[routes->rows[first]];
        while (pair < end && pass->adapter_of_row[routes->rows[pair]] == number) pair++;
        const AdapterSite *site = number < 0 ? NULL : pass->adapters[number].sites + own->site + active->expert;
        if (site && site->products) return (AdapterPairs){site, first, pair - first};
    }
    return (AdapterPairs){NULL, end, 0};
}

#define EACH_ADAPTER_PAIRS(pairs, active)                                                                 \
    for (AdapterPairs pairs = next_pairs(pass, own, routes, active, (active)->first); pairs.count;        \
         pairs = next_pairs(pass, own, routes, active, pairs.first + pairs.count))

/* Return whether any pair has an adapter that changes its expert. */
int has_low_rank_pairs(const Pass *pass, const ExpertsOperation *own, const Routes *routes) {
    if (own->site < 0 || !pass->num_adapters) return 0;
    for (int number = 0; number < *routes->num_active; number++) {
        const struct Active *active = routes->active + number;
        if (next_pairs(pass, own, routes, active, active->first).count) return 1;
    }
    return 0;
}

/* Compute `down` for the pairs of all experts. `ticket`: the last one used; `skipped`: those used before. */
void run_down_of_pairs(const Work *work, const ExpertsOperation *own, const Routes *routes, int ticket, int skipped) {
    const Pass *pass = work->pass;
    const size_t width = (size_t)pass->low_rank_floats;
    const float *x = buffer(work, own->x);
    for (int number = 0; number < *routes->num_active; number++)
        EACH_ADAPTER_PAIRS(pairs, routes->active + number) {
            const Matrix *down = pairs.site->down;
            if (!down) continue;
            const int panels = parts_of(down->outputs, DOWN_OUTPUTS);
            for (; ticket - skipped < panels; ticket = next_ticket(work, 0))
                sum_rows(down, ticket - skipped, ticket - skipped + 1, own->of_pairs ? x + (size_t)pairs.first * (size_t)down->columns : x,
                         own->of_pairs ? NULL : routes->rows + pairs.first, pairs.count, pass->low_rank + (size_t)pairs.first * width, width, 0);
            skipped += panels;
        }
}

/* Prefetch what `add_to_pairs` will read. */
void prefetch_pairs(const Work *work, const ExpertsOperation *own, const Routes *routes, const struct Active *active, int matrix, int begin, int end) {
    const Pass *pass = work->pass;
    EACH_ADAPTER_PAIRS(pairs, active) prefetch_up(pairs.site->products + matrix, begin, end);
}

/* Apply adapters to outputs [begin, end) of the pairs of one expert. */
void add_to_pairs(const Work *work, const ExpertsOperation *own, const Routes *routes, const struct Active *active, int matrix, int begin, int end) {
    const Pass *pass = work->pass;
    const Matrix *like = own->matrices + matrix * own->experts;
    const size_t width = (size_t)pass->low_rank_floats;
    EACH_ADAPTER_PAIRS(pairs, active) {
        const AdapterProduct *product = pairs.site->products + matrix;
        if (product->up)
            add_rows(product, begin / LANES, parts_of(end, LANES), like->outputs, pass->low_rank + (size_t)pairs.first * width, width, NULL,
                     pairs.count, buffer(work, like->out) + (size_t)pairs.first * (size_t)like->outputs);
    }
}
