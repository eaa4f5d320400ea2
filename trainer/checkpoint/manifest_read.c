// SPDX-License-Identifier: Apache-2.0
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "trainer/checkpoint/manifest.h"
#include "trainer/checkpoint/manifest_names.h"

/* Of steps, samples and tokens. A run that goes on from there can still count. */
static const int64_t count_max = (int64_t)1 << 60;

static nd_status fail_member(const char *path, const char *member, const char *what)
{
    return nd_fail(ND_ERR_DATA, "\"%s\": %.100s %s", path, member, what);
}

static nd_status get_integer(const json_t *object, const char *path, const char *key, int64_t least,
                             int64_t most, int64_t *out)
{
    const json_t *value = json_object_get(object, key);
    int64_t n = json_integer_value(value);
    if (!json_is_integer(value)) {
        return fail_member(path, key, value ? "is not a whole number" : "is missing");
    }
    if (n < least || n > most) {
        return nd_fail(ND_ERR_DATA, "\"%s\": %s is %lld; it must be %lld to %lld", path, key,
                       (long long)n, (long long)least, (long long)most);
    }
    *out = n;
    return ND_OK;
}

/* A text below `size` characters. */
static nd_status get_text(const json_t *object, const char *path, const char *key, char *out,
                          size_t size)
{
    const json_t *value = json_object_get(object, key);
    const char *text = json_string_value(value);
    if (!text || strlen(text) >= size) {
        return fail_member(path, key,
                           text    ? "is too long"
                           : value ? "is not a string"
                                   : "is missing");
    }
    memcpy(out, text, strlen(text) + 1);
    return ND_OK;
}

static nd_status get_object(const json_t *object, const char *path, const char *key, json_t **out)
{
    json_t *value = json_object_get(object, key);
    *out = value;
    return json_is_object(value)
               ? ND_OK
               : fail_member(path, key, value ? "is not an object" : "is missing");
}

/* Index of the member's word in the list. */
static nd_status get_word(const json_t *object, const char *path, const char *key,
                          const char *const *words, int count, int *out)
{
    const char *text = json_string_value(json_object_get(object, key));
    for (int i = 0; text && i < count; i++) {
        if (strcmp(text, words[i]) == 0) {
            *out = i;
            return ND_OK;
        }
    }
    return nd_fail(ND_ERR_DATA, "\"%s\": %s is %s%.40s%s", path, key, text ? "the unknown \"" : "",
                   text ? text : "missing or no string", text ? "\"" : "");
}

static nd_status parse_mesh(const json_t *root, const char *path, nd_manifest *m)
{
    json_t *object = NULL;
    int64_t product = 1;
    ND_TRY(get_object(root, path, "mesh", &object));
    for (int a = 0; a < ND_AXIS_COUNT; a++) {
        int64_t size = 0;
        ND_TRY(get_integer(object, path, nd_axis_name((nd_axis)a), 1, 1 << 24, &size));
        m->mesh.size[a] = (int)size;
        product = product <= 1 << 24 ? product * size : product;
    }
    if (product > 1 << 24) {
        return fail_member(path, "mesh", "has more than 2^24 ranks");
    }
    m->writer_count = (int)product;
    return ND_OK;
}

/* No count of elements may overflow. */
static nd_status check_shape(const nd_shape *shape, const char *path)
{
    double width = (double)shape->heads * (double)shape->head_dim;
    double widest = fmax(fmax((double)shape->ffn, (double)shape->vocab), width);
    double elements = 9.0 * (double)shape->layers * (double)shape->hidden * widest;
    const bool turns = shape->rotated <= shape->head_dim && shape->rotated % 2 == 0;
    return shape->kv_heads <= shape->heads && elements < 0x1p50 && turns
               ? ND_OK
               : fail_member(path, "model", "has extents that no model has");
}

static nd_status parse_factors(const json_t *object, const char *path, const char *key,
                               int64_t pairs, float out[ND_ROPE_LONG_PAIRS])
{
    const json_t *list = json_object_get(object, key);
    bool good = json_is_array(list) && (int64_t)json_array_size(list) == pairs &&
                pairs <= ND_ROPE_LONG_PAIRS;
    for (int64_t i = 0; good && i < pairs; i++) {
        out[i] = (float)json_number_value(json_array_get(list, (size_t)i));
        good = out[i] > 0 && isfinite(out[i]);
    }
    return good ? ND_OK : fail_member(path, key, "is not a number above 0 for each pair");
}

