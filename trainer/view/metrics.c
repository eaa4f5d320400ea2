// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/metrics.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"
#include "runtime/base/printable.h"

/* The first names of every file. The columns of step and event stay empty: a step is that of all
 * its line's points, and an event is no number. */
enum { STEP, EVENT, LOSS, GRAD_NORM, SKIPPED, WITHOUT_LABELS, TOKENS, FIRST_NAMES };
static const char *const first_names[] = {"step",    "event",          "loss",  "grad_norm",
                                          "skipped", "without_labels", "tokens"};

enum { DEPTH_MAX = 8, ROOM_FIRST = 256 };

/* A key at its place in the lines: of the line itself, or in an object of it. */
typedef struct line_key {
    int parent;            /* the key of the object that it is in; -1: the line */
    size_t offset, length; /* of the key in its column's name */
} line_key;

typedef struct line_reader {
    nd_metrics found;              /* of the lines so far */
    line_key keys[ND_COLUMNS_MAX]; /* [found.count] */
    double values[ND_COLUMNS_MAX]; /* of the line that is read */
    bool given[ND_COLUMNS_MAX];    /* by that line, and a number */
    bool is_event;                 /* that line has the key "event" */
    int last;                      /* the key that was read last */
} line_reader;

/* Each function takes where something begins in a line and returns where it ends, NULL when it is
 * no JSON. Every line ends with a line feed, which none of them passes. */

static const char *skip_blanks(const char *p)
{
    while (*p == ' ' || *p == '\t' || *p == '\r') {
        p++;
    }
    return p;
}

/* From behind the opening quote to behind the closing one. */
static const char *skip_string(const char *p)
{
    while (*p != '"' && *p != '\n') {
        p += *p == '\\' && p[1] != '\n' ? 2 : 1;
    }
    return *p == '"' ? p + 1 : NULL;
}

/* A value that no column keeps; only its brackets and strings are checked. */
static const char *skip_value(const char *p)
{
    for (int depth = 0; p && *p != '\n';) {
        const char c = *p++;
        p = c == '"' ? skip_string(p) : p;
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        if (p && depth <= 0 && strchr(",}]\n", *p)) {
            return depth == 0 ? p : NULL;
        }
    }
    return NULL;
}

/* A number or null, true or false. JSON's numbers begin and end with a digit, and strtod reads more
 * than those. */
static const char *read_scalar(const char *p, double *out)
{
    static const struct {
        const char *word;
        double value;
    } words[] = {{"null", (double)NAN}, {"true", 1}, {"false", 0}};
    for (size_t i = 0; i<sizeof words / sizeof *words && * p> '9'; i++) {
        const size_t length = strlen(words[i].word);
        if (strncmp(p, words[i].word, length) == 0) {
            *out = words[i].value;
            return p + length;
        }
    }
    const char *digits = p + (*p == '-');
    char *end;
    if (!isdigit((unsigned char)*digits) || digits[1] == 'x' || digits[1] == 'X') {
        return NULL;
    }
    *out = strtod(p, &end);
    return isdigit((unsigned char)end[-1]) ? end : NULL;
}

/* The number of a key, which is new when it is not known; -1: there is no room for it. Lines have
 * their keys in the same order, so the search begins behind the last one. */
static int key_number(line_reader *lines, int parent, const char *text, size_t length)
{
    nd_metrics *m = &lines->found;
    const char *parent_name = parent >= 0 ? m->columns[parent].name : "";
    const size_t offset = parent >= 0 ? strlen(parent_name) + 1 : 0;
    const size_t room = offset < ND_COLUMN_NAME ? ND_COLUMN_NAME - 1 - offset : 0;
    length = length < room ? length : room;
    for (int i = 0, k = lines->last; i < m->count; i++) {
        k = k + 1 < m->count ? k + 1 : 0;
        const line_key *key = &lines->keys[k];
        if (key->parent == parent && key->length == length &&
            memcmp(m->columns[k].name + key->offset, text, length) == 0) {
            return lines->last = k;
        }
    }
    if (m->count == ND_COLUMNS_MAX || room == 0) {
        return -1;
    }
    snprintf(m->columns[m->count].name, ND_COLUMN_NAME, "%s%s%.*s", parent_name,
             parent >= 0 ? "." : "", (int)length, text);
    lines->keys[m->count] = (line_key){parent, offset, length};
    return lines->last = m->count++;
}

