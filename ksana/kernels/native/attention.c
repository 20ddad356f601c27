/* Paged causal attention, one code path for prefill and decode.
 *
 * Keys are taken in tiles of TILE keys at absolute positions (tile t holds keys t * TILE ..), tiles in sections of
 * SECTION keys. Within a section runs an online softmax, tile by tile; sections are then merged in order. A score
 * is a sum over the head's dimensions in rising order, a value sum one over the tile's keys in rising order. A key
 * that a query does not see gets the score -inf and so the exact weight 0, and whole tiles of such keys change
 * nothing. So a token's bits depend on its query, its position, the window and the keys and values it sees: not on
 * its batch, its chunk, the block size, the thread or whether sections ran in parallel.
 *
 * A task is a run of tokens at consecutive positions of one row, for one KV head: all its query heads and tokens
 * ("query rows", token-major) share each tile of keys, which is transposed once, and each value row.
 */
#include "attention_tiles.h"

enum {
    SECTION = 512,
    MAX_DIM = 512,
    WANTED_QUERY_ROWS = 48, /* of a task: enough to make the transposing cheap */
};
static const float NO_SCORE = -3.0e38f; /* below every real score, and finite, so that no inf - inf arises */
static const float ZEROS[MAX_DIM + VL];

typedef struct {
    int row, token, tokens;
} Chunk;

typedef struct {
    const float *q, *k_cache, *v_cache;
    float *out;
    const int32_t *tables;
    const int64_t *positions;
    int64_t q_stride, window, block_size;
    int max_blocks, heads, kv_heads, group, dim;
    float scale;
    const Chunk *chunks;
    int num_chunks;
    /* When sections run in parallel: their results, [task][section][row] of (largest, sum, dim values). */
    int num_sections;
    float *partials;
    int rows_per_task;
    int failed;
} Attention;

/* Softmax state of a task's query rows. */
typedef struct {
    float *query;   /* packed by register tiles: [tile][dim][row of the tile] */
    float *keys;    /* a tile of keys, transposed: [dim][TILE] */
    float *scores;  /* [row][TILE] */
    float *values;  /* weighted sum: [row][dim] */
    float *sums;    /* of the weights: [row][VL] */
    float *largest; /* score so far: [row] */
    float *factors; /* [row], padded to VL */
    float *total;   /* merged sections: [row] of (largest, sum, dim values) */
} State;

typedef struct {
    const float *k[TILE], *v[TILE];
} TileRows;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t first_key(const Attention *p, int64_t position) {
    return p->window > 0 && position >= p->window ? position - p->window + 1 : 0;
}

/* Where the keys and values of tile positions [k0, k1) are; the others point to zeros. */
static void find_rows(const Attention *p, const Chunk *chunk, int kv_head, int64_t tile_start, int k0, int k1,
                      TileRows *rows) {
    const int32_t *table = p->tables + (int64_t)chunk->row * p->max_blocks;
    for (int key = 0; key < k0; key++) rows->k[key] = rows->v[key] = ZEROS;
    for (int key = k1; key < TILE; key++) rows->k[key] = rows->v[key] = ZEROS;
    for (int key = k0; key < k1;) {
        int64_t block = (tile_start + key) / p->block_size, offset = (tile_start + key) % p->block_size;
        int64_t at = (((int64_t)table[block] * p->kv_heads + kv_head) * p->block_size + offset) * p->dim;
        for (; offset < p->block_size && key < k1; offset++, key++, at += p->dim) {
            rows->k[key] = p->k_cache + at;
            rows->v[key] = p->v_cache + at;
        }
    }
}

/* Scale and mask a row's scores of tile positions [g0, g1), and find the largest so far. Leaves in factors[row] the
 * logarithm of what the old sums are to be multiplied by. */
