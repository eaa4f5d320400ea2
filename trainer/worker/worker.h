// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WORKER_WORKER_H
#define ND_WORKER_WORKER_H
/*
 * A worker process from its environment to a rank that can train: signals, identity, store, device,
 * CPUs, transport, groups. nd_worker owns all of them; nd_worker_close undoes them in reverse
 * order. Everything is called from the main thread.
 */
#include <stdbool.h>

#include "kernels/ops.h"
#include "runtime/base/thread.h"
#include "runtime/config/config.h"
#include "runtime/device/affinity.h"
#include "runtime/device/cuda.h"
#include "runtime/rdzv/identity.h"
#include "runtime/rdzv/store.h"
#include "trainer/rank.h"

/*
 * process.c: what concerns the process before it is a worker of a job. A program with this file
 * also lets OpenMP bind no thread: before main it puts OMP_PROC_BIND=false in the place of
 * OMP_PROC_BIND, OMP_PLACES and GOMP_CPU_AFFINITY.
 */

/*
 * Sets how long the threads of the ops spin before they sleep, our own and OpenMP's: about what
 * sleeping and waking costs. OpenMP's spin for milliseconds by default, so that one thread that has
 * to wait for its CPU makes the others burn theirs, and a busy machine becomes many times slower. A
 * process that `decodes` text alone spins ten times as long: between its many short products a
 * thread that slept comes back late. OpenMP reads its settings before main, so the program executes
 * itself again, once. A setting of the user (GOMP_SPINCOUNT, OMP_WAIT_POLICY) is kept. Returns when
 * there is nothing to do or the program cannot be executed.
 */
void nd_process_shorten_spin(char **argv, bool decodes);

/* The command line that a user typed: that of ndlaunch, where it started this worker. ND_ERR_IO
 * when there is no such process, or it belongs to another user. *argv is one block, the
 * caller's. */
nd_status nd_command_line_read(int pid, int *argc, char ***argv);

/*
 * A worker's configuration, resolved: the one that ndlaunch hands down, or that of the command
 * line. With cli->help or cli->version it is not resolved. argv[0] is the command's name.
 */
nd_status nd_settings_read(nd_config *config, nd_cli *cli, const nd_identity *identity, int argc,
                           char **argv);

/* Facts about where they run, which the ranks of a job exchange. */

typedef struct nd_peer_card {
    char host[128];
    uint64_t cpus; /* digest of the mask of CPUs that the process was given */
} nd_peer_card;

typedef struct nd_peer_device {
    char kind[16];            /* "cpu", "cuda" */
    char gpu[ND_CUDA_ID_MAX]; /* nd_cuda_info.id; "" without a GPU */
} nd_peer_device;

typedef struct nd_peers {
    nd_peer_card *cards; /* [world_size], owned */
    const char *
        *hosts; /* [host_count] each once, in the order of ranks; owned, but not the names */
    int host_count;
    int sharers; /* ranks of this host with the same CPUs as this one */
    int share;   /* the number of this one among them */
} nd_peers;

/* nd_peers_index fills the other fields from cards; nd_peers_check_devices compares devices. */
nd_status nd_peers_index(nd_peers *peers, int count, int rank);
nd_status nd_peers_check_devices(const nd_peer_card *cards, const nd_peer_device *devices,
                                 int count);

typedef struct nd_worker {
    nd_identity identity;
    nd_store *store;
    nd_peers peers;
    bool met;       /* all ranks have joined the store */
    nd_error error; /* its status is ND_OK until nd_worker_fail */
    nd_gate gate;   /* ND_GATE_INIT; closed: a thread reports how this worker ends */
    bool reported;  /* one has done it */
    nd_progress progress;
    nd_affinity affinity;
    nd_device *device;
    nd_transport *transport;
    nd_rank rank;
    nd_ops planner; /* ops of a GPU that is not here, which rank.ops points to */
} nd_worker;

