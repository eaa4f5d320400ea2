// SPDX-License-Identifier: Apache-2.0
/* The stages of a run, and its loop over steps. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/device/cuda.h"
#include "trainer/precision/precision.h"
#include "trainer/run/state.h"

static volatile sig_atomic_t stop_signal;
static atomic_bool stop_flag;            /* the same, for other threads */
static nd_trainer *volatile stop_target; /* NULL outside the loop over steps */

void nd_train_request_stop(int signal_number)
{
    nd_trainer *trainer = stop_target;
    stop_signal = signal_number;
    atomic_store(&stop_flag, true);
    if (trainer) {
        nd_trainer_request_stop(trainer, signal_number);
    }
}

const atomic_bool *nd_train_stop_flag(void)
{
    return &stop_flag;
}

/* The stages. */

/* Makes the trainer: plans its memory and takes it. Linears in BF16 have other buffers than those
 * in FP8, so autotune comes first. */
static nd_status open_trainer(nd_run *s)
{
    const nd_inputs *inputs = s->inputs;
    char line[512];
    if (s->config->kernels.autotune && !*s->config->kernels.autotune_from) {
        ND_TRY(nd_trainer_check_memory(s->rank));
    }
    ND_TRY(nd_tuning_make(s->rank, &s->tuning));
    ND_TRY(nd_trainer_create(s->rank, s->tuning, &s->trainer));
    /* Data that are open hold this already; a plan without data does not know of it. */
    const size_t bytes = nd_dataset_facts_of(inputs->data).lists +
                         (inputs->validation ? nd_dataset_facts_of(inputs->validation).lists : 0);
    if (bytes > 0 && !nd_rank_is_gpu(s->rank)) { /* the plan of a GPU is of its own memory */
        nd_memplan_add_external(&s->trainer->plan, ND_MEM_DATA, "places of whole rows", bytes);
    }
    if (s->worker->identity.local_rank == 0 && /* the workers of a host are alike */
        nd_trainer_describe_unkept(s->trainer, line, sizeof line)) {
        nd_log_warning("%s", line);
    }
    ND_TRY(nd_trainer_commit(s->trainer));
    return nd_run_samples_open(s->config, inputs, s->trainer, &s->samples);
}

static void close_trainer(nd_run *s)
{
    stop_target = NULL;
    nd_run_samples_close(s->samples);
    nd_trainer_destroy(s->trainer);
    nd_tuning_destroy(s->tuning);
}

/* Opens them at the position of the trainer. */
static nd_status open_training_loader(nd_run *s)
{
    const nd_run_position *position = &s->trainer->position;
    nd_loader_options options = nd_loader_options_of(s->rank, false);
    options.first_step = position->step;
    options.samples_ahead = position->samples_ahead;
    s->last_step = nd_loader_last_step(s->inputs->data, &options, s->config->train.steps);
    return nd_loader_open(s->inputs->data, &options, &s->loader);
}

static nd_status name_sources(const nd_dataset *data, nd_source_loss **out, int *count)
{
    const int all = nd_dataset_sources(data);
    ND_TRY(ND_ALLOC(all, out));
    for (*count = 0; *count < all; ++*count) {
        (*out)[*count].name = nd_dataset_source_name(data, *count);
    }
    return ND_OK;
}

/* Behind the state that the run goes on from. */
static nd_status open_data(nd_run *s)
{
    const nd_dataset *data = s->inputs->data, *validation = s->inputs->validation;
    const nd_loader_options options = nd_loader_options_of(s->rank, true);
    const int count = nd_dataset_sources(data);
    s->begin = s->trace_from = s->trainer->position.step;
    ND_TRY(open_training_loader(s));
    ND_ASSERT(count < 2 || count == s->trainer->model->sources);
    ND_TRY(count > 1 ? name_sources(data, &s->sources, &s->source_count) : ND_OK);
    if (validation) {
        ND_TRY(name_sources(validation, &s->sets, &s->set_count));
        ND_TRY(nd_loader_open(nd_dataset_source(validation, 0), &options, &s->validation_loader));
    }
    ND_TRY(s->rank->rank == 0 ? nd_inputs_warn_of_labels(s->config, s->inputs, s->begin,
                                                         s->trainer->position.samples_ahead)
                              : ND_OK);
    /* The model of an earlier end is that of an earlier step. */
    return s->begin < s->last_step && !s->over ? nd_run_set_aside(s, "model") : ND_OK;
}

