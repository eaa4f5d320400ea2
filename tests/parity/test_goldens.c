// SPDX-License-Identifier: Apache-2.0
/*
 * Whole models against PyTorch and transformers (scripts/golden.py): loss, every gradient and 10
 * AdamW steps in F32, and the distance of BF16 from F32. Bounds of DESIGN 10.2.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/parity/golden_reader.h"
#include "tests/support/tempdir.h"
#include "trainer/ckpt/model_io.h"
#include "trainer/trainer.h"

enum { STEPS = 10, MAX_TENSOR = 1 << 16 };

typedef struct fixture {
    nd_golden *golden;
    nd_hf_reader *weights;
    nd_config config;
    nd_progress progress;
    nd_rank rank;
    nd_trainer *trainer;
    int64_t batch, sequence;
    int32_t *positions;
} fixture;

static void fill_config(fixture *f, nd_precision precision)
{
    nd_config *c = &f->config;
    c->train.steps = STEPS;
    c->train.sequence_length = f->sequence;
    c->train.micro_batch_size = f->batch;
    c->train.gradient_accumulation_steps = 1;
    c->train.precision = precision;
    c->optimizer.lr = nd_golden_number(f->golden, "optimizer", "lr", NULL);
    c->optimizer.beta1 = nd_golden_number(f->golden, "optimizer", "beta1", NULL);
    c->optimizer.beta2 = nd_golden_number(f->golden, "optimizer", "beta2", NULL);
    c->optimizer.eps = nd_golden_number(f->golden, "optimizer", "eps", NULL);
    c->optimizer.weight_decay = nd_golden_number(f->golden, "optimizer", "weight_decay", NULL);
    c->optimizer.max_grad_norm = nd_golden_number(f->golden, "optimizer", "max_grad_norm", NULL);
    c->optimizer.schedule = ND_SCHEDULE_CONSTANT;
}

static void fixture_open(fixture *f, const char *name, nd_precision precision)
{
    char folder[PATH_MAX];
    memset(f, 0, sizeof *f);
    assert_ok(nd_golden_open_model(name, &f->golden));
    f->batch = (int64_t)nd_golden_number(f->golden, "batch", NULL);
    f->sequence = (int64_t)nd_golden_number(f->golden, "sequence", NULL);
    assert_ok(nd_hf_reader_open(nd_golden_folder(name, folder, sizeof folder), &f->weights));
    assert_ok(nd_hf_reader_check(f->weights));
    fill_config(f, precision);
    assert_ok(nd_progress_open(-1, 1, &f->progress));
    nd_rank *r = &f->rank;
    r->world_size = 1;
    r->mesh = (nd_mesh){{1, 1, 1, 1, 1}};
    r->config = &f->config;
    r->shape = *nd_hf_reader_shape(f->weights);
    r->progress = f->progress.slots;
    assert_ok(nd_device_open_cpu(2, &r->device));
    assert_ok(nd_ops_cpu(r->device, &r->ops));
    assert_ok(r->device->table->stream_init(r->device, &r->stream));
    assert_ok(nd_transport_open_self(r->progress, &r->transport));
    assert_ok(nd_groups_create(r->transport, &r->mesh, &r->groups));
    assert_ok(nd_trainer_create(r, &f->trainer));
    assert_ok(nd_trainer_commit(f->trainer));
    assert_ok(nd_model_io_load(f->trainer->model, f->weights));
    f->positions = calloc((size_t)(f->batch * f->sequence), sizeof *f->positions);
    for (int64_t i = 0; i < f->batch * f->sequence; i++) {
        f->positions[i] = (int32_t)(i % f->sequence);
    }
}

static void fixture_close(fixture *f)
{
    free(f->positions);
    nd_trainer_destroy(f->trainer);
    nd_groups_destroy(&f->rank.groups);
    nd_transport_close(f->rank.transport);
    nd_device_close(f->rank.device);
    nd_progress_close(&f->progress);
    nd_hf_reader_close(f->weights);
    nd_golden_close(f->golden);
}

static nd_step_batch batch_of(const fixture *f, int64_t step)
{
    int64_t n = f->batch * f->sequence;
    nd_step_batch batch = {
        .inputs = nd_golden_i32(f->golden, "input_ids", STEPS * n) + step * n,
        .labels = nd_golden_i32(f->golden, "labels", STEPS * n) + step * n,
        .positions = f->positions,
    };
    for (int64_t i = 0; i < n; i++) {
        batch.valid += batch.labels[i] != -100;
    }
    return batch;
}

/* One worker's shard is the whole unit, so a parameter is a slice of the state. */
static const float *slice(const fixture *f, const float *state, const nd_param *p)
{
    return state + f->trainer->model->layout->units[p->unit].segments[p->segment].shard_offset +
           p->offset;
}

