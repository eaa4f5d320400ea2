// SPDX-License-Identifier: Apache-2.0
#include "trainer/context/deal.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "runtime/base/math.h"
#include "tests/drawn/draw.h"

enum { SEQUENCE_MAX = 32 * 16 * 128 };

static int32_t first_keys[SEQUENCE_MAX], places[SEQUENCE_MAX], local[SEQUENCE_MAX];

/* Keys that a query sees, layer by layer. */
static int64_t count_pairs(const nd_deal_windows *w, int64_t place, int64_t first)
{
    int64_t pairs = 0;
    for (int64_t l = 0; l < nd_max(w->layers, 1); l++) {
        const int64_t begin = l < w->windowed ? nd_max(first, place - w->window + 1) : first;
        pairs += place - begin + 1;
    }
    return pairs;
}

/* Pairs of the rank with the most over the mean, counted anew; each place is dealt once. */
static double check_deal(const nd_deal_of *of, const int32_t *keys)
{
    const nd_deal_windows windows = keys ? of->windows : (nd_deal_windows){0};
    static bool seen[SEQUENCE_MAX];
    const int ranks = of->cp / of->ulysses;
    const int64_t own = of->sequence / ranks;
    int64_t most = 0, all = 0, joined = 0;
    static int64_t scratch[3 * SEQUENCE_MAX];
    cr_assert_leq(nd_deal_bytes(of), sizeof scratch);
    const nd_deal_pairs pairs = nd_deal(of, keys, scratch, places);
    memset(seen, 0, sizeof seen);
    for (int r = 0; r < ranks; r++) {
        int64_t load = 0;
        for (int64_t i = r * own; i < (r + 1) * own; i++) {
            const int32_t place = places[i];
            cr_assert(place >= 0 && place < of->sequence && !seen[place]);
            cr_assert(i == r * own || places[i - 1] < place, "rank %d: places do not ascend", r);
            seen[place] = true;
            load += count_pairs(&windows, place, keys ? keys[place] : 0);
            joined += count_pairs(&windows, place, 0);
        }
        most = nd_max(most, load);
        all += load;
    }
    cr_assert(pairs.most == most && pairs.all == all && pairs.joined == joined);
    return (double)most * ranks / (double)all;
}

/* Returns whether two tokens of the ranks with the most and the fewest pairs could change places so
 * that these numbers come closer. */
static bool could_be_closer(const nd_deal_of *of)
{
    const int ranks = of->cp / of->ulysses;
    const int64_t own = of->sequence / ranks;
    int64_t load[32] = {0}, most = 0, least = 0;
    for (int64_t i = 0; i < of->sequence; i++) {
        load[i / own] += count_pairs(&of->windows, places[i], first_keys[places[i]]);
    }
    for (int r = 1; r < ranks; r++) {
        most = load[r] > load[most] ? r : most;
        least = load[r] < load[least] ? r : least;
    }
    const int64_t gap = load[most] - load[least];
    for (int64_t i = most * own; i < (most + 1) * own; i++) {
        for (int64_t k = least * own; k < (least + 1) * own; k++) {
            const int64_t more = count_pairs(&of->windows, places[i], first_keys[places[i]]) -
                                 count_pairs(&of->windows, places[k], first_keys[places[k]]);
            if (more > 0 && more < gap) {
                return true;
            }
        }
    }
    return false;
}

/* Documents whose lengths have this median and spread. */
static void draw_documents(nd_draw *d, int64_t sequence, double median, double spread)
{
    for (int64_t i = 0, begin = 0, end = 0; i < sequence; i++) {
        if (i == end) {
            const double u = (double)draw_range(d, 1, 1 << 20) / (1 << 20);
            const double v = (double)draw_range(d, 0, 1 << 20) / (1 << 20);
            const double normal = sqrt(-2 * log(u)) * cos(2 * M_PI * v);
            begin = i;
            end = i + (int64_t)fmax(1, fmin(median * exp(spread * normal), (double)sequence));
        }
        first_keys[i] = (int32_t)begin;
    }
}

/* All layers, or some, have a window, which is shorter than long documents; or none has. */
static nd_deal_windows draw_windows(nd_draw *d)
{
    const int64_t layers = draw_range(d, 1, 6), kind = draw_range(d, 0, 2);
    const int64_t windowed = kind == 0 ? 0 : kind == 1 ? layers : draw_range(d, 0, layers);
    return (nd_deal_windows){windowed > 0 ? draw_range(d, 1, 300) : 0, windowed, layers};
}

