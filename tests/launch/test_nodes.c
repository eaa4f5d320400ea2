// SPDX-License-Identifier: Apache-2.0
/* Several ndlaunch processes as the nodes of one job: on loopback, and in two network
 * namespaces. */
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "tests/launch/tiny_job.h"
#include "tests/support/port.h"

static tempdir dir;
static launched nodes[2];
static tiny_nodes job = {.nodes = 2, .workers = 4, .flags = WORDS("--rdzv-timeout-seconds", "20")};

static void setup(void)
{
    tiny_write_inputs(&dir);
    tiny_nodes_meet(&job, &dir);
}

TEMPDIR_SUITE(nodes, setup, .timeout = 280);

static void start_node(int node, const char *const *further)
{
    tiny_nodes_start(&nodes[node], &job, node, 0, further);
}

static void start_test_nodes(const char *what, const char *rank)
{
    launched_use_test_worker(what, rank);
    tiny_nodes_start_all(nodes, &job, NULL);
}

Test(nodes, two_of_two_workers_train_as_one_of_four)
{
    launched one;
    const char *const steps[] = {"--num-steps", "4", NULL};
    tiny_ndlaunch(&one, &dir, "one", 4, steps);
    launched_expect(&one, 0);
    start_node(1, steps); /* it waits for node 0 */
    start_node(0, steps);
    launched_expect_all(nodes, 2, 0);
    tiny_expect_same(&dir, "node0", "one", 4);
}

Test(nodes, workers_know_their_node_and_where_the_store_is)
{
    start_test_nodes("self", "0");
    launched_expect_all(nodes, 2, 0);
    assert_says(&nodes[0], "rank 1 of 4, local 1 of 2, node 0 of 2, run nd-");
    assert_says(&nodes[1], "rank 3 of 4, local 1 of 2, node 1 of 2, run nd-",
                printed(", at %s", job.endpoint));
}

Test(nodes, a_failure_elsewhere_is_shown_by_node_0_and_ends_all)
{
    start_test_nodes("fail", "3");
    for (int i = 0; i < 2; i++) {
        assert_ends(&nodes[i], 65, "rank 3 failed first", "it said: the test file is damaged",
                    "collateral (ended with it): 2\n");
    }
}

Test(nodes, a_worker_killed_on_node_0_ends_node_1)
{
    start_test_nodes("until signal", "3");
    pid_t victim = launched_worker(&nodes[0], 1), other = launched_worker(&nodes[1], 3);
    kill(victim, SIGKILL);
    launched_expect_all(nodes, 2, 137);
    assert_says(&nodes[0], "rank 1 failed first");
    assert_says(&nodes[1], "node 0 (host ");
    cr_assert(launched_gone(other));
}

Test(nodes, a_lost_launcher_ends_the_job_with_its_node_named)
{
    for (int lost = 0; lost < 2; lost++) {
        start_test_nodes("until signal", "3");
        launched_worker(&nodes[0], 0);
        launched_worker(&nodes[1], 2);
        launched_end(&nodes[lost], SIGKILL, 137);
        assert_ends(&nodes[!lost], 74, printed("node %d (", lost), "was lost");
    }
}

/* The signal reaches the launcher of one node, as that of a batch system may. */
Test(nodes, term_to_node_1_alone_ends_all_at_a_step_boundary)
{
    tiny_nodes_start_all(nodes, &job, WORDS("--num-steps", "1000000"));
    launched_until(&nodes[0], "\nstep ", 2);
    kill(nodes[1].pid, SIGTERM);
    for (int i = 0; i < 2; i++) {
        launched_expect(&nodes[i], 75);
        cr_assert_null(strstr(nodes[i].text, "failed first"), "%s", nodes[i].text);
    }
    assert_says(&nodes[0], "stopped by a signal after step ");
}

Test(nodes, different_settings_stop_all_with_key_and_both_values)
{
    launched_use_test_worker(NULL, NULL);
    start_node(0, WORDS("--learning-rate", "0.5"));
    start_node(1, WORDS("--learning-rate", "0.25"));
    for (int i = 0; i < 2; i++) {
        assert_ends(&nodes[i], 2, "optimizer.lr is '0.5' on node 0", "'0.25' on node 1");
    }
}

Test(nodes, different_data_under_the_same_name_is_a_difference)
{
    tempdir_write(&dir, "other.txt", "another text entirely, of at least forty characters", 51);
    start_node(0, NULL);
    start_node(1, WORDS("--set", printed("data.path=%s", dir.name)));
    for (int i = 0; i < 2; i++) {
        assert_ends(&nodes[i], 2, "data.path is '");
    }
}

Test(nodes, a_wrong_key_is_refused_and_the_node_named_as_missing)
{
    char wrong[64 + 1];
    memset(wrong, 'a', 64);
    launched_use_test_worker(NULL, NULL);
    tempdir_write(&dir, "wrong", wrong, 64);
    cr_assert_eq(chmod(dir.name, 0600), 0);
    /* Node 1 must have come by then. */
    start_node(0, WORDS("--rdzv-timeout-seconds", "8"));
    start_node(1, WORDS("--rdzv-key-file", dir.name));
    assert_ends(&nodes[1], 2,
                "the job key differs; all members of a job need the key of its node 0");
    assert_ends(&nodes[0], 124, "node 1 of 2 nodes is missing after 8 s");
}

