/* Records shared with runtimes/native/records.py (ctypes), and what the files of this folder offer one another. */
#ifndef PACELINE_NATIVE_H
#define PACELINE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define KERNELS_VERSION 18 /* one more whenever a record, a code or a function changes; runtimes/native/records.py has the same */

/* Rows that share one decoding of a weight: as many as keep their sums in registers. */
#ifdef __AVX512F__
#define MAX_ROWS 8
#else
#define MAX_ROWS 4
#endif

/* How weights are stored. U8_MINIMUM and U4_MINIMUM add a minimum per group; of U4_TABLE a code is the number of a value. */
#define F32 0
#define F16 1
#define BF16 2
#define S8 3
#define U8 4
#define U8_MINIMUM 5
#define U4 6
#define U4_MINIMUM 7
#define U4_TABLE 8
/* The same codes in panels of 16 outputs (panels.c), for rows that are rounded to bytes. */
#define PANELS_8_BITS 9
#define PANELS_8_BITS_MINIMUM 10
#define PANELS_4_BITS 11
#define PANELS_4_BITS_MINIMUM 12
#define PANELS_4_BITS_TABLE 13
/* As the kinds without _HALVES, but scales are float16 and lie in front of the codes of two groups. */
#define PANELS_4_BITS_HALVES 14
#define PANELS_4_BITS_TABLE_HALVES 15
/* K-quants at their stored size (super_blocks.c). */
#define PANELS_Q4_K 16
#define PANELS_Q5_K 17
#define PANELS_Q6_K 18
#define PANELS_Q2_K 19 /* these three: small_blocks.c */
#define PANELS_Q3_K 20
#define PANELS_IQ4_XS 21
#define SUPER_BLOCK 256
#define MAX_GROUP 256 /* columns of a group of such rows */

/* W [outputs, columns]. */
typedef struct {
    int32_t kind, outputs, columns, group, zero_point, out; /* out: buffer of the result */
    int32_t block;     /* of K-quants at their stored size: columns that share float16 numbers, 256 or 128; else 0 */
    int64_t row_bytes; /* of an output, or of a panel */
    const uint8_t *codes;
    const float *scales, *minimums; /* [outputs, columns / group] */
    const float *bias;              /* [outputs] or NULL */
    const int8_t *table;            /* of a kind with one: the 16 values; zero_point makes them unsigned */
} Matrix;

/* What panels of K-quants are filled from. */
typedef struct {
    int32_t kind, outputs, columns, block, zero_point; /* zero_point: what makes codes unsigned */
    int64_t row_bytes;
    const uint8_t *codes;                      /* [outputs, columns]: 4 bits in runs of 32, else bytes */
    const uint16_t *scales, *minimums;         /* [outputs, columns / block] float16; Q6_K has no minimums */
    const uint8_t *factors, *minimum_factors;  /* [outputs, columns / group] */
} SuperBlocks;

/* Rows of GGUF's blocks that become panels (gguf_blocks.c). */
typedef struct {
    int32_t type, kind; /* the format's number of the blocks' type; of the panels */
    int32_t outputs, columns, zero_point;
    int32_t block;      /* of panels of super-blocks as in `Matrix`; 0 = their scales are stored one by one */
    int32_t flipped;    /* as paceline_fill_panels takes it */
    int64_t row_bytes;
    const uint8_t *rows;
    const int64_t *order;  /* [outputs] the stored row of each; NULL = in their order */
    const int32_t *places; /* [columns / 32] which run of ours each stored one is; NULL = in their order */
} Blocks;

enum {
    LINEAR, NORM, ROPE, ATTENTION, GATED, ADD, GATHER, SOFT_CAP, CONCAT, SILU_RESIDUAL, RANK, SCALE, COLUMNS, ROUTE, EXPERTS, COMBINE,
    SIGMOID_GATE, CONVOLUTION, STATE,
};
enum { SILU, GELU_TANH, CLAMPED_SWIGLU, SIGMOID_OF_GATE, GATE_ITSELF, RELU };
enum { SOFTMAX, SIGMOID }; /* what makes scores of a router's logits */
/* How a product takes its rows: as they are, rounded to bfloat16 (all its matrices are BF16 then), or rounded to bytes (all its matrices are
 * panels then, with the same groups and the same zero point). */
