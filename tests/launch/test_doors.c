// SPDX-License-Identifier: Apache-2.0
/*
 * The parts of a running job of one host that strangers can reach: its ports, the sockets that wake
 * sleeping ranks, and the files of a folder that somebody else filled.
 */
#include <dirent.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "tests/launch/tiny_job.h"
#include "tests/support/skip.h"

enum { NOBODY = 65534 };

static tempdir dir;
static launched l;

static void setup(void)
{
    tiny_write_inputs(&dir);
    unsetenv("ND_WORKER");
}

TEMPDIR_SUITE(doors, setup, .timeout = 280);

/* The program decides, and not what UCX would do with these. */
Test(doors, workers_of_one_host_listen_nowhere)
{
    if (launched_shell("ss -V >/dev/null 2>&1") != 0) {
        tempdir_remove(&dir);
        skip_test("ss, of iproute2, is missing");
    }
    setenv("UCX_TLS", "tcp,self", 1);
    setenv("UCX_POSIX_DIR", dir.path, 1);
    setenv("UCX_NET_DEVICES", "lo", 1);
    tiny_train(&l, &dir, "job", 3, NULL);
    for (int rank = 0; rank < 3; rank++) {
        cr_expect_eq(
            launched_shell("ss -tulnp | grep ',pid=%d,' >&2", (int)launched_child(&l, rank)), 1,
            "rank %d listens", rank);
    }
    cr_expect_eq(launched_shell("ss -tulnp | grep ',pid=%d,' | grep -q ' 127.0.0.1:'", (int)l.pid),
                 0, "the launcher's own port is not seen");
    cr_expect_eq(
        launched_shell("ss -tulnp | grep ',pid=%d,' | grep -v ' 127.0.0.1:' >&2", (int)l.pid), 1,
        "the launcher listens beyond loopback");
    assert_says(&l, "have no effect: UCX_TLS UCX_POSIX_DIR; unset them");
    launched_end(&l, SIGTERM, 75);
}

/* The numbers of a process's sockets. */
static int read_inodes(long pid, unsigned long *inodes, int most)
{
    char to[64];
    int n = 0;
    DIR *folder = opendir(printed("/proc/%ld/fd", pid));
    for (struct dirent *e; folder && n < most && (e = readdir(folder));) {
        ssize_t length = readlinkat(dirfd(folder), e->d_name, to, sizeof to - 1);
        to[length > 0 ? length : 0] = '\0';
        n += sscanf(to, "socket:[%lu]", &inodes[n]) == 1;
    }
    if (folder) {
        closedir(folder);
    }
    return n;
}

/* An empty datagram, or one as long as UCX's own, to the socket in this line of /proc/net/unix,
 * where it is one of `inodes` and has a name without a file. */
static bool send_one(int fd, const char *line, const unsigned long *inodes, int count, size_t bytes)
{
    char name[108];
    unsigned long inode;
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    if (sscanf(line, "%*s %*s %*s %*s %*s %*s %lu %107s", &inode, name) != 2 || name[0] != '@') {
        return false;
    }
    size_t length = strlen(name);
    memcpy(to.sun_path + 1, name + 1, length - 1);
    for (int i = 0; i < count; i++) {
        if (inodes[i] == inode) {
            return sendto(fd, "x", bytes, MSG_DONTWAIT, (struct sockaddr *)&to,
                          (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length)) >= 0;
        }
    }
    return false;
}

/* One datagram to each socket of the workers; how many arrived. Another user, where this process
 * may become one, sends them. */
static int send_to_workers(int fd, pid_t launcher, size_t bytes)
{
    char line[512];
    unsigned long inodes[256];
    long child;
    int count = 0, sent = 0;
    FILE *children = fopen(printed("/proc/%d/task/%d/children", launcher, launcher), "r");
    while (children && fscanf(children, "%ld", &child) == 1) {
        count += read_inodes(child, inodes + count, 256 - count);
    }
    FILE *all = fopen("/proc/net/unix", "r");
    bool other = geteuid() == 0 && seteuid(NOBODY) == 0;
    while (all && fgets(line, sizeof line, all)) {
        sent += send_one(fd, line, inodes, count, bytes);
    }
    if (other && seteuid(0) != 0) {
        _exit(1);
    }
    if (children) {
        fclose(children);
    }
    if (all) {
        fclose(all);
    }
    return sent;
}

/* From the start of the job on, until it is killed. */
static pid_t attack_sockets(pid_t launcher, _Atomic int *sent)
{
    pid_t pid = fork();
    cr_assert_geq(pid, 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        for (int i = 0;; i++) {
            atomic_fetch_add(sent, send_to_workers(fd, launcher, i % 4 == 3));
            usleep(500);
        }
    }
    return pid;
}

