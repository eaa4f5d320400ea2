// SPDX-License-Identifier: Apache-2.0
/* The tables of commands and of their own flags (commands.def), and the help: of the programs, made
 * from the field table, and of their commands. */
#include <stdio.h>
#include <string.h>

#include "runtime/base/suggest.h"
#include "runtime/config/reader.h"

#define CKPT_CODES                                                                                 \
    "Exit codes: 0 done, 2 wrong usage, 65 a bad or damaged folder, 73 output that cannot be\n"    \
    "written, 74 a failing disk, 71 out of memory. diff ends with 1 when the states differ.\n"

enum { TRAIN = 1 << ND_NDTRAIN, LAUNCH = 1 << ND_NDLAUNCH, BOTH = TRAIN | LAUNCH };
const nd_command_row nd_command_rows[ND_COMMAND_COUNT] = {
#define ND_COMMAND(id, ...) [ND_COMMAND_##id] = {__VA_ARGS__},
#include "runtime/config/commands.def"
};

const nd_field nd_own_flags[ND_OWN_FLAG_COUNT] = {
#define MOST ((double)INT64_MAX)
#define ND_OWN(owner, id, kind, names, value, ...)                                                 \
    {.command = ND_COMMAND_##owner,                                                                \
     .type = ND_FIELD_TYPE_##kind,                                                                 \
     .section = "",                                                                                \
     .flags = names,                                                                               \
     .choices = value,                                                                             \
     .help = __VA_ARGS__},
#include "runtime/config/commands.def"
};

static const char *program_name(nd_program program)
{
    return program == ND_NDTRAIN ? "ndtrain" : "ndlaunch";
}

/* A command of the program, but for the verbs of ckpt. */
static bool program_has(nd_program program, nd_command_id command)
{
    const nd_command_row *row = &nd_command_rows[command];
    return row->programs >> program & 1 && !strchr(row->name, ' ');
}

const char *nd_command_name(nd_command_id command)
{
    return nd_command_rows[command].name;
}

nd_command_id nd_command_find(nd_program program, const char *name)
{
    for (int i = 1; i < ND_COMMAND_COUNT; i++) {
        if (nd_command_rows[i].programs & ND_TAKES_SETTINGS && program_has(program, i) &&
            strcmp(nd_command_rows[i].name, name) == 0) {
            return (nd_command_id)i;
        }
    }
    return ND_COMMAND_NONE;
}

const char *nd_program_of(nd_command_id command)
{
    return program_name(nd_command_rows[command].programs & TRAIN ? ND_NDTRAIN : ND_NDLAUNCH);
}

nd_status nd_command_check_name(nd_program program, const char *word)
{
    const nd_program other = program == ND_NDTRAIN ? ND_NDLAUNCH : ND_NDTRAIN;
    const char *own_name = program_name(program), *other_name = program_name(other);
    nd_suggest search;
    ND_REFUSE(program == ND_NDLAUNCH && strcmp(word, "train") == 0,
              "ndlaunch starts `ndtrain train` itself; leave out the word train");
    nd_suggest_init(&search, word);
    for (int i = 1; i < ND_COMMAND_COUNT; i++) {
        if (program_has(program, i)) {
            nd_suggest_offer(&search, nd_command_rows[i].name);
        }
    }
    const int distance = search.distance;
    for (int i = 1; i < ND_COMMAND_COUNT; i++) {
        if (program_has(other, i)) {
            nd_suggest_offer(&search, nd_command_rows[i].name);
        }
    }
    ND_REFUSE(search.best && strcmp(search.best, word) == 0,
              "%s has no command \"%s\"; it is `%s %s`", own_name, word, other_name, word);
    return search.best
               ? nd_fail(ND_ERR_CONFIG, "%s has no command \"%.60s\"; did you mean `%s %s`?",
                         own_name, word, search.distance < distance ? other_name : own_name,
                         search.best)
               : ND_OK;
}

/* The help of a program. */

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
    default:
        return f->choices ? f->choices : "TEXT";
    }
}

