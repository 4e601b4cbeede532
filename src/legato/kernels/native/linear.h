/* What the ways to multiply by a packed matrix have in common. */
#ifndef LEGATO_LINEAR_H
#define LEGATO_LINEAR_H

#include <math.h>
#include <stdint.h>

#include "legato.h"
#include "parallel.h"

#define PANEL 32

typedef struct {
    int kind;
    const float *x;
    int64_t x_stride, rows, depth;
    const void *weights;
    const float *column_scales, *bias;
    int64_t columns;
    float *out;
    int64_t out_stride;
    void *scratch;
    float *row_scales;    /* [rows], in the scratch; for LEGATO_INT8 */
    int64_t chunk_panels; /* that a thread takes at once */
} Product;

void multiply_by_vectors(Pool *pool, const Product *p);
void multiply_by_tiles(Pool *pool, const Product *p);

static inline int64_t num_chunks(const Product *p) {
    int64_t columns = p->chunk_panels * PANEL;
    return (p->columns + columns - 1) / columns;
}

static inline int64_t padded_depth(int64_t kind, int64_t depth) {
    int64_t step = kind == LEGATO_INT8 ? 64 : kind == LEGATO_BFLOAT16 ? 32 : 1;
    return (depth + step - 1) / step * step;
}

static inline const char *panel_of(const Product *p, int64_t column) {
    int64_t bytes = p->kind == LEGATO_FLOAT32 ? 4 : p->kind == LEGATO_BFLOAT16 ? 2 : 1;
    return (const char *)p->weights + column / PANEL * PANEL * padded_depth(p->kind, p->depth) * bytes;
}

static inline int64_t row_scale_bytes(int64_t kind, int64_t rows) {
    return kind == LEGATO_INT8 ? (rows * 4 + 63) / 64 * 64 : 0;
}

/* Tiles take whole tiles of 16 rows: three bfloat16 pieces of a float each, or an int8; vectors an int8 as a float.
   `PackedMatrix.scratch_bytes` in packing.py promises no less. */
static inline int64_t scratch_bytes(int64_t kind, int64_t rows, int64_t depth) {
    if (kind == LEGATO_FLOAT32) return 0;
    int64_t elements = (rows + 15) / 16 * 16 * padded_depth(kind, depth);
    return elements * (kind == LEGATO_BFLOAT16 ? 6 : 4) + row_scale_bytes(kind, rows);
}

/* So that the largest of a row becomes 127. */
static inline float row_scale(const float *x, int64_t depth) {
    float most = 0;
    for (int64_t k = 0; k < depth; k++) {
        float size = fabsf(x[k]);
        most = size > most ? size : most;
    }
    return most / 127.0f;
}

/* Scales, adds the bias, and stores what of `line` lies inside the matrix. */
static inline void finish_line(const Product *p, int64_t row, int64_t column, int64_t count, const float *line) {
    float *out = p->out + row * p->out_stride + column;
    if (column + count > p->columns) count = p->columns - column;
    if (p->kind == LEGATO_INT8) {
        float scale = p->row_scales[row];
        for (int64_t i = 0; i < count; i++)
            out[i] = line[i] * scale * p->column_scales[column + i] + (p->bias ? p->bias[column + i] : 0.0f);
    } else if (p->bias) {
        for (int64_t i = 0; i < count; i++) out[i] = line[i] + p->bias[column + i];
    } else {
        for (int64_t i = 0; i < count; i++) out[i] = line[i];
    }
}

#endif
