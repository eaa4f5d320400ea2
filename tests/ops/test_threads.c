// SPDX-License-Identifier: Apache-2.0
/* The ops of a step, except the products of oneDNN, give the same bits whatever the number of
 * threads: their sums are cut into blocks by shape alone. Sizes are above what one thread does
 * alone, and none of the counts divides them. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/context.h"
#include "kernels/rope.h"
#include "tests/ops/attend.h"
#include "tests/ops/conformance.h"
#include "tests/support/skip.h"

static const nd_dtype dtypes[] = {ND_DTYPE_F32, ND_DTYPE_BF16};

enum { N = 509, C = 331, POSITIONS = 64, HEADS = 5, D = 34 };

/* All results of one pass through the ops. */
enum { TENSORS = 14, RESULTS = 16 };

typedef struct inputs {
    nd_tensor a, b, weight, rows, labels, ids, table, heads, positions, vector;
    nd_rope_view rope;
} inputs;

static inputs make_inputs(nd_dtype dtype)
{
    static float cosines[POSITIONS * D / 2], sines[POSITIONS * D / 2];
    const nd_rope_config config = {.type = ND_ROPE_DEFAULT, .theta = 500.0};
    nd_rope_table(&config, D, POSITIONS, false, cosines, sines);
    return (inputs){.a = nd_random_2d(dtype, N, C, 3, 1.0f),
                    .b = nd_random_2d(dtype, N, C, 0, 1.0f),
                    .weight = nd_random_1d(dtype, C, 1.0f),
                    .rows = nd_random_1d(ND_DTYPE_F32, N, 1.0f),
                    .labels = nd_random_ids(N, 0, C),
                    .ids = nd_random_ids(N, 0, 90),
                    .table = nd_random_2d(ND_DTYPE_F32, 90, C, 0, 1.0f),
                    .heads = nd_random(dtype, 3, (int64_t[]){N, HEADS, D}, 0, 1.0f),
                    .positions = nd_random_ids(N, 0, POSITIONS),
                    .vector = nd_random_1d(ND_DTYPE_F32, N * C, 1.0f),
                    .rope = {cosines, sines, POSITIONS}};
}

static void run_norm_and_swiglu(const nd_side *side, const inputs *in, nd_tensor *r)
{
    r[0] = nd_clone(in->a);
    r[1] = nd_clone(in->b);
    r[2] = nd_clone(in->rows);
    ND_RUN(side, rmsnorm_fwd, .y = r[0], .sum = r[1], .rstd = r[2], .x = in->a, .delta = in->b,
           .weight = in->weight, .eps = 1e-5f);
    r[3] = nd_clone(in->a);
    r[4] = nd_random_1d(ND_DTYPE_F32, C, 0.0f);
    ND_RUN(side, rmsnorm_bwd, .dx = r[3], .dweight = r[4], .dy = in->b, .x = r[1],
           .weight = in->weight, .rstd = r[2]);
    r[5] = nd_clone(in->a);
    ND_RUN(side, swiglu_fwd, .out = r[5], .gate = in->a, .up = in->b);
    r[6] = nd_clone(in->a);
    r[7] = nd_clone(in->b);
    ND_RUN(side, swiglu_bwd, .dgate = r[6], .dup = r[7], .dout = in->b, .gate = in->a, .up = in->b);
}

