// SPDX-License-Identifier: Apache-2.0
/* What a user reads when the GPU, its driver or its memory is not what the run needs. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "runtime/device/cuda.h"
#include "runtime/device/cuda_check.h"
#include "runtime/device/cuda_recent_ops.h"
#include "runtime/device/memplan.h"
#include "tests/hostcuda/doubles/double.h"

static void expect_refused(const nd_cuda_options *options, const char *a, const char *b)
{
    nd_device *device = NULL;
    nd_status status = nd_device_open_cuda(options, &device);
    const char *message = nd_error_last()->message;
    cr_assert_eq(status, ND_ERR_CONFIG, "%s", message);
    cr_expect(strstr(message, a) && strstr(message, b), "%s", message);
}

static const nd_cuda_options one_worker = {.local_workers = 1};

/* The thread that drives a device polls it in sleeps of some tens of microseconds. */
Test(device, sleeps_of_its_thread_end_in_time)
{
    nd_device *device = NULL;
    cr_assert_eq(prctl(PR_SET_TIMERSLACK, 50000, 0, 0, 0), 0);
    cr_assert_eq(nd_device_open_cuda(&one_worker, &device), ND_OK);
    cr_expect_leq(prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0), 1000);
    nd_device_close(device);
}

Test(device, no_driver)
{
    nd_double_machine_get()->devices = -1;
    expect_refused(&one_worker, "NVIDIA driver", "--device cpu");
}

Test(device, a_driver_that_is_older_than_the_program)
{
    nd_double_machine_get()->driver = 12040;
    expect_refused(&one_worker, "supports CUDA 12.4", "built with");
}

Test(device, no_gpu)
{
    nd_double_machine_get()->devices = 0;
    expect_refused(&one_worker, "sees none", "--device cpu");
    setenv("CUDA_VISIBLE_DEVICES", "7", 1);
    expect_refused(&one_worker, "CUDA_VISIBLE_DEVICES is '7'", "--device cpu");
}

Test(device, fewer_gpus_than_workers)
{
    nd_double_machine_get()->devices = 2;
    nd_cuda_options options = {.ordinal = 0, .local_workers = 4};
    expect_refused(&options, "4 workers", "2 are visible");
}

Test(device, compute_capability)
{
    nd_double_machine_get()->capability = 75;
    expect_refused(&one_worker, "7.5", "8.0");
    nd_double_machine_get()->capability = 86;
    nd_cuda_options fp8 = {.local_workers = 1, .fp8 = true};
    expect_refused(&fp8, "8.6", "8.9");
    nd_device *device = NULL;
    cr_assert_eq(nd_device_open_cuda(&one_worker, &device), ND_OK);
    nd_device_close(device);
}

Test(device, a_plan_that_does_not_fit)
{
    nd_device *device = NULL;
    nd_memplan plan;
    nd_double_machine_get()->memory = (size_t)64 << 20;
    cr_assert_eq(nd_device_open_cuda(&one_worker, &device), ND_OK);
    nd_memplan_init(&plan);
    nd_memplan_want(&plan, ND_MEM_STATE, "master weights", 128 << 20, NULL);
    cr_assert_eq(nd_memplan_commit(&plan, device), ND_ERR_RESOURCE);
    const char *message = nd_error_last()->message;
    cr_expect(strstr(message, "0.12 GiB") && strstr(message, "0.06 of 0.06 GiB"), "%s", message);
    cr_expect(strstr(message, "state 128"), "%s", message);
    nd_device_close(device);
}

static void fault(void *closure)
{
    nd_double_break(cudaErrorIllegalAddress);
}

Test(device, a_fault_names_the_last_ops)
{
    nd_device *device = NULL;
    nd_stream stream;
    cr_assert_eq(nd_device_open_cuda(&one_worker, &device), ND_OK);
    cr_assert_eq(device->table->stream_init(device, &stream), ND_OK);
    cr_assert_eq(nd_cuda_op_done(&stream, "rmsnorm_fwd", cudaSuccess), ND_OK);
    cudaError_t launched = nd_double_launch(nd_cuda_stream(&stream), fault, "", 1);
    cr_assert_eq(nd_cuda_op_done(&stream, "matmul", launched), ND_OK);
    cr_assert_eq(nd_stream_sync(&stream), ND_ERR_INTERNAL);
    const char *message = nd_error_last()->message;
    cr_expect(strstr(message, "error 700") && strstr(message, "rmsnorm_fwd, matmul"), "%s",
              message);
}

