// SPDX-License-Identifier: Apache-2.0
/* The comparison of a checkpoint with the run that goes on from it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/hash.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "runtime/base/suggest.h"
#include "trainer/run/state.h"

/* Pairs of a manifest's identity that are no settings, or are not compared as such. */
typedef struct identity_rule {
    const char *key;
    const char *word;  /* of checkpoint.allow, which lifts the comparison */
    const char *older; /* the value of checkpoints that have no such pair; NULL: not compared */
    const char *what;  /* of a digest of files: what they are; else NULL */
    bool order;        /* the order of samples, which matters to the steps that are left */
} identity_rule;
static const char tokenizer_file[] = "tokenizer.json", data_content[] = "data.path content",
                  mix_period[] = "data.path period", packing[] = "data.path packing",
                  documents[] = "data.documents", step_samples[] = "samples of a step";
enum { MIX_PERIOD_WITHOUT_PAIR = 65536 };
static const identity_rule identity_rules[] = {
    /* The path of a tokenizer says nothing about its content. Checkpoints without this pair are
     * compared by data.tokenizer. */
    {tokenizer_file, "data.tokenizer", NULL, "another tokenizer.json", false},
    {"data.path", "data.path", NULL, "other training data", false},
    {data_content, "data.path", NULL, "other training data", false},
    /* Earlier programs had other orders: in a blend (trainer/data/blend.c) whose period is longer
     * than any was, and of whole rows. */
    {mix_period, "data.path", "65536", NULL, true},
    {packing, "data.path", "in the order of the file", NULL, true},
    {documents, documents, "join", NULL, false},
    {step_samples, "samples_per_step", NULL, NULL, false},
};
enum { RULES = sizeof identity_rules / sizeof *identity_rules };
static const char *const keys[] = {"data.tokenizer",        "data.shuffle_seed", documents,
                                   "data.positions",        "data.long_rows",    "data.end_of_text",
                                   "train.sequence_length", "optimizer.name"};
enum { KEYS = sizeof keys / sizeof *keys };

/* That of another key has the key itself as its word. */
static identity_rule rule_of(const char *key)
{
    for (int i = 0; i < RULES; i++) {
        if (strcmp(key, identity_rules[i].key) == 0) {
            return identity_rules[i];
        }
    }
    return (identity_rule){.key = key, .word = key};
}

/* Returns whether a setting changes what the steps that are left learn. One that follows from
 * another, or has no effect, does not. model.seed has no effect either, but means another run. */
static bool teaches(const nd_config *config, const char *key)
{
    if (strncmp(key, "fp8.", 4) == 0) {
        return config->train.precision == ND_PRECISION_FP8 &&
               strcmp(key, "fp8.health_interval") != 0;
    }
    if (strcmp(key, "optimizer.warmup_steps") == 0) {
        return config->optimizer.warmup_ratio == 0;
    }
    return strncmp(key, "optimizer.", 10) == 0 || strcmp(key, "model.seed") == 0 ||
           strcmp(key, "train.precision") == 0;
}

/* Returns whether a comma-separated list has the word. */
static bool holds(const char *list, const char *word)
{
    const size_t length = strlen(word);
    for (const char *at = list; (at = strstr(at, word)); at += length) {
        if ((at == list || at[-1] == ',') && (at[length] == ',' || !at[length])) {
            return true;
        }
    }
    return false;
}

/* A word of checkpoint.allow, and whether a key that is compared has it. */
typedef struct allowed_word {
    nd_suggest search;
    const nd_config *config;
    char word[64];
    bool known;
} allowed_word;

static void offer(allowed_word *a, const char *key)
{
    nd_suggest_offer(&a->search, key);
    a->known |= strcmp(a->word, key) == 0;
}

static void offer_setting(void *context, const char *key, const char *value, bool job)
{
    allowed_word *a = context;
    if (teaches(a->config, key) || strncmp(key, "fp8.", 4) == 0) {
        offer(a, key);
    }
}

nd_status nd_resume_check_allowed(const nd_config *config)
{
    for (const char *p = config->checkpoint.allow; *p;) {
        const size_t length = strcspn(p, ",");
        allowed_word a = {.config = config};
        snprintf(a.word, sizeof a.word, "%.*s", (int)length, p);
        p += length + (p[length] == ',');
        nd_suggest_init(&a.search, a.word);
        for (int i = 0; i < RULES + KEYS; i++) {
            offer(&a, i < RULES ? identity_rules[i].word : keys[i - RULES]);
        }
        ND_TRY(nd_config_each(config, offer_setting, &a));
        if (!a.known) {
            const char *near = a.search.best;
            return nd_fail(
                ND_ERR_CONFIG,
                "--resume-allow (checkpoint.allow) names %s, which allows nothing%s%s%s; "
                "it can name data.path, data.tokenizer, data.shuffle_seed, data.documents, "
                "data.positions, data.long_rows, data.end_of_text, samples_per_step, "
                "train.sequence_length, train.precision, model.seed, and keys of optimizer and fp8",
                a.word, near ? " (did you mean " : "", near ? near : "", near ? "?)" : "");
        }
    }
    return ND_OK;
}

