/* How the threads of a pass share out an operation. */
#ifndef PACELINE_WORK_H
#define PACELINE_WORK_H

#include "native.h"

#include <stdatomic.h>

#define PHASES 3 /* of an operation, whose tickets count apart */

/* What a thread knows when it runs an operation. */
typedef struct {
    const Program *program;
    const Pass *pass;
    int index, rows, thread; /* of the operation, of its rows, of the thread */
} Work;

/* The next piece of an operation that no thread has taken. */
static inline int next_ticket(const Work *work, int phase) {
    _Atomic int32_t *tickets = (_Atomic int32_t *)(work->program->tickets + PHASES * work->index + phase);
    return atomic_fetch_add_explicit(tickets, 1, memory_order_relaxed);
}

static inline int parts_of(int total, int size) { return (total + size - 1) / size; }

void run_attention(const Work *work, const Operation *operation);

#endif
