// SPDX-License-Identifier: Apache-2.0
/* Keys that are wrong by themselves or beside others, whatever the number of steps is. */
#include <string.h>

#include "runtime/config/reader.h"

/* Product of positive factors as a double: exact below 2^53; a larger one is only compared. */
static double product(const int64_t *factors, int count)
{
    double p = 1;
    for (int i = 0; i < count; i++) {
        p *= (double)factors[i];
    }
    return p;
}

/* "host:port", "[v6]:port" */
static nd_status check_endpoint(const nd_config *c)
{
    const char *endpoint = c->launch.rdzv_endpoint;
    if (!*endpoint) {
        return ND_OK;
    }
    const char *colon = strrchr(endpoint, ':');
    int64_t port = -1;
    bool bracket = endpoint[0] == '[';
    bool good = colon && colon != endpoint && nd_int_parse(colon + 1, &port) && port >= 0 &&
                port <= 65535 && (bracket ? colon[-1] == ']' : strchr(endpoint, ':') == colon);
    if (!good) {
        return nd_fail(
            ND_ERR_CONFIG,
            "launch.rdzv_endpoint is '%.200s'; it must be HOST:PORT or [IPV6]:PORT with a "
            "port of 0 to 65535",
            endpoint);
    }
    if (port == 0 && c->launch.nnodes > 1) {
        return nd_fail(ND_ERR_CONFIG,
                       "launch.rdzv_endpoint is '%.200s'; with %lld nodes the port must be a fixed "
                       "one, because the others have to find it",
                       endpoint, nd_ll(c->launch.nnodes));
    }
    return ND_OK;
}

static nd_status check_nodes(const nd_config *c)
{
    ND_TRY(check_endpoint(c));
    int64_t nodes = c->launch.nnodes + c->launch.spare_nodes;
    if (c->launch.node_rank >= nodes) {
        return nd_fail(
            ND_ERR_CONFIG,
            "launch.node_rank is %lld, but the job has %lld nodes%s; give a number from 0 to %lld",
            nd_ll(c->launch.node_rank), nd_ll(nodes),
            c->launch.spare_nodes ? " with its spare nodes" : "", nd_ll(nodes - 1));
    }
    if (c->launch.nnodes > 1 && !*c->launch.rdzv_endpoint) {
        return nd_fail(
            ND_ERR_CONFIG,
            "a job of %lld nodes needs launch.rdzv_endpoint; give the HOST:PORT where node 0 "
            "listens, the same on every node",
            nd_ll(c->launch.nnodes));
    }
    if (c->launch.nnodes > 1 && !*c->launch.rdzv_key_file) {
        return nd_fail(
            ND_ERR_CONFIG,
            "a job of %lld nodes needs launch.rdzv_key_file; make a key once with `ndlaunch "
            "--make-key FILE`, copy it to every node, and name it with --rdzv-key-file",
            nd_ll(c->launch.nnodes));
    }
    return ND_OK;
}

/* For a number of nodes that only restarts use; 0: none is given. */
static nd_status need_restarts(const nd_config *c, const char *key, int64_t nodes, const char *what)
{
    return nodes == 0 || c->launch.max_restarts > 0
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG,
                         "launch.%s is %lld, but launch.max_restarts is 0, so no restart would %s; "
                         "give --max-restarts too",
                         key, nd_ll(nodes), what);
}

/* Spare nodes are for restarts of a job of several nodes: node 0, which has the store, cannot be
 * replaced. */
static nd_status check_spare_nodes(const nd_config *c)
{
    if (c->launch.spare_nodes > 0 && c->launch.nnodes == 1) {
        return nd_fail(ND_ERR_CONFIG,
                       "launch.spare_nodes is %lld, but launch.nnodes is 1, and node 0 cannot be "
                       "replaced; give --nnodes 2 or more, or leave --spare-nodes out",
                       nd_ll(c->launch.spare_nodes));
    }
    return need_restarts(c, "spare_nodes", c->launch.spare_nodes, "use them");
}

/* Fewer nodes are for restarts too. */
static nd_status check_min_nodes(const nd_config *c)
{
    if (c->launch.min_nodes == 0) {
        return ND_OK;
    }
    if (c->launch.min_nodes > c->launch.nnodes || c->launch.nnodes == 1) {
        return nd_fail(ND_ERR_CONFIG,
                       "launch.min_nodes is %lld, and launch.nnodes is %lld; give fewer than a job "
                       "of several nodes has, or leave --min-nodes out",
                       nd_ll(c->launch.min_nodes), nd_ll(c->launch.nnodes));
    }
    return need_restarts(c, "min_nodes", c->launch.min_nodes, "go on with fewer nodes");
}

