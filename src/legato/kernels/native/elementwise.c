/* Norms, rotary embedding with the write to the cache, and gated activations: what goes token by token. */
#include "legato.h"
#include "parallel.h"
#include "simd.h"

/* A chunk of fewer elements costs more to hand over than it takes to do. */
#define CHUNK_ELEMENTS 8192

/* Rows of a chunk. */
INLINE int64_t chunk_rows(const Pool *pool, int64_t rows, int64_t width) {
    int64_t least = CHUNK_ELEMENTS / width;
    return chunk_size(pool, rows, least > 0 ? least : 1);
}

INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE float inverse_root_mean_square(const float *x, int64_t width, float eps) {
    vf squares = splat(0);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        vf v = load(x + i);
        squares += v * v;
    }
    float total = sum(squares);
    for (; i < width; i++) total += x[i] * x[i];
    return 1.0f / sqrtf(total / (float)width + eps);
}

INLINE void scale_by(const float *x, float factor, const float *weight, int64_t width, float *out) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < width; i++) out[i] = x[i] * factor * weight[i];
}

INLINE void norm_row(const float *x, const float *weight, int64_t width, float eps, float *out) {
    scale_by(x, inverse_root_mean_square(x, width, eps), weight, width, out);
}

typedef struct {
    const float *x;
    int64_t x_stride;
    const float *weight;
    float eps;
    int64_t rows, width;
    float *out;
    int64_t out_stride, chunk;
} Norm;

static void norm_chunk(const void *arguments, int64_t chunk, int64_t thread) {
    const Norm *n = arguments;
    (void)thread;
    for (int64_t row = chunk * n->chunk; row < lesser((chunk + 1) * n->chunk, n->rows); row++)
        norm_row(n->x + row * n->x_stride, n->weight, n->width, n->eps, n->out + row * n->out_stride);
}

EXPORT void legato_rms_norm(
    Pool *pool, const float *x, int64_t x_stride, const float *weight, float eps, int64_t rows, int64_t width,
    float *out, int64_t out_stride) {
    int64_t chunk = chunk_rows(pool, rows, width);
    Norm norm = {x, x_stride, weight, eps, rows, width, out, out_stride, chunk};
    run_chunks(pool, (rows + chunk - 1) / chunk, norm_chunk, &norm);
}

typedef struct {
    float *residual;
    int64_t residual_stride;
    const float *x;
    int64_t x_stride;
    float scale;
    const float *post_weight, *weight;
    float eps;
    int64_t rows, width;
    float *out;
    int64_t out_stride, chunk;
} AddNorm;

INLINE void add_norm_row(const AddNorm *a, int64_t row) {
    float *residual = a->residual + row * a->residual_stride;
    const float *x = a->x + row * a->x_stride, *post_weight = a->post_weight;
    float factor = a->scale;
    if (post_weight) factor *= inverse_root_mean_square(x, a->width, a->eps);
    int64_t i = 0;
    for (; i + LANES <= a->width; i += LANES) {
        vf added = load(x + i) * factor;
        if (post_weight) added *= load(post_weight + i);
        store(residual + i, load(residual + i) + added);
    }
    for (; i < a->width; i++) residual[i] += x[i] * factor * (post_weight ? post_weight[i] : 1.0f);
    if (a->weight) norm_row(residual, a->weight, a->width, a->eps, a->out + row * a->out_stride);
}

static void add_norm_chunk(const void *arguments, int64_t chunk, int64_t thread) {
    const AddNorm *a = arguments;
    (void)thread;
    for (int64_t row = chunk * a->chunk; row < lesser((chunk + 1) * a->chunk, a->rows); row++) add_norm_row(a, row);
}

/* residual += scale × x, or scale × norm(x) if there is a post_weight; then out = norm(residual) if there is a weight. */
EXPORT void legato_add_norm(
    Pool *pool, float *residual, int64_t residual_stride, const float *x, int64_t x_stride, float scale,
    const float *post_weight, const float *weight, float eps, int64_t rows, int64_t width, float *out,
    int64_t out_stride) {
    int64_t chunk = chunk_rows(pool, rows, width);
    AddNorm all = {residual, residual_stride, x, x_stride, scale, post_weight, weight, eps, rows, width, out, out_stride,
                   chunk};
    run_chunks(pool, (rows + chunk - 1) / chunk, add_norm_chunk, &all);
}

/* Pairs (x[i], x[i + half]) turned by the angle whose cosine and sine are cos[i] and sin[i]. */
INLINE void rotate(float *x, const float *cosine, const float *sine, int64_t half) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] - b * sine[i];
        x[half + i] = b * cosine[i] + a * sine[i];
    }
}

INLINE void prepare_heads(
    float *heads, int64_t count, int64_t head_dim, const float *weight, int64_t norm_width, float eps,
    const float *cosine, const float *sine, int64_t half) {
    if (weight && norm_width == head_dim)
        for (int64_t h = 0; h < count; h++)
            norm_row(heads + h * head_dim, weight, head_dim, eps, heads + h * head_dim);
    else if (weight)
        norm_row(heads, weight, count * head_dim, eps, heads);
    if (cosine)
        for (int64_t h = 0; h < count; h++) rotate(heads + h * head_dim, cosine, sine, half);
}

