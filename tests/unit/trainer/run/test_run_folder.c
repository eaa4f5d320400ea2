// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "tests/support/printed.h"
#include "tests/support/tempdir.h"
#include "tests/unit/trainer/shapes.h"
#include "trainer/run/state.h"

static tempdir dir;

static void enter(void)
{
    cr_assert_eq(chdir(dir.path), 0);
}

TEMPDIR_SUITE(run_folder, enter);

static void write_file(const char *path, const char *text)
{
    assert_ok(nd_fs_write_atomic(path, text, strlen(text)));
}

static void make_folders(const char *path)
{
    assert_ok(nd_fs_make_folders(path, "it", ""));
}

static bool is_folder(const char *path)
{
    bool is = false;
    assert_ok(nd_fs_is_folder(path, &is));
    return is;
}

/* Makes the folder of a run with this output.dir and this name of its configuration. */
static void make_run(const char *source, const char *folder, const char *expected)
{
    const nd_config config = {.source = (char *)source, .output.dir = (char *)folder};
    char *got = NULL;
    assert_ok(nd_run_folder_create(&config, &got));
    cr_assert_str_eq(got, expected);
    cr_assert(is_folder(got));
    free(got);
}

/* A run with this output.dir is refused with these words. */
static void refuse_run(const char *folder, const char *words)
{
    const nd_config config = {.source = "", .output.dir = (char *)folder};
    char *got = (char *)"untouched";
    assert_fails(nd_run_folder_create(&config, &got), ND_ERR_CANTCREATE, words);
    cr_assert_str_eq(got, "untouched");
}

Test(run_folder, fresh_ones_are_numbered_by_configuration)
{
    make_run("configs/tp_hsdp.yaml", "", "runs/tp_hsdp-1");
    make_run("configs/tp_hsdp.yaml", "", "runs/tp_hsdp-2");
    make_run("configs/tp_hsdp.yaml", "", "runs/tp_hsdp-3");
    make_run("configs/llama-3.1-8b.yaml", "", "runs/llama-3.1-8b-1"); /* only the suffix goes */
    make_run("", "", "runs/run-1");
}

