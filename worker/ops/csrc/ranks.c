#include "ranks.h"
#include "intrinsics.h"
#include <sched.h>
#include <string.h>

enum { SPINS = 4096, THREADED_BYTES = 1 << 18 };

/* Waits until all ranks have written the current round. Returns 0, or 1 if a rank is gone. */
static int wait_for_all(const Ranks *r) {
    RanksHeader *header = r->header;
    for (long i = 0; i < r->count; i++)
        for (long spins = 0; header->ranks[i].rounds < r->rounds; spins++) {
            if (header->gone) return 1;
            if (spins < SPINS)
                spin();
            else
                sched_yield(); /* there may be more ranks than processors */
        }
    return 0;
}

/* Copies t pieces of `bytes` bytes between two arrays, whose rows are to_stride and from_stride bytes long. */
static void copy_rows(char *to, long to_stride, const char *from, long from_stride, long t, long bytes, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && t * bytes > THREADED_BYTES)
    for (long i = 0; i < t; i++) memcpy(to + i * to_stride, from + i * from_stride, bytes);
}

/* Runs one round: shares this rank's columns of t rows, and waits for the columns of all other ranks. Returns the whole
 * rows [t][count * bytes], or NULL if a rank is gone. */
static const char *exchange(Ranks *r, const char *own, long t, long bytes, int threads) {
    long row = r->count * bytes;
    char *shared = r->buffers[r->rounds++ % 2];
    copy_rows(shared + r->rank * bytes, row, own, bytes, t, bytes, threads);
    if (r->sockets) return swap_by_sockets(r, own, shared, t, bytes) ? NULL : shared;
    r->header->ranks[r->rank].rounds = r->rounds; /* a sequentially consistent store: it follows the copy */
    return wait_for_all(r) ? NULL : shared;
}

/* All-gather of columns: writes the `own` [t][bytes] of all ranks, side by side in the order of the ranks, to out
 * [t][count * bytes]. All ranks must call it with the same t and bytes. Returns 0, or 1 if a rank is gone; then `out`
 * is undefined. */
__attribute__((visibility("default"))) int ranks_gather(Ranks *r, const char *own, char *out, long t, long bytes,
                                                        int threads) {
    long row = r->count * bytes, most = r->capacity / row;
    for (long begin = 0; begin < t; begin += most) {
        long rows = t - begin < most ? t - begin : most;
        const char *shared = exchange(r, own + begin * bytes, rows, bytes, threads);
        if (!shared) return 1;
        copy_rows(out + begin * row, row, shared, row, rows, row, threads);
    }
    return 0;
}

const char *ranks_gathered(Ranks *r, const char *own, char *out, long t, long bytes, int threads) {
    if (t * r->count * bytes <= r->capacity) return exchange(r, own, t, bytes, threads);
    return ranks_gather(r, own, out, t, bytes, threads) ? NULL : out;
}
