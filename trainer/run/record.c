// SPDX-License-Identifier: Apache-2.0
/* What run.json says of a run. */
#include <stdlib.h>

#include "runtime/base/version.h"
#include "trainer/precision/precision.h"
#include "trainer/run/run_folder.h"
#include "trainer/tune/tune.h"
#include "trainer/worker/worker.h"

typedef struct source_list {
    nd_run_source *list; /* owned */
    int count;
} source_list;

/* samples: of the whole run; -1: a validation, which has none of its own. */
static nd_status list_sources(const nd_dataset *data, int64_t samples, source_list *out)
{
    const int count = nd_dataset_sources(data);
    int64_t *had = NULL;
    nd_status status = ND_OK;
    ND_TRY_OUT(ND_ALLOC(count, &had));
    ND_TRY_OUT(ND_ALLOC(count, &out->list));
    if (samples >= 0) {
        (void)nd_dataset_count_samples(data, samples, had);
    }
    for (out->count = 0; out->count < count; out->count++) {
        const nd_dataset *source = nd_dataset_source(data, out->count);
        const nd_dataset_facts facts = nd_dataset_facts_of(source);
        out->list[out->count] = (nd_run_source){.name = nd_dataset_source_name(data, out->count),
                                                .path = facts.path,
                                                .format = facts.format,
                                                .cache = facts.cache,
                                                .documents = facts.documents,
                                                .tokens = nd_dataset_tokens(source),
                                                .blocks = nd_dataset_blocks(source),
                                                .samples = samples >= 0 ? had[out->count] : -1};
    }
out:
    free(had);
    return status;
}

static nd_status write_record(const nd_run_files *files, const nd_run_context *run,
                              const nd_trainer *trainer, const nd_command_line *line)
{
    const nd_rank *r = trainer->rank;
    const nd_worker *worker = run->worker;
    const nd_inputs *inputs = run->inputs;
    const nd_scales *scales = &trainer->model->scales;
    source_list training = {0}, validation = {0};
    nd_status status = ND_OK;
    nd_run_amount memory[ND_MEMPLAN_MAX_BUFFERS];
    int memory_count = 0;
    for (int i = 0; i < ND_MEM_CLASS_COUNT * trainer->plan.count; i++) { /* class by class */
        const nd_mem_buffer *s = &trainer->plan.buffers[i % trainer->plan.count];
        if (s->bytes > 0 && (int)s->class == i / trainer->plan.count) {
            memory[memory_count++] = (nd_run_amount){s->name, (int64_t)s->bytes};
        }
    }
    const nd_run_text machine[] = {
        {"device", r->device->name},
        {"ops", r->ops->name},
        {"isa", nd_device_machine(r->device)},
        {"transport", r->transport->backend->name},
        {"cpus", worker->affinity.cpus},
        {"products", nd_ops_products(r->device)}, /* of a CPU: the last */
    };
    const int machine_count = (int)(sizeof machine / sizeof *machine) - nd_rank_is_gpu(r);
    const nd_run_amount model[] = {
        {"parameters", nd_shape_parameters(&r->shape)},
        {"planned_bytes", (int64_t)(trainer->plan.total + trainer->plan.external)},
        {"linears", scales->layers * ND_LINEAR_COUNT},
        {"fp8_linears", scales->filter.converted},
    };
    /* What of these is known without FP8 says nothing. */
    const int model_count = scales->recipe.name ? 4 : 2;
    nd_run_text libraries[ND_LIBRARY_COUNT];
    int64_t samples;
    if (__builtin_mul_overflow(r->config->train.steps, nd_step_blocks(r->config), &samples)) {
        samples = INT64_MAX; /* more than any run reads */
    }
    ND_TRY_OUT(list_sources(inputs->data, samples, &training));
    ND_TRY_OUT(inputs->validation ? list_sources(inputs->validation, -1, &validation) : ND_OK);
    nd_run_record record = {
        .config = r->config,
        .mesh = &r->mesh,
        .program_version = ND_VERSION,
        .argc = line->argc,
        .argv = line->argv,
        .identity = &worker->identity,
        .hosts = worker->peers.hosts,
        .host_count = worker->peers.host_count,
        .libraries = libraries,
        .library_count = nd_library_versions(false, libraries),
        .machine = machine,
        .machine_count = machine_count,
        .model = model,
        .model_count = model_count,
        .memory = memory,
        .memory_count = memory_count,
        .tokenizer = inputs->tokenizer ? inputs->tokenizer : r->config->data.tokenizer,
        .sources = training.list,
        .source_count = training.count,
        .validation = validation.list,
        .validation_count = validation.count,
        .autotune = trainer->tuning ? trainer->tuning->json : NULL,
    };
    status = nd_run_record_write(files->dir, files->continues, &record);
out:
    free(training.list);
    free(validation.list);
    return status;
}

/* It records the command that the user typed: that of ndlaunch, if it started this worker. */
nd_status nd_run_record_make(const nd_run_files *files, const nd_run_context *run,
                             const nd_trainer *trainer)
{
    const char *launcher = getenv("ND_LAUNCHER_PID");
    const nd_command_line own = {.argc = run->argc, .argv = run->argv};
    nd_command_line line = {0};
    int pid = launcher ? atoi(launcher) : 0;
    if (run->worker->identity.source != ND_IDENTITY_NDLAUNCH || pid <= 0 ||
        nd_command_line_read(pid, &line) != ND_OK) {
        return write_record(files, run, trainer, &own);
    }
    nd_status status = write_record(files, run, trainer, &line);
    nd_command_line_free(&line);
    return status;
}
