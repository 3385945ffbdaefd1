/* How operations of recurrent layers are divided among threads: by channels and heads, so that a thread gets the same ones in each operation. */
#include "state_rows.h"
#include "work.h"

void run_convolution(const Work *work, const Operation *operation) {
    const ConvolutionOperation *op = (const ConvolutionOperation *)operation;
    const Pass *pass = work->pass;
    const int pieces = ceil_div(op->channels, PIECE_CHANNELS);
    PieceQueue queue = {0};
    for (int item; (item = claim_next_piece(work, 0, pass->num_ranges * pieces, &queue)) < pass->num_ranges * pieces;) {
        const Range *range = pass->ranges + item % pass->num_ranges;
        const size_t at = (size_t)range->start * (size_t)op->channels;
        const int channel = item / pass->num_ranges * PIECE_CHANNELS, left = op->channels - channel;
        convolve(pass->states + item % pass->num_ranges, op, range->rows, channel, left < PIECE_CHANNELS ? left : PIECE_CHANNELS,
                 buffer(work, op->x) + at, buffer(work, operation->out) + at);
    }
}

/* Prefetch the inputs of piece `item`. Return the address of its state block; NULL = no piece is left, or the sequence has no state. */
static const float *prefetch_block(const Work *work, const StateOperation *op, int item, int total) {
    const Pass *pass = work->pass;
    if (item == total) return NULL;
    const Range *range = pass->ranges + item % pass->num_ranges;
    const size_t row = (size_t)range->start;
    return prefetch_state_block(pass->states + item % pass->num_ranges, op, range->rows, item / pass->num_ranges,
                               buffer(work, op->x) + row * (size_t)op->channels,
                               buffer(work, op->common.out) + row * (size_t)op->heads * (size_t)op->columns);
}

/* Prepare keys, queries and gates of all rows. */
static void prepare_state(const Work *work, const StateOperation *op) {
    const Pass *pass = work->pass;
    const float *x = buffer(work, op->x), *a = buffer(work, op->a), *b = op->b < 0 ? NULL : buffer(work, op->b);
    float *prepared = buffer(work, op->prepared);
    const size_t heads = (size_t)op->heads, floats_per_row = (size_t)op->prepared_floats;
    const int num_keys = pass->num_ranges * op->key_heads;
    PieceQueue keys = {0}, gates = {0};
    for (int item; (item = claim_next_piece(work, 0, num_keys, &keys)) < num_keys;) {
        const int number = item % pass->num_ranges;
        const size_t row = (size_t)pass->ranges[number].start;
        prepare_keys(pass->states + number, op, pass->ranges[number].rows, item / pass->num_ranges, x + row * (size_t)op->channels,
                     prepared + row * floats_per_row);
    }
    for (int item; (item = claim_next_piece(work, 2, work->rows, &gates)) < work->rows;) {
        const size_t row = (size_t)item, first = (size_t)pass->ranges[pass->range_of_row[row]].start;
        const StateRange *states = pass->states + pass->range_of_row[row];
        prepare_gates(op, a + row * heads, b ? b + row * heads : NULL, prepared_row_at(op, prepared + first * floats_per_row, (int)(row - first)),
                      replay_record_at(states, states->row_records[row - first]));
    }
}

void run_state(const Work *work, const Operation *operation) {
    const StateOperation *op = (const StateOperation *)operation;
    const Pass *pass = work->pass;
    const size_t values = (size_t)op->heads * (size_t)op->columns;
    const int total = pass->num_ranges * op->heads * ceil_div(op->columns, op->block_columns);
    float *scratch = work->program->state_scratch + (size_t)work->thread * (size_t)work->program->state_floats;
    PieceQueue queue = {0};
    int next = claim_next_piece(work, 1, total, &queue); /* claimed early, so that its state is prefetched while keys are prepared */
    const float *block = prefetch_block(work, op, next, total);
    if (block) prefetch_floats(block, op->rows_of_state * op->block_columns, 0);
    prepare_state(work, op);
    barrier();
    for (int item = next; item < total; item = next) {
        const Range *range = pass->ranges + item % pass->num_ranges;
        const size_t row = (size_t)range->start;
        next = claim_next_piece(work, 1, total, &queue);
        run_state_block(pass->states + item % pass->num_ranges, op, range->rows, item / pass->num_ranges,
                        prefetch_block(work, op, next, total), buffer(work, op->x) + row * (size_t)op->channels,
                        buffer(work, op->prepared) + row * (size_t)op->prepared_floats, buffer(work, operation->out) + row * values, scratch);
    }
}
