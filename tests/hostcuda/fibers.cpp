// SPDX-License-Identifier: Apache-2.0
#include "tests/hostcuda/fibers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef __has_feature
#define __has_feature(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, bytes)   ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(p, bytes) ((void)0)
#endif

/* ---- switching: callee-saved registers on the old stack, then the new stack ---- */

extern "C" void hostcuda_switch(void **save, void *load);

#if defined(__x86_64__)
__asm__(".text\n"
        ".globl hostcuda_switch\n"
        ".type hostcuda_switch, @function\n"
        "hostcuda_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
        "  ret\n"
        ".size hostcuda_switch, . - hostcuda_switch\n");
enum { SAVED_WORDS = 6, ENTRY_WORD = 6 };
#elif defined(__aarch64__)
__asm__(".text\n"
        ".globl hostcuda_switch\n"
        ".type hostcuda_switch, %function\n"
        "hostcuda_switch:\n"
        "  sub sp, sp, #160\n"
        "  stp x19, x20, [sp]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
        "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
        "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n"
        "  stp d14, d15, [sp, #144]\n"
        "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
        "  ldp x19, x20, [sp]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
        "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
        "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n"
        "  ldp d14, d15, [sp, #144]\n"
        "  add sp, sp, #160\n"
        "  ret\n"
        ".size hostcuda_switch, . - hostcuda_switch\n");
enum { SAVED_WORDS = 20, ENTRY_WORD = 11 };
#else
#error "hostcuda_switch is written for x86-64 and aarch64"
#endif

namespace hostcuda {

thread_local place here;

namespace {

enum { WARP = 32, MAX_THREADS = 1024, MAX_WARPS = MAX_THREADS / WARP, MAX_SHARED = 16 };
enum { STACK = 128 << 10, PAGE = 4096, ARENA = 48 << 10, REDZONE = 64 };

enum fiber_state { READY, AT_BLOCK, AT_WARP, DONE };

struct fiber {
    void *stack; /* lowest address: a guard page, then STACK bytes */
    void *pointer;
    fiber_state state;
    int parity; /* of the lane's exchanges */
    unsigned mask;
    exchange_kind kind;
};

struct shared_memory {
    const void *key;
    size_t offset, bytes;
};

/* The memory and contexts that one host thread needs to run a grid. */
struct machine {
    fiber fibers[MAX_THREADS];
    uint64_t words[MAX_WARPS][2][WARP];
    shared_memory segments[MAX_SHARED];
    int segment_count;
    size_t shared_bytes;
    alignas(16) char arena[ARENA];
    void *scheduler;
    int current; /* the fiber that runs; -1: threads run without fibers */
    const char *kernel;
    void (*thread)(void *);
    void *context;
    uint64_t random;
    int64_t launches;

    ~machine()
    {
        ASAN_UNPOISON_MEMORY_REGION(arena, ARENA);
        for (fiber &f : fibers) {
            if (f.stack) {
                /* What is mapped here next must not inherit the redzones of the fiber's frames. */
                ASAN_UNPOISON_MEMORY_REGION(f.stack, STACK + PAGE);
                munmap(f.stack, STACK + PAGE);
            }
        }
    }
};

thread_local machine m;
hostcuda_order order;

[[noreturn]] void fail(const char *what)
{
    fprintf(stderr, "hostcuda: kernel %s, block %u, thread %u: %s\n", m.kernel, here.block.x,
            here.thread.x, what);
    abort();
}

/* Numbers below n in that order, one with each call of next. The shuffled order is an affine
 * map with an odd-prime step, another one each time. */
struct sequence {
    int64_t n, position, step; /* 0 <= step < n, or 1 */

    explicit sequence(int64_t count) : n(count), position(0), step(1)
    {
        if (order == HOSTCUDA_DESCENDING) {
            position = n - 1;
            step = n - 1;
        } else if (order == HOSTCUDA_SHUFFLED && n > 1) {
            static const int64_t steps[] = {1, 7, 11, 13, 17, 19, 23, 29};
            m.random = m.random * 6364136223846793005u + 1442695040888963407u;
            position = (int64_t)((m.random >> 33) % (uint64_t)n);
            int64_t wanted = steps[m.random >> 60 & 7];
            step = n % wanted == 0 ? 1 : wanted % n;
        }
    }

