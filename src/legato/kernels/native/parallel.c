/* A pool of threads that suits short tasks on a machine that others use too.

   OpenMP divides the work before it starts and waits for every thread: on two processors, with another process on one of
   them, each of a step's hundreds of barriers may cost a time slice. Here a thread claims a chunk when it comes to it, and
   nobody waits for one that did not come: the calling thread does what is left itself. */
#define _GNU_SOURCE
#include "parallel.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "legato.h"
#include "simd.h"

#define CLOSED 0xffffffffu /* no chunk to claim: the job is being changed */
#define AWAKE_SPINS 20000  /* some hundred microseconds: kernels of a pass follow each other faster */
#define PATIENT_SPINS 2000

struct Pool {
    _Atomic uint64_t ticket; /* number of the job << 32 | next chunk: one word, so that nobody claims a chunk of another job */
    _Atomic int64_t chunks, done;
    _Atomic(Task) task;
    _Atomic(const void *) arguments;
    _Atomic int sleeping, busy;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    int64_t threads;
};

typedef struct {
    Pool *pool;
    int64_t thread;
} Worker;

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Works on the job that is there until nothing of it is left to claim. Returns the job's number. */
static uint32_t work(Pool *pool, int64_t thread) {
    uint64_t ticket = atomic_load(&pool->ticket);
    uint32_t job = (uint32_t)(ticket >> 32);
    for (;;) {
        uint32_t chunk = (uint32_t)ticket;
        Task task = atomic_load(&pool->task);
        const void *arguments = atomic_load(&pool->arguments);
        if (chunk == CLOSED) return job - 1; /* so that the job is met again once it is open */
        if ((uint32_t)(ticket >> 32) != job || chunk >= atomic_load(&pool->chunks)) return job;
        if (!atomic_compare_exchange_weak(&pool->ticket, &ticket, ticket + 1)) continue; /* ticket is what is there now */
        task(arguments, chunk, thread);
        atomic_fetch_add(&pool->done, 1);
        ticket = atomic_load(&pool->ticket);
    }
}

static int has_new_job(Pool *pool, uint32_t job) {
    uint64_t ticket = atomic_load(&pool->ticket);
    return (uint32_t)(ticket >> 32) != job && (uint32_t)ticket != CLOSED;
}

static void wait_for_job(Pool *pool, uint32_t job) {
    for (int i = 0; i < AWAKE_SPINS; i++) {
        if (has_new_job(pool, job)) return;
        pause_briefly();
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleeping, 1);
    while (!has_new_job(pool, job)) pthread_cond_wait(&pool->wake, &pool->mutex);
    atomic_fetch_sub(&pool->sleeping, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static void *worker_main(void *argument) {
    Worker worker = *(Worker *)argument;
    free(argument);
    for (uint32_t job = 0;;) {
        wait_for_job(worker.pool, job);
        job = work(worker.pool, worker.thread);
    }
    return NULL;
}

static void wake_all(Pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
}

int64_t num_threads(const Pool *pool) { return pool->threads; }

void run_chunks(Pool *pool, int64_t chunks, Task task, const void *arguments) {
    int64_t first = 0;
    int alone = chunks <= 1 || pool->threads == 1;
    while (first < chunks && (alone || atomic_exchange(&pool->busy, 1))) task(arguments, first++, 0);
    if (alone) return;
    if (first == chunks) return; /* never got the pool */
    uint64_t job = ((atomic_load(&pool->ticket) >> 32) + 1) & 0xffffffffu;
    atomic_store(&pool->ticket, job << 32 | CLOSED);
    atomic_store(&pool->task, task);
    atomic_store(&pool->arguments, arguments);
    atomic_store(&pool->chunks, chunks);
    atomic_store(&pool->done, first);
    atomic_store(&pool->ticket, job << 32 | (uint64_t)first);
    if (atomic_load(&pool->sleeping)) wake_all(pool);
    work(pool, 0);
    for (int spins = 0; atomic_load(&pool->done) < chunks; spins++) {
        if (spins < PATIENT_SPINS)
            pause_briefly();
        else
            sched_yield(); /* whoever has the last chunk may wait for this very processor */
    }
    atomic_store(&pool->busy, 0);
}

/* NULL if there is no memory. Threads that cannot be had are done without. It lasts as long as the process. */
EXPORT Pool *legato_pool_new(int64_t threads) {
    Pool *pool = calloc(1, sizeof(Pool));
    if (!pool) return NULL;
    pool->threads = threads;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    for (int64_t i = 1; i < threads; i++) {
        Worker *worker = malloc(sizeof(Worker));
        pthread_t thread;
        if (!worker) break;
        *worker = (Worker){pool, i};
        if (pthread_create(&thread, NULL, worker_main, worker)) {
            free(worker);
            break;
        }
        pthread_detach(thread);
    }
    return pool;
}
