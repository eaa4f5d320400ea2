// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_MANIFEST_H
#define ND_CHECKPOINT_MANIFEST_H
/*
 * manifest.json: what a checkpoint is, and the last of its files to be written. A folder without a
 * valid manifest is no checkpoint.
 *
 * It holds what resuming needs besides the arrays (position, seeds, what must agree), the mesh and
 * the cut from which the place of every element follows, and for each writer the digest of its hash
 * file. A digest of the manifest itself is its last member, so that a flipped byte is noticed
 * anywhere. The order of members and the format of numbers are fixed: equal contents, equal bytes.
 *
 * Compatibility: a reader refuses a version above its own. Members that it does not know are
 * ignored, so an addition that older readers must not miss needs a new version. Version 2 has sets
 * of layers, and is written only where one of them is not empty.
 */
#include <jansson.h>
#include <stdio.h>

#include "trainer/checkpoint/shard.h"
#include "trainer/layout/layout.h"
#include "trainer/step/step.h"

enum { ND_MANIFEST_VERSION = 2, ND_MANIFEST_MAX_BYTES = 256 << 20 };

#define ND_MANIFEST_NAME "manifest.json"
#define ND_STATE_FOLDER  "state"

/* Before and behind the digest, at the end of the text. */
#define ND_MANIFEST_DIGEST_HEAD ",\n \"digest\": \""
#define ND_MANIFEST_DIGEST_TAIL "\"\n}\n"

typedef struct nd_manifest {
    char program[32], host[256], run_id[128], time[32]; /* time: 2026-01-31T12:00:00Z */
    char reason[16];                                    /* "interval", "signal", "end" */
    int64_t restart_epoch;
    nd_run_position position;
    int64_t samples_seen;  /* also those that were passed over: where the data go on; at least one
                              for each step */
    int64_t metrics_bytes; /* length of metrics.jsonl when the save began */
    nd_mesh mesh;
    nd_shape shape;
    nd_layout *layout; /* of one rank: the tensors and their segments; owned */
    nd_state_extra extras[ND_STATE_EXTRAS_MAX];
    int extra_count;
    char optimizer[16]; /* "adamw", "sgd" */
    int arrays;         /* state arrays: 1 or ND_STATE_KINDS */
    json_t *identity; /* texts that must agree at resume: digests of data and model, seeds; owned */
    json_t *config;   /* texts of the resolved configuration, by its keys; owned */
    nd_checksum checksum;
    nd_shard_record *writers; /* [ranks of the mesh], owned */
    int writer_count;
    bool is_newer; /* set where reading fails: the version is above this program's */
} nd_manifest;

void nd_manifest_fini(nd_manifest *manifest);
/* The text of a key of `identity` or `config`; NULL: there is none. */
static inline const char *nd_manifest_find(const json_t *texts, const char *key)
{
    return json_string_value(json_object_get(texts, key));
}

/* ND_ERR_CONFIG with both values when two models differ; `name_a` and `name_b` are for the message.
 * Numbers that change no result are not compared: initial deviation, maximum of positions, token
 * ids. */
nd_status nd_shape_compare(const nd_shape *a, const char *name_a, const nd_shape *b,
                           const char *name_b);
/* All that a shape is, for a comparison of texts. */
void nd_shape_print(const nd_shape *shape, FILE *text);

/* The text of manifest.json; owned by the caller. */
nd_status nd_manifest_format(const nd_manifest *manifest, char **out, size_t *bytes);

/*
 * ND_ERR_DATA with a sentence: no JSON, a flipped byte, a newer version, a member that is missing,
 * of another type or out of range, tensors that are not those of the model's shape, a number of
 * writers that is not the mesh's. `path` is for messages.
 */
nd_status nd_manifest_parse(const char *text, size_t bytes, const char *path, nd_manifest *out);
/* Reads FOLDER/manifest.json. */
nd_status nd_manifest_read(const char *folder, nd_manifest *out);

/* A layout of this shape at a place of a mesh (NULL: of one rank); segments as in another one, of
 * any rank. */
nd_status nd_manifest_layout(const nd_shape *shape, const nd_layout *segments, const nd_mesh *mesh,
                             nd_coord coord, nd_layout **out);

#endif
