// SPDX-License-Identifier: Apache-2.0
/*
 * The layers over the defaults: a file, native with sections of keys or accelerate's with a fixed
 * set of keys (names.def), then the command line; and what follows from the values of a layer once
 * it is read as a whole.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/log.h"
#include "runtime/base/printable.h"
#include "runtime/config/reader.h"
#include "runtime/config/sources.h"

static void begin_layer(nd_reader *reader, nd_layer layer)
{
    reader->layer = layer;
    memset(reader->state, 0, sizeof reader->state);
    reader->parallelism = reader->mixed_fp8 = false;
    reader->sp_size = 0;
    reader->where[0] = reader->notices[0] = '\0';
}

/* These functions read what follows from a layer. */

/* The newest layer has the key. */
static bool is_given(const nd_reader *r, nd_field_id field)
{
    return r->set_by[field] == r->layer;
}

/* Keeps the one of model.path, config and name that the newest layer gives; two in one layer
 * contradict each other. */
static nd_status derive_model(nd_reader *r)
{
    static const nd_field_id ids[] = {ND_FIELD_model_path, ND_FIELD_model_config,
                                      ND_FIELD_model_name};
    char **const members[] = {&r->config->model.path, &r->config->model.config,
                              &r->config->model.name};
    int chosen = -1;
    for (int i = 0; i < 3; i++) {
        if (!is_given(r, ids[i]) || !**members[i]) {
            continue;
        }
        ND_REFUSE(chosen >= 0,
                  "%smodel.%s is '%s' and model.%s is '%s'; give one of model.path, model.config "
                  "and model.name",
                  r->where, nd_fields[ids[chosen]].key, *members[chosen], nd_fields[ids[i]].key,
                  *members[i]);
        chosen = i;
    }
    for (int i = 0; i < 3 && chosen >= 0; i++) {
        ND_TRY(i != chosen ? nd_text_replace(members[i], "") : ND_OK);
    }
    return ND_OK;
}

/* Drops the default validation file when the newest layer names other training data, and any when
 * the strategy is not to validate. */
static nd_status derive_validation(nd_reader *r)
{
    const nd_config *c = r->config;
    const nd_field *data = &nd_fields[ND_FIELD_data_path];
    const nd_field *validation = &nd_fields[ND_FIELD_data_validation_path];
    const bool replaced = is_given(r, ND_FIELD_data_path) &&
                          !is_given(r, ND_FIELD_data_validation_path) &&
                          strcmp(c->data.path, data->initial) != 0 &&
                          strcmp(c->data.validation_path, validation->initial) == 0;
    return replaced || r->state[ND_STATE_EVAL] == ND_STRATEGY_NO
               ? nd_reader_put(r, ND_FIELD_data_validation_path, "")
               : ND_OK;
}

/* The Trainer's meaning of a strategy, which counts more than the steps beside it. Steps that have
 * no effect are said. The order of flags has no effect. */
static nd_status derive_strategy(nd_reader *r, nd_state state, nd_field_id field, int64_t interval,
                                 const char *flag, const char *steps_flag)
{
    static const char *const values[] = {
        [ND_STRATEGY_NO] = "0", [ND_STRATEGY_STEPS] = "500", [ND_STRATEGY_EPOCH] = "-1"};
    const int strategy = r->state[state];
    const bool given = is_given(r, field);
    if (strategy == 0 || (strategy == ND_STRATEGY_STEPS && (given || interval > 0))) {
        return ND_OK;
    }
    if (given && interval > 0) {
        nd_log_info("%s is %s, so %s %lld has no effect", flag,
                    strategy == ND_STRATEGY_NO ? "no" : "epoch", steps_flag, nd_ll(interval));
    }
    return nd_reader_put(r, field, values[strategy]);
}

/* The newest of train.steps and train.epochs counts. Two in one layer must agree, which
 * nd_config_take_epochs finds. */
static void derive_steps(nd_reader *r)
{
    nd_config *c = r->config;
    const bool steps = is_given(r, ND_FIELD_train_steps);
    const bool epochs = is_given(r, ND_FIELD_train_epochs);
    if (epochs && !steps && c->train.epochs > 0) {
        c->train.steps = 0;
    }
    if (steps && !epochs && c->train.steps > 0) {
        c->train.epochs = 0;
    }
}

