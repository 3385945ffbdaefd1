/* Dividing an attention operation among threads. After keys and values are written, a piece of work is a chunk of rows and a KV head. If that gives
 * fewer than PIECES_PER_THREAD pieces per thread, a piece is a run of consecutive splits of a chunk, and results are merged afterwards. The bits
 * are the same. */
#include "attention.h"
#include "threads.h"
#include "work.h"

#define PIECES_PER_THREAD 4
#define MAX_RUN 8 /* maximum number of splits of a run; splits are prefetched within a run only */

/* A position in the list of all chunks of a pass. */
typedef struct {
    const Pass *pass;
    const AttentionOperation *op;
    Chunk chunk; /* kv_head 0, until it is set for a piece of work */
    int range, first, splits; /* range: its index; the chunk has `splits` splits from `first` on */
    size_t offset;            /* of the chunk's results in Program.split_results */
} ChunkCursor;

static size_t head_result_floats(const ChunkCursor *cursor) {
    return (size_t)(cursor->chunk.rows * (cursor->op->heads / cursor->op->kv_heads)) * (size_t)split_result_floats(cursor->op);
}

static void set_chunk(ChunkCursor *cursor, int row) {
    const int rows = chunk_rows(cursor->op), left = cursor->pass->ranges[cursor->range].rows - row;
    int end;
    cursor->chunk = (Chunk){cursor->pass->ranges + cursor->range, row, left < rows ? left : rows, 0};
    find_splits(cursor->op, &cursor->chunk, &cursor->first, &end);
    cursor->splits = end - cursor->first;
}

static ChunkCursor first_chunk(const Pass *pass, const AttentionOperation *op) {
    ChunkCursor cursor = {.pass = pass, .op = op};
    set_chunk(&cursor, 0);
    return cursor;
}

static void next_chunk(ChunkCursor *cursor) {
    const int row = cursor->chunk.row + cursor->chunk.rows;
    cursor->offset += (size_t)(cursor->splits * cursor->op->kv_heads) * head_result_floats(cursor);
    if (row < cursor->chunk.range->rows) set_chunk(cursor, row);
    else if (++cursor->range < cursor->pass->num_ranges) set_chunk(cursor, 0);
}

/* Return where a split's result is; results of a chunk are ordered by head, then by split. */
static float *split_result_at(const Work *work, const ChunkCursor *cursor, int split) {
    return work->program->split_results + cursor->offset + (size_t)(cursor->chunk.kv_head * cursor->splits + split) * head_result_floats(cursor);
}

/* Compute runs of `run` splits, then merge their results. A head has num_split_runs runs over all chunks. */
static void run_splits(const Work *work, const AttentionOperation *op, int run, int num_split_runs, int chunks) {
    const int total = num_split_runs * op->kv_heads;
    PieceQueue queue = {0}, merges = {0};
    for (int piece; (piece = claim_next_piece(work, 1, total, &queue)) < total;) {
        int left = piece % num_split_runs;
        ChunkCursor cursor = first_chunk(work->pass, op);
        for (; left >= ceil_div(cursor.splits, run); next_chunk(&cursor)) left -= ceil_div(cursor.splits, run);
        const int split = left * run, splits = cursor.splits - split;
        cursor.chunk.kv_head = piece / num_split_runs;
        attend_splits(work->program, work->pass, op, &cursor.chunk, cursor.first + split, run < splits ? run : splits,
                      work->program->scratch[work->thread], split_result_at(work, &cursor, split), head_result_floats(&cursor));
    }
    barrier();
    for (int piece; (piece = claim_next_piece(work, 2, chunks * op->kv_heads, &merges)) < chunks * op->kv_heads;) {
        ChunkCursor cursor = first_chunk(work->pass, op);
        for (int i = 0; i < piece % chunks; i++) next_chunk(&cursor);
        cursor.chunk.kv_head = piece / chunks;
        finish_attention(work->program, op, &cursor.chunk, split_result_at(work, &cursor, 0), cursor.splits, head_result_floats(&cursor));
    }
}

/* Compute chunks. Pieces are numbered by head, then by chunk, so that a thread gets the same heads in each operation. */
static void run_chunks(const Work *work, const AttentionOperation *op, int chunks) {
    const int total = chunks * op->kv_heads;
    ChunkCursor cursor = first_chunk(work->pass, op);
    int at = 0;
    PieceQueue queue = {0};
    for (int piece; (piece = claim_next_piece(work, 1, total, &queue)) < total;) {
        if (at > piece % chunks) cursor = first_chunk(work->pass, op), at = 0;
        for (; at < piece % chunks; at++) next_chunk(&cursor);
        cursor.chunk.kv_head = piece / chunks;
        attend_chunk(work->program, work->pass, op, &cursor.chunk, work->program->scratch[work->thread]);
    }
}

void run_attention(const Work *work, const Operation *operation) {
    const AttentionOperation *op = (const AttentionOperation *)operation;
    if (op->k >= 0) {
        PieceQueue queue = {0};
        for (int row; (row = claim_next_piece(work, 0, work->rows, &queue)) < work->rows;) write_kv(work->program, work->pass, op, row);
        barrier();
    }
    if (op->q < 0) return;
    const int enough = PIECES_PER_THREAD * work->program->num_threads;
    int chunks = 0, most = 0, splits = 0;
    ChunkCursor cursor = first_chunk(work->pass, op);
    for (; cursor.range < work->pass->num_ranges; next_chunk(&cursor)) {
        chunks++;
        most = cursor.splits > most ? cursor.splits : most;
        splits += cursor.splits;
    }
    if (chunks * op->kv_heads < enough && most > 1 && cursor.offset <= (size_t)work->program->split_results_floats) {
        int run = splits * op->kv_heads / enough, num_split_runs = 0;
        run = run < 1 ? 1 : run > MAX_RUN ? MAX_RUN : run;
        for (cursor = first_chunk(work->pass, op); cursor.range < work->pass->num_ranges; next_chunk(&cursor)) num_split_runs += ceil_div(cursor.splits, run);
        run_splits(work, op, run, num_split_runs, chunks);
    } else run_chunks(work, op, chunks);
}
