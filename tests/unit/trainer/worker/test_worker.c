// SPDX-License-Identifier: Apache-2.0
/* A rank that fails says why before it closes anything. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "trainer/worker/worker.h"

static const nd_worker *worker_seen;
static int abandoned;
static bool knew;
static int heard; /* what the process says, as a file */

/* As one that fails itself meanwhile: the thread's record is another one's then. */
static void abandon(nd_transport *transport)
{
    abandoned++;
    char said[200] = "";
    ssize_t n = pread(heard, said, sizeof said - 1, 0);
    knew = worker_seen->error.status == ND_ERR_RESOURCE && n > 0 && strstr(said, "no memory");
    nd_fail(ND_ERR_IO, "another fault");
}

static void close_nothing(nd_transport *transport)
{
}

static const nd_comm_backend backend = {.name = "seen", .abandon = abandon, .close = close_nothing};

/* It does so where no ndlaunch watches, too. */
Test(worker, a_failing_rank_speaks_then_abandons_once)
{
    static const nd_identity_source sources[] = {ND_IDENTITY_NDLAUNCH, ND_IDENTITY_ENVIRONMENT};
    nd_transport transport = {.backend = &backend, .size = 1};
    for (int i = 0; i < 2; i++) {
        nd_worker worker = {.gate = ND_GATE_INIT,
                            .transport = &transport,
                            .identity = {.source = sources[i], .world_size = 2}};
        worker_seen = &worker;
        heard = memfd_create("stderr", 0);
        cr_assert_eq(dup2(heard, STDERR_FILENO), STDERR_FILENO);
        nd_fail_context(nd_fail(ND_ERR_RESOURCE, "no memory"), "the plan says more");
        nd_worker_fail(&worker, ND_ERR_RESOURCE);
        cr_expect(knew, "abandoned before the reason was said, source %d", i);
        nd_worker_fail(&worker, ND_ERR_IO);
        cr_expect_eq(abandoned, i + 1);
        cr_expect_eq(worker.error.status, ND_ERR_RESOURCE);
        cr_expect_str_eq(worker.error.message, "no memory (while the plan says more)");
    }
}

static int on_own_stack;

static void note_stack(int number)
{
    stack_t now;
    sigaltstack(NULL, &now);
    on_own_stack += (now.ss_flags & SS_ONSTACK) != 0;
}

/* A product of oneDNN may have the stack pointer in the heap when the signal comes. */
Test(worker, handlers_of_signals_have_a_stack_of_their_own)
{
    static const int numbers[] = {SIGTERM, SIGUSR1, SIGHUP, SIGINT};
    nd_worker worker = {.gate = ND_GATE_INIT};
    signal(SIGHUP, SIG_DFL); /* this test may run under nohup */
    cr_assert_eq(nd_worker_begin(&worker, note_stack), ND_OK);
    for (int i = 0; i < 4; i++) {
        raise(numbers[i]);
        cr_assert_eq(on_own_stack, i + 1, "signal %d", numbers[i]);
    }
    struct sigaction now;
    sigaction(SIGINT, NULL, &now);
    cr_expect_eq(now.sa_handler, SIG_DFL, "a second INT does not end a worker without ndlaunch");
    sigaction(SIGPIPE, NULL, &now);
    cr_expect_eq(now.sa_handler, SIG_IGN);
}

/* Settings of ndlaunch's nodes, with ranks that another launcher started: four on two nodes. */
Test(worker, the_launcher_says_how_many_ranks_there_are)
{
    static const struct {
        nd_identity_source source;
        const char *flags;
        int64_t workers; /* 0: refused */
    } cases[] = {
        {ND_IDENTITY_SINGLE, "", 1},
        {ND_IDENTITY_NDLAUNCH, "--nproc-per-node 2 ", 2},
        {ND_IDENTITY_ENVIRONMENT, "", 4},
        {ND_IDENTITY_PMIX, "--nnodes 2 --node-rank 1 --nproc-per-node 2 ", 4},
        {ND_IDENTITY_PMIX, "--num-processes 3 ", 3},
        {ND_IDENTITY_ENVIRONMENT, "--nproc-per-node 1 ", 2},
        {ND_IDENTITY_PMIX, "--nnodes 3 ", 0},
        {ND_IDENTITY_PMIX,
         "--nnodes 2 --spare-nodes 1 --min-nodes 1 --max-restarts 1 --checkpoint-frequency 5 ", 4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const nd_identity id = {
            .source = cases[i].source, .world_size = 4, .nnodes = 2, .config_fd = -1};
        char words[256], *rest = words, *argv[32] = {(char *)"train"};
        nd_cli cli = {.help_topic = ""};
        nd_config config;
        int argc = 1;
        snprintf(words, sizeof words, "%s--dp-shard-size -1", cases[i].flags);
        for (char *word; (word = strsep(&rest, " "));) {
            argv[argc++] = word;
        }
        const nd_status status = nd_settings_read(&config, &cli, &id, argc, argv);
        cr_expect_eq(status == ND_OK ? config.launch.workers : 0, cases[i].workers, "%s: %s",
                     cases[i].flags, nd_error_last()->message);
        nd_config_fini(&config);
    }
}
