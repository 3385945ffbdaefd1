/* An attention operation on all threads: rows are written, then every chunk of a range's rows and kv head is a piece. Where that makes few of
 * them, the splits of a chunk are pieces too, and what they give is merged behind them; the sums are the same. */
#include "attention.h"
#include "threads.h"
#include "work.h"

#define PIECES_A_THREAD 4 /* fewer are split up */
#define LONGEST_RUN 8     /* splits of a piece then: what comes from memory is known early within a run */

/* The chunks of a pass one after another, as the kv heads of some rows. */
typedef struct {
    const Pass *pass;
    const AttentionOperation *own;
    Chunk chunk; /* of kv head 0 */
    int range, first, splits;
    size_t parts; /* floats of the parts of those before it */
} Walk;

static size_t parts_of_head(const Walk *walk) {
    return (size_t)(walk->chunk.rows * (walk->own->heads / walk->own->kv_heads)) * (size_t)part_floats(walk->own);
}

static void come_to(Walk *walk, int row) {
    const int rows = chunk_rows(walk->own), left = walk->pass->ranges[walk->range].rows - row;
    int end;
    walk->chunk = (Chunk){walk->pass->ranges + walk->range, row, left < rows ? left : rows, 0};
    splits_of(walk->own, &walk->chunk, &walk->first, &end);
    walk->splits = end - walk->first;
}

static Walk start_walk(const Pass *pass, const AttentionOperation *own) {
    Walk walk = {.pass = pass, .own = own};
    come_to(&walk, 0);
    return walk;
}

/* Whether there is another. */
static int is_there(const Walk *walk) { return walk->range < walk->pass->num_ranges; }

static void go_on(Walk *walk) {
    const int row = walk->chunk.row + walk->chunk.rows;
    walk->parts += (size_t)(walk->splits * walk->own->kv_heads) * parts_of_head(walk);
    if (row < walk->chunk.range->rows)
        come_to(walk, row);
    else if (++walk->range < walk->pass->num_ranges)
        come_to(walk, 0);
}

/* Parts of a head lie split by split; those of the next head are behind them. */
static float *place_of(const Work *work, const Walk *walk, int kv_head, int split) {
    return work->program->parts + walk->parts + (size_t)(kv_head * walk->splits + split) * parts_of_head(walk);
}

static int runs_of(const Walk *walk, int run) { return (walk->splits + run - 1) / run; }

/* A piece is a run of so many splits of a chunk, of which a head has `runs`; a head's pieces lie side by side, as its columns do. */
static void run_splits(const Work *work, const AttentionOperation *own, int run, int runs, int chunks) {
    const int total = runs * own->kv_heads;
    Share share = {0}, merges = {0};
    for (int piece; (piece = next_of(work, 1, total, &share)) < total;) {
        int left = piece % runs;
        Walk walk = start_walk(work->pass, own);
        for (; left >= runs_of(&walk, run); go_on(&walk)) left -= runs_of(&walk, run);
        const int split = left * run, splits = walk.splits - split;
        Chunk chunk = walk.chunk;
        chunk.kv_head = piece / runs;
        attend_splits(work->program, work->pass, own, &chunk, walk.first + split, run < splits ? run : splits,
                      work->program->scratch[work->thread], place_of(work, &walk, chunk.kv_head, split), parts_of_head(&walk));
    }
    barrier();
    for (int piece; (piece = next_of(work, 2, chunks * own->kv_heads, &merges)) < chunks * own->kv_heads;) {
        Walk walk = start_walk(work->pass, own);
        for (int i = 0; i < piece % chunks; i++) go_on(&walk);
        Chunk chunk = walk.chunk;
        chunk.kv_head = piece / chunks;
        finish_attention(work->program, own, &chunk, place_of(work, &walk, chunk.kv_head, 0), walk.splits, parts_of_head(&walk));
    }
}

/* All chunks of a head, then those of the next: whoever has made its columns takes them. */
static void run_chunks(const Work *work, const AttentionOperation *own, int chunks) {
    const int total = chunks * own->kv_heads;
    Walk walk = start_walk(work->pass, own);
    int at = 0;
    Share share = {0};
    for (int piece; (piece = next_of(work, 1, total, &share)) < total;) {
        if (at > piece % chunks) walk = start_walk(work->pass, own), at = 0;
        for (; at < piece % chunks; at++) go_on(&walk);
        Chunk chunk = walk.chunk;
        chunk.kv_head = piece / chunks;
        attend(work->program, work->pass, own, &chunk, work->program->scratch[work->thread]);
    }
}

void run_attention(const Work *work, const Operation *operation) {
    const AttentionOperation *own = (const AttentionOperation *)operation;
    if (own->k >= 0) {
        Share share = {0};
        for (int row; (row = next_of(work, 0, work->rows, &share)) < work->rows;) write_kv(work->program, work->pass, own, row);
        barrier();
    }
    if (own->q < 0) return;
    const int enough = PIECES_A_THREAD * work->program->num_threads;
    int chunks = 0, most = 0, splits = 0;
    Walk walk = start_walk(work->pass, own);
    for (; is_there(&walk); go_on(&walk)) {
        chunks++;
        most = walk.splits > most ? walk.splits : most;
        splits += walk.splits;
    }
    if (chunks * own->kv_heads < enough && most > 1 && walk.parts <= (size_t)work->program->parts_floats) {
        int run = splits * own->kv_heads / enough, runs = 0;
        run = run < 1 ? 1 : run > LONGEST_RUN ? LONGEST_RUN : run;
        for (walk = start_walk(work->pass, own); is_there(&walk); go_on(&walk)) runs += runs_of(&walk, run);
        run_splits(work, own, run, runs, chunks);
    } else
        run_chunks(work, own, chunks);
}
