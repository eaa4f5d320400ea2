// SPDX-License-Identifier: Apache-2.0
/* Applies the flags of other programs (flags.def) and accelerate's keys (accelerate.def). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/config/reader.h"

/* The value among "a|b=c" that is the text, in upper or lower case; NULL: none. */
static const char *find_value(const char *values, const char *text)
{
    while (values) {
        const size_t n = strcspn(values, "=|");
        if (n == strlen(text) && strncasecmp(values, text, n) == 0) {
            return values;
        }
        const char *next = strchr(values, '|');
        values = next ? next + 1 : NULL;
    }
    return NULL;
}

/* The row lists true or false, which may be written in other words too. */
static bool lists_switch(const nd_name *row)
{
    return find_value(row->values, "true") || find_value(row->values, "false");
}

static nd_status apply_field(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    return nd_reader_set(r, row->field, setting);
}

/* Takes one of the values of the row: "theirs" as it is, "theirs=ours" for its field. */
static nd_status apply_words(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    bool on = false;
    const bool is_switch = lists_switch(row) && nd_bool_parse(setting->text, true, &on);
    const char *found = find_value(row->values, !is_switch ? setting->text : on ? "true" : "false");
    char ours[64];
    if (!found) {
        return row->sentence ? nd_reader_refuse(setting, row->sentence)
                             : apply_field(r, row, setting);
    }
    found += strcspn(found, "=|");
    found += *found == '=';
    snprintf(ours, sizeof ours, "%.*s", (int)strcspn(found, "|"), found);
    return *ours ? nd_reader_put(r, row->field, ours) : ND_OK;
}

static nd_status apply_refused(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    return nd_fail(ND_ERR_CONFIG, "%s: %s", setting->name, row->sentence);
}

/* For what sets a thing that does not exist here and changes no result: a notice. */
static nd_status apply_ignored(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    nd_reader_notice(r, setting->name, row->sentence);
    return ND_OK;
}

static nd_status apply_distributed_type(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    static const struct {
        const char *name;
        nd_distributed kind;
    } kinds[] = {{"NO", ND_DISTRIBUTED_NO},
                 {"MULTI_GPU", ND_DISTRIBUTED_REPLICATE},
                 {"MULTI_CPU", ND_DISTRIBUTED_REPLICATE},
                 {"FSDP", ND_DISTRIBUTED_FSDP}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (strcasecmp(setting->text, kinds[i].name) == 0) {
            r->distributed = kinds[i].kind;
            return i == 2 ? nd_reader_put(r, ND_FIELD_launch_device, "cpu") : ND_OK;
        }
    }
    return nd_reader_refuse(
        setting, "supported are NO, MULTI_GPU, MULTI_CPU and FSDP; for DeepSpeed's or Megatron's "
                 "sharding use FSDP with a parallelism_config");
}

/* Notes why FP16 is refused. A later value may still replace it, so nd_reader_finish fails. */
static nd_status refuse_later(nd_reader *r, const nd_setting *setting)
{
    snprintf(r->no_fp16, sizeof r->no_fp16,
             "%.600s%s is %.80s: FP16 is not supported; use bf16, which needs no loss scaling",
             setting->where, setting->name, setting->text);
    return ND_OK;
}

static nd_status apply_precision(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    nd_setting ours = *setting;
    bool on = true;
    if (strcasecmp(setting->text, "fp16") == 0) {
        return refuse_later(r, setting);
    }
    (void)nd_bool_parse(setting->text, false, &on); /* a bare `no` in YAML is false */
    ours.text = on ? setting->text : "fp32";
    r->mixed_fp8 = strcasecmp(setting->text, "fp8") == 0;
    return nd_reader_set(r, ND_FIELD_train_precision, &ours);
}

/* The key of accelerate's first versions. */
static nd_status apply_fp16(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    bool on = false;
    ND_TRY(nd_reader_switch(setting, &on));
    return on ? refuse_later(r, setting) : ND_OK;
}

static nd_status apply_main_ip(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    if (strlen(setting->text) >= sizeof r->main_ip) {
        return nd_reader_refuse(setting, "the name is too long");
    }
    memcpy(r->main_ip, setting->text, strlen(setting->text) + 1);
    return ND_OK;
}