static const char *read_object(line_reader *lines, int parent, const char *p, int depth);

static const char *read_value(line_reader *lines, int key, const char *p, int depth)
{
    double value = NAN;
    switch (*p) {
    case '{':
        return key >= 0 && depth < DEPTH_MAX ? read_object(lines, key, p, depth + 1)
                                             : skip_value(p);
    case '[':
        return skip_value(p);
    case '"':
        return skip_string(p + 1);
    default:
        p = read_scalar(p, &value);
        if (key >= 0) {
            lines->values[key] = value;
            lines->given[key] = true;
        }
        return p;
    }
}

static const char *read_object(line_reader *lines, int parent, const char *p, int depth)
{
    p = skip_blanks(p + 1);
    if (*p == '}') {
        return p + 1;
    }
    while (*p == '"') {
        const char *name = p + 1;
        p = skip_string(name);
        const int key = p ? key_number(lines, parent, name, (size_t)(p - 1 - name)) : -1;
        p = p ? skip_blanks(p) : NULL;
        if (!p || *p != ':') {
            return NULL;
        }
        lines->is_event |= key == EVENT;
        p = read_value(lines, key, skip_blanks(p + 1), depth);
        p = p ? skip_blanks(p) : NULL;
        if (!p || *p != ',') {
            return p && *p == '}' ? p + 1 : NULL;
        }
        p = skip_blanks(p + 1);
    }
    return NULL;
}

/* Columns. */

static nd_status add_point(nd_column *column, double step, double value)
{
    if (column->count == column->room) {
        const size_t room = column->room > 0 ? 2 * column->room : ROOM_FIRST;
        nd_point *more = realloc(column->points, room * sizeof *more);
        if (!more) {
            return nd_fail_memory("%zu values of metrics.jsonl", room);
        }
        column->points = more;
        column->room = room;
    }
    column->points[column->count++] = (nd_point){step, value};
    return ND_OK;
}

static void take_back(nd_metrics *m, double step)
{
    for (int k = 0; k < m->count; k++) {
        nd_column *column = &m->columns[k];
        while (column->count > 0 && column->points[column->count - 1].step > step) {
            column->count--;
        }
    }
    /* A checkpoint is told when it is durable, behind events of later steps. */
    for (size_t i = json_array_size(m->events); i > 0; i--) {
        if (nd_json_number(json_array_get(m->events, i - 1), "step") > step) {
            json_array_remove(m->events, i - 1);
        }
    }
}

static nd_status add_event(line_reader *lines, const char *text, const char *end)
{
    json_error_t error;
    json_t *event = json_loadb(text, (size_t)(end - text), 0, &error);
    if (!event) {
        return nd_json_no_memory(&error) ? nd_fail_memory("a line of metrics.jsonl") : ND_ERR_DATA;
    }
    if (strcmp(nd_json_words(event, "event"), "resumed") == 0) {
        take_back(&lines->found, lines->values[STEP]);
    }
    return json_array_append_new(lines->found.events, event) == 0
               ? ND_OK
               : nd_fail_memory("an event of metrics.jsonl");
}

/* A line, up to its line feed. ND_ERR_DATA, without a message: it is not what ndtrain writes. */
static nd_status add_line(line_reader *lines, const char *text, const char *end)
{
    memset(lines->given, 0, sizeof lines->given);
    lines->is_event = false;
    lines->values[STEP] = NAN;
    const char *stop = *text == '{' ? read_object(lines, -1, text, 0) : NULL;
    const double step = lines->values[STEP];
    if (!stop || skip_blanks(stop) != end || !(step >= 0 && step < 1e15)) {
        return ND_ERR_DATA;
    }
    if (lines->is_event) {
        return add_event(lines, text, end);
    }
    /* A step none of whose labels counts has no loss, no norm, and nothing that was not finite. */
    if (lines->given[TOKENS] && lines->values[TOKENS] == 0) {
        lines->given[LOSS] = lines->given[GRAD_NORM] = lines->given[SKIPPED] = false;
        lines->given[WITHOUT_LABELS] = true;
        lines->values[WITHOUT_LABELS] = 1;
    }
    for (int k = EVENT + 1; k < lines->found.count; k++) {
        ND_TRY(lines->given[k] ? add_point(&lines->found.columns[k], step, lines->values[k])
                               : ND_OK);
    }
    return ND_OK;
}

