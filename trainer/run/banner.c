// SPDX-License-Identifier: Apache-2.0
/* What a run shows at its start. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "trainer/context/deal.h"
#include "trainer/precision/precision.h"
#include "trainer/run/state.h"

/* Prints keys whose values are not the defaults, a line per section; run.json has all of them. */
typedef struct settings_printer {
    nd_config defaults;
    char section[32];
    char line[1024];
} settings_printer;

static void flush_section(settings_printer *c)
{
    if (c->line[0]) {
        nd_log_info("%s: %s", c->section, c->line);
    }
    c->line[0] = '\0';
}

static void print_key(void *context, const char *key, const char *value, bool is_job)
{
    settings_printer *c = context;
    char *usual = NULL;
    const char *dot = strchr(key, '.');
    size_t used, length = dot ? (size_t)(dot - key) : strlen(key);
    if (strncmp(c->section, key, length) != 0 || c->section[length] != '\0') {
        flush_section(c);
        snprintf(c->section, sizeof c->section, "%.*s", (int)length, key);
    }
    if (dot && nd_config_get(&c->defaults, key, &usual) == ND_OK && strcmp(usual, value) != 0) {
        used = strlen(c->line);
        snprintf(c->line + used, sizeof c->line - used, "%s%s %s", used ? ", " : "", dot + 1,
                 *value ? value : "none");
    }
    free(usual);
}

/* Threads of different workers that share a CPU wait for each other at the end of every parallel
 * region. */
static void print_cpus(const nd_run *run)
{
    const nd_affinity *a = &run->worker->affinity;
    const int workers = run->worker->peers.sharers, threads = a->threads * workers;
    char cores[32] = "";
    if (a->cores < a->allowed) {
        snprintf(cores, sizeof cores, " of %d core%s", a->cores, a->cores == 1 ? "" : "s");
    }
    nd_log_info("cpus: %d%s for %d local worker%s, %d thread%s each%s", a->allowed, cores, workers,
                workers == 1 ? "" : "s", a->threads, a->threads == 1 ? "" : "s",
                a->bound ? ", bound" : ", not bound: more workers than cpus");
    if (run->config->launch.threads_per_worker > 1 && threads > a->allowed) {
        nd_log_warning(
            "launch.threads_per_worker %d x %d workers are %d threads on %d cpu%s, so steps "
            "may take many times as long; leave it out, or use %d",
            a->threads, workers, threads, a->allowed, a->allowed == 1 ? "" : "s",
            a->cores > workers ? a->cores / workers : 1);
    }
}

/* Settings of documents that these data have no use for. */
static void print_unused(const char *what, const nd_dataset *data, const nd_config *config)
{
    const nd_dataset_facts facts = nd_dataset_facts_of(data);
    const bool joined = !nd_dataset_is_separate(data);
    if (joined && config->data.end_of_text >= 0) {
        nd_log_info("%s: data.end_of_text has no effect, since documents are joined", what);
    }
    if (config->data.long_rows == ND_LONG_ROWS_DROP && !facts.drops &&
        (joined || facts.documents >= 0)) { /* those of a blend are not known */
        nd_log_info("%s: data.long_rows drop has no effect, since %s", what,
                    joined ? "documents are joined" : "no row has a prompt");
    }
}

/* The documents that are separate, as far as their number is known, and what became of rows that
 * are kept whole. */
static void print_separate(const char *what, const nd_dataset_facts *facts, const nd_config *config)
{
    const int64_t documents = config->data.end_of_text < 0 ? facts->documents : -1;
    char count[32] = "";
    if (documents > 1) {
        snprintf(count, sizeof count, "%lld ", (long long)documents);
    }
    if (documents == 1) {
        nd_log_info("%s: 1 document: data.documents separate changes nothing", what);
    } else {
        nd_log_info("%s: %sdocuments are separate: a token sees the tokens before it in its own "
                    "document, and positions %s (data.documents, data.positions)",
                    what, count,
                    config->data.positions == ND_POSITIONS_RUNNING ? "run on over a block"
                                                                   : "begin at 0 in each");
    }
    if (facts->long_rows > 0) {
        nd_log_info("%s: %lld rows are longer than a block of %lld tokens and are %s "
                    "(data.long_rows)",
                    what, (long long)facts->long_rows, (long long)config->train.sequence_length + 1,
                    facts->drops ? "left out" : "cut");
    }
    if (facts->padding > 0) {
        nd_log_info("%s: %.2f %% of the tokens are padding, since rows stay whole", what,
                    100 * facts->padding);
    }
}

