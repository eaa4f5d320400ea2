// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/printed.h"
#include "tests/support/skip.h"
#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"
#include "trainer/checkpoint/folder.h"

TestSuite(folder, .init = fake_setup, .fini = fake_teardown);

/* "1 5 10 " */
static const char *listed(void)
{
    static char text[256];
    nd_folder *list = NULL;
    int count = 0, at = 0;
    assert_ok(nd_folder_list(fake_run.path, ND_FOLDER_WHOLE, &list, &count));
    text[0] = '\0';
    for (int i = 0; i < count; i++) {
        at += snprintf(text + at, sizeof text - (size_t)at, "%lld ", (long long)list[i].step);
    }
    free(list);
    return text;
}

/* A save that is not committed; its temporary folder. */
static char *begin(int64_t step, const char *run_id)
{
    char *temporary = NULL;
    assert_ok(nd_checkpoint_temporary(fake_run.path, step, run_id, &temporary));
    for (int rank = 0; rank < 2; rank++) {
        assert_ok(nd_fs_make_own_folder(temporary));
        assert_ok(nd_fs_make_own_folder(printed("%s/state", temporary)));
    }
    return temporary;
}

/* The commit of `temporary` with the manifest `m`. */
#define COMMIT_FAILS(status, words)                                                                \
    assert_fails(nd_checkpoint_commit(fake_run.path, temporary, &m, NULL, NULL), status, words)

/* renameat2 stands in place of the C library's. Names cannot be exchanged, for this reason; 0: they
 * can. Of the other renames that follow, this one fails; 0: none does. */
static int exchange_code, failing_rename;
static bool name_was_free; /* behind one of them nothing had the name of step 3 */

int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags)
{
    const bool exchanges = flags & RENAME_EXCHANGE;
    const bool fails = exchanges ? exchange_code != 0 : failing_rename > 0 && --failing_rename == 0;
    errno = exchanges ? exchange_code : EIO;
    if (!fails && syscall(SYS_renameat2, from_folder, from, to_folder, to, flags) == 0) {
        name_was_free |= !fake_exists("checkpoint-3");
        return 0;
    }
    exchange_code = exchanges ? errno : exchange_code; /* the file system's own */
    return -1;
}

Test(folder, a_step_that_is_saved_again_keeps_the_older_one)
{
    fake_write_small(3);
    fake_file("checkpoint-3/mark", "x");
    fake_write_small(3);
    cr_assert(fake_exists("checkpoint-3.old/mark") && !fake_exists("checkpoint-3/mark"));
    if (exchange_code != 0) {
        fake_teardown();
        skip_test("this file system cannot exchange names (renameat2)");
    }
    cr_assert_not(name_was_free);
    fake_file("checkpoint-3/mark", "x");
    exchange_code = EINVAL;
    fake_write_small(3);
    cr_assert(fake_exists("checkpoint-3.old-2/mark") && !fake_exists("checkpoint-3/mark"));
    cr_assert_str_eq(listed(), "3 ");
}

/* Writes what a rank with no tensors has, and returns its manifest. */
static nd_manifest written(int step)
{
    const nd_shape shape = fake_shape(true);
    nd_manifest m = fake_manifest(&shape, &fake_one, 1, step, false);
    fake_file(printed(".tmp-checkpoint-%d-test/state/shard-00001.hashes", step), "x");
    snprintf(m.writers[0].digest, sizeof m.writers[0].digest, "xxh3:%032d", 0);
    return m;
}

Test(folder, a_step_whose_names_cannot_change_keeps_its_older_save)
{
    static const struct {
        int exchange, rename;
        const char *words;
    } cases[] = {{EIO, 0, "cannot exchange"},
                 {0, 1, "cannot rename"},
                 {EINVAL, 1, "cannot rename"},
                 {ENOSYS, 2, "cannot rename"},
                 {EOPNOTSUPP, 2, "cannot rename"}};
    fake_write_small(3);
    fake_file("checkpoint-3/mark", "x");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *temporary = begin(3, "test");
        nd_manifest m = written(3);
        exchange_code = cases[i].exchange;
        failing_rename = cases[i].rename;
        COMMIT_FAILS(ND_ERR_CANTCREATE, cases[i].words);
        cr_expect(fake_exists("checkpoint-3/mark") && !fake_exists("checkpoint-3.old") &&
                      fake_exists(".tmp-checkpoint-3-test/manifest.json"),
                  "case %zu", i);
        nd_fs_remove_tree(temporary);
        nd_manifest_fini(&m);
        free(temporary);
    }
}

