// SPDX-License-Identifier: Apache-2.0
/*
 * accelerate's configuration files: a fixed set of keys (accelerate.def), each mapped to a field,
 * refused, or named in a notice.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "runtime/base/log.h"
#include "runtime/base/suggest.h"
#include "runtime/config/reader.h"

/* The file itself and its sub-maps. */
typedef enum nd_accelerate_map {
    ND_ACCELERATE_TOP = 0,
    ND_ACCELERATE_FSDP,
    ND_ACCELERATE_PARALLELISM,
    ND_ACCELERATE_FP8,
    ND_ACCELERATE_DYNAMO,
    ND_ACCELERATE_MAP_COUNT
} nd_accelerate_map;

struct nd_accelerate_key {
    nd_accelerate_map map;
    const char *name;
    nd_field_id field;    /* ND_FIELD_COUNT: none */
    const char *values;   /* the only values accepted, or NULL */
    const char *sentence; /* why other values are refused; of an ignored key: what to do, or NULL */
    nd_status (*apply)(nd_reader *reader, const nd_accelerate_key *key, const nd_setting *setting);
};

static nd_status apply_distributed_type(nd_reader *r, const nd_accelerate_key *key,
                                        const nd_setting *setting)
{
    if (strcasecmp(setting->text, "NO") == 0) {
        r->distributed = ND_DISTRIBUTED_NO;
    } else if (strcmp(setting->text, "MULTI_GPU") == 0) {
        r->distributed = ND_DISTRIBUTED_REPLICATE;
    } else if (strcmp(setting->text, "MULTI_CPU") == 0) {
        r->distributed = ND_DISTRIBUTED_REPLICATE;
        return nd_reader_put(r, ND_FIELD_launch_device, "cpu");
    } else if (strcmp(setting->text, "FSDP") == 0) {
        r->distributed = ND_DISTRIBUTED_FSDP;
    } else {
        return nd_reader_refuse(
            setting, "supported are NO, MULTI_GPU, MULTI_CPU and FSDP; for DeepSpeed's or "
                     "Megatron's sharding use FSDP with a parallelism_config");
    }
    return ND_OK;
}

/* Notes why FP16 is refused. A later value may still replace it, so nd_reader_finish fails. */
static void refuse_later(nd_reader *r, const nd_setting *setting)
{
    snprintf(r->no_fp16, sizeof r->no_fp16,
             "%.600s%s is %.80s: FP16 is not supported; use bf16, which needs no loss scaling",
             setting->where, setting->name, setting->text);
}

static nd_status apply_precision(nd_reader *r, const nd_accelerate_key *key,
                                 const nd_setting *setting)
{
    if (strcasecmp(setting->text, "fp16") == 0) {
        refuse_later(r, setting);
        return ND_OK;
    }
    r->mixed_fp8 = strcasecmp(setting->text, "fp8") == 0;
    bool value = false;
    bool off =
        nd_bool_parse(setting->text, false, &value) && !value; /* a bare `no` in YAML is false */
    nd_setting ours = *setting;
    ours.text = off ? "fp32" : setting->text;
    return nd_reader_set(r, ND_FIELD_train_precision, &ours);
}

/* The key of accelerate's first versions. */
static nd_status apply_fp16(nd_reader *r, const nd_accelerate_key *key, const nd_setting *setting)
{
    bool on = false;
    ND_TRY(nd_reader_switch(setting, &on));
    if (on) {
        refuse_later(r, setting);
    }
    return ND_OK;
}

static nd_status apply_use_cpu(nd_reader *r, const nd_accelerate_key *key,
                               const nd_setting *setting)
{
    bool cpu = false;
    ND_TRY(nd_reader_switch(setting, &cpu));
    return cpu ? nd_reader_put(r, ND_FIELD_launch_device, "cpu") : ND_OK;
}

static nd_status apply_num_processes(nd_reader *r, const nd_accelerate_key *key,
                                     const nd_setting *setting)
{
    if (strcmp(setting->text, "-1") == 0) {
        return ND_OK; /* accelerate's value for "not given" */
    }
    return nd_reader_set(r, ND_FIELD_launch_workers, setting);
}

static nd_status apply_main_ip(nd_reader *r, const nd_accelerate_key *key,
                               const nd_setting *setting)
{
    if (strlen(setting->text) >= sizeof r->main_ip) {
        return nd_reader_refuse(setting, "the name is too long");
    }
    memcpy(r->main_ip, setting->text, strlen(setting->text) + 1);
    return ND_OK;
}

static nd_status apply_main_port(nd_reader *r, const nd_accelerate_key *key,
                                 const nd_setting *setting)
{
    int64_t port = 0;
    if (!nd_int_parse(setting->text, &port) || port < 0 || port > 65535) {
        return nd_reader_refuse(setting, "it must be a port, 0 to 65535");
    }
    r->main_port = port;
    return ND_OK;
}

