// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/metrics.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fs.h"
#include "trainer/view/metric_lines.h"

/* PART_BYTES: below this, one more thread costs more than it saves. */
enum { THREADS_MAX = 16, PART_BYTES = 4 << 20 };

/* A part of the file, which a thread reads. */
typedef struct part {
    const nd_fs_map *map;
    const char *path;
    const char *begin, *end; /* whole lines */
    nd_metric_lines lines;
    const char *bad; /* the first line that is damaged */
    nd_status status;
    char why[512];
} part;

static nd_status read_part(void *context)
{
    part *p = context;
    for (const char *at = p->begin; at < p->end && !p->bad;) {
        const char *end = memchr(at, '\n', (size_t)(p->end - at));
        if (!end) {
            p->bad = at; /* another program has changed the file meanwhile */
            break;
        }
        if (end > at) {
            ND_TRY(nd_metric_lines_add(&p->lines, at, end));
            p->bad = p->lines.damaged ? at : NULL;
        }
        at = end + 1;
    }
    return ND_OK;
}

/* The message of an error belongs to the thread that had it. */
static void *part_thread(void *context)
{
    part *p = context;
    p->status = nd_fs_map_guard(p->map, p->path, read_part, p);
    if (p->status != ND_OK) {
        snprintf(p->why, sizeof p->why, "%.*s", (int)sizeof p->why - 1, nd_error_last()->message);
    }
    return NULL;
}

/* Lists of all parts, one behind another. A line "resumed" removes what lies above it and has a
 * later step. */

typedef struct merged {
    nd_metric_entries lists[ND_METRIC_LISTS]; /* with room for the entries of all parts */
    nd_names_found sources, sets;
    size_t repeated;
} merged;

static char *entry_at(const nd_metric_entries *entries, nd_metric_list list, size_t index)
{
    return (char *)entries->data + index * nd_metric_entry_bytes(list);
}

static void forget_later(merged *m, int64_t step)
{
    for (nd_metric_list list = 0; list < ND_METRIC_LISTS; list++) {
        nd_metric_entries *e = &m->lists[list];
        int64_t last = 0;
        for (; e->count > 0; e->count--) {
            memcpy(&last, entry_at(e, list, e->count - 1), sizeof last);
            if (last <= step) {
                break;
            }
            m->repeated += list == ND_METRIC_ROWS;
        }
    }
}

/* Entries [from, to) of a part. Sources get their numbers among the names of all parts. */
static void append(merged *m, nd_metric_list list, const part *p, size_t from, size_t to)
{
    nd_metric_entries *out = &m->lists[list];
    const nd_names_found *own = list == ND_METRIC_SETS ? &p->lines.sets : &p->lines.sources;
    nd_names_found *all = list == ND_METRIC_SETS ? &m->sets : &m->sources;
    bool named = list == ND_METRIC_SETS || list == ND_METRIC_SOURCES;
    for (size_t i = from; i < to; i++) {
        char *at = entry_at(out, list, out->count);
        memcpy(at, entry_at(&p->lines.lists[list], list, i), nd_metric_entry_bytes(list));
        if (named) {
            nd_source_row *row = (nd_source_row *)(void *)at;
            const char *name = own->name[row->source];
            row->source = nd_names_index(all, name, strlen(name));
            out->count += row->source >= 0;
        } else {
            out->count++;
        }
    }
}

static void append_part(merged *m, const part *p)
{
    const nd_metric_entries *events = &p->lines.lists[ND_METRIC_EVENTS];
    size_t from[ND_METRIC_EVENTS] = {0};
    for (size_t i = 0; i <= events->count; i++) {
        for (nd_metric_list list = 0; list < ND_METRIC_EVENTS; list++) {
            size_t to = i < events->count ? p->lines.above[i][list] : p->lines.lists[list].count;
            append(m, list, p, from[list], to);
            from[list] = to;
        }
        if (i < events->count) {
            const nd_metric_event *event = (const nd_metric_event *)events->data + i;
            if (event->kind == ND_METRIC_EVENT_RESUMED) {
                forget_later(m, event->step);
            }
            append(m, ND_METRIC_EVENTS, p, i, i + 1);
        }
    }
}

static nd_status keep_names(const nd_names_found *found, nd_metric_names *out)
{
    ND_TRY(ND_ALLOC(found->count + 1, &out->name));
    memcpy(out->name, found->name, (size_t)found->count * sizeof *out->name);
    out->count = found->count;
    return ND_OK;
}

static nd_metrics lists_of(const merged *m)
{
    const nd_metric_entries *e = m->lists;
    return (nd_metrics){.rows = e[ND_METRIC_ROWS].data,
                        .validations = e[ND_METRIC_VALIDATIONS].data,
                        .sources = e[ND_METRIC_SOURCES].data,
                        .sets = e[ND_METRIC_SETS].data,
                        .health = e[ND_METRIC_HEALTH].data,
                        .events = e[ND_METRIC_EVENTS].data,
                        .row_count = e[ND_METRIC_ROWS].count,
                        .validation_count = e[ND_METRIC_VALIDATIONS].count,
                        .source_count = e[ND_METRIC_SOURCES].count,
                        .set_count = e[ND_METRIC_SETS].count,
                        .health_count = e[ND_METRIC_HEALTH].count,
                        .event_count = e[ND_METRIC_EVENTS].count,
                        .repeated = m->repeated};
}

