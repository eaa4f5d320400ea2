// SPDX-License-Identifier: Apache-2.0
/* A run's description of itself at its start: run.json, and the lines that it logs. */
#include <jansson.h>
#include <openssl/crypto.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/base/clock.h"
#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/base/version.h"
#include "runtime/comm/comm.h"
#include "trainer/context/deal.h"
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

/* The lines of the log. */

/* Prints keys whose values are not the defaults, a line per section; run.json has all of them. */
typedef struct settings_printer {
    nd_config defaults;
    char section[32];
    char line[1024];
} settings_printer;

static void flush_section(settings_printer *c)
{
    if (c->line[0]) {
        nd_log_info("%s: %s", c->section, c->line);
    }
    c->line[0] = '\0';
}

static void print_key(void *context, const char *key, const char *value, bool is_job)
{
    settings_printer *c = context;
    char *usual = NULL;
    const char *dot = strchr(key, '.');
    size_t used, length = dot ? (size_t)(dot - key) : strlen(key);
    if (strncmp(c->section, key, length) != 0 || c->section[length] != '\0') {
        flush_section(c);
        snprintf(c->section, sizeof c->section, "%.*s", (int)length, key);
    }
    if (dot && nd_config_get(&c->defaults, key, &usual) == ND_OK && strcmp(usual, value) != 0) {
        used = strlen(c->line);
        snprintf(c->line + used, sizeof c->line - used, "%s%s %s", used ? ", " : "", dot + 1,
                 *value ? value : "none");
    }
    free(usual);
}

/* Threads of different workers that share a CPU wait for each other at the end of every parallel
 * region. */
static void print_cpus(const nd_run *run)
{
    const nd_affinity *a = &run->worker->affinity;
    const int workers = run->worker->peers.sharers, threads = a->threads * workers;
    char cores[32] = "";
    if (a->cores < a->allowed) {
        snprintf(cores, sizeof cores, " of %d core%s", a->cores, a->cores == 1 ? "" : "s");
    }
    nd_log_info("cpus: %d%s for %d local worker%s, %d thread%s each%s", a->allowed, cores, workers,
                workers == 1 ? "" : "s", a->threads, a->threads == 1 ? "" : "s",
                a->bound ? ", bound" : ", not bound: more workers than cpus");
    if (run->config->launch.threads_per_worker > 1 && threads > a->allowed) {
        nd_log_warning(
            "launch.threads_per_worker %d x %d workers are %d threads on %d cpu%s, so steps "
            "may take many times as long; leave it out, or use %d",
            a->threads, workers, threads, a->allowed, a->allowed == 1 ? "" : "s",
            a->cores > workers ? a->cores / workers : 1);
    }
}

/* Settings of documents that these data have no use for. */
static void print_unused(const char *what, const nd_dataset *data, const nd_config *config)
{
    const nd_dataset_facts facts = nd_dataset_facts_of(data);
    const bool joined = !nd_dataset_is_separate(data);
    if (joined && config->data.end_of_text >= 0) {
        nd_log_info("%s: data.end_of_text has no effect, since documents are joined", what);
    }
    if (config->data.long_rows == ND_LONG_ROWS_DROP && !facts.drops &&
        (joined || facts.documents >= 0)) { /* those of a blend are not known */
        nd_log_info("%s: data.long_rows drop has no effect, since %s", what,
                    joined ? "documents are joined" : "no row has a prompt");
    }
}

/* The documents that are separate, as far as their number is known, and what became of rows that
 * are kept whole. */
static void print_separate(const char *what, const nd_dataset_facts *facts, const nd_config *config)
{
    const int64_t documents = config->data.end_of_text < 0 ? facts->documents : -1;
    char count[32] = "";
    if (documents > 1) {
        snprintf(count, sizeof count, "%lld ", (long long)documents);
    }
    if (documents == 1) {
        nd_log_info("%s: 1 document: data.documents separate changes nothing", what);
    } else {
        nd_log_info("%s: %sdocuments are separate: a token sees the tokens before it in its own "
                    "document, and positions %s (data.documents, data.positions)",
                    what, count,
                    config->data.positions == ND_POSITIONS_RUNNING ? "run on over a block"
                                                                   : "begin at 0 in each");
    }
    if (facts->long_rows > 0) {
        nd_log_info("%s: %lld rows are longer than a block of %lld tokens and are %s "
                    "(data.long_rows)",
                    what, (long long)facts->long_rows, (long long)config->train.sequence_length + 1,
                    facts->drops ? "left out" : "cut");
    }
    if (facts->padding > 0) {
        nd_log_info("%s: %.2f %% of the tokens are padding, since rows stay whole", what,
                    100 * facts->padding);
    }
}

