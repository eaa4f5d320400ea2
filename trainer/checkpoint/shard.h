// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_SHARD_H
#define ND_CHECKPOINT_SHARD_H
/*
 * A checkpoint is pieces of tensors in files.
 *
 * A piece is a rectangle of a tensor that lies densely in some rank's state (nd_span). A rank holds
 * a contiguous range of its local block of a row-major matrix, which is at most three rectangles:
 * the rest of a row, full rows, the beginning of a row. Saving cuts ranges into pieces and writes
 * each to the file of its kind; loading intersects the rectangles that it wants with those that are
 * stored, whatever mesh wrote them (source.h).
 *
 * Which pieces a rank writes follows from the layout: it knows nothing of the other ranks', and
 * over all ranks of a mesh every element is written exactly once. The ranks that hold the same
 * shard (dp_replicate of them) each write a part of it, cut by elements and moved down to the
 * beginning of a row. What several ranks of tp hold is written by those that own it. Padding is not
 * written.
 *
 * One writer has up to three safetensors files in torch DCP's dialect (bodies, heads and tails of
 * ranges) and a hash file. In that dialect __metadata__ says at which offsets of its tensor each
 * entry lies (docs/checkpoint.md); torch's HuggingFaceStorageReader opens and reshards such files.
 * nd_shard_plan fixes names, headers and sizes before a byte is written. Units are then written in
 * ascending order, each as soon as its state may be read; the order within a file is unit,
 * rectangle, state array. The scalars "step", the number of updates, which torch keeps for each
 * parameter, close the first file.
 */
#include "runtime/base/hash.h"
#include "trainer/layout/layout.h"

/* Counts the rules by which ranges are cut, together with those of the layout (order of parameters,
 * alignments): a reader that computes where something lies must know the version. */
enum { ND_CUT_VERSION = 1 };

/* The place of a piece in its range. Each kind has a file of its own, as torch's reader knows one
 * rectangle of a tensor in a file. */
typedef enum nd_piece_kind {
    ND_PIECE_BODY = 0, /* full rows, or all of the range when it lies within one row */
    ND_PIECE_HEAD,     /* the rest of a row */
    ND_PIECE_TAIL,     /* the beginning of a row */
    ND_PIECE_KINDS
} nd_piece_kind;

typedef struct nd_piece {
    nd_span span;
    nd_piece_kind kind;
    /* Set by nd_shard_plan_init: */
    uint64_t begin; /* byte of its file where the first state array lies */
    int64_t before; /* elements of all state arrays of the pieces before it */
} nd_piece;

static inline int64_t nd_span_elements(const nd_span *span)
{
    return span->rows * span->cols;
}

/* A writer: one rank of the mesh, as far as its state goes. */
typedef struct nd_holder {
    int shard;             /* index in dp_shard_cp */
    int tp;                /* index in tp */
    int replica, replicas; /* index in dp_replicate and its size */
} nd_holder;

nd_holder nd_holder_of(const nd_mesh *mesh, int rank);

/* The pieces that the holder writes, in the order of their unit, then of the parameter table.
 * Returns how many: at most three for each parameter. `layout` is that of the holder's tp index;
 * its own shard_index does not matter. */
int nd_pieces_written(const nd_layout *layout, const nd_holder *holder, nd_piece *out);

/* Digests of a checkpoint: of chunks, and of whole small files. */
typedef enum nd_checksum {
    ND_CHECKSUM_XXH3 = 0,
    ND_CHECKSUM_SHA256,
    ND_CHECKSUM_COUNT
} nd_checksum;

enum { ND_CHUNK_BYTES = 4 << 20 };

typedef struct nd_checksum_hashes {
    const char *name; /* "xxh3", "sha256" */
    nd_hash_kind chunk, whole;
} nd_checksum_hashes;
extern const nd_checksum_hashes nd_checksums[ND_CHECKSUM_COUNT];

/* The digest of a hash file or a manifest as text: the kind, then lower-case hex:
 * "xxh3:0123...". */
enum { ND_DIGEST_TEXT_MAX = 80 };
nd_status nd_digest_text(nd_checksum kind, const void *data, size_t bytes,
                         char out[ND_DIGEST_TEXT_MAX]);

/* The flat state arrays of a rank. SGD has the first only. */
typedef enum nd_state_kind {
    ND_STATE_MASTER = 0,
    ND_STATE_MOMENT1,
    ND_STATE_MOMENT2,
    ND_STATE_KINDS
} nd_state_kind;

enum { ND_STATE_NAME_MAX = 160, ND_SHARD_FILE_NAME_MAX = 80 };

/* The name in the files, which is that of torch's flattened optimizer state: the master weight has
 * the Hugging Face name of its tensor (`param`, below 96 characters), a moment is
 * "optimizer.state.<that name>.exp_avg". Returns `name`. */
const char *nd_state_name(char name[ND_STATE_NAME_MAX], nd_state_kind array, const char *param);
/* "master", "exp_avg", "exp_avg_sq" */
extern const char *const nd_state_kind_names[ND_STATE_KINDS];

/* Entries alike on all ranks, which writer 0 keeps beside the tensors: FP8 scales and histories. */
typedef struct nd_state_extra {
    char name[48];
    int64_t count; /* F32 elements */
} nd_state_extra;

enum { ND_STATE_EXTRAS_MAX = 8 };

