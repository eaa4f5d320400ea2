// SPDX-License-Identifier: Apache-2.0
#include "tests/parity/golden_run.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "tests/parity/rank_device.h"
#include "tests/support/tempdir.h"
#include "trainer/weights/weights.h"

static void fill_config(golden_run *run, const golden_options *o)
{
    nd_config *c = &run->config;
    c->data.documents = o->separate ? ND_DOCUMENTS_SEPARATE : ND_DOCUMENTS_JOIN;
    c->train.steps = run->steps;
    c->train.sequence_length = run->sequence;
    c->train.micro_batch_size = run->batch;
    c->train.gradient_accumulation_steps = o->accumulation ? o->accumulation : 1;
    c->train.precision = o->precision;
    c->fp8.recipe = o->recipe;
    c->fp8.all_gather = o->all_gather;
    c->fp8.amax_history_length = 16;
    c->fp8.margin = o->margin;
    c->fp8.amax_compute = o->history_max ? ND_FP8_AMAX_MAX : ND_FP8_AMAX_MOST_RECENT;
    c->optimizer.lr = nd_golden_number(run->golden, "optimizer", "lr", NULL);
    c->optimizer.beta1 = nd_golden_number(run->golden, "optimizer", "beta1", NULL);
    c->optimizer.beta2 = nd_golden_number(run->golden, "optimizer", "beta2", NULL);
    c->optimizer.eps = nd_golden_number(run->golden, "optimizer", "eps", NULL);
    c->optimizer.weight_decay = nd_golden_number(run->golden, "optimizer", "weight_decay", NULL);
    c->optimizer.max_grad_norm = nd_golden_number(run->golden, "optimizer", "max_grad_norm", NULL);
    c->optimizer.schedule = ND_SCHEDULE_CONSTANT;
    c->resolved_mesh = (nd_mesh){{1, 1, 1, 1, 1}};
}

/* A token sees as many tokens before it as its position says. */
static void read_documents(golden_run *run)
{
    const int64_t tokens = GOLDEN_STEPS * run->batch * run->sequence;
    const int32_t *positions = nd_golden_i32(run->golden, "position_ids", tokens);
    run->first_keys = calloc((size_t)tokens, sizeof *run->first_keys);
    for (int64_t i = 0; i < tokens; i++) {
        run->first_keys[i] = (int32_t)(i % run->sequence) - positions[i];
    }
    run->places = calloc((size_t)tokens, sizeof *run->places);
    for (int64_t i = 0; i < tokens; i++) { /* one rank */
        run->places[i] = (int32_t)(i % run->sequence);
    }
}

void golden_run_open(golden_run *run, const char *name, golden_options options)
{
    char folder[PATH_MAX];
    memset(run, 0, sizeof *run);
    assert_ok(nd_golden_open_model(name, &run->golden));
    run->steps = (int64_t)nd_golden_number(run->golden, "steps", NULL);
    run->batch = (int64_t)nd_golden_number(run->golden, "batch", NULL);
    run->sequence = (int64_t)nd_golden_number(run->golden, "sequence", NULL);
    assert_ok(nd_hf_reader_open(nd_golden_folder(name, folder, sizeof folder), &run->weights));
    assert_ok(nd_hf_reader_check(run->weights));
    fill_config(run, &options);
    assert_ok(nd_progress_open(-1, 1, &run->progress));
    nd_rank *r = &run->rank;
    r->world_size = 1;
    r->mesh = run->config.resolved_mesh;
    r->config = &run->config;
    r->shape = *nd_hf_reader_shape(run->weights);
    r->progress = run->progress.slots;
    assert_ok(nd_transport_open_self(r->progress, &run->self));
    r->transport = run->self;
    assert_ok(rank_device_open(r, 1));
    assert_ok(r->device->table->stream_init(r->device, &r->stream));
    assert_ok(nd_groups_create(r->transport, &r->mesh, &r->groups));
    assert_ok(nd_trainer_create(r, NULL, &run->trainer));
    assert_ok(nd_trainer_commit(run->trainer));
    assert_ok(nd_weights_load(&run->trainer->model->fsdp, run->weights));
    const int64_t tokens =
        run->config.train.gradient_accumulation_steps * run->batch * run->sequence;
    run->positions = calloc((size_t)tokens, sizeof *run->positions);
    for (int64_t i = 0; i < tokens; i++) {
        run->positions[i] = (int32_t)(i % run->sequence);
    }
    if (options.separate) {
        read_documents(run);
    }
}

void golden_run_close(golden_run *run)
{
    free(run->positions);
    free(run->first_keys);
    free(run->places);
    nd_trainer_destroy(run->trainer);
    nd_groups_destroy(&run->rank.groups);
    run->rank.device->table->stream_fini(&run->rank.stream);
    rank_device_close(&run->rank, run->self);
    nd_transport_close(run->self);
    nd_progress_close(&run->progress);
    nd_hf_reader_close(run->weights);
    nd_golden_close(run->golden);
}

nd_step_batch golden_run_batch(const golden_run *run, int64_t step)
{
    int64_t n = run->batch * run->sequence;
    nd_step_batch batch = {
        .inputs = nd_golden_i32(run->golden, "input_ids", run->steps * n) + step * n,
        .labels = nd_golden_i32(run->golden, "labels", run->steps * n) + step * n,
        .positions = run->positions,
    };
    if (run->first_keys) {
        batch.positions = nd_golden_i32(run->golden, "position_ids", GOLDEN_STEPS * n) + step * n;
        batch.first_keys = run->first_keys + step * n;
        batch.places = run->places + step * n;
    }
    for (int64_t i = 0; i < n * run->config.train.gradient_accumulation_steps; i++) {
        batch.valid += batch.labels[i] != -100;
    }
    return batch;
}

float *golden_run_state(golden_run *run, const float *state)
{
    size_t bytes = (size_t)run->trainer->model->layout->shard_total * sizeof *state;
    float *host = malloc(bytes);
    assert_ok(nd_copy(&run->rank.stream, host, state, bytes));
    assert_ok(nd_stream_sync(&run->rank.stream));
    return host;
}

float *golden_run_order(const nd_param *param, const float *file)
{
    float *out = malloc((size_t)(param->rows * param->cols) * sizeof *out);
    cr_assert_not_null(out);
    for (int64_t i = 0; i < param->rows * param->cols; i++) {
        out[i] = file[nd_param_in_file(param, i)];
    }
    return out;
}
