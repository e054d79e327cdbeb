/* Products of rows with a packed weight. */
#ifndef TERCET_LINEAR_H
#define TERCET_LINEAR_H

#include "pool.h"

#define PANEL 32
/* Columns c and c + HALF of a panel are a pair: the two halves of a word in bfloat16, a gate and its up column. */
#define HALF (PANEL / 2)
/* Most panels of a chunk. */
#define MAX_GROUP 4

/* A weight is kept as one of narrow.h, and computes in float32: the narrow ones widen to it exactly; or as this one, see
 * linear_int8.c. */
enum { INT8 = 3 };

/* What becomes of a product. GATED_*: a panel holds 16 gate columns and the 16 up columns of the same places, and the
 * result is activation(gate) * up, half as wide. */
enum { PLAIN = 0, GATED_SILU = 1, GATED_GELU_TANH = 2 };

typedef struct {
    long inputs;  /* K */
    long outputs; /* N, with GATED_* the columns of gate and up together */
    long kind;
    long finish;
    const void *panels; /* [ceil(N / 32), K, 32]; columns beyond N are zeros */
    const float *bias;  /* [N] in the order of the panels' columns, or NULL */
} Linear;

/* x [rows, K], rows x_stride apart, to out [rows, N or N / 2], rows out_stride apart. Returns 0, or -1 without memory. */
int linear_run(Pool *pool, const Linear *linear, const float *x, long x_stride, long rows, float *out, long out_stride);

/* The column of the weight that stands at place c of a panel, or -1. */
long linear_column_at(const Linear *linear, long panel, int c);

/* Panels a chunk, so that the busiest thread has as little as can be. */
long linear_panels_a_chunk(long panels, long threads);

int linear_int8_run(Pool *pool, const Linear *linear, const float *x, long x_stride, long rows, float *out,
                    long out_stride);
int linear_int8_pack(Pool *pool, const Linear *linear, const float *weight, long row_stride, long column_stride);

#endif
