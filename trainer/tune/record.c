// SPDX-License-Identifier: Apache-2.0
/*
 * The record of autotune as JSON. Each member is described once: a function of this file takes it
 * out of the JSON and checks it when a record is read, and puts it into the JSON when one is
 * written.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "runtime/tensor/dtype.h"
#include "trainer/tune/measure.h"

void nd_tuning_destroy(nd_tuning *t)
{
    if (t) {
        free(t->from);
        free(t->choices);
        free(t->json);
        free(t);
    }
}

/* An object of the record. */
typedef struct record {
    json_t *object; /* read: borrowed. Written: owned; NULL when memory ran out */
    bool reads;
    const char *name; /* of the text that is read, for messages */
    char place[64];   /* of the object in it: "autotune", "autotune.products[3]" */
} record;

static const int64_t extent_max = (int64_t)1 << 40;

static nd_status damaged(const record *r, const char *key, const char *what)
{
    return nd_fail(ND_ERR_DATA,
                   "%s: %s.%s %s; the record is damaged; choose again with kernels.autotune, "
                   "without kernels.autotune_from",
                   r->name, r->place, key, what);
}

/* Members. */

static nd_status member_int(record *r, const char *key, int64_t low, int64_t high, int64_t *number)
{
    const json_t *value = json_object_get(r->object, key);
    if (!r->reads) {
        nd_json_set(&r->object, key, json_integer(*number));
        return ND_OK;
    }
    if (!json_is_integer(value) || json_integer_value(value) < low ||
        json_integer_value(value) > high) {
        char what[96];
        snprintf(what, sizeof what, "is no whole number of %lld to %lld", (long long)low,
                 (long long)high);
        return damaged(r, key, what);
    }
    *number = json_integer_value(value);
    return ND_OK;
}

static nd_status member_bool(record *r, const char *key, int32_t *truth)
{
    const json_t *value = json_object_get(r->object, key);
    if (!r->reads) {
        nd_json_set(&r->object, key, json_boolean(*truth));
        return ND_OK;
    }
    if (!json_is_boolean(value)) {
        return damaged(r, key, "is not true or false");
    }
    *truth = json_is_true(value);
    return ND_OK;
}

/* Reads a text, which is borrowed from the record. */
static nd_status text_of(const record *r, const char *key, const char **text)
{
    *text = json_string_value(json_object_get(r->object, key));
    return *text ? ND_OK : damaged(r, key, "is no text");
}

/* A number of seconds; negative: not known, which is null in JSON. */
static nd_status member_seconds(record *r, const char *key, double *seconds)
{
    const json_t *value = json_object_get(r->object, key);
    const double number = json_is_null(value) ? -1.0 : json_number_value(value);
    if (!r->reads) {
        nd_json_set(&r->object, key, *seconds >= 0.0 ? json_real(*seconds) : json_null());
        return ND_OK;
    }
    if (!json_is_null(value) && (!json_is_number(value) || !isfinite(number) || number < 0.0)) {
        return damaged(r, key, "is no number of seconds, and not null");
    }
    *seconds = number;
    return ND_OK;
}

/* One of the numbers 0 to count - 1 by its name; name(i) is NULL where i may not stand there. */
static nd_status member_choice(record *r, const char *key, const char *(*name)(int), int count,
                               const char *what, int32_t *choice)
{
    const char *text = NULL;
    if (!r->reads) {
        nd_json_set(&r->object, key, json_string(name(*choice)));
        return ND_OK;
    }
    ND_TRY(text_of(r, key, &text));
    for (int32_t i = 0; i < count; i++) {
        if (name(i) && strcmp(name(i), text) == 0) {
            *choice = i;
            return ND_OK;
        }
    }
    return damaged(r, key, what);
}

static nd_status read_list(const record *r, const char *key, size_t most, json_t **list)
{
    *list = json_object_get(r->object, key);
    if (!json_is_array(*list) || json_array_size(*list) > most) {
        char what[64];
        snprintf(what, sizeof what, "is no list of at most %zu", most);
        return damaged(r, key, what);
    }
    return ND_OK;
}

