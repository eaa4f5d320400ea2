// SPDX-License-Identifier: Apache-2.0
#include "trainer/checkpoint/manifest.h"

#include <float.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"

void nd_manifest_fini(nd_manifest *manifest)
{
    json_decref(manifest->identity);
    json_decref(manifest->config);
    nd_layout_destroy(manifest->layout);
    free(manifest->writers);
    *manifest = (nd_manifest){0};
}

/* Layouts. */

static bool is_in_fp8_segment(void *layout, const nd_param *param)
{
    const nd_param *own = nd_layout_param(layout, param->id, param->layer);
    return own && own->segment == ND_SEGMENT_FP8;
}

nd_status nd_manifest_layout(const nd_shape *shape, const nd_layout *segments, const nd_mesh *mesh,
                             nd_coord coord, nd_layout **out)
{
    const nd_layout_options options = {.shape = shape,
                                       .mesh = mesh,
                                       .coord = coord,
                                       .converts = is_in_fp8_segment,
                                       .context = (void *)segments};
    return nd_layout_create(&options, out);
}

/* The model. */

/* A number of the model's shape; the names are those of config.json. */
typedef struct shape_number {
    const char *name;
    size_t offset; /* in nd_shape */
    bool is_real;  /* double, else int64_t */
    bool may_lack; /* absent where it is 0 */
    bool is_idle;  /* changes no result: not compared */
    int64_t least, most;
} shape_number;

#define FORMAT     "ndtrain checkpoint"
#define NUMBER_MAX ((int64_t)1 << 40)

#define NUMBER(name, member, ...)                                                                  \
    {                                                                                              \
        name, offsetof(nd_shape, member), __VA_ARGS__                                              \
    }
#define IDLE                  .is_idle = true
#define EXTENT(name, member)  NUMBER(name, member, .least = 1, .most = NUMBER_MAX)
#define INTEGER(name, member) NUMBER(name, member, .least = -1, .most = NUMBER_MAX)
#define REAL(name, member)    NUMBER(name, member, .is_real = true)
/* These came later: older manifests lack them. */
#define SWITCH(name, member)     NUMBER(name, member, .may_lack = true, .most = 1)
#define COUNT(name, member)      NUMBER(name, member, .may_lack = true, .most = NUMBER_MAX)
#define LATER_REAL(name, member) NUMBER(name, member, .may_lack = true, .is_real = true)

static const shape_number shape_numbers[] = {
    EXTENT("vocab_size", vocab),
    EXTENT("hidden_size", hidden),
    EXTENT("intermediate_size", ffn),
    EXTENT("num_hidden_layers", layers),
    EXTENT("num_attention_heads", heads),
    EXTENT("num_key_value_heads", kv_heads),
    EXTENT("head_dim", head_dim),
    NUMBER("max_position_embeddings", max_positions, .least = 1, .most = NUMBER_MAX, IDLE),
    REAL("rms_norm_eps", rms_eps),
    NUMBER("initializer_range", init_std, .is_real = true, IDLE),
    REAL("rope_theta", rope.theta),
    REAL("rope_factor", rope.factor),
    REAL("rope_low_freq_factor", rope.low_freq_factor),
    REAL("rope_high_freq_factor", rope.high_freq_factor),
    INTEGER("rope_original_max_position_embeddings", rope.original_max_positions),
    NUMBER("bos_token_id", bos_id, .least = -1, .most = NUMBER_MAX, IDLE),
    NUMBER("eos_token_id", eos_id, .least = -1, .most = NUMBER_MAX, IDLE),
    SWITCH("qkv_bias", qkv_bias),
    SWITCH("o_bias", o_bias),
    SWITCH("mlp_bias", mlp_bias),
    NUMBER("qk_norm", qk_norm, .may_lack = true, .most = 2),
    NUMBER("post_norm", post_norm, .may_lack = true, .most = 2),
    COUNT("sliding_window", window),
    COUNT("rotated", rotated),
    LATER_REAL("rope_beta_fast", rope.beta_fast),
    LATER_REAL("rope_beta_slow", rope.beta_slow),
    LATER_REAL("rope_attention_factor", rope.attention_factor),
    SWITCH("rope_exact_range", rope.exact_range),
    LATER_REAL("llama_4_scaling_beta", rope.query_beta),
    LATER_REAL("embedding_multiplier", embedding_scale),
    LATER_REAL("residual_multiplier", residual_scale),
    LATER_REAL("attention_multiplier", attention_scale),
    LATER_REAL("logits_scaling", logits_divisor),
    LATER_REAL("sliding_rope_theta", window_theta),
};
enum { SHAPE_NUMBERS = sizeof shape_numbers / sizeof *shape_numbers };

