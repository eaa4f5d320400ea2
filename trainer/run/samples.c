// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/samples.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"
#include "runtime/device/staging.h"
#include "trainer/corpus/chat.h"

static nd_status open_tokenizer(nd_run_samples *s, const nd_config *config, const nd_inputs *inputs)
{
    if (inputs->tokenizer) {
        return nd_tokenizer_open(inputs->tokenizer, &s->tokenizer);
    }
    return strcmp(config->data.tokenizer, "bytes") == 0
               ? nd_byte_tokenizer_create(&s->tokenizer)
               : nd_fail(ND_ERR_CONFIG,
                         "train.sample_prompt is a text, but data.tokenizer is %s, which encodes "
                         "none; name a tokenizer.json with --tokenizer, or leave out "
                         "--sample-prompt",
                         config->data.tokenizer);
}

static nd_status encode(nd_run_samples *s, const nd_config *config, nd_request_rules *rules)
{
    nd_corpus_rules escapes = {0};
    ND_TRY(nd_corpus_separator(config->train.sample_prompt, &escapes, &s->text));
    ND_TRY(ND_ALLOC(strlen(s->text), &s->lines)); /* at least as many as lines with text */
    for (char *line = s->text, *end; line; line = end) {
        end = strchr(line, '\n');
        if (end) {
            *end++ = '\0';
        }
        if (*line) {
            s->lines[s->prompts.count] = line;
            ND_TRY(nd_requests_add_text(&s->prompts, rules, "train.sample_prompt", line,
                                        strlen(line)));
        }
    }
    return ND_OK;
}

static nd_status read_prompts(nd_run_samples *s, const nd_config *config, const nd_inputs *inputs)
{
    const nd_encode_options plain = {.special_in_text = ND_SPECIAL_PARSE, .post_process = true};
    const nd_encode_options message = {.special_in_text = ND_SPECIAL_TEXT};
    int32_t end = (int32_t)inputs->shape.eos_id;
    nd_encoder *encoders[2] = {NULL, NULL};
    nd_chat chat = {0};
    nd_chat_rules chat_rules;
    nd_status status = ND_OK;
    ND_TRY_OUT(open_tokenizer(s, config, inputs));
    ND_TRY_OUT(nd_decoder_create(s->tokenizer, true, &s->decoder));
    ND_TRY_OUT(nd_encoder_create(s->tokenizer, &plain, &encoders[0]));
    ND_TRY_OUT(nd_encoder_create(s->tokenizer, &message, &encoders[1]));
    ND_TRY_OUT(nd_chat_rules_find(inputs->tokenizer, config->data.chat_format, &chat_rules));
    ND_TRY_OUT(nd_chat_find(s->tokenizer, &chat_rules, &chat));
    const bool has_chat = chat_rules.template;
    nd_request_rules rules = {.prompts = encoders[0],
                              .messages = encoders[1],
                              .chat = has_chat ? &chat : NULL,
                              .plain_as_user = has_chat,
                              .vocab = inputs->shape.vocab,
                              .begin = -1,
                              .max_new = config->train.sample_tokens,
                              .max_new_fits = true,
                              .max_tokens = config->train.sequence_length,
                              .limit = "train.sequence_length"};
    ND_TRY_OUT(encode(s, config, &rules));
    if (end < 0 && inputs->tokenizer) { /* as of a model that is saved */
        end = nd_corpus_model_end(s->tokenizer, inputs->tokenizer, inputs->shape.vocab);
    }
    ND_TRY_OUT(nd_ends_read(inputs->model_folder, &s->ends));
    ND_TRY_OUT(s->ends.count == 0 && end >= 0 ? nd_ids_add(&s->ends, &end, 1) : ND_OK);
    ND_TRY_OUT(has_chat ? nd_ids_add(&s->ends, &chat.close, 1) : ND_OK);
out:
    nd_encoder_destroy(encoders[0]);
    nd_encoder_destroy(encoders[1]);
    return status;
}

/* Positions of this rank's part of a sequence (trainer/data/data.h). */
static int64_t position_of(const nd_rank *r, int64_t S, int64_t at)
{
    const int64_t cp = r->mesh.size[ND_AXIS_CP], mine = r->coord.at[ND_AXIS_CP];
    const int64_t chunk = cp > 1 ? S / (2 * cp) : S;
    return at < chunk ? mine * chunk + at : (2 * cp - 1 - mine) * chunk + at - chunk;
}

static nd_status allocate(nd_run_samples *s)
{
    const nd_rank *r = s->trainer->rank;
    const nd_dims *d = &s->trainer->model->dims;
    void *logits = NULL;
    ND_TRY(ND_ALLOC(d->T, &s->ids));
    ND_TRY(ND_ALLOC(d->T, &s->positions));
    for (int64_t i = 0; i < d->T; i++) {
        s->positions[i] =
            (int32_t)position_of(r, r->config->train.sequence_length, i % (d->T / d->B));
    }
    ND_TRY(nd_host_alloc(r->device, (size_t)d->vocab * sizeof *s->logits, &logits));
    s->logits = logits;
    return ND_OK;
}

