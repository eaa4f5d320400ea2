// SPDX-License-Identifier: Apache-2.0
/* runtime/device/graphs.h: what is recorded, what is replayed, and what is refused. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/device/cuda.h"
#include "runtime/device/cuda_check.h"
#include "runtime/device/graphs.h"
#include "tests/hostcuda/doubles/double.h"

static const nd_graph_counts most = {.works = 2, .graphs = 4, .ops = 8};

/* The graphs keep the address of the stream. */
static struct {
    nd_device *device;
    nd_stream stream;
    nd_graphs *graphs;
} f;

static void open_graphs(int ordinal)
{
    nd_cuda_options options = {.local_workers = 1, .ordinal = ordinal};
    cr_assert_eq(nd_device_open_cuda(&options, &f.device), ND_OK);
    cr_assert_eq(f.device->table->stream_init(f.device, &f.stream), ND_OK);
    cr_assert_eq(nd_graphs_create(&f.stream, &most, &f.graphs), ND_OK, "%s",
                 nd_error_last()->message);
}

static void nothing(void *closure)
{
}

static void fault(void *closure)
{
    nd_double_break(cudaErrorIllegalAddress);
}

/* An op as the model calls it. */
static nd_status op(nd_stream *stream, const char *name, void (*kernel)(void *))
{
    bool enqueue;
    ND_TRY(nd_stream_inside(stream, &(nd_graph_op){.name = name}, &enqueue));
    if (!enqueue) {
        return ND_OK;
    }
    cudaError_t launched = nd_double_launch(nd_cuda_stream(stream), kernel, "", 1);
    return nd_cuda_op_done(stream, name, launched);
}

static const char *const names[] = {"rmsnorm_fwd", "matmul", "rope", "cast"};

static const nd_graph_key block_3 = {.name = "forward", .number = 3};

/* The forward of block 3: ops first .. first + count of `names`. */
static nd_status work(int first, int count, void (*kernel)(void *))
{
    nd_status status = ND_OK;
    ND_TRY(nd_graphs_begin(f.graphs, &block_3));
    for (int i = first; i < first + count && status == ND_OK; i++) {
        status = op(&f.stream, names[i], kernel);
    }
    return nd_graphs_end(f.graphs, status);
}

static void expect_message(const char *text)
{
    cr_expect(strstr(nd_error_last()->message, text), "%s", nd_error_last()->message);
}

Test(graphs_cuda, a_fault_names_the_graph_and_its_ops)
{
    open_graphs(0);
    nd_status status = work(0, 2, fault); /* which may see it already */
    cr_assert_eq(status == ND_OK ? nd_stream_sync(&f.stream) : status, ND_ERR_INTERNAL);
    expect_message("error 700");
    expect_message("forward of block 3, part 1 (rmsnorm_fwd, matmul)");
}

Test(graphs_cuda, other_ops_than_were_recorded_are_an_error)
{
    open_graphs(0);
    nd_graphs_set_step(f.graphs, 2);
    cr_assert_eq(work(0, 3, nothing), ND_OK);
    nd_graphs_set_step(f.graphs, 7);
    cr_assert_eq(work(0, 3, nothing), ND_OK, "%s", nd_error_last()->message);
    cr_assert_eq(nd_stream_sync(&f.stream), ND_OK);
    cr_expect_eq(nd_double_counts_get().graphs_launched, 2);
    cr_expect_eq(work(0, 4, nothing), ND_ERR_INTERNAL);
    expect_message("step 7, forward of block 3: op 4 of part 1 is cast, and the CUDA graph of "
                   "step 2 has none there");
    cr_expect_eq(work(0, 2, nothing), ND_ERR_INTERNAL);
    expect_message("op 3 of part 1 is none, and the CUDA graph of step 2 has rope there");
    /* As many, but others. */
    cr_expect_eq(work(1, 3, nothing), ND_ERR_INTERNAL);
    expect_message("op 1 of part 1 is matmul, and the CUDA graph of step 2 has rmsnorm_fwd there");
    cr_expect_eq(work(0, 0, nothing), ND_ERR_INTERNAL);
    expect_message("op 1 of part 1 is none");
    cr_expect_eq(work(0, 3, nothing), ND_OK, "it does not break what is recorded");
}

static nd_status fill(char *at, size_t bytes)
{
    ND_TRY(nd_graphs_begin(f.graphs, &block_3));
    return nd_graphs_end(f.graphs, nd_zero(&f.stream, at, bytes));
}

Test(graphs_cuda, a_fill_of_other_memory_than_was_recorded_is_an_error)
{
    void *memory = NULL;
    open_graphs(0);
    cr_assert_eq(nd_device_alloc(f.device, 64, &memory), ND_OK);
    cr_assert_eq(fill(memory, 32), ND_OK);
    cr_assert_eq(fill(memory, 32), ND_OK, "%s", nd_error_last()->message);
    cr_expect_eq(nd_graphs_count(f.graphs).ops, 1);
    cr_expect_eq(fill((char *)memory + 32, 32), ND_ERR_INTERNAL);
    expect_message("op 1 of part 1 is fill with other buffers");
    cr_expect_eq(fill(memory, 16), ND_ERR_INTERNAL);
}

