// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/metrics.h"

#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/fsio.h"
#include "runtime/base/json.h"

/* PART_BYTES: below this, one more thread costs more than it saves. */
enum { THREADS_MAX = 16, PART_BYTES = 4 << 20 };

/* What the keys of a line mean. The metrics come first, so that their numbers are those of
 * nd_metric. */
enum {
    KEY_STEP = ND_METRIC_COUNT,
    KEY_SKIPPED,
    KEY_TOKENS_SEEN,
    KEY_WIRE,
    KEY_VALIDATION_LOSS,
    KEY_VALIDATION_TOKENS,
    KEY_VALIDATION_MS,
    KEY_EVENT,
    KEY_IGNORED
};

typedef struct key {
    const char *name;
    size_t length;
    int meaning;
} key;

#define KEY(name, meaning)                                                                         \
    {                                                                                              \
        name, sizeof(name) - 1, meaning                                                            \
    }
/* In the order in which a line has them: the next key is looked for first. */
static const key line_keys[] = {
    KEY("step", KEY_STEP),
    KEY("skipped", KEY_SKIPPED),
    KEY("loss", ND_METRIC_LOSS),
    KEY("grad_norm", ND_METRIC_GRAD_NORM),
    KEY("lr", ND_METRIC_LR),
    KEY("tokens", KEY_IGNORED),
    KEY("tokens_seen", KEY_TOKENS_SEEN),
    KEY("wire_bytes", ND_METRIC_WIRE),
    KEY("wire", KEY_WIRE),
    KEY("step_ms", ND_METRIC_STEP_MS),
    KEY("data_wait_ms", ND_METRIC_DATA_WAIT_MS),
    KEY("tokens_per_second", ND_METRIC_TOKENS_PER_SECOND),
    KEY("tokens_per_second_per_worker", KEY_IGNORED),
    KEY("tflops_per_worker_causal", ND_METRIC_TFLOPS),
    KEY("tflops_per_worker_accelerate", KEY_IGNORED),
    KEY("peak_memory_bytes", ND_METRIC_PEAK_MEMORY),
    KEY("validation_loss", KEY_VALIDATION_LOSS),
    KEY("validation_tokens", KEY_VALIDATION_TOKENS),
    KEY("validation_ms", KEY_VALIDATION_MS),
    KEY("event", KEY_EVENT),
};
enum { LINE_KEYS = sizeof line_keys / sizeof *line_keys };

typedef struct line {
    double number[KEY_IGNORED]; /* by meaning */
    bool skipped, is_step, is_validation, is_event;
} line;

/* Numbers. */

const char *nd_metrics_number(const char *text, const char *end, double *out)
{
    static const double powers[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                    1e8,  1e9,  1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
                                    1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    const char *p = text;
    bool negative = p < end && *p == '-';
    uint64_t digits = 0;
    int scale = 0, kept = 0;
    p += negative;
    const char *first = p;
    for (bool fraction = false; p < end; p++) {
        if (*p == '.' && !fraction && p > first) {
            fraction = true;
            continue;
        }
        if (*p < '0' || *p > '9') {
            break;
        }
        if (kept < 18) { /* further digits are below the precision of a double */
            digits = digits * 10 + (uint64_t)(*p - '0');
            kept += digits > 0;
            scale -= fraction;
        } else {
            scale += !fraction;
        }
    }
    if (p == first || p[-1] == '.') {
        return NULL;
    }
    if (p < end && (*p == 'e' || *p == 'E')) {
        int exponent = 0;
        bool down = ++p < end && *p == '-';
        p += p < end && (*p == '-' || *p == '+');
        const char *begin = p;
        for (; p < end && *p >= '0' && *p <= '9'; p++) {
            exponent = exponent < 10000 ? exponent * 10 + (*p - '0') : exponent;
        }
        if (p == begin) {
            return NULL;
        }
        scale += down ? -exponent : exponent;
    }
    double value = (double)digits;
    if (scale < -22 || scale > 22) { /* in two steps, so that subnormal results are not lost */
        value = value * pow(10, scale / 2) * pow(10, scale - scale / 2);
    } else {
        value = scale < 0 ? value / powers[-scale] : value * powers[scale];
    }
    *out = negative ? -value : value;
    return p;
}

/* Text. All functions take where they begin and the end of the line, and return where they stop, or
 * NULL when the text is no JSON. */

static const char *skip_blanks(const char *p, const char *end)
{
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r')) {
        p++;
    }
    return p;
}