/* Logs what a token sees, and how many tokens count in the loss: a mask that is lost, or one too
 * strict, shows here. */
static nd_status print_facts(const char *what, const nd_dataset *data, const nd_config *config)
{
    const nd_dataset_facts facts = nd_dataset_facts_of(data);
    const nd_documents_rule rule = nd_dataset_documents(data);
    const int64_t tokens = nd_dataset_tokens(data);
    int64_t ignored;
    print_unused(what, data, config);
    if (rule == ND_DOCUMENTS_AUTO) {
        nd_log_info("%s: documents of some sources are separate, and those of others are joined "
                    "(data.documents)",
                    what);
    } else if (rule == ND_DOCUMENTS_JOIN) {
        nd_log_info("%s: documents are joined: a token sees all tokens before it in its block, "
                    "also those of other documents (data.documents)",
                    what);
    } else {
        print_separate(what, &facts, config);
    }
    ND_TRY(nd_dataset_ignored(data, &ignored));
    if (ignored == 0) {
        nd_log_info("%s: all tokens%s count in the loss", what,
                    nd_dataset_is_separate(data) ? " but the first of each document" : "");
    } else {
        nd_log_info("%s: %lld of %lld tokens count in the loss (%.1f %%)", what,
                    (long long)(tokens - ignored), (long long)tokens,
                    100.0 * (double)(tokens - ignored) / (double)tokens);
    }
    return ND_OK;
}

/* Prints how often the run reads each source, and how much of it counts. */
static nd_status print_sources(const nd_dataset *data, const nd_config *config)
{
    const int count = nd_dataset_sources(data);
    const int64_t samples = config->train.steps * nd_step_blocks(config);
    int64_t *had = NULL;
    nd_status status = ND_OK;
    if (count < 2) {
        return ND_OK;
    }
    ND_TRY(ND_ALLOC(count, &had));
    const bool exact = nd_dataset_count_samples(data, samples, had);
    for (int j = 0; j < count; j++) {
        const nd_dataset *source = nd_dataset_source(data, j);
        const char *name = nd_dataset_source_name(data, j);
        char what[128];
        nd_log_info(
            "source %s: %lld tokens, %lld blocks; %s%.3g %% of the samples, which read it %.3g "
            "times",
            name, (long long)nd_dataset_tokens(source), (long long)nd_dataset_blocks(source),
            exact ? "" : "about ", 100.0 * (double)had[j] / (double)samples,
            (double)had[j] / (double)nd_dataset_blocks(source));
        snprintf(what, sizeof what, "source %.100s", name);
        ND_TRY_OUT(print_facts(what, source, config));
    }
out:
    free(had);
    return status;
}

/* Prints how much of attention is left in the first blocks of the run, and how evenly the ranks of
 * cp share it. */
static nd_status print_balance(const nd_dataset *data, const nd_rank *r)
{
    enum { BLOCKS = 256 };
    const int64_t S = r->config->train.sequence_length;
    const nd_deal_of deal = nd_deal_of_mesh(&r->shape, &r->mesh, S);
    const int64_t samples = nd_min(nd_dataset_facts_of(data).samples, nd_dataset_blocks(data));
    const int64_t wanted = nd_min(BLOCKS, samples);
    nd_deal_pairs sum = {0};
    int32_t *memory = NULL;
    char *scratch = NULL;
    nd_status status = ND_OK;
    char balance[96] = "";
    if (!nd_dataset_is_separate(data)) {
        return ND_OK;
    }
    ND_TRY_OUT(ND_ALLOC(4 * S, &memory));
    ND_TRY_OUT(ND_ALLOC((int64_t)nd_deal_bytes(&deal), &scratch));
    for (int64_t i = 0; i < wanted; i++) {
        const int64_t block = nd_dataset_sample(data, r->config->data.shuffle_seed, i);
        ND_TRY_OUT(
            nd_dataset_block(data, block, &(nd_block){memory, memory + S, memory + 2 * S, 0}));
        const nd_deal_pairs pairs = nd_deal(&deal, memory + 2 * S, scratch, memory + 3 * S);
        sum.all += pairs.all;
        sum.most += pairs.most * (deal.cp / deal.ulysses);
        sum.joined += pairs.joined;
    }
    if (deal.cp > 1) {
        snprintf(balance, sizeof balance,
                 "; the rank of cp with the most pairs has %.3f times the mean of the ranks",
                 (double)sum.most / (double)sum.all);
    }
    nd_log_info("training data: queries see %.1f %% of the keys that they would see in joined "
                "documents%s (%lld blocks)",
                100.0 * (double)sum.all / (double)sum.joined, balance, (long long)wanted);
out:
    free(scratch);
    free(memory);
    return status;
}

