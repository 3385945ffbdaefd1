/* Records shared with runtimes/native/records.py (ctypes), and functions shared by the files of this folder. */
#ifndef PACELINE_NATIVE_H
#define PACELINE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define KERNELS_VERSION 20 /* increased whenever a record, a code or a function changes; VERSION in runtimes/native/records.py is equal */

/* Rows of a block, which share the loaded and decoded weights: as many as keep their sums in registers. */
#ifdef __AVX512F__
#define MAX_ROWS 8
#else
#define MAX_ROWS 4
#endif

/* How a matrix is stored: row by row as floats or 8-bit codes, or in panels (panels.h; K-quants: k_quants.h), for rows rounded to bytes. MINIMUM:
 * a minimum for each group. TABLE: codes index 16 values. FLOAT16: the scales are float16. */
enum {
    F32, F16, BF16, U8, U8_MINIMUM,
    PANELS_8_BITS, PANELS_8_BITS_MINIMUM, PANELS_4_BITS, PANELS_4_BITS_MINIMUM, PANELS_4_BITS_TABLE, PANELS_4_BITS_FLOAT16,
    PANELS_4_BITS_TABLE_FLOAT16,
    PANELS_Q4_K, PANELS_Q5_K, PANELS_Q6_K, PANELS_Q2_K, PANELS_Q3_K, PANELS_IQ4_XS,
};
#define SUPER_BLOCK 256
#define MAX_GROUP 256 /* columns of a group */

/* A weight matrix W [outputs, columns]. */
typedef struct {
    int32_t kind, outputs, columns, group, zero_point, out; /* group: columns that share a scale; out: buffer of the result */
    int32_t block;     /* of K-quants: columns that share float16 scales, 256 or 128; else 0 */
    int64_t row_bytes; /* bytes of a row (one output), or of a panel (16 outputs) */
    const uint8_t *codes;
    const float *scales, *minimums; /* [outputs, columns / group] */
    const float *bias;              /* [outputs] or NULL */
    const int8_t *table;            /* the 16 values that the codes of a TABLE kind index; plus zero_point they are unsigned */
} Matrix;

/* A K-quant matrix stored row by row, from which panels are filled. */
typedef struct {
    int32_t kind, outputs, columns, block, zero_point; /* zero_point: makes the codes unsigned */
    int64_t row_bytes;
    const uint8_t *codes;                      /* [outputs, columns]: 4 bits in runs of 32, or bytes */
    const uint16_t *scales, *minimums;         /* [outputs, columns / block] float16; Q6_K has no minimums */
    const uint8_t *factors, *minimum_factors;  /* [outputs, columns / group] */
} SuperBlocks;

/* A matrix in GGUF blocks, from which panels are filled (gguf_blocks.c). */
typedef struct {
    int32_t type, kind; /* GGUF's type number; the kind of the panels */
    int32_t outputs, columns, zero_point;
    int32_t block;      /* as in `Matrix`; 0 = every group's scale is stored as float */
    int32_t flipped;    /* see paceline_fill_panels */
    int64_t row_bytes;
    const uint8_t *rows;
    const int64_t *order;  /* [outputs] the stored row of each; NULL = the same order */
    const int32_t *places; /* [columns / 32] the place of each stored run of 32 columns; NULL = the same order */
} Blocks;

enum {
    LINEAR, NORM, ROPE, ATTENTION, GATED, ADD, GATHER, SOFT_CAP, CONCAT, SILU_RESIDUAL, RANK, SCALE, COLUMNS, ROUTE, EXPERTS, COMBINE,
    SIGMOID_GATE, CONVOLUTION, STATE,
};
enum { SILU, GELU_TANH, CLAMPED_SWIGLU, SIGMOID_OF_GATE, GATE_ITSELF, RELU };
enum { SOFTMAX, SIGMOID }; /* how a router's logits become scores */
/* How the input rows of a product are stored: float32, rounded to bfloat16 (all its matrices are BF16), or rounded to bytes (all its matrices are
 * panels with the same groups and zero point). */