static nd_status parse_layers(const json_t *object, const char *path, const char *key,
                              int64_t layers, nd_layer_set *out)
{
    const json_t *list = json_object_get(object, key);
    bool good = !list || json_is_array(list);
    for (size_t i = 0; good && i < json_array_size(list); i++) {
        const json_t *layer = json_array_get(list, i);
        good = json_is_integer(layer) && json_integer_value(layer) >= 0 &&
               json_integer_value(layer) < layers;
        if (good) {
            nd_layer_set_add(out, json_integer_value(layer));
        }
    }
    return good ? ND_OK : fail_member(path, key, "is not a list of the model's layers");
}

static nd_status parse_ends(const json_t *object, const char *path, nd_shape *shape)
{
    const char *const key = "more_eos_token_ids";
    const json_t *list = json_object_get(object, key);
    bool good = !list || (json_is_array(list) && json_array_size(list) <= ND_ENDS_MAX);
    for (size_t i = 0; good && i < json_array_size(list); i++) {
        const json_t *end = json_array_get(list, i);
        good = json_is_integer(end) && json_integer_value(end) >= 0 &&
               json_integer_value(end) <= INT32_MAX;
        shape->more_ends[i] = (int32_t)json_integer_value(end);
        shape->more_end_count++;
    }
    return good ? ND_OK : fail_member(path, key, "is not a list of token ids");
}

/* The members of programs that knew no lists: a window from a first layer on, none in each
 * window_period-th layer, and no RoPE in each no_rope_layer_interval-th one. */
static nd_status parse_periods(const json_t *object, const char *path, nd_shape *shape)
{
    static const char *const keys[] = {"window_first_layer", "window_period",
                                       "no_rope_layer_interval"};
    int64_t n[3] = {0};
    for (int i = 0; i < 3; i++) {
        ND_TRY(json_object_get(object, keys[i])
                   ? get_integer(object, path, keys[i], 0, INT64_MAX, &n[i])
                   : ND_OK);
    }
    for (int64_t l = 0; l < nd_min(shape->layers, ND_LAYERS_MAX); l++) {
        if (l < n[0] || (n[1] > 0 && (l + 1) % n[1] == 0)) {
            nd_layer_set_add(&shape->full, l);
        }
        if (n[2] > 0 && (l + 1) % n[2] == 0) {
            nd_layer_set_add(&shape->unturned, l);
        }
    }
    return ND_OK;
}

static nd_status parse_shape(const json_t *root, const char *path, nd_shape *shape)
{
    json_t *object = NULL;
    const char *ropes[ND_ROPE_TYPES];
    int rope = 0;
    ND_TRY(get_object(root, path, "model", &object));
    for (int i = 0; i < ND_SHAPE_NUMBERS; i++) {
        const nd_shape_number *n = &nd_shape_numbers[i];
        char *at = (char *)shape + n->offset;
        if (n->may_lack && !json_object_get(object, n->name)) {
            continue;
        }
        if (n->is_real) {
            const json_t *value = json_object_get(object, n->name);
            double x = json_number_value(value);
            if (!json_is_number(value) || !isfinite(x)) {
                return fail_member(path, n->name, "is missing or no number");
            }
            memcpy(at, &x, sizeof x);
        } else {
            int64_t x = 0;
            ND_TRY(get_integer(object, path, n->name, n->least, n->most, &x));
            memcpy(at, &x, sizeof x);
        }
    }
    if (json_object_get(object, "model_type")) {
        const char *types[ND_FAMILY_COUNT];
        int family = 0;
        for (int i = 0; i < ND_FAMILY_COUNT; i++) {
            types[i] = nd_families[i].model_type;
        }
        ND_TRY(get_word(object, path, "model_type", types, ND_FAMILY_COUNT, &family));
        shape->family = (nd_family)family;
    }
    const json_t *tied = json_object_get(object, "tie_word_embeddings");
    if (!json_is_boolean(tied)) {
        return fail_member(path, "tie_word_embeddings", "is missing or no boolean");
    }
    shape->tied = json_is_true(tied);
    for (int i = 0; i < ND_ROPE_TYPES; i++) {
        ropes[i] = nd_rope_type_name((nd_rope_type)i);
    }
    ND_TRY(get_word(object, path, "rope_type", ropes, ND_ROPE_TYPES, &rope));
    shape->rope.type = (nd_rope_type)rope;
    ND_TRY(check_shape(shape, path));
    for (int i = 0; i < ND_SHAPE_LAYER_SETS; i++) {
        ND_TRY(parse_layers(object, path, nd_shape_layer_sets[i].name,
                            nd_min(shape->layers, ND_LAYERS_MAX), nd_shape_layers_of(shape, i)));
    }
    ND_TRY(parse_periods(object, path, shape));
    ND_TRY(parse_ends(object, path, shape));
    if (shape->rope.type == ND_ROPE_LONGROPE) {
        const int64_t pairs = nd_shape_rotated(shape) / 2;
        ND_TRY(parse_factors(object, path, "rope_short_factor", pairs, shape->rope.short_factor));
        ND_TRY(parse_factors(object, path, "rope_long_factor", pairs, shape->rope.long_factor));
    }
    return ND_OK;
}