/* A list of objects, each with the members that `describe` lists. */
static nd_status member_list(record *r, const char *key, size_t most, int *count,
                             nd_status (*describe)(record *, nd_tuning *, int), nd_tuning *t)
{
    json_t *list = r->reads ? NULL : json_array();
    if (r->reads) {
        ND_TRY(read_list(r, key, most, &list));
        *count = (int)json_array_size(list);
    }
    for (int i = 0; i < *count; i++) {
        record item = *r;
        item.object = r->reads ? json_array_get(list, (size_t)i) : json_object();
        snprintf(item.place, sizeof item.place, "%.40s.%s[%d]", r->place, key, i);
        ND_TRY(describe(&item, t, i)); /* fails only when it reads, and so owns nothing */
        if (!r->reads) {
            nd_json_append(&list, item.object);
        }
    }
    if (!r->reads) {
        nd_json_set(&r->object, key, list);
    }
    return ND_OK;
}

/* Products. */

static const char *type_name(int dtype)
{
    return dtype == ND_DTYPE_F32 || dtype == ND_DTYPE_BF16 || dtype == ND_DTYPE_F8_E4M3 ||
                   dtype == ND_DTYPE_F8_E5M2
               ? nd_dtype_name((nd_dtype)dtype)
               : NULL;
}

static nd_status member_type(record *r, const char *key, int32_t *dtype)
{
    return member_choice(r, key, type_name, ND_DTYPE_COUNT, "is no type of a product", dtype);
}

static const char *scaling_name(int scaling)
{
    static const char *const names[] = {"none", "tensor", "vector"};
    return names[scaling];
}

static nd_status member_align(record *r, nd_lt_key *key)
{
    json_t *list = r->reads ? NULL : json_array();
    int32_t *const values[] = {&key->align_a, &key->align_b, &key->align_d};
    if (!r->reads) {
        for (size_t i = 0; i < 3; i++) {
            nd_json_append(&list, json_integer(*values[i]));
        }
        nd_json_set(&r->object, "align", list);
        return ND_OK;
    }
    ND_TRY(read_list(r, "align", 3, &list));
    for (size_t i = 0; i < 3; i++) {
        const int64_t bytes = json_integer_value(json_array_get(list, i));
        if (bytes < 1 || bytes > 256 || (bytes & (bytes - 1))) {
            return damaged(r, "align", "is not three powers of two up to 256");
        }
        *values[i] = (int32_t)bytes;
    }
    return ND_OK;
}

static nd_status member_algorithm(record *r, uint64_t words[8])
{
    char digits[8 * 16 + 1];
    const char *text = NULL;
    if (!r->reads) {
        for (size_t i = 0; i < 8; i++) {
            snprintf(digits + i * 16, 17, "%016llx", (unsigned long long)words[i]);
        }
        nd_json_set(&r->object, "algorithm", json_string(digits));
        return ND_OK;
    }
    ND_TRY(text_of(r, "algorithm", &text));
    if (strlen(text) != 128 || strspn(text, "0123456789abcdef") != 128) {
        return damaged(r, "algorithm", "is not of 128 hexadecimal digits");
    }
    for (size_t i = 0; i < 8; i++) {
        char word[17] = "";
        memcpy(word, text + i * 16, 16);
        words[i] = strtoull(word, NULL, 16);
    }
    return ND_OK;
}

