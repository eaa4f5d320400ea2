// SPDX-License-Identifier: Apache-2.0
/* The threads of a device under the thread sanitizer: a plain program, as Criterion does not run
 * there. Regions read what the regions before them wrote, without any other order between them. */
#include <stdio.h>
#include <time.h>

#include "kernels/cpu/team.h"

enum { PIECES = 50, REGIONS = 2000, THREADS = 4 };

typedef struct rows {
    int64_t from[PIECES], to[PIECES];
} rows;

static void add_neighbours(void *arg, int64_t piece)
{
    rows *r = arg;
    r->to[piece] = r->from[piece] + r->from[(piece + 1) % PIECES] % 7;
}

static int64_t run(int threads)
{
    rows r = {0};
    nd_team *team = NULL;
    int64_t sum = 0;
    if (nd_team_create(threads, &team) != ND_OK || nd_team_start(team, 0) != ND_OK) {
        return -1;
    }
    for (int i = 0; i < PIECES; i++) {
        r.from[i] = i * i;
    }
    for (int region = 0; region < REGIONS; region++) {
        nd_team_run(team, region % 3 ? PIECES : 2, add_neighbours, &r);
        for (int i = 0; i < PIECES; i++) {
            r.from[i] = r.to[i];
        }
        if (region % 100 == 0) {
            nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL); /* the threads fall asleep */
        }
    }
    nd_team_destroy(team);
    for (int i = 0; i < PIECES; i++) {
        sum += r.to[i] * (i + 1);
    }
    return sum;
}

int main(void)
{
    const int64_t alone = run(1), together = run(THREADS);
    if (alone < 0 || alone != together) {
        printf("%d threads gave %lld, one gave %lld\n", THREADS, (long long)together,
               (long long)alone);
        return 1;
    }
    return 0;
}
