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
#include "runtime/base/status.h"
#include "tests/support/tempdir.h"

enum { MUTATE_FILE_MAX = 1 << 18 };

/* A file in memory. */
typedef struct mutate_file {
    char bytes[MUTATE_FILE_MAX];
    size_t size;
} mutate_file;

/* A kind of file, and what each case calls: arguments of ndtrain, or a function that reads it. */
typedef struct mutated {
    const char *name, *file; /* the file that is changed */
    const char *arguments;   /* of ndtrain, with single blanks; NULL: */
    nd_status (*read)(const char *path);
    const char *sentence; /* with which the line about a bad file begins; NULL: "error: " */
    const char *made;     /* what a case makes, a file or a folder, or NULL */
} mutated;

/* The test's folder, with text.txt and model.json. */
void mutate_setup(void);
void mutate_teardown(void);
tempdir *mutate_dir(void);

/* Runs ndtrain, which ends with 0. */
void mutate_run(const char *arguments);
/* Reads a file of the folder, which fits. */
void mutate_read(const char *name, mutate_file *out);
/* Runs ndtrain, judges how it ends and returns its exit code; `name` says what the case is. */
int mutate_judge(const char *name, const char *arguments);
/* Judges the good file, which must be taken, and then the changed ones. */
void mutate(const mutated *kind);

#define MUTATE_INPUT                                                                               \
    " --sequence-length 32 --device cpu --precision fp32 --set launch.threads_per_worker=1 "       \
    "--set data.validation_path= --set model.config=model.json --log-level warning"
#define MUTATE_TRAIN                                                                               \
    "train" MUTATE_INPUT " --num-steps 1 --set output.dir=out --set output.save_model=false"
#define MUTATE_TEXT " --set data.path=text.txt"

#endif
