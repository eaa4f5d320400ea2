// SPDX-License-Identifier: Apache-2.0
/* `ndlaunch env`: what a report of a problem should say of this host. */
#include <ctype.h>
#include <gnu/libc-version.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "launcher/launcher.h"
#include "runtime/base/fs.h"
#include "runtime/base/printable.h"

enum { LINE_BYTES = 4096, NAME_WIDTH = 18 };

/* One line: a name, and a text whose control characters are written as escapes. */
static void put(FILE *out, const char *name, const char *text)
{
    char shown[LINE_BYTES];
    nd_escape(shown, sizeof shown, text, "");
    fprintf(out, "  %-*s %s\n", NAME_WIDTH, name, shown);
}

/* The text behind `key` and a separator in the first such line of a file; "" without one. */
static void line_of_file(const char *path, const char *key, char text[LINE_BYTES])
{
    char line[LINE_BYTES];
    FILE *in = nd_fs_stream_kernel(path);
    text[0] = '\0';
    while (in && !text[0] && fgets(line, sizeof line, in)) {
        size_t length = strlen(key);
        if (strncmp(line, key, length) == 0) {
            const char *value = line + length + strspn(line + length, " \t:=\"");
            snprintf(text, LINE_BYTES, "%.*s", (int)strcspn(value, "\"\n"), value);
        }
    }
    if (in) {
        fclose(in);
    }
}

static void put_file_line(FILE *out, const char *name, const char *path, const char *key)
{
    char text[LINE_BYTES];
    line_of_file(path, key, text);
    put(out, name, text[0] ? text : "unknown");
}

static void put_system(FILE *out)
{
    struct utsname u;
    char text[LINE_BYTES] = "unknown";
    if (uname(&u) == 0) {
        snprintf(text, sizeof text, "%s %s %s", u.sysname, u.release, u.machine);
    }
    put_file_line(out, "system", "/etc/os-release", "PRETTY_NAME");
    put(out, "kernel", text);
    put(out, "C library", gnu_get_libc_version());
}

/* Those of the CPU's flags that decide which kernels run, and which of them it lacks. */
static void put_cpu(FILE *out)
{
    static const char *const wanted[] = {"avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16"};
    enum { FOUND, MISSING };
    char flags[LINE_BYTES], padded[LINE_BYTES + 2], list[2][128] = {"", ""}, text[300], count[96];
    cpu_set_t allowed;
    size_t used[2] = {0, 0};
    line_of_file("/proc/cpuinfo", "flags", flags);
    snprintf(padded, sizeof padded, " %s ", flags);
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        char word[32];
        snprintf(word, sizeof word, " %s ", wanted[i]);
        const int of = strstr(padded, word) ? FOUND : MISSING;
        used[of] += (size_t)snprintf(list[of] + used[of], sizeof list[of] - used[of], "%s%s",
                                     used[of] > 0 ? " " : "", wanted[i]);
    }
    snprintf(text, sizeof text, "%s%s%s", list[FOUND], used[MISSING] > 0 ? "; not there: " : "",
             list[MISSING]);
    put_file_line(out, "CPU", "/proc/cpuinfo", "model name");
    put(out, "instruction sets", text);
    int usable = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : -1;
    snprintf(count, sizeof count, "%ld, of which this process may use %d",
             sysconf(_SC_NPROCESSORS_ONLN), usable);
    put(out, "CPUs", count);
}

static void put_memory(FILE *out)
{
    char text[64] = "unknown";
    struct statvfs shm;
    put_file_line(out, "memory", "/proc/meminfo", "MemTotal");
    put_file_line(out, "available", "/proc/meminfo", "MemAvailable");
    if (statvfs("/dev/shm", &shm) == 0) {
        snprintf(text, sizeof text, "%llu MiB, free %llu MiB",
                 (unsigned long long)(shm.f_blocks * shm.f_frsize >> 20),
                 (unsigned long long)(shm.f_bavail * shm.f_frsize >> 20));
    }
    put(out, "/dev/shm", text);
}

static void put_limit(FILE *out, const char *name, int which)
{
    struct rlimit limit;
    char text[64] = "unknown";
    if (getrlimit(which, &limit) == 0 && limit.rlim_cur == RLIM_INFINITY) {
        snprintf(text, sizeof text, "unlimited");
    } else if (getrlimit(which, &limit) == 0) {
        snprintf(text, sizeof text, "%llu", (unsigned long long)limit.rlim_cur);
    }
    put(out, name, text);
}

