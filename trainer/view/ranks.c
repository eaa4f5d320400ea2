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

/* The slowest rank of a step; -1: its record does not name one. */
static int slowest_of(const nd_metric_row *row)
{
    double rank = (double)row->value[ND_METRIC_SLOWEST_RANK];
    return rank >= 0 && rank < RANK_LIMIT && isfinite(row->value[ND_METRIC_SLOWEST_MS]) &&
                   isfinite(row->value[ND_METRIC_FASTEST_MS])
               ? (int)rank
               : -1;
}

static int64_t count_slowest(const nd_metrics *m, rank_steps *ranks, float *lags)
{
    int64_t known = 0;
    for (size_t i = 0; i < m->row_count; i++) {
        const nd_metric_row *row = &m->rows[i];
        int rank = slowest_of(row);
        if (rank >= 0) {
            float lag = row->value[ND_METRIC_SLOWEST_MS] - row->value[ND_METRIC_FASTEST_MS];
            ranks[rank].rank = rank;
            ranks[rank].steps++;
            ranks[rank].lag_ms += (double)lag;
            ranks[rank].longest_ms = fmax(ranks[rank].longest_ms, (double)lag);
            lags[known++] = lag;
        }
    }
    return known;
}

static void write_slowest(nd_doc *doc, const nd_run_view *run, const rank_steps *ranks, int count,
                          int64_t known)
{
    static const char *const heads[] = {"", "steps in which it was the slowest", "share",
                                        "ms longer than the fastest, mean", "largest"};
    nd_mesh mesh;
    bool has_mesh = nd_run_view_mesh(run, &mesh);
    nd_doc_table_begin(doc, false, 5, heads);
    for (int i = 0; i < count && i < SLOWEST_MAX && ranks[i].steps > 0; i++) {
        const rank_steps *r = &ranks[i];
        char place[ND_SHORT] = "";
        if (has_mesh && r->rank < nd_mesh_world_size(&mesh)) {
            nd_mesh_format_rank(&mesh, r->rank, place, sizeof place);
        }
        nd_doc_row_begin(doc);
        nd_doc_cellf(doc, "rank %d%s%s%s", r->rank, place[0] ? " (" : "", place,
                     place[0] ? ")" : "");
        nd_doc_cellf(doc, "%lld", (long long)r->steps);
        nd_doc_cell_share(doc, (double)r->steps / (double)known);
        nd_doc_cellf(doc, "%.3f", r->lag_ms / (double)r->steps);
        nd_doc_cellf(doc, "%.3f", r->longest_ms);
        nd_doc_row_end(doc);
    }
    nd_doc_table_end(doc);
}

nd_status nd_section_slowest(nd_doc *doc, const nd_run_view *run)
{
    const nd_metrics *m = &run->metrics;
    rank_steps *ranks = NULL;
    float *lags = NULL;
    nd_status status = ND_OK;
    int count = 0;
    for (size_t i = 0; i < m->row_count; i++) {
        int rank = slowest_of(&m->rows[i]);
        count = rank >= count ? rank + 1 : count;
    }
    if (count == 0) {
        return ND_OK;
    }
    ND_TRY_OUT(ND_ALLOC(count, &ranks));
    ND_TRY_OUT(ND_ALLOC(m->row_count, &lags));
    const int64_t known = count_slowest(m, ranks, lags);
    const double lag = nd_median(lags, (size_t)known);
    qsort(ranks, (size_t)count, sizeof *ranks, by_steps);
    nd_doc_heading(doc, 2, "Slowest rank");
    nd_doc_say(doc,
               "Rank %d worked longest in %lld of %lld steps. Work is forward, backward and "
               "waiting for data, without communication. In the median step the slowest rank "
               "worked %.3f ms longer than the fastest, %.1f %% of the time of a step.",
               ranks[0].rank, (long long)ranks[0].steps, (long long)known, lag,
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
    nd_doc_row_begin(doc);
    nd_doc_cellf(doc, "rank %d", rank);
    nd_doc_cellf(doc, "%.3f", w->communication_ms / steps);
    nd_doc_cellf(doc, "%.3f", w->waited_ms / steps);
    nd_doc_cellf(doc, "%.3f", w->caused_ms / steps);
    nd_doc_cellf(doc, "%lld", (long long)w->last);
    nd_doc_row_end(doc);
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
    static const char *const heads[] = {"", "communication, ms of a step",
                                        "of it waiting for others", "others waiting for it",
                                        "collectives it entered last"};
    int slowest = slowest_rank(waits), count = waits->count < RANKS_MAX ? waits->count : RANKS_MAX;
    double steps = waits->steps > 0 ? (double)waits->steps : 1;
    nd_doc_heading(doc, 2, "Who waited for whom");
    nd_doc_say(doc,
               "From profile.json: %lld steps, %lld collectives. Others waited longest for rank "
               "%d: %.3f ms of a step.",
               (long long)waits->steps, (long long)waits->collectives, slowest,
               waits->ranks[slowest].caused_ms / steps);
    nd_doc_table_begin(doc, false, 5, heads);
    for (int i = 0; i < count; i++) {
        write_wait_row(doc, i, &waits->ranks[i], steps);
    }
    if (slowest >= count) {
        write_wait_row(doc, slowest, &waits->ranks[slowest], steps);
    }
    nd_doc_table_end(doc);
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
