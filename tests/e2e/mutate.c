// SPDX-License-Identifier: Apache-2.0
#include "tests/e2e/mutate.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>

#include "runtime/base/clock.h"
#include "tests/support/inputs.h"
#include "tests/support/patience.h"
#include "tests/support/sentences.h"
#include "tests/support/shell.h"

int nd_train_main(int argc, char **argv); /* main of trainer/main.c under another name */

enum { CASES = 50, WORDS_MAX = 64 };

/* Each case calls ndtrain with these arguments. */
typedef struct mutated {
    const char *file, *arguments;
    const char *sentence; /* with which the line about a bad file begins */
} mutated;

static tempdir dir;
static mutate_file good, changed;

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

static void replace(mutate_file *c, size_t at, size_t old, const char *with, size_t count)
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
static void change_number(mutate_file *c, source *s)
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
static void change(mutate_file *c, source *s)
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

/* The exit code, or 128 + the signal that ended it, which is SIGKILL when it takes too long; what
 * it printed is in shell_output. */
static int run_case(const mutated *k)
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
        int none = open("/dev/null", O_RDONLY | O_CLOEXEC);
        dup2(none, STDIN_FILENO);
        dup2(fd, STDOUT_FILENO);
        dup2(fd, STDERR_FILENO);
        int code = chdir(dir.path) != 0 ? 99 : run_arguments(k->arguments);
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

static void judge(const char *name, int number, int code, const char *sentence)
{
    cr_assert(is_documented(code), "%s, case %d ends with %d:\n%s", name, number, code,
              shell_output);
    cr_assert_eq(lines_that_begin(shell_output, sentence), code != 0,
                 "%s, case %d ends with %d and not one sentence:\n%s", name, number, code,
                 shell_output);
    cr_assert(!has_control_characters(shell_output), "%s, case %d:\n%s", name, number,
              shell_output);
}

void mutate_write(const char *name, const char *text)
{
    tempdir_write(&dir, name, text, strlen(text));
}

void mutate_read(const char *name, mutate_file *c)
{
    FILE *in = fopen(tempdir_file(&dir, name), "rbe");
    cr_assert_not_null(in, "%s", name);
    c->size = fread(c->bytes, 1, sizeof c->bytes, in);
    cr_assert(c->size > 0 && c->size < sizeof c->bytes, "%s: %zu bytes", name, c->size);
    fclose(in);
}

static void judge_all(const mutated *k)
{
    source s = {.state = 20260000};
    const char *number = getenv("ND_MUTATIONS"), *name = criterion_current_test->name;
    int taken = 0, cases = number ? atoi(number) : CASES;
    cr_assert_gt(cases, 0, "ND_MUTATIONS is %s", number);
    mutate_read(k->file, &good);
    for (const char *c = name; *c; c++) {
        s.state = s.state * 31 + (unsigned char)*c;
    }
    for (int i = -1; i < cases; i++) { /* the first case is the good file */
        changed = good;
        for (size_t n = i < 0 ? 0 : below(&s, 3) + 1; n > 0; n--) {
            change(&changed, &s);
        }
        tempdir_write(&dir, k->file, changed.bytes, changed.size);
        tempdir_remove_tree(tempdir_file(&dir, "out"));
        int code = run_case(k);
        cr_assert(i >= 0 || code == 0, "%s, the good file ends with %d:\n%s", name, code,
                  shell_output);
        judge(name, i, code, k->sentence);
        taken += code == 0;
    }
    fprintf(stderr, "%s: %d of %d files were taken\n", name, taken, cases + 1);
}

void mutate(const char *file, const char *arguments)
{
    mutate_saying(file, arguments, "error: ");
}

void mutate_saying(const char *file, const char *arguments, const char *sentence)
{
    judge_all(&(mutated){.file = file, .arguments = arguments, .sentence = sentence});
}

/* Good inputs. */

void mutate_run(const char *arguments)
{
    int code = run_case(&(mutated){.arguments = arguments});
    cr_assert_eq(code, 0, "%s: %d:\n%s", arguments, code, shell_output);
}

int mutate_judge(const char *name, const char *arguments)
{
    tempdir_remove_tree(tempdir_file(&dir, "out"));
    int code = run_case(&(mutated){.arguments = arguments});
    judge(name, 0, code, "error: ");
    return code;
}

void mutate_setup(void)
{
    setenv("GOMP_SPINCOUNT", "2000", 1); /* else the trainer executes itself again */
    tempdir_make(&dir);
    inputs_write_text(&dir, 2000);
    inputs_write_model(&dir, 16, 32, 1);
}

void mutate_teardown(void)
{
    tempdir_remove(&dir);
}

tempdir *mutate_dir(void)
{
    return &dir;
}
