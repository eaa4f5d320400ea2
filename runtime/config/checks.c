// SPDX-License-Identifier: Apache-2.0
/* The configuration as a whole: keys that are wrong by themselves or beside others, values that
 * follow from others, keys that the run does not read, and files that do not exist. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "runtime/config/reader.h"
#include "runtime/config/sources.h"

/* A key that needs another one, which has a value that does not do. */
typedef struct need {
    nd_field_id key;
    const char *values; /* "a|b": those that need it; NULL: any but the default */
    nd_field_id other;
    const char *lacking;
    const char *why, *fix; /* the rest of the sentence */
} need;

/* These hold where the job starts; a plan starts nothing. */
static const need meeting[] = {
    {ND_FIELD_launch_nnodes, NULL, ND_FIELD_launch_rdzv_endpoint, "", "so the nodes cannot meet",
     "give the HOST:PORT where node 0 listens, the same on every node"},
    {ND_FIELD_launch_nnodes, NULL, ND_FIELD_launch_rdzv_key_file, "",
     "and several nodes need a key",
     "make one with `ndlaunch --make-key FILE`, copy it to every node, and name it with "
     "--rdzv-key-file"},
};

static const need needs[] = {
    {ND_FIELD_launch_spare_nodes, NULL, ND_FIELD_launch_nnodes, "1",
     "and node 0 cannot be replaced", "give --nnodes 2 or more, or leave --spare-nodes out"},
    {ND_FIELD_launch_spare_nodes, NULL, ND_FIELD_launch_max_restarts, "0",
     "so no restart would use them", "give --max-restarts too"},
    {ND_FIELD_launch_min_nodes, NULL, ND_FIELD_launch_max_restarts, "0",
     "so no restart would go on with fewer nodes", "give --max-restarts too"},
    {ND_FIELD_launch_max_restarts, NULL, ND_FIELD_checkpoint_interval, "0",
     "so a restart would lose all steps", "give --checkpoint-frequency STEPS too"},
    {ND_FIELD_launch_nccl_alone, NULL, ND_FIELD_launch_device, "cpu", "where ranks do not use NCCL",
     "set launch.nccl_alone: false (--nccl-alone false)"},
    {ND_FIELD_kernels_cuda_graphs, NULL, ND_FIELD_launch_device, "cpu",
     "where work is not launched", "set kernels.cuda_graphs: false (--cuda-graphs false)"},
    {ND_FIELD_kernels_comm_blocks, NULL, ND_FIELD_launch_device, "cpu",
     "where collectives take no multiprocessors", "set kernels.comm_blocks: 0 (--comm-blocks 0)"},
    {ND_FIELD_kernels_product_processors, NULL, ND_FIELD_launch_device, "cpu",
     "where products take no multiprocessors",
     "set kernels.product_processors: 0 (--product-processors 0)"},
    {ND_FIELD_data_format, "llmc|megatron", ND_FIELD_data_tokenizer, "bytes",
     "and the format holds token ids", "use data.tokenizer: file"},
    {ND_FIELD_data_format, "text|jsonl", ND_FIELD_data_tokenizer, "file",
     "which is for ids, and the format holds text",
     "use data.tokenizer: bytes, model, or the path of a tokenizer.json"},
    {ND_FIELD_train_steps, "0", ND_FIELD_train_epochs, "0", "so the run has no length",
     "give one of them (--num-steps N or --num-train-epochs X)"},
    {ND_FIELD_train_nonfinite, "rewind", ND_FIELD_checkpoint_interval, "0",
     "so there is nothing to go back to", "give --checkpoint-frequency STEPS too"},
    {ND_FIELD_train_early_stopping_patience, NULL, ND_FIELD_data_validation_path, "",
     "so the run does not validate", "give --validation-path FILE and --eval-steps N"},
    {ND_FIELD_train_early_stopping_patience, NULL, ND_FIELD_train_validation_interval, "0",
     "so the run does not validate while it trains", "give --eval-steps N"},
    {ND_FIELD_train_sample_prompt, NULL, ND_FIELD_data_validation_path, "",
     "and a prompt is continued at each validation", "give --validation-path FILE"},
    {ND_FIELD_train_sample_prompt, NULL, ND_FIELD_data_tokenizer, "file",
     "and a prompt is a text, which it does not encode", "name a tokenizer.json with --tokenizer"},
    {ND_FIELD_checkpoint_load_best, NULL, ND_FIELD_data_validation_path, "",
     "so there is no validation file", "give --validation-path FILE"},
    {ND_FIELD_checkpoint_load_best, NULL, ND_FIELD_train_validation_interval, "0",
     "so no saved state is validated", "give --eval-steps N"},
    {ND_FIELD_checkpoint_load_best, NULL, ND_FIELD_checkpoint_interval, "0", "so no state is saved",
     "give --save-steps with a multiple of train.validation_interval"},
    {ND_FIELD_log_dump_tensors, NULL, ND_FIELD_log_dump_steps, "", "so no step has them",
     "give both, such as --dump-tensors '*.grad' --dump-steps 1-3, or none"},
    {ND_FIELD_log_dump_steps, NULL, ND_FIELD_log_dump_tensors, "", "so they have no tensors",
     "give both, such as --dump-tensors '*.grad' --dump-steps 1-3, or none"},
};

