/* Run a network: a list of operations over buffers of rows, one after another, each divided among the threads in pieces. */
#include "native.h"
#include "block_max.h"
#include "threads.h"
#include "work.h"

#include <string.h>

#define PIECE_OUTPUTS 48        /* a multiple of the tiles' 8, 6, 4 and 3 outputs */
#define PIECE_PANEL_OUTPUTS 64  /* a tile of four panels of 16 */
#define PANEL_OUTPUTS 16
#define PIECE_FLOATS 512        /* with few rows, so that threads keep their columns in cache */
#define PIECE_FLOATS_MANY 4096  /* with many rows, which no cache holds */
#define MANY_ROWS 64
#define PIECE_PACKED_COLUMNS 512

/* A running pass has copies of the records. If another thread changes them, which is forbidden, the threads of this pass still agree on the number
 * of rows, and none waits at a barrier forever. */
typedef struct {
    const Program *given_program;
    const Pass *given_pass;
    Program program;
    Pass pass;
} Run;

static int rows_of(const Pass *pass, const Operation *operation) {
    return operation->rows == LOGITS_ROWS ? pass->num_logits_rows : pass->rows;
}

static int piece_outputs(int packing, int rows) {
    if (packing != AS_BYTES) return PIECE_OUTPUTS;
    return rows > 4 ? PANEL_OUTPUTS : PIECE_PANEL_OUTPUTS;
}

/* Pack a single row. Each thread does it by itself, which is cheaper than a barrier. */
static const float *packed_row_of(const Work *work, const Matrix *matrix, int packing, const float *x) {
    const Program *program = work->program;
    if (packing == AS_FLOATS && matrix->columns % 16 == 0) return x;
    float *packed = program->packed_rows + (size_t)work->thread * packed_floats(1, program->max_columns);
    pack_rows(matrix, x, NULL, 1, packing, 0, 0, matrix->columns, packed);
    return packed;
}

/* Return the columns of a piece of packing. */
static int piece_packed_columns(const Matrix *matrix, int packing) {
    const int group = packing == AS_BYTES ? matrix->group : 1;
    return PIECE_PACKED_COLUMNS / group * group;
}

/* Pack one block of rows in one piece of columns; even a single block is divided among all threads. */
static void pack_piece(const Work *work, const Matrix *matrix, int packing, const float *x, int blocks, int piece) {
    const int columns = matrix->columns, step = piece_packed_columns(matrix, packing);
    const int begin = piece / blocks * step, end = begin + step < columns ? begin + step : columns;
    pack_rows(matrix, x, NULL, work->rows, packing, piece % blocks, begin, end, work->program->packed);
}

static void prepare_linear(const Work *work, const LinearOperation *op, const float *x, int has_adapters) {
    const int blocks = parts_of(work->rows, MAX_ROWS);
    const int pieces[] = {work->rows > 1 ? parts_of(op->matrices->columns, piece_packed_columns(op->matrices, op->packing)) * blocks : 0,
                          has_adapters ? pieces_of_down(work, op) : 0};
    for (Share share = {.totals = pieces, .count = 2}; claim(work, 0, &share);)
        if (share.run)
            run_down(work, op, share.piece);
        else
            pack_piece(work, op->matrices, op->packing, x, blocks, share.piece);
}

static void run_linear(const Work *work, const Operation *operation) {
    const LinearOperation *op = (const LinearOperation *)operation;
    const float *x = buffer(work, op->x);
    const int packing = op->packing, rows = work->rows, has_adapters = has_low_rank(work->pass, op);
    const int step = op->block_max < 0 ? piece_outputs(packing, rows) : BLOCK_COLUMNS;
    if (rows > 1 || has_adapters) {
        prepare_linear(work, op, x, has_adapters);
        barrier();
    }
    x = rows > 1 ? work->program->packed : packed_row_of(work, op->matrices, packing, x);
    int totals[op->num_matrices];
    for (int number = 0; number < op->num_matrices; number++) totals[number] = parts_of(op->matrices[number].outputs, step);
    for (Share share = {.totals = totals, .count = op->num_matrices}; claim(work, 1, &share);) {
        const Matrix *matrix = op->matrices + share.run;
        const int begin = share.piece * step, end = begin + step < matrix->outputs ? begin + step : matrix->outputs;
        if (has_adapters) prefetch_low_rank(work, op, share.run, begin, end);
        multiply(matrix, begin, end, packing, x, buffer(work, matrix->out), rows);
        if (has_adapters) add_low_rank(work, op, share.run, begin, end);
        if (op->block_max >= 0) keep_block_max(buffer(work, matrix->out), matrix->outputs, rows, begin, buffer(work, op->block_max));
    }
}

