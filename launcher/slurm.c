// SPDX-License-Identifier: Apache-2.0
#include "launcher/launcher.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"

/* A number of Slurm's environment; `fallback` where the variable is missing. */
static nd_status read_number(const char *name, int fallback, int *out)
{
    const char *text = getenv(name);
    char *rest;
    if (!text || !text[0]) {
        *out = fallback;
        return ND_OK;
    }
    long value = strtol(text, &rest, 10);
    if (*rest || value < 0 || value > INT32_MAX) {
        return nd_fail(ND_ERR_CONFIG, "%s=%s in the environment is not a number; Slurm sets it",
                       name, text);
    }
    *out = (int)value;
    return ND_OK;
}

static void read_text(const char *name, char *out, size_t capacity)
{
    const char *text = getenv(name);
    snprintf(out, capacity, "%s", text ? text : "");
}

/* Slurm narrows CUDA_VISIBLE_DEVICES to what the task may use: "0,1", "GPU-...", or "NoDevFiles"
 * for none. */
static nd_status read_gpus(int *out)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) {
        return read_number("SLURM_GPUS_ON_NODE", 0, out);
    }
    *out = visible[0] != '\0' && strcmp(visible, "NoDevFiles") != 0;
    for (const char *c = visible; *out > 0 && *c; c++) {
        *out += *c == ',';
    }
    return ND_OK;
}

nd_status nd_slurm_read(nd_slurm *out, nd_config *config)
{
    /* srun numbers its steps from 0; the shells of sbatch and salloc have ids at the end of the
     * range, 4294967290 and above, or none. */
    enum { FIRST_SPECIAL_DIGITS = 10 };
    const char *step = getenv("SLURM_STEP_ID");
    nd_slurm s = {.nodes = 1, .tasks = 1, .job_nodes = 1};
    read_text("SLURM_JOB_ID", s.job_id, sizeof s.job_id);
    s.in_job = s.job_id[0] != '\0';
    if (s.in_job) {
        read_text("SLURMD_NODENAME", s.node, sizeof s.node);
        ND_TRY(read_number("SLURM_JOB_NUM_NODES", 1, &s.job_nodes));
        ND_TRY(read_gpus(&s.gpus));
        s.in_step = step && step[0] && strlen(step) < FIRST_SPECIAL_DIGITS;
    }
    if (s.in_step) {
        ND_TRY(read_number("SLURM_STEP_NUM_NODES", 1, &s.nodes));
        ND_TRY(read_number("SLURM_STEP_NUM_TASKS", s.nodes, &s.tasks));
        ND_TRY(read_number("SLURM_NODEID", 0, &s.node_rank));
    }
    if (s.in_step && s.nodes > 1) {
        config->launch.nnodes = s.nodes;
        config->launch.node_rank = s.node_rank;
    }
    *out = s;
    return ND_OK;
}

static nd_status check_step(const nd_slurm *slurm, const nd_config *config)
{
    if (slurm->tasks > slurm->nodes) {
        return nd_fail(
            ND_ERR_CONFIG,
            "srun started %d ndlaunch on %d node%s; each starts all workers of its node, "
            "so there must be one on each; use --ntasks-per-node=1, or start the workers "
            "themselves with `srun --mpi=pmix -n %d ndtrain train`",
            slurm->tasks, slurm->nodes, slurm->nodes == 1 ? "" : "s", slurm->tasks);
    }
    int64_t spares = config->launch.spare_nodes, nodes = config->launch.nnodes + spares;
    if (slurm->nodes > 1 && spares > 0 && nodes != slurm->nodes) {
        return nd_fail(ND_ERR_CONFIG,
                       "srun started ndlaunch on %d nodes, but launch.nnodes %lld + "
                       "launch.spare_nodes %lld are %lld; pass --nnodes with the number of nodes "
                       "that have workers, and start it on as many nodes as both add up to",
                       slurm->nodes, (long long)config->launch.nnodes, (long long)spares,
                       (long long)nodes);
    }
    if (slurm->nodes > 1 && nodes != slurm->nodes) {
        return nd_fail(ND_ERR_CONFIG,
                       "srun started ndlaunch on %d nodes, but launch.nnodes is %lld%s%s; leave it "
                       "out or pass --nnodes %d --node-rank $SLURM_NODEID, or start it on "
                       "launch.nnodes nodes",
                       slurm->nodes, (long long)config->launch.nnodes,
                       config->source[0] ? " in or over " : "", config->source, slurm->nodes);
    }
    return ND_OK;
}

nd_status nd_slurm_complete(const nd_slurm *slurm, nd_config *config)
{
    if (!slurm->in_job) {
        return ND_OK;
    }
    if (slurm->in_step) {
        ND_TRY(check_step(slurm, config));
    } else if (slurm->job_nodes > 1 && config->launch.nnodes == 1) {
        nd_log_warning(
            "ndlaunch: Slurm job %s has %d nodes; this ndlaunch was started without srun "
            "and uses only the one it is on",
            slurm->job_id, slurm->job_nodes);
    }
    bool counted = config->launch.workers > 0 || config->launch.nproc_per_node > 0;
    if (!counted && slurm->gpus > 0 && config->launch.device != ND_CHOOSE_CPU) {
        config->launch.nproc_per_node = slurm->gpus;
    }
    return ND_OK;
}
