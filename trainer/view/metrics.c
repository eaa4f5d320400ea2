// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/metrics.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/fs.h"
#include "runtime/base/json.h"

/* The first names of every file, in this order; EVENT and HEALTH are never numbers. */
enum { STEP, STEP_MS, VALIDATION, HEALTH, EVENT, FIRST_NAMES };
static const char *const first_names[] = {"step", "step_ms", "validation_loss", "fp8_health",
                                          "event"};

enum { DEPTH_MAX = 8, LIST_FIRST = 256 };

/* A key at its place in the lines: of the line itself, or in an object of it. */
typedef struct line_key {
    int parent;            /* the key of the object that it is in; -1: the line */
    int next;              /* the key that came behind it last */
    size_t offset, length; /* of the key in its column's name */
} line_key;

typedef struct line_reader {
    nd_metrics found;              /* of the lines so far */
    line_key keys[ND_COLUMNS_MAX]; /* [found.name_count] */
    double values[ND_COLUMNS_MAX]; /* of the line that is read */
    bool given[ND_COLUMNS_MAX];
} line_reader;

/* A line while it is read. Each read_ function takes where something begins and returns where it
 * ends, NULL when it is no JSON. */
typedef struct reading {
    line_reader *lines;
    const char *end;
    int last; /* the key that was read last; -1: none yet */
} reading;

static char char_at(const reading *r, const char *p)
{
    return p < r->end ? *p : '\n';
}

static const char *skip_blanks(const reading *r, const char *p)
{
    while (char_at(r, p) == ' ' || char_at(r, p) == '\t' || char_at(r, p) == '\r') {
        p++;
    }
    return p;
}

/* From behind the opening quote to behind the closing one. */
static const char *skip_string(const reading *r, const char *p)
{
    for (; p < r->end && *p != '"'; p++) {
        p += *p == '\\';
    }
    return p < r->end ? p + 1 : NULL;
}

/* A value that no column keeps; only its brackets and strings are checked. */
static const char *skip_value(const reading *r, const char *p)
{
    int depth = 0;
    while (p && p < r->end) {
        const char c = *p++;
        if (c == '"') {
            p = skip_string(r, p);
        }
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        const char next = p ? char_at(r, p) : '\n';
        if (depth <= 0 && (next == ',' || next == '}' || next == ']' || next == '\n')) {
            return depth == 0 ? p : NULL;
        }
    }
    return NULL;
}

/* JSON's numbers begin and end with a digit, and strtod reads more than those. The end of the line
 * ends a number, too. */
static const char *read_number(const reading *r, const char *p, double *out)
{
    const char *digits = p + (char_at(r, p) == '-');
    char *end;
    if (!isdigit((unsigned char)char_at(r, digits)) || digits[1] == 'x' || digits[1] == 'X') {
        return NULL;
    }
    *out = strtod(p, &end);
    return isdigit((unsigned char)end[-1]) ? end : NULL;
}

/* A number or null, true or false. */
static const char *read_scalar(const reading *r, const char *p, double *out)
{
    static const struct {
        const char *word;
        size_t length;
        double value;
    } words[] = {{"null", 4, (double)NAN}, {"true", 4, 1}, {"false", 5, 0}};
    for (size_t i = 0; i < sizeof words / sizeof *words && char_at(r, p) > '9'; i++) {
        if ((size_t)(r->end - p) >= words[i].length &&
            memcmp(p, words[i].word, words[i].length) == 0) {
            *out = words[i].value;
            return p + words[i].length;
        }
    }
    return read_number(r, p, out);
}

/* Keys. */

static bool is_key(const line_reader *lines, int k, int parent, const char *text, size_t length)
{
    const line_key *key = &lines->keys[k];
    return key->parent == parent && key->length == length &&
           memcmp(lines->found.names[k] + key->offset, text, length) == 0;
}

/* The number of a key, which is new when it is not known; -1: there is no room for it. */
static int key_number(line_reader *lines, int parent, const char *text, size_t length)
{
    nd_metrics *m = &lines->found;
    size_t offset = 0;
    if (parent >= 0) {
        offset = strlen(m->names[parent]) + 1;
    }
    const size_t room = offset < ND_COLUMN_NAME ? ND_COLUMN_NAME - 1 - offset : 0;
    length = length < room ? length : room;
    for (int k = 0; k < m->name_count; k++) {
        if (is_key(lines, k, parent, text, length)) {
            return k;
        }
    }
    if (m->name_count == ND_COLUMNS_MAX || room == 0) {
        return -1;
    }
    char *name = m->names[m->name_count];
    if (parent >= 0) {
        memcpy(name, m->names[parent], offset - 1);
        name[offset - 1] = '.';
    }
    memcpy(name + offset, text, length);
    name[offset + length] = '\0';
    lines->values[m->name_count] = NAN;
    lines->keys[m->name_count] = (line_key){parent, 0, offset, length};
    return m->name_count++;
}

