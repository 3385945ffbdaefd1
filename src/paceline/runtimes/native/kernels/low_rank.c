/* What adapters add to products: y += up (down x), for the rows of each adapter in turn, and for no other row.
 *
 * Both factors are read once a pass, whatever the number of rows; their outputs lie in panels, so that what is read is one stream. `down`
 * gives every number as one sum in 16 lanes over ascending columns, `up` 16 of them side by side, in sums over ascending ranks. So a row's
 * bits depend neither on the other rows of its adapter nor on other adapters. Rows are taken as they are, whatever the product itself makes
 * of them. Of an expert the pairs of one adapter lie side by side (sort_pairs), and are taken together likewise. */
#include "plain.h"
#include "work.h"

#define DOWN_OUTPUTS 8 /* of a panel of `down` or of a whole matrix: [columns / 16, the last ones padded][8][16] */
#define AHEAD 4096 /* bytes: the processor's own prefetching begins anew with every page */
#define CACHE_LINE 64
#define SUMS 16 /* that fit in registers: of 8 outputs and two rows */
#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < (count); i++)

/* Some rows: what is multiplied, and where the results go. */
typedef struct {
    const float *x[8];
    float *to[8];
    int real;
} Rows;

/* Outputs [8 panel, 8 panel + 8) of a matrix for `rows` rows; what is beyond its last output is not kept. */
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
            const floats w = decode_plain(kind, codes, column * DOWN_OUTPUTS + n * LANES, LANES);
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

/* The place of a row among others; numbers NULL: they are in their order. */
static size_t place_of(const int32_t *numbers, int number) { return (size_t)(numbers ? numbers[number] : number); }

/* Panels [begin, end) for `count` rows of x; scattered: the results lie where the rows do, else one behind another. */
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

