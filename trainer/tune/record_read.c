// SPDX-License-Identifier: Apache-2.0
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"
#include "runtime/tensor/dtype.h"
#include "trainer/tune/measure.h"

/* The text that is read and the place in it, for messages. */
typedef struct reader {
    const char *name;
    char place[64]; /* "autotune", "autotune.products[3]" */
} reader;

static nd_status damaged(const reader *r, const char *key, const char *what)
{
    return nd_fail(ND_ERR_DATA,
                   "%s: %s.%s %s; the record is damaged; choose again with kernels.autotune, "
                   "without kernels.autotune_from",
                   r->name, r->place, key, what);
}

static nd_status read_int(const reader *r, const json_t *object, const char *key, int64_t low,
                          int64_t high, int64_t *out)
{
    const json_t *value = json_object_get(object, key);
    int64_t number = json_integer_value(value);
    if (!json_is_integer(value) || number < low || number > high) {
        char what[96];
        snprintf(what, sizeof what, "is no whole number of %lld to %lld", (long long)low,
                 (long long)high);
        return damaged(r, key, what);
    }
    *out = number;
    return ND_OK;
}

static nd_status read_bool(const reader *r, const json_t *object, const char *key, int32_t *out)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_boolean(value)) {
        return damaged(r, key, "is not true or false");
    }
    *out = json_is_true(value);
    return ND_OK;
}

static nd_status read_text(const reader *r, const json_t *object, const char *key, const char **out)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_string(value)) {
        return damaged(r, key, "is no text");
    }
    *out = json_string_value(value);
    return ND_OK;
}

static nd_status read_seconds(const reader *r, const json_t *object, const char *key, double *out)
{
    const json_t *value = json_object_get(object, key);
    double seconds = json_is_null(value) ? -1.0 : json_number_value(value);
    if (!json_is_null(value) && (!json_is_number(value) || !isfinite(seconds) || seconds < 0.0)) {
        return damaged(r, key, "is no number of seconds, and not null");
    }
    *out = seconds;
    return ND_OK;
}

static nd_status read_list(const reader *r, const json_t *object, const char *key, size_t most,
                           const json_t **out)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_array(value) || json_array_size(value) > most) {
        char what[64];
        snprintf(what, sizeof what, "is no list of at most %zu", most);
        return damaged(r, key, what);
    }
    *out = value;
    return ND_OK;
}

static nd_status read_object(const reader *r, const json_t *object, const char *key,
                             const json_t **out)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_object(value)) {
        return damaged(r, key, "is no object");
    }
    *out = value;
    return ND_OK;
}

static nd_status read_dtype(const reader *r, const json_t *product, const char *key, int32_t *out)
{
    static const nd_dtype known[] = {ND_DTYPE_F32, ND_DTYPE_BF16, ND_DTYPE_F8_E4M3,
                                     ND_DTYPE_F8_E5M2};
    const char *text = NULL;
    ND_TRY(read_text(r, product, key, &text));
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(nd_dtype_name(known[i]), text) == 0) {
            *out = (int32_t)known[i];
            return ND_OK;
        }
    }
    return damaged(r, key, "is no type of a product");
}

static nd_status read_scaling(const reader *r, const json_t *product, int32_t *out)
{
    const char *text = NULL;
    ND_TRY(read_text(r, product, "scales", &text));
    for (int32_t i = 0; i < 3; i++) {
        if (strcmp(nd_record_scaling[i], text) == 0) {
            *out = i;
            return ND_OK;
        }
    }
    return damaged(r, "scales", "is not none, tensor or vector");
}

static nd_status read_align(const reader *r, const json_t *product, nd_lt_key *key)
{
    const json_t *list = NULL;
    int32_t *const to[] = {&key->align_a, &key->align_b, &key->align_d};
    ND_TRY(read_list(r, product, "align", 3, &list));
    for (size_t i = 0; i < 3; i++) {
        int64_t bytes = json_integer_value(json_array_get(list, i));
        if (bytes < 1 || bytes > 256 || (bytes & (bytes - 1))) {
            return damaged(r, "align", "is not three powers of two up to 256");
        }
        *to[i] = (int32_t)bytes;
    }
    return ND_OK;
}

static nd_status read_processors(const reader *r, const json_t *product, int32_t *out)
{
    int64_t value = 0;
    if (json_object_get(product, "processors")) { /* records of before have none: all of them */
        ND_TRY(read_int(r, product, "processors", 0, 1024, &value));
    }
    *out = (int32_t)value;
    return ND_OK;
}

