// SPDX-License-Identifier: Apache-2.0
/*
 * nd_bench_comm: latency and bus bandwidth of each collective, by size and rank count, beside what
 * memcpy does.
 *
 *   nd_bench_comm [--ranks 2,4,8] [--sizes 1024,65536,1048576] [--ops all_gather,...] [--tcp]
 *                 [--seconds 0.3]
 *
 * Ranks are processes of this host over UCX (shared memory, or TCP on the loopback). A size is the
 * whole buffer in bytes: what all_gather receives, reduce_scatter sends, all_reduce and broadcast
 * hold. Times are of the slowest rank. Bus bandwidth is the usual one (NCCL tests): algorithm
 * bandwidth x (n-1)/n for gathers, 2 (n-1)/n for all_reduce, 1 for broadcast and exchange. `copies`
 * is the time relative to one core copying, with memcpy, the bytes that all ranks together must
 * move: (n-1) x size per gather or reduction, twice that for all_reduce; with two cores for all
 * ranks 0.5 is the bound.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime/base/clock.h"
#include "tests/support/ranks.h"

enum { MAX_LIST = 16, MAX_ROWS = MAX_LIST * ND_COMM_OP_COUNT };

typedef struct bench_row {
    nd_comm_op op;
    size_t bytes;
    int repeats;
    double seconds[ND_RANKS_MAX]; /* per call, of each rank */
} bench_row;

typedef struct bench {
    size_t sizes[MAX_LIST];
    int size_count;
    bool ops[ND_COMM_OP_COUNT];
    double seconds; /* per row, roughly */
    int row_count;
    bench_row rows[MAX_ROWS];
} bench;

static nd_status call(nd_comm *comm, nd_comm_op op, char *a, char *b, size_t bytes)
{
    int64_t n = (int64_t)(bytes / sizeof(float)), part = n / comm->size;
    nd_comm_args args = {.send = a,
                         .recv = b,
                         .count = part,
                         .dtype = ND_DTYPE_F32,
                         .to = (comm->index + 1) % comm->size,
                         .from = (comm->index + comm->size - 1) % comm->size};
    switch (op) {
    case ND_COMM_ALL_REDUCE:
        return nd_comm_all_reduce(comm, NULL, a, n, ND_DTYPE_F32, ND_REDOP_SUM, NULL);
    case ND_COMM_ALL_GATHER:
        args.send = a + (size_t)(part * comm->index) * sizeof(float);
        args.recv = a;
        return nd_comm_all_gather(comm, NULL, &args, NULL);
    case ND_COMM_REDUCE_SCATTER:
        return nd_comm_reduce_scatter(comm, NULL, &args, NULL);
    case ND_COMM_BROADCAST:
        return nd_comm_broadcast(comm, NULL, a, n, ND_DTYPE_F32, 0, NULL);
    case ND_COMM_EXCHANGE:
        args.count = n;
        return nd_comm_exchange(comm, NULL, &args, NULL);
    case ND_COMM_ALL_TO_ALL:
        return nd_comm_all_to_all(comm, NULL, &args, NULL);
    default:
        return nd_comm_barrier(comm);
    }
}

/* Member 0 times a few calls and tells the others how many fill the time. */
static nd_status choose_repeats(nd_comm *comm, bench_row *row, double seconds, char *a, char *b,
                                int64_t *repeats)
{
    ND_TRY(call(comm, row->op, a, b, row->bytes));
    double started = nd_clock_seconds();
    for (int i = 0; i < 3; i++) {
        ND_TRY(call(comm, row->op, a, b, row->bytes));
    }
    double one = (nd_clock_seconds() - started) / 3 + 1e-9;
    double wanted = seconds / one;
    *repeats = wanted < 3 ? 3 : wanted > 20000 ? 20000 : (int64_t)wanted;
    return nd_comm_broadcast(comm, NULL, repeats, 1, ND_DTYPE_I64, 0, NULL);
}

