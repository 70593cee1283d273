/* Drives native.c without Python: a random model, random trees, a second thread that interrupts.
   Two threads take turns. Prints the first choice and its probability after each node of the undisturbed trees. Usage:
   driver THREADS */
#include "../duochat/engine/native/native.c"
#include <stdio.h>

enum { WIDTH = 64, LAYERS = 2, HEADS = 4, GROUPS = 2, HEAD = 16, INNER = 96 };
enum { VOCABULARY = 600, KEPT = 230, CELLS = 256 };

static uint32_t state = 1;
static int below(int n) { return (int)(((state = state * 1664525u + 1013904223u) >> 8) % (unsigned)n); }

static Tensor tensor(int type, int rows, int cols) {
    const int block = type == Q4_0 ? 18 : type == Q4_1 ? 20 : 34;
    size_t bytes = type == F32 ? (size_t)rows * cols * 4 : (size_t)rows * cols / 32 * block;
    uint8_t *data = malloc(bytes);
    for (size_t i = 0; i < bytes; i++) data[i] = (uint8_t)below(256);
    const half about[] = {narrow(type == Q8_0 ? 0.003f : 0.05f), narrow(-0.4f)};
    for (size_t i = 0; type != F32 && i < bytes; i += block) memcpy(data + i, about, type == Q4_1 ? 4 : 2);
    for (int i = 0; type == F32 && i < cols; i++) ((float *)data)[i] = 0.8f + 0.001f * below(400);
    return (Tensor){data, type, rows, cols};
}

static void *interrupt(void *lane) {
    for (int i = 0; i < 1000; i++) {
        *stop(lane) = 1;
        const double until = now() + 1e-5 * (i % 7);
        while (now() < until) rest();
        *stop(lane) = 0;
        sched_yield();
    }
    return NULL;
}

static void decode(Lane *m, int most, const Choice *choice, int *cells, int said) {
    const int threads = 1 + below(most), size = 1 + below(32), held = *cells;
    Node nodes[32];
    int32_t tokens[32 * 4], found[32];
    float probs[32 * 4];
    double seconds;
    for (int i = 0; i < size; i++) {
        const int seen = held + i, parent = seen ? below(seen) : -1;
        int depth = 0;
        for (int at = parent; at >= 0; depth++) at = at < held ? m->parents[at] : nodes[at - held].parent;
        const int token = below(VOCABULARY), wanted = below(4) > 0;
        nodes[i] = (Node){token, depth, seen, parent, wanted};
    }
    *cells += run(m, threads, below(2), nodes, size, choice, NULL, tokens, probs, found, &seconds);
    for (int i = 0, row = 0; said && i < size; i++)
        if (nodes[i].wanted) printf("%d %.4f\n", tokens[row * choice->count], probs[row * choice->count]), row++;
}

/* One of two threads that call the lane in turns, each with a team of its own. */
static void *in_turns(void *lane) {
    static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
    const Choice greedy = {1, 6, 1, 0, 0, 0, 4, 0};
    for (int i = 0; i < 10; i++, sched_yield()) {
        pthread_mutex_lock(&turn);
        for (int cells = 0; cells < 64;) decode(lane, 5, &greedy, &cells, 0);
        pthread_mutex_unlock(&turn);
    }
    return NULL;
}

int main(int argc, char **argv) {
    const int threads = argc > 1 ? atoi(argv[1]) : 1, types[] = {Q4_0, Q4_1, Q8_0};
    const int keys = GROUPS * HEAD, shapes[12][2] = {
        {VOCABULARY, WIDTH}, {1, WIDTH}, {VOCABULARY, WIDTH}, {1, WIDTH}, {HEADS * HEAD, WIDTH}, {keys, WIDTH},
        {keys, WIDTH}, {WIDTH, HEADS * HEAD}, {1, WIDTH}, {INNER, WIDTH}, {INNER, WIDTH}, {WIDTH, INNER}};
    for (int type = 0; type < 3; type++) {
        Tensor all[3 + 9 * LAYERS];
        state = 1;
        for (int i = 0; i < 3 + 9 * LAYERS; i++) {
            const int *shape = shapes[i < 3 ? i : 3 + (i - 3) % 9];
            all[i] = tensor(shape[0] > 1 ? types[type] : F32, shape[0], shape[1]);
        }
        int64_t names[KEPT];
        for (int i = 0; i < KEPT; i++) names[i] = 2 * i + 1;
        Shape shape = {WIDTH, LAYERS, HEADS, GROUPS, HEAD, INNER, CELLS, 1e-5f, 10000};
        Lane *m = load(&shape, all, names, KEPT);
        Choice greedy = {1, 6, 1, 0, 0, 0, 4, 0}, noisy = {1.25f, 8, 0.9f, -4, 40, 1, 4, 7};
        for (int turn = 0; turn < 4; turn++)
            for (int cells = 0; cells < CELLS - 32;)
                decode(m, threads, turn % 2 ? &noisy : &greedy, &cells, 1);
        pthread_t other;
        pthread_create(&other, NULL, interrupt, m);
        for (int turn = 0; turn < 10; turn++)
            for (int cells = 0, tries = 0; cells < CELLS - 32 && tries < 200; tries++)
                decode(m, threads, turn % 2 ? &noisy : &greedy, &cells, 0);
        pthread_join(other, NULL);
        m->met = 0u - 500; /* barriers are counted anew after the last number */
        pthread_create(&other, NULL, in_turns, m);
        in_turns(m);
        pthread_join(other, NULL);
        discard(m);
        for (int i = 0; i < 3 + 9 * LAYERS; i++) free((void *)all[i].data);
    }
    return 0;
}
