/* The C interface of Legato's CPU kernels: pointers and sizes, no headers of torch, so that one build serves every torch.

   Floats are float32 unless a parameter says otherwise. Strides count elements from one row to the next. All
   functions share their work with the threads of the pool they are given. Python's side, with what each argument means, is `library.py`. */
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

#endif
