/* Runs a network: a list of operations over buffers of rows, one after another, each shared out among the threads in pieces. */
#include "native.h"
#include "block_max.h"
#include "threads.h"
#include "work.h"

#include <string.h>

#define OUTPUTS_A_PIECE 48        /* whole tiles of 8, 6, 4 and 3 outputs */
#define PANELS_OUTPUTS_A_PIECE 64 /* four panels of 16, which few rows take at once */
#define PANEL_OUTPUTS 16
#define FLOATS_A_PIECE 512 /* of few rows, so that threads keep to their columns; of many, which no cache keeps, more */
#define FLOATS_OF_MANY_ROWS 4096
#define MANY_ROWS 64
#define PACKED_COLUMNS_A_PIECE 512

/* A pass under way has copies of the records: if another thread describes the next pass meanwhile, the threads of this one still agree on
 * the number of rows, so that none waits at a barrier for ever. */
typedef struct {
    const Program *given_program;
    const Pass *given_pass;
    Program program;
    Pass pass;
} Run;

static int rows_of(const Pass *pass, const Operation *operation) {
    return operation->rows == WANTED_ROWS ? pass->selected_rows : pass->rows;
}

static int outputs_a_piece(int packing, int rows) {
    if (packing != AS_BYTES) return OUTPUTS_A_PIECE;
    return rows > 4 ? PANEL_OUTPUTS : PANELS_OUTPUTS_A_PIECE;
}

/* One row as products take it. Each thread packs it itself: cheaper than a barrier. */
static const float *packed_row_of(const Work *work, const Matrix *matrix, int packing, const float *x) {
    const Program *program = work->program;
    if (packing == AS_FLOATS && matrix->columns % 16 == 0) return x;
    float *packed = program->packed_rows + (size_t)work->thread * packed_floats(1, program->most_columns);
    pack_rows(matrix, x, NULL, 1, packing, 0, 0, matrix->columns, packed);
    return packed;
}

/* Columns of a piece that all rows of a block are packed of. */
static int packed_columns(const Matrix *matrix, int packing) {
    const int group = packing == AS_BYTES ? matrix->group : 1;
    return PACKED_COLUMNS_A_PIECE / group * group;
}

/* One of the blocks of rows of one of the pieces of columns: eight rows are one block, but all threads pack them. */
static void pack_piece(const Work *work, const Matrix *matrix, int packing, const float *x, int blocks, int piece) {
    const int columns = matrix->columns, step = packed_columns(matrix, packing);
    const int begin = piece / blocks * step, end = begin + step < columns ? begin + step : columns;
    pack_rows(matrix, x, NULL, work->rows, packing, piece % blocks, begin, end, work->program->packed);
}

static void prepare_linear(const Work *work, const LinearOperation *own, const float *x, int has_adapters) {
    const int blocks = parts_of(work->rows, MAX_ROWS);
    const int pieces[] = {work->rows > 1 ? parts_of(own->matrices->columns, packed_columns(own->matrices, own->packing)) * blocks : 0,
                          has_adapters ? pieces_of_down(work, own) : 0};
    for (Share share = {.totals = pieces, .count = 2}; take(work, 0, &share);)
        if (share.run)
            run_down(work, own, share.piece);
        else
            pack_piece(work, own->matrices, own->packing, x, blocks, share.piece);
}

static void run_linear(const Work *work, const Operation *operation) {
    const LinearOperation *own = (const LinearOperation *)operation;
    const float *x = buffer(work, own->x);
    const int packing = own->packing, rows = work->rows, has_adapters = has_low_rank(work->pass, own);
    const int step = own->block_max < 0 ? outputs_a_piece(packing, rows) : BLOCK_COLUMNS;
    if (rows > 1 || has_adapters) {
        prepare_linear(work, own, x, has_adapters);
        barrier();
    }
    x = rows > 1 ? work->program->packed : packed_row_of(work, own->matrices, packing, x);
    int totals[own->num_matrices];
    for (int number = 0; number < own->num_matrices; number++) totals[number] = parts_of(own->matrices[number].outputs, step);
    for (Share share = {.totals = totals, .count = own->num_matrices}; take(work, 1, &share);) {
        const Matrix *matrix = own->matrices + share.run;
        const int begin = share.piece * step, end = begin + step < matrix->outputs ? begin + step : matrix->outputs;
        if (has_adapters) prefetch_low_rank(work, own, share.run, begin, end);
        multiply(matrix, begin, end, packing, x, buffer(work, matrix->out), rows);
        if (has_adapters) add_low_rank(work, own, share.run, begin, end);
        if (own->block_max >= 0) keep_block_max(buffer(work, matrix->out), matrix->outputs, rows, begin, buffer(work, own->block_max));
    }
}