static bool is_listed_as_fp8(void *tensors, const nd_param *param)
{
    const json_t *segment = json_object_get(json_object_get(tensors, param->name), "segment");
    const char *name = json_string_value(segment);
    return name && strcmp(name, nd_segment_names[ND_SEGMENT_FP8]) == 0;
}

/* The list is what the parameter table makes of the shape: then every place in a file is computed
 * as the writers computed it. */
static nd_status parse_tensors(const json_t *root, const char *path, nd_manifest *m)
{
    const nd_mesh one = {{1, 1, 1, 1, 1}};
    json_t *found = NULL;
    ND_TRY(get_object(root, path, "tensors", &found));
    const nd_layout_options options = {
        .shape = &m->shape, .mesh = &one, .converts = is_listed_as_fp8, .context = found};
    bool same = json_object_size(found) >= (size_t)m->shape.layers; /* else no layout is made */
    if (same) {
        ND_TRY(nd_layout_create(&options, &m->layout));
        json_t *expected = nd_manifest_tensors_json(m->layout);
        if (!expected) {
            return nd_fail_memory("a manifest");
        }
        same = json_equal(expected, found);
        json_decref(expected);
    }
    return same ? ND_OK : fail_member(path, "tensors", "are not those of a model of this shape");
}

static nd_status parse_pairs(const json_t *root, const char *path, const char *key,
                             nd_manifest_pairs *out)
{
    json_t *object = NULL, *value;
    const char *name;
    ND_TRY(get_object(root, path, key, &object));
    json_object_foreach(object, name, value)
    {
        if (!json_is_string(value)) {
            return fail_member(path, name, "is not a string");
        }
        ND_TRY(nd_manifest_pairs_add(out, name, json_string_value(value)));
    }
    return ND_OK;
}

/* Whether the name stays in its folder and in a JSON string. */
static bool is_plain(const char *name)
{
    bool plain = name[0] && name[0] != '.';
    for (const char *c = name; *c && plain; c++) {
        plain = *c > ' ' && *c <= '~' && !strchr("/\\\"", *c);
    }
    return plain;
}

static nd_status parse_extras(const json_t *root, const char *path, nd_manifest *m)
{
    json_t *object = NULL, *value;
    const char *name;
    ND_TRY(get_object(root, path, "replicated", &object));
    if (json_object_size(object) > ND_STATE_EXTRAS_MAX) {
        return fail_member(path, "replicated", "has too many entries");
    }
    json_object_foreach(object, name, value)
    {
        nd_state_extra *extra = &m->extras[m->extra_count++];
        if (strlen(name) >= sizeof extra->name || !is_plain(name)) {
            return fail_member(path, name, "is no name of an entry");
        }
        memcpy(extra->name, name, strlen(name) + 1);
        ND_TRY(get_integer(object, path, name, 1, (int64_t)1 << 32, &extra->count));
    }
    return ND_OK;
}

