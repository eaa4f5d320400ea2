// SPDX-License-Identifier: Apache-2.0
/*
 * Host memory that runs out is ND_ERR_RESOURCE wherever it happens (docs/launch.md: exit code 71).
 *
 * The linker gives the program's calls of malloc and its kind to the functions below: each case
 * runs again and again, and the n-th allocation of the n-th run fails. Jansson uses them too where
 * a case writes JSON; what it reads is left alone, since it reports some of its own failed
 * allocations as broken JSON. Calls by which hwloc and OpenSSL allocate fail in the same way.
 */
#include <criterion/criterion.h>
#include <errno.h>
#include <hwloc.h>
#include <jansson.h>
#include <netdb.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launcher/launcher.h"
#include "runtime/base/fs.h"
#include "runtime/base/hash.h"
#include "runtime/base/yaml.h"
#include "runtime/config/config.h"
#include "runtime/device/affinity.h"
#include "runtime/rdzv/address.h"
#include "runtime/rdzv/tls.h"
#include "tests/support/tempdir.h"
#include "trainer/corpus/token_file.h"
#include "trainer/data/data.h"
#include "trainer/layout/layout.h"
#include "trainer/precision/precision.h"
#include "trainer/run/state.h"
#include "trainer/weights/safetensors.h"
#include "trainer/worker/worker.h"

static tempdir dir;
static _Thread_local int64_t until_failure; /* allocations; 0: none fails */

static bool fails(void)
{
    return until_failure > 0 && --until_failure == 0;
}

/* A function that fails with this result: its type, its name and its parameters, which calls have
 * as these arguments. */
#define WRAP(type, name, parameters, arguments, failure)                                           \
    type __real_##name parameters;                                                                 \
    type __wrap_##name parameters;                                                                 \
    type __wrap_##name parameters                                                                  \
    {                                                                                              \
        return fails() ? (failure) : __real_##name arguments;                                      \
    }
WRAP(void *, malloc, (size_t size), (size), NULL)
WRAP(void *, calloc, (size_t count, size_t size), (count, size), NULL)
WRAP(void *, realloc, (void *p, size_t size), (p, size), NULL)
WRAP(char *, strdup, (const char *text), (text), NULL)
WRAP(char *, strndup, (const char *text, size_t bytes), (text, bytes), NULL)
WRAP(hwloc_bitmap_t, hwloc_bitmap_alloc, (void), (), NULL)
WRAP(int, hwloc_topology_init, (hwloc_topology_t * topology), (topology), (errno = ENOMEM, -1))
WRAP(int, getaddrinfo,
     (const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **out),
     (host, service, hints, out), EAI_MEMORY)

/* OpenSSL tells why in a queue of its own. */
static void *openssl_fails(void)
{
    ERR_raise(ERR_LIB_SSL, ERR_R_MALLOC_FAILURE);
    ERR_raise(ERR_LIB_SSL, ERR_R_INTERNAL_ERROR); /* of its caller */
    return NULL;
}

WRAP(EVP_MD_CTX *, EVP_MD_CTX_new, (void), (), openssl_fails())
WRAP(SSL_CTX *, SSL_CTX_new, (const SSL_METHOD *method), (method), openssl_fails())
WRAP(SSL *, SSL_new, (SSL_CTX * context), (context), openssl_fails())
WRAP(BIO *, BIO_new, (const BIO_METHOD *method), (method), openssl_fails())

/* The status of `run` is ND_OK or ND_ERR_RESOURCE whichever of its allocations fails. */
static void expect_resource(const char *name, nd_status (*run)(void))
{
    cr_assert_eq(run(), ND_OK, "%s without a fault: %s", name, nd_error_last()->message);
    int64_t failed = 0;
    for (int64_t n = 1;; n++) {
        nd_error_clear();
        until_failure = n;
        nd_status status = run();
        bool reached = until_failure == 0;
        until_failure = 0;
        cr_assert(status == ND_OK || status == ND_ERR_RESOURCE,
                  "%s, allocation %lld: status %d: %s", name, (long long)n, status,
                  nd_error_last()->message);
        cr_assert(status == ND_OK || strstr(nd_error_last()->message, "out of host memory for "),
                  "%s, allocation %lld: %s", name, (long long)n, nd_error_last()->message);
        failed += status != ND_OK;
        if (!reached) {
            break;
        }
    }
    cr_assert_gt(failed, 0, "no allocation of %s was made to fail", name);
}

static nd_status parse_yaml(void)
{
    static const char text[] = "a: 1\nlist: [x, 'y z']\nmap: {b: 2, c: {d: e}}\n";
    nd_yaml_node *root = NULL;
    nd_status status = nd_yaml_parse(text, sizeof text - 1, "test", &root);
    nd_yaml_destroy(root);
    return status;
}

