/* Ranks: processes that compute a model together (tensor parallelism). Each rank has some columns of every weight.
 *
 * Ranks on one machine exchange rows through shared memory, ranks on several hosts through TCP (sockets.c). When a rank
 * has died, every wait for it ends with an error. */
#pragma once
#include <stdint.h>

enum { RANKS_MAX = 8, RANKS_LINE = 64 }; /* RANKS_LINE: bytes of a cache line; padding to it avoids false sharing */

/* The header at the beginning of the shared memory, which is initially zero. */
typedef struct {
    struct {
        _Atomic uint64_t rounds; /* how many rounds this rank has written */
        char unused[RANKS_LINE - sizeof(uint64_t)];
    } ranks[RANKS_MAX];
    _Atomic int gone; /* set when a rank has died */
    char unused[RANKS_LINE - sizeof(int)];
} RanksHeader;

typedef struct {
    RanksHeader *header;
    char *buffers[2]; /* rounds use them in turn: when a rank starts a round, all ranks have read the round before the
                         last */
    long capacity;    /* bytes of a buffer */
    long rank, count;
    uint64_t rounds;    /* how many rounds this rank has written */
    const int *sockets; /* [count]: a connection to each rank, -1 for this rank; NULL: ranks use shared memory */
    long lost, error;   /* lost: the rank whose connection broke, or this rank if none broke; error: errno, or 0 if the
                           connection was closed */
} Ranks;

int ranks_gather(Ranks *r, const char *own, char *out, long t, long bytes, int threads);

/* Like `ranks_gather`, but avoids a copy if it can: returns the whole rows, either in `out` or in the exchange buffer.
 * Rows in the exchange buffer must be read before the next exchange. Returns NULL if a rank is gone. */
const char *ranks_gathered(Ranks *r, const char *own, char *out, long t, long bytes, int threads);

/* Sends this rank's columns own [t][bytes] to all other ranks, and receives the columns of the others into whole
 * [t][count * bytes]. Returns 0, or 1 if a connection breaks, if a rank sends rows of another round or shape, or if the
 * exchange has already failed. */
int swap_by_sockets(Ranks *r, const char *own, char *whole, long t, long bytes);
