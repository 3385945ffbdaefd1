/* How an attention operation is divided among threads. First the threads write keys and values. Then a piece of work is a chunk of rows and a KV
 * head. If that gives fewer than MIN_PIECES_PER_THREAD pieces per thread, a piece is a run of consecutive splits of a chunk, and results are merged
 * afterwards. Both ways give the same bits. */
#include "attention.h"
#include "work.h"

#define MIN_PIECES_PER_THREAD 4
#define MAX_RUN_SPLITS 8 /* maximum number of splits in a run. Short runs are slower: head blocks are prefetched only within a run. */

/* Iterates over the chunks of a pass, range by range. */
typedef struct {
    const Pass *pass;
    const AttentionOperation *op;
    Chunk chunk;                              /* kv_head is set by the function that claims a piece */
    int range_index, first_split, num_splits; /* range_index: in Pass.ranges; the chunk has splits [first_split, first_split + num_splits) */
    size_t offset;                            /* index of the chunk's results in Program.split_results */
} ChunkCursor;

/* Return the number of floats in the results of one split for one KV head: those of all queries of the chunk. */
static size_t head_result_floats(const ChunkCursor *cursor) {
    return (size_t)(cursor->chunk.rows * (cursor->op->heads / cursor->op->kv_heads)) * (size_t)split_result_floats(cursor->op);
}

static void set_chunk(ChunkCursor *cursor, int row) {
    const int rows = max_chunk_rows(cursor->op), left = cursor->pass->ranges[cursor->range_index].rows - row;
    int end;
    cursor->chunk = (Chunk){cursor->pass->ranges + cursor->range_index, row, left < rows ? left : rows, 0};
    find_chunk_splits(cursor->op, &cursor->chunk, &cursor->first_split, &end);
    cursor->num_splits = end - cursor->first_split;
}

static ChunkCursor first_chunk(const Pass *pass, const AttentionOperation *op) {
    ChunkCursor cursor = {.pass = pass, .op = op};
    set_chunk(&cursor, 0);
    return cursor;
}

static void next_chunk(ChunkCursor *cursor) {
    const int row = cursor->chunk.first_row + cursor->chunk.rows;
    cursor->offset += (size_t)(cursor->num_splits * cursor->op->kv_heads) * head_result_floats(cursor);
    if (row < cursor->chunk.range->rows) set_chunk(cursor, row);
    else if (++cursor->range_index < cursor->pass->num_ranges) set_chunk(cursor, 0);
}

/* Return the address of a split's results. Results of a chunk are ordered by head, then by split. */
static float *split_result_at(const Work *work, const ChunkCursor *cursor, int split) {
    return work->program->split_results + cursor->offset + (size_t)(cursor->chunk.kv_head * cursor->num_splits + split) * head_result_floats(cursor);
}

/* Compute all splits in runs of splits_per_run, then merge their results. Each head has num_runs runs, over all chunks. */
static void compute_split_runs(const Work *work, const AttentionOperation *op, int splits_per_run, int num_runs, int num_chunks) {
    const int total = num_runs * op->kv_heads;
    PieceQueue queue = {0}, merges = {0};
    for (int piece; (piece = claim_next_piece(work, 1, total, &queue)) < total;) {
        int left = piece % num_runs;
        ChunkCursor cursor = first_chunk(work->pass, op);
        for (; left >= ceil_div(cursor.num_splits, splits_per_run); next_chunk(&cursor)) left -= ceil_div(cursor.num_splits, splits_per_run);
        const int split = left * splits_per_run, splits = cursor.num_splits - split;
        cursor.chunk.kv_head = piece / num_runs;
        attend_splits(work->program, work->pass, op, &cursor.chunk, cursor.first_split + split, splits_per_run < splits ? splits_per_run : splits,
                      work->program->scratch[work->thread], split_result_at(work, &cursor, split), head_result_floats(&cursor));
    }
    barrier();
    for (int piece; (piece = claim_next_piece(work, 2, num_chunks * op->kv_heads, &merges)) < num_chunks * op->kv_heads;) {
        ChunkCursor cursor = first_chunk(work->pass, op);
        for (int i = 0; i < piece % num_chunks; i++) next_chunk(&cursor);
        cursor.chunk.kv_head = piece / num_chunks;
        merge_and_write_outputs(work->program, op, &cursor.chunk, split_result_at(work, &cursor, 0), cursor.num_splits, head_result_floats(&cursor));
    }
}

/* Compute whole chunks. Pieces are numbered by head, then by chunk, so that a thread gets the same heads in each operation. */
static void compute_chunks(const Work *work, const AttentionOperation *op, int num_chunks) {
    const int total = num_chunks * op->kv_heads;
    ChunkCursor cursor = first_chunk(work->pass, op);
    int at = 0;
    PieceQueue queue = {0};
    for (int piece; (piece = claim_next_piece(work, 1, total, &queue)) < total;) {
        if (at > piece % num_chunks) cursor = first_chunk(work->pass, op), at = 0;
        for (; at < piece % num_chunks; at++) next_chunk(&cursor);
        cursor.chunk.kv_head = piece / num_chunks;
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
    const int min_pieces = MIN_PIECES_PER_THREAD * work->program->num_threads;
    int num_chunks = 0, max_splits = 0, splits = 0;
    ChunkCursor cursor = first_chunk(work->pass, op);
    for (; cursor.range_index < work->pass->num_ranges; next_chunk(&cursor)) {
        num_chunks++;
        max_splits = cursor.num_splits > max_splits ? cursor.num_splits : max_splits;
        splits += cursor.num_splits;
    }
    if (num_chunks * op->kv_heads < min_pieces && max_splits > 1 && cursor.offset <= (size_t)work->program->split_results_floats) {
        int splits_per_run = splits * op->kv_heads / min_pieces, num_runs = 0;
        splits_per_run = splits_per_run < 1 ? 1 : splits_per_run > MAX_RUN_SPLITS ? MAX_RUN_SPLITS : splits_per_run;
        for (cursor = first_chunk(work->pass, op); cursor.range_index < work->pass->num_ranges; next_chunk(&cursor))
            num_runs += ceil_div(cursor.num_splits, splits_per_run);
        compute_split_runs(work, op, splits_per_run, num_runs, num_chunks);
    } else compute_chunks(work, op, num_chunks);
}
