// SPDX-License-Identifier: Apache-2.0
/*
 * libnd_activity.so records when each kernel, copy and fill of a process ran on the GPU, and on
 * which stream. The CUDA driver loads it into every process that starts CUDA, whatever program that
 * is (ndtrain, a Python with torch):
 *
 *     CUDA_INJECTION64_PATH=/path/libnd_activity.so ND_ACTIVITY_FILE=/path/records.txt PROGRAM
 *
 * The first process that has something to record creates ND_ACTIVITY_FILE; where the file exists,
 * a process writes to ND_ACTIVITY_FILE.PID. scripts/gpu/activity.py reads such files.
 *
 * The file is text, one record a line, in the order in which CUPTI delivers them; times are
 * nanoseconds of the clock of CUPTI:
 *
 *     nd_activity 1 VERSION_OF_CUPTI PID
 *     n NUMBER NAME                      the (mangled) name of a kernel, before its first record
 *     k BEGIN END DEVICE STREAM NUMBER GRID(x y z) BLOCK(x y z) REGISTERS SHARED_BYTES
 *     c BEGIN END DEVICE STREAM KIND BYTES   a copy; KIND is CUpti_ActivityMemcpyKind
 *     s BEGIN END DEVICE STREAM VALUE BYTES  a fill
 *     d COUNT                            so many records were lost
 *
 * Each buffer of CUPTI is written as soon as it is full, so a process that is killed leaves all but
 * its last few hundred records. A process without a GPU, or one in which CUPTI does not start, says
 * so in one line on stderr and runs on without a record.
 */
#include <cupti.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A buffer holds some 300 records, which a KILL can lose; CUPTI looks for full ones so often. */
enum { BUFFER_BYTES = 64 << 10, FLUSH_MS = 500, NAMES = 1 << 13 };

#define EACH_FUNCTION(X)                                                                           \
    X(cuptiGetVersion)                                                                             \
    X(cuptiActivityRegisterCallbacks)                                                              \
    X(cuptiActivityEnable)                                                                         \
    X(cuptiActivityFlushPeriod)                                                                    \
    X(cuptiActivityFlushAll)                                                                       \
    X(cuptiActivityGetNextRecord)                                                                  \
    X(cuptiActivityGetNumDroppedRecords)

#define DECLARE(name) static __typeof__(name) *p_##name;
EACH_FUNCTION(DECLARE)
#undef DECLARE

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all below */
static FILE *out;
static bool failed;
static char *names[NAMES]; /* open addressing; what finds no place is written again each time */
static int numbers[NAMES];
static int name_count;

static void say(const char *what, const char *why)
{
    fprintf(stderr, "nd_activity: %s%s%s\n", what, *why ? ": " : "", why);
}

/* Opens the file at the first record, so that a process that runs nothing leaves none. */
static bool file_is_open(void)
{
    if (!out && !failed) {
        char own[4096];
        uint32_t version = 0;
        const char *path = getenv("ND_ACTIVITY_FILE");
        snprintf(own, sizeof own, "%s.%d", path, (int)getpid());
        out = fopen(path, "wxe");
        out = out ? out : fopen(own, "wxe");
        failed = !out;
        if (failed) {
            say(path, "the file cannot be made; nothing is recorded");
        } else {
            p_cuptiGetVersion(&version);
            fprintf(out, "nd_activity 1 %u %d\n", version, (int)getpid());
        }
    }
    return out != NULL;
}

static int number_of(const char *name)
{
    uint32_t hash = 2166136261u;
    name = name ? name : "?";
    for (const char *c = name; *c; c++) {
        hash = (hash ^ (unsigned char)*c) * 16777619u;
    }
    int at = (int)(hash % NAMES);
    for (int tries = 0; tries < NAMES && names[at]; tries++, at = (at + 1) % NAMES) {
        if (strcmp(names[at], name) == 0) {
            return numbers[at];
        }
    }
    fprintf(out, "n %d %s\n", ++name_count, name);
    if (!names[at]) {
        names[at] = strdup(name);
        numbers[at] = name_count;
    }
    return name_count;
}