static nd_status apply_main_port(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    int64_t port = 0;
    if (!nd_int_parse(setting->text, &port) || port < 0 || port > 65535) {
        return nd_reader_refuse(setting, "it must be a port, 0 to 65535");
    }
    r->main_port = port;
    return ND_OK;
}

/* A boolean (FSDP2) or the name or number of an FSDP1 strategy. */
static nd_status apply_reshard(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    static const char *const names[] = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD",
                                        "HYBRID_SHARD_ZERO2"};
    bool reshard = false;
    int64_t number = 0; /* 1 to 5 */
    if (!nd_bool_parse(setting->text, false, &reshard)) {
        (void)nd_int_parse(setting->text, &number);
        for (int i = 0; i < 5; i++) {
            number = strcasecmp(setting->text, names[i]) == 0 ? i + 1 : number;
        }
        if (number < 1 || number > 5) {
            return nd_reader_refuse(
                setting, "it must be true, false, or FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, "
                         "HYBRID_SHARD or HYBRID_SHARD_ZERO2");
        }
        reshard = number == 1 || number == 4;
        r->hybrid_shard = number >= 4;
        r->no_shard = number == 3;
    }
    return nd_reader_put(r, ND_FIELD_parallel_reshard_after_forward, reshard ? "true" : "false");
}

static nd_status parse_size(nd_reader *r, const nd_setting *setting, int64_t *out)
{
    r->parallelism = true;
    return nd_int_parse(setting->text, out) && *out >= 1
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG, "%s%s is %.80s; it must be 1 or more", setting->where,
                         setting->name, setting->text);
}

static nd_status apply_size(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    int64_t size = 0;
    ND_TRY(parse_size(r, setting, &size));
    return nd_reader_set(r, row->field, setting);
}

/* Becomes mesh.cp once the layer's parallelism_config_cp_size is known. */
static nd_status apply_sp_size(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    return parse_size(r, setting, &r->sp_size);
}

static nd_status apply_fp8_backend(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    r->fp8_ao = strcasecmp(setting->text, "AO") == 0;
    r->fp8_te = strcasecmp(setting->text, "TE") == 0;
    return r->fp8_ao || r->fp8_te
               ? ND_OK
               : nd_reader_refuse(setting,
                                  "supported are AO (recipe tensorwise) and TE (recipe delayed)");
}

static nd_status apply_beta(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    const bool second = setting->name[strlen(setting->name) - 1] == '2';
    const double kept = second ? r->config->optimizer.betas[0] : r->config->optimizer.betas[1];
    char pair[160];
    if (second) {
        snprintf(pair, sizeof pair, "%.17g,%.80s", kept, setting->text);
    } else {
        snprintf(pair, sizeof pair, "%.80s,%.17g", setting->text, kept);
    }
    return nd_reader_set(r, ND_FIELD_optimizer_betas,
                         &(nd_setting){"", setting->name, pair, false});
}

/* The axis gets the workers that are left, in place of the one that would, unless sizes were
 * given. */
static nd_status leave_rest(nd_reader *r, const nd_setting *setting, nd_axis to, nd_axis from)
{
    bool on = false;
    ND_TRY(nd_reader_switch(setting, &on));
    if (on && *nd_axis_size(r->config, from) == -1) {
        ND_TRY(nd_reader_put(r, nd_axis_field(from), "1"));
        return nd_reader_put(r, nd_axis_field(to), "-1");
    }
    return ND_OK;
}

static nd_status apply_use_fsdp(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    return leave_rest(r, setting, ND_AXIS_DP_SHARD, ND_AXIS_DP_REPLICATE);
}

static nd_status apply_multi_gpu(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    return leave_rest(r, setting, ND_AXIS_DP_REPLICATE, ND_AXIS_DP_SHARD);
}

static nd_status apply_standalone(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    bool on = false;
    ND_TRY(nd_reader_switch(setting, &on));
    if (on) {
        ND_TRY(nd_reader_put(r, ND_FIELD_launch_nnodes, "1"));
        ND_TRY(nd_reader_put(r, ND_FIELD_launch_node_rank, "0"));
        ND_TRY(nd_reader_put(r, ND_FIELD_launch_rdzv_endpoint, ""));
    }
    return ND_OK;
}