INLINE void write_row(void *cache, int64_t row, const float *values, int64_t width, int bf16) {
    if (!bf16) {
        memcpy((float *)cache + row * width, values, width * sizeof(float));
        return;
    }
    uint16_t *out = (uint16_t *)cache + row * width;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store_bf16(out + i, load(values + i));
    for (; i < width; i++) out[i] = to_bf16(values[i]);
}

typedef struct {
    float *qkv;
    int64_t qkv_stride, tokens, num_heads, num_kv_heads, head_dim;
    const float *query_weight, *key_weight;
    int64_t norm_width;
    float eps;
    const int64_t *position_ids;
    const float *cosines, *sines;
    int64_t half;
    const int64_t *key_rows, *value_rows;
    void *cache;
    int bf16;
    int64_t chunk;
} Rotation;

INLINE void rotate_and_store_token(const Rotation *r, int64_t token) {
    int64_t kv_width = r->num_kv_heads * r->head_dim;
    float *query = r->qkv + token * r->qkv_stride;
    float *key = query + r->num_heads * r->head_dim, *value = key + kv_width;
    const float *cosine = r->cosines ? r->cosines + r->position_ids[token] * r->half : NULL;
    const float *sine = r->cosines ? r->sines + r->position_ids[token] * r->half : NULL;
    prepare_heads(query, r->num_heads, r->head_dim, r->query_weight, r->norm_width, r->eps, cosine, sine, r->half);
    prepare_heads(key, r->num_kv_heads, r->head_dim, r->key_weight, r->norm_width, r->eps, cosine, sine, r->half);
    write_row(r->cache, r->key_rows[token], key, kv_width, r->bf16);
    write_row(r->cache, r->value_rows[token], value, kv_width, r->bf16);
}

static void rotation_chunk(const void *arguments, int64_t chunk, int64_t thread) {
    const Rotation *r = arguments;
    (void)thread;
    for (int64_t token = chunk * r->chunk; token < lesser((chunk + 1) * r->chunk, r->tokens); token++)
        rotate_and_store_token(r, token);
}

/* Norm weights and cosines may be NULL. */
EXPORT void legato_rotate_and_store(
    Pool *pool, float *qkv, int64_t qkv_stride, int64_t tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
    const float *query_weight, const float *key_weight, int64_t norm_over_all_heads, float eps,
    const int64_t *position_ids, const float *cosines, const float *sines, int64_t half, const int64_t *key_rows,
    const int64_t *value_rows, void *cache, int64_t bf16) {
    int64_t chunk = chunk_rows(pool, tokens, (num_heads + 2 * num_kv_heads) * head_dim);
    Rotation all = {qkv, qkv_stride, tokens, num_heads, num_kv_heads, head_dim, query_weight, key_weight,
                    norm_over_all_heads ? 0 : head_dim, eps, position_ids, cosines, sines, half, key_rows, value_rows,
                    cache, (int)bf16, chunk};
    run_chunks(pool, (tokens + chunk - 1) / chunk, rotation_chunk, &all);
}

INLINE vf activated(vf x, int64_t activation) {
    if (activation == LEGATO_SILU) return x / (1.0f + vexp(-x));
    vf inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + vtanh(inner));
}

INLINE float activated_one(float x, int64_t activation) {
    if (activation == LEGATO_SILU) return x / (1.0f + expf(-x));
    if (activation == LEGATO_GELU) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

typedef struct {
    const float *gate_up;
    int64_t gate_up_stride, rows, width, activation;
    float *out;
    int64_t out_stride, chunk;
} Gated;

INLINE void gated_row(const Gated *g, int64_t row) {
    const float *gate = g->gate_up + row * g->gate_up_stride, *up = gate + g->width;
    float *out = g->out + row * g->out_stride;
    int64_t i = 0;
    if (g->activation != LEGATO_GELU) /* the error function has no vector form here */
        for (; i + LANES <= g->width; i += LANES) store(out + i, activated(load(gate + i), g->activation) * load(up + i));
    for (; i < g->width; i++) out[i] = activated_one(gate[i], g->activation) * up[i];
}

static void gated_chunk(const void *arguments, int64_t chunk, int64_t thread) {
    const Gated *g = arguments;
    (void)thread;
    for (int64_t row = chunk * g->chunk; row < lesser((chunk + 1) * g->chunk, g->rows); row++) gated_row(g, row);
}

EXPORT void legato_gated(
    Pool *pool, const float *gate_up, int64_t gate_up_stride, int64_t rows, int64_t width, int64_t activation,
    float *out, int64_t out_stride) {
    int64_t chunk = chunk_rows(pool, rows, width);
    Gated all = {gate_up, gate_up_stride, rows, width, activation, out, out_stride, chunk};
    run_chunks(pool, (rows + chunk - 1) / chunk, gated_chunk, &all);
}
