// SPDX-License-Identifier: Apache-2.0
#include "tests/parity/fp8_fixture.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "trainer/ckpt/model_io.h"

static void fill_config(fp8_fixture *f, nd_precision precision, nd_fp8_recipe recipe,
                        bool all_gather)
{
    nd_config *c = &f->config;
    c->train.steps = FP8_FIXTURE_STEPS;
    c->train.sequence_length = f->sequence;
    c->train.micro_batch_size = f->batch;
    c->train.gradient_accumulation_steps = 1;
    c->train.precision = precision;
    c->fp8.recipe = recipe;
    c->fp8.all_gather = all_gather;
    c->fp8.amax_history_length = 16;
    c->optimizer.lr = nd_golden_number(f->golden, "optimizer", "lr", NULL);
    c->optimizer.beta1 = nd_golden_number(f->golden, "optimizer", "beta1", NULL);
    c->optimizer.beta2 = nd_golden_number(f->golden, "optimizer", "beta2", NULL);
    c->optimizer.eps = nd_golden_number(f->golden, "optimizer", "eps", NULL);
    c->optimizer.weight_decay = nd_golden_number(f->golden, "optimizer", "weight_decay", NULL);
    c->optimizer.max_grad_norm = nd_golden_number(f->golden, "optimizer", "max_grad_norm", NULL);
    c->optimizer.schedule = ND_SCHEDULE_CONSTANT;
    c->resolved_mesh = (nd_mesh){{1, 1, 1, 1, 1}};
}

void fp8_fixture_open(fp8_fixture *f, nd_precision precision, nd_fp8_recipe recipe, bool all_gather)
{
    char folder[PATH_MAX];
    memset(f, 0, sizeof *f);
    assert_ok(nd_golden_open_model("fp8/model", &f->golden));
    f->batch = (int64_t)nd_golden_number(f->golden, "batch", NULL);
    f->sequence = (int64_t)nd_golden_number(f->golden, "sequence", NULL);
    assert_ok(nd_hf_reader_open(nd_golden_folder("fp8/model", folder, sizeof folder), &f->weights));
    assert_ok(nd_hf_reader_check(f->weights));
    fill_config(f, precision, recipe, all_gather);
    assert_ok(nd_progress_open(-1, 1, &f->progress));
    nd_rank *r = &f->rank;
    r->world_size = 1;
    r->mesh = f->config.resolved_mesh;
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

void fp8_fixture_close(fp8_fixture *f)
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

nd_step_batch fp8_fixture_batch(const fp8_fixture *f, int64_t step)
{
    int64_t n = f->batch * f->sequence;
    return (nd_step_batch){
        .inputs = nd_golden_i32(f->golden, "input_ids", FP8_FIXTURE_STEPS * n) + step * n,
        .labels = nd_golden_i32(f->golden, "labels", FP8_FIXTURE_STEPS * n) + step * n,
        .positions = f->positions,
        .valid = n,
    };
}
