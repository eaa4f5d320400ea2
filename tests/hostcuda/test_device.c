// SPDX-License-Identifier: Apache-2.0
/* Errors that a user reads when the GPU, its driver or its memory is not what the run needs. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "runtime/device/cuda.h"
#include "runtime/device/cuda_check.h"
#include "runtime/device/cuda_recent_ops.h"
#include "runtime/device/memplan.h"
#include "tests/hostcuda/doubles/double.h"

static nd_device *open_device(void)
{
    const nd_cuda_options one_worker = {.local_workers = 1};
    nd_device *device = NULL;
    cr_assert_eq(nd_device_open_cuda(&one_worker, &device), ND_OK);
    return device;
}

static nd_stream stream_of(nd_device *device)
{
    nd_stream stream;
    cr_assert_eq(device->table->stream_init(device, &stream), ND_OK);
    return stream;
}

static void expect_said(const char *a, const char *b)
{
    const char *message = nd_error_last()->message;
    cr_expect(strstr(message, a) && strstr(message, b), "%s", message);
}

static void expect_not_said(const char *text)
{
    cr_expect_null(strstr(nd_error_last()->message, text), "%s", nd_error_last()->message);
}

/* The thread that drives a device polls it in sleeps of some tens of microseconds. */
Test(device, sleeps_of_its_thread_end_in_time)
{
    cr_assert_eq(prctl(PR_SET_TIMERSLACK, 50000, 0, 0, 0), 0);
    nd_device *device = open_device();
    cr_expect_leq(prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0), 1000);
    nd_device_close(device);
}

Test(device, an_unsuitable_machine_is_refused)
{
    static const struct {
        int devices, driver, capability, workers;
        bool fp8;
        const char *visible, *said[2];
        int ordinal;
    } machines[] = {
        {-1, 13000, 90, 1, false, NULL, {"NVIDIA driver", "--device cpu"}},
        {8, 12040, 90, 1, false, NULL, {"supports CUDA 12.4", "built with"}},
        {0, 13000, 90, 1, false, NULL, {"sees none", "--device cpu"}},
        {0, 13000, 90, 1, false, "7", {"CUDA_VISIBLE_DEVICES is '7'", "--device cpu"}},
        {2, 13000, 90, 4, false, NULL, {"4 workers", "2 are visible"}},
        {2, 13000, 90, 2, false, NULL, {"GPU 2 among them", "2 are visible"}, 2},
        {8, 13000, 75, 1, false, NULL, {"GPU 5 (", "7.5"}, 5},
        {8, 13000, 75, 1, false, NULL, {"7.5", "8.0"}},
        {8, 13000, 86, 1, true, NULL, {"8.6", "8.9"}},
    };
    nd_double_machine *m = nd_double_machine_get();
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        const nd_cuda_options options = {.ordinal = machines[i].ordinal,
                                         .local_workers = machines[i].workers,
                                         .fp8 = machines[i].fp8};
        nd_device *device = NULL;
        m->devices = machines[i].devices;
        m->driver = machines[i].driver;
        m->capability = machines[i].capability;
        unsetenv("CUDA_VISIBLE_DEVICES");
        if (machines[i].visible) {
            setenv("CUDA_VISIBLE_DEVICES", machines[i].visible, 1);
        }
        nd_error_clear();
        cr_expect_eq(nd_device_open_cuda(&options, &device), ND_ERR_CONFIG, "machine %zu", i);
        expect_said(machines[i].said[0], machines[i].said[1]);
    }
    m->capability = 80;
    nd_device_close(open_device()); /* without FP8 */
    nd_device *device;
    m->capability = 89;
    m->devices = 2;
    m->other = 1; /* the last GPU, of as many workers as there are */
    const nd_cuda_options ada = {.ordinal = 1, .local_workers = 2, .fp8 = true};
    cr_assert_eq(nd_device_open_cuda(&ada, &device), ND_OK);
    cr_expect_eq(device->ordinal, 1);
    cr_expect_str_eq(device->name, "double of another GPU");
    nd_device_close(device);
}

Test(device, its_facts_are_those_of_the_driver)
{
    static const unsigned char ids[][16] = {
        {0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0, 0x0f, 0xf0, 1, 2, 3, 4, 0}, {0}};
    static const char *const texts[] = {"GPU-01234567-89ab-cdef-000f-f00102030400", ""};
    nd_double_machine *m = nd_double_machine_get();
    void *memory;
    m->driver = 13020;
    m->capability = 89;
    m->memory = 4 << 20;
    nd_device *device = open_device();
    cr_assert_eq(nd_device_alloc(device, 1 << 20, &memory), ND_OK);
    for (int i = 0; i < 2; i++) {
        nd_cuda_info info;
        memcpy(m->id, ids[i], sizeof m->id);
        cr_assert_eq(nd_cuda_info_of(device, &info), ND_OK);
        cr_expect_str_eq(info.id, texts[i]);
        cr_expect(info.major == 8 && info.minor == 9 && info.processors == 132);
        cr_expect(info.driver == 13020 && info.runtime == CUDART_VERSION);
        cr_expect(info.free_bytes == 3 << 20 && info.total_bytes == 4 << 20);
    }
    cr_assert_eq(nd_device_alloc(device, 3 << 20, &memory), ND_OK, "exactly what is free");
    cr_expect_eq(nd_device_alloc(device, 1, &memory), ND_ERR_RESOURCE);
    nd_device_close(device);
}

