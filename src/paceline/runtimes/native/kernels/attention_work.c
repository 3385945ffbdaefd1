/* Divide an attention operation among threads. After keys and values are written, a piece of work is a chunk of rows and a kv head. If that gives
 * too few pieces, runs of a chunk's splits are pieces, and their results are merged afterwards; the bits are the same. */
#include "attention.h"
#include "threads.h"
#include "work.h"

#define PIECES_PER_THREAD 4 /* with fewer, chunks are divided into runs of splits */
#define MAX_RUN 8           /* splits of a run, within which prefetching works */

/* A cursor over the chunks of a pass. */
typedef struct {
    const Pass *pass;
    const AttentionOperation *op;
    Chunk chunk; /* of kv head 0 */
    int range, first, splits;
    size_t offset; /* of its results in Program.split_results */
} ChunkCursor;

static size_t head_result_floats(const ChunkCursor *cursor) {
    return (size_t)(cursor->chunk.rows * (cursor->op->heads / cursor->op->kv_heads)) * (size_t)split_result_floats(cursor->op);
}

static void set_chunk(ChunkCursor *cursor, int row) {
    const int rows = chunk_rows(cursor->op), left = cursor->pass->ranges[cursor->range].rows - row;
    int end;
    cursor->chunk = (Chunk){cursor->pass->ranges + cursor->range, row, left < rows ? left : rows, 0};
    splits_of(cursor->op, &cursor->chunk, &cursor->first, &end);
    cursor->splits = end - cursor->first;
}

static ChunkCursor first_chunk(const Pass *pass, const AttentionOperation *op) {
    ChunkCursor cursor = {.pass = pass, .op = op};
    set_chunk(&cursor, 0);
    return cursor;
}

/* Return whether the cursor is before the end. */
static int has_chunk(const ChunkCursor *cursor) { return cursor->range < cursor->pass->num_ranges; }

static void next_chunk(ChunkCursor *cursor) {
    const int row = cursor->chunk.row + cursor->chunk.rows;
    cursor->offset += (size_t)(cursor->splits * cursor->op->kv_heads) * head_result_floats(cursor);
    if (row < cursor->chunk.range->rows)
        set_chunk(cursor, row);
    else if (++cursor->range < cursor->pass->num_ranges)
        set_chunk(cursor, 0);
}

/* Return the place of a split's result; results are ordered by head, then by split. */
static float *split_result_at(const Work *work, const ChunkCursor *cursor, int kv_head, int split) {
    return work->program->split_results + cursor->offset + (size_t)(kv_head * cursor->splits + split) * head_result_floats(cursor);
}

static int runs_of_chunk(const ChunkCursor *cursor, int run) { return (cursor->splits + run - 1) / run; }

/* Run pieces of `run` splits of a chunk; a head has `runs` of them, numbered consecutively. */
static void run_splits(const Work *work, const AttentionOperation *op, int run, int runs, int chunks) {
    const int total = runs * op->kv_heads;
    Share share = {0}, merges = {0};
    for (int piece; (piece = next_piece_of(work, 1, total, &share)) < total;) {
        int left = piece % runs;
        ChunkCursor cursor = first_chunk(work->pass, op);
        for (; left >= runs_of_chunk(&cursor, run); next_chunk(&cursor)) left -= runs_of_chunk(&cursor, run);
        const int split = left * run, splits = cursor.splits - split;
        Chunk chunk = cursor.chunk;
        chunk.kv_head = piece / runs;
        attend_splits(work->program, work->pass, op, &chunk, cursor.first + split, run < splits ? run : splits,
                      work->program->scratch[work->thread], split_result_at(work, &cursor, chunk.kv_head, split), head_result_floats(&cursor));
    }
    barrier();
    for (int piece; (piece = next_piece_of(work, 2, chunks * op->kv_heads, &merges)) < chunks * op->kv_heads;) {
        ChunkCursor cursor = first_chunk(work->pass, op);
        for (int i = 0; i < piece % chunks; i++) next_chunk(&cursor);
        Chunk chunk = cursor.chunk;
        chunk.kv_head = piece / chunks;
        finish_attention(work->program, op, &chunk, split_result_at(work, &cursor, chunk.kv_head, 0), cursor.splits, head_result_floats(&cursor));
    }
}

/* Run pieces of one chunk and head, all chunks of a head first, so that a thread gets the heads it computed before. */
static void run_chunks(const Work *work, const AttentionOperation *op, int chunks) {
    const int total = chunks * op->kv_heads;
    ChunkCursor cursor = first_chunk(work->pass, op);
    int at = 0;
    Share share = {0};
    for (int piece; (piece = next_piece_of(work, 1, total, &share)) < total;) {
        if (at > piece % chunks) cursor = first_chunk(work->pass, op), at = 0;
        for (; at < piece % chunks; at++) next_chunk(&cursor);
        Chunk chunk = cursor.chunk;
        chunk.kv_head = piece / chunks;
        attend(work->program, work->pass, op, &chunk, work->program->scratch[work->thread]);
    }
}

void run_attention(const Work *work, const Operation *operation) {
    const AttentionOperation *op = (const AttentionOperation *)operation;
    if (op->k >= 0) {
        Share share = {0};
        for (int row; (row = next_piece_of(work, 0, work->rows, &share)) < work->rows;) write_kv(work->program, work->pass, op, row);
        barrier();
    }
    if (op->q < 0) return;
    const int enough = PIECES_PER_THREAD * work->program->num_threads;
    int chunks = 0, most = 0, splits = 0;
    ChunkCursor cursor = first_chunk(work->pass, op);
    for (; has_chunk(&cursor); next_chunk(&cursor)) {
        chunks++;
        most = cursor.splits > most ? cursor.splits : most;
        splits += cursor.splits;
    }
    if (chunks * op->kv_heads < enough && most > 1 && cursor.offset <= (size_t)work->program->split_results_floats) {
        int run = splits * op->kv_heads / enough, runs = 0;
        run = run < 1 ? 1 : run > MAX_RUN ? MAX_RUN : run;
        for (cursor = first_chunk(work->pass, op); has_chunk(&cursor); next_chunk(&cursor)) runs += runs_of_chunk(&cursor, run);
        run_splits(work, op, run, runs, chunks);
    } else
        run_chunks(work, op, chunks);
}
