/* Records that runtimes/native/records.py declares for ctypes, and functions that the files of this folder share. */
#ifndef PACELINE_NATIVE_H
#define PACELINE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define KERNELS_VERSION 28 /* VERSION in runtimes/native/records.py is equal; increase both when a record, an enum or a function changes */

/* Input rows that are multiplied together (a block of rows), so that each weight is loaded and decoded once for all of them. The maximum is set by
 * the registers that hold their sums. */
#ifdef __AVX512F__
#define MAX_ROWS 8
#else
#define MAX_ROWS 4
#endif

/* How a matrix is stored. The first five kinds are row by row, as floats or as 8-bit codes. PANELS kinds are in panels (panels.h; K-quants:
 * k_quants.h) and are multiplied with input rows rounded to 8 bits. MINIMUM: each group has a minimum. TABLE: a code is an index into a table of 16
 * values. FLOAT16: the scales are float16, not float32. */
enum {
    F32, F16, BF16, U8, U8_MINIMUM,
    PANELS_8_BITS, PANELS_8_BITS_MINIMUM, PANELS_4_BITS, PANELS_4_BITS_MINIMUM, PANELS_4_BITS_TABLE, PANELS_4_BITS_FLOAT16,
    PANELS_4_BITS_TABLE_FLOAT16,
    PANELS_Q4_K, PANELS_Q5_K, PANELS_Q6_K, PANELS_Q2_K, PANELS_Q3_K, PANELS_IQ4_XS,
};
#define SUPER_BLOCK 256 /* columns of a super-block of a K-quant */
#define MAX_GROUP 256   /* columns of a group */

/* A weight matrix W [outputs, columns]. */
typedef struct {
    int32_t kind, outputs, columns, group, zero_point, out; /* group: columns that share a scale; out: buffer of the result */
    int32_t scale_columns; /* of K-quants: columns that share a float16 scale, 256 or 128; of other kinds 0 */
    int64_t row_bytes; /* bytes of a row (one output), or of a panel (16 outputs) */
    const uint8_t *codes;
    const float *scales, *minimums; /* [outputs, columns / group] */
    const float *bias;              /* [outputs] or NULL */
    const int8_t *table;            /* the 16 values of a TABLE kind, each at least -zero_point */
} Matrix;

/* A K-quant matrix stored row by row, from which panels are filled. */
typedef struct {
    int32_t kind, outputs, columns, scale_columns, zero_point; /* scale_columns as in `Matrix`; codes plus zero_point are unsigned */
    int64_t row_bytes;
    const uint8_t *codes;                      /* [outputs, columns]: bytes, or 4 bits as paceline_fill_panels reads them */
    const uint16_t *scales, *minimums;         /* [outputs, columns / scale_columns] float16; minimums may be NULL */
    const uint8_t *factors, *minimum_factors;  /* [outputs, columns / group] */
} SuperBlocks;

/* A matrix in GGUF blocks, from which panels are filled (gguf_blocks.c). */
typedef struct {
    int32_t type, kind; /* GGUF's type number; the kind of the panels */
    int32_t outputs, columns, zero_point;
    int32_t scale_columns; /* as in `Matrix`; 0 = each group's scale is stored as a float32 */
    int32_t sign_mask;     /* see paceline_fill_panels */
    int64_t row_bytes;
    const uint8_t *rows;
    const int64_t *row_order;     /* [outputs] index of the stored row of each output; NULL = the same order */
    const int32_t *run_positions; /* [columns / 32] where each stored run of 32 columns goes, in runs; NULL = the same order */
} GgufBlocks;

