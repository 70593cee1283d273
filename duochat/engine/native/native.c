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

enum { MOST = 8, ROWS = 16, QUANT = 32, TILE = 8, TEAM = 64 };
/* nodes of a pass; rows of a group; inputs that share a scale; queries that share a reading of the cache; threads */

#ifndef SPIN
#define SPIN 2e-4 /* seconds that a thread waits awake: between two batches of a busy lane passes less */
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
#define UNROLL _Pragma("GCC unroll 8")

/* sum[row] += four weights of the row (4 bits each: 0 to 15; 8 bits: plus ZERO8) times the four numbers of x.
   halves: LANES numbers of 16 bits. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
INLINE Ints dot(Ints sum, Bytes weights, int32_t x, int bits) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
}
INLINE Floats halves(const half *h) { return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)h)); }
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
INLINE Ints dot(Ints sum, Bytes weights, int32_t x, int bits) {
    __m256i w = (__m256i)weights, v = _mm256_set1_epi32(x);
    if (bits == 8) v = _mm256_sign_epi8(v, w), w = _mm256_abs_epi8(w);
    return sum + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16(w, v), _mm256_set1_epi16(1));
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

/* Vectors in 8 bits, one for each node of a pass: 32 numbers of the first, 32 of the second, ..., then the next 32. */
typedef struct {
    int8_t *numbers;
    float *scale, *sum; /* of 32 */
    int32_t *shift;     /* -8 times the sum of 32 numbers */
} Vectors;

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

typedef struct { /* what a thread of a lane's passes writes */
    Vectors input;
    float *normed, *scores;
} Own;

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
    int nodes, wanted, threads, ready, failed; /* ready: threads that have an `own` */
    int cell[MOST], position[MOST], every[MOST], want[MOST];
    float *stream, *queries, *mixed, *logits, *turns, *peak, *weight; /* of each node */
    Vectors hidden;
    uint16_t *seen; /* [node][cells / 16]: which cells it sees */
    int *blocks, used;
    const Choice *choice;
    const Changes *changes; /* NULL: none */
    int chosen;             /* wanted nodes of the passes before */
    int32_t *tokens, *found;
    float *probs;
    double choosing;
    Own own[TEAM];
    _Alignas(64) atomic_int stop;
    _Alignas(64) atomic_int inside; /* threads that have not left a pass, but the caller's */
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_uint round; /* counts barriers by 2; odd once the pass is to be left */
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
    int index;
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

/* All threads of the pass meet here; true: leave it. A thread whose partner has lost its core gives up its own. */
static int barrier(Lane *m) {
    const int others = m->threads - 1; /* read before it may change: whoever has arrived may see the pass end */
    unsigned round = atomic_load_explicit(&m->round, memory_order_acquire), now;
    if (atomic_fetch_add_explicit(&m->arrived, 1, memory_order_acq_rel) == others) {
        atomic_store_explicit(&m->arrived, 0, memory_order_relaxed);
        now = (round + 2) | (unsigned)atomic_load_explicit(&m->stop, memory_order_relaxed);
        atomic_store_explicit(&m->round, now, memory_order_release);
        return now & 1;
    }
    for (int spins = 0; (now = atomic_load_explicit(&m->round, memory_order_acquire)) == round; spins++)
        spins < 4000 ? rest() : doze(); /* 0.1 ms or so: a step takes less */
    return now & 1;
}

