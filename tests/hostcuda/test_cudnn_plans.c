// SPDX-License-Identifier: Apache-2.0
/*
 * cuDNN's plans of our attention for Hopper, built without a GPU: the real library, the description
 * of an H200, and a driver library that only answers (fake_driver.c). Nothing runs. Plans must
 * exist for every form that the trainer uses, and need no more workspace than the memory plan of a
 * GPU that is not here assumes. Skipped where cuDNN or NVRTC is not found.
 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/sdpa.h"
#include "tests/support/skip.h"

static const char h200[] =
    "{\"version\": 1, \"deviceVer\": 900, \"deviceName\": \"NVIDIA H200\", \"cudaDeviceId\": 0, "
    "\"driverVer\": 13000, \"multiProcessorCount\": 132, \"warpSize\": 32, \"isTccDriver\": 0, "
    "\"supportCoopLaunch\": 1, \"maxGridSize\": [2147483647, 65535, 65535], "
    "\"maxBlockSize\": [1024, 1024, 64], \"regsPerBlock\": 65536, \"maxRegistersPerSM\": 65536, "
    "\"maxSharedMemoryPerBlock\": 49152, \"maxSharedMemoryPerBlockOptin\": 232448, "
    "\"reservedSharedMemoryPerBlock\": 1024, \"maxCtasPerSM\": 32, \"maxThreadsPerBlock\": 1024, "
    "\"maxThreadsPerSM\": 2048, \"pciDeviceId\": 9013, \"totalGlobalMem\": 150110994432, "
    "\"smClockRateKHz\": 1980000, \"memClockRateKHz\": 3201000, \"l2CacheSize\": 62914560}";

static nd_cudnn *cudnn;

static void open_library(void)
{
    if (nd_cudnn_create(NULL, 90, h200, &cudnn) != ND_OK) {
        fprintf(stderr, "%s\n", nd_error_last()->message);
        skip_test("cuDNN cannot be opened, or cannot plan without a driver");
    }
}

static nd_sdpa_strides strides(int64_t rows, int64_t row)
{
    return (nd_sdpa_strides){rows * row, row, 128};
}

/* The 8B shape: 32 heads, 8 KV heads of 128; q, k, v lie in rows of a fused projection. */
static void expect_plan(int64_t sq, int64_t sk, nd_sdpa_mask mask, bool backward)
{
    const int64_t H = 32, K = 8, D = 128, row = (H + 2 * K) * D;
    nd_attention a = {1, sq, sk, H, K, D, mask == ND_SDPA_ALL ? sk : sk - sq, 0.0883883f};
    nd_sdpa_form f;
    size_t bytes = 0, planned = nd_cuda_sdpa_scratch(NULL, &a, ND_DTYPE_BF16, backward, false);
    memset(&f, 0, sizeof f);
    f.batch = 1;
    f.sq = sq;
    f.sk = sk;
    f.heads = H;
    f.kv_heads = K;
    f.head_dim = D;
    f.q = f.dq = strides(sq, row);
    f.k = f.v = f.dk = f.dv = strides(sk, row);
    f.out = f.dout = strides(sq, H * D);
    f.stats_batch = H * sq;
    f.stats_head = sq;
    f.scale = a.scale;
    f.mask = (int32_t)mask;
    f.backward = backward;
    cr_assert_eq(nd_cudnn_workspace(cudnn, &f, &bytes), ND_OK, "%s", nd_error_last()->message);
    cr_expect_leq(bytes, planned, "%zu bytes of workspace, %zu planned", bytes, planned);
    printf("sq %lld, sk %lld, mask %d, %s: %zu bytes\n", (long long)sq, (long long)sk, (int)mask,
           backward ? "backward" : "forward", bytes);
}

Test(cudnn_plans, forward, .init = open_library, .timeout = 300)
{
    expect_plan(8192, 8192, ND_SDPA_TOP_LEFT, false);
    expect_plan(4096, 8192, ND_SDPA_ALL, false);
    expect_plan(2048, 8192, ND_SDPA_BOTTOM_RIGHT, false);
}

Test(cudnn_plans, backward, .init = open_library, .timeout = 300)
{
    expect_plan(8192, 8192, ND_SDPA_TOP_LEFT, true);
    expect_plan(4096, 8192, ND_SDPA_ALL, true);
    expect_plan(2048, 8192, ND_SDPA_BOTTOM_RIGHT, true);
}