enum {
    LINEAR, NORM, ROPE, ATTENTION, GATED, ADD, GATHER, SOFT_CAP, CONCAT, SUMMARIZE, SCALE, COLUMNS, ROUTE, EXPERTS, COMBINE,
    CONVOLUTION, STATE, BLOCK_CONVOLUTION, HEADS, MIX, GAUSSIAN_TOP_K, MATCH_RMS,
};
enum { SILU, GELU_TANH, CLAMPED_SWIGLU, SIGMOID_OF_GATE, GATE_ITSELF, RELU, XIELU };
enum { SOFTMAX, SIGMOID }; /* the function that turns a router's logits into scores */
/* How the input rows of a product are packed: as float32; rounded to bfloat16, if all its matrices are BF16; or rounded to 8-bit codes, if all its
 * matrices are in panels with the same group size and zero point. */
enum { AS_FLOATS, AS_BF16, AS_BYTES };
/* The rows an operation works on: all rows of the pass, or only those whose logits are computed. GATHER copies the latter to consecutive rows. */
enum { ALL_ROWS, LOGITS_ROWS };

/* The first fields of every operation. Below x, y, q, k, v and out are buffer numbers. */
typedef struct {
    int32_t code, out; /* LINEAR and EXPERTS write to the `out` of each matrix instead */
    int32_t rows;      /* ALL_ROWS or LOGITS_ROWS */
} Operation;

typedef struct {
    Operation common;
    int32_t x, num_matrices, packing;
    int32_t adapter_site;   /* index of this operation among those that LoRA adapters can change; -1 = none can */
    int32_t block_max;      /* buffer for the maximum of each BLOCK_COLUMNS results of a row, NaN if a result is NaN; -1 = not computed */
    const Matrix *matrices; /* [num_matrices], all with the same number of columns */
} LinearOperation;

typedef struct {
    Operation common;
    int32_t x, heads, head_size; /* 1 head = the whole row */
    float epsilon;
    int32_t weighted_heads, is_centered; /* heads with different weights, which later heads use again; 1 = layer norm */
    const float *weight, *bias;          /* [weighted_heads, head_size]; NULL = none */
} NormOperation;

typedef struct {
    Operation common;
    int32_t x, heads, head_size;
    int32_t rotary_half, table; /* number of rotated pairs of a head; index of the table of angles */
} RopeOperation;

typedef struct {
    Operation common;
    int32_t q, k, v, heads, kv_heads, head_size; /* k = v = -1: nothing is written to the cache; q = -1: keys and values are only written */
    int32_t layer;  /* layer of the KV cache */
    int32_t tables; /* index of the layer's set of block tables, see Pass.blocks_per_table_set */
    int32_t window; /* rows of the sliding window; 0 = none */
    int32_t is_causal; /* 1 = causal attention, the masks of ranges are ignored */
    int32_t latent_size; /* columns of a key that are the value, too: only values are stored, and v = k; 0 = keys and values are separate */
    float scale, soft_cap; /* 0 = none */
    const float *sinks;    /* [heads] attention sinks (gpt-oss): the score of a key that has no value; NULL = none */
} AttentionOperation;

typedef struct {
    Operation common;
    int32_t x, up, width, activation, group;            /* each value of x is for `group` adjacent columns of `up`, -1 = `weight` */
    float slope, limit, alpha_p, alpha_n, beta, eps; /* slope and limit are of CLAMPED_SWIGLU, the others of XIELU */
    const float *weight;                             /* [width] the same for every row; NULL = ones */
} GatedOperation;

typedef struct {
    Operation common;
    int32_t x, y, width;
} AddOperation, MatchRmsOperation;

typedef struct {
    Operation common;
    int32_t x, width;
} GatherOperation;

typedef struct {
    Operation common;
    int32_t x, width;
    float factor; /* the cap of SOFT_CAP */
} ScaleOperation, SoftCapOperation, GaussianTopKOperation;

typedef struct {
    Operation common;
    int32_t x, y, x_width, width; /* width: of the result */
} ConcatOperation;

/* Weighted sums of streams, which are equal parts of a row: out_i = y_i + the sum of (weights_ij + offset) x_j over j, but out_i = y_i if i < first. */
typedef struct {
    Operation common;
    int32_t x, y, weights, width, inputs, outputs, first; /* width: of a stream; weights: [rows][outputs][inputs], -1 = zeros */
    float offset;
} MixOperation;

