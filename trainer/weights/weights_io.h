// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WEIGHTS_WEIGHTS_IO_H
#define ND_WEIGHTS_WEIGHTS_IO_H
/*
 * Weights between this rank's shards and a Hugging Face folder, on any mesh.
 *
 * Loading: each rank reads only the elements of its own shards. Saving: shards are gathered in
 * pieces of a few MiB, unit by unit; rank 0 writes. Both keep F32 in memory.
 */
#include "trainer/weights/weights.h"
#include "trainer/model/model.h"

nd_status nd_model_io_load(nd_model *model, const nd_hf_reader *reader);
/* All ranks of the job take part. `source` as in nd_hf_writer_options. */
nd_status nd_model_io_save(nd_model *model, const char *folder, nd_dtype dtype, bool byte_tokenizer,
                           const char *source);

#endif