static nd_status put_size(nd_reader *r, nd_field_id axis, int64_t size)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", nd_ll(size));
    return nd_reader_put(r, axis, text);
}

static nd_status set_mesh(nd_reader *r, int64_t dp_replicate, int64_t dp_shard)
{
    ND_TRY(put_size(r, ND_FIELD_mesh_dp_replicate, dp_replicate));
    return put_size(r, ND_FIELD_mesh_dp_shard, dp_shard);
}

/* accelerate has an axis of its own for ranks that exchange heads, and refuses it beside cp. */
static nd_status derive_ulysses(nd_reader *r)
{
    const nd_config *c = r->config;
    const bool chosen = is_given(r, ND_FIELD_parallel_cp_comm); /* beside it */
    const bool heads = c->parallel.cp_comm == ND_CP_ULYSSES;
    if (r->sp_size == 0 || (r->sp_size == 1 && (!heads || chosen))) {
        return ND_OK;
    }
    ND_REFUSE(r->layer == ND_LAYER_FLAGS && chosen && !heads,
              "--sp-size %lld asks for parallel.cp_comm ulysses, and --cp-comm for another one; "
              "leave one of them out, or give --cp-size and --ulysses for both exchanges",
              nd_ll(r->sp_size));
    ND_REFUSE(is_given(r, ND_FIELD_mesh_cp) && c->mesh.cp > 1,
              "%sthe sizes of cp, %lld, and sp, %lld, are both above 1; for both give mesh.cp %lld "
              "(--cp-size) and parallel.ulysses %lld (--ulysses)",
              r->where, nd_ll(c->mesh.cp), nd_ll(r->sp_size), nd_ll(c->mesh.cp * r->sp_size),
              nd_ll(r->sp_size));
    ND_TRY(put_size(r, ND_FIELD_mesh_cp, r->sp_size));
    return nd_reader_put(r, ND_FIELD_parallel_cp_comm, "ulysses");
}

/* Shards over the nodes, or replicates between them, as FSDP1's strategies say. */
static nd_status set_mesh_of_strategy(nd_reader *r)
{
    const int sharding = r->state[ND_STATE_SHARDING];
    const int64_t nodes = sharding >= ND_SHARDING_HYBRID ? r->config->launch.nnodes : 1;
    return sharding == ND_SHARDING_NONE ? set_mesh(r, -1, 1) : set_mesh(r, nodes, -1);
}

/* Sets the axes after accelerate's file: from the sizes in parallelism_config (those not given are
 * 1), else from the kind of job. */
static nd_status derive_mesh_of_file(nd_reader *r)
{
    const int distributed = r->state[ND_STATE_DISTRIBUTED];
    bool all_one = true;
    if (!r->parallelism) {
        return distributed == ND_DISTRIBUTED_NO ? set_mesh(r, 1, 1)
               : distributed == ND_DISTRIBUTED_MULTI_GPU || distributed == ND_DISTRIBUTED_MULTI_CPU
                   ? set_mesh(r, -1, 1)
                   : set_mesh_of_strategy(r);
    }
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        if (strcmp(nd_fields[i].section, "mesh") == 0) {
            ND_TRY(is_given(r, (nd_field_id)i) ? ND_OK : nd_reader_put(r, (nd_field_id)i, "1"));
            all_one &= *(const int64_t *)((const char *)r->config + nd_fields[i].offset) == 1;
        }
    }
    if (all_one && r->config->launch.workers != 1) {
        nd_log_info("%sall parallelism sizes are 1; dp_replicate gets all workers", r->where);
        return set_mesh(r, -1, 1);
    }
    return ND_OK;
}