static nd_status check_need(const nd_config *c, const need *n)
{
    const nd_field *key = &nd_fields[n->key], *other = &nd_fields[n->other];
    char *value = NULL, *lacking = NULL, choice[ND_CHOICE_MAX];
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_config_get(c, key->name, &value));
    ND_TRY_OUT(nd_config_get(c, other->name, &lacking));
    const bool needed = n->values ? nd_choice_find(n->values, value, choice) >= 0
                                  : strcmp(value, key->initial) != 0;
    if (needed && strcmp(lacking, n->lacking) == 0) {
        status = nd_fail(ND_ERR_CONFIG, "%s is %.60s, but %s is %s, %s; %s", key->name, value,
                         other->name, *lacking ? lacking : "empty", n->why, n->fix);
    }
out:
    free(value);
    free(lacking);
    return status;
}

nd_status nd_config_check_meeting(const nd_config *config)
{
    ND_TRY(check_need(config, &meeting[0]));
    return check_need(config, &meeting[1]);
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
    ND_REFUSE(!good,
              "launch.rdzv_endpoint is '%.200s'; it must be HOST:PORT or [IPV6]:PORT with a port "
              "of 0 to 65535",
              endpoint);
    ND_REFUSE(port == 0 && c->launch.nnodes > 1,
              "launch.rdzv_endpoint is '%.200s'; with %lld nodes the port must be a fixed one, "
              "because the others have to find it",
              endpoint, nd_ll(c->launch.nnodes));
    return ND_OK;
}

static nd_status check_nodes(const nd_config *c)
{
    ND_TRY(check_endpoint(c));
    int64_t nodes = c->launch.nnodes + c->launch.spare_nodes;
    ND_REFUSE(
        c->launch.node_rank >= nodes,
        "launch.node_rank is %lld, but the job has %lld nodes%s; give a number from 0 to %lld",
        nd_ll(c->launch.node_rank), nd_ll(nodes),
        c->launch.spare_nodes ? " with its spare nodes" : "", nd_ll(nodes - 1));
    ND_REFUSE(c->launch.min_nodes > 0 &&
                  (c->launch.min_nodes > c->launch.nnodes || c->launch.nnodes == 1),
              "launch.min_nodes is %lld, and launch.nnodes is %lld; give fewer than a job of "
              "several nodes has, or leave --min-nodes out",
              nd_ll(c->launch.min_nodes), nd_ll(c->launch.nnodes));
    return ND_OK;
}

