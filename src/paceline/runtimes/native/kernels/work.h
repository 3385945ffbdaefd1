/* How the threads of a pass divide an operation into pieces of work.
 *
 * Each thread first claims its own part of the pieces, the same columns or heads in every operation, so that it finds them in its caches;
 * another core's cache is as slow as memory on some processors. Then it steals what others have left, from their ends. */
#ifndef PACELINE_WORK_H
#define PACELINE_WORK_H

#include "native.h"
#include "threads.h"

#include <stdatomic.h>

#define PHASES 3 /* of an operation; each has its own tickets and claims */

/* A thread's arguments for one operation. */
typedef struct {
    const Program *program;
    const Pass *pass;
    int index, rows, thread, num_threads; /* index of the operation, number of its rows */
} Work;

/* Return the next ticket of an operation, 0, 1, 2, ... over all threads; for work whose number of pieces is not known at first. */
static inline int next_ticket(const Work *work, int phase) {
    _Atomic int32_t *tickets = (_Atomic int32_t *)(work->program->tickets + PHASES * work->index + phase);
    return atomic_fetch_add_explicit(tickets, 1, memory_order_relaxed);
}

static inline int parts_of(int total, int size) { return (total + size - 1) / size; }

/* A thread's claims on `count` runs of pieces, such as the matrices of one operation. */
typedef struct {
    const int *totals; /* [count] pieces of each run */
    int count, done;   /* done: threads whose parts are used up, beginning with this one */
    int run, piece;    /* the last claimed piece */
} Share;

/* Return the first of a run's pieces that belongs to a thread. */
static inline int first_of(int total, int thread, int num_threads) { return (int)(((int64_t)total * thread + num_threads - 1) / num_threads); }

static inline int pieces_of_thread(const Share *share, int thread, int num_threads) {
    int pieces = 0;
    for (int run = 0; run < share->count; run++)
        pieces += first_of(share->totals[run], thread + 1, num_threads) - first_of(share->totals[run], thread, num_threads);
    return pieces;
}

/* Return the counter of a thread's claimed pieces: its own from the front in the low half, stolen ones from the end in the high half. */
static inline _Atomic int64_t *claims_of(const Work *work, int phase, int thread) {
    return (_Atomic int64_t *)(work->program->claims + (size_t)thread * (size_t)work->program->claims_per_thread) + PHASES * work->index + phase;
}

/* Claim one of a thread's pieces, from the front for itself and from the end for others; -1 = none is left. */
static inline int claim_one(_Atomic int64_t *claims, int pieces, int is_own) {
    int64_t seen = atomic_load_explicit(claims, memory_order_relaxed);
    for (;;) {
        const int first = (int)(seen & INT32_MAX), last = (int)(seen >> 32);
        if (first + last >= pieces) return -1;
        const int64_t then = seen + (is_own ? 1 : (int64_t)1 << 32);
        if (atomic_compare_exchange_weak_explicit(claims, &seen, then, memory_order_relaxed, memory_order_relaxed))
            return is_own ? first : pieces - 1 - last;
    }
}

/* Claim the next piece; return 0 if none is left. */
static inline int claim(const Work *work, int phase, Share *share) {
    for (; share->done < work->num_threads; share->done++) {
        const int thread = (work->thread + share->done) % work->num_threads, pieces = pieces_of_thread(share, thread, work->num_threads);
        int piece = claim_one(claims_of(work, phase, thread), pieces, !share->done);
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

/* Claim the next of `total` pieces of a single run; `total` = none is left. */
static inline int next_piece_of(const Work *work, int phase, int total, Share *share) {
    share->totals = &total;
    share->count = 1;
    return claim(work, phase, share) ? share->piece : total;
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
