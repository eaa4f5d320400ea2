// SPDX-License-Identifier: Apache-2.0
/*
 * A double of NCCL among the threads or processes of one host: a file in memory that all ranks map.
 * The unique id names it among the open files of the process that made it, so that nothing is left
 * of a run that is killed. An operation is numbered when it is enqueued;
 * when it runs, each member publishes its part in its own buffer, reads everybody's, and says so
 * (nccl_ops.c). Members that enqueue different operations as the same number abort with a sentence,
 * where NCCL would hang or corrupt memory. A call answers that it is in progress, and the
 * communicator is of no use until it was polled. ND_DOUBLE_NCCL_ABORT: an abort does not return.
 */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/hostcuda/doubles/machine.h"
#include "tests/hostcuda/doubles/nccl_double.h"
#include "tests/hostcuda/doubles/nccl_parts.h"

/* Communicators of this process that are not destroyed. */
static ncclComm_t living;
static pthread_mutex_t living_lock = PTHREAD_MUTEX_INITIALIZER;

static void begin_life(ncclComm_t comm)
{
    pthread_mutex_lock(&living_lock);
    comm->device = machine_current();
    comm->next = living;
    living = comm;
    pthread_mutex_unlock(&living_lock);
}

static void end_life(ncclComm_t comm)
{
    pthread_mutex_lock(&living_lock);
    ncclComm_t *at = &living;
    while (*at != comm) {
        at = &(*at)->next;
    }
    *at = comm->next;
    pthread_mutex_unlock(&living_lock);
}

/* Another kernel runs on the same GPU, and no abort ends it. */
static bool another_runs(ncclComm_t comm)
{
    bool found = false;
    pthread_mutex_lock(&living_lock);
    for (ncclComm_t c = living; c; c = c->next) {
        found = found || (c != comm && c->device == comm->device && !atomic_load(&c->aborted) &&
                          atomic_load(&c->ran) < c->enqueued);
    }
    pthread_mutex_unlock(&living_lock);
    return found;
}

static size_t shared_bytes(void)
{
    return (sizeof(shared) + 4095) / 4096 * 4096;
}

static size_t file_bytes(void)
{
    return shared_bytes() + (size_t)SPLITS * RANKS * 2 * CAPACITY;
}

ncclResult_t ncclGetVersion(int *out)
{
    const char *text = getenv("ND_DOUBLE_NCCL");
    *out = text ? (int)strtol(text, NULL, 10) : NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    return result == ncclRemoteError ? "remote process exited or there was a network error"
                                     : "an error of the double";
}

const char *ncclGetLastError(ncclComm_t comm)
{
    int broken = comm ? atomic_load(&comm->shared->broken) : 0;
    return broken == ncclUnhandledCudaError ? "Cuda failure 2 'out of memory'" : "";
}

static _Thread_local int made = -1; /* the file of the world that this thread then joins */

/* Pages of the file are made when they are touched. */
ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    int fd = memfd_create("nd-nccl", MFD_CLOEXEC);
    nd_double_note_environment("nccl", (const char *const[]){"NCCL_SOCKET_IFNAME", NULL});
    if (fd < 0 || ftruncate(fd, (off_t)file_bytes()) != 0) {
        return ncclSystemError;
    }
    snprintf(id->internal, sizeof id->internal, "/proc/%d/fd/%d", (int)getpid(), fd);
    made = fd;
    return ncclSuccess;
}

enum { ABSENT_MS = 60000 };

static int flawed = -1;
static nd_double_flaw flaw_of;

void nd_double_nccl_flaw(int rank, nd_double_flaw flaw)
{
    flawed = rank;
    flaw_of = flaw;
}

static bool has_flaw(int rank, nd_double_flaw flaw)
{
    return rank == flawed && flaw == flaw_of;
}

/* Absent as long as somebody waits. */
static void stay_away(ncclComm_t comm)
{
    for (int i = 0; i < ABSENT_MS && atomic_load(&comm->shared->given_up) < comm->world_size - 1;
         i++) {
        usleep(1000);
    }
}

/* As NCCL reads a configuration: without its initializer, or with bounds that contradict each
 * other, it is an invalid argument. */
static ncclResult_t check_config(const ncclConfig_t *config)
{
    bool least = config->minCTAs != NCCL_CONFIG_UNDEF_INT;
    bool most = config->maxCTAs != NCCL_CONFIG_UNDEF_INT;
    if (config->magic != 0xcafebeef || config->size != sizeof *config) {
        return ncclInvalidArgument;
    }
    if ((least && config->minCTAs < 1) || (most && config->maxCTAs < 1) ||
        (least && most && config->minCTAs > config->maxCTAs)) {
        return ncclInvalidArgument;
    }
    if (config->blocking != 0) {
        nd_double_violation("NCCL: a blocking communicator");
    }
    return ncclSuccess;
}