static void find_largest(const Attention *p, const State *s, int row, int64_t position, int64_t tile_start, int g0,
                         int g1) {
    float *scores = s->scores + (int64_t)row * TILE;
    int64_t low = first_key(p, position) - tile_start, high = position - tile_start;
    vf largest = vf_set(s->largest[row]), scale = vf_set(p->scale);
    for (int key = g0; key < g1; key += VL) vf_store(scores + key, vf_load(scores + key) * scale);
    for (int key = g0; key < g1 && key < low; key++) scores[key] = -INFINITY;
    for (int key = g1 - 1; key >= g0 && key > high; key--) scores[key] = -INFINITY;
    for (int key = g0; key < g1; key += VL) largest = vf_max(vf_load(scores + key), largest);
    float found = vf_largest(largest);
    s->factors[row] = s->largest[row] - found;
    s->largest[row] = found;
}

static void weigh(const State *s, int row, int g0, int g1) {
    float *scores = s->scores + (int64_t)row * TILE;
    vf largest = vf_set(s->largest[row]);
    vf sums = vf_load(s->sums + row * VL) * vf_set(s->factors[row]);
    for (int key = g0; key < g1; key += VL) {
        vf weight = vf_exp(vf_load(scores + key) - largest);
        vf_store(scores + key, weight);
        sums = sums + weight;
    }
    vf_store(s->sums + row * VL, sums);
}

static void rescale_values(const State *s, int row, int dim) {
    float factor = s->factors[row], *values = s->values + (int64_t)row * dim;
    if (factor == 1.0f) return;
    for (int d = 0; d < dim; d++) values[d] *= factor;
}

/* Of the next tile, 16 rows: blocks lie anywhere, so the hardware cannot guess them. */
static void prefetch(const float *const *rows, int dim) {
    for (int key = 0; key < KEY_GROUP; key++)
        for (int d = 0; d < dim; d += 16) __builtin_prefetch(rows[key] + d);
}

/* One tile of keys, of which the task's queries see some in [k0, k1), against all query rows. */
static void do_tile(const Attention *p, const Chunk *chunk, const TileRows *at, const TileRows *next, State *s,
                    int64_t tile_start, int k0, int k1) {
    int rows = chunk->tokens * p->group, dim = p->dim;
    int g0 = k0 / KEY_GROUP * KEY_GROUP, g1 = (k1 + KEY_GROUP - 1) / KEY_GROUP * KEY_GROUP;
    for (int group = g0; group < g1; group += KEY_GROUP) {
        if (next) prefetch(next->k + group, dim);
        transpose(at->k + group, dim, s->keys + group);
    }
    if (next) for (int key = 0; key < TILE; key += KEY_GROUP) prefetch(next->v + key, dim);
    int tile_rows;
    for (int row = 0; row < rows; row += tile_rows) {
        tile_rows = (int)least(ROWS, rows - row);
        int vectors;
        for (int key = g0; key < g1; key += vectors * VL) {
            vectors = (int)least(VECTORS, (g1 - key) / VL);
            SCORES[tile_rows](s->query + (int64_t)row * dim, s->keys + key, dim, vectors, s->scores + row * TILE + key);
        }
    }
    for (int row = 0; row < rows; row++)
        find_largest(p, s, row, p->positions[chunk->token + row / p->group], tile_start, g0, g1);
    for (int row = 0; row < rows; row += VL) vf_store(s->factors + row, vf_exp(vf_load(s->factors + row)));
    for (int row = 0; row < rows; row++) {
        weigh(s, row, g0, g1);
        rescale_values(s, row, dim);
    }
    for (int row = 0; row < rows; row += tile_rows) {
        tile_rows = (int)least(ROWS, rows - row);
        int vectors, half;
        for (int64_t d = 0; d < dim; d += half ? VL / 2 : vectors * VL) {
            vectors = (int)least(VECTORS, (dim - d) / VL);
            half = vectors == 0; /* dim is a multiple of 8: with 16 lanes half a vector may be left */
            VALUES[tile_rows](s->scores + row * TILE, at->v, d, vectors, half, k0, k1, s->values + (int64_t)row * dim,
                              dim);
        }
    }
}