/* From behind the opening quote to behind the closing one. */
static const char *skip_string(const char *p, const char *end)
{
    for (; p < end && *p != '"'; p++) {
        p += *p == '\\';
    }
    return p < end ? p + 1 : NULL;
}

/* Any value: its brackets must match, more is not asked of what is not used. */
static const char *skip_value(const char *p, const char *end)
{
    int depth = 0;
    while (p < end) {
        char c = *p++;
        if (c == '"') {
            p = skip_string(p, end);
            if (!p) {
                return NULL;
            }
        }
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        if (depth < 0) {
            return NULL;
        }
        bool ends = p >= end || *p == ',' || *p == '}' || *p == ']';
        if (depth == 0 && ends) {
            return p;
        }
    }
    return NULL;
}

static bool has_word(const char *p, const char *end, const char *word, size_t length)
{
    return (size_t)(end - p) >= length && memcmp(p, word, length) == 0;
}

static const char *read_amount(const char *p, const char *end, double *out)
{
    if (has_word(p, end, "null", 4)) {
        *out = NAN;
        return p + 4;
    }
    return nd_metrics_number(p, end, out);
}

/* The key whose name begins at p and the quote behind it; -1: none. The one at `guess` first. */
static int find_key(const key *keys, int count, int guess, const char *p, const char *end)
{
    for (int i = 0; i < count; i++) {
        int k = guess + i < count ? guess + i : guess + i - count;
        if (has_word(p, end, keys[k].name, keys[k].length) && p + keys[k].length < end &&
            p[keys[k].length] == '"') {
            return k;
        }
    }
    return -1;
}

typedef struct object {
    const key *keys;
    int key_count;
    /* Reads the value of keys[k]; -1: of a key that is not known. */
    const char *(*read)(struct object *o, int k, const char *p, const char *end);
    line *line;
} object;

static const char *scan_object(object *o, const char *p, const char *end)
{
    int guess = 0;
    if (p >= end || *p != '{') {
        return NULL;
    }
    p = skip_blanks(p + 1, end);
    if (p < end && *p == '}') {
        return p + 1;
    }
    while (p < end && *p == '"') {
        int k = find_key(o->keys, o->key_count, guess, p + 1, end);
        p = k >= 0 ? p + 2 + o->keys[k].length : skip_string(p + 1, end);
        p = p ? skip_blanks(p, end) : NULL;
        if (!p || p >= end || *p != ':') {
            return NULL;
        }
        p = o->read(o, k, skip_blanks(p + 1, end), end);
        p = p ? skip_blanks(p, end) : NULL;
        if (!p || p >= end || (*p != ',' && *p != '}')) {
            return NULL;
        }
        if (*p == '}') {
            return p + 1;
        }
        p = skip_blanks(p + 1, end);
        guess = k >= 0 && k + 1 < o->key_count ? k + 1 : 0;
    }
    return NULL;
}

static const char *read_wire_value(object *o, int k, const char *p, const char *end)
{
    return k < 0 ? skip_value(p, end) : read_amount(p, end, &o->line->number[o->keys[k].meaning]);
}

static const char *read_wire(object *parent, const char *p, const char *end)
{
    key keys[ND_TRAFFIC_COUNT];
    for (nd_traffic_kind k = 0; k < ND_TRAFFIC_COUNT; k++) {
        const char *name = nd_traffic_name(k);
        keys[k] = (key){name, strlen(name), ND_METRIC_WIRE_KINDS + (int)k};
    }
    object wire = {keys, ND_TRAFFIC_COUNT, read_wire_value, parent->line};
    return scan_object(&wire, p, end);
}

static const char *read_line_value(object *o, int k, const char *p, const char *end)
{
    int meaning = k < 0 ? KEY_IGNORED : o->keys[k].meaning;
    line *l = o->line;
    switch (meaning) {
    case KEY_IGNORED:
        return skip_value(p, end);
    case KEY_WIRE:
        return read_wire(o, p, end);
    case KEY_EVENT:
        l->is_event = true;
        return skip_value(p, end);
    case KEY_SKIPPED:
        l->skipped = has_word(p, end, "true", 4);
        return skip_value(p, end);
    default:
        l->is_step |= meaning == ND_METRIC_STEP_MS;
        l->is_validation |= meaning == KEY_VALIDATION_LOSS;
        return read_amount(p, end, &l->number[meaning]);
    }
}