static void run_rest(const nd_side *side, const inputs *in, nd_tensor *r)
{
    double *sums[2];
    for (int i = 0; i < 2; i++) {
        r[TENSORS + i] = nd_blank_2d(ND_DTYPE_U8, 1, sizeof(double), 0);
        sums[i] = r[TENSORS + i].data;
        *sums[i] = 0.0;
    }
    nd_tensor max = nd_clone(in->rows), sum = nd_clone(in->rows), target = nd_clone(in->rows);
    ND_RUN(side, ce_stats, .row_max = max, .row_sum = sum, .target = target, .logits = in->a,
           .labels = in->labels, .first = 0, .valid = C - 2);
    ND_RUN(side, ce_loss, .loss_sum = sums[0], .max = max, .sum = sum, .target = target,
           .labels = in->labels);
    r[8] = nd_clone(in->a);
    int64_t count = 10;
    ND_RUN(side, ce_bwd, .logits = r[8], .max = max, .sum = sum, .labels = in->labels, .first = 0,
           .valid = C - 2, .count = &count);
    r[9] = nd_clone(in->table);
    ND_RUN(side, embedding_bwd, .dtable = r[9], .ids = in->ids, .dout = in->b, .first = 3);
    r[10] = nd_clone(in->heads);
    ND_RUN(side, rope, .out = r[10], .x = in->heads, .positions = in->positions, .table = in->rope);
    ND_RUN(side, sum_squares, .out = sums[1], .x = in->vector.data, .count = N * C);
    const nd_adamw o = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, 0.1f, 0.05f};
    const nd_flat_range ranges[] = {{0, 777, true}, {777, N * C, false}};
    for (int i = 11; i < 14; i++) {
        r[i] = nd_random_1d(ND_DTYPE_F32, N * C, 0.0f);
    }
    ND_RUN(side, adamw, .hyper = o, .p = r[11].data, .m = r[12].data, .v = r[13].data,
           .grad = in->vector.data, .ranges = ranges, .range_count = 2);
    ND_RUN(side, accumulate, .acc = r[11], .x = in->vector);
    ND_RUN(side, cast, .out = r[1], .x = in->a);
}

static int run(const nd_side *side, const void *in, nd_tensor *results)
{
    run_norm_and_swiglu(side, in, results);
    run_rest(side, in, results);
    return RESULTS;
}

Test(threads, same_bits_whatever_their_number)
{
    for (int d = 0; d < 2; d++) {
        const inputs in = make_inputs(dtypes[d]);
        nd_with_all_threads("the ops of a step", run, &in);
        nd_case_free();
    }
}

/* More elements than there are partial sums for; all but two are in the system's page of zeros. */
Test(threads, squares_beyond_the_room_for_partial_sums)
{
    const int64_t room = (int64_t)ND_CPU_PARTIALS * 16384, count = room + 5;
    const size_t bytes = (size_t)count * sizeof(float);
    double sum = 0;
    nd_side side;
    float *x = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    cr_assert_neq(x, MAP_FAILED);
    cr_assert_eq(mprotect(x, sizeof *x, PROT_READ | PROT_WRITE), 0);
    cr_assert_eq(mprotect(x + room, sizeof *x, PROT_READ | PROT_WRITE), 0);
    x[0] = 1;
    x[count - 1] = 2;
    nd_side_open_cpu(&side, 2);
    ND_RUN(&side, sum_squares, .out = &sum, .x = x, .count = count);
    cr_expect_eq(sum, 5.0, "%g", sum);
    nd_side_close(&side);
    munmap(x, bytes);
}

/* One token that follows on many, as when a model continues a text: more spans of keys than
 * threads, and outputs to merge for every thread. */
enum { ONE_HEADS = 60, ONE_KV_HEADS = 2, ONE_D = 128, ONE_TOKENS = 11003 };

static int attend_one(const nd_side *side, const void *arg, nd_tensor *out)
{
    static const nd_attention a = {.sq = 1,
                                   .sk = ONE_TOKENS,
                                   .heads = ONE_HEADS,
                                   .kv_heads = ONE_KV_HEADS,
                                   .head_dim = ONE_D,
                                   .scale = 0.1f};
    const nd_kv_segment one = {.slot = 0, .length = ONE_TOKENS - 1, .rows = 1};
    const nd_tensor *in = arg; /* qkv and the cache */
    const size_t bytes = side->ops->attention_cached_scratch(side->device, &a, in[0].dtype);
    *out = nd_random_2d(in[0].dtype, 1, ONE_HEADS * ONE_D, 0, 0.0f);
    ND_RUN(side, attention_cached, .attention = a, .out = *out, .qkv = in[0], .cache = in[1],
           .segments = &one, .count = 1, .scratch = nd_case_memory(bytes));
    return 1;
}

