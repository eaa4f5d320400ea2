// SPDX-License-Identifier: Apache-2.0
/* Goldens of models with fewer KV heads than ranks of tp. */
#include <criterion/criterion.h>

#include "tests/parity/golden_run.h"
#include "tests/parity/mesh_data.h"

enum { STEPS = GOLDEN_STEPS };

static nd_status load_golden(void *context, nd_trainer *t)
{
    const golden_run *f = context;
    return nd_weights_load(&t->model->fsdp, f->weights);
}

static void take_golden(void *context, int64_t step, nd_step_batch *batch)
{
    *batch = golden_run_batch(context, step);
}

/* Tensors have the bounds that they have on one worker. */
static void compare_golden_tensor(golden_run *f, const mesh_result *got, int i)
{
    const int64_t size = got->sizes[i];
    char name[128];
    snprintf(name, sizeof name, "grad.%s", got->names[i]);
    double error = nd_relative_l2(got->gradients[i], nd_golden_f32(f->golden, name, size), size);
    cr_assert_lt(error, 1e-4, "%s differs by %.2e", name, error);
    snprintf(name, sizeof name, "final.%s", got->names[i]);
    error = nd_relative_l2(got->weights[i], nd_golden_f16(f->golden, name, size), size);
    cr_assert_lt(error, 2e-3, "%s differs by %.2e", name, error);
}

/* Two ranks have a copy of each of the 2 KV heads, with its biases or norms. */
static void check_copies_of_kv_heads(const char *name)
{
    static const mesh_case tp4 = {"tp 4", 1, 1, 1, 4, 2};
    golden_run f;
    double losses[STEPS], norms[STEPS];
    tempdir dir;
    mesh_result got;
    tempdir_make(&dir);
    golden_run_open(&f, name, (golden_options){ND_PRECISION_FP32});
    nd_golden_numbers(f.golden, losses, STEPS, "losses", NULL);
    nd_golden_numbers(f.golden, norms, STEPS, "grad_norms", NULL);
    cr_assert_eq(f.rank.shape.kv_heads, 2);
    mesh_job job = mesh_job_on_tokens(mesh_token_file(&dir, "tokens.bin", 2000, 80, 0),
                                      f.rank.shape, ND_PRECISION_FP32);
    job.global_batch = f.batch;
    job.sequence = f.sequence;
    job.steps = STEPS;
    job.start = load_golden;
    job.batch = take_golden;
    job.context = &f;
    assert_ok(mesh_run(&job, &tp4, &got));
    for (int s = 0; s < STEPS; s++) {
        cr_assert_float_eq(got.loss[s] / losses[s], 1.0, s == 0 ? 1e-5 : 1e-4, "%s: step %d", name,
                           s + 1);
        cr_assert_float_eq(got.norm[s] / norms[s], 1.0, 1e-3, "%s: norm of step %d", name, s + 1);
    }
    for (int i = 0; i < got.tensors; i++) {
        compare_golden_tensor(&f, &got, i);
    }
    mesh_result_free(&got);
    golden_run_close(&f);
    tempdir_remove(&dir);
}

Test(golden_copies, llama_bias_with_copies_of_kv_heads)
{
    check_copies_of_kv_heads("llama_bias");
}

Test(golden_copies, qwen3_with_copies_of_kv_heads)
{
    check_copies_of_kv_heads("qwen3");
}