/* What a token sees, and how many tokens count in the loss: a mask that is lost, or one too strict,
 * shows here. */
static nd_status print_facts(const char *what, const nd_dataset *data, const nd_config *config)
{
    const nd_dataset_facts facts = nd_dataset_facts_of(data);
    const nd_documents_rule rule = nd_dataset_documents(data);
    const int64_t tokens = nd_dataset_tokens(data);
    int64_t ignored;
    print_unused(what, data, config);
    if (rule == ND_DOCUMENTS_AUTO) {
        nd_log_info("%s: documents of some sources are separate, and those of others are joined "
                    "(data.documents)",
                    what);
    } else if (rule == ND_DOCUMENTS_JOIN) {
        nd_log_info("%s: documents are joined: a token sees all tokens before it in its block, "
                    "also those of other documents (data.documents)",
                    what);
    } else {
        print_separate(what, &facts, config);
    }
    ND_TRY(nd_dataset_ignored(data, &ignored));
    if (ignored == 0) {
        nd_log_info("%s: all tokens%s count in the loss", what,
                    nd_dataset_is_separate(data) ? " but the first of each document" : "");
    } else {
        nd_log_info("%s: %lld of %lld tokens count in the loss (%.1f %%)", what,
                    (long long)(tokens - ignored), (long long)tokens,
                    100.0 * (double)(tokens - ignored) / (double)tokens);
    }
    return ND_OK;
}

/* How often the run reads each source, and how much of it counts. */
static nd_status print_sources(const nd_dataset *data, const nd_config *config)
{
    const int count = nd_dataset_sources(data);
    const int64_t samples = config->train.steps * nd_step_blocks(config);
    int64_t *had = NULL;
    nd_status status = ND_OK;
    if (count < 2) {
        return ND_OK;
    }
    ND_TRY(ND_ALLOC(count, &had));
    const bool exact = nd_dataset_count_samples(data, samples, had);
    for (int j = 0; j < count; j++) {
        const nd_dataset *source = nd_dataset_source(data, j);
        const char *name = nd_dataset_source_name(data, j);
        char what[128];
        nd_log_info(
            "source %s: %lld tokens, %lld blocks; %s%.3g %% of the samples, which read it %.3g "
            "times",
            name, (long long)nd_dataset_tokens(source), (long long)nd_dataset_blocks(source),
            exact ? "" : "about ", 100.0 * (double)had[j] / (double)samples,
            (double)had[j] / (double)nd_dataset_blocks(source));
        snprintf(what, sizeof what, "source %.100s", name);
        ND_TRY_OUT(print_facts(what, source, config));
    }
out:
    free(had);
    return status;
}

/* How much of attention is left in the first blocks of the run, and how evenly the ranks of cp
 * share it. */
