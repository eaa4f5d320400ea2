// SPDX-License-Identifier: Apache-2.0
/* Streams, events, copies and graphs of the CUDA device; and that its double notices a missing
 * wait. */
#include <criterion/criterion.h>
#include <signal.h>
#include <string.h>

#include "runtime/device/cuda.h"
#include "runtime/device/cuda_check.h"
#include "runtime/device/memplan.h"
#include "tests/hostcuda/doubles/double.h"

enum { N = 1000 };

typedef struct fixture {
    nd_device *device;
    nd_stream compute, other;
    nd_event event;
    int *memory; /* N, on the device */
    int *pinned; /* N */
} fixture;

static fixture begin(int order)
{
    fixture f;
    nd_cuda_options options = {.local_workers = 1};
    nd_double_machine_get()->order = order;
    cr_assert_eq(nd_device_open_cuda(&options, &f.device), ND_OK);
    cr_assert_eq(f.device->table->stream_init(f.device, &f.compute), ND_OK);
    cr_assert_eq(f.device->table->stream_init(f.device, &f.other), ND_OK);
    cr_assert_eq(f.device->table->event_init(f.device, &f.event), ND_OK);
    cr_assert_eq(nd_device_alloc(f.device, N * sizeof(int), (void **)&f.memory), ND_OK);
    cr_assert_eq(nd_host_alloc(f.device, N * sizeof(int), (void **)&f.pinned), ND_OK);
    return f;
}

static void end(fixture *f)
{
    f->device->table->event_fini(&f->event);
    f->device->table->stream_fini(&f->other);
    f->device->table->stream_fini(&f->compute);
    nd_host_free(f->device, f->pinned);
    nd_device_free(f->device, f->memory, N * sizeof(int));
    nd_device_close(f->device);
}

typedef struct change_call {
    int *to, factor, more;
} change_call;

static void change_kernel(void *closure)
{
    const change_call *call = closure;
    for (int i = 0; i < N; i++) {
        call->to[i] = call->to[i] * call->factor + call->more;
    }
}

static void change(nd_stream *stream, change_call call)
{
    cudaError_t error = nd_double_launch(nd_cuda_stream(stream), change_kernel, &call, sizeof call);
    cr_assert_eq(nd_cuda_op_done(stream, "change", error), ND_OK);
}

static void add(nd_stream *stream, int *to, int value)
{
    change(stream, (change_call){to, 1, value});
}

static void scale(nd_stream *stream, int *to, int value)
{
    change(stream, (change_call){to, value, 0});
}

/* (0 + 3) 5 with a wait between the streams; 0 5 + 3 without it when the second stream runs
 * first. */
static int across_streams(int order, bool wait)
{
    fixture f = begin(order);
    int result[N];
    add(&f.compute, f.memory, 3);
    cr_assert_eq(f.device->table->event_record(&f.event, &f.compute), ND_OK);
    if (wait) {
        cr_assert_eq(nd_stream_wait(&f.other, &f.event), ND_OK);
    }
    scale(&f.other, f.memory, 5);
    cr_assert_eq(nd_copy(&f.other, f.pinned, f.memory, sizeof result), ND_OK);
    cr_assert_eq(nd_stream_sync(&f.other), ND_OK);
    int value = f.pinned[N - 1];
    end(&f);
    return value;
}

Test(streams, an_event_orders_two_streams)
{
    cr_expect_eq(across_streams(ND_DOUBLE_LAZY, true), 15);
}

Test(streams, the_double_shows_a_missing_wait)
{
    cr_expect_eq(across_streams(ND_DOUBLE_LAZY, false), 0);
}

/* In an order that is drawn, the copy comes before 3 is added, after it, or between both. */
Test(streams, a_drawn_order_keeps_waits_and_shows_missing_ones)
{
    int seen[16] = {0};
    for (uint64_t seed = 0; seed < 64; seed++) {
        nd_double_machine_get()->seed = seed;
        cr_expect_eq(across_streams(ND_DOUBLE_RANDOM, true), 15);
        int value = across_streams(ND_DOUBLE_RANDOM, false);
        cr_assert(value == 0 || value == 3 || value == 15, "%d", value);
        seen[value]++;
    }
    cr_expect(seen[0] > 0 && seen[3] > 0 && seen[15] > 0, "%d, %d, %d of 64", seen[0], seen[3],
              seen[15]);
}

