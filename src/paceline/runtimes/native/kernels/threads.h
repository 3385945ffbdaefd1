/* The process's thread pool. A pass runs on the caller's thread and on worker threads, which all execute the same function. */
#ifndef PACELINE_THREADS_H
#define PACELINE_THREADS_H

typedef void Task(void *argument, int thread, int num_threads);
typedef void Preparation(void *argument);

/* Run `task` on num_threads threads, or fewer if the system cannot start so many, and return when all have finished. Concurrent calls run one after
 * another. Before the task, `prepare` (may be NULL) runs on the caller's thread, under the lock. */
void run_on_threads(Preparation *prepare, Task *task, void *argument, int num_threads);

/* Wait until all threads of the running task have called this function. */
void barrier(void);

#endif