static void run_route(const Work *work, const Operation *operation) {
    const RouteOperation *op = (const RouteOperation *)operation;
    const Routes routes = routes_of(buffer(work, operation->out), work->rows, op->chosen);
    const float *x = buffer(work, op->x);
    for (int row; (row = next_ticket(work, 0)) < work->rows;)
        choose_experts(op, x + (size_t)row * (size_t)op->experts, routes.experts + row * op->chosen, routes.weights + row * op->chosen);
    barrier();
    const int32_t *order = work->pass->num_adapters && operation->rows == ALL_ROWS ? work->pass->row_order : NULL;
    if (next_ticket(work, 1) == 0) sort_pairs(op, &routes, order, work->rows);
}

/* Pack the rows of each active expert, one expert after another. Returns the ticket after the last one used. */
static int pack_pairs(const Work *work, const ExpertsOperation *op, const Routes *routes, int ticket, int *pieces) {
    const float *x = buffer(work, op->x);
    const size_t columns = (size_t)op->matrices[0].columns, row_words = packed_row(op->matrices, op->packing);
    int skipped = 0;
    for (int number = 0; number < *routes->num_active; number++) {
        const struct Active *active = routes->active + number;
        const int blocks = parts_of(active->count, MAX_ROWS);
        float *packed = work->program->packed + (size_t)active->packed * row_words;
        for (; ticket - skipped < blocks; ticket = next_ticket(work, 0))
            pack_rows(op->matrices, op->of_pairs ? x + (size_t)active->first * columns : x, op->of_pairs ? NULL : routes->rows + active->first,
                      active->count, op->packing, ticket - skipped, 0, (int)columns, packed);
        skipped += blocks;
    }
    *pieces = skipped;
    return ticket;
}

/* Some outputs of an active expert's matrix; `number`: which of the operation's matrices. */
typedef struct {
    const struct Active *active;
    const Matrix *matrix;
    int number, begin, end;
} Tile;

static Tile tile_of(const ExpertsOperation *op, const Routes *routes, int step, int piece) {
    Tile tile = {.number = 0};
    for (;; tile.number++) {
        const int outputs = op->matrices[tile.number * op->experts].outputs, pieces = parts_of(outputs, step);
        if (piece < *routes->num_active * pieces) {
            tile.active = routes->active + piece / pieces;
            tile.matrix = op->matrices + tile.number * op->experts + tile.active->expert;
            tile.begin = piece % pieces * step;
            tile.end = tile.begin + step < outputs ? tile.begin + step : outputs;
            return tile;
        }
        piece -= *routes->num_active * pieces;
    }
}

static void run_experts(const Work *work, const Operation *operation) {
    const ExpertsOperation *op = (const ExpertsOperation *)operation;
    const Routes routes = routes_of(buffer(work, op->routes), work->rows, op->chosen);
    const size_t row_words = packed_row(op->matrices, op->packing);
    const int step = piece_outputs(op->packing, 1), is_one_row = work->rows == 1 && !op->of_pairs;
    const int has_adapters = has_low_rank_pairs(work->pass, op, &routes);
    const float *x = work->program->packed;
    if (is_one_row) x = packed_row_of(work, op->matrices, op->packing, buffer(work, op->x));
    if (!is_one_row || has_adapters) {
        int ticket = next_ticket(work, 0), num_pieces = 0;
        if (!is_one_row) ticket = pack_pairs(work, op, &routes, ticket, &num_pieces);
        if (has_adapters) run_down_of_pairs(work, op, &routes, ticket, num_pieces);
        barrier();
    }
    int total = 0;
    for (int number = 0; number < op->num_matrices; number++)
        total += *routes.num_active * parts_of(op->matrices[number * op->experts].outputs, step);
    for (Share share = {.totals = &total, .count = 1}; claim(work, 1, &share);) {
        const Tile tile = tile_of(op, &routes, step, share.piece);
        const struct Active *active = tile.active;
        if (has_adapters) prefetch_pairs(work, op, &routes, active, tile.number, tile.begin, tile.end);
        multiply(tile.matrix, tile.begin, tile.end, op->packing, is_one_row ? x : x + (size_t)active->packed * row_words,
                 buffer(work, tile.matrix->out) + (size_t)active->first * (size_t)tile.matrix->outputs, active->count);
        if (has_adapters) add_to_pairs(work, op, &routes, active, tile.number, tile.begin, tile.end);
    }
}

