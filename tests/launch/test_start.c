// SPDX-License-Identifier: Apache-2.0
/* Tests of a job's start: what its workers get, and what stops the job before they start. */
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "runtime/base/version.h"
#include "tests/launch/tiny_job.h"
#include "tests/support/port.h"
#include "tests/support/variables.h"

static tempdir dir;
static launched l;

static void setup(void)
{
    tiny_write_inputs(&dir);
    launched_use_test_worker(NULL, NULL);
    setenv("XDG_RUNTIME_DIR", dir.path, 1); /* for a key without ndlaunch */
}

TEMPDIR_SUITE(start, setup, .timeout = 280);

Test(start, workers_get_torchruns_names_and_ours)
{
    setenv("ND_TEST", "self", 1);
    setenv("WORLD_SIZE", "77", 1); /* of an outer launcher */
    tiny_ndlaunch(&l, &dir, "out", 3, WORDS("--log-level", "debug"));
    assert_ends(&l, 0, "resolved configuration:\nlaunch:\n  workers: 3\n",
                "rank 0 of 3, local 0 of 3, node 0 of 1, run nd-", "rank 2 of 3, local 2 of 3",
                "env RANK=1\n", "env WORLD_SIZE=3\n", "env MASTER_ADDR=127.0.0.1\n",
                ":1: ready 1 pid "); /* "host:rank: " before the lines of ranks other than 0 */
    cr_assert_null(strstr(l.text, "WORLD_SIZE=77"));
}

/* Otherwise files and sockets of the programs would get the numbers of the closed streams. */
Test(start, closed_standard_streams_change_nothing)
{
    static const char *const closed[] = {">&-", "2>&-", "<&-", "<&- >&- 2>&-",
                                         "2> >(:)"}; /* a reader that leaves */
    static const char *const programs[][6] = {
        {"ndlaunch", "--num-processes", "2", "--dp-shard-size", "-1"}, {"ndtrain", "train"}};
    unsetenv("ND_WORKER");
    for (size_t i = 0; i < 2 * sizeof closed / sizeof *closed; i++) {
        const char *name = printed("closed-%zu", i);
        tiny_arguments a = {0};
        tiny_add(&a, WORDS("/bin/bash", "-c", printed("exec \"$@\" %s", closed[i / 2]), "bash",
                           launched_program(programs[i % 2][0])));
        tiny_add(&a, programs[i % 2] + 1);
        tiny_add(&a, tiny_flags(&dir, name));
        tiny_add(&a, WORDS("--num-steps", "2"));
        launched_start(&l, &dir, name, a.list);
        launched_ends(&l, 0);
    }
}

Test(start, the_key_is_in_no_environment_and_no_argument)
{
    char key[65], bytes[1 << 16];
    setenv("ND_TEST", "self", 1);
    tiny_ndlaunch(&l, &dir, "out", 2, NULL);
    launched_expect(&l, 0);
    const char *at = strstr(launched_read(&l), ":1: key ");
    cr_assert_not_null(at);
    snprintf(key, sizeof key, "%.64s", at + 8);
    cr_assert_eq(strlen(key), 64);
    cr_assert_null(strstr(at + 8 + 64, key));
    for (char *env = l.text; (env = strstr(env, "env ")); env++) {
        cr_assert_neq(strncmp(env + 4 + strcspn(env, "="), key, 64), 0);
        cr_assert(!strncmp(env, "env ND_KEY_FD=3\n", 16) || strncmp(env, "env ND_KEY", 10) != 0);
    }
    /* Workers that stay: their arguments and environment as other users of the host see them. */
    setenv("ND_TEST", "until signal", 1);
    tiny_ndlaunch(&l, &dir, "out2", 2, NULL);
    FILE *f = fopen(printed("/proc/%d/cmdline", launched_worker(&l, 1)), "rb");
    cr_assert_not_null(f);
    size_t got = fread(bytes, 1, sizeof bytes - 1, f);
    fclose(f);
    bytes[got] = '\0';
    cr_assert_not_null(strstr(bytes, "launch_test_worker"));
    cr_assert_str_eq(bytes + strlen(bytes) + 1, "train");
    cr_assert_eq(got, strlen(bytes) + 1 + sizeof "train"); /* and nothing else */
    launched_end(&l, SIGUSR1, 0);
}

