// SPDX-License-Identifier: Apache-2.0
/* Which ranks made the others wait: of every step by its record, and of single collectives by
 * profile.json. */
#include <math.h>
#include <stdlib.h>

#include "trainer/view/curve.h"
#include "trainer/view/sections.h"
#include "trainer/view/waits.h"

/* SLOWEST_MAX: ranks in the table of the slowest; RANK_LIMIT: above it a record is damaged. */
enum { RANKS_MAX = 64, SLOWEST_MAX = 8, RANK_LIMIT = 1 << 20 };

/* The steps in which a rank was the slowest. */
typedef struct rank_steps {
    int rank;
    int64_t steps;
    double lag_ms, longest_ms; /* that it worked longer than the fastest: sum, largest */
} rank_steps;

static int by_steps(const void *a, const void *b)
{
    const rank_steps *x = a, *y = b;
    int order = (y->steps > x->steps) - (y->steps < x->steps);
    return order ? order : (x->rank > y->rank) - (x->rank < y->rank);
}

/* The columns of metrics.jsonl that say which rank worked longest in a step. */
typedef struct work {
    const double *slowest_rank, *slowest_ms, *fastest_ms;
    size_t rows;
} work;

/* The slowest rank of a step; -1: its record does not name one. */
static int slowest_of(const work *w, size_t i)
{
    return w->slowest_rank[i] >= 0 && w->slowest_rank[i] < RANK_LIMIT &&
                   isfinite(w->slowest_ms[i] - w->fastest_ms[i])
               ? (int)w->slowest_rank[i]
               : -1;
}

static size_t count_slowest(const work *w, rank_steps *ranks, double *lags)
{
    size_t known = 0;
    for (size_t i = 0; i < w->rows; i++) {
        const int rank = slowest_of(w, i);
        if (rank >= 0) {
            const double lag = w->slowest_ms[i] - w->fastest_ms[i];
            ranks[rank].rank = rank;
            ranks[rank].steps++;
            ranks[rank].lag_ms += lag;
            ranks[rank].longest_ms = fmax(ranks[rank].longest_ms, lag);
            lags[known++] = lag;
        }
    }
    return known;
}

static void write_slowest(nd_doc *doc, const nd_run_view *run, const rank_steps *ranks, int count,
                          size_t known)
{
    nd_mesh mesh;
    const bool has_mesh = nd_run_view_mesh(run, &mesh);
    nd_doc_table(doc, false,
                 "|steps in which it was the slowest|share|ms longer than the fastest, "
                 "mean|largest");
    for (int i = 0; i < count && i < SLOWEST_MAX && ranks[i].steps > 0; i++) {
        const rank_steps *r = &ranks[i];
        char place[ND_SHORT] = "";
        if (has_mesh && r->rank < nd_mesh_world_size(&mesh)) {
            nd_mesh_format_rank(&mesh, r->rank, place, sizeof place);
        }
        ND_DOC_ROW(
            doc, place[0] ? nd_cell("rank %d (%s)", r->rank, place) : nd_cell("rank %d", r->rank),
            nd_cell("%lld", (long long)r->steps), nd_cell_share((double)r->steps / (double)known),
            nd_cell("%.3f", r->lag_ms / (double)r->steps), nd_cell("%.3f", r->longest_ms));
    }
}

nd_status nd_section_slowest(nd_doc *doc, const nd_run_view *run)
{
    const nd_metrics *m = &run->metrics;
    const work w = {nd_metrics_column(m, &m->steps, "slowest_rank"),
                    nd_metrics_column(m, &m->steps, "slowest_ms"),
                    nd_metrics_column(m, &m->steps, "fastest_ms"), m->steps.rows};
    rank_steps *ranks = NULL;
    double *lags = NULL;
    nd_status status = ND_OK;
    int count = 0;
    for (size_t i = 0; i < w.rows; i++) {
        const int rank = slowest_of(&w, i);
        count = rank >= count ? rank + 1 : count;
    }
    if (count == 0) {
        return ND_OK;
    }
    ND_TRY_OUT(ND_ALLOC(count, &ranks));
    ND_TRY_OUT(ND_ALLOC(w.rows, &lags));
    const size_t known = count_slowest(&w, ranks, lags);
    const double lag = nd_median(lags, known);
    qsort(ranks, (size_t)count, sizeof *ranks, by_steps);
    nd_doc_heading(doc, "Slowest rank");
    nd_doc_say(doc,
               "Rank %d worked longest in %lld of %zu steps. Work is forward, backward and waiting "
               "for data, without communication. In the median step the slowest rank worked %.3f "
               "ms longer than the fastest, %.1f %% of the time of a step.",
               ranks[0].rank, (long long)ranks[0].steps, known, lag,
               100 * lag / run->figures.step_ms);
    write_slowest(doc, run, ranks, count, known);
out:
    free(ranks);
    free(lags);
    return status;
}

/* Collectives of profile.json. */

static void write_wait_row(nd_doc *doc, int rank, const nd_rank_waits *w, double steps)
{
    ND_DOC_ROW(doc, nd_cell("rank %d", rank), nd_cell("%.3f", w->communication_ms / steps),
               nd_cell("%.3f", w->waited_ms / steps), nd_cell("%.3f", w->caused_ms / steps),
               nd_cell("%lld", (long long)w->last));
}

/* The rank that others waited for longest. */
static int slowest_rank(const nd_waits *waits)
{
    int slowest = 0;
    for (int i = 1; i < waits->count; i++) {
        slowest = waits->ranks[i].caused_ms > waits->ranks[slowest].caused_ms ? i : slowest;
    }
    return slowest;
}

static void write_wait_table(nd_doc *doc, const nd_waits *waits)
{
    int slowest = slowest_rank(waits), count = waits->count < RANKS_MAX ? waits->count : RANKS_MAX;
    double steps = waits->steps > 0 ? (double)waits->steps : 1;
    nd_doc_heading(doc, "Who waited for whom");
    nd_doc_say(doc,
               "From profile.json: %lld steps, %lld collectives. Others waited longest for rank "
               "%d: %.3f ms of a step.",
               (long long)waits->steps, (long long)waits->collectives, slowest,
               waits->ranks[slowest].caused_ms / steps);
    nd_doc_table(doc, false,
                 "|communication, ms of a step|of it waiting for others|others waiting for "
                 "it|collectives it entered last");
    for (int i = 0; i < count; i++) {
        write_wait_row(doc, i, &waits->ranks[i], steps);
    }
    if (slowest >= count) {
        write_wait_row(doc, slowest, &waits->ranks[slowest], steps);
    }
    if (waits->count > count) {
        nd_doc_say(doc, "The first %d of %d ranks, and the slowest.", count, waits->count);
    }
}

nd_status nd_section_waits(nd_doc *doc, const nd_run_view *run)
{
    nd_mesh mesh;
    nd_waits waits = {0};
    if (!run->profile || !nd_run_view_mesh(run, &mesh)) {
        return ND_OK;
    }
    ND_TRY(nd_waits_read(run->profile, &mesh, &waits));
    if (waits.collectives > 0) {
        write_wait_table(doc, &waits);
    }
    nd_waits_fini(&waits);
    return ND_OK;
}