static void do_section(const Attention *p, const Chunk *chunk, int kv_head, State *s, int64_t section) {
    int rows = chunk->tokens * p->group;
    int64_t last = p->positions[chunk->token + chunk->tokens - 1];
    int64_t low = first_key(p, p->positions[chunk->token]), start = section * SECTION;
    int64_t end = least(start + SECTION, last + 1);
    for (int row = 0; row < rows; row++) s->largest[row] = NO_SCORE;
    memset(s->sums, 0, (size_t)rows * VL * 4);
    memset(s->values, 0, (size_t)rows * (size_t)p->dim * 4);
    TileRows rows_of[2];
    int64_t tile = (low > start ? low : start) / TILE * TILE;
    int first = low > tile ? (int)(low - tile) : 0, which = 0;
    find_rows(p, chunk, kv_head, tile, first, (int)least(TILE, end - tile), &rows_of[0]);
    for (; tile < end; tile += TILE, which ^= 1, first = 0) {
        const TileRows *next = NULL;
        if (tile + TILE < end) {
            next = &rows_of[which ^ 1];
            find_rows(p, chunk, kv_head, tile + TILE, 0, (int)least(TILE, end - tile - TILE), &rows_of[which ^ 1]);
        }
        do_tile(p, chunk, &rows_of[which], next, s, tile, first, (int)least(TILE, end - tile));
    }
}

/* total and part are (largest, sum, dim values). Merging into nothing gives the part, bit by bit. */
static void merge(float *total, const float *part, int dim) {
    float exponents[VL] = {0}, factors[VL];
    float largest = part[0] > total[0] ? part[0] : total[0];
    exponents[0] = total[0] - largest;
    exponents[1] = part[0] - largest;
    vf_store(factors, vf_exp(vf_load(exponents)));
    total[0] = largest;
    for (int i = 1; i < dim + 2; i++) total[i] = total[i] * factors[0] + part[i] * factors[1];
}

static void finish(const Attention *p, const Chunk *chunk, int kv_head, int row, const float *total) {
    int token = chunk->token + row / p->group, head = kv_head * p->group + row % p->group;
    float *out = p->out + ((int64_t)token * p->heads + head) * p->dim, scale = 1.0f / total[1];
    for (int d = 0; d < p->dim; d++) out[d] = total[2 + d] * scale + 0.0f;
}

/* The section's result of one row as (largest, sum, dim values). */
static void read_section(const State *s, int row, int dim, float *to) {
    to[0] = s->largest[row];
    to[1] = vf_sum(vf_load(s->sums + row * VL));
    memcpy(to + 2, s->values + (int64_t)row * dim, (size_t)dim * 4);
}

static int prepare(Attention *p, const Chunk *chunk, int kv_head, State *s) {
    size_t rows = (size_t)(chunk->tokens * p->group), dim = (size_t)p->dim, padded = (rows + VL - 1) / VL * VL;
    size_t floats = rows * dim * 2 + dim * TILE + rows * (TILE + VL) + 2 * padded + (rows + 1) * (dim + 2) + 8 * 16;
    float *at = ksana_scratch(SCRATCH_STATE, floats * 4);
    if (at == NULL) {
        p->failed = 1;
        return -1;
    }
#define TAKE(field, count) (s->field = at, at += ((count) + 15) / 16 * 16)
    TAKE(keys, dim * TILE);
    TAKE(scores, rows * TILE);
    TAKE(query, rows * dim);
    TAKE(values, rows * dim);
    TAKE(sums, rows * VL);
    TAKE(largest, padded);
    TAKE(factors, padded);
    TAKE(total, (rows + 1) * (dim + 2));
#undef TAKE
    memset(s->factors, 0, padded * 4);
    for (int row = 0; row < (int)rows; row += ROWS) {
        int tile_rows = (int)least(ROWS, (int)rows - row);
        for (int r = 0; r < tile_rows; r++) {
            int token = chunk->token + (row + r) / p->group, head = kv_head * p->group + (row + r) % p->group;
            const float *from = p->q + token * p->q_stride + (int64_t)head * p->dim;
            for (int d = 0; d < p->dim; d++) s->query[(int64_t)row * p->dim + d * tile_rows + r] = from[d];
        }
    }
    return 0;
}

