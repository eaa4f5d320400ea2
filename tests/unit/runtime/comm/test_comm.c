// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>

#include <string.h>

#include "runtime/comm/comm.h"

static nd_progress_slot slot;
static nd_device *device;
static nd_stream stream;
static nd_transport *transport;
static nd_groups groups;
static nd_comm *tp;

static void setup(void)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    cr_assert_eq(nd_device_open_cpu(1, &device), ND_OK);
    cr_assert_eq(device->table->stream_init(device, &stream), ND_OK);
    cr_assert_eq(nd_transport_open_self(&slot, &transport), ND_OK);
    cr_assert_eq(nd_groups_create(transport, &one, &groups), ND_OK);
    tp = groups.by_kind[ND_GROUP_TP];
}

static void teardown(void)
{
    nd_groups_destroy(&groups);
    nd_transport_close(transport);
    nd_device_close(device);
}

TestSuite(self, .init = setup, .fini = teardown);

#define FLOATS(from, to, n)                                                                        \
    (&(nd_comm_args){.send = (from), .recv = (to), .count = (n), .dtype = ND_DTYPE_F32})

Test(self, moves_at_most_one_copy)
{
    float a[3] = {1, 2, 3}, b[3] = {0};
    nd_event done = {.finish =
                         (nd_status(*)(void *))1}; /* must be cleared, or waiting would crash */
    cr_assert_eq(nd_comm_all_gather(tp, &stream, FLOATS(a, b, 3), &done), ND_OK);
    cr_assert_eq(nd_stream_wait(&stream, &done), ND_OK);
    cr_assert_eq(memcmp(a, b, sizeof a), 0);
    cr_assert_eq(nd_comm_reduce_scatter(tp, &stream, FLOATS(a, a, 3), NULL), ND_OK);
    cr_assert_eq(nd_comm_all_reduce(tp, &stream, a, 3, ND_DTYPE_F32, ND_REDOP_MAX, &done), ND_OK);
    cr_assert_null(done.finish);
    cr_assert_eq(memcmp(a, b, sizeof a), 0);
    b[1] = 7;
    cr_assert_eq(nd_comm_exchange(tp, NULL, FLOATS(b, a, 3), NULL), ND_OK);
    cr_assert_eq(a[1], 7);
    cr_assert_eq(nd_comm_barrier(tp), ND_OK);
    cr_assert_eq(tp->sequence, 5);
    cr_assert_eq(tp->stats.calls[ND_COMM_ALL_GATHER], 1);
    cr_assert_eq(tp->stats.bytes_sent[ND_COMM_ALL_GATHER], 0);
}

static void expect_refused(nd_status status, const char *words)
{
    cr_expect_eq(status, ND_ERR_INTERNAL);
    cr_expect(strstr(nd_error_last()->message, words), "%s", nd_error_last()->message);
}

Test(self, requests_without_sense_are_refused)
{
    float a[8] = {0};
    expect_refused(nd_comm_all_reduce(tp, NULL, a, -1, ND_DTYPE_F32, ND_REDOP_SUM, NULL),
                   "is not a request");
    expect_refused(nd_comm_all_reduce(tp, NULL, a, 8, ND_DTYPE_F8_E4M3, ND_REDOP_SUM, NULL), "f8");
    expect_refused(nd_comm_broadcast(tp, NULL, a, 8, ND_DTYPE_F32, 1, NULL),
                   "member 1 of a group of 1");
    expect_refused(nd_comm_all_gather(tp, NULL, FLOATS(a, a + 2, 4), NULL), "overlap");
    expect_refused(nd_comm_all_gather(tp, NULL, FLOATS(NULL, a, 4), NULL), "no buffer");
    expect_refused(nd_comm_all_gather(tp, NULL, FLOATS(a, NULL, 4), NULL), "no buffer");
    expect_refused(nd_comm_reduce_scatter(tp, NULL, FLOATS(a + 2, a, 4), NULL), "overlap");
    expect_refused(nd_comm_all_reduce(tp, NULL, a, 8, ND_DTYPE_F32, (nd_redop)2, NULL),
                   "reduction");
    nd_comm_args args = {.send = a, .recv = a + 4, .count = 4, .dtype = ND_DTYPE_U8, .from = -1};
    expect_refused(nd_comm_reduce_scatter(tp, NULL, &args, NULL), "no reduction");
    expect_refused(nd_comm_exchange(tp, NULL, &args, NULL), "member -1 of a group of 1");
    cr_assert_eq(tp->sequence, 0, "a refused request takes no number");
}
