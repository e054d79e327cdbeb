/* All operators of a step in one call: what a CUDA graph is elsewhere. The operators and their buffers are fixed; a step
 * brings its numbers of tokens and rows and its index lists. */
#include "attention.h"
#include "linear.h"
#include "rows.h"

enum { EMBED = 0, NORM = 1, LINEAR = 2, HEADS = 3, ATTENTION = 4, GATHER = 5, HEAD = 6 };

/* The index lists of one KV group. */
typedef struct {
    const int64_t *slots;
    const int64_t *tables;
    long table_stride;
} Group;

typedef struct {
    long tokens, rows, samples;
    const int64_t *ids, *positions, *query_start, *contexts, *sample_index;
    const Group *groups;
} Inputs;

typedef struct {
    long what;
    long group;         /* KV group of HEADS and ATTENTION */
    const void *kernel; /* Embed, Norm, Linear, Heads or Attention; what a step brings is not filled in */
    const Step *step;   /* of ATTENTION, likewise */
    const float *in;    /* of LINEAR and HEAD */
    float *out;
    long in_stride, out_stride;
} Operation;

static int run_attention(Pool *pool, const Operation *o, const Inputs *inputs) {
    Step step = *o->step;
    step.rows = inputs->rows;
    step.query_start = inputs->query_start;
    step.contexts = inputs->contexts;
    step.tables = inputs->groups[o->group].tables;
    step.table_stride = inputs->groups[o->group].table_stride;
    return attention_run(pool, o->kernel, &step);
}

static void run_heads(Pool *pool, const Operation *o, const Inputs *inputs) {
    Heads heads = *(const Heads *)o->kernel;
    heads.tokens = inputs->tokens;
    heads.positions = inputs->positions;
    heads.slots = inputs->groups[o->group].slots;
    heads_run(pool, &heads);
}

static void run_norm(Pool *pool, const Operation *o, const Inputs *inputs) {
    Norm norm = *(const Norm *)o->kernel;
    norm.rows = inputs->tokens;
    norm_run(pool, &norm);
}

static void run_rows_of(Pool *pool, const Operation *o, const int64_t *places, long rows) {
    Embed embed = *(const Embed *)o->kernel;
    embed.places = places;
    embed.rows = rows;
    embed_run(pool, &embed);
}

/* Run the operations in order. Returns 0, or -1 without memory. */
int program_run(Pool *pool, const Operation *operations, long count, const Inputs *inputs) {
    for (long i = 0; i < count; i++) {
        const Operation *o = &operations[i];
        int failed = 0;
        switch (o->what) {
        case EMBED: run_rows_of(pool, o, inputs->ids, inputs->tokens); break;
        case GATHER: run_rows_of(pool, o, inputs->sample_index, inputs->samples); break;
        case NORM: run_norm(pool, o, inputs); break;
        case HEADS: run_heads(pool, o, inputs); break;
        case ATTENTION: failed = run_attention(pool, o, inputs); break;
        default:
            failed = linear_run(pool, o->kernel, o->in, o->in_stride,
                                o->what == HEAD ? inputs->samples : inputs->tokens, o->out, o->out_stride);
        }
        if (failed) return -1;
    }
    return 0;
}
