// SPDX-License-Identifier: Apache-2.0
/* What becomes of checkpoints that were set aside. */
#include <criterion/criterion.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/tempdir.h"
#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"
#include "trainer/checkpoint/folder.h"

static tempdir dir;

static void setup(void)
{
    tempdir_make(&dir);
}

static void teardown(void)
{
    nd_fs_remove_tree(dir.path);
}

TestSuite(retention, .init = setup, .fini = teardown);

static void save(int64_t step)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    nd_shape shape = fake_shape(true);
    fake_write(dir.path, &shape, &one, 1, step, false, ND_CHECKSUM_XXH3);
}

static void set_aside(int64_t step, const char *suffix)
{
    save(step);
    assert_ok(nd_checkpoint_set_aside(dir.path, step, suffix, NULL));
}

static void damage(const char *name)
{
    char path[128];
    snprintf(path, sizeof path, "%s/manifest.json", name);
    tempdir_write(&dir, path, "{", 1);
}

static bool exists(const char *name)
{
    return tempdir_has_path(tempdir_file(&dir, name));
}

static int prune(int64_t keep_last)
{
    const nd_prune_options options = {.keep_last = keep_last, .keep = -1};
    int deleted = 0;
    assert_ok(nd_checkpoint_prune(dir.path, &options, &deleted));
    return deleted;
}

Test(retention, what_is_set_aside_goes_when_the_run_has_got_as_far)
{
    save(1);
    save(4);
    for (int64_t step = 4; step <= 7; step++) {
        set_aside(step + 100, "old"); /* 104 to 107 */
    }
    set_aside(2, "bad");
    set_aside(3, "bad");
    cr_assert_eq(prune(2), 0);
    save(104);
    cr_assert_eq(prune(2), 1); /* checkpoint-1: the two newest are not both at 104 */
    cr_assert(!exists("checkpoint-1") && exists("checkpoint-104.old"));
    save(106);
    cr_assert_eq(prune(2), 2);
    cr_assert(!exists("checkpoint-4") && !exists("checkpoint-104.old"));
    cr_assert(exists("checkpoint-105.old") && exists("checkpoint-106.old"));
    save(108);
    save(109);
    cr_assert_eq(prune(0), 0); /* all are kept */
    cr_assert_eq(prune(2), 4);
    cr_assert(!exists("checkpoint-105.old") && !exists("checkpoint-106.old"));
    cr_assert(exists("checkpoint-107.old/manifest.json")); /* the newest */
    cr_assert(exists("checkpoint-2.bad/manifest.json") && exists("checkpoint-3.bad/state"));
}

Test(retention, what_is_not_surely_ours_is_not_deleted)
{
    char from[PATH_MAX];
    set_aside(1, "old");
    damage("checkpoint-1.old");
    cr_assert_eq(mkdir(tempdir_file(&dir, "checkpoint-3.old"), 0777), 0);
    tempdir_write(&dir, "checkpoint-3.old/optimizer.pt", "x", 1);
    set_aside(4, "old");
    snprintf(from, sizeof from, "%s", tempdir_file(&dir, "checkpoint-4.old"));
    cr_assert_eq(rename(from, tempdir_file(&dir, "checkpoint-4.older")), 0);
    set_aside(5, "old");
    save(9);
    cr_assert_eq(prune(1), 0);
    cr_assert(exists("checkpoint-1.old/state"));
    cr_assert(exists("checkpoint-3.old/optimizer.pt") && exists("checkpoint-4.older/state"));
}

Test(retention, the_only_good_state_stays)
{
    set_aside(4, "old");
    set_aside(5, "old");
    cr_assert_eq(prune(1), 0);
    save(6);
    damage("checkpoint-6");
    cr_assert_eq(prune(1), 0);
    save(7);
    cr_assert_eq(prune(2), 0); /* one good state is not the two that stay */
    cr_assert(exists("checkpoint-4.old") && exists("checkpoint-5.old"));
}

Test(retention, the_later_of_two_with_one_step_is_the_newest)
{
    nd_folder *list = NULL;
    int count = 0;
    for (int i = 0; i < 11; i++) {
        set_aside(3, "old");
    }
    assert_ok(nd_folder_list(dir.path, ND_FOLDER_OLD, &list, &count));
    cr_assert_eq(count, 11);
    cr_assert_str_eq(list[0].name, "checkpoint-3.old");
    cr_assert_str_eq(list[10].name, "checkpoint-3.old-11");
    free(list);
    save(3);
    cr_assert_eq(prune(1), 10);
    cr_assert(exists("checkpoint-3.old-11") && exists("checkpoint-3"));
}
