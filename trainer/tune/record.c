// SPDX-License-Identifier: Apache-2.0
#include <jansson.h>
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
                                       "kernels.comm_blocks",
                                       "kernels.product_processors"};
    static const char *const fp8_keys[] = {"fp8.recipe", "fp8.all_gather", "fp8.filter",
                                           "fp8.format"};
    enum { KEYS = sizeof keys / sizeof *keys, FP8_KEYS = sizeof fp8_keys / sizeof *fp8_keys };
    bool fp8 = config->train.precision == ND_PRECISION_FP8;
    for (int i = 0; i < KEYS + (fp8 ? FP8_KEYS : 0); i++) {
        const char *key = i < KEYS ? keys[i] : fp8_keys[i - KEYS];
        char *value = NULL;
        ND_TRY(nd_config_get(config, key, &value));
        nd_json_set(settings, key, nd_json_string(value));
        free(value);
    }
    return ND_OK;
}

nd_status nd_record_settings(const nd_config *config, const nd_shape *shape, json_t **out)
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

static json_t *seconds_or_null(double seconds)
{
    return seconds >= 0.0 ? json_real(seconds) : json_null();
}

static json_t *names_of(nd_input input, int mask)
{
    int first, count = nd_input_linears(input, &first);
    json_t *names = json_array();
    for (int i = 0; i < count; i++) {
        if (mask >> i & 1) {
            nd_json_append(&names, json_string(nd_linear_name(first + i)));
        }
    }
    return names;
}

static json_t *linears_of(const nd_tuning *t)
{
    json_t *list = json_array();
    for (int i = 0; i < t->linear_count; i++) {
        const nd_tuned_linears *l = &t->linears[i];
        json_t *entry = json_object();
        nd_json_set(&entry, "asked", names_of(l->input, l->asked));
        nd_json_set(&entry, "fp8", names_of(l->input, l->fp8));
        nd_json_set(&entry, "asked_seconds", seconds_or_null(l->asked_seconds));
        nd_json_set(&entry, "bf16_seconds", seconds_or_null(l->bf16_seconds));
        nd_json_set(&entry, "chosen_seconds", seconds_or_null(l->chosen_seconds));
        nd_json_append(&list, entry);
    }
    return list;
}

static json_t *hex(const uint64_t words[8])
{
    char text[8 * 16 + 1];
    for (int i = 0; i < 8; i++) {
        snprintf(text + (size_t)i * 16, 17, "%016llx", (unsigned long long)words[i]);
    }
    return json_string(text);
}

const char *const nd_record_scaling[3] = {"none", "tensor", "vector"};

static json_t *product_of(const nd_lt_choice *c)
{
    const nd_lt_key *k = &c->key;
    json_t *p = json_object(), *align = json_array(), *traits = json_object();
    const int32_t aligned[] = {k->align_a, k->align_b, k->align_d};
#define ND_SET(key) nd_json_set(&p, #key, json_integer(k->key));
    ND_RECORD_EXTENTS(ND_SET)
#undef ND_SET
    nd_json_set(&p, "a", json_string(nd_dtype_name((nd_dtype)k->a)));
    nd_json_set(&p, "b", json_string(nd_dtype_name((nd_dtype)k->b)));
    nd_json_set(&p, "d", json_string(nd_dtype_name((nd_dtype)k->d)));
    nd_json_set(&p, "a_transposed", json_boolean(k->a_transposed));
    nd_json_set(&p, "b_transposed", json_boolean(k->b_transposed));
    nd_json_set(&p, "adds", json_boolean(k->beta));
    nd_json_set(&p, "fast_accumulation", json_boolean(k->fast));
    nd_json_set(&p, "scales", json_string(nd_record_scaling[k->scaling]));
    for (int i = 0; i < 3; i++) {
        nd_json_append(&align, json_integer(aligned[i]));
    }
    nd_json_set(&p, "align", align);
    nd_json_set(&p, "processors", json_integer(k->processors));
    nd_json_set(&p, "algorithm", hex(c->algorithm));
#define ND_SET(key, attribute, bytes) nd_json_set(&traits, #key, json_integer(c->traits.key));
    ND_LT_TRAITS(ND_SET)
#undef ND_SET
    nd_json_set(&p, "traits", traits);
    nd_json_set(&p, "workspace", json_integer(c->workspace));
    nd_json_set(&p, "candidates", json_integer(c->candidates));
    nd_json_set(&p, "picked", json_integer(c->picked));
    nd_json_set(&p, "seconds", json_real(c->seconds));
    nd_json_set(&p, "first_seconds", json_real(c->first_seconds));
    return p;
}

