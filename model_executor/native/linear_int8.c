/* Products in eight bits: weights with a scale for each output channel, activations with one for each token and group of
 * input channels.
 *
 * A few input channels are far larger than the rest, and one scale would leave the rest a few steps. So both sides are
 * first turned by the same rotation within each 64 channels, a Hadamard matrix (as QuaRot does: Ashkboos et al., 2024):
 * the product is the same, and what stood in one channel is spread over 64.
 *
 * The processor multiplies unsigned by signed bytes: activations are stored plus 128, and the sums begin at minus 128
 * times the sum of the weights. One that has no such instruction, or only one whose sums have limits, multiplies them as
 * 16 bits. All sums of bytes are exact; a group's sum, times the scale of the token, is added to the others in rising
 * order, so an element is the same bits in every batch. */
#include <stdbool.h>

#include "finish.h"
#include "linear.h"
#include "vector.h"

/* Quads of a panel that are asked for ahead: see linear.c. */
#define AHEAD 32
#define TURNED 64
#define PARTS (TURNED / LANES)
#define MAX_GROUP_INPUTS 256
#define MAX_ROWS (REGISTERS == 32 ? 12 : 4)
/* Words that hold four inputs of a row: one of bytes where they are multiplied as such; else one of inputs 0 and 2 and
 * one of 1 and 3, 16 bits each. */
#if defined(__AVX512VNNI__)
#define WORDS 1
#else
#define WORDS 2
#endif

/* Input channels of a group: as many as are allowed and divide K into whole groups. */
static long group_of(long inputs) {
    long size = MAX_GROUP_INPUTS;
    while (inputs % size) size -= TURNED;
    return size;
}

/* A panel: weights [K / 4, 32, 4], where the sums of a group begin [groups, 32], and the scales [32]. */
static long panel_bytes(long inputs) { return inputs * PANEL + inputs / group_of(inputs) * PANEL * 4 + PANEL * 4; }

static const int32_t *begins(const char *panel, long inputs) { return (const int32_t *)(panel + inputs * PANEL); }

static const float *scales(const char *panel, long inputs) {
    return (const float *)(panel + inputs * PANEL + inputs / group_of(inputs) * PANEL * 4);
}

/* Four bytes of a row, wherever they lie. */
typedef int32_t quad __attribute__((may_alias, aligned(1)));

INLINE vi load_int(const void *from) {
    vi x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* Two products of 16 bits in each lane, summed up. */
INLINE vi products(vi a, vi b) {
#if LANES == 8
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && LANES == 4
    return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

typedef int16_t vs __attribute__((vector_size(LANES * 4)));

/* sum + four products of an unsigned and a signed byte in each lane */
INLINE vi dot(vi sum, const quad *x, vi w) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(*x), (__m512i)w);
#else
    const vi none = {0};
    return sum + products(x[0] + none, (vi)((vs)w << 8 >> 8)) + products(x[1] + none, (vi)((vs)w >> 8));
#endif
}

/* Sums and differences of the numbers that lie `width` apart. */
INLINE void turn64(vf x[PARTS], const int width) {
    const vi lane = LANE_NUMBERS;
    const vf sign = __builtin_convertvector(1 + 2 * ((lane & width) != 0), vf);
#pragma GCC unroll 16
    for (int v = 0; v < PARTS; v++) {
        if (width < LANES) x[v] = x[v] * sign + swapped(x[v], width);
        else if (!(v * LANES & width)) {
            const vf low = x[v], high = x[v + width / LANES];
            x[v] = low + high;
            x[v + width / LANES] = low - high;
        }
    }
}

/* The rotation of 64 numbers, without its factor of 1 / 8. */
INLINE void rotate64(vf x[PARTS]) {
    turn64(x, 16);
    turn64(x, 32);
    turn64(x, 8);
    turn64(x, 4);
    turn64(x, 2);
    turn64(x, 1);
}

INLINE vf magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }

INLINE vf largest64(const vf x[PARTS]) {
    vf most = magnitude(x[0]);
    for (int v = 1; v < PARTS; v++) most = larger(most, magnitude(x[v]));
    return most;
}

typedef int8_t vb __attribute__((vector_size(LANES)));