/* Products of each head of x [rows, heads * columns] with its own matrix, each followed by the head of tails [rows, heads * tail]. */
typedef struct {
    Operation common;
    int32_t x, tails, heads, tail, packing; /* tails: -1 if tail = 0 */
    const Matrix *matrices;                 /* [heads], all of the same shape */
} HeadsOperation;

/* Choose `chosen` of `experts` experts for each row from the router's logits x [rows, experts]. The result is `Routes`. */
typedef struct {
    Operation common;
    int32_t x, experts, chosen, scoring;
    int32_t groups, chosen_groups, scores_per_group; /* only experts of the groups with the largest sums of 1 or 2 largest scores are chosen */
    int32_t is_normalized;         /* 1 = the weights of a row are divided by their sum + epsilon */
    float epsilon, factor;         /* factor: multiplies all expert weights */
    const float *correction;       /* [experts] added to scores to choose, not to weigh; NULL = none */
    const float *scales;           /* [experts] factor of each expert's weight; NULL = none */
} RouteOperation;

/* Products of rows with the matrices of their experts. A pair is a row and one of its experts, see `Routes`; each pair has a result row. */
typedef struct {
    Operation common;
    int32_t x, routes, chosen, experts, num_matrices, packing;
    int32_t of_pairs;       /* 1 = x has a row for each pair, in the order of pairs; 0 = x has a row for each row of the pass */
    int32_t adapter_site;   /* as in LinearOperation, for the first expert; expert e has adapter_site + e */
    const Matrix *matrices; /* [num_matrices][experts], all with the same number of columns */
} ExpertsOperation;

/* The sum of each row's expert outputs times their weights, in ascending order of experts. */
typedef struct {
    Operation common;
    int32_t x, routes, chosen, width;
} CombineOperation;

#define MAX_KERNEL_SIZE 16
#define PIECE_CHANNELS 256 /* channels that a thread claims at a time */
/* A causal convolution of each channel over the sequence; in a draft tree, the row before is the parent. */
typedef struct {
    Operation common;
    int32_t x, channels, kernel_size, is_activated; /* by SiLU */
    int32_t conv_at, record_at;                     /* the layer's offset in a state, and in a replay record (StateRange) */
    const float *weight;                            /* [kernel_size, channels], the last one multiplies the row itself */
    const float *bias;                              /* [channels]; NULL = none */
} ConvolutionOperation;

/* A causal convolution over the rows of a range in which each row has a kernel: `base` plus, for each group of columns, a value from `added`. */
typedef struct {
    Operation common;
    int32_t x, added, width, added_width, added_at; /* of [rows, added_width], [kernel_size, width / group] from column added_at on is used */
    int32_t kernel_size, group;
    const float *base; /* [kernel_size, width], the first one multiplies the row itself */
} BlockConvolutionOperation;

/* Recurrent state matrices [heads][rows_of_state, columns], updated by a gated delta rule (x holds queries, keys and values; a and b are its gates)
 * or by Mamba-2 (x holds its x, B and C; a its step sizes dt). */
typedef struct {
    Operation common;
    int32_t x, a, b, prepared; /* prepared: buffer for keys, queries and gates (state_rows.h), `prepared_floats` a row */
    int32_t channels, heads, key_heads, rows_of_state, columns, block_columns, is_delta; /* a block: block_columns columns of a matrix */
    int32_t matrices_at, keys_at, prepared_floats; /* offsets: of the matrices in a state, of the keys in a replay record */
    float min_step, max_step, beta_scale; /* limits of Mamba-2's step size dt; factor of the delta rule's rates */
    const float *decay, *bias, *skip; /* [heads]; skip: D of Mamba-2, NULL = none */
} StateOperation;

