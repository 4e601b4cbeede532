/* What the ways to multiply by a packed matrix have in common. */
#ifndef LEGATO_LINEAR_H
#define LEGATO_LINEAR_H

#include <math.h>
#include <stdint.h>

#include "legato.h"
#include "parallel.h"

#define PANEL 32
#define FETCH_AHEAD 8192 /* bytes; the next panel lies behind this one */

/* A `Linear` and how the work on it is divided. */
typedef struct {
    Linear of;         /* if gated, `out` is a thread's `lines` while it works */
    int64_t threads;   /* that share the panels */
    void *scratch;     /* x cut in pieces, `scratch_bytes`, once or once for each thread */
    float *row_scales; /* [rows], in the scratch, what 1 stands for in a row of x; for LEGATO_INT8 in pieces */
    char *prepared;    /* [threads], whether a thread's scratch is filled; NULL if all share one */
    float *lines;      /* [threads][rows][2 × PANEL], what is to be gated */
} Product;

void multiply_by_vectors(Pool *pool, const Product *p);

/* linear_amx.c */
void multiply_in_pieces(Pool *pool, const Product *p);
int64_t scratch_bytes(const Linear *of);
float *row_scales_in(const Linear *of, void *scratch);

/* Panels that a thread finishes before the next, side by side in the weights. */
static inline int64_t panels_together(const Product *p) { return p->of.gated ? 2 : 1; }

static inline int64_t num_bundles(const Product *p) { return (p->of.columns + PANEL - 1) / PANEL; }

/* Chunks are runs of bundles. */
static inline int64_t num_chunks(const Product *p) { return num_factored_chunks(num_bundles(p), p->threads); }

static inline Range panels_of_chunk(const Product *p, int64_t chunk) {
    Range bundles = factored_chunk(num_bundles(p), p->threads, chunk);
    return (Range){bundles.first * panels_together(p), bundles.end * panels_together(p)};
}

static inline int64_t padded_depth(int64_t kind, int64_t depth) {
    int64_t step = kind == LEGATO_INT8 ? 64 : kind == LEGATO_BFLOAT16 ? 32 : 1;
    return (depth + step - 1) / step * step;
}

static inline const char *panel_of(const Product *p, int64_t column) {
    int64_t bytes = p->of.kind == LEGATO_FLOAT32 ? 4 : p->of.kind == LEGATO_BFLOAT16 ? 2 : 1;
    return (const char *)p->of.weights + column / PANEL * PANEL * padded_depth(p->of.kind, p->of.depth) * bytes;
}

/* Where an element of the product goes, with `column` counted in the weights' order. */
static inline float *place_of(const Product *p, int64_t row, int64_t column) {
    return p->of.out + row * p->of.out_stride + (p->of.gated ? column % (2 * PANEL) : column);
}

/* Columns from `column` on that are to be written; the weights of what is gated are padded in every bundle. */
static inline int64_t columns_from(const Product *p, int64_t column) {
    return p->of.gated ? PANEL : p->of.columns - column;
}

/* Scales, adds the bias, and stores what of `line` lies inside the matrix. */
static inline void finish_line(const Product *p, int64_t row, int64_t column, int64_t count, const float *line) {
    float *out = place_of(p, row, column);
    const float *bias = p->of.bias ? p->of.bias + column : NULL;
    if (count > columns_from(p, column)) count = columns_from(p, column);
    if (p->of.kind == LEGATO_INT8) {
        const float *scales = p->of.column_scales + column;
        float scale = p->row_scales ? p->row_scales[row] : 1.0f;
        for (int64_t i = 0; i < count; i++) out[i] = line[i] * scale * scales[i] + (bias ? bias[i] : 0.0f);
    } else if (bias) {
        for (int64_t i = 0; i < count; i++) out[i] = line[i] + bias[i];
    } else {
        for (int64_t i = 0; i < count; i++) out[i] = line[i];
    }
}

/* What a thread works with: its own lines, to be gated. */
static inline Product with_lines(const Product *p, int64_t thread) {
    Product own = *p;
    if (p->of.gated) {
        own.of.out = p->lines + thread * p->of.rows * 2 * PANEL;
        own.of.out_stride = 2 * PANEL;
    }
    return own;
}

/* Gates rows first .. end - 1 of the panels `panel` and the one before, which lie in a thread's lines. */
void gate_rows(const Product *p, const Product *own, int64_t panel, int64_t first, int64_t end);

#endif
