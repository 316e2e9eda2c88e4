/* Compiles few_rows.c for processors with AMX. It then adds in the same order as AMX tiles. */
#define SUFFIX amx
#define IN_TILES
#include "few_rows.c"
