// SPDX-License-Identifier: Apache-2.0
/* `ndlaunch config`: asks what a run should be and writes it as a YAML file. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launcher/launcher.h"
#include "runtime/base/fs.h"
#include "runtime/base/process.h"
#include "runtime/config/commands.h"

enum { ANSWER_MAX = 1024 };

/* What an answer stands for: the model question sets one of three keys. */
typedef enum question_kind { ASKS_NUMBER, ASKS_WORD, ASKS_TEXT, ASKS_MODEL } question_kind;

typedef struct question {
    const char *section, *key, *text;
    const char *initial; /* NULL: it depends on this host or on an earlier answer */
    question_kind kind;
    bool of_many;  /* asked when there are several workers */
    bool not_zero; /* 0 says that another key counts, which is not asked for */
} question;

/* In the order of the file; questions of a section stand together. */
static const question questions[] = {
    {"launch", "workers", "Workers, one for each GPU", NULL, ASKS_NUMBER, false},
    {"mesh", "dp_replicate", "Replicas of the model", "1", ASKS_NUMBER, true},
    {"mesh", "cp", "Ranks that share each sequence (context parallel)", "1", ASKS_NUMBER, true},
    {"mesh", "tp", "Ranks that share each matrix (tensor parallel)", "1", ASKS_NUMBER, true},
    {"model", "config",
     "Model: a config.json for fresh weights, a Hugging Face folder, or ORG/NAME in the local "
     "cache",
     NULL, ASKS_MODEL, false},
    {"data", "path", "Training file", "data/train.txt", ASKS_TEXT, false},
    {"data", "validation_path", "Validation file, - for none", "data/valid.txt", ASKS_TEXT, false},
    {"data", "tokenizer", "Tokenizer: bytes, model, file (ids are in the file), or a path", NULL,
     ASKS_TEXT, false},
    {"train", "steps", "Steps", "1000", ASKS_NUMBER, false, true},
    {"train", "sequence_length", "Tokens of a sample", "512", ASKS_NUMBER, false},
    {"train", "micro_batch_size", "Samples of a data-parallel rank at once", "2", ASKS_NUMBER,
     false},
    {"train", "precision", "Precision: bf16, fp32 or fp8", "bf16", ASKS_WORD, false},
    {"train", "validation_interval", "Steps between validations, 0 for one at the end", "100",
     ASKS_NUMBER, false},
    {"optimizer", "lr", "Largest learning rate", "3e-4", ASKS_NUMBER, false},
    {"optimizer", "warmup_ratio", "Share of the steps that warms up", "0.1", ASKS_NUMBER, false},
    {"checkpoint", "interval", "Steps between checkpoints, 0 for none", "500", ASKS_NUMBER, false},
};
enum { QUESTIONS = sizeof questions / sizeof *questions };

typedef struct answer {
    const char *key; /* of the question's section; NULL: it was not asked */
    char text[ANSWER_MAX];
} answer;

typedef struct interview {
    FILE *in, *out; /* in NULL: every answer is its default */
    answer answers[QUESTIONS];
    char gpus[16], model[ANSWER_MAX]; /* defaults of this host */
} interview;

/* All answers so far as settings, over the defaults. */
static nd_status check_answers(const interview *v, bool whole)
{
    char settings[QUESTIONS][ANSWER_MAX + 64], *argv[1 + 2 * QUESTIONS] = {"ndlaunch"};
    int argc = 1;
    nd_config config = {0};
    nd_cli cli = {.plan_rank = -1, .help_topic = ""};
    for (int i = 0; i < QUESTIONS; i++) {
        if (v->answers[i].key) {
            snprintf(settings[i], sizeof settings[i], "%s.%s=%s", questions[i].section,
                     v->answers[i].key, v->answers[i].text);
            argv[argc++] = "--set";
            argv[argc++] = settings[i];
        }
    }
    nd_status status = nd_config_init(&config);
    status = status == ND_OK ? nd_config_parse(&config, &cli, argc, argv) : status;
    status = status == ND_OK && whole ? nd_config_resolve(&config) : status;
    nd_config_fini(&config);
    return status;
}

static const answer *answer_of(const interview *v, const char *section)
{
    for (int i = 0; i < QUESTIONS; i++) {
        if (strcmp(questions[i].section, section) == 0 && v->answers[i].key) {
            return &v->answers[i];
        }
    }
    return NULL;
}

