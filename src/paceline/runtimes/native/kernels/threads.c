/* Threads wait in two ways: they spin while the one they wait for is likely to run, and sleep soon where it is not. A spinning thread
 * keeps a core from whom it waits for, and from other programs; a sleeping one takes tens of microseconds to wake. */
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

enum { MAX_THREADS = 256, TEAMS = 512, SPINS_A_LOOK = 64 };
/* How long a wait spins: at a barrier at most what a piece of work takes, in front of the next pass what the host takes between two. */
enum { SHORTEST_SPIN_NS = 4000, AT_BARRIER_NS = 100000, FOR_A_PASS_NS = 500000 };

/* A number that threads wait for to change, and how many of them sleep. */
typedef struct {
    _Alignas(64) atomic_llong number;
    atomic_int sleepers;
    pthread_mutex_t lock;
    pthread_cond_t changed;
} Signal;

#define SIGNAL {1, 0, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER}

static pthread_mutex_t one_caller = PTHREAD_MUTEX_INITIALIZER;
/* The number of the call under way times TEAMS, plus the threads that serve it: read at once, so that no worker takes the team of one
 * call for that of the next. */
static Signal call = SIGNAL;
static Signal barrier_round = SIGNAL;
static _Alignas(64) atomic_int arrived;
static int num_workers;
static Task *current;
static void *current_argument;

/* What a thread knows of its own waits; on a line of its own, since it is written at each barrier. */
typedef struct {
    _Alignas(64) atomic_int core; /* where it ran when it last did something; -1 = the system does not say */
    atomic_llong round;           /* the barrier it waits at or came through last; 0 = none yet */
    long long spin_at_barrier_ns, spin_for_a_pass_ns;
} Waiter;

static Waiter waiters[MAX_THREADS];
/* Of the call that a thread serves. Who came through its last barrier may begin the next call while others still look at this one. */
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

/* Whether someone who is waited for was last seen on this thread's own core: he cannot run while this thread spins. */
static int holds_a_partner_up(int is_at_barrier) {
    const int core = this_core(), members = is_at_barrier ? own_team : 1;
    if (core < 0) return 0;
    for (int other = 0; other < members; other++) {
        if (other == own_thread || atomic_load_explicit(&waiters[other].core, memory_order_relaxed) != core) continue;
        if (!is_at_barrier || atomic_load(&waiters[other].round) != atomic_load(&waiters[own_thread].round)) return 1;
    }
    return 0;
}

/* Wait until the signal has another number than `seen`. A wait that a longer spin would have covered makes the next one spin longer, one
 * that took longer than the longest spin makes it shorter: where partners get no core there is no use in it. */
static void wait_for_change(Signal *signal, long long seen, long long longest_ns, long long *spin_ns) {
    long long start = 0;
    for (int spins = 1; atomic_load(&signal->number) == seen; spins++) {
        RELAX();
        if (spins % SPINS_A_LOOK) continue;
        const long long now = now_ns();
        if (!start) start = now;
        if (now - start < *spin_ns && !holds_a_partner_up(signal == &barrier_round)) continue;
        pthread_mutex_lock(&signal->lock);
        atomic_fetch_add(&signal->sleepers, 1);
        while (atomic_load(&signal->number) == seen) pthread_cond_wait(&signal->changed, &signal->lock);
        atomic_fetch_sub(&signal->sleepers, 1);
        pthread_mutex_unlock(&signal->lock);
        const long long next = now_ns() - start < longest_ns ? 2 * *spin_ns : *spin_ns / 2;
        *spin_ns = next > longest_ns ? longest_ns : next < SHORTEST_SPIN_NS ? SHORTEST_SPIN_NS : next;
    }
}

static void change(Signal *signal, long long number) {
    atomic_store(&signal->number, number);
    if (!atomic_load(&signal->sleepers)) return; /* whoever is about to sleep counts himself first and looks at the number again */
    pthread_mutex_lock(&signal->lock);
    pthread_cond_broadcast(&signal->changed);
    pthread_mutex_unlock(&signal->lock);
}

typedef struct {
    int thread;
    long long seen; /* the last call that is not this worker's business */
} Worker;

static Worker workers[MAX_THREADS];

static void *work(void *own) {
    long long seen = ((Worker *)own)->seen;
    own_thread = ((Worker *)own)->thread;
    Waiter *waiter = waiters + own_thread;
    for (;;) {
        wait_for_change(&call, seen, FOR_A_PASS_NS, &waiter->spin_for_a_pass_ns);
        seen = atomic_load(&call.number);
        own_team = (int)(seen % TEAMS);
        if (own_thread >= own_team) continue;
        atomic_store_explicit(&waiter->core, this_core(), memory_order_relaxed);
        current(current_argument, own_thread, own_team);
        barrier();
    }
    return NULL;
}

static void forget_sleepers(Signal *signal) {
    pthread_mutex_init(&signal->lock, NULL);
    pthread_cond_init(&signal->changed, NULL);
    atomic_store(&signal->sleepers, 0);
}

/* A forked child has no workers, and whoever held or waited for a lock is not there any more. */
static void forget_workers(void) {
    pthread_mutex_init(&one_caller, NULL);
    forget_sleepers(&call);
    forget_sleepers(&barrier_round);
    num_workers = 0;
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, forget_workers); }

static void start_workers(int wanted) {
    static pthread_once_t watched = PTHREAD_ONCE_INIT;
    pthread_once(&watched, watch_forks);
    while (num_workers < wanted) {
        const int thread = num_workers + 1;
        pthread_t started;
        workers[num_workers] = (Worker){thread, atomic_load(&call.number)};
        waiters[thread].spin_for_a_pass_ns = FOR_A_PASS_NS;
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
        wait_for_change(&barrier_round, now, AT_BARRIER_NS, &own->spin_at_barrier_ns);
    atomic_store_explicit(&own->core, this_core(), memory_order_relaxed);
}