static nd_status merge(const part *parts, int count, nd_metrics *out)
{
    merged *m = NULL;
    nd_metrics found = {0};
    nd_status status = ND_OK;
    ND_TRY_OUT(ND_ALLOC(1, &m));
    for (nd_metric_list list = 0; list < ND_METRIC_LISTS; list++) {
        size_t all = 1;
        for (int i = 0; i < count; i++) {
            all += parts[i].lines.lists[list].count;
        }
        ND_TRY_OUT(nd_alloc(all, nd_metric_entry_bytes(list), &m->lists[list].data));
    }
    for (int i = 0; i < count; i++) {
        append_part(m, &parts[i]);
    }
    found = lists_of(m);
    memset(m->lists, 0, sizeof m->lists);
    ND_TRY_OUT(keep_names(&m->sources, &found.source_names));
    ND_TRY_OUT(keep_names(&m->sets, &found.set_names));
    *out = found;
    found = (nd_metrics){0};
out:
    for (int list = 0; m && list < ND_METRIC_LISTS; list++) {
        free(m->lists[list].data);
    }
    free(m);
    nd_metrics_fini(&found);
    return status;
}

/* The file. */

/* Where a damaged line stands in the file. */
typedef struct line_search {
    const char *begin, *bad;
    size_t number;
} line_search;

static nd_status find_number(void *context)
{
    line_search *s = context;
    for (const char *p = s->begin; p < s->bad; p++) {
        s->number += *p == '\n';
    }
    return ND_OK;
}

static nd_status fail_line(const char *path, const nd_fs_map *map, const char *bad)
{
    line_search search = {(const char *)map->data, bad, 1};
    ND_TRY(nd_fs_map_guard(map, path, find_number, &search));
    return nd_fail(
        ND_ERR_DATA,
        "%s line %zu is not what ndtrain writes there: the file is another program's, or "
        "it is damaged and the line must be repaired",
        path, search.number);
}

static nd_status check_parts(const part *parts, int count, const char *path, const nd_fs_map *map)
{
    for (int i = 0; i < count; i++) {
        if (parts[i].status != ND_OK) {
            return nd_fail(parts[i].status, "%s", parts[i].why);
        }
        if (parts[i].bad) {
            return fail_line(path, map, parts[i].bad);
        }
    }
    return ND_OK;
}

/* Cuts [begin, end), which ends behind a line, into parts of whole lines; returns their number. */
static int cut(part *parts, int wanted, const char *begin, const char *end)
{
    int count = 0;
    for (int i = 0; i < wanted && begin < end; i++) {
        size_t share = (size_t)(end - begin) / (size_t)(wanted - i);
        const char *stop = begin + share < end ? begin + share : end - 1;
        const char *line_end = memchr(stop, '\n', (size_t)(end - stop));
        stop = i + 1 < wanted && line_end ? line_end + 1 : end;
        parts[count].begin = begin;
        parts[count++].end = stop;
        begin = stop;
    }
    return count;
}

static void run_parts(part *parts, int count)
{
    pthread_t threads[THREADS_MAX];
    bool started[THREADS_MAX] = {false};
    for (int i = 1; i < count; i++) {
        started[i] = pthread_create(&threads[i], NULL, part_thread, &parts[i]) == 0;
    }
    for (int i = 0; i < count; i++) {
        if (!started[i]) {
            part_thread(&parts[i]);
        }
    }
    for (int i = 1; i < count; i++) {
        if (started[i]) {
            pthread_join(threads[i], NULL);
        }
    }
}

static int threads_for(size_t bytes)
{
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    size_t useful = bytes / PART_BYTES + 1;
    size_t most = cpus < 1 ? 1 : (size_t)cpus;
    useful = useful < most ? useful : most;
    return useful < THREADS_MAX ? (int)useful : THREADS_MAX;
}

static nd_status find_last_line(void *context)
{
    part *whole = context;
    while (whole->end > whole->begin && whole->end[-1] != '\n') {
        whole->end--;
    }
    return ND_OK;
}

static nd_status read_map(const char *path, int threads, const nd_fs_map *map, nd_metrics *out)
{
    part *parts = NULL;
    const char *begin = (const char *)map->data;
    part whole = {.begin = begin, .end = begin + map->size};
    nd_status status = ND_OK;
    int count = 0;
    threads = threads > 0 ? threads : threads_for(map->size);
    threads = threads < THREADS_MAX ? threads : THREADS_MAX;
    ND_TRY(nd_fs_map_guard(map, path, find_last_line, &whole));
    ND_TRY(ND_ALLOC(THREADS_MAX, &parts));
    for (int i = 0; i < THREADS_MAX; i++) {
        parts[i].map = map;
        parts[i].path = path;
    }
    count = cut(parts, threads, whole.begin, whole.end);
    run_parts(parts, count);
    ND_TRY_OUT(check_parts(parts, count, path, map));
    ND_TRY_OUT(merge(parts, count, out));
    out->half_line = whole.end < begin + map->size;
out:
    for (int i = 0; i < count; i++) {
        nd_metric_lines_fini(&parts[i].lines);
    }
    free(parts);
    return status;
}

nd_status nd_metrics_read(const char *path, int threads, nd_metrics *out)
{
    nd_fs_map map = {0};
    ND_TRY(nd_fs_map_open(path, ND_ERR_DATA, &map));
    if (map.size == 0) {
        *out = (nd_metrics){0};
        nd_fs_map_close(&map);
        return ND_OK;
    }
    nd_status status = read_map(path, threads, &map, out);
    nd_fs_map_close(&map);
    return status;
}

void nd_metrics_fini(nd_metrics *metrics)
{
    free(metrics->rows);
    free(metrics->validations);
    free(metrics->sources);
    free(metrics->sets);
    free(metrics->health);
    free(metrics->events);
    free(metrics->source_names.name);
    free(metrics->set_names.name);
    *metrics = (nd_metrics){0};
}
