/* The products of linear.c in AMX tiles, for processors that have them.

   bfloat16 weights times float32 activations, as exactly as in float32: a float is the sum of three bfloat16 (its 24
   bits cut in three), products of two bfloat16 are exact in float32, and the tiles add in float32. Three passes of the
   tile unit still are several times faster than one of the vector units.

   int8 weights take activations as whole numbers of 16 bits, by tiles or, where rows are few, by vectors. */
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#include <immintrin.h>

#include "legato.h"
#include "linear.h"
#include "parallel.h"
#include "simd.h"

#define TILE_ROWS 16
#define TILE_BYTES 1024
#define PIECES 3
#define INT8_PIECES 2
#define INT8_ROWS 4 /* that vectors take at once */
#define PIECE 254 /* an upper piece of int8 counts as many as a lower one has values: -127 to 127 */
#define STEP_LINES 33 /* cache lines of 2 KiB of weights, to be fetched in two, three or four portions */
#define CHUNK_BYTES (1 << 20) /* of cut activations that all panels meet in turn: they stay in the second-level cache */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t columns[16];
    uint8_t rows[16];
} TileConfig;

/* All eight tiles 16 rows of 64 bytes, but those of activations and sums no more than there are rows: the unit's work grows
   with them. Tile 7 always holds weights, and 6 does where there are rows enough for pairs. */
static void configure_tiles(int64_t tile_rows) {
    TileConfig config __attribute__((aligned(64))) = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.columns[i] = 64;
        config.rows[i] = (uint8_t)(i == 7 ? TILE_ROWS : tile_rows);
    }
    __asm__ volatile("" ::: "memory"); /* the intrinsic does not say that it reads all of it */
    _tile_loadconfig(&config);
}

INLINE int64_t tiles_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

INLINE void store_upper_halves(uint16_t *to, vf low, vf high) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)low, 16)));
    _mm256_storeu_si256((__m256i *)(to + 16), _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)high, 16)));
}

INLINE vf upper_half(vf x) { return (vf)((vu)x & 0xffff0000u); }

/* Rows of a tile of activations. */
INLINE int64_t tile_rows(const Product *p) { return p->of.rows < TILE_ROWS ? p->of.rows : TILE_ROWS; }

INLINE int64_t pieces_of(int64_t kind) { return kind == LEGATO_INT8 ? INT8_PIECES : PIECES; }

/* In all pieces. */
INLINE int64_t row_tile_bytes(const Product *p) {
    int64_t size = p->of.kind == LEGATO_INT8 ? 1 : 2;
    return tile_rows(p) * padded_depth(p->of.kind, p->of.depth) * size * pieces_of(p->of.kind);
}

static int64_t row_scale_bytes(const Linear *of) { return of->kind == LEGATO_INT8 ? (of->rows * 4 + 63) / 64 * 64 : 0; }

int64_t scratch_bytes(const Linear *of) {
    int64_t elements = (of->rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * padded_depth(of->kind, of->depth);
    return elements * (of->kind == LEGATO_INT8 ? 1 : 2) * pieces_of(of->kind) + row_scale_bytes(of);
}

float *row_scales_in(const Linear *of, void *scratch) {
    return (float *)((char *)scratch + scratch_bytes(of) - row_scale_bytes(of));
}

/* One row of a tile: 32 floats into three pieces, each piece a tile of `rows` rows further. */
INLINE void cut(const float *x, uint16_t *to, int64_t rows) {
    vf low = load(x), high = load(x + 16);
    for (int piece = 0; piece < PIECES; piece++) {
        vf low_piece = upper_half(low), high_piece = upper_half(high);
        store_upper_halves(to + piece * rows * 32, low_piece, high_piece);
        low -= low_piece;
        high -= high_piece;
    }
}

/* A row tile of x: [depth / 32][pieces][tile rows][32]. */
static void cut_tile(const Product *p, int64_t tile) {
    int64_t steps = padded_depth(LEGATO_BFLOAT16, p->of.depth) / 32, rows = tile_rows(p);
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = tile * TILE_ROWS + r;
        uint16_t *to = (uint16_t *)((char *)p->scratch + tile * row_tile_bytes(p)) + r * 32;
        const float *x = p->of.x + row * p->of.x_stride;
        for (int64_t step = 0; step < steps; step++, to += PIECES * rows * 32) {
            int64_t count = row < p->of.rows ? p->of.depth - step * 32 : 0;
            if (count >= 32) {
                cut(x + step * 32, to, rows);
            } else {
                float line[32] = {0};
                if (count > 0) memcpy(line, x + step * 32, count * sizeof(float));
                cut(line, to, rows);
            }
        }
    }
}