Test(folder, pruning_deletes_only_good_checkpoints_of_ours)
{
    int deleted = 0;
    fake_write_small(0);
    fake_move("checkpoint-0", "checkpoint-9"); /* the name of another step */
    for (int64_t step = 1; step <= 8; step++) {
        fake_write_small(step);
    }
    fake_file("checkpoint-2/manifest.json", "{"); /* damaged */
    fake_folder("checkpoint-100");                /* another program's */
    fake_file("checkpoint-100/optimizer.pt", "x");
    nd_prune_options options = {.keep_last = 2, .keep_every = 4, .keep = 1};
    assert_ok(nd_checkpoint_prune(fake_run.path, &options, &deleted));
    cr_assert_eq(deleted, 3);
    cr_assert_str_eq(listed(), "1 2 4 7 8 9 100 ");
    cr_assert_eq(fake_prune(0), 0);
    fake_prune(1);
    cr_assert_str_eq(listed(), "2 8 9 100 ");
}

Test(folder, deletion_does_not_follow_links)
{
    fake_write_small(1);
    fake_write_small(2);
    fake_folder("precious");
    fake_file("precious/file", "x");
    cr_assert_eq(symlink("../precious", fake_path("checkpoint-1/link")), 0);
    cr_assert_eq(fake_prune(1), 1);
    cr_assert(fake_exists("precious/file") && !fake_exists("checkpoint-1"));
    fake_move("checkpoint-2", "moved");
    cr_assert_eq(symlink("moved", fake_path("checkpoint-2")), 0);
    fake_write_small(3);
    cr_assert(fake_prune(1) == 0 && fake_exists("moved/manifest.json") &&
              fake_exists("checkpoint-2"));
}

/* The store of a job that has started again. Everything but the name is there. */
static nd_status belongs_to_another_start(void *asked)
{
    *(bool *)asked = fake_exists(".tmp-checkpoint-4-test/manifest.json");
    return nd_fail(ND_ERR_IO, "this start of the job has ended");
}

/* Somebody who may write to the run folder puts a link where a save will write. */
Test(folder, a_save_goes_through_no_link)
{
    char *temporary = NULL;
    fake_folder("loot");
    cr_assert_eq(symlink("loot", fake_path(".tmp-checkpoint-4-test")), 0);
    cr_assert_eq(symlink("loot", fake_path(".del-checkpoint-4")), 0);
    assert_ok(nd_checkpoint_temporary(fake_run.path, 4, "test", &temporary));
    assert_fails(nd_fs_make_own_folder(temporary), ND_ERR_CANTCREATE, "it is a link");
    cr_assert_not(fake_exists("loot/state"));
    assert_ok(nd_checkpoint_sweep(fake_run.path));
    cr_assert(!tempdir_has_path(temporary) && !fake_exists(".del-checkpoint-4"));
    cr_assert(fake_exists("loot"));
    free(temporary);
    /* And where it is put there while the save is under way. */
    temporary = begin(4, "test");
    nd_manifest m = written(4);
    bool asked = false;
    assert_fails(
        nd_checkpoint_commit(fake_run.path, temporary, &m, belongs_to_another_start, &asked),
        ND_ERR_IO, "has ended");
    cr_assert(asked && !fake_exists("checkpoint-4"));
    cr_assert_eq(unlink(fake_path(".tmp-checkpoint-4-test/manifest.json")), 0);
    fake_move(".tmp-checkpoint-4-test", "moved");
    cr_assert_eq(symlink("moved", temporary), 0);
    COMMIT_FAILS(ND_ERR_CANTCREATE, "no longer the folder");
    cr_assert_not(fake_exists("checkpoint-4"));
    nd_manifest_fini(&m);
    free(temporary);
}

/* A command that takes no lock may be writing beside the run at this moment: only names that a run
 * itself writes to, and those of dead saves, are swept. */
Test(folder, sweeping_leaves_what_other_commands_write)
{
#define TMP ".tmp-1-0123456789abcdef"
    static const char *const names[] = {".tmp-checkpoint-2-dead",
                                        ".del-checkpoint-7",
                                        "model" TMP,
                                        "run.json" TMP,
                                        "profile-12.json" TMP,
                                        "trace.json" TMP,
                                        "out" TMP,
                                        "model2" TMP,
                                        "page.html" TMP,
                                        "run-x.json" TMP,
                                        "runs.json" TMP,
                                        "run-12json" TMP,
                                        "mode" TMP,
                                        "trace" TMP,
                                        "other",
                                        "checkpoint-1"};
    enum { SWEPT = 6, NAMES = sizeof names / sizeof *names };
    for (int i = 0; i < NAMES; i++) {
        fake_folder(names[i]);
        fake_file(printed("%s/file", names[i]), "x");
    }
    assert_ok(nd_checkpoint_sweep(fake_run.path));
    for (int i = 0; i < NAMES; i++) {
        cr_expect_eq(fake_exists(names[i]), i >= SWEPT, "%s", names[i]);
    }
}