/* The LoRA update of one product: up @ t + bias, where t is the part [first, first + rank) of down @ x. */
typedef struct {
    int32_t kind, first, rank, unused; /* kind: type of the numbers in `up`; unused fields align the next one */
    const uint8_t *up;         /* [ceil(outputs / 16)][rank][16], zero-padded; NULL = no update */
    const float *bias;         /* [outputs]; NULL = none */
    const Matrix *replacement; /* multiplied instead of the network's matrix; NULL = none */
} AdapterProduct;

/* The LoRA updates of the products of one operation. */
typedef struct {
    const Matrix *down;             /* the matrices `down` of all products, [sum of ranks, columns] in panels (low_rank.c); NULL = none */
    const AdapterProduct *products; /* [num_matrices]; NULL = the adapter changes nothing here */
    const int32_t *scaling_columns; /* [sum of ranks] X-LoRA: the column of a row's scalings that multiplies each rank; NULL = none */
} AdapterSite;

/* A LoRA adapter and the rows of the pass that use it. */
typedef struct {
    const AdapterSite *sites;   /* by adapter_site of an operation */
    int32_t first[2], count[2]; /* where adapter_rows lists its rows: [0] among all rows, [1] among the rows of logits */
    const float *scalings;      /* [count[0]][num_scalings] of an X-LoRA adapter; NULL = none */
    int64_t num_scalings;
} PassAdapter;

/* Columns [begin, begin + width) of x. */
typedef struct {
    Operation common;
    int32_t x, x_width, begin, width;
} ColumnsOperation;

/* Summarise rows of logits (runtimes/logits_summary.py): log-sum-exp, a sampled token and the top `count` tokens of the first `columns` columns. */
typedef struct {
    Operation common;
    int32_t x, width;       /* floats of a whole row */
    int32_t index;          /* which of the network's summaries this is: the first index of Pass.sampling */
    int32_t columns, count;
    const int32_t *target_ids; /* [columns, padded to a multiple of 16] token id of each column; NULL = the column is the id */
} SummarizeOperation;

/* How a token is sampled from a row: the key of its noise (sampling/noise.py) and the temperature; temperature 0 = no token is sampled. */
typedef struct {
    uint64_t key;
    float temperature;
    int32_t unused;
} RowSampling;

/* The sampling parameters of a request; temperature 0 = greedy. `columns`: vocabulary size. */
typedef struct {
    double top_p, min_p;
    float temperature;
    int32_t top_k, columns, unused;
} SampleOptions;

/* A draft tree along which a path of target tokens is sampled, see paceline_sample_paths. */
typedef struct {
    const float *logits, *block_max; /* of node 0; block_max: as LinearOperation computes it, NULL = unknown */
    int64_t stride, block_max_stride; /* floats from a node's row to the next one's */
    const SampleOptions *options;
    const int32_t *tree; /* [2, num_nodes]: tokens, then parent nodes; not read if there is one node */
    uint64_t seed, sample_index, position; /* position: of the first token to sample */
    int32_t *result; /* [2, num_nodes]: sampled tokens, then the accepted nodes */
    int32_t num_nodes, num_tokens; /* num_tokens: sampled tokens, a result */
} SamplePath;

/* Rows [start, start + rows) of the pass, which continue one sequence of `cached_len` cached rows. table, mask: offsets in Pass.block_tables and
 * Pass.masks; mask < 0 = causal. Cached slots before first_slot are not attended to. */
typedef struct {
    int32_t start, rows, cached_len, table, mask, first_slot;
} Range;

/* A recurrent state is stored only after a multiple of this number of rows of its sequence. */
#define CHECKPOINT_INTERVAL 8
#define NO_NODE -1
#define IN_PLACE -1
#define NOT_STORED -2

/* One step of updating a recurrent state: add the updates of a path to it, compute the outputs of the rows that come next, save it. */
typedef struct {
    int32_t from;                /* the state to start from: the number of a temporary state, or IN_PLACE = the stored state */
    int32_t to;                  /* where the state after the path goes: the number of a temporary state, IN_PLACE or NOT_STORED */
    int32_t path;                /* index in StateRange.paths; -1 = none */
    int32_t first_row, num_rows; /* in StateRange.order; at most CHECKPOINT_INTERVAL rows */
    int32_t first_save, num_saves; /* in StateRange.saves */
} StateStep;

