// SPDX-License-Identifier: Apache-2.0
/* Sizes that readers accept and no backend can compute. */
#include "tests/unit/runtime/config/support.h"

#include "kernels/cuda/cuda_ops.h"
#include "tests/unit/trainer/shapes.h"
#include "trainer/step/step.h"

/* Each number is one that the readers of config.json and YAML accept. */
static const nd_shape small = {SIZES(256, 64, 96, 2, 4, 4, 16), .max_positions = 1 << 30};
static const nd_ops ops = {.name = "some", .limits = {512, 32, 1 << 20}};

static nd_status check_on(const nd_ops *backend, const nd_shape *shape, int64_t batch,
                          int64_t sequence, int cp)
{
    nd_config config = {0};
    nd_mesh mesh = {{1, 1, 1, cp, 1}};
    config.train.micro_batch_size = batch;
    config.train.sequence_length = sequence;
    return nd_trainer_check_limits(backend, &config, &mesh, shape);
}

Test(limits, what_is_at_a_limit_is_allowed)
{
    nd_shape s = small;
    s.hidden = 512;
    s.head_dim = 32;
    cr_expect_eq(check_on(&ops, &s, 1024, 1024, 1), ND_OK, "%s", nd_error_last()->message);
    cr_expect_eq(check_on(&ops, &s, 1024, 4096, 4), ND_OK, "%s", nd_error_last()->message);
}

Test(limits, key_value_and_limit_are_named)
{
    nd_shape s = small;
    s.hidden = 513;
    expect_sentence(check_on(&ops, &s, 1, 32, 1), ND_ERR_DATA,
                    "hidden_size is 513|\"some\"|at most 512");
    s = small;
    s.head_dim = 34;
    expect_sentence(check_on(&ops, &s, 1, 32, 1), ND_ERR_DATA, "head_dim is 34|at most 32");
    expect_sentence(check_on(&ops, &small, 1025, 4096, 4), ND_ERR_CONFIG,
                    "micro_batch_size 1025|sequence_length 4096|mesh.cp 4|1049600|at most 1048576");
}

/* The largest that the readers accept: no product may overflow before it is refused. */
Test(limits, plans_that_no_host_can_address)
{
    nd_shape s = small;
    nd_ops any = {.name = "any"};
    s.layers = 8;
    expect_sentence(check_on(&any, &s, 65536, 134217728, 1), ND_ERR_RESOURCE,
                    "8796093022208 tokens|micro_batch_size 65536");
    s = (nd_shape){SIZES(1 << 24, 1 << 20, 1 << 22, 4096, 4096, 4096, 1024)};
    expect_sentence(check_on(&any, &s, 1, 1 << 20, 1), ND_ERR_RESOURCE, "4096 layers|GiB");
    cr_expect_eq(check_on(&any, &s, 1, 4096, 1), ND_OK, "%s", nd_error_last()->message);
}

/* A plan for GPUs is refused as the GPU itself would refuse it. */
Test(limits, of_the_gpu_hold_for_its_planner)
{
    nd_ops planner = nd_ops_cuda_planner(false);
    nd_shape s = small;
    s.head_dim = 256;
    cr_expect_eq(check_on(&planner, &s, 1, 32, 1), ND_OK, "%s", nd_error_last()->message);
    s.head_dim = 258;
    expect_sentence(check_on(&planner, &s, 1, 32, 1), ND_ERR_DATA,
                    "head_dim is 258|\"cuda\"|at most 256");
    expect_sentence(check_on(&planner, &small, 65536, 65536, 1), ND_ERR_CONFIG,
                    "4294967296 tokens|at most 2147483647");
}
