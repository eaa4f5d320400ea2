// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAUNCHER_LAUNCHER_H
#define ND_LAUNCHER_LAUNCHER_H
/*
 * ndlaunch: checks a job, starts the workers of this host, passes on their output and the signals
 * it receives, and reports the first failure. Several ndlaunch processes form a job of several
 * nodes (nodes.h).
 *
 * Everything after the start-up check runs in the main thread, on one libuv loop that the job owns.
 * The job owns what outlives its workers: the loop, the store, the other nodes. An attempt owns the
 * workers of one start and the pages that it shares with them; a restart is a further attempt.
 */
#include <stdio.h>
#include <uv.h>

#include "launcher/nodes.h"
#include "runtime/base/outlet.h"
#include "runtime/base/printable.h"

/* environment.c: what a program that ndlaunch starts inherits. */

typedef struct nd_variable {
    const char *name, *value;
} nd_variable;

/*
 * Makes an environment from this process's own: variables that an outer launcher may have set to
 * identify a worker are left out, and `own` replaces what has the same name. *out ends with NULL
 * and is one block, owned by the caller; it borrows the texts of the environment.
 */
nd_status nd_environment_make(const nd_variable *own, int count, char ***out);

/* The resolved configuration as an anonymous file that workers inherit. */
nd_status nd_config_to_fd(const nd_config *config, int *fd);

/* commands.c: what needs no job. */

/* `ndlaunch env`: system, CPU, memory, limits, GPUs, and the variables that libraries and launchers
 * read. Values of variables whose names, or that themselves, look like secrets are left out. */
void nd_host_report(FILE *out);
/* The GPUs' models, as the driver's folder (/proc/driver/nvidia) has them, or that there is none.
 */
void nd_host_put_gpu_models(FILE *out, const char *driver);
/* `ndlaunch config`: writes a first configuration, with comments, as a new file, and says on `said`
 * how it is used. ND_ERR_CANTCREATE: the file exists, or cannot be written. argv[0] is "config". */
nd_status nd_starter_main(FILE *said, int argc, char **argv);

/* slurm.c: a step that runs one ndlaunch on each of its nodes gives the number of nodes and which
 * one this is; a node with GPUs gets a worker for each. Files and flags override all of it. */

typedef struct nd_slurm {
    bool in_job;                 /* below a batch script, salloc or srun */
    bool in_step;                /* started by srun */
    char job_id[32], node[128];  /* "" outside of Slurm */
    int job_nodes;               /* of the allocation */
    int nodes, node_rank, tasks; /* of the step; 1, 0, 1 outside of one */
    int gpus;                    /* of this node that the process may use; 0: none or unknown */
} nd_slurm;

/* Reads Slurm's environment, before file and flags are read: nnodes and node_rank of the step
 * become the defaults. ND_ERR_CONFIG for a variable that should be a number and is not. */
nd_status nd_slurm_read(nd_slurm *out, nd_config *config);
/*
 * After these are read, before nd_config_resolve: one worker per GPU where neither workers nor
 * nproc_per_node is given. ND_ERR_CONFIG when srun started several ndlaunch on a node, or on more
 * nodes than the configuration has.
 */
nd_status nd_slurm_complete(const nd_slurm *slurm, nd_config *config);

/* preflight.c: what is checked once, before any worker starts. */

/* The worker program: $ND_WORKER, or ndtrain in the folder of this program. ND_ERR_CONFIG when it
 * is missing. */
nd_status nd_preflight_find_worker(char *path, int capacity);
/*
 * Raises the limit of open files to what the user is allowed. ND_ERR_CONFIG with both numbers when
 * that is less than this node of the job needs.
 */
nd_status nd_preflight_check_files(const nd_config *config);

typedef struct nd_preflight {
    char *const *args;       /* of the check: the worker program, "check", ...; ends with NULL */
    const char *config_name; /* the file that the configuration was read from */
    int config_fd;           /* the resolved configuration */
    double seconds;          /* for the check to end */
    char *digests;           /* out: content of the job's files, "NAME=HEX" a line */
    size_t capacity;         /* of digests */
} nd_preflight;

