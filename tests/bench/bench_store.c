// SPDX-License-Identifier: Apache-2.0
/*
 * nd_bench_store: how many workers one store serves. N clients with real TLS, held by a few threads
 * of this program, join a store that runs as in ndlaunch (a process with one event loop), exchange
 * a card each, meet at a barrier, and leave.
 *
 *   nd_bench_store [--clients 4096,16384] [--threads 2] [--deadline 120] [--most-seconds 10]
 *                  [--most-kib 64]
 *
 * A card is what workers send first: 136 bytes with the name of the host, which eight of them have
 * in common, and a digest of its CPUs.
 * Clients of one host come from one loopback address. They read what they receive, but only the
 * first client of each thread unpacks and checks it: workers do that at the same time, on many
 * hosts.
 *
 * Times are those of the last client, from the first connection on. Memory is what the store's
 * process has more with all clients connected than before, resident, per client. With --most-* the
 * program ends with 1 where join, exchange and barrier together take longer or a client costs more.
 * It ends with 77 where the limit of open files allows none of the sizes.
 */
#include <dirent.h>
#include <errno.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zstd.h>

#include "runtime/base/clock.h"
#include "runtime/base/process.h"
#include "runtime/rdzv/key.h"
#include "runtime/rdzv/store_server.h"
#include "runtime/rdzv/tls.h"
#include "runtime/rdzv/wire.h"
#include "tests/support/cipher.h"

enum {
    MAX_LIST = 8,
    MAX_THREADS = 16,
    EVENTS = 256,
    PER_HOST = 8,
    HOST_BYTES = 128, /* of a card */
    DIGEST_BYTES = 8,
    CARD_BYTES = HOST_BYTES + DIGEST_BYTES
};
static const char version[] = "bench", run_id[] = "nd-bench";

typedef enum phase { PHASE_JOIN, PHASE_EXCHANGE, PHASE_BARRIER, PHASE_LEAVE, PHASES } phase;

/* Written by the store's process and by the threads; all in memory that both have. */
typedef struct board {
    atomic_int port, stop, world, files; /* files: open in the store once all have joined */
    atomic_long before_kib, with_all_kib, cpu_ms;
    atomic_int arrived[PHASES], again; /* clients beyond a phase; connections that came again */
    _Atomic int64_t ended_ns[PHASES];
} board;

typedef struct bench {
    int clients[MAX_LIST], count, threads;
    double deadline, most_seconds, most_kib;
    uint8_t key[ND_KEY_BYTES];
    board *board;
} bench;

static void fail(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

/* Ends the program with this sentence, and with the thread's error if there is one. */
static void fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "nd_bench_store: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, ": %s\n", nd_error_last()->message);
    va_end(arguments);
    exit(1);
}

/* The store. */