Test(threads, same_bits_of_the_attention_of_one_token)
{
    const int64_t width = 2 * ONE_KV_HEADS * ONE_D;
    for (int d = 0; d < 2; d++) {
        const nd_tensor in[] = {
            nd_random_2d(dtypes[d], 1, ONE_HEADS * ONE_D + width, 0, 1.0f),
            nd_random(dtypes[d], 3, (int64_t[]){1, ONE_TOKENS, width}, 0, 1.0f)};
        nd_with_all_threads("attention", attend_one, in);
        nd_case_free();
    }
}

/* One KV head for all threads, several queries' heads on it, other numbers of keys than of queries,
 * queries that see nothing, and more KV heads than there are sums of dq at a time. */
static const nd_attention attended[] = {
    {1, 520, 520, 1, 1, 16, 0, 0.25f},    {1, 300, 650, 4, 1, 34, 350, 0.17f},
    {1, 200, 700, 3, 1, 64, 700, 0.125f}, {3, 300, 280, 6, 3, 8, -20, 0.35f},
    {5, 40, 130, 2, 2, 16, 130, 0.25f},
};

enum { ATTENDED = sizeof attended / sizeof *attended };

Test(threads, same_bits_of_attention_forward_and_backward)
{
    for (int c = 0; c < 2 * ATTENDED; c++) {
        nd_attend_with_all_threads(&attended[c / 2], dtypes[c % 2], (nd_tensor){0});
    }
}

static int count_threads(void)
{
    char line[256];
    int count = 0;
    FILE *f = fopen("/proc/self/status", "r");
    cr_assert_not_null(f);
    while (fgets(line, sizeof line, f) && sscanf(line, "Threads: %d", &count) != 1) {
    }
    fclose(f);
    return count;
}

/* No room for a stack stands for every limit that forbids a thread. */
Test(threads, that_cannot_start_are_an_error)
{
    nd_device *device = NULL;
    pthread_attr_t usual, huge;
    cr_assert_eq(nd_device_open_cpu(3, &device), ND_OK);
    pthread_getattr_default_np(&usual);
    pthread_attr_init(&huge);
    cr_assert_eq(pthread_attr_setstacksize(&huge, (size_t)1 << 46), 0);
    cr_assert_eq(pthread_setattr_default_np(&huge), 0);
    nd_status status = nd_ops_cpu_start_threads(device, true);
    pthread_setattr_default_np(&usual);
    cr_expect_eq(status, ND_ERR_RESOURCE);
    cr_expect(strstr(nd_error_last()->message, "a worker of 3 threads cannot start more than 1 "),
              "%s", nd_error_last()->message);
    nd_error_clear();
    int before = count_threads();
    cr_expect_eq(nd_ops_cpu_start_threads(device, true), ND_OK, "%s", nd_error_last()->message);
    cr_expect_eq(count_threads(), before + 4, "ours and libgomp's wait for the ops");
    pthread_attr_destroy(&huge);
    pthread_attr_destroy(&usual);
    nd_device_close(device);
}

/* Threads that a device with three starts; libgomp's stay when it is closed. `own`: whether our own
 * kernels multiply BF16. */
static int count_started(const char *products, bool f32, bool *own)
{
    nd_device *device = NULL;
    setenv("ND_CPU_PRODUCTS", products, 1);
    cr_assert_eq(nd_device_open_cpu(3, &device), ND_OK);
    const int before = count_threads();
    cr_assert_eq(nd_ops_cpu_start_threads(device, f32), ND_OK, "%s", nd_error_last()->message);
    const int started = count_threads() - before;
    *own = ((nd_cpu_context *)device->native)->gemm;
    nd_device_close(device);
    unsetenv("ND_CPU_PRODUCTS");
    return started;
}

Test(threads, of_libgomp_start_where_onednn_multiplies_f32)
{
    bool own = false;
    const int without = count_started("", false, &own), with = count_started("", true, &own);
    cr_expect_eq(without, own ? 2 : 4, "%d without F32", without);
    cr_expect_eq(with, own ? 4 : 2, "%d with F32", with);
}

