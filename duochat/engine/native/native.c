/* A small Llama on the CPU: up to eight nodes of a tree in one pass over the weights, and the candidates after each.

   Read it from `layers`, which is the model: before it stand its parts, after it what the drafter calls, `run`.
   All threads of the team go through it together, each taking its part of every step; a barrier ends a step.
   Everything that differs between processors is in `dot` and `halves`. */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include "../choosing.c"

enum { MOST = 8, ROWS = 16, QUANT = 32, TILE = 8, TEAM = 64, STEPS = 6 };
/* nodes of a pass; rows of a group; inputs that share a scale; queries that share a reading of the cache; threads,
   and steps of their barrier */

#ifndef SPIN
#define SPIN 1e-3 /* seconds that a thread waits awake: between two batches of a busy lane passes less */
#endif

#ifndef PIECE
#define PIECE (1 << 21) /* a huge page; a sanitizer sees more of small ones */
#endif

typedef uint16_t half; /* IEEE, 16 bits */

/* ---- What differs between processors: so many rows (or cells) a vector, and two primitives. ---- */

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define PATH "AVX-512 VNNI"
enum { LANES = 16, ZERO8 = 128 }; /* ZERO8: what an 8-bit weight of 0 is stored as */
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define PATH "AVX2"
enum { LANES = 8, ZERO8 = 0 };
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define PATH "NEON dot product"
enum { LANES = 4, ZERO8 = 0 };
#else
#define PATH "plain C"
enum { LANES = 4, ZERO8 = 128 };
#endif

typedef float Floats __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(4 * LANES), may_alias));
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* sum[row] += four weights of the row (4 bits each: 0 to 15; 8 bits: plus ZERO8) times the four numbers of x.
   begun, settled: a block's sum before and after, with `more` in it. AVX2 adds each two products of 4 bits in 16 bits,
   which hold 8 times 2 · 15 · 127. halves: LANES numbers of 16 bits. */
#define begun(more, bits) ((Ints){0} + (more))
#define settled(sum, more, bits) (sum)
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
INLINE Ints dot(Ints sum, Bytes weights, int32_t x, int bits) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
}
INLINE Floats halves(const half *h) { return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)h)); }
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
INLINE Ints dot(Ints sum, Bytes weights, int32_t x, int bits) {
    __m256i w = (__m256i)weights, v = _mm256_set1_epi32(x);
    if (bits == 4) return (Ints)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16(w, v));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(v, w));
    return sum + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#undef begun
#undef settled
INLINE Ints begun(int32_t more, int bits) { return (Ints){0} + (bits == 8 ? more : 0); }
INLINE Ints settled(Ints sum, int32_t more, int bits) {
    if (bits == 8) return sum;
    return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)) + more;
}
INLINE Floats halves(const half *h) { return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const void *)h)); }
#elif defined(__ARM_FEATURE_DOTPROD)
INLINE Ints dot(Ints sum, Bytes weights, int32_t x, int bits) {
    return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, vreinterpretq_s8_s32(vdupq_n_s32(x)));
}
INLINE Floats halves(const half *h) { return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h))); }
#else
INLINE Ints dot(Ints sum, Bytes weights, int32_t x, int bits) {
    Ints w = (Ints)weights;
    sum += (w & 255) * (int8_t)x + (w >> 8 & 255) * (int8_t)(x >> 8);
    return sum + (w >> 16 & 255) * (int8_t)(x >> 16) + (w >> 24 & 255) * (x >> 24);
}
INLINE Floats halves(const half *h) {
    Ints bits = {h[0], h[1], h[2], h[3]};
    Floats size = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;
    return (Floats)((Ints)size | (bits & 0x8000) << 16);
}
#endif

static float widen(half h) {
    union { uint32_t bits; float value; } size = {(uint32_t)(h & 0x7fff) << 13};
    return size.value * (h & 0x8000 ? -0x1p112f : 0x1p112f);
}

/* The nearest of 16 bits, ties to even; beyond 65504, the greatest. */
static inline half narrow(float x) {
    union { float value; uint32_t bits; } size = {fminf(fabsf(x), 65504) * 0x1p-112f};
    return (half)((size.bits + 0xfff + (size.bits >> 13 & 1)) >> 13 | (x < 0 ? 0x8000 : 0));
}

/* ---- The model and its cache. ---- */

enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q8_0 = 8 }; /* as GGUF numbers them */

typedef struct {
    const uint8_t *data; /* as in the file */
    int32_t type, rows, cols;
} Tensor;

/* Groups of 16 rows; in a group, for each 32 inputs, four bytes of row 0, four of row 1, ..., then the next four. Of 4
   bits, a byte holds the inputs i and i + 16. */
typedef struct {
    uint8_t *weights;
    half *scales, *offsets; /* 16 for each 32 inputs of a group; what is added to a weight: of Q4_1 alone */
    int type, rows, cols;
} Matrix;

typedef struct {
    float *attention_norm, *feed_norm;
    Matrix query, key, value, output, gate, up, down;
} Layer;

/* 32 numbers of a vector in 8 bits: a line of the cache, which one thread writes. A pass's are held by place in the
   vector, then by node. */
typedef struct {
    _Alignas(64) int8_t numbers[QUANT];
    float scale, sum, squares; /* sum: of what the numbers stand for. squares: summed, of the stream before its norm */
    int32_t shift;             /* -8 times the sum of the numbers */
} Block;