static void call(Member *t, Lane *m) {
    t->lane = m;
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

/* 32 numbers of a node in 8 bits. */
static void quantise(const float *x, Vectors *to, int place) {
    float most = 1e-20f;
    for (int i = 0; i < QUANT; i++) most = fmaxf(most, fabsf(x[i]));
    int8_t *numbers = to->numbers + QUANT * place;
    int32_t sum = 0;
    for (int i = 0; i < QUANT; i++) {
        int number = (int)(x[i] * (127 / most) + 127.5f) - 127;
        sum += number;
        numbers[i] = (int8_t)number;
    }
    to->scale[place] = most / 127;
    to->sum[place] = most / 127 * sum;
    to->shift[place] = -8 * sum;
}

/* The vectors of `nodes` in 8 bits; norm: their RMS norm times this, unless NULL. */
static void prepare(Lane *m, Own *own, const float *x, int width, const int *nodes, int n, const float *norm) {
    for (int t = 0; t < n; t++) {
        const float *from = x + (size_t)nodes[t] * width;
        if (norm) {
            Floats squares = {0};
            for (int i = 0; i < width; i += LANES) squares += *(const Floats *)(from + i) * *(const Floats *)(from + i);
            float sum = 0;
            for (int i = 0; i < LANES; i++) sum += squares[i];
            float scale = 1 / sqrtf(sum / width + m->shape.epsilon);
            for (int i = 0; i < width; i++) own->normed[i] = from[i] * scale * norm[i];
            from = own->normed;
        }
        for (int b = 0; b < width / QUANT; b++) quantise(from + QUANT * b, &own->input, b * n + t);
    }
}

/* y[node] = 16 rows of the matrix times the node's vector: the weights are read once for all n of them. */
INLINE void multiply(const Matrix *w, int group, const Vectors *x, float y[][ROWS], int n, int type) {
    const int bits = type == Q8_0 ? 8 : 4, zero = type == Q8_0 ? ZERO8 / 8 : type == Q4_0;
    const int blocks = w->cols / QUANT, bytes = QUANT * ROWS * bits / 8;
    for (int lane = 0; lane < ROWS; lane += LANES) {
        const uint8_t *weights = w->weights + (size_t)group * blocks * bytes + 4 * lane;
        const half *scales = w->scales + (size_t)group * blocks * ROWS + lane;
        const half *offsets = type == Q4_1 ? w->offsets + (size_t)group * blocks * ROWS + lane : NULL;
        Floats total[MOST];
        UNROLL for (int t = 0; t < n; t++) total[t] = (Floats){0};
        for (int b = 0; b < blocks; b++, weights += bytes, scales += ROWS) {
            const int32_t *numbers = (const int32_t *)(x->numbers + (size_t)b * n * QUANT);
            Ints sum[MOST];
            UNROLL for (int t = 0; t < n; t++) sum[t] = ((Ints){0} + x->shift[b * n + t]) * zero;
            UNROLL for (int i = 0; i < QUANT * bits / 32; i++) {
                Bytes w8 = *(const Bytes *)(weights + 4 * ROWS * i), low = (Bytes)(w8 & 15), high = (Bytes)(w8 >> 4);
                UNROLL for (int t = 0; t < n; t++) {
                    sum[t] = dot(sum[t], bits == 4 ? low : w8, numbers[8 * t + i], bits);
                    if (bits == 4) sum[t] = dot(sum[t], high, numbers[8 * t + i + 4], bits);
                }
            }
            Floats scale = halves(scales);
            UNROLL for (int t = 0; t < n; t++)
                total[t] += __builtin_convertvector(sum[t], Floats) * (scale * x->scale[b * n + t]);
            if (type != Q4_1) continue;
            Floats offset = halves(offsets + (size_t)b * ROWS);
            UNROLL for (int t = 0; t < n; t++) total[t] += offset * x->sum[b * n + t];
        }
        UNROLL for (int t = 0; t < n; t++) *(Floats *)(y[t] + lane) = total[t];
    }
}

static void product(const Matrix *w, int group, const Vectors *x, int n, float y[][ROWS]) {
#define CASES(OF) switch (n) { OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8) }
#define MULTIPLY(n) \
    case n: \
        if (w->type == Q4_0) multiply(w, group, x, y, n, Q4_0); \
        else if (w->type == Q4_1) multiply(w, group, x, y, n, Q4_1); \
        else multiply(w, group, x, y, n, Q8_0); \
        break;
    CASES(MULTIPLY)
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

/* Queries, keys and values of the nodes; the last two go to their cells. */
static void project(Lane *m, int self, int layer) {
    const Shape *s = &m->shape;
    const Layer *l = &m->layer[layer];
    const int queries = s->heads * s->head / ROWS, keys = s->groups * s->head / ROWS;
    int from, to;
    part(m, self, queries + 2 * keys, &from, &to);
    for (int g = from; g < to; g++) {
        float y[MOST][ROWS] __attribute__((aligned(64)));
        const Matrix *w = g < queries ? &l->query : g < queries + keys ? &l->key : &l->value;
        const int at = g < queries ? g : (g - queries) % keys, row = at * ROWS % s->head, group = at * ROWS / s->head;
        product(w, at, &m->own[self].input, m->nodes, y);
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

/* out[t][16] += sum over i of factor[t][i] * h[i][16] */
INLINE void combine(const half *h, int count, float **factor, float **out, int n) {
    for (int lane = 0; lane < ROWS; lane += LANES) {
        Floats sum[TILE];
        UNROLL for (int t = 0; t < n; t++) sum[t] = *(Floats *)(out[t] + lane);
        for (int i = 0; i < count; i++) {
            Floats row = halves(h + ROWS * i + lane);
            UNROLL for (int t = 0; t < n; t++) sum[t] += row * factor[t][i];
        }
        UNROLL for (int t = 0; t < n; t++) *(Floats *)(out[t] + lane) = sum[t];
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

/* What n queries of one group of heads see, mixed: cells out of a node's sight start far below. */
INLINE void attend_some(Lane *m, Own *own, int layer, int group, int first, int n) {
    const Shape *s = &m->shape;
    const int each = s->heads / s->groups, all = s->heads * s->head;
    float *query[TILE], *score[TILE], *out[TILE], *from[TILE], *to[TILE], sum[TILE];
    for (int i = 0; i < n; i++) {
        const int node = (first + i) / each, head = group * each + (first + i) % each;
        query[i] = m->queries + node * all + head * s->head;
        out[i] = m->mixed + node * all + head * s->head;
        score[i] = own->scores + (size_t)i * s->cells;
        memset(out[i], 0, s->head * sizeof(float));
        for (int b = 0; b < m->used; b++) {
            const unsigned seen = m->seen[node * (s->cells / ROWS) + m->blocks[b]];
            memset(score[i] + ROWS * b, 0, ROWS * sizeof(float));
            for (int c = 0; seen != 0xffff && c < ROWS; c++)
                if (!(seen >> c & 1)) score[i][ROWS * b + c] = -1e9f;
        }
    }
    for (int b = 0; b < m->used; b++) {
        for (int i = 0; i < n; i++) to[i] = score[i] + ROWS * b;
        combine(block_of(m, m->keys, layer, group, m->blocks[b]), s->head, query, to, n);
    }
    soften(score, ROWS * m->used, 1 / sqrtf(s->head), sum, n);
    for (int b = 0; b < m->used; b++)
        for (int row = 0; row < s->head; row += ROWS) {
            for (int i = 0; i < n; i++) from[i] = score[i] + ROWS * b, to[i] = out[i] + row;
            combine(block_of(m, m->values, layer, group, m->blocks[b]) + row * ROWS, ROWS, from, to, n);
        }
    for (int i = 0; i < n; i++)
        for (int row = 0; row < s->head; row++) out[i][row] /= sum[i];
}

static void attend(Lane *m, int self, int layer) {
    const int each = m->nodes * (m->shape.heads / m->shape.groups);
    int from, to;
    part(m, self, m->shape.groups * each, &from, &to);
    while (from < to) {
        int group = from / each, first = from % each, n = to - from < TILE ? to - from : TILE;
        n = n < each - first ? n : each - first;
#define ATTEND(n) case n: attend_some(m, &m->own[self], layer, group, first, n); break;
        CASES(ATTEND)
        from += n;
    }
}

/* Add a product to the stream. */
static void add(Lane *m, int self, const Matrix *w, const Vectors *x) {
    int from, to;
    part(m, self, w->rows / ROWS, &from, &to);
    for (int g = from; g < to; g++) {
        float y[MOST][ROWS] __attribute__((aligned(64)));
        product(w, g, x, m->nodes, y);
        for (int t = 0; t < m->nodes; t++)
            for (int i = 0; i < ROWS; i++) m->stream[t * m->shape.width + ROWS * g + i] += y[t][i];
    }
}

/* hidden = silu(gate) * up, in 8 bits. */
static void feed(Lane *m, int self, const Layer *l) {
    int from, to;
    part(m, self, m->shape.inner / QUANT, &from, &to);
    for (int b = from; b < to; b++) {
        float gate[MOST][ROWS] __attribute__((aligned(64))), up[MOST][ROWS] __attribute__((aligned(64)));
        float hidden[MOST][QUANT];
        for (int g = 0; g < QUANT / ROWS; g++) {
            product(&l->gate, b * (QUANT / ROWS) + g, &m->own[self].input, m->nodes, gate);
            product(&l->up, b * (QUANT / ROWS) + g, &m->own[self].input, m->nodes, up);
            for (int t = 0; t < m->nodes; t++)
                for (int i = 0; i < ROWS; i++)
                    hidden[t][ROWS * g + i] = gate[t][i] / (1 + exponential(-gate[t][i])) * up[t][i];
        }
        for (int t = 0; t < m->nodes; t++) quantise(hidden[t], &m->hidden, b * m->nodes + t);
    }
}

/* Logits of the wanted nodes, surveyed. */
static void propose(Lane *m, int self) {
    const int padded = groups_of(m->head.rows) * ROWS, blocks = (m->head.rows + BLOCK - 1) / BLOCK;
    int from, to;
    part(m, self, blocks, &from, &to);
    to = to * BLOCK < m->head.rows ? to * BLOCK : m->head.rows;
    for (int g = from * (BLOCK / ROWS); g < groups_of(to); g++) {
        float y[MOST][ROWS] __attribute__((aligned(64)));
        product(&m->head, g, &m->own[self].input, m->wanted, y);
        for (int t = 0; t < m->wanted; t++) memcpy(m->logits + (size_t)t * padded + ROWS * g, y[t], sizeof y[t]);
    }
    for (int t = 0; m->choice && t < m->wanted; t++)
        survey(m->logits + (size_t)t * padded, from * BLOCK, to, m->peak + t * blocks,
               m->choice->noisy ? NULL : m->weight + t * blocks);
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

/* The model. */
static void layers(Lane *m, int self) {
    const Shape *s = &m->shape;
    Own *own = &m->own[self];
    for (int i = 0; i < s->layers; i++) {
        const Layer *l = &m->layer[i];
        prepare(m, own, m->stream, s->width, m->every, m->nodes, l->attention_norm);
        project(m, self, i);
        if (i == s->layers - 1 && !m->wanted) return; /* a prompt is read for its keys and values */
        if (barrier(m)) return;
        attend(m, self, i);
        if (barrier(m)) return;
        prepare(m, own, m->mixed, s->heads * s->head, m->every, m->nodes, NULL);
        add(m, self, &l->output, &own->input);
        if (barrier(m)) return;
        prepare(m, own, m->stream, s->width, m->every, m->nodes, l->feed_norm);
        feed(m, self, l);
        if (barrier(m)) return;
        add(m, self, &l->down, &m->hidden);
        if (barrier(m)) return;
    }
    prepare(m, own, m->stream, s->width, m->want, m->wanted, m->last_norm);
    propose(m, self);
    if (barrier(m)) return;
    const double started = now();
    choose_all(m, self);
    if (self == 0) m->choosing += now() - started;
}

static int pass(Lane *m, int self) {
    layers(m, self);
    return barrier(m); /* nobody is in the pass any more */
}

static void *serve(void *argument) {
    Member *self = argument;
    for (unsigned passes = 0;; passes++) {
        await(self, passes);
        Lane *m = self->lane;
        if (!m) return NULL;
        pass(m, self->index);
        atomic_fetch_sub(&m->inside, 1);
    }
}

/* ---- What a pass is given. ---- */

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
        m->cell[t] = nodes[t].cell;
        m->position[t] = nodes[t].position;
        if (nodes[t].wanted) m->want[m->wanted++] = t;
        read_row(&m->embedding, nodes[t].token, m->stream + t * s->width);
        for (int i = 0; i < s->head; i += 2) {
            double angle = nodes[t].position * m->frequency[i / 2];
            m->turns[t * s->head + i] = (float)cos(angle);
            m->turns[t * s->head + i + 1] = (float)sin(angle);
        }
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

static Vectors grab_vectors(Lane *m, int width) {
    const size_t scales = MOST * width / 8;
    return (Vectors){grab(m, MOST * width), grab(m, scales), grab(m, scales), grab(m, scales)};
}

static pthread_key_t teams;

static void dismiss(void *argument) {
    Team *team = argument;
    for (int i = 1; i < team->size; i++) {
        call(team->member[i], NULL);
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
        one->index = team->size;
        pthread_mutex_init(&one->lock, NULL);
        pthread_cond_init(&one->bell, NULL);
        team->member[one->index] = one;
        if (pthread_create(&one->thread, NULL, serve, one)) {
            free(one);
            break; /* it goes on with as many as there are */
        }
    }
    return team;
}

/* See that so many threads have what they write to; returns how many do. */
static int equip(Lane *m, int threads) {
    const Shape *s = &m->shape;
    const int widest = s->width > s->heads * s->head ? s->width : s->heads * s->head;
    for (; m->ready < threads; m->ready++) {
        Own *own = &m->own[m->ready];
        own->input = grab_vectors(m, widest);
        own->normed = grab(m, widest * sizeof(float));
        own->scores = grab(m, (size_t)TILE * s->cells * sizeof(float));
        if (m->failed) break;
    }
    return m->ready < threads ? m->ready : threads;
}

/* Decode n nodes, parents first, and give the candidates of the wanted ones: choice->count places for each in `tokens`
   and `probs`, how many there are in `found`. Without a choice, of MOST nodes at most, `logits` tells of them.
   Returns how many nodes are done: all, unless `stop` was called. */
int run(Lane *m, int threads, const Node *nodes, int n, const Choice *choice, const Changes *changes, int32_t *tokens,
        float *probs, int32_t *found, double *choosing) {
    m->choice = choice;
    m->changes = changes;
    m->choosing = 0;
    const int count = choice ? choice->count : 0;
    const Team *team = gather(threads < TEAM ? threads : TEAM);
    m->threads = equip(m, !team ? 1 : threads < team->size ? threads : team->size);
    int done = 0;
    for (int wanted = 0; done < n; wanted += m->wanted) {
        const int size = n - done < MOST ? n - done : MOST;
        m->tokens = tokens + wanted * count;
        m->probs = probs + wanted * count;
        m->found = found + wanted;
        m->chosen = wanted;
        set_up(m, nodes + done, size);
        atomic_store(&m->round, atomic_load(&m->round) & ~1u);
        atomic_fetch_add(&m->inside, m->threads - 1);
        for (int i = 1; i < m->threads; i++) call(team->member[i], m);
        if (pass(m, 0)) break;
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

/* 1, from any thread: leave the running pass at its next barrier, and each later one, until 0. */
void stop(Lane *m, int value) { atomic_store(&m->stop, value); }

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
    while (atomic_load(&m->inside)) rest();
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
    m->hidden = grab_vectors(m, s->inner);
    for (int i = 0; i < s->head / 2 && !m->failed; i++) m->frequency[i] = pow(s->base, -2.0 * i / s->head);
    for (int i = 0; i < MOST; i++) m->every[i] = i;
    if (!m->failed && equip(m, 1) == 1) return m;
    discard(m);
    return NULL;
}
