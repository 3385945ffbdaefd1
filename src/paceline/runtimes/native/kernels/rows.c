/* Elementwise functions and norms of one row of a pass. Results do not depend on the other rows. */
#include "native.h"
#include "vectors.h"

#include <math.h>

/* out = x - mean(x). Return out. */
static const float *center_row(const float *x, int width, float *out) {
    floats sum = broadcast(0.0f);
    EACH_16(column, count, width) sum += load_part(x + column, count);
    const floats mean = broadcast(lane_sum(sum) / (float)width);
    EACH_16(column, count, width) store_part(out + column, load_part(x + column, count) - mean, count);
    return out;
}

/* RMS norm: out = x / sqrt(mean(x^2) + epsilon) * weight (NULL = 1). Layer norm: the same with x - mean(x) instead of x, plus a bias (NULL = 0). */
void norm_row(const NormOperation *op, const float *x, int head, float *out) {
    const int width = op->head_size, at = head % op->weighted_heads * width;
    if (op->is_centered) x = center_row(x, width, out);
    const floats scale = broadcast(1.0f / sqrtf(dot_product(x, x, width) / (float)width + op->epsilon));
    EACH_16(column, count, width) {
        floats v = load_part(x + column, count) * scale;
        if (op->weight) v *= load_part(op->weight + at + column, count);
        if (op->bias) v += load_part(op->bias + at + column, count);
        store_part(out + column, v, count);
    }
}

/* out = max(x - mean(x) - factor * std(x), 0), with the standard deviation of all values (not of a sample). */
void gaussian_top_k_row(const float *x, int width, float factor, float *out) {
    center_row(x, width, out);
    const floats threshold = broadcast(factor * sqrtf(dot_product(out, out, width) / (float)width));
    EACH_16(column, count, width) store_part(out + column, relu(load_part(out + column, count) - threshold), count);
}

/* out = x * rms(reference) / rms(x), with mean(x^2) at least 1e-5. */
void match_rms_row(const float *x, const float *reference, int width, float *out) {
    const float square = dot_product(x, x, width) / (float)width, target_rms = sqrtf(dot_product(reference, reference, width) / (float)width);
    scale_row(x, width, target_rms / sqrtf(square < 1e-5f ? 1e-5f : square), out);
}

/* Rotary embedding: rotate each pair of columns (i, i + half) by its angle; copy the columns after 2 * half. */
void rotate_head(const float *x, const float *cos, const float *sin, int head_size, int half, float *out) {
    EACH_16(i, count, half) {
        const floats first = load_part(x + i, count), second = load_part(x + half + i, count);
        const floats c = load_part(cos + i, count), s = load_part(sin + i, count);
        store_part(out + i, first * c - second * s, count);
        store_part(out + half + i, second * c + first * s, count);
    }
    memcpy(out + 2 * half, x + 2 * half, (size_t)(head_size - 2 * half) * sizeof(float));
}

/* Load `count` values, from `column` on, of a row whose values are each repeated for `group` columns; x has one value per group. */
INLINE floats load_grouped(const float *x, int column, int count, int group) {
    if (group == 1) return load_part(x + column, count);
    floats v = broadcast(x[column / group]);
    for (int lane = 1; lane < count && column / group < (column + count - 1) / group; lane++) v[lane] = x[(column + lane) / group];
    return v;
}

/* Compute columns [begin, end) of out = activation(x) * up; up NULL = 1. Clamped SwiGLU (gpt-oss) is (up + 1) x sigmoid(slope x), with x clamped
 * to <= limit and up to [-limit, limit]. */
void apply_gate(const GatedOperation *op, const float *x, const float *up, int begin, int end, float *out) {
    const floats limit = broadcast(op->limit), slope = broadcast(op->slope);
    for (int column = begin, count; count = end - column < LANES ? end - column : LANES, column < end; column += LANES) {
        floats v = load_grouped(x, column, count, op->group), u = up ? load_part(up + column, count) : broadcast(1.0f);
        floats active;
        if (op->activation == SILU) active = v * sigmoid(v);
        else if (op->activation == GELU_TANH) {
            const floats inner = broadcast(0.7978845608028654f) * (v + broadcast(0.044715f) * v * v * v);
            active = broadcast(0.5f) * v * (broadcast(1.0f) + hyperbolic_tangent(inner));
        } else if (op->activation == SIGMOID_OF_GATE) active = sigmoid(v);
        else if (op->activation == GATE_ITSELF) active = v;
        else if (op->activation == RELU) active = relu(v);
        else if (op->activation == XIELU) { /* for x > 0 alpha_p x^2 + beta x, else alpha_n (e^min(x, eps) - 1 - x) + beta x */
            const words is_positive = (words)(v > broadcast(0.0f)), square = (words)(broadcast(op->alpha_p) * v * v);
            const floats curve = exponential(__builtin_elementwise_min(v, broadcast(op->eps))) - broadcast(1.0f) - v;
            active = (floats)((square & is_positive) | ((words)(broadcast(op->alpha_n) * curve) & ~is_positive)) + broadcast(op->beta) * v;
        } else {
            v = __builtin_elementwise_min(v, limit);
            u = __builtin_elementwise_min(__builtin_elementwise_max(u, -limit), limit) + broadcast(1.0f);
            active = v * sigmoid(slope * v);
        }
        store_part(out + column, active * u, count);
    }
}

void add_row(const float *x, const float *y, int width, float *out) {
    EACH_16(column, count, width) store_part(out + column, load_part(x + column, count) + load_part(y + column, count), count);
}

void scale_row(const float *x, int width, float factor, float *out) {
    EACH_16(column, count, width) store_part(out + column, load_part(x + column, count) * broadcast(factor), count);
}

void add_scaled_row(const float *x, int width, float factor, float *sum) {
    EACH_16(column, count, width)
        store_part(sum + column, fmadd(load_part(x + column, count), broadcast(factor), load_part(sum + column, count)), count);
}

/* Copy columns [begin, begin + count) of the concatenation [x, y]; x has `width` columns. */
void concat_columns(const float *x, int width, const float *y, int begin, int count, float *out) {
    const int left = begin >= width ? 0 : width - begin < count ? width - begin : count;
    if (left) memcpy(out, x + begin, (size_t)left * sizeof(float));
    if (left < count) memcpy(out + left, y + (begin + left - width), (size_t)(count - left) * sizeof(float));
}

/* Compute columns [begin, begin + count) of a row of BlockConvolutionOperation. x: the row; `earlier`: number of rows before it in its range; rows
 * before the range count as zeros. */
void block_convolve_row(const BlockConvolutionOperation *op, const float *x, const float *added, int earlier, int begin, int count, float *out) {
    const int taps = op->kernel_size <= earlier ? op->kernel_size : earlier + 1, groups = op->width / op->group;
    EACH_16(column, part, count) {
        const int first = begin + column;
        floats sum = broadcast(0.0f);
        for (int tap = 0; tap < taps; tap++) {
            floats weight = load_grouped(added + tap * groups, first, part, op->group);
            weight += load_part(op->base + (size_t)tap * (size_t)op->width + first, part);
            sum = fmadd(weight, load_part(x - (size_t)tap * (size_t)op->width + first, part), sum);
        }
        store_part(out + first, sum, part);
    }
}

/* out = cap * tanh(x / cap). */
void soft_cap_row(const float *x, int width, float cap, float *out) {
    EACH_16(column, count, width)
        store_part(out + column, broadcast(cap) * hyperbolic_tangent(load_part(x + column, count) / broadcast(cap)), count);
}
