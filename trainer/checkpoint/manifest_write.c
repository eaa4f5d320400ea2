// SPDX-License-Identifier: Apache-2.0
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "trainer/checkpoint/manifest.h"
#include "trainer/checkpoint/manifest_names.h"

/* A function below returns NULL when memory runs out (json.h). */

static json_t *mesh_json(const nd_mesh *mesh)
{
    json_t *object = json_object();
    for (int a = 0; a < ND_AXIS_COUNT; a++) {
        nd_json_set(&object, nd_axis_name((nd_axis)a), json_integer(mesh->size[a]));
    }
    return object;
}

static json_t *factors_json(const float factors[ND_ROPE_LONG_PAIRS], int64_t pairs)
{
    json_t *list = json_array();
    for (int64_t i = 0; i < pairs; i++) {
        if (json_array_append_new(list, json_real((double)factors[i])) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

static json_t *layers_json(const nd_layer_set *set, int64_t layers)
{
    json_t *list = json_array();
    for (int64_t l = 0; l < layers; l++) {
        if (nd_layer_set_has(set, l) && json_array_append_new(list, json_integer(l)) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

static json_t *ends_json(const nd_shape *shape)
{
    json_t *list = json_array();
    for (int64_t i = 0; i < shape->more_end_count; i++) {
        nd_json_append(&list, json_integer(shape->more_ends[i]));
    }
    return list;
}

static json_t *shape_json(const nd_shape *shape)
{
    json_t *object = json_object();
    for (int i = 0; i < ND_SHAPE_NUMBERS; i++) {
        const nd_shape_number *n = &nd_shape_numbers[i];
        const char *at = (const char *)shape + n->offset;
        if (n->may_lack && *(const int64_t *)at == 0) {
            continue;
        }
        nd_json_set(&object, n->name,
                    n->is_real ? json_real(*(const double *)at)
                               : json_integer(*(const int64_t *)at));
    }
    for (int i = 0; i < ND_SHAPE_LAYER_SETS; i++) {
        json_t *list = layers_json(nd_shape_layers_of(shape, i), shape->layers);
        if (list && json_array_size(list) == 0) {
            json_decref(list);
            continue;
        }
        nd_json_set(&object, nd_shape_layer_sets[i].name, list);
    }
    if (shape->more_end_count > 0) {
        nd_json_set(&object, "more_eos_token_ids", ends_json(shape));
    }
    if (shape->family != ND_FAMILY_LLAMA) {
        nd_json_set(&object, "model_type", json_string(nd_families[shape->family].model_type));
    }
    nd_json_set(&object, "tie_word_embeddings", json_boolean(shape->tied));
    nd_json_set(&object, "rope_type", json_string(nd_rope_type_name(shape->rope.type)));
    if (shape->rope.type == ND_ROPE_LONGROPE) {
        const int64_t pairs = nd_shape_rotated(shape) / 2;
        nd_json_set(&object, "rope_short_factor", factors_json(shape->rope.short_factor, pairs));
        nd_json_set(&object, "rope_long_factor", factors_json(shape->rope.long_factor, pairs));
    }
    return object;
}

json_t *nd_manifest_tensors_json(const nd_layout *layout)
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
                              "segment", nd_segment_names[p->segment]));
    }
    return object;
}

static json_t *extras_json(const nd_manifest *m)
{
    json_t *object = json_object();
    for (int i = 0; i < m->extra_count; i++) {
        nd_json_set(&object, m->extras[i].name, json_integer(m->extras[i].count));
    }
    return object;
}

static json_t *pairs_json(const nd_manifest_pairs *pairs)
{
    json_t *object = json_object();
    for (int i = 0; i < pairs->count; i++) {
        nd_json_set(&object, pairs->list[i].key, nd_json_string(pairs->list[i].value));
    }
    return object;
}

static json_t *writers_json(const nd_manifest *m)
{
    json_t *array = json_array();
    for (int i = 0; i < m->writer_count; i++) {
        nd_json_append(&array,
                       json_pack("[I, s]", (json_int_t)m->writers[i].bytes, m->writers[i].digest));
    }
    return array;
}

/* The oldest version whose readers miss nothing. */
static int version_of(const nd_shape *shape)
{
    static const nd_layer_set none;
    int version = 1;
    for (int i = 0; i < ND_SHAPE_LAYER_SETS; i++) {
        const bool some = memcmp(nd_shape_layers_of(shape, i), &none, sizeof none) != 0;
        version = some ? ND_MANIFEST_VERSION : version;
    }
    return version;
}

/* The oldest first. Runs without train.spike_factor have none. */
static bool add_losses(json_t *root, const nd_recent_losses *recent)
{
    int64_t count = recent->count < ND_RECENT_LOSSES ? recent->count : ND_RECENT_LOSSES;
    json_t *array = json_array();
    for (int64_t i = recent->count - count; i < recent->count; i++) {
        json_array_append_new(array, json_real(recent->value[i % ND_RECENT_LOSSES]));
    }
    bool whole = (int64_t)json_array_size(array) == count;
    return (json_object_set_new(json_object_get(root, "position"), "recent_losses", array) == 0) &&
           whole;
}

static json_t *build(const nd_manifest *m)
{
    json_t *arrays = json_array();
    for (int a = 0; a < m->arrays; a++) {
        nd_json_append(&arrays, json_string(nd_state_kind_name((nd_state_kind)a)));
    }
    return json_pack(
        "{s:s, s:i, s:{s:s, s:o, s:o, s:I, s:s, s:s},"
        " s:{s:I, s:I, s:I, s:I, s:I}, s:o,"
        " s:{s:i, s:s, s:i}, s:o, s:{s:s, s:o, s:s}, s:o, s:o, s:o, s:o, s:o}",
        "format", ND_MANIFEST_FORMAT, "version", version_of(&m->shape), "written_by", "program",
        m->program, "host", nd_json_string(m->host), "run_id", nd_json_string(m->run_id),
        "restart_epoch", (json_int_t)m->restart_epoch, "time", m->time, "reason", m->reason,
        "position", "step", (json_int_t)m->position.step, "skipped",
        (json_int_t)m->position.skipped, "tokens_seen", (json_int_t)m->position.tokens_seen,
        "samples_seen", (json_int_t)m->samples_seen, "metrics_bytes", (json_int_t)m->metrics_bytes,
        "mesh", mesh_json(&m->mesh), "cut", "version", ND_CUT_VERSION, "checksum",
        nd_checksum_names[m->checksum], "chunk_bytes", ND_CHUNK_BYTES, "model",
        shape_json(&m->shape), "state", "optimizer", m->optimizer, "arrays", arrays, "dtype", "F32",
        "tensors", nd_manifest_tensors_json(m->layout), "replicated", extras_json(m), "identity",
        pairs_json(&m->identity), "config", pairs_json(&m->config), "writers", writers_json(m));
}

nd_status nd_manifest_format(const nd_manifest *manifest, char **out, size_t *bytes)
{
    json_t *root = build(manifest);
    if (root && manifest->position.recent.count > 0 &&
        !add_losses(root, &manifest->position.recent)) {
        json_decref(root);
        root = NULL;
    }
    char *text = nd_json_text(root, JSON_INDENT(1) | JSON_REAL_PRECISION(17));
    json_decref(root);
    if (!text) {
        return nd_fail_memory("a manifest");
    }
    size_t body = strlen(text) - 2; /* without the closing brace and the line end before it */
    char digest[ND_DIGEST_TEXT_MAX], *whole = NULL;
    nd_status status = nd_digest_text(manifest->checksum, text, body, digest);
    if (status == ND_OK) {
        status = nd_fs_format(&whole, "%.*s" ND_MANIFEST_DIGEST_HEAD "%s" ND_MANIFEST_DIGEST_TAIL,
                              (int)body, text, digest);
    }
    free(text);
    if (status == ND_OK) {
        *out = whole;
        *bytes = strlen(whole);
    }
    return status;
}
