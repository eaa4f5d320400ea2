// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/identity.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "runtime/base/math.h"
#include "runtime/rdzv/pmix.h"

const char *nd_identity_source_name(nd_identity_source source)
{
    static const char *const names[] = {
        [ND_IDENTITY_SINGLE] = "a single process",
        [ND_IDENTITY_NDLAUNCH] = "ndlaunch",
        [ND_IDENTITY_ENVIRONMENT] = "torchrun's environment",
        [ND_IDENTITY_PMIX] = "PMIx",
    };
    return names[source];
}

void nd_identity_host(char *out, size_t capacity)
{
    const char *node = getenv("SLURM_JOB_ID") ? getenv("SLURMD_NODENAME") : NULL;
    if (node && node[0]) {
        snprintf(out, capacity, "%s", node);
        return;
    }
    if (gethostname(out, capacity) != 0) {
        snprintf(out, capacity, "localhost");
    }
    out[capacity - 1] = '\0';
}

/* An integer variable in [low, high]. A missing one is `fallback`, or an error when that is
 * INT_MIN. */
static nd_status read_number(const char *name, int low, int high, int fallback, int *out)
{
    const char *text = getenv(name);
    if (!text || !text[0]) {
        if (fallback == INT_MIN) {
            return nd_fail(
                ND_ERR_CONFIG,
                "%s is missing in the environment while RANK or WORLD_SIZE is set; start "
                "workers with ndlaunch, or set RANK, WORLD_SIZE, LOCAL_RANK, "
                "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                name);
        }
        *out = fallback;
        return ND_OK;
    }
    char *rest;
    errno = 0;
    long value = strtol(text, &rest, 10);
    if (errno || *rest || rest == text) {
        return nd_fail(ND_ERR_CONFIG, "%s=%s in the environment is not a number", name, text);
    }
    if (value < low || value > high) {
        return nd_fail(ND_ERR_CONFIG, "%s=%s in the environment is outside of %d to %d", name, text,
                       low, high);
    }
    *out = (int)value;
    return ND_OK;
}

static nd_status read_text(const char *name, const char *fallback, char *out, size_t capacity)
{
    const char *text = getenv(name);
    if (!text || !text[0]) {
        text = fallback;
    }
    if (!text) {
        return nd_fail(
            ND_ERR_CONFIG,
            "%s is missing in the environment while RANK or WORLD_SIZE is set; start workers "
            "with ndlaunch",
            name);
    }
    if (strlen(text) >= capacity) {
        return nd_fail(ND_ERR_CONFIG, "%s in the environment is longer than %zu characters", name,
                       capacity - 1);
    }
    snprintf(out, capacity, "%s", text);
    return ND_OK;
}

/* A descriptor inherited from ndlaunch; children of the worker do not get it. */
static nd_status read_descriptor(const char *name, int *out)
{
    ND_TRY(read_number(name, 3, INT_MAX, -1, out));
    if (*out >= 0 && fcntl(*out, F_SETFD, FD_CLOEXEC) != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s=%d in the environment is not an open descriptor, perhaps a leftover of "
                       "another program; unset it",
                       name, *out);
    }
    return ND_OK;
}

/* ND_ERR_CONFIG when ranks and sizes contradict each other; `source` gave them. */
static nd_status check_ranks(const nd_identity *id, const char *source)
{
    return id->world_size >= 1 && id->rank < id->world_size &&
                   id->local_rank < id->local_world_size &&
                   id->local_world_size <= id->world_size && id->local_rank <= id->rank
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG,
                         "%s says rank %d of %d, local rank %d of %d, which contradict each other",
                         source, id->rank, id->world_size, id->local_rank, id->local_world_size);
}

static nd_status read_ranks(nd_identity *id)
{
    const int needed = INT_MIN;
    ND_TRY(read_number("WORLD_SIZE", 1, INT_MAX, needed, &id->world_size));
    ND_TRY(read_number("RANK", 0, INT_MAX, needed, &id->rank));
    ND_TRY(read_number("LOCAL_WORLD_SIZE", 1, INT_MAX, needed, &id->local_world_size));
    ND_TRY(read_number("LOCAL_RANK", 0, INT_MAX, needed, &id->local_rank));
    ND_TRY(check_ranks(id, "the environment"));
    ND_TRY(read_text("MASTER_ADDR", NULL, id->master_addr, sizeof id->master_addr));
    return read_number("MASTER_PORT", 1, 65535, needed, &id->master_port);
}

static nd_status read_ndlaunch(nd_identity *id)
{
    ND_TRY(read_number("ND_NODE_RANK", 0, INT_MAX, 0, &id->node_rank));
    ND_TRY(read_number("ND_NNODES", 1, INT_MAX, 1, &id->nnodes));
    /* A worker of a later start of the job goes on with this. */
    ND_TRY(read_number("ND_RESTART_EPOCH", 0, INT_MAX, 0, &id->restart_epoch));
    ND_TRY(read_text("ND_RUN_FOLDER", "", id->run_folder, sizeof id->run_folder));
    if (id->run_folder[0] && id->run_folder[0] != '/') {
        return nd_fail(ND_ERR_CONFIG, "ND_RUN_FOLDER=%s in the environment is not an absolute path",
                       id->run_folder);
    }
    ND_TRY(read_descriptor("ND_KEY_FD", &id->key_fd));
    ND_TRY(read_descriptor("ND_CONFIG_FD", &id->config_fd));
    int page_fd;
    ND_TRY(read_descriptor("ND_PROGRESS_FD", &page_fd));
    return page_fd < 0 ? ND_OK : nd_progress_open(page_fd, id->local_world_size, &id->page);
}

