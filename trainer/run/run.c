// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/checkpoints.h"

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
#include "trainer/run/profile.h"
#include "trainer/tune/tune.h"
#include "trainer/weights/weights.h"

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

/* Everything that a run holds; nd_train closes it. */
typedef struct run_state {
    const nd_run_context *context;
    const nd_config *config;
    nd_rank *rank;
    nd_trainer *trainer;
    nd_loader *loader, *validation_loader;
    nd_source_loss *sources; /* (source_count) of the training data; owned */
    int source_count;        /* 0: one source */
    nd_source_loss *sets;    /* (set_count) of the validation; owned */
    int64_t *set_batches;    /* (set_count); owned */
    int set_count;           /* 0: no validation */
    nd_run_files files;      /* rank 0 */
    nd_run_checkpoints checkpoints;
    nd_run_profile profile;
    nd_run_samples *samples;               /* NULL: none */
    nd_tuning *tuning;                     /* NULL without autotune */
    int64_t begin;                         /* steps that were done before this start */
    int64_t last_step;                     /* train.steps, or before: the data end with it */
    int64_t trace_from;                    /* the trace holds the steps after this one */
    double validation_seconds;             /* since then; not in the trace */
    int64_t step_begin;                    /* nd_clock_ns */
    int64_t sent_before[ND_TRAFFIC_COUNT]; /* when the step began */
    double gpu_bytes;                      /* in use after the first steps */
    bool began;                            /* its first step, or what comes without one */
    bool stopped;
} run_state;

enum { WARM_UP_STEPS = 2 };

/* Opens them at the position of the trainer. */
static nd_status open_training_loader(run_state *s)
{
    const nd_run_position *position = &s->trainer->position;
    nd_loader_options options = nd_loader_options_of(s->rank, false);
    options.first_step = position->step;
    options.samples_ahead = position->samples_ahead;
    s->last_step = nd_loader_last_step(s->context->inputs->data, &options, s->config->train.steps);
    return nd_loader_open(s->context->inputs->data, &options, &s->loader);
}

static nd_status name_sources(run_state *s)
{
    const nd_dataset *data = s->context->inputs->data;
    const int count = nd_dataset_sources(data);
    if (count < 2) {
        return ND_OK;
    }
    ND_ASSERT(count == s->trainer->model->sources);
    ND_TRY(ND_ALLOC(count, &s->sources));
    for (s->source_count = 0; s->source_count < count; s->source_count++) {
        s->sources[s->source_count].name = nd_dataset_source_name(data, s->source_count);
    }
    return ND_OK;
}

static nd_status open_loaders(run_state *s)
{
    const nd_inputs *inputs = s->context->inputs;
    nd_loader_options options;
    ND_TRY(open_training_loader(s));
    ND_TRY(name_sources(s));
    if (!inputs->validation) {
        return ND_OK;
    }
    options = nd_loader_options_of(s->rank, true);
    const int count = nd_dataset_sources(inputs->validation);
    ND_TRY(ND_ALLOC(count, &s->sets));
    ND_TRY(ND_ALLOC(count, &s->set_batches));
    for (s->set_count = 0; s->set_count < count; s->set_count++) {
        const nd_dataset *set = nd_dataset_source(inputs->validation, s->set_count);
        int64_t all = nd_loader_validation_steps(set, &options);
        int64_t wanted = s->config->train.validation_batches;
        s->set_batches[s->set_count] = wanted > 0 && wanted < all ? wanted : all;
        s->sets[s->set_count].name = nd_dataset_source_name(inputs->validation, s->set_count);
    }
    return nd_loader_open(nd_dataset_source(inputs->validation, 0), &options,
                          &s->validation_loader);
}

/* Peak memory of the process, or memory in use on the GPU. On a GPU everything is allocated after
 * the first steps, and the driver is slow to answer, so it is not asked again. */
static double peak_memory(run_state *s)
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

/* Between the batches of a validation: a signal that reached one rank stops all of them, and a save
 * in flight goes on. Nothing of the state that it copies changes in a validation. */
