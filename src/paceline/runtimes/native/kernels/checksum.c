/* Sums of a file's pages, for checksums that depend on every byte and its position (models/storage/page_sums.py). */
#include <stdint.h>
#include <string.h>

enum { PAGE_WORDS = 1024, LANES = 8 };

typedef uint32_t words8 __attribute__((vector_size(32)));
typedef uint64_t longs8 __attribute__((vector_size(64)));

/* sums[page] = sum over i of word i of the page * factors[i], modulo 2^64; words are little-endian. */
void paceline_page_sums(const uint8_t *pages, int64_t num_pages, const uint64_t *factors, uint64_t *sums) {
    for (int64_t page = 0; page < num_pages; page++, pages += PAGE_WORDS * sizeof(uint32_t)) {
        longs8 lanes = {0};
        for (int i = 0; i < PAGE_WORDS; i += LANES) {
            words8 words;
            longs8 own;
            memcpy(&words, pages + (size_t)i * sizeof(uint32_t), sizeof words);
            memcpy(&own, factors + i, sizeof own);
            lanes += __builtin_convertvector(words, longs8) * own;
        }
        uint64_t sum = 0;
        for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
        sums[page] = sum;
    }
}
