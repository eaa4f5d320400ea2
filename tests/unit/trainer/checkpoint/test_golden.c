// SPDX-License-Identifier: Apache-2.0
/*
 * Checkpoints that earlier programs wrote: golden/version-1 is read by every later program, to the
 * same values. "checkpoint_tool golden FOLDER" made it. A change of the format that is meant keeps
 * this folder, adds another, and lets is_written_the_same_again compare with the newest.
 */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/shell.h"
#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"
#include "trainer/checkpoint/folder.h"

static const int64_t steps[] = {FAKE_GOLDEN_SHARDED, FAKE_GOLDEN_SINGLE};
static const nd_mesh meshes[] = {{{1, 1, 1, 1, 1}}, {{1, 1, 2, 1, 2}}, {{1, 2, 3, 1, 1}}};

static char *golden_folder(const char *name)
{
    char *path = NULL;
    const char *root = getenv("ND_SOURCE_ROOT");
    cr_assert_not_null(root, "set ND_SOURCE_ROOT");
    assert_ok(nd_fs_format(&path, "%s/tests/unit/trainer/checkpoint/golden/%s", root, name));
    return path;
}

Test(golden, version_1_is_read_to_the_values_that_it_was_made_of)
{
    char *folder = golden_folder("version-1"), *path = NULL;
    for (int i = 0; i < 2; i++) {
        nd_manifest m = {0};
        int64_t bytes = 0;
        assert_ok(nd_checkpoint_path(folder, steps[i], &path));
        assert_ok(nd_manifest_read(path, &m));
        cr_assert_eq(m.position.step, steps[i]);
        cr_assert_eq(m.position.skipped, steps[i] / 6);
        cr_assert_eq(m.position.tokens_seen, 100 * steps[i]);
        cr_assert_eq(m.samples_seen, 8 * steps[i]);
        cr_assert_str_eq(nd_manifest_find(m.identity, "data.path"), "00ff");
        assert_ok(nd_source_verify(path, &m, -1, true, &bytes));
        for (size_t k = 0; k < sizeof meshes / sizeof *meshes; k++) {
            for (int rank = 0; rank < nd_mesh_world_size(&meshes[k]); rank++) {
                assert_ok(fake_load_rank(path, &m, &meshes[k], rank, false));
            }
        }
        nd_manifest_fini(&m);
        free(path);
    }
    free(folder);
}

Test(golden, is_written_the_same_again)
{
    tempdir dir;
    char *folder = golden_folder("version-1"), command[512];
    tempdir_make(&dir);
    fake_write_golden(dir.path);
    snprintf(command, sizeof command, "diff -r %s .", folder);
    shell(&dir, command);
    tempdir_remove(&dir);
    free(folder);
}