/* Later versions of CUPTI only add fields at the end of its records. */
static void write_record(const CUpti_Activity *record)
{
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
        const CUpti_ActivityKernel9 *k = (const void *)record;
        int number = number_of(k->name);
        fprintf(out, "k %llu %llu %u %u %d %d %d %d %d %d %d %u %d\n", (unsigned long long)k->start,
                (unsigned long long)k->end, k->deviceId, k->streamId, number, k->gridX, k->gridY,
                k->gridZ, k->blockX, k->blockY, k->blockZ, (unsigned)k->registersPerThread,
                k->staticSharedMemory + k->dynamicSharedMemory);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
        const CUpti_ActivityMemcpy5 *c = (const void *)record;
        fprintf(out, "c %llu %llu %u %u %u %llu\n", (unsigned long long)c->start,
                (unsigned long long)c->end, c->deviceId, c->streamId, (unsigned)c->copyKind,
                (unsigned long long)c->bytes);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
        const CUpti_ActivityMemset4 *s = (const void *)record;
        fprintf(out, "s %llu %llu %u %u %u %llu\n", (unsigned long long)s->start,
                (unsigned long long)s->end, s->deviceId, s->streamId, s->value,
                (unsigned long long)s->bytes);
    }
}

static void CUPTIAPI on_request(uint8_t **buffer, size_t *bytes, size_t *most_records)
{
    *buffer = aligned_alloc(8, BUFFER_BYTES);
    *bytes = *buffer ? BUFFER_BYTES : 0;
    *most_records = 0; /* any number */
}

static void CUPTIAPI on_complete(CUcontext context, uint32_t stream, uint8_t *buffer, size_t bytes,
                                 size_t valid)
{
    CUpti_Activity *record = NULL;
    size_t dropped = 0;
    pthread_mutex_lock(&lock);
    while (p_cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (file_is_open()) {
            write_record(record);
        }
    }
    if (p_cuptiActivityGetNumDroppedRecords(context, stream, &dropped) == CUPTI_SUCCESS &&
        dropped > 0 && file_is_open()) {
        fprintf(out, "d %zu\n", dropped);
    }
    if (out && fflush(out) != 0 && !failed) {
        failed = true;
        say("the file cannot be written", "records are missing");
    }
    pthread_mutex_unlock(&lock);
    free(buffer);
}

static void at_exit(void)
{
    p_cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
}

/* By its name where the loader searches, then that of the toolkit which built this library. */
static void *open_cupti(void)
{
    void *library = dlopen(ND_CUPTI_SONAME, RTLD_NOW | RTLD_LOCAL);
    return library ? library : dlopen(ND_CUPTI_FOLDER "/" ND_CUPTI_SONAME, RTLD_NOW | RTLD_LOCAL);
}

static bool load(void)
{
    void *library = open_cupti();
    if (!library) {
        say("nothing is recorded, since CUPTI cannot be opened; add the folder of " ND_CUPTI_SONAME
            " (package nvidia-cuda-cupti) to LD_LIBRARY_PATH",
            dlerror());
        return false;
    }
#define FIND(name)                                                                                 \
    *(void **)&p_##name = dlsym(library, #name);                                                   \
    if (!p_##name) {                                                                               \
        say("nothing is recorded, since " ND_CUPTI_SONAME " lacks", #name);                        \
        return false;                                                                              \
    }
    EACH_FUNCTION(FIND)
#undef FIND
    return true;
}

static bool ask(CUptiResult result, const char *call)
{
    if (result != CUPTI_SUCCESS) {
        char why[64];
        snprintf(why, sizeof why, "%s answers %d", call, (int)result);
        say("nothing is recorded, since CUPTI does not start", why);
    }
    return result == CUPTI_SUCCESS;
}

static bool start(void)
{
    static const CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                               CUPTI_ACTIVITY_KIND_MEMCPY,
                                               CUPTI_ACTIVITY_KIND_MEMSET};
    if (!ask(p_cuptiActivityRegisterCallbacks(on_request, on_complete),
             "cuptiActivityRegisterCallbacks")) {
        return false;
    }
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (!ask(p_cuptiActivityEnable(kinds[i]), "cuptiActivityEnable")) {
            return false;
        }
    }
    p_cuptiActivityFlushPeriod(FLUSH_MS); /* where it fails, buffers come when CUPTI likes */
    return true;
}

/* The driver calls this, once. 0 would be an error of the program's first CUDA call. */
int InitializeInjection(void);
__attribute__((visibility("default"))) int InitializeInjection(void)
{
    const char *path = getenv("ND_ACTIVITY_FILE");
    if (!path || !*path) {
        say("nothing is recorded; set ND_ACTIVITY_FILE to the file that shall hold the records",
            "");
    } else if (load() && start()) {
        atexit(at_exit);
    }
    return 1;
}
