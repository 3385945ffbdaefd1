/* Operations of recurrent layers on all threads: whoever has made a head's channels goes on with them, of all texts of the pass. */
#include "state_rows.h"
#include "work.h"

void run_convolution(const Work *work, const Operation *operation) {
    const ConvolutionOperation *own = (const ConvolutionOperation *)operation;
    const Pass *pass = work->pass;
    const int pieces = parts_of(own->channels, PIECE_CHANNELS);
    Share share = {0};
    for (int item; (item = next_of(work, 0, pass->num_ranges * pieces, &share)) < pass->num_ranges * pieces;) {
        const Range *range = pass->ranges + item % pass->num_ranges;
        const size_t at = (size_t)range->start * (size_t)own->channels;
        const int channel = item / pass->num_ranges * PIECE_CHANNELS, left = own->channels - channel;
        convolve(pass->states + item % pass->num_ranges, own, range->rows, channel, left < PIECE_CHANNELS ? left : PIECE_CHANNELS,
                 buffer(work, own->x) + at, buffer(work, operation->out) + at);
    }
}

/* Where the block of a state begins that a thread is to run next, whose rows are asked for; NULL = none, or that of a new text. */
static const float *ask_for_block(const Work *work, const StateOperation *own, int item, int total) {
    const Pass *pass = work->pass;
    if (item == total) return NULL;
    const Range *range = pass->ranges + item % pass->num_ranges;
    const size_t row = (size_t)range->start;
    return ask_for_state_block(pass->states + item % pass->num_ranges, own, range->rows, item / pass->num_ranges,
                               buffer(work, own->x) + row * (size_t)own->channels,
                               buffer(work, own->head.out) + row * (size_t)own->heads * (size_t)own->columns);
}

/* Keys, queries and gates of all rows. */
static void prepare_state(const Work *work, const StateOperation *own) {
    const Pass *pass = work->pass;
    const float *x = buffer(work, own->x), *a = buffer(work, own->a), *b = own->b < 0 ? NULL : buffer(work, own->b);
    float *worked = buffer(work, own->work);
    const size_t heads = (size_t)own->heads, floats_a_row = (size_t)own->work_floats;
    const int num_keys = pass->num_ranges * own->key_heads;
    Share keys = {0}, gates = {0};
    for (int item; (item = next_of(work, 0, num_keys, &keys)) < num_keys;) {
        const int number = item % pass->num_ranges;
        const size_t row = (size_t)pass->ranges[number].start;
        prepare_keys(pass->states + number, own, pass->ranges[number].rows, item / pass->num_ranges, x + row * (size_t)own->channels,
                     worked + row * floats_a_row);
    }
    for (int item; (item = next_of(work, 2, work->rows, &gates)) < work->rows;) {
        const size_t row = (size_t)item, first = (size_t)pass->ranges[pass->range_of_row[row]].start;
        const StateRange *states = pass->states + pass->range_of_row[row];
        prepare_gates(own, a + row * heads, b ? b + row * heads : NULL, work_of(own, worked + first * floats_a_row, (int)(row - first)),
                      record_of(states, states->rows[row - first]));
    }
}

void run_state(const Work *work, const Operation *operation) {
    const StateOperation *own = (const StateOperation *)operation;
    const Pass *pass = work->pass;
    const size_t values = (size_t)own->heads * (size_t)own->columns;
    const int total = pass->num_ranges * own->heads * parts_of(own->columns, own->block);
    float *scratch = work->program->state_scratch + (size_t)work->thread * (size_t)work->program->state_floats;
    Share share = {0};
    int next = next_of(work, 1, total, &share); /* before the keys, so that the memory brings its first block meanwhile */
    const float *block = ask_for_block(work, own, next, total);
    if (block) ask_for(block, own->rows_of_state * own->block, 0);
    prepare_state(work, own);
    barrier();
    for (int item = next; item < total; item = next) {
        const Range *range = pass->ranges + item % pass->num_ranges;
        const size_t row = (size_t)range->start;
        next = next_of(work, 1, total, &share);
        run_state_block(pass->states + item % pass->num_ranges, own, range->rows, item / pass->num_ranges,
                        ask_for_block(work, own, next, total), buffer(work, own->x) + row * (size_t)own->channels,
                        buffer(work, own->work) + row * (size_t)own->work_floats, buffer(work, operation->out) + row * values, scratch);
    }
}
