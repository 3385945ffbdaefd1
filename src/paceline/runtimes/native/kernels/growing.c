/* A draft of pairs from its first pass to the finished tree without leaving the kernels: the true pairs that wait, the guesses behind the
 * nodes of a level, the best of them as the rows of the next pass, and the choice among all of them. What drafters/pairs/tree.py and guesses.py
 * do for any request is done here for one whose rows nothing but the temperature changes. */
#include "native.h"
#include "vectors.h"

#include <math.h>

#define REACH 12.0        /* log-probabilities: what is so far below the best is worth no row */
#define COUPLED_PROB 0.6 /* as drafters/pairs/guesses.py and speculation/tree_growth.py have them */

void paceline_run(const Program *program, const Pass *pass);

static void embed(const Growing *growing, int token, float *out) {
    const uint8_t *row = growing->table + (size_t)token * (size_t)growing->row_bytes;
    for (int column = 0; column < growing->embedding_width; column++) {
        if (growing->kind == F32)
            out[column] = ((const float *)row)[column];
        else if (growing->kind == F16)
            out[column] = (float)((const _Float16 *)row)[column];
        else {
            const uint32_t bits = (uint32_t)((const uint16_t *)row)[column] << 16;
            memcpy(out + column, &bits, sizeof bits);
        }
    }
}

/* The angles of a row, for both programs. */
static void turn(const Growing *growing, int row, int position) {
    const size_t half = (size_t)growing->half;
    for (int side = 0; side < 2 * growing->num_ropes; side++)
        memcpy(growing->angles[side] + (size_t)row * half, growing->tables[side] + (size_t)position * half, half * sizeof(float));
}

static void add_node(Growing *growing, int parent, int token, double prob) {
    const int node = growing->num_nodes++;
    growing->tokens[node] = token;
    growing->parents[node] = parent;
    growing->probs[node] = prob;
    growing->reached[node] = growing->reached[parent] * prob;
    growing->first[node] = growing->end[node] = 0;
}

/* The guesses behind a node: the drawn or most probable token, and the likeliest others with what that leaves them. */
static void guess(Growing *growing, int node, const float *record) {
    const int count = growing->count, width = growing->width, is_drawn = growing->wanted.temperature > 0.0f;
    const float *scores = record + 2;
    const int32_t *ids = (const int32_t *)(scores + count);
    growing->first[node] = growing->end[node] = growing->num_nodes;
    if (!isfinite(record[0])) return;
    const int first = is_drawn ? ((const int32_t *)record)[1] : ids[0];
    if (width == 1) {
        add_node(growing, node, first, 1.0);
        growing->end[node] = growing->num_nodes;
        return;
    }
    double own = 0.0, rest = 0.0;
    for (int pass = 0; pass < 2; pass++) {
        const double scale = rest > 0.0 ? fmin(1.0, (1.0 - own) / rest) : 0.0;
        if (pass) add_node(growing, node, first, own);
        for (int rank = 0, others = 0; rank < count && scores[rank] > (double)scores[0] - REACH; rank++) {
            const double prob = exp((double)scores[rank] - (double)record[0]);
            if (ids[rank] == first) {
                own = pass ? own : prob;
                continue;
            }
            if (others++ >= width - 1) continue;
            if (pass)
                add_node(growing, node, ids[rank], prob * scale);
            else
                rest += prob;
        }
        if (!pass && is_drawn && own < COUPLED_PROB) own = COUPLED_PROB;
    }
    growing->end[node] = growing->num_nodes;
}

/* The likeliest `width` nodes from `first` on, in order, into `frontier`; the earlier one on ties. */
static int best_nodes(Growing *growing, int first) {
    int taken = 0;
    for (; taken < growing->width; taken++) {
        int best = -1;
        for (int node = first; node < growing->num_nodes; node++)
            if (growing->row_of[node] < 0 && (best < 0 || growing->reached[node] > growing->reached[best])) best = node;
        if (best < 0) break;
        growing->row_of[best] = 0; /* taken; numbered below */
    }
    for (int node = first, at = 0; node < growing->num_nodes; node++)
        if (growing->row_of[node] == 0) growing->frontier[at++] = node;
    return taken;
}

/* The rows of the frontier behind those that are there; in a chain they take the place of the one before. */
static void add_rows(Growing *growing, int level, int nodes, const float *features, const int32_t *feature_rows) {
    float *const *buffers = growing->program->buffers;
    const size_t width = (size_t)growing->feature_width;
    for (int i = 0; i < nodes; i++) {
        const int node = growing->frontier[i], row = growing->num_rows + i;
        growing->row_of[node] = row;
        memcpy(buffers[growing->feature] + (size_t)row * width, features + (size_t)feature_rows[i] * width, width * sizeof(float));
        embed(growing, growing->tokens[node], buffers[growing->embedding] + (size_t)row * (size_t)growing->embedding_width);
        turn(growing, row, growing->wanted.base - 2 + level);
    }
    growing->num_rows += nodes;
}