/*
 * Reads who this worker is, installs signals, and joins its job; process.c. TERM, HUP and USR1 call
 * `stop`, which ends the run at the next step boundary; INT too, but a second INT ends the process.
 * QUIT keeps the system's meaning: it ends a process that does not reach a boundary, with a core
 * dump where these are on. Under ndlaunch an INT may arrive twice, from ndlaunch and from a
 * resource manager that signals every process; there ndlaunch acts on the second one.
 */
nd_status nd_worker_begin(nd_worker *worker, void (*stop)(int signal_number));
/*
 * Joins the job's store and waits until all ranks have, within launch.rdzv_timeout_seconds. Comes
 * before the data are opened, which may take a rank minutes and must not look like a missing rank.
 * Where a rank hosts the store, a rank that dies ends all of them from here on.
 */
nd_status nd_worker_meet(nd_worker *worker, const nd_config *config);
/* The rest, among ranks whose settings agree. The config is borrowed. */
nd_status nd_worker_join(nd_worker *worker, const nd_config *config, const nd_shape *shape);
/*
 * The end of a worker that fails. Each rank prints its own error. Under PMIx it also ends the job,
 * which kills the other ranks: so a rank whose reason may be another one's (a lost peer,
 * nd_fail_elsewhere) leaves that one some seconds to do so, and is killed before it prints
 * anything. At a deadline every rank prints at once which others it waits for, and the job ends
 * some seconds later.
 *
 * Prints the error and under PMIx ends the job. From any thread; does nothing when another one has
 * done it, for which it waits up to 30 s. Where nothing ends this process it returns after about
 * 45 s at most: 4 s for another rank, 10 s for PMIx to take the end and 30 s for that to reach this
 * process.
 */
void nd_worker_report(nd_worker *worker, const nd_error *error);
/* Like nd_worker_report, for another rank that was lost (nd_store_watch): runs in the store's
 * thread on rank 0, and on the others in the thread that watches rank 0. Then it ends this process
 * with ND_ERR_IO. Returns when another thread has reported. */
void nd_worker_report_loss(void *worker, const char *message);
/*
 * Reports the thread's error (nd_error_last), which has this status and ends this worker. To be
 * called before a failing rank closes anything: closing may take long, wait for a peer, or show a
 * peer that this rank fails. A job of PMIx ends with the report, which may wait a few seconds for
 * that of a rank that knows better; what NCCL still does is given up. A second call does nothing.
 */
void nd_worker_fail(nd_worker *worker, nd_status status);
/*
 * Reports how the worker ended and closes it: an error other than ND_ERR_PREEMPTED through
 * nd_worker_fail, with the thread's error. Returns the exit code.
 */
int nd_worker_close(nd_worker *worker, nd_status status);
/* Like nd_worker_close, where nothing can be closed because a thread that hangs in a system call
 * uses it: ends the process at once. */
_Noreturn void nd_worker_end(nd_worker *worker, nd_status status);

/* CPU, or which GPU. */

/*
 * Resolves launch.device: *gpu when CUDA is asked for, or auto and a GPU is visible. ND_ERR_CONFIG
 * with the reason when the device that was asked for is missing, or there are too few of them for
 * the workers of this host.
 */
nd_status nd_worker_check_device(const nd_config *config, bool *gpu);
/*
 * For a plan: the CPU's ops whatever the device, since nothing runs, with the threads that a worker
 * would have on a machine with as many CPUs as this one.
 */
nd_status nd_worker_open_planner(const nd_config *config, nd_worker *worker);
/* Memory that a worker of device cpu needs beside its plan and the stacks of its threads: what
 * libraries allocate and map after the program has begun. */
enum { ND_WORKER_LIBRARY_BYTES = 44 << 20 };
/*
 * For a worker of device cpu, which is open but whose threads have not started: whether the limits
 * of this process leave room for `planned` bytes, the libraries and the threads' stacks, and, in a
 * job of several workers, whether /dev/shm has room for the shared memory of the `local_workers` of
 * this host. ND_ERR_RESOURCE with the numbers.
 */
nd_status nd_worker_check_room(const nd_worker *worker, double planned, int64_t world_size,
                               int64_t local_workers);

#endif