/* Processes that start together each get a folder of their own: as many folders as processes. */
Test(run_folder, two_runs_never_share_one)
{
    enum { PROCESSES = 8, EACH = 10 };
    for (int p = 0; p < PROCESSES; p++) {
        pid_t child = fork();
        cr_assert_geq(child, 0);
        if (child == 0) {
            nd_config config = {.source = "x.yaml", .output.dir = ""};
            for (int i = 0; i < EACH; i++) {
                char *got = NULL;
                if (nd_run_folder_create(&config, &got) != ND_OK) {
                    _exit(1);
                }
                free(got);
            }
            _exit(0);
        }
    }
    for (int p = 0; p < PROCESSES; p++) {
        int status = 0;
        cr_assert_gt(wait(&status), 0);
        cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    char last[64], beyond[64];
    snprintf(last, sizeof last, "runs/x-%d", PROCESSES * EACH);
    snprintf(beyond, sizeof beyond, "runs/x-%d", PROCESSES * EACH + 1);
    cr_assert(is_folder(last));
    cr_assert_not(is_folder(beyond));
}

Test(run_folder, a_given_one_is_made_with_its_parents_and_may_be_empty)
{
    make_run("", "a/b//c/", "a/b//c/");
    make_run("", "a/b//c/", "a/b//c/");
}

Test(run_folder, one_that_holds_a_run_is_refused_and_left_alone)
{
    const char *const marks[] = {"run.json", "metrics.jsonl", "trace.json", "model"};
    const char *const folders[] = {"one", "two", "three", "four"};
    for (int i = 0; i < 4; i++) {
        char path[PATH_MAX];
        nd_run_lock lock;
        struct stat st;
        make_folders(folders[i]);
        snprintf(path, sizeof path, "%s/%s", folders[i], marks[i]);
        write_file(path, "precious");
        refuse_run(folders[i], "already holds a run");
        assert_ok(nd_run_lock_acquire(folders[i], &lock));
        refuse_run(folders[i], "another process trains in");
        nd_run_lock_release(&lock);
        refuse_run(folders[i], marks[i]);
        cr_assert_not_null(strstr(nd_error_last()->message, "--resume-from-checkpoint auto"));
        cr_assert_eq(stat(path, &st), 0);
        cr_assert_eq(st.st_size, 8);
    }
}

/* One that was copied there: a restart of the fresh run would go on from it. */
Test(run_folder, one_that_holds_a_checkpoint_is_refused)
{
    make_folders("one/checkpoint-7"); /* another program's */
    make_folders("one/checkpoint-6.old/state");
    make_run("", "one", "one");
    make_folders("one/checkpoint-5/state");
    refuse_run("one", "already holds a run (checkpoint-5)");
    make_folders("two");
    cr_assert_eq(symlink("../one/checkpoint-5", "two/checkpoint-3"), 0);
    refuse_run("two", "already holds a run (checkpoint-3)");
}

/* Makes what a start has made in the folder "one". */
static void begin_one(void)
{
    make_folders("one/tensorboard");
    write_file("one/run.json", "{}");
    write_file("one/metrics.jsonl", "");
}

/* Folders of runs that never began do not pile up. */
Test(run_folder, a_run_that_never_began_is_forgotten)
{
    nd_run run = {.dir = (char *)"one", .made = true, .record = "one/run.json"};
    begin_one();
    write_file("one/mine", "");
    assert_ok(nd_run_lock_acquire("one", &run.lock));
    run.continues = true;
    nd_run_forget(&run);
    cr_assert(tempdir_has_path("one/run.json"));
    run.continues = run.made = false;
    nd_run_forget(&run);
    cr_assert(!tempdir_has_path("one/run.json") && !tempdir_has_path("one/metrics.jsonl"));
    cr_assert(is_folder("one/tensorboard"), "a folder that was there before, with what it held");
    run.made = true;
    nd_run_forget(&run);
    cr_assert(tempdir_has_path("one/mine"), "a file of somebody else");
    cr_assert_eq(unlink("one/mine"), 0);
    nd_run_forget(&run);
    cr_assert_not(is_folder("one"));
    nd_run_lock_release(&run.lock);
}

/* When two starts make the same folder, one makes run.json; the other one leaves its files, while
 * the first one trains and when it has ended and given its lock back. */
Test(run_folder, a_start_without_a_record_forgets_nothing_of_the_one_that_has_it)
{
    static const char *const names[] = {"one/run.json", "one/metrics.jsonl", "one/.lock",
                                        "one/tensorboard"};
    nd_run run = {.dir = (char *)"one", .made = true};
    nd_run_lock winner;
    begin_one();
    assert_ok(nd_run_lock_acquire("one", &winner));
    for (int ended = 0; ended < 2; ended++) {
        cr_assert_eq(nd_run_lock_acquire("one", &run.lock), ended ? ND_OK : ND_ERR_CANTCREATE);
        nd_run_forget(&run);
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
            cr_expect(tempdir_has_path(names[i]), "%s, %d", names[i], ended);
        }
        nd_run_lock_release(ended ? &run.lock : &winner);
    }
}

static int names_here(void)
{
    nd_fs_names names;
    assert_ok(nd_fs_list(".", &names));
    const int count = names.count;
    nd_fs_names_fini(&names);
    return count;
}

/* A check and the start of a run give the same answer; a refused start leaves nothing. */
Test(run_folder, a_check_makes_nothing)
{
    nd_config config = {.source = "", .output.dir = ""};
    const nd_inputs inputs = {0};
    static char deep[64 * PATH_MAX];
    char long_name[300];
    static const char *const free_ones[] = {"", "new", "new/deep/er/", "./y//x"};
    for (size_t i = 0; i < sizeof free_ones / sizeof *free_ones; i++) {
        config.output.dir = (char *)free_ones[i];
        assert_ok(nd_run_folder_check(&config, &inputs, NULL));
        cr_expect_eq(names_here(), 0, "%s", free_ones[i]);
    }
    write_file("file", "");
    write_file("runs", "");
    cr_assert_eq(symlink("nowhere", "dangling"), 0);
    memset(long_name, 'n', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = '\0';
    memset(deep, 'n', sizeof deep - 1);
    for (size_t i = 200; i < sizeof deep; i += 200) {
        deep[i] = '/';
    }
    const char *const taken[] = {"",          "file",        "file/x",     "file/x/y", "dangling/",
                                 "z/../held", "z/../file/x", "/proc/nd/x", long_name,  deep};
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
        char *got = NULL;
        config.output.dir = (char *)taken[i];
        cr_expect_eq(nd_run_folder_check(&config, &inputs, NULL), ND_ERR_CANTCREATE, "%.99s",
                     taken[i]);
        cr_expect_eq(nd_run_folder_create(&config, &got), ND_ERR_CANTCREATE, "%.99s", taken[i]);
        cr_expect_eq(names_here(), 3, "%.99s left something", taken[i]);
    }
}