/* Claim the next heads of a row, [*item, *end) counted over all rows; return 0 at the end. */
static int next_heads(const Work *work, int heads, int at_once, Share *share, int *item, int *end) {
    const int total = parts_of(heads, at_once) * work->rows, piece = next_piece_of(work, 0, total, share);
    if (piece == total) return 0;
    const int head = piece / work->rows * at_once, first = piece % work->rows * heads;
    *item = first + head;
    *end = first + (head + at_once < heads ? head + at_once : heads);
    return 1;
}

static void run_norm(const Work *work, const Operation *operation) {
    const NormOperation *op = (const NormOperation *)operation;
    const float *x = buffer(work, op->x);
    float *out = buffer(work, operation->out);
    Share share = {0};
    for (int item, end; next_heads(work, op->heads, 8, &share, &item, &end);)
        for (; item < end; item++) {
            const size_t at = (size_t)item * (size_t)op->head_size;
            const size_t weight = (size_t)(item % op->weighted_heads) * (size_t)op->head_size;
            norm_row(x + at, op->weight ? op->weight + weight : NULL, op->head_size, op->epsilon, out + at);
        }
}

static void run_rope(const Work *work, const Operation *operation) {
    const RopeOperation *op = (const RopeOperation *)operation;
    const float *x = buffer(work, op->x), *cos = work->pass->cos[op->table], *sin = work->pass->sin[op->table];
    float *out = buffer(work, operation->out);
    Share share = {0};
    for (int item, end; next_heads(work, op->heads, 8, &share, &item, &end);)
        for (; item < end; item++) {
            const size_t at = (size_t)item * (size_t)op->head_size, angles = (size_t)(item / op->heads) * (size_t)op->rotary_half;
            rotate_head(x + at, cos + angles, sin + angles, op->head_size, op->rotary_half, out + at);
        }
}

/* Columns [begin, begin + count) of a row, at offset `at` of the buffer. */
typedef struct {
    Share share;
    size_t row, at;
    int begin, count;
} Piece;

/* Claim the next columns of a row. All rows of some columns come first, so that a thread gets the columns it computed before. */
static int next_piece(const Work *work, int width, Piece *piece) {
    const int step = work->rows < MANY_ROWS ? PIECE_FLOATS : PIECE_FLOATS_MANY;
    const int total = parts_of(width, step) * work->rows, number = next_piece_of(work, 0, total, &piece->share);
    piece->row = (size_t)(number % work->rows);
    piece->begin = number / work->rows * step;
    piece->count = width - piece->begin < step ? width - piece->begin : step;
    piece->at = piece->row * (size_t)width + (size_t)piece->begin;
    return number < total;
}

/* Define an operation that computes each piece of its rows from x. */
#define PIECEWISE(name, Type, compute)                                                       \
    static void name(const Work *work, const Operation *operation) {                         \
        const Type *op = (const Type *)operation;                                            \
        const float *x = buffer(work, op->x);                                                \
        float *out = buffer(work, operation->out);                                           \
        for (Piece piece = {{0}}; next_piece(work, op->width, &piece);) compute;               \
    }