static nd_status check_gpu_ids(const nd_config *c)
{
    const char *p = c->launch.gpu_ids;
    for (bool more = strcmp(p, "all") != 0; more;) {
        const size_t n = strspn(p, "0123456789");
        ND_REFUSE(n == 0 || n > 4 || (p[n] && p[n] != ','),
                  "launch.gpu_ids is '%.100s'; it must be all, or GPU numbers such as 0,1,3",
                  c->launch.gpu_ids);
        more = p[n];
        p += n + more;
    }
    return ND_OK;
}

static nd_status check_model_and_data(const nd_config *c)
{
    const char *name = c->model.name;
    int count = (*c->model.path != 0) + (*c->model.config != 0) + (*name != 0);
    ND_REFUSE(count != 1,
              "%s of model.path, model.config and model.name is given; a run needs exactly one",
              count ? "more than one" : "none");
    const char *slash = strchr(name, '/');
    ND_REFUSE(*name && (name[0] == '.' || name[0] == '/' || name[0] == '~' || slash == NULL ||
                        strchr(slash + 1, '/') || !slash[1]),
              "model.name is '%.200s'; it must be ORG/NAME as on the Hugging Face hub (for a "
              "folder use --model-path, for a config.json --model-config)",
              name);
    ND_REFUSE(!*c->data.path, "data.path is empty; name the training file");
    ND_REFUSE(!*c->data.tokenizer,
              "data.tokenizer is empty; use bytes, file, model, or the path of a tokenizer.json");
    return ND_OK;
}

static nd_status check_training(const nd_config *c)
{
    const int64_t ranks = c->mesh.dp_replicate * c->mesh.dp_shard;
    const double tokens = (double)c->train.sequence_length * (double)c->train.micro_batch_size *
                          (double)c->train.gradient_accumulation_steps * (double)ranks;
    /* 2^52: sums stay exact in I64 and F64 */
    ND_REFUSE(
        tokens > 4503599627370496.0,
        "one step would have %.3g tokens (sequence_length %lld x micro_batch_size %lld x "
        "gradient_accumulation_steps %lld x %lld data-parallel ranks); at most 2^52 are supported",
        tokens, nd_ll(c->train.sequence_length), nd_ll(c->train.micro_batch_size),
        nd_ll(c->train.gradient_accumulation_steps), nd_ll(ranks));
    ND_REFUSE(c->optimizer.min_lr > c->optimizer.lr,
              "optimizer.min_lr %g is larger than optimizer.lr %g; it is the rate at the end of "
              "the schedule",
              c->optimizer.min_lr, c->optimizer.lr);
    ND_REFUSE(c->train.spike_factor > 0 && c->train.spike_factor <= 1,
              "train.spike_factor is %g, so that half of all losses would be spikes; give a factor "
              "above 1, such as 3, or 0 for none",
              c->train.spike_factor);
    /* In every precision: the next run may use FP8. */
    ND_REFUSE(
        c->fp8.all_gather && !nd_fp8_recipe_is_per_tensor(c->fp8.recipe),
        "fp8.all_gather is true, but fp8.recipe %s has no one scale for a whole weight; set "
        "fp8.all_gather: false (--fp8-all-gather false), or fp8.recipe: tensorwise or delayed",
        nd_fp8_recipe_name(c->fp8.recipe));
    ND_REFUSE(c->train.deterministic && c->kernels.autotune && !*c->kernels.autotune_from,
              "train.deterministic and kernels.autotune are both true, but choices by time may "
              "differ between repetitions; let a run without train.deterministic choose, and "
              "replay its choices with kernels.autotune_from: RUN/run.json");
    ND_REFUSE(c->checkpoint.interval != 0 && c->checkpoint.keep_last == 1 &&
                  c->checkpoint.staging == ND_STAGING_OVERLAP,
              "--save-total-limit (checkpoint.keep_last) is 1, but a checkpoint is being written "
              "while the next step computes, so the one before must stay; use 2 or more, or "
              "--checkpoint-staging wait");
    return ND_OK;
}

/* The section log. */

