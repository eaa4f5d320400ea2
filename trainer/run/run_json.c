// SPDX-License-Identifier: Apache-2.0
/* run.json: what a run was. */
#include <jansson.h>
#include <openssl/crypto.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/ops.h"
#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/version.h"
#include "runtime/comm/comm.h"
#include "trainer/precision/precision.h"
#include "trainer/run/state.h"

/* A function below returns NULL when memory runs out (json.h). */

static json_t *string_or_null(const char *text)
{
    return text && text[0] ? nd_json_string(text) : json_null();
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
    return nd_json_string(text);
}

typedef struct field_list {
    json_t *object; /* NULL: memory ran out */
    size_t count;   /* of fields */
} field_list;

static void visit_field(void *context, const char *key, const char *value, bool job_scoped)
{
    field_list *fields = context;
    fields->count++;
    nd_json_set(&fields->object, key, typed_value(value));
}

static json_t *strings(const char *const *list, int count)
{
    json_t *array = json_array();
    for (int i = 0; i < count; i++) {
        nd_json_append(&array, nd_json_string(list[i]));
    }
    return array;
}

static json_t *mesh_object(const nd_mesh *mesh)
{
    json_t *object = json_object();
    for (int axis = 0; axis < ND_AXIS_COUNT; axis++) {
        nd_json_set(&object, nd_axis_name(axis), json_integer(mesh->size[axis]));
    }
    const nd_group_kind parts[] = {ND_GROUP_ULYSSES, ND_GROUP_KV_COPIES};
    for (int i = 0; i < 2; i++) {
        const int size = nd_mesh_group_size(mesh, parts[i]);
        nd_json_set(&object, nd_group_name(parts[i]), json_integer(size));
    }
    return object;
}

/* The command is the one that the user typed: that of ndlaunch, if it started this worker. */
static json_t *command_array(const nd_run *s)
{
    const char *launcher = getenv("ND_LAUNCHER_PID");
    const int pid = launcher ? atoi(launcher) : 0;
    int argc = s->argc;
    char **argv = NULL;
    const bool typed = s->worker->identity.source == ND_IDENTITY_NDLAUNCH && pid > 0 &&
                       nd_command_line_read(pid, &argc, &argv) == ND_OK;
    json_t *array = strings((const char *const *)(typed ? argv : s->argv), argc);
    free(argv);
    return array;
}

static nd_status build(const nd_run *s, json_t *sections, json_t **out)
{
    const nd_identity *id = &s->worker->identity;
    const nd_peers *peers = &s->worker->peers;
    const char *nodes = getenv("SLURM_STEP_NODELIST"); /* "node[1-2]" */
    nodes = nodes ? nodes : getenv("SLURM_JOB_NODELIST");
    json_t *root = json_object();
    field_list fields = {.object = json_object()};
    char time_text[ND_CLOCK_UTC_MAX];
    nd_status status = nd_config_each(s->config, visit_field, &fields);
    if (status != ND_OK) {
        json_decref(fields.object);
        json_decref(root);
        return status;
    }
    nd_json_set(&root, "program", nd_json_string("ndtrain"));
    nd_json_set(&root, "version", nd_json_string(ND_VERSION));
    nd_json_set(&root, "start_time", nd_json_string(nd_clock_utc((int64_t)time(NULL), time_text)));
    nd_json_set(&root, "command", command_array(s));
    nd_json_set(&root, "config_file", string_or_null(s->config->source));
    nd_json_set(&root, "config", fields.object);
    nd_json_set(&root, "mesh", mesh_object(&s->rank->mesh));
    nd_json_set(&root, "job",
                json_pack("{s:s, s:o, s:i, s:i, s:o, s:o, s:o}", "started_by",
                          nd_identity_source_name(id->source), "run_id", string_or_null(id->run_id),
                          "world_size", id->world_size, "nnodes", id->nnodes, "hosts",
                          strings(peers->hosts, peers->host_count), "slurm_job_id",
                          string_or_null(getenv("SLURM_JOB_ID")), "slurm_nodes",
                          string_or_null(nodes)));
    if (!sections || (root && json_object_update(root, sections) != 0) ||
        json_object_size(json_object_get(root, "config")) != fields.count) {
        /* Jansson may have lost a key without a word. */
        json_decref(root);
        root = NULL;
    }
    *out = root;
    return root ? ND_OK : nd_fail_memory("run.json");
}

nd_status nd_run_file_next(const char *dir, const char *name, const char *suffix,
                           char out[ND_RUN_PATH_MAX])
{
    char number[24] = "";
    bool there = true;
    for (int n = 2; there; n++) {
        const int length = snprintf(out, ND_RUN_PATH_MAX, "%s/%s%s%s", dir, name, number, suffix);
        if (length >= ND_RUN_PATH_MAX) {
            return nd_fail(ND_ERR_CANTCREATE, "the path of the run folder %s is too long", dir);
        }
        ND_TRY(nd_fs_exists(out, &there));
        snprintf(number, sizeof number, "-%d", n);
    }
    return ND_OK;
}

nd_status nd_run_record_write(nd_run *s, json_t *sections)
{
    json_t *root = NULL;
    char path[ND_RUN_PATH_MAX], first[ND_RUN_PATH_MAX + 16];
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_run_file_next(s->dir, "run", ".json", path));
    snprintf(first, sizeof first, "%s/run.json", s->dir);
    if (!s->continues && strcmp(path, first) != 0) {
        status = nd_fail(ND_ERR_CANTCREATE,
                         "%s exists: the folder already holds a run; give another folder "
                         "with --save-dir",
                         first);
        goto out;
    }
    ND_TRY_OUT(build(s, sections, &root));
    ND_TRY_OUT(nd_json_write(s->dir, strrchr(path, '/') + 1, json_incref(root),
                             JSON_INDENT(2) | JSON_REAL_PRECISION(17)));
    memcpy(s->record, path, sizeof path);
