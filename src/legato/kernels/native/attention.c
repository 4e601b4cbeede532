/* Paged attention with an online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018),
   in tiles as in FlashAttention (Dao et al., 2022): one kernel for decode and for chunks of prompts.

   The heads that share a K/V head, and the queries of a tile, are the rows of two small matrix products per block of
   KEYS keys, so each K and V is read from memory once for all of them. */
#include <stdlib.h>

#include "legato.h"
#include "parallel.h"
#include "simd.h"

#define KEYS 32      /* a block; K of one block, transposed, fits the first-level cache up to a head_dim of 256 */
#define MOST_HEADS 32 /* K/V heads that a thread takes at once */
#define MOST_ROWS 48 /* of a tile: what Q, scores and output take stays in the second-level cache */
#define ROWS 6       /* of a register tile */
#define FEW_ROWS 4   /* as in decoding */
#define KEYS_AT_ONCE 4
#define BLOCK_VECTORS (KEYS / LANES)
#define WIDTH_VECTORS (LANES == 16 ? 4 : 2) /* of V, per register tile */

typedef struct {
    const char *storage; /* row 0 of the layer's */
    const int64_t *block_table;
    int64_t page_size, block_rows, kv_width, head_dim;
    int bf16;
} Pages;

/* Where a block of keys lies: elements from row 0 to the first head's K, and to its V. */
typedef struct {
    int64_t count, key_at[KEYS], value_at[KEYS];
} Block;

typedef struct {
    float *query;  /* [rows][head_dim], scaled */
    float *scores; /* [rows][KEYS] */
    float *out;    /* [rows][head_dim] */
    float *keys;   /* [head_dim][KEYS] */
    float *most, *total;
} Tile;

INLINE int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

static void find_block(const Pages *p, int64_t first, int64_t last, Block *block) {
    int64_t page = first / p->page_size, offset = first % p->page_size;
    block->count = last - first + 1 < KEYS ? last - first + 1 : KEYS;
    for (int64_t i = 0; i < block->count; i++) {
        int64_t row = p->block_table[page] * p->block_rows + offset;
        block->key_at[i] = row * p->kv_width;
        block->value_at[i] = (row + p->page_size) * p->kv_width;
        if (++offset == p->page_size) {
            offset = 0;
            page++;
        }
    }
    for (int64_t i = block->count > 0 ? block->count : 0; i < KEYS; i++) { /* any: their scores are masked */
        block->key_at[i] = block->key_at[0];
        block->value_at[i] = block->value_at[0];
    }
}

/* Asks for one head's row of the block that is to come. Spread over the work on the present block, a row for each that is
   read, memory and arithmetic go on together, while many at once would wait for one another. */
INLINE void fetch_row(const void *base, int64_t at, int64_t head_dim, int bf16) {
    const char *row = (const char *)base + at * (bf16 ? 2 : 4);
    for (int64_t byte = 0; byte < head_dim * (bf16 ? 2 : 4); byte += 64) __builtin_prefetch(row + byte, 0, 2);
}

INLINE vf load_stored(const void *base, int64_t at, int bf16) {
    return bf16 ? load_bf16((const uint16_t *)base + at) : load((const float *)base + at);
}

INLINE void transpose_keys(
    const void *base, const int64_t *key_at, const int64_t *next_at, int64_t head_dim, int bf16, float *out) {
    for (int b = 0; b < BLOCK_VECTORS; b++) {
        const int64_t *at = key_at + b * LANES, *next = next_at + b * LANES;
        for (int64_t d = 0; d + LANES <= head_dim; d += LANES) {
            vf rows[LANES];
            UNROLL for (int i = 0; i < LANES; i++) rows[i] = load_stored(base, at[i] + d, bf16);
            UNROLL for (int i = 0; i < LANES; i++)
                __builtin_prefetch((const char *)base + (next[i] + d) * (bf16 ? 2 : 4), 0, 2);
            transpose(rows);
            UNROLL for (int i = 0; i < LANES; i++) store(out + (d + i) * KEYS + b * LANES, rows[i]);
        }
    }
    for (int64_t d = head_dim / LANES * LANES; d < head_dim; d++)
        for (int i = 0; i < KEYS; i++) {
            int64_t at = key_at[i] + d;
            out[d * KEYS + i] = bf16 ? from_bf16(((const uint16_t *)base)[at]) : ((const float *)base)[at];
        }
}

