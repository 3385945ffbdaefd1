/* Run a network: a list of operations on buffers of rows, one after another. Threads divide each operation into pieces (work.h). */
#include "block_max.h"
#include "panels.h"
#include "work.h"

#include <string.h>

#define PIECE_OUTPUTS 48 /* outputs of a piece of a product: a multiple of 8, 6, 4 and 3, the outputs of a tile in linear.c */
#define PANEL_OUTPUTS 16 /* outputs of a panel; a piece is one panel or, with few rows, four (MAX_PANELS), see piece_outputs */
#define MIN_THREAD_PIECES 4 /* with fewer pieces per thread, they are made smaller: all threads wait for the last one, perhaps on a slow core */
#define PIECE_FLOATS 512 /* floats of a piece of an elementwise operation with few rows: small, so that a thread's columns stay in its cache */
#define PIECE_FLOATS_MANY 4096 /* floats of such a piece with at least MANY_ROWS rows, whose data do not fit in a cache */
#define MANY_ROWS 64
#define PIECE_PACKED_COLUMNS 512 /* input columns that a piece packs */

/* Copies of the records of a running pass. If another thread wrongly changes the originals, all threads of the pass still use the same number of
 * rows, so none waits at a barrier forever. */
typedef struct {
    const Program *original_program;
    const Pass *original_pass;
    Program program;
    Pass pass;
} PassRun;

static int num_operation_rows(const Pass *pass, const Operation *operation) { return operation->rows == LOGITS_ROWS ? pass->num_logits_rows : pass->rows; }

/* Return the number of outputs in a piece of a product. thread_outputs: number of outputs per thread. */
static int piece_outputs(int packing, int rows, int thread_outputs) {
    if (packing != AS_BYTES) return PIECE_OUTPUTS;
    return rows > 4 || is_one_stream_best || thread_outputs < MIN_THREAD_PIECES * 4 * PANEL_OUTPUTS ? PANEL_OUTPUTS : 4 * PANEL_OUTPUTS;
}

/* Pack a single input row. Each thread packs its own copy, because that is faster than waiting at a barrier. */
static const float *pack_one_row(const Work *work, const Matrix *matrix, int packing, const float *x) {
    const Program *program = work->program;
    if (packing == AS_FLOATS && matrix->columns % 16 == 0) return x;
    float *packed = program->packed_rows + (size_t)work->thread * packed_floats(1, program->max_columns);
    pack_rows(matrix, x, NULL, 1, packing, 0, 0, matrix->columns, packed);
    return packed;
}

/* Return the number of input columns that a piece packs: a multiple of the group size. */
static int piece_packed_columns(const Matrix *matrix, int packing) {
    return packing == AS_BYTES ? PIECE_PACKED_COLUMNS / matrix->group * matrix->group : PIECE_PACKED_COLUMNS;
}

/* Pack some columns of one block of rows. A piece is a part of a block, so that all threads take part even if there is a single block. */
static void pack_piece(const Work *work, const Matrix *matrix, int packing, const float *x, int blocks, int piece) {
    const int columns = matrix->columns, step = piece_packed_columns(matrix, packing);
    const int begin = piece / blocks * step, end = begin + step < columns ? begin + step : columns;
    pack_rows(matrix, x, NULL, work->rows, packing, piece % blocks, begin, end, work->program->packed_inputs);
}

static void prepare_linear(const Work *work, const LinearOperation *op, const float *x, int has_adapters) {
    const int blocks = ceil_div(work->rows, MAX_ROWS);
    const int pieces[] = {work->rows > 1 ? ceil_div(op->matrices->columns, piece_packed_columns(op->matrices, op->packing)) * blocks : 0,
                          has_adapters ? num_down_pieces(work, op) : 0};
    for (PieceQueue queue = {.part_pieces = pieces, .num_parts = 2}; claim_piece(work, 0, &queue);)
        if (queue.part) compute_down_piece(work, op, queue.piece);
        else pack_piece(work, op->matrices, op->packing, x, blocks, queue.piece);
}