/* A boolean (FSDP2) or the name or number of an FSDP1 strategy. */
static nd_status apply_reshard(nd_reader *r, const nd_accelerate_key *key,
                               const nd_setting *setting)
{
    static const struct {
        const char *name, *number;
        bool reshard, hybrid, none;
    } strategies[] = {
        {"FULL_SHARD", "1", true, false, false},
        {"SHARD_GRAD_OP", "2", false, false, false},
        {"NO_SHARD", "3", false, false, true},
        {"HYBRID_SHARD", "4", true, true, false},
        {"HYBRID_SHARD_ZERO2", "5", false, true, false},
    };
    bool reshard = false;
    if (!nd_bool_parse(setting->text, false, &reshard)) {
        int found = -1;
        for (int i = 0; i < 5; i++) {
            if (strcasecmp(setting->text, strategies[i].name) == 0 ||
                strcmp(setting->text, strategies[i].number) == 0) {
                found = i;
            }
        }
        if (found < 0) {
            return nd_reader_refuse(
                setting, "it must be true, false, or FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, "
                         "HYBRID_SHARD or HYBRID_SHARD_ZERO2");
        }
        reshard = strategies[found].reshard;
        r->hybrid_shard = strategies[found].hybrid;
        r->no_shard = strategies[found].none;
    }
    return nd_reader_put(r, ND_FIELD_parallel_reshard_after_forward, reshard ? "true" : "false");
}

static nd_status apply_recompute(nd_reader *r, const nd_accelerate_key *key,
                                 const nd_setting *setting)
{
    bool full = false;
    ND_TRY(nd_reader_switch(setting, &full));
    return nd_reader_put(r, ND_FIELD_parallel_recompute, full ? "full" : "none");
}

static nd_status parse_size(const nd_setting *setting, int64_t *out)
{
    if (!nd_int_parse(setting->text, out) || *out < 1) {
        return nd_fail(ND_ERR_CONFIG, "%s%s is %.80s; it must be 1 or more", setting->where,
                       setting->name, setting->text);
    }
    return ND_OK;
}

static nd_status apply_size(nd_reader *r, const nd_accelerate_key *key, const nd_setting *setting)
{
    int64_t size = 0;
    ND_TRY(parse_size(setting, &size));
    r->parallelism = true;
    return nd_reader_set(r, key->field, setting);
}

/* Becomes mesh.cp once the layer's parallelism_config_cp_size is known. */
static nd_status apply_sp_size(nd_reader *r, const nd_accelerate_key *key,
                               const nd_setting *setting)
{
    r->parallelism = true;
    return parse_size(setting, &r->sp_size);
}

static nd_status apply_cp_comm(nd_reader *r, const nd_accelerate_key *key,
                               const nd_setting *setting)
{
    nd_setting ours = *setting;
    if (strcmp(setting->text, "alltoall") == 0) {
        ours.text = "ring"; /* accelerate's alltoall passes keys and values around */
    } else if (strcmp(setting->text, "allgather") != 0) {
        return nd_reader_refuse(setting, "it must be allgather or alltoall");
    }
    return nd_reader_set(r, ND_FIELD_parallel_cp_comm, &ours);
}

static nd_status apply_fp8_backend(nd_reader *r, const nd_accelerate_key *key,
                                   const nd_setting *setting)
{
    r->fp8_ao = strcasecmp(setting->text, "AO") == 0;
    r->fp8_te = strcasecmp(setting->text, "TE") == 0;
    return r->fp8_ao || r->fp8_te
               ? ND_OK
               : nd_reader_refuse(setting,
                                  "supported are AO (recipe tensorwise) and TE (recipe delayed)");
}