#define AT(number) (buffer(work, number) + piece.at)
PIECEWISE(run_gated, GatedOperation, gate(op, x + piece.at, AT(op->up), piece.count, out + piece.at))
PIECEWISE(run_add, AddOperation, add(x + piece.at, AT(op->y), piece.count, out + piece.at))
PIECEWISE(run_silu_residual, SiluResidualOperation, add_silu(x + piece.at, AT(op->y), piece.count, out + piece.at))
PIECEWISE(run_soft_cap, SoftCapOperation, soft_cap(x + piece.at, piece.count, op->cap, out + piece.at))
PIECEWISE(run_scale, ScaleOperation, scale(x + piece.at, piece.count, op->factor, out + piece.at))
PIECEWISE(run_sigmoid_gate, SigmoidGateOperation, scale(x + piece.at, piece.count, sigmoid_of(buffer(work, op->y)[piece.row]), out + piece.at))
PIECEWISE(run_columns, ColumnsOperation,
          memcpy(out + piece.at, x + op->begin + piece.row * (size_t)op->x_width + piece.begin, (size_t)piece.count * sizeof(float)))
PIECEWISE(run_gather, GatherOperation,
          memcpy(out + piece.at, x + (size_t)work->pass->logits_rows[piece.row] * (size_t)op->width + piece.begin,
                 (size_t)piece.count * sizeof(float)))

static void run_combine(const Work *work, const Operation *operation) {
    const CombineOperation *op = (const CombineOperation *)operation;
    const Routes routes = routes_of(buffer(work, op->routes), work->rows, op->chosen);
    const float *x = buffer(work, op->x);
    float *out = buffer(work, operation->out);
    for (Piece piece = {{0}}; next_piece(work, op->width, &piece);) {
        memset(out + piece.at, 0, (size_t)piece.count * sizeof(float));
        for (int i = 0; i < op->chosen; i++) {
            const size_t pair = piece.row * (size_t)op->chosen + (size_t)i, place = (size_t)routes.places[pair];
            add_scaled(x + place * (size_t)op->width + (size_t)piece.begin, piece.count, routes.weights[pair], out + piece.at);
        }
    }
}

static void run_concat(const Work *work, const Operation *operation) {
    const ConcatOperation *op = (const ConcatOperation *)operation;
    const size_t x_width = (size_t)op->x_width, y_width = (size_t)op->y_width;
    const float *x = buffer(work, op->x), *y = buffer(work, op->y);
    float *out = buffer(work, operation->out);
    for (Piece piece = {{0}}; next_piece(work, op->x_width + op->y_width, &piece);)
        join(x + piece.row * x_width, op->x_width, y + piece.row * y_width, piece.begin, piece.count, out + piece.at);
}

static void run_block_convolution(const Work *work, const Operation *operation) {
    const BlockConvolutionOperation *op = (const BlockConvolutionOperation *)operation;
    const Pass *pass = work->pass;
    const float *x = buffer(work, op->x), *added = buffer(work, op->added) + op->added_at;
    float *out = buffer(work, operation->out);
    for (Piece piece = {{0}}; next_piece(work, op->width, &piece);) {
        const size_t at = piece.row * (size_t)op->width;
        const int earlier = (int)piece.row - pass->ranges[pass->range_of_row[piece.row]].start;
        convolve_block(op, x + at, added + piece.row * (size_t)op->added_width, earlier, piece.begin, piece.count, out + at);
    }
}

static void run_rank(const Work *work, const Operation *operation) {
    const RankOperation *op = (const RankOperation *)operation;
    const int pieces = pieces_of(op->columns), rows = work->rows;
    const size_t width = (size_t)paceline_ranking_floats(op->columns, op->count);
    const Draw *draws = work->pass->draws ? work->pass->draws + (size_t)op->number * (size_t)rows : NULL;
    const float *x = buffer(work, op->x);
    float *out = buffer(work, operation->out);
    for (int item; (item = next_ticket(work, 0)) < rows * pieces;) {
        const size_t row = (size_t)(item / pieces);
        rank_piece(op, draws ? draws + row : NULL, x + row * (size_t)op->width, item % pieces, out + row * width);
    }
    barrier();
    for (int row; (row = next_ticket(work, 1)) < rows;) join_pieces(op, out + (size_t)row * width);
}