static nd_status print_balance(const nd_dataset *data, const nd_rank *r)
{
    enum { BLOCKS = 256 };
    const int64_t S = r->config->train.sequence_length;
    const nd_deal_of deal = nd_deal_of_mesh(&r->shape, &r->mesh, S);
    const int64_t samples = nd_min(nd_dataset_facts_of(data).samples, nd_dataset_blocks(data));
    const int64_t wanted = nd_min(BLOCKS, samples);
    nd_deal_pairs sum = {0};
    int32_t *memory = NULL;
    char *scratch = NULL;
    nd_status status = ND_OK;
    char balance[96] = "";
    if (!nd_dataset_is_separate(data)) {
        return ND_OK;
    }
    ND_TRY_OUT(ND_ALLOC(4 * S, &memory));
    ND_TRY_OUT(ND_ALLOC((int64_t)nd_deal_bytes(&deal), &scratch));
    for (int64_t i = 0; i < wanted; i++) {
        const int64_t block = nd_dataset_sample(data, r->config->data.shuffle_seed, i);
        ND_TRY_OUT(
            nd_dataset_block(data, block, &(nd_block){memory, memory + S, memory + 2 * S, 0}));
        const nd_deal_pairs pairs = nd_deal(&deal, memory + 2 * S, scratch, memory + 3 * S);
        sum.all += pairs.all;
        sum.most += pairs.most * (deal.cp / deal.ulysses);
        sum.joined += pairs.joined;
    }
    if (deal.cp > 1) {
        snprintf(balance, sizeof balance,
                 "; the rank of cp with the most pairs has %.3f times the mean of the ranks",
                 (double)sum.most / (double)sum.all);
    }
    nd_log_info("training data: queries see %.1f %% of the keys that they would see in joined "
                "documents%s (%lld blocks)",
                100.0 * (double)sum.all / (double)sum.joined, balance, (long long)wanted);
out:
    free(scratch);
    free(memory);
    return status;
}

/* Prints how often the run reads its data, and warns when one step reads all of them. */
static nd_status print_data(const nd_run *run)
{
    const nd_config *config = run->config;
    int64_t blocks = nd_dataset_blocks(run->inputs->data);
    int64_t step_blocks = nd_step_blocks(config);
    double passes = (double)config->train.steps * (double)step_blocks / (double)blocks;
    nd_log_info("training data: %lld tokens, %lld blocks of %lld; the run reads them %.3g times",
                (long long)nd_dataset_tokens(run->inputs->data), (long long)blocks,
                (long long)config->train.sequence_length + 1, passes);
    if (config->train.epochs > 0) {
        nd_log_info("train.epochs %g of %lld samples, %lld a step: %lld steps",
                    config->train.epochs, (long long)nd_dataset_facts_of(run->inputs->data).epoch,
                    (long long)step_blocks, (long long)config->train.steps);
    }
    ND_TRY(print_facts("training data", run->inputs->data, config));
    ND_TRY(run->inputs->validation ? print_facts("validation data", run->inputs->validation, config)
                                   : ND_OK);
    ND_TRY(print_balance(run->inputs->data, run->rank));
    ND_TRY(print_sources(run->inputs->data, config));
    if (step_blocks > blocks) {
        nd_log_warning("a step takes %lld blocks, but the training data have %lld: some are read "
                       "more than once a step; use more data, or a smaller batch or sequence",
                       (long long)step_blocks, (long long)blocks);
    }
    if (!run->inputs->validation) {
        nd_log_info("no validation: data.validation_path names no file");
    }
    return ND_OK;
}

static void print_line(void *context, const char *text)
{
    nd_log_info("%s", text);
}

/* Whether ranks of cp exchange keys. */
static bool exchanges_keys(const nd_config *config, const nd_shape *shape)
{
    const int cp = config->resolved_mesh.size[ND_AXIS_CP];
    return cp > 1 && nd_cp_exchange_of(shape, config).ulysses < cp;
}

/* Before a GPU is open, from the job alone. */
static bool are_documents_plain(const nd_config *config, const nd_shape *shape)
{
    const int64_t S = config->train.sequence_length;
    const nd_attention a = {.batch = 1,
                            .sq = S,
                            .sk = S,
                            .heads = shape->heads,
                            .kv_heads = shape->kv_heads,
                            .head_dim = shape->head_dim,
                            .window = shape->window < S ? shape->window : 0,
                            .documents = ND_SEGMENTS_WHOLE};
    const bool fp32 = config->train.precision == ND_PRECISION_FP32;
    const bool ring = exchanges_keys(config, shape) && nd_cp_exchange_of(shape, config).ring;
    return (ring && a.window > 0) ||
           !nd_ops_cuda_takes_documents(&a, fp32 ? ND_DTYPE_F32 : ND_DTYPE_BF16,
                                        config->train.deterministic);
}