/* The kinds of members. */

/*
 * The manifest that is made or read, and the object in it whose members come. Each function below
 * makes the member of a value, or sets the value to the member, so that one description of the
 * members does for both. After a fault the rest means nothing.
 */
typedef struct members {
    json_t *root, *object;
    const char *path; /* of the file that is read, for messages; NULL: it is made */
    nd_status status;
} members;

static void fault(members *m, const char *key, const char *what)
{
    if (m->status == ND_OK) {
        m->status = nd_fail(ND_ERR_DATA, "\"%s\": %.100s %s", m->path, key, what);
    }
}

/* The member that is read; NULL after a fault. Making: NULL, and the member is this value, which
 * is stolen. */
static json_t *exchange(members *m, const char *key, json_t *value)
{
    json_t *found = m->path ? json_object_get(m->object, key) : NULL;
    if (m->path && !found) {
        fault(m, key, "is missing");
    } else if (!m->path && json_object_set_new(m->object, key, value) != 0) {
        m->status = nd_fail_memory("a manifest");
    }
    return found;
}

/* The members that follow are those of this object. */
static void enter(members *m, const char *key)
{
    m->object = m->root;
    m->object = m->path ? exchange(m, key, NULL) : json_object();
    if (m->path && !json_is_object(m->object)) {
        fault(m, key, "is not an object");
    } else if (!m->path && json_object_set_new(m->root, key, m->object) != 0) {
        m->status = nd_fail_memory("a manifest");
        m->object = NULL;
    }
}

static void whole(members *m, const char *key, int64_t least, int64_t most, int64_t *value)
{
    char what[128];
    const json_t *found = exchange(m, key, m->path ? NULL : json_integer(*value));
    const int64_t n = json_integer_value(found);
    snprintf(what, sizeof what, "is %lld; it must be %lld to %lld", (long long)n, (long long)least,
             (long long)most);
    if (found && !json_is_integer(found)) {
        fault(m, key, "is not a whole number");
    } else if (found && (n < least || n > most)) {
        fault(m, key, what);
    } else if (found) {
        *value = n;
    }
}

static void real(members *m, const char *key, double *value)
{
    const json_t *found = exchange(m, key, m->path ? NULL : json_real(*value));
    if (json_is_number(found)) {
        *value = json_number_value(found);
    } else if (found) {
        fault(m, key, "is no number");
    }
}

/* A text below `size` characters. */
static void text(members *m, const char *key, char *value, size_t size)
{
    const json_t *found = exchange(m, key, m->path ? NULL : nd_json_string(value));
    const char *string = json_string_value(found);
    if (found && (!string || strlen(string) >= size)) {
        fault(m, key, string ? "is too long" : "is not a string");
    } else if (found) {
        memcpy(value, string, strlen(string) + 1);
    }
}

/* One of `count` words, by its index. */
static int word(members *m, const char *key, const char *const *words, int count, int value)
{
    char what[80];
    const json_t *found = exchange(m, key, m->path ? NULL : json_string(words[value]));
    const char *string = json_string_value(found);
    for (int i = 0; string && i < count; i++) {
        if (strcmp(string, words[i]) == 0) {
            return i;
        }
    }
    snprintf(what, sizeof what, "is the unknown \"%.40s\"", string ? string : "");
    if (found) {
        fault(m, key, string ? what : "is not a string");
    }
    return value;
}

/* A list of numbers. */
typedef struct number_list {
    bool whole;
    double least, most; /* of each */
    int64_t capacity;
    const char *fault;
} number_list;