    int64_t next()
    {
        const int64_t now = position;
        position += step;
        if (position >= n) {
            position -= n;
        }
        return now;
    }
};

void begin_block()
{
    m.segment_count = 0;
    m.shared_bytes = 0;
    ASAN_POISON_MEMORY_REGION(m.arena, ARENA);
}

/* ---- fibers ---- */

void leave(fiber_state next)
{
    machine &own = m;
    fiber &f = own.fibers[own.current];
    f.state = next;
    hostcuda_switch(&f.pointer, own.scheduler);
}

extern "C" void hostcuda_enter()
{
    m.thread(m.context);
    leave(DONE);
    abort();
}

void prepare(fiber &f)
{
    if (!f.stack) {
        f.stack = mmap(NULL, STACK + PAGE, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (f.stack == MAP_FAILED || mprotect(f.stack, PAGE, PROT_NONE) != 0) {
            fail("no memory for a stack");
        }
    }
    void **top = (void **)((char *)f.stack + STACK + PAGE) - SAVED_WORDS - 2;
    memset(top, 0, (SAVED_WORDS + 2) * sizeof *top);
    top[ENTRY_WORD] = (void *)hostcuda_enter;
    f.pointer = top;
    f.state = READY;
    f.parity = 0;
}

void resume(int i)
{
    machine &own = m;
    own.current = i;
    here.thread.x = (unsigned)i;
    hostcuda_switch(&own.scheduler, own.fibers[i].pointer);
}

/* Have all lanes of the warp come to the same exchange? Then they go on. */
bool release_warp(int first, int lanes)
{
    fiber *fibers = m.fibers + first;
    int waiting = 0;
    for (int l = 0; l < lanes; l++) {
        waiting += fibers[l].state == AT_WARP;
    }
    if (waiting == 0) {
        return false;
    }
    const fiber &one = fibers[0];
    for (int l = 0; l < lanes; l++) {
        const fiber &f = fibers[l];
        here.thread.x = (unsigned)(first + l);
        if (f.state != AT_WARP) {
            fail("does not take part in an exchange that other lanes of its warp wait in");
        }
        if (f.kind != one.kind || f.mask != 0xffffffffu) {
            fail("meets its warp in another kind of exchange, or with a mask of some lanes only");
        }
    }
    for (int l = 0; l < lanes; l++) {
        fibers[l].state = READY;
    }
    return true;
}

void run_warp(int first, int lanes)
{
    const fiber *fibers =
        m.fibers; /* to ask for a thread's own m costs more than what is done here */
    do {
        sequence turn(lanes);
        for (int l = 0; l < lanes; l++) {
            int i = first + (int)turn.next();
            if (fibers[i].state == READY) {
                resume(i);
            }
        }
    } while (release_warp(first, lanes));
}

void run_block(int threads)
{
    int warps = (threads + WARP - 1) / WARP, left;
    fiber *fibers = m.fibers;
    for (int i = 0; i < threads; i++) {
        prepare(fibers[i]);
    }
    do {
        sequence turn(warps);
        for (int w = 0; w < warps; w++) {
            int first = (int)turn.next() * WARP;
            run_warp(first, threads - first < WARP ? threads - first : (int)WARP);
        }
        left = 0;
        for (int i = 0; i < threads; i++) {
            left += fibers[i].state == AT_BLOCK;
        }
        for (int i = 0; i < threads && left > 0; i++) {
            if (fibers[i].state != AT_BLOCK) {
                here.thread.x = (unsigned)i;
                fail("has returned before a barrier that others of its block wait at");
            }
            fibers[i].state = READY;
        }
    } while (left > 0);
}

} // namespace

void *shared(const void *key, size_t bytes)
{
    for (int s = 0; s < m.segment_count; s++) {
        if (m.segments[s].key == key) {
            return m.arena + m.segments[s].offset;
        }
    }
    if (m.current < 0) {
        fail("uses shared memory in a launch without ND_LAUNCH_MEETING");
    }
    if (m.segment_count == MAX_SHARED || m.shared_bytes + bytes > ARENA) {
        fail("wants more than 48 KiB of shared memory");
    }
    size_t offset = m.shared_bytes;
    m.segments[m.segment_count++] = {key, offset, bytes};
    m.shared_bytes = (offset + bytes + REDZONE + 15) / 16 * 16;
    ASAN_UNPOISON_MEMORY_REGION(m.arena + offset, bytes);
    memset(m.arena + offset, 0xff, bytes);
    return m.arena + offset;
}

void wait_block()
{
    if (m.current < 0) {
        fail("waits at a barrier in a launch without ND_LAUNCH_MEETING");
    }
    leave(AT_BLOCK);
}

const uint64_t *exchange(unsigned mask, uint64_t word, exchange_kind kind)
{
    if (m.current < 0) {
        fail("meets its warp in a launch without ND_LAUNCH_MEETING");
    }
    machine &own = m;
    fiber &f = own.fibers[own.current];
    uint64_t *words = own.words[own.current / WARP][f.parity];
    words[own.current % WARP] = word;
    f.parity ^= 1;
    f.mask = mask;
    f.kind = kind;
    leave(AT_WARP);
    return words;
}

void expect_aligned(const void *p, size_t bytes, const char *file, int line)
{
    if ((uintptr_t)p % bytes != 0) {
        fprintf(stderr, "hostcuda: %s:%d: %p is not a multiple of %zu\n", file, line, p, bytes);
        fail("accesses memory that is not aligned");
    }
}

void run_grid(const char *kernel, int64_t grid, int64_t block, bool meets, void (*thread)(void *),
              void *context)
{
    m.kernel = kernel;
    m.thread = thread;
    m.context = context;
    m.current = -1;
    here = {};
    if (grid < 1 || grid > 0x7fffffff || block < 1 || block > MAX_THREADS ||
        (meets && block % WARP)) {
        fprintf(stderr, "hostcuda: grid %lld, block %lld\n", (long long)grid, (long long)block);
        fail("cannot be launched with these extents");
    }
    here.block_size = {(unsigned)block, 1, 1};
    here.grid_size = {(unsigned)grid, 1, 1};
    sequence blocks(grid);
    for (int64_t b = 0; b < grid; b++) {
        here.block.x = (unsigned)blocks.next();
        begin_block();
        if (meets) {
            run_block((int)block);
            m.current = -1;
            continue;
        }
        sequence turn(block);
        for (int64_t i = 0; i < block; i++) {
            here.thread.x = (unsigned)turn.next();
            thread(context);
        }
    }
    m.launches++;
}

} // namespace hostcuda

void hostcuda_set_order(enum hostcuda_order order)
{
    hostcuda::order = order;
}

int64_t hostcuda_launch_count(void)
{
    return hostcuda::m.launches;
}