Test(streams, memory_starts_at_zero_and_copies_go_any_way)
{
    fixture f = begin(ND_DOUBLE_LAZY);
    int pageable[N];
    memset(pageable, 1, sizeof pageable);
    cr_assert_eq(nd_copy(&f.compute, pageable, f.memory, sizeof pageable), ND_OK);
    cr_expect_eq(pageable[N / 2], 0);
    pageable[N / 2] = 42;
    cr_assert_eq(nd_copy(&f.compute, f.memory, pageable, sizeof pageable), ND_OK);
    pageable[N / 2] = 43; /* already taken */
    cr_assert_eq(nd_copy(&f.compute, f.pinned, f.memory, sizeof pageable), ND_OK);
    cr_expect_eq(f.pinned[N / 2], 0, "a copy to pinned memory is asynchronous");
    cr_assert_eq(nd_stream_sync(&f.compute), ND_OK);
    cr_expect_eq(f.pinned[N / 2], 42);
    cr_assert_eq(nd_zero(&f.compute, f.memory, sizeof pageable), ND_OK);
    cr_assert_eq(nd_copy(&f.compute, pageable, f.memory, sizeof pageable), ND_OK);
    cr_expect_eq(pageable[N / 2], 0);
    end(&f);
}

Test(streams, the_host_cannot_read_device_memory, .signal = SIGSEGV)
{
    fixture f = begin(ND_DOUBLE_LAZY);
    *(volatile int *)f.memory = 1;
}

static nd_status give_up(void *context, double seconds)
{
    *(int *)context += 1;
    return seconds > 0.05 ? nd_fail(ND_ERR_HANG, "nobody there") : ND_OK;
}

static nd_double_state never(void *closure)
{
    return ND_DOUBLE_BLOCKED;
}

Test(streams, a_wait_ends_when_whoever_watches_gives_up)
{
    fixture f = begin(ND_DOUBLE_LAZY);
    int asked = 0;
    f.device->while_waiting = give_up;
    f.device->waiting_context = &asked;
    cr_assert_eq(nd_double_submit(nd_cuda_stream(&f.compute), never, "", 1), cudaSuccess);
    cr_expect_eq(nd_stream_sync(&f.compute), ND_ERR_HANG);
    cr_expect_gt(asked, 1);
}

Test(streams, a_graph_repeats_the_work_of_two_streams)
{
    fixture f = begin(ND_DOUBLE_LAZY);
    nd_event joined;
    nd_device_graph *graph = NULL;
    cr_assert_eq(f.device->table->event_init(f.device, &joined), ND_OK);
    cr_assert_eq(f.device->table->capture_begin(&f.compute, "a test"), ND_OK);
    add(&f.compute, f.memory, 1);
    cr_assert_eq(f.device->table->event_record(&f.event, &f.compute), ND_OK);
    cr_assert_eq(nd_stream_wait(&f.other, &f.event), ND_OK);
    scale(&f.other, f.memory, 2);
    cr_assert_eq(f.device->table->event_record(&joined, &f.other), ND_OK);
    cr_assert_eq(nd_stream_wait(&f.compute, &joined), ND_OK);
    cr_assert_eq(f.device->table->capture_end(&f.compute, &graph), ND_OK);
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(f.device->table->graph_launch(graph, &f.compute), ND_OK);
    }
    cr_assert_eq(nd_copy(&f.compute, f.pinned, f.memory, N * sizeof(int)), ND_OK);
    cr_assert_eq(nd_stream_sync(&f.compute), ND_OK);
    cr_expect_eq(f.pinned[0], 14); /* ((1 2 + 1) 2 + 1) 2 */
    f.device->table->graph_destroy(graph);
    f.device->table->event_fini(&joined);
    end(&f);
}

Test(streams, a_graph_must_join_its_streams)
{
    fixture f = begin(ND_DOUBLE_LAZY);
    nd_device_graph *graph = NULL;
    cr_assert_eq(f.device->table->capture_begin(&f.compute, "a test"), ND_OK);
    add(&f.compute, f.memory, 1);
    cr_assert_eq(f.device->table->event_record(&f.event, &f.compute), ND_OK);
    cr_assert_eq(nd_stream_wait(&f.other, &f.event), ND_OK);
    scale(&f.other, f.memory, 2);
    cr_expect_eq(f.device->table->capture_end(&f.compute, &graph), ND_ERR_INTERNAL);
}