typedef struct {
    int32_t width, layers, heads, groups, head, inner, cells; /* groups: of heads that share keys */
    float epsilon, base;
} Shape;

/* A token to be decoded. Its keys and values are written to `cell`; it sees those of `parent`, and what that sees. */
typedef struct {
    int32_t token, position, cell, parent, wanted; /* parent: -1 = none. wanted: give its candidates */
} Node;

#define FORBIDDEN -1e6f /* as penalties.py */

/* What penalties do to logits: `count` places, and for each wanted node what they are divided by and gain. */
typedef struct {
    int32_t count;
    const int64_t *place;
    const float *divisor, *added;
    const uint8_t *allowed; /* by a grammar, for each of a row's logits; NULL: all */
} Changes;

typedef struct {
    _Alignas(64) atomic_uint said;
} Signal;

typedef struct Lane {
    Shape shape;
    Tensor embedding;
    Layer *layer;
    float *last_norm;
    Matrix head;
    int64_t *names;
    half *keys, *values; /* [layer][group of heads][16 cells]: [head][16], and [head / 16][16][16] */
    int32_t *parents;      /* of each cell */
    double *frequency;     /* of each pair of a head's rows */
    void *held;            /* all memory, linked; the rest of the last piece: */
    char *free;
    size_t left;
    /* The pass that runs now: */
    int nodes, wanted, threads, ready, failed, cut; /* ready: threads that have `scores`. cut: the last pass was left */
    int token[MOST], cell[MOST], position[MOST], every[MOST], want[MOST];
    float *stream, *queries, *mixed, *logits, *turns, *peak, *weight; /* of each node */
    Block *input, *heard, *hidden; /* what is multiplied: of the stream, of attention, of the feed-forward part */
    uint16_t *seen; /* [node][cells / 16]: which cells it sees */
    int *blocks, used;
    const Choice *choice;
    const Changes *changes; /* NULL: none */
    int chosen;             /* wanted nodes of the passes before */
    int32_t *tokens, *found;
    float *probs;
    double choosing;
    float *scores[TEAM]; /* of each thread */
    _Alignas(64) atomic_int stop;
    _Alignas(64) atomic_int inside; /* threads that have not left a pass, but the caller's */
    unsigned met;           /* barriers until now */
    Signal signals[2][STEPS][TEAM];
} Lane;

/* Each thread that calls `run` has a team of its own, which goes through the passes of all lanes that it calls: whose
   turn it is finds them awake. */
typedef struct {
    _Alignas(64) atomic_uint called; /* counts the passes that want this thread */
    atomic_int asleep;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t bell;
    Lane *lane; /* NULL: the team is dismissed */
    int part;   /* of the pass */
} Member;

typedef struct {
    Member *member[TEAM];
    int size;
} Team;

static int groups_of(int rows) { return (rows + ROWS - 1) / ROWS; }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* ---- Threads: they spin while work is near, and sleep when it is not. ---- */

