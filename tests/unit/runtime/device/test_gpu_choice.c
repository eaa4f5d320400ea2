// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include "runtime/device/gpu_choice.h"
#include "tests/support/tempdir.h"

static int choose(const char *ids, int visible, int local_rank, int local_workers, bool launched)
{
    nd_gpu_request request = {ids, visible, local_rank, local_workers, launched};
    int ordinal = -1;
    assert_ok(nd_gpu_choose(&request, &ordinal));
    return ordinal;
}

Test(gpu_choice, one_of_its_own_is_the_only_one)
{
    for (int local_rank = 0; local_rank < 4; local_rank++) {
        cr_assert_eq(choose("all", 1, local_rank, 4, false), 0);
    }
}

Test(gpu_choice, among_the_nodes_gpus_it_is_the_local_rank)
{
    for (int local_rank = 0; local_rank < 4; local_rank++) {
        cr_assert_eq(choose("all", 4, local_rank, 4, false), local_rank);
        cr_assert_eq(choose("all", 8, local_rank, 4, true), local_rank);
    }
    cr_assert_eq(choose("all", 1, 0, 1, true), 0);
}

Test(gpu_choice, a_list_counts_the_visible_ones)
{
    cr_assert_eq(choose("3,1", 4, 0, 2, true), 3);
    cr_assert_eq(choose("3,1", 4, 1, 2, false), 1);
    cr_assert_eq(choose("10,11,12", 16, 2, 3, true), 12);
}

Test(gpu_choice, too_few_are_refused_with_the_numbers)
{
    int ordinal = 7;
    const nd_gpu_request launched = {"all", 1, 0, 4, true}, tasks = {"all", 2, 1, 4, false};
    const nd_gpu_request listed = {"0,1", 8, 2, 3, true}, beyond = {"0,4", 4, 1, 2, true};
    assert_fails(nd_gpu_choose(&launched, &ordinal), ND_ERR_CONFIG,
                 "4 workers of this host need a GPU each, but 1 is visible");
    assert_fails(nd_gpu_choose(&tasks, &ordinal), ND_ERR_CONFIG, "but 2 are visible");
    assert_fails(nd_gpu_choose(&listed, &ordinal), ND_ERR_CONFIG, "names 2 GPUs");
    assert_fails(nd_gpu_choose(&beyond, &ordinal), ND_ERR_CONFIG, "gives GPU 4 to local rank 1");
    cr_assert_eq(ordinal, 7);
}

/* As under srun --gpus-per-task=1 with several tasks on a node. */
Test(gpu_choice, several_workers_that_see_one_gpu_each_are_noticed)
{
    cr_expect(nd_gpu_is_seen_alone(&(nd_gpu_request){"all", 1, 0, 4, false}));
    cr_expect(nd_gpu_is_seen_alone(&(nd_gpu_request){"0", 1, 3, 4, false}));
    cr_expect_not(nd_gpu_is_seen_alone(&(nd_gpu_request){"all", 1, 0, 1, false}));
    cr_expect_not(nd_gpu_is_seen_alone(&(nd_gpu_request){"all", 4, 0, 4, false}));
    cr_expect_not(nd_gpu_is_seen_alone(&(nd_gpu_request){"all", 1, 0, 4, true}));
}