static void run_linear(const Work *work, const Operation *operation) {
    const LinearOperation *op = (const LinearOperation *)operation;
    const float *x = buffer(work, op->x);
    const int packing = op->packing, rows = work->rows, has_adapters = has_adapters_for(work->pass, op);
    int outputs = 0, totals[op->num_matrices];
    for (int number = 0; number < op->num_matrices; number++) outputs += op->matrices[number].outputs;
    const int step = op->block_max < 0 ? piece_outputs(packing, rows, outputs / work->num_threads) : BLOCK_COLUMNS;
    if (rows > 1 || has_adapters) {
        prepare_linear(work, op, x, has_adapters);
        barrier();
    }
    x = rows > 1 ? work->program->packed_inputs : pack_one_row(work, op->matrices, packing, x);
    for (int number = 0; number < op->num_matrices; number++) totals[number] = ceil_div(op->matrices[number].outputs, step);
    for (PieceQueue queue = {.part_pieces = totals, .num_parts = op->num_matrices}; claim_piece(work, 1, &queue);) {
        const Matrix *matrix = op->matrices + queue.part;
        const int begin = queue.piece * step, end = begin + step < matrix->outputs ? begin + step : matrix->outputs;
        if (has_adapters) prefetch_low_rank(work, op, queue.part, begin, end);
        multiply_packed_rows(matrix, begin, end, packing, x, buffer(work, matrix->out), rows);
        if (has_adapters) add_low_rank(work, op, queue.part, begin, end);
        if (op->block_max >= 0) store_block_max(buffer(work, matrix->out), matrix->outputs, rows, begin, buffer(work, op->block_max));
    }
}

static void run_route(const Work *work, const Operation *operation) {
    const RouteOperation *op = (const RouteOperation *)operation;
    const Routes routes = routes_in_buffer(buffer(work, operation->out), work->rows, op->experts_per_row);
    const float *x = buffer(work, op->x);
    for (int row; (row = next_ticket(work, 0)) < work->rows;)
        choose_experts(op, x + (size_t)row * (size_t)op->num_experts, routes.experts + row * op->experts_per_row, routes.weights + row * op->experts_per_row);
    barrier();
    const int32_t *order = work->pass->num_adapters && operation->rows == ALL_ROWS ? work->pass->row_order : NULL;
    if (next_ticket(work, 1) == 0) sort_pairs(op, &routes, order, work->rows);
}

/* Pack the input rows of each active expert. A ticket is a block of rows, counted over all experts. Return the one ticket that this thread
 * has drawn but not used. *num_blocks: the total number of blocks. */
static int pack_expert_rows(const Work *work, const ExpertsOperation *op, const Routes *routes, int ticket, int *num_blocks) {
    const float *x = buffer(work, op->x);
    const size_t columns = (size_t)op->matrices[0].columns, row_words = packed_row_floats(op->matrices, op->packing);
    int counted = 0;
    for (int number = 0; number < *routes->num_active; number++) {
        const ActiveExpert *active = routes->active + number;
        const int blocks = ceil_div(active->count, MAX_ROWS);
        float *packed = work->program->packed_inputs + (size_t)active->first_packed * row_words;
        for (; ticket - counted < blocks; ticket = next_ticket(work, 0))
            pack_rows(op->matrices, op->is_per_pair ? x + (size_t)active->first * columns : x, op->is_per_pair ? NULL : routes->rows + active->first,
                      active->count, op->packing, ticket - counted, 0, (int)columns, packed);
        counted += blocks;
    }
    *num_blocks = counted;
    return ticket;
}

/* Outputs [begin, end) of a matrix of an active expert. number: index among the matrices of an expert. */
typedef struct {
    const ActiveExpert *active;
    const Matrix *matrix;
    int number, begin, end;
} ExpertPiece;

/* Return piece `index` of an EXPERTS operation; pieces have `step` outputs. */
static ExpertPiece expert_piece_at(const ExpertsOperation *op, const Routes *routes, int step, int index) {
    for (int number = 0;; number++) {
        const int outputs = op->matrices[number * op->num_experts].outputs, pieces = ceil_div(outputs, step);
        if (index < *routes->num_active * pieces) {
            const ActiveExpert *active = routes->active + index / pieces;
            const int begin = index % pieces * step, end = begin + step < outputs ? begin + step : outputs;
            return (ExpertPiece){active, op->matrices + number * op->num_experts + active->expert, number, begin, end};
        }
        index -= *routes->num_active * pieces;
    }
}

