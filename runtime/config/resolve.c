// SPDX-License-Identifier: Apache-2.0
/*
 * The configuration as a whole: derived values, keys that contradict each other, and settings that
 * the run does not read.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/config/reader.h"
#include "runtime/config/sources.h"

static long long ll(int64_t value)
{
    return (long long)value;
}

/* Product of positive factors as a double: exact below 2^53; a larger one is only compared. */
static double product(const int64_t *factors, int count)
{
    double p = 1;
    for (int i = 0; i < count; i++) {
        p *= (double)factors[i];
    }
    return p;
}

/* Sets the number of workers from workers, nnodes x nproc_per_node or the mesh, whichever is
 * given. */
static nd_status resolve_workers(nd_config *c)
{
    int64_t nodes = c->launch.nnodes, per_node = c->launch.nproc_per_node;
    if (c->launch.workers == 0 && per_node > 0) {
        if (per_node * nodes > nd_fields[ND_FIELD_launch_workers].max) {
            return nd_fail(ND_ERR_CONFIG,
                           "launch.nnodes %lld x launch.nproc_per_node %lld are more "
                           "workers than the supported %.0f",
                           ll(nodes), ll(per_node), nd_fields[ND_FIELD_launch_workers].max);
        }
        c->launch.workers = nodes * per_node;
    }
    if (c->launch.workers == 0 && c->from_accelerate) {
        return nd_fail(ND_ERR_CONFIG, "%s has no num_processes; pass --num-processes N", c->source);
    }
    if (c->launch.workers == 0) {
        double needed = 1; /* exact: 2^24 times a size of at most 2^24 */
        for (nd_axis a = 0; a < ND_AXIS_COUNT; a++) {
            const int64_t *size = nd_axis_size(c, a);
            needed *= size && *size > 1 ? (double)*size : 1.0;
            if (needed > nd_fields[ND_FIELD_launch_workers].max) {
                return nd_fail(ND_ERR_CONFIG,
                               "the mesh has more than %.0f ranks; check the axis sizes",
                               nd_fields[ND_FIELD_launch_workers].max);
            }
        }
        c->launch.workers = needed < (double)nodes ? nodes : (int64_t)needed;
    }
    if (per_node > 0 && per_node * nodes != c->launch.workers) {
        return nd_fail(
            ND_ERR_CONFIG,
            "launch.nnodes %lld x launch.nproc_per_node %lld = %lld, but launch.workers is "
            "%lld; remove one of them or make them agree",
            ll(nodes), ll(per_node), ll(per_node * nodes), ll(c->launch.workers));
    }
    if (c->launch.workers % nodes != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "launch.workers %lld is not a multiple of launch.nnodes %lld; every node "
                       "starts the same number of workers",
                       ll(c->launch.workers), ll(nodes));
    }
    c->launch.nproc_per_node = c->launch.workers / nodes;
    return ND_OK;
}

/* Compares the axes with the workers; an axis of -1 gets what is left. Sizes are written back. */
static nd_status resolve_mesh(nd_config *c)
{
    nd_mesh mesh;
    nd_axis open = ND_AXIS_COUNT;
    for (nd_axis a = 0; a < ND_AXIS_COUNT; a++) {
        const int64_t *size = nd_axis_size(c, a);
        mesh.size[a] = size ? (int)*size : 1;
        open = mesh.size[a] == -1 ? a : open;
    }
    ND_TRY(nd_mesh_resolve(&mesh, c->launch.workers));
    for (nd_axis a = 0; a < ND_AXIS_COUNT; a++) {
        int64_t *size = nd_axis_size(c, a);
        if (size) {
            *size = mesh.size[a];
        }
    }
    c->resolved_mesh = mesh;
    c->open_axis = open;
    return ND_OK;
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
                       endpoint, ll(c->launch.nnodes));
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
            ll(c->launch.node_rank), ll(nodes),
            c->launch.spare_nodes ? " with its spare nodes" : "", ll(nodes - 1));
    }
    if (c->launch.nnodes > 1 && !*c->launch.rdzv_endpoint) {
        return nd_fail(
            ND_ERR_CONFIG,
            "a job of %lld nodes needs launch.rdzv_endpoint; give the HOST:PORT where node 0 "
            "listens, the same on every node",
            ll(c->launch.nnodes));
    }
    if (c->launch.nnodes > 1 && !*c->launch.rdzv_key_file) {
        return nd_fail(
            ND_ERR_CONFIG,
            "a job of %lld nodes needs launch.rdzv_key_file; make a key once with `ndlaunch "
            "--make-key FILE`, copy it to every node, and name it with --rdzv-key-file",
            ll(c->launch.nnodes));
    }
    return ND_OK;
}