static nd_status stop_is_asked(void *context, bool *stop)
{
    run_state *s = context;
    nd_rank *r = s->rank;
    int64_t flags[] = {stop_signal, nd_trainer_reported_save(s->trainer)};
    ND_TRY(nd_all_reduce(r, ND_GROUP_WORLD, flags, 2, ND_DTYPE_I64, ND_REDOP_MAX));
    *stop = s->stopped = flags[0] != 0;
    return nd_run_checkpoints_advance(&s->checkpoints, flags[1]);
}

/* The loss of a validation is the mean over the labels of all its sets. */
static void add_sets(const run_state *s, nd_validation_record *record)
{
    double sum = 0;
    for (int i = 0; i < s->set_count; i++) {
        sum += s->sets[i].tokens > 0 ? s->sets[i].loss * (double)s->sets[i].tokens : 0.0;
        record->tokens += s->sets[i].tokens;
    }
    if (s->set_count == 1) {
        record->loss = s->sets[0].loss;
        return;
    }
    record->loss = sum / (double)record->tokens;
    record->sets = s->sets;
    record->set_count = s->set_count;
}

static nd_status run_sets(run_state *s)
{
    const nd_stop_check check = {stop_is_asked, s};
    for (int i = 0; i < s->set_count && !s->stopped; i++) {
        nd_source_loss *set = &s->sets[i];
        if (s->set_count > 1) {
            nd_loader_rewind(s->validation_loader,
                             nd_dataset_source(s->context->inputs->validation, i));
        }
        const nd_status status = nd_trainer_evaluate(
            s->trainer, s->validation_loader, s->set_batches[i], &check, &set->loss, &set->tokens);
        const nd_error error = *nd_error_last();
        if (status == ND_ERR_DATA && s->set_count > 1 && error.cause == ND_CAUSE_OWN) {
            return nd_fail(status, "\"%s\" in data.validation_path: %s", set->name, error.message);
        }
        ND_TRY(status);
    }
    return ND_OK;
}

/* The trace is of steps alone. */
static nd_status validate(run_state *s)
{
    nd_validation_record record = {.step = s->trainer->position.step,
                                   .separate_length = nd_run_best_rule(s->config)};
    const nd_trace steps = s->rank->trace;
    const nd_stop_check check = {stop_is_asked, s};
    double begin = nd_clock_seconds();
    ND_TRY(run_sets(s));
    record.seconds = nd_clock_seconds() - begin;
    ND_TRY(nd_run_samples_write(s->samples, &check, &s->files.sinks, &s->stopped));
    s->validation_seconds += nd_clock_seconds() - begin;
    s->rank->trace = steps;
    if (s->stopped) {
        return ND_OK;
    }
    add_sets(s, &record);
    if (record.tokens == 0) { /* no reason to lose what was trained */
        nd_log_warning("the validation after step %lld has no label that counts; check "
                       "data.validation_path, or raise train.validation_batches",
                       (long long)record.step);
        return ND_OK;
    }
    ND_TRY(nd_sinks_validation(&s->files.sinks, &record));
    return nd_run_checkpoints_validated(&s->checkpoints, record.loss);
}

static bool is_at_interval(const run_state *s)
{
    int64_t interval = s->config->train.validation_interval;
    return interval > 0 && s->trainer->position.step % interval == 0;
}

static bool validation_is_due(const run_state *s)
{
    bool last = s->trainer->position.step == s->last_step;
    /* After a stop signal, skip validation: the grace period is needed to save the model. */
    return s->validation_loader && !s->stopped && (last || is_at_interval(s));
}

/* A signal or a failure came before the end of the validation after the step that the run goes on
 * from. */
static nd_status make_up_validation(run_state *s)
{
    bool owes = false;
    if (s->trainer->position.step == 0 || !validation_is_due(s)) {
        return ND_OK;
    }
    ND_TRY(nd_run_checkpoints_owes_validation(&s->checkpoints, &owes));
    return owes ? validate(s) : ND_OK;
}

