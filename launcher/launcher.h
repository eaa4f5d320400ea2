// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAUNCHER_LAUNCHER_H
#define ND_LAUNCHER_LAUNCHER_H
/*
 * ndlaunch: checks a job, starts the workers of this host, passes on their output and the signals
 * it receives, and reports the first failure.
 *
 * Several ndlaunch processes form a job of several nodes. Node 0, the coordinator, hosts the store.
 * It compares the members' configurations with its own, assigns ranks, records failures in the
 * order in which they arrive, tells all nodes to stop, prints the screen of the first failure and
 * gives its code to all. Each of the other nodes, the members, holds one connection to it.
 *
 * Everything after the start-up check runs in the main thread, on one libuv loop that the job owns.
 * The job owns what outlives its workers: the loop, the store, the other nodes. An attempt owns the
 * workers of one start and the pages that it shares with them; a restart is a further attempt.
 */
#include <stdio.h>
#include <string.h>
#include <uv.h>

#include "runtime/base/outlet.h"
#include "runtime/base/printable.h"
#include "runtime/base/progress.h"
#include "runtime/config/config.h"
#include "runtime/rdzv/server.h"
#include "runtime/rdzv/store_server.h"

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
    int64_t stop_ns;   /* when the workers were first asked to end; 0: not yet */
    bool stopping;     /* a failure was seen, here or on another node */
    bool patient;      /* workers that do not end in time are worth a warning */
    bool left_behind;  /* a killed worker did not end; it may still hold memory, files and GPUs */
    bool log_failed;   /* the user was warned */
    bool lost_results; /* what a model wrote did not fit where standard output goes */
    nd_outlet standard_output; /* of training */
};

enum {
    ND_STOP_MS = 3000, /* for the others to end after a failure that ends the job */
    ND_REAP_MS = 30000 /* for a killed worker to end: one that waits inside the kernel may not */
};

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

/*
 * report.c: the first failure among the workers of a node, and among the nodes, and the screen that
 * shows it.
 */

/* The weight of a failure among others: one with a lower weight explains those with a higher one,
 * whichever was seen first. */
typedef enum nd_failure_weight {
    ND_FAILURE_REASON = 0, /* nothing but itself explains it */
    ND_FAILURE_EFFECT,     /* another one may: of a lost peer (74), or of a named rank */
    ND_FAILURE_STOP,       /* no failure: a stop at a step boundary (75) */
} nd_failure_weight;

typedef struct nd_failure {
    int code; /* exit code, or 128 + signal */
    nd_failure_weight weight;
    int64_t seen_ns; /* 0: there is none */
} nd_failure;

/* As far as the code alone tells. */
nd_failure_weight nd_failure_weight_of(int code);

/* The end of the workers of one start, on this node or on all. */
typedef struct nd_nodes_end {
    int code;                 /* of the first failure, or 0 */
    nd_failure_weight weight; /* of that failure */
    int node;                 /* where it was; -1: nowhere */
    bool asked;               /* a signal to one of the launchers asked the job to end */
    bool left_behind;         /* a killed worker of some node did not end */
    bool lacks_nodes;         /* a restart waits until a lost one is back */
    char words[256];          /* "node 1 (host a) failed with code 137" */
} nd_nodes_end;

/*
 * After the last worker has ended: code and weight of this node's first failure in *end, and that
 * failure in a few words, "rank 1 failed (signal 9, Killed)", or "". Returns the failure screen,
 * owned by the caller; NULL without a failure or the memory for it.
 */
char *nd_attempt_report(const nd_attempt *attempt, nd_nodes_end *end);

/*
 * job.c: whether a job whose workers failed is started again, and what the user reads about it:
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

/* Frames between nodes, in the order of a job's life. All use the store's connection, so they come
 * from and go to accepted members only. Those about workers carry the epoch of their start, and one
 * of another start is ignored. */
enum {
    ND_NODE_JOIN = ND_WIRE_NODE_FIRST, /* to 0: u32 local workers, blob job text */
    ND_NODE_PLAN,    /* from 0: u32 first rank, u32 world size, u32 epoch, blob run folder */
    ND_NODE_BEAT,    /* both: -; every two seconds */
    ND_NODE_FAIL,    /* to 0: u32 code, u32 epoch; its first failure, seen just now */
    ND_NODE_STOP,    /* from 0: u32 epoch, u32 patience in ms; end your workers */
    ND_NODE_END,     /* to 0: u32 code, u32 epoch, u32 asked, u32 left behind, u32 weight,
                        blob screen; its workers have ended */
    ND_NODE_RELEASE, /* from 0: u32 code of the job, blob reason */
    ND_NODE_REST,    /* from 0: -; it has no place in this start, wait without workers */
};