static nd_status check_gpu_ids(const nd_config *c)
{
    const char *p = c->launch.gpu_ids;
    if (strcmp(p, "all") == 0) {
        return ND_OK;
    }
    for (;;) {
        size_t n = strspn(p, "0123456789");
        if (n == 0 || n > 4 || (p[n] && p[n] != ',')) {
            return nd_fail(
                ND_ERR_CONFIG,
                "launch.gpu_ids is '%.100s'; it must be all, or GPU numbers such as 0,1,3",
                c->launch.gpu_ids);
        }
        if (!p[n]) {
            return ND_OK;
        }
        p += n + 1;
    }
}

static nd_status check_model(const nd_config *c)
{
    const char *name = c->model.name;
    int count = (*c->model.path != 0) + (*c->model.config != 0) + (*name != 0);
    if (count != 1) {
        return nd_fail(
            ND_ERR_CONFIG,
            "%s of model.path, model.config and model.name is given; a run needs exactly "
            "one",
            count ? "more than one" : "none");
    }
    const char *slash = strchr(name, '/');
    if (*name && (name[0] == '.' || name[0] == '/' || name[0] == '~' || slash == NULL ||
                  strchr(slash + 1, '/') || !slash[1])) {
        return nd_fail(
            ND_ERR_CONFIG,
            "model.name is '%.200s'; it must be ORG/NAME as on the Hugging Face hub (for a "
            "folder use --model-path, for a config.json --model-config)",
            name);
    }
    return ND_OK;
}

static nd_status check_data(const nd_config *c)
{
    bool bytes = strcmp(c->data.tokenizer, "bytes") == 0;
    bool ids = c->data.format == ND_DATA_LLMC || c->data.format == ND_DATA_MEGATRON;
    bool text = c->data.format == ND_DATA_TEXT || c->data.format == ND_DATA_JSONL;
    if (!*c->data.path) {
        return nd_fail(ND_ERR_CONFIG, "data.path is empty; name the training file");
    }
    if (!*c->data.tokenizer) {
        return nd_fail(ND_ERR_CONFIG, "data.tokenizer is empty; use bytes, file, model, or the "
                                      "path of a tokenizer.json");
    }
    if (bytes && ids) {
        return nd_fail(ND_ERR_CONFIG,
                       "data.format %s holds token ids, but data.tokenizer is bytes; use "
                       "data.tokenizer: file",
                       c->data.format == ND_DATA_LLMC ? "llmc" : "megatron");
    }
    if (strcmp(c->data.tokenizer, "file") == 0 && text) {
        return nd_fail(ND_ERR_CONFIG,
                       "data.format %s holds text, but data.tokenizer is file (the ids in "
                       "the file); use data.tokenizer: bytes, model, or the path of a "
                       "tokenizer.json",
                       c->data.format == ND_DATA_TEXT ? "text" : "jsonl");
    }
    return ND_OK;
}

static nd_status check_steps(const nd_config *c)
{
    if (c->train.steps == 0 && c->train.epochs == 0) {
        return nd_fail(ND_ERR_CONFIG, "train.steps is 0 and train.epochs too; give one of them "
                                      "(--num-steps N or --num-train-epochs X)");
    }
    return ND_OK;
}

static nd_status check_training(const nd_config *c)
{
    int64_t tokens[] = {c->train.sequence_length, c->train.micro_batch_size,
                        c->train.gradient_accumulation_steps, c->mesh.dp_replicate,
                        c->mesh.dp_shard};
    if (product(tokens, 5) > 4503599627370496.0) { /* 2^52: sums stay exact in I64 and F64 */
        return nd_fail(
            ND_ERR_CONFIG,
            "one step would have %.3g tokens (sequence_length %lld x micro_batch_size %lld "
            "x gradient_accumulation_steps %lld x %lld data-parallel ranks); at most 2^52 "
            "are supported",
            product(tokens, 5), nd_ll(tokens[0]), nd_ll(tokens[1]), nd_ll(tokens[2]),
            nd_ll(tokens[3] * tokens[4]));
    }
    if (c->optimizer.min_lr > c->optimizer.lr) {
        return nd_fail(
            ND_ERR_CONFIG,
            "optimizer.min_lr %g is larger than optimizer.lr %g; it is the rate at the end "
            "of the schedule",
            c->optimizer.min_lr, c->optimizer.lr);
    }
    if (c->train.spike_factor > 0 && c->train.spike_factor <= 1) {
        return nd_fail(ND_ERR_CONFIG,
                       "train.spike_factor is %g, so that half of all losses would be spikes; give "
                       "a factor above 1, such as 3, or 0 for none",
                       c->train.spike_factor);
    }
    /* In every precision: the next run may use FP8. */
    if (c->fp8.all_gather && !nd_fp8_recipe_is_per_tensor(c->fp8.recipe)) {
        return nd_fail(ND_ERR_CONFIG,
                       "fp8.all_gather is true, but fp8.recipe %s has no one scale for a whole "
                       "weight; set fp8.all_gather: false (--fp8-all-gather false), or fp8.recipe: "
                       "tensorwise or delayed",
                       nd_fp8_recipe_name(c->fp8.recipe));
    }
    return ND_OK;
}