static void run_experts(const Work *work, const Operation *operation) {
    const ExpertsOperation *op = (const ExpertsOperation *)operation;
    const Routes routes = routes_in_buffer(buffer(work, op->routes), work->rows, op->experts_per_row);
    const size_t row_words = packed_row_floats(op->matrices, op->packing);
    const int step = piece_outputs(op->packing, 1, INT32_MAX), is_one_row = work->rows == 1 && !op->is_per_pair;
    const int has_adapters = has_low_rank_pairs(work->pass, op, &routes);
    const float *x = work->program->packed_inputs;
    if (is_one_row) x = pack_one_row(work, op->matrices, op->packing, buffer(work, op->x));
    if (!is_one_row || has_adapters) {
        int ticket = next_ticket(work, 0), num_pieces = 0;
        if (!is_one_row) ticket = pack_expert_rows(work, op, &routes, ticket, &num_pieces);
        if (has_adapters) compute_down_of_pairs(work, op, &routes, ticket, num_pieces);
        barrier();
    }
    int total = 0;
    for (int number = 0; number < op->num_matrices; number++)
        total += *routes.num_active * ceil_div(op->matrices[number * op->num_experts].outputs, step);
    for (PieceQueue queue = {.part_pieces = &total, .num_parts = 1}; claim_piece(work, 1, &queue);) {
        const ExpertPiece piece = expert_piece_at(op, &routes, step, queue.piece);
        const ActiveExpert *active = piece.active;
        if (has_adapters) prefetch_low_rank_of_pairs(work, op, &routes, active, piece.number, piece.begin, piece.end);
        multiply_packed_rows(piece.matrix, piece.begin, piece.end, op->packing, is_one_row ? x : x + (size_t)active->first_packed * row_words,
                 buffer(work, piece.matrix->out) + (size_t)active->first * (size_t)piece.matrix->outputs, active->count);
        if (has_adapters) add_low_rank_to_pairs(work, op, &routes, active, piece.number, piece.begin, piece.end);
    }
}

/* Run a HEADS operation. A piece is some outputs of a head for a block of rows, which the thread packs for itself. */
static void run_heads(const Work *work, const Operation *operation) {
    const HeadsOperation *op = (const HeadsOperation *)operation;
    const int blocks = ceil_div(work->rows, MAX_ROWS), outputs = op->matrices->outputs, step = piece_outputs(op->packing, work->rows, INT32_MAX);
    const int parts = ceil_div(outputs, step), total = op->heads * parts * blocks;
    const size_t tail = (size_t)op->tail_columns, size = (size_t)outputs + tail;
    float *packed = work->program->packed_rows + (size_t)work->thread * packed_floats(1, work->program->max_columns);
    PieceQueue queue = {0};
    for (int piece; (piece = claim_next_piece(work, 0, total, &queue)) < total;) {
        const int first = piece % blocks * MAX_ROWS, rows = work->rows - first < MAX_ROWS ? work->rows - first : MAX_ROWS;
        const int head = piece / blocks / parts, begin = piece / blocks % parts * step, end = begin + step < outputs ? begin + step : outputs;
        Matrix matrix = op->matrices[head];
        int32_t heads[MAX_ROWS];
        for (int row = 0; row < rows; row++) heads[row] = (first + row) * op->heads + head;
        pack_rows(&matrix, buffer(work, op->x), heads, rows, op->packing, 0, 0, matrix.columns, packed);
        matrix.outputs = op->heads * (int)size; /* distance between rows of the result, in floats */
        float *out = buffer(work, operation->out) + (size_t)heads[0] * size;
        multiply_packed_rows(&matrix, begin, end, op->packing, packed, out, rows);
        for (int row = 0; tail && begin == 0 && row < rows; row++)
            memcpy(out + (size_t)(row * matrix.outputs + outputs), buffer(work, op->tails) + (size_t)heads[row] * tail, tail * sizeof(float));
    }
}

/* Claim up to max_heads heads of a row: [*item, *end), counted over the heads of all rows. Return 0 if no piece is left. */
static int claim_heads(const Work *work, int heads, int max_heads, PieceQueue *queue, int *item, int *end) {
    const int total = ceil_div(heads, max_heads) * work->rows, piece = claim_next_piece(work, 0, total, queue);
    if (piece == total) return 0;
    const int head = piece / work->rows * max_heads, first = piece % work->rows * heads;
    *item = first + head;
    *end = first + (head + max_heads < heads ? head + max_heads : heads);
    return 1;
}

