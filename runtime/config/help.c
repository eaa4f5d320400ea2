// SPDX-License-Identifier: Apache-2.0
/* --help, made from the field table. */
#include <stdio.h>
#include <string.h>

#include "runtime/config/flags.h"

enum { COLUMNS = 100, INDENT = 6 };

/* Words of `text`, wrapped, each line indented. */
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
    int used = snprintf(line, sizeof line, "--%s %s", word, placeholder(f));
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

void nd_config_help(FILE *out, const char *program, const char *own)
{
    fprintf(out, "usage: %s [--config-file FILE] [flags]\n\n", program);
    print_wrapped(
        out, 0,
        "Reads defaults, then the file (native, or accelerate's, unchanged), then the flags "
        "in order: later wins. '-' and '_' in a flag are the same; --flag=value and --flag "
        "value too. Each key of the file is given in brackets as section.key.");
    fprintf(out, "\n  --config-file FILE\n      YAML configuration\n"
                 "  --set SECTION.KEY=VALUE\n      sets any key\n"
                 "  --help, --version\n");
    fputs(own, out);
    for (int i = 0; i < ND_FIELD_COUNT; i++) {
        if (i == 0 || strcmp(nd_fields[i].section, nd_fields[i - 1].section) != 0) {
            int section = nd_section_find(nd_fields[i].section);
            fprintf(out, "\n%s: %s\n", nd_sections[section].name, nd_sections[section].title);
        }
        print_field(out, (nd_field_id)i);
    }
    fputc('\n', out);
    print_wrapped(
        out, 0,
        "Flags of accelerate launch, torchrun and Finetrainers are understood as well "
        "(--mixed-precision, --use-fsdp, --fsdp-*, --parallelism-config-*, "
        "--main-process-ip, --standalone, ...); one that cannot be honoured is refused with "
        "a sentence.");
    fputs(
        "\nExit codes: 0 done, 1 internal error, 2 usage or configuration, 65 data or model file,\n"
        "70 numbers, 71 memory, 73 output, 74 I/O or a lost worker, 75 stopped by a signal, 124 a\n"
        "deadline, 128 + N ended by signal N.\n",
        out);
}