#define ND_DIVISION_NAME(id, name) name,
const char *const nd_record_division[ND_DIVISION_COUNT] = {ND_DIVISIONS(ND_DIVISION_NAME)};
#undef ND_DIVISION_NAME

static json_t *division_of(const nd_tuned_division *d)
{
    json_t *division = json_object(), *pairs = json_array();
    for (int i = 0; i < d->pair_count; i++) {
        json_t *pair = json_object();
        nd_json_set(&pair, "comm_blocks", json_integer(d->pairs[i].comm_blocks));
        nd_json_set(&pair, "product_processors", json_integer(d->pairs[i].product_processors));
        nd_json_set(&pair, "seconds", seconds_or_null(d->pairs[i].seconds));
        nd_json_append(&pairs, pair);
    }
    nd_json_set(&division, "why", json_string(nd_record_division[d->reason]));
    nd_json_set(&division, "comm_blocks", json_integer(d->comm_blocks));
    nd_json_set(&division, "product_processors", json_integer(d->product_processors));
    nd_json_set(&division, "pairs", pairs);
    return division;
}

nd_status nd_record_write(nd_tuning *t, const nd_config *config, const nd_shape *shape)
{
    json_t *root = json_object(), *products = json_array(), *settings = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_record_settings(config, shape, &settings));
    for (int i = 0; i < t->choice_count; i++) {
        nd_json_append(&products, product_of(&t->choices[i]));
    }
    nd_json_set(&root, "gpu", nd_json_string(t->gpu));
    nd_json_set(&root, "compute_capability", json_integer(t->capability));
    nd_json_set(&root, "cublaslt", json_integer(t->cublaslt));
    nd_json_set(&root, "replayed_from", t->from ? nd_json_string(t->from) : json_null());
    nd_json_set(&root, "timing_seconds", json_real(t->seconds));
    nd_json_set(&root, "cut_short", json_boolean(t->cut_short));
    nd_json_set(&root, "settings", json_incref(settings));
    nd_json_set(&root, "division", division_of(&t->division));
    nd_json_set(&root, "linears", linears_of(t));
    nd_json_set(&root, "products", json_incref(products));
    free(t->json);
    t->json = nd_json_text(root, JSON_REAL_PRECISION(17));
    status = t->json ? ND_OK : nd_fail_memory("autotune's record");
out:
    json_decref(settings);
    json_decref(products);
    json_decref(root);
    return status;
}

typedef struct printer {
    void (*line)(void *context, const char *text);
    void *context;
} printer;

/* "q_proj k_proj", or "none" */
static const char *names(nd_input input, int mask, char *buffer, size_t size)
{
    int first, count = nd_input_linears(input, &first);
    size_t used = 0;
    snprintf(buffer, size, "none");
    for (int i = 0; i < count; i++) {
        const char *name = strrchr(nd_linear_name(first + i), '.') + 1;
        if (mask >> i & 1) {
            used += (size_t)snprintf(buffer + used, size - used, "%s%.20s", used ? " " : "", name);
        }
    }
    return buffer;
}

static void print_linears(const printer *p, const nd_tuned_linears *l)
{
    char text[300], asked[96], fp8[96];
    names(l->input, l->asked, asked, sizeof asked);
    names(l->input, l->fp8, fp8, sizeof fp8);
    if (l->asked_seconds < 0.0) {
        snprintf(text, sizeof text, "  %s: fp8 as asked, there was no time to time it", asked);
    } else if (l->fp8 == l->asked) {
        snprintf(text, sizeof text, "  %s: fp8; a step takes %.3f ms of them, in bf16 %.3f ms",
                 asked, l->asked_seconds * 1e3, l->bf16_seconds * 1e3);
    } else {
        snprintf(text, sizeof text,
                 "  %s: in fp8 %s; a step takes %.3f ms of them, all in fp8 %.3f ms, in bf16 %.3f "
                 "ms",
                 asked, fp8, l->chosen_seconds * 1e3, l->asked_seconds * 1e3,
                 l->bf16_seconds * 1e3);
    }
    p->line(p->context, text);
}

