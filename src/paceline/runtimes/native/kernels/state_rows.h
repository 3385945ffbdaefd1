/* Where the keys, updates and decays of rows of recurrent layers are: of the rows of a pass, in the buffer StateOperation.prepared; of pending
 * rows, in replay records. */
#ifndef PACELINE_STATE_ROWS_H
#define PACELINE_STATE_ROWS_H

#include "native.h"

/* The parts of a row in the prepared buffer. products: [key heads][2 CHECKPOINT_INTERVAL], see `prepare_key`. */
typedef struct {
    float *queries, *keys, *updates, *decays, *steps, *products;
} PreparedRow;

static inline PreparedRow prepared_row(const StateOperation *op, float *row) {
    const size_t keys = (size_t)op->key_heads * (size_t)op->rows_of_state, values = (size_t)op->heads * (size_t)op->columns;
    PreparedRow parts = {.queries = row, .keys = row + keys, .updates = row + 2 * keys};
    parts.decays = parts.updates + values;
    parts.steps = parts.decays + op->heads;
    parts.products = parts.steps + op->heads;
    return parts;
}

/* After the rows of a range, the prepared buffer has their keys and queries a second time, as products need them: for each head and step, [size of
 * a key][rows of the step][key, query]. */
static inline size_t packed_floats_per_row(const StateOperation *op) { return 2 * (size_t)op->key_heads * (size_t)op->rows_of_state; }

static inline float *prepared_at(const StateOperation *op, float *prepared, int row) {
    return prepared + (size_t)row * ((size_t)op->prepared_floats - packed_floats_per_row(op));
}

static inline float *packed_of(const StateOperation *op, float *prepared, int rows, int head, int first) {
    return prepared_at(op, prepared, rows) + 2 * (size_t)op->rows_of_state * ((size_t)head * (size_t)rows + (size_t)first);
}

/* Offsets in a replay record. */
typedef struct {
    size_t keys, updates, decays;
} RecordOffsets;

static inline RecordOffsets record_offsets(const StateOperation *op) {
    const size_t keys = (size_t)op->keys_at, updates = keys + (size_t)op->key_heads * (size_t)op->rows_of_state;
    return (RecordOffsets){keys, updates, updates + (size_t)op->heads * (size_t)op->columns};
}

static inline float *record_of(const StateRange *range, int number) {
    return number < 0 ? NULL : range->records + (size_t)number * (size_t)range->record_floats;
}

/* Prefetch floats to the first-level cache, to be read or, with is_written, to be written. */
static inline void prefetch_floats(const float *from, int count, int is_written) {
    for (int at = 0; at < count; at += 16) {
        if (is_written) __builtin_prefetch(from + at, 1, 3);
        else __builtin_prefetch(from + at, 0, 3);
    }
}

/* The keys, updates and decays of a node (StateRange): a row of the range or a pending row. */
typedef struct {
    const float *keys, *updates, *decays;
} Node;

static inline Node node_of(const StateRange *range, const StateOperation *op, float *prepared, int number) {
    if (number >= 0) {
        const PreparedRow row = prepared_row(op, prepared_at(op, prepared, number));
        return (Node){row.keys, row.updates, row.decays};
    }
    const float *record = record_of(range, range->pending[-2 - number]);
    const RecordOffsets at = record_offsets(op);
    return (Node){record + at.keys, record + at.updates, record + at.decays};
}

#endif