/* Digits up to a hyphen or the end; -1: there is no number of up to 12 digits. */
static int64_t step_number(const char *text, const char **end)
{
    size_t digits = strspn(text, "0123456789");
    *end = text + digits;
    return digits > 0 && digits <= 12 ? atoll(text) : -1;
}

bool nd_config_steps(const char *steps, int64_t *first, int64_t *last)
{
    const char *end = steps;
    *first = *last = step_number(end, &end);
    if (*first > 0 && *end == '-') {
        *last = step_number(end + 1, &end);
    }
    return *first > 0 && *last >= *first && !*end;
}

static bool is_executable(const char *path)
{
    nd_fs_kind kind;
    return nd_fs_look(path, &kind, NULL) == ND_OK && kind == ND_FS_FILE && access(path, X_OK) == 0;
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

static nd_status check_steps(const nd_config *c, const char *key, const char *steps)
{
    int64_t first, last;
    const bool good =
        nd_config_steps(steps, &first, &last) && (c->train.steps == 0 || last <= c->train.steps);
    ND_REFUSE(steps[0] && !good,
              "log.%s is \"%.60s\"; it must be a step or two, such as 10 or 10-12, from 1 to "
              "train.steps, which is %lld",
              key, steps, nd_ll(c->train.steps));
    return ND_OK;
}

/* A tracker for which rank 0, which is on node 0, starts a Python program. */
static nd_status check_follower(const nd_config *c, nd_tracker tracker, const char *library)
{
    if (!nd_config_tracks(c, tracker) || c->launch.node_rank != 0) {
        return ND_OK;
    }
    ND_REFUSE(!c->log.python[0],
              "log.trackers has %s, which needs a Python that has it; name one with "
              "--tracker-python (pip install %s), or let scripts/wandb_sync.py RUN --with %s "
              "--follow send metrics.jsonl of the run's folder",
              library, library, library);
    ND_REFUSE(!is_program(c->log.python),
              "log.python is \"%.200s\", which is no program here; name a Python that has %s with "
              "--tracker-python",
              c->log.python, library);
    return ND_OK;
}

/* Values that follow from others. */

/* The size of an axis in the configuration; NULL for one that is reserved. */
static int64_t *axis_size(nd_config *c, nd_axis axis)
{
    int64_t *const sizes[ND_AXIS_COUNT] = {
#define ND_AXIS(id, name, ...)    &c->mesh.name,
#define ND_AXIS_RESERVED(id, ...) NULL,
#include "runtime/mesh/mesh.def"
    };
    return sizes[axis];
}

/* Sets the number of workers from workers, nnodes x nproc_per_node or the mesh, whichever is
 * given. */
static nd_status resolve_workers(nd_config *c)
{
    int64_t nodes = c->launch.nnodes, per_node = c->launch.nproc_per_node;
    if (c->launch.workers == 0 && per_node > 0) {
        ND_REFUSE(per_node * nodes > nd_fields[ND_FIELD_launch_workers].max,
                  "launch.nnodes %lld x launch.nproc_per_node %lld are more workers than the "
                  "supported %.0f",
                  nd_ll(nodes), nd_ll(per_node), nd_fields[ND_FIELD_launch_workers].max);
        c->launch.workers = nodes * per_node;
    }
    ND_REFUSE(c->launch.workers == 0 && c->from_accelerate,
              "%s has no num_processes; pass --num-processes N", c->source);
    if (c->launch.workers == 0) {
        double needed = 1; /* exact: 2^24 times a size of at most 2^24 */
        for (nd_axis a = 0; a < ND_AXIS_COUNT; a++) {
            const int64_t *size = axis_size(c, a);
            needed *= size && *size > 1 ? (double)*size : 1.0;
            ND_REFUSE(needed > nd_fields[ND_FIELD_launch_workers].max,
                      "the mesh has more than %.0f ranks; check the axis sizes",
                      nd_fields[ND_FIELD_launch_workers].max);
        }
        c->launch.workers = needed < (double)nodes ? nodes : (int64_t)needed;
    }
    ND_REFUSE(per_node > 0 && per_node * nodes != c->launch.workers,
              "launch.nnodes %lld x launch.nproc_per_node %lld = %lld, but launch.workers is %lld; "
              "remove one of them or make them agree",
              nd_ll(nodes), nd_ll(per_node), nd_ll(per_node * nodes), nd_ll(c->launch.workers));
    ND_REFUSE(c->launch.workers % nodes != 0,
              "launch.workers %lld is not a multiple of launch.nnodes %lld; every node starts the "
              "same number of workers",
              nd_ll(c->launch.workers), nd_ll(nodes));
    c->launch.nproc_per_node = c->launch.workers / nodes;
    return ND_OK;
}

/* The ranks of cp that exchange heads. */
static nd_status resolve_ulysses(const nd_config *c, nd_mesh *mesh)
{
    const int64_t cp = mesh->size[ND_AXIS_CP], given = c->parallel.ulysses;
    const bool all = c->parallel.cp_comm == ND_CP_ULYSSES;
    ND_REFUSE(cp % given != 0,
              "parallel.ulysses %lld does not divide mesh.cp %lld; give --ulysses a divisor of it, "
              "or --cp-size a multiple of --ulysses",
              nd_ll(given), nd_ll(cp));
    ND_REFUSE(all && given != 1 && given != cp,
              "parallel.cp_comm ulysses is for all %lld ranks of mesh.cp, but parallel.ulysses is "
              "%lld; give --cp-comm allgather or ring for the exchange of keys among the others, "
              "or leave --ulysses out",
              nd_ll(cp), nd_ll(given));
    mesh->ulysses = (int)(all ? cp : given);
    return ND_OK;
}

/* The keys of the axes get the sizes of the mesh. */
static void write_sizes(nd_config *c)
{
    for (nd_axis a = 0; a < ND_AXIS_COUNT; a++) {
        int64_t *size = axis_size(c, a);
        if (size) {
            *size = c->resolved_mesh.size[a];
        }
    }
}

/* Compares the axes with the workers; an axis of -1 gets what is left. Sizes are written back. */
static nd_status resolve_mesh(nd_config *c)
{
    nd_mesh mesh = {0};
    nd_axis open = ND_AXIS_COUNT;
    for (nd_axis a = 0; a < ND_AXIS_COUNT; a++) {
        const int64_t *size = axis_size(c, a);
        mesh.size[a] = size ? (int)*size : 1;
        open = mesh.size[a] == -1 ? a : open;
    }
    ND_TRY(nd_mesh_resolve(&mesh, c->launch.workers));
    ND_TRY(resolve_ulysses(c, &mesh));
    c->resolved_mesh = mesh;
    c->open_axis = open;
    write_sizes(c);
    return ND_OK;
}

/* A user's OMP_NUM_THREADS, of which a list's first number is for the outer level, is the number of
 * threads where the configuration leaves that open. */
static nd_status resolve_threads(nd_config *c)
{
    const char *variable = getenv("OMP_NUM_THREADS");
    char first[16];
    int64_t threads = 0;
    if (c->launch.threads_per_worker != 0 || !variable) {
        return ND_OK;
    }
    snprintf(first, sizeof first, "%.*s", (int)strcspn(variable, ","), variable);
    ND_REFUSE(
        !nd_int_parse(first, &threads) || threads < 1 || threads > 4096,
        "OMP_NUM_THREADS is '%.80s'; it must be 1 to 4096, the threads of each worker, or unset",
        variable);
    c->launch.threads_per_worker = threads;
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
    ND_REFUSE(c->optimizer.warmup_steps != 0 && c->optimizer.warmup_steps != steps,
              "optimizer.warmup_steps is %lld, but optimizer.warmup_ratio %g of %lld steps is "
              "%lld; give one of them",
              nd_ll(c->optimizer.warmup_steps), c->optimizer.warmup_ratio, nd_ll(c->train.steps),
              nd_ll(steps));
    c->optimizer.warmup_steps = steps;
    return ND_OK;
}

/* Sets what depends on the number of steps, which may be unknown until the data are open. */
static nd_status resolve_steps(nd_config *c)
{
    const int64_t every = c->train.validation_interval, saves = c->checkpoint.interval;
    ND_TRY(resolve_warmup(c));
    ND_TRY(check_follower(c, ND_TRACKER_WANDB, "wandb"));
    ND_TRY(check_follower(c, ND_TRACKER_TRACKIO, "trackio"));
    ND_TRY(check_steps(c, "profile_steps", c->log.profile_steps));
    ND_TRY(check_steps(c, "dump_steps", c->log.dump_steps));
    /* An interval of -1 is not known yet. */
    ND_REFUSE(c->checkpoint.load_best && every > 0 && saves > 0 && saves % every != 0,
              "checkpoint.load_best is true, but checkpoint.interval %lld is not a multiple of "
              "train.validation_interval %lld, so some states would be saved without a "
              "validation; give --save-steps %lld",
              nd_ll(saves), nd_ll(every), nd_ll((saves / every + 1) * every));
    return ND_OK;
}

nd_status nd_config_resolve(nd_config *c)
{
    nd_data_sources sources;
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        ND_TRY(nd_field_check(c, (nd_field_id)i));
    }
    ND_TRY(resolve_threads(c));
    ND_TRY(resolve_workers(c));
    ND_TRY(resolve_mesh(c));
    /* These need the workers and the mesh, and not the number of steps. */
    ND_TRY(check_nodes(c));
    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++) {
        ND_TRY(check_need(c, &needs[i]));
    }
    ND_TRY(check_gpu_ids(c));
    ND_TRY(check_model_and_data(c));
    ND_TRY(check_training(c));
    ND_TRY(nd_data_sources_read("", "data.path", c->data.path, &sources));
    c->data_sources = sources.count;
    nd_data_sources_fini(&sources);
    ND_TRY(resolve_steps(c));
    /* transformers' "true" and "false" mean the newest checkpoint and none. */
    const char *resume = c->checkpoint.resume;
    const bool none = strcasecmp(resume, "false") == 0 || strcasecmp(resume, "none") == 0;
    ND_TRY(strcasecmp(resume, "true") == 0 ? nd_text_replace(&c->checkpoint.resume, "latest")
           : none                          ? nd_text_replace(&c->checkpoint.resume, "")
                                           : ND_OK);
    c->model.seed = c->model.seed == -1 ? c->train.seed : c->model.seed;
    c->data.shuffle_seed = c->data.shuffle_seed == -1 ? c->train.seed : c->data.shuffle_seed;
    c->resolved = true;
    return ND_OK;
}

