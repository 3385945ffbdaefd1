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

/* What a thread has taken of `total` pieces that lie one behind another in memory: a part of what is left, smaller ones towards the end. So
 * what a product asks for early is mostly its own, and no thread waits long for another. */
typedef struct {
    int total, next, end;
} Share;

/* The next piece of a share, or of a new one; `total` = there is none. */
static inline int next_of_share(const Work *work, int phase, Share *share) {
    if (share->next < share->end) return share->next++;
    _Atomic int32_t *tickets = (_Atomic int32_t *)(work->program->tickets + PHASES * work->index + phase);
    int32_t first = atomic_load_explicit(tickets, memory_order_relaxed), count;
    do {
        const int left = share->total - first;
        if (left <= 0) return share->total;
        count = left / (2 * work->program->num_threads);
        if (count < 1) count = 1;
    } while (!atomic_compare_exchange_weak_explicit(tickets, &first, first + count, memory_order_relaxed, memory_order_relaxed));
    share->next = first + 1;
    share->end = first + count;
    return first;
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