/* Divides the workers as FSDP1's strategy says when it is a flag, unless flags give sizes. */
static nd_status derive_mesh_of_flags(nd_reader *r)
{
    const int sharding = r->state[ND_STATE_SHARDING];
    const nd_layer replicate_by = r->set_by[ND_FIELD_mesh_dp_replicate],
                   shard_by = r->set_by[ND_FIELD_mesh_dp_shard];
    const int64_t replicate = r->config->mesh.dp_replicate, shard = r->config->mesh.dp_shard;
    if (sharding < ND_SHARDING_NONE || replicate_by == ND_LAYER_FLAGS ||
        shard_by == ND_LAYER_FLAGS) {
        return ND_OK;
    }
    ND_TRY(set_mesh_of_strategy(r));
    if ((replicate_by == ND_LAYER_FILE || shard_by == ND_LAYER_FILE) &&
        (replicate != r->config->mesh.dp_replicate || shard != r->config->mesh.dp_shard)) {
        nd_log_info("--fsdp-sharding-strategy %s replaces the mesh of the file: mesh.dp_replicate "
                    "was %lld and is %lld, mesh.dp_shard was %lld and is %lld (-1: what is left)",
                    sharding == ND_SHARDING_NONE ? "NO_SHARD" : "HYBRID_SHARD", nd_ll(replicate),
                    nd_ll(r->config->mesh.dp_replicate), nd_ll(shard),
                    nd_ll(r->config->mesh.dp_shard));
    }
    return ND_OK;
}

/* Refuses keys of the other FP8 backend, which accelerate ignores silently. */
static nd_status check_fp8_backend(const nd_reader *r, int backend)
{
    static const struct {
        nd_field_id field;
        const char *key;
    } delayed[] = {
        {ND_FIELD_fp8_format, "fp8_format"},
        {ND_FIELD_fp8_amax_history_length, "amax_history_len"},
        {ND_FIELD_fp8_amax_compute, "amax_compute_algo"},
        {ND_FIELD_fp8_margin, "margin"},
    };
    for (size_t i = 0; backend == ND_FP8_BACKEND_AO && i < sizeof delayed / sizeof *delayed; i++) {
        ND_REFUSE(is_given(r, delayed[i].field),
                  "%s%s belongs to FP8 backend TE (delayed scaling), but the backend is AO; leave "
                  "it out, or use backend: TE (--fp8-backend TE)",
                  r->where, delayed[i].key);
    }
    return backend == ND_FP8_BACKEND_TE && is_given(r, ND_FIELD_fp8_all_gather) &&
                   r->config->fp8.all_gather
               ? nd_fail(ND_ERR_CONFIG,
                         "%senable_fsdp_float8_all_gather belongs to FP8 backend AO, but the "
                         "backend is TE; leave it out, or use backend: AO (--fp8-backend AO), or "
                         "recipe delayed (--fp8-recipe), which can gather codes",
                         r->where)
               : ND_OK;
}

/*
 * Applies the recipe of accelerate's FP8 backend, unless the same layer names a recipe. Without a
 * backend mixed_precision fp8 means AO, as in accelerate, in a file and as a flag; a backend or a
 * recipe of an earlier layer stays.
 */
static nd_status derive_fp8(nd_reader *r)
{
    nd_config *c = r->config;
    const int named = r->state[ND_STATE_FP8_BACKEND];
    const bool gathers = named ? is_given(r, ND_FIELD_fp8_all_gather)
                               : r->set_by[ND_FIELD_fp8_all_gather] != ND_LAYER_DEFAULT;
    const bool means_ao = r->set_by[ND_FIELD_fp8_recipe] == ND_LAYER_DEFAULT && r->mixed_fp8 &&
                          c->train.precision == ND_PRECISION_FP8;
    const int backend = named ? named : means_ao ? ND_FP8_BACKEND_AO : 0;
    if (backend == 0 || is_given(r, ND_FIELD_fp8_recipe)) {
        return ND_OK;
    }
    ND_TRY(check_fp8_backend(r, backend));
    if (backend == ND_FP8_BACKEND_TE) {
        c->fp8.all_gather = false;
        return nd_reader_put(r, ND_FIELD_fp8_recipe, "delayed");
    }
    c->fp8.all_gather = !gathers || c->fp8.all_gather; /* accelerate's default is true */
    return nd_reader_put(r, ND_FIELD_fp8_recipe, "tensorwise");
}

