/* Heads that guess several positions from one feature: their pass, the candidates of each, and the tree of them, without leaving the kernels.
 * What drafters/medusa does for any request is done here for one whose rows nothing but the temperature changes. */
#include "native.h"

#include <math.h>
#include <string.h>

void paceline_run(const Program *program, const Pass *pass);

/* Guesses at a depth, best first; of a drawn request the draw, then the others with what it leaves them. */
static void guess(const Heads *heads, int depth, const float *record) {
    const int count = heads->count, ranks = heads->wanted.ranks, is_drawn = heads->wanted.temperature > 0.0f;
    const float *scores = record + 2;
    const int32_t *ids = (const int32_t *)(scores + count), drawn = ((const int32_t *)record)[1];
    int32_t *tokens = heads->tokens + depth * count;
    double *probs = heads->probs + depth * count, own = 0.0, rest = 0.0;
    int listed = 0, kept = 0;
    heads->first[depth] = heads->end[depth] = depth * count;
    for (int rank = 0; rank < count; rank++) tokens[rank] = -1;
    if (!isfinite(record[0])) return;
    if (ranks == 1) {
        tokens[0] = is_drawn ? drawn : ids[0];
        probs[0] = 1.0;
        heads->end[depth]++;
        return;
    }
    if (is_drawn) tokens[kept++] = drawn;
    for (; listed < ranks && ids[listed] >= 0; listed++) {
        const double prob = exp((double)scores[listed] - (double)record[0]);
        if (is_drawn && (ids[listed] == drawn || kept == ranks)) continue;
        tokens[kept] = ids[listed];
        probs[kept++] = prob;
    }
    if (is_drawn) {
        int place = listed - 1; /* what is not listed is as likely as the last one that is */
        for (int rank = 0; rank < listed; rank++) place = ids[rank] == drawn ? rank : place;
        own = fmax(exp((double)scores[place] - (double)record[0]), heads->least[depth]);
        for (int rank = 1; rank < kept; rank++) rest += probs[rank];
        probs[0] = own;
        const double scale = rest > 0.0 ? fmin(1.0, (1.0 - own) / rest) : 0.0;
        for (int rank = 1; rank < kept; rank++) probs[rank] *= scale;
    }
    heads->end[depth] += kept;
}

/* The tree of one feature. */
void paceline_grow_heads(Heads *heads) {
    const Wanted *wanted = &heads->wanted;
    Pass *pass = heads->pass;
    float *const *buffers = heads->program->buffers;
    memcpy(buffers[heads->feature_in], heads->feature, (size_t)heads->width * sizeof(float));
    pass->draws = NULL;
    pass->rows = pass->selected_rows = 1;
    for (int depth = 0; depth < heads->heads && wanted->temperature > 0.0f; depth++) {
        const uint64_t key = token_key(wanted->seed, wanted->sample_index, (uint64_t)(wanted->base + depth));
        heads->draws[depth] = (Draw){key, wanted->temperature, 0};
        pass->draws = heads->draws;
    }
    paceline_run(heads->program, pass);
    if (heads->lm_head) {
        float *hidden = heads->lm_head->buffers[heads->hidden];
        for (int head = 0; head < heads->heads; head++)
            memcpy(hidden + (size_t)head * (size_t)heads->width, buffers[heads->outs[head]], (size_t)heads->width * sizeof(float));
        pass->rows = pass->selected_rows = heads->heads;
        paceline_run(heads->lm_head, pass);
    }
    for (int depth = 0; depth < heads->heads; depth++) {
        const size_t row = (size_t)depth * (size_t)heads->record_floats;
        guess(heads, depth, heads->lm_head ? heads->lm_head->buffers[heads->ranked] + row : buffers[heads->outs[depth]]);
    }
    heads->num_asked = choose_tree(&heads->choice, wanted);
}
