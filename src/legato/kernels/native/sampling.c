/* From logits to tokens: the likeliest, or one drawn by temperature, top-k, top-p, min-p and typical-p, without sorting
   the vocabulary.

   A row goes by in blocks. Their largest logits, found in one pass, say where the likely tokens can be: filters look at
   a few candidates in the blocks that reach high enough, and at more only where these do not suffice. What a filter
   keeps is a cut in the scores: all above it and the first few that equal it. So tokens that tie need no order of their
   own.

   What is kept runs a race: each token's time is exponentially distributed, by a random number of its own, and the faster
   the likelier it is; the first one is drawn, each as often as its probability says (the Gumbel-max trick). Unlike one number
   that is looked up in the summed probabilities, a rounding of one logit moves that token alone and not the borders
   of all behind it: so a request's tokens stay the same where batch-mates change how its logits are rounded. */
#include <stdlib.h>

#include "legato.h"
#include "parallel.h"
#include "simd.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define BLOCK 256
#define ARGMAX_TOKENS 524288 /* of a chunk at least, so that it is worth waking a thread: some hundred microseconds */
#define SAMPLE_TOKENS 131072
#define LOWEST (-87.0f) /* below this score vexp is 0: such a token is never drawn */
#define FIRST_CANDIDATES 32 /* how many top-p tries first, and by what factor it tries more */
#define MORE_CANDIDATES 8
#define HEAD_START 23.0f /* more than a random number can add to a score */
#define BOUND_ERROR 1e-4f /* more than rounding takes off a bound, of scores above LOWEST */

typedef float vhalf __attribute__((vector_size(2 * LANES)));
typedef double vd __attribute__((vector_size(4 * LANES)));

/* What is not a number counts as the largest, as in torch. */
INLINE int above(float a, float b) { return a > b || (a != a && b == b); }

INLINE vf upper(vf a, vf b) { return pick((a > b) | (a != a), a, b); }

static float largest_of_block(const float *x) {
    vf most[4];
    UNROLL for (int i = 0; i < 4; i++) most[i] = load(x + i * LANES);
    for (int at = 4 * LANES; at < BLOCK; at += 4 * LANES)
        UNROLL for (int i = 0; i < 4; i++) most[i] = upper(load(x + at + i * LANES), most[i]);
    vf all = upper(upper(most[0], most[1]), upper(most[2], most[3]));
    COMBINE_LANES(upper, all);
    return all[0];
}

/* Those lanes of v that are wanted, side by side; a whole vector is written. Returns how many. */
INLINE int64_t pack_lanes(vf v, vi wanted, void *out) {
#if defined(__AVX512F__)
    __mmask16 mask = _mm512_movepi32_mask((__m512i)wanted);
    _mm512_storeu_ps(out, _mm512_maskz_compress_ps(mask, (__m512)v));
    return __builtin_popcount(mask);
#else
    float lanes[LANES];
    int64_t count = 0;
    memcpy(lanes, &v, sizeof v);
    for (int i = 0; i < LANES; i++) { /* without branches: they would be guessed wrong */
        memcpy((float *)out + count, lanes + i, sizeof(float));
        count -= wanted[i];
    }
    return count;
#endif
}

INLINE int any_lane(vi wanted) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)wanted) != 0;
#else
    int64_t pairs[LANES / 2], any = 0;
    memcpy(pairs, &wanted, sizeof pairs);
    for (int i = 0; i < LANES / 2; i++) any |= pairs[i];
    return any != 0;
#endif
}

typedef struct {
    const float *logits;
    int64_t vocab, blocks;
    float top, temperature;
} Row;

/* The block's logits: in `spare`, filled up with impossible tokens, if the row ends in it. */
INLINE const float *block_of(const Row *row, int64_t block, float *spare) {
    const float *x = row->logits + block * BLOCK;
    int64_t count = row->vocab - block * BLOCK;
    if (count >= BLOCK) return x;
    for (int64_t i = 0; i < BLOCK; i++) spare[i] = i < count ? x[i] : -INFINITY;
    return spare;
}