/* Lists that grow. */

typedef struct part {
    const nd_fs_map *map;
    const char *path;
    const char *begin, *end; /* whole lines */
    nd_metrics found;
    size_t row_room, validation_room, event_room;
    size_t *rows_before, *validations_before; /* [event_count]: rows above each event */
    const char *bad;                          /* the first line that is damaged */
    nd_status status;
    char why[512];
} part;

/* Makes room for one more of `size` bytes. */
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

static nd_status add_row(part *p, const line *l)
{
    nd_metrics *m = &p->found;
    ND_TRY(grow(&m->rows, m->row_count, &p->row_room, sizeof *m->rows));
    nd_metric_row *row = &m->rows[m->row_count++];
    row->step = (int64_t)l->number[KEY_STEP];
    row->tokens_seen = l->number[KEY_TOKENS_SEEN];
    row->skipped = l->skipped;
    for (int k = 0; k < ND_METRIC_COUNT; k++) {
        row->value[k] = (float)l->number[k];
    }
    return ND_OK;
}

static nd_status add_validation(part *p, const line *l)
{
    nd_metrics *m = &p->found;
    ND_TRY(grow(&m->validations, m->validation_count, &p->validation_room, sizeof *m->validations));
    m->validations[m->validation_count++] =
        (nd_validation_row){(int64_t)l->number[KEY_STEP], l->number[KEY_VALIDATION_LOSS],
                            l->number[KEY_VALIDATION_TOKENS], l->number[KEY_VALIDATION_MS]};
    return ND_OK;
}

static double number_of(const json_t *o, const char *name)
{
    const json_t *value = json_object_get(o, name);
    return json_is_number(value) ? json_number_value(value) : 0;
}

/* A whole number of up to 15 digits; 0 for anything else. */
static int64_t whole_of(const json_t *o, const char *name)
{
    double value = number_of(o, name);
    return value > -1e15 && value < 1e15 ? (int64_t)value : 0;
}

static void fill_event(const json_t *o, nd_metric_event *e)
{
    static const char *const names[] = {[ND_METRIC_EVENT_CHECKPOINT] = "checkpoint",
                                        [ND_METRIC_EVENT_CHECKPOINT_FAILED] = "checkpoint_failed",
                                        [ND_METRIC_EVENT_RESUMED] = "resumed",
                                        [ND_METRIC_EVENT_EARLY_STOPPED] = "early_stopped"};
    const char *name = json_string_value(json_object_get(o, "event"));
    const char *reason = json_string_value(json_object_get(o, "reason"));
    const char *why = json_string_value(json_object_get(o, "why"));
    *e = (nd_metric_event){.step = whole_of(o, "step"),
                           .bytes = number_of(o, "bytes"),
                           .save_ms = number_of(o, "save_ms"),
                           .blocked_ms = number_of(o, "blocked_ms"),
                           .load_ms = number_of(o, "load_ms"),
                           .restart = whole_of(o, "restart"),
                           .rewound_from = whole_of(o, "rewound_from"),
                           .passed_over_samples = whole_of(o, "passed_over_samples")};
    snprintf(e->name, sizeof e->name, "%s", name ? name : "");
    snprintf(e->text, sizeof e->text, "%s", why ? why : reason ? reason : "");
    for (int k = ND_METRIC_EVENT_CHECKPOINT; k <= ND_METRIC_EVENT_EARLY_STOPPED; k++) {
        e->kind = strcmp(e->name, names[k]) == 0 ? (nd_metric_event_kind)k : e->kind;
    }
}

static nd_status add_event(part *p, const char *text, const char *end)
{
    nd_metrics *m = &p->found;
    json_error_t error;
    size_t room = p->event_room, same = p->event_room;
    ND_TRY(grow(&p->rows_before, m->event_count, &room, sizeof *p->rows_before));
    ND_TRY(grow(&p->validations_before, m->event_count, &same, sizeof *p->validations_before));
    ND_TRY(grow(&m->events, m->event_count, &p->event_room, sizeof *m->events));
    json_t *o = json_loadb(text, (size_t)(end - text), 0, &error);
    if (!json_is_object(o)) {
        bool memory = !o && nd_json_no_memory(&error);
        json_decref(o);
        p->bad = text;
        return memory ? nd_fail_memory("a line of metrics.jsonl") : ND_OK;
    }
    fill_event(o, &m->events[m->event_count]);
    json_decref(o);
    p->rows_before[m->event_count] = m->row_count;
    p->validations_before[m->event_count] = m->validation_count;
    m->event_count++;
    return ND_OK;
}

