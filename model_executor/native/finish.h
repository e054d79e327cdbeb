/* How the rows of a product are cut, and what becomes of its sums. */
#ifndef TERCET_FINISH_H
#define TERCET_FINISH_H

#include "linear.h"
#include "vector.h"

/* Vectors of a half: a panel is taken as so many pairs of vectors, one in each half. */
#define PAIRS (HALF / LANES)

/* Where pair p of neighbouring panels begins, with panels `panel` apart and columns `column`. */
INLINE long pair_place(long panel, long column, long p) { return p / PAIRS * panel + p % PAIRS * LANES * column; }

/* Rows in blocks as equal as can be: the first `larger` hold a row more than `least`. */
typedef struct {
    long count, least, larger;
} Blocks;

INLINE Blocks cut_rows(long rows, long most) {
    const long count = (rows + most - 1) / most;
    return (Blocks){count, rows / count, rows % count};
}

INLINE long first_of(Blocks blocks, long index) {
    return index * blocks.least + (index < blocks.larger ? index : blocks.larger);
}

INLINE int rows_of(Blocks blocks, long index) { return (int)(blocks.least + (index < blocks.larger)); }

INLINE vf activate(long finish, vf gate) {
    if (finish == GATED_SILU) return gate / (1.0f + exponential(-gate));
    vf inner = 0.7978845608f * (gate + 0.044715f * gate * gate * gate);
    return 0.5f * gate * (1.0f + hyperbolic_tangent(inner));
}

/* Write the first `count` columns of a vector. */
INLINE void store_some(float *to, vf x, long count) {
    if (count >= LANES) store(to, x);
    else if (count > 0) memcpy(to, &x, count * sizeof(float));
}

/* Ask for the lines of a panel's results before they are computed. */
INLINE void expect(const Linear *linear, float *out, long stride, int rows, long panel) {
    float *first = out + (linear->finish == PLAIN ? panel * PANEL : panel * HALF);
    for (int r = 0; r < rows; r++) {
        __builtin_prefetch(first + r * stride, 1, 2);
        if (linear->finish == PLAIN) __builtin_prefetch(first + r * stride + HALF, 1, 2);
    }
}

/* Put one row's 32 sums of a panel where they belong in the row's result. */
static inline void finish(const Linear *linear, float *out, long panel, const float *sums) {
    for (int at = 0; at < HALF; at += LANES) {
        const long column = panel * PANEL + at, gated = panel * HALF + at;
        vf low = load(sums + at), high = load(sums + HALF + at);
        if (linear->bias) {
            low += load(linear->bias + column);
            high += load(linear->bias + column + HALF);
        }
        if (linear->finish == PLAIN) {
            store_some(out + column, low, linear->outputs - column);
            store_some(out + column + HALF, high, linear->outputs - column - HALF);
        } else {
            store_some(out + gated, activate(linear->finish, low) * high, linear->outputs / 2 - gated);
        }
    }
}

#endif