static nd_status parse_writers(const json_t *root, const char *path, nd_manifest *m)
{
    const json_t *array = json_object_get(root, "writers");
    if (!json_is_array(array) || json_array_size(array) != (size_t)m->writer_count) {
        return fail_member(path, "writers", "is not a list with one entry for each rank");
    }
    ND_TRY(ND_ALLOC(m->writer_count, &m->writers));
    for (int i = 0; i < m->writer_count; i++) {
        const json_t *entry = json_array_get(array, (size_t)i);
        const json_t *bytes = json_array_get(entry, 0);
        const char *digest = json_string_value(json_array_get(entry, 1));
        if (!json_is_integer(bytes) || json_integer_value(bytes) < 0 || !digest ||
            !nd_digest_text_is_valid(m->checksum, digest)) {
            return fail_member(path, "writers", "holds an entry that is no size and digest");
        }
        m->writers[i].bytes = (uint64_t)json_integer_value(bytes);
        memcpy(m->writers[i].digest, digest, strlen(digest) + 1);
    }
    return ND_OK;
}

static nd_status parse_state(const json_t *root, const char *path, nd_manifest *m)
{
    json_t *object = NULL;
    char dtype[8];
    ND_TRY(get_object(root, path, "state", &object));
    ND_TRY(get_text(object, path, "optimizer", m->optimizer, sizeof m->optimizer));
    ND_TRY(get_text(object, path, "dtype", dtype, sizeof dtype));
    const json_t *arrays = json_object_get(object, "arrays");
    m->arrays = (int)json_array_size(arrays);
    if (strcmp(dtype, "F32") != 0 || (m->arrays != 1 && m->arrays != ND_STATE_KINDS)) {
        return fail_member(path, "state", "is not one that this program knows");
    }
    for (int a = 0; a < m->arrays; a++) {
        const char *name = json_string_value(json_array_get(arrays, (size_t)a));
        if (!name || strcmp(name, nd_state_kind_name((nd_state_kind)a)) != 0) {
            return fail_member(path, "arrays", "holds an array that this program does not know");
        }
    }
    return ND_OK;
}

/* Reads the losses that a run with train.spike_factor stores; other runs store none. */
static nd_status parse_losses(const json_t *position, const char *path, nd_recent_losses *out)
{
    const json_t *array = json_object_get(position, "recent_losses");
    size_t count = json_array_size(array);
    if ((array && !json_is_array(array)) || count > ND_RECENT_LOSSES) {
        return fail_member(path, "recent_losses", "is no list of at most 64 numbers");
    }
    for (size_t i = 0; i < count; i++) {
        const json_t *value = json_array_get(array, i);
        if (!json_is_number(value) || !isfinite(json_number_value(value))) {
            return fail_member(path, "recent_losses", "is no list of at most 64 numbers");
        }
        out->value[i] = json_number_value(value);
    }
    out->count = (int64_t)count;
    return ND_OK;
}

static nd_status parse_head(const json_t *root, const char *path, nd_manifest *m)
{
    json_t *by = NULL, *position = NULL;
    const int64_t most = INT64_MAX;
    ND_TRY(get_object(root, path, "written_by", &by));
    ND_TRY(get_text(by, path, "program", m->program, sizeof m->program));
    ND_TRY(get_text(by, path, "host", m->host, sizeof m->host));
    ND_TRY(get_text(by, path, "run_id", m->run_id, sizeof m->run_id));
    ND_TRY(get_text(by, path, "time", m->time, sizeof m->time));
    ND_TRY(get_text(by, path, "reason", m->reason, sizeof m->reason));
    ND_TRY(get_integer(by, path, "restart_epoch", 0, most, &m->restart_epoch));
    ND_TRY(get_object(root, path, "position", &position));
    ND_TRY(get_integer(position, path, "step", 0, count_max, &m->position.step));
    ND_TRY(get_integer(position, path, "skipped", 0, m->position.step, &m->position.skipped));
    ND_TRY(get_integer(position, path, "tokens_seen", 0, count_max, &m->position.tokens_seen));
    ND_TRY(get_integer(position, path, "samples_seen", 0, count_max, &m->samples_seen));
    if (m->samples_seen < m->position.step) { /* how many a step had may have changed */
        return nd_fail(ND_ERR_DATA,
                       "\"%s\": samples_seen is %lld, but each of its %lld steps has at least one "
                       "sample",
                       path, (long long)m->samples_seen, (long long)m->position.step);
    }
    ND_TRY(parse_losses(position, path, &m->position.recent));
    return get_integer(position, path, "metrics_bytes", 0, most, &m->metrics_bytes);
}

