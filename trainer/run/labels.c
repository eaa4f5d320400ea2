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
    int32_t *inputs, *labels; /* (S) */
    int64_t sequence, tokens; /* tokens: of the blocks that were read */
} search;

/* Past the limit a block is taken to have a label that counts. */
static nd_status look_at_block(search *s, int64_t block, bool *counts)
{
    *counts = s->tokens >= TOKENS_MAX;
    if (*counts) {
        return ND_OK;
    }
    s->tokens += s->sequence;
    ND_TRY(nd_dataset_block(s->data, block, s->inputs, s->labels));
    for (int64_t i = 0; i < s->sequence && !*counts; i++) {
        *counts = s->labels[i] != ND_LABEL_IGNORED;
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
    int64_t first = 0, more = 0;
    for (int64_t step = begin; step < last && s->tokens < TOKENS_MAX; step++) {
        bool counts = false;
        for (int64_t i = 0; i < samples && !counts; i++) {
            const int64_t sample = step * samples + ahead + i;
            ND_TRY(look_at_block(s, nd_dataset_sample(s->data, config->data.shuffle_seed, sample),
                                 &counts));
        }
        more += !counts && first > 0;
        first = !counts && first == 0 ? step + 1 : first;
    }
    if (first > 0 && more > 0) {
        nd_log_warning("step %lld and %lld later ones have no label that counts in the loss, and "
                       "will make no update; see to the prompts and masks of data.path, or give a "
                       "step more samples",
                       (long long)first, (long long)more);
    } else if (first > 0) {
        nd_log_warning("step %lld has no label that counts in the loss, and will make no update; "
                       "see to the prompts and masks of data.path, or give a step more samples",
                       (long long)first);
    }
    return ND_OK;
}

static nd_status warn_of_set(search *s, const nd_config *config, const char *name)
{
    const int64_t all = nd_dataset_blocks(s->data), wanted = config->train.validation_batches;
    const int64_t batch =
        config->train.micro_batch_size * nd_mesh_group_size(&config->resolved_mesh, ND_GROUP_DP);
    const int64_t blocks = wanted > 0 && wanted < (all + batch - 1) / batch ? wanted * batch : all;
    bool counts = false;
    for (int64_t block = 0; block < blocks && !counts; block++) {
        ND_TRY(look_at_block(s, block, &counts));
    }
    if (!counts) {
        nd_log_warning("no label counts in the %lld sequences that a validation reads of %s; see "
                       "to data.validation_path, or raise train.validation_batches",
                       (long long)blocks, name[0] ? name : "its data");
    }
    return ND_OK;
}

static nd_status has_ignored(const nd_dataset *data, bool *out)
{
    int64_t ignored = 0;
    nd_status status = nd_dataset_ignored(data, &ignored);
    *out = ignored > 0;
    return status;
}

nd_status nd_inputs_warn_of_labels(const nd_config *config, const nd_inputs *inputs, int64_t begin,
                                   int64_t samples_ahead)
{
    search s = {.sequence = config->train.sequence_length};
    bool masked = false;
    nd_status status = ND_OK;
    ND_TRY_OUT(ND_ALLOC(s.sequence, &s.inputs));
    ND_TRY_OUT(ND_ALLOC(s.sequence, &s.labels));
    const int sets = inputs->validation ? nd_dataset_sources(inputs->validation) : 0;
    for (int i = 0; i < sets; i++) {
        s.data = nd_dataset_source(inputs->validation, i);
        ND_TRY_OUT(has_ignored(s.data, &masked));
        ND_TRY_OUT(masked ? warn_of_set(&s, config, nd_dataset_source_name(inputs->validation, i))
                          : ND_OK);
    }
    s.data = inputs->data; /* at the end: many steps take what is left of the limit */
    ND_TRY_OUT(has_ignored(s.data, &masked));
    ND_TRY_OUT(masked ? warn_of_steps(&s, config, begin, samples_ahead) : ND_OK);
out:
    free(s.inputs);
    free(s.labels);
    return status;
}