INLINE void score_rows(const float *query, const float *keys, int64_t head_dim, int rows, float *scores) {
    vf acc[ROWS][BLOCK_VECTORS] = {0};
    for (int64_t d = 0; d < head_dim; d++) {
        vf k[BLOCK_VECTORS];
        UNROLL for (int b = 0; b < BLOCK_VECTORS; b++) k[b] = load(keys + d * KEYS + b * LANES);
        UNROLL for (int r = 0; r < ROWS; r++) {
            if (r >= rows) break;
            vf q = splat(query[r * head_dim + d]);
            UNROLL for (int b = 0; b < BLOCK_VECTORS; b++) acc[r][b] += q * k[b];
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        if (r >= rows) break;
        UNROLL for (int b = 0; b < BLOCK_VECTORS; b++) store(scores + r * KEYS + b * LANES, acc[r][b]);
    }
}

static void score(const Tile *t, int64_t rows, int64_t head_dim) {
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS) score_rows(t->query + r * head_dim, t->keys, head_dim, ROWS, t->scores + r * KEYS);
    const float *query = t->query + r * head_dim;
    float *scores = t->scores + r * KEYS;
    switch (rows - r) {
    case 1: score_rows(query, t->keys, head_dim, 1, scores); break;
    case 2: score_rows(query, t->keys, head_dim, 2, scores); break;
    case 3: score_rows(query, t->keys, head_dim, 3, scores); break;
    case 4: score_rows(query, t->keys, head_dim, 4, scores); break;
    case 5: score_rows(query, t->keys, head_dim, 5, scores); break;
    }
}

/* Scores of few rows, each key's product with a query summed across its own lanes: to lay keys side by side first, as
   above, takes longer than all the rest when only few rows make use of it. head_dim is a multiple of LANES. */
INLINE void score_few_rows(
    const float *query, const void *base, const int64_t *key_at, const int64_t *next_at, int64_t head_dim, int rows,
    int bf16, float *scores) {
    for (int b = 0; b < KEYS; b += LANES) {
        vf sums[FEW_ROWS][LANES];
        for (int key = 0; key < LANES; key += KEYS_AT_ONCE) {
            const int64_t *at = key_at + b + key, *next = next_at + b + key;
            vf acc[FEW_ROWS][KEYS_AT_ONCE] = {0};
            for (int64_t d = 0; d < head_dim; d += LANES) {
                vf k[KEYS_AT_ONCE];
                UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++) {
                    k[i] = load_stored(base, at[i] + d, bf16);
                    __builtin_prefetch((const char *)base + (next[i] + d) * (bf16 ? 2 : 4), 0, 2);
                }
                UNROLL for (int r = 0; r < FEW_ROWS; r++) {
                    if (r >= rows) break;
                    vf q = load(query + r * head_dim + d);
                    UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++) acc[r][i] += q * k[i];
                }
            }
            UNROLL for (int r = 0; r < FEW_ROWS; r++) {
                if (r >= rows) break;
                UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++) sums[r][key + i] = acc[r][i];
            }
        }
        UNROLL for (int r = 0; r < FEW_ROWS; r++) {
            if (r >= rows) break;
            store(scores + r * KEYS + b, sum_each(sums[r]));
        }
    }
}

