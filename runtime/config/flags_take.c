// SPDX-License-Identifier: Apache-2.0
/* Flags that are not simply a key's: what each does, or why it is refused. */
#include <stdio.h>
#include <string.h>

#include "runtime/config/flags.h"

static nd_status take_beta(nd_reader *r, const nd_given *given, bool second)
{
    char pair[160], other[40];
    double kept = second ? r->config->optimizer.beta1 : r->config->optimizer.beta2;
    snprintf(other, sizeof other, "%.17g", kept);
    snprintf(pair, sizeof pair, "%.80s,%.80s", second ? other : given->text,
             second ? given->text : other);
    nd_given both = {"", given->name, pair, false};
    return nd_reader_set(r, ND_FIELD_optimizer_betas, &both);
}

static nd_status take_beta1(nd_reader *r, const nd_given *given)
{
    return take_beta(r, given, false);
}

static nd_status take_beta2(nd_reader *r, const nd_given *given)
{
    return take_beta(r, given, true);
}

static nd_status take_gradient_checkpointing(nd_reader *r, const nd_given *given)
{
    bool on = false;
    ND_TRY(nd_reader_switch(given, &on));
    return nd_reader_put(r, ND_FIELD_parallel_recompute, on ? "full" : "none");
}

static nd_status take_cpu(nd_reader *r, const nd_given *given)
{
    bool on = false;
    ND_TRY(nd_reader_switch(given, &on));
    return on ? nd_reader_put(r, ND_FIELD_launch_device, "cpu") : ND_OK;
}

/* Shard over what is left, unless sizes were given: then the sizes say it. */
static nd_status take_use_fsdp(nd_reader *r, const nd_given *given)
{
    bool on = false;
    ND_TRY(nd_reader_switch(given, &on));
    if (on && r->config->mesh.dp_replicate == -1) {
        ND_TRY(nd_reader_put(r, ND_FIELD_mesh_dp_replicate, "1"));
        return nd_reader_put(r, ND_FIELD_mesh_dp_shard, "-1");
    }
    return ND_OK;
}

/* Replicate over what is left, unless sizes were given. */
static nd_status take_multi_gpu(nd_reader *r, const nd_given *given)
{
    bool on = false;
    ND_TRY(nd_reader_switch(given, &on));
    if (on && r->config->mesh.dp_shard == -1) {
        ND_TRY(nd_reader_put(r, ND_FIELD_mesh_dp_shard, "1"));
        return nd_reader_put(r, ND_FIELD_mesh_dp_replicate, "-1");
    }
    return ND_OK;
}

/* The sizes themselves switch it on. */
static nd_status take_use_parallelism_config(nd_reader *r, const nd_given *given)
{
    bool on = false;
    return nd_reader_switch(given, &on);
}

static nd_status take_standalone(nd_reader *r, const nd_given *given)
{
    bool on = false;
    ND_TRY(nd_reader_switch(given, &on));
    if (on) {
        ND_TRY(nd_reader_put(r, ND_FIELD_launch_nnodes, "1"));
        ND_TRY(nd_reader_put(r, ND_FIELD_launch_node_rank, "0"));
        ND_TRY(nd_reader_put(r, ND_FIELD_launch_rdzv_endpoint, ""));
    }
    return ND_OK;
}

static nd_status take_as(nd_reader *r, const nd_given *given, const char *key)
{
    bool is_bool = false;
    return nd_accelerate_apply(r, nd_accelerate_find_flag(key, &is_bool), given);
}

static nd_status take_master_addr(nd_reader *r, const nd_given *given)
{
    return take_as(r, given, "main_process_ip");
}

static nd_status take_master_port(nd_reader *r, const nd_given *given)
{
    return take_as(r, given, "main_process_port");
}

static nd_status take_only(const nd_given *given, const char *value, const char *sentence)
{
    return strcmp(given->text, value) == 0 ? ND_OK : nd_reader_refuse(given, sentence);
}

static nd_status take_max_restarts(nd_reader *r, const nd_given *given)
{
    return take_only(given, "0",
                     "a failed job is not restarted, because there are no checkpoints "
                     "yet; the only value is 0");
}

static nd_status take_pp(nd_reader *r, const nd_given *given)
{
    return take_only(given, "1", "pipeline parallelism does not exist yet; the only value is 1");
}

static nd_status take_sp(nd_reader *r, const nd_given *given)
{
    return take_only(given, "1", "Ulysses sequence parallelism does not exist here; use --cp-size");
}

static nd_status take_tracker(nd_reader *r, const nd_given *given)
{
    return take_only(given, "none",
                     "no tracking service is called; every step is written to metrics.jsonl in the "
                     "run's folder (the only value is none)");
}

static nd_status take_quiet(nd_reader *r, const nd_given *given)
{
    bool on = false;
    ND_TRY(nd_reader_switch(given, &on));
    return on ? nd_reader_put(r, ND_FIELD_log_level, "error") : ND_OK;
}

const nd_flag nd_flags_known[] = {
#define ND_FLAG_CALL(names, is_switch, function) {names, is_switch, function, NULL},
#define ND_FLAG_REFUSE(names, sentence)          {names, true, NULL, sentence},
#include "runtime/config/config_flags.def"
};
const int nd_flags_known_count = sizeof nd_flags_known / sizeof nd_flags_known[0];