static nd_status read_algorithm(const reader *r, const json_t *product, uint64_t words[8])
{
    const char *text = NULL;
    ND_TRY(read_text(r, product, "algorithm", &text));
    if (strlen(text) != 128 || strspn(text, "0123456789abcdef") != 128) {
        return damaged(r, "algorithm", "is not of 128 hexadecimal digits");
    }
    for (int i = 0; i < 8; i++) {
        char word[17] = "";
        memcpy(word, text + (size_t)i * 16, 16);
        words[i] = strtoull(word, NULL, 16);
    }
    return ND_OK;
}

static nd_status read_key(const reader *r, const json_t *product, nd_lt_key *key)
{
    const int64_t most = (int64_t)1 << 40;
#define ND_TAKE(field) ND_TRY(read_int(r, product, #field, 1, most, &key->field));
    ND_RECORD_EXTENTS(ND_TAKE)
#undef ND_TAKE
    ND_TRY(read_dtype(r, product, "a", &key->a));
    ND_TRY(read_dtype(r, product, "b", &key->b));
    ND_TRY(read_dtype(r, product, "d", &key->d));
    ND_TRY(read_bool(r, product, "a_transposed", &key->a_transposed));
    ND_TRY(read_bool(r, product, "b_transposed", &key->b_transposed));
    ND_TRY(read_bool(r, product, "adds", &key->beta));
    ND_TRY(read_bool(r, product, "fast_accumulation", &key->fast));
    ND_TRY(read_scaling(r, product, &key->scaling));
    ND_TRY(read_align(r, product, key));
    ND_TRY(read_processors(r, product, &key->processors));
    if (key->lda < (key->a_transposed ? key->k : key->m) ||
        key->ldb < (key->b_transposed ? key->n : key->k) || key->ldd < key->m) {
        return damaged(r, "lda", "or ldb or ldd is less than the rows of its matrix");
    }
    return ND_OK;
}

