// SPDX-License-Identifier: Apache-2.0
/*
 * Whole models against PyTorch and transformers (scripts/golden.py): loss, every gradient and 12
 * AdamW steps in F32, and the distance of BF16 from F32.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/parity/golden_run.h"
#include "tests/support/tempdir.h"

enum { STEPS = GOLDEN_STEPS };

/* One worker's shard is the whole unit, so a parameter is a slice of the state. */
static const float **slices(const nd_layout *layout, const float *state)
{
    const float **out = NULL;
    assert_ok(ND_ALLOC(layout->param_count, &out));
    for (int i = 0; i < layout->param_count; i++) {
        const nd_param *p = &layout->params[i];
        out[i] = state + p->unit->segments[p->segment].shard_offset + p->offset;
    }
    return out;
}

static void compare_tensors(golden_run *f, const char *name, const float *state, bool final)
{
    float *host = golden_run_state(f, state);
    const float **values = slices(f->trainer->model->layout, host);
    golden_run_expect_tensors(f, name, final, values);
    free(values);
    free(host);
}

/* later: bound of losses behind the first and of norms. */
static void check_fp32(const char *name, bool separate, double later)
{
    golden_run f;
    double losses[STEPS], norms[STEPS];
    golden_run_open(&f, name, (golden_options){ND_PRECISION_FP32, .separate = separate});
    nd_golden_numbers(f.golden, losses, STEPS, "losses", NULL);
    nd_golden_numbers(f.golden, norms, STEPS, "grad_norms", NULL);
    for (int64_t step = 0; step < STEPS; step++) {
        nd_step_batch batch = golden_run_batch(&f, step);
        nd_step_result result;
        assert_ok(nd_trainer_step(f.trainer, &batch, &result));
        if (step == 0) {
            compare_tensors(&f, name, f.trainer->model->fsdp.grad, false);
        }
        /* The first loss to 1e-5; later ones follow updates of Adam, which magnifies rounding. */
        cr_assert_float_eq(result.loss / losses[step], 1.0, step == 0 ? 1e-5 : later,
                           "%s: loss %.9g of step %ld, golden %.9g", name, result.loss,
                           (long)step + 1, losses[step]);
        cr_assert_float_eq(result.grad_norm / norms[step], 1.0, later,
                           "%s: norm %.9g of step %ld, golden %.9g", name, result.grad_norm,
                           (long)step + 1, norms[step]);
    }
    /* Adam moves every element by about lr a step; weights agree to a small part of those moves. */
    compare_tensors(&f, name, f.trainer->model->fsdp.master, true);
    golden_run_close(&f);
}

/* cuDNN also rounds the probabilities and their gradients to BF16, which torch's model does not on
 * a CPU: as many roundings again, so errors of sqrt 2 times the size. Its double does not. */
static double more_roundings(const golden_run *f)
{
    const nd_device *device = f->trainer->rank->device;
    return strcmp(device->table->name, "cuda") == 0 && !strstr(device->name, "double") ? sqrt(2.0)
                                                                                       : 1.0;
}

/* How far the ratio of two errors of as many elements may be off by chance, in two deviations: each
 * norm has one of sqrt(1 / 2n), and ours is told from a sketch. */
static double luck_of(const nd_param *p)
{
    return 2 * sqrt(1.0 / (double)(p->file_rows * p->cols) + 1 / 256.0);
}

/* BF16: gradients are no further from the F32 golden than 1.5 times the same model run as
 * .to(bfloat16): those of all tensors together, where chance is averaged out, and each one but for
 * its luck. */
static void check_bf16(const char *name, bool separate)
{
    golden_run f;
    nd_step_result result;
    golden_run_open(&f, name, (golden_options){ND_PRECISION_BF16, .separate = separate});
    nd_step_batch batch = golden_run_batch(&f, 0);
    assert_ok(nd_trainer_gradients(f.trainer, &batch, &result));
    double loss = nd_golden_number(f.golden, "loss", NULL);
    double bf16_loss = nd_golden_number(f.golden, "bf16", "loss", NULL);
    /* Torch's own error may be 0 by chance, so half a rounding to BF16 (2^-10) of the loss is
     * allowed besides. */
    cr_assert_leq(fabs(result.loss - loss), 1.5 * fabs(bf16_loss - loss) + 1e-3 * loss,
                  "%s: %.7g, f32 %.7g, torch %.7g", name, result.loss, loss, bf16_loss);
    const nd_layout *layout = f.trainer->model->layout;
    float *gradients = golden_run_state(&f, f.trainer->model->fsdp.grad);
    const float **values = slices(layout, gradients);
    double squares = 0, torch_squares = 0;
    for (int i = 0; i < layout->param_count; i++) {
        const nd_param *p = &layout->params[i];
        const double error = golden_run_distance(&f, "grad", p, values);
        double torch_error =
            nd_golden_number(f.golden, "bf16", "gradient_relative_l2", p->file_name, NULL);
        cr_assert_leq(error, 1.5 * (1 + luck_of(p)) * more_roundings(&f) * torch_error,
                      "%s: gradient of %s is %.3e from f32, torch's bf16 %.3e", name, p->name,
                      error, torch_error);
        squares += error * error;
        torch_squares += torch_error * torch_error;
    }
    cr_assert_leq(sqrt(squares / torch_squares), 1.5 * more_roundings(&f),
                  "%s: all gradients are %.3e from f32, torch's bf16 %.3e", name, sqrt(squares),
                  sqrt(torch_squares));
    free(values);
    free(gradients);
    golden_run_close(&f);
}

#define GOLDEN(name)                                                                               \
    Test(goldens, name##_fp32)                                                                     \
    {                                                                                              \
        check_fp32(#name, false, 5e-5);                                                            \
    }                                                                                              \
    Test(goldens, name##_bf16)                                                                     \
    {                                                                                              \
        check_bf16(#name, false);                                                                  \
    }
EACH_FAMILY_GOLDEN(GOLDEN)

/* Separate documents, as transformers masks packed positions. */
Test(goldens, documents_fp32)
{
    check_fp32("documents", true, 2e-5);
}

Test(goldens, documents_bf16)
{
    check_bf16("documents", true);
}
