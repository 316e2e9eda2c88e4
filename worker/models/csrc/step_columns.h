/* Fields of struct Step in decoder.c: the columns of T tokens in S sequences with R rows of logits.
 * Made from worker/models/forward_inputs.py by `python -m worker.models.cpu_decoder`: do not edit. */
const int64_t *positions; /* [T] */
const int64_t *const *slot_mappings; /* [T] for each group of layers */
const int32_t *query_start_loc; /* [S + 1] */
const int32_t *seq_lens; /* [S] */
const int64_t *logits_indices; /* [R] */
const int32_t *read_slots; /* [S]; NULL without recurrent layers */
const int32_t *write_slots; /* [S]; NULL without recurrent layers */
