/* Write keys and values to the cache (kv_blocks.h has the layout). */
#include "kv_blocks.h"
#include "row_codes.h"

/* Round up to 16 floats to bfloat16, padded with zeros. */
static void round_columns(const float *x, int count, uint32_t *bits) {
    const words rounded = (words)round_to_bf16(load_part(x, count)) >> 16;
    memcpy(bits, &rounded, sizeof rounded);
}

static void write_keys(uint8_t *unit, int kind, int slot, const float *k, int size) {
    if (kind == KV_F32)
        for (int i = 0; i < size; i++) ((float *)unit)[i * SLOTS + slot] = k[i];
    else if (kind == KV_F16)
        for (int i = 0; i < size; i++) ((_Float16 *)unit)[i * SLOTS + slot] = (_Float16)k[i];
    else if (kind == KV_BF16)
        EACH_16(column, count, size) {
            uint32_t bits[LANES];
            round_columns(k + column, count, bits);
            for (int i = 0; i < count + count % 2; i++) ((uint16_t *)unit)[(column + i) / 2 * 2 * SLOTS + 2 * slot + i % 2] = (uint16_t)bits[i];
        }
    else {
        const float scale = ((float *)(unit + SLOTS * padded_columns(size)))[slot] = scale_of_row(k, size);
        EACH_16(column, count, size) {
            const ints codes = codes_of(k + column, count, scale);
            for (int i = 0; i < LANES; i++) ((int8_t *)unit)[(column + i) / 4 * 4 * SLOTS + 4 * slot + i % 4] = (int8_t)codes[i];
        }
    }
}

static void write_values(uint8_t *unit, int kind, int slot, const float *v, int size) {
    const size_t padded = (size_t)padded_columns(size), at = (size_t)slot * padded;
    if (kind == KV_F32)
        memcpy((float *)unit + at, v, (size_t)size * sizeof(float));
    else if (kind == KV_F16)
        for (int i = 0; i < size; i++) ((_Float16 *)unit)[at + (size_t)i] = (_Float16)v[i];
    else if (kind == KV_BF16)
        EACH_16(column, count, size) {
            uint32_t bits[LANES];
            round_columns(v + column, count, bits);
            for (int i = 0; i < count; i++)
                ((uint16_t *)unit)[(size_t)(slot / 2) * 2 * padded + (size_t)(2 * (column + i) + slot % 2)] = (uint16_t)bits[i];
        }
    else {
        const float scale = ((float *)(unit + SLOTS * padded))[slot] = scale_of_row(v, size);
        EACH_16(column, count, size) {
            const signed_bytes codes = __builtin_convertvector(codes_of(v + column, count, scale), signed_bytes);
            memcpy(unit + at + column, &codes, sizeof codes);
        }
    }
}

/* Write one row's k and v [kv_heads * head_size] to its slot. */
void write_kv(const Program *program, const Pass *pass, const AttentionOperation *own, int row) {
    const Range *range = pass->ranges + pass->range_of_row[row];
    const size_t size = (size_t)own->head_size, begin = (size_t)row * (size_t)own->kv_heads * size;
    const float *k = program->buffers[own->k] + begin, *v = program->buffers[own->v] + begin;
    const int slot = range->cached_len + row - range->start;
    const size_t block = (size_t)table_of(pass, own, range)[slot / SLOTS] * block_bytes(program, own);
    for (int head = 0; head < own->kv_heads; head++) {
        write_keys(kv_base(program, own, 0, head) + block, program->kv_kind, slot % SLOTS, k + (size_t)head * size, own->head_size);
        write_values(kv_base(program, own, 1, head) + block, program->kv_kind, slot % SLOTS, v + (size_t)head * size, own->head_size);
    }
}

/* Return the bytes of a unit: the keys, or the values, of one block and head. */
int64_t paceline_kv_unit_bytes(int32_t kind, int32_t head_size) { return (int64_t)unit_bytes(kind, head_size); }