static nd_status describe_key(record *r, nd_lt_key *key)
{
    int64_t *const extents[] = {&key->m, &key->n, &key->k, &key->lda, &key->ldb, &key->ldd};
    static const char *const names[] = {"m", "n", "k", "lda", "ldb", "ldd"};
    int64_t processors = key->processors;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        ND_TRY(member_int(r, names[i], 1, extent_max, extents[i]));
    }
    ND_TRY(member_type(r, "a", &key->a));
    ND_TRY(member_type(r, "b", &key->b));
    ND_TRY(member_type(r, "d", &key->d));
    ND_TRY(member_bool(r, "a_transposed", &key->a_transposed));
    ND_TRY(member_bool(r, "b_transposed", &key->b_transposed));
    ND_TRY(member_bool(r, "adds", &key->beta));
    ND_TRY(member_bool(r, "fast_accumulation", &key->fast));
    ND_TRY(member_choice(r, "scales", scaling_name, 3, "is not none, tensor or vector",
                         &key->scaling));
    ND_TRY(member_align(r, key));
    ND_TRY(member_int(r, "processors", 0, 1024, &processors)); /* as kernels.product_processors */
    key->processors = (int32_t)processors;
    if (key->lda < (key->a_transposed ? key->k : key->m) ||
        key->ldb < (key->b_transposed ? key->n : key->k) || key->ldd < key->m) {
        return r->reads ? damaged(r, "lda", "or ldb or ldd is less than the rows of its matrix")
                        : ND_OK;
    }
    return ND_OK;
}

static nd_status describe_product(record *r, nd_tuning *t, int i)
{
    nd_lt_choice *choice = &t->choices[i];
    ND_TRY(describe_key(r, &choice->key));
    ND_TRY(member_algorithm(r, choice->algorithm));
    ND_TRY(member_int(r, "workspace", 0, extent_max, &choice->workspace));
    ND_TRY(member_int(r, "candidates", 0, ND_LT_CANDIDATES, &choice->candidates));
    ND_TRY(member_int(r, "picked", 0, ND_LT_CANDIDATES - 1, &choice->picked));
    ND_TRY(member_seconds(r, "seconds", &choice->seconds));
    return member_seconds(r, "first_seconds", &choice->first_seconds);
}

/* Linears. */

/* The list "asked" of module names of linears with one input, which the names show. */
static nd_status member_asked(record *r, nd_tuned_linears *l)
{
    int first = 0, count = nd_input_linears(l->input, &first);
    json_t *list = r->reads ? NULL : json_array();
    if (!r->reads) {
        for (int i = 0; i < count; i++) {
            if (l->asked >> i & 1) {
                nd_json_append(&list, json_string(nd_linears[first + i].module));
            }
        }
        nd_json_set(&r->object, "asked", list);
        return ND_OK;
    }
    ND_TRY(read_list(r, "asked", 3, &list));
    l->asked = 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *name = json_string_value(json_array_get(list, i));
        int bit = -1;
        for (int g = 0; name && g < ND_INPUT_COUNT; g++) {
            count = nd_input_linears((nd_input)g, &first);
            for (int k = 0; k < count && (l->asked == 0 || (int)l->input == g); k++) {
                if (strcmp(nd_linears[first + k].module, name) == 0) {
                    bit = k;
                    l->input = (nd_input)g;
                }
            }
        }
        if (bit < 0) {
            return damaged(r, "asked", "does not name linears of one input");
        }
        l->asked |= 1 << bit;
    }
    return l->asked > 0 ? ND_OK : damaged(r, "asked", "is empty");
}

static nd_status describe_linears(record *r, nd_tuning *t, int i)
{
    nd_tuned_linears *l = &t->linears[i];
    ND_TRY(member_asked(r, l));
    ND_TRY(member_bool(r, "fp8", &l->fp8));
    int8_t *fp8 = &t->linear_choice.fp8[l->input][l->asked];
    if (r->reads && *fp8 >= 0) {
        return damaged(r, "asked", "is that of an earlier entry");
    }
    *fp8 = (int8_t)(l->fp8 ? l->asked : 0);
    ND_TRY(member_seconds(r, "fp8_seconds", &l->fp8_seconds));
    return member_seconds(r, "bf16_seconds", &l->bf16_seconds);
}

/* The settings, which must be equal where a record is replayed. */

