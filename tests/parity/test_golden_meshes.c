// SPDX-License-Identifier: Apache-2.0
/* The goldens of every family on meshes, within the bounds that they have on one worker. */
#include <criterion/criterion.h>

#include "tests/parity/golden_run.h"
#include "tests/parity/mesh_data.h"

enum { STEPS = GOLDEN_STEPS };

static tempdir dir;

TEMPDIR_SUITE(golden_meshes, tempdir_leave_empty, .timeout = 300);

static nd_status load_golden(void *context, nd_trainer *t)
{
    const golden_run *f = context;
    return nd_weights_load(&t->model->fsdp, f->weights);
}

/* This rank's rows of the golden's batch, at the positions that it has of them. */
static void take_golden(void *context, const nd_rank *rank, int64_t step, nd_step_batch *batch)
{
    const golden_run *f = context;
    const int64_t rows = f->batch / nd_mesh_group_size(&rank->mesh, ND_GROUP_DP),
                  length = f->sequence / rank->mesh.size[ND_AXIS_CP],
                  first = rows * nd_mesh_group_index(&rank->mesh, ND_GROUP_DP, rank->rank);
    const nd_step_batch whole = golden_run_batch(f, step);
    int32_t *inputs = (int32_t *)batch->inputs, *labels = (int32_t *)batch->labels;
    batch->valid = 0;
    for (int64_t i = 0; i < rows * length; i++) {
        const int64_t from = (first + i / length) * f->sequence + batch->positions[i];
        inputs[i] = whole.inputs[from];
        labels[i] = whole.labels[from];
        batch->valid += labels[i] != -100;
    }
}

static void check_mesh(golden_run *f, const mesh_case *mesh)
{
    mesh_job job = mesh_sized_job(&dir, 4000, f->rank.shape, ND_PRECISION_FP32, (int)f->batch,
                                  (int)f->sequence, STEPS);
    double losses[STEPS], norms[STEPS];
    nd_golden_numbers(f->golden, losses, STEPS, "losses", NULL);
    nd_golden_numbers(f->golden, norms, STEPS, "grad_norms", NULL);
    job.start = load_golden;
    job.batch = take_golden;
    job.context = f;
    mesh_result got = mesh_trained(&job, mesh);
    for (int s = 0; s < STEPS; s++) {
        const double bound = s == 0 ? 1e-5 : 5e-5;
        cr_assert_float_eq(got.loss[s] / losses[s], 1.0, bound, "%s: loss %.9g of step %d",
                           mesh->name, got.loss[s], s + 1);
        cr_assert_float_eq(got.norm[s] / norms[s], 1.0, 5e-5, "%s: norm %.9g of step %d, not %.9g",
                           mesh->name, got.norm[s], s + 1, norms[s]);
    }
    golden_run_expect_tensors(f, mesh->name, false, (const float *const *)got.gradients);
    golden_run_expect_tensors(f, mesh->name, true, (const float *const *)got.weights);
}

static void check_meshes(const char *name)
{
    static const mesh_case meshes[] = {
        {"tp 2", 1, 1, 1, 2, 2},        {"fsdp 2", 1, 2, 1, 1, 1},
        {"cp 2", 1, 1, 2, 1, 2},        {"cp 2, ring", 1, 1, 2, 1, 2, .ring = true},
        {"tp 2 x cp 2", 1, 1, 2, 2, 2}, {"fsdp 2 x cp 2 x tp 2, ring", 1, 2, 2, 2, 1, .ring = true},
        {"tp 4", 1, 1, 1, 4, 2}, /* two ranks have a copy of each of 2 KV heads */
    };
    golden_run f;
    golden_run_open(&f, name, (golden_options){ND_PRECISION_FP32});
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        if (f.rank.shape.heads % meshes[i].tp == 0 && f.rank.shape.ffn % meshes[i].tp == 0) {
            check_mesh(&f, &meshes[i]);
        }
    }
    golden_run_close(&f);
}

#define GOLDEN(name)                                                                               \
    Test(golden_meshes, name)                                                                      \
    {                                                                                              \
        check_meshes(#name);                                                                       \
    }
EACH_FAMILY_GOLDEN(GOLDEN)