Test(device, ND_CUDA_SYNC_names_the_op_alone)
{
    nd_device *device = NULL;
    nd_stream stream;
    setenv("ND_CUDA_SYNC", "1", 1);
    cr_assert_eq(nd_device_open_cuda(&one_worker, &device), ND_OK);
    cr_assert_eq(device->table->stream_init(device, &stream), ND_OK);
    cr_assert_eq(nd_cuda_op_done(&stream, "rmsnorm_fwd", cudaSuccess), ND_OK);
    cudaError_t launched = nd_double_launch(nd_cuda_stream(&stream), fault, "", 1);
    cr_assert_eq(nd_cuda_op_done(&stream, "matmul", launched), ND_ERR_INTERNAL);
    const char *message = nd_error_last()->message;
    cr_expect(strstr(message, "error 700") && strstr(message, "from matmul"), "%s", message);
    cr_expect_null(strstr(message, "rmsnorm_fwd"), "%s", message);
}

/* What is not an op's fault says whose it is instead of naming ops. */
Test(device, a_fault_of_the_machine_says_what_to_do)
{
    nd_device *device = NULL;
    nd_stream stream;
    cr_assert_eq(nd_device_open_cuda(&one_worker, &device), ND_OK);
    cr_assert_eq(device->table->stream_init(device, &stream), ND_OK);
    cr_assert_eq(nd_cuda_op_done(&stream, "matmul", cudaSuccess), ND_OK);
    cr_expect_eq(nd_cuda_failed(device, cudaErrorECCUncorrectable, "cudaStreamQuery"),
                 ND_ERR_INTERNAL);
    const char *message = nd_error_last()->message;
    cr_expect(strstr(message, "error 214") && strstr(message, "choose another GPU"), "%s", message);
    cr_expect_null(strstr(message, "matmul"), "%s", message);
    cr_expect_eq(nd_cuda_failed(device, cudaErrorMemoryAllocation, "cudaGraphInstantiate"),
                 ND_ERR_RESOURCE);
    cr_expect(strstr(message, "of 64.00 GiB are free; device memory outside the plan is used up"),
              "%s", message);
    cr_expect_eq(nd_cuda_failed(NULL, cudaErrorSystemNotReady, "cudaGetDeviceCount"),
                 ND_ERR_CONFIG);
    cr_expect(strstr(message, "fabric manager"), "%s", message);
    nd_device_close(device);
}

Test(device, pinned_memory_that_is_not_there)
{
    nd_device *device = NULL;
    void *p = NULL;
    cr_assert_eq(nd_device_open_cuda(&one_worker, &device), ND_OK);
    cr_expect_eq(nd_host_alloc(device, (size_t)1 << 60, &p), ND_ERR_RESOURCE);
    const char *message = nd_error_last()->message;
    cr_expect(strstr(message, "out of host memory") && strstr(message, "pinned"), "%s", message);
    nd_device_close(device);
}

static nd_double_state never(void *closure)
{
    return ND_DOUBLE_BLOCKED;
}

/* Freeing would wait for the GPU again, inside CUDA. */
Test(device, a_gpu_that_never_ends_is_given_up)
{
    nd_device *device = NULL;
    nd_stream stream;
    void *memory = NULL, *pinned = NULL;
    cr_assert_eq(nd_device_open_cuda(&one_worker, &device), ND_OK);
    cr_assert_eq(device->table->stream_init(device, &stream), ND_OK);
    cr_assert_eq(nd_device_alloc(device, 16, &memory), ND_OK);
    cr_assert_eq(nd_host_alloc(device, 16, &pinned), ND_OK);
    cr_expect_eq(nd_cuda_device_of(device)->patience, 3600);
    nd_cuda_device_of(device)->patience = 0.05;
    cudaError_t launched = nd_double_submit(nd_cuda_stream(&stream), never, "", 1);
    cr_assert_eq(nd_cuda_op_done(&stream, "matmul", launched), ND_OK);
    cr_assert_eq(nd_stream_sync(&stream), ND_ERR_HANG);
    const char *message = nd_error_last()->message;
    cr_expect(strstr(message, "has not ended in 0.") && strstr(message, "matmul"), "%s", message);
    long frees = nd_double_counts_get().frees;
    nd_device_free(device, memory, 16);
    nd_host_free(device, pinned);
    nd_device_close(device);
    cr_expect_eq(nd_double_counts_get().frees, frees);
}