static nd_status end_layer(nd_reader *r)
{
    const nd_config *c = r->config;
    ND_TRY(derive_model(r));
    ND_TRY(derive_validation(r));
    ND_TRY(derive_strategy(r, ND_STATE_SAVE, ND_FIELD_checkpoint_interval, c->checkpoint.interval,
                           "--save-strategy", "--save-steps"));
    ND_TRY(derive_strategy(r, ND_STATE_EVAL, ND_FIELD_train_validation_interval,
                           c->train.validation_interval, "--eval-strategy", "--eval-steps"));
    derive_steps(r);
    ND_TRY(derive_ulysses(r));
    if (r->layer == ND_LAYER_FLAGS) {
        ND_TRY(derive_mesh_of_flags(r));
    } else if (c->from_accelerate) {
        ND_TRY(derive_mesh_of_file(r));
    }
    ND_TRY(derive_fp8(r));
    if (r->notices[0]) {
        nd_log_info("%swithout a meaning here, ignored: %s", r->where, r->notices);
    }
    return ND_OK;
}

/* After the last layer: refuses what no later value has replaced. Token files hold ids, so a
 * tokenizer that no layer names is "file" for them. */
static nd_status end_layers(nd_reader *r)
{
    nd_config *c = r->config;
    const bool ids = c->data.format == ND_DATA_LLMC || c->data.format == ND_DATA_MEGATRON;
    c->sequence_given = r->set_by[ND_FIELD_train_sequence_length] != ND_LAYER_DEFAULT;
    ND_REFUSE(r->no_fp16[0], "%s", r->no_fp16);
    return ids && r->set_by[ND_FIELD_data_tokenizer] == ND_LAYER_DEFAULT
               ? nd_text_replace(&c->data.tokenizer, "file")
               : ND_OK;
}

/* Configuration files. */

/* Messages begin with the line of the node. */
static void place(nd_reader *r, const nd_yaml_node *node)
{
    snprintf(r->where, sizeof r->where, "%.500s:%d: ", r->file, node->line);
}

static nd_status fail_no_map(const nd_reader *r, const char *what, const nd_yaml_node *node)
{
    return nd_fail(ND_ERR_CONFIG, "%s%s is %s; it must be a map of keys", r->where, what,
                   nd_yaml_kind_name(node->kind));
}

/* A scalar or a list of scalars as text: *out is owned by the caller. */
static nd_status flatten(const nd_reader *r, const nd_yaml_node *node, const char *name, char **out)
{
    nd_text text;
    ND_REFUSE(node->kind == ND_YAML_MAP, "%s%s is a map of keys; it must be a single value",
              r->where, name);
    for (const nd_yaml_node *n = node->first; n; n = n->next) {
        ND_REFUSE(n->kind != ND_YAML_SCALAR,
                  "%s%s holds %s inside a list; its items must be single values", r->where, name,
                  nd_yaml_kind_name(n->kind));
    }
    ND_TRY(nd_text_begin(&text));
    fputs(node->kind == ND_YAML_SCALAR ? node->text : "[", text.out);
    for (const nd_yaml_node *n = node->first; n; n = n->next) {
        fprintf(text.out, "%s%s", n == node->first ? "" : ", ", n->text);
    }
    fputs(node->kind == ND_YAML_SCALAR ? "" : "]", text.out);
    return nd_text_finish(&text, out);
}

/* Native files. */

/* The keys of the section, and the nearest one, which may be of another section. */
static nd_status fail_key(const nd_reader *r, const char *section, const char *key)
{
    const char *of = section, *near = NULL;
    char keys[1024] = "";
    nd_suggest search;
    nd_suggest_init(&search, key);
    for (nd_axis a = 0; a < ND_AXIS_COUNT; a++) {
        ND_REFUSE(nd_axis_reserved(a) && strcmp(section, "mesh") == 0 &&
                      strcmp(key, nd_axis_name(a)) == 0,
                  "%smesh.%s: %s; remove it", r->where, key, nd_axis_reserved(a));
    }
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        const nd_field *f = &nd_fields[i];
        const size_t used = strlen(keys);
        if (strcmp(f->section, section) == 0) {
            nd_suggest_offer(&search, f->key);
            snprintf(keys + used, sizeof keys - used, "%s%s", used ? ", " : "", f->key);
        } else if (!near && strcmp(f->key, key) == 0) {
            near = key;
            of = f->section;
        }
    }
    return nd_fail(ND_ERR_CONFIG,
                   search.best || near ? "%sunknown key '%s.%.80s'; did you mean %s.%s?"
                                       : "%sunknown key '%s.%.80s'; the keys of %s are %s",
                   r->where, section, key, search.best ? section : of,
                   search.best ? search.best
                   : near      ? near
                               : keys);
}