/* Prints how often the run reads its data, and warns when one step reads all of them. */
static nd_status print_data(const nd_run *run)
{
    const nd_config *config = run->config;
    int64_t blocks = nd_dataset_blocks(run->inputs->data);
    int64_t step_blocks = nd_step_blocks(config);
    double passes = (double)config->train.steps * (double)step_blocks / (double)blocks;
    nd_log_info("training data: %lld tokens, %lld blocks of %lld; the run reads them %.3g times",
                (long long)nd_dataset_tokens(run->inputs->data), (long long)blocks,
                (long long)config->train.sequence_length + 1, passes);
    if (config->train.epochs > 0) {
        nd_log_info("train.epochs %g of %lld samples, %lld a step: %lld steps",
                    config->train.epochs, (long long)nd_dataset_facts_of(run->inputs->data).epoch,
                    (long long)step_blocks, (long long)config->train.steps);
    }
    ND_TRY(print_facts("training data", run->inputs->data, config));
    ND_TRY(run->inputs->validation ? print_facts("validation data", run->inputs->validation, config)
                                   : ND_OK);
    ND_TRY(print_balance(run->inputs->data, run->rank));
    ND_TRY(print_sources(run->inputs->data, config));
    if (step_blocks > blocks) {
        nd_log_warning("a step takes %lld blocks, but the training data have %lld: some are read "
                       "more than once a step; use more data, or a smaller batch or sequence",
                       (long long)step_blocks, (long long)blocks);
    }
    if (!run->inputs->validation) {
        nd_log_info("no validation: data.validation_path names no file");
    }
    return ND_OK;
}

static void print_line(void *context, const char *text)
{
    nd_log_info("%s", text);
}

/* Returns whether ranks of cp exchange keys. */
static bool exchanges_keys(const nd_config *config, const nd_shape *shape)
{
    const int cp = config->resolved_mesh.size[ND_AXIS_CP];
    return cp > 1 && nd_cp_exchange_of(shape, config).ulysses < cp;
}

/* Before a GPU is open, from the job alone. */
static bool are_documents_plain(const nd_config *config, const nd_shape *shape)
{
    const int64_t S = config->train.sequence_length;
    const nd_attention a = {.batch = 1,
                            .sq = S,
                            .sk = S,
                            .heads = shape->heads,
                            .kv_heads = shape->kv_heads,
                            .head_dim = shape->head_dim,
                            .window = shape->window < S ? shape->window : 0,
                            .documents = ND_SEGMENTS_WHOLE};
    const bool fp32 = config->train.precision == ND_PRECISION_FP32;
    const bool ring = exchanges_keys(config, shape) && nd_cp_exchange_of(shape, config).ring;
    return (ring && a.window > 0) ||
           !nd_ops_cuda_takes_documents(&a, fp32 ? ND_DTYPE_F32 : ND_DTYPE_BF16,
                                        config->train.deterministic);
}

void nd_banner_warn_of_documents(const nd_config *config, const nd_shape *shape, bool gpu,
                                 const nd_device *device)
{
    if (!gpu || config->data.documents != ND_DOCUMENTS_SEPARATE) {
        return;
    }
    if (device ? nd_ops_cuda_facts(device)->plain_documents : are_documents_plain(config, shape)) {
        nd_log_warning("data.documents is separate, and the plain attention kernels compute some "
                       "of that, many times slower, as cuDNN takes it only in BF16, with heads of "
                       "multiples of 16, without train.deterministic, and in a ring without a "
                       "sliding_window; data.documents: join is faster, and its documents see "
                       "each other");
    } else {
        nd_log_info("data.documents is separate: cuDNN computes its attention%s",
                    config->kernels.cuda_graphs && exchanges_keys(config, shape)
                        ? ", and with kernels.cuda_graphs and cp the plain kernels what a "
                          "document has in more than four places of a rank"
                        : "");
    }
}