/* Define the function of an operation on heads. `compute`: expression for head `item`, counted over all rows, at offset `at` of a buffer. */
#define DEFINE_HEADWISE(name, Type, heads, head_size, compute)                                                         \
    static void name(const Work *work, const Operation *operation) {                                                   \
        const Type *op = (const Type *)operation;                                                                      \
        const float *x = buffer(work, op->x);                                                                          \
        float *out = buffer(work, operation->out);                                                                     \
        PieceQueue queue = {0};                                                                                        \
        for (int item, end; claim_heads(work, heads, 8, &queue, &item, &end);)                                         \
            for (size_t size = (size_t)(head_size), at = (size_t)item * size; item < end; item++, at += size) compute; \
    }
#define ANGLES_OF(function) (work->pass->function[op->angle_table] + (size_t)(item / op->heads) * (size_t)op->rotary_half)
DEFINE_HEADWISE(run_norm, NormOperation, op->heads, op->head_size, norm_row(op, x + at, item, out + at))
DEFINE_HEADWISE(run_rope, RopeOperation, op->heads, op->head_size,
                rotate_head(x + at, ANGLES_OF(cos), ANGLES_OF(sin), op->head_size, op->rotary_half, out + at))
DEFINE_HEADWISE(run_gaussian_top_k, GaussianTopKOperation, 1, op->width, gaussian_top_k_row(x + at, op->width, op->factor, out + at))
DEFINE_HEADWISE(run_match_rms, MatchRmsOperation, 1, op->width, match_rms_row(x + at, buffer(work, op->y) + at, op->width, out + at))

/* Columns [begin, begin + count) of a row; at: their offset in a buffer with rows of the operation's width. */
typedef struct {
    PieceQueue queue;
    size_t row, at;
    int begin, count;
} ColumnPiece;

/* Claim columns of a row; 0 = none are left. Pieces are ordered by column, then by row: a thread gets the same columns in each operation. */
static int claim_columns(const Work *work, int width, ColumnPiece *piece) {
    const int step = work->rows < MANY_ROWS ? PIECE_FLOATS : PIECE_FLOATS_MANY;
    const int total = ceil_div(width, step) * work->rows, number = claim_next_piece(work, 0, total, &piece->queue);
    piece->row = (size_t)(number % work->rows);
    piece->begin = number / work->rows * step;
    piece->count = width - piece->begin < step ? width - piece->begin : step;
    piece->at = piece->row * (size_t)width + (size_t)piece->begin;
    return number < total;
}

/* Define the function of an operation that computes columns from the same columns of its inputs. `compute`: statement for one `piece`. */
#define DEFINE_ELEMENTWISE(name, Type, compute)                                           \
    static void name(const Work *work, const Operation *operation) {                      \
        const Type *op = (const Type *)operation;                                         \
        const float *x = buffer(work, op->x);                                             \
        float *out = buffer(work, operation->out);                                        \
        for (ColumnPiece piece = {{0}}; claim_columns(work, op->width, &piece);) compute; \
    }
#define INPUT_AT(number) (buffer(work, number) + piece.at)
DEFINE_ELEMENTWISE(run_gated, GatedOperation, apply_gate(op, x + piece.row * (size_t)(op->width / op->group),
          op->up < 0 ? op->weight : INPUT_AT(op->up) - piece.begin, piece.begin, piece.begin + piece.count, out + piece.at - piece.begin))
DEFINE_ELEMENTWISE(run_add, AddOperation, add_row(x + piece.at, INPUT_AT(op->y), piece.count, out + piece.at))
DEFINE_ELEMENTWISE(run_soft_cap, SoftCapOperation, soft_cap_row(x + piece.at, piece.count, op->factor, out + piece.at))
DEFINE_ELEMENTWISE(run_scale, ScaleOperation, scale_row(x + piece.at, piece.count, op->factor, out + piece.at))
DEFINE_ELEMENTWISE(run_columns, ColumnsOperation,
          memcpy(out + piece.at, x + op->begin + piece.row * (size_t)op->x_width + piece.begin, (size_t)piece.count * sizeof(float)))
