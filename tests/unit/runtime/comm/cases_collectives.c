// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>

#include "tests/unit/runtime/comm/cases.h"

/* The serial model: element i of member r's buffer is a pure function, and so is what each
 * operation must give. */

static double element_value(int member, int64_t i)
{
    uint64_t u = ((uint64_t)i * 31 + (uint64_t)member + 1) * UINT64_C(0x9e3779b97f4a7c15);
    u = (u ^ u >> 32) * UINT64_C(0xd6e8feb86659fd93);
    return (double)(int64_t)(u >> 44) / 1048576.0 -
           0.3; /* 20 bits: rounds in BF16, and its sums in F32 */
}

static void store(nd_dtype dtype, void *buffer, int64_t i, double x)
{
    switch (dtype) {
    case ND_DTYPE_F32:
        ((float *)buffer)[i] = (float)x;
        break;
    case ND_DTYPE_BF16:
        ((nd_bf16 *)buffer)[i] = nd_bf16_from_f32((float)x);
        break;
    case ND_DTYPE_F64:
        ((double *)buffer)[i] = x;
        break;
    case ND_DTYPE_I64:
        ((int64_t *)buffer)[i] = (int64_t)(x * 1e15);
        break;
    case ND_DTYPE_I32:
        ((int32_t *)buffer)[i] = (int32_t)(x * 1e7);
        break;
    default:
        ((uint8_t *)buffer)[i] = (uint8_t)(int64_t)(x * 255);
    }
}

static double plus_or_max(nd_redop redop, double a, double b)
{
    return redop == ND_REDOP_SUM ? a + b : (a > b ? a : b);
}

/* Reduction of `place` over members 0, 1, ... in order, rounded as the contract says. */
static void store_reduced(nd_dtype dtype, nd_redop redop, int size, int64_t place, void *buffer,
                          int64_t i)
{
    unsigned char first[8], next[8];
    store(dtype, first, 0, element_value(0, place));
    float sum = dtype == ND_DTYPE_BF16 ? nd_bf16_to_f32(*(nd_bf16 *)first) : *(float *)first;
    for (int r = 1; r < size; r++) {
        store(dtype, next, 0, element_value(r, place));
        if (dtype == ND_DTYPE_F32) {
            sum = (float)plus_or_max(redop, sum, *(float *)next);
        } else if (dtype == ND_DTYPE_BF16) {
            sum = (float)plus_or_max(redop, sum, nd_bf16_to_f32(*(nd_bf16 *)next));
        } else if (dtype == ND_DTYPE_F64) {
            *(double *)first = plus_or_max(redop, *(double *)first, *(double *)next);
        } else if (dtype == ND_DTYPE_I64) {
            int64_t a = *(int64_t *)first, b = *(int64_t *)next;
            *(int64_t *)first = redop == ND_REDOP_SUM ? a + b : (a > b ? a : b);
        } else {
            int32_t a = *(int32_t *)first, b = *(int32_t *)next;
            *(int32_t *)first = redop == ND_REDOP_SUM ? a + b : (a > b ? a : b);
        }
    }
    if (dtype == ND_DTYPE_F32) {
        *(float *)first = sum;
    } else if (dtype == ND_DTYPE_BF16) {
        *(nd_bf16 *)first = nd_bf16_from_f32(sum);
    }
    size_t element = nd_dtype_size(dtype);
    memcpy((char *)buffer + (size_t)i * element, first, element);
}

typedef struct run {
    nd_comm *comm;
    nd_dtype dtype;
    int64_t count;
    size_t bytes;       /* of count */
    char *a, *b, *want; /* size x count each */
    nd_redop redop;
} run;

static nd_comm_args args_of(const run *t, const char *send, char *recv)
{
    return (nd_comm_args){
        .send = send, .recv = recv, .count = t->count, .dtype = t->dtype, .redop = t->redop};
}

/* An operation whose arguments are those of the run. */
static nd_status call(const run *t, nd_comm_call *operation, const char *send, char *recv)
{
    const nd_comm_args args = args_of(t, send, recv);
    return operation(t->comm, NULL, &args, NULL);
}

