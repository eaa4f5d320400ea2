// SPDX-License-Identifier: Apache-2.0
#include "runtime/config/reader.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"

void nd_reader_init(nd_reader *reader, nd_config *config)
{
    memset(reader, 0, sizeof *reader);
    reader->config = config;
    nd_reader_begin(reader, ND_LAYER_FILE);
}

void nd_reader_begin(nd_reader *reader, nd_layer layer)
{
    reader->layer = layer;
    reader->distributed = ND_DISTRIBUTED_UNSET;
    reader->no_shard = reader->hybrid_shard = reader->parallelism = false;
    reader->sp_size = 0;
    reader->fp8_ao = reader->fp8_te = reader->mixed_fp8 = false;
    reader->main_ip[0] = reader->notices[0] = '\0';
    reader->main_port = -1;
}

nd_status nd_reader_set(nd_reader *reader, nd_field_id id, const nd_setting *setting)
{
    ND_TRY(nd_field_set(reader->config, id, setting));
    if (reader->notes_origins) {
        ND_TRY(nd_path_note_origin(reader->config, id, setting));
    }
    reader->set_by[id] = (uint8_t)reader->layer;
    if (id == ND_FIELD_train_precision) {
        reader->no_fp16[0] = '\0';
    }
    return ND_OK;
}

nd_status nd_reader_put(nd_reader *reader, nd_field_id id, const char *text)
{
    nd_setting setting = {"", nd_fields[id].key, text, false};
    return nd_reader_set(reader, id, &setting);
}

void nd_reader_notice(nd_reader *reader, const char *key, const char *hint)
{
    size_t used = strlen(reader->notices);
    snprintf(reader->notices + used, sizeof reader->notices - used, "%s%s%s%s%s", used ? ", " : "",
             key, hint ? " (" : "", hint ? hint : "", hint ? ")" : "");
}

nd_status nd_reader_switch(const nd_setting *setting, bool *out)
{
    if (!nd_bool_parse(setting->text, true, out)) {
        return nd_fail(ND_ERR_CONFIG, "%s%s is '%.80s'; it must be true or false", setting->where,
                       setting->name, setting->text);
    }
    return ND_OK;
}

nd_status nd_reader_refuse(const nd_setting *setting, const char *sentence)
{
    return nd_fail(ND_ERR_CONFIG, "%s%s is %.80s: %s", setting->where, setting->name, setting->text,
                   sentence);
}

/* Keeps the one of model.path, config and name that the newest layer gives; two in one layer
 * contradict each other. */
static nd_status derive_model(nd_reader *reader, const char *where)
{
    static const nd_field_id ids[] = {ND_FIELD_model_path, ND_FIELD_model_config,
                                      ND_FIELD_model_name};
    char **const members[] = {&reader->config->model.path, &reader->config->model.config,
                              &reader->config->model.name};
    int chosen = -1;
    for (int i = 0; i < 3; i++) {
        if (reader->set_by[ids[i]] != reader->layer || !**members[i]) {
            continue;
        }
        if (chosen >= 0) {
            return nd_fail(ND_ERR_CONFIG,
                           "%smodel.%s is '%s' and model.%s is '%s'; give one of model.path, "
                           "model.config and model.name",
                           where, nd_fields[ids[chosen]].key, *members[chosen],
                           nd_fields[ids[i]].key, *members[i]);
        }
        chosen = i;
    }
    for (int i = 0; i < 3 && chosen >= 0; i++) {
        if (i != chosen) {
            ND_TRY(nd_text_replace(members[i], ""));
        }
    }
    return ND_OK;
}

/* Drops the default validation file when the newest layer names other training data. */
static nd_status derive_validation(nd_reader *reader)
{
    char **path = &reader->config->data.validation_path;
    bool newer = reader->set_by[ND_FIELD_data_path] == reader->layer &&
                 reader->set_by[ND_FIELD_data_validation_path] != reader->layer;
    bool usual_data = strcmp(reader->config->data.path, nd_fields[ND_FIELD_data_path].initial) == 0;
    bool usual = strcmp(*path, nd_fields[ND_FIELD_data_validation_path].initial) == 0;
    return newer && usual && !usual_data ? nd_text_replace(path, "") : ND_OK;
}