static void run_route(const Work *work, const Operation *operation) {
    const RouteOperation *own = (const RouteOperation *)operation;
    const Routes routes = routes_of(buffer(work, operation->out), work->rows, own->chosen);
    const float *x = buffer(work, own->x);
    for (int row; (row = next_ticket(work, 0)) < work->rows;)
        choose_experts(own, x + (size_t)row * (size_t)own->experts, routes.experts + row * own->chosen, routes.weights + row * own->chosen);
    barrier();
    const int32_t *order = work->pass->num_adapters && operation->rows == ALL_ROWS ? work->pass->row_order : NULL;
    if (next_ticket(work, 1) == 0) sort_pairs(own, &routes, order, work->rows);
}

/* The rows of each expert, those of one after those of the other. Tickets as in pack_all. */
static int pack_pairs(const Work *work, const ExpertsOperation *own, const Routes *routes, int ticket, int *pieces) {
    const float *x = buffer(work, own->x);
    const size_t columns = (size_t)own->matrices[0].columns, row_words = packed_row(own->matrices, own->packing);
    int skipped = 0;
    for (int number = 0; number < *routes->num_active; number++) {
        const struct Active *active = routes->active + number;
        const int blocks = parts_of(active->count, MAX_ROWS);
        float *packed = work->program->packed + (size_t)active->packed * row_words;
        for (; ticket - skipped < blocks; ticket = next_ticket(work, 0))
            pack_rows(own->matrices, own->of_pairs ? x + (size_t)active->first * columns : x, own->of_pairs ? NULL : routes->rows + active->first,
                      active->count, own->packing, ticket - skipped, 0, (int)columns, packed);
        skipped += blocks;
    }
    *pieces = skipped;
    return ticket;
}

/* Some outputs of one expert's matrix of one of the kinds, which lie one behind another, those of the active experts each. */
typedef struct {
    const struct Active *active;
    const Matrix *matrix;
    int kind, begin, end;
} Tile;

static Tile tile_of(const ExpertsOperation *own, const Routes *routes, int step, int piece) {
    Tile tile = {.kind = 0};
    for (;; tile.kind++) {
        const int outputs = own->matrices[tile.kind * own->experts].outputs, pieces = parts_of(outputs, step);
        if (piece < *routes->num_active * pieces) {
            tile.active = routes->active + piece / pieces;
            tile.matrix = own->matrices + tile.kind * own->experts + tile.active->expert;
            tile.begin = piece % pieces * step;
            tile.end = tile.begin + step < outputs ? tile.begin + step : outputs;
            return tile;
        }
        piece -= *routes->num_active * pieces;
    }
}

static void run_experts(const Work *work, const Operation *operation) {
    const ExpertsOperation *own = (const ExpertsOperation *)operation;
    const Routes routes = routes_of(buffer(work, own->routes), work->rows, own->chosen);
    const size_t row_words = packed_row(own->matrices, own->packing);
    const int step = outputs_a_piece(own->packing, 1), is_one_row = work->rows == 1 && !own->of_pairs;
    const int has_adapters = has_low_rank_pairs(work->pass, own, &routes);
    const float *x = work->program->packed;
    if (is_one_row) x = packed_row_of(work, own->matrices, own->packing, buffer(work, own->x));
    if (!is_one_row || has_adapters) {
        int taken = next_ticket(work, 0), num_pieces = 0;
        if (!is_one_row) taken = pack_pairs(work, own, &routes, taken, &num_pieces);
        if (has_adapters) run_down_of_pairs(work, own, &routes, taken, num_pieces);
        barrier();
    }
    int total = 0;
    for (int number = 0; number < own->num_matrices; number++)
        total += *routes.num_active * parts_of(own->matrices[number * own->experts].outputs, step);
    for (Share share = {.totals = &total, .count = 1}; take(work, 1, &share);) {
        const Tile tile = tile_of(own, &routes, step, share.piece);
        const struct Active *active = tile.active;
        if (has_adapters) prefetch_pairs(work, own, &routes, active, tile.kind, tile.begin, tile.end);
        multiply(tile.matrix, tile.begin, tile.end, own->packing, is_one_row ? x : x + (size_t)active->packed * row_words,
                 buffer(work, tile.matrix->out) + (size_t)active->first * (size_t)tile.matrix->outputs, active->count);
        if (has_adapters) add_to_pairs(work, own, &routes, active, tile.kind, tile.begin, tile.end);
    }
}