/* The first 16 of `count` floats at x, with zeros for what is missing. */
INLINE __m512 up_to_16(const float *x, int64_t count) {
    return _mm512_maskz_loadu_ps(count >= 16 ? 0xffff : count > 0 ? (1u << count) - 1 : 0, x);
}

/* What 1 stands for when the largest of a row is 127 × PIECE, 16 bits in all. Floats without sign are in the order of their
   bits, and what is no number is above all others: it makes the whole row none. */
static float row_scale(const float *x, int64_t depth) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t k = 0; k < depth; k += 16)
        most = _mm512_max_epi32(most, _mm512_castps_si512(_mm512_abs_ps(up_to_16(x + k, depth - k))));
    int32_t bits = _mm512_reduce_max_epi32(most);
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    return largest / (127.0f * PIECE);
}

/* A row tile of x in whole numbers of 16 bits, in two pieces: [depth / 64][upper, lower][tile rows][64]. */
static void round_tile(const Product *p, int64_t tile) {
    int64_t steps = padded_depth(LEGATO_INT8, p->of.depth) / 64, rows = tile_rows(p);
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = tile * TILE_ROWS + r;
        int8_t *to = (int8_t *)p->scratch + tile * row_tile_bytes(p) + r * 64;
        const float *x = p->of.x + row * p->of.x_stride;
        float scale = row < p->of.rows ? row_scale(x, p->of.depth) : 0, inverse = scale > 0 ? 1 / scale : 0;
        if (row < p->of.rows) p->row_scales[row] = scale;
        for (int64_t step = 0; step < steps; step++, to += INT8_PIECES * rows * 64)
            for (int64_t k = 0; k < 64; k += 16) {
                int64_t count = row < p->of.rows ? p->of.depth - step * 64 - k : 0;
                __m512 values = up_to_16(x + step * 64 + k, count);
                values = _mm512_roundscale_ps(_mm512_mul_ps(values, _mm512_set1_ps(inverse)), 0);
                __m512i upper = _mm512_cvtps_epi32(_mm512_mul_ps(values, _mm512_set1_ps(1.0f / PIECE)));
                __m512i lower = _mm512_sub_epi32(
                    _mm512_cvtps_epi32(values), _mm512_mullo_epi32(upper, _mm512_set1_epi32(PIECE)));
                _mm_storeu_si128((__m128i *)(to + k), _mm512_cvtsepi32_epi8(upper));
                _mm_storeu_si128((__m128i *)(to + rows * 64 + k), _mm512_cvtsepi32_epi8(lower));
            }
    }
}

static void prepare_tile(const void *arguments, int64_t tile, int64_t thread) {
    const Product *p = arguments;
    (void)thread;
    if (p->of.kind == LEGATO_INT8)
        round_tile(p, tile);
    else
        cut_tile(p, tile);
}

INLINE void finish_tile(const Product *p, int64_t row, int64_t column, const float tile[TILE_ROWS][16]) {
    int64_t rows = p->of.rows - row < TILE_ROWS ? p->of.rows - row : TILE_ROWS;
    if (p->of.kind == LEGATO_INT8 || p->of.bias || columns_from(p, column) < 16) {
        for (int64_t r = 0; r < rows; r++) finish_line(p, row + r, column, 16, tile[r]);
        return;
    }
    for (int64_t r = 0; r < rows; r++) store(place_of(p, row + r, column), load(tile[r]));
}

/* Tiles 0 to 3. */
INLINE void zero_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

INLINE void store_sums(float tile[4][TILE_ROWS][16]) {
    _tile_stored(0, tile[0], 64);
    _tile_stored(1, tile[1], 64);
    _tile_stored(2, tile[2], 64);
    _tile_stored(3, tile[3], 64);
}

