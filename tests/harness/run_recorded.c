/* Runs a recorded pass with kernels for Windows: memory as Linux had it, each pointer moved to where its target lies here.
 *
 * Reads `record` and writes `result` beside `kernels.dll` in the working directory. The record: number of regions, addresses of the
 * program and of the pass; then of each region its address, its size and its bytes. The result: the bytes of all regions behind the pass.
 * Only Windows itself is called: compiling a C library for it takes minutes. */
#include <stddef.h>
#include <stdint.h>

/* windows.h comes with that library. */
#define GENERIC_READ 0x80000000u
#define GENERIC_WRITE 0x40000000u
enum { CREATE_ALWAYS = 2, OPEN_EXISTING = 3, COMMIT_AND_RESERVE = 0x3000, PAGE_READWRITE = 4 };
void *CreateFileA(const char *, uint32_t, uint32_t, void *, uint32_t, uint32_t, void *);
int ReadFile(void *, void *, uint32_t, uint32_t *, void *);
int WriteFile(void *, const void *, uint32_t, uint32_t *, void *);
void *VirtualAlloc(void *, size_t, uint32_t, uint32_t);
void *LoadLibraryA(const char *);
void *GetProcAddress(void *, const char *);
void ExitProcess(uint32_t);

typedef struct {
    uint64_t address, size;
    uint8_t *bytes;
} Region;

static Region regions[4096];
static uint64_t head[3];

static uint8_t *moved(uint64_t address) {
    for (uint64_t i = 0; i < head[0]; i++)
        if (address >= regions[i].address && address < regions[i].address + regions[i].size)
            return regions[i].bytes + (address - regions[i].address);
    return NULL;
}

static int read_all(void *file, void *to, uint64_t size) {
    uint32_t done = 0;
    return ReadFile(file, to, (uint32_t)size, &done, NULL) && done == size;
}

static int run_it(void) {
    void *record = CreateFileA("record", GENERIC_READ, 0, NULL, OPEN_EXISTING, 0, NULL);
    if (!read_all(record, head, sizeof head) || head[0] > 4096) return 2;
    for (uint64_t i = 0; i < head[0]; i++) {
        Region *region = regions + i;
        if (!read_all(record, region, 16)) return 3;
        region->bytes = (uint8_t *)VirtualAlloc(NULL, region->size + 64, COMMIT_AND_RESERVE, PAGE_READWRITE) + region->address % 64;
        if (!read_all(record, region->bytes, region->size)) return 4;
    }
    for (uint64_t i = 0; i < head[0]; i++)
        for (uint64_t at = -regions[i].address % 8; at + 8 <= regions[i].size; at += 8) {
            uint64_t *word = (uint64_t *)(regions[i].bytes + at);
            uint8_t *target = *word ? moved(*word) : NULL;
            if (target) *word = (uint64_t)target;
        }
    void *library = LoadLibraryA("kernels.dll");
    if (!library) return 5;
    void (*run)(const void *, const void *) = (void (*)(const void *, const void *))GetProcAddress(library, "paceline_run");
    if (!run) return 6;
    run(moved(head[1]), moved(head[2]));
    void *result = CreateFileA("result", GENERIC_WRITE, 0, NULL, CREATE_ALWAYS, 0, NULL);
    for (uint64_t i = 0; i < head[0]; i++) {
        uint32_t done = 0;
        if (!WriteFile(result, regions[i].bytes, (uint32_t)regions[i].size, &done, NULL)) return 7;
    }
    return 0;
}

void wWinMainCRTStartup(void) { ExitProcess((uint32_t)run_it()); }
