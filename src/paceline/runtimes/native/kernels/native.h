/* Records that runtimes/native/records.py declares for ctypes, and functions shared by the files of this folder. */
#ifndef PACELINE_NATIVE_H
#define PACELINE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define KERNELS_VERSION 28 /* must equal VERSION in runtimes/native/records.py; increase both when a record, an enum or a function changes */

/* Maximum number of input rows that are multiplied together (a block of rows), so that each weight is loaded and decoded once for all of them.
 * Limited by the registers that hold their sums. */
#ifdef __AVX512F__
#define MAX_ROWS 8
#else
#define MAX_ROWS 4
#endif

/* How a matrix is stored. The first five kinds are row by row, as floats or as 8-bit codes. PANELS kinds are in panels (panels.h; K-quants:
 * k_quants.h) and are multiplied with input rows rounded to 8 bits. MINIMUM: each group has a minimum. TABLE: a code is an index into a table of 16
 * values. FLOAT16: scales are float16 instead of float32. */
enum {
    F32, F16, BF16, U8, U8_MINIMUM,
    PANELS_8_BITS, PANELS_8_BITS_MINIMUM, PANELS_4_BITS, PANELS_4_BITS_MINIMUM, PANELS_4_BITS_TABLE, PANELS_4_BITS_FLOAT16,
    PANELS_4_BITS_TABLE_FLOAT16,
    PANELS_Q4_K, PANELS_Q5_K, PANELS_Q6_K, PANELS_Q2_K, PANELS_Q3_K, PANELS_IQ4_XS,
};
#define SUPER_BLOCK 256 /* columns of a super-block of a K-quant */
#define MAX_GROUP 256   /* maximum number of columns that share a scale */

/* A weight matrix W [outputs, columns]. */
typedef struct {
    int32_t kind, outputs, columns, group, zero_point, out; /* group: columns that share a scale; out: number of the result's buffer */
    int32_t scale_columns; /* K-quants: columns that share a float16 scale, 256 or 128; other kinds: 0 */
    int64_t row_bytes; /* bytes of a row (one output), or of a panel (16 outputs) */
    const uint8_t *codes;
    const float *scales, *minimums; /* [outputs, columns / group] */
    const float *bias;              /* [outputs] or NULL */
    const int8_t *table;            /* the 16 values of a TABLE kind, each at least -zero_point */
} Matrix;

/* A K-quant matrix stored row by row, from which panels are filled. */
typedef struct {
    int32_t kind, outputs, columns, scale_columns, zero_point; /* scale_columns: as in `Matrix` */
    int64_t row_bytes;
    const uint8_t *codes;                     /* [outputs, columns]: bytes (+ zero_point in the panels), or 4 bits as in paceline_fill_panels */
    const uint16_t *scales, *minimums;        /* [outputs, columns / scale_columns] float16; minimums may be NULL */
    const uint8_t *factors, *minimum_factors; /* [outputs, columns / group] */
} SuperBlocks;