/* Spare nodes are for restarts of a job of several nodes: node 0, which has the store, cannot be
 * replaced. */
static nd_status check_spare_nodes(const nd_config *c)
{
    if (c->launch.spare_nodes > 0 && c->launch.nnodes == 1) {
        return nd_fail(ND_ERR_CONFIG,
                       "launch.spare_nodes is %lld, but launch.nnodes is 1, and node 0 cannot be "
                       "replaced; give --nnodes 2 or more, or leave --spare-nodes out",
                       ll(c->launch.spare_nodes));
    }
    if (c->launch.spare_nodes > 0 && c->launch.max_restarts == 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "launch.spare_nodes is %lld, but launch.max_restarts is 0, so no restart "
                       "would use them; give --max-restarts too",
                       ll(c->launch.spare_nodes));
    }
    return ND_OK;
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
                       ll(c->launch.min_nodes), ll(c->launch.nnodes));
    }
    if (c->launch.max_restarts == 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "launch.min_nodes is %lld, but launch.max_restarts is 0, so no restart "
                       "would go on with fewer nodes; give --max-restarts too",
                       ll(c->launch.min_nodes));
    }
    return ND_OK;
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

static nd_status count_sources(nd_config *c)
{
    nd_data_sources sources;
    ND_TRY(nd_data_sources_read("", "data.path", c->data.path, &sources));
    c->data_sources = sources.count;
    nd_data_sources_fini(&sources);
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
            product(tokens, 5), ll(tokens[0]), ll(tokens[1]), ll(tokens[2]),
            ll(tokens[3] * tokens[4]));
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
    if (c->fp8.all_gather && c->fp8.recipe != ND_FP8_TENSORWISE &&
        c->fp8.recipe != ND_FP8_DELAYED) { /* in every precision: the next run may use FP8 */
        return nd_fail(
            ND_ERR_CONFIG,
            "fp8.all_gather needs one scale for a whole weight, as the recipes tensorwise "
            "and delayed have; set fp8.all_gather: false (--fp8-all-gather false) for fp8.recipe "
            "rowwise and rowwise_with_gw_hp");
    }
    return ND_OK;
}

/* transformers' "true" and "false" mean the newest checkpoint and none. */
static nd_status normalise_resume(nd_config *c)
{
    static const char *const words[][2] = {{"true", "latest"}, {"false", ""}, {"none", ""}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if (strcasecmp(c->checkpoint.resume, words[i][0]) == 0) {
            char *word = strdup(words[i][1]);
            if (!word) {
                return nd_fail_memory("checkpoint.resume");
            }
            free(c->checkpoint.resume);
            c->checkpoint.resume = word;
            return ND_OK;
        }
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
                       ll(c->launch.max_restarts));
    }
    if (c->train.nonfinite == ND_NONFINITE_REWIND && c->checkpoint.interval == 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "train.nonfinite is rewind, but checkpoint.interval is 0, so there is "
                       "nothing to go back to; give --checkpoint-frequency STEPS too");
    }
    return ND_OK;
}

