// SPDX-License-Identifier: Apache-2.0
/* Steps and validations without a label that counts, as masks and the order of samples tell. */
#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"
#include "trainer/run/run.h"

/* Of all data together: all ranks wait meanwhile, and a block of whole rows has as many places of
 * the file as rows, each of which may take milliseconds where the file is far away. What comes
 * behind is met when it comes: such a step makes no update, and says so. */
enum { TOKENS_MAX = 4 << 20 };

typedef struct search {
    const nd_dataset *data;
    nd_block block;
    int64_t sequence, tokens; /* tokens: of the blocks that were read */
} search;

/* Whether a label counts in `count` blocks, of the training's order from a sample on, or without
 * `seed` of the file from a block on. Past the limit one is taken to. */
static nd_status look(search *s, const int64_t *seed, int64_t first, int64_t count, bool *counts)
{
    *counts = false;
    for (int64_t i = first; i < first + count && !*counts; i++) {
        const int64_t block = seed ? nd_dataset_sample(s->data, *seed, i) : i;
        *counts = s->tokens >= TOKENS_MAX;
        ND_TRY(*counts ? ND_OK : nd_dataset_block(s->data, block, &s->block));
        s->tokens += s->sequence;
        for (int64_t k = 0; k < s->sequence && !*counts; k++) {
            *counts = s->block.labels[k] != ND_LABEL_IGNORED;
        }
    }
    return ND_OK;
}

static nd_status warn_of_steps(search *s, const nd_config *config, int64_t begin, int64_t ahead)
{
    const int64_t samples = nd_step_blocks(config);
    const nd_loader_options options = {/* of all ranks together */
                                       .micro_batch = samples,
                                       .accumulation = 1,
                                       .dp_size = 1,
                                       .first_step = begin,
                                       .samples_ahead = ahead};
    const int64_t last = nd_loader_last_step(s->data, &options, config->train.steps);
    int64_t first = 0, found = 0;
    char later[48] = "has";
    for (int64_t step = begin; step < last && s->tokens < TOKENS_MAX; step++) {
        bool counts;
        ND_TRY(look(s, &config->data.shuffle_seed, step * samples + ahead, samples, &counts));
        first = !counts && found == 0 ? step + 1 : first;
        found += !counts;
    }
    if (found > 1) {
        snprintf(later, sizeof later, "and %lld later ones have", (long long)found - 1);
    }
    if (found > 0) {
        nd_log_warning("step %lld %s no label that counts in the loss, and will make no update; "
                       "see to the prompts and masks of data.path, or give a step more samples",
                       (long long)first, later);
    }
    return ND_OK;
}

static nd_status warn_of_set(search *s, const nd_config *config, const char *name)
{
    const int64_t all = nd_dataset_blocks(s->data), wanted = config->train.validation_batches;
    const int64_t batch =
        config->train.micro_batch_size * nd_mesh_group_size(&config->resolved_mesh, ND_GROUP_DP);
    const int64_t blocks = wanted > 0 && wanted < (all + batch - 1) / batch ? wanted * batch : all;
    bool counts;
    ND_TRY(look(s, NULL, 0, blocks, &counts));
    if (!counts) {
        nd_log_warning("no label counts in the %lld sequences that a validation reads of %s; see "
                       "to data.validation_path, or raise train.validation_batches",
                       (long long)blocks, name[0] ? name : "its data");
    }
    return ND_OK;
}

nd_status nd_inputs_warn_of_labels(const nd_config *config, const nd_inputs *inputs, int64_t begin,
                                   int64_t samples_ahead)
{
    search s = {.sequence = config->train.sequence_length};
    const int sets = inputs->validation ? nd_dataset_sources(inputs->validation) : 0;
    nd_status status = ND_OK;
    ND_TRY_OUT(ND_ALLOC(s.sequence, &s.block.inputs));
    ND_TRY_OUT(ND_ALLOC(s.sequence, &s.block.labels));
    for (int i = 0; i <= sets; i++) { /* the training's last: many steps take what is left */
        int64_t ignored = 0;
        s.data = i < sets ? nd_dataset_source(inputs->validation, i) : inputs->data;
        ND_TRY_OUT(nd_dataset_ignored(s.data, &ignored));
        if (ignored > 0) {
            ND_TRY_OUT(i < sets
                           ? warn_of_set(&s, config, nd_dataset_source_name(inputs->validation, i))
                           : warn_of_steps(&s, config, begin, samples_ahead));
        }
    }
out:
    free(s.block.inputs);
    free(s.block.labels);
    return status;
}