/* Joins the address that accelerate and torchrun give in two parts; their default port is 29500. */
static nd_status derive_endpoint(nd_reader *reader)
{
    char endpoint[300];
    if (!reader->main_ip[0] && reader->main_port < 0) {
        return ND_OK;
    }
    const char *ip = reader->main_ip[0] ? reader->main_ip : "127.0.0.1";
    bool v6 = strchr(ip, ':') && ip[0] != '[';
    snprintf(endpoint, sizeof endpoint, "%s%s%s:%lld", v6 ? "[" : "", ip, v6 ? "]" : "",
             (long long)(reader->main_port < 0 ? 29500 : reader->main_port));
    return nd_reader_put(reader, ND_FIELD_launch_rdzv_endpoint, endpoint);
}

static nd_status set_mesh(nd_reader *r, const char *dp_replicate, const char *dp_shard)
{
    ND_TRY(nd_reader_put(r, ND_FIELD_mesh_dp_replicate, dp_replicate));
    return nd_reader_put(r, ND_FIELD_mesh_dp_shard, dp_shard);
}

/* accelerate has an axis of its own for ranks that exchange heads, and refuses it beside cp. */
static nd_status derive_ulysses(nd_reader *r, const char *where)
{
    char size[32];
    const nd_config *c = r->config;
    const bool chosen = r->set_by[ND_FIELD_parallel_cp_comm] == r->layer; /* beside it */
    const bool heads = c->parallel.cp_comm == ND_CP_ULYSSES;
    if (r->sp_size == 0 || (r->sp_size == 1 && (!heads || chosen))) {
        return ND_OK;
    }
    if (r->layer == ND_LAYER_FLAGS && chosen && !heads) {
        return nd_fail(ND_ERR_CONFIG,
                       "--sp-size %lld asks for parallel.cp_comm ulysses, and --cp-comm for "
                       "another one; leave one of them out, or give --cp-size and --ulysses for "
                       "both exchanges",
                       nd_ll(r->sp_size));
    }
    if (r->set_by[ND_FIELD_mesh_cp] == r->layer && c->mesh.cp > 1) {
        return nd_fail(ND_ERR_CONFIG,
                       "%sthe sizes of cp, %lld, and sp, %lld, are both above 1; for both give "
                       "mesh.cp %lld (--cp-size) and parallel.ulysses %lld (--ulysses)",
                       where, nd_ll(c->mesh.cp), nd_ll(r->sp_size), nd_ll(c->mesh.cp * r->sp_size),
                       nd_ll(r->sp_size));
    }
    snprintf(size, sizeof size, "%lld", nd_ll(r->sp_size));
    ND_TRY(nd_reader_put(r, ND_FIELD_mesh_cp, size));
    return nd_reader_put(r, ND_FIELD_parallel_cp_comm, "ulysses");
}

/* Sets the axes after accelerate's file: from the sizes in parallelism_config (those not given are
 * 1), else from the kind of job. */
static nd_status derive_mesh_of_file(nd_reader *r, const char *where)
{
    nd_config *c = r->config;
    char nodes[32];
    if (r->parallelism) {
        bool all_one = true;
        for (nd_axis a = 0; a < ND_AXIS_COUNT; a++) {
            nd_field_id field = nd_axis_field(a);
            if (field == ND_FIELD_COUNT) {
                continue;
            }
            if (r->set_by[field] != r->layer) {
                ND_TRY(nd_reader_put(r, field, "1"));
            }
            all_one &= *nd_axis_size(c, a) == 1;
        }
        if (all_one && c->launch.workers != 1) {
            nd_log_info("%sall parallelism sizes are 1; dp_replicate gets all workers", where);
            return set_mesh(r, "-1", "1");
        }
        return ND_OK;
    }
    if (r->distributed == ND_DISTRIBUTED_NO) {
        return set_mesh(r, "1", "1");
    }
    if (r->distributed == ND_DISTRIBUTED_REPLICATE || r->no_shard) {
        return set_mesh(r, "-1", "1");
    }
    snprintf(nodes, sizeof nodes, "%lld",
             (long long)(r->hybrid_shard ? c->launch.nnodes : 1)); /* replicate between nodes */
    return set_mesh(r, nodes, "-1");
}