static nd_status op_that_fails(void)
{
    ND_TRY(op(&f.stream, "matmul", nothing));
    return nd_fail(ND_ERR_NUMERIC, "the reason");
}

/* An event among the ops ends a part. */
static nd_status parts_that_fail(void)
{
    nd_event event;
    ND_TRY(f.device->table->event_init(f.device, &event));
    ND_TRY(op(&f.stream, "rmsnorm_fwd", nothing));
    nd_status status = nd_stream_wait(&f.stream, &event);
    f.device->table->event_fini(&event);
    ND_TRY(status);
    return op_that_fails();
}

/* The stream can be used, and waited for, afterwards; the reason is kept; the work is recorded
 * again. */
Test(graphs_cuda, an_error_in_a_capture_ends_it)
{
    open_graphs(0);
    for (int parts = 1; parts <= 2; parts++) {
        cr_assert_eq(nd_graphs_begin(f.graphs, &block_3), ND_OK);
        nd_status status = parts == 1 ? op_that_fails() : parts_that_fail();
        cr_expect_eq(nd_graphs_end(f.graphs, status), ND_ERR_NUMERIC);
        expect_message("the reason");
        cr_expect_null(f.stream.graph);
        cr_expect_eq(nd_graphs_count(f.graphs).works, 0);
        cr_expect_eq(nd_graphs_count(f.graphs).ops, 0);
        cr_expect_eq(nd_stream_sync(&f.stream), ND_OK, "%s", nd_error_last()->message);
    }
    cr_expect_eq(work(0, 2, nothing), ND_OK, "%s", nd_error_last()->message);
    cr_expect_eq(work(0, 2, nothing), ND_OK, "%s", nd_error_last()->message);
    /* Whoever gives up between begin and end. */
    nd_graph_key other = {.name = "backward", .number = 3};
    cr_assert_eq(nd_graphs_begin(f.graphs, &other), ND_OK);
    cr_expect_eq(op_that_fails(), ND_ERR_NUMERIC);
    nd_graphs_destroy(f.graphs);
    expect_message("the reason");
    cr_expect_null(f.stream.graph);
    cr_expect_eq(nd_stream_sync(&f.stream), ND_OK);
}

/* Two works, four parts, eight ops: one more of each. */
Test(graphs_cuda, more_than_is_planned_is_one_error)
{
    static const char *const wanted =
        "goes beyond the planned 4 CUDA graphs (of 2 works, with 8 ops)";
    open_graphs(0);
    for (int i = 0; i < 3; i++) {
        nd_graph_key key = {.name = "backward", .number = i};
        nd_status status = nd_graphs_begin(f.graphs, &key);
        cr_expect_eq(status, i < 2 ? ND_OK : ND_ERR_INTERNAL);
        if (status == ND_OK) {
            for (int k = 0; k < 4; k++) {
                cr_expect_eq(op(&f.stream, "matmul", nothing), ND_OK);
            }
            status = i == 0 ? ND_OK : op(&f.stream, "matmul", nothing);
            cr_expect_eq(nd_graphs_end(f.graphs, status), i == 0 ? ND_OK : ND_ERR_INTERNAL);
        }
        if (i > 0) {
            expect_message(wanted);
            cr_expect_eq(nd_stream_sync(&f.stream), ND_OK);
        }
        if (i == 1) { /* what was dropped does not count: this fits */
            key.number = 9;
            cr_expect_eq(nd_graphs_begin(f.graphs, &key), ND_OK);
            cr_expect_eq(nd_graphs_end(f.graphs, op(&f.stream, "matmul", nothing)), ND_OK);
        }
    }
    nd_graph_counts counts = nd_graphs_count(f.graphs);
    cr_expect(counts.works == 2 && counts.graphs == 2 && counts.ops == 5);
}

/* That the double would notice: a wait for the stream ends its capture, */
Test(graphs_cuda, a_wait_inside_a_capture_is_an_error)
{
    open_graphs(0);
    cr_assert_eq(nd_graphs_begin(f.graphs, &block_3), ND_OK);
    cr_assert_eq(op(&f.stream, "matmul", nothing), ND_OK);
    cr_expect_eq(nd_stream_sync(&f.stream), ND_ERR_INTERNAL);
    cr_expect_eq(nd_graphs_end(f.graphs, ND_OK), ND_ERR_INTERNAL);
    expect_message("capturing the forward of block 3");
    cr_expect_eq(work(0, 2, nothing), ND_OK, "%s", nd_error_last()->message);
}