/* Steps of so many samples; one that is not full counts, unless the data end with it. */
static nd_status steps_of_epochs(const nd_config *c, const nd_epochs *e, int64_t *out)
{
    const double samples = c->train.epochs * (double)e->samples, steps = samples / (double)e->step;
    /* 1.1 x 50 is a little more than 55: three roundings, each by at most DBL_EPSILON / 2. */
    double whole = ceil(steps - 4 * DBL_EPSILON * steps);
    if (whole * (double)e->step > (double)e->limit && floor(steps) >= 1) {
        whole = floor(steps);
    }
    whole = whole < 1 ? 1 : whole;
    ND_REFUSE(
        whole > 1e9,
        "train.epochs %g of %lld samples would be %.3g steps of %lld; at most 10^9 are supported",
        c->train.epochs, nd_ll(e->samples), whole, nd_ll(e->step));
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
                         config->train.epochs, nd_ll(config->train.steps), nd_ll(e->step),
                         nd_ll(step + left))
               : nd_fail(ND_ERR_CONFIG,
                         "train.steps is %lld, and with %lld samples a step the epochs of "
                         "data.path are over after step %lld; give fewer steps, more epochs, or a "
                         "source without a limit",
                         nd_ll(config->train.steps), nd_ll(e->step), nd_ll(step + left));
}

