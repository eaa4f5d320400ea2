// SPDX-License-Identifier: Apache-2.0
/*
 * The configuration as text: native YAML, the lines that nodes compare, one key or each key for
 * run.json, and --help. All of it is made from the field table.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/suggest.h"
#include "runtime/config/reader.h"

/* A double-quoted YAML scalar. nd_field_set refuses control characters. */
static void append_quoted(nd_text *text, const char *value)
{
    nd_text_append(text, "\"");
    for (const char *c = value; *c; c++) {
        nd_text_append(text, *c == '"' || *c == '\\' ? "\\%c" : "%c", *c);
    }
    nd_text_append(text, "\"");
}

static nd_status to_yaml(const nd_config *config, bool to_worker, char **out)
{
    nd_text text = {0};
    const char *section = "";
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        const nd_field *f = &nd_fields[i];
        char *value = NULL;
        if (to_worker && i == ND_FIELD_train_sequence_length && !config->sequence_given) {
            continue;
        }
        nd_status status = nd_field_format(config, (nd_field_id)i, &value);
        if (status != ND_OK) {
            free(text.data);
            return status;
        }
        if (strcmp(section, f->section) != 0) {
            nd_text_append(&text, "%s:\n", f->section);
            section = f->section;
        }
        nd_text_append(&text, "  %s: ", f->key);
        if ((f->type == ND_FIELD_TYPE_TEXT && !f->choices) || f->type == ND_FIELD_TYPE_LIST) {
            append_quoted(&text, value);
        } else {
            nd_text_append(&text, "%s", value);
        }
        nd_text_append(&text, "\n");
        free(value);
    }
    return nd_text_finish(&text, out);
}

nd_status nd_config_to_yaml(const nd_config *config, char **out)
{
    return to_yaml(config, false, out);
}

nd_status nd_config_to_worker(const nd_config *config, char **out)
{
    return to_yaml(config, true, out);
}

nd_status nd_config_each(const nd_config *config,
                         void (*visit)(void *, const char *, const char *, bool), void *context)
{
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        char name[96], *value = NULL;
        ND_TRY(nd_field_format(config, (nd_field_id)i, &value));
        snprintf(name, sizeof name, "%s.%s", nd_fields[i].section, nd_fields[i].key);
        visit(context, name, value, nd_fields[i].job);
        free(value);
    }
    return ND_OK;
}

static void append_job_line(void *context, const char *key, const char *value, bool job)
{
    if (job) {
        nd_text_append(context, "%s=%s\n", key, value);
    }
}

nd_status nd_config_job_text(const nd_config *config, char **out)
{
    nd_text text = {0};
    nd_status status = nd_config_each(config, append_job_line, &text);
    if (status != ND_OK) {
        free(text.data);
        return status;
    }
    return nd_text_finish(&text, out);
}

nd_status nd_config_diff(const char *text_a, const char *name_a, const char *text_b,
                         const char *name_b)
{
    const char *a = text_a, *b = text_b;
    while (*a || *b) {
        size_t na = strcspn(a, "\n"), nb = strcspn(b, "\n");
        if (na == nb && memcmp(a, b, na) == 0) {
            a += na + (a[na] == '\n');
            b += nb + (b[nb] == '\n');
            continue;
        }
        size_t ka = strcspn(a, "=\n"), kb = strcspn(b, "=\n");
        if (ka == kb && memcmp(a, b, ka) == 0 && a[ka] == '=' && b[kb] == '=') {
            return nd_fail(ND_ERR_CONFIG,
                           "the nodes have different configurations: %.*s is '%.*s' on %s but "
                           "'%.*s' on %s; start every node with the same settings",
                           (int)ka, a, (int)(na - ka - 1), a + ka + 1, name_a, (int)(nb - kb - 1),
                           b + kb + 1, name_b);
        }
        return nd_fail(
            ND_ERR_CONFIG,
            "the nodes have different configurations: %s has '%.*s' where %s has '%.*s'; "
            "start every node with the same version and settings",
            name_a, (int)na, a, name_b, (int)nb, b);
    }
    return ND_OK;
}

nd_status nd_config_get(const nd_config *config, const char *key, char **out)
{
    const char *dot = strchr(key, '.');
    char section[64];
    if (dot && (size_t)(dot - key) < sizeof section) {
        memcpy(section, key, (size_t)(dot - key));
        section[dot - key] = '\0';
        int id = nd_field_find(section, dot + 1);
        if (id >= 0) {
            return nd_field_format(config, (nd_field_id)id, out);
        }
    }
    char *empty = NULL;
    ND_TRY(nd_text_replace(&empty, ""));
    *out = empty;
    return ND_OK;
}

enum { COLUMNS = 100, INDENT = 6 };

