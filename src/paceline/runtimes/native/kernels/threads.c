/* The thread pool. A waiting thread first spins, because waking a sleeping thread takes tens of microseconds. Then it sleeps, because a spinning
 * thread occupies a core that other threads may need. The spin time adapts to the length of past waits. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

int is_one_stream_best; /* see panels.h */

#if defined(__x86_64__)
#define SPIN_PAUSE() __builtin_ia32_pause()
/* Run the instruction cpuid. Windows has no function that reports all instruction sets of a processor. */
void paceline_cpuid(uint32_t leaf, uint32_t subleaf, uint32_t *result) {
    __asm__("cpuid" : "=a"(result[0]), "=b"(result[1]), "=c"(result[2]), "=d"(result[3]) : "a"(leaf), "c"(subleaf));
}

__attribute__((constructor)) static void detect_zen_5(void) {
    uint32_t version[4];
    paceline_cpuid(1, 0, version);
    is_one_stream_best = (version[0] >> 8 & 15) + (version[0] >> 20 & 255) == 26; /* Zen 5 */
}
#else
#define SPIN_PAUSE() ((void)0)
#endif

enum { MAX_THREADS = 256, CALL_STRIDE = 512, SPINS_PER_CHECK = 64 };
/* Limits of the spin time. At a barrier, it should cover a piece of work; between two passes, the caller's work. */
enum { MIN_SPIN_NS = 4000, MAX_BARRIER_SPIN_NS = 100000, MAX_PASS_SPIN_NS = 500000 };

/* A value whose changes threads wait for, and the number of threads that sleep until its next change. */
typedef struct {
    _Alignas(64) atomic_llong value;
    atomic_int sleepers;
    pthread_mutex_t lock;
    pthread_cond_t changed;
} Signal;

#define SIGNAL {1, 0, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER}

static pthread_mutex_t caller_lock = PTHREAD_MUTEX_INITIALIZER;
/* call_signal.value is the number of the current call times CALL_STRIDE, plus the call's number of threads. Both are in one variable, so that a
 * worker cannot combine the number of one call with the threads of another. */
static Signal call_signal = SIGNAL;
static Signal barrier_signal = SIGNAL;
static _Alignas(64) atomic_int num_arrived;
static int num_workers;
static Task *current_task;
static void *current_argument;

/* A thread's data about its waits, in its own cache line, because it is written at each barrier. */
typedef struct {
    _Alignas(64) atomic_int core; /* core on which the thread last ran; -1 = unknown */
    atomic_llong last_barrier;           /* number of the last barrier that the thread has reached; 0 = none yet */
    long long barrier_spin_ns, pass_spin_ns;
} Waiter;

static Waiter waiters[MAX_THREADS];
/* This thread's index, and the number of threads of its call. Thread-local, because a fast thread may start the next call before others. */
static _Thread_local int this_thread, num_team_threads;

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

/* Return whether an awaited thread last ran on this thread's core: it may not get to run while this thread spins. */
static int blocks_awaited_thread(int is_at_barrier) {
    const int core = this_core(), members = is_at_barrier ? num_team_threads : 1;
    if (core < 0) return 0;
    for (int other = 0; other < members; other++) {
        if (other == this_thread || atomic_load_explicit(&waiters[other].core, memory_order_relaxed) != core) continue;
        if (!is_at_barrier || atomic_load(&waiters[other].last_barrier) != atomic_load(&waiters[this_thread].last_barrier)) return 1;
    }
    return 0;
}

/* Wait until the signal's value differs from `seen`. If spinning for at most longest_ns would have avoided a sleep, the next wait spins twice as
 * long; after a longer sleep, half as long. */
static void wait_for_change(Signal *signal, long long seen, long long longest_ns, long long *spin_ns) {
    long long start = 0;
    for (int spins = 1; atomic_load(&signal->value) == seen; spins++) {
        SPIN_PAUSE();
        if (spins % SPINS_PER_CHECK) continue;
        const long long now = now_ns();
        if (!start) start = now;
        if (now - start < *spin_ns && !blocks_awaited_thread(signal == &barrier_signal)) continue;
        pthread_mutex_lock(&signal->lock);
        atomic_fetch_add(&signal->sleepers, 1);
        while (atomic_load(&signal->value) == seen) pthread_cond_wait(&signal->changed, &signal->lock);
        atomic_fetch_sub(&signal->sleepers, 1);
        pthread_mutex_unlock(&signal->lock);
        const long long next = now_ns() - start < longest_ns ? 2 * *spin_ns : *spin_ns / 2;
        *spin_ns = next > longest_ns ? longest_ns : next < MIN_SPIN_NS ? MIN_SPIN_NS : next;
    }
}

