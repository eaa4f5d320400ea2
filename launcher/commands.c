// SPDX-License-Identifier: Apache-2.0
/* The commands of ndlaunch that need no job: `env` and `config`. */
#include <ctype.h>
#include <errno.h>
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
#include "runtime/config/commands.h"

/* `ndlaunch env`: what a report of a problem should say of this host. */

enum { LINE_BYTES = 4096, NAME_WIDTH = 18 };

/* One line: a name, and a text whose control characters are written as escapes. */
static void put_line(FILE *out, const char *name, const char *text)
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
    put_line(out, name, text[0] ? text : "unknown");
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
    put_line(out, "instruction sets", text);
    int usable = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : -1;
    snprintf(count, sizeof count, "%ld, of which this process may use %d",
             sysconf(_SC_NPROCESSORS_ONLN), usable);
    put_line(out, "CPUs", count);
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
    put_line(out, "/dev/shm", text);
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
    put_line(out, name, text);
}

/* The NVIDIA GPUs of this host, by their device files. */
static int count_gpus(void)
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
        put_line(out, name, text);
        put_count++;
    }
    nd_fs_names_fini(&names);
    if (put_count == 0) {
        put_line(out, "GPU models", "none: the NVIDIA driver shows no GPU on this host");
    }
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
        size_t length = strcspn(*variable, "="), of = 0;
        const size_t count = sizeof prefixes / sizeof *prefixes;
        char name[128];
        while (of < count && strncmp(*variable, prefixes[of], strlen(prefixes[of])) != 0) {
            of++;
        }
        if (of == count) {
            continue;
        }
        snprintf(name, sizeof name, "%.*s", (int)(length < 120 ? length : 120), *variable);
        const char *value = *variable + length + ((*variable)[length] == '=');
        put_line(out, name, is_secret(*variable, length, value) ? "(set; not shown)" : value);
    }
}

void nd_host_report(FILE *out)
{
    struct utsname u;
    char version[LINE_BYTES], text[LINE_BYTES] = "unknown";
    if (uname(&u) == 0) {
        snprintf(text, sizeof text, "%s %s %s", u.sysname, u.release, u.machine);
    }
    fprintf(out, "host:\n");
    put_file_line(out, "system", "/etc/os-release", "PRETTY_NAME");
    put_line(out, "kernel", text);
    put_line(out, "C library", gnu_get_libc_version());
    put_cpu(out);
    put_memory(out);
    put_limit(out, "open files", RLIMIT_NOFILE);
    put_limit(out, "locked memory", RLIMIT_MEMLOCK);
    put_limit(out, "address space", RLIMIT_AS);
    put_limit(out, "processes", RLIMIT_NPROC);
    snprintf(text, sizeof text, "%d", count_gpus());
    put_line(out, "NVIDIA GPUs", text);
    nd_host_put_gpu_models(out, "/proc/driver/nvidia");
    line_of_file("/proc/driver/nvidia/version", "NVRM version", version);
    put_line(out, "NVIDIA driver", version[0] ? version : "none");
    put_environment(out);
}

/* `ndlaunch config`: a first configuration file, to be edited. */

enum { PATH_CAPACITY = 1024 };

