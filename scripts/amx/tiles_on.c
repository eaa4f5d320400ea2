// SPDX-License-Identifier: Apache-2.0
/* A module for the guest's Linux (scripts/try_amx): lets programs use tiles. Linux itself does so
 * only where the CPU can say that a thread has not used its tiles (XFD), which Bochs 3.0 cannot. It
 * then saves no tiles either, so only one thread at a time may use them. */
#include <linux/module.h>

static int __init tiles_on(void)
{
    u32 low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    low |= 3u << 17; /* XCR0: configuration and data of tiles */
    asm volatile("xsetbv" : : "a"(low), "d"(high), "c"(0));
    return 0;
}

module_init(tiles_on);
MODULE_LICENSE("GPL");