static nd_status read_product(const reader *r, const json_t *product, nd_lt_choice *out)
{
    const json_t *traits = NULL;
    ND_TRY(read_key(r, product, &out->key));
    ND_TRY(read_algorithm(r, product, out->algorithm));
    ND_TRY(read_int(r, product, "workspace", 0, (int64_t)1 << 40, &out->workspace));
    ND_TRY(read_int(r, product, "candidates", 0, ND_LT_CANDIDATES, &out->candidates));
    ND_TRY(read_int(r, product, "picked", 0, ND_LT_CANDIDATES - 1, &out->picked));
    ND_TRY(read_seconds(r, product, "seconds", &out->seconds));
    ND_TRY(read_seconds(r, product, "first_seconds", &out->first_seconds));
    ND_TRY(read_object(r, product, "traits", &traits));
#define ND_TAKE(field, attribute, bytes)                                                           \
    ND_TRY(read_int(r, traits, #field, -1, UINT32_MAX, &out->traits.field));
    ND_LT_TRAITS(ND_TAKE)
#undef ND_TAKE
    return ND_OK;
}

static nd_status read_products(reader *r, const json_t *record, nd_tuning *t)
{
    const json_t *list = NULL;
    ND_TRY(read_list(r, record, "products", ND_LT_PLANS - 1, &list));
    t->choice_count = (int)json_array_size(list);
    ND_TRY(ND_ALLOC(t->choice_count + 1, &t->choices));
    for (int i = 0; i < t->choice_count; i++) {
        snprintf(r->place, sizeof r->place, "autotune.products[%d]", i);
        ND_TRY(read_product(r, json_array_get(list, (size_t)i), &t->choices[i]));
    }
    snprintf(r->place, sizeof r->place, "autotune");
    return ND_OK;
}

/* Reads a list of module names of one input; *input is -1 until the first name shows which. */
static nd_status read_names(const reader *r, const json_t *entry, const char *key, int *input,
                            int *mask)
{
    const json_t *list = NULL;
    ND_TRY(read_list(r, entry, key, 3, &list));
    *mask = 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *name = json_string_value(json_array_get(list, i));
        int bit = -1;
        for (int g = 0; name && g < ND_INPUT_COUNT; g++) {
            int first, count = nd_input_linears(g, &first);
            for (int l = 0; l < count && (*input < 0 || *input == g); l++) {
                bit = strcmp(nd_linear_name(first + l), name) == 0 ? l : bit;
                *input = bit == l && *input < 0 ? g : *input;
            }
        }
        if (bit < 0) {
            return damaged(r, key, "does not name linears of one input");
        }
        *mask |= 1 << bit;
    }
    return ND_OK;
}

static nd_status read_linears_entry(const reader *r, const json_t *entry, nd_tuning *t)
{
    nd_tuned_linears l = {0};
    int input = -1;
    ND_TRY(read_names(r, entry, "asked", &input, &l.asked));
    if (l.asked == 0) {
        return damaged(r, "asked", "is empty");
    }
    ND_TRY(read_names(r, entry, "fp8", &input, &l.fp8));
    if (l.fp8 & ~l.asked) {
        return damaged(r, "fp8", "names a linear that was not asked for");
    }
    l.input = (nd_input)input;
    if (t->linear_choice.fp8[l.input][l.asked] >= 0) {
        return damaged(r, "asked", "is that of an earlier entry");
    }
    ND_TRY(read_seconds(r, entry, "asked_seconds", &l.asked_seconds));
    ND_TRY(read_seconds(r, entry, "bf16_seconds", &l.bf16_seconds));
    ND_TRY(read_seconds(r, entry, "chosen_seconds", &l.chosen_seconds));
    t->linear_choice.fp8[l.input][l.asked] = (int8_t)l.fp8;
    t->linears[t->linear_count++] = l;
    return ND_OK;
}

static nd_status read_linears(reader *r, const json_t *record, nd_tuning *t)
{
    const json_t *list = NULL;
    memset(t->linear_choice.fp8, -1, sizeof t->linear_choice.fp8);
    for (int g = 0; g < ND_INPUT_COUNT; g++) {
        t->linear_choice.fp8[g][0] = 0;
    }
    ND_TRY(read_list(r, record, "linears", ND_TUNED_LINEARS_MAX, &list));
    for (size_t i = 0; i < json_array_size(list); i++) {
        snprintf(r->place, sizeof r->place, "autotune.linears[%zu]", i);
        ND_TRY(read_linears_entry(r, json_array_get(list, i), t));
    }
    snprintf(r->place, sizeof r->place, "autotune");
    return ND_OK;
}

static nd_status read_why(const reader *r, const json_t *division, nd_division_reason *out)
{
    const char *text = NULL;
    ND_TRY(read_text(r, division, "why", &text));
    for (int i = 0; i < ND_DIVISION_COUNT; i++) {
        if (strcmp(nd_record_division[i], text) == 0) {
            *out = (nd_division_reason)i;
            return ND_OK;
        }
    }
    return damaged(r, "why", "is not set, timed, alone or memory");
}

/* The ranges are those of the keys of the configuration in fields.def. */
static nd_status read_pair(const reader *r, const json_t *object, nd_tuned_pair *out)
{
    ND_TRY(read_int(r, object, "comm_blocks", 0, 64, &out->comm_blocks));
    return read_int(r, object, "product_processors", 0, 1024, &out->product_processors);
}

static nd_status read_pairs(reader *r, const json_t *division, nd_tuned_division *d)
{
    const json_t *list = NULL;
    ND_TRY(read_list(r, division, "pairs", ND_TUNED_PAIRS_MAX, &list));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *pair = json_array_get(list, i);
        snprintf(r->place, sizeof r->place, "autotune.division.pairs[%zu]", i);
        ND_TRY(read_pair(r, pair, &d->pairs[i]));
        ND_TRY(read_seconds(r, pair, "seconds", &d->pairs[i].seconds));
        d->pair_count++;
    }
    snprintf(r->place, sizeof r->place, "autotune.division");
    return ND_OK;
}

