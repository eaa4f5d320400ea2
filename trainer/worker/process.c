// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/process.h"
#include "trainer/worker/worker.h"

static char unbound[] = "OMP_PROC_BIND=false";

/*
 * Where one of these variables is set, OpenMP's library binds the main thread to one CPU when it is
 * loaded. All threads that a worker makes inherit the binding, also across exec, and the mask that
 * the process was given can no longer be read. A worker binds itself (runtime/device/affinity.h).
 */
static void keep_mask(int argc, char **argv, char **environment)
{
    static const char *const names[] = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"};
    for (char **entry = environment; *entry; entry++) {
        for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
            if (strncmp(*entry, names[i], strlen(names[i])) == 0) {
                *entry = unbound;
            }
        }
    }
}

typedef void preinit(int argc, char **argv, char **environment);

/* The dynamic linker calls it before it initialises any library. */
__attribute__((section(".preinit_array"), used)) static preinit *before_libraries = keep_mask;

/* Numbers of turns: about 30 to 90 microseconds, and ten times as long. */
static const char *const spin_between_workers = "2000", *const spin_alone = "20000";

void nd_process_shorten_spin(char **argv, bool decodes)
{
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) {
        return;
    }
    /* Executed by its own path, so that the process keeps its name. */
    char path[4096];
    const bool alone = !getenv("ND_RUN_ID") && !getenv("RANK") && !getenv("PMIX_RANK");
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    if (n > 0 &&
        setenv("GOMP_SPINCOUNT", decodes && alone ? spin_alone : spin_between_workers, 1) == 0) {
        path[n] = '\0';
        execv(path, argv);
    }
}

/* Handlers have a stack of their own: on CPUs without AVX-512 oneDNN's F32 products put the stack
 * pointer into a buffer of the heap, below which the frame of a signal would overwrite other data
 * (seen with oneDNN 2.6). Only the main thread gets these signals; the others block them. */
static void install_signals(const nd_identity *identity, void (*stop)(int signal_number))
{
    static char stack[64 << 10]; /* a frame with the state of AMX has 11 KiB */
    struct sigaction action = {.sa_handler = stop, .sa_flags = SA_RESTART | SA_ONSTACK}, hangup;
    sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = sizeof stack}, NULL);
    nd_signals_unblock();
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN) {
        sigaction(SIGHUP, &action, NULL); /* it stays ignored under nohup */
    }
    signal(SIGUSR2, SIG_IGN); /* has no meaning here, and its default would end the run */
    if (identity->source != ND_IDENTITY_NDLAUNCH) {
        action.sa_flags |= (int)SA_RESETHAND;
    }
    sigaction(SIGINT, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
}

/* Signals come before the job is joined, which may take long. */
nd_status nd_worker_begin(nd_worker *worker, void (*stop)(int signal_number))
{
    nd_identity *id = &worker->identity;
    nd_status status = nd_identity_read(id);
    install_signals(id, stop);
    nd_failure_slot *record = nd_failure_slot_of(&id->page, id->local_rank);
    if (record) {
        atomic_store(&record->ready, 1);
    }
    return status == ND_OK ? nd_identity_join(id) : status;
}

nd_status nd_command_line_read(int pid, int *argc, char ***argv)
{
    char path[64], bytes[4096], *text = NULL;
    size_t size = 0;
    int count = 0;
    nd_status status = ND_OK;
    snprintf(path, sizeof path, "/proc/%d/cmdline", pid);
    FILE *in = nd_fs_stream_kernel(path);
    if (!in) {
        return nd_fail(ND_ERR_IO, "%s cannot be read: %s", path, strerror(errno));
    }
    FILE *copy = open_memstream(&text, &size); /* it ends with a NUL that is not counted */
    bool whole = copy != NULL;
    for (size_t n; whole && (n = fread(bytes, 1, sizeof bytes, in)) > 0;) {
        whole = fwrite(bytes, 1, n, copy) == n;
    }
    fclose(in);
    whole = copy && fclose(copy) == 0 && whole; /* both only lack memory when they fail */
    ND_TRY_OUT(whole ? ND_OK : nd_fail_memory("the command line of process %d", pid));
    ND_TRY_OUT(size > 0 ? ND_OK : nd_fail(ND_ERR_IO, "%s holds no command line", path));
    for (size_t at = 0; at < size; at += strlen(text + at) + 1) { /* the last may lack its NUL */
        count++;
    }
    char **words = malloc((size_t)count * sizeof *words + size + 1);
    ND_TRY_OUT(words ? ND_OK : nd_fail_memory("the command line of process %d", pid));
    char *at = memcpy(words + count, text, size + 1);
    for (int i = 0; i < count; i++, at += strlen(at) + 1) {
        words[i] = at;
    }
    *argc = count;
    *argv = words;
out:
    free(text);
    return status;
}

/* The resolved configuration that ndlaunch hands down as an inherited memory file. */
static nd_status read_inherited(nd_config *config, int fd)
{
    enum { MOST = 64 << 20 };
    char path[32], *text = NULL;
    size_t size = 0;
    const char *name = getenv("ND_CONFIG_NAME"); /* the file that ndlaunch read, if it read one */
    const bool named = name && name[0];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    nd_status status = nd_fs_read(path, MOST, ND_ERR_INTERNAL, &text, &size);
    if (status != ND_OK || size == 0) {
        free(text);
        return status == ND_ERR_RESOURCE
                   ? status
                   : nd_fail(ND_ERR_INTERNAL,
                             "the inherited configuration (descriptor %d) cannot be read", fd);
    }
    status = nd_config_read_text(config, text, size, named ? name : "configuration from ndlaunch");
    free(text);
    if (status == ND_OK && !named) {
        config->source[0] = '\0'; /* ndlaunch read flags only */
    }
    return status;
}

/* The environment of ranks that no ndlaunch started says how many they are, and launch.* about
 * nodes does not apply to them. */
static nd_status adopt_world_size(nd_config *config, const nd_identity *id)
{
    if (id->source != ND_IDENTITY_PMIX && id->source != ND_IDENTITY_ENVIRONMENT) {
        return ND_OK;
    }
    ND_REFUSE(config->launch.nnodes > 1 && config->launch.nnodes != id->nnodes,
              "launch.nnodes is %lld, but this job has %d nodes (%s)",
              (long long)config->launch.nnodes, id->nnodes, nd_identity_source_name(id->source));
    if (config->launch.workers == 0) {
        config->launch.workers = config->launch.nproc_per_node > 0
                                     ? config->launch.nproc_per_node * id->nnodes
                                     : id->world_size;
    }
    config->launch.nnodes = 1;
    config->launch.node_rank = 0;
    config->launch.nproc_per_node = 0;
    config->launch.spare_nodes = config->launch.min_nodes = 0;
    return ND_OK;
}

nd_status nd_settings_read(nd_config *config, nd_cli *cli, const nd_identity *id, int argc,
                           char **argv)
{
    ND_TRY(nd_config_init(config));
    if (id->config_fd >= 0) {
        ND_TRY(read_inherited(config, id->config_fd));
    } else {
        ND_TRY(nd_config_parse(config, cli, argc, argv));
    }
    if (cli->help || cli->version) {
        return ND_OK;
    }
    ND_TRY(adopt_world_size(config, id));
    return nd_config_resolve(config);
}