/* 64 numbers to bytes -127 .. 127, of which each is one `to_bytes`-th. */
INLINE void shrink64(const vf x[PARTS], float to_bytes, int8_t bytes[TURNED]) {
    const vf round = all(12582912.0f);
#pragma GCC unroll 16
    for (int v = 0; v < PARTS; v++) {
        const vf scaled = smaller(larger(x[v] * to_bytes, all(-127.0f)), all(127.0f));
        const vb whole = __builtin_convertvector((vi)(scaled + round) - (vi)round, vb);
        memcpy(bytes + v * LANES, &whole, sizeof whole);
    }
}

INLINE float steps_of(float most) { return most > 0.0f ? 127.0f / most : 0.0f; }

typedef struct {
    const Linear *linear;
    const float *x;
    long x_stride, rows;
    Blocks blocks;
    quad *words;  /* blocks of rows, each [K / 4, rows, WORDS] */
    float *scale; /* blocks of rows, each [groups, rows] */
    float *out;
    long out_stride, panels, group;
} Product;

typedef struct {
    const quad *words;
    const float *scale;
    long first;
    int rows;
} Rows;

static Rows block_of(const Product *p, long index) {
    const long first = first_of(p->blocks, index), inputs = p->linear->inputs;
    return (Rows){p->words + first * (inputs / 4) * WORDS, p->scale + first * (inputs / group_of(inputs)), first,
                  rows_of(p->blocks, index)};
}

/* Four bytes plus 128. */
INLINE void store_quad(quad *to, int32_t bytes) {
    bytes ^= (int32_t)0x80808080;
    if (WORDS == 1) {
        *to = bytes;
        return;
    }
    to[0] = bytes & 0x00ff00ff;
    to[1] = bytes >> 8 & 0x00ff00ff;
}

/* A group of a row: turned, shrunk, and stored `stride` words apart. Gives the scale. */
static float pack_group(const float *from, long group, quad *to, long stride) {
    vf x[MAX_GROUP_INPUTS / LANES], most = {0};
    for (long k = 0; k < group; k += TURNED) {
        vf *part = x + k / LANES;
        for (int v = 0; v < PARTS; v++) part[v] = load(from + k + v * LANES);
        rotate64(part);
        most = larger(most, largest64(part));
    }
    const float top = largest(most), to_bytes = steps_of(top);
    for (long k = 0; k < group; k += TURNED) {
        int8_t bytes[TURNED];
        shrink64(x + k / LANES, to_bytes, bytes);
        for (int q = 0; q < TURNED / 4; q++, to += stride) store_quad(to, *(const quad *)(bytes + q * 4));
    }
    return top / 127.0f / 8.0f;
}

static void pack_block(void *context, long chunk, int thread) {
    (void)thread;
    const Product *p = context;
    const Rows block = block_of(p, chunk);
    const long inputs = p->linear->inputs, group = group_of(inputs);
    for (int r = 0; r < block.rows; r++) {
        const float *from = p->x + (block.first + r) * p->x_stride;
        for (long g = 0; g < inputs / group; g++)
            ((float *)block.scale)[g * block.rows + r] =
                pack_group(from + g * group, group, (quad *)block.words + (g * group / 4 * block.rows + r) * WORDS,
                           block.rows * WORDS);
    }
}

/* `rows` rows by `count` pairs from one on whose number is a multiple of that; added to the sums. */
INLINE void tile(const int rows, const int count, const Rows block, const char *panels, long inputs, long pair,
                 float *sums) {
    const long stride = panel_bytes(inputs), group = group_of(inputs);
    panels += pair_place(stride, 4, pair);
    sums += pair_place(rows * PANEL, 1, pair);
    for (long g = 0; g < inputs / group; g++) {
        vi low[MAX_ROWS], high[MAX_ROWS];
#pragma GCC unroll 4
        for (int c = 0; c < count; c++) {
            const int32_t *begin = begins(panels + pair_place(stride, 4, c), inputs) + g * PANEL;
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                low[c * rows + r] = load_int(begin);
                high[c * rows + r] = load_int(begin + HALF);
            }
        }
        const quad *x = block.words + g * (group / 4) * rows * WORDS;
        const char *w = panels + g * group * PANEL;
        for (long q = 0; q < group / 4; q++, x += rows * WORDS, w += PANEL * 4) {
#pragma GCC unroll 4
            for (int c = 0; c < count; c++) {
                const char *from = w + pair_place(stride, 4, c);
                __builtin_prefetch(from + AHEAD * PANEL * 4, 0, 3);
                __builtin_prefetch(from + AHEAD * PANEL * 4 + 64, 0, 3);
                const vi a = load_int(from), b = load_int(from + HALF * 4);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) {
                    low[c * rows + r] = dot(low[c * rows + r], x + r * WORDS, a);
                    high[c * rows + r] = dot(high[c * rows + r], x + r * WORDS, b);
                }
            }
        }
