/* Weighted sums of the pages of a file, from which models/storage/page_sums.py makes a checksum. */
#include <stdint.h>
#include <string.h>

enum { PAGE_WORDS = 1024, LANES = 8 };

typedef uint32_t words8 __attribute__((vector_size(32)));
typedef uint64_t longs8 __attribute__((vector_size(64)));

/* Set sums[page] to the sum over i of word i of the page times factors[i], modulo 2^64. Words are 32 bits, little-endian. */
void paceline_page_sums(const uint8_t *pages, int64_t num_pages, const uint64_t *factors, uint64_t *sums) {
    for (int64_t page = 0; page < num_pages; page++, pages += PAGE_WORDS * sizeof(uint32_t)) {
        longs8 lanes = {0};
        for (int i = 0; i < PAGE_WORDS; i += LANES) {
            words8 words;
            longs8 page_factors;
            memcpy(&words, pages + (size_t)i * sizeof(uint32_t), sizeof words);
            memcpy(&page_factors, factors + i, sizeof page_factors);
            lanes += __builtin_convertvector(words, longs8) * page_factors;
        }
        uint64_t sum = 0;
        for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
        sums[page] = sum;
    }
}
