// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/metric_lines.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"

/* What the keys of a line mean. The metrics come first, so that their numbers are those of
 * nd_metric. */
enum {
    KEY_STEP = ND_METRIC_COUNT,
    KEY_TOKENS_SEEN,
    KEY_VALIDATION_LOSS,
    KEY_VALIDATION_TOKENS,
    KEY_VALIDATION_MS,
    KEY_NUMBERS,
    KEY_SKIPPED = KEY_NUMBERS,
    KEY_WIRE,
    KEY_SOURCE_LOSS,
    KEY_SOURCE_TOKENS,
    KEY_SET_LOSS,
    KEY_SET_TOKENS,
    KEY_HEALTH,
    KEY_EVENT,
    KEY_IGNORED
};

/* In the order in which a line has them: the next key is looked for first. */
static const nd_scan_key line_keys[] = {
    ND_SCAN_KEY("step", KEY_STEP),
    ND_SCAN_KEY("skipped", KEY_SKIPPED),
    ND_SCAN_KEY("loss", ND_METRIC_LOSS),
    ND_SCAN_KEY("grad_norm", ND_METRIC_GRAD_NORM),
    ND_SCAN_KEY("lr", ND_METRIC_LR),
    ND_SCAN_KEY("tokens", KEY_IGNORED),
    ND_SCAN_KEY("tokens_seen", KEY_TOKENS_SEEN),
    ND_SCAN_KEY("source_loss", KEY_SOURCE_LOSS),
    ND_SCAN_KEY("source_tokens", KEY_SOURCE_TOKENS),
    ND_SCAN_KEY("wire_bytes", ND_METRIC_WIRE),
    ND_SCAN_KEY("wire", KEY_WIRE),
    ND_SCAN_KEY("step_ms", ND_METRIC_STEP_MS),
    ND_SCAN_KEY("data_wait_ms", ND_METRIC_DATA_WAIT_MS),
    ND_SCAN_KEY("slowest_ms", ND_METRIC_SLOWEST_MS),
    ND_SCAN_KEY("fastest_ms", ND_METRIC_FASTEST_MS),
    ND_SCAN_KEY("slowest_rank", ND_METRIC_SLOWEST_RANK),
    ND_SCAN_KEY("tokens_per_second", ND_METRIC_TOKENS_PER_SECOND),
    ND_SCAN_KEY("tokens_per_second_per_worker", KEY_IGNORED),
    ND_SCAN_KEY("tflops_per_worker_causal", ND_METRIC_TFLOPS),
    ND_SCAN_KEY("tflops_per_worker_accelerate", KEY_IGNORED),
    ND_SCAN_KEY("peak_memory_bytes", ND_METRIC_PEAK_MEMORY),
    ND_SCAN_KEY("validation_loss", KEY_VALIDATION_LOSS),
    ND_SCAN_KEY("validation_tokens", KEY_VALIDATION_TOKENS),
    ND_SCAN_KEY("validation_set_loss", KEY_SET_LOSS),
    ND_SCAN_KEY("validation_set_tokens", KEY_SET_TOKENS),
    ND_SCAN_KEY("validation_ms", KEY_VALIDATION_MS),
    ND_SCAN_KEY("event", KEY_EVENT),
    ND_SCAN_KEY("fp8_health", KEY_HEALTH),
};

/* What a line holds, while it is read. */
typedef struct line {
    nd_metric_lines *lines;
    double number[KEY_NUMBERS]; /* by meaning */
    bool skipped, is_step, is_validation, is_event, is_health;
} line;

/* Lists. */

size_t nd_metric_entry_bytes(nd_metric_list list)
{
    static const size_t bytes[ND_METRIC_LISTS] = {
        [ND_METRIC_ROWS] = sizeof(nd_metric_row),
        [ND_METRIC_VALIDATIONS] = sizeof(nd_validation_row),
        [ND_METRIC_SOURCES] = sizeof(nd_source_row),
        [ND_METRIC_SETS] = sizeof(nd_source_row),
        [ND_METRIC_HEALTH] = sizeof(nd_health_row),
        [ND_METRIC_EVENTS] = sizeof(nd_metric_event),
    };
    return bytes[list];
}

