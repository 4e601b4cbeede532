/* Work shared between the calling thread and a pool of others. */
#ifndef LEGATO_PARALLEL_H
#define LEGATO_PARALLEL_H

#include <stdint.h>

typedef struct Pool Pool;

/* Does chunk `chunk` of what `arguments` describe; `thread` is from 0 to num_threads - 1, different for threads that run
   at the same time. */
typedef void (*Task)(const void *arguments, int64_t chunk, int64_t thread);

/* Threads that may run at the same time, the calling one included. */
int64_t num_threads(const Pool *pool);

/* All chunks from 0 to chunks - 1, in any order; returns when they are done. Any thread may call; while the pool works for
   one, another does its chunks alone. */
void run_chunks(Pool *pool, int64_t chunks, Task task, const void *arguments);

/* How many of `count` things a chunk should hold, so that each thread gets a few, and none fewer than `least`. */
static inline int64_t chunk_size(const Pool *pool, int64_t count, int64_t least) {
    int64_t size = (count + 4 * num_threads(pool) - 1) / (4 * num_threads(pool));
    return size > least ? size : least;
}

/* `count` things divided into chunks that become smaller (factoring: Hummel, Schonberg and Flynn, 1992): each round, all
   threads together take half of what is left, so long runs of memory come first and nobody waits long for the last. */
typedef struct {
    int64_t first, end;
} Range;

/* The range of chunk `chunk`, empty past the last. */
static inline Range factored_chunk(int64_t count, int64_t threads, int64_t chunk) {
    for (int64_t first = 0; first < count; chunk -= threads) {
        int64_t size = (count - first + 2 * threads - 1) / (2 * threads);
        if (chunk < threads) {
            first += chunk * size;
            if (first >= count) break;
            return (Range){first, first + size < count ? first + size : count};
        }
        first += threads * size;
    }
    return (Range){count, count};
}

static inline int64_t num_factored_chunks(int64_t count, int64_t threads) {
    int64_t first = 0, chunks = 0;
    while (first < count) {
        int64_t size = (count - first + 2 * threads - 1) / (2 * threads);
        int64_t in_round = (count - first + size - 1) / size;
        in_round = in_round < threads ? in_round : threads;
        chunks += in_round;
        first += in_round * size;
    }
    return chunks;
}

#endif
