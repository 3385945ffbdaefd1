/* Runs a network: a list of operations over buffers of rows, in order, every one shared out among the threads by tickets. */
#include "native.h"
#include "threads.h"

#include <stdatomic.h>
#include <string.h>

#define OUTPUTS_A_TICKET 48       /* whole tiles of 8, 6, 4 and 3 outputs */
#define STRIPS_OUTPUTS_A_TICKET 64 /* two pairs of strips */
#define FLOATS_A_TICKET 4096

/* A pass under way has the records to itself: whoever describes the next pass meanwhile must not change how many rows this one has, or
 * its threads would wait for one another at different places for ever. */
typedef struct {
    const Program *given_program;
    const Pass *given_pass;
    Program program;
    Pass pass;
} Run;

static int draw(const Program *program, int operation, int phase) {
    return atomic_fetch_add_explicit((_Atomic int32_t *)&program->tickets[2 * operation + phase], 1, memory_order_relaxed);
}

static int parts_of(int total, int size) { return (total + size - 1) / size; }

static void linear(const Program *program, const Operation *operation, int index, int rows, int thread) {
    const Matrix *matrices = operation->data;
    const float *x = program->buffers[operation->x];
    const int columns = matrices[0].columns, packing = operation->choice;
    const int outputs_a_ticket = packing == AS_BYTES ? STRIPS_OUTPUTS_A_TICKET : OUTPUTS_A_TICKET;
    if (rows > 1) {
        for (int block; (block = draw(program, index, 0)) < parts_of(rows, MAX_ROWS);)
            pack_rows(matrices, x, rows, packing, block, program->packed);
        meet();
        x = program->packed;
    } else if (packing != AS_FLOATS || columns % 16) { /* sooner packed by everybody than waited for; else a single row is packed as it is */
        float *own = program->packed_rows + (size_t)thread * packed_floats(1, program->most_columns);
        pack_rows(matrices, x, rows, packing, 0, own);
        x = own;
    }
    int drawn = draw(program, index, 1), skipped = 0;
    for (int part = 0; part < operation->count; part++) {
        const Matrix *matrix = matrices + part;
        const int tickets = parts_of(matrix->outputs, outputs_a_ticket);
        for (; drawn - skipped < tickets; drawn = draw(program, index, 1)) {
            const int begin = (drawn - skipped) * outputs_a_ticket, end = begin + outputs_a_ticket;
            multiply(matrix, begin, end < matrix->outputs ? end : matrix->outputs, packing, x, program->buffers[matrix->out], rows);
        }
        skipped += tickets;
    }
}

static void attention(const Program *program, const Pass *pass, const Operation *operation, int index, int thread) {
    const size_t width = (size_t)(program->kv_heads * program->head_size);
    for (int row; (row = draw(program, index, 0)) < pass->rows;)
        keep_row(program, pass, operation->choice, row, program->buffers[operation->y] + (size_t)row * width,
                 program->buffers[operation->z] + (size_t)row * width);
    meet();
    for (int item; (item = draw(program, index, 1)) < pass->rows * program->kv_heads;)
        attend(program, pass, operation, item / program->kv_heads, item % program->kv_heads, program->scratch[thread]);
}

static void rank(const Program *program, const Pass *pass, const Operation *operation, int index, int rows) {
    const Ranking *ranking = operation->data;
    const int pieces = pieces_of(ranking->columns), width = paceline_ranking_floats(ranking->columns, ranking->count);
    const float *x = program->buffers[operation->x];
    float *out = program->buffers[operation->out];
    for (int item; (item = draw(program, index, 0)) < rows * pieces;) {
        const size_t row = (size_t)(item / pieces);
        const Draw *of_row = pass->draws ? pass->draws + (size_t)(operation->choice * rows) + row : NULL;
        rank_piece(ranking, of_row, x + row * (size_t)operation->width, item % pieces, out + row * (size_t)width);
    }
    meet();
    for (int row; (row = draw(program, index, 1)) < rows;) join_pieces(ranking, out + (size_t)row * (size_t)width);
}

/* Heads of rows, or pieces of rows where there are no heads. */
static void by_row(const Program *program, const Pass *pass, const Operation *operation, int index, int rows) {
    const int width = operation->width, half = program->rotary_half;
    const float *x = program->buffers[operation->x];
    float *out = program->buffers[operation->out];
    if (operation->code == NORM || operation->code == ROPE) {
        const int row_of = operation->count, batch = operation->code == NORM && row_of == 1 ? 1 : 8;
        for (int ticket; (ticket = draw(program, index, 0)) < parts_of(rows * row_of, batch);)
            for (int item = ticket * batch; item < (ticket + 1) * batch && item < rows * row_of; item++) {
                const size_t at = (size_t)item * (size_t)width, angles = (size_t)(item / row_of) * (size_t)half;
                if (operation->code == NORM)
                    norm_row(x + at, operation->data, width, operation->number, out + at);
                else
                    rotate_head(x + at, pass->cos[operation->choice] + angles, pass->sin[operation->choice] + angles, width, half, out + at);
            }
        return;
    }
    const int pieces = parts_of(width, FLOATS_A_TICKET);
    for (int item; (item = draw(program, index, 0)) < rows * pieces;) {
        const int begin = item % pieces * FLOATS_A_TICKET, count = width - begin < FLOATS_A_TICKET ? width - begin : FLOATS_A_TICKET;
        const size_t row = (size_t)(item / pieces), at = row * (size_t)width + (size_t)begin;
        const float *y = operation->y < 0 ? NULL : program->buffers[operation->y];
        if (operation->code == GATED)
            gate(x + at, y + at, count, operation->choice, out + at);
        else if (operation->code == ADD)
            add(x + at, y + at, count, out + at);
        else if (operation->code == SOFT_CAP)
            soft_cap(x + at, count, operation->limit, out + at);
        else if (operation->code == SILU_RESIDUAL)
            add_silu(x + at, y + at, count, out + at);
        else if (operation->code == CONCAT)
            join(x + row * (size_t)operation->count, operation->count, y + row * (size_t)(width - operation->count), begin, count, out + at);
        else
            memcpy(out + at, x + (size_t)pass->selected[row] * (size_t)width + (size_t)begin, (size_t)count * sizeof(float));
    }
}

static void run(void *argument, int thread, int num_threads) {
    const Program *program = &((Run *)argument)->program;
    const Pass *pass = &((Run *)argument)->pass;
    (void)num_threads;
    for (int index = 0; index < program->num_operations; index++) {
        const Operation *operation = program->operations + index;
        const int rows = operation->selected ? pass->selected_rows : pass->rows;
        if (operation->code == LINEAR)
            linear(program, operation, index, rows, thread);
        else if (operation->code == ATTENTION)
            attention(program, pass, operation, index, thread);
        else if (operation->code == RANK)
            rank(program, pass, operation, index, rows);
        else
            by_row(program, pass, operation, index, rows);
        meet();
    }
}

static void prepare(void *argument) {
    Run *own = argument;
    own->program = *own->given_program;
    own->pass = *own->given_pass;
    memset(own->program.tickets, 0, 2 * (size_t)own->program.num_operations * sizeof(int32_t));
}

/* One pass; the results are in the buffers. */
void paceline_run(const Program *program, const Pass *pass) {
    Run own = {.given_program = program, .given_pass = pass};
    run_on_threads(prepare, run, &own, program->num_threads);
}

/* Floats of `packed` for products of `rows` rows and `columns` columns. */
int64_t paceline_packed_floats(int32_t rows, int32_t columns) { return (int64_t)packed_floats(rows, columns); }