static void first_and_last_section(const Attention *p, const Chunk *chunk, int64_t *first, int64_t *last) {
    *first = first_key(p, p->positions[chunk->token]) / SECTION;
    *last = p->positions[chunk->token + chunk->tokens - 1] / SECTION;
}

/* All sections of a task, last chunk first: with a causal mask the later ones are the longest. */
static void run_task(void *context, int task) {
    Attention *p = context;
    const Chunk *chunk = &p->chunks[p->num_chunks - 1 - task / p->kv_heads];
    int kv_head = task % p->kv_heads, rows = chunk->tokens * p->group;
    State s;
    if (prepare(p, chunk, kv_head, &s) != 0) return;
    int64_t first, last, width = p->dim + 2;
    first_and_last_section(p, chunk, &first, &last);
    float *part = s.total + rows * width;
    for (int64_t section = first; section <= last; section++) {
        do_section(p, chunk, kv_head, &s, section);
        for (int row = 0; row < rows; row++) {
            if (section == first)
                read_section(&s, row, p->dim, s.total + row * width);
            else {
                read_section(&s, row, p->dim, part);
                merge(s.total + row * width, part, p->dim);
            }
        }
    }
    for (int row = 0; row < rows; row++) finish(p, chunk, kv_head, row, s.total + row * width);
}

/* One section of a task, when there are too few tasks for the threads; merged by merge_task. */
static void run_section(void *context, int item) {
    Attention *p = context;
    int task = item / p->num_sections, section = item % p->num_sections;
    const Chunk *chunk = &p->chunks[task / p->kv_heads];
    State s;
    int64_t first, last, width = p->dim + 2;
    first_and_last_section(p, chunk, &first, &last);
    if (section > last - first || prepare(p, chunk, task % p->kv_heads, &s) != 0) return;
    do_section(p, chunk, task % p->kv_heads, &s, first + section);
    float *to = p->partials + (int64_t)item * p->rows_per_task * width;
    for (int row = 0; row < chunk->tokens * p->group; row++) read_section(&s, row, p->dim, to + row * width);
}

static void merge_task(void *context, int task) {
    Attention *p = context;
    const Chunk *chunk = &p->chunks[task / p->kv_heads];
    int64_t first, last, width = p->dim + 2;
    first_and_last_section(p, chunk, &first, &last);
    for (int row = 0; row < chunk->tokens * p->group; row++) {
        float *total = p->partials + ((int64_t)task * p->num_sections * p->rows_per_task + row) * width;
        for (int64_t section = 1; section <= last - first; section++)
            merge(total, total + section * p->rows_per_task * width, p->dim);
        finish(p, chunk, task % p->kv_heads, row, total);
    }
}

/* Cut the rows into runs of consecutive positions, and check every table entry they need. Returns the number of
 * runs or -1. `chunks` has room for one per token. */
