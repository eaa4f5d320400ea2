// SPDX-License-Identifier: Apache-2.0
/* Applies the flags of other programs and accelerate's keys (names.def). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/base/text.h"
#include "runtime/config/reader.h"

/* true or false as files and flags write it. */
static nd_status read_switch(const nd_setting *setting, bool *out)
{
    return nd_bool_parse(setting->text, true, out)
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG, "%s%s is '%.80s'; it must be true or false", setting->where,
                         setting->name, setting->text);
}

/* ND_ERR_CONFIG: "<where><name> is <text>: <sentence>". */
static nd_status refuse(const nd_setting *setting, const char *sentence)
{
    return nd_fail(ND_ERR_CONFIG, "%s%s is %.80s: %s", setting->where, setting->name, setting->text,
                   sentence);
}

/* The row lists true or false, which may be written in other words too. */
static bool lists_switch(const nd_name *row)
{
    char ours[ND_CHOICE_MAX];
    return nd_choice_find(row->values, "true", ours) >= 0 ||
           nd_choice_find(row->values, "false", ours) >= 0;
}

/* Takes one of the values of the row: "theirs" as it is, "theirs=ours" for its field. */
static nd_status apply_words(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    bool on = false;
    char ours[ND_CHOICE_MAX] = "";
    const bool is_switch = lists_switch(row) && nd_bool_parse(setting->text, true, &on);
    const char *text = !is_switch ? setting->text : on ? "true" : "false";
    if (nd_choice_find(row->values, text, ours) < 0) {
        return row->sentence ? refuse(setting, row->sentence)
                             : nd_reader_set(r, row->field, setting);
    }
    return row->field != ND_FIELD_COUNT && *ours ? nd_reader_put(r, row->field, ours) : ND_OK;
}

/* Keeps which value was given. */
static nd_status apply_state(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    char ours[ND_CHOICE_MAX];
    const int index = nd_choice_find(row->values, setting->text, ours);
    if (index < 0) {
        return refuse(setting, row->sentence);
    }
    r->state[row->state] = index + 1;
    return strcasecmp(ours, setting->text) == 0 ? ND_OK : nd_reader_put(r, row->field, ours);
}

/* Notes why FP16 is refused. A later value may still replace it, so end_layers fails. */
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
    ND_TRY(read_switch(setting, &on));
    return on ? refuse_later(r, setting) : ND_OK;
}

/* Accelerate and torchrun give the address in two parts. Each replaces its half of the endpoint. */
static nd_status apply_main(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    const bool is_port = nd_ends_with(row->names, "port");
    const char *now = r->config->launch.rdzv_endpoint, *colon = strrchr(now, ':');
    const char *host = !is_port ? setting->text : *now ? now : "127.0.0.1";
    const char *port = is_port ? setting->text : colon ? colon + 1 : "29500"; /* as theirs */
    const size_t length = is_port && colon ? (size_t)(colon - now) : strlen(host);
    const bool v6 = !is_port && strchr(host, ':') && host[0] != '[';
    int64_t number;
    char *endpoint;
    if (is_port ? !nd_int_parse(port, &number) || number < 0 || number > 65535 : length > 255) {
        return refuse(setting, row->sentence);
    }
    ND_TRY(nd_fs_format(&endpoint, "%s%.*s%s:%s", v6 ? "[" : "", (int)length, host, v6 ? "]" : "",
                        port));
    const nd_status status = length > 0 ? nd_reader_put(r, row->field, endpoint) : ND_OK;
    free(endpoint);
    return status;
}