/* The strategies of transformers' Trainer: steps, which the interval says, epoch, or no. What they
 * mean is found when all flags are read (derive_strategies), so that their order has no effect. */
static nd_status read_strategy(const nd_name *row, const nd_setting *setting, nd_strategy *out)
{
    static const char *const names[] = {
        [ND_STRATEGY_NO] = "no", [ND_STRATEGY_STEPS] = "steps", [ND_STRATEGY_EPOCH] = "epoch"};
    for (nd_strategy s = ND_STRATEGY_NO; s <= ND_STRATEGY_EPOCH; s++) {
        if (strcmp(setting->text, names[s]) == 0) {
            *out = s;
            return ND_OK;
        }
    }
    return nd_reader_refuse(setting, row->sentence);
}

static nd_status apply_save_strategy(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    return read_strategy(row, setting, &r->save_strategy);
}

static nd_status apply_eval_strategy(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    return read_strategy(row, setting, &r->eval_strategy);
}

/* The flag of transformers names a folder or a model of the hub. What exists as a folder, or is
 * written as a path, is a folder. */
static nd_status apply_model(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    bool folder = false;
    ND_TRY(nd_fs_is_folder(setting->text, &folder));
    folder |= setting->text[0] && strchr("/.~", setting->text[0]);
    return nd_reader_set(r, folder ? ND_FIELD_model_path : ND_FIELD_model_name, setting);
}

/* How many numbers a file's list such as "0-1,3" holds; 1 when it cannot be read. */
static int count_listed(const char *path)
{
    int first = 0, last = 0, count = 0, end = 0;
    FILE *f = nd_fs_stream_kernel(path);
    while (f && fscanf(f, "%d", &first) == 1) {
        last = first;
        end = fscanf(f, "-%d", &last);
        count += last >= first ? last - first + 1 : 0;
        if (end == EOF || fgetc(f) != ',') {
            break;
        }
    }
    if (f) {
        fclose(f);
    }
    return count > 0 ? count : 1;
}

static int count_gpus(void)
{
    enum { MOST = 64 }; /* of one node */
    int count = 0;
    char path[32];
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible && strcmp(visible, "NoDevFiles") == 0) {
        return 0; /* Slurm's value for a task without GPUs */
    }
    if (visible) { /* a comma list; empty or -1: none */
        for (const char *c = visible; *c && *c != '-'; c += strcspn(c, ","), c += *c == ',') {
            count++;
        }
        return count;
    }
    bool there = false;
    do {
        snprintf(path, sizeof path, "/dev/nvidia%d", count);
    } while (nd_fs_exists(path, &there) == ND_OK && there && ++count < MOST);
    return count;
}

static nd_status apply_per_node(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    char number[16];
    nd_setting counted = *setting;
    bool automatic = strcmp(setting->text, "auto") == 0;
    bool gpu = strcmp(setting->text, "gpu") == 0, cpu = strcmp(setting->text, "cpu") == 0;
    if (automatic || gpu || cpu) {
        int gpus = cpu ? 0 : count_gpus();
        if (gpu && gpus == 0) {
            return nd_reader_refuse(setting, "no GPU is visible here; use cpu, or a number");
        }
        snprintf(number, sizeof number, "%d",
                 gpus > 0 ? gpus : count_listed("/sys/devices/system/node/has_cpu"));
        counted.text = number;
    }
    return nd_reader_set(r, ND_FIELD_launch_nproc_per_node, &counted);
}

/* torchrun's elastic MIN:MAX is taken when both are the same. */
static nd_status apply_nnodes(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    const char *colon = strchr(setting->text, ':');
    nd_setting one = *setting;
    if (colon) {
        const size_t n = (size_t)(colon - setting->text);
        one.text = colon + 1;
        if (strlen(one.text) != n || strncmp(setting->text, one.text, n) != 0) {
            return nd_reader_refuse(setting, row->sentence);
        }
    }
    return nd_reader_set(r, ND_FIELD_launch_nnodes, &one);
}

