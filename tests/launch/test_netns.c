// SPDX-License-Identifier: Apache-2.0
/*
 * Two nodes with nothing but a network between them: two network namespaces joined by a veth pair.
 * Skipped, with the reason, where this process may not make namespaces.
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "tests/launch/tiny_job.h"
#include "tests/support/skip.h"
#include "tests/support/variables.h"

enum { PORTS_MAX = 16 };
#define PATTERN "written by a stranger"

static tempdir dir;
static tiny_nodes job;
static char spaces[2][32];
static launched nodes[2];

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
    tiny_nodes_meet(&job, &dir); /* for the key */
}

static void teardown(void)
{
    for (int i = 0; i < 2; i++) {
        if (spaces[i][0]) {
            launched_shell("ip netns del %s 2>/dev/null", spaces[i]);
        }
    }
    tempdir_remove(&dir);
}

TestSuite(netns, .init = setup, .fini = teardown, .timeout = 280);

static void need_spaces(bool decoy)
{
    if (!make_spaces(decoy)) {
        teardown();
        skip_test("network namespaces are not permitted here (ip netns add, ip link add)");
    }
}

enum { SHARED = true, ALONE = false };

/* Two nodes with two workers each. ALONE: each has its own IPC namespace, too. */
static void start_nodes(bool ipc, const char *run, const char *steps)
{
    for (int i = 0; i < 2; i++) {
        tiny_arguments a = {0};
        tiny_add(&a, WORDS("/usr/bin/env", "PATH=/usr/sbin:/sbin:/usr/bin:/bin", "ip", "netns",
                           "exec", spaces[i]));
        if (ipc == ALONE) {
            tiny_add(&a, WORDS("unshare", "--ipc"));
        }
        tiny_add(&a, WORDS(launched_program("ndlaunch"), "--nnodes", "2", "--node-rank",
                           printed("%d", i), "--rdzv-endpoint", "10.99.0.1:29500",
                           "--rdzv-key-file", job.key_file));
        tiny_add(&a,
                 WORDS("--rdzv-timeout-seconds", "30", "--num-processes", "4", "--dp-shard-size",
                       "4", "--num-steps", steps, "--set", "log.interval=1"));
        tiny_add(&a, tiny_flags(&dir, run));
        launched_start(&nodes[i], &dir, printed("%s%d", run, i), a.list);
    }
}

/* Ports at which a process listens, read in the space of node `space`; on which address is checked:
 * never on all of them. */
static int find_ports(int space, pid_t pid, int ports[PORTS_MAX])
{
    char address[64];
    int count = 0, port;
    FILE *f = popen(printed("PATH=/usr/sbin:/sbin:$PATH ip netns exec %s ss -Htlnp | "
                            "grep ',pid=%d,' | awk '{print $4}' | sed 's/:\\([0-9]*\\)$/ \\1/'",
                            spaces[space], pid),
                    "r");
    cr_assert_not_null(f);
    while (count < PORTS_MAX && fscanf(f, "%63s %d", address, &port) == 2) {
        cr_expect_str_eq(address, printed("10.99.0.%d", space + 1), "process %d listens at %s",
                         (int)pid, address);
        ports[count++] = port;
    }
    pclose(f);
    return count;
}

/* They could share memory, but not wake each other. */
Test(netns, two_networks_of_one_system_are_two_hosts)
{
    need_spaces(false);
    start_nodes(SHARED, "job", "100");
    launched_until(&nodes[0], "\nstep ", 2);
    for (int rank = 0; rank < 4; rank++) {
        int ports[PORTS_MAX];
        cr_expect_eq(find_ports(rank / 2, launched_child(&nodes[rank / 2], rank), ports), 1,
                     "rank %d", rank);
    }
    launched_expect_all(nodes, 2, 0);
}

/* UCX's message of TCP that writes into the memory of the process, and others. */
static void attack_port(int space, int port, uint64_t target)
{
    const struct __attribute__((packed)) {
        uint64_t magic;
        uint8_t kind;
        uint32_t length;
        uint64_t address, bytes;
        uint32_t number;
        char pattern[sizeof PATTERN];
    } put = {0xCAFEBABE12345678u, 33, 20, target, sizeof PATTERN, 1, PATTERN};
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    char noise[4096];
    inet_pton(AF_INET, printed("10.99.0.%d", space + 1), &to.sin_addr);
    for (int i = 0; i < 40; i++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to) != 0) {
            _exit(1);
        }
        memset(noise, i, sizeof noise);
        if (i % 4 < 2) {
            send(fd, &put, sizeof put, MSG_NOSIGNAL);
        } else if (i % 4 == 2) {
            send(fd, noise, sizeof noise, MSG_NOSIGNAL);
        } /* else silent, and open until the end */
        if (i % 8 < 4) {
            close(fd);
        }
    }
}