static nd_status fail_section(const nd_reader *r, const char *key)
{
    char names[256] = "";
    nd_suggest search;
    nd_suggest_init(&search, key);
    for (int i = 0; i < ND_SECTION_COUNT; i++) {
        const size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", nd_sections[i].name);
        nd_suggest_offer(&search, nd_sections[i].name);
    }
    nd_names_offer(ND_MAP_TOP, &search);
    for (int m = ND_MAP_FSDP; m < ND_MAP_COUNT; m++) {
        nd_suggest_offer(&search, nd_maps[m].key);
    }
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        ND_REFUSE(strcmp(nd_fields[i].key, key) == 0,
                  "%sunknown section '%.80s'; the key belongs in a section: %s", r->where, key,
                  nd_fields[i].name);
    }
    return nd_fail(ND_ERR_CONFIG,
                   search.best ? "%sunknown section '%.80s'; did you mean %s?"
                               : "%sunknown section '%.80s'; the sections are %s",
                   r->where, key, search.best ? search.best : names);
}

static nd_status read_key(nd_reader *r, const char *section, const nd_yaml_node *node)
{
    char name[128], *text = NULL;
    snprintf(name, sizeof name, "%s.%s", section, node->key);
    const int id = nd_field_find(name);
    const bool is_null = nd_yaml_is_null(node);
    place(r, node);
    if (id < 0) {
        return fail_key(r, section, node->key);
    }
    const nd_field *f = &nd_fields[id];
    const bool is_list = f->type == ND_FIELD_TYPE_LIST || f->type == ND_FIELD_TYPE_CHOICES ||
                         f->type == ND_FIELD_TYPE_PAIR;
    const bool sources = node->kind != ND_YAML_SCALAR && f->type == ND_FIELD_TYPE_SOURCES;
    ND_REFUSE(is_null && !nd_field_is_text(f),
              "%s%s has no value; give one or remove the line (%s)", r->where, name, f->help);
    ND_REFUSE(node->kind == ND_YAML_SEQUENCE && !sources && !is_list,
              "%s%s is a list; it must be a single value (%s)", r->where, name, f->help);
    ND_TRY(sources ? nd_data_sources_flatten(r->file, name, node, &text)
                   : flatten(r, node, name, &text));
    const nd_setting setting = {r->where, name, is_null ? "" : text, sources || node->quoted};
    nd_status status = nd_reader_set(r, (nd_field_id)id, &setting);
    free(text);
    return status;
}

static nd_status read_native(nd_reader *r, const nd_yaml_node *root)
{
    for (const nd_yaml_node *s = root->first; s; s = s->next) {
        char what[128];
        place(r, s);
        if (nd_section_find(s->key) < 0) {
            return fail_section(r, s->key);
        }
        if (nd_yaml_is_null(s)) {
            continue;
        }
        if (s->kind != ND_YAML_MAP) {
            snprintf(what, sizeof what, "section %s", s->key);
            return fail_no_map(r, what, s);
        }
        for (const nd_yaml_node *n = s->first; n; n = n->next) {
            ND_TRY(read_key(r, s->key, n));
        }
    }
    return ND_OK;
}

/* accelerate's files. */

/* Maps of engines that do not exist here; empty ones are taken. */
static bool is_foreign_map(const char *key)
{
    return strcmp(key, "deepspeed_config") == 0 || strcmp(key, "megatron_lm_config") == 0;
}

/* ND_MAP_TOP: none. */
static nd_map_id find_map(const char *key)
{
    nd_map_id m = ND_MAP_FSDP;
    while (m < ND_MAP_COUNT && strcmp(nd_maps[m].key, key) != 0) {
        m++;
    }
    return m < ND_MAP_COUNT ? m : ND_MAP_TOP;
}