int64_t nd_tuning_spared_processors(const nd_config *config)
{
    const bool gathers = nd_mesh_group_size(&config->resolved_mesh, ND_GROUP_DP_SHARD_CP) > 1 ||
                         config->launch.nccl_alone;
    return config->kernels.product_processors == 0 && gathers ? config->kernels.comm_blocks : 0;
}

static void set_number(json_t **settings, const char *key, int64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    nd_json_set(settings, key, json_string(text));
}

/* The keys of the configuration that the local products of a step depend on. */
static nd_status set_config(json_t **settings, const nd_config *config)
{
    static const char *const keys[] = {"train.precision",
                                       "train.sequence_length",
                                       "train.micro_batch_size",
                                       "train.gradient_accumulation_steps",
                                       "mesh.cp",
                                       "mesh.tp",
                                       "fp8.recipe",
                                       "fp8.all_gather",
                                       "fp8.filter",
                                       "fp8.format"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char *value = NULL;
        if (strncmp(keys[i], "fp8.", 4) == 0 && config->train.precision != ND_PRECISION_FP8) {
            continue;
        }
        ND_TRY(nd_config_get(config, keys[i], &value));
        nd_json_set(settings, keys[i], nd_json_string(value));
        free(value);
    }
    const int64_t spared = nd_tuning_spared_processors(config);
    char processors[32];
    snprintf(processors, sizeof processors, "%s%lld", spared > 0 ? "all but " : "",
             (long long)(spared > 0 ? spared : config->kernels.product_processors));
    nd_json_set(settings, "kernels.product_processors", json_string(processors));
    return ND_OK;
}

/* Makes the settings as texts by their keys, for the caller. */
static nd_status make_settings(const nd_config *config, const nd_shape *shape, json_t **out)
{
    json_t *settings = json_object();
    nd_status status = set_config(&settings, config);
    set_number(&settings, "model.hidden_size", shape->hidden);
    set_number(&settings, "model.intermediate_size", shape->ffn);
    set_number(&settings, "model.num_hidden_layers", shape->layers);
    set_number(&settings, "model.num_attention_heads", shape->heads);
    set_number(&settings, "model.num_key_value_heads", shape->kv_heads);
    set_number(&settings, "model.head_dim", shape->head_dim);
    set_number(&settings, "model.vocab_size", shape->vocab);
    set_number(&settings, "model.tie_word_embeddings", shape->tied);
    if (status == ND_OK && !settings) {
        status = nd_fail_memory("autotune's settings");
    }
    if (status != ND_OK) {
        json_decref(settings);
        return status;
    }
    *out = settings;
    return ND_OK;
}

/* The settings of the record must be those of this run. */
static nd_status compare_settings(const record *r, json_t *run)
{
    const record recorded = {.object = json_object_get(r->object, "settings"),
                             .name = r->name,
                             .place = "autotune.settings"};
    const char *key;
    json_t *value;
    if (!json_is_object(recorded.object)) {
        return damaged(r, "settings", "is no object");
    }
    json_object_foreach(run, key, value)
    {
        const char *here = json_string_value(value), *text = NULL;
        ND_TRY(text_of(&recorded, key, &text));
        if (strcmp(text, here) != 0) {
            return nd_fail(ND_ERR_CONFIG,
                           "%s: its choices were made for %s %.200s, and this run has %.200s; "
                           "choose again with kernels.autotune, without kernels.autotune_from",
                           r->name, key, text, here);
        }
    }
    return ND_OK;
}

/* The whole. */