/* Makes room for one more of `size` bytes behind `count`. `list` is the address of a pointer. */
static nd_status grow(void *list, size_t count, size_t *room, size_t size)
{
    void *old;
    memcpy(&old, list, sizeof old);
    if (count < *room) {
        return ND_OK;
    }
    size_t wanted = *room > 0 ? 2 * *room : 256;
    void *more = realloc(old, wanted * size);
    if (!more) {
        return nd_fail_memory("%zu lines of metrics.jsonl", wanted);
    }
    memcpy(list, &more, sizeof more);
    *room = wanted;
    return ND_OK;
}

static nd_status append(nd_metric_lines *lines, nd_metric_list list, const void *entry)
{
    nd_metric_entries *e = &lines->lists[list];
    const size_t size = nd_metric_entry_bytes(list);
    ND_TRY(grow(&e->data, e->count, &e->room, size));
    memcpy((char *)e->data + e->count++ * size, entry, size);
    return ND_OK;
}

/* Names. */

int nd_names_index(nd_names_found *names, const char *name, size_t length)
{
    length = length < ND_DATA_SOURCE_NAME ? length : ND_DATA_SOURCE_NAME - 1;
    for (int i = 0; i < names->count; i++) {
        if (strncmp(names->name[i], name, length) == 0 && !names->name[i][length]) {
            return i;
        }
    }
    if (names->count == ND_DATA_SOURCES_MAX) {
        return -1;
    }
    memcpy(names->name[names->count], name, length);
    names->name[names->count][length] = '\0';
    return names->count++;
}

/* {"web":2.5,"code":null}: the losses or the tokens of sources. */
typedef struct by_name {
    nd_names_found *names;
    nd_line_sources *found;
    bool losses;
} by_name;

static const char *read_of_name(void *context, const nd_scan_member *member, const char *p,
                                const char *end)
{
    by_name *b = context;
    double value;
    int at = 0, source = nd_names_index(b->names, member->name, member->length);
    p = nd_scan_amount(p, end, &value);
    while (at < b->found->count && b->found->of[at].source != source) {
        at++;
    }
    if (!p || source < 0) {
        return p;
    }
    if (at == b->found->count) {
        b->found->of[b->found->count++] =
            (nd_source_row){.tokens = (double)NAN, .loss = NAN, .source = source};
    }
    if (b->losses) {
        b->found->of[at].loss = (float)value;
    } else {
        b->found->of[at].tokens = value;
    }
    return p;
}

static const char *read_by_name(line *l, int meaning, const char *p, const char *end)
{
    bool sets = meaning == KEY_SET_LOSS || meaning == KEY_SET_TOKENS;
    by_name context = {sets ? &l->lines->sets : &l->lines->sources,
                       sets ? &l->lines->of_sets : &l->lines->of_sources,
                       meaning == KEY_SET_LOSS || meaning == KEY_SOURCE_LOSS};
    return nd_scan_members(&(nd_scan_object){.read = read_of_name, .context = &context}, p, end);
}

/* Numbers. */

static const char *read_wire_value(void *context, const nd_scan_member *member, const char *p,
                                   const char *end)
{
    line *l = context;
    return member->meaning < 0 ? nd_scan_value(p, end)
                               : nd_scan_amount(p, end, &l->number[member->meaning]);
}

static void find_wire_keys(nd_scan_key *keys)
{
    for (nd_traffic_kind k = 0; k < ND_TRAFFIC_COUNT; k++) {
        const char *name = nd_traffic_name(k);
        keys[k] = (nd_scan_key){name, strlen(name), ND_METRIC_WIRE_KINDS + (int)k};
    }
}

static const char *read_wire(line *l, const char *p, const char *end)
{
    nd_scan_key *keys = l->lines->wire;
    if (!keys[0].name) {
        find_wire_keys(keys);
    }
    return nd_scan_members(&(nd_scan_object){keys, ND_TRAFFIC_COUNT, read_wire_value, l}, p, end);
}

static const char *read_line_value(void *context, const nd_scan_member *member, const char *p,
                                   const char *end)
{
    line *l = context;
    switch (member->meaning) {
    case -1:
    case KEY_IGNORED:
        return nd_scan_value(p, end);
    case KEY_WIRE:
        return read_wire(l, p, end);
    case KEY_SOURCE_LOSS:
    case KEY_SOURCE_TOKENS:
    case KEY_SET_LOSS:
    case KEY_SET_TOKENS:
        return read_by_name(l, member->meaning, p, end);
    case KEY_EVENT:
        l->is_event = true;
        return nd_scan_value(p, end);
    case KEY_HEALTH:
        l->is_health = true;
        return nd_scan_value(p, end);
    case KEY_SKIPPED:
        l->skipped = nd_scan_has(p, end, "true", 4);
        return nd_scan_value(p, end);
    default:
        l->is_step |= member->meaning == ND_METRIC_STEP_MS;
        l->is_validation |= member->meaning == KEY_VALIDATION_LOSS;
        return nd_scan_amount(p, end, &l->number[member->meaning]);
    }
}

