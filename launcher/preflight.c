// SPDX-License-Identifier: Apache-2.0
#include "launcher/launcher.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/process.h"
#include "runtime/base/version.h"

enum { CONFIG_FD = 3, LOCAL_WORKERS_MAX = 65536 };

/* The worker program starts in less, libraries included. */
static const int64_t enough_to_start = (int64_t)512 << 20;

nd_status nd_preflight_check_files(const nd_config *config)
{
    const long long spare = 128; /* for the loop, files and libraries, and 64 strangers */
    long long world = nd_mesh_world_size(&config->resolved_mesh), nodes = config->launch.nnodes;
    long long local = world / nodes, allowed = nd_limits_raise_files();
    if (local > LOCAL_WORKERS_MAX) {
        return nd_fail(ND_ERR_CONFIG,
                       "launch.workers is %lld, which makes %lld workers for each of %lld node%s, "
                       "but at most %d on one node are supported; start fewer workers, or more "
                       "nodes (--nnodes)",
                       world, local, nodes, nodes == 1 ? "" : "s", (int)LOCAL_WORKERS_MAX);
    }
    /* Two pipes for each worker, one more while it starts, and its log files; on node 0 also a
     * connection for each worker and node. */
    long long needed = (config->launch.log_dir[0] ? 5 : 3) * local + spare;
    needed += config->launch.node_rank == 0 ? world + nodes + config->launch.spare_nodes : 0;
    if (allowed < needed) {
        return nd_fail(
            ND_ERR_CONFIG,
            "ndlaunch needs %lld open files for %lld workers, %lld of them on this node, "
            "but the hard limit is %lld (ulimit -Hn); raise it (limits.conf, or "
            "LimitNOFILE= of the service) or start fewer workers",
            needed, world, local, allowed);
    }
    return ND_OK;
}

/* Reads all of the check's output and keeps what fits. False at the deadline. */
static bool read_answer(int fd, int64_t deadline, char *text, size_t capacity)
{
    size_t used = 0;
    for (;;) {
        char bytes[512];
        struct pollfd p = {.fd = fd, .events = POLLIN};
        int64_t left = (deadline - nd_clock_ns()) / 1000000;
        if (left <= 0 || poll(&p, 1, (int)left) <= 0) {
            return false;
        }
        ssize_t n = read(fd, bytes, sizeof bytes);
        if (n <= 0) {
            break;
        }
        size_t fits = capacity - 1 - used < (size_t)n ? capacity - 1 - used : (size_t)n;
        memcpy(text + used, bytes, fits);
        used += fits;
    }
    text[used] = '\0';
    return true;
}

/* Lines "digest NAME HEX" become "NAME=HEX". */
static void parse_digests(char *lines, char *out, size_t capacity)
{
    size_t used = 0;
    char name[64], hex[80], *rest = NULL;
    out[0] = '\0';
    for (char *line = strtok_r(lines, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        if (sscanf(line, "digest %63s %79s", name, hex) == 2 && used + 160 < capacity) {
            used += (size_t)snprintf(out + used, capacity - used, "%s=%s\n", name, hex);
        }
    }
}

static nd_status spawn_check(const nd_preflight *check, int out, pid_t *pid)
{
    posix_spawn_file_actions_t actions;
    char **env, pid_text[24];
    snprintf(pid_text, sizeof pid_text, "%ld", (long)getpid());
    const nd_variable own[] = {
        {"ND_RUN_ID", "check"},        {"RANK", "0"},
        {"WORLD_SIZE", "1"},           {"LOCAL_RANK", "0"},
        {"LOCAL_WORLD_SIZE", "1"},     {"MASTER_ADDR", "127.0.0.1"},
        {"MASTER_PORT", "1"},          {"ND_CONFIG_FD", "3"},
        {"ND_LAUNCHER_PID", pid_text}, {"ND_CONFIG_NAME", check->config_name},
    };
    ND_TRY(nd_environment_make(own, sizeof own / sizeof *own, &env));
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, check->config_fd, CONFIG_FD);
    int code = posix_spawn(pid, check->args[0], &actions, NULL, check->args, env);
    posix_spawn_file_actions_destroy(&actions);
    free(env);
    return code == 0 ? ND_OK
                     : nd_fail(ND_ERR_IO, "the worker program %s cannot be started: %s",
                               check->args[0], strerror(code));
}

/* The program ended before it named its version: it was not loaded, or died in its first lines. */
static nd_status fail_silent(const nd_preflight *check, int wait_status)
{
    char how[64];
    nd_memory_limit limit = nd_limits_read_memory();
    if (WIFSIGNALED(wait_status)) {
        snprintf(how, sizeof how, "signal %d", WTERMSIG(wait_status));
    } else {
        snprintf(how, sizeof how, "exit code %d", WEXITSTATUS(wait_status));
    }
    if (limit.option && limit.left < enough_to_start) {
        return nd_fail(
            ND_ERR_RESOURCE,
            "the worker program %s cannot start (%s) with %lld KiB of memory (%s); raise "
            "that limit",
            check->args[0], how, (long long)limit.bytes / 1024, limit.option);
    }
    return nd_fail(ND_ERR_CONFIG,
                   "the worker program %s cannot start (%s); run '%s --version' to see why",
                   check->args[0], how, check->args[0]);
}

nd_status nd_preflight_run(const nd_preflight *check, int *exit_code)
{
    int pipe_fds[2], wait_status = 0;
    char line[2048];
    pid_t pid;
    if (pipe2(pipe_fds, O_CLOEXEC) != 0) {
        return nd_fail(ND_ERR_INTERNAL, "no pipe for the check: %s", strerror(errno));
    }
    nd_status status = spawn_check(check, pipe_fds[1], &pid);
    close(pipe_fds[1]);
    if (status != ND_OK) {
        close(pipe_fds[0]);
        return status;
    }
    bool ended = read_answer(pipe_fds[0], nd_clock_ns() + (int64_t)(check->seconds * 1e9), line,
                             sizeof line);
    close(pipe_fds[0]);
    if (!ended) {
        kill(pid, SIGKILL);
    }
    waitpid(pid, &wait_status, 0);
    if (!ended) {
        return nd_fail(ND_ERR_HANG,
                       "the check of model and data (%s %s) did not end within %.0f s; see "
                       "whether a file is on a disk that does not answer",
                       check->args[0], check->args[1], check->seconds);
    }
    size_t first = strcspn(line, "\n");
    parse_digests(line + first + (line[first] == '\n'), check->digests, check->capacity);
    line[first] = '\0';
    if (!line[0] && wait_status != 0) {
        return fail_silent(check, wait_status);
    }
    if (strcmp(line, "ndtrain " ND_VERSION) != 0) {
        return nd_fail(
            ND_ERR_CONFIG,
            "the worker program %s says '%s', but this is ndlaunch %s; build both from the same "
            "source",
            check->args[0], line, ND_VERSION);
    }
    *exit_code = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 128 + WTERMSIG(wait_status);
    return ND_OK;
}