static inline void rest(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Give the core to a partner that waits for it, which `sched_yield` does not always do: for 0.05 ms or so. */
static void doze(void) { nanosleep(&(struct timespec){0, 1}, NULL); }

/* For what takes less than 0.1 ms or so, unless the partner has lost its core. */
static void linger(int spins) { spins < 4000 ? rest() : doze(); }

/* All threads of the pass meet here; true: leave it. In each step a thread tells another one, twice as far on as in the
   step before, that it is there, and so are all whom it has heard of (a dissemination barrier: Hensgen, Finkel and
   Manber 1988); the number of the barrier, and whether one of them was told to stop. A thread may be a barrier ahead, so
   there are two sets of signals. */
static int barrier(Lane *m, int self, unsigned *met) {
    Signal(*signal)[TEAM] = m->signals[++*met & 1];
    unsigned said = *met << 1 | (unsigned)atomic_load_explicit(&m->stop, memory_order_relaxed), heard;
    for (int step = 1; step < m->threads; step *= 2, signal++) {
        atomic_store_explicit(&signal[0][(self + step) % m->threads].said, said, memory_order_release);
        atomic_uint *mine = &signal[0][self].said;
        for (int spins = 0; ((heard = atomic_load_explicit(mine, memory_order_acquire)) ^ said) > 1; spins++)
            linger(spins);
        said |= heard & 1;
    }
    return said & 1;
}

static void call(Member *t, Lane *m, int part) {
    t->lane = m;
    t->part = part;
    atomic_fetch_add(&t->called, 1);
    if (!atomic_load(&t->asleep)) return;
    pthread_mutex_lock(&t->lock);
    pthread_cond_signal(&t->bell);
    pthread_mutex_unlock(&t->lock);
}

static void await(Member *t, unsigned last) {
    const double until = now() + SPIN;
    do {
        for (int i = 0; i < 64; i++, rest())
            if (atomic_load_explicit(&t->called, memory_order_acquire) != last) return;
        sched_yield(); /* the other lane's team may want this core */
    } while (now() < until);
    pthread_mutex_lock(&t->lock);
    atomic_store(&t->asleep, 1);
    while (atomic_load(&t->called) == last) pthread_cond_wait(&t->bell, &t->lock);
    atomic_store(&t->asleep, 0);
    pthread_mutex_unlock(&t->lock);
}

/* This thread's part of so many units of work. */
static void part(const Lane *m, int self, int units, int *from, int *to) {
    *from = (int)((int64_t)units * self / m->threads);
    *to = (int)((int64_t)units * (self + 1) / m->threads);
}

/* ---- The parts of a layer. ---- */

/* 32 numbers in 8 bits. */
static void quantise(const float *x, Block *to) {
    float most = 1e-20f;
    for (int i = 0; i < QUANT; i++) most = fmaxf(most, fabsf(x[i]));
    int32_t sum = 0;
    for (int i = 0; i < QUANT; i++) {
        int number = (int)(x[i] * (127 / most) + 127.5f) - 127;
        sum += number;
        to->numbers[i] = (int8_t)number;
    }
    to->scale = most / 127;
    to->sum = most / 127 * sum;
    to->shift = -8 * sum;
}

/* Hand block b of a node on to the next product, times `norm`; by what RMS norm divides is left to that. */
static void hand_on(const Lane *m, int t, int b, const float *norm, Block *to) {
    const float *x = m->stream + t * m->shape.width + QUANT * b;
    float normed[QUANT] __attribute__((aligned(64)));
    Floats squares = {0};
    for (int i = 0; i < QUANT; i += LANES) squares += *(const Floats *)(x + i) * *(const Floats *)(x + i);
    for (int i = 0; i < QUANT; i++) normed[i] = x[i] * norm[QUANT * b + i];
    quantise(normed, to);
    to->squares = 0;
    for (int i = 0; i < LANES; i++) to->squares += squares[i];
}

/* What `hand_on` left: 1 / RMS of each vector of the stream. */
static void find_norms(const Lane *m, int n, float *factor) {
    const int blocks = m->shape.width / QUANT;
    for (int i = 0; i < n; i++) {
        float sum = 0;
        for (int b = 0; b < blocks; b++) sum += m->input[b * n + i].squares;
        factor[i] = 1 / sqrtf(sum / m->shape.width + m->shape.epsilon);
    }
}

/* y[node] = 16 rows of the matrix times the node's vector, times its factor: the weights are read once for all n. */
INLINE void multiply(const Matrix *w, int group, const Block *x, const float *factor, float y[][ROWS], int n, int type) {
    const int bits = type == Q8_0 ? 8 : 4, zero = type == Q8_0 ? ZERO8 / 8 : type == Q4_0;
    const int blocks = w->cols / QUANT, bytes = QUANT * ROWS * bits / 8;
    for (int lane = 0; lane < ROWS; lane += LANES) {
        const uint8_t *weights = w->weights + (size_t)group * blocks * bytes + 4 * lane;
        const half *scales = w->scales + (size_t)group * blocks * ROWS + lane;
        const half *offsets = type == Q4_1 ? w->offsets + (size_t)group * blocks * ROWS + lane : NULL;
        Floats total[MOST];
        UNROLL for (int t = 0; t < n; t++) total[t] = (Floats){0};
        const Block *of = x;
        for (int b = 0; b < blocks; b++, weights += bytes, scales += ROWS, of += n) {
            Ints sum[MOST];
            UNROLL for (int t = 0; t < n; t++) sum[t] = begun(of[t].shift * zero, bits);
            UNROLL for (int i = 0; i < QUANT * bits / 32; i++) {
                Bytes w8 = *(const Bytes *)(weights + 4 * ROWS * i), low = (Bytes)(w8 & 15), high = (Bytes)(w8 >> 4);
                UNROLL for (int t = 0; t < n; t++) {
                    const int32_t *numbers = (const int32_t *)of[t].numbers;
                    sum[t] = dot(sum[t], bits == 4 ? low : w8, numbers[i], bits);
                    if (bits == 4) sum[t] = dot(sum[t], high, numbers[i + 4], bits);
                }
            }
            Floats scale = halves(scales);
            UNROLL for (int t = 0; t < n; t++) {
                Ints all = settled(sum[t], of[t].shift * zero, bits);
                total[t] += __builtin_convertvector(all, Floats) * (scale * of[t].scale);
            }
            if (type != Q4_1) continue;
            Floats offset = halves(offsets + (size_t)b * ROWS);
            UNROLL for (int t = 0; t < n; t++) total[t] += offset * of[t].sum;
        }
        UNROLL for (int t = 0; t < n; t++) *(Floats *)(y[t] + lane) = total[t] * factor[t];
    }
}

static void product(const Matrix *w, int group, const Block *x, const float *factor, int n, float y[][ROWS]) {
#define CASES(OF) OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8)
#define MULTIPLY(n) \
    case n: \
        if (w->type == Q4_0) multiply(w, group, x, factor, y, n, Q4_0); \
        else if (w->type == Q4_1) multiply(w, group, x, factor, y, n, Q4_1); \
        else multiply(w, group, x, factor, y, n, Q8_0); \
        break;
    switch (n) { CASES(MULTIPLY) }
}

/* Turn pairs of 16 rows by the angles of a position. */
static void turn(float *y, const float *angles) {
    for (int i = 0; i < ROWS; i += 2) {
        float a = y[i], b = y[i + 1], cosine = angles[i], sine = angles[i + 1];
        y[i] = a * cosine - b * sine;
        y[i + 1] = a * sine + b * cosine;
    }
}

/* Where 16 cells of a group of heads begin. */
static half *block_of(const Lane *m, half *cache, int layer, int group, int block) {
    const Shape *s = &m->shape;
    return cache + (((size_t)layer * s->groups + group) * (s->cells / ROWS) + block) * s->head * ROWS;
}

/* Bytes before the numbers of 32 weights in the file: their scale, and of Q4_1 the offset. */
static int head_of(const Tensor *t) { return t->type == Q4_1 ? 4 : 2; }

/* One row of a tensor as it is in the file. */
static void read_row(const Tensor *from, int row, float *to) {
    const int cols = from->cols;
    if (from->type == F32) memcpy(to, from->data + (size_t)row * cols * 4, cols * sizeof(float));
    for (int i = 0; from->type == F16 && i < cols; i++) {
        half h;
        memcpy(&h, from->data + ((size_t)row * cols + i) * 2, 2);
        to[i] = widen(h);
    }
    if (from->type == F32 || from->type == F16) return;
    const int head = head_of(from), bytes = from->type == Q8_0 ? 32 : 16;
    const uint8_t *block = from->data + (size_t)row * (cols / QUANT) * (head + bytes);
    for (int b = 0; b < cols / QUANT; b++, block += head + bytes, to += QUANT) {
        half about[2];
        memcpy(about, block, head);
        const float scale = widen(about[0]), offset = from->type == Q4_1 ? widen(about[1]) : 0;
        for (int i = 0; i < QUANT; i++) {
            const uint8_t *numbers = block + head;
            int number = bytes == 32 ? (int8_t)numbers[i] : i < 16 ? numbers[i] & 15 : numbers[i - 16] >> 4;
            to[i] = scale * (from->type == Q4_0 ? number - 8 : number) + offset;
        }
    }
}

/* A node's embedding, and the angles by which its place turns a head. */
static void embed(Lane *m, int self) {
    const Shape *s = &m->shape;
    int from, to;
    part(m, self, m->nodes, &from, &to);
    for (int t = from; t < to; t++) {
        read_row(&m->embedding, m->token[t], m->stream + t * s->width);
        for (int b = 0; b < s->width / QUANT; b++)
            hand_on(m, t, b, m->layer->attention_norm, &m->input[b * m->nodes + t]);
        for (int i = 0; i < s->head; i += 2) {
            double angle = m->position[t] * m->frequency[i / 2];
            m->turns[t * s->head + i] = (float)cos(angle);
            m->turns[t * s->head + i + 1] = (float)sin(angle);
        }
    }
}

/* Queries, keys and values of the nodes; the last two go to their cells. */
static void project(Lane *m, int self, int layer) {
    const Shape *s = &m->shape;
    const Layer *l = &m->layer[layer];
    const int queries = s->heads * s->head / ROWS, keys = s->groups * s->head / ROWS;
    float norm[MOST];
    find_norms(m, m->nodes, norm);
    int from, to;
    part(m, self, queries + 2 * keys, &from, &to);
    for (int g = from; g < to; g++) {
        float y[MOST][ROWS] __attribute__((aligned(64)));
        const Matrix *w = g < queries ? &l->query : g < queries + keys ? &l->key : &l->value;
        const int at = g < queries ? g : (g - queries) % keys, row = at * ROWS % s->head, group = at * ROWS / s->head;
        product(w, at, m->input, norm, m->nodes, y);
        for (int t = 0; t < m->nodes; t++) {
            const int block = m->cell[t] / ROWS, cell = m->cell[t] % ROWS;
            if (w != &l->value) turn(y[t], m->turns + t * s->head + row);
            if (w == &l->query) {
                memcpy(m->queries + t * s->heads * s->head + ROWS * at, y[t], sizeof y[t]);
            } else if (w == &l->key) {
                half *key = block_of(m, m->keys, layer, group, block) + row * ROWS + cell;
                for (int i = 0; i < ROWS; i++) key[ROWS * i] = narrow(y[t][i]);
            } else {
                half *value = block_of(m, m->values, layer, group, block) + (row + cell) * ROWS;
                for (int i = 0; i < ROWS; i++) value[i] = narrow(y[t][i]);
            }
        }
    }
}

/* out[i][16] += sum over r of factor[i][r] * h[r][16]: for keys, a score of 16 cells; for values, 16 numbers of a head.
   A block is read from end to end, for a long cache comes from memory. */
INLINE void combine(const half *h, int count, float **factor, float **out, int n) {
    for (int lane = 0; lane < ROWS; lane += LANES) {
        Floats sum[TILE];
        UNROLL for (int i = 0; i < n; i++) sum[i] = *(Floats *)(out[i] + lane);
        for (int r = 0; r < count; r++) {
            Floats row = halves(h + ROWS * r + lane);
            UNROLL for (int i = 0; i < n; i++) sum[i] += row * factor[i][r];
        }
        UNROLL for (int i = 0; i < n; i++) *(Floats *)(out[i] + lane) = sum[i];
    }
}

/* score[i] = exp(score - greatest), and their sum: added up cell by cell, so cells out of sight change no bit of it. */
INLINE void soften(float **score, int cells, float scale, float *sum, int n) {
    for (int i = 0; i < n; i++) {
        float most = score[i][0];
        for (int c = 0; c < cells; c++) most = fmaxf(most, score[i][c]);
        for (int c = 0; c < cells; c++) score[i][c] = exponential((score[i][c] - most) * scale);
    }
    UNROLL for (int i = 0; i < n; i++) sum[i] = 0;
    for (int c = 0; c < cells; c++)
        UNROLL for (int i = 0; i < n; i++) sum[i] += score[i][c];
}

/* What n queries of a group of heads see, mixed: the nodes' in turn, from the first on. Cells out of sight start far
   below. */
INLINE void attend_some(Lane *m, float *scores, int layer, int group, int first, int n) {
    const Shape *s = &m->shape;
    const int each = s->heads / s->groups;
    float *query[TILE], *score[TILE], *out[TILE], *from[TILE], *to[TILE], all[TILE];
    for (int i = 0; i < n; i++) {
        const int t = (first + i) / each, at = (t * s->heads + group * each + (first + i) % each) * s->head;
        const uint16_t *seen = m->seen + t * (s->cells / ROWS);
        query[i] = m->queries + at, out[i] = m->mixed + at, score[i] = scores + (size_t)i * s->cells;
        for (int b = 0; b < m->used; b++)
            for (int c = 0; c < ROWS; c++) score[i][ROWS * b + c] = seen[m->blocks[b]] >> c & 1 ? 0 : -1e9f;
    }
    for (int b = 0; b < m->used; b++) {
        for (int i = 0; i < n; i++) to[i] = score[i] + ROWS * b;
        combine(block_of(m, m->keys, layer, group, m->blocks[b]), s->head, query, to, n);
    }
    soften(score, ROWS * m->used, 1 / sqrtf(s->head), all, n);
    for (int i = 0; i < n; i++) memset(out[i], 0, s->head * sizeof(float));
    for (int b = 0; b < m->used; b++)
        for (int row = 0; row < s->head; row += ROWS) {
            for (int i = 0; i < n; i++) from[i] = score[i] + ROWS * b, to[i] = out[i] + row;
            combine(block_of(m, m->values, layer, group, m->blocks[b]) + row * ROWS, ROWS, from, to, n);
        }
    for (int i = 0; i < n; i++)
        for (int row = 0; row < s->head; row++) out[i][row] /= all[i];
}

/* A unit is a group's heads of some nodes: of more than one where that leaves work for all threads. */
static void attend(Lane *m, int self, int layer) {
    const Shape *s = &m->shape;
    const int each = s->heads / s->groups, blocks = each * s->head / QUANT, share = m->nodes * s->groups / m->threads;
    const int together = share < 1 || each > TILE ? 1 : share < TILE / each ? share : TILE / each;
    const int units = (m->nodes + together - 1) / together;
    int from, to;
    part(m, self, s->groups * units, &from, &to);
    for (int unit = from; unit < to; unit++) {
        const int group = unit / units, node = unit % units * together;
        const int end = node + together < m->nodes ? node + together : m->nodes;
        for (int first = node * each; first < end * each; first += TILE) {
#define ATTEND(n) case n: attend_some(m, m->scores[self], layer, group, first, n); break;
            switch (end * each - first < TILE ? end * each - first : TILE) { CASES(ATTEND) }
        }
        for (int t = node; t < end; t++)
            for (int b = 0, at = group * blocks; b < blocks; b++, at++)
                quantise(m->mixed + t * s->heads * s->head + QUANT * at, &m->heard[at * m->nodes + t]);
    }
}

/* Add a product to the stream, and hand n nodes of that on. */
static void add(Lane *m, int self, const Matrix *w, const Block *x, const float *norm, const int *who, int n) {
    static const float as_it_is[MOST] = {1, 1, 1, 1, 1, 1, 1, 1};
    int from, to;
    part(m, self, w->rows / QUANT, &from, &to);
    for (int b = from; b < to; b++) {
        for (int g = b * QUANT / ROWS; g < (b + 1) * QUANT / ROWS; g++) {
            float y[MOST][ROWS] __attribute__((aligned(64)));
            product(w, g, x, as_it_is, m->nodes, y);
            for (int t = 0; t < m->nodes; t++)
                for (int i = 0; i < ROWS; i++) m->stream[t * m->shape.width + ROWS * g + i] += y[t][i];
        }
        for (int i = 0; i < n; i++) hand_on(m, who[i], b, norm, &m->input[b * n + i]);
    }
}

/* hidden = silu(gate) * up, in 8 bits. */
static void feed(Lane *m, int self, const Layer *l) {
    float norm[MOST];
    find_norms(m, m->nodes, norm);
    int from, to;
    part(m, self, m->shape.inner / QUANT, &from, &to);
    for (int b = from; b < to; b++) {
        float gate[MOST][ROWS] __attribute__((aligned(64))), up[MOST][ROWS] __attribute__((aligned(64)));
        float hidden[MOST][QUANT];
        for (int g = 0; g < QUANT / ROWS; g++) {
            product(&l->gate, b * (QUANT / ROWS) + g, m->input, norm, m->nodes, gate);
            product(&l->up, b * (QUANT / ROWS) + g, m->input, norm, m->nodes, up);
            for (int t = 0; t < m->nodes; t++)
                for (int i = 0; i < ROWS; i++)
                    hidden[t][ROWS * g + i] = gate[t][i] / (1 + exponential(-gate[t][i])) * up[t][i];
        }
        for (int t = 0; t < m->nodes; t++) quantise(hidden[t], &m->hidden[b * m->nodes + t]);
    }
}

/* Logits of the wanted nodes, surveyed. Half of a pass, so it is left inside too. */
static void propose(Lane *m, int self) {
    const int padded = groups_of(m->head.rows) * ROWS, blocks = (m->head.rows + BLOCK - 1) / BLOCK;
    float norm[MOST];
    find_norms(m, m->wanted, norm);
    int from, to;
    part(m, self, blocks, &from, &to);
    for (int b = from; b < to && !atomic_load_explicit(&m->stop, memory_order_relaxed); b++) {
        const int end = (b + 1) * BLOCK < m->head.rows ? (b + 1) * BLOCK : m->head.rows;
        for (int g = b * (BLOCK / ROWS); g < groups_of(end); g++) {
            float y[MOST][ROWS] __attribute__((aligned(64)));
            product(&m->head, g, m->input, norm, m->wanted, y);
            for (int t = 0; t < m->wanted; t++) memcpy(m->logits + (size_t)t * padded + ROWS * g, y[t], sizeof y[t]);
        }
        for (int t = 0; m->choice && t < m->wanted; t++)
            survey(m->logits + (size_t)t * padded, b * BLOCK, end, m->peak + t * blocks,
                   m->choice->noisy ? NULL : m->weight + t * blocks);
    }
}

static void penalise(Lane *m, int t, float *row, float *peak, float *weight) {
    const Changes *c = m->changes;
    const size_t first = (size_t)(m->chosen + t) * c->count;
    for (int i = 0; i < c->count; i++) {
        float *logit = row + c->place[i], divisor = c->divisor[first + i];
        *logit = (*logit > 0 ? *logit / divisor : *logit * divisor) + c->added[first + i];
    }
    const uint8_t *allowed = c->allowed + (size_t)(m->chosen + t) * m->head.rows;
    for (int i = 0; c->allowed && i < m->head.rows; i++) row[i] = allowed[i] ? row[i] : FORBIDDEN;
    survey(row, 0, m->head.rows, peak, m->choice->noisy ? NULL : weight);
}

static void choose_all(Lane *m, int self) {
    const int padded = groups_of(m->head.rows) * ROWS, blocks = (m->head.rows + BLOCK - 1) / BLOCK;
    for (int t = self; m->choice && t < m->wanted; t += m->threads) {
        if (m->changes) penalise(m, t, m->logits + (size_t)t * padded, m->peak + t * blocks, m->weight + t * blocks);
        m->found[t] = pick(m->logits + (size_t)t * padded, m->head.rows, m->names, m->choice,
                           m->position[m->want[t]] + 1, m->peak + t * blocks, m->weight + t * blocks,
                           m->tokens + t * m->choice->count, m->probs + t * m->choice->count);
    }
}

/* The model; 1: it was left early. */
static int layers(Lane *m, int self, unsigned *met) {
    const int n = m->nodes, *every = m->every;
    embed(m, self);
    if (barrier(m, self, met)) return 1;
    for (const Layer *l = m->layer, *last = l + m->shape.layers - 1; l <= last; l++) {
        project(m, self, l - m->layer);
        if (l == last && !m->wanted) return 0; /* a prompt is read for its keys and values */
        if (barrier(m, self, met)) return 1;
        attend(m, self, l - m->layer);
        if (barrier(m, self, met)) return 1;
        add(m, self, &l->output, m->heard, l->feed_norm, every, n);
        if (barrier(m, self, met)) return 1;
        feed(m, self, l);
        if (barrier(m, self, met)) return 1;
        if (l < last) add(m, self, &l->down, m->hidden, l[1].attention_norm, every, n);
        else add(m, self, &l->down, m->hidden, m->last_norm, m->want, m->wanted);
        if (barrier(m, self, met)) return 1;
    }
    propose(m, self);
    if (barrier(m, self, met)) return 1;
    const double started = now();
    choose_all(m, self);
    if (self == 0) m->choosing += now() - started;
    return 0;
}

static void pass(Lane *m, int self) {
    unsigned met = m->met;
    const int cut = layers(m, self, &met), left = barrier(m, self, &met); /* nobody is in the pass any more */
    if (self == 0) m->met = met, m->cut = cut | left;
}

static void *serve(void *argument) {
    Member *self = argument;
    for (unsigned passes = 0;; passes++) {
        await(self, passes);
        Lane *m = self->lane;
        if (!m) return NULL;
        pass(m, self->part);
        atomic_fetch_sub(&m->inside, 1);
    }
}

/* ---- What a pass is given. ---- */

/* The cells that a node sees: its own, and up the tree. A parent of the same pass has done that already. */
static void look_up(Lane *m, int t, const Node *nodes) {
    const int words = m->shape.cells / ROWS;
    uint16_t *seen = m->seen + t * words;
    int cell = nodes[t].cell, earlier = t - 1;
    m->parents[cell] = nodes[t].parent;
    while (earlier >= 0 && nodes[earlier].cell != nodes[t].parent) earlier--;
    if (earlier >= 0) memcpy(seen, m->seen + earlier * words, words * sizeof *seen);
    else memset(seen, 0, words * sizeof *seen);
    for (; cell >= 0; cell = earlier >= 0 ? -1 : m->parents[cell]) seen[cell / ROWS] |= 1u << cell % ROWS;
}

static void set_up(Lane *m, const Node *nodes, int n) {
    const Shape *s = &m->shape;
    const int words = s->cells / ROWS;
    m->nodes = n;
    m->wanted = m->used = 0;
    for (int t = 0; t < n; t++) {
        m->token[t] = nodes[t].token;
        m->cell[t] = nodes[t].cell;
        m->position[t] = nodes[t].position;
        if (nodes[t].wanted) m->want[m->wanted++] = t;
        look_up(m, t, nodes);
    }
    for (int b = 0; b < words; b++) {
        unsigned any = 0;
        for (int t = 0; t < n; t++) any |= m->seen[t * words + b];
        if (any) m->blocks[m->used++] = b;
    }
}

/* Zeroed memory that lasts as long as the lane, cut from huge pages: all weights pass by in half a millisecond, and
   from small pages that takes some percent longer. */
static void *grab(Lane *m, size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (m->left < bytes) {
        const size_t size = (bytes + 64 + PIECE - 1) / PIECE * PIECE;
        void **piece = aligned_alloc(PIECE, size);
        if (!piece) return m->failed = 1, NULL;
#ifdef MADV_HUGEPAGE
        madvise(piece, size, MADV_HUGEPAGE);
#endif
        memset(piece, 0, size);
        *piece = m->held;
        m->held = piece;
        m->free = (char *)piece + 64;
        m->left = size - 64;
    }
    m->free += bytes;
    m->left -= bytes;
    return m->free - bytes;
}

static Block *grab_blocks(Lane *m, int width) { return grab(m, MOST * width / QUANT * sizeof(Block)); }

static pthread_key_t teams;

static void dismiss(void *argument) {
    Team *team = argument;
    for (int i = 1; i < team->size; i++) {
        call(team->member[i], NULL, 0);
        pthread_join(team->member[i]->thread, NULL);
        free(team->member[i]);
    }
    free(team);
}

static void open_teams(void) { pthread_key_create(&teams, dismiss); }

/* The caller's team, with so many members if it can have them. The first one is the caller. */
static Team *gather(int threads) {
    static pthread_once_t opened = PTHREAD_ONCE_INIT;
    pthread_once(&opened, open_teams);
    Team *team = pthread_getspecific(teams);
    if (!team && (team = calloc(1, sizeof *team))) {
        team->size = 1;
        pthread_setspecific(teams, team);
    }
    for (; team && team->size < threads; team->size++) {
        Member *one = aligned_alloc(64, (sizeof *one + 63) / 64 * 64);
        if (!one) break;
        memset(one, 0, sizeof *one);
        pthread_mutex_init(&one->lock, NULL);
        pthread_cond_init(&one->bell, NULL);
        team->member[team->size] = one;
        if (pthread_create(&one->thread, NULL, serve, one)) {
            free(one);
            break; /* it goes on with as many as there are */
        }
    }
    return team;
}

/* See that so many threads have room for scores; returns how many do. */
static int equip(Lane *m, int threads) {
    for (; m->ready < threads; m->ready++) {
        m->scores[m->ready] = grab(m, (size_t)TILE * m->shape.cells * sizeof(float));
        if (m->failed) break;
    }
    return m->ready < threads ? m->ready : threads;
}

/* Until no other thread is in the pass. */
static void await_all(const Lane *m) {
    for (int i = 1; atomic_load_explicit(&m->inside, memory_order_acquire); i++) i % 64 ? rest() : (void)sched_yield();
}

/* Decode n nodes, parents first, and give the candidates of the wanted ones: choice->count places for each in `tokens`
   and `probs`, how many there are in `found`. Without a choice, of MOST nodes at most, `logits` tells of them.
   aside: the caller is none of the threads, it waits. Weights pass through the caches of whoever computes, and whatever
   the caller does next, an interpreter at that, takes twice as long then.
   Returns how many nodes are done: all, unless `stop` was set. */
int run(Lane *m, int threads, int aside, const Node *nodes, int n, const Choice *choice, const Changes *changes,
        int32_t *tokens, float *probs, int32_t *found, double *choosing) {
    m->choice = choice;
    m->changes = changes;
    m->choosing = 0;
    const int count = choice ? choice->count : 0;
    const Team *team = gather(threads + aside < TEAM ? threads + aside : TEAM);
    aside = aside && team && team->size > 1;
    const int members = team ? team->size - aside : 1, able = equip(m, threads < members ? threads : members);
    int done = 0;
    for (int wanted = 0; done < n; wanted += m->wanted) {
        const int size = n - done < MOST ? n - done : MOST;
        m->tokens = tokens + wanted * count;
        m->probs = probs + wanted * count;
        m->found = found + wanted;
        m->chosen = wanted;
        await_all(m); /* they read the last barrier's signals */
        m->threads = able;
        set_up(m, nodes + done, size);
        atomic_fetch_add(&m->inside, able - !aside);
        for (int i = !aside; i < able; i++) call(team->member[i + aside], m, i);
        if (aside) await_all(m);
        else pass(m, 0);
        if (m->cut) break;
        done += size;
    }
    *choosing = m->choosing;
    return done;
}

/* The logits of the last pass's wanted node number `i`. */
const float *logits(const Lane *m, int i) { return m->logits + (size_t)i * groups_of(m->head.rows) * ROWS; }

/* Let the keys and values of a cell stand in another one too, below what that one's parent sees. */
void move(Lane *m, int from, int to) {
    const Shape *s = &m->shape;
    for (int l = 0; l < s->layers; l++)
        for (int g = 0; g < s->groups; g++) {
            const half *key = block_of(m, m->keys, l, g, from / ROWS) + from % ROWS;
            const half *value = block_of(m, m->values, l, g, from / ROWS) + from % ROWS * ROWS;
            half *key_to = block_of(m, m->keys, l, g, to / ROWS) + to % ROWS;
            half *value_to = block_of(m, m->values, l, g, to / ROWS) + to % ROWS * ROWS;
            for (int i = 0; i < s->head; i++) key_to[i * ROWS] = key[i * ROWS];
            for (int i = 0; i < s->head; i += ROWS) memcpy(value_to + i * ROWS, value + i * ROWS, ROWS * sizeof(half));
        }
    m->parents[to] = to - 1;
}

/* To be set to 1 from any thread: leave the running pass at its next barrier, and each later one, until it is 0. It may
   become 0 only between passes. */
atomic_int *stop(Lane *m) { return &m->stop; }

const char *path(void) { return PATH; }

/* ---- Loading. ---- */

static float *grab_row(Lane *m, const Tensor *from) {
    float *to = grab(m, from->cols * sizeof(float));
    if (to) read_row(from, 0, to);
    return to;
}

/* A tensor in groups of 16 rows. names: which rows of it, NULL = all. */
static Matrix pack(Lane *m, const Tensor *from, const int64_t *names, int rows) {
    const int head = head_of(from), bytes = from->type == Q8_0 ? 32 : 16, blocks = from->cols / QUANT;
    const int flip = bytes == 32 ? ZERO8 : 0;
    const size_t size = (size_t)groups_of(rows) * blocks * ROWS;
    Matrix to = {grab(m, size * bytes), grab(m, size * sizeof(half)), NULL, from->type, rows, from->cols};
    if (from->type == Q4_1) to.offsets = grab(m, size * sizeof(half));
    for (int r = 0; r < rows && !m->failed; r++) {
        const uint8_t *block = from->data + (names ? (size_t)names[r] : (size_t)r) * blocks * (head + bytes);
        for (int b = 0; b < blocks; b++, block += head + bytes) {
            const size_t at = (size_t)(r / ROWS) * blocks + b;
            uint8_t *weights = to.weights + at * ROWS * bytes + r % ROWS * 4;
            memcpy(&to.scales[at * ROWS + r % ROWS], block, sizeof(half));
            if (to.offsets) memcpy(&to.offsets[at * ROWS + r % ROWS], block + 2, sizeof(half));
            for (int i = 0; i < bytes; i++) weights[i / 4 * ROWS * 4 + i % 4] = block[head + i] ^ flip;
        }
    }
    return to;
}

static Matrix whole(Lane *m, const Tensor *from) { return pack(m, from, NULL, from->rows); }

void discard(Lane *m) {
    await_all(m);
    for (void *piece = m->held, *next; piece; piece = next) {
        next = *(void **)piece;
        free(piece);
    }
    free(m);
}

/* tensors: embedding, last norm, head, then of each layer attention norm, query, key, value, output, feed norm, gate,
   up, down; no pointer to them is kept but the embedding's. names[rows]: the tokens to be proposed, ascending; NULL =
   all. NULL when memory is short. */
Lane *load(const Shape *shape, const Tensor *tensors, const int64_t *names, int rows) {
    Lane *m = aligned_alloc(64, (sizeof *m + 63) / 64 * 64);
    if (!m) return NULL;
    memset(m, 0, sizeof *m);
    const Shape *s = &m->shape;
    m->shape = *shape;
    m->embedding = tensors[0];
    m->last_norm = grab_row(m, tensors + 1);
    m->head = pack(m, tensors + 2, names, rows);
    if (names && (m->names = grab(m, rows * sizeof *names))) memcpy(m->names, names, rows * sizeof *names);
    m->layer = grab(m, s->layers * sizeof *m->layer);
    for (int i = 0; i < s->layers && !m->failed; i++) {
        const Tensor *t = tensors + 3 + 9 * i;
        m->layer[i] = (Layer){grab_row(m, t), grab_row(m, t + 5), whole(m, t + 1), whole(m, t + 2), whole(m, t + 3),
                              whole(m, t + 4), whole(m, t + 6), whole(m, t + 7), whole(m, t + 8)};
    }
    const size_t cached = (size_t)s->layers * s->groups * s->cells * s->head, all = s->heads * s->head;
    const size_t blocks = (rows + BLOCK - 1) / BLOCK, padded = groups_of(rows) * ROWS;
    m->keys = grab(m, cached * sizeof(half));
    m->values = grab(m, cached * sizeof(half));
    m->parents = grab(m, s->cells * sizeof(int32_t));
    m->frequency = grab(m, s->head / 2 * sizeof(double));
    m->seen = grab(m, MOST * (s->cells / ROWS) * sizeof *m->seen);
    m->blocks = grab(m, s->cells / ROWS * sizeof(int));
    float **each[] = {&m->stream, &m->queries, &m->mixed, &m->turns, &m->logits, &m->peak, &m->weight};
    const size_t sizes[] = {s->width, all, all, s->head, padded, blocks, blocks};
    for (int i = 0; i < 7; i++) *each[i] = grab(m, MOST * sizes[i] * sizeof(float));
    m->input = grab_blocks(m, s->width), m->heard = grab_blocks(m, all), m->hidden = grab_blocks(m, s->inner);
    for (int i = 0; i < s->head / 2 && !m->failed; i++) m->frequency[i] = pow(s->base, -2.0 * i / s->head);
    for (int i = 0; i < MOST; i++) m->every[i] = i;
    if (!m->failed && equip(m, 1) == 1) return m;
    discard(m);
    return NULL;
}
