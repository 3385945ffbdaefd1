/* Run a recorded pass with kernels for another system: memory as it was recorded, each pointer moved to where its target is here.
 *
 * Reads `record` and writes `result` in the working directory. The record: number of regions, addresses of the program and of the pass; then of
 * each region its address, its size and its bytes. The result: the bytes of all regions after the pass. */
#include <stddef.h>
#include <stdint.h>

typedef void Run(const void *program, const void *pass);

#ifdef _WIN32 /* calls Windows itself only: compiling a C library for it takes minutes. Its header comes with that library. */
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

static void *open_record(void) { return CreateFileA("record", GENERIC_READ, 0, NULL, OPEN_EXISTING, 0, NULL); }
static void *open_result(void) { return CreateFileA("result", GENERIC_WRITE, 0, NULL, CREATE_ALWAYS, 0, NULL); }
static uint8_t *allocate(uint64_t size) { return VirtualAlloc(NULL, size, COMMIT_AND_RESERVE, PAGE_READWRITE); }

static int read_all(void *file, void *to, uint64_t size) {
    uint32_t done = 0;
    return ReadFile(file, to, (uint32_t)size, &done, NULL) && done == size;
}

static int write_all(void *file, const void *from, uint64_t size) {
    uint32_t done = 0;
    return WriteFile(file, from, (uint32_t)size, &done, NULL) && done == size;
}

static Run *find_run(void) {
    void *library = LoadLibraryA("kernels.dll");
    return library ? (Run *)GetProcAddress(library, "paceline_run") : NULL;
}
#else /* linked with the kernels */
#include <stdio.h>
#include <stdlib.h>

Run paceline_run;
static void *open_record(void) { return fopen("record", "rb"); }
static void *open_result(void) { return fopen("result", "wb"); }
static uint8_t *allocate(uint64_t size) { return aligned_alloc(64, (size + 63) / 64 * 64); }
static int read_all(void *file, void *to, uint64_t size) { return fread(to, 1, size, file) == size; }
static int write_all(void *file, const void *from, uint64_t size) { return fwrite(from, 1, size, file) == size; }
static Run *find_run(void) { return paceline_run; }
#endif

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

static int run_it(void) {
    void *record = open_record(), *result = open_result();
    if (!read_all(record, head, sizeof head) || head[0] > 4096) return 2;
    for (uint64_t i = 0; i < head[0]; i++) {
        Region *region = regions + i;
        if (!read_all(record, region, 16)) return 3;
        region->bytes = allocate(region->size + 64) + region->address % 64;
        if (!read_all(record, region->bytes, region->size)) return 4;
    }
    for (uint64_t i = 0; i < head[0]; i++)
        for (uint64_t at = -regions[i].address % 8; at + 8 <= regions[i].size; at += 8) {
            uint64_t *word = (uint64_t *)(regions[i].bytes + at);
            uint8_t *target = *word ? moved(*word) : NULL;
            if (target) *word = (uint64_t)target;
        }
    Run *run = find_run();
    if (!run) return 5;
    run(moved(head[1]), moved(head[2]));
    for (uint64_t i = 0; i < head[0]; i++)
        if (!write_all(result, regions[i].bytes, regions[i].size)) return 6;
    return 0;
}

#ifdef _WIN32
void wWinMainCRTStartup(void) { ExitProcess((uint32_t)run_it()); }
#else
int main(void) { return run_it(); }
#endif