enum { AS_FLOATS, AS_BF16, AS_BYTES };
/* The rows an operation works on: all of the pass, or those whose logits are computed, which GATHER copies to consecutive rows. */
enum { ALL_ROWS, LOGITS_ROWS };

/* The head of every operation. x, y, q, k, v and out are buffer numbers. */
typedef struct {
    int32_t code, out; /* the matrices of LINEAR and EXPERTS have their own `out` */
    int32_t rows;
} Operation;

typedef struct {
    Operation head;
    int32_t x, num_matrices, packing;
    int32_t site;           /* index of this operation among those that adapters can change; -1 = adapters do not change it */
    int32_t block_max;      /* buffer for the maximum of each BLOCK_COLUMNS results of a row, NaN if one is; -1 = not kept */
    const Matrix *matrices; /* [num_matrices] with equal numbers of columns */
} LinearOperation;

typedef struct {
    Operation head;
    int32_t x, heads, head_size; /* 1 head = the whole row */
    float epsilon;
    int32_t weighted_heads; /* heads with a weight of their own; the weights repeat after them */
    const float *weight;    /* [weighted_heads, head_size]; NULL = none */
} NormOperation;

typedef struct {
    Operation head;
    int32_t x, heads, head_size;
    int32_t rotary_half, table; /* number of rotated pairs per head; index of the table of angles */
} RopeOperation;

typedef struct {
    Operation head;
    int32_t q, k, v, heads, kv_heads, head_size; /* k = v = -1: another operation has written the rows; q = -1: they are only written */
    int32_t layer;  /* layer of the KV cache */
    int32_t tables; /* index of the set of block tables in the pass */
    int32_t window; /* rows of the sliding window; 0 = none */
    int32_t is_causal; /* 1 = attention is causal, and the masks of ranges are ignored */
    float scale, soft_cap; /* 0 = none */
    const float *sinks;    /* [heads] the score of a key without a value that every row attends to; NULL = none */
} AttentionOperation;

typedef struct {
    Operation head;
    int32_t x, up, width, activation;
    float slope, limit; /* of CLAMPED_SWIGLU */
} GatedOperation;

typedef struct {
    Operation head;
    int32_t x, y, width;
} AddOperation, SiluResidualOperation;

typedef struct {
    Operation head;
    int32_t x, width;
} GatherOperation;

typedef struct {
    Operation head;
    int32_t x, width;
    float cap;
} SoftCapOperation;

typedef struct {
    Operation head;
    int32_t x, width;
    float factor;
} ScaleOperation;

typedef struct {
    Operation head;
    int32_t x, y, x_width, y_width;
} ConcatOperation;

/* Choose the experts of every row from the router's logits x [rows, experts]. The result is `Routes`. */
typedef struct {
    Operation head;
    int32_t x, experts, chosen, scoring;
    int32_t groups, chosen_groups; /* experts are chosen from the groups with the largest sums of their two best scores */
    int32_t is_normalized;         /* weights are divided by their sum + epsilon */
    float epsilon, factor;         /* factor: multiplies all expert weights */
    const float *correction;       /* [experts] added to scores for comparison only; NULL = none */
    const float *scales;           /* [experts] factor of each expert's weight; NULL = none */
} RouteOperation;

/* Products with the matrices of the chosen experts; each is read once. */
typedef struct {
    Operation head;
    int32_t x, routes, chosen, experts, num_matrices, packing;
    int32_t of_pairs;       /* 1 = x has a row for each pair of a row and an expert, in the order of pairs; 0 = a row for each row of the pass */
    int32_t site;           /* as in LinearOperation, of the first expert; the other experts follow */
    const Matrix *matrices; /* [num_matrices][experts] of the same columns; the results have a row for each pair */
} ExpertsOperation;

