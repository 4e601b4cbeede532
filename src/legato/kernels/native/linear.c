/* out = x × weight + bias in float32, with weights stored as float32, bfloat16 or int8 in panels of 32 columns.

   Few rows are bound by the weights' way from memory, so those are stored as small as they are exact, and widened in
   registers. A panel is one run of memory: a register tile of rows × columns goes down it, row by row of the panel. */
#include <stdlib.h>

#include "activation.h"
#include "legato.h"
#include "linear.h"
#include "parallel.h"
#include "simd.h"

#define COLUMNS (2 * LANES) /* of a register tile */
#if LANES == 16
#define ROWS 12
#elif LANES == 8
#define ROWS 5
#else
#define ROWS 4
#endif
#define OWN_SCRATCH_BYTES 655360 /* of x cut by each thread for itself: see linear_amx.c */
#define CHUNK_ELEMENTS 262144 /* of x that a panel meets before the next: they stay in the second-level cache */

/* acc += x[rows][depth] × panel, for COLUMNS columns. */
INLINE void multiply_float32(
    const float *x, int64_t x_stride, const float *panel, int64_t depth, int rows, vf acc[ROWS][2]) {
    for (int64_t k = 0; k < depth; k++, panel += PANEL) {
        vf w0 = load(panel), w1 = load(panel + LANES);
        UNROLL for (int r = 0; r < ROWS; r++) {
            if (r >= rows) break;
            vf value = splat(x[r * x_stride + k]);
            acc[r][0] += value * w0;
            acc[r][1] += value * w1;
        }
    }
}

/* With few rows two sums run side by side: a multiply-add waits four cycles for the one before it. */
INLINE void multiply_bfloat16(
    const float *x, int64_t x_stride, const uint16_t *panel, int64_t depth, int rows, vf acc[ROWS][2]) {
    vf odd[ROWS][2] = {0};
    const vu upper = (vu)splat_int((int32_t)0xffff0000u);
    int64_t k = 0;
    for (; k + 2 <= depth; k += 2, panel += 2 * PANEL) {
        if (rows <= 4) {
            __builtin_prefetch((const char *)panel + FETCH_AHEAD, 0, 1);
            __builtin_prefetch((const char *)panel + FETCH_AHEAD + 64, 0, 1);
        }
        vu pair0 = load_u32(panel), pair1 = load_u32(panel + 2 * LANES);
        vf low0 = as_float(pair0 << 16), low1 = as_float(pair1 << 16);
        vf high0 = as_float(pair0 & upper), high1 = as_float(pair1 & upper);
        UNROLL for (int r = 0; r < ROWS; r++) {
            if (r >= rows) break;
            vf even_x = splat(x[r * x_stride + k]), odd_x = splat(x[r * x_stride + k + 1]);
            acc[r][0] += even_x * low0;
            acc[r][1] += even_x * low1;
            if (rows <= 3) {
                odd[r][0] += odd_x * high0;
                odd[r][1] += odd_x * high1;
            } else {
                acc[r][0] += odd_x * high0;
                acc[r][1] += odd_x * high1;
            }
        }
    }
    if (k < depth) {
        vf low0 = as_float(load_u32(panel) << 16), low1 = as_float(load_u32(panel + 2 * LANES) << 16);
        UNROLL for (int r = 0; r < ROWS; r++) {
            if (r >= rows) break;
            vf value = splat(x[r * x_stride + k]);
            acc[r][0] += value * low0;
            acc[r][1] += value * low1;
        }
    }
    if (rows <= 3)
        UNROLL for (int r = 0; r < ROWS; r++) {
            if (r >= rows) break;
            acc[r][0] += odd[r][0];
            acc[r][1] += odd[r][1];
        }
}

INLINE void multiply_int8(
    const float *x, int64_t x_stride, const int8_t *panel, int64_t depth, int rows, vf acc[ROWS][2]) {
    for (int64_t k = 0; k < depth; k += 4, panel += 4 * PANEL) {
        int64_t count = depth - k < 4 ? depth - k : 4;
        vi four0 = (vi)load_u32(panel), four1 = (vi)load_u32(panel + 4 * LANES);
        for (int64_t i = 0; i < count; i++) {
            int left = (int)(24 - 8 * i);
            vf w0 = __builtin_convertvector((four0 << left) >> 24, vf);
            vf w1 = __builtin_convertvector((four1 << left) >> 24, vf);
            UNROLL for (int r = 0; r < ROWS; r++) {
                if (r >= rows) break;
                vf value = splat(x[r * x_stride + k + i]);
                acc[r][0] += value * w0;
                acc[r][1] += value * w1;
            }
        }
    }
}

INLINE void store_tile(const Product *p, int64_t row, int64_t column, int rows, vf acc[ROWS][2]) {
    UNROLL for (int r = 0; r < ROWS; r++) {
        if (r >= rows) break;
        float line[COLUMNS];
        store(line, acc[r][0]);
        store(line + LANES, acc[r][1]);
        finish_line(p, row + r, column, COLUMNS, line);
    }
}

