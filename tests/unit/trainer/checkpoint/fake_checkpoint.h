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
bool fake_exists(const char *name); /* in the run folder */
void fake_folder(const char *name); /* a folder in it */
extern const nd_mesh fake_one;      /* of one rank */

/* Everything but the writers' digests, of which there are as many as ranks. */
nd_manifest fake_manifest(const nd_shape *shape, const nd_mesh *mesh, int arrays, int64_t step,
                          bool converts);

/* FOLDER/checkpoint-STEP as a run leaves it, with an entry "fp8.scale" of 1 to 7. FOLDER exists. */
void fake_write(const char *folder, const nd_shape *shape, const nd_mesh *mesh, int arrays,
                int64_t step, bool converts, nd_checksum checksum);

/* The same of a tied model of one rank, with weights alone. */
void fake_write_small(const char *folder, int64_t step);

/* A checkpoint that fake_write left, open. */
typedef struct fake_saved {
    char *path;
    nd_manifest manifest;
} fake_saved;
fake_saved fake_open(const char *folder, int64_t step);
/* Writes FOLDER/checkpoint-STEP with XXH3, converted linears at even steps, and opens it. */
fake_saved fake_save(const char *folder, const nd_shape *shape, const nd_mesh *mesh, int arrays,
                     int64_t step);
void fake_forget(fake_saved *saved);

/*
 * Two small checkpoints in FOLDER, whose bytes tests/unit/trainer/checkpoint/golden keeps: one of
 * two shards and two tensor-parallel ranks with AdamW's moments, and one of a single rank with
 * weights alone and SHA-256.
 */
enum { FAKE_GOLDEN_SHARDED = 12, FAKE_GOLDEN_SINGLE = 5 };
void fake_write_golden(const char *folder);
nd_shape fake_golden_shape(void); /* of their model; the single one is tied */

/* What `holder` has, out of the source; freed by fake_free, also after a failure. */
nd_status fake_load(nd_source *source, const nd_layout *layout, const nd_holder *holder, int arrays,
                    fake_state *out);
/* Loads what one rank of a mesh has. What is loaded without complaint is right, to the byte, or the
 * test is aborted. */
nd_status fake_load_rank(const char *path, const nd_manifest *manifest, const nd_mesh *mesh,
                         int rank, bool converts);
/* Reads the manifest too, and loads all that one rank has on a mesh of one. */
nd_status fake_load_all(const char *path);
/* The digests of all files are those of the manifest. */
nd_status fake_verify(const char *path);

#endif