static nd_status check_kernels(const nd_config *c)
{
    if (c->train.deterministic && c->kernels.autotune && !*c->kernels.autotune_from) {
        return nd_fail(ND_ERR_CONFIG,
                       "train.deterministic and kernels.autotune are both true, but choices by "
                       "time may differ between repetitions; let a run without "
                       "train.deterministic choose, and replay its choices with "
                       "kernels.autotune_from: RUN/run.json");
    }
    return ND_OK;
}

static nd_status check_graphs(const nd_config *c)
{
    if (c->kernels.cuda_graphs && c->launch.device == ND_CHOOSE_CPU) {
        return nd_fail(ND_ERR_CONFIG,
                       "kernels.cuda_graphs is true, but launch.device is cpu, where work is not "
                       "launched; set kernels.cuda_graphs: false (--cuda-graphs false)");
    }
    return ND_OK;
}

static nd_status check_beside(const nd_config *c)
{
    const struct {
        const char *key, *flag;
        int64_t value;
    } keys[] = {
        {"kernels.comm_blocks", "--comm-blocks", c->kernels.comm_blocks},
        {"kernels.product_processors", "--product-processors", c->kernels.product_processors},
    };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        if (keys[i].value > 0 && c->launch.device == ND_CHOOSE_CPU) {
            return nd_fail(ND_ERR_CONFIG,
                           "%s is %lld, but launch.device is cpu, where collectives and products "
                           "take no multiprocessors; set %s: 0 (%s 0)",
                           keys[i].key, nd_ll(keys[i].value), keys[i].key, keys[i].flag);
        }
    }
    return ND_OK;
}

static nd_status check_nccl(const nd_config *c)
{
    if (c->launch.nccl_alone && c->launch.device == ND_CHOOSE_CPU) {
        return nd_fail(
            ND_ERR_CONFIG,
            "launch.nccl_alone is true, but launch.device is cpu, where ranks do not use "
            "NCCL; set launch.nccl_alone: false (--nccl-alone false)");
    }
    return ND_OK;
}

static nd_status check_checkpoint(const nd_config *c)
{
    if (c->checkpoint.interval != 0 && c->checkpoint.keep_last == 1 &&
        c->checkpoint.staging == ND_STAGING_OVERLAP) {
        return nd_fail(ND_ERR_CONFIG,
                       "--save-total-limit (checkpoint.keep_last) is 1, but a checkpoint is being "
                       "written while the next step computes, so the one before must stay; use 2 "
                       "or more, or --checkpoint-staging wait");
    }
    if (c->launch.max_restarts > 0 && c->checkpoint.interval == 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "launch.max_restarts is %lld, but checkpoint.interval is 0, so a restart "
                       "would lose all steps; give --checkpoint-frequency STEPS too",
                       nd_ll(c->launch.max_restarts));
    }
    if (c->train.nonfinite == ND_NONFINITE_REWIND && c->checkpoint.interval == 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "train.nonfinite is rewind, but checkpoint.interval is 0, so there is "
                       "nothing to go back to; give --checkpoint-frequency STEPS too");
    }
    return ND_OK;
}

nd_status nd_config_check_keys(const nd_config *config)
{
    nd_status (*const checks[])(const nd_config *) = {
        check_nodes,  check_spare_nodes, check_min_nodes, check_gpu_ids, check_model,
        check_data,   check_steps,       check_training,  check_kernels, check_graphs,
        check_beside, check_nccl,        check_checkpoint};
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        ND_TRY(checks[i](config));
    }
    return ND_OK;
}
