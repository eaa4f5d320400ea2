// SPDX-License-Identifier: Apache-2.0
/* The configuration as a whole: values that follow from others. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "runtime/config/reader.h"
#include "runtime/config/sources.h"

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
    ND_TRY(nd_config_check_log(c));
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
    ND_TRY(nd_config_check_keys(c));
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
    /* 1.1 x 50 is a little more than 55. */
    double whole = ceil(steps - 1e-9 * steps);
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