static void fill(run *t, char *buffer, int member, int64_t first, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        store(t->dtype, buffer, i, element_value(member, first + i));
    }
}

static nd_status expect(run *t, const char *what, const char *got, int64_t n)
{
    size_t element = nd_dtype_size(t->dtype);
    for (size_t i = 0; i < (size_t)n * element; i++) {
        ND_CHECK(got[i] == t->want[i], "%s of %lld %s: element %zu of %lld is wrong", what,
                 (long long)t->count, nd_dtype_name(t->dtype), i / element, (long long)n);
    }
    return ND_OK;
}

static nd_status check_reductions(run *t, nd_redop redop)
{
    nd_comm *comm = t->comm;
    size_t own = (size_t)comm->index * t->bytes;
    t->redop = redop;
    fill(t, t->a, comm->index, 0, t->count);
    for (int64_t i = 0; i < t->count; i++) {
        store_reduced(t->dtype, redop, comm->size, i, t->want, i);
    }
    ND_TRY(nd_comm_all_reduce(comm, NULL, t->a, t->count, t->dtype, redop, NULL));
    ND_TRY(expect(t, "all_reduce", t->a, t->count));

    fill(t, t->a, comm->index, 0, t->count * comm->size);
    for (int64_t i = 0; i < t->count; i++) {
        store_reduced(t->dtype, redop, comm->size, comm->index * t->count + i, t->want, i);
    }
    ND_TRY(call(t, nd_comm_reduce_scatter, t->a, t->b));
    ND_TRY(expect(t, "reduce_scatter", t->b, t->count));
    char *in_place = t->a + own;
    ND_TRY(call(t, nd_comm_reduce_scatter, t->a, in_place));
    ND_TRY(expect(t, "reduce_scatter in place", in_place, t->count));
    fill(t, t->want, comm->index, 0, t->count * comm->size); /* the rest of send is untouched */
    memcpy(t->want + own, in_place, t->bytes);
    return expect(t, "send side of reduce_scatter", t->a, t->count * comm->size);
}

/* Another number of elements for each pair, none for some. What goes to others counts as sent. */
static nd_status check_uneven(run *t)
{
    enum { MEMBERS_MAX = 64 };
    nd_comm *comm = t->comm;
    const int me = comm->index, n = comm->size;
    const size_t element = nd_dtype_size(t->dtype);
    int64_t sends[MEMBERS_MAX], receives[MEMBERS_MAX];
    ND_CHECK(n <= MEMBERS_MAX, "%d members", n);
    for (int r = 0; r < n; r++) {
        sends[r] = (3 * me + 5 * r) % (t->count + 1);
        receives[r] = (3 * r + 5 * me) % (t->count + 1);
        const int64_t out = nd_comm_elements_before(sends, 0, r),
                      in = nd_comm_elements_before(receives, 0, r);
        fill(t, t->a + (size_t)out * element, me, r * t->count, sends[r]);
        fill(t, t->want + (size_t)in * element, r, me * t->count, receives[r]);
    }
    nd_comm_args args = args_of(t, t->a, t->b);
    args.sends = sends;
    args.receives = receives;
    const int64_t out = nd_comm_elements_before(sends, 0, n) - sends[me],
                  *sent = &comm->stats.bytes_sent[ND_COMM_ALL_TO_ALL], before = *sent;
    ND_TRY(nd_comm_all_to_all(comm, NULL, &args, NULL));
    ND_CHECK(*sent - before == out * (int64_t)element, "%lld bytes were sent of %lld elements",
             (long long)(*sent - before), (long long)out);
    return expect(t, "uneven all_to_all", t->b, nd_comm_elements_before(receives, 0, n));
}