static nd_status read_command_line(void)
{
    int argc;
    char **argv = NULL;
    nd_status status = nd_command_line_read((int)getpid(), &argc, &argv);
    free(argv);
    return status;
}

static nd_status read_config(void)
{
    static const char text[] = "launch:\n  workers: 2\nmesh:\n  dp_shard: 2\ntrain:\n  steps: 3\n";
    char program[] = "test", flag[] = "--sequence-length=64", *flags[] = {program, flag, NULL};
    nd_config config;
    nd_cli cli = {0};
    char *yaml = NULL, *job = NULL;
    nd_status status = nd_config_init(&config);
    status = status == ND_OK ? nd_config_read_text(&config, text, sizeof text - 1, "test") : status;
    status = status == ND_OK ? nd_config_parse(&config, &cli, 2, flags) : status;
    status = status == ND_OK ? nd_config_resolve(&config) : status;
    status = status == ND_OK ? nd_config_to_yaml(&config, false, &yaml) : status;
    status = status == ND_OK ? nd_config_job_text(&config, &job) : status;
    free(yaml);
    free(job);
    nd_config_fini(&config);
    return status;
}

static nd_status write_and_read(void)
{
    char *path = NULL, *parent = NULL, *text = NULL, hex[65];
    size_t bytes;
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_fs_format(&path, "%s/file", dir.path));
    ND_TRY_OUT(nd_fs_write_atomic(path, "text", 4));
    ND_TRY_OUT(nd_fs_parent(path, &parent));
    ND_TRY_OUT(nd_fs_read(path, 100, ND_ERR_DATA, &text, &bytes));
    ND_TRY_OUT(nd_sha256_file(path, hex));
    ND_TRY_OUT(nd_sha256("text", 4, hex));
out:
    free(path);
    free(parent);
    free(text);
    return status;
}

static nd_status bind_cpus(void)
{
    nd_affinity affinity;
    return nd_affinity_apply(0, 1, 0, &affinity);
}

static nd_status resolve_address(void)
{
    nd_address addresses[ND_ADDRESS_MAX];
    int count;
    return nd_address_resolve("127.0.0.1", 80, addresses, &count);
}

static nd_status open_channel(void)
{
    const uint8_t key[ND_KEY_BYTES] = {1, 2, 3};
    nd_tls_context *context = NULL;
    nd_tls *client = NULL;
    ND_TRY(nd_tls_context_create(false, key, &context));
    nd_status status = nd_tls_create(context, &client);
    nd_tls_destroy(client);
    nd_tls_context_destroy(context);
    return status;
}

/* The launcher shows a failure screen that it cannot keep. */
Test(out_of_memory, failure_screen)
{
    nd_node node = {.host = "left"};
    tempdir_make(&dir);
    tempdir_catch_stderr(&dir);
    until_failure = 1;
    nd_node_end(&node, &(nd_nodes_end){.code = 137}, "rank 3 was killed\n", 18);
    until_failure = 0;
    const char *text = tempdir_said(&dir);
    cr_expect(strstr(text, "out of host memory for the failure screen of host left"), "%s", text);
    cr_expect(strstr(text, "rank 3 was killed\n"), "%s", text);
    cr_expect_eq(node.failure.code, 137);
    cr_expect_null(node.screen);
    tempdir_remove(&dir);
}

static nd_status read_jsonl(void)
{
    static const nd_corpus_rules rules = {.json_key = "text", .pairs = true};
    nd_dataset *dataset = NULL;
    int32_t inputs[8], labels[8];
    const nd_token_cache_request request = {
        .job = {.rules = &rules, .threads = 1}, .folder = dir.path, .vocab = 256};
    ND_TRY(
        nd_dataset_open_text(tempdir_file(&dir, "rows.jsonl"), ND_DATA_AUTO, request, 8, &dataset));
    nd_status status = nd_dataset_block(dataset, 0, &(nd_block){inputs, labels});
    nd_dataset_close(dataset);
    return status;
}

/* Token files with a loss mask, written and read again. */
static nd_status write_and_read_tokens(void)
{
    int32_t ids[] = {1, 2, 3, 4, 5, 6}, ends[] = {3, 6}, spans[] = {0, 2, 3, 4};
    const nd_corpus_piece piece = {
        .ids = {ids, 6, 0}, .ends = {ends, 2, 0}, .spans = {spans, 4, 0}};
    const char *prefix = tempdir_file(&dir, "pair");
    char hex[65];
    nd_token_files out = {0};
    nd_dataset *dataset = NULL;
    nd_status status = ND_OK;
    int64_t ignored = 0;
    ND_TRY_OUT(nd_token_files_open(prefix, 256, NULL, &out));
    ND_TRY_OUT(nd_token_files_write(&out, &piece));
    ND_TRY_OUT(nd_token_files_commit(&out));
    ND_TRY_OUT(nd_dataset_open(prefix, ND_DATA_AUTO, "file", 256, 8, &dataset));
    ND_TRY_OUT(nd_dataset_ignored(dataset, &ignored));
    cr_expect_eq(ignored, 3);
    ND_TRY_OUT(nd_dataset_digest(dataset, hex));
out:
    nd_dataset_close(dataset);
    nd_token_files_fini(&out);
    return status;
}

