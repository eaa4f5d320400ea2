// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_SHARD_H
#define ND_CHECKPOINT_SHARD_H
/*
 * The files of one writer: up to three safetensors files in torch DCP's dialect (bodies, heads and
 * tails of ranges, see pieces.h) and a hash file. In that dialect __metadata__ says at which
 * offsets of its tensor each entry lies (docs/checkpoint.md); torch's HuggingFaceStorageReader
 * opens and reshards such files.
 *
 * All of it follows from the layout: nd_shard_plan fixes names, headers and sizes before a byte is
 * written. Units are then written in ascending order, each as soon as its state may be read; the
 * order within a file is unit, rectangle, state array. The scalars "step", the number of updates,
 * which torch keeps for each parameter, close the first file.
 */
#include "trainer/checkpoint/pieces.h"
#include "trainer/checkpoint/state_file.h"

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
const char *nd_state_kind_name(nd_state_kind array);

/* An entry of a safetensors file: a rectangle of a tensor, in F32. */
typedef struct nd_shard_entry {
    char *name; /* owned by the list */
    nd_rect rect;
    uint64_t begin, end; /* bytes of the file */
} nd_shard_entry;

typedef struct nd_shard_list {
    nd_shard_entry *entries; /* in the order of their data */
    int64_t count, capacity;
} nd_shard_list;

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
} nd_shard_plan_options;

typedef struct nd_shard_plan {
    const nd_layout *layout;
    int rank, arrays;
    nd_piece *pieces; /* in the order of writing */
    int piece_count;
    int64_t *first_entry; /* [piece_count] in the list of its kind: the entry of array 0 */
    int *first_piece;     /* [unit_count + 1] of each unit */
    int step_count;       /* scalars at the end of the first file */
    nd_state_extra extras[ND_STATE_EXTRAS_MAX]; /* before them; on rank 0 */
    int extra_count;
    nd_shard_list lists[ND_RECT_KIND_COUNT];
    char *heads[ND_RECT_KIND_COUNT]; /* NULL: there is no such file */
    size_t head_bytes[ND_RECT_KIND_COUNT];
    uint64_t file_bytes[ND_RECT_KIND_COUNT];
    char names[ND_RECT_KIND_COUNT][ND_SHARD_FILE_NAME_MAX];
    uint64_t bytes; /* of all files, without the hash file */
} nd_shard_plan;

nd_status nd_shard_plan_init(nd_shard_plan *plan, const nd_shard_plan_options *options);
void nd_shard_plan_fini(nd_shard_plan *plan);

/*
 * The hash file of a writer: the digests of its data files, chunk by chunk. All of it but these
 * follows from the plan, so that a reader knows what it must be.
 *
 * Little-endian: "NDHASHES", u32 version (1), u32 checksum kind, u32 bytes of a digest, u32 number
 * of files; for each file 80 bytes of name, padded with zeros, u64 bytes, u64 chunks; then all
 * digests in that order.
 */
typedef struct nd_hashes {
    uint8_t *data; /* the file; owned */
    size_t bytes, head_bytes;
    uint8_t *digests[ND_RECT_KIND_COUNT]; /* those of a data file; in `data` */
} nd_hashes;

/* The digests are zeros. */
nd_status nd_hashes_init(nd_hashes *hashes, const nd_shard_plan *plan, nd_checksum kind);
void nd_hashes_fini(nd_hashes *hashes); /* all-zero ones are legal */

/* What several ranks hold alike, bit for bit. */
typedef enum nd_alike {
    ND_ALIKE_SHARDS = 0, /* all of a shard, over dp_replicate */
    ND_ALIKE_UNSPLIT,    /* what lies in it of tensors that tp does not split, over tp */
    ND_ALIKE_KV_COPIES,  /* and of KV heads that several tp ranks have, over these */
    ND_ALIKE_COUNT
} nd_alike;

/* The ranks that do, and whether a parameter is among it. */
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

/* What a writer reports when its files are durable: fixed in size, whatever the world. */
typedef struct nd_shard_record {
    uint64_t bytes;                  /* of the safetensors files */
    char digest[ND_DIGEST_TEXT_MAX]; /* of the hash file */
    uint64_t alike[ND_ALIKE_COUNT];  /* digests (snapshot.h); not in the manifest */
} nd_shard_record;

typedef struct nd_shard_writer nd_shard_writer;

/* Creates the files in `folder` at their sizes, heads written. The plan is borrowed. `updates` is
 * the value of the step scalars. */
nd_status nd_shard_writer_open(const nd_shard_plan *plan, const char *folder, nd_checksum kind,
                               int64_t updates, nd_shard_writer **out);
/* Where the elements of plan piece `piece` of a state array lie, densely. */
typedef const float *nd_piece_data(void *context, int piece, nd_state_kind array);
/* Units ascending, each once. What `data` returns is read during the call only. */
nd_status nd_shard_writer_unit(nd_shard_writer *writer, int unit, nd_piece_data *data,
                               void *context);
/* The entries alike on all ranks, in the order of the plan; after the last unit, on rank 0. */
nd_status nd_shard_writer_extras(nd_shard_writer *writer, const float *const *data);
/* Closes the files durably, writes the hash file. Frees the writer, also on failure. */
nd_status nd_shard_writer_finish(nd_shard_writer *writer, nd_shard_record *out);
/* Leaves the files as they are: the maker of the folder removes it. NULL is legal. */
void nd_shard_writer_abandon(nd_shard_writer *writer);

enum { ND_HASH_FILE_NAME_MAX = 32 };
/* "shard-00001.hashes"; returns `name`. */
const char *nd_hash_file_name(char name[ND_HASH_FILE_NAME_MAX], int rank);

#endif
