/* How the threads of a pass divide an operation into pieces of work: by work stealing.
 *
 * Each thread has a fixed share of the pieces: the same columns or heads in every operation, so that their data are in its core's caches. (On some
 * processors another core's cache is as slow as memory.) A thread that has finished its share steals the last pieces of other shares. */
#ifndef PACELINE_WORK_H
#define PACELINE_WORK_H

#include "native.h"
#include "threads.h"

#include <stdatomic.h>

#define PHASES 3 /* maximum number of phases of an operation, each with its own tickets and claims */

/* A thread's arguments for one operation. */
typedef struct {
    const Program *program;
    const Pass *pass;
    int index, rows, thread, num_threads; /* index: in Program.operations; rows: number of rows of the operation */
} Work;

/* Return the next ticket: 0, 1, 2, ...; each is drawn by one thread only. For phases whose number of pieces is not known in advance. */
static inline int next_ticket(const Work *work, int phase) {
    _Atomic int32_t *tickets = (_Atomic int32_t *)(work->program->tickets + PHASES * work->index + phase);
    return atomic_fetch_add_explicit(tickets, 1, memory_order_relaxed);
}

/* A thread's position in the pieces of a phase. A phase has one or more parts, such as the matrices of an operation. */
typedef struct {
    const int *part_pieces;     /* [num_parts] number of pieces of each part */
    int num_parts, num_emptied; /* num_emptied: number of shares, from this thread's on, without unclaimed pieces */
    int part, piece;            /* the last claimed piece */
} PieceQueue;

/* Return the first piece of a thread's share of a part. */
static inline int first_piece_of_thread(int total, int thread, int num_threads) {
    return (int)(((int64_t)total * thread + num_threads - 1) / num_threads);
}

static inline int num_pieces_of_thread(const PieceQueue *queue, int thread, int num_threads) {
    int pieces = 0;
    for (int part = 0; part < queue->num_parts; part++)
        pieces += first_piece_of_thread(queue->part_pieces[part], thread + 1, num_threads) -
                  first_piece_of_thread(queue->part_pieces[part], thread, num_threads);
    return pieces;
}

/* Return the counter of a share's claimed pieces. Low half: claimed by its own thread, from the front; high half: stolen, from the end. */
static inline _Atomic int64_t *claim_counter(const Work *work, int phase, int thread) {
    return (_Atomic int64_t *)(work->program->claims + (size_t)thread * (size_t)work->program->claims_per_thread) + PHASES * work->index + phase;
}

/* Claim the first unclaimed piece of a share, or if the share is another thread's, the last one; -1 = none is left. */
static inline int claim_from_share(_Atomic int64_t *claims, int pieces, int is_own) {
    int64_t seen = atomic_load_explicit(claims, memory_order_relaxed);
    for (;;) {
        const int first = (int)(seen & INT32_MAX), last = (int)(seen >> 32);
        if (first + last >= pieces) return -1;
        const int64_t then = seen + (is_own ? 1 : (int64_t)1 << 32);
        if (atomic_compare_exchange_weak_explicit(claims, &seen, then, memory_order_relaxed, memory_order_relaxed))
            return is_own ? first : pieces - 1 - last;
    }
}

/* Claim a piece of the calling thread's share or, if all of that is claimed, of another share. Return 0 if no piece is left. */
static inline int claim_piece(const Work *work, int phase, PieceQueue *queue) {
    for (; queue->num_emptied < work->num_threads; queue->num_emptied++) {
        const int thread = (work->thread + queue->num_emptied) % work->num_threads, pieces = num_pieces_of_thread(queue, thread, work->num_threads);
        int piece = claim_from_share(claim_counter(work, phase, thread), pieces, !queue->num_emptied);
        if (piece < 0) continue;
        for (queue->part = 0;; queue->part++) {
            const int total = queue->part_pieces[queue->part], first = first_piece_of_thread(total, thread, work->num_threads);
            const int count = first_piece_of_thread(total, thread + 1, work->num_threads) - first;
            if (piece < count) {
                queue->piece = first + piece;
                return 1;
            }
            piece -= count;
        }
    }
    return 0;
}

/* Claim one of `total` pieces and return its index; `total` = no piece is left. */
static inline int claim_next_piece(const Work *work, int phase, int total, PieceQueue *queue) {
    queue->part_pieces = &total;
    queue->num_parts = 1;
    return claim_piece(work, phase, queue) ? queue->piece : total;
}

static inline float *buffer(const Work *work, int number) { return work->program->buffers[number]; }

int has_adapters_for(const Pass *pass, const LinearOperation *op);
int num_down_pieces(const Work *work, const LinearOperation *op);
void compute_down_piece(const Work *work, const LinearOperation *op, int piece);
void prefetch_low_rank(const Work *work, const LinearOperation *op, int matrix, int begin, int end);
void add_low_rank(const Work *work, const LinearOperation *op, int matrix, int begin, int end);
int has_low_rank_pairs(const Pass *pass, const ExpertsOperation *op, const Routes *routes);
void compute_down_of_pairs(const Work *work, const ExpertsOperation *op, const Routes *routes, int ticket, int num_packed);
void prefetch_low_rank_of_pairs(const Work *work, const ExpertsOperation *op, const Routes *routes, const ActiveExpert *active, int matrix,
                                int begin, int end);
void add_low_rank_to_pairs(const Work *work, const ExpertsOperation *op, const Routes *routes, const ActiveExpert *active, int matrix, int begin, int end);
void run_attention(const Work *work, const Operation *operation);
void run_convolution(const Work *work, const Operation *operation);
void run_state(const Work *work, const Operation *operation);

#endif
