// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/run_folder.h"

#include <jansson.h>
#include <openssl/crypto.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/ops.h"
#include "runtime/base/clock.h"
#include "runtime/base/fsio.h"
#include "runtime/base/json.h"
#include "runtime/comm/comm.h"

/*
 * A function below returns NULL when memory runs out. `set` and `append` pass that on: they free
 * and clear the object or array that would lack the value, so that the root is NULL in the end.
 */
static void set(json_t **object, const char *key, json_t *value)
{
    if (json_object_set_new(*object, key, value) != 0) {
        json_decref(*object);
        *object = NULL;
    }
}

static void append(json_t **array, json_t *value)
{
    if (json_array_append_new(*array, value) != 0) {
        json_decref(*array);
        *array = NULL;
    }
}

static bool is_ascii(const char *text)
{
    while (*text && (unsigned char)*text < 0x80) {
        text++;
    }
    return !*text;
}

/* JSON must be UTF-8, but a path or an argument need not be: in a text that is not UTF-8, bytes
 * that are not ASCII become '?'. */
static json_t *string(const char *text)
{
    json_t *value = json_string(text);
    char *ascii = value || is_ascii(text) ? NULL : strdup(text);
    if (ascii) {
        for (char *c = ascii; *c; c++) {
            *c = (unsigned char)*c < 0x80 ? *c : '?';
        }
        value = json_string(ascii);
        free(ascii);
    }
    return value;
}

static json_t *string_or_null(const char *text)
{
    return text && text[0] ? string(text) : json_null();
}

/* The field table gives text; numbers, booleans and lists of numbers become JSON values. */
static json_t *typed_value(const char *text)
{
    json_error_t error;
    json_t *value = json_loads(text, JSON_DECODE_ANY, &error);
    if (json_is_number(value) || json_is_boolean(value) || json_is_array(value)) {
        return value;
    }
    if (!value && nd_json_no_memory(&error)) {
        return NULL;
    }
    json_decref(value);
    return string(text);
}

typedef struct field_list {
    json_t *object; /* NULL: memory ran out */
    size_t count;   /* of fields */
} field_list;

static void visit_field(void *context, const char *key, const char *value, bool job_scoped)
{
    field_list *fields = context;
    fields->count++;
    set(&fields->object, key, typed_value(value));
    if (fields->object && json_object_size(fields->object) != fields->count) {
        json_decref(fields->object); /* Jansson has lost a key without a word */
        fields->object = NULL;
    }
}

static json_t *texts(const nd_run_text *list, int count)
{
    json_t *object = json_object();
    for (int i = 0; i < count; i++) {
        set(&object, list[i].key, string(list[i].value));
    }
    return object;
}

static json_t *amounts(const nd_run_amount *list, int count)
{
    json_t *object = json_object();
    for (int i = 0; i < count; i++) {
        set(&object, list[i].key, json_integer(list[i].value));
    }
    return object;
}

static json_t *strings(const char *const *list, int count)
{
    json_t *array = json_array();
    for (int i = 0; i < count; i++) {
        append(&array, string(list[i]));
    }
    return array;
}

static json_t *mesh_object(const nd_mesh *mesh)
{
    json_t *object = json_object();
    for (int axis = 0; axis < ND_AXIS_COUNT; axis++) {
        set(&object, nd_axis_name(axis), json_integer(mesh->size[axis]));
    }
    return object;
}

static json_t *identity_object(const nd_run_record *record)
{
    const nd_identity *id = record->identity;
    json_t *object = json_object();
    set(&object, "started_by", string(nd_identity_source_name(id->source)));
    set(&object, "run_id", string_or_null(id->run_id));
    set(&object, "world_size", json_integer(id->world_size));
    set(&object, "nnodes", json_integer(id->nnodes));
    set(&object, "hosts", strings(record->hosts, record->host_count));
    const char *nodes = getenv("SLURM_STEP_NODELIST"); /* "node[1-2]" */
    set(&object, "slurm_job_id", string_or_null(getenv("SLURM_JOB_ID")));
    set(&object, "slurm_nodes", string_or_null(nodes ? nodes : getenv("SLURM_JOB_NODELIST")));
    return object;
}