enum { ND_NODE_BEAT_MS = 2000, ND_NODE_SILENT_MS = 15000 };

/* Writes a frame of some numbers and one text, or without a text where that is NULL. */
static inline void nd_node_frame(nd_wire_buffer *out, int type, const uint32_t *numbers, int count,
                                 const char *text)
{
    nd_wire_begin(out, (nd_wire_type)type);
    for (int i = 0; i < count; i++) {
        nd_wire_put_u32(out, numbers[i]);
    }
    if (text) {
        nd_wire_put_blob(out, text, strlen(text));
    }
}

/* The run id of a start: the job's name, with ".EPOCH" from the first restart on. */
static inline void nd_restart_run_id(const char *job, int64_t epoch, char *out, size_t capacity)
{
    int used = snprintf(out, capacity, "%s", job);
    if (epoch > 0) {
        snprintf(out + used, capacity - (size_t)used, ".%lld", (long long)epoch);
    }
}

/*
 * A start, as this node sees it; texts are borrowed for the call. Before it, node 0 waits for the
 * nodes to join. Before a further one these are nodes whose launcher was lost: an ndlaunch that is
 * started there again joins as the same node.
 *
 * Each start has launch.nnodes places, and as many nodes have workers. The others are spares
 * (launch.spare_nodes): connected, without workers. Before a restart a spare takes the place, and
 * so the ranks, of a node that was lost. Node 0 always has place 0. Where no node is
 * left to take a place, a start may have fewer places (launch.min_nodes), and so fewer workers on a
 * smaller mesh; each node makes the configuration of its workers from the world size of the plan.
 */
typedef struct nd_nodes_start {
    int64_t epoch;
    int first_rank, world_size;
    const char *run_folder;
} nd_nodes_start;

/* The job, as this node was asked for it; all borrowed. */
typedef struct nd_job_options {
    const nd_config *config;
    char *const *args; /* of a worker, and whether rank 0 has input: nd_attempt_options */
    bool input;
    const char *slurm_job; /* its id, or "" */
    const char *job_text;  /* what all nodes must agree on, with digests of files */
    int config_fd;
    int local_workers, world_size;
    int cannot_start; /* 0, or the code of this node's failed check: only tells the other nodes */
} nd_job_options;

/* The job of a coordinator's or a member's own node, and how to act on it; all borrowed. */
typedef struct nd_nodes_options {
    uv_loop_t *loop;
    const nd_job_options *job;
    const char *host_name;
    void *context;
    /* Ends the workers of this node, because one has failed (nd_attempt_stop). */
    void (*stop)(void *context, int patience_ms);
    /* Starts the workers of this node, for the first time or again. */
    void (*start)(void *context, const nd_nodes_start *start);
    void (*finish)(void *context, int code); /* the job is over on all nodes */
    /* Node 0: how long workers may take to end after a failure with this code. */
    int (*patience_ms)(void *context, int code);
    /* Node 0: all workers of this start have ended. True: they are started again after
     * *wait_seconds, as soon as there are nodes for all places. */
    bool (*restarts)(void *context, const nd_nodes_end *end, double *wait_seconds);
    /* Node 0: the folder of the run, in which a restart goes on, or "". */
    const char *run_folder;
} nd_nodes_options;

/* Seconds for the nodes to meet: launch.rdzv_timeout_seconds, and the time by which one node's
 * check may be slower than another's. */
static inline double nd_nodes_limit(const nd_config *config)
{
    return config->launch.rdzv_timeout_seconds + nd_config_data_seconds(config);
}

/* This node among the others: the coordinator, or a member. */
typedef struct nd_nodes nd_nodes;

typedef struct nd_nodes_role {
    /* A worker of this node failed while none was being stopped: stops the others. */
    void (*failed)(nd_nodes *nodes, int code);
    /* All workers of this node have ended; `screen` is the failure screen or "". */
    void (*ended)(nd_nodes *nodes, const nd_nodes_end *end, const char *screen);
    /* A signal came while no worker of this node ran: node 0 is to end the job, or a member ends
     * alone if another one has taken its place. */
    void (*asked)(nd_nodes *nodes, int number);
    void (*destroy)(nd_nodes *nodes); /* after the loop has run out */
} nd_nodes_role;

