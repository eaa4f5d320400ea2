// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>

#include "launcher/launcher.h"
#include "runtime/base/clock.h"
#include "runtime/rdzv/ranks.h"

nd_status nd_roster_init(int places, int spares, const char *own_host, nd_roster *out)
{
    nd_roster r = {.count = places + spares, .places = places, .most_places = places};
    if (ND_ALLOC(r.count, &r.nodes) != ND_OK || ND_ALLOC(places, &r.holder) != ND_OK ||
        ND_ALLOC(places, &r.former) != ND_OK) {
        r.count = r.nodes ? r.count : 0;
        nd_roster_fini(&r);
        return nd_error_last()->status;
    }
    for (int i = 1; i < r.count; i++) {
        r.nodes[i].place = -1;
    }
    for (int p = 1; p < places; p++) {
        r.holder[p] = r.former[p] = -1;
    }
    r.nodes[0].joined = true;
    snprintf(r.nodes[0].host, sizeof r.nodes[0].host, "%s", own_host);
    *out = r;
    return ND_OK;
}

void nd_roster_fini(nd_roster *roster)
{
    for (int i = 0; i < roster->count; i++) {
        free(roster->nodes[i].screen);
    }
    free(roster->nodes);
    free(roster->holder);
    free(roster->former);
    *roster = (nd_roster){0};
}

void nd_roster_begin(nd_roster *roster)
{
    for (int i = 0; i < roster->count; i++) {
        nd_node *n = &roster->nodes[i];
        free(n->screen);
        n->screen = NULL;
        n->lost = n->ended = false;
        n->waits = n->joined && n->place < 0;
        n->failure = (nd_failure){0};
        n->heard_ns = nd_clock_ns();
    }
    memcpy(roster->former, roster->holder, (size_t)roster->places * sizeof *roster->holder);
}

int nd_roster_joined(const nd_roster *roster)
{
    int joined = 0;
    for (int i = 0; i < roster->count; i++) {
        joined += roster->nodes[i].joined;
    }
    return joined;
}

void nd_roster_set_places(nd_roster *roster, int places)
{
    ND_ASSERT(places > 0 && places <= roster->most_places);
    for (int p = places; p < roster->most_places; p++) {
        if (p < roster->places && roster->holder[p] >= 0) {
            roster->nodes[roster->holder[p]].place = -1;
        }
        roster->holder[p] = roster->former[p] = -1;
    }
    roster->places = places;
}

static bool is_spare(const nd_node *n)
{
    return n->joined && n->place < 0;
}

/* Gives places that are free to nodes without one, in the order of both. */
static void fill_places(nd_roster *roster)
{
    int place = 0;
    for (int i = 0; i < roster->count; i++) {
        nd_node *n = &roster->nodes[i];
        if (!is_spare(n)) {
            continue;
        }
        while (place < roster->places && roster->holder[place] >= 0) {
            place++;
        }
        if (place == roster->places) {
            return;
        }
        roster->holder[place] = i;
        n->place = place;
    }
}

bool nd_roster_assign(nd_roster *roster)
{
    if (nd_roster_joined(roster) < roster->places) {
        return false;
    }
    for (int p = 0; p < roster->places; p++) {
        nd_node *n = roster->holder[p] < 0 ? NULL : &roster->nodes[roster->holder[p]];
        if (n && !n->joined) {
            n->place = -1;
            roster->holder[p] = -1;
        }
    }
    fill_places(roster);
    return true;
}

static bool is_absent(const void *roster, int node)
{
    return !((const nd_roster *)roster)->nodes[node].joined;
}

static bool is_working(const void *roster, int node)
{
    return ((const nd_roster *)roster)->nodes[node].place >= 0;
}

static bool is_waiting(const void *roster, int node)
{
    return is_spare(&((const nd_roster *)roster)->nodes[node]);
}

void nd_roster_missing(const nd_roster *roster, double seconds, char *out, size_t capacity)
{
    char missing[256];
    int absent = roster->count - nd_roster_joined(roster);
    int needed = absent - (roster->count - roster->places);
    nd_ranks_text(is_absent, roster, 0, roster->count, missing, sizeof missing);
    char after[32] = "", need[64] = "";
    if (seconds > 0) {
        snprintf(after, sizeof after, " after %.3g s", seconds);
    }
    if (0 < needed && needed < absent) {
        snprintf(need, sizeof need, ", and the job needs %d of them", needed);
    }
    snprintf(out, capacity, "%s %s of %d nodes %s missing%s%s", absent > 1 ? "nodes" : "node",
             missing, roster->count, absent > 1 ? "are" : "is", after, need);
}

void nd_roster_text(const nd_roster *roster, bool working, char *out, size_t capacity)
{
    nd_ranks_text(working ? is_working : is_waiting, roster, 0, roster->count, out, capacity);
}