/* The weighted sum of each row's pairs, in the order of the experts. */
typedef struct {
    Operation head;
    int32_t x, routes, chosen, width;
} CombineOperation;

/* x * sigmoid(y), y one number a row. */
typedef struct {
    Operation head;
    int32_t x, y, width;
} SigmoidGateOperation;

/* A causal convolution of each channel over time; in a tree, each row follows its parent. */
#define MAX_KERNEL_SIZE 16
#define PIECE_CHANNELS 256
typedef struct {
    Operation head;
    int32_t x, channels, kernel_size, is_activated; /* by SiLU */
    int32_t conv_at, record_at;                     /* the layer's offsets in a state and in a record */
    const float *weight;                            /* [kernel_size, channels], the last row for the row itself */
    const float *bias;                              /* [channels]; NULL = none */
} ConvolutionOperation;

/* Recurrent matrices [heads][rows_of_state, columns]: a gated delta rule (queries, keys and values in x, a and b its gates), or else Mamba-2
 * (x, B and C in x, a its step sizes). */
typedef struct {
    Operation head;
    int32_t x, a, b, work; /* work: a buffer of `work_floats` a row */
    int32_t channels, heads, key_heads, rows_of_state, columns, block, is_delta;
    int32_t matrices_at, keys_at, work_floats; /* keys_at: in a record */
    float min_step, max_step;                  /* Mamba-2's limits of the step size dt */
    const float *decay, *bias, *skip;          /* [heads]; skip NULL = none */
} StateOperation;

/* The LoRA update of one product: up @ t plus a bias, where t are `rank` floats of down @ x from `first` on. */
typedef struct {
    int32_t kind, first, rank, unused;
    const uint8_t *up;   /* [outputs / 16, the last one padded][rank][16]; NULL = nothing */
    const float *bias;   /* [outputs]; NULL = none */
    const Matrix *replacement; /* whose product replaces this one; NULL = none */
} AdapterProduct;

/* The LoRA updates of the products of one operation. */
typedef struct {
    const Matrix *down;             /* [sum of ranks, columns] in panels (low_rank.c); NULL = none */
    const AdapterProduct *products; /* [num_matrices]; NULL = the adapter changes nothing here */
    const int32_t *scaling_columns; /* [sum of ranks] which of a row's scalings multiplies each rank; NULL = none */
} AdapterSite;

/* A LoRA adapter and the rows of the pass that use it. */
typedef struct {
    const AdapterSite *sites;   /* by the site of the operation */
    int32_t first[2], count[2]; /* its rows in `adapter_rows`: among all rows, and among rows of logits */
    const float *scalings;      /* [count[0]][num_scalings] of a mixture of adapters; NULL = none */
    int64_t num_scalings;
} PassAdapter;

/* Columns [begin, begin + width) of x. */
typedef struct {
    Operation head;
    int32_t x, x_width, begin, width;
} ColumnsOperation;

/* Summarise rows of logits: log-sum-exp, a sampled token and the top `count` of the first `columns`. */
typedef struct {
    Operation head;
    int32_t x, width;       /* floats of a whole row */
    int32_t number;         /* index of the ranking in the network */
    int32_t columns, count;
    const int32_t *target_ids; /* [columns, padded to a multiple of 16] the id of each column; NULL = its number */
} RankOperation;

/* How the token of a row is sampled: the key of its noise (sampling/noise.py); temperature 0 = not sampled. */
typedef struct {
    uint64_t key;
    float temperature;
    int32_t unused;
} Draw;

/* The sampling parameters of a request; temperature 0 = greedy. `columns`: vocabulary size. */
typedef struct {
    double top_p, min_p;
    float temperature;
    int32_t top_k, columns, unused;
} SampleOptions;