#pragma GCC unroll 4
        for (int c = 0; c < count; c++)
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                float *to = sums + pair_place(rows * PANEL, 1, c) + r * PANEL;
                const float scale = block.scale[g * rows + r];
                store(to, load(to) + __builtin_convertvector(low[c * rows + r], vf) * scale);
                store(to + HALF, load(to + HALF) + __builtin_convertvector(high[c * rows + r], vf) * scale);
            }
    }
}

INLINE void tiles(const Product *p, const int rows, const int at_once, const Rows block, const char *panels, long panel,
                  long count) {
    float sums[MAX_ROWS * MAX_GROUP * PANEL] __attribute__((aligned(64)));
    const long inputs = p->linear->inputs, pairs = count * PAIRS;
    memset(sums, 0, count * rows * PANEL * sizeof(float));
    for (long c = 0; c < count; c++)
        expect(p->linear, p->out + block.first * p->out_stride, p->out_stride, rows, panel + c);
    long done = 0;
    for (; done + at_once <= pairs; done += at_once) tile(rows, at_once, block, panels, inputs, done, sums);
    if (at_once > 1)
        for (; done < pairs; done++) tile(rows, 1, block, panels, inputs, done, sums);
    for (long c = 0; c < count; c++) {
        const float *scale = scales(panels + c * panel_bytes(inputs), inputs);
        for (int r = 0; r < rows; r++) {
            float *at = sums + (c * rows + r) * PANEL;
            for (int i = 0; i < PANEL; i += LANES) store(at + i, load(at + i) * load(scale + i));
            finish(p->linear, p->out + (block.first + r) * p->out_stride, panel + c, at);
        }
    }
}

static void by_rows(const Product *p, Rows block, const char *panels, long panel, long count) {
    switch (block.rows) {
#if REGISTERS == 32
    case 1: tiles(p, 1, 4, block, panels, panel, count); break;
    case 2: tiles(p, 2, 4, block, panels, panel, count); break;
    case 3: tiles(p, 3, 3, block, panels, panel, count); break;
    case 4: tiles(p, 4, 3, block, panels, panel, count); break;
    case 5: tiles(p, 5, 2, block, panels, panel, count); break;
    case 6: tiles(p, 6, 2, block, panels, panel, count); break;
    case 7: tiles(p, 7, 1, block, panels, panel, count); break;
    case 8: tiles(p, 8, 1, block, panels, panel, count); break;
    case 9: tiles(p, 9, 1, block, panels, panel, count); break;
    case 10: tiles(p, 10, 1, block, panels, panel, count); break;
    case 11: tiles(p, 11, 1, block, panels, panel, count); break;
#else
    case 1: tiles(p, 1, 4, block, panels, panel, count); break;
    case 2: tiles(p, 2, 2, block, panels, panel, count); break;
    case 3: tiles(p, 3, 1, block, panels, panel, count); break;
#endif
    default: tiles(p, MAX_ROWS, 1, block, panels, panel, count); break;
    }
}

static void multiply(void *context, long chunk, int thread) {
    (void)thread;
    const Product *p = context;
    const long groups = (p->panels + p->group - 1) / p->group, panel = chunk % groups * p->group;
    const long count = panel + p->group <= p->panels ? p->group : p->panels - panel;
    const char *panels = (const char *)p->linear->panels + panel * panel_bytes(p->linear->inputs);
    /* With many blocks one panel stays in the first-level cache while they pass. */
    const long step = p->blocks.count > 3 ? 1 : count;
    for (long done = 0; done < count; done += step)
        for (long b = 0; b < p->blocks.count; b++)
            by_rows(p, block_of(p, b), panels + done * panel_bytes(p->linear->inputs), panel + done, step);
}