nd_status nd_config_take_epochs(nd_config *config, const nd_epochs *e)
{
    const int64_t epoch = (e->samples - 1) / e->step + 1;
    int64_t steps = config->train.steps;
    ND_ASSERT(config->resolved && e->samples >= 1 && e->step >= 1);
    if (config->train.epochs > 0) {
        ND_TRY(steps_of_epochs(config, e, &steps));
    }
    ND_REFUSE(config->train.steps != 0 && config->train.steps != steps,
              "train.steps is %lld, but train.epochs %g of %lld samples is %lld steps of %lld; "
              "give one of them",
              nd_ll(config->train.steps), config->train.epochs, nd_ll(e->samples), nd_ll(steps),
              nd_ll(e->step));
    config->train.steps = steps;
    ND_TRY(config->checkpoint.resume[0] ? ND_OK : nd_config_check_end(config, e, 0, 0));
    if (config->train.validation_interval < 0) {
        config->train.validation_interval = epoch;
    }
    if (config->checkpoint.interval < 0) {
        config->checkpoint.interval = epoch;
    }
    return resolve_steps(config);
}

nd_status nd_config_with_nodes(const nd_config *config, int64_t nodes, nd_config *out)
{
    nd_config c = *config;
    int64_t workers = nodes * config->launch.nproc_per_node;
    ND_ASSERT(config->resolved && nodes >= 1 && nodes <= config->launch.nnodes);
    ND_REFUSE(config->open_axis == ND_AXIS_COUNT && nodes < config->launch.nnodes,
              "every axis of the mesh has a fixed size; set mesh.dp_shard or mesh.dp_replicate to "
              "-1, so that it can shrink");
    if (config->open_axis != ND_AXIS_COUNT) {
        c.resolved_mesh.size[config->open_axis] = -1;
    }
    ND_TRY(nd_mesh_resolve(&c.resolved_mesh, workers));
    const int64_t ranks = nd_mesh_group_size(&c.resolved_mesh, ND_GROUP_DP);
    const int64_t micro_batches = config->train.gradient_accumulation_steps *
                                  nd_mesh_group_size(&config->resolved_mesh, ND_GROUP_DP);
    c.train.gradient_accumulation_steps = micro_batches / ranks;
    ND_REFUSE(micro_batches % ranks != 0,
              "the %lld micro-batches of a step do not divide over %lld data-parallel ranks",
              (long long)micro_batches, (long long)ranks);
    ND_TRY(nd_field_check(&c, ND_FIELD_train_gradient_accumulation_steps));
    write_sizes(&c);
    c.launch.workers = workers;
    c.launch.nnodes = nodes;
    c.launch.node_rank = 0; /* places of a start count from 0, whatever nodes have them */
    c.launch.spare_nodes = c.launch.min_nodes = 0;
    *out = c;
    return ND_OK;
}

