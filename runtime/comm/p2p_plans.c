// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/p2p.h"

#include <string.h>

#include "runtime/base/math.h"
#include "runtime/comm/backend.h"

/* Member at distance k after (before) this one. Message k of every member pairs with message k of
 * that one, so lanes that are posted in order cannot wait for each other in a circle. */
static int after(const nd_comm *comm, int64_t k)
{
    return (int)((comm->index + k) % comm->size);
}

static int before(const nd_comm *comm, int64_t k)
{
    return (int)((comm->index - k + comm->size) % comm->size);
}

static char *staging(const nd_p2p_op *op)
{
    return ((nd_p2p_comm *)op->comm->native)->staging;
}

static const void **sources(const nd_p2p_op *op)
{
    return ((nd_p2p_comm *)op->comm->native)->sources;
}

static void copy_own(void *to, const void *from, size_t bytes)
{
    if (bytes > 0 && to != from) {
        memcpy(to, from, bytes);
    }
}

/* Steps of a doubling schedule: distances 1, 2, 4, ... below n. */
static int doubling_steps(int n)
{
    int steps = 0;
    while ((INT64_C(1) << steps) < n) {
        steps++;
    }
    return steps;
}

/* Direct: every member sends to every other one, straight between the callers' buffers. */

/* The part of an all-to-all that goes to a member, or comes from it. */
static nd_message part_of(const nd_p2p_op *op, bool sends, int member)
{
    const int64_t *counts = sends ? op->args.sends : op->args.receives;
    const int64_t at = nd_comm_elements_before(counts, op->args.count, member);
    char *buffer = sends ? (char *)op->args.send : op->args.recv;
    return (nd_message){member, buffer + (size_t)at * op->element,
                        counts ? (size_t)counts[member] * op->element : op->block};
}

static void direct_begin(nd_p2p_op *op)
{
    const nd_comm *comm = op->comm;
    int64_t total = op->kind == ND_COMM_EXCHANGE ? 1 : comm->size - 1;
    size_t own = (size_t)comm->index * op->block;
    if (op->kind == ND_COMM_ALL_GATHER) {
        copy_own((char *)op->args.recv + own, op->args.send, op->block);
    } else if (op->kind == ND_COMM_ALL_TO_ALL) {
        const nd_message from = part_of(op, true, comm->index),
                         to = part_of(op, false, comm->index);
        copy_own(to.buffer, from.buffer, to.bytes);
    } else if (op->kind == ND_COMM_EXCHANGE && op->args.to == comm->index) {
        copy_own(op->args.recv, op->args.send, op->block);
        total = 0;
    }
    op->lanes[ND_LANE_RECV].total = total;
    op->lanes[ND_LANE_SEND].total = total;
}

static void direct_message(nd_p2p_op *op, int lane, int64_t index, nd_message *out)
{
    bool sends = lane == ND_LANE_SEND;
    int member = sends ? after(op->comm, index + 1) : before(op->comm, index + 1);
    const char *buffer = sends ? op->args.send : op->args.recv;
    if (op->kind == ND_COMM_ALL_TO_ALL) {
        *out = part_of(op, sends, member);
        return;
    }
    if (op->kind == ND_COMM_EXCHANGE) {
        member = sends ? op->args.to : op->args.from;
    } else if (op->kind == ND_COMM_ALL_GATHER && !sends) {
        buffer += (size_t)member * op->block;
    }
    *out = (nd_message){member, (void *)buffer, op->block};
}

const nd_p2p_plan nd_plan_direct = {.begin = direct_begin, .message = direct_message};

/* Gather: a short all-reduce as one exchange among few members; staging holds the block of member
 * (index + k) % size at place k. */

static void gather_finish(nd_p2p_op *op)
{
    const nd_comm *comm = op->comm;
    for (int r = 0; r < comm->size; r++) {
        size_t place = (size_t)((r - comm->index + comm->size) % comm->size);
        const char *block = staging(op) + place * op->block;
        if (op->kind == ND_COMM_ALL_REDUCE) {
            sources(op)[r] = block;
        } else {
            memcpy((char *)op->args.recv + (size_t)r * op->block, block, op->block);
        }
    }
    if (op->kind == ND_COMM_ALL_REDUCE) {
        nd_reduce(op->args.dtype, op->args.redop, op->args.recv, sources(op), comm->size,
                  op->args.count);
    }
}

