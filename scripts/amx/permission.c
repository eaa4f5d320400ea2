// SPDX-License-Identifier: Apache-2.0
/* Preloaded in the guest (scripts/try_amx), whose Linux has no tiles to permit: its answers about
 * them are yes, and all other calls go on to Linux. */
#include <errno.h>
#include <sys/syscall.h>

long syscall(long number, long a, long b, long c, long d, long e, long f);

long syscall(long number, long a, long b, long c, long d, long e, long f)
{
    const long supported = 0x1021, permitted = 0x1022, request = 0x1023; /* of arch_prctl */
    if (number == SYS_arch_prctl && (a == supported || a == permitted || a == request)) {
        if (a != request) {
            *(unsigned long *)b = 3ul << 17; /* configuration and data of tiles */
        }
        return 0;
    }
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    if (result < 0 && result > -4096) {
        errno = (int)-result;
        return -1;
    }
    return result;
}
