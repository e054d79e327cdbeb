/* A few threads that share the chunks of one piece of work after the other. */
#ifndef TERCET_POOL_H
#define TERCET_POOL_H

#include <stddef.h>

typedef struct Pool Pool;

/* Computes one chunk. `thread` is 0 .. threads - 1; no two calls that run at once have the same. */
typedef void (*Work)(void *context, long chunk, int thread);

/* A pool of `threads` threads with the caller, at least 1, that lives as long as the process; NULL when the system
 * refuses. Used by one caller at once. */
Pool *pool_new(int threads);

int pool_threads(const Pool *pool);

/* Run chunks 0 .. chunks - 1, in any order, and wait for them. */
void pool_run(Pool *pool, Work work, void *context, long chunks);

/* Memory of a thread that lasts until it is asked for again; NULL when the system refuses. Aligned to 64 bytes. */
void *pool_scratch(Pool *pool, int thread, size_t bytes);

/* The same, for what all threads read. */
void *pool_shared(Pool *pool, size_t bytes);

#endif