Test(threads, of_libgomp_start_where_onednn_multiplies_bf16)
{
    bool own = true;
    cr_expect_eq(count_started("onednn", false, &own), 4);
    cr_expect(!own);
}

/* The stacks are those that libgomp will make. */
Test(threads, whose_stacks_have_no_room_are_an_error)
{
    nd_device *device = NULL;
    cr_assert_eq(nd_device_open_cpu(3, &device), ND_OK);
    setenv("OMP_STACKSIZE", "900000 G", 1);
    cr_expect_eq(nd_ops_cpu_start_threads(device, false), ND_ERR_RESOURCE);
    cr_expect(strstr(nd_error_last()->message, "(OMP_STACKSIZE, ulimit -s)"), "%s",
              nd_error_last()->message);
    nd_error_clear();
    nd_device_close(device);
}

Test(threads, have_the_stacks_that_libgomp_reads)
{
    static const struct {
        const char *text;
        int64_t bytes; /* 0: the usual ones */
    } cases[] = {{"4096", 4096 << 10},
                 {"4096k", 4096 << 10},
                 {"9 M ", 9 << 20},
                 {"3g", 3ll << 30},
                 {"2000000", 2000000000ll / 1000 * 1024},
                 {"65536B", 65536},
                 {"100B", 0},
                 {"1", 0},
                 {"many", 0},
                 {"8 x", 0},
                 {"8M8", 0},
                 {"", 0}};
    unsetenv("GOMP_STACKSIZE");
    unsetenv("OMP_STACKSIZE");
    int64_t usual = nd_ops_cpu_stack_bytes();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        setenv("OMP_STACKSIZE", cases[i].text, 1);
        cr_expect_eq(nd_ops_cpu_stack_bytes(), cases[i].bytes ? cases[i].bytes : usual, "\"%s\"",
                     cases[i].text);
    }
}

/* A child whose user may have no second thread, and whose memory has a limit that is far away. */
static void start_without_processes(int answer)
{
    static const struct rlimit none = {1, 1}, far = {(rlim_t)1 << 46, (rlim_t)1 << 46};
    enum { NOBODY = 65534 };
    nd_device *device = NULL;
    const char *said = "?";
    if (geteuid() == 0 && (setgid(NOBODY) != 0 || setuid(NOBODY) != 0)) {
        said = "one user";
    } else if (setrlimit(RLIMIT_NPROC, &none) == 0 && setrlimit(RLIMIT_AS, &far) == 0 &&
               nd_device_open_cpu(3, &device) == ND_OK) {
        said =
            nd_ops_cpu_start_threads(device, false) == ND_OK ? "started" : nd_error_last()->message;
    }
    (void)!write(answer, said, strlen(said));
    _exit(0);
}

Test(threads, that_a_limit_of_processes_forbids_are_not_blamed_on_memory)
{
    char text[1024];
    int ends[2];
    cr_assert_eq(pipe(ends), 0);
    pid_t child = fork();
    cr_assert_geq(child, 0);
    if (child == 0) {
        start_without_processes(ends[1]);
    }
    close(ends[1]);
    ssize_t count = read(ends[0], text, sizeof text - 1);
    cr_assert_gt(count, 0);
    text[count] = '\0';
    close(ends[0]);
    waitpid(child, NULL, 0);
    if (strcmp(text, "one user") == 0) {
        skip_test("this process cannot become another user, whose processes have a limit");
    }
    cr_expect(strstr(text, "cannot start more than 1 here: "), "%s", text);
    cr_expect(strstr(text, "(ulimit -u, or pids.max of the control group)"), "%s", text);
}

Test(threads, scratch_of_backward_grows_with_queries)
{
    size_t before = 0;
    for (int64_t sq = 0; sq <= 3000; sq += 60) {
        const nd_attention a = {2, sq, 1000, 8, 4, 64, 0, 0.125f};
        size_t bytes = nd_attention_bwd_scratch(7, &a);
        cr_assert(bytes >= before, "%lld queries take less than fewer", (long long)sq);
        before = bytes;
    }
}