/* The next heads of a row: [*item, *end), counted over all rows. */
static int next_heads(const Work *work, int heads, int at_once, Share *share, int *item, int *end) {
    const int total = parts_of(heads, at_once) * work->rows, piece = next_of(work, 0, total, share);
    if (piece == total) return 0;
    const int head = piece / work->rows * at_once, first = piece % work->rows * heads;
    *item = first + head;
    *end = first + (head + at_once < heads ? head + at_once : heads);
    return 1;
}

static void run_norm(const Work *work, const Operation *operation) {
    const NormOperation *own = (const NormOperation *)operation;
    const float *x = buffer(work, own->x);
    float *out = buffer(work, operation->out);
    Share share = {0};
    for (int item, end; next_heads(work, own->heads, 8, &share, &item, &end);)
        for (; item < end; item++) {
            const size_t at = (size_t)item * (size_t)own->head_size;
            const size_t weight = (size_t)(item % own->weighted_heads) * (size_t)own->head_size;
            norm_row(x + at, own->weight ? own->weight + weight : NULL, own->head_size, own->epsilon, out + at);
        }
}

static void run_rope(const Work *work, const Operation *operation) {
    const RopeOperation *own = (const RopeOperation *)operation;
    const float *x = buffer(work, own->x), *cos = work->pass->cos[own->table], *sin = work->pass->sin[own->table];
    float *out = buffer(work, operation->out);
    Share share = {0};
    for (int item, end; next_heads(work, own->heads, 8, &share, &item, &end);)
        for (; item < end; item++) {
            const size_t at = (size_t)item * (size_t)own->head_size, angles = (size_t)(item / own->heads) * (size_t)own->rotary_half;
            rotate_head(x + at, cos + angles, sin + angles, own->head_size, own->rotary_half, out + at);
        }
}

/* Columns [begin, begin + count) of a row, which lie `at` floats behind the beginning of the buffer. */
typedef struct {
    Share share;
    size_t row, at;
    int begin, count;
} Piece;

/* Columns of all rows, then the next columns: whoever has made them takes them. */
static int next_piece(const Work *work, int width, Piece *piece) {
    const int step = work->rows < MANY_ROWS ? FLOATS_A_PIECE : FLOATS_OF_MANY_ROWS;
    const int total = parts_of(width, step) * work->rows, number = next_of(work, 0, total, &piece->share);
    piece->row = (size_t)(number % work->rows);
    piece->begin = number / work->rows * step;
    piece->count = width - piece->begin < step ? width - piece->begin : step;
    piece->at = piece->row * (size_t)width + (size_t)piece->begin;
    return number < total;
}

static void run_gated(const Work *work, const Operation *operation) {
    const GatedOperation *own = (const GatedOperation *)operation;
    const float *x = buffer(work, own->x), *up = buffer(work, own->up);
    float *out = buffer(work, operation->out);
    for (Piece piece = {{0}}; next_piece(work, own->width, &piece);)
        gate(own, x + piece.at, up + piece.at, piece.count, out + piece.at);
}

static void run_combine(const Work *work, const Operation *operation) {
    const CombineOperation *own = (const CombineOperation *)operation;
    const Routes routes = routes_of(buffer(work, own->routes), work->rows, own->chosen);
    const float *x = buffer(work, own->x);
    float *out = buffer(work, operation->out);
    for (Piece piece = {{0}}; next_piece(work, own->width, &piece);) {
        memset(out + piece.at, 0, (size_t)piece.count * sizeof(float));
        for (int i = 0; i < own->chosen; i++) {
            const size_t pair = piece.row * (size_t)own->chosen + (size_t)i, place = (size_t)routes.places[pair];
            add_scaled(x + place * (size_t)own->width + (size_t)piece.begin, piece.count, routes.weights[pair], out + piece.at);
        }
    }
}

