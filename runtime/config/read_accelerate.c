// SPDX-License-Identifier: Apache-2.0
/* accelerate's configuration files: a fixed set of keys, each mapped to a field, refused, or named
 * in a notice. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "runtime/base/log.h"
#include "runtime/base/suggest.h"
#include "runtime/config/accelerate.h"

/* Sub-maps; accelerate adds the prefix where a key lacks it, except for parallelism. */
static const struct {
    const char *key, *prefix;
} maps[ND_ACCELERATE_MAP_COUNT] = {
    [ND_ACCELERATE_TOP] = {"", ""},
    [ND_ACCELERATE_FSDP] = {"fsdp_config", "fsdp_"},
    [ND_ACCELERATE_PARALLELISM] = {"parallelism_config", ""},
    [ND_ACCELERATE_FP8] = {"fp8_config", "fp8_"},
    [ND_ACCELERATE_DYNAMO] = {"dynamo_config", "dynamo_"},
};

/* deepspeed_config and the like: sub-maps of engines that do not exist here; empty ones are
 * harmless. */
static const char *const foreign_maps[] = {"deepspeed_config", "megatron_lm_config",
                                           "mpirun_config"};

static bool is_foreign(const char *key)
{
    for (int i = 0; i < 3; i++) {
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
    for (int i = 0; i < nd_accelerate_key_count; i++) {
        if (nd_accelerate_keys[i].map == map &&
            (strcmp(nd_accelerate_keys[i].name, name) == 0 ||
             (prefix && strcmp(nd_accelerate_keys[i].name + prefix, name) == 0))) {
            return &nd_accelerate_keys[i];
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
                              const nd_given *given)
{
    if (key->take) {
        return key->take(reader, key, given);
    }
    if (key->values) {
        return one_of(key->values, given->text) ? ND_OK : nd_reader_refuse(given, key->sentence);
    }
    if (nd_accelerate_is_idle(key)) {
        nd_reader_notice(reader, given->name);
        return ND_OK;
    }
    return nd_reader_set(reader, key->field, given);
}

const nd_accelerate_key *nd_accelerate_find_flag(const char *flag, bool *is_bool)
{
    for (int i = 0; i < nd_accelerate_key_count; i++) {
        const nd_accelerate_key *k = &nd_accelerate_keys[i];
        if (strcmp(k->name, flag) == 0) {
            *is_bool = nd_accelerate_is_switch(k);
            return k;
        }
    }
    return NULL;
}

void nd_accelerate_each_flag(void (*offer)(void *, const char *), void *context)
{
    for (int i = 0; i < nd_accelerate_key_count; i++) {
        offer(context, nd_accelerate_keys[i].name);
    }
}

void nd_accelerate_each_top_key(void (*offer)(void *, const char *), void *context)
{
    for (int i = 0; i < nd_accelerate_key_count; i++) {
        if (nd_accelerate_keys[i].map == ND_ACCELERATE_TOP) {
            offer(context, nd_accelerate_keys[i].name);
        }
    }
    for (int m = ND_ACCELERATE_FSDP; m < ND_ACCELERATE_MAP_COUNT; m++) {
        offer(context, maps[m].key);
    }
}

static nd_status unknown_key(nd_accelerate_map map, const char *where, const char *name)
{
    nd_suggest search;
    nd_suggest_init(&search, name);
    for (int i = 0; i < nd_accelerate_key_count; i++) {
        if (nd_accelerate_keys[i].map == map) {
            nd_suggest_offer(&search, nd_accelerate_keys[i].name);
            nd_suggest_offer(&search, nd_accelerate_keys[i].name + strlen(maps[map].prefix));
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
    if (nd_accelerate_is_idle(key)) {
        nd_reader_notice(reader, node->key);
        return ND_OK;
    }
    if (nd_yaml_is_null(node)) {
        return ND_OK; /* accelerate's "not said" */
    }
    bool plain = !key->take && !key->values;
    if (plain && reader->set_by[key->field] == reader->layer) {
        return nd_fail(ND_ERR_CONFIG,
                       "%s%s: the file has this already under its other name, and may mean either; "
                       "keep one of them",
                       where, node->key);
    }
    char *text = NULL;
    ND_TRY(nd_reader_flatten(node, where, node->key, &text));
    nd_given given = {where, node->key, text, false};
    nd_status status = nd_accelerate_apply(reader, key, &given);
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

static nd_status set_mesh(nd_reader *r, const char *dp_replicate, const char *dp_shard)
{
    ND_TRY(nd_reader_put(r, ND_FIELD_mesh_dp_replicate, dp_replicate));
    return nd_reader_put(r, ND_FIELD_mesh_dp_shard, dp_shard);
}

/* Axes from sizes where there are some (those not given are 1), else from the kind of job. */
static nd_status settle_mesh(nd_reader *r, const char *file)
{
    nd_config *c = r->config;
    char nodes[32];
    if (r->parallelism) {
        static const nd_field_id axes[] = {ND_FIELD_mesh_dp_replicate, ND_FIELD_mesh_dp_shard,
                                           ND_FIELD_mesh_cp, ND_FIELD_mesh_tp};
        for (int i = 0; i < 4; i++) {
            if (r->set_by[axes[i]] != r->layer) {
                ND_TRY(nd_reader_put(r, axes[i], "1"));
            }
        }
        if (c->mesh.dp_replicate == 1 && c->mesh.dp_shard == 1 && c->mesh.cp == 1 &&
            c->mesh.tp == 1 && c->launch.workers != 1) {
            nd_log_info("%s: all parallelism sizes are 1: dp_replicate takes all workers", file);
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
    if (reader->distributed == ND_DISTRIBUTED_UNSAID) {
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
    c->from_accelerate = true;
    /* accelerate's FP8 without a backend is torchao's. */
    if (c->train.precision == ND_PRECISION_FP8 && !reader->fp8_te) {
        reader->fp8_ao = true;
    }
    return settle_mesh(reader, file);
}