nd_status nd_resume_identity(const nd_config *config, const nd_inputs *inputs, json_t **out)
{
    nd_dataset *data = inputs->data;
    const nd_dataset_facts facts = nd_dataset_facts_of(data);
    char text[80];
    nd_config of_data = *config; /* whose data.documents may be that of the validation */
    json_t *all = json_object();
    nd_status status = ND_OK;
    of_data.data.documents = nd_dataset_documents(data);
    if (inputs->tokenizer) { /* first: with another one the data have another digest as well */
        ND_TRY_OUT(nd_sha256_file(inputs->tokenizer, text));
        nd_json_set(&all, tokenizer_file, json_string(text));
    }
    ND_TRY_OUT(nd_dataset_digest(data, text));
    nd_json_set(&all, "data.path", json_string(text));
    ND_TRY_OUT(nd_dataset_content(data, text));
    if (text[0]) {
        nd_json_set(&all, data_content, json_string(text));
    }
    if (facts.period > MIX_PERIOD_WITHOUT_PAIR) {
        nd_json_set(&all, mix_period, json_sprintf("%lld", (long long)facts.period));
    }
    if (facts.lists > 0) {
        nd_json_set(&all, packing, json_string("the longest first"));
    }
    nd_json_set(&all, step_samples, json_sprintf("%lld", (long long)nd_step_blocks(config)));
    for (int i = 0; i < KEYS; i++) {
        char *value = NULL;
        ND_TRY_OUT(nd_config_get(&of_data, keys[i], &value));
        nd_json_set(&all, keys[i], nd_json_string(value));
        free(value);
    }
    *out = json_incref(all);
    status = all ? ND_OK : nd_fail_memory("a manifest");
out:
    json_decref(all);
    return status;
}

/* A checkpoint and the run that is to go on from it. One start shows all that differs: behind the
 * message about the first difference stands what allows all of them. */
typedef struct comparison {
    const nd_config *config;
    const nd_inputs *inputs;
    const char *folder;
    const nd_manifest *manifest;
    json_t *own;      /* what nd_resume_identity gives; owned */
    bool logs;        /* what is allowed */
    bool files;       /* both have a tokenizer.json, by which tokenizers are compared */
    bool finished;    /* no step is left to do */
    const char *said; /* the word of what was said: the data are told of once */
    nd_status status;
    char words[1024]; /* of checkpoint.allow, each once */
} comparison;

static const char *old_setting(const comparison *c, const char *key)
{
    return nd_manifest_find(c->manifest->config, key);
}

/* The value of the checkpoint, or the one that earlier programs meant without saying it. The order
 * of joined documents was never another one. */
static const char *find_stored(const comparison *c, const char *key)
{
    const json_t *identity = c->manifest->identity;
    const char *stored = nd_manifest_find(identity, key);
    if (stored || !nd_manifest_find(identity, "data.path")) {
        return stored;
    }
    return strcmp(key, packing) == 0 && strcmp(find_stored(c, documents), "join") == 0
               ? NULL
               : rule_of(key).older;
}

static nd_status fail_samples(const comparison *c, const char *stored)
{
    const int64_t wanted = strtoll(stored, NULL, 10), own = nd_step_blocks(c->config);
    const int64_t steps = c->config->train.gradient_accumulation_steps;
    char hint[80] = "";
    if (wanted > 0 && wanted <= INT64_MAX / steps && wanted * steps % own == 0) {
        snprintf(hint, sizeof hint, ", for instance with --gradient-accumulation-steps %lld",
                 (long long)(wanted * steps / own));
    }
    return nd_fail(ND_ERR_CONFIG,
                   "%s was made with %s samples a step, and this run has %lld; keep the product "
                   "of train.micro_batch_size, train.gradient_accumulation_steps and the "
                   "data-parallel ranks%s, or allow the change with --resume-allow "
                   "samples_per_step",
                   c->folder, stored, (long long)own, hint);
}

/* Where one of the two runs names several sources, both lists of files say more than their
 * digests. */
