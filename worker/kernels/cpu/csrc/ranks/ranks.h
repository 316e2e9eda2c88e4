/* Processes that compute a model together, each with its own columns of every weight.
 *
 * Those of one machine exchange rows in memory that all of them have mapped, those of several hosts by TCP (sockets.c).
 * A rank that is gone makes every wait end with an error. */
#pragma once
#include <stdint.h>

enum { RANKS_MAX = 8, RANKS_LINE = 64 }; /* the line of a processor's cache, so that ranks do not share one */

/* The beginning of the memory. All of it is zero at first. */
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
    char *buffers[2]; /* rounds use them in turn: who writes a round knows that all have read the one before the last */
    long capacity;    /* bytes of a buffer */
    long rank, count;
    uint64_t rounds; /* that this rank has written */
    const int *sockets; /* to the rank of each index, -1 to itself; NULL: all ranks have mapped this memory */
    long lost, error;   /* the rank whose connection has broken, else the own; and why: errno, or 0 if it has closed */
} Ranks;

int ranks_gather(Ranks *r, const char *own, char *out, long t, long bytes, int threads);

/* Returns what `ranks_gather` writes to `out`. It may be in the shared memory, where it is valid until the end of the
 * second call from here on: it is then not copied again. Returns NULL if a rank is gone. */
const char *ranks_gathered(Ranks *r, const char *own, char *out, long t, long bytes, int threads);

/* Sends this rank's columns own [t][bytes] of a round to all others, and receives theirs into whole [t][count * bytes].
 * Returns 1 if a connection breaks, if a rank has sent rows of another round or shape, or if the ranks have ended. */
int swap_by_sockets(Ranks *r, const char *own, char *whole, long t, long bytes);
