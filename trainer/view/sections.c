// SPDX-License-Identifier: Apache-2.0
/* Which sections a run has, in which order. */
#include "trainer/view/sections.h"

/* What deserves attention. */
static void write_notes(nd_doc *doc, const nd_run_view *run)
{
    const nd_run_figures *f = &run->figures;
    const struct {
        int64_t count;
        const char *text;
    } notes[] = {
        {f->not_finite, "steps whose loss was not finite"},
        {f->skipped, "steps that were skipped, as train.nonfinite asks"},
        {f->rewinds, "returns to a checkpoint because a step was not finite or a spike"},
        {f->restarts, "times that the run was resumed"},
        {f->failed_saves, "checkpoints that could not be written"},
        {f->lost_lines,
         "lines of metrics.jsonl that were lost, as the disk was full or failed; curves are "
         "straight there, and tables do without them"},
        {f->lost_tracked, "records that TensorBoard or another tracker did not take"},
    };
    for (size_t i = 0; i < sizeof notes / sizeof *notes; i++) {
        if (notes[i].count > 0) {
            nd_doc_say(doc, "%s: %lld", notes[i].text, (long long)notes[i].count);
        }
    }
    if (f->data_wait_share > 0.05) {
        nd_doc_say(doc,
                   "%.1f %% of the time was spent waiting for data: the file system, or the "
                   "encoding of text, is slower than the steps.",
                   f->data_wait_share * 100);
    }
    if (f->last_validation > f->best_validation * 1.01) {
        nd_doc_say(doc,
                   "The validation loss was lowest after step %lld (%.4f) and has risen since "
                   "(%.4f).",
                   (long long)f->best_validation_step, f->best_validation, f->last_validation);
    }
    if (run->metrics.half_line) {
        nd_doc_say(doc, "The last line of metrics.jsonl is incomplete and was left out.");
    }
}

nd_status nd_sections_run(nd_doc *doc, const nd_run_view *run, int runs)
{
    write_notes(doc, run);
    nd_section_times(doc, run);
    ND_TRY(nd_section_slowest(doc, run));
    ND_TRY(nd_section_waits(doc, run));
    nd_section_wire(doc, run);
    ND_TRY(nd_section_memory(doc, run));
    nd_section_fp8(doc, run);
    ND_TRY(nd_section_data(doc, run));
    nd_section_events(doc, run, runs);
    nd_section_checkpoints(doc, run);
    return nd_section_settings(doc, run);
}