/* Prints the words of `text`, wrapped, each line indented. */
static void print_wrapped(FILE *out, int indent, const char *text)
{
    int column = 0;
    while (*text) {
        text += strspn(text, " ");
        int n = (int)strcspn(text, " ");
        if (n == 0) {
            break;
        }
        if (column > 0 && column + 1 + n > COLUMNS) {
            fputc('\n', out);
            column = 0;
        }
        column +=
            column ? fprintf(out, " %.*s", n, text) : fprintf(out, "%*s%.*s", indent, "", n, text);
        text += n;
    }
    fputc('\n', out);
}

static const char *placeholder(const nd_field *f)
{
    switch (f->type) {
    case ND_FIELD_TYPE_INT:
        return "N";
    case ND_FIELD_TYPE_REAL:
        return "X";
    case ND_FIELD_TYPE_PAIR:
        return "X,X";
    case ND_FIELD_TYPE_LIST:
        return "LIST";
    case ND_FIELD_TYPE_BOOL:
        return "[true|false]";
    case ND_FIELD_TYPE_CHOICE:
    case ND_FIELD_TYPE_CHOICES:
    case ND_FIELD_TYPE_TEXT:
        break;
    }
    return f->choices ? f->choices : "TEXT";
}

static void print_field(FILE *out, nd_field_id id)
{
    const nd_field *f = &nd_fields[id];
    char line[512], word[ND_FLAG_NAME_MAX], range[256];
    nd_field_range(id, range, sizeof range);
    nd_flag_list_word(f->flags, 0, word, sizeof word);
    int used = snprintf(line, sizeof line, "--%s %s%s", word, placeholder(f),
                        f->type == ND_FIELD_TYPE_CHOICES ? ",..." : "");
    for (int i = 1; nd_flag_list_word(f->flags, i, word, sizeof word); i++) {
        used += snprintf(line + used, sizeof line - (size_t)used, ", --%s", word);
    }
    print_wrapped(out, 2, line);
    bool number = f->type == ND_FIELD_TYPE_INT || f->type == ND_FIELD_TYPE_REAL ||
                  f->type == ND_FIELD_TYPE_PAIR;
    snprintf(line, sizeof line, "%s (%s.%s; default %s%s%s%s%s)", f->help, f->section, f->key,
             *f->initial ? f->initial : "empty", *f->unit ? " " : "", f->unit, number ? "; " : "",
             number ? range : "");
    print_wrapped(out, INDENT, line);
}

/* The flags of the short --help: what most runs set. */
static const nd_field_id most_used[] = {
    ND_FIELD_launch_workers,
    ND_FIELD_launch_device,
    ND_FIELD_mesh_dp_replicate,
    ND_FIELD_mesh_dp_shard,
    ND_FIELD_mesh_cp,
    ND_FIELD_mesh_tp,
    ND_FIELD_model_path,
    ND_FIELD_data_path,
    ND_FIELD_data_validation_path,
    ND_FIELD_train_steps,
    ND_FIELD_train_sequence_length,
    ND_FIELD_train_micro_batch_size,
    ND_FIELD_train_precision,
    ND_FIELD_optimizer_lr,
    ND_FIELD_parallel_recompute,
    ND_FIELD_output_dir,
    ND_FIELD_checkpoint_interval,
    ND_FIELD_checkpoint_resume,
};

enum { HELP_COLUMN = 36 }; /* of the short --help */

/* "  --num-steps N            optimizer steps": one line, `help` up to the first semicolon or
 * colon. */
static void print_short(FILE *out, const char *flag, const char *help)
{
    fprintf(out, "  %-*s %.*s\n", HELP_COLUMN - 3, flag, (int)strcspn(help, ";:"), help);
}

static void print_section_names(FILE *out)
{
    int column = fprintf(out, "  %-*s", HELP_COLUMN - 3, "--help SECTION");
    for (int i = 0; i < ND_SECTION_COUNT; i++) {
        const char *name = nd_sections[i].name;
        if (column + 2 + (int)strlen(name) > COLUMNS) {
            column = fprintf(out, "\n%*s", HELP_COLUMN - 1, "") - 1;
        }
        column += fprintf(out, " %s%s", name, i + 1 < ND_SECTION_COUNT ? "," : "\n");
    }
}

