/* few_rows.c with the sums of AMX tiles. */
#define SUFFIX amx
#define IN_TILES
#include "few_rows.c"