static const char *default_of(const interview *v, const question *q)
{
    if (q->initial) {
        return q->initial;
    }
    if (strcmp(q->key, "workers") == 0) {
        return v->gpus;
    }
    if (q->kind == ASKS_MODEL) {
        return v->model;
    }
    const answer *model = answer_of(v, "model"); /* one with weights has a tokenizer */
    return model && strcmp(model->key, "config") != 0 ? "model" : "bytes";
}

static const char *key_of(const question *q, const char *text)
{
    bool folder = false;
    size_t length = strlen(text);
    if (q->kind != ASKS_MODEL || (length > 5 && strcmp(text + length - 5, ".json") == 0)) {
        return q->key;
    }
    (void)nd_fs_is_folder(text, &folder);
    return folder || text[0] == '/' || text[0] == '.' || text[0] == '~' ? "path" : "name";
}

/* One line without its blanks; empty: the default. */
static nd_status read_answer(interview *v, const question *q, char text[ANSWER_MAX])
{
    fprintf(v->out, "%s [%s]: ", q->text, default_of(v, q));
    fflush(v->out);
    if (!fgets(text, ANSWER_MAX, v->in)) {
        return nd_fail(ND_ERR_CONFIG,
                       "the input ended before the answer to \"%s\"; ndlaunch config --default "
                       "asks nothing",
                       q->text);
    }
    size_t length = strlen(text), first = strspn(text, " \t");
    if (length == ANSWER_MAX - 1 && text[length - 1] != '\n') {
        return nd_fail(ND_ERR_CONFIG, "the answer to \"%s\" has more than %d bytes", q->text,
                       ANSWER_MAX - 2);
    }
    while (length > first && strchr(" \t\r\n", text[length - 1])) {
        length--;
    }
    memmove(text, text + first, length - first);
    text[length - first] = '\0';
    return ND_OK;
}

/* Asks again until the answer is one that the key can have. */
static nd_status ask(interview *v, int i)
{
    const question *q = &questions[i];
    answer *a = &v->answers[i];
    for (;;) {
        char text[ANSWER_MAX] = "";
        ND_TRY(v->in ? read_answer(v, q, text) : ND_OK);
        const char *given = !text[0]                                         ? default_of(v, q)
                            : q->kind == ASKS_TEXT && strcmp(text, "-") == 0 ? ""
                                                                             : text;
        snprintf(a->text, sizeof a->text, "%s", given);
        a->key = key_of(q, a->text);
        nd_status status = check_answers(v, false);
        if (status == ND_OK && q->not_zero && strtod(a->text, NULL) == 0) {
            status =
                nd_fail(ND_ERR_CONFIG, "%s.%s is 0; it must be at least 1", q->section, q->key);
        }
        if (status != ND_ERR_CONFIG || !v->in) {
            return status;
        }
        fprintf(v->out, "  %s\n", nd_error_last()->message);
        nd_error_clear();
        a->key = NULL;
    }
}

static nd_status ask_all(interview *v)
{
    for (int i = 0; i < QUESTIONS; i++) {
        bool many = strcmp(v->answers[0].text, "1") != 0;
        if (!questions[i].of_many || many) {
            ND_TRY(ask(v, i));
        }
        if (!many || !questions[i].of_many || questions[i + 1].of_many) {
            continue;
        }
        nd_status status = check_answers(v, true); /* the mesh, before more is asked */
        if (status != ND_ERR_CONFIG || !v->in) {
            ND_TRY(status);
            continue;
        }
        fprintf(v->out, "  %s\n", nd_error_last()->message);
        nd_error_clear();
        for (i = 1; questions[i].of_many; i++) {
            v->answers[i].key = NULL;
        }
        i = 0; /* the mesh again */
    }
    return check_answers(v, true);
}

static void write_text(FILE *out, const char *text)
{
    fputc('"', out);
    for (const char *c = text; *c; c++) {
        fprintf(out, *c == '"' || *c == '\\' ? "\\%c" : "%c", *c);
    }
    fputc('"', out);
}

static void write_yaml(const interview *v, FILE *out)
{
    const char *section = "";
    fprintf(out, "# Made by ndlaunch config. docs/config.md lists every key; ndlaunch --help "
                 "SECTION prints those of a section.\n");
    for (int i = 0; i < QUESTIONS; i++) {
        const question *q = &questions[i];
        if (!v->answers[i].key) {
            continue;
        }
        if (strcmp(section, q->section) != 0) {
            section = q->section;
            fprintf(out, "\n%s:\n", section);
        }
        fprintf(out, "  %s: ", v->answers[i].key);
        if (q->kind == ASKS_NUMBER || q->kind == ASKS_WORD) {
            fputs(v->answers[i].text, out);
        } else {
            write_text(out, v->answers[i].text);
        }
        fprintf(out, "  # %s\n", q->text);
    }
}