static nd_status describe_machine(record *r, nd_tuning *t)
{
    int32_t cut_short = t->cut_short;
    const char *gpu = t->gpu;
    if (!r->reads) {
        nd_json_set(&r->object, "gpu", nd_json_string(gpu));
    } else {
        ND_TRY(text_of(r, "gpu", &gpu));
        snprintf(t->gpu, sizeof t->gpu, "%s", gpu);
    }
    ND_TRY(member_int(r, "compute_capability", 0, 10000, &t->capability));
    ND_TRY(member_int(r, "cublaslt", 0, 100000000, &t->cublaslt));
    if (!r->reads) {
        nd_json_set(&r->object, "replayed_from", t->from ? nd_json_string(t->from) : json_null());
    }
    ND_TRY(member_seconds(r, "timing_seconds", &t->seconds));
    ND_TRY(member_bool(r, "cut_short", &cut_short));
    t->cut_short = cut_short;
    return ND_OK;
}

static nd_status describe_choices(record *r, nd_tuning *t)
{
    ND_TRY(member_list(r, "linears", ND_TUNED_LINEARS_MAX, &t->linear_count, describe_linears, t));
    return member_list(r, "products", ND_LT_PLANS - 1, &t->choice_count, describe_product, t);
}

nd_status nd_record_write(nd_tuning *t, const nd_config *config, const nd_shape *shape)
{
    record r = {.place = "autotune"};
    json_t *settings = NULL;
    ND_TRY(make_settings(config, shape, &settings));
    r.object = json_object();
    nd_status status = describe_machine(&r, t);
    nd_json_set(&r.object, "settings", settings);
    status = status == ND_OK ? describe_choices(&r, t) : status;
    free(t->json);
    t->json = nd_json_text(r.object, JSON_REAL_PRECISION(17));
    json_decref(r.object);
    return status == ND_OK && !t->json ? nd_fail_memory("autotune's record") : status;
}

static nd_status check_members(const record *r)
{
    static const char *const known[] = {
        "gpu",       "compute_capability", "cublaslt", "replayed_from", "timing_seconds",
        "cut_short", "settings",           "linears",  "products",      NULL};
    return nd_json_check_keys(r->object, known, "") == ND_OK
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "%s: its record of autotune was made by an earlier program; choose again "
                         "with kernels.autotune, without kernels.autotune_from",
                         r->name);
}

/* The settings come first: a record for another run may be whole, but does not fit. */
static nd_status read_record(record *r, const nd_config *config, const nd_shape *shape,
                             nd_tuning *t)
{
    json_t *settings = NULL;
    ND_TRY(check_members(r));
    ND_TRY(make_settings(config, shape, &settings));
    const nd_status status = compare_settings(r, settings);
    json_decref(settings);
    ND_TRY(status);
    ND_TRY(ND_ALLOC(ND_LT_PLANS, &t->choices));
    memset(t->linear_choice.fp8, -1, sizeof t->linear_choice.fp8);
    for (int g = 0; g < ND_INPUT_COUNT; g++) {
        t->linear_choice.fp8[g][0] = 0;
    }
    ND_TRY(describe_machine(r, t));
    return describe_choices(r, t);
}

nd_status nd_record_read(const char *text, size_t bytes, const char *name, const nd_config *config,
                         const nd_shape *shape, nd_tuning **out)
{
    record r = {.reads = true, .name = name, .place = "autotune"};
    json_error_t error;
    nd_tuning *t = NULL;
    nd_status status = ND_OK;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    r.object = json_object_get(root, "autotune"); /* NULL when root is not an object */
    if (!root && nd_json_no_memory(&error)) {
        return nd_fail_memory("reading %s", name);
    }
    if (!root) {
        return nd_fail(ND_ERR_DATA, "%s: line %d: %s; kernels.autotune_from takes a run.json", name,
                       error.line, error.text);
    }
    if (!json_is_object(r.object)) {
        status = nd_fail(ND_ERR_DATA,
                         "%s has no record of autotune; kernels.autotune_from takes the run.json "
                         "of a run with kernels.autotune true",
                         name);
        goto out;
    }
    ND_TRY_OUT(ND_ALLOC(1, &t));
    ND_TRY_OUT(read_record(&r, config, shape, t));
    *out = t;
out:
    if (status != ND_OK) {
        nd_tuning_destroy(t);
    }
    json_decref(root);
    return status;
}