static void run_sigmoid_gate(const Work *work, const Operation *operation) {
    const SigmoidGateOperation *own = (const SigmoidGateOperation *)operation;
    const float *x = buffer(work, own->x), *y = buffer(work, own->y);
    float *out = buffer(work, operation->out);
    for (Piece piece = {{0}}; next_piece(work, own->width, &piece);) scale(x + piece.at, piece.count, sigmoid_of(y[piece.row]), out + piece.at);
}

static void run_add(const Work *work, const Operation *operation) {
    const AddOperation *own = (const AddOperation *)operation;
    const float *x = buffer(work, own->x), *y = buffer(work, own->y);
    float *out = buffer(work, operation->out);
    for (Piece piece = {{0}}; next_piece(work, own->width, &piece);) add(x + piece.at, y + piece.at, piece.count, out + piece.at);
}

static void run_silu_residual(const Work *work, const Operation *operation) {
    const SiluResidualOperation *own = (const SiluResidualOperation *)operation;
    const float *x = buffer(work, own->x), *y = buffer(work, own->y);
    float *out = buffer(work, operation->out);
    for (Piece piece = {{0}}; next_piece(work, own->width, &piece);) add_silu(x + piece.at, y + piece.at, piece.count, out + piece.at);
}

static void run_soft_cap(const Work *work, const Operation *operation) {
    const SoftCapOperation *own = (const SoftCapOperation *)operation;
    const float *x = buffer(work, own->x);
    float *out = buffer(work, operation->out);
    for (Piece piece = {{0}}; next_piece(work, own->width, &piece);) soft_cap(x + piece.at, piece.count, own->cap, out + piece.at);
}

static void run_scale(const Work *work, const Operation *operation) {
    const ScaleOperation *own = (const ScaleOperation *)operation;
    const float *x = buffer(work, own->x);
    float *out = buffer(work, operation->out);
    for (Piece piece = {{0}}; next_piece(work, own->width, &piece);) scale(x + piece.at, piece.count, own->factor, out + piece.at);
}

static void run_concat(const Work *work, const Operation *operation) {
    const ConcatOperation *own = (const ConcatOperation *)operation;
    const size_t x_width = (size_t)own->x_width, y_width = (size_t)own->y_width;
    const float *x = buffer(work, own->x), *y = buffer(work, own->y);
    float *out = buffer(work, operation->out);
    for (Piece piece = {{0}}; next_piece(work, own->x_width + own->y_width, &piece);)
        join(x + piece.row * x_width, own->x_width, y + piece.row * y_width, piece.begin, piece.count, out + piece.at);
}

static void run_columns(const Work *work, const Operation *operation) {
    const ColumnsOperation *own = (const ColumnsOperation *)operation;
    const float *x = buffer(work, own->x) + own->begin;
    float *out = buffer(work, operation->out);
    for (Piece piece = {{0}}; next_piece(work, own->width, &piece);)
        memcpy(out + piece.at, x + piece.row * (size_t)own->x_width + (size_t)piece.begin, (size_t)piece.count * sizeof(float));
}

static void run_gather(const Work *work, const Operation *operation) {
    const GatherOperation *own = (const GatherOperation *)operation;
    const int32_t *numbers = work->pass->selected;
    const float *x = buffer(work, own->x);
    float *out = buffer(work, operation->out);
    for (Piece piece = {{0}}; next_piece(work, own->width, &piece);)
        memcpy(out + piece.at, x + (size_t)numbers[piece.row] * (size_t)own->width + (size_t)piece.begin, (size_t)piece.count * sizeof(float));
}

static void run_rank(const Work *work, const Operation *operation) {
    const RankOperation *own = (const RankOperation *)operation;
    const int pieces = pieces_of(own->columns), rows = work->rows;
    const size_t width = (size_t)paceline_ranking_floats(own->columns, own->count);
    const Draw *draws = work->pass->draws ? work->pass->draws + (size_t)own->number * (size_t)rows : NULL;
    const float *x = buffer(work, own->x);
    float *out = buffer(work, operation->out);
    for (int item; (item = next_ticket(work, 0)) < rows * pieces;) {
        const size_t row = (size_t)(item / pieces);
        rank_piece(own, draws ? draws + row : NULL, x + row * (size_t)own->width, item % pieces, out + row * width);
    }
    barrier();
    for (int row; (row = next_ticket(work, 1)) < rows;) join_pieces(own, out + (size_t)row * width);
}