/*
 * Runs the check, whose error message goes to stderr and whose code to *exit_code.
 * ND_ERR_CONFIG when the program is of another version than this one; ND_ERR_HANG at the deadline.
 */
nd_status nd_preflight_run(const nd_preflight *check, int *exit_code);

/* attempt.c: the workers of one start on this node, from spawn to the last exit. */

enum { ND_TAIL_LINES = 20, ND_TAIL_BYTES = 512, ND_LINE_MAX = 8192 };

typedef struct nd_attempt nd_attempt;
typedef struct nd_child nd_child;

/* One of a worker's two output streams. */
typedef struct nd_output {
    nd_child *child;
    uv_pipe_t pipe;
    FILE *file; /* below launch.log_dir, or NULL */
    char line[ND_LINE_MAX];
    size_t used;
    bool returned;  /* behind these bytes came a carriage return: the next ones overwrite them */
    nd_shown shown; /* rank 0's bytes on their way */
    bool as_it_is;  /* they go to a file or a pipe that gets them unchanged */
    bool torn;      /* bytes of rank 0 were lost, and no line has begun since */
} nd_output;

typedef enum nd_killed { ND_KILLED_NOT = 0, ND_KILLED_GRACE, ND_KILLED_INTERRUPT } nd_killed;

/* A worker process of this node. */
struct nd_child {
    nd_attempt *attempt;
    int rank, local_rank;
    uv_process_t process;
    bool running;
    bool stopped;      /* we ended it because another worker failed */
    nd_killed killed;  /* we killed it because it did not end when it was asked to */
    bool kill_sent;    /* we sent SIGKILL, for whatever reason */
    uint32_t pending;  /* bit N: signal N is to be forwarded once the worker handles signals */
    int64_t exit_code; /* valid once it has ended */
    int signal;
    int64_t ended_ns;
    nd_output out, err;
    char tail[ND_TAIL_LINES][ND_TAIL_BYTES]; /* last lines of stderr */
    int tail_count;
};

typedef struct nd_attempt_options {
    uv_loop_t *loop;
    const nd_config *config;
    char *const *args; /* of a worker: the program, the command, its flags; ends with NULL */
    bool input; /* a model is used: rank 0 reads this program's standard input, and nothing is
                        * to be saved at a stop */
    const char *host_name, *run_id;
    int64_t epoch;           /* number of this start of the job, from 0 */
    const char *run_folder;  /* of the job's first start, or "" */
    const char *slurm_job;   /* its id, or "" */
    const char *master_addr; /* of the store */
    int master_port;
    int local_workers, world_size, first_rank;
    int config_fd, key_fd; /* workers inherit them */
    void *context;
    void (*failed)(void *context, int code); /* a worker failed while none was being stopped */
    void (*ended)(void *context);            /* the last worker has ended */
} nd_attempt_options;

struct nd_attempt {
    nd_attempt *next; /* of a list that the owner may keep */
    nd_attempt_options options;
    nd_progress progress;
    char log_folder[4096]; /* for files with the workers' output, below launch.log_dir, or "" */
    nd_child *children;    /* [local_workers] */
    int running;
    uv_timer_t kill_timer, ready_timer;
    int handles; /* of the loop: open, or not yet closed to the end */
    int64_t started_ns;
    int64_t stop_ns;  /* when the workers were first asked to end; 0: not yet */
    bool stopping;    /* a failure was seen, here or on another node */
    bool patient;     /* workers that do not end in time are worth a warning */
    bool left_behind; /* a killed worker did not end; it may still hold memory, files and GPUs */
    bool log_failed;  /* the user was warned */
    nd_outlet standard_output; /* of training */
};

enum { ND_STOP_MS = 3000 }; /* for the others to end after a failure that ends the job */