/* Divides the workers as FSDP1's strategy says when it is a flag, unless flags give sizes. */
static nd_status derive_mesh_of_flags(nd_reader *r)
{
    bool sized = r->set_by[ND_FIELD_mesh_dp_replicate] == ND_LAYER_FLAGS ||
                 r->set_by[ND_FIELD_mesh_dp_shard] == ND_LAYER_FLAGS;
    char nodes[32];
    if (sized || !(r->no_shard || r->hybrid_shard)) {
        return ND_OK;
    }
    snprintf(nodes, sizeof nodes, "%lld", (long long)r->config->launch.nnodes);
    bool of_file = r->set_by[ND_FIELD_mesh_dp_replicate] == ND_LAYER_FILE ||
                   r->set_by[ND_FIELD_mesh_dp_shard] == ND_LAYER_FILE;
    int64_t replicate = r->config->mesh.dp_replicate, shard = r->config->mesh.dp_shard;
    ND_TRY(r->no_shard ? set_mesh(r, "-1", "1") : set_mesh(r, nodes, "-1"));
    if (of_file &&
        (replicate != r->config->mesh.dp_replicate || shard != r->config->mesh.dp_shard)) {
        nd_log_info("--fsdp-sharding-strategy %s replaces the mesh of the file: mesh.dp_replicate "
                    "was %lld and is %lld, mesh.dp_shard was %lld and is %lld (-1: what is left)",
                    r->no_shard ? "NO_SHARD" : "HYBRID_SHARD", (long long)replicate,
                    (long long)r->config->mesh.dp_replicate, (long long)shard,
                    (long long)r->config->mesh.dp_shard);
    }
    return ND_OK;
}

static nd_status derive_mesh(nd_reader *reader, const char *where)
{
    ND_TRY(derive_ulysses(reader, where));
    if (reader->layer == ND_LAYER_FLAGS) {
        return derive_mesh_of_flags(reader);
    }
    return reader->config->from_accelerate ? derive_mesh_of_file(reader, where) : ND_OK;
}

/* Refuses keys of the other FP8 backend, which accelerate ignores silently. */
static nd_status check_fp8_backend(const nd_reader *r, const char *where)
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
    for (size_t i = 0; r->fp8_ao && i < sizeof delayed / sizeof *delayed; i++) {
        if (r->set_by[delayed[i].field] == r->layer) {
            return nd_fail(ND_ERR_CONFIG,
                           "%s%s belongs to FP8 backend TE (delayed scaling), but the backend is "
                           "AO; leave it out, or use backend: TE (--fp8-backend TE)",
                           where, delayed[i].key);
        }
    }
    if (r->fp8_te && r->set_by[ND_FIELD_fp8_all_gather] == r->layer && r->config->fp8.all_gather) {
        return nd_fail(ND_ERR_CONFIG,
                       "%senable_fsdp_float8_all_gather belongs to FP8 backend AO, but the backend "
                       "is TE; leave it out, or use backend: AO (--fp8-backend AO), or recipe "
                       "delayed (--fp8-recipe), which can gather codes",
                       where);
    }
    return ND_OK;
}

/*
 * Applies the recipe of accelerate's FP8 backend, unless the same layer names a recipe. Without a
 * backend mixed_precision fp8 means AO, as in accelerate, in a file and as a flag; a backend or a
 * recipe of an earlier layer stays.
 */
static nd_status derive_fp8(nd_reader *reader, const char *where)
{
    nd_config *c = reader->config;
    bool layer_gathers = reader->set_by[ND_FIELD_fp8_all_gather] == reader->layer;
    bool gather_set = reader->set_by[ND_FIELD_fp8_all_gather] != ND_LAYER_DEFAULT;
    bool recipe_set = reader->set_by[ND_FIELD_fp8_recipe] != ND_LAYER_DEFAULT;
    bool backend_named = reader->fp8_ao || reader->fp8_te;
    if (reader->set_by[ND_FIELD_fp8_recipe] == reader->layer) {
        return ND_OK;
    }
    if (!backend_named && !recipe_set && reader->mixed_fp8 &&
        c->train.precision == ND_PRECISION_FP8) {
        reader->fp8_ao = true;
    }
    ND_TRY(check_fp8_backend(reader, where));
    if (reader->fp8_te) {
        ND_TRY(nd_reader_put(reader, ND_FIELD_fp8_recipe, "delayed"));
        c->fp8.all_gather = false;
    } else if (reader->fp8_ao) {
        ND_TRY(nd_reader_put(reader, ND_FIELD_fp8_recipe, "tensorwise"));
        bool keeps = backend_named ? layer_gathers : gather_set;
        c->fp8.all_gather = keeps ? c->fp8.all_gather : true; /* accelerate's default */
    }
    return ND_OK;
}

