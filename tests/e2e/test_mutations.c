// SPDX-License-Identifier: Apache-2.0
/*
 * Damaged input: every kind of file that the trainer reads is changed at random and read again.
 * Whatever the damage, the program soon ends with a documented code and one sentence, or takes the
 * file. A case is a fork of this process that calls the trainer's main, so that a thousand take
 * seconds. All is drawn from a fixed seed, so that a case that fails comes again. ND_MUTATIONS is
 * the number of cases of each kind of file.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <jansson.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/rdzv/key.h"
#include "tests/support/inputs.h"
#include "tests/support/patience.h"
#include "tests/support/shell.h"
#include "trainer/text/tokenizer.h"

int nd_train_main(int argc, char **argv); /* main of trainer/main.c under another name */

enum { CASES = 90, FILE_MAX = 1 << 16, WORDS_MAX = 64 };

static tempdir dir;

/* Numbers. */

typedef struct source {
    uint64_t state;
} source;

static uint64_t next_number(source *s)
{
    uint64_t z = (s->state += 0x9e3779b97f4a7c15u); /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static size_t below(source *s, size_t bound)
{
    return bound > 0 ? (size_t)(next_number(s) % bound) : 0;
}

/* A file in memory and what is done to it. */

typedef struct content {
    char bytes[FILE_MAX];
    size_t size;
} content;

static void replace(content *c, size_t at, size_t old, const char *with, size_t count)
{
    old = old < c->size - at ? old : c->size - at;
    if (c->size - old + count > sizeof c->bytes) {
        return;
    }
    memmove(c->bytes + at + count, c->bytes + at + old, c->size - at - old);
    memcpy(c->bytes + at, with, count);
    c->size += count - old;
}

/* A number in decimal digits behind a random place becomes one that programs stumble over. */
static void change_number(content *c, source *s)
{
    static const char *const numbers[] = {
        "0",  "-1",    "1",    "2147483647", "2147483648", "4294967296",
        "-0", "1e308", "nan",  "0.5",        "1048576",    "9223372036854775807",
        "",   "1e-30", "-1e9", "007",        "1000003",    "99999999999999999999999"};
    size_t at = below(s, c->size);
    while (at < c->size && (c->bytes[at] < '0' || c->bytes[at] > '9')) {
        at++;
    }
    size_t end = at;
    while (end < c->size && c->bytes[end] >= '0' && c->bytes[end] <= '9') {
        end++;
    }
    const char *number = numbers[below(s, sizeof numbers / sizeof *numbers)];
    if (end > at) {
        replace(c, at, end - at, number, strlen(number));
    }
}

/* One thing; most are near the beginning, where formats have their headers. */
static void change(content *c, source *s)
{
    static const char odd[] = "\0\n\t\r\x1b\x7f\x80\xff{}[]\",:-#&*!|>'%@`";
    size_t at = below(s, below(s, 4) == 0 ? c->size : c->size < 2048 ? c->size : 2048);
    size_t length = below(s, below(s, 3) == 0 ? c->size : 16) + 1;
    char some[64];
    if (c->size == 0) {
        return;
    }
    switch (below(s, 10)) {
    case 0:
    case 1:
        c->bytes[at] ^= (char)(1 << below(s, 8));
        break;
    case 2:
        c->bytes[at] = (char)next_number(s);
        break;
    case 3:
        c->bytes[at] = odd[below(s, sizeof odd)];
        break;
    case 4:
        c->size = at; /* cut */
        break;
    case 5:
        replace(c, at, length, "", 0);
        break;
    case 6:
        length = length < sizeof some ? length : sizeof some;
        length = length < c->size - at ? length : c->size - at;
        memcpy(some, c->bytes + at, length);
        replace(c, below(s, c->size), 0, some, length);
        break;
    case 7:
        for (size_t i = 0; i < sizeof some; i++) {
            some[i] = (char)next_number(s);
        }
        replace(c, at, 0, some, below(s, sizeof some) + 1);
        break;
    default:
        change_number(c, s);
        break;
    }
}

/* Running a case. */

/* What a case calls: arguments of ndtrain, or a function that reads the file. */
typedef struct kind {
    const char *name, *file; /* the file that is changed */
    const char *arguments;   /* of ndtrain, with single blanks; NULL: */
    nd_status (*read)(const char *path);
    const char *sentence; /* with which the line about a bad file begins; NULL: "error: " */
    const char *made;     /* the folder that a case makes, or NULL */
} kind;

static int run_arguments(const char *arguments)
{
    char text[2048], *argv[WORDS_MAX] = {"ndtrain"}, *rest = NULL;
    int argc = 1;
    snprintf(text, sizeof text, "%s", arguments);
    for (char *word = strtok_r(text, " ", &rest); word && argc < WORDS_MAX - 1;
         word = strtok_r(NULL, " ", &rest)) {
        argv[argc++] = word;
    }
    return nd_train_main(argc, argv);
}

static int run_reader(nd_status (*read_file)(const char *path), const char *path)
{
    nd_status status = read_file(path);
    if (status != ND_OK) {
        nd_log_error("%s", nd_error_last()->message);
    }
    return (int)status;
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *walk)
{
    return remove(path);
}

static void remove_folder(const char *name)
{
    cr_assert(nftw(tempdir_file(&dir, name), remove_entry, 16, FTW_DEPTH | FTW_PHYS) == 0 ||
                  errno == ENOENT,
              "%s: %s", name, strerror(errno));
}

/* The exit code, or 128 + the signal that ended it, which is SIGKILL when it takes too long; what
 * it printed is in shell_output. */
static int run_case(const kind *k)
{
    static const struct timespec pause = {.tv_nsec = 1000000};
    char output[sizeof dir.path + 16];
    int status = 0;
    int64_t deadline = nd_clock_ns() + (int64_t)(patience(PATIENCE_SECONDS) * 1e9);
    snprintf(output, sizeof output, "%s/output", dir.path);
    fflush(NULL);
    pid_t pid = fork();
    cr_assert_geq(pid, 0, "%s", strerror(errno));
    if (pid == 0) {
        int fd = open(output, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
        dup2(fd, STDOUT_FILENO);
        dup2(fd, STDERR_FILENO);
        int code = chdir(dir.path);
        code = code != 0       ? 99
               : !k->arguments ? run_reader(k->read, k->file)
                               : run_arguments(k->arguments);
        fflush(NULL);
        _exit(code);
    }
    while (waitpid(pid, &status, WNOHANG) != pid) {
        if (nd_clock_ns() > deadline) {
            kill(pid, SIGKILL);
        }
        nanosleep(&pause, NULL);
    }
    FILE *in = fopen(output, "re");
    cr_assert_not_null(in);
    shell_output[fread(shell_output, 1, sizeof shell_output - 1, in)] = '\0';
    fclose(in);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int count_lines(const char *text, const char *begin)
{
    int count = 0;
    size_t length = strlen(begin);
    for (const char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        count += strncmp(line, begin, length) == 0;
    }
    return count;
}

/* The codes of docs/launch.md that bad input may have: not 1, which is a fault of the program. */
static bool is_documented(int code)
{
    static const int codes[] = {0, ND_ERR_CONFIG, ND_ERR_DATA, ND_ERR_NUMERIC, ND_ERR_RESOURCE};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        if (codes[i] == code) {
            return true;
        }
    }
    return false;
}

static bool has_control_characters(const char *text)
{
    for (; *text; text++) {
        if ((unsigned char)*text < 0x20 && *text != '\n' && *text != '\t') {
            return true;
        }
    }
    return false;
}

static void judge(const kind *k, int number, int code)
{
    cr_assert(is_documented(code), "%s, case %d ends with %d:\n%s", k->name, number, code,
              shell_output);
    cr_assert_eq(count_lines(shell_output, k->sentence ? k->sentence : "error: "), code != 0,
                 "%s, case %d ends with %d and not one sentence:\n%s", k->name, number, code,
                 shell_output);
    cr_assert(!has_control_characters(shell_output), "%s, case %d:\n%s", k->name, number,
              shell_output);
}

static void read_content(const char *name, content *c)
{
    FILE *in = fopen(tempdir_file(&dir, name), "rbe");
    cr_assert_not_null(in, "%s", name);
    c->size = fread(c->bytes, 1, sizeof c->bytes, in);
    cr_assert(c->size > 0 && c->size < sizeof c->bytes, "%s is too large", name);
    fclose(in);
}

static void mutate(const kind *k)
{
    static content good, changed;
    source s = {.state = 20260000};
    const char *number = getenv("ND_MUTATIONS");
    int taken = 0, cases = number ? atoi(number) : CASES;
    cr_assert_gt(cases, 0, "ND_MUTATIONS is %s", number);
    read_content(k->file, &good);
    for (const char *c = k->name; *c; c++) {
        s.state = s.state * 31 + (unsigned char)*c;
    }
    for (int i = -1; i < cases; i++) { /* the first case is the good file */
        changed = good;
        for (size_t n = i < 0 ? 0 : below(&s, 3) + 1; n > 0; n--) {
            change(&changed, &s);
        }
        tempdir_write(&dir, k->file, changed.bytes, changed.size);
        if (k->made) {
            remove_folder(k->made);
        }
        int code = run_case(k);
        cr_assert(i >= 0 || code == 0, "%s, the good file ends with %d:\n%s", k->name, code,
                  shell_output);
        judge(k, i, code);
        taken += code == 0;
    }
    fprintf(stderr, "%s: %d of %d files were taken\n", k->name, taken, cases + 1);
}

/* Good files. */

#define INPUT                                                                                      \
    " --sequence-length 32 --device cpu --precision fp32 --set launch.threads_per_worker=1 "       \
    "--set data.validation_path= --set model.config=model.json --log-level warning"
#define TRAIN "train" INPUT " --num-steps 1 --set output.dir=out --set output.save_model=false"
#define TEXT  " --set data.path=text.txt"

static void good_run(const char *arguments)
{
    const kind k = {.name = "good", .arguments = arguments};
    int code = run_case(&k);
    cr_assert_eq(code, 0, "%s: %d:\n%s", arguments, code, shell_output);
}

static void setup(void)
{
    setenv("GOMP_SPINCOUNT", "2000", 1); /* else the trainer executes itself again */
    tempdir_make(&dir);
    inputs_write_text(&dir, 2000);
    inputs_write_model(&dir, 16, 32, 1);
}

static void teardown(void)
{
    shell_remove(&dir);
}

TestSuite(mutations, .init = setup, .fini = teardown);

static void write_text(const char *name, const char *text)
{
    tempdir_write(&dir, name, text, strlen(text));
}

Test(mutations, native_yaml)
{
    write_text("c.yaml", "# a comment\nmodel:\n  config: model.json\n  seed: 7\ndata:\n"
                         "  path: text.txt\n  validation_path: ''\n  shuffle_seed: 3\ntrain:\n"
                         "  steps: 3\n  sequence_length: 32\n  micro_batch_size: 2\n"
                         "  gradient_accumulation_steps: 1\n  precision: bf16\noptimizer:\n"
                         "  lr: 1e-3\n  betas: [0.9, 0.95]\n  schedule: cosine\n  warmup_steps: 1\n"
                         "mesh: {dp_shard: -1, tp: 1}\nlaunch:\n  device: cpu\n");
    mutate(&(kind){
        .name = "native yaml", .file = "c.yaml", .arguments = "check --config-file c.yaml"});
}

Test(mutations, accelerates_yaml)
{
    write_text("a.yaml",
               "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\n"
               "fsdp_config:\n  fsdp_reshard_after_forward: true\n  fsdp_version: 2\n"
               "mixed_precision: bf16\nnum_machines: 1\nnum_processes: 1\n"
               "parallelism_config:\n  parallelism_config_dp_shard_size: 1\n"
               "  parallelism_config_tp_size: 1\nrdzv_backend: static\nuse_cpu: true\n");
    mutate(&(kind){.name = "accelerate's yaml",
                   .file = "a.yaml",
                   .arguments = "check --config-file a.yaml" INPUT TEXT});
}

Test(mutations, model_config)
{
    mutate(&(kind){.name = "config.json", .file = "model.json", .arguments = "check" INPUT TEXT});
}

Test(mutations, text)
{
    mutate(&(kind){.name = "text", .file = "text.txt", .arguments = TRAIN TEXT, .made = "out"});
}

Test(mutations, jsonl)
{
    char rows[4096];
    size_t used = 0;
    for (int i = 0; i < 16; i++) {
        used +=
            (size_t)snprintf(rows + used, sizeof rows - used,
                             i % 3 ? "{\"text\": \"row %d of \\u00e9\\n some text\", \"n\": 1}\n"
                                   : "{\"prompt\": \"what is %d\", \"completion\": \"a number "
                                     "that is not\"}\n",
                             i);
    }
    tempdir_write(&dir, "rows.jsonl", rows, used);
    mutate(&(kind){.name = "jsonl",
                   .file = "rows.jsonl",
                   .arguments = TRAIN " --set data.path=rows.jsonl",
                   .made = "out"});
}

Test(mutations, llmc)
{
    uint16_t words[512 + 400] = {0};
    const uint32_t header[3] = {20240520, 1, 400};
    memcpy(words, header, sizeof header);
    for (int i = 0; i < 400; i++) {
        words[512 + i] = (uint16_t)(i * 7 % 256);
    }
    tempdir_write(&dir, "tokens.bin", words, sizeof words);
    mutate(&(kind){.name = "llmc",
                   .file = "tokens.bin",
                   .arguments = TRAIN " --set data.path=tokens.bin --set data.format=llmc "
                                      "--set data.tokenizer=file",
                   .made = "out"});
}

static void write_megatron(void)
{
    uint8_t idx[34 + 8 + 16 + 24] = {0}, bin[800] = {0};
    const uint64_t one = 1, sequences = 2, documents = 3, pointers[2] = {0, 400},
                   ends[3] = {0, 1, 2};
    const int32_t lengths[2] = {200, 200};
    memcpy(idx, "MMIDIDX\0\0", 9);
    memcpy(idx + 9, &one, 8);
    idx[17] = 8; /* unsigned 16-bit tokens */
    memcpy(idx + 18, &sequences, 8);
    memcpy(idx + 26, &documents, 8);
    memcpy(idx + 34, lengths, sizeof lengths);
    memcpy(idx + 42, pointers, sizeof pointers);
    memcpy(idx + 58, ends, sizeof ends);
    tempdir_write(&dir, "corpus.idx", idx, sizeof idx);
    tempdir_write(&dir, "corpus.bin", bin, sizeof bin);
}

#define CORPUS TRAIN " --set data.path=corpus --set data.format=megatron --set data.tokenizer=file"

Test(mutations, megatron_index)
{
    write_megatron();
    mutate(&(kind){
        .name = "megatron's index", .file = "corpus.idx", .arguments = CORPUS, .made = "out"});
}

Test(mutations, megatron_tokens)
{
    write_megatron();
    mutate(&(kind){
        .name = "megatron's tokens", .file = "corpus.bin", .arguments = CORPUS, .made = "out"});
}

#define SAVING                                                                                     \
    "train" INPUT TEXT " --num-steps 1 --set output.dir=first --set output.save_model=true"
#define LOADING                                                                                    \
    "train --sequence-length 32 --device cpu --precision fp32 --set launch.threads_per_worker=1 "  \
    "--set data.validation_path= --log-level error --num-steps 1 --set output.dir=out "            \
    "--set output.save_model=false --set model.path=first/model" TEXT

Test(mutations, safetensors)
{
    good_run(SAVING);
    mutate(&(kind){.name = "safetensors",
                   .file = "first/model/model.safetensors",
                   .arguments = LOADING " --set model.verify=false",
                   .made = "out"});
}

Test(mutations, checksums)
{
    good_run(SAVING);
    mutate(&(kind){.name = "SHA256SUMS",
                   .file = "first/model/SHA256SUMS",
                   .arguments = LOADING,
                   .made = "out"});
}

/* The index of a model in several files, here of one. */
static void write_index(void)
{
    static content weights;
    uint64_t bytes;
    const char *name;
    json_t *tensor, *map = json_object();
    read_content("first/model/model.safetensors", &weights);
    memcpy(&bytes, weights.bytes, 8);
    json_t *header = json_loadb(weights.bytes + 8, bytes, 0, NULL);
    cr_assert(header && map);
    json_object_foreach(header, name, tensor)
    {
        if (strcmp(name, "__metadata__") != 0) {
            json_object_set_new(map, name, json_string("model-00001-of-00001.safetensors"));
        }
    }
    json_t *index = json_pack("{s:{s:i},s:o}", "metadata", "total_size", 0, "weight_map", map);
    cr_assert_eq(json_dump_file(index,
                                tempdir_file(&dir, "first/model/model.safetensors.index.json"),
                                JSON_INDENT(1)),
                 0);
    json_decref(index);
    json_decref(header);
}

Test(mutations, index_of_several_files)
{
    good_run(SAVING);
    write_index();
    shell(&dir, "cd first/model && mv model.safetensors model-00001-of-00001.safetensors");
    mutate(&(kind){.name = "index",
                   .file = "first/model/model.safetensors.index.json",
                   .arguments = LOADING " --set model.verify=false",
                   .made = "out"});
}

#define CHECKPOINTING                                                                              \
    "train" INPUT TEXT " --num-steps 2 --set output.dir=first --set output.save_model=false "      \
    "--checkpoint-frequency 1"

Test(mutations, manifest)
{
    good_run(CHECKPOINTING);
    mutate(&(kind){.name = "manifest",
                   .file = "first/checkpoint-1/manifest.json",
                   .arguments = "ckpt verify first/checkpoint-1",
                   .sentence = "first/checkpoint-1: bad: "});
}

/* Resumed from a folder that is named, so that it is not set aside. */
Test(mutations, resumed_manifest)
{
    good_run(CHECKPOINTING);
    mutate(&(kind){.name = "resumed manifest",
                   .file = "first/checkpoint-1/manifest.json",
                   .arguments = TRAIN TEXT " --resume-from-checkpoint first/checkpoint-1",
                   .made = "out"});
}

static nd_status read_tokenizer(const char *path)
{
    nd_tokenizer *tokenizer = NULL;
    nd_status status = nd_tokenizer_open(path, &tokenizer);
    nd_tokenizer_close(tokenizer);
    return status;
}

Test(mutations, tokenizer)
{
    write_text("tokenizer.json",
               "{\"version\": \"1.0\", \"truncation\": null, \"padding\": null, \"added_tokens\": "
               "[{\"id\": 4, \"content\": \"<s>\", \"single_word\": false, \"lstrip\": false, "
               "\"rstrip\": false, \"normalized\": false, \"special\": true}], \"normalizer\": "
               "null, \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, "
               "\"trim_offsets\": true, \"use_regex\": true}, \"post_processor\": null, "
               "\"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true, "
               "\"trim_offsets\": true, \"use_regex\": true}, \"model\": {\"type\": \"BPE\", "
               "\"dropout\": null, \"unk_token\": null, \"continuing_subword_prefix\": null, "
               "\"end_of_word_suffix\": null, \"fuse_unk\": false, \"byte_fallback\": false, "
               "\"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2, \"aba\": 3}, \"merges\": [\"a b\", "
               "\"ab a\"]}}");
    mutate(&(kind){.name = "tokenizer.json", .file = "tokenizer.json", .read = read_tokenizer});
}

static nd_status read_key(const char *path)
{
    uint8_t key[ND_KEY_BYTES];
    return nd_key_read_file(path, key);
}

Test(mutations, key)
{
    write_text("job.key", "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff\n");
    cr_assert_eq(chmod(tempdir_file(&dir, "job.key"), 0600), 0);
    mutate(&(kind){.name = "key", .file = "job.key", .read = read_key});
}