INLINE void tile(const Product *p, const float *x, int64_t x_stride, int64_t row, int64_t column, int rows) {
    vf acc[ROWS][2] = {0};
    const char *panel = panel_of(p, column);
    int64_t inside = column % PANEL;
    if (p->of.kind == LEGATO_FLOAT32)
        multiply_float32(x, x_stride, (const float *)panel + inside, p->of.depth, rows, acc);
    else if (p->of.kind == LEGATO_BFLOAT16)
        multiply_bfloat16(x, x_stride, (const uint16_t *)panel + 2 * inside, p->of.depth, rows, acc);
    else
        multiply_int8(x, x_stride, (const int8_t *)panel + 4 * inside, p->of.depth, rows, acc);
    store_tile(p, row, column, rows, acc);
}

/* What is left of a chunk goes down the panel again, from the nearest cache, in tiles of which there are few kinds: each
   is code of its own. */
static void column_tile(const Product *p, const float *x, int64_t x_stride, int64_t row, int64_t column, int64_t rows) {
    for (int64_t done; rows > 0; rows -= done, row += done, x += done * x_stride) {
        done = rows >= ROWS ? ROWS : rows >= 8 && ROWS > 8 ? 8 : rows >= 4 ? 4 : rows;
        switch (done) {
        case 1: tile(p, x, x_stride, row, column, 1); break;
        case 2: tile(p, x, x_stride, row, column, 2); break;
        case 3: tile(p, x, x_stride, row, column, 3); break;
        case 4: tile(p, x, x_stride, row, column, 4); break;
#if ROWS > 8
        case 8: tile(p, x, x_stride, row, column, 8); break;
#endif
        default: tile(p, x, x_stride, row, column, ROWS);
        }
    }
}

void gate_rows(const Product *p, const Product *own, int64_t panel, int64_t first, int64_t end) {
    int64_t column = panel / 2 * PANEL, count = p->of.columns - column < PANEL ? p->of.columns - column : PANEL;
    for (int64_t row = first; row < end; row++) {
        const float *line = own->of.out + row * own->of.out_stride;
        gate_line(line, line + PANEL, count, p->of.activation, p->of.out + row * p->of.out_stride + column);
    }
}

static void vectors_chunk(const void *arguments, int64_t chunk, int64_t thread) {
    const Product *p = arguments;
    Product own = with_lines(p, thread);
    const float *x = p->of.x;
    int64_t x_stride = p->of.x_stride;
    int64_t most_rows = CHUNK_ELEMENTS / p->of.depth / ROWS * ROWS;
    if (most_rows < ROWS) most_rows = ROWS;
    Range panels = panels_of_chunk(p, chunk);
    for (int64_t row = 0; row < p->of.rows; row += most_rows) {
        int64_t rows = p->of.rows - row < most_rows ? p->of.rows - row : most_rows;
        for (int64_t panel = panels.first; panel < panels.end; panel++) {
            int64_t column = panel * PANEL, end = column + lesser(PANEL, columns_from(p, column));
            for (; column < end; column += COLUMNS) column_tile(&own, x + row * x_stride, x_stride, row, column, rows);
            if (p->of.gated && panel % 2) gate_rows(p, &own, panel, row, row + rows);
        }
    }
}

void multiply_by_vectors(Pool *pool, const Product *p) { run_chunks(pool, num_chunks(p), vectors_chunk, p); }

/* Whether there is a product of this kind by tiles. */
EXPORT int64_t legato_linear_has_tiles(int64_t kind) {
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
    return kind != LEGATO_FLOAT32;
#else
    (void)kind;
    return 0;
#endif
}

EXPORT int64_t legato_linear(Pool *pool, const Linear *of) {
    int64_t threads = num_threads(pool), bytes = 0, copies = 1;
    int64_t line_floats = of->gated ? threads * of->rows * 2 * PANEL : 0;
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
    int in_pieces = of->by_tiles || of->kind == LEGATO_INT8;
    if (in_pieces) {
        bytes = scratch_bytes(of);
        copies = bytes <= OWN_SCRATCH_BYTES ? threads : 1;
    }
#endif
    char *memory = aligned_alloc(64, (bytes * copies + line_floats * 4 + threads + 63) / 64 * 64);
    if (!memory) return 1;
    Product p = {.of = *of, .threads = threads, .scratch = memory, .lines = (float *)(memory + bytes * copies)};
    if (copies > 1) p.prepared = memset(p.lines + line_floats, 0, threads);
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
    if (in_pieces) {
        p.row_scales = row_scales_in(of, memory);
        multiply_in_pieces(pool, &p);
        free(memory);
        return 0;
    }
#endif
    multiply_by_vectors(pool, &p);
    free(memory);
    return 0;
}
