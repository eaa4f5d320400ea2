// SPDX-License-Identifier: Apache-2.0
/* These tests list a run folder, and look at which of its checkpoints stay. */
#include <criterion/criterion.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"
#include "trainer/checkpoint/folder.h"

static void save(int64_t step)
{
    const nd_mesh mesh = {{1, 1, 2, 1, 1}};
    nd_shape shape = fake_shape(true);
    fake_write(fake_run.path, &shape, &mesh, 1, step, false, ND_CHECKSUM_XXH3);
}

TestSuite(listing, .init = fake_setup, .fini = fake_teardown);

/* Only plain numbers are steps. */
Test(listing, tells_what_lies_in_a_run)
{
    nd_saved *list = NULL;
    int count = 0;
    static const char *const others[] = {
        "checkpoint-11.mine", "checkpoint-",   "checkpoint-01", "checkpoint--1",
        "checkpoint-1a",      "checkpoint- 1", "checkpoint-+1", "checkpoint",
        "xcheckpoint-7",      "Checkpoint-7",  "model",         "checkpoint-1234567890123456789"};
    static const char *const lines[] = {
        /* step, name and state of each entry, in their order */
        "0 checkpoint-0 no manifest",
        "1 checkpoint-1 good",
        "2 checkpoint-2 damaged manifest",
        "3 checkpoint-3 newer version",
        "4 checkpoint-4 incomplete",
        "5 checkpoint-5 incomplete",
        "6 checkpoint-6 no manifest",
        "7 checkpoint-7.bad .bad",
        "8 checkpoint-8 good",
        "8 checkpoint-8.old .old",
        "8 checkpoint-8.old-2 .old",
        "9 .tmp-checkpoint-9-id temporary",
        "10 .del-checkpoint-10 half deleted",
        "1 checkpoint-13 good",
        "14 checkpoint-14 link to nowhere",
    };
    for (int64_t step = 1; step <= 5; step++) {
        save(step);
    }
    save(7);
    assert_ok(nd_checkpoint_set_aside(fake_run.path, 7, "bad", NULL));
    for (int i = 0; i < 3; i++) {
        save(8);
    }
    fake_file("checkpoint-2/manifest.json", "{");
    fake_file("checkpoint-3/manifest.json",
              "{\"format\": \"ndtrain checkpoint\", \"version\": 99}");
    cr_assert_eq(unlink(fake_path("checkpoint-4/state/shard-00002.hashes")), 0);
    fake_file("checkpoint-5/state/shard-00001-model-00001-of-00001.safetensors", "x");
    fake_folder("checkpoint-6");
    fake_folder(".tmp-checkpoint-9-id");
    fake_folder(".del-checkpoint-10");
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        fake_folder(others[i]);
    }
    fake_folder("checkpoint-0");
    fake_file("checkpoint-12", "x");
    cr_assert_eq(symlink("checkpoint-1", fake_path("checkpoint-13")), 0);
    cr_assert_eq(symlink("gone", fake_path("checkpoint-14")), 0);
    assert_ok(nd_saved_list(fake_run.path, &list, &count));
    for (int i = 0; i < count && i < (int)(sizeof lines / sizeof *lines); i++) {
        char line[400];
        snprintf(line, sizeof line, "%lld %s %s", (long long)list[i].step, list[i].name,
                 list[i].state);
        cr_assert_str_eq(line, lines[i]);
    }
    cr_assert_eq(count, (int)(sizeof lines / sizeof *lines));
    free(list);
}

Test(listing, tells_what_a_checkpoint_is)
{
    nd_saved s;
    save(12);
    fake_file("checkpoint-12/config.json", "12345");
    uint64_t bytes = 0;
    assert_ok(nd_fs_tree_bytes(fake_path("checkpoint-12/state"), false, &bytes));
    struct stat st;
    cr_assert_eq(stat(fake_path("checkpoint-12/manifest.json"), &st), 0);
    assert_ok(nd_saved_examine(fake_path("checkpoint-12"), &s));
    cr_assert_str_eq(s.state, "good");
    cr_assert(!s.why[0] && s.has_model && s.has_manifest);
    cr_assert_eq(s.bytes, bytes + (uint64_t)st.st_size + 5);
    cr_assert_eq(s.time, 1769860800); /* 2026-01-31 12:00:00 UTC */
    cr_assert_str_eq(s.reason, "interval");
    cr_assert(s.mesh.size[ND_AXIS_DP_SHARD] == 2 && s.position.tokens_seen == 1200 &&
              s.samples_seen == 96);
    fake_move("checkpoint-12", "best");
    assert_ok(nd_saved_examine(fake_path("best"), &s));
    cr_assert_str_eq(s.state, "good"); /* under any name */
    cr_assert_eq(s.step, 12);
    assert_fails(nd_saved_examine(fake_path("nowhere"), &s), ND_ERR_DATA, "is no folder");
}

/* Says what is wrong, in the list and to a deletion: an incomplete one is neither counted nor
 * deleted. */
