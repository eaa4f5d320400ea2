// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_EXPORT_H
#define ND_CHECKPOINT_EXPORT_H
/*
 * The model of a checkpoint as a Hugging Face folder, without ranks: the bytes that the run's own
 * save_model writes for the same step, SHA256SUMS included.
 *
 * Memory is bounded, whatever the size of the model (tensors.h). Blocking; any one thread.
 */
#include "trainer/checkpoint/manifest.h"

typedef struct nd_export_options {
    /* The folder that is made: it does not exist, or is empty. It appears whole, by a rename. NULL:
     * the files go into the checkpoint's own folder, beside state/; it may still be a temporary
     * folder, and after a failure it is the caller's to remove. */
    const char *out;
    nd_dtype dtype;      /* BF16 or F32 */
    bool byte_tokenizer; /* as in nd_hf_writer_options, also the source of side files */
    const char *source;
    const char *tokenizer; /* as in nd_hf_writer_options */
    bool verify;           /* the digests of the chunks that are read */
} nd_export_options;

/*
 * `manifest` is that of the checkpoint; its file need not exist yet, but the state must be complete
 * and the writers' digests known. ND_ERR_DATA names a damaged file, ND_ERR_CANTCREATE what cannot
 * be written.
 */
nd_status nd_checkpoint_export(const char *folder, const nd_manifest *manifest,
                               const nd_export_options *options);

#endif
