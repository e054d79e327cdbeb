/* Causal attention over the paged cache, softmax in one pass (Milakov and Gimelshein, 2018; Dao et al., 2022).
 *
 * Keys are taken in tiles of 32 neighbouring positions that begin at multiples of 32, tiles in parts of PART positions.
 * Within a part a query's sums run on from tile to tile; the parts of a query are joined in rising order at the end. So
 * what a query gets depends on its position and the keys alone: not on the other queries of the step, nor on how the
 * prompt was cut. A tile that a query sees nothing of changes none of its bits. */
#include "attention.h"

#include <math.h>
#include <stdbool.h>

#include "narrow.h"

#define TILE 32
/* Positions that lie side by side: blocks are multiples of so many. */
#define HALF 16
#define HALVES (TILE / HALF)
/* Vectors of a row of scores. */
#define VECTORS (TILE / LANES)
#define PART 1024
/* The cache level that asks for what is read next. */
#define NEXT 3
/* Most query rows (queries times the heads of a KV head) of an item. */
#define MAX_ROWS 48
/* Query rows whose scores are kept in registers at once, and whose sums of values are. */
#if REGISTERS == 32
#define SCORE_ROWS 12
#define VALUE_ROWS 6
#define VALUE_VECTORS 4
#else
#define SCORE_ROWS 6
#define VALUE_ROWS 6
#define VALUE_VECTORS 2
#endif

/* Some queries of a row, some KV heads, one part or all of them. */
typedef struct {
    long row;
    long token, queries; /* index into T of the first */
    long position;       /* of the first query */
    long kv_head, kv_heads;
    long first, last; /* parts */
    float *kept;      /* where the state of the one part goes; NULL: the item is finished here */
} Item;

/* The state of query rows: greatest score, sum of exponentials by lane, weighted values [rows, head_dim]. */
typedef struct {
    float *best;
    vf *total;
    float *values;
} State;

typedef struct {
    const Attention *attention;
    const Step *step;
    Pool *pool;
    const Item *items;
    bool failed;
} Run;

/* Where the keys and values of a tile's halves lie, in numbers of the cache, for KV head 0. A half is part of one block.
 * What is beyond the context is masked: the rest of its block, and the first half once more for a second one that has no
 * block. It is finite, as all of the cache is. */
typedef struct {
    long keys[HALVES], values[HALVES];
} Places;

static void find_places(const Attention *a, const int64_t *table, long first, long context, Places *places) {
    const long token = a->kv_heads * a->head_dim;
    for (int half = 0; half < HALVES; half++) {
        const long position = first + half * HALF < context ? first + half * HALF : first;
        const long block = position / a->block_size, within = position - block * a->block_size;
        const long begin = table[block] * a->block_size * token;
        places->keys[half] = begin + within;
        places->values[half] = begin + within * token;
    }
}

/* Keys of one KV head: two halves of a tile, rows `row` bytes apart for each element of the head. */
typedef struct {
    const char *low, *high;
    long row;
} Keys;

/* Scores of some query rows against two vectors of a tile: query [head_dim, rows of the item], to [row, 32]. `next`: the
 * keys that are read after these, asked for meanwhile: they lie anywhere, and all at once would keep the processor
 * waiting. Returns `rows`. */
INLINE int score_rows(const int kind, const int rows, const float *query, long stride, long head_dim, Keys keys,
                      Keys next, float *scores) {
    vf low[SCORE_ROWS], high[SCORE_ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) low[r] = high[r] = (vf){0};
    for (long d = 0; d < head_dim; d++, query += stride) {
        const vf a = load_as(kind, keys.low + d * keys.row), b = load_as(kind, keys.high + d * keys.row);
        __builtin_prefetch(next.low + d * next.row, 0, NEXT);
        __builtin_prefetch(next.high + d * next.row, 0, NEXT);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            low[r] += query[r] * a;
            high[r] += query[r] * b;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        store(scores + r * TILE, low[r]);
        store(scores + r * TILE + HALF, high[r]);
    }
    return rows;
}