static void gather_begin(nd_p2p_op *op)
{
    const bool bruck = op->plan == &nd_plan_bruck;
    const int messages = bruck ? doubling_steps(op->comm->size) : op->comm->size - 1;
    copy_own(staging(op), op->args.send, op->block);
    op->lanes[ND_LANE_RECV].total = op->lanes[ND_LANE_SEND].total = messages;
}

static void gather_message(nd_p2p_op *op, int lane, int64_t index, nd_message *out)
{
    if (lane == ND_LANE_SEND) {
        *out = (nd_message){after(op->comm, index + 1), staging(op), op->block};
        return;
    }
    int member = before(op->comm, index + 1);
    size_t place = (size_t)(op->comm->size - (index + 1));
    *out = (nd_message){member, staging(op) + place * op->block, op->block};
}

static void gather_arrived(nd_p2p_op *op, int lane, int64_t index)
{
    if (lane != ND_LANE_RECV) {
        return;
    }
    op->steps_done |= UINT64_C(1) << index; /* a gather is for few members, Bruck's has few steps */
    if (op->block > 0 && op->lanes[lane].done == op->lanes[lane].total) {
        gather_finish(op);
    }
}

const nd_p2p_plan nd_plan_gather = {.needs_staging = true,
                                    .begin = gather_begin,
                                    .message = gather_message,
                                    .arrived = gather_arrived};

/* Bruck: a gather whose step m passes on the first min(2^m, n - 2^m) blocks of the staging to the
 * member 2^m before. A barrier has empty blocks. */

static void bruck_message(nd_p2p_op *op, int lane, int64_t index, nd_message *out)
{
    int64_t distance = INT64_C(1) << index;
    int64_t blocks = op->comm->size - distance < distance ? op->comm->size - distance : distance;
    size_t bytes = (size_t)blocks * op->block;
    if (lane == ND_LANE_SEND) {
        *out = (nd_message){before(op->comm, distance), staging(op), bytes};
    } else {
        *out = (nd_message){after(op->comm, distance), staging(op) + (size_t)distance * op->block,
                            bytes};
    }
}

static bool bruck_ready(const nd_p2p_op *op, int lane, int64_t index)
{
    const uint64_t before = (UINT64_C(1) << index) - 1;
    return lane != ND_LANE_SEND || (op->steps_done & before) == before;
}

const nd_p2p_plan nd_plan_bruck = {.needs_staging = true,
                                   .begin = gather_begin,
                                   .message = bruck_message,
                                   .ready = bruck_ready,
                                   .arrived = gather_arrived};

/* Tree: relative place v = (index - root) mod n; its parent clears v's lowest bit, its children set
 * a lower one. */

static int tree_place(const nd_p2p_op *op)
{
    return (op->comm->index - op->args.root + op->comm->size) % op->comm->size;
}

/* Child `index` of this member, farthest first, or the number of children when `index` is -1. */
static int tree_child(const nd_p2p_op *op, int64_t index)
{
    int place = tree_place(op), n = op->comm->size;
    int children = 0, bit = place == 0 ? 1 << doubling_steps(n) : place & -place;
    for (bit >>= 1; bit > 0; bit >>= 1) {
        if (place + bit < n && children++ == index) {
            return place + bit;
        }
    }
    return children;
}

static void tree_begin(nd_p2p_op *op)
{
    op->lanes[ND_LANE_RECV].total = tree_place(op) == 0 ? 0 : 1;
    op->lanes[ND_LANE_SEND].total = tree_child(op, -1);
}

static void tree_message(nd_p2p_op *op, int lane, int64_t index, nd_message *out)
{
    int place = tree_place(op);
    int other = lane == ND_LANE_SEND ? tree_child(op, index) : place & (place - 1);
    *out = (nd_message){(other + op->args.root) % op->comm->size, op->args.recv, op->block};
}

static bool tree_ready(const nd_p2p_op *op, int lane, int64_t index)
{
    return lane != ND_LANE_SEND || op->lanes[ND_LANE_RECV].done == op->lanes[ND_LANE_RECV].total;
}

const nd_p2p_plan nd_plan_tree = {
    .begin = tree_begin, .message = tree_message, .ready = tree_ready};

/*
 * Reduce: member j owns slice j. In rounds of `chunk` elements, every member sends its part of
 * slice j to member j, which receives into one half of the staging while the other half is reduced;
 * an all-reduce then returns the result. A result may land in a slice whose own contribution is
 * still counted as being sent: its owner has received it.
 */

static int64_t slice_begin(const nd_p2p_op *op, int member)
{
    if (op->kind == ND_COMM_REDUCE_SCATTER) {
        return op->args.count * member;
    }
    return op->args.count / op->comm->size * member +
           op->args.count % op->comm->size * member / op->comm->size;
}