/* A path to sample: see paceline_sample_paths. */
typedef struct {
    const float *logits, *block_max; /* block_max: as LinearOperation computes it; NULL = unknown */
    int64_t stride, block_max_stride;
    const SampleOptions *options;
    const int32_t *tree; /* [2, num_nodes]: tokens, then parents; not read if there is one node */
    uint64_t seed, sample_index, position;
    int32_t *result; /* [2, num_nodes]: sampled tokens, then the nodes that hold them */
    int32_t num_nodes, num_tokens;
} SamplePath;

/* Rows [start, start + rows) of the pass: one path. `table` and `mask` are offsets of its block table and mask; mask < 0 = causal. Cached slots
 * before first_slot are not attended to. */
typedef struct {
    int32_t start, rows, cached_len, table, mask, first_slot;
} Range;

/* Recurrent states are stored after a multiple of this number of rows of their sequence. */
#define CHECKPOINT_INTERVAL 8
#define NO_NODE -1
#define IN_PLACE -1
#define NOWHERE -2

/* One step over a recurrent state: add the updates of a path, compute the rows that extend it, save it. */
typedef struct {
    int32_t from;                /* a slot, or IN_PLACE = the stored state */
    int32_t to;                  /* where to keep the state after the path: a slot, IN_PLACE or NOWHERE */
    int32_t path;                /* -1 = none */
    int32_t first_row, num_rows; /* in `order`; at most CHECKPOINT_INTERVAL */
    int32_t first_save, num_saves;
} Step;

typedef struct {
    float *state;
    int64_t count; /* number of pending and new rows that the saved state includes */
} Save;

/* What the rows of a range do to the recurrent state of their sequence. */
typedef struct {
    float *state;   /* NULL = zeros */
    float *records; /* inputs of committed rows that the state does not include, `record_floats` each */
    const int32_t *pending; /* [num_pending] records of these rows; the first num_folded are added to the state in place */
    const int32_t *rows;    /* [rows] the record each row of the range writes; -1 = none */
    /* A node is a row of the range, or -2 - i for the pending row i. */
    const int32_t *parents;   /* of each row; -1 = the last pending row */
    const int32_t *order;     /* [rows], grouped by step */
    const int32_t *ancestors; /* [rows][CHECKPOINT_INTERVAL] earlier nodes of a row's path that its step's state lacks, then NO_NODE */
    const int32_t *paths;     /* [][CHECKPOINT_INTERVAL] nodes */
    const Step *steps;
    const Save *saves;
    int32_t *has_run; /* set to 1 after the pass */
    int64_t record_floats;
    int32_t num_pending, num_folded, num_steps, num_saves;
} StateRange;

typedef struct {
    int32_t rows, num_logits_rows, num_ranges;
    int32_t blocks_per_table_set; /* block tables come in sets, one for each pool of blocks, so far apart */
    const Range *ranges;
    const int32_t *range_of_row; /* [rows] */
    const int32_t *block_tables;
    const uint8_t *masks;
    const int32_t *logits_rows; /* [num_logits_rows] */
    const float *const *cos, *const *sin; /* of each table: [rows, rotary half] */
    const Draw *draws;         /* [rankings, ranked rows]; NULL = no sampling */
    const StateRange *states;  /* [num_ranges]; NULL = no recurrent layers */
    const PassAdapter *adapters; /* [num_adapters] */
    const int32_t *adapter_rows;
    const int32_t *row_order;      /* [rows] grouped by adapter; only for networks with experts, as the next one */
    const int32_t *adapter_of_row; /* [rows] index in `adapters`; -1 = none */
    float *low_rank; /* [rows of adapters, or pairs of a row and an expert][low_rank_floats]: down @ x */
    int32_t num_adapters, low_rank_floats;
} Pass;

