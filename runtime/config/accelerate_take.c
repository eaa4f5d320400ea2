// SPDX-License-Identifier: Apache-2.0
/* What each key of accelerate's files does. */
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "runtime/config/accelerate.h"

static nd_status take_distributed_type(nd_reader *r, const nd_accelerate_key *key,
                                       const nd_given *given)
{
    if (strcasecmp(given->text, "NO") == 0) {
        r->distributed = ND_DISTRIBUTED_NO;
    } else if (strcmp(given->text, "MULTI_GPU") == 0) {
        r->distributed = ND_DISTRIBUTED_REPLICATE;
    } else if (strcmp(given->text, "MULTI_CPU") == 0) {
        r->distributed = ND_DISTRIBUTED_REPLICATE;
        return nd_reader_put(r, ND_FIELD_launch_device, "cpu");
    } else if (strcmp(given->text, "FSDP") == 0) {
        r->distributed = ND_DISTRIBUTED_FSDP;
    } else {
        return nd_reader_refuse(
            given, "supported are NO, MULTI_GPU, MULTI_CPU and FSDP; for DeepSpeed's or "
                   "Megatron's sharding use FSDP with a parallelism_config");
    }
    return ND_OK;
}

/* A later value replaces this one; only the last is refused. */
static void refuse_later(nd_reader *r, const nd_given *given)
{
    snprintf(r->no_fp16, sizeof r->no_fp16,
             "%.600s%s is %.80s: FP16 is not supported; use bf16, which needs no loss scaling",
             given->where, given->name, given->text);
}

static nd_status take_precision(nd_reader *r, const nd_accelerate_key *key, const nd_given *given)
{
    if (strcasecmp(given->text, "fp16") == 0) {
        refuse_later(r, given);
        return ND_OK;
    }
    bool value = false;
    bool off = nd_bool_parse(given->text, false, &value) && !value; /* a bare `no` in YAML */
    nd_given ours = *given;
    ours.text = off ? "fp32" : given->text;
    return nd_reader_set(r, ND_FIELD_train_precision, &ours);
}

/* The key of accelerate's first versions. */
static nd_status take_fp16(nd_reader *r, const nd_accelerate_key *key, const nd_given *given)
{
    bool on = false;
    ND_TRY(nd_reader_switch(given, &on));
    if (on) {
        refuse_later(r, given);
    }
    return ND_OK;
}

static nd_status take_use_cpu(nd_reader *r, const nd_accelerate_key *key, const nd_given *given)
{
    bool cpu = false;
    ND_TRY(nd_reader_switch(given, &cpu));
    return cpu ? nd_reader_put(r, ND_FIELD_launch_device, "cpu") : ND_OK;
}

static nd_status take_num_processes(nd_reader *r, const nd_accelerate_key *key,
                                    const nd_given *given)
{
    if (strcmp(given->text, "-1") == 0) {
        return ND_OK; /* accelerate's "not said" */
    }
    return nd_reader_set(r, ND_FIELD_launch_workers, given);
}

static nd_status take_main_ip(nd_reader *r, const nd_accelerate_key *key, const nd_given *given)
{
    if (strlen(given->text) >= sizeof r->main_ip) {
        return nd_reader_refuse(given, "the name is too long");
    }
    memcpy(r->main_ip, given->text, strlen(given->text) + 1);
    return ND_OK;
}

static nd_status take_main_port(nd_reader *r, const nd_accelerate_key *key, const nd_given *given)
{
    int64_t port = 0;
    if (!nd_int_parse(given->text, &port) || port < 0 || port > 65535) {
        return nd_reader_refuse(given, "it must be a port, 0 to 65535");
    }
    r->main_port = port;
    return ND_OK;
}