/* One panel of outputs for some rows, x what `down` gave for them. */
INLINE void add_panel(const int kind, const AdapterProduct *product, int panel, int outputs, const Rows *own, const int rows) {
    const int rank = product->rank, at = panel * LANES, count = outputs - at < LANES ? outputs - at : LANES;
    const uint8_t *up = product->up + (size_t)panel * (size_t)rank * LANES * (kind == F32 ? 4 : 2);
    floats sum[8];
    EACH(row, rows) sum[row] = broadcast(0.0f);
    for (int r = 0; r < rank; r++) {
        const floats w = decode_plain(kind, up, r * LANES, LANES);
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

/* Panels [begin, end) of a product for `count` rows. */
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
    return site->products && adapter->count[own->head.rows == WANTED_ROWS] ? site : NULL;
}

/* Whether any row of the operation belongs to an adapter that does something here. */
int has_low_rank(const Pass *pass, const LinearOperation *own) {
    for (int number = 0; own->site >= 0 && number < pass->num_adapters; number++)
        if (site_of(pass->adapters + number, own)) return 1;
    return 0;
}

/* Multiply what `down` gave the rows of an adapter for ranks [begin, end) by their scalings. */
static void scale_rows(const PassAdapter *adapter, const int32_t *columns, int begin, int end, float *low_rank, size_t width) {
    for (int row = 0; row < adapter->count[0]; row++)
        for (int rank = begin; rank < end; rank++)
            low_rank[(size_t)row * width + (size_t)rank] *= adapter->scalings[(size_t)row * (size_t)adapter->num_scalings + (size_t)columns[rank]];
}

/* Pieces of `run_down`. */
int pieces_of_down(const Work *work, const LinearOperation *own) {
    int pieces = 0;
    for (int number = 0; number < work->pass->num_adapters; number++) {
        const AdapterSite *site = site_of(work->pass->adapters + number, own);
        if (site && site->down) pieces += parts_of(site->down->outputs, DOWN_OUTPUTS);
    }
    return pieces;
}

/* What a panel of an adapter's `down` makes of its rows. */
void run_down(const Work *work, const LinearOperation *own, int piece) {
    const Pass *pass = work->pass;
    const int is_wanted = own->head.rows == WANTED_ROWS;
    const size_t width = (size_t)pass->low_rank_floats;
    const PassAdapter *adapter = pass->adapters;
    for (;; adapter++) {
        const AdapterSite *site = site_of(adapter, own);
        const int panels = site && site->down ? parts_of(site->down->outputs, DOWN_OUTPUTS) : 0;
        if (piece < panels) break;
        piece -= panels;
    }
    const AdapterSite *site = site_of(adapter, own);
    const int first = adapter->first[is_wanted], begin = piece * DOWN_OUTPUTS, left = site->down->outputs - begin;
    float *low_rank = pass->low_rank + (size_t)first * width;
    sum_rows(site->down, piece, piece + 1, buffer(work, own->x), pass->adapter_rows + first, adapter->count[is_wanted], low_rank, width, 0);
    if (site->columns && adapter->scalings && !is_wanted)
        scale_rows(adapter, site->columns, begin, begin + (left < DOWN_OUTPUTS ? left : DOWN_OUTPUTS), low_rank, width);
}

/* Ask for `up` of outputs [begin, end). */
static void prefetch_up(const AdapterProduct *product, int begin, int end) {
    if (!product->up) return;
    const size_t panel_bytes = (size_t)product->rank * LANES * (product->kind == F32 ? 4 : 2);
    const uint8_t *up = product->up + (size_t)(begin / LANES) * panel_bytes;
    const size_t bytes = (size_t)parts_of(end - begin, LANES) * panel_bytes;
    for (size_t at = 0; at < bytes; at += CACHE_LINE) __builtin_prefetch(up + at, 0, 2);
}

/* Ask for what `add_low_rank` is about to read. */
void prefetch_low_rank(const Work *work, const LinearOperation *own, int matrix, int begin, int end) {
    for (int number = 0; number < work->pass->num_adapters; number++) {
        const AdapterSite *site = site_of(work->pass->adapters + number, own);
        if (site) prefetch_up(site->products + matrix, begin, end);
    }
}

/* Add to outputs [begin, end) of a product, `begin` a multiple of 16, or put others in their place. */
void add_low_rank(const Work *work, const LinearOperation *own, int matrix, int begin, int end) {
    const Pass *pass = work->pass;
    const int is_wanted = own->head.rows == WANTED_ROWS, outputs = own->matrices[matrix].outputs;
    const size_t width = (size_t)pass->low_rank_floats;
    float *y = buffer(work, own->matrices[matrix].out);
    for (int number = 0; number < pass->num_adapters; number++) {
        const PassAdapter *adapter = pass->adapters + number;
        const AdapterSite *site = site_of(adapter, own);
        if (!site) continue;
        const AdapterProduct *product = site->products + matrix;
        const int first = adapter->first[is_wanted], count = adapter->count[is_wanted];
        const int32_t *numbers = pass->adapter_rows + first;
        if (product->whole)
            sum_rows(product->whole, begin / DOWN_OUTPUTS, parts_of(end, DOWN_OUTPUTS), buffer(work, own->x), numbers, count, y,
                     (size_t)outputs, 1);
        if (product->up)
            add_rows(product, begin / LANES, parts_of(end, LANES), outputs, pass->low_rank + (size_t)first * width, width, numbers, count, y);
    }
}

/* Pairs [first, first + count) of an expert that have one adapter, and what it does there. */
typedef struct {
    const AdapterSite *site;
    int first, count;
} OwnPairs;

/* The next such pairs of an expert from one on; count 0: there are no more. */
static OwnPairs next_pairs(const Pass *pass, const ExpertsOperation *own, const Routes *routes, const struct Active *active, int pair) {
    const int end = active->first + active->count;
    while (pair < end) {
        const int first = pair, number = pass->adapter_of_row[routes->rows[first]];
        while (pair < end && pass->adapter_of_row[routes->rows[pair]] == number) pair++;
        const AdapterSite *site = number < 0 ? NULL : pass->adapters[number].sites + own->site + active->expert;
        if (site && site->products) return (OwnPairs){site, first, pair - first};
    }
    return (OwnPairs){NULL, end, 0};
}

#define EACH_OWN_PAIRS(pairs, active)                                                                 \
    for (OwnPairs pairs = next_pairs(pass, own, routes, active, (active)->first); pairs.count;        \
         pairs = next_pairs(pass, own, routes, active, pairs.first + pairs.count))

/* Whether any pair belongs to an adapter that does something to its expert. */
int has_low_rank_pairs(const Pass *pass, const ExpertsOperation *own, const Routes *routes) {
    if (own->site < 0 || !pass->num_adapters) return 0;
    for (int number = 0; number < *routes->num_active; number++) {
        const struct Active *active = routes->active + number;
        if (next_pairs(pass, own, routes, active, active->first).count) return 1;
    }
    return 0;
}

/* As run_down, of the pairs of all experts. */
void run_down_of_pairs(const Work *work, const ExpertsOperation *own, const Routes *routes, int ticket, int skipped) {
    const Pass *pass = work->pass;
    const size_t width = (size_t)pass->low_rank_floats;
    const float *x = buffer(work, own->x);
    for (int number = 0; number < *routes->num_active; number++)
        EACH_OWN_PAIRS(pairs, routes->active + number) {
            const Matrix *down = pairs.site->down;
            if (!down) continue;
            const int panels = parts_of(down->outputs, DOWN_OUTPUTS);
            for (; ticket - skipped < panels; ticket = next_ticket(work, 0))
                sum_rows(down, ticket - skipped, ticket - skipped + 1, own->of_pairs ? x + (size_t)pairs.first * (size_t)down->columns : x,
                         own->of_pairs ? NULL : routes->rows + pairs.first, pairs.count, pass->low_rank + (size_t)pairs.first * width, width, 0);
            skipped += panels;
        }
}

/* Ask for what `add_to_pairs` is about to read. */
void prefetch_pairs(const Work *work, const ExpertsOperation *own, const Routes *routes, const struct Active *active, int matrix, int begin, int end) {
    const Pass *pass = work->pass;
    EACH_OWN_PAIRS(pairs, active) prefetch_up(pairs.site->products + matrix, begin, end);
}

/* As add_low_rank, of the pairs of one expert. */
void add_to_pairs(const Work *work, const ExpertsOperation *own, const Routes *routes, const struct Active *active, int matrix, int begin, int end) {
    const Pass *pass = work->pass;
    const Matrix *like = own->matrices + matrix * own->experts;
    const size_t width = (size_t)pass->low_rank_floats;
    EACH_OWN_PAIRS(pairs, active) {
        const AdapterProduct *product = pairs.site->products + matrix;
        if (product->up)
            add_rows(product, begin / LANES, parts_of(end, LANES), like->outputs, pass->low_rank + (size_t)pairs.first * width, width, NULL,
                     pairs.count, buffer(work, like->out) + (size_t)pairs.first * (size_t)like->outputs);
    }
}