/* Masks, soft-caps and exponentiates one row's scores of a block, and rescales what the row has gathered so far. */
INLINE void soften_row(
    const Tile *t, int64_t row, int64_t first_visible, int64_t last_visible, float softcap, int64_t head_dim) {
    float *scores = t->scores + row * KEYS;
    vf s[BLOCK_VECTORS], most_lanes = splat(-INFINITY);
    const vi lane = EACH_LANE(SAME);
    int masked = first_visible > 0 || last_visible < KEYS - 1;
    UNROLL for (int b = 0; b < BLOCK_VECTORS; b++) {
        s[b] = load(scores + b * LANES);
        if (softcap > 0) s[b] = softcap * vtanh(s[b] / softcap);
        if (masked) {
            vi key = lane + b * LANES;
            vi visible = (key >= splat_int((int32_t)first_visible)) & (key <= splat_int((int32_t)last_visible));
            s[b] = pick(visible, s[b], splat(-INFINITY));
        }
        most_lanes = vmax(most_lanes, s[b]);
    }
    float before = t->most[row], most = largest(most_lanes);
    if (most > before) {
        float factor = expf(before - most);
        t->most[row] = most;
        t->total[row] *= factor;
        float *out = t->out + row * head_dim;
        int64_t d = 0;
        for (; d + LANES <= head_dim; d += LANES) store(out + d, load(out + d) * factor);
        for (; d < head_dim; d++) out[d] *= factor;
    } else {
        most = before;
    }
    vf total = splat(0);
    UNROLL for (int b = 0; b < BLOCK_VECTORS; b++) {
        vf weight = vexp(s[b] - most);
        total += weight;
        store(scores + b * LANES, weight);
    }
    t->total[row] += sum(total);
}