static nd_status add_sources(nd_metric_lines *lines, nd_metric_list list, nd_line_sources *found,
                             int64_t step)
{
    for (int i = 0; i < found->count; i++) {
        nd_source_row *row = &found->of[i];
        row->step = step;
        ND_TRY(append(lines, list, row));
    }
    return ND_OK;
}

static nd_status add_row(const line *l)
{
    nd_metric_row row = {.step = (int64_t)l->number[KEY_STEP],
                         .tokens_seen = l->number[KEY_TOKENS_SEEN],
                         .skipped = l->skipped};
    for (int k = 0; k < ND_METRIC_COUNT; k++) {
        row.value[k] = (float)l->number[k];
    }
    ND_TRY(append(l->lines, ND_METRIC_ROWS, &row));
    return add_sources(l->lines, ND_METRIC_SOURCES, &l->lines->of_sources, row.step);
}

static nd_status add_validation(const line *l)
{
    const nd_validation_row row = {(int64_t)l->number[KEY_STEP], l->number[KEY_VALIDATION_LOSS],
                                   l->number[KEY_VALIDATION_TOKENS], l->number[KEY_VALIDATION_MS]};
    ND_TRY(append(l->lines, ND_METRIC_VALIDATIONS, &row));
    return add_sources(l->lines, ND_METRIC_SETS, &l->lines->of_sets, row.step);
}

/* Events and health. */

static double number_of(const json_t *o, const char *name, double otherwise)
{
    const json_t *value = json_object_get(o, name);
    return json_is_number(value) ? json_number_value(value) : otherwise;
}

/* A whole number of up to 15 digits; 0 for anything else. */
static int64_t whole_of(const json_t *o, const char *name)
{
    double value = number_of(o, name, 0);
    return value > -1e15 && value < 1e15 ? (int64_t)value : 0;
}

/* "" for what is no text. */
static void text_of(const json_t *o, const char *name, char *out, size_t size)
{
    const char *text = json_string_value(json_object_get(o, name));
    snprintf(out, size, "%s", text ? text : "");
}

static void last_part_of(const json_t *o, const char *name, char *out, size_t size)
{
    const char *text = json_string_value(json_object_get(o, name));
    const char *slash = text ? strrchr(text, '/') : NULL;
    snprintf(out, size, "%s", slash && slash[1] ? slash + 1 : text ? text : "");
}

static nd_metric_event event_of(const json_t *o)
{
    static const char *const names[] = {[ND_METRIC_EVENT_CHECKPOINT] = "checkpoint",
                                        [ND_METRIC_EVENT_CHECKPOINT_FAILED] = "checkpoint_failed",
                                        [ND_METRIC_EVENT_RESUMED] = "resumed",
                                        [ND_METRIC_EVENT_EARLY_STOPPED] = "early_stopped",
                                        [ND_METRIC_EVENT_RECORDS_LOST] = "records_lost",
                                        [ND_METRIC_EVENT_SAMPLE] = "sample",
                                        [ND_METRIC_EVENT_ENDED] = "ended"};
    nd_metric_event e = {.step = whole_of(o, "step"),
                         .bytes = number_of(o, "bytes", 0),
                         .save_ms = number_of(o, "save_ms", 0),
                         .blocked_ms = number_of(o, "blocked_ms", 0),
                         .load_ms = number_of(o, "load_ms", 0),
                         .restart = whole_of(o, "restart"),
                         .rewound_from = whole_of(o, "rewound_from"),
                         .passed_over_samples = whole_of(o, "passed_over_samples"),
                         .records = whole_of(o, "records"),
                         .code = whole_of(o, "code")};
    text_of(o, "event", e.name, sizeof e.name);
    text_of(o, json_object_get(o, "why") ? "why" : "reason", e.text, sizeof e.text);
    text_of(o, "mesh", e.mesh, sizeof e.mesh);
    text_of(o, "mesh_was", e.mesh_was, sizeof e.mesh_was);
    text_of(o, "sink", e.sink, sizeof e.sink);
    last_part_of(o, "from", e.from, sizeof e.from);
    if (strcmp(e.name, names[ND_METRIC_EVENT_SAMPLE]) == 0) {
        text_of(o, "prompt", e.from, sizeof e.from);
        text_of(o, "text", e.text, sizeof e.text);
    }
    for (int k = ND_METRIC_EVENT_CHECKPOINT; k <= ND_METRIC_EVENT_ENDED; k++) {
        e.kind = strcmp(e.name, names[k]) == 0 ? (nd_metric_event_kind)k : e.kind;
    }
    return e;
}