/* Early stopping and the best model ask the validations of a run. */
static nd_status check_best(const nd_config *c)
{
    const int64_t every = c->train.validation_interval, saves = c->checkpoint.interval;
    const bool validates = c->data.validation_path[0] && every != 0;
    const bool differ = every > 0 && saves > 0 && saves % every != 0; /* -1: not known yet */
    if (c->train.early_stopping_patience > 0 && !validates) {
        return nd_fail(ND_ERR_CONFIG,
                       "train.early_stopping_patience is %lld, but the run does not validate while "
                       "it trains; give data.validation_path and train.validation_interval "
                       "(--validation-path FILE --eval-steps N)",
                       ll(c->train.early_stopping_patience));
    }
    if (!c->checkpoint.load_best) {
        return ND_OK;
    }
    if (!c->data.validation_path[0]) {
        return nd_fail(ND_ERR_CONFIG, "checkpoint.load_best is true, but there is no validation "
                                      "file; give --validation-path FILE");
    }
    if (every == 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "checkpoint.load_best is true, but train.validation_interval is 0, so no "
                       "saved state is validated; give --eval-steps N");
    }
    if (saves == 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "checkpoint.load_best is true, but checkpoint.interval is 0, so no state is "
                       "saved; give --save-steps with %s",
                       every > 0 ? "a multiple of train.validation_interval" : "epoch");
    }
    if (differ) {
        return nd_fail(ND_ERR_CONFIG,
                       "checkpoint.load_best is true, but checkpoint.interval %lld is not a "
                       "multiple of train.validation_interval %lld, so some states would be saved "
                       "without a validation; give --save-steps %lld",
                       ll(saves), ll(every), ll((saves / every + 1) * every));
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
                           keys[i].key, (long long)keys[i].value, keys[i].key, keys[i].flag);
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

/* Digits up to a hyphen or the end; -1: there is no number of up to 12 digits. */
static int64_t step_number(const char *text, const char **end)
{
    size_t digits = strspn(text, "0123456789");
    *end = text + digits;
    return digits > 0 && digits <= 12 ? atoll(text) : -1;
}

bool nd_config_profile_steps(const nd_config *config, int64_t *first, int64_t *last)
{
    const char *end = config->log.profile_steps;
    *first = *last = step_number(end, &end);
    if (*first > 0 && *end == '-') {
        *last = step_number(end + 1, &end);
    }
    return *first > 0 && *last >= *first && !*end;
}

static bool is_executable(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode) && access(path, X_OK) == 0;
}

/* A path, or a name that the folders of PATH have. */
static bool is_program(const char *name)
{
    char path[4096];
    const char *folders = getenv("PATH");
    if (strchr(name, '/')) {
        return is_executable(name);
    }
    for (const char *f = folders ? folders : "/usr/bin:/bin"; *f; f += *f == ':') {
        const size_t n = strcspn(f, ":");
        snprintf(path, sizeof path, "%.*s/%s", (int)n, f, name);
        if (n > 0 && is_executable(path)) {
            return true;
        }
        f += n;
    }
    return false;
}

bool nd_config_tracks(const nd_config *c, nd_tracker tracker)
{
    const unsigned all = tracker == ND_TRACKER_TENSORBOARD ? 1U << ND_TRACKER_ALL : 0;
    return (c->log.trackers & (1U << tracker | all)) != 0;
}

/* A tracker for which rank 0, which is on node 0, starts a Python program. */
static nd_status check_follower(const nd_config *c, nd_tracker tracker, const char *library)
{
    if (!nd_config_tracks(c, tracker) || c->launch.node_rank != 0) {
        return ND_OK;
    }
    if (!c->log.python[0]) {
        return nd_fail(ND_ERR_CONFIG,
                       "log.trackers has %s, which needs a Python that has it; name one with "
                       "--tracker-python (pip install %s), or let scripts/wandb_sync.py RUN "
                       "--with %s --follow send metrics.jsonl of the run's folder",
                       library, library, library);
    }
    return is_program(c->log.python)
               ? ND_OK
               : nd_fail(ND_ERR_CONFIG,
                         "log.python is \"%.200s\", which is no program here; name a Python that "
                         "has %s with --tracker-python",
                         c->log.python, library);
}