INLINE void gather_rows(
    const Tile *t, const void *base, const int64_t *value_at, int64_t row, int rows, int64_t d, int64_t head_dim,
    int64_t count, int bf16, int vectors, const int64_t *next_at) {
    vf acc[ROWS][WIDTH_VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++) {
        if (r >= rows) break;
        UNROLL for (int v = 0; v < WIDTH_VECTORS; v++) {
            if (v >= vectors) break;
            acc[r][v] = load(t->out + (row + r) * head_dim + d + v * LANES);
        }
    }
    for (int64_t key = 0; key < count; key++) {
        vf value[WIDTH_VECTORS];
        if (next_at) fetch_row(base, next_at[key], head_dim, bf16);
        UNROLL for (int v = 0; v < WIDTH_VECTORS; v++) {
            if (v >= vectors) break;
            value[v] = load_stored(base, value_at[key] + d + v * LANES, bf16);
        }
        UNROLL for (int r = 0; r < ROWS; r++) {
            if (r >= rows) break;
            vf weight = splat(t->scores[(row + r) * KEYS + key]);
            UNROLL for (int v = 0; v < WIDTH_VECTORS; v++) {
                if (v >= vectors) break;
                acc[r][v] += weight * value[v];
            }
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++) {
        if (r >= rows) break;
        UNROLL for (int v = 0; v < WIDTH_VECTORS; v++) {
            if (v >= vectors) break;
            store(t->out + (row + r) * head_dim + d + v * LANES, acc[r][v]);
        }
    }
}

INLINE void gather_width(
    const Tile *t, const void *base, const int64_t *value_at, const int64_t *next_at, int64_t row, int rows,
    int64_t head_dim, int64_t count, int bf16) {
    int64_t d = 0;
    if (row) next_at = NULL; /* once is enough */
    for (; d + WIDTH_VECTORS * LANES <= head_dim; d += WIDTH_VECTORS * LANES, next_at = NULL)
        gather_rows(t, base, value_at, row, rows, d, head_dim, count, bf16, WIDTH_VECTORS, next_at);
    for (; d + LANES <= head_dim; d += LANES, next_at = NULL)
        gather_rows(t, base, value_at, row, rows, d, head_dim, count, bf16, 1, next_at);
    for (; d < head_dim; d++)
        for (int r = 0; r < rows; r++) {
            float total = t->out[(row + r) * head_dim + d];
            for (int64_t key = 0; key < count; key++) {
                int64_t at = value_at[key] + d;
                float value = bf16 ? from_bf16(((const uint16_t *)base)[at]) : ((const float *)base)[at];
                total += t->scores[(row + r) * KEYS + key] * value;
            }
            t->out[(row + r) * head_dim + d] = total;
        }
}

INLINE void gather(
    const Tile *t, const void *base, const int64_t *value_at, const int64_t *next_at, int64_t rows, int64_t head_dim,
    int64_t count, int bf16) {
    int64_t r = 0;
    for (; r + ROWS <= rows; r += ROWS) gather_width(t, base, value_at, next_at, r, ROWS, head_dim, count, bf16);
    switch (rows - r) {
    case 1: gather_width(t, base, value_at, next_at, r, 1, head_dim, count, bf16); break;
    case 2: gather_width(t, base, value_at, next_at, r, 2, head_dim, count, bf16); break;
    case 3: gather_width(t, base, value_at, next_at, r, 3, head_dim, count, bf16); break;
    case 4: gather_width(t, base, value_at, next_at, r, 4, head_dim, count, bf16); break;
    case 5: gather_width(t, base, value_at, next_at, r, 5, head_dim, count, bf16); break;
    }
}

/* What one head's queries gather from a block. Row = query × group + head of the group. */
INLINE void attend_to_block(
    const Tile *t, const void *storage, const Block *block, const Block *next, int64_t queries, int64_t group,
    int64_t last_visible, int64_t window, float softcap, int64_t head_dim, int bf16) {
    int64_t rows = queries * group;
    const int64_t *at = block->key_at, *next_at = next->key_at;
    if (head_dim % LANES == 0 && rows <= FEW_ROWS) {
        switch (rows) {
        case 1: score_few_rows(t->query, storage, at, next_at, head_dim, 1, bf16, t->scores); break;
        case 2: score_few_rows(t->query, storage, at, next_at, head_dim, 2, bf16, t->scores); break;
        case 3: score_few_rows(t->query, storage, at, next_at, head_dim, 3, bf16, t->scores); break;
        case 4: score_few_rows(t->query, storage, at, next_at, head_dim, 4, bf16, t->scores); break;
        }
    } else {
        transpose_keys(storage, at, next_at, head_dim, bf16, t->keys);
        score(t, rows, head_dim);
    }
    for (int64_t query = 0; query < queries; query++, last_visible++) {
        int64_t first_visible = window > 0 ? last_visible - window + 1 : 0;
        for (int64_t head = 0; head < group; head++)
            soften_row(t, query * group + head, first_visible, last_visible, softcap, head_dim);
    }
    gather(t, storage, block->value_at, next->value_at, rows, head_dim, block->count, bf16);
}

INLINE int64_t first_visible_key(int64_t position, int64_t window) {
    return window > 0 && position - window + 1 > 0 ? position - window + 1 : 0;
}

/* Queries at positions position .. position + queries - 1; K/V heads first_head .. first_head + heads - 1, `group` heads
   each. All heads go over a block before the next: their K and V lie side by side in memory. `following` is the block that
   this thread is likely to go on with. */
static void attend(
    const Tile *tiles, const Pages *p, int64_t position, int64_t queries, int64_t group, int64_t first_head,
    int64_t heads, int64_t window, float softcap, const Block *following) {
    int64_t last_key = position + queries - 1, first_key = first_visible_key(position, window), size = p->bf16 ? 2 : 4;
    Block blocks[2];
    find_block(p, first_key, last_key, &blocks[0]);
    for (int64_t key = first_key, i = 0; key <= last_key; key += KEYS, i ^= 1) {
        const Block *block = &blocks[i], *next = following;
        if (key + KEYS <= last_key) {
            find_block(p, key + KEYS, last_key, &blocks[i ^ 1]);
            next = &blocks[i ^ 1];
        }
        for (int64_t h = 0; h < heads; h++) {
            const char *storage = p->storage + (first_head + h) * p->head_dim * size;
            int64_t last_visible = position - key;
            if (p->bf16)
                attend_to_block(
                    &tiles[h], storage, block, next, queries, group, last_visible, window, softcap, p->head_dim, 1);
            else
                attend_to_block(
                    &tiles[h], storage, block, next, queries, group, last_visible, window, softcap, p->head_dim, 0);
        }
    }
}

static void load_queries(
    const Tile *t, const float *query, int64_t stride, int64_t queries, int64_t group, int64_t head_dim, float scaling) {
    for (int64_t i = 0; i < queries; i++)
        for (int64_t x = 0; x < group * head_dim; x++)
            t->query[i * group * head_dim + x] = query[i * stride + x] * scaling;
    memset(t->out, 0, queries * group * head_dim * sizeof(float));
    for (int64_t row = 0; row < queries * group; row++) {
        t->most[row] = -1e30f; /* finite: a difference with a masked score's -inf must not be NaN */
        t->total[row] = 0;
    }
}

static void finish(
    const Tile *t, int64_t queries, int64_t group, int64_t head_dim, const float *sinks, float *out, int64_t stride) {
    for (int64_t row = 0; row < queries * group; row++) {
        float total = t->total[row], factor = 1;
        if (sinks) {
            float sink = sinks[row % group], most = t->most[row] > sink ? t->most[row] : sink;
            factor = expf(t->most[row] - most);
            total = total * factor + expf(sink - most);
        }
        const float *from = t->out + row * head_dim;
        float *to = out + row / group * stride + row % group * head_dim;
        for (int64_t d = 0; d < head_dim; d++) to[d] = from[d] * (factor / total);
    }
}

static int64_t tile_floats(int64_t rows, int64_t head_dim) { return 2 * rows * (round_up(head_dim, 16) + 16); }

static int64_t shared_floats(int64_t rows, int64_t head_dim) { return KEYS * (rows + round_up(head_dim, 16)); }

/* For `heads` K/V heads of `rows` rows each, one after the other; they use the same scores and keys in turn. */
static void lay_out_tiles(Tile *tiles, int64_t heads, int64_t rows, int64_t head_dim, float *memory) {
    int64_t width = round_up(head_dim, 16);
    float *shared = memory + heads * tile_floats(rows, head_dim);
    for (int64_t h = 0; h < heads; h++) {
        float *own = memory + h * tile_floats(rows, head_dim);
        tiles[h] = (Tile){
            .query = own,
            .out = own + rows * width,
            .most = own + 2 * rows * width,
            .total = own + 2 * rows * width + rows,
            .scores = shared,
            .keys = shared + rows * KEYS,
        };
    }
}

/* `queries` tokens of a request, from its `first` of this pass on. */
typedef struct {
    int64_t request, first, queries;
} Item;

static Item *cut_into_items(const int64_t *cu_seqlens_q, int64_t requests, int64_t most_queries, int64_t *count) {
    int64_t total = 0;
    for (int64_t i = 0; i < requests; i++)
        total += (cu_seqlens_q[i + 1] - cu_seqlens_q[i] + most_queries - 1) / most_queries;
    Item *items = malloc((total + 1) * sizeof(Item)), *item = items;
    *count = total;
    if (!items) return NULL;
    for (int64_t i = 0; i < requests; i++) {
        int64_t tokens = cu_seqlens_q[i + 1] - cu_seqlens_q[i];
        for (int64_t first = 0; first < tokens; first += most_queries)
            *item++ = (Item){i, first, tokens - first < most_queries ? tokens - first : most_queries};
    }
    return items;
}

/* How the work is divided. */
typedef struct {
    const Attention *attention;
    const Item *items;
    int64_t num_chunks, threads, heads_at_once, tile_rows, thread_floats;
    float *memory; /* thread_floats for each thread */
} Work;

/* Some K/V heads of one item. */
typedef struct {
    Item item;
    int64_t first_head, token, position; /* the first query's */
    Pages pages;
} Part;

static Part part_of(const Work *w, int64_t chunk) {
    const Attention *a = w->attention;
    int64_t parts = a->num_kv_heads / w->heads_at_once;
    Item item = w->items[chunk / parts];
    int64_t token = a->cu_seqlens_q[item.request] + item.first;
    return (Part){
        .item = item,
        .first_head = chunk % parts * w->heads_at_once,
        .token = token,
        .position = a->seqused_k[item.request] - (a->cu_seqlens_q[item.request + 1] - token),
        .pages = {a->cache, a->block_table + item.request * a->table_stride, a->page_size, a->block_rows,
                  a->num_kv_heads * a->head_dim, a->head_dim, (int)a->bf16},
    };
}

/* Where a part begins to read, as seen from the first head of another. */
static void find_first_block(const Attention *a, const Part *part, int64_t first_head, Block *block) {
    int64_t last_key = part->position + part->item.queries - 1;
    find_block(&part->pages, first_visible_key(part->position, a->window), last_key, block);
    for (int i = 0; i < KEYS; i++) {
        block->key_at[i] += (part->first_head - first_head) * a->head_dim;
        block->value_at[i] += (part->first_head - first_head) * a->head_dim;
    }
}

static void attention_chunk(const void *arguments, int64_t chunk, int64_t thread) {
    const Work *w = arguments;
    const Attention *a = w->attention;
    int64_t heads = w->heads_at_once, group = a->num_heads / a->num_kv_heads, head_dim = a->head_dim;
    Part part = part_of(w, chunk), next = part_of(w, lesser(chunk + w->threads, w->num_chunks - 1));
    int64_t queries = part.item.queries, first_query = part.first_head * group;
    Tile tiles[MOST_HEADS] = {0};
    Block following;
    find_first_block(a, &next, part.first_head, &following);
    lay_out_tiles(tiles, heads, w->tile_rows, head_dim, w->memory + thread * w->thread_floats);
    for (int64_t h = 0; h < heads; h++) {
        const float *query = a->query + part.token * a->query_stride + (first_query + h * group) * head_dim;
        load_queries(&tiles[h], query, a->query_stride, queries, group, head_dim, a->scaling);
    }
    attend(
        tiles, &part.pages, part.position, queries, group, part.first_head, heads, a->window, a->softcap, &following);
    for (int64_t h = 0; h < heads; h++) {
        float *out = a->out + part.token * a->out_stride + (first_query + h * group) * head_dim;
        const float *sinks = a->sinks ? a->sinks + first_query + h * group : NULL;
        finish(&tiles[h], queries, group, head_dim, sinks, out, a->out_stride);
    }
}

/* No more than any request has: what decoding needs fits a near cache, and malloc need not ask the system for it. */
static int64_t tile_queries(const int64_t *cu_seqlens_q, int64_t requests, int64_t group) {
    int64_t most = group < MOST_ROWS ? MOST_ROWS / group : 1, longest = 1;
    for (int64_t i = 0; i < requests; i++) {
        int64_t count = cu_seqlens_q[i + 1] - cu_seqlens_q[i];
        longest = count > longest ? count : longest;
    }
    return most < longest ? most : longest;
}

/* All, if that leaves every thread something to do. */
static int64_t heads_at_once(const Pool *pool, int64_t num_items, int64_t num_kv_heads) {
    int64_t heads = num_kv_heads;
    while (heads > 1 && (heads > MOST_HEADS || num_items * (num_kv_heads / heads) < 4 * num_threads(pool))) {
        do heads--;
        while (num_kv_heads % heads);
    }
    return heads;
}

EXPORT int64_t legato_attention(Pool *pool, const Attention *a) {
    int64_t group = a->num_heads / a->num_kv_heads, num_items;
    int64_t most_queries = tile_queries(a->cu_seqlens_q, a->requests, group), tile_rows = most_queries * group;
    Item *items = cut_into_items(a->cu_seqlens_q, a->requests, most_queries, &num_items);
    int64_t heads = heads_at_once(pool, num_items, a->num_kv_heads);
    int64_t thread_floats = heads * tile_floats(tile_rows, a->head_dim) + shared_floats(tile_rows, a->head_dim);
    float *memory = aligned_alloc(64, round_up(num_threads(pool) * thread_floats * sizeof(float), 64));
    if (items && memory) {
        int64_t chunks = num_items * (a->num_kv_heads / heads);
        Work work = {a, items, chunks, num_threads(pool), heads, tile_rows, thread_floats, memory};
        run_chunks(pool, chunks, attention_chunk, &work);
    }
    int64_t failed = !items || !memory;
    free(items);
    free(memory);
    return failed;
}
