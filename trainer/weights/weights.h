// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WEIGHTS_WEIGHTS_H
#define ND_WEIGHTS_WEIGHTS_H
/*
 * Weights of a run: initial values, or those of a Hugging Face model folder, which has config.json,
 * model.safetensors or a sharded set with its index, and side files such as the tokenizer; or those
 * of a GGUF file.
 *
 * Reading opens headers only; slices are read with pread straight into the caller's buffer, so each
 * rank reads just its own elements. Tensors may be F32, BF16 or F16; they are widened to F32
 * exactly. Writing: the tensors follow from the shape; values arrive in any order and any number of
 * pieces; everything lands in a temporary folder beside the target and is renamed at the end (files
 * and folder fsynced).
 */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/status.h"
#include "runtime/tensor/dtype.h"
#include "trainer/corpus/corpus.h"
#include "trainer/layout/layout.h"
#include "trainer/parallel/fsdp.h"

typedef struct nd_hf_reader nd_hf_reader;

/* Opens a model folder, or a GGUF file (gguf.h), whose tensors are read as if they were those of a
 * folder. ND_ERR_DATA: truncated, overlapping, duplicate keys, bad index; names file and tensor. */
nd_status nd_hf_reader_open(const char *path, nd_hf_reader **out);
void nd_hf_reader_close(nd_hf_reader *reader);
/* The folder that has config.json and the side files; for a GGUF file it is one in the cache. */
const char *nd_hf_reader_folder(const nd_hf_reader *reader);
const nd_shape *nd_hf_reader_shape(const nd_hf_reader *reader);
/* Returns whether all weights of the model are in BF16. */
bool nd_hf_reader_is_bf16(const nd_hf_reader *reader);
/* Checks that the folder holds every tensor of a model of this shape, with its shape, and no other
 * (rotary inv_freq buffers are ignored). A tied model may hold lm_head.weight if it equals
 * the embedding.
 * ND_ERR_DATA names the tensor that is missing, extra or of another shape. */
nd_status nd_hf_reader_check(const nd_hf_reader *reader);
/*
 * Elements [begin, begin + count) of the row-major flattened tensor, as F32 into out. Vectors are
 * (rows, 1).
 */
nd_status nd_hf_reader_read(const nd_hf_reader *reader, const char *name, int64_t begin,
                            int64_t count, float *out);

/* A larger model is sharded into files of this size, as transformers does. */
#define ND_HF_FILE_BYTES UINT64_C(5000000000)

typedef struct nd_hf_writer nd_hf_writer;

typedef struct nd_hf_writer_options {
    nd_shape shape;
    nd_dtype dtype;         /* BF16 or F32 */
    int64_t max_file_bytes; /* a larger model is sharded; 0: ND_HF_FILE_BYTES */
    bool byte_tokenizer;    /* write tokenizer.json and tokenizer_config.json for id = byte */
    /* Folder of the model that was trained further, or NULL: its tokenizer (unless byte_tokenizer)
     * and generation_config.json are copied. Borrowed. */
    const char *source;
    /* A tokenizer.json, or NULL: it and the tokenizer's files beside it are copied in the place of
     * those of `source`. Where the shape has no eos_id, config.json names its end of text.
     * Borrowed. */
    const char *tokenizer;
    /* The form of the messages that it was trained on, or none: generation_config.json then
     * names the end of a turn beside the ends that it has, where the tokenizer has the tokens. */
    nd_chat_choice chat;
    bool takes_empty; /* an empty folder of that name is replaced; otherwise none may exist */
    /* The folder exists and holds none of the files: they are written into it, and nothing is
     * renamed. After a failure they stay for the caller that made the folder. */
    bool inside;
} nd_hf_writer_options;

/* ND_ERR_CANTCREATE when folder exists (it is never overwritten) or cannot be made. Free space is
 * checked first. */
nd_status nd_hf_writer_open(const char *folder, const nd_hf_writer_options *options,
                            nd_hf_writer **out);
/* F32 elements [begin, begin + count) of a tensor; rounded to BF16 when that is the dtype. Each
 * element comes once, in any order. */
nd_status nd_hf_writer_write(nd_hf_writer *writer, const char *name, int64_t begin, int64_t count,
                             const float *values);
/*
 * fsync, rename into place. ND_ERR_INTERNAL when an element was not written. The weights matter
 * more than the files beside them: where one of those cannot be read (ND_ERR_IO), the model is in
 * its place without it; inside a folder, that is only a warning. Frees the writer, also on failure.
 */
nd_status nd_hf_writer_commit(nd_hf_writer *writer);
void nd_hf_writer_abort(nd_hf_writer *writer); /* removes the temporary folder; NULL is legal */