/*
 * torchrun: with TORCHELASTIC_USE_AGENT_STORE its agent owns MASTER_PORT, so ours is the next one
 * unless ND_MASTER_PORT says otherwise.
 */
static nd_status read_torchrun(nd_identity *id)
{
    const char *agent = getenv("TORCHELASTIC_USE_AGENT_STORE");
    int port = id->master_port + (agent && strcmp(agent, "True") == 0);
    int nodes = (int)nd_ceil_div(id->world_size, id->local_world_size);
    ND_TRY(read_number("ND_MASTER_PORT", 1, 65535, port < 65536 ? port : id->master_port - 1,
                       &id->master_port));
    ND_TRY(read_number("GROUP_RANK", 0, INT_MAX, id->rank / id->local_world_size, &id->node_rank));
    ND_TRY(read_number("GROUP_WORLD_SIZE", 1, INT_MAX, nodes, &id->nnodes));
    return read_number("TORCHELASTIC_RESTART_COUNT", 0, INT_MAX, 0, &id->restart_epoch);
}

nd_status nd_identity_read(nd_identity *out)
{
    nd_identity id = {.source = ND_IDENTITY_SINGLE,
                      .world_size = 1,
                      .local_world_size = 1,
                      .nnodes = 1,
                      .key_fd = -1,
                      .config_fd = -1};
    const char *terminal = getenv("ND_TERMINAL");
    snprintf(id.run_id, sizeof id.run_id, "single");
    nd_identity_host(id.host, sizeof id.host);
    if (getenv("ND_RUN_ID")) {
        id.source = ND_IDENTITY_NDLAUNCH;
        ND_TRY(read_text("ND_RUN_ID", NULL, id.run_id, sizeof id.run_id));
        ND_TRY(read_ranks(&id));
        ND_TRY(read_ndlaunch(&id));
        id.terminal = terminal && strcmp(terminal, "1") == 0;
    } else if (getenv("RANK") || getenv("WORLD_SIZE")) {
        id.source = ND_IDENTITY_ENVIRONMENT;
        ND_TRY(read_text("TORCHELASTIC_RUN_ID", "environment", id.run_id, sizeof id.run_id));
        ND_TRY(read_ranks(&id));
        ND_TRY(read_torchrun(&id));
        id.terminal = id.world_size == 1 && isatty(STDERR_FILENO);
    } else if (getenv("PMIX_RANK") && getenv("PMIX_NAMESPACE")) {
        id.source = ND_IDENTITY_PMIX;
        ND_TRY(read_number("PMIX_RANK", 0, INT_MAX, INT_MIN, &id.rank));
        ND_TRY(read_text("PMIX_NAMESPACE", NULL, id.run_id, sizeof id.run_id));
    } else {
        id.terminal = isatty(STDERR_FILENO);
    }
    *out = id;
    return ND_OK;
}

/* srun without PMIx gives each task nothing but a number: each would train the same model by
 * itself, silently. */
static nd_status check_alone(void)
{
    int tasks = 1;
    const char *step = getenv("SLURM_STEP_ID");
    if (step && strlen(step) < 10) { /* not the shell of sbatch or salloc, 4294967290 and above */
        ND_TRY(read_number("SLURM_STEP_NUM_TASKS", 1, INT_MAX, 1, &tasks));
    }
    if (tasks > 1) {
        return nd_fail(ND_ERR_CONFIG,
                       "srun started %d ndtrain without PMIx, so that they cannot find each other; "
                       "use `srun --mpi=pmix` (`srun --mpi=list` shows whether this Slurm has it), "
                       "or start one ndlaunch per node",
                       tasks);
    }
    return ND_OK;
}

nd_status nd_identity_join(nd_identity *identity)
{
    if (identity->source == ND_IDENTITY_PMIX) {
        ND_TRY(nd_pmix_open(identity, &identity->pmix));
        nd_status status = check_ranks(identity, "PMIx");
        if (status != ND_OK) {
            nd_pmix_close(identity->pmix, (int)status);
            identity->pmix = NULL;
        }
        return status;
    }
    return identity->source == ND_IDENTITY_SINGLE ? check_alone() : ND_OK;
}

void nd_worker_die_with_parent(void)
{
    const char *launcher = getenv("ND_LAUNCHER_PID");
    if (!launcher) {
        return;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    /* ndlaunch may have died before prctl: then this process has another parent already and no
     * signal will come. */
    if ((long)getppid() != strtol(launcher, NULL, 10)) {
        _exit(128 + SIGKILL);
    }
}