static void print_short_help(FILE *out, const nd_help *program)
{
    char flag[160], word[ND_FLAG_NAME_MAX];
    fprintf(
        out,
        "usage: %s\n\n"
        "Trains a model of the Llama, Mistral, Qwen, Phi, Granite, OLMo, EXAONE, GLM, SmolLM3 or\n"
        "Seed-OSS family (docs/models.md) on a mesh of workers. Later settings win: defaults,\n"
        "file, flags in order.\n\n",
        program->usage);
    print_short(out, "--config-file FILE", "YAML configuration, native or accelerate's");
    print_short(out, "--set SECTION.KEY=VALUE", "any key of the configuration");
    for (size_t i = 0; i < sizeof most_used / sizeof *most_used; i++) {
        const nd_field *f = &nd_fields[most_used[i]];
        nd_flag_list_word(f->flags, 0, word, sizeof word);
        snprintf(flag, sizeof flag, "--%s %s", word, placeholder(f));
        print_short(out, flag, f->help);
    }
    for (int i = 0; i < program->count; i++) {
        print_short(out, program->own[i].flag, program->own[i].help);
    }
    fputc('\n', out);
    print_section_names(out);
    print_short(out, "--help all", "every flag with its default, and the exit codes");
    print_short(out, "--version", "the version");
    fputs("\nThe flags of accelerate launch and torchrun are understood as well.\n", out);
}

static void print_section(FILE *out, int section)
{
    fprintf(out, "%s: %s\n", nd_sections[section].name, nd_sections[section].title);
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        if (strcmp(nd_fields[i].section, nd_sections[section].name) == 0) {
            print_field(out, (nd_field_id)i);
        }
    }
}

static void print_long_help(FILE *out, const nd_help *program)
{
    fprintf(out, "usage: %s\n\n", program->usage);
    print_wrapped(
        out, 0,
        "The configuration is made of the defaults, then the file (native, or accelerate's, "
        "unchanged), then the flags in their order; later settings win. A flag may be written with "
        "'-' or '_', as --flag=value or --flag value. The key of each flag stands in brackets as "
        "section.key.");
    fprintf(out, "\n  --config-file FILE\n      YAML configuration\n"
                 "  --set SECTION.KEY=VALUE\n      sets any key\n"
                 "  --help [SECTION|all], --version\n");
    for (int i = 0; i < program->count; i++) {
        fprintf(out, "  %s\n", program->own[i].flag);
        print_wrapped(out, INDENT, program->own[i].help);
    }
    for (int i = 0; i < ND_SECTION_COUNT; i++) {
        fputc('\n', out);
        print_section(out, i);
    }
    fputc('\n', out);
    print_wrapped(
        out, 0,
        "Flags of accelerate launch, torchrun and Finetrainers are understood as well "
        "(--mixed-precision, --use-fsdp, --fsdp-*, --parallelism-config-*, "
        "--main-process-ip, --standalone, ...); one that cannot be honoured is refused with "
        "a sentence.");
    fputs("\nExit codes: 0 done, 1 internal error, or the answer no of ckpt diff or ndtrain plan "
          "(the job "
          "does\nnot fit this host; with --device cuda: neither an H100 nor an H200), 2 usage or "
          "configuration,\n65 data or model file, 70 numbers, 71 memory, 73 output, 74 I/O or a "
          "lost worker, 75 stopped by\na signal, 124 a deadline, 128 + N ended by signal N.\n",
          out);
}

/* A command whose own help the program names beside it, in brackets. */
static bool is_command(const nd_help *program, const char *topic)
{
    char first[128], later[128];
    bool found = false;
    snprintf(first, sizeof first, "(%.100s --help", topic);
    snprintf(later, sizeof later, ", %.100s --help", topic);
    for (int i = 0; i < program->count && !found; i++) {
        found = strstr(program->own[i].help, first) || strstr(program->own[i].help, later);
    }
    return found;
}

static nd_status unknown_topic(const nd_help *program, const char *topic)
{
    nd_suggest search;
    if (is_command(program, topic)) {
        return nd_fail(ND_ERR_CONFIG, "--help %s: this is a command; write %.*s %s --help", topic,
                       (int)strcspn(program->usage, " "), program->usage, topic);
    }
    nd_suggest_init(&search, topic);
    nd_suggest_offer(&search, "all");
    for (int i = 0; i < ND_SECTION_COUNT; i++) {
        nd_suggest_offer(&search, nd_sections[i].name);
    }
    return nd_fail(ND_ERR_CONFIG, "--help %.80s: there is no such section; %s%s%s", topic,
                   search.best ? "did you mean --help " : "--help alone lists the sections",
                   search.best ? search.best : "", search.best ? "?" : "");
}

nd_status nd_config_help(FILE *out, const nd_help *program, const char *topic)
{
    int section = nd_section_find(topic);
    if (!*topic) {
        print_short_help(out, program);
    } else if (strcmp(topic, "all") == 0) {
        print_long_help(out, program);
    } else if (section >= 0) {
        print_section(out, section);
    } else {
        return unknown_topic(program, topic);
    }
    return ND_OK;
}