/* A matrix in GGUF blocks, from which panels are filled (gguf_blocks.c). */
typedef struct {
    int32_t type, kind; /* type: ggml_type of the blocks; kind: how the panels are stored */
    int32_t outputs, columns, zero_point;
    int32_t scale_columns; /* as in `Matrix`; 0 = each group's scale is stored as a float32 */
    int32_t sign_mask;     /* see paceline_fill_panels */
    int64_t row_bytes;
    const uint8_t *rows;
    const int64_t *row_order;     /* [outputs] index of the stored row of each output; NULL = the same order */
    const int32_t *run_positions; /* [columns / 32] new index of each stored run of 32 columns; NULL = the same order */
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
/* The rows that an operation processes: all rows of the pass, or only those whose logits are computed, made consecutive by GATHER. */
enum { ALL_ROWS, LOGITS_ROWS };

/* The first fields of every operation. In all operations x, y, q, k, v and out are indices in Program.buffers. */
typedef struct {
    int32_t code, out; /* out: unused by LINEAR and EXPERTS, which write to the `out` of each matrix */
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
    int32_t weighted_heads, is_centered; /* weighted_heads: number of heads in `weight`, which is repeated; is_centered: 1 = layer norm */
    const float *weight, *bias; /* [weighted_heads, head_size]; NULL = none */
} NormOperation;

typedef struct {
    Operation common;
    int32_t x, heads, head_size;
    int32_t rotary_half, angle_table; /* rotary_half: rotated pairs of a head; angle_table: index in Pass.cos and sin */
} RopeOperation;

typedef struct {
    Operation common;
    int32_t q, k, v, heads, kv_heads, head_size; /* k = v = -1: read the cache only; q = -1: only write keys and values */
    int32_t layer; /* layer of the KV cache */
    int32_t block_table_set; /* index of the layer's set of block tables, see Pass.blocks_per_table_set */
    int32_t window; /* rows (token positions) of the sliding window; 0 = none */
    int32_t is_causal; /* 1 = causal attention; the masks of ranges are ignored */
    int32_t latent_size; /* MLA: number of leading key columns that are the value: v = k, stored once, as values. 0 = separate values */
    float scale, soft_cap; /* 0 = none */
    const float *sinks; /* [heads] attention sinks (gpt-oss): the score of an additional key without a value; NULL = none */
} AttentionOperation;

typedef struct {
    Operation common;
    int32_t x, up, width, activation, group;         /* up: -1 = use `weight`; a column of x multiplies `group` adjacent columns of `up` */
    float slope, limit, alpha_p, alpha_n, beta, eps; /* CLAMPED_SWIGLU: slope, limit; XIELU: the others */
    const float *weight;                             /* [width] used for every row; NULL = ones */
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
    int32_t x, y, x_width, width; /* width: columns of the result */
} ConcatOperation;

/* Weighted sums of streams (equal parts of a row): out_i = y_i + sum over j of (weights_ij + offset) x_j; if i < first_mixed, out_i = y_i. */
typedef struct {
    Operation common;
    int32_t x, y, weights, width, inputs, outputs, first_mixed; /* width: columns of a stream; weights: [rows][outputs][inputs], -1 = zeros */
    float offset;
} MixOperation;

/* For each head of x [rows, heads * columns] its product with its own matrix, then its columns of tails [rows, heads * tail_columns]. */
typedef struct {
    Operation common;
    int32_t x, tails, heads, tail_columns, packing; /* tails: -1 if tail_columns = 0 */
    const Matrix *matrices;                         /* [heads], all of the same shape */
} HeadsOperation;

/* Choose experts_per_row of num_experts experts for each row from the router's logits x [rows, num_experts]. The result is `Routes`. */
typedef struct {
    Operation common;
    int32_t x, num_experts, experts_per_row, scoring;
    int32_t groups, chosen_groups, scores_per_group; /* experts are chosen from the groups with the largest sums of their 1 or 2 best scores */
    int32_t is_normalized; /* 1 = the weights of a row are divided by their sum + epsilon */
    float epsilon, factor; /* factor: multiplies all expert weights */
    const float *correction; /* [num_experts] added to scores for the choice of experts, not for their weights; NULL = none */
    const float *scales; /* [num_experts] factor of each expert's weight; NULL = none */
} RouteOperation;

/* Products of rows with the matrices of their experts. A pair is a row and one of its experts, see `Routes`; each pair has a result row. */
typedef struct {
    Operation common;
    int32_t x, routes, experts_per_row, num_experts, num_matrices, packing;
    int32_t is_per_pair;    /* 1 = x has a row for each pair, in the order of pairs; 0 = x has the rows of the pass */
    int32_t adapter_site;   /* as in LinearOperation, for expert 0; expert e has adapter_site + e */
    const Matrix *matrices; /* [num_matrices][num_experts], all with the same number of columns */
} ExpertsOperation;

/* The sum of each row's expert outputs times their weights, in ascending order of experts. */
typedef struct {
    Operation common;
    int32_t x, routes, experts_per_row, width;
} CombineOperation;

#define MAX_KERNEL_SIZE 16
#define PIECE_CHANNELS 256 /* channels of one piece of work */
/* A causal convolution of each channel over the sequence; in a draft tree, the previous row is the parent. */
typedef struct {
    Operation common;
    int32_t x, channels, kernel_size, is_activated; /* is_activated: SiLU is applied */
    int32_t conv_offset, record_offset;             /* the layer's offset in a recurrent state, and in a replay record (StateRange) */
    const float *weight;                            /* [kernel_size, channels]; the last tap multiplies the row itself */
    const float *bias;                              /* [channels]; NULL = none */
} ConvolutionOperation;

/* A causal convolution over the rows of a range in which each row has its own kernel: `base` plus one value of `added` per group of columns. */
typedef struct {
    Operation common;
    int32_t x, added, width, added_width, added_offset; /* `added` has [kernel_size, width / group] values per row, from column added_offset on */
    int32_t kernel_size, group;
    const float *base; /* [kernel_size, width]; the first tap multiplies the row itself */
} BlockConvolutionOperation;

/* Recurrent state matrices [heads][rows_of_state, columns], updated by a gated delta rule (x holds queries, keys and values; a and b are its gates)
 * or by Mamba-2 (x holds its x, B and C; a its step sizes dt). */
typedef struct {
    Operation common;
    int32_t x, a, b, prepared; /* prepared: buffer for keys, queries and gates (state_rows.h), prepared_floats per row */
    int32_t channels, heads, key_heads, rows_of_state, columns, block_columns, is_delta; /* block_columns: columns of a state block */
    int32_t matrices_offset, keys_offset, prepared_floats; /* offset of the matrices in a state, of the keys in a replay record */
    float min_step, max_step, beta_scale; /* limits of Mamba-2's step size dt; factor of the delta rule's beta */
    const float *decay, *bias, *skip; /* [heads]; skip: D of Mamba-2, NULL = none */
} StateOperation;

/* The LoRA update of one product: up @ t + bias, where t is entries [first_rank, first_rank + rank) of down @ x. */
typedef struct {
    int32_t kind, first_rank, rank, unused; /* kind: data type of `up`; unused: padding before a pointer */
    const uint8_t *up;                      /* [ceil(outputs / 16)][rank][16], zero-padded; NULL = no update */
    const float *bias;                      /* [outputs]; NULL = none */
    const Matrix *replacement;              /* multiplied instead of the network's matrix; NULL = none */
} AdapterProduct;

/* The LoRA updates of the products of one operation. */
typedef struct {
    const Matrix *down;             /* the matrices `down` of all products, stacked: [sum of ranks, columns] in panels (low_rank.c); NULL = none */
    const AdapterProduct *products; /* [num_matrices]; NULL = the adapter does not change this operation */
    const int32_t *scaling_columns; /* X-LoRA: [sum of ranks] which of a row's scalings multiplies each rank; NULL = none */
} AdapterSite;

/* A LoRA adapter and the rows of the pass that use it. */
typedef struct {
    const AdapterSite *sites;   /* indexed by the adapter_site of an operation */
    int32_t first[2], count[2]; /* entries of Pass.adapter_rows: [0] for ALL_ROWS, [1] for LOGITS_ROWS */
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
    int32_t x, width;      /* columns of a row of x */
    int32_t summary_index; /* index among the network's summaries, as in Pass.sampling */
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
    const float *logits, *block_max; /* the rows of node 0; block_max: as LinearOperation computes it, NULL = unknown */
    int64_t logits_stride, block_max_stride; /* floats between the rows of consecutive nodes */
    const SampleOptions *options;
    const int32_t *tree; /* [2, num_nodes]: tokens, then parent nodes; not read if there is only node 0 */
    uint64_t seed, sample_index, position; /* position: that of the first token to sample */
    int32_t *result; /* [2, num_nodes]: sampled tokens, then the accepted nodes */
    int32_t num_nodes, num_tokens; /* num_tokens: number of sampled tokens, a result */
} SamplePath;

/* Rows [start, start + rows) of the pass, which continue one sequence of cached_len cached rows. table_offset, mask_offset: in Pass.block_tables and
 * Pass.masks; mask_offset < 0 = causal. Cache slots before first_slot are not attended to. */
typedef struct {
    int32_t start, rows, cached_len, table_offset, mask_offset, first_slot;
} Range;

/* A recurrent state is stored only after a number of rows of its sequence that is a multiple of this interval. */
#define CHECKPOINT_INTERVAL 8
#define NO_NODE -1
#define IN_PLACE -1
#define NOT_STORED -2

/* A step of updating a recurrent state: add the updates of a path of nodes, compute the outputs of the next rows, copy the state to saves. */
typedef struct {
    int32_t from_state;                  /* the initial state: index of a temporary state, or IN_PLACE = the stored state */
    int32_t to_state;                    /* where the new state is stored: index of a temporary state, IN_PLACE or NOT_STORED */
    int32_t path;                  /* index in StateRange.paths; -1 = none */
    int32_t first_row, num_rows;   /* part of StateRange.order; at most CHECKPOINT_INTERVAL rows */
    int32_t first_save, num_saves; /* part of StateRange.saves */
} StateStep;

/* A copy of the state after `count` rows: the pending rows, then rows of the range. */
typedef struct {
    float *state;
    int64_t count;
} StateSave;

/* How the rows of a range update the recurrent state of their sequence. */
typedef struct {
    float *state;   /* NULL = zeros */
    float *records; /* replay records, record_floats each: the inputs needed to add a row to the state */
    /* Pending rows are committed rows that the state does not include yet. */
    const int32_t *pending;     /* [num_pending] index of each row's record; the first num_applied rows are added to the state in place */
    const int32_t *row_records; /* [rows] index of the record that each row writes; -1 = none */
    /* A node is a row of the range, counted from 0, or -2 - i for pending row i. */
    const int32_t *parents;   /* [rows] the previous node of each row; -1 = the last pending row */
    const int32_t *order;     /* [rows] row indices, ordered so that the rows of a step are adjacent */
    const int32_t *ancestors; /* [rows][CHECKPOINT_INTERVAL] ancestors of each row that its step's state does not include, padded with NO_NODE */
    const int32_t *paths;     /* [number of paths][CHECKPOINT_INTERVAL] nodes whose updates a step adds */
    const StateStep *steps;
    const StateSave *saves;
    int32_t *has_run; /* set to 1 at the end of the pass: the applied rows are in the state, and the saves are written */
    int64_t record_floats;
    int32_t num_pending, num_applied, num_steps, num_saves;
} StateRange;

typedef struct {
    int32_t rows, num_logits_rows, num_ranges;
    int32_t blocks_per_table_set; /* entries of a set of block tables; each pool of cache blocks has one set */
    const Range *ranges;
    const int32_t *range_of_row; /* [rows] index in `ranges` */
    const int32_t *block_tables;
    const uint8_t *masks;                 /* [rows][rows] of each range that has a mask, 1 = may attend */
    const int32_t *logits_rows;           /* [num_logits_rows] */
    const float *const *cos, *const *sin; /* [angle tables] each [rows, rotary_half] */
    const RowSampling *sampling;          /* [summaries of the network][num_logits_rows]; NULL = no sampling */
    const StateRange *states;             /* [num_ranges]; NULL = no recurrent layers */
    const PassAdapter *adapters;          /* [num_adapters] */
    const int32_t *adapter_rows;          /* row indices grouped by adapter, see PassAdapter */
    const int32_t *row_order;             /* [rows] row indices grouped by adapter; set only for networks with experts, as is adapter_of_row */
    const int32_t *adapter_of_row;        /* [rows] index in `adapters`; -1 = none */
    float *low_rank;                      /* down @ x: [low_rank_floats] for each entry of adapter_rows, or for each (row, expert) pair */
    int32_t num_adapters, low_rank_floats;
} Pass;

typedef struct {
    const Operation *const *operations;
    int32_t num_operations, num_threads;
    float *const *buffers;
    float *packed_inputs;       /* packed input rows of a product: paceline_packed_floats(rows, columns) floats */
    float *packed_rows;         /* memory of each thread for a packed block of rows: paceline_packed_floats(1, max_columns) floats */
    float *const *scratch;      /* memory of each thread for attention: paceline_attention_floats floats */
    uint8_t *const *kv_storage; /* [2 * layers] keys of layer 0, its values, keys of layer 1, ...; see kv_blocks.h */
    float *split_results;       /* results of attention splits (attention.h); if they do not fit, a thread computes all splits of a chunk */
    int64_t split_results_floats;
    int32_t kv_kind, max_columns; /* kv_kind: data type of cached keys and values */
    int32_t *tickets;             /* [PHASES * num_operations], see work.h */
    int64_t *claims;              /* [num_threads][claims_per_thread], see work.h */
    int64_t claims_per_thread;
    float *state_scratch; /* memory of each thread for state blocks (state_blocks.c): state_floats floats */
    int64_t state_floats;
} Program;

#define EACH_ROW _Pragma("unroll") for (int row = 0; row < rows; row++)
/* Return row_indices[number]; NULL = `number` itself. */
static inline size_t row_index(const int32_t *row_indices, int number) { return (size_t)(row_indices ? row_indices[number] : number); }
static inline int ceil_div(int total, int size) { return (total + size - 1) / size; }

int padded_block_rows(int rows);
size_t packed_floats(int rows, int columns);
size_t packed_row_floats(const Matrix *matrix, int packing);
void pack_rows(const Matrix *matrix, const float *x, const int32_t *row_indices, int rows, int packing, int block, int begin, int end, float *packed);
void multiply_packed_rows(const Matrix *matrix, int begin, int end, int packing, const float *packed, float *y, int rows);

size_t packed_byte_row_words(const Matrix *matrix);
void pack_rows_as_bytes(const Matrix *matrix, const float *x, const int32_t *row_indices, int first, int real, int padded, int begin, int end, float *packed);
void multiply_bytes(const Matrix *matrix, int begin, int end, const float *packed, float *y, int rows);

void paceline_fill_panels(const Matrix *from, int32_t kind, int32_t sign_mask, int32_t begin, int32_t end, uint8_t *to);
void paceline_fill_super_blocks(const SuperBlocks *from, int32_t begin, int32_t end, uint8_t *to);

void norm_row(const NormOperation *op, const float *x, int head, float *out);
void gaussian_top_k_row(const float *x, int width, float factor, float *out);
void match_rms_row(const float *x, const float *reference, int width, float *out);
void rotate_head(const float *x, const float *cos, const float *sin, int head_size, int half, float *out);
void apply_gate(const GatedOperation *op, const float *x, const float *up, int begin, int end, float *out);
void add_row(const float *x, const float *y, int width, float *out);
void soft_cap_row(const float *x, int width, float cap, float *out);
void scale_row(const float *x, int width, float factor, float *out);
void add_scaled_row(const float *x, int width, float factor, float *sum);
void concat_columns(const float *x, int width, const float *y, int begin, int count, float *out);
void block_convolve_row(const BlockConvolutionOperation *op, const float *x, const float *added, int earlier, int begin, int count, float *out);

/* An expert chosen by at least one row. Its pairs are [first, first + count); first_packed: index of its first packed row. */
typedef struct {
    int32_t expert, first, count, first_packed;
} ActiveExpert;

/* The result of ROUTE. A pair is a row and one of its experts; pairs are ordered by expert, then by the row's adapter, then by row. */
typedef struct {
    int32_t *experts;      /* [rows][experts_per_row], ascending in each row */
    float *weights;        /* [rows][experts_per_row] */
    int32_t *pair_indices; /* [rows][experts_per_row] index of each pair in the order of pairs */
    int32_t *rows;         /* [pairs] the row of each pair */
    int32_t *num_active;
    ActiveExpert *active; /* [num_active], ascending */
} Routes;

Routes routes_in_buffer(float *buffer, int rows, int experts_per_row);
void choose_experts(const RouteOperation *op, const float *logits, int32_t *experts, float *weights);
void sort_pairs(const RouteOperation *op, const Routes *routes, const int32_t *order, int rows);

void convolve(const StateRange *range, const ConvolutionOperation *op, int rows, int channel, int count, const float *x, float *out);
void prepare_gates(const StateOperation *op, const float *a, const float *b, float *prepared, float *record);
void prepare_keys(const StateRange *range, const StateOperation *op, int rows, int head, const float *x, float *prepared);
const float *prefetch_state_block(const StateRange *range, const StateOperation *op, int rows, int number, const float *x, float *out);
void run_state_block(const StateRange *range, const StateOperation *op, int rows, int number, const float *next, const float *x, float *prepared,
                     float *out, float *scratch);

#define SUMMARY_COLUMNS 4096 /* columns of a piece of work */
int32_t paceline_summary_floats(int32_t columns, int32_t count);
void summarize_piece(const SummarizeOperation *op, const RowSampling *sampling, const float *row, int number, float *out);
void join_summaries(const SummarizeOperation *op, float *out);

void write_kv(const Program *program, const Pass *pass, const AttentionOperation *op, int row);

#endif