Test(doors, datagrams_of_another_user_change_nothing)
{
    static const char *const steps[] = {"--num-steps", "300", NULL};
    _Atomic int *sent =
        mmap(NULL, sizeof *sent, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(sent, MAP_FAILED);
    tiny_ndlaunch(&l, &dir, "quiet", 2, steps);
    launched_expect(&l, 0);
    tiny_ndlaunch(&l, &dir, "attacked", 2, steps);
    pid_t attacker = attack_sockets(l.pid, sent);
    int code = launched_wait(&l, LAUNCHED_SECONDS);
    kill(attacker, SIGKILL);
    waitpid(attacker, NULL, 0);
    cr_assert_eq(code, 0, "%s", launched_read(&l));
    cr_assert_gt(atomic_load(sent), 10);
    tiny_expect_same(&dir, "quiet", "attacked", 300);
}

/*
 * Names that libraries of this program look for somewhere, or whose place the working directory
 * could take: a library, a program, a configuration file. Each is between two blanks.
 */
static const char hostile[] =
    " ucx.conf mca-params.conf pmix-mca-params.conf nccl.conf .nccl.conf openssl.cnf hwloc.xml "
    "libucp.so.0 libucs.so.0 libuct_cma.so libuct_cma.so.0 libpmix.so.2 libdnnl.so.2 "
    "libhwloc.so.15 libJitPI.so libnccl.so.2 libcuda.so.1 libcudnn.so.9 libcublasLt.so.13 "
    "libgomp.so.1 ndtrain ndlaunch scontrol gdb gdb.sh zstd gzip python3 libnccl-net.so "
    "libnccl-tuner.so libnccl-profiler.so nvml.conf ";

static bool is_hostile(const char *name)
{
    return strstr(hostile, printed(" %s ", name)) != NULL;
}

/* Settings that make UCX empty `victim` when it reads the file. */
static const char settings[] = "#!/bin/sh\n"
                               "UCX_LOG_LEVEL=info\nUCX_LOG_FILE=victim\nUCX_TLS=tcp,self\n";

static void fill_folder(void)
{
    char names[sizeof hostile];
    memcpy(names, hostile, sizeof names);
    for (const char *name = strtok(names, " "); name; name = strtok(NULL, " ")) {
        cr_assert_eq(chmod(tempdir_write(&dir, name, settings, sizeof settings - 1), 0755), 0);
    }
    tempdir_write(&dir, "victim", "kept\n", 5);
}

/* Fails when a hostile file was opened since `fd` began to watch the folder. */
static void expect_untouched(int fd, const char *command)
{
    _Alignas(struct inotify_event) char events[1 << 16];
    for (ssize_t n; (n = read(fd, events, sizeof events)) > 0;) {
        for (ssize_t at = 0; at < n;) {
            const struct inotify_event *event = (const struct inotify_event *)(events + at);
            const char *name = event->len > 0 ? event->name : "";
            cr_expect(!is_hostile(name) && strcmp(name, "victim") != 0, "%s opened ./%s", command,
                      name);
            at += (ssize_t)(sizeof *event + event->len);
        }
    }
    cr_expect_eq(launched_shell("test \"$(cat %s/victim)\" = kept", dir.path), 0, "%s", command);
    while (read(fd, events, sizeof events) > 0) { /* what the check itself did */
    }
}

#define JOB                                                                                        \
    "--device cpu --threads-per-worker 1 --precision fp32 --sequence-length 32 --num-steps 2 "     \
    "--set model.config=model.json --set data.path=text.txt --set data.validation_path= "          \
    "--set train.validation_interval=0 "
#define PAIR "--num-processes 2 --dp-shard-size 2 "

/* Everything that the programs do, in a folder that is the working directory, and that of the data,
 * of the model and of the run. */
Test(doors, nothing_in_a_folder_configures_a_library_or_runs)
{
    static const char *const commands[] = {
        "ndtrain --version",
        "ndlaunch --version",
        "ndtrain check " JOB,
        "ndtrain plan " JOB PAIR,
        "ndlaunch " JOB PAIR "--set output.dir=. --checkpoint-frequency 1",
        "ndlaunch " JOB PAIR "--num-steps 3 --set output.dir=. --resume-from-checkpoint latest",
        "ndtrain train " JOB "--dp-shard-size 1 --set output.dir=alone",
        "ndtrain generate --model model --prompt ab --max-new-tokens 2 --threads-per-worker 1",
        "ndlaunch generate --num-processes 2 --tp-size 2 --model model --prompt ab "
        "--max-new-tokens 2 --threads-per-worker 1",
        "ndtrain eval --model model --data text.txt --sequence-length 32 --threads-per-worker 1",
        "ndtrain ckpt ls .",
        "ndtrain report . -o page.html",
        "ndtrain tokenize --tokenizer bytes --input text.txt --output-prefix tokens",
    };
    fill_folder();
    int fd = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    cr_assert_geq(fd, 0);
    cr_assert_geq(inotify_add_watch(fd, dir.path, IN_OPEN | IN_MODIFY), 0);
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        int code = launched_shell("cd %s && %s/%s >log.txt 2>&1", dir.path, launched_build_root(),
                                  commands[i]);
        cr_expect_eq(code, 0, "%s: %d: %d", commands[i], code,
                     launched_shell("cat %s/log.txt >&2", dir.path));
        expect_untouched(fd, commands[i]);
    }
    close(fd);
}