static void print_field(FILE *out, nd_field_id id)
{
    const nd_field *f = &nd_fields[id];
    char line[512], word[ND_FLAG_NAME_MAX], range[256];
    nd_field_range(f, range, sizeof range);
    nd_list_word(f->flags, ' ', 0, word, sizeof word);
    int used = snprintf(line, sizeof line, "--%s %s%s", word, placeholder(f),
                        f->type == ND_FIELD_TYPE_CHOICES ? ",..." : "");
    for (int i = 1; nd_list_word(f->flags, ' ', i, word, sizeof word); i++) {
        used += snprintf(line + used, sizeof line - (size_t)used, ", --%s", word);
    }
    print_wrapped(out, 2, line);
    bool number = f->type == ND_FIELD_TYPE_INT || f->type == ND_FIELD_TYPE_REAL ||
                  f->type == ND_FIELD_TYPE_PAIR;
    snprintf(line, sizeof line, "%s (%s; default %s%s%s%s%s)", f->help, f->name,
             *f->initial ? f->initial : "empty", *f->unit ? " " : "", f->unit, number ? "; " : "",
             number ? range : "");
    print_wrapped(out, INDENT, line);
}

static const char *const usages[] = {
    [ND_NDTRAIN] = "ndtrain COMMAND [--config-file FILE] [flags]",
    [ND_NDLAUNCH] = "ndlaunch [--config-file FILE] [flags]",
};

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

