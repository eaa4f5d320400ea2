// SPDX-License-Identifier: Apache-2.0
/* What the flags of other programs do that do not just set one key (flags.def). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/config/reader.h"

enum { ND_GPUS_MAX = 64 }; /* of one node */

static nd_status apply_beta(nd_reader *r, const nd_setting *setting, bool second)
{
    char pair[160], other[40];
    double kept = second ? r->config->optimizer.beta1 : r->config->optimizer.beta2;
    snprintf(other, sizeof other, "%.17g", kept);
    snprintf(pair, sizeof pair, "%.80s,%.80s", second ? other : setting->text,
             second ? setting->text : other);
    nd_setting both = {"", setting->name, pair, false};
    return nd_reader_set(r, ND_FIELD_optimizer_betas, &both);
}

static nd_status apply_beta1(nd_reader *r, const nd_setting *setting)
{
    return apply_beta(r, setting, false);
}

static nd_status apply_beta2(nd_reader *r, const nd_setting *setting)
{
    return apply_beta(r, setting, true);
}

static nd_status apply_gradient_checkpointing(nd_reader *r, const nd_setting *setting)
{
    bool on = false;
    ND_TRY(nd_reader_switch(setting, &on));
    return nd_reader_put(r, ND_FIELD_parallel_recompute, on ? "full" : "none");
}

static nd_status apply_cpu(nd_reader *r, const nd_setting *setting)
{
    bool on = false;
    ND_TRY(nd_reader_switch(setting, &on));
    return on ? nd_reader_put(r, ND_FIELD_launch_device, "cpu") : ND_OK;
}

/* Shards over the workers that are left, unless sizes were given. */
static nd_status apply_use_fsdp(nd_reader *r, const nd_setting *setting)
{
    bool on = false;
    ND_TRY(nd_reader_switch(setting, &on));
    if (on && r->config->mesh.dp_replicate == -1) {
        ND_TRY(nd_reader_put(r, ND_FIELD_mesh_dp_replicate, "1"));
        return nd_reader_put(r, ND_FIELD_mesh_dp_shard, "-1");
    }
    return ND_OK;
}

/* Replicates over the workers that are left, unless sizes were given. */
static nd_status apply_multi_gpu(nd_reader *r, const nd_setting *setting)
{
    bool on = false;
    ND_TRY(nd_reader_switch(setting, &on));
    if (on && r->config->mesh.dp_shard == -1) {
        ND_TRY(nd_reader_put(r, ND_FIELD_mesh_dp_shard, "1"));
        return nd_reader_put(r, ND_FIELD_mesh_dp_replicate, "-1");
    }
    return ND_OK;
}

/* Does nothing: sizes alone make the mesh. */
static nd_status apply_use_parallelism_config(nd_reader *r, const nd_setting *setting)
{
    bool on = false;
    return nd_reader_switch(setting, &on);
}

static nd_status apply_standalone(nd_reader *r, const nd_setting *setting)
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

static nd_status apply_as(nd_reader *r, const nd_setting *setting, const char *key)
{
    bool is_bool = false;
    return nd_accelerate_apply(r, nd_accelerate_find_flag(key, &is_bool), setting);
}

static nd_status apply_sp_size(nd_reader *r, const nd_setting *setting)
{
    return apply_as(r, setting, "parallelism_config_sp_size");
}

static nd_status apply_master_addr(nd_reader *r, const nd_setting *setting)
{
    return apply_as(r, setting, "main_process_ip");
}

static nd_status apply_master_port(nd_reader *r, const nd_setting *setting)
{
    return apply_as(r, setting, "main_process_port");
}

static nd_status apply_quiet(nd_reader *r, const nd_setting *setting)
{
    bool on = false;
    ND_TRY(nd_reader_switch(setting, &on));
    return on ? nd_reader_put(r, ND_FIELD_log_level, "error") : ND_OK;
}

