/* The process's pool of threads: a pass runs on the caller's thread and on workers, which all execute the same function. */
#ifndef PACELINE_THREADS_H
#define PACELINE_THREADS_H

typedef void Task(void *argument, int thread, int num_threads);
typedef void Preparation(void *argument);

/* Run `task` on `num_threads` threads (fewer if the system grants no more) and return when all are done. Concurrent callers wait for one another;
 * `prepare` runs first, under the lock, to read and clear what callers share. */
void run_on_threads(Preparation *prepare, Task *task, void *argument, int num_threads);

/* Wait until all threads of the running task have reached the barrier. */
void barrier(void);

#endif
