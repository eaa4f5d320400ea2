// SPDX-License-Identifier: Apache-2.0
/*
 * Checkpoints that earlier programs wrote: golden/version-1 is read by every later program, to the
 * same values. "checkpoint_tool golden FOLDER" made it. A change of the format that is meant keeps
 * this folder, adds another, and lets is_written_the_same_again compare with the newest.
 */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "tests/support/shell.h"
#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"

static const int64_t steps[] = {FAKE_GOLDEN_SHARDED, FAKE_GOLDEN_SINGLE};
static const nd_mesh meshes[] = {{{1, 1, 1, 1, 1}}, {{1, 1, 2, 1, 2}}, {{1, 2, 3, 1, 1}}};

static const char *golden_folder(void)
{
    static char path[PATH_MAX];
    const char *root = getenv("ND_SOURCE_ROOT");
    cr_assert_not_null(root, "set ND_SOURCE_ROOT");
    assert_ok(nd_fs_path(path, "%s/tests/unit/trainer/checkpoint/golden/version-1", root));
    return path;
}

Test(golden, version_1_is_read_to_the_values_that_it_was_made_of)
{
    for (int i = 0; i < 2; i++) {
        fake_saved s = fake_open(golden_folder(), steps[i]);
        const nd_manifest *m = &s.manifest;
        cr_assert_eq(m->position.step, steps[i]);
        cr_assert_eq(m->position.skipped, steps[i] / 6);
        cr_assert_eq(m->position.tokens_seen, 100 * steps[i]);
        cr_assert_eq(m->samples_seen, 8 * steps[i]);
        cr_assert_str_eq(nd_manifest_find(m->identity, "data.path"), "00ff");
        assert_ok(fake_verify(s.path));
        for (size_t k = 0; k < sizeof meshes / sizeof *meshes; k++) {
            for (int rank = 0; rank < nd_mesh_world_size(&meshes[k]); rank++) {
                assert_ok(fake_load_rank(&s, &meshes[k], rank, false));
            }
        }
        fake_forget(&s);
    }
}

Test(golden, is_written_the_same_again)
{
    tempdir dir;
    tempdir_make(&dir);
    fake_write_golden(dir.path);
    shell(&dir, shell_line("diff -r %s .", golden_folder()));
    tempdir_remove(&dir);
}
