// SPDX-License-Identifier: Apache-2.0
/* Operations of NCCL's double. */
#include <math.h>
#include <string.h>

#include "runtime/tensor/dtype.h"
#include "tests/hostcuda/doubles/double.h"
#include "tests/hostcuda/doubles/nccl_double.h"
#include "tests/hostcuda/doubles/nccl_parts.h"

static member *member_of(const call *c, int index)
{
    return &c->comm->shared->members[c->comm->split][c->comm->ranks[index]];
}

/* Returns where a member of the call's communicator publishes its data for this call. */
static char *buffer_of(const call *c, int index)
{
    size_t at = ((size_t)c->comm->split * RANKS + (size_t)c->comm->ranks[index]) * 2;
    return c->comm->data + (at + (c->number & 1)) * CAPACITY;
}

static size_t width_of(ncclDataType_t type)
{
    return type == ncclFloat64 || type == ncclInt64   ? 8
           : type == ncclFloat32 || type == ncclInt32 ? 4
           : type == ncclBfloat16                     ? 2
                                                      : 1;
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

static size_t sent_bytes(const call *c)
{
    size_t whole = c->count * width_of(c->type), sum = 0;
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
    size_t bytes = c->count * width_of(c->type);
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
    if (atomic_load(&c->comm->aborted)) {
        return ND_DOUBLE_DONE;
    }
    c->published = c->published || publish(c);
    if (!c->published || !everybody_published(c)) {
        return ND_DOUBLE_BLOCKED;
    }
    consume(c);
    atomic_store(&member_of(c, c->comm->index)->consumed, c->number);
    atomic_fetch_add(&c->comm->ran, 1);
    return ND_DOUBLE_DONE;
}

ncclResult_t nccl_launch(ncclComm_t comm)
{
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < comm->begun_count && error == cudaSuccess; i++) {
        error = nd_double_submit(comm->begun_stream, run, &comm->begun[i], sizeof comm->begun[i]);
    }
    comm->begun_count = 0;
    return error == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

/* As in NCCL, where a thread launches it: when the communicator is polled to its end it is in the
 * queue, and what the caller puts there before comes first. */
static ncclResult_t enqueue(call *c, cudaStream_t stream)
{
    int broken = atomic_load(&c->comm->shared->broken);
    if (broken) {
        return (ncclResult_t)broken;
    }
    if (sent_bytes(c) > CAPACITY) {
        nd_double_violation("NCCL: %zu bytes are more than the double moves at a time (%d)",
                            sent_bytes(c), CAPACITY);
    }
    c->number = ++c->comm->enqueued;
    c->comm->unpolled = 1;
    c->comm->begun_stream = stream;
    c->comm->begun[c->comm->begun_count++] = *c;
    return ncclInProgress;
}

static _Thread_local struct {
    bool open;
    cudaStream_t stream;
    call call; /* sends and receives */
    int collective_count;
    call collectives[COLLECTIVES];
} group;

static _Atomic int64_t groups_of_collectives;

int64_t nd_double_nccl_groups(void)
{
    return groups_of_collectives;
}

/* NCCL allows more; the product's groups are of one communicator on one stream. */
static void join_group(ncclComm_t comm, cudaStream_t stream)
{
    if (group.stream && (group.stream != stream || group.call.comm != comm)) {
        nd_double_violation("NCCL: two streams or communicators in one group");
    }
    group.stream = stream;
    group.call.comm = comm;
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
    nd_double_need_device("NCCL's send buffer", send, send_count * width_of(type));
    nd_double_need_device("NCCL's receive buffer", recv, recv_count * width_of(type));
    nccl_need_settled(comm);
    if (!group.open) {
        return enqueue(&c, stream);
    }
    if (group.collective_count == COLLECTIVES || group.call.pair_count > 0) {
        nd_double_violation("NCCL: more than %d collectives in a group, or with sends",
                            COLLECTIVES);
    }
    join_group(comm, stream);
    group.collectives[group.collective_count++] = c;
    return ncclSuccess;
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

ncclResult_t ncclGroupStart(void)
{
    group.open = true;
    group.stream = NULL;
    group.collective_count = 0;
    memset(&group.call, 0, sizeof group.call);
    group.call.kind = GROUP;
    return ncclSuccess;
}

static ncclResult_t add_pair(pair p, ncclComm_t comm, cudaStream_t stream)
{
    if (!group.open || group.call.pair_count == PAIRS || group.collective_count > 0) {
        nd_double_violation("NCCL: a send or receive outside of a group, beside collectives, or "
                            "too many");
    }
    nd_double_need_device("NCCL's buffer", p.buffer, p.bytes);
    nccl_need_settled(comm);
    join_group(comm, stream);
    group.call.pairs[group.call.pair_count++] = p;
    return ncclSuccess;
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream)
{
    return add_pair((pair){false, (char *)send, count * width_of(type), peer}, comm, stream);
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return add_pair((pair){true, recv, count * width_of(type), peer}, comm, stream);
}

ncclResult_t ncclGroupEnd(void)
{
    group.open = false;
    groups_of_collectives += group.collective_count > 0;
    for (int i = 0; i < group.collective_count; i++) {
        ncclResult_t result = enqueue(&group.collectives[i], group.stream);
        if (result != ncclInProgress || i + 1 == group.collective_count) {
            return result;
        }
    }
    return group.stream ? enqueue(&group.call, group.stream) : ncclSuccess;
}