static void set_signal(Signal *signal, long long value) {
    (void)atomic_exchange(&signal->value, value); /* atomic_store would suffice, but qemu 7.2 reorders it after the load below */
    if (!atomic_load(&signal->sleepers)) return; /* safe, because a thread increments the counter, then reads the value again, and only then sleeps */
    pthread_mutex_lock(&signal->lock);
    pthread_cond_broadcast(&signal->changed);
    pthread_mutex_unlock(&signal->lock);
}

typedef struct {
    int thread;
    long long seen; /* value of call_signal when this worker was created */
} Worker;

static Worker workers[MAX_THREADS];

static void *run_worker(void *worker) {
    long long seen = ((Worker *)worker)->seen;
    this_thread = ((Worker *)worker)->thread;
    Waiter *waiter = waiters + this_thread;
    for (;;) {
        wait_for_change(&call_signal, seen, MAX_PASS_SPIN_NS, &waiter->pass_spin_ns);
        seen = atomic_load(&call_signal.value);
        num_team_threads = (int)(seen % CALL_STRIDE);
        if (this_thread >= num_team_threads) continue;
        atomic_store_explicit(&waiter->core, this_core(), memory_order_relaxed);
        current_task(current_argument, this_thread, num_team_threads);
        barrier();
    }
    return NULL;
}

static void reset_signal(Signal *signal) {
    pthread_mutex_init(&signal->lock, NULL);
    pthread_cond_init(&signal->changed, NULL);
    atomic_store(&signal->sleepers, 0);
}

/* Reset the pool in a forked child process: it has no worker threads, and locks may be held by threads that exist only in the parent. */
static void reset_workers(void) {
    pthread_mutex_init(&caller_lock, NULL);
    reset_signal(&call_signal);
    reset_signal(&barrier_signal);
    num_workers = 0;
}

static void register_fork_handler(void) { pthread_atfork(NULL, NULL, reset_workers); }

static void start_workers(int num_needed) {
    static pthread_once_t registered = PTHREAD_ONCE_INIT;
    pthread_once(&registered, register_fork_handler);
    while (num_workers < num_needed) {
        const int thread = num_workers + 1;
        pthread_t started;
        workers[num_workers] = (Worker){thread, atomic_load(&call_signal.value)};
        waiters[thread].pass_spin_ns = MAX_PASS_SPIN_NS;
        if (pthread_create(&started, NULL, run_worker, workers + num_workers)) return;
        pthread_detach(started);
        num_workers++;
    }
}

void run_on_threads(Preparation *prepare, Task *task, void *argument, int num_threads) {
    pthread_mutex_lock(&caller_lock);
    if (prepare) prepare(argument);
    start_workers((num_threads < MAX_THREADS ? num_threads : MAX_THREADS) - 1);
    current_task = task;
    current_argument = argument;
    atomic_store(&num_arrived, 0);
    this_thread = 0;
    num_team_threads = num_threads <= num_workers ? num_threads : num_workers + 1;
    if (num_team_threads > 1) {
        atomic_store_explicit(&waiters->core, this_core(), memory_order_relaxed);
        set_signal(&call_signal, (atomic_load(&call_signal.value) / CALL_STRIDE + 1) * CALL_STRIDE + num_team_threads);
    }
    task(argument, 0, num_team_threads);
    barrier();
    pthread_mutex_unlock(&caller_lock);
}

void barrier(void) {
    if (num_team_threads == 1) return;
    const long long now = atomic_load(&barrier_signal.value);
    Waiter *own = waiters + this_thread;
    atomic_store(&own->last_barrier, now);
    if (atomic_fetch_add(&num_arrived, 1) == num_team_threads - 1) {
        atomic_store(&num_arrived, 0);
        set_signal(&barrier_signal, now + 1);
    } else wait_for_change(&barrier_signal, now, MAX_BARRIER_SPIN_NS, &own->barrier_spin_ns);
    atomic_store_explicit(&own->core, this_core(), memory_order_relaxed);
}