/* Names of the Trainer's optimizers that compute what one of ours does. */
static nd_status apply_optim(nd_reader *r, const nd_setting *setting)
{
    if (nd_flag_list_holds("adamw adamw_torch adamw_torch_fused adamw_hf", setting->text)) {
        return nd_reader_put(r, ND_FIELD_optimizer_name, "adamw");
    }
    return strcmp(setting->text, "sgd") == 0
               ? nd_reader_put(r, ND_FIELD_optimizer_name, "sgd")
               : nd_reader_refuse(setting, "the optimizers are adamw (also adamw_torch, "
                                           "adamw_torch_fused) and sgd");
}

static nd_status apply_bf16(nd_reader *r, const nd_setting *setting)
{
    bool on = false;
    ND_TRY(nd_reader_switch(setting, &on));
    return on ? nd_reader_put(r, ND_FIELD_train_precision, "bf16")
              : nd_reader_refuse(setting, "name the precision: --precision fp32 or fp8");
}

/* The Trainer's scripts train and evaluate only if they are told to. */
static nd_status apply_do(nd_reader *r, const nd_setting *setting)
{
    bool on = false;
    ND_TRY(nd_reader_switch(setting, &on));
    return on ? ND_OK
              : nd_reader_refuse(setting, "a run trains, and validates where there is a "
                                          "validation file; use --eval-strategy no to train "
                                          "alone, or `ndtrain eval` to evaluate alone");
}

/* The strategies of transformers' Trainer: steps, which the interval says, epoch, or no. What they
 * mean is found when all flags are read (derive_strategies), so that their order has no effect. */
static bool read_strategy(const nd_setting *setting, nd_strategy *out)
{
    static const char *const names[] = {
        [ND_STRATEGY_NO] = "no", [ND_STRATEGY_STEPS] = "steps", [ND_STRATEGY_EPOCH] = "epoch"};
    for (nd_strategy s = ND_STRATEGY_NO; s <= ND_STRATEGY_EPOCH; s++) {
        if (strcmp(setting->text, names[s]) == 0) {
            *out = s;
            return true;
        }
    }
    return false;
}

static nd_status apply_save_strategy(nd_reader *r, const nd_setting *setting)
{
    return read_strategy(setting, &r->save_strategy)
               ? ND_OK
               : nd_reader_refuse(setting, "checkpoints are written every --save-steps steps "
                                           "(steps), after each epoch (epoch), or not at all (no)");
}

static nd_status apply_eval_strategy(nd_reader *r, const nd_setting *setting)
{
    return read_strategy(setting, &r->eval_strategy)
               ? ND_OK
               : nd_reader_refuse(setting, "the run validates every --eval-steps steps (steps) or "
                                           "after each epoch (epoch), and after the last step, or "
                                           "not at all (no)");
}

/* The flag of transformers names a folder or a model of the hub. What exists as a folder, or is
 * written as a path, is a folder. */
static nd_status apply_model(nd_reader *r, const nd_setting *setting)
{
    bool folder = false;
    ND_TRY(nd_fs_is_folder(setting->text, &folder));
    bool path = setting->text[0] == '/' || setting->text[0] == '.' || setting->text[0] == '~';
    return nd_reader_set(r, folder || path ? ND_FIELD_model_path : ND_FIELD_model_name, setting);
}

/* For flags of torchrun that set what does not exist here and change no result: a notice. */
static nd_status apply_ignored(nd_reader *r, const nd_setting *setting)
{
    nd_reader_notice(r, setting->name, NULL);
    return ND_OK;
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
    } while (nd_fs_exists(path, &there) == ND_OK && there && ++count < ND_GPUS_MAX);
    return count;
}

nd_status nd_flag_apply_per_node(nd_reader *r, const nd_setting *setting)
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

const nd_flag nd_flags_known[] = {
#define ND_FLAG_CALL(names, is_switch, function) {names, is_switch, function, NULL, NULL},
#define ND_FLAG_ONLY(names, value, sentence)     {names, false, NULL, value, sentence},
#define ND_FLAG_REFUSE(names, sentence)          {names, true, NULL, NULL, sentence},
#include "runtime/config/flags.def"
};
const int nd_flags_known_count = sizeof nd_flags_known / sizeof nd_flags_known[0];
