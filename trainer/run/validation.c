// SPDX-License-Identifier: Apache-2.0
/* Validations, and the sample texts that come with them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "trainer/corpus/chat.h"
#include "trainer/generate/requests.h"
#include "trainer/generate/texts.h"
#include "trainer/run/state.h"
#include "trainer/view/metrics.h"

/* Sample texts. */

struct nd_run_samples {
    nd_trainer *trainer; /* borrowed; NULL: there are no prompts, or they are only checked */
    nd_tokenizer *tokenizer;
    nd_requests prompts; /* the lines of train.sample_prompt, which are their names */
    nd_ids ends;         /* ids that end a text */
    int32_t *ids;        /* (B, s) of this rank, as are positions */
    int32_t *positions;
    float *logits; /* (vocab); pinned where the device is a GPU */
};

static nd_status read_prompts(nd_run_samples *s, const nd_config *config, const nd_inputs *inputs)
{
    int32_t end = (int32_t)inputs->shape.eos_id;
    nd_encoder *encoder = NULL;
    nd_chat chat;
    nd_chat_rules chat_rules;
    nd_corpus_rules escapes = {0};
    char *text = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(inputs->tokenizer ? nd_tokenizer_open(inputs->tokenizer, &s->tokenizer)
                                 : nd_byte_tokenizer_create(&s->tokenizer));
    ND_TRY_OUT(nd_chat_rules_find(inputs->tokenizer, config->data.chat_format, &chat_rules));
    ND_TRY_OUT(nd_chat_find(s->tokenizer, &chat_rules, &chat));
    const bool turns = chat_rules.template;
    const nd_encode_options options = {
        .special_in_text = turns ? ND_SPECIAL_TEXT : ND_SPECIAL_PARSE, .post_process = !turns};
    ND_TRY_OUT(nd_encoder_create(s->tokenizer, &options, &encoder));
    const nd_request_rules rules = {.prompts = encoder,
                                    .messages = encoder,
                                    .chat = &chat,
                                    .plain_as_user = turns,
                                    .vocab = inputs->shape.vocab,
                                    .begin = -1,
                                    .max_new = config->train.sample_tokens,
                                    .max_new_fits = true,
                                    .max_tokens = config->train.sequence_length,
                                    .limit = "train.sequence_length"};
    ND_TRY_OUT(nd_corpus_separator(config->train.sample_prompt, &escapes, &text));
    for (char *rest = text, *line; (line = strsep(&rest, "\n"));) {
        if (*line) {
            ND_TRY_OUT(nd_requests_add_text(&s->prompts, &rules, "train.sample_prompt", line,
                                            strlen(line)));
            ND_TRY_OUT(nd_fs_format(&s->prompts.list[s->prompts.count - 1].name, "%s", line));
        }
    }
    if (end < 0 && inputs->tokenizer) { /* as of a model that is saved */
        end = nd_corpus_model_end(s->tokenizer, inputs->tokenizer, inputs->shape.vocab);
    }
    ND_TRY_OUT(nd_ends_read(inputs->model_folder, &s->ends));
    ND_TRY_OUT(s->ends.count == 0 && end >= 0 ? nd_ids_add(&s->ends, &end, 1) : ND_OK);
    status = nd_ids_add(&s->ends, &chat.close, turns);
out:
    nd_encoder_destroy(encoder);
    free(text);
    return status;
}

static nd_status allocate(nd_run_samples *s)
{
    const nd_rank *r = s->trainer->rank;
    const nd_dims *d = &s->trainer->model->dims;
    /* trainer/data/data.h says where this rank's part of a sequence lies. */
    const int64_t cp = r->mesh.size[ND_AXIS_CP], mine = r->coord.at[ND_AXIS_CP];
    const int64_t local = d->T / d->B, chunk = cp > 1 ? local / 2 : local;
    void *logits = NULL;
    ND_TRY(ND_ALLOC(d->T, &s->ids));
    ND_TRY(ND_ALLOC(d->T, &s->positions));
    for (int64_t i = 0; i < d->T; i++) {
        const int64_t at = i % local, before = at < chunk ? mine : 2 * cp - 2 - mine;
        s->positions[i] = (int32_t)(before * chunk + at);
    }
    ND_TRY(nd_host_alloc(r->device, (size_t)d->vocab * sizeof *s->logits, &logits));
    s->logits = logits;
    return ND_OK;
}

