// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/waits.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "trainer/view/metrics.h"

enum { LINE_BYTES = 1024, WORD = 32 };

/* A rank's part in a collective. */
typedef struct entry {
    int group, first_member; /* the ranks of a group are told apart by their first one */
    int64_t sequence;
    char op[WORD];
    int rank;
    double begin_us, us; /* when the call began, and how long it took */
} entry;

typedef struct reading {
    const nd_mesh *mesh;
    nd_waits waits;
    entry *entries;
    size_t count, room;
} reading;

static int group_named(const char *name)
{
    for (int g = 0; g < ND_GROUP_COUNT; g++) {
        if (strcmp(nd_group_name((nd_group_kind)g), name) == 0) {
            return g;
        }
    }
    return -1;
}

static nd_status add_entry(reading *r, const json_t *event, int rank)
{
    const json_t *args = json_object_get(event, "args");
    entry e = {.group = group_named(nd_json_words(args, "group")),
               .sequence = nd_json_whole(args, "sequence"),
               .rank = rank,
               .begin_us = nd_json_number(event, "ts"),
               .us = nd_json_number(event, "dur")};
    if (e.group < 0) {
        return ND_OK;
    }
    e.first_member = nd_mesh_group_member(r->mesh, (nd_group_kind)e.group, rank, 0);
    snprintf(e.op, sizeof e.op, "%s", nd_json_words(args, "op"));
    if (r->count == r->room) {
        size_t room = r->room > 0 ? 2 * r->room : 1024;
        entry *more = realloc(r->entries, room * sizeof *more);
        if (!more) {
            return nd_fail_memory("the collectives of a profile");
        }
        r->entries = more;
        r->room = room;
    }
    r->entries[r->count++] = e;
    return ND_OK;
}

static nd_status add_event(reading *r, const json_t *event)
{
    const char *kind = nd_json_words(event, "cat");
    const int64_t rank = nd_json_whole(event, "pid");
    if (rank < 0 || rank >= r->waits.count) {
        return ND_OK;
    }
    r->waits.steps += rank == 0 && strcmp(kind, "step") == 0;
    if (strcmp(kind, "communication") != 0) {
        return ND_OK;
    }
    r->waits.ranks[rank].communication_ms += nd_json_number(event, "dur") * 1e-3;
    return json_object_get(event, "args") ? add_entry(r, event, (int)rank) : ND_OK;
}

/* trainer/run/profile.c writes each event on a line of its own, which a comma or the end of the
 * list follows. */
static nd_status read_event(reading *r, const char *line)
{
    json_error_t error;
    json_t *event = json_loads(line, JSON_DISABLE_EOF_CHECK, &error);
    nd_status status = event || !nd_json_no_memory(&error) ? ND_OK : nd_fail_memory("a profile");
    status = event ? add_event(r, event) : status;
    json_decref(event);
    return status;
}

static int by_collective(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    int order = x->group != y->group                 ? x->group - y->group
                : x->first_member != y->first_member ? x->first_member - y->first_member
                                                     : strcmp(x->op, y->op);
    if (order != 0 || x->sequence != y->sequence) {
        return order != 0 ? order : x->sequence < y->sequence ? -1 : 1;
    }
    return x->begin_us < y->begin_us ? -1 : x->begin_us > y->begin_us;
}

static int same_collective(const entry *x, const entry *y)
{
    return x->group == y->group && x->first_member == y->first_member &&
           x->sequence == y->sequence && strcmp(x->op, y->op) == 0;
}

/* The entries of one collective, the last one to come at the end. */
static void count_collective(nd_waits *waits, const entry *list, size_t count)
{
    const entry *last = &list[count - 1];
    if (count < 2) {
        return;
    }
    waits->collectives++;
    waits->ranks[last->rank].last++;
    for (size_t i = 0; i + 1 < count; i++) {
        double early = last->begin_us - list[i].begin_us;
        double waited = (early < list[i].us ? early : list[i].us) * 1e-3;
        waits->ranks[list[i].rank].waited_ms += waited;
        waits->ranks[last->rank].caused_ms += waited;
    }
}

static void count_all(reading *r)
{
    if (r->count > 0) {
        qsort(r->entries, r->count, sizeof *r->entries, by_collective);
    }
    for (size_t begin = 0, end; begin < r->count; begin = end) {
        for (end = begin + 1;
             end < r->count && same_collective(&r->entries[begin], &r->entries[end]); end++) {
        }
        count_collective(&r->waits, &r->entries[begin], end - begin);
    }
}

static nd_status read_lines(reading *r, FILE *in, const char *path)
{
    char line[LINE_BYTES];
    if (!fgets(line, sizeof line, in) || !strstr(line, "\"traceEvents\"")) {
        return nd_fail(ND_ERR_DATA,
                       "%s is no profile of ndtrain; remove it, and the report leaves it out",
                       path);
    }
    while (fgets(line, sizeof line, in)) {
        ND_TRY(read_event(r, line));
    }
    return ferror(in) ? nd_fail(ND_ERR_IO, "%s cannot be read: %s", path, strerror(errno)) : ND_OK;
}

nd_status nd_waits_read(const char *path, const nd_mesh *mesh, nd_waits *out)
{
    reading r = {.mesh = mesh, .waits = {.count = nd_mesh_world_size(mesh)}};
    nd_status status = ND_OK;
    FILE *in = NULL;
    ND_TRY(nd_fs_stream_own(path, ND_ERR_DATA, &in));
    ND_TRY_OUT(ND_ALLOC(r.waits.count, &r.waits.ranks));
    ND_TRY_OUT(read_lines(&r, in, path));
    count_all(&r);
    *out = r.waits;
    r.waits.ranks = NULL;
out:
    free(r.entries);
    free(r.waits.ranks);
    fclose(in);
    return status;
}

void nd_waits_fini(nd_waits *waits)
{
    free(waits->ranks);
    *waits = (nd_waits){0};
}