/* Writes and fsyncs the files beside the weights: config.json, the tokenizer, the chat template,
 * generation_config.json, and SHA256SUMS of all that the folder then holds (safetensors has no
 * checksums, so a damaged weight would load without an error). *lacks: why one of them could not be
 * read (ND_ERR_IO) and is not there; else it stays as it is. */
nd_status nd_hf_files_write(const char *folder, const nd_hf_writer_options *options,
                            nd_error *lacks);
/* Bytes of those files of the folder that a model which is trained further gets. */
nd_status nd_hf_side_files_bytes(const char *folder, uint64_t *bytes);
/* SHA256SUMS, as the program sha256sum reads and writes it. ND_ERR_DATA names the first file that
 * differs or is missing. *files: how many are listed and match; 0 when the folder has no list.
 * Reads all of them. */
nd_status nd_checksums_verify(const char *folder, int *files);

/* org/name -> newest snapshot folder in the local cache (HF_HUB_CACHE, HF_HOME,
 * ~/.cache/huggingface/hub). ND_ERR_DATA says how to get a model that is not there. Owned by the
 * caller. */
nd_status nd_hf_cache_find(const char *name, char **out);

/*
 * This rank's shards of the weights, on any mesh: F32 master weights, or, in a model without a
 * backward, what it keeps in their place (fsdp.h), into which they are converted piece by piece, so
 * that no more than ND_FSDP_PIECE of them are in F32 at once. Gathered copies are stale after a
 * change.
 */
/* Initial values: each depends on the seed, the tensor and the element's place in it alone. */
nd_status nd_weights_init(nd_fsdp *fsdp, double init_std, uint64_t seed);
/* Each rank reads only elements of its own shards, and those that others hold too are read by one
 * of them and passed on. Collective: when some rank fails, all do, with the same status, and those
 * without a reason of their own with one of another rank (nd_fail_elsewhere). */
nd_status nd_weights_load(nd_fsdp *fsdp, const nd_hf_reader *reader);
/* A source of values. */
typedef struct nd_values {
    void *context;
    /* Wants the elements of a span densely at `to`, which is host memory; they are there after
     * `run`. */
    nd_status (*want)(void *context, const nd_span *span, float *to);
    nd_status (*run)(void *context); /* NULL: `want` has read them */
} nd_values;
/* Like nd_weights_load, from any values. `shared`: one rank reads what several hold. Collective. */
nd_status nd_weights_fill(nd_fsdp *fsdp, const nd_values *values, bool shared);
/* Shards are gathered in pieces of a few MiB, unit by unit, and rank 0 writes them. All ranks of
 * the job take part. `source` and `tokenizer` as in nd_hf_writer_options. */
nd_status nd_weights_save(nd_fsdp *fsdp, const char *folder, nd_dtype dtype, bool byte_tokenizer,
                          const char *source, const char *tokenizer);

/*
 * State that several ranks hold, here and in checkpoints: the shards of a unit by the replicas
 * (dp_replicate), and tensors that tp does not split by the ranks of a tp group. For each unit one
 * replica reads, and in it one tp rank the tensors that are not split; they go round with the
 * units. Once all ranks have read, and agree that they could, the others get it by broadcast.
 */
/* Returns whether this rank reads its part of the parameter. */
bool nd_shared_reads(const nd_rank *rank, const nd_param *param);
/* Collective: passes on a flat state array, padding included, in device memory; with `kept` in its
 * place what that keeps, weights that were converted as they were read. */
nd_status nd_shared_pass_on(nd_rank *rank, const nd_layout *layout, float *array, nd_fsdp *kept);

/*
 * Agreement between ranks, and bytes that one of them gives the others.
 */
/* Fails with `status`. A rank whose `own` status is not ND_OK gives its reason, which is surely its
 * own (nd_fail_local) where that status is ND_ERR_IO. The others have the error "another rank could
 * not read WHAT", which lies elsewhere. */
nd_status nd_shared_fail(nd_status own, nd_status status, const char *what, const char *reason);
/* Collective: the worst status of all ranks, with the error of nd_shared_fail. `status` is of no
 * collective. */
nd_status nd_shared_agree(nd_rank *rank, nd_status status, const char *what);
/* Like nd_shared_agree; `count` values become the greatest of all ranks, the first the status. */
nd_status nd_shared_agree_on(nd_rank *rank, nd_status status, const char *what, int64_t *values,
                             int64_t count);
/* Host memory of one rank of a group, which `own` says to be this one, reaches the others. */
nd_status nd_shared_bytes(nd_rank *rank, nd_group_kind group, void *data, int64_t bytes, bool own);

#endif
