// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/trainer/checkpoint/fake_checkpoint.h"
#include "trainer/checkpoint/folder.h"

TestSuite(source, .init = fake_setup, .fini = fake_teardown);

/* pp, dp_replicate, dp_shard, cp, tp */
static const nd_mesh meshes[] = {
    {{1, 1, 1, 1, 1}}, {{1, 3, 1, 1, 1}}, {{1, 1, 4, 1, 1}}, {{1, 1, 1, 1, 2}}, {{1, 1, 3, 1, 2}},
    {{1, 2, 2, 1, 1}}, {{1, 1, 1, 2, 1}}, {{1, 2, 2, 1, 2}}, {{1, 1, 2, 3, 4}}, {{1, 1, 7, 1, 1}},
};
enum { MESHES = sizeof meshes / sizeof *meshes };

static char *path_of(int64_t step)
{
    char *path = NULL;
    assert_ok(nd_checkpoint_path(fake_run.path, step, &path));
    return path;
}

/* Every rank of `to` finds its state. */
static void check_load(const char *path, const nd_manifest *m, const nd_mesh *to, bool converts)
{
    char text[2][96];
    nd_mesh_format(&m->mesh, text[0], sizeof text[0]);
    nd_mesh_format(to, text[1], sizeof text[1]);
    for (int rank = 0; rank < nd_mesh_world_size(to); rank++) {
        cr_assert_eq(fake_load_rank(path, m, to, rank, converts), ND_OK, "%s to %s: %s", text[0],
                     text[1], nd_error_last()->message);
    }
}

Test(source, any_mesh_loads_what_any_mesh_wrote)
{
    for (int from = 0; from < MESHES; from++) {
        nd_shape shape = fake_shape(from % 2 == 1);
        fake_write(fake_run.path, &shape, &meshes[from], ND_STATE_KINDS, from, from % 3 == 0,
                   from % 2 ? ND_CHECKSUM_SHA256 : ND_CHECKSUM_XXH3);
        fake_saved s = fake_open(fake_run.path, from);
        for (int to = 0; to < MESHES; to++) {
            check_load(s.path, &s.manifest, &meshes[to], to % 2 == 0);
        }
        assert_ok(fake_verify(s.path));
        nd_fs_remove_tree(s.path);
        fake_forget(&s);
    }
}

/* Which chunks of which files hold a byte that a rank wants, found out element by element. */
enum { WRITERS_MAX = 24, CHUNKS_MAX = 64 };
typedef struct chunks {
    nd_layout *layouts[WRITERS_MAX];
    nd_shard_plan plans[WRITERS_MAX];
    int writers;
    nd_source *source; /* asked for the same */
    float *memory;
    bool needed[WRITERS_MAX][ND_PIECE_KINDS][CHUNKS_MAX];
    int64_t pieces; /* stored rectangles of which some part is wanted */
} chunks;

static void plan_writers(chunks *c, const nd_manifest *m)
{
    c->writers = m->writer_count;
    for (int rank = 0; rank < c->writers; rank++) {
        c->layouts[rank] = fake_layout(&m->shape, &m->mesh, rank, false);
        const nd_shard_plan_options options = {.layout = c->layouts[rank],
                                               .mesh = &m->mesh,
                                               .rank = rank,
                                               .arrays = m->arrays,
                                               .extras = m->extras,
                                               .extra_count = m->extra_count};
        assert_ok(nd_shard_plan_init(&c->plans[rank], &options));
    }
}