static const nd_accelerate_key keys[] = {
#define ND_KEY_FIELD(map, key, section, name)                                                      \
    {ND_ACCELERATE_##map, #key, ND_FIELD_##section##_##name, NULL, NULL, NULL},
#define ND_KEY_ONLY(map, key, values, sentence)                                                    \
    {ND_ACCELERATE_##map, #key, ND_FIELD_COUNT, values, sentence, NULL},
#define ND_KEY_IGNORED(map, key) {ND_ACCELERATE_##map, #key, ND_FIELD_COUNT, NULL, NULL, NULL},
#define ND_KEY_HINT(map, key, sentence)                                                            \
    {ND_ACCELERATE_##map, #key, ND_FIELD_COUNT, NULL, sentence, NULL},
#define ND_KEY_CALL(map, key, function, section, name)                                             \
    {ND_ACCELERATE_##map, #key, ND_FIELD_##section##_##name, NULL, NULL, function},
#include "runtime/config/accelerate.def"
};
enum { KEY_COUNT = sizeof keys / sizeof *keys };

/* The key has no meaning here; a notice names it. */
static bool is_ignored(const nd_accelerate_key *key)
{
    return !key->apply && !key->values && key->field == ND_FIELD_COUNT;
}

/* As a flag, the key may stand without a value. */
static bool is_switch(const nd_accelerate_key *key)
{
    bool sets_bool =
        key->field < ND_FIELD_COUNT && nd_fields[key->field].type == ND_FIELD_TYPE_BOOL;
    return is_ignored(key) || (key->values && strstr(key->values, "false")) ||
           key->apply == apply_recompute || key->apply == apply_use_cpu ||
           key->apply == apply_fp16 || (sets_bool && key->apply != apply_reshard);
}

/* Sub-maps. accelerate adds the prefix to a key that lacks it, except in parallelism_config. */
static const struct {
    const char *key, *prefix;
} maps[ND_ACCELERATE_MAP_COUNT] = {
    [ND_ACCELERATE_TOP] = {"", ""},
    [ND_ACCELERATE_FSDP] = {"fsdp_config", "fsdp_"},
    [ND_ACCELERATE_PARALLELISM] = {"parallelism_config", ""},
    [ND_ACCELERATE_FP8] = {"fp8_config", "fp8_"},
    [ND_ACCELERATE_DYNAMO] = {"dynamo_config", "dynamo_"},
};

/* Sub-maps of engines that do not exist here; empty ones are accepted. */
static const char *const foreign_maps[] = {"deepspeed_config", "megatron_lm_config"};

static bool is_foreign(const char *key)
{
    for (int i = 0; i < 2; i++) {
        if (strcmp(foreign_maps[i], key) == 0) {
            return true;
        }
    }
    return false;
}

static int find_map(const char *key)
{
    for (int m = ND_ACCELERATE_FSDP; m < ND_ACCELERATE_MAP_COUNT; m++) {
        if (strcmp(maps[m].key, key) == 0) {
            return m;
        }
    }
    return -1;
}

static const nd_accelerate_key *find_key(nd_accelerate_map map, const char *name)
{
    size_t prefix = strlen(maps[map].prefix);
    for (int i = 0; i < KEY_COUNT; i++) {
        if (keys[i].map == map && (strcmp(keys[i].name, name) == 0 ||
                                   (prefix && strcmp(keys[i].name + prefix, name) == 0))) {
            return &keys[i];
        }
    }
    return NULL;
}

bool nd_accelerate_is_top_key(const char *key)
{
    return find_key(ND_ACCELERATE_TOP, key) || find_map(key) >= 0 || is_foreign(key);
}

static bool one_of(const char *values, const char *text)
{
    bool value = false;
    if (nd_bool_parse(text, false, &value)) {
        text = value ? "true" : "false";
    }
    size_t length = strlen(text);
    for (const char *v = values; *v;) {
        size_t n = strcspn(v, "|");
        if (n == length && strncasecmp(v, text, n) == 0) {
            return true;
        }
        v += n + (v[n] == '|');
    }
    return false;
}

nd_status nd_accelerate_apply(nd_reader *reader, const nd_accelerate_key *key,
                              const nd_setting *setting)
{
    if (key->apply) {
        return key->apply(reader, key, setting);
    }
    if (key->values) {
        return one_of(key->values, setting->text) ? ND_OK
                                                  : nd_reader_refuse(setting, key->sentence);
    }
    if (is_ignored(key)) {
        nd_reader_notice(reader, setting->name, key->sentence);
        return ND_OK;
    }
    return nd_reader_set(reader, key->field, setting);
}

const nd_accelerate_key *nd_accelerate_find_flag(const char *flag, bool *is_bool)
{
    for (int i = 0; i < KEY_COUNT; i++) {
        const nd_accelerate_key *k = &keys[i];
        if (strcmp(k->name, flag) == 0) {
            *is_bool = is_switch(k);
            return k;
        }
    }
    return NULL;
}

void nd_accelerate_each_flag(void (*offer)(void *, const char *), void *context)
{
    for (int i = 0; i < KEY_COUNT; i++) {
        offer(context, keys[i].name);
    }
}

void nd_accelerate_each_top_key(void (*offer)(void *, const char *), void *context)
{
    for (int i = 0; i < KEY_COUNT; i++) {
        if (keys[i].map == ND_ACCELERATE_TOP) {
            offer(context, keys[i].name);
        }
    }
    for (int m = ND_ACCELERATE_FSDP; m < ND_ACCELERATE_MAP_COUNT; m++) {
        offer(context, maps[m].key);
    }
}

static nd_status unknown_key(nd_accelerate_map map, const char *where, const char *name)
{
    for (int m = ND_ACCELERATE_FSDP; map == ND_ACCELERATE_TOP && m < ND_ACCELERATE_MAP_COUNT; m++) {
        if (find_key((nd_accelerate_map)m, name)) {
            return nd_fail(ND_ERR_CONFIG,
                           "%s%.80s is a key of %s; indent it, and the keys like it, below %s:",
                           where, name, maps[m].key, maps[m].key);
        }
    }
    nd_suggest search;
    nd_suggest_init(&search, name);
    for (int i = 0; i < KEY_COUNT; i++) {
        if (keys[i].map == map) {
            nd_suggest_offer(&search, keys[i].name);
            nd_suggest_offer(&search, keys[i].name + strlen(maps[map].prefix));
        }
    }
    for (int m = ND_ACCELERATE_FSDP; map == ND_ACCELERATE_TOP && m < ND_ACCELERATE_MAP_COUNT; m++) {
        nd_suggest_offer(&search, maps[m].key);
    }
    return nd_fail(ND_ERR_CONFIG, "%sunknown key '%s%s%.80s' of an accelerate configuration%s%s%s",
                   where, maps[map].key, map == ND_ACCELERATE_TOP ? "" : ".", name,
                   search.best ? "; did you mean " : "; remove it", search.best ? search.best : "",
                   search.best ? "?" : "");
}

static nd_status read_key(nd_reader *reader, nd_accelerate_map map, const nd_yaml_node *node,
                          const char *file)
{
    char where[600];
    snprintf(where, sizeof where, "%.500s:%d: ", file, node->line);
    const nd_accelerate_key *key = find_key(map, node->key);
    if (!key) {
        return unknown_key(map, where, node->key);
    }
    if (is_ignored(key)) {
        nd_reader_notice(reader, node->key, key->sentence);
        return ND_OK;
    }
    if (nd_yaml_is_null(node)) {
        return ND_OK; /* accelerate's value for "not given" */
    }
    bool plain = !key->apply && !key->values;
    if (plain && reader->set_by[key->field] == reader->layer) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s%s: the file gives this key under its other name too; keep one of them",
                       where, node->key);
    }
    char *text = NULL;
    ND_TRY(nd_reader_flatten(node, where, node->key, &text));
    nd_setting setting = {where, node->key, text, false};
    nd_status status = nd_accelerate_apply(reader, key, &setting);
    free(text);
    return status;
}

static nd_status read_map(nd_reader *reader, nd_accelerate_map map, const nd_yaml_node *node,
                          const char *file)
{
    if (nd_yaml_is_null(node)) {
        return ND_OK;
    }
    if (node->kind != ND_YAML_MAP) {
        return nd_fail(ND_ERR_CONFIG, "%s:%d: %s is %s; it must be a map of keys", file, node->line,
                       node->key, nd_yaml_kind_name(node->kind));
    }
    for (const nd_yaml_node *n = node->first; n; n = n->next) {
        ND_TRY(read_key(reader, map, n, file));
    }
    return ND_OK;
}

nd_status nd_read_accelerate(nd_reader *reader, const nd_yaml_node *root, const char *file)
{
    for (const nd_yaml_node *n = root->first; n; n = n->next) {
        int map = find_map(n->key);
        if (map >= 0) {
            ND_TRY(read_map(reader, (nd_accelerate_map)map, n, file));
        } else if (is_foreign(n->key)) {
            if (!nd_yaml_is_null(n) && n->count > 0) {
                return nd_fail(ND_ERR_CONFIG,
                               "%s:%d: %s: this engine does not exist here; use distributed_type: "
                               "FSDP with fsdp_config and parallelism_config",
                               file, n->line, n->key);
            }
        } else {
            ND_TRY(read_key(reader, ND_ACCELERATE_TOP, n, file));
        }
    }
    nd_config *c = reader->config;
    if (reader->distributed == ND_DISTRIBUTED_UNSET) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s has no distributed_type; accelerate's files need one of NO, MULTI_GPU, "
                       "MULTI_CPU and FSDP",
                       file);
    }
    if (reader->distributed == ND_DISTRIBUTED_NO) {
        if (c->launch.workers > 1) {
            return nd_fail(ND_ERR_CONFIG,
                           "%s: distributed_type is NO but num_processes is %lld; use MULTI_GPU or "
                           "FSDP, or one process",
                           file, (long long)c->launch.workers);
        }
        ND_TRY(nd_reader_put(reader, ND_FIELD_launch_workers, "1"));
    }
    if (reader->set_by[ND_FIELD_train_precision] != reader->layer && !reader->no_fp16[0]) {
        ND_TRY(nd_reader_put(reader, ND_FIELD_train_precision, "fp32"));
        nd_log_info(
            "%s has no mixed_precision, so the precision is fp32, as in accelerate, unless a "
            "flag such as --precision bf16 changes it",
            file);
    }
    c->from_accelerate = true; /* nd_reader_end sets the axes */
    return ND_OK;
}