Test(listing, the_newest_good_one_is_never_planned_for_deletion)
{
    nd_saved s;
    nd_folder *list = NULL;
    int count = 0;
    for (int64_t step = 1; step <= 5; step++) {
        save(step);
    }
    cr_assert_eq(unlink(fake_path("checkpoint-5/state/shard-00001.hashes")), 0);
    assert_ok(nd_saved_examine(fake_path("checkpoint-5"), &s));
    cr_assert_str_eq(s.state, "incomplete");
    cr_assert_not_null(strstr(s.why, "shard-00001.hashes"), "%s", s.why);
    fake_file("checkpoint-4/manifest.json", "{");
    nd_prune_options options = {.keep_last = 1, .keep = -1};
    assert_ok(nd_checkpoint_prune_plan(fake_run.path, &options, true, &list, &count));
    cr_assert_eq(count, 2);
    cr_assert(list[0].step == 1 && list[1].step == 2);
    free(list);
    assert_ok(nd_checkpoint_prune_plan(fake_run.path, &options, false, &list, &count));
    cr_assert_eq(count, 3); /* by its manifest 5 is good */
    free(list);
    const nd_folder third = {"checkpoint-3", ND_FOLDER_WHOLE, 3, 1},
                    fourth = {"checkpoint-4", ND_FOLDER_WHOLE, 4, 1};
    assert_fails(nd_folder_delete(fake_run.path, &fourth), ND_ERR_DATA, "checkpoint-4");
    cr_assert(fake_exists("checkpoint-4/state"));
    assert_ok(nd_folder_delete(fake_run.path, &third));
    cr_assert_not(fake_exists("checkpoint-3"));
}

TestSuite(retention, .init = fake_setup, .fini = fake_teardown);

static void set_aside(int64_t step, const char *suffix)
{
    save(step);
    assert_ok(nd_checkpoint_set_aside(fake_run.path, step, suffix, NULL));
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
    cr_assert_eq(fake_prune(2), 0);
    save(104);
    cr_assert_eq(fake_prune(2), 1); /* checkpoint-1: the two newest are not both at 104 */
    cr_assert(!fake_exists("checkpoint-1") && fake_exists("checkpoint-104.old"));
    save(106);
    cr_assert_eq(fake_prune(2), 2);
    cr_assert(!fake_exists("checkpoint-4") && !fake_exists("checkpoint-104.old"));
    cr_assert(fake_exists("checkpoint-105.old") && fake_exists("checkpoint-106.old"));
    save(108);
    save(109);
    cr_assert_eq(fake_prune(0), 0); /* all are kept */
    cr_assert_eq(fake_prune(2), 4);
    cr_assert(!fake_exists("checkpoint-105.old") && !fake_exists("checkpoint-106.old"));
    cr_assert(fake_exists("checkpoint-107.old/manifest.json")); /* the newest */
    cr_assert(fake_exists("checkpoint-2.bad/manifest.json") &&
              fake_exists("checkpoint-3.bad/state"));
}

/* The oldest one, of which each later pruning is told too. */
Test(retention, what_cannot_be_deleted_keeps_no_other)
{
    const nd_prune_options options = {.keep_last = 1, .keep = -1};
    int deleted = 0;
    char path[PATH_MAX];
    int length = snprintf(path, sizeof path, "%s", fake_path(".del-checkpoint-1"));
    for (int depth = 0; depth < 12; depth++) { /* deeper than what is removed */
        cr_assert_eq(mkdir(path, 0777), 0);
        length += snprintf(path + length, sizeof path - (size_t)length, "/x");
    }
    for (int64_t step = 1; step <= 3; step++) {
        save(step);
    }
    assert_fails(nd_checkpoint_prune(fake_run.path, &options, &deleted), ND_ERR_CANTCREATE,
                 "checkpoint-1");
    cr_assert_eq(deleted, 1);
    cr_assert(fake_exists("checkpoint-1") && !fake_exists("checkpoint-2"));
    cr_assert(fake_exists("checkpoint-3"));
}

Test(retention, what_is_not_surely_ours_is_not_deleted)
{
    set_aside(1, "old");
    fake_file("checkpoint-1.old/manifest.json", "{");
    fake_folder("checkpoint-3.old");
    fake_file("checkpoint-3.old/optimizer.pt", "x");
    set_aside(4, "old");
    fake_move("checkpoint-4.old", "checkpoint-4.older");
    set_aside(5, "old");
    save(9);
    cr_assert_eq(fake_prune(1), 0);
    cr_assert(fake_exists("checkpoint-1.old/state"));
    cr_assert(fake_exists("checkpoint-3.old/optimizer.pt") &&
              fake_exists("checkpoint-4.older/state"));
}

Test(retention, the_only_good_state_stays)
{
    set_aside(4, "old");
    set_aside(5, "old");
    cr_assert_eq(fake_prune(1), 0);
    save(6);
    fake_file("checkpoint-6/manifest.json", "{");
    cr_assert_eq(fake_prune(1), 0);
    save(7);
    cr_assert_eq(fake_prune(2), 0); /* one good state is not the two that stay */
    cr_assert(fake_exists("checkpoint-4.old") && fake_exists("checkpoint-5.old"));
}

Test(retention, the_later_of_two_with_one_step_is_the_newest)
{
    nd_folder *list = NULL;
    int count = 0;
    for (int i = 0; i < 11; i++) {
        set_aside(3, "old");
    }
    assert_ok(nd_folder_list(fake_run.path, ND_FOLDER_OLD, &list, &count));
    cr_assert_eq(count, 11);
    cr_assert_str_eq(list[0].name, "checkpoint-3.old");
    cr_assert_str_eq(list[10].name, "checkpoint-3.old-11");
    free(list);
    save(3);
    cr_assert_eq(fake_prune(1), 10);
    cr_assert(fake_exists("checkpoint-3.old-11") && fake_exists("checkpoint-3"));
}
