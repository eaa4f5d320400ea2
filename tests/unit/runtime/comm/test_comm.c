// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>

#include <string.h>

#include "runtime/comm/comm.h"

typedef struct fixture {
    nd_progress_slot slot;
    nd_device *device;
    nd_stream stream;
    nd_transport *transport;
    nd_groups groups;
} fixture;

static void setup(fixture *f)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    memset(f, 0, sizeof *f);
    cr_assert_eq(nd_device_open_cpu(1, &f->device), ND_OK);
    cr_assert_eq(f->device->table->stream_init(f->device, &f->stream), ND_OK);
    cr_assert_eq(nd_transport_open_self(&f->slot, &f->transport), ND_OK);
    cr_assert_eq(nd_groups_create(f->transport, &one, &f->groups), ND_OK);
}

static void teardown(fixture *f)
{
    nd_groups_destroy(&f->groups);
    nd_transport_close(f->transport);
    nd_device_close(f->device);
}

#define FLOATS(from, to, n)                                                                        \
    (&(nd_comm_args){.send = (from), .recv = (to), .count = (n), .dtype = ND_DTYPE_F32})

Test(self, moves_at_most_one_copy)
{
    fixture f;
    setup(&f);
    nd_comm *tp = f.groups.by_kind[ND_GROUP_TP];
    float a[3] = {1, 2, 3}, b[3] = {0};
    nd_event done = {.finish =
                         (nd_status(*)(void *))1}; /* must be cleared, or waiting would crash */
    cr_assert_eq(nd_comm_all_gather(tp, &f.stream, FLOATS(a, b, 3), &done), ND_OK);
    cr_assert_eq(nd_stream_wait(&f.stream, &done), ND_OK);
    cr_assert_eq(memcmp(a, b, sizeof a), 0);
    cr_assert_eq(nd_comm_reduce_scatter(tp, &f.stream, FLOATS(a, a, 3), NULL), ND_OK);
    cr_assert_eq(nd_comm_all_reduce(tp, &f.stream, a, 3, ND_DTYPE_F32, ND_REDOP_MAX, &done), ND_OK);
    cr_assert_null(done.finish);
    cr_assert_eq(memcmp(a, b, sizeof a), 0);
    b[1] = 7;
    cr_assert_eq(nd_comm_exchange(tp, NULL, FLOATS(b, a, 3), NULL), ND_OK);
    cr_assert_eq(a[1], 7);
    cr_assert_eq(nd_comm_barrier(tp), ND_OK);
    cr_assert_eq(tp->sequence, 5);
    cr_assert_eq(tp->stats.calls[ND_COMM_ALL_GATHER], 1);
    cr_assert_eq(tp->stats.bytes_sent[ND_COMM_ALL_GATHER], 0);
    teardown(&f);
}

static void expect_refused(nd_status status, const char *words)
{
    cr_expect_eq(status, ND_ERR_INTERNAL);
    cr_expect(strstr(nd_error_last()->message, words), "%s", nd_error_last()->message);
}

Test(self, requests_without_sense_are_refused)
{
    fixture f;
    setup(&f);
    nd_comm *tp = f.groups.by_kind[ND_GROUP_TP];
    float a[8] = {0};
    expect_refused(nd_comm_all_reduce(tp, NULL, a, -1, ND_DTYPE_F32, ND_REDOP_SUM, NULL),
                   "is not a request");
    expect_refused(nd_comm_all_reduce(tp, NULL, a, 8, ND_DTYPE_F8_E4M3, ND_REDOP_SUM, NULL), "f8");
    expect_refused(nd_comm_broadcast(tp, NULL, a, 8, ND_DTYPE_F32, 1, NULL),
                   "member 1 of a group of 1");
    expect_refused(nd_comm_all_gather(tp, NULL, FLOATS(a, a + 2, 4), NULL), "overlap");
    expect_refused(nd_comm_all_gather(tp, NULL, FLOATS(NULL, a, 4), NULL), "no buffer");
    cr_assert_eq(tp->sequence, 0, "a refused request takes no number");
    teardown(&f);
}
