/* Products in eight bits: weights with a scale for each output channel, activations with one for each token and group of
 * input channels.
 *
 * A few input channels are far larger than the rest, and one scale would leave the rest a few steps. So both sides are
 * first turned by the same rotation within each 64 channels, a Hadamard matrix (as QuaRot does: Ashkboos et al., 2024):
 * the product is the same, and what stood in one channel is spread over 64.
 *
 * The processor multiplies unsigned by signed bytes: activations are stored plus 128, and the sums begin at minus 128
 * times the sum of the weights. All sums of bytes are exact; a group's sum, times the scale of the token, is added to
 * the others in rising order, so an element is the same bits in every batch. */
#include <stdbool.h>

#include "finish.h"
#include "linear.h"
#include "vector.h"

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

/* Quads of a panel that are asked for ahead: see linear.c. */
#define AHEAD 32
#define TURNED 64
#define MAX_GROUP_INPUTS 256
#if defined(__AVX512F__)
#define MAX_ROWS 12
#else
#define MAX_ROWS 3
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

/* sum + four products of an unsigned and a signed byte in each lane */
INLINE vi dot(vi sum, int32_t x, vi w) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(x), (__m512i)w);
#else
    for (int b = 0; b < 4; b++) sum += (int32_t)((uint32_t)x >> 8 * b & 255) * ((w << (24 - 8 * b)) >> 24);
    return sum;
#endif
}

/* The rotation of 64 numbers, without its factor of 1 / 8. */
INLINE void rotate64(vf x[4]) {
    vf a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
    x[0] = a + c;
    x[1] = b + d;
    x[2] = a - c;
    x[3] = b - d;
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int width = 8; width; width /= 2) {
        const vf sign = __builtin_convertvector(1 + 2 * ((lane & width) != 0), vf);
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) x[v] = x[v] * sign + __builtin_shuffle(x[v], lane ^ width);
    }
}

INLINE vf magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }

INLINE vf largest64(const vf x[4]) {
    return larger(larger(magnitude(x[0]), magnitude(x[1])), larger(magnitude(x[2]), magnitude(x[3])));
}

typedef int8_t vb __attribute__((vector_size(16)));

/* 64 numbers to bytes -127 .. 127, of which each is one `to_bytes`-th. */
INLINE void shrink64(const vf x[4], float to_bytes, int8_t bytes[TURNED]) {
    const vf round = all(12582912.0f);
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
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
    uint8_t *bytes;             /* blocks of rows, each [K / 4, rows, 4] */
    float *scale;               /* blocks of rows, each [groups, rows] */
    float *out;
    long out_stride, panels, group;
} Product;

typedef struct {
    const uint8_t *bytes;
    const float *scale;
    long first;
    int rows;
} Rows;

static Rows block_of(const Product *p, long index) {
    const long first = first_of(p->blocks, index), inputs = p->linear->inputs;
    return (Rows){p->bytes + first * inputs, p->scale + first * (inputs / group_of(inputs)), first,
                  rows_of(p->blocks, index)};
}

/* A group of a row: turned, shrunk, and stored as quads that lie `stride` bytes apart. Gives the scale. */
static float pack_group(const float *from, long group, uint8_t *to, long stride) {
    vf x[MAX_GROUP_INPUTS / LANES], most = {0};
    for (long k = 0; k < group; k += TURNED) {
        vf *part = x + k / LANES;
        for (int v = 0; v < 4; v++) part[v] = load(from + k + v * LANES);
        rotate64(part);
        most = larger(most, largest64(part));
    }
    const float top = largest(most), to_bytes = steps_of(top);
    for (long k = 0; k < group; k += TURNED) {
        int8_t bytes[TURNED];
        shrink64(x + k / LANES, to_bytes, bytes);
        for (int q = 0; q < TURNED / 4; q++, to += stride) {
            *(quad *)to = *(const quad *)(bytes + q * 4) ^ (int32_t)0x80808080; /* plus 128 */
        }
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
                pack_group(from + g * group, group, (uint8_t *)block.bytes + (g * group / 4 * block.rows + r) * 4,
                           block.rows * 4);
    }
}