/* Sets data.tokenizer to file when the format holds ids and no layer names a tokenizer. */
static nd_status derive_tokenizer(const nd_reader *reader)
{
    nd_data_format format = reader->config->data.format;
    bool ids = format == ND_DATA_LLMC || format == ND_DATA_MEGATRON;
    bool unnamed = reader->set_by[ND_FIELD_data_tokenizer] == ND_LAYER_DEFAULT;
    return ids && unnamed ? nd_text_replace(&reader->config->data.tokenizer, "file") : ND_OK;
}

/* The newest of train.steps and train.epochs counts. Two in one layer must agree, which
 * nd_config_take_epochs finds. */
static void derive_steps(nd_reader *reader)
{
    nd_config *c = reader->config;
    bool steps = reader->set_by[ND_FIELD_train_steps] == reader->layer;
    bool epochs = reader->set_by[ND_FIELD_train_epochs] == reader->layer;
    if (epochs && !steps && c->train.epochs > 0) {
        c->train.steps = 0;
    }
    if (steps && !epochs && c->train.steps > 0) {
        c->train.epochs = 0;
    }
}

/* The Trainer's meaning of a strategy, which counts more than the steps beside it. Steps that have
 * no effect are said. */
static nd_status derive_strategy(nd_reader *r, nd_strategy strategy, nd_field_id field,
                                 const char *flag, const char *steps_flag)
{
    static const char *const values[] = {
        [ND_STRATEGY_NO] = "0", [ND_STRATEGY_STEPS] = "500", [ND_STRATEGY_EPOCH] = "-1"};
    static const char *const names[] = {[ND_STRATEGY_NO] = "no", [ND_STRATEGY_EPOCH] = "epoch"};
    const int64_t interval = field == ND_FIELD_checkpoint_interval
                                 ? r->config->checkpoint.interval
                                 : r->config->train.validation_interval;
    const bool given = r->set_by[field] == r->layer;
    if (strategy == ND_STRATEGY_UNSET ||
        (strategy == ND_STRATEGY_STEPS && (given || interval > 0))) {
        return ND_OK;
    }
    if (given && interval > 0) {
        nd_log_info("%s is %s, so %s %lld has no effect", flag, names[strategy], steps_flag,
                    (long long)interval);
    }
    return nd_reader_put(r, field, values[strategy]);
}

static nd_status derive_strategies(nd_reader *r)
{
    ND_TRY(derive_strategy(r, r->save_strategy, ND_FIELD_checkpoint_interval, "--save-strategy",
                           "--save-steps"));
    ND_TRY(derive_strategy(r, r->eval_strategy, ND_FIELD_train_validation_interval,
                           "--eval-strategy", "--eval-steps"));
    return r->eval_strategy == ND_STRATEGY_NO ? nd_reader_put(r, ND_FIELD_data_validation_path, "")
                                              : ND_OK;
}

nd_status nd_reader_end(nd_reader *reader, const char *where)
{
    ND_TRY(derive_model(reader, where));
    ND_TRY(derive_validation(reader));
    ND_TRY(derive_strategies(reader));
    derive_steps(reader);
    ND_TRY(derive_mesh(reader, where));
    ND_TRY(derive_endpoint(reader));
    ND_TRY(derive_fp8(reader, where));
    if (reader->notices[0]) {
        nd_log_info("%swithout a meaning here, ignored: %s", where, reader->notices);
    }
    return ND_OK;
}

nd_status nd_reader_finish(const nd_reader *reader)
{
    return reader->no_fp16[0] ? nd_fail(ND_ERR_CONFIG, "%s", reader->no_fp16)
                              : derive_tokenizer(reader);
}