/* The largest logit; each block's in `tops`, if not NULL. The first block that has it in `*block`. */
static float find_top(const Row *row, float *tops, int64_t *block) {
    float spare[BLOCK], top = -INFINITY;
    *block = 0;
    for (int64_t b = 0; b < row->blocks; b++) {
        float candidate = largest_of_block(block_of(row, b, spare));
        if (tops) tops[b] = candidate;
        if (above(candidate, top)) top = candidate, *block = b;
    }
    return top;
}

/* The first token of a block that has its largest logit. */
static int64_t first_token(const Row *row, int64_t block, float top) {
    int64_t token = block * BLOCK;
    for (; token < row->vocab - 1; token++) {
        float x = row->logits[token];
        if (x == top || (x != x && top != top)) break;
    }
    return token;
}

INLINE int64_t blocks_of(int64_t vocab) { return (vocab + BLOCK - 1) / BLOCK; }

static Row new_row(const float *logits, int64_t vocab) {
    return (Row){.logits = logits, .vocab = vocab, .blocks = blocks_of(vocab)};
}

/* The rows of each chunk. */
INLINE int64_t chunk_rows(const Pool *pool, int64_t rows, int64_t vocab, int64_t least_tokens) {
    return chunk_size(pool, rows, 1 + least_tokens / vocab);
}

/* How the work is divided. */
typedef struct {
    const void *arguments;
    int64_t chunk_rows;
    char *memory; /* `scratch_bytes` for each thread */
} Work;

static void argmax_chunk(const void *arguments, int64_t chunk, int64_t thread) {
    const Work *w = arguments;
    const Argmax *a = w->arguments;
    (void)thread;
    for (int64_t r = chunk * w->chunk_rows; r < (chunk + 1) * w->chunk_rows && r < a->rows; r++) {
        Row row = new_row(a->logits + r * a->stride, a->vocab);
        int64_t block;
        float top = find_top(&row, NULL, &block);
        a->tokens[r] = first_token(&row, block, top);
    }
}

EXPORT int64_t legato_argmax(Pool *pool, const Argmax *a) {
    Work work = {a, chunk_rows(pool, a->rows, a->vocab, ARGMAX_TOKENS), NULL};
    run_chunks(pool, (a->rows + work.chunk_rows - 1) / work.chunk_rows, argmax_chunk, &work);
    return 0;
}

/* Returns whether any token may come. */
static int forbid(float *x, const uint8_t *mask, int64_t vocab) {
    int any = 0;
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= vocab; i += 16) {
        uint16_t bits;
        memcpy(&bits, mask + i / 8, sizeof bits);
        any |= bits;
        _mm512_mask_storeu_ps(x + i, (__mmask16)~bits, _mm512_set1_ps(-INFINITY));
    }
#endif
    for (; i < vocab; i++) {
        int may = mask[i / 8] >> i % 8 & 1;
        any |= may;
        x[i] = may ? x[i] : -INFINITY;
    }
    return any != 0;
}

static void forbid_chunk(const void *arguments, int64_t chunk, int64_t thread) {
    const Work *w = arguments;
    const Forbidding *f = w->arguments;
    (void)thread;
    for (int64_t i = chunk * w->chunk_rows; i < (chunk + 1) * w->chunk_rows && i < f->count; i++)
        f->any[i] = (uint8_t)forbid(f->logits + f->rows[i] * f->stride, f->masks + i * f->mask_bytes, f->vocab);
}

EXPORT int64_t legato_forbid(Pool *pool, const Forbidding *f) {
    Work work = {f, chunk_rows(pool, f->count, f->vocab, SAMPLE_TOKENS), NULL};
    run_chunks(pool, (f->count + work.chunk_rows - 1) / work.chunk_rows, forbid_chunk, &work);
    return 0;
}

/* Memory of a thread. */
typedef struct {
    float *tops;    /* [blocks] the largest logit of each, then its score */
    int32_t *token; /* [vocab] candidates, in the vocabulary's order */
    float *score;   /* [vocab] theirs */
    float *work[2]; /* [vocab] each */
} Scratch;

/* Shifted so that the likeliest is 0: a tiny temperature would divide it to infinity. */
static void score_all(const Row *row, const float *x, int64_t count, float *scores) {
    int64_t i = 0;
    if (row->temperature == 1) /* a division takes as long as all the rest */
        for (; i + LANES <= count; i += LANES) store(scores + i, load(x + i) - row->top);
    else
        for (; i + LANES <= count; i += LANES) store(scores + i, (load(x + i) - row->top) / row->temperature);
    for (; i < count; i++) scores[i] = (x[i] - row->top) / row->temperature;
}

