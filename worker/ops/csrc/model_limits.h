/* Upper bounds for the sizes in a model's config. Arrays of fixed size and arrays on the stack rely on these bounds.
 *
 * worker/ops/native.py reads the numbers from this file. worker/models/config.py refuses models
 * that exceed them. */
#pragma once

#define MAX_HEAD_DIM 576       /* elements of an attention head */
#define MAX_KEY_ELEMENTS 65536 /* elements of one token's keys in one layer: heads * head dimension */
#define MAX_TAPS 8             /* taps of a short convolution */
#define MAX_CHOSEN 256         /* experts that the router chooses for a row */
#define MAX_GROUPS 64          /* groups of experts, of which the router chooses some */