out:
    json_decref(root);
    json_decref(sections);
    return status;
}

/* The sections of a run. */

/* samples: of the whole run; -1: a validation, which has none of its own. */
static json_t *sources_json(const nd_dataset *data, int64_t samples)
{
    const int count = nd_dataset_sources(data);
    json_t *array = json_array();
    int64_t *had = NULL;
    if (ND_ALLOC(count, &had) != ND_OK) {
        json_decref(array);
        return NULL;
    }
    if (samples >= 0) {
        (void)nd_dataset_count_samples(data, samples, had);
    }
    for (int i = 0; i < count; i++) {
        const nd_dataset *source = nd_dataset_source(data, i);
        const nd_dataset_facts facts = nd_dataset_facts_of(source);
        json_t *object = json_pack(
            "{s:o, s:o, s:s, s:I, s:o, s:I}", "name",
            nd_json_string(nd_dataset_source_name(data, i)), "path", nd_json_string(facts.path),
            "format", facts.format, "tokens", (json_int_t)nd_dataset_tokens(source), "documents",
            facts.documents >= 0 ? json_integer(facts.documents) : json_null(), "blocks",
            (json_int_t)nd_dataset_blocks(source));
        if (samples >= 0) {
            nd_json_set(&object, "samples", json_integer(had[i]));
        }
        nd_json_set(&object, "cache", string_or_null(facts.cache));
        nd_json_append(&array, object);
    }
    free(had);
    return array;
}

static json_t *data_json(const nd_inputs *inputs, const nd_config *config)
{
    int64_t samples;
    if (__builtin_mul_overflow(config->train.steps, nd_step_blocks(config), &samples)) {
        samples = INT64_MAX; /* more than any run reads */
    }
    return json_pack("{s:o, s:o, s:o}", "tokenizer",
                     string_or_null(inputs->tokenizer ? inputs->tokenizer : config->data.tokenizer),
                     "sources", sources_json(inputs->data, samples), "validation",
                     inputs->validation ? sources_json(inputs->validation, -1) : json_array());
}

static json_t *model_json(const nd_trainer *trainer)
{
    const nd_scales *scales = &trainer->model->scales;
    json_t *object = json_pack(
        "{s:I, s:I}", "parameters", (json_int_t)nd_shape_parameters(&trainer->rank->shape),
        "planned_bytes", (json_int_t)(trainer->plan.total + trainer->plan.external));
    if (scales->recipe.name) { /* what is known of these without FP8 says nothing */
        nd_json_set(&object, "linears", json_integer(scales->layers * ND_LINEAR_COUNT));
        nd_json_set(&object, "fp8_linears", json_integer(scales->filter.converted));
    }
    return object;
}

nd_status nd_run_record(nd_run *s)
{
    const nd_rank *r = s->rank;
    nd_run_text versions[ND_LIBRARY_COUNT];
    const nd_memplan *plan = &s->trainer->plan;
    json_t *libraries = json_object(), *memory = json_object();
    for (int i = 0; i < ND_MEM_CLASS_COUNT * plan->count; i++) { /* class by class */
        const nd_mem_buffer *buffer = &plan->buffers[i % plan->count];
        if (buffer->bytes > 0 && (int)buffer->class == i / plan->count) {
            nd_json_set(&memory, buffer->name, json_integer((json_int_t)buffer->bytes));
        }
    }
    for (int i = 0, count = nd_library_versions(false, versions); i < count; i++) {
        nd_json_set(&libraries, versions[i].key, nd_json_string(versions[i].value));
    }
    json_t *machine =
        json_pack("{s:o, s:o, s:o, s:o, s:o}", "device", nd_json_string(r->device->name), "ops",
                  nd_json_string(r->ops->name), "isa", nd_json_string(nd_device_machine(r->device)),
                  "transport", nd_json_string(r->transport->backend->name), "cpus",
                  nd_json_string(s->worker->affinity.cpus));
    if (!nd_rank_is_gpu(r)) {
        nd_json_set(&machine, "products", nd_json_string(nd_ops_products(r->device)));
    }
    json_t *object = json_pack("{s:o, s:o, s:o, s:o, s:o}", "libraries", libraries, "machine",
                               machine, "data", data_json(s->inputs, s->config), "model",
                               model_json(s->trainer), "memory_plan_bytes", memory);
    if (s->tuning && s->tuning->json) {
        nd_json_set(&object, "autotune", json_loads(s->tuning->json, 0, NULL));
    }
    return nd_run_record_write(s, object);
}

int nd_library_versions(bool open, nd_run_text out[ND_LIBRARY_COUNT])
{
    int n = 0;
    out[n++] = (nd_run_text){"oneDNN", nd_ops_library_version()};
    out[n++] = (nd_run_text){"OpenMP", nd_ops_openmp_version()};
    out[n++] = (nd_run_text){"UCX", nd_transport_ucx_version(open)};
    out[n++] = (nd_run_text){"jansson", jansson_version_str()};
    out[n++] = (nd_run_text){"OpenSSL", OpenSSL_version(OPENSSL_VERSION_STRING)};
    return n;
}
