#include "common/threads.hpp"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include "common/openmp.hpp"

namespace egru {
namespace {

constexpr int spins = 2000;  // about 10 to 50 us: longer than a balanced step, shorter than a time slice

void pause() {
#if defined(EGRU_X86)
    __builtin_ia32_pause();
#elif defined(EGRU_ARM)
    asm volatile("isb");  // waits for about as long as the pause of x86 processors, unlike yield
#endif
}

template <class Ready>
void spin_then_yield(Ready ready) {
    for (int i = 0; i < spins; ++i) {
        if (ready()) return;
        pause();
    }
    while (!ready()) std::this_thread::yield();
}

struct Job {
    void (*body)(const Team&, void*) = nullptr;
    void* context = nullptr;
    Barrier* barrier = nullptr;
    int size = 0;
};

// Run a job on torch's threads, if possible. Members of the team beyond the requested number do nothing.
bool run_shared(int threads, void (*body)(const Team&, void*), void* context) {
    Barrier barrier(threads);
    Job job{body, context, &barrier, threads};
    return run_openmp(
        threads,
        [](void* data, int index, int size) {
            const Job& job = *static_cast<Job*>(data);
            if (size > job.size) size = job.size;
            job.barrier->set_count(size);  // every member sets the same value before it waits
            if (index < size) job.body(Team{index, size, job.barrier}, job.context);
        },
        &job);
}

class Pool {
public:
    void run(int threads, void (*body)(const Team&, void*), void* context) {
        std::unique_lock<std::mutex> owner(busy_, std::try_to_lock);
        if (threads > 1 && owner.owns_lock() && run_shared(threads, body, context)) return;
        if (threads <= 1 || !owner.owns_lock() || !grow(threads - 1)) {
            Barrier alone(1);
            body(Team{0, 1, &alone}, context);
            return;
        }
        Barrier barrier(threads);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = Job{body, context, &barrier, threads};
            running_.store(threads - 1, std::memory_order_relaxed);
            round_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        body(Team{0, threads, &barrier}, context);
        spin_then_yield([this] { return running_.load(std::memory_order_acquire) == 0; });
    }

private:
    // Start threads until there are `workers`; return false if the system refuses.
    bool grow(int workers) {
        try {
            for (; workers_ < workers; ++workers_)
                std::thread(&Pool::work, this, workers_ + 1, round_.load(std::memory_order_relaxed)).detach();
        } catch (...) {
            return false;
        }
        return true;
    }

    void work(int index, unsigned seen) {
        for (;;) {
            for (int i = 0; i < spins && round_.load(std::memory_order_acquire) == seen; ++i) pause();
            Job job;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return round_.load(std::memory_order_relaxed) != seen; });
                seen = round_.load(std::memory_order_relaxed);
                job = job_;
            }
            if (index >= job.size) continue;
            job.body(Team{index, job.size, job.barrier}, job.context);
            running_.fetch_sub(1, std::memory_order_release);
        }
    }

    std::mutex busy_;   // locked by the call that uses the pool
    std::mutex mutex_;  // guards job_ and the rounds
    std::condition_variable wake_;
    Job job_;
    int workers_ = 0;
    std::atomic<unsigned> round_{0};
    std::atomic<int> running_{0};
};

// Never destroyed: workers may wait in it when the process ends. A forked child gets a new pool because it has no
// workers.
Pool* pool = nullptr;

Pool& shared_pool() {
    static const bool ready = [] {
        pool = new Pool;
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
#endif
        return true;
    }();
    (void)ready;
    return *pool;
}

}  // namespace

void Barrier::wait() {
    const unsigned round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_.load(std::memory_order_relaxed)) {
        arrived_.store(0, std::memory_order_relaxed);
        round_.store(round + 1, std::memory_order_release);
        return;
    }
    spin_then_yield([&] { return round_.load(std::memory_order_acquire) != round; });
}

void run_team(int threads, void (*body)(const Team&, void*), void* context) {
    shared_pool().run(threads < max_team ? threads : max_team, body, context);
}

}  // namespace egru
