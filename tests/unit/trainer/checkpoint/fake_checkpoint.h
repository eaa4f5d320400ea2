// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_CHECKPOINT_FAKE_CHECKPOINT_H
#define ND_TESTS_CHECKPOINT_FAKE_CHECKPOINT_H
/* Checkpoints of fake states (fake_state.h) on any mesh, without ranks. A failure to write aborts
 * the test. */
#include "tests/support/tempdir.h"
#include "tests/unit/trainer/checkpoint/fake_state.h"
#include "trainer/checkpoint/manifest.h"
#include "trainer/checkpoint/source.h"

/* A run folder for each test: TestSuite(name, .init = fake_setup, .fini = fake_teardown). */
extern tempdir fake_run;
void fake_setup(void);
void fake_teardown(void);
extern const nd_mesh fake_one; /* of one rank */
/* In the run folder: a path, good until the next one; a file of this text, of which the path is
 * returned; a folder; and a name that becomes another one. */
const char *fake_path(const char *name);
const char *fake_file(const char *name, const char *text);
void fake_folder(const char *name);
void fake_move(const char *from, const char *to);
bool fake_exists(const char *name);
/* Deletes all but the newest ones, by their number, and returns how many it deletes. */
int fake_prune(int64_t keep_last);

/* Elements of the entry "fp8.scale" of manifests from now on: 1, 2, ...; 0: there is no entry. */
enum { FAKE_EXTRA_COUNT = 7 };
extern int64_t fake_extra_count; /* FAKE_EXTRA_COUNT at first */

/* Everything but the writers' digests, of which there are as many as ranks. */
nd_manifest fake_manifest(const nd_shape *shape, const nd_mesh *mesh, int arrays, int64_t step,
                          bool converts);

/* FOLDER/checkpoint-STEP as a run leaves it. FOLDER exists. */
void fake_write(const char *folder, const nd_shape *shape, const nd_mesh *mesh, int arrays,
                int64_t step, bool converts, nd_checksum checksum);

/* Writes a checkpoint of a tied model of one rank, with weights alone, in the run folder. */
void fake_write_small(int64_t step);

/* A checkpoint that fake_write left, open. */
typedef struct fake_saved {
    char *path;
    nd_manifest manifest;
} fake_saved;
fake_saved fake_open(const char *folder, int64_t step);
/* Writes one to the run folder with XXH3, converted linears at even steps, and opens it. */
fake_saved fake_save(const nd_shape *shape, const nd_mesh *mesh, int arrays, int64_t step);
void fake_forget(fake_saved *saved);

/* Plans what one rank writes of a checkpoint with this manifest; `layout` is the rank's. */
void fake_plan(const nd_manifest *m, const nd_layout *layout, int rank, nd_shard_plan *out);
nd_status fake_any_unit(void *context, int unit); /* its data are there */

/*
 * Two small checkpoints in FOLDER, whose bytes tests/unit/trainer/checkpoint/golden keeps: one of
 * two shards and two tensor-parallel ranks with AdamW's moments, and one of a single rank with
 * weights alone and SHA-256.
 */
enum { FAKE_GOLDEN_SHARDED = 12, FAKE_GOLDEN_SINGLE = 5 };
void fake_write_golden(const char *folder);

/* Loads what the rank of the layout has; fake_free frees it, also after a failure. */
nd_status fake_load(nd_source *source, const nd_layout *layout, int arrays, fake_state *out);
/* Loads what one rank of a mesh has. What is loaded without complaint is right, to the byte, or the
 * test is aborted. */
nd_status fake_load_rank(const fake_saved *saved, const nd_mesh *mesh, int rank, bool converts);
/* Reads the manifest too, and loads all that one rank has on a mesh of one. */
nd_status fake_load_all(const char *path);
/* The digests of all files are those of the manifest. */
nd_status fake_verify(const char *path);

#endif