static void print_short_help(FILE *out, nd_program program)
{
    char flag[160], word[ND_FLAG_NAME_MAX];
    fprintf(
        out,
        "usage: %s\n\n"
        "Trains a model of the Llama, Mistral, Qwen, Phi, Gemma, Granite, OLMo, EXAONE, GLM,\n"
        "SmolLM3 or Seed-OSS family (docs/models.md) on a mesh of workers. Later settings win:\n"
        "defaults, file, flags in order.\n\n",
        usages[program]);
    print_short(out, "--config-file FILE", "YAML configuration, native or accelerate's");
    print_short(out, "--set SECTION.KEY=VALUE", "any key of the configuration");
    for (size_t i = 0; i < sizeof most_used / sizeof *most_used; i++) {
        const nd_field *f = &nd_fields[most_used[i]];
        nd_list_word(f->flags, ' ', 0, word, sizeof word);
        snprintf(flag, sizeof flag, "--%s %s", word, placeholder(f));
        print_short(out, flag, f->help);
    }
    for (int i = 1; i < ND_COMMAND_COUNT; i++) {
        const nd_command_row *row = &nd_command_rows[i];
        if (program_has(program, i)) {
            snprintf(flag, sizeof flag, "%s%s", row->name,
                     row->name[0] == '-' ? " FILE"
                     : *row->about       ? " --help"
                                         : "");
            print_short(out, flag, row->summary);
        }
    }
    int column = fprintf(out, "\n  %-*s", HELP_COLUMN - 3, "--help SECTION") - 1;
    for (int i = 0; i < ND_SECTION_COUNT; i++) {
        const char *name = nd_sections[i].name;
        if (column + 2 + (int)strlen(name) > COLUMNS) {
            column = fprintf(out, "\n%*s", HELP_COLUMN - 1, "") - 1;
        }
        column += fprintf(out, " %s%s", name, i + 1 < ND_SECTION_COUNT ? "," : "\n");
    }
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

static void print_long_help(FILE *out, nd_program program)
{
    fprintf(out, "usage: %s\n\n", usages[program]);
    print_wrapped(out, 0,
                  "The configuration is made of the defaults, then the file (native, or "
                  "accelerate's, unchanged), then the flags in their order; later settings win. A "
                  "flag may be written with '-' or '_', as --flag=value or --flag value. The key "
                  "of each flag stands in brackets as section.key.");
    fprintf(out, "\n  --config-file FILE\n      YAML configuration\n"
                 "  --set SECTION.KEY=VALUE\n      sets any key\n"
                 "  --help [SECTION|all], --version\n");
    for (int i = 1; i < ND_COMMAND_COUNT; i++) {
        if (program_has(program, i)) {
            fprintf(out, "  %s%s%s\n", nd_command_rows[i].name,
                    *nd_command_rows[i].usage ? " " : "", nd_command_rows[i].usage);
            print_wrapped(out, INDENT, nd_command_rows[i].summary);
        }
    }
    for (int i = 0; i < ND_SECTION_COUNT; i++) {
        fputc('\n', out);
        print_section(out, i);
    }
    fputc('\n', out);
    print_wrapped(
        out, 0,
        "Flags of accelerate launch, torchrun and Finetrainers are understood as well "
        "(--mixed-precision, --use-fsdp, --fsdp-*, --parallelism-config-*, --main-process-ip, "
        "--standalone, ...); one that cannot be honoured is refused with a sentence.");
    fputs(
        "\nExit codes: 0 done, 1 internal error, or the answer no of ckpt diff or ndtrain plan "
        "(the job does\nnot fit this host; with --device cuda: neither an H100 nor an H200), 2 "
        "usage or configuration,\n65 data or model file, 70 numbers, 71 memory, 73 output, 74 I/O "
        "or a lost worker, 75 stopped by\na signal, 124 a deadline, 128 + N ended by signal N.\n",
        out);
}

static nd_status unknown_topic(nd_program program, const char *topic)
{
    nd_suggest search;
    for (int i = 1; i < ND_COMMAND_COUNT; i++) {
        ND_REFUSE(program_has(program, i) && *nd_command_rows[i].about &&
                      strcmp(nd_command_rows[i].name, topic) == 0,
                  "--help %s: this is a command; write %s %s --help", topic, program_name(program),
                  topic);
    }
    nd_suggest_init(&search, topic);
    nd_suggest_offer(&search, "all");
    for (int i = 0; i < ND_SECTION_COUNT; i++) {
        nd_suggest_offer(&search, nd_sections[i].name);
    }
    const int field = search.best ? -1 : nd_field_near(topic);
    ND_REFUSE(field >= 0, "--help %.80s: there is no such section; --help %s has the key %s", topic,
              nd_fields[field].section, nd_fields[field].name);
    return nd_fail(ND_ERR_CONFIG, "--help %.80s: there is no such section; %s%s%s", topic,
                   search.best ? "did you mean --help " : "--help alone lists the sections",
                   search.best ? search.best : "", search.best ? "?" : "");
}

nd_status nd_config_help(FILE *out, nd_program program, const char *topic)
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

void nd_program_print_usage(nd_program program)
{
    const char *name = program_name(program), *begin = "usage:";
    if (program == ND_NDLAUNCH) {
        fprintf(stderr, "usage: %s\n", usages[program]);
        begin = "      ";
    }
    for (int i = 1; i < ND_COMMAND_COUNT; i++, begin = "      ") {
        if (program_has(program, i)) {
            fprintf(stderr, "%s %s %s%s%s\n", begin, name, nd_command_rows[i].name,
                    *nd_command_rows[i].usage ? " " : "", nd_command_rows[i].usage);
        }
    }
    fprintf(stderr, "       %s --help [SECTION|all] | --version\n", name);
}

/* The help of a command. */

enum { FLAG_TEXT_MAX = 100 };

/* "--tokenizer, --tokenizer-model PATH" */
static int format_flag(const nd_field *flag, char *out, size_t size)
{
    char word[ND_FLAG_NAME_MAX];
    int used = 0;
    for (int i = 0; nd_list_word(flag->flags, ' ', i, word, sizeof word); i++) {
        used += snprintf(out + used, size - (size_t)used, "%s%s%s", i > 0 ? ", " : "",
                         word[1] ? "--" : "-", word);
    }
    return flag->choices ? used + snprintf(out + used, size - (size_t)used, " %s", flag->choices)
                         : used;
}

void nd_command_print_help(nd_command_id command)
{
    char name[FLAG_TEXT_MAX];
    int width = 0;
    for (int i = 0; i < ND_OWN_FLAG_COUNT; i++) {
        const int size = format_flag(&nd_own_flags[i], name, sizeof name);
        width = nd_own_flags[i].command == command && size > width ? size : width;
    }
    const nd_command_row *row = &nd_command_rows[command];
    const size_t length = strlen(row->name);
    printf("usage: %s %s %s\n\n%s\n\n", nd_program_of(command), row->name, row->usage, row->about);
    for (int i = 0; i < ND_OWN_FLAG_COUNT; i++) { /* two columns */
        const char *help = nd_own_flags[i].command == command ? nd_own_flags[i].help : "";
        format_flag(&nd_own_flags[i], name, sizeof name);
        for (const char *line = help; *line; line += strcspn(line, "\n"), line += *line == '\n') {
            printf("  %-*s  ", width, line == help ? name : "");
            fwrite(line, 1, strcspn(line, "\n"), stdout);
            putchar('\n');
        }
    }
    for (int i = 1; i < ND_COMMAND_COUNT; i++) { /* verbs */
        const nd_command_row *verb = &nd_command_rows[i];
        if (strncmp(verb->name, row->name, length) == 0 && verb->name[length] == ' ') {
            printf("  %-6s  %s\n", verb->name + length + 1, verb->usage);
            width = -1;
        }
    }
    if (width < 0) {
        printf("\n%s %s VERB --help says what a verb does, and its exit codes.\n",
               nd_program_of(command), row->name);
    }
    printf("%s%s", width > 0 && *row->codes ? "\n" : "", row->codes);
}

bool nd_command_wants_help(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            return true;
        }
    }
    return false;
}
