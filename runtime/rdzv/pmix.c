// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/pmix.h"

#include <dlfcn.h>
#include <pmix.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/call_limit.h"
#include "runtime/base/math.h"

/* The functions of libpmix that nd_pmix calls. The macros of pmix.h are not used: some of them call
 * the library. */

#define ND_PMIX_FUNCTIONS(X)                                                                       \
    X(PMIx_Init)                                                                                   \
    X(PMIx_Finalize)                                                                               \
    X(PMIx_Abort)                                                                                  \
    X(PMIx_Put)                                                                                    \
    X(PMIx_Commit)                                                                                 \
    X(PMIx_Fence)                                                                                  \
    X(PMIx_Get)                                                                                    \
    X(PMIx_Error_string)

typedef struct pmix_library {
    void *handle;
#define ND_PMIX_MEMBER(name) __typeof__(&name) name;
    ND_PMIX_FUNCTIONS(ND_PMIX_MEMBER)
#undef ND_PMIX_MEMBER
} pmix_library;

/* ND_ERR_CONFIG with what to install. The library stays open: its threads may run on after
 * PMIx_Finalize. */
static nd_status open_library(pmix_library *out)
{
    /* Its own plugins look for its symbols among the global ones. */
    pmix_library library = {.handle = dlopen("libpmix.so.2", RTLD_NOW | RTLD_GLOBAL)};
    if (!library.handle) {
        const char *why = dlerror();
        return nd_fail(
            ND_ERR_CONFIG,
            "this worker was started by a PMIx launcher (srun --mpi=pmix or mpirun), but "
            "the PMIx library cannot be opened: %s; install it (Debian: libpmix2) on "
            "every node, or start one ndlaunch per node instead",
            why ? why : "libpmix.so.2 is missing");
    }
    void *found;
#define ND_PMIX_FIND(name)                                                                         \
    found = dlsym(library.handle, #name);                                                          \
    if (!found) {                                                                                  \
        return nd_fail(ND_ERR_CONFIG,                                                              \
                       "libpmix.so.2 has no function %s: it is no PMIx library of "                \
                       "version 2 or newer",                                                       \
                       #name);                                                                     \
    }                                                                                              \
    memcpy(&library.name, &found,                                                                  \
           sizeof found); /* a function's address, which C does not convert */
    ND_PMIX_FUNCTIONS(ND_PMIX_FIND)
#undef ND_PMIX_FIND
    *out = library;
    return ND_OK;
}

struct nd_pmix {
    pmix_library library;
    nd_call_limit *limit;  /* every call that asks the server is bounded */
    double server_seconds; /* for what the server of this node does alone */
    pmix_proc_t self;
    int world_size;
};

/*
 * Limits in seconds. A server that respects PMIX_TIMEOUT answers at the deadline and gets MARGIN
 * more. Slurm's server respects only SLURM_PMIX_TIMEOUT, whose default is JOIN.
 */
enum { JOIN = 300, LEAVE = 30, ABORT = 10, MARGIN = 3 };

static double server_seconds(void)
{
    const char *text = getenv("SLURM_PMIX_TIMEOUT");
    char *rest;
    double seconds = text ? strtod(text, &rest) : 0;
    return text && rest != text && !*rest && seconds >= 1 && seconds < 1e6 ? seconds : JOIN;
}

static int begin_call(const nd_pmix *pmix, const char *what, double seconds, int exit_code)
{
    return nd_call_limit_begin(pmix->limit, what, seconds,
                               "the PMIx server of this node does not answer", exit_code);
}

static nd_status failed(const nd_pmix *pmix, pmix_status_t code, const char *what)
{
    if (code == PMIX_ERR_NOMEM) {
        return nd_fail_memory("PMIx (%s)", what);
    }
    nd_status status = code == PMIX_ERR_TIMEOUT           ? ND_ERR_HANG
                       : code == PMIX_ERR_OUT_OF_RESOURCE ? ND_ERR_RESOURCE
                       : code == PMIX_ERR_UNREACH || code == PMIX_ERR_LOST_CONNECTION
                           ? ND_ERR_IO
                           : ND_ERR_INTERNAL;
    return nd_fail(status, "PMIx: %s failed: %s (%d)", what, pmix->library.PMIx_Error_string(code),
                   (int)code);
}

static void copy_key(char *out, const char *key)
{
    snprintf(out, PMIX_MAX_KEYLEN + 1, "%s", key);
}

enum { GET_SECONDS = 60 }; /* a value is there at once or never */

static const char value_name[] = "nd.store"; /* of rank 0 */

/* A value of this job (rank PMIX_RANK_WILDCARD) or of one process. The caller frees it with
 * free_value. */
static pmix_status_t get_value(const nd_pmix *pmix, pmix_rank_t rank, const char *name,
                               pmix_value_t **value)
{
    pmix_proc_t proc = pmix->self;
    char key[PMIX_MAX_KEYLEN + 1];
    proc.rank = rank;
    copy_key(key, name);
    pmix_info_t limit = {.value.type = PMIX_INT, .value.data.integer = GET_SECONDS};
    copy_key(limit.key, PMIX_TIMEOUT);
    int call = begin_call(pmix, "PMIx_Get", GET_SECONDS + MARGIN, ND_ERR_HANG);
    pmix_status_t code = pmix->library.PMIx_Get(&proc, key, &limit, 1, value);
    nd_call_limit_end(pmix->limit, call);
    return code;
}

static void free_value(pmix_value_t *value)
{
    if (value->type == PMIX_BYTE_OBJECT) { /* maybe the job key */
        explicit_bzero(value->data.bo.bytes, value->data.bo.size);
        free(value->data.bo.bytes);
    } else if (value->type == PMIX_STRING) {
        free(value->data.string);
    }
    free(value);
}

/* A number that the server gives; `fallback` where it does not, or an error when that is
 * negative. */
static nd_status get_number(const nd_pmix *pmix, pmix_rank_t rank, const char *key, int fallback,
                            int *out)
{
    pmix_value_t *value = NULL;
    pmix_status_t code = get_value(pmix, rank, key, &value);
    if (code != PMIX_SUCCESS) {
        char what[PMIX_MAX_KEYLEN + 16];
        snprintf(what, sizeof what, "reading %s", key);
        *out = fallback;
        return fallback >= 0 ? ND_OK : failed(pmix, code, what);
    }
    switch (value->type) {
    case PMIX_UINT16:
        *out = value->data.uint16;
        break;
    case PMIX_UINT32:
        *out = (int)value->data.uint32;
        break;
    case PMIX_PROC_RANK:
        *out = (int)value->data.rank;
        break;
    default:
        *out = fallback;
        break;
    }
    free_value(value);
    return *out >= 0 ? ND_OK
                     : nd_fail(ND_ERR_INTERNAL, "PMIx: %s is no number of a known type", key);
}

static nd_status read_identity(nd_pmix *pmix, nd_identity *id)
{
    nd_identity read = *id;
    ND_TRY(get_number(pmix, PMIX_RANK_WILDCARD, PMIX_JOB_SIZE, -1, &read.world_size));
    ND_TRY(get_number(pmix, PMIX_RANK_WILDCARD, PMIX_LOCAL_SIZE, -1, &read.local_world_size));
    ND_TRY(get_number(pmix, pmix->self.rank, PMIX_LOCAL_RANK, -1, &read.local_rank));
    read.rank = (int)pmix->self.rank;
    const int local = read.local_world_size > 0 ? read.local_world_size : 1;
    int nodes = (int)nd_ceil_div(read.world_size, local);
    ND_TRY(get_number(pmix, PMIX_RANK_WILDCARD, PMIX_NUM_NODES, nodes, &read.nnodes));
    ND_TRY(get_number(pmix, pmix->self.rank, PMIX_NODEID, 0, &read.node_rank));
    snprintf(read.run_id, sizeof read.run_id, "%.60s", pmix->self.nspace);
    pmix->world_size = read.world_size;
    *id = read;
    return ND_OK;
}

static nd_status join(nd_pmix *pmix)
{
    int call = begin_call(pmix, "PMIx_Init", pmix->server_seconds, ND_ERR_HANG);
    pmix_status_t code = pmix->library.PMIx_Init(&pmix->self, NULL, 0);
    nd_call_limit_end(pmix->limit, call);
    if (code == PMIX_SUCCESS) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_CONFIG,
                   "PMIx_Init failed: %s (%d); PMIX_RANK is set, so a PMIx launcher was meant; "
                   "check that the server's PMIx (srun --mpi=list) is compatible with this node's "
                   "libpmix",
                   pmix->library.PMIx_Error_string(code), (int)code);
}

nd_status nd_pmix_open(nd_identity *identity, nd_pmix **out)
{
    nd_pmix *pmix;
    ND_TRY(ND_ALLOC(1, &pmix));
    pmix->server_seconds = server_seconds();
    nd_status status = open_library(&pmix->library);
    status = status == ND_OK ? nd_call_limit_create(&pmix->limit) : status;
    status = status == ND_OK ? join(pmix) : status;
    if (status != ND_OK) {
        nd_call_limit_destroy(pmix->limit);
        free(pmix);
        return status;
    }
    status = read_identity(pmix, identity);
    if (status != ND_OK) {
        nd_pmix_close(pmix, (int)status);
        return status;
    }
    *out = pmix;
    return ND_OK;
}

void nd_pmix_close(nd_pmix *pmix, int exit_code)
{
    if (pmix) {
        double seconds = pmix->server_seconds < LEAVE ? pmix->server_seconds : LEAVE;
        int call = begin_call(pmix, "PMIx_Finalize", seconds, exit_code);
        pmix->library.PMIx_Finalize(NULL, 0);
        nd_call_limit_end(pmix->limit, call);
        nd_call_limit_destroy(pmix->limit);
        free(pmix);
    }
}

/* Rank 0: publishes its value, which is there for the others when all have come. */
static nd_status publish_value(nd_pmix *pmix, const void *bytes, size_t count)
{
    char key[PMIX_MAX_KEYLEN + 1];
    pmix_value_t value = {.type = PMIX_BYTE_OBJECT};
    value.data.bo.bytes = (char *)bytes; /* borrowed: Put copies */
    value.data.bo.size = count;
    copy_key(key, value_name);
    int call = begin_call(pmix, "PMIx_Commit", pmix->server_seconds, ND_ERR_HANG);
    pmix_status_t code = pmix->library.PMIx_Put(PMIX_GLOBAL, key, &value);
    if (code == PMIX_SUCCESS) {
        code = pmix->library.PMIx_Commit();
    }
    nd_call_limit_end(pmix->limit, call);
    return code == PMIX_SUCCESS ? ND_OK : failed(pmix, code, "publishing a value");
}

/* Waits for all ranks; what they have published is here afterwards. */
static nd_status fence(nd_pmix *pmix, const char *name, double timeout_seconds, int exit_code)
{
    char what[128];
    pmix_info_t info[2] = {{.value.type = PMIX_BOOL}, {.value.type = PMIX_INT}};
    copy_key(info[0].key, PMIX_COLLECT_DATA);
    info[0].value.data.flag = true;
    copy_key(info[1].key, PMIX_TIMEOUT);
    info[1].value.data.integer = (int)(timeout_seconds < 1 ? 1 : timeout_seconds);
    snprintf(what, sizeof what, "PMIx_Fence at '%s'", name);
    int call = nd_call_limit_begin(pmix->limit, what, timeout_seconds + MARGIN,
                                   "other ranks are missing there, or the PMIx server of this node "
                                   "does not answer",
                                   exit_code);
    pmix_status_t code = pmix->library.PMIx_Fence(NULL, 0, info, 2);
    nd_call_limit_end(pmix->limit, call);
    if (code == PMIX_ERR_TIMEOUT) {
        return nd_fail(ND_ERR_HANG,
                       "PMIx: not all %d ranks reached '%s' within %.3g s "
                       "(launch.rdzv_timeout_seconds, SLURM_PMIX_TIMEOUT)",
                       pmix->world_size, name, timeout_seconds);
    }
    return code == PMIX_SUCCESS ? ND_OK : failed(pmix, code, "meeting all ranks (PMIx_Fence)");
}

static nd_status read_published(nd_pmix *pmix, void *out, size_t bytes)
{
    pmix_value_t *value = NULL;
    pmix_status_t code = get_value(pmix, 0, value_name, &value);
    if (code != PMIX_SUCCESS) {
        return failed(pmix, code, "reading the value of rank 0");
    }
    nd_status status = ND_OK;
    if (value->type == PMIX_BYTE_OBJECT && value->data.bo.size == bytes) {
        memcpy(out, value->data.bo.bytes, bytes);
    } else {
        status = nd_fail(ND_ERR_INTERNAL,
                         "PMIx: rank 0 published another value than %zu bytes; are all ranks of "
                         "the same version?",
                         bytes);
    }
    free_value(value);
    return status;
}

void nd_pmix_end(nd_pmix *pmix, double timeout_seconds, int exit_code)
{
    if (fence(pmix, "end", timeout_seconds, exit_code) != ND_OK) {
        nd_error_clear();
    }
}

void nd_pmix_abort(nd_pmix *pmix, int code, const char *message)
{
    char text[256];
    snprintf(text, sizeof text, "%.250s", message);
    int call = begin_call(pmix, "PMIx_Abort", ABORT, code);
    pmix->library.PMIx_Abort(code, text, NULL, 0);
    nd_call_limit_end(pmix->limit, call);
}

nd_status nd_pmix_share(nd_pmix *pmix, const char *name, bool gives, void *bytes, size_t count,
                        double timeout_seconds)
{
    ND_TRY(gives ? publish_value(pmix, bytes, count) : ND_OK);
    ND_TRY(fence(pmix, name, timeout_seconds, ND_ERR_HANG));
    return gives ? ND_OK : read_published(pmix, bytes, count);
}