/* Never replaces a file. */
static nd_status write_file(const interview *v, const char *path)
{
    FILE *out = nd_fs_stream_new(path);
    if (!out) {
        return nd_fail(ND_ERR_CANTCREATE,
                       "%s cannot be created: %s; name a new file with "
                       "--config-file",
                       path, strerror(errno));
    }
    write_yaml(v, out);
    bool failed = ferror(out) != 0;
    failed = fclose(out) != 0 || failed;
    if (failed) {
        unlink(path);
        return nd_fail(ND_ERR_CANTCREATE, "%s cannot be written: %s", path, strerror(errno));
    }
    return ND_OK;
}

/* The small model of the repository, or of the folder that this program was installed in. */
static void find_model(char out[ANSWER_MAX])
{
    static const char local[] = "configs/model-small.json";
    char program[ANSWER_MAX / 2], path[ANSWER_MAX];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    snprintf(out, ANSWER_MAX, "%s", local);
    bool there = false;
    if (n <= 0 || nd_fs_exists(local, &there) != ND_OK || there) {
        return;
    }
    program[n] = '\0';
    for (int up = 0; up < 2 && strrchr(program, '/'); up++) { /* PREFIX/bin/ndlaunch */
        *strrchr(program, '/') = '\0';
    }
    snprintf(path, sizeof path, "%s/share/ndtrain/%s", program, local);
    if (nd_fs_exists(path, &there) == ND_OK && there) {
        snprintf(out, ANSWER_MAX, "%s", path);
    }
}

/* Files that the run will want and that are not there: they may come later. */
static void say_missing(const interview *v)
{
    for (int i = 0; i < QUESTIONS; i++) {
        const answer *a = &v->answers[i];
        const bool names_file =
            a->key && (strcmp(a->key, "config") == 0 || strcmp(a->key, "path") == 0 ||
                       strcmp(a->key, "validation_path") == 0);
        bool there = false;
        if (names_file && a->text[0] && a->text[0] != '[' && !strpbrk(a->text, "*? ") &&
            nd_fs_exists(a->text, &there) == ND_OK && !there) {
            fprintf(v->out, "not there yet: %s (%s.%s)\n", a->text, questions[i].section, a->key);
        }
    }
}

nd_status nd_questions_ask(FILE *in, FILE *out, const char *path)
{
    interview v = {.in = in, .out = out};
    int gpus = nd_host_gpus();
    snprintf(v.gpus, sizeof v.gpus, "%d", gpus > 0 ? gpus : 1);
    find_model(v.model);
    bool there = false;
    ND_TRY(nd_fs_exists(path, &there));
    if (there) {
        return nd_fail(ND_ERR_CANTCREATE,
                       "%s exists already; remove it, or name a new file with --config-file", path);
    }
    ND_TRY(ask_all(&v));
    ND_TRY(write_file(&v, path));
    fprintf(out,
            "written: %s\n"
            "  ndtrain plan --config-file %s     # what it will need\n"
            "  ndlaunch --config-file %s         # trains\n",
            path, path, path);
    say_missing(&v);
    return ND_OK;
}

nd_status nd_questions_main(int argc, char **argv)
{
    nd_command_flags line;
    int at = 0;
    if (nd_command_wants_help(argc - 1, argv + 1)) {
        nd_command_print_help(ND_COMMAND_CONFIG);
        return ND_OK;
    }
    ND_TRY(nd_command_flags_read(ND_COMMAND_CONFIG, argc - 1, argv + 1, &line));
    const char *path =
        line.values[ND_CONFIG_FILE].given ? line.values[ND_CONFIG_FILE].text : "ndtrain.yaml";
    const char *word = nd_command_flags_next(&line, ND_NO_FLAG, &at); /* as accelerate has it */
    if (word && strcmp(word, "default") != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "ndlaunch config does not take \"%.60s\"; it takes --default and "
                       "--config-file FILE, the file to write",
                       word);
    }
    if (!path[0]) {
        return nd_fail(ND_ERR_CONFIG, "--config-file is empty; give the name of the file to write");
    }
    const bool ask_nothing = word || line.values[ND_CONFIG_DEFAULT].given;
    return nd_questions_ask(ask_nothing ? NULL : stdin, stdout, path);
}