enum { AS_FLOATS, AS_BF16, AS_BYTES };
/* Which rows an operation works on: those of the pass, or those whose logits are wanted, which lie one behind another in their buffers;
 * GATHER puts them there. */
enum { ALL_ROWS, WANTED_ROWS };

/* Every operation begins with this; x, y, q, k, v and out are numbers of buffers. */
typedef struct {
    int32_t code, out; /* the matrices of LINEAR and EXPERTS name their own */
    int32_t rows;
} Operation;

typedef struct {
    Operation head;
    int32_t x, num_matrices, packing;
    int32_t site;           /* which of those that adapters add to it is, counted from 0; -1 = none */
    int32_t block_max;      /* of its one matrix: the largest of each BLOCK_COLUMNS results of a row, NaN if one is; -1 = are not kept */
    const Matrix *matrices; /* [num_matrices] of the same columns */
} LinearOperation;

typedef struct {
    Operation head;
    int32_t x, heads, head_size; /* 1 head = the whole row */
    float epsilon;
    int32_t weighted_heads; /* that have a weight of their own; the others have the same again */
    const float *weight;    /* [weighted_heads, head_size]; NULL = none */
} NormOperation;

typedef struct {
    Operation head;
    int32_t x, heads, head_size;
    int32_t rotary_half, table; /* pairs that are turned, and the table of their angles */
} RopeOperation;