static json_t *start_time(void)
{
    char text[ND_CLOCK_UTC_MAX];
    return string(nd_clock_utc((int64_t)time(NULL), text));
}

static nd_status build(const nd_run_record *record, json_t **out)
{
    json_t *root = json_object();
    field_list fields = {.object = json_object()};
    nd_status status = nd_config_each(record->config, visit_field, &fields);
    json_t *config = fields.object;
    if (status != ND_OK) {
        json_decref(config);
        json_decref(root);
        return status;
    }
    set(&root, "program", string("ndtrain"));
    set(&root, "version", string(record->program_version));
    set(&root, "start_time", start_time());
    set(&root, "command", strings((const char *const *)record->argv, record->argc));
    set(&root, "config_file", string_or_null(record->config->source));
    set(&root, "config", config);
    set(&root, "mesh", mesh_object(&record->config->resolved_mesh));
    set(&root, "job", identity_object(record));
    set(&root, "libraries", texts(record->libraries, record->library_count));
    set(&root, "machine", texts(record->machine, record->machine_count));
    set(&root, "model", amounts(record->model, record->model_count));
    set(&root, "memory_plan_bytes", amounts(record->memory, record->memory_count));
    if (record->autotune) {
        set(&root, "autotune", json_loads(record->autotune, 0, NULL));
    }
    if (!root) {
        return nd_fail_memory("run.json");
    }
    *out = root;
    return ND_OK;
}

/* NULL: memory ran out. json_dumps may leave out a part whose buffer it could not enlarge. */
static char *dump(const json_t *root)
{
    const size_t flags = JSON_INDENT(2) | JSON_REAL_PRECISION(17);
    size_t size = json_dumpb(root, NULL, 0, flags);
    char *text = size > 0 ? malloc(size + 1) : NULL;
    if (text && json_dumpb(root, text, size, flags) != size) {
        free(text);
        return NULL;
    }
    if (text) {
        text[size] = '\0';
    }
    return text;
}

nd_status nd_run_file_next(const char *dir, const char *name, char **out)
{
    ND_TRY(nd_fs_format(out, "%s/%s.json", dir, name));
    for (int n = 2; nd_fs_exists(*out) && n < 1000000; n++) {
        free(*out);
        *out = NULL;
        ND_TRY(nd_fs_format(out, "%s/%s-%d.json", dir, name, n));
    }
    return ND_OK;
}

nd_status nd_run_record_write(const char *dir, bool continues, const nd_run_record *record)
{
    json_t *root = NULL;
    char *path = NULL, *text = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(continues ? nd_run_file_next(dir, "run", &path)
                         : nd_fs_format(&path, "%s/run.json", dir));
    if (nd_fs_exists(path)) {
        status = nd_fail(ND_ERR_CANTCREATE,
                         "%s exists: the folder already holds a run; give another folder as "
                         "output.dir",
                         path);
        goto out;
    }
    ND_TRY_OUT(build(record, &root));
    text = dump(root);
    if (!text) {
        status = nd_fail_memory("run.json");
        goto out;
    }
    ND_TRY_OUT(nd_fs_write_atomic(path, text, strlen(text)));
out:
    free(text);
    json_decref(root);
    free(path);
    return status;
}

int nd_library_versions(nd_run_text out[ND_LIBRARY_COUNT])
{
    int n = 0;
    out[n++] = (nd_run_text){"oneDNN", nd_ops_library_version()};
    out[n++] = (nd_run_text){"OpenMP", nd_ops_openmp_version()};
    out[n++] = (nd_run_text){"UCX", nd_transport_ucx_version()};
    out[n++] = (nd_run_text){"jansson", jansson_version_str()};
    out[n++] = (nd_run_text){"OpenSSL", OpenSSL_version(OPENSSL_VERSION_STRING)};
    return n;
}
