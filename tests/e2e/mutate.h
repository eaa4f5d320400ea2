// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_E2E_MUTATE_H
#define ND_TESTS_E2E_MUTATE_H
/*
 * Damaged input: a file that the trainer reads is changed at random and read again. Whatever the
 * damage, the program soon ends with a documented code and one sentence, or takes the file. A case
 * is a fork of this process that calls the trainer's main, so that a thousand take seconds. All is
 * drawn from a fixed seed, so that a case that fails comes again. ND_MUTATIONS is the number of
 * cases of each kind of file.
 */
#include "tests/support/tempdir.h"

enum { MUTATE_FILE_MAX = 1 << 18 };

/* A file in memory. */
typedef struct mutate_file {
    char bytes[MUTATE_FILE_MAX];
    size_t size;
} mutate_file;

/* The test's folder, with text.txt and model.json. */
void mutate_setup(void);
void mutate_teardown(void);
tempdir *mutate_dir(void);

/* Writes a text into a file of the folder. */
void mutate_write(const char *name, const char *text);
/* Reads a file of the folder, which fits. */
void mutate_read(const char *name, mutate_file *out);
/* Runs ndtrain, which ends with 0. */
void mutate_run(const char *arguments);
/* Runs ndtrain, judges how it ends and returns its exit code; `name` says what the case is. */
int mutate_judge(const char *name, const char *arguments);
/* Judges the good file, which must be taken, and then the changed ones, by ndtrain with these
 * arguments (with single blanks). They make only `out`, which goes before each case, and files that
 * they replace. */
void mutate(const char *file, const char *arguments);
/* The line about a bad file begins with this, and not with "error: ". */
void mutate_saying(const char *file, const char *arguments, const char *sentence);

#define MUTATE_INPUT                                                                               \
    " --sequence-length 32 --device cpu --precision fp32 --set launch.threads_per_worker=1 "       \
    "--set data.validation_path= --set model.config=model.json --log-level warning"
#define MUTATE_TRAIN                                                                               \
    "train" MUTATE_INPUT " --num-steps 1 --set output.dir=out --set output.save_model=false"
#define MUTATE_TEXT " --set data.path=text.txt"

#endif
