// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAUNCHER_JOB_H
#define ND_LAUNCHER_JOB_H
/*
 * The workers of this host from spawn to the last exit, on one libuv loop: the store, the output,
 * signals, the first failure. Everything runs in the main thread.
 */
#include <stdio.h>
#include <uv.h>

#include "runtime/base/progress.h"
#include "runtime/config/config.h"
#include "runtime/rdzv/failure.h"
#include "runtime/rdzv/host.h"

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
    char *job_text;   /* what all nodes must agree on, with digests; owned */
    int cannot_start; /* 0, or the code of this node's failed check: other nodes are told */
    nd_host *store;   /* NULL on nodes other than 0 */
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