/* Only an event file takes histograms. */
static nd_status check_log(const nd_config *c)
{
    ND_TRY(check_follower(c, ND_TRACKER_WANDB, "wandb"));
    ND_TRY(check_follower(c, ND_TRACKER_TRACKIO, "trackio"));
    if (c->log.histogram_interval > 0 && !nd_config_tracks(c, ND_TRACKER_TENSORBOARD)) {
        return nd_fail(ND_ERR_CONFIG,
                       "log.histogram_interval is %lld, but log.trackers has neither tensorboard "
                       "nor all, so nobody takes the histograms; set log.trackers: tensorboard "
                       "(--log-with tensorboard), or "
                       "log.histogram_interval: 0",
                       ll(c->log.histogram_interval));
    }
    int64_t first, last;
    if (c->log.profile_steps[0] && (!nd_config_profile_steps(c, &first, &last) ||
                                    (c->train.steps > 0 && last > c->train.steps))) {
        return nd_fail(ND_ERR_CONFIG,
                       "log.profile_steps is \"%.60s\"; it must be a step or two, such as 10 or "
                       "10-12, from 1 to train.steps, which is %lld",
                       c->log.profile_steps, ll(c->train.steps));
    }
    return ND_OK;
}

/* As transformers does: the product is rounded up. A configuration that was resolved before has
 * both keys, and they agree. */
static nd_status resolve_warmup(nd_config *c)
{
    int64_t steps = (int64_t)ceil((double)c->train.steps * c->optimizer.warmup_ratio);
    if (c->optimizer.warmup_ratio == 0 || c->train.steps == 0) { /* 0: not known yet */
        return ND_OK;
    }
    if (c->optimizer.warmup_steps != 0 && c->optimizer.warmup_steps != steps) {
        return nd_fail(
            ND_ERR_CONFIG,
            "optimizer.warmup_steps is %lld, but optimizer.warmup_ratio %g of %lld steps "
            "is %lld; give one of them",
            ll(c->optimizer.warmup_steps), c->optimizer.warmup_ratio, ll(c->train.steps),
            ll(steps));
    }
    c->optimizer.warmup_steps = steps;
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

/* Steps of so many samples; one that is not full counts, unless the data end with it. */
static nd_status steps_of_epochs(const nd_config *c, const nd_epochs *e, int64_t *out)
{
    const double samples = c->train.epochs * (double)e->samples, steps = samples / (double)e->step;
    /* 0.1 x 30 is a little more than 3. */
    double whole = ceil(steps - 1e-9 * steps);
    if (whole * (double)e->step > (double)e->limit && floor(steps) >= 1) {
        whole = floor(steps);
    }
    whole = whole < 1 ? 1 : whole;
    if (whole > 1e9) {
        return nd_fail(
            ND_ERR_CONFIG,
            "train.epochs %g of %lld samples would be %.3g steps of %lld; at most 10^9 are "
            "supported",
            c->train.epochs, ll(e->samples), whole, ll(e->step));
    }
    *out = (int64_t)whole;
    return ND_OK;
}

nd_status nd_config_check_end(const nd_config *config, const nd_epochs *e, int64_t step,
                              int64_t seen)
{
    const int64_t left = seen < e->limit ? (e->limit - seen) / e->step : 0;
    if (config->train.steps - step <= left) {
        return ND_OK;
    }
    return config->train.epochs > 0
               ? nd_fail(ND_ERR_CONFIG,
                         "train.epochs is %g, which is %lld steps of %lld samples, but the epochs "
                         "in data.path are over after step %lld; give fewer epochs there, more in "
                         "data.path, or a source without a limit",
                         config->train.epochs, ll(config->train.steps), ll(e->step),
                         ll(step + left))
               : nd_fail(ND_ERR_CONFIG,
                         "train.steps is %lld, and with %lld samples a step the epochs of "
                         "data.path are over after step %lld; give fewer steps, more epochs, or a "
                         "source without a limit",
                         ll(config->train.steps), ll(e->step), ll(step + left));
}

nd_status nd_config_take_epochs(nd_config *config, const nd_epochs *e)
{
    const int64_t epoch = (e->samples - 1) / e->step + 1;
    int64_t steps = config->train.steps;
    ND_ASSERT(config->resolved && e->samples >= 1 && e->step >= 1);
    if (config->train.epochs > 0) {
        ND_TRY(steps_of_epochs(config, e, &steps));
    }
    if (config->train.steps != 0 && config->train.steps != steps) {
        return nd_fail(
            ND_ERR_CONFIG,
            "train.steps is %lld, but train.epochs %g of %lld samples is %lld steps of %lld; "
            "give one of them",
            ll(config->train.steps), config->train.epochs, ll(e->samples), ll(steps), ll(e->step));
    }
    config->train.steps = steps;
    ND_TRY(config->checkpoint.resume[0] ? ND_OK : nd_config_check_end(config, e, 0, 0));
    if (config->train.validation_interval < 0) {
        config->train.validation_interval = epoch;
    }
    if (config->checkpoint.interval < 0) {
        config->checkpoint.interval = epoch;
    }
    ND_TRY(resolve_warmup(config));
    ND_TRY(check_log(config));
    return check_best(config);
}

nd_status nd_config_resolve(nd_config *config)
{
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        ND_TRY(nd_field_check(config, (nd_field_id)i));
    }
    ND_TRY(resolve_workers(config));
    ND_TRY(resolve_mesh(config));
    ND_TRY(check_nodes(config));
    ND_TRY(check_spare_nodes(config));
    ND_TRY(check_min_nodes(config));
    ND_TRY(check_gpu_ids(config));
    ND_TRY(check_model(config));
    ND_TRY(check_data(config));
    ND_TRY(count_sources(config));
    ND_TRY(check_steps(config));
    ND_TRY(resolve_warmup(config));
    ND_TRY(check_training(config));
    ND_TRY(check_log(config));
    ND_TRY(check_best(config));
    ND_TRY(check_kernels(config));
    ND_TRY(check_graphs(config));
    ND_TRY(check_beside(config));
    ND_TRY(check_nccl(config));
    ND_TRY(normalise_resume(config));
    ND_TRY(check_checkpoint(config));
    if (config->model.seed == -1) {
        config->model.seed = config->train.seed;
    }
    if (config->data.shuffle_seed == -1) {
        config->data.shuffle_seed = config->train.seed;
    }
    config->resolved = true;
    return ND_OK;
}

