/* What is done to each token by itself: norms, and everything between the projection and the attention. */
#include "rows.h"

#include <math.h>

#include "narrow.h"

/* Floats from which on a second thread pays. */
#define PARALLEL 16384
#define ROWS_A_CHUNK 8
/* Tokens of one block of keys lie side by side: two threads at one block would pass its lines to and fro. */
#define TOKENS_A_CHUNK 64

INLINE float mean_square(const float *x, long width) {
    vf squares = {0};
    long i = 0;
    for (; i + LANES <= width; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < width; i++) total += x[i] * x[i];
    return total / (float)width;
}

/* x / sqrt(mean square + eps) * (offset + weight) */
INLINE void norm_row(const float *x, const float *weight, float offset, float eps, long width, float *out) {
    const float scale = 1.0f / sqrtf(mean_square(x, width) + eps);
    long i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, load(x + i) * scale * (offset + load(weight + i)));
    for (; i < width; i++) out[i] = x[i] * scale * (offset + weight[i]);
}

static void norm_chunk(void *context, long chunk, int thread) {
    (void)thread;
    const Norm *n = context;
    const long last = (chunk + 1) * ROWS_A_CHUNK < n->rows ? (chunk + 1) * ROWS_A_CHUNK : n->rows;
    for (long row = chunk * ROWS_A_CHUNK; row < last; row++) {
        float *x = n->x + row * n->width;
        if (n->add) {
            const float *add = n->add + row * n->width;
            for (long i = 0; i < n->width; i++) x[i] += add[i];
        }
        norm_row(x, n->weight, n->offset, n->eps, n->width, n->out + row * n->width);
    }
}

static void run_rows(Pool *pool, Work work, void *context, long rows, long floats) {
    const long chunks = (rows + ROWS_A_CHUNK - 1) / ROWS_A_CHUNK;
    if (floats >= PARALLEL) {
        pool_run(pool, work, context, chunks);
        return;
    }
    for (long chunk = 0; chunk < chunks; chunk++) work(context, chunk, 0);
}

void norm_run(Pool *pool, const Norm *n) { run_rows(pool, norm_chunk, (void *)n, n->rows, n->rows * n->width); }

INLINE void rotate(float *x, const float *cosine, const float *sine, long half) {
    long i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cosine[i] - b * sine[i];
        x[half + i] = b * cosine[i] + a * sine[i];
    }
}

/* Key and value of a token into the cache; heads are multiples of 16 wide. The key's elements lie block_size apart. */
INLINE void keep(const int kind, const Heads *h, long slot, const float *key, const float *value) {
    const long width = h->kv_heads * h->head_dim, size = kind_bytes(kind);
    char *to = (char *)h->key + (slot / h->block_size * h->block_size * width + slot % h->block_size) * size;
    for (long i = 0; i < width; i += LANES) {
        char narrow[LANES * sizeof(float)];
        store_finite(kind, narrow, load(key + i));
        for (int j = 0; j < LANES; j++) memcpy(to + (i + j) * h->block_size * size, narrow + j * size, size);
        store_finite(kind, (char *)h->value + (slot * width + i) * size, load(value + i));
    }
}

static void heads_of_token(const Heads *h, long token) {
    float *x = h->projected + token * h->stride;
    const long half = h->turned / 2, width = h->head_dim;
    const float *cosine = h->cosine + h->positions[token] * half, *sine = h->sine + h->positions[token] * half;
    for (long head = 0; head < h->heads + h->kv_heads; head++) {
        float *at = x + head * width;
        const float *weight = head < h->heads ? h->query_norm : h->key_norm;
        if (weight) norm_row(at, weight, h->norm_offset, h->norm_eps, width, at);
        if (half) rotate(at, cosine, sine, half);
    }
    const float *key = x + h->heads * width, *value = key + h->kv_heads * width;
    if (h->kind == FLOAT32) keep(FLOAT32, h, h->slots[token], key, value);
    else if (h->kind == BFLOAT16) keep(BFLOAT16, h, h->slots[token], key, value);
    else keep(FLOAT16, h, h->slots[token], key, value);
}

static void heads_chunk(void *context, long chunk, int thread) {
    (void)thread;
    const Heads *h = context;
    const long last = (chunk + 1) * TOKENS_A_CHUNK < h->tokens ? (chunk + 1) * TOKENS_A_CHUNK : h->tokens;
    for (long token = chunk * TOKENS_A_CHUNK; token < last; token++) heads_of_token(h, token);
}

void heads_run(Pool *pool, const Heads *h) {
    pool_run(pool, heads_chunk, (void *)h, (h->tokens + TOKENS_A_CHUNK - 1) / TOKENS_A_CHUNK);
}

static void embed_chunk(void *context, long chunk, int thread) {
    (void)thread;
    const Embed *e = context;
    const long last = (chunk + 1) * ROWS_A_CHUNK < e->rows ? (chunk + 1) * ROWS_A_CHUNK : e->rows;
    for (long row = chunk * ROWS_A_CHUNK; row < last; row++) {
        const float *from = e->table + e->places[row] * e->width;
        float *to = e->out + row * e->width;
        for (long i = 0; i < e->width; i++) to[i] = from[i] * e->scale;
    }
}

void embed_run(Pool *pool, const Embed *e) { run_rows(pool, embed_chunk, (void *)e, e->rows, e->rows * e->width); }