/* From behind the opening quote of a key to behind the closing one. */
static const char *read_key(reading *r, int parent, const char *p, int *key)
{
    line_reader *lines = r->lines;
    const int next = r->last >= 0 ? lines->keys[r->last].next : STEP;
    const size_t length = lines->keys[next].length;
    const char *end = p + length + 1;
    if (end <= r->end && p[length] == '"' && is_key(lines, next, parent, p, length)) {
        *key = next;
    } else {
        end = skip_string(r, p);
        *key = end ? key_number(lines, parent, p, (size_t)(end - 1 - p)) : -1;
    }
    if (*key >= 0 && r->last >= 0) {
        lines->keys[r->last].next = *key;
    }
    r->last = *key;
    return end;
}

static const char *read_object(reading *r, int parent, const char *p, int depth);

static const char *read_value(reading *r, int key, const char *p, int depth)
{
    double value = NAN;
    switch (char_at(r, p)) {
    case '{':
        return key >= 0 && depth < DEPTH_MAX ? read_object(r, key, p, depth + 1) : skip_value(r, p);
    case '[':
        return skip_value(r, p);
    case '"':
        return skip_string(r, p + 1);
    default:
        p = read_scalar(r, p, &value);
        if (key >= 0) {
            r->lines->values[key] = value;
        }
        return p;
    }
}

static const char *read_object(reading *r, int parent, const char *p, int depth)
{
    p = skip_blanks(r, p + 1);
    if (char_at(r, p) == '}') {
        return p + 1;
    }
    while (char_at(r, p) == '"') {
        int key = -1;
        p = read_key(r, parent, p + 1, &key);
        p = p ? skip_blanks(r, p) : NULL;
        if (!p || char_at(r, p) != ':') {
            return NULL;
        }
        if (key >= 0) {
            r->lines->given[key] = true;
        }
        p = read_value(r, key, skip_blanks(r, p + 1), depth);
        p = p ? skip_blanks(r, p) : NULL;
        if (!p || char_at(r, p) == '}') {
            return p ? p + 1 : NULL;
        }
        if (char_at(r, p) != ',') {
            return NULL;
        }
        p = skip_blanks(r, p + 1);
    }
    return NULL;
}

/* Tables. */

static nd_status reserve(nd_metric_table *table, size_t rows)
{
    if (rows <= table->room) {
        return ND_OK;
    }
    for (int k = 0; k < ND_COLUMNS_MAX; k++) {
        if (table->columns[k]) {
            double *more = realloc(table->columns[k], rows * sizeof *more);
            if (!more) {
                return nd_fail_memory("%zu lines of metrics.jsonl", rows);
            }
            table->columns[k] = more;
        }
    }
    table->room = rows;
    return ND_OK;
}

static nd_status add_column(nd_metric_table *table, int column)
{
    ND_TRY(ND_ALLOC(table->room, &table->columns[column]));
    for (size_t i = 0; i < table->rows; i++) {
        table->columns[column][i] = NAN;
    }
    return ND_OK;
}

static nd_status add_row(const line_reader *lines, nd_metric_table *table)
{
    if (table->rows == table->room) {
        ND_TRY(reserve(table, table->rows > 0 ? 2 * table->rows : LIST_FIRST));
    }
    for (int k = 0; k < lines->found.name_count; k++) {
        if (lines->given[k] && !table->columns[k]) {
            ND_TRY(add_column(table, k));
        }
        if (table->columns[k]) {
            table->columns[k][table->rows] = lines->values[k];
        }
    }
    table->rows++;
    return ND_OK;
}

static void take_rows_back(nd_metric_table *table, double step)
{
    while (table->rows > 0 && table->columns[STEP][table->rows - 1] > step) {
        table->rows--;
    }
}

