// SPDX-License-Identifier: Apache-2.0
#include "tests/hostcuda/faults.h"

#include "kernels/cuda/map.cuh"

using namespace nd;

namespace {

__global__ void returns_early(int *out)
{
    if (threadIdx.x == 5) {
        return;
    }
    __syncthreads();
    out[threadIdx.x] = 1;
}

__global__ void leaves_out(float *out)
{
    float x = (float)threadIdx.x;
    if (threadIdx.x < 20) {
        x = warp_sum(x);
    }
    out[threadIdx.x] = x;
}

__global__ void meets(float *out)
{
    out[threadIdx.x] = warp_sum(1.0f);
}

__global__ void loads(float *out, const float *x)
{
    out[threadIdx.x] = load<4>(x + 1 + 4 * threadIdx.x).e[0];
}

__global__ void sums(float *out, bool with_barrier)
{
    ND_SHARED(float, numbers, 64);
    numbers[threadIdx.x] = (float)threadIdx.x;
    if (with_barrier) {
        __syncthreads();
    }
    float sum = 0.0f;
    for (int i = 0; i < 64; i++) {
        sum += numbers[i];
    }
    out[threadIdx.x] = sum;
}

__global__ void looks(int *fresh)
{
    ND_SHARED(float, numbers, 64);
    if (numbers[threadIdx.x] == numbers[threadIdx.x]) {
        *fresh = 0;
    }
    __syncthreads();
    numbers[threadIdx.x] = 1.0f;
}

__global__ void tree(double *out)
{
    ND_SHARED(double, slots, 32);
    double sum = block_sum((double)threadIdx.x, slots);
    if (threadIdx.x == 0) {
        out[blockIdx.x] = sum;
    }
}

float numbers[256];
int integers[256];

} // namespace

void faults_return_before_a_barrier()
{
    ND_LAUNCH_MEETING(returns_early, 1, 64, NULL, integers);
}

void faults_leave_out_a_shuffle()
{
    ND_LAUNCH_MEETING(leaves_out, 1, 64, NULL, numbers);
}

void faults_meet_where_none_was_promised()
{
    ND_LAUNCH(meets, 1, 64, NULL, numbers);
}

void faults_load_a_pack_across_a_boundary()
{
    alignas(16) static float x[64];
    ND_LAUNCH(loads, 1, 4, NULL, numbers, x);
}

float faults_sum(int with_barrier)
{
    ND_LAUNCH_MEETING(sums, 1, 64, NULL, numbers, with_barrier != 0);
    for (int i = 1; i < 64; i++) {
        if (numbers[i] != numbers[0]) {
            return NAN;
        }
    }
    return numbers[0];
}

int faults_shared_memory_is_fresh()
{
    int fresh = 1;
    ND_LAUNCH_MEETING(looks, 2, 64, NULL, &fresh);
    return fresh;
}

double faults_tree(int threads)
{
    double sums_of_blocks[3];
    ND_LAUNCH_MEETING(tree, 3, threads, NULL, sums_of_blocks);
    return sums_of_blocks[0] + sums_of_blocks[1] + sums_of_blocks[2];
}

uint32_t pieces_quotient(uint32_t n, uint32_t d)
{
    return divider::by(d).quotient(n);
}

int64_t pieces_offset(const int64_t shape[3], const int64_t stride[3], int64_t index, int wide)
{
    nd_tensor t[1] = {};
    int N;
    t[0].data = numbers;
    t[0].axes = 3;
    for (int a = 0; a < 3; a++) {
        t[0].shape[a] = shape[a];
        t[0].stride[a] = stride[a];
    }
    layout<1> l = layout_of(t, 1, false, &N);
    l.wide = wide != 0;
    return l.offset(0, l.find<1>(index));
}
