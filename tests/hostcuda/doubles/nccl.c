// SPDX-License-Identifier: Apache-2.0
/*
 * A double of NCCL among the threads or processes of one host: a file mapped by all ranks, named in
 * the unique id and unlinked once all have mapped it. An operation is numbered when it is enqueued;
 * when it runs, each member publishes its part in its own buffer, reads everybody's, and says so.
 * Members that enqueue different operations as the same number abort with a sentence, where NCCL
 * would hang or corrupt memory.
 */
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <nccl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "runtime/tensor/dtype.h"
#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/doubles/nccl_double.h"

enum { RANKS = 16, SPLITS = 40, PAIRS = 2 * RANKS, CAPACITY = 16 << 20, WORLD_SPLIT = 0 };

typedef struct member { /* of one split, indexed by world rank */
    _Atomic int ready;
    _Atomic int color, key;
    _Atomic uint64_t published, consumed;
    _Atomic uint64_t signature[2];  /* of the operation in each half */
    _Atomic int64_t sent[2][RANKS]; /* group calls: bytes for each member, one after the other */
} member;

typedef struct shared {
    _Atomic int joined, broken;
    member members[SPLITS][RANKS];
} shared;

struct ncclComm {
    shared *shared;
    char *data; /* [SPLITS][RANKS][2][CAPACITY] */
    int world_rank, world_size, split, next_split;
    int size, index, ranks[RANKS];
    uint64_t enqueued;
    bool settled, aborted;
    int color, key;
};

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
    return "";
}

/* Pages of the file are made when they are touched; a small /dev/shm is passed over. */
ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    struct statvfs space;
    bool shm = statvfs("/dev/shm", &space) == 0 && space.f_bavail * space.f_frsize > 512UL << 20;
    snprintf(id->internal, sizeof id->internal, "%s/nd-nccl-XXXXXX", shm ? "/dev/shm" : "/tmp");
    int fd = mkstemp(id->internal);
    if (fd < 0 || ftruncate(fd, (off_t)file_bytes()) != 0) {
        return ncclSystemError;
    }
    close(fd);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    if (config->blocking != 0) {
        nd_double_violation("NCCL: a blocking communicator");
    }
    if (size > RANKS || rank < 0 || rank >= size) {
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
    if (atomic_fetch_add(&comm->shared->joined, 1) + 1 == size) {
        unlink(id.internal);
    }
    *out = comm;
    return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *out,
                           ncclConfig_t *config)
{
    if (config->blocking != 0 || !parent->settled || parent->split != WORLD_SPLIT) {
        nd_double_violation("NCCL: a split of a communicator that is not ready, or blocking");
    }
    if (parent->next_split == SPLITS) {
        nd_double_violation("NCCL: more than %d splits", SPLITS - 1);
    }
    ncclComm_t comm = calloc(1, sizeof *comm);
    *comm = *parent;
    comm->split = parent->next_split++;
    comm->settled = false;
    comm->enqueued = 0;
    comm->color = color;
    comm->key = key;
    member *mine = &comm->shared->members[comm->split][comm->world_rank];
    atomic_store(&mine->color, color);
    atomic_store(&mine->key, key);
    atomic_store(&mine->ready, 1);
    *out = comm;
    return ncclInProgress;
}

/* A split is made once every rank of the world has said its color; members are in the order of
 * their keys. */
static bool settle(ncclComm_t comm)
{
    if (comm->split == WORLD_SPLIT) {
        return atomic_load(&comm->shared->joined) == comm->world_size;
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
                comm->index = r == comm->world_rank ? comm->size : comm->index;
                comm->ranks[comm->size++] = r;
            }
        }
    }
    return true;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *out)
{
    comm->settled = comm->settled || settle(comm);
    *out = atomic_load(&comm->shared->broken) ? ncclRemoteError
           : comm->settled                    ? ncclSuccess
                                              : ncclInProgress;
    return ncclSuccess;
}

void nd_double_nccl_break(ncclComm_t comm)
{
    atomic_store(&comm->shared->broken, 1);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    if (comm->split == WORLD_SPLIT) {
        munmap(comm->shared, file_bytes());
    }
    free(comm);
    return ncclSuccess;
}

/* Operations in flight end without a result, as kernels do that are told to. The memory stays:
 * queues may hold it. */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    comm->aborted = true;
    nd_double_drain();
    return ncclSuccess;
}

typedef enum kind { ALL_REDUCE = 1, ALL_GATHER, REDUCE_SCATTER, BROADCAST, GROUP } kind;

typedef struct pair {
    bool receives;
    char *buffer;
    size_t bytes;
    int peer;
} pair;

typedef struct call {
    ncclComm_t comm;
    kind kind;
    const char *send;
    char *recv;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int root;
    uint64_t number;
    bool published;
    int pair_count;
    pair pairs[PAIRS];
} call;

static size_t width(ncclDataType_t type)
{
    return type == ncclFloat64 || type == ncclInt64   ? 8
           : type == ncclFloat32 || type == ncclInt32 ? 4
           : type == ncclBfloat16                     ? 2
                                                      : 1;
}

