// SPDX-License-Identifier: Apache-2.0
/* Tests what a step tells all ranks, what it counts, and that recompute makes the same inputs again
 * whatever a filter leaves in BF16. */
#include <criterion/criterion.h>
#include <math.h>

#include "tests/parity/fp8_job.h"
#include "tests/support/ranks.h"
#include "trainer/step/step.h"

enum { SEQUENCE = 16, SIGNAL = 15 };

static tempdir dir;

TEMPDIR_SUITE(steps, tempdir_leave_empty, .timeout = 300);

/* Prompts of 3 to 13 bytes, so that blocks have different numbers of labels that count. */
static const char *rows_file(void)
{
    static char text[20000];
    size_t used = 0;
    for (int row = 0; row < 60; row++) {
        used += (size_t)snprintf(
            text + used, sizeof text - used, "{\"prompt\": \"%.*s\", \"completion\": \"%.*s\"}\n",
            3 + row * 7 % 11, "the quick brown fox", 2 + row * 5 % 9, "jumps over the dog");
    }
    return tempdir_write(&dir, "rows.jsonl", text, used);
}

static mesh_job job_on_rows(int64_t steps)
{
    mesh_job job = mesh_job_on_tokens(rows_file(), mesh_small_llama(256), ND_PRECISION_FP32);
    job.format = ND_DATA_JSONL;
    job.tokenizer = "bytes";
    job.global_batch = 4;
    job.sequence = SEQUENCE;
    job.steps = steps;
    return job;
}

/* Who worked longest. */

Test(steps, the_rank_whose_data_are_late_is_the_slowest)
{
    static const mesh_case mesh = {"fsdp 2 x tp 2", 1, 2, 1, 2, 1};
    mesh_job job = job_on_rows(2);
    mesh_result result;
    job.late_seconds = 1000;
    for (job.late_rank = 2; job.late_rank >= 0; job.late_rank -= 2) { /* and rank 0 */
        result = mesh_trained(&job, &mesh);
        for (int step = 0; step < 2; step++) {
            const nd_work *work = &result.work[step];
            cr_expect_eq(work->slowest_rank, job.late_rank, "rank %d", work->slowest_rank);
            cr_expect(work->slowest_seconds > 1000 && work->fastest_seconds < 1000,
                      "slowest %g, fastest %g", work->slowest_seconds, work->fastest_seconds);
        }
    }
    result = mesh_trained(&job, &mesh_one);
    cr_expect_eq(result.work[0].slowest_rank, -1, "one rank waits for nobody");
}

/* A stop. */

static nd_status ask_for_stop(void *context, nd_trainer *t, int64_t step)
{
    if (step == 1 && t->rank->rank == *(const int *)context) {
        nd_trainer_request_stop(t, SIGNAL);
    }
    return ND_OK;
}

static nd_status expect_stop(void *context, nd_trainer *t, int64_t step)
{
    int64_t expected = step < 1 ? 0 : SIGNAL;
    ND_CHECK(t->received->stop == expected, "step %lld on rank %d: stop %lld, not %lld",
             (long long)step, t->rank->rank, (long long)t->received->stop, (long long)expected);
    return ND_OK;
}

/* A signal to one worker ends the run on all of them, also on other replicas. */
Test(steps, a_stop_asked_of_any_rank_reaches_all)
{
    static const mesh_case mesh = {"hsdp 2 x 2", 2, 2, 1, 1, 1};
    int rank;
    mesh_job job = job_on_rows(2);
    job.before_step = ask_for_stop;
    job.after_step = expect_stop;
    job.context = &rank;
    for (rank = 0; rank < 4; rank++) {
        mesh_trained(&job, &mesh);
    }
}

/* Counts. */

static nd_status never(void *context, bool *stop)
{
    *stop = false;
    return ND_OK;
}

static nd_status labels_of(const nd_dataset *data, int64_t *labels)
{
    int32_t inputs[SEQUENCE], block[SEQUENCE];
    *labels = 0;
    for (int64_t b = 0; b < nd_dataset_blocks(data); b++) {
        ND_TRY(nd_dataset_block(data, b, &(nd_block){inputs, block}));
        for (int i = 0; i < SEQUENCE; i++) {
            *labels += block[i] != ND_LABEL_IGNORED;
        }
    }
    return ND_OK;
}

static nd_status evaluate(nd_trainer *t, const nd_dataset *data)
{
    const nd_stop_check check = {never, NULL};
    nd_loader_options options = nd_loader_options_of(t->rank, true);
    nd_loader *loader;
    double loss = 0.0;
    int64_t expected = 0, found = 0;
    ND_TRY(labels_of(data, &expected));
    ND_TRY(nd_loader_open(data, &options, &loader));
    nd_status status = nd_trainer_evaluate(t, loader, nd_loader_validation_steps(data, &options),
                                           &check, &loss, &found);
    nd_loader_close(loader);
    ND_TRY(status);
    ND_CHECK(found == expected, "validation counted %lld labels of %lld", (long long)found,
             (long long)expected);
    ND_CHECK(loss > 0.0 && loss < 10.0, "the validation loss is %g", loss);
    return ND_OK;
}

static nd_status evaluate_rows(void *context, nd_trainer *t)
{
    const mesh_job *job = context;
    nd_dataset *data;
    ND_TRY(mesh_open_data(job, job->data_path, &data));
    nd_status status = evaluate(t, data);
    nd_dataset_close(data);
    return status;
}

