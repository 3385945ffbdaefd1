/* Rows of keys and values as the cache keeps them. */
#include "kv_blocks.h"
#include "bf16.h"

static uint16_t bf16_bits(float x) {
    const words bits = (words)round_to_bf16(broadcast(x));
    return (uint16_t)(bits[0] >> 16);
}

/* Codes of 8 bits, `stride` apart, and their scale: the largest value's code is 127. A row with a value that is not finite becomes not a number. */
static float codes_of(const float *x, int size, int8_t *codes, int stride) {
    float largest = 0.0f;
    int is_finite = 1;
    for (int i = 0; i < size; i++) {
        const float magnitude = __builtin_fabsf(x[i]);
        is_finite &= magnitude <= 3.40282347e38f;
        largest = magnitude > largest ? magnitude : largest;
    }
    const float scale = largest / 127.0f;
    for (int i = 0; i < size; i++) codes[i * stride] = is_finite && scale > 0.0f ? (int8_t)__builtin_roundevenf(x[i] / scale) : 0;
    return is_finite ? scale : __builtin_nanf("");
}

static void write_keys(uint8_t *unit, int kind, int slot, const float *k, int size) {
    if (kind == KV_F32)
        for (int i = 0; i < size; i++) ((float *)unit)[i * SLOTS + slot] = k[i];
    else if (kind == KV_F16)
        for (int i = 0; i < size; i++) ((_Float16 *)unit)[i * SLOTS + slot] = (_Float16)k[i];
    else if (kind == KV_BF16)
        for (int i = 0; i < size + size % 2; i++)
            ((uint16_t *)unit)[i / 2 * 2 * SLOTS + 2 * slot + i % 2] = i < size ? bf16_bits(k[i]) : 0;
    else
        ((float *)(unit + SLOTS * padded_columns(size)))[slot] = codes_of(k, size, (int8_t *)unit + slot, SLOTS);
}

static void write_values(uint8_t *unit, int kind, int slot, const float *v, int size) {
    const size_t padded = (size_t)padded_columns(size), at = (size_t)slot * padded;
    if (kind == KV_F32)
        memcpy((float *)unit + at, v, (size_t)size * sizeof(float));
    else if (kind == KV_F16)
        for (int i = 0; i < size; i++) ((_Float16 *)unit)[at + (size_t)i] = (_Float16)v[i];
    else if (kind == KV_BF16)
        for (int i = 0; i < size; i++) ((uint16_t *)unit)[(size_t)(slot / 2) * 2 * padded + (size_t)(2 * i + slot % 2)] = bf16_bits(v[i]);
    else
        ((float *)(unit + SLOTS * padded))[slot] = codes_of(v, size, (int8_t *)unit + at, 1);
}

/* Write one row's k and v [kv_heads * head_size] to its slot. */
void write_kv(const Program *program, const Pass *pass, const AttentionOperation *own, int row) {
    const Range *range = pass->ranges + pass->range_of_row[row];
    const size_t size = (size_t)own->head_size, begin = (size_t)row * (size_t)own->kv_heads * size;
    const float *k = program->buffers[own->k] + begin, *v = program->buffers[own->v] + begin;
    const int slot = range->cached_len + row - range->start;
    const size_t block = (size_t)table_of(pass, own, range)[slot / SLOTS] * block_bytes(program, own);
    for (int head = 0; head < own->kv_heads; head++) {
        write_keys(side_of(program, own, 0, head) + block, program->kv_kind, slot % SLOTS, k + (size_t)head * size, own->head_size);
        write_values(side_of(program, own, 1, head) + block, program->kv_kind, slot % SLOTS, v + (size_t)head * size, own->head_size);
    }
}

/* Bytes of the keys, or of the values, of one block and head. */
int64_t paceline_kv_unit_bytes(int32_t kind, int32_t head_size) { return (int64_t)unit_bytes(kind, head_size); }
