/* Chunks are handed out by a counter, so a thread that the system holds up delays one chunk at most; and a thread that
 * has not begun when all chunks are taken is not waited for. */
#define _GNU_SOURCE
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The gate of a piece of work: its number, whether threads may still join, how many are inside. */
#define OPEN 1u
#define INSIDE 2u
#define INSIDE_MASK 0xfffeu
#define NUMBER_SHIFT 16

#define HUGE_PAGE ((size_t)2 << 20)

/* Looks at the gate before a thread lies down, about 0.1 ms: the gap between two operators of a step is some
 * microseconds, and a core that others need is not to be held any longer. */
#define LOOKS 3000
/* Looks before a waiting thread lets others have the core. */
#define LOOKS_BUSY 300

typedef struct {
    void *memory;
    size_t bytes;
} Scratch;

typedef struct {
    Pool *pool;
    int index;
    pthread_t handle;
} Thread;

struct Pool {
    _Alignas(64) _Atomic uint64_t gate;
    _Alignas(64) _Atomic long next;
    _Alignas(64) _Atomic uint32_t bell; /* changes with each piece of work: what sleepers wait on */
    _Atomic int asleep;
    _Atomic bool ended;
    Work work;
    void *context;
    long chunks;
    int threads;
    Thread *others;
    Scratch *scratch; /* one for each thread, and the shared one */
};

static inline void breathe(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void take_chunks(Pool *pool, int thread) {
    for (;;) {
        long chunk = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (chunk >= pool->chunks) return;
        pool->work(pool->context, chunk, thread);
    }
}

/* Whether the gate is open to a thread that last worked on piece `seen`; it is inside then. */
static bool join(Pool *pool, uint64_t *seen) {
    uint64_t gate = atomic_load_explicit(&pool->gate, memory_order_acquire);
    while ((gate & OPEN) && (gate >> NUMBER_SHIFT) != *seen) {
        if (atomic_compare_exchange_weak_explicit(&pool->gate, &gate, gate + INSIDE, memory_order_acquire,
                                                  memory_order_acquire)) {
            *seen = gate >> NUMBER_SHIFT;
            return true;
        }
    }
    return false;
}

static void sleep_until_bell(Pool *pool, uint64_t seen) {
    uint32_t bell = atomic_load(&pool->bell);
    atomic_fetch_add(&pool->asleep, 1);
    /* Work that came between the last look and here has rung the bell before or sees the sleeper. */
    uint64_t gate = atomic_load(&pool->gate);
    bool work = (gate & OPEN) && (gate >> NUMBER_SHIFT) != seen;
    if (!work && !atomic_load(&pool->ended)) syscall(SYS_futex, &pool->bell, FUTEX_WAIT_PRIVATE, bell, NULL, NULL, 0);
    atomic_fetch_sub(&pool->asleep, 1);
}

static void *serve(void *argument) {
    Thread *self = argument;
    Pool *pool = self->pool;
    uint64_t seen = 0;
    while (!atomic_load_explicit(&pool->ended, memory_order_acquire)) {
        int look = 0;
        for (; look < LOOKS; look++) {
            if (join(pool, &seen)) break;
            breathe();
        }
        if (look == LOOKS) {
            sleep_until_bell(pool, seen);
            continue;
        }
        take_chunks(pool, self->index);
        atomic_fetch_sub_explicit(&pool->gate, INSIDE, memory_order_release);
    }
    return NULL;
}

static void ring(Pool *pool) {
    atomic_fetch_add(&pool->bell, 1);
    if (atomic_load(&pool->asleep)) syscall(SYS_futex, &pool->bell, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

void pool_run(Pool *pool, Work work, void *context, long chunks) {
    if (pool->threads == 1 || chunks <= 1) {
        for (long chunk = 0; chunk < chunks; chunk++) work(context, chunk, 0);
        return;
    }
    pool->work = work;
    pool->context = context;
    pool->chunks = chunks;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    uint64_t number = (atomic_load_explicit(&pool->gate, memory_order_relaxed) >> NUMBER_SHIFT) + 1;
    atomic_store(&pool->gate, number << NUMBER_SHIFT | OPEN);
    ring(pool);
    take_chunks(pool, 0);
    atomic_fetch_and_explicit(&pool->gate, ~(uint64_t)OPEN, memory_order_acq_rel);
    for (int look = 0; atomic_load_explicit(&pool->gate, memory_order_acquire) & INSIDE_MASK; look++) {
        if (look > LOOKS_BUSY) sched_yield();
        breathe();
    }
}

int pool_threads(const Pool *pool) { return pool->threads; }

static void *at_least(Scratch *scratch, size_t bytes) {
    if (scratch->bytes < bytes) {
        free(scratch->memory);
        const size_t unit = bytes < HUGE_PAGE ? 4096 : HUGE_PAGE, rounded = (bytes + unit - 1) / unit * unit;
        scratch->memory = aligned_alloc(unit, rounded);
        scratch->bytes = scratch->memory ? rounded : 0;
        if (scratch->memory && unit == HUGE_PAGE) madvise(scratch->memory, rounded, MADV_HUGEPAGE);
    }
    return scratch->memory;
}

void *pool_scratch(Pool *pool, int thread, size_t bytes) { return at_least(&pool->scratch[thread], bytes); }

void *pool_shared(Pool *pool, size_t bytes) { return at_least(&pool->scratch[pool->threads], bytes); }

/* End the threads that there are. */
static void pool_free(Pool *pool) {
    atomic_store(&pool->ended, true);
    ring(pool);
    for (int index = 1; index < pool->threads; index++) pthread_join(pool->others[index].handle, NULL);
    for (int index = 0; pool->scratch && index <= pool->threads; index++) free(pool->scratch[index].memory);
    free(pool->scratch);
    free(pool->others);
    free(pool);
}

Pool *pool_new(int threads) {
    Pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    if (!pool) return NULL;
    *pool = (Pool){.threads = 1};
    pool->others = calloc(threads, sizeof *pool->others);
    pool->scratch = calloc(threads + 1, sizeof *pool->scratch);
    if (!pool->others || !pool->scratch) {
        pool_free(pool);
        return NULL;
    }
    for (int index = 1; index < threads; index++) {
        Thread *thread = &pool->others[index];
        *thread = (Thread){pool, index, 0};
        if (pthread_create(&thread->handle, NULL, serve, thread)) {
            pool_free(pool);
            return NULL;
        }
        pool->threads = index + 1;
    }
    return pool;
}