static bool is_delayed_key(int field)
{
    return field == ND_FIELD_fp8_format || field == ND_FIELD_fp8_amax_history_length ||
           field == ND_FIELD_fp8_amax_compute || field == ND_FIELD_fp8_margin;
}

/* "fp8.margin, fp8.format": keys of the section that differ from their defaults; NULL when there
 * are none. */
static nd_status changed_keys(const nd_config *config, bool delayed_only, char **out)
{
    nd_config usual;
    nd_text names = {0};
    nd_status status = nd_config_init(&usual);
    *out = NULL;
    for (int i = 0; i < ND_FIELD_COUNT && status == ND_OK; i++) {
        char *value = NULL, *initial = NULL;
        if (strcmp(nd_fields[i].section, "fp8") != 0 || (delayed_only && !is_delayed_key(i))) {
            continue;
        }
        status = nd_field_format(config, (nd_field_id)i, &value);
        status = status == ND_OK ? nd_field_format(&usual, (nd_field_id)i, &initial) : status;
        if (status == ND_OK && strcmp(value, initial) != 0) {
            nd_text_append(&names, "%sfp8.%s", names.used ? ", " : "", nd_fields[i].key);
        }
        free(value);
        free(initial);
    }
    nd_config_fini(&usual);
    if (status != ND_OK || names.used == 0) {
        free(names.data);
        return status;
    }
    return nd_text_finish(&names, out);
}

nd_status nd_config_each_warning(const nd_config *config,
                                 void (*line)(void *context, const char *text), void *context)
{
    bool fp8 = config->train.precision == ND_PRECISION_FP8;
    char *keys = NULL, text[400];
    if (!fp8 || config->fp8.recipe != ND_FP8_DELAYED) {
        ND_TRY(changed_keys(config, fp8, &keys));
    }
    if (keys) {
        snprintf(text, sizeof text,
                 fp8 ? "%s: without effect, because only fp8.recipe delayed reads them"
                     : "%s: without effect, because train.precision is not fp8",
                 keys);
        line(context, text);
        free(keys);
    }
    return ND_OK;
}
