/* What a gate lets through. */
#ifndef ACTIVATION_H
#define ACTIVATION_H

#include "legato.h"
#include "simd.h"

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

/* out = activation(gate) × up, `width` elements. */
INLINE void gate_line(const float *gate, const float *up, int64_t width, int64_t activation, float *out) {
    int64_t i = 0;
    if (activation != LEGATO_GELU) /* the error function has no vector form here */
        for (; i + LANES <= width; i += LANES) store(out + i, activated(load(gate + i), activation) * load(up + i));
    for (; i < width; i++) out[i] = activated_one(gate[i], activation) * up[i];
}

#endif
