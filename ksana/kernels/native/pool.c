/* A small persistent pool of threads, and what every kernel needs besides arithmetic.
 *
 * One job runs at a time. Its state is one word, generation << 32 | next item, and a thread owns an item when
 * it moved that word from one item to the next. The caller takes part and waits for items, not for threads:
 * a worker that sleeps or was descheduled before it took an item delays nobody. Workers spin for a short
 * while after a job (the next kernel of a step comes within microseconds) and then sleep on a condition.
 *
 * A second calling thread that finds the pool busy does its job alone. After fork() a child has no workers:
 * jobs still complete, on the calling thread; ksana_set_threads must not be called there.
 */
#define _GNU_SOURCE
#include "ksana.h"

#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MAX_THREADS = 256, SPIN_NS = 60000, SPINS_PER_LOOK = 64 };
static const uint64_t NO_ITEM = UINT32_MAX;

static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER; /* held while a job runs or the pool changes */
static pthread_t workers[MAX_THREADS];
static _Atomic int num_workers;

static _Alignas(64) _Atomic uint64_t state; /* generation << 32 | next item */
static _Atomic(ksana_work) job_fn;
static _Atomic(void *) job_context;
static _Atomic int job_items;
static _Alignas(64) _Atomic int num_finished;
static _Alignas(64) _Atomic int num_sleeping;
static _Atomic int stopping;
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wakeup = PTHREAD_COND_INITIALIZER;

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Do items of the current job until none is left. The fields are read before an item is won and are good if
 * it is: they only change when all items of the generation are finished. */
static void work(void) {
    uint64_t seen = atomic_load(&state);
    for (;;) {
        ksana_work fn = atomic_load(&job_fn);
        void *context = atomic_load(&job_context);
        int items = atomic_load(&job_items);
        if ((uint32_t)seen >= (uint32_t)items) {
            uint64_t again = atomic_load(&state);
            if (again == seen) return;
            seen = again;
            continue;
        }
        if (!atomic_compare_exchange_weak(&state, &seen, seen + 1)) continue;
        fn(context, (int)(uint32_t)seen);
        atomic_fetch_add(&num_finished, 1);
        seen = atomic_load(&state);
    }
}

static uint32_t generation(void) { return (uint32_t)(atomic_load(&state) >> 32); }

static void *run_worker(void *argument) {
    uint32_t done = (uint32_t)(uintptr_t)argument;
    for (;;) {
        int64_t until = now_ns() + SPIN_NS;
        int spins = 0;
        while (generation() == done && !atomic_load(&stopping)) {
            pause_briefly();
            if (++spins % SPINS_PER_LOOK == 0 && now_ns() > until) {
                pthread_mutex_lock(&sleep_lock);
                atomic_fetch_add(&num_sleeping, 1);
                while (generation() == done && !atomic_load(&stopping)) pthread_cond_wait(&wakeup, &sleep_lock);
                atomic_fetch_sub(&num_sleeping, 1);
                pthread_mutex_unlock(&sleep_lock);
            }
        }
        if (atomic_load(&stopping)) return NULL;
        done = generation();
        work();
    }
}

static void wake_workers(void) {
    if (atomic_load(&num_sleeping) == 0) return;
    pthread_mutex_lock(&sleep_lock);
    pthread_cond_broadcast(&wakeup);
    pthread_mutex_unlock(&sleep_lock);
}

void ksana_parallel(ksana_work fn, void *context, int num_items) {
    if (num_items <= 1 || num_workers == 0 || pthread_mutex_trylock(&in_use) != 0) {
        for (int item = 0; item < num_items; item++) fn(context, item);
        return;
    }
    atomic_store(&num_finished, 0);
    uint64_t old = atomic_load(&state) >> 32;
    atomic_store(&state, (old + 1) << 32 | NO_ITEM); /* nobody wins an item while the fields change */
    atomic_store(&job_fn, fn);
    atomic_store(&job_context, context);
    atomic_store(&job_items, num_items);
    atomic_store(&state, (old + 2) << 32);
    wake_workers();
    work();
    for (int spins = 0; atomic_load(&num_finished) < num_items; spins++) {
        if (spins < 4000)
            pause_briefly();
        else
            sched_yield();
    }
    pthread_mutex_unlock(&in_use);
}

int ksana_threads(void) { return num_workers + 1; }

/* Threads that work on a job, the caller included. Returns how many there are, fewer if the system refuses. */
EXPORT int ksana_set_threads(int num_threads) {
    if (num_threads < 1 || num_threads > MAX_THREADS)
        return ksana_fail("number of threads must be from 1 to %d, not %d", MAX_THREADS, num_threads);
    pthread_mutex_lock(&in_use);
    atomic_store(&stopping, 1);
    pthread_mutex_lock(&sleep_lock);
    pthread_cond_broadcast(&wakeup);
    pthread_mutex_unlock(&sleep_lock);
    for (int i = 0; i < num_workers; i++) pthread_join(workers[i], NULL);
    atomic_store(&stopping, 0);
    num_workers = 0;
    void *argument = (void *)(uintptr_t)generation();
    int started = 0;
    while (started < num_threads - 1 && pthread_create(&workers[started], NULL, run_worker, argument) == 0) started++;
    num_workers = started;
    pthread_mutex_unlock(&in_use);
    return num_workers + 1;
}

/* Scratch: one growing buffer per thread and kind, freed with the thread. */
typedef struct {
    void *memory[SCRATCH_KINDS];
    size_t bytes[SCRATCH_KINDS];
} Scratch;

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static __thread Scratch *my_scratch;

static void free_scratch(void *value) {
    Scratch *scratch = value;
    for (int i = 0; i < SCRATCH_KINDS; i++) free(scratch->memory[i]);
    free(scratch);
}
static void make_scratch_key(void) { pthread_key_create(&scratch_key, free_scratch); }

void *ksana_scratch(int which, size_t bytes) {
    if (my_scratch == NULL) {
        pthread_once(&scratch_once, make_scratch_key);
        my_scratch = calloc(1, sizeof *my_scratch);
        if (my_scratch == NULL) return NULL;
        pthread_setspecific(scratch_key, my_scratch);
    }
    if (my_scratch->bytes[which] < bytes) {
        free(my_scratch->memory[which]);
        my_scratch->memory[which] = NULL;
        my_scratch->bytes[which] = 0;
        size_t rounded = (bytes + bytes / 4 + 4095) & ~(size_t)4095;
        void *memory = NULL;
        if (posix_memalign(&memory, 64, rounded) != 0) return NULL;
        my_scratch->memory[which] = memory;
        my_scratch->bytes[which] = rounded;
    }
    return my_scratch->memory[which];
}

static __thread char error_text[256];
EXPORT const char *ksana_error(void) { return error_text; }

int ksana_fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    return -1;
}

EXPORT const char *ksana_isa(void) { return KSANA_ISA; }

/* Ask for huge pages for a large buffer before it is first written: streaming weights then misses the TLB less.
 * Best effort. */
EXPORT void ksana_use_huge_pages(void *memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t start = ((uintptr_t)memory + page - 1) & ~(page - 1);
    uintptr_t end = ((uintptr_t)memory + (uintptr_t)bytes) & ~(page - 1);
    if (end > start) madvise((void *)start, end - start, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}