static member *member_of(const call *c, int index)
{
    return &c->comm->shared->members[c->comm->split][c->comm->ranks[index]];
}

static char *buffer_of(const call *c, int index)
{
    size_t at = ((size_t)c->comm->split * RANKS + (size_t)c->comm->ranks[index]) * 2;
    return c->comm->data + (at + (c->number & 1)) * CAPACITY;
}

static size_t sent_bytes(const call *c)
{
    size_t whole = c->count * width(c->type), sum = 0;
    switch (c->kind) {
    case REDUCE_SCATTER:
        return whole * (size_t)c->comm->size;
    case BROADCAST:
        return c->comm->index == c->root ? whole : 0;
    case GROUP:
        for (int i = 0; i < c->pair_count; i++) {
            sum += c->pairs[i].receives ? 0 : c->pairs[i].bytes;
        }
        return sum;
    default:
        return whole;
    }
}

static uint64_t signature_of(const call *c)
{
    uint64_t count = c->kind == GROUP ? 0 : (uint64_t)c->count;
    return (uint64_t)c->kind | (uint64_t)c->type << 4 | (uint64_t)c->op << 12 |
           (uint64_t)c->root << 16 | count << 24;
}

/* False while a member has not read what the same half held before. */
static bool publish(const call *c)
{
    const ncclComm_t comm = c->comm;
    int half = (int)(c->number & 1);
    for (int i = 0; i < comm->size; i++) {
        if (c->number > 2 && atomic_load(&member_of(c, i)->consumed) < c->number - 2) {
            return false;
        }
    }
    member *mine = member_of(c, comm->index);
    char *to = buffer_of(c, comm->index);
    if (c->kind == GROUP) {
        for (int m = 0; m < comm->size; m++) {
            int64_t bytes = 0;
            for (int i = 0; i < c->pair_count; i++) {
                if (!c->pairs[i].receives && c->pairs[i].peer == m) {
                    memcpy(to, c->pairs[i].buffer, c->pairs[i].bytes);
                    to += c->pairs[i].bytes;
                    bytes += (int64_t)c->pairs[i].bytes;
                }
            }
            atomic_store(&mine->sent[half][m], bytes);
        }
    } else if (sent_bytes(c) > 0) {
        memcpy(to, c->send, sent_bytes(c));
    }
    atomic_store(&mine->signature[half], signature_of(c));
    atomic_store(&mine->published, c->number);
    return true;
}

static bool everybody_published(const call *c)
{
    for (int i = 0; i < c->comm->size; i++) {
        const member *m = member_of(c, i);
        if (atomic_load(&m->published) < c->number) {
            return false;
        }
        if (atomic_load(&m->signature[c->number & 1]) != signature_of(c)) {
            nd_double_violation("NCCL: ranks %d and %d called different operations as number %lu",
                                c->comm->world_rank, c->comm->ranks[i], (unsigned long)c->number);
        }
    }
    return true;
}

static double get(const char *p, ncclDataType_t type, size_t i)
{
    switch (type) {
    case ncclFloat32:
        return ((const float *)p)[i];
    case ncclFloat64:
        return ((const double *)p)[i];
    case ncclBfloat16:
        return nd_bf16_to_f32(((const nd_bf16 *)p)[i]);
    case ncclInt32:
        return ((const int32_t *)p)[i];
    default:
        return ((const uint8_t *)p)[i];
    }
}

static void put(char *p, ncclDataType_t type, size_t i, double value)
{
    switch (type) {
    case ncclFloat32:
        ((float *)p)[i] = (float)value;
        break;
    case ncclFloat64:
        ((double *)p)[i] = value;
        break;
    case ncclBfloat16:
        ((nd_bf16 *)p)[i] = nd_bf16_from_f32((float)value);
        break;
    case ncclInt32:
        ((int32_t *)p)[i] = (int32_t)value;
        break;
    default:
        ((uint8_t *)p)[i] = (uint8_t)value;
    }
}

/* In the order of a ring that ends at the first member, rounded at each hop to the type itself. */
static void reduce(const call *c, size_t from, size_t count, char *out)
{
    for (size_t i = 0; i < count; i++) {
        if (c->type == ncclInt64) {
            int64_t sum = ((const int64_t *)buffer_of(c, 0))[from + i];
            for (int m = 1; m < c->comm->size; m++) {
                int64_t x = ((const int64_t *)buffer_of(c, m))[from + i];
                sum = c->op == ncclMax ? (x > sum ? x : sum) : sum + x;
            }
            ((int64_t *)out)[i] = sum;
            continue;
        }
        double sum = get(buffer_of(c, c->comm->size - 1), c->type, from + i);
        for (int m = c->comm->size - 2; m >= 0; m--) {
            double x = get(buffer_of(c, m), c->type, from + i);
            sum = c->op == ncclMax ? fmax(x, sum) : sum + x;
            put(out, c->type, i, sum);
            sum = get(out, c->type, i);
        }
        put(out, c->type, i, sum);
    }
}