/* The panel that comes next, fetched a little with every step of this one, so that memory never rests. */
typedef struct {
    const char *next;
    int64_t lines_per_step;
} Fetch;

#define FETCH_LINES(fetch, lines, hint) \
    for (int64_t line = 0; line < (lines); line++, (fetch).next += 64) _mm_prefetch((fetch).next, hint)

/* 32 rows × 32 columns: four sums, to which all three pieces are added. */
static void bfloat16_pair(
    const Product *p, const char *x, int64_t x_bytes, const char *panel, int64_t row, int64_t column, Fetch fetch) {
    int64_t steps = padded_depth(LEGATO_BFLOAT16, p->of.depth) / 32;
    zero_sums();
    for (int64_t step = 0; step < steps; step++, panel += 2 * TILE_BYTES) {
        _tile_loadd(6, panel, 2 * 64);
        _tile_loadd(7, panel + 64, 2 * 64);
        for (int piece = 0; piece < PIECES; piece++, x += TILE_BYTES) {
            _tile_loadd(4, x, 64);
            _tile_loadd(5, x + x_bytes, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            FETCH_LINES(fetch, fetch.lines_per_step / 3, _MM_HINT_T0);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    float tile[4][TILE_ROWS][16] __attribute__((aligned(64)));
    store_sums(tile);
    for (int i = 0; i < 4; i++) finish_tile(p, row + i / 2 * TILE_ROWS, column + i % 2 * 16, tile[i]);
}

/* 16 rows × 32 columns: two sums for each half, so that none waits for itself; x is loaded once for both. */
static void bfloat16_single(
    const Product *p, const char *x, const char *panel, int64_t row, int64_t column, Fetch fetch) {
    int64_t steps = padded_depth(LEGATO_BFLOAT16, p->of.depth) / 32, piece = tile_rows(p) * 64;
    zero_sums();
    for (int64_t step = 0; step < steps; step++, panel += 2 * TILE_BYTES, x += PIECES * piece) {
        int64_t lines = fetch.lines_per_step / 4; /* at a time: many at once would hold up the loads after them */
        _tile_loadd(7, panel, 2 * 64);
        FETCH_LINES(fetch, lines, _MM_HINT_T0);
        _tile_loadd(4, x, 64);
        _tile_dpbf16ps(0, 4, 7);
        FETCH_LINES(fetch, lines, _MM_HINT_T0);
        _tile_loadd(5, x + piece, 64);
        _tile_dpbf16ps(1, 5, 7);
        _tile_loadd(6, x + 2 * piece, 64);
        _tile_dpbf16ps(0, 6, 7);
        _tile_loadd(7, panel + 64, 2 * 64);
        FETCH_LINES(fetch, lines, _MM_HINT_T0);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
        FETCH_LINES(fetch, lines, _MM_HINT_T0);
        _tile_dpbf16ps(2, 6, 7);
    }
    float tile[4][TILE_ROWS][16] __attribute__((aligned(64)));
    store_sums(tile);
    for (int half = 0; half < 2; half++) {
        for (int r = 0; r < tile_rows(p); r++)
            store(tile[2 * half][r], load(tile[2 * half + 1][r]) + load(tile[2 * half][r]));
        finish_tile(p, row, column + 16 * half, tile[2 * half]);
    }
}

/* A sum of upper pieces and one of lower ones put together. */
INLINE vf whole(__m512i upper, __m512i lower) {
    return (vf)_mm512_fmadd_ps(_mm512_cvtepi32_ps(upper), _mm512_set1_ps(PIECE), _mm512_cvtepi32_ps(lower));
}

/* The same: sums of the upper and of the lower pieces for each half. */
static void int8_single(
    const Product *p, const char *x, const char *panel, int64_t row, int64_t column, Fetch fetch) {
    int64_t steps = padded_depth(LEGATO_INT8, p->of.depth) / 64, piece = tile_rows(p) * 64;
    zero_sums();
    for (int64_t step = 0; step < steps; step++, panel += 2 * TILE_BYTES, x += INT8_PIECES * piece) {
        _tile_loadd(4, x, 64);
        _tile_loadd(5, x + piece, 64);
        _tile_loadd(7, panel, 2 * 64);
        FETCH_LINES(fetch, fetch.lines_per_step / 2, _MM_HINT_T0);
        _tile_dpbssd(0, 4, 7);
        _tile_dpbssd(1, 5, 7);
        _tile_loadd(7, panel + 64, 2 * 64);
        FETCH_LINES(fetch, fetch.lines_per_step / 2, _MM_HINT_T0);
        _tile_dpbssd(2, 4, 7);
        _tile_dpbssd(3, 5, 7);
    }
    float tile[4][TILE_ROWS][16] __attribute__((aligned(64)));
    store_sums(tile);
    for (int half = 0; half < 2; half++) {
        for (int r = 0; r < tile_rows(p); r++)
            store(tile[2 * half][r], whole(_mm512_loadu_si512(tile[2 * half][r]), _mm512_loadu_si512(tile[2 * half + 1][r])));
        finish_tile(p, row, column + 16 * half, tile[2 * half]);
    }
}

/* As many times the sum of 64 whole numbers of each step. */
INLINE __m512i minus_128_sums(const char *x, int64_t step_bytes, int64_t steps) {
    __m512i sums = _mm512_setzero_si512();
    for (int64_t step = 0; step < steps; step++, x += step_bytes)
        sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), _mm512_loadu_si512(x));
    return _mm512_set1_epi32(-128 * _mm512_reduce_add_epi32(sums));
}

/* `rows` rows of a tile × 32 columns by vectors, for rows too few to fill a tile. The sums are whole numbers, so these are
   the tiles' own, bit by bit: what a request computes does not depend on how many others there are. The instruction wants
   one side without sign, so 128 is added to the weights, and what that adds is taken off again from the start. */
INLINE void int8_rows(
    const Product *p, const char *x, const char *panel, int64_t row, int64_t column, int rows, Fetch fetch) {
    int64_t steps = padded_depth(LEGATO_INT8, p->of.depth) / 64, piece = tile_rows(p) * 64;
    __m512i upper[INT8_ROWS][2], lower[INT8_ROWS][2];
    UNROLL for (int r = 0; r < rows; r++) {
        upper[r][0] = upper[r][1] = minus_128_sums(x + r * 64, INT8_PIECES * piece, steps);
        lower[r][0] = lower[r][1] = minus_128_sums(x + piece + r * 64, INT8_PIECES * piece, steps);
    }
    for (int64_t step = 0; step < steps; step++, x += INT8_PIECES * piece)
        for (int four = 0; four < 64; four += 4, panel += 4 * PANEL) {
            if (four % 8 == 0) FETCH_LINES(fetch, fetch.lines_per_step / 8, _MM_HINT_T0);
            __m512i w0 = _mm512_xor_si512(_mm512_loadu_si512(panel), _mm512_set1_epi8(-128));
            __m512i w1 = _mm512_xor_si512(_mm512_loadu_si512(panel + 64), _mm512_set1_epi8(-128));
            UNROLL for (int r = 0; r < rows; r++) {
                int32_t high, low;
                memcpy(&high, x + r * 64 + four, 4);
                memcpy(&low, x + piece + r * 64 + four, 4);
                upper[r][0] = _mm512_dpbusd_epi32(upper[r][0], w0, _mm512_set1_epi32(high));
                upper[r][1] = _mm512_dpbusd_epi32(upper[r][1], w1, _mm512_set1_epi32(high));
                lower[r][0] = _mm512_dpbusd_epi32(lower[r][0], w0, _mm512_set1_epi32(low));
                lower[r][1] = _mm512_dpbusd_epi32(lower[r][1], w1, _mm512_set1_epi32(low));
            }
        }
    UNROLL for (int r = 0; r < rows; r++) {
        float line[PANEL];
        store(line, whole(upper[r][0], lower[r][0]));
        store(line + 16, whole(upper[r][1], lower[r][1]));
        finish_line(p, row + r, column, PANEL, line);
    }
}

/* A row tile × 32 columns by vectors. */
static void int8_vectors(
    const Product *p, const char *x, const char *panel, int64_t row, int64_t column, Fetch fetch) {
    int64_t end = lesser(row + TILE_ROWS, p->of.rows);
    for (; end - row >= INT8_ROWS; row += INT8_ROWS, x += INT8_ROWS * 64, fetch.lines_per_step = 0)
        int8_rows(p, x, panel, row, column, INT8_ROWS, fetch);
    switch (end - row) {
    case 1: int8_rows(p, x, panel, row, column, 1, fetch); break;
    case 2: int8_rows(p, x, panel, row, column, 2, fetch); break;
    case 3: int8_rows(p, x, panel, row, column, 3, fetch); break;
    }
}

/* One panel for the row tiles first .. last - 1. */
static void panel_rows(const Product *p, int64_t panel, int64_t first, int64_t last, int64_t x_bytes, Fetch fetch) {
    int64_t column = panel * PANEL;
    const char *weights = panel_of(p, column), *x = (const char *)p->scratch + first * x_bytes;
    int64_t at_once = p->of.kind == LEGATO_INT8 ? 1 : 2;
    int64_t pass_bytes = padded_depth(p->of.kind, p->of.depth) / (at_once == 1 ? 64 : 32) * fetch.lines_per_step * 64;
    for (int64_t tile = first; tile < last; tile += at_once, x += at_once * x_bytes, fetch.next += pass_bytes) {
        int64_t row = tile * TILE_ROWS;
        if (p->of.kind == LEGATO_INT8 && !p->of.by_tiles)
            int8_vectors(p, x, weights, row, column, fetch);
        else if (p->of.kind == LEGATO_INT8)
            int8_single(p, x, weights, row, column, fetch);
        else if (tile + 1 < last)
            bfloat16_pair(p, x, x_bytes, weights, row, column, fetch);
        else
            bfloat16_single(p, x, weights, row, column, fetch);
    }
}

static Fetch fetch_after(const Product *p, int64_t panel, int64_t end, int64_t row_tiles) {
    /* A step goes 2 KiB down the panel, which each pass over it does once. */
    int64_t passes = p->of.kind == LEGATO_INT8 ? row_tiles : tiles_of(row_tiles, 2);
    if (passes == 1) return (Fetch){panel_of(p, panel * PANEL) + FETCH_AHEAD, STEP_LINES};
    int64_t lines = panel + 1 < end ? tiles_of(STEP_LINES, 3 * passes) * 3 : 0;
    return (Fetch){panel_of(p, (panel + 1) * PANEL), lines};
}

/* Few rows are cut, or rounded, by each thread for itself: that takes less time than to get them from another's cache. */
static Product of_thread(const Product *p, int64_t thread) {
    Product own = with_lines(p, thread);
    if (!p->prepared) return own;
    own.scratch = (char *)p->scratch + thread * scratch_bytes(&p->of);
    own.row_scales = row_scales_in(&p->of, own.scratch);
    if (!p->prepared[thread]) {
        for (int64_t tile = 0; tile < tiles_of(p->of.rows, TILE_ROWS); tile++) prepare_tile(&own, tile, thread);
        p->prepared[thread] = 1;
    }
    return own;
}

static void pieces_chunk(const void *arguments, int64_t chunk, int64_t thread) {
    const Product *p = arguments;
    Product own = of_thread(p, thread);
    int64_t row_tiles = tiles_of(p->of.rows, TILE_ROWS), x_bytes = row_tile_bytes(p);
    int64_t most_tiles = CHUNK_BYTES / x_bytes / 2 * 2;
    if (most_tiles < 2) most_tiles = 2;
    Range panels = panels_of_chunk(p, chunk);
    if (p->of.by_tiles) configure_tiles(tile_rows(p));
    for (int64_t first = 0; first < row_tiles; first += most_tiles) {
        int64_t last = lesser(first + most_tiles, row_tiles);
        for (int64_t panel = panels.first; panel < panels.end; panel++) {
            panel_rows(&own, panel, first, last, x_bytes, fetch_after(p, panel, panels.end, last - first));
            if (p->of.gated && panel % 2)
                gate_rows(p, &own, panel, first * TILE_ROWS, lesser(last * TILE_ROWS, p->of.rows));
        }
    }
    if (p->of.by_tiles) _tile_release(); /* the system need not save them any more */
}

void multiply_in_pieces(Pool *pool, const Product *p) {
    if (!p->prepared) run_chunks(pool, tiles_of(p->of.rows, TILE_ROWS), prepare_tile, p);
    run_chunks(pool, num_chunks(p), pieces_chunk, p);
}
#endif