/* `rows` rows by `count` panels; the sums go to [panel, row, 32]. */
INLINE void tile(const int rows, const int count, const Rows block, const char *panels, long inputs, float *sums) {
    const long stride = panel_bytes(inputs), group = group_of(inputs);
    for (int i = 0; i < rows * count * PANEL; i++) sums[i] = 0.0f;
    for (long g = 0; g < inputs / group; g++) {
        vi low[MAX_ROWS], high[MAX_ROWS];
#pragma GCC unroll 4
        for (int c = 0; c < count; c++) {
            const int32_t *begin = begins(panels + c * stride, inputs) + g * PANEL;
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                low[c * rows + r] = load_int(begin);
                high[c * rows + r] = load_int(begin + LANES);
            }
        }
        const uint8_t *x = block.bytes + g * group * rows;
        const char *w = panels + g * group * PANEL;
        for (long q = 0; q < group / 4; q++, x += rows * 4, w += PANEL * 4) {
            const quad *of_row = (const quad *)x;
#pragma GCC unroll 4
            for (int c = 0; c < count; c++) {
                __builtin_prefetch(w + c * stride + AHEAD * PANEL * 4, 0, 3);
                __builtin_prefetch(w + c * stride + AHEAD * PANEL * 4 + 64, 0, 3);
                const vi a = load_int(w + c * stride), b = load_int(w + c * stride + 64);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) {
                    low[c * rows + r] = dot(low[c * rows + r], of_row[r], a);
                    high[c * rows + r] = dot(high[c * rows + r], of_row[r], b);
                }
            }
        }
#pragma GCC unroll 4
        for (int c = 0; c < count; c++)
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                float *to = sums + (c * rows + r) * PANEL;
                const float scale = block.scale[g * rows + r];
                store(to, load(to) + __builtin_convertvector(low[c * rows + r], vf) * scale);
                store(to + LANES, load(to + LANES) + __builtin_convertvector(high[c * rows + r], vf) * scale);
            }
    }
}

INLINE void tiles(const Product *p, const int rows, const int at_once, const Rows block, const char *panels, long panel,
                  long count) {
    float sums[MAX_ROWS * MAX_GROUP * PANEL] __attribute__((aligned(64)));
    const long inputs = p->linear->inputs, stride = panel_bytes(inputs);
    for (long done = 0; done < count;) {
        const int now = count - done >= at_once ? at_once : 1;
        const char *from = panels + done * stride;
        expect(p->linear, p->out + block.first * p->out_stride, p->out_stride, rows, panel + done);
        if (now == at_once) tile(rows, at_once, block, from, inputs, sums);
        else tile(rows, 1, block, from, inputs, sums);
        for (int c = 0; c < now; c++) {
            const float *scale = scales(from + c * stride, inputs);
            for (int r = 0; r < rows; r++) {
                float *at = sums + (c * rows + r) * PANEL;
                store(at, load(at) * load(scale));
                store(at + LANES, load(at + LANES) * load(scale + LANES));
                finish(p->linear, p->out + (block.first + r) * p->out_stride, panel + done + c, at);
            }
        }
        done += now;
    }
}

static void by_rows(const Product *p, Rows block, const char *panels, long panel, long count) {
    switch (block.rows) {
#if defined(__AVX512F__)
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
    case 1: tiles(p, 1, 1, block, panels, panel, count); break;
    case 2: tiles(p, 2, 1, block, panels, panel, count); break;
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
    char *room = pool_shared(pool, scale_bytes + rows * linear->inputs);
    if (!room) return -1;
    p.scale = (float *)room;
    p.bytes = (uint8_t *)room + scale_bytes;
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
        vf x[4];
        for (int v = 0; v < 4; v++) x[v] = load(column + k + v * LANES);
        rotate64(x);
        for (int v = 0; v < 4; v++) store(column + k + v * LANES, x[v]);
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
        vf x[4];
        int8_t bytes[TURNED];
        for (int v = 0; v < 4; v++) x[v] = load(column + at + v * LANES);
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
