// SPDX-License-Identifier: Apache-2.0
/* The emulator: what it must catch, and that it runs threads as a GPU does. */
#include <criterion/criterion.h>
#include <math.h>
#include <signal.h>

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
