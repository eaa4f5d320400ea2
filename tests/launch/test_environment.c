// SPDX-License-Identifier: Apache-2.0
/* Trainers without a launcher of ours, with the variables that torchrun --no-python sets: rank 0
 * hosts the store. */
#include <arpa/inet.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>

#include "tests/launch/launched.h"

enum { RANKS = 4 };

static tempdir dir;
static launched ranks[RANKS];

static void setup(void)
{
    char port[16];
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof address;
    tempdir_make(&dir);
    launched_write_inputs(&dir);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); /* a port that is free just now */
    cr_assert_eq(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
    cr_assert_eq(getsockname(fd, (struct sockaddr *)&address, &bytes), 0);
    close(fd);
    snprintf(port, sizeof port, "%d", ntohs(address.sin_port));
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", port, 1);
    setenv("WORLD_SIZE", "4", 1);
    setenv("LOCAL_WORLD_SIZE", "4", 1);
    setenv("TORCHELASTIC_RUN_ID", "some-run", 1);
}

static void teardown(void)
{
    launched_remove(&dir);
}

TestSuite(environment, .init = setup, .fini = teardown, .timeout = 240);

/* All ranks with these steps; the one that differs has the further flag, too. */
static void start(const char *steps, int different, const char *flag)
{
    char program[PATH_MAX], model[128], data[128], out[200], number[16], name[32];
    snprintf(program, sizeof program, "%s/ndtrain", launched_build_root());
    snprintf(model, sizeof model, "model.config=%s/model.json", dir.path);
    snprintf(data, sizeof data, "data.path=%s/text.txt", dir.path);
    snprintf(out, sizeof out, "output.dir=%s/run-ranks", dir.path);
    for (int rank = RANKS - 1; rank >= 0; rank--) {
        snprintf(number, sizeof number, "%d", rank);
        snprintf(name, sizeof name, "rank%d", rank);
        setenv("RANK", number, 1);
        setenv("LOCAL_RANK", number, 1);
        const char *const argv[] = {program,
                                    "train",
                                    "--device",
                                    "cpu",
                                    "--threads-per-worker",
                                    "1",
                                    "--dp-shard-size",
                                    "-1",
                                    "--set",
                                    model,
                                    "--set",
                                    data,
                                    "--set",
                                    out,
                                    "--set",
                                    "data.validation_path=",
                                    "--set",
                                    "output.save_model=false",
                                    "--precision",
                                    "fp32",
                                    "--sequence-length",
                                    "32",
                                    "--set",
                                    "log.interval=1",
                                    "--num-steps",
                                    steps,
                                    rank == different ? flag : NULL,
                                    NULL};
        launched_start(&ranks[rank], &dir, name, argv);
    }
}

/* The numbers of each step up to the token count: loss, norm and learning rate with 17 digits. */
static void read_metrics(const char *run, char *out, size_t capacity)
{
    char path[256], line[4096];
    size_t used = 0;
    snprintf(path, sizeof path, "%s/run-%s/metrics.jsonl", dir.path, run);
    FILE *f = fopen(path, "r");
    cr_assert_not_null(f, "%s", path);
    while (fgets(line, sizeof line, f)) {
        char *end = strstr(line, ",\"tokens\"");
        used +=
            end ? (size_t)snprintf(out + used, capacity - used, "%.*s\n", (int)(end - line), line)
                : 0;
        cr_assert_lt(used, capacity);
    }
    fclose(f);
    cr_assert_gt(used, 100);
}

Test(environment, ranks_train_as_under_ndlaunch)
{
    launched one;
    static char whole[8192], apart[8192];
    start("4", -1, NULL); /* the axis that is -1 takes WORLD_SIZE */
    for (int rank = 0; rank < RANKS; rank++) {
        cr_assert_eq(launched_wait(&ranks[rank], 60), 0, "rank %d: %s", rank,
                     launched_read(&ranks[rank]));
    }
    launched_ndlaunch(&one, &dir, "one", RANKS, (const char *[]){"--num-steps", "4", NULL});
    cr_assert_eq(launched_wait(&one, 60), 0, "%s", launched_read(&one));
    read_metrics("ranks", apart, sizeof apart);
    read_metrics("one", whole, sizeof whole);
    cr_assert_str_eq(apart, whole);
}

static void kill_one(int victim, int witness, const char *words)
{
    start("1000000", -1, NULL);
    launched_until(&ranks[0], "\nstep ", 2, 60);
    kill(ranks[victim].pid, SIGKILL);
    for (int rank = 0; rank < RANKS; rank++) {
        int code = launched_wait(&ranks[rank], 60);
        cr_assert_eq(code, rank == victim ? 137 : 74, "rank %d: %d: %s", rank, code,
                     launched_read(&ranks[rank]));
    }
    assert_says(&ranks[witness], words);
}

Test(environment, a_killed_rank_ends_the_others_and_rank_0_names_it)
{
    kill_one(2, 0, "rank 2 (");
}

Test(environment, a_killed_rank_0_ends_the_others)
{
    kill_one(0, 1, "rank 0");
}

Test(environment, different_settings_stop_all_with_key_and_both_values)
{
    start("4", 2, "--learning-rate=0.125");
    for (int rank = 0; rank < RANKS; rank++) {
        int code = launched_wait(&ranks[rank], 60);
        /* 74: who learned of another's end first */
        cr_assert(code == 2 || (code == 74 && rank != 2), "rank %d: %d: %s", rank, code,
                  launched_read(&ranks[rank]));
    }
    assert_says(&ranks[2], "optimizer.lr is '");
    assert_says(&ranks[2], "'0.125' on rank 2 (");
}

Test(environment, a_signal_to_one_rank_ends_all_at_the_same_step)
{
    start("1000000", -1, NULL);
    launched_until(&ranks[0], "\nstep ", 2, 60);
    kill(ranks[3].pid, SIGTERM);
    char words[64] = "";
    for (int rank = RANKS - 1; rank >= 0; rank--) {
        cr_assert_eq(launched_wait(&ranks[rank], 60), 75, "rank %d: %s", rank,
                     launched_read(&ranks[rank]));
        const char *step = strstr(launched_read(&ranks[rank]), "stopped by a signal after step ");
        cr_assert_not_null(step, "%s", ranks[rank].text);
        snprintf(words, sizeof words, "%.*s", words[0] ? 0 : (int)strcspn(step, "\n"), step);
        assert_says(&ranks[rank], words);
    }
}