typedef struct nd_shard_plan_options {
    const nd_layout *layout; /* of the rank's tp index; borrowed until the plan's end */
    const nd_mesh *mesh;
    int rank;
    int arrays; /* state arrays that are written: 1 (weights only) or ND_STATE_KINDS */
    const nd_state_extra *extras; /* [extra_count], the same on every rank */
    int extra_count;
    nd_checksum checksum;
} nd_shard_plan_options;

/* A safetensors file: the pieces of one kind. */
typedef struct nd_shard_file {
    char name[ND_SHARD_FILE_NAME_MAX];
    char *head; /* the header, in front of the data; NULL: there is no such file */
    size_t head_bytes;
    uint64_t bytes;   /* with the header */
    uint8_t *digests; /* of its chunks, in the hash file */
} nd_shard_file;

/*
 * The files of one writer, by which they are written and read.
 *
 * The hash file has the digests of the others, chunk by chunk. All of it but these, which are zeros
 * in a plan, follows from the layout. Little-endian: "NDHASHES", u32 version (1), u32 checksum
 * kind, u32 bytes of a digest, u32 number of files; for each file 80 bytes of name, padded with
 * zeros, u64 bytes, u64 chunks; then all digests in that order.
 */
typedef struct nd_shard_plan {
    const nd_layout *layout;
    int rank, arrays;
    nd_checksum checksum;
    nd_piece *pieces; /* in the order of writing */
    int piece_count;
    int64_t elements;                           /* of all pieces in all state arrays */
    int *first_piece;                           /* [unit_count + 1] of each unit */
    nd_state_extra extras[ND_STATE_EXTRAS_MAX]; /* on rank 0, behind the pieces of the first file */
    int extra_count;
    uint64_t extras_begin; /* byte of that file */
    int step_count;        /* scalars behind them */
    nd_shard_file files[ND_PIECE_KINDS];
    uint64_t bytes; /* of these files */
    uint8_t *hashes;
    size_t hashes_bytes, hashes_head_bytes; /* of the hash file, and of what precedes its digests */
} nd_shard_plan;

nd_status nd_shard_plan_init(nd_shard_plan *plan, const nd_shard_plan_options *options);
void nd_shard_plan_fini(nd_shard_plan *plan); /* an all-zero one is legal */

/* State that several ranks hold alike, bit for bit. */
typedef enum nd_alike {
    ND_ALIKE_SHARDS = 0, /* all of a shard, over dp_replicate */
    ND_ALIKE_UNSPLIT,    /* what lies in it of tensors that tp does not split, over tp */
    ND_ALIKE_KV_COPIES,  /* and of KV heads that several tp ranks have, over these */
    ND_ALIKE_COUNT
} nd_alike;

/* The ranks that hold it, and whether a parameter is part of it. */
static inline nd_group_kind nd_alike_group(nd_alike what)
{
    return what == ND_ALIKE_SHARDS    ? ND_GROUP_DP_REPLICATE
           : what == ND_ALIKE_UNSPLIT ? ND_GROUP_TP
                                      : ND_GROUP_KV_COPIES;
}
static inline bool nd_param_is_alike(const nd_param *param, nd_alike what)
{
    const bool unsplit = param->split == ND_SPLIT_NONE;
    return what == ND_ALIKE_SHARDS ||
           (what == ND_ALIKE_UNSPLIT ? unsplit : param->copies > 1 && !unsplit);
}

/* A writer's report once its files are durable: fixed in size, however many ranks there are. */
typedef struct nd_shard_record {
    uint64_t bytes;                  /* of the safetensors files */
    char digest[ND_DIGEST_TEXT_MAX]; /* of the hash file */
    uint64_t alike[ND_ALIKE_COUNT];  /* digests (saver.c); not in the manifest */
} nd_shard_record;

/* The state that is written. */
typedef struct nd_shard_data {
    /* Returns when the state of this unit may be read, and that of all units before it was. Called
     * for each unit, ascending, and once more behind the last. */
    nd_status (*unit)(void *context, int unit);
    /* The elements of a piece of the plan in a state array, densely; they are read at once. */
    const float *(*piece)(void *context, int piece, nd_state_kind array);
    const float *const *extras; /* [extra_count] */
    void *context;
} nd_shard_data;

/*
 * Makes the files in `folder`, all of them at their sizes before one is filled, and leaves them
 * durable. A digest of every 4 MiB chunk is made on the way, so that a reader verifies exactly the
 * chunks that it reads. Pages that wait for the disk are bounded: writeback starts early, and a
 * writer that is far ahead of the disk waits for it. `updates` is the value of the step scalars.
 * ND_ERR_CANTCREATE: a file exists, the disk or the quota is full, or the folder is read-only.
 * After a failure the files stay as they are: the maker of the folder removes it.
 */
nd_status nd_shard_write(nd_shard_plan *plan, const char *folder, int64_t updates,
                         const nd_shard_data *data, nd_shard_record *out);

/* A small file whole: created, written, fsynced. It must not exist. */
nd_status nd_shard_put(const char *folder, const char *name, const void *data, size_t bytes);

enum { ND_HASH_FILE_NAME_MAX = 32 };
/* "shard-00001.hashes"; returns `name`. */
const char *nd_hash_file_name(char name[ND_HASH_FILE_NAME_MAX], int rank);

#endif