#define NONE ND_FIELD_COUNT
static const nd_name names[] = {
#define ND_FLAG_CALL(names, is_switch, function, sentence)                                         \
    {ND_MAP_FLAGS, names, NONE, function, NULL, sentence, is_switch},
#define ND_FLAG_WORDS(names, section, name, values, sentence)                                      \
    {ND_MAP_FLAGS, names, ND_FIELD_##section##_##name, apply_words, values, sentence, false},
#define ND_FLAG_ONLY(names, values, sentence)                                                      \
    {ND_MAP_FLAGS, names, NONE, apply_words, values, sentence, false},
#define ND_FLAG_REFUSE(names, sentence)                                                            \
    {ND_MAP_FLAGS, names, NONE, apply_refused, NULL, sentence, true},
#include "runtime/config/flags.def"
#define ND_KEY_FIELD(map, key, section, name)                                                      \
    {ND_MAP_##map, #key, ND_FIELD_##section##_##name, apply_field, NULL, NULL, false},
#define ND_KEY_WORDS(map, key, section, name, values, sentence)                                    \
    {ND_MAP_##map, #key, ND_FIELD_##section##_##name, apply_words, values, sentence, false},
#define ND_KEY_ONLY(map, key, values, sentence)                                                    \
    {ND_MAP_##map, #key, NONE, apply_words, values, sentence, false},
#define ND_KEY_IGNORED(map, key) {ND_MAP_##map, #key, NONE, apply_ignored, NULL, NULL, true},
#define ND_KEY_HINT(map, key, sentence)                                                            \
    {ND_MAP_##map, #key, NONE, apply_ignored, NULL, sentence, true},
#define ND_KEY_CALL(map, key, function, section, name)                                             \
    {ND_MAP_##map, #key, ND_FIELD_##section##_##name, function, NULL, NULL, false},
#include "runtime/config/accelerate.def"
};
enum { NAME_COUNT = sizeof names / sizeof *names };

/* accelerate adds the prefix to a key that lacks it, except in parallelism_config. */
const nd_map nd_maps[ND_MAP_COUNT] = {
    [ND_MAP_FLAGS] = {"", ""},
    [ND_MAP_TOP] = {"", ""},
    [ND_MAP_FSDP] = {"fsdp_config", "fsdp_"},
    [ND_MAP_PARALLELISM] = {"parallelism_config", ""},
    [ND_MAP_FP8] = {"fp8_config", "fp8_"},
    [ND_MAP_DYNAMO] = {"dynamo_config", "dynamo_"},
};

bool nd_name_is_ignored(const nd_name *name)
{
    return name->apply == apply_ignored;
}

bool nd_name_is_of_field(const nd_name *name)
{
    return name->apply == apply_field;
}

bool nd_name_is_switch(const nd_name *name)
{
    return name->is_switch || lists_switch(name) ||
           (name->apply == apply_field && nd_fields[name->field].type == ND_FIELD_TYPE_BOOL);
}

const nd_name *nd_name_find_flag(const char *flag)
{
    for (int i = 0; i < NAME_COUNT; i++) {
        if (nd_flag_list_holds(names[i].names, flag)) {
            return &names[i];
        }
    }
    return NULL;
}

const nd_name *nd_name_find_key(nd_map_id map, const char *key)
{
    const size_t prefix = strlen(nd_maps[map].prefix);
    for (int i = 0; i < NAME_COUNT; i++) {
        if (names[i].map == map &&
            (strcmp(names[i].names, key) == 0 || strcmp(names[i].names + prefix, key) == 0)) {
            return &names[i];
        }
    }
    return NULL;
}

void nd_names_offer(nd_map_id map, nd_suggest *search)
{
    char word[ND_FLAG_NAME_MAX];
    for (int i = 0; i < NAME_COUNT; i++) {
        for (int w = 0; (map == ND_MAP_FLAGS || names[i].map == map) &&
                        nd_flag_list_word(names[i].names, w, word, sizeof word);
             w++) {
            nd_suggest_offer(search, word);
            nd_suggest_offer(search, word + strlen(nd_maps[map].prefix));
        }
    }
}
