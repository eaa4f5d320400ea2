// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_SECTIONS_H
#define ND_VIEW_SECTIONS_H
/*
 * The sections of a report below its curves. Each writes a heading with its tables, or nothing
 * where the run's files do not have what it shows. Private to trainer/view.
 */
#include "trainer/view/doc.h"
#include "trainer/view/run_view.h"

enum { ND_SHORT = 64 }; /* a number, or a few words, in a cell */

/* Figures of several runs side by side, and settings that differ (figures.c). */
nd_status nd_sections_compare(nd_doc *doc, const nd_run_view *runs, int count);
/* All sections of one of `runs` runs on the page: the more of them, the fewer events of each
 * (sections.c). */
nd_status nd_sections_run(nd_doc *doc, const nd_run_view *run, int runs);

void nd_section_times(nd_doc *doc, const nd_run_view *run);        /* of trace.json (times.c) */
nd_status nd_section_slowest(nd_doc *doc, const nd_run_view *run); /* of each step (ranks.c) */
nd_status nd_section_waits(nd_doc *doc, const nd_run_view *run);   /* of profile.json (ranks.c) */
void nd_section_wire(nd_doc *doc, const nd_run_view *run);         /* memory.c */
nd_status nd_section_memory(nd_doc *doc, const nd_run_view *run);
nd_status nd_section_data(nd_doc *doc, const nd_run_view *run);        /* sources.c */
void nd_section_fp8(nd_doc *doc, const nd_run_view *run);              /* health.c */
void nd_section_events(nd_doc *doc, const nd_run_view *run, int runs); /* events.c */
void nd_section_checkpoints(nd_doc *doc, const nd_run_view *run);
nd_status nd_section_settings(nd_doc *doc, const nd_run_view *run); /* settings.c */

#endif