/* Absent where it is empty. */
static void numbers(members *m, const char *key, const number_list *kind, double *values,
                    int64_t *count)
{
    if (!m->path) {
        json_t *list = json_array();
        for (int64_t i = 0; i < *count; i++) {
            nd_json_append(&list, kind->whole ? json_integer((json_int_t)values[i])
                                              : json_real(values[i]));
        }
        *count > 0 ? (void)exchange(m, key, list) : json_decref(list);
        return;
    }
    const json_t *list = json_object_get(m->object, key);
    *count = (int64_t)json_array_size(list);
    bool good = (!list || json_is_array(list)) && *count <= kind->capacity;
    for (int64_t i = 0; good && i < *count; i++) {
        const json_t *number = json_array_get(list, (size_t)i);
        values[i] = json_number_value(number);
        good = (kind->whole ? json_is_integer(number) : json_is_number(number)) &&
               values[i] >= kind->least && values[i] <= kind->most;
    }
    if (!good) {
        fault(m, key, kind->fault);
        *count = 0;
    }
}

/* Members of the model. */

static void layer_set(members *m, const char *key, int64_t layers, nd_layer_set *set)
{
    const int64_t most = nd_min(layers, ND_LAYERS_MAX);
    const number_list kind = {true, 0, (double)most - 1, most,
                              "is not a list of the model's layers"};
    double list[ND_LAYERS_MAX];
    int64_t count = 0;
    for (int64_t l = 0; l < most && !m->path; l++) {
        list[count] = (double)l;
        count += nd_layer_set_has(set, l);
    }
    numbers(m, key, &kind, list, &count);
    for (int64_t i = 0; i < count; i++) {
        nd_layer_set_add(set, (int64_t)list[i]);
    }
}

static void more_ends(members *m, nd_shape *shape)
{
    static const number_list kind = {true, 0, INT32_MAX, ND_ENDS_MAX, "is not a list of token ids"};
    double list[ND_ENDS_MAX];
    for (int64_t i = 0; i < shape->more_end_count; i++) {
        list[i] = (double)shape->more_ends[i];
    }
    numbers(m, "more_eos_token_ids", &kind, list, &shape->more_end_count);
    for (int64_t i = 0; i < shape->more_end_count; i++) {
        shape->more_ends[i] = (int32_t)list[i];
    }
}

/* One for each pair that RoPE turns. */
static void rope_factors(members *m, const char *key, int64_t pairs,
                         float factors[ND_ROPE_LONG_PAIRS])
{
    static const number_list kind = {false, FLT_TRUE_MIN, FLT_MAX, ND_ROPE_LONG_PAIRS,
                                     "is not a number above 0 for each pair"};
    double list[ND_ROPE_LONG_PAIRS];
    int64_t count = pairs;
    for (int64_t i = 0; i < pairs && !m->path; i++) {
        list[i] = (double)factors[i];
    }
    numbers(m, key, &kind, list, &count);
    if (m->path && count != pairs) {
        fault(m, key, kind.fault);
    }
    for (int64_t i = 0; i < count; i++) {
        factors[i] = (float)list[i];
    }
}