/* A place to which the state after the first `count` pending and new rows is copied. */
typedef struct {
    float *state;
    int64_t count;
} StateSave;

/* What the rows of a range do to the recurrent state of their sequence. */
typedef struct {
    float *state;   /* NULL = zeros */
    float *records; /* replay records, `record_floats` each: what is needed to add a row to the state */
    /* Pending rows are committed rows that the state does not include yet. */
    const int32_t *pending;     /* [num_pending] the record of each; the first num_applied are added to the state in place */
    const int32_t *row_records; /* [rows] the record that each row of the range writes; -1 = none */
    /* A node is a row of the range, counted from 0, or -2 - i for the pending row i. */
    const int32_t *parents;   /* [rows] the node before each row; -1 = the last pending row */
    const int32_t *order;     /* [rows] the rows, those of a step next to one another */
    const int32_t *ancestors; /* [rows][CHECKPOINT_INTERVAL] ancestors of each row that are not yet in the state of its step, padded with NO_NODE */
    const int32_t *paths;     /* [][CHECKPOINT_INTERVAL] nodes whose updates a step adds */
    const StateStep *steps;
    const StateSave *saves;
    int32_t *has_run; /* set to 1 at the end of the pass */
    int64_t record_floats;
    int32_t num_pending, num_applied, num_steps, num_saves;
} StateRange;

typedef struct {
    int32_t rows, num_logits_rows, num_ranges;
    int32_t blocks_per_table_set; /* entries of a set of block tables; each pool of cache blocks has a set */
    const Range *ranges;
    const int32_t *range_of_row; /* [rows] index in `ranges` */
    const int32_t *block_tables;
    const uint8_t *masks;       /* of a range: [rows][rows], 1 = may attend */
    const int32_t *logits_rows; /* [num_logits_rows] */
    const float *const *cos, *const *sin; /* for each table of angles [rows, rotary_half] */
    const RowSampling *sampling; /* [summaries of the network][num_logits_rows]; NULL = no sampling */
    const StateRange *states;  /* [num_ranges]; NULL = no recurrent layers */
    const PassAdapter *adapters; /* [num_adapters] */
    const int32_t *adapter_rows;   /* row numbers, see PassAdapter.first */
    const int32_t *row_order;      /* [rows] grouped by adapter; only networks with experts have this and the next array */
    const int32_t *adapter_of_row; /* [rows] index in `adapters`; -1 = none */
    float *low_rank; /* [entries of adapter_rows, or pairs of a row and an expert][low_rank_floats]: down @ x */
    int32_t num_adapters, low_rank_floats;
} Pass;

typedef struct {
    const Operation *const *operations;
    int32_t num_operations, num_threads;
    float *const *buffers;
    float *packed;         /* packed input rows of a product: packed_floats(rows, max_columns) */
    float *packed_rows;    /* for each thread one packed row: packed_floats(1, max_columns) */
    float *const *scratch; /* for each thread paceline_attention_floats */
    uint8_t *const *kv_storage; /* keys of layer 0, its values, keys of layer 1, ...; see kv_blocks.h */
    float *split_results;  /* attention results of splits (attention.h); if they do not fit, chunks are not divided into splits */
    int64_t split_results_floats;
    int32_t kv_kind, max_columns; /* kv_kind: type of keys and values */
    int32_t *tickets; /* [PHASES * num_operations], see work.h */
    int64_t *claims;  /* [num_threads][claims_per_thread], see work.h */
    int64_t claims_per_thread;
    float *state_scratch; /* for each thread state_floats, see state_blocks.c */
    int64_t state_floats;
} Program;

#define EACH_ROW _Pragma("unroll") for (int row = 0; row < rows; row++)
/* Return the index of row `number`; row_indices NULL = 0, 1, 2, ... */
static inline size_t row_index(const int32_t *row_indices, int number) { return (size_t)(row_indices ? row_indices[number] : number); }
static inline int ceil_div(int total, int size) { return (total + size - 1) / size; }