int nd_host_gpus(void)
{
    int count = 0;
    nd_fs_names names;
    if (nd_fs_list("/dev", &names) != ND_OK) {
        return 0;
    }
    for (int i = 0; i < names.count; i++) {
        const char *name = names.list[i];
        count += strncmp(name, "nvidia", 6) == 0 && isdigit((unsigned char)name[6]);
    }
    nd_fs_names_fini(&names);
    return count;
}

/* One line for each GPU, by the numbers of their devices:
 * "GPU 0  NVIDIA H100 80GB HBM3, bus 0000:04:00.0". */
void nd_host_put_gpu_models(FILE *out, const char *driver)
{
    char folder[LINE_BYTES], path[LINE_BYTES + 300];
    nd_fs_names names = {0};
    int put_count = 0;
    snprintf(folder, sizeof folder, "%s/gpus", driver);
    (void)nd_fs_list(folder, &names); /* by bus, the driver's order too */
    for (int i = 0; i < names.count; i++) {
        char model[LINE_BYTES], minor[LINE_BYTES], name[32], text[LINE_BYTES + 300];
        snprintf(path, sizeof path, "%s/%s/information", folder, names.list[i]);
        line_of_file(path, "Model", model);
        line_of_file(path, "Device Minor", minor);
        snprintf(name, sizeof name, "GPU %.8s", minor[0] ? minor : "?");
        snprintf(text, sizeof text, "%s, bus %s", model[0] ? model : "unknown", names.list[i]);
        put(out, name, text);
        put_count++;
    }
    nd_fs_names_fini(&names);
    if (put_count == 0) {
        put(out, "GPU models", "none: the NVIDIA driver shows no GPU on this host");
    }
}

static void put_gpus(FILE *out)
{
    static const char driver[] = "/proc/driver/nvidia";
    char version[LINE_BYTES], text[64];
    line_of_file("/proc/driver/nvidia/version", "NVRM version", version);
    snprintf(text, sizeof text, "%d", nd_host_gpus());
    put(out, "NVIDIA GPUs", text);
    nd_host_put_gpu_models(out, driver);
    put(out, "NVIDIA driver", version[0] ? version : "none");
}

static bool begins_with_one_of(const char *text, const char *const *list, int count)
{
    for (int i = 0; i < count; i++) {
        if (strncmp(text, list[i], strlen(list[i])) == 0) {
            return true;
        }
    }
    return false;
}

/* Names that may hold a password, and values that look like a login: they are for nobody else. */
static bool is_secret(const char *name, size_t length, const char *value)
{
    static const char *const words[] = {"KEY",  "TOKEN", "SECRET", "PASS",   "JWT",
                                        "AUTH", "CRED",  "COOKIE", "BEARER", "PSK"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        const char *at = strcasestr(name, words[i]);
        if (at && (size_t)(at - name) < length) {
            return true;
        }
    }
    const char *host = strstr(value, "://"); /* https://user:password@host */
    return (host && strchr(host, '@')) || strncmp(value, "eyJ", 3) == 0; /* a JSON web token */
}

static void put_environment(FILE *out)
{
    static const char *const prefixes[] = {
        "ND_",   "NCCL_", "CUDA_",       "UCX_",    "OMP_",        "GOMP_",  "ONEDNN_",
        "DNNL_", "PMIX_", "SLURM_",      "RANK=",   "LOCAL_RANK=", "WORLD_", "MASTER_",
        "HF_",   "XDG_",  "LD_LIBRARY_", "MALLOC_", "ACCELERATE_"};
    fprintf(out, "environment:\n");
    for (char **variable = environ; *variable; variable++) {
        size_t length = strcspn(*variable, "=");
        char name[128];
        if (!begins_with_one_of(*variable, prefixes, sizeof prefixes / sizeof *prefixes)) {
            continue;
        }
        snprintf(name, sizeof name, "%.*s", (int)(length < 120 ? length : 120), *variable);
        const char *value = *variable + length + ((*variable)[length] == '=');
        put(out, name, is_secret(*variable, length, value) ? "(set; not shown)" : value);
    }
}

void nd_host_report(FILE *out)
{
    fprintf(out, "host:\n");
    put_system(out);
    put_cpu(out);
    put_memory(out);
    put_limit(out, "open files", RLIMIT_NOFILE);
    put_limit(out, "locked memory", RLIMIT_MEMLOCK);
    put_limit(out, "address space", RLIMIT_AS);
    put_limit(out, "processes", RLIMIT_NPROC);
    put_gpus(out);
    put_environment(out);
}