static int blocks_of(const ncclConfig_t *config)
{
    return config->maxCTAs == NCCL_CONFIG_UNDEF_INT ? 0 : config->maxCTAs;
}

int nd_double_nccl_blocks(ncclComm_t comm)
{
    return comm->max_blocks;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    if (check_config(config) != ncclSuccess || size > RANKS || rank < 0 || rank >= size) {
        return ncclInvalidArgument;
    }
    int fd = open(id.internal, O_RDWR | O_CLOEXEC);
    void *p = fd < 0 ? MAP_FAILED
                     : mmap(NULL, file_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                            fd, 0);
    close(fd);
    if (p == MAP_FAILED) {
        return ncclSystemError;
    }
    ncclComm_t comm = calloc(1, sizeof *comm);
    comm->shared = p;
    comm->data = (char *)p + shared_bytes();
    comm->world_rank = comm->index = rank;
    comm->world_size = comm->size = size;
    comm->next_split = 1;
    for (int r = 0; r < size; r++) {
        comm->ranks[r] = r;
    }
    if (has_flaw(rank, ND_DOUBLE_DIES_AT_WORLDS)) {
        raise(SIGKILL);
    }
    bool joins = !has_flaw(rank, ND_DOUBLE_ABSENT_FROM_WORLDS);
    if (!joins) {
        stay_away(comm);
    }
    comm->file = made;
    made = -1;
    atomic_fetch_add(&comm->shared->joined, joins);
    begin_life(comm);
    *out = comm;
    return ncclInProgress;
}

/* A split is made once every rank of the world has said its color; members are in the order of
 * their keys. */
static bool settle(ncclComm_t comm)
{
    if (comm->split == WORLD_SPLIT) {
        bool joined = atomic_load(&comm->shared->joined) == comm->world_size;
        if (joined && comm->file >= 0) {
            close(comm->file); /* what is mapped stays */
            comm->file = -1;
        }
        return joined;
    }
    member *members = comm->shared->members[comm->split];
    for (int r = 0; r < comm->world_size; r++) {
        if (!atomic_load(&members[r].ready)) {
            return false;
        }
    }
    comm->size = 0;
    for (int key = 0; key < comm->world_size; key++) {
        for (int r = 0; r < comm->world_size; r++) {
            if (members[r].color == comm->color && members[r].key == key) {
                if (members[r].max_blocks != comm->max_blocks) {
                    nd_double_violation("NCCL: ranks %d and %d of one communicator have other "
                                        "numbers of blocks, %d and %d",
                                        comm->world_rank, r, comm->max_blocks,
                                        members[r].max_blocks);
                }
                comm->index = r == comm->world_rank ? comm->size : comm->index;
                comm->ranks[comm->size++] = r;
            }
        }
    }
    return true;
}

/* A thread that the parent starts, as in NCCL. It writes the child in the end even when nobody can
 * use it any more. */
static void *make_child(void *argument)
{
    ncclComm_t child = argument, parent = child->parent;
    while (!(child->settled = settle(child)) && !atomic_load(&parent->aborted) &&
           !atomic_load(&parent->shared->broken)) {
        usleep(1000);
    }
    *child->result = child;
    atomic_store(&parent->made, true);
    return NULL;
}

static void end_maker(ncclComm_t parent)
{
    if (parent->has_maker) {
        pthread_join(parent->maker, NULL);
        parent->has_maker = false;
    }
}

static void wait_for_others(ncclComm_t comm)
{
    for (int r = 0; r < comm->world_size; r++) {
        while (r != comm->world_rank &&
               !atomic_load(&comm->shared->members[comm->split][r].ready)) {
            usleep(1000);
        }
    }
}