static int plan(const Attention *p, const int32_t *starts, int64_t num_rows, int64_t num_tokens, int64_t num_blocks,
                Chunk *chunks) {
    int count = 0;
    int64_t most = WANTED_QUERY_ROWS / p->group > 1 ? WANTED_QUERY_ROWS / p->group : 1;
    int64_t capacity = (int64_t)p->max_blocks * p->block_size;
    if (starts[0] != 0 || starts[num_rows] != num_tokens)
        return ksana_fail("paged_attention: query_starts run from %d to %d, not from 0 to %lld", starts[0],
                          starts[num_rows], (long long)num_tokens);
    for (int64_t row = 0; row < num_rows; row++)
        if (starts[row] > starts[row + 1])
            return ksana_fail("paged_attention: query_starts fall at row %lld", (long long)row);
    for (int64_t row = 0; row < num_rows; row++) {
        for (int64_t token = starts[row]; token < starts[row + 1];) {
            int64_t run = 1, position = p->positions[token];
            if (position < 0 || position >= capacity)
                return ksana_fail("paged_attention: row %lld: position %lld is outside its block table of %lld tokens",
                                  (long long)row, (long long)position, (long long)capacity);
            while (run < most && position + run < capacity && token + run < starts[row + 1] &&
                   p->positions[token + run] == position + run) run++;
            const int32_t *table = p->tables + row * p->max_blocks;
            int64_t last_block = (position + run - 1) / p->block_size;
            for (int64_t block = first_key(p, position) / p->block_size; block <= last_block; block++)
                if (table[block] < 0 || table[block] >= num_blocks)
                    return ksana_fail("paged_attention: row %lld: block table entry %lld is %d, not from 0 to %lld",
                                      (long long)row, (long long)block, table[block], (long long)num_blocks - 1);
            chunks[count++] = (Chunk){(int)row, (int)token, (int)run};
            token += run;
        }
    }
    return count;
}

/* Whether to run sections in parallel: few tasks, several sections. Sets num_sections and rows_per_task. */
static int should_split(Attention *p) {
    int64_t most = 0;
    p->rows_per_task = 0;
    for (int i = 0; i < p->num_chunks; i++) {
        int64_t first, last;
        first_and_last_section(p, &p->chunks[i], &first, &last);
        if (last - first + 1 > most) most = last - first + 1;
        if (p->chunks[i].tokens * p->group > p->rows_per_task) p->rows_per_task = p->chunks[i].tokens * p->group;
    }
    p->num_sections = (int)most;
    return ksana_threads() > 1 && most > 1 && p->num_chunks * p->kv_heads < 4 * ksana_threads();
}

/* Shapes as in ksana.kernels.attention; q has a token stride, `window` 0 means all. */
EXPORT int ksana_paged_attention(const float *q, const float *k_cache, const float *v_cache, const int32_t *tables,
                                 const int32_t *starts, const int64_t *positions, float *out, int64_t num_tokens,
                                 int64_t num_rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t q_stride,
                                 int64_t num_blocks, int64_t block_size, int64_t max_blocks, int64_t window,
                                 float scale) {
    Chunk *chunks = ksana_scratch(SCRATCH_PLAN, (size_t)(num_tokens + 1) * sizeof(Chunk));
    if (chunks == NULL) return ksana_fail("paged_attention: no memory for %lld tokens", (long long)num_tokens);
    Attention p = {
        .q = q, .k_cache = k_cache, .v_cache = v_cache, .out = out, .tables = tables, .positions = positions,
        .q_stride = q_stride, .window = window, .block_size = block_size, .max_blocks = (int)max_blocks,
        .heads = (int)heads, .kv_heads = (int)kv_heads, .group = (int)(heads / kv_heads), .dim = (int)dim,
        .scale = scale, .chunks = chunks,
    };
    p.num_chunks = plan(&p, starts, num_rows, num_tokens, num_blocks, chunks);
    if (p.num_chunks < 0) return -1;
    int tasks = p.num_chunks * p.kv_heads;
    if (should_split(&p)) {
        size_t floats = (size_t)tasks * (size_t)p.num_sections * (size_t)p.rows_per_task * (size_t)(dim + 2);
        p.partials = ksana_scratch(SCRATCH_OPERAND, floats * 4);
        if (p.partials == NULL) return ksana_fail("paged_attention: no memory for %d tasks", tasks);
        ksana_parallel(run_section, &p, tasks * p.num_sections);
        if (!p.failed) ksana_parallel(merge_task, &p, tasks);
    } else
        ksana_parallel(run_task, &p, tasks);
    return p.failed ? ksana_fail("paged_attention: no memory for the state of %d query rows", p.rows_per_task) : 0;
}