Test(start, the_check_sees_the_workers_environment)
{
    SET_VARIABLES("ND_TEST=check environment", "CUDA_VISIBLE_DEVICES=3",
                  "HUGGINGFACE_HUB_CACHE=/somewhere", "ND_CPU_ISA=avx512");
    setenv("RANK", "5", 1); /* of an outer launcher */
    setenv("ND_RUN_FOLDER", "7", 1);
    tiny_ndlaunch(&l, &dir, "out", 1, NULL);
    launched_until(&l, "check env PATH=", 1);
    launched_until(&l, "check env RANK=0\n", 1);
    assert_says(&l, "check env CUDA_VISIBLE_DEVICES=3\n",
                "check env HUGGINGFACE_HUB_CACHE=/somewhere\n", "check env ND_CPU_ISA=avx512\n");
    cr_assert_null(strstr(l.text, "RANK=5"));
    cr_assert_null(strstr(l.text, "ND_RUN_FOLDER"));
    kill(l.pid, SIGKILL);
    launched_wait(&l, LAUNCHED_SECONDS);
}

Test(start, a_missing_worker_is_a_sentence)
{
    setenv("ND_WORKER", "/nonexistent/ndtrain", 1);
    tiny_ndlaunch(&l, &dir, "out", 2, NULL);
    assert_ends(&l, 2, "/nonexistent/ndtrain cannot be run");
}

Test(start, a_port_in_use_is_code_74)
{
    int fd, port = port_silent(&fd);
    cr_assert_eq(listen(fd, 1), 0);
    tiny_ndlaunch(&l, &dir, "out", 2, WORDS("--rdzv-endpoint", printed("127.0.0.1:%d", port)));
    assert_ends(&l, 74, "is in use by another program", printed("%d", port));
    close(fd);
}

Test(start, beyond_loopback_a_key_file_is_needed)
{
    tiny_ndlaunch(&l, &dir, "out", 2, WORDS("--rdzv-endpoint", "0.0.0.0:0"));
    assert_ends(&l, 2, "--rdzv-key-file", "--make-key");
}

/* A job of two workers with this code, which keeps its logs in this folder of the test's. */
static void log_to(const char *folder, int code)
{
    tiny_ndlaunch(&l, &dir, "out", 2, WORDS("--log-dir", tempdir_file(&dir, folder)));
    launched_expect(&l, code);
}

/* Returns what the command prints in this folder; it ends with 0. */
static const char *shell_prints(const char *folder, const char *command)
{
    static char text[1 << 14];
    FILE *f = popen(printed("cd %s/%s && %s", dir.path, folder, command), "r");
    cr_assert_not_null(f);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    cr_assert_eq(pclose(f), 0, "%s", command);
    return text;
}

Test(start, log_dir_keeps_each_workers_streams_of_each_start)
{
    setenv("ND_TEST", "exit 7", 1); /* rank 1, with a line on its standard error */
    for (int start = 1; start <= 2; start++) {
        log_to("deep/logs", 7);
        assert_says(&l, "output of the workers is kept in ", tempdir_file(&dir, "deep/logs"));
        cr_assert_eq(atoi(shell_prints("deep/logs", "ls -d nd-???????? | wc -l")), start);
    }
    cr_assert_eq(atoi(shell_prints("deep/logs", "ls nd-*/* | wc -l")), 8);
    cr_assert_str_eq(
        shell_prints("deep/logs", "grep -cx 'ready 0 pid [0-9]*' -h nd-*/rank-0.stdout.log"),
        "1\n1\n");
    cr_assert_str_eq(shell_prints("deep/logs", "cat nd-*/rank-1.stderr.log"),
                     "both ends\nlast words\nboth ends\nlast words\n");
}

/* Bytes that could move a cursor are text where people read, and as they are in files. Of a worker
 * that fails the last 20 lines are shown. */
Test(start, what_workers_print_is_shown_as_text)
{
    static const char script[] = "#!/bin/sh\n"
                                 "test $1 = check && echo ndtrain " ND_VERSION " && exit\n"
                                 "printf 'out\\033[31m\\n'; printf 'err\\033[31m\\n' >&2\n"
                                 "test $RANK = 0 && touch $0.done && exit\n"
                                 "head -c 9000 /dev/zero | tr '\\0' x\n"
                                 "for i in $(seq 25); do echo line $i >&2; done\n"
                                 "until test -e $0.done; do sleep 0.01; done; exit 7\n";
    setenv("ND_WORKER", tempdir_write(&dir, "worker", script, sizeof script - 1), 1);
    cr_assert_eq(chmod(dir.name, 0700), 0);
    log_to("logs", 7);
    assert_says(&l, "\nout\033[31m\n", "\nerr\\x1b[31m\n", ":1: out\\x1b[31m\n",
                ":1: err\\x1b[31m\n", "its last lines:\n    line 6\n    line 7\n",
                "    line 25\n  collateral ");
    cr_expect_eq(launched_count(&l, "\033"), 1, "%s", l.text);
    cr_expect_str_eq(shell_prints("logs", "awk '{print length($0)}' nd-*/rank-1.stdout.log"),
                     "8\n8191\n809\n");
}