static void model(members *m, nd_shape *shape)
{
    /* Keys that older programs wrote in place of lists of layers. They are refused. */
    static const char *const older[] = {"window_first_layer", "window_period",
                                        "no_rope_layer_interval"};
    const char *types[ND_FAMILY_COUNT], *ropes[ND_ROPE_TYPES];
    enter(m, "model");
    for (int i = 0; i < ND_FAMILY_COUNT; i++) {
        types[i] = nd_families[i].model_type;
    }
    for (int i = 0; i < ND_ROPE_TYPES; i++) {
        ropes[i] = nd_rope_type_name((nd_rope_type)i);
    }
    for (int i = 0; i < SHAPE_NUMBERS; i++) {
        const shape_number *n = &shape_numbers[i];
        void *at = (char *)shape + n->offset;
        const bool is_zero =
            m->path ? !json_object_get(m->object, n->name) : *(const int64_t *)at == 0;
        if (!n->may_lack || !is_zero) {
            n->is_real ? real(m, n->name, at) : whole(m, n->name, n->least, n->most, at);
        }
    }
    layer_set(m, "full_attention_layers", shape->layers, &shape->full);
    layer_set(m, "layers_without_rope", shape->layers, &shape->unturned);
    for (int i = 0; i < 3 && m->path; i++) {
        if (json_object_get(m->object, older[i])) {
            fault(m, older[i], "is there in place of a list of layers");
        }
    }
    more_ends(m, shape);
    if (m->path ? json_object_get(m->object, "model_type") != NULL
                : shape->family != ND_FAMILY_LLAMA) {
        shape->family =
            (nd_family)word(m, "model_type", types, ND_FAMILY_COUNT, (int)shape->family);
    }
    const json_t *tied =
        exchange(m, "tie_word_embeddings", m->path ? NULL : json_boolean(shape->tied));
    if (tied) {
        shape->tied = json_is_true(tied);
    }
    shape->rope.type =
        (nd_rope_type)word(m, "rope_type", ropes, ND_ROPE_TYPES, (int)shape->rope.type);
    if (shape->rope.type == ND_ROPE_LONGROPE) {
        const int64_t pairs = nd_shape_rotated(shape) / 2;
        rope_factors(m, "rope_short_factor", pairs, shape->rope.short_factor);
        rope_factors(m, "rope_long_factor", pairs, shape->rope.long_factor);
    }
}

/* An object with the member "model"; owned by the caller. */
static json_t *model_of(const nd_shape *shape)
{
    nd_shape copy = *shape;
    members m = {.root = json_object()};
    model(&m, &copy);
    return m.root;
}

void nd_shape_print(const nd_shape *shape, FILE *out)
{
    json_t *of = model_of(shape);
    char *json = nd_json_text(of, JSON_INDENT(1) | JSON_REAL_PRECISION(17));
    fprintf(out, "%s %s\n", nd_families[shape->family].model_type, json ? json : "");
    free(json);
    json_decref(of);
}

/* It changes no result: not compared. */
static bool is_idle(const char *key)
{
    bool idle = strcmp(key, "more_eos_token_ids") == 0;
    for (int i = 0; i < SHAPE_NUMBERS; i++) {
        idle = idle || (shape_numbers[i].is_idle && strcmp(key, shape_numbers[i].name) == 0);
    }
    return idle;
}

/* A number, word or switch of a model; absent is 0. */
static const char *value_text(const json_t *value, char out[40])
{
    snprintf(out, 40, "%.10g", json_number_value(value));
    return json_is_true(value)     ? "true"
           : json_is_false(value)  ? "false"
           : json_is_string(value) ? json_string_value(value)
                                   : out;
}

nd_status nd_shape_compare(const nd_shape *a, const char *name_a, const nd_shape *b,
                           const char *name_b)
{
    if (a->family != b->family) {
        return nd_fail(
            ND_ERR_CONFIG, "%s has model_type %s, and %s has %s; these are different models",
            name_a, nd_families[a->family].model_type, name_b, nd_families[b->family].model_type);
    }
    char text[2][40];
    json_t *of_a = model_of(a), *of_b = model_of(b), *value;
    json_t *x = json_object_get(of_a, "model"), *y = json_object_get(of_b, "model");
    json_t *all = json_copy(x);
    const char *key;
    nd_status status = json_object_update_missing(all, y) == 0
                           ? ND_OK
                           : nd_fail_memory("the shapes of two models");
    json_object_foreach(all, key, value)
    {
        const json_t *in_a = json_object_get(x, key), *in_b = json_object_get(y, key);
        if (status != ND_OK || json_equal(in_a, in_b) || is_idle(key)) {
            continue;
        }
        status = json_is_array(value)
                     ? nd_fail(ND_ERR_CONFIG, "%s has other %s than %s; these are different models",
                               name_a, key, name_b)
                     : nd_fail(ND_ERR_CONFIG,
                               "%s has %s %s, and %s has %s; these are different models", name_a,
                               key, value_text(in_a, text[0]), name_b, value_text(in_b, text[1]));
    }
    json_decref(all);
    json_decref(of_a);
    json_decref(of_b);
    return status;
}

