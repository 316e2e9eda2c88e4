/* Rows that are calculated one by one: each kernel calls one function per row, so a row has the same bits in every
 * batch, with every chunking of the prompt and any number of threads. */
#pragma once
#include "simd.h"
#include <stddef.h>

#define MIN_PARALLEL_ELEMENTS 16384 /* with fewer elements, a second thread costs more than it saves */

INLINE size_t element_size(int is_bf16) { return is_bf16 ? 2 : 4; }

INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + simd_exp(-x)); }