/* Of all query rows against a vector of each half. */
INLINE void score_pair(const int kind, long rows, const float *query, long head_dim, Keys keys, Keys next,
                       float *scores) {
    for (long r = 0; r < rows;) {
        const float *from = query + r;
        float *to = scores + r * TILE;
        switch (rows - r) {
        case 1: r += score_rows(kind, 1, from, rows, head_dim, keys, next, to); break;
        case 2: r += score_rows(kind, 2, from, rows, head_dim, keys, next, to); break;
        case 3: r += score_rows(kind, 3, from, rows, head_dim, keys, next, to); break;
        case 4:
        case 5: r += score_rows(kind, 4, from, rows, head_dim, keys, next, to); break;
#if REGISTERS == 32
        case 6:
        case 7: r += score_rows(kind, 6, from, rows, head_dim, keys, next, to); break;
        case 8:
        case 9:
        case 10:
        case 11: r += score_rows(kind, 8, from, rows, head_dim, keys, next, to); break;
#endif
        default: r += score_rows(kind, SCORE_ROWS, from, rows, head_dim, keys, next, to); break;
        }
    }
}

INLINE void score(const int kind, long rows, const float *query, long head_dim, Keys keys, Keys next, float *scores) {
    for (int at = 0; at < HALF; at += LANES) {
        const Keys here = {place_of(kind, keys.low, at), place_of(kind, keys.high, at), keys.row};
        score_pair(kind, rows, query, head_dim, here, next, scores + at);
    }
}

/* Values of one KV head: two halves of a tile, tokens `row` bytes apart. */
typedef struct {
    const char *halves[HALVES];
    long row;
} Values;

/* values[r] += sum over the tile's keys j of weight[r, j] * from[j], for `vectors` vectors from element d on. `next`: the
 * values that are read after these. Returns `rows`. */
INLINE int weigh_rows(const int kind, const int rows, const int vectors, const float *weight, const Values from,
                      const Values next, long d, float *values, long head_dim) {
    vf sums[VALUE_ROWS * VALUE_VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sums[r * VALUE_VECTORS + v] = load(values + r * head_dim + d + v * LANES);
    for (int half = 0; half < HALVES; half++, weight += HALF) {
        const char *value = place_of(kind, from.halves[half], d), *after = place_of(kind, next.halves[half], d);
        for (long j = 0; j < HALF; j++, value += from.row, after += next.row) {
            vf x[VALUE_VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) x[v] = load_as(kind, place_of(kind, value, v * LANES));
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v += 64 / LANES / kind_bytes(kind))
                __builtin_prefetch(place_of(kind, after, v * LANES), 0, NEXT);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++) sums[r * VALUE_VECTORS + v] += weight[r * TILE + j] * x[v];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store(values + r * head_dim + d + v * LANES, sums[r * VALUE_VECTORS + v]);
    return rows;
}

INLINE void weigh_width(const int kind, const int vectors, long rows, const float *weight, const Values value,
                        const Values next, long d, float *values, long head_dim) {
    for (long r = 0; r < rows;) {
        const float *from = weight + r * TILE;
        float *to = values + r * head_dim;
        switch (rows - r) {
        case 1: r += weigh_rows(kind, 1, vectors, from, value, next, d, to, head_dim); break;
        case 2: r += weigh_rows(kind, 2, vectors, from, value, next, d, to, head_dim); break;
        case 3:
        case 5: r += weigh_rows(kind, 3, vectors, from, value, next, d, to, head_dim); break;
        case 4: r += weigh_rows(kind, 4, vectors, from, value, next, d, to, head_dim); break;
        default: r += weigh_rows(kind, VALUE_ROWS, vectors, from, value, next, d, to, head_dim); break;
        }
    }
}

INLINE void weigh(const int kind, long rows, const float *weight, const Values value, const Values next, float *values,
                  long head_dim) {
    long d = 0;
    for (; d + VALUE_VECTORS * LANES <= head_dim; d += VALUE_VECTORS * LANES)
        weigh_width(kind, VALUE_VECTORS, rows, weight, value, next, d, values, head_dim);
    for (; d < head_dim; d += LANES) weigh_width(kind, 1, rows, weight, value, next, d, values, head_dim);
}

INLINE vf shape_score(const Attention *a, vf score) {
    score *= a->scale;
    if (a->soft_cap != 0.0f) score = a->soft_cap * hyperbolic_tangent(score / a->soft_cap);
    return score;
}

/* Turn the scores of one query row into weights, and its state to the new greatest score. `masked`: some of the tile is
 * not seen; `first_at` is the position of its first key relative to the query's. */
INLINE void soften(const Attention *a, const State *state, long r, const bool masked, int32_t first_at, float *scores) {
    const vi lane = LANE_NUMBERS;
    vf score[VECTORS], most;
    vi seen[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
        score[v] = shape_score(a, load(scores + v * LANES));
        if (masked) {
            const vi at = lane + (first_at + v * LANES);
            seen[v] = at <= 0;
            if (a->window) seen[v] &= at > (int32_t)-a->window;
            score[v] = pick(seen[v], score[v], all(-INFINITY));
        }
        most = v ? larger(most, score[v]) : score[v];
    }
    const float top = largest(most), best = state->best[r];
    if (top > best) {
        /* The exponential of minus infinity is not zero here, but then the state is zero. */
        vf shrink = exponential(all(best - top));
        state->best[r] = top;
        state->total[r] *= shrink;
        float *values = state->values + r * a->head_dim;
        for (long d = 0; d < a->head_dim; d += LANES) store(values + d, load(values + d) * shrink);
    }
    const float base = state->best[r] == -INFINITY ? 0.0f : state->best[r];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
        score[v] = exponential(score[v] - base);
        if (masked) score[v] = pick(seen[v], score[v], (vf){0});
        state->total[r] += score[v];
        store(scores + v * LANES, score[v]);
    }
}