typedef struct {
    const Operation *const *operations;
    int32_t num_operations, num_threads;
    float *const *buffers;
    float *packed;         /* packed_floats(rows, max_columns) */
    float *packed_rows;    /* per thread: packed_floats(1, max_columns) */
    float *const *scratch; /* per thread: paceline_attention_floats */
    uint8_t *const *kv_storage; /* keys, then values of each layer, see kv_blocks.h */
    float *split_results;  /* of attention over splits of long contexts; not used if too small */
    int64_t split_results_floats;
    int32_t kv_kind, max_columns; /* kv_kind: type of keys and values */
    int32_t *tickets; /* [PHASES * num_operations] */
    int64_t *claims;  /* [num_threads][claims_per_thread], see work.h */
    int64_t claims_per_thread;
    float *state_scratch; /* per thread: state_floats */
    int64_t state_floats;
} Program;

int tile_rows(int rows);
size_t packed_floats(int rows, int columns);
size_t packed_row(const Matrix *matrix, int packing);
void pack_rows(const Matrix *matrix, const float *x, const int32_t *numbers, int rows, int packing, int block, int begin, int end, float *packed);
void multiply(const Matrix *matrix, int begin, int end, int packing, const float *packed, float *y, int rows);

size_t packed_bytes_words(const Matrix *matrix);
void pack_bytes(const Matrix *matrix, const float *x, const int32_t *numbers, int first, int real, int padded, int begin, int end, float *packed);
void multiply_bytes(const Matrix *matrix, int begin, int end, const float *packed, float *y, int rows);

void paceline_fill_panels(const Matrix *from, int32_t kind, int32_t flipped, int32_t begin, int32_t end, uint8_t *to);
void paceline_fill_super_blocks(const SuperBlocks *from, int32_t begin, int32_t end, uint8_t *to);

void norm_row(const float *x, const float *weight, int width, float epsilon, float *out);
void rotate_head(const float *x, const float *cos, const float *sin, int head_size, int half, float *out);
void gate(const GatedOperation *gated, const float *x, const float *up, int width, float *out);
void add(const float *x, const float *y, int width, float *out);
void soft_cap(const float *x, int width, float cap, float *out);
void scale(const float *x, int width, float factor, float *out);
void add_scaled(const float *x, int width, float factor, float *sum);
float sigmoid_of(float x);
void add_silu(const float *x, const float *y, int width, float *out);
void join(const float *x, int width, const float *y, int begin, int count, float *out);

/* The result of ROUTE in its buffer. A pair is a row and one of its experts; pairs are ordered by expert, then by the row's adapter, then by row. */
typedef struct {
    int32_t *experts;    /* [rows][chosen], ascending */
    float *weights;      /* [rows][chosen] */
    int32_t *places;     /* [rows][chosen] the index of each pair */
    int32_t *rows;       /* [pairs] the row of each */
    int32_t *num_active; /* number of experts with any row */
    struct Active {
        int32_t expert, first, count; /* its pairs are [first, first + count) */
        int32_t packed;               /* packed rows before its own */
    } *active; /* [num_active] */
} Routes;

Routes routes_of(float *buffer, int rows, int chosen);
void choose_experts(const RouteOperation *own, const float *logits, int32_t *experts, float *weights);
void sort_pairs(const RouteOperation *own, const Routes *routes, const int32_t *order, int rows);

void convolve(const StateRange *range, const ConvolutionOperation *own, int rows, int channel, int count, const float *x, float *out);
void prepare_gates(const StateOperation *own, const float *a, const float *b, float *work, float *record);
void prepare_keys(const StateRange *range, const StateOperation *own, int rows, int head, const float *x, float *work);
const float *prefetch_state_block(const StateRange *range, const StateOperation *own, int rows, int number, const float *x, float *out);
void run_state_block(const StateRange *range, const StateOperation *own, int rows, int number, const float *next, const float *x, float *work,
                     float *out, float *scratch);

#define PIECE_COLUMNS 4096
int pieces_of(int columns);
int32_t paceline_ranking_floats(int32_t columns, int32_t count);
void rank_piece(const RankOperation *ranking, const Draw *draw, const float *row, int number, float *out);
void join_pieces(const RankOperation *ranking, float *out);

void write_kv(const Program *program, const Pass *pass, const AttentionOperation *own, int row);

#endif