/* In double: where the sum of many is at hand, the unlikely ones must not be rounded away. */
INLINE vf mass_of(vf scores, vd *totals) {
    vf mass = vexp(scores);
    vhalf halves[2];
    memcpy(halves, &mass, sizeof halves);
    UNROLL for (int h = 0; h < 2; h++) totals[h] += __builtin_convertvector(halves[h], vd);
    return mass;
}

/* The sum of the scores' masses, which go to `masses` unless that is NULL. */
INLINE double weigh(const float *scores, int64_t count, float *masses) {
    vd totals[2] = {{0}, {0}};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vf mass = mass_of(load(scores + i), totals);
        if (masses) store(masses + i, mass);
    }
    if (i < count) {
        float rest[LANES];
        for (int64_t j = 0; j < LANES; j++) rest[j] = i + j < count ? scores[i + j] : LOWEST - 1;
        store(rest, mass_of(load(rest), totals));
        if (masses) memcpy(masses + i, rest, (count - i) * sizeof(float));
    }
    totals[0] += totals[1];
    double total = 0;
    for (int64_t j = 0; j < LANES / 2; j++) total += totals[0][j];
    return total;
}

/* The mass of all tokens. */
static double weigh_row(const Row *row) {
    float spare[BLOCK], scores[BLOCK];
    double total = 0;
    for (int64_t b = 0; b < row->blocks; b++) {
        score_all(row, block_of(row, b, spare), BLOCK, scores);
        total += weigh(scores, BLOCK, NULL);
    }
    return total;
}

#define ALL INT64_MAX

/* What is kept: every score above this one, and of those that equal it the first `ties`. */
typedef struct {
    float score;
    int64_t ties;
} Cut;

/* One of them, hardly ever among the largest or the smallest. */
static float some_median(const float *values, int64_t count, uint64_t *state) {
    float v[3];
    for (int i = 0; i < 3; i++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        v[i] = values[(*state >> 33) * (uint64_t)count >> 31];
    }
    float least = v[0] < v[1] ? v[0] : v[1], most = v[0] < v[1] ? v[1] : v[0];
    return v[2] < least ? least : v[2] > most ? most : v[2];
}

/* Those above the pivot to work[0], those below to work[1], from one of which they may come. Counts each. */
INLINE void divide(const float *from, int64_t count, float pivot, float *const *work, int64_t *counts) {
    int64_t high = 0, low = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        vf v = splat(pivot);
        if (count - i >= LANES)
            v = load(from + i);
        else
            for (int64_t j = 0; j < count - i; j++) v[j] = from[i + j];
        high += pack_lanes(v, v > pivot, work[0] + high);
        low += pack_lanes(v, v < pivot, work[1] + low);
    }
    counts[0] = high, counts[1] = low;
}

/* Where the weights from the largest score down reach the limit; a score weighs its mass, or 1. Goes on in the part
   that has it, as quickselect does; equal scores weigh the same, so that they need no order. */
INLINE Cut find_cut(const float *scores, int64_t count, double limit, int by_mass, float *const *work) {
    double before = 0;
    uint64_t state = 1;
    Cut cut = {-INFINITY, ALL};
    while (count > 0) {
        int64_t counts[2];
        cut.score = some_median(scores, count, &state);
        divide(scores, count, cut.score, work, counts);
        double ties = (double)(count - counts[0] - counts[1]);
        double weight = by_mass ? weigh(work[0], counts[0], NULL) : (double)counts[0];
        double each = by_mass ? weigh(&cut.score, 1, NULL) : 1;
        int side = !(counts[0] && before + weight >= limit);
        if (side) {
            before += weight;
            double needed = ceil((limit - before) / each);
            if (needed <= ties) {
                if (needed < ties) cut.ties = needed < 1 ? 1 : (int64_t)needed; /* the likeliest stays in any case */
                break;
            }
            before += each * ties;
        }
        scores = work[side];
        count = counts[side];
    }
    return cut; /* the lowest looked at, if the limit is a rounding beyond their sum */
}

