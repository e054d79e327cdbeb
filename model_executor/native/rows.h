/* What is done to each token by itself. */
#ifndef TERCET_ROWS_H
#define TERCET_ROWS_H

#include <stdint.h>

#include "pool.h"

typedef struct {
    float *x;         /* [rows, width]; the sum with `add` is written back */
    const float *add; /* [rows, width], or NULL */
    const float *weight;
    float *out;
    long rows, width;
    float offset; /* 0, or 1 where the weight is kept less one */
    float eps;
} Norm;

/* x += add, then its norm to out. */
void norm_run(Pool *pool, const Norm *norm);

typedef struct {
    float *projected; /* [T, heads + 2 kv_heads, head_dim], tokens `stride` apart; queries are changed in place */
    long stride;
    long tokens;
    long heads, kv_heads, head_dim;
    long turned;                        /* elements of a head that are rotated, even; 0: none */
    const float *cosine, *sine;         /* [positions, turned / 2] */
    const int64_t *positions;           /* [T] */
    const float *query_norm, *key_norm; /* [head_dim], or NULL */
    float norm_offset, norm_eps;
    void *key, *value; /* caches as of attention.h */
    long block_size, kind;
    const int64_t *slots; /* [T] block * block_size + place in the block */
} Heads;

/* Norm and rotation of queries and keys; keys and values into the cache. */
void heads_run(Pool *pool, const Heads *heads);

typedef struct {
    const float *table; /* [places, width] */
    const int64_t *places;
    float *out; /* [rows, width] */
    long rows, width;
    float scale;
} Embed;

/* Rows of a table, times a scale. */
void embed_run(Pool *pool, const Embed *embed);

#endif