typedef void Function(const Work *work, const Operation *operation);
static Function *const FUNCTIONS[] = {
    [LINEAR] = run_linear,     [NORM] = run_norm, [ROPE] = run_rope,     [ATTENTION] = run_attention, [GATED] = run_gated,
    [ADD] = run_add,           [GATHER] = run_gather, [SOFT_CAP] = run_soft_cap, [CONCAT] = run_concat,
    [SILU_RESIDUAL] = run_silu_residual, [RANK] = run_rank, [SCALE] = run_scale, [COLUMNS] = run_columns,
    [ROUTE] = run_route,       [EXPERTS] = run_experts, [COMBINE] = run_combine, [SIGMOID_GATE] = run_sigmoid_gate,
    [CONVOLUTION] = run_convolution, [STATE] = run_state, [BLOCK_CONVOLUTION] = run_block_convolution,
};

/* Return the first operation from `index` on that has rows. */
static int first_with_rows(const Program *program, const Pass *pass, int index) {
    while (index < program->num_operations && !rows_of(pass, program->operations[index])) index++;
    return index;
}

static void run_operations(void *argument, int thread, int num_threads) {
    const Program *program = &((Run *)argument)->program;
    const Pass *pass = &((Run *)argument)->pass;
    int64_t *claims = program->claims + (size_t)thread * (size_t)program->claims_per_thread;
    for (int index = first_with_rows(program, pass, 0), next; index < program->num_operations; index = next) {
        const Operation *operation = program->operations[index];
        next = first_with_rows(program, pass, index + 1);
        if (next < program->num_operations) memset(claims + PHASES * next, 0, PHASES * sizeof *claims);
        FUNCTIONS[operation->code](&(Work){program, pass, index, rows_of(pass, operation), thread, num_threads}, operation);
        barrier();
    }
}

static void prepare(void *argument) {
    Run *run = argument;
    run->program = *run->given_program;
    run->pass = *run->given_pass;
    memset(run->program.tickets, 0, PHASES * (size_t)run->program.num_operations * sizeof(int32_t));
    const int first = first_with_rows(&run->program, &run->pass, 0);
    for (int thread = 0; thread < run->program.num_threads && first < run->program.num_operations; thread++)
        memset(run->program.claims + (size_t)thread * (size_t)run->program.claims_per_thread + PHASES * first, 0, PHASES * sizeof(int64_t));
}

/* Run one pass; the results are in the buffers. */
void paceline_run(const Program *program, const Pass *pass) {
    Run run = {.given_program = program, .given_pass = pass};
    run_on_threads(prepare, run_operations, &run, program->num_threads);
    for (int range = 0; run.pass.states && range < run.pass.num_ranges; range++) *run.pass.states[range].has_run = 1;
}

/* Return the floats of `packed` for products of `rows` rows and `columns` columns. */
int64_t paceline_packed_floats(int32_t rows, int32_t columns) { return (int64_t)packed_floats(rows, columns); }

/* Return what the loader compares: the version, then the size of each record in the order of records.py; -1 after them. */
int32_t paceline_layout(int32_t index) {
    static const size_t LAYOUT[] = {
        KERNELS_VERSION, sizeof(Matrix), sizeof(SuperBlocks), sizeof(Blocks), sizeof(LinearOperation), sizeof(NormOperation), sizeof(RopeOperation),
        sizeof(AttentionOperation), sizeof(GatedOperation), sizeof(AddOperation), sizeof(SiluResidualOperation), sizeof(GatherOperation), sizeof(SoftCapOperation),
        sizeof(ConcatOperation), sizeof(RankOperation), sizeof(ScaleOperation), sizeof(ColumnsOperation), sizeof(RouteOperation),
        sizeof(ExpertsOperation), sizeof(CombineOperation), sizeof(SigmoidGateOperation), sizeof(ConvolutionOperation),
        sizeof(StateOperation), sizeof(BlockConvolutionOperation), sizeof(AdapterProduct), sizeof(AdapterSite), sizeof(PassAdapter), sizeof(Range), sizeof(SampleOptions),
        sizeof(SamplePath), sizeof(Step), sizeof(Save), sizeof(StateRange), sizeof(Pass), sizeof(Program), sizeof(Draw),
    };
    return (size_t)index < sizeof LAYOUT / sizeof *LAYOUT ? (int32_t)LAYOUT[index] : -1;
}