static void receive_group(const call *c)
{
    int half = (int)(c->number & 1);
    size_t taken[RANKS] = {0};
    for (int i = 0; i < c->pair_count; i++) {
        const pair *p = &c->pairs[i];
        if (!p->receives) {
            continue;
        }
        const member *from = member_of(c, p->peer);
        const char *at = buffer_of(c, p->peer) + taken[p->peer];
        for (int m = 0; m < c->comm->index; m++) {
            at += atomic_load(&from->sent[half][m]);
        }
        taken[p->peer] += p->bytes;
        if ((int64_t)taken[p->peer] > atomic_load(&from->sent[half][c->comm->index])) {
            nd_double_violation("NCCL: rank %d receives more from member %d than that sends",
                                c->comm->world_rank, p->peer);
        }
        memcpy(p->buffer, at, p->bytes);
    }
}

static void consume(const call *c)
{
    size_t bytes = c->count * width(c->type);
    switch (c->kind) {
    case ALL_REDUCE:
        reduce(c, 0, c->count, c->recv);
        break;
    case ALL_GATHER:
        for (int m = 0; m < c->comm->size; m++) {
            memcpy(c->recv + (size_t)m * bytes, buffer_of(c, m), bytes);
        }
        break;
    case REDUCE_SCATTER:
        reduce(c, (size_t)c->comm->index * c->count, c->count, c->recv);
        break;
    case BROADCAST:
        memcpy(c->recv, buffer_of(c, c->root), bytes);
        break;
    case GROUP:
        receive_group(c);
        break;
    }
}

static nd_double_state run(void *closure)
{
    call *c = closure;
    if (c->comm->aborted) {
        return ND_DOUBLE_DONE;
    }
    c->published = c->published || publish(c);
    if (!c->published || !everybody_published(c)) {
        return ND_DOUBLE_BLOCKED;
    }
    consume(c);
    atomic_store(&member_of(c, c->comm->index)->consumed, c->number);
    return ND_DOUBLE_DONE;
}

static ncclResult_t enqueue(call *c, cudaStream_t stream)
{
    if (!c->comm->settled) {
        nd_double_violation("NCCL: an operation on a communicator that is still in progress");
    }
    if (atomic_load(&c->comm->shared->broken)) {
        return ncclRemoteError;
    }
    if (sent_bytes(c) > CAPACITY) {
        nd_double_violation("NCCL: %zu bytes are more than the double moves at a time (%d)",
                            sent_bytes(c), CAPACITY);
    }
    c->number = ++c->comm->enqueued;
    return nd_double_submit(stream, run, c, sizeof *c) == cudaSuccess ? ncclSuccess
                                                                      : ncclUnhandledCudaError;
}

static ncclResult_t collective(kind what, const void *send, size_t send_count, void *recv,
                               size_t recv_count, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               int root, ncclComm_t comm, cudaStream_t stream)
{
    call c = {.comm = comm,
              .kind = what,
              .send = send,
              .recv = recv,
              .count = count,
              .type = type,
              .op = op,
              .root = root};
    nd_double_need_device("NCCL's send buffer", send, send_count * width(type));
    nd_double_need_device("NCCL's receive buffer", recv, recv_count * width(type));
    return enqueue(&c, stream);
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    return collective(ALL_REDUCE, send, count, recv, count, count, type, op, 0, comm, stream);
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream)
{
    return collective(ALL_GATHER, send, count, recv, count * (size_t)comm->size, count, type,
                      ncclSum, 0, comm, stream);
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)
{
    return collective(REDUCE_SCATTER, send, count * (size_t)comm->size, recv, count, count, type,
                      op, 0, comm, stream);
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream)
{
    return collective(BROADCAST, send, count, recv, count, count, type, ncclSum, root, comm,
                      stream);
}

static _Thread_local struct {
    bool open;
    cudaStream_t stream;
    call call;
} group;

ncclResult_t ncclGroupStart(void)
{
    group.open = true;
    group.stream = NULL;
    memset(&group.call, 0, sizeof group.call);
    group.call.kind = GROUP;
    return ncclSuccess;
}

static ncclResult_t add_pair(pair p, ncclComm_t comm, cudaStream_t stream)
{
    if (!group.open || group.call.pair_count == PAIRS) {
        nd_double_violation("NCCL: a send or receive outside of a group, or too many");
    }
    if (group.stream && (group.stream != stream || group.call.comm != comm)) {
        nd_double_violation("NCCL: two streams or communicators in one group");
    }
    nd_double_need_device("NCCL's buffer", p.buffer, p.bytes);
    group.stream = stream;
    group.call.comm = comm;
    group.call.pairs[group.call.pair_count++] = p;
    return ncclSuccess;
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    return add_pair((pair){false, (char *)send, count * width(type), peer}, comm, stream);
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return add_pair((pair){true, recv, count * width(type), peer}, comm, stream);
}

ncclResult_t ncclGroupEnd(void)
{
    group.open = false;
    return group.stream ? enqueue(&group.call, group.stream) : ncclSuccess;
}