/* and memory is not allocated. */
Test(graphs_cuda, an_allocation_inside_a_capture_is_refused, .signal = SIGABRT)
{
    void *memory = NULL;
    open_graphs(0);
    cr_assert_eq(nd_graphs_begin(f.graphs, &block_3), ND_OK);
    cr_assert_eq(op(&f.stream, "matmul", nothing), ND_OK);
    (void)nd_device_alloc(f.device, 64, &memory);
}

/* The watch of NCCL asks for events while the driving thread captures; each has its own states. */
static void *ask(void *event)
{
    cudaSetDevice(0);
    return cudaEventQuery(event) == cudaSuccess ? event : NULL;
}

static void record_and_capture(cudaEvent_t *event)
{
    open_graphs(0);
    cr_assert_eq(cudaEventCreateWithFlags(event, cudaEventDisableTiming), cudaSuccess);
    cr_assert_eq(cudaEventRecord(*event, nd_cuda_stream(&f.stream)), cudaSuccess);
    cr_assert_eq(nd_stream_sync(&f.stream), ND_OK);
    cr_assert_eq(nd_graphs_begin(f.graphs, &block_3), ND_OK);
    cr_assert_eq(op(&f.stream, "matmul", nothing), ND_OK);
}

Test(graphs_cuda, another_thread_may_ask_for_an_event_inside_a_capture)
{
    cudaEvent_t event;
    pthread_t thread;
    void *answer = NULL;
    record_and_capture(&event);
    cr_assert_eq(pthread_create(&thread, NULL, ask, event), 0);
    cr_assert_eq(pthread_join(thread, &answer), 0);
    cr_expect_eq(answer, (void *)event);
    cr_expect_eq(nd_graphs_end(f.graphs, ND_OK), ND_OK, "%s", nd_error_last()->message);
}

Test(graphs_cuda, the_capturing_thread_may_not, .signal = SIGABRT)
{
    cudaEvent_t event;
    record_and_capture(&event);
    (void)ask(event);
}

static nd_status real_op(const nd_ops *ops, char *memory, bool product)
{
    nd_tensor a = nd_tensor_2d(memory, ND_DTYPE_F32, 16, 16);
    nd_tensor c = nd_tensor_2d(memory + 4096, ND_DTYPE_F32, 16, 16);
    bool enqueue;
    ND_TRY(nd_stream_inside(&f.stream, &(nd_graph_op){.name = "real"}, &enqueue));
    if (!enqueue) {
        return ND_OK;
    }
    return product ? ND_CALL(ops, &f.stream, product, .c = c, .a = nd_rows(a), .b = nd_rows(a))
                   : ND_CALL(ops, &f.stream, cast, .out = c, .x = a);
}

static nd_status recorded_op(const nd_ops *ops, char *memory, bool product)
{
    ND_TRY(nd_graphs_begin(f.graphs, &block_3));
    return nd_graphs_end(f.graphs, real_op(ops, memory, product));
}

/* That a strict double would notice: a kernel, or a product, that the driver loads in the midst. */
Test(graphs_cuda, what_is_used_first_inside_a_capture_ends_it_unless_all_is_loaded)
{
    for (int eager = 0; eager < 2; eager++) {
        for (int product = 0; product < 2; product++) {
            const nd_ops *ops = NULL;
            void *memory = NULL;
            setenv("CUDA_MODULE_LOADING", eager ? "EAGER" : "LAZY", 1);
            nd_double_machine_get()->strict_capture = true;
            open_graphs(2 * eager + product); /* where nothing was used */
            cr_assert_eq(nd_ops_cuda(f.device, false, &ops), ND_OK);
            cr_assert_eq(nd_device_alloc(f.device, 8192, &memory), ND_OK);
            cr_expect_eq(recorded_op(ops, memory, product), eager ? ND_OK : ND_ERR_INTERNAL);
            cr_expect_eq(recorded_op(ops, memory, product), ND_OK, "%s", nd_error_last()->message);
        }
    }
}

/* A strict double also refuses a wait for a stream that is not captured. */
Test(graphs_cuda, a_wait_for_another_stream_inside_a_capture_is_refused, .signal = SIGABRT)
{
    nd_stream other;
    cudaEvent_t event;
    nd_double_machine_get()->strict_capture = true;
    record_and_capture(&event);
    cr_assert_eq(f.device->table->stream_init(f.device, &other), ND_OK);
    (void)nd_stream_sync(&other);
}

Test(graphs_cuda, ops_that_wait_are_refused)
{
    open_graphs(0);
    nd_graphs *second = NULL;
    setenv("ND_CUDA_SYNC", "1", 1);
    cr_assert_eq(nd_graphs_create(&f.stream, &most, &second), ND_ERR_CONFIG);
    cr_expect(strstr(nd_error_last()->message, "kernels.cuda_graphs: false"));
}
