/* Causal attention over the paged cache. */
#ifndef TERCET_ATTENTION_H
#define TERCET_ATTENTION_H

#include <stdint.h>

#include "pool.h"

typedef struct {
    long heads, kv_heads, head_dim, block_size;
    long kind;   /* of narrow.h, of keys and values */
    long window; /* 0: none */
    float scale;
    float soft_cap; /* 0: none */
} Attention;

typedef struct {
    const float *query; /* [T, heads, head_dim], tokens query_stride apart */
    long query_stride;
    float *out;        /* [T, heads, head_dim], contiguous */
    const void *key;   /* [blocks, kv_heads, head_dim, block_size]: a vector holds one element of neighbouring keys */
    const void *value; /* [blocks, block_size, kv_heads, head_dim] */
    long rows;
    const int64_t *query_start; /* [rows + 1] */
    const int64_t *contexts;    /* [rows] tokens in the cache, this step's included */
    const int64_t *tables;      /* [rows, blocks of the longest], rows table_stride apart */
    long table_stride;
} Step;

/* Attention of a step's queries; their keys and values are in the cache. Returns 0, or -1 without memory. */
int attention_run(Pool *pool, const Attention *attention, const Step *step);

#endif