static const nd_tuned_pair *chosen_pair(const nd_tuned_division *d)
{
    for (int i = 0; i < d->pair_count; i++) {
        if (d->pairs[i].comm_blocks == d->comm_blocks &&
            d->pairs[i].product_processors == d->product_processors) {
            return &d->pairs[i];
        }
    }
    return NULL; /* none was timed */
}

static void print_division(const printer *p, const nd_tuned_division *d)
{
    static const char *const kept[ND_DIVISION_COUNT] = {
        [ND_DIVISION_SET] = "nothing was timed for them",
        [ND_DIVISION_ALONE] = "this mesh gathers no weights from other ranks",
        [ND_DIVISION_MEMORY] = "a rank has too little free memory to time them",
    };
    const nd_tuned_pair *chosen = chosen_pair(d);
    char text[300], other[80] = "";
    int timed = 0;
    for (int i = 0; i < d->pair_count; i++) {
        timed += d->pairs[i].seconds >= 0.0;
    }
    if (!chosen) {
        snprintf(text, sizeof text,
                 "  kernels.comm_blocks %lld, kernels.product_processors %lld: as they are set; %s",
                 (long long)d->comm_blocks, (long long)d->product_processors, kept[d->reason]);
    } else {
        if (chosen != d->pairs) {
            snprintf(other, sizeof other, ", with 0 and 0 %.3f ms", d->pairs[0].seconds * 1e3);
        }
        snprintf(
            text, sizeof text,
            "  kernels.comm_blocks %lld, kernels.product_processors %lld: chosen from %d pairs; "
            "a layer's products beside its collectives take %.3f ms%s",
            (long long)d->comm_blocks, (long long)d->product_processors, timed,
            chosen->seconds * 1e3, other);
    }
    p->line(p->context, text);
}

/* Matrices are row-major here and column-major in the library, so its B is our a. */
static void print_choice(const printer *p, const nd_lt_choice *c)
{
    char text[340], why[160], limit[40] = "";
    const nd_lt_key *k = &c->key;
    if (c->candidates == 0) {
        snprintf(why, sizeof why, "the library's first algorithm, there was no time to time it");
    } else if (c->picked == 0) {
        snprintf(why, sizeof why, "the library's first algorithm is the fastest of %lld, %.4f ms",
                 (long long)c->candidates, c->seconds * 1e3);
    } else if (c->first_seconds == 0.0) {
        snprintf(why, sizeof why, "algorithm %lld of %lld, %.4f ms", (long long)c->picked + 1,
                 (long long)c->candidates, c->seconds * 1e3);
    } else {
        snprintf(why, sizeof why, "algorithm %lld of %lld, %.4f ms; the library's first %.4f ms",
                 (long long)c->picked + 1, (long long)c->candidates, c->seconds * 1e3,
                 c->first_seconds * 1e3);
    }
    if (k->processors > 0) {
        snprintf(limit, sizeof limit, ", for %d multiprocessors", (int)k->processors);
    }
    snprintf(text, sizeof text, "  %s (%lld, %lld) %s %s%s x %s%s, k %lld%s: %s",
             nd_dtype_name((nd_dtype)k->d), (long long)k->n, (long long)k->m, k->beta ? "+=" : "=",
             nd_dtype_name((nd_dtype)k->b), k->b_transposed ? "^T" : "",
             nd_dtype_name((nd_dtype)k->a), k->a_transposed ? "^T" : "", (long long)k->k, limit,
             why);
    p->line(p->context, text);
}

void nd_tuning_each_line(const nd_tuning *t, void (*line)(void *context, const char *text),
                         void *context)
{
    printer p = {line, context};
    char text[400];
    int other = 0;
    for (int i = 0; i < t->choice_count; i++) {
        other += t->choices[i].picked > 0;
    }
    int used =
        t->from
            ? snprintf(text, sizeof text,
                       "autotune: %d forms of products as %.200s has them, nothing timed",
                       t->choice_count, t->from)
            : snprintf(text, sizeof text, "autotune: %d forms of products, timed in %.1f s on %s",
                       t->choice_count, t->seconds, t->gpu);
    snprintf(text + used, sizeof text - (size_t)used,
             "; %d of them not by the first algorithm of cuBLASLt %lld%s", other,
             (long long)t->cublaslt, t->cut_short ? "; cut short" : "");
    line(context, text);
    print_division(&p, &t->division);
    for (int i = 0; i < t->linear_count; i++) {
        print_linears(&p, &t->linears[i]);
    }
    for (int i = 0; i < t->choice_count; i++) {
        print_choice(&p, &t->choices[i]);
    }
}