nd_status nd_config_idle_keys(const nd_config *config, char text[ND_IDLE_KEYS_MAX])
{
    const bool fp8 = config->train.precision == ND_PRECISION_FP8;
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        const bool delayed = i == ND_FIELD_fp8_format || i == ND_FIELD_fp8_amax_history_length ||
                             i == ND_FIELD_fp8_amax_compute || i == ND_FIELD_fp8_margin;
        char *value = NULL;
        if (strcmp(nd_fields[i].section, "fp8") != 0 ||
            (fp8 && (config->fp8.recipe == ND_FP8_DELAYED || !delayed))) {
            continue;
        }
        ND_TRY(nd_config_get(config, nd_fields[i].name, &value));
        if (strcmp(value, nd_fields[i].initial) != 0) {
            used += (size_t)snprintf(text + used, ND_IDLE_KEYS_MAX - used, "%s%s", used ? ", " : "",
                                     nd_fields[i].name);
        }
        free(value);
    }
    snprintf(text + used, ND_IDLE_KEYS_MAX - used, "%s",
             used == 0 ? ""
             : fp8     ? ": without effect, because only fp8.recipe delayed reads them"
                       : ": without effect, because train.precision is not fp8");
    return ND_OK;
}

/* A pair of Megatron files may be named without a suffix, and files of text by a pattern. */
static nd_status is_there(const char *path, bool is_data, bool *out)
{
    static const char *const suffixes[] = {"", ".bin", ".idx"};
    char name[8192];
    nd_fs_kind kind = ND_FS_ABSENT;
    nd_fs_names found = {0};
    for (int i = 0; i < (is_data ? 3 : 1) && kind == ND_FS_ABSENT; i++) {
        snprintf(name, sizeof name, "%s%s", path, suffixes[i]);
        ND_TRY(nd_fs_look(name, &kind, NULL));
    }
    if (kind == ND_FS_ABSENT && is_data && strpbrk(path, "*?[")) {
        ND_TRY(nd_fs_glob(path, &found));
    }
    *out = kind != ND_FS_ABSENT || found.count > 0;
    nd_fs_names_fini(&found);
    return ND_OK;
}

