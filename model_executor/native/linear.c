/* x @ w for a weight that lies in panels of 32 columns: [panel, K, 32].
 *
 * Up to 12 rows by a pair of vectors are kept in registers over a stretch of K, so an element is a sum of chains of
 * fused multiply-adds in rising k, whatever the number of rows. Few rows take several pairs at once, to have enough
 * independent chains. */
#include "linear.h"

#include <stdbool.h>

#include "finish.h"
#include "narrow.h"

/* Most rows of a tile: its sums, two vectors a row, stay in registers. */
#define MAX_ROWS (REGISTERS == 32 ? 12 : 6)
/* Inputs whose products are summed up by themselves, so that rounding does not grow along all of K. */
#define STRETCH 192
/* From so many blocks on a float16 stretch is widened once for all of them. bfloat16 costs a tile too little for that. */
#define WIDEN (REGISTERS == 32 ? 12 : 6)
/* Rows of a panel that are asked for ahead where it streams from memory: the processor looks too few instructions ahead
 * once several rows of x share each of them. */
#define AHEAD 32
/* Blocks of rows that pass a panel before the next. */
#define BAND_BLOCKS (192 / MAX_ROWS)

/* Row k of a pair. A bfloat16 panel holds both columns of a pair in one word. */
INLINE void weights(const int kind, const void *panel, long k, vf *low, vf *high) {
    if (kind == FLOAT32) {
        *low = load((const float *)panel + k * PANEL);
        *high = load((const float *)panel + k * PANEL + HALF);
    } else if (kind == BFLOAT16) {
        vu words;
        memcpy(&words, (const uint16_t *)panel + k * PANEL, sizeof words);
        *low = (vf)(words << 16);
        *high = (vf)(words & 0xffff0000u);
    } else {
        *low = widen_half((const uint16_t *)panel + k * PANEL);
        *high = widen_half((const uint16_t *)panel + k * PANEL + HALF);
    }
}

/* A block of rows, `stride` apart. */
typedef struct {
    const float *x;
    long stride;
    long first;
    int rows;
} Rows;

typedef struct {
    const Linear *linear;
    const float *x;
    long x_stride;
    Blocks blocks;
    float *out;
    long out_stride;
    long panels;
    long group;
    long bands;
} Product;

/* A stretch of K of neighbouring panels, and where the sums of a block of rows go: panel c's to `to` + 32 c, rows
 * `to_stride` apart. `from`, if not NULL, holds the sums of the stretches before, likewise. */
typedef struct {
    const char *panels;
    long panel_bytes;
    long inputs;
    const float *from;
    long from_stride;
    float *to;
    long to_stride;
} Stretch;

/* Ask for row k of a panel. */
INLINE void ask(const int kind, const char *panel, long k) {
    const long bytes = PANEL * kind_bytes(kind);
#pragma GCC unroll 2
    for (long line = 0; line < bytes; line += 64) __builtin_prefetch(panel + k * bytes + line, 0, 3);
}

