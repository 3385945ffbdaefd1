/* Mixture of experts: choose the experts of each row from its own router logits only, and sort the (row, expert) pairs by expert (`Routes`). */
#include "native.h"
#include "vectors.h"

#define MAX_EXPERTS 1024

/* Return pointers into the buffer of a ROUTE result: four arrays with an element per pair, `num_active`, and the active experts. */
Routes routes_in_buffer(float *buffer, int rows, int experts_per_row) {
    const size_t pairs = (size_t)rows * (size_t)experts_per_row;
    int32_t *const ints = (int32_t *)buffer;
    return (Routes){ints, buffer + pairs, ints + 2 * pairs, ints + 3 * pairs, ints + 4 * pairs, (ActiveExpert *)(ints + 4 * pairs + 1)};
}

static int is_bit_set(const uint64_t *marked, int number) { return marked[number / 64] >> (number % 64) & 1; }
static void set_bit(uint64_t *marked, int number) { marked[number / 64] |= (uint64_t)1 << (number % 64); }

/* Return the index of the largest value in [begin, end) that is not marked; among equal values, the first. */
static int unmarked_argmax(const float *values, const uint64_t *marked, int begin, int end) {
    int best = -1;
    for (int i = begin; i < end; i++)
        if (!is_bit_set(marked, i) && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

/* Mark all experts outside the chosen groups, so that they are not chosen. */
static void exclude_groups(const RouteOperation *op, const float *selection_scores, uint64_t *marked) {
    const int size = op->num_experts / op->groups;
    float sums[MAX_EXPERTS];
    uint64_t groups[MAX_EXPERTS / 64] = {0};
    for (int group = 0; group < op->groups; group++) {
        uint64_t none[MAX_EXPERTS / 64] = {0};
        const int begin = group * size, first = unmarked_argmax(selection_scores, none, begin, begin + size);
        set_bit(none, first);
        const int second = op->scores_per_group < 2 ? -1 : unmarked_argmax(selection_scores, none, begin, begin + size);
        sums[group] = selection_scores[first] + (second < 0 ? 0.0f : selection_scores[second]);
    }
    for (int i = 0; i < op->chosen_groups; i++) set_bit(groups, unmarked_argmax(sums, groups, 0, op->groups));
    for (int expert = 0; expert < op->num_experts; expert++)
        if (!is_bit_set(groups, expert / size)) set_bit(marked, expert);
}

/* Replace each score by e^(score - largest score), the numerators of a softmax, and return their sum. */
static float exponentiate_scores(float *scores, int count) {
    float largest = scores[0], sum = 0.0f;
    for (int i = 1; i < count; i++) largest = scores[i] > largest ? scores[i] : largest;
    EACH_16(i, lanes, count) store_part(scores + i, exponential(load_part(scores + i, lanes) - broadcast(largest)), lanes);
    for (int i = 0; i < count; i++) sum += scores[i];
    return sum;
}

/* Choose the experts of one row, in ascending order, and compute their weights.
 * Source: Shazeer et al. 2017, section 2.1; groups and the correction: DeepSeek-V3 (2024), section 2.1.2. */
void choose_experts(const RouteOperation *op, const float *logits, int32_t *experts, float *weights) {
    const int count = op->num_experts;
    float scores[MAX_EXPERTS], corrected[MAX_EXPERTS], total = 1.0f;
    const float *selection_scores = scores;
    uint64_t marked[MAX_EXPERTS / 64] = {0};
    memcpy(scores, logits, (size_t)count * sizeof(float));
    if (op->scoring == SIGMOID) EACH_16(i, lanes, count) store_part(scores + i, sigmoid(load_part(logits + i, lanes)), lanes);
    if (op->correction) {
        if (op->scoring == SOFTMAX) total = exponentiate_scores(scores, count);
        for (int i = 0; i < count; i++) corrected[i] = scores[i] / total + op->correction[i];
        selection_scores = corrected;
    }
    if (op->groups > 1) exclude_groups(op, selection_scores, marked);
    for (int i = 0; i < op->experts_per_row; i++) {
        const int best = unmarked_argmax(selection_scores, marked, 0, count);
        set_bit(marked, best);
        int index = i;
        for (; index && experts[index - 1] > best; index--) experts[index] = experts[index - 1];
        experts[index] = best;
    }
    if (op->scoring == SOFTMAX && !op->correction) total = exponentiate_scores(scores, count);
    float sum = op->epsilon;
    if (op->is_normalized)
        for (int i = 0; i < op->experts_per_row; i++) sum += scores[experts[i]];
    else sum += total;
    for (int i = 0; i < op->experts_per_row; i++)
        weights[i] = scores[experts[i]] / sum * op->factor * (op->scales ? op->scales[experts[i]] : 1.0f);
}

/* Sort the pairs of all rows by expert. order: the order of rows within an expert, NULL = ascending. */
void sort_pairs(const RouteOperation *op, const Routes *routes, const int32_t *order, int rows) {
    const int pairs = rows * op->experts_per_row;
    int32_t next[MAX_EXPERTS] = {0};
    for (int pair = 0; pair < pairs; pair++) next[routes->experts[pair]]++;
    int first = 0, packed = 0, active = 0;
    for (int expert = 0; expert < op->num_experts; expert++) {
        const int count = next[expert];
        next[expert] = first;
        if (!count) continue;
        routes->active[active++] = (ActiveExpert){expert, first, count, packed};
        first += count;
        packed += count / MAX_ROWS * MAX_ROWS + padded_block_rows(count % MAX_ROWS);
    }
    *routes->num_active = active;
    for (int i = 0; i < rows; i++) {
        const int row = order ? order[i] : i, first_pair = row * op->experts_per_row;
        for (int pair = first_pair; pair < first_pair + op->experts_per_row; pair++) {
            const int place = next[routes->experts[pair]]++;
            routes->pair_indices[pair] = place;
            routes->rows[place] = row;
        }
    }
}