/* The same of all rows of a KV head, `group` of them for each query; the first query stands at `position`. */
static void soften_rows(const Attention *a, const State *state, long rows, long group, long position, long first,
                        float *scores) {
    for (long r = 0; r < rows; position++) {
        const bool masked = first + TILE - 1 > position || (a->window && first <= position - a->window);
        for (const long end = r + group; r < end; r++, scores += TILE) {
            if (masked) soften(a, state, r, true, (int32_t)(first - position), scores);
            else soften(a, state, r, false, 0, scores);
        }
    }
}

static void clear(const State *state, long rows, long head_dim) {
    for (long r = 0; r < rows; r++) {
        state->best[r] = -INFINITY;
        state->total[r] = (vf){0};
    }
    memset(state->values, 0, rows * head_dim * sizeof(float));
}

/* Query rows that share a KV head. */
static long rows_a_head(const Attention *a, const Item *item) { return item->queries * (a->heads / a->kv_heads); }

INLINE Keys keys_of(const int kind, const Attention *a, const Step *step, const Places *places, long head) {
    const char *key = place_of(kind, step->key, head * a->head_dim * a->block_size);
    return (Keys){place_of(kind, key, places->keys[0]), place_of(kind, key, places->keys[1]),
                  a->block_size * kind_bytes(kind)};
}

INLINE Values values_of(const int kind, const Attention *a, const Step *step, const Places *places, long head) {
    const char *value = place_of(kind, step->value, head * a->head_dim);
    return (Values){{place_of(kind, value, places->values[0]), place_of(kind, value, places->values[1])},
                    a->kv_heads * a->head_dim * kind_bytes(kind)};
}

/* One part of an item's keys into a cleared state. Rows stand by KV head. */
INLINE void attend_kind(const int kind, const Run *run, const Item *item, long part, const float *query, float *scores,
                        const State *state) {
    const Attention *a = run->attention;
    const Step *step = run->step;
    const long group = a->heads / a->kv_heads, rows = rows_a_head(a, item), width = a->head_dim;
    const int64_t *table = step->tables + item->row * step->table_stride;
    const long context = step->contexts[item->row], seen = item->position + item->queries;
    const long last = (part + 1) * PART < seen ? (part + 1) * PART : seen;
    Places places[2];
    long first = part * PART;
    if (a->window && item->position - a->window + 1 > first) first = (item->position - a->window + 1) / TILE * TILE;
    find_places(a, table, first, context, &places[0]);
    for (long at = first, turn = 0; at < last; at += TILE, turn ^= 1) {
        const Places *here = &places[turn], *after = here;
        if (at + TILE < last) {
            find_places(a, table, at + TILE, context, &places[turn ^ 1]);
            after = &places[turn ^ 1];
        }
        for (long i = 0; i < item->kv_heads; i++) {
            const long head = item->kv_head + i;
            const bool turns = i + 1 == item->kv_heads;
            const Places *there = turns ? after : here;
            const long next = turns ? item->kv_head : head + 1;
            const State mine = {state->best + i * rows, state->total + i * rows, state->values + i * rows * width};
            score(kind, rows, query + i * rows * width, width, keys_of(kind, a, step, here, head),
                  keys_of(kind, a, step, there, next), scores);
            soften_rows(a, &mine, rows, group, item->position, at, scores);
            weigh(kind, rows, scores, values_of(kind, a, step, here, head), values_of(kind, a, step, there, next),
                  mine.values, width);
        }
    }
}