static nd_status run_row(nd_comm *comm, bench_row *row, double seconds, char *a, char *b)
{
    int64_t repeats = 0;
    memset(a, 0, row->bytes); /* sums of repeated all-reduces stay finite */
    ND_TRY(choose_repeats(comm, row, seconds, a, b, &repeats));
    ND_TRY(nd_comm_barrier(comm));
    double started = nd_clock_seconds();
    for (int64_t i = 0; i < repeats; i++) {
        ND_TRY(call(comm, row->op, a, b, row->bytes));
    }
    row->seconds[comm->index] = (nd_clock_seconds() - started) / (double)repeats;
    row->repeats = (int)repeats;
    return nd_comm_barrier(comm);
}

static nd_status bench_body(nd_transport *transport, void *context)
{
    bench *work = context;
    nd_mesh mesh = {{1, 1, transport->size, 1, 1}};
    nd_comm *comm = NULL;
    nd_device *device = NULL;
    void *a = NULL, *b = NULL;
    size_t largest = 4096;
    for (int i = 0; i < work->size_count; i++) {
        largest = work->sizes[i] > largest ? work->sizes[i] : largest;
    }
    nd_status status = ND_OK;
    ND_TRY_OUT(nd_device_open_cpu(1, &device));
    ND_TRY_OUT(nd_device_alloc(device, largest, &a));
    ND_TRY_OUT(nd_device_alloc(device, largest, &b));
    memset(b, 0, largest);
    ND_TRY_OUT(nd_comm_create(transport, &mesh, ND_GROUP_WORLD, 0, &comm));
    for (int i = 0; i < work->row_count; i++) {
        ND_TRY_OUT(run_row(comm, &work->rows[i], work->seconds, a, b));
    }
out:
    nd_comm_destroy(comm);
    if (device) {
        nd_device_free(device, a, largest);
        nd_device_free(device, b, largest);
    }
    nd_device_close(device);
    return status;
}

/* Bytes per second of one core copying between buffers that do not fit its caches. */
static double memcpy_speed(void)
{
    enum { BYTES = 64 << 20, REPEATS = 8 };
    char *a = malloc(BYTES), *b = malloc(BYTES);
    ND_ASSERT(a && b);
    memset(a, 1, BYTES);
    memset(b, 1, BYTES);
    double best = 1e9;
    for (int i = 0; i < REPEATS; i++) {
        double started = nd_clock_seconds();
        memcpy(i % 2 ? a : b, i % 2 ? b : a, BYTES);
        double seconds = nd_clock_seconds() - started;
        best = seconds < best ? seconds : best;
    }
    free(a);
    free(b);
    return BYTES / best;
}

static double bus_factor(nd_comm_op op, int n)
{
    double share = (double)(n - 1) / n;
    return op == ND_COMM_ALL_REDUCE                            ? 2 * share
           : op == ND_COMM_BROADCAST || op == ND_COMM_EXCHANGE ? 1
                                                               : share;
}

/* Bytes that all ranks together must copy at least once. */
static double copied_bytes(nd_comm_op op, int n, double bytes)
{
    return op == ND_COMM_EXCHANGE ? n * bytes : bus_factor(op, n) * n * bytes;
}

static void print_rows(const bench *work, int ranks, double memcpy_bytes)
{
    for (int i = 0; i < work->row_count; i++) {
        const bench_row *row = &work->rows[i];
        double seconds = 0;
        for (int r = 0; r < ranks; r++) {
            seconds = row->seconds[r] > seconds ? row->seconds[r] : seconds;
        }
        if (row->op == ND_COMM_BARRIER) {
            printf("%5d  %-15s %11s %8d %12.1f\n", ranks, nd_comm_op_name(row->op), "-",
                   row->repeats, seconds * 1e6);
            continue;
        }
        double bus = (double)row->bytes * bus_factor(row->op, ranks) / seconds;
        double copies = seconds * memcpy_bytes / copied_bytes(row->op, ranks, (double)row->bytes);
        printf("%5d  %-15s %11zu %8d %12.1f %10.2f %8.2f\n", ranks, nd_comm_op_name(row->op),
               row->bytes, row->repeats, seconds * 1e6, bus * 1e-9, copies);
    }
}

