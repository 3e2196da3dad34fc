// Threads that sleep until there is a task, run it together with whoever brings it, and go back to sleep: what
// models/team.py does with Python's threads, without their lock.
//
// It does not know what a task does. The one trick: all that a thread reads before it has a job lies in the task
// itself, and tasks are kept for the next ones. So nobody waits for a thread that comes late: it finds every job taken.
#pragma once
#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "team.h"

using Body = void (*)(i64 phase, const i64 *words);

struct alignas(PHASE_STRIDE) Phase { i64 taken, unused[PHASE_STRIDE / 16 - 1], done; };

struct Task {
    Body body = nullptr;
    std::vector<Phase> phases;
    std::vector<i64> words;
    i64 room = 0, users = 0;  // helpers that may still come; threads that are inside

    void run() const { body((i64)phases.data(), words.data()); }
};

class Crew {
    std::mutex lock;
    std::condition_variable called;
    std::vector<std::unique_ptr<Task>> tasks;
    i64 num_helpers = 0;

    void help() {
        std::unique_lock<std::mutex> held(lock);
        for (;;) {
            Task *task = nullptr;
            for (const auto &each : tasks)
                if (each->room > 0) task = each.get();
            if (!task) {
                called.wait(held);
                continue;
            }
            task->room--, task->users++;
            held.unlock();
            task->run();
            held.lock();
            task->users--;
        }
    }

    // Fewer than wanted, down to none, give the same results: whoever comes takes the next job.
    void hire(i64 wanted) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for Python's main thread, which they shall wake
        try {
            for (; num_helpers < wanted; num_helpers++) std::thread([this] { help(); }).detach();
        } catch (const std::system_error &) {
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    Task *unused() {
        for (const auto &task : tasks)
            if (!task->users) return task.get();
        tasks.push_back(std::make_unique<Task>());
        return tasks.back().get();
    }

public:
    // Run `body` on this thread and on up to `num_threads` - 1 helpers; returns when this thread's call does. fill: puts
    // what the body reads into the task's words.
    template <class Fill> void run(i64 num_threads, i64 num_phases, Body body, Fill fill) {
        std::unique_lock<std::mutex> held(lock);
        Task *task = unused();
        task->users = 1;
        task->body = body;
        task->phases.assign(num_phases, Phase{});
        fill(task->words);
        if (num_helpers < num_threads - 1) hire(num_threads - 1);
        task->room = num_threads - 1;
        held.unlock();
        if (num_threads > 1) called.notify_all();
        task->run();
        held.lock();
        task->room = 0;
        task->users--;
    }
};

// Never destroyed: helpers sleep in it until the process ends. A forked child has none of them, and perhaps a lock that
// nobody holds any more, so it begins anew.
static Crew &crew() {
    alignas(Crew) static char place[sizeof(Crew)];
    static Crew *const made = [] {
        pthread_atfork(nullptr, nullptr, [] { new (place) Crew; });
        return new (place) Crew;
    }();
    return *made;
}
