/* Where the keys, updates and decays of rows of recurrent layers are: in a pass's work buffer, or in records of committed rows. */
#ifndef PACELINE_STATE_ROWS_H
#define PACELINE_STATE_ROWS_H

#include "native.h"

/* A row in the work buffer. products: [key heads][2 CHECKPOINT_INTERVAL], see `prepare_key`. */
typedef struct {
    float *queries, *keys, *updates, *decays, *steps, *products;
} WorkedRow;

static inline WorkedRow worked_row(const StateOperation *own, float *row) {
    const size_t keys = (size_t)own->key_heads * (size_t)own->rows_of_state, values = (size_t)own->heads * (size_t)own->columns;
    WorkedRow worked = {.queries = row, .keys = row + keys, .updates = row + 2 * keys};
    worked.decays = worked.updates + values;
    worked.steps = worked.decays + own->heads;
    worked.products = worked.steps + own->heads;
    return worked;
}

/* After a range's rows, the work buffer has their keys and queries again, by head and step: [size of a key][rows of a step][key, query]. */
static inline size_t packed_floats_a_row(const StateOperation *own) { return 2 * (size_t)own->key_heads * (size_t)own->rows_of_state; }

static inline float *work_of(const StateOperation *own, float *work, int row) {
    return work + (size_t)row * ((size_t)own->work_floats - packed_floats_a_row(own));
}

static inline float *packed_of(const StateOperation *own, float *work, int rows, int head, int first) {
    return work_of(own, work, rows) + 2 * (size_t)own->rows_of_state * ((size_t)head * (size_t)rows + (size_t)first);
}

/* Offsets in a record. */
typedef struct {
    size_t keys, updates, decays;
} Recorded;

static inline Recorded recorded(const StateOperation *own) {
    const size_t keys = (size_t)own->keys_at, updates = keys + (size_t)own->key_heads * (size_t)own->rows_of_state;
    return (Recorded){keys, updates, updates + (size_t)own->heads * (size_t)own->columns};
}

static inline float *record_of(const StateRange *range, int number) {
    return number < 0 ? NULL : range->records + (size_t)number * (size_t)range->record_floats;
}

/* Prefetch floats that will be read, or written. */
static inline void prefetch_floats(const float *from, int count, int is_written) {
    for (int at = 0; at < count; at += 16) {
        if (is_written)
            __builtin_prefetch(from + at, 1, 3);
        else
            __builtin_prefetch(from + at, 0, 3);
    }
}

/* The data of a node: a row of the range, or a pending one. */
typedef struct {
    const float *keys, *updates, *decays;
} Node;

static inline Node node_of(const StateRange *range, const StateOperation *own, float *work, int number) {
    if (number >= 0) {
        const WorkedRow row = worked_row(own, work_of(own, work, number));
        return (Node){row.keys, row.updates, row.decays};
    }
    const float *record = record_of(range, range->pending[-2 - number]);
    const Recorded at = recorded(own);
    return (Node){record + at.keys, record + at.updates, record + at.decays};
}

#endif
