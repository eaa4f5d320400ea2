// SPDX-License-Identifier: Apache-2.0
/* The settings of a run, and what it ran on. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/view/sections.h"

typedef struct setting_table {
    nd_doc *doc;
    bool differing; /* the table of those that do */
    int count;
} setting_table;

static nd_status write_setting(void *context, const char *key, const char *value, const char *was,
                               bool is_other)
{
    setting_table *t = context;
    if (is_other != t->differing) {
        return ND_OK;
    }
    t->count++;
    nd_doc_row_begin(t->doc);
    nd_doc_cell(t->doc, key);
    nd_doc_cell(t->doc, value);
    if (t->differing) {
        nd_doc_cell(t->doc, was);
    }
    nd_doc_row_end(t->doc);
    return ND_OK;
}

static nd_status write_settings(nd_doc *doc, const nd_run_view *run)
{
    static const char *const heads[] = {"setting", "value", "default"};
    setting_table changed = {doc, true, 0}, others = {doc, false, 0};
    nd_doc_heading(doc, 2, "Settings that differ from their defaults");
    nd_doc_table_begin(doc, true, 3, heads);
    ND_TRY(nd_run_view_each_setting(run, write_setting, &changed));
    nd_doc_table_end(doc);
    nd_doc_fold_begin(doc, "Settings with their defaults");
    nd_doc_table_begin(doc, true, 2, heads);
    ND_TRY(nd_run_view_each_setting(run, write_setting, &others));
    nd_doc_table_end(doc);
    nd_doc_fold_end(doc);
    return ND_OK;
}

/* As a shell takes it for one word. */
static void write_word(FILE *out, const char *word)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "_-./=:,+@%";
    if (*word && !word[strspn(word, plain)]) {
        fputs(word, out);
        return;
    }
    fputc('\'', out);
    for (const char *c = word; *c; c++) {
        fputs(*c == '\'' ? "'\\''" : (char[]){*c, '\0'}, out);
    }
    fputc('\'', out);
}

static nd_status write_command(nd_doc *doc, const json_t *command)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    if (!out) {
        return nd_fail_memory("the command of a run");
    }
    for (size_t i = 0; i < json_array_size(command); i++) {
        const char *word = json_string_value(json_array_get(command, i));
        fputs(i > 0 ? " " : "", out);
        write_word(out, word ? word : "");
    }
    if (fclose(out) != 0) {
        free(text);
        return nd_fail_memory("the command of a run");
    }
    nd_doc_code(doc, text);
    free(text);
    return ND_OK;
}

static nd_status write_surroundings(nd_doc *doc, const nd_run_view *run)
{
    static const char *const parts[] = {"mesh", "job", "machine", "libraries"};
    static const char *const heads[] = {"", "value"};
    const char *key;
    json_t *value;
    nd_doc_heading(doc, 2, "Surroundings");
    nd_doc_table_begin(doc, true, 2, heads);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        json_object_foreach(json_object_get(run->record, parts[i]), key, value)
        {
            char *text = NULL;
            ND_TRY(nd_run_view_text(value, &text));
            nd_doc_row_begin(doc);
            bool cpus = strcmp(key, "cpus") == 0; /* "0-3" */
            nd_doc_cellf(doc, "%s %s", parts[i], cpus ? "numbers of the CPUs of rank 0" : key);
            nd_doc_cell(doc, text);
            nd_doc_row_end(doc);
            free(text);
        }
    }
    nd_doc_table_end(doc);
    const json_t *command = json_object_get(run->record, "command");
    return json_array_size(command) > 0 ? write_command(doc, command) : ND_OK;
}

nd_status nd_section_settings(nd_doc *doc, const nd_run_view *run)
{
    if (!run->record) {
        nd_doc_say(doc, "The folder has no run.json, so nothing is known of the settings.");
        return ND_OK;
    }
    ND_TRY(write_settings(doc, run));
    return write_surroundings(doc, run);
}
