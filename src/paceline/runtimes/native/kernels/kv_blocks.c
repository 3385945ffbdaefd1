/* Write keys and values to the cache, in the layout of kv_blocks.h. */
#include "kv_blocks.h"

/* Round `count` floats (at most 16) to bfloat16, padded with zeros. */
static void round_columns_to_bf16(const float *x, int count, uint32_t *bits) {
    const words rounded = (words)round_to_bf16(load_part(x, count)) >> 16;
    memcpy(bits, &rounded, sizeof rounded);
}

static void write_keys(uint8_t *head_block, int kind, int slot, const float *k, int size) {
    if (kind == KV_F32)
        for (int i = 0; i < size; i++) ((float *)head_block)[i * BLOCK_SLOTS + slot] = k[i];
    else if (kind == KV_F16)
        for (int i = 0; i < size; i++) ((_Float16 *)head_block)[i * BLOCK_SLOTS + slot] = (_Float16)k[i];
    else if (kind == KV_BF16)
        EACH_16(column, count, size) {
            uint32_t bits[LANES];
            round_columns_to_bf16(k + column, count, bits);
            for (int i = 0; i < count + count % 2; i++) ((uint16_t *)head_block)[(column + i) / 2 * 2 * BLOCK_SLOTS + 2 * slot + i % 2] = (uint16_t)bits[i];
        }
    else {
        const float scale = ((float *)(head_block + BLOCK_SLOTS * padded_columns(size)))[slot] = int8_row_scale(k, size);
        EACH_16(column, count, size) {
            const ints codes = to_int8_codes(k + column, count, scale);
            for (int i = 0; i < LANES; i++) ((int8_t *)head_block)[(column + i) / 4 * 4 * BLOCK_SLOTS + 4 * slot + i % 4] = (int8_t)codes[i];
        }
    }
}

static void write_values(uint8_t *head_block, int kind, int slot, const float *v, int size) {
    const size_t padded = (size_t)padded_columns(size), at = (size_t)slot * padded;
    if (kind == KV_F32) memcpy((float *)head_block + at, v, (size_t)size * sizeof(float));
    else if (kind == KV_F16)
        for (int i = 0; i < size; i++) ((_Float16 *)head_block)[at + (size_t)i] = (_Float16)v[i];
    else if (kind == KV_BF16)
        EACH_16(column, count, size) {
            uint32_t bits[LANES];
            round_columns_to_bf16(v + column, count, bits);
            for (int i = 0; i < count; i++)
                ((uint16_t *)head_block)[(size_t)(slot / 2) * 2 * padded + (size_t)(2 * (column + i) + slot % 2)] = (uint16_t)bits[i];
        }
    else {
        const float scale = ((float *)(head_block + BLOCK_SLOTS * padded))[slot] = int8_row_scale(v, size);
        EACH_16(column, count, size) {
            const signed_bytes codes = __builtin_convertvector(to_int8_codes(v + column, count, scale), signed_bytes);
            memcpy(head_block + at + column, &codes, sizeof codes);
        }
    }
}

/* Write the keys and values of one row, [kv_heads * head_size] each, to its cache slot. */
void write_kv(const Program *program, const Pass *pass, const AttentionOperation *op, int row) {
    const Range *range = pass->ranges + pass->range_of_row[row];
    const size_t size = (size_t)op->head_size, begin = (size_t)row * (size_t)op->kv_heads * size;
    const float *k = program->buffers[op->k] + begin, *v = program->buffers[op->v] + begin;
    const int slot = range->cached_len + row - range->start;
    const size_t block = (size_t)block_table_of(pass, op, range)[slot / BLOCK_SLOTS] * block_bytes(program, op);
    for (int head = 0; head < op->kv_heads; head++) {
        if (!op->latent_size)
            write_keys(first_head_block(program, op, 0, head) + block, program->kv_kind, slot % BLOCK_SLOTS, k + (size_t)head * size, op->head_size);
        write_values(first_head_block(program, op, 1, head) + block, program->kv_kind, slot % BLOCK_SLOTS, v + (size_t)head * size, op->head_size);
    }
}

int64_t paceline_head_block_bytes(int32_t kind, int32_t head_size) { return (int64_t)head_block_bytes(kind, head_size); }