static nd_status parse_cut(const json_t *root, const char *path, nd_manifest *m)
{
    json_t *cut = NULL;
    int64_t version = 0, chunk = 0;
    int kind = 0;
    ND_TRY(get_object(root, path, "cut", &cut));
    ND_TRY(get_integer(cut, path, "version", ND_CUT_VERSION, ND_CUT_VERSION, &version));
    ND_TRY(get_integer(cut, path, "chunk_bytes", ND_CHUNK_BYTES, ND_CHUNK_BYTES, &chunk));
    ND_TRY(get_word(cut, path, "checksum", nd_checksum_names, ND_CHECKSUM_COUNT, &kind));
    m->checksum = (nd_checksum)kind;
    return ND_OK;
}

static nd_status check_version(const json_t *root, const char *path, bool *newer)
{
    const char *format = json_string_value(json_object_get(root, "format"));
    int64_t version = 0;
    if (!format || strcmp(format, ND_MANIFEST_FORMAT) != 0) {
        return nd_fail(ND_ERR_DATA, "\"%s\" is not the manifest of a checkpoint of ndtrain", path);
    }
    ND_TRY(get_integer(root, path, "version", 1, INT64_MAX, &version));
    *newer = version > ND_MANIFEST_VERSION;
    if (*newer) {
        return nd_fail(ND_ERR_DATA,
                       "\"%s\" has format version %lld; this program reads up to version %d; use "
                       "the program that wrote it, or a newer one",
                       path, (long long)version, ND_MANIFEST_VERSION);
    }
    return ND_OK;
}

/* The digest is the last member, over all bytes before it. */
static nd_status check_digest(const char *text, size_t bytes, const char *path, nd_checksum kind)
{
    char found[ND_DIGEST_TEXT_MAX], expected[256];
    const size_t least = strlen(ND_MANIFEST_DIGEST_HEAD) + strlen(ND_MANIFEST_DIGEST_TAIL);
    ND_TRY(nd_digest_text(kind, "", 0, found));
    const size_t end = least + strlen(found);
    if (bytes < end) {
        return fail_member(path, "digest", "is missing");
    }
    ND_TRY(nd_digest_text(kind, text, bytes - end, found));
    snprintf(expected, sizeof expected, ND_MANIFEST_DIGEST_HEAD "%s" ND_MANIFEST_DIGEST_TAIL,
             found);
    return memcmp(text + bytes - end, expected, end) == 0
               ? ND_OK
               : nd_fail(ND_ERR_DATA,
                         "\"%s\" is damaged: its digest is not that of its contents (%s)", path,
                         found);
}

static nd_status parse_all(const json_t *root, const char *text, size_t bytes, const char *path,
                           nd_manifest *m)
{
    ND_TRY(check_version(root, path, &m->is_newer));
    ND_TRY(parse_cut(root, path, m));
    ND_TRY(check_digest(text, bytes, path, m->checksum));
    ND_TRY(parse_head(root, path, m));
    ND_TRY(parse_mesh(root, path, m));
    ND_TRY(parse_shape(root, path, &m->shape));
    const int64_t tp = m->mesh.size[ND_AXIS_TP];
    if (m->shape.heads % tp != 0 || m->shape.ffn % tp != 0) {
        return fail_member(path, "mesh", "has a tp that does not divide heads and ffn");
    }
    ND_TRY(parse_tensors(root, path, m));
    ND_TRY(parse_extras(root, path, m));
    ND_TRY(parse_state(root, path, m));
    ND_TRY(parse_pairs(root, path, "identity", &m->identity));
    ND_TRY(parse_pairs(root, path, "config", &m->config));
    return parse_writers(root, path, m);
}

nd_status nd_manifest_parse(const char *text, size_t bytes, const char *path, nd_manifest *out)
{
    json_error_t error;
    nd_manifest manifest = {0};
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (!root) {
        return nd_fail(ND_ERR_DATA, "\"%s\" line %d: %s", path, error.line, error.text);
    }
    nd_status status = parse_all(root, text, bytes, path, &manifest);
    json_decref(root);
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
    char *path = NULL, *text = NULL;
    size_t bytes = 0;
    ND_TRY(nd_fs_format(&path, "%s/" ND_MANIFEST_NAME, folder));
    nd_status status = nd_fs_read(path, ND_MANIFEST_MAX_BYTES, ND_ERR_DATA, &text, &bytes);
    if (status == ND_OK) {
        status = nd_manifest_parse(text, bytes, path, out);
    }
    free(text);
    free(path);
    return status;
}
