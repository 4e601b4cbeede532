/* The C interface of Legato's CPU kernels: pointers and sizes, no headers of torch, so that one build serves every torch.

   Every kernel takes the pool whose threads share its work and one struct of arguments, and returns 0, or 1 if there is no
   memory for it: so a pass can be written down as a list of calls and run as one (replay.c). Floats are float32 unless it
   says otherwise; strides count elements from one row to the next. `calls.py` has the same structs on Python's side. */
#ifndef LEGATO_H
#define LEGATO_H

#include <stdint.h>

enum { LEGATO_SILU = 0, LEGATO_GELU_TANH = 1, LEGATO_GELU = 2 };

/* How a matrix is packed: [columns / 32][depth ...][32 ...], zeros past its edges; columns are its outputs. */
enum {
    LEGATO_FLOAT32 = 0,  /* [columns / 32][depth][32] */
    LEGATO_BFLOAT16 = 1, /* [columns / 32][depth / 2][32][2], depth rounded up to 32 */
    LEGATO_INT8 = 2,     /* [columns / 32][depth / 4][32][4], depth rounded up to 64 */
};

/* out [rows][columns] = x [rows][depth] × weights + bias.

   For LEGATO_INT8 libraries with tiles round x to 16 bits with a scale a row, by vectors too. If `gated`, weights are twice as many columns, 32 of the gate and
   32 to be gated in turn, and out = activation(gate) × the other; column_scales and bias are in the order of the weights. */
typedef struct {
    int64_t kind, by_tiles;
    const float *x;
    int64_t x_stride, rows, depth;
    const void *weights;
    const float *column_scales, *bias; /* [columns]; the first for LEGATO_INT8 only, the second may be NULL */
    int64_t columns;
    float *out;
    int64_t out_stride, gated, activation;
} Linear;

/* out = x / sqrt(mean(x²) + eps) × weight */
typedef struct {
    const float *x;
    int64_t x_stride;
    const float *weight; /* [width] */
    int64_t rows, width;
    float *out;
    int64_t out_stride;
    float eps;
} Norm;

/* residual += scale × x, or scale × norm(x) if there is a post_weight; then out = norm(residual) if there is a weight. */
typedef struct {
    float *residual;
    int64_t residual_stride;
    const float *x;
    int64_t x_stride;
    const float *post_weight, *weight;
    int64_t rows, width;
    float *out;
    int64_t out_stride;
    float scale, eps;
} AddNorm;

/* Norms and turns Q, in its place in qkv, and K, which goes to the cache as V does. */
typedef struct {
    float *qkv;
    int64_t qkv_stride, tokens, num_heads, num_kv_heads, head_dim;
    const float *query_weight, *key_weight; /* NULL: no norm */
    int64_t norm_width;                     /* head_dim, or 0: one norm over all heads */
    const int64_t *position_ids;            /* [tokens] */
    const float *cosines, *sines;           /* [positions][half], or NULL */
    int64_t half;
    const int64_t *key_rows, *value_rows; /* [tokens] */
    void *cache;
    int64_t bf16; /* whether the cache is */
    float eps;
} Rotation;

typedef struct {
    const float *query; /* first in the rows of qkv */
    int64_t query_stride, num_heads, num_kv_heads, head_dim;
    const void *cache; /* row 0 of the layer's */
    int64_t bf16, page_size, block_rows;
    const int64_t *block_table; /* [requests][pages] */
    int64_t table_stride;
    const int64_t *cu_seqlens_q, *seqused_k;
    int64_t requests, window; /* 0: no window */
    const float *sinks;       /* [num_heads], or NULL */
    float *out;               /* [tokens][num_heads × head_dim] */
    int64_t out_stride;
    float scaling, softcap; /* 0: no softcap */
} Attention;

/* Each row's likeliest token, the first of those that tie; NaN is likelier than anything. */
typedef struct {
    const float *logits;
    int64_t stride, rows, vocab;
    int64_t *tokens; /* [rows] */
} Argmax;

/* A token for each row, drawn by a random key. The filters follow one another as
   they are listed. A temperature of 0 takes the likeliest token and none of them, and so does a row whose largest logit is
   no finite number. */
typedef struct {
    const float *logits;
    int64_t stride, rows, vocab;
    const float *temperature;                 /* [rows], as all below */
    const int64_t *top_k;                     /* 0: none */
    const float *top_p, *min_p, *typical_p;   /* 1, 0 and 1: none */
    const uint64_t *keys;
    const uint8_t *wants_logprob;
    int64_t *tokens;
    double *logprobs; /* after temperature and filters, of the rows that want it; NaN where there is nothing to compute with */
} Sampling;

/* -inf, in place, for the tokens of some rows that must not come. */
typedef struct {
    float *logits;
    int64_t stride, vocab, count;
    const int64_t *rows;  /* [count] */
    const uint8_t *masks; /* [count][mask_bytes], bit i of a row, from the lowest, says whether token i may come */
    int64_t mask_bytes;
    uint8_t *any; /* [count], whether any may */
} Forbidding;

#endif