/* The file. */

typedef struct file_reader {
    const char *at; /* what is left of the file; at a damaged line when there is one */
    const char *end;
    int64_t number; /* of the line there */
    line_reader *lines;
} file_reader;

static nd_status read_lines(void *context)
{
    file_reader *f = context;
    const char *end;
    while ((end = memchr(f->at, '\n', (size_t)(f->end - f->at)))) {
        ND_TRY(end > f->at ? add_line(f->lines, f->at, end) : ND_OK);
        f->at = end + 1;
        f->number++;
    }
    return ND_OK;
}

nd_status nd_metrics_read(const char *path, nd_metrics *out)
{
    nd_fs_map map = {0};
    line_reader *lines = NULL;
    nd_status status = ND_OK;
    ND_TRY(nd_fs_map_open(path, ND_ERR_DATA, &map));
    const char *text = map.data ? (const char *)map.data : ""; /* an empty file is not mapped */
    file_reader f = {text, text + map.size, 1, NULL};
    ND_TRY_OUT(ND_ALLOC(1, &lines));
    ND_TRY_OUT(ND_ALLOC(ND_COLUMNS_MAX, &lines->found.columns));
    lines->found.events = json_array();
    ND_TRY_OUT(lines->found.events ? ND_OK : nd_fail_memory("the events of metrics.jsonl"));
    for (int k = 0; k < FIRST_NAMES; k++) {
        (void)key_number(lines, -1, first_names[k], strlen(first_names[k]));
    }
    f.lines = lines;
    status = map.size > 0 ? nd_fs_map_guard(&map, path, read_lines, &f) : ND_OK;
    if (status == ND_ERR_DATA) {
        status = nd_fail(ND_ERR_DATA,
                         "%s line %lld is not what ndtrain writes there: the file is another "
                         "program's, or it is damaged and the line must be repaired",
                         path, (long long)f.number);
    }
    ND_TRY_OUT(status);
    for (int k = 0; k < lines->found.count; k++) { /* a name may be cut within a character */
        char shown[ND_COLUMN_NAME];
        nd_escape(shown, sizeof shown, lines->found.columns[k].name, "");
        memcpy(lines->found.columns[k].name, shown, sizeof shown);
    }
    *out = lines->found;
    lines->found = (nd_metrics){0};
out:
    if (lines) {
        nd_metrics_fini(&lines->found);
    }
    free(lines);
    nd_fs_map_close(&map);
    return status;
}

void nd_metrics_fini(nd_metrics *metrics)
{
    for (int k = 0; k < metrics->count; k++) {
        free(metrics->columns[k].points);
    }
    free(metrics->columns);
    json_decref(metrics->events);
    *metrics = (nd_metrics){0};
}

const nd_column *nd_metrics_column(const nd_metrics *metrics, const char *name)
{
    static const nd_column none;
    for (int k = 0; k < metrics->count; k++) {
        if (strcmp(metrics->columns[k].name, name) == 0) {
            return &metrics->columns[k];
        }
    }
    return &none;
}

static int by_step(const void *key, const void *point)
{
    const double wanted = *(const double *)key, step = ((const nd_point *)point)->step;
    return (wanted > step) - (wanted < step);
}

double nd_column_at(const nd_column *column, double step)
{
    const nd_point *found = column->count > 0 ? bsearch(&step, column->points, column->count,
                                                        sizeof *column->points, by_step)
                                              : NULL;
    return found ? found->value : NAN;
}

double nd_json_number(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : 0;
}

json_t *nd_number(double value)
{
    const bool whole = value == floor(value) && fabs(value) < 1e15;
    return !isfinite(value) ? json_null()
           : whole          ? json_integer((json_int_t)value)
                            : json_real(value);
}

int64_t nd_json_whole(const json_t *object, const char *key)
{
    const double value = nd_json_number(object, key);
    return value > -1e15 && value < 1e15 ? (int64_t)value : 0;
}

const char *nd_json_words(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}
