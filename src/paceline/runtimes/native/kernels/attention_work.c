/* An attention operation on all threads: rows are written, then every chunk of a range's rows and kv head is a piece. Where that makes few of
 * them, the splits of a chunk are pieces too, and what they give is merged behind them; the sums are the same. */
#include "attention.h"
#include "threads.h"
#include "work.h"

#define PIECES_A_THREAD 4 /* fewer are split up */
#define LONGEST_RUN 8     /* splits of a piece then: what comes from memory is known early within a run */

/* The chunks of a pass one after another, as the kv heads of some rows: each thread walks over them with its tickets. */
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

/* A piece is a run of so many splits of a chunk. */
static void run_splits(const Work *work, const AttentionOperation *own, int run) {
    const int heads = own->kv_heads;
    int ticket = next_ticket(work, 1), skipped = 0;
    for (Walk walk = start_walk(work->pass, own); is_there(&walk); go_on(&walk)) {
        const int runs = (walk.splits + run - 1) / run;
        for (; ticket - skipped < runs * heads; ticket = next_ticket(work, 1)) {
            const int split = (ticket - skipped) % runs * run, left = walk.splits - split;
            Chunk chunk = walk.chunk;
            chunk.kv_head = (ticket - skipped) / runs;
            attend_splits(work->program, work->pass, own, &chunk, walk.first + split, run < left ? run : left,
                          work->program->scratch[work->thread], place_of(work, &walk, chunk.kv_head, split), parts_of_head(&walk));
        }
        skipped += runs * heads;
    }
    barrier();
    ticket = next_ticket(work, 2), skipped = 0;
    for (Walk walk = start_walk(work->pass, own); is_there(&walk); go_on(&walk)) {
        for (; ticket - skipped < heads; ticket = next_ticket(work, 2)) {
            Chunk chunk = walk.chunk;
            chunk.kv_head = ticket - skipped;
            finish_attention(work->program, own, &chunk, place_of(work, &walk, chunk.kv_head, 0), walk.splits, parts_of_head(&walk));
        }
        skipped += heads;
    }
}

static void run_chunks(const Work *work, const AttentionOperation *own) {
    int ticket = next_ticket(work, 1), skipped = 0;
    for (Walk walk = start_walk(work->pass, own); is_there(&walk); go_on(&walk)) {
        for (; ticket - skipped < own->kv_heads; ticket = next_ticket(work, 1)) {
            Chunk chunk = walk.chunk;
            chunk.kv_head = ticket - skipped;
            attend(work->program, work->pass, own, &chunk, work->program->scratch[work->thread]);
        }
        skipped += own->kv_heads;
    }
}

void run_attention(const Work *work, const Operation *operation) {
    const AttentionOperation *own = (const AttentionOperation *)operation;
    if (own->k >= 0) {
        for (int row; (row = next_ticket(work, 0)) < work->rows;) write_kv(work->program, work->pass, own, row);
        barrier();
    }
    const int enough = PIECES_A_THREAD * work->program->num_threads;
    int chunks = 0, most = 0, splits = 0;
    Walk walk = start_walk(work->pass, own);
    for (; is_there(&walk); go_on(&walk)) {
        chunks++;
        most = walk.splits > most ? walk.splits : most;
        splits += walk.splits;
    }
    if (chunks * own->kv_heads < enough && most > 1 && walk.parts <= (size_t)work->program->parts_floats) {
        const int run = splits * own->kv_heads / enough;
        run_splits(work, own, run < 1 ? 1 : run > LONGEST_RUN ? LONGEST_RUN : run);
    } else
        run_chunks(work, own);
}