/* Records of before have none: nothing was timed, and the keys are those of the settings. */
static nd_status read_division(reader *r, const json_t *record, const nd_config *config,
                               nd_tuning *t)
{
    nd_tuned_division *d = &t->division;
    const json_t *division = NULL;
    nd_tuned_pair own = {0};
    bool among = false;
    d->comm_blocks = config->kernels.comm_blocks;
    d->product_processors = config->kernels.product_processors;
    if (!json_object_get(record, "division")) {
        return ND_OK;
    }
    ND_TRY(read_object(r, record, "division", &division));
    snprintf(r->place, sizeof r->place, "autotune.division");
    ND_TRY(read_why(r, division, &d->reason));
    ND_TRY(read_pair(r, division, &own));
    ND_TRY(read_pairs(r, division, d));
    for (int i = 0; i < d->pair_count; i++) {
        among |= d->pairs[i].comm_blocks == own.comm_blocks &&
                 d->pairs[i].product_processors == own.product_processors;
    }
    if (among != (d->reason == ND_DIVISION_TIMED) ||
        (!among && (d->pair_count > 0 || own.comm_blocks != d->comm_blocks ||
                    own.product_processors != d->product_processors))) {
        return damaged(r, "pairs", "do not match why, comm_blocks and product_processors");
    }
    d->comm_blocks = own.comm_blocks;
    d->product_processors = own.product_processors;
    snprintf(r->place, sizeof r->place, "autotune");
    return ND_OK;
}

/* The value of a key in records of programs that did not have it yet; NULL: all had it. */
static const char *value_before(const char *key)
{
    static const char *const keys[] = {"kernels.comm_blocks", "kernels.product_processors"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        if (strcmp(keys[i], key) == 0) {
            return "0";
        }
    }
    return NULL;
}

/* Comes before the rest is read: a record for another run may be whole, but does not fit. */
static nd_status compare_settings(const reader *r, const json_t *record, const nd_config *config,
                                  const nd_shape *shape)
{
    const json_t *recorded = NULL;
    json_t *here = NULL, *value;
    const char *key, *text = NULL;
    nd_status status = ND_OK;
    ND_TRY(read_object(r, record, "settings", &recorded));
    ND_TRY(nd_record_settings(config, shape, &here));
    json_object_foreach(here, key, value)
    {
        reader at = *r;
        snprintf(at.place, sizeof at.place, "autotune.settings");
        text = json_object_get(recorded, key) ? NULL : value_before(key);
        ND_TRY_OUT(text ? ND_OK : read_text(&at, recorded, key, &text));
        if (strcmp(text, json_string_value(value)) != 0) {
            status = nd_fail(ND_ERR_CONFIG,
                             "%s: its choices were made for %s %.200s, and this run has %.200s; "
                             "choose again with kernels.autotune, without kernels.autotune_from",
                             r->name, key, text, json_string_value(value));
            goto out;
        }
    }
out:
    json_decref(here);
    return status;
}

static nd_status read_record(reader *r, const json_t *record, const nd_config *config,
                             const nd_shape *shape, nd_tuning *t)
{
    const char *gpu = NULL;
    int32_t cut_short = 0;
    ND_TRY(compare_settings(r, record, config, shape));
    ND_TRY(read_text(r, record, "gpu", &gpu));
    snprintf(t->gpu, sizeof t->gpu, "%s", gpu);
    ND_TRY(read_int(r, record, "compute_capability", 0, 10000, &t->capability));
    ND_TRY(read_int(r, record, "cublaslt", 0, 100000000, &t->cublaslt));
    ND_TRY(read_seconds(r, record, "timing_seconds", &t->seconds));
    ND_TRY(read_bool(r, record, "cut_short", &cut_short));
    t->cut_short = cut_short;
    ND_TRY(read_division(r, record, config, t));
    ND_TRY(read_linears(r, record, t));
    return read_products(r, record, t);
}

nd_status nd_record_read(const char *text, size_t bytes, const char *name, const nd_config *config,
                         const nd_shape *shape, nd_tuning **out)
{
    reader r = {name, "autotune"};
    json_error_t error;
    nd_tuning *t = NULL;
    nd_status status = ND_OK;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    const json_t *record = json_object_get(root, "autotune"); /* NULL when root is not an object */
    if (!root && nd_json_no_memory(&error)) {
        return nd_fail_memory("reading %s", name);
    }
    if (!root) {
        return nd_fail(ND_ERR_DATA, "%s: line %d: %s; kernels.autotune_from takes a run.json", name,
                       error.line, error.text);
    }
    if (!json_is_object(record)) {
        status = nd_fail(ND_ERR_DATA,
                         "%s has no record of autotune; kernels.autotune_from takes the run.json "
                         "of a run with kernels.autotune true",
                         name);
        goto out;
    }
    ND_TRY_OUT(ND_ALLOC(1, &t));
    ND_TRY_OUT(read_record(&r, record, config, shape, t));
    *out = t;
out:
    if (status != ND_OK) {
        nd_tuning_destroy(t);
    }
    json_decref(root);
    return status;
}