static nd_status fail_foreign_key(const nd_reader *r, nd_map_id map, const char *name)
{
    nd_suggest search;
    nd_suggest_init(&search, name);
    nd_names_offer(map, &search);
    for (int m = ND_MAP_FSDP; map == ND_MAP_TOP && m < ND_MAP_COUNT; m++) {
        ND_REFUSE(nd_name_find((nd_map_id)m, name),
                  "%s%.80s is a key of %s; indent it, and the keys like it, below %s:", r->where,
                  name, nd_maps[m].key, nd_maps[m].key);
        nd_suggest_offer(&search, nd_maps[m].key);
    }
    return nd_fail(ND_ERR_CONFIG, "%sunknown key '%s%s%.80s' of an accelerate configuration%s%s%s",
                   r->where, nd_maps[map].key, map == ND_MAP_TOP ? "" : ".", name,
                   search.best ? "; did you mean " : "; remove it", search.best ? search.best : "",
                   search.best ? "?" : "");
}

static nd_status read_foreign_key(nd_reader *r, nd_map_id map, const nd_yaml_node *node)
{
    char *text = NULL;
    const nd_name *name = nd_name_find(map, node->key);
    place(r, node);
    if (!name) {
        return fail_foreign_key(r, map, node->key);
    }
    if (name->kind == ND_NAME_IGNORED) {
        return nd_name_apply(r, name, &(nd_setting){r->where, node->key, "", false});
    }
    if (nd_yaml_is_null(node)) {
        return ND_OK; /* accelerate's value for "not given" */
    }
    ND_REFUSE(name->kind == ND_NAME_SETS && r->set_by[name->field] == r->layer,
              "%s%s: the file gives this key under its other name too; keep one of them", r->where,
              node->key);
    ND_TRY(flatten(r, node, node->key, &text));
    nd_setting setting = {r->where, node->key, text, false};
    nd_status status = nd_name_apply(r, name, &setting);
    free(text);
    return status;
}

static nd_status read_map(nd_reader *r, nd_map_id map, const nd_yaml_node *node)
{
    if (nd_yaml_is_null(node)) {
        return ND_OK;
    }
    if (node->kind != ND_YAML_MAP) {
        place(r, node);
        return fail_no_map(r, node->key, node);
    }
    for (const nd_yaml_node *n = node->first; n; n = n->next) {
        ND_TRY(read_foreign_key(r, map, n));
    }
    return ND_OK;
}

/* Refuses a file that lacks accelerate's own keys; other missing ones get accelerate's values. */
static nd_status complete_accelerate(nd_reader *r)
{
    const int64_t workers = r->config->launch.workers;
    const int distributed = r->state[ND_STATE_DISTRIBUTED];
    ND_REFUSE(distributed == 0,
              "%s has no distributed_type; accelerate's files need one of NO, MULTI_GPU, MULTI_CPU "
              "and FSDP",
              r->file);
    ND_REFUSE(distributed == ND_DISTRIBUTED_NO && workers > 1,
              "%s: distributed_type is NO but num_processes is %lld; use MULTI_GPU or FSDP, or one "
              "process",
              r->file, nd_ll(workers));
    if (distributed == ND_DISTRIBUTED_NO) {
        ND_TRY(nd_reader_put(r, ND_FIELD_launch_workers, "1"));
    }
    if (r->set_by[ND_FIELD_train_precision] != r->layer && !r->no_fp16[0]) {
        ND_TRY(nd_reader_put(r, ND_FIELD_train_precision, "fp32"));
        nd_log_info("%s has no mixed_precision, so the precision is fp32, as in accelerate, unless "
                    "a flag such as --precision bf16 changes it",
                    r->file);
    }
    r->config->from_accelerate = true; /* the reader sets the axes at its end */
    return ND_OK;
}