/* `count` neighbouring pairs. */
INLINE void tile(const int kind, const int ahead, const int rows, const int count, const Rows block, const Stretch s,
                 long pair) {
    vf low[MAX_ROWS * 2], high[MAX_ROWS * 2];
    /* Each pointer reaches three rows, at once, twice and not at all the stride away: an address each. */
    const long stride = block.stride;
    const float *x0 = block.x, *x3 = x0 + 3 * stride, *x6 = x3 + 3 * stride, *x9 = x6 + 3 * stride;
#pragma GCC unroll 24
    for (int i = 0; i < rows * count; i++) low[i] = high[i] = (vf){0};
    /* Unrolled: counting takes issue slots of the multiply-adds. */
#pragma GCC unroll 2
    for (long k = 0; k < s.inputs; k++, x0++, x3++, x6++, x9++) {
#pragma GCC unroll 4
        for (int c = 0; c < count; c++) {
            const char *from = s.panels + pair_place(s.panel_bytes, kind == FLOAT16 ? 2 : 4, pair + c);
            vf a, b;
            if (ahead) ask(kind, from, k + ahead);
            weights(kind, from, k, &a, &b);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const float x = (r < 3 ? x0 : r < 6 ? x3 : r < 9 ? x6 : x9)[r % 3 * stride];
                low[c * rows + r] += x * a;
                high[c * rows + r] += x * b;
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < count; c++) {
            const int i = c * rows + r;
            const long at = pair_place(PANEL, 1, pair + c);
            if (s.from) {
                const float *from = s.from + r * s.from_stride + at;
                low[i] += load(from);
                high[i] += load(from + HALF);
            }
            float *to = s.to + r * s.to_stride + at;
            store(to, low[i]);
            store(to + HALF, high[i]);
        }
}

/* `count` panels, `at_once` pairs of them in a tile. */
INLINE void tiles(const int kind, const int ahead, const int rows, const int at_once, const Rows x, const Stretch s,
                  long count) {
    const long pairs = count * PAIRS;
    long done = 0;
    for (; done + at_once <= pairs; done += at_once) tile(kind, ahead, rows, at_once, x, s, done);
    if (at_once > 1)
        for (; done < pairs; done++) tile(kind, ahead, rows, 1, x, s, done);
}

/* Fewer rows take more pairs at once. */
INLINE void by_rows(const int kind, const int ahead, const Rows block, const Stretch s, long count) {
    switch (block.rows) {
#if REGISTERS == 32
    case 1: tiles(kind, ahead, 1, 4, block, s, count); break;
    case 2: tiles(kind, ahead, 2, 4, block, s, count); break;
    case 3: tiles(kind, ahead, 3, 3, block, s, count); break;
    case 4: tiles(kind, ahead, 4, 3, block, s, count); break;
    case 5: tiles(kind, ahead, 5, 2, block, s, count); break;
    case 6: tiles(kind, ahead, 6, 2, block, s, count); break;
    case 7: tiles(kind, ahead, 7, 1, block, s, count); break;
    case 8: tiles(kind, ahead, 8, 1, block, s, count); break;
    case 9: tiles(kind, ahead, 9, 1, block, s, count); break;
    case 10: tiles(kind, ahead, 10, 1, block, s, count); break;
    case 11: tiles(kind, ahead, 11, 1, block, s, count); break;
#else
    case 1: tiles(kind, ahead, 1, 4, block, s, count); break;
    case 2: tiles(kind, ahead, 2, 2, block, s, count); break;
    case 3: tiles(kind, ahead, 3, 2, block, s, count); break;
    case 4: tiles(kind, ahead, 4, 1, block, s, count); break;
    case 5: tiles(kind, ahead, 5, 1, block, s, count); break;
#endif
    default: tiles(kind, ahead, MAX_ROWS, 1, block, s, count); break;
    }
}

static void float32_rows(Rows block, Stretch s, long count) { by_rows(FLOAT32, 0, block, s, count); }
static void float32_stream(Rows block, Stretch s, long count) { by_rows(FLOAT32, AHEAD, block, s, count); }
static void bfloat16_stream(Rows block, Stretch s, long count) { by_rows(BFLOAT16, AHEAD, block, s, count); }
static void float16_stream(Rows block, Stretch s, long count) { by_rows(FLOAT16, AHEAD, block, s, count); }

/* Whether sums are results as they are. */
static bool plain(const Linear *linear, long panel, long count) {
    return linear->finish == PLAIN && !linear->bias && (panel + count) * PANEL <= linear->outputs;
}

static float *place(const Product *p, long row, long panel) { return p->out + row * p->out_stride + panel * PANEL; }

/* Sums of a block by `count` panels, rows `stride` apart. */
static void finish_block(const Product *p, Rows block, long panel, long count, const float *sums, long stride) {
    for (int r = 0; r < block.rows; r++)
        for (long c = 0; c < count; c++)
            finish(p->linear, p->out + (block.first + r) * p->out_stride, panel + c, sums + r * stride + c * PANEL);
}

static Rows block_of(const Product *p, long index) {
    const long first = first_of(p->blocks, index);
    return (Rows){p->x + first * p->x_stride, p->x_stride, first, rows_of(p->blocks, index)};
}

static long stretches(long inputs) { return (inputs + STRETCH - 1) / STRETCH; }

/* The first k of a stretch. */
static long begin_of(long inputs, long index) { return inputs * index / stretches(inputs); }

/* The stretch first .. last - 1 of a block: to the sums that are kept, or with the last one, if it may, to the result. */
static Stretch stretch_of(const Product *p, Rows block, long panel, long first, long last, float *kept, long stride,
                          bool direct) {
    Stretch s = {
        .inputs = last - first, .from = first ? kept : NULL, .from_stride = stride, .to = kept, .to_stride = stride};
    if (last == p->linear->inputs) {
        expect(p->linear, p->out + block.first * p->out_stride, p->out_stride, block.rows, panel);
        if (direct) {
            s.to = place(p, block.first, panel);
            s.to_stride = p->out_stride;
        }
    }
    return s;
}

/* Rows first .. last - 1 of a float16 panel as float32. */
static void widen(const char *panel, long first, long last, float *wide) {
    for (long k = first; k < last; k++, wide += PANEL)
        for (int at = 0; at < PANEL; at += LANES)
            store(wide + at, widen_half((const uint16_t *)panel + k * PANEL + at));
}

/* Blocks first_block .. last_block - 1 pass the panels a stretch at a time: the second-level cache holds that of all
 * panels, the first-level one a block's part of x. */
static void multiply_band(const Product *p, const char *panels, long panel_bytes, long panel, long count,
                          long first_block, long last_block) {
    const long inputs = p->linear->inputs, kind = p->linear->kind, stride = MAX_GROUP * PANEL;
    const long origin = block_of(p, first_block).first;
    float sums[BAND_BLOCKS * MAX_ROWS * MAX_GROUP * PANEL] __attribute__((aligned(64)));
    float wide[MAX_GROUP * STRETCH * PANEL] __attribute__((aligned(64)));
    const bool direct = plain(p->linear, panel, count);
    const bool widened = kind == FLOAT16 && last_block - first_block >= WIDEN;
    for (long i = 0; i < stretches(inputs); i++) {
        const long begin = begin_of(inputs, i), end = begin_of(inputs, i + 1);
        for (long c = 0; widened && c < count; c++)
            widen(panels + c * panel_bytes, begin, end, wide + c * STRETCH * PANEL);
        for (long b = first_block; b < last_block; b++) {
            Rows block = block_of(p, b);
            Stretch s = stretch_of(p, block, panel, begin, end, sums + (block.first - origin) * stride, stride, direct);
            s.panels = widened ? (const char *)wide : panels + begin * PANEL * kind_bytes(kind);
            s.panel_bytes = widened ? STRETCH * PANEL * (long)sizeof(float) : panel_bytes;
            block.x += begin;
            if (widened) float32_rows(block, s, count);
            else if (kind == FLOAT32) float32_stream(block, s, count);
            else if (kind == BFLOAT16) bfloat16_stream(block, s, count);
            else float16_stream(block, s, count);
        }
    }
    for (long b = first_block; b < last_block && !direct; b++) {
        const Rows block = block_of(p, b);
        finish_block(p, block, panel, count, sums + (block.first - origin) * stride, stride);
    }
}

/* A chunk is a group of panels and a band of rows. */
static void multiply(void *context, long chunk, int thread) {
    (void)thread;
    const Product *p = context;
    const long groups = (p->panels + p->group - 1) / p->group;
    const long panel_bytes = p->linear->inputs * PANEL * kind_bytes(p->linear->kind);
    const long panel = chunk % groups * p->group;
    const long count = panel + p->group <= p->panels ? p->group : p->panels - panel;
    const char *panels = (const char *)p->linear->panels + panel * panel_bytes;
    const long band = chunk / groups, first = p->blocks.count * band / p->bands,
               last = p->blocks.count * (band + 1) / p->bands;
    multiply_band(p, panels, panel_bytes, panel, count, first, last);
}

/* Panels a chunk, so that the busiest thread has as little as can be. */
long linear_panels_a_chunk(long panels, long threads) {
    long best = 1, least = panels + 1;
    for (long size = MAX_GROUP; size >= 1; size--) {
        long chunks = (panels + size - 1) / size, load = (chunks + threads - 1) / threads * size;
        if (load < least) {
            least = load;
            best = size;
        }
    }
    return best;
}

int linear_run(Pool *pool, const Linear *linear, const float *x, long x_stride, long rows, float *out,
               long out_stride) {
    Product p = {.linear = linear, .x = x, .x_stride = x_stride, .out = out, .out_stride = out_stride};
    if (rows == 0) return 0;
    if (linear->kind == INT8) return linear_int8_run(pool, linear, x, x_stride, rows, out, out_stride);
    p.blocks = cut_rows(rows, MAX_ROWS);
    p.panels = (linear->outputs + PANEL - 1) / PANEL;
    p.group = linear_panels_a_chunk(p.panels, pool_threads(pool));
    p.bands = (p.blocks.count + BAND_BLOCKS - 1) / BAND_BLOCKS;
    pool_run(pool, multiply, &p, (p.panels + p.group - 1) / p.group * p.bands);
    return 0;
}

/* The column of the weight that stands at place c of a panel, or -1. */
long linear_column_at(const Linear *linear, long panel, int c) {
    if (linear->finish == PLAIN) {
        long column = panel * PANEL + c;
        return column < linear->outputs ? column : -1;
    }
    long half = linear->outputs / 2, place = panel * HALF + c % HALF;
    return place < half ? place + (c >= HALF ? half : 0) : -1;
}

/* The narrowest kind that holds all of n numbers exactly. */
int linear_narrowest(const float *x, long n) {
    uint32_t low = 0;
    bool half = true;
    for (long i = 0; i < n; i++) low |= bits_of(x[i]) & 0xffff;
    if (!low) return BFLOAT16;
    for (long i = 0; i < n && half; i++)
        half = x[i] >= -65504.0f && x[i] <= 65504.0f && bits_of(wide_half(narrow_half(x[i]))) == bits_of(x[i]);
    return half ? FLOAT16 : FLOAT32;
}

typedef struct {
    const Linear *linear;
    const float *weight;
    long row_stride, column_stride;
} Packing;

static void pack_panel(void *context, long panel, int thread) {
    (void)thread;
    const Packing *p = context;
    const Linear *linear = p->linear;
    float row[PANEL];
    for (long k = 0; k < linear->inputs; k++) {
        for (int c = 0; c < PANEL; c++) {
            long column = linear_column_at(linear, panel, c);
            row[c] = column < 0 ? 0.0f : p->weight[k * p->row_stride + column * p->column_stride];
        }
        long place = (panel * linear->inputs + k) * PANEL;
        if (linear->kind == FLOAT32) {
            memcpy((float *)linear->panels + place, row, sizeof row);
            continue;
        }
        uint16_t *to = (uint16_t *)linear->panels + place;
        for (int c = 0; c < PANEL; c++) {
            if (linear->kind == FLOAT16) to[c] = narrow_half(row[c]);
            else to[c % HALF * 2 + c / HALF] = (uint16_t)(bits_of(row[c]) >> 16);
        }
    }
}

/* Fill linear->panels from a weight whose element (k, n) lies at k * row_stride + n * column_stride. Returns 0, or -1
 * without memory. */
int linear_pack(Pool *pool, const Linear *linear, const float *weight, long row_stride, long column_stride) {
    if (linear->kind == INT8) return linear_int8_pack(pool, linear, weight, row_stride, column_stride);
    Packing p = {linear, weight, row_stride, column_stride};
    pool_run(pool, pack_panel, &p, (linear->outputs + PANEL - 1) / PANEL);
    return 0;
}
