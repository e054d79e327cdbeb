/* Products of rows with a packed weight. */
#ifndef TERCET_LINEAR_H
#define TERCET_LINEAR_H

#include "pool.h"

/* How a weight is kept. The first three compute in float32: the narrow ones widen to it exactly. */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

/* What becomes of a product. GATED_*: a panel holds 16 gate columns and the 16 up columns of the same places, and the
 * result is activation(gate) * up, half as wide. */
enum { PLAIN = 0, GATED_SILU = 1, GATED_GELU_TANH = 2 };

typedef struct {
    long inputs;        /* K */
    long outputs;       /* N, with GATED_* the columns of gate and up together */
    long kind;
    long finish;
    const void *panels; /* [ceil(N / 32), K, 32]; columns beyond N are zeros */
    const float *bias;  /* [N] in the order of the panels' columns, or NULL */
} Linear;

#endif
