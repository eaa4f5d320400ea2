// SPDX-License-Identifier: Apache-2.0
#include "tests/parity/golden_run.h"

#include <criterion/criterion.h>
#include <math.h>
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
    c->optimizer.betas[0] = nd_golden_number(run->golden, "optimizer", "beta1", NULL);
    c->optimizer.betas[1] = nd_golden_number(run->golden, "optimizer", "beta2", NULL);
    c->optimizer.eps = nd_golden_number(run->golden, "optimizer", "eps", NULL);
    c->optimizer.weight_decay = nd_golden_number(run->golden, "optimizer", "weight_decay", NULL);
    c->optimizer.max_grad_norm = nd_golden_number(run->golden, "optimizer", "max_grad_norm", NULL);
    c->optimizer.schedule = ND_SCHEDULE_CONSTANT;
    c->resolved_mesh = (nd_mesh){{1, 1, 1, 1, 1}};
}

/* Numbers of the data, for each token of all steps. */
static int32_t *read_tokens(const golden_run *run, const char *name)
{
    const int64_t tokens = run->steps * run->batch * run->sequence;
    const int8_t *stored = nd_golden_i8(run->golden, name, tokens);
    int32_t *out = NULL;
    assert_ok(ND_ALLOC(tokens, &out));
    for (int64_t i = 0; i < tokens; i++) {
        out[i] = stored[i];
    }
    return out;
}

/* A token sees as many tokens before it as its position says. */
static void read_documents(golden_run *run)
{
    const int64_t tokens = run->steps * run->batch * run->sequence;
    run->positions = read_tokens(run, "position_ids");
    assert_ok(ND_ALLOC(tokens, &run->first_keys));
    for (int64_t i = 0; i < tokens; i++) {
        run->first_keys[i] = run->places[i] - run->positions[i];
    }
}

void golden_run_open(golden_run *run, const char *name, golden_options options)
{
    memset(run, 0, sizeof *run);
    assert_ok(nd_golden_open_model(name, &run->golden));
    run->steps = (int64_t)nd_golden_number(run->golden, "steps", NULL);
    run->batch = (int64_t)nd_golden_number(run->golden, "batch", NULL);
    run->sequence = (int64_t)nd_golden_number(run->golden, "sequence", NULL);
    run->inputs = read_tokens(run, "input_ids");
    run->labels = read_tokens(run, "labels");
    tempdir_make(&run->dir);
    golden_data_model(name, &run->dir);
    assert_ok(nd_hf_reader_open(run->dir.path, &run->weights));
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
    const int64_t tokens = run->steps * run->batch * run->sequence;
    assert_ok(ND_ALLOC(tokens, &run->places));
    for (int64_t i = 0; i < tokens; i++) { /* one rank */
        run->places[i] = (int32_t)(i % run->sequence);
    }
    if (options.separate) {
        read_documents(run);
    }
}

void golden_run_close(golden_run *run)
{
    free(run->inputs);
    free(run->labels);
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
    tempdir_remove(&run->dir);
}

nd_step_batch golden_run_batch(const golden_run *run, int64_t step)
{
    const int64_t n = run->batch * run->sequence, first = step * n;
    nd_step_batch batch = {.inputs = run->inputs + first,
                           .labels = run->labels + first,
                           .positions = run->places + first};
    if (run->first_keys) {
        batch.positions = run->positions + first;
        batch.first_keys = run->first_keys + first;
        batch.places = run->places + first;
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

double golden_run_distance(const golden_run *run, const char *kind, const nd_param *param,
                           const float *const *values)
{
    const nd_layout *layout = run->trainer->model->layout;
    double sums[GOLDEN_SKETCH] = {0}, difference = 0, norm = 0;
    char name[128];
    snprintf(name, sizeof name, "%s.%s", kind, param->file_name);
    const float *want = nd_golden_f32(run->golden, name, GOLDEN_SKETCH);
    for (int i = 0; i < layout->param_count; i++) {
        if (strcmp(layout->params[i].file_name, param->file_name) == 0) {
            golden_data_sketch(sums, &layout->params[i], values[i]);
        }
    }
    for (int i = 0; i < GOLDEN_SKETCH; i++) {
        difference += (sums[i] - want[i]) * (sums[i] - want[i]);
        norm += (double)want[i] * want[i];
    }
    return difference == 0 ? 0 : sqrt(difference / norm);
}

/* A bias of k that RoPE does not turn adds the same to all scores of a query. Its gradient is
 * rounding, which Adam magnifies to steps of the learning rate. */
static bool wanders(const nd_param *param)
{
    return param->id == ND_PARAM_K_BIAS && param->paired < param->head_rows;
}

void golden_run_expect_tensors(const golden_run *run, const char *name, bool final,
                               const float *const *values)
{
    const nd_layout *layout = run->trainer->model->layout;
    const char *kind = final ? "final" : "grad";
    for (int i = 0; i < layout->param_count; i++) {
        const nd_param *p = &layout->params[i];
        const double error = golden_run_distance(run, kind, p, values);
        cr_assert(error < (final ? GOLDEN_FINAL_BOUND : GOLDEN_GRADIENT_BOUND) ||
                      (final && wanders(p)),
                  "%s: %s.%s differs by %.2e", name, kind, p->file_name, error);
    }
}