/* Each rank has at least four tiles of 128 tokens. */
Test(deal, a_thousand_packings_are_within_the_balance)
{
    nd_draw d = {.seed = 38};
    double worst = 0;
    for (int n = 0; n < 1000; n++) {
        static const int sizes[] = {2, 3, 4, 6, 8, 16, 32};
        static const int primes[] = {257, 509, 1021}; /* which no shorter tile divides */
        const int64_t half = n % 2 ? primes[n / 14 % 3] : 64 * draw_range(&d, 4, 16);
        const nd_deal_of of = {2 * sizes[n % 7] * half, sizes[n % 7], 1, draw_windows(&d)};
        const double median = exp((double)draw_range(&d, 200, 900) / 100);
        const double spread = (double)draw_range(&d, 20, 200) / 100;
        draw_documents(&d, of.sequence, median, spread);
        const double balance = check_deal(&of, first_keys);
        cr_expect(balance <= ND_DEAL_BALANCE,
                  "packing %d of %lld tokens, cp %d, median %.0f, spread %.2f: %.4f", n,
                  (long long)of.sequence, of.cp, median, spread, balance);
        worst = fmax(worst, balance);
    }
    cr_log_info("the worst is %.4f", worst);
}

/* Rows of any length that a run may have, down to two tokens a rank: as close as single tokens
 * bring them where that is not within the balance. */
Test(deal, every_place_of_short_rows_is_dealt_once)
{
    nd_draw d = {.seed = 7};
    for (int n = 0; n < 500; n++) {
        const int ulysses = (int)draw_range(&d, 1, 3), cp = ulysses * (int)draw_range(&d, 1, 5);
        const nd_deal_of of = {2 * cp * draw_range(&d, 1, 40), cp, ulysses, draw_windows(&d)};
        draw_documents(&d, of.sequence, (double)draw_range(&d, 1, 40), 1);
        const double balance = check_deal(&of, first_keys);
        cr_expect(balance <= ND_DEAL_BALANCE || !could_be_closer(&of),
                  "%lld tokens, cp %d, ulysses %d: %.4f", (long long)of.sequence, cp, ulysses,
                  balance);
        for (int r = 0; r < cp; r++) { /* members have their group's places, each once */
            nd_deal_local(&of, places, r, local);
            for (int64_t i = 0; i < of.sequence / cp; i++) {
                int found = 0;
                for (int64_t k = 0; k < of.sequence / cp * ulysses; k++) {
                    int32_t *at = &places[r / ulysses * ulysses * (of.sequence / cp) + k];
                    found += *at == local[i];
                    *at = *at == local[i] ? -1 : *at;
                }
                cr_assert_eq(found, 1);
            }
        }
    }
}

/* One document, and joined ones, whatever the ranks of cp exchange. */
Test(deal, one_document_is_dealt_as_zig_zag)
{
    static const int meshes[][2] = {{1, 1}, {2, 1}, {3, 1}, {8, 1}, {4, 2}, {6, 3}, {8, 4}, {4, 4}};
    memset(first_keys, 0, sizeof first_keys);
    for (size_t m = 0; m < sizeof meshes / sizeof *meshes; m++) {
        for (int64_t chunk = 1; chunk < 300; chunk += 37) {
            const int cp = meshes[m][0];
            for (int joined = 0; joined < 2; joined++) {
                nd_deal_of of = {2 * cp * chunk, cp, meshes[m][1], {0}};
                of.windows = joined ? (nd_deal_windows){chunk, 1, 1} : of.windows;
                cr_expect_leq(check_deal(&of, joined ? NULL : first_keys), 1.0);
                for (int r = 0; r < cp; r++) {
                    nd_deal_local(&of, places, r, local);
                    for (int64_t i = 0; i < 2 * chunk; i++) {
                        const int64_t at = i < chunk ? r : 2 * cp - 1 - r;
                        const int64_t want = cp == 1 ? i : at * chunk + i % chunk;
                        cr_assert_eq(local[i], want, "cp %d, ulysses %d, rank %d, token %lld", cp,
                                     of.ulysses, r, (long long)i);
                    }
                }
            }
        }
    }
}

Test(deal, a_model_s_windows_count_where_they_are_shorter_than_the_row)
{
    const nd_mesh mesh = {{1, 1, 1, 8, 2}, 4};
    nd_shape shape = {.layers = 6, .window = 100};
    nd_layer_set_add(&shape.full, 5);
    nd_deal_of of = nd_deal_of_mesh(&shape, &mesh, 512);
    cr_expect(of.sequence == 512 && of.cp == 8 && of.ulysses == 4);
    cr_expect(of.windows.window == 100 && of.windows.windowed == 5 && of.windows.layers == 6);
    of = nd_deal_of_mesh(&shape, &mesh, 96);
    cr_expect(of.windows.windowed == 0 && of.windows.layers == 6);
}
