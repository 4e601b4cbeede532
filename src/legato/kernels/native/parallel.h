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

#endif
