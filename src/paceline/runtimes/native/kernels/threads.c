/* The thread pool. A waiting thread spins first and then sleeps: waking a sleeper takes tens of microseconds, but a spinning thread holds a core
 * that its partners or other programs may need. The spin time adapts to past waits. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() ((void)0)
#endif

enum { MAX_THREADS = 256, TEAMS = 512, SPINS_PER_CHECK = 64 };
/* Spin times: at a barrier at most a piece of work, before the next pass about the host's time between two passes. */
enum { MIN_SPIN_NS = 4000, MAX_BARRIER_SPIN_NS = 100000, MAX_PASS_SPIN_NS = 500000 };

/* A number whose change threads wait for, and how many of them sleep. */
typedef struct {
    _Alignas(64) atomic_llong number;
    atomic_int sleepers;
    pthread_mutex_t lock;
    pthread_cond_t changed;
} Signal;

#define SIGNAL {1, 0, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER}

static pthread_mutex_t one_caller = PTHREAD_MUTEX_INITIALIZER;
/* The current call's number times TEAMS, plus its number of threads. Both are in one variable, so that no worker combines one call's number with
 * another's threads. */
static Signal call = SIGNAL;
static Signal barrier_round = SIGNAL;
static _Alignas(64) atomic_int arrived;
static int num_workers;
static Task *current;
static void *current_argument;

/* The state of a thread's waits, on its own cache line because it is written at each barrier. */
typedef struct {
    _Alignas(64) atomic_int core; /* the core it last ran on; -1 = unknown */
    atomic_llong round;           /* the barrier it waits at or passed last; 0 = none yet */
    long long barrier_spin_ns, pass_spin_ns;
} Waiter;

static Waiter waiters[MAX_THREADS];
/* Of the call this thread works for. A thread that passed its last barrier may begin the next call while others still read this one's. */
static _Thread_local int own_thread, own_team;

static long long now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (long long)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int this_core(void) {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

/* Return whether a thread that is waited for last ran on this thread's core, where it cannot run while this one spins. */
static int blocks_a_partner(int is_at_barrier) {
    const int core = this_core(), members = is_at_barrier ? own_team : 1;
    if (core < 0) return 0;
    for (int other = 0; other < members; other++) {
        if (other == own_thread || atomic_load_explicit(&waiters[other].core, memory_order_relaxed) != core) continue;
        if (!is_at_barrier || atomic_load(&waiters[other].round) != atomic_load(&waiters[own_thread].round)) return 1;
    }
    return 0;
}

/* Wait until the signal's number differs from `seen`. If a longer spin would have avoided the sleep, the next wait spins twice as long; if even the
 * longest would not, half as long. */
static void wait_for_change(Signal *signal, long long seen, long long longest_ns, long long *spin_ns) {
    long long start = 0;
    for (int spins = 1; atomic_load(&signal->number) == seen; spins++) {
        RELAX();
        if (spins % SPINS_PER_CHECK) continue;
        const long long now = now_ns();
        if (!start) start = now;
        if (now - start < *spin_ns && !blocks_a_partner(signal == &barrier_round)) continue;
        pthread_mutex_lock(&signal->lock);
        atomic_fetch_add(&signal->sleepers, 1);
        while (atomic_load(&signal->number) == seen) pthread_cond_wait(&signal->changed, &signal->lock);
        atomic_fetch_sub(&signal->sleepers, 1);
        pthread_mutex_unlock(&signal->lock);
        const long long next = now_ns() - start < longest_ns ? 2 * *spin_ns : *spin_ns / 2;
        *spin_ns = next > longest_ns ? longest_ns : next < MIN_SPIN_NS ? MIN_SPIN_NS : next;
    }
}

static void change(Signal *signal, long long number) {
    atomic_store(&signal->number, number);
    if (!atomic_load(&signal->sleepers)) return; /* a thread about to sleep increments the counter first and reads the number again */
    pthread_mutex_lock(&signal->lock);
    pthread_cond_broadcast(&signal->changed);
    pthread_mutex_unlock(&signal->lock);
}

typedef struct {
    int thread;
    long long seen; /* the last call before this worker started */
} Worker;

static Worker workers[MAX_THREADS];

static void *work(void *own) {
    long long seen = ((Worker *)own)->seen;
    own_thread = ((Worker *)own)->thread;
    Waiter *waiter = waiters + own_thread;
    for (;;) {
        wait_for_change(&call, seen, MAX_PASS_SPIN_NS, &waiter->pass_spin_ns);
        seen = atomic_load(&call.number);
        own_team = (int)(seen % TEAMS);
        if (own_thread >= own_team) continue;
        atomic_store_explicit(&waiter->core, this_core(), memory_order_relaxed);
        current(current_argument, own_thread, own_team);
        barrier();
    }
    return NULL;
}

static void reset_signal(Signal *signal) {
    pthread_mutex_init(&signal->lock, NULL);
    pthread_cond_init(&signal->changed, NULL);
    atomic_store(&signal->sleepers, 0);
}

/* Reset everything in a forked child, which has no workers and whose locks may be held by threads that do not exist. */
static void reset_workers(void) {
    pthread_mutex_init(&one_caller, NULL);
    reset_signal(&call);
    reset_signal(&barrier_round);
    num_workers = 0;
}

static void register_fork_handler(void) { pthread_atfork(NULL, NULL, reset_workers); }

static void start_workers(int wanted) {
    static pthread_once_t watched = PTHREAD_ONCE_INIT;
    pthread_once(&watched, register_fork_handler);
    while (num_workers < wanted) {
        const int thread = num_workers + 1;
        pthread_t started;
        workers[num_workers] = (Worker){thread, atomic_load(&call.number)};
        waiters[thread].pass_spin_ns = MAX_PASS_SPIN_NS;
        if (pthread_create(&started, NULL, work, workers + num_workers)) return;
        pthread_detach(started);
        num_workers++;
    }
}

void run_on_threads(Preparation *prepare, Task *task, void *argument, int num_threads) {
    pthread_mutex_lock(&one_caller);
    prepare(argument);
    start_workers((num_threads < MAX_THREADS ? num_threads : MAX_THREADS) - 1);
    current = task;
    current_argument = argument;
    atomic_store(&arrived, 0);
    own_thread = 0;
    own_team = num_threads <= num_workers ? num_threads : num_workers + 1;
    if (own_team > 1) {
        atomic_store_explicit(&waiters->core, this_core(), memory_order_relaxed);
        change(&call, (atomic_load(&call.number) / TEAMS + 1) * TEAMS + own_team);
    }
    task(argument, 0, own_team);
    barrier();
    pthread_mutex_unlock(&one_caller);
}

void barrier(void) {
    if (own_team == 1) return;
    const long long now = atomic_load(&barrier_round.number);
    Waiter *own = waiters + own_thread;
    atomic_store(&own->round, now);
    if (atomic_fetch_add(&arrived, 1) == own_team - 1) {
        atomic_store(&arrived, 0);
        change(&barrier_round, now + 1);
    } else
        wait_for_change(&barrier_round, now, MAX_BARRIER_SPIN_NS, &own->barrier_spin_ns);
    atomic_store_explicit(&own->core, this_core(), memory_order_relaxed);
}