Test(folder, a_damaged_one_is_set_aside)
{
    char *aside = NULL;
    fake_write_small(4);
    assert_ok(nd_checkpoint_set_aside(fake_run.path, 4, "bad", &aside));
    cr_assert_str_eq(aside, fake_path("checkpoint-4.bad"));
    cr_assert(fake_exists("checkpoint-4.bad/manifest.json"));
    free(aside);
    assert_fails(nd_checkpoint_set_aside(fake_run.path, 4, "bad", NULL), ND_ERR_CANTCREATE,
                 "rename");
}

/* flock stands in place of the C library's, and fails once with this code. */
static int lock_code, lock_calls;

int flock(int fd, int operation)
{
    errno = lock_code;
    lock_code = 0;
    lock_calls++;
    return errno != 0 ? -1 : (int)syscall(SYS_flock, fd, operation);
}

Test(folder, only_a_file_system_without_locks_is_used_without_one)
{
    static const int none[] = {ENOLCK, ENOSYS, EOPNOTSUPP}, unknown[] = {EIO, EBADF, EINVAL};
    nd_run_lock lock;
    for (int i = 0; i < 3; i++) {
        lock_code = none[i];
        assert_ok(nd_run_lock_acquire(fake_run.path, &lock));
        cr_expect(lock.fd >= 0 && !lock.held);
        nd_run_lock_release(&lock);
        lock_code = unknown[i];
        assert_fails(nd_run_lock_acquire(fake_run.path, &lock), ND_ERR_IO, "cannot lock");
        cr_expect(lock.fd == -1 && !lock.held);
    }
    lock_code = EINTR;
    lock_calls = 0;
    assert_ok(nd_run_lock_acquire(fake_run.path, &lock));
    cr_expect(lock.held && lock_calls == 2);
    nd_run_lock_release(&lock);
}

Test(folder, two_processes_do_not_share_a_run)
{
    nd_run_lock lock, second;
    assert_ok(nd_run_lock_acquire(fake_run.path, &lock));
    assert_fails(nd_run_lock_acquire(fake_run.path, &second), ND_ERR_CANTCREATE, "another process");
    pid_t child = fork();
    if (child == 0) {
        _exit(nd_run_lock_acquire(fake_run.path, &second) == ND_ERR_CANTCREATE ? 0 : 1);
    }
    int status = 0;
    cr_assert_eq(waitpid(child, &status, 0), child);
    cr_assert_eq(status, 0);
    nd_run_lock_release(&lock);
    assert_ok(nd_run_lock_acquire(fake_run.path, &second));
    nd_run_lock_release(&second);
}

/* A rank's host has another disk under this path, or the disk is gone. */
Test(folder, what_some_rank_wrote_elsewhere_is_no_checkpoint)
{
    const nd_mesh two = {{1, 1, 2, 1, 1}};
    const nd_shape shape = fake_shape(true);
    nd_manifest m = fake_manifest(&shape, &two, 1, 4, false);
    char *temporary = begin(4, "test");
    fake_file(".tmp-checkpoint-4-test/state/shard-00001.hashes", "x");
    COMMIT_FAILS(ND_ERR_CANTCREATE, "rank 1 has written its part");
    fake_file(".tmp-checkpoint-4-test/state/shard-00002.hashes", "x");
    fake_file(".tmp-checkpoint-4-test/state/shard-00001.safetensors", "1234");
    m.writers[0].bytes = 4;
    m.writers[1].bytes = 1;
    COMMIT_FAILS(ND_ERR_DATA, "4 bytes of tensors; the ranks wrote 5");
    m.writers[0].bytes = 2;
    COMMIT_FAILS(ND_ERR_DATA, "4 bytes of tensors; the ranks wrote 3");
    cr_assert_str_eq(listed(), "");
    cr_assert_not(fake_exists(".tmp-checkpoint-4-test/manifest.json"));
    nd_manifest_fini(&m);
    free(temporary);
}