static void attend_float32(const Run *run, const Item *item, long part, const float *query, float *scores,
                           const State *state) {
    attend_kind(FLOAT32, run, item, part, query, scores, state);
}

static void attend_bfloat16(const Run *run, const Item *item, long part, const float *query, float *scores,
                            const State *state) {
    attend_kind(BFLOAT16, run, item, part, query, scores, state);
}

static void attend_float16(const Run *run, const Item *item, long part, const float *query, float *scores,
                           const State *state) {
    attend_kind(FLOAT16, run, item, part, query, scores, state);
}

static void attend_part(const Run *run, const Item *item, long part, const float *query, float *scores,
                        const State *state) {
    switch (run->attention->kind) {
    case FLOAT32: attend_float32(run, item, part, query, scores, state); break;
    case BFLOAT16: attend_bfloat16(run, item, part, query, scores, state); break;
    default: attend_float16(run, item, part, query, scores, state);
    }
}

/* Join the state of the next part of a query row to that of all parts before. */
static void join(float *best, float *total, float *values, float next_best, float next_total, const float *next,
                 long head_dim) {
    const float top = next_best > *best ? next_best : *best;
    if (top == -INFINITY) return;
    const vf mine = exponential(all(*best - top)), theirs = exponential(all(next_best - top));
    *total = *total * mine[0] + next_total * theirs[0];
    for (long d = 0; d < head_dim; d += LANES) store(values + d, load(values + d) * mine + load(next + d) * theirs);
    *best = top;
}

/* The token and the head of an item's query row. */
static void whose(const Attention *a, const Item *item, long r, long *token, long *head) {
    const long group = a->heads / a->kv_heads, rows = rows_a_head(a, item);
    *token = item->token + r % rows / group;
    *head = (item->kv_head + r / rows) * group + r % rows % group;
}

static void write_out(const Run *run, const Item *item, long r, float total, const float *values) {
    const Attention *a = run->attention;
    long token, head;
    whose(a, item, r, &token, &head);
    float *to = run->step->out + (token * a->heads + head) * a->head_dim;
    for (long d = 0; d < a->head_dim; d += LANES) store(to + d, load(values + d) / total);
}

/* The queries of an item: for each KV head [head_dim, rows]. */
static void turn_queries(const Run *run, const Item *item, float *turned) {
    const Attention *a = run->attention;
    const long rows = rows_a_head(a, item);
    for (long r = 0; r < rows * item->kv_heads; r++) {
        long token, head;
        whose(a, item, r, &token, &head);
        const float *from = run->step->query + token * run->step->query_stride + head * a->head_dim;
        float *to = turned + r / rows * rows * a->head_dim + r % rows;
        for (long d = 0; d < a->head_dim; d++) to[d * rows] = from[d];
    }
}

/* Values [rows, head_dim], sums of exponentials [rows], greatest scores [rows]. */
static long state_floats(long rows, long head_dim) { return rows * (head_dim + 2); }

static void attend(void *context, long index, int thread) {
    Run *run = context;
    const Item *item = &run->items[index];
    const Attention *a = run->attention;
    const long rows = rows_a_head(a, item) * item->kv_heads, width = a->head_dim;
    const size_t floats = rows * LANES + 2 * rows * width + rows + state_floats(rows, width) + rows * TILE;
    float *room = pool_scratch(run->pool, thread, floats * sizeof(float));
    if (!room) {
        run->failed = true;
        return;
    }
    /* What is loaded as vectors stands first, aligned. */
    State state = {.total = (vf *)room, .values = room + rows * LANES};
    float *query = state.values + rows * width, *joined = query + rows * width;
    float *totals = joined + rows * width, *best = totals + rows, *scores = best + rows;
    state.best = scores + rows * TILE;
    turn_queries(run, item, query);
    for (long part = item->first; part < item->last; part++) {
        clear(&state, rows, width);
        attend_part(run, item, part, query, scores, &state);
        for (long r = 0; r < rows; r++) {
            if (part > item->first) {
                join(&best[r], &totals[r], joined + r * width, state.best[r], sum(state.total[r]),
                     state.values + r * width, width);
                continue;
            }
            best[r] = state.best[r];
            totals[r] = sum(state.total[r]);
            memcpy(joined + r * width, state.values + r * width, width * sizeof(float));
        }
    }
    if (item->kept) {
        memcpy(item->kept, joined, state_floats(rows, width) * sizeof(float));
        return;
    }
    for (long r = 0; r < rows; r++) write_out(run, item, r, totals[r], joined + r * width);
}