Test(nodes, node_0_missing_is_said_at_the_deadline)
{
    launched_use_test_worker(NULL, NULL);
    start_node(1, WORDS("--rdzv-timeout-seconds", "1"));
    assert_ends(&nodes[1], 124, "was not reached within 1 s");
}

/* A node with these flags fails its check, for this reason; the other one does not wait. */
static void expect_bad_node(const char *const *flags, const char *reason)
{
    for (int bad = 0; bad < 2; bad++) {
        tiny_arguments a = {0};
        tiny_add(&a, WORDS("--rdzv-timeout-seconds", "300"));
        start_node(!bad, a.list);
        tiny_add(&a, flags);
        start_node(bad, a.list);
        launched_expect_all(nodes, 2, 65);
        assert_says(&nodes[bad], reason);
        assert_says(&nodes[!bad], printed("node %d (", bad), "failed its start-up check");
    }
}

Test(nodes, a_node_that_cannot_start_ends_all_at_once)
{
    expect_bad_node(WORDS("--set", "data.path=/nonexistent/text.txt"), "/nonexistent/text.txt");
}

/* The check is a program of its own there, which prints its reason. */
Test(nodes, a_node_whose_check_fails_ends_all_with_its_code)
{
    unsetenv("ND_WORKER");
    expect_bad_node(
        WORDS("--model-config", tempdir_write(&dir, "bad.json", "{\"hidden_size\": 32}", 19)),
        "bad.json");
}

/* launch.comm_timeout_seconds is the bound: a rank that waits for the frozen one names it, and
 * node 0 shows that. */
Test(nodes, a_frozen_worker_of_another_node_is_named_by_node_0)
{
    const char *const flags[] = {"--num-steps", "1000000", "--comm-timeout-seconds", "10", NULL};
    tiny_nodes_start_all(nodes, &job, flags);
    launched_until(&nodes[0], "\nstep ", 2);
    pid_t frozen = launched_child(&nodes[1], 3);
    kill(frozen, SIGSTOP);
    launched_expect_all(nodes, 2, 124);
    const char *said = strstr(launched_read(&nodes[0]), "it said: ");
    cr_assert_not_null(said, "%s", nodes[0].text);
    cr_assert_not_null(strstr(said, "rank 3"), "%s", nodes[0].text);
    cr_assert(launched_gone(frozen));
}

/* Launchers send each other a message every two seconds; 15 s of silence is the bound
 * (docs/launch.md). */
Test(nodes, a_frozen_launcher_is_named_after_its_silence)
{
    for (int frozen = 1; frozen >= 0; frozen--) {
        start_test_nodes("until signal", "3");
        launched_worker(&nodes[0], 0);
        launched_worker(&nodes[1], 2);
        kill(nodes[frozen].pid, SIGSTOP);
        assert_ends(&nodes[!frozen], 74, printed("node %d (", frozen), "no sign of life for 15 s");
        kill(nodes[frozen].pid, SIGCONT); /* it finds the other gone, and ends its workers */
        launched_expect(&nodes[frozen], 74);
    }
}

/* Node 0 listens, so it has checked the job and waits for node 1. */
static void wait_for_node_0(void)
{
    int fd, port = atoi(strchr(job.endpoint, ':') + 1);
    for (int i = 0; (fd = port_connect(port)) < 0; i++) {
        cr_assert_lt(i, LAUNCHED_SECONDS * 100, "node 0 does not listen");
        usleep(10000);
    }
    close(fd);
}

Test(nodes, a_signal_before_any_worker_exists_is_75)
{
    static const int signals[] = {SIGTERM, SIGINT, SIGHUP};
    for (int i = 0; i < (int)(sizeof signals / sizeof *signals); i++) {
        signal(signals[i], SIG_DFL);
        tiny_nodes_start(&nodes[0], &job, 0, i, NULL);
        wait_for_node_0();
        launched_end(&nodes[0], signals[i], 75);
    }
}

/* Node 0 waits for the workers of node 1 until a second interrupt, or until the grace time is over.
 * Signals that come while one is pending are lost, so they are sent until it ends. */
Test(nodes, a_signal_ends_a_node_whose_workers_have_ended)
{
    static const int signals[] = {SIGINT, SIGTERM};
    static const char *const seconds[] = {"600", "0.3"};
    for (int i = 0; i < 2; i++) {
        launched_use_test_worker("done", NULL);
        start_node(0, WORDS("--grace-seconds", seconds[i]));
        launched_use_test_worker("stubborn", NULL);
        start_node(1, WORDS("--grace-seconds", seconds[i]));
        for (int rank = 0; rank < 2; rank++) {
            while (kill(launched_worker(&nodes[0], rank), 0) == 0) { /* until ndlaunch knows */
                usleep(1000);
            }
        }
        for (siginfo_t end = {0}; end.si_pid == 0; usleep(100000)) {
            kill(nodes[0].pid, signals[i]);
            cr_assert_eq(waitid(P_PID, (id_t)nodes[0].pid, &end, WEXITED | WNOHANG | WNOWAIT), 0);
        }
        launched_expect(&nodes[0], 128 + signals[i]);
        assert_ends(&nodes[1], 74, "node 0 (127.0.0.1 port ", "was lost");
    }
}