static nd_status record_step(run_state *s, const nd_step_batch *batch, const nd_step_result *result)
{
    if (s->files.sinks.count == 0) {
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
    return nd_sinks_step(&s->files.sinks, &record);
}

static nd_status record_health(run_state *s)
{
    const nd_scales *scales = &s->trainer->model->scales;
    nd_health_record record = {.step = s->trainer->position.step};
    if (scales->counted != record.step || s->files.sinks.count == 0) {
        return ND_OK;
    }
    nd_health_summarise(scales, &record.summary);
    return nd_sinks_health(&s->files.sinks, &record);
}

/* The first steps touch fresh memory and initialise libraries, which would hide where the time of a
 * later step goes. */
static void forget_warm_up(run_state *s)
{
    int64_t warm = s->begin + WARM_UP_STEPS;
    if (s->trainer->position.step == warm && s->last_step > warm && !s->stopped) {
        s->rank->trace = (nd_trace){.profile = s->rank->trace.profile};
        s->trace_from = warm;
        s->validation_seconds = 0;
    }
}

/* The step was not finite on all ranks: they go on from an older state. */
static nd_status rewind_run(run_state *s)
{
    ND_TRY(nd_run_checkpoints_rewind(&s->checkpoints));
    if (!nd_loader_close(s->loader)) {
        s->context->inputs->still_read = true;
    }
    s->loader = NULL;
    ND_TRY(open_training_loader(s));
    /* Nothing may be left for a step, now that samples were passed over. */
    return validation_is_due(s) && !is_at_interval(s) ? validate(s) : ND_OK;
}

/* The sources are limited, and too few samples are left for one more step, since some were passed
 * over: the run is over as one is that early stopping ends. */
static nd_status end_with_data(run_state *s)
{
    const nd_run_position *position = &s->trainer->position;
    const int64_t samples = nd_step_blocks(s->config);
    char why[240];
    if (s->stopped || s->checkpoints.over || position->step < s->last_step ||
        s->last_step == s->config->train.steps) {
        return ND_OK;
    }
    s->checkpoints.over = true;
    snprintf(why, sizeof why,
             "the epochs of data.path are over before step %lld (train.steps): of their %lld "
             "samples %lld were read or passed over, and a step takes %lld",
             (long long)s->config->train.steps,
             (long long)nd_dataset_samples(s->context->inputs->data),
             (long long)(position->step * samples + position->samples_ahead), (long long)samples);
    const nd_run_event event = {
        .kind = ND_RUN_EVENT_EARLY_STOPPED, .step = position->step, .reason = why};
    return nd_sinks_event(&s->files.sinks, &event);
}

static nd_status loop(run_state *s)
{
    nd_trainer *t = s->trainer;
    nd_step_batch batch;
    nd_step_result result;
    stop_target = t;
    if (stop_signal) {
        nd_train_request_stop(stop_signal);
    }
    ND_TRY(make_up_validation(s));
    while (t->position.step < s->last_step && !s->stopped && !s->checkpoints.over) {
        ND_TRY(nd_run_profile_begin(&s->profile, t->position.step + 1));
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
        ND_TRY(record_health(s));
        ND_TRY(nd_run_profile_end(&s->profile, t->position.step));
        forget_warm_up(s);
        /* First, since a validation may take longer than all steps that a failure in it costs. */
        ND_TRY(nd_run_checkpoints_step(&s->checkpoints, &result));
        if (validation_is_due(s)) {
            ND_TRY(validate(s));
        }
    }
    ND_TRY(end_with_data(s));
    ND_TRY(nd_sinks_flush(&s->files.sinks));
    return nd_run_profile_finish(&s->profile);
}

/* The run had no step left to do, and an earlier start has saved the model: a start that changes
 * the state sets it aside first. */
static nd_status is_model_there(run_state *s, bool *out)
{
    nd_rank *r = s->rank;
    const int64_t step = s->trainer->position.step;
    bool found = false;
    *out = false;
    if (!s->checkpoints.resume.continues || step != s->begin) {
        return ND_OK;
    }
    const nd_status status =
        s->files.dir ? nd_fs_has(s->files.dir, "model/config.json", &found) : ND_OK;
    int64_t there = found;
    ND_TRY(nd_all_reduce(r, ND_GROUP_WORLD, &there, 1, ND_DTYPE_I64, ND_REDOP_MAX));
    ND_TRY(status);
    *out = there != 0;
    if (*out && r->rank == 0) {
        nd_log_info("nothing is left to do after step %lld, and %s/model stays", (long long)step,
                    s->files.dir);
    }
    return ND_OK;
}

static nd_status save_model(run_state *s)
{
    const nd_config *config = s->config;
    bool there = false;
    /* A run that is stopped and has a checkpoint is resumed: its model is saved at its end. */
    const bool saves = config->output.save_model && !(s->stopped && s->checkpoints.saver);
    ND_TRY(saves ? is_model_there(s, &there) : ND_OK);
    if (there) {
        return ND_OK;
    }
    ND_TRY(s->stopped ? ND_OK : nd_run_checkpoints_load_best(&s->checkpoints));
    if (!saves) {
        return ND_OK;
    }
    nd_progress_set_phase(s->rank->progress, ND_PHASE_SAVE, s->trainer->position.step);
    bool bytes = s->rank->shape.vocab == 256 && strcmp(config->data.tokenizer, "bytes") == 0;
    nd_dtype dtype = config->output.dtype == ND_WEIGHTS_FP32 ? ND_DTYPE_F32 : ND_DTYPE_BF16;
    char folder[4096];
    snprintf(folder, sizeof folder, "%s/model", s->files.dir ? s->files.dir : "");
    ND_TRY(nd_run_files_set_aside(&s->files, "model"));
    ND_TRY(nd_weights_save(&s->trainer->model->fsdp, folder, dtype, bytes,
                           s->context->inputs->model_folder, s->context->inputs->tokenizer));
    const nd_run_event event = {
        .kind = ND_RUN_EVENT_MODEL_SAVED, .step = s->trainer->position.step, .path = folder};
    return nd_sinks_event(&s->files.sinks, &event);
}

/* After the checkpoint, if the run has any, is saved. */
static nd_status fail_stopped(const run_state *s)
{
    long long step = s->trainer->position.step, steps = s->config->train.steps;
    if (s->checkpoints.saver) {
        return nd_fail(ND_ERR_PREEMPTED,
                       "stopped by a signal after step %lld of %lld, at a step boundary; to go "
                       "on, give the same command with --save-dir %s --resume-from-checkpoint "
                       "latest",
                       step, steps, s->checkpoints.run);
    }
    char newest[96] = "";
    if (s->checkpoints.good[0]) { /* what it went on from */
        snprintf(newest, sizeof newest, "; the newest checkpoint is that of step %lld",
                 (long long)s->checkpoints.good_step);
    }
    return nd_fail(ND_ERR_PREEMPTED,
                   "stopped by a signal after step %lld of %lld, at a step boundary; it cannot be "
                   "resumed there, since it saves no checkpoints (checkpoint.interval is 0); with "
                   "--checkpoint-frequency N a signal saves one too%s",
                   step, steps, newest);
}

/* A full disk costs trace.json, and not the checkpoint and the model, which come after it. */
static nd_status leave_trace(run_state *s)
{
    if (!s->files.dir) {
        return ND_OK;
    }
    const nd_run_trace trace = {&s->rank->trace, s->trace_from + 1,
                                s->trainer->position.step - s->trace_from, s->validation_seconds};
    nd_status status = nd_run_files_trace(&s->files, &trace);
    if (status != ND_ERR_CANTCREATE) {
        return status;
    }
    nd_log_warning("the run leaves no trace.json, and goes on: %s", nd_error_last()->message);
    nd_error_clear();
    return ND_OK;
}

/* For the workers of a host, which are alike. */
static void warn_of_unkept(const run_state *s)
{
    char line[512];
    if (s->context->worker->identity.local_rank == 0 &&
        nd_trainer_describe_unkept(s->trainer, line, sizeof line)) {
        nd_log_warning("%s", line);
    }
}

/* What the data that are open hold already; a plan without data does not know of it. */
static void plan_packed_data(run_state *s)
{
    const nd_inputs *inputs = s->context->inputs;
    const size_t bytes = nd_dataset_packed_bytes(inputs->data) +
                         (inputs->validation ? nd_dataset_packed_bytes(inputs->validation) : 0);
    if (bytes > 0 && !nd_rank_is_gpu(s->rank)) { /* the plan of a GPU is of its own memory */
        nd_memplan_add_external(&s->trainer->plan, ND_MEM_DATA, "places of whole rows", bytes);
    }
}

static nd_status run(run_state *s)
{
    ND_TRY(nd_run_checkpoints_find(&s->checkpoints, s->context));
    if (s->rank->config->kernels.autotune && !*s->rank->config->kernels.autotune_from) {
        ND_TRY(nd_trainer_check_memory(s->rank));
    }
    /* Before memory is planned: linears in BF16 have other buffers than those in FP8. */
    ND_TRY(nd_tuning_make(s->rank, &s->tuning));
    ND_TRY(nd_trainer_create(s->rank, s->tuning, &s->trainer));
    plan_packed_data(s);
    warn_of_unkept(s);
    ND_TRY(nd_trainer_commit(s->trainer));
    ND_TRY(nd_run_samples_open(s->config, s->context->inputs, s->trainer, &s->samples));
    const nd_resume *resume = &s->checkpoints.resume;
    const nd_status opened = s->rank->rank == 0
                                 ? nd_run_files_open(&s->files, s->context, s->trainer,
                                                     resume->continues ? resume->run : "")
                                 : ND_OK;
    ND_TRY(nd_run_checkpoints_load(&s->checkpoints, s->trainer, &s->files, opened));
    s->begin = s->trace_from = s->trainer->position.step;
    ND_TRY(open_loaders(s));
    ND_TRY(s->rank->rank == 0 ? nd_inputs_warn_of_labels(s->config, s->context->inputs, s->begin,
                                                         s->trainer->position.samples_ahead)
                              : ND_OK);
    ND_TRY(s->begin < s->last_step && !s->checkpoints.over
               ? nd_run_files_set_aside(&s->files, "model")
               : ND_OK);
    ND_TRY(nd_run_checkpoints_start(&s->checkpoints));
    ND_TRY(nd_run_dumps_open(&s->checkpoints, s->trainer));
    ND_TRY(nd_run_profile_init(&s->profile, s->rank, s->checkpoints.run));
    ND_TRY(nd_comm_barrier(s->rank->groups.by_kind[ND_GROUP_WORLD]));
    s->began = true;
    ND_TRY(loop(s));
    ND_TRY(nd_stream_sync(&s->rank->stream)); /* an error of the last update is found here */
    nd_tuning_warn(s->rank, s->tuning);
    ND_TRY(leave_trace(s));
    ND_TRY(nd_run_checkpoints_finish(&s->checkpoints, s->stopped));
    ND_TRY(save_model(s));
    nd_progress_set_phase(s->rank->progress, ND_PHASE_DONE, s->trainer->position.step);
    return s->stopped ? fail_stopped(s) : ND_OK;
}

/* What a failure does to this process, and what it prints, comes after the records of the steps
 * before it, the last of which says why there are no more. */
static nd_status flush_records(run_state *s, nd_status status)
{
    const nd_error error = *nd_error_last();
    if (status != ND_OK && s->began) {
        const nd_run_event event = {.kind = ND_RUN_EVENT_ENDED,
                                    .step = s->trainer->position.step,
                                    .reason = error.message,
                                    .code = status};
        (void)nd_sinks_event(&s->files.sinks, &event); /* the first failure is the one to say */
    }
    nd_status written = nd_sinks_flush(&s->files.sinks);
    if (status != ND_OK && !s->began) {
        nd_run_files_forget(&s->files);
    }
    if (status != ND_OK) {
        nd_error_restore(&error);
    }
    return status != ND_OK ? status : written;
}

nd_status nd_train(const nd_run_context *context)
{
    run_state state = {
        .context = context, .config = context->worker->rank.config, .rank = &context->worker->rank};
    nd_status status = flush_records(&state, run(&state));
    if (status != ND_OK && status != ND_ERR_PREEMPTED) {
        nd_worker_fail(context->worker, status);
    }
    bool joined = nd_loader_close(state.validation_loader);
    joined = nd_loader_close(state.loader) && joined;
    context->inputs->still_read |= !joined; /* one of before a rewind may hang, too */
    if (!nd_run_checkpoints_close(&state.checkpoints)) {
        nd_worker_end(context->worker, status); /* its thread uses what would be closed here */
    }
    nd_run_files_close(&state.files);
    stop_target = NULL;
    nd_run_profile_fini(&state.profile);
    nd_run_samples_close(state.samples);
    nd_trainer_destroy(state.trainer);
    nd_tuning_destroy(state.tuning);
    free(state.sources);
    free(state.sets);
    free(state.set_batches);
    return status;
}