/* See linear_run. */
int linear_int8_run(Pool *pool, const Linear *linear, const float *x, long x_stride, long rows, float *out,
                    long out_stride) {
    Product p = {.linear = linear, .x = x, .x_stride = x_stride, .rows = rows, .out = out, .out_stride = out_stride};
    p.blocks = cut_rows(rows, MAX_ROWS);
    p.panels = (linear->outputs + PANEL - 1) / PANEL;
    p.group = linear_panels_a_chunk(p.panels, pool_threads(pool));
    const size_t scale_bytes = rows * (linear->inputs / group_of(linear->inputs)) * sizeof(float);
    char *room = pool_shared(pool, scale_bytes + rows * (linear->inputs / 4) * WORDS * sizeof(quad));
    if (!room) return -1;
    p.scale = (float *)room;
    p.words = (quad *)(room + scale_bytes);
    if (p.blocks.count > 1) pool_run(pool, pack_block, &p, p.blocks.count);
    else pack_block(&p, 0, 0);
    pool_run(pool, multiply, &p, (p.panels + p.group - 1) / p.group);
    return 0;
}

typedef struct {
    Pool *pool;
    const Linear *linear;
    const float *weight;
    long row_stride, column_stride;
    bool failed; /* no memory */
} Packing;

/* The largest magnitude of a column once it is turned; the turned column replaces it. */
static float turn_column(float *column, long inputs) {
    vf most = {0};
    for (long k = 0; k < inputs; k += TURNED) {
        vf x[PARTS];
        for (int v = 0; v < PARTS; v++) x[v] = load(column + k + v * LANES);
        rotate64(x);
        for (int v = 0; v < PARTS; v++) store(column + k + v * LANES, x[v]);
        most = larger(most, largest64(x));
    }
    return largest(most);
}

static void pack_column(const Linear *linear, char *panel, int c, float *column) {
    const long inputs = linear->inputs, group = group_of(inputs);
    const float most = turn_column(column, inputs);
    int32_t *begin = (int32_t *)begins(panel, inputs);
    ((float *)scales(panel, inputs))[c] = most / 127.0f / 8.0f;
    for (long g = 0; g < inputs / group; g++) begin[g * PANEL + c] = 0;
    for (long at = 0; at < inputs; at += TURNED) {
        vf x[PARTS];
        int8_t bytes[TURNED];
        for (int v = 0; v < PARTS; v++) x[v] = load(column + at + v * LANES);
        shrink64(x, steps_of(most), bytes);
        for (long k = 0; k < TURNED; k++) {
            panel[((at + k) / 4 * PANEL + c) * 4 + k % 4] = bytes[k];
            begin[at / group * PANEL + c] -= 128 * bytes[k];
        }
    }
}

static void pack_panel(void *context, long index, int thread) {
    Packing *p = context;
    const Linear *linear = p->linear;
    const long inputs = linear->inputs;
    char *panel = (char *)linear->panels + index * panel_bytes(inputs);
    float *columns = pool_scratch(p->pool, thread, inputs * PANEL * sizeof(float));
    if (!columns) {
        p->failed = true;
        return;
    }
    long at[PANEL];
    for (int c = 0; c < PANEL; c++) at[c] = linear_column_at(linear, index, c);
    for (long k = 0; k < inputs; k++)
        for (int c = 0; c < PANEL; c++)
            columns[c * inputs + k] = at[c] < 0 ? 0.0f : p->weight[k * p->row_stride + at[c] * p->column_stride];
    for (int c = 0; c < PANEL; c++) pack_column(linear, panel, c, columns + c * inputs);
}

/* See linear_pack. */
int linear_int8_pack(Pool *pool, const Linear *linear, const float *weight, long row_stride, long column_stride) {
    Packing p = {pool, linear, weight, row_stride, column_stride, false};
    pool_run(pool, pack_panel, &p, (linear->outputs + PANEL - 1) / PANEL);
    return p.failed ? -1 : 0;
}

/* Bytes of the panels of a weight. */
long linear_int8_bytes(long inputs, long outputs) { return (outputs + PANEL - 1) / PANEL * panel_bytes(inputs); }
