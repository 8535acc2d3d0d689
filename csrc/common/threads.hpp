// A small pool of threads that run one body together, and the barrier they meet at.
//
// Kernels synchronise at every time step, so waiting is a short spin, then yielding: a spin alone collapses as soon as
// another process wants the core. Between jobs workers sleep.
#pragma once

#include <atomic>
#include <type_traits>

namespace egru {

// Meet `count` threads, any number of times.
class Barrier {
public:
    explicit Barrier(int count) : count_(count) {}
    void wait();

private:
    const int count_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> round_{0};
};

constexpr int max_team = 64;

// What a body knows of its team.
struct Team {
    int index;
    int size;
    Barrier* barrier;

    // Always inlined: these are called from sources compiled for one instruction set (see levels.hpp).
    [[gnu::always_inline]] void meet() const {
        if (size > 1) barrier->wait();
    }
    // This member's share of [0, n): contiguous, sizes differ by at most one, larger shares last: the last block of a
    // layer is often a short one.
    [[gnu::always_inline]] int begin(int n) const { return share(n, index); }
    [[gnu::always_inline]] int end(int n) const { return share(n, index + 1); }

private:
    [[gnu::always_inline]] int share(int n, int i) const { return (int)((long long)n * i / size); }
};

// Runs `body(team)` on up to `threads` threads (at most max_team), the caller among them, and returns when all are done. The team is
// smaller (down to the caller alone) when another call holds the pool, so results must not depend on its size.
void run_team(int threads, void (*body)(const Team&, void*), void* context);

template <class Body>
void run_team(int threads, Body&& body) {
    using Function = std::remove_reference_t<Body>;
    run_team(
        threads, [](const Team& team, void* context) { (*static_cast<Function*>(context))(team); },
        const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace egru