static void forget_writers(chunks *c)
{
    for (int rank = 0; rank < c->writers; rank++) {
        nd_shard_plan_fini(&c->plans[rank]);
        nd_layout_destroy(c->layouts[rank]);
    }
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Returns whether the piece has something that is wanted. */
static bool mark_rows(const nd_piece *piece, const nd_span *want, bool *needed)
{
    const nd_span *have = &piece->span;
    const int64_t row_end = -larger(-have->row - have->rows, -want->row - want->rows);
    const int64_t begin = larger(have->col, want->col);
    const int64_t end = -larger(-have->col - have->cols, -want->col - want->cols);
    for (int64_t row = larger(have->row, want->row); row < row_end && begin < end; row++) {
        const int64_t at = (row - have->row) * have->cols - have->col;
        uint64_t first = piece->begin + 4 * (uint64_t)(at + begin);
        uint64_t last = piece->begin + 4 * (uint64_t)(at + end) - 1;
        cr_assert_lt(last / ND_CHUNK_BYTES, CHUNKS_MAX);
        for (uint64_t i = first / ND_CHUNK_BYTES; i <= last / ND_CHUNK_BYTES; i++) {
            needed[i] = true;
        }
    }
    return begin < end && larger(have->row, want->row) < row_end;
}

static nd_status mark_span(void *context, const nd_span *span)
{
    chunks *c = context;
    for (int w = 0; w < c->writers; w++) {
        for (int i = 0; i < c->plans[w].piece_count; i++) {
            const nd_piece *piece = &c->plans[w].pieces[i];
            if (strcmp(piece->span.param->name, span->param->name) == 0) {
                c->pieces += mark_rows(piece, span, c->needed[w][piece->kind]);
            }
        }
    }
    return nd_source_add(c->source, span, ND_STATE_MASTER, c->memory + span->begin);
}

static int64_t needed_bytes(const chunks *c)
{
    int64_t bytes = 0;
    for (int w = 0; w < c->writers; w++) {
        for (int k = 0; k < ND_PIECE_KINDS; k++) {
            for (int64_t i = 0; i < CHUNKS_MAX; i++) {
                int64_t left = (int64_t)c->plans[w].files[k].bytes - i * ND_CHUNK_BYTES;
                bytes += !c->needed[w][k][i] ? 0 : left < ND_CHUNK_BYTES ? left : ND_CHUNK_BYTES;
            }
        }
    }
    return bytes;
}

/* Every rank of `to` reads the chunks that hold something of its own, each once. Where tp cuts both
 * meshes alike, what it wants of a rectangle has two ends, and only chunks there hold more. */
static void check_reads(chunks *c, const char *path, const nd_manifest *m, const nd_mesh *to)
{
    for (int rank = 0; rank < nd_mesh_world_size(to); rank++) {
        nd_layout *layout = fake_layout(&m->shape, to, rank, true);
        nd_holder holder = nd_holder_of(to, rank);
        memset(c->needed, 0, sizeof c->needed);
        c->pieces = 0;
        c->memory = malloc((size_t)layout->shard_total * sizeof *c->memory);
        assert_ok(nd_source_open(path, m, true, &c->source));
        assert_ok(fake_each_span(layout, holder.shard, mark_span, c));
        assert_ok(nd_source_run(c->source));
        const nd_source_stats stats = nd_source_get_stats(c->source);
        cr_assert_eq(stats.read_bytes, needed_bytes(c), "rank %d reads %lld bytes of %lld", rank,
                     (long long)stats.read_bytes, (long long)needed_bytes(c));
        cr_assert(m->mesh.size[ND_AXIS_TP] != to->size[ND_AXIS_TP] ||
                  stats.read_bytes <= stats.wanted_bytes + 2 * ND_CHUNK_BYTES * c->pieces);
        nd_source_close(c->source);
        free(c->memory);
        nd_layout_destroy(layout);
    }
}

Test(source, every_rank_reads_the_chunks_that_it_needs_and_each_once)
{
    chunks *c = calloc(1, sizeof *c);
    nd_shape shape = fake_shape(false); /* of 12 MB, so that files have several chunks */
    shape.vocab = 3000;
    shape.hidden = 256;
    shape.ffn = 1024;
    shape.layers = 2;
    shape.head_dim = 32;
    for (int from = 0; from < MESHES; from++) {
        fake_write(fake_run.path, &shape, &meshes[from], 1, from, false,
                   from % 5 == 4 ? ND_CHECKSUM_SHA256 : ND_CHECKSUM_XXH3);
        fake_saved s = fake_open(fake_run.path, from);
        plan_writers(c, &s.manifest);
        for (int to = 0; to < MESHES; to++) {
            check_reads(c, s.path, &s.manifest, &meshes[to]);
        }
        forget_writers(c);
        nd_fs_remove_tree(s.path);
        fake_forget(&s);
    }
    free(c);
}

Test(source, weights_without_moments)
{
    nd_shape shape = fake_shape(false);
    fake_saved s = fake_save(fake_run.path, &shape, &meshes[7], 1, 5);
    cr_assert_eq(s.manifest.arrays, 1);
    check_load(s.path, &s.manifest, &meshes[4], false);
    fake_forget(&s);
}

/* On the same mesh a rank reads the files that it wrote and no others. */
Test(source, the_same_mesh_reads_its_own_files)
{
    const nd_mesh mesh = {{1, 1, 4, 1, 2}};
    nd_shape shape = fake_shape(false);
    nd_manifest m = {0};
    nd_source *source = NULL;
    fake_state state;
    char *path = path_of(1), name[ND_HASH_FILE_NAME_MAX], *other = NULL;
    fake_write(fake_run.path, &shape, &mesh, ND_STATE_KINDS, 1, false, ND_CHECKSUM_XXH3);
    assert_ok(nd_manifest_read(path, &m));
    for (int rank = 0; rank < 8; rank++) { /* norms are those of tp rank 0 */
        if (rank != 4) {
            assert_ok(nd_fs_format(&other, "%s/state/%s", path, nd_hash_file_name(name, rank)));
            cr_assert_eq(unlink(other), 0);
            free(other);
        }
    }
    nd_layout *layout = fake_layout(&shape, &mesh, 4, false);
    nd_holder holder = nd_holder_of(&mesh, 4);
    assert_ok(nd_source_open(path, &m, true, &source));
    assert_ok(fake_load(source, layout, &holder, ND_STATE_KINDS, &state));
    fake_check(layout, &holder, &state, ND_STATE_KINDS);
    nd_source_stats stats = nd_source_get_stats(source);
    cr_assert_leq(stats.read_bytes, stats.wanted_bytes + 3 * 65536);
    fake_free(&state);
    nd_source_close(source);
    nd_layout_destroy(layout);
    nd_manifest_fini(&m);
    free(path);
}

/* The largest file of the second writer. */
static char *first_file(const char *path)
{
    char *name = NULL;
    for (int count = 1; count <= 3; count++) {
        assert_ok(nd_fs_format(&name, "%s/state/shard-00002-model-00001-of-%05d.safetensors", path,
                               count));
        if (tempdir_has_path(name)) {
            break;
        }
        free(name);
        name = NULL;
    }
    cr_assert_not_null(name);
    return name;
}

static void write_two_ranks(int64_t step)
{
    const nd_mesh mesh = {{1, 1, 2, 1, 1}};
    nd_shape shape = fake_shape(false);
    fake_write(fake_run.path, &shape, &mesh, ND_STATE_KINDS, step, false, ND_CHECKSUM_XXH3);
}

/* Opens that fail with EMFILE say nothing about the files. */
Test(source, a_call_that_fails_is_no_damage)
{
    nd_manifest m = {0}, again = {0};
    nd_source *source = NULL;
    fake_state state;
    struct rlimit before, none;
    write_two_ranks(3);
    char *path = path_of(3);
    assert_ok(nd_manifest_read(path, &m));
    assert_ok(nd_source_open(path, &m, true, &source));
    nd_layout *layout = fake_layout(&m.shape, &fake_one, 0, false);
    nd_holder holder = nd_holder_of(&fake_one, 0);
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = (struct rlimit){.rlim_cur = 0, .rlim_max = before.rlim_max};
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
    nd_status loaded = fake_load(source, layout, &holder, m.arrays, &state);
    nd_status read = nd_manifest_read(path, &again);
    bool ours = false;
    nd_status looked = nd_checkpoint_is_ours(path, &ours);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &before), 0);
    cr_assert_eq(loaded, ND_ERR_IO);
    cr_assert_eq(read, ND_ERR_IO);
    cr_assert_eq(looked, ND_OK);
    cr_assert(ours);
    fake_free(&state);
    nd_layout_destroy(layout);
    nd_source_close(source);
    nd_manifest_fini(&m);
    assert_ok(fake_load_all(path));
    free(path);
}