nd_status nd_run_samples_open(nd_run_samples *s, const nd_config *config, const nd_inputs *inputs,
                              nd_trainer *trainer)
{
    if (!config->train.sample_prompt[0]) {
        return ND_OK;
    }
    ND_TRY(read_prompts(s, config, inputs));
    s->trainer = s->prompts.count > 0 ? trainer : NULL;
    return s->trainer ? allocate(s) : ND_OK;
}

nd_status nd_run_samples_check(const nd_config *config, const nd_inputs *inputs)
{
    nd_run_samples s = {0};
    nd_status status = nd_run_samples_open(&s, config, inputs, NULL);
    nd_run_samples_close(&s);
    return status;
}

/* The likeliest; a logit that is not a number is none. */
static int32_t likeliest(const float *logits, int64_t vocab)
{
    int32_t best = 0;
    for (int64_t v = 1; v < vocab; v++) {
        best = logits[v] > logits[best] ? (int32_t)v : best;
    }
    return best;
}

/* The next token of the text, on all ranks. */
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
    next = row >= 0 ? likeliest(s->logits, m->dims.vocab) + 1 : 0;
    ND_TRY(nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_WORLD], &r->stream, &next, 1, ND_DTYPE_I64,
                              ND_REDOP_MAX, NULL));
    *id = (int32_t)next - 1;
    return ND_OK;
}

static bool ends(const nd_run_samples *s, int32_t id)
{
    for (size_t i = 0; i < s->ends.count; i++) {
        if (s->ends.data[i] == id) {
            return true;
        }
    }
    return false;
}

static nd_status add_text(nd_run_samples *s, const int32_t *ids, size_t count)
{
    const char *text;
    size_t size;
    for (size_t i = 0; i < count; i++) {
        if (nd_tokenizer_token(s->tokenizer, ids[i], &size)) { /* a model may have more ids */
            ND_TRY(nd_decoder_push(s->decoder, &ids[i], 1, &text, &size));
            ND_TRY(nd_bytes_add(&s->out, text, size));
        }
    }
    return ND_OK;
}

/* What follows the prompt: a first word keeps the blank before it. */
static nd_status write_text(nd_run_samples *s, const char *line, const nd_ids *ids, size_t prompt,
                            nd_sinks *sinks)
{
    const char *text;
    size_t size;
    ND_TRY(add_text(s, ids->data, prompt));
    ND_TRY(nd_decoder_end_run(s->decoder, &text, &size));
    s->out.count = 0;
    ND_TRY(add_text(s, ids->data + prompt, ids->count - prompt));
    ND_TRY(nd_decoder_end(s->decoder, &text, &size));
    ND_TRY(nd_bytes_add(&s->out, text, size));
    ND_TRY(nd_bytes_add(&s->out, "", 1));
    const nd_run_event event = {.kind = ND_RUN_EVENT_SAMPLE,
                                .step = s->trainer->position.step,
                                .path = line,
                                .reason = (const char *)s->out.data};
    s->out.count = 0;
    return nd_sinks_event(sinks, &event);
}

nd_status nd_run_samples_write(nd_run_samples *s, const nd_stop_check *check, nd_sinks *sinks,
                               bool *stopped)
{
    for (size_t i = 0; s->trainer && i < s->prompts.count && !*stopped; i++) {
        nd_ids *ids = &s->prompts.list[i].ids;
        const size_t prompt = ids->count, most = prompt + (size_t)s->prompts.list[i].max_new;
        for (bool over = false; !over && ids->count < most;) {
            int32_t id;
            ND_TRY(check->ask(check->context, stopped));
            if (*stopped) {
                return ND_OK;
            }
            ND_TRY(find_next(s, ids, &id));
            over = ends(s, id);
            ND_TRY(nd_ids_add(ids, &id, !over));
        }
        ND_TRY(sinks->count > 0 ? write_text(s, s->lines[i], ids, prompt, sinks) : ND_OK);
        ids->count = prompt;
    }
    return ND_OK;
}

void nd_run_samples_close(nd_run_samples *s)
{
    nd_decoder_destroy(s->decoder);
    nd_tokenizer_close(s->tokenizer);
    nd_requests_fini(&s->prompts);
    if (s->trainer) {
        nd_host_free(s->trainer->rank->device, s->logits);
    }
    free(s->text);
    free((void *)s->lines);
    free(s->ends.data);
    free(s->ids);
    free(s->positions);
    free(s->out.data);
    *s = (nd_run_samples){0};
}