static void expect_newest(const char *expected)
{
    const nd_config config = {.source = "x.yaml", .output.dir = ""};
    char *got = NULL;
    assert_ok(nd_run_folder_newest(&config, &got));
    cr_assert(got && strcmp(got, expected) == 0, "%s, not %s", got ? got : "none", expected);
    free(got);
}

/* A run whose checkpoints are damaged or elsewhere is not passed over for an older run, of which
 * nothing is examined. */
Test(run_folder, the_newest_is_the_one_that_has_something_saved)
{
    make_folders("runs/x-1");
    cr_assert_eq(symlink("checkpoint-5", "runs/x-1/checkpoint-5"), 0); /* it cannot be examined */
    make_folders("runs/x-2/checkpoint-5/state");
    make_folders("runs/x-9/checkpoint-5.old/state");
    make_folders("runs/y-9/checkpoint-5/state");
    write_file("runs/x-8", ""); /* no folder */
    expect_newest("runs/x-2");
    make_folders("runs/x-3/checkpoint-5.bad/state");
    expect_newest("runs/x-3");
    make_folders("runs/x-4");
    cr_assert_eq(symlink("../x-2/checkpoint-5", "runs/x-4/checkpoint-6"), 0);
    expect_newest("runs/x-4");
    make_folders("runs/x-5/checkpoint-5.bad/state");
    make_folders("runs/x-5/checkpoint-6.old/state");
    make_folders("runs/x-6/checkpoint-7"); /* another program's */
    expect_newest("runs/x-5");
    make_folders("runs/x-10/checkpoint-5/state");
    make_folders("runs/x-11-1/checkpoint-5/state"); /* of x-11.yaml */
    expect_newest("runs/x-10");
}

/* With checkpoint.export_model each checkpoint holds the model too, in the type it is saved in. */
Test(run_folder, a_checkpoint_needs_room_for_its_model)
{
    nd_config config = {.optimizer.name = ND_OPTIMIZER_ADAMW, .output.dtype = ND_WEIGHTS_FP32};
    const nd_inputs inputs = {.shape = {SIZES(100, 1024, 2048, 2, 8, 8, 128)}};
    const uint64_t parameters = (uint64_t)nd_shape_parameters(&inputs.shape);
    const uint64_t plain = nd_run_checkpoint_bytes(&config, &inputs);
    cr_assert_geq(plain, 12 * parameters);
    config.checkpoint.export_model = true;
    cr_assert_geq(nd_run_checkpoint_bytes(&config, &inputs), plain + 4 * parameters);
    config.output.dtype = ND_WEIGHTS_BF16;
    const uint64_t with_model = nd_run_checkpoint_bytes(&config, &inputs);
    cr_assert_lt(with_model, plain + 4 * parameters);
    nd_inputs more = inputs;
    more.side_bytes = 5000;
    cr_assert_eq(nd_run_checkpoint_bytes(&config, &more), with_model + 5000);
    config.checkpoint.export_model = false;
    config.optimizer.name = ND_OPTIMIZER_SGD; /* keeps no moments */
    cr_assert_eq(nd_run_checkpoint_bytes(&config, &more), plain - 8 * parameters);
    config.resolved_mesh = (nd_mesh){{1, 1, 4, 1, 2}}; /* the files of each rank have heads */
    cr_assert_eq(nd_run_checkpoint_bytes(&config, &more), plain - 8 * parameters + 8 * 65536);
}

/* By a limit of ulimit -f. A large model is sharded. */
Test(run_folder, the_largest_file_of_the_model_must_be_allowed)
{
    const nd_config config = {
        .source = "", .output = {.dir = "new", .save_model = true, .dtype = ND_WEIGHTS_BF16}};
    nd_inputs inputs = {.shape = {SIZES(100, 64, 64, 1, 8, 8, 8)}};
    struct rlimit limit;
    cr_assert_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = 2 * (rlim_t)nd_shape_parameters(&inputs.shape) + (1 << 20);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    assert_ok(nd_run_folder_check(&config, &inputs, NULL));
    limit.rlim_cur--;
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    assert_fails(nd_run_folder_check(&config, &inputs, NULL), ND_ERR_CANTCREATE, "ulimit -f");
    inputs.shape.vocab = (int64_t)1 << 40;
    assert_fails(nd_run_folder_check(&config, &inputs, NULL), ND_ERR_CANTCREATE,
                 printed("needs a file of %llu bytes, but", (unsigned long long)ND_HF_FILE_BYTES));
}

Test(run_folder, a_file_in_its_place_or_on_its_way_is_named)
{
    write_file("file", "");
    refuse_run("file", "is a file");
    refuse_run("file/below", "file/below");
    refuse_run("/proc/nd/run", "/proc/nd/run");
}