struct nd_nodes {
    const nd_nodes_role *role;
    nd_nodes_options options;
    nd_store_server *store; /* node 0's; NULL: a member, or it is closed */
    /* The job's name, and where its store is. */
    char job[64];
    char master_addr[128];
    int master_port;
};

/* Ends what a node has on the loop beside timers and polls. */
static inline void nd_nodes_close_store(nd_nodes *nodes)
{
    nd_store_server_close(nodes->store);
    nodes->store = NULL;
}

/*
 * roster.c: what node 0 knows about each node of the job: whether it is connected, which place it
 * has in this start, and how its workers ended. Data without frames and timers.
 *
 * A start has a place for each node with workers; place p has the ranks from p x local workers on.
 * A node without a place is a spare.
 */

typedef struct nd_node {
    nd_peer *peer; /* NULL: not connected */
    bool joined;
    bool waits; /* it joined and waits for a later start: a spare, or its workers of this one were
                   lost */
    int place;  /* in this start, -1: it has no workers */
    bool lost, ended; /* in this start */
    int64_t heard_ns;
    nd_failure failure; /* its first one, seen when it arrived at node 0 */
    char host[ND_WIRE_TEXT_MAX];
    char *screen; /* owned */
} nd_node;

typedef struct nd_roster {
    nd_node *nodes; /* [count]; 0 is node 0 itself */
    int count, places;
    int most_places; /* of the first start */
    int *holder;     /* [most_places] node that has it, -1: none */
    int *former;     /* [most_places] the same in the last start */
} nd_roster;

nd_status nd_roster_init(int places, int spares, const char *own_host, nd_roster *out);
void nd_roster_fini(nd_roster *roster);
/* Forgets how the last start ended. */
void nd_roster_begin(nd_roster *roster);

int nd_roster_joined(const nd_roster *roster); /* how many nodes are connected */
/* The next start has so many places, at most those of the first one. Nodes of places that are gone
 * become spares, until nd_roster_assign. */
void nd_roster_set_places(nd_roster *roster, int places);
/*
 * Gives each place of the next start a node: the one that has it, if that is still connected, else
 * the first spare by node rank. False, without changes: too few nodes are connected.
 */
bool nd_roster_assign(nd_roster *roster);
/* The nodes that have workers (or else the connected ones without), as "0, 2-3". */
void nd_roster_text(const nd_roster *roster, bool working, char *out, size_t capacity);
/* "node 1 of 2 nodes is missing after 10 s", without a time when that is 0; with spare nodes also
 * how many of them are needed */
void nd_roster_missing(const nd_roster *roster, double seconds, char *out, size_t capacity);

/* report.c: how a node's workers ended. */

/* Its first failure, seen just now, of which no more is known than the code. */
void nd_node_fail(nd_node *node, int code);
/* The node itself was lost, and the screen says why; does nothing when its workers have ended. */
void nd_node_lose(nd_node *node, int index, const char *why);
/* Its workers have ended. The screen is copied; bytes may be 0. */
void nd_node_end(nd_node *node, const nd_nodes_end *end, const char *screen, size_t bytes);
/* The node with the failure that explains the others, or else one that was stopped at a step
 * boundary (75); -1: neither. */
int nd_roster_first_failure(const nd_roster *roster);
/* No node has workers of this start any more. */
bool nd_roster_all_over(const nd_roster *roster);

/*
 * coordinator.c: node 0, also of a job that has no other. Opens the store and gathers the nodes for
 * the first start, for spare nodes a short while only, and watches them from then on. Where nodes
 * are missing at the deadline, settings differ, or the check of a node failed, this one's included,
 * it prints that and ends the job with its code; with that of the failure where a restart lacks
 * nodes. The options are copied; *out is to be destroyed also after an error.
 */
nd_status nd_coordinator_open(const nd_nodes_options *options, const uint8_t key[ND_KEY_BYTES],
                              nd_nodes **out);

/*
 * member.c: another node. Connects to node 0 within nd_nodes_limit, and sends it the settings of
 * this node, which it compares. From then on node 0 says when this node's workers start: at once,
 * or for a spare or a node that comes back when a start needs it, or that the job ends. The options
 * are copied; *out is to be destroyed also after an error.
 */
nd_status nd_member_join(const nd_nodes_options *options, const uint8_t key[ND_KEY_BYTES],
                         nd_nodes **out);

/* job.c: the job on this node, from the store to the last handle. */

/* Runs the job to its end. *exit_code: 0, the first failing worker's code, or 128 + its signal. */
nd_status nd_job_run(const nd_job_options *options, int *exit_code);

#endif