static nd_status read_line(part *p, const char *text, const char *end)
{
    line l = {0};
    for (int k = 0; k < KEY_IGNORED; k++) {
        l.number[k] = NAN;
    }
    object root = {line_keys, LINE_KEYS, read_line_value, &l};
    const char *stop = scan_object(&root, text, end);
    bool whole = stop && skip_blanks(stop, end) == end && l.number[KEY_STEP] >= 0 &&
                 l.number[KEY_STEP] < 1e15;
    if (!whole) {
        p->bad = text;
        return ND_OK;
    }
    if (l.is_event) {
        return add_event(p, text, end);
    }
    ND_TRY(l.is_step ? add_row(p, &l) : ND_OK);
    return l.is_validation ? add_validation(p, &l) : ND_OK;
}

static nd_status read_part(void *context)
{
    part *p = context;
    for (const char *at = p->begin; at < p->end && !p->bad;) {
        const char *end = memchr(at, '\n', (size_t)(p->end - at));
        if (!end) {
            p->bad = at; /* another program has changed the file meanwhile */
            break;
        }
        ND_TRY(end > at ? read_line(p, at, end) : ND_OK);
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

static void forget_later(nd_metrics *m, int64_t step)
{
    while (m->row_count > 0 && m->rows[m->row_count - 1].step > step) {
        m->row_count--;
        m->repeated++;
    }
    while (m->validation_count > 0 && m->validations[m->validation_count - 1].step > step) {
        m->validation_count--;
    }
    while (m->event_count > 0 && m->events[m->event_count - 1].step > step) {
        m->event_count--;
    }
}

static void append_rows(nd_metrics *m, const part *p, size_t *from, size_t to)
{
    for (size_t i = *from; i < to; i++) {
        m->rows[m->row_count++] = p->found.rows[i];
    }
    *from = to;
}

static void append_validations(nd_metrics *m, const part *p, size_t *from, size_t to)
{
    for (size_t i = *from; i < to; i++) {
        m->validations[m->validation_count++] = p->found.validations[i];
    }
    *from = to;
}

static void append_part(nd_metrics *m, const part *p)
{
    size_t row = 0, validation = 0;
    for (size_t i = 0; i < p->found.event_count; i++) {
        const nd_metric_event *event = &p->found.events[i];
        append_rows(m, p, &row, p->rows_before[i]);
        append_validations(m, p, &validation, p->validations_before[i]);
        if (event->kind == ND_METRIC_EVENT_RESUMED) {
            forget_later(m, event->step);
        }
        m->events[m->event_count++] = *event;
    }
    append_rows(m, p, &row, p->found.row_count);
    append_validations(m, p, &validation, p->found.validation_count);
}

static nd_status merge(const part *parts, int count, nd_metrics *out)
{
    nd_metrics m = {0};
    size_t rows = 0, validations = 0, events = 0;
    nd_status status = ND_OK;
    for (int i = 0; i < count; i++) {
        rows += parts[i].found.row_count;
        validations += parts[i].found.validation_count;
        events += parts[i].found.event_count;
    }
    ND_TRY_OUT(ND_ALLOC(rows + 1, &m.rows));
    ND_TRY_OUT(ND_ALLOC(validations + 1, &m.validations));
    ND_TRY_OUT(ND_ALLOC(events + 1, &m.events));
    for (int i = 0; i < count; i++) {
        append_part(&m, &parts[i]);
    }
    *out = m;
    return ND_OK;
out:
    nd_metrics_fini(&m);
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
    return nd_fail(ND_ERR_DATA,
                   "%s line %zu is not what ndtrain writes there; the file is damaged: repair the "
                   "line or remove it",
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
        nd_metrics_fini(&parts[i].found);
        free(parts[i].rows_before);
        free(parts[i].validations_before);
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
    free(metrics->events);
    *metrics = (nd_metrics){0};
}