nd_status nd_run_samples_open(const nd_config *config, const nd_inputs *inputs, nd_trainer *trainer,
                              nd_run_samples **out)
{
    ND_TRY(config->train.sample_prompt[0] ? ND_ALLOC(1, out) : ND_OK);
    ND_TRY(*out ? read_prompts(*out, config, inputs) : ND_OK);
    if (!*out || !trainer || (*out)->prompts.count == 0) {
        return ND_OK;
    }
    (*out)->trainer = trainer;
    return allocate(*out);
}

/* The next token of the text, on all ranks: the likeliest, and a logit that is not a number is
 * none. */
static nd_status find_next(nd_run_samples *s, const nd_ids *text, int32_t *id)
{
    nd_rank *r = s->trainer->rank;
    nd_model *m = s->trainer->model;
    const int64_t length = (int64_t)text->count;
    nd_activation_set *set = nd_model_take_set(m);
    int64_t row = -1, next = 0; /* one more than the id, 0 on other ranks than its own */
    for (int64_t i = 0; i < m->dims.T / m->dims.B; i++) {
        const int64_t at = s->positions[i];
        s->ids[i] = at < length ? text->data[at] : 0;
        row = at == length - 1 ? i : row;
    }
    ND_TRY(nd_model_load_batch(m, set, s->ids, s->ids, s->positions));
    ND_TRY(nd_model_sample(m, set, row, s->logits));
    ND_TRY(nd_model_give_back(m, set));
    for (int64_t v = 0; row >= 0 && v < m->dims.vocab; v++) {
        next = next == 0 || s->logits[v] > s->logits[next - 1] ? v + 1 : next;
    }
    ND_TRY(nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_WORLD], &r->stream, &next, 1, ND_DTYPE_I64,
                              ND_REDOP_MAX, NULL));
    *id = (int32_t)next - 1;
    return ND_OK;
}

/* Continues a prompt, whose ids grow; `out` is the text behind it. */
static nd_status add_tokens(nd_run_samples *s, nd_request *prompt, const nd_stop_check *check,
                            nd_text_out *out, bool *stopped)
{
    static const nd_stops none;
    ND_TRY(nd_text_out_init(out, s->tokenizer, &none, &prompt->ids));
    for (int64_t i = 0; i < prompt->max_new; i++) {
        int32_t id;
        ND_TRY(check->ask(check->context, stopped));
        if (*stopped) {
            return ND_OK;
        }
        ND_TRY(find_next(s, &prompt->ids, &id));
        if (nd_ids_hold(&s->ends, id)) {
            break;
        }
        ND_TRY(nd_ids_add(&prompt->ids, &id, 1));
        ND_TRY(nd_text_out_push(out, id));
    }
    ND_TRY(nd_text_out_end(out));
    return nd_bytes_add(&out->text, "", 1);
}

/* Continues all prompts, and gives them to the sinks of rank 0; other ranks have none. Collective.
 * *stopped: the check has ended it. */
static nd_status write_samples(nd_run_samples *s, const nd_stop_check *check, nd_sinks *sinks,
                               bool *stopped)
{
    for (size_t i = 0; s && s->trainer && i < s->prompts.count && !*stopped; i++) {
        nd_request *prompt = &s->prompts.list[i];
        const size_t count = prompt->ids.count;
        nd_text_out out = {0};
        nd_status status = add_tokens(s, prompt, check, &out, stopped);
        const nd_run_event event = {.kind = ND_RUN_EVENT_SAMPLE,
                                    .step = s->trainer->position.step,
                                    .path = prompt->name,
                                    .reason = (const char *)out.text.data};
        prompt->ids.count = count;
        status = status == ND_OK && !*stopped ? nd_sinks_event(sinks, &event) : status;
        nd_text_out_fini(&out);
        ND_TRY(status);
    }
    return ND_OK;
}

void nd_run_samples_close(nd_run_samples *s)
{
    if (!s) {
        return;
    }
    if (s->trainer) {
        nd_host_free(s->trainer->rank->device, s->logits);
    }
    nd_tokenizer_close(s->tokenizer);
    nd_requests_fini(&s->prompts);
    free(s->ends.data);
    free(s->ids);
    free(s->positions);
    free(s);
}

/* Validations. */

/* Between the batches of a validation: a signal that reached one rank stops all of them, and a save
 * in flight goes on. Nothing of the state that it copies changes in a validation. */
static nd_status stop_is_asked(void *context, bool *stop)
{
    nd_run *s = context;
    int64_t flags[] = {atomic_load(s->inputs->stop), nd_trainer_reported_save(s->trainer)};
    ND_TRY(nd_all_reduce(s->rank, ND_GROUP_WORLD, flags, 2, ND_DTYPE_I64, ND_REDOP_MAX));
    *stop = s->stopped = flags[0] != 0;
    return nd_run_saving_advance(s, flags[1]);
}