void nd_banner_warn_of_documents(const nd_config *config, const nd_shape *shape, bool gpu,
                                 const nd_device *device)
{
    if (!gpu || config->data.documents != ND_DOCUMENTS_SEPARATE) {
        return;
    }
    if (device ? nd_ops_cuda_documents_are_plain(device) : are_documents_plain(config, shape)) {
        nd_log_warning("data.documents is separate, and the plain attention kernels compute some "
                       "of that, many times slower, as cuDNN takes it only in BF16, with heads of "
                       "multiples of 16, without train.deterministic, and in a ring without a "
                       "sliding_window; data.documents: join is faster, and its documents see "
                       "each other");
    } else {
        nd_log_info("data.documents is separate: cuDNN computes its attention%s",
                    config->kernels.cuda_graphs && exchanges_keys(config, shape)
                        ? ", and with kernels.cuda_graphs and cp the plain kernels what a "
                          "document has in more than four places of a rank"
                        : "");
    }
}

nd_status nd_banner_print(const nd_run *run)
{
    const nd_trainer *trainer = run->trainer;
    const nd_rank *r = run->rank;
    const bool gpu = nd_rank_is_gpu(r);
    char mesh[128], idle[ND_IDLE_KEYS_MAX];
    settings_printer settings = {0};
    if (nd_config_init(&settings.defaults) == ND_OK) {
        (void)nd_config_each(r->config, print_key, &settings);
        flush_section(&settings);
    }
    nd_config_fini(&settings.defaults);
    if (nd_config_idle_keys(r->config, idle) == ND_OK && idle[0]) {
        nd_log_warning("%s", idle);
    }
    nd_log_info("run folder: %s", run->dir);
    nd_log_info("mesh: %s on %s%s%s; %s communication", nd_mesh_format(&r->mesh, mesh, sizeof mesh),
                r->device->name, gpu ? ", " : "", gpu ? nd_device_machine(r->device) : "",
                r->transport->backend->name);
    if (r->mesh.size[ND_AXIS_CP] > 1) {
        const nd_cp_exchange cp = nd_cp_exchange_of(&r->shape, r->config);
        nd_log_info("context parallel: %s",
                    nd_cp_exchange_format(&cp, &r->mesh, mesh, sizeof mesh));
    }
    if (!gpu) {
        nd_log_info("instruction set: %s; %s", nd_ops_machine(r->device),
                    nd_ops_products(r->device));
    }
    print_cpus(run);
    nd_log_info("model: %.2f M parameters; memory plan of a worker: %.1f MiB (ndtrain plan shows "
                "its parts)",
                (double)nd_shape_parameters(&r->shape) * 1e-6,
                (double)(trainer->plan.total + trainer->plan.external) / 1048576.0);
    const nd_dims *dims = &trainer->model->dims;
    if (dims->piece < dims->T) {
        nd_log_info("MLP in %lld pieces of %lld tokens",
                    (long long)nd_ceil_div(dims->T, dims->piece), (long long)dims->piece);
    }
    nd_precision_each_line(&trainer->model->scales, &r->shape, print_line, NULL);
    if (trainer->tuning) {
        nd_tuning_each_line(trainer->tuning, print_line, NULL);
    }
    nd_banner_warn_of_documents(r->config, &r->shape, gpu, r->device);
    if (gpu && nd_ops_cuda_windows_are_plain(r->device)) {
        const bool tiles = r->config->train.deterministic;
        const bool ring = !tiles || (nd_mesh_group_size(&r->mesh, ND_GROUP_CP) > 1 &&
                                     nd_cp_exchange_of(&r->shape, r->config).ring);
        nd_log_warning("cuDNN does not take the model's sliding_window in some blocks of %s%s%s, "
                       "which the plain attention kernels compute, many times slower; %s%s%s",
                       ring ? "a ring" : "", ring && tiles ? " and of " : "",
                       tiles ? "train.deterministic" : "",
                       ring ? "--cp-comm allgather or ulysses is faster" : "",
                       ring && tiles ? ", and " : "",
                       tiles ? "train.deterministic: false is faster" : "");
    }
    if (r->config->kernels.cuda_graphs) {
        nd_log_info("CUDA graphs: each block's forward and backward, recorded in step 2; "
                    "collectives, embedding, head, update, validation and steps that "
                    "fp8.health_interval reports run outside of them");
    }
    return print_data(run);
}
