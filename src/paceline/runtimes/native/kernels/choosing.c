/* Choosing a draft tree among guesses: best first by probability per row it adds to the target's pass. speculation/tree_growth.py is the law;
 * here is the same for guesses that are known beforehand, and a test holds the two together. */
#include "native.h"

#include <limits.h>
#include <string.h>

enum { MASK, PATHS, CHAIN }; /* layouts of a tree */

typedef struct Waiting {
    double worth, reached; /* probability per row, -1 once it is taken or too dear; probability of the whole path */
    int32_t parent, guess;
} Waiting;

/* Nodes in the order they are taken, each a column of `Choice.nodes`. */
typedef struct {
    int32_t *tokens, *parents, *depths, *has_child, *order;
    int count;
} Taken;

/* Rows that one more child of `parent` adds. */
static int added_rows(const Taken *taken, int parent, int layout) {
    if (!taken->has_child[parent] || layout == MASK) return 1;
    return layout == PATHS ? taken->depths[parent] + 2 : INT_MAX; /* with paths the child's whole path, from the root on */
}

static int take(Taken *taken, int parent, int token) {
    const int node = taken->count++;
    taken->tokens[node] = token;
    taken->parents[node] = parent;
    taken->depths[node] = parent < 0 ? 0 : taken->depths[parent] + 1;
    taken->has_child[node] = 0;
    if (parent >= 0) taken->has_child[parent] = 1;
    return node;
}

/* The one that is worth most, the first one on ties; NULL where none is left. */
static Waiting *most_worthy(Waiting *queue, int count) {
    Waiting *best = NULL;
    for (Waiting *one = queue; one < queue + count; one++)
        if (one->worth >= 0.0 && (!best || one->worth > best->worth)) best = one;
    return best;
}

/* Breadth-first, siblings in the order they were taken. */
static void write_tree(const Taken *taken, int32_t *found) {
    const int count = taken->count;
    int32_t *tokens = found + 1, *parents = tokens + count, *depths = parents + count;
    found[0] = count;
    int written = 0;
    for (int place = -1; place < written; place++) {
        const int above = place < 0 ? -1 : taken->order[place];
        for (int node = 0; node < count; node++) {
            if (taken->parents[node] != above) continue;
            taken->order[written] = node;
            tokens[written] = taken->tokens[node];
            parents[written] = place;
            depths[written++] = taken->depths[node];
        }
    }
}

/* The tree, into `choice->found`. Returns how many contexts, in ascending order of their numbers, were asked about or passed over. */
int choose_tree(const Choice *choice, const Wanted *wanted) {
    const int rows = wanted->row_budget;
    Taken taken = {choice->nodes, choice->nodes + rows, choice->nodes + 2 * rows, choice->nodes + 3 * rows, choice->nodes + 4 * rows, 0};
    int left = rows - 1, context = 0, node = take(&taken, -1, -1), waiting = 0, asked = 0, is_open = wanted->most_depth > 0;
    double reached = 1.0;
    while (left > 0) {
        if (is_open) {
            asked = context >= asked ? context + 1 : asked;
            for (int guess = choice->first[context]; guess < choice->end[context]; guess++) {
                const double prob = reached * choice->probs[guess];
                if (prob > 0.0) choice->queue[waiting++] = (Waiting){prob, prob, node, guess};
            }
        }
        Waiting *best = most_worthy(choice->queue, waiting);
        if (!best) break;
        is_open = 0;
        const int added = added_rows(&taken, best->parent, wanted->layout);
        if (added > left) { /* it will never cost less */
            best->worth = -1.0;
            continue;
        }
        if (best->worth > best->reached / added) { /* a sibling was taken since */
            best->worth = best->reached / added;
            continue;
        }
        best->worth = -1.0;
        node = take(&taken, best->parent, choice->tokens[best->guess]);
        left -= added;
        reached = best->reached;
        context = choice->behind[best->guess];
        is_open = taken.depths[node] < wanted->most_depth;
    }
    write_tree(&taken, choice->found);
    return asked;
}