static nd_status fail_pair(const comparison *c, const char *key, const char *own,
                           const char *stored)
{
    const identity_rule rule = rule_of(key);
    const char *path = old_setting(c, "data.path");
    if (strcmp(key, step_samples) == 0) {
        return fail_samples(c, stored);
    }
    if (!rule.what) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s was made with %s %s, and this run has %s; %s, or allow the change with "
                       "--resume-allow %s",
                       c->folder, key, stored, own,
                       rule.order ? "go on with the ndtrain that made it" : "use the same value",
                       rule.word);
    }
    if (strcmp(rule.word, "data.path") == 0 && path && strcmp(path, c->config->data.path) != 0 &&
        (c->config->data_sources > 1 || path[0] == '[' || path[0] == '{')) {
        return nd_fail(
            ND_ERR_CONFIG,
            "%s was made with data.path %.400s (digest %.12s), whose order it goes on in, and "
            "this run has %.400s (digest %.12s); use the same list, or allow the change with "
            "--resume-allow data.path",
            c->folder, path, stored, c->config->data.path, own);
    }
    return nd_fail(ND_ERR_CONFIG,
                   "%s was made with %s (digest %.12s, not %.12s); name the same file with %s, or "
                   "allow the change with --resume-allow %s",
                   c->folder, rule.what, stored, own, rule.word, rule.word);
}

/* Files whose content changed, which their paths do not show, their order, and other samples of a
 * step. Settings are told of with those that may change. */
static void log_allowed(comparison *c, const char *key, const char *own, const char *stored)
{
    const identity_rule rule = rule_of(key);
    if (!c->logs || strcmp(rule.word, c->said) == 0) {
        return;
    }
    if (strcmp(key, step_samples) == 0) {
        nd_log_info("resume: a step had %s samples and has %s, as --resume-allow permits; the "
                    "data go on behind sample %lld, and steps, by which the learning rate's "
                    "schedule goes, count on from %lld",
                    stored, own, (long long)c->manifest->samples_seen,
                    (long long)c->manifest->position.step);
    } else if (rule.what) {
        nd_log_info("resume: %s has another content (digest %.12s, not %.12s), as "
                    "--resume-allow permits",
                    rule.word, own, stored);
    } else if (rule.order) {
        nd_log_info("resume: %s was %s and is %s, as --resume-allow permits, so that some "
                    "samples may be left out, or read once more",
                    key, stored, own);
    } else {
        return;
    }
    c->said = rule.word;
}

static void compare(comparison *c, const char *key, const char *own, const char *stored)
{
    const identity_rule rule = rule_of(key);
    const size_t used = strlen(c->words);
    const bool file = strcmp(key, tokenizer_file) == 0;
    const bool other = strcmp(rule.word, "data.tokenizer") == 0 && file != c->files;
    if (!stored || strcmp(stored, own) == 0 || other || (rule.order && c->finished)) {
        return;
    }
    if (holds(c->config->checkpoint.allow, rule.word)) {
        log_allowed(c, key, own, stored);
        return;
    }
    if (c->status == ND_OK) {
        c->status = fail_pair(c, key, own, stored);
    }
    if (!holds(c->words, rule.word)) {
        snprintf(c->words + used, sizeof c->words - used, "%s%s", used > 0 ? "," : "", rule.word);
    }
}

/* With no step left to do, another setting of what is learned would have no effect, so that nothing
 * allows it: it is that of another run, which has met this one. */
static void compare_setting(void *context, const char *key, const char *value, bool job)
{
    comparison *c = context;
    const char *stored = old_setting(c, key);
    if (!teaches(c->config, key)) {
        return;
    }
    if (!c->finished) {
        compare(c, key, value, stored);
    } else if (c->status == ND_OK && stored && strcmp(stored, value) != 0) {
        c->status = nd_fail(ND_ERR_CONFIG,
                            "%s is the end of a run whose %s was %s, and this one has %s; give "
                            "another --save-dir for a run of its own, or more steps to go on with "
                            "that one",
                            c->folder, key, stored, value);
    }
}

static nd_status check_pairs(comparison *c)
{
    const char *key;
    json_t *value;
    c->files = c->inputs->tokenizer && nd_manifest_find(c->manifest->identity, tokenizer_file);
    c->finished = c->manifest->position.step >= c->config->train.steps;
    json_object_foreach(c->own, key, value)
    {
        compare(c, key, json_string_value(value), find_stored(c, key));
    }
    ND_TRY(nd_config_each(c->config, compare_setting, c));
    return strchr(c->words, ',')
               ? nd_fail(c->status, "%s; to allow all that differs, give --resume-allow %s",
                         nd_error_last()->message, c->words)
               : c->status;
}

/*
 * The last step. What a run with steps of the same samples has passed over after a failure is no
 * fault of its configuration: it ends with the data. train.epochs says how many steps of its
 * samples a whole run has: steps of another number came before, so that it would end this one
 * elsewhere than after these epochs.
 */
