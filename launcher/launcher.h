// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAUNCHER_LAUNCHER_H
#define ND_LAUNCHER_LAUNCHER_H
#include <stdbool.h>
#include <stdio.h>
#include <uv.h>

#include "runtime/base/progress.h"
#include "runtime/base/status.h"
#include "runtime/config/config.h"
#include "runtime/rdzv/failure.h"
#include "runtime/rdzv/store_server.h"

/* The environment of a program that ndlaunch starts: a worker, or the check before them. */

typedef struct nd_variable {
    const char *name, *value;
} nd_variable;

/*
 * `own` over this process's environment, without what an outer launcher may have set there. *out
 * ends with NULL and is one block, owned by the caller; it borrows the texts of the environment.
 */
nd_status nd_environment_make(const nd_variable *own, int count, char ***out);

/*
 * What Slurm's environment says to ndlaunch. A step that runs one ndlaunch on each of its nodes
 * gives the number of nodes and which one this is; where there are GPUs, a worker for each. What a
 * file or a flag says goes before.
 */

typedef struct nd_slurm {
    bool in_job;                 /* below a batch script, salloc or srun */
    bool in_step;                /* started by srun */
    char job_id[32], node[128];  /* "" outside of Slurm */
    int job_nodes;               /* of the allocation */
    int nodes, node_rank, tasks; /* of the step; 1, 0, 1 outside of one */
    int gpus;                    /* of this node that the process may use; 0: none, or not said */
} nd_slurm;

/* ND_ERR_CONFIG for a variable that is no number. */
nd_status nd_slurm_read(nd_slurm *out);
/* Before file and flags are read: nnodes and node_rank of the step become the defaults. */
void nd_slurm_set_defaults(const nd_slurm *slurm, nd_config *config);
/*
 * After they are read, before nd_config_resolve: one worker per GPU where neither workers nor
 * nproc_per_node is given. ND_ERR_CONFIG when srun started several ndlaunch on a node, or on more
 * nodes than the configuration knows of.
 */
nd_status nd_slurm_complete(const nd_slurm *slurm, nd_config *config);

/* The worker program's own check of configuration, model and data, once, before any worker
 * starts. */

/* The worker program: $ND_WORKER, or ndtrain beside this program. ND_ERR_CONFIG when it is not
 * there. */
nd_status nd_preflight_find_worker(char *path, int capacity);
/*
 * Raises the limit of open files to what the user is allowed. ND_ERR_CONFIG with both numbers when
 * that is less than this node of the job needs.
 */
nd_status nd_preflight_check_files(const nd_config *config);
/*
 * Runs `<program> check`, for at most `seconds`, with the resolved configuration behind config_fd,
 * read from the file config_name. Its sentence goes to stderr and its code to *exit_code; its lines
 * "digest NAME HEX" go to digests as "NAME=HEX". ND_ERR_CONFIG when it is of another version: both
 * are named.
 */
nd_status nd_preflight_run(const char *program, int config_fd, const char *config_name,
                           double seconds, char *digests, size_t capacity, int *exit_code);

/*
 * The workers of this host from spawn to the last exit, on one libuv loop: the store, the output,
 * signals, the first failure. Everything runs in the main thread.
 */

enum { ND_TAIL_LINES = 20, ND_TAIL_BYTES = 512, ND_LINE_MAX = 8192 };

typedef struct nd_job nd_job;

/* One of a worker's two output streams; whole lines go on. */
typedef struct nd_output {
    struct nd_launched *worker;
    uv_pipe_t pipe;
    int to;     /* our descriptor */
    FILE *file; /* --log-dir, or NULL */
    char line[ND_LINE_MAX];
    size_t used;
} nd_output;

typedef enum nd_killed { ND_KILLED_NOT = 0, ND_KILLED_GRACE, ND_KILLED_INTERRUPT } nd_killed;

typedef struct nd_launched {
    nd_job *job;
    int rank, local_rank;
    uv_process_t process;
    bool running;
    bool stopped;      /* we ended it because another one failed */
    nd_killed killed;  /* we ended it because it did not end when it was asked to */
    int64_t exit_code; /* after it ran */
    int signal;
    int64_t ended_ns;
    nd_output out, err;
    char tail[ND_TAIL_LINES][ND_TAIL_BYTES]; /* last lines of stderr */
    int tail_count;
} nd_launched;

struct nd_job {
    uv_loop_t loop;
    const nd_config *config;
    const char *program; /* the worker binary */
    char host_name[128], run_id[64];
    char slurm_job[32];    /* its id, or "" */
    char log_folder[4096]; /* of this start, below launch.log_dir, or "" */
    bool log_failed;       /* said once */
    int local_workers, world_size, first_rank;
    int config_fd, key_fd;
    char *job_text;         /* what all nodes must agree on, with digests; owned */
    int cannot_start;       /* 0, or the code of this node's failed check: other nodes are told */
    nd_store_server *store; /* NULL on nodes other than 0 */
    char master_addr[128];
    int master_port;
    struct nd_nodes *nodes; /* node 0 of several, or NULL */
    struct nd_join *join;   /* another node of several, or NULL */
    nd_progress progress;
    nd_failure_page failures;
    nd_launched *workers; /* [local_workers] */
    int running;
    uv_timer_t kill_timer;
    uv_signal_t signals[6];
    bool under_nohup; /* HUP was ignored when we started, and stays so */
    int64_t last_interrupt_ns;
    bool stopping; /* a failure was seen */
    bool asked;    /* a signal asked us to end */
    bool finished; /* handles are closing */
    int exit_code;
};

/* Runs the job to its end. *exit_code: 0, the first failing worker's code, or 128 + its signal. */
nd_status nd_job_run(nd_job *job, int *exit_code);

/* stop.c. A signal to all workers that run. */
void nd_job_signal(nd_job *job, int number);
/* SIGKILL to those that run, and why: they have not failed. */
void nd_job_kill(nd_job *job, nd_killed why);
/* A first failure: tells the workers to end, and kills them soon after. */
void nd_job_stop(nd_job *job);
/* Workers that have not ended after launch.grace_seconds are killed. */
void nd_job_start_grace(nd_job *job);
/* The job is over: closes everything, which ends the loop. */
void nd_job_finish(nd_job *job, int exit_code);

/* output.c */
nd_status
nd_output_make_folder(nd_job *job); /* launch.log_dir/<run id>; once, before the first is opened */
nd_status nd_output_open(nd_output *output, nd_launched *worker, bool is_error);
nd_status nd_output_start(nd_output *output);
void nd_output_close(nd_output *output);

/* spawn.c */
nd_status nd_job_spawn(nd_job *job, int local_rank, uv_exit_cb on_exit);

/* report.c: the failure screen of this node's workers; returns their exit code. */
int nd_job_report(const nd_job *job, FILE *out);

#endif