Test(start, a_log_dir_that_cannot_be_made_stops_the_start)
{
    log_to("text.txt/logs", 73); /* below a file */
    assert_says(&l, "launch.log_dir", dir.name);
    cr_assert_null(strstr(l.text, "ready"));
}

/* A limit of file sizes is what a test can have of a full disk. The workers' lines themselves go to
 * /dev/null. */
Test(start, log_files_that_cannot_grow_stop_nobody)
{
    tiny_arguments a = {0};
    setenv("ND_TEST", "chatter", 1);
    tiny_add(&a, WORDS("/bin/bash", "-c", "ulimit -f 64; exec \"$@\" >/dev/null", "bash",
                       launched_program("ndlaunch"), "--num-processes", "2", "--dp-shard-size",
                       "-1", "--log-dir", tempdir_file(&dir, "logs")));
    tiny_add(&a, tiny_flags(&dir, "out"));
    launched_start(&l, &dir, "out", a.list);
    launched_expect(&l, 0);
    cr_assert_eq(launched_count(&l, "File too large"), 1, "%s", l.text);
    cr_assert_str_eq(shell_prints("logs", "stat -c %s nd-*/rank-?.stdout.log"), "65536\n65536\n");
}

/* Eight workers have 16 pipes and 8 connections at ndlaunch. */
Test(start, a_low_soft_limit_of_open_files_is_raised)
{
    struct rlimit files;
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &files), 0);
    files.rlim_cur = 24;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &files), 0);
    tiny_ndlaunch(&l, &dir, "out", 8, NULL);
    assert_ends(&l, 0, "ready 7 pid ");
}

Test(start, usage)
{
    static const struct {
        const char *const flags[4];
        int code;
        const char *said;
    } cases[] = {
        {{NULL}, 2, "usage: ndlaunch [--config-file FILE] [flags]"},
        {{"--help"}, 0, "\n  --make-key FILE "},
        {{"--help", "all"}, 0, "--rdzv-key-file"},
        {{"--help", "all"}, 0, "\n  --make-key FILE\n"},
        {{"--help", "lanch"}, 2, "did you mean --help launch?"},
        {{"--make-key"}, 2, "--make-key needs the name of a new file"},
        {{"--make-key", "/proc/none/a", "b"}, 2, "needs the name of a new file, and no other"},
        {{"--make-key=/proc/none/a"}, 73, "the key file /proc/none/a cannot be made"},
        {{"generat"}, 2, "did you mean `ndlaunch generate`?"},
        {{"env", "x"}, 2, "ndlaunch env takes no further argument"},
        {{"env"}, 0, "\nenvironment:\n"},
        {{"env"}, 0, "\nworker program "},
        {{"config", "--help"}, 0, "usage: ndlaunch config "},
        {{"config", "x"}, 2, "ndlaunch config does not take \"x\""},
        {{"config", "--config-file="}, 2, "--config-file is empty"},
        {{"--version"}, 0, "ndlaunch " ND_VERSION "\n"}, /* libraries follow */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tiny_arguments a = {.list = {launched_program("ndlaunch")}, .count = 1};
        tiny_add(&a, cases[i].flags);
        launched_start(&l, &dir, "usage", a.list);
        assert_ends(&l, cases[i].code, cases[i].said);
    }
}

/* The one that is installed beside ndlaunch, where the working directory has none. */
Test(start, a_first_configuration_names_the_small_model)
{
    const char *written = shell_prints(
        ".", printed("mkdir -p bin share/ndtrain/configs && cp %s bin && w() { rm -f ndtrain.yaml; "
                     "bin/ndlaunch config >said && grep -o '\".*small.json\"' ndtrain.yaml; } && w "
                     "&& cp model.json share/ndtrain/configs/model-small.json && w && "
                     "cp -r share/ndtrain/configs . && w",
                     launched_program("ndlaunch")));
    cr_expect_str_eq(written, printed("\"configs/model-small.json\"\n"
                                      "\"%s/share/ndtrain/configs/model-small.json\"\n"
                                      "\"configs/model-small.json\"\n",
                                      dir.path));
}

/* Indexing data takes minutes: missing ranks must be known before, and a rank that indexes must not
 * be taken for missing. */
Test(start, ranks_meet_before_they_open_the_data)
{
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", printed("%d", port_reserve()), 1);
    SET_VARIABLES("WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2", "RANK=0", "LOCAL_RANK=0");
    launched_start(&l, &dir, "rank0",
                   WORDS(launched_program("ndtrain"), "train", "--num-processes", "2", "--device",
                         "cpu", "--data-path", "/nonexistent.txt", "--rdzv-timeout-seconds", "2"));
    assert_ends(&l, 124, "missing of 2 ranks: 1");
    cr_assert_null(strstr(l.text, "nonexistent"), "%s", l.text);
}
