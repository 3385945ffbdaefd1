/* How the threads of a pass share out an operation. */
#ifndef PACELINE_WORK_H
#define PACELINE_WORK_H

#include "native.h"
#include "threads.h"

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

static inline float *buffer(const Work *work, int number) { return work->program->buffers[number]; }

static inline int parts_of(int total, int size) { return (total + size - 1) / size; }

int has_low_rank(const Pass *pass, const LinearOperation *own);
void run_down(const Work *work, const LinearOperation *own, int ticket, int skipped);
void prefetch_low_rank(const Work *work, const LinearOperation *own, int matrix, int begin, int end);
void add_low_rank(const Work *work, const LinearOperation *own, int matrix, int begin, int end);
int has_low_rank_pairs(const Pass *pass, const ExpertsOperation *own, const Routes *routes);
void run_down_of_pairs(const Work *work, const ExpertsOperation *own, const Routes *routes, int ticket, int skipped);
void prefetch_pairs(const Work *work, const ExpertsOperation *own, const Routes *routes, const struct Active *active, int matrix, int begin, int end);
void add_to_pairs(const Work *work, const ExpertsOperation *own, const Routes *routes, const struct Active *active, int matrix, int begin, int end);
void run_attention(const Work *work, const Operation *operation);

#endif