/*
 * Starts the workers. When it fails, those that did start still run: call nd_attempt_kill, and wait
 * for `ended` if any is `running`. The options are copied; what they point to is borrowed until
 * nd_attempt_free.
 */
nd_status nd_attempt_start(const nd_attempt_options *options, nd_attempt *attempt);
/* Forwards a signal to all workers that run: to each of them once it handles signals, since a
 * program that has just begun would die of it. SIGQUIT, which they never handle, goes out at once.
 */
void nd_attempt_forward(nd_attempt *attempt, int number);
/* Sends SIGKILL to those that run and records why: they have not failed. */
void nd_attempt_kill(nd_attempt *attempt, nd_killed why);
/*
 * Asks the workers to end because one has failed, and kills them patience_ms later, which is at
 * once for 0. A later call with less patience shortens the time.
 */
void nd_attempt_stop(nd_attempt *attempt, int patience_ms);
/* Kills workers that have not ended after launch.grace_seconds. False: that time already runs. */
bool nd_attempt_start_grace(nd_attempt *attempt);
/*
 * After the last worker has ended: closes what the loop still has of it, and frees it. False: the
 * loop still has handles of it, so ask again later. Outputs close by themselves when all that was
 * written is read. A zeroed attempt, from the heap, is legal.
 */
bool nd_attempt_free(nd_attempt *attempt, bool loop_ended);

/* report.c: after the last worker has ended: the code of this node in *end, the first failure in a
 * few words, "rank 1 failed (signal 9, Killed)", or "", and whether it is surely this node's.
 * Returns the failure screen, owned by the caller; NULL without a failure or the memory for it. */
char *nd_attempt_report(const nd_attempt *attempt, nd_nodes_end *end);

/*
 * restart.c: whether a job whose workers failed is started again, and what the user reads about it:
 * a pure function of exit code, steps and times. Node 0 decides for all nodes.
 *
 * A restart needs progress, so that the loop of restarts ends: the first one a completed step, each
 * further one a checkpoint that is newer than the one from which the failed start went on. So none
 * follows a restart that failed before its first step.
 */

typedef enum nd_restart {
    ND_RESTART_YES = 0,
    ND_RESTART_OFF,         /* launch.max_restarts is 0, or the job ended without a failure */
    ND_RESTART_ASKED,       /* a signal asked the job to end */
    ND_RESTART_NOT_WORTH,   /* this exit code would come again */
    ND_RESTART_NO_STEP,     /* the first start completed no step */
    ND_RESTART_NO_START,    /* the last restart completed no step */
    ND_RESTART_NO_PROGRESS, /* no newer checkpoint since the last restart */
    ND_RESTART_ALL_USED,
    ND_RESTART_LEFT_BEHIND, /* a killed worker did not end */
} nd_restart;

typedef struct nd_restart_case {
    int code;         /* of the failure: a worker's exit code or 128 + its signal */
    bool asked;       /* ndlaunch received a signal that ends the job */
    bool left_behind; /* a killed worker did not end, on whatever node */
    bool lacks_nodes; /* a restart waits until a lost node is back */
    int64_t epoch, max_restarts;
    bool stepped;     /* this start completed a step */
    int64_t began_at; /* steps that were done when this start's loop began */
    int64_t durable;  /* step of the newest durable checkpoint, -1: none */
    int64_t done;     /* steps that are done now */
    double seconds;   /* from this start's first completed step to the failure */
    int brief;        /* how many starts before this one failed soon, in a row */
} nd_restart_case;

typedef struct nd_restart_choice {
    nd_restart verdict;
    double wait_seconds; /* before the next start */
    int brief;           /* for the next case */
    char text[192];      /* what follows and what it costs, or why none does; "": nothing to say */
} nd_restart_choice;

nd_restart_choice nd_restart_decide(const nd_restart_case *c);

/* job.c: the job on this node, from the store to the last handle. */

/* Runs the job to its end. *exit_code: 0, the first failing worker's code, or 128 + its signal. */
nd_status nd_job_run(const nd_job_options *options, int *exit_code);

#endif