static void close_data(nd_run *s)
{
    bool joined = nd_loader_close(s->validation_loader);
    joined = nd_loader_close(s->loader) && joined;
    s->inputs->still_read |= !joined; /* one of before a rewind may hang, too */
    free(s->sources);
    free(s->sets);
}

static const nd_run_stage trainer_stage = {.open = open_trainer, .close = close_trainer},
                          data_stage = {.open = open_data, .close = close_data};
/* Closed in the reverse order. A profile leaves out saves, which come after it. */
static const nd_run_stage *const stages[] = {
    &nd_run_source, &trainer_stage, &nd_run_folder,  &nd_run_load,
    &data_stage,    &nd_run_dumps,  &nd_run_profile, &nd_run_saving,
};
enum { STAGES = sizeof stages / sizeof *stages };

/* The loop. */

enum { WARM_UP_STEPS = 2 };

/* Peak memory of the process, or memory in use on the GPU. On a GPU everything is allocated after
 * the first steps, and the driver is slow to answer, so it is not asked again. */
static double peak_memory(nd_run *s)
{
    struct rusage usage;
    nd_cuda_info gpu;
    if (s->rank->device->kind == ND_DEVICE_CUDA) {
        bool asks = s->trainer->position.step <= s->begin + WARM_UP_STEPS + 1;
        if (asks && nd_cuda_info_of(s->rank->device, &gpu) == ND_OK) {
            s->gpu_bytes = (double)(gpu.total_bytes - gpu.free_bytes);
        }
        return s->gpu_bytes;
    }
    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_maxrss * 1024.0;
}

static nd_status record_step(nd_run *s, const nd_step_batch *batch, const nd_step_result *result)
{
    if (s->sinks.count == 0) {
        return ND_OK;
    }
    nd_step_record record = {
        .step = s->trainer->position.step,
        .loss = result->loss,
        .grad_norm = result->grad_norm,
        .lr = result->lr,
        .tokens = result->tokens,
        .tokens_seen = s->trainer->position.tokens_seen,
        .step_seconds = (double)(nd_clock_ns() - s->step_begin) * 1e-9,
        .data_wait_seconds = batch->wait_seconds,
        .slowest_seconds = result->work.slowest_seconds,
        .fastest_seconds = result->work.fastest_seconds,
        .slowest_rank = result->work.slowest_rank,
        .peak_memory_bytes = peak_memory(s),
        .skipped = result->skipped,
        .visible_pairs = batch->sight.pairs,
        .balance = batch->sight.balance,
        .padding = batch->sight.padding,
    };
    for (int i = 0; i < s->source_count; i++) {
        const double tokens = result->source_sums[s->source_count + i];
        s->sources[i].tokens = (int64_t)tokens;
        s->sources[i].loss = tokens > 0 ? result->source_sums[i] / tokens : (double)NAN;
    }
    record.sources = s->sources;
    record.source_count = s->source_count;
    nd_traffic_bytes(&s->rank->groups, record.wire_bytes);
    for (int k = 0; k < ND_TRAFFIC_COUNT; k++) {
        record.wire_bytes[k] -= s->sent_before[k];
    }
    ND_TRY(nd_sinks_put(&s->sinks, record.step, (nd_record){.step = &record}));
    const nd_scales *scales = &s->trainer->model->scales;
    nd_health_record health = {.step = record.step};
    if (scales->counted != record.step) {
        return ND_OK;
    }
    nd_health_summarise(scales, &health.summary);
    return nd_sinks_put(&s->sinks, health.step, (nd_record){.health = &health});
}

/* The step was not finite on all ranks: they go on from an older state. */
static nd_status rewind_run(nd_run *s)
{
    ND_TRY(nd_run_rewind(s));
    if (!nd_loader_close(s->loader)) {
        s->inputs->still_read = true;
    }
    s->loader = NULL;
    ND_TRY(open_training_loader(s));
    /* Nothing may be left for a step, now that samples were passed over. */
    return nd_run_validate(s, true);
}

