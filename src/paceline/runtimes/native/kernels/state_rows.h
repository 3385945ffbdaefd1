/* Where recurrent layers store the keys, updates and decays of rows: for rows of the pass in the buffer StateOperation.prepared, for pending rows
 * in replay records. */
#ifndef PACELINE_STATE_ROWS_H
#define PACELINE_STATE_ROWS_H

#include "native.h"

/* The parts of a row in the prepared buffer. products: [key heads][CHECKPOINT_INTERVAL][key, query], see `prepare_key`. */
typedef struct {
    float *queries, *keys, *updates, *decays, *steps, *products;
} PreparedRow;

static inline PreparedRow prepared_row_parts(const StateOperation *op, float *row) {
    const size_t keys = (size_t)op->key_heads * (size_t)op->rows_of_state, values = (size_t)op->heads * (size_t)op->columns;
    PreparedRow parts = {.queries = row, .keys = row + keys, .updates = row + 2 * keys};
    parts.decays = parts.updates + values;
    parts.steps = parts.decays + op->heads;
    parts.products = parts.steps + op->heads;
    return parts;
}

/* After the rows of a range, the prepared buffer has a second copy of their keys and queries, in the order in which a sweep reads them: for each
 * head and step, [size of a key][rows of the step][key, query]. */
static inline size_t packed_floats_per_row(const StateOperation *op) { return 2 * (size_t)op->key_heads * (size_t)op->rows_of_state; }

static inline float *prepared_row_at(const StateOperation *op, float *prepared, int row) {
    return prepared + (size_t)row * ((size_t)op->prepared_floats - packed_floats_per_row(op));
}

static inline float *packed_keys_at(const StateOperation *op, float *prepared, int rows, int head, int first) {
    return prepared_row_at(op, prepared, rows) + 2 * (size_t)op->rows_of_state * ((size_t)head * (size_t)rows + (size_t)first);
}

/* Offsets in a replay record. */
typedef struct {
    size_t keys, updates, decays;
} RecordOffsets;

static inline RecordOffsets record_offsets(const StateOperation *op) {
    const size_t keys = (size_t)op->keys_offset, updates = keys + (size_t)op->key_heads * (size_t)op->rows_of_state;
    return (RecordOffsets){keys, updates, updates + (size_t)op->heads * (size_t)op->columns};
}

static inline float *replay_record_at(const StateRange *range, int number) {
    return number < 0 ? NULL : range->records + (size_t)number * (size_t)range->record_floats;
}

/* Prefetch floats to the first-level cache, for reading or, if is_written, for writing. */
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

static inline Node node_at(const StateRange *range, const StateOperation *op, float *prepared, int number) {
    if (number >= 0) {
        const PreparedRow row = prepared_row_parts(op, prepared_row_at(op, prepared, number));
        return (Node){row.keys, row.updates, row.decays};
    }
    const float *record = replay_record_at(range, range->pending[-2 - number]);
    const RecordOffsets at = record_offsets(op);
    return (Node){record + at.keys, record + at.updates, record + at.decays};
}

#endif