DEFINE_ELEMENTWISE(run_gather, GatherOperation,
          memcpy(out + piece.at, x + (size_t)work->pass->logits_rows[piece.row] * (size_t)op->width + piece.begin,
                 (size_t)piece.count * sizeof(float)))

#define ROW_AT(number, row_width) (buffer(work, number) + piece.row * (size_t)(row_width))
DEFINE_ELEMENTWISE(run_concat, ConcatOperation,
          concat_columns(x + piece.row * (size_t)op->x_width, op->x_width, ROW_AT(op->y, op->width - op->x_width), piece.begin, piece.count, out + piece.at))
DEFINE_ELEMENTWISE(run_block_convolution, BlockConvolutionOperation,
          block_convolve_row(op, x + piece.at - piece.begin, ROW_AT(op->added, op->added_width) + op->added_offset,
                             (int)piece.row - work->pass->ranges[work->pass->range_of_row[piece.row]].start, piece.begin, piece.count,
                             out + piece.at - piece.begin))

static void run_combine(const Work *work, const Operation *operation) {
    const CombineOperation *op = (const CombineOperation *)operation;
    const Routes routes = routes_in_buffer(buffer(work, op->routes), work->rows, op->experts_per_row);
    const float *x = buffer(work, op->x);
    float *out = buffer(work, operation->out);
    for (ColumnPiece piece = {{0}}; claim_columns(work, op->width, &piece);) {
        memset(out + piece.at, 0, (size_t)piece.count * sizeof(float));
        for (int i = 0; i < op->experts_per_row; i++) {
            const size_t pair = piece.row * (size_t)op->experts_per_row + (size_t)i, place = (size_t)routes.pair_indices[pair];
            add_scaled_row(x + place * (size_t)op->width + (size_t)piece.begin, piece.count, routes.weights[pair], out + piece.at);
        }
    }
}

#define STREAM_AT(number, streams, index) (ROW_AT(number, (streams) * op->width) + (size_t)(index) * (size_t)op->width + piece.begin)
static void run_mix(const Work *work, const Operation *operation) {
    const MixOperation *op = (const MixOperation *)operation;
    for (ColumnPiece piece = {{0}}; claim_columns(work, op->width, &piece);)
        for (int i = 0; i < op->outputs; i++) {
            const float *weights = op->weights < 0 ? NULL : ROW_AT(op->weights, op->outputs * op->inputs) + i * op->inputs;
            float *out = STREAM_AT(operation->out, op->outputs, i);
            memcpy(out, STREAM_AT(op->y, op->outputs, i), (size_t)piece.count * sizeof(float));
            for (int j = 0; j < op->inputs && i >= op->first_mixed; j++)
                add_scaled_row(STREAM_AT(op->x, op->inputs, j), piece.count, (weights ? weights[j] : 0.0f) + op->offset, out);
        }
}

static void run_summarize(const Work *work, const Operation *operation) {
    const SummarizeOperation *op = (const SummarizeOperation *)operation;
    const int pieces = ceil_div(op->columns, SUMMARY_COLUMNS), rows = work->rows;
    const size_t width = (size_t)paceline_summary_floats(op->columns, op->count);
    const RowSampling *sampling = work->pass->sampling ? work->pass->sampling + (size_t)op->summary_index * (size_t)rows : NULL;
    const float *x = buffer(work, op->x);
    float *out = buffer(work, operation->out);
    for (int item; (item = next_ticket(work, 0)) < rows * pieces;) {
        const size_t row = (size_t)(item / pieces);
        summarize_piece(op, sampling ? sampling + row : NULL, x + row * (size_t)op->width, item % pieces, out + row * width);
    }
    barrier();
    for (int row; (row = next_ticket(work, 1)) < rows;) join_summaries(op, out + (size_t)row * width);
}