static nd_status check_gathers(run *t)
{
    nd_comm *comm = t->comm;
    for (int r = 0; r < comm->size; r++) {
        fill(t, t->want + (size_t)r * t->bytes, r, 0, t->count);
    }
    fill(t, t->a, comm->index, 0, t->count);
    memset(t->b, 0, t->bytes * (size_t)comm->size);
    ND_TRY(call(t, nd_comm_all_gather, t->a, t->b));
    ND_TRY(expect(t, "all_gather", t->b, t->count * comm->size));
    memset(t->b, 0, t->bytes * (size_t)comm->size);
    char *own = t->b + (size_t)comm->index * t->bytes;
    fill(t, own, comm->index, 0, t->count);
    ND_TRY(call(t, nd_comm_all_gather, own, t->b));
    ND_TRY(expect(t, "all_gather in place", t->b, t->count * comm->size));

    for (int r = 0; r < comm->size; r++) {
        fill(t, t->want + (size_t)r * t->bytes, r, comm->index * t->count, t->count);
    }
    fill(t, t->a, comm->index, 0, t->count * comm->size);
    ND_TRY(call(t, nd_comm_all_to_all, t->a, t->b));
    ND_TRY(expect(t, "all_to_all", t->b, t->count * comm->size));
    return comm->size > 1 ? check_uneven(t) : ND_OK;
}

static nd_status check_moves(run *t)
{
    nd_comm *comm = t->comm;
    for (int root = 0; root < comm->size; root++) {
        fill(t, t->want, root, 0, t->count);
        fill(t, t->a, comm->index, 0, t->count);
        ND_TRY(nd_comm_broadcast(comm, NULL, t->a, t->count, t->dtype, root, NULL));
        ND_TRY(expect(t, "broadcast", t->a, t->count));
    }
    for (int hop = 0; hop < comm->size; hop++) {
        int to = (comm->index + hop) % comm->size;
        int from = (comm->index - hop + comm->size) % comm->size;
        fill(t, t->a, comm->index, 0, t->count);
        fill(t, t->want, from, 0, t->count);
        nd_comm_args args = args_of(t, t->a, t->b);
        args.to = to;
        args.from = from;
        ND_TRY(nd_comm_exchange(comm, NULL, &args, NULL));
        ND_TRY(expect(t, "exchange", t->b, t->count));
    }
    return nd_comm_barrier(comm);
}

static nd_status check_type(run *t, nd_dtype dtype, int64_t count)
{
    nd_status status = ND_OK;
    size_t bytes = (size_t)count * nd_dtype_size(dtype) * (size_t)t->comm->size;
    t->dtype = dtype;
    t->count = count;
    t->bytes = (size_t)count * nd_dtype_size(dtype);
    t->a = t->b = t->want = NULL;
    ND_TRY_OUT(ND_ALLOC(bytes + 64, &t->a));
    ND_TRY_OUT(ND_ALLOC(bytes + 64, &t->b));
    ND_TRY_OUT(ND_ALLOC(bytes + 64, &t->want));
    if (dtype != ND_DTYPE_U8) {
        ND_TRY_OUT(check_reductions(t, ND_REDOP_SUM));
        ND_TRY_OUT(check_reductions(t, ND_REDOP_MAX));
    }
    ND_TRY_OUT(check_gathers(t));
    ND_TRY_OUT(check_moves(t));
out:
    free(t->a);
    free(t->b);
    free(t->want);
    return status;
}

nd_status case_collectives_body(nd_transport *transport, void *context)
{
    static const nd_dtype types[] = {ND_DTYPE_F32, ND_DTYPE_BF16, ND_DTYPE_F64,
                                     ND_DTYPE_I64, ND_DTYPE_I32,  ND_DTYPE_U8};
    case_collectives *c = context;
    run t = {0};
    transport->staging_bytes = c->staging;
    ND_TRY(case_world(transport, &t.comm));
    nd_status status = ND_OK;
    for (int d = 0; d < 6; d++) {
        for (int k = 0; c->counts[k] >= 0; k++) {
            ND_TRY_OUT(check_type(&t, types[d], c->counts[k]));
        }
        if (c->large > 0 && types[d] != ND_DTYPE_I32) {
            double round = (double)nd_comm_staging_bytes(t.comm->size) / 2 / (t.comm->size - 1);
            int64_t count = (int64_t)(c->large * round / (double)nd_dtype_size(types[d])) | 1;
            ND_TRY_OUT(check_type(&t, types[d], count));
        }
    }
out:
    nd_comm_destroy(t.comm);
    return status;
}
