// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_EXPORT_H
#define ND_CHECKPOINT_EXPORT_H
/*
 * All tensors of one checkpoint or of two, from the first to the last element, in bounded memory;
 * and the model of a checkpoint as a Hugging Face folder, without ranks: the bytes that the run's
 * own save_model writes for the same step, SHA256SUMS included. Or a model in another form, or as a
 * GGUF file.
 *
 * Elements are read in batches of 32 MiB from each source, whatever the size of the model. A row of
 * a matrix is never cut. Blocking; any one thread.
 */
#include "trainer/checkpoint/source.h"
#include "trainer/weights/gguf.h"
#include "trainer/weights/weights.h"

enum { ND_TENSOR_SOURCES_MAX = 2 };

/* Adjacent elements of a state array of a tensor. */
typedef struct nd_tensor_part {
    const nd_param *param;
    nd_state_kind array;
    int64_t begin, count;                       /* in the flattened global tensor */
    const float *values[ND_TENSOR_SOURCES_MAX]; /* (count) of each source, during the call */
} nd_tensor_part;

typedef struct nd_tensors_walk {
    const nd_layout *layout; /* of a mesh of one rank */
    int arrays;              /* the first so many of each tensor */
    /* A checkpoint or a model, which has weights only. */
    nd_source *sources[ND_TENSOR_SOURCES_MAX];
    const nd_hf_reader *models[ND_TENSOR_SOURCES_MAX];
    int source_count;
    int64_t batch_elements; /* 0: those of 32 MiB */
    /* Tensors come in the order of the layout, their arrays one after the other, parts
     * ascending. */
    nd_status (*visit)(void *context, const nd_tensor_part *part);
    void *context;
} nd_tensors_walk;

nd_status nd_tensors_each(const nd_tensors_walk *walk);

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
    /* The weights are those of a model, and there is no checkpoint. Borrowed, as is: */
    const nd_hf_reader *model;
    const nd_gguf_options *gguf; /* `out` is a GGUF file; NULL: a folder */
} nd_export_options;

/*
 * `manifest` is that of the checkpoint; its file need not exist yet, but the state must be complete
 * and the writers' digests known. ND_ERR_DATA names a damaged file, ND_ERR_CANTCREATE what cannot
 * be written.
 */
nd_status nd_checkpoint_export(const char *folder, const nd_manifest *manifest,
                               const nd_export_options *options);

/*
 * The comparison of two checkpoints, whatever meshes wrote them, or of weights with those of a
 * Hugging Face folder; or of two dumps of tensors (dump/dump.h).
 *
 * Values are compared as F32; a BF16 or F16 file is widened, which is exact. To find out whether a
 * model in BF16 is that of a checkpoint, both sides are rounded to BF16 first.
 */
typedef struct nd_diff_side {
    const char *folder;
    const nd_manifest *manifest; /* NULL: a Hugging Face folder, which has weights only */
    nd_shape shape;
    bool is_dump; /* both sides are folders of dumps, which have nothing else */
} nd_diff_side;

typedef struct nd_diff_options {
    bool verify; /* false: compares what the files of a damaged checkpoint hold */
    bool bf16;   /* rounds both sides to BF16 first */
    /* The L2 norm of the difference over that of A up to which an array counts as equal; 0: bits
     * are compared. */
    double tolerance;
} nd_diff_options;

typedef enum nd_diff_presence {
    ND_DIFF_BOTH = 0,
    ND_DIFF_ONLY_A,
    ND_DIFF_ONLY_B,
    ND_DIFF_SIZES /* an entry of another number of elements */
} nd_diff_presence;

/* A state array of a tensor, or an entry alike on all ranks such as FP8 scales. */
typedef struct nd_diff_array {
    const char *name; /* as in the files: "model.norm.weight", "optimizer.state....exp_avg" */
    nd_diff_presence presence;
    int64_t count;     /* elements; 0 unless both have it */
    int64_t differing; /* elements that differ in some bit */
    double largest;    /* |a - b| of those; NaN when one of them is NaN */
    double relative;   /* L2 norm of a - b over that of a; infinite where a is 0 alone */
} nd_diff_array;

typedef struct nd_diff_totals {
    int64_t arrays, differing_arrays;
    int64_t elements, differing;
} nd_diff_totals;

/*
 * Visits every array, also those that are equal, in the order of the model; entries that all ranks
 * share come last. Of dumps, those are visited that some rank of both has, in the order of the
 * computation; what only B has comes last. ND_ERR_DATA: the models have other tensors, a folder is
 * no dump, or what is read is damaged.
 */
nd_status nd_checkpoint_diff(const nd_diff_side sides[2], const nd_diff_options *options,
                             nd_status (*visit)(void *context, const nd_diff_array *array),
                             void *context, nd_diff_totals *totals);
#endif
