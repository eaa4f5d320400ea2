// SPDX-License-Identifier: Apache-2.0
/* The settings of a run, and what it ran on. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/config/config.h"
#include "trainer/view/parts.h"

json_t *nd_section_value(const json_t *value)
{
    if (json_is_string(value)) {
        return nd_cell("%s", json_string_value(value));
    }
    if (!value || json_is_null(value)) {
        return nd_cell("%s", "");
    }
    char *text = nd_json_text(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(10));
    json_t *cell = text ? nd_cell("%s", text) : NULL;
    free(text);
    return cell;
}

/* Compares a setting of run.json with what the text of its default means. */
static bool is_default(const json_t *value, const char *was)
{
    json_error_t error;
    if (json_is_string(value)) {
        return strcmp(json_string_value(value), was) == 0;
    }
    json_t *other = json_loads(was, JSON_DECODE_ANY, &error);
    const bool same = json_is_number(value) && json_is_number(other)
                          ? json_number_value(value) == json_number_value(other)
                          : json_equal(value, other);
    json_decref(other);
    return same;
}

/* A table of the settings that differ from their defaults, or of those that do not. A key that is
 * not one of this version has the default "". */
static nd_status write_table(nd_doc *doc, json_t *config, const nd_config *defaults, bool differing)
{
    const char *key;
    json_t *value;
    nd_doc_table(doc, true, differing ? "setting|value|default" : "setting|value");
    json_object_foreach(config, key, value)
    {
        char *was = NULL;
        ND_TRY(nd_config_get(defaults, key, &was));
        if (is_default(value, was) != differing) {
            if (differing) {
                ND_DOC_ROW(doc, nd_cell("%s", key), nd_section_value(value), nd_cell("%s", was));
            } else {
                ND_DOC_ROW(doc, nd_cell("%s", key), nd_section_value(value));
            }
        }
        free(was);
    }
    return ND_OK;
}

static nd_status write_settings(nd_doc *doc, const nd_run_view *run)
{
    json_t *config = json_object_get(run->record, "config");
    nd_config defaults = {0};
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_config_init(&defaults));
    nd_doc_add(doc, "heading", "Settings that differ from their defaults");
    ND_TRY_OUT(write_table(doc, config, &defaults, true));
    nd_doc_add(doc, "fold", "Settings with their defaults");
    ND_TRY_OUT(write_table(doc, config, &defaults, false));
    nd_doc_add(doc, "unfold", "");
out:
    nd_config_fini(&defaults);
    return status;
}

/* Writes it so that a shell takes it for one word. */
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
    nd_doc_add(doc, "code", text);
    free(text);
    return ND_OK;
}

static nd_status write_surroundings(nd_doc *doc, const nd_run_view *run)
{
    static const char *const parts[] = {"mesh", "job", "machine", "libraries"};
    const json_t *command = json_object_get(run->record, "command");
    const char *key;
    json_t *value;
    nd_doc_add(doc, "heading", "Surroundings");
    nd_doc_table(doc, true, "|value");
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        json_object_foreach(json_object_get(run->record, parts[i]), key, value)
        {
            const bool cpus = strcmp(key, "cpus") == 0; /* "0-3" */
            ND_DOC_ROW(doc,
                       nd_cell("%s %s", parts[i], cpus ? "numbers of the CPUs of rank 0" : key),
                       nd_section_value(value));
        }
    }
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