/* The loss of a validation is the mean over the labels of all its sets. */
static nd_status run_sets(nd_run *s, nd_validation_record *record)
{
    const nd_stop_check check = {stop_is_asked, s};
    const nd_loader_options options = nd_loader_options_of(s->rank, true);
    const int64_t wanted = s->config->train.validation_batches;
    double sum = 0;
    for (int i = 0; i < s->set_count && !s->stopped; i++) {
        const nd_dataset *data = nd_dataset_source(s->inputs->validation, i);
        const int64_t all = nd_loader_validation_steps(data, &options);
        nd_source_loss *set = &s->sets[i];
        if (s->set_count > 1) {
            nd_loader_rewind(s->validation_loader, data);
        }
        const nd_status status = nd_trainer_evaluate(s->trainer, s->validation_loader,
                                                     wanted > 0 && wanted < all ? wanted : all,
                                                     &check, &set->loss, &set->tokens);
        const nd_error error = *nd_error_last();
        if (status == ND_ERR_DATA && s->set_count > 1 && error.cause == ND_CAUSE_OWN) {
            return nd_fail(status, "\"%s\" in data.validation_path: %s", set->name, error.message);
        }
        ND_TRY(status);
        sum += set->tokens > 0 ? set->loss * (double)set->tokens : 0.0;
        record->tokens += set->tokens;
    }
    record->loss = s->set_count == 1 ? s->sets[0].loss : sum / (double)record->tokens;
    record->sets = s->set_count > 1 ? s->sets : NULL;
    record->set_count = s->set_count > 1 ? s->set_count : 0;
    return ND_OK;
}

/* The trace is of steps alone. */
static nd_status validate(nd_run *s)
{
    nd_validation_record record = {.step = s->trainer->position.step};
    const nd_trace steps = s->rank->trace;
    const nd_stop_check check = {stop_is_asked, s};
    double begin = nd_clock_seconds();
    ND_TRY(run_sets(s, &record));
    record.seconds = nd_clock_seconds() - begin;
    ND_TRY(write_samples(s->samples, &check, &s->sinks, &s->stopped));
    s->validation_seconds += nd_clock_seconds() - begin;
    s->rank->trace = steps;
    if (s->stopped) {
        return ND_OK;
    }
    if (record.tokens == 0) { /* no reason to lose what was trained */
        nd_log_warning("the validation after step %lld has no label that counts; check "
                       "data.validation_path, or raise train.validation_batches",
                       (long long)record.step);
        return ND_OK;
    }
    return nd_run_record_validation(s, &record);
}

static bool is_at_interval(const nd_run *s)
{
    const int64_t interval = s->config->train.validation_interval;
    return interval > 0 && s->trainer->position.step % interval == 0;
}

static bool is_due(const nd_run *s)
{
    const bool last = s->trainer->position.step == s->last_step;
    /* After a stop signal, skip validation: the grace period is needed to save the model. */
    return s->validation_loader && !s->stopped && (last || is_at_interval(s));
}

nd_status nd_run_validate(nd_run *s, bool at_end)
{
    return is_due(s) && !(at_end && is_at_interval(s)) ? validate(s) : ND_OK;
}

/* *out is true when the metrics.jsonl of the run has no validation of this step. A file that is
 * missing or damaged has none, so that it is made again. */
static nd_status lacks_validation(const char *run, int64_t step, bool *out)
{
    char path[ND_RUN_PATH_MAX + 32];
    nd_metrics metrics = {0};
    snprintf(path, sizeof path, "%s/metrics.jsonl", run);
    nd_status status = nd_metrics_read(path, &metrics);
    const nd_column *losses = nd_metrics_column(&metrics, "validation_loss");
    *out = true;
    for (size_t i = 0; i < losses->count; i++) {
        *out &= losses->points[i].step != (double)step;
    }
    nd_metrics_fini(&metrics);
    if (status == ND_ERR_DATA) {
        nd_error_clear();
        return ND_OK;
    }
    return status;
}

nd_status nd_run_validate_missing(nd_run *s)
{
    const int64_t step = s->trainer->position.step;
    bool lacks = false;
    if (step == 0 || !is_due(s) || !s->resume.found || !s->resume.continues) {
        return ND_OK;
    }
    const nd_status status = s->dir ? lacks_validation(s->resume.run, step, &lacks) : ND_OK;
    ND_TRY(nd_run_tell_all(s->worker, "validation owed", status, "cannot read metrics.jsonl",
                           &lacks, sizeof lacks));
    return lacks ? validate(s) : ND_OK;
}