/* Checks the extents of a model that was read: no count of elements may overflow. */
static void check_model(members *m, const nd_manifest *x)
{
    const nd_shape *shape = &x->shape;
    const int64_t tp = x->mesh.size[ND_AXIS_TP];
    double width = (double)shape->heads * (double)shape->head_dim;
    double widest = fmax(fmax((double)shape->ffn, (double)shape->vocab), width);
    double elements = 9.0 * (double)shape->layers * (double)shape->hidden * widest;
    if (m->status != ND_OK || !m->path) {
        return;
    }
    if (shape->kv_heads > shape->heads || !(elements < 0x1p50) ||
        shape->rotated > shape->head_dim || shape->rotated % 2 != 0) {
        fault(m, "model", "has extents that no model has");
    } else if (shape->heads % tp != 0 || shape->ffn % tp != 0) {
        fault(m, "mesh", "has a tp that does not divide heads and ffn");
    }
}

static const char *const segment_names[ND_SEGMENT_COUNT] = {"hp", "fp8"};

static json_t *tensors_of(const nd_layout *layout)
{
    static const char *const splits[] = {
        [ND_SPLIT_NONE] = "none", [ND_SPLIT_ROWS] = "rows", [ND_SPLIT_COLS] = "cols"};
    json_t *object = json_object();
    for (int i = 0; i < layout->param_count; i++) {
        const nd_param *p = &layout->params[i];
        json_t *shape = p->axes == 1
                            ? json_pack("[I]", (json_int_t)p->rows)
                            : json_pack("[I, I]", (json_int_t)p->rows, (json_int_t)p->cols);
        nd_json_set(&object, p->name,
                    json_pack("{s:o, s:s, s:s}", "shape", shape, "split", splits[p->split],
                              "segment", segment_names[p->segment]));
    }
    return object;
}

static bool is_listed_as_fp8(void *tensors, const nd_param *param)
{
    const json_t *segment = json_object_get(json_object_get(tensors, param->name), "segment");
    const char *name = json_string_value(segment);
    return name && strcmp(name, segment_names[ND_SEGMENT_FP8]) == 0;
}

/* The list is what the parameter table makes of the shape: then every place in a file is computed
 * as the writers computed it. */
static void tensors(members *m, nd_manifest *x)
{
    m->object = m->root;
    json_t *found = exchange(m, "tensors", m->path ? NULL : tensors_of(x->layout));
    const nd_layout_options options = {
        .shape = &x->shape, .converts = is_listed_as_fp8, .context = found};
    /* With fewer entries than layers no layout is made, however large it would be. */
    bool same = json_object_size(found) >= (size_t)x->shape.layers;
    if (same && m->status == ND_OK && m->path) {
        m->status = nd_layout_create(&options, &x->layout);
    }
    if (same && m->status == ND_OK && m->path) {
        json_t *expected = tensors_of(x->layout);
        m->status = expected ? ND_OK : nd_fail_memory("a manifest");
        same = json_equal(expected, found);
        json_decref(expected);
    }
    if (m->path && !same) {
        fault(m, "tensors", "are not those of a model of this shape");
    }
}

/* Other members. */

/* Steps, samples and tokens are below this. A run that goes on from there can still count. */
static const int64_t count_max = (int64_t)1 << 60;

static void written_by(members *m, nd_manifest *x)
{
    enter(m, "written_by");
    text(m, "program", x->program, sizeof x->program);
    text(m, "host", x->host, sizeof x->host);
    text(m, "run_id", x->run_id, sizeof x->run_id);
    whole(m, "restart_epoch", 0, INT64_MAX, &x->restart_epoch);
    text(m, "time", x->time, sizeof x->time);
    text(m, "reason", x->reason, sizeof x->reason);
}

