/* Compiles few_rows.c for processors with AMX: the order of additions is that of AMX tiles. */
#define SUFFIX amx
#define IN_TILES
#include "few_rows.c"
