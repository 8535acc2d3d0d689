// A thread pool whose members run one function together, and a barrier for them.
//
// The threads are torch's where possible (openmp.hpp), else those of a pool, which sleep between jobs. Kernels
// synchronise at every step, so a wait spins briefly and then yields. Spinning alone would be very slow as soon as
// another process uses the core.
#pragma once

#include <atomic>
#include <type_traits>

namespace egru {

// A reusable barrier for `count` threads.
class Barrier {
public:
    explicit Barrier(int count) : count_(count) {}
    void set_count(int count) { count_.store(count, std::memory_order_relaxed); }
    void wait();

private:
    std::atomic<int> count_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> round_{0};
};

constexpr int max_team = 64;

// One member's view of its team.
struct Team {
    int index;
    int size;
    Barrier* barrier;

    // Always inlined, because sources compiled for one instruction set call them (see levels.hpp).
    [[gnu::always_inline]] void meet() const {
        if (size > 1) barrier->wait();
    }
    // This member's share of [0, n). Shares are contiguous and differ by at most one; larger shares come last, because
    // the last block of a layer is often a short one.
    [[gnu::always_inline]] int begin(int n) const { return share(n, index); }
    [[gnu::always_inline]] int end(int n) const { return share(n, index + 1); }

private:
    [[gnu::always_inline]] int share(int n, int i) const { return (int)((long long)n * i / size); }
};

// Run `body(team)` on at most `threads` threads (and at most max_team), including the caller, and wait for all of them.
// If another call uses the pool, the caller runs alone, so results must not depend on the size of the team.
void run_team(int threads, void (*body)(const Team&, void*), void* context);

template <class Body>
void run_team(int threads, Body&& body) {
    using Function = std::remove_reference_t<Body>;
    run_team(
        threads, [](const Team& team, void* context) { (*static_cast<Function*>(context))(team); },
        const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace egru