static void take_back(nd_metrics *m, double step)
{
    size_t events = json_array_size(m->events);
    take_rows_back(&m->steps, step);
    take_rows_back(&m->validations, step);
    take_rows_back(&m->health, step);
    while (events > 0 && nd_json_number(json_array_get(m->events, events - 1), "step") > step) {
        json_array_remove(m->events, --events);
    }
}

static nd_status add_event(line_reader *lines, const char *text, const char *end)
{
    json_error_t error;
    json_t *event = json_loadb(text, (size_t)(end - text), 0, &error);
    if (!event) {
        return nd_json_no_memory(&error) ? nd_fail_memory("a line of metrics.jsonl") : ND_ERR_DATA;
    }
    if (nd_event_is(event, "resumed")) {
        take_back(&lines->found, lines->values[STEP]);
    }
    return json_array_append_new(lines->found.events, event) == 0
               ? ND_OK
               : nd_fail_memory("an event of metrics.jsonl");
}

static nd_status add_to_tables(line_reader *lines)
{
    nd_metrics *m = &lines->found;
    ND_TRY(lines->given[STEP_MS] ? add_row(lines, &m->steps) : ND_OK);
    ND_TRY(lines->given[VALIDATION] ? add_row(lines, &m->validations) : ND_OK);
    return lines->given[HEALTH] ? add_row(lines, &m->health) : ND_OK;
}

/* A line without its end. ND_ERR_DATA, without a message: it is not what ndtrain writes. */
static nd_status add_line(line_reader *lines, const char *text, const char *end)
{
    reading r = {lines, end, -1};
    const char *stop = char_at(&r, text) == '{' ? read_object(&r, -1, text, 0) : NULL;
    const double step = lines->values[STEP];
    nd_status status = ND_ERR_DATA;
    if (stop && skip_blanks(&r, stop) == end && step >= 0 && step < 1e15) {
        status = lines->given[EVENT] ? add_event(lines, text, end) : add_to_tables(lines);
    }
    for (int k = 0; k < lines->found.name_count; k++) {
        lines->given[k] = false;
        lines->values[k] = NAN;
    }
    return status;
}

/* The file. */

typedef struct file_reader {
    const char *at,
        *end;       /* what is left of the file; `at` is at a damaged line when there is one */
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

static nd_status begin(line_reader *lines)
{
    ND_TRY(ND_ALLOC(ND_COLUMNS_MAX, &lines->found.names));
    lines->found.events = json_array();
    for (int k = 0; k < FIRST_NAMES; k++) {
        (void)key_number(lines, -1, first_names[k], strlen(first_names[k]));
    }
    return lines->found.events ? ND_OK : nd_fail_memory("the events of metrics.jsonl");
}

static nd_status make_none(nd_metrics *m)
{
    const size_t rows = m->steps.rows + m->validations.rows + m->health.rows;
    ND_TRY(ND_ALLOC(rows + 1, &m->none));
    for (size_t i = 0; i <= rows; i++) {
        m->none[i] = NAN;
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
    ND_TRY_OUT(begin(lines));
    f.lines = lines;
    if (map.size > 0) {
        status = nd_fs_map_guard(&map, path, read_lines, &f);
    }
    if (status == ND_ERR_DATA) {
        status = nd_fail(ND_ERR_DATA,
                         "%s line %lld is not what ndtrain writes there: the file is another "
                         "program's, or it is damaged and the line must be repaired",
                         path, (long long)f.number);
    }
    ND_TRY_OUT(status);
    ND_TRY_OUT(make_none(&lines->found));
    lines->found.half_line = f.at < f.end;
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

static void table_fini(nd_metric_table *table)
{
    for (int k = 0; k < ND_COLUMNS_MAX; k++) {
        free(table->columns[k]);
    }
}

void nd_metrics_fini(nd_metrics *metrics)
{
    table_fini(&metrics->steps);
    table_fini(&metrics->validations);
    table_fini(&metrics->health);
    json_decref(metrics->events);
    free(metrics->names);
    free(metrics->none);
    *metrics = (nd_metrics){0};
}

const double *nd_metrics_column(const nd_metrics *metrics, const nd_metric_table *table,
                                const char *name)
{
    for (int k = 0; k < metrics->name_count; k++) {
        if (table->columns[k] && strcmp(metrics->names[k], name) == 0) {
            return table->columns[k];
        }
    }
    return metrics->none;
}

double nd_json_number(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : 0;
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

bool nd_event_is(const json_t *event, const char *kind)
{
    return strcmp(nd_json_words(event, "event"), kind) == 0;
}