Test(steps, validation_counts_every_label_once)
{
    static const mesh_case meshes[] = {{"one", 1, 1, 1, 1, 1}, {"fsdp 2 x cp 2", 1, 2, 2, 1, 1}};
    mesh_job job = job_on_rows(1);
    job.end = evaluate_rows;
    job.context = &job;
    for (int i = 0; i < 2; i++) {
        mesh_trained(&job, &meshes[i]);
    }
}

static nd_status add_tokens(void *context, nd_trainer *t, int64_t step)
{
    int64_t *sum = context; /* one rank */
    *sum += t->received->tokens;
    ND_CHECK(t->position.tokens_seen == *sum, "%lld tokens were seen, not %lld",
             (long long)t->position.tokens_seen, (long long)*sum);
    return ND_OK;
}

Test(steps, tokens_seen_are_those_of_all_steps)
{
    int64_t sum = 0;
    mesh_job job = job_on_rows(5);
    job.after_step = add_tokens;
    job.context = &sum;
    mesh_trained(&job, &mesh_one);
}

/* A step that is skipped. */

static nd_status set_last_norm(nd_trainer *t, float value)
{
    const nd_layout *layout = t->model->layout;
    const nd_param *norm = nd_layout_param(layout, ND_PARAM_NORM_F, -1);
    t->model->fsdp.master[nd_layout_shard_range(layout, norm).begin] = value;
    nd_fsdp_weights_changed(&t->model->fsdp);
    return ND_OK;
}

static nd_status poison(void *context, nd_trainer *t, int64_t step)
{
    return step == 0 ? set_last_norm(t, NAN) : ND_OK;
}

static nd_status heal(void *context, nd_trainer *t, int64_t step)
{
    return step == 0 ? set_last_norm(t, 1.0f) : ND_OK; /* its initial value */
}

/* The update after it is the first one: that of a run that begins with the next sample. */
Test(steps, a_skipped_step_is_no_update)
{
    mesh_job job = job_on_rows(1);
    job.first_step = 1;
    mesh_result expected = mesh_trained(&job, &mesh_one);
    job.first_step = 0;
    job.steps = 2;
    job.nonfinite = ND_NONFINITE_SKIP;
    job.before_step = poison;
    job.after_step = heal;
    mesh_result found = mesh_trained(&job, &mesh_one);
    cr_expect(isnan(found.loss[0]));
    cr_expect_eq(found.loss[1], expected.loss[0]);
    mesh_expect_same(&found, &expected, MESH_WEIGHTS, "a step that is skipped");
}

static nd_status begin_with_low_losses(void *context, nd_trainer *t)
{
    ((nd_config *)t->rank->config)->train.spike_factor = 2; /* of this rank alone */
    while (t->position.recent.count < 16) {
        t->position.recent.value[t->position.recent.count++] = 0.001;
    }
    return ND_OK;
}

static nd_status expect_spike(void *context, nd_trainer *t, int64_t step)
{
    const nd_recent_losses *recent = &t->position.recent;
    ND_CHECK(t->position.skipped == step + 1 && recent->count == 17 + step &&
                 recent->value[16 + step] > 1,
             "after step %lld: %lld skipped, %lld losses are known", (long long)step,
             (long long)t->position.skipped, (long long)recent->count);
    return ND_OK;
}

/* The loss of a spike is one of those that the next ones are compared with. */
Test(steps, a_spike_may_be_the_new_level)
{
    mesh_job job = job_on_rows(2);
    job.nonfinite = ND_NONFINITE_SKIP;
    job.start = begin_with_low_losses;
    job.after_step = expect_spike;
    mesh_trained(&job, &mesh_one);
}

static nd_status resume_with_losses(void *context, nd_trainer *t)
{
    const nd_run_position position = {.recent = {.count = 3}};
    nd_config *config = (nd_config *)t->rank->config; /* of this rank alone */
    for (int factor = 2; factor >= 0; factor -= 2) {
        config->train.spike_factor = factor;
        nd_trainer_resume_at(t, position);
        ND_CHECK(t->position.recent.count == (factor ? 3 : 0), "with a factor of %d %lld losses",
                 factor, (long long)t->position.recent.count);
    }
    return ND_OK;
}

/* A start that looks for no spikes would else hand losses of long ago to one that does. */
Test(steps, losses_before_a_resume_count_only_where_spikes_are_looked_for)
{
    mesh_job job = job_on_rows(1);
    job.start = resume_with_losses;
    mesh_trained(&job, &mesh_one);
}

/* Recompute under filters. */

/* Inputs are kept as codes where all linears that read them are in FP8. */
Test(steps, recompute_changes_no_bit_under_any_filter)
{
    static const char *const filters[] = {"q_proj,k_proj,v_proj", "gate_proj,up_proj",
                                          "k_proj,up_proj,down_proj"};
    static const nd_fp8_recipe recipes[] = {ND_FP8_TENSORWISE, ND_FP8_DELAYED, ND_FP8_ROWWISE};
    for (size_t f = 0; f < 3 * sizeof filters / sizeof *filters; f++) {
        mesh_job job = fp8_job(&dir, recipes[f % 3], false);
        job.filter = filters[f / 3];
        job.shape.layers = 2;
        job.steps = 2;
        job.health_interval = 2; /* in step 2 operands are cast by ops of their own */
        mesh_expect_same_recomputed(&job, (mesh_case){filters[f / 3], 1, 1, 1, 2, 1});
    }
}