Test(device, a_plan_that_does_not_fit)
{
    nd_memplan plan;
    nd_double_machine_get()->memory = (size_t)64 << 20;
    nd_device *device = open_device();
    nd_memplan_init(&plan);
    nd_memplan_want(&plan, ND_MEM_STATE, "master weights", 128 << 20, NULL);
    cr_assert_eq(nd_memplan_commit(&plan, device), ND_ERR_RESOURCE);
    expect_said("0.12 GiB", "0.06 of 0.06 GiB");
    expect_said("state 128", "");
    nd_device_close(device);
}

static void fault(void *closure)
{
    nd_double_break(cudaErrorIllegalAddress);
}

Test(device, a_fault_names_the_last_ops)
{
    static const char *const before[] = {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"};
    setenv("ND_CUDA_SYNC", "0", 1); /* as if it were not set */
    nd_device *device = open_device();
    nd_stream stream = stream_of(device);
    for (int i = 0; i < 10; i++) {
        cr_assert_eq(nd_cuda_op_done(&stream, before[i], cudaSuccess), ND_OK);
    }
    cudaError_t launched = nd_double_launch(nd_cuda_stream(&stream), fault, "", 1);
    cr_assert_eq(nd_cuda_op_done(&stream, "matmul", launched), ND_OK);
    cr_assert_eq(nd_stream_sync(&stream), ND_ERR_INTERNAL);
    expect_said("error 700", "after the ops d, e, f, g, h, i, j, matmul; ");
}

Test(device, ND_CUDA_SYNC_names_the_op_alone)
{
    setenv("ND_CUDA_SYNC", "1", 1);
    nd_device *device = open_device();
    nd_stream stream = stream_of(device);
    cr_assert_eq(nd_cuda_op_done(&stream, "rmsnorm_fwd", cudaSuccess), ND_OK);
    cudaError_t launched = nd_double_launch(nd_cuda_stream(&stream), fault, "", 1);
    cr_assert_eq(nd_cuda_op_done(&stream, "matmul", launched), ND_ERR_INTERNAL);
    expect_said("error 700", "from matmul");
    expect_not_said("rmsnorm_fwd");
}

/* The error of a fault that no op has made says whose fault it is instead of naming ops. */
Test(device, a_fault_of_the_machine_says_what_to_do)
{
    nd_device *device = open_device();
    nd_stream stream = stream_of(device);
    cr_assert_eq(nd_cuda_op_done(&stream, "matmul", cudaSuccess), ND_OK);
    cr_expect_eq(nd_cuda_failed(device, cudaErrorECCUncorrectable, "cudaStreamQuery"),
                 ND_ERR_INTERNAL);
    expect_said("error 214", "choose another GPU");
    expect_not_said("matmul");
    cr_expect_eq(nd_cuda_failed(device, cudaErrorMemoryAllocation, "cudaGraphInstantiate"),
                 ND_ERR_RESOURCE);
    expect_said("of 64.00 GiB are free; device memory outside the plan is used up", "");
    cr_expect_eq(nd_cuda_failed(NULL, cudaErrorSystemNotReady, "cudaGetDeviceCount"),
                 ND_ERR_CONFIG);
    expect_said("fabric manager", "");
    nd_device_close(device);
}

Test(device, pinned_memory_that_is_not_there)
{
    nd_device *device = open_device();
    void *p = NULL;
    cr_expect_eq(nd_host_alloc(device, (size_t)1 << 60, &p), ND_ERR_RESOURCE);
    expect_said("out of host memory", "pinned");
    nd_device_close(device);
}

static nd_double_state never(void *closure)
{
    return ND_DOUBLE_BLOCKED;
}

/* Freeing would wait for the GPU again, inside CUDA. */
Test(device, a_gpu_that_never_ends_is_given_up)
{
    void *memory = NULL, *pinned = NULL;
    nd_device *device = open_device();
    nd_stream stream = stream_of(device);
    cr_assert_eq(nd_device_alloc(device, 16, &memory), ND_OK);
    cr_assert_eq(nd_host_alloc(device, 16, &pinned), ND_OK);
    cr_expect_eq(nd_cuda_device_of(device)->patience, 3600);
    nd_cuda_device_of(device)->patience = 0.05;
    cudaError_t launched = nd_double_submit(nd_cuda_stream(&stream), never, "", 1);
    cr_assert_eq(nd_cuda_op_done(&stream, "matmul", launched), ND_OK);
    cr_assert_eq(nd_stream_sync(&stream), ND_ERR_HANG);
    expect_said("has not ended in 0.", "matmul");
    long frees = nd_double_counts_get().frees;
    nd_device_free(device, memory, 16);
    nd_host_free(device, pinned);
    nd_device_close(device);
    cr_expect_eq(nd_double_counts_get().frees, frees);
}
