// SPDX-License-Identifier: Apache-2.0
/* The emulator: what it must catch, and that it runs threads as a GPU does; and the arithmetic of
 * indices. */
#include <criterion/criterion.h>
#include <math.h>
#include <signal.h>

#include "runtime/base/rng.h"
#include "tests/hostcuda/faults.h"
#include "tests/hostcuda/fibers.h"

Test(fibers, a_thread_that_returned_before_a_barrier, .signal = SIGABRT)
{
    faults_return_before_a_barrier();
}

Test(fibers, lanes_that_leave_out_a_shuffle, .signal = SIGABRT)
{
    faults_leave_out_a_shuffle();
}

Test(fibers, a_shuffle_in_a_launch_without_meetings, .signal = SIGABRT)
{
    faults_meet_where_none_was_promised();
}

Test(fibers, a_pack_that_is_not_aligned, .signal = SIGABRT)
{
    faults_load_a_pack_across_a_boundary();
}

Test(fibers, a_missing_barrier_shows_in_every_order)
{
    for (int order = HOSTCUDA_ASCENDING; order <= HOSTCUDA_SHUFFLED; order++) {
        hostcuda_set_order((enum hostcuda_order)order);
        cr_assert_eq(faults_sum(1), 63.0f * 64.0f / 2.0f);
        cr_assert(isnan(faults_sum(0)));
    }
}

Test(fibers, shared_memory_of_a_block_begins_with_nan)
{
    cr_assert(faults_shared_memory_is_fresh());
}

Test(fibers, reductions_of_every_block_size)
{
    for (int order = HOSTCUDA_ASCENDING; order <= HOSTCUDA_SHUFFLED; order++) {
        hostcuda_set_order((enum hostcuda_order)order);
        for (int threads = 32; threads <= 1024; threads += 32) {
            int64_t launches = hostcuda_launch_count();
            cr_assert_eq(faults_tree(threads), 3.0 * threads * (threads - 1) / 2.0);
            cr_assert_eq(hostcuda_launch_count(), launches + 1);
        }
    }
}

Test(pieces, quotients)
{
    for (uint64_t i = 0; i < 200000; i++) {
        uint64_t draw = nd_rng_u64(7, 0, i);
        uint32_t d = (uint32_t)(draw & 0x7fffffff) >> (draw >> 58 & 31), n = (uint32_t)(draw >> 32);
        d = d == 0 ? 1 : d;
        n &= 0x7fffffff;
        const uint32_t numerators[] = {n, n / d * d, n / d * d - (n >= d), 0x7fffffff, d - 1, d};
        for (int k = 0; k < 6; k++) {
            cr_assert_eq(pieces_quotient(numerators[k], d), numerators[k] / d, "%u / %u",
                         numerators[k], d);
        }
    }
}

Test(pieces, places_of_views)
{
    static const int64_t cases[][6] = {
        {5, 7, 11, 77, 11, 1},  {5, 7, 11, 100, 11, 1}, {5, 7, 11, 77, 16, 1},
        {5, 7, 11, 200, 16, 1}, {1, 7, 11, 0, 16, 1},   {5, 1, 11, 64, 3, 1},
        {5, 7, 1, 70, 9, 1},
    };
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        const int64_t *shape = cases[c], *stride = cases[c] + 3;
        for (int64_t i = 0; i < shape[0] * shape[1] * shape[2]; i++) {
            int64_t column = i % shape[2], row = i / shape[2];
            int64_t want =
                row / shape[1] * stride[0] + row % shape[1] * stride[1] + column * stride[2];
            cr_assert_eq(pieces_offset(shape, stride, i, 0), want, "case %zu, %lld", c,
                         (long long)i);
            cr_assert_eq(pieces_offset(shape, stride, i, 1), want, "case %zu, %lld", c,
                         (long long)i);
        }
    }
}