typedef struct {
    Operation head;
    int32_t q, k, v, heads, kv_heads, head_size; /* k and v -1: another operation has written the rows; q -1: they are only written */
    int32_t layer;  /* of the cache */
    int32_t tables; /* which block tables of the pass name its blocks */
    int32_t window; /* the last rows that are seen; 0 = all */
    int32_t is_causal; /* masks of ranges do not count */
    float scale, soft_cap; /* 0 = none */
    const float *sinks;    /* [heads] the score of a key without a value that every row sees; NULL = none */
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

/* The `chosen` experts of every row, by its scores; x: the router's logits [rows, experts]. The result is `Routes`. */
typedef struct {
    Operation head;
    int32_t x, experts, chosen, scoring;
    int32_t groups, chosen_groups; /* experts of the groups with the largest sums of their two best scores alone are compared */
    int32_t is_normalized;         /* weights are divided by their sum and `least` */
    float least, factor;           /* factor: on all weights */
    const float *correction;       /* [experts] added to scores where they are compared; NULL = nothing */
    const float *scales;           /* [experts] on the weights of each expert; NULL = none */
} RouteOperation;

/* Products with the matrices of the experts that rows have chosen; each is read once. */
typedef struct {
    Operation head;
    int32_t x, routes, chosen, experts, num_matrices, packing;
    int32_t of_pairs;       /* x has a row for each pair of a row and an expert, in their order; else for each row of the pass */
    int32_t site;           /* as in LinearOperation, of the first expert; those of the others follow */
    const Matrix *matrices; /* [num_matrices][experts] of the same columns; the results have a row for each pair */
} ExpertsOperation;

/* Of every row the sum of its pairs' rows of x, times their weights, in the order of the experts. */
typedef struct {
    Operation head;
    int32_t x, routes, chosen, width;
} CombineOperation;

/* x * sigmoid(y), y one number a row. */
typedef struct {
    Operation head;
    int32_t x, y, width;
} SigmoidGateOperation;

/* A causal convolution of each channel over the rows of a text, each row behind its parent. */
#define MAX_KERNEL_SIZE 16
#define PIECE_CHANNELS 256
typedef struct {
    Operation head;
    int32_t x, channels, kernel_size, is_activated; /* by SiLU */
    int32_t conv_at, record_at;                     /* of the layer, in a state and in a record */
    const float *weight;                            /* [kernel_size, channels], the last row of the row itself */
    const float *bias;                              /* [channels]; NULL = none */
} ConvolutionOperation;

/* Recurrent matrices [heads][rows_of_state, columns]: a gated delta rule (queries, keys and values in x, a and b its gates), or else Mamba-2
 * (x, B and C in x, a its step sizes). */
typedef struct {
    Operation head;
    int32_t x, a, b, work; /* work: a buffer of `work_floats` a row */
    int32_t channels, heads, key_heads, rows_of_state, columns, block, is_delta;
    int32_t matrices_at, keys_at, work_floats; /* keys_at: in a record */
    float least, most;                         /* limits of step sizes */
    const float *decay, *bias, *skip;          /* [heads]; skip NULL = none */
} StateOperation;

/* What an adapter adds to one product: up @ t and a bias, t the `rank` floats from `first` on of what `down` makes of x. */
typedef struct {
    int32_t kind, first, rank, unused;
    const uint8_t *up;   /* [outputs / 16, the last one padded][rank][16]; NULL = nothing */
    const float *bias;   /* [outputs]; NULL = none */
    const Matrix *whole; /* likewise, whose product takes the place of this one; NULL = it stays */
} AdapterProduct;

/* What it does to the products of one operation. */
typedef struct {
    const Matrix *down;             /* [sum of ranks, columns] in panels (low_rank.c); NULL = nothing is multiplied */
    const AdapterProduct *products; /* [num_matrices]; NULL = nothing at all */
    const int32_t *columns;         /* [sum of ranks] which of a row's scalings each rank is multiplied by; NULL = there are none */
} AdapterSite;

/* An adapter with rows in a pass. */
typedef struct {
    const AdapterSite *sites;   /* by the site of the operation */
    int32_t first[2], count[2]; /* its rows among `adapter_rows`: of all rows, and of those whose logits are wanted */
    const float *scalings;      /* [count[0]][num_scalings] of X-LoRA; NULL = none */
    int64_t num_scalings;
} PassAdapter;

/* Columns [begin, begin + width) of x. */
typedef struct {
    Operation head;
    int32_t x, x_width, begin, width;
} ColumnsOperation;

/* What is wanted of rows of logits: the `count` best of their first `columns`. */
typedef struct {
    Operation head;
    int32_t x, width;       /* floats of a whole row */
    int32_t number;         /* of the ranking, counted from 0 */
    int32_t columns, count;
    const int32_t *target_ids; /* [columns, padded to a multiple of 16] the id that each stands for; NULL = its own number */
} RankOperation;

/* How the token of a row is drawn: the key of its noise (sampling/noise.py); temperature 0: not at all. */
typedef struct {
    uint64_t key;
    float temperature;
    int32_t unused;
} Draw;

/* How the tokens of a request are drawn, which temperature 0 takes for greedy. Rows have so many columns that count. */
typedef struct {
    double top_p, min_p;
    float temperature;
    int32_t top_k, columns, unused;
} SampleOptions;

/* A path to sample: see paceline_sample_paths. */
typedef struct {
    const float *logits, *block_max; /* block_max: of the logits, as LinearOperation keeps them; NULL = unknown */
    int64_t stride, block_max_stride;
    const SampleOptions *options;
    const int32_t *tree; /* [2, num_nodes]: tokens, then parents; not read where there is one node */
    uint64_t seed, sample_index, position;
    int32_t *found; /* [2, num_nodes]: gets tokens, then the nodes that hold them */
    int32_t num_nodes, num_tokens;
} SamplePath;

/* Rows [start, start + rows) of the pass: one path. Its block table and its mask begin at these offsets; mask < 0: causal.
 * Cached slots before first_slot are not seen. */
typedef struct {
    int32_t start, rows, cached_len, table, mask, first_slot;
} Range;

/* Rows of a text that its matrices take in at a time; a multiple of so many rows is behind a state. */
#define GRID 8
#define NO_NODE -1
#define IN_PLACE -1
#define NOWHERE -2

/* What is done with a state: take in a path, multiply it with rows that go on from there, save it. */
typedef struct {
    int32_t from;                /* a slot, or IN_PLACE: the state itself */
    int32_t to;                  /* where the state behind the path is kept: a slot, IN_PLACE or NOWHERE */
    int32_t path;                /* -1 = none */
    int32_t first_row, num_rows; /* in `order`; GRID at most */
    int32_t first_save, num_saves;
} Step;

typedef struct {
    float *state;
    int64_t count; /* of pending rows and rows of the range that it is behind */
} Save;

/* What the rows of a range do to the state of their sequence. */
typedef struct {
    float *state;   /* NULL: at zero */
    float *records; /* of `record_floats` each */
    const int32_t *pending; /* [num_pending] the records of rows that the state has not taken in; the first num_folded are, in place */
    const int32_t *rows;    /* of each row of the range the record it leaves; -1 = none */
    /* Nodes are rows of the range, and -2 - i the pending row i. */
    const int32_t *parents;   /* of each row; -1 = the last pending row */
    const int32_t *order;     /* [rows], those of a step side by side */
    const int32_t *ancestors; /* [rows][GRID] nodes that a row's step has not taken in, then NO_NODE */
    const int32_t *paths;     /* [][GRID] nodes */
    const Step *steps;
    const Save *saves;
    int32_t *has_run; /* set to 1 behind the pass */
    int64_t record_floats;
    int32_t num_pending, num_folded, num_steps, num_saves;
} StateRange;

typedef struct {
    int32_t rows, selected_rows, num_ranges;
    int32_t blocks_of_tables; /* in the tables of all ranges: those of the next memory begin so far behind */
    const Range *ranges;
    const int32_t *range_of_row; /* [rows] */
    const int32_t *block_tables;
    const uint8_t *masks;
    const int32_t *selected;   /* [selected_rows] */
    const float *const *cos, *const *sin; /* of each table: [rows, rotary half] */
    const Draw *draws;         /* [rankings, rows that are ranked]; NULL = nothing is drawn */
    const StateRange *states;  /* [num_ranges]; NULL = no layer has any */
    const PassAdapter *adapters; /* [num_adapters] */
    const int32_t *adapter_rows;
    const int32_t *row_order;      /* [rows] those of an adapter side by side */
    const int32_t *adapter_of_row; /* [rows] its number in `adapters`; -1 = none. Both are there for networks with experts alone */
    float *low_rank; /* [rows of adapters, or pairs of a row and an expert][low_rank_floats] */
    int32_t num_adapters, low_rank_floats;
} Pass;

typedef struct {
    const Operation *const *operations;
    int32_t num_operations, num_threads;
    float *const *buffers;
    float *packed;         /* packed_floats(rows, most_columns) */
    float *packed_rows;    /* per thread: packed_floats(1, most_columns) */
    float *const *scratch; /* per thread: paceline_attention_floats */
    uint8_t *const *planes; /* keys and then values of each layer, see kv_blocks.h */
    float *parts;          /* what splits of long contexts give, where there is room for it */
    int64_t parts_floats;
    int32_t kv_kind, most_columns; /* kv_kind: how keys and values are stored */
    int32_t *tickets; /* [PHASES * num_operations] */
    int64_t *taken;   /* [num_threads][taken_a_thread], see work.h */
    int64_t taken_a_thread;
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

/* What ROUTE leaves in its buffer, in int32 and floats. A pair is a row and an expert that it has chosen; pairs are in the order of their
 * experts, then of the adapters of their rows, then of these. */
typedef struct {
    int32_t *experts;    /* [rows][chosen], ascending */
    float *weights;      /* [rows][chosen] */
    int32_t *places;     /* [rows][chosen] the number of each pair */
    int32_t *rows;       /* [pairs] the row of each */
    int32_t *num_active; /* experts that any row has chosen */
    struct Active {
        int32_t expert, first, count; /* its pairs are [first, first + count) */
        int32_t packed;               /* packed rows of those before it */
    } *active; /* [num_active] */
} Routes;

Routes routes_of(float *buffer, int rows, int chosen);
void choose_experts(const RouteOperation *own, const float *logits, int32_t *experts, float *weights);
void sort_pairs(const RouteOperation *own, const Routes *routes, const int32_t *order, int rows);

void convolve(const StateRange *range, const ConvolutionOperation *own, int rows, int channel, int count, const float *x, float *out);
void prepare_gates(const StateOperation *own, const float *a, const float *b, float *work, float *record);
void prepare_keys(const StateRange *range, const StateOperation *own, int rows, int head, const float *x, float *work);
const float *ask_for_state_block(const StateRange *range, const StateOperation *own, int rows, int number, const float *x, float *out);
void run_state_block(const StateRange *range, const StateOperation *own, int rows, int number, const float *next, const float *x, float *work,
                     float *out, float *scratch);

#define PIECE_COLUMNS 4096
int pieces_of(int columns);
int32_t paceline_ranking_floats(int32_t columns, int32_t count);
void rank_piece(const RankOperation *ranking, const Draw *draw, const float *row, int number, float *out);
void join_pieces(const RankOperation *ranking, float *out);

void write_kv(const Program *program, const Pass *pass, const AttentionOperation *own, int row);

#endif