static void plan_rows(bench *work)
{
    work->row_count = 0;
    for (int op = 0; op < ND_COMM_OP_COUNT; op++) {
        int sizes = op == ND_COMM_BARRIER ? 1 : work->size_count;
        for (int i = 0; work->ops[op] && i < sizes; i++) {
            work->rows[work->row_count++] =
                (bench_row){.op = (nd_comm_op)op, .bytes = work->sizes[i]};
        }
    }
}

static int parse_sizes(const char *text, size_t *out)
{
    int count = 0;
    char *end = NULL;
    for (; *text && count < MAX_LIST; text = *end ? end + 1 : end) {
        unsigned long long value = strtoull(text, &end, 10);
        if (end == text || (*end && *end != ',') || value < 1 || value > 1ull << 32) {
            return 0;
        }
        out[count++] = (size_t)value;
    }
    return *text ? 0 : count;
}

static bool parse_ops(const char *text, bool *out)
{
    memset(out, 0, ND_COMM_OP_COUNT * sizeof *out);
    while (*text) {
        size_t length = strcspn(text, ",");
        int op = 0;
        while (op < ND_COMM_OP_COUNT && (strlen(nd_comm_op_name((nd_comm_op)op)) != length ||
                                         strncmp(text, nd_comm_op_name((nd_comm_op)op), length))) {
            op++;
        }
        if (op == ND_COMM_OP_COUNT) {
            return false;
        }
        out[op] = true;
        text += length + (text[length] == ',');
    }
    return true;
}

static int usage(void)
{
    fprintf(stderr,
            "usage: nd_bench_comm [--ranks 2,4,8] [--sizes 1024,...] [--ops all_gather,...] "
            "[--tcp] [--seconds 0.3]\n");
    return ND_ERR_CONFIG;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"ranks", required_argument, NULL, 'r'}, {"sizes", required_argument, NULL, 's'},
        {"ops", required_argument, NULL, 'o'},   {"seconds", required_argument, NULL, 't'},
        {"tcp", no_argument, NULL, 'T'},         {0}};
    bench *work =
        mmap(NULL, sizeof *work, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ND_ASSERT(work != MAP_FAILED);
    size_t ranks[MAX_LIST] = {0};
    int rank_counts = parse_sizes("2,4,8", ranks);
    bool tcp = false, good = true;
    work->seconds = 0.3;
    work->size_count = parse_sizes("1024,16384,262144,4194304,67108864", work->sizes);
    good = parse_ops("all_reduce,all_gather,reduce_scatter,broadcast,exchange,all_to_all,barrier",
                     work->ops);
    for (int c; good && (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == 'r') {
            good = (rank_counts = parse_sizes(optarg, ranks)) > 0;
        } else if (c == 's') {
            good = (work->size_count = parse_sizes(optarg, work->sizes)) > 0;
        } else if (c == 'o') {
            good = parse_ops(optarg, work->ops);
        } else if (c == 't') {
            good = (work->seconds = atof(optarg)) > 0;
        } else {
            tcp = c == 'T';
            good = tcp;
        }
    }
    for (int i = 0; i < rank_counts; i++) {
        good = good && ranks[i] >= 2 && ranks[i] <= ND_RANKS_MAX;
    }
    if (!good || optind != argc) {
        return usage();
    }
    double speed = memcpy_speed();
    printf("memcpy on one core: %.2f GB/s; ranks over %s\n", speed * 1e-9,
           tcp ? "TCP" : "shared memory");
    printf("%5s  %-15s %11s %8s %12s %10s %8s\n", "ranks", "operation", "bytes", "repeats",
           "time (us)", "bus (GB/s)", "copies");
    for (int i = 0; i < rank_counts; i++) {
        nd_ranks run = {.size = (int)ranks[i], .body = bench_body, .context = work, .apart = tcp};
        plan_rows(work);
        nd_status status = nd_ranks_run_processes(&run);
        if (status != ND_OK) {
            fprintf(stderr, "%s\n", nd_error_last()->message);
            return status;
        }
        print_rows(work, run.size, speed);
        fflush(stdout);
    }
    return 0;
}