/* A score that at least so many tokens reach: as the tops of that many blocks do. */
static float floor_for(const Row *row, const Scratch *s, int64_t candidates) {
    if (candidates > row->blocks) return LOWEST;
    return fmaxf(find_cut(s->tops, row->blocks, (double)candidates, 0, s->work).score, LOWEST);
}

INLINE vi lane_numbers(void) {
    vi v;
    UNROLL for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

/* The candidates: all tokens whose score reaches the floor. Returns how many. */
static int64_t gather(const Row *row, const Scratch *s, float floor) {
    float spare[BLOCK], scores[BLOCK];
    int64_t count = 0;
    for (int64_t b = 0; b < row->blocks; b++) {
        if (s->tops[b] < floor) continue;
        score_all(row, block_of(row, b, spare), BLOCK, scores);
        for (int64_t i = 0; i < BLOCK; i += LANES) {
            vf v = load(scores + i);
            pack_lanes((vf)(lane_numbers() + (int32_t)(b * BLOCK + i)), v >= floor, s->token + count);
            count += pack_lanes(v, v >= floor, s->score + count);
        }
    }
    return count;
}

/* The last of the tokens at the cut that is kept. */
static int32_t last_tie(const Scratch *s, int64_t count, Cut cut) {
    if (cut.ties == ALL) return INT32_MAX;
    int64_t i = 0;
    for (; i < count; i++)
        if (s->score[i] == cut.score && --cut.ties == 0) break;
    return s->token[i];
}

/* Of the candidates those that the cut keeps. Returns how many. */
static int64_t keep(const Scratch *s, int64_t count, Cut cut) {
    int32_t last = last_tie(s, count, cut);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        vf v = load(s->score + i);
        vi token = (vi)load_u32(s->token + i);
        vi wanted = (v > cut.score) | ((v == cut.score) & (token <= last));
        if (count - i < LANES) wanted &= lane_numbers() < (int32_t)(count - i);
        pack_lanes((vf)token, wanted, s->token + kept);
        kept += pack_lanes(v, wanted, s->score + kept);
    }
    return kept;
}

static int64_t keep_top_k(const Row *row, const Scratch *s, int64_t top_k) {
    int64_t count = gather(row, s, floor_for(row, s, top_k));
    Cut cut = find_cut(s->score, count, (double)top_k, 0, s->work);
    cut.ties = ALL; /* that tie for the last place */
    return keep(s, count, cut);
}

static int64_t keep_top_p(const Row *row, const Scratch *s, float top_p) {
    double limit = top_p * weigh_row(row);
    int64_t candidates = FIRST_CANDIDATES, count;
    for (;; candidates *= MORE_CANDIDATES) {
        float floor = floor_for(row, s, candidates);
        count = gather(row, s, floor);
        if (floor == LOWEST || weigh(s->score, count, NULL) >= limit) break;
    }
    return keep(s, count, find_cut(s->score, count, limit, 1, s->work));
}

/* The sum of the masses at distances up to `most`. */
static double mass_within(const float *masses, const float *distances, int64_t count, float most) {
    vd totals[2] = {{0}, {0}};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vf mass = pick(load(distances + i) <= splat(most), load(masses + i), splat(0));
        vhalf halves[2];
        memcpy(halves, &mass, sizeof halves);
        UNROLL for (int h = 0; h < 2; h++) totals[h] += __builtin_convertvector(halves[h], vd);
    }
    totals[0] += totals[1];
    double total = 0;
    for (int64_t j = 0; j < LANES / 2; j++) total += totals[0][j];
    for (; i < count; i++) total += distances[i] <= most ? masses[i] : 0;
    return total;
}

/* The smallest distance within which the limit is reached: floats that are not negative are in the order of their bits. */
static float find_distance(const float *masses, const float *distances, int64_t count, double limit) {
    uint32_t low = 0, high = 0x7f800000; /* infinity */
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        float most;
        memcpy(&most, &middle, sizeof most);
        if (mass_within(masses, distances, count, most) >= limit)
            high = middle;
        else
            low = middle + 1;
    }
    float found;
    memcpy(&found, &low, sizeof found);
    return found;
}

