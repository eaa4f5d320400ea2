// SPDX-License-Identifier: Apache-2.0
/*
 * Stands in for libpmix and its server, without either: ranks meet in a folder. For what a real
 * server hardly ever does, and where there is none.
 *
 *   FAKE_PMIX_FOLDER  the folder of the job; all of its hosts see it
 *   FAKE_PMIX_SIZE    ranks of the job, of which FAKE_PMIX_LOCAL_SIZE are on this host
 *   FAKE_PMIX_KILL    if set, PMIx_Abort kills all ranks, as a server does
 *   FAKE_PMIX_HANG    the function that never returns
 *   FAKE_PMIX_GET     if set, the number of the error of PMIx_Get
 *   FAKE_PMIX_TYPE    if set, the type (a number) of all numbers, else as true servers give them
 *
 * PMIx_Fence keeps to PMIX_TIMEOUT. PMIx_Abort leaves the file "aborted" with the code.
 */
#include <pmix.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int rank, fences;

static int number(const char *name)
{
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

static void maybe_hang(const char *function)
{
    const char *hanging = getenv("FAKE_PMIX_HANG");
    if (hanging && strcmp(hanging, function) == 0) {
        for (;;) {
            pause();
        }
    }
}

static void path_of(char *out, size_t capacity, const char *name, int of_rank)
{
    snprintf(out, capacity, "%s/%s.%d", getenv("FAKE_PMIX_FOLDER"), name, of_rank);
}

/* Whole, or not there. */
static pmix_status_t write_file(const char *name, const void *bytes, size_t count)
{
    char path[4096], fresh[4100];
    path_of(path, sizeof path, name, rank);
    snprintf(fresh, sizeof fresh, "%s.new", path);
    FILE *f = fopen(fresh, "w");
    if (!f) {
        return PMIX_ERROR;
    }
    size_t wrote = fwrite(bytes, 1, count, f);
    return fclose(f) == 0 && wrote == count && rename(fresh, path) == 0 ? PMIX_SUCCESS : PMIX_ERROR;
}

pmix_status_t PMIx_Init(pmix_proc_t *proc, pmix_info_t info[], size_t ninfo)
{
    rank = number("PMIX_RANK");
    maybe_hang("PMIx_Init");
    memset(proc, 0, sizeof *proc);
    snprintf(proc->nspace, sizeof proc->nspace, "%s", getenv("PMIX_NAMESPACE"));
    proc->rank = (pmix_rank_t)rank;
    char pid[16];
    snprintf(pid, sizeof pid, "%ld", (long)getpid());
    pmix_status_t written = write_file("pid", pid, strlen(pid));
    for (int r = 0; r < number("FAKE_PMIX_SIZE") && getenv("FAKE_PMIX_KILL"); r++) {
        char path[4096];
        path_of(path, sizeof path, "aborted", r);
        if (access(path, F_OK) == 0) {
            raise(SIGKILL);
        }
    }
    return written;
}

/* The caller last. A rank that has not come yet is not killed. */
static void kill_all(void)
{
    for (int r = 0; r < number("FAKE_PMIX_SIZE"); r++) {
        char path[4096], text[16] = "";
        path_of(path, sizeof path, "pid", r);
        FILE *f = r != rank ? fopen(path, "r") : NULL;
        if (f) {
            if (fgets(text, sizeof text, f) && atoi(text) > 1) {
                kill(atoi(text), SIGKILL);
            }
            fclose(f);
        }
    }
    raise(SIGKILL);
}

pmix_status_t PMIx_Finalize(const pmix_info_t info[], size_t ninfo)
{
    maybe_hang("PMIx_Finalize");
    return PMIX_SUCCESS;
}

pmix_status_t PMIx_Abort(int status, const char message[], pmix_proc_t procs[], size_t nprocs)
{
    char text[16];
    maybe_hang("PMIx_Abort");
    snprintf(text, sizeof text, "%d", status);
    pmix_status_t written = write_file("aborted", text, strlen(text));
    if (getenv("FAKE_PMIX_KILL")) {
        kill_all();
    }
    return written;
}

pmix_status_t PMIx_Put(pmix_scope_t scope, const char key[], pmix_value_t *value)
{
    return value->type == PMIX_BYTE_OBJECT
               ? write_file(key, value->data.bo.bytes, value->data.bo.size)
               : PMIX_ERROR;
}

pmix_status_t PMIx_Commit(void)
{
    maybe_hang("PMIx_Commit");
    return PMIX_SUCCESS;
}

pmix_status_t PMIx_Fence(const pmix_proc_t procs[], size_t nprocs, const pmix_info_t info[],
                         size_t ninfo)
{
    enum { POLL_US = 2000 };
    char name[32], path[4096];
    long polls = 0, most = 0;
    maybe_hang("PMIx_Fence");
    for (size_t i = 0; i < ninfo; i++) {
        most = strcmp(info[i].key, PMIX_TIMEOUT) == 0
                   ? info[i].value.data.integer * (1000000L / POLL_US)
                   : most;
    }
    snprintf(name, sizeof name, "fence%d", fences++);
    write_file(name, "", 0);
    for (int other = 0; other < number("FAKE_PMIX_SIZE"); other++) {
        path_of(path, sizeof path, name, other);
        while (access(path, F_OK) != 0) {
            if (++polls > most) {
                return PMIX_ERR_TIMEOUT;
            }
            usleep(POLL_US);
        }
    }
    return PMIX_SUCCESS;
}

static int job_number(const char *key)
{
    if (strcmp(key, PMIX_JOB_SIZE) == 0) {
        return number("FAKE_PMIX_SIZE");
    }
    if (strcmp(key, PMIX_LOCAL_SIZE) == 0) {
        return number("FAKE_PMIX_LOCAL_SIZE");
    }
    return strcmp(key, PMIX_LOCAL_RANK) == 0 ? rank % number("FAKE_PMIX_LOCAL_SIZE") : -1;
}

pmix_status_t PMIx_Get(const pmix_proc_t *proc, const char key[], const pmix_info_t info[],
                       size_t ninfo, pmix_value_t **out)
{
    char path[4096];
    int known = job_number(key);
    pmix_value_t *value = calloc(1, sizeof *value);
    maybe_hang("PMIx_Get");
    if (getenv("FAKE_PMIX_GET")) {
        free(value);
        return number("FAKE_PMIX_GET");
    }
    if (known >= 0) {
        value->type = PMIX_UINT32;
        value->data.uint32 = (uint32_t)known;
        if (getenv("FAKE_PMIX_TYPE")) {
            value->type = (pmix_data_type_t)number("FAKE_PMIX_TYPE");
        } else if (strcmp(key, PMIX_LOCAL_RANK) == 0) {
            value->type = PMIX_UINT16;
            value->data.uint32 |= 1 << 16; /* which is no part of the number */
        }
        *out = value;
        return PMIX_SUCCESS;
    }
    path_of(path, sizeof path, key, (int)proc->rank);
    FILE *f = fopen(path, "r");
    if (!f) {
        free(value);
        return PMIX_ERR_NOT_FOUND;
    }
    enum { MOST = 1 << 16 };
    value->type = PMIX_BYTE_OBJECT;
    value->data.bo.bytes = malloc(MOST);
    value->data.bo.size = fread(value->data.bo.bytes, 1, MOST, f);
    fclose(f);
    *out = value;
    return PMIX_SUCCESS;
}

const char *PMIx_Error_string(pmix_status_t status)
{
    return "an error of the test's PMIx";
}
