/* Norms, and rotary embedding with the write to the cache: what goes token by token. */
#include "legato.h"
#include "parallel.h"
#include "simd.h"

/* A chunk of fewer elements costs more to hand over than it takes to do. */
#define CHUNK_ELEMENTS 8192

/* Some rows of what a kernel was called for. */
typedef struct {
    const void *arguments;
    int64_t chunk_rows;
} Rows;

/* All rows, `width` elements each, in chunks. */
static int64_t run_rows(Pool *pool, int64_t rows, int64_t width, Task task, const void *arguments) {
    int64_t least = CHUNK_ELEMENTS / width, chunk_rows = chunk_size(pool, rows, least > 0 ? least : 1);
    Rows all = {arguments, chunk_rows};
    run_chunks(pool, (rows + chunk_rows - 1) / chunk_rows, task, &all);
    return 0;
}

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

static void norm_chunk(const void *arguments, int64_t chunk, int64_t thread) {
    const Rows *r = arguments;
    const Norm *n = r->arguments;
    (void)thread;
    for (int64_t row = chunk * r->chunk_rows; row < lesser((chunk + 1) * r->chunk_rows, n->rows); row++)
        norm_row(n->x + row * n->x_stride, n->weight, n->width, n->eps, n->out + row * n->out_stride);
}

EXPORT int64_t legato_rms_norm(Pool *pool, const Norm *n) { return run_rows(pool, n->rows, n->width, norm_chunk, n); }

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
    const Rows *r = arguments;
    const AddNorm *a = r->arguments;
    (void)thread;
    for (int64_t row = chunk * r->chunk_rows; row < lesser((chunk + 1) * r->chunk_rows, a->rows); row++)
        add_norm_row(a, row);
}

EXPORT int64_t legato_add_norm(Pool *pool, const AddNorm *a) {
    return run_rows(pool, a->rows, a->width, add_norm_chunk, a);
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

INLINE void rotate_and_store_token(const Rotation *r, int64_t token) {
    int64_t kv_width = r->num_kv_heads * r->head_dim;
    float *query = r->qkv + token * r->qkv_stride;
    float *key = query + r->num_heads * r->head_dim, *value = key + kv_width;
    const float *cosine = r->cosines ? r->cosines + r->position_ids[token] * r->half : NULL;
    const float *sine = r->cosines ? r->sines + r->position_ids[token] * r->half : NULL;
    prepare_heads(query, r->num_heads, r->head_dim, r->query_weight, r->norm_width, r->eps, cosine, sine, r->half);
    prepare_heads(key, r->num_kv_heads, r->head_dim, r->key_weight, r->norm_width, r->eps, cosine, sine, r->half);
    write_row(r->cache, r->key_rows[token], key, kv_width, (int)r->bf16);
    write_row(r->cache, r->value_rows[token], value, kv_width, (int)r->bf16);
}

static void rotation_chunk(const void *arguments, int64_t chunk, int64_t thread) {
    const Rows *rows = arguments;
    const Rotation *r = rows->arguments;
    (void)thread;
    for (int64_t token = chunk * rows->chunk_rows; token < lesser((chunk + 1) * rows->chunk_rows, r->tokens); token++)
        rotate_and_store_token(r, token);
}

EXPORT int64_t legato_rotate_and_store(Pool *pool, const Rotation *r) {
    return run_rows(pool, r->tokens, (r->num_heads + 2 * r->num_kv_heads) * r->head_dim, rotation_chunk, r);
}