/* Elements of round `round` of a member's slice; 0 behind its end. */
static int64_t round_length(const nd_p2p_op *op, int member, int64_t round)
{
    int64_t length = slice_begin(op, member + 1) - slice_begin(op, member) - round * op->chunk;
    return length < 0 ? 0 : length < op->chunk ? length : op->chunk;
}

static void reduce_begin(nd_p2p_op *op)
{
    const nd_comm *comm = op->comm;
    const size_t place =
        ((nd_p2p_comm *)comm->native)->staging_bytes / 2 / (size_t)(comm->size - 1);
    op->chunk = (int64_t)(place / 64 * 64 / op->element);
    int64_t longest =
        op->kind == ND_COMM_REDUCE_SCATTER ? op->args.count : op->args.count / comm->size + 1;
    int64_t messages = nd_ceil_div(longest, op->chunk) * (comm->size - 1);
    op->waiting[0] = op->waiting[1] = comm->size - 1;
    for (int lane = 0; lane < ND_LANE_COUNT; lane++) {
        bool result = lane == ND_LANE_RECV_RESULT || lane == ND_LANE_SEND_RESULT;
        op->lanes[lane].total = result && op->kind == ND_COMM_REDUCE_SCATTER ? 0 : messages;
    }
}

static char *staging_place(const nd_p2p_op *op, int64_t round, int64_t k)
{
    int64_t others = op->comm->size - 1;
    return staging(op) + (size_t)((round & 1) * others + k - 1) * (size_t)op->chunk * op->element;
}

static char *result_of(const nd_p2p_op *op, int member, int64_t round)
{
    int64_t at = op->kind == ND_COMM_REDUCE_SCATTER ? 0 : slice_begin(op, member);
    return (char *)op->args.recv + (size_t)(at + round * op->chunk) * op->element;
}

static void reduce_message(nd_p2p_op *op, int lane, int64_t index, nd_message *out)
{
    const nd_comm *comm = op->comm;
    int64_t round = index / (comm->size - 1), k = index % (comm->size - 1) + 1;
    bool sends = lane == ND_LANE_SEND || lane == ND_LANE_SEND_RESULT;
    int member = sends ? after(comm, k) : before(comm, k);
    bool of_other = lane == ND_LANE_SEND || lane == ND_LANE_RECV_RESULT; /* the other's slice */
    int64_t length = round_length(op, of_other ? member : comm->index, round);
    char *buffer = NULL;
    if (lane == ND_LANE_RECV) {
        buffer = staging_place(op, round, k);
    } else if (lane == ND_LANE_SEND) {
        int64_t at = slice_begin(op, member) + round * op->chunk;
        buffer = (char *)op->args.send + (size_t)at * op->element;
    } else {
        buffer = result_of(op, of_other ? member : comm->index, round);
    }
    *out = (nd_message){member, length > 0 ? buffer : NULL, (size_t)length * op->element};
}

static bool reduce_ready(const nd_p2p_op *op, int lane, int64_t index)
{
    int64_t round = index / (op->comm->size - 1);
    if (lane == ND_LANE_RECV) { /* its half of the staging has been reduced */
        return op->reduced[round & 1] == round / 2;
    }
    if (lane == ND_LANE_SEND_RESULT) {
        return op->reduced[round & 1] > round / 2;
    }
    return true;
}

static void reduce_arrived(nd_p2p_op *op, int lane, int64_t index)
{
    const nd_comm *comm = op->comm;
    int64_t round = index / (comm->size - 1);
    if (lane != ND_LANE_RECV || --op->waiting[round & 1] > 0) {
        return;
    }
    int64_t length = round_length(op, comm->index, round);
    int64_t own = slice_begin(op, comm->index) + round * op->chunk;
    for (int r = 0; length > 0 && r < comm->size; r++) {
        int k = (comm->index - r + comm->size) % comm->size;
        sources(op)[r] = k == 0 ? (const char *)op->args.send + (size_t)own * op->element
                                : staging_place(op, round, k);
    }
    if (length > 0) {
        nd_reduce(op->args.dtype, op->args.redop, result_of(op, comm->index, round), sources(op),
                  comm->size, length);
    }
    op->waiting[round & 1] = comm->size - 1;
    op->reduced[round & 1]++;
}

const nd_p2p_plan nd_plan_reduce = {.needs_staging = true,
                                    .begin = reduce_begin,
                                    .message = reduce_message,
                                    .ready = reduce_ready,
                                    .arrived = reduce_arrived};
