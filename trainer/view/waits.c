// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/waits.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "trainer/view/metrics.h"

enum { LINE_BYTES = 1024, KEY_BYTES = 128 };

typedef struct reading {
    const nd_mesh *mesh;
    nd_waits waits;
    json_t *collectives; /* owned: of each the events of its ranks, by the names of its parts */
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

/* The ranks of a group are told apart by their first one. */
static nd_status add_to_collective(reading *r, json_t *event, int rank)
{
    const json_t *args = json_object_get(event, "args");
    const int group = group_named(nd_json_words(args, "group"));
    char key[KEY_BYTES];
    if (group < 0) {
        return ND_OK;
    }
    snprintf(key, sizeof key, "%d %d %.60s %lld", group,
             nd_mesh_group_member(r->mesh, (nd_group_kind)group, rank, 0),
             nd_json_words(args, "op"), (long long)nd_json_whole(args, "sequence"));
    json_t *list = json_object_get(r->collectives, key);
    if (!list) {
        list = json_array();
        nd_json_set(&r->collectives, key, list);
    }
    return json_array_append(r->collectives ? list : NULL, event) == 0
               ? ND_OK
               : nd_fail_memory("the collectives of a profile");
}

static nd_status add_event(reading *r, json_t *event)
{
    const char *kind = nd_json_words(event, "cat");
    const int64_t rank = json_object_get(event, "pid") ? nd_json_whole(event, "pid") : -1;
    if (rank < 0 || rank >= r->waits.count) {
        return ND_OK;
    }
    r->waits.steps += rank == 0 && strcmp(kind, "step") == 0;
    if (strcmp(kind, "communication") != 0) {
        return ND_OK;
    }
    r->waits.ranks[rank].communication_ms += nd_json_number(event, "dur") * 1e-3;
    return json_object_get(event, "args") ? add_to_collective(r, event, (int)rank) : ND_OK;
}

/* trainer/run/profile.c writes each event on a line of its own, which a comma or the end of the
 * list follows. */
static nd_status read_event(reading *r, const char *line)
{
    json_error_t error;
    json_t *event = json_loads(line, JSON_DISABLE_EOF_CHECK, &error);
    if (!event) {
        return nd_json_no_memory(&error) ? nd_fail_memory("a profile") : ND_OK;
    }
    nd_status status = add_event(r, event);
    json_decref(event);
    return status;
}

/* The events of one collective: its ranks waited for the one that came last. */
static void count_collective(nd_waits *waits, const json_t *events)
{
    const json_t *last = json_array_get(events, 0), *event;
    size_t i;
    if (json_array_size(events) < 2) {
        return;
    }
    json_array_foreach(events, i, event)
    {
        last = nd_json_number(event, "ts") >= nd_json_number(last, "ts") ? event : last;
    }
    nd_rank_waits *slowest = &waits->ranks[nd_json_whole(last, "pid")];
    waits->collectives++;
    slowest->last++;
    json_array_foreach(events, i, event)
    {
        const double early = nd_json_number(last, "ts") - nd_json_number(event, "ts");
        const double call = nd_json_number(event, "dur");
        const double waited = (early < call ? early : call) * 1e-3;
        waits->ranks[nd_json_whole(event, "pid")].waited_ms += event == last ? 0 : waited;
        slowest->caused_ms += event == last ? 0 : waited;
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
    const char *key;
    json_t *events;
    nd_status status = ND_OK;
    FILE *in = NULL;
    ND_TRY(nd_fs_stream_own(path, ND_ERR_DATA, &in));
    r.collectives = json_object();
    ND_TRY_OUT(ND_ALLOC(r.waits.count, &r.waits.ranks));
    ND_TRY_OUT(read_lines(&r, in, path));
    json_object_foreach(r.collectives, key, events)
    {
        count_collective(&r.waits, events);
    }
    *out = r.waits;
    r.waits.ranks = NULL;
out:
    json_decref(r.collectives);
    free(r.waits.ranks);
    fclose(in);
    return status;
}

void nd_waits_fini(nd_waits *waits)
{
    free(waits->ranks);
    *waits = (nd_waits){0};
}