/* Of the candidates those whose information is nearest to the expected one. */
static int64_t keep_typical(const Scratch *s, int64_t count, float typical_p) {
    float *masses = s->work[0], *distances = s->work[1];
    double total = weigh(s->score, count, masses), expected = 0;
    for (int64_t i = 0; i < count; i++)
        if (masses[i] > 0) expected -= masses[i] * (double)s->score[i];
    /* -log p = log total - score, so what is added to both falls out of their difference */
    float center = (float)(expected / total);
    for (int64_t i = 0; i < count; i++) distances[i] = masses[i] > 0 ? fabsf(-s->score[i] - center) : INFINITY;
    float most = find_distance(masses, distances, count, typical_p * total);
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        s->token[kept] = s->token[i];
        s->score[kept] = s->score[i];
        kept += distances[i] <= most && masses[i] > 0;
    }
    return kept;
}

/* A token, and the logarithm of its probability under what it was drawn from. */
typedef struct {
    int64_t token;
    double logprob;
} Drawn;

/* Who is ahead. */
typedef struct {
    uint64_t key; /* the row's */
    double best;  /* a score plus what its random number adds */
    float bar;    /* what a bound of that must reach: `best`, less what rounding may take off */
    float score;
    int64_t token;
} Race;

/* 32 random bits for each token. The multipliers are those of Wellons' `lowbias32`. */
INLINE vu random_bits(uint64_t key, vu token) {
    vu x = token * 0x9e3779b9u + (uint32_t)key;
    x = (x ^ x >> 16) * 0x7feb352du ^ (uint32_t)(key >> 32);
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

/* The logarithm of an exponentially distributed number's inverse. */
INLINE double head_start(uint32_t bits) { return -log(-log1p(-(bits + 0.5) * 0x1p-32)); }

static void run_lanes(Race *race, vf scores, vu tokens, vu bits) {
    for (int i = 0; i < LANES; i++) {
        double reached = scores[i] + head_start(bits[i]);
        if (!(reached > race->best)) continue;
        race->best = reached, race->bar = (float)reached - BOUND_ERROR;
        race->score = scores[i], race->token = tokens[i];
    }
}

/* No more than LANES tokens run. Hardly ever does one come close enough to the best to need logarithms: with u in
   (0, 1), -log(-log(1 - u)) is at most -log u, and the bits of a float are a little below the logarithm of it. */
INLINE void run_tokens(Race *race, vf scores, vu tokens) {
    vu bits = random_bits(race->key, tokens);
    vf u = __builtin_convertvector((vi)(bits >> 8), vf);
    vf log2_u = __builtin_convertvector((vi)u, vf) * 0x1p-23f - (127.0f + 24.0f);
    if (any_lane(scores - log2_u * 0.693147182f >= splat(race->bar))) run_lanes(race, scores, tokens, bits);
}

static Race new_race(uint64_t key) { return (Race){.key = key, .best = -INFINITY, .bar = -INFINITY}; }

static Drawn draw_candidate(const Scratch *s, int64_t count, uint64_t key, int with_logprob) {
    Race race = new_race(key);
    for (int64_t i = 0; i < count; i += LANES) {
        vf scores = load(s->score + i);
        if (count - i < LANES) scores = pick(lane_numbers() < (int32_t)(count - i), scores, splat(-INFINITY));
        run_tokens(&race, scores, load_u32(s->token + i));
    }
    return (Drawn){race.token, race.score - (with_logprob ? log(weigh(s->score, count, NULL)) : 0)};
}

static Drawn draw_from_all(const Row *row, const Scratch *s, int64_t likeliest, uint64_t key, int with_logprob) {
    float spare[BLOCK], scores[BLOCK];
    Race race = new_race(key);
    run_tokens(&race, pick(lane_numbers() < 1, splat(0), splat(-INFINITY)), (vu)(lane_numbers() + (int32_t)likeliest));
    for (int64_t b = 0; b < row->blocks; b++) {
        if ((s->tops[b] - row->top) / row->temperature + HEAD_START < race.bar) continue;
        score_all(row, block_of(row, b, spare), BLOCK, scores);
        for (int64_t i = 0; i < BLOCK; i += LANES)
            run_tokens(&race, load(scores + i), (vu)(lane_numbers() + (int32_t)(b * BLOCK + i)));
    }
    return (Drawn){race.token, race.score - (with_logprob ? log(weigh_row(row)) : 0)};
}

/* Of one row. */
typedef struct {
    float temperature, top_p, min_p, typical_p;
    int64_t top_k;
} Filters;

static Drawn draw_filtered(const Row *row, const Scratch *s, const Filters *f, uint64_t key, int with_logprob) {
    float floor = f->min_p > 0 ? fmaxf(logf(f->min_p), LOWEST) : LOWEST;
    int64_t count;
    score_all(row, s->tops, row->blocks, s->tops);
    if (f->top_k) {
        count = keep_top_k(row, s, f->top_k);
        if (f->top_p < 1) {
            double limit = f->top_p * weigh(s->score, count, NULL);
            count = keep(s, count, find_cut(s->score, count, limit, 1, s->work));
        }
    } else if (f->top_p < 1) {
        count = keep_top_p(row, s, f->top_p);
    } else {
        count = gather(row, s, floor);
    }
    if (f->min_p > 0) count = keep(s, count, (Cut){floor, ALL});
    if (f->typical_p < 1) count = keep_typical(s, count, f->typical_p);
    return draw_candidate(s, count, key, with_logprob);
}

static Drawn sample_row(Row row, const Scratch *s, Filters f, uint64_t key, int with_logprob) {
    int64_t block;
    row.temperature = f.temperature > 0 ? f.temperature : 1;
    row.top = find_top(&row, s->tops, &block);
    int64_t likeliest = first_token(&row, block, row.top);
    if (!isfinite(row.top)) return (Drawn){likeliest, NAN}; /* nothing to compute with */
    if (f.top_k >= row.vocab) f.top_k = 0;
    if (f.temperature > 0 && (f.top_p < 1 || f.top_k > 0 || f.min_p > 0 || f.typical_p < 1))
        return draw_filtered(&row, s, &f, key, with_logprob);
    if (f.temperature > 0) return draw_from_all(&row, s, likeliest, key, with_logprob);
    return (Drawn){likeliest, with_logprob ? -log(weigh_row(&row)) : 0};
}

/* What is packed ends with a whole vector. */
INLINE int64_t width_of(int64_t vocab) { return blocks_of(vocab) * BLOCK + LANES; }

static int64_t scratch_bytes(int64_t vocab) {
    int64_t of_tokens = 3 * sizeof(float) + sizeof(int32_t);
    return (blocks_of(vocab) * sizeof(float) + width_of(vocab) * of_tokens + 63) / 64 * 64; /* whole cache lines */
}

static Scratch scratch_at(char *memory, int64_t vocab) {
    Scratch s = {.tops = (float *)memory};
    s.score = s.tops + blocks_of(vocab);
    s.work[0] = s.score + width_of(vocab);
    s.work[1] = s.work[0] + width_of(vocab);
    s.token = (int32_t *)(s.work[1] + width_of(vocab));
    return s;
}

static void sample_chunk(const void *arguments, int64_t chunk, int64_t thread) {
    const Work *w = arguments;
    const Sampling *a = w->arguments;
    Scratch scratch = scratch_at(w->memory + thread * scratch_bytes(a->vocab), a->vocab);
    for (int64_t r = chunk * w->chunk_rows; r < (chunk + 1) * w->chunk_rows && r < a->rows; r++) {
        Filters filters = {a->temperature[r], a->top_p[r], a->min_p[r], a->typical_p[r], a->top_k[r]};
        Drawn drawn = sample_row(
            new_row(a->logits + r * a->stride, a->vocab), &scratch, filters, a->keys[r], a->wants_logprob[r]);
        a->tokens[r] = drawn.token;
        a->logprobs[r] = drawn.logprob;
    }
}

EXPORT int64_t legato_sample(Pool *pool, const Sampling *a) {
    Work work = {a, chunk_rows(pool, a->rows, a->vocab, SAMPLE_TOKENS), NULL};
    work.memory = malloc((size_t)(num_threads(pool) * scratch_bytes(a->vocab))); /* what is not used stays untouched */
    if (!work.memory) return 1;
    run_chunks(pool, (a->rows + work.chunk_rows - 1) / work.chunk_rows, sample_chunk, &work);
    free(work.memory);
    return 0;
}