/* The sources are limited, and too few samples are left for one more step, since some were passed
 * over: the run is over as one is that early stopping ends. */
static nd_status end_with_data(nd_run *s)
{
    const nd_run_position *position = &s->trainer->position;
    const int64_t samples = nd_step_blocks(s->config);
    char why[240];
    if (s->stopped || s->over || position->step < s->last_step ||
        s->last_step == s->config->train.steps) {
        return ND_OK;
    }
    s->over = true;
    snprintf(why, sizeof why,
             "the epochs of data.path are over before step %lld (train.steps): of their %lld "
             "samples %lld were read or passed over, and a step takes %lld",
             (long long)s->config->train.steps,
             (long long)nd_dataset_facts_of(s->inputs->data).samples,
             (long long)(position->step * samples + position->samples_ahead), (long long)samples);
    const nd_run_event event = {
        .kind = ND_RUN_EVENT_EARLY_STOPPED, .step = position->step, .reason = why};
    return nd_sinks_event(&s->sinks, &event);
}

static nd_status loop(nd_run *s)
{
    nd_trainer *t = s->trainer;
    /* The first steps touch fresh memory and initialise libraries, which would hide where the time
     * of a later step goes. */
    const int64_t warm = s->begin + WARM_UP_STEPS;
    nd_step_batch batch;
    nd_step_result result;
    stop_target = t;
    if (stop_signal) {
        nd_train_request_stop(stop_signal);
    }
    ND_TRY(nd_run_validate_missing(s));
    while (t->position.step < s->last_step && !s->stopped && !s->over) {
        for (int i = 0; i < STAGES; i++) {
            ND_TRY(stages[i]->before_step ? stages[i]->before_step(s) : ND_OK);
        }
        s->step_begin = nd_clock_ns();
        nd_traffic_bytes(&s->rank->groups, s->sent_before);
        ND_RUN(s->rank, ND_TRACE_DATA, nd_loader_next(s->loader, &batch));
        nd_status status = nd_trainer_step(t, &batch, &result);
        if (status == ND_ERR_NUMERIC && s->config->train.nonfinite == ND_NONFINITE_REWIND) {
            ND_TRY(rewind_run(s));
            continue;
        }
        ND_TRY(status);
        s->stopped = result.stop != 0;
        ND_TRY(record_step(s, &batch, &result));
        if (t->position.step == warm && s->last_step > warm && !s->stopped) {
            s->rank->trace = (nd_trace){.profile = s->rank->trace.profile};
            s->trace_from = warm;
            s->validation_seconds = 0;
        }
        for (int i = 0; i < STAGES; i++) {
            ND_TRY(stages[i]->after_step ? stages[i]->after_step(s, &result) : ND_OK);
        }
        /* Last, since it may take longer than all steps that a failure in it costs. */
        ND_TRY(nd_run_validate(s, false));
    }
    ND_TRY(end_with_data(s));
    return nd_sinks_flush(&s->sinks);
}

/* The end. */

/* The run had no step left to do, and an earlier start has saved the model: a start that changes
 * the state sets it aside first. */
static nd_status is_model_there(nd_run *s, bool *out)
{
    const int64_t step = s->trainer->position.step;
    *out = false;
    if (!s->resume.continues || step != s->begin) {
        return ND_OK;
    }
    const nd_status status = s->dir ? nd_fs_has(s->dir, "model/config.json", out) : ND_OK;
    ND_TRY(nd_run_tell_all(s->worker, "model", status, "could not look for a model", out,
                           sizeof *out));
    if (*out && s->dir) {
        nd_log_info("nothing is left to do after step %lld, and %s/model stays", (long long)step,
                    s->dir);
    }
    return ND_OK;
}