/* Rows see their ancestors and themselves; a parent's row comes before those of its children. */
static void fill_mask(const Growing *growing) {
    const int rows = growing->num_rows;
    for (int node = 1; node < growing->num_nodes; node++) {
        const int row = growing->row_of[node], above = growing->parents[node] ? growing->row_of[growing->parents[node]] : -1;
        if (row < 0) continue;
        uint8_t *own = growing->masks + (size_t)row * (size_t)rows;
        if (above < 0)
            memset(own, 0, (size_t)rows);
        else
            memcpy(own, growing->masks + (size_t)above * (size_t)rows, (size_t)rows);
        own[row] = 1;
    }
}

/* One pass over `rows` rows, of which the last `nodes` are ranked. */
static void run_rows(Growing *growing, const Program *program, int level, int nodes, Range range) {
    Pass *pass = growing->pass;
    const Wanted *wanted = &growing->wanted;
    *growing->range = range;
    for (int i = 0; i < nodes; i++) growing->selected[i] = range.rows - nodes + i;
    pass->draws = NULL;
    if (wanted->temperature > 0.0f) {
        const uint64_t key = token_key(wanted->seed, wanted->sample_index, (uint64_t)(wanted->base + level));
        for (int i = 0; i < nodes; i++) growing->draws[i] = (Draw){key, wanted->temperature, 0};
        pass->draws = growing->draws;
    }
    pass->rows = range.rows;
    pass->selected_rows = nodes;
    paceline_run(program, pass);
    growing->num_passes++;
}

/* The pairs whose features are the target's; the last one is the root's. */
static void run_true(Growing *growing) {
    const Wanted *wanted = &growing->wanted;
    float *const *buffers = growing->true_program->buffers;
    const int rows = wanted->base - wanted->begin, inputs = growing->true_inputs;
    const size_t width = (size_t)growing->true_width;
    for (int row = 0; row < rows; row++) {
        for (int input = 0; input < inputs; input++)
            memcpy(buffers[growing->true_feature[input]] + (size_t)row * width, growing->features + (size_t)(row * inputs + input) * width,
                   width * sizeof(float));
        embed(growing, growing->token_ids[row], buffers[growing->true_embedding] + (size_t)row * (size_t)growing->embedding_width);
        turn(growing, row, wanted->begin - 1 + row);
    }
    run_rows(growing, growing->true_program, 0, 1, (Range){0, rows, wanted->begin, 0, -1, wanted->first_slot});
}

/* The pairs of the nodes that were expanded: a chain goes on behind its rows, a tree runs as a whole. */
static void run_level(Growing *growing, int level, int nodes) {
    const int is_chain = growing->width == 1, cached = growing->wanted.base + (is_chain ? level - 1 : 0);
    if (!is_chain) fill_mask(growing);
    run_rows(growing, growing->program, level, nodes, (Range){0, growing->num_rows, cached, 0, is_chain ? -1 : 0, growing->wanted.first_slot});
}

/* Level by level, until there is none to expand. */
static void grow_levels(Growing *growing) {
    const int rows = growing->wanted.base - growing->wanted.begin;
    const float *records = growing->true_program->buffers[growing->true_ranked];
    const float *features = growing->true_program->buffers[growing->true_feature_out] + (size_t)(rows - 1) * (size_t)growing->feature_width;
    for (int level = 1, nodes = 1;; level++) {
        const int first = growing->num_nodes;
        for (int i = 0; i < nodes; i++) guess(growing, growing->frontier[i], records + (size_t)i * (size_t)growing->record_floats);
        if (growing->num_nodes == first || level >= growing->depth) return;
        nodes = best_nodes(growing, first);
        for (int i = 0; i < nodes; i++) {
            const int node = growing->frontier[i], parent = growing->parents[node];
            if (growing->tokens[node] >= growing->num_embedded) return;
            growing->feature_rows[i] = parent && growing->width > 1 ? growing->row_of[parent] : 0;
        }
        if (growing->width == 1) growing->num_rows = 0;
        add_rows(growing, level, nodes, features, growing->feature_rows);
        run_level(growing, level, nodes);
        records = growing->program->buffers[growing->ranked];
        features = growing->program->buffers[growing->feature_out];
    }
}

/* A draft of `depth` levels. Found are the nodes of the tree, of a chain nothing but its tokens. */
void paceline_grow(Growing *growing) {
    const int most = 1 + growing->width + growing->width * growing->width * (growing->depth - 1);
    for (int node = 0; node < most; node++) growing->row_of[node] = -1;
    growing->num_nodes = 1;
    growing->reached[0] = 1.0;
    growing->num_rows = growing->num_passes = growing->frontier[0] = 0;
    run_true(growing);
    grow_levels(growing);
    if (growing->width > 1) {
        choose_tree(&growing->choice, &growing->wanted);
        return;
    }
    growing->choice.found[0] = growing->num_nodes;
    memcpy(growing->choice.found + 1, growing->tokens, (size_t)growing->num_nodes * sizeof(int32_t));
}