typedef void RunOperation(const Work *work, const Operation *operation);
static RunOperation *const OPERATION_FUNCTIONS[] = {
    [LINEAR] = run_linear, [NORM] = run_norm, [ROPE] = run_rope, [ATTENTION] = run_attention, [GATED] = run_gated, [ADD] = run_add,
    [GATHER] = run_gather, [SOFT_CAP] = run_soft_cap, [CONCAT] = run_concat, [SUMMARIZE] = run_summarize, [SCALE] = run_scale,
    [COLUMNS] = run_columns, [ROUTE] = run_route, [EXPERTS] = run_experts, [COMBINE] = run_combine, [CONVOLUTION] = run_convolution,
    [STATE] = run_state, [BLOCK_CONVOLUTION] = run_block_convolution, [HEADS] = run_heads, [MIX] = run_mix,
    [GAUSSIAN_TOP_K] = run_gaussian_top_k, [MATCH_RMS] = run_match_rms,
};

/* Return the index of the first operation from `index` on that has rows in this pass. */
static int next_operation_with_rows(const Program *program, const Pass *pass, int index) {
    while (index < program->num_operations && !num_operation_rows(pass, program->operations[index])) index++;
    return index;
}

static void run_operations(void *argument, int thread, int num_threads) {
    const Program *program = &((PassRun *)argument)->program;
    const Pass *pass = &((PassRun *)argument)->pass;
    int64_t *claims = program->claims + (size_t)thread * (size_t)program->claims_per_thread;
    for (int index = next_operation_with_rows(program, pass, 0), next; index < program->num_operations; index = next) {
        const Operation *operation = program->operations[index];
        next = next_operation_with_rows(program, pass, index + 1);
        if (next < program->num_operations) memset(claims + PHASES * next, 0, PHASES * sizeof *claims);
        OPERATION_FUNCTIONS[operation->code](&(Work){program, pass, index, num_operation_rows(pass, operation), thread, num_threads}, operation);
        barrier();
    }
}

static void copy_pass_records(void *argument) {
    PassRun *run = argument;
    run->program = *run->original_program;
    run->pass = *run->original_pass;
    memset(run->program.tickets, 0, PHASES * (size_t)run->program.num_operations * sizeof(int32_t));
    const int first = next_operation_with_rows(&run->program, &run->pass, 0);
    for (int thread = 0; thread < run->program.num_threads && first < run->program.num_operations; thread++)
        memset(run->program.claims + (size_t)thread * (size_t)run->program.claims_per_thread + PHASES * first, 0, PHASES * sizeof(int64_t));
}

/* Run one pass. Results stay in the buffers. */
void paceline_run(const Program *program, const Pass *pass) {
    PassRun run = {.original_program = program, .original_pass = pass};
    run_on_threads(copy_pass_records, run_operations, &run, program->num_threads);
    for (int range = 0; run.pass.states && range < run.pass.num_ranges; range++) *run.pass.states[range].has_run = 1;
}

/* Return how many floats Program.packed_inputs needs for products with `rows` input rows of `columns` columns. */
int64_t paceline_packed_floats(int32_t rows, int32_t columns) { return (int64_t)packed_floats(rows, columns); }

/* Return KERNELS_VERSION for index 0, then the size of each record in the order of records.py, then -1, for a check by the loader. */
int32_t paceline_layout(int32_t index) {
    static const size_t LAYOUT[] = {
        KERNELS_VERSION, sizeof(Matrix), sizeof(SuperBlocks), sizeof(GgufBlocks), sizeof(LinearOperation), sizeof(NormOperation),
        sizeof(RopeOperation), sizeof(AttentionOperation), sizeof(GatedOperation), sizeof(AddOperation), sizeof(GatherOperation),
        sizeof(SoftCapOperation), sizeof(ConcatOperation), sizeof(SummarizeOperation), sizeof(ScaleOperation), sizeof(ColumnsOperation),
        sizeof(RouteOperation), sizeof(ExpertsOperation), sizeof(CombineOperation), sizeof(ConvolutionOperation), sizeof(StateOperation),
        sizeof(BlockConvolutionOperation), sizeof(HeadsOperation), sizeof(MixOperation), sizeof(GaussianTopKOperation), sizeof(MatchRmsOperation),
        sizeof(AdapterProduct), sizeof(AdapterSite), sizeof(PassAdapter), sizeof(Range), sizeof(SampleOptions), sizeof(SamplePath),
        sizeof(StateStep), sizeof(StateSave), sizeof(StateRange), sizeof(Pass), sizeof(Program), sizeof(RowSampling),
    };
    return (size_t)index < sizeof LAYOUT / sizeof *LAYOUT ? (int32_t)LAYOUT[index] : -1;
}