/* From the other host, in a process that ends with 0 when it reached the port. */
static pid_t attack(int space, int port, uint64_t target)
{
    pid_t pid = fork();
    cr_assert_geq(pid, 0);
    if (pid == 0) {
        int fd = open(printed("/var/run/netns/%s", spaces[1 - space]), O_RDONLY | O_CLOEXEC);
        if (fd < 0 || setns(fd, CLONE_NEWNET) != 0) {
            _exit(2);
        }
        attack_port(space, port, target);
        usleep(300000);
        _exit(0);
    }
    return pid;
}

/* Where the first memory that a process may write begins: what its program's variables are in. */
static uint64_t memory_of(pid_t pid)
{
    char line[256];
    uint64_t at = 0;
    FILE *f = fopen(printed("/proc/%d/maps", pid), "r");
    while (f && at == 0 && fgets(line, sizeof line, f)) {
        at = strstr(line, " rw-p ") ? strtoull(line, NULL, 16) : 0;
    }
    if (f) {
        fclose(f);
    }
    return at;
}

static bool was_written(pid_t pid, uint64_t at)
{
    char found[sizeof PATTERN] = "";
    int fd = open(printed("/proc/%d/mem", pid), O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : pread(fd, found, sizeof found, (off_t)at);
    cr_expect_eq(n, (ssize_t)sizeof found, "the memory of %d cannot be read", (int)pid);
    close(fd);
    return memcmp(found, PATTERN, sizeof found) == 0;
}

/* Who reaches a port of a worker from another host, and has no key, writes nothing, ends nothing
 * and changes no loss. */
Test(netns, strangers_change_nothing)
{
    pid_t workers[4], attackers[4 * PORTS_MAX];
    uint64_t memory[4];
    int begun = 0, attacked = 0;
    need_spaces(false);
    start_nodes(ALONE, "quiet", "1200");
    launched_expect_all(nodes, 2, 0);
    start_nodes(ALONE, "attacked", "1200");
    launched_until(&nodes[0], "\nstep ", 2);
    for (int rank = 0; rank < 4; rank++) { /* all at once, while the run lasts */
        workers[rank] = launched_child(&nodes[rank / 2], rank);
        memory[rank] = memory_of(workers[rank]);
        int ports[PORTS_MAX], count = find_ports(rank / 2, workers[rank], ports);
        for (int i = 0; i < count; i++) {
            attackers[begun++] = attack(rank / 2, ports[i], rank < 2 ? memory[rank] : 0x10);
        }
    }
    for (int i = 0, status; i < begun; i++) {
        cr_assert_eq(waitpid(attackers[i], &status, 0), attackers[i]);
        attacked += status == 0;
    }
    for (int rank = 0; rank < 4; rank++) {
        cr_expect(!was_written(workers[rank], memory[rank]), "rank %d", rank);
    }
    launched_expect_all(nodes, 2, 0);
    cr_assert_eq(attacked, 4, "%d ports of 4 workers were reached", attacked);
    tiny_expect_same(&dir, "quiet", "attacked", 1200);
}

/* One rank in each space, which PMIx started. Nobody names an address: rank 0 finds the one that
 * the other reaches. */
static void meet_over_pmix(const char *const hosts[2])
{
    launched ranks[2];
    const char *folder = launched_program("tests/launch/fake_pmix");
    if (access(folder, F_OK) != 0) {
        teardown();
        skip_test("this build has no PMIx");
    }
    setenv("LD_LIBRARY_PATH", folder, 1);
    setenv("FAKE_PMIX_FOLDER", dir.path, 1);
    SET_VARIABLES("FAKE_PMIX_SIZE=2", "FAKE_PMIX_LOCAL_SIZE=1", "PMIX_NAMESPACE=fake",
                  "SLURM_JOB_ID=1");
    for (int i = 0; i < 2; i++) {
        tiny_arguments a = {0};
        setenv("PMIX_RANK", i == 0 ? "0" : "1", 1);
        setenv("SLURMD_NODENAME", hosts[i], 1);
        tiny_add(&a, WORDS("/usr/bin/env", "PATH=/usr/sbin:/sbin:/usr/bin:/bin", "ip", "netns",
                           "exec", spaces[i], launched_program("ndtrain"), "train",
                           "--dp-shard-size", "2", "--num-steps", "3", "--rdzv-timeout-seconds",
                           "30", "--set", "log.level=debug"));
        tiny_add(&a, tiny_flags(&dir, "ranks"));
        launched_start(&ranks[i], &dir, printed("rank%d", i), a.list);
    }
    launched_expect_all(ranks, 2, 0);
    assert_says(&ranks[0], "step 3/3", "rank 0 hosts the store at 10.99.0.1 port ");
}

Test(netns, rank_0_of_pmix_listens_on_the_way_to_the_others)
{
    need_spaces(true);
    meet_over_pmix((const char *[]){"10.99.0.1", "10.99.0.2"});
}

Test(netns, names_that_nobody_resolves_leave_the_first_interface)
{
    need_spaces(false);
    meet_over_pmix((const char *[]){"one.invalid", "two.invalid"});
}