typedef void Function(const Work *work, const Operation *operation);
static Function *const FUNCTIONS[] = {
    [LINEAR] = run_linear,     [NORM] = run_norm, [ROPE] = run_rope,     [ATTENTION] = run_attention, [GATED] = run_gated,
    [ADD] = run_add,           [GATHER] = run_gather, [SOFT_CAP] = run_soft_cap, [CONCAT] = run_concat,
    [SILU_RESIDUAL] = run_silu_residual, [RANK] = run_rank, [SCALE] = run_scale, [COLUMNS] = run_columns,
    [ROUTE] = run_route,       [EXPERTS] = run_experts, [COMBINE] = run_combine, [SIGMOID_GATE] = run_sigmoid_gate,
    [CONVOLUTION] = run_convolution, [STATE] = run_state,
};

/* The first operation with rows from a number on. */
static int first_with_rows(const Program *program, const Pass *pass, int index) {
    while (index < program->num_operations && !rows_of(pass, program->operations[index])) index++;
    return index;
}

static void run_operations(void *argument, int thread, int num_threads) {
    const Program *program = &((Run *)argument)->program;
    const Pass *pass = &((Run *)argument)->pass;
    int64_t *taken = program->taken + (size_t)thread * (size_t)program->taken_a_thread;
    for (int index = first_with_rows(program, pass, 0), next; index < program->num_operations; index = next) {
        const Operation *operation = program->operations[index];
        next = first_with_rows(program, pass, index + 1);
        if (next < program->num_operations) memset(taken + PHASES * next, 0, PHASES * sizeof *taken);
        FUNCTIONS[operation->code](&(Work){program, pass, index, rows_of(pass, operation), thread, num_threads}, operation);
        barrier();
    }
}

static void prepare(void *argument) {
    Run *own = argument;
    own->program = *own->given_program;
    own->pass = *own->given_pass;
    memset(own->program.tickets, 0, PHASES * (size_t)own->program.num_operations * sizeof(int32_t));
    const int first = first_with_rows(&own->program, &own->pass, 0);
    for (int thread = 0; thread < own->program.num_threads && first < own->program.num_operations; thread++)
        memset(own->program.taken + (size_t)thread * (size_t)own->program.taken_a_thread + PHASES * first, 0, PHASES * sizeof(int64_t));
}

/* One pass; the results are in the buffers. */
void paceline_run(const Program *program, const Pass *pass) {
    Run own = {.given_program = program, .given_pass = pass};
    run_on_threads(prepare, run_operations, &own, program->num_threads);
    for (int range = 0; own.pass.states && range < own.pass.num_ranges; range++) *own.pass.states[range].has_run = 1;
}

/* Floats of `packed` for products of `rows` rows and `columns` columns. */
int64_t paceline_packed_floats(int32_t rows, int32_t columns) { return (int64_t)packed_floats(rows, columns); }

/* What is compared when the library is loaded: the version, then the size of each record in the order of records.py; -1 behind them. */
int32_t paceline_layout(int32_t index) {
    static const size_t LAYOUT[] = {
        KERNELS_VERSION, sizeof(Matrix), sizeof(SuperBlocks), sizeof(Blocks), sizeof(LinearOperation), sizeof(NormOperation), sizeof(RopeOperation),
        sizeof(AttentionOperation), sizeof(GatedOperation), sizeof(AddOperation), sizeof(SiluResidualOperation), sizeof(GatherOperation), sizeof(SoftCapOperation),
        sizeof(ConcatOperation), sizeof(RankOperation), sizeof(ScaleOperation), sizeof(ColumnsOperation), sizeof(RouteOperation),
        sizeof(ExpertsOperation), sizeof(CombineOperation), sizeof(SigmoidGateOperation), sizeof(ConvolutionOperation),
        sizeof(StateOperation), sizeof(AdapterProduct), sizeof(AdapterSite), sizeof(PassAdapter), sizeof(Range), sizeof(Draw), sizeof(SampleOptions), sizeof(SamplePath), sizeof(Step), sizeof(Save), sizeof(StateRange), sizeof(Pass),
        sizeof(Program),
    };
    return (size_t)index < sizeof LAYOUT / sizeof *LAYOUT ? (int32_t)LAYOUT[index] : -1;
}