static long resident_kib(void)
{
    long pages = 0, size;
    FILE *in = fopen("/proc/self/statm", "re");
    if (!in || fscanf(in, "%ld %ld", &size, &pages) != 2) {
        pages = 0;
    }
    if (in) {
        fclose(in);
    }
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

static void on_notice(void *context, const char *line)
{
    fprintf(stderr, "store: %s\n", line);
}

static int open_files(void)
{
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (dir && readdir(dir)) {
        count++;
    }
    if (dir) {
        closedir(dir);
    }
    return count - 3; /* ".", "..", and the folder itself */
}

static void on_look(uv_timer_t *timer)
{
    board *b = timer->data;
    struct rusage usage;
    long now = resident_kib();
    if (now > atomic_load(&b->with_all_kib)) {
        atomic_store(&b->with_all_kib, now);
    }
    if (atomic_load(&b->arrived[PHASE_JOIN]) == atomic_load(&b->world) &&
        atomic_load(&b->files) == 0) {
        atomic_store(&b->files, open_files());
    }
    getrusage(RUSAGE_SELF, &usage);
    atomic_store(&b->cpu_ms, (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000 +
                                 (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1000);
    if (atomic_load(&b->stop)) {
        uv_stop(timer->loop);
    }
}

static int serve(const bench *all, int clients)
{
    uv_loop_t loop;
    uv_timer_t look;
    nd_address addresses[ND_ADDRESS_MAX];
    nd_store_server *store;
    int count;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    nd_store_server_options options = {
        .loop = &loop,
        .server = {.version = version,
                   .run_id = run_id,
                   .world_size = clients,
                   .nnodes = clients / 8 + 1},
        .hooks = {.notice = on_notice},
    };
    memcpy(options.key, all->key, sizeof options.key);
    if (uv_loop_init(&loop) != 0 ||
        nd_address_resolve("127.0.0.1", 0, addresses, &count) != ND_OK) {
        fail("the store's loop");
    }
    options.address = addresses[0];
    if (nd_store_server_open(&options, &store) != ND_OK) {
        fail("the store");
    }
    uv_timer_init(&loop, &look);
    look.data = all->board;
    uv_timer_start(&look, on_look, 20, 20);
    atomic_store(&all->board->before_kib, resident_kib());
    atomic_store(&all->board->port, nd_store_server_port(store));
    uv_run(&loop, UV_RUN_DEFAULT);
    nd_store_server_close(store);
    uv_close((uv_handle_t *)&look, NULL);
    uv_run(&loop, UV_RUN_DEFAULT);
    uv_loop_close(&loop);
    return 0;
}

/* The clients. */

typedef struct client {
    int fd, index;
    nd_tls *tls;
    nd_wire_parser parser;
    phase phase;  /* that it waits for */
    bool said;    /* hello is out */
    char *unsent; /* ciphertext that the socket did not take */
    size_t unsent_bytes;
    size_t received; /* of the exchange's result, as it is sent */
} client;

typedef struct crowd {
    const bench *all;
    int first, count, world, epoll, gone;
    nd_tls_context *tls;
    client *clients;
    uint8_t *card;
    uint8_t *result; /* [world x bytes] of the first client, as it is sent */
} crowd;

static void fill_card(int index, uint8_t *out)
{
    memset(out, 0, HOST_BYTES);
    snprintf((char *)out, HOST_BYTES, "node-%05d.cluster.example", index / PER_HOST);
    memset(out + HOST_BYTES, 0xc5, DIGEST_BYTES);
}

static void watch(crowd *c, client *one, int operation, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.ptr = one};
    epoll_ctl(c->epoll, operation, one->fd, &event);
}

static void close_client(client *one)
{
    nd_tls_destroy(one->tls);
    nd_wire_parser_fini(&one->parser);
    free(one->unsent);
    close(one->fd);
    *one = (client){.fd = -1, .index = one->index};
}

static void keep_unsent(client *one, const char *bytes, size_t count)
{
    char *grown = realloc(one->unsent, one->unsent_bytes + count);
    if (!grown) {
        fail("no memory");
    }
    memcpy(grown + one->unsent_bytes, bytes, count);
    one->unsent = grown;
    one->unsent_bytes += count;
}

/* False: the connection is lost. */
static bool push(crowd *c, client *one)
{
    char bytes[17 << 10];
    size_t count;
    if (one->unsent_bytes > 0) {
        ssize_t n = send(one->fd, one->unsent, one->unsent_bytes, MSG_NOSIGNAL);
        if (n < 0) {
            return errno == EAGAIN;
        }
        one->unsent_bytes -= (size_t)n;
        memmove(one->unsent, one->unsent + n, one->unsent_bytes);
    }
    while ((count = take_cipher(one->tls, bytes, sizeof bytes)) > 0) {
        ssize_t n = one->unsent_bytes > 0 ? 0 : send(one->fd, bytes, count, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != ENOTCONN) {
            return false;
        }
        n = n < 0 ? 0 : n;
        if ((size_t)n < count) {
            keep_unsent(one, bytes + n, count - (size_t)n);
        }
    }
    watch(c, one, EPOLL_CTL_MOD, one->unsent_bytes > 0 ? EPOLLIN | EPOLLOUT : EPOLLIN);
    return true;
}

static void connect_client(crowd *c, client *one)
{
    const int on = 1;
    /* Without an address of its own for each host, thousands of connections would search long for a
     * port that is free. */
    struct sockaddr_in from = {.sin_family = AF_INET,
                               .sin_addr.s_addr =
                                   htonl(INADDR_LOOPBACK + 1 + (uint32_t)(one->index / PER_HOST))};
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                             .sin_port = htons((uint16_t)atomic_load(&c->all->board->port))};
    nd_wire_parser_init(&one->parser, ND_WIRE_LIMIT_MEMBER);
    if (nd_tls_create(c->tls, &one->tls) != ND_OK) {
        fail("a client");
    }
    one->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (one->fd < 0 || setsockopt(one->fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on) ||
        bind(one->fd, (struct sockaddr *)&from, sizeof from) != 0 ||
        (connect(one->fd, (struct sockaddr *)&to, sizeof to) != 0 && errno != EINPROGRESS)) {
        fail("connect: %s", strerror(errno));
    }
    setsockopt(one->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    watch(c, one, EPOLL_CTL_ADD, EPOLLIN);
    push(c, one); /* at once, as a worker does; a lost connection is seen when it is read */
}

/* The store dropped it before it was a member: it comes again, as a worker does. */
static void come_again(crowd *c, client *one)
{
    if (one->phase != PHASE_JOIN) {
        fail("a member was dropped");
    }
    atomic_fetch_add(&c->all->board->again, 1);
    close_client(one);
    connect_client(c, one);
}

static void say(client *one, nd_wire_buffer *out)
{
    if (nd_wire_end(out) != ND_OK || nd_tls_write(one->tls, out->data, out->size) != ND_OK) {
        fail("a request");
    }
    nd_wire_buffer_fini(out);
}

static void say_hello(client *one)
{
    nd_wire_buffer out = {0};
    nd_wire_begin(&out, ND_WIRE_HELLO);
    nd_wire_put_u32(&out, ND_WIRE_PROTOCOL);
    nd_wire_put_text(&out, version);
    nd_wire_put_text(&out, run_id);
    nd_wire_put_u32(&out, 0);
    nd_wire_put_u32(&out, ND_WIRE_WORKER);
    nd_wire_put_u32(&out, (uint32_t)one->index);
    nd_wire_put_text(&out, "host");
    say(one, &out);
    one->said = true;
}

static void say_exchange(crowd *c, client *one, const char *name, size_t bytes)
{
    nd_wire_buffer out = {0};
    nd_wire_begin(&out, ND_WIRE_EXCHANGE);
    nd_wire_put_u32(&out, (uint32_t)one->phase);
    nd_wire_put_u64(&out, (uint64_t)(c->all->deadline * 1e3));
    nd_wire_put_text(&out, name);
    nd_wire_put_blob(&out, c->card, bytes);
    say(one, &out);
}

static void next_phase(crowd *c, client *one)
{
    board *b = c->all->board;
    nd_wire_buffer bye = {0};
    if (atomic_fetch_add(&b->arrived[one->phase], 1) + 1 == c->world) {
        atomic_store(&b->ended_ns[one->phase], nd_clock_ns());
    }
    one->phase++;
    one->received = 0;
    if (one->phase == PHASE_EXCHANGE) {
        fill_card(one->index, c->card);
        say_exchange(c, one, "cards", CARD_BYTES);
    } else if (one->phase == PHASE_BARRIER) {
        say_exchange(c, one, "barrier", 0);
    } else {
        nd_wire_begin(&bye, ND_WIRE_BYE);
        say(one, &bye);
    }
}

/* Fails unless the first client received the cards of all clients. */
static void check_result(crowd *c, size_t packed)
{
    const size_t total = CARD_BYTES * (size_t)c->world;
    uint8_t *unpacked = malloc(total + 1);
    if (!unpacked || ZSTD_decompress(unpacked, total, c->result, packed) != total) {
        fail("the result");
    }
    for (int i = 0; i < c->world; i++) {
        fill_card(i, c->card);
        if (memcmp(unpacked + (size_t)i * CARD_BYTES, c->card, CARD_BYTES) != 0) {
            fail("another card than that of client %d", i);
        }
    }
    free(unpacked);
}

static void take(crowd *c, client *one, const nd_wire_frame *frame)
{
    nd_wire_cursor cursor = nd_wire_body(frame);
    size_t count;
    if (frame->type == ND_WIRE_WELCOME && one->phase == PHASE_JOIN) {
        next_phase(c, one);
        return;
    }
    nd_wire_get_u32(&cursor);
    nd_wire_get_u64(&cursor);
    size_t packed = nd_wire_get_u64(&cursor);
    const uint8_t *part = nd_wire_get_blob(&cursor, &count);
    if (frame->type != ND_WIRE_SLICE || !nd_wire_finished(&cursor) ||
        count > packed - one->received) {
        fail("an answer of type %d", (int)frame->type);
    }
    bool is_first = one == c->clients && one->phase == PHASE_EXCHANGE;
    if (is_first && count > 0) {
        memcpy(c->result + one->received, part, count);
    }
    one->received += count;
    if (one->received == packed) {
        if (is_first) {
            check_result(c, packed);
        }
        next_phase(c, one);
    }
}

/* False: the connection is lost. */
static bool pull(crowd *c, client *one)
{
    static _Thread_local char bytes[64 << 10];
    ssize_t n = recv(one->fd, bytes, sizeof bytes, 0);
    if (n <= 0) {
        return n < 0 && errno == EAGAIN;
    }
    if (nd_tls_input(one->tls, bytes, (size_t)n) != ND_OK) {
        return false;
    }
    if (nd_tls_established(one->tls) && !one->said) {
        say_hello(one);
    }
    for (bool closed = false; nd_tls_established(one->tls) && !closed;) {
        size_t count;
        nd_wire_frame frame;
        if (nd_tls_read(one->tls, bytes, sizeof bytes, &count, &closed) != ND_OK ||
            nd_wire_feed(&one->parser, bytes, count) != ND_OK) {
            return false;
        }
        while (nd_wire_next(&one->parser, &frame) == ND_OK && frame.type != ND_WIRE_NONE) {
            take(c, one, &frame);
        }
        if (count == 0) {
            break;
        }
    }
    return true;
}

static void serve_client(crowd *c, client *one)
{
    if (pull(c, one) && push(c, one)) {
        return;
    }
    if (one->phase == PHASE_LEAVE) { /* the answer to its goodbye */
        close_client(one);
        one->phase = PHASE_LEAVE;
        c->gone++;
    } else {
        come_again(c, one);
    }
}

static void *run_crowd(void *argument)
{
    crowd *c = argument;
    struct epoll_event events[EVENTS];
    int64_t end = nd_clock_ns() + (int64_t)(c->all->deadline * 1e9);
    c->epoll = epoll_create1(EPOLL_CLOEXEC);
    c->clients = calloc((size_t)c->count, sizeof *c->clients);
    c->card = calloc(1, CARD_BYTES);
    const size_t total = CARD_BYTES * (size_t)c->world;
    c->result = malloc(total + total / 64 + 4096); /* packed, which may be a little longer */
    if (!c->clients || !c->card || !c->result ||
        nd_tls_context_create(false, c->all->key, &c->tls) != ND_OK) {
        fail("the clients");
    }
    int connected = 0;
    while (c->gone < c->count) {
        /* As fast as the machine allows, but answers go first. */
        for (int i = 0; i < 64 && connected < c->count; i++, connected++) {
            c->clients[connected].index = c->first + connected;
            connect_client(c, &c->clients[connected]);
        }
        int n = epoll_wait(c->epoll, events, EVENTS, connected < c->count ? 0 : 1000);
        for (int i = 0; i < n; i++) {
            serve_client(c, events[i].data.ptr);
        }
        if (nd_clock_ns() > end) {
            fail("the deadline has passed");
        }
    }
    nd_tls_context_destroy(c->tls);
    close(c->epoll);
    free(c->clients);
    free(c->card);
    free(c->result);
    return NULL;
}

static double seconds_between(int64_t from, int64_t to)
{
    return (double)(to - from) * 1e-9;
}

/* Ends the program when the store's process ends before it listens, or at the deadline. */
static void wait_for_port(const bench *all, pid_t pid)
{
    int64_t end = nd_clock_ns() + (int64_t)(all->deadline * 1e9);
    while (atomic_load(&all->board->port) == 0) {
        if (waitpid(pid, NULL, WNOHANG) != 0 || nd_clock_ns() > end) {
            fail("the store does not listen");
        }
        usleep(1000);
    }
}

/* True: within the bounds of the command line. */
static bool measure(const bench *all, int clients)
{
    crowd crowds[MAX_THREADS] = {0};
    pthread_t threads[MAX_THREADS];
    board *b = all->board;
    memset(b, 0, sizeof *b);
    atomic_store(&b->world, clients);
    pid_t pid = fork();
    if (pid == 0) {
        exit(serve(all, clients));
    }
    if (pid < 0) {
        fail("fork: %s", strerror(errno));
    }
    wait_for_port(all, pid);
    int64_t begin = nd_clock_ns();
    for (int t = 0; t < all->threads; t++) {
        int first = (int)((int64_t)clients * t / all->threads);
        crowds[t] = (crowd){.all = all,
                            .first = first,
                            .count = (int)((int64_t)clients * (t + 1) / all->threads) - first,
                            .world = clients};
        if (pthread_create(&threads[t], NULL, run_crowd, &crowds[t]) != 0) {
            fail("a thread");
        }
    }
    for (int t = 0; t < all->threads; t++) {
        pthread_join(threads[t], NULL);
    }
    atomic_store(&b->stop, 1);
    int status = 0;
    waitpid(pid, &status, 0);
    double join = seconds_between(begin, b->ended_ns[PHASE_JOIN]),
           exchange = seconds_between(b->ended_ns[PHASE_JOIN], b->ended_ns[PHASE_EXCHANGE]),
           barrier = seconds_between(b->ended_ns[PHASE_EXCHANGE], b->ended_ns[PHASE_BARRIER]);
    double kib = (double)(b->with_all_kib - b->before_kib) / clients;
    printf("%8d %8.2f %10.2f %9.2f %8.2f %8.2f %12.1f %14.2f %8d\n", clients, join, exchange,
           barrier, join + exchange + barrier, (double)b->cpu_ms * 1e-3, kib,
           (double)b->files / clients, b->again);
    fflush(stdout);
    return status == 0 && join + exchange + barrier <= all->most_seconds && kib <= all->most_kib;
}

static int parse_list(char *text, int out[MAX_LIST])
{
    int count = 0;
    char *rest = NULL;
    for (char *item = strtok_r(text, ",", &rest); item && count < MAX_LIST;
         item = strtok_r(NULL, ",", &rest)) {
        out[count++] = atoi(item);
    }
    return count;
}

static bool parse(bench *all, int argc, char **argv)
{
    static const struct option options[] = {
        {"clients", required_argument, NULL, 'c'},  {"threads", required_argument, NULL, 't'},
        {"deadline", required_argument, NULL, 'd'}, {"most-seconds", required_argument, NULL, 's'},
        {"most-kib", required_argument, NULL, 'k'}, {0}};
    for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (o) {
        case 'c':
            all->count = parse_list(optarg, all->clients);
            break;
        case 't':
            all->threads = atoi(optarg);
            break;
        case 'd':
            all->deadline = atof(optarg);
            break;
        case 's':
            all->most_seconds = atof(optarg);
            break;
        case 'k':
            all->most_kib = atof(optarg);
            break;
        default:
            return false;
        }
    }
    return all->threads >= 1 && all->threads <= MAX_THREADS && all->count > 0;
}

int main(int argc, char **argv)
{
    bench all = {.clients = {4096},
                 .count = 1,
                 .threads = 2,
                 .deadline = 120,
                 .most_seconds = 1e9,
                 .most_kib = 1e9};
    bool good = true, measured = false;
    if (!parse(&all, argc, argv)) {
        fprintf(stderr, "usage: see the head of tests/bench/bench_store.c\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    int64_t files = nd_limits_raise_files();
    all.board =
        mmap(NULL, sizeof *all.board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (all.board == MAP_FAILED || nd_key_random(all.key) != ND_OK) {
        fail("the start");
    }
    printf("%8s %8s %10s %9s %8s %8s %12s %14s %8s\n", "clients", "join s", "exchange s",
           "barrier s", "sum s", "cpu s", "KiB a client", "files a client", "again");
    for (int i = 0; i < all.count; i++) {
        if (files < all.clients[i] + 64) {
            printf("skipped: %d clients need more open files than %lld (ulimit -Hn)\n",
                   all.clients[i], (long long)files);
            continue;
        }
        good = measure(&all, all.clients[i]) && good;
        measured = true;
    }
    return !good ? 1 : measured ? 0 : 77;
}