static nd_status check_end(const comparison *c)
{
    const nd_config *config = c->config;
    const nd_epochs e = nd_inputs_epochs(config, c->inputs);
    const int64_t step = c->manifest->position.step, seen = c->manifest->samples_seen;
    const char *stored = nd_manifest_find(c->manifest->identity, step_samples);
    const bool others = stored && strtoll(stored, NULL, 10) != e.step;
    if (config->train.epochs != 0 && (others || seen / e.step < step)) {
        const double samples = fmax(config->train.epochs * (double)e.samples - (double)seen, 0);
        const double left = samples / (double)e.step, up = ceil(left - 1e-9 * left);
        const bool ends = up * (double)e.step > (double)e.limit - (double)seen;
        return nd_fail(ND_ERR_CONFIG,
                       "%s has seen %lld samples in %lld steps, and a step of this run has %lld, "
                       "so that train.epochs %g, which is %lld of these steps, would end it too "
                       "early or too late; give --num-steps %.0f in its place, which ends the run "
                       "after these epochs",
                       c->folder, (long long)seen, (long long)step, (long long)e.step,
                       config->train.epochs, (long long)config->train.steps,
                       (double)step + (ends ? floor(left) : up));
    }
    if (step > config->train.steps) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s is already at step %lld, and train.steps is %lld; give more steps, or "
                       "an older checkpoint",
                       c->folder, (long long)step, (long long)config->train.steps);
    }
    return nd_config_check_end(config, &e, step,
                               !others && seen > step * e.step ? step * e.step : seen);
}

/* These functions log what has changed, and may. */

static void log_setting(void *context, const char *key, const char *value, bool job)
{
    static const char *const may_differ[] = {"checkpoint.", "launch.", "log.", "output."};
    const char *stored = old_setting(context, key);
    bool tells = job && stored && strcmp(stored, value) != 0;
    for (size_t i = 0; i < sizeof may_differ / sizeof *may_differ; i++) {
        tells &= strncmp(key, may_differ[i], strlen(may_differ[i])) != 0;
    }
    if (tells) {
        nd_log_info("resume: %s was %s and is %s%s", key, stored[0] ? stored : "empty",
                    value[0] ? value : "empty",
                    strcmp(key, "train.steps") == 0
                        ? ", which also bends the learning rate's schedule"
                        : "");
    }
}

/* train.validation_batches counts for each data-parallel rank. */
static void log_validation(const comparison *c)
{
    const nd_config *config = c->config;
    const char *batches = old_setting(c, "train.validation_batches");
    const char *micro = old_setting(c, "train.micro_batch_size");
    double own = (double)config->train.validation_batches * (double)config->train.micro_batch_size *
                 nd_mesh_group_size(&config->resolved_mesh, ND_GROUP_DP);
    double stored = batches && micro ? strtod(batches, NULL) * strtod(micro, NULL) *
                                           nd_mesh_group_size(&c->manifest->mesh, ND_GROUP_DP)
                                     : 0;
    if (own > 0 && stored > 0 && own != stored && config->data.validation_path[0]) {
        nd_log_info("resume: a validation was over at most %.0f sequences and is over at most "
                    "%.0f, so its losses are not those of the same text (train.validation_batches "
                    "is that of each data-parallel rank)",
                    stored, own);
    }
}

static nd_status log_changes(comparison *c)
{
    const char *interval = old_setting(c, "checkpoint.interval");
    const char *models = old_setting(c, "checkpoint.export_model");
    if (interval && strcmp(interval, "0") != 0 && c->config->checkpoint.interval == 0) {
        nd_log_warning("resume: from here on no checkpoints are saved (checkpoint.interval is 0); "
                       "with --checkpoint-frequency %s they are, as before",
                       interval);
    }
    if (models && strcmp(models, "true") == 0 && c->config->checkpoint.interval > 0 &&
        !c->config->checkpoint.export_model) {
        nd_log_warning("resume: from here on checkpoints hold no Hugging Face model; with "
                       "--checkpoint-export-model true they do, as before");
    }
    log_validation(c);
    return nd_config_each(c->config, log_setting, c);
}

nd_status nd_resume_check(const nd_config *config, const nd_inputs *inputs, const char *folder,
                          const nd_manifest *manifest, bool logs)
{
    comparison c = {.config = config,
                    .inputs = inputs,
                    .folder = folder,
                    .manifest = manifest,
                    .logs = logs,
                    .said = ""};
    nd_status status = ND_OK;
    ND_TRY(nd_shape_compare(&manifest->shape, folder, &inputs->shape, "the model of this run"));
    ND_TRY_OUT(nd_resume_identity(config, inputs, &c.own));
    ND_TRY_OUT(check_pairs(&c));
    ND_TRY_OUT(check_end(&c));
    ND_TRY_OUT(logs ? log_changes(&c) : ND_OK);
out:
    json_decref(c.own);
    return status;
}
