/* Divide operations of recurrent layers among threads, by channels and heads: a thread continues with the heads it computed before. */
#include "state_rows.h"
#include "work.h"

void run_convolution(const Work *work, const Operation *operation) {
    const ConvolutionOperation *op = (const ConvolutionOperation *)operation;
    const Pass *pass = work->pass;
    const int pieces = parts_of(op->channels, PIECE_CHANNELS);
    Share share = {0};
    for (int item; (item = next_piece_of(work, 0, pass->num_ranges * pieces, &share)) < pass->num_ranges * pieces;) {
        const Range *range = pass->ranges + item % pass->num_ranges;
        const size_t at = (size_t)range->start * (size_t)op->channels;
        const int channel = item / pass->num_ranges * PIECE_CHANNELS, left = op->channels - channel;
        convolve(pass->states + item % pass->num_ranges, op, range->rows, channel, left < PIECE_CHANNELS ? left : PIECE_CHANNELS,
                 buffer(work, op->x) + at, buffer(work, operation->out) + at);
    }
}

/* Prefetch the inputs of a thread's next state block and return its address; NULL = none, or a new text. */
static const float *prefetch_block(const Work *work, const StateOperation *op, int item, int total) {
    const Pass *pass = work->pass;
    if (item == total) return NULL;
    const Range *range = pass->ranges + item % pass->num_ranges;
    const size_t row = (size_t)range->start;
    return prefetch_state_block(pass->states + item % pass->num_ranges, op, range->rows, item / pass->num_ranges,
                               buffer(work, op->x) + row * (size_t)op->channels,
                               buffer(work, op->head.out) + row * (size_t)op->heads * (size_t)op->columns);
}

/* Prepare keys, queries and gates of all rows. */
static void prepare_state(const Work *work, const StateOperation *op) {
    const Pass *pass = work->pass;
    const float *x = buffer(work, op->x), *a = buffer(work, op->a), *b = op->b < 0 ? NULL : buffer(work, op->b);
    float *worked = buffer(work, op->work);
    const size_t heads = (size_t)op->heads, floats_per_row = (size_t)op->work_floats;
    const int num_keys = pass->num_ranges * op->key_heads;
    Share keys = {0}, gates = {0};
    for (int item; (item = next_piece_of(work, 0, num_keys, &keys)) < num_keys;) {
        const int number = item % pass->num_ranges;
        const size_t row = (size_t)pass->ranges[number].start;
        prepare_keys(pass->states + number, op, pass->ranges[number].rows, item / pass->num_ranges, x + row * (size_t)op->channels,
                     worked + row * floats_per_row);
    }
    for (int item; (item = next_piece_of(work, 2, work->rows, &gates)) < work->rows;) {
        const size_t row = (size_t)item, first = (size_t)pass->ranges[pass->range_of_row[row]].start;
        const StateRange *states = pass->states + pass->range_of_row[row];
        prepare_gates(op, a + row * heads, b ? b + row * heads : NULL, work_of(op, worked + first * floats_per_row, (int)(row - first)),
                      record_of(states, states->rows[row - first]));
    }
}

void run_state(const Work *work, const Operation *operation) {
    const StateOperation *op = (const StateOperation *)operation;
    const Pass *pass = work->pass;
    const size_t values = (size_t)op->heads * (size_t)op->columns;
    const int total = pass->num_ranges * op->heads * parts_of(op->columns, op->block);
    float *scratch = work->program->state_scratch + (size_t)work->thread * (size_t)work->program->state_floats;
    Share share = {0};
    int next = next_piece_of(work, 1, total, &share); /* claimed before the keys are prepared, so that its prefetch overlaps with them */
    const float *block = prefetch_block(work, op, next, total);
    if (block) prefetch_floats(block, op->rows_of_state * op->block, 0);
    prepare_state(work, op);
    barrier();
    for (int item = next; item < total; item = next) {
        const Range *range = pass->ranges + item % pass->num_ranges;
        const size_t row = (size_t)range->start;
        next = next_piece_of(work, 1, total, &share);
        run_state_block(pass->states + item % pass->num_ranges, op, range->rows, item / pass->num_ranges,
                        prefetch_block(work, op, next, total), buffer(work, op->x) + row * (size_t)op->channels,
                        buffer(work, op->work) + row * (size_t)op->work_floats, buffer(work, operation->out) + row * values, scratch);
    }
}