static void say_color(ncclComm_t comm)
{
    member *mine = &comm->shared->members[comm->split][comm->world_rank];
    if (has_flaw(comm->world_rank, ND_DOUBLE_DIES_AT_SPLITS)) {
        raise(SIGKILL);
    }
    if (has_flaw(comm->world_rank, ND_DOUBLE_BREAKS_SPLITS)) {
        wait_for_others(comm);
        atomic_store(&comm->shared->broken, (int)ncclSystemError);
    }
    if (has_flaw(comm->world_rank, ND_DOUBLE_LATE_FOR_SPLITS)) {
        usleep(250000);
    }
    bool comes = !has_flaw(comm->world_rank, ND_DOUBLE_ABSENT_FROM_SPLITS);
    if (!comes) {
        stay_away(comm);
    }
    atomic_store(&mine->color, comm->color);
    atomic_store(&mine->key, comm->key);
    atomic_store(&mine->max_blocks, comm->max_blocks);
    atomic_store(&mine->ready, comes);
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *out,
                           ncclConfig_t *config)
{
    if (parent->split != WORLD_SPLIT) {
        nd_double_violation("NCCL: a split of a split");
    }
    if (check_config(config) != ncclSuccess) {
        return ncclInvalidArgument;
    }
    nccl_need_settled(parent);
    if (parent->next_split == SPLITS) {
        nd_double_violation("NCCL: more than %d splits", SPLITS - 1);
    }
    ncclComm_t comm = calloc(1, sizeof *comm);
    comm->shared = parent->shared;
    comm->data = parent->data;
    comm->world_rank = parent->world_rank;
    comm->world_size = parent->world_size;
    comm->split = parent->next_split++;
    comm->color = color;
    comm->key = key;
    comm->max_blocks = blocks_of(config);
    comm->parent = parent;
    comm->result = out;
    comm->unpolled = 1;
    *out = NULL;
    begin_life(comm);
    say_color(comm);
    parent->made = false;
    parent->has_maker = pthread_create(&parent->maker, NULL, make_child, comm) == 0;
    return parent->has_maker ? ncclSuccess : ncclSystemError; /* as NCCL: its parent is asked */
}

void nccl_need_settled(ncclComm_t comm)
{
    if (!comm->settled || comm->unpolled || comm->begun_count > 0 || comm->finalizing ||
        comm->has_maker) {
        nd_double_violation("NCCL: a call with a communicator that is still in progress");
    }
}

static bool everybody_finalized(ncclComm_t comm)
{
    for (int i = 0; i < comm->size; i++) {
        if (!atomic_load(&comm->shared->members[comm->split][comm->ranks[i]].finalized)) {
            return false;
        }
    }
    return true;
}

static _Atomic int late_looks;

void nd_double_nccl_finalize_late(int looks)
{
    late_looks = looks;
}

/* A member has finalized when its operations have run, and is done when all have. */
static bool finalize(ncclComm_t comm)
{
    if (machine_is_driver(machine_current())) {
        nd_double_drain();
    }
    if (atomic_load(&comm->ran) < comm->enqueued) {
        return false;
    }
    atomic_store(&comm->shared->members[comm->split][comm->world_rank].finalized, 1);
    if (late_looks > 0) {
        late_looks--;
        return false;
    }
    return everybody_finalized(comm);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out)
{
    bool drives = machine_is_driver(machine_current());
    int broken = atomic_load(&comm->shared->broken);
    if (drives && comm->unpolled == 0 && !broken) {
        broken = (int)nccl_launch(comm);
    }
    comm->settled = comm->settled || settle(comm);
    bool done = comm->settled && (!comm->finalizing || finalize(comm)) && comm->unpolled == 0 &&
                comm->begun_count == 0 && (!comm->has_maker || atomic_load(&comm->made));
    if (done) {
        end_maker(comm);
    }
    comm->unpolled -= comm->unpolled > 0;
    *out = broken ? (ncclResult_t)broken : done ? ncclSuccess : ncclInProgress;
    if (drives) { /* the host may look about until NCCL answers */
        machine_current()->settling = *out == ncclInProgress;
    }
    return ncclSuccess;
}

void nd_double_nccl_break(ncclComm_t comm, ncclResult_t result)
{
    atomic_store(&comm->shared->broken, (int)result);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    nccl_need_settled(comm);
    comm->finalizing = true;
    return ncclInProgress;
}

/* All members call it, unless they have finalized; it waits for them. */
ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    comm->finalizing = true;
    while (!finalize(comm)) {
        usleep(1000);
    }
    if (comm->split == WORLD_SPLIT) {
        munmap(comm->shared, file_bytes());
    }
    end_life(comm);
    free(comm);
    return ncclSuccess;
}

static _Atomic int64_t aborts;

int64_t nd_double_nccl_aborts(void)
{
    return aborts;
}

/* Operations in flight end without a result, as aborted kernels do. The abort frees memory, and so
 * waits for what else runs there. The memory stays: queues may hold it. */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    const char *hangs = getenv("ND_DOUBLE_NCCL_ABORT");
    aborts++;
    while (hangs) {
        pause();
    }
    atomic_store(&comm->aborted, true);
    atomic_fetch_add(&comm->shared->given_up, comm->split == WORLD_SPLIT);
    end_maker(comm);
    while (another_runs(comm)) {
        usleep(1000);
    }
    if (machine_is_driver(machine_current())) {
        nd_double_drain();
    }
    return ncclSuccess;
}