/* The lines with a place for a value are the number of workers and the model's file. */
static const char starter[] =
    "# Made by ndlaunch config. docs/config.md lists every key; ndlaunch --help SECTION prints\n"
    "# those of a section.\n"
    "\n"
    "launch:\n"
    "  workers: %d  # one for each GPU\n"
    "\n"
    "mesh:  # the product of all axes is the number of workers; -1 takes what the others leave\n"
    "  dp_replicate: 1  # replicas of the model\n"
    "  dp_shard: -1  # ranks that share weights, gradients and optimizer state\n"
    "  cp: 1  # ranks that share each sequence (context parallel)\n"
    "  tp: 1  # ranks that share each matrix (tensor parallel)\n"
    "\n"
    "model:\n"
    "  config: \"%s\"  # a config.json for fresh weights\n"
    "  # path: ./Llama-3.2-1B  # or a Hugging Face folder or a GGUF file with weights\n"
    "  # name: ORG/NAME  # or a model of the local Hugging Face cache\n"
    "\n"
    "data:\n"
    "  path: \"data/train.txt\"  # text, JSON lines, token files, or several: [a.jsonl, b.bin]\n"
    "  validation_path: \"data/valid.txt\"  # \"\" for none\n"
    "  tokenizer: \"bytes\"  # model: the model's own; file: ids are in the file; or a path\n"
    "\n"
    "train:\n"
    "  steps: 1000\n"
    "  sequence_length: 512  # tokens of a sample\n"
    "  micro_batch_size: 2  # samples of a data-parallel rank at once\n"
    "  precision: bf16  # or fp32, fp8\n"
    "  validation_interval: 100  # steps; 0 for one at the end\n"
    "\n"
    "optimizer:\n"
    "  lr: 3e-4  # the largest learning rate\n"
    "  warmup_ratio: 0.1  # share of the steps that warms up\n"
    "\n"
    "checkpoint:\n"
    "  interval: 500  # steps; 0 for none\n";

/* The small model of the repository, or of the folder that this program was installed in. */
static void find_model(char out[PATH_CAPACITY])
{
    static const char local[] = "configs/model-small.json";
    char program[PATH_CAPACITY / 2], path[PATH_CAPACITY];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    snprintf(out, PATH_CAPACITY, "%s", local);
    bool there = false;
    if (n <= 0 || nd_fs_exists(local, &there) != ND_OK || there) {
        return;
    }
    program[n] = '\0';
    for (int up = 0; up < 2 && strrchr(program, '/'); up++) { /* PREFIX/bin/ndlaunch */
        *strrchr(program, '/') = '\0';
    }
    snprintf(path, sizeof path, "%s/share/ndtrain/%s", program, local);
    if (!strpbrk(path, "\"\\") && nd_fs_exists(path, &there) == ND_OK && there) {
        snprintf(out, PATH_CAPACITY, "%s", path);
    }
}

static nd_status write_starter(FILE *said, const char *path)
{
    char model[PATH_CAPACITY];
    const int gpus = count_gpus();
    find_model(model);
    FILE *out = nd_fs_stream_new(path, 0666);
    if (!out) {
        return errno == EEXIST ? nd_fail(ND_ERR_CANTCREATE,
                                         "%s exists already; remove it, or name a new file with "
                                         "--config-file",
                                         path)
                               : nd_fail(ND_ERR_CANTCREATE,
                                         "%s cannot be created: %s; name a new file with "
                                         "--config-file",
                                         path, strerror(errno));
    }
    fprintf(out, starter, gpus > 0 ? gpus : 1, model);
    bool failed = ferror(out) != 0;
    failed = fclose(out) != 0 || failed;
    if (failed) {
        unlink(path);
        return nd_fail(ND_ERR_CANTCREATE, "%s cannot be written: %s", path, strerror(errno));
    }
    fprintf(said,
            "written: %s\n"
            "  edit it: model, data, steps\n"
            "  ndtrain plan --config-file %s     # what it will need\n"
            "  ndlaunch --config-file %s         # trains\n",
            path, path, path);
    return ND_OK;
}

nd_status nd_starter_main(FILE *said, int argc, char **argv)
{
    nd_command_flags line;
    if (nd_command_wants_help(argc, argv)) {
        nd_command_print_help(ND_COMMAND_CONFIG);
        return ND_OK;
    }
    ND_TRY(nd_command_flags_read(ND_COMMAND_CONFIG, argc, argv, &line));
    const nd_flag_value *file = &line.values[ND_CONFIG_FILE];
    const char *word = line.word[0];
    if (word && strcmp(word, "default") != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "ndlaunch config does not take \"%.60s\"; it takes --config-file FILE, the "
                       "file to write",
                       word);
    }
    if (file->given && !file->text[0]) {
        return nd_fail(ND_ERR_CONFIG, "--config-file is empty; give the name of the file to write");
    }
    return write_starter(said, file->given ? file->text : "ndtrain.yaml");
}