int tile_rows(int rows);
size_t packed_floats(int rows, int columns);
size_t packed_row_floats(const Matrix *matrix, int packing);
void pack_rows(const Matrix *matrix, const float *x, const int32_t *row_indices, int rows, int packing, int block, int begin, int end, float *packed);
void multiply(const Matrix *matrix, int begin, int end, int packing, const float *packed, float *y, int rows);

size_t packed_byte_row_words(const Matrix *matrix);
void pack_bytes(const Matrix *matrix, const float *x, const int32_t *row_indices, int first, int real, int padded, int begin, int end, float *packed);
void multiply_bytes(const Matrix *matrix, int begin, int end, const float *packed, float *y, int rows);

void paceline_fill_panels(const Matrix *from, int32_t kind, int32_t sign_mask, int32_t begin, int32_t end, uint8_t *to);
void paceline_fill_super_blocks(const SuperBlocks *from, int32_t begin, int32_t end, uint8_t *to);

void norm_row(const NormOperation *op, const float *x, int head, float *out);
void gaussian_top_k_row(const float *x, int width, float factor, float *out);
void match_rms_row(const float *x, const float *like, int width, float *out);
void rotate_head(const float *x, const float *cos, const float *sin, int head_size, int half, float *out);
void apply_gate(const GatedOperation *gated, const float *x, const float *up, int begin, int end, float *out);
void add_row(const float *x, const float *y, int width, float *out);
void soft_cap_row(const float *x, int width, float cap, float *out);
void scale_row(const float *x, int width, float factor, float *out);
void add_scaled_row(const float *x, int width, float factor, float *sum);
void concat_columns(const float *x, int width, const float *y, int begin, int count, float *out);
void block_convolve_row(const BlockConvolutionOperation *op, const float *x, const float *added, int earlier, int begin, int count, float *out);

/* An expert that at least one row has chosen. Its pairs are [first, first + count), its packed rows begin at `first_packed`. */
typedef struct {
    int32_t expert, first, count, first_packed;
} ActiveExpert;

/* The result of ROUTE. A pair is a row and one of its experts; pairs are ordered by expert, then by the row's adapter, then by row. */
typedef struct {
    int32_t *experts;      /* [rows][chosen], ascending */
    float *weights;        /* [rows][chosen] */
    int32_t *pair_indices; /* [rows][chosen] */
    int32_t *rows;         /* [pairs] the row of each pair */
    int32_t *num_active;
    ActiveExpert *active;  /* [num_active], ascending */
} Routes;

Routes routes_of(float *buffer, int rows, int chosen);
void choose_experts(const RouteOperation *op, const float *logits, int32_t *experts, float *weights);
void sort_pairs(const RouteOperation *op, const Routes *routes, const int32_t *order, int rows);

void convolve(const StateRange *range, const ConvolutionOperation *op, int rows, int channel, int count, const float *x, float *out);
void prepare_gates(const StateOperation *op, const float *a, const float *b, float *prepared, float *record);
void prepare_keys(const StateRange *range, const StateOperation *op, int rows, int head, const float *x, float *prepared);
const float *prefetch_state_block(const StateRange *range, const StateOperation *op, int rows, int number, const float *x, float *out);
void run_state_block(const StateRange *range, const StateOperation *op, int rows, int number, const float *next, const float *x, float *prepared,
                     float *out, float *scratch);

#define SUMMARY_COLUMNS 4096 /* columns of a row that a thread summarises at a time */
int32_t paceline_summary_floats(int32_t columns, int32_t count);
void summarize_piece(const SummarizeOperation *op, const RowSampling *sampling, const float *row, int number, float *out);
void join_summaries(const SummarizeOperation *op, float *out);

void write_kv(const Program *program, const Pass *pass, const AttentionOperation *op, int row);

#endif