/* Flips a bit of each byte at the beginning of a file, then of each `stride`-th one. */
static void check_guarded(const char *path, char *file, off_t dense, off_t stride)
{
    struct stat st;
    cr_assert_eq(stat(file, &st), 0);
    int fd = open(file, O_RDWR);
    assert_ok(fake_load_all(path));
    for (off_t at = 0; at < st.st_size; at += at < dense ? 1 : stride) {
        uint8_t byte;
        cr_assert_eq(pread(fd, &byte, 1, at), 1);
        byte ^= (uint8_t)(1 << (at % 8));
        cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
        cr_assert_eq(fake_load_all(path), ND_ERR_DATA, "byte %ld", (long)at);
        byte ^= (uint8_t)(1 << (at % 8));
        cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
    }
    assert_ok(fake_load_all(path));
    close(fd);
    free(file);
}

Test(source, every_header_byte_and_sampled_data_bytes_and_all_hashes_are_guarded)
{
    char *path = path_of(3), *hashes = NULL;
    write_two_ranks(3);
    check_guarded(path, first_file(path), 512, 61);
    assert_ok(nd_fs_format(&hashes, "%s/state/shard-00001.hashes", path));
    check_guarded(path, hashes, 0, 1);
    free(path);
}

Test(source, refuses_files_that_are_missing_cut_linked_or_foreign)
{
    char *path = path_of(1), *file, *aside = NULL;
    write_two_ranks(1);
    file = first_file(path);
    assert_ok(nd_fs_format(&aside, "%s/elsewhere", fake_run.path));
    cr_assert_eq(rename(file, aside), 0);
    assert_fails(fake_load_all(path), ND_ERR_DATA, "No such file");
    cr_assert_eq(symlink(aside, file), 0);
    assert_fails(fake_load_all(path), ND_ERR_DATA, "it is a link");
    assert_fails(fake_verify(path), ND_ERR_DATA, "it is a link");
    cr_assert_eq(unlink(file), 0);
    cr_assert_eq(mkdir(file, 0777), 0);
    assert_fails(fake_load_all(path), ND_ERR_DATA, "is a folder, not a file");
    cr_assert_eq(rmdir(file), 0);
    cr_assert_eq(rename(aside, file), 0);
    assert_ok(fake_load_all(path));
    assert_ok(fake_verify(path));
    struct stat st;
    cr_assert_eq(stat(file, &st), 0);
    cr_assert_eq(truncate(file, st.st_size - 1), 0);
    assert_fails(fake_load_all(path), ND_ERR_DATA, "it was written with");
    cr_assert_eq(unlink(file), 0);
    free(file);
    free(aside);
    nd_fs_remove_tree(path);
    write_two_ranks(1);
    assert_ok(fake_verify(path));
    assert_ok(nd_fs_format(&file, "%s/state/foreign.safetensors", path));
    close(open(file, O_CREAT | O_WRONLY, 0666));
    assert_fails(fake_verify(path), ND_ERR_DATA, "files; the checkpoint has");
    free(file);
    free(path);
}

Test(source, hash_files_of_another_checkpoint_are_refused)
{
    char *path = path_of(1), *other = path_of(2), *from = NULL, *to = NULL;
    write_two_ranks(1);
    write_two_ranks(2);
    assert_ok(nd_fs_format(&from, "%s/state/shard-00001.hashes", other));
    assert_ok(nd_fs_format(&to, "%s/state/shard-00001.hashes", path));
    cr_assert_eq(rename(from, to), 0);
    assert_fails(fake_load_all(path), ND_ERR_DATA, "of another checkpoint");
    free(from);
    free(to);
    free(other);
    free(path);
}