static nd_status add_event(nd_metric_lines *lines, const json_t *o)
{
    const nd_metric_event event = event_of(o);
    const size_t count = lines->lists[ND_METRIC_EVENTS].count;
    ND_TRY(grow(&lines->above, count, &lines->above_room, sizeof *lines->above));
    for (int list = 0; list < ND_METRIC_EVENTS; list++) {
        lines->above[count][list] = lines->lists[list].count;
    }
    return append(lines, ND_METRIC_EVENTS, &event);
}

/* -1: no number of a layer. */
static int layer_of(const json_t *o, const char *name)
{
    int64_t layer = whole_of(o, name);
    return layer >= 0 && layer <= 1000000 ? (int)layer : -1;
}

static nd_status add_health(nd_metric_lines *lines, const json_t *o)
{
    const json_t *health = json_object_get(o, "fp8_health");
    for (int kind = 0; kind < ND_OPERAND_KINDS; kind++) {
        const json_t *operand = json_object_get(health, nd_operand_name((nd_operand_kind)kind));
        for (int linear = 0; linear < ND_LINEAR_COUNT; linear++) {
            const json_t *of = json_object_get(operand, nd_linear_name(linear));
            const nd_health_row row = {
                .step = whole_of(o, "step"),
                .operand = (nd_operand_kind)kind,
                .linear = linear,
                .worst = {.underflow = number_of(of, "underflow", (double)NAN),
                          .saturation = number_of(of, "saturation", (double)NAN),
                          .amax = number_of(of, "amax", (double)NAN),
                          .underflow_layer = layer_of(of, "underflow_layer"),
                          .saturation_layer = layer_of(of, "saturation_layer"),
                          .amax_layer = layer_of(of, "amax_layer")}};
            ND_TRY(of ? append(lines, ND_METRIC_HEALTH, &row) : ND_OK);
        }
    }
    return ND_OK;
}

/* Of these there are few. */
static nd_status add_tree(nd_metric_lines *lines, const char *text, const char *end, bool event)
{
    json_error_t error;
    json_t *o = json_loadb(text, (size_t)(end - text), 0, &error);
    nd_status status = ND_OK;
    if (json_is_object(o)) {
        status = event ? add_event(lines, o) : add_health(lines, o);
    } else {
        lines->damaged = true;
        status =
            !o && nd_json_no_memory(&error) ? nd_fail_memory("a line of metrics.jsonl") : ND_OK;
    }
    json_decref(o);
    return status;
}

nd_status nd_metric_lines_add(nd_metric_lines *lines, const char *text, const char *end)
{
    line l = {.lines = lines};
    for (int k = 0; k < KEY_NUMBERS; k++) {
        l.number[k] = NAN;
    }
    const nd_scan_object root = {line_keys, sizeof line_keys / sizeof *line_keys, read_line_value,
                                 &l};
    lines->of_sources.count = lines->of_sets.count = 0;
    const char *stop = nd_scan_members(&root, text, end);
    lines->damaged = !stop || nd_scan_blanks(stop, end) != end || !(l.number[KEY_STEP] >= 0) ||
                     l.number[KEY_STEP] >= 1e15;
    if (lines->damaged) {
        return ND_OK;
    }
    if (l.is_event || l.is_health) {
        return add_tree(lines, text, end, l.is_event);
    }
    ND_TRY(l.is_step ? add_row(&l) : ND_OK);
    return l.is_validation ? add_validation(&l) : ND_OK;
}

void nd_metric_lines_fini(nd_metric_lines *lines)
{
    for (int list = 0; list < ND_METRIC_LISTS; list++) {
        free(lines->lists[list].data);
    }
    free(lines->above);
    *lines = (nd_metric_lines){0};
}