/* `path` is the value of the key, or one of several that it names. */
static nd_status check_path(const nd_config *config, nd_path_key key, const char *value,
                            const char *path, const char *advice)
{
    const nd_field *f = &nd_fields[nd_path_fields[key]];
    const char *origin = config->path_origin[key];
    char folder[4096], from[4200] = "";
    bool there = true;
    ND_TRY(*path ? is_there(path, key == ND_PATH_DATA || key == ND_PATH_VALIDATION, &there)
                 : ND_OK);
    if (there) {
        return ND_OK;
    }
    const bool usual = strcmp(path, f->initial) == 0 && !origin;
    if (path[0] != '/') {
        snprintf(from, sizeof from, "paths are relative to the working directory, %s; ",
                 getcwd(folder, sizeof folder) ? folder : "which cannot be read");
    }
    return nd_fail(ND_ERR_DATA, "%s %s \"%s\"%s, which does not exist; %s%s",
                   origin ? origin : f->name, strcmp(path, value) == 0 ? "is" : "names", path,
                   usual ? " (the default)" : "", from, advice);
}

/* Each path of a list. */
static nd_status check_sources(const nd_config *config, nd_path_key key, const char *text,
                               const char *advice)
{
    nd_data_sources sources;
    nd_status status = ND_OK;
    ND_TRY(nd_data_sources_read("", "data.path", text, &sources)); /* it was read before */
    for (int i = 0; i < sources.count && status == ND_OK; i++) {
        status = check_path(config, key, text, sources.list[i].path, advice);
    }
    nd_data_sources_fini(&sources);
    return status;
}

nd_status nd_config_check_model_path(const nd_config *config)
{
    const char *path = config->model.path, *json = config->model.config;
    ND_TRY(check_path(config, ND_PATH_MODEL_PATH, path, path,
                      "give a Hugging Face folder with --model-path, or ORG/NAME of the local "
                      "cache with --model-name"));
    return check_path(config, ND_PATH_MODEL_CONFIG, json, json,
                      "change into the folder that the path starts from, or give a config.json "
                      "with --model-config or a folder with --model-path");
}

nd_status nd_config_check_data_paths(const nd_config *config)
{
    const bool usual = strcmp(config->data.path, nd_fields[ND_FIELD_data_path].initial) == 0;
    ND_TRY(check_sources(
        config, ND_PATH_DATA, config->data.path,
        usual ? "give a file with --data-path, or make it: scripts/prepare_data writes this text"
              : "--data-path takes a file, a folder, a pattern, several as '[a.txt, b.txt]', and "
                "with weights '0.7 a.txt 0.3 b.txt'"));
    return check_sources(config, ND_PATH_VALIDATION, config->data.validation_path,
                         "give a file with --validation-path, or an empty path, "
                         "--validation-path=, for no validation");
}