/* The losses that a run with train.spike_factor stores, the oldest first; other runs store none. */
static void recent_losses(members *m, nd_recent_losses *recent)
{
    static const number_list kind = {false, -DBL_MAX, DBL_MAX, ND_RECENT_LOSSES,
                                     "is no list of at most 64 numbers"};
    double list[ND_RECENT_LOSSES];
    int64_t count = nd_min(recent->count, ND_RECENT_LOSSES);
    for (int64_t i = 0; i < count; i++) {
        list[i] = recent->value[(recent->count - count + i) % ND_RECENT_LOSSES];
    }
    numbers(m, "recent_losses", &kind, list, &count);
    memcpy(recent->value, list, (size_t)count * sizeof *list);
    recent->count = count;
}

static void position(members *m, nd_manifest *x)
{
    char what[128];
    enter(m, "position");
    whole(m, "step", 0, count_max, &x->position.step);
    whole(m, "skipped", 0, x->position.step, &x->position.skipped);
    whole(m, "tokens_seen", 0, count_max, &x->position.tokens_seen);
    whole(m, "samples_seen", 0, count_max, &x->samples_seen);
    if (m->path && x->samples_seen < x->position.step) { /* how many a step had may have changed */
        snprintf(what, sizeof what, "is %lld, but each of its %lld steps has at least one sample",
                 (long long)x->samples_seen, (long long)x->position.step);
        fault(m, "samples_seen", what);
    }
    whole(m, "metrics_bytes", 0, INT64_MAX, &x->metrics_bytes);
    recent_losses(m, &x->position.recent);
}

static void mesh(members *m, nd_manifest *x)
{
    enum { RANKS_MAX = 1 << 24 };
    enter(m, "mesh");
    int64_t product = 1;
    for (int a = 0; a < ND_AXIS_COUNT; a++) {
        int64_t size = x->mesh.size[a];
        whole(m, nd_axis_name((nd_axis)a), 1, RANKS_MAX, &size);
        x->mesh.size[a] = (int)size;
        product = product <= RANKS_MAX ? product * size : product;
    }
    if (m->path && product > RANKS_MAX) {
        fault(m, "mesh", "has more than 2^24 ranks");
    }
    x->writer_count = (int)nd_min(product, RANKS_MAX);
}

static void cut(members *m, nd_manifest *x)
{
    const char *const names[] = {nd_checksums[0].name, nd_checksums[1].name};
    int64_t version = ND_CUT_VERSION, chunk_bytes = ND_CHUNK_BYTES;
    enter(m, "cut");
    whole(m, "version", ND_CUT_VERSION, ND_CUT_VERSION, &version);
    x->checksum = (nd_checksum)word(m, "checksum", names, ND_CHECKSUM_COUNT, (int)x->checksum);
    whole(m, "chunk_bytes", ND_CHUNK_BYTES, ND_CHUNK_BYTES, &chunk_bytes);
}

static json_t *array_names(int arrays)
{
    json_t *names = json_array();
    for (int a = 0; a < arrays; a++) {
        nd_json_append(&names, json_string(nd_state_kind_names[a]));
    }
    return names;
}

static void state(members *m, nd_manifest *x)
{
    char dtype[8] = "F32";
    enter(m, "state");
    text(m, "optimizer", x->optimizer, sizeof x->optimizer);
    const json_t *found = exchange(m, "arrays", m->path ? NULL : array_names(x->arrays));
    text(m, "dtype", dtype, sizeof dtype);
    if (m->path) {
        x->arrays = json_array_size(found) == 1 ? 1 : ND_STATE_KINDS;
        json_t *known = array_names(x->arrays);
        if (strcmp(dtype, "F32") != 0 || !json_equal(found, known)) {
            fault(m, "state", "is not one that this program knows");
        }
        json_decref(known);
    }
}

static void replicated(members *m, nd_manifest *x)
{
    enter(m, "replicated");
    json_t *value;
    const char *name;
    for (int i = 0; i < x->extra_count && !m->path; i++) {
        whole(m, x->extras[i].name, 1, INT64_MAX, &x->extras[i].count);
    }
    if (m->path && json_object_size(m->object) > ND_STATE_EXTRAS_MAX) {
        fault(m, "replicated", "has too many entries");
    }
    json_object_foreach(m->path && m->status == ND_OK ? m->object : NULL, name, value)
    {
        nd_state_extra *extra = &x->extras[x->extra_count++];
        bool plain = name[0] && name[0] != '.' && strlen(name) < sizeof extra->name;
        for (const char *c = name; *c; c++) { /* it stays in its folder and in a JSON string */
            plain &= *c > ' ' && *c <= '~' && !strchr("/\\\"", *c);
        }
        if (!plain) {
            fault(m, name, "is no name of an entry");
            break;
        }
        memcpy(extra->name, name, strlen(name) + 1);
        whole(m, name, 1, (int64_t)1 << 32, &extra->count);
    }
}

