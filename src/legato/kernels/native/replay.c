/* A list of kernel calls, run as one: on small steps the way back to Python between two kernels costs as much as some of
   them do. */
#include "legato.h"
#include "parallel.h"
#include "simd.h"

typedef struct {
    int64_t (*kernel)(Pool *, const void *);
    const void *arguments;
} Call;

/* Stops at the first that fails. */
EXPORT int64_t legato_replay(Pool *pool, const Call *calls, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (calls[i].kernel(pool, calls[i].arguments)) return 1;
    return 0;
}