static nd_status save_model(nd_run *s)
{
    const nd_config *config = s->config;
    bool there = false;
    /* A run that is stopped and has a checkpoint is resumed: its model is saved at its end. */
    const bool saves = config->output.save_model && !(s->stopped && s->saver);
    ND_TRY(saves ? is_model_there(s, &there) : ND_OK);
    if (there) {
        return ND_OK;
    }
    ND_TRY(s->stopped ? ND_OK : nd_run_load_best(s));
    if (!saves) {
        return ND_OK;
    }
    nd_progress_set_phase(s->rank->progress, ND_PHASE_SAVE, s->trainer->position.step);
    bool bytes = s->rank->shape.vocab == 256 && strcmp(config->data.tokenizer, "bytes") == 0;
    nd_dtype dtype = config->output.dtype == ND_WEIGHTS_FP32 ? ND_DTYPE_F32 : ND_DTYPE_BF16;
    char folder[4096];
    snprintf(folder, sizeof folder, "%s/model", s->dir ? s->dir : "");
    ND_TRY(nd_run_set_aside(s, "model"));
    ND_TRY(nd_weights_save(&s->trainer->model->fsdp, folder, dtype, bytes, s->inputs->model_folder,
                           s->inputs->tokenizer));
    const nd_run_event event = {
        .kind = ND_RUN_EVENT_MODEL_SAVED, .step = s->trainer->position.step, .path = folder};
    return nd_sinks_event(&s->sinks, &event);
}

/* After the checkpoint, if the run has any, is saved. */
static nd_status fail_stopped(const nd_run *s)
{
    long long step = s->trainer->position.step, steps = s->config->train.steps;
    if (s->saver) {
        return nd_fail(ND_ERR_PREEMPTED,
                       "stopped by a signal after step %lld of %lld, at a step boundary; to go on, "
                       "give the same command with --save-dir %s --resume-from-checkpoint latest",
                       step, steps, s->place.path);
    }
    char newest[96] = "";
    if (s->resume.found) { /* what it went on from */
        snprintf(newest, sizeof newest, "; the newest checkpoint is that of step %lld",
                 (long long)s->resume.step);
    }
    return nd_fail(ND_ERR_PREEMPTED,
                   "stopped by a signal after step %lld of %lld, at a step boundary; it cannot be "
                   "resumed there, since it saves no checkpoints (checkpoint.interval is 0); with "
                   "--checkpoint-frequency N a signal saves one too%s",
                   step, steps, newest);
}

static nd_status train(nd_run *s)
{
    ND_TRY(nd_comm_barrier(s->rank->groups.by_kind[ND_GROUP_WORLD]));
    s->began = true;
    ND_TRY(loop(s));
    ND_TRY(nd_stream_sync(&s->rank->stream)); /* an error of the last update is found here */
    nd_tuning_warn(s->rank, s->tuning);
    for (int i = 0; i < STAGES; i++) {
        ND_TRY(stages[i]->finish ? stages[i]->finish(s) : ND_OK);
    }
    ND_TRY(save_model(s));
    nd_progress_set_phase(s->rank->progress, ND_PHASE_DONE, s->trainer->position.step);
    return s->stopped ? fail_stopped(s) : ND_OK;
}

/* Completes the records of the steps before a failure prints anything or ends this process. The
 * last record says why there are no more. */
static nd_status flush_records(nd_run *s, nd_status status)
{
    const nd_error error = *nd_error_last();
    if (status != ND_OK && s->began) {
        const nd_run_event event = {.kind = ND_RUN_EVENT_ENDED,
                                    .step = s->trainer->position.step,
                                    .reason = error.message,
                                    .code = status};
        (void)nd_sinks_event(&s->sinks, &event); /* the first failure is the one to say */
    }
    nd_status written = nd_sinks_flush(&s->sinks);
    if (status != ND_OK && !s->began) {
        nd_run_forget(s);
    }
    if (status != ND_OK) {
        nd_error_restore(&error);
    }
    return status != ND_OK ? status : written;
}

nd_status nd_train(nd_worker *worker, nd_inputs *inputs, int argc, char *const *argv)
{
    nd_run s = {.worker = worker,
                .inputs = inputs,
                .argc = argc,
                .argv = argv,
                .config = worker->rank.config,
                .rank = &worker->rank};
    nd_status status = ND_OK;
    for (int i = 0; i < STAGES && status == ND_OK; i++) {
        status = stages[i]->open(&s);
    }
    s.status = flush_records(&s, status == ND_OK ? train(&s) : status);
    if (s.status != ND_OK && s.status != ND_ERR_PREEMPTED) {
        nd_worker_fail(worker, s.status);
    }
    for (int i = STAGES - 1; i >= 0; i--) {
        if (stages[i]->close) {
            stages[i]->close(&s);
        }
    }
    return s.status;
}