/* An object of texts. */
static void texts(members *m, const char *key, json_t **texts)
{
    json_t *value;
    const char *name;
    m->object = m->root;
    if (!m->path) {
        (void)exchange(m, key, *texts ? json_incref(*texts) : json_object());
        return;
    }
    json_t *found = exchange(m, key, NULL);
    if (found && !json_is_object(found)) {
        fault(m, key, "is not an object");
    }
    json_object_foreach(found, name, value)
    {
        if (!json_is_string(value)) {
            fault(m, name, "is not a string");
        }
    }
    *texts = json_incref(found);
}

/* Returns whether a text has the form that nd_digest_text gives for this kind. */
static bool is_digest(nd_checksum kind, const char *text)
{
    const nd_checksum_hashes *hashes = &nd_checksums[kind];
    const size_t prefix = strlen(hashes->name);
    const char *hex = text + prefix + 1;
    return strncmp(text, hashes->name, prefix) == 0 && text[prefix] == ':' &&
           strlen(hex) == 2 * (size_t)nd_hash_bytes(hashes->whole) &&
           strspn(hex, "0123456789abcdef") == strlen(hex);
}

static void writers(members *m, nd_manifest *x)
{
    json_t *list = m->path ? NULL : json_array();
    for (int i = 0; i < x->writer_count && !m->path; i++) {
        nd_json_append(&list,
                       json_pack("[I, s]", (json_int_t)x->writers[i].bytes, x->writers[i].digest));
    }
    m->object = m->root;
    list = exchange(m, "writers", list);
    if (!m->path) {
        return;
    }
    if (!json_is_array(list) || json_array_size(list) != (size_t)x->writer_count) {
        fault(m, "writers", "is not a list with one entry for each rank");
    }
    m->status = m->status == ND_OK ? ND_ALLOC(x->writer_count, &x->writers) : m->status;
    for (int i = 0; i < x->writer_count && m->status == ND_OK; i++) {
        const json_t *entry = json_array_get(list, (size_t)i);
        const json_t *bytes = json_array_get(entry, 0);
        const char *digest = json_string_value(json_array_get(entry, 1));
        if (!json_is_integer(bytes) || json_integer_value(bytes) < 0 || !digest ||
            !is_digest(x->checksum, digest)) {
            fault(m, "writers", "holds an entry that is no size and digest");
            break;
        }
        x->writers[i].bytes = (uint64_t)json_integer_value(bytes);
        memcpy(x->writers[i].digest, digest, strlen(digest) + 1);
    }
}

/* All but the format, its version and the digest, in their order. */
static void all_members(members *m, nd_manifest *x)
{
    written_by(m, x);
    position(m, x);
    mesh(m, x);
    cut(m, x);
    model(m, &x->shape);
    check_model(m, x);
    state(m, x);
    tensors(m, x);
    replicated(m, x);
    texts(m, "identity", &x->identity);
    texts(m, "config", &x->config);
    writers(m, x);
}

/* Writing. */

