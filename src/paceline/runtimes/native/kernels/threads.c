#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() ((void)0)
#endif

enum { MAX_THREADS = 256, TEAMS = 512, SPINS_BEFORE_YIELD = 4000, SPINS_BEFORE_SLEEP = 20000 };

static pthread_mutex_t one_caller = PTHREAD_MUTEX_INITIALIZER, sleeping = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t woken = PTHREAD_COND_INITIALIZER;
static atomic_int arrived, barrier_round, done;
/* The number of the call under way times TEAMS, plus the threads that serve it: read at once, so that no worker takes the team of one
 * call for that of the next. */
static atomic_llong call;
static int num_workers, team;
static Task *current;
static void *current_argument;

/* Spin, then yield: the thread that is waited for may need this core. */
static void wait_a_little(int spins) {
    RELAX();
    if (spins > SPINS_BEFORE_YIELD) sched_yield();
}

typedef struct {
    int thread;
    long long seen; /* the last call that is not this worker's business */
} Worker;

static Worker workers[MAX_THREADS];

static void *work(void *own) {
    const int thread = ((Worker *)own)->thread;
    long long seen = ((Worker *)own)->seen;
    for (;;) {
        for (int spins = 0; atomic_load_explicit(&call, memory_order_acquire) == seen; spins++) {
            RELAX();
            if (spins < SPINS_BEFORE_SLEEP) continue;
            pthread_mutex_lock(&sleeping);
            while (atomic_load(&call) == seen) pthread_cond_wait(&woken, &sleeping);
            pthread_mutex_unlock(&sleeping);
        }
        seen = atomic_load(&call);
        if (thread >= (int)(seen % TEAMS)) continue;
        current(current_argument, thread, team);
        atomic_fetch_add(&done, 1);
    }
    return NULL;
}

/* A forked child has no workers, and whoever held or waited for a lock is not there any more. */
static void forget_workers(void) {
    pthread_mutex_init(&one_caller, NULL);
    pthread_mutex_init(&sleeping, NULL);
    pthread_cond_init(&woken, NULL);
    num_workers = 0;
    atomic_store(&barrier_round, 0);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_workers); }

static void start_workers(int wanted) {
    static pthread_once_t watched = PTHREAD_ONCE_INIT;
    pthread_once(&watched, watch_forks);
    while (num_workers < wanted) {
        pthread_t thread;
        workers[num_workers] = (Worker){num_workers + 1, atomic_load(&call)};
        if (pthread_create(&thread, NULL, work, workers + num_workers)) return;
        pthread_detach(thread);
        num_workers++;
    }
}

void run_on_threads(Preparation *prepare, Task *task, void *argument, int num_threads) {
    pthread_mutex_lock(&one_caller);
    prepare(argument);
    start_workers((num_threads < MAX_THREADS ? num_threads : MAX_THREADS) - 1);
    team = num_threads <= num_workers ? num_threads : num_workers + 1;
    current = task;
    current_argument = argument;
    atomic_store(&done, 0);
    atomic_store(&arrived, 0);
    if (team > 1) {
        pthread_mutex_lock(&sleeping);
        atomic_store(&call, (atomic_load(&call) / TEAMS + 1) * TEAMS + team);
        pthread_cond_broadcast(&woken);
        pthread_mutex_unlock(&sleeping);
    }
    task(argument, 0, team);
    for (int spins = 0; atomic_load(&done) < team - 1; spins++) wait_a_little(spins);
    pthread_mutex_unlock(&one_caller);
}

void barrier(void) {
    if (team == 1) return;
    const int now = atomic_load(&barrier_round);
    if (atomic_fetch_add(&arrived, 1) == team - 1) {
        atomic_store(&arrived, 0);
        atomic_store_explicit(&barrier_round, now + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&barrier_round, memory_order_acquire) == now; spins++) wait_a_little(spins);
}