static void compare_tensors(const fixture *f, const float *state, const char *prefix, double bound)
{
    const nd_layout *layout = f->trainer->model->layout;
    for (int i = 0; i < layout->param_count; i++) {
        const nd_param *p = &layout->params[i];
        char name[128];
        snprintf(name, sizeof name, "%s.%s", prefix, p->name);
        const float *want = nd_golden_f32(f->golden, name, p->rows * p->cols);
        double error = nd_relative_l2(slice(f, state, p), want, p->rows * p->cols);
        cr_assert_lt(error, bound, "%s differs by %.2e", name, error);
    }
}

static void check_fp32(const char *name)
{
    fixture f;
    double losses[STEPS], norms[STEPS];
    fixture_open(&f, name, ND_PRECISION_FP32);
    nd_golden_numbers(f.golden, losses, STEPS, "losses", NULL);
    nd_golden_numbers(f.golden, norms, STEPS, "grad_norms", NULL);
    for (int64_t step = 0; step < STEPS; step++) {
        nd_step_batch batch = batch_of(&f, step);
        nd_step_result result;
        assert_ok(nd_trainer_step(f.trainer, &batch, &result));
        if (step == 0) {
            compare_tensors(&f, f.trainer->model->fsdp.grad, "grad", 1e-4);
        }
        /* The first loss to 1e-5; later ones follow ten updates of Adam, which magnifies rounding:
         * 1e-4. */
        cr_assert_float_eq(result.loss / losses[step], 1.0, step == 0 ? 1e-5 : 1e-4,
                           "%s: loss %.9g of step %ld, golden %.9g", name, result.loss,
                           (long)step + 1, losses[step]);
        cr_assert_float_eq(result.grad_norm / norms[step], 1.0, 1e-3,
                           "%s: norm %.9g of step %ld, golden %.9g", name, result.grad_norm,
                           (long)step + 1, norms[step]);
    }
    /* Adam moves every element by about lr a step; weights agree to a small part of the ten
     * moves. */
    compare_tensors(&f, f.trainer->model->fsdp.master, "final", 2e-3);
    fixture_close(&f);
}

/* BF16: each gradient is no further from the F32 golden than 1.5 times the same model run as
 * .to(bfloat16). */
static void check_bf16(const char *name)
{
    fixture f;
    nd_step_result result;
    fixture_open(&f, name, ND_PRECISION_BF16);
    nd_step_batch batch = batch_of(&f, 0);
    assert_ok(nd_trainer_gradients(f.trainer, &batch, &result));
    double loss = nd_golden_number(f.golden, "loss", NULL);
    double bf16_loss = nd_golden_number(f.golden, "bf16", "loss", NULL);
    /* Torch's own error may be 0 by chance, so half a rounding to BF16 (2^-10) of the loss is
     * allowed besides. */
    cr_assert_leq(fabs(result.loss - loss), 1.5 * fabs(bf16_loss - loss) + 1e-3 * loss,
                  "%s: %.7g, f32 %.7g, torch %.7g", name, result.loss, loss, bf16_loss);
    const nd_layout *layout = f.trainer->model->layout;
    for (int i = 0; i < layout->param_count; i++) {
        const nd_param *p = &layout->params[i];
        char key[128];
        snprintf(key, sizeof key, "grad.%s", p->name);
        const float *want = nd_golden_f32(f.golden, key, p->rows * p->cols);
        double error =
            nd_relative_l2(slice(&f, f.trainer->model->fsdp.grad, p), want, p->rows * p->cols);
        double torch_error =
            nd_golden_number(f.golden, "bf16", "gradient_relative_l2", p->name, NULL);
        cr_assert_leq(error, 1.5 * torch_error,
                      "%s: gradient of %s is %.3e from f32, torch's bf16 %.3e", name, p->name,
                      error, torch_error);
    }
    fixture_close(&f);
}

Test(goldens, llama2_fp32)
{
    check_fp32("llama2");
}

Test(goldens, llama3_fp32)
{
    check_fp32("llama3");
}

Test(goldens, tied_fp32)
{
    check_fp32("tied");
}

Test(goldens, llama2_bf16)
{
    check_bf16("llama2");
}

Test(goldens, llama3_bf16)
{
    check_bf16("llama3");
}

Test(goldens, tied_bf16)
{
    check_bf16("tied");
}