nd_status nd_manifest_format(const nd_manifest *manifest, char **out, size_t *bytes)
{
    static const nd_layer_set none;
    nd_manifest copy = *manifest; /* of which nothing is changed that it shares */
    members m = {.root = json_object()};
    m.object = m.root;
    exchange(&m, "format", json_string(FORMAT));
    /* The oldest version whose readers miss nothing. */
    const bool lists = memcmp(&copy.shape.full, &none, sizeof none) != 0 ||
                       memcmp(&copy.shape.unturned, &none, sizeof none) != 0;
    exchange(&m, "version", json_integer(lists ? ND_MANIFEST_VERSION : 1));
    all_members(&m, &copy);
    char *json = nd_json_text(m.root, JSON_INDENT(1) | JSON_REAL_PRECISION(17));
    json_decref(m.root);
    if (!json || m.status != ND_OK) {
        free(json);
        return nd_fail_memory("a manifest");
    }
    size_t body = strlen(json) - 2; /* without the closing brace and the line end before it */
    char digest[ND_DIGEST_TEXT_MAX], *whole = NULL;
    nd_status status = nd_digest_text(manifest->checksum, json, body, digest);
    if (status == ND_OK) {
        status = nd_fs_format(&whole, "%.*s" ND_MANIFEST_DIGEST_HEAD "%s" ND_MANIFEST_DIGEST_TAIL,
                              (int)body, json, digest);
    }
    free(json);
    if (status == ND_OK) {
        *out = whole;
        *bytes = strlen(whole);
    }
    return status;
}

/* Reading. */

static nd_status check_version(members *m, bool *newer)
{
    const char *format = json_string_value(json_object_get(m->object, "format"));
    int64_t version = 0;
    if (!format || strcmp(format, FORMAT) != 0) {
        return nd_fail(ND_ERR_DATA, "\"%s\" is not the manifest of a checkpoint of ndtrain",
                       m->path);
    }
    whole(m, "version", 1, INT64_MAX, &version);
    *newer = version > ND_MANIFEST_VERSION;
    return !*newer ? m->status
                   : nd_fail(ND_ERR_DATA,
                             "\"%s\" has format version %lld; this program reads up to version %d; "
                             "use the program that wrote it, or a newer one",
                             m->path, (long long)version, ND_MANIFEST_VERSION);
}

/* The digest is the last member, over all bytes before it. */
static nd_status check_digest(members *m, const char *json, size_t bytes, nd_checksum kind)
{
    char found[ND_DIGEST_TEXT_MAX], expected[256];
    const size_t least = strlen(ND_MANIFEST_DIGEST_HEAD) + strlen(ND_MANIFEST_DIGEST_TAIL);
    ND_TRY(nd_digest_text(kind, "", 0, found));
    const size_t end = least + strlen(found);
    if (bytes < end) {
        fault(m, "digest", "is missing");
        return m->status;
    }
    ND_TRY(nd_digest_text(kind, json, bytes - end, found));
    snprintf(expected, sizeof expected, ND_MANIFEST_DIGEST_HEAD "%s" ND_MANIFEST_DIGEST_TAIL,
             found);
    return memcmp(json + bytes - end, expected, end) == 0
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "\"%s\" is damaged: its digest is not that of its contents (%s)", m->path,
                         found);
}

nd_status nd_manifest_parse(const char *json, size_t bytes, const char *path, nd_manifest *out)
{
    nd_manifest manifest = {0};
    members m = {.path = path};
    nd_status status = ND_OK;
    ND_TRY(nd_json_parse(json, bytes, JSON_REJECT_DUPLICATES, path, &m.root));
    m.object = m.root;
    ND_TRY_OUT(check_version(&m, &manifest.is_newer));
    cut(&m, &manifest); /* says which digest it is */
    ND_TRY_OUT(m.status);
    ND_TRY_OUT(check_digest(&m, json, bytes, manifest.checksum));
    all_members(&m, &manifest);
    status = m.status;
out:
    json_decref(m.root);
    if (status == ND_OK) {
        *out = manifest;
    } else {
        out->is_newer = manifest.is_newer;
        nd_manifest_fini(&manifest);
    }
    return status;
}

nd_status nd_manifest_read(const char *folder, nd_manifest *out)
{
    char path[PATH_MAX], *text = NULL;
    size_t bytes = 0;
    ND_TRY(nd_fs_path(path, "%s/" ND_MANIFEST_NAME, folder));
    nd_status status = nd_fs_read(path, ND_MANIFEST_MAX_BYTES, ND_ERR_DATA, &text, &bytes);
    if (status == ND_OK) {
        status = nd_manifest_parse(text, bytes, path, out);
    }
    free(text);
    return status;
}
