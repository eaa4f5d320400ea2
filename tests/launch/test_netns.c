// SPDX-License-Identifier: Apache-2.0
/*
 * Two nodes with nothing but a network between them: two network namespaces joined by a veth pair.
 * Skipped, with the reason, where this process may not make namespaces.
 */
#include <string.h>

#include "tests/launch/tiny_job.h"
#include "tests/support/skip.h"

static tempdir dir;
static char spaces[2][32];

static void remove_spaces(void)
{
    for (int i = 0; i < 2; i++) {
        if (spaces[i][0]) {
            launched_shell("ip netns del %s 2>/dev/null", spaces[i]);
        }
    }
}

/* The decoy is an interface of the first space, before the one that leads to the second. */
static bool make_spaces(bool decoy)
{
    for (int i = 0; i < 2; i++) {
        snprintf(spaces[i], sizeof spaces[i], "ndt%d-%d", (int)getpid(), i);
        if (launched_shell("ip netns add %s 2>/dev/null", spaces[i]) != 0) {
            spaces[i][0] = '\0';
            return false;
        }
    }
    if (decoy && launched_shell("ip -n %s link add nd8 type veth peer name nd9 2>/dev/null && "
                                "ip -n %s addr add 10.98.0.1/24 dev nd8 && "
                                "ip -n %s link set nd8 up && ip -n %s link set nd9 up",
                                spaces[0], spaces[0], spaces[0], spaces[0]) != 0) {
        return false;
    }
    if (launched_shell("ip link add nd0 netns %s type veth peer name nd1 netns %s 2>/dev/null",
                       spaces[0], spaces[1]) != 0) {
        return false;
    }
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(launched_shell(
                         "ip -n %s addr add 10.99.0.%d/24 dev nd%d && ip -n %s link set nd%d up && "
                         "ip -n %s link set lo up",
                         spaces[i], i + 1, i, spaces[i], i, spaces[i]),
                     0);
    }
    return true;
}

static void setup(void)
{
    tempdir_make(&dir);
    tiny_write_inputs(&dir);
}

static void teardown(void)
{
    remove_spaces();
    tempdir_remove(&dir);
}

TestSuite(netns, .init = setup, .fini = teardown, .timeout = 280);

Test(netns, two_nodes_train_over_a_network)
{
    launched nodes[2], l;
    char program[PATH_MAX], key[128];
    if (!make_spaces(false)) {
        teardown();
        skip_test("network namespaces are not permitted here (ip netns add, ip link add)");
    }
    snprintf(program, sizeof program, "%s/ndlaunch", launched_build_root());
    snprintf(key, sizeof key, "%s/key", dir.path);
    launched_start(&l, &dir, "make-key", (const char *[]){program, "--make-key", key, NULL});
    cr_assert_eq(launched_wait(&l, LAUNCHED_SECONDS), 0, "%s", launched_read(&l));
    for (int i = 0; i < 2; i++) {
        char name[32], rank[16];
        tiny_arguments a = {0};
        snprintf(name, sizeof name, "node%d", i);
        snprintf(rank, sizeof rank, "%d", i);
        tiny_add(&a, (const char *[]){"/usr/bin/env", "PATH=/usr/sbin:/sbin:/usr/bin:/bin", "ip",
                                      "netns", "exec", spaces[i], program, NULL});
        tiny_add(&a, (const char *[]){"--nnodes", "2", "--node-rank", rank, "--rdzv-endpoint",
                                      "10.99.0.1:29500", "--rdzv-key-file", key,
                                      "--rdzv-timeout-seconds", "30", "--num-processes", "4",
                                      "--dp-shard-size", "4", "--num-steps", "3", NULL});
        tiny_add(&a, tiny_flags(&dir, name));
        launched_start(&nodes[i], &dir, name, a.list);
    }
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(launched_wait(&nodes[i], LAUNCHED_SECONDS), 0, "node %d: %s", i,
                     launched_read(&nodes[i]));
    }
    assert_says(&nodes[0], "step 3/3");
}

/* One rank in each space, which PMIx started. Nobody names an address: rank 0 finds the one that
 * the other reaches. */
static void meet_over_pmix(const char *const hosts[2])
{
    launched ranks[2];
    char program[PATH_MAX], folder[PATH_MAX];
    snprintf(program, sizeof program, "%s/ndtrain", launched_build_root());
    snprintf(folder, sizeof folder, "%s/tests/launch/fake_pmix", launched_build_root());
    if (access(folder, F_OK) != 0) {
        teardown();
        skip_test("this build has no PMIx");
    }
    setenv("LD_LIBRARY_PATH", folder, 1);
    setenv("FAKE_PMIX_FOLDER", dir.path, 1);
    setenv("FAKE_PMIX_SIZE", "2", 1);
    setenv("FAKE_PMIX_LOCAL_SIZE", "1", 1);
    setenv("PMIX_NAMESPACE", "fake", 1);
    setenv("SLURM_JOB_ID", "1", 1);
    for (int i = 0; i < 2; i++) {
        char name[32];
        tiny_arguments a = {0};
        snprintf(name, sizeof name, "rank%d", i);
        setenv("PMIX_RANK", i == 0 ? "0" : "1", 1);
        setenv("SLURMD_NODENAME", hosts[i], 1);
        tiny_add(&a, (const char *[]){
                         "/usr/bin/env", "PATH=/usr/sbin:/sbin:/usr/bin:/bin", "ip", "netns",
                         "exec", spaces[i], program, "train", "--dp-shard-size", "2", "--num-steps",
                         "3", "--rdzv-timeout-seconds", "30", "--set", "log.level=debug", NULL});
        tiny_add(&a, tiny_flags(&dir, "ranks"));
        launched_start(&ranks[i], &dir, name, a.list);
    }
    for (int i = 0; i < 2; i++) {
        cr_assert_eq(launched_wait(&ranks[i], LAUNCHED_SECONDS), 0, "rank %d: %s", i,
                     launched_read(&ranks[i]));
    }
    assert_says(&ranks[0], "step 3/3");
    assert_says(&ranks[0], "rank 0 hosts the store at 10.99.0.1 port ");
}

Test(netns, rank_0_of_pmix_listens_on_the_way_to_the_others)
{
    if (!make_spaces(true)) {
        teardown();
        skip_test("network namespaces are not permitted here (ip netns add, ip link add)");
    }
    meet_over_pmix((const char *[]){"10.99.0.1", "10.99.0.2"});
}

Test(netns, names_that_nobody_resolves_leave_the_first_interface)
{
    if (!make_spaces(false)) {
        teardown();
        skip_test("network namespaces are not permitted here (ip netns add, ip link add)");
    }
    meet_over_pmix((const char *[]){"one.invalid", "two.invalid"});
}