/* The first part that a query at `position` sees. */
static long first_part(const Attention *a, long position) {
    return a->window && position >= a->window ? (position - a->window + 1) / PART : 0;
}

/* Write the items of one row, or count them when `items` is NULL. An item takes all KV heads, which lie side by side in
 * the cache, unless there are too few rows to keep the threads busy; and a single query of several parts is shared out by
 * parts. */
static long row_items(const Attention *a, const Step *step, long row, bool by_heads, Item *items, float **kept) {
    const long count = step->query_start[row + 1] - step->query_start[row], group = a->heads / a->kv_heads;
    const long start = step->contexts[row] - count, most = MAX_ROWS / group, heads = by_heads ? 1 : a->kv_heads;
    long made = 0;
    for (long done = 0; done < count; done += most) {
        const long queries = count - done < most ? count - done : most, position = start + done;
        const long first = first_part(a, position), last = (position + queries - 1) / PART + 1;
        const bool by_parts = count == 1 && last - first > 1;
        for (long head = 0; head < a->kv_heads; head += heads)
            for (long part = first; part < (by_parts ? last : first + 1); part++, made++) {
                if (!items) continue;
                items[made] = (Item){row,
                                     step->query_start[row] + done,
                                     queries,
                                     position,
                                     head,
                                     heads,
                                     part,
                                     by_parts ? part + 1 : last,
                                     by_parts ? *kept : NULL};
                if (by_parts) *kept += state_floats(group * heads, a->head_dim);
            }
    }
    return made;
}

/* Join the parts of items that were shared out; neighbours of the same row and head belong together. */
static void join_items(const Run *run, long count) {
    const Attention *a = run->attention;
    const long width = a->head_dim;
    for (long i = 0; i < count; i++) {
        const Item *first = &run->items[i];
        if (!first->kept) continue;
        const long rows = rows_a_head(a, first) * first->kv_heads;
        float *values = first->kept, *totals = values + rows * width, *best = totals + rows;
        for (; i + 1 < count && run->items[i + 1].kept && run->items[i + 1].row == first->row &&
               run->items[i + 1].kv_head == first->kv_head;
             i++) {
            const float *next = run->items[i + 1].kept;
            for (long r = 0; r < rows; r++)
                join(&best[r], &totals[r], values + r * width, next[rows * (width + 1) + r], next[rows * width + r],
                     next + r * width, width);
        }
        for (long r = 0; r < rows; r++) write_out(run, first, r, totals[r], values + r * width);
    }
}

int attention_run(Pool *pool, const Attention *a, const Step *step) {
    long count = 0;
    /* Two rows a thread and more balance well enough; with prefill there are many items anyway. */
    const bool by_heads = step->rows < 2L * pool_threads(pool);
    for (long row = 0; row < step->rows; row++) count += row_items(a, step, row, by_heads, NULL, NULL);
    const size_t item_bytes = (count * sizeof(Item) + 63) / 64 * 64;
    char *room = pool_shared(pool, item_bytes + count * state_floats(a->heads, a->head_dim) * sizeof(float));
    if (!room) return -1;
    Item *items = (Item *)room;
    float *kept = (float *)(room + item_bytes), *begin = kept;
    count = 0;
    /* The longest rows stand last in a step: begun first, none is left over at the end. */
    for (long row = step->rows - 1; row >= 0; row--) count += row_items(a, step, row, by_heads, items + count, &kept);
    Run run = {a, step, pool, items, false};
    pool_run(pool, attend, &run, count);
    if (run.failed) return -1;
    if (kept != begin) join_items(&run, count);
    return 0;
}