/* After the inputs are open and memory is planned. ND_ERR_DATA when the spans that do not count in
 * the loss are damaged, of which it prints how many do. */
static nd_status print_banner(const nd_run *run)
{
    const nd_trainer *trainer = run->trainer;
    const nd_rank *r = run->rank;
    const bool gpu = nd_rank_is_gpu(r);
    char mesh[128], idle[ND_IDLE_KEYS_MAX];
    settings_printer settings = {0};
    if (nd_config_init(&settings.defaults) == ND_OK) {
        (void)nd_config_each(r->config, print_key, &settings);
        flush_section(&settings);
    }
    nd_config_fini(&settings.defaults);
    if (nd_config_idle_keys(r->config, idle) == ND_OK && idle[0]) {
        nd_log_warning("%s", idle);
    }
    nd_log_info("run folder: %s", run->dir);
    nd_log_info("mesh: %s on %s%s%s; %s communication", nd_mesh_format(&r->mesh, mesh, sizeof mesh),
                r->device->name, gpu ? ", " : "", gpu ? nd_ops_cuda_facts(r->device)->machine : "",
                r->transport->backend->name);
    if (r->mesh.size[ND_AXIS_CP] > 1) {
        const nd_cp_exchange cp = nd_cp_exchange_of(&r->shape, r->config);
        nd_log_info("context parallel: %s",
                    nd_cp_exchange_format(&cp, &r->mesh, mesh, sizeof mesh));
    }
    if (!gpu) {
        nd_log_info("instruction set: %s; %s", nd_ops_machine(r->device),
                    nd_ops_products(r->device));
    }
    print_cpus(run);
    nd_log_info("model: %.2f M parameters; memory plan of a worker: %.1f MiB (ndtrain plan shows "
                "its parts)",
                (double)nd_shape_parameters(&r->shape) * 1e-6,
                (double)(trainer->plan.total + trainer->plan.external) / 1048576.0);
    const nd_dims *dims = &trainer->model->dims;
    if (dims->piece < dims->T) {
        nd_log_info("MLP in %lld pieces of %lld tokens",
                    (long long)nd_ceil_div(dims->T, dims->piece), (long long)dims->piece);
    }
    nd_precision_each_line(&trainer->model->scales, &r->shape, print_line, NULL);
    if (trainer->tuning) {
        nd_tuning_each_line(trainer->tuning, print_line, NULL);
    }
    nd_banner_warn_of_documents(r->config, &r->shape, gpu, r->device);
    if (gpu && nd_ops_cuda_facts(r->device)->plain_windows) {
        const bool tiles = r->config->train.deterministic;
        const bool ring = !tiles || (nd_mesh_group_size(&r->mesh, ND_GROUP_CP) > 1 &&
                                     nd_cp_exchange_of(&r->shape, r->config).ring);
        nd_log_warning("cuDNN does not take the model's sliding_window in some blocks of %s%s%s, "
                       "which the plain attention kernels compute, many times slower; %s%s%s",
                       ring ? "a ring" : "", ring && tiles ? " and of " : "",
                       tiles ? "train.deterministic" : "",
                       ring ? "--cp-comm allgather or ulysses is faster" : "",
                       ring && tiles ? ", and " : "",
                       tiles ? "train.deterministic: false is faster" : "");
    }
    if (r->config->kernels.cuda_graphs) {
        nd_log_info("CUDA graphs: each block's forward and backward, recorded in step 2; "
                    "collectives, embedding, head, update, validation and steps that "
                    "fp8.health_interval reports run outside of them");
    }
    return print_data(run);
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
                  nd_json_string(r->ops->name), "isa",
                  nd_json_string(nd_rank_is_gpu(r) ? nd_ops_cuda_facts(r->device)->machine
                                                   : nd_ops_machine(r->device)),
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
    ND_TRY(nd_run_record_write(s, object));
    return print_banner(s);
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
