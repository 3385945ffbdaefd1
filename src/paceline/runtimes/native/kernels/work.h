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
    int index, rows, thread, num_threads; /* of the operation, of its rows, of the thread; those that run it */
} Work;

/* The next piece of an operation that no thread has taken, where nobody knows how many there are. */
static inline int next_ticket(const Work *work, int phase) {
    _Atomic int32_t *tickets = (_Atomic int32_t *)(work->program->tickets + PHASES * work->index + phase);
    return atomic_fetch_add_explicit(tickets, 1, memory_order_relaxed);
}

static inline int parts_of(int total, int size) { return (total + size - 1) / size; }

/* Pieces of an operation that are shared out by their places: each thread takes the same part of each of `count` runs of them, so that it
 * finds in its own caches what it made of these columns before, and then what others have left, from their ends. Elsewhere than in the
 * same core a line of a cache is as far as the memory on some processors. */
typedef struct {
    const int *totals; /* [count] */
    int count, passed; /* passed: threads whose parts are taken */
    int run, piece;    /* what was taken last */
} Share;

/* How many of a run's pieces are those of the threads before one. */
static inline int first_of(int total, int thread, int num_threads) { return (int)(((int64_t)total * thread + num_threads - 1) / num_threads); }

static inline int pieces_of_thread(const Share *share, int thread, int num_threads) {
    int pieces = 0;
    for (int run = 0; run < share->count; run++)
        pieces += first_of(share->totals[run], thread + 1, num_threads) - first_of(share->totals[run], thread, num_threads);
    return pieces;
}

/* What was taken of a thread's pieces: the first ones by itself, in the low half, the last ones by others. */
static inline _Atomic int64_t *taken_of(const Work *work, int phase, int thread) {
    return (_Atomic int64_t *)(work->program->taken + (size_t)thread * (size_t)work->program->taken_a_thread) + PHASES * work->index + phase;
}

/* The number of the next of a thread's pieces, its first ones for itself and its last ones for others; -1 = there is none. */
static inline int take_one(_Atomic int64_t *taken, int pieces, int is_own) {
    int64_t seen = atomic_load_explicit(taken, memory_order_relaxed);
    for (;;) {
        const int first = (int)(seen & INT32_MAX), last = (int)(seen >> 32);
        if (first + last >= pieces) return -1;
        const int64_t then = seen + (is_own ? 1 : (int64_t)1 << 32);
        if (atomic_compare_exchange_weak_explicit(taken, &seen, then, memory_order_relaxed, memory_order_relaxed))
            return is_own ? first : pieces - 1 - last;
    }
}

/* Take the next piece; whether there was one. */
static inline int take(const Work *work, int phase, Share *share) {
    for (; share->passed < work->num_threads; share->passed++) {
        const int thread = (work->thread + share->passed) % work->num_threads, pieces = pieces_of_thread(share, thread, work->num_threads);
        int piece = take_one(taken_of(work, phase, thread), pieces, !share->passed);
        if (piece < 0) continue;
        for (share->run = 0;; share->run++) {
            const int total = share->totals[share->run], first = first_of(total, thread, work->num_threads);
            const int count = first_of(total, thread + 1, work->num_threads) - first;
            if (piece < count) {
                share->piece = first + piece;
                return 1;
            }
            piece -= count;
        }
    }
    return 0;
}

/* The next of `total` pieces; `total` = there is none. */
static inline int next_of(const Work *work, int phase, int total, Share *share) {
    share->totals = &total;
    share->count = 1;
    return take(work, phase, share) ? share->piece : total;
}

static inline float *buffer(const Work *work, int number) { return work->program->buffers[number]; }

int has_low_rank(const Pass *pass, const LinearOperation *own);
int pieces_of_down(const Work *work, const LinearOperation *own);
void run_down(const Work *work, const LinearOperation *own, int piece);
void prefetch_low_rank(const Work *work, const LinearOperation *own, int matrix, int begin, int end);
void add_low_rank(const Work *work, const LinearOperation *own, int matrix, int begin, int end);
int has_low_rank_pairs(const Pass *pass, const ExpertsOperation *own, const Routes *routes);
void run_down_of_pairs(const Work *work, const ExpertsOperation *own, const Routes *routes, int ticket, int skipped);
void prefetch_pairs(const Work *work, const ExpertsOperation *own, const Routes *routes, const struct Active *active, int matrix, int begin, int end);
void add_to_pairs(const Work *work, const ExpertsOperation *own, const Routes *routes, const struct Active *active, int matrix, int begin, int end);
void run_attention(const Work *work, const Operation *operation);
void run_convolution(const Work *work, const Operation *operation);
void run_state(const Work *work, const Operation *operation);

#endif