/* A boolean (FSDP2), or the name or number of an FSDP1 strategy. */
static nd_status apply_sharding(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    static const char names[] = "FULL_SHARD|SHARD_GRAD_OP|NO_SHARD|HYBRID_SHARD|HYBRID_SHARD_ZERO2";
    bool reshard = false;
    char ours[ND_CHOICE_MAX];
    if (!nd_bool_parse(setting->text, false, &reshard)) {
        int64_t number = nd_choice_find(names, setting->text, ours) + 1;
        if (number == 0 && (!nd_int_parse(setting->text, &number) || number < 1 ||
                            number > ND_SHARDING_HYBRID_ZERO2)) {
            return refuse(setting, row->sentence);
        }
        r->state[ND_STATE_SHARDING] = (int)number;
        reshard = number == ND_SHARDING_FULL || number == ND_SHARDING_HYBRID;
    }
    return nd_reader_put(r, row->field, reshard ? "true" : "false");
}

static nd_status parse_size(nd_reader *r, const nd_setting *setting, int64_t *out)
{
    r->parallelism = true;
    ND_REFUSE(!nd_int_parse(setting->text, out) || *out < 1, "%s%s is %.80s; it must be 1 or more",
              setting->where, setting->name, setting->text);
    return ND_OK;
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

/* The row's axis gets the workers that are left, in place of the one that would, unless sizes were
 * given. */
static nd_status apply_rest(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    const bool to_shard = row->field == ND_FIELD_mesh_dp_shard;
    bool on = false;
    ND_TRY(read_switch(setting, &on));
    if (on && (to_shard ? r->config->mesh.dp_replicate : r->config->mesh.dp_shard) == -1) {
        ND_TRY(
            nd_reader_put(r, to_shard ? ND_FIELD_mesh_dp_replicate : ND_FIELD_mesh_dp_shard, "1"));
        return nd_reader_put(r, row->field, "-1");
    }
    return ND_OK;
}

static nd_status apply_standalone(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    bool on = false;
    ND_TRY(read_switch(setting, &on));
    if (on) {
        ND_TRY(nd_reader_put(r, ND_FIELD_launch_nnodes, "1"));
        ND_TRY(nd_reader_put(r, ND_FIELD_launch_node_rank, "0"));
        ND_TRY(nd_reader_put(r, ND_FIELD_launch_rdzv_endpoint, ""));
    }
    return ND_OK;
}

/* The flag of transformers names a folder or a model of the hub. What exists as a folder, or is
 * written as a path, is a folder. */
static nd_status apply_model(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    bool folder = false;
    ND_TRY(nd_fs_is_folder(setting->text, &folder));
    folder |= setting->text[0] && strchr("/.~", setting->text[0]);
    folder |= nd_ends_with(setting->text, ".gguf");
    return nd_reader_set(r, folder ? ND_FIELD_model_path : ND_FIELD_model_name, setting);
}

/* The NUMA nodes that have CPUs, in a list such as "0-1,3"; 1 when it cannot be read. */
static int count_cpu_nodes(void)
{
    int first = 0, last = 0, count = 0;
    FILE *f = nd_fs_stream_kernel("/sys/devices/system/node/has_cpu");
    while (f && fscanf(f, "%d", &first) == 1) {
        last = first;
        const int end = fscanf(f, "-%d", &last);
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
    const bool gpu = strcmp(setting->text, "gpu") == 0, cpu = strcmp(setting->text, "cpu") == 0;
    if (gpu || cpu || strcmp(setting->text, "auto") == 0) {
        const int gpus = cpu ? 0 : count_gpus();
        if (gpu && gpus == 0) {
            return refuse(setting, "no GPU is visible here; use cpu, or a number");
        }
        snprintf(number, sizeof number, "%d", gpus > 0 ? gpus : count_cpu_nodes());
        counted.text = number;
    }
    return nd_reader_set(r, ND_FIELD_launch_nproc_per_node, &counted);
}

/* torchrun's elastic MIN:MAX is taken when both are the same. */
static nd_status apply_nnodes(nd_reader *r, const nd_name *row, const nd_setting *setting)
{
    const size_t n = strcspn(setting->text, ":");
    nd_setting one = *setting;
    if (one.text[n]) {
        one.text += n + 1;
        if (strlen(one.text) != n || strncmp(setting->text, one.text, n) != 0) {
            return refuse(setting, row->sentence);
        }
    }
    return nd_reader_set(r, row->field, &one);
}

static const nd_name names[] = {
#define ROW(kind, map, names, field, ...)                                                          \
    {ND_NAME_##kind, ND_MAP_##map, names, ND_FIELD_##field, __VA_ARGS__},
#define ND_NAME_FIELD(map, names, section, key) ROW(SETS, map, names, section##_##key, NULL)
#define ND_NAME_WORDS(map, names, section, key, values, sentence)                                  \
    ROW(CALLS, map, names, section##_##key, apply_words, values, sentence)
#define ND_NAME_STATE(map, names, state, section, key, values, sentence)                           \
    ROW(CALLS, map, names, section##_##key, apply_state, values, sentence, false, ND_STATE_##state)
#define ND_NAME_ONLY(map, names, values, sentence)                                                 \
    ROW(CALLS, map, names, COUNT, apply_words, values, sentence)
#define ND_NAME_CALL(map, names, is_switch, function, section, key, sentence)                      \
    ROW(CALLS, map, names, section##_##key, function, NULL, sentence, is_switch)
#define ND_NAME_REFUSE(map, names, sentence)                                                       \
    ROW(REFUSED, map, names, COUNT, NULL, NULL, sentence, true)
#define ND_NAME_IGNORED(map, names, sentence)                                                      \
    ROW(IGNORED, map, names, COUNT, NULL, NULL, sentence, ND_MAP_##map != ND_MAP_FLAGS)
#include "runtime/config/names.def"
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

nd_status nd_name_apply(nd_reader *reader, const nd_name *name, const nd_setting *setting)
{
    const char *hint = name->sentence;
    const size_t used = strlen(reader->notices);
    switch (name->kind) {
    case ND_NAME_SETS:
        return nd_reader_set(reader, name->field, setting);
    case ND_NAME_REFUSED:
        return nd_fail(ND_ERR_CONFIG, "%s: %s", setting->name, name->sentence);
    case ND_NAME_IGNORED:
        snprintf(reader->notices + used, sizeof reader->notices - used, "%s%s%s%s%s",
                 used ? ", " : "", setting->name, hint ? " (" : "", hint ? hint : "",
                 hint ? ")" : "");
        return ND_OK;
    default:
        return name->apply(reader, name, setting);
    }
}

bool nd_name_is_switch(const nd_name *name)
{
    return name->is_switch || lists_switch(name) ||
           (name->kind == ND_NAME_SETS && nd_fields[name->field].type == ND_FIELD_TYPE_BOOL);
}

const nd_name *nd_name_find(nd_map_id map, const char *key)
{
    char word[ND_FLAG_NAME_MAX];
    const size_t prefix = strlen(nd_maps[map].prefix);
    for (int i = 0; i < NAME_COUNT; i++) {
        if (map == ND_MAP_FLAGS && nd_flag_list_holds(names[i].names, key)) {
            return &names[i];
        }
        for (int w = 0; map != ND_MAP_FLAGS && names[i].map == map &&
                        nd_list_word(names[i].names, ' ', w, word, sizeof word);
             w++) {
            if (strcmp(word, key) == 0 || strcmp(word + prefix, key) == 0) {
                return &names[i];
            }
        }
    }
    return NULL;
}

void nd_names_offer(nd_map_id map, nd_suggest *search)
{
    char word[ND_FLAG_NAME_MAX];
    for (int i = 0; i < NAME_COUNT; i++) {
        for (int w = 0; (map == ND_MAP_FLAGS || names[i].map == map) &&
                        nd_list_word(names[i].names, ' ', w, word, sizeof word);
             w++) {
            nd_suggest_offer(search, word);
            nd_suggest_offer(search, word + strlen(nd_maps[map].prefix));
        }
    }
}