/* A boolean (FSDP2) or the name or number of an FSDP1 strategy. */
static nd_status take_reshard(nd_reader *r, const nd_accelerate_key *key, const nd_given *given)
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
    if (!nd_bool_parse(given->text, false, &reshard)) {
        int found = -1;
        for (int i = 0; i < 5; i++) {
            if (strcasecmp(given->text, strategies[i].name) == 0 ||
                strcmp(given->text, strategies[i].number) == 0) {
                found = i;
            }
        }
        if (found < 0) {
            return nd_reader_refuse(
                given, "it must be true, false, or FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, "
                       "HYBRID_SHARD or HYBRID_SHARD_ZERO2");
        }
        reshard = strategies[found].reshard;
        r->hybrid_shard = strategies[found].hybrid;
        r->no_shard = strategies[found].none;
    }
    return nd_reader_put(r, ND_FIELD_parallel_reshard_after_forward, reshard ? "true" : "false");
}

static nd_status take_recompute(nd_reader *r, const nd_accelerate_key *key, const nd_given *given)
{
    bool full = false;
    ND_TRY(nd_reader_switch(given, &full));
    return nd_reader_put(r, ND_FIELD_parallel_recompute, full ? "full" : "none");
}

static nd_status take_size(nd_reader *r, const nd_accelerate_key *key, const nd_given *given)
{
    int64_t size = 0;
    if (!nd_int_parse(given->text, &size) || size < 1) {
        return nd_fail(ND_ERR_CONFIG, "%s%s is %.80s; it must be 1 or more", given->where,
                       given->name, given->text);
    }
    r->parallelism = true;
    return nd_reader_set(r, key->field, given);
}

static nd_status take_cp_comm(nd_reader *r, const nd_accelerate_key *key, const nd_given *given)
{
    nd_given ours = *given;
    if (strcmp(given->text, "alltoall") == 0) {
        ours.text = "ring"; /* what accelerate's alltoall is */
    } else if (strcmp(given->text, "allgather") != 0) {
        return nd_reader_refuse(given, "it must be allgather or alltoall");
    }
    return nd_reader_set(r, ND_FIELD_parallel_cp_comm, &ours);
}

static nd_status take_fp8_backend(nd_reader *r, const nd_accelerate_key *key, const nd_given *given)
{
    r->fp8_ao = strcasecmp(given->text, "AO") == 0;
    r->fp8_te = strcasecmp(given->text, "TE") == 0;
    return r->fp8_ao || r->fp8_te
               ? ND_OK
               : nd_reader_refuse(given,
                                  "supported are AO (recipe tensorwise) and TE (recipe delayed)");
}

const nd_accelerate_key nd_accelerate_keys[] = {
#define ND_KEY_FIELD(map, key, section, name)                                                      \
    {ND_ACCELERATE_##map, #key, ND_FIELD_##section##_##name, NULL, NULL, NULL},
#define ND_KEY_ONLY(map, key, values, sentence)                                                    \
    {ND_ACCELERATE_##map, #key, ND_FIELD_COUNT, values, sentence, NULL},
#define ND_KEY_IDLE(map, key) {ND_ACCELERATE_##map, #key, ND_FIELD_COUNT, NULL, NULL, NULL},
#define ND_KEY_CALL(map, key, function, section, name)                                             \
    {ND_ACCELERATE_##map, #key, ND_FIELD_##section##_##name, NULL, NULL, function},
#include "runtime/config/accelerate_keys.def"
};
const int nd_accelerate_key_count = sizeof nd_accelerate_keys / sizeof nd_accelerate_keys[0];

bool nd_accelerate_is_idle(const nd_accelerate_key *key)
{
    return !key->take && !key->values && key->field == ND_FIELD_COUNT;
}

bool nd_accelerate_is_switch(const nd_accelerate_key *key)
{
    bool sets_bool =
        key->field < ND_FIELD_COUNT && nd_fields[key->field].type == ND_FIELD_TYPE_BOOL;
    return nd_accelerate_is_idle(key) || (key->values && strstr(key->values, "false")) ||
           key->take == take_recompute || key->take == take_use_cpu || key->take == take_fp16 ||
           (sets_bool && key->take != take_reshard);
}