static nd_status lay_out_tensors(void)
{
    char a[] = "a", b[] = "b";
    nd_safetensors_tensor tensors[2] = {
        {.name = a, .dtype = ND_SAFETENSORS_F32, .axes = 1, .shape = {4}},
        {.name = b, .dtype = ND_SAFETENSORS_BF16, .axes = 2, .shape = {2, 3}}};
    char *head = NULL;
    size_t bytes = 0;
    nd_status status = nd_safetensors_layout(tensors, 2, &head, &bytes);
    free(head);
    return status;
}

static nd_status parse_header(void)
{
    static const char header[] =
        "{\"a\": {\"dtype\": \"F32\", \"shape\": [4], \"data_offsets\": [0, 16]}, "
        "\"b\": {\"dtype\": \"BF16\", \"shape\": [2, 3], \"data_offsets\": [16, 28]}}";
    nd_safetensors_list list = {0};
    nd_status status =
        nd_safetensors_parse(header, sizeof header - 1, sizeof header - 1 + 8 + 28, "test", &list);
    nd_safetensors_list_fini(&list);
    return status;
}

static const nd_shape shape = {
    .vocab = 256, .hidden = 64, .ffn = 128, .layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 16};

static nd_status write_shape(void)
{
    return nd_shape_write(&shape, "float32", tempdir_file(&dir, "config.json"));
}

static nd_status choose_linears(void)
{
    char names[] = "q_proj, down_proj";
    nd_config config = {
        .train = {.precision = ND_PRECISION_FP8, .sequence_length = 64, .micro_batch_size = 1}};
    nd_filter filter = {0};
    config.fp8.filter = names;
    nd_status status = nd_filter_init(&filter, &config, &shape);
    nd_filter_fini(&filter);
    return status;
}

static nd_config run_config;

static int keys_in_file(const char *path)
{
    char line[1024];
    int keys = 0;
    FILE *f = fopen(path, "r");
    cr_assert_not_null(f);
    while (fgets(line, sizeof line, f)) {
        keys += strstr(line, "\": ") != NULL;
    }
    fclose(f);
    return keys;
}

/* A record that is written holds all keys. */
static nd_status write_run_record(void)
{
    static int all;
    static char *const argv[] = {(char *)"ndtrain", (char *)"train"};
    static const char *hosts[] = {"left", "right"};
    static nd_worker worker = {.identity = {.world_size = 2, .nnodes = 2, .run_id = "abc"},
                               .peers = {.hosts = hosts, .host_count = 2},
                               .rank.mesh = {.size = {1, 1, 1, 1}, .ulysses = 1, .kv_copies = 1}};
    nd_run run = {.worker = &worker,
                  .rank = &worker.rank,
                  .config = &run_config,
                  .argc = 2,
                  .argv = argv,
                  .dir = dir.path};
    nd_status status =
        nd_run_record_write(&run, json_pack("{s:{s:[i, i]}}", "autotune", "linears", 1, 2));
    if (status == ND_OK) {
        const char *path = tempdir_file(&dir, "run.json");
        int keys = keys_in_file(path);
        all = all ? all : keys;
        cr_assert_eq(keys, all);
        unlink(path);
    }
    return status;
}

Test(out_of_memory, is_told_wherever_it_happens)
{
    static const struct {
        const char *name;
        nd_status (*run)(void);
        bool writes_json;
    } cases[] = {
        {"YAML", parse_yaml, false},
        {"a command line", read_command_line, false},
        {"a configuration", read_config, false},
        {"files", write_and_read, false},
        {"CPUs", bind_cpus, false},
        {"addresses", resolve_address, false},
        {"TLS", open_channel, false},
        {"rows of JSON", read_jsonl, false},
        {"tokens with a mask", write_and_read_tokens, false},
        {"a safetensors head that is made", lay_out_tensors, true},
        {"a safetensors head that is read", parse_header, false},
        {"a shape", write_shape, true},
        {"a filter", choose_linears, false},
        {"the record of a run", write_run_record, true},
    };
    static const char rows[] = "{\"text\": \"one row of it\"}\n"
                               "{\"prompt\": \"a caf\\u00e9\", \"completion\": \"yes\"}\n";
    tempdir_make(&dir);
    tempdir_write(&dir, "rows.jsonl", rows, sizeof rows - 1);
    assert_ok(nd_config_init(&run_config));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_set_alloc_funcs(cases[i].writes_json ? malloc : __real_malloc, free);
        expect_resource(cases[i].name, cases[i].run);
    }
    nd_config_fini(&run_config);
    tempdir_remove(&dir);
}