static nd_status read_accelerate(nd_reader *r, const nd_yaml_node *root)
{
    for (const nd_yaml_node *n = root->first; n; n = n->next) {
        const nd_map_id map = find_map(n->key);
        ND_REFUSE(is_foreign_map(n->key) && !nd_yaml_is_null(n) && n->count > 0,
                  "%s:%d: %s: this engine does not exist here; use distributed_type: FSDP with "
                  "fsdp_config and parallelism_config",
                  r->file, n->line, n->key);
        if (!is_foreign_map(n->key)) {
            ND_TRY(map == ND_MAP_TOP ? read_foreign_key(r, map, n) : read_map(r, map, n));
        }
    }
    return complete_accelerate(r);
}

/* A native file or accelerate's, told apart by its top-level keys. */
static nd_status read_yaml(nd_reader *r, const nd_yaml_node *root)
{
    const nd_yaml_node *native = NULL, *accelerate = NULL;
    ND_REFUSE(root->kind != ND_YAML_MAP, "%s:%d: the file is %s; it must be a map of sections",
              r->file, root->line, nd_yaml_kind_name(root->kind));
    for (const nd_yaml_node *n = root->first; n; n = n->next) {
        native = !native && nd_section_find(n->key) >= 0 ? n : native;
        if (!accelerate && (nd_name_find(ND_MAP_TOP, n->key) || find_map(n->key) != ND_MAP_TOP ||
                            is_foreign_map(n->key))) {
            accelerate = n;
        }
    }
    ND_REFUSE(native && accelerate,
              "%s holds the section %s (line %d) and accelerate's key %s (line %d); write the file "
              "in one of the two forms",
              r->file, native->key, native->line, accelerate->key, accelerate->line);
    return accelerate ? read_accelerate(r, root) : read_native(r, root);
}

static nd_status read_root(nd_reader *r, const nd_yaml_node *root, const char *name)
{
    begin_layer(r, ND_LAYER_FILE);
    r->file = name;
    r->config->from_accelerate = false;
    ND_TRY(read_yaml(r, root));
    snprintf(r->where, sizeof r->where, "%.500s: ", name);
    ND_TRY(end_layer(r));
    return nd_text_replace(&r->config->source, name);
}

nd_status nd_config_read_text(nd_config *config, const char *text, size_t bytes, const char *name)
{
    nd_reader reader = {.config = config};
    nd_yaml_node *root = NULL;
    ND_TRY(nd_yaml_parse(text, bytes, name, &root));
    nd_status status = read_root(&reader, root, name);
    nd_yaml_destroy(root);
    return status == ND_OK ? end_layers(&reader) : status;
}

static nd_status read_file(nd_reader *r, const char *path)
{
    nd_yaml_node *root = NULL;
    char folder[4096];
    ND_REFUSE(!nd_is_printable(path),
              "--config-file %s: the name holds a control character or is not UTF-8; rename the "
              "file, because a run's folder is named after it",
              path);
    bool there = true;
    ND_TRY(path[0] != '/' ? nd_fs_exists(path, &there) : ND_OK);
    ND_REFUSE(!there,
              "--config-file %s does not exist; paths are relative to the working directory, %s",
              path, getcwd(folder, sizeof folder) ? folder : "which cannot be read");
    ND_TRY(nd_yaml_read(path, &root));
    nd_status status = read_root(r, root, path);
    nd_yaml_destroy(root);
    return status;
}

nd_status nd_config_parse(nd_config *config, nd_cli *cli, int argc, char **argv)
{
    const char *config_file = NULL;
    bool there = true;
    nd_reader reader = {.config = config, .notes_origins = true};
    *cli = (nd_cli){.help_topic = ""};
    ND_TRY(nd_flags_scan(argc, argv, &config_file, cli));
    if (cli->help || cli->version) {
        return ND_OK;
    }
    ND_TRY(config_file ? read_file(&reader, config_file) : ND_OK);
    begin_layer(&reader, ND_LAYER_FLAGS);
    ND_TRY(nd_flags_apply(&reader, argc, argv));
    ND_TRY(end_layer(&reader));
    ND_TRY(end_layers(&reader));
    if (reader.set_by[ND_FIELD_data_validation_path] == ND_LAYER_DEFAULT) {
        ND_TRY(nd_fs_exists(config->data.validation_path, &there));
    }
    return there ? ND_OK : nd_text_replace(&config->data.validation_path, "");
}
