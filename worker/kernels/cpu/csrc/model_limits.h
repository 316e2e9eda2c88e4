/* The bounds of sizes that come from a model's config. Arrays of fixed size, and arrays on the stack, rely on them.
 *
 * worker/kernels/cpu/limits.py reads the numbers from this file; worker/model/families/spec_bounds.py refuses models beyond them. */
#pragma once

#define MAX_HEAD_DIM 512       /* elements of a head, of attention */
#define MAX_KEY_ELEMENTS 65536 /* elements of all keys of a token in a layer */
#define MAX_TAPS 8             /* inputs of a convolution */
#define MAX_CHOSEN 256         /* experts of a row */
