// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_LAUNCH_LAUNCHED_H
#define ND_TESTS_LAUNCH_LAUNCHED_H
/*
 * A program under test as a child process, its output in files of the test's folder. Every wait has
 * a deadline, after which the program is killed and the test fails.
 */
#include <sys/types.h>

#include "tests/support/printed.h"
#include "tests/support/tempdir.h"

/* For what comes in a second where nothing else runs; nobody waits longer than it takes. */
enum { LAUNCHED_SECONDS = 120 };

typedef struct launched {
    pid_t pid;    /* 0 after its end was seen */
    double begin; /* when it was started, by nd_clock_seconds */
    char output[160];
    /* Standard output and error so far, after launched_read: of more than this the beginning and
     * the end. */
    char text[1 << 16];
} launched;

/* The folder of the test program's build: ndlaunch, ndtrain and the test worker lie in it or
 * below. */
const char *launched_build_root(void);
/* A shell command; its exit code, or 128 + signal. */
int launched_shell(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The path of a program, or another file, in that folder; a text of printed. */
const char *launched_program(const char *name);
/* Sets ND_WORKER to the test worker, and what it does (ND_TEST), which rank does it (ND_TEST_RANK):
 * NULL leaves these as they are. */
void launched_use_test_worker(const char *what, const char *rank);
/* The test worker follows this plan (worker.c), in which `rank` does what one rank does. */
void launched_use_plan(const char *plan, const char *rank);

/* Starts argv[0] (up to NULL) with standard output and error in dir/<name>. */
void launched_start(launched *l, const tempdir *dir, const char *name, const char *const *argv);
/* Exit code, or 128 + signal. */
int launched_wait(launched *l, double seconds);
/* Waits for the end, which has this code, and reads the output. */
void launched_expect(launched *l, int code);
void launched_expect_all(launched *all, int count, int code);
/* Sends a signal and waits for the end, which has this code. */
void launched_end(launched *l, int number, int code);
void launched_end_all(launched *all, int count, int number, int code);
/* The output so far has all of `facts`, texts ended by NULL. */
void launched_says(launched *l, const char *const *facts);
/* launched_expect and launched_says. */
void launched_expect_facts(launched *l, int code, const char *const *facts);
/* launched_expect for a program that is attacked or hindered: it ends within PATIENCE_SECONDS of
 * its start (tests/support/patience.h). */
void launched_ends(launched *l, int code);
const char *launched_read(launched *l);
/* How often the output holds the words. */
int launched_count(launched *l, const char *words);
/* Waits until the output holds the words `count` times. */
void launched_until(launched *l, const char *words, int count);
/* The pid in the line "ready <rank> pid <pid>" of the test worker. */
pid_t launched_worker(launched *l, int rank);
/* Returns true when the environment of the process has the entry, such as "RANK=1". */
bool launched_has_entry(int pid, const char *entry);
/* The pid of the worker with this rank, any program, among the children of ndlaunch, for which it
 * waits. The check before the start has rank 0 too. */
pid_t launched_child(launched *l, int rank);
/* True when the process has gone (a zombie counts as gone), false if it stays for 30 s. */
bool launched_gone(pid_t pid);
/* All of these, ranks from 0 on, have gone; kills what stays. */
void launched_expect_gone(const pid_t *pids, int count);

/* These texts, with NULL behind them. */
#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

#define assert_says(l, ...)       launched_says(l, WORDS(__VA_ARGS__))
#define assert_ends(l, code, ...) launched_expect_facts(l, code, WORDS(__VA_ARGS__))

#endif
