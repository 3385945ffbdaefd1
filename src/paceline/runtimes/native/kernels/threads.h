/* One pool of threads for the process: a pass runs on the caller's thread and on workers, all of which execute the same function. */
#ifndef PACELINE_THREADS_H
#define PACELINE_THREADS_H

typedef void Task(void *argument, int thread, int num_threads);
typedef void Preparation(void *argument);

/* Run `task` on `num_threads` threads and return when all are done; fewer where the system gives no more. One caller at a time: others
 * wait. What callers share is read and cleared in `prepare`, which runs once it is this caller's turn. */
void run_on_threads(Preparation *prepare, Task *task, void *argument, int num_threads);

/* Wait until all threads of the running task have come here. */
void barrier(void);

#endif
